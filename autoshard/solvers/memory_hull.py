"""Memory against cost, with proof: answers on the lower hull of (memory, cost), and a bound for every memory limit.

    chord     The slope of the line between two neighbouring corners of the hull is the next price of a byte. An answer below
              the line is a new corner; if there is none, the hull is this line (Eisner and Severance 1976)  -> Lagrangian.chord
    exchange  Between two corners: parts of one answer in the other                                          -> Sweep.exchange
    limit     Small problems only: what is above the hull, by branch and bound under a limit                 -> Sweep.under
    bound(B)  the largest of the bounds from all prices that were tried and all limits that were solved      -> Hull.bound

Answers on the hull need no branching, which is what makes single plans under a tight limit slow. The widest hole between neighbouring
proven points is always next, so the points are evenly distributed.
"""

import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..problem import Problem, anchored, without_limit
from .answer import TOLERANCE, Status, lowered, relative_gap
from .exchange_parts import between
from .lagrangian import KnownAnswer, Lagrangian, Line, corners, scale, slope, undominated
from .solve import TIME_LIMIT, solve

PROVEN_GAP = 1e-3  # relative: the default gap up to which a point counts as proven
LEAST_GAP = 1e-8  # relative: the smallest gap that can be asked for, as bounds are lowered by TOLERANCE of costs with priced bytes
STEEP = 1e2  # at the end of the hull with the least memory, that of the fastest answer is worth this many times its seconds
EVEN = 2.0  # no hole is wider than this many times the mean
SMALL = 10**4  # table cells: limits are solved by branch and bound as well
LESS = 1 - 1e-6  # of a limit: solvers' tolerances stay below the difference
DESCENTS = 5  # towards the least memory of a small problem, from the answer at the steep price
LIMIT_SECONDS = 20.0  # for all limits together, ample so that a busy machine proves as much; when used up, no further limit is tried


@dataclass(frozen=True)
class HullPoint:
    """An answer, judged by `evaluate`, and the bound on all answers within its own memory."""

    choice: tuple[int, ...]
    memory: float  # bytes, its peak
    cost: float  # seconds
    bound: float  # seconds

    @property
    def gap(self) -> float:
        """(cost - bound) / |cost|; 0 where they are equal."""
        return relative_gap(self.cost, self.bound)


@dataclass(frozen=True)
class Hull:
    """Points by growing memory and falling cost, none of which another one equals or beats in both; and the bounds on all answers."""

    points: tuple[HullPoint, ...]
    lines: tuple[Line, ...]
    limits: tuple[tuple[float, float], ...]  # (bytes, seconds): no answer within so many bytes costs less; inf: no answer exists

    def bound(self, limit: float) -> float:
        """A lower bound in seconds on every answer within `limit` bytes; inf where no answer is that small."""
        by_prices = max((line.at(limit) for line in self.lines), default=-math.inf)
        return max(by_prices, max((bound for most, bound in self.limits if most >= limit), default=-math.inf))


def hull(
    problem: Problem, *, points: int = 12, gap: float = PROVEN_GAP, starts: Sequence[Sequence[int]] = (),
    messages: np.ndarray | None = None, time_limit: float = TIME_LIMIT, progress: Callable[[int, int], None] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Hull:  # fmt: skip
    """At least `points` answers of least cost for their memory, proven within `gap` (relative), as far as there are so many.

    The problem's own limit is ignored. `starts`: known answers. `messages`: those of dual ascent on the problem without a limit
    (`converged`, or stretched from a smaller problem). `progress` is called with the number of proven points, and of those asked for.
    The answer of least memory is returned even if it isn't proven, and others too if fewer are proven than asked for; `HullPoint.gap`
    shows which. No points: no answer exists, or none was found in the time. ValueError on options that can't be.
    """
    if not (points >= 1 and gap >= 0 and time_limit > 0):
        raise ValueError(f"points is {points}, gap {gap}, time_limit {time_limit}; expected 1 or more, 0 or more, and more than 0 seconds")
    sweep = Sweep(Lagrangian(without_limit(anchored(problem)), clock() + time_limit, clock), points, gap)
    for start in starts:
        sweep.lagrangian.add(start)
    sweep.ends(messages)
    while sweep.step():
        if progress is not None:
            progress(len(sweep.proven()), points)
    return sweep.result()


class Sweep:
    """The hull as far as it is known, and the choice of the next question."""

    def __init__(self, lagrangian: Lagrangian, points: int, gap: float) -> None:
        self.lagrangian, self.problem, self.time_left = lagrangian, lagrangian.problem, lagrangian.time_left
        self.points, self.gap = points, max(gap, LEAST_GAP)
        self.limits: list[tuple[float, float]] = []
        self.limit_seconds = LIMIT_SECONDS
        self.small = self.problem.cells <= SMALL
        self.straight: list[tuple[KnownAnswer, KnownAnswer]] = []  # pairs of corners without an answer below their chord
        self.empty: set[tuple] = set()  # pairs of neighbours between which no answer is known

    @property
    def answers(self) -> list[KnownAnswer]:
        return list(self.lagrangian.answers.values())

    def bound(self, limit: float) -> float:
        return Hull((), tuple(self.lagrangian.lines), tuple(self.limits)).bound(limit)

    def ends(self, messages: np.ndarray | None) -> None:
        """The cheapest answer of all, and one of (nearly) the least memory."""
        lagrangian = self.lagrangian
        lagrangian.minimum(np.zeros(len(lagrangian.rows.times)), messages)
        if not self.answers:
            return
        fastest = min(self.answers, key=lambda f: (f.cost, f.memory))
        if fastest.memory > 0:
            lagrangian.minimise(STEEP * scale(self.problem, fastest) / fastest.memory)
        for _ in range(DESCENTS if self.small else 0):
            least = min(f.memory for f in self.answers) * LESS
            if not self.small or not least or self.bound(least) == math.inf:
                return
            self.under(least)

    def is_proven(self, f: KnownAnswer) -> bool:
        return relative_gap(f.cost, self.bound(f.memory)) <= self.gap

    def proven(self) -> list[KnownAnswer]:
        return [f for f in undominated(self.answers) if self.is_proven(f)]

    def shown(self) -> list[KnownAnswer]:
        """The proven answers, and the corners that are not proven (yet)."""
        of_hull = {f.choice for f in corners(self.answers)}
        return [f for f in undominated(self.answers) if f.choice in of_hull or self.is_proven(f)]

    def step(self) -> bool:
        """Search in the widest hole. False where enough is known, or no more can be known."""
        shown = self.shown()
        if not shown or self.time_left() <= 0:
            return False
        least, most, enough = shown[0], shown[-1], len(self.proven()) >= self.points

        def width(hole: tuple[KnownAnswer, KnownAnswer]) -> float:  # the widths of all holes add up to 2
            a, b = hole
            return (b.memory - a.memory) / (most.memory - least.memory) + (a.cost - b.cost) / (least.cost - most.cost)

        holes = [(a, b) for a, b in itertools.pairwise(shown) if (a.choice, b.choice) not in self.empty]
        widest = max(holes, key=width, default=None)
        if widest is None or (enough and width(widest) <= EVEN * 2.0 / max(self.points - 1, 1)):
            return self.prove(shown[:1] if enough else shown)
        a, b = widest
        edges = [
            (p, q)
            for p, q in itertools.pairwise(corners(self.answers))
            if p.memory >= a.memory and q.memory <= b.memory and not self._is_straight(p, q)
        ]
        if edges:
            p, q = max(edges, key=width)
            if not self.lagrangian.chord(p, q, TOLERANCE):
                self.straight.append((p, q))
        elif not self.exchange(a, b) and not self.search(a, b):
            self.empty.add((a.choice, b.choice))
        return True

    def prove(self, some: Sequence[KnownAnswer]) -> bool:
        """Small problems: solve under the memory of one of these that is not proven. Returns whether there was one."""
        unproven = [f for f in some if not self.is_proven(f)] if self.small else []
        if unproven:
            self.under(unproven[0].memory)
        return bool(unproven)

    def _is_straight(self, p: KnownAnswer, q: KnownAnswer) -> bool:
        """Whether both are on a chord without an answer below it."""
        return any(
            a.memory <= p.memory and q.memory <= b.memory and all(_height(f, a, b) >= -TOLERANCE * abs(a.cost) for f in (p, q))
            for a, b in self.straight
        )

    def exchange(self, a: KnownAnswer, b: KnownAnswer) -> bool:
        """Put parts of b into a. Returns whether there is a new point between them."""
        mixed = between(self.problem, self.lagrangian.rows, list(self.lagrangian.peaks), a, b)
        if mixed is not None:
            self.lagrangian.add(mixed)
        return self._is_split(a, b)

    def search(self, a: KnownAnswer, b: KnownAnswer) -> bool:
        """Solve under limits between a and b, where that is quick. Returns whether there is a new point between them."""
        if not self.small:
            return False
        for limit in ((a.memory + b.memory) / 2, b.memory * LESS):
            self.under(limit)
            if self._is_split(a, b):
                return True
        return False

    def _is_split(self, a: KnownAnswer, b: KnownAnswer) -> bool:
        return any(a.memory < f.memory < b.memory for f in self.proven())

    def under(self, limit: float) -> None:
        """Search for the best answer within a limit, from the best known one that fits."""
        starts = [f.choice for f in sorted(self.answers, key=lambda f: f.cost) if f.memory <= limit][:1]
        given = self.lagrangian.clock
        clock = time.process_time if given is time.monotonic else given  # what other processes do changes no answer
        seconds, before = max(min(self.time_left(), self.limit_seconds), 1e-3), clock()
        limited = replace(self.problem, usage_limit=limit)
        answer = solve(limited, starts=starts, time_limit=seconds, gap=self.gap, clock=clock).in_passing()
        self.limit_seconds -= clock() - before
        self.small = answer.status in (Status.OPTIMAL, Status.INFEASIBLE) and self.limit_seconds > 0
        if answer.choice is not None:
            self.lagrangian.add(answer.choice)
        if answer.status is Status.INFEASIBLE or answer.choice is not None:
            self.limits.append((float(limit), lowered(answer.bound)))

    def result(self) -> Hull:
        shown = self.shown()
        if len(self.proven()) >= self.points:
            shown = [f for f in shown if f is shown[0] or self.is_proven(f)]
        return Hull(tuple(map(self._point, shown)), tuple(self.lagrangian.lines), tuple(self.limits))

    def _point(self, f: KnownAnswer) -> HullPoint:
        bound = self.bound(f.memory)
        assert bound - f.cost <= TOLERANCE * abs(f.cost), f"bound {bound!r} above cost {f.cost!r} at {f.memory!r} bytes"
        return HullPoint(f.choice, f.memory, f.cost, min(bound, f.cost))  # below 1e-9 relative it is rounding, as asserted


def _height(f: KnownAnswer, a: KnownAnswer, b: KnownAnswer) -> float:
    """Seconds above the chord from a to b."""
    return f.cost - a.cost - slope(a, b) * (f.memory - a.memory)
