"""A problem while it is being reduced: the graph with its tables, and memory as the room that is left per binding time.

    room[r] = limit - bytes that every answer holds at row r; the items of a node or a pair hold what its choices add, from row to row
Tables and bytes are interned (interning.py). `steps` records what the lift of an answer has to undo.
"""

import itertools
import math
from collections.abc import Callable
from operator import getitem

import numpy as np

from ..problem import Problem
from .binding_times import maximal_rows
from .interning import Pool

ROUNDING = 1e-9  # relative to the limit: a row that misses the limit by less is kept


class NothingFits(Exception):
    """A node has no choice left, or the bytes that every answer holds exceed the limit."""


class Reducible:
    """The graph, the memory, and the steps so far."""

    def __init__(self, problem: Problem, stop: Callable[[], bool]) -> None:
        self.problem, self.stop = problem, stop
        self.pool = Pool()
        self.cost: list[np.ndarray] = [self.pool.original(c) for c in problem.node_costs]
        self.alive = [True] * len(problem.names)
        self.tables: list[dict[int, np.ndarray]] = [{} for _ in problem.names]  # tables[v][n][i of v, j of n], both ways
        self.items: list[dict[tuple[int, int], np.ndarray]] = [{} for _ in problem.names]  # bytes by (first row, last row)
        self.pair_items: list[dict[int, list[tuple[int, int, np.ndarray]]]] = [{} for _ in problem.names]  # both ways
        self.steps: list[tuple] = []
        self.constant: list[float] = []
        self.dirty = dict.fromkeys(range(len(problem.names)))
        self.limit = math.inf if problem.usage_limit is None else float(problem.usage_limit)
        self.slack = ROUNDING * max(self.limit, 1.0)
        for e in problem.edges:
            self.add_edge(e.a, e.b, self.pool.original(e.table))

    def read_usages(self) -> None:
        usages = self.problem.usages
        counts = np.array([self.limit < math.inf and u.bytes.max() > 0 for u in usages], dtype=bool)
        rows = maximal_rows(self.problem, counts)
        self.room = np.full(len(rows.times), self.limit)
        for u, first, last in zip(usages, rows.first.tolist(), rows.last.tolist(), strict=True):
            if first < last and u.edge is None:
                self.add_item(u.ends[0], first, last, self.pool.original(u.bytes))
            elif first < last:
                v, n = u.ends
                self.add_pair_item(v, n, (first, last, self.pool.original(u.bytes)))
        self.refresh_memory()

    def add_edge(self, v: int, n: int, table: np.ndarray) -> None:
        if n in self.tables[v]:
            table = self.pool.of(np.add, self.tables[v][n], table)
        self.tables[v][n] = table
        self.tables[n][v] = self.pool.of(np.transpose, table)
        self.dirty[v] = self.dirty[n] = None

    def add_item(self, v: int, first: int, last: int, amount: np.ndarray) -> None:
        known = self.items[v].get((first, last))
        self.items[v][first, last] = amount if known is None else self.pool.of(np.add, known, amount)

    def add_pair_item(self, v: int, n: int, item: tuple[int, int, np.ndarray]) -> None:
        first, last, amount = item
        self.pair_items[v].setdefault(n, []).append(item)
        self.pair_items[n].setdefault(v, []).append((first, last, self.pool.of(np.transpose, amount)))

    def drop_edge(self, v: int, n: int) -> None:
        del self.tables[v][n], self.tables[n][v]
        self.pair_items[v].pop(n, None)
        self.pair_items[n].pop(v, None)
        self.dirty[v] = self.dirty[n] = None

    def add_cost(self, v: int, costs: np.ndarray) -> None:
        self.cost[v] = self.pool.of(np.add, self.cost[v], costs)
        self.dirty[v] = None

    def remove(self, v: int) -> None:
        for n in list(self.tables[v]):
            self.drop_edge(v, n)
        self.alive[v] = False
        self.items[v] = {}
        self.dirty.pop(v, None)

    def keep(self, v: int, mask: np.ndarray) -> None:
        index = self.pool.intern(np.flatnonzero(mask))
        if len(index) == 0:
            raise NothingFits
        self.steps.append(("kept", v, index))
        self.cost[v] = self.pool.of(getitem, self.cost[v], index)
        self.items[v] = {rows: self.pool.of(getitem, b, index) for rows, b in self.items[v].items()}
        for n, table in list(self.tables[v].items()):
            small = self.pool.of(getitem, table, index)
            self.tables[v][n], self.tables[n][v] = small, self.pool.of(np.transpose, small)
            self.dirty[n] = None
        for n, items in list(self.pair_items[v].items()):
            del self.pair_items[v][n], self.pair_items[n][v]
            for first, last, b in items:
                self.add_pair_item(v, n, (first, last, self.pool.of(getitem, b, index)))
        self.dirty[v] = None

    # ---- memory

    def refresh_memory(self) -> bool:
        """Move constant bytes to the base load and drop times that can't bind. Returns whether a node may be reduced further."""
        if not len(self.room):
            return False
        changed: dict[int, None] = {}
        most = np.zeros(len(self.room) + 1)
        for v, items in enumerate(self.items):
            if items:
                rest = self._without_constants([(*rows, b) for rows, b in items.items()], most)
                self.items[v] = {(first, last): b for first, last, b in rest}
        for v, pairs in enumerate(self.pair_items):
            for n in list(pairs):
                if v < n:
                    rest = self._without_constants(pairs.pop(n), most)
                    del self.pair_items[n][v]
                    for item in rest:
                        self.add_pair_item(v, n, item)
        if self.room.min() < -self.slack:
            raise NothingFits
        keep = np.cumsum(most)[:-1] > self.room - self.slack
        keep &= self._tightest_of_equals()
        if not keep.all():
            self._renumber(keep, changed)
        for v in range(len(self.cost)):
            if self.items[v] and self._drop_too_large(v):
                changed[v] = None
        self.dirty |= changed
        return bool(changed)

    def _without_constants(self, items: list[tuple[int, int, np.ndarray]], most: np.ndarray) -> list[tuple[int, int, np.ndarray]]:
        rest = []
        for first, last, b in items:
            least = float(b.min())
            if least != 0:  # below 0 where the other half of a separated edge has more than its share
                self.room[first:last] -= least
                b = self.pool.intern(b - least)
            spread = float(b.max())
            if spread > 0:
                most[first] += spread
                most[last] -= spread
                rest.append((first, last, b))
        return rest

    def _tightest_of_equals(self) -> np.ndarray:
        """Mark, of neighbouring rows with the same live usages, the one with the least room."""
        spans = [span for items in self.items for span in items]
        spans += [(first, last) for pairs in self.pair_items for items in pairs.values() for first, last, _ in items]
        boundary = np.zeros(len(self.room) + 1, bool)
        boundary[[0, *itertools.chain(*spans)]] = True
        group = np.cumsum(boundary[:-1])
        order = np.lexsort((np.arange(len(group)), self.room, group))
        keep = np.zeros(len(group), bool)
        keep[order[np.unique(group[order], return_index=True)[1]]] = True
        return keep

    def _renumber(self, keep: np.ndarray, changed: dict[int, None]) -> None:
        number = np.concatenate([[0], np.cumsum(keep)]).tolist()
        self.room = self.room[keep]
        for v, items in enumerate(self.items):
            if items:
                self.items[v] = {}
                for (first, last), b in items.items():
                    if number[first] < number[last]:
                        self.add_item(v, number[first], number[last], b)
                if len(self.items[v]) < len(items):
                    changed[v] = None
        for v, pairs in enumerate(self.pair_items):
            for n in list(pairs):
                pairs[n] = [(number[first], number[last], b) for first, last, b in pairs[n] if number[first] < number[last]]
                if not pairs[n]:
                    del pairs[n]
                    changed[v] = None

    def _drop_too_large(self, v: int) -> bool:
        """Drop choices that don't fit even if everything else is as small as possible."""
        events: dict[int, np.ndarray | float] = {}
        for (first, last), b in self.items[v].items():
            events[first] = events.get(first, 0.0) + b
            events[last] = events.get(last, 0.0) - b
        places = sorted(events)
        held = np.zeros(len(self.cost[v]))
        mask = held == 0.0
        for start, end in zip(places, places[1:], strict=False):
            held = held + events[start]
            mask = mask & (held <= self.room[start:end].min() + self.slack)
        if mask.all():
            return False
        self.keep(v, mask)
        return True
