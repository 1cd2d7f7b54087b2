"""The best answer and the best bound so far, under one clock; every solver reads and improves them.

    bound <= optimum <= cost          proven where cost - bound <= max(gap, 1e-9) |cost|

A solver offers choices and raises the bound; `evaluate` judges every offer, never the solver. A smaller problem of equal cost (after
reductions) has an incumbent of its own with the same record: a choice that is offered to it is lifted.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..problem import Problem, evaluate
from .answer import TOLERANCE

Choice = Sequence[int] | np.ndarray
Nearby = Callable[[Problem, float], tuple[Sequence[int] | None, np.ndarray]]  # of a problem without a limit, to a relative gap


@dataclass
class Record:
    """The state of the solution of one problem: its options, the best answer, the best bound, and where the time went."""

    problem: Problem
    deadline: float  # seconds on the clock
    gap: float  # relative
    clock: Callable[[], float]
    progress: Callable[[float, float], None] | None = None
    tolerance: float = TOLERANCE  # relative
    patience: float = math.inf  # seconds on the clock: the deadline while there is no answer, if finite; it may be later than the other
    accepted_gap: float = 0.0  # relative: enough from `accepted_from` on
    accepted_from: float = math.inf  # seconds on the clock
    work: float = 0.0  # of dual ascent so far: cells of tables
    most_work: float = math.inf  # after which the search ends
    worst: float = math.inf  # no answer costs more, so a bound above it proves that none exists
    messages: np.ndarray | None = None  # of dual ascent on a similar problem
    nearby: Nearby | None = None  # as for `solve`
    prices: Mapping[int, float] | None = None  # seconds per byte, by time: where a search over prices begins
    best_prices: Mapping[int, float] | None = None  # those of its best bound
    fitting: dict[tuple[int, ...], float] = field(default_factory=dict)  # answers that a search over prices met, and their costs
    starts: Sequence[tuple[int, ...]] = ()  # answers of the problem, within the limit or not
    homes: np.ndarray | None = None  # per node a number; few edges join nodes of different numbers (parts.py)
    choice: tuple[int, ...] | None = None
    cost: float = math.inf
    bound: float = -math.inf
    carried: bool = False  # the answer is proven with the messages alone: preferences were applied where these come from
    size: dict[str, int] = field(default_factory=dict)  # nodes, edges, cells left after reduction
    seconds: dict[str, float] = field(default_factory=dict)

    def report(self) -> None:
        excess = self.bound - self.cost
        assert math.isinf(self.cost) or excess <= TOLERANCE * abs(self.cost), f"bound {self.bound!r} above cost {self.cost!r}"
        if excess > 0 and self.choice is not None:
            self.bound = self.cost  # rounding: below 1e-9 relative, as asserted
        if self.progress is not None:
            self.progress(self.cost, self.bound)


class Incumbent:
    """The record in terms of `problem`, which may be smaller than the record's own; `choice` is the best one that was offered here."""

    def __init__(self, problem: Problem, record: Record) -> None:
        self.problem, self.record = problem, record
        self.choice: tuple[int, ...] | None = record.choice
        self.deadline = record.deadline
        self.homes = record.homes
        self._outer: Incumbent | None = None
        self._lift: Callable[[Choice], Choice] = tuple
        self.complete = True  # the problem contains every answer of the record's problem that is cheaper than the record's

    def inside(self, problem: Problem, lift: Callable[[Choice], Choice], *, complete: bool = True) -> "Incumbent":
        """The incumbent of a problem whose answers `lift` maps to answers of this one, at equal cost.

        Where it is not complete, a bound on it is no bound on this problem and is dropped.
        """
        inner = Incumbent(problem, self.record)
        inner.choice, inner._outer, inner._lift, inner.homes = None, self, lift, None
        inner.complete, inner.deadline = self.complete and complete, self.deadline
        return inner

    def offer(self, choice: Choice) -> bool:
        """Keep the choice if it fits and is cheaper than the best so far. Returns whether it was kept."""
        if self._outer is not None:
            kept = self._outer.offer(self._lift(choice))
        else:
            judged = evaluate(self.problem, choice)
            kept = judged.fits and judged.cost < self.record.cost
            if kept:
                self.record.choice, self.record.cost = tuple(int(i) for i in choice), judged.cost
                self.record.report()
        if kept:
            self.choice = tuple(int(i) for i in choice)
        return kept

    def raise_bound(self, bound: float) -> None:
        """Record a proven lower bound on every answer of `problem`; inf: none exists."""
        if self.complete and bound > self.record.bound:
            self.record.bound = float(bound) if bound <= self.record.worst else math.inf
            self.record.report()

    def close(self) -> None:
        """Record that no answer of `problem` is cheaper than the incumbent."""
        self.raise_bound(self.record.cost)

    def raise_bound_below(self, bound: float) -> None:
        """Record a bound on the answers of `problem`, which need not contain the incumbent itself."""
        self.raise_bound(min(bound, self.record.cost))

    def note_carried(self) -> None:
        """Record whether the answer is proven at a time at which only the messages and prices have been used."""
        self.record.carried = (self.record.messages is not None or self.record.prices is not None) and self.proven

    @property
    def cost(self) -> float:
        return self.record.cost

    @property
    def bound(self) -> float:
        return self.record.bound

    @property
    def gap(self) -> float:
        return self.record.gap

    @property
    def slack(self) -> float:
        """The distance below the cost within which a bound proves it."""
        return max(self.record.gap, self.record.tolerance) * abs(self.record.cost)

    @property
    def proven(self) -> bool:
        return self.bound == math.inf or (self.record.choice is not None and self.cost - self.bound <= self.slack)

    @property
    def until(self) -> float:
        """When the search has to end, in seconds on the clock."""
        record, until = self.record, self.deadline
        if record.work >= record.most_work:
            return -math.inf
        if record.choice is None and math.isfinite(record.patience):
            until = record.patience if until == record.deadline else min(until, record.patience)
        if record.cost - record.bound <= record.accepted_gap * abs(record.cost):
            until = min(until, record.accepted_from)
        return until

    def time_left(self) -> float:
        return self.until - self.record.clock()

    @property
    def done(self) -> bool:
        return self.proven or self.time_left() <= 0


@dataclass(frozen=True)
class Solver:
    """A method that improves an incumbent until it is proven or its time is up. None: what `solve` was asked for."""

    time_limit: float | None = None  # seconds
    gap: float | None = None  # relative

    def run(self, problem: Problem, incumbent: Incumbent) -> None:
        raise NotImplementedError


class Fixed(Incumbent):
    """The incumbent for the certificate of one choice: bounds are recorded, other choices are ignored. ValueError where it doesn't fit."""

    def __init__(self, problem: Problem, record: Record, choice: Choice) -> None:
        super().__init__(problem, record)
        super().offer(choice)
        if record.choice is None:
            raise ValueError("the choice that is to be certified costs inf or exceeds the memory limit")

    def offer(self, choice: Choice) -> bool:
        return False
