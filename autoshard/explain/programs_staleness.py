"""Whether a saved plan of several programs is still good: as for one (staleness.py), for the problem of all programs together.

    valid    every program's graph is the one that was planned, and its layouts fit it; all together are under the memory limit
    c        cost of the plan's choice per unit, on today's joined problem
    ok       valid and c <= (1 + within) bound

So a loss that sharing costs is no reason against the plan: the best plan now shares too.
"""

import math
from collections.abc import Mapping
from typing import Any

from torch import nn

from autoshard.explain.reopened import Choice, Reopened, captured, options_of, reopened
from autoshard.explain.staleness import Changes, Checked, Inspection, changes_since
from autoshard.formulate import Joined, Piece, join
from autoshard.mesh import Mesh
from autoshard.planning import sub_mesh
from autoshard.solution import ProgramsSolution
from autoshard.solvers import certified
from autoshard.solvers import solve as solved


def check_programs(models: Mapping[str, tuple[nn.Module, Any]], plan: ProgramsSolution, inspection: Inspection) -> Checked:
    """`autoshard.check` of a plan of several programs. models: model and example inputs by program."""
    watch, solve, time_limit = inspection.watch, inspection.solve, inspection.time_limit
    cluster = inspection.mesh or plan.mesh
    changes: dict[str, Changes] = {}
    plans: dict[str, Reopened] = {}
    for k, name in enumerate(plan):
        today = _mesh_of(name, plan, cluster)
        with watch.phase("capture", f"capturing {name}", 0.4 * k / len(models)):
            now = captured(*models[name], plan[name], today)
            changes[name] = changes_since(now, today)
        if changes[name].misfits:
            return inspection.answer(_together(changes))
        try:
            plans[name] = reopened(now.graph, plan[name], today)
        except ValueError as error:  # a layout or a pin that is not possible any more
            return inspection.answer(_together(changes), f"{name}: {error}")
    with watch.phase("formulate", "joining the programs", 0.4):
        try:
            joined = join([_piece(name, plan, one) for name, one in plans.items()], cluster, plan.memory_limit)
        except ValueError as error:
            return inspection.answer(_together(changes), str(error))
    choice = joined.joined_choice({name: one.choice for name, one in plans.items()})
    if apart := [name for name, one in plans.items() if joined.choice_of(name, choice) != tuple(one.choice)]:
        others = f"{apart[0]} has other layouts of the parameters that it shares than {plan.home}"
        return inspection.answer(_together(changes), others)
    gap = options_of(plan[plan.home]).gap
    return inspection.judge(_together(changes), joined.problem, choice, lambda: _best(joined, choice, solve, gap, time_limit))


def _together(changes: Mapping[str, Changes]) -> Changes:
    """The changes of all programs, each with the name of its program."""

    def told(kind: str) -> tuple[str, ...]:
        return tuple(f"{name}: {line}" for name, of_one in changes.items() for line in getattr(of_one, kind))

    return Changes(told("misfits"), told("graph"), all(one.constants_only for one in changes.values()), told("around"))


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
