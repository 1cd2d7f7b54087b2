"""Local programs of attention whose queries are sharded on the sequence, or whose sequence is in head-tail order (`graph.order`).

A rank's queries and a block of keys are split into pieces in which every query attends to every key, or query t to the keys up to t:

    O_i, L_i = attention of the queries to the keys of piece i, and its logsumexp
    L = ln sum_i e^(L_i)        O = sum_i e^(L_i - L) O_i                                                        (`_Merged`)

The backward of attention needs no merging: with O and L of all keys, a piece's probabilities are e^(score - L), and gradients add up.

gathered    the keys are replicated on the axis: one block, which holds all keys
ring        keys are sharded like the queries: blocks go round the axis, and each rank computes with the block that it holds while the next
            one is on its way. In the backward a block's gradients follow it, one step behind, and end where the block came from
            (`_around`, `_back_around`). Over several axes, the ring of the last axis runs inside each step of the axis before it

Which positions a rank holds is known when its program is built (`Rank.place`), so that pieces without any score are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from autoshard.capture.attention import ATTENTION, BACKWARD
from autoshard.capture.order import reorder
from autoshard.graph.order import Runs, stored_runs
from autoshard.layout import chunk_bounds
from autoshard.lower.collectives import Ask, Rank
from autoshard.lower.kernels.attention import KERNELS as WITH_LOCAL_KEYS
from autoshard.lower.kernels.attention import attention, attention_backward, key_heads_needed
from autoshard.lower.kernels.sharded_op import Arguments, Axes, Kernel, ShardedOp, wide
from autoshard.mesh import Mesh

SEQUENCE = 2  # dim of q, k, v and out
Asks = Generator[Ask, Tensor, Any]
Where = dict[int, int]  # the coordinate by axis of the rank from which a block of keys comes


class QueryKeyBlock(NamedTuple):
    """Queries [q_lo, q_hi) and keys [k_lo, k_hi), counted in ascending order of their positions; is_causal: query t to keys up to t."""

    q_lo: int
    q_hi: int
    k_lo: int
    k_hi: int
    is_causal: bool


def pieces(queries: Runs, keys: Runs, *, is_causal: bool) -> list[QueryKeyBlock]:
    """The pieces of queries and keys at these positions, both ascending."""
    num_queries, num_keys = (sum(n for _, n in runs) for runs in (queries, keys))
    if not is_causal:
        return [QueryKeyBlock(0, num_queries, 0, num_keys, False)]
    if queries == keys:
        return [QueryKeyBlock(0, num_queries, 0, num_keys, True)]
    split: list[QueryKeyBlock] = []
    at = 0
    for first, count in queries:
        before = sum(max(0, min(a + n, first) - a) for a, n in keys)
        if before and split and split[-1] == (split[-1].q_lo, at, 0, before, False):
            split[-1] = split[-1]._replace(q_hi=at + count)
        elif before:
            split.append(QueryKeyBlock(at, at + count, 0, before, False))
        for lo, hi in ((max(a, first), min(a + n, first + count)) for a, n in keys):
            if lo < hi:
                split.append(QueryKeyBlock(at + lo - first, at + hi - first, before, before + hi - lo, True))
                if hi < first + count:
                    split.append(QueryKeyBlock(at + hi - first, at + count, before, before + hi - lo, False))
                before += hi - lo
        at += count
    return split


@dataclass(frozen=True)
class Sequence:
    """The number of queries and keys, the axes that shard them, and their order."""

    mesh: Mesh
    num_queries: int
    num_keys: int
    of_queries: Axes
    of_keys: Axes
    head_tail: int
    is_causal: bool

    def queries(self, place: tuple[int, ...]) -> Runs:
        return self._runs(self.num_queries, self.of_queries, {axis: place[axis] for axis in self.of_queries})

    def keys(self, where: Where) -> Runs:
        return self._runs(self.num_keys, self.of_keys, where)

    @property
    def longest(self) -> int:
        """The number of keys of the largest block, which all blocks have while they are sent."""
        return max(b - a for a, b in pairwise(chunk_bounds(self.num_keys, self._sizes(self.of_keys))))

    def all_of(self, axes: Axes) -> int:
        """The number of parts where a tensor that these axes shard is the full sequence in head-tail order; 0 otherwise."""
        return 0 if axes else self.head_tail

    def _sizes(self, axes: Axes) -> tuple[int, ...]:
        return tuple(self.mesh.shape[axis] for axis in axes)

    def _runs(self, size: int, axes: Axes, where: Where) -> Runs:
        number = 0
        for axis in axes:
            number = number * self.mesh.shape[axis] + where[axis]
        lo, hi = chunk_bounds(size, self._sizes(axes))[number : number + 2]
        return stored_runs(size, self.head_tail, lo, hi)


# -- the order of a shard's tokens -----------------------------------------------------------------------------------------------------


def ascending(x: Tensor, runs: Runs, all_of: int) -> Tensor:
    """x, whose tokens are at these positions, with its tokens in the order of their positions. all_of: where it holds the full sequence in
    head-tail order, the number of parts."""
    if all_of:
        return reorder(x, SEQUENCE, all_of, True)
    return _in_order(x, [n for _, n in runs], sorted(range(len(runs)), key=runs.__getitem__))


def as_stored(x: Tensor, runs: Runs, all_of: int) -> Tensor:
    """The inverse of `ascending`."""
    if all_of:
        return reorder(x, SEQUENCE, all_of, False)
    order = sorted(range(len(runs)), key=runs.__getitem__)
    return _in_order(x, [runs[k][1] for k in order], sorted(range(len(runs)), key=order.__getitem__))


def _in_order(x: Tensor, lengths: list[int], order: list[int]) -> Tensor:
    if order == sorted(order):
        return x
    shards = x.split(lengths, SEQUENCE)
    return torch.cat([shards[k] for k in order], SEQUENCE)


# -- pieces of one block of keys -------------------------------------------------------------------------------------------------------


@dataclass
class _Merged:
    """The output and logsumexp of the queries so far, per range of queries between two bounds."""

    bounds: tuple[int, ...]
    ranges: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def add(self, piece: QueryKeyBlock, out: Tensor, logsumexp: Tensor) -> None:
        for lo, hi in pairwise(self.bounds):
            if piece.q_lo <= lo and hi <= piece.q_hi:
                part = tuple(x.narrow(SEQUENCE, lo - piece.q_lo, hi - lo) for x in (out, logsumexp))
                self.ranges[lo] = merged(self.ranges[lo], part) if lo in self.ranges else part  # type: ignore[arg-type, assignment]

    def result(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        out, logsumexp = zip(*(self.ranges[lo] for lo in sorted(self.ranges)), strict=True)
        return _cat(out).to(dtype), _cat(logsumexp)


def _cat(parts: tuple[Tensor, ...]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, SEQUENCE)


def merged(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """(out, logsumexp) over the keys of a and of b together."""
    logsumexp = torch.logaddexp(a[1], b[1])
    known = logsumexp.masked_fill(logsumexp == -torch.inf, 0.0)  # of queries that attend to no key
    weights = [(x[1] - known).exp().unsqueeze(-1) for x in (a, b)]
    return wide(a[0]) * weights[0] + wide(b[0]) * weights[1], logsumexp


@dataclass
class _Call:
    """The queries of a rank with the arguments of its call, everything in ascending order of positions."""

    sequence: Sequence
    a: Arguments
    queries: Runs  # ascending
    stored: Runs  # the same as stored

    @staticmethod
    def of(sequence: Sequence, rank: Rank, a: Arguments) -> _Call:
        stored = sequence.queries(rank.place if sequence.of_queries else ())
        all_of = sequence.all_of(sequence.of_queries)
        tensors = {name: ascending(a[name], stored, all_of) for name in ("query", "grad_out", "out", "logsumexp") if name in a}
        return _Call(sequence, {**a, **tensors}, tuple(sorted(stored)), stored)

    def pieces(self, keys: Runs) -> list[QueryKeyBlock]:
        return pieces(self.queries, tuple(sorted(keys)), is_causal=self.sequence.is_causal)

    def arguments(self, piece: QueryKeyBlock, key: Tensor, value: Tensor, first_key: int) -> dict[str, Any]:
        """The arguments of attention for a piece. first_key: the position of the block's first key, where there is a mask."""
        q = slice(piece.q_lo, piece.q_hi)
        own = {name: self.a[name][:, :, q] for name in ("query", "grad_out", "out", "logsumexp") if name in self.a}
        own |= {"key": key[:, :, piece.k_lo : piece.k_hi], "value": value[:, :, piece.k_lo : piece.k_hi], "is_causal": piece.is_causal}
        mask = self.a.get("attn_mask")
        if mask is not None and mask.shape[-1] > 1:
            mask = mask[..., first_key + piece.k_lo : first_key + piece.k_hi]
        return {**own, "attn_mask": mask, "scale": self.a.get("scale")}

    def bounds(self, blocks: list[Runs]) -> tuple[int, ...]:
        """Where the pieces of any of the blocks begin and end."""
        ends = {end for keys in blocks for piece in self.pieces(keys) for end in (piece.q_lo, piece.q_hi)}
        return tuple(sorted(ends))


def _forward(call: _Call, into: _Merged, key: Tensor, value: Tensor, keys: Runs) -> None:
    all_of = call.sequence.all_of(call.sequence.of_keys)
    key, value = (ascending(x, keys, all_of) for x in (key, value))
    for piece in call.pieces(keys):
        into.add(piece, *attention(**call.arguments(piece, key, value, keys[0][0])))


def _backward(call: _Call, grad_query: list[Tensor], key: Tensor, value: Tensor, keys: Runs) -> tuple[Tensor, Tensor]:
    """The gradients of a block of keys and values; adds the queries' own to `grad_query`."""
    all_of = call.sequence.all_of(call.sequence.of_keys)
    key, value = (ascending(x, keys, all_of) for x in (key, value))
    tokens, of_keys = sum(n for _, n in call.queries), sum(n for _, n in keys)
    grads = [wide(torch.zeros_like(x)) for x in (key, value)]
    for piece in call.pieces(keys):
        own = attention_backward(**call.arguments(piece, key, value, keys[0][0]))
        grad_query.append(_padded(own[0], piece.q_lo, tokens))
        grads = [grad + _padded(one, piece.k_lo, of_keys) for grad, one in zip(grads, own[1:], strict=True)]
    return as_stored(grads[0], keys, all_of), as_stored(grads[1], keys, all_of)


def _padded(x: Tensor, start: int, size: int) -> Tensor:
    """x as the tokens [start, ...) of a tensor of `size` tokens, which is 0 elsewhere."""
    return wide(x) if x.shape[SEQUENCE] == size else F.pad(wide(x), (0, 0, start, size - start - x.shape[SEQUENCE]))


# -- blocks that go round --------------------------------------------------------------------------------------------------------------


def _around(rank: Rank, axes: Axes, block: Tensor, where: Where, use: Callable[[Tensor, Where], None]) -> Asks:
    """`use` is called with every block of the axes, this rank's own first."""
    if not axes:
        use(block, where)
        return
    axis, rest = axes[0], axes[1:]
    n = rank.mesh.shape[axis]
    for step in range(n):
        after = (yield _pass_on(rank, axis, block)) if step < n - 1 else block
        yield from _around(rank, rest, block, where, use)
        block, where = after, {**where, axis: (where[axis] - 1) % n}


def _back_around(rank: Rank, axes: Axes, block: Tensor, where: Where, use: Callable[[Tensor, Where], Tensor]) -> Asks:
    """As `_around`; `use` returns a rank's part of a block's gradient. The sum for this rank's own block over all ranks."""
    if not axes:
        return use(block, where)
    axis, rest = axes[0], axes[1:]
    n = rank.mesh.shape[axis]
    gradient = None
    for step in range(n):
        after = (yield _pass_on(rank, axis, block)) if step < n - 1 else block
        arrived = (yield _pass_on(rank, axis, gradient)) if gradient is not None else None
        own = yield from _back_around(rank, rest, block, where, use)
        gradient = own if arrived is None else arrived + own
        block, where = after, {**where, axis: (where[axis] - 1) % n}
    assert gradient is not None
    return (yield _pass_on(rank, axis, gradient))


def _pass_on(rank: Rank, axis: int, x: Tensor) -> Ask:
    return Ask("permute", axis, x, place=rank.place[axis])


# -- the local programs ----------------------------------------------------------------------------------------------------------------


def over_sequence(rank: Rank, a: Arguments, *, sequence: Sequence) -> Asks:
    """The op, forward or backward, of a rank's queries and all keys."""
    call, axes, all_of = _Call.of(sequence, rank, a), sequence.of_keys, sequence.all_of(sequence.of_queries)
    where = {axis: rank.place[axis] for axis in axes}
    width, tokens = a["key"].shape[-1], a["key"].shape[SEQUENCE]
    packed = torch.cat([a["key"], a["value"]], -1)
    block = F.pad(packed, (0, 0, 0, sequence.longest - tokens)) if axes else packed

    def unpacked(block: Tensor, keys: Runs) -> tuple[Tensor, Tensor]:
        block = block.narrow(SEQUENCE, 0, sum(n for _, n in keys))
        return block[..., :width], block[..., width:]

    if "grad_out" not in a:
        into = _Merged(call.bounds(_all_blocks(sequence)))
        yield from _around(rank, axes, block, where, lambda b, w: _forward(call, into, *unpacked(b, k := sequence.keys(w)), k))
        return tuple(as_stored(x, call.stored, all_of) for x in into.result(a["query"].dtype))
    grad_query: list[Tensor] = []

    def gradient(block: Tensor, where: Where) -> Tensor:
        keys = sequence.keys(where)
        own = torch.cat(_backward(call, grad_query, *unpacked(block, keys), keys), -1)
        return F.pad(own, (0, 0, 0, sequence.longest - own.shape[SEQUENCE])) if axes else own

    of_keys = (yield from _back_around(rank, axes, block, where, gradient)).narrow(SEQUENCE, 0, tokens)
    of_queries = as_stored(sum(grad_query[1:], start=grad_query[0]), call.stored, all_of)
    return tuple(x.to(a["query"].dtype) for x in (of_queries, of_keys[..., :width], of_keys[..., width:]))


def _all_blocks(sequence: Sequence) -> list[Runs]:
    """The positions of every block of keys, as stored."""
    wheres: list[Where] = [{}]
    for axis in sequence.of_keys:
        wheres = [{**where, axis: c} for where in wheres for c in range(sequence.mesh.shape[axis])]
    return [sequence.keys(where) for where in wheres]


def with_key_heads(rank: Rank, a: Arguments, *, sequence: Sequence, **heads: Any) -> Asks:
    """`over_sequence` where ranks have some query heads of a group and all key-value heads."""
    needed = key_heads_needed(rank, a, **heads)
    own = {**a, **{name: a[name].index_select(1, needed) for name in ("key", "value")}}
    results = yield from over_sequence(rank, own, sequence=sequence)
    if "grad_out" not in a:
        return results
    of_keys = zip(("key", "value"), results[1:], strict=True)
    of_heads = (torch.ops.aten.index_put.default(torch.zeros_like(a[name]), [None, needed], grad, True) for name, grad in of_keys)
    return results[0], *of_heads


def _attention(sharded: ShardedOp) -> Kernel | None:
    of_queries, of_keys = sharded.axes_of("query", SEQUENCE), sharded.axes_of("key", SEQUENCE)
    head_tail, is_causal = int(sharded.arguments.get("head_tail") or 0), bool(sharded.arguments.get("is_causal"))
    with_local_keys = WITH_LOCAL_KEYS[sharded.op.target](sharded)
    if not of_keys and not (is_causal and (of_queries or head_tail)):
        return with_local_keys
    if not set(of_keys) <= set(of_queries):
        raise sharded.refuse("keys are sharded on a mesh axis on which the queries aren't")
    sizes = sharded.shape("query")[SEQUENCE], sharded.shape("key")[SEQUENCE]
    sequence = Sequence(sharded.mesh, *sizes, of_queries, of_keys, head_tail, is_causal)
    if with_local_keys is None:
        return partial(over_sequence, sequence=sequence)
    return partial(with_key_heads, sequence=sequence, **with_local_keys.keywords)  # type: ignore[attr-defined]


KERNELS = {str(ATTENTION): _attention, str(BACKWARD): _attention}
