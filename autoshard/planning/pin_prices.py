"""What pins cost: the cost of the best plan under all of them, minus the cost of the best plan without one of them."""

from __future__ import annotations

import math
from dataclasses import replace

from autoshard.formulate import with_pins
from autoshard.planning.context import Context, Instance
from autoshard.planning.demands import demanded, together
from autoshard.planning.solving import solve_instance
from autoshard.solvers import Answer, Status


def pin_prices(context: Context, instance: Instance, answer: Answer) -> list[dict]:
    """Rows {kind, name, layout, costs_seconds, proven}; `answer` is the best plan under all pins.

    Kept layouts are priced together, as one row. Where a search was not proven best, the price is that of the best plans known. There is
    no row for what there is no time left for.
    """
    options, formulated = context.options, instance.formulated
    assert answer.choice is not None
    demands = demanded(formulated, options)
    groups = [[one] for one in demands if options.price_pins and one.demand.kind in ("pin", "forbid")]
    groups += [kept] if (kept := [one for one in demands if one.demand.kind == "keep"]) else []
    rows = []
    for k, group in enumerate(groups):
        if context.is_over:
            break
        context.clock.say(f"pricing the pins: {k + 1} of {len(groups)}", 0.98)
        freed = with_pins(formulated, together(one for one in demands if one not in group))
        without = solve_instance(context, replace(instance, problem=freed), [answer.choice]).in_passing()
        first = group[0].demand
        row = {"kind": first.kind, "name": first.name, "layout": first.value}
        if first.kind == "keep":
            row = {"kind": "keep", "name": f"{len(group)} layouts", "layout": None}
        cost = min(without.cost, answer.cost) if math.isfinite(without.cost) else answer.cost
        proven = answer.status is Status.OPTIMAL and without.status is Status.OPTIMAL
        rows.append({**row, "costs_seconds": answer.cost - cost, "proven": proven})
    return rows
