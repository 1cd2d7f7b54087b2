"""Local programs of attention whose queries are sharded on the sequence, or whose sequence is in head-tail order (`graph.order`).

A rank's queries and a block of keys are split into pieces in which every query attends to every key, or query t to the keys up to t:

    O_i, L_i = attention of the queries to the keys of piece i, and its logsumexp
    L = ln sum_i e^(L_i)        O = sum_i e^(L_i - L) O_i                                                        (`merged`)

The backward of attention needs no merging: with O and L of all keys, a piece's probabilities are e^(score - L), and gradients add up.

gathered    the keys are replicated on the axis: one block, which holds all keys
ring        keys are sharded like the queries: blocks go round the axis, and each rank computes with the block that it holds while the next
            one is on its way. In the backward a block's gradients follow it, one step behind, and end where the block came from
            (`_around`, `_back_around`). Over several axes, the ring of the last axis runs inside each step of the axis before it

Which positions a rank holds is known when its program is built (`Rank.place`), so that pieces without any score are left out. All pieces
of a block are one operator (`autoshard::attention_block` and its backward), of which only numbers differ from rank to rank: the order of
collectives that is derived from a graph (`runtime.overlap`) is then the same on all ranks.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from autoshard.capture import ATTENTION, BACKWARD, reorder
from autoshard.graph import Runs, stored_runs
from autoshard.layout import chunk_bounds
from autoshard.lower.collectives import CollectiveCall, Rank, RankGenerator, row_major
from autoshard.lower.kernels.attention import KERNELS as WITH_LOCAL_KEYS
from autoshard.lower.kernels.attention import attention, attention_backward
from autoshard.lower.kernels.sharded_op import Arguments, Axes, Kernel, ShardedOp, wide
from autoshard.mesh import Mesh

SEQUENCE = 2  # dim of q, k, v and out
BlockSource = dict[int, int]  # the coordinate by axis of the rank from which a block of keys comes


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

    def keys(self, where: BlockSource) -> Runs:
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

    def _runs(self, size: int, axes: Axes, where: BlockSource) -> Runs:
        number = row_major([where[axis] for axis in axes], self._sizes(axes))
        lo, hi = chunk_bounds(size, self._sizes(axes))[number : number + 2]
        return stored_runs(size, self.head_tail, lo, hi)


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


def merged(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """(out, logsumexp) over the keys of a and of b together."""
    logsumexp = torch.logaddexp(a[1], b[1])
    known = logsumexp.masked_fill(logsumexp == -torch.inf, 0.0)  # of queries that attend to no key
    weights = [(x[1] - known).exp().unsqueeze(-1) for x in (a, b)]
    return wide(a[0]) * weights[0] + wide(b[0]) * weights[1], logsumexp


@dataclass(frozen=True)
class Positions:
    """The positions of a rank's queries and of a block of keys, as stored. of_queries, of_keys: `all_of` of `ascending`."""

    queries: Runs
    keys: Runs
    of_queries: int
    of_keys: int
    is_causal: bool

    def pieces(self) -> list[QueryKeyBlock]:
        return pieces(tuple(sorted(self.queries)), tuple(sorted(self.keys)), is_causal=self.is_causal)

    def ascending(self, tensors: Arguments) -> dict[str, Any]:
        """Arguments of attention by name with every token in the order of positions."""
        own = {name: ascending(tensors[name], self.queries, self.of_queries) for name in OF_QUERIES if name in tensors}
        return {**tensors, **own, **{name: ascending(tensors[name], self.keys, self.of_keys) for name in ("key", "value")}}

    def of_piece(self, a: Arguments, piece: QueryKeyBlock) -> dict[str, Any]:
        """The arguments of attention for a piece. a: in ascending order."""
        own = {name: a[name][:, :, piece.q_lo : piece.q_hi] for name in OF_QUERIES if name in a}
        own |= {name: a[name][:, :, piece.k_lo : piece.k_hi] for name in ("key", "value")}
        mask = a["attn_mask"]
        if mask is not None and mask.shape[-1] > 1:  # attention with a mask is in the natural order, so that the keys are one run
            mask = mask[..., self.keys[0][0] + piece.k_lo : self.keys[0][0] + piece.k_hi]
        return {**own, "is_causal": piece.is_causal, "attn_mask": mask, "scale": a["scale"]}

    def as_numbers(self) -> list[int]:
        """The inverse of `of`."""
        runs = (n for run in (*self.queries, *self.keys) for n in run)
        return [len(self.queries), self.of_queries, self.of_keys, int(self.is_causal), *runs]

    @staticmethod
    def of(numbers: list[int]) -> "Positions":
        count, of_queries, of_keys, is_causal, *flat = numbers
        runs = tuple(zip(flat[::2], flat[1::2], strict=True))
        return Positions(runs[:count], runs[count:], of_queries, of_keys, bool(is_causal))


OF_QUERIES = ("query", "grad_out", "out", "logsumexp")  # the tensors that are sharded as the queries are


def _block(query, key, value, attn_mask, scale, former, former_logsumexp, positions, is_last):  # type: ignore[no-untyped-def]
    """Output and logsumexp over a block of keys and those before it (former). is_last: none follows; the output is in its own dtype."""
    at = Positions.of(positions)
    a = at.ascending({"query": query, "key": key, "value": value, "attn_mask": attn_mask, "scale": scale})
    if former is None:
        out = wide(query.new_zeros((*query.shape[:3], value.shape[-1])))
        total = out, out.new_full(query.shape[:3], -torch.inf)
    else:
        total = tuple(ascending(x, at.queries, at.of_queries).clone() for x in (former, former_logsumexp))
    for piece in at.pieces():
        so_far = tuple(x.narrow(SEQUENCE, piece.q_lo, piece.q_hi - piece.q_lo) for x in total)
        for x, both in zip(so_far, merged(so_far, attention(**at.of_piece(a, piece))), strict=True):
            x.copy_(both)
    out, logsumexp = (as_stored(x, at.queries, at.of_queries).contiguous() for x in total)
    return out.to(query.dtype) if is_last else out, logsumexp


def _block_backward(grad_out, query, key, value, out, logsumexp, attn_mask, scale, former, positions):  # type: ignore[no-untyped-def]
    """The gradient of the queries by a block of keys and those before it (former), and the gradients of the block's keys and values."""
    at = Positions.of(positions)
    named = {"grad_out": grad_out, "query": query, "key": key, "value": value, "out": out, "logsumexp": logsumexp}
    a = at.ascending({**named, "attn_mask": attn_mask, "scale": scale})
    of_queries = wide(torch.zeros_like(query)) if former is None else ascending(former, at.queries, at.of_queries).clone()
    grads = [of_queries, *(wide(torch.zeros_like(x)) for x in (key, value))]
    for piece in at.pieces():
        q, k = (piece.q_lo, piece.q_hi - piece.q_lo), (piece.k_lo, piece.k_hi - piece.k_lo)
        for grad, part, where in zip(grads, attention_backward(**at.of_piece(a, piece)), (q, k, k), strict=True):
            grad.narrow(SEQUENCE, *where).add_(part)
    orders = ((at.queries, at.of_queries), (at.keys, at.of_keys), (at.keys, at.of_keys))
    return tuple(as_stored(grad, *order).contiguous() for grad, order in zip(grads, orders, strict=True))


OPERANDS = "Tensor query, Tensor key, Tensor value"
torch.library.define(
    "autoshard::attention_block",
    f"({OPERANDS}, Tensor? attn_mask, float? scale, Tensor? former, Tensor? former_logsumexp, int[] positions, bool is_last) "
    "-> (Tensor, Tensor)",
)
torch.library.define(
    "autoshard::attention_block_backward",
    f"(Tensor grad_out, {OPERANDS}, Tensor out, Tensor logsumexp, Tensor? attn_mask, float? scale, Tensor? former, int[] positions) "
    "-> (Tensor, Tensor, Tensor)",
)
torch.library.impl("autoshard::attention_block", "CompositeExplicitAutograd", _block)
torch.library.impl("autoshard::attention_block_backward", "CompositeExplicitAutograd", _block_backward)


@torch.library.register_fake("autoshard::attention_block")
def _(query, key, value, attn_mask, scale, former, former_logsumexp, positions, is_last):  # type: ignore[no-untyped-def]
    exact = torch.float64 if query.dtype == torch.float64 else torch.float32
    out = query.new_empty((*query.shape[:3], value.shape[-1]), dtype=query.dtype if is_last else exact)
    return out, query.new_empty(query.shape[:3], dtype=exact)


@torch.library.register_fake("autoshard::attention_block_backward")
def _(grad_out, query, key, value, *rest):  # type: ignore[no-untyped-def]
    exact = torch.float64 if query.dtype == torch.float64 else torch.float32
    return tuple(x.new_empty(x.shape, dtype=exact) for x in (query, key, value))


BLOCK, BLOCK_BACKWARD = torch.ops.autoshard.attention_block.default, torch.ops.autoshard.attention_block_backward.default


def _around(rank: Rank, axes: Axes, block: Tensor, where: BlockSource, use: Callable[[Tensor, BlockSource], None]) -> RankGenerator:
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


def _back_around(rank: Rank, axes: Axes, block: Tensor, where: BlockSource, use: Callable[[Tensor, BlockSource], Tensor]) -> RankGenerator:
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


def _pass_on(rank: Rank, axis: int, x: Tensor) -> CollectiveCall:
    return CollectiveCall("permute", axis, x, place=rank.place[axis])


def over_sequence(rank: Rank, a: Arguments, *, sequence: Sequence) -> RankGenerator:
    axes = sequence.of_keys
    where = {axis: rank.place[axis] for axis in axes}
    width, tokens = a["key"].shape[-1], a["key"].shape[SEQUENCE]
    packed = torch.cat([a["key"], a["value"]], -1)
    stored, options = sequence.queries(rank.place if sequence.of_queries else ()), (a.get("attn_mask"), a.get("scale"))
    waiting = math.prod(sequence.mesh.shape[axis] for axis in axes)  # blocks that are still to come
    former: tuple[Any, ...] = (None, None)

    def padded(x: Tensor) -> Tensor:
        missing = sequence.longest - x.shape[SEQUENCE] if axes else 0
        return F.pad(x, (0, 0, 0, missing)) if missing else x

    def unpacked(block: Tensor, where: BlockSource) -> tuple[Tensor, Tensor, list[int]]:
        keys = sequence.keys(where)
        all_of = sequence.all_of(sequence.of_queries), sequence.all_of(axes)
        if (count := sum(n for _, n in keys)) < block.shape[SEQUENCE]:
            block = block.narrow(SEQUENCE, 0, count)
        return block[..., :width], block[..., width:], Positions(stored, keys, *all_of, sequence.is_causal).as_numbers()

    def use(block: Tensor, where: BlockSource) -> None:
        nonlocal former, waiting
        *key_value, positions = unpacked(block, where)
        waiting -= 1
        former = BLOCK(a["query"], *key_value, *options, *former, positions, waiting == 0)

    def gradient(block: Tensor, where: BlockSource) -> Tensor:
        nonlocal former
        *key_value, positions = unpacked(block, where)
        tensors = a["grad_out"], a["query"], *key_value, a["out"], a["logsumexp"], *options, former[0], positions
        former, *of_keys = BLOCK_BACKWARD(*tensors)
        former, own = (former,), torch.cat(of_keys, -1)
        return padded(own)

    if "grad_out" not in a:
        yield from _around(rank, axes, padded(packed), where, use)
        return former
    of_keys = (yield from _back_around(rank, axes, padded(packed), where, gradient)).narrow(SEQUENCE, 0, tokens)
    return tuple(x.to(a["query"].dtype) for x in (former[0], of_keys[..., :width], of_keys[..., width:]))


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
    kernel = partial(over_sequence, sequence=sequence)
    return kernel if with_local_keys is None else partial(with_local_keys, inside=kernel)  # type: ignore[call-arg]


KERNELS = {str(ATTENTION): _attention, str(BACKWARD): _attention}
FUNCTIONS: dict[str, Callable[..., Any]] = {str(BLOCK): _block, str(BLOCK_BACKWARD): _block_backward}
