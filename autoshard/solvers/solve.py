"""solve: the one entry. It sets the clock, asks one solver, has `evaluate` judge, and says what is proven."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from ..problem import Problem, evaluate
from .answer import Answer, Status
from .cvx import CVX
from .exhaustive import Exhaustive
from .ilp import ILP
from .incumbent import Incumbent

TIME_LIMIT = 10000.0  # seconds


class Solver(Protocol):
    """Improves an incumbent until it is proven or its time is up."""

    time_limit: float | None
    gap: float | None

    def run(self, problem: Problem, incumbent: Incumbent) -> None: ...


SOLVERS: dict[str, type[Solver]] = {"auto": ILP, "ilp": ILP, "cvxpy": CVX, "exhaustive": Exhaustive}


def solve(
    problem: Problem,
    *,
    solver: str | Solver = "auto",
    time_limit: float = TIME_LIMIT,
    gap: float = 0.0,
    starts: Sequence[Sequence[int]] = (),
    preference: Sequence[np.ndarray] | None = None,
    workers: int = 1,
    progress: Callable[[float, float], None] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Answer:
    """The cheapest choice that fits, with its proof; `time_limit` in seconds, `gap` relative."""
    began = clock()
    chosen = _named(solver)
    time_limit = chosen.time_limit if chosen.time_limit is not None else time_limit
    gap = chosen.gap if chosen.gap is not None else gap
    if not time_limit > 0 or not gap >= 0:
        raise ValueError(f"time_limit is {time_limit} and gap is {gap}; expected more than 0 seconds and a gap of 0 or more")
    incumbent = Incumbent(problem, deadline=began + time_limit, gap=gap, clock=clock, progress=progress)
    for choice in starts:
        incumbent.offer(choice)
    try:
        chosen.run(problem, incumbent)
    except KeyboardInterrupt:  # the user has waited enough: what is known so far is the answer
        pass
    seconds = {**incumbent.seconds, "total": clock() - began}
    return _answer(incumbent, type(chosen).__name__.lower(), seconds)


def _named(solver: str | Solver) -> Solver:
    if not isinstance(solver, str):
        return solver
    if solver not in SOLVERS:
        raise ValueError(f"there is no solver {solver!r}; expected one of {', '.join(SOLVERS)}")
    return SOLVERS[solver]()


def _answer(incumbent: Incumbent, name: str, seconds: dict[str, float]) -> Answer:
    if incumbent.choice is not None:
        status = Status.OPTIMAL if incumbent.proven else Status.FEASIBLE
        peak = evaluate(incumbent.problem, incumbent.choice).peak
    else:
        status = Status.INFEASIBLE if incumbent.bound == math.inf else Status.UNKNOWN
        peak = None
    return Answer(status, incumbent.choice, incumbent.cost, incumbent.bound, name, seconds, incumbent.size, peak)
