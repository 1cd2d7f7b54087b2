"""Which demands no plan meets together, and what each of them costs where there is a plan.

    D            the demands: the memory limit, pins, kept and forbidden layouts, skip_fully_replicated, tie_blocks, recompute
    X(S)         the answers that meet all of S; S within T means that X(T) lies within X(S)
    feasible(S)  is X(S) not empty? The problem with every finite cost set to zero, so that the first answer found is enough, and
                 a bound above zero says that there is none                                              (`_Tests.feasible`)
    conflict     C within D: X(C) is empty, X(C without d) is not, for every d of C. Halves of D are tried, as QuickXplain does
                 (Junker 2004): about 2 |C| log |D| tests rather than |D|                                (`_within`)
    price of d   best cost over X(D) - best cost over X(D without d)                                     (`priced`)

recompute given up means that every block may be recomputed instead. What the time did not suffice to decide counts as possible: the
conflict then still is one, though perhaps with more in it than need be.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autoshard.formulate import Formulation, with_pins
from autoshard.planning.demands import Demanded, demanded, together
from autoshard.planning.options import Demand, Options
from autoshard.planning.tying import tied, tied_groups
from autoshard.problem import Edge, Problem, evaluate
from autoshard.solvers import Answer, Status
from autoshard.solvers.incumbent import Incumbent, Record
from autoshard.solvers.infeasibility import hopeless, level
from autoshard.solvers.settle import reduce_and_settle

CONFLICT_SECONDS = 20.0  # at most, to find one
QUICK_SECONDS = 2.0  # of search, which sees soon that nothing fits; then prices on bytes, which find what only just fits
GRAPH = ("memory_limit", "recompute", "tie_blocks")  # demands that say more than which choices a node has


@dataclass(frozen=True)
class Conflict:
    """Demands that no plan meets together; without any one of them there is a plan, if `minimal`."""

    demands: tuple[Demand, ...]
    minimal: bool


def find_conflict(
    formulated: Formulation,
    options: Options,
    *,
    also: Sequence[Demanded] = (),
    thrifty: Callable[[], Formulation] | None = None,
    seconds: float = CONFLICT_SECONDS,
    clock: Callable[[], float] = time.monotonic,
    tested: Callable[[int], None] = lambda count: None,
) -> Conflict:
    """A minimal reason why no plan meets `options`: taking away any one member of it leaves a plan.

    also: demands beside those of the options. thrifty: makes the same problem with every block recomputed. Only to be asked where it
    is proven that there is no plan; takes about `seconds` at most. tested: told how many tests were begun.
    """
    tests = _Tests(formulated, options, also, thrifty, clock, clock() + seconds, tested)
    names = list(tests.demands)
    if len(names) == 1:
        return Conflict(tuple(names), True)
    memory = [d for d in names if d.kind == "memory_limit"]
    rest = [d for d in names if d.kind != "memory_limit"]
    if memory and not tests.feasible(rest):  # then memory is not to blame, and every test is much quicker without it
        memory, rest = [], [d for d in rest if d.kind != "recompute"]
    found = {*memory, *_within(tests.feasible, memory, rest, changed=bool(memory))}
    return Conflict(tuple(d for d in names if d in found), not tests.undecided)


def _within(feasible: Callable[[Sequence[Demand]], bool], held: list[Demand], rest: list[Demand], *, changed: bool) -> list[Demand]:
    """A minimal part of `rest` that can't be met beside `held`. changed: `held` alone has not been tested yet."""
    if changed and not feasible(held):
        return []
    if len(rest) <= 1:
        return rest
    first, second = rest[: len(rest) // 2], rest[len(rest) // 2 :]
    from_second = _within(feasible, held + first, second, changed=True)
    from_first = _within(feasible, held + from_second, first, changed=bool(from_second))
    return from_first + from_second


class _Tests:
    """Is there a plan that meets these demands?"""

    def __init__(
        self,
        formulated: Formulation,
        options: Options,
        also: Sequence[Demanded],
        thrifty: Callable[[], Formulation] | None,
        clock: Callable[[], float],
        deadline: float,
        tested: Callable[[int], None],
    ):
        self.options, self.clock, self.deadline, self.tested, self.count = options, clock, deadline, tested, 0
        self.thrifty = thrifty if options.memory_limit is not None else None
        self.given = _Free(formulated, options, also)
        self.spared: _Free | None = None
        self.demands = dict.fromkeys([*self._of_graph(), *self.given.limits])
        self.undecided = 0  # tests for which there was not time enough

    def _of_graph(self) -> list[Demand]:
        options = self.options
        found = [Demand("memory_limit", value=options.memory_limit)] if options.memory_limit is not None else []
        found += [Demand("recompute", value=options.recompute)] if self.thrifty is not None else []
        return found + ([Demand("tie_blocks")] if options.tie_blocks else [])

    def feasible(self, demands: Sequence[Demand]) -> bool:
        """Whether there is a plan, or nobody knows."""
        kinds = {d.kind for d in demands}
        layouts = [d for d in demands if d.kind not in GRAPH]
        if kinds <= {"recompute"}:
            return True  # nothing was asked
        refused = all(d in demands or d.kind == "recompute" for d in self.demands)  # that has brought us here
        if not refused and self._has_answer(self.given, layouts, kinds):
            return True
        if self.thrifty is None or "memory_limit" not in kinds or "recompute" in kinds:
            return False
        if self.spared is None and self.clock() < self.deadline:
            self.spared = _Free(self.thrifty(), self.options, ())
        if self.spared is None:
            self.undecided += 1
            return True
        return self._has_answer(self.spared, layouts, kinds)

    def _has_answer(self, free: _Free, layouts: Sequence[Demand], kinds: set[str]) -> bool:
        self.count += 1
        self.tested(self.count)
        problem = free.under(layouts, self.options.memory_limit if "memory_limit" in kinds else None)
        if "tie_blocks" in kinds:
            problem = tied(problem, free.groups)
        decided = False if hopeless(problem) else self._searched(problem, min(self.deadline, self.clock() + QUICK_SECONDS))
        if decided is None and problem.usage_limit is not None:
            low, _, choice = level(problem, self.clock, self.deadline, enough=problem.usage_limit)
            fits = choice is not None and evaluate(problem, choice).fits
            decided = True if fits else False if low > problem.usage_limit else None
        if decided is None:
            decided = self._searched(problem, self.deadline)
        self.undecided += decided is None
        return decided is not False

    def _searched(self, problem: Problem, deadline: float) -> bool | None:
        """Whether there is an answer; None where the time was too short."""
        record = Record(problem, deadline, 0.0, self.clock, worst=0.0)
        incumbent = Incumbent(problem, record)
        reduce_and_settle(problem, incumbent)
        return True if record.choice is not None else False if incumbent.proven else None


class _Free:
    """A problem whose costs are 0 or inf, and what each demand leaves of its choices."""

    def __init__(self, formulated: Formulation, options: Options, also: Sequence[Demanded]):
        tables = {id(e.table): e.table for e in formulated.problem.edges}
        free = {key: _without_prices(table) for key, table in tables.items()}
        costs = tuple(_without_prices(c) for c in formulated.problem.node_costs)
        edges = tuple(Edge(e.a, e.b, free[id(e.table)]) for e in formulated.problem.edges)
        self.formulated = replace(formulated, problem=replace(formulated.problem, node_costs=costs, edges=edges, usage_limit=None))
        self.limits: dict[Demand, Mapping[int, np.ndarray]] = {one.demand: one.allowed for one in (*demanded(formulated, options), *also)}

    @property
    def groups(self) -> list[int]:
        return tied_groups(self.formulated)

    def under(self, layouts: Sequence[Demand], memory_limit: float | None) -> Problem:
        problem = with_pins(self.formulated, together(Demanded(d, self.limits[d]) for d in layouts))
        return replace(problem, usage_limit=memory_limit) if memory_limit is not None else replace(problem, usages=())


def _without_prices(table: np.ndarray) -> np.ndarray:
    return np.where(np.isfinite(table), 0.0, np.inf)


def priced(
    formulated: Formulation,
    options: Options,
    answer: Answer,
    best: Callable[[Problem], Answer],
    begun: Callable[[str], None] = lambda what: None,
) -> list[dict]:
    """What pins cost: of each the cost with all of them minus the cost without that one, in seconds.

    best: solves a problem under the same options; `answer` is what it said under all demands. Kept layouts are priced as one. Rows are
    {kind, name, layout, costs_seconds, proven}; where a solve was not proven best, the price is that of the best plans found.
    begun: told which one is priced now.
    """
    demands = demanded(formulated, options)
    groups = [[one] for one in demands if options.price_pins and one.demand.kind in ("pin", "forbid")]
    groups += [kept] if (kept := [one for one in demands if one.demand.kind == "keep"]) else []
    rows = []
    for k, group in enumerate(groups):
        begun(f"{k + 1} of {len(groups)}")
        without = best(with_pins(formulated, together(one for one in demands if one not in group)))
        first = group[0].demand
        row = {"kind": first.kind, "name": first.name, "layout": first.value}
        if first.kind == "keep":
            row = {"kind": "keep", "name": f"{len(group)} layouts", "layout": None}
        cost = min(without.cost, answer.cost) if math.isfinite(without.cost) else answer.cost
        proven = answer.status is Status.OPTIMAL and without.status is Status.OPTIMAL
        rows.append({**row, "costs_seconds": answer.cost - cost, "proven": proven})
    return rows
