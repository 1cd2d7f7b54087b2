"""Kernels of attention with dropout: matmuls and softmax on every device, with a mask that is drawn as other random tensors are.

D [B, H, T, S] is sharded as q is (`lower.kernels.random`). torch's own kernels draw inside, from a state that depends on the shape of a
shard, so that no two meshes would drop the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from autoshard.capture import DROPOUT, DROPOUT_BACKWARD
from autoshard.lower.collectives import Rank
from autoshard.lower.kernels.attention import call_of, math_attention, math_attention_backward
from autoshard.lower.kernels.random import RandomKernel, Region, factors, region_of
from autoshard.lower.kernels.sharded_op import Arguments, Kernel, ShardedOp, wide

aten = torch.ops.aten


def attention(query, key, value, dropout_p, attn_mask=None, is_causal=False, scale=None, factors=None) -> tuple[Tensor, ...]:  # type: ignore[no-untyped-def]
    """out [B, H, T, E], logsumexp [B, H, T] and kept [B, H, T, S]. factors: D, drawn here where it is None."""
    if factors is None:
        keep = 1.0 - dropout_p
        factors = aten.bernoulli.p(query.new_empty((*query.shape[:-1], key.shape[-2])), keep) / keep
    call = replace(call_of(query, key, value, attn_mask, is_causal, scale), factors=wide(factors))
    return *math_attention(call), factors != 0


def attention_backward(grad_out, query, key, value, out, logsumexp, kept, dropout_p, attn_mask=None, is_causal=False, scale=None):  # type: ignore[no-untyped-def]
    """The gradients of query, key and value."""
    call = replace(call_of(query, key, value, attn_mask, is_causal, scale), factors=wide(kept.to(query.dtype) / (1.0 - dropout_p)))
    return math_attention_backward(call, grad_out, out, logsumexp)


@dataclass(frozen=True, eq=False)
class Attention(RandomKernel):
    """region: D, global, in the layout of q."""

    region: Region
    in_full: bool

    def drawn(self, rank: Rank, a: Arguments, first: int | None) -> tuple[Tensor, ...]:
        return attention(**a, factors=factors(a["query"], a["dropout_p"], self.region, rank, first))


def _attention(sharded: ShardedOp) -> Kernel:
    return Attention(*region_of(sharded, sharded.layout("query") or ()))


# the captured operators, where a user runs a captured graph
for _device in ("CPU", "CUDA"):
    torch.library.impl("autoshard::dropout_attention", _device, attention)
    torch.library.impl("autoshard::dropout_attention_backward", _device, attention_backward)
FUNCTIONS: dict[str, Callable[..., Any]] = {str(DROPOUT): attention, str(DROPOUT_BACKWARD): attention_backward}
KERNELS: dict[str, Callable[[ShardedOp], Kernel | None]] = {str(DROPOUT): _attention}
