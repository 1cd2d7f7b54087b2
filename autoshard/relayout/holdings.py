"""The messages of a step: which rank sends how many elements to which, by closed forms.

For one dim, sharded by (sizes1, b1) before and by (sizes2, b2) after,

    C[r, s] = # { j < S : owner1(j) = r, owner2(j) = s }                                                       (`common`)

With F(x, s) = # { j < x : owner2(j) = s } = (x // P) b2 + clamp(x mod P - s b2, 0, b2), P = b2 N2, a block [lo, hi) of the
other sharding adds F(hi, s) - F(lo, s): the cost does not depend on S, and the pattern repeats after lcm(b1 N1, b2 N2).

A shard is a product of indices over the dims, so the number of elements that rank t needs and rank c holds is the product of the C's
(`traffic`). Where several ranks hold the elements, the sender is (`sender`): t itself, if it holds them; else a rank whose coordinate
equals t's on the axes that neither layout shards over, and on the axes before the first (the slowest) axis that the message has to cross;
on the other axes the i-th holder sends to the i-th of the ranks that need the same elements (modulo the number of holders).
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from autoshard.layout import chunk_bounds
from autoshard.relayout.blocks import CHUNKS, Axes, BlockLayout, Sizes, axis_sizes, extents, part_of


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
        table = np.clip(np.minimum(hi1[:, None], hi2[None, :]) - np.maximum(lo1[:, None], lo2[None, :]), 0, None)
    elif b2 == CHUNKS or (b1 != CHUNKS and b1 < b2):
        table = _counted(size, sizes2, b2, sizes1, b1).T
    else:
        table = _counted(size, sizes1, b1, sizes2, b2)
    table = np.ascontiguousarray(table)
    table.flags.writeable = False
    return table


def _counted(size: int, sizes1: Sizes, b1: int, sizes2: Sizes, b2: int) -> np.ndarray:
    """C, summed over the blocks of the first sharding; b1 >= b2, or b1 is CHUNKS."""
    n1, n2 = math.prod(sizes1), math.prod(sizes2)
    period = size if b1 == CHUNKS else math.lcm(b1 * n1, b2 * n2)
    times, rest = divmod(size, period)
    table = np.zeros((n1, n2), dtype=np.int64)
    for length, weight in ((period, times), (rest, 1)):
        if length and weight:
            lo, hi, owner = _blocks(length, sizes1, b1)
            np.add.at(table, owner, weight * (_prefix(hi, n2, b2) - _prefix(lo, n2, b2)))
    return table


def most_leaving(size: int, sizes: Sizes, b1: int, b2: int) -> int:
    """The most elements of a dim that leave or enter one part when the block size changes."""
    stay = common(size, sizes, b1, sizes, b2)
    return int(max((stay.sum(axis=1) - stay.diagonal()).max(), (stay.sum(axis=0) - stay.diagonal()).max()))


# -- senders ---------------------------------------------------------------------------------------------------------------------


def sharding_axes(layout: BlockLayout) -> Axes:
    return tuple(a for axes in layout.axes for a in axes)


def involved(before: BlockLayout, after: BlockLayout) -> Axes:
    """The axes along which ranks communicate: those of every dim that changes, ascending."""
    changed = {
        a
        for old, new, b1, b2 in zip(before.axes, after.axes, before.blocks, after.blocks, strict=True)
        if (old, b1) != (new, b2)
        for a in (*old, *new)
    }
    return tuple(sorted(changed))


def sender(before: BlockLayout, after: BlockLayout, mesh: Sizes, receiver: Sequence[Any], holding: Sequence[Any]) -> Any:
    """The rank that sends to `receiver` elements of the shard at `holding`; only the sharding axes of `before` matter in `holding`.

    The coordinates are numbers, or arrays of them for many pairs at once.
    """
    old, new = sharding_axes(before), sharding_axes(after)
    sending = [holding[a] if a in old else receiver[a] for a in range(len(mesh))]
    same = tuple(a for a in range(len(mesh)) if a in old and a not in new)  # receivers that differ here need the same elements
    reached: Any = True  # as far as the axes before are concerned, the receiver holds the elements itself
    for slowest in sorted(old) if same else []:  # the first axis that a message crosses
        spare = [a for a in range(slowest, len(mesh)) if a not in old and a in new]  # holders that differ here hold the same elements
        crosses, reached = reached & (receiver[slowest] != holding[slowest]), reached & (receiver[slowest] == holding[slowest])
        i = part_of(same, mesh, receiver) % math.prod(mesh[a] for a in spare)
        for a in reversed(spare):
            sending[a] = np.where(crosses, i % mesh[a], sending[a])
            i = i // mesh[a]
    return part_of(tuple(range(len(mesh))), mesh, sending)


def holdings(before: BlockLayout, mesh: Sizes, receiver: Sizes, along: Axes) -> list[Sizes]:
    """The coordinates, one per distinct shard, of the shards that `receiver` can reach along the axes `along`."""
    ranges = [range(mesh[a]) if a in along and a in sharding_axes(before) else (receiver[a],) for a in range(len(mesh))]
    return list(product(*ranges))


class Traffic(NamedTuple):
    """The messages of a step: sending and receiving ranks (row-major) and elements; what a rank keeps is left out."""

    senders: np.ndarray
    receivers: np.ndarray
    elements: np.ndarray
    mesh: Sizes

    @property
    def num_ranks(self) -> int:
        return math.prod(self.mesh)

    def by_axis(self, each: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        """(sent, received): elements by (axis, rank); a message crosses the first axis, slowest first, on which its ends differ.

        each: numbers to add up per message in place of its elements.
        """
        crossed = np.argmax(self._differ(), axis=0)
        sent, received = np.zeros((2, len(self.mesh), self.num_ranks))
        each = self.elements if each is None else each
        np.add.at(sent, (crossed, self.senders), each)
        np.add.at(received, (crossed, self.receivers), each)
        return sent, received

    def crossed(self) -> Axes:
        """The axes on which the ends of some message differ."""
        return tuple(np.flatnonzero(self._differ().any(axis=1)).tolist())

    def _differ(self) -> np.ndarray:
        """(axes, messages): whether the ends of the message differ on the axis."""
        ends = [np.array(np.unravel_index(end, self.mesh)) for end in (self.senders, self.receivers)]
        return ends[0] != ends[1]

    def most(self) -> int:
        """The most elements that one rank sends, or that one rank receives."""
        return max(self.most_sent(), self._most_at(self.receivers))

    def most_sent(self) -> int:
        return self._most_at(self.senders)

    def _most_at(self, ranks: np.ndarray) -> int:
        return int(np.bincount(ranks, self.elements, self.num_ranks).max()) if len(self.elements) else 0


def traffic(shape: Sizes, before: BlockLayout, after: BlockLayout, mesh: Sizes) -> Traffic:
    """The messages of a step without a reduction: `sender` for all pairs of ranks at once."""
    along, old = involved(before, after), sharding_axes(before)
    coordinate = np.indices(mesh).reshape(len(mesh), -1)[:, :, None]  # of receivers
    changing = sorted(a for a in old if a in along)
    holding = list(coordinate)
    if changing:
        digits = np.indices([mesh[a] for a in changing]).reshape(len(changing), -1)
        for a, digit in zip(changing, digits, strict=True):
            holding[a] = digit[None, :]
    count = np.ones((1, 1), dtype=np.int64)
    for s, a1, b1, a2, b2 in zip(shape, before.axes, before.blocks, after.axes, after.blocks, strict=True):
        table = common(s, axis_sizes(a1, mesh), b1, axis_sizes(a2, mesh), b2)
        count = count * table[part_of(a1, mesh, holding), part_of(a2, mesh, coordinate)]
    senders = sender(before, after, mesh, list(coordinate), holding)
    senders, receivers, count = np.broadcast_arrays(senders, np.arange(math.prod(mesh))[:, None], count)
    some = (senders != receivers) & (count > 0)
    return Traffic(senders[some], receivers[some], count[some], mesh)


def most_scattered(shape: Sizes, before: BlockLayout, after: BlockLayout, mesh: Sizes) -> int:
    """The most elements that one rank sends in a reduce_scatter: all its summands except those of its own output shard."""
    coordinate = np.indices(mesh).reshape(len(mesh), -1)[:, None, :]
    held: list[Any] = [1, 1]
    for i, layout in enumerate((before, after)):
        for s, axes, b in zip(shape, layout.axes, layout.blocks, strict=True):
            held[i] = held[i] * extents(s, axis_sizes(axes, mesh), b)[part_of(axes, mesh, coordinate)]
    return int((held[0] - held[1]).max())
