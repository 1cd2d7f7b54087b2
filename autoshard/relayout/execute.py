"""The execution of a route between block layouts: all ranks simulated in one process, or one rank of a process group.

    shard_blocks(tensor, layout, mesh)[r]  the shard of rank r; on a Partial axis the shards reduce to the values of the tensor
    simulate(route, parts)                 all ranks, step by step in this process; also the bytes that each rank sends
    BlockGroups.run(route, part)           this rank, over process groups of flattened sub-meshes

The messages are those of relayout/packing.py. A permute uses send and receive, an all_reduce the backend's all_reduce, and every other
step all_to_all_single with the lengths as split sizes. A reduce_scatter sends the summands and reduces them locally, so that gloo,
which has no reduce_scatter, sends the same bytes as other backends. With `dtensor=True` DTensor executes the steps that a route marks
as executable by it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, product

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from autoshard.lower import reduce_tensors
from autoshard.relayout import BlockLayout, BlockRoute, BlockStep, packing, to_placements
from autoshard.relayout.blocks import local_indices
from autoshard.relayout.packing import Packing, group_of

REDUCE = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


def shard_blocks(tensor: Tensor, layout: BlockLayout, mesh: tuple[int, ...]) -> list[Tensor]:
    """Every rank's shard, in the order of ranks. Partial sums: the first rank of an axis holds the values, the others zeros."""
    parts = []
    for coordinate in product(*map(range, mesh)):
        part = tensor
        for dim, some in enumerate(local_indices(tuple(tensor.shape), layout, mesh, coordinate)):
            part = part.index_select(dim, torch.as_tensor(some))
        is_zero = layout.reduce_op == "sum" and any(coordinate[a] for a in layout.partial)
        parts.append(torch.zeros_like(part) if is_zero else part.clone())
    return parts


# -- all ranks in one process ------------------------------------------------------------------------------------------------------


def simulate(route: BlockRoute, parts: Sequence[Tensor]) -> tuple[list[Tensor], list[list[int]]]:
    """The shards after the route, and per step the bytes that each rank sent (an all_reduce counts those of a ring)."""
    held, sent = list(parts), []
    for step in route.steps:
        packings = [packing(route.problem.shape, route.problem.mesh, step, rank) for rank in range(len(held))]
        sent.append([_bytes(step, p, x) for p, x in zip(packings, held, strict=True)])
        held = [_simulated(step, packings, rank, held) for rank in range(len(held))]
    return held, sent


def _simulated(step: BlockStep, packings: Sequence[Packing], rank: int, held: Sequence[Tensor]) -> Tensor:
    p = packings[rank]
    if step.collective == "all_reduce":
        return reduce_tensors([held[member] for member in p.group], step.before.reduce_op)
    inbox = [pack(packings[member], held[member])[p.group.index(rank)] for member in p.group]
    return unpack(step, p, held[rank], inbox)


def _bytes(step: BlockStep, p: Packing, x: Tensor) -> int:
    n = len(p.group)
    if step.collective == "all_reduce":
        return 2 * -(-x.numel() * (n - 1) // n) * x.element_size()
    to_itself = p.kept[0].size if step.collective == "reduce_scatter" else 0
    return (p.elements_sent - to_itself) * x.element_size()


def pack(p: Packing, x: Tensor) -> list[Tensor]:
    """The messages to the members of the group."""
    flat = x.reshape(-1)
    return [flat[torch.as_tensor(some, device=x.device)] for some in p.sends]


def unpack(step: BlockStep, p: Packing, x: Tensor, inbox: Sequence[Tensor]) -> Tensor:
    """The output shard, from the received messages and the elements of the input shard x that the rank keeps."""
    if step.collective == "reduce_scatter":
        return reduce_tensors(list(inbox), step.before.reduce_op).reshape(p.shape)
    out = x.new_empty(p.shape)
    flat = out.view(-1)
    flat[torch.as_tensor(p.kept[1], device=x.device)] = x.reshape(-1)[torch.as_tensor(p.kept[0], device=x.device)]
    for some, message in zip(p.gets, inbox, strict=True):
        flat[torch.as_tensor(some, device=x.device)] = message
    return out


# -- one rank of many --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BlockGroups:
    """This rank's process groups, one per set of mesh axes, and the bytes that it has sent so far."""

    mesh: tuple[int, ...]
    rank: int
    groups: dict[tuple[int, ...], dist.ProcessGroup]
    device_mesh: DeviceMesh | None
    sent: list[int]  # bytes per step

    @staticmethod
    def of(mesh: tuple[int, ...], device_mesh: DeviceMesh | None = None) -> BlockGroups:
        """The groups of every set of axes; a collective call of all ranks. device_mesh: for the steps that DTensor executes."""
        rank, groups = dist.get_rank(), {}
        for k in range(1, len(mesh) + 1):
            for axes in combinations(range(len(mesh)), k):
                for members in dict.fromkeys(group_of(r, axes, mesh) for r in range(dist.get_world_size())):
                    group = dist.new_group(list(members))
                    if rank in members:
                        groups[members] = group
        return BlockGroups(mesh, rank, groups, device_mesh, [])

    def run(self, route: BlockRoute, part: Tensor, *, dtensor: bool = False) -> Tensor:
        """This rank's shard after the route. part: its shard before; dtensor: DTensor executes the steps that are marked for it."""
        for step in route.steps:
            if dtensor and self.device_mesh is not None and step.executable_by == "dtensor":
                part = by_dtensor(route, step, part, self.device_mesh)
                continue
            p = packing(route.problem.shape, self.mesh, step, self.rank)
            self.sent.append(_bytes(step, p, part))
            part = self._step(step, p, part)
        return part

    def _step(self, step: BlockStep, p: Packing, x: Tensor) -> Tensor:
        if step.collective == "all_reduce":
            y = x.clone()
            dist.all_reduce(y, REDUCE[step.before.reduce_op], self.groups[p.group])
            return y / len(p.group) if step.before.reduce_op == "avg" else y
        if step.collective == "split":
            return unpack(step, p, x, [x.new_empty(some.size) for some in p.gets])
        outbox = pack(p, x)
        sizes = [some.size for some in p.gets]
        if step.collective == "permute":
            return unpack(step, p, x, self._swap(p, outbox, [x.new_empty(n) for n in sizes]))
        received = x.new_empty(sum(sizes))
        lengths = [len(message) for message in outbox]
        dist.all_to_all_single(received, torch.cat(outbox), sizes, lengths, group=self.groups[p.group])
        return unpack(step, p, x, received.split(sizes))

    def _swap(self, p: Packing, outbox: Sequence[Tensor], inbox: list[Tensor]) -> list[Tensor]:
        ops = [dist.P2POp(dist.isend, message, peer) for peer, message in zip(p.group, outbox) if len(message)]
        ops += [dist.P2POp(dist.irecv, message, peer) for peer, message in zip(p.group, inbox) if len(message)]
        for work in dist.batch_isend_irecv(ops) if ops else ():
            work.wait()
        return inbox


def by_dtensor(route: BlockRoute, step: BlockStep, part: Tensor, device_mesh: DeviceMesh) -> Tensor:
    """One step, executed by DTensor."""
    from torch.distributed.tensor import DTensor  # here: the import takes seconds that other runs do not need

    before, after = (to_placements(layout, device_mesh.ndim) for layout in (step.before, step.after))
    shape = torch.Size(route.problem.shape)
    stride = torch.empty(shape, device="meta").stride()
    held = DTensor.from_local(part, device_mesh, before, run_check=False, shape=shape, stride=stride)
    return held.redistribute(device_mesh, after).to_local()
