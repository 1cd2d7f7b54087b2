"""The Lagrangian of the memory limit: minima of cost(x) + y . memory(x) at prices y per byte, and bounds for every limit.

    g(y)        = min over x of cost(x) + sum_t y_t memory_t(x), y_t >= 0 per byte, no limit           -> Lagrangian.minimum
    line        : no answer within B bytes costs less than g(y) - B sum_t y_t                          -> Line.at
    best_prices : for a total price Y, the y of sum Y that maximises min over k of cost_k + y . memory_k,
                  where k runs over the known answers (Kelley 1960)                                    -> Lagrangian.best_prices
    minimise    : prices and answers in turn, until neither improves the other                         -> Lagrangian.minimise

Without a limit most planning problems are proven by reductions and dual ascent alone, in a second, where the proof under a limit takes
minutes. What these leave open goes to branch and bound, for EXACT_SECONDS in total.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ..problem import Problem, evaluate, held
from .answer import lowered
from .binding_times import binding_rows, load
from .dual_ascent import RESUMED, SLOW, ascend, look
from .incumbent import Incumbent, Nearby, Record
from .infeasibility import priced
from .linprog import highest
from .settle import polish, reduce_and_settle

AGREED = 1e-9  # relative: answers and bound agree
ROUNDS = 10  # of distributing one total price over the times
EXACT_SECONDS = 5.0  # of branch and bound, for all prices together


@dataclass(frozen=True)
class Line:
    """No answer within B bytes costs less than `intercept` - `price` B."""

    intercept: float  # seconds
    price: float  # seconds per byte, of all times together
    prices: Mapping[int, float] = field(default_factory=dict)  # by time

    def at(self, limit: float) -> float:
        return self.intercept - self.price * limit


@dataclass(frozen=True, eq=False)
class KnownAnswer:
    """An answer with its cost and memory, as `evaluate` judges it."""

    choice: tuple[int, ...]
    cost: float  # seconds
    memory: float  # bytes, its peak
    loads: np.ndarray  # bytes at every row


@dataclass
class Lagrangian:
    """Minima at prices, one after the other, with the answers and bounds known so far."""

    problem: Problem  # without a limit
    deadline: float  # seconds on the clock
    clock: Callable[[], float]
    gap: float = 0.0  # relative: between the answer and the bound at a price
    exact_seconds: float = EXACT_SECONDS
    homes: np.ndarray | None = None  # as for `solve`
    nearby: Nearby | None = None  # as for `solve`
    answers: dict[tuple[int, ...], KnownAnswer] = field(default_factory=dict)
    mixtures: set[tuple[int, ...]] = field(default_factory=set)  # the answers that are parts of two others
    lines: list[Line] = field(default_factory=list)
    peaks: dict[int, None] = field(default_factory=dict)  # rows at which some answer has its peak

    def __post_init__(self) -> None:
        self.rows = binding_rows(replace(self.problem, usage_limit=0.0))  # any time may have a price

    def time_left(self) -> float:
        return self.deadline - self.clock()

    def add(self, choice: Sequence[int] | np.ndarray) -> None:
        """Judge an answer and keep it, unless it is forbidden."""
        x = tuple(int(i) for i in choice)
        if x in self.answers:
            return
        judged = evaluate(self.problem, x)
        if not math.isfinite(judged.cost):
            return
        loads = load(self.rows, held(self.problem, x))
        self.answers[x] = KnownAnswer(x, judged.cost, judged.peak, loads)
        if judged.peak > 0:
            self.peaks[int(loads.argmax())] = None

    def mix(self, choice: np.ndarray) -> None:
        """As `add`, for an answer that has parts of two others."""
        known = len(self.answers)
        self.add(choice)
        if len(self.answers) > known:
            self.mixtures.add(next(reversed(self.answers)))

    def minimum(self, prices: np.ndarray, messages: np.ndarray | None = None) -> float:
        """A lower bound on the cost of every answer at these prices (per byte, one per row). The best answer is added."""
        free = priced(self.problem, self.rows.of_usages(prices)) if prices.any() else self.problem
        record = Record(free, self.deadline, self.gap, self.clock, homes=self.homes)
        incumbent = Incumbent(free, record)
        if self.answers:
            incumbent.offer(min(self.answers.values(), key=lambda f: f.cost + float(prices @ f.loads)).choice)
        if messages is None and self.nearby is not None:
            choice, messages = self.nearby(free, self.gap)
            if choice is not None:
                incumbent.offer(choice)
        if messages is not None:
            met = look(free, incumbent, messages)
            if not incumbent.done:
                ascend(met, incumbent, RESUMED, SLOW)
        if not incumbent.done:
            polish(free, incumbent)
        if not incumbent.done and self.exact_seconds > 0:
            self._branch(incumbent)
        if record.choice is not None:
            self.add(record.choice)
        bound = lowered(record.bound)
        if math.isfinite(bound):
            by_time = {int(t): float(y) for t, y in zip(self.rows.times, prices, strict=True) if y}
            self.lines.append(Line(bound, math.fsum(prices), by_time))
        return bound

    def add_nearby(self, total: float) -> None:
        """Add what the similar problem has at the best prices of this total, as it is: nothing is proven."""
        assert self.nearby is not None
        prices, _ = self.best_prices(total)
        choice, _ = self.nearby(priced(self.problem, self.rows.of_usages(prices)), self.gap)
        if choice is not None:
            self.add(choice)

    def _branch(self, incumbent: Incumbent) -> None:
        """Branch and bound on what reductions and dual ascent left open, while exact_seconds last."""
        began, record = self.clock(), incumbent.record
        inner = Record(record.problem, began + min(self.time_left(), self.exact_seconds), self.gap, self.clock)
        exact = Incumbent(record.problem, inner)
        if record.choice is not None:
            exact.offer(record.choice)
        reduce_and_settle(record.problem, exact)
        self.exact_seconds -= self.clock() - began
        if inner.choice is not None:
            incumbent.offer(inner.choice)
        incumbent.raise_bound(inner.bound)

    def best_prices(self, total: float) -> tuple[np.ndarray, float]:
        """The prices of that total at which the cheapest known answer costs most, and its cost then."""
        prices = np.zeros(len(self.rows.times))
        peaks, known = list(self.peaks), list(self.answers.values())
        costs = np.array([f.cost for f in known])
        if not peaks or total == 0.0:
            return prices, float(costs.min(initial=math.inf))
        loads = np.array([f.loads[peaks] for f in known]) * total
        share = best_shares(costs, loads) if len(peaks) > 1 else np.ones(1)
        prices[peaks] = total * share
        return prices, float((costs + loads @ share).min())

    def minimise(self, total: float) -> None:
        """Look for the answer of least cost + total * peak, and for a line that proves it."""
        best = -math.inf
        for _ in range(ROUNDS):
            prices, promise = self.best_prices(total)
            if promise - best <= max(3 * AGREED, self.gap) * abs(promise) or self.time_left() <= 0:
                return
            known = len(self.answers)
            best = max(best, self.minimum(prices))
            if len(self.answers) == known:  # the next prices would be the same
                return

    def chord(self, a: KnownAnswer, b: KnownAnswer, tolerance: float) -> bool:
        """Look for an answer below the line from a to b, by more than a relative tolerance; returns whether one is known now."""
        price = (a.cost - b.cost) / (b.memory - a.memory)
        before = a.cost + price * a.memory
        self.minimise(price)
        return min(f.cost + price * f.memory for f in self.answers.values()) < before - tolerance * abs(before)


def scale(problem: Problem, fastest: KnownAnswer) -> float:
    """Seconds that memory is compared with: those of the fastest answer, or if that costs 0, the largest cost difference within a node."""
    return abs(fastest.cost) or max((float(np.ptp(c[np.isfinite(c)])) for c in problem.node_costs), default=0.0) or 1.0


def best_shares(costs: np.ndarray, loads: np.ndarray) -> np.ndarray:
    """The shares, of sum 1, at which the smallest of costs + loads @ shares is largest."""
    scale, count = max(float(np.abs(costs).max()), float(loads.max())) or 1.0, loads.shape[1]
    solved = highest(costs / scale, loads / scale, total=1.0)
    return np.full(count, 1.0 / count) if solved is None else np.maximum(solved[0], 0.0)  # any prices give a bound


def corners(answers: Sequence[KnownAnswer]) -> list[KnownAnswer]:
    """The lower convex hull of (memory, cost), from the least memory to the least cost."""
    kept: list[KnownAnswer] = []
    for f in undominated(answers):
        while len(kept) > 1 and slope(kept[-2], f) <= slope(kept[-2], kept[-1]):
            kept.pop()
        kept.append(f)
    return kept


def undominated(answers: Sequence[KnownAnswer]) -> list[KnownAnswer]:
    """The answers that no other answer equals or beats in both memory and cost, by growing memory and falling cost."""
    kept: list[KnownAnswer] = []
    for f in sorted(answers, key=lambda f: (f.memory, f.cost, f.choice)):
        if not kept or f.cost < kept[-1].cost:
            kept.append(f)
    return kept


def slope(a: KnownAnswer, b: KnownAnswer) -> float:
    return (b.cost - a.cost) / (b.memory - a.memory)
