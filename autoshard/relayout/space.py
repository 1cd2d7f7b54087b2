"""The states of one redistribution problem and every step between two of them.

A state is a tuple: a `Cut` per dim (ordered axes, block size), then the set of Partial axes as a bit mask. Cuts are made once, so
that states compare by identity. `Space.steps` lists what leads out of a state; with M a run of axes, n its size:

    split              a free axis cuts dim j: major (b stays), minor (b / n), or in blocks where j was whole; or several at once, to
                       what the target is on one dim or on all where that is a slice (one copy, not one per axis)
    all_gather         any axes, as long as the rest of each dim's axes is a run: dropped minor ones multiply b, major ones don't
    all_to_all         M, minor or major or all of dim i's axes, goes to dim j as in split
    permute            ranks swap their parts: any axes with the same number of parts and the same blocks in every dim
    change_block_size  dim i in blocks of another size
    all_reduce         any of the Partial axes;    reduce_scatter  any of them, to dim j as in split
    exchange           from the source, reduced, straight to the target or to one cut further by axes that the target leaves free, to be
                       gathered (slow links then carry nothing twice): every rank sends what others need

Block sizes are those that can matter: ceil(S / N), and b_target m with m any product of other axes, from which splits lead to b_target.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, permutations, product
from math import prod
from typing import Any

from autoshard.cost.block_prices import Prices, Seconds
from autoshard.relayout.blocks import CHUNKS, UNSHARDED, Axes, BlockLayout, Sizes, axis_sizes, ceil_div, chunk_block, fits, largest
from autoshard.relayout.holdings import most_leaving
from autoshard.relayout.states import Cut, Found, State

MANY_AXES = 4  # on more, only two axes are swapped at a time, and gathers empty one dim or all


class Space:
    """States of a tensor on a mesh (sizes, none of them 1), priced. base: digits of a state's code."""

    def __init__(self, shape: Sizes, mesh: Sizes, source: BlockLayout, target: BlockLayout, prices: Prices):
        self.shape, self.mesh, self.prices = shape, mesh, prices
        self.ndim, self.num_axes, self.base = len(shape), len(mesh), len(shape) + 2
        self.power = [self.base**a for a in range(self.num_axes)]
        self.cuts: dict[tuple[int, Axes, int], Cut] = {}
        self._prices: dict[tuple[str, int], Seconds] = {}
        self._assigned: dict[tuple, list[tuple[Axes, ...]]] = {}
        self._axes = [tuple(a for a in range(self.num_axes) if mask >> a & 1) for mask in range(1 << self.num_axes)]
        self.target_layout = target
        self.source, self.target = self.state(source), self.state(target)
        self.reduced = (*self.source[:-1], self.target[-1])  # the source, all that is to be reduced reduced
        self.free_split = not prices.honest
        self.direct: list[Found] = []  # exchanges out of `reduced`

    # -- states

    def cut(self, dim: int, axes: Axes, block: int) -> Cut:
        found = self.cuts.get((dim, axes, block))
        if found is None:
            sizes = axis_sizes(axes, self.mesh)
            code = (dim + 1) * sum(self.power[a] for a in axes)
            found = Cut(dim, axes, block, prod(sizes), largest(self.shape[dim], sizes, block), code)
            self.cuts[dim, axes, block] = found
        return found

    def state(self, layout: BlockLayout) -> State:
        cuts = (self.cut(d, axes, b) for d, (axes, b) in enumerate(zip(layout.axes, layout.blocks, strict=True)))
        return (*cuts, sum(1 << a for a in layout.partial))

    def layout(self, state: State, reduce_op: str = "sum") -> BlockLayout:
        cuts = state[:-1]
        return BlockLayout(tuple(c.axes for c in cuts), tuple(c.block for c in cuts), self._axes[state[-1]], reduce_op)

    def elements(self, state: State) -> int:
        return prod([c.size for c in state[:-1]])

    def code(self, state: State) -> int:
        partial = sum(self.power[a] for a in self._axes[state[-1]])
        return sum([c.code for c in state[:-1]]) + (self.ndim + 1) * partial

    def price(self, kind: str, mask: int) -> Seconds:
        found = self._prices.get((kind, mask))
        if found is None:
            found = self._prices[kind, mask] = self.prices.of(kind, self._axes[mask])
        return found

    # -- parts of steps: what one dim can become, made once per cut

    def blocks(self, dim: int, axes: Axes) -> list[int]:
        """The block sizes for a dim cut by `axes`, largest first."""
        size, n = self.shape[dim], prod(axis_sizes(axes, self.mesh))
        others = [m for a, m in enumerate(self.mesh) if a not in axes]
        products = {prod(some) for k in range(len(others) + 1) for some in combinations(others, k)}
        wanted = self.target_layout.blocks[dim]
        found = {ceil_div(size, n)} | {wanted * m for m in products if wanted > 0}
        chunked = [CHUNKS] if wanted == CHUNKS and chunk_block(size, axis_sizes(axes, self.mesh)) == CHUNKS else []
        return [*sorted((b for b in found if fits(size, n, b)), reverse=True), *chunked]

    def inserts(self, cut: Cut, axes: Axes) -> list[Cut]:
        """What `axes`, uncut so far, can make of a dim."""
        found = cut.inserts.get(axes)
        if found is None:
            found = cut.inserts[axes] = list(self._insert(cut, axes))
        return found

    def _insert(self, cut: Cut, axes: Axes) -> Iterator[Cut]:
        d, size = cut.dim, self.shape[cut.dim]
        n = prod(axis_sizes(axes, self.mesh))
        if cut.n * n > size:
            return
        if not cut.axes:
            for b in self.blocks(d, axes):
                yield self.cut(d, axes, b)
            return
        if cut.block != CHUNKS:
            if fits(size, cut.n * n, cut.block):
                yield self.cut(d, axes + cut.axes, cut.block)
            if cut.block % n == 0 and fits(size, cut.n * n, cut.block // n):
                yield self.cut(d, cut.axes + axes, cut.block // n)
        if cut.block == chunk_block(size, axis_sizes(cut.axes, self.mesh)):  # parts of parts, as torch.chunk makes them
            block = chunk_block(size, axis_sizes(cut.axes + axes, self.mesh))
            if block == CHUNKS or block * n != cut.block:
                yield self.cut(d, cut.axes + axes, block)

    def rest(self, cut: Cut, lo: int, hi: int) -> Cut | None:
        """The dim when only axes[lo:hi] cut it any more; None where that is no layout."""
        axes = cut.axes[lo:hi]
        if not axes:
            return self.cut(cut.dim, (), UNSHARDED)
        if cut.block == CHUNKS:
            return None if lo else self.cut(cut.dim, axes, chunk_block(self.shape[cut.dim], axis_sizes(axes, self.mesh)))
        block = cut.block * prod(axis_sizes(cut.axes[hi:], self.mesh))
        return self.cut(cut.dim, axes, block) if fits(self.shape[cut.dim], prod(axis_sizes(axes, self.mesh)), block) else None

    def removals(self, cut: Cut) -> list[tuple[Axes, int, Cut]]:
        """(axes, their mask, what is left): the minor ones, the major ones, or all."""
        if cut.removals is None:
            k = len(cut.axes)
            runs = [(0, i) for i in range(k)] + [(i, k) for i in range(1, k)]
            left = [(cut.axes[hi:] or cut.axes[:lo], self.rest(cut, lo, hi)) for lo, hi in runs]
            cut.removals = [(axes, sum(1 << a for a in axes), rest) for axes, rest in left if rest is not None]
        return cut.removals

    def gathers(self, cut: Cut) -> list[tuple[int, Cut]]:
        """(gathered axes, what is left), nothing gathered first."""
        if cut.gathers is None:
            k = len(cut.axes)
            runs = [(lo, hi) for lo in range(k) for hi in range(lo + 1, k + 1) if (lo, hi) != (0, k)] + ([(0, 0)] if k else [])
            rests = [self.rest(cut, lo, hi) for lo, hi in runs]
            cut.gathers = [(0, cut), *((cut.mask & ~rest.mask, rest) for rest in rests if rest is not None)]
        return cut.gathers

    def reblocks(self, cut: Cut) -> list[tuple[Cut, int]]:
        """(the dim in blocks of another size, the elements of it that leave a part)."""
        if cut.reblocks is None:
            sizes = axis_sizes(cut.axes, self.mesh)
            others = [b for b in self.blocks(cut.dim, cut.axes) if b != cut.block] if cut.axes else []
            leaving = most_leaving if self.prices.honest else lambda *_: 0
            cut.reblocks = [(self.cut(cut.dim, cut.axes, b), leaving(self.shape[cut.dim], sizes, cut.block, b)) for b in others]
        return cut.reblocks

    # -- steps

    def steps(self, state: State) -> Iterator[Found]:
        """Every step out of a state."""
        cuts, partial = state[:-1], state[-1]
        held = self.elements(state)
        yield from self._splits(state, cuts, partial, held)
        yield from self._all_to_alls(state, cuts, held)
        yield from self._gathers(cuts, partial, held)
        yield from self._permutes(cuts, partial, held)
        yield from self._block_changes(state, cuts, held)
        if partial:
            yield from self._reductions(state, cuts, partial, held)
        if state == self.reduced:
            yield from self.direct

    def exchanges(self) -> list[State]:
        """What an exchange may lead to: the target, and the target cut further by axes that it leaves free, to be gathered."""
        used = self.used(self.target)
        free = tuple(a for a in range(self.num_axes) if not used >> a & 1)
        found = {self.target: None}
        for axes in dict.fromkeys(some for some in (free, free[1:]) if some):
            for d, cut in enumerate(self.target[:-1]):
                for new in self.inserts(cut, axes):
                    found[(*self.target[:d], new, *self.target[d + 1 :])] = None
        return [state for state in found if state != self.reduced]

    def used(self, state: State) -> int:
        """The axes, as bits, that cut a dim or are Partial."""
        mask = state[-1]
        for c in state[:-1]:
            mask |= c.mask
        return mask

    def _splits(self, state: State, cuts: State, partial: int, held: int) -> Iterator[Found]:
        used = self.used(state)
        write = None if self.free_split else self.price("split", 0)
        for a in range(self.num_axes):
            if not used >> a & 1:
                for d, cut in enumerate(cuts):
                    for new in self.inserts(cut, (a,)):
                        seconds = 0.0 if write is None else write(held // cut.size * new.size)
                        yield Found(seconds, (*state[:d], new, *state[d + 1 :]), "split", 1 << a, (d,))
        if write is not None:
            yield from self._slices(state, ~used, held, write)

    def _slices(self, state: State, free: int, held: int, write: Seconds) -> Iterator[Found]:
        """Splits by two or more axes, to the target's own cuts."""
        cuts = [self._slice(c, t, free) for c, t in zip(state[:-1], self.target)]
        dims = [d for d, cut in enumerate(cuts) if cut is not None]
        for some in [*((d,) for d in dims), *([tuple(dims)] if len(dims) > 1 else [])]:
            new = [t if d in some else c for d, (c, t) in enumerate(zip(state[:-1], self.target))]
            mask = sum(t.mask & ~c.mask for c, t in zip(state[:-1], new))
            if mask.bit_count() > 1:
                yield Found(write(prod([c.size for c in new])), (*new, state[-1]), "split", mask, some)

    def _slice(self, cut: Cut, target: Cut, free: int) -> Cut | None:
        """The target's cut of a dim where free axes alone lead to it, as minor or as major ones."""
        if cut is target or len(target.axes) <= len(cut.axes):
            return None
        k = len(target.axes) - len(cut.axes)
        for axes, kept in ((target.axes[-k:], target.axes[:-k]), (target.axes[:k], target.axes[k:])):
            if kept == cut.axes and all(free >> a & 1 for a in axes) and any(new is target for new in self.inserts(cut, axes)):
                return target
        return None

    def _all_to_alls(self, state: State, cuts: State, held: int) -> Iterator[Found]:
        both = self.prices.honest
        for i, cut in enumerate(cuts):
            if not cut.axes:
                continue
            for axes, mask, rest in self.removals(cut):
                price = self.price("all_to_all", mask)
                without = (*state[:i], rest, *state[i + 1 :])
                others = held // cut.size * rest.size
                seconds = price(held)
                for j, other in enumerate(cuts):
                    if j != i:
                        for new in self.inserts(other, axes):
                            after = others // other.size * new.size if both else held
                            yield Found(
                                seconds if after <= held else price(after),
                                (*without[:j], new, *without[j + 1 :]), "all_to_all", mask, (i, j),
                            )  # fmt: skip

    def _gathers(self, cuts: State, partial: int, held: int) -> Iterator[Found]:
        if self.num_axes > MANY_AXES:
            some = [[(m, d, rest) for m, rest in self.gathers(cut) if m] for d, cut in enumerate(cuts)]
            choices: Any = [[(m, rest) if d == e else (0, c) for e, c in enumerate(cuts)] for ones in some for m, d, rest in ones]
            choices.append([self.gathers(cut)[-1] for cut in cuts])
        else:
            choices = product(*(self.gathers(cut) for cut in cuts))
        for choice in choices:
            mask = 0
            for m, _ in choice:
                mask |= m
            if mask:
                seconds = self.price("all_gather", mask)(held)
                state = (*[rest for _, rest in choice], partial)
                yield Found(seconds, state, "all_gather", mask, tuple([d for d, (m, _) in enumerate(choice) if m]))

    def _permutes(self, cuts: State, partial: int, held: int) -> Iterator[Found]:
        parts = tuple([c.n if c.block != CHUNKS else c.axes for c in cuts])
        for assigned in self._assignments(parts, partial, cuts):
            mask, state, dims = 0, [], []
            for d, (axes, cut) in enumerate(zip(assigned, cuts)):
                if axes == cut.axes:
                    state.append(cut)
                    continue
                new = self.cut(d, axes, cut.block)
                mask |= cut.mask | new.mask
                state.append(new)
                dims.append(d)
            if mask:
                yield Found(self.price("permute", mask)(held), (*state, partial), "permute", mask, tuple(dims))

    def _assignments(self, parts: tuple, partial: int, cuts: State) -> list[tuple[Axes, ...]]:
        """All ways to cut each dim into as many parts by other axes."""
        if self.num_axes > MANY_AXES:
            return list(self._swaps(cuts, partial))
        found = self._assigned.get((parts, partial))
        if found is None:
            found = self._assigned[parts, partial] = list(self._assign(parts, self._axes[len(self._axes) - 1 & ~partial]))
        return found

    def _assign(self, parts: tuple, axes: Axes) -> Iterator[tuple[Axes, ...]]:
        if not parts:
            yield ()
            return
        if parts[0] == 1 or isinstance(parts[0], tuple):
            firsts: list[Axes] = [() if parts[0] == 1 else parts[0]]
        else:
            runs = (run for k in range(1, len(axes) + 1) for run in permutations(axes, k))
            firsts = [run for run in runs if prod(axis_sizes(run, self.mesh)) == parts[0]]
        for first in firsts:
            if all(a in axes for a in first):
                for rest in self._assign(parts[1:], tuple(a for a in axes if a not in first)):
                    yield (first, *rest)

    def _swaps(self, cuts: State, partial: int) -> Iterator[tuple[Axes, ...]]:
        for p, q in combinations([a for a in range(self.num_axes) if not partial >> a & 1], 2):
            if self.mesh[p] == self.mesh[q]:
                swap = {p: q, q: p}
                swapped = tuple(tuple(swap.get(a, a) for a in c.axes) for c in cuts)
                if all(c.block != CHUNKS or c.axes == axes for c, axes in zip(cuts, swapped)):
                    yield swapped

    def _block_changes(self, state: State, cuts: State, held: int) -> Iterator[Found]:
        for d, cut in enumerate(cuts):
            if cut.axes:
                price = self.price("change_block_size", cut.mask)
                for new, leaving in self.reblocks(cut):
                    seconds = price(held // cut.size * leaving if self.prices.honest else held)
                    yield Found(seconds, (*state[:d], new, *state[d + 1 :]), "change_block_size", cut.mask, (d,))

    def _reductions(self, state: State, cuts: State, partial: int, held: int) -> Iterator[Found]:
        mask = partial
        while mask:
            left = partial & ~mask
            yield Found(self.price("all_reduce", mask)(held), (*cuts, left), "all_reduce", mask, ())
            seconds = self.price("reduce_scatter", mask)(held)
            for d, cut in enumerate(cuts):
                for new in self.inserts(cut, self._axes[mask]):
                    yield Found(seconds, (*state[:d], new, *state[d + 1 : -1], left), "reduce_scatter", mask, (d,))
            mask = (mask - 1) & partial
