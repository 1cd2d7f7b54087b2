"""What one stage of a pipeline takes on one mesh: its layouts from the planner, priced as a stage.

A stage runs K microbatches per step with q of them in flight. Of the planner's problem for one microbatch

    t = f + b + o / K       forward, backward, and once per step: the optimizer, reductions of gradients
    bytes(q) = peak + (q - 1) saved                 saved: what the forward pass of a microbatch leaves for its backward pass

are planned without overlap; reductions that scatter (a gradient sharded more than it is made) count for every microbatch. What is then
reported of the layouts is simulated with collectives beside kernels (`pipeline.stage_costs.parts_of`), as `autoshard simulate` does. Values
from other stages arrive cut over all devices; a layout that holds more is gathered, at that price. Parameters and their gradients are
held throughout.

A limit on memory is priced: the least of t + lambda (static + q saved) for a few lambda are points on the lower convex hull of seconds
over bytes (`options`), each found with its proof.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from autoshard.baselines import allowed, baselines
from autoshard.cost import gather_seconds, slowest_seconds_per_byte
from autoshard.cycles import no_search_for_cycles
from autoshard.formulate import Formulation, Training, formulate, with_pins
from autoshard.graph import Graph
from autoshard.layout import Layout, local_numel
from autoshard.mesh import Mesh
from autoshard.pipeline.configurations import Option
from autoshard.pipeline.stage_costs import parts_of
from autoshard.planning.describe import layouts_of
from autoshard.problem import Edge, Problem, evaluate
from autoshard.simulate.program import program_of
from autoshard.solvers import converged, solve
from autoshard.strategies import Candidates, candidates

LAYER_GAP, STAGE_GAP = 0.01, 0.005  # relative: how well single layers are planned, and stages that are kept
STATIC = ("parameters", "gradients", "optimizer_state")


@dataclass(frozen=True)
class Job:
    """A stage to be planned, as a value that any executor can carry."""

    graph: Graph
    signature: str  # of the graph
    mesh: Mesh
    microbatches: int
    in_flight: int
    optimizer: str | float
    prices: tuple[float, ...]  # lambda, in units of seconds per byte over the slowest axis
    pins: str = ""  # a baseline's name: complete its pins instead
    recompute: bool = False
    time_limit: float = 60.0  # seconds per lambda
    layouts: bool = False  # keep the layouts; of equal ones take those that the planner prefers

    @property
    def key(self) -> tuple:
        """Equal for equal work."""
        how = (self.microbatches, self.in_flight, self.optimizer, self.prices, self.pins, self.recompute, self.layouts)
        return (self.signature, self.mesh, *how)


@no_search_for_cycles()
def options(job: Job) -> tuple[Option, ...]:
    """One option per lambda; none where the pins forbid each other."""
    priced = StageProblem(job)
    found = []
    for price in job.prices:
        option = priced.solved(price * priced.unit)
        if option is not None:
            found.append(option)
    return tuple(found)


class StageProblem:
    """A stage's Problem with the prices of a pipeline."""

    def __init__(self, job: Job):
        self.job, graph = job, job.graph
        training = Training(job.optimizer) if any(r.kind == "gradient" for r in graph.results) else None
        found = candidates(graph, job.mesh)
        found, keep = _pinned(graph, found, job) if job.pins else (found, {})
        self.formulated = formulate(graph, found, job.mesh, training=training)
        self.unit = slowest_seconds_per_byte(job.mesh)
        self.static, self.saved = _holders(self.formulated)
        self.dearest_arrivals = math.fsum(max(_arrivals(self.formulated, i)) for i in _received(graph))
        self.problem = _as_stage(self.formulated, with_pins(self.formulated, keep), job.microbatches)

    def solved(self, price: float) -> Option | None:
        """The layouts of least t + lambda bytes."""
        preference = self.formulated.preference if self.job.layouts else None
        gap = STAGE_GAP if self.job.layouts else LAYER_GAP
        problem = self._with_bytes(price)
        choice, messages = converged(problem, gap=gap)  # proves nearly all of them, before anything is reduced
        start = [] if choice is None else [choice]
        given: dict[str, Any] = {"time_limit": self.job.time_limit, "gap": gap, "preference": preference}
        answer = solve(problem, starts=start, messages=messages, **given).in_passing()
        if answer.choice is None or not math.isfinite(answer.cost):
            return None
        return replace(self.option(answer.choice), bound=max(answer.bound - self.dearest_arrivals, 0.0), price=price / self.unit)

    def _with_bytes(self, price: float) -> Problem:
        if not price:
            return replace(self.problem, usages=())
        costs, tables = list(self.problem.node_costs), [edge.table for edge in self.problem.edges]
        for k, usage in enumerate(self.problem.usages):
            times = 1 if k in self.static else self.job.in_flight if k in self.saved else 0
            if times:
                arrays, at = (costs, usage.ends[0]) if usage.edge is None else (tables, usage.edge)
                arrays[at] = arrays[at] + times * price * usage.bytes
        edges = tuple(Edge(e.a, e.b, table) for e, table in zip(self.problem.edges, tables))
        return replace(self.problem, node_costs=tuple(costs), edges=edges, usages=())

    def option(self, choice: Sequence[int]) -> Option:
        """What a choice takes, by parts."""
        problem, formulated = self.problem, self.formulated
        held = {True: 0.0, False: 0.0}
        for k, usage in enumerate(problem.usages):
            if k in self.static or k in self.saved:
                held[k in self.static] += usage.held(choice)
        peak = evaluate(problem, choice).peak
        program = program_of(formulated, choice)
        everything = [0] * len(formulated.graph.ops)
        (part,), (silent,) = parts_of(program, everything, 1), parts_of(program, everything, 1, communication=False)
        arrivals = {False: 0.0, True: 0.0}
        for i in _received(formulated.graph):
            arrivals[formulated.graph.ops[i].kind == "tangent"] += _arrivals(formulated, i)[choice[i]]
        updates = [task for task in program.tasks if task.phase == "update"]
        return Option(
            forward=part.forward + arrivals[False],
            backward=part.backward + arrivals[True],
            weight=part.weight,
            once=part.finish,
            static_bytes=held[True],
            saved_bytes=held[False],
            transient_bytes=max(peak - held[True] - held[False], 0.0),
            communication=part.forward + part.backward - silent.forward - silent.backward + sum(arrivals.values()),
            reduction=math.fsum(task.seconds for task in updates if task.kind != "optimizer"),
            update=math.fsum(task.seconds for task in updates if task.kind == "optimizer"),
            hides=silent.backward,
            mesh=self.job.mesh.shape,
            recompute=self.job.recompute,
            layouts=tuple(layouts_of(formulated, choice).values()) if self.job.layouts else (),
        )


def _pinned(graph: Graph, found: Candidates, job: Job) -> tuple[Candidates, dict[int, np.ndarray]]:
    """Only candidates that the baseline's pins leave to some op of the signature, and which of them they leave to each op."""
    chosen = next(b for b in baselines(graph, job.mesh, found) if b.name == job.pins)
    keep = allowed(chosen.pins, graph, found)
    masks = [np.asarray(keep[i], dtype=bool) if i in keep else np.ones(len(cs), dtype=bool) for i, cs in enumerate(found.of)]
    union: dict[tuple, np.ndarray] = {}
    for i, mask in enumerate(masks):
        signature = graph.signature(i)
        union[signature] = union[signature] | mask if signature in union else mask
    lists = {graph.signature(i): tuple(c for c, ok in zip(cs, union[graph.signature(i)]) if ok) for i, cs in enumerate(found.of)}
    of = tuple(lists[graph.signature(i)] for i in range(len(graph.ops)))
    return Candidates(of, found.unknown, found.num_signatures), {i: mask[union[graph.signature(i)]] for i, mask in enumerate(masks)}


def turn_of(graph: Graph) -> int:
    """The time at which the backward pass begins; behind the last op where there is none."""
    return next((i for i, op in enumerate(graph.ops) if op.backward), len(graph.ops) + 1)


def _holders(formulated: Formulation) -> tuple[frozenset[int], frozenset[int]]:
    """Usages that are held throughout, and those that every microbatch in flight has of its own."""
    graph, turn = formulated.graph, turn_of(formulated.graph)
    varies: list[bool] = []  # with the microbatch
    for op in graph.ops:
        varies.append(op.kind == "input" or any(varies[a] for a, _ in op.inputs))
    hubs = {node: value for value, node in formulated.hubs.items()}
    static, saved = set(), set()
    for k, (usage, kind) in enumerate(zip(formulated.problem.usages, formulated.held, strict=True)):
        if kind in STATIC:
            static.add(k)
            continue
        node = usage.ends[0]
        i = formulated.links[usage.edge].value[0] if usage.edge is not None else hubs[node][0] if node in hubs else node
        if i >= len(graph.ops) or not varies[i] or turn > len(graph.ops):
            continue
        kept = usage.start < turn < usage.end and not (kind == "inputs" and graph.last_use.get((i, 0), 0) < turn)
        if kept and graph.ops[i].kind != "tangent":
            saved.add(k)
    return frozenset(static), frozenset(saved)


def _as_stage(formulated: Formulation, problem: Problem, microbatches: int) -> Problem:
    """Once-per-step costs shared by K microbatches, arrivals priced, gradients held throughout."""
    graph, K = formulated.graph, microbatches
    costs = list(problem.node_costs)
    shared: dict[int, np.ndarray] = {}
    for i, op in enumerate(graph.ops):
        if op.kind == "parameter":
            costs[i] = shared.setdefault(id(problem.node_costs[i]), problem.node_costs[i] / K)
    for i in _received(graph):
        costs[i] = costs[i] + np.array(_arrivals(formulated, i))
    tables: dict[tuple, np.ndarray] = {}
    edges = []
    for edge, link in zip(problem.edges, formulated.links, strict=True):
        if _is_gradient(formulated, link.b):
            key = (id(edge.table), id(link.gives), id(link.takes))
            if key not in tables:
                tables[key] = np.where(_once(formulated, link), edge.table / K, edge.table)
            edge = Edge(edge.a, edge.b, tables[key])
        edges.append(edge)
    usages = [
        replace(usage, start=0) if kind == "gradients" else usage for usage, kind in zip(problem.usages, formulated.held, strict=True)
    ]
    return replace(problem, node_costs=tuple(costs), edges=tuple(edges), usages=tuple(usages), usage_limit=None)


def _received(graph: Graph) -> list[int]:
    return [i for i, op in enumerate(graph.ops) if op.is_placeholder and op.name.startswith("recv:")]


def _arrivals(formulated: Formulation, i: int) -> list[float]:
    """Seconds in which received value i is gathered, per candidate."""
    tensor = formulated.graph.tensor((i, 0))
    return [gather_seconds(tensor.shape, tensor.itemsize, c.outputs[0], formulated.mesh) for c in formulated.candidates.of[i]]


def _is_gradient(formulated: Formulation, node: int) -> bool:
    return node < len(formulated.graph.ops) and formulated.graph.ops[node].kind == "parameter"


def _once(formulated: Formulation, link) -> np.ndarray:
    """Pairs whose gradient takes no more room before the reduction than after it: it is kept as it is, and reduced once."""
    def sizes(layouts: Sequence[Layout]) -> np.ndarray:
        return np.array([local_numel(link.tensor.shape, layout, formulated.mesh) for layout in layouts])

    return sizes(link.gives)[:, None] <= sizes(link.takes)[None, :]
