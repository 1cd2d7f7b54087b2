"""The usual plans at the same prices: each baseline fixes some layouts, and the solver completes them.

A baseline that obeys the pins and the memory limit is also a choice that the search for the best plan can start from.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from autoshard.baselines import Baseline, allowed, baselines
from autoshard.formulate import Formulation, with_pins
from autoshard.planning.context import Context, Instance
from autoshard.problem import Problem, evaluate
from autoshard.solvers import Answer, solve

BASELINE_SECONDS = 30.0  # at most, each
BASELINE_GAP = 1e-4  # relative
PRICE_SECONDS = 5.0  # at most, of a scheme that is only priced


def solve_baselines(context: Context, instance: Instance) -> tuple[dict[str, dict], list[tuple[int, ...]]]:
    """What each baseline costs, by name, and the choices of those that obey the limit and the pins."""
    formulated, options = instance.formulated, context.options
    rows: dict[str, dict] = {}
    starts = []
    for baseline in baselines(formulated.graph, formulated.mesh, formulated.candidates):
        left = options.time_limit - context.clock.elapsed
        if left <= 0:
            rows[baseline.name] = {"cost_seconds": None, "peak_bytes": None, "status": "unknown", "matched": baseline.matched}
            continue
        answer = _completed(instance, baseline, min(BASELINE_SECONDS, left / 8))
        rows[baseline.name] = {
            "cost_seconds": answer.cost if answer.choice is not None else None,
            "peak_bytes": answer.peak,
            "status": answer.status.value,
            "matched": baseline.matched,
        }
        if answer.choice is not None:
            evaluation = evaluate(instance.problem, answer.choice)
            rows[baseline.name]["fits"] = options.memory_limit is None or (answer.peak or 0.0) <= options.memory_limit
            if evaluation.fits and math.isfinite(evaluation.cost):
                starts.append(answer.choice)
    return rows, starts


def scheme_price(instance: Instance, baseline: Baseline) -> tuple[float, float] | None:
    """Seconds of a scheme and its peak bytes, without a memory limit; None where its pins forbid each other."""
    answer = _completed(instance, baseline, PRICE_SECONDS)
    return (answer.cost, float(answer.peak or 0.0)) if answer.choice is not None else None


def _completed(instance: Instance, baseline: Baseline, seconds: float) -> Answer:
    """The best plan that follows a baseline's pins, without a memory limit."""
    pinned = replace(pinned_to(instance.formulated, baseline), usage_limit=None)
    limits: dict[str, Any] = {"gap": BASELINE_GAP, "time_limit": seconds, "homes": instance.homes}
    if instance.shallow is None:
        return solve(pinned, **limits).in_passing()
    return instance.shallow.solve(pinned, preferred=False, **limits).in_passing()


def pinned_to(formulated: Formulation, baseline: Baseline) -> Problem:
    """The problem with a baseline's pins alone."""
    return with_pins(formulated, allowed(baseline.pins, formulated.graph, formulated.candidates))
