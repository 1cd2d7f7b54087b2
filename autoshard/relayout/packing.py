"""The messages of one rank in a step, as flat indices into its input shard and its output shard.

The group of a rank are the ranks whose coordinates differ along the step's axes only. The rank sends to member t the elements of its
input shard x for which `holdings.sender` selects it as the sender to t; both sides are in ascending global order:

    outbox = x.flatten()[sends[0]] ++ x.flatten()[sends[1]] ++ ..        to all_to_all_single, with the lengths as split sizes
    y.flatten()[gets[i]] = message of member i;   y.flatten()[kept[1]] = x.flatten()[kept[0]]

In a reduce_scatter a rank sends to every member t, itself included, the elements of t's output shard y, and reduces the messages that
it receives. An all_reduce packs nothing.
"""

from dataclasses import dataclass
from itertools import product

import numpy as np

from autoshard.relayout.blocks import Axes, BlockLayout, Sizes, axis_sizes, indices, local_indices, part_of
from autoshard.relayout.holdings import holdings, involved, sender
from autoshard.relayout.problems import BlockStep


@dataclass(frozen=True)
class Packing:
    """The messages of one rank in a step."""

    group: tuple[int, ...]  # the ranks that exchange messages, ascending; row-major over the mesh
    shape: Sizes  # of its output shard
    sends: tuple[np.ndarray, ...]  # per member: flat indices into its input shard
    gets: tuple[np.ndarray, ...]  # per member: flat indices into its output shard
    kept: tuple[np.ndarray, np.ndarray]  # flat indices into (input shard, output shard)

    @property
    def elements_sent(self) -> int:
        return sum(len(some) for some in self.sends)


def coordinate_of(rank: int, mesh: Sizes) -> Sizes:
    return tuple(int(c) for c in np.unravel_index(rank, mesh))


def group_of(rank: int, axes: Axes, mesh: Sizes) -> tuple[int, ...]:
    """The ranks that differ from this one along `axes` only."""
    origin = coordinate_of(rank, mesh)
    ranges = [range(n) if a in axes else (origin[a],) for a, n in enumerate(mesh)]
    return tuple(part_of(tuple(range(len(mesh))), mesh, c) for c in product(*ranges))


def packing(shape: Sizes, mesh: Sizes, step: BlockStep, rank: int) -> Packing:
    """The messages of `rank` in `step`."""
    is_along = step.collective in ("all_reduce", "reduce_scatter", "exchange")
    group = group_of(rank, step.axes if is_along else involved(step.before, step.after), mesh)
    coordinate = coordinate_of(rank, mesh)
    before = [len(some) for some in local_indices(shape, step.before, mesh, coordinate)]
    after = tuple(len(some) for some in local_indices(shape, step.after, mesh, coordinate))
    nothing = np.zeros(0, dtype=np.int64)
    if step.collective == "all_reduce":
        return Packing(group, after, (), (), (nothing, nothing))
    sends: dict[int, list[np.ndarray]] = {member: [] for member in group}
    gets: dict[int, list[np.ndarray]] = {member: [] for member in group}
    kept: list[tuple[np.ndarray, np.ndarray]] = []
    for member in group:
        receiver = coordinate_of(member, mesh)
        for source, holding in _sources(step, mesh, receiver, group):
            if rank not in (source, member):
                continue
            there, here = _positions(shape, mesh, step.before, holding, step.after, receiver)
            if source not in sends:
                assert not all(map(len, there)), f"rank {source} has elements that rank {member} needs and is not in its group {group}"
                continue
            if source == member:
                kept.append((_flat(there, before), _flat(here, after)))
                if step.collective != "reduce_scatter":
                    continue
            if source == rank:
                sends[member].append(_flat(there, before))
            if member == rank:
                gets[source].append(_flat(here, after))
    both = [np.concatenate([nothing, *some]) for some in zip(*kept)] or [nothing, nothing]
    joined = [tuple(np.concatenate([nothing, *box[member]]) for member in group) for box in (sends, gets)]
    return Packing(group, after, joined[0], joined[1], (both[0], both[1]))


def _sources(step: BlockStep, mesh: Sizes, receiver: Sizes, group: tuple[int, ...]) -> list[tuple[int, Sizes]]:
    """(sending rank, the coordinate whose input shard its message is part of)."""
    if step.collective == "reduce_scatter":
        return [(member, receiver) for member in group]  # all have summands of the same elements
    parts = holdings(step.before, mesh, receiver, involved(step.before, step.after))
    return [(int(sender(step.before, step.after, mesh, receiver, part)), part) for part in parts]


def _positions(
    shape: Sizes, mesh: Sizes, before: BlockLayout, holding: Sizes, after: BlockLayout, receiver: Sizes
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Per dim the positions of the common indices in the input shard at `holding` and in the output shard at `receiver`."""
    there, here = [], []
    for size, a1, b1, a2, b2 in zip(shape, before.axes, before.blocks, after.axes, after.blocks, strict=True):
        held = indices(size, axis_sizes(a1, mesh), b1, part_of(a1, mesh, holding))
        needed = indices(size, axis_sizes(a2, mesh), b2, part_of(a2, mesh, receiver))
        both = np.intersect1d(held, needed, assume_unique=True)
        there.append(np.searchsorted(held, both))
        here.append(np.searchsorted(needed, both))
    return there, here


def _flat(positions: list[np.ndarray], shape: list[int] | Sizes) -> np.ndarray:
    """The row-major flat indices of a product of positions."""
    flat = np.zeros(1, dtype=np.int64)
    for some, n in zip(positions, shape, strict=True):
        flat = (flat[:, None] * n + some[None, :]).reshape(-1)
    return flat
