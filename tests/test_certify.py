"""Certificates: numbers from which anybody computes a plan's cost and bound; and problems in other solvers' formats."""

import copy
import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import highspy
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import autoshard
from autoshard.certify import certify
from autoshard.cli import main
from autoshard.problem import Edge, EdgeUsage, NodeUsage, Problem, evaluate, read_contest
from autoshard.solvers import certificate, solve, to_record, write_program
from tests.helpers import TINY, fast_mesh

SCRIPT = Path(autoshard.__file__).parent / "certify.py"
MESHES = [(4,), (2, 4), (2, 2, 2)]
PLANS = [(name, training, mesh, limit) for name in TINY for training in (False, True) for mesh in MESHES for limit in (None, 0.8)]
QUICK = [("mlp", True, (2, 4), None), ("mlp", False, (2, 4), 0.8)]
CASES = [pytest.param(case, marks=[] if case in QUICK else pytest.mark.slow) for case in PLANS]


@cache
def planned(name, training, shape, limit):
    module, inputs = TINY[name]()
    asked = {"training": training, "baselines": False, "objective": "serial"}
    plan = autoshard.plan(module, inputs, fast_mesh(shape), **asked)
    if limit is None:
        return module, inputs, plan
    try:
        return module, inputs, autoshard.plan(module, inputs, fast_mesh(shape), memory_limit=limit * plan.peak_bytes, **asked)
    except autoshard.Infeasible as error:  # then the smallest limit that works, and a little
        assert error.smallest_limit is not None
        least = 1.02 * error.smallest_limit[1]
        return module, inputs, autoshard.plan(module, inputs, fast_mesh(shape), memory_limit=least, **asked)


@cache
def numbers(*case) -> str:
    module, inputs, plan = planned(*case)
    return json.dumps(autoshard.certificate_of(module, inputs, plan))


@pytest.mark.parametrize("case", CASES)
def test_the_numbers_give_the_plans_cost_and_a_bound_and_a_raised_one_is_refused(case):
    *_, plan = planned(*case)
    record = json.loads(numbers(*case))
    checked = certify(record)
    assert checked["ok"] and checked["cost"] == pytest.approx(plan.cost, rel=1e-12)
    assert checked["bound"] <= plan.bound * (1 + 1e-9)
    assert checked["bound"] >= plan.bound * (1 - (1e-8 if case[3] is None else 1e-3))  # under a limit, what branching adds is missing
    for key, factor in (("bound", 1 + 1e-6), ("cost", 1 - 1e-6)):
        raised = copy.deepcopy(record)
        raised["claims"][key] *= factor
        assert not certify(raised)["ok"], key


def test_the_script_needs_numpy_alone(tmp_path):
    (tmp_path / "certify.py").write_text(SCRIPT.read_text())
    (tmp_path / "numbers.json").write_text(numbers(*QUICK[0]))
    done = subprocess.run([sys.executable, "-I", "certify.py", "numbers.json"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and json.loads(done.stdout)["ok"], done.stderr
    record = json.loads(numbers(*QUICK[0]))
    record["claims"]["bound"] *= 1 + 1e-6
    (tmp_path / "numbers.json").write_text(json.dumps(record))
    done = subprocess.run([sys.executable, "-I", "certify.py", "numbers.json"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1 and "prove a bound" in done.stdout
    assert len(SCRIPT.read_text().splitlines()) < 130


FAULTS = {
    "a price below 0": lambda r: r["prices"].append([0, -1e-12]),
    "another choice": lambda r: r["choice"].__setitem__(0, 0),
    "a usage that is left out": lambda r: r["claims"].__setitem__("bound", r["claims"]["bound"] * 1.01),
    "a shift without its table": lambda r: r["shifts"].pop(),
    "no choice": lambda r: r.pop("choice"),
    "a claimed cost that is no number": lambda r: r["claims"].__setitem__("cost", float("nan")),
    "a cost that is no number": lambda r: r["arrays"][r["nodes"][0]]["values"].__setitem__(-1, float("nan")),
    "a cost below all numbers": lambda r: r["arrays"][r["nodes"][0]]["values"].__setitem__(-1, -float("inf")),
    "a limit that is no number": lambda r: (r.__setitem__("limit", float("nan")), r["prices"].clear()),
    "another format": lambda r: r.__setitem__("format", "autoshard.certificate/2"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_refused(fault):
    record = json.loads(numbers(*QUICK[1]))
    FAULTS[fault](record)
    try:
        assert not certify(record)["ok"]
    except ValueError as error:
        assert "certificate" in str(error) or "price" in str(error) or "shorter" in str(error) or "format" in str(error)


@st.composite
def problems(draw) -> Problem:
    generator = np.random.default_rng(draw(st.integers(0, 2**31)))
    counts = generator.integers(1, 4, draw(st.integers(1, 5)))

    def drawn(shape):
        return np.where(generator.random(shape) < 0.1, np.inf, generator.integers(0, 9, shape).astype(float))

    costs = tuple(drawn(n) for n in counts)
    pairs = [(a, b) for a in range(len(counts)) for b in range(len(counts)) if a != b and generator.random() < 0.4]
    edges = tuple(Edge(a, b, drawn((counts[a], counts[b]))) for a, b in pairs)
    usages = [NodeUsage(v, 0, 1 + v, generator.integers(0, 5, n).astype(float)) for v, n in enumerate(counts) if generator.random() < 0.7]
    usages += [NodeUsage(v, 2, 4, generator.integers(0, 5, n).astype(float)) for v, n in enumerate(counts) if generator.random() < 0.3]
    copied = [k for k in range(len(edges)) if generator.random() < 0.5]
    usages += [EdgeUsage(k, 1, 3, generator.integers(0, 5, edges[k].table.shape).astype(float)) for k in copied]
    return Problem(tuple(map(str, range(len(counts)))), costs, edges, tuple(usages), draw(st.sampled_from([None, 6.0, 12.0])))


@given(problems())
def test_a_certificate_of_any_problem_holds_and_its_bound_is_below_the_optimum(problem):
    best = solve(problem, solver="exhaustive")
    if best.choice is None:
        return
    checked = certify(json.loads(json.dumps(to_record(problem, certificate(problem, best.choice)))))
    assert checked["ok"] and checked["bound"] <= best.cost + 1e-9, checked


@given(problems())
def test_a_contest_file_has_the_same_optimum_and_choices(tmp_path_factory, problem):
    best = solve(problem, solver="exhaustive")
    path = tmp_path_factory.mktemp("contest") / "problem.json"
    autoshard.write_problem(problem, path)
    read = read_contest(path)
    other = solve(read, solver="exhaustive" if len(read.names) < 10 else "ilp")
    assert (other.choice is None) == (best.choice is None)
    if best.choice is not None:
        assert other.cost == pytest.approx(best.cost)
        assert evaluate(problem, other.choice[: len(problem.names)]).cost == pytest.approx(best.cost)


def optimum_by_highs(path) -> float:
    """Seconds, by a HiGHS that knows the file alone."""
    highs = highspy.Highs()
    highs.setOptionValue("output_flag", False)
    assert highs.readModel(str(path)) == highspy.HighsStatus.kOk
    highs.run()
    assert highs.getModelStatus() == highspy.HighsModelStatus.kOptimal
    return highs.getInfo().objective_function_value * 1e-9


SMALL = [(name, training, (4,), None) for name in ("mlp", "gpt2", "llama") for training in (False, True)]


@pytest.mark.parametrize("case", [pytest.param(c, marks=[] if k < 2 else pytest.mark.slow) for k, c in enumerate(SMALL)])
@pytest.mark.parametrize("ending", [".mps", ".lp"])
def test_highs_finds_our_optimum_from_the_written_program(case, ending, tmp_path):
    module, inputs, plan = planned(*case)
    autoshard.write_problem(autoshard.problem_of(module, inputs, plan), tmp_path / f"problem{ending}")
    assert optimum_by_highs(tmp_path / f"problem{ending}") == pytest.approx(plan.cost, rel=1e-6)


def test_the_program_has_the_memory_limit(tmp_path):
    problem = Problem(("a",), (np.array([1.0, 2.0]),), (), (NodeUsage(0, 0, 1, np.array([9.0, 1.0])),), 5.0)
    write_program(problem, str(tmp_path / "p.mps"))
    assert optimum_by_highs(tmp_path / "p.mps") == pytest.approx(2.0)
    with pytest.raises(ValueError, match="p.txt ends in .txt; a problem is written to .mps, .lp, .json"):
        autoshard.write_problem(problem, tmp_path / "p.txt")


class Mine:
    """A solver of the user's, which says more than it knows."""

    def __init__(self, choice=None):
        self.of, self.seen = choice, 0

    def solve(self, problem, time_limit, gap):
        self.seen += 1
        return solve(problem, solver="dp").choice if self.of is None else self.of(problem)


def dearest(problem):
    """A choice that is allowed, and far from the best."""
    edges = tuple(Edge(e.a, e.b, np.where(np.isfinite(e.table), 1 - e.table, np.inf)) for e in problem.edges)
    return solve(Problem(problem.names, tuple(np.where(np.isfinite(c), -c, np.inf) for c in problem.node_costs), edges), solver="dp").choice


def test_any_object_that_solves_is_a_solver_and_is_judged():
    module, inputs, plan = planned(*QUICK[0])
    own = Mine()
    asked = {"training": True, "baselines": False, "objective": "serial"}
    found = autoshard.plan(module, inputs, plan.mesh, solver=own, **asked)
    assert own.seen and found.cost == pytest.approx(plan.cost, rel=1e-9) and found.solver == "mine"
    poor = autoshard.plan(module, inputs, plan.mesh, solver=Mine(dearest), **asked)
    assert poor.status == "feasible" and poor.bound < poor.cost and poor.cost > plan.cost
    with pytest.raises(ValueError, match="there is no solver 7"):
        autoshard.plan(module, inputs, plan.mesh, solver=7)


def test_the_verb_writes_numbers_and_checks_them(capsys, tmp_path):
    module, inputs, plan = planned(*QUICK[0])
    plan.save(tmp_path / "plan.json")
    files = [str(tmp_path / name) for name in ("plan.json", "numbers.json", "problem.mps")]
    model = str(Path(__file__).parent.parent / "models" / "mlp.py") + ":tiny"
    assert main(["certify", files[0], model, "--out", files[1], "--problem", files[2], "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["ok"] and told["cost_seconds"] == pytest.approx(plan.cost) and told["plan_bound_seconds"] == plan.bound
    assert told["gap"] == pytest.approx(1 - told["bound_seconds"] / told["cost_seconds"])
    assert main(["certify", files[1]]) == 0 and optimum_by_highs(files[2]) == pytest.approx(plan.cost, rel=1e-6)
    said = capsys.readouterr().out
    assert [word in said for word in ("holds", f"{told['cost_seconds']:.9g} s", f"{told['bound_seconds']:.9g} s")] == [True] * 3
    assert f"{told['gap']:.2g}" in said and f"{told['peak_bytes']:.6g} bytes" in said and "the plan's own" not in said
    for more in ([model], ["--out", files[1]], ["--problem", files[2]]):
        assert main(["certify", files[1], *more]) == 2
    record = json.loads(Path(files[1]).read_text())
    Path(files[1]).write_text(json.dumps({**record, "claims": {**record["claims"], "bound": record["claims"]["bound"] * (1 + 1e-6)}}))
    assert main(["certify", files[1], "--json"]) == 1
    assert main(["certify", files[0]]) == 2  # a plan without its model
