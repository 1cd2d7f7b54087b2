"""solve: the one entry. It sets the clock, asks one solver, has `evaluate` judge, and says what is proven.

Among answers of equal cost, a preference p (one array per node) decides: the costs c + s p, with s p below 1e-6 of the optimum C
in total, are solved again, and the answer is taken if `evaluate` says that it costs at most (1 + 1e-9) C; else once more at 1e-9.
It never enters cost or bound. On large problems whose memory limit binds it stays unused: that would take as long as the proof.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from ..problem import EdgeUsage, Problem, evaluate, without_limit
from .answer import TOLERANCE, Answer, Status
from .auto import Auto, finish, polish
from .certificate import explain_infeasible, hopeless
from .cvx import CVX
from .dual import Dual, converge, resume
from .eliminate import DP
from .exhaustive import Exhaustive
from .ilp import ILP
from .incumbent import Fixed, Incumbent, Record
from .limited import Prices, approach
from .prices import bound_below

TIME_LIMIT = 10000.0  # seconds
PREFERENCE_SHARES = (1e-6, 1e-9)  # of the cost, for all preferences together
PREFERENCE_TOLERANCE = 1e-12  # the first share over the nodes of a large problem


class Solver(Protocol):
    """Improves an incumbent until it is proven or its time is up."""

    @property
    def time_limit(self) -> float | None: ...

    @property
    def gap(self) -> float | None: ...

    def run(self, problem: Problem, incumbent: Incumbent) -> None: ...


SOLVERS: dict[str, type[Solver]] = {
    "auto": Auto, "prices": Prices, "ilp": ILP, "cvxpy": CVX, "dp": DP, "dual": Dual, "exhaustive": Exhaustive,
}  # fmt: skip


def solve(
    problem: Problem,
    *,
    solver: str | Solver = "auto",
    time_limit: float = TIME_LIMIT,
    gap: float = 0.0,
    patience: float = math.inf,
    starts: Sequence[Sequence[int]] = (),
    preference: Sequence[np.ndarray] | None = None,
    messages: np.ndarray | None = None,
    progress: Callable[[float, float], None] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Answer:
    """The cheapest choice that fits, with its proof; `time_limit` in seconds, `gap` relative.

    `patience`: seconds after which the search ends where it has no answer yet, nor a proof that there is none.
    `starts` are choices that may be feasible; those that aren't are ignored. `messages`: where dual ascent stood on a problem like
    this one (`converged`); it goes on from there before anything else is tried, and a start that it proves is not changed for
    `preference`. `progress` is told (cost, bound) whenever one improves.
    Ctrl-C ends the search, not the program: what is known by then is the answer.
    """
    began = clock()
    chosen = _named(solver)
    time_limit = chosen.time_limit if chosen.time_limit is not None else time_limit
    gap = chosen.gap if chosen.gap is not None else gap
    if not time_limit > 0 or not gap >= 0:
        raise ValueError(f"time_limit is {time_limit} and gap is {gap}; expected more than 0 seconds and a gap of 0 or more")
    record = Record(problem, began + time_limit, gap, clock, progress, patience=began + patience)
    incumbent = Incumbent(problem, record)
    for start in starts:
        incumbent.offer(start)
    infeasibility, interrupted = None, False
    try:
        if hopeless(problem):
            incumbent.raise_bound(math.inf)
        if messages is not None and not incumbent.done:
            finish(problem, incumbent, resume(problem, incumbent, messages))
        if isinstance(chosen, Auto) and not incumbent.done and _is_limited_plan(problem):
            approach(problem, incumbent, messages)
        carried = messages is not None and incumbent.proven  # the start was preferred where it comes from
        if not incumbent.done:
            chosen.run(problem, incumbent)
        if incumbent.proven and preference is not None and record.choice is not None and not carried:
            _prefer(record, preference)
        if incumbent.proven and record.choice is None:
            infeasibility = explain_infeasible(problem, incumbent)
    except KeyboardInterrupt:  # the user has waited enough: what is known so far is the answer
        interrupted = True
    record.seconds["total"] = clock() - began
    peak = None if record.choice is None else evaluate(problem, record.choice).peak
    name, found = type(chosen).__name__.lower(), (record.choice, record.cost, record.bound)
    return Answer(_status(incumbent), *found, name, record.seconds, record.size, peak, infeasibility, interrupted)


def _is_limited_plan(problem: Problem) -> bool:
    """Is there a limit, and do moves between layouts take memory? Then layers repeat, and answers lie densely near the limit."""
    return problem.usage_limit is not None and any(isinstance(u, EdgeUsage) for u in problem.usages)


def certified(
    problem: Problem,
    choice: Sequence[int],
    *,
    messages: np.ndarray | None = None,
    gap: float = 0.0,
    time_limit: float = TIME_LIMIT,
    progress: Callable[[float, float], None] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Answer:
    """The choice as an answer, with the best bound on all answers that dual ascent finds, from `messages` if there are some.

    ValueError where the choice doesn't fit.
    """
    record = Record(problem, clock() + time_limit, gap, clock, progress)
    incumbent = Fixed(problem, record, choice)
    if record.choice is None:
        raise ValueError("the choice that is to be certified costs inf or exceeds the memory limit")
    if messages is not None:
        resume(problem, incumbent, messages)
    if not incumbent.done:
        bound_below(problem, incumbent)
    return Answer(_status(incumbent), record.choice, record.cost, record.bound, "dual", {}, record.size, evaluate(problem, choice).peak)


def converged(
    problem: Problem, *, gap: float = 0.0, time_limit: float = TIME_LIMIT, clock: Callable[[], float] = time.monotonic
) -> tuple[Sequence[int] | None, np.ndarray]:
    """The best choice that dual ascent decodes, memory aside, and its messages: what `solve` takes as a start, or carries over."""
    free = without_limit(problem)
    record = Record(free, clock() + time_limit, gap, clock)
    messages = converge(free, Incumbent(free, record))
    return record.choice, messages


def frontier(problem: Problem, limits: Sequence[float | None], **options) -> list[Answer]:
    """One answer per memory limit, in the order given; loose limits first, so that each hands its bound and answer on."""
    answers: dict[int, Answer] = {}
    order = sorted(range(len(limits)), key=lambda k: -math.inf if limits[k] is None else -float(limits[k] or 0.0))
    known: Answer | None = None
    for k in order:
        limited = replace(problem, usage_limit=limits[k])
        if known is not None and known.choice is not None and evaluate(limited, known.choice).fits:
            answers[k] = known  # the best under a looser limit fits here as well
            continue
        if known is not None and known.status is Status.INFEASIBLE:
            answers[k] = known
            continue
        known = answers[k] = solve(limited, **options)
    return [answers[k] for k in range(len(limits))]


def _named(solver: str | Solver) -> Solver:
    if not isinstance(solver, str):
        return solver
    if solver not in SOLVERS:
        raise ValueError(f"there is no solver {solver!r}; expected one of {', '.join(SOLVERS)}")
    return SOLVERS[solver]()


def _status(incumbent: Incumbent) -> Status:
    if incumbent.record.choice is not None:
        return Status.OPTIMAL if incumbent.proven else Status.FEASIBLE
    return Status.INFEASIBLE if incumbent.bound == math.inf else Status.UNKNOWN


def _prefer(record: Record, preference: Sequence[np.ndarray]) -> None:
    """Put in place of the record's choice one of equal cost that has the smallest sum of preferences."""
    problem, allowed = record.problem, record.cost + max(TOLERANCE * abs(record.cost), 0.0)
    if len(preference) != len(problem.node_costs) or any(len(p) != len(c) for p, c in zip(preference, problem.node_costs)):
        raise ValueError("the preference does not match the problem; expected one number per choice of every node")
    spread = math.fsum(float(np.ptp(p)) for p in preference)
    if spread == 0.0 or record.cost == 0.0:
        return
    assert record.choice is not None
    for share in PREFERENCE_SHARES:
        scale = share * abs(record.cost) / spread
        costs = tuple(c + scale * (np.asarray(p) - np.min(p)) for c, p in zip(problem.node_costs, preference))
        perturbed = replace(problem, node_costs=costs)
        inner = Record(perturbed, record.deadline, 0.0, record.clock, tolerance=PREFERENCE_TOLERANCE)
        incumbent = Incumbent(perturbed, inner)
        incumbent.offer(record.choice)
        polish(perturbed, incumbent)
        assert inner.choice is not None
        cost = evaluate(problem, inner.choice).cost
        if cost <= allowed:
            record.choice, record.cost = inner.choice, cost
            record.bound = min(record.bound, cost)
            return
