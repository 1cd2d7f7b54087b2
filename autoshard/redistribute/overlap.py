"""How much of what a rank needs it holds already, by closed forms, and therefore who sends what in a step.

For one dim, cut as (sizes1, b1) before and (sizes2, b2) after,

    C[r, s] = # { j < S : owner1(j) = r, owner2(j) = s }                                                       (`common`)

With F(x, s) = # { j < x : owner2(j) = s } = (x // P) b2 + clamp(x mod P - s b2, 0, b2), P = b2 N2, a block [lo, hi) of the other
cut adds F(hi, s) - F(lo, s): no element is looked at, and the pattern repeats after lcm(b1 N1, b2 N2).

A rank holds and needs products over dims, so what t needs of what c holds is the product of the C's (`traffic`). Who sends, where
several hold the same: t itself, if it can; else the holder whose coordinate agrees with t's on the axes that neither layout cuts,
and on the others the i-th holder serves the i-th of those who need the same (modulo their number) (`sender`).
"""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import product

import numpy as np

from .blocks import CHUNKS, Axes, BlockLayout, Sizes, axis_sizes, chunk_bounds, part_of


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
    spare = [a for a in range(len(mesh)) if a not in cut and a in cut_after]  # holders that differ here hold the same
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


def traffic(shape: Sizes, before: BlockLayout, after: BlockLayout, mesh: Sizes) -> dict[tuple[Sizes, Sizes], int]:
    """{(sender, receiver): elements} of a step that moves data and reduces none; what a rank keeps is left out."""
    tables = [
        common(s, axis_sizes(a1, mesh), b1, axis_sizes(a2, mesh), b2)
        for s, a1, b1, a2, b2 in zip(shape, before.axes, before.blocks, after.axes, after.blocks, strict=True)
    ]
    along = involved(before, after)
    found: dict[tuple[Sizes, Sizes], int] = {}
    for receiver in product(*map(range, mesh)):
        needs = [part_of(axes, mesh, receiver) for axes in after.axes]
        for holding in holdings(before, mesh, receiver, along):
            count = 1
            for table, axes, need in zip(tables, before.axes, needs, strict=True):
                count *= int(table[part_of(axes, mesh, holding), need])
                if not count:
                    break
            giver = sender(before, after, mesh, receiver, holding) if count else receiver
            if giver != receiver:
                found[giver, receiver] = found.get((giver, receiver), 0) + count
    return found


def most_sent(flows: dict[tuple[Sizes, Sizes], int]) -> int:
    """The most elements that one rank sends."""
    sent: dict[Sizes, int] = {}
    for (giver, _), count in flows.items():
        sent[giver] = sent.get(giver, 0) + count
    return max(sent.values(), default=0)
