"""Edge tables and bytes, one array per distinct (tensor, what is given, what is taken), shared by reference."""

from __future__ import annotations

from collections.abc import Hashable
from functools import cached_property

import numpy as np

from autoshard.formulate.records import Layouts
from autoshard.graph import Tensor
from autoshard.layout import Layout, local_numel
from autoshard.mesh import Mesh
from autoshard.routes import Routes, buffer_table


class Tables:
    """Made once per signature. Rows are what is given, columns what is taken."""

    def __init__(self, mesh: Mesh, routes: Routes):
        self.mesh, self.routes = mesh, routes
        self._numbers: dict[Hashable, int] = {}
        self._objects: dict[int, tuple[int, Hashable]] = {}  # id -> number; the object is kept alive with its id
        self._moves: dict[tuple[int, int, int], Move] = {}
        self._bytes: dict[tuple[int, int], np.ndarray] = {}

    def number(self, value: Hashable) -> int:
        """A number per tensor or tuple of layouts, equal for equal ones; an object that comes by again isn't hashed again."""
        known = self._objects.get(id(value))
        if known is None:
            known = self._objects[id(value)] = (self._numbers.setdefault(value, len(self._numbers)), value)
        return known[0]

    def move(self, tensor: Tensor, gives: Layouts, takes: Layouts) -> Move:
        key = (self.number(tensor), self.number(gives), self.number(takes))
        if key not in self._moves:
            self._moves[key] = Move(self, tensor, gives, takes)
        return self._moves[key]

    def bytes(self, tensor: Tensor, layouts: Layouts) -> np.ndarray:
        """Local bytes per layout."""
        key = (self.number(tensor), self.number(layouts))
        if key not in self._bytes:
            held = [local_numel(tensor.shape, layout, self.mesh) * tensor.itemsize for layout in layouts]
            self._bytes[key] = np.array(held, dtype=float)
        return self._bytes[key]


class Move:
    """A tensor from the layouts that are given to those that are taken; every array is [given, taken]."""

    def __init__(self, tables: Tables, tensor: Tensor, gives: Layouts, takes: Layouts):
        self.tables, self.tensor, self.gives, self.takes = tables, tensor, gives, takes
        self._fetched: dict[bytes, np.ndarray] = {}

    @cached_property
    def seconds(self) -> np.ndarray:
        """Seconds of the cheapest routes."""
        sources, targets, cells = self._distinct
        return np.ascontiguousarray(self.tables.routes.table(self.tensor.shape, self.tensor.itemsize, sources, targets)[cells])

    @cached_property
    def copy(self) -> np.ndarray:
        """Bytes of the copy that the route ends in; 0 where nothing is moved."""
        return np.where(self._differ, self.tables.bytes(self.tensor, self.takes)[None, :], 0.0)

    @cached_property
    def leaving(self) -> np.ndarray:
        """Bytes of what is moved and of the buffers beside what it becomes, while it is moved; 0 where nothing is."""
        return np.where(self._differ, self.tables.bytes(self.tensor, self.gives)[:, None], 0.0) + self.buffers

    @cached_property
    def buffers(self) -> np.ndarray:
        """Bytes that the route takes beside the tensor that it starts from and the copy that it ends in."""
        sources, targets, cells = self._distinct
        needed = buffer_table(self.tables.routes, self.tensor.shape, self.tensor.itemsize, sources, targets)[cells]
        return np.maximum(needed - self.copy, 0.0)

    def fetched(self, made: np.ndarray) -> np.ndarray:
        """Bytes of the copy while the op that takes it runs, or of the buffers before, whatever is more.

        made: bytes that the op allocates once its inputs are there, per choice of the op.
        """
        key = made.tobytes()
        if key not in self._fetched:
            self._fetched[key] = self.copy + np.maximum(self.buffers - made[None, :], 0.0)
        return self._fetched[key]

    @cached_property
    def _distinct(self) -> tuple[list[Layout], list[Layout], tuple[np.ndarray, ...]]:
        """The different layouts given and taken, and where in a table of those the cells of the whole table are."""
        rows = {layout: i for i, layout in enumerate(dict.fromkeys(self.gives))}
        columns = {layout: j for j, layout in enumerate(dict.fromkeys(self.takes))}
        return list(rows), list(columns), np.ix_([rows[g] for g in self.gives], [columns[t] for t in self.takes])

    @cached_property
    def _differ(self) -> np.ndarray:
        names = {layout: i for i, layout in enumerate(dict.fromkeys((*self.gives, *self.takes)))}
        return np.array([names[g] for g in self.gives])[:, None] != np.array([names[t] for t in self.takes])[None, :]
