"""The reference solver, for tiny problems: the cost of every answer in one array with an axis per node, and the bytes of every live set in
another."""

import math
from dataclasses import dataclass

import numpy as np

from ..problem import Problem
from .incumbent import Incumbent, Solver

MOST_ANSWERS = 10**7  # an array of 80 MB


@dataclass(frozen=True)
class Exhaustive(Solver):
    """Try everything; only for problems of up to 1e7 answers."""

    def run(self, problem: Problem, incumbent: Incumbent) -> None:
        shape = tuple(len(c) for c in problem.node_costs)
        if math.prod(shape) > MOST_ANSWERS:
            raise ValueError(f"the problem has {math.prod(shape)} answers; exhaustive tries at most {MOST_ANSWERS}, use auto")
        cost = np.zeros(shape)
        for v, c in enumerate(problem.node_costs):
            cost += _spread(c, (v,), len(shape))
        for e in problem.edges:
            cost += _spread(e.table, (e.a, e.b), len(shape))
        if problem.usage_limit is not None:
            for t in {u.start for u in problem.usages if u.start < u.end}:  # memory only rises at starts
                cost[_bytes_at(problem, t, shape) > problem.usage_limit] = np.inf
        best = np.unravel_index(int(cost.argmin()), shape)
        if math.isfinite(cost[best]):
            incumbent.offer([int(i) for i in best])
        incumbent.raise_bound(incumbent.cost)


def _bytes_at(problem: Problem, t: int, shape: tuple[int, ...]) -> np.ndarray:
    total = np.zeros(shape)
    for u in problem.usages:
        if u.start <= t < u.end:
            total += _spread(u.bytes, u.ends, len(shape))
    return total


def _spread(array: np.ndarray, axes: tuple[int, ...], num_axes: int) -> np.ndarray:
    """The array with its dims at the given axes of a num_axes-dimensional one."""
    if len(axes) == 2 and axes[0] > axes[1]:
        array, axes = array.T, axes[::-1]
    shape = [1] * num_axes
    for axis, size in zip(axes, array.shape, strict=True):
        shape[axis] = size
    return array.reshape(shape)
