"""Between two answers: the parts in which they differ can be exchanged one by one.

    D      the nodes at which answers x and y differ; two of them belong together where the edge between them couples them:
               T[x_a, x_b] + T[y_a, y_b] != T[x_a, y_b] + T[y_a, x_b]       (or it forbids a mixed pair; the same for bytes)
    parts  the connected components of D under that relation. Between parts, what an edge costs more is the sum of what
           either end makes it cost more, so the costs and bytes of the parts simply add up:
               cost(x with some parts as in y) = cost(x) + sum of what those parts cost more           -> Differences

Where x and y are both best at some price, every part is worth nothing at that price, so all mixtures are best at it too: between two
corners of a hull lie as many proven answers as there are parts, a layer at a time for example.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import connected_components

from ..problem import EdgeUsage, NodeUsage, Problem
from .pricing import Found
from .times import Rows

EVEN = 1e-9  # relative to the cost: parts of equal worth go in the order of the nodes


@dataclass(frozen=True)
class Differences:
    """Per node the number of its part, in the order of their first nodes, -1 where the answers agree; and what each part changes."""

    part: np.ndarray
    cost: np.ndarray  # seconds more as in y, per part
    bytes: np.ndarray  # the same, of shape (rows asked for, parts)


def between(problem: Problem, rows: Rows, peaks: list[int], a: Found, b: Found) -> np.ndarray | None:
    """The answer that lies nearest to half way from a to b, in bytes and seconds; None where there is none.

    a holds fewer bytes and costs more. peaks: the rows at which bytes are looked at.
    """
    x, y = np.array(a.choice), np.array(b.choice)
    more = differences(problem, rows, peaks, x, y)
    count = len(more.cost)
    price = (a.cost - b.cost) / (b.memory - a.memory)
    worth = np.round((more.cost + price * more.bytes.max(axis=0)) / (EVEN * max(abs(a.cost), abs(b.cost))))
    order = np.lexsort((np.arange(count), worth))
    memory = (a.loads[peaks][:, None] + np.cumsum(more.bytes[:, order], axis=1)).max(axis=0)
    cost = a.cost + np.cumsum(more.cost[order])
    inside = (memory > a.memory) & (memory < b.memory) & (cost < a.cost) & (cost > b.cost)
    if not inside.any():
        return None
    way = (memory - a.memory) / (b.memory - a.memory) + (a.cost - cost) / (a.cost - b.cost)
    p = int(np.where(inside, np.abs(way - 1.0), np.inf).argmin())
    taken = np.zeros(count + 1, bool)  # the last one: nodes that belong to no part
    taken[order[: p + 1]] = True
    return np.where(taken[more.part], y, x)


def differences(problem: Problem, rows: Rows, peaks: list[int], x: np.ndarray, y: np.ndarray) -> Differences:
    """The parts in which y differs from x, and what each of them changes at the rows `peaks`."""
    differ = x != y
    part = _parts(problem, differ, x, y)
    count = int(part.max(initial=-1)) + 1
    cost, held = np.zeros(count), np.zeros((len(peaks), count))
    alive = np.array([(rows.first <= row) & (row < rows.last) for row in peaks]).reshape(len(peaks), -1)
    for v in np.flatnonzero(differ).tolist():
        cost[part[v]] += problem.node_costs[v][y[v]] - problem.node_costs[v][x[v]]
    for e in problem.edges:
        if differ[e.a] or differ[e.b]:
            for k, change in _shares(e.table, e.a, e.b, part, x, y):
                cost[k] += change
    for j in np.flatnonzero(alive.any(axis=0)).tolist():
        u = problem.usages[j]
        if isinstance(u, NodeUsage):
            if differ[u.node]:
                held[alive[:, j], part[u.node]] += u.bytes[y[u.node]] - u.bytes[x[u.node]]
        else:
            for k, change in _shares(u.bytes, problem.edges[u.edge].a, problem.edges[u.edge].b, part, x, y):
                held[alive[:, j], k] += change
    return Differences(part, cost, held)


def _shares(table: np.ndarray, a: int, b: int, part: np.ndarray, x: np.ndarray, y: np.ndarray) -> list[tuple[int, float]]:
    """What the parts of an edge's ends change in it."""
    old = table[x[a], x[b]]
    if part[a] == part[b]:
        return [(part[a], table[y[a], y[b]] - old)] if part[a] >= 0 else []
    found = [(part[a], table[y[a], x[b]] - old)] if part[a] >= 0 else []
    return found + ([(part[b], table[x[a], y[b]] - old)] if part[b] >= 0 else [])


def _parts(problem: Problem, differ: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    joined = {e for e, edge in enumerate(problem.edges) if differ[edge.a] and differ[edge.b] and _coupled(edge.table, edge.a, edge.b, x, y)}
    for u in problem.usages:
        if isinstance(u, EdgeUsage) and differ[(edge := problem.edges[u.edge]).a] and differ[edge.b]:
            if u.edge not in joined and _coupled(u.bytes, edge.a, edge.b, x, y):
                joined.add(u.edge)
    ends = np.array([(problem.edges[e].a, problem.edges[e].b) for e in sorted(joined)], dtype=np.int64).reshape(-1, 2)
    graph = coo_matrix((np.ones(len(ends)), ends.T), shape=(len(differ), len(differ)))
    _, label = connected_components(graph, directed=False)
    labels, first = np.unique(label[differ], return_index=True)
    number = np.full(label.max(initial=0) + 1, -1)
    number[labels[np.argsort(first)]] = np.arange(len(labels))
    return np.where(differ, number[label], -1)


def _coupled(table: np.ndarray, a: int, b: int, x: np.ndarray, y: np.ndarray) -> bool:
    """Does the table know the pair otherwise than as the sum of its ends? Compared without tolerance: doubt joins."""
    mixed = table[x[a], y[b]] + table[y[a], x[b]]
    return not mixed == table[x[a], x[b]] + table[y[a], y[b]]
