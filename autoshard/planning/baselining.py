"""The usual plans (data parallel, FSDP, Megatron) at the same prices: each fixes some layouts, and the solver chooses the others.

A baseline that obeys the pins and the memory limit is also a choice that the search for the best plan can start from.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from autoshard.baselines import CONTEXT_PARALLEL, USUAL, ZERO, Baseline, allowed, baselines
from autoshard.formulate import Formulation, with_pins
from autoshard.planning.context import Context, Instance
from autoshard.problem import evaluate
from autoshard.solvers import Answer, Status, solve

BASELINE_SECONDS = 30.0  # at most, each
BASELINE_GAP = 1e-4  # relative
PRICE_SECONDS = 5.0  # at most, of a scheme that is only priced


def solve_baselines(context: Context, instance: Instance) -> tuple[dict[str, dict], list[tuple[int, ...]]]:
    """What each baseline costs, by name, and the choices of those that obey the limit and the pins."""
    formulated, options = instance.formulated, context.options
    rows: dict[str, dict] = {}
    starts = []
    names = (*USUAL, "expert_parallel", *(ZERO if options.microbatches > 1 else ()), *CONTEXT_PARALLEL)
    for baseline in baselines(formulated.graph, formulated.mesh, formulated.candidates, names):
        if context.is_over:
            rows[baseline.name] = {"cost_seconds": None, "peak_bytes": None, "status": "unknown", "matched": baseline.matched}
            continue
        answer = _completed(context, instance, baseline, min(BASELINE_SECONDS, context.seconds_left() / 8))
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


def scheme_price(
    context: Context, instance: Instance, baseline: Baseline, *, seconds: float = PRICE_SECONDS, gap: float = BASELINE_GAP
) -> tuple[float, float] | None:
    """Seconds of a scheme and its peak bytes, without a memory limit; None where its pins forbid each other, or there is no time left."""
    if context.is_over:
        return None
    answer = _completed(context, instance, baseline, seconds, gap)
    return (answer.cost, float(answer.peak or 0.0)) if answer.choice is not None else None


def _completed(context: Context, instance: Instance, baseline: Baseline, seconds: float, gap: float = BASELINE_GAP) -> Answer:
    """The best plan that follows a baseline's pins, without a memory limit; equal pins are completed once."""
    masks = masks_of(instance.formulated, baseline)
    key = (gap, *((node, mask.tobytes()) for node, mask in sorted(masks.items())))
    if key not in instance.completed:
        answer = _solved(context, instance, masks, seconds, gap)
        if answer.status is not Status.OPTIMAL:  # more seconds may find a better one
            return answer
        instance.completed[key] = answer
    return instance.completed[key]


def _solved(context: Context, instance: Instance, masks: Mapping[int, np.ndarray], seconds: float, gap: float) -> Answer:
    """The best plan of choices that the masks leave, without a memory limit."""
    pinned = replace(with_pins(instance.formulated, masks), usage_limit=None)
    limits: dict[str, Any] = {"gap": gap, "time_limit": min(seconds, context.seconds_left()), "homes": instance.homes}
    limits["clock"] = context.clock.now
    if instance.shallow is None:
        return solve(pinned, **limits).in_passing()
    return instance.shallow.solve(pinned, preferred=False, **limits).in_passing()


def masks_of(formulated: Formulation, baseline: Baseline) -> dict[int, np.ndarray]:
    """Which choices a baseline leaves, by node."""
    masks = {node: np.array(mask) for node, mask in allowed(baseline.pins, formulated.graph, formulated.candidates).items()}
    for value, layout in baseline.hubs.items():
        if value in formulated.hubs:
            masks[formulated.hubs[value]] = np.array([one == layout for one in formulated.hub_layouts[value]])
    return masks
