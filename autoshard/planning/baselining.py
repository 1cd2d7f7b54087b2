"""The usual plans under the same prices: each baseline's pins completed by the solver."""

from __future__ import annotations

import math
import time
from dataclasses import replace

from autoshard.baselines import Baseline, allowed, baselines
from autoshard.formulate import Formulation, with_pins
from autoshard.planning.options import Options, Stopwatch
from autoshard.planning.shallow import Shallow
from autoshard.problem import Problem, evaluate
from autoshard.solvers import Answer, solve

BASELINE_SECONDS = 30.0  # at most, each
PRICE_SECONDS = 5.0  # at most, of a scheme that is only priced


def solve_baselines(
    formulated: Formulation, problem: Problem, options: Options, watch: Stopwatch, judged: dict[str, dict], shallow: Shallow | None = None
) -> list[tuple[int, ...]]:
    """Completes each baseline's pins with the solver; returns those that obey the limit and the pins, as starts."""
    starts = []
    for baseline in baselines(formulated.graph, formulated.mesh, formulated.candidates):
        left = options.time_limit - (time.monotonic() - watch.began)
        if left <= 0:
            judged[baseline.name] = {"cost_seconds": None, "peak_bytes": None, "status": "unknown", "matched": baseline.matched}
            continue
        answer = _completed(formulated, baseline, shallow, min(BASELINE_SECONDS, left / 8))
        judged[baseline.name] = {
            "cost_seconds": answer.cost if answer.choice is not None else None,
            "peak_bytes": answer.peak,
            "status": answer.status.value,
            "matched": baseline.matched,
        }
        if answer.choice is not None:
            seen = evaluate(problem, answer.choice)
            judged[baseline.name]["fits"] = options.memory_limit is None or (answer.peak or 0.0) <= options.memory_limit
            if seen.fits and math.isfinite(seen.cost):
                starts.append(answer.choice)
    return starts


def _completed(formulated: Formulation, baseline: Baseline, shallow: Shallow | None, seconds: float) -> Answer:
    """The best plan within a baseline's pins, memory aside."""
    pinned = replace(pinned_to(formulated, baseline), usage_limit=None)
    answer = solve(pinned, time_limit=seconds) if shallow is None else shallow.solve(pinned, preferred=False, time_limit=seconds)
    return answer.in_passing()


def scheme_price(formulated: Formulation, shallow: Shallow | None, baseline: Baseline) -> tuple[float, float] | None:
    """Seconds of a scheme and its peak bytes, not limited; None where its pins forbid each other."""
    answer = _completed(formulated, baseline, shallow, PRICE_SECONDS)
    return (answer.cost, float(answer.peak or 0.0)) if answer.choice is not None else None


def pinned_to(formulated: Formulation, baseline: Baseline) -> Problem:
    return with_pins(formulated, allowed(baseline.pins, formulated.graph, formulated.candidates))
