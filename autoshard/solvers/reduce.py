"""Exact reductions up to a fixed point: a smaller Problem with the same optimal cost, and a lift of its answers.

Per node, until nothing changes (every step keeps at least one optimal answer, memory included):
    forbidden    choices without a finite cost, without a finite pair on some edge, or too large by themselves
    fixed        one choice is left: its costs and bytes move to the neighbours
    separable    T[i, j] = a[i] + b[j]: the edge dissolves into its ends
    function     each choice of v leaves one choice f(v) of n: the costs, edges and bytes of n move into v
    dominated    c[k] - c[i] + sum over edges max_j (T[k, j] - T[i, j]) <= 0 and k holds no more bytes than i at any time
    eliminated   nodes whose bytes can't matter, with one edge (min_i c[i] + T[i, j]) or two
    memory       times that can't bind any more are dropped; constant bytes become a base load
Repeated tables are handled once (interning.py). The lift replays the steps backwards.
"""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import getitem

import numpy as np

from ..problem import Edge, Problem, Usage
from .interning import eliminate_leaf, eliminate_link, function_of, graph_values, separate, supported, worst_loss
from .reducible import NothingFits, Reducible

DOMINANCE_CELLS = 3 * 10**7  # most operations to compare all rows of one table
LINK_CELLS = 3 * 10**7  # most operations to eliminate a node between two others
STOP_EVERY = 100  # nodes


@dataclass(frozen=True)
class Reduced:
    """A smaller problem of equal cost; `lift` maps its answers back. `problem` is None where no answer fits."""

    problem: Problem | None
    nodes: tuple[int, ...]  # per node of the reduced problem, the original node; the node of the base load follows them
    steps: tuple[tuple, ...] = field(repr=False)
    num_nodes: int

    def lift(self, choice: Sequence[int] | np.ndarray) -> list[int]:
        """The corresponding answer of the original problem, of the same cost."""
        x = [0] * self.num_nodes
        for v, i in zip(self.nodes, choice, strict=False):
            x[v] = int(i)
        for step in reversed(self.steps):
            _undo(step, x)
        return x

    def choices_left(self, v: int, num_choices: int) -> np.ndarray:
        """Which of its choices a node of the original problem still has in the reduced one."""
        index = np.arange(num_choices)
        for kept in self._kept.get(v, ()):
            index = index[kept]
        return index

    @cached_property
    def _kept(self) -> dict[int, list[np.ndarray]]:
        """By node, which of its choices were kept, step after step."""
        kept: dict[int, list[np.ndarray]] = {}
        for step in self.steps:
            if step[0] == "kept":
                kept.setdefault(step[1], []).append(step[2])
        return kept


def _undo(step: tuple, x: list[int]) -> None:
    kind, v = step[:2]
    if kind == "kept":
        x[v] = int(step[2][x[v]])
    elif kind == "fixed":
        x[v] = step[2]
    elif kind == "function":
        x[v] = int(step[3][x[step[2]]])
    elif kind == "leaf":
        _, _, costs, n, table = step
        x[v] = int((costs + table[:, x[n]]).argmin())
    else:
        _, _, costs, a, left, b, right = step
        x[v] = int((costs + left[:, x[a]] + right[:, x[b]]).argmin())


def reduce(problem: Problem, *, stop: Callable[[], bool] = lambda: False, kept: Collection[int] = ()) -> Reduced:
    """Apply every reduction until none applies, or until stop() returns true (the result is then exact as well).

    kept: nodes that stay with all choices that are possible, so that the reductions hold for any further costs of these choices.
    """
    state = _Reducer(problem, stop, frozenset(kept))
    try:
        state.read_usages()
        while state.sweep() or (state.refresh_memory() and not stop()):
            pass
    except NothingFits:
        return Reduced(None, (), tuple(state.steps), len(problem.names))
    return state.result()


class _Reducer(Reducible):
    """The reductions, one node at a time."""

    def __init__(self, problem: Problem, stop: Callable[[], bool], kept: frozenset[int]) -> None:
        super().__init__(problem, stop)
        self.kept = kept

    def sweep(self) -> bool:
        """Reduce the nodes that have changed; returns whether anything was reduced."""
        before = len(self.steps)
        edges_before = sum(map(len, self.tables))
        while self.dirty:
            work, self.dirty = sorted(self.dirty), {}
            for k, v in enumerate(work):
                if k % STOP_EVERY == 0 and self.stop():
                    return False
                if self.alive[v]:
                    self.drop_forbidden(v)
                    if v not in self.kept:
                        self.reduce_node(v)
        return len(self.steps) > before or sum(map(len, self.tables)) < edges_before

    def reduce_node(self, v: int) -> None:
        if len(self.cost[v]) == 1:
            self.fix(v)
            return
        self.dissolve_separable(v)
        if self.merge_functions(v):
            return
        self.drop_dominated(v)
        if len(self.cost[v]) == 1:
            self.fix(v)
        else:
            self.eliminate(v)

    def drop_forbidden(self, v: int) -> None:
        mask = self.pool.of(np.isfinite, self.cost[v])
        for table in self.tables[v].values():
            mask = self.pool.of(np.logical_and, mask, self.pool.of(supported, table))
        if not mask.all():
            self.keep(v, mask)

    def fix(self, v: int) -> None:
        self.steps.append(("fixed", v, 0))
        self.constant.append(float(self.cost[v][0]))
        for (first, last), b in self.items[v].items():
            self.room[first:last] -= b[0]
        for n, table in self.tables[v].items():
            self.add_cost(n, self.pool.of(np.ravel, table))
            for first, last, b in self.pair_items[v].get(n, ()):
                self.add_item(n, first, last, self.pool.of(np.ravel, b))
        self.remove(v)

    def dissolve_separable(self, v: int) -> None:
        for n, table in list(self.tables[v].items()):
            parts = self.pool.of(separate, table)
            amounts = [(first, last, self.pool.of(separate, b)) for first, last, b in self.pair_items[v].get(n, ())]
            if parts is None or any(halves is None for _, _, halves in amounts):
                continue
            self.add_cost(v, parts[0])
            self.add_cost(n, parts[1])
            for first, last, (bytes_of_v, bytes_of_n) in amounts:
                self.add_item(v, first, last, bytes_of_v)
                self.add_item(n, first, last, bytes_of_n)
            self.drop_edge(v, n)

    def merge_functions(self, v: int) -> bool:
        """Merge v into a neighbour that decides it, or the neighbours that v decides into v; returns whether v is gone."""
        for n in list(self.tables[v]):
            f = self.pool.of(function_of, self.tables[n][v])
            if f is None:
                continue
            inverse = self.pool.of(function_of, self.tables[v][n])
            if inverse is None or n in self.kept or len(self.items[v]) <= len(self.items[n]):
                self.merge(n, v, f)
                return True
            self.merge(v, n, inverse)  # each decides the other: the longer list of bytes stays
        for n in list(self.tables[v]):
            table = self.tables[v].get(n)
            f = None if table is None or n in self.kept else self.pool.of(function_of, table)
            if f is not None:
                self.merge(v, n, f)
        return False

    def merge(self, v: int, n: int, f: np.ndarray) -> None:
        """Merge n = f(v) into v."""
        pool = self.pool
        self.add_cost(v, pool.of(graph_values, self.tables[v][n], f))
        self.add_cost(v, pool.of(getitem, self.cost[n], f))
        for first, last, b in self.pair_items[v].get(n, ()):
            self.add_item(v, first, last, pool.of(graph_values, b, f))
        for (first, last), b in self.items[n].items():
            self.add_item(v, first, last, pool.of(getitem, b, f))
        for w, table in self.tables[n].items():
            if w != v:
                self.add_edge(v, w, pool.of(getitem, table, f))
                for first, last, b in self.pair_items[n].get(w, ()):
                    self.add_pair_item(v, w, (first, last, pool.of(getitem, b, f)))
        self.steps.append(("function", n, v, f))
        self.remove(n)

    def drop_dominated(self, v: int) -> None:
        n = len(self.cost[v])
        tables = list(self.tables[v].values())
        if n * n * max((t.shape[1] for t in tables), default=1) > DOMINANCE_CELLS:
            return
        with np.errstate(invalid="ignore"):  # inf - inf is NaN, which is not <= 0: not dominated
            loss = self.cost[v][None, :] - self.cost[v][:, None]
            for t in tables:
                loss = loss + self.pool.of(worst_loss, t)
            worse = loss <= 0.0
        np.fill_diagonal(worse, False)
        if worse.any():
            self.require_no_more_bytes(v, worse)
        if not worse.any():
            return
        alive = np.ones(n, bool)
        for i in np.flatnonzero(worse.any(axis=1)):
            better = worse[i] & alive
            equal = better & worse[:, i]
            alive[i] = not (better & ~equal).any() and not equal[:i].any()
        if not alive.all():
            self.keep(v, alive)

    def require_no_more_bytes(self, v: int, worse: np.ndarray) -> None:
        """Clear worse[i, k] where k may hold more bytes than i at some time."""
        items = [(first, last, b[None, :] - b[:, None]) for (first, last), b in self.items[v].items()]
        for pair in self.pair_items[v].values():
            items += [(first, last, self.pool.of(worst_loss, b)) for first, last, b in pair]
        for piece in {end for first, last, _ in items for end in (first, last)}:
            alive = [more for first, last, more in items if first <= piece < last]
            if alive:
                worse &= sum(alive) <= 0.0

    def eliminate(self, v: int) -> None:
        if self.items[v] or self.pair_items[v] or len(self.tables[v]) > 2:
            return
        costs, edges = self.cost[v], list(self.tables[v].items())
        if not edges:
            self.steps.append(("fixed", v, int(costs.argmin())))
            self.constant.append(float(costs.min()))
            self.remove(v)
        elif len(edges) == 1:
            ((n, table),) = edges
            self.steps.append(("leaf", v, costs, n, table))
            self.remove(v)
            self.add_cost(n, self.pool.of(eliminate_leaf, costs, table))
        else:
            (a, left), (b, right) = edges
            cells = left.shape[1] * right.shape[1]
            if cells * len(costs) <= LINK_CELLS and cells <= 4 * (left.size + right.size):
                self.steps.append(("link", v, costs, a, left, b, right))
                self.remove(v)
                self.add_edge(a, b, self.pool.of(eliminate_link, costs, left, right))

    def result(self) -> Reduced:
        nodes = [v for v, alive in enumerate(self.alive) if alive]
        number = {v: k for k, v in enumerate(nodes)}
        edges: list[Edge] = []
        usages: list[Usage] = []
        for v in nodes:
            usages += [Usage((number[v],), first, last, b) for (first, last), b in self.items[v].items()]
            for n, table in self.tables[v].items():
                if v < n:
                    ends = (number[v], number[n])
                    usages += [Usage(ends, first, last, b, len(edges)) for first, last, b in self.pair_items[v].get(n, ())]
                    edges.append(Edge(*ends, table))
        costs = [self.cost[v] for v in nodes]
        names = [self.problem.names[v] for v in nodes]
        base = len(nodes)
        names.append("base")
        costs.append(np.array([math.fsum(self.constant)]))
        usages += [Usage((base,), r, r + 1, np.array([max(self.limit - room, 0.0)])) for r, room in enumerate(self.room)]
        small = Problem(tuple(names), tuple(costs), tuple(edges), tuple(usages), self.limit if len(self.room) else None)
        return Reduced(small, tuple(nodes), tuple(self.steps), len(self.problem.names))
