"""The stages of a pipeline as programs of their ranks, and how values get from stage to stage.

holdings   every value that crosses a boundary has a layout on each stage that produces it, reads it or passes it on:
           where it is produced, the layout in which the program returns it, without partial sums;
           elsewhere, the layout in which it arrives: sharded over all devices as far as its dims divide; the program gathers it
sums       a gradient is added up over microbatches as it is produced, where that takes no more memory than the parameter's layout,
           and reduced once per step; elsewhere it is reduced in every microbatch
copies     a parameter that several stages read is held by each device group of them, and their gradients are added once per step
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import torch

from autoshard.graph import Graph, Result
from autoshard.layout import Layout, R, S, local_numel, local_shape, parse, replicated, text
from autoshard.lower import RankProgram, Redistribute, Slot, lower, redistribution, slot_of
from autoshard.mesh import Mesh
from autoshard.routes import Routes
from autoshard.runtime.transfers import Held, StageTransfer, transfer
from autoshard.solution import RECEIVED, SENT, PipelineToRun, Placed, StageToRun

LOSS_TANGENT = "tangent_0"  # of what a model returns, a pipeline differentiates its loss alone


@dataclass(frozen=True, eq=False)
class LoweredStage:
    """One stage, lowered. Names of crossing values are without `send:` and `recv:`."""

    index: int
    group: int
    devices: tuple[int, ...]
    mesh: Mesh
    graph: Graph
    program: RankProgram
    arrives: Mapping[bool, tuple[StageTransfer, ...]]  # forward values of the stage before (True), backward values of the stage behind
    leaves: Mapping[bool, tuple[StageTransfer, ...]]  # to the stage behind (True), to the stage before
    reductions: Mapping[str, Redistribute]  # by parameter: from the sum's layout to the parameter's

    @cached_property
    def parameters(self) -> dict[str, Layout]:
        """And buffers, with the layouts in which they are held."""
        kinds = ("parameter", "buffer")
        return {r.name: r.slot.layout for r in self.program.loads if self.graph.ops[r.slot.value[0]].kind in kinds}


@dataclass(frozen=True, eq=False)
class SharedParameter:
    """A parameter that several device groups hold: the transfers of the others' gradients to the first group, and of the sum to them."""

    name: str
    groups: tuple[int, ...]
    there: tuple[StageTransfer, ...]
    back: tuple[StageTransfer, ...]


@dataclass(frozen=True, eq=False)
class LoweredStages:
    """All stages of a pipeline, lowered."""

    of: tuple[LoweredStage, ...]
    copies: tuple[SharedParameter, ...]


def lower_stages(plan: PipelineToRun, *, device: str = "cpu") -> LoweredStages:
    """ValueError where a stage can't be lowered, or where stages of a device group hold a parameter on different meshes."""
    planned = _with_one_home(plan.stages)
    crossing = [_crossing(planned, is_forward) for is_forward in (True, False)]
    planned = [_received_sharded(stage, crossing) for stage in planned]
    values = dict(item for of_direction in crossing for item in of_direction.items())
    held = [{name: _held(stage, x) for name, x in values.items() if v in x.stages} for v, stage in enumerate(planned)]
    between: dict[tuple[int, int], tuple[StageTransfer, ...]] = {}
    for v, w in pairwise(range(len(planned))):
        for values, (source, target) in zip(crossing, ((v, w), (w, v)), strict=True):
            names = [name for name, value in values.items() if v in value.stages and w in value.stages]
            between[source, target] = tuple(
                transfer(name, values[name].shape, values[name].dtype, held[source][name], held[target][name]) for name in names
            )
    of = tuple(_lowered(v, stage, held[v], between, device) for v, stage in enumerate(planned))
    return LoweredStages(of, tuple(_copies(of)))


def why_no_loss(plan: PipelineToRun) -> str | None:
    """Why the last stage doesn't return the model's loss; None where it does."""
    graph = plan.stages[-1].graph
    loss = next((graph.tensor(r.value) for r in _returned(plan.stages[-1]) if r.name == "0" and r.value is not None), None)
    if any(True for stage in plan.stages[:-1] for _ in _returned(stage)):
        return "an earlier stage than the last returns an output of the model; a pipeline runs a model that returns only its loss"
    if loss is None or loss.shape != () or "float" not in loss.dtype:
        returned = "no tensor" if loss is None else f"a tensor of shape {loss.shape} and type {loss.dtype}"
        return f"the model's first output is {returned}; a pipeline runs a model that returns its loss, a scalar: give it the targets, too"
    return None


def _returned(stage: StageToRun) -> Iterator[Result]:
    return (r for r in stage.graph.results if r.kind == "output" and not r.name.startswith(SENT))


@dataclass(frozen=True)
class _Value:
    """A value that one stage produces and others read; stages: those that hold it, from its producer to its last reader."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    stages: range


def _crossing(stages: Sequence[StageToRun], is_forward: bool) -> dict[str, _Value]:
    """The values of one direction by name, in the order of their producers."""
    kind = "input" if is_forward else "tangent"
    readers: dict[str, list[int]] = {}
    for v, stage in enumerate(stages):
        for op in stage.graph.ops:
            if op.kind == kind and op.name.startswith(RECEIVED):
                readers.setdefault(op.name.removeprefix(RECEIVED), []).append(v)
    values = {}
    for v, stage in enumerate(stages):
        for result in stage.graph.results:
            name = result.name.removeprefix(SENT)
            if name != result.name and name in readers and result.kind == ("output" if is_forward else "gradient"):
                assert result.value is not None
                tensor, ends = stage.graph.tensor(result.value), (v, *readers[name])
                values[name] = _Value(name, tensor.shape, getattr(torch, tensor.dtype), range(min(ends), max(ends) + 1))
    return values


def _held(stage: StageToRun, value: _Value) -> Held:
    produced = next((r.value for r in stage.graph.results if r.name == SENT + value.name), None)
    if produced is not None:
        layout = _without_partial(value.shape, _read_from(stage, produced), stage.mesh)
    elif (placed := stage.layouts.get(RECEIVED + value.name)) is not None:
        layout = parse(placed.outputs[0] or "")
    else:
        layout = sharded_further(value.shape, replicated(len(stage.mesh.axes)), stage.mesh)
    return Held(layout, stage.mesh, stage.devices)


def _read_from(stage: StageToRun, value: tuple[int, int]) -> Layout:
    """The layout from which a value's users read it."""
    placed = stage.layouts[stage.graph.ops[value[0]].name]
    return parse(placed.hubs[value[1]] or placed.outputs[value[1]] or "")


def sharded_further(shape: tuple[int, ...], layout: Layout, mesh: Mesh) -> Layout:
    """The layout with its replicated axes sharded on the first dim that divides, where an all-gather of that axis undoes it."""
    placements = list(layout)
    for k in reversed(range(len(placements))):  # a dim that a later axis shards is taken
        local = local_shape(shape, tuple(placements), mesh)
        taken = {p.dim for p in placements[k + 1 :] if p.is_shard()}
        dim = next((d for d, size in enumerate(local) if size and size % mesh.axes[k].size == 0 and d not in taken), None)
        if placements[k] == R and mesh.axes[k].size > 1 and dim is not None:
            placements[k] = S(dim)
    return tuple(placements)


def _without_partial(shape: tuple[int, ...], layout: Layout, mesh: Mesh) -> Layout:
    """Partial sums are scattered where the tensor divides, and reduced elsewhere."""
    reduced = tuple(R if p.is_partial() else p for p in layout)
    further = sharded_further(shape, reduced, mesh)
    return tuple(b if p.is_partial() else p for p, b in zip(layout, further, strict=True))


def _received_sharded(stage: StageToRun, crossing: Sequence[Mapping[str, _Value]]) -> StageToRun:
    """The stage with received values that arrive sharded, and are gathered where the plan has more of them on each device."""
    layouts = dict(stage.layouts)
    for op in stage.graph.ops:
        name = op.name.removeprefix(RECEIVED)
        if name == op.name or not op.is_placeholder:
            continue
        if not any(name in values for values in crossing):
            raise ValueError(f"no stage sends {name!r}, which another one reads; plan the pipeline again")
        placed = layouts[op.name]
        planned = parse(placed.outputs[0] or "")
        arrival = sharded_further(op.output.shape, planned, stage.mesh)
        layouts[op.name] = Placed((), (text(arrival),), (placed.hubs[0] or placed.outputs[0],))
    return replace(stage, layouts=layouts)


def _with_one_home(stages: Sequence[StageToRun]) -> list[StageToRun]:
    """Stages of one device group hold a parameter or buffer once, in the layout of the first of them."""
    homes: dict[tuple[int, str], tuple[str, StageToRun]] = {}
    changed = []
    for stage in stages:
        layouts = dict(stage.layouts)
        for op in (op for op in stage.graph.ops if op.kind in ("parameter", "buffer")):
            placed = layouts[op.name]
            home, first = homes.setdefault((stage.group, op.name), (placed.outputs[0] or "", stage))
            if first.mesh.shape != stage.mesh.shape:
                raise ValueError(
                    f"two stages of device group {stage.group} read {op.name!r} on meshes of {first.mesh.shape} and {stage.mesh.shape}; "
                    "a group holds it once: plan the pipeline with another number of stages"
                )
            if placed.outputs[0] != home:
                layouts[op.name] = Placed((), (home,), (placed.hubs[0] or placed.outputs[0],))
        changed.append(replace(stage, layouts=layouts))
    return changed


def _lowered(
    v: int, stage: StageToRun, held: Mapping[str, Held], between: Mapping[tuple[int, int], tuple[StageTransfer, ...]], device: str
) -> LoweredStage:
    graph, mesh, routes = stage.graph, stage.mesh, Routes(stage.mesh)
    results: dict[str, str] = {}
    reductions: dict[str, Redistribute] = {}
    everywhere = text(replicated(len(mesh.axes)))
    for result in graph.results:
        key = f"{result.kind}:{result.name}"
        if result.value is None:
            continue
        if key in results:
            raise ValueError(f"a stage returns {key!r} twice; a parameter's gradients of one stage must be added in that stage")
        if result.name.startswith(SENT):
            results[key] = text(held[result.name.removeprefix(SENT)].layout)
        elif result.kind == "gradient":
            reductions[result.name] = _reduction(stage, result.name, result.value, routes)
            results[key] = text(reductions[result.name].source.layout)
        elif result.kind == "buffer":
            results[key] = stage.layouts[result.name].outputs[0] or everywhere
        else:
            results[key] = everywhere
    program = lower(graph, stage.layouts, results, mesh, routes=routes, device=device)
    arrives = {True: between.get((v - 1, v), ()), False: between.get((v + 1, v), ())}
    leaves = {True: between.get((v, v + 1), ()), False: between.get((v, v - 1), ())}
    return LoweredStage(v, stage.group, stage.devices, mesh, graph, program, arrives, leaves, reductions)


def _reduction(stage: StageToRun, name: str, value: tuple[int, int], routes: Routes) -> Redistribute:
    """From the layout in which the gradient of a parameter is added up to the parameter's."""
    tensor, produced = stage.graph.tensor(value), _read_from(stage, value)
    target = parse(stage.layouts[name].outputs[0] or "")
    once = local_numel(tensor.shape, produced, stage.mesh) <= local_numel(tensor.shape, target, stage.mesh)

    def slot(name: str, layout: Layout) -> Slot:
        return slot_of(name, value, tensor, layout, stage.mesh)

    return redistribution(slot(f"{name}.sum", produced if once else target), slot(f"gradient:{name}", target), tensor, routes)


def _copies(stages: Sequence[LoweredStage]) -> Iterator[SharedParameter]:
    """The parameters that several groups hold, in the order of the stages."""
    holders: dict[str, dict[int, LoweredStage]] = {}
    for stage in stages:
        for name in stage.reductions:
            holders.setdefault(name, {}).setdefault(stage.group, stage)
    for name, by_group in holders.items():
        if len(by_group) > 1:
            first, *others = by_group.values()
            there = tuple(_gradient_transfer(name, other, first) for other in others)
            back = tuple(_gradient_transfer(name, first, other) for other in others)
            yield SharedParameter(name, tuple(by_group), there, back)


def _gradient_transfer(name: str, source: LoweredStage, target: LoweredStage) -> StageTransfer:
    slot = source.reductions[name].target
    shape = source.graph.tensor(slot.value).shape
    ends = [Held(stage.parameters[name], stage.mesh, stage.devices) for stage in (source, target)]
    return transfer(f"{name}@{source.group}", shape, getattr(torch, slot.dtype), *ends)
