"""What a plan's ops and edges cost one by one, locally and at least; and what differs between two plans for nothing."""

import itertools
import math

import numpy as np
import pytest

from autoshard.explain.differences import cost_differences, edge_term, op_term
from autoshard.explain.reopened import captured, nearest, reopened
from autoshard.explain.subjects import subject, wanted, ways
from autoshard.explain.why import explain
from autoshard.problem import Edge, NodeUsage, Problem, evaluate
from tests.test_explain import SAME, WEIGHT, model, planned


@pytest.fixture(scope="module")
def solution():
    return planned()


@pytest.fixture(scope="module")
def opened(solution):
    return reopened(captured(*model(), solution).graph, solution)


@pytest.fixture(scope="module")
def told(solution):
    return explain(*model(), solution, WEIGHT, most=99)


# --- one by one


def test_the_ops_and_edges_of_a_plan_add_up_to_its_cost(opened):
    formulated, choice = opened.formulated, opened.choice
    ops = [op_term(formulated, i, choice).seconds for i in range(len(formulated.graph.ops))]
    edges = [edge_term(formulated, e, choice) for e in range(len(formulated.tensor_edges))]
    assert math.fsum(ops) + math.fsum(edge.seconds for edge in edges) == pytest.approx(opened.judged.cost)
    gradients = {edge.name.partition(" -> ")[2] for edge in edges if edge.kind == "gradient"}
    assert gradients == set(formulated.graph.parameters)
    assert {edge.kind for edge in edges} == {"copy", "input", "gradient", "output"}
    for edge in edges:
        assert bool(edge.steps) == (edge.inputs != edge.outputs) and (edge.seconds > 0) == (edge.inputs != edge.outputs)


def test_between_a_plan_and_itself_nothing_moves(opened):
    assert cost_differences(opened.formulated, opened.choice, opened.choice) == []


def test_locally_the_best_candidate_and_copy_are_taken_with_all_else_as_planned(opened, solution):
    """Against every candidate with every layout of the copies."""
    formulated, problem = opened.formulated, opened.formulated.problem
    node = formulated.graph.index["addmm"]
    hubs = [hub for (i, _), hub in formulated.hubs.items() if i == node]
    told = explain(*model(), solution, "addmm", most=3)
    assert hubs and len(told.alternatives) == 3
    for one in told.alternatives:
        way = wanted(formulated, subject(formulated, "addmm"), one.label)
        costs = []
        for k, *waits in itertools.product(np.flatnonzero(way.kept[node]), *(range(len(problem.node_costs[hub])) for hub in hubs)):
            choice = list(opened.choice)
            for v, i in zip([node, *hubs], [k, *waits]):
                choice[v] = int(i)
            costs.append(evaluate(problem, choice).cost)
        assert one.local_extra == pytest.approx(min(costs) - told.cost, abs=1e-12 * told.cost)
        assert one.local_extra >= one.extra * (1 - 1e-6)


def test_what_its_neighbours_cannot_take_is_impossible_locally_and_says_where(solution):
    """A view that takes partial sums has none to take where the sum before it is whole."""
    partial = planned(pins={"t_7": "R,P"})
    edges = [edge.name.split(" -> ") for edge in explain(*model(), partial, "t_7", most=0).edges]
    (source,) = (source for source, reader in edges if reader == "t_7")
    assert partial.layouts["t_7"].inputs == partial.layouts[source].outputs == ("R,P",)
    found = {one.label: one for one in explain(*model(), partial, source, most=99).alternatives}
    assert found["R,R"].local_reason == f"there is no route from R,R to R,P on {source} -> t_7" and math.isinf(found["R,R"].local_extra)
    assert math.isinf(found["R,R"].cost) and found["R,R"].reason  # for t_7 is pinned, globally too
    free = explain(*model(), solution, source, most=0, why_not="R,R").why_not
    assert math.isfinite(free.cost) and not free.reason  # where it isn't, there is a plan


def test_floors_are_below_what_is_found(opened, told):
    node = opened.formulated.graph.index[WEIGHT]
    given = [way for way in ways(opened.formulated, subject(opened.formulated, WEIGHT)) if way.label != told.layout]
    costs = {one.label: one.cost for one in told.alternatives}
    floors = {way.label: float(opened.floors[node][way.kept[node]].min()) for way in given}
    assert all(0 < floors[label] <= costs[label] * (1 + SAME) for label in costs)
    assert max(floors.values()) > 0.9 * max(costs.values())  # and near enough to decide something


# --- fewest changes


def chain(costs: list[list[float]], tables: list[list[list[float]]], **more) -> Problem:
    names = tuple(f"v{k}" for k in range(len(costs)))
    edges = tuple(Edge(k, k + 1, np.array(table)) for k, table in enumerate(tables))
    return Problem(names, tuple(np.array(c) for c in costs), edges, **more)


def test_what_differs_for_nothing_is_put_back():
    same = [[0.0, 1.0], [1.0, 0.0]]
    problem = chain([[1.0, 1.0]] * 5, [same, same, [[0.0, 0.0], [0.0, 0.0]], same])
    plan, found = (0, 0, 0, 0, 0), (1, 1, 1, 1, 1)
    assert nearest(problem, found, plan, fixed=[0]) == (1, 1, 1, 0, 0)  # 1 and 2 follow 0: put back they would cost more
    assert nearest(problem, found, plan, fixed=[]) == plan


def test_what_is_dearer_or_does_not_fit_is_not_put_back():
    problem = chain([[1.0, 1.0], [2.0, 1.0]], [[[0.0, 0.0], [0.0, 0.0]]])
    assert nearest(problem, (1, 1), (0, 0), fixed=[0]) == (1, 1)
    usage = NodeUsage(1, 0, 1, np.array([9.0, 1.0]))
    full = chain([[1.0, 1.0], [1.0, 1.0]], [[[0.0, 0.0], [0.0, 0.0]]], usages=(usage,), usage_limit=5.0)
    assert nearest(full, (1, 1), (0, 0), fixed=[0]) == (1, 1)
    assert nearest(chain([[1.0, 1.0], [1.0, 1.0]], [[[0.0, 0.0], [0.0, 0.0]]]), (1, 1), (0, 0), fixed=[0]) == (1, 0)
