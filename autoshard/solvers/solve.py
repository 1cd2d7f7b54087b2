"""`solve`, the only entry to the solvers: it starts the clock, runs one solver, evaluates its answer, and states what is proven.

Among answers of equal cost a preference p (one array per node) decides: the problem is solved again with the costs c + s p, where s p is
below 1e-6 of the optimum C in total, and the answer is accepted if `evaluate` gives it a cost of at most (1 + 1e-9) C; else once more with
1e-9. The preference never enters cost or bound. Large problems whose memory limit binds ignore it: it would take as long as the proof.
Elsewhere its dual ascent may do a tenth of the work that the search did, which is counted, not timed: beyond it the answer so far stays.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..problem import Problem, anchored, evaluate, without_limit
from .answer import TOLERANCE, Answer, Status
from .cutting_planes import bound_below
from .dual_ascent import CONVERGED, PROGRESS, RESUMED, SLOW, Dual, Messages, ascend, look
from .elimination import DP, Exhaustive
from .ilp import ILP
from .incumbent import Fixed, Incumbent, Nearby, Record, Solver
from .infeasibility import explain_infeasible, hopeless
from .price_search import PriceSearch, begin_nearby, search_prices
from .settle import Settling, continue_from, polish, reduce_and_settle

TIME_LIMIT = 10000.0  # seconds
EXPLAIN_SECONDS = 1.0  # which at least have to be left to look for the smallest limit that works
PREFERENCE_SHARES = (1e-6, 1e-9)  # of the cost, for all preferences together
PREFERENCE_WORK, LEAST_WORK = 0.1, 8e9  # of the search's; cells, which take two seconds
PREFERENCE_TOLERANCE = 1e-12  # the first share over the nodes of a large problem


@dataclass(frozen=True)
class Auto(Solver):
    """The default solver, which combines the others.

    Where memory is limited and moves between layouts hold bytes, layers repeat and answers are dense near the limit: a search over prices
    per byte comes first (price_search.py). Then reductions, dual ascent, and branch and bound on the choices that are still affordable
    (settle.py).
    """

    def run(self, problem: Problem, incumbent: Incumbent) -> None:
        if problem.usage_limit is not None and any(u.edge is not None for u in problem.usages):
            search_prices(problem, incumbent, incumbent.record.messages)
            incumbent.note_carried()
        if not incumbent.done:
            reduce_and_settle(problem, incumbent)


SOLVERS: dict[str, type[Solver]] = {
    "auto": Auto, "prices": PriceSearch, "ilp": ILP, "dp": DP, "dual": Dual, "exhaustive": Exhaustive,
}  # fmt: skip


def solve(
    problem: Problem,
    *,
    solver: Any = "auto",
    time_limit: float = TIME_LIMIT,
    gap: float = 0.0,
    accepted: tuple[float, float] = (0.0, math.inf),
    patience: float = math.inf,
    starts: Sequence[Sequence[int]] = (),
    preference: Sequence[np.ndarray] | None = None,
    messages: np.ndarray | None = None,
    prices: Mapping[int, float] | None = None,
    nearby: Nearby | None = None,
    homes: Sequence[int] | np.ndarray | None = None,
    explains: bool = True,
    progress: Callable[[float, float], None] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Answer:
    """The cheapest choice that fits, with its proof; `time_limit` in seconds, `gap` relative. solver: a name, a Solver, or any object with
    `solve(problem, time_limit=, gap=)`, whose choice is judged and whose bound isn't taken.

    `accepted`: (a relative gap, seconds): the search ends after so many seconds if it has an answer within that gap, else as soon as it
    has one. `patience`: seconds after which the search ends, instead of `time_limit`, if it has no answer yet, nor a proof that there is
    none; as soon as it has one, `time_limit` counts.
    `starts` are choices that may be feasible; those that exceed the limit help a search over prices. `messages`: those of dual ascent on a
    similar problem (`converged`), which continues from them before anything else is tried; a start that this proves is not changed for
    `preference`.
    `nearby`: gives a choice (or None) and messages for the problem without its limit at other costs, from a similar problem.
    `prices`: seconds per byte, by time, of the best bound of a search over prices on a similar problem (`Answer.prices`).
    `homes`: a number per node, for example its layer; where few edges join different ones, the parts are solved one by one (parts.py).
    `explains`: where no answer fits, work out the smallest limit that works (`Answer.infeasibility`).
    `progress` is called with (cost, bound) whenever one of them improves.
    Ctrl-C ends the search, not the program: the best known answer is returned.
    """
    given, problem = problem, anchored(problem)
    began = clock()
    chosen = _named(solver)
    time_limit = chosen.time_limit if chosen.time_limit is not None else time_limit
    gap = chosen.gap if chosen.gap is not None else gap
    if not time_limit > 0 or not gap >= 0:
        raise ValueError(f"time_limit is {time_limit} and gap is {gap}; expected more than 0 seconds and a gap of 0 or more")
    record = Record(problem, began + time_limit, gap, clock, progress, patience=began + patience, messages=messages)
    record.accepted_gap, record.accepted_from = accepted[0], began + accepted[1]
    record.prices, record.nearby, record.starts = prices, nearby, [tuple(start) for start in starts]
    record.homes = None if homes is None else np.asarray(homes, dtype=np.int64)
    incumbent = Incumbent(problem, record)
    for start in starts:
        incumbent.offer(start)
    infeasibility, interrupted = None, False
    try:
        if hopeless(problem):
            incumbent.raise_bound(math.inf)
        begin_nearby(problem, incumbent)
        if messages is not None and not incumbent.proven:  # their bound is worth having even where no time is left
            continue_from(problem, incumbent, messages)
        incumbent.note_carried()
        if not incumbent.done:
            chosen.run(problem, incumbent)
        if incumbent.proven and preference is not None and record.choice is not None and not record.carried:
            _prefer(record, preference)
        if explains and incumbent.proven and record.choice is None and clock() + EXPLAIN_SECONDS < record.deadline:
            infeasibility = explain_infeasible(given, incumbent)
    except KeyboardInterrupt:  # the user doesn't want to wait longer: the best known answer is the answer
        interrupted = True
    record.seconds["total"] = clock() - began
    peak = None if record.choice is None else evaluate(problem, record.choice).peak
    known = (record.choice, record.cost, record.bound)
    return Answer(
        _status(incumbent), *known, _name_of(chosen), record.seconds, record.size, peak, infeasibility, interrupted, record.fitting,
        record.best_prices,
    )  # fmt: skip


def certified(
    problem: Problem, choice: Sequence[int], *, messages: np.ndarray | None = None, gap: float = 0.0, time_limit: float = TIME_LIMIT,
    progress: Callable[[float, float], None] | None = None, clock: Callable[[], float] = time.monotonic,
) -> Answer:  # fmt: skip
    """The choice as an answer, with the best bound on all answers from dual ascent, which starts from `messages` if there are some.

    ValueError where the choice doesn't fit.
    """
    problem = anchored(problem)
    record = Record(problem, clock() + time_limit, gap, clock, progress)
    incumbent = Fixed(problem, record, choice)
    if messages is not None:
        met = look(problem, incumbent, messages)
        if not incumbent.done:
            ascend(met, incumbent, RESUMED)
    if not incumbent.done:
        bound_below(problem, incumbent)
    return Answer(_status(incumbent), record.choice, record.cost, record.bound, "dual", {}, record.size, evaluate(problem, choice).peak)


def converged(
    problem: Problem, *, gap: float = 0.0, time_limit: float = TIME_LIMIT, patience: float = math.inf,
    begin: tuple[Sequence[int], np.ndarray] | None = None, clock: Callable[[], float] = time.monotonic,
) -> tuple[Sequence[int] | None, np.ndarray]:  # fmt: skip
    """The best choice that dual ascent decodes without the memory limit and without reductions, and its messages, in the order of the
    edges, into the first end and the second: a start and messages for `solve`. begin: those of the same problem at other costs, from
    which it is quick."""
    free = without_limit(problem)
    record = Record(free, clock() + time_limit, gap, clock, patience=clock() + patience)
    messages, incumbent = Messages(free), Incumbent(free, record)
    if begin is not None:
        incumbent.offer(begin[0])
        messages.message[:] = np.where(np.isfinite(begin[1]), begin[1], 0.0)  # what is forbidden there may be allowed here
    ascend(messages, incumbent, CONVERGED, PROGRESS if begin is None else SLOW)
    return record.choice, messages.message


@dataclass(frozen=True)
class Given(Solver):
    """A solver of the user's: any object with `solve(problem, time_limit=, gap=)`, which returns a choice, or something with one."""

    of: Any = None

    def run(self, problem: Problem, incumbent: Incumbent) -> None:
        """Its choice is judged, as all are; the bound is that of dual ascent, since nobody can check one that is only stated."""
        answer = self.of.solve(problem, time_limit=max(incumbent.time_left(), 0.0), gap=incumbent.gap)
        choice = getattr(answer, "choice", answer)
        bound_below(problem, incumbent if choice is None else Fixed(problem, incumbent.record, choice))


def _named(solver: Any) -> Solver:
    if isinstance(solver, Solver):
        return solver
    if not isinstance(solver, str):
        return Given(of=solver)
    if solver not in SOLVERS:
        raise ValueError(f"there is no solver {solver!r}; expected one of {', '.join(SOLVERS)}")
    return SOLVERS[solver]()


def _name_of(solver: Solver) -> str:
    return "prices" if isinstance(solver, PriceSearch) else type(getattr(solver, "of", solver)).__name__.lower()


def _status(incumbent: Incumbent) -> Status:
    if incumbent.record.choice is not None:
        return Status.OPTIMAL if incumbent.proven else Status.FEASIBLE
    return Status.INFEASIBLE if incumbent.bound == math.inf else Status.UNKNOWN


def _prefer(record: Record, preference: Sequence[np.ndarray]) -> None:
    """Replace the record's choice by one of equal cost with the smallest sum of preferences."""
    problem, allowed = record.problem, record.cost + max(TOLERANCE * abs(record.cost), 0.0)
    if len(preference) != len(problem.node_costs) or any(len(p) != len(c) for p, c in zip(preference, problem.node_costs)):
        raise ValueError("the preference does not match the problem; expected one number per choice of every node")
    spread = math.fsum(float(np.ptp(p)) for p in preference)
    if spread == 0.0 or record.cost == 0.0:
        return
    assert record.choice is not None
    work = max(PREFERENCE_WORK * record.work, LEAST_WORK)
    if Settling.FIRST_SWEEPS * record.size.get("cells", 0) > work:  # nothing would come of it
        return
    for share in PREFERENCE_SHARES:
        scale = share * abs(record.cost) / spread
        costs = tuple(c + scale * (np.asarray(p) - np.min(p)) for c, p in zip(problem.node_costs, preference))
        perturbed = replace(problem, node_costs=costs)
        inner = Record(perturbed, record.deadline, 0.0, record.clock, tolerance=PREFERENCE_TOLERANCE, most_work=work)
        incumbent = Incumbent(perturbed, inner)
        incumbent.offer(record.choice)
        polish(perturbed, incumbent)
        work -= inner.work
        assert inner.choice is not None
        cost = evaluate(problem, inner.choice).cost
        if cost <= allowed:
            record.choice, record.cost = inner.choice, cost
            record.bound = min(record.bound, cost)
            return
