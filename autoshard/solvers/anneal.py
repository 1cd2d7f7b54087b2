"""Simulated annealing whose moves are forests (forest.py): answers for large problems whose memory limit binds.

Every state fits at the rows looked at; rows are added when an answer exceeds another one. A run cools from a share of the gap to a
hundredth of that, and starts where the best one ended; the next run takes longer. Runs are counted in operations, not seconds, so the
same seed gives the same answers. On the contest's V one run of 5 CPU seconds beats every team.
"""

from collections.abc import Sequence

import numpy as np

from ..problem import NodeUsage
from .dual import Messages
from .forest import Graph, walk
from .incumbent import Incumbent
from .program import worst_of_runs

SLICE = 2 * 10**8  # operations: about half a second, so that Ctrl-C and the time limit are heard
HOT, COLD = 0.06, 0.0006  # temperatures as shares of the incumbent's cost
LARGEST_BLOCK = 60  # nodes
SPREAD = 0.5  # of the logarithm of the prices, from move to move
FULL = 0.9  # of the limit: rows that the first answer fills so far are looked at from the start


def graph_of(messages: Messages, rows: Sequence[int]) -> Graph:
    """The arrays of the kernels; `rows` are the binding times looked at, ascending."""
    problem, looked = messages.problem, np.array(rows, dtype=np.int64)
    held: list[dict[int, np.ndarray]] = [{} for _ in problem.node_costs]
    low, high = np.searchsorted(looked, messages.rows.first).tolist(), np.searchsorted(looked, messages.rows.last).tolist()
    for u, a, b in zip(problem.usages, low, high, strict=True):
        if isinstance(u, NodeUsage):
            for r in range(a, b):
                held[u.node][r] = held[u.node].get(r, 0.0) + u.bytes
    bytes_of = [np.array([h[r] for r in sorted(h)]).T.ravel() for h in held]
    return Graph(
        messages.first, messages.costs, messages.start, messages.neighbour, messages.table, messages.pool,
        np.cumsum([0, *map(len, held)]), np.array([r for h in held for r in sorted(h)], dtype=np.int64),
        np.cumsum([0, *map(len, bytes_of)]), np.concatenate(bytes_of),
    )  # fmt: skip
