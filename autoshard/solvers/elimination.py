"""Dynamic programming by variable elimination with capped tables: exact where the width allows it, else a bound and an answer.

    to eliminate v:  m(rest) = min over x_v of the sum of all tables that contain v
The node whose elimination looks at the fewest cells goes first. If the resulting table had more than `cells` cells, the tables of v are
divided into buckets that stay below that, and each bucket is minimised on its own; the total is then a lower bound (Dechter and Rish
2003). On the way back every node gets the choice that is best for the tables from which it was eliminated, given the nodes that were
eliminated after it. Memory is ignored: the bound remains a bound, and the answer counts if it fits.

The reference solver for tiny problems has one table of all nodes instead, and another one of bytes for every live set.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..problem import Problem
from .answer import TOLERANCE, lowered
from .incumbent import Incumbent, Solver
from .reduce import reduce

MOST_DIMS = 32  # numpy allows 64
ROUNDING = TOLERANCE / 10  # relative: what sums of floats may have added to a bound
MOST_ANSWERS = 10**7  # an array of 80 MB


@dataclass(frozen=True)
class Factor:
    """A table over some nodes, ascending."""

    nodes: tuple[int, ...]
    table: np.ndarray

    @staticmethod
    def of(nodes: tuple[int, ...], table: np.ndarray) -> "Factor":
        return Factor(nodes, table) if list(nodes) == sorted(nodes) else Factor(nodes[::-1], table.T)


@dataclass(frozen=True)
class DP(Solver):
    """Variable elimination after the reductions, with tables of at most `cells` cells."""

    cells: int = 4 * 10**6

    def run(self, problem: Problem, incumbent: Incumbent) -> None:
        reduced = reduce(problem, stop=lambda: incumbent.time_left() <= 0)
        if reduced.problem is None:
            incumbent.raise_bound(math.inf)
            return
        inner = incumbent.inside(reduced.problem, reduced.lift)
        solved = eliminate(reduced.problem, self.cells, inner)
        if solved is not None:
            choice, bound = solved
            inner.offer(choice)
            inner.raise_bound(lowered(bound, ROUNDING))


@dataclass(frozen=True)
class Elimination:
    """The order in which the nodes are eliminated, and how many cells are looked at."""

    order: tuple[int, ...]
    cells: int  # of all tables together
    largest: int  # of one table
    widest: tuple[int, ...]  # its nodes
    steps: int  # of finding the order: neighbours of eliminated nodes


def elimination(problem: Problem, single: int | None = None) -> Elimination:
    """The order in which the node with the smallest table is always next; `single` counts as a node of one choice."""
    sizes = [1 if v == single else len(c) for v, c in enumerate(problem.node_costs)]
    near: list[set[int]] = [set() for _ in sizes]
    for e in problem.edges:
        near[e.a].add(e.b)
        near[e.b].add(e.a)
    cells = [math.prod([sizes[n] for n in near[v]], start=sizes[v]) for v in range(len(sizes))]
    waiting = [(size, v) for v, size in enumerate(cells)]
    heapq.heapify(waiting)
    order: list[int] = []
    total = largest = steps = 0
    widest: tuple[int, ...] = ()
    while waiting:
        size, v = heapq.heappop(waiting)
        if size != cells[v]:
            continue  # an old entry: its neighbours have changed, or it is eliminated
        order.append(v)
        cells[v] = -1
        total += size
        steps += len(near[v])
        if size > largest:
            largest, widest = size, (v, *sorted(near[v]))
        for n in near[v]:
            near[n] |= near[v]
            near[n] -= {n, v}
        for n in near[v]:
            size = math.prod([sizes[m] for m in near[n]], start=sizes[n])
            if size != cells[n]:
                cells[n] = size
                heapq.heappush(waiting, (size, n))
    return Elimination(tuple(order), total, largest, widest, steps)


def eliminate(problem: Problem, most_cells: int, incumbent: Incumbent, way: Elimination | None = None) -> tuple[list[int], float] | None:
    """(choice, bound); where no table was split, the choice costs the bound. None where time ran out."""
    sizes = [len(c) for c in problem.node_costs]
    factors = {v: [Factor((v,), c)] for v, c in enumerate(problem.node_costs)}
    for e in problem.edges:
        factor = Factor.of((e.a, e.b), e.table)
        for v in factor.nodes:
            factors[v].append(factor)
    order: list[tuple[int, list[Factor]]] = []
    constant: list[float] = []
    for v in (way or elimination(problem)).order:
        if incumbent.time_left() <= 0:
            return None
        factors_of_v = factors.pop(v)
        order.append((v, factors_of_v))
        for f in factors_of_v:
            for n in f.nodes:
                if n != v:
                    factors[n] = [g for g in factors[n] if g is not f]
        for bucket in _buckets(factors_of_v, sizes, most_cells):
            message = _minimise(v, bucket)
            if not message.nodes:
                constant.append(float(message.table))
            for n in message.nodes:
                factors[n].append(message)
    return _decide(order, sizes), math.fsum(constant)


def _buckets(factors: list[Factor], sizes: list[int], most_cells: int) -> list[list[Factor]]:
    """Largest tables first, each in the first bucket that stays below the cap with it."""
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
    sizes = {n: size for f in bucket for n, size in zip(f.nodes, f.table.shape, strict=True)}
    nodes = tuple(sorted(sizes))
    if len(nodes) > MOST_DIMS:  # few cells: most nodes have one choice, and need no dim of their own
        nodes = tuple(n for n in nodes if n == v or sizes[n] > 1)
    total = sum(spread(f, nodes) for f in sorted(bucket, key=lambda f: f.table.size))  # only the last sums are as large as the result
    return Factor(tuple(n for n in nodes if n != v), np.asarray(total).min(axis=nodes.index(v)))


def spread(factor: Factor, nodes: Sequence[int]) -> np.ndarray:
    """The table with one dim per node of `nodes`."""
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


@dataclass(frozen=True)
class Exhaustive(Solver):
    """Try everything; only for problems of up to 1e7 answers."""

    def run(self, problem: Problem, incumbent: Incumbent) -> None:
        shape = tuple(len(c) for c in problem.node_costs)
        if math.prod(shape) > MOST_ANSWERS:
            raise ValueError(f"the problem has more answers than the {MOST_ANSWERS} that exhaustive tries at most; use auto")
        cost, nodes = np.zeros(shape), range(len(shape))
        for v, c in enumerate(problem.node_costs):
            cost += spread(Factor((v,), c), nodes)
        for e in problem.edges:
            cost += spread(Factor.of((e.a, e.b), e.table), nodes)
        if problem.usage_limit is not None:
            for t in {u.start for u in problem.usages if u.start < u.end}:  # memory only rises at starts
                alive = (spread(Factor.of(u.ends, u.bytes), nodes) for u in problem.usages if u.start <= t < u.end)
                cost[sum(alive, np.zeros(shape)) > problem.usage_limit] = np.inf
        best = np.unravel_index(int(cost.argmin()), shape)
        if math.isfinite(cost[best]):
            incumbent.offer([int(i) for i in best])
        incumbent.raise_bound(incumbent.cost)
