"""Memory against cost, with proof: answers on the lower hull of (memory, cost), and a bound for every limit.

    chord     of two neighbouring corners of the hull, its slope the next price of a byte: an answer below it is a new
              corner, and where there is none the hull is this chord (Eisner and Severance 1976)           -> Sweep.chord
    exchange  between corners: parts of one answer put into the other                                      -> Sweep.exchange
    limit     small problems only: what lies above the hull, by branch and bound under a limit             -> Sweep.under
    bound(B)  the largest of what the prices tried and the limits solved say                               -> Hull.bound

Answers on the hull need no branching, which is what makes single plans under a tight limit slow. The widest hole between neighbouring
points that are proven comes first, so the points lie evenly.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..problem import Problem, without_limit
from .answer import TOLERANCE, Status
from .exchange import between
from .pricing import Found, Line, Pricing, corners, lowered, scale, slope, undominated
from .solve import TIME_LIMIT, solve

PROVEN_GAP = 1e-3  # relative: a point counts as proven up to here, where nothing else is asked for
LEAST_GAP = 1e-8  # relative: no less can be asked for, as bounds are lowered by TOLERANCE of costs with their bytes priced
STEEP = 1e2  # the far end of the hull is where the memory of the fastest answer is worth this many times its seconds
EVEN = 2.0  # no hole is wider than this many times what it would be if all were alike
SMALL = 10**4  # table cells: limits are solved by branch and bound as well
LESS = 1 - 1e-6  # of a limit: solvers' tolerances stay below the difference
DESCENTS = 5  # towards the least memory of a small problem, from where the steep price has led
LIMIT_SECONDS = 20.0  # for all of them, so that a busy machine proves as much; where they are not enough, no further ones are tried


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
        return _gap(self.cost, self.bound)


@dataclass(frozen=True)
class Hull:
    """Points by growing memory and falling cost, none as good as another in both; and what bounds all answers."""

    points: tuple[HullPoint, ...]
    lines: tuple[Line, ...]
    limits: tuple[tuple[float, float], ...]  # (bytes, seconds): no answer within so many bytes costs less; inf: there is none

    def bound(self, limit: float) -> float:
        """Seconds that no answer within `limit` bytes beats; inf where no answer is that small."""
        return _bound(self.lines, self.limits, limit)


def _bound(lines: Sequence[Line], limits: Sequence[tuple[float, float]], limit: float) -> float:
    by_prices = max((line.at(limit) for line in lines), default=-math.inf)
    return max(by_prices, max((bound for most, bound in limits if most >= limit), default=-math.inf))


def _gap(cost: float, bound: float) -> float:
    if cost == bound:
        return 0.0
    return (cost - bound) / abs(cost) if cost and math.isfinite(bound) else math.inf


def hull(
    problem: Problem,
    *,
    points: int = 12,
    gap: float = PROVEN_GAP,
    starts: Sequence[Sequence[int]] = (),
    messages: np.ndarray | None = None,
    time_limit: float = TIME_LIMIT,
    progress: Callable[[int, int], None] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Hull:
    """At least `points` answers of least cost for their memory, proven within `gap` (relative), as far as there are so many.

    The problem's own limit is set aside. `starts`: known answers. `messages`: where dual ascent stood on the problem without a limit
    (`converged`, or stretched from a smaller problem). `progress` is told how many points are proven, of how many. The answer of
    least memory is returned even if it isn't proven, and where fewer are proven than asked for others too; `HullPoint.gap` says which.
    No points: no answer exists, or none was found in the time. ValueError on options that can't be.
    """
    if not (points >= 1 and gap >= 0 and time_limit > 0):
        raise ValueError(f"points is {points}, gap {gap}, time_limit {time_limit}; expected 1 or more, 0 or more, and more than 0 seconds")
    until = clock() + time_limit
    sweep = Sweep(Pricing(without_limit(problem), until, clock), points, gap)
    for start in starts:
        sweep.pricing.learn(start)
    sweep.ends(messages)
    while sweep.step():
        if progress is not None:
            progress(len(sweep.proven()), points)
    return sweep.result()


class Sweep:
    """What is known of the hull so far, and the next thing to ask."""

    def __init__(self, pricing: Pricing, points: int, gap: float) -> None:
        self.pricing, self.problem, self.left = pricing, pricing.problem, pricing.left
        self.points, self.gap = points, max(gap, LEAST_GAP)
        self.limits: list[tuple[float, float]] = []
        self.limit_seconds = LIMIT_SECONDS
        self.small = sum(e.table.size for e in self.problem.edges) <= SMALL
        self.straight: list[tuple[Found, Found]] = []  # corners with no answer below their chord
        self.empty: set[tuple] = set()  # pairs of neighbours between which nothing was found

    @property
    def found(self) -> list[Found]:
        return list(self.pricing.found.values())

    def bound(self, limit: float) -> float:
        return _bound(self.pricing.lines, self.limits, limit)

    def ends(self, messages: np.ndarray | None) -> None:
        """The cheapest answer of all, and one of (nearly) the least memory."""
        pricing = self.pricing
        pricing.settle(np.zeros(len(pricing.rows.times)), messages)
        if not self.found:
            return
        fastest = min(self.found, key=lambda f: (f.cost, f.memory))
        if fastest.memory > 0:
            pricing.minimise(STEEP * scale(self.problem, fastest) / fastest.memory)
        for _ in range(DESCENTS if self.small else 0):
            least = min(f.memory for f in self.found) * LESS
            if not self.small or not least or self.bound(least) == math.inf:
                return
            self.under(least)

    def is_proven(self, f: Found) -> bool:
        return _gap(f.cost, self.bound(f.memory)) <= self.gap

    def proven(self) -> list[Found]:
        return [f for f in undominated(self.found) if self.is_proven(f)]

    def shown(self) -> list[Found]:
        """What is proven, and the corners that are not (yet)."""
        of_hull = {f.choice for f in corners(self.found)}
        return [f for f in undominated(self.found) if f.choice in of_hull or self.is_proven(f)]

    def step(self) -> bool:
        """Ask about the widest hole; False where enough is known, or nothing more can be."""
        shown = self.shown()
        if not shown or self.left() <= 0:
            return False
        least, most, enough = shown[0], shown[-1], len(self.proven()) >= self.points

        def width(hole: tuple[Found, Found]) -> float:  # those of all holes add up to 2
            a, b = hole
            return (b.memory - a.memory) / (most.memory - least.memory) + (a.cost - b.cost) / (least.cost - most.cost)

        holes = [(a, b) for a, b in itertools.pairwise(shown) if (a.choice, b.choice) not in self.empty]
        widest = max(holes, key=width, default=None)
        if widest is None or (enough and width(widest) <= EVEN * 2.0 / max(self.points - 1, 1)):
            return self.prove(shown[:1] if enough else shown)
        a, b = widest
        edges = [
            (p, q)
            for p, q in itertools.pairwise(corners(self.found))
            if p.memory >= a.memory and q.memory <= b.memory and not self._is_straight(p, q)
        ]
        if edges:
            self.chord(*max(edges, key=width))
        elif not self.exchange(a, b) and not self.search(a, b):
            self.empty.add((a.choice, b.choice))
        return True

    def prove(self, some: Sequence[Found]) -> bool:
        """Small problems: solve under the memory of one of these that is not proven; says whether there was one."""
        unproven = [f for f in some if not self.is_proven(f)] if self.small else []
        if unproven:
            self.under(unproven[0].memory)
        return bool(unproven)

    def chord(self, a: Found, b: Found) -> None:
        """Look for an answer below the line from a to b."""
        price = (a.cost - b.cost) / (b.memory - a.memory)
        before = a.cost + price * a.memory
        self.pricing.minimise(price)
        if min(f.cost + price * f.memory for f in self.found) >= before - TOLERANCE * abs(before):
            self.straight.append((a, b))

    def _is_straight(self, p: Found, q: Found) -> bool:
        """Do both lie on a chord that has nothing below it?"""
        return any(
            a.memory <= p.memory and q.memory <= b.memory and all(_height(f, a, b) >= -TOLERANCE * abs(a.cost) for f in (p, q))
            for a, b in self.straight
        )

    def exchange(self, a: Found, b: Found) -> bool:
        """Put parts of b into a; says whether a new point between them came of it."""
        mixed = between(self.problem, self.pricing.rows, list(self.pricing.peaks), a, b)
        if mixed is not None:
            self.pricing.learn(mixed)
        return self._is_split(a, b)

    def search(self, a: Found, b: Found) -> bool:
        """Solve under limits between a and b, where that is quick; says whether a new point came of it."""
        if not self.small:
            return False
        for limit in ((a.memory + b.memory) / 2, b.memory * LESS):
            self.under(limit)
            if self._is_split(a, b):
                return True
        return False

    def _is_split(self, a: Found, b: Found) -> bool:
        return any(a.memory < f.memory < b.memory for f in self.proven())

    def under(self, limit: float) -> None:
        """The best answer within a limit, from those that are known to fit."""
        starts = [f.choice for f in sorted(self.found, key=lambda f: f.cost) if f.memory <= limit][:1]
        began = self.left()
        given = max(min(began, self.limit_seconds), 1e-3)
        limited, clock = replace(self.problem, usage_limit=limit), self.pricing.clock
        answer = solve(limited, starts=starts, time_limit=given, gap=self.gap, clock=clock).in_passing()
        self.limit_seconds -= began - self.left()
        self.small = answer.status in (Status.OPTIMAL, Status.INFEASIBLE) and self.limit_seconds > 0
        if answer.choice is not None:
            self.pricing.learn(answer.choice)
        if answer.status is Status.INFEASIBLE or answer.choice is not None:
            self.limits.append((float(limit), lowered(answer.bound)))

    def result(self) -> Hull:
        shown = self.shown()
        if len(self.proven()) >= self.points:
            shown = [f for f in shown if f is shown[0] or self.is_proven(f)]
        return Hull(tuple(map(self._point, shown)), tuple(self.pricing.lines), tuple(self.limits))

    def _point(self, f: Found) -> HullPoint:
        bound = self.bound(f.memory)
        assert bound - f.cost <= TOLERANCE * abs(f.cost), f"bound {bound!r} above cost {f.cost!r} at {f.memory!r} bytes"
        return HullPoint(f.choice, f.memory, f.cost, min(bound, f.cost))  # below 1e-9 relative it is rounding, as asserted


def _height(f: Found, a: Found, b: Found) -> float:
    """Seconds above the chord from a to b."""
    return f.cost - a.cost - slope(a, b) * (f.memory - a.memory)
