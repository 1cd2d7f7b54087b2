"""Dual ascent: messages between nodes, and a price per binding time, give a certified bound; the same sweeps decode answers.

    for any messages M and prices y_t >= 0, no answer that fits costs less than
        min over x of [ sum_v theta_v(x_v) + sum_(a,b) theta_ab(x_a, x_b) ] - sum_t y_t limit
        theta = cost + sum over usages of bytes * (y summed over the usage's rows)                       -> Messages.price
    The problem is split into chains along the order of the nodes, and each is minimised exactly          -> sweep
    Nodes that are decided one after the other, from the choices of earlier nodes and the messages of
    later ones, are an answer                                                                             -> sweep

This is sequential tree-reweighted message passing (Kolmogorov 2006): the bound never falls while the prices stay. When a sweep passes
node v, bound + (total_v(i) - min total_v) is a bound on the answers with x_v = i; choices for which it exceeds the cost of a known answer
can be dropped (Messages.affordable). The sums are of positive and negative floats, so every bound is lowered by ROUNDING of their total
size before it is reported. The best prices are found in cutting_planes.py.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..problem import Problem, held, without_limit
from . import loops
from .binding_times import binding_rows, load
from .incumbent import Incumbent, Solver

ROUNDING = 2e-13  # relative to the sum of sizes: floats are rounded to 1.1e-16, a thousand times over
PATIENCE = 20  # sweeps without progress before the loop gives up
PROGRESS = 1e-3  # of the gap, within PATIENCE sweeps
SLOW = 0.01  # the same, where parts or branching close it sooner
CONVERGED = 600  # sweeps at most; Llama blocks on 8x8 are proven in 300
FIRST_LOOKS, RESUMED = 4, 40  # sweeps
OFFER_EVERY = 10  # sweeps: to evaluate an answer of the original problem takes as long as a sweep


@dataclass(frozen=True)
class Dual(Solver):
    """Dual ascent alone: proves most planning problems; elsewhere a bound and a good answer."""

    sweeps: int = 2000

    def run(self, problem: Problem, incumbent: Incumbent) -> None:
        ascend(Messages(problem), incumbent, self.sweeps)


class HalfEdges(NamedTuple):
    """Each edge as seen from both of its ends, in the order of the nodes: the first arguments of `loops.sweep`."""

    first: np.ndarray  # per node, into the costs of all choices; one more at the end
    start: np.ndarray  # per node, into the half-edges; one more at the end
    split: np.ndarray  # per node: its first half-edge to a later node
    neighbour: np.ndarray  # per half-edge
    table: np.ndarray  # place in the pool; rows are the choices of the node, columns those of the neighbour
    into: np.ndarray  # place of the message into the node
    out: np.ndarray  # and of that into the neighbour


@dataclass(frozen=True, eq=False)
class CostTables:
    """The costs of a problem in flat arrays: every distinct table once, and its transpose behind it."""

    half_edges: HalfEdges
    costs: np.ndarray
    pool: np.ndarray
    num_shared: int  # entries; behind them each edge whose pairs hold bytes has a copy of its own, which is priced
    place_of_own: Mapping[int, int]  # by such an edge
    num_messages: int
    cells: int  # of a sweep

    @staticmethod
    def of(problem: Problem, own: Iterable[int]) -> "CostTables":
        place: dict[int, int] = {}
        tables, size = [np.zeros(0)], 0
        for e in problem.edges:
            if id(e.table) not in place:
                place[id(e.table)] = size
                tables += [e.table.ravel(), e.table.T.ravel()]
                size += 2 * e.table.size
        num_shared, place_of_own = size, {}
        for k in sorted(own):
            place_of_own[k] = size
            tables += [problem.edges[k].table.ravel(), problem.edges[k].table.T.ravel()]
            size += 2 * problem.edges[k].table.size
        a, b = _integers(e.a for e in problem.edges), _integers(e.b for e in problem.edges)
        forth = _integers(place_of_own.get(k, place[id(e.table)]) for k, e in enumerate(problem.edges))
        counts, nodes = _integers(map(len, problem.node_costs)), len(problem.node_costs)
        m, n = counts[a], counts[b]
        into_a = np.cumsum(m + n) - (m + n)
        half = [(a, b), (b, a), (forth, forth + m * n), (into_a, into_a + m), (into_a + m, into_a)]
        table = np.stack([np.concatenate(both) for both in half], axis=1)  # node, neighbour, table, message into node, into neighbour
        table = table[np.lexsort(table.T[::-1])]
        start = np.searchsorted(table[:, 0], np.arange(nodes + 1))
        split = start[:-1] + np.bincount(table[:, 0], weights=table[:, 1] < table[:, 0], minlength=nodes).astype(np.int64)
        columns = (np.ascontiguousarray(column) for column in table[:, 1:].T)
        costs, first = np.concatenate(problem.node_costs), np.cumsum([0, *map(len, problem.node_costs)])
        cells = int((m * n).sum()) + len(costs)
        half_edges = HalfEdges(first, start, split, *columns)
        return CostTables(half_edges, costs, np.concatenate(tables), num_shared, place_of_own, int((m + n).sum()), cells)


class Amounts(NamedTuple):
    """The bytes of usages in flat arrays, each with its usage and the place that it adds to."""

    usage: np.ndarray
    place: np.ndarray
    bytes: np.ndarray

    @staticmethod
    def of(parts: Sequence[tuple[int, int, np.ndarray]]) -> "Amounts":
        """parts: a usage, the place of its first number, and its bytes."""
        sizes = _integers(len(held) for _, _, held in parts)
        usage = np.repeat(_integers(k for k, _, _ in parts).astype(np.int32), sizes)  # these arrays are the largest of all
        places = [place + np.arange(len(held), dtype=np.int32) for _, place, held in parts]
        return Amounts(usage, np.concatenate([usage[:0], *places]), np.concatenate([np.zeros(0), *(held for _, _, held in parts)]))


class Messages:
    """The state of dual ascent on a problem: its prices per byte, its messages in both directions, and what the last sweep wrote."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.rows = problem, binding_rows(problem)
        self.limit = math.inf if problem.usage_limit is None else problem.usage_limit
        live = [(k, problem.usages[k]) for k in np.flatnonzero(self.rows.first < self.rows.last).tolist()]
        self.tables = CostTables.of(problem, {u.edge for _, u in live if u.edge is not None})
        self.first = self.tables.half_edges.first
        self.pool = self.tables.pool.copy() if self.tables.place_of_own else self.tables.pool  # with prices
        self.of_nodes = Amounts.of([(k, int(self.first[u.ends[0]]), u.bytes) for k, u in live if u.edge is None])
        own = [(k, self.tables.place_of_own[u.edge] - self.tables.num_shared, u.bytes) for k, u in live if u.edge is not None]
        self.of_pairs = Amounts.of([(k, at + i * b.size, t.ravel()) for k, at, b in own for i, t in enumerate((b, b.T))])
        self.message = np.zeros(self.tables.num_messages)
        self.reduced = np.zeros(len(self.tables.costs))
        self.previous_bound = self._bound = -math.inf  # before and after the sweep that wrote `reduced`
        self.price(np.zeros(len(self.rows.times)))

    def price(self, prices: np.ndarray) -> None:
        """Set the price per byte of every binding time."""
        self.prices = prices
        self._bound = -math.inf
        of_usage, costs, num_shared = self.rows.of_usages(prices), self.tables.costs, self.tables.num_shared
        usage, place, held = self.of_nodes
        self.theta = costs + np.bincount(place, held * of_usage[usage], minlength=len(costs))
        if self.tables.place_of_own:
            self.pool[num_shared:] = self.tables.pool[num_shared:]
            if prices.any():
                extra = of_usage[self.of_pairs.usage]
                extra *= self.of_pairs.bytes
                np.add.at(self.pool[num_shared:], self.of_pairs.place, extra)
        self.fee = float(prices.sum() * self.limit) if len(prices) else 0.0

    def sweep(self, forward: bool) -> tuple[float, np.ndarray, float]:
        """One pass over the nodes: (bound, answer, the answer's cost with its bytes priced)."""
        choice = np.zeros(len(self.first) - 1, np.int64)
        run = loops.compiled(loops.sweep, loops.INTERPRETED * self.tables.cells) or loops.sweep
        with np.errstate(invalid="ignore"):  # infinite costs: compiled code doesn't warn
            swept = run(*self.tables.half_edges, self.theta, self.pool, self.message, self.reduced, choice, forward)
        bound, size, energy = map(float, swept)
        self.previous_bound, self._bound = self._bound, bound - self.fee - ROUNDING * (size + abs(self.fee))
        return self._bound, choice, energy - self.fee

    def loads(self, choice: np.ndarray) -> np.ndarray:
        """Bytes at every binding time."""
        return load(self.rows, np.where(self.rows.first < self.rows.last, held(self.problem, choice), 0.0))

    def affordable(self, incumbent: Incumbent) -> list[np.ndarray]:
        """Per node, the choices that an answer cheaper than the incumbent can use."""
        if not math.isfinite(self.previous_bound):
            return [np.ones(len(c), bool) for c in self.problem.node_costs]
        return np.split(self.reduced + self.previous_bound <= incumbent.cost + incumbent.slack, self.first[1:-1])

    def near(self, incumbent: Incumbent, share: float) -> list[np.ndarray]:
        """Per node, the choices whose bound is within a share of the gap, the best choice, and the incumbent's choice."""
        gap = incumbent.cost - self.previous_bound if math.isfinite(incumbent.cost) else 0.1 * abs(self.previous_bound)
        keep = np.split(self.reduced <= share * gap, self.first[1:-1])
        for v, k in enumerate(keep):
            k[self.reduced[self.first[v] : self.first[v + 1]].argmin()] = True
            if incumbent.choice is not None:
                k[incumbent.choice[v]] = True
        return keep


def _integers(values: Iterable[int]) -> np.ndarray:
    return np.fromiter(values, np.int64)


def ascend(messages: Messages, incumbent: Incumbent, sweeps: int, progress: float = PROGRESS) -> None:
    """Sweep in alternating directions until the incumbent is proven, the bound no longer rises, or time is up."""
    best_bound, best_energy, best_choice = -math.inf, math.inf, None
    recent: list[float] = []
    for k in range(sweeps):
        bound, choice, energy = messages.sweep(forward=k % 2 == 0)
        incumbent.record.work += messages.tables.cells
        best_bound = max(best_bound, bound)
        if energy < best_energy:
            best_energy, best_choice = energy, choice
        incumbent.raise_bound(best_bound)
        close = best_energy - best_bound <= max(incumbent.gap, incumbent.record.tolerance) * abs(best_bound)
        recent.append(best_bound)
        stuck = len(recent) > PATIENCE and best_bound - recent[-PATIENCE] <= progress * (min(best_energy, incumbent.cost) - best_bound)
        if best_choice is not None and (close or stuck or k % OFFER_EVERY == OFFER_EVERY - 1):
            incumbent.offer(best_choice)
            best_choice = None
        if stuck or incumbent.done or best_bound >= incumbent.cost:  # no cheaper answer is among these, be they all answers or a part
            break
    if best_choice is not None:
        incumbent.offer(best_choice)


def look(problem: Problem, incumbent: Incumbent, message: np.ndarray) -> Messages:
    """Continue from given messages, for example those of a similar problem, for few sweeps; any messages give a valid bound."""
    messages = Messages(without_limit(problem))  # the bound holds under any limit
    if message.shape != messages.message.shape:
        raise ValueError(f"there are {len(message)} messages; expected {len(messages.message)}, one per choice of each end of every edge")
    messages.message[:] = message
    for k in range(FIRST_LOOKS):  # the known answer is proven before another answer of the same cost is decoded
        incumbent.raise_bound(messages.sweep(forward=k % 2 == 0)[0])
        if incumbent.done:
            break
    return messages
