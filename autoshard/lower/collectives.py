"""Collectives that a rank's local program asks for, and two ways to carry them out.

A local program is a generator: it computes on local tensors, yields a `CollectiveCall`, receives the answer and goes on. For a call along
an axis with n ranks, x_i is the input of rank i of the group. Shards are stacked on a new first dim, so that no collective has to know
which dim of the tensor is sharded:

    all_reduce       y   = op over i of x_i
    all_gather       y   = stack of all x_i                          (n, ...)
    reduce_scatter   y_i = op over j of x_j[i]                       x_j: (n, ...)
    all_to_all       y_i = stack over j of x_j[i]                    x_j: (n, ...)
                     with `splits`, x_j[i] are rows of x_j, as many as j tells, and y_i is their concatenation
    permute          y_i = x of the rank before i, of the last one for the first

Where n does not divide a dim of m indices, shards are padded to ceil(m / n) before the collective, so that all ranks of a group send
and receive the same shapes, and the padding is removed after it (`run_step`).

`exchange` answers all ranks of a group at once (all ranks in one process), `Groups.answer` one rank through its process group.
Both run the same generators, so what is checked in one process is what runs on many.
"""

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Shard

from autoshard.layout import chunk_bounds, is_even, rank_shape
from autoshard.lower.sharding import reduce_tensors
from autoshard.mesh import Mesh
from autoshard.routes import Step
from autoshard.torch_private import c10d_functional


@dataclass(frozen=True, eq=False)
class CollectiveCall:
    """One collective over the ranks of a mesh axis; the answer is a tensor."""

    collective: str
    axis: int
    tensor: Tensor
    reduce_op: str = "sum"
    place: int = 0  # of a permute: this rank's coordinate on the axis
    splits: tuple[list[int], list[int]] | None = None  # of an uneven all_to_all: how many rows go to, and come from, each rank


@dataclass(frozen=True, eq=False)
class DataDependent:
    """A program whose sizes depend on data, as one call of a kernel; the answer is its result.

    Ranks in one process run its `program`. A rank of many runs it as one `operator`, of the names of the process groups of the mesh axes,
    since no size in a traced graph depends on data.
    """

    name: str
    axes: Sequence[int]  # mesh axes along which it communicates
    program: "Callable[[Rank], RankGenerator]"
    operator: Callable[[Sequence[str]], Any]


RankGenerator = Generator[Any, Any, Any]  # yields CollectiveCalls and DataDependents, and returns local tensors
Shape = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Rank:
    """A rank's coordinate on the mesh: a 0-d integer tensor per axis, so that one traced program serves every rank.

    where: the same as numbers; needed where shards are uneven, as their sizes then differ from rank to rank.
    """

    mesh: Mesh
    coordinate: tuple[Tensor, ...]
    where: tuple[int, ...] | None = None

    def shard_index(self, axes: Sequence[int]) -> Tensor:
        """The number of this rank's shard of a dim that is sharded on `axes`, left to right."""
        index = torch.zeros_like(self.coordinate[0])
        for axis in axes:
            index = index * self.mesh.shape[axis] + self.coordinate[axis]
        return index

    def is_first(self, axes: Sequence[int]) -> Tensor:
        return self.shard_index(axes) == 0

    def start(self, axes: Sequence[int], size: int) -> Tensor:
        """Where this rank's shard of a dim of `size` begins that is sharded on `axes`."""
        sizes = [self.mesh.shape[axis] for axis in axes]
        if size % math.prod(sizes) == 0:
            return self.shard_index(axes) * (size // math.prod(sizes))
        lo, hi = torch.zeros_like(self.coordinate[0]), torch.full_like(self.coordinate[0], size)
        for axis, n in zip(axes, sizes, strict=True):
            q = (hi - lo + n - 1) // n
            lo = torch.minimum(hi, lo + self.coordinate[axis] * q)
            hi = torch.minimum(hi, lo + q)
        return lo

    def length(self, axes: Sequence[int], size: int) -> int:
        """How many indices of a dim of `size` this rank has when the dim is sharded on `axes`."""
        sizes = tuple(self.mesh.shape[axis] for axis in axes)
        if size % math.prod(sizes) == 0:
            return size // math.prod(sizes)
        k, bounds = row_major([self.place[axis] for axis in axes], sizes), chunk_bounds(size, sizes)
        return bounds[k + 1] - bounds[k]

    @property
    def number(self) -> int:
        """Its number on the mesh, row-major."""
        return row_major(self.place, self.mesh.shape)

    @property
    def place(self) -> tuple[int, ...]:
        """`where`; ValueError when it isn't known."""
        if self.where is None:
            raise ValueError("programs or sizes of shards differ from rank to rank here: it runs only where a rank knows its number")
        return self.where


def row_major(coordinate: Sequence[int], sizes: Sequence[int]) -> int:
    """The number of a coordinate, of which the last part counts fastest."""
    number = 0
    for c, n in zip(coordinate, sizes, strict=True):
        number = number * n + c
    return number


def all_reduce(x: Tensor, axes: Sequence[int], reduce_op: str = "sum") -> RankGenerator:
    for axis in axes:
        x = yield CollectiveCall("all_reduce", axis, x, reduce_op)
    return x


def run_step(step: Step, rank: Rank, x: Tensor, shape: Shape | None = None) -> RankGenerator:
    """One step of a route on the local tensor. shape: the global shape; without it all shards have one size."""
    if shape is None or (is_even(shape, step.before, rank.mesh) and is_even(shape, step.after, rank.mesh)):
        return (yield from _run_even_step(step, rank, x))
    before, after = (rank_shape(shape, layout, rank.mesh, rank.place) for layout in (step.before, step.after))
    n, old, new = rank.mesh.shape[step.axis], step.before[step.axis], step.after[step.axis]
    if isinstance(old, Shard):  # the shards of the group have after[dim] indices together
        x = _padded(x, old.dim, -(-after[old.dim] // n))
    if isinstance(new, Shard):
        x = _padded(x, new.dim, -(-before[new.dim] // n) * n)
    x = yield from _run_even_step(step, rank, x)
    for dim in sorted({p.dim for p in (old, new) if isinstance(p, Shard)}):
        x = x.narrow(dim, 0, after[dim])
    return x.clone(memory_format=torch.contiguous_format)


def _padded(x: Tensor, dim: int, size: int) -> Tensor:
    """x with zeros appended on `dim`, up to `size`. Ranks that have none to append, or above none to cut off, run the same kernels, so that
    the graphs of all ranks are alike; `fx_program.without_idle` takes them out."""
    return F.pad(x.contiguous(), (0, 0) * (x.ndim - 1 - dim) + (0, size - x.shape[dim]))


def _run_even_step(step: Step, rank: Rank, x: Tensor) -> RankGenerator:
    n, axis = rank.mesh.shape[step.axis], step.axis
    before, after = step.before[axis], step.after[axis]
    if n == 1:
        return x
    if step.collective == "split":
        shards = _split(x, after.dim, n)
        return shards.index_select(0, rank.coordinate[axis].reshape(1)).squeeze(0)
    if step.collective == "all_gather":
        return _joined((yield CollectiveCall("all_gather", axis, x)), before.dim)
    if step.collective == "all_to_all":
        return _joined((yield CollectiveCall("all_to_all", axis, _split(x, after.dim, n))), before.dim)
    if step.collective == "all_reduce":
        return (yield CollectiveCall("all_reduce", axis, x, before.reduce_op))
    if step.collective == "reduce_scatter":
        return (yield CollectiveCall("reduce_scatter", axis, _split(x, after.dim, n), before.reduce_op)).contiguous()
    raise ValueError(f"a route has the step {step.collective!r}; expected split, all_gather, all_to_all, all_reduce or reduce_scatter")


def _split(x: Tensor, dim: int, n: int) -> Tensor:
    """(..., n s, ...) -> (n, ..., s, ...)"""
    return x.unflatten(dim, (n, x.shape[dim] // n)).movedim(dim, 0)


def _joined(shards: Tensor, dim: int) -> Tensor:
    """(n, ..., s, ...) -> (..., n s, ...)"""
    return shards.movedim(0, dim).flatten(dim, dim + 1).contiguous()  # flatten alone may return a view whose strides are not dense


def uncomputed(call: CollectiveCall | DataDependent, mesh: Mesh) -> Any:
    """An answer of the right shape, of uninitialised numbers."""
    if isinstance(call, DataDependent):
        return call.operator([""] * len(mesh.axes))
    shape = tuple(call.tensor.shape)
    shape = {"all_gather": (mesh.shape[call.axis], *shape), "reduce_scatter": shape[1:]}.get(call.collective, shape)
    return call.tensor.new_empty(shape)


def check_step(step: Step) -> None:
    """ValueError unless the step is one collective: it changes the layout of its own axis only, as its collective does, and no axis
    further right shards the same dim."""
    before, after = step.before[step.axis], step.after[step.axis]
    kinds = (type(before).__name__, type(after).__name__)
    others = [k for k in range(len(step.before)) if k != step.axis and step.before[k] != step.after[k]]
    dims = {p.dim for p in (before, after) if isinstance(p, Shard)}
    minor = [p for p in step.before[step.axis + 1 :] if isinstance(p, Shard) and p.dim in dims]
    if kinds != CHANGES.get(step.collective) or others or minor:
        raise ValueError(f"route step {step.collective} on axis {step.axis} from {step.before} to {step.after} is not one collective")


CHANGES = {
    "split": ("Replicate", "Shard"),
    "all_gather": ("Shard", "Replicate"),
    "all_to_all": ("Shard", "Shard"),
    "all_reduce": ("Partial", "Replicate"),
    "reduce_scatter": ("Partial", "Shard"),
}


def exchange(calls: Sequence[CollectiveCall]) -> list[Tensor]:
    """The answers to one group's calls, in the order of its ranks. An answer that is the same for all is one shared tensor."""
    first = calls[0]
    if first.splits is not None:
        return _exchange_rows(calls)
    kinds = {(a.collective, a.axis, a.reduce_op, tuple(a.tensor.shape)) for a in calls}
    if len(kinds) > 1:
        raise ValueError(f"ranks of one group ask for different collectives: {sorted(kinds)}")
    tensors = [call.tensor for call in calls]
    match first.collective:
        case "all_reduce":
            return [reduce_tensors(tensors, first.reduce_op)] * len(tensors)
        case "all_gather":
            return [torch.stack(tensors)] * len(tensors)
        case "reduce_scatter":
            return [reduce_tensors([x[i] for x in tensors], first.reduce_op) for i in range(len(tensors))]
        case "permute":
            return [tensors[i - 1] for i in range(len(tensors))]
    assert first.collective == "all_to_all", first.collective
    return [torch.stack([x[i] for x in tensors]) for i in range(len(tensors))]


def _exchange_rows(calls: Sequence[CollectiveCall]) -> list[Tensor]:
    """Each rank's rows from all others. ValueError where a rank expects other numbers of rows than are sent to it."""
    parts = [call.tensor.split(call.splits[0]) for call in calls]  # type: ignore[index]
    received = [[part[i] for part in parts] for i in range(len(calls))]
    for call, rows in zip(calls, received, strict=True):
        if [len(part) for part in rows] != call.splits[1]:  # type: ignore[index]
            raise ValueError(f"a rank expects {call.splits[1]} rows of the others, which send {[len(part) for part in rows]}")  # type: ignore
    return [torch.cat(rows) for rows in received]


def unfolded(program: RankGenerator, rank: Rank) -> RankGenerator:
    """A rank's generator that runs data-dependent programs itself, for ranks in one process."""
    answer = None
    while True:
        try:
            call = program.send(answer)
        except StopIteration as done:
            return done.value
        answer = (yield from call.program(rank)) if isinstance(call, DataDependent) else (yield call)


@dataclass(frozen=True)
class Groups:
    """The process groups of this rank, one per mesh axis, by name."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    background: Mapping[str, int] = field(default_factory=dict)  # second groups, by name: the axis

    def axis(self, name: str) -> int:
        """The mesh axis of a group of this name."""
        return self.background[name] if name in self.background else self.names.index(name)

    @staticmethod
    def of(device_mesh: DeviceMesh) -> "Groups":
        return Groups(tuple(device_mesh.get_group(k).group_name for k in range(device_mesh.ndim)), tuple(device_mesh.shape))

    def answer(self, call: CollectiveCall | DataDependent) -> Any:
        """The result of the functional collective. Complex numbers are sent as pairs of real ones, which every backend can send and add."""
        if isinstance(call, DataDependent):
            return call.operator(self.names)
        if call.tensor.is_complex():
            pairs = self.answer(replace(call, tensor=torch.view_as_real(call.tensor.contiguous())))
            return torch.view_as_complex(pairs.contiguous())
        functional, name, n = c10d_functional, self.names[call.axis], self.sizes[call.axis]
        x = call.tensor.contiguous()
        mean = call.reduce_op == "avg"  # gloo has no avg
        reduce_op = "sum" if mean else call.reduce_op
        if call.splits is not None:
            sent, received = call.splits
            return functional.wait_tensor(functional.all_to_all_single(x, received, sent, name))
        match call.collective:
            case "all_reduce":
                y = functional.all_reduce(x, reduce_op, name)
            case "all_gather":
                y = functional.all_gather_into_tensor(x.unsqueeze(0), n, name)
            case "reduce_scatter":
                y = functional.reduce_scatter_tensor(x, reduce_op, n, name)
            case "permute":
                sends, receives = ([int(k == (call.place + by) % n) for k in range(n)] for by in (1, -1))
                y = functional.all_to_all_single(x.unsqueeze(0), receives, sends, name)
            case _:
                y = functional.all_to_all_single(x, [1] * n, [1] * n, name)
        y = functional.wait_tensor(y)
        y = y.squeeze(0) if call.collective in ("reduce_scatter", "permute") else y
        return y / n if mean else y

    def drive(self, program: RankGenerator) -> Tensor:
        """Run one rank's generator to its end."""
        return drive(program, self.answer)


def drive(program: RankGenerator, answer_of: Callable[[Any], Any]) -> Any:
    """Run a generator to its end; each collective that it asks for has what the function says as its answer."""
    answer = None
    while True:
        try:
            call = program.send(answer)
        except StopIteration as done:
            return done.value
        answer = answer_of(call)
