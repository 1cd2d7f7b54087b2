"""The cost of a plan as a sum over its ops and edges, and the terms of that sum in which two plans differ.

    cost(x') - cost(x) = sum over ops v of c_v(x'_v) - c_v(x_v)  +  sum over edges of T(x'_a, x'_b) - T(x_a, x_b)      (`cost_differences`)

An edge leads from a tensor's producer to its reader, and costs the change from the output layout of the one to the input layout of the
other. A tensor with several readers has a hub: one edge leads from the producer to the hub, where one copy is kept for all readers, and one
edge leads from the hub to each reader.
"""

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass

from autoshard.formulate import Formulation, op_collectives
from autoshard.layout import Layout, text

Choice = Sequence[int]


@dataclass(frozen=True)
class CostTerm:
    """What one op or one edge costs under one choice."""

    kind: str  # op, or what an edge transfers: copy (to the hub), input, gradient, buffer, output
    name: str  # of the op; `producer -> reader` of an edge
    module: str
    inputs: tuple[str, ...]  # input layouts of the op; of an edge the output layout of the producer. "takes" in JSON
    outputs: tuple[str, ...]  # output layouts of the op; of an edge the input layout of the reader. "gives" in JSON
    seconds: float  # inf where there is no route
    steps: tuple[str, ...]  # collectives, `all_gather axis1`

    def to_dict(self) -> dict:
        keys = {"inputs": "takes", "outputs": "gives"}
        return {keys.get(name, name): value for name, value in asdict(self).items()}


@dataclass(frozen=True)
class CostDifference:
    """One op or edge that does not cost the same in two plans."""

    before: CostTerm
    after: CostTerm

    @property
    def extra_seconds(self) -> float:
        return self.after.seconds - self.before.seconds

    def to_dict(self) -> dict:
        ends = {side: term.to_dict() for side, term in vars(self).items()}
        shared = {key: [end.pop(key) for end in ends.values()][0] for key in ("kind", "name", "module")}
        return {**shared, **ends, "extra_seconds": self.extra_seconds}


def op_term(formulated: Formulation, i: int, choice: Choice) -> CostTerm:
    op, candidate = formulated.graph.ops[i], formulated.candidate(i, choice)
    collectives = op_collectives(op, formulated.graph.input_tensors(i), candidate, formulated.mesh)
    steps = tuple(f"{one.collective} {formulated.mesh.axes[one.axis].name}" for one in collectives)
    seconds = float(formulated.problem.node_costs[i][choice[i]])
    inputs, outputs = (tuple(map(layout_text, some)) for some in (candidate.inputs, candidate.outputs))
    return CostTerm("op", op.name, op.module, inputs, outputs, seconds, steps)


def edge_term(formulated: Formulation, e: int, choice: Choice) -> CostTerm:
    link, edge, ops = formulated.tensor_edges[e], formulated.problem.edges[e], formulated.graph.ops
    seconds = float(edge.table[choice[edge.a], choice[edge.b]])
    route = formulated.route(link, choice)
    steps = tuple(f"{step.collective} {formulated.mesh.axes[step.axis].name}" for step in route.steps) if route else ()
    module = ops[link.b].module if link.b < len(ops) else ops[link.value[0]].module
    names = formulated.problem.names
    inputs, outputs = (layout_text(link.source_layouts[choice[link.a]]),), (layout_text(link.target_layouts[choice[link.b]]),)
    place, k, _ = formulated.places[e]
    kind = {"shared": "copy", "input": "input"}.get(place) or formulated.graph.results[k].kind
    return CostTerm(kind, f"{names[link.a]} -> {names[link.b]}", module, inputs, outputs, seconds, steps)


def layout_text(layout: Layout | None) -> str:
    return "-" if layout is None else text(layout)


def cost_differences(formulated: Formulation, before: Choice, after: Choice) -> list[CostDifference]:
    """All ops and edges whose seconds differ, the largest increase first."""
    problem, differing = formulated.problem, []
    for i in range(len(formulated.graph.ops)):
        if problem.node_costs[i][before[i]] != problem.node_costs[i][after[i]]:
            differing.append(CostDifference(op_term(formulated, i, before), op_term(formulated, i, after)))
    for e, edge in enumerate(problem.edges):
        if edge.table[before[edge.a], before[edge.b]] != edge.table[after[edge.a], after[edge.b]]:
            differing.append(CostDifference(edge_term(formulated, e, before), edge_term(formulated, e, after)))
    return sorted(differing, key=lambda one: -one.extra_seconds)  # stable: equal ones in the order of the graph


def touching(formulated: Formulation, nodes: Collection[int]) -> tuple[list[int], list[int]]:
    """Edges between these nodes and others, and edges among them."""
    inside, crossing, within = set(nodes), list[int](), list[int]()
    for e, edge in enumerate(formulated.problem.edges):
        ends = (edge.a in inside) + (edge.b in inside)
        if ends:
            (within if ends == 2 else crossing).append(e)
    return crossing, within


def held_at_once(formulated: Formulation, nodes: Collection[int], choice: Choice) -> dict[str, float]:
    """Bytes per device of these nodes and of copies on edges that lead to them, at the time when they are largest, by kind."""
    problem, inside = formulated.problem, set(nodes)
    spans = []
    for kind, usage in zip(formulated.held, problem.usages, strict=True):
        if usage.ends[-1] in inside and usage.start < usage.end and (held := usage.held(choice)):
            spans.append((usage.start, usage.end, kind, held))
    best: dict[str, float] = {}
    for time in sorted({start for start, _, _, _ in spans}):
        now = defaultdict[str, float](float)
        for start, end, kind, held in spans:
            if start <= time < end:
                now[kind] += held
        best = max(best, dict(now), key=lambda kinds: sum(kinds.values()))
    return best
