"""The problem that a saved plan solves, and the numbers that prove how good the plan is; others can check both without autoshard."""

import json
import os
from typing import Any

from autoshard.capture import in_turn
from autoshard.explain.reopened import Reopened, captured, reopened
from autoshard.problem import Problem, contest_record
from autoshard.solution import Solution
from autoshard.solvers import certificate, to_record, write_program
from autoshard.writing import replacement, write_atomically

ENDINGS = (".mps", ".lp", ".json")


@in_turn
def problem_of(model: Any, example_inputs: Any, solution: Solution) -> Problem:
    """The problem in numbers of a plan of this model: seconds per choice and pair of choices, bytes over time, the memory limit.

    model: a module, or the graph that was planned. Choices that pins and forbidden layouts exclude cost inf. ValueError where the plan is
    of another model.
    """
    return _plan(model, example_inputs, solution).problem


@in_turn
def certificate_of(model: Any, example_inputs: Any, solution: Solution) -> dict[str, Any]:
    """The numbers that prove a plan's cost and a bound on all plans, which `autoshard/certify.py` checks with numpy alone.

    Both are of the sum of all seconds (`solution.cost`); the seconds of the simulated time line, and their bound, need the simulator. The
    bound is what duality proves: `claims["bound"]` is below `solution.bound` where the search has branched.
    """
    plan = _plan(model, example_inputs, solution)
    return to_record(plan.problem, certificate(plan.problem, plan.choice))


def _plan(model: Any, example_inputs: Any, solution: Solution) -> Reopened:
    return reopened(captured(model, example_inputs, solution).checked(), solution)


def write_problem(problem: Problem, path: str | os.PathLike[str]) -> None:
    """Writes a problem for another solver: `.mps` or `.lp`, by HiGHS, costs in nanoseconds; `.json`, the format of `autoshard solve`."""
    ending = os.path.splitext(path)[1]
    if ending not in ENDINGS:
        raise ValueError(f"{path} ends in {ending or 'nothing'}; a problem is written to {', '.join(ENDINGS)}")
    if ending == ".json":
        write_atomically(json.dumps(contest_record(problem), allow_nan=False) + "\n", path)
        return
    with replacement(path) as temporary:
        write_program(problem, os.fspath(temporary))
