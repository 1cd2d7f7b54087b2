"""Why a parameter, an op or a block has its layout in a plan: what the layout costs, and what other layouts would cost.

    x             the plan; v the op; K_y the choices of v with output layout y
    globally      min cost(x') over the x' that fit in memory and have x'_v in K_y: the cost of a new plan with that pin  (`Reopened.best`)
    locally       the same with x' = x except for v and the copy of its output that is kept for the readers   (`Reopened.best_beside`)
    differences   the ops and edges whose seconds differ between x and x'; they add up to the difference in cost    (`cost_differences`)

For an op, the cheapest other layouts are reported. They are solved in ascending order of a lower bound on the cost of each, until no bound
is below the costs that are known. For a block, the usual schemes are reported, each applied to this block alone.
"""

import math
from dataclasses import replace
from typing import Any

from torch import nn

from autoshard.capture import in_turn
from autoshard.explain.differences import CostDifference, cost_differences, edge_term, held_at_once, op_term, touching
from autoshard.explain.explanations import Alternative, Explanation
from autoshard.explain.reopened import Choice, Reopened, Way, captured, nearest, reopened
from autoshard.explain.subjects import Subject, chosen, subject, wanted, ways
from autoshard.layout import text
from autoshard.planning import Instance, ModelGraphs, Progress, Question, Stopwatch, bytes_text, infeasible
from autoshard.problem import Problem, evaluate
from autoshard.simulate import timeline_of
from autoshard.solution import Solution
from autoshard.solvers import Answer, Status

LISTED = 10  # at most so many ops and edges that cost more, and as many that cost less


@in_turn
def explain(
    model: nn.Module,
    example_inputs: Any,
    solution: Solution,
    name: str,
    *,
    why_not: str | None = None,
    most: int = 5,
    time_limit: float = 60.0,
    progress: Progress | None = None,
) -> Explanation:
    """Why `name` (a parameter, buffer, input, op or block) has its layout in a plan of this model, and what other layouts cost.

    why_not: one layout to ask about, as `S(1),R`; for a block, each of its parameters that can have it gets it. most: how many
    alternatives to report. time_limit: seconds for each plan that is solved on the way. ValueError for an unknown name (the message lists
    similar ones), for a text that is not a layout, and where the solution is of another model.

        autoshard.explain(model, example_inputs, solution, "h.3.attn.c_attn.weight", why_not="S(1),R").why_not.extra
    """
    if most < 0 or not time_limit > 0:
        raise ValueError(f"most is {most} and time_limit is {time_limit}; expected 0 or more, and more than 0 seconds")
    watch = Stopwatch(progress)
    with watch.phase("capture", "capturing the model", 0.0):
        graph = captured(model, example_inputs, solution).checked()
    with watch.phase("formulate", "pricing layouts", 0.3):
        plan = reopened(graph, solution)
    if not math.isfinite(plan.judged.cost):
        raise ValueError("the plan's layouts are no longer possible under today's rules; plan again")
    about = subject(plan.formulated, name)
    asked = None if why_not is None else wanted(plan.formulated, about, why_not)
    with watch.phase("solve", f"planning {about.name} in other ways", 0.5):
        alternatives, left_out = _alternatives(plan, about, most, time_limit)
        same = (one for one in alternatives if asked is not None and one.pins and one.pins == asked.pins and not one.reason)
        answered = None if asked is None else next(same, None) or _alternative(plan, about, asked, time_limit, explained=True)
    answers: dict[str, Any] = {"alternatives": tuple(alternatives), "left_out": left_out, "why_not": answered}
    return _explanation(plan, about, solution, **answers, cpu_seconds=watch.seconds()["cpu"])


def _explanation(plan: Reopened, about: Subject, solution: Solution, **answers: Any) -> Explanation:
    formulated, choice, block = plan.formulated, plan.choice, about.kind == "block"
    op = formulated.graph.ops[about.nodes[0]]
    first = None if block else op.outputs[0]
    with_hubs = [*about.nodes, *(node for (i, _), node in formulated.hubs.items() if i in set(about.nodes))]
    crossing, within = touching(formulated, with_hubs)
    edges = sorted((edge_term(formulated, e, choice) for e in (*crossing, *within)), key=lambda edge: -edge.seconds)
    parts = sorted((op_term(formulated, i, choice) for i in about.nodes), key=lambda part: -part.seconds)
    tables = formulated.problem.edges
    return Explanation(
        name=about.name,
        kind=about.kind,
        module=about.name if block else op.module,
        target="" if block else op.target,
        shape=None if first is None else first.shape,
        dtype="" if first is None else first.dtype,
        layout=chosen(formulated, about, choice),
        parameters=_parameters(plan, about) if block else {},
        seconds=math.fsum(part.seconds for part in parts),
        edge_seconds=math.fsum(tables[e].table[choice[tables[e].a], choice[tables[e].b]] for e in (*crossing, *within)),
        parts=tuple(part for part in parts if part.seconds or not block),
        edges=tuple(edge for edge in edges if edge.seconds or not block),
        bytes=held_at_once(formulated, with_hubs, choice),
        cost=plan.judged.cost,
        planned_cost=solution.cost,
        step_seconds=_step_seconds(plan, plan.choice),
        status=solution.status,
        peak_bytes=plan.judged.peak,
        memory_limit=plan.options.memory_limit,
        **answers,
    )


def _parameters(plan: Reopened, about: Subject) -> dict[str, str]:
    ops = plan.formulated.graph.ops
    layouts = {ops[i].name: plan.formulated.candidate(i, plan.choice).outputs[0] for i in about.nodes if ops[i].kind == "parameter"}
    return {name: text(layout) for name, layout in layouts.items() if layout is not None}


def _alternatives(plan: Reopened, about: Subject, most: int, time_limit: float) -> tuple[list[Alternative], dict[str, float]]:
    """The cheapest `most` alternatives to the planned layout, and a lower bound on the cost of each of the others."""
    own = chosen(plan.formulated, about, plan.choice)
    others = [way for way in ways(plan.formulated, about) if way.label != own] if most else []
    floors = {way.label: _floor(plan, about, way) for way in others}
    solved: list[Alternative] = []
    for way in sorted(others, key=lambda way: floors[way.label]):
        enough = sorted(one.cost for one in solved)[most - 1] if len(solved) >= most else math.inf
        if floors[way.label] < enough or not solved:
            solved.append(_alternative(plan, about, way, time_limit))
            floors[way.label] = solved[-1].bound
    told = sorted(solved, key=lambda one: one.cost)[:most]
    return told, {label: floor for label, floor in floors.items() if label not in {one.label for one in told}}


def _floor(plan: Reopened, about: Subject, way: Way) -> float:
    """A lower bound on the cost of plans with this layout; 0 for a block, of which nothing is known beforehand."""
    return 0.0 if about.kind == "block" else max((float(plan.floors[i][keep].min()) for i, keep in way.kept.items()), default=0.0)


def _alternative(plan: Reopened, about: Subject, way: Way, time_limit: float, *, explained: bool = False) -> Alternative:
    """One alternative, solved globally and locally. explained: where there is no plan, also find what conflicts, which takes a while."""
    if way.reason:
        return Alternative(way.label, way.pins, way.reason, local_reason=way.reason)
    problem = plan.narrowed(way)
    local = plan.best_beside(problem, about.nodes)
    answer = plan.best(problem, starts=[] if local is None else [local], time_limit=time_limit)
    beside = _local(plan, problem, way, local)
    if answer.choice is None:
        why = _why_none(plan, problem, way, answer, time_limit, explained=explained)
        return Alternative(way.label, way.pins, why, bound=answer.bound, proven=answer.bound == math.inf, **beside)
    choice = answer.choice if plan.options.tie_blocks else nearest(problem, answer.choice, plan.choice, about.nodes)
    judged = evaluate(problem, choice)
    dearer, cheaper = _differences(plan, choice)
    return Alternative(
        label=way.label,
        pins=way.pins,
        reason="",
        cost=judged.cost,
        bound=min(answer.bound, judged.cost),
        proven=answer.status is Status.OPTIMAL,
        extra=judged.cost - plan.judged.cost,
        peak_bytes=plan.formulated.peak(choice),
        step_seconds=_step_seconds(plan, choice),
        dearer=dearer[:LISTED],
        dearer_seconds=math.fsum(one.extra_seconds for one in dearer),
        cheaper=cheaper[:LISTED],
        cheaper_seconds=math.fsum(one.extra_seconds for one in cheaper),
        **beside,
        **_elsewhere(plan, about, choice),
    )


def _step_seconds(plan: Reopened, choice: Choice) -> float | None:
    return None if plan.options.objective == "serial" else timeline_of(plan.formulated, choice, join=True).seconds


def _differences(plan: Reopened, choice: Choice) -> tuple[tuple[CostDifference, ...], tuple[CostDifference, ...]]:
    """The ops and edges that cost more in this choice, and those that cost less; the largest differences first."""
    differing = cost_differences(plan.formulated, plan.choice, choice)
    dearer = tuple(one for one in differing if one.extra_seconds > 0)
    return dearer, tuple(one for one in reversed(differing) if one.extra_seconds < 0)


def _local(plan: Reopened, problem: Problem, way: Way, choice: Choice | None) -> dict[str, Any]:
    """What the alternative costs with all other layouts as planned."""
    if choice is None:
        return {"local_reason": _forbidden(plan, problem, way)}
    judged, (dearer, _) = evaluate(problem, choice), _differences(plan, choice)
    if judged.fits:
        return {"local_extra": judged.cost - plan.judged.cost, "local_dearer": dearer[:LISTED]}
    limit = bytes_text(problem.usage_limit or 0.0)
    reason = f"over memory: {bytes_text(judged.peak, up=True)} per device at the peak, the limit is {limit}"
    return {"local_reason": reason, "local_dearer": dearer[:LISTED]}


def _forbidden(plan: Reopened, problem: Problem, way: Way) -> str:
    """Why it is impossible with all other layouts as planned: in words, an edge that has no route then."""
    if any(math.isinf(problem.node_costs[i].min()) for i in way.kept):
        return "what the plan was asked for is against it"
    first = {i: int(keep.argmax()) for i, keep in way.kept.items()}
    choice = tuple(first.get(v, k) for v, k in enumerate(plan.choice))
    for e, edge in enumerate(plan.formulated.problem.edges):
        if math.isinf(edge.table[choice[edge.a], choice[edge.b]]):
            one = edge_term(plan.formulated, e, choice)
            return f"there is no route from {one.inputs[0]} to {one.outputs[0]} on {one.name}"
    return "its neighbours as they are planned leave no choice"


def _why_none(plan: Reopened, problem: Problem, way: Way, answer: Answer, time_limit: float, *, explained: bool) -> str:
    why = answer.infeasibility
    if answer.status is Status.INFEASIBLE and not plan.pinned and (why is None or math.isinf(why.smallest_limit[0])):
        return "no choice of the other layouts leads to it: what it needs has no route"  # neither pins nor memory cause it
    asked = replace(plan.asked(way), time_limit=time_limit)
    context = Question(ModelGraphs(plan.formulated.graph), plan.formulated.mesh, asked, Stopwatch(None), explains=explained)
    return str(infeasible(context, Instance(plan.formulated, problem), answer))


def _elsewhere(plan: Reopened, about: Subject, choice: Choice) -> dict[str, Any]:
    """The other ops whose output layouts differ in another choice."""
    formulated, own = plan.formulated, set(about.nodes)
    changed, changed_ops = {}, []
    for i, op in enumerate(formulated.graph.ops):
        if i in own or choice[i] == plan.choice[i]:
            continue
        before, after = (formulated.candidate(i, one).outputs[0] for one in (plan.choice, choice))
        if not op.is_placeholder:
            changed_ops.append(op.name)
        elif before is not None and after is not None:
            changed[op.name] = (text(before), text(after))
    return {"changed": changed, "changed_ops": tuple(changed_ops)}
