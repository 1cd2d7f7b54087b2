"""Rows of scaled dot product attention: out[b, h, t] = softmax over s of (q[b, h, t] . k[b, h, s] + mask[b, h, t, s]) v[b, h, s].

batch b and heads h   cut in every tensor (fewer key-value heads than query heads too: equal parts of both stay together)
queries t             out S(2), k and v whole; backward gives parts of the gradients of k and v. Not when causal: which keys a
                      query may see follows from its place in the whole sequence
A mask is cut where it has the dim, and whole where it broadcasts.

Attention that is captured as matmuls and softmax needs no row here; the fused kernels of other devices have torch's.
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
    """dim counts in [b, h, t, s]; a mask of fewer dims lacks the first ones."""
    own = dim - (4 - len(mask.shape))
    return S(own) if own >= 0 and mask.shape[own] != 1 else R
