"""The reductions of a problem of layers: each part is reduced by itself, equal parts once, then all of it.

    part      reduced with its boundary kept (`reduce(kept=...)`): that holds for any costs of the boundary's choices
    joined    the reduced parts side by side; a node of the boundary has the choices that all of its parts leave
    reduced   the joined problem, in a sixth of the time that the whole takes
"""

from collections.abc import Callable, Sequence

import numpy as np

from ..problem import Edge, Problem
from .parts import Parts, divide
from .reduce import Reduced, reduce

Lift = Callable[[Sequence[int] | np.ndarray], list[int]]


def reduce_in_parts(problem: Problem, homes: np.ndarray, stop: Callable[[], bool]) -> tuple[Problem | None, np.ndarray, Lift]:
    """(reduced problem, the homes of its nodes, lift of its answers); no problem where no answer exists. Without a memory limit."""
    parts = divide(problem, homes)
    of_kind: dict[int, Reduced] = {}
    for p, kind in enumerate(parts.kind_of.tolist()):
        if kind not in of_kind:
            of_kind[kind] = reduce(parts.part(p), stop=stop, kept=parts.boundary(p).tolist())
    if any(r.problem is None for r in of_kind.values()):
        return None, homes, list
    joined = _Joined(parts, [of_kind[kind] for kind in parts.kind_of.tolist()])
    if any(len(left) == 0 for left in joined.left.values()):
        return None, homes, list
    again = reduce(joined.problem(), stop=stop)
    inner = joined.homes(homes)[[*again.nodes, 0]]  # the base is the last node; it has no edges
    return again.problem, inner, lambda choice: joined.lift(again.lift(choice))


class _Joined:
    """The reduced parts as one problem: the nodes on boundaries come first, then those inside of each part."""

    def __init__(self, parts: Parts, reduced: Sequence[Reduced]) -> None:
        self.parts, self.reduced = parts, reduced
        self.left: dict[int, np.ndarray] = {}  # per node on a boundary: its choices that all parts leave
        self.choices: list[dict[int, np.ndarray]] = []  # per part, by node of its reduced problem on the boundary: its choices
        self.number: list[np.ndarray] = []  # per part: the joined number of each node of its reduced problem
        known: dict[tuple[int, int], np.ndarray] = {}
        for p, r in enumerate(reduced):
            place = {v: k for k, v in enumerate(r.nodes)}
            mine = {}
            for local in parts.boundary(p).tolist():
                v, key = int(parts.of(p)[local]), (id(r), local)
                if key not in known:
                    known[key] = r.choices_left(local, len(parts.problem.node_costs[v]))
                mine[place[local]] = known[key]
                self.left[v] = np.intersect1d(self.left[v], known[key]) if v in self.left else known[key]
            self.choices.append(mine)
        self.boundary = {v: k for k, v in enumerate(self.left)}
        size = len(self.boundary)
        for p, r in enumerate(reduced):
            assert r.problem is not None
            number = np.zeros(len(r.problem.node_costs), np.int64)
            for k in range(len(number)):
                if k in self.choices[p]:
                    number[k] = self.boundary[int(parts.of(p)[r.nodes[k]])]
                else:
                    number[k], size = size, size + 1
            self.number.append(number)
        self.size = size

    def problem(self) -> Problem:
        names, costs = [""] * self.size, [np.zeros(1)] * self.size
        for v, k in self.boundary.items():
            names[k], costs[k] = self.parts.problem.names[v], self.parts.problem.node_costs[v][self.left[v]]
        edges: list[Edge] = []
        tables: dict[tuple, tuple[np.ndarray, np.ndarray]] = {}  # shared as those of the reduced parts are
        for p, r in enumerate(self.reduced):
            assert r.problem is not None
            rows = {k: self._rows(p, k) for k in self.choices[p]}
            for k, c in enumerate(r.problem.node_costs):
                n = int(self.number[p][k])
                names[n] = names[n] or r.problem.names[k]
                costs[n] = costs[n] + c[rows[k]] if k in rows else c
            for e in r.problem.edges:
                key = (id(e.table), *(rows[end].tobytes() if end in rows else b"" for end in (e.a, e.b)))
                if key not in tables:
                    table = e.table[rows[e.a]] if e.a in rows else e.table
                    tables[key] = table[:, rows[e.b]] if e.b in rows else table, e.table
                edges.append(Edge(int(self.number[p][e.a]), int(self.number[p][e.b]), tables[key][0]))
        return Problem(tuple(names), tuple(costs), tuple(edges))

    def _rows(self, p: int, k: int) -> np.ndarray:
        """Where the choices that all parts leave to a boundary node are among those that part p leaves."""
        v = int(self.parts.of(p)[self.reduced[p].nodes[k]])
        return np.searchsorted(self.choices[p][k], self.left[v])

    def homes(self, homes: np.ndarray) -> np.ndarray:
        """The home of each joined node: that of the node which it is."""
        out = np.zeros(self.size, np.int64)
        for p, r in enumerate(self.reduced):
            out[self.number[p][: len(r.nodes)]] = homes[self.parts.of(p)[list(r.nodes)]]
        return out

    def lift(self, choice: Sequence[int] | np.ndarray) -> list[int]:
        joined, x = np.asarray(choice), np.zeros(len(self.parts.problem.node_costs), np.int64)
        for p, r in enumerate(self.reduced):
            mine = joined[self.number[p]]
            for k in self.choices[p]:
                mine[k] = self._rows(p, k)[mine[k]]
            x[self.parts.of(p)] = r.lift(mine)
        return x.tolist()
