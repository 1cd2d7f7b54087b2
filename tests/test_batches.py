"""All inputs of a batch in one layout, where that costs no more: against every choice of the inputs' layouts."""

import itertools
from dataclasses import replace

import pytest

from autoshard.formulate import Training, formulate
from autoshard.planning.batches import align_batches
from autoshard.problem import evaluate
from autoshard.solvers import solve
from autoshard.strategies import candidates
from tests.helpers import fast_mesh, tiny_graph


def is_aligned(layouts, shapes) -> bool:
    """Sharded on dim 0 over the same axes; those of one shape alike."""
    axes = {tuple(p.is_shard(0) for p in layout) for layout in layouts}
    return len(axes) == 1 and len(set(zip(layouts, shapes))) == len(set(shapes))


@pytest.mark.parametrize("gap", [0.0, 0.5])
@pytest.mark.parametrize(("name", "sizes"), [("mlp", (2,)), ("mlp", (2, 2)), ("gpt2", (2,))])
def test_inputs_are_aligned_where_some_aligned_choice_is_cheap_enough(name, sizes, gap):
    graph, mesh = tiny_graph(name, True), fast_mesh(sizes)
    formulated = formulate(graph, candidates(graph, mesh), mesh, training=Training())
    problem, best, seen = formulated.problem, solve(formulated.problem), set()
    inputs = [i for i, op in enumerate(graph.ops) if op.kind == "input"]
    shapes = [graph.ops[i].output.shape for i in inputs]
    assert len({shape[0] for shape in shapes}) == 1 < len(inputs)

    def with_inputs(picked):
        changed = dict(zip(inputs, picked))
        return tuple(changed.get(i, k) for i, k in enumerate(best.choice))

    def aligned(choice):
        return is_aligned([formulated.candidates.of[i][choice[i]].outputs[0] for i in inputs], shapes)

    every = [with_inputs(picked) for picked in itertools.product(*(range(len(problem.node_costs[i])) for i in inputs))]
    cost = {choice: evaluate(problem, choice).cost for choice in every}
    cheapest = min(cost[choice] for choice in every if aligned(choice))
    for choice in every:
        answer = align_batches(formulated, problem, replace(best, choice=choice, cost=cost[choice]), gap)
        most = max(cost[choice], best.bound * (1 + gap)) * (1 + 1e-9)
        assert aligned(answer.choice) if cheapest <= most else answer.choice == choice
        assert answer.cost == cost[answer.choice] <= most and answer.bound <= answer.cost
        seen.add((aligned(choice), aligned(answer.choice)))
    assert (False, True) in seen
