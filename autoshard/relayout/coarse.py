"""A*'s heuristic: a lower bound on the seconds from a state to the target, from a problem without block sizes and order of axes.

A coarse state has for each mesh axis only its use: free (0), sharding dim d (d + 1), or Partial (ndim + 1); code = sum over axes a of
(use) (ndim + 2)^a. The largest shard has at least l(u) = (product of the shape) / (product of the sizes of the sharding axes) elements.
Every step of a Space either leads from one coarse state to another or stays in one; the seconds of a step never fall with more
elements, hence w(l(u)) <= the seconds of the step, and

    h(u) = min over coarse steps u -> v of  w + h(v),    h(target) = 0                                     (`distances`)

never exceeds the seconds of the cheapest route from any state with this code, for even and uneven sizes. (An uneven step is priced
on the largest shard, which has at least l elements.) A change of block size or of the order of axes stays in its coarse state and is
left out.
"""

from functools import lru_cache
from itertools import combinations
from math import inf, prod
from typing import NamedTuple

import numpy as np

from autoshard.relayout.blocks import Axes
from autoshard.relayout.space import Space

MOST = 120_000  # coarse states: 5 axes by 8 dims, 6 axes by 5; for more of them h is 0


class _Steps(NamedTuple):
    """The coarse steps of one kind over one set of axes: codes before and after."""

    kind: str
    axes: Axes
    before: np.ndarray
    after: np.ndarray


@lru_cache(maxsize=64)
def _coarse_steps(ndim: int, num_axes: int, partial: bool) -> tuple[np.ndarray, tuple[_Steps, ...]]:
    """(the use of each axis, per code; the steps)."""
    base = ndim + 2
    codes = np.arange(base**num_axes)
    power = base ** np.arange(num_axes)
    where = codes[:, None] // power % base
    steps = []
    for k in range(1, num_axes + 1):
        for axes in combinations(range(num_axes), k):
            some, weight = where[:, axes], int(power[list(axes)].sum())
            first = some[:, 0]
            is_equal = (some == first[:, None]).all(axis=1)
            is_sharded = ((some > 0) & (some <= ndim)).all(axis=1)
            before = codes[is_sharded]
            steps.append(_Steps("all_gather", axes, before, before - (some[is_sharded] * power[list(axes)]).sum(axis=1)))
            for d in range(1, ndim + 1):
                before = codes[is_equal & is_sharded & (first != d)]
                steps.append(_Steps("all_to_all", axes, before, before + (d - first[before]) * weight))
                if k == 1:
                    before = codes[first == 0]
                    steps.append(_Steps("split", axes, before, before + d * weight))
            if partial:
                before = codes[is_equal & (first == ndim + 1)]
                steps.append(_Steps("all_reduce", axes, before, before - (ndim + 1) * weight))
                steps += [_Steps("reduce_scatter", axes, before, before + (d - ndim - 1) * weight) for d in range(1, ndim + 1)]
    return where, tuple(one for one in steps if len(one.before))


def distances(space: Space, limit: float, buffers: bool) -> list[float] | None:
    """h by code; None where there are too many codes."""
    ndim, mesh, total = space.ndim, space.mesh, prod(space.shape)
    if space.base**space.num_axes > MOST:
        return None
    where, steps = _coarse_steps(ndim, space.num_axes, bool(space.source[-1]))
    sizes = np.array(mesh)
    least = total / np.where((where > 0) & (where <= ndim), sizes, 1).prod(axis=1)
    parts = np.stack([np.where(where == d + 1, sizes, 1).prod(axis=1) for d in range(ndim)])
    unreduced = ((where == ndim + 1) << np.arange(len(mesh))).sum(axis=1)
    source, reduced, target = (space.code(state) for state in (space.source, space.reduced, space.target))
    possible = (parts <= np.array(space.shape)[:, None]).all(axis=0)
    possible |= np.isin(np.arange(len(where)), (source, reduced, target))
    if not buffers:
        possible &= least <= limit
    weights, befores, afters = [], [], []
    for kind, axes, before, after in [*steps, *_slices(space, where, target)]:
        w = space.price(kind, sum(1 << a for a in axes))(least[after if kind == "split" else before])
        fine = possible[before] & possible[after]
        if buffers:
            fine &= least[before] + least[after] <= limit
        weights.append(np.where(fine, w, inf))
        befores.append(before)
        afters.append(after)
    befores.append(np.full(len(space.direct), reduced))
    afters.append(np.array([space.code(step.state) for step in space.direct], dtype=int))
    weights.append(np.array([step.seconds for step in space.direct]))
    before, after, w = np.concatenate(befores), np.concatenate(afters), np.concatenate(weights)
    order = np.argsort(before, kind="stable")
    after, w = after[order], w[order]
    heads, first = np.unique(before[order], return_index=True)
    distinct, groups = np.unique(np.vstack([parts, unreduced]), axis=1, return_inverse=True)
    groups = groups.ravel()  # numpy 2.0 gives it the rank of what it sorted
    pairs = [(1 << a) | (1 << b) for a, b in combinations(range(space.num_axes), 2)]
    swap = np.min([space.price("permute", mask)(least) for mask in pairs], axis=0) if pairs else np.full(len(least), inf)
    h = np.full(len(where), inf)
    h[target] = 0.0
    return _settle(h, heads, first, after, w, groups, distinct.shape[1], np.where(possible, swap, inf)).tolist()


def _slices(space: Space, where: np.ndarray, target: int) -> list[_Steps]:
    """Splits by several axes at once, each axis to the dim that it shards in the target."""
    power = space.base ** np.arange(space.num_axes)
    ends = [a for a in range(space.num_axes) if 0 < where[target, a] <= space.ndim]
    slices = []
    for axes in (some for k in range(2, len(ends) + 1) for some in combinations(ends, k)):
        before = np.flatnonzero((where[:, axes] == 0).all(axis=1))
        slices.append(_Steps("split", axes, before, before + int((where[target, axes] * power[list(axes)]).sum())))
    return slices


def _settle(h, heads, first, after, w, groups, num_groups, swap):
    """h after relaxing every step until no entry changes."""
    while True:
        new = h.copy()
        if len(heads):
            new[heads] = np.minimum(new[heads], np.minimum.reduceat(w + h[after], first))
        best = np.full(num_groups, inf)
        np.minimum.at(best, groups, h)
        np.minimum(new, swap + best[groups], out=new)
        if (new == h).all():
            return h
        h = new
