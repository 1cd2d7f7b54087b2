"""One layout for all inputs of a batch, among plans of equal cost: one data loader can then feed all of them.

    batch       inputs with the same size of dim 0
    aligned     they are sharded on dim 0 over the same mesh axes, and those of one shape have one layout

A solver decides each input's layout by the op that reads it, and a preference per layout can't tie two inputs. Here they are tied
where the plan stays as good as was asked for: pins and memory limit hold, and the cost is the same, or within the gap asked for.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from autoshard.formulate import Formulation
from autoshard.graph import grouped
from autoshard.layout import Layout
from autoshard.problem import Evaluation, Problem, costs_beside, evaluate
from autoshard.solvers import TOLERANCE, Answer

TRIES = 8  # common layouts of a batch that are evaluated, cheapest first: the first that is cheap enough may not fit in memory


def with_choice(answer: Answer, choice: Sequence[int], judged: Evaluation) -> Answer:
    """The answer with another choice, for which its bound holds too."""
    bound = min(answer.bound, judged.cost)
    return replace(answer, choice=tuple(choice), cost=judged.cost, bound=bound, peak=judged.peak)


def align_batches(formulated: Formulation, problem: Problem, answer: Answer, gap: float) -> Answer:
    """The answer with aligned inputs in each batch, where that fits and costs the same, or within `gap` of the bound; else the answer
    unchanged."""
    most = max(answer.cost + TOLERANCE * abs(answer.cost), answer.bound + gap * abs(answer.bound))
    for batch in _batches(formulated):
        for choices in _aligned(formulated, problem, answer, batch):
            assert answer.choice is not None
            choice = list(answer.choice)
            for node, k in choices.items():
                choice[node] = k
            evaluation = evaluate(problem, choice)
            if evaluation.fits and evaluation.cost <= most:
                answer = with_choice(answer, choice, evaluation)
                break
    return answer


def _batches(formulated: Formulation) -> list[list[int]]:
    inputs = [(i, op.output.shape) for i, op in enumerate(formulated.graph.ops) if op.kind == "input"]
    by_size = grouped((shape[0], i) for i, shape in inputs if shape)
    return [nodes for nodes in by_size.values() if len(nodes) > 1]


def _aligned(formulated: Formulation, problem: Problem, answer: Answer, batch: Sequence[int]) -> Iterator[dict[int, int]]:
    """The choices of the batch's nodes under each way to align them, cheapest first, then most preferred."""
    assert answer.choice is not None
    costs = costs_beside(problem, batch, answer.choice)  # no edge joins two inputs
    layouts = {node: [c.outputs[0] for c in formulated.candidates.of[node]] for node in batch}
    by_shape = grouped((formulated.graph.ops[node].output.shape, node) for node in batch)

    def priced(nodes: Sequence[int], layout: Layout | None) -> tuple[float, float]:
        """The cost of nodes that all have one layout, and their preferences."""
        at = [(n, layouts[n].index(layout)) for n in nodes]
        return sum(float(costs[n][k]) for n, k in at), sum(float(formulated.preference[n][k]) for n, k in at)

    def best(nodes: Sequence[int], axes: frozenset[int]) -> list[Layout | None]:
        """The best of the layouts that nodes of one shape share and that are sharded on dim 0 over these axes; empty without any."""
        shared = [layout for layout in layouts[nodes[0]] if _axes_of_first_dim(layout) == axes and all(layout in layouts[n] for n in nodes)]
        return sorted(shared, key=lambda layout: priced(nodes, layout))[:1]

    ways = []
    for axes in {_axes_of_first_dim(layout) for node in batch for layout in layouts[node]}:
        chosen = [(nodes, layout) for nodes in by_shape.values() for layout in best(nodes, axes)]
        cost = sum(priced(nodes, layout)[0] for nodes, layout in chosen)
        if len(chosen) < len(by_shape) or not math.isfinite(cost):  # not finite: a pin excludes it
            continue
        preference = sum(priced(nodes, layout)[1] for nodes, layout in chosen)
        choices = {n: layouts[n].index(layout) for nodes, layout in chosen for n in nodes}
        ways.append((round(cost / max(abs(answer.cost), 1e-30) / TOLERANCE), preference, sorted(axes), choices))
    yield from (way[-1] for way in sorted(ways, key=lambda way: way[:3])[:TRIES])


def _axes_of_first_dim(layout: Layout | None) -> frozenset[int]:
    """The mesh axes over which dim 0 is sharded."""
    return frozenset(k for k, p in enumerate(layout or ()) if p.is_shard() and p.dim == 0)  # type: ignore[attr-defined]
