"""Run a RankProgram: on all ranks in one process, or as one rank of many.

In one process all ranks carry out one record before the next. A tensor of the program is a list of local tensors, one per rank:

    RunOp without a kernel               each rank calls the op; ranks whose inputs are the same objects share one call
    RunOp with a kernel, Redistribute    the ranks' generators run until each asks for a collective; every group of the asked
                                         axis is answered, and so on

After each record the local shapes and dtypes must be the planned ones. Sharing a call is exact: it is the same function of the same
tensors, and nothing writes in place. Random ops start on every rank from one state of the generator, which they leave in one state.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from autoshard.graph import replace_refs
from autoshard.layout import is_legal, rank_shape, text
from autoshard.lower.collectives import Groups, Rank, RankGenerator, exchange, run_step, unfolded
from autoshard.lower.generator import draws, first_state, from_state, state_of_generator
from autoshard.lower.kernels.table import function_of
from autoshard.lower.program import FreeTensors, LoadPlaceholder, RankProgram, Record, Redistribute, ReturnResult, RunOp, Slot
from autoshard.lower.sharding import groups, local_tensors
from autoshard.mesh import Mesh
from autoshard.routes import Step

LocalTensors = list[Tensor]  # one per rank


def ranks(mesh: Mesh, device: str = "cpu") -> tuple[Rank, ...]:
    return tuple(Rank(mesh, tuple(torch.tensor(c, device=device) for c in coordinate), coordinate) for coordinate in mesh.coordinates())


def call(record: RunOp, inputs: Sequence[Tensor], rank: int) -> tuple[Any, ...]:
    """The op on the local tensors of a rank (its number on the mesh): one entry per output."""
    return _with_planned(record, as_outputs(function_of(record.target)(**arguments(record, inputs, rank))), rank)


def _with_planned(record: RunOp, outputs: tuple[Any, ...], rank: int) -> tuple[Any, ...]:
    """Outputs of the planned shapes where a kernel leaves one out that only its own backward reads: a tensor of no elements for None (a
    recurrent layer's workspace) or for one that the CPU's kernel leaves out (batch norm, bags of embeddings), zeros where another
    device's kernel does."""
    planned = list(outputs)
    device = next((y.device for y in outputs if isinstance(y, Tensor)), torch.device("cpu"))
    for k, (y, slot) in enumerate(zip(outputs, record.outputs)):
        shape = () if slot is None else slot.shape_on(rank)
        is_other = y is None or (tuple(y.shape) != shape and (0 in shape or (0 in y.shape and y.device.type != "cpu")))
        if slot is not None and is_other:
            if 0 not in shape and device.type == "cpu":
                raise ValueError(f"{record.target} (op {record.name}) returned nothing where the captured program has a tensor of {shape}")
            planned[k] = torch.zeros(shape, dtype=getattr(torch, slot.dtype), device=device)
    return tuple(planned)


def arguments(record: RunOp, inputs: Sequence[Tensor], rank: int) -> dict[str, Any]:
    return {name: replace_refs(literal, tuple(inputs)) for name, literal in record.arguments_on(rank).items()}


def as_outputs(result: Any) -> tuple[Any, ...]:
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)


def local_program(record: Redistribute | RunOp, rank: Rank, inputs: Sequence[Tensor]) -> RankGenerator:
    """The record on one rank as a generator, which returns the outputs."""
    if isinstance(record, Redistribute):
        return ((yield from run_route(record.steps, rank, inputs[0], record.global_shape)),)
    number = rank.number if record.by_rank else 0
    if record.kernel is None:
        return call(record, inputs, number)
    return _with_planned(record, as_outputs((yield from record.kernel(rank, arguments(record, inputs, number)))), number)


def run_on_one_device(record: RunOp, inputs: Sequence[Tensor], device: str = "cpu") -> tuple[Any, ...]:
    """The op on global tensors, by its kernel where it has one on every mesh. On one device a kernel needs no collective."""
    try:
        next(local_program(record, ranks(Mesh(()), device)[0], inputs))
    except StopIteration as done:
        return done.value
    raise AssertionError(f"op {record.name} asks for a collective on one device")


def run_route(steps: Sequence[Step], rank: Rank, x: Tensor, global_shape: tuple[int, ...] | None = None) -> RankGenerator:
    """The steps of a route. global_shape: of the tensor, where shards may be uneven on the way."""
    for step in steps:
        x = yield from run_step(step, rank, x, global_shape)
    return x


def check(slot: Slot, local: object, where: str, rank: int = 0) -> None:
    """ValueError when a local tensor is not what was planned for it on this rank."""
    actual = (tuple(local.shape), str(local.dtype).removeprefix("torch.")) if isinstance(local, Tensor) else local
    planned = (actual[0] if slot.of_kernel and isinstance(actual, tuple) else slot.shape_on(rank), slot.dtype)
    if actual != planned:
        raise ValueError(
            f"{where} gave {slot.name} as {actual}; planned is {planned}, with layout {text(slot.layout)}: "
            "the row or a size literal of the op is wrong"
        )


def check_all(slot: Slot, tensors: LocalTensors, where: str) -> None:
    """`check` for the local tensors of all ranks; a tensor that several ranks share is checked once."""
    seen = set()
    for rank, local in enumerate(tensors):
        key = (id(local), slot.shapes and slot.shapes[rank])
        if key not in seen:
            seen.add(key)
            check(slot, local, where, rank)


class Interpreter(ABC):
    """Carries out the records of a program. `held`: what each slot holds now, `results`: what the program has returned so far.

    A value is a local tensor where this is one rank, and a list of one local tensor per rank where it is all of them.
    """

    def __init__(self) -> None:
        self.held: dict[str, Any] = {}
        self.results: dict[str, Any] = {}

    def do(self, record: Record, values: Mapping[str, Tensor]) -> None:
        """Carry out one record. values: of the placeholders. ValueError where a shape or dtype isn't the planned one."""
        match record:
            case LoadPlaceholder():
                self._hold(record.slot, self.load(record, values), f"placeholder {record.name}")
            case Redistribute() | RunOp():
                where = f"op {record.name}" if isinstance(record, RunOp) else f"the route to {record.name}"
                for slot, value in zip(record.outputs, self.outputs(record)):
                    if slot is not None:
                        self._hold(slot, value, where)
            case ReturnResult():
                self.results[record.key] = self.held[record.slot.name]
            case FreeTensors():
                for name in record.slots:
                    self.held.pop(name, None)

    def _hold(self, slot: Slot, value: Any, where: str) -> None:
        self.check(slot, value, where)
        self.held[slot.name] = value

    @abstractmethod
    def load(self, record: LoadPlaceholder, values: Mapping[str, Tensor]) -> Any:
        """The value of a placeholder."""

    @abstractmethod
    def outputs(self, record: Redistribute | RunOp) -> Sequence[Any]:
        """The values of a record's outputs."""

    @abstractmethod
    def check(self, slot: Slot, value: Any, where: str) -> None:
        """ValueError where a value isn't as planned for its slot."""


class SimulatedRanks(Interpreter):
    """All ranks of a mesh."""

    def __init__(self, mesh: Mesh, device: str = "cpu"):
        super().__init__()
        self.mesh, self.device, self.ranks = mesh, device, ranks(mesh, device)
        self.random = first_state(0, device)  # of the generator that all ranks share

    def load(self, record: LoadPlaceholder, values: Mapping[str, Tensor]) -> LocalTensors:
        return local_tensors(global_value(record, values, self.mesh), record.slot.layout, self.mesh)

    def outputs(self, record: Redistribute | RunOp) -> list[LocalTensors]:
        if isinstance(record, Redistribute):
            return [self.redistribute(record)]
        return [list(of_ranks) for of_ranks in zip(*self.run(record))]

    def check(self, slot: Slot, value: LocalTensors, where: str) -> None:
        check_all(slot, value, where)

    def redistribute(self, record: Redistribute) -> LocalTensors:
        tensors = self.held[record.source.name]
        for step in record.steps:
            tensors = self._step(step, tensors, record.global_shape)
        return tensors

    def _step(self, step: Step, tensors: LocalTensors, global_shape: tuple[int, ...] | None) -> LocalTensors:
        """One step in every group of its axis; groups that hold the same tensors share the answer."""
        done: dict[tuple[int, ...], LocalTensors] = {}
        out, alike = list(tensors), step.collective in ("all_gather", "all_reduce")
        for group in groups(self.mesh, step.axis):
            key = tuple(id(tensors[r]) for r in group)
            if key not in done:
                programs = [run_step(step, self.ranks[r], tensors[r], global_shape) for r in group]
                done[key] = run_together(programs, lambda axis: [range(self.mesh.shape[axis])], alike=alike)
            for r, local in zip(group, done[key], strict=True):
                out[r] = local
        return out

    def run(self, record: RunOp) -> list[tuple[Any, ...]]:
        inputs = [tuple(self.held[slot.name][r] for slot in record.inputs) for r in range(len(self.ranks))]
        if draws(record.target):
            return self._draw(record, inputs)
        if record.kernel is not None:
            programs = [unfolded(local_program(record, rank, own), rank) for rank, own in zip(self.ranks, inputs, strict=True)]
            return run_together(programs, lambda axis: groups(self.mesh, axis))
        done: dict[tuple[int, ...], tuple[Any, ...]] = {}
        outputs = []
        for r, own in enumerate(inputs):
            key = (*map(id, own), id(record.arguments_on(r)))
            if key not in done:
                done[key] = call(record, own, r)
            outputs.append(done[key])
        return outputs

    def _draw(self, record: RunOp, inputs: list[tuple[Tensor, ...]]) -> list[tuple[Any, ...]]:
        """A random op, which needs no collective, rank by rank. ValueError where it leaves the generators in different states."""
        outputs, states = [], []
        for rank, own in zip(self.ranks, inputs, strict=True):
            with from_state(self.random, self.device):
                outputs += run_together([local_program(record, rank, own)], lambda axis: [(0,)])
                states.append(state_of_generator(self.device))
        is_sharded = any(p.is_shard() for slot in record.outputs if slot is not None for p in slot.layout)
        if record.kernel is None and is_sharded and not torch.equal(self.random, states[0]):
            raise ValueError(f"{record.target} draws the same on each shard: give it torch's tag nondeterministic_seeded, as it is random")
        if not all(torch.equal(state, states[0]) for state in states):
            raise ValueError("ranks draw different amounts of random numbers, so that from here on replicas would differ")
        self.random = states[0]
        return outputs


def run_together(programs: Sequence[RankGenerator], groups_of: Callable[[int], Iterable[Sequence[int]]], *, alike: bool = False) -> list:
    """Run generators to their ends. In each round all of them ask for a collective, which each group of its axis (groups_of) carries out.

    alike: every rank receives and returns the same tensor, so that only one generator runs to its end.
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
            for group in groups_of(asks[0].axis):
                for r, answer in zip(group, exchange([asks[r] for r in group]), strict=True):
                    answers[r] = answer
    return results


def global_value(record: LoadPlaceholder, values: Mapping[str, Tensor], mesh: Mesh) -> Tensor:
    """The value of a placeholder; ValueError when it is missing or can't be sharded as planned."""
    if record.name not in values:
        raise ValueError(f"there is no value for {record.name!r}; expected one tensor for each parameter, buffer, input and tangent")
    value = values[record.name].detach()
    slot = record.slot
    if str(value.dtype).removeprefix("torch.") != slot.dtype or not _fits(tuple(value.shape), slot, mesh):
        raise ValueError(
            f"the value of {record.name!r} is {tuple(value.shape)} {value.dtype}, which is not {slot.shape} {slot.dtype} "
            f"on each rank under layout {text(slot.layout)}"
        )
    return value


def _fits(shape: tuple[int, ...], slot: Slot, mesh: Mesh) -> bool:
    """Whether a tensor of this global shape has the slot's local shape on every rank; the first and the last rank decide it."""
    if not is_legal(shape, slot.layout, mesh):
        return False
    ends = ((0, mesh.coordinates()[0]), (mesh.num_devices - 1, mesh.coordinates()[-1]))
    return all(rank_shape(shape, slot.layout, mesh, coordinate) == slot.shape_on(rank) for rank, coordinate in ends)


class OneRank(Interpreter):
    """One rank of many, which reaches the others through its process groups."""

    def __init__(self, rank: Rank, groups: Groups, number: int):
        super().__init__()
        self.rank, self.groups, self.number = rank, groups, number

    def load(self, record: LoadPlaceholder, values: Mapping[str, Tensor]) -> Tensor:
        return values[record.name]

    def outputs(self, record: Redistribute | RunOp) -> Sequence[Any]:
        return self.groups.drive(local_program(record, self.rank, [self.held[slot.name] for slot in record.inputs]))

    def check(self, slot: Slot, value: Tensor, where: str) -> None:
        check(slot, value, where, self.number)


@torch.no_grad()
def run_rank(
    program: RankProgram,
    values: Mapping[str, Tensor],
    groups: Groups,
    coordinate: Sequence[Tensor],
    where: tuple[int, ...] | None = None,
    *,
    done: Callable[[int, Mapping[str, Tensor]], None] = lambda i, held: None,
) -> dict[str, Tensor]:
    """One rank of many: local placeholders in, local results out, collectives over the process groups of the mesh axes.

    coordinate: a 0-d integer tensor per axis, on the device that runs. Can be traced (make_fx) into a per-rank graph.
    where: the same as numbers; ValueError when it is missing and the program has uneven shards. done: called with the index of
    each record after it is carried out, and what each slot holds then.
    """
    rank = Rank(program.mesh, tuple(coordinate), where)
    one = OneRank(rank, groups, 0 if program.is_even else rank.number)
    for i, record in enumerate(program.records):
        one.do(record, values)
        done(i, one.held)
    return one.results
