"""The best answer and the best bound so far, under one clock: what every solver reads and improves.

    bound <= optimum <= cost          proven where cost - bound <= max(gap, 1e-9) |cost|

A solver offers choices and raises the bound; what an offer is worth is asked of `evaluate`, never of the solver.
"""

import math
from collections.abc import Callable, Sequence

from ..problem import Problem, evaluate
from .answer import TOLERANCE


class Incumbent:
    """Holds the best choice of `problem`; `deadline` and `clock` are in seconds."""

    def __init__(
        self,
        problem: Problem,
        *,
        deadline: float,
        gap: float,
        clock: Callable[[], float],
        progress: Callable[[float, float], None] | None = None,
    ) -> None:
        self.problem = problem
        self.deadline, self.gap, self.clock, self.progress = deadline, gap, clock, progress
        self.choice: tuple[int, ...] | None = None
        self.cost = math.inf
        self.bound = -math.inf
        self.size: dict[str, int] = {}  # nodes, edges, cells left after reduction
        self.seconds: dict[str, float] = {}

    def offer(self, choice: Sequence[int]) -> bool:
        """Take the choice if it fits and is cheaper than the best so far."""
        judged = evaluate(self.problem, choice)
        if not judged.fits or not judged.cost < self.cost:
            return False
        self.choice, self.cost = tuple(int(i) for i in choice), judged.cost
        self._report()
        return True

    def raise_bound(self, bound: float) -> None:
        """Take a proven lower bound; inf says that no answer exists."""
        if bound > self.bound:
            self.bound = bound
            self._report()

    def _report(self) -> None:
        excess = self.bound - self.cost
        assert math.isinf(self.cost) or excess <= TOLERANCE * abs(self.cost), f"bound {self.bound!r} above cost {self.cost!r}"
        if excess > 0 and self.choice is not None:
            self.bound = self.cost  # rounding: below 1e-9 relative, as asserted
        if self.progress is not None:
            self.progress(self.cost, self.bound)

    @property
    def slack(self) -> float:
        """How far a bound may stay under the cost and still prove it."""
        return max(self.gap, TOLERANCE) * abs(self.cost)

    @property
    def proven(self) -> bool:
        return self.bound == math.inf or (self.choice is not None and self.cost - self.bound <= self.slack)

    def time_left(self) -> float:
        return self.deadline - self.clock()

    @property
    def done(self) -> bool:
        return self.proven or self.time_left() <= 0


class Lifted(Incumbent):
    """An incumbent of a smaller problem of equal cost: what is offered here is lifted to the one outside."""

    def __init__(self, problem: Problem, outer: Incumbent, lift: Callable[[Sequence[int]], Sequence[int]]) -> None:
        self.problem, self.outer, self.lift = problem, outer, lift
        self.gap, self.clock, self.deadline = outer.gap, outer.clock, outer.deadline
        self.choice: tuple[int, ...] | None = None  # the best offered here, in this problem's choices
        self.size, self.seconds = outer.size, outer.seconds

    @property
    def cost(self) -> float:
        return self.outer.cost

    @property
    def bound(self) -> float:
        return self.outer.bound

    @property
    def proven(self) -> bool:
        return self.outer.proven

    def offer(self, choice: Sequence[int]) -> bool:
        taken = self.outer.offer(self.lift(choice))
        if taken:
            self.choice = tuple(int(i) for i in choice)
        return taken

    def raise_bound(self, bound: float) -> None:
        self.outer.raise_bound(bound)
