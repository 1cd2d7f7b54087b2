"""Simulated annealing whose moves are forests (forest_moves.py): answers for large problems whose memory limit binds.

Every state fits at the rows that are watched; a row is added when an answer exceeds the limit at it. A run starts from the incumbent, at a
temperature of a few times the gap per node. Two walkers run side by side, and a run is measured in operations, not in seconds, so the
number of cores does not change an answer. The contest's best published M needs a run of 25 CPU seconds; no team reached the cost that V
has after 10.
"""

import itertools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from .cutting_planes import PriceAscent
from .dual_ascent import Messages
from .forest_moves import EdgeGraph, walk
from .incumbent import Incumbent
from .linear_program import worst_of_runs

WALKERS = 2  # always, whatever the number of cores: the same answers everywhere
SLICE = 2 * 10**8  # operations: about half a second, so that Ctrl-C and the time limit take effect
SHORT = 2.0  # seconds left: slices are ten times shorter then
HOT = (10.0, 5.0, 20.0)  # temperatures to start from, run by run and walker by walker, in gaps per node
COOLING = 100.0  # the last temperature is so many times lower
LARGEST_BLOCK = 60  # nodes
SPREAD = 0.5  # of the logarithm of the prices, from move to move
LEAST_PRICE = 1e-3  # of the largest one
FEW_ROWS = 100  # up to so many rows, all are watched
FULL = 0.9  # of the limit: rows that the first answer fills so far are watched from the start


def graph_of(messages: Messages, rows: Sequence[int]) -> EdgeGraph:
    """The arrays of the kernels; `rows` are the binding times that are watched, ascending."""
    problem, edges, watched = messages.problem, messages.tables.half_edges, np.array(rows, dtype=np.int64)
    held: list[dict[int, np.ndarray]] = [{} for _ in problem.node_costs]
    low, high = np.searchsorted(watched, messages.rows.first).tolist(), np.searchsorted(watched, messages.rows.last).tolist()
    for u, a, b in zip(problem.usages, low, high, strict=True):
        if u.edge is None:
            of_node = held[u.ends[0]]
            for r in range(a, b):
                of_node[r] = of_node.get(r, 0.0) + u.bytes
    bytes_of = [np.array([h[r] for r in sorted(h)]).T.ravel() for h in held]
    return EdgeGraph(
        messages.first, messages.tables.costs, edges.start, edges.neighbour, edges.table, messages.pool,
        np.cumsum([0, *map(len, held)]), np.array([r for h in held for r in sorted(h)], dtype=np.int64),
        np.cumsum([0, *map(len, bytes_of)]), np.concatenate(bytes_of),
    )  # fmt: skip


class Annealing:
    """Walkers that cool side by side; their answers are offered to the incumbent."""

    def __init__(self, ascent: PriceAscent, incumbent: Incumbent) -> None:
        self.messages, self.incumbent, self.prices = ascent.messages, incumbent, ascent.prices
        rows = set(ascent.rows)
        if incumbent.choice is not None:
            rows |= set(worst_of_runs(self.messages.loads(np.array(incumbent.choice)), FULL * self.messages.limit))
        self._watch(rows if len(self.prices) > FEW_ROWS else set(range(len(self.prices))))
        self.runs = 0

    def _watch(self, rows: set[int]) -> None:
        self.rows = sorted(rows)
        self.graph = graph_of(self.messages, self.rows)
        self.row_prices = self.prices[self.rows]
        self.row_prices = self.row_prices + LEAST_PRICE * self.row_prices.max(initial=0.0)

    def run(self, num_slices: int) -> None:
        """Cool once, in `num_slices` slices, from the incumbent; there must be one."""
        assert self.incumbent.choice is not None
        start = np.array(self.incumbent.choice)
        states = [(start.copy(), start.copy()) for _ in range(WALKERS)]
        per_node = max(self.incumbent.cost - self.incumbent.bound, 1e-12 * abs(self.incumbent.cost)) / len(start)
        hot = [HOT[(self.runs + k) % len(HOT)] * per_node for k in range(WALKERS)]
        generators = [np.random.default_rng([self.runs, w]) for w in range(WALKERS)]
        self.runs += 1
        with ThreadPoolExecutor(WALKERS) as threads:
            for k in range(num_slices):
                if self.incumbent.done:
                    return
                jobs = [
                    threads.submit(self._walk, *states[w], hot[w], k / num_slices, (k + 1) / num_slices, generators[w])
                    for w in range(WALKERS)
                ]
                for job in jobs:
                    job.result()
                self._offer(states)

    def _walk(self, x: np.ndarray, best: np.ndarray, hot: float, begin: float, end: float, rng: np.random.Generator) -> None:
        cold = 1 / COOLING
        operations = SLICE if self.incumbent.time_left() > SHORT else SLICE // 10
        walk(
            self.graph, self.messages.limit, self.row_prices, x, best, hot * cold**begin, hot * cold**end,
            LARGEST_BLOCK, SPREAD, operations, rng,
        )  # fmt: skip

    def _offer(self, states: list[tuple[np.ndarray, np.ndarray]]) -> None:
        """Offer the walkers' best answers; rows that they exceed because these were not watched are watched from now on."""
        new: set[int] = set()
        for _, best in states:
            exceeded = self._exceeded(best)
            new |= exceeded
            if not exceeded:
                self.incumbent.offer(best)
        if new:
            self._watch(set(self.rows) | new)
            for state in itertools.chain(*states):
                if self._exceeded(state):
                    state[:] = self.incumbent.choice

    def _exceeded(self, choice: np.ndarray) -> set[int]:
        return set(worst_of_runs(self.messages.loads(choice) - self.messages.limit, 0.0))
