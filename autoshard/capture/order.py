"""A tensor whose sequence is brought into head-tail order, or back to the natural one: `autoshard::reorder` (graph.order inserts it)."""

from __future__ import annotations

import torch
from torch import Tensor

torch.library.define("autoshard::reorder", "(Tensor x, int dim, int head_tail, bool back) -> Tensor")


def reorder(x: Tensor, dim: int, head_tail: int, back: bool) -> Tensor:
    """x with the tokens on `dim` in head-tail order of so many parts; back: from that order to the natural one."""
    if back:
        chunks = x.unflatten(dim, (head_tail, 2, -1))
        return torch.cat([chunks.select(dim + 1, 0), chunks.select(dim + 1, 1).flip(dim)], dim).flatten(dim, dim + 1)
    chunks = x.unflatten(dim, (2, head_tail, -1))
    return torch.stack([chunks.select(dim, 0), chunks.select(dim, 1).flip(dim)], dim + 1).flatten(dim, dim + 2)


torch.library.impl("autoshard::reorder", "CompositeImplicitAutograd", reorder)
REORDER = torch.ops.autoshard.reorder.default
