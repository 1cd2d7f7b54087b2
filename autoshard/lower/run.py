"""Run a Program: on all ranks in one process, or as one rank of many.

In one process the ranks go in step, record by record. A tensor is a list of parts, one per rank:

    run, no kernel     f(parts of rank r); ranks with the very same tensors as inputs share one call
    run, kernel; move  the ranks' generators run until each asks, every group of the asked axis is answered, and so on

After each record the local shapes and dtypes must be the planned ones. Sharing is exact: the same function of the same
tensors, nothing writes in place. Random ops start on every rank from one state of the generator, where one is given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from autoshard.graph import replace_refs
from autoshard.layout import is_legal, rank_shape, text
from autoshard.lower.collectives import Asking, Groups, Rank, exchange, take
from autoshard.lower.kernels.dropout import from_state
from autoshard.lower.literals import DENSE_INPUTS, overload
from autoshard.lower.parts import assemble, cut, groups
from autoshard.lower.program import FreeTensors, LoadPlaceholder, Program, Redistribute, ReturnResult, RunOp, Slot
from autoshard.mesh import Mesh
from autoshard.routes import Step

Parts = list[Tensor]


def ranks(mesh: Mesh, device: str = "cpu") -> tuple[Rank, ...]:
    """All ranks of a mesh, in order."""
    return tuple(Rank(mesh, tuple(torch.tensor(c, device=device) for c in coordinate), coordinate) for coordinate in mesh.coordinates())


def call(record: RunOp, inputs: Sequence[Tensor], rank: int = 0) -> tuple[Any, ...]:
    """The op on the tensors of a rank (its number on the mesh): its outputs, one entry per output."""
    return _without_gaps(record, as_outputs(overload(record.target)(**arguments(record, inputs, rank))), rank)


def _without_gaps(record: RunOp, outputs: tuple[Any, ...], rank: int) -> tuple[Any, ...]:
    """An empty tensor where a kernel has none and the capture had one of no elements (the workspace of a recurrent layer)."""
    wanted = (*record.outputs, *(None for _ in outputs))
    return tuple(_empty(record, slot, rank) if y is None and slot is not None else y for y, slot in zip(outputs, wanted, strict=False))


def _empty(record: RunOp, slot: Slot, rank: int) -> Tensor:
    shape = slot.shape_on(rank)
    if 0 not in shape:
        raise ValueError(f"{record.target} (op {record.name}) returned nothing where the captured program has a tensor of {shape}")
    return torch.empty(shape, dtype=getattr(torch, slot.dtype))


def arguments(record: RunOp, inputs: Sequence[Tensor], rank: int = 0) -> dict[str, Any]:
    values = tuple(map(_dense, inputs)) if record.target in DENSE_INPUTS else tuple(inputs)
    return {name: replace_refs(literal, values) for name, literal in record.arguments_on(rank).items()}


def _dense(x: Tensor) -> Tensor:
    """With a last dim without gaps; other strides may stay, and the output then has them as in the whole program."""
    return x if x.stride(-1) == 1 else x.contiguous()


def as_outputs(result: Any) -> tuple[Any, ...]:
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)


def asking(record: RunOp, rank: Rank, inputs: Sequence[Tensor]) -> Asking:
    """The op's local program as a generator, kernel or not."""
    number = rank.number if record.by_rank else 0
    if record.kernel is None:
        return call(record, inputs, number)  # type: ignore[return-value]
    return as_outputs((yield from record.kernel(rank, arguments(record, inputs, number))))  # type: ignore[return-value]


def alone(record: RunOp, inputs: Sequence[Tensor]) -> tuple[Any, ...]:
    """The op on whole tensors, by its local program where it always has one of its own; on one device nobody is asked for anything."""
    try:
        next(asking(record, ranks(Mesh(()))[0], inputs))
    except StopIteration as done:
        return done.value
    raise AssertionError(f"op {record.name} asks for a collective on one device")


def taking(steps: Sequence[Step], rank: Rank, x: Tensor, whole: tuple[int, ...] | None = None) -> Asking:
    """The steps of a route. whole: the shape of the whole tensor, where parts may be uneven on the way."""
    for step in steps:
        x = yield from take(step, rank, x, whole)
    return x


def check(slot: Slot, part: object, where: str, rank: int = 0) -> None:
    """ValueError when a local tensor is not what was planned for it on this rank."""
    found = (tuple(part.shape), str(part.dtype).removeprefix("torch.")) if isinstance(part, Tensor) else part
    planned = (slot.shape_on(rank), slot.dtype)
    if found != planned:
        raise ValueError(
            f"{where} gave {slot.name} as {found}; planned is {planned}, laid out {text(slot.layout)}: "
            "the row or a size literal of the op is wrong"
        )


def check_all(slot: Slot, parts: Parts, where: str) -> None:
    """`check` for what all ranks hold; a tensor that several share is looked at once."""
    seen = set()
    for rank, part in enumerate(parts):
        key = (id(part), slot.shapes and slot.shapes[rank])
        if key not in seen:
            seen.add(key)
            check(slot, part, where, rank)


# -- all ranks in one process --------------------------------------------------------------------------------------------------


class World:
    """The ranks of a mesh and the tensors that they hold now: slot name -> parts."""

    def __init__(self, mesh: Mesh):
        self.mesh, self.ranks = mesh, ranks(mesh)
        self.held: dict[str, Parts] = {}

    def do(self, record: LoadPlaceholder | Redistribute | RunOp | FreeTensors, values: Mapping[str, Tensor]) -> None:
        """Carry out one record on every rank. ValueError where a shape or dtype isn't the planned one."""
        match record:
            case LoadPlaceholder():
                self.held[record.slot.name] = cut(whole_input(record, values, self.mesh), record.slot.layout, self.mesh)
            case Redistribute():
                self.held[record.target.name] = self.move(record)
            case RunOp():
                self.hold(record, self.run(record))
            case FreeTensors():
                for name in record.slots:
                    self.held.pop(name, None)

    def parts(self, slot: Slot) -> Parts:
        return self.held[slot.name]

    def move(self, record: Redistribute) -> Parts:
        parts = self.parts(record.source)
        for step in record.steps:
            parts = self._step(step, parts, record.whole)
        check_all(record.target, parts, f"the route from {text(record.source.layout)} to {text(record.target.layout)}")
        return parts

    def _step(self, step: Step, parts: Parts, whole: tuple[int, ...] | None) -> Parts:
        """One step in every group of its axis; groups that hold the same tensors share the answer."""
        done: dict[tuple[int, ...], Parts] = {}
        out = list(parts)
        for group in groups(self.mesh, step.axis):
            key = tuple(id(parts[r]) for r in group)
            if key not in done:
                programs = [take(step, self.ranks[r], parts[r], whole) for r in group]
                done[key] = together(programs, [tuple(range(len(group)))], alike=step.collective in ("all_gather", "all_reduce"))
            for r, part in zip(group, done[key], strict=True):
                out[r] = part
        return out

    def run(self, record: RunOp, random: Tensor | None = None) -> list[tuple[Any, ...]]:
        """For each rank the outputs of the op. random: the generator's state that every rank draws from."""
        inputs = [tuple(self.parts(slot)[r] for slot in record.inputs) for r in range(len(self.ranks))]
        if random is not None:
            return self._draw(record, inputs, random)
        if record.kernel is not None:
            return self._kernel([asking(record, rank, given) for rank, given in zip(self.ranks, inputs, strict=True)])
        done: dict[tuple[int, ...], tuple[Any, ...]] = {}
        outputs = []
        for r, given in enumerate(inputs):
            key = (*map(id, given), id(record.arguments_on(r)))
            if key not in done:
                done[key] = call(record, given, r)
            outputs.append(done[key])
        return outputs

    def _draw(self, record: RunOp, inputs: list[tuple[Tensor, ...]], random: Tensor) -> list[tuple[Any, ...]]:
        """A random op, which asks for nothing, rank by rank; numbers are drawn in the order of memory, so that it must be one order."""
        outputs = []
        for rank, given in zip(self.ranks, inputs, strict=True):
            with from_state(random):
                outputs += together([asking(record, rank, [x.contiguous() for x in given])], [(0,)])
        return outputs

    def _kernel(self, programs: list[Asking]) -> list[Any]:
        return together(programs, lambda axis: groups(self.mesh, axis))

    def hold(self, record: RunOp, outputs: list[tuple[Any, ...]]) -> None:
        """Keep what an op gave, after a look at it."""
        for k, slot in enumerate(record.outputs):
            if slot is not None:
                parts = [out[k] for out in outputs]
                check_all(slot, parts, f"op {record.name}")
                self.held[slot.name] = parts


def together(
    programs: Sequence[Asking], groups_of: Callable[[int], Sequence[Sequence[int]]] | Sequence[Sequence[int]], *, alike: bool = False
) -> list[Any]:
    """Run generators in step to their ends; each round all of them ask, and each group of the axis gets its answers.

    groups_of: the groups for an axis, or the groups themselves. alike: every rank gets and returns the same, so that the
    last stretch is computed once.
    """
    results: list[Any] = [None] * len(programs)
    asks: list[Any] = [None] * len(programs)
    answers: list[Any] = [None] * len(programs)
    waiting = list(range(len(programs)))
    while waiting:
        ended = []
        for r in waiting:
            try:
                asks[r] = programs[r].send(answers[r])
            except StopIteration as done:
                results[r] = done.value
                ended.append(r)
                if alike:
                    return [done.value] * len(programs)
        if ended and len(ended) != len(waiting):
            raise ValueError("some ranks end while others ask for a collective: a local program must be the same on every rank")
        waiting = [] if ended else waiting
        if waiting:
            axis_groups = groups_of(asks[0].axis) if callable(groups_of) else groups_of
            for group in axis_groups:
                for r, answer in zip(group, exchange([asks[r] for r in group]), strict=True):
                    answers[r] = answer
    return results


def whole_input(record: LoadPlaceholder, values: Mapping[str, Tensor], mesh: Mesh) -> Tensor:
    """The value of a placeholder; ValueError when it is missing or can't be cut as planned."""
    if record.name not in values:
        raise ValueError(f"there is no value for {record.name!r}; expected one tensor for each parameter, buffer, input and tangent")
    whole = values[record.name].detach()
    slot = record.slot
    if str(whole.dtype).removeprefix("torch.") != slot.dtype or not _is_cut_into(tuple(whole.shape), slot, mesh):
        raise ValueError(
            f"the value of {record.name!r} is {tuple(whole.shape)} {whole.dtype}, which is not {slot.shape} {slot.dtype} "
            f"on each rank when laid out {text(slot.layout)}"
        )
    return whole


def _is_cut_into(shape: tuple[int, ...], slot: Slot, mesh: Mesh) -> bool:
    """Whether a tensor of this shape gives every rank what the slot says; the first and the last rank tell."""
    if not is_legal(shape, slot.layout, mesh):
        return False
    ends = ((0, mesh.coordinates()[0]), (mesh.num_devices - 1, mesh.coordinates()[-1]))
    return all(rank_shape(shape, slot.layout, mesh, coordinate) == slot.shape_on(rank) for rank, coordinate in ends)


@torch.no_grad()
def run_simulated(program: Program, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """All ranks in this process: whole placeholders in, whole results out ("kind:name" -> tensor).

    ValueError when ranks that should hold the same tensor don't, or where a local shape isn't the planned one.
    """
    world, results = World(program.mesh), {}
    for record in program.records:
        if isinstance(record, ReturnResult):
            results[record.key] = assemble(world.parts(record.slot), record.slot.layout, program.mesh)
        else:
            world.do(record, values)
    return results


# -- one rank of many ---------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def run_rank(
    program: Program,
    values: Mapping[str, Tensor],
    groups: Groups,
    coordinate: Sequence[Tensor],
    where: tuple[int, ...] | None = None,
    *,
    done: Callable[[int], None] = lambda i: None,
) -> dict[str, Tensor]:
    """This rank's part: local placeholders in, local results out, collectives over the process groups of the mesh axes.

    coordinate: a 0-d integer tensor per axis, on the device that runs. Can be traced (make_fx) into a per-rank graph.
    where: the same as numbers, which a program with uneven parts needs; ValueError without. done: called with the index of each
    record after it is carried out.
    """
    rank = Rank(program.mesh, tuple(coordinate), where)
    number = 0 if program.is_even else rank.number
    held: dict[str, Any] = {}
    results: dict[str, Tensor] = {}
    for i, record in enumerate(program.records):
        match record:
            case LoadPlaceholder():
                check(record.slot, values[record.name], f"placeholder {record.name}", number)
                held[record.slot.name] = values[record.name]
            case Redistribute():
                part = groups.drive(taking(record.steps, rank, held[record.source.name], record.whole))
                check(record.target, part, f"the route to {record.target.name}", number)
                held[record.target.name] = part
            case RunOp():
                outputs = groups.drive(asking(record, rank, [held[slot.name] for slot in record.inputs]))
                for slot, part in zip(record.outputs, outputs, strict=False):
                    if slot is not None:
                        check(slot, part, f"op {record.name}", number)
                        held[slot.name] = part
            case ReturnResult():
                results[record.key] = held[record.slot.name]
            case FreeTensors():
                for name in record.slots:
                    held.pop(name, None)
        done(i)
    return results


def run_on(program: Program, values: Mapping[str, Tensor], device_mesh: DeviceMesh) -> dict[str, Tensor]:
    """`run_rank` on the ranks of a DeviceMesh. ValueError when its shape is not the program's."""
    if tuple(device_mesh.shape) != program.mesh.shape:
        raise ValueError(f"the device mesh is {tuple(device_mesh.shape)}, the program was made for {program.mesh.shape}")
    where = device_mesh.get_coordinate()
    if where is None:
        raise ValueError("this process is not on the device mesh")
    coordinate = tuple(torch.tensor(c, device=device_mesh.device_type) for c in where)
    return run_rank(program, values, Groups.of(device_mesh), coordinate, tuple(where))
