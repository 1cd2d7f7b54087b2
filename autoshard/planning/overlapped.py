"""The objective "overlapped": the plan whose simulated time line is shortest, with a bound on the time line of every plan.

    candidates   the plan of the serial objective, the usual plans, and the answers to the problems that the bound is made of
    judge        the time line of each (simulate); the shortest is kept
    polishing    the parts in which another candidate differs are exchanged, those of equal layers together, while the time line gets
                 shorter
    bound        prices on streams and on chains of tasks (solvers.streams, simulate.chains): at any prices the proven bound of an
                 ordinary problem is a bound here. A chain that is longer under a new answer than every bound is the next part.

Every search is counted in steps, so that the result is the same on every machine; only a time limit ends it earlier.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autoshard.formulate import StreamSeconds, stream_seconds
from autoshard.planning.batches import align_batches, with_choice
from autoshard.planning.instance import Instance
from autoshard.planning.question import Question
from autoshard.planning.solving import solve_instance
from autoshard.planning.tying import tied_groups
from autoshard.problem import evaluate
from autoshard.simulate import longest_chain, timeline_of
from autoshard.solvers import Answer, Part, Status, best_prices, parts_that_differ, priced_by_stream, seconds_of_parts

ROUNDS = 11  # prices that are tried
DISCOUNTS = (0.0, 0.5, 0.2, 0.05)  # of the communication outside of a chain
STEP = 0.3  # from the best prices so far
GAP = 2e-3  # relative, of each of these problems
AGREED = 1e-3  # relative: better prices would raise the bound by less
SIMULATIONS = 400  # of polishing
SAFE = 1e-10  # relative: rounding of the sums of a bound
EQUAL = 1e-9  # relative: seconds and bound that differ by rounding only


@dataclass(frozen=True)
class OverlappedPlan:
    """The best choice found, with the seconds of its time line, and a bound on that of every plan."""

    answer: Answer  # of the serial problem: its cost and bound are those of tasks one after the other
    seconds: float
    bound: float  # seconds; no time line of any plan is shorter
    serial_seconds: float  # of the time line of the serial objective's plan

    def to_dict(self) -> dict[str, float]:
        """As a plan has it."""
        return {"seconds": self.seconds, "bound_seconds": self.bound, "serial_plan_seconds": self.serial_seconds}

    def status(self, gap: float) -> Status:
        """Optimal where no plan's time line is shorter by more than the relative gap."""
        return Status.OPTIMAL if self.seconds - self.bound <= max(gap, EQUAL) * self.seconds else Status.FEASIBLE


def overlapped(question: Question, instance: Instance, answer: Answer, starts: Sequence[tuple[int, ...]]) -> OverlappedPlan:
    """The plan with the shortest time line that the search finds, from the answer to the serial problem and other choices that fit."""
    assert answer.choice is not None
    search = _Search(question, instance)
    serial_seconds = search.offer(answer.choice)
    for start in starts:
        search.offer(start)
    try:
        search.bound_from_prices()
        search.polish()
    except KeyboardInterrupt:
        answer = replace(answer, interrupted=True)
    choice = search.best
    polished = with_choice(answer, choice, evaluate(instance.problem, choice))
    aligned = align_batches(instance.formulated, instance.problem, polished, 0.0)
    assert aligned.choice is not None
    if search.offer(aligned.choice) <= search.seconds[choice]:
        choice, polished = aligned.choice, aligned
    return OverlappedPlan(polished, search.seconds[choice], min(search.bound, search.seconds[choice]), serial_seconds)


class _Search:
    def __init__(self, question: Question, instance: Instance):
        self.question, self.instance, self.problem = question, instance, instance.problem
        self.streams: StreamSeconds = stream_seconds(instance.formulated, joined=True)
        self.tables = self.streams.nodes, self.streams.edges
        self.parts = [self._all_of(stream) for stream in range(self.streams.num)]
        self.groups = tied_groups(instance.formulated)
        self.seconds: dict[tuple[int, ...], float] = {}  # choice -> seconds of its time line
        self.bound = 0.0

    @property
    def best(self) -> tuple[int, ...]:
        return min(self.seconds, key=lambda choice: self.seconds[choice])

    def offer(self, choice: Sequence[int]) -> float:
        """Simulate a choice that fits, once; inf for one that doesn't, or that unties equal layers where they are to be tied."""
        choice = tuple(int(i) for i in choice)
        if choice not in self.seconds:
            judged = evaluate(self.problem, choice)
            untied = self.question.options.tie_blocks and len(set(zip(self.groups, choice))) > len(set(self.groups))
            if untied or not (judged.fits and math.isfinite(judged.cost)):
                return math.inf
            self.seconds[choice] = timeline_of(self.instance.formulated, choice, join=True).seconds
        return self.seconds[choice]

    def _all_of(self, stream: int) -> Part:
        nodes, edges = np.zeros((len(self.problem.node_costs), self.streams.num)), np.zeros((len(self.problem.edges), self.streams.num))
        nodes[:, stream] = edges[:, stream] = 1.0
        return Part(nodes, edges)

    # -- the bound

    def bound_from_prices(self) -> None:
        """Prices that make the bound large; each answer on the way is offered, and its longest chain is one more part.

        First only the chain of the serial plan counts, then the communication outside of it too, at discounts. From there the prices
        move towards those that are best for the answers known (Ben-Ameur and Neto 2007), which alone would jump to and fro.
        """
        tried = list(self.seconds)
        for choice in tried:
            self._add_chain(choice)
        centre, highest = np.zeros(0), 0.0  # the prices with the highest bound since the last discount
        for k in range(ROUNDS):
            known = [seconds_of_parts(self.problem, *self.tables, self.parts, choice) for choice in tried]
            best, most = best_prices(known)
            if most - self.bound <= AGREED * most or self.question.is_over:
                return
            prices = self._discounted(DISCOUNTS[k]) if k < len(DISCOUNTS) else STEP * best
            if k >= len(DISCOUNTS):
                prices[: len(centre)] += (1 - STEP) * centre
            self._say(k)
            answer, bound = self._solved(prices)
            if answer is None:
                return
            if bound > highest or k < len(DISCOUNTS):
                centre, highest = prices, bound
            tried.append(answer)
            self.offer(answer)
            self._add_chain(answer)

    def _discounted(self, discount: float) -> np.ndarray:
        """Prices at which seconds outside of the serial plan's chain count `discount` of those on it."""
        prices, num = np.zeros(len(self.parts)), self.streams.num
        prices[:num], prices[num] = discount, 1.0 - discount
        return prices / prices.sum()

    def _add_chain(self, choice: Sequence[int]) -> None:
        chain = longest_chain(self.instance.formulated, self.streams, choice)
        if chain.seconds > self.bound or len(self.parts) == self.streams.num:
            self.parts.append(Part(chain.nodes, chain.edges))

    def _solved(self, prices: np.ndarray) -> tuple[tuple[int, ...] | None, float]:
        """The cheapest choice at these prices, and its bound, which is one on all time lines."""
        problem = priced_by_stream(self.problem, *self.tables, self.parts, prices.tolist())
        options = replace(
            self.question.options, gap=max(GAP, self.question.options.gap), accepted=(0.05, self.question.clock.elapsed + 10.0)
        )
        quiet = replace(self.question, options=options, clock=self.question.clock.quiet())
        answer = solve_instance(quiet, replace(self.instance, problem=problem, few_layers=None), [self.best]).in_passing()
        bound = answer.bound - SAFE * abs(answer.bound) if math.isfinite(answer.bound) else 0.0
        self.bound = max(self.bound, bound)
        return answer.choice, bound

    def _say(self, k: int) -> None:
        shortest = self.seconds[self.best]
        gap = (shortest - self.bound) / shortest if shortest else 0.0
        proven = f"best {shortest * 1e3:.3f} ms, proven within {gap:.2%} of the best"
        self.question.clock.say(f"solving for overlap: {proven}, {k + 1} of at most {ROUNDS} prices", 0.6 + 0.3 * k / ROUNDS)

    # -- polishing

    def polish(self) -> None:
        """Exchange parts of the best choice with those of the others, shortest first, until no exchange helps."""
        others, left, before = sorted(self.seconds, key=lambda choice: self.seconds[choice]), SIMULATIONS, math.inf
        while self.seconds[self.best] < before:
            before = self.seconds[self.best]
            for other in others:
                for nodes in self._exchanges(self.best, other):
                    if not left or self.question.is_over:
                        return
                    mixed = list(self.best)
                    for v in nodes:
                        mixed[v] = other[v]
                    left -= tuple(mixed) not in self.seconds
                    self.offer(mixed)

    def _exchanges(self, x: Sequence[int], y: Sequence[int]) -> list[list[int]]:
        """Sets of nodes of which y's choices can take the place of x's: the parts of equal layers together, then the first and last."""
        by_kind: dict[tuple, list[list[int]]] = {}
        for part in parts_that_differ(self.problem, np.array(x), np.array(y)):
            key = tuple(sorted((self.groups[v], x[v], y[v]) for v in part))
            by_kind.setdefault(key, []).append(part)
        together = [[v for part in parts for v in part] for parts in by_kind.values()]
        single = [part for parts in by_kind.values() if len(parts) > 1 for part in (parts[0], parts[-1])]
        return together + single
