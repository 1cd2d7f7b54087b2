"""A price on bytes instead of a limit: minima of cost(x) + y . memory(x), and the bounds that they give for every limit.

    g(y)     = min over x of cost(x) + sum_t y_t memory_t(x), y_t >= 0 per byte, no limit             -> Pricing.settle
    line     : no answer within B bytes costs less than g(y) - B sum_t y_t                            -> Line.at
    spread   of a total price Y over the times: with the answers known so far, the y of sum Y that
               maximises min over k of cost_k + y . memory_k (Kelley 1960)                            -> Pricing.spread
    minimise : prices and answers in turn, until neither helps the other                              -> Pricing.minimise

Without a limit most planning problems are proven by reductions and dual ascent alone, in a second where the proof under a limit takes
minutes. What they leave open is given to branch and bound only as long as EXACT_SECONDS last.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from scipy.optimize import linprog

from ..problem import Problem, evaluate
from .answer import TOLERANCE
from .auto import Auto, finish, polish
from .certificate import priced
from .dual import resume
from .incumbent import Incumbent, Record
from .times import binding_rows, held, load

SETTLED = 1e-9  # relative: answers and bound agree
ROUNDS = 10  # of spreading one total price over the times
EXACT_SECONDS = 5.0  # of branch and bound, for all prices together


@dataclass(frozen=True)
class Line:
    """No answer within B bytes costs less than `intercept` - `price` B."""

    intercept: float  # seconds
    price: float  # seconds per byte, of all times together

    def at(self, limit: float) -> float:
        return self.intercept - self.price * limit


@dataclass(frozen=True, eq=False)
class Found:
    """An answer as `evaluate` judges it."""

    choice: tuple[int, ...]
    cost: float  # seconds
    memory: float  # bytes, its peak
    loads: np.ndarray  # bytes at every row


@dataclass
class Pricing:
    """Minima at prices, one after the other, and what they have shown so far."""

    problem: Problem  # without a limit
    until: float  # seconds on the clock
    clock: Callable[[], float]
    gap: float = 0.0  # relative: between the answer and the bound at a price
    exact_seconds: float = EXACT_SECONDS
    found: dict[tuple[int, ...], Found] = field(default_factory=dict)
    lines: list[Line] = field(default_factory=list)
    peaks: dict[int, None] = field(default_factory=dict)  # rows at which some answer has its peak

    def __post_init__(self) -> None:
        self.rows = binding_rows(replace(self.problem, usage_limit=0.0))  # any time may have a price

    def left(self) -> float:
        return self.until - self.clock()

    def learn(self, choice: Sequence[int] | np.ndarray) -> None:
        """Judge an answer and keep it, unless it is forbidden."""
        x = tuple(int(i) for i in choice)
        if x in self.found:
            return
        judged = evaluate(self.problem, x)
        if not math.isfinite(judged.cost):
            return
        loads = load(self.rows, held(self.problem, x))
        self.found[x] = Found(x, judged.cost, judged.peak, loads)
        if judged.peak > 0:
            self.peaks[int(loads.argmax())] = None

    def settle(self, prices: np.ndarray, messages: np.ndarray | None = None) -> float:
        """The bound on what any answer costs at these prices (per byte, one per row); the best answer is learnt."""
        until = np.concatenate([[0.0], np.cumsum(prices)])
        free = priced(self.problem, until[self.rows.last] - until[self.rows.first]) if prices.any() else self.problem
        record = Record(free, self.until, self.gap, self.clock)
        incumbent = Incumbent(free, record)
        if self.found:
            incumbent.offer(min(self.found.values(), key=lambda f: f.cost + float(prices @ f.loads)).choice)
        if messages is not None:
            finish(free, incumbent, resume(free, incumbent, messages))
        if not incumbent.done:
            polish(free, incumbent)
        if not incumbent.done and self.exact_seconds > 0:
            self._branch(incumbent)
        if record.choice is not None:
            self.learn(record.choice)
        bound = lowered(record.bound)
        if math.isfinite(bound):
            self.lines.append(Line(bound, math.fsum(prices)))
        return bound

    def _branch(self, incumbent: Incumbent) -> None:
        """What reductions and dual ascent left open, for as long as there are seconds for it."""
        began, record = self.clock(), incumbent.record
        inner = Record(record.problem, began + min(self.left(), self.exact_seconds), self.gap, self.clock)
        exact = Incumbent(record.problem, inner)
        if record.choice is not None:
            exact.offer(record.choice)
        Auto().run(record.problem, exact)
        self.exact_seconds -= self.clock() - began
        if inner.choice is not None:
            incumbent.offer(inner.choice)
        incumbent.raise_bound(inner.bound)

    def spread(self, total: float) -> tuple[np.ndarray, float]:
        """Prices of that total at which the cheapest of the known answers costs most, and what it costs then."""
        prices = np.zeros(len(self.rows.times))
        peaks, known = list(self.peaks), list(self.found.values())
        costs = np.array([f.cost for f in known])
        if not peaks or total == 0.0:
            return prices, float(costs.min(initial=math.inf))
        loads = np.array([f.loads[peaks] for f in known]) * total
        share = _shares(costs, loads) if len(peaks) > 1 else np.ones(1)
        prices[peaks] = total * share
        return prices, float((costs + loads @ share).min())

    def minimise(self, total: float) -> None:
        """Look for the answer of least cost + total * peak, and for a line that says so."""
        best = -math.inf
        for _ in range(ROUNDS):
            prices, promise = self.spread(total)
            if promise - best <= max(3 * SETTLED, self.gap) * abs(promise) or self.left() <= 0:
                return
            known = len(self.found)
            best = max(best, self.settle(prices))
            if len(self.found) == known:  # the same prices would come again
                return


def scale(problem: Problem, fastest: Found) -> float:
    """Seconds to weigh memory against: those of the fastest answer, or where that costs nothing what a node's choices differ by."""
    return abs(fastest.cost) or max((float(np.ptp(c[np.isfinite(c)])) for c in problem.node_costs), default=0.0) or 1.0


def lowered(bound: float) -> float:
    """A solver's bound without what it may be too high by: solvers prove to TOLERANCE."""
    return bound - TOLERANCE * abs(bound) if math.isfinite(bound) else bound


def _shares(costs: np.ndarray, loads: np.ndarray) -> np.ndarray:
    """The shares, of sum 1, at which the smallest of costs + loads @ shares is largest."""
    scale = max(float(np.abs(costs).max()), float(loads.max())) or 1.0
    count = loads.shape[1]
    matrix = np.hstack([np.ones((len(costs), 1)), -loads / scale])  # z - loads . shares <= costs
    objective = np.concatenate([[-1.0], np.zeros(count)])
    sums = np.concatenate([[0.0], np.ones(count)])[None]
    bounds = [(None, None)] + [(0.0, None)] * count
    solved = linprog(objective, A_ub=matrix, b_ub=costs / scale, A_eq=sums, b_eq=[1.0], bounds=bounds, method="highs")
    return np.full(count, 1.0 / count) if solved.x is None else np.maximum(solved.x[1:], 0.0)  # any prices give a bound


def corners(found: Sequence[Found]) -> list[Found]:
    """The lower convex hull of (memory, cost), from the least memory to the least cost."""
    kept: list[Found] = []
    for f in undominated(found):
        while len(kept) > 1 and slope(kept[-2], f) <= slope(kept[-2], kept[-1]):
            kept.pop()
        kept.append(f)
    return kept


def undominated(found: Sequence[Found]) -> list[Found]:
    """By growing memory and falling cost, none as good as another in both."""
    kept: list[Found] = []
    for f in sorted(found, key=lambda f: (f.memory, f.cost, f.choice)):
        if not kept or f.cost < kept[-1].cost:
            kept.append(f)
    return kept


def slope(a: Found, b: Found) -> float:
    return (b.cost - a.cost) / (b.memory - a.memory)
