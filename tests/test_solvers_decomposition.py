"""Problems of equal layers, solved part by part: the bound holds, no answer is lost, and depth costs next to nothing."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.problem import Edge, NodeUsage, Problem, evaluate
from autoshard.solvers import decomposition, solve
from autoshard.solvers.decomposition import Decomposition, decompose
from autoshard.solvers.dual_ascent import Messages, look
from autoshard.solvers.incumbent import Incumbent
from autoshard.solvers.parts import DISTANCE, divide
from autoshard.solvers.reduce import reduce
from autoshard.solvers.reduce_parts import reduce_in_parts
from autoshard.solvers.settle import settle_part
from tests.helpers_problems import ascended, random_problem


def layered(seed: int, layers: int, *, width: int = 2, num_choices: int = 3, forbidden: float = 0.0, limited: bool = False) -> Problem:
    """Equal layers of `width` nodes in a chain, each with all nodes of the next; a node before the first one that all layers read."""
    rng = np.random.default_rng(seed)

    def table(*shape: int) -> np.ndarray:
        return np.where(rng.random(shape) < forbidden, np.inf, rng.integers(0, 8, shape).astype(float))

    costs, inner = [table(num_choices) for _ in range(width)], [table(num_choices, num_choices) for _ in range(width)]
    onward = [[table(num_choices, num_choices) for _ in range(width)] for _ in range(width)]
    shared, read = rng.integers(0, 5, 2).astype(float), table(2, num_choices)
    node = np.arange(layers * width).reshape(layers, width) + 1
    edges = [Edge(int(row[k]), int(row[(k + 1) % width]), inner[k]) for row in node for k in range(width if width > 2 else 1)]
    edges += [Edge(int(a[k]), int(b[m]), onward[k][m]) for a, b in zip(node, node[1:]) for k in range(width) for m in range(width)]
    edges += [Edge(0, int(row[0]), read) for row in node]
    node_costs = (shared, *(costs[k] for _ in range(layers) for k in range(width)))
    held = rng.integers(1, 9, num_choices).astype(float)
    usages = tuple(NodeUsage(int(v), int(v), layers * width + 2, held) for v in node.ravel()) if limited else ()
    limit = float(held.mean() * node.size) if limited else None
    return Problem(tuple(map(str, range(len(node_costs)))), node_costs, tuple(edges), usages, limit)


def homes_of(problem: Problem, width: int = 2) -> np.ndarray:
    return np.array([0] + [1 + v // width for v in range(len(problem.names) - 1)])


def started(problem: Problem, homes: np.ndarray) -> tuple[Decomposition, Incumbent]:
    messages, incumbent = ascended(problem, 50)
    steps = Decomposition(divide(problem, homes), incumbent, settle_part)
    steps.start(messages.message)
    return steps, incumbent


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), layers=st.integers(2, 4), forbidden=st.sampled_from([0.0, 0.2, 0.5]), limited=st.booleans())
def test_solve_with_homes_finds_what_enumeration_finds(seed, layers, forbidden, limited):
    problem = layered(seed, layers, forbidden=forbidden, limited=limited)
    answer, reference = solve(problem, homes=homes_of(problem)), solve(problem, solver="exhaustive")
    assert (answer.status, answer.cost) == (reference.status, pytest.approx(reference.cost, rel=1e-9, abs=1e-9))
    assert answer.bound <= reference.cost + 1e-9 * abs(reference.cost) or reference.choice is None


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 10**6), data=st.data())
def test_any_homes_and_any_multipliers_give_a_bound_and_answers_that_are_answers(seed, data):
    problem = replace(random_problem(seed), usages=(), usage_limit=None)
    homes = np.array(data.draw(st.lists(st.integers(0, 3), min_size=len(problem.names), max_size=len(problem.names))))
    reference = solve(problem, solver="exhaustive")
    steps, incumbent = started(problem, homes)
    rng = np.random.default_rng(seed)
    for spread in (0.0, 1.0, 10.0):  # those of dual ascent, then others, whose sums aren't the costs of the nodes
        bound = steps.evaluate(steps.multipliers + spread * rng.normal(size=len(steps.multipliers)))
        assert bound <= reference.cost + 1e-9 * max(abs(reference.cost), 1.0)
    decoded = steps.decode()
    if decoded is not None:
        before = evaluate(problem, decoded).cost
        assert before >= reference.cost - 1e-9 * abs(reference.cost)
        assert evaluate(problem, steps.improve(decoded)).cost <= before + 1e-9 * abs(before)
    steps.climb(3)
    assert incumbent.bound <= reference.cost + 1e-9 * max(abs(reference.cost), 1.0)


def test_a_bound_without_the_remainder_of_the_multipliers_would_be_wrong(monkeypatch):
    problem = layered(3, 3)
    best = solve(problem, solver="exhaustive").cost
    steps, incumbent = started(problem, homes_of(problem))
    more = steps.multipliers + 1.0
    assert steps.evaluate(more) <= best
    monkeypatch.setattr(Decomposition, "_remainder", lambda self, multipliers: 0.0)
    with pytest.raises(AssertionError, match="above cost"):  # Record.report: a bound above a cost is an error
        incumbent.offer(solve(problem, solver="exhaustive").choice)
        steps.evaluate(more)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), data=st.data())
def test_reductions_that_keep_nodes_hold_for_any_further_costs_of_these(seed, data):
    problem = replace(random_problem(seed), usages=(), usage_limit=None)
    kept = data.draw(st.lists(st.integers(0, len(problem.names) - 1), unique=True))
    reduced = reduce(problem, kept=kept)
    rng = np.random.default_rng(seed)
    further = {v: np.round(rng.normal(0.0, 5.0, len(problem.node_costs[v]))) for v in kept}
    costs = tuple(c + further.get(v, 0.0) for v, c in enumerate(problem.node_costs))
    reference = solve(replace(problem, node_costs=costs), solver="exhaustive")
    if reduced.problem is None:
        assert reference.choice is None
        return
    left = {v: further[v][reduced.choices_left(v, len(further[v]))] for v in kept}
    small = tuple(c + left.get(v, 0.0) for v, c in zip((*reduced.nodes, -1), reduced.problem.node_costs, strict=True))
    answer = solve(replace(reduced.problem, node_costs=small), solver="exhaustive")
    assert answer.cost == pytest.approx(reference.cost, rel=1e-9, abs=1e-9)
    if answer.choice is not None:
        lifted = reduced.lift(answer.choice)
        assert evaluate(replace(problem, node_costs=costs), lifted).cost == pytest.approx(reference.cost, rel=1e-9, abs=1e-9)


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 10**6), data=st.data(), forbidden=st.sampled_from([0.0, 0.3]))
def test_reductions_part_by_part_keep_the_optimum_and_lift_its_answer(seed, data, forbidden):
    if data.draw(st.booleans()):
        problem = layered(seed, 3, forbidden=forbidden)
        homes = homes_of(problem)
    else:
        problem = replace(random_problem(seed), usages=(), usage_limit=None)
        homes = np.array(data.draw(st.lists(st.integers(0, 3), min_size=len(problem.names), max_size=len(problem.names))))
    reference = solve(problem, solver="exhaustive")
    small, inner, lift = reduce_in_parts(problem, homes, lambda: False)
    if small is None:
        assert reference.choice is None
        return
    answer = solve(small, solver="exhaustive")
    assert len(inner) == len(small.names)
    assert answer.cost == pytest.approx(reference.cost, rel=1e-9, abs=1e-9)
    if answer.choice is not None:
        assert evaluate(problem, lift(answer.choice)).cost == pytest.approx(reference.cost, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("layers", [2, 3, 8, 30])
def test_every_edge_is_in_one_part_and_layers_in_the_middle_are_equal(layers):
    problem = layered(0, layers)
    parts = divide(problem, homes_of(problem))
    assert sorted(np.concatenate(parts.edges).tolist()) == list(range(len(problem.edges)))
    for p, edges in enumerate(parts.edges):
        assert {v for k in edges.tolist() for v in (problem.edges[k].a, problem.edges[k].b)} <= set(parts.of(p).tolist())
    assert len(set(parts.class_of[1:].tolist())) == min(layers, 2 * (DISTANCE + 1) + 1)  # those near the ends, and one in the middle
    for v, sharing in parts.sharing.items():
        slots = sorted(slot for _, slot in sharing)
        assert any(joint.slots == tuple(slots) and (joint.costs == problem.node_costs[v]).all() for joint in parts.joints)
    assert sum(joint.count for joint in parts.joints) == len(parts.sharing)


def test_messages_of_another_problem_are_refused():
    problem = random_problem(3)
    other = np.zeros((len(Messages(problem).message) + 1,) + Messages(problem).message.shape[1:])
    with pytest.raises(ValueError, match="one per choice of each end of every edge"):
        look(problem, None, other)


def test_the_work_does_not_grow_with_depth_and_the_gap_of_dual_ascent_is_closed(monkeypatch):
    calls = []
    minimum = decomposition.PartSolver.minimum
    monkeypatch.setattr(decomposition.PartSolver, "minimum", lambda self, *given: calls.append(1) or minimum(self, *given))
    counts = []
    for layers in (12, 120):
        calls.clear()
        problem = layered(5, layers, width=4, num_choices=4)
        homes = homes_of(problem, 4)
        messages, incumbent = ascended(problem, 300)
        before = incumbent.cost - incumbent.bound
        steps = Decomposition(divide(problem, homes), incumbent, settle_part)
        steps.start(messages.message)
        steps.evaluate(steps.multipliers)
        counts.append(len(calls))
        decompose(problem, homes, incumbent, messages.message, settle_part)
        assert incumbent.cost - incumbent.bound < 0.5 * before
    assert counts[0] == counts[1] == 2 * (DISTANCE + 1) + 2  # the classes of layers, and the part of the node that all layers read


def test_the_answer_does_not_depend_on_the_numbers_of_the_homes():
    problem = layered(7, 4)
    homes = homes_of(problem)
    answers = [solve(problem, homes=h) for h in (homes, 10 * homes + 3, homes.tolist())]
    assert len({(a.choice, a.cost, a.bound) for a in answers}) == 1
