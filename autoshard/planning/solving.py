"""Runs the search: which solver gets an instance, with which limits, and what is reported to the user while it runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from autoshard.planning.context import Context, Instance
from autoshard.planning.options import Stopwatch
from autoshard.planning.refusal import patience
from autoshard.planning.tying import solve_tied
from autoshard.solvers import Answer, solve


def solve_instance(
    context: Context, instance: Instance, starts: Sequence[tuple[int, ...]], prices: Mapping[int, float] | None = None, *,
    preferred: bool = True,
) -> Answer:  # fmt: skip
    """The best answer in the time that is left, with its bound.

    starts: choices that the search may begin with; prices: as for `solve`; preferred: by a fixed order among answers of equal cost.
    """
    options, problem = context.options, instance.problem
    limits: dict[str, Any] = {"time_limit": context.seconds_left(), "clock": context.clock.now, "gap": options.gap}
    limits["progress"] = _progress(context.clock, options.gap)
    limits["preference"] = instance.formulated.preference if preferred else None
    if options.tie_blocks:
        return solve_tied(instance.formulated, problem, solver=options.solver, **limits)
    limits |= {"patience": patience(options, context.seconds_left()), "homes": instance.homes}
    limits |= {"accepted": options.accepted, "prices": prices, "explains": context.explains}
    if instance.shallow is not None:
        return instance.shallow.solve(problem, starts=starts, preferred=preferred, **limits)
    return solve(problem, solver=options.solver, starts=starts, **limits)


def _progress(clock: Stopwatch, wanted: float) -> Callable[[float, float], None] | None:
    if clock.progress is None:
        return None

    def show(cost: float, bound: float) -> None:
        gap = (cost - bound) / cost if cost and math.isfinite(cost) and math.isfinite(bound) else math.inf
        if math.isfinite(gap):
            clock.say(f"solving: best {cost * 1e3:.3f} ms, proven within {gap:.2%} of the best, wanted {wanted:.2%}", 0.6)
        else:
            clock.say("solving: " + ("no plan yet" if math.isinf(cost) else f"best {cost * 1e3:.3f} ms, no bound yet"), 0.6)

    return show
