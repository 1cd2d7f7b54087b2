"""Where no plan meets all demands: a smallest set of them that no plan meets together.

    D            the demands: the memory limit, pins, kept and forbidden layouts, skip_fully_replicated, tie_blocks, recompute
    X(S)         the answers that meet all of S; where S is a subset of T, X(T) is a subset of X(S)
    feasible(S)  X(S) is not empty. Tested on the problem with every finite cost set to zero, so that the first answer is enough, and
                 a bound above zero says that there is none                                              (`_Tests.feasible`)
    conflict     C, a subset of D: X(C) is empty, X(C without d) is not, for every d of C. Halves of D are tried, as QuickXplain does
                 (Junker 2004): about 2 |C| log |D| tests rather than |D|                                (`_within`)

Giving up the demand "recompute" means that every block may be recomputed instead. A test that runs out of time counts
as feasible: what is found is a conflict all the same, but it may hold more demands than necessary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from autoshard.formulate import Formulation, with_pins
from autoshard.planning.demands import Demanded, demanded, together
from autoshard.planning.instance import Instance, formulate_for, layers_of_nodes
from autoshard.planning.options import Demand
from autoshard.planning.question import Question
from autoshard.planning.tying import tied, tied_groups
from autoshard.problem import Problem, evaluate
from autoshard.solvers import Incumbent, Record, hopeless, level, reduce_and_settle, without_costs
from autoshard.strategies import candidates

CONFLICT_SECONDS = 20.0  # at most, to find one
QUICK_SECONDS = 2.0  # of search, enough where clearly nothing fits; then prices on bytes, which find what only just fits
GRAPH = ("memory_limit", "recompute", "tie_blocks")  # demands that say more than which choices a node has


@dataclass(frozen=True)
class Conflict:
    """Demands that no plan meets together; without any one of them there is a plan, if `minimal`."""

    demands: tuple[Demand, ...]
    minimal: bool


def find_conflict(
    question: Question, instance: Instance, *, seconds: float = CONFLICT_SECONDS, now: Callable[[], float] = time.monotonic
) -> Conflict:
    """A minimal reason why the question has no plan: without any one member of it there is a plan.

    Only to be asked where it is proven that there is no plan; lasts about `seconds` at most, by the time that `now` tells.
    """
    tests = _Tests(question, instance, seconds, now)
    names = list(tests.demands)
    if len(names) == 1:
        return Conflict(tuple(names), True)
    memory = [d for d in names if d.kind == "memory_limit"]
    rest = [d for d in names if d.kind != "memory_limit"]
    if memory and not tests.feasible(rest):  # then memory is not to blame, and every test is much quicker without it
        memory, rest = [], [d for d in rest if d.kind != "recompute"]
    members = {*memory, *_within(tests.feasible, memory, rest, changed=bool(memory))}
    return Conflict(tuple(d for d in names if d in members), not tests.undecided)


def _within(feasible: Callable[[Sequence[Demand]], bool], held: list[Demand], rest: list[Demand], *, changed: bool) -> list[Demand]:
    """A minimal part of `rest` that can't be met together with `held`. changed: `held` alone has not been tested yet."""
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

    def __init__(self, question: Question, instance: Instance, seconds: float, now: Callable[[], float]):
        self.question, self.options, self.now, self.count = question, question.options, now, 0
        self.recomputed = question.all_recomputed() if self.options.memory_limit is not None else None
        of_scheme = [] if instance.scheme is None else [instance.scheme]
        self.free = _Free(instance.formulated, [*demanded(instance.formulated, question.options), *of_scheme])
        self.free_recomputed: _Free | None = None
        self.demands = dict.fromkeys([*self._of_graph(), *self.free.limits])
        self.undecided = 0  # tests for which there was not time enough
        self.deadline = now() + seconds

    def _of_graph(self) -> list[Demand]:
        options = self.options
        demands = [Demand("memory_limit", value=options.memory_limit)] if options.memory_limit is not None else []
        demands += [Demand("recompute", value=options.recompute)] if self.recomputed is not None else []
        return demands + ([Demand("tie_blocks")] if options.tie_blocks else [])

    def feasible(self, demands: Sequence[Demand]) -> bool:
        """Whether there is a plan; also where that is not known."""
        kinds = {d.kind for d in demands}
        layouts = [d for d in demands if d.kind not in GRAPH]
        if kinds <= {"recompute"}:
            return True  # nothing was asked
        refused = all(d in demands or d.kind == "recompute" for d in self.demands)  # known: this is why a conflict is looked for
        if not refused and self._has_answer(self.free, layouts, kinds):
            return True
        if self.recomputed is None or "memory_limit" not in kinds or "recompute" in kinds:
            return False
        if self.free_recomputed is None and self.now() < self.deadline and not self.question.lacks_time_to_formulate():
            mesh = self.question.mesh
            formulated = formulate_for(self.recomputed, candidates(self.recomputed, mesh), mesh, self.options)
            self.free_recomputed = _Free(formulated, demanded(formulated, self.options))
        if self.free_recomputed is None:
            self.undecided += 1
            return True
        return self._has_answer(self.free_recomputed, layouts, kinds)

    def _has_answer(self, free: _Free, layouts: Sequence[Demand], kinds: set[str]) -> bool:
        self.count += 1
        self.question.clock.say(f"looking for what conflicts: {self.count}", 0.9)
        problem = free.under(layouts, self.options.memory_limit if "memory_limit" in kinds else None)
        layers: np.ndarray | None = free.layers
        if "tie_blocks" in kinds:
            problem, layers = tied(problem, tied_groups(free.formulated)), None
        decided = False if hopeless(problem) else self._searched(problem, min(self.deadline, self.now() + QUICK_SECONDS))
        if decided is None and problem.usage_limit is not None:
            low, _, choice = level(problem, self.now, self.deadline, enough=problem.usage_limit, homes=layers)
            fits = choice is not None and evaluate(problem, choice).fits
            decided = True if fits else False if low > problem.usage_limit else None
        if decided is None:
            decided = self._searched(problem, self.deadline)
        self.undecided += decided is None
        return decided is not False

    def _searched(self, problem: Problem, deadline: float) -> bool | None:
        """Whether there is an answer; None where the time was too short."""
        record = Record(problem, deadline, 0.0, self.now, worst=0.0)
        incumbent = Incumbent(problem, record)
        reduce_and_settle(problem, incumbent)
        return True if record.choice is not None else False if incumbent.proven else None


class _Free:
    """A problem whose costs are 0 or inf, and which of its choices each demand leaves."""

    def __init__(self, formulated: Formulation, demands: Sequence[Demanded]):
        self.formulated = replace(formulated, problem=replace(without_costs(formulated.problem), usage_limit=None))
        self.limits: dict[Demand, Mapping[int, np.ndarray]] = {one.demand: one.allowed for one in demands}

    @cached_property
    def layers(self) -> np.ndarray:
        return np.array(layers_of_nodes(self.formulated))

    def under(self, layouts: Sequence[Demand], memory_limit: float | None) -> Problem:
        problem = with_pins(self.formulated, together(Demanded(d, self.limits[d]) for d in layouts))
        return replace(problem, usage_limit=memory_limit) if memory_limit is not None else replace(problem, usages=())
