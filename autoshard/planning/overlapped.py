"""The objective "overlapped": the plan whose simulated time line is shortest, with a bound on the time line of every plan.

    candidates   the plan of the serial objective, the usual plans, and the answers to the problems that the bound is made of
    judge        the time line of each (simulate); the shortest is kept
    polishing    the parts in which another candidate differs are exchanged, those of equal layers together, and equal ops get another
                 layout, while the time line gets shorter; or every second layer is exchanged, so that one hides the next one's traffic
    bound        prices on streams and on chains of tasks (solvers.streams, simulate.chains): at any prices the proven bound of an
                 ordinary problem is a bound here. The longest chain of the best mixture of known plans is the next part.
    plainest     equal layers are made alike where that is as good as was asked for

Every search is counted in steps, so that the result is the same on every machine; only a time limit, and the gap that is enough after
some time, end it earlier.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from autoshard.formulate import Formulation, StreamSeconds, stream_seconds
from autoshard.graph import OFFLOADED, grouped, repeated_blocks
from autoshard.planning.batches import align_batches, with_choice
from autoshard.planning.instance import Instance
from autoshard.planning.question import Question
from autoshard.planning.solving import solve_instance
from autoshard.planning.tying import tied_groups
from autoshard.problem import Problem, evaluate
from autoshard.simulate import critical_chain, full_streams, longest_chain, timeline_of
from autoshard.solvers import (
    Answer,
    Loads,
    Part,
    Status,
    best_prices,
    mixed,
    parts_that_differ,
    priced_by_stream,
    seconds_of_choice,
    seconds_of_parts,
)

ROUNDS, SOLVED = (11, 22), 220_000  # prices that are tried: least and most, and nodes of all these problems together
MORE_ROUNDS, MORE_SOLVED = 40, 30_000  # the same of small models while the gap is wide
STEP = 0.3  # of the way from the best prices so far; twice as far after an answer that was known
GAP, ROUGH = 1e-3, 20  # relative, of each of these problems, or a quarter of the gap asked for, or a part of that known so far
AGREED = 1e-3  # relative: better prices would raise the bound by less
MOST_IDLE, LITTLE = (2, 4, 6), 3e-4  # rounds in turn that gain less, relative; where the gap is wide; of a small model there
MOST_ALIGNED = 0.05  # relative: that one layout for the inputs of a batch may add to the sum of all seconds
SIMULATIONS, SIMULATED = (60, 400), 400_000  # of polishing: least and most, and nodes of all together
IDLE_MOVES, IDLE_SHARE = 6, 0.25  # of these in turn that gain as little; and of all, where the gap is wide
UNFIT = 1 / 64  # of a simulation: an exchange that doesn't fit
LAYERS_EXCHANGED = 24  # times that every second layer is
HIDDEN = 0.1  # of the seconds of traffic that kernels hide: about what it slows these, and what shares its link
WIDE = 0.02  # relative: a gap that is worth more steps
EXCHANGED = 17  # the shortest choices, parts of which are exchanged with the best
FEWER = 5, 8  # times, prices and time lines, where the search starts from near plans
MOST_KNOWN = 0.02  # relative: a gap at which that is enough
SAFE = 1e-10  # relative: rounding of the sums of a bound
EXACT = 2.0**-43  # seconds: sums of multiples up to 1,000 s are exact
EQUAL = 1e-9  # relative: seconds and bound that differ by rounding only
Move = tuple[np.ndarray, dict[int, int]]  # the extra cost of an exchange, at each of two prices or one, and the choices that change
CROSSED = 1e-7  # relative: a bound this far above a time line is an error


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

    @property
    def is_far(self) -> bool:
        """Whether it is so far above its bound that another try is worth its time."""
        return self.seconds - self.bound > WIDE * self.seconds

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
    if instance.formulated.mesh.num_devices == 1 and not any(op.kind == OFFLOADED for op in question.graph.ops):  # a time line is the sum
        search.bound = answer.bound
    try:
        for few in (True, False) if question.known else (False,):
            search.run(few, answer.prices or {})
            if search.gap <= MOST_KNOWN:
                break
    except KeyboardInterrupt:
        answer = replace(answer, interrupted=True)
    search.bound = search.bound or search.least_of_streams()
    choice = search.plainest()
    polished = with_choice(answer, choice, evaluate(instance.problem, choice))
    aligned = align_batches(instance.formulated, instance.problem, polished, MOST_ALIGNED)
    assert aligned.choice is not None
    if search.offer(aligned.choice) <= max(search.seconds[choice], search.bound * (1 + question.options.gap)):
        choice, polished = aligned.choice, aligned
    seconds = search.seconds[choice]
    assert search.bound <= (1 + CROSSED) * seconds, f"a bound of {search.bound} s is above a time line of {seconds} s"
    return OverlappedPlan(polished, seconds, min(search.bound, seconds), serial_seconds)


class _Search:
    def __init__(self, question: Question, instance: Instance):
        self.question, self.instance, self.problem = question, instance, instance.problem
        self.streams: StreamSeconds = stream_seconds(instance.formulated, joined=True)
        self.tables = self.streams.nodes, self.streams.edges
        self.parts = [Part(one.nodes, one.edges) for one in full_streams(instance.formulated, self.streams)]
        self.groups = tied_groups(instance.formulated)
        self.layers = _layers(instance.formulated)
        self.seconds: dict[tuple[int, ...], float] = {}  # choice -> seconds of its time line
        self.loads = Loads(instance.problem)
        self.known: list[tuple[int, ...]] = []  # the choices that the prices are made of, within the limit or not
        self.by_stream: list[tuple[np.ndarray, np.ndarray]] = []  # of these
        self.by_time: list[np.ndarray] = []  # of these, how full the memory is at every time
        self.times: list[int] = []  # at which bytes have a price
        self.rounds = self.more_rounds = self.simulations = 0
        self.bound = 0.0
        self.weights = self.parts[0].nodes * 0, self.parts[0].edges * 0  # of all seconds at the prices of the bound
        self.priced = [instance.problem]  # for the order in which exchanges are tried, and the first for whether they are
        self.priced_last = instance.problem  # at the last prices
        self.edges_of: list[list[int]] = [[] for _ in self.problem.node_costs]
        for k, e in enumerate(self.problem.edges):
            self.edges_of[e.a].append(k)
            self.edges_of[e.b].append(k)

    @property
    def best(self) -> tuple[int, ...]:
        return min(self.seconds, key=lambda choice: self.seconds[choice])

    @property
    def shortest(self) -> float:
        return self.seconds[self.best]

    @property
    def is_proven(self) -> bool:
        """Within the gap that is enough."""
        options = self.question.options
        return self.gap <= max(options.gap, options.accepted[0] if self.question.clock.elapsed > options.accepted[1] else 0.0)

    @property
    def is_small(self) -> bool:
        """A model whose problems are solved and simulated quickly: it gets more steps while the gap is wide."""
        return self.more_rounds > self.rounds

    @property
    def gap(self) -> float:
        return (self.shortest - self.bound) / self.shortest if self.shortest else 0.0

    def offer(self, choice: Sequence[int]) -> float:
        """Simulate a choice that fits, once; inf for one that doesn't, or that unties equal layers where they are to be tied."""
        choice = tuple(int(i) for i in choice)
        if choice not in self.seconds:
            if self.loads.of(choice).max(initial=0.0) > EQUAL:  # the judge takes longer
                return math.inf
            judged = evaluate(self.problem, choice)
            untied = self.question.options.tie_blocks and len(set(zip(self.groups, choice))) > len(set(self.groups))
            if untied or not (judged.fits and math.isfinite(judged.cost)):
                return math.inf
            self.seconds[choice] = timeline_of(self.instance.formulated, choice, join=True).seconds
        return self.seconds[choice]

    def least_of_streams(self) -> float:
        """Seconds of the stream that takes longest where each of its tasks takes its least: a bound without a search."""
        priced = [priced_by_stream(self.problem, *self.tables, part.nodes, part.edges) for part in self.parts]
        least = [sum(map(np.min, one.node_costs)) + sum(float(e.table.min()) for e in one.edges) for one in priced]
        return (1 - SAFE) * float(max(least, default=0.0))

    def run(self, few: bool, of_bytes: Mapping[int, float]) -> None:
        """Bound and polish, in few steps: from near plans, which are polished, they do where the gap is small then."""
        fewer, nodes = FEWER if few else (1, 1), len(self.problem.node_costs)
        self.rounds = int(np.clip(SOLVED // nodes, *ROUNDS)) // fewer[0]
        self.more_rounds = self.rounds if few else max(self.rounds, min(MORE_SOLVED // nodes, MORE_ROUNDS))
        self.simulations = int(np.clip(SIMULATED // nodes, *SIMULATIONS)) // fewer[1]
        self.bound_from_prices(of_bytes)
        self.polish()

    # -- the bound

    def bound_from_prices(self, of_bytes: Mapping[int, float]) -> None:
        """Prices that make the bound large, at first those of_bytes, by time; each answer on the way is offered.

        First those that are best for the plans known so far. From there the prices move towards those that are best for the answers known
        (Ben-Ameur and Neto 2007), which alone would jump to and fro.
        """
        for choice in list(self.seconds):
            self._note(choice)
        self.times = [k for k, t in enumerate(self.loads.rows.times.tolist()) if of_bytes.get(t)]
        fees = np.array([of_bytes[int(self.loads.rows.times[k])] * self.loads.limit for k in self.times])
        centre, highest, idle, step = (np.zeros(0), fees), 0.0, 0, STEP  # the prices with the highest bound; rounds that gained little
        least = math.inf  # that a mixture of known plans takes
        for k in range(self.more_rounds):
            *best, most = self._best_prices()
            is_wide = self.is_small and self.gap > WIDE
            idle = 0 if is_wide and most < (1 - LITTLE) * least else idle
            most_idle = MOST_IDLE[is_wide + (self.gap > WIDE)]
            if most - self.bound <= AGREED * most or self.is_proven or idle >= most_idle or self.question.is_over:
                return
            if k >= self.rounds and not is_wide:
                return
            known, least = (self.bound, self.shortest), min(most, least)
            if k:
                prices = _towards(centre[0], best[0], step), _towards(centre[1], best[1], step)
            else:
                prices = best[0], np.append(fees, np.zeros(len(best[1]) - len(fees)))
            self._say(f"{k + 1} of at most {self.more_rounds} prices", k / self.more_rounds)
            answer, bound = self._solved(*prices)
            if answer is None:
                return
            step = min(2 * step, 1.0) if answer in self.known and bound <= highest else STEP
            if bound > highest:
                centre, highest = prices, bound
            self._note(answer)
            if self.by_time[self.known.index(answer)].max(initial=-1.0) > 0:
                answer = mixed(self.priced_last, self.known, self.question.clock.now, self.question.seconds_left())
                self._note(answer)
            self.offer(answer)
            idle = idle + 1 if max(self.bound - known[0], known[1] - self.shortest) < LITTLE * self.shortest else 0

    def _note(self, choice: Sequence[int]) -> None:
        if tuple(choice) not in self.known:
            self.known.append(tuple(choice))
            self.by_stream.append(seconds_of_choice(self.problem, *self.tables, choice))
            self.by_time.append(self.loads.of(choice))

    def _best_prices(self) -> tuple[np.ndarray, np.ndarray, float]:
        """The prices that are best for the known choices; every chain, and every time, that matters to a mixture of them has a price."""
        known = [seconds_of_parts(self.parts, *one) for one in self.by_stream]
        while True:
            prices, of_bytes, shares, most = best_prices(known, [one[self.times] for one in self.by_time])
            full = sum(share * one for share, one in zip(shares, self.by_time))
            if len(full) and full.max() > AGREED and (fullest := int(full.argmax())) not in self.times:
                self.times.append(fullest)
                continue
            nodes, edges = self._alike(*(sum(share * one[k] for share, one in zip(shares, self.by_stream)) for k in (0, 1)))
            chain = longest_chain(self.instance.formulated, self.streams, nodes, edges)
            part = Part(chain.nodes, chain.edges)
            if seconds_of_parts([part], nodes, edges)[0] <= (1 + AGREED) * most:
                return prices, of_bytes, most
            self.parts.append(part)
            known = [np.append(row, seconds_of_parts([part], *one)) for row, one in zip(known, self.by_stream)]

    def _alike(self, nodes: np.ndarray, edges: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The seconds of equal layers as their mean, of so few bits that sums are exact: a chain leads through all of them in one way, and
        at its prices they are equal again."""
        if (few := self.instance.few_layers) is None:
            return nodes, edges
        of, problem = few.correspondence, few.formulated.problem
        pairs = (nodes, of.nodes, len(problem.node_costs)), (edges, of.edges, len(problem.edges))
        alike = (_means(rows, by, count)[np.asarray(by, dtype=int)] for rows, by, count in pairs)
        nodes, edges = (np.round(rows / EXACT) * EXACT for rows in alike)
        return nodes, edges

    def _solved(self, prices: np.ndarray, of_bytes: np.ndarray) -> tuple[tuple[int, ...] | None, float]:
        """The cheapest choice at these prices, which may exceed the limit, and its bound, which is one on all time lines."""
        of_nodes = sum((y * part.nodes for y, part in zip(prices, self.parts) if y), np.zeros_like(self.parts[0].nodes))
        of_edges = sum((y * part.edges for y, part in zip(prices, self.parts) if y), np.zeros_like(self.parts[0].edges))
        self.priced_last = priced_by_stream(self.problem, *self.tables, of_nodes, of_edges)
        fees = np.zeros(len(self.loads.rows.times))
        fees[self.times] = of_bytes
        free, few = self.loads.priced(self.priced_last, fees), self.instance.few_layers
        instance = replace(self.instance, problem=free, few_layers=few and few.at_costs_of(free))
        options = self.question.options
        solver = "prices" if options.solver == "auto" else options.solver  # no branching: its seconds would decide the plan
        rough = 0.0 if few else self.gap / ROUGH  # few layers are solved quickly
        asked = self.question.with_options(gap=max(GAP, options.gap / 4, rough), solver=solver)
        quiet = replace(asked, clock=self.question.clock.quiet())
        answer = solve_instance(quiet, instance, self.known, preferred=False).in_passing()
        size = abs(answer.bound) + float(fees.sum())
        bound = answer.bound - float(fees.sum()) - SAFE * size
        if bound > self.bound:
            self.bound, self.weights = bound, (of_nodes, of_edges)
        return answer.choice, bound

    def _say(self, step: str, share: float) -> None:
        proven = f"best {self.shortest * 1e3:.3f} ms, proven within {self.gap:.2%} of the best"
        self.question.clock.say(f"solving for overlap: {proven}, {step}", 0.6 + 0.2 * share)

    # -- polishing

    def polish(self) -> None:
        """Exchange parts of the best choice with those of the others until no exchange helps.

        They are tried in the order of their cost at the prices of the bound. At these, hidden traffic is free, so many cost nothing; a part
        of all seconds is added for what that traffic slows. In a small model whose gap is wide, those that are cheap at the mean of these
        prices and of the choice's critical path are tried in turn with them; the steps that are left begin again without.
        """
        start, known, simulations = self.best, list(self.seconds), float(self.simulations)
        for by_path in (True, False) if self.is_small and self.gap > WIDE else (False,):
            if simulations > 0 and not self.question.is_over:
                simulations = self._descend(start, list(known), simulations, by_path)

    def _descend(self, x: tuple[int, ...], known: list[tuple[int, ...]], simulations: float, by_path: bool) -> float:
        """From choice x, with parts of the known ones; returns the simulations that are left."""
        before, left = math.inf, [simulations, float(LAYERS_EXCHANGED)]
        while self.seconds[x] < before and not self.is_proven:
            before, self.priced = self.seconds[x], [self._at(*self.weights)]
            if by_path:
                path = critical_chain(timeline_of(self.instance.formulated, x, join=True), self.streams)
                self.priced.append(self._at((self.weights[0] + path.nodes) / 2, (self.weights[1] + path.edges) / 2))
            for k, moves in enumerate(self._moves(x, known)):
                idle = 0.0
                for _, changes in moves:
                    most = IDLE_SHARE * self.simulations if self.gap > WIDE else IDLE_MOVES
                    if left[k] <= 0 or idle >= most or self.question.is_over:
                        break
                    mixed = list(x)
                    for v, i in changes.items():
                        mixed[v] = i
                    is_new = tuple(mixed) not in self.seconds
                    seconds = self.offer(mixed)
                    if is_new:
                        tried = self.simulations - left[0]
                        if not tried % 5:
                            self._say(f"{tried:.0f} of at most {self.simulations} time lines", 1 + tried / (2 * self.simulations))
                        spent = 1.0 if seconds < math.inf else UNFIT
                        left[k] -= spent
                        idle = 0 if seconds < (1 - LITTLE) * self.seconds[x] else idle + spent
                    if seconds < math.inf and tuple(mixed) not in known:
                        known.append(tuple(mixed))
                    x = tuple(mixed) if seconds < self.seconds[x] else x
        return left[0]

    def plainest(self) -> tuple[int, ...]:
        """The best choice, or the one in which all equal layers are as one of its layers, where that is as good as was asked for."""
        best, members = self.best, list(grouped((group, v) for v, group in enumerate(self.groups)).values())
        alike = []
        for j in sorted({0, 1, max(map(len, members)) // 2, max(map(len, members)) - 1}):
            choice = list(best)
            for group in members:
                for v in group:
                    choice[v] = best[group[min(j, len(group) - 1)]]
            alike.append((self.offer(choice), tuple(choice)))
        seconds, plain = min(alike)
        return plain if seconds <= (1 + self.question.options.gap) * self.seconds[best] else self.best

    def _moves(self, x: tuple[int, ...], known: Sequence[tuple[int, ...]]) -> tuple[list[Move], list[Move]]:
        """Exchanges of every second layer, where the gap is wide: their traffic costs nothing only once it is hidden, so at no prices do
        they look good. And the other exchanges that may help, and other choices of equal nodes, least extra cost first."""
        moves, first = self._flips(x), []
        mixed = list(x)

        def exchanged(other: tuple[int, ...], nodes: list[int]) -> Move:
            for v in nodes:
                mixed[v] = other[v]
            extra = self._priced(mixed, nodes) - self._priced(x, nodes)
            for v in nodes:
                mixed[v] = x[v]
            return extra, {v: other[v] for v in nodes}

        for other in sorted((one for one in known if one != x), key=lambda choice: self.seconds[choice])[: EXCHANGED - 1]:
            moves += [exchanged(other, nodes) for nodes in self._exchanges(x, other)]
            if self.gap > WIDE:
                first += [exchanged(other, nodes) for nodes in self._every_second_layer(x, other)]
        slack = self.seconds[x] - self.bound
        return self._in_turn(moves, slack), self._in_turn(first, slack)

    def _in_turn(self, moves: list[Move], slack: float) -> list[Move]:
        """Those that may help at the first prices, the least extra cost first: one at these prices, one at the next."""
        moves = [move for move in moves if move[0][0] < slack]
        extra = np.array([extra for extra, _ in moves]).reshape(len(moves), len(self.priced))
        ranks = np.argsort(np.argsort(extra, axis=0, kind="stable"), axis=0)
        return [moves[k] for k in np.argsort(ranks.min(axis=1), kind="stable")]

    def _flips(self, x: Sequence[int]) -> list[Move]:
        """Every other choice of a group of equal nodes, all else as in x, with about its extra cost."""
        extra = defaultdict[int, Any](float)
        for v, group in enumerate(self.groups):
            more = np.array([self._of_choices(priced, v, x) for priced in self.priced])
            extra[group] = extra[group] + more - more[:, x[v], None]
        members = grouped((group, v) for v, group in enumerate(self.groups))
        return [(more, dict.fromkeys(members[g], i)) for g, rows in extra.items() for i, more in enumerate(rows.T)]

    def _of_choices(self, priced: Problem, v: int, x: Sequence[int]) -> np.ndarray:
        """About the cost of each choice of node v, all else as in x."""
        tables = [priced.edges[k] for k in self.edges_of[v]]
        return priced.node_costs[v] + sum(e.table[:, x[e.b]] if e.a == v else e.table[x[e.a]] for e in tables)

    def _priced(self, choice: Sequence[int], nodes: Iterable[int]) -> np.ndarray:
        """The cost of these nodes and their edges."""
        edges, costs = {k for v in nodes for k in self.edges_of[v]}, []
        for one in self.priced:
            of_edges = math.fsum(float(one.edges[k].table[choice[one.edges[k].a], choice[one.edges[k].b]]) for k in edges)
            costs.append(math.fsum(float(one.node_costs[v][choice[v]]) for v in nodes) + of_edges)
        return np.array(costs)

    def _at(self, of_nodes: np.ndarray, of_edges: np.ndarray) -> Problem:
        """The problem at these weights of the seconds of each node and edge; what is hidden costs a little too."""
        return priced_by_stream(self.problem, *self.tables, of_nodes + HIDDEN, of_edges + HIDDEN)

    def _exchanges(self, x: Sequence[int], y: Sequence[int]) -> list[list[int]]:
        """Sets of nodes of which y's choices can take the place of x's: the parts of equal layers together, then the first and last."""
        differing = parts_that_differ(self.problem, np.array(x), np.array(y))
        by_kind = grouped((tuple(sorted((self.groups[v], x[v], y[v]) for v in part)), part) for part in differing)
        together = [[v for part in parts for v in part] for parts in by_kind.values()]
        single = [part for parts in by_kind.values() if len(parts) > 1 for part in (parts[0], parts[-1])]
        return together + single

    def _every_second_layer(self, x: Sequence[int], y: Sequence[int]) -> list[list[int]]:
        differ = (np.array(x) != np.array(y)) & (self.layers >= 0)
        return [nodes for k in (0, 1) if (nodes := np.flatnonzero(differ & (self.layers % 2 == k)).tolist())]


def _layers(formulated: Formulation) -> np.ndarray:
    """Of each node the layer that it is in, from the bottom of the model; -1 where it is in none."""
    places, values = repeated_blocks(formulated.graph).places, {node: value for value, node in formulated.hubs.items()}
    ops = [v if v < len(places) else values[v][0] if v in values else -1 for v in range(len(formulated.problem.node_costs))]
    of_ops = [-1 if place is None else place.instance for place in (*places, None)]
    return np.array(of_ops)[ops]


def _towards(centre: np.ndarray, best: np.ndarray, step: float) -> np.ndarray:
    """From the centre, which has as many of the first entries, a part of the way to the best."""
    prices = step * best
    prices[: len(centre)] += (1 - step) * centre
    return prices


def _means(weights: np.ndarray, of: Sequence[int], count: int) -> np.ndarray:
    """Per group the mean of the rows that belong to it; 1 for an empty group."""
    sums, sizes = np.zeros((count, weights.shape[1])), np.bincount(of, minlength=count)[:, None]
    np.add.at(sums, np.asarray(of, dtype=int), weights)
    return np.where(sizes > 0, sums / np.maximum(sizes, 1), 1.0)
