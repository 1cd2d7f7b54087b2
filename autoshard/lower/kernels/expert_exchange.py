"""How tokens go to the ranks that have their experts, and back. A pair is a token and one of its k experts.

    dispatched            pairs of this rank -> how they are routed: over one axis after the other, the slowest first
    Routed.rows_forth     a row per token of this rank -> a row per pair of its experts, sorted by these
    Routed.rows_back      a row per pair of its experts -> their sum per token of this rank

A token is sent once to each rank that has experts of it. Nothing is dropped: on each axis the ranks tell each other first how much they
send, and an expert may get all pairs or none.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from autoshard.lower.collectives import CollectiveCall, RankGenerator, row_major


@dataclass(frozen=True)
class Dispatch:
    """Over which axes tokens go to their experts. A rank's coordinate on these is `where`, in the order of `axes`."""

    axes: tuple[int, ...]  # mesh axes that shard the experts, left to right
    sizes: tuple[int, ...]  # of these axes
    sent: tuple[bool, ...]  # whether tokens are sharded on the axis, too
    num_experts: int  # on all ranks together

    @property
    def experts_per_rank(self) -> int:
        return self.num_experts // math.prod(self.sizes)

    def coordinate(self, ids: Tensor, position: int) -> Tensor:
        """The coordinate, on one of the axes, of the rank that has each expert."""
        return ids // (self.experts_per_rank * math.prod(self.sizes[position + 1 :])) % self.sizes[position]

    def first(self, where: Sequence[int]) -> int:
        """The first expert of a rank."""
        return row_major(where, self.sizes) * self.experts_per_rank


@dataclass(frozen=True)
class Exchange:
    """Rows of a tensor that are sent along an axis."""

    axis: int
    index: Tensor  # the row that is sent as the i-th; one that goes to several ranks is there several times
    splits: tuple[list[int], list[int]]  # how many rows go to, and come from, each rank of the group

    def forth(self, x: Tensor) -> RankGenerator:
        return (yield CollectiveCall("all_to_all", self.axis, x[self.index], splits=self.splits))

    def back(self, x: Tensor) -> RankGenerator:
        """What comes back of the rows, in the order in which they were sent."""
        return (yield CollectiveCall("all_to_all", self.axis, x, splits=self.splits[::-1]))


@dataclass(frozen=True)
class Hop:
    """The exchanges over one axis. Rows (of tokens) and pairs have an order and numbers of their own."""

    rows: Exchange
    pairs: Exchange
    num_rows: int  # before the exchange


def put_back(x: Tensor, order: Tensor) -> Tensor:
    """The inverse of x[order]."""
    return torch.empty_like(x).index_copy(0, order, x)


def _added_up(x: Tensor, index: Tensor, count: int, wide: torch.dtype) -> Tensor:
    """y[i] = the sum of x over index == i, in dtype `wide`; terms are added in their order, so that every run has the same sum."""
    y = x.new_zeros(count, *x.shape[1:], dtype=wide)
    if not x.shape[0]:
        return y
    ordered, order = torch.sort(index, stable=True)
    places = torch.arange(len(index), device=index.device)
    is_first = torch.cat([ordered.new_ones(1, dtype=torch.bool), ordered[1:] != ordered[:-1]])
    occurrence = places - torch.cummax(torch.where(is_first, places, 0), 0).values
    for k in range(int(occurrence.max()) + 1):
        chosen = order[occurrence == k]
        y.index_add_(0, index[chosen], x[chosen].to(wide))
    return y


def _hop(axis: int, size: int, target: Tensor, experts: Tensor, rows: Tensor, num_rows: int) -> RankGenerator:
    """The exchange of pairs (a row, an expert, the rank of that), with experts and rows of the pairs that come, and how many rows do."""
    n = max(num_rows, 1)
    # a row goes once to each rank, however many of its experts are there
    keys, number = torch.unique(target * n + rows, return_inverse=True)
    row_counts, pair_counts = torch.bincount(keys // n, minlength=size), torch.bincount(target, minlength=size)
    counts = yield CollectiveCall("all_to_all", axis, torch.stack([row_counts, pair_counts], 1))
    received = counts.reshape(size, 2)
    rows_come, pairs_come = received.t().tolist()
    pairs = Exchange(axis, torch.argsort(target, stable=True), (pair_counts.tolist(), pairs_come))
    number = number - (row_counts.cumsum(0) - row_counts)[target]  # among the rows for its rank
    experts, number = (yield from pairs.forth(torch.stack([experts, number], 1))).unbind(1)
    begins = received[:, 0].cumsum(0) - received[:, 0]
    hop = Hop(Exchange(axis, keys % n, (row_counts.tolist(), rows_come)), pairs, num_rows)
    return hop, experts, number + begins.repeat_interleave(received[:, 1]), sum(rows_come)


@dataclass(frozen=True)
class Routed:
    """The pairs of a rank (their numbers t k + j), their way to the experts, and the pairs that this rank's experts get."""

    pairs: Tensor
    hops: tuple[Hop, ...]
    rows: Tensor  # the row of each pair that arrives, sorted by expert
    num_rows: int
    order: Tensor  # sorts these pairs
    ids: Tensor  # the local expert of each, sorted

    def rows_forth(self, x: Tensor) -> RankGenerator:
        """A row per token of this rank -> a row per pair of its experts."""
        for hop in self.hops:
            x = yield from hop.rows.forth(x)
        return x[self.rows]

    def rows_back(self, x: Tensor, wide: torch.dtype, sent: torch.dtype) -> RankGenerator:
        """A row per pair of its experts -> their sum per token of this rank, added up as `wide`, sent as `sent`."""
        x = _added_up(x, self.rows, self.num_rows, wide)
        for hop in reversed(self.hops):
            x = _added_up((yield from hop.rows.back(x.to(sent))), hop.rows.index, hop.num_rows, wide)
        return x

    def pairs_forth(self, x: Tensor) -> RankGenerator:
        x = x[self.pairs]
        for hop in self.hops:
            x = yield from hop.pairs.forth(x)
        return x[self.order]

    def pairs_back(self, x: Tensor, count: int) -> RankGenerator:
        """A number per pair of its experts -> one per pair of this rank's tokens, 0 for those that other ranks of its axes have."""
        x = put_back(x, self.order)
        for hop in reversed(self.hops):
            x = put_back((yield from hop.pairs.back(x)), hop.pairs.index)
        return x.new_zeros(count).index_copy(0, self.pairs, x)


def dispatched(dispatch: Dispatch, where: Sequence[int], ids: Tensor) -> RankGenerator:
    flat = ids.reshape(-1)
    pairs = torch.arange(flat.shape[0], device=ids.device)
    for position, is_sent in enumerate(dispatch.sent):
        if not is_sent:
            pairs = pairs[dispatch.coordinate(flat[pairs], position) == where[position]]
    experts, rows, num_rows, hops = flat[pairs], pairs // ids.shape[1], ids.shape[0], []
    for position, axis in enumerate(dispatch.axes):
        if dispatch.sent[position]:
            target = dispatch.coordinate(experts, position)
            hop, experts, rows, num_rows = yield from _hop(axis, dispatch.sizes[position], target, experts, rows, num_rows)
            hops.append(hop)
    order = torch.argsort(experts, stable=True)
    return Routed(pairs, tuple(hops), rows[order], num_rows, order, experts[order] - dispatch.first(where))
