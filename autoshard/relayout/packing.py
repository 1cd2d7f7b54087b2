"""What each rank packs, sends, gets and unpacks in a step: flat indices into local tensors, by the rule of overlap.py.

A rank of the group (those that differ along the step's axes only) sends peer t the elements of its part that `sender` makes it give
to t, both sides in ascending global order:

    outbox = x.flatten()[sends[0]] ++ x.flatten()[sends[1]] ++ ..        to all_to_all_single, with the lengths as split sizes
    y.flatten()[gets[i]] = what member i sent;   y.flatten()[kept[1]] = x.flatten()[kept[0]]

A reduce_scatter sends every member t, itself included, what t will hold, and reduces what it gets. An all_reduce packs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from autoshard.relayout.blocks import CHUNKS, Axes, BlockLayout, Sizes, axis_sizes, chunk_bounds, indices, local_indices, part_of, parts_of
from autoshard.relayout.holdings import holdings, involved, sender
from autoshard.relayout.problems import BlockProblem, BlockStep


@dataclass(frozen=True)
class Packing:
    """One rank's part in a step."""

    group: tuple[int, ...]  # the ranks that talk, ascending; row-major over the mesh
    shape: Sizes  # of its part afterwards
    sends: tuple[np.ndarray, ...]  # per member: flat indices into its part before
    gets: tuple[np.ndarray, ...]  # per member: flat indices into its part afterwards
    kept: tuple[np.ndarray, np.ndarray]  # (before, afterwards)

    @property
    def elements_sent(self) -> int:
        return sum(len(some) for some in self.sends)


def rank_of(coordinate: Sizes, mesh: Sizes) -> int:
    return part_of(tuple(range(len(mesh))), mesh, coordinate)


def coordinate_of(rank: int, mesh: Sizes) -> Sizes:
    return tuple(int(c) for c in np.unravel_index(rank, mesh))


def group_of(rank: int, axes: Axes, mesh: Sizes) -> tuple[int, ...]:
    """The ranks that differ from this one along `axes` only."""
    own = coordinate_of(rank, mesh)
    ranges = [range(n) if a in axes else (own[a],) for a, n in enumerate(mesh)]
    return tuple(rank_of(c, mesh) for c in product(*ranges))


def talking(step: BlockStep) -> Axes:
    """The axes along which a step's ranks talk."""
    return step.axes if step.collective in ("all_reduce", "reduce_scatter", "exchange") else involved(step.before, step.after)


def holds(problem: BlockProblem, layout: BlockLayout, dim: int, points: Sequence[int]) -> list[list[int]]:
    """For every rank and each of the given indices of a dim: 1 where the rank's part has it, else 0."""
    axes, b, size = layout.axes[dim], layout.blocks[dim], problem.shape[dim]
    sizes = axis_sizes(axes, problem.mesh)
    if b == CHUNKS:
        owners = np.searchsorted(np.array(chunk_bounds(size, sizes)), points, side="right") - 1
    else:
        owners = np.array(points) // b % parts_of(axes, problem.mesh) if axes else np.zeros(len(points), dtype=int)
    parts = [part_of(axes, problem.mesh, coordinate) for coordinate in product(*map(range, problem.mesh))]
    return [[int(owner == part) for owner in owners] for part in parts]


def packing(shape: Sizes, mesh: Sizes, step: BlockStep, rank: int) -> Packing:
    """What `rank` does in `step`."""
    group = group_of(rank, talking(step), mesh)
    me = coordinate_of(rank, mesh)
    mine = [len(some) for some in local_indices(shape, step.before, mesh, me)]
    after = tuple(len(some) for some in local_indices(shape, step.after, mesh, me))
    nothing = np.zeros(0, dtype=np.int64)
    if step.collective == "all_reduce":
        return Packing(group, after, (), (), (nothing, nothing))
    sends: dict[int, list[np.ndarray]] = {member: [] for member in group}
    gets: dict[int, list[np.ndarray]] = {member: [] for member in group}
    kept: list[tuple[np.ndarray, np.ndarray]] = []
    for member in group:
        receiver = coordinate_of(member, mesh)
        for giver, holding in _givers(step, mesh, receiver, group):
            if rank not in (giver, member):
                continue
            ours, theirs = _positions(shape, mesh, step.before, holding, step.after, receiver)
            if giver not in sends:
                assert not all(map(len, ours)), f"rank {giver} has what rank {member} needs and is not in its group {group}"
                continue
            if giver == rank and member == rank:
                kept.append((_flat(ours, mine), _flat(theirs, after)))
                if step.collective != "reduce_scatter":
                    continue
            if giver == rank:
                sends[member].append(_flat(ours, mine))
            if member == rank:
                gets[giver].append(_flat(theirs, after))
    both = [np.concatenate([nothing, *some]) for some in zip(*kept)] or [nothing, nothing]
    joined = [tuple(np.concatenate([nothing, *box[member]]) for member in group) for box in (sends, gets)]
    return Packing(group, after, joined[0], joined[1], (both[0], both[1]))


def _givers(step: BlockStep, mesh: Sizes, receiver: Sizes, group: tuple[int, ...]) -> list[tuple[int, Sizes]]:
    """(rank that gives, the coordinate whose part it gives from)."""
    if step.collective == "reduce_scatter":
        return [(member, receiver) for member in group]  # all hold a summand of the same part
    parts = holdings(step.before, mesh, receiver, involved(step.before, step.after))
    return [(rank_of(sender(step.before, step.after, mesh, receiver, part), mesh), part) for part in parts]


def _positions(
    shape: Sizes, mesh: Sizes, before: BlockLayout, holding: Sizes, after: BlockLayout, receiver: Sizes
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Per dim, where what both have lies in the one's part and in the other's."""
    ours, theirs = [], []
    for size, a1, b1, a2, b2 in zip(shape, before.axes, before.blocks, after.axes, after.blocks, strict=True):
        held = indices(size, axis_sizes(a1, mesh), b1, part_of(a1, mesh, holding))
        needed = indices(size, axis_sizes(a2, mesh), b2, part_of(a2, mesh, receiver))
        both = np.intersect1d(held, needed, assume_unique=True)
        ours.append(np.searchsorted(held, both))
        theirs.append(np.searchsorted(needed, both))
    return ours, theirs


def _flat(positions: list[np.ndarray], shape: list[int] | Sizes) -> np.ndarray:
    """Row-major numbers of a product of positions."""
    flat = np.zeros(1, dtype=np.int64)
    for some, n in zip(positions, shape, strict=True):
        flat = (flat[:, None] * n + some[None, :]).reshape(-1)
    return flat
