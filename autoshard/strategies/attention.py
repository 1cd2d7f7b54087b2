"""Rows of scaled dot product attention: out[b, h, t] = softmax over s of (q[b, h, t] . k[b, g, s] + mask[b, h, t, s]) v[b, g, s].

batch b and heads h   every tensor is sharded (also with fewer key-value heads than query heads: equal shards of both go together)
query heads h         where several of them share a key-value head g: q and out are S(1), k and v replicated, each rank reads the heads
                      that its queries need; the backward returns partial gradients of k and v
queries t             q and out are S(2), k and v replicated; the backward returns partial gradients of k and v. If causal, only where the
                      sequence is LONG: a rank attends to the keys up to its own position in the full sequence
tokens t and s        q, k, v and out are S(2), where the sequence is LONG: blocks of keys and values go round the axis (a ring)
A mask is sharded where it has the dim, and replicated where it broadcasts. Local programs are in `lower.kernels.attention` and, over a
sharded sequence, in `lower.kernels.attention_over_sequence`; `strategies.ring` has the stages of a ring and the shares of causal work.

Attention that is captured as matmuls and softmax (with a mask that is trained) needs no row here.
"""

from __future__ import annotations

from collections.abc import Sequence

from autoshard.graph import Op, Tensor
from autoshard.layout import Layout, P, Placement, R, S
from autoshard.strategies.ring import is_causal, is_long
from autoshard.strategies.rows import COMBINES, Inputs, Row, argument, rule

FORWARD, BACKWARD = "autoshard.attention.default", "autoshard.attention_backward.default"
DROPOUT, DROPOUT_BACKWARD = "autoshard.dropout_attention.default", "autoshard.dropout_attention_backward.default"
BATCH, HEADS, QUERIES = range(3)


@rule(FORWARD, BACKWARD)
def attention(op: Op, inputs: Inputs) -> list[Row]:
    """q, k, v [, mask] -> out, logsumexp;  grad, q, k, v, out, logsumexp [, mask] -> gradients of q, k, v."""
    first = int(op.target == BACKWARD)
    q, k = inputs[first : first + 2]
    rows = [_row(op, inputs, d, S(d)) for d in (BATCH, HEADS)]
    if q.shape[HEADS] != k.shape[HEADS]:
        rows.append(_row(op, inputs, HEADS, R))
    long = is_long(op, inputs)
    if long or not is_causal(op):
        rows.append(_row(op, inputs, QUERIES, R))
    if long:
        rows.append(_row(op, inputs, QUERIES, S(QUERIES)))
    return rows


@rule(DROPOUT, DROPOUT_BACKWARD)
def attention_with_dropout(op: Op, inputs: Inputs) -> list[Row]:
    """As attention, with one result more: which probabilities are kept, sharded as the queries are."""
    is_causal = argument(op, 9 if op.target == DROPOUT_BACKWARD else 5, "is_causal", False)
    rows = [_row(op, inputs, d, S(d)) for d in (BATCH, HEADS)]
    return rows if is_causal else [*rows, _row(op, inputs, QUERIES, R)]


@rule("autoshard.reorder.default")
def reorder(op: Op, inputs: Inputs) -> list[Row]:
    """x with the tokens on `dim` in another order."""
    others = [d for d in range(len(inputs[0].shape)) if d != argument(op, 1, "dim")]
    return [*(Row((S(d),), (S(d),)) for d in others), Row((P(),), (P(),))]


def _row(op: Op, inputs: Inputs, dim: int, keys: Placement) -> Row:
    """q and out sharded on `dim`, keys and values placed as `keys`."""
    q, results = S(dim), 3 if op.target in (DROPOUT, DROPOUT_BACKWARD) else 2
    if op.target in (FORWARD, DROPOUT):
        return Row((q,) * results, (q, keys, keys, *(_mask(t, dim) for t in inputs[3:])))
    gradient = P() if keys == R else keys
    return Row((q, gradient, gradient), (q, q, keys, keys, *(q,) * results, *(_mask(t, dim) for t in inputs[4 + results :])))


def _mask(mask: Tensor, dim: int) -> Placement:
    """The placement of a mask when dim `dim` of [b, h, t, s] is sharded; a mask with fewer dims lacks the first ones."""
    mask_dim = dim - (4 - len(mask.shape))
    return S(mask_dim) if mask_dim >= 0 and mask.shape[mask_dim] != 1 else R


def _key_heads_contain_query_heads(op: Op, layouts: Sequence[Layout]) -> bool:
    """Whether each rank has the key-value heads of its query heads: the axes that shard both are left of those that shard the queries."""
    first = int(op.target == BACKWARD)
    shared = [k == S(HEADS) for q, k in zip(*layouts[first : first + 2], strict=True) if q == S(HEADS)]
    return shared == sorted(shared, reverse=True)


COMBINES.update({FORWARD: _key_heads_contain_query_heads, BACKWARD: _key_heads_contain_query_heads})
