"""A check of the installation: each solver on a problem whose optimum is known."""

import numpy as np

from ..problem import Edge, Problem, Usage
from .answer import TOLERANCE, Status
from .solve import solve

OPTIMUM = 9.0


def selftest(optimum: float = OPTIMUM) -> dict[str, str]:
    """Per solver "ok" or what is wrong. Three nodes in a ring: the cheapest choice costs 3, the cheapest within the limit 9."""
    table = np.array([[0.0, 2.0], [np.inf, 0.0]])
    edges = tuple(Edge(a, b, table) for a, b in ((0, 1), (1, 2), (0, 2)))
    usages = tuple(Usage((v,), 0, 1, np.array([4.0, 1.0])) for v in range(3))
    problem = Problem(("a", "b", "c"), (np.array([1.0, 3.0]),) * 3, edges, usages, 9.0)
    states = {}
    for name in ("auto", "ilp", "dp", "dual", "exhaustive"):
        answer = solve(problem, solver=name, time_limit=20.0)
        exact = answer.status is Status.OPTIMAL or name in ("dp", "dual")  # with a memory limit these two may leave a gap
        bounded = answer.bound <= optimum * (1 + TOLERANCE) and answer.cost >= optimum * (1 - TOLERANCE)
        states[name] = "ok" if exact and bounded else f"wrong: {answer.status.value}, cost {answer.cost}, bound {answer.bound}"
    return states
