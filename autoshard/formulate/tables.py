"""Edge tables and bytes, one array per distinct (tensor, what is given, what is taken), shared by reference."""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np

from autoshard.formulate.records import Layouts
from autoshard.graph import Tensor
from autoshard.layout import Layout, local_numel
from autoshard.mesh import Mesh
from autoshard.redistribute import Routes, buffer_table


class Tables:
    """Made once per signature. Rows are what is given, columns what is taken."""

    def __init__(self, mesh: Mesh, routes: Routes):
        self.mesh, self.routes = mesh, routes
        self._numbers: dict[Hashable, int] = {}
        self._objects: dict[int, tuple[int, Hashable]] = {}  # id -> number; the object is kept alive with its id
        self._made: dict[tuple, np.ndarray] = {}

    def number(self, value: Hashable) -> int:
        """A number per tensor or tuple of layouts, equal for equal ones; an object that comes by again isn't hashed again."""
        known = self._objects.get(id(value))
        if known is None:
            known = self._objects[id(value)] = (self._numbers.setdefault(value, len(self._numbers)), value)
        return known[0]

    def table(self, tensor: Tensor, gives: Layouts, takes: Layouts) -> np.ndarray:
        """Seconds of the cheapest routes."""
        key = ("seconds", self.number(tensor), self.number(gives), self.number(takes))
        if key not in self._made:
            sources, targets, cells = self._distinct(gives, takes)
            self._made[key] = np.ascontiguousarray(self.routes.table(tensor.shape, tensor.itemsize, sources, targets)[cells])
        return self._made[key]

    def _distinct(self, gives: Layouts, takes: Layouts) -> tuple[list[Layout], list[Layout], tuple[np.ndarray, ...]]:
        """The different layouts given and taken, and where in a table of those the cells of the whole table are."""
        rows = {layout: i for i, layout in enumerate(dict.fromkeys(gives))}
        columns = {layout: j for j, layout in enumerate(dict.fromkeys(takes))}
        return list(rows), list(columns), np.ix_([rows[g] for g in gives], [columns[t] for t in takes])

    def bytes(self, tensor: Tensor, layouts: Layouts) -> np.ndarray:
        """Local bytes per layout."""
        key = ("bytes", self.number(tensor), self.number(layouts))
        if key not in self._made:
            held = [local_numel(tensor.shape, layout, self.mesh) * tensor.itemsize for layout in layouts]
            self._made[key] = np.array(held, dtype=float)
        return self._made[key]

    def differ(self, gives: Layouts, takes: Layouts) -> np.ndarray:
        names = {layout: i for i, layout in enumerate(dict.fromkeys((*gives, *takes)))}
        return np.array([names[g] for g in gives])[:, None] != np.array([names[t] for t in takes])[None, :]

    def copy(self, tensor: Tensor, gives: Layouts, takes: Layouts) -> np.ndarray:
        """Bytes of the copy that the route ends in; 0 where nothing is moved."""
        key = ("copy", self.number(tensor), self.number(gives), self.number(takes))
        if key not in self._made:
            self._made[key] = np.where(self.differ(gives, takes), self.bytes(tensor, takes)[None, :], 0.0)
        return self._made[key]

    def leaving(self, tensor: Tensor, gives: Layouts, takes: Layouts) -> np.ndarray:
        """Bytes of what is moved and of the buffers beside what it becomes, while it is moved; 0 where nothing is."""
        key = ("leaving", self.number(tensor), self.number(gives), self.number(takes))
        if key not in self._made:
            moved = np.where(self.differ(gives, takes), self.bytes(tensor, gives)[:, None], 0.0)
            self._made[key] = moved + self.buffers(tensor, gives, takes)
        return self._made[key]

    def buffers(self, tensor: Tensor, gives: Layouts, takes: Layouts) -> np.ndarray:
        """Bytes that the route takes beside the tensor that it starts from and the copy that it ends in."""
        key = ("buffers", self.number(tensor), self.number(gives), self.number(takes))
        if key not in self._made:
            sources, targets, cells = self._distinct(gives, takes)
            needed = buffer_table(self.routes, tensor.shape, tensor.itemsize, sources, targets)[cells]
            self._made[key] = np.maximum(needed - self.copy(tensor, gives, takes), 0.0)
        return self._made[key]

    def fetched(self, tensor: Tensor, gives: Layouts, takes: Layouts, made: np.ndarray) -> np.ndarray:
        """Bytes of the copy while the op that takes it runs, or of the buffers before, whatever is more.

        made: bytes that the op allocates once its inputs are there, per choice of the op.
        """
        key = ("fetched", self.number(tensor), self.number(gives), self.number(takes), made.tobytes())
        if key not in self._made:
            before = np.maximum(self.buffers(tensor, gives, takes) - made[None, :], 0.0)
            self._made[key] = self.copy(tensor, gives, takes) + before
        return self._made[key]
