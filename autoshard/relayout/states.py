"""What a state of a Space is made of: a Cut per dim, then the set of Partial axes as a bit mask."""

from __future__ import annotations

from typing import Any, NamedTuple

from autoshard.relayout.blocks import Axes

State = tuple[Any, ...]  # a Cut per dim, then an int


class Cut:
    """How one dim is cut; equal ones are the same object. `mask`: its axes as bits; `code`: see coarse.py."""

    __slots__ = ("axes", "block", "code", "dim", "gathers", "inserts", "mask", "n", "reblocks", "removals", "size")
    gathers: list[tuple[int, Cut]] | None
    removals: list[tuple[Axes, int, Cut]] | None
    reblocks: list[tuple[Cut, int]] | None

    def __init__(self, dim: int, axes: Axes, block: int, n: int, size: int, code: int):
        self.dim, self.axes, self.block, self.n, self.size, self.code = dim, axes, block, n, size, code
        self.mask = sum(1 << a for a in axes)
        self.removals = self.gathers = self.reblocks = None
        self.inserts: dict[Axes, list[Cut]] = {}


class Found(NamedTuple):
    """A step out of a state."""

    seconds: float
    state: State
    kind: str
    mask: int
    dims: tuple[int, ...]
