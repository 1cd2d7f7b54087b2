"""Kernels of attention with dropout: matmuls and softmax on every device, with the mask of the global tensor.

As in `lower.kernels.dropout` every rank draws D for the global [B, H, T, S] and keeps its shard, which is sharded as q is. torch's own
kernels draw inside, from a state that depends on the shape of a shard, so that no two meshes would drop the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from autoshard.capture.dropout_attention import DROPOUT, DROPOUT_BACKWARD
from autoshard.layout import Layout
from autoshard.lower.collectives import Rank
from autoshard.lower.kernels.attention import call_of, math_attention, math_attention_backward
from autoshard.lower.kernels.sharded_op import Arguments, Kernel, ShardedOp, local, wide
from autoshard.lower.sharding import shard_of_rank

aten = torch.ops.aten


def _drawn(query: Tensor, shape: tuple[int, ...], dropout_p: float) -> Tensor:
    """D: 0 where a probability is dropped, 1 / (1 - dropout_p) where it is kept."""
    keep = 1.0 - dropout_p
    return aten.bernoulli.p(query.new_empty(shape), keep) / keep


def attention(query, key, value, dropout_p, attn_mask=None, is_causal=False, scale=None, factors=None) -> tuple[Tensor, ...]:  # type: ignore[no-untyped-def]
    """out [B, H, T, E], logsumexp [B, H, T] and kept [B, H, T, S]. factors: D, drawn here where it is None."""
    if factors is None:
        factors = _drawn(query, (*query.shape[:-1], key.shape[-2]), dropout_p)
    call = replace(call_of(query, key, value, attn_mask, is_causal, scale), factors=wide(factors))
    return *math_attention(call), factors != 0


def attention_backward(grad_out, query, key, value, out, logsumexp, kept, dropout_p, attn_mask=None, is_causal=False, scale=None):  # type: ignore[no-untyped-def]
    """The gradients of query, key and value."""
    call = replace(call_of(query, key, value, attn_mask, is_causal, scale), factors=wide(kept.to(query.dtype) / (1.0 - dropout_p)))
    return math_attention_backward(call, grad_out, out, logsumexp)


@local
def sharded_attention(rank: Rank, a: Arguments, *, shape: tuple[int, ...], layout: Layout) -> tuple[Tensor, ...]:
    """shape: of D, global; layout: of q."""
    factors = _drawn(a["query"], shape, a["dropout_p"])
    return attention(**a, factors=shard_of_rank(factors, layout, rank.mesh, rank.place))


def _attention(sharded: ShardedOp) -> Kernel | None:
    layout = sharded.layout("query")
    if layout is None or not any(placement.is_shard() for placement in layout):
        return None
    return partial(sharded_attention, shape=(*sharded.shape("query")[:-1], sharded.shape("key")[-2]), layout=layout)


# the captured operators, where a user runs a captured graph
for _device in ("CPU", "CUDA"):
    torch.library.impl("autoshard::dropout_attention", _device, attention)
    torch.library.impl("autoshard::dropout_attention_backward", _device, attention_backward)
FUNCTIONS: dict[str, Callable[..., Any]] = {str(DROPOUT): attention, str(DROPOUT_BACKWARD): attention_backward}
KERNELS: dict[str, Callable[[ShardedOp], Kernel | None]] = {str(DROPOUT): _attention}
