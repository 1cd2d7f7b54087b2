"""What the ops and edges of a plan cost, one by one and by name; and in which of them two plans differ.

    cost(x') - cost(x) = sum over ops v of c_v(x'_v) - c_v(x_v)  +  sum over edges of T(x'_a, x'_b) - T(x_a, x_b)      (`moved`)

An edge leads from what its producer gives to what its reader takes; of a tensor with several readers it leads to its hub, where one
copy waits for all of them, and from there to each.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from autoshard.formulate import Formulation
from autoshard.layout import Layout, text
from autoshard.strategies import internal_collectives

Choice = Sequence[int]


@dataclass(frozen=True)
class Priced:
    """One op or one edge under one choice."""

    kind: str  # op, or what an edge carries: copy (to the hub), input, gradient, buffer, output
    name: str  # of the op; `producer -> reader` of an edge
    module: str
    takes: tuple[str, ...]  # layouts that come in; of an edge the one that the producer gives
    gives: tuple[str, ...]  # layouts that go out; of an edge the one that the reader takes
    seconds: float  # inf where there is no route
    steps: tuple[str, ...]  # collectives, `all_gather axis1`


@dataclass(frozen=True)
class Moved:
    """One op or edge that does not cost the same in two plans."""

    before: Priced
    after: Priced

    @property
    def extra_seconds(self) -> float:
        return self.after.seconds - self.before.seconds


def priced_op(formulated: Formulation, i: int, choice: Choice) -> Priced:
    op, candidate = formulated.graph.ops[i], formulated.candidate(i, choice)
    inside = internal_collectives(op, formulated.graph.input_tensors(i), candidate.inputs, formulated.mesh)
    steps = tuple(f"{name} {formulated.mesh.axes[axis].name}" for name, axis, _ in inside)
    seconds = float(formulated.problem.node_costs[i][choice[i]])
    return Priced("op", op.name, op.module, _texts(candidate.inputs), _texts(candidate.outputs), seconds, steps)


def priced_edge(formulated: Formulation, e: int, choice: Choice) -> Priced:
    link, edge, ops = formulated.links[e], formulated.problem.edges[e], formulated.graph.ops
    seconds = float(edge.table[choice[edge.a], choice[edge.b]])
    route = formulated.route(link, choice)
    steps = tuple(f"{step.collective} {formulated.mesh.axes[step.axis].name}" for step in route.steps) if route else ()
    module = ops[link.b].module if link.b < len(ops) else ops[link.value[0]].module
    names = formulated.problem.names
    takes, gives = _texts([link.gives[choice[link.a]]]), _texts([link.takes[choice[link.b]]])
    return Priced(_carried(formulated, e), f"{names[link.a]} -> {names[link.b]}", module, takes, gives, seconds, steps)


def _carried(formulated: Formulation, e: int) -> str:
    """Edges stand in this order (formulate.build): to hubs, to inputs, to results."""
    results = [formulated.graph.results[k].kind for k in formulated.results]
    first = len(formulated.links) - len(results)
    return "copy" if e < len(formulated.hubs) else "input" if e < first else results[e - first]


def _texts(layouts: Sequence[Layout | None]) -> tuple[str, ...]:
    return tuple("-" if layout is None else text(layout) for layout in layouts)


def moved(formulated: Formulation, before: Choice, after: Choice) -> list[Moved]:
    """All ops and edges whose seconds differ, dearest first."""
    problem, found = formulated.problem, []
    for i in range(len(formulated.graph.ops)):
        if problem.node_costs[i][before[i]] != problem.node_costs[i][after[i]]:
            found.append(Moved(priced_op(formulated, i, before), priced_op(formulated, i, after)))
    for e, edge in enumerate(problem.edges):
        if edge.table[before[edge.a], before[edge.b]] != edge.table[after[edge.a], after[edge.b]]:
            found.append(Moved(priced_edge(formulated, e, before), priced_edge(formulated, e, after)))
    return sorted(found, key=lambda one: -one.extra_seconds)  # stable: equal ones in the order of the graph


def touching(formulated: Formulation, nodes: Collection[int]) -> tuple[list[int], list[int]]:
    """Edges between these nodes and others, and edges among them."""
    inside, crossing, within = set(nodes), list[int](), list[int]()
    for e, edge in enumerate(formulated.problem.edges):
        ends = (edge.a in inside) + (edge.b in inside)
        if ends:
            (within if ends == 2 else crossing).append(e)
    return crossing, within


def held_at_once(formulated: Formulation, nodes: Collection[int], choice: Choice) -> dict[str, float]:
    """Bytes per device that these nodes, and copies on edges that lead to them, hold when they hold most, by what they are."""
    problem, inside = formulated.problem, set(nodes)
    spans = []
    for kind, usage in zip(formulated.held, problem.usages, strict=True):
        if usage.ends[-1] in inside and usage.start < usage.end and (held := usage.held(choice)):
            spans.append((usage.start, usage.end, kind, held))
    best: dict[str, float] = {}
    for time in sorted({start for start, _, _, _ in spans}):
        now: dict[str, float] = {}
        for start, end, kind, held in spans:
            if start <= time < end:
                now[kind] = now.get(kind, 0.0) + held
        best = max(best, now, key=lambda kinds: sum(kinds.values()))
    return best
