"""The steps of a route between block layouts, carried out: by all ranks in one process, or by one rank of many.

    shard_blocks(whole, layout, mesh)[r]     what rank r holds: its indices of every dim; on a Partial axis parts that reduce to the whole
    simulate(route, parts)                 the ranks in step, messages by hand; and the bytes that each rank sent
    BlockGroups.run(route, part)           one rank, over process groups of flattened sub-meshes

Data moves in packed messages (relayout/packing.py): a permute by send and receive, all else by all_to_all_single with the
lengths as split sizes; a reduce_scatter sends summands and adds them up here, so that gloo, which has none, moves no more than
others; an all_reduce is the backend's own. With `dtensor=True` the steps that a route marks so are left to DTensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, product

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from autoshard.lower.sharding import reduce_tensors
from autoshard.relayout import BlockLayout, BlockRoute, BlockStep, Packing, group_of, local_indices, packing, to_placements

REDUCE = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


def shard_blocks(whole: Tensor, layout: BlockLayout, mesh: tuple[int, ...]) -> list[Tensor]:
    """Every rank's part, in the order of ranks. Partial sums: the first rank of an axis holds the part, the others zeros."""
    parts = []
    for coordinate in product(*map(range, mesh)):
        part = whole
        for dim, some in enumerate(local_indices(tuple(whole.shape), layout, mesh, coordinate)):
            part = part.index_select(dim, torch.as_tensor(some))
        summand = layout.reduce_op == "sum" and any(coordinate[a] for a in layout.partial)
        parts.append(torch.zeros_like(part) if summand else part.clone())
    return parts


# -- all ranks in one process ------------------------------------------------------------------------------------------------------


def simulate(route: BlockRoute, parts: Sequence[Tensor]) -> tuple[list[Tensor], list[list[int]]]:
    """The parts at the end, and per step the bytes that each rank sent (an all_reduce's are those of a ring)."""
    held, sent = list(parts), []
    for step in route.steps:
        packings = [packing(route.problem.shape, route.problem.mesh, step, rank) for rank in range(len(held))]
        sent.append([_bytes(step, p, x) for p, x in zip(packings, held, strict=True)])
        held = [_simulated(step, packings, rank, held) for rank in range(len(held))]
    return held, sent


def _simulated(step: BlockStep, packings: Sequence[Packing], rank: int, held: Sequence[Tensor]) -> Tensor:
    own = packings[rank]
    if step.collective == "all_reduce":
        return reduce_tensors([held[member] for member in own.group], step.before.reduce_op)
    me = own.group.index(rank)
    inbox = [pack(packings[member], held[member])[me] for member in own.group]
    return unpack(step, own, held[rank], inbox)


def _bytes(step: BlockStep, p: Packing, x: Tensor) -> int:
    n = len(p.group)
    if step.collective == "all_reduce":
        return 2 * -(-x.numel() * (n - 1) // n) * x.element_size()
    own = p.kept[0].size if step.collective == "reduce_scatter" else 0  # its own summand goes nowhere
    return (p.elements_sent - own) * x.element_size()


def pack(p: Packing, x: Tensor) -> list[Tensor]:
    """What goes to each member of the group."""
    flat = x.reshape(-1)
    return [flat[torch.as_tensor(some, device=x.device)] for some in p.sends]


def unpack(step: BlockStep, p: Packing, x: Tensor, inbox: Sequence[Tensor]) -> Tensor:
    """The part afterwards, from what came and what was kept."""
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
    """This rank's process groups, one per set of mesh axes, and what it has sent so far."""

    mesh: tuple[int, ...]
    rank: int
    groups: dict[tuple[int, ...], dist.ProcessGroup]
    device_mesh: DeviceMesh | None
    sent: list[int]  # bytes per step

    @staticmethod
    def of(mesh: tuple[int, ...], device_mesh: DeviceMesh | None = None) -> BlockGroups:
        """The groups of every set of axes, made by all ranks together. device_mesh: for the steps left to DTensor."""
        rank, groups = dist.get_rank(), {}
        for k in range(1, len(mesh) + 1):
            for axes in combinations(range(len(mesh)), k):
                for members in dict.fromkeys(group_of(r, axes, mesh) for r in range(dist.get_world_size())):
                    group = dist.new_group(list(members))
                    if rank in members:
                        groups[members] = group
        return BlockGroups(mesh, rank, groups, device_mesh, [])

    def run(self, route: BlockRoute, part: Tensor, *, dtensor: bool = False) -> Tensor:
        """The steps of a route on this rank's part."""
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
        came = x.new_empty(sum(sizes))
        lengths = [len(message) for message in outbox]
        dist.all_to_all_single(came, torch.cat(outbox), sizes, lengths, group=self.groups[p.group])
        return unpack(step, p, x, came.split(sizes))

    def _swap(self, p: Packing, outbox: Sequence[Tensor], inbox: list[Tensor]) -> list[Tensor]:
        ops = [dist.P2POp(dist.isend, message, peer) for peer, message in zip(p.group, outbox) if len(message)]
        ops += [dist.P2POp(dist.irecv, message, peer) for peer, message in zip(p.group, inbox) if len(message)]
        for work in dist.batch_isend_irecv(ops) if ops else ():
            work.wait()
        return inbox


def by_dtensor(route: BlockRoute, step: BlockStep, part: Tensor, device_mesh: DeviceMesh) -> Tensor:
    """One step that DTensor can do by itself."""
    from torch.distributed.tensor import DTensor  # here: it takes seconds to import, which other runs need not pay

    before, after = (to_placements(layout, device_mesh.ndim) for layout in (step.before, step.after))
    shape = torch.Size(route.problem.shape)
    stride = torch.empty(shape, device="meta").stride()
    held = DTensor.from_local(part, device_mesh, before, run_check=False, shape=shape, stride=stride)
    return held.redistribute(device_mesh, after).to_local()
