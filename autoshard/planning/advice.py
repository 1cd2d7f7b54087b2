"""What is worked out beside a plan: a table of advice, in the order in which it is given.

Each row says when it is wanted, and adds its part to the plan. Ctrl-C leaves out the rest, and so does the time limit.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from autoshard.cycles import no_search_for_cycles
from autoshard.formulate import with_pins
from autoshard.planning.demands import demanded, together
from autoshard.planning.module_schemes import modules_of
from autoshard.planning.padding import padding_offers
from autoshard.planning.question import Question
from autoshard.planning.solving import solve_instance
from autoshard.planning.variants import Answered
from autoshard.solution import Solution
from autoshard.solvers import Status
from autoshard.units import seconds

KNOWN = "found a plan"  # what is said then; the command line keeps it on the screen


@dataclass(frozen=True)
class Advice:
    """One kind of advice. Prices of pins and offers of padding are differences of costs, those of the serial answer."""

    phase: str  # of the clock
    message: str
    fraction: float
    is_wanted: Callable[[Question], bool]
    add: Callable[[Answered, Solution], Solution]


def with_modules(answered: Answered, solution: Solution) -> Solution:
    """The plan with what launchers that know modules only can be told."""
    with no_search_for_cycles():
        return replace(solution, modules=modules_of(answered.question, answered.instance, answered.choice))


def pin_prices(answered: Answered) -> list[dict]:
    """Rows {kind, name, layout, costs_seconds, proven}: the cost of the best plan under all pins, less that without one of them.

    Kept layouts are priced together, as one row. Where a search was not proven best, the price is that of the best plans known. There is
    no row for what there is no time left for.
    """
    question, options, answer, formulated = answered.question, answered.question.options, answered.answer, answered.instance.formulated
    assert answer.choice is not None
    demands = demanded(formulated, options)
    groups = [[one] for one in demands if options.price_pins and one.demand.kind in ("pin", "forbid")]
    groups += [kept] if (kept := [one for one in demands if one.demand.kind == "keep"]) else []
    rows = []
    for k, group in enumerate(groups):
        if question.is_over:
            break
        question.clock.say(f"pricing the pins: {k + 1} of {len(groups)}", 0.98)
        freed = with_pins(formulated, together(one for one in demands if one not in group))
        quiet, instance = replace(question, clock=question.clock.quiet()), replace(answered.instance, problem=freed)
        without = solve_instance(quiet, instance, [answer.choice]).in_passing()
        first = group[0].demand
        row = {"kind": first.kind, "name": first.name, "layout": first.value}
        if first.kind == "keep":
            row = {"kind": "keep", "name": f"{len(group)} layouts", "layout": None}
        cost = min(without.cost, answer.cost) if math.isfinite(without.cost) else answer.cost
        proven = answer.status is Status.OPTIMAL and without.status is Status.OPTIMAL
        rows.append({**row, "costs_seconds": answer.cost - cost, "proven": proven})
    return rows


def _wants_padding(question: Question) -> bool:
    return question.options.baselines and not question.options.recompute and not question.lacks_time_to_formulate()


def _wants_pin_prices(question: Question) -> bool:
    options = question.options
    return bool(options.keep or (options.price_pins and (options.pins or options.forbid)))


def _with_padding(answered: Answered, solution: Solution) -> Solution:
    offers = padding_offers(answered.question, answered.instance.formulated, answered.answer.cost)
    return solution.noting(padding=offers) if offers else solution


ADVICE = (
    Advice("describe", "pricing schemes of modules", 0.96, lambda question: question.options.baselines, with_modules),
    Advice("padding", "pricing padded parameters", 0.97, _wants_padding, _with_padding),
    Advice("pins", "pricing the pins", 0.98, _wants_pin_prices, lambda answered, plan: plan.noting(pin_prices=pin_prices(answered))),
)


def advised(answered: Answered, solution: Solution, advice: Sequence[Advice]) -> Solution:
    """The plan with the advice that is wanted, after it was announced as it is."""
    question, clock = answered.question, answered.question.clock
    if question.options.baselines or question.options.keep or question.options.price_pins:
        gap = f"within {solution.objective_gap:.2%} of the best" if solution.objective_gap < 1 else "with no useful bound"
        clock.say(f"{KNOWN} of {seconds(solution.objective_seconds)}{', overlapped' if solution.overlapped else ''}, {gap}", 0.95)
        if question.on_plan is not None:
            question.on_plan(replace(solution, seconds=clock.seconds()))
    try:
        for row in advice:
            if row.is_wanted(question):
                with clock.phase(row.phase, row.message, row.fraction):
                    solution = row.add(answered, solution)
    except KeyboardInterrupt:  # the plan is known already
        pass
    return solution
