"""Runs a pipeline plan: each rank holds its stages, and torch.distributed.pipelining's runtime runs their graphs in the plan's order.

plan    = the stages' programs of one microbatch      captured on the first rank, shared with all
stages  = lower_stages(plan)                          programs, and the pieces that go from device to device
runs    = this rank's stages as stages of torch       StageRun
module  = a copy of the model with this rank's parameters, as DTensors on the meshes of their stages
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

from autoshard.capture import filled, input_names, listed
from autoshard.cost import spare_bytes
from autoshard.layout import Layout, replicated
from autoshard.lower import first_state, state_of_module
from autoshard.mesh import Mesh
from autoshard.runtime.agreement import agree, agreed, check_gpus, compare, limit_waiting, of_first_rank, of_graph, rank_lost
from autoshard.runtime.call_inputs import CallInputs
from autoshard.runtime.distribute import Where, copy_with, on_meta
from autoshard.runtime.module import attach, parallel_class
from autoshard.runtime.pipeline_module import PipelineModule, PipelineRunner
from autoshard.runtime.stage_graphs import stage_graphs
from autoshard.runtime.stage_run import PipelineRank, StageRun
from autoshard.runtime.stages import LoweredStage, LoweredStages, lower_stages, why_no_loss
from autoshard.solution import PipelineToRun, digest
from autoshard.torch_private import Action, ComputationType, PipelineScheduleRuntime, without_connecting


@dataclass(frozen=True, eq=False)
class CapturedPipeline:
    """What the first rank captures for all."""

    plan: PipelineToRun
    constants: dict[str, Tensor]  # that the program reads beside parameters, buffers and inputs
    seed: int = 0  # of the stages' random numbers


def parallel_pipeline(
    model: nn.Module,
    captured: Callable[[nn.Module], CapturedPipeline],
    device_mesh: DeviceMesh,
    num_devices: int,
    example_inputs: Any,
    *,
    digest: str,
    schedule: str | None = None,
    from_first_rank: bool = True,
    timeout: float = 50.0,
) -> nn.Module:
    """The model as a pipeline; every rank of the mesh calls this. captured: of the model on the meta device, called on the first rank.
    digest: of this rank's pipeline; ValueError where ranks have different ones.

    schedule: a class of torch.distributed.pipelining or a file `.csv` of units (F, B, I, W) per device group, instead of the plan's order.
    """
    agree(_complaint(device_mesh, num_devices), "comparing pipeline and mesh", plan=digest)
    if device_mesh.device_type == "cuda":
        check_gpus()
    program = _captured_for_all(on_meta(model), captured)
    plan, ranks = program.plan, device_mesh.mesh.flatten().tolist()
    # the plan's devices 0, 1, ... are the ranks of the device mesh, in its order
    placed = replace(plan, stages=tuple(replace(stage, devices=tuple(ranks[d] for d in stage.devices)) for stage in plan.stages))
    stages = agreed(lambda: lower_stages(placed, device=device_mesh.device_type), "lowering the stages")
    meshes = _meshes(stages, device_mesh.device_type, timeout)
    place = _place(device_mesh.device_type, timeout)
    mine = [stage for stage in stages.of if place.rank in stage.devices]
    module, held_on = _module(model, stages, mine, meshes, place, from_first_rank=from_first_rank)
    elsewhere = set(_without(module, held_on))
    halved = schedule is not None or any(kind == "W" for units in plan.order for kind, *_ in units)
    runs = [_run(stage, module, meshes[_key(stage)], program, place, halved=halved) for stage in mine]
    for run in runs:
        limit_waiting(run.where.device_mesh, timeout, run.where.second.values())
    passes = {f"{name} of stage {run.stage.index}": (run.where, one) for run in runs for name, one in run.graphs.of.passes.items()}
    compare({name: (where.coordinate, of_graph(one.graph, where.groups)) for name, (where, one) in passes.items()})
    for before, run in zip(runs, runs[1:]):
        run.before = before
    torch_schedule = agreed(
        lambda: _schedule(runs, plan, schedule), "preparing the schedule", errors=(ValueError, AssertionError, OSError),
        in_words=lambda error: f"the schedule {schedule or ''} can't run this pipeline: {error}",
    )  # fmt: skip
    agree(None, "comparing the schedules", plan=_digest(torch_schedule))
    inputs, planned = _inputs(model, example_inputs, device_mesh)
    runner = PipelineRunner(plan, stages, runs, torch_schedule, inputs, planned, place, held_on, elsewhere)
    attach(module, parallel_class(type(model), PipelineModule, "Pipeline"), digest, runner=runner)
    return module


def _complaint(device_mesh: DeviceMesh, num_devices: int) -> str | None:
    world, size = dist.get_world_size(), device_mesh.size()
    if world != num_devices:
        return f"{world} ranks run, but the pipeline is for {num_devices} devices; start {num_devices} ranks or plan for another cluster"
    if size != num_devices:
        return f"the device mesh has {size} devices, but the pipeline is for {num_devices}; make a mesh of all ranks"
    return None


def _captured_for_all(model: nn.Module, captured: Callable[[nn.Module], CapturedPipeline]) -> CapturedPipeline:
    def runnable() -> CapturedPipeline:
        program = replace(captured(model), seed=torch.initial_seed() % 2**62)
        plan = program.plan
        if idle := plan.num_devices - len({device for stage in plan.stages for device in stage.devices}):
            raise ValueError(f"the pipeline leaves {idle} of {plan.num_devices} devices idle; plan it for fewer, or with other stages")
        if (why := why_no_loss(plan)) is not None:
            raise ValueError(why)
        return program

    return of_first_rank(runnable, "capturing the model")


def _key(stage: LoweredStage) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return stage.devices, stage.mesh.shape


def _meshes(stages: LoweredStages, device_type: str, timeout: float) -> dict[Any, Where]:
    """This rank on the mesh of each device group and shape; every rank makes all of these meshes, as torch wants."""
    meshes: dict[Any, Where] = {}
    with rank_lost("making the groups of the stages"):
        for stage in stages.of:
            if _key(stage) not in meshes:
                meshes[_key(stage)] = where = Where.among(stage.mesh, stage.devices, device_type)
                if dist.get_rank() in stage.devices:
                    limit_waiting(where.device_mesh, timeout)
    return meshes


def _place(device_type: str, timeout: float) -> PipelineRank:
    with rank_lost("making the groups of the pipeline"):
        sends = dist.new_group(timeout=timedelta(seconds=timeout))
        alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    device = torch.device(device_type, torch.cuda.current_device()) if device_type == "cuda" else torch.device(device_type)
    return PipelineRank(dist.get_rank(), device, sends, alone)


def _module(
    model: nn.Module,
    stages: LoweredStages,
    mine: list[LoweredStage],
    meshes: Mapping[Any, Where],
    place: PipelineRank,
    *,
    from_first_rank: bool,
) -> tuple[nn.Module, dict[str, Where]]:
    """A copy of the model with the parameters and buffers of this rank's stages, and where each of them is."""
    by_tensor: dict[int, list[str]] = {}
    for name, tensor in state_of_module(model).items():
        by_tensor.setdefault(id(tensor), []).append(name)
    names = {name: of_tensor for of_tensor in by_tensor.values() for name in of_tensor}  # of each name all names of that tensor
    homes: dict[str, tuple[Layout, LoweredStage]] = {}
    for stage in reversed(mine):
        homes |= {name: (layout, stage) for name, layout in stage.parameters.items()}
    read = {name for stage in stages.of for name in stage.parameters}
    first = stages.of[0]
    held_on: dict[str, Where] = {}

    def home(name: str) -> tuple[Layout, LoweredStage] | None:
        """The layout and stage of a tensor on this rank. What no stage reads is held by the devices of the first one."""
        if not read & set(names[name]):
            return (replicated(len(first.mesh.axes)), first) if place.rank in first.devices else None
        return next((homes[other] for other in names[name] if other in homes), None)

    def value(name: str, tensor: Tensor) -> Tensor:
        values = _from_first(tensor, place) if from_first_rank and not tensor.is_meta else tensor
        if (held := home(name)) is None:
            return torch.empty_like(tensor, device="meta")
        layout, stage = held
        held_on.update(dict.fromkeys(names[name], meshes[_key(stage)]))
        return meshes[_key(stage)].distributed(values, layout, from_first_rank=False)

    return copy_with(model, value), held_on


def _from_first(tensor: Tensor, place: PipelineRank) -> Tensor:
    values = tensor.detach().to(place.device, copy=True, memory_format=torch.contiguous_format)
    with rank_lost("sending the parameters"):
        dist.broadcast(values.view(torch.uint8) if values.dtype == torch.bool else values, src=0, group=place.sends)
    return values


def _without(module: nn.Module, held: Mapping[str, Any]) -> Iterator[str]:
    """Removes the parameters and buffers that are not held; their names."""
    for prefix, part in module.named_modules():
        for tensors in (part._parameters, part._buffers):
            for name in list(tensors):
                full = f"{prefix}.{name}" if prefix else name
                if tensors[name] is not None and full not in held:
                    tensors[name] = None
                    yield full


def _run(
    stage: LoweredStage, module: nn.Module, where: Where, program: CapturedPipeline, place: PipelineRank, *, halved: bool
) -> StageRun:
    graphs = stage_graphs(stage, where, spare_bytes(0.0), halved=halved)  # no more: the stage's peak is of several microbatches
    slots = graphs.of.slots
    shards = {name: where.shard(x, slots[name].layout) for name, x in program.constants.items() if name in slots}
    run = StageRun(stage, graphs, module, shards, place, where, len(program.plan.stages))
    run.random.state = first_state(program.seed + stage.index, place.device.type)
    return run


def _schedule(runs: list[StageRun], plan: PipelineToRun, schedule: str | None) -> Any:
    groups = {v: stage.group for v, stage in enumerate(plan.stages)}
    for run in runs:
        run.group_rank, run.group_size = run.stage.group, len(plan.order)
        run.stage_index_to_group_rank = groups
    options: dict[str, Any] = {"loss_fn": lambda output, target: output, "scale_grads": False}
    if schedule is not None and not schedule.endswith(".csv"):
        of_torch = get_schedule_class(schedule)
        if not issubclass(of_torch, PipelineScheduleMulti):
            raise ValueError("it is a class for one stage per rank; give its name here: gpipe, 1f1b")
        runtime = of_torch(runs, plan.microbatches, **options)
    else:
        runtime = PipelineScheduleRuntime(runs, plan.microbatches, backward_requires_autograd=False, **options)
        if schedule is None:
            runtime._prepare_schedule_with_comms(_actions(plan))
        else:
            runtime._load_csv(schedule)
    if dict(runtime.stage_index_to_group_rank) != groups:
        raise ValueError(f"it has stages on groups {dict(runtime.stage_index_to_group_rank)}, the plan {groups}")
    return without_connecting(runtime)


def _digest(torch_schedule: PipelineScheduleMulti) -> str:
    """Of the units of all device groups: another schedule may come from a file."""
    order = getattr(torch_schedule, "pipeline_order_with_comms", torch_schedule.pipeline_order)
    return digest({"schedule": {d: list(map(str, units)) for d, units in order.items()}})


def _actions(plan: PipelineToRun) -> dict[int, list[Action | None]]:
    of = ComputationType
    halved = any(kind == "W" for units in plan.order for kind, *_ in units)
    kinds = {"F": of.FORWARD, "B": of.BACKWARD_INPUT if halved else of.FULL_BACKWARD, "W": of.BACKWARD_WEIGHT}
    return {d: [Action(stage, kinds[kind], k) for kind, k, stage in units] for d, units in enumerate(plan.order)}


def _inputs(model: nn.Module, example_inputs: Any, device_mesh: DeviceMesh) -> tuple[CallInputs, Any]:
    """How a step's inputs are bound to the plan's names, and those that are planned."""
    names = input_names(model, example_inputs)
    layouts = {name: replicated(device_mesh.ndim) for name in names}
    where = Where.on(Mesh.from_bandwidths(tuple(device_mesh.shape)), device_mesh)
    signature = inspect.signature(type(model).forward)
    inputs = CallInputs(where, listed, filled, lambda given: input_names(model, given), signature, layouts, {})
    return inputs, inputs.as_planned(example_inputs)
