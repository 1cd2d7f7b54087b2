"""One plan for ranges of sizes: planned at several points of the ranges, with one layout per tensor for all of them.

point p     the graph with the sizes of p (graph.sized); best_p: the seconds of its own best plan, which no plan of it can go below bound_p
common      an op's candidates are those that it has at every point, so that the problems of all points have the same nodes and choices
average     minimise  sum_p cost_p(x) / best_p:  one problem, whose costs are weighted sums. Its bound is that of the average ratio
worst       max_p cost_p(x) / best_p >= sum_p y_p cost_p(x) / best_p for any weights y that add up to 1: each choice of weights is an
            ordinary problem that bounds the worst ratio. The next weights favour the points with large ratios
median      the next weights favour the points with small ratios; without a bound
memory      every size grows with the dims, and so do the bytes of every layout: what fits at the greatest sizes fits everywhere

The plan is of the example inputs; what it is at other points is noted (solution.dynamic).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean, median
from typing import Any

import torch

from autoshard.capture import capture_deep, dims_of, inputs_at, sizes_of
from autoshard.cycles import no_search_for_cycles
from autoshard.formulate import Formulation, with_pins
from autoshard.graph import Range, SizedGraph, Sizes, corners, grid, written
from autoshard.layout import Layout, sharding_sizes
from autoshard.planning.batches import align_batches
from autoshard.planning.demands import allowed_by_pins
from autoshard.planning.describe import described
from autoshard.planning.instance import Instance, formulate_for
from autoshard.planning.options import Infeasible
from autoshard.planning.question import ModelGraphs, Question, check_effects, part_of
from autoshard.planning.recomputing import with_recomputed_blocks
from autoshard.planning.refusal import reworded
from autoshard.planning.search import best_choice
from autoshard.planning.solving import solve_or_refuse
from autoshard.planning.variants import Answered
from autoshard.problem import Edge, Problem, evaluate
from autoshard.solution import DynamicShapes, Solution
from autoshard.solvers import Status
from autoshard.strategies import common_candidates

CRITERIA: dict[str, tuple[Callable[[Sequence[float]], float], float]] = {  # of the ratios; the power of them that the next weights favour
    "average": (fmean, 0.0), "worst": (max, 2.0), "median": (median, -2.0),
}  # fmt: skip
ROUNDS = 8  # of weights
LEAST_WEIGHT = 1e-4  # of a point
UNLIKE = {"objective": "overlapped", "sequence_order": "head_tail", "chunked_loss": "always"}  # what one plan for ranges can't be asked for


def plan_ranges(
    question: Question, model: torch.nn.Module, example_inputs: Any, dynamic_shapes: Any, criterion: str, asked: Mapping[str, Any]
) -> Solution:
    """The plan of the example inputs' shape that is best over the ranges. asked: the options as they were given."""
    if criterion not in CRITERIA:
        raise ValueError(f"criterion is {criterion!r}; expected one of {', '.join(CRITERIA)}")
    if wrong := next((key for key, value in UNLIKE.items() if asked.get(key) == value), None):
        raise ValueError(f"{wrong} is {asked[wrong]!r}; with dynamic_shapes the sum of all seconds is made small, of the model as it is: leave it out")
    if question.options.recompute in ("auto", "blocks") or question.options.global_batch is not None:
        raise ValueError("dynamic_shapes goes with a number of blocks to recompute, or 'all', and with microbatches instead of global_batch")
    check_effects(question)
    question = question.with_options(objective="serial")
    ranges, named = dims_of(model, example_inputs, dynamic_shapes)
    shapes = {op.name: op.output.shape for op in question.graph.ops if op.kind == "input"}
    example = {name: sizes_of(ranges, named, shapes)[name] for name in ranges}
    options = question.options

    def captured(sizes: Sizes):
        inputs = inputs_at(model, example_inputs, named, sizes)
        return capture_deep(model, inputs, training=options.training, precision=options.precision, witness=options.witness)[0]

    with question.clock.phase("capture", "capturing the ends of the ranges", 0.1), no_search_for_cycles():
        sized = SizedGraph.of(ranges, captured)
    points = [example, *(at for at in grid(ranges) if at != example)]
    best = [_best(question, sized, at, k / len(points)) for k, at in enumerate(points)]
    return _covering(best, points, named, ranges, criterion)


def _best(question: Question, sized: SizedGraph, at: Sizes, share: float) -> Answered:
    """The best plan of one point."""
    question = replace(question, model=ModelGraphs(sized.at(at)), clock=part_of(question.clock, f"{{}} at {written(at)}", 0.2 + 0.5 * share, 0.1))
    question = with_recomputed_blocks(question.with_options(baselines=question.options.baselines and not share))
    try:
        return best_choice(question, share=0.5)
    except Infeasible as error:
        raise reworded(error, f"at {written(at)}: {error}") from error


def _covering(best: Sequence[Answered], points: Sequence[Sizes], named: Mapping, ranges: Mapping[str, Range], criterion: str) -> Solution:
    """The plan that covers the points; the first of them is that of the example inputs."""
    first, mesh, options = best[0].question, best[0].question.mesh, best[0].question.options
    top = max(range(len(points)), key=lambda p: list(points[p].values()))
    with first.clock.phase("formulate", "pricing the points", 0.7), no_search_for_cycles():
        layouts = common_candidates([one.question.graph for one in best], mesh)
        formulated = [formulate_for(one.question.graph, layouts, mesh, options) for one in best]
        problems = [with_pins(one, allowed_by_pins(one, options)) for one in formulated]
    measure, power = CRITERIA[criterion]
    weights, bound, kept = [1 / len(best)] * len(best), 0.0, None
    for _ in range(ROUNDS if power else 1):
        scaled = [y / one.answer.cost for y, one in zip(weights, best, strict=True)]
        instance = Instance(formulated[top], _sum(problems, scaled, problems[top]))
        with first.clock.phase("solve", f"solving for the {criterion} of {len(best)} points", 0.75):
            answer = solve_or_refuse(first, instance, [kept[1].choice] if kept else [])
        answer = align_batches(instance.formulated, instance.problem, answer, options.gap)
        assert answer.choice is not None
        seconds = [evaluate(problem, answer.choice).cost for problem in problems]
        ratios = [s / one.answer.cost for s, one in zip(seconds, best, strict=True)]
        bound = max(bound, answer.bound) if power >= 0 else 0.0
        if kept is None or measure(ratios) < kept[0]:
            kept = measure(ratios), answer, seconds
        weights = [y * ratio**power for y, ratio in zip(weights, ratios, strict=True)]
        weights = [max(y / sum(weights), LEAST_WEIGHT) for y in weights]
    assert kept is not None
    ratio, answer, seconds = kept
    rows = [
        {"sizes": dict(at), "seconds": s, "bound_seconds": min(one.answer.bound, s)}
        for at, s, one in zip(points, seconds, best, strict=True)
    ]  # fmt: skip
    at_corners = [formulated[points.index(at)] for at in corners(ranges)]
    facts = DynamicShapes(dict(ranges), dict(named), tuple(rows), _sharded(at_corners, answer.choice), criterion, ratio, min(bound, ratio))
    judged, own = evaluate(problems[0], answer.choice), best[0].answer
    proven = judged.cost <= own.bound * (1 + max(options.gap, 1e-9))
    answer = replace(answer, cost=judged.cost, peak=judged.peak, bound=min(own.bound, judged.cost), status=Status.OPTIMAL if proven else Status.FEASIBLE)
    noted = {**first.assumptions, "dynamic_shapes": facts.to_dict()}
    return described(Answered(replace(first, assumptions=noted), Instance(formulated[0], problems[0]), answer, best[0].baselines))


def _sum(problems: Sequence[Problem], weights: Sequence[float], limits: Problem) -> Problem:
    """The problem whose costs are the weighted sums of those of the problems; its memory is that of `limits`."""
    known: dict[tuple[int, ...], Any] = {}

    def total(*tables: Any) -> Any:
        key = tuple(map(id, tables))
        if key not in known:
            known[key] = sum(weight * table for weight, table in zip(weights, tables, strict=True))
        return known[key]

    costs = tuple(total(*of) for of in zip(*(one.node_costs for one in problems), strict=True))
    edges = (Edge(of[0].a, of[0].b, total(*(e.table for e in of))) for of in zip(*(one.edges for one in problems), strict=True))
    return replace(limits, node_costs=costs, edges=tuple(edges))


def _sharded(formulated: Sequence[Formulation], choice: Sequence[int]) -> tuple[tuple[tuple[int, ...], int], ...]:
    """The sizes that change over the ranges and that a layout of the choice divides: at the corners, and into how many parts."""
    first, mesh, found = formulated[0], formulated[0].mesh, set()
    placed: list[tuple[tuple[int, int], Layout | None]] = []
    for i, op in enumerate(first.graph.ops):
        candidate = first.candidate(i, choice)
        placed += zip(op.inputs, candidate.inputs, strict=True)
        for k, layout in enumerate(candidate.outputs):
            placed += [((i, k), layout), ((i, k), first.hub((i, k), choice))]
    placed += [(value, first.result(k, choice)) for k in first.results if (value := first.graph.results[k].value) is not None]
    for value, layout in dict.fromkeys((value, layout) for value, layout in placed if layout is not None):
        shapes = [one.graph.tensor(value).shape for one in formulated]
        for dim, sizes in enumerate(zip(*shapes, strict=True)):
            parts = math.prod(sharding_sizes(layout, mesh, dim))
            if parts > 1 and len(set(sizes)) > 1:
                found.add((sizes, parts))
    return tuple(sorted(found))
