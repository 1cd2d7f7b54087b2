"""The time of a plan whose seconds are spread over streams: bounds from prices on streams.

    F_r(x)   = sum_v a_rv . s_v[x_v]  +  sum_uv b_ruv . s_uv[x_u, x_v]          seconds that count for r, by stream          (`Part`)
    time(x) >= F_r(x) for every r: all seconds of one stream, or those of a chain of tasks
    bound    : min over x of time(x)  >=  min over x of sum_r y_r F_r(x)        for any y >= 0 of sum 1         (`priced_by_stream`)

The problem on the right is an ordinary one. Its proven bound is a bound on the time of every choice, and the y that make it large are
those at which the cheapest known choice costs most (Kelley 1960). At these no mixture of the known choices has all F_r small: the mixture
says which further r would raise the bound.                                                          (`best_prices`, `worst_mixture`)
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


def best_prices(seconds: Sequence[np.ndarray]) -> tuple[np.ndarray, float]:
    """The prices of sum 1 at which the cheapest of the known choices costs most, and what it then costs. seconds: F of each choice."""
    known = np.array(seconds)
    prices = best_shares(np.zeros(len(known)), known)
    prices = np.where(prices < 1e-9, 0.0, prices)
    prices = prices / prices.sum()
    return prices, float((known @ prices).min())


def worst_mixture(seconds: Sequence[np.ndarray]) -> tuple[np.ndarray, float]:
    """The shares, of sum 1, of the known choices of which the largest mean F_r is smallest, and that mean: the dual of `best_prices`."""
    known = np.array(seconds)
    shares = best_shares(np.zeros(known.shape[1]), known.max() - known.T)
    return shares / shares.sum(), float((shares / shares.sum() @ known).max())
