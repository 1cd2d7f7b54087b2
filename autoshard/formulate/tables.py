"""Tables of seconds and bytes for the edges of a Problem: one array per distinct (tensor, source layouts, target layouts), shared."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import cached_property
from typing import TypeVar

import numpy as np

from autoshard.formulate.records import Layouts
from autoshard.graph import Tensor
from autoshard.layout import Layout, local_numel
from autoshard.mesh import Mesh
from autoshard.routes import Routes, buffer_table, stream_table

T = TypeVar("T")


def bytes_of(tensor: Tensor, layouts: Layouts, mesh: Mesh) -> np.ndarray:
    """Local bytes per layout."""
    return np.array([local_numel(tensor.shape, layout, mesh) * tensor.itemsize for layout in layouts], dtype=float)


def distinct(sources: Layouts, targets: Layouts) -> tuple[list[Layout], list[Layout], tuple[np.ndarray, ...]]:
    """The distinct source layouts, the distinct target layouts, and the index that expands a table of those to the full table."""
    rows, columns = ({layout: i for i, layout in enumerate(dict.fromkeys(of))} for of in (sources, targets))
    return list(rows), list(columns), np.ix_([rows[s] for s in sources], [columns[t] for t in targets])


def differing(sources: Layouts, targets: Layouts) -> np.ndarray:
    """[source layout, target layout]: whether they differ."""
    numbers = {layout: i for i, layout in enumerate(dict.fromkeys((*sources, *targets)))}
    return np.array([numbers[s] for s in sources])[:, None] != np.array([numbers[t] for t in targets])[None, :]


class Tables:
    """The tables computed so far, each once. Rows are source layouts, columns are target layouts. Graphs on one mesh may share them."""

    def __init__(self, mesh: Mesh, routes: Routes | None = None):
        self.mesh, self.routes = mesh, routes or Routes(mesh)
        self._numbers: dict[Hashable, int] = {}
        self._objects: dict[int, tuple[int, Hashable]] = {}  # id -> number; the object is kept alive with its id
        self._known: dict[Hashable, object] = {}

    def once(self, key: Hashable, compute: Callable[[], T]) -> T:
        """A value that nothing but its key decides, computed when it is first asked for."""
        if key not in self._known:
            self._known[key] = compute()
        return self._known[key]  # type: ignore[return-value]

    def number(self, value: Hashable) -> int:
        """A number per tensor or tuple of layouts, equal for equal ones; an object that was numbered before isn't hashed again."""
        known = self._objects.get(id(value))
        if known is None:
            known = self._objects[id(value)] = (self._numbers.setdefault(value, len(self._numbers)), value)
        return known[0]

    def move(self, tensor: Tensor, source_layouts: Layouts, target_layouts: Layouts) -> MoveTables:
        key = ("move", self.number(tensor), self.number(source_layouts), self.number(target_layouts))
        return self.once(key, lambda: MoveTables(self, tensor, source_layouts, target_layouts))

    def bytes(self, tensor: Tensor, layouts: Layouts) -> np.ndarray:
        """`bytes_of`, computed once."""
        return self.once(("bytes", self.number(tensor), self.number(layouts)), lambda: bytes_of(tensor, layouts, self.mesh))


class MoveTables:
    """The tables of one tensor that goes from source layouts to target layouts; every array is [source layout, target layout]."""

    def __init__(self, tables: Tables, tensor: Tensor, source_layouts: Layouts, target_layouts: Layouts):
        self.tables, self.tensor, self.source_layouts, self.target_layouts = tables, tensor, source_layouts, target_layouts
        self._fetched: dict[bytes, np.ndarray] = {}
        self._multiples: dict[tuple[int, bool, bool], np.ndarray] = {}

    @cached_property
    def seconds(self) -> np.ndarray:
        """Seconds of the cheapest route."""
        _ = self._needed  # the search for the routes' buffers finds their seconds too; the other way round there are two searches
        sources, targets, cells = self._distinct
        return np.ascontiguousarray(self.tables.routes.table(self.tensor.shape, self.tensor.itemsize, sources, targets)[cells])

    def seconds_of(self, times: int, *, pending: bool = False, silent: bool = False) -> np.ndarray:
        """Seconds of the route, so many times; one array per number. pending: partial sums stay so. silent: without messages."""
        if times == 1 and not pending and not silent:
            return self.seconds
        if (key := (times, pending, silent)) not in self._multiples:
            forbidden = (self._reduces if pending else False) | (self._sends if silent else False)
            self._multiples[key] = np.where(forbidden, np.inf, times * self.seconds)
        return self._multiples[key]

    @cached_property
    def _sends(self) -> np.ndarray:
        """Whether the route has messages."""
        sources, targets, cells = self._distinct
        by_axis = stream_table(self.tables.routes, self.tensor.shape, self.tensor.itemsize, sources, targets)[..., 1:]
        return np.asarray(by_axis > 0)[cells].any(axis=-1)

    @cached_property
    def seconds_of_none(self) -> np.ndarray:
        """Zero where the layouts are equal: nothing moves between the ranks of a tensor in the hosts' memory, or of a private one."""
        return np.where(self._differ, np.inf, 0.0)

    @cached_property
    def _reduces(self) -> np.ndarray:
        """Whether the route adds partial sums on some axis."""
        source, target = ([[p.is_partial() for p in layout] for layout in of] for of in (self.source_layouts, self.target_layouts))
        return np.asarray((np.array(source)[:, None, :] & ~np.array(target)[None, :, :]).any(axis=2))

    @cached_property
    def copy(self) -> np.ndarray:
        """Bytes of the copy at the end of the route; 0 where the layouts are equal, as no copy is needed."""
        return np.where(self._differ, self.tables.bytes(self.tensor, self.target_layouts)[None, :], 0.0)

    @cached_property
    def leaving(self) -> np.ndarray:
        """Bytes of the source tensor and of the route's buffers, without the final copy, while it runs; 0 where the layouts are equal."""
        return np.where(self._differ, self.tables.bytes(self.tensor, self.source_layouts)[:, None], 0.0) + self.buffers

    @cached_property
    def buffers(self) -> np.ndarray:
        """Bytes that the route needs besides the tensor at its start and the copy at its end."""
        return np.maximum(self._needed[self._distinct[2]] - self.copy, 0.0)

    @cached_property
    def _needed(self) -> np.ndarray:
        sources, targets, _ = self._distinct
        return buffer_table(self.tables.routes, self.tensor.shape, self.tensor.itemsize, sources, targets)

    def fetched(self, allocated: np.ndarray) -> np.ndarray:
        """Bytes of the copy while its reader runs, or of the buffers before, whichever is more.

        allocated: bytes that the reader allocates once its inputs are there, per choice of the reader.
        """
        key = allocated.tobytes()
        if key not in self._fetched:
            self._fetched[key] = self.copy + np.maximum(self.buffers - allocated[None, :], 0.0)
        return self._fetched[key]

    @cached_property
    def _distinct(self) -> tuple[list[Layout], list[Layout], tuple[np.ndarray, ...]]:
        return distinct(self.source_layouts, self.target_layouts)

    @cached_property
    def _differ(self) -> np.ndarray:
        return differing(self.source_layouts, self.target_layouts)
