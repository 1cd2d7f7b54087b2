"""The time of a plan whose seconds are spread over streams: bounds from prices on streams.

    F_r(x)   = sum_v a_rv . s_v[x_v]  +  sum_uv b_ruv . s_uv[x_u, x_v]          seconds that count for r, by stream          (`Part`)
    time(x) >= F_r(x) for every r: all seconds of one stream, or those of a chain of tasks
    bound    : min over x of time(x)  >=  min over x of sum_r y_r F_r(x)        for any y >= 0 of sum 1         (`priced_by_stream`)

The problem on the right is an ordinary one. Its proven bound is a bound on the time of every choice, and the y that make it large are
those at which the cheapest known choice costs most (Kelley 1960). At these no mixture of the known choices has all F_r small: the mixture
says which further r would raise the bound.                                                                             (`best_prices`)

A limit on bytes is priced beside them: with m_t(x) = bytes_t(x) / limit - 1 and any z >= 0

    min over x that fit of time(x)  >=  min over all x of sum_r y_r F_r(x) + sum_t z_t m_t(x)                                   (`Loads`)
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..problem import Edge, Problem, held
from .binding_times import binding_rows, load
from .infeasibility import priced
from .linprog import SparseRows, linprog

STEEPEST = 100.0  # times the longest known choice: the most that z can be, which has no other end where no known choice fits


@dataclass(frozen=True, eq=False)
class Part:
    """How much of the seconds of each node and each edge count, per stream: from 0 to 1."""

    nodes: np.ndarray  # (nodes, streams)
    edges: np.ndarray  # (edges, streams)


def seconds_of_choice(
    problem: Problem, nodes: Sequence[np.ndarray], edges: Sequence[np.ndarray], choice: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """The seconds of each node and each edge under a choice, of shape (nodes, streams) and (edges, streams), of those of all choices:
    arrays of shape (choices, streams) and (choices of a, choices of b, streams)."""
    of_nodes = np.array([seconds[i] for seconds, i in zip(nodes, choice)])
    of_edges = [seconds[choice[e.a], choice[e.b]] for seconds, e in zip(edges, problem.edges)]
    return of_nodes, np.array(of_edges).reshape(-1, of_nodes.shape[1])


def seconds_of_parts(parts: Sequence[Part], nodes: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """F_r of every part, of `seconds_of_choice`."""
    return np.array([float(np.vdot(nodes, part.nodes) + np.vdot(edges, part.edges)) for part in parts])


def priced_by_stream(
    problem: Problem, nodes: Sequence[np.ndarray], edges: Sequence[np.ndarray], of_nodes: np.ndarray, of_edges: np.ndarray
) -> Problem:
    """The problem with the costs sum_r y_r F_r; of_nodes, of_edges: sum_r y_r a_r and sum_r y_r b_r. What costs inf stays so; equal tables
    stay one table."""
    known: dict[tuple, np.ndarray] = {}

    def priced(costs: np.ndarray, seconds: np.ndarray, weights: np.ndarray) -> np.ndarray:
        key = (id(costs), id(seconds), weights.tobytes())
        if key not in known:
            known[key] = np.where(np.isfinite(costs), seconds @ weights, np.inf)
        return known[key]

    costs = [priced(c, s, w) for c, s, w in zip(problem.node_costs, nodes, of_nodes)]
    tables = [Edge(e.a, e.b, priced(e.table, s, w)) for e, s, w in zip(problem.edges, edges, of_edges)]
    return replace(problem, node_costs=tuple(costs), edges=tuple(tables))


class Loads:
    """m_t of every choice, for the times t at which the limit may be exceeded; none without a limit."""

    def __init__(self, problem: Problem):
        self.problem, self.rows, self.limit = problem, binding_rows(problem), problem.usage_limit or 1.0

    def of(self, choice: Sequence[int]) -> np.ndarray:
        return load(self.rows, held(self.problem, choice)) / self.limit - 1.0

    def priced(self, problem: Problem, prices: np.ndarray) -> Problem:
        """The problem without its limit, in which z_t (bytes_t / limit) costs something: min over x plus sum_t z_t."""
        return priced(problem, self.rows.of_usages(prices / self.limit))


def best_prices(seconds: Sequence[np.ndarray], loads: Sequence[np.ndarray] = ()) -> tuple[np.ndarray, np.ndarray, np.ndarray, float]:
    """(y, z, shares, value): the y, of sum 1, and z at which the cheapest of the known choices costs most; the shares, of sum 1, of the
    known choices of which the largest mean F_r is smallest while no mean m_t exceeds 0; and the value of both, which are each other's dual.

    seconds: F of each choice; loads: its m.
    """
    known, scale = np.array(seconds), float(np.max(seconds)) or 1.0
    count, parts = known.shape
    more = np.array(loads).reshape(count, -1)
    kinds = np.ones(parts), np.zeros(more.shape[1])  # of sum 1, and any
    rows = np.vstack([np.hstack([np.ones((count, 1)), -known / scale, -more]), np.concatenate([np.zeros(1), *kinds])])
    low, high = np.append(np.full(count, -np.inf), 1.0), np.append(np.zeros(count), 1.0)
    least, most = (np.append(end, np.full(rows.shape[1] - 1, other)) for end, other in ((-np.inf, 0.0), (np.inf, STEEPEST)))
    solved = linprog(np.append(-1.0, np.zeros(rows.shape[1] - 1)), SparseRows.dense(rows), low, high, least, most)
    if solved is None:  # any prices give a bound
        (prices, of_bytes), shares = kinds, np.ones(count)
    else:
        prices, of_bytes = np.split(np.maximum(solved.x[1:], 0.0), [parts])
        shares = np.maximum(-solved.prices[:-1], 0.0)
    prices = np.where(prices < 1e-9, 0.0, prices)
    prices = prices / prices.sum()
    of_bytes = of_bytes * scale
    return prices, of_bytes, shares / shares.sum(), float((known @ prices + more @ of_bytes).min())
