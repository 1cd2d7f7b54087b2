"""Dropout whose mask is that of the whole tensor: every rank draws all of it and keeps its part.

    m = bernoulli(1 - p) / (1 - p), drawn for the whole shape        y = x * (this rank's part of m)

With the generator in the same state everywhere, replicas drop the same elements, parts different ones, and any mesh the same as
one process. The whole mask exists while it is drawn.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from autoshard.layout import Layout, rank_bounds
from autoshard.lower.collectives import Rank
from autoshard.lower.laid import Arguments, Kernel, Laid, local

aten = torch.ops.aten


@local
def native_dropout(rank: Rank, a: Arguments, *, shape: tuple[int, ...], layout: Layout) -> tuple[Tensor, Tensor]:
    x, keep = a["input"], 1.0 - a["p"]
    mask = aten.bernoulli.p(x.new_empty(shape), keep) / keep
    for dim, (begin, end) in enumerate(rank_bounds(shape, layout, rank.mesh, rank.place)):
        mask = mask.narrow(dim, begin, end - begin) if end - begin != shape[dim] else mask
    return x * mask, mask != 0


def _native_dropout(laid: Laid) -> Kernel | None:
    layout, shape, p = laid.layout("input"), laid.shape("input"), laid.arguments["p"]
    trains = laid.arguments["train"] in (True, None) and 0 < p < 1
    cut = layout is not None and any(placement.is_shard() for placement in layout)
    return partial(native_dropout, shape=shape, layout=layout) if trains and cut else None


KERNELS = {"aten.native_dropout.default": _native_dropout}
