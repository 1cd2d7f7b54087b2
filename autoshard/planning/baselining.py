"""The usual plans (data parallel, FSDP, Megatron) at the same prices: each fixes some layouts, and the solver chooses the others.

A baseline that obeys the pins and the memory limit is also a choice that the search for the best plan can start from.

    regret = cost(scheme) / bound - 1            cost(plan) >= bound for every plan of the same program on the same mesh at the same prices

says how much longer a scheme's step is than any plan's, at most; both of one pass over the inputs and one update, serial, without a memory
limit: a limit can only raise the bound.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from autoshard.baselines import CONTEXT_PARALLEL, SHARDED_MEGATRON, USUAL, ZERO, Baseline, allowed, baselines
from autoshard.baselines import baseline as scheme_called
from autoshard.formulate import Formulation, with_pins
from autoshard.mesh import Mesh
from autoshard.planning.instance import Instance, instance_of
from autoshard.planning.options import Options, Progress, Stopwatch, checked_options
from autoshard.planning.question import Question, ask
from autoshard.planning.recomputing import with_recomputed_blocks
from autoshard.planning.solving import solve_instance
from autoshard.problem import evaluate
from autoshard.simulate import timeline_of
from autoshard.solvers import Answer, Status, solve

BASELINE_SECONDS = 30.0  # at most, each
BASELINE_GAP = 1e-4  # relative
PRICE_SECONDS = 5.0  # at most, of a scheme that is only priced


def solve_baselines(question: Question, instance: Instance) -> tuple[dict[str, dict], list[tuple[int, ...]]]:
    """What each baseline costs, by name, and the choices of those that obey the limit and the pins."""
    formulated, options = instance.formulated, question.options
    rows: dict[str, dict] = {}
    starts = []
    several = options.training and sum(size > 1 for size in formulated.mesh.shape) > 1
    zero = ZERO if options.microbatches > 1 else ("hsdp",) if several else ()
    names = (*USUAL, *((SHARDED_MEGATRON,) if several else ()), *zero, "expert_parallel", *CONTEXT_PARALLEL)
    for baseline in baselines(formulated.graph, formulated.mesh, formulated.candidates, names):
        if question.is_over:
            rows[baseline.name] = {"cost_seconds": None, "peak_bytes": None, "status": "unknown", "matched": baseline.matched}
            continue
        answer = _completed(question, instance, baseline, min(BASELINE_SECONDS, question.seconds_left() / 8))
        rows[baseline.name] = {
            "cost_seconds": answer.cost if answer.choice is not None else None,
            "step_seconds": None if answer.choice is None else step_seconds(formulated, answer.choice),
            "peak_bytes": None if answer.choice is None else formulated.peak(answer.choice),
            "status": answer.status.value,
            "matched": baseline.matched,
        }
        if answer.choice is not None:
            evaluation = evaluate(instance.problem, answer.choice)
            rows[baseline.name]["fits"] = options.memory_limit is None or (answer.peak or 0.0) <= options.memory_limit
            if evaluation.fits and math.isfinite(evaluation.cost):
                starts.append(answer.choice)
    return rows, starts


def step_seconds(formulated: Formulation, choice: Sequence[int]) -> float:
    """Of the simulated time line, in which collectives run beside kernels."""
    return timeline_of(formulated, choice, join=True).seconds


def scheme_price(
    question: Question, instance: Instance, baseline: Baseline, *, seconds: float = PRICE_SECONDS, gap: float = BASELINE_GAP
) -> tuple[float, float] | None:
    """Seconds of a scheme and its peak bytes, without a memory limit; None where its pins forbid each other, or there is no time left."""
    if question.is_over:
        return None
    answer = _completed(question, instance, baseline, seconds, gap)
    return (answer.cost, float(answer.peak or 0.0)) if answer.choice is not None else None


def _completed(question: Question, instance: Instance, baseline: Baseline, seconds: float, gap: float = BASELINE_GAP) -> Answer:
    """The best plan that follows a baseline's pins, without a memory limit; equal pins are completed once."""
    masks = masks_of(instance.formulated, baseline)
    key = (gap, *((node, mask.tobytes()) for node, mask in sorted(masks.items())))
    if key in instance.completed:
        return instance.completed[key]
    pinned = replace(with_pins(instance.formulated, masks), usage_limit=None)
    limits: dict[str, Any] = {"gap": gap, "time_limit": min(seconds, question.seconds_left()), "homes": instance.layers}
    search = solve if instance.few_layers is None else partial(instance.few_layers.solve, preferred=False)
    answer = search(pinned, clock=question.clock.now, **limits).in_passing()
    if answer.status is Status.OPTIMAL:  # more seconds may find a better one otherwise
        instance.completed[key] = answer
    return answer


def masks_of(formulated: Formulation, baseline: Baseline) -> dict[int, np.ndarray]:
    """Which choices a baseline leaves, by node."""
    masks = {node: np.array(mask) for node, mask in allowed(baseline.pins, formulated.graph, formulated.candidates).items()}
    for value, layout in baseline.hubs.items():
        if value in formulated.hubs:
            masks[formulated.hubs[value]] = np.array([one == layout for one in formulated.hub_layouts[value]])
    return masks


@dataclass(frozen=True)
class Regret:
    scheme: str
    cost: float  # seconds: those of a plan of this scheme alone (`baseline_only`, autosharding_pass(algo=scheme))
    bound: float  # seconds
    peak_bytes: float  # of the scheme
    matched: str  # in words, what the scheme recognised in the graph

    @property
    def regret(self) -> float:
        return self.cost / self.bound - 1 if self.bound > 0 else float("inf")


def regret(
    model: torch.nn.Module, example_inputs: Any, mesh: Mesh, scheme: str, *, progress: Progress | None = None, **options: Any
) -> Regret:
    """The cost of a scheme (`baselines.baseline`) and the bound of an unrestricted plan. options: as `plan`; memory limits are left out.

    ValueError where the scheme does not apply, its pins forbid each other, or nothing was proven within the time limit.
    """
    checked = checked_options(Options, {"training": True, **options, "memory_limit": None})
    clock = Stopwatch(progress)
    question = with_recomputed_blocks(ask(model, example_inputs, mesh, checked, clock))
    instance = instance_of(question)
    with clock.phase("solve", "pricing the scheme", 0.5):
        pinned = scheme_called(question.graph, mesh, instance.formulated.candidates, scheme)
        price = scheme_price(question, instance, pinned, seconds=checked.time_limit, gap=0.0)
    if price is None:
        raise ValueError(f"the layouts of {scheme} forbid each other on this mesh ({pinned.matched}); choose another launch")
    with clock.phase("solve", "bounding all plans", 0.6):
        answer = solve_instance(question, instance, [])
    if not 0 < answer.bound < float("inf"):
        raise ValueError(f"no bound was proven in {checked.time_limit:g} s; give the search more time")
    return Regret(scheme, price[0], answer.bound, price[1], pinned.matched)
