"""A tensor goes from the devices of one pipeline stage to those of another, each with a layout of its own.

Every receiver gets its shard in pieces: the parts of the global tensor in which its shard and a sender's overlap. Where several senders
hold a part, the receivers are dealt among them.

    pieces of rank r    bounds of its shard  x  bounds of the different shards of the senders, where they overlap
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from autoshard.layout import Layout, rank_bounds, rank_shape
from autoshard.lower import part_of
from autoshard.mesh import Mesh

Bounds = tuple[tuple[int, int], ...]  # begin and end of each dim


@dataclass(frozen=True)
class Held:
    """How a tensor is held by a stage: its layout on a mesh of these devices (ranks, in the order of the mesh's coordinates)."""

    layout: Layout
    mesh: Mesh
    devices: tuple[int, ...]

    def bounds(self, shape: tuple[int, ...]) -> dict[int, Bounds]:
        """Of each device's shard in the global tensor."""
        pairs = zip(self.devices, self.mesh.coordinates(), strict=True)
        return {device: tuple(rank_bounds(shape, self.layout, self.mesh, where)) for device, where in pairs}


@dataclass(frozen=True)
class SentBlock:
    """A part that one device sends to another, or keeps: its bounds in the local tensor of each."""

    sender: int
    receiver: int
    source: Bounds
    target: Bounds


@dataclass(frozen=True)
class StageTransfer:
    """The pieces of one tensor, in the order in which each pair of devices sends and receives them."""

    name: str
    dtype: torch.dtype
    pieces: tuple[SentBlock, ...]
    shapes: Mapping[int, tuple[int, ...]]  # of the local tensor, by receiver


def transfer(name: str, shape: tuple[int, ...], dtype: torch.dtype, source: Held, target: Held) -> StageTransfer:
    """How a tensor of this global shape gets from one stage to another; no layout may be Partial."""
    senders: dict[Bounds, list[int]] = {}
    for device, bounds in source.bounds(shape).items():
        senders.setdefault(bounds, []).append(device)
    pieces = []
    for k, (receiver, wanted) in enumerate(target.bounds(shape).items()):
        for held, devices in senders.items():
            common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(held, wanted))
            if all(begin < end for begin, end in common):
                sender = receiver if receiver in devices else devices[k % len(devices)]
                pieces.append(SentBlock(sender, receiver, within(common, held), within(common, wanted)))
    shapes = {d: rank_shape(shape, target.layout, target.mesh, c) for d, c in zip(target.devices, target.mesh.coordinates(), strict=True)}
    return StageTransfer(name, dtype, tuple(pieces), shapes)


def within(part: Bounds, shard: Bounds) -> Bounds:
    return tuple((begin - first, end - first) for (begin, end), (first, _) in zip(part, shard))


class Incoming:
    """The local tensors that a rank receives by some transfers: `ops` to be started, then `tensors()` when they have ended."""

    def __init__(self, transfers: Sequence[StageTransfer], rank: int, device: torch.device, group: dist.ProcessGroup | None):
        self.ops: list[dist.P2POp] = []
        self.values: dict[str, Tensor] = {}
        self.copies: list[tuple[Tensor, Tensor]] = []
        for one in transfers:
            if rank not in one.shapes:
                continue
            value = self.values[one.name] = torch.empty(one.shapes[rank], dtype=one.dtype, device=device)
            for piece in one.pieces:
                if piece.receiver == rank != piece.sender:
                    part = part_of(value, piece.target)
                    buffer = part if part.is_contiguous() else torch.empty_like(part, memory_format=torch.contiguous_format)
                    self.copies += [] if buffer is part else [(part, buffer)]
                    self.ops.append(dist.P2POp(dist.irecv, buffer, piece.sender, group))

    def tensors(self) -> dict[str, Tensor]:
        for part, buffer in self.copies:
            part.copy_(buffer)
        self.copies = []
        return self.values


def outgoing(
    transfers: Sequence[StageTransfer], rank: int, values: Mapping[str, Tensor], group: dist.ProcessGroup | None
) -> list[dist.P2POp]:
    sends = ((one.name, piece) for one in transfers for piece in one.pieces if piece.sender == rank != piece.receiver)
    return [dist.P2POp(dist.isend, part_of(values[name], p.source).contiguous(), p.receiver, group) for name, p in sends]


def exchange(
    transfers: Sequence[StageTransfer], rank: int, values: Mapping[str, Tensor], device: torch.device, group: dist.ProcessGroup | None
) -> dict[str, Tensor]:
    """Sends and receives all of them, and waits: the local tensors that this rank receives."""
    incoming = Incoming(transfers, rank, device, group)
    ops = outgoing(transfers, rank, values, group) + incoming.ops
    for work in dist.batch_isend_irecv(ops) if ops else []:
        work.wait()
    received = incoming.tensors()
    own = ((one.name, piece) for one in transfers for piece in one.pieces if piece.sender == rank == piece.receiver)
    for name, piece in own:
        part_of(received[name], piece.target).copy_(part_of(values[name], piece.source))
    return received


def simulated(one: StageTransfer, values: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """The local tensors of all receivers, of the senders' local tensors by device, in one process."""
    received = {device: torch.empty(shape, dtype=one.dtype) for device, shape in one.shapes.items()}
    for piece in one.pieces:
        part_of(received[piece.receiver], piece.target).copy_(part_of(values[piece.sender], piece.source))
    return received
