"""One plan for ranges of sizes: planned at several points of the ranges, with one layout per tensor for all of them.

point p     the graph with the sizes of p (graph.sized); best_p: the seconds of its own best plan, which no plan of it can go below bound_p
common      an op's candidates are those that it has at every point, so that the problems of all points have the same nodes and choices
median      half of the points are within this ratio of their best plans, and the others may be far off: weights as below, where the next
            ones favour the points with small ratios; without a bound. Among equals the one with the least average ratio
average     minimise  sum_p cost_p(x) / sum_p best_p:  the seconds of all points together, as if each were as frequent. One problem, whose
            costs are sums; its bound is that of the ratio
worst       max_p cost_p(x) / best_p >= sum_p y_p cost_p(x) / best_p for any weights y that add up to 1: each choice of weights is an
            ordinary problem that bounds the worst ratio. The next weights favour the points with large ratios
padded      sizes that layouts don't divide can be padded, to multiples of the number of devices: there are more layouts to choose from, and
            the plan's seconds are those of the padded shape, still relative to the best plan of the shape as it is
memory      every size grows with the dims, and so do the bytes of every layout: what fits at the greatest sizes fits everywhere

The plan is of the example inputs; what it is at other points is noted (solution.dynamic).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from statistics import fmean, median
from typing import Any

from autoshard.cycles import no_search_for_cycles
from autoshard.formulate import Formulation, with_pins
from autoshard.graph import Graph, Ranges, SizedGraph, Sizes, Value, corners, grid, sizes_of, written
from autoshard.layout import Layout, sharding_sizes
from autoshard.mesh import Mesh
from autoshard.planning.advice import with_modules
from autoshard.planning.batches import align_batches
from autoshard.planning.demands import allowed_by_pins
from autoshard.planning.describe import described
from autoshard.planning.instance import Instance, formulate_for
from autoshard.planning.options import Infeasible, NoAnswer
from autoshard.planning.question import ModelGraphs, Question, check_effects, part_of
from autoshard.planning.recomputing import with_recomputed_blocks
from autoshard.planning.refusal import reworded
from autoshard.planning.search import best_choice
from autoshard.planning.solving import solve_or_refuse
from autoshard.planning.variants import Answered
from autoshard.problem import Edge, Problem, evaluate
from autoshard.solution import DynamicShapes, Solution
from autoshard.solvers import TOLERANCE, Answer, Status
from autoshard.strategies import common_candidates

# of the seconds relative to the best, by point, and those of the best; the power of the ratios that the next weights favour
CRITERIA: dict[str, tuple[Callable[[Sequence[float], Sequence[float]], float], float]] = {
    "average": (fmean, 0.0), "worst": (lambda ratios, _: max(ratios), 2.0), "median": (lambda ratios, _: median(ratios), -2.0),
}
ROUNDS = 8  # of weights
LEAST_WEIGHT = 1e-4  # of a point
UNLIKE = {"objective": "overlapped", "sequence_order": "head_tail", "chunked_loss": "always"}  # what one plan for ranges can't be asked for


def plan_ranges(
    question: Question, ranges: Ranges, named: Mapping, captured: Callable[[Sizes], Graph], asked: Mapping[str, Any]
) -> Solution:
    """The plan of the example inputs' shape that is best over the ranges. named: by input the names of its dims; captured: the graph at
    a point; asked: the options as they were given."""
    if wrong := next((key for key, value in UNLIKE.items() if asked.get(key) == value), None):
        why = "with dynamic_shapes the sum of all seconds is made small, of the model as it is"
        raise ValueError(f"{wrong} is {asked[wrong]!r}; {why}: leave it out")
    if question.options.recompute in ("auto", "blocks") or question.options.global_batch is not None:
        raise ValueError("with dynamic_shapes give a number of blocks to recompute, or 'all', and microbatches instead of global_batch")
    check_effects(question)
    question = question.with_options(objective="serial")
    example = {name: _sizes(question.graph, named)[name] for name in ranges}
    criterion = question.options.criterion

    def of_size(sizes: Sizes) -> Graph:
        if (has := _sizes(graph := captured(sizes), named)) != sizes:
            raise ValueError(f"the graph has {written(has)} whatever its inputs have; export it with dynamic_shapes, or give the module")
        return graph

    with question.clock.phase("capture", "capturing the ends of the ranges", 0.1), no_search_for_cycles():
        sized = SizedGraph.of(ranges, of_size)
    *less, greatest = grid(ranges)
    points = [example, *(at for at in (greatest, *reversed(less)) if at != example)]
    order = sorted(range(len(points)), key=lambda k: points[k] != greatest)  # it needs the most memory, and a refusal says how much
    solved = {k: _best(question, sized, points[k], k, len(points)) for k in order}
    best = [solved[k] for k in range(len(points))]
    ways, bound = [], math.inf
    for steps in _steps(ranges, points, question.mesh):
        try:
            ways.append(_cover(question, sized, points, best, steps, criterion))
        except Infeasible as error:
            refusal = reworded(error, f"with one layout per tensor for all sizes: {error}")
            bound = 0.0 if isinstance(error, NoAnswer) else bound
    if not ways:
        raise refusal
    bound = min(bound, *(way.bound for way in ways))
    return _described(min(ways, key=lambda way: way.rank), bound, points, best, named, sized, criterion)


def _sizes(graph: Graph, named: Mapping) -> dict[str, int]:
    """The sizes of the dims in a graph."""
    return sizes_of(named, {op.name: op.output.shape for op in graph.ops if op.kind == "input"})


def _question(question: Question, sized: SizedGraph, at: Sizes) -> Question:
    """The question about the step of one point."""
    return with_recomputed_blocks(replace(question, model=ModelGraphs(sized.at(at)))).stepped()


def _best(question: Question, sized: SizedGraph, at: Sizes, k: int, number: int) -> Answered:
    """The best plan of point k of so many, in its share of the time; the usual plans are priced at the first."""
    question = replace(question, clock=part_of(question.clock, f"{{}} at {written(at)}", 0.1 + 0.6 * k / number, 0.6 / number))
    asked = with_recomputed_blocks(replace(question, model=ModelGraphs(sized.at(at))))
    try:
        return best_choice(asked.with_options(baselines=question.options.baselines and not k), share=1 / (number - k + 1))
    except Infeasible as error:
        raise reworded(error, f"at {written(at)}: {error}") from error


def _steps(ranges: Ranges, points: Sequence[Sizes], mesh: Mesh) -> list[dict[str, int]]:
    """What the sizes of the dims may be padded to multiples of: nothing, or the number of devices, where that changes a point and not
    the first."""
    steps = {name: math.lcm(one.multiple, mesh.num_devices) for name, one in ranges.items()}
    fits = [name for name, one in ranges.items() if points[0][name] % steps[name] == one.greatest % steps[name] == 0]
    helps = [name for name in fits if any(at[name] % steps[name] for at in points)]
    return [{name: step for name, step in zip(helps, chosen) if step > 1} for chosen in product(*((1, steps[name]) for name in helps))]


@dataclass(frozen=True, eq=False)
class _Cover:
    """One layout per tensor for all points, each padded to multiples of the steps."""

    ratio: float  # what the criterion makes small
    rank: tuple[float, ...]  # by which the best is chosen
    bound: float
    answer: Answer
    padded: Sequence[Sizes]  # by point
    seconds: Sequence[float]  # by point
    formulated: Formulation  # of the first point
    problem: Problem


def _cover(
    question: Question, sized: SizedGraph, points: Sequence[Sizes], best: Sequence[Answered], steps: Sizes, criterion: str
) -> _Cover:
    padded = [{name: -(-size // steps.get(name, 1)) * steps.get(name, 1) for name, size in at.items()} for at in points]
    options, mesh = question.options, question.mesh
    with question.clock.phase("formulate", "pricing the points", 0.7), no_search_for_cycles():
        graphs = [_question(question, sized, at).graph for at in padded]
        layouts = common_candidates(graphs, mesh)
        formulated = [formulate_for(graph, layouts, mesh, options) for graph in graphs]
        problems = [with_pins(one, allowed_by_pins(one, options)) for one in formulated]
    top = max(range(len(points)), key=lambda p: list(points[p].values()))
    measure, power = CRITERIA[criterion]
    least = [one.answer.cost for one in best]
    weights, bound, kept = [s / sum(least) if power == 0 else 1 / len(points) for s in least], 0.0, None
    for _ in range(ROUNDS if power else 1):
        scaled = [y / s for y, s in zip(weights, least, strict=True)]
        instance = Instance(formulated[top], _sum(problems, scaled, problems[top]))
        with question.clock.phase("solve", f"solving for the {criterion} of {len(points)} points", 0.75):
            answer = solve_or_refuse(question, instance, [kept.answer.choice] if kept and kept.answer.choice else [], share=0.5)
        answer = align_batches(instance.formulated, instance.problem, answer, options.gap)
        assert answer.choice is not None
        seconds = [evaluate(problem, answer.choice).cost for problem in problems]
        ratios = [s / own for s, own in zip(seconds, least, strict=True)]
        bound = max(bound, answer.bound) if power >= 0 else 0.0
        ratio = measure(ratios, least)
        rank = (round(ratio, 3), fmean(ratios)) if power < 0 else (ratio,)
        if kept is None or rank < kept.rank:
            kept = _Cover(ratio, rank, bound, answer, padded, seconds, formulated[0], problems[0])
        weights = [y * ratio**power for y, ratio in zip(weights, ratios, strict=True)]
        weights = [max(y / sum(weights), LEAST_WEIGHT) for y in weights]
        if power > 0:
            weights = [y / sum(weights) for y in weights]
    assert kept is not None
    return replace(kept, bound=bound)


def _described(
    way: _Cover, bound: float, points: Sequence[Sizes], best: Sequence[Answered], named: Mapping, sized: SizedGraph, criterion: str
) -> Solution:
    """The plan of the first point, with what it is at the others."""
    planned = sorted(zip(points, way.padded, way.seconds, best, strict=True), key=lambda of: list(of[0].values()))
    rows = [
        {"sizes": dict(at), "padded": dict(to), "seconds": s, "bound_seconds": min(one.answer.bound, s)}
        for at, to, s, one in planned if at in grid(sized.ranges)
    ]  # fmt: skip
    first, own, answer, problem = best[0].question, best[0].answer, way.answer, way.problem
    assert answer.choice is not None
    at_corners = [_question(first, sized, at).graph for at in corners(sized.ranges)]
    sharded = _sharded(way.formulated, at_corners, answer.choice)
    facts = DynamicShapes(dict(sized.ranges), dict(named), tuple(rows), sharded, criterion, way.ratio, min(bound, way.ratio))
    judged = evaluate(problem, answer.choice)
    proven = judged.cost <= own.bound * (1 + max(first.options.gap, TOLERANCE))
    status = Status.OPTIMAL if proven else Status.FEASIBLE
    answer = replace(answer, cost=judged.cost, peak=judged.peak, bound=min(own.bound, judged.cost), status=status)
    noted = replace(first, assumptions={**first.assumptions, "dynamic_shapes": facts.to_dict()})
    answered = Answered(noted, Instance(way.formulated, problem), answer, best[0].baselines)
    solution = described(answered)
    return with_modules(answered, solution) if first.options.baselines else solution


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


def _sharded(formulated: Formulation, at_corners: Sequence[Graph], choice: Sequence[int]) -> tuple[tuple[tuple[int, ...], int], ...]:
    """The sizes that change over the ranges and that a layout of the choice divides: at the corners, and into how many parts."""
    graph, mesh, placed = formulated.graph, formulated.mesh, list[tuple[Value, Layout | None]]()
    for i, op in enumerate(graph.ops):
        candidate = formulated.candidate(i, choice)
        placed += zip(op.inputs, candidate.inputs, strict=True)
        for k, layout in enumerate(candidate.outputs):
            placed += [((i, k), layout), ((i, k), formulated.hub((i, k), choice))]
    placed += [(value, formulated.result(k, choice)) for k in formulated.results if (value := graph.results[k].value) is not None]
    sharded = set()
    for value, layout in dict.fromkeys((value, layout) for value, layout in placed if layout is not None):
        for dim, sizes in enumerate(zip(*(one.tensor(value).shape for one in at_corners), strict=True)):
            if len(set(sizes)) > 1 and (parts := math.prod(sharding_sizes(layout, mesh, dim))) > 1:
                sharded.add((sizes, parts))
    return tuple(sorted(sharded))
