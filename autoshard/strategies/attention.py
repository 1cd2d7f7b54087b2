"""Rows of scaled dot product attention: out[b, h, t] = softmax over s of (q[b, h, t] . k[b, h, s] + mask[b, h, t, s]) v[b, h, s].

batch b and heads h   every tensor is sharded (also with fewer key-value heads than query heads: equal shards of both go together)
queries t             q and out are S(2), k and v replicated; the backward returns partial gradients of k and v. Not if causal: which
                      keys a query attends to depends on its position in the full sequence
A mask is sharded where it has the dim, and replicated where it broadcasts.

Attention that is captured as matmuls and softmax needs no row here; for the fused kernels of other devices torch has rows.
"""

from __future__ import annotations

from autoshard.graph import Op, Tensor
from autoshard.layout import P, R, S
from autoshard.strategies.rows import Inputs, Row, argument, rule

FORWARD = "aten._scaled_dot_product_flash_attention_for_cpu.default"
BACKWARD = "aten._scaled_dot_product_flash_attention_for_cpu_backward.default"
BATCH, HEADS, QUERIES = range(3)


@rule(FORWARD, BACKWARD)
def attention(op: Op, inputs: Inputs) -> list[Row]:
    """q, k, v [, mask] -> out, logsumexp;  grad, q, k, v, out, logsumexp [, mask] -> gradients of q, k, v."""
    backward = op.target == BACKWARD
    core, masks = inputs[: 6 if backward else 3], inputs[6 if backward else 3 :]
    rows = []
    for d in (BATCH, HEADS):
        rows.append(Row(tuple(None if t is None else S(d) for t in op.outputs), (*[S(d)] * len(core), *(_mask(t, d) for t in masks))))
    if not argument(op, 7 if backward else 4, "is_causal", False):
        q, k = S(QUERIES), R
        of_masks = [_mask(t, QUERIES) for t in masks]
        rows.append(Row((q, P(), P()), (q, q, k, k, q, q, *of_masks)) if backward else Row((q, q), (q, k, k, *of_masks)))
    return rows


def _mask(mask: Tensor, dim: int) -> object:
    """The placement of a mask when dim `dim` of [b, h, t, s] is sharded; a mask with fewer dims lacks the first ones."""
    mask_dim = dim - (4 - len(mask.shape))
    return S(mask_dim) if mask_dim >= 0 and mask.shape[mask_dim] != 1 else R
