"""Rows of scaled dot product attention: out[b, h, t] = softmax over s of (q[b, h, t] . k[b, g, s] + mask[b, h, t, s]) v[b, g, s].

batch b and heads h   every tensor is sharded (also with fewer key-value heads than query heads: equal shards of both go together)
query heads h         where several of them share a key-value head g: q and out are S(1), k and v replicated, each rank reads the heads
                      that its queries need; the backward returns partial gradients of k and v
queries t             q and out are S(2), k and v replicated; the backward returns partial gradients of k and v. If causal, only where the
                      sequence is LONG: a rank attends to the keys up to its own position in the full sequence
tokens t and s        q, k, v and out are S(2), where the sequence is LONG: blocks of keys and values go round the axis (a ring)
A mask is sharded where it has the dim, and replicated where it broadcasts. Local programs are in `lower.kernels.attention` and, over a
sharded sequence, in `lower.kernels.attention_over_sequence`.

Attention that is captured as matmuls and softmax (with a mask that is trained) needs no row here.

Causal attention computes the scores of keys up to the query's own position. With m equal shards of the queries, in the natural order of
the sequence, the last rank has the most of them; with queries in head-tail order (`graph.order`) all ranks have half:

                                          natural order        head-tail order
    keys of the whole sequence            1 - 1/(2 m)          1/2
    ring: own block, another block        1 - 1/(2 m'), 1      1/2, 1/2           m': shards of the queries per shard of the keys

A share is relative to all scores of the local queries and keys (of the block, in a ring). Sequences that aren't LONG count in full, as in
torch.utils.flop_counter, on a device without kernels of its own (`Device.kernels`).

Stages of a ring over an axis of n ranks; the kernel and each axis work through theirs in this order, several at the same time:

    step j of n   send the block on [not the last]   receive the block's gradients [backward, not the first]   compute
    at the end    send the gradients home [backward]

Over several axes, computing is the ring over the following axes.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

from autoshard.graph import Op, Tensor
from autoshard.layout import Layout, P, Placement, R, S, local_shape
from autoshard.mesh import Mesh
from autoshard.strategies.rows import COMBINES, Inputs, Row, argument, rule

ATTENTION = FORWARD, BACKWARD = "autoshard.attention.default", "autoshard.attention_backward.default"
T = TypeVar("T")
LONG = 16384  # tokens: from here on attention is a large part of a step, and may be sharded on the sequence together with its keys
WIDE = 4  # bytes per element of what is added up over blocks
DROPOUT, DROPOUT_BACKWARD = "autoshard.dropout_attention.default", "autoshard.dropout_attention_backward.default"
BATCH, HEADS, QUERIES = range(3)


@rule(FORWARD, BACKWARD)
def attention(op: Op, inputs: Inputs) -> list[Row]:
    """q, k, v [, mask] -> out, logsumexp;  grad, q, k, v, out, logsumexp [, mask] -> gradients of q, k, v."""
    q, k, _ = _of_qkv(op, inputs)
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
    q_layout, k_layout, _ = _of_qkv(op, tuple(layouts))
    shared = [k == S(HEADS) for q, k in zip(q_layout, k_layout, strict=True) if q == S(HEADS)]
    return shared == sorted(shared, reverse=True)


COMBINES.update(dict.fromkeys(ATTENTION, _key_heads_contain_query_heads))


class OpStage(NamedTuple):
    """A part of an op that runs beside others: a kernel, or a message to the next rank of a mesh axis."""

    collective: str  # "" for the kernel
    axis: int
    amount: float  # bytes; of a kernel the share of the op's local FLOPs
    after: tuple[int, ...]  # the stages that have to end before


def is_long(op: Op, inputs: Inputs) -> bool:
    """Whether q and k have equally many tokens, and so many."""
    q, k, _ = _of_qkv(op, inputs)
    return q.shape[QUERIES] == k.shape[QUERIES] >= LONG


def share_of_flops(op: Op, inputs: Inputs, layouts: tuple[Layout, ...], mesh: Mesh) -> float:
    """Of the FLOPs that the shapes of an op's local tensors imply, the share that the slowest rank computes, where the op is no ring."""
    if op.target not in ATTENTION or not is_causal(op) or not _has_halves(op, inputs, mesh):
        return 1.0
    return 0.5 if _is_balanced(op, layouts, mesh) else 1 - 0.5 / _num_shards(_of_qkv(op, layouts)[0], mesh)


def _has_halves(op: Op, inputs: Inputs, mesh: Mesh) -> bool:
    """Whether a causal mask counts: in a long sequence, and in any whose kernel is priced by what it computes (`Device.kernels`)."""
    q, k, _ = _of_qkv(op, inputs)
    return is_long(op, inputs) or (mesh.device.kernels is not None and q.shape[QUERIES] == k.shape[QUERIES])


def internal_stages(op: Op, inputs: Inputs, layouts: tuple[Layout, ...], mesh: Mesh) -> tuple[OpStage, ...]:
    """The kernels and messages of a local program that runs some of them at the same time, attention whose keys are sharded on the
    sequence; () for other ops and layouts."""
    axes = ring_axes(op, layouts)
    if not axes:
        return ()
    own, other = _shares(op, inputs, layouts, mesh)
    block = _block_elements(op, inputs, layouts, mesh)
    backward = op.target == BACKWARD
    stages: list[OpStage] = []

    def add(*stage: object) -> int:
        stages.append(OpStage(*stage))  # type: ignore[arg-type]
        return len(stages) - 1

    def around(axes: tuple[int, ...], ready: tuple[int, ...], is_own: bool) -> tuple[int, ...]:
        """ready: the stages after which the block is here. Returns those after which its gradients are."""
        if not axes:
            return (add("", -1, own if is_own else other, ready),)
        axis, n = axes[0], mesh.shape[axes[0]]
        done: tuple[int, ...] = ()
        for step in range(n):
            following = (add("permute", axis, block * inputs[0].itemsize, ready),) if step < n - 1 else ()
            arrived = (add("permute", axis, block * WIDE, done),) if backward and step else ()
            done = (*around(axes[1:], ready, is_own and not step), *arrived)
            ready = following
        return (add("permute", axis, block * WIDE, done),) if backward else done

    around(axes, (), True)
    return tuple(stages)


def ring_axes(op: Op, layouts: tuple[Layout, ...]) -> tuple[int, ...]:
    """The mesh axes that shard the keys of attention on the sequence; () for other ops."""
    return tuple(k for k, p in enumerate(_of_qkv(op, layouts)[1]) if p.is_shard(QUERIES)) if op.target in ATTENTION else ()


def attention_bytes(op: Op, inputs: Inputs, layouts: tuple[Layout, ...], mesh: Mesh) -> int:
    """Bytes that attention over a sharded sequence holds besides its inputs and outputs: blocks on their way and what is added up."""
    q_layout, *_ = _of_qkv(op, layouts)
    head_tail, axes = _head_tail(op), ring_axes(op, layouts)
    if not axes and not head_tail and not (is_causal(op) and any(p.is_shard(QUERIES) for p in q_layout)):
        return 0
    (q, _, v), itemsize = _of_qkv(op, inputs), inputs[0].itemsize
    tokens = math.prod(local_shape(q.shape, q_layout, mesh)[:-1])
    block = _block_elements(op, inputs, layouts, mesh)
    if op.target == FORWARD:
        return 2 * block * itemsize + 2 * tokens * v.shape[-1] * WIDE  # a block and the next one; two outputs while they are merged
    return block * (2 * itemsize + (3 if axes else 2) * WIDE) + 2 * tokens * q.shape[-1] * WIDE


def _shares(op: Op, inputs: Inputs, layouts: tuple[Layout, ...], mesh: Mesh) -> tuple[float, float]:
    """(of the own block, of another one)"""
    if not is_causal(op):
        return 1.0, 1.0
    if _is_balanced(op, layouts, mesh):
        return 0.5, 0.5
    of_queries, of_keys, _ = (_num_shards(layout, mesh) for layout in _of_qkv(op, layouts))
    return 1 - 0.5 * of_keys / of_queries, 1.0


def _is_balanced(op: Op, layouts: tuple[Layout, ...], mesh: Mesh) -> bool:
    """Whether every shard of the queries is a number of full parts of a sequence in head-tail order; one shard always is."""
    shards = _num_shards(_of_qkv(op, layouts)[0], mesh)
    return shards == 1 or (_head_tail(op) > 0 and _head_tail(op) % shards == 0)


def _block_elements(op: Op, inputs: Inputs, layouts: tuple[Layout, ...], mesh: Mesh) -> int:
    """Elements of a rank's keys and values together, as many heads as its queries need."""
    (q, k, v), (q_layout, k_layout, _) = _of_qkv(op, inputs), _of_qkv(op, layouts)
    batch, heads, tokens, _ = local_shape(k.shape, k_layout, mesh)
    query_heads = local_shape(q.shape, q_layout, mesh)[HEADS]
    return batch * min(heads, query_heads) * tokens * (k.shape[-1] + v.shape[-1])


def _of_qkv(op: Op, of_inputs: tuple[T, ...]) -> tuple[T, ...]:
    """Queries, keys and values among the op's inputs, or their layouts."""
    first = int(op.target == BACKWARD)
    return of_inputs[first : first + 3]


def is_causal(op: Op) -> bool:
    """Whether the queries of attention see no later keys."""
    return bool(argument(op, 7 if op.target == BACKWARD else 4, "is_causal", False))


def _head_tail(op: Op) -> int:
    return int(argument(op, 9 if op.target == BACKWARD else 6, "head_tail", 0) or 0)


def _num_shards(layout: Layout, mesh: Mesh) -> int:
    return math.prod(mesh.shape[k] for k, p in enumerate(layout) if p.is_shard(QUERIES))
