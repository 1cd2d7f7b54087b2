"""Why there is no plan, in one sentence."""

from __future__ import annotations

import math

import numpy as np

from autoshard.api.options import Infeasible, Options
from autoshard.formulate import Formulation
from autoshard.problem import Problem
from autoshard.solvers import Answer, Status


def infeasible(formulated: Formulation, problem: Problem, answer: Answer, options: Options) -> Infeasible:
    why = answer.infeasibility
    return Infeasible(why_nothing_fits(formulated, problem, answer, options), None if why is None else why.smallest_limit)


def _size(size: float, *, up: bool = False) -> str:
    """Bytes to read, to a thousandth of the unit; `up`: never less than they are."""
    unit, name = (1e9, "GB") if size >= 1e8 else (1e6, "MB") if size >= 1e5 else (1e3, "kB")
    return f"{math.ceil(size / unit * 1e3) / 1e3 if up else size / unit:.3f} {name}"


def why_nothing_fits(formulated: Formulation, problem: Problem, answer: Answer, options: Options) -> str:
    """One sentence: the limit, the smallest one that would do, and what holds the bytes."""
    if options.memory_limit is None or not math.isfinite(np.sum([np.min(c) for c in problem.node_costs])):
        return "no plan exists under these pins: they forbid each other; take one away"
    limit = _size(options.memory_limit)
    if answer.status is not Status.INFEASIBLE:
        return f"no plan within {limit} per device was found in {options.time_limit:g} s; raise the memory limit or the time limit"
    why = answer.infeasibility
    if why is None:
        return f"no plan fits in {limit} per device; raise the memory limit"
    low, high = why.smallest_limit
    smallest = (
        f"the smallest limit that works is {_size(high, up=True)}"
        if high - low <= 1e-3 * high
        else f"the smallest limit that works is between {_size(low)} and {_size(high, up=True)}"
    )
    holders = ", ".join(f"{problem.names[node]} {_size(held)}" for node, held in why.nodes[:3])
    return f"no plan fits in {limit} per device; {smallest}" + (f" (largest there: {holders})" if holders else "")
