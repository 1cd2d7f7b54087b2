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
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from ..problem import Problem, held, without_limit
from . import loops
from .binding_times import binding_rows, load
from .incumbent import Incumbent

ROUNDING = 2e-13  # relative to the sum of sizes: floats are rounded to 1.1e-16, a thousand times over
PATIENCE = 20  # sweeps without progress before the loop gives up
PROGRESS = 1e-3  # of the gap, within PATIENCE sweeps
SLOW = 0.01  # the same, where parts or branching close it sooner
CONVERGED = 600  # sweeps at most; Llama blocks on 8x8 are proven in 300
FIRST_LOOKS, RESUMED = 4, 40  # sweeps
OFFER_EVERY = 10  # sweeps: to evaluate an answer of the original problem takes as long as a sweep


@dataclass(frozen=True)
class Dual:
    """Dual ascent alone: proves most planning problems; elsewhere a bound and a good answer."""

    time_limit: float | None = None  # seconds
    gap: float | None = None  # relative
    sweeps: int = 2000

    def run(self, problem: Problem, incumbent: Incumbent) -> None:
        ascend(Messages(problem), incumbent, self.sweeps)


class Messages:
    """The arrays of `sweep`: half-edges in the order of their nodes, each distinct table once, and messages in both directions."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.rows = binding_rows(problem)
        self.limit = math.inf if problem.usage_limit is None else problem.usage_limit
        self.prices = np.zeros(len(self.rows.times))  # per byte over the limit
        self.first = np.cumsum([0, *map(len, problem.node_costs)])
        self.costs = np.concatenate(problem.node_costs)
        self._set_tables()
        self._set_usages()
        self.message = np.zeros(int(self._message_size))
        self.reduced = np.zeros(len(self.costs))
        self.previous_bound = self._bound = -math.inf  # before and after the sweep that wrote `reduced`
        self.price(self.prices)

    def _set_tables(self) -> None:
        """One copy of every distinct table and of its transpose; an edge whose pairs hold bytes has a copy of its own, which is priced."""
        problem, nodes = self.problem, len(self.problem.node_costs)
        live = self.rows.first < self.rows.last
        own = {u.edge for k, u in enumerate(problem.usages) if live[k] and u.edge is not None}
        place: dict[int, int] = {}
        at: dict[int, int] = {}
        shared, priced, size = [], [], 0
        for e in problem.edges:
            if id(e.table) not in place:
                place[id(e.table)] = size
                shared += [e.table.ravel(), e.table.T.ravel()]
                size += 2 * e.table.size
        self.num_shared = size
        for k in sorted(own):
            at[k] = size
            priced += [problem.edges[k].table.ravel(), problem.edges[k].table.T.ravel()]
            size += 2 * problem.edges[k].table.size
        self.pool = np.concatenate([np.zeros(0), *shared, *priced])
        self._priced_tables, self._place_of_own = self.pool[self.num_shared :].copy(), at
        a, b = _integers(e.a for e in problem.edges), _integers(e.b for e in problem.edges)
        forth = _integers(at.get(k, place[id(e.table)]) for k, e in enumerate(problem.edges))
        counts = _integers(map(len, problem.node_costs))
        m, n = counts[a], counts[b]
        self._message_size = int((m + n).sum())
        self.cells = int((m * n).sum()) + len(self.costs)  # of a sweep
        self._entries = loops.INTERPRETED * self.cells
        into_a = np.cumsum(m + n) - (m + n)
        half = [(a, b), (b, a), (forth, forth + m * n), (into_a, into_a + m), (into_a + m, into_a)]
        table = np.stack([np.concatenate(both) for both in half], axis=1)  # node, neighbour, table, message into node, into neighbour
        table = table[np.lexsort(table.T[::-1])]
        self.start = np.searchsorted(table[:, 0], np.arange(nodes + 1))
        self.split = self.start[:-1] + np.bincount(table[:, 0], weights=table[:, 1] < table[:, 0], minlength=nodes).astype(np.int64)
        self.neighbour, self.table, self.into, self.out = (np.ascontiguousarray(column) for column in table[:, 1:].T)

    def _set_usages(self) -> None:
        """The bytes of all usages in flat arrays, with the entry of theta (one end) or of the pool (two ends) that each adds to."""
        none, nothing = np.zeros(0, np.int64), np.zeros(0)
        live = [(k, self.problem.usages[k]) for k in np.flatnonzero(self.rows.first < self.rows.last).tolist()]
        of_nodes, of_pairs = [(k, u) for k, u in live if u.edge is None], [(k, u, u.edge) for k, u in live if u.edge is not None]
        self._node_of = np.repeat(_integers(k for k, _ in of_nodes), _integers(u.bytes.size for _, u in of_nodes))
        self._node_slots = np.concatenate([none, *(self.first[u.ends[0]] + np.arange(u.bytes.size) for _, u in of_nodes)])
        self._node_bytes = np.concatenate([nothing, *(u.bytes for _, u in of_nodes)])
        usages = _integers(k for k, _, _ in of_pairs).astype(np.int32)  # these arrays are the largest of all
        self._pair_of = np.repeat(usages, _integers(2 * u.bytes.size for _, u, _ in of_pairs))
        places = [np.arange(2 * u.bytes.size, dtype=np.int32) + (self._place_of_own[edge] - self.num_shared) for _, u, edge in of_pairs]
        self._pair_slots = np.concatenate([none.astype(np.int32), *places])
        self._pair_bytes = np.concatenate([nothing, *(half for _, u, _ in of_pairs for half in (u.bytes.ravel(), u.bytes.T.ravel()))])

    def price(self, prices: np.ndarray) -> None:
        """Set the price per byte of every binding time."""
        self.prices = prices
        self._bound = -math.inf
        of_usage = self.rows.of_usages(prices)
        extra = np.bincount(self._node_slots, self._node_bytes * of_usage[self._node_of], minlength=len(self.costs))
        self.theta = self.costs + extra
        if len(self._priced_tables):
            self.pool[self.num_shared :] = self._priced_tables
            if prices.any():
                extra = of_usage[self._pair_of]
                extra *= self._pair_bytes
                np.add.at(self.pool[self.num_shared :], self._pair_slots, extra)
        self.fee = float(prices.sum() * self.limit) if len(prices) else 0.0

    def sweep(self, forward: bool) -> tuple[float, np.ndarray, float]:
        """One pass over the nodes: (bound, answer, the answer's cost with its bytes priced)."""
        choice = np.zeros(len(self.first) - 1, np.int64)
        run = loops.compiled(loops.sweep, self._entries) or loops.sweep
        with np.errstate(invalid="ignore"):  # infinite costs: compiled code doesn't warn
            swept = run(
                self.first, self.theta, self.start, self.split, self.neighbour, self.table, self.into, self.out,
                self.pool, self.message, self.reduced, choice, forward,
            )  # fmt: skip
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
        incumbent.record.work += messages.cells
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


def converge(problem: Problem, incumbent: Incumbent, sweeps: int = CONVERGED) -> np.ndarray:
    """Sweep over the problem without reductions. Returns the messages in the order of the edges, into the first end and the second."""
    messages = Messages(problem)
    ascend(messages, incumbent, sweeps)
    return messages.message


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


def resume(problem: Problem, incumbent: Incumbent, message: np.ndarray) -> Messages:
    """Continue from given messages until they give no better bound."""
    messages = look(problem, incumbent, message)
    if not incumbent.done:
        ascend(messages, incumbent, RESUMED)
    return messages
