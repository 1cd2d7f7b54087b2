"""Between two answers whose differences are all coupled: a change on the way, from one of them to the other.

    order    of the nodes in which y differs from x, neighbours near each other (Cuthill and McKee 1969): layers after layers
    x(t)     = x with the nodes before the t-th of that order, or after it, as in y
    cost(t)  = cost(x) + what the nodes passed cost more + per edge T[y_a, x_b] - T[x_a, x_b] when its first end is passed,
                                                              T[y_a, y_b] - T[y_a, x_b] when its second is; bytes alike   -> _along

Where layers repeat and what passes between them is laid out otherwise in y, exchange.py sees one part, all or nothing. Cut in two, it
costs one change of layout more than the straight line between them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import reverse_cuthill_mckee

from ..problem import NodeUsage, Problem
from .times import Rows

Change = tuple[int, float, float]  # at which step, from what to what


def cut(
    problem: Problem, rows: Rows, peaks: list[int], x: np.ndarray, y: np.ndarray, nodes: np.ndarray, room: np.ndarray
) -> np.ndarray | None:
    """x with a beginning or an end of `nodes`, in their order, as in y: the cheapest that holds no more than `room` more.

    room: bytes, one per row of `peaks`. None where none of them is cheaper than x.
    """
    least, found = 0.0, None
    order = _order(problem, nodes)
    for way in (order, order[::-1]):
        cost, held = _along(problem, rows, peaks, x, y, way)
        cost = np.where((held <= room[:, None]).all(axis=0), cost, np.inf)
        t = int(cost.argmin())
        if cost[t] < least:
            least, found = float(cost[t]), way[: t + 1]
    if found is None:
        return None
    mixed = x.copy()
    mixed[found] = y[found]
    return mixed


def _order(problem: Problem, nodes: np.ndarray) -> np.ndarray:
    """The nodes, neighbours near each other."""
    place = np.full(len(problem.node_costs), -1)
    place[nodes] = np.arange(len(nodes))
    joined = [(place[e.a], place[e.b]) for e in problem.edges if place[e.a] >= 0 and place[e.b] >= 0]
    ends = np.array(joined, dtype=np.int32).reshape(-1, 2)
    ends = np.concatenate([ends, ends[:, ::-1]])
    graph = coo_matrix((np.ones(len(ends)), ends.T), shape=(len(nodes), len(nodes))).tocsr()
    return nodes[reverse_cuthill_mckee(graph, symmetric_mode=True)]


def _along(
    problem: Problem, rows: Rows, peaks: list[int], x: np.ndarray, y: np.ndarray, way: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """What x costs and holds more with the first t + 1 nodes of the way as in y: of shapes (nodes,) and (peaks, nodes)."""
    count = len(way)
    turn = np.full(len(problem.node_costs), count)  # the step at which a node changes; `count`: it doesn't
    turn[way] = np.arange(count)
    cost, forbidden, held = np.zeros(count + 1), np.zeros(count + 1), np.zeros((len(peaks), count + 1))
    for v in way.tolist():
        cost[turn[v]] += problem.node_costs[v][y[v]] - problem.node_costs[v][x[v]]
    for e in problem.edges:
        for t, old, new in _changes(e.table, e.a, e.b, turn, count, x, y):
            cost[t] += (new if math.isfinite(new) else 0.0) - (old if math.isfinite(old) else 0.0)
            forbidden[t] += math.isinf(new) - math.isinf(old)
    alive = np.array([(rows.first <= row) & (row < rows.last) for row in peaks]).reshape(len(peaks), -1)
    for j in np.flatnonzero(alive.any(axis=0)).tolist():
        u = problem.usages[j]
        if isinstance(u, NodeUsage):
            held[alive[:, j], turn[u.node]] += u.bytes[y[u.node]] - u.bytes[x[u.node]]
        else:
            edge = problem.edges[u.edge]
            for t, old, new in _changes(u.bytes, edge.a, edge.b, turn, count, x, y):
                held[alive[:, j], t] += new - old
    total = np.where(np.cumsum(forbidden) > 0, np.inf, np.cumsum(cost))
    return total[:count], np.cumsum(held, axis=1)[:, :count]


def _changes(table: np.ndarray, a: int, b: int, turn: np.ndarray, never: int, x: np.ndarray, y: np.ndarray) -> Iterator[Change]:
    """The steps at which an edge's entry becomes another, and both: at its first end that changes, and at its second."""
    if turn[a] > turn[b]:
        table, a, b = table.T, b, a
    if turn[a] < never:
        yield int(turn[a]), table[x[a], x[b]], table[y[a], x[b]]
    if turn[b] < never:
        yield int(turn[b]), table[y[a], x[b]], table[y[a], y[b]]
