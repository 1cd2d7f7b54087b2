"""Plans the tables of one problem, given as arrays: a lower bound, starting plans, local search, and exhaustive search of few tables.

bound    = a lower bound on the slowest device of every plan                     bound.py
starts   = packed plans: the options of the linear program (with a little memory kept free), those of least bytes, the knapsack's proposals
search   = annealing from the starts, then from the best plan                    search.py
exact    = all plans, where they are few                                         exact.py
"""

import math
from collections.abc import Callable

import numpy as np

from autoshard.tables.arrays import TablesInstance
from autoshard.tables.bound import Bound, rows_at, solve_weights
from autoshard.tables.dp import dp_proposals
from autoshard.tables.exact import search_all
from autoshard.tables.search import Annealed, Scale, State, anneal_slice, empty_state, pack, recount

Progress = Callable[[str, float], None]  # (description of the step, fraction done)

SLACKS = (0.0, 0.01, 0.03, 0.1)  # shares of the memory that the options of a start leave free, because packing is not perfect
WINDOWS = (0.005, 0.02, 0.1)  # largest extra cost of the options of a search, as a share of a device's time; see `chosen_by_program`
HOT, COOLING = 3.0, 1e-3  # first temperature in squares of a shard's share of T; the last one relative to it
WARM = 0.1  # of HOT, when the best plan is improved
MOVES = 250_000, 1_000  # per run: at least, and per table
FIT = 3  # times a run's moves, for each of the attempts to find any plan that fits where packing found none
DP_BINS, DP_STARTS = 100, 6  # bins per device, proposals tried
PROVEN = 1e-9  # relative
ENOUGH = 2e-4  # relative: the search stops this near to the bound


class Planner:
    """One problem: its arrays, its bound, and the best plan so far."""

    def __init__(self, instance: TablesInstance, seed: int, progress: Progress | None) -> None:
        self.instance, self.bound = instance, Bound(instance)
        self.rng, self.progress = np.random.default_rng(seed), progress
        self.best: State | None = None
        self.slowest, self.solver = math.inf, ""
        longest = np.maximum.reduceat(self.bound.totals.seconds, instance.first_option[:-1])
        self.high = float(longest.sum()) * (1 + 1e-9)  # seconds that no plan exceeds: everything on one device

    def say(self, what: str, fraction: float) -> None:
        assert 0 <= fraction < 1, (what, fraction)
        if self.progress:
            at = f": {self.slowest * 1e3:.4g} ms, at least {self.bound.value * 1e3:.4g} ms" if self.best is not None else ""
            self.progress(what + at, fraction)

    # -- starts ------------------------------------------------------------------------------------------------------------------

    def offer(self, plan: State, solver: str) -> None:
        """Evaluate a plan, and keep it where it is the best so far."""
        slowest = recount(self.instance, plan)
        if slowest < self.slowest:
            self.best, self.slowest, self.solver = State(*map(np.copy, plan)), float(slowest), solver

    def packed(self, option: np.ndarray, T: float) -> State:
        """The best of three packings: the options placed one by one, the largest first in three senses. Plans that fit are offered."""
        totals = self.bound.totals
        of_time = totals.longest[option] / T
        of_hbm = totals.largest[option] / max(self.instance.hbm_limit.max(), 1.0)
        best, rank = None, (math.inf, math.inf)
        for key, weight in ((of_time + of_hbm, 1.0), (of_hbm, 1e6), (of_time, 1.0)):
            state = empty_state(self.instance)
            order = np.argsort(-key, kind="stable")
            pack(self.instance, self.scale(T, weight), state, order, option)
            slowest = recount(self.instance, state)
            over = np.maximum(state.hbm - self.instance.hbm_limit, 0).sum() + np.maximum(state.host - self.instance.host_limit, 0).sum()
            if slowest < self.slowest:
                self.offer(state, "packing")
            if (over, slowest) < rank:
                best, rank = state, (over, slowest)
        assert best is not None
        return best

    def scale(self, T: float, price: float) -> Scale:
        host = self.instance.host_limit[np.isfinite(self.instance.host_limit)]
        return Scale(T, max(self.instance.hbm_limit.max(), 1.0) / price, max(host.max(initial=0.0), 1.0) / price)

    def chosen_by_program(self, slack: float) -> tuple[np.ndarray, np.ndarray] | None:
        """The options of the program with a share of the memory kept free, and how much more expensive each option is at its prices."""
        less = self.instance._replace(hbm_limit=self.instance.hbm_limit * (1 - slack), host_limit=self.instance.host_limit * (1 - slack))
        T = max(self.bound.value, 1e-300)
        for _ in range(40):  # raise T until the program is feasible
            allowed = self.bound.totals.longest <= T
            a, b = rows_at(less, self.bound.totals, T, packing=False)
            weights = solve_weights(a, b, allowed, self.bound.totals, self.instance.num_tables)
            if weights is not None and weights.excess < 1e-6:
                break
            T *= 1.02 if weights is not None and weights.excess < 0.1 else 1.3
        else:
            return None
        first = self.instance.first_option
        priced = weights.y @ a
        least = np.minimum.reduceat(np.where(allowed, priced, np.inf), first[:-1])
        return self.least(-weights.share), (priced - least[self.bound.totals.table_of]) / max(weights.y.sum(), 1e-300)

    def least_bytes(self) -> np.ndarray:
        """Each table's option of least memory, as a sum of shares of the devices' and the hosts' memory."""
        totals, limit, host = self.bound.totals, self.instance.hbm_limit.sum(), self.instance.host_limit.sum()
        share = totals.hbm / max(limit, 1.0) + (totals.host / max(host, 1.0) if np.isfinite(host) else 0.0)
        return self.least(share)

    def least(self, key: np.ndarray) -> np.ndarray:
        first = self.instance.first_option
        return np.array([low + int(np.argmin(key[low:high])) for low, high in zip(first, first[1:])])

    def by_knapsack(self) -> list[np.ndarray]:
        """Some proposals of the published knapsack, spread over the amounts of memory."""
        first, totals = self.instance.first_option, self.bound.totals
        bins, limit = DP_BINS * self.instance.num, float(self.instance.hbm_limit.sum())
        if not 0 < limit < math.inf:
            return []
        spans = list(zip(first, first[1:]))
        in_bins, seconds = ([of[low:high].tolist() for low, high in spans] for of in (totals.hbm / (limit / bins), totals.seconds))
        proposals = dp_proposals(in_bins, seconds, bins)
        picked = sorted({round(k * (len(proposals) - 1) / max(DP_STARTS - 1, 1)) for k in range(DP_STARTS)}) if proposals else []
        return [first[:-1] + np.array(proposals[k]) for k in picked]

    def find_any(self, moves: int) -> None:
        """Find any plan that fits, as a start for the search: only memory counts, seconds do not."""
        first, totals = self.instance.first_option, self.bound.totals
        a, b = rows_at(self.instance, totals, self.high, packing=False)
        weights = solve_weights(a[1:], b[1:], np.ones(len(totals.longest), dtype=bool), totals, self.instance.num_tables)
        assert weights is not None
        spread = self.least(-weights.share)
        usable = np.arange(len(totals.longest))
        scale = self.scale(2 * self.high, 1.0)  # no device reaches T
        for option in (spread, self.least_bytes(), spread):
            self.say("looking for a plan that fits", 0.08)
            state, best = self.packed(option, self.high), empty_state(self.instance)
            if self.best is not None:
                return
            hot = max(float(np.mean(totals.largest[option])) / max(self.instance.hbm_limit.max(), 1.0), 1e-9)
            self.anneal(scale, math.inf, usable, first, state, best, math.inf, hot, hot * COOLING, moves)
            if self.best is not None:
                return

    # -- search ------------------------------------------------------------------------------------------------------------------

    def run(self, start: State, extra: np.ndarray, window: float, hot: float, moves: int) -> None:
        """Anneal from a start; options whose extra cost exceeds the window are left out, except those of the start."""
        T = max(self.bound.value, 1e-300)
        usable = extra <= window
        usable[start.option] = True
        allowed = np.flatnonzero(usable)
        first = np.searchsorted(allowed, self.instance.first_option)
        z = float(np.mean(self.bound.totals.longest[start.option])) / T
        best = empty_state(self.instance)
        hottest, coldest = max(hot * z * z, 1e-12), max(hot * z * z * COOLING, 1e-15)
        self.anneal(self.scale(T, 1.0), self.slowest, allowed, first, start, best, self.bound.value, hottest, coldest, moves)

    def anneal(
        self, scale: Scale, slowest: float, allowed: np.ndarray, first: np.ndarray, state: State, best: State, low: float, hot: float,
        cold: float, moves: int,
    ) -> None:  # fmt: skip
        """Make all moves, slice by slice, and keep every better plan at once: Ctrl-C may end this at any time."""
        now, given = Annealed(scale.hbm, scale.host, slowest, hot, False, 0), (allowed, first, state, best, low, hot, cold, moves, self.rng)
        while now.moves < moves:
            known = now.slowest
            now = Annealed(*anneal_slice(self.instance, scale.T, tuple(now), *given))
            if now.slowest < known:
                self.offer(best, "annealing")

    @property
    def done(self) -> bool:
        return self.slowest - self.bound.value <= ENOUGH * self.slowest

    def solve(self, effort: float) -> None:
        """Raise the bound and improve the plan until they meet or all moves are used; Ctrl-C ends it with the best plan so far, if any."""
        try:
            self.search(effort)
        except KeyboardInterrupt:
            if self.best is None:
                raise

    def search(self, effort: float) -> None:
        """As `solve`, all steps in their order."""
        self.say("bounding", 0.0)
        self.bound.raise_to(self.high, packing=False)
        starts = self.starts()
        moves = int(effort * max(MOVES[0], MOVES[1] * self.instance.num_tables))
        if self.best is None:
            self.find_any(moves * FIT)
        plan = [(k, window) for window in WINDOWS for k in range(len(starts))]
        for n, (k, window) in enumerate(plan):
            if self.done or (self.best is None and n == len(starts)):
                break
            self.say("searching", 0.1 + 0.6 * n / len(plan))
            state, extra = starts[k]
            self.run(State(*map(np.copy, state)), extra.copy(), window, HOT, moves)
        if self.best is not None:
            self.say("bounding again", 0.7)
            self.bound.raise_to(self.slowest)
            for n, window in enumerate(WINDOWS):
                if not self.done:
                    self.say("improving", 0.75 + 0.05 * n)
                    self.run(State(*map(np.copy, self.best)), starts[0][1].copy(), window, HOT * WARM, moves)
        self.say("proving", 0.95)
        self.prove()

    def starts(self) -> list[tuple[State, np.ndarray]]:
        """Packed plans, each with the extra costs of all options; the best plan is kept on the way."""
        self.say("packing", 0.05)
        T = max(self.bound.value, 1e-300)
        starts: list[tuple[State, np.ndarray]] = []
        kept: list[np.ndarray] = []
        for slack in SLACKS:
            chosen = self.chosen_by_program(slack)
            if chosen is not None:
                option, extra = chosen
                if not any(np.array_equal(option, other) for other in kept):
                    kept.append(option)
                    starts.append((self.packed(option, T), extra))
        least = self.packed(self.least_bytes(), T)
        if not starts:
            starts.append((least, np.zeros(len(self.instance.scope))))
        for option in [*self.by_knapsack(), self.least(self.bound.totals.seconds), self.least(self.bound.totals.longest)]:
            self.packed(option, T)
        if self.best is None:
            starts.append((least, starts[0][1]))
        return starts

    def prove(self) -> None:
        """The exhaustive search; without its proof, an attempt to refute every plan faster than the best one."""
        if self.slowest - self.bound.value > PROVEN * self.slowest or self.best is None:
            slowest, spots, proven = search_all(self.instance, self.bound, self.slowest, self.best)
            if spots is not None and slowest < self.slowest:
                self.offer(spots, "exact")
            if proven:
                self.bound.value = self.slowest
                self.solver = "exact"
                return
        if self.best is not None and self.slowest > 0:
            self.bound.refutes(self.slowest * (1 - PROVEN / 2))
