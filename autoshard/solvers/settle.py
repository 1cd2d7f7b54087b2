"""Solves a problem: exact reductions (`shrink`), then the steps of the table STEPS, from top to bottom, until it is settled or time is up.

    close           nothing is left but the base: everything was eliminated
    prove           few cells, and memory: HiGHS at once
    (nothing)       too many bytes of pairs for dual ascent: what the price search (price_search.py) reached stays
    ascend, decompose   dual ascent proves most planning problems; equal layers are solved once (decomposition.py)
    narrow          without memory few choices are within the gap of the bound: elimination over those is exact (narrow.py)
    price           prices for the bytes of the times that bind, by cutting planes (cutting_planes.py)
    explore         many choices are affordable still: answers by annealing or in neighbourhoods, each leaves fewer of them
    prove           branch and bound on the affordable choices; the relaxation of a reduced problem is tight as well: it proves the
                    contest's B and A with at most a handful of nodes

The next step is decided by measured size, never by the clock.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np

from ..problem import Problem
from .cutting_planes import PriceAscent
from .decomposition import decompose
from .dual_ascent import RESUMED, SLOW, Messages, ascend, look
from .ilp import branch, relax
from .incumbent import Incumbent
from .linear_program import LinearProgram
from .narrow import Work, narrow
from .neighbourhood_search import improve
from .restrict import cells_of, restrict, shrink

SMALL, LARGE = 10**5, 10**6  # table cells: HiGHS solves the relaxation in about a second, in about a minute
WORTH_RESTRICTING = 0.7  # of the cells: the reductions and the relaxation are repeated where fewer are affordable


def reduce_and_settle(problem: Problem, incumbent: Incumbent) -> None:
    """Reduce the problem, then settle what is left; the incumbent's record notes the size and the seconds."""
    record = incumbent.record
    began = record.clock()
    possible = [np.isfinite(c) for c in problem.node_costs]
    if cells_of(possible, problem) < WORTH_RESTRICTING * problem.cells:
        inner = restrict(problem, incumbent, possible)  # a scheme's pins leave few choices: small tables are reduced quickly
    else:
        inner = shrink(problem, incumbent)
    record.seconds["reduce"] = record.clock() - began
    if inner is None:
        incumbent.raise_bound(math.inf)
        return
    record.size |= {"nodes": len(inner.problem.node_costs), "edges": len(inner.problem.edges), "cells": inner.problem.cells}
    began = record.clock()
    try:
        settle(inner)
    finally:
        record.seconds["solve"] = record.clock() - began


def settle(incumbent: Incumbent, *, thorough: bool = True) -> None:
    """Settle a reduced problem by STEPS; thorough: by those that may take long as well."""
    settling = Settling(incumbent, thorough)
    for applies, step, is_last in STEPS:
        if applies(settling):
            step(settling)
            if is_last:
                return


@dataclass
class Settling:
    """A problem on its way through STEPS."""

    incumbent: Incumbent
    thorough: bool
    ascent: PriceAscent | None = None
    over: bool = False  # settled by elimination, or time is up

    @property
    def problem(self) -> Problem:
        return self.incumbent.problem

    @property
    def in_layers(self) -> bool:
        return self.incumbent.homes is not None and not self.problem.usages

    @property
    def open(self) -> bool:
        return not self.incumbent.done

    @cached_property
    def messages(self) -> Messages:
        return Messages(self.problem)

    def affordable_cells(self) -> int:
        return cells_of(self.messages.affordable(self.incumbent), self.problem)

    def close(self) -> None:
        self.incumbent.offer([0] * len(self.problem.node_costs))
        self.incumbent.close()

    FIRST_SWEEPS = 80  # before a problem is divided into parts, which need no more to be settled
    SWEEPS = 600  # dual ascent proves in 10 to 300 sweeps whatever it can prove without branching

    def decompose(self) -> None:
        assert self.incumbent.homes is not None
        decompose(self.problem, self.incumbent.homes, self.incumbent, self.messages.message, settle_part)

    THOROUGH, QUICK = 6 * 10**8, 10**8  # cells worth of work (Work), before branch and bound takes over or a gap is accepted

    def narrow(self) -> None:
        self.over = narrow(self.messages, self.incumbent, Work(self.THOROUGH if self.thorough else self.QUICK))

    PRICE_ROUNDS = 80  # four binding times took 15

    def price(self) -> None:
        self.ascent = PriceAscent(self.messages, self.incumbent)
        self.ascent.climb(self.PRICE_ROUNDS)
        if self.incumbent.choice is None:
            self.ascent.raise_until_fits()
        self.ascent.settle(self.ascent.prices)

    SHARES = (0.01, 0.03, 0.1)  # of the gap: choices within it are tried before all affordable ones
    FIRST_SLICES, MOST_DOUBLINGS = 16, 3  # of annealing: a run of about 8 seconds, then 16, 32, 64
    TRIED_BEFORE_PROOF = 1  # runs of annealing
    FUTILE = 10  # neighbourhoods without a better answer before the proof is tried

    def explore(self) -> None:
        """Look for answers, until so few choices are affordable that the proof can be tried, or time is up."""
        problem, messages, ascent, incumbent = self.problem, self.messages, self.ascent, self.incumbent
        if ascent is not None and incumbent.choice is not None and all(u.edge is None for u in problem.usages):
            from .annealing import Annealing  # here: its moves are compiled by numba, which takes a third of a second to load

            annealing = Annealing(ascent, incumbent)
            for k in itertools.count():
                annealing.run(self.FIRST_SLICES << min(k, self.MOST_DOUBLINGS))
                size = self.affordable_cells()
                if incumbent.done or size <= SMALL:
                    return
                if size <= LARGE and k == self.TRIED_BEFORE_PROOF:
                    solve_part(incumbent, messages.affordable(incumbent), incumbent.time_left() / 4, complete=True)
        for share in self.SHARES:
            near = messages.near(incumbent, share)
            if incumbent.done or cells_of(near, problem) > LARGE:
                break
            solve_part(incumbent, near, incumbent.time_left() / 4)
        size = self.affordable_cells()
        if size > SMALL:
            improve(messages, incumbent, partial(solve_part, incumbent), math.inf if size > LARGE else self.FUTILE)


Step = Callable[[Settling], object]
STEPS: Sequence[tuple[Callable[[Settling], bool], Step, bool]] = (  # (applies, step, whether it is the last one)
    (lambda s: not s.problem.edges and not s.problem.usages, Settling.close, True),
    (lambda s: bool(s.problem.usages) and s.problem.cells <= SMALL, lambda s: prove(s.incumbent), True),
    (lambda s: has_many_pair_bytes(s.problem), lambda s: None, True),
    (lambda s: s.in_layers, lambda s: ascend(s.messages, s.incumbent, s.SWEEPS if s.thorough else s.FIRST_SWEEPS, SLOW), False),
    (lambda s: s.in_layers and s.open, Settling.decompose, False),
    (lambda s: s.open or not s.in_layers, lambda s: ascend(s.messages, s.incumbent, s.SWEEPS), False),
    (lambda s: s.in_layers and s.open, Settling.decompose, False),
    (lambda s: not s.problem.usages, Settling.narrow, False),
    (lambda s: s.over or not s.thorough, lambda s: None, True),
    (lambda s: s.open and len(s.messages.prices) > 0, Settling.price, False),
    (lambda s: s.affordable_cells() > SMALL, Settling.explore, False),
    (lambda s: s.open, lambda s: prove(restrict(s.problem, s.incumbent, s.messages.affordable(s.incumbent))), True),
)
MOST_PAIR_BYTES = 15 * 10**6  # numbers in the tables of bytes of edges; dual ascent takes some 80 bytes for each


def has_many_pair_bytes(problem: Problem) -> bool:
    return sum(u.bytes.size for u in problem.usages if u.edge is not None) > MOST_PAIR_BYTES


def settle_part(incumbent: Incumbent, messages: Messages | None) -> None:
    """Settle a part of a problem (decomposition.py) as far as that is quick. messages: those of dual ascent on it, if there are some."""
    if messages is not None:
        narrow(messages, incumbent, Work(Settling.QUICK), shares=())
    else:
        inner = restrict(incumbent.problem, incumbent, [np.isfinite(c) for c in incumbent.problem.node_costs])
        if inner is not None:
            settle(inner, thorough=False)


WORTH_FINISHING = 0.2  # of the cells


def continue_from(problem: Problem, incumbent: Incumbent, message: np.ndarray) -> None:
    """Continue dual ascent from messages of a similar problem; then settle what these leave affordable, where that is little."""
    messages = look(problem, incumbent, message)
    if incumbent.done:
        return
    ascend(messages, incumbent, RESUMED)
    if incumbent.homes is not None and problem.usage_limit is None and not incumbent.done:
        decompose(problem, incumbent.homes, incumbent, messages.message, settle_part)
    if incumbent.done or not math.isfinite(incumbent.cost):
        return
    keep = messages.affordable(incumbent)
    if cells_of(keep, problem) < WORTH_FINISHING * problem.cells:
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
    elif inner.problem.cells <= SMALL:
        prove(inner, FEW_NODES)


EXPLORED_NODES, FEW_NODES = 200, 20  # of branch and bound: where an answer is looked for, and where one is polished


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
        if cells_of(keep, incumbent.problem) < WORTH_RESTRICTING * incumbent.problem.cells:
            prove(restrict(incumbent.problem, incumbent, keep), most_nodes)
            return
    branch(program, incumbent, memory, most_nodes)
