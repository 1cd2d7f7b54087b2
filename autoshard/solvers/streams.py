"""The time of a plan whose seconds are spread over streams: bounds from prices on streams.

    F_r(x)   = sum_v a_rv . s_v[x_v]  +  sum_uv b_ruv . s_uv[x_u, x_v]          seconds that count for r, by stream          (`Part`)
    time(x) >= F_r(x) for every r: all seconds of one stream, or those of a chain of tasks
    bound    : min over x of time(x)  >=  min over x of sum_r y_r F_r(x)        for any y >= 0 of sum 1         (`priced_by_stream`)

The problem on the right is an ordinary one. Its proven bound is a bound on the time of every choice, and the y that make it large are
those at which the cheapest known choice costs most (Kelley 1960).                                                    (`best_prices`)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..problem import Edge, Problem
from .lagrangian import best_shares


@dataclass(frozen=True, eq=False)
class Part:
    """How much of the seconds of each node and each edge count, per stream: from 0 to 1."""

    nodes: np.ndarray  # (nodes, streams)
    edges: np.ndarray  # (edges, streams)


def seconds_of_parts(
    problem: Problem, nodes: Sequence[np.ndarray], edges: Sequence[np.ndarray], parts: Sequence[Part], choice: Sequence[int]
) -> np.ndarray:
    """F_r of every part. nodes, edges: seconds by stream, of shape (choices, streams) and (choices of a, choices of b, streams)."""
    of_nodes = np.array([seconds[i] for seconds, i in zip(nodes, choice)])
    num_streams = of_nodes.shape[1]
    of_edges = np.array([seconds[choice[e.a], choice[e.b]] for seconds, e in zip(edges, problem.edges)]).reshape(-1, num_streams)
    return np.array([float((of_nodes * part.nodes).sum() + (of_edges * part.edges).sum()) for part in parts])


def priced_by_stream(
    problem: Problem, nodes: Sequence[np.ndarray], edges: Sequence[np.ndarray], parts: Sequence[Part], prices: Sequence[float] | np.ndarray
) -> Problem:
    """The problem with the costs sum_r y_r F_r. What costs inf stays so; equal tables stay one table."""
    of_nodes = np.sum([y * part.nodes for y, part in zip(prices, parts) if y], axis=0)
    of_edges = np.sum([y * part.edges for y, part in zip(prices, parts) if y], axis=0)
    known: dict[tuple, np.ndarray] = {}

    def priced(costs: np.ndarray, seconds: np.ndarray, weights: np.ndarray) -> np.ndarray:
        key = (id(costs), id(seconds), weights.tobytes())
        if key not in known:
            known[key] = np.where(np.isfinite(costs), seconds @ weights, np.inf)
        return known[key]

    costs = [priced(c, s, w) for c, s, w in zip(problem.node_costs, nodes, of_nodes)]
    tables = [Edge(e.a, e.b, priced(e.table, s, w)) for e, s, w in zip(problem.edges, edges, of_edges)]
    return replace(problem, node_costs=tuple(costs), edges=tuple(tables))


def best_prices(seconds: Sequence[np.ndarray]) -> tuple[np.ndarray, float]:
    """The prices of sum 1 at which the cheapest of the known choices costs most, and what it then costs. seconds: F of each choice."""
    known = np.array(seconds)
    prices = best_shares(np.zeros(len(known)), known)
    prices = np.where(prices < 1e-9, 0.0, prices)
    prices = prices / prices.sum()
    return prices, float((known @ prices).min())
