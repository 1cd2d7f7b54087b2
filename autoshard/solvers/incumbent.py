"""The best answer and the best bound so far, under one clock: what every solver reads and improves.

    bound <= optimum <= cost          proven where cost - bound <= max(gap, 1e-9) |cost|

A solver offers choices and raises the bound; what an offer is worth is asked of `evaluate`, never of the solver. A smaller problem
of equal cost (after reductions) has an incumbent of its own that shares the record: what is offered there is lifted.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..problem import Problem, evaluate
from .answer import TOLERANCE

Choice = Sequence[int] | np.ndarray


@dataclass
class Record:
    """What is known about the problem that the user gave."""

    problem: Problem
    deadline: float  # seconds on the clock
    gap: float  # relative
    clock: Callable[[], float]
    progress: Callable[[float, float], None] | None = None
    tolerance: float = TOLERANCE  # relative
    patience: float = math.inf  # seconds on the clock: the deadline while there is no answer
    worst: float = math.inf  # no answer costs more: a bound above it says that none exists
    choice: tuple[int, ...] | None = None
    cost: float = math.inf
    bound: float = -math.inf
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
    """The record as seen from `problem`; `choice` is the best one offered here, in this problem's choices."""

    def __init__(self, problem: Problem, record: Record) -> None:
        self.problem, self.record = problem, record
        self.choice: tuple[int, ...] | None = record.choice
        self.deadline = record.deadline
        self._outer: Incumbent | None = None
        self._lift: Callable[[Choice], Choice] = tuple
        self.complete = True  # holds every answer of the record's problem that is cheaper than the record's

    def inside(self, problem: Problem, lift: Callable[[Choice], Choice], *, complete: bool = True) -> "Incumbent":
        """The incumbent of a problem whose answers `lift` takes to this one's, at equal cost.

        Where it is not complete, bounds on it say nothing about this problem and are dropped.
        """
        inner = Incumbent(problem, self.record)
        inner.choice, inner._outer, inner._lift = None, self, lift
        inner.complete, inner.deadline = self.complete and complete, self.deadline
        return inner

    def offer(self, choice: Choice) -> bool:
        """Take the choice if it fits and is cheaper than the best so far."""
        if self._outer is not None:
            taken = self._outer.offer(self._lift(choice))
        else:
            judged = evaluate(self.problem, choice)
            taken = judged.fits and judged.cost < self.record.cost
            if taken:
                self.record.choice, self.record.cost = tuple(int(i) for i in choice), judged.cost
                self.record.report()
        if taken:
            self.choice = tuple(int(i) for i in choice)
        return taken

    def raise_bound(self, bound: float) -> None:
        """Take a proven lower bound on every answer of `problem`; inf says that none exists."""
        if self.complete and bound > self.record.bound:
            self.record.bound = float(bound) if bound <= self.record.worst else math.inf
            self.record.report()

    def close(self) -> None:
        """Nothing cheaper than the incumbent is left in `problem`."""
        self.raise_bound(self.record.cost)

    def raise_bound_below(self, bound: float) -> None:
        """Take a bound on the answers of `problem` where the incumbent itself may lie outside."""
        self.raise_bound(min(bound, self.record.cost))

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
        """How far a bound may stay under the cost and still prove it."""
        return max(self.record.gap, self.record.tolerance) * abs(self.record.cost)

    @property
    def proven(self) -> bool:
        found = self.record.choice is not None
        return self.bound == math.inf or (found and self.cost - self.bound <= self.slack)

    def time_left(self) -> float:
        until = self.deadline if self.record.choice is not None else min(self.deadline, self.record.patience)
        return until - self.record.clock()

    @property
    def done(self) -> bool:
        return self.proven or self.time_left() <= 0


class Fixed(Incumbent):
    """One choice is to be judged; others that are found on the way are not taken, bounds are."""

    def __init__(self, problem: Problem, record: Record, choice: Choice) -> None:
        super().__init__(problem, record)
        super().offer(choice)

    def offer(self, choice: Choice) -> bool:
        return False
