"""Smaller problems with incumbents of their own: a problem reduced, or with some of its choices only and then reduced."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ..problem import Edge, Problem
from .incumbent import Choice, Incumbent
from .reduce import reduce
from .reduce_parts import reduce_in_parts

REDUCE_SHARE = 0.5  # of the time left; the contest's S, the largest instance, takes 4 s


def shrink(problem: Problem, incumbent: Incumbent) -> Incumbent | None:
    """The incumbent of the reduced problem, or None where the reductions prove that no answer fits."""
    until = incumbent.time_left() * (1 - REDUCE_SHARE)

    def stop() -> bool:
        return incumbent.time_left() <= until < math.inf  # inf: no limit

    homes: np.ndarray | None = None
    if incumbent.homes is not None and problem.usage_limit is None:
        small, homes, lift = reduce_in_parts(problem, incumbent.homes, stop)
    else:
        reduced = reduce(problem, stop=stop)
        small, lift = reduced.problem, reduced.lift
        if incumbent.homes is not None:
            homes = incumbent.homes[[*reduced.nodes, 0]]  # the base is the last node; it has no edges
    if small is None:
        return None
    inner = incumbent.inside(small, lift)
    inner.homes = homes
    return inner


def cells_of(keep: Sequence[np.ndarray], problem: Problem) -> int:
    """The cells that the tables have with only the marked choices."""
    kept = [int(k.sum()) for k in keep]
    return sum(kept[e.a] * kept[e.b] for e in problem.edges)


def restrict(problem: Problem, incumbent: Incumbent, keep: Sequence[np.ndarray], *, complete: bool = True) -> Incumbent | None:
    """The problem with only the marked choices, reduced again."""
    index = [np.flatnonzero(k) for k in keep]
    parts: dict[tuple, np.ndarray] = {}

    def part(table: np.ndarray, *ends: int) -> np.ndarray:
        key = (id(table), *(index[v].tobytes() for v in ends))
        if key not in parts:
            parts[key] = table[np.ix_(*(index[v] for v in ends))]
        return parts[key]

    if any(len(i) == 0 for i in index):
        if complete:
            incumbent.close()
        return None
    costs = tuple(c[i] for c, i in zip(problem.node_costs, index, strict=True))
    edges = tuple(Edge(e.a, e.b, part(e.table, e.a, e.b)) for e in problem.edges)
    usages = tuple(replace(u, bytes=part(u.bytes, *u.ends)) for u in problem.usages)
    small = Problem(problem.names, costs, edges, usages, problem.usage_limit)

    def lift(choice: Choice) -> Choice:
        return [int(i[k]) for i, k in zip(index, choice, strict=True)]

    same = incumbent.inside(small, lift, complete=complete)
    same.homes = incumbent.homes
    inner = shrink(small, same)
    if inner is None and complete:
        incumbent.close()
    return inner
