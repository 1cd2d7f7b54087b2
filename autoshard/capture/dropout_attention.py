"""Attention that drops probabilities, as one operator on every device: `autoshard::dropout_attention`, and its backward.

    out[b, h, t] = sum_s P[t, s] D[b, h, t, s] v[b, g, s]        D = kept / (1 - dropout_p), each kept with probability 1 - dropout_p

P, q, k, v, logsumexp and the options are those of `capture.attention`. kept [B, H, T, S] is a result, since the backward reads it; the
probabilities are not kept. `lower.kernels.dropout_attention` has the kernels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

TENSORS = "Tensor query, Tensor key, Tensor value"
OPTIONS = "float dropout_p, Tensor? attn_mask=None, bool is_causal=False, float? scale=None"
torch.library.define(
    "autoshard::dropout_attention",
    f"({TENSORS}, {OPTIONS}) -> (Tensor output, Tensor logsumexp, Tensor kept)",
    tags=torch.Tag.nondeterministic_seeded,
)
torch.library.define(
    "autoshard::dropout_attention_backward",
    f"(Tensor grad_out, {TENSORS}, Tensor out, Tensor logsumexp, Tensor kept, {OPTIONS}) "
    "-> (Tensor grad_query, Tensor grad_key, Tensor grad_value)",
)
DROPOUT, DROPOUT_BACKWARD = torch.ops.autoshard.dropout_attention.default, torch.ops.autoshard.dropout_attention_backward.default


def heads_inside(x: Tensor, width: int) -> Tensor:
    """An empty tensor of x's shape but for its last dim, whose heads are next to their features in memory, as kernels leave them."""
    b, h, t, _ = x.shape
    return x.new_empty((b, t, h, width)).transpose(1, 2)


@torch.library.register_fake("autoshard::dropout_attention")
def _(query, key, value, dropout_p, attn_mask=None, is_causal=False, scale=None):  # type: ignore[no-untyped-def]
    rows = query.shape[:-1]
    exact = torch.float64 if query.dtype == torch.float64 else torch.float32
    kept = query.new_empty((*rows, key.shape[-2]), dtype=torch.bool)
    return heads_inside(query, value.shape[-1]), query.new_empty(rows, dtype=exact), kept


@torch.library.register_fake("autoshard::dropout_attention_backward")
def _(grad_out, query, key, value, *rest, **options):  # type: ignore[no-untyped-def]
    return tuple(heads_inside(x, x.shape[-1]) for x in (query, key, value))


def _save(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor, Tensor]) -> None:
    query, key, value, ctx.dropout_p, attn_mask, ctx.is_causal, ctx.scale = inputs
    ctx.save_for_backward(query, key, value, attn_mask, *output)
    ctx.mark_non_differentiable(*output[1:])


def _differentiate(ctx: Any, grad_out: Tensor, *_: Any) -> tuple:
    query, key, value, attn_mask, out, logsumexp, kept = ctx.saved_tensors
    options = (ctx.dropout_p, attn_mask, ctx.is_causal, ctx.scale)
    return *DROPOUT_BACKWARD(grad_out, query, key, value, out, logsumexp, kept, *options), None, None, None, None


torch.library.register_autograd("autoshard::dropout_attention", _differentiate, setup_context=_save)
