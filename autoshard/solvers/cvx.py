"""The integer program of linear_program.py written in cvxpy, as papers write it: an independent check of `ilp`, and easy to extend.

    minimise sum_v c_v' x_v + sum_e T_e . P_e     x boolean, P >= 0
    1' x_v = 1,   P_e 1 = x_a,   P_e' 1 = x_b,   P_e[forbidden] = 0,   x_v[forbidden] = 0
    at every time at which a usage starts: bytes alive <= limit
All rows are there from the start and nothing is reduced. The solver is named (HIGHS): cvxpy's default depends on what is installed.
"""

import math
from dataclasses import dataclass

import numpy as np

from ..problem import Problem
from .answer import TOLERANCE
from .incumbent import Incumbent, Solver


@dataclass(frozen=True)
class CVX(Solver):
    """cvxpy with HiGHS; for problems of some hundred nodes."""

    def run(self, problem: Problem, incumbent: Incumbent) -> None:
        import cvxpy as cp  # ugly delayed import because it takes seconds and no other solver needs it

        x = [cp.Variable(len(c), boolean=True) for c in problem.node_costs]
        pairs = [cp.Variable(e.table.shape, nonneg=True) for e in problem.edges]
        tables = (*problem.node_costs, *(e.table for e in problem.edges))
        largest = max([1e-300, *(float(np.abs(t[np.isfinite(t)]).max(initial=0.0)) for t in tables)])
        cost = sum(_finite(c, largest) @ v for c, v in zip(problem.node_costs, x, strict=True))
        cost += sum(cp.sum(cp.multiply(_finite(e.table, largest), p)) for e, p in zip(problem.edges, pairs, strict=True))
        constraints = [cp.sum(v) == 1 for v in x]
        for e, p in zip(problem.edges, pairs, strict=True):
            constraints += [cp.sum(p, axis=1) == x[e.a], cp.sum(p, axis=0) == x[e.b]]
        for table, variable in zip(tables, (*x, *pairs), strict=True):
            if np.isinf(table).any():
                constraints.append(cp.multiply(np.isinf(table).astype(float), variable) == 0)
        constraints += _memory(cp, problem, x, pairs)
        program = cp.Problem(cp.Minimize(cost), constraints)
        options: dict[str, float | str] = {
            "time_limit": min(max(incumbent.time_left(), 0.01), 1e6),
            "mip_rel_gap": max(incumbent.gap, TOLERANCE / 10),
        }
        # the presolve of HiGHS 1.15.1 never ends on some problems of three nodes with forbidden pairs
        options |= {"threads": 1, "presolve": "off"}
        program.solve(solver=cp.HIGHS, **options)
        if program.status == cp.INFEASIBLE:
            incumbent.raise_bound(math.inf)
        elif x and x[0].value is not None:
            incumbent.offer([int(np.argmax(v.value)) for v in x])
            bound = getattr(program.solver_stats.extra_stats, "mip_dual_bound", None)
            if program.status == cp.OPTIMAL and incumbent.gap == 0:
                incumbent.raise_bound(program.value * largest - TOLERANCE / 2 * abs(program.value) * largest)
            elif bound is not None and math.isfinite(bound):
                incumbent.raise_bound(bound * largest - TOLERANCE / 2 * abs(bound) * largest)


def _finite(table: np.ndarray, largest: float) -> np.ndarray:
    return np.where(np.isfinite(table), table, 0.0) / largest


def _memory(cp, problem: Problem, x: list, pairs: list) -> list:
    """One row per time at which a usage starts, bytes as fractions of the limit."""
    limit = problem.usage_limit
    if limit is None:
        return []
    unit = max(limit, 1.0)
    rows = []
    for t in sorted({u.start for u in problem.usages if u.start < u.end}):
        alive = [u for u in problem.usages if u.start <= t < u.end]
        held = (u.bytes @ x[u.ends[0]] if u.edge is None else cp.sum(cp.multiply(u.bytes, pairs[u.edge])) for u in alive)
        rows.append(sum(held) / unit <= limit / unit)
    return rows
