"""Prices with errors, and how much a plan hangs on them."""

import json
from dataclasses import replace

import numpy as np
import pytest

from autoshard.api import plan, robustness
from autoshard.capture import capture
from autoshard.cli import main
from autoshard.cli.model import load_model
from autoshard.cost import collective_seconds
from autoshard.explain.robustness import link_groups, scaled
from autoshard.mesh import DEVICES, Axis, LinkCurve, Mesh
from autoshard.planning.describe import choice_of, layouts_of, results_of
from autoshard.planning.instance import formulate_for
from autoshard.planning.options import Options
from autoshard.problem import evaluate
from autoshard.solution import Solution, parts, price_errors
from autoshard.strategies import candidates
from tests.helpers_solutions import linear_solution
from tests.test_cli import ROOT, check_refused, run

MODEL = f"{ROOT}/models/mlp.py:mlp"
SETTINGS = {"layers": 1, "batch": 16384, "width": 512, "hidden": 2048}
UNTESTED = replace(DEVICES["h100"], kernels=None)  # a data sheet alone: the interval is made of the usual errors of its parts
MESH = Mesh.from_bandwidths((2, 2), intra_node_bandwidth=100e9, inter_node_bandwidth=50e9, device=UNTESTED, tf32=True)


def planned(mesh: Mesh) -> Solution:
    module, inputs = load_model(MODEL, SETTINGS, training=True)
    return plan(module, inputs, mesh, training=True, baselines=False, objective="serial", assumptions={"model": MODEL, "set": SETTINGS})


@pytest.fixture(scope="module")
def solution() -> Solution:
    return planned(MESH)


# --- errors and the interval


def measured_mesh() -> Mesh:
    curve = LinkCurve("all_gather", (1e3, 1e6), (1e-5, 1e-4), 1e-10, error=0.05)
    return replace(MESH, axes=(MESH.axes[0], replace(MESH.axes[1], curves=(curve,))), device=replace(MESH.device, error=0.1))


def test_a_plan_keeps_the_errors_of_its_prices(solution, tmp_path):
    measured = replace(solution, mesh=measured_mesh(), prices=price_errors(measured_mesh()))
    measured.save(tmp_path / "plan.json")
    data = json.loads((tmp_path / "plan.json").read_text())
    assert data["prices"] == {"device": 0.1, "links": {"axis0": {}, "axis1": {"all_gather": 0.05}}} and data["fingerprint"]["prices"]
    assert "error" not in MESH.to_dict()["device"]  # prices that were not measured keep their fingerprint


def test_the_interval_is_the_sum_of_its_parts():
    one = linear_solution(mesh=measured_mesh(), prices=price_errors(measured_mesh()))
    assert [(row["what"], row["error"], row["measured"]) for row in parts(one.breakdown, one.prices)] == [
        ("compute", 0.1, True),
        ("all_gather axis1", 0.05, True),
    ]
    assert one.interval == pytest.approx((1.5e-3 / 1.1 + 5e-4 / 1.05, 1.5e-3 * 1.1 + 5e-4 * 1.05))


def test_prices_that_were_not_measured_have_a_wider_interval(solution):
    low, high = solution.interval
    wide = replace(solution, prices=price_errors(measured_mesh())).interval
    assert low < wide[0] < solution.cost < wide[1] < high


def test_an_old_plan_has_the_interval_of_its_mesh(solution):
    assert replace(solution, prices={}).interval == solution.interval


def test_of_a_cost_without_parts_nothing_is_known():
    mesh = linear_solution().mesh
    untested = replace(mesh, device=replace(mesh.device, kernels=None))
    assert linear_solution(breakdown={}, mesh=untested).interval is None and linear_solution(cost=float("inf")).interval is None
    assert linear_solution(breakdown={}).interval is not None  # that of tested steps needs no parts


def test_show_says_the_interval(capsys, tmp_path, solution):
    solution.save(tmp_path / "plan.json")
    record = json.loads(run(capsys, "show", str(tmp_path / "plan.json"), "--json")[1])
    assert record["interval_seconds"] == list(solution.interval) and record["prices"] == solution.prices
    assert "as far as the prices are known" in run(capsys, "show", str(tmp_path / "plan.json"))[1]


# --- links


def test_axes_of_one_link_move_together():
    mesh = Mesh.from_bandwidths((2, 2, 2, 1))
    assert link_groups(mesh) == [(0,), (1, 2)]


@pytest.mark.parametrize("curved", [False, True])
@pytest.mark.parametrize("size", [1.0, 5e4, 3e6])
def test_bytes_take_theta_times_as_long_and_latency_stays(curved, size):
    curve = LinkCurve("all_gather", (1.0, 1e5, 1e6), (1e-5, 4e-5, 2e-4), 2e-10)
    axis = Axis("a", 4, 1e10, 1e-5, curves=(curve,) if curved else ())
    at = [collective_seconds("all_gather", scaled(Mesh((axis,)), [0], theta).axes[0], size) for theta in (1.0, 2.0, 3.0)]
    assert at[1] - at[0] == pytest.approx(at[2] - at[1], abs=1e-15)  # affine
    latency = collective_seconds("all_gather", axis, 1e-9)
    assert at[1] - latency == pytest.approx(2 * (at[0] - latency), abs=1e-15)


# --- ranges


def test_a_plan_is_found_again_among_the_choices(solution):
    module, inputs = load_model(MODEL, SETTINGS, training=True)
    graph = capture(module, inputs, training=True)
    formulated = formulate_for(graph, candidates(graph, MESH), MESH, Options(training=True))
    choice = choice_of(formulated, solution)
    assert layouts_of(formulated, choice) == solution.layouts and results_of(formulated, choice) == solution.results
    assert formulated.problem.node_costs and len(choice) == len(formulated.problem.node_costs)


@pytest.fixture(scope="module")
def found(solution) -> dict:
    module, inputs = load_model(MODEL, SETTINGS, training=True)
    return robustness(module, inputs, solution)


def test_inside_the_range_no_plan_is_faster_and_just_outside_one_is(solution, found):
    """Against plans made from nothing at both sides of every end."""
    ends = 0
    for k, row in enumerate(found["links"]):
        for end, outwards in ((row["low"], 0.97), (row["high"], 1.03)):
            if end is not None and end != row["bandwidth"]:
                inside, outside = (_regret(solution, k, row["bandwidth"] / (end * by)) for by in (1 / outwards, outwards))
                assert inside < 2e-6 < outside
                ends += 1
    assert ends >= 2 and found["regret"] == 0.0


def _regret(solution: Solution, axis: int, theta: float) -> float:
    """Of the plan's layouts against the best plan with this axis' bytes theta times as slow."""
    mesh = scaled(MESH, [axis], theta)
    module, inputs = load_model(MODEL, SETTINGS, training=True)
    graph = capture(module, inputs, training=True)
    formulated = formulate_for(graph, candidates(graph, mesh), mesh, Options(training=True))
    return evaluate(formulated.problem, choice_of(formulated, solution)).cost / planned(mesh).cost - 1


def test_the_regret_grows_away_from_the_range(found):
    for row in found["links"]:
        probes = {probe["bandwidth"] / row["bandwidth"]: probe["regret"] for probe in row["regret"]}
        assert all(regret >= 0 for regret in probes.values())
        assert all(not (row["low"] or 0) < probe["bandwidth"] < (row["high"] or np.inf) for probe in row["regret"])
        slower = [regret for factor, regret in sorted(probes.items()) if factor < 1]
        assert slower == sorted(slower, reverse=True)


def test_a_regret_that_is_allowed_widens_the_range(solution, found):
    module, inputs = load_model(MODEL, SETTINGS, training=True)
    for tight, wide in zip(found["links"], robustness(module, inputs, solution, slack=0.05)["links"]):
        assert (wide["low"] or 0.0) <= (tight["low"] or 0.0) and (wide["high"] or np.inf) >= (tight["high"] or np.inf)


def test_a_plan_that_is_not_the_best_says_so(solution):
    """Negative control: the best plan of another cluster, judged under this one's prices."""
    other = planned(Mesh.from_bandwidths((2, 2), intra_node_bandwidth=1e9, inter_node_bandwidth=5e12, tf32=True))
    module, inputs = load_model(MODEL, SETTINGS, training=True)
    record = robustness(module, inputs, replace(other, mesh=MESH))
    assert record["regret"] > 0.01 and all(row["low"] == row["high"] == row["bandwidth"] for row in record["links"])


def test_explain_prints_prices_and_ranges(capsys, tmp_path, solution):
    path = str(tmp_path / "plan.json")
    solution.save(path)
    code, out, _ = run(capsys, "explain", path, "--json")
    record = json.loads(out)
    assert code == 0 and record["interval_seconds"] == list(solution.interval) and "robust" not in record
    assert sum(row["seconds"] for row in record["prices"]) == pytest.approx(record["cost_seconds"]) == pytest.approx(solution.cost)
    assert record["objective_seconds"] == solution.objective_seconds
    code, out, _ = run(capsys, "explain", path, "--trust", "--robust", "--quiet")
    assert code == 0 and "Where the plan stays best" in out and "axis1" in out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [(("--robust", "--within", "-1"), "--within is -1.0"), (("--robust", "--time-limit", "0"), "--time-limit is 0.0")],
)
def test_bad_words_are_refused(capsys, tmp_path, words, sentence):
    check_refused(capsys, ("explain", "plan.json", *words), sentence)


def test_other_sizes_are_refused(capsys, tmp_path, solution):
    path = str(tmp_path / "plan.json")
    solution.save(path)
    words = [word for key, value in (SETTINGS | {"batch": 8192}).items() for word in ("--set", f"{key}={value}")]
    assert main(["explain", path, "--model", MODEL, *words, "--robust", "--quiet"]) == 2
    assert "was planned for inputs of" in capsys.readouterr().err


def test_another_model_is_refused(capsys, tmp_path, solution):
    path = str(tmp_path / "plan.json")
    solution.save(path)
    assert main(["explain", path, "--model", MODEL, "--set", "layers=2", "--robust", "--quiet"]) == 2
    assert "`autoshard check --any-graph` says what the plan is worth" in capsys.readouterr().err
