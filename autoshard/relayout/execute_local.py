"""A route in LocalTensorMode: one process, torch's own collectives on LocalTensors that hold every rank's part.

The packed messages are those of moves.py; split sizes that differ from rank to rank are LocalIntNodes. It needs a process group of
the world's size, for example a fake one. A permute's send and receive become an all_to_all: LocalTensorMode knows no peers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._local_tensor import LocalIntNode, LocalTensor, LocalTensorMode, rank_map

from autoshard.relayout import BlockRoute, BlockStep, Packing, packing
from autoshard.relayout.execute import pack, unpack


def run_local(route: BlockRoute, parts: Sequence[Tensor]) -> list[Tensor]:
    """Every rank's part at the end of a route."""
    mesh = route.problem.mesh
    groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
    held = list(parts)
    with LocalTensorMode(math.prod(mesh)):
        for step in route.steps:
            packings = [packing(route.problem.shape, mesh, step, rank) for rank in range(len(held))]
            members = packings[0].group  # torch finds the other ranks' groups from the first one's
            if members not in groups:
                groups[members] = dist.new_group(list(members))
            held = _step(step, packings, held, groups[members])
    return held


def _step(step: BlockStep, packings: Sequence[Packing], held: Sequence[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    n = len(packings[0].group)
    if step.collective == "all_reduce":
        y = rank_map(lambda r: held[r].clone())
        op = "sum" if step.before.reduce_op == "avg" else step.before.reduce_op
        y = torch.ops._c10d_functional.all_reduce(y, op, group.group_name)
        found = _parts(torch.ops._c10d_functional.wait_tensor(y))
        return [x / n for x in found] if step.before.reduce_op == "avg" else found
    came = [held[r].new_empty(0) for r in range(len(held))]
    if n > 1 and step.collective != "split":
        outbox = [pack(p, x) for p, x in zip(packings, held, strict=True)]
        y = rank_map(lambda r: torch.cat(outbox[r]))
        given = [_sizes([len(outbox[r][i]) for r in range(len(held))]) for i in range(n)]
        taken = [_sizes([p.gets[i].size for p in packings]) for i in range(n)]
        y = torch.ops._c10d_functional.all_to_all_single(y, taken, given, group.group_name)
        came = _parts(torch.ops._c10d_functional.wait_tensor(y))
    return [unpack(step, p, x, came[r].split([some.size for some in p.gets])) for r, (p, x) in enumerate(zip(packings, held, strict=True))]


def _parts(y: Tensor) -> list[Tensor]:
    assert isinstance(y, LocalTensor)
    return [y._local_tensors[r] for r in sorted(y._local_tensors)]


def _sizes(sizes: list[int]) -> int | torch.SymInt:
    return sizes[0] if len(set(sizes)) == 1 else torch.SymInt(LocalIntNode(dict(enumerate(sizes))))
