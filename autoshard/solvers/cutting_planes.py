"""The best prices for memory by cutting planes; the same sweeps decode answers that fit.

    L(y) = min over x of cost(x) + y . (bytes(x) - limit)   at prices y >= 0 per byte of the binding times; every L(y) is a bound
    Every answer x, whether it fits or not, is a plane: L(y) <= cost(x) + y . (bytes(x) - limit) for all y      -> planes
    The next prices are half way from the best known ones (Ben-Ameur and Neto 2007) to those that maximise the
    smallest of the planes (Kelley 1960)                                                                        -> climb
Only the times at which some answer exceeded the limit have a price: a few of thousands.
"""

import math

import numpy as np

from ..problem import Problem
from .dual_ascent import Messages, ascend
from .incumbent import Incumbent
from .linear_program import worst_of_runs
from .linprog import highest

SETTLED = 1e-4  # of the gap: sweeps at one price end when ten of them raise the bound by less
MOST_SWEEPS = 300  # at one price
LARGEST_PRICE = 10.0  # what the whole limit may cost at first, in bounds; doubled whenever it is reached
ABSURD_PRICE = 1e5  # probably nothing fits; other solvers have to prove that
BOUNDING_SWEEPS, BOUNDING_ROUNDS = 600, 20
RAISE, MOST_RAISES = 0.1, 100  # by how much, and how often, prices are raised for the sake of an answer that fits
CLOSED = 1e-3  # of the gap: the planes allow less than this above the best bound
OPTIMISM = 0.05  # relative: the assumed distance of the best cost from the bound while no cost is known


def bound_below(problem: Problem, incumbent: Incumbent) -> None:
    """Raise the incumbent's bound by messages and memory prices; no search for answers."""
    messages = Messages(problem)
    ascend(messages, incumbent, BOUNDING_SWEEPS)
    if len(messages.prices) and not incumbent.done:
        PriceAscent(messages, incumbent).climb(BOUNDING_ROUNDS)


class PriceAscent:
    """The best prices so far, and the planes of the decoded answers, which bound better ones."""

    def __init__(self, messages: Messages, incumbent: Incumbent) -> None:
        self.messages, self.incumbent = messages, incumbent
        self.rows: list[int] = []  # binding times with a price
        self.planes: list[tuple[float, np.ndarray]] = []  # cost, bytes - limit at every binding time
        self.bound, self.prices = -math.inf, messages.prices
        self.largest = 0.0

    def settle(self, prices: np.ndarray) -> float:
        """Sweep at these prices until the bound no longer rises; returns it."""
        messages = self.messages
        messages.price(prices)
        bound = last = -math.inf
        for k in range(MOST_SWEEPS):
            swept, choice, energy = messages.sweep(forward=k % 2 == 0)
            bound = max(bound, swept)
            loads = messages.loads(choice)
            cost = energy + messages.fee - float(prices @ loads)
            fits = bool((loads <= messages.limit).all())
            if fits and cost < self.incumbent.cost:
                self.incumbent.offer(choice)
            if k % 10 == 9:
                if bound - last < SETTLED * self.gap(bound) or self.incumbent.time_left() <= 0:
                    break
                last = bound
        if math.isfinite(cost):
            self.planes.append((cost, excess := loads - messages.limit))
            self.rows += [row for row in worst_of_runs(excess, 0.0) if row not in self.rows]
        if bound > self.bound:
            self.bound, self.prices = bound, prices
            self.incumbent.raise_bound(bound)
        return bound

    def gap(self, bound: float) -> float:
        best = self.incumbent.cost if math.isfinite(self.incumbent.cost) else bound + OPTIMISM * abs(bound)
        return max(best - bound, 1e-12 * abs(bound))

    def climb(self, rounds: int) -> None:
        """Raise the bound until the planes prove that no prices raise it further."""
        if not self.planes:
            self.settle(self.prices)
        for _ in range(rounds):
            if self.incumbent.done or not self.rows or not math.isfinite(self.bound):
                return
            best, promise = self._best_by_planes()
            if promise - self.bound <= CLOSED * self.gap(self.bound) or self.largest > ABSURD_PRICE:
                return
            self.settle((self.prices + best) / 2)

    def raise_until_fits(self) -> None:
        """Raise the prices of the times that are exceeded until a decoded answer fits."""
        prices = self.prices.copy()
        first = RAISE * (abs(self.bound) or 1.0) / max(self.messages.limit, 1.0) / max(len(self.rows), 1)
        for _ in range(MOST_RAISES if self.largest <= ABSURD_PRICE else 0):
            self.settle(prices)
            if math.isfinite(self.incumbent.cost) or self.incumbent.time_left() <= 0 or not self.planes:
                return
            exceeded = worst_of_runs(self.planes[-1][1], 0.0)
            prices = prices.copy()
            prices[exceeded] = np.maximum(prices[exceeded] * (1 + RAISE), first)

    def _best_by_planes(self) -> tuple[np.ndarray, float]:
        """The prices at which the smallest of the planes is largest, and that value."""
        limit = max(self.messages.limit, 1.0)
        scale = max(abs(self.bound), *(abs(c) for c, _ in self.planes)) or 1.0
        self.largest = self.largest or LARGEST_PRICE
        excess = np.array([g[self.rows] for _, g in self.planes]) / limit
        costs = np.array([c for c, _ in self.planes]) / scale
        solved = highest(costs, excess, self.largest)
        if solved is None:
            return self.prices, self.bound
        best, value = solved
        if (best > 0.99 * self.largest).any():
            self.largest *= 2
        prices = np.zeros(len(self.messages.rows.times))
        prices[self.rows] = best * scale / limit
        return prices, value * scale
