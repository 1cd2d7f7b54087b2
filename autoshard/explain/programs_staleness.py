"""Whether a saved plan of several programs is still good: as for one (staleness.py), for the problem of all programs together.

    valid    every program's graph is the one that was planned, and its layouts fit it; all together are under the memory limit
    c        cost of the plan's choice per unit, on today's joined problem
    ok       valid and c <= (1 + within) bound

So a loss that sharing costs is no reason against the plan: the best plan now shares too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from autoshard.capture import in_turn
from autoshard.explain.reopened import Choice, Reopened, captured, options_of, reopened
from autoshard.explain.staleness import ROUNDING, Changes, Checked, changes_since, check_numbers, too_expensive
from autoshard.formulate import Joined, Piece, join
from autoshard.mesh import Mesh
from autoshard.planning import Progress, Stopwatch, sub_mesh
from autoshard.problem import evaluate
from autoshard.solution import ProgramsSolution
from autoshard.solvers import certified
from autoshard.solvers import solve as solved
from autoshard.units import size


@in_turn
def check_programs(
    models: Mapping[str, tuple[nn.Module, Any]],
    plan: ProgramsSolution,
    *,
    within: float = 0.05,
    mesh: Mesh | None = None,
    solve: bool = True,
    same_graph: bool = True,
    time_limit: float = 600.0,
    progress: Progress | None = None,
) -> Checked:
    """As `check`, for a plan of several programs. Costs are seconds per unit, the peak is the fullest moment of any program.

    models: model and example inputs by program; each shape of a program has its own entry, "train[0]". ValueError where one is missing.
    """
    check_numbers(within, time_limit)
    if missing := [name for name in plan if name not in models]:
        raise ValueError(f"there is no model for program {missing[0]!r}; expected one for each of {', '.join(plan)}")
    watch, options = Stopwatch(progress), options_of(plan[plan.home])
    now = _Now(models, plan, mesh or plan.mesh, watch)

    def answer(*more: str, cost: float = math.inf, best: float = math.inf, bound: float = 0.0, peak: float = math.inf) -> Checked:
        forgiven = not same_graph or now.constants_only(peak)
        reasons = (*now.said("misfits"), *(() if forgiven else now.said("graph")), *more)
        notes = (*(now.said("graph") if forgiven else ()), *now.said("around"))
        return Checked(reasons, notes, cost, plan.cost, best, bound, within, peak, options.memory_limit)

    try:
        joined, choice = now.joined(options.memory_limit)
    except _Misfit as misfit:
        return answer(*misfit.args)
    judged = evaluate(joined.problem, choice)
    if not math.isfinite(judged.cost):
        return answer("its layouts, or its own pins, are no longer possible under today's rules")
    if not judged.fits:
        over = f"it takes {size(judged.peak)} per device, over the limit of {size(options.memory_limit)} that it was made under"
        return answer(over, cost=judged.cost, peak=judged.peak)
    with watch.phase("solve", "planning anew" if solve else "looking for a bound", 0.5):
        best, bound = _best(joined, choice, solve, options.gap, time_limit)
    checked = answer(cost=judged.cost, best=best, bound=bound, peak=judged.peak)
    if judged.cost <= (1 + within) * bound * (1 + ROUNDING):
        return checked
    return answer(too_expensive(checked, solve, time_limit), cost=judged.cost, best=best, bound=bound, peak=judged.peak)


class _Misfit(Exception):
    """The plan doesn't fit its programs any more; says why, or nothing where the changes do."""


@dataclass(eq=False)
class _Now:
    """The programs of a plan as they are now."""

    models: Mapping[str, tuple[nn.Module, Any]]
    plan: ProgramsSolution
    cluster: Mesh
    watch: Stopwatch
    changes: dict[str, Changes] = field(default_factory=dict)

    def said(self, kind: str) -> tuple[str, ...]:
        """The changes of a kind: misfits, graph, around."""
        return tuple(f"{name}: {line}" for name, of_one in self.changes.items() for line in getattr(of_one, kind))

    def constants_only(self, peak: float) -> bool:
        return all(one.constants_only for one in self.changes.values()) and math.isclose(peak, self.plan.peak_bytes, rel_tol=ROUNDING)

    def joined(self, memory_limit: float | None) -> tuple[Joined, Choice]:
        """Today's problem of all programs, and the plan's choice in it. _Misfit where that can't be."""
        plans = {name: self._reopened(name, k / len(self.models)) for k, name in enumerate(self.plan)}
        with self.watch.phase("formulate", "joining the programs", 0.4):
            try:
                joined = join([_piece(name, self.plan, one) for name, one in plans.items()], self.cluster, memory_limit)
            except ValueError as error:
                raise _Misfit(str(error)) from None
        choice = joined.joined_choice({name: one.choice for name, one in plans.items()})
        if apart := [name for name, one in plans.items() if joined.choice_of(name, choice) != tuple(one.choice)]:
            raise _Misfit(f"{apart[0]} has other layouts of the parameters that it shares than {self.plan.home}")
        return joined, choice

    def _reopened(self, name: str, done: float) -> Reopened:
        today = _mesh_of(name, self.plan, self.cluster)
        with self.watch.phase("capture", f"capturing {name}", 0.4 * done):
            now = captured(*self.models[name], self.plan[name], today)
            self.changes[name] = changes_since(now, today)
        if self.changes[name].misfits:
            raise _Misfit
        try:
            return reopened(now.graph, self.plan[name], today)
        except ValueError as error:  # a layout or a pin that is not possible any more
            raise _Misfit(f"{name}: {error}") from None


def _mesh_of(name: str, plan: ProgramsSolution, cluster: Mesh) -> Mesh:
    """The devices of a program at today's prices; those of the plan where it has a mesh of another form."""
    if name not in plan.devices:
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


def _best(joined: Joined, choice: Choice, solve: bool, gap: float, time_limit: float) -> tuple[float, float]:
    """The cost of the best plan now (inf where it was not searched for), and a lower bound on it."""
    if not solve:
        return math.inf, certified(joined.problem, choice, time_limit=time_limit).bound
    answer = solved(joined.problem, starts=[choice], gap=gap, time_limit=time_limit, preference=joined.preference).in_passing()
    return answer.cost, answer.bound
