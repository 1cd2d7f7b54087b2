"""Whether a committed plan is still good: the function, the verb, and pytest's fixture; each with plans that are not."""

import json
import math
import re
import subprocess
import sys
import textwrap
from dataclasses import replace

import pytest

from autoshard.api import check, plan
from autoshard.cli.model import load_model
from autoshard.mesh import Mesh
from autoshard.solution import Placed, Solution
from tests.test_cli import ROOT, check_refused, run

MODEL = f"{ROOT}/models/mlp.py:mlp"
SIZES = {"layers": 1, "batch": 16384, "width": 512, "hidden": 2048}
MESH = Mesh.from_bandwidths((2, 2), intra_node_bandwidth=100e9, inter_node_bandwidth=50e9, tf32=True)
UP = "layers.0.up.weight"


def model(**sizes) -> tuple:
    return load_model(MODEL, SIZES | sizes, training=True)


def planned(mesh: Mesh = MESH, **asked) -> Solution:
    settings = {"training": True, "baselines": False, "assumptions": {"model": MODEL, "set": SIZES}, "objective": "serial"}
    return plan(*model(), mesh, **{**settings, **asked})


@pytest.fixture(scope="module")
def solution() -> Solution:
    return planned()


@pytest.fixture(scope="module")
def worse(solution) -> Solution:
    """Data parallel on one axis only, in which nothing says that it was asked for."""
    found = planned(pins={"input_0": "S(0),R", "addmm": "S(0),R", "mm_2": "S(0),R"})
    assert found.cost > 1.2 * solution.cost
    return replace(found, assumptions={**found.assumptions, "pins": {}})


# --- plans that are good


def test_a_plan_is_good_for_what_it_was_made_for(solution):
    found = check(*model(), solution)
    assert found.ok and found.reasons == () and found.notes == ()
    assert found.cost == pytest.approx(solution.cost) and found.best == pytest.approx(solution.cost) and found.excess <= 1e-9
    assert found.peak_bytes == solution.peak_bytes and "is good: it costs" in found.sentence()


def test_without_a_new_plan_a_bound_is_enough(solution):
    found = check(*model(), solution, solve=False, within=0.001)
    assert found.ok and math.isinf(found.best) and 0 < found.bound <= solution.cost * (1 + 1e-9)


def test_a_plan_with_pins_is_judged_among_plans_with_these_pins(solution):
    pinned = planned(pins={"input_0": "S(0),R"})
    assert pinned.cost > 1.05 * solution.cost and check(*model(), pinned).ok
    assert not check(*model(), replace(pinned, assumptions={**pinned.assumptions, "pins": {}})).ok


def test_a_tied_plan_is_judged_among_tied_plans():
    sizes = SIZES | {"layers": 2, "batch": 4096}
    module, inputs = load_model(MODEL, sizes, training=True)
    tied = plan(module, inputs, MESH, training=True, baselines=False, tie_blocks=True, objective="serial")
    found = check(module, inputs, tied, within=0.0)
    assert found.ok and found.cost == pytest.approx(tied.cost) and found.best == pytest.approx(tied.cost)


def test_another_version_is_noted_and_does_no_harm(solution):
    old = replace(solution, assumptions={**solution.assumptions, "torch_version": "2.9.1"})
    found = check(*model(), old)
    assert found.ok and len(found.notes) == 1 and "torch_version: 2.9.1 when planned" in found.notes[0]


def test_other_prices_are_noted_and_the_cost_is_that_of_today(solution):
    faster = Mesh.from_bandwidths((2, 2), intra_node_bandwidth=110e9, inter_node_bandwidth=55e9, tf32=True)
    found = check(*model(), solution, mesh=faster)
    assert found.ok and found.cost < solution.cost and found.planned_cost == solution.cost and len(found.notes) == 2
    far = Mesh.from_bandwidths((2, 2), intra_node_bandwidth=1e9, inter_node_bandwidth=5e12, tf32=True)
    moved = check(*model(), solution, mesh=far)
    assert not moved.ok and moved.cost > 1.05 * moved.best and "more than a plan that there is now" in moved.reasons[0]


# --- plans that are not


def test_another_graph_is_stale_unless_the_layouts_are_all_that_is_asked_for(solution):
    found = check(*model(batch=15360), solution)
    assert not found.ok and found.reasons == ("the model's sizes, dtypes or constants differ from when this was planned",)
    assert math.isfinite(found.cost) and found.bound > 0  # what it costs is said all the same
    assert check(*model(batch=15360), solution, same_graph=False).ok
    renamed = replace(solution, fingerprint={**solution.fingerprint, "graph": "as another version writes it"})
    found = check(*model(), renamed)
    assert found.ok and found.notes == ("the model's sizes, dtypes or constants differ from when this was planned",)
    rewired = replace(renamed, fingerprint={**renamed.fingerprint, "structure": "of other ops"})
    assert "wired or parameterised differently" in check(*model(), rewired).reasons[0]
    wider = check(*model(hidden=4096), solution)
    assert len(wider.reasons) >= 1 and "parameters of another size" in wider.reasons[0]


def test_another_depth_is_stale_and_cannot_be_judged(solution):
    found = check(*model(layers=2), solution, same_graph=False)
    assert not found.ok and "ops of the model have no layout in the plan" in found.reasons[0] and math.isinf(found.cost)
    assert found.sentence("x.json").startswith("x.json is not good any more: ") and found.sentence().endswith("; plan again")


def test_ops_of_another_torch_are_named_and_planned_anew_with_the_same_pins(solution):
    """As if an older torch had traced the plan's program, with another op in place of addmm."""

    def older(name: str) -> str:
        return name.replace("addmm", "linear_of_old")

    layouts = {older(name): placed for name, placed in solution.layouts.items()}
    pinned = {**solution.assumptions, "torch_version": "2.1.0", "pins": {UP: "R,R"}}
    found = check(*model(), replace(solution, layouts=layouts, assumptions=pinned), time_limit=30)
    (said,) = [reason for reason in found.reasons if "traced it" in reason]
    assert re.fullmatch(r"torch 2\.1\.0 traced it then and torch \S+ now, with (\d) more addmm, \1 fewer linear_of_old", said)
    assert not found.ok and found.best == pytest.approx(planned(pins={UP: "R,R"}).cost)
    same = check(*model(), replace(solution, layouts=layouts), time_limit=30)  # the same torch: another model
    assert not any("traced it" in reason for reason in same.reasons) and math.isinf(same.best)


def test_a_plan_of_the_shortest_time_line_is_judged_by_time_lines():
    mesh = Mesh.from_bandwidths((2,), intra_node_bandwidth=100e9, tf32=True)
    plan = planned(mesh, objective="overlapped", baselines=True)  # the usual plans are where the search begins, too
    slow = planned(mesh, objective="overlapped", pins={"input_*": "R", "addmm*": "R"})
    found = check(*model(), plan)
    assert found.ok and found.cost == pytest.approx(found.planned_cost) == plan.objective_seconds
    assert 0 < found.bound <= found.best <= found.cost
    unpinned = replace(slow, assumptions={**slow.assumptions, "pins": {}})
    assert slow.objective_seconds > 1.05 * plan.objective_seconds and check(*model(), slow).ok
    assert "more than a plan that there is now" in check(*model(), unpinned).reasons[0]
    in_no_time = replace(plan, overlapped={**plan.overlapped, "bound_seconds": 0.0})  # the time limit ended the search before its bound
    without = check(*model(), in_no_time, solve=False)
    assert without.ok and 0 < without.bound
    assert "no better plan was found now" in replace(without, bound=0.0, best=without.cost).sentence()


def test_another_mesh_is_stale(solution):
    found = check(*model(), solution, mesh=Mesh.from_bandwidths((4,)))
    assert found.reasons == ("planned for mesh 2x2, but this mesh is 4",)


def test_a_worse_plan_is_found_out_with_and_without_planning(worse, solution):
    found = check(*model(), worse)
    assert not found.ok and found.best == pytest.approx(solution.cost) and found.excess == pytest.approx(worse.cost / solution.cost - 1)
    assert "more than a plan that there is now" in found.reasons[0]
    assert check(*model(), worse, within=found.excess + 0.01).ok and not check(*model(), worse, within=found.excess - 0.01).ok
    bounded = check(*model(), worse, solve=False)
    assert not bounded.ok and "is not shown to be within 5%" in bounded.reasons[0] and bounded.bound <= solution.cost * (1 + 1e-9)


def test_a_plan_over_its_memory_limit_is_found_out(solution):
    small = replace(solution, assumptions={**solution.assumptions, "memory_limit": solution.peak_bytes - 1e6})
    found = check(*model(), small)
    assert not found.ok and "per device, over the limit of" in found.reasons[0] and found.memory_limit == solution.peak_bytes - 1e6


def test_layouts_and_pins_that_are_none_of_todays_are_found_out(solution):
    row = solution.layouts["addmm"]
    assert row.outputs[0] is not None and row.outputs[0] != "S(1),S(1)"
    odd = replace(solution, layouts={**solution.layouts, "addmm": Placed(row.inputs, ("S(1),S(1)",), row.hubs)})
    assert "addmm: no candidate of today's rules" in check(*model(), odd).reasons[0]
    name = replace(solution, assumptions={**solution.assumptions, "pins": {"layers.7.up.weight": "R,R"}})
    assert "the model has no such tensor" in check(*model(), name).reasons[0]
    other = "R,R" if solution.parameters[UP]["layout"] != "R,R" else "S(0),R"
    broken = replace(solution, assumptions={**solution.assumptions, "pins": {UP: other}})
    assert "or its own pins, are no longer possible" in check(*model(), broken).reasons[0]


@pytest.mark.parametrize("options", [{"within": -0.1}, {"within": math.nan}, {"time_limit": 0.0}])
def test_bad_options_are_refused(solution, options):
    with pytest.raises(ValueError, match="expected 0 or more"):
        check(*model(), solution, **options)


# --- the verb


@pytest.fixture
def files(tmp_path, solution, worse) -> tuple[str, str]:
    paths = str(tmp_path / "plan.json"), str(tmp_path / "worse.json")
    for found, path in zip((solution, worse), paths, strict=True):
        found.save(path)
    return paths


def test_the_verb_says_yes_and_no_by_its_exit_code(capsys, files):
    good, bad = files
    code, out, _ = run(capsys, "check", good, "--trust", "--json", "--quiet")
    record = json.loads(out)
    assert code == 0 and record["ok"] and record["reasons"] == [] and record["excess"] < 1e-9
    assert {"cost_seconds", "planned_seconds", "best_seconds", "bound_seconds", "within", "peak_bytes", "notes", "message"} <= set(record)
    code, out, _ = run(capsys, "check", bad, "--trust", "--json", "--quiet")
    record = json.loads(out)
    assert code == 1 and not record["ok"] and len(record["reasons"]) == 1 and record["excess"] > 0.2
    code, out, _ = run(capsys, "check", bad, "--trust", "--no-solve", "--within", "0.01", "--quiet")
    assert code == 1 and "not shown to be within 1%" in " ".join(out.split())


def test_the_verb_takes_another_model(capsys, files):
    words = [word for key, value in SIZES.items() if key != "batch" for word in ("--set", f"{key}={value}")] + ["--batch", "8192"]
    code, out, _ = run(capsys, "check", files[0], MODEL, *words, "--quiet")
    assert code == 1 and "sizes, dtypes or constants differ" in " ".join(out.split()) and max(map(len, out.splitlines())) <= 100
    assert run(capsys, "check", files[0], MODEL, *words, "--any-graph", "--within", "400%", "--quiet")[0] == 0


def test_the_help_has_an_example(capsys):
    code, out, _ = run(capsys, "check", "--help")
    assert code == 0 and "\n  autoshard check " in out and "--json" in out


@pytest.mark.parametrize("within", ["-1%", "five", "nan", "inf"])
def test_a_share_that_is_none_is_refused(capsys, files, within):
    check_refused(capsys, ("check", files[0], "--within", within), "expected a share of 0 or more, for example 5% or 0.05")


# --- the fixture

TESTS = """
    from models import mlp

    def net(**sizes):
        return mlp.mlp(**{**SIZES, **sizes})

    def test_good(autoshard_check):
        assert autoshard_check("plans/plan.json", *net()).excess < 1e-9

    def test_stale(autoshard_check):
        autoshard_check("plans/plan.json", *net(layers=2))

    def test_worse(autoshard_check):
        autoshard_check("plans/worse.json", *net())

    def test_worse_is_allowed(autoshard_check):
        autoshard_check("plans/worse.json", *net(), within=4.0)
"""


class Reports:
    """A plugin that keeps what became of each test, and what it said."""

    def __init__(self) -> None:
        self.of: dict[str, tuple[str, str]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.of[report.nodeid.rpartition("::")[2]] = (report.outcome, report.longreprtext)


def test_the_fixture_passes_good_plans_and_fails_stale_and_worse_ones(tmp_path, solution, worse):
    """pytest as a user runs it, in this process: the fixture is found by the package's entry point, nothing is handed over."""
    below = tmp_path / "below"  # paths are those from the root folder, not from the test's
    for folder in (tmp_path / "plans", below):
        folder.mkdir()
    solution.save(tmp_path / "plans" / "plan.json")
    worse.save(tmp_path / "plans" / "worse.json")
    (tmp_path / "pytest.ini").write_text(f"[pytest]\npythonpath = {ROOT}\n")
    (below / "test_kept_plans.py").write_text(f"SIZES = {SIZES}\n" + textwrap.dedent(TESTS))
    reports = Reports()
    words = ["-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), "-c", str(tmp_path / "pytest.ini"), str(below)]
    code = pytest.main(words, [reports])
    sys.modules.pop("test_kept_plans", None)  # pytest imports it by this name, and refuses another file of it in the same process
    assert code == pytest.ExitCode.TESTS_FAILED
    outcomes = {name: outcome for name, (outcome, _) in reports.of.items()}
    assert outcomes == {"test_good": "passed", "test_stale": "failed", "test_worse": "failed", "test_worse_is_allowed": "passed"}
    stale, dear = reports.of["test_stale"][1], reports.of["test_worse"][1]
    assert re.fullmatch(r"plans/plan.json is not good any more: \d+ ops of the model have no layout in the plan: .*; plan again", stale)
    assert re.fullmatch(r"plans/worse.json is not good any more: it costs .* more than a plan that there is now .*; plan again", dear)


def test_pytest_finds_the_fixture_and_it_costs_nothing_to_those_who_do_not_use_it():
    script = "import sys, autoshard.pytest_plugin; sys.exit(any(m in sys.modules for m in ('torch', 'numpy', 'rich', 'autoshard.api')))"
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT)
