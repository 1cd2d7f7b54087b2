"""The records of the search in `space.py`: a state has a DimSharding per tensor dim, then the set of Partial axes as a bit mask."""

from __future__ import annotations

from typing import Any, NamedTuple

from autoshard.relayout.blocks import Axes

State = tuple[Any, ...]  # a DimSharding per dim, then an int


class DimSharding:
    """How one dim is sharded; equal ones are the same object. `mask`: its axes as bits; `code`: see coarse.py.

    The last four fields cache what `Space` computes of the dim: the shardings that one step can lead to.
    """

    __slots__ = ("axes", "block", "code", "dim", "gathers", "inserts", "mask", "n", "reblocks", "removals", "size")
    gathers: list[tuple[int, DimSharding]] | None
    removals: list[tuple[Axes, int, DimSharding]] | None
    reblocks: list[tuple[DimSharding, int]] | None

    def __init__(self, dim: int, axes: Axes, block: int, n: int, size: int, code: int):
        self.dim, self.axes, self.block, self.n, self.size, self.code = dim, axes, block, n, size, code
        self.mask = sum(1 << a for a in axes)
        self.removals = self.gathers = self.reblocks = None
        self.inserts: dict[Axes, list[DimSharding]] = {}


class CandidateStep(NamedTuple):
    """A step that leads out of a state, and the state that it leads to."""

    seconds: float
    state: State
    kind: str
    mask: int
    dims: tuple[int, ...]
