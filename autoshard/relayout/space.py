"""The search space of one redistribution problem: its states and all steps between two of them.

A state is a tuple: a `DimSharding` per dim (ordered axes, block size), then the set of Partial axes as a bit mask. Each DimSharding
exists once, so that states compare by identity. `Space.steps` lists the steps out of a state; with M a run of axes and n its size:

    split              a free axis shards dim j: as the major axis (b stays), as the minor axis (b / n), or in blocks where j was not
                       sharded. Several axes at once where that leads to the target on one dim, or on all dims, by a slice: that is
                       one copy instead of one per axis
    all_gather         any axes, as long as the remaining axes of each dim are a run; gathered minor axes multiply b, major ones do not
    all_to_all         M, the minor or major or all axes of dim i, moves to dim j as in split
    permute            ranks exchange their shards: any axes with the same number of parts and the same blocks in every dim
    change_block_size  dim i in blocks of another size
    all_reduce         any of the Partial axes;    reduce_scatter  any of them, to dim j as in split
    exchange           from the source, reduced, in one step to the target, or to the target sharded further by axes that it leaves
                       free, which are gathered afterwards (so that slow links carry nothing twice): every rank sends what others need

The block sizes are those that a cheapest route can use: ceil(S / N), and b_target m with m any product of other axes, from which
splits lead to b_target.
"""

from collections.abc import Iterator
from functools import cache
from itertools import combinations, permutations, product
from math import prod
from typing import Any, NamedTuple

from autoshard.cost import Prices, Seconds
from autoshard.relayout.blocks import CHUNKS, UNSHARDED, Axes, BlockLayout, Sizes, axis_sizes, ceil_div, chunk_block, fits, largest
from autoshard.relayout.holdings import most_leaving

State = tuple[Any, ...]  # a DimSharding per dim, then an int


class DimSharding:
    """How one dim is sharded; equal ones are the same object. `mask`: its axes as bits; `code`: see coarse.py."""

    __slots__ = ("axes", "block", "code", "dim", "mask", "n", "size")

    def __init__(self, dim: int, axes: Axes, block: int, n: int, size: int, code: int):
        self.dim, self.axes, self.block, self.n, self.size, self.code = dim, axes, block, n, size, code
        self.mask = sum(1 << a for a in axes)


class CandidateStep(NamedTuple):
    """A step that leads out of a state, and the state that it leads to."""

    seconds: float
    state: State
    kind: str
    mask: int
    dims: tuple[int, ...]


MANY_AXES = 4  # on meshes with more axes, only two axes are swapped at a time, and a gather replicates one dim or all dims


class Space:
    """States of a tensor on a mesh (its sizes, none of them 1) and the priced steps between them. base: of the digits of a state's code."""

    def __init__(self, shape: Sizes, mesh: Sizes, source: BlockLayout, target: BlockLayout, prices: Prices):
        self.shape, self.mesh, self.prices = shape, mesh, prices
        self.ndim, self.num_axes, self.base = len(shape), len(mesh), len(shape) + 2
        self.power = [self.base**a for a in range(self.num_axes)]
        for name in ("sharding", "price", "inserts", "removals", "gathers", "reblocks", "assigned"):  # computed once
            setattr(self, name, cache(getattr(self, name)))
        self._axes = [tuple(a for a in range(self.num_axes) if mask >> a & 1) for mask in range(1 << self.num_axes)]
        self.target_layout = target
        self.source, self.target = self.state(source), self.state(target)
        self.reduced = (*self.source[:-1], self.target[-1])  # the source after the reductions
        self.direct: list[CandidateStep] = []  # exchanges out of `reduced`

    # -- states

    def sharding(self, dim: int, axes: Axes, block: int) -> DimSharding:
        sizes = axis_sizes(axes, self.mesh)
        code = (dim + 1) * sum(self.power[a] for a in axes)
        return DimSharding(dim, axes, block, prod(sizes), largest(self.shape[dim], sizes, block), code)

    def state(self, layout: BlockLayout) -> State:
        shardings = (self.sharding(d, axes, b) for d, (axes, b) in enumerate(zip(layout.axes, layout.blocks, strict=True)))
        return (*shardings, sum(1 << a for a in layout.partial))

    def layout(self, state: State, reduce_op: str = "sum") -> BlockLayout:
        shardings = state[:-1]
        return BlockLayout(tuple(c.axes for c in shardings), tuple(c.block for c in shardings), self._axes[state[-1]], reduce_op)

    def elements(self, state: State) -> int:
        return prod([c.size for c in state[:-1]])

    def code(self, state: State) -> int:
        partial = sum(self.power[a] for a in self._axes[state[-1]])
        return sum([c.code for c in state[:-1]]) + (self.ndim + 1) * partial

    def price(self, kind: str, mask: int) -> Seconds:
        return self.prices.of(kind, self._axes[mask])

    # -- the shardings that one dim can get in a step

    def blocks(self, dim: int, axes: Axes) -> list[int]:
        """The block sizes for a dim sharded by `axes`, largest first."""
        size, n = self.shape[dim], prod(axis_sizes(axes, self.mesh))
        others = [m for a, m in enumerate(self.mesh) if a not in axes]
        products = {prod(some) for k in range(len(others) + 1) for some in combinations(others, k)}
        final = self.target_layout.blocks[dim]
        blocks = {ceil_div(size, n)} | {final * m for m in products if final > 0}
        chunked = [CHUNKS] if final == CHUNKS and chunk_block(size, axis_sizes(axes, self.mesh)) == CHUNKS else []
        return [*sorted((b for b in blocks if fits(size, n, b)), reverse=True), *chunked]

    def inserts(self, sharding: DimSharding, axes: Axes) -> list[DimSharding]:
        """The shardings of a dim after a split by `axes`, which were free."""
        d, size, major, minor = sharding.dim, self.shape[sharding.dim], axes + sharding.axes, sharding.axes + axes
        n, new = prod(axis_sizes(axes, self.mesh)), list[DimSharding]()
        if sharding.n * n > size:
            return new
        if not sharding.axes:
            return [self.sharding(d, axes, b) for b in self.blocks(d, axes)]
        if sharding.block != CHUNKS:
            if fits(size, sharding.n * n, sharding.block):
                new.append(self.sharding(d, major, sharding.block))
            if sharding.block % n == 0 and fits(size, sharding.n * n, sharding.block // n):
                new.append(self.sharding(d, minor, sharding.block // n))
        if sharding.block == chunk_block(size, axis_sizes(sharding.axes, self.mesh)):  # torch.chunk of each part
            block = chunk_block(size, axis_sizes(minor, self.mesh))
            if block == CHUNKS or block * n != sharding.block:
                new.append(self.sharding(d, minor, block))
        return new

    def rest(self, sharding: DimSharding, lo: int, hi: int) -> DimSharding | None:
        """The dim sharded by axes[lo:hi] alone; None where that is no layout."""
        d, size, axes = sharding.dim, self.shape[sharding.dim], sharding.axes[lo:hi]
        sizes = axis_sizes(axes, self.mesh)
        if not axes:
            return self.sharding(d, (), UNSHARDED)
        if sharding.block == CHUNKS:
            return None if lo else self.sharding(d, axes, chunk_block(size, sizes))
        block = sharding.block * prod(axis_sizes(sharding.axes[hi:], self.mesh))
        return self.sharding(d, axes, block) if fits(size, prod(sizes), block) else None

    def removals(self, sharding: DimSharding) -> list[tuple[Axes, int, DimSharding]]:
        """(axes, their mask, the sharding without them): the minor axes, the major axes, or all."""
        k = len(sharding.axes)
        runs = [(0, i) for i in range(k)] + [(i, k) for i in range(1, k)]
        left = [(sharding.axes[hi:] or sharding.axes[:lo], self.rest(sharding, lo, hi)) for lo, hi in runs]
        return [(axes, sum(1 << a for a in axes), rest) for axes, rest in left if rest is not None]

    def gathers(self, sharding: DimSharding) -> list[tuple[int, DimSharding]]:
        """(mask of the gathered axes, the sharding without them); the first entry gathers nothing."""
        k = len(sharding.axes)
        runs = [(lo, hi) for lo in range(k) for hi in range(lo + 1, k + 1) if (lo, hi) != (0, k)] + ([(0, 0)] if k else [])
        rests = [self.rest(sharding, lo, hi) for lo, hi in runs]
        return [(0, sharding), *((sharding.mask & ~rest.mask, rest) for rest in rests if rest is not None)]

    def reblocks(self, sharding: DimSharding) -> list[tuple[DimSharding, int]]:
        """(the dim in blocks of another size, the number of its elements that leave a part)."""
        d, axes, block = sharding.dim, sharding.axes, sharding.block
        size, sizes = self.shape[d], axis_sizes(axes, self.mesh)
        others = [b for b in self.blocks(d, axes) if b != block] if axes else []
        leaving = most_leaving if self.prices.honest else lambda *_: 0
        return [(self.sharding(d, axes, b), leaving(size, sizes, block, b)) for b in others]

    # -- steps

    def steps(self, state: State) -> Iterator[CandidateStep]:
        """Every step out of a state."""
        shardings, partial = state[:-1], state[-1]
        held = self.elements(state)
        yield from self._splits(state, shardings, held)
        yield from self._all_to_alls(state, shardings, held)
        yield from self._gathers(shardings, partial, held)
        yield from self._permutes(shardings, partial, held)
        yield from self._block_changes(state, shardings, held)
        if partial:
            yield from self._reductions(state, shardings, partial, held)
        if state == self.reduced:
            yield from self.direct

    def exchanges(self) -> list[State]:
        """The states after an exchange: the target, and the target sharded further by axes that it leaves free, to be gathered."""
        used = self.used(self.target)
        free = tuple(a for a in range(self.num_axes) if not used >> a & 1)
        states = {self.target: None}
        for axes in dict.fromkeys(some for some in (free, free[1:]) if some):
            for d, sharding in enumerate(self.target[:-1]):
                for new in self.inserts(sharding, axes):
                    states[(*self.target[:d], new, *self.target[d + 1 :])] = None
        return [state for state in states if state != self.reduced]

    def used(self, state: State) -> int:
        """The axes, as bits, that shard a dim or are Partial."""
        mask = state[-1]
        for c in state[:-1]:
            mask |= c.mask
        return mask

    def _splits(self, state: State, shardings: State, held: int) -> Iterator[CandidateStep]:
        used = self.used(state)
        write = self.price("split", 0)
        for a in range(self.num_axes):
            if not used >> a & 1:
                for d, sharding in enumerate(shardings):
                    for new in self.inserts(sharding, (a,)):
                        seconds = write(held // sharding.size * new.size)
                        yield CandidateStep(seconds, (*state[:d], new, *state[d + 1 :]), "split", 1 << a, (d,))
        yield from self._slices(state, ~used, write)

    def _slices(self, state: State, free: int, write: Seconds) -> Iterator[CandidateStep]:
        """Splits by two or more axes, each dim to its sharding in the target."""
        shardings = [self._slice(c, t, free) for c, t in zip(state[:-1], self.target)]
        dims = [d for d, sharding in enumerate(shardings) if sharding is not None]
        for some in [*((d,) for d in dims), *([tuple(dims)] if len(dims) > 1 else [])]:
            new = [t if d in some else c for d, (c, t) in enumerate(zip(state[:-1], self.target))]
            mask = sum(t.mask & ~c.mask for c, t in zip(state[:-1], new))
            if mask.bit_count() > 1:
                yield CandidateStep(write(prod([c.size for c in new])), (*new, state[-1]), "split", mask, some)

    def _slice(self, sharding: DimSharding, target: DimSharding, free: int) -> DimSharding | None:
        """The target's sharding of a dim, where a split by free axes leads to it, as minor or as major axes; else None."""
        if sharding is target or len(target.axes) <= len(sharding.axes):
            return None
        k = len(target.axes) - len(sharding.axes)
        for axes, kept in ((target.axes[-k:], target.axes[:-k]), (target.axes[:k], target.axes[k:])):
            if kept == sharding.axes and all(free >> a & 1 for a in axes) and any(new is target for new in self.inserts(sharding, axes)):
                return target
        return None

    def _all_to_alls(self, state: State, shardings: State, held: int) -> Iterator[CandidateStep]:
        both = self.prices.honest
        for i, sharding in enumerate(shardings):
            if not sharding.axes:
                continue
            for axes, mask, rest in self.removals(sharding):
                price = self.price("all_to_all", mask)
                without = (*state[:i], rest, *state[i + 1 :])
                others = held // sharding.size * rest.size
                seconds = price(held)
                for j, other in enumerate(shardings):
                    if j != i:
                        for new in self.inserts(other, axes):
                            after = others // other.size * new.size if both else held
                            yield CandidateStep(
                                seconds if after <= held else price(after),
                                (*without[:j], new, *without[j + 1 :]), "all_to_all", mask, (i, j),
                            )  # fmt: skip

    def _gathers(self, shardings: State, partial: int, held: int) -> Iterator[CandidateStep]:
        if self.num_axes > MANY_AXES:
            some = [[(m, d, rest) for m, rest in self.gathers(sharding) if m] for d, sharding in enumerate(shardings)]
            choices: Any = [[(m, rest) if d == e else (0, c) for e, c in enumerate(shardings)] for ones in some for m, d, rest in ones]
            choices.append([self.gathers(sharding)[-1] for sharding in shardings])
        else:
            choices = product(*(self.gathers(sharding) for sharding in shardings))
        for choice in choices:
            mask = 0
            for m, _ in choice:
                mask |= m
            if mask:
                seconds = self.price("all_gather", mask)(held)
                state = (*[rest for _, rest in choice], partial)
                yield CandidateStep(seconds, state, "all_gather", mask, tuple([d for d, (m, _) in enumerate(choice) if m]))

    def _permutes(self, shardings: State, partial: int, held: int) -> Iterator[CandidateStep]:
        parts = tuple([c.n if c.block != CHUNKS else c.axes for c in shardings])
        for assigned in self._swaps(shardings, partial) if self.num_axes > MANY_AXES else self.assigned(parts, partial):
            mask, state, dims = 0, [], []
            for d, (axes, sharding) in enumerate(zip(assigned, shardings)):
                if axes == sharding.axes:
                    state.append(sharding)
                    continue
                new = self.sharding(d, axes, sharding.block)
                mask |= sharding.mask | new.mask
                state.append(new)
                dims.append(d)
            if mask:
                yield CandidateStep(self.price("permute", mask)(held), (*state, partial), "permute", mask, tuple(dims))

    def assigned(self, parts: tuple, partial: int) -> list[tuple[Axes, ...]]:
        """All ways to shard each dim into the same number of parts by other axes."""
        return list(self._assign(parts, self._axes[len(self._axes) - 1 & ~partial]))

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

    def _swaps(self, shardings: State, partial: int) -> Iterator[tuple[Axes, ...]]:
        for p, q in combinations([a for a in range(self.num_axes) if not partial >> a & 1], 2):
            if self.mesh[p] == self.mesh[q]:
                swap = {p: q, q: p}
                swapped = tuple(tuple(swap.get(a, a) for a in c.axes) for c in shardings)
                if all(c.block != CHUNKS or c.axes == axes for c, axes in zip(shardings, swapped)):
                    yield swapped

    def _block_changes(self, state: State, shardings: State, held: int) -> Iterator[CandidateStep]:
        for d, sharding in enumerate(shardings):
            if sharding.axes:
                price = self.price("change_block_size", sharding.mask)
                for new, leaving in self.reblocks(sharding):
                    seconds = price(held // sharding.size * leaving if self.prices.honest else held)
                    yield CandidateStep(seconds, (*state[:d], new, *state[d + 1 :]), "change_block_size", sharding.mask, (d,))

    def _reductions(self, state: State, shardings: State, partial: int, held: int) -> Iterator[CandidateStep]:
        mask = partial
        while mask:
            left = partial & ~mask
            yield CandidateStep(self.price("all_reduce", mask)(held), (*shardings, left), "all_reduce", mask, ())
            seconds = self.price("reduce_scatter", mask)(held)
            for d, sharding in enumerate(shardings):
                for new in self.inserts(sharding, self._axes[mask]):
                    yield CandidateStep(seconds, (*state[:d], new, *state[d + 1 : -1], left), "reduce_scatter", mask, (d,))
            mask = (mask - 1) & partial
