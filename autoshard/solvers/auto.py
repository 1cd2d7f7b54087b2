"""auto: exact reductions, dual ascent on what is left, then branch and bound on what the bound leaves affordable.

Most planning problems are proven by dual ascent alone. The relaxation of a reduced problem is tight as well: the contest's B and A fall to
it, or to a handful of branch and bound nodes. Which way to go is decided by measured size, never by the clock.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..problem import Edge, EdgeUsage, NodeUsage, Problem
from .dual import Messages, ascend
from .ilp import branch, relax
from .incumbent import Choice, Incumbent
from .program import Program
from .reduce import reduce

SWEEPS = 400
"""Dual ascent proves in 10 to 200 sweeps what it can prove without branching."""


@dataclass(frozen=True)
class Auto:
    """The solver to use when nothing else is asked for."""

    time_limit: float | None = None  # seconds
    gap: float | None = None  # relative

    def run(self, problem: Problem, incumbent: Incumbent) -> None:
        began = incumbent.record.clock()
        inner = shrink(problem, incumbent)
        incumbent.record.seconds["reduce"] = incumbent.record.clock() - began
        if inner is None:
            incumbent.raise_bound(math.inf)
            return
        incumbent.record.size |= {
            "nodes": len(inner.problem.node_costs),
            "edges": len(inner.problem.edges),
            "cells": sum(e.table.size for e in inner.problem.edges),
        }
        began = incumbent.record.clock()
        try:
            settle(inner)
        finally:
            incumbent.record.seconds["solve"] = incumbent.record.clock() - began


def shrink(problem: Problem, incumbent: Incumbent) -> Incumbent | None:
    """The incumbent of the reduced problem, or None where the reductions prove that nothing fits."""
    reduced = reduce(problem, stop=lambda: incumbent.time_left() <= 0)
    return None if reduced.problem is None else incumbent.inside(reduced.problem, reduced.lift)


def settle(incumbent: Incumbent) -> None:
    """Dual ascent, then what it can't prove by branch and bound on the affordable choices."""
    problem = incumbent.problem
    if not problem.edges and not problem.usages:  # the base alone: everything was eliminated
        incumbent.offer([0] * len(problem.node_costs))
        incumbent.close()
        return
    if not problem.usages:
        messages = Messages(problem)
        ascend(messages, incumbent, SWEEPS)
        if incumbent.done:
            return
        restricted = restrict(problem, incumbent, messages.affordable(incumbent))
        if restricted is None:
            return
        incumbent = restricted
    program = Program(incumbent.problem)
    if program.empty:
        incumbent.close()
        return
    memory = relax(program, incumbent)
    if not incumbent.done:
        branch(program, incumbent, memory)


def restrict(problem: Problem, incumbent: Incumbent, keep: Sequence[np.ndarray]) -> Incumbent | None:
    """The problem with only the marked choices, reduced again."""
    index = [np.flatnonzero(k) for k in keep]
    taken: dict[tuple[int, bytes, bytes], np.ndarray] = {}

    def cut(table: np.ndarray, a: int, b: int) -> np.ndarray:
        key = (id(table), index[a].tobytes(), index[b].tobytes())
        if key not in taken:
            taken[key] = table[np.ix_(index[a], index[b])]
        return taken[key]

    if any(len(i) == 0 for i in index):
        incumbent.close()
        return None
    edges = tuple(Edge(e.a, e.b, cut(e.table, e.a, e.b)) for e in problem.edges)
    usages: list[NodeUsage | EdgeUsage] = []
    for u in problem.usages:
        if isinstance(u, NodeUsage):
            usages.append(NodeUsage(u.node, u.start, u.end, u.bytes[index[u.node]]))
        else:
            e = problem.edges[u.edge]
            usages.append(EdgeUsage(u.edge, u.start, u.end, cut(u.bytes, e.a, e.b)))
    costs = tuple(c[i] for c, i in zip(problem.node_costs, index, strict=True))
    small = Problem(problem.names, costs, edges, tuple(usages), problem.usage_limit)

    def lift(choice: Choice) -> Choice:
        return [int(i[k]) for i, k in zip(index, choice, strict=True)]

    inner = shrink(small, incumbent.inside(small, lift))
    if inner is None:
        incumbent.close()
    return inner
