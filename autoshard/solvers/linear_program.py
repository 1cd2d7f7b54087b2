"""The integer program in marginal form: its columns, its rows, and a bound that holds for any row prices.

    minimise   sum_v c_v . x_v + sum_(a,b) T_ab . e_ab
    x_v integer >= 0, sum_i x_v[i] = 1                                              -> _node_rows
    e_ab continuous >= 0: the two marginals force it to be the product              -> _edge_rows
        sum_j e_ab[i,j] = x_a[i]   and   sum_i e_ab[i,j] = x_b[j]
    at time t: sum of bytes . x over what is alive <= limit                         -> memory_row, one at a time
Forbidden choices and pairs have no column. The columns of a node sum to one, and so do those of an edge; hence for any prices y of
the rows (<= 0 for memory rows) no answer costs less than
    y . rhs + sum over nodes and edges of min (c - A'y)                              -> bound
"""

import math
from collections.abc import Sequence

import numpy as np

from ..problem import Problem, held
from .binding_times import binding_rows, load
from .linprog import SparseRows

FRACTIONAL_EXCESS = 1e-7  # relative to the limit: what counts as violated by a fractional point


class LinearProgram:
    """minimise cost . z + constant, matrix z = rhs, 0 <= z, the first num_x columns integer; memory rows are separate."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        choices = [np.flatnonzero(np.isfinite(c)) for c in problem.node_costs]
        finite: dict[int, np.ndarray] = {}  # finite cells per table, looked up by the table's identity
        cells = [finite.setdefault(id(e.table), np.flatnonzero(np.isfinite(e.table))) for e in problem.edges]
        self.choices = np.concatenate(choices)
        starts = np.cumsum([0, *map(len, choices), *map(len, cells)])
        self.first_x, self.first_e = starts[: len(choices) + 1], starts[len(choices) :]
        self.num_x, self.num_columns = int(self.first_x[-1]), int(starts[-1])
        costs = [c[i] for c, i in zip(problem.node_costs, choices, strict=True)]
        costs += [e.table.ravel()[p] for e, p in zip(problem.edges, cells, strict=True)]
        least = [float(c.min(initial=math.inf)) for c in costs]
        # no answer exists where a node or an edge has no column; the caller looks before it solves
        self.empty = math.inf in least
        self.constant = math.fsum(least)
        self.cost = np.concatenate(costs) - np.repeat(least, np.diff(starts))
        self._starts, self._cells = starts[:-1], cells
        self._column = [np.full(len(c), -1) for c in problem.node_costs]  # of a choice; -1 where forbidden
        for column, i, first in zip(self._column, choices, self.first_x, strict=False):
            column[i] = first + np.arange(len(i))
        nodes, edges = self._node_rows(), self._edge_rows()
        self.matrix = nodes.below(edges)
        self.rhs = np.concatenate([np.ones(len(nodes.start) - 1), np.zeros(len(edges.start) - 1)])
        self.priced = -math.inf, self.cost  # the last bound, and the reduced costs of the columns
        self.best: tuple[float, np.ndarray, dict[int, float]] | None = None  # the highest, its prices of edges' rows, and of memory rows
        self.rows = binding_rows(problem)
        self.limit = math.inf if problem.usage_limit is None else problem.usage_limit

    def _node_rows(self) -> SparseRows:
        return SparseRows(self.first_x, np.arange(self.num_x), np.ones(self.num_x))

    def _edge_rows(self) -> SparseRows:
        none, count = np.zeros(0, np.int64), 0
        rows, columns, signs = [none], [none], [np.zeros(0)]
        for e, p, first in zip(self.problem.edges, self._cells, self.first_e, strict=False):
            m, n = e.table.shape
            i, j = np.divmod(p, n)
            ends = np.concatenate([self._column[e.a], self._column[e.b]])
            kept = np.flatnonzero(ends >= 0)
            rows += [count + i, count + m + j, count + kept]
            columns += [np.tile(first + np.arange(len(p)), 2), ends[kept]]
            signs += [np.ones(2 * len(p)), -np.ones(len(kept))]
            count += m + n
        return SparseRows.of(np.concatenate(rows), np.concatenate(columns), np.concatenate(signs), (count, self.num_columns))

    def memory_row(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """Columns and bytes of the usages at a binding time, divided by the limit (so that a tolerance is a relative one)."""
        out = np.zeros(self.num_columns)
        for k in self.rows.alive(row).tolist():
            columns, amounts = self._usage(k)
            out[columns] += amounts
        nonzero = np.flatnonzero(out)
        return nonzero, out[nonzero] / max(self.limit, 1.0)

    @property
    def scaled_limit(self) -> float:
        return self.limit / max(self.limit, 1.0)

    def _usage(self, k: int) -> tuple[slice, np.ndarray]:
        u = self.problem.usages[k]
        if u.edge is not None:
            return slice(self.first_e[u.edge], self.first_e[u.edge + 1]), u.bytes.ravel()[self._cells[u.edge]]
        columns = slice(int(self.first_x[u.ends[0]]), int(self.first_x[u.ends[0] + 1]))
        return columns, u.bytes[self.choices[columns]]

    def bound(self, prices: np.ndarray, memory: Sequence[int], memory_prices: np.ndarray) -> float:
        """A lower bound on the cost of every answer, for a price per row of the matrix and per memory row."""
        y = np.minimum(memory_prices, 0.0)
        of_edges = np.append(np.zeros(len(self.first_x) - 1), prices[len(self.first_x) - 1 :])  # those of nodes add nothing
        reduced = self.cost - self.matrix.priced(of_edges, self.num_columns)
        for row, price in zip(memory, y, strict=True):
            columns, amounts = self.memory_row(row)
            reduced[columns] -= price * amounts
        self.priced = math.fsum([self.constant, *np.minimum.reduceat(reduced, self._starts), *(y * self.scaled_limit)]), reduced
        if self.best is None or self.priced[0] > self.best[0]:
            of_memory = {row: -float(price) for row, price in zip(memory, y) if price < 0}
            self.best = self.priced[0], of_edges[len(self.first_x) - 1 :], of_memory
        return self.priced[0]

    def prices_by_time(self) -> dict[int, float]:
        """Of the best bound: seconds per byte."""
        assert self.best is not None
        return {int(self.rows.times[row]): price / max(self.limit, 1.0) for row, price in self.best[2].items()}

    def shifts(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Of the best bound: per edge, what its rows take from the costs of its two ends (certificate.py)."""
        assert self.best is not None
        ends = np.cumsum([0, *(size for e in self.problem.edges for size in e.table.shape)])
        rows = [-self.best[1][a:b] for a, b in zip(ends[:-1], ends[1:])]
        return list(zip(rows[::2], rows[1::2]))

    def affordable(self, most: float) -> list[np.ndarray]:
        """Per node, the choices that an answer of cost `most` can use according to the prices of the last bound."""
        base, reduced = self.priced
        excess = reduced - np.repeat(np.minimum.reduceat(reduced, self._starts), np.diff([*self._starts, self.num_columns]))
        total = [np.full(len(c), np.inf) for c in self.problem.node_costs]
        for v, (t, first) in enumerate(zip(total, self.first_x, strict=False)):
            mine = excess[first : self.first_x[v + 1]]
            t[self.choices[first : first + len(mine)]] = base + mine
        for e, p, first in zip(self.problem.edges, self._cells, self.first_e, strict=False):
            pairs = np.full(e.table.size, np.inf)
            pairs[p] = excess[first : first + len(p)]
            total[e.a] += pairs.reshape(e.table.shape).min(axis=1)
            total[e.b] += pairs.reshape(e.table.shape).min(axis=0)
        return [t <= most for t in total]

    def round(self, z: np.ndarray) -> list[int]:
        """The choice with the largest entry, per node."""
        return [int(self.choices[a + np.argmax(z[a:b])]) for a, b in zip(self.first_x[:-1], self.first_x[1:], strict=True)]

    def columns_of(self, choice: Sequence[int] | np.ndarray) -> np.ndarray:
        """The point z of an answer."""
        z = np.zeros(self.num_columns)
        z[[self._column[v][i] for v, i in enumerate(choice)]] = 1.0
        for e, p, first in zip(self.problem.edges, self._cells, self.first_e, strict=False):
            z[first + np.searchsorted(p, choice[e.a] * e.table.shape[1] + choice[e.b])] = 1.0
        return z

    def exceeded(self, z: np.ndarray) -> list[int]:
        """Binding times at which a fractional point exceeds the limit: the worst of each run of neighbours."""
        if not len(self.rows.times):
            return []
        mean = np.zeros(len(self.problem.usages))
        for k in np.flatnonzero(self.rows.first < self.rows.last).tolist():
            columns, amounts = self._usage(k)
            mean[k] = amounts @ z[columns]
        return worst_of_runs(load(self.rows, mean) - self.limit, FRACTIONAL_EXCESS * self.limit)

    def exceeded_by(self, choice: Sequence[int] | np.ndarray) -> list[int]:
        """The same for an answer, without tolerance."""
        return worst_of_runs(load(self.rows, held(self.problem, choice)) - self.limit, 0.0) if len(self.rows.times) else []


def worst_of_runs(excess: np.ndarray, tolerance: float) -> list[int]:
    """Index of the largest entry of every run of neighbouring entries above the tolerance."""
    over = np.flatnonzero(excess > tolerance)
    runs = np.split(over, np.flatnonzero(np.diff(over) > 1) + 1) if len(over) else []
    return [int(run[np.argmax(excess[run])]) for run in runs]
