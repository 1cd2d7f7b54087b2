"""How much of what a rank needs it holds already, by closed forms, and therefore who sends what in a step.

For one dim, cut as (sizes1, b1) before and (sizes2, b2) after,

    C[r, s] = # { j < S : owner1(j) = r, owner2(j) = s }                                                       (`common`)

With F(x, s) = # { j < x : owner2(j) = s } = (x // P) b2 + clamp(x mod P - s b2, 0, b2), P = b2 N2, a block [lo, hi) of the other
cut adds F(hi, s) - F(lo, s): no element is looked at, and the pattern repeats after lcm(b1 N1, b2 N2).

A rank holds and needs products over dims, so what t needs of what c holds is the product of the C's (`traffic`). Who sends, where
several hold the same: t itself, if it can; else a holder whose coordinate agrees with t's wherever it may, on the axes that neither
layout cuts and on those before the first (the slowest) that the message crosses anyhow; on the rest the i-th holder serves the i-th
of those who need the same (modulo their number) (`sender`).
"""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import product
from typing import NamedTuple

import numpy as np

from autoshard.relayout.blocks import CHUNKS, Axes, BlockLayout, Sizes, axis_sizes, chunk_bounds, extents, part_of


def _prefix(x: np.ndarray, n: int, b: int) -> np.ndarray:
    """F(x, s) for all s: an array (len(x), n)."""
    turns, rest = np.divmod(x, n * b)
    return turns[:, None] * b + np.clip(rest[:, None] - np.arange(n)[None, :] * b, 0, b)


def _blocks(size: int, sizes: Sizes, b: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(lo, hi, owner) of each block of a dim."""
    if b == CHUNKS:
        bounds = np.array(chunk_bounds(size, sizes))
        return bounds[:-1], bounds[1:], np.arange(len(bounds) - 1)
    lo = np.arange(0, size, b)
    return lo, np.minimum(lo + b, size), np.arange(len(lo)) % math.prod(sizes)


@lru_cache(maxsize=65536)
def common(size: int, sizes1: Sizes, b1: int, sizes2: Sizes, b2: int) -> np.ndarray:
    """C, read-only: an array (parts before, parts after)."""
    b1, b2 = (b1 if sizes1 else size), (b2 if sizes2 else size)
    if b1 == CHUNKS and b2 == CHUNKS:
        (lo1, hi1, _), (lo2, hi2, _) = _blocks(size, sizes1, b1), _blocks(size, sizes2, b2)
        found = np.clip(np.minimum(hi1[:, None], hi2[None, :]) - np.maximum(lo1[:, None], lo2[None, :]), 0, None)
    elif b2 == CHUNKS or (b1 != CHUNKS and b1 < b2):
        found = _counted(size, sizes2, b2, sizes1, b1).T
    else:
        found = _counted(size, sizes1, b1, sizes2, b2)
    found = np.ascontiguousarray(found)
    found.flags.writeable = False
    return found


def _counted(size: int, sizes1: Sizes, b1: int, sizes2: Sizes, b2: int) -> np.ndarray:
    """C, block by block of the first cut; b1 >= b2, or the first is CHUNKS."""
    n1, n2 = math.prod(sizes1), math.prod(sizes2)
    period = size if b1 == CHUNKS else math.lcm(b1 * n1, b2 * n2)
    times, rest = divmod(size, period)
    found = np.zeros((n1, n2), dtype=np.int64)
    for length, weight in ((period, times), (rest, 1)):
        if length and weight:
            lo, hi, owner = _blocks(length, sizes1, b1)
            np.add.at(found, owner, weight * (_prefix(hi, n2, b2) - _prefix(lo, n2, b2)))
    return found


def most_leaving(size: int, sizes: Sizes, b1: int, b2: int) -> int:
    """The most elements of a dim that one part must give or get when its block size changes."""
    stay = common(size, sizes, b1, sizes, b2)
    return int(max((stay.sum(axis=1) - stay.diagonal()).max(), (stay.sum(axis=0) - stay.diagonal()).max()))


# -- who sends what ----------------------------------------------------------------------------------------------------------------


def cut_axes(layout: BlockLayout) -> Axes:
    return tuple(a for axes in layout.axes for a in axes)


def involved(before: BlockLayout, after: BlockLayout) -> Axes:
    """The axes along which ranks talk: those of every dim that changes, ascending."""
    changed = {
        a
        for old, new, b1, b2 in zip(before.axes, after.axes, before.blocks, after.blocks, strict=True)
        if (old, b1) != (new, b2)
        for a in (*old, *new)
    }
    return tuple(sorted(changed))


def sender(before: BlockLayout, after: BlockLayout, mesh: Sizes, receiver: Sizes, holding: Sizes) -> Sizes:
    """Which rank gives `receiver` what the ranks that agree with `holding` on the cut axes of `before` hold."""
    cut, cut_after = cut_axes(before), cut_axes(after)
    if all(receiver[a] == holding[a] for a in cut):
        return receiver
    coordinate = list(receiver)
    for a in cut:
        coordinate[a] = holding[a]
    slowest = min(a for a in cut if receiver[a] != holding[a])
    spare = [a for a in range(slowest, len(mesh)) if a not in cut and a in cut_after]  # holders that differ here hold the same
    same = [a for a in range(len(mesh)) if a in cut and a not in cut_after]  # receivers that differ here need the same
    if spare and same:
        i = part_of(tuple(same), mesh, receiver) % math.prod(mesh[a] for a in spare)
        for a in reversed(spare):
            i, coordinate[a] = divmod(i, mesh[a])
    return tuple(coordinate)


def holdings(before: BlockLayout, mesh: Sizes, receiver: Sizes, along: Axes) -> list[Sizes]:
    """The coordinates, one per distinct part, whose parts `receiver` can get along the axes that talk."""
    ranges = [range(mesh[a]) if a in along and a in cut_axes(before) else (receiver[a],) for a in range(len(mesh))]
    return list(product(*ranges))


class Traffic(NamedTuple):
    """Who sends how much to whom in a step: ranks (row-major) and elements; what a rank keeps is left out."""

    senders: np.ndarray
    receivers: np.ndarray
    elements: np.ndarray
    mesh: Sizes

    @property
    def num_ranks(self) -> int:
        return math.prod(self.mesh)

    def by_axis(self, each: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        """(sent, got): elements by (axis, rank); a message crosses the first axis, slowest first, on which its ends differ.

        each: what to count for each message in place of its elements.
        """
        crossed = np.argmax(self._differ(), axis=0)
        found = np.zeros((2, len(self.mesh), self.num_ranks))
        each = self.elements if each is None else each
        np.add.at(found[0], (crossed, self.senders), each)
        np.add.at(found[1], (crossed, self.receivers), each)
        return found[0], found[1]

    def crossed(self) -> Axes:
        """The axes on which the ends of some message differ."""
        return tuple(np.flatnonzero(self._differ().any(axis=1)).tolist())

    def _differ(self) -> np.ndarray:
        """(axes, messages): whether its ends differ there."""
        ends = [np.array(np.unravel_index(end, self.mesh)) for end in (self.senders, self.receivers)]
        return ends[0] != ends[1]

    def most(self) -> int:
        """The most elements that one rank sends, or gets."""
        ends = (self.senders, self.receivers)
        return max(int(np.bincount(end, self.elements, self.num_ranks).max()) for end in ends) if len(self.elements) else 0

    def most_sent(self) -> int:
        return int(np.bincount(self.senders, self.elements, self.num_ranks).max()) if len(self.elements) else 0


def traffic(shape: Sizes, before: BlockLayout, after: BlockLayout, mesh: Sizes) -> Traffic:
    """The traffic of a step that moves data and reduces none: `sender` for all pairs at once."""
    along, cut, cut_after = involved(before, after), cut_axes(before), cut_axes(after)
    coordinate = np.indices(mesh).reshape(len(mesh), -1)[:, :, None]  # of receivers
    talking = sorted(a for a in cut if a in along)
    holding = list(coordinate)
    if talking:
        digits = np.indices([mesh[a] for a in talking]).reshape(len(talking), -1)
        for a, digit in zip(talking, digits, strict=True):
            holding[a] = digit[None, :]
    count = np.ones((1, 1), dtype=np.int64)
    for s, a1, b1, a2, b2 in zip(shape, before.axes, before.blocks, after.axes, after.blocks, strict=True):
        table = common(s, axis_sizes(a1, mesh), b1, axis_sizes(a2, mesh), b2)
        count = count * table[_parts(a1, mesh, holding), _parts(a2, mesh, list(coordinate))]
    itself = np.ones((1, 1), dtype=bool)
    for a in cut:
        itself = itself & (coordinate[a] == holding[a])
    giver = list(holding)
    same = tuple(a for a in range(len(mesh)) if a in cut and a not in cut_after)
    which = _parts(same, mesh, list(coordinate))
    for slowest in talking if same else []:  # the first axis that a message crosses
        spare = tuple(a for a in range(slowest, len(mesh)) if a not in cut and a in cut_after)
        there = coordinate[slowest] != holding[slowest]
        for a in talking[: talking.index(slowest)]:
            there = there & (coordinate[a] == holding[a])
        i = which % math.prod(mesh[a] for a in spare)
        for a in reversed(spare):
            giver[a] = np.where(there, i % mesh[a], giver[a])
            i = i // mesh[a]
    every = tuple(range(len(mesh)))
    receivers = np.arange(math.prod(mesh))[:, None]
    senders = np.where(itself, receivers, _parts(every, mesh, giver))
    senders, receivers, count = np.broadcast_arrays(senders, receivers, count)
    some = (senders != receivers) & (count > 0)
    return Traffic(senders[some], receivers[some], count[some], mesh)


def _parts(axes: Axes, mesh: Sizes, coordinate: list[np.ndarray]) -> np.ndarray:
    """`part_of` for arrays of coordinates."""
    index = np.zeros((1, 1), dtype=np.int64)
    for a in axes:
        index = index * mesh[a] + coordinate[a]
    return index


def most_scattered(shape: Sizes, before: BlockLayout, after: BlockLayout, mesh: Sizes) -> int:
    """The most elements that one rank sends in a reduce_scatter: all of its summands but its own part's."""
    coordinate = list(np.indices(mesh).reshape(len(mesh), -1)[:, None, :])
    held = [np.ones((1, 1), dtype=np.int64) for _ in (before, after)]
    for i, layout in enumerate((before, after)):
        for s, axes, b in zip(shape, layout.axes, layout.blocks, strict=True):
            held[i] = held[i] * extents(s, axis_sizes(axes, mesh), b)[_parts(axes, mesh, coordinate)]
    return int((held[0] - held[1]).max())
