"""Dynamic programming by variable elimination, capped: exact where the width allows, a bound and a start where not.

    to eliminate v:  m(rest) = min over x_v of the sum of all tables that contain v
The node whose elimination makes the smallest table goes first. Where that table would have more than `cells` cells, the tables of v are
dealt into buckets that stay below it, and each is minimised on its own: the total is then a lower bound (Dechter and Rish 2003).
Going back, every node takes what is best for the tables it was eliminated from, given the nodes eliminated after it.
Memory is left out: a bound it remains, and the answer counts if it fits.
"""

import math
from dataclasses import dataclass

import numpy as np

from ..problem import Problem
from .answer import TOLERANCE
from .incumbent import Incumbent
from .reduce import reduce


@dataclass(frozen=True)
class Factor:
    """A table over some nodes, ascending."""

    nodes: tuple[int, ...]
    table: np.ndarray


@dataclass(frozen=True)
class DP:
    """Variable elimination after the reductions, with tables of at most `cells` cells."""

    time_limit: float | None = None  # seconds
    gap: float | None = None  # relative
    cells: int = 4 * 10**6

    def run(self, problem: Problem, incumbent: Incumbent) -> None:
        reduced = reduce(problem, stop=lambda: incumbent.time_left() <= 0)
        if reduced.problem is None:
            incumbent.raise_bound(math.inf)
            return
        inner = incumbent.inside(reduced.problem, reduced.lift)
        found = eliminate(reduced.problem, self.cells, inner)
        if found is not None:
            choice, bound = found
            inner.offer(choice)
            inner.raise_bound(bound - TOLERANCE / 10 * abs(bound) if math.isfinite(bound) else bound)  # floats were added


def eliminate(problem: Problem, most_cells: int, incumbent: Incumbent) -> tuple[list[int], float] | None:
    """(choice, bound); the choice costs the bound where no table was split. None where time ran out."""
    sizes = [len(c) for c in problem.node_costs]
    factors = {v: [Factor((v,), c)] for v, c in enumerate(problem.node_costs)}
    for e in problem.edges:
        factor = Factor((e.a, e.b), e.table) if e.a < e.b else Factor((e.b, e.a), e.table.T)
        for v in factor.nodes:
            factors[v].append(factor)
    order: list[tuple[int, list[Factor]]] = []
    constant: list[float] = []
    while factors:
        if incumbent.time_left() <= 0:
            return None
        v = min(factors, key=lambda n: (_result_cells(n, factors[n], sizes), n))
        mine = factors.pop(v)
        order.append((v, mine))
        for f in mine:
            for n in f.nodes:
                if n != v:
                    factors[n] = [g for g in factors[n] if g is not f]
        for bucket in _deal(mine, sizes, most_cells):
            message = _minimise(v, bucket)
            if not message.nodes:
                constant.append(float(message.table))
            for n in message.nodes:
                factors[n].append(message)
    return _decide(order, sizes), math.fsum(constant)


def _result_cells(v: int, factors: list[Factor], sizes: list[int]) -> int:
    return math.prod(sizes[n] for n in {n for f in factors for n in f.nodes} - {v})


def _deal(factors: list[Factor], sizes: list[int], most_cells: int) -> list[list[Factor]]:
    """Largest tables first, each into the first bucket that stays below the cap with it."""
    buckets: list[tuple[set[int], list[Factor]]] = []
    for f in sorted(factors, key=lambda f: (-f.table.size, f.nodes)):
        for nodes, bucket in buckets:
            if math.prod(sizes[n] for n in nodes | set(f.nodes)) <= max(most_cells, f.table.size):
                nodes.update(f.nodes)
                bucket.append(f)
                break
        else:
            buckets.append((set(f.nodes), [f]))
    return [bucket for _, bucket in buckets]


def _minimise(v: int, bucket: list[Factor]) -> Factor:
    nodes = tuple(sorted({n for f in bucket for n in f.nodes}))
    total = sum(_spread(f, nodes) for f in bucket)
    return Factor(tuple(n for n in nodes if n != v), np.asarray(total).min(axis=nodes.index(v)))


def _spread(factor: Factor, nodes: tuple[int, ...]) -> np.ndarray:
    """The table with an axis for every one of nodes."""
    where = dict(zip(factor.nodes, factor.table.shape, strict=True))
    return factor.table.reshape([where.get(n, 1) for n in nodes])


def _decide(order: list[tuple[int, list[Factor]]], sizes: list[int]) -> list[int]:
    choice = [0] * len(sizes)
    for v, factors in reversed(order):
        costs = np.zeros(sizes[v])
        for f in factors:
            costs = costs + f.table[tuple(slice(None) if n == v else choice[n] for n in f.nodes)]
        choice[v] = int(costs.argmin())
    return choice
