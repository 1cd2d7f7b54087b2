"""The parts in which two answers differ, each of which can be exchanged independently.

    D      the nodes at which answers x and y differ; two of them belong to the same part if the edge between them couples them:
               T[x_a, x_b] + T[y_a, y_b] != T[x_a, y_b] + T[y_a, x_b]       (or if it forbids a mixed pair; the same for bytes)
    parts  the connected components of D under that relation. Between parts, the extra cost of an edge is the sum of the extra
           costs that its two ends cause, so the costs and bytes of the parts add up:
               cost(x with some parts as in y) = cost(x) + sum of the extra costs of those parts         -> Differences

If x and y are both optimal at some price, the exchange of any part is worth 0 at that price, so all mixtures are optimal at it too: between
two corners of a hull there are as many proven answers as there are parts, for example one per layer.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from ..problem import Problem
from .binding_times import Rows
from .lagrangian import KnownAnswer

Change = tuple[int, float, float]  # of which group, from what to what
EVEN = 1e-9  # relative to the cost: parts whose worth differs by less are exchanged in the order of the nodes


@dataclass(frozen=True)
class Differences:
    """Per node its part (-1 where the answers agree; parts are numbered by their first nodes), and the effect of each part."""

    part: np.ndarray
    cost: np.ndarray  # extra seconds as in y, per part
    bytes: np.ndarray  # extra bytes, of shape (rows, parts)

    def by_worth(self, a: KnownAnswer, b: KnownAnswer) -> np.ndarray:
        """The parts by their extra cost at the price at which a and b are equal, cheapest first."""
        price = (a.cost - b.cost) / (b.memory - a.memory)
        worth = np.round((self.cost + price * self.bytes.max(axis=0)) / (EVEN * max(abs(a.cost), abs(b.cost))))
        return np.lexsort((np.arange(len(worth)), worth))


def between(problem: Problem, rows: Rows, peaks: list[int], a: KnownAnswer, b: KnownAnswer) -> np.ndarray | None:
    """The mixture of a and b that is nearest to half way between them, in bytes and seconds; None where there is none.

    a holds fewer bytes and costs more. peaks: the rows at which bytes are compared.
    """
    x, y = np.array(a.choice), np.array(b.choice)
    more = differences(problem, rows, peaks, x, y)
    count = len(more.cost)
    order = more.by_worth(a, b)
    memory = (a.loads[peaks][:, None] + np.cumsum(more.bytes[:, order], axis=1)).max(axis=0)
    cost = a.cost + np.cumsum(more.cost[order])
    inside = (memory > a.memory) & (memory < b.memory) & (cost < a.cost) & (cost > b.cost)
    if not inside.any():
        return None
    way = (memory - a.memory) / (b.memory - a.memory) + (a.cost - cost) / (a.cost - b.cost)
    p = int(np.where(inside, np.abs(way - 1.0), np.inf).argmin())
    exchanged = np.zeros(count + 1, bool)  # the last entry: nodes that belong to no part
    exchanged[order[: p + 1]] = True
    return np.where(exchanged[more.part], y, x)


def differences(problem: Problem, rows: Rows, peaks: list[int], x: np.ndarray, y: np.ndarray) -> Differences:
    """The parts in which y differs from x, with their extra cost and their extra bytes at the rows `peaks`."""
    part = _parts(problem, x != y, x, y)
    count = int(part.max(initial=-1)) + 1
    cost, _, held = changes(problem, rows, peaks, x, y, part, count, lambda table, ends: _shares(table, ends, part, x, y))
    return Differences(part, cost, held)


def changes(
    problem: Problem, rows: Rows, peaks: list[int], x: np.ndarray, y: np.ndarray, group: np.ndarray, count: int,
    of_edge: Callable[[np.ndarray, tuple[int, ...]], Iterable[Change]],
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:  # fmt: skip
    """What changes per group of nodes, of 0 to `count`, that gets the choices y in place of x: (cost, forbidden pairs, bytes at the peaks).

    of_edge: the changes of the entry of a table of two nodes. The group of a node that keeps its choice is outside of 0 to `count`.
    """
    cost, forbidden, held = np.zeros(count), np.zeros(count), np.zeros((len(peaks), count))
    changing = (group >= 0) & (group < count)
    for v in np.flatnonzero(changing).tolist():
        cost[group[v]] += problem.node_costs[v][y[v]] - problem.node_costs[v][x[v]]
    for e in problem.edges:
        if changing[e.a] or changing[e.b]:
            for k, old, new in of_edge(e.table, (e.a, e.b)):
                cost[k] += (new if math.isfinite(new) else 0.0) - (old if math.isfinite(old) else 0.0)
                forbidden[k] += math.isinf(new) - math.isinf(old)
    alive = np.array([(rows.first <= row) & (row < rows.last) for row in peaks]).reshape(len(peaks), -1)
    for j in np.flatnonzero(alive.any(axis=0)).tolist():
        u = problem.usages[j]
        if u.edge is not None:
            for k, old, new in of_edge(u.bytes, u.ends):
                held[alive[:, j], k] += new - old
        elif changing[v := u.ends[0]]:
            held[alive[:, j], group[v]] += u.bytes[y[v]] - u.bytes[x[v]]
    return cost, forbidden, held


def parts_that_differ(problem: Problem, x: np.ndarray, y: np.ndarray) -> list[list[int]]:
    """The nodes of each part in which y differs from x."""
    part = _parts(problem, x != y, x, y)
    nodes: list[list[int]] = [[] for _ in range(int(part.max(initial=-1)) + 1)]
    for v in np.flatnonzero(part >= 0).tolist():
        nodes[part[v]].append(v)
    return nodes


def _shares(table: np.ndarray, ends: tuple[int, ...], part: np.ndarray, x: np.ndarray, y: np.ndarray) -> Iterator[Change]:
    """The change of an edge's entry due to the part of each of its ends."""
    a, b = ends
    old = table[x[a], x[b]]
    if part[a] == part[b] >= 0:
        yield part[a], old, table[y[a], y[b]]
    elif part[a] != part[b]:
        for k, new in ((part[a], table[y[a], x[b]]), (part[b], table[x[a], y[b]])):
            if k >= 0:
                yield k, old, new


def _parts(problem: Problem, differ: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    import networkx  # here: it takes a sixth of a second to load

    known: dict[tuple, bool] = {}  # of equal layers, which share their tables

    def coupled(table: np.ndarray, a: int, b: int) -> bool:
        """Whether the table is not the sum of two independent changes. Compared without tolerance: in doubt the ends are joined."""
        if not (differ[a] and differ[b]):
            return False
        key = (id(table), x[a], x[b], y[a], y[b])
        if key not in known:
            mixed = table[x[a], y[b]] + table[y[a], x[b]]
            known[key] = not mixed == table[x[a], x[b]] + table[y[a], y[b]]
        return known[key]

    joined = {k for k, e in enumerate(problem.edges) if coupled(e.table, e.a, e.b)}
    joined |= {u.edge for u in problem.usages if u.edge is not None and coupled(u.bytes, *u.ends)}
    first = np.arange(len(differ))  # of each node's part
    graph = networkx.Graph([(problem.edges[e].a, problem.edges[e].b) for e in sorted(joined)])
    for nodes in networkx.connected_components(graph):
        first[list(nodes)] = min(nodes)
    return np.where(differ, np.searchsorted(np.unique(first[differ]), first), -1)
