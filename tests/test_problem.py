"""The judge, the validation, and the contest's file format."""

import gzip
import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest

from autoshard.problem import Edge, EdgeUsage, NodeUsage, Problem, Usage, evaluate, read_contest, usage_profile, write_choice
from autoshard.solvers import solve
from tests.helpers_problems import every_choice, random_problem
from tests.helpers_refusals import refusals

DATA = Path(__file__).parent / "data" / "iopddl"


def slow_evaluate(problem: Problem, x) -> tuple[float, float]:
    """Cost and peak by the definition: a loop over every time."""
    cost = sum(c[i] for c, i in zip(problem.node_costs, x)) + sum(e.table[x[e.a], x[e.b]] for e in problem.edges)
    peak = 0.0
    for t in range(-1, 40):
        alive = [u for u in problem.usages if u.start <= t < u.end]
        peak = max(peak, sum(u.bytes[tuple(x[v] for v in u.ends)] for u in alive))
    return float(cost), float(peak)


@pytest.mark.parametrize("seed", range(40))
def test_evaluate_equals_a_loop_over_all_times(seed):
    problem = random_problem(seed)
    for x in itertools.islice(every_choice(problem), 50):
        judged, (cost, peak) = evaluate(problem, x), slow_evaluate(problem, x)
        assert judged.cost == pytest.approx(cost, rel=1e-12, abs=1e-12) and judged.peak == pytest.approx(peak)
        assert judged.fits == (problem.usage_limit is None or judged.peak <= problem.usage_limit)


def test_example_of_the_contest():
    problem = read_contest(DATA / "example.json")
    judged = evaluate(problem, [0, 1, 2, 0, 0])
    assert (judged.cost, judged.peak, judged.fits) == (495, 50, True)
    assert solve(problem, solver="exhaustive").cost == 445


def test_cost_is_exact_and_independent_of_order():
    n = 2000
    rng = np.random.default_rng(0)
    costs = [rng.normal(size=1) * 10.0 ** rng.integers(-8, 8) for _ in range(n)]
    names = tuple(map(str, range(n)))
    forth = evaluate(Problem(names, tuple(costs), ()), [0] * n).cost
    back = evaluate(Problem(names, tuple(costs[::-1]), ()), [0] * n).cost
    assert forth == back == math.fsum(c[0] for c in costs)


def test_peak_is_exact_for_large_integers():
    big = 2**52
    usages = (NodeUsage(0, 0, 2, np.array([big])), NodeUsage(0, 1, 3, np.array([1])))
    problem = Problem(("a",), (np.zeros(1),), (), usages, big)
    assert evaluate(problem, [0]).peak == big + 1 and not evaluate(problem, [0]).fits


def test_forbidden_choices_and_pairs_cost_inf():
    table = np.array([[0.0, np.inf], [1.0, 2.0]])
    problem = Problem(("a", "b"), (np.zeros(2), np.zeros(2)), (Edge(0, 1, table),))
    assert evaluate(problem, [0, 1]).cost == math.inf and evaluate(problem, [1, 1]).cost == 2.0


def test_empty_intervals_use_no_memory():
    problem = Problem(("a",), (np.zeros(1),), (), (NodeUsage(0, 5, 5, np.array([9.0])), NodeUsage(0, 7, 3, np.array([9.0]))), 1.0)
    assert evaluate(problem, [0]).peak == 0.0 and len(usage_profile(problem, [0])[0]) == 0


ONE, CELL = np.zeros(1), np.zeros((1, 1))
UNEQUAL = Problem(("a", "b"), (np.zeros(1), np.zeros(2)), ())


def joined(usage: Usage) -> Problem:
    return Problem(("a", "b"), (ONE, ONE), (Edge(0, 1, CELL),), (usage,))


test_a_bad_problem_or_answer_is_one_sentence = refusals(
    (lambda: Problem(("a",), (ONE, ONE), ()), "give one name per node"),
    (lambda: Problem(("a",), (np.zeros(0),), ()), "expected a list of one or more choices"),
    (lambda: Problem(("a",), (np.array([np.nan]),), ()), "hold NaN or -inf"),
    (lambda: Problem(("a",), (ONE,), (Edge(0, 1, CELL),)), "nodes are numbered 0 to 0"),
    (lambda: Problem(("a",), (ONE,), (Edge(0, 0, CELL),)), "joins node 0 to itself"),
    (lambda: Problem(("a", "b"), (ONE, ONE), (Edge(0, 1, np.zeros((2, 1))),)), r"has costs of shape \(2, 1\), but its ends have 1 and 1"),
    (lambda: Problem(("a",), (ONE,), (), (NodeUsage(3, 0, 1, ONE),)), "belongs to node 3"),
    (lambda: Problem(("a",), (ONE,), (), (EdgeUsage(0, 0, 1, CELL),)), "belongs to edge 0, but edges"),
    (lambda: Problem(("a",), (ONE,), (), (NodeUsage(0, 0, 1, np.zeros(2)),)), r"bytes of shape \(2,\); expected \(1,\)"),
    (lambda: joined(Usage((1, 0), 0, 1, CELL, 0)), "has the ends 1, 0; expected those of edge 0, 0 and 1"),
    (lambda: Problem(("a", "b"), (ONE, ONE), (), (Usage((0, 1), 0, 1, CELL),)), "has the ends 0, 1; expected one, or the edge"),
    (lambda: Problem(("a",), (ONE,), (), (NodeUsage(0, 0, 1, np.array([-1.0])),)), "a negative number"),
    (lambda: Problem(("a",), (ONE,), (), (NodeUsage(0, 0, 1, np.array([np.inf])),)), "finite bytes"),
    (lambda: Problem(("a",), (ONE,), (), (), -1.0), "the usage limit is -1"),
    (lambda: evaluate(UNEQUAL, [0]), "1 entries"),
    (lambda: evaluate(UNEQUAL, [0, 2]), "takes choice 2 of node 1"),
    (lambda: evaluate(UNEQUAL, [0, -1]), "takes choice -1"),
)


def contest(**changes) -> dict:
    nodes = {"intervals": [[0, 2], [1, 3]], "costs": [[1, 2], [3]], "usages": [[1, 1], [2]]}
    edges = {"nodes": [[0, 1]], "costs": [[5, 1e18]]}
    problem = {"nodes": nodes | changes.pop("nodes", {}), "edges": edges | changes.pop("edges", {}), "usage_limit": 10}
    return {"problem": {k: v for k, v in (problem | changes).items() if v is not None}}


def test_read_contest_takes_1e18_for_inf_and_edges_of_one_node_for_node_costs(tmp_path):
    path, edges = tmp_path / "p.json", {"nodes": [[1, 0], [0], [0, 0]], "costs": [[5, 1e18], [7, 8], [1, 2, 3, 4]]}
    path.write_text(json.dumps(contest(edges=edges, usage_limit=None)))
    problem = read_contest(path)
    assert problem.usage_limit is None and problem.node_costs[0].tolist() == [1 + 7 + 1, 2 + 8 + 4]
    assert [(e.a, e.b, e.table.tolist()) for e in problem.edges] == [(1, 0, [[5.0, math.inf]])]


def test_read_contest_shares_equal_tables():
    problem = read_contest(DATA / "asplos-2025-iopddl-B.json.gz")
    assert (len(problem.names), len(problem.edges)) == (816, 1096)
    assert len({id(e.table) for e in problem.edges}) < 420  # 399 different tables, some in two shapes


BAD_FILES = {  # bytes, or the problem that they hold
    "ends early": b"{",
    "no sound gzip file": b"hello",
    "truncated": gzip.compress(b"x" * 1000)[:-12],
    "lacks 'problem'": {},
    "holds .. is not of type .object": [],
    "lacks 'usages'": {"problem": {"nodes": {"intervals": [], "costs": []}, "edges": {"nodes": [], "costs": []}}},
    "expected one of each per node": contest(nodes={"usages": [[1, 1]]}),
    "2 costs and 1 usages": contest(nodes={"usages": [[1], [2]]}),
    "found a list of 3 costs where the choices of its nodes need 2 x 1": contest(edges={"costs": [[1, 2, 3]]}),
    "more than 2 items": contest(edges={"nodes": [[0, 1, 1]]}),
    "names node 0.0, but nodes are numbered": contest(edges={"nodes": [[0.0, 1]]}),
    "names node 7": contest(edges={"nodes": [[0, 7]]}),
    "1 edges and 2 edge cost tables": contest(edges={"costs": [[1], [2]]}),
}


@pytest.mark.parametrize("sentence", BAD_FILES)
def test_a_bad_contest_file_is_one_sentence(tmp_path, sentence):
    content = BAD_FILES[sentence]
    path = tmp_path / ("p.json.gz" if sentence in ("no sound gzip file", "truncated") else "p.json")
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    with pytest.raises(ValueError, match=sentence) as caught:
        read_contest(path)
    assert "\n" not in str(caught.value)


def test_write_choice_leaves_a_whole_file_or_none(tmp_path):
    answer = solve(read_contest(DATA / "example.json"), solver="exhaustive")
    path = tmp_path / "choice.json"
    write_choice(path, answer)
    assert json.loads(path.read_text()) == {"choice": list(answer.choice), "cost": 445.0, "bound": 445.0, "status": "optimal"}
    with pytest.raises(FileNotFoundError):
        write_choice(tmp_path / "missing" / "choice.json", answer)
    assert [p.name for p in tmp_path.iterdir()] == ["choice.json"]
