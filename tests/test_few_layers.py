"""From few layers to many: choices and messages; and one decision per repeated block."""

import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from autoshard.api import plan
from autoshard.capture import capture
from autoshard.formulate import Formulation, Training, formulate
from autoshard.graph import repeated_blocks
from autoshard.planning.few_layers import FewLayers, correspondence, corresponding_ops
from autoshard.planning.instance import SMALL, layers_of_nodes
from autoshard.planning.tying import tied, tied_groups
from autoshard.problem import evaluate
from autoshard.solvers import certified, converged, solve
from autoshard.strategies import candidates
from models import gpt2, llama, mlp
from tests.helpers import fast_mesh
from tests.helpers_problems import every_choice, random_problem
from tests.helpers_refusals import assert_refused

MODELS = {"mlp": mlp.tiny, "gpt2": gpt2.tiny, "llama": llama.tiny}
MESH = fast_mesh((2, 2))


@cache
def formulated(name: str, layers: int) -> Formulation:
    graph = capture(*MODELS[name](layers=layers), training=True)
    return formulate(graph, candidates(graph, MESH), MESH, training=Training())


@pytest.mark.parametrize(("name", "layers"), [("mlp", 5), ("gpt2", 3)])
def test_a_node_is_in_the_layer_of_its_op_or_of_the_value_that_it_stands_for(name, layers):
    f = formulated(name, layers)
    found, places = layers_of_nodes(f), repeated_blocks(f.graph).places
    assert len(found) == len(f.problem.node_costs)
    members = {}
    for i, place in enumerate(places):
        members.setdefault(place and place[:2], []).append(i)
    large = sorted(key for key, ops in members.items() if key and len(ops) >= SMALL)
    expected = {i: large.index(key) + 1 if key in large else 0 for key, ops in members.items() for i in ops}
    assert {i: found[i] for i in range(len(places))} == expected and len(large) >= layers
    for value, node in f.hubs.items():
        assert found[node] == found[value[0]]


# -- corresponding ops and nodes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mlp"])
def test_corresponding_ops_are_equal_and_those_of_a_graph_with_itself_are_the_same(name):
    deep, shallow = formulated(name, 5), formulated(name, 3)
    assert corresponding_ops(shallow.graph, shallow.graph) == list(range(len(shallow.graph.ops)))
    for i, small in enumerate(corresponding_ops(deep.graph, shallow.graph)):
        assert deep.graph.signature(i) == shallow.graph.signature(small)
        assert deep.graph.ops[i].backward == shallow.graph.ops[small].backward
    found = correspondence(deep, shallow)
    for v, small in enumerate(found.nodes):
        assert len(deep.problem.node_costs[v]) == len(shallow.problem.node_costs[small])
    for e, small in enumerate(found.edges):
        assert np.array_equal(deep.problem.edges[e].table, shallow.problem.edges[small].table)


def test_another_model_has_no_corresponding_ops():
    with pytest.raises(ValueError, match="has no corresponding op in the shallow one|ops that repeat nothing"):
        correspondence(formulated("gpt2", 1), formulated("mlp", 3))


@pytest.mark.parametrize("name", ["mlp"])
def test_a_start_from_the_shallow_problem_ends_in_the_same_optimum(name):
    deep, shallow = formulated(name, 5), formulated(name, 3)
    answer = FewLayers(shallow, correspondence(deep, shallow)).solve(deep.problem)
    alone = solve(deep.problem)
    assert answer.status == alone.status == "optimal"
    assert answer.cost == pytest.approx(alone.cost, rel=1e-9)
    assert answer.bound <= answer.cost * (1 + 1e-9)


def test_pins_hold_on_the_way():
    deep, shallow = formulated("mlp", 5), formulated("mlp", 3)
    node = next(iter(deep.graph.parameters.values()))
    costs = list(deep.problem.node_costs)
    costs[node] = np.where(np.arange(len(costs[node])) == 1, costs[node], math.inf)
    pinned = type(deep.problem)(deep.problem.names, tuple(costs), deep.problem.edges, deep.problem.usages)
    answer = FewLayers(shallow, correspondence(deep, shallow)).solve(pinned)
    assert answer.choice[node] == 1
    assert answer.cost == pytest.approx(solve(pinned).cost, rel=1e-9)


@pytest.mark.parametrize("layer", range(5))
def test_a_layer_that_is_pinned_alone_leaves_the_bound_below_the_best(layer):
    deep, shallow = formulated("mlp", 5), formulated("mlp", 3)
    node = list(deep.graph.parameters.values())[2 * layer]
    for i in range(len(deep.problem.node_costs[node])):
        costs = list(deep.problem.node_costs)
        costs[node] = np.where(np.arange(len(costs[node])) == i, costs[node], math.inf)
        pinned = replace(deep.problem, node_costs=tuple(costs))
        answer = FewLayers(shallow, correspondence(deep, shallow)).solve(pinned)
        assert answer.bound <= solve(pinned).cost * (1 + 1e-9)


def test_messages_of_another_problem_give_a_bound_all_the_same():
    f = formulated("mlp", 3)
    choice, messages = converged(f.problem)
    best = solve(f.problem).cost
    noise = np.random.default_rng(0).normal(size=len(messages)) * best
    answer = certified(f.problem, choice, messages=noise, time_limit=5)
    assert answer.bound <= best * (1 + 1e-9)
    assert_refused("messages; expected", solve, f.problem, messages=messages[:-1])


# -- ties --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mlp", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_tied_blocks_agree_cost_no_less_and_keep_the_bound_of_the_untied_graph(name):
    model = MODELS[name](layers=4)
    free, alike = (plan(*model, MESH, training=True, baselines=False, tie_blocks=tie, objective="serial") for tie in (False, True))
    assert free.cost * (1 - 1e-9) <= alike.cost and alike.bound <= free.cost * (1 + 1e-9)
    inner: dict[str, set] = {}
    for parameter, row in alike.parameters.items():
        block, _, rest = parameter.partition(".")[2].partition(".")
        if block.isdigit():
            inner.setdefault(rest, set()).add(row["layout"])
    assert inner and all(len(layouts) == 1 for layouts in inner.values())


@pytest.mark.parametrize("name", ["mlp", "gpt2"])
def test_a_tied_problem_costs_and_holds_what_the_whole_one_does(name):
    f = formulated(name, 3)
    limited = type(f.problem)(f.problem.names, f.problem.node_costs, f.problem.edges, f.problem.usages, 1e12)
    groups = tied_groups(f)
    small = tied(limited, groups)
    assert len(small.node_costs) < len(f.problem.node_costs)
    answer = solve(small)
    for choice in (answer.choice, [0] * len(small.node_costs)):
        ours, theirs = evaluate(small, choice), evaluate(limited, [choice[g] for g in groups])
        assert ours.cost == pytest.approx(theirs.cost, rel=1e-9) and ours.peak == pytest.approx(theirs.peak, rel=1e-9)


@pytest.mark.parametrize("seed", range(30))
def test_any_problem_costs_and_holds_the_same_with_any_of_its_nodes_tied(seed):
    problem, rng = random_problem(seed), np.random.default_rng(seed)
    problem = replace(problem, usages=tuple(replace(u, start=u.start // 8, end=u.end // 8) for u in problem.usages))
    keys = [(len(costs), int(rng.integers(2))) for costs in problem.node_costs]
    numbers = {key: g for g, key in enumerate(dict.fromkeys(keys))}
    small = tied(problem, groups := [numbers[key] for key in keys])
    assert small.names == tuple(problem.names[groups.index(g)] for g in range(len(numbers)))
    for choice in every_choice(small):
        ours, theirs = evaluate(small, choice), evaluate(problem, [choice[g] for g in groups])
        assert (ours.cost, ours.peak) == pytest.approx((theirs.cost, theirs.peak), rel=1e-12) and ours.fits == theirs.fits


@cache
def with_many_tokens(layers: int) -> Formulation:
    graph = capture(*llama.tiny(layers=layers, batch=16, seq=64), training=True)
    return formulate(graph, candidates(graph, MESH), MESH, training=Training())


@pytest.mark.parametrize("share", [0.95, 0.92, 0.9])
def test_where_no_time_is_left_few_layers_give_a_plan_that_fits(share):
    """The deep problem alone has none so soon. The bound holds: more time finds no plan below it."""
    deep, few = with_many_tokens(8), with_many_tokens(5)
    known = FewLayers(few, correspondence(deep, few))
    problem = replace(deep.problem, usage_limit=share * known.solve(deep.problem).peak)
    answer, later = known.solve(problem, time_limit=1e-3), known.solve(problem, gap=0.05, time_limit=3.0)
    assert answer.choice is not None and evaluate(problem, answer.choice).fits
    assert answer.bound <= later.cost * (1 + 1e-9) and later.cost <= answer.cost * (1 + 1e-9)
    assert solve(problem, time_limit=1e-3).choice is None
