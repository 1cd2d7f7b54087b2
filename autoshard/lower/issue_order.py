"""The order in which ranks issue their collectives: members of a group that issue them in different orders wait for each other forever.

    issued          what each rank's program does, record by record: its collectives, and the operators between them
    disagreements   where a member of a group issues another collective than the group's first member

Running ranks compare the graphs that they are about to run (`runtime.agreement`). Ranks whose shards are even join and move collectives
(`runtime.overlap`), each by its own graph. All do the same where their graphs are equal but for numbers, so there the operators of a record
must be the same on every rank, too.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from autoshard.capture import fake_grouped_mm
from autoshard.lower.collectives import CollectiveCall, DataDependent, Rank, drive, uncomputed
from autoshard.lower.program import RankProgram, Redistribute, RunOp
from autoshard.lower.run import local_program
from autoshard.lower.sharding import groups
from autoshard.mesh import Mesh
from autoshard.torch_private import TorchDispatchMode, pytree


@dataclass(frozen=True)
class Issued:
    """A collective as a rank issues it. records: of the program to which it belongs; axes: of the mesh; shape, dtype: of its input."""

    records: tuple[int, ...]
    collective: str
    axes: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str
    reduce_op: str = ""


@dataclass(frozen=True)
class Operator:
    """An operator that a rank runs. inputs: by which operator or collective of the record they are made; outputs: shapes and strides."""

    target: str
    inputs: tuple[int, ...]
    outputs: tuple


Did = tuple[Issued | Operator, ...]


@dataclass(frozen=True)
class Disagreement:
    """What two ranks of a group do at the same point; None where one of them has ended. ranks: their numbers on the mesh."""

    axis: int
    ranks: tuple[int, int]
    does: tuple[Issued | None, Issued | None]

    def record(self, program: RankProgram) -> Redistribute | RunOp:
        """One of the program that is concerned."""
        return _issuing(program, next(one.records[0] for one in self.does if one is not None))

    def said(self, program: RankProgram) -> tuple[str, str]:
        """What each of the two ranks does, in words."""
        return tuple(f"rank {rank} issues {_said(one, program)}" for rank, one in zip(self.ranks, self.does, strict=True))  # type: ignore


def _said(one: Issued | None, program: RankProgram) -> str:
    if one is None:
        return "no further collective"
    of = ", ".join(dict.fromkeys(_issuing(program, k).name for k in one.records))
    return f"{one.collective} of {one.dtype} {one.shape} for {of}, then"


def _issuing(program: RankProgram, k: int) -> Redistribute | RunOp:
    record = program.records[k]
    assert isinstance(record, (Redistribute, RunOp))
    return record


def out_of_step(program: RankProgram) -> list[Disagreement]:
    """Where ranks of a program would issue different collectives, the first one of each group."""
    did = issued(program)
    sequences = [[one for record in of_rank for one in record if isinstance(one, Issued)] for of_rank in did]
    if differences := disagreements(sequences, program.mesh):
        return differences
    return _unlike(did) if program.is_even else []


def disagreements(sequences: Sequence[Sequence[Issued]], mesh: Mesh) -> list[Disagreement]:
    """sequences: the collectives of each rank of the mesh. Of each group the first difference between a member and its first member."""
    differences = []
    for axis in range(len(mesh.axes)):
        along = [[one for one in sequence if axis in one.axes] for sequence in sequences]
        for first, *others in groups(mesh, axis):
            pairs = ((rank, pair) for rank in others if along[rank] != along[first] for pair in zip_longest(along[first], along[rank]))
            apart = next(((rank, pair) for rank, pair in pairs if pair[0] != pair[1]), None)
            if apart is not None:
                differences.append(Disagreement(axis, (first, apart[0]), apart[1]))
    return differences


def _unlike(did: Sequence[Sequence[Did]]) -> list[Disagreement]:
    """Records with collectives whose operators are others on some rank than on the first one."""
    unlike = []
    for of_ranks in zip(*did, strict=True):
        own = next((one for one in of_ranks[0] if isinstance(one, Issued)), None)
        rank = next((rank for rank, other in enumerate(of_ranks) if other is not of_ranks[0] and other != of_ranks[0]), None)
        if own is not None and rank is not None:
            unlike.append(Disagreement(own.axes[0], (0, rank), (own, replace(own, collective=f"{own.collective} amid other operators"))))
    return unlike


@torch.no_grad()
def issued(program: RankProgram) -> list[tuple[Did, ...]]:
    """What each rank does in each record that may issue collectives; ranks that do the same share it.

    Kernels and routes run on meta tensors, once for all ranks where neither shapes nor the rank's place make a difference. A record that
    fails issues nothing.
    """
    mesh, known = program.mesh, dict[Any, _Known]()
    moving = [(k, r) for k, r in enumerate(program.records) if isinstance(r, Redistribute) or (isinstance(r, RunOp) and r.kernel)]
    with torch.device("meta"), fake_grouped_mm():
        position = tuple(torch.zeros((), dtype=torch.int64) for _ in mesh.axes)
        columns = []
        for k, record in moving:
            by_rank = [_did(record, Rank(mesh, position, where), known) for where in mesh.coordinates()]
            numbered = {id(did): tuple(replace(one, records=(k,)) if isinstance(one, Issued) else one for one in did) for did in by_rank}
            columns.append([numbered[id(did)] for did in by_rank])
    return list(zip(*columns, strict=True)) if columns else [()] * mesh.num_devices


@dataclass
class _Known:
    """What records of one content did, by the coordinates on these axes, on which it depends."""

    axes: set[int]
    did: dict[tuple[int, ...], Did]


class _Place(tuple[int, ...]):
    """A coordinate that notes which of its axes are read."""

    read: set[int]

    def __getitem__(self, axis: Any) -> Any:
        self.read.add(axis)
        return super().__getitem__(axis)

    def __iter__(self) -> Iterator[int]:
        self.read.update(range(len(self)))
        return super().__iter__()


def _did(record: Redistribute | RunOp, rank: Rank, known: dict[Any, _Known]) -> Did:
    number = rank.number
    content: tuple = ()
    if isinstance(record, Redistribute):
        content = (record.steps, record.global_shape)
    else:
        content = (record.target, repr(record.kernel), repr(record.arguments_on(number)))
    key = (content, tuple((slot.layout, slot.shape_on(number), slot.dtype) for slot in record.inputs))
    of = known.setdefault(key, _Known(set(), {}))
    if (did := of.did.get(tuple(rank.place[axis] for axis in sorted(of.axes)))) is None:
        where = _Place(rank.place)
        where.read = set()
        inputs = [torch.empty(slot.shape_on(number), dtype=getattr(torch, slot.dtype)) for slot in record.inputs]
        did = _run(record, replace(rank, where=where), inputs)
        if not where.read <= of.axes:
            of.axes, of.did = of.axes | where.read, {}
        of.did[tuple(rank.place[axis] for axis in sorted(of.axes))] = did
    return did


def _run(record: Redistribute | RunOp, rank: Rank, inputs: list[Tensor]) -> Did:
    with _Recorder(rank.mesh) as recorder:
        try:
            drive(local_program(_on_meta(record), rank, inputs), recorder.answer)
        except (RuntimeError, ValueError, TypeError, IndexError):
            return ()
    return tuple(recorder.did)


def _on_meta(record: Redistribute | RunOp) -> Redistribute | RunOp:
    """With meta for the devices among its arguments."""
    if isinstance(record, Redistribute):
        return record
    arguments, by_rank = pytree.tree_map_only(torch.device, lambda _: torch.device("meta"), (record.arguments, record.by_rank))
    return replace(record, arguments=arguments, by_rank=by_rank)


class _Recorder(TorchDispatchMode):
    """Writes down which operators are called inside, and which collectives a generator asks for."""

    def __init__(self, mesh: Mesh):
        super().__init__()
        self.mesh, self.did = mesh, list[Issued | Operator]()
        self.makers: dict[int, tuple[int, Tensor]] = {}  # by id: the number of what has made the tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        outputs = [x for x in pytree.tree_leaves(result) if isinstance(x, Tensor)]
        inputs = tuple(self.makers.get(id(x), (-1,))[0] for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor))
        self._write(Operator(str(func), inputs, tuple((tuple(x.shape), x.stride()) for x in outputs)), outputs)
        return result

    def _write(self, one: Issued | Operator, outputs: Sequence[Tensor]) -> None:
        self.makers |= {id(x): (len(self.did), x) for x in outputs}
        self.did.append(one)

    def answer(self, call: CollectiveCall | DataDependent) -> Any:
        if isinstance(call, DataDependent):
            self._write(Issued((), call.name, tuple(call.axes), (), ""), ())
            return uncomputed(call, self.mesh)
        shape, dtype = tuple(call.tensor.shape), str(call.tensor.dtype).removeprefix("torch.")
        answer = uncomputed(call, self.mesh)
        reduce_op = call.reduce_op if "reduce" in call.collective else ""
        self._write(Issued((), call.collective, (call.axis,), shape, dtype, reduce_op), (answer,))
        return answer
