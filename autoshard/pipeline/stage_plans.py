"""The layouts of one pipeline stage on one mesh, from the planner, with the seconds and bytes of the stage.

A stage runs K microbatches per step with q of them in flight. The planner's problem is for one microbatch and without overlap:

    t = f + b + o / K       forward, backward, and once per step: the optimizer, reductions of gradients
    bytes(q) = peak + (q - 1) saved                 saved: bytes that the forward pass of a microbatch saves for its backward pass

Where the schedule splits the backward pass, a microbatch holds `kept` from the first half to the second.

A reduction that scatters (the gradient has more shards than its producer's output) counts for every microbatch. Values
from other stages arrive sharded over all devices; if a layout holds more, the seconds of gathering it are added. Parameters and their
gradients are held throughout. The reported seconds of the layouts are simulated with collectives overlapping kernels
(`stage_costs.stage_costs_of`), as in `autoshard simulate`.

A limit on memory is a price per byte: the optima of t + lambda (static + q saved) for a few lambda are points on the lower convex hull of
seconds over bytes (`options_on_mesh`), each with a proven bound.
"""

import math
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from autoshard.baselines import allowed, baseline
from autoshard.cost import gather_seconds, slowest_seconds_per_byte
from autoshard.cycles import no_search_for_cycles
from autoshard.formulate import Formulation, Tables, Training, formulate, with_pins
from autoshard.graph import Graph
from autoshard.layout import Layout, local_numel
from autoshard.mesh import Mesh
from autoshard.pipeline.configurations import StageOption
from autoshard.pipeline.stage_costs import accumulation_seconds, kernel_seconds, stage_costs_of
from autoshard.pipeline.stage_programs import second_half
from autoshard.planning import layouts_of
from autoshard.problem import Edge, Problem, usage_profile
from autoshard.simulate import program_of
from autoshard.solution import RECEIVED
from autoshard.solvers import converged, solve
from autoshard.strategies import Candidates, KnownCandidates, candidates

LAYER_GAP, STAGE_GAP = 0.01, 0.005  # relative: how well single layers are planned, and stages that are kept
STATIC = ("parameters", "gradients", "optimizer_state")


@dataclass(frozen=True)
class Job:
    """A stage to be planned, as a value that can be sent to any executor."""

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
    layouts: bool = False  # keep the layouts; among equal costs choose those that the planner prefers
    halved: bool = False  # the graph is that of a `StageProgram.halved`

    @property
    def problem_key(self) -> tuple:
        """Equal for the same problem; the prices may differ."""
        how = (self.microbatches, self.in_flight, self.optimizer, self.pins, self.recompute, self.layouts, self.halved)
        return (self.signature, self.mesh, *how)

    @property
    def key(self) -> tuple:
        return (*self.problem_key, self.prices)


class SharedOnMesh:
    """What the jobs on one mesh share: candidates, routes and tables of the same tensors, and the problems of single units."""

    def __init__(self, mesh: Mesh):
        self.candidates, self.tables = KnownCandidates(), Tables(mesh)
        self.problems: dict[tuple, StageProblem] = {}

    def problem(self, job: Job) -> "StageProblem":
        known = self.problems.get(job.problem_key) or StageProblem(job, self)
        if not job.layouts:  # of an entire stage
            self.problems[job.problem_key] = known
        return known


@no_search_for_cycles()
def options_on_mesh(jobs: Sequence[Job], shared: SharedOnMesh | None = None) -> list[tuple[StageOption, ...]]:
    """Per job one option per lambda; none where the pins exclude each other. All jobs are on the same mesh."""
    shared = shared or SharedOnMesh(jobs[0].mesh)
    options_of = []
    for job in jobs:
        problem = shared.problem(job)
        options = [problem.solved(price * problem.unit) for price in job.prices]
        options_of.append(tuple(option for option in options if option is not None))
    return options_of


class JobRunner:
    """Runs jobs, equal ones once, in this process or in an executor."""

    def __init__(self, executor: Executor | None):
        self.executor = executor
        self.known: dict[tuple, tuple[StageOption, ...]] = {}
        self.shared: dict[Mesh, SharedOnMesh] = {}  # in this process, by the jobs of one number of microbatches
        self.microbatches = 0

    def run(self, jobs: Sequence[Job]) -> list[tuple[StageOption, ...]]:
        by_mesh: dict[Mesh, dict[tuple, Job]] = {}
        for job in jobs:
            if job.key not in self.known:
                by_mesh.setdefault(job.mesh, {})[job.key] = job
        batches = [list(new.values()) for new in by_mesh.values()]
        answers = map(self._run_here, batches) if self.executor is None else self.executor.map(options_on_mesh, batches)
        for new, of_mesh in zip(by_mesh.values(), answers, strict=True):
            self.known.update(zip(new, of_mesh, strict=True))
        return [self.known[job.key] for job in jobs]

    def _run_here(self, batch: Sequence[Job]) -> list[tuple[StageOption, ...]]:
        mesh = batch[0].mesh
        if batch[0].microbatches != self.microbatches:  # tensors of other sizes
            self.shared, self.microbatches = {}, batch[0].microbatches
        if mesh not in self.shared:
            self.shared[mesh] = SharedOnMesh(mesh)
        return options_on_mesh(batch, self.shared[mesh])


class StageProblem:
    """A stage's Problem with the costs of a pipeline."""

    def __init__(self, job: Job, shared: SharedOnMesh):
        self.job, graph = job, job.graph
        training = Training(job.optimizer) if graph.trains else None
        options = candidates(graph, job.mesh, shared.candidates)
        options, keep = _pinned(graph, options, job) if job.pins else (options, {})
        self.formulated = formulate(graph, options, job.mesh, training=training, tables=shared.tables)
        self.unit = slowest_seconds_per_byte(job.mesh)
        self.second = len(graph.ops) - len(second_half(graph)) if job.halved else math.inf  # time at which the second half begins
        self.static = frozenset(k for k, kind in enumerate(self.formulated.held) if kind in STATIC)
        self.saved, self.kept = (_of_microbatches(self.formulated, turn) for turn in (turn_of(graph), self.second))
        self.most_arrivals = math.fsum(max(_arrivals(self.formulated, i)) for i in _received(graph))
        self.problem = _as_stage(self.formulated, with_pins(self.formulated, keep), job.microbatches)

    def solved(self, price: float) -> StageOption | None:
        """The layouts of least t + lambda bytes."""
        preference = self.formulated.preference if self.job.layouts else None
        gap = STAGE_GAP if self.job.layouts else LAYER_GAP
        problem = self._with_bytes(price)
        choice, messages = converged(problem, gap=gap)  # proves most problems optimal before any reduction
        start = [] if choice is None else [choice]
        given: dict[str, Any] = {"time_limit": self.job.time_limit, "gap": gap, "preference": preference}
        answer = solve(problem, starts=start, messages=messages, **given).in_passing()
        if answer.choice is None or not math.isfinite(answer.cost):
            return None
        return replace(self.option(answer.choice), bound=max(answer.bound - self.most_arrivals, 0.0))

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

    def option(self, choice: Sequence[int]) -> StageOption:
        problem, formulated = self.problem, self.formulated
        static, saved, kept = (math.fsum(problem.usages[k].held(choice) for k in of) for of in (self.static, self.saved, self.kept))
        times, total = usage_profile(problem, choice)
        program = program_of(formulated, choice)
        everything = [0] * len(formulated.graph.ops)
        (part,) = stage_costs_of(program, everything, 1, self.job.microbatches)
        forward, backward = kernel_seconds(program)
        (adding,) = accumulation_seconds(program, everything, 1, self.job.microbatches)
        arrivals = {False: 0.0, True: 0.0}
        for i in _received(formulated.graph):
            arrivals[formulated.graph.ops[i].kind == "tangent"] += _arrivals(formulated, i)[choice[i]]
        updates = [task for task in program.tasks if task.phase == "update"]
        return StageOption(
            forward=part.forward + arrivals[False],
            backward=part.backward + arrivals[True],
            weight=part.weight,
            once=part.finish,
            static_bytes=static,
            saved_bytes=saved,
            transient_bytes=float(np.max(total - static - np.where(times < self.second, saved, kept), initial=0.0)),
            kept_bytes=kept if self.job.halved else None,
            communication=max(part.forward + part.backward - forward - backward - adding, 0.0) + sum(arrivals.values()),
            reduction=math.fsum(task.seconds for task in updates if task.kind != "optimizer"),
            update=math.fsum(task.seconds for task in updates if task.kind == "optimizer"),
            hides=backward,
            mesh=self.job.mesh.shape,
            recompute=self.job.recompute,
            layouts=tuple(layouts_of(formulated, choice).values()) if self.job.layouts else (),
        )


def _pinned(graph: Graph, options: Candidates, job: Job) -> tuple[Candidates, dict[int, np.ndarray]]:
    """The candidates that the baseline's pins allow for some op of the signature, and per op a mask of those that they allow for it."""
    chosen = baseline(graph, job.mesh, options, job.pins)
    keep = allowed(chosen.pins, graph, options)
    masks = [np.asarray(keep[i], dtype=bool) if i in keep else np.ones(len(cs), dtype=bool) for i, cs in enumerate(options.of)]
    union: dict[tuple, np.ndarray] = {}
    for i, mask in enumerate(masks):
        signature = graph.signature(i)
        union[signature] = union[signature] | mask if signature in union else mask
    lists = {graph.signature(i): tuple(c for c, ok in zip(cs, union[graph.signature(i)]) if ok) for i, cs in enumerate(options.of)}
    of = tuple(lists[graph.signature(i)] for i in range(len(graph.ops)))
    return Candidates(of, options.unknown, options.num_signatures), {i: mask[union[graph.signature(i)]] for i, mask in enumerate(masks)}


def turn_of(graph: Graph) -> int:
    """The index of the first backward op; beyond the last op where there is none."""
    return next((i for i, op in enumerate(graph.ops) if op.backward), len(graph.ops) + 1)


def _of_microbatches(formulated: Formulation, turn: float) -> frozenset[int]:
    """Usages of which every microbatch has one that has run the ops before `turn`, and not those from there on."""
    graph, held = formulated.graph, set()
    varies: list[bool] = []  # with the microbatch
    for op in graph.ops:
        varies.append(op.kind in ("input", "tangent") or any(varies[a] for a, _ in op.inputs))
    hubs = {node: value for value, node in formulated.hubs.items()}
    for k, (usage, kind) in enumerate(zip(formulated.problem.usages, formulated.held, strict=True)):
        node = usage.ends[0]
        i = formulated.tensor_edges[usage.edge].value[0] if usage.edge is not None else hubs[node][0] if node in hubs else node
        if kind in STATIC or not usage.start < turn < usage.end or i >= len(graph.ops) or not varies[i] or turn > len(graph.ops):
            continue
        there = graph.ops[i].kind != "tangent" or turn > turn_of(graph)  # a tangent arrives when the backward pass begins
        if there and not (kind == "inputs" and graph.last_use.get((i, 0), 0) < turn):
            held.add(k)
    return frozenset(held)


def _as_stage(formulated: Formulation, problem: Problem, microbatches: int) -> Problem:
    """The problem with once-per-step costs divided by K, the seconds of arrivals added, and gradients held throughout."""
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
    for edge, link in zip(problem.edges, formulated.tensor_edges, strict=True):
        if link.b < len(graph.ops) and graph.ops[link.b].kind == "parameter":
            key = (id(edge.table), id(link.source_layouts), id(link.target_layouts))
            if key not in tables:
                tables[key] = np.where(_once(formulated, link), edge.table / K, edge.table)
            edge = Edge(edge.a, edge.b, tables[key])
        edges.append(edge)
    usages = [
        replace(usage, start=0) if kind == "gradients" else usage for usage, kind in zip(problem.usages, formulated.held, strict=True)
    ]
    return replace(problem, node_costs=tuple(costs), edges=tuple(edges), usages=tuple(usages), usage_limit=None)


def _received(graph: Graph) -> list[int]:
    return [i for i, op in enumerate(graph.ops) if op.is_placeholder and op.name.startswith(RECEIVED)]


def _arrivals(formulated: Formulation, i: int) -> list[float]:
    """Seconds of gathering received value i, per candidate."""
    tensor = formulated.graph.tensor((i, 0))
    return [gather_seconds(tensor.shape, tensor.itemsize, c.outputs[0], formulated.mesh) for c in formulated.candidates.of[i]]


def _once(formulated: Formulation, link) -> np.ndarray:
    """Pairs whose gradient is no larger before the reduction than after it: it is accumulated before, and reduced once per step."""

    def sizes(layouts: Sequence[Layout]) -> np.ndarray:
        return np.array([local_numel(link.tensor.shape, layout, formulated.mesh) for layout in layouts])

    return sizes(link.source_layouts)[:, None] <= sizes(link.target_layouts)[None, :]
