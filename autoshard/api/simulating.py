"""What a step will take, before anyone rents the devices: the order of things.

a plan of a graph                        -> Timeline of one rank
a model on D x H x P devices, K          -> plan of one microbatch on D x H -> parts of the model -> Run of a schedule
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from autoshard.capture import capture_deep, in_turn
from autoshard.cost import groups_on_link
from autoshard.graph import Graph
from autoshard.mesh import Axis, Mesh
from autoshard.pipeline.layers import Layers, layers_of
from autoshard.pipeline.schedule_times import Run
from autoshard.pipeline.schedules import schedule_of
from autoshard.pipeline.stage_costs import Part, parts_of, run_parts
from autoshard.pipeline.stage_programs import partial_gradients
from autoshard.planning.context import Context
from autoshard.planning.options import Options, Progress, Stopwatch
from autoshard.planning.plan import baseline_only, plan_graph
from autoshard.simulate.degrees import Parallel
from autoshard.simulate.timeline import Timeline, timeline_of_solution
from autoshard.solution import Solution, replay

SCHEMES = ("auto", "data_parallel", "fsdp", "megatron", "megatron_sp", "planned")


@dataclass(frozen=True, eq=False)
class Simulation:
    """What a step takes. `timeline` is of one rank and one microbatch, `run` of all stages, where stages or microbatches are several."""

    parallel: Parallel
    mesh: Mesh  # of one stage
    solution: Solution  # of one microbatch on one stage's devices
    timeline: Timeline
    schedule: str
    parts: tuple[Part, ...] = ()
    silent: tuple[Part, ...] = ()  # the same without any communication
    run: Run | None = None

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
        """Seconds that would be saved if all collectives and transfers took none; of one microbatch, those in which no kernel runs."""
        if self.run is None:
            return self.timeline.exposed_communication_seconds
        return self.run.seconds - run_parts(self.silent, self.run.schedule).seconds

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


@in_turn
def simulate(
    model: torch.nn.Module,
    example_inputs: Any,
    solution: Solution,
    *,
    overlap: bool = True,
    prefetch: int = 4,
    join: bool = True,
    links: Sequence[int] | None = None,
    mesh: Mesh | None = None,
    progress: Progress | None = None,
) -> Timeline:
    """The time line of a plan: `.seconds` of a step, `.peak_bytes`, `.exposed_communication_seconds`, `.critical_path`.

    overlap: collectives run beside kernels (else one after the other, and seconds is the plan's cost). prefetch: parameters fetched ahead
    of their use. join: small gradient reductions go as one, as in the lowered program. links: per mesh axis the number of the link that
    it uses, where `shared_links` guesses wrong. mesh: other prices. ValueError where the plan is of another model.
    """
    report = progress or (lambda message, fraction: None)
    report("capturing the model", 0.1)
    graph, _ = capture_deep(model, example_inputs, training=solution.training)
    graph = replay(solution, graph).graph
    report("simulating", 0.8)
    return timeline_of_solution(graph, solution, mesh, overlap=overlap, prefetch=prefetch, join=join, links=links)


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
    prefetch: int = 4,
    unit_seconds: float = 0.0,
    progress: Progress | None = None,
    **options: Any,
) -> list[Simulation]:
    """Each configuration simulated, in the given order. mesh_of: (P, D, H) -> Mesh with the pipeline's axis first.

    scheme: one of SCHEMES; auto is megatron with H > 1, else data_parallel; planned asks the solver. The batch (dim 0 of the example
    inputs) is that of the whole step. A microbatch is captured, and planned on D x H, once for all P. unit_seconds: what the runtime of
    a pipeline takes for each forward and each backward of a microbatch beside its kernels. ValueError on what doesn't divide.
    """
    if scheme not in SCHEMES:
        raise ValueError(f"scheme is {scheme!r}; expected one of {', '.join(SCHEMES)}")
    for one in configurations:
        schedule_of(schedule, one.pipeline, one.microbatches, chunks)  # says what can't be before anything is captured
    report = progress or (lambda message, fraction: None)
    graphs: dict[int, Any] = {}
    programs: dict[tuple, tuple[Solution, Timeline]] = {}
    found = []
    for n, one in enumerate(configurations):
        report(f"simulating: {n + 1} of {len(configurations)}", n / len(configurations))
        K = one.microbatches
        inputs = microbatch(example_inputs, K, one.data)
        if K not in graphs:
            graph, _ = capture_deep(model, inputs, training=training)
            graphs[K] = (graph, layers_of(graph))
        graph, layers = graphs[K]
        whole = mesh_of((one.pipeline, one.data, one.tensor))
        stage = Mesh(whole.axes[1:], whole.device)
        key = (K, one.data, one.tensor, whole.axes[1:])
        if key not in programs:
            programs[key] = _stage_plan(graph, stage, scheme, training, overlap, prefetch, options)
        solution, timeline = programs[key]
        if one.pipeline == 1 and K == 1:
            found.append(Simulation(one, stage, solution, timeline, "sequential"))
            continue
        made = schedule_of(schedule, one.pipeline, K, chunks)
        part_of, partial = divided(layers, made.parts), partial_gradients(layers)
        parts = parts_of(timeline.program, part_of, made.parts, partial=partial)
        parts = tuple(replace(part, forward=part.forward + unit_seconds, backward=part.backward + unit_seconds) for part in parts)
        silent = parts_of(timeline.program, part_of, made.parts, partial=partial, communication=False)
        axis: Axis | None = whole.axes[0] if one.pipeline > 1 else None
        chains = min(one.data, groups_on_link(axis, one.tensor))  # tensor parallel ranks keep in step
        found.append(Simulation(one, stage, solution, timeline, schedule, parts, silent, run_parts(parts, made, axis, chains)))
    return found


def _stage_plan(
    graph: Graph, mesh: Mesh, scheme: str, training: bool, overlap: bool, prefetch: int, options: Mapping
) -> tuple[Solution, Timeline]:
    name = scheme if scheme != "auto" else "megatron" if mesh.shape[-1] > 1 else "data_parallel"
    context = Context(graph, mesh, Options(training=training, baselines=False, **options), Stopwatch(None))
    if name == "planned":
        solution = plan_graph(context)
    else:
        solution = baseline_only(context, name)
    return solution, timeline_of_solution(graph, solution, overlap=overlap, prefetch=prefetch)


def divided(layers: Layers, count: int) -> list[int]:
    """Per op its part: layers in `count` runs, their FLOPs as even as can be (least sum of squares). ValueError where layers are fewer."""
    if layers.count < count:
        raise ValueError(f"the model has {layers.count} layers that can be cut apart; expected at least {count}, one per part")
    sums = np.concatenate([[0.0], np.cumsum(layers.flops)]) / (sum(layers.flops) or 1.0)
    squares = np.where(np.tri(len(sums), k=-1, dtype=bool).T, (sums[None, :] - sums[:, None]) ** 2, np.inf)
    best, cuts = squares[0], []
    for _ in range(count - 1):
        through = best[:, None] + squares  # the last part begins at the row
        cuts.append(through.argmin(axis=0))
        best = through.min(axis=0)
    part_of_layer, end = [0] * layers.count, layers.count
    for part in range(count - 1, 0, -1):
        begin = int(cuts[part - 1][end])
        part_of_layer[begin:end] = [part] * (end - begin)
        end = begin
    return [part_of_layer[layer] if layer >= 0 else -1 for layer in layers.of]


def microbatch(example_inputs: Any, count: int, data: int = 1) -> Any:
    """The inputs with the batch (dim 0 of the first tensor) cut to a `count`-th; ValueError where that, or `data` then, doesn't divide."""
    leaves, spec = pytree.tree_flatten(example_inputs)
    batch = next((x.shape[0] for x in leaves if isinstance(x, torch.Tensor) and x.ndim), None)
    if count == data == 1:
        return example_inputs
    if batch is None or batch % (count * data):
        what = f"{count} microbatches" + (f" for {data} data-parallel ranks" if data > 1 else "")
        raise ValueError(f"a batch of {batch} can't be cut into {what}; expected numbers that divide it")
    cut = [x[: batch // count] if isinstance(x, torch.Tensor) and x.ndim and x.shape[0] == batch else x for x in leaves]
    return pytree.tree_unflatten(cut, spec)
