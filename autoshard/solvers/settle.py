"""Solves a problem in three stages: exact reductions, dual ascent, then branch and bound on the choices that the bound doesn't exclude.

Most planning problems are proven by dual ascent alone. Where it leaves a gap and memory plays no part, few choices are within that gap
of the bound, and variable elimination over those is exact (`narrow`). The relaxation of a reduced problem is tight as well: it proves the
contest's B and A with at most a handful of branch and bound nodes. The next step is decided by measured size, never by the clock.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from ..problem import Edge, Problem
from .cutting_planes import PriceAscent
from .decomposition import decompose
from .dual_ascent import RESUMED, SLOW, Messages, ascend, look
from .elimination import Elimination, eliminate, elimination, lowered
from .ilp import branch, relax
from .incumbent import Choice, Incumbent
from .linear_program import LinearProgram
from .neighbourhood_search import improve
from .reduce import reduce
from .reduce_parts import reduce_in_parts

REDUCE_SHARE = 0.5  # of the time left; the contest's S, the largest instance, takes 4 s
FIRST_SWEEPS = 80  # before a problem is divided into parts, which need no more to be settled
SWEEPS = 600  # dual ascent proves in 10 to 300 sweeps whatever it can prove without branching
PRICE_ROUNDS = 80  # four binding times took 15
SMALL, LARGE = 10**5, 10**6  # table cells: HiGHS solves the relaxation in about a second, in about a minute
MOST_PAIR_BYTES = 15 * 10**6  # numbers in the tables of bytes of edges; dual ascent takes some 80 bytes for each
SHARES = (0.01, 0.03, 0.1)  # of the gap: choices within it are tried before all affordable ones
FIRST_SLICES, MOST_DOUBLINGS = 16, 3  # of annealing: a run of about 8 seconds, then 16, 32, 64
TRIED_BEFORE_PROOF = 1  # runs of annealing
FUTILE = 10  # neighbourhoods without a better answer before the proof is tried
WORTH_RESTRICTING = 0.7  # of the cells: the reductions and the relaxation are repeated where fewer are affordable
WORTH_FINISHING = 0.2  # of the cells
EXPLORED_NODES = 200  # of branch and bound among those
NEAR_SHARES = (0.001, 0.01, 0.03, 0.1, 0.3)  # of the gap: elimination over the choices within it seeks a better answer
LARGEST_TABLE, ALL_TABLES = 10**7, 10**8  # cells: 80 MB; about a second
THOROUGH, QUICK = 6 * 10**8, 10**8  # cells worth of work (Work), before branch and bound takes over or a gap is accepted
SWEPT, RESTRICTED = 100, 10**4  # cells worth of work: dual ascent per cell of the tables, a restriction per node and edge
ORDERED = 10**3  # the same: a step of finding an order of elimination


def reduce_and_settle(problem: Problem, incumbent: Incumbent) -> None:
    """Reduce the problem, then settle what is left; the incumbent's record notes the size and the seconds."""
    record = incumbent.record
    began = record.clock()
    possible = [np.isfinite(c) for c in problem.node_costs]
    if _cells(possible, problem) < WORTH_RESTRICTING * sum(e.table.size for e in problem.edges):
        inner = restrict(problem, incumbent, possible)  # a scheme's pins leave few choices: small tables are reduced quickly
    else:
        inner = shrink(problem, incumbent)
    record.seconds["reduce"] = record.clock() - began
    if inner is None:
        incumbent.raise_bound(math.inf)
        return
    record.size |= {
        "nodes": len(inner.problem.node_costs),
        "edges": len(inner.problem.edges),
        "cells": sum(e.table.size for e in inner.problem.edges),
    }
    began = record.clock()
    try:
        settle(inner)
    finally:
        record.seconds["solve"] = record.clock() - began


def shrink(problem: Problem, incumbent: Incumbent) -> Incumbent | None:
    """The incumbent of the reduced problem, or None where the reductions prove that no answer fits."""
    until = incumbent.time_left() * (1 - REDUCE_SHARE)

    def stop() -> bool:
        return incumbent.time_left() <= until

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


def settle(incumbent: Incumbent, *, thorough: bool = True) -> None:
    """Dual ascent; then, where that leaves a gap, the choices near the bound for answers, and all affordable ones for the proof."""
    problem = incumbent.problem
    if not problem.edges and not problem.usages:  # the base alone: everything was eliminated
        incumbent.offer([0] * len(problem.node_costs))
        incumbent.close()
        return
    everything = [np.ones(len(c), bool) for c in problem.node_costs]
    if problem.usages and _cells(everything, problem) <= SMALL:
        prove(incumbent)
        return
    if sum(u.bytes.size for u in problem.usages if u.edge is not None) > MOST_PAIR_BYTES:
        return  # the result of the price search (price_search.py) stays
    messages = Messages(problem)
    homes = incumbent.homes if not problem.usages else None
    if homes is not None:
        ascend(messages, incumbent, SWEEPS if thorough else FIRST_SWEEPS, SLOW)
        if not incumbent.done:
            decompose(problem, homes, incumbent, messages.message, settle_part)
    if homes is None or not incumbent.done:
        ascend(messages, incumbent, SWEEPS)
    if homes is not None and not incumbent.done:
        decompose(problem, homes, incumbent, messages.message, settle_part)
    if not problem.usages and narrow(messages, incumbent, Work(THOROUGH if thorough else QUICK)):
        return
    if not thorough:
        return
    ascent = None
    if len(messages.prices) and not incumbent.done:
        ascent = PriceAscent(messages, incumbent)
        ascent.climb(PRICE_ROUNDS)
        if incumbent.choice is None:
            ascent.raise_until_fits()
        ascent.settle(ascent.prices)
    if _cells(messages.affordable(incumbent), problem) > SMALL:
        explore(messages, ascent, incumbent)
    if not incumbent.done:
        prove(restrict(problem, incumbent, messages.affordable(incumbent)))


def settle_part(incumbent: Incumbent, messages: Messages | None) -> None:
    """Settle a part of a problem (decomposition.py) as far as that is quick. messages: those of dual ascent on it, if there are some."""
    if messages is not None:
        narrow(messages, incumbent, Work(QUICK), shares=())
    else:
        inner = restrict(incumbent.problem, incumbent, [np.isfinite(c) for c in incumbent.problem.node_costs])
        if inner is not None:
            settle(inner, thorough=False)


@dataclass
class Work:
    """The elimination that may still be tried, in cells of tables: it is counted, not timed, so that every machine does the same."""

    left: float

    def spend(self, cells: float) -> bool:
        """Count the work. Returns whether it may be done."""
        self.left -= cells
        return self.left >= 0


def narrow(messages: Messages, incumbent: Incumbent, work: Work, shares: Sequence[float] = NEAR_SHARES) -> bool:
    """Settle a problem without memory by elimination over the affordable choices. Returns whether it is settled or time is up.

    The search for better answers comes first, among the choices within these shares of the gap from the bound: each better answer leaves
    fewer choices affordable.
    """
    problem = incumbent.problem
    for share in shares:
        if incumbent.done:
            return True
        if not work.spend(RESTRICTED * (len(problem.node_costs) + len(problem.edges))):
            return False
        near = restrict(problem, incumbent, messages.near(incumbent, share), complete=False)
        if near is not None and not _eliminate(near, elimination(near.problem), work):
            break
    return incumbent.done or _exhaust(messages, incumbent, work)


def _eliminate(incumbent: Incumbent, way: Elimination, work: Work) -> bool:
    """Offer the best answer of a problem without memory, and its bound; False where that is too much work."""
    if way.largest > LARGEST_TABLE or way.cells > ALL_TABLES or not work.spend(way.cells):
        return False
    solved = eliminate(incumbent.problem, LARGEST_TABLE, incumbent, way)
    if solved is None:
        return False
    choice, bound = solved
    incumbent.offer(choice)
    incumbent.raise_bound_below(lowered(bound))
    return True


def _exhaust(messages: Messages, incumbent: Incumbent, work: Work) -> bool:
    """Prove that no answer is cheaper than the incumbent, for two halves of the affordable choices where they are too many together.

    Returns whether that succeeded.
    """
    problem = incumbent.problem
    if not work.spend(RESTRICTED * (len(problem.node_costs) + len(problem.edges))):
        return False
    part = restrict(problem, incumbent, messages.affordable(incumbent))
    if part is None:
        return True
    way, cells = elimination(part.problem), sum(e.table.size for e in part.problem.edges)
    if _eliminate(part, way, work):
        return True
    if not work.spend(SWEPT * cells):
        return False
    again = Messages(part.problem)
    ascend(again, part, SWEEPS)
    if part.done:
        return part.proven
    if _cells(again.affordable(part), part.problem) < WORTH_RESTRICTING * cells:
        return _exhaust(again, part, work)
    if not work.spend(ORDERED * way.steps * len(way.widest)):  # as many orders are tried
        return False
    for half in _halves(part, again, way):
        first = Messages(half.problem)
        ascend(first, half, SWEEPS)
        if not _exhaust(first, half, work):
            return False
    part.close()
    return True


def _halves(part: Incumbent, messages: Messages, way: Elimination) -> Iterator[Incumbent]:
    """The problem with the cheaper half of a node's choices, and with the more expensive half: the node is the one that makes it widest."""
    v = min(way.widest, key=lambda n: (elimination(part.problem, n).cells, n))
    reduced = np.split(messages.reduced, messages.first[1:-1])[v]
    for half in np.array_split(np.argsort(reduced, kind="stable"), 2):
        keep = [np.ones(len(c), bool) for c in part.problem.node_costs]
        keep[v] = np.isin(np.arange(len(reduced)), half)
        inner = restrict(part.problem, part, keep, complete=False)
        if inner is not None:
            yield inner


def explore(messages: Messages, ascent: PriceAscent | None, incumbent: Incumbent) -> None:
    """Look for answers, until so few choices are affordable that the proof can be tried, or time is up."""
    problem = incumbent.problem
    if ascent is not None and incumbent.choice is not None and all(u.edge is None for u in problem.usages):
        from .annealing import Annealing  # here: its moves are compiled by numba, which takes a third of a second to load

        annealing = Annealing(ascent, incumbent)
        for k in itertools.count():
            annealing.run(FIRST_SLICES << min(k, MOST_DOUBLINGS))
            size = _cells(messages.affordable(incumbent), problem)
            if incumbent.done or size <= SMALL:
                return
            if size <= LARGE and k == TRIED_BEFORE_PROOF:
                solve_part(incumbent, messages.affordable(incumbent), incumbent.time_left() / 4, complete=True)
    for share in SHARES:
        near = messages.near(incumbent, share)
        if incumbent.done or _cells(near, problem) > LARGE:
            break
        solve_part(incumbent, near, incumbent.time_left() / 4)
    size = _cells(messages.affordable(incumbent), problem)
    if size > SMALL:
        improve(messages, incumbent, partial(solve_part, incumbent), math.inf if size > LARGE else FUTILE)


def continue_from(problem: Problem, incumbent: Incumbent, message: np.ndarray) -> None:
    """Continue dual ascent from messages of a similar problem; then settle what these leave affordable, where that is little."""
    messages = look(problem, incumbent, message)
    if incumbent.done:
        return
    if incumbent.homes is not None and problem.usage_limit is None:
        decompose(problem, incumbent.homes, incumbent, message, settle_part)
    if not incumbent.done:
        ascend(messages, incumbent, RESUMED)
    if incumbent.done or not math.isfinite(incumbent.cost):
        return
    keep = messages.affordable(incumbent)
    if _cells(keep, problem) < WORTH_FINISHING * sum(e.table.size for e in problem.edges):
        inner = restrict(problem, incumbent, keep)
        if inner is not None:
            settle(inner)


def polish(problem: Problem, incumbent: Incumbent) -> None:
    """Improve an answer as far as that is quick: without the search that large problems with a binding limit need."""
    inner = shrink(problem, incumbent)
    if inner is None:
        return
    if not inner.problem.usages:
        settle(inner, thorough=False)
    elif sum(e.table.size for e in inner.problem.edges) <= SMALL:
        prove(inner)


def solve_part(incumbent: Incumbent, keep: Sequence[np.ndarray], seconds: float, *, complete: bool = False) -> bool:
    """Look for a better answer among the marked choices. Returns whether the time was enough."""
    inner = restrict(incumbent.problem, incumbent, keep, complete=complete)
    if inner is None:
        return True
    inner.deadline = min(incumbent.deadline, incumbent.record.clock() + seconds)
    prove(inner, None if complete else EXPLORED_NODES)
    return inner.time_left() > 0


def prove(incumbent: Incumbent | None, most_nodes: int | None = None) -> None:
    """Relaxation, then branch and bound. None stands for a problem without answers."""
    if incumbent is None:
        return
    program = LinearProgram(incumbent.problem)
    if program.empty:
        incumbent.close()
        return
    memory = relax(program, incumbent)
    if incumbent.done:
        return
    if math.isfinite(incumbent.cost):
        keep = program.affordable(incumbent.cost + incumbent.slack)
        if _cells(keep, incumbent.problem) < WORTH_RESTRICTING * sum(e.table.size for e in incumbent.problem.edges):
            prove(restrict(incumbent.problem, incumbent, keep), most_nodes)
            return
    branch(program, incumbent, memory, most_nodes)


def _cells(keep: Sequence[np.ndarray], problem: Problem) -> int:
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
