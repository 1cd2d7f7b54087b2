"""Answers between two answers: where exchanging all of a coupled part needs too much memory, only its first or last nodes change.

    order    of the nodes in which y differs from x, with neighbours near each other (Cuthill and McKee 1969): layer after layer
    x(t)     = x in which the nodes before the t-th of that order, or those after it, are as in y
    cost(t)  = cost(x) + the extra cost of the changed nodes + per edge T[y_a, x_b] - T[x_a, x_b] when its first end has changed,
                                     T[y_a, y_b] - T[y_a, x_b] when its second has; the same for bytes                  -> _along

Where layers repeat and the value between them has another layout in y, exchange_parts.py has one part, which it exchanges completely or
not at all. A split part costs one change of layout more than the straight line between the two answers.
"""

from collections.abc import Iterator

import numpy as np

from ..problem import Problem
from .binding_times import Rows
from .exchange_parts import Change, changes


def split(
    problem: Problem, rows: Rows, peaks: list[int], x: np.ndarray, y: np.ndarray, nodes: np.ndarray, room: np.ndarray
) -> np.ndarray | None:
    """x with a beginning or an end of `nodes`, in their order, as in y: the cheapest one that holds at most `room` bytes more.

    room: bytes, one per row of `peaks`. None where none of them is cheaper than x.
    """
    least, changed = 0.0, None
    order = _order(problem, nodes)
    for way in (order, order[::-1]):
        cost, held = _along(problem, rows, peaks, x, y, way)
        cost = np.where((held <= room[:, None]).all(axis=0), cost, np.inf)
        t = int(cost.argmin())
        if cost[t] < least:
            least, changed = float(cost[t]), way[: t + 1]
    if changed is None:
        return None
    mixed = x.copy()
    mixed[changed] = y[changed]
    return mixed


def _order(problem: Problem, nodes: np.ndarray) -> np.ndarray:
    """The nodes in an order in which neighbours are near each other."""
    import networkx  # here: it takes a sixth of a second to load

    inside = set(nodes.tolist())
    graph = networkx.Graph()
    graph.add_nodes_from(nodes.tolist())
    graph.add_edges_from((e.a, e.b) for e in problem.edges if e.a in inside and e.b in inside)
    return np.array(list(networkx.utils.reverse_cuthill_mckee_ordering(graph)), dtype=np.int64)


def _along(problem: Problem, rows: Rows, peaks: list[int], x: np.ndarray, y: np.ndarray, way: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The extra cost and bytes of x with the first t + 1 nodes of the way as in y: of shapes (nodes,) and (peaks, nodes)."""
    count = len(way)
    turn = np.full(len(problem.node_costs), count)  # the step at which a node changes; `count`: it doesn't change
    turn[way] = np.arange(count)
    cost, forbidden, held = changes(problem, rows, peaks, x, y, turn, count, lambda table, ends: _changes(table, ends, turn, count, x, y))
    return np.where(np.cumsum(forbidden) > 0, np.inf, np.cumsum(cost)), np.cumsum(held, axis=1)


def _changes(table: np.ndarray, ends: tuple[int, ...], turn: np.ndarray, never: int, x: np.ndarray, y: np.ndarray) -> Iterator[Change]:
    """The steps at which the entry of an edge changes, with the old and the new entry: when its first end changes, and its second."""
    a, b = ends
    if turn[a] > turn[b]:
        table, a, b = table.T, b, a
    if turn[a] < never:
        yield int(turn[a]), table[x[a], x[b]], table[y[a], x[b]]
    if turn[b] < never:
        yield int(turn[b]), table[y[a], x[b]], table[y[a], y[b]]
