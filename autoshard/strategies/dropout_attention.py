"""Rows of attention with dropout, as those of attention (`strategies.attention`): which probabilities are kept is sharded as queries are.

batch b, heads h      every tensor is sharded; fewer key-value heads than query heads are sharded together with them
queries t             q, out and kept are sharded, k and v replicated, their gradients partial; not if causal
"""

from __future__ import annotations

from autoshard.graph import Op, Tensor
from autoshard.layout import P, Placement, R, S
from autoshard.strategies.rows import Inputs, Row, argument, rule

FORWARD, BACKWARD = "autoshard.dropout_attention.default", "autoshard.dropout_attention_backward.default"
BATCH, HEADS, QUERIES = range(3)


@rule(FORWARD)
def attention(op: Op, inputs: Inputs) -> list[Row]:
    """q, k, v [, mask] -> out, logsumexp, kept."""
    rows = []
    for dim, keys in _dims(argument(op, 5, "is_causal", False)):
        rows.append(Row((S(dim),) * 3, (S(dim), keys, keys, *(_mask(t, dim) for t in inputs[3:]))))
    return rows


@rule(BACKWARD)
def attention_backward(op: Op, inputs: Inputs) -> list[Row]:
    """grad, q, k, v, out, logsumexp, kept [, mask] -> gradients of q, k, v."""
    rows = []
    for dim, keys in _dims(argument(op, 9, "is_causal", False)):
        q, gradient = S(dim), P() if keys == R else keys
        rows.append(Row((q, gradient, gradient), (q, q, keys, keys, q, q, q, *(_mask(t, dim) for t in inputs[7:]))))
    return rows


def _dims(is_causal: bool) -> list[tuple[int, Placement]]:
    """The dims of queries that can be sharded, each with the placement of keys and values."""
    return [(BATCH, S(BATCH)), (HEADS, S(HEADS)), *([] if is_causal else [(QUERIES, R)])]


def _mask(mask: Tensor, dim: int) -> Placement:
    """The placement of a mask when dim `dim` of [b, h, t, s] is sharded: replicated where it broadcasts."""
    return R if mask.shape[dim] == 1 else S(dim)
