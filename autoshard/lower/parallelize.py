"""Run a plan: a model becomes a trainable module on a device mesh.

graph   = replay(solution, capture(model, inputs))    the program of one call, captured when the module is first called
program = lower(graph, solution.layouts)              the program that every rank runs
graphs  = trace(program)                              this rank's forward and backward as fx graphs
module  = a copy of the model with DTensor parameters, whose forward and backward run those graphs
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autoshard.capture import Returned, capture_module, constants, deep_enough, input_names
from autoshard.capture.held import filled, listed, state_of
from autoshard.graph import Graph
from autoshard.layout import Layout, parse
from autoshard.lower.agreement import agree, grouped, join, limit_waiting, patiently, share
from autoshard.lower.collectives import Groups
from autoshard.lower.distribute import copy_with, distributed, on_meta
from autoshard.lower.flow import Pace
from autoshard.lower.fx_program import trace
from autoshard.lower.module import Runner, TracedCall, parallel_class, refuse_parts
from autoshard.lower.overlap import scheduled
from autoshard.lower.program import lower
from autoshard.lower.sharding import shard_of_rank
from autoshard.lower.unsharded import attribute_of
from autoshard.solution import Solution, replay


def parallelize(
    model: nn.Module,
    solution: Solution,
    device_mesh: DeviceMesh,
    *,
    example_inputs: Any = None,
    from_first_rank: bool = True,
    timeout: float = 50.0,
) -> nn.Module:
    """The model as a module that runs `solution` on `device_mesh`; every rank of the mesh calls this.

    The result is a copy of the model (which is left as it is) with DTensor parameters under their own names, in the layouts of the
    plan. Call it like the model, with tensors of the planned global shape, the same on every rank, or with DTensors:
    `shard_inputs(batch)` makes them from global inputs of any shape, `shard_inputs(batch, local=True)` from this rank's shards. Replicated
    results are plain tensors, all others DTensors. Hooks on submodules and calls of submodules are refused: the plan's graph runs instead.
    A plan made with training=True can be differentiated: `loss.backward()`, any optimizer, gradients add up over calls.

    from_first_rank: all ranks use rank 0's parameters (False: all ranks hold the same ones already). The parameters of a model on the meta
    device are nan until `load_state_dict` or torch.distributed.checkpoint fills them. timeout: seconds after which a rank that does not
    answer counts as lost. example_inputs: capture now instead of with the first call.

    ValueError, the same on every rank, where mesh, model and plan don't belong together; RankLost (a RuntimeError) when a rank dies.
    """
    agree(_complaint(model, solution, device_mesh), "comparing plan, model and mesh")
    mesh = solution.mesh
    limit_waiting(device_mesh, timeout)
    layouts = {name: parse(placed.outputs[0]) for name, placed in solution.layouts.items() if not placed.inputs and placed.outputs[0]}
    replicate: Layout = parse(",".join("R" * len(mesh.axes)))
    with deep_enough(model):
        sharded = copy_with(
            model,
            lambda name, tensor: distributed(tensor, layouts.get(name, replicate), mesh, device_mesh, from_first_rank=from_first_rank),
        )
        build = _Builder(on_meta(model), solution, device_mesh, timeout)
    names = partial(input_names, build.model)
    inputs = {name: layouts[name] for name in solution.inputs if name in layouts}
    where = tuple(device_mesh.get_coordinate() or ())
    runner = Runner(mesh, device_mesh, build, listed, filled, state_of, names, inputs, solution.inputs, where=where)
    refuse_parts(sharded)
    sharded.__class__ = parallel_class(type(model))
    sharded.__dict__["_runner"] = runner
    if example_inputs is not None:
        runner.prepare(sharded, example_inputs)
    return sharded


def device_mesh(solution: Solution, *, backend: str | None = None, timeout: float = 40.0) -> DeviceMesh:
    """The device mesh of a plan on the processes that torchrun (or another launcher) started; every rank calls this.

    backend: nccl where torch sees GPUs, else gloo. A process group that exists already is used. timeout: seconds within which all ranks
    must call; give more where they are started far apart. ValueError, the same on every rank, when their number isn't the plan's; RankLost
    where one does not call.
    """
    cuda = backend == "nccl" or (backend is None and torch.cuda.is_available())
    try:
        formed = join(backend or ("nccl" if cuda else "gloo"), timeout)
    except ValueError as error:
        n = solution.mesh.num_devices
        raise ValueError(f"no processes to run on ({error}); start them with: torchrun --nproc-per-node {n} SCRIPT ...") from None
    complaint = _wrong_number(solution)
    if complaint is not None:  # it is the same on every rank
        raise ValueError(complaint)
    if cuda:
        here, gpus = dist.get_node_local_rank(dist.get_rank() % max(torch.cuda.device_count(), 1)), torch.cuda.device_count()
        agree(_too_few_gpus(here, gpus), "counting GPUs")
        torch.cuda.set_device(here)
    return grouped("cuda" if cuda else "cpu", solution.mesh.shape, solution.mesh.axis_names, timeout if formed else None)


def _too_few_gpus(local_rank: int, gpus: int) -> str | None:
    if local_rank < gpus:
        return None
    return f"rank {local_rank} of this host has no GPU: torch sees {gpus} here; start one rank per GPU, or give backend='gloo' for the CPU"


def _wrong_number(solution: Solution) -> str | None:
    n, mesh = solution.mesh.num_devices, "x".join(map(str, solution.mesh.shape))
    if dist.get_world_size() == n:
        return None
    return f"{dist.get_world_size()} ranks run, but the plan is for {n} on a mesh of {mesh}; start {n} ranks or plan for another mesh"


def _complaint(model: nn.Module, solution: Solution, device_mesh: DeviceMesh) -> str | None:
    """Why the plan can't run on this model and mesh, as far as that is known before the first call; None where it can."""
    planned = "x".join(map(str, solution.mesh.shape))
    if (wrong := _wrong_number(solution)) is not None:
        return wrong
    if tuple(device_mesh.shape) != solution.mesh.shape:
        actual = "x".join(map(str, device_mesh.shape))
        return f"the device mesh is {actual}, but the plan is for a mesh of {planned}; make a mesh of that shape or plan again"
    held = dict(model.named_parameters(remove_duplicate=False))
    missing = [name for name in solution.parameters if name not in held]
    extra = [name for name, p in held.items() if name not in solution.parameters and p.requires_grad and solution.training]
    if missing:
        return f"the solution is of another model: it has {missing[0]!r} and {len(missing) - 1} more that this model lacks; plan this model"
    if extra:
        return f"the solution is of another model: it lacks {extra[0]!r} and {len(extra) - 1} more of this model; plan this model"
    for name, row in solution.parameters.items():
        if tuple(row["shape"]) != tuple(held[name].shape):
            return f"parameter {name!r} has shape {tuple(held[name].shape)}, planned was {tuple(row['shape'])}; plan this model"
        if row["dtype"] != str(held[name].dtype).removeprefix("torch."):
            return f"parameter {name!r} is {held[name].dtype}, planned was {row['dtype']}; plan this model"
    return None


@dataclass(frozen=True)
class _Captured:
    """The program of one kind of call, as the first rank captures it for all."""

    graph: Graph
    returned: Returned
    constants: dict[str, torch.Tensor]  # that the program reads beside parameters, buffers and inputs
    drops: bool = True  # False: it is a training mode's program, to be run without dropout


class _Builder:
    """Builds the graphs for one kind of call."""

    def __init__(self, model: nn.Module, solution: Solution, device_mesh: DeviceMesh, timeout: float):
        self.model, self.solution, self.device_mesh = model, solution, device_mesh
        self.groups = Groups.of(device_mesh)
        self.patiently = partial(patiently, device_mesh, timeout)
        self.where = tuple(device_mesh.get_coordinate() or ())

    def __call__(self, inputs: Any, on_meta: Any, modes: Sequence[bool]) -> TracedCall:
        with self.patiently():
            captured = self._shared(filled(inputs, on_meta), modes)
            step, complaint = None, None
            try:
                step = self._step(captured)
            except ValueError as error:
                complaint = str(error)
            agree(complaint, "lowering the plan")
        assert step is not None
        return step

    def _shared(self, inputs: Any, modes: Sequence[bool]) -> _Captured:
        """The program of the call. The first rank captures it for all ranks, because a capture takes seconds and ranks may share a machine.

        A plan is of a model in training mode or in eval mode. Where the two differ by dropout only, eval mode runs the training
        mode's program without dropout.
        """
        program, complaint = None, None
        if dist.get_rank() == 0:
            try:
                program, reasons = self._captured(inputs, modes)
                if reasons and not modes[0]:
                    other, rest = self._captured(inputs, [True] * len(modes))
                    if not rest and not any("batch_norm" in op.target for op in other.graph.ops):
                        program, reasons = replace(other, drops=False), ()
                _check_shareable(program.returned)
                complaint = f"the solution is of another model: {'; '.join(reasons)}; plan this model" if reasons else None
            except ValueError as error:
                complaint = str(error)
        return share(program, complaint, "capturing the model")

    def _captured(self, inputs: Any, modes: Sequence[bool]) -> tuple[_Captured, tuple[str, ...]]:
        """The program with the modules of the model in these modes, and the reasons why the plan does not fit it."""
        for part, mode in zip(self.model.modules(), modes, strict=True):
            part.training = mode
        with torch.enable_grad():  # also where the call itself is made without gradients
            captured = capture_module(self.model, inputs, training=self.solution.training)
        assert captured.returned is not None, "a module was captured, not a graph"
        plan = replay(self.solution, captured.graph)
        return _Captured(plan.graph, captured.returned, self._constants(plan.graph, constants(captured.fx_graph))), plan.misfits

    def _constants(self, graph: Graph, held: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What the program reads that is neither a parameter nor a registered buffer: its own constants and attributes of modules."""
        state = {name for name, _ in self.model.named_parameters(remove_duplicate=False)}
        state |= {name for name, _ in self.model.named_buffers(remove_duplicate=False)}
        values = {}
        for name in (op.name for op in graph.ops if op.kind in ("parameter", "buffer") and op.name not in state):
            value, tensor = held.get(name, attribute_of(self.model, name)), graph.tensor((graph.index[name], 0))
            if value is None and (graph.index[name], 0) not in graph.users:
                value = torch.zeros(tensor.shape, dtype=getattr(torch, tensor.dtype))  # no op reads it
            if value is None:
                raise ValueError(f"the captured program reads {name!r}, a tensor without values; register it as a buffer of the model")
            values[name] = value.detach().cpu()
        return values

    def _step(self, captured: _Captured) -> TracedCall:
        graph, returned = captured.graph, captured.returned
        solution, mesh, device = self.solution, self.solution.mesh, self.device_mesh.device_type
        program = lower(graph, solution.layouts, solution.results, mesh, device=device)
        graphs = trace(program, graph, self.groups, self.where, device, drops=captured.drops)
        inference = graphs.inference()
        timelines = {}
        if program.is_even:  # else ranks would choose different orders, as their shards differ in size
            passes = {"forward": graphs.forward, "backward": graphs.backward, "inference": inference}
            present = {name: graph for name, graph in passes.items() if graph is not None}
            rows = scheduled(list(present.values()), Pace(mesh, self.groups), spare_bytes(solution))
            timelines = dict(zip(present, rows, strict=True))
        shapes = {f"{r.kind}:{r.name}": graph.tensor(r.value).shape for r in graph.results if r.value is not None}
        position = [torch.tensor(c, device=device) for c in self.where]
        shards = {
            name: shard_of_rank(value.to(device), graphs.slots[name].layout, mesh, self.where).clone(memory_format=torch.contiguous_format)
            for name, value in captured.constants.items()
        }
        return TracedCall(graphs, inference, shapes, returned.structure, returned.leaves, shards, position, timelines, self.patiently)


def _check_shareable(returned: Returned) -> None:
    """ValueError where the structure of the results can't be pickled: the first rank sends it to the others."""
    try:
        pickle.dumps(returned)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(
            f"the model returns something that can't be sent to other ranks ({error}); define its class at the top of a module, "
            "or return tensors, tuples, lists and dicts"
        ) from error


def spare_bytes(solution: Solution) -> float:
    """By how much overlapping may raise the peak: by 5 %, so that the plan's figure stays true, or by half a megabyte, which matters
    in test models only; never beyond the plan's memory limit."""
    if not math.isfinite(solution.peak_bytes):
        return 0.0
    limit = solution.memory_limit
    return min(max(0.05 * solution.peak_bytes, 5e5), max(limit - solution.peak_bytes, 0.0) if limit else math.inf)
