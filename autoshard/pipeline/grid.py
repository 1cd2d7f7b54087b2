"""Simulated steps of a model on D x H x P devices with K microbatches, for given degrees and a fixed scheme of layouts.

    model, batch / K    -> plan of one microbatch on the D x H devices of a stage
    plan                -> costs of the parts of the model (`stage_costs`)
    costs, schedule     -> time line of a step over all stages and microbatches (`schedule_times`)

`pipelines` searches for the degrees and layouts instead.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from autoshard.capture import capture_deep
from autoshard.cost import groups_on_link
from autoshard.graph import Graph
from autoshard.mesh import Axis, Mesh
from autoshard.options import SCHEMES, count
from autoshard.pipeline.layers import Layers, clustered, layers_of
from autoshard.pipeline.microbatches import microbatch
from autoshard.pipeline.schedule_times import ScheduleRun
from autoshard.pipeline.schedules import Schedule, schedule_of
from autoshard.pipeline.stage_costs import StageCost, run_stages, stage_costs_of
from autoshard.pipeline.stage_programs import partial_gradients
from autoshard.planning import ModelGraphs, Options, Progress, Question, Stopwatch, baseline_only, plan_graph
from autoshard.precision import Precision
from autoshard.simulate import PREFETCH, Timeline, timeline_of, timeline_of_solution
from autoshard.solution import Solution, replay


@dataclass(frozen=True)
class Parallel:
    """D x H x P devices (data, tensor, pipeline) and K microbatches per step. ValueError unless all are whole numbers of 1 or more."""

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    microbatches: int = 1

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            count().check(name, value)

    @property
    def devices(self) -> int:
        return self.data * self.tensor * self.pipeline


@dataclass(frozen=True, eq=False)
class Simulation:
    """A simulated step. `timeline` is of one rank and one microbatch; `run` is of all stages, None for one stage and one microbatch."""

    parallel: Parallel
    mesh: Mesh  # of one stage
    solution: Solution  # of one microbatch on one stage's devices
    timeline: Timeline
    schedule: str
    parts: tuple[StageCost, ...] = ()
    silent: tuple[StageCost, ...] = ()  # the same without any communication
    run: ScheduleRun | None = None

    @property
    def seconds(self) -> float:
        return self.timeline.seconds if self.run is None else self.run.seconds

    @property
    def peak_bytes(self) -> float:
        """Of the fullest device."""
        return self.timeline.peak_bytes if self.run is None else max(self.run.peak_bytes)

    @property
    def bubble(self) -> float:
        return 0.0 if self.run is None else self.run.bubble

    @property
    def exposed_communication_seconds(self) -> float:
        """Seconds saved if all collectives and transfers took none; without `run`, the seconds of communication in which no kernel runs."""
        if self.run is None:
            return self.timeline.exposed_communication_seconds
        return self.run.seconds - run_stages(self.silent, self.run.schedule).seconds

    @property
    def fits(self) -> bool:
        """Whether the fullest device has the memory."""
        return self.peak_bytes <= self.mesh.device.memory

    def to_dict(self) -> dict:
        """As `autoshard simulate --json` prints it, one configuration."""
        return {
            **asdict(self.parallel),
            "seconds": self.seconds,
            "peak_bytes": self.peak_bytes,
            "fits": self.fits,
            "schedule": self.schedule,
            "bubble": self.bubble,
            "exposed_communication_seconds": self.exposed_communication_seconds,
            "devices": self.mesh.num_devices * self.parallel.pipeline,
            "layouts": "planned" if self.solution.matched is None else self.solution.matched,
        }


def simulate_grid(
    model: torch.nn.Module,
    example_inputs: Any,
    configurations: Sequence[Parallel],
    mesh_of: Callable[[tuple[int, int, int]], Mesh],
    *,
    schedule: str = "1f1b",
    chunks: int = 1,
    scheme: str = "auto",
    training: bool = True,
    overlap: bool = True,
    prefetch: int = PREFETCH,
    unit_seconds: float = 0.0,
    impossible: dict[Parallel, ValueError] | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> list[Simulation]:
    """A simulation per configuration, in the same order. mesh_of: (P, D, H) -> Mesh with the pipeline's axis first.

    scheme: one of SCHEMES; auto is megatron with H > 1, else data_parallel; planned: the layouts come from the solver. The batch (dim 0 of
    the example inputs) is that of the full step. A microbatch is captured, and planned on D x H, once for all P. unit_seconds: overhead of
    a pipeline's runtime for each forward and each backward of a microbatch, beside its kernels. impossible: gets the configurations that
    can't be run, each with the reason, while others can. ValueError where none can; without `impossible`, where one can't, as where the
    batch doesn't divide.
    """
    if scheme not in SCHEMES:
        raise ValueError(f"scheme is {scheme!r}; expected one of {', '.join(SCHEMES)}")
    report, graphs = Stopwatch(progress).say, {}
    planner = _StagePlans(mesh_of, scheme, training, overlap, prefetch, unit_seconds, options)

    def order_of(one: Parallel) -> Schedule:
        microbatch(example_inputs, one.microbatches, one.data)  # raises ValueError where the batch doesn't divide
        return schedule_of(schedule, one.pipeline, one.microbatches, chunks)

    def tried(one: Parallel, function: Callable[..., Any], *of: Any) -> Any:
        try:
            return function(*of)
        except ValueError as error:
            if impossible is None:
                raise
            impossible[one] = error

    orders = [(one, tried(one, order_of, one)) for one in configurations]  # before anything is captured
    possible, simulations = [pair for pair in orders if pair[1] is not None], []
    for n, (one, order) in enumerate(possible):
        report(f"simulating: {n + 1} of {len(possible)}", n / len(possible))
        if (K := one.microbatches) not in graphs:
            precision = Precision.of(options.get("precision"))
            graph, _ = capture_deep(model, microbatch(example_inputs, K), training=training, precision=precision)
            graphs[K] = (graph, layers_of(graph))
        simulations.append(tried(one, planner.simulated, one, order, *graphs[K]))
    if impossible and not any(simulations):
        raise next(iter(impossible.values()))
    return [simulation for simulation in simulations if simulation is not None]


@dataclass(frozen=True, eq=False)
class _StagePlans:
    """How stages are planned and simulated; those of equal microbatches on equal meshes once."""

    mesh_of: Callable[[tuple[int, int, int]], Mesh]
    scheme: str
    training: bool
    overlap: bool
    prefetch: int
    unit_seconds: float
    options: Mapping[str, Any]
    known: dict[tuple, tuple[Solution, Timeline]] = field(default_factory=dict)

    def simulated(self, one: Parallel, order: Schedule, graph: Graph, layers: Layers) -> Simulation:
        mesh = self.mesh_of((one.pipeline, one.data, one.tensor))
        stage, key = replace(mesh, axes=mesh.axes[1:]), (one.microbatches, one.data, one.tensor, mesh.axes[1:])
        if key not in self.known:
            self.known[key] = self._planned(graph, stage)
        solution, timeline = self.known[key]
        if one.tensor > 1 and self.scheme != "planned" and not _shards(solution, -1):
            raise ValueError(
                f"tensor is {one.tensor}, but nothing of the model can be sharded so ({solution.matched}); expected a divisor of its heads "
                "and features"
            )
        if one.pipeline == 1 and one.microbatches == 1:  # as a plan runs: small reductions are joined
            plan = timeline.program.formulation, timeline.program.choice
            timeline = timeline_of(*plan, overlap=self.overlap, prefetch=self.prefetch, join=True)
            return Simulation(one, stage, solution, timeline, "sequential")
        alone = Simulation(one, stage, solution, timeline, order.name)
        return _in_stages(alone, layers, order, mesh.axes[0] if one.pipeline > 1 else None, self.unit_seconds)

    def _planned(self, graph: Graph, mesh: Mesh) -> tuple[Solution, Timeline]:
        name = self.scheme if self.scheme != "auto" else "megatron" if mesh.shape[-1] > 1 else "data_parallel"
        context = Question(ModelGraphs(graph), mesh, Options(training=self.training, baselines=False, **self.options), Stopwatch(None))
        solution = plan_graph(context) if name == "planned" else baseline_only(context, name)
        return solution, timeline_of_solution(replay(solution, graph).graph, solution, overlap=self.overlap, prefetch=self.prefetch)


def _in_stages(alone: Simulation, layers: Layers, order: Schedule, axis: Axis | None, unit_seconds: float) -> Simulation:
    """The simulation of one microbatch on one stage, divided into stages that run it many times. axis: between stages."""
    part_of, partial = divided(layers, order.parts), partial_gradients(layers)
    asked = alone.timeline.program, part_of, order.parts, alone.parallel.microbatches
    parts = stage_costs_of(*asked, partial=partial)
    parts = tuple(replace(part, forward=part.forward + unit_seconds, backward=part.backward + unit_seconds) for part in parts)
    silent = stage_costs_of(*asked, partial=partial, communication=False)
    chains = min(alone.parallel.data, groups_on_link(axis, alone.parallel.tensor))  # tensor parallel ranks are synchronous
    return replace(alone, parts=parts, silent=silent, run=run_stages(parts, order, axis, chains))


def _shards(solution: Solution, axis: int) -> bool:
    """Whether any op gives a tensor that isn't replicated on this axis of the mesh."""
    outputs = (written for placed in solution.layouts.values() for written in placed.outputs if written is not None)
    return any(written.split(",")[axis] != "R" for written in outputs)


def divided(layers: Layers, count: int) -> list[int]:
    """Per op the number of its part: `count` parts of consecutive layers, their FLOPs as even as possible (least sum of squares).

    ValueError where there are fewer layers than parts.
    """
    if layers.count < count:
        raise ValueError(f"the model has {layers.count} layers that can be separated; expected at least {count}, one per part")
    boundaries = clustered(layers.flops, [0.0] * layers.count, range(layers.count), count, eps=math.inf)
    return [bisect_right(boundaries, layer) if layer >= 0 else -1 for layer in layers.of]
