"""Whether a saved plan is still good for the model as it is now, under today's rules and prices, compared with the best plan now.

    valid    the graph is the one that was planned (fingerprint); every name, shape and layout fits it; memory is under the limit.
             A fingerprint that differs is accepted where names, wiring, shapes of parameters and bytes at the peak are unchanged:
             then the model has other constants, or another version of autoshard writes them differently
    c        = cost(x) of the plan's choice on today's problem; for the objective "overlapped" the seconds of its time line
    V, bound = cost of the best plan now under the plan's own options, and a lower bound on it (`Reopened.best`; bound alone: `certified`)
    ok       = valid and c <= (1 + within) bound

The bound decides, so a plan passes only where this is proven, but for the gap that its own proof left open. With `tie_blocks` the cost of
the best tied plan replaces the bound, since only tied plans were asked for.

Of several programs every one has to be valid, and x, c, V and the limit are those of the joined problem of all of them, per unit. So a loss
that sharing costs is no reason against the plan: the best plan now shares too.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from autoshard.explain.explanations import SECONDS
from autoshard.explain.reopened import Choice, Reopened, captured, options_of, reopened
from autoshard.formulate import Joined, Piece, join
from autoshard.graph import Graph, sizes_of
from autoshard.mesh import Mesh
from autoshard.planning import Infeasible, Instance, ModelGraphs, Question, Stopwatch, fingerprint, overlapped, plan_captured, sub_mesh
from autoshard.problem import Problem, evaluate
from autoshard.simulate import timeline_of
from autoshard.solution import ROUNDING, VERSION, AnyPlan, ProgramsSolution, Replay, Solution, differences, plain
from autoshard.solvers import certified
from autoshard.solvers import solve as solved
from autoshard.units import hundredths, seconds, size


@dataclass(frozen=True)
class Checked:
    """Whether a saved plan is still good, and why not. Seconds, and bytes per device; inf where the plan's cost is unknown."""

    reasons: tuple[str, ...]  # why it isn't good; empty where it is
    notes: tuple[str, ...]  # what has changed since it was made without making it invalid
    cost: float  # on today's graph and prices
    planned_cost: float  # as the plan says
    best: float  # of the best plan now; inf where it was not searched for
    bound: float  # no plan now costs less; 0 where nothing is known
    within: float  # relative, what was asked for
    peak_bytes: float
    memory_limit: float | None

    @property
    def ok(self) -> bool:
        return not self.reasons

    @property
    def excess(self) -> float:
        """How far the plan may be above the best plan now, relative: 0.01 is one percent; inf where nothing is known."""
        if not (self.bound > 0 and math.isfinite(self.cost)):
            return 0.0 if self.cost == self.bound else math.inf
        return max(self.cost / self.bound - 1, 0.0)

    def sentence(self, name: str = "the plan") -> str:
        """The whole answer in one sentence."""
        if self.ok and not self.bound and math.isinf(self.best):
            return f"{name} fits the model; it was planned to take {seconds(self.cost)}, which was not priced again"
        if self.ok:
            near = "and no plan now costs less" if self.excess <= ROUNDING else f"at most {_percent(self.excess)} above the best plan now"
            near = "and no better plan was found now" if math.isinf(self.excess) else near
            return f"{name} is good: it costs {seconds(self.cost)}, {near}"
        return f"{name} is not good any more: {'; '.join(self.reasons)}; plan again"

    def to_dict(self) -> dict:
        """Plain containers; None in place of inf."""
        known = {SECONDS.get(key, key): value for key, value in vars(self).items()}
        return plain({**known, "ok": self.ok, "excess": self.excess}, "check")


@dataclass(frozen=True)
class Inspection:
    """What is asked of a plan (`autoshard.check`), and how the answer follows from its problem of today."""

    plan: AnyPlan
    within: float
    mesh: Mesh | None
    solve: bool
    same_graph: bool
    time_limit: float
    watch: Stopwatch

    def __post_init__(self) -> None:
        if not (math.isfinite(self.within) and self.within >= 0) or not self.time_limit > 0:
            asked = f"within is {self.within} and time_limit is {self.time_limit}"
            raise ValueError(f"{asked}; expected 0 or more (0.05 is five percent), and more than 0 s")

    def answer(
        self, changes: Changes, *more: str, cost: float = math.inf, best: float = math.inf, bound: float = 0.0, peak: float = math.inf
    ) -> Checked:
        """The answer with the reasons that the changes are, and more."""
        same_peak = math.isclose(peak, self.plan.peak_bytes, rel_tol=ROUNDING)
        forgiven = not self.same_graph or (changes.constants_only and same_peak)
        reasons = (*changes.misfits, *(() if forgiven else changes.graph), *more)
        notes = (*(changes.graph if forgiven else ()), *changes.around)
        planned = self.plan.objective_seconds if isinstance(self.plan, Solution) else self.plan.cost
        return Checked(reasons, notes, cost, planned, best, bound, self.within, peak, self.plan.memory_limit)

    def judge(
        self, changes: Changes, problem: Problem, choice: Choice, best_now: Callable[[], tuple[float, float]],
        price: Callable[[], float] | None = None,
    ) -> Checked:  # fmt: skip
        """The answer where the plan fits the graph. best_now: the cost of the best plan now and a lower bound on it; price: that of this
        plan, by default the sum of all seconds."""
        judged = evaluate(problem, choice)
        if not math.isfinite(judged.cost):
            return self.answer(changes, "its layouts, or its own pins, are no longer possible under today's rules")
        if not judged.fits:
            over = f"it takes {size(judged.peak)} per device, over the limit of {size(self.plan.memory_limit)} that it was made under"
            return self.answer(changes, over, cost=judged.cost, peak=judged.peak)
        with self.watch.phase("solve", "planning anew" if self.solve else "looking for a bound", 0.5):
            best, bound = best_now()
        cost = judged.cost if price is None else price()
        checked = self.answer(changes, cost=cost, best=best, bound=bound, peak=judged.peak)
        left_open = self.plan.objective_gap if isinstance(self.plan, Solution) and self.plan.overlapped else 0.0
        most = (1 + self.within) * (1 + ROUNDING)
        if cost <= most * best and (1 - left_open) * cost <= most * bound:
            return checked
        return replace(checked, reasons=(*checked.reasons, self._too_expensive(checked)))

    def _too_expensive(self, checked: Checked) -> str:
        """Why the cost is not shown to be within what was asked for."""
        if checked.cost > (1 + self.within) * checked.best:
            over = _percent(checked.cost / checked.best - 1)
            return f"it costs {seconds(checked.cost)}, {over} more than a plan that there is now ({seconds(checked.best)})"
        longer = f"nothing better was found in {self.time_limit:g} s, so raise the time limit"
        advice = longer if self.solve else "look for the best plan to know"
        far = "nobody knows how far from the best" if math.isinf(checked.excess) else f"at most {_percent(checked.excess)} above the best"
        return f"it costs {seconds(checked.cost)}, {far}, which is not shown to be within {_percent(self.within)}: {advice}"


def check_programs(models: Mapping[str, tuple[nn.Module, Any]], inspection: Inspection) -> Checked:
    """`autoshard.check` of a plan of one program or several. models: model and example inputs by program, of one by the name ""."""
    watch, plan = inspection.watch, inspection.plan
    assert isinstance(plan, (Solution, ProgramsSolution))
    cluster = inspection.mesh or plan.mesh
    changes: dict[str, Changes] = {}
    plans: dict[str, Reopened] = {}
    for k, ((name, _), solution) in enumerate(plan.parts.items()):
        today = _mesh_of(name, plan, cluster)
        with watch.phase("capture", f"capturing {name or 'the model'}", 0.4 * k / len(models)):
            now = captured(*models[name], solution, today)
            changes[name] = changes_since(now, today)
        if not name and changes[name].misfits and changes[name].traced and inspection.solve:
            with watch.phase("solve", "planning anew", 0.5):  # the same model, in the ops of another torch: a plan with the same pins
                again, *reason = _anew(now.graph, solution, today, inspection.time_limit)
            return inspection.answer(changes[name], *reason, best=again)
        if changes[name].misfits:
            return inspection.answer(_together(changes))
        try:
            with watch.phase("formulate", "pricing layouts", 0.4 * (k + 0.5) / len(models)):
                plans[name] = reopened(now.graph, solution, today)
        except ValueError as error:  # a layout or a pin that is not possible any more
            return inspection.answer(_together(changes), _named(name, str(error)))
    if isinstance(plan, Solution):
        one, formulated = plans[""], plans[""].formulated
        price = None if one.options.objective == "serial" else lambda: timeline_of(formulated, one.choice, join=True).seconds
        as_run = formulated.problem_as_run(one.choice, one.problem)
        return inspection.judge(changes[""], as_run, one.choice, lambda: _best(one, inspection.solve, inspection.time_limit), price)
    with watch.phase("formulate", "joining the programs", 0.4):
        try:
            joined = join([_piece(name, plan, one) for name, one in plans.items()], cluster, plan.memory_limit)
        except ValueError as error:
            return inspection.answer(_together(changes), str(error))
    choice = joined.joined_choice({name: one.choice for name, one in plans.items()})
    if apart := [name for name, one in plans.items() if joined.choice_of(name, choice) != tuple(one.choice)]:
        others = f"{apart[0]} has other layouts of the parameters that it shares than {plan.home}"
        return inspection.answer(_together(changes), others)
    return inspection.judge(_together(changes), joined.problem, choice, lambda: _best_together(joined, choice, inspection))


def _together(changes: Mapping[str, Changes]) -> Changes:
    """The changes of all programs, each with the name of its program."""

    def told(kind: str) -> tuple[str, ...]:
        return tuple(_named(name, line) for name, of_one in changes.items() for line in getattr(of_one, kind))

    return Changes(told("misfits"), told("graph"), all(one.constants_only for one in changes.values()), told("around"))


def _named(program: str, line: str) -> str:
    return f"{program}: {line}" if program else line


def _mesh_of(name: str, plan: Solution | ProgramsSolution, cluster: Mesh) -> Mesh:
    """The devices of a program at today's prices; those of the plan where it has a mesh of another form."""
    if isinstance(plan, Solution) or name not in plan.devices:
        return cluster
    try:
        part = sub_mesh(cluster, plan.devices[name])
    except ValueError:  # no block of the mesh: the user gave it a mesh of its own
        return plan[name].mesh
    return part if part.shape == plan[name].mesh.shape else plan[name].mesh


def _piece(name: str, plan: ProgramsSolution, one: Reopened) -> Piece:
    family = plan.families[name]
    devices = tuple(plan.devices.get(name, ()))
    return Piece(
        name, one.formulated, one.problem, plan.weights[name], family, plan.switches.get(family), devices, family in plan.keeps_state
    )  # fmt: skip


@dataclass(frozen=True)
class Changes:
    """What has changed since a plan was made, in words."""

    misfits: tuple[str, ...]
    graph: tuple[str, ...]  # the layouts fit it, but it is not the one that was planned
    constants_only: bool  # names, wiring and the shapes of parameters are unchanged
    around: tuple[str, ...]  # prices and versions
    traced: tuple[str, ...] = ()  # which ops another version of torch has in place of those that were planned


def changes_since(now: Replay, mesh: Mesh) -> Changes:
    """The changes since the plan was made."""
    solution, graph = now.solution, now.graph
    hashes = fingerprint(graph, mesh, options_of(solution))
    of_graph = {key: hashes[key] for key in ("graph", "structure")}
    fatal, sizes = now.misfits, differences(solution, graph, solution.mesh)
    other = tuple(line for line in differences(solution, graph, solution.mesh, fingerprint=of_graph) if line not in fatal)
    versions = {"torch_version": torch.__version__.split("+")[0], "autoshard_version": VERSION}
    since = {**solution.assumptions, **{key: value for key, value in versions.items() if key in solution.assumptions}}
    around = tuple(line for line in differences(solution, graph, mesh, assumptions=since) if line not in (*fatal, *sizes))
    traced = _traced(solution, graph, versions["torch_version"]) if fatal or other else ()
    if not solution.fingerprint.get("graph"):
        around = ("the plan does not say which graph it was made for", *around)
    constants_only = not sizes and solution.fingerprint.get("structure") == hashes["structure"]
    if constants_only and other and (why_not := _beyond_ranges(solution, graph)) is not None:
        around, other = (around, (why_not,)) if why_not else ((*other, *around), ())
    return Changes((*fatal, *(traced if fatal else ())), other, constants_only, (*around, *(() if fatal else traced)), traced)


def _beyond_ranges(solution: Solution, graph: Graph) -> str | None:
    """Why a plan for ranges of sizes doesn't cover those of this graph, "" where it does; None for other plans, and for other dtypes."""
    dynamic, now, planned = solution.dynamic_shapes, graph.parameters, solution.parameters
    if dynamic is None or any(graph.ops[now[name]].output.dtype != row["dtype"] for name, row in planned.items() if name in now):
        return None
    shapes = {name: graph.ops[graph.index[name]].output.shape for name in dynamic.inputs if name in graph.index}
    return dynamic.covers(sizes_of(dynamic.inputs, shapes)).reason


def _traced(solution: Solution, graph: Graph, torch_version: str) -> tuple[str, ...]:
    """One sentence about the kinds of ops of which another version of torch makes more or fewer; none where the version is the same."""
    planned = solution.assumptions.get("torch_version")
    if planned in (None, torch_version):
        return ()
    placeholders = {op.name for op in graph.ops if op.is_placeholder} | set(solution.parameters)
    more = Counter(_kind(op.name) for op in graph.ops if op.name not in placeholders)
    more.subtract(_kind(name) for name in solution.layouts if name not in placeholders)
    listed = [f"{abs(count)} {'more' if count > 0 else 'fewer'} {kind}" for kind, count in sorted(more.items()) if count]
    return (f"torch {planned} traced it then and torch {torch_version} now, with {', '.join(listed)}",) if listed else ()


def _kind(name: str) -> str:
    """`view` of view_12, `view_recomputed` of view_12_recomputed: torch names an op after its operator and counts."""
    return re.sub(r"_\d+(?=_recomputed$|$)", "", name)


def _anew(graph: Graph, solution: Solution, mesh: Mesh, time_limit: float) -> tuple:
    """The cost of the best plan of the graph under the plan's own options and pins; inf, and why, where there is none."""
    try:
        options = replace(options_of(solution), time_limit=time_limit)
        return (plan_captured(Question(ModelGraphs(graph), mesh, options, Stopwatch(None))).objective_seconds,)
    except (ValueError, Infeasible) as error:
        return math.inf, f"and its options allow no plan now: {error}"


def _best(plan: Reopened, solve: bool, time_limit: float) -> tuple[float, float]:
    """The cost of the best plan now (inf where it was not searched for), and a lower bound on it."""
    answer = plan.best(plan.problem, starts=[plan.choice], time_limit=time_limit) if solve else None
    if answer is None:
        answer = certified(plan.problem, plan.choice, messages=plan.messages, time_limit=time_limit)
    cost, bound = answer.cost, answer.bound
    if plan.options.objective == "overlapped":
        formulated, options = plan.formulated, replace(plan.options, time_limit=time_limit)
        question = Question(ModelGraphs(formulated.graph), formulated.mesh, options, Stopwatch(None))
        shortest = overlapped(question, Instance(formulated, plan.problem), answer, [plan.choice])
        cost, bound = shortest.seconds, shortest.bound
    return (cost, cost if plan.options.tie_blocks else bound) if solve else (math.inf, bound)


def _best_together(joined: Joined, choice: Choice, inspection: Inspection) -> tuple[float, float]:
    """As `_best`, of several programs."""
    assert isinstance(inspection.plan, ProgramsSolution)
    if not inspection.solve:
        return math.inf, certified(joined.problem, choice, time_limit=inspection.time_limit).bound
    gap = options_of(inspection.plan[inspection.plan.home]).gap
    limits: dict[str, Any] = {"gap": gap, "time_limit": inspection.time_limit, "preference": joined.preference}
    answer = solved(joined.problem, starts=[choice], **limits).in_passing()
    return answer.cost, answer.bound


def _percent(share: float) -> str:
    return f"{hundredths(share)}%" if share < 1 else f"{share + 1:.3g} times"
