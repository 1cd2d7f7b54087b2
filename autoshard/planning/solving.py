"""Runs the search: which solver gets an instance, with which limits, and what is reported to the user while it runs."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from autoshard.planning.instance import Instance
from autoshard.planning.options import Stopwatch
from autoshard.planning.question import Question
from autoshard.planning.refusal import infeasible, patience
from autoshard.planning.tying import solve_tied
from autoshard.solvers import Answer, Status, relative_gap, solve


def solve_or_refuse(question: Question, instance: Instance, starts: Sequence[tuple[int, ...]], *, share: float = 1.0) -> Answer:
    """`solve_instance` in a share of the time that is left. `Infeasible` without an answer, KeyboardInterrupt if Ctrl-C is why."""
    answer = solve_instance(question.within(share), instance, starts)
    if answer.choice is not None:
        return answer
    if answer.status is not Status.INFEASIBLE:
        answer.in_passing()
    raise infeasible(question, instance, answer)


def solve_instance(
    question: Question, instance: Instance, starts: Sequence[tuple[int, ...]], prices: Mapping[int, float] | None = None, *,
    preferred: bool = True,
) -> Answer:  # fmt: skip
    """The best answer in the time that is left, with its bound.

    starts: choices that the search may begin with; prices: as for `solve`; preferred: by a fixed order among answers of equal cost,
    unless the search starts from near plans, which it keeps where they are among the best.
    """
    options, problem = question.options, instance.problem
    limits: dict[str, Any] = {"time_limit": question.seconds_left(), "clock": question.clock.now, "gap": options.gap}
    limits["progress"] = _progress(question.clock, options.gap)
    limits["preference"] = instance.formulated.preference if preferred and not question.known else None
    if options.tie_blocks:
        return solve_tied(instance.formulated, problem, solver=options.solver, **limits)
    limits |= {"patience": patience(question, question.seconds_left()), "homes": instance.layers}
    limits |= {"accepted": options.accepted, "prices": prices, "explains": question.explains}
    if instance.few_layers is not None:
        return instance.few_layers.solve(problem, solver=options.solver, starts=starts, preferred=preferred, **limits)
    return solve(problem, solver=options.solver, starts=starts, **limits)


def _progress(clock: Stopwatch, wanted: float) -> Callable[[float, float], None] | None:
    if clock.progress is None:
        return None

    def show(cost: float, bound: float) -> None:
        if math.isfinite(gap := relative_gap(cost, bound)):
            clock.say(f"solving: best {cost * 1e3:.3f} ms, proven within {gap:.2%} of the best, wanted {wanted:.2%}", 0.6)
        else:
            clock.say("solving: " + ("no plan yet" if math.isinf(cost) else f"best {cost * 1e3:.3f} ms, no bound yet"), 0.6)

    return show
