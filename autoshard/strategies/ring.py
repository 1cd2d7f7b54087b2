"""Attention over a long sequence: the share of its scores that the slowest rank computes, and the stages of a ring.

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

from __future__ import annotations

import math
from typing import NamedTuple

from autoshard.graph import Op
from autoshard.layout import Layout, local_shape
from autoshard.mesh import Mesh
from autoshard.strategies.rows import Inputs, argument

FORWARD, BACKWARD = "autoshard.attention.default", "autoshard.attention_backward.default"
SEQUENCE, HEADS = 2, 1
LONG = 16384  # tokens: from here on attention is a large part of a step, and may be sharded on the sequence together with its keys
WIDE = 4  # bytes per element of what is added up over blocks


class OpStage(NamedTuple):
    """A part of an op that runs beside others: a kernel, or a message to the next rank of a mesh axis."""

    collective: str  # "" for the kernel
    axis: int
    amount: float  # bytes; of a kernel the share of the op's local FLOPs
    after: tuple[int, ...]  # the stages that have to end before


def is_long(op: Op, inputs: Inputs) -> bool:
    """Whether q and k have equally many tokens, and so many."""
    q, k = _tensors(op, inputs)[:2]
    return q.shape[SEQUENCE] == k.shape[SEQUENCE] >= LONG


def share_of_scores(op: Op, inputs: Inputs, layouts: tuple[Layout, ...], mesh: Mesh) -> float:
    """How many of the scores of its local queries and keys the slowest rank computes, of an op that is no ring; 1 for other ops."""
    if op.target not in (FORWARD, BACKWARD) or not is_causal(op) or not _has_halves(op, inputs, mesh):
        return 1.0
    return 0.5 if _is_balanced(op, layouts, mesh) else 1 - 0.5 / _num_shards(_placed(op, layouts)[0], mesh)


def _has_halves(op: Op, inputs: Inputs, mesh: Mesh) -> bool:
    """Whether a causal mask counts: in a long sequence, and in any whose kernel is priced by what it computes (`Device.kernels`)."""
    q, k = _tensors(op, inputs)[:2]
    return is_long(op, inputs) or (mesh.device.kernels is not None and q.shape[SEQUENCE] == k.shape[SEQUENCE])


def ring_stages(op: Op, inputs: Inputs, layouts: tuple[Layout, ...], mesh: Mesh) -> tuple[OpStage, ...]:
    """The stages of attention whose keys are sharded on the sequence; () for other ops and layouts."""
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
    if op.target not in (FORWARD, BACKWARD):
        return ()
    return tuple(k for k, p in enumerate(_placed(op, layouts)[1]) if p.is_shard(SEQUENCE))


def attention_bytes(op: Op, inputs: Inputs, layouts: tuple[Layout, ...], mesh: Mesh) -> int:
    """Bytes that attention over a sharded sequence holds besides its inputs and outputs: blocks on their way and what is added up."""
    q_layout, k_layout = _placed(op, layouts)[:2]
    head_tail, axes = _head_tail(op), ring_axes(op, layouts)
    if not axes and not head_tail and not (is_causal(op) and any(p.is_shard(SEQUENCE) for p in q_layout)):
        return 0
    (q, _, v), itemsize = _tensors(op, inputs), inputs[0].itemsize
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
    of_queries, of_keys = (_num_shards(layout, mesh) for layout in _placed(op, layouts)[:2])
    return 1 - 0.5 * of_keys / of_queries, 1.0


def _is_balanced(op: Op, layouts: tuple[Layout, ...], mesh: Mesh) -> bool:
    """Whether every shard of the queries is a number of full parts of a sequence in head-tail order; one shard always is."""
    shards = _num_shards(_placed(op, layouts)[0], mesh)
    return shards == 1 or (_head_tail(op) > 0 and _head_tail(op) % shards == 0)


def _block_elements(op: Op, inputs: Inputs, layouts: tuple[Layout, ...], mesh: Mesh) -> int:
    """Elements of a rank's keys and values together, as many heads as its queries need."""
    (q, k, v), (q_layout, k_layout, _) = _tensors(op, inputs), _placed(op, layouts)
    batch, heads, tokens, _ = local_shape(k.shape, k_layout, mesh)
    query_heads = local_shape(q.shape, q_layout, mesh)[HEADS]
    return batch * min(heads, query_heads) * tokens * (k.shape[-1] + v.shape[-1])


def _tensors(op: Op, inputs: Inputs) -> Inputs:
    first = int(op.target == BACKWARD)
    return inputs[first : first + 3]


def _placed(op: Op, layouts: tuple[Layout, ...]) -> tuple[Layout, ...]:
    first = int(op.target == BACKWARD)
    return layouts[first : first + 3]


def is_causal(op: Op) -> bool:
    """Whether the queries of attention see no later keys."""
    return bool(argument(op, 7 if op.target == BACKWARD else 4, "is_causal", False))


def _head_tail(op: Op) -> int:
    return int(argument(op, 9 if op.target == BACKWARD else 6, "head_tail", 0) or 0)


def _num_shards(layout: Layout, mesh: Mesh) -> int:
    return math.prod(mesh.shape[k] for k, p in enumerate(layout) if p.is_shard(SEQUENCE))
