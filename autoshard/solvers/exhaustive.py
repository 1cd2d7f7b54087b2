"""The reference solver, for tiny problems: the cost of every answer in one array with an axis per node, and the bytes of every live set in
another."""

import math
from dataclasses import dataclass

import numpy as np

from ..problem import Problem
from .elimination import Factor, spread
from .incumbent import Incumbent, Solver

MOST_ANSWERS = 10**7  # an array of 80 MB


@dataclass(frozen=True)
class Exhaustive(Solver):
    """Try everything; only for problems of up to 1e7 answers."""

    def run(self, problem: Problem, incumbent: Incumbent) -> None:
        shape = tuple(len(c) for c in problem.node_costs)
        if math.prod(shape) > MOST_ANSWERS:
            raise ValueError(f"the problem has {math.prod(shape)} answers; exhaustive tries at most {MOST_ANSWERS}, use auto")
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
