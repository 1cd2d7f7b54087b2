"""Prices for memory: the best ones by cutting planes, and answers that fit from the same sweeps.

    L(y) = min over x of cost(x) + y . (bytes(x) - limit)   at prices y >= 0 per byte of the binding times; every L(y) is a bound
    any answer x, fitting or not, says L(y) <= cost(x) + y . (bytes(x) - limit) everywhere                       -> cuts
    the next prices maximise the smallest of the cuts (Kelley 1960), half way from the best known (Ben-Ameur and Neto 2007)
Only the times that some answer exceeded have a price: a handful, of thousands.
"""

import math

import numpy as np
from scipy.optimize import linprog

from ..problem import Problem
from .dual import Messages, ascend
from .incumbent import Incumbent
from .program import worst_of_runs

SETTLED = 1e-4  # of the gap: sweeps at one price end when ten of them raise the bound by less
MOST_SWEEPS = 300  # at one price
LARGEST_PRICE = 10.0  # what the whole limit may cost at first, in bounds; doubled whenever it is reached
ABSURD_PRICE = 1e5  # nothing fits, probably; that is for others to prove
BOUNDING_SWEEPS, BOUNDING_ROUNDS = 600, 20
RAISE, MOST_RAISES = 0.1, 100  # by how much, and how often, prices are raised for the sake of an answer that fits
CLOSED = 1e-3  # of the gap: the cuts promise less than this above the best bound
OPTIMISM = 0.05  # relative: how far above the bound the best cost is assumed while none is known


def bound_below(problem: Problem, incumbent: Incumbent) -> None:
    """Raise the incumbent's bound as far as messages and memory prices do; no answer is looked for."""
    messages = Messages(problem)
    ascend(messages, incumbent, BOUNDING_SWEEPS)
    if len(messages.prices) and not incumbent.done:
        Ascent(messages, incumbent).climb(BOUNDING_ROUNDS)


class Ascent:
    """The best prices so far, and what the answers decoded on the way say about better ones."""

    def __init__(self, messages: Messages, incumbent: Incumbent) -> None:
        self.messages, self.incumbent = messages, incumbent
        self.rows: list[int] = []  # binding times with a price
        self.cuts: list[tuple[float, np.ndarray]] = []  # cost, bytes - limit at every binding time
        self.bound, self.prices = -math.inf, messages.prices
        self.largest = 0.0

    def settle(self, prices: np.ndarray) -> float:
        """Sweep at these prices until the bound stands still; returns it."""
        messages = self.messages
        messages.price(prices)
        bound = last = -math.inf
        for k in range(MOST_SWEEPS):
            found, choice, energy = messages.sweep(forward=k % 2 == 0)
            bound = max(bound, found)
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
            self._learn(cost, loads - messages.limit)
        if bound > self.bound:
            self.bound, self.prices = bound, prices
            self.incumbent.raise_bound(bound)
        return bound

    def gap(self, bound: float) -> float:
        best = self.incumbent.cost if math.isfinite(self.incumbent.cost) else bound + OPTIMISM * abs(bound)
        return max(best - bound, 1e-12 * abs(bound))

    def _learn(self, cost: float, excess: np.ndarray) -> None:
        self.cuts.append((cost, excess))
        self.rows += [row for row in worst_of_runs(excess, 0.0) if row not in self.rows]

    def climb(self, rounds: int) -> None:
        """Raise the bound until the cuts say that better prices can't raise it further."""
        if not self.cuts:
            self.settle(self.prices)
        for _ in range(rounds):
            if self.incumbent.done or not self.rows or not math.isfinite(self.bound):
                return
            best, promise = self._best_by_cuts()
            if promise - self.bound <= CLOSED * self.gap(self.bound) or self.largest > ABSURD_PRICE:
                return
            self.settle((self.prices + best) / 2)

    def raise_until_fits(self) -> None:
        """Raise the prices of the times that are exceeded until a decoded answer fits."""
        prices = self.prices.copy()
        first = RAISE * (abs(self.bound) or 1.0) / max(self.messages.limit, 1.0) / max(len(self.rows), 1)
        for _ in range(MOST_RAISES if self.largest <= ABSURD_PRICE else 0):
            self.settle(prices)
            if math.isfinite(self.incumbent.cost) or self.incumbent.time_left() <= 0 or not self.cuts:
                return
            exceeded = worst_of_runs(self.cuts[-1][1], 0.0)
            prices = prices.copy()
            prices[exceeded] = np.maximum(prices[exceeded] * (1 + RAISE), first)

    def _best_by_cuts(self) -> tuple[np.ndarray, float]:
        """The prices at which the smallest of the cuts is largest, and that value."""
        limit = max(self.messages.limit, 1.0)
        scale = max(abs(self.bound), *(abs(c) for c, _ in self.cuts)) or 1.0
        self.largest = self.largest or LARGEST_PRICE
        excess = np.array([g[self.rows] for _, g in self.cuts]) / limit
        costs = np.array([c for c, _ in self.cuts]) / scale
        matrix = np.hstack([np.ones((len(costs), 1)), -excess])  # value - y . excess <= cost
        objective = np.concatenate([[-1.0], np.zeros(len(self.rows))])
        bounds = [(None, None)] + [(0.0, self.largest)] * len(self.rows)
        solved = linprog(objective, A_ub=matrix, b_ub=costs, bounds=bounds, method="highs")
        if solved.x is None:
            return self.prices, self.bound
        if (solved.x[1:] > 0.99 * self.largest).any():
            self.largest *= 2
        prices = np.zeros(len(self.messages.rows.times))
        prices[self.rows] = solved.x[1:] * scale / limit
        return prices, float(solved.x[0]) * scale
