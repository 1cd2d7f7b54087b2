"""How much a plan depends on its prices: the error of each price, and the bandwidths at which the plan stays best."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import RenderableType

from autoshard.report.plan_tables import interval_words, prices_table
from autoshard.report.terminal import shown
from autoshard.report.values import ReportTable, numbers
from autoshard.solution import Solution
from autoshard.units import seconds, size


def prices_report(solution: Solution) -> RenderableType:
    """What the predicted seconds are made of, and between which seconds they are."""
    if solution.interval is None:
        return shown("nothing is known about what this plan's seconds are made of; plan again")
    interval = interval_words(solution, "if every price is off in one direction")
    return shown(prices_table(solution), f"{seconds(solution.cost)}, {interval}")


def robustness_table(record: Mapping) -> RenderableType:
    """Per link the range, then the regret at the bandwidths probed outside it."""
    ranges, regrets = [], []
    for link in record["links"]:
        name, (least, most) = ", ".join(link["axes"]), link["searched"]
        low = f"{size(link['low'])}/s" if link["low"] is not None else f"below {size(least)}/s"
        high = f"{size(link['high'])}/s" if link["high"] is not None else f"above {size(most)}/s"
        ranges.append((name, f"{size(link['bandwidth'])}/s", low, high, seconds(link["seconds"]), "yes" if link["proven"] else "no"))
        for row in link["regret"]:
            lost = f"{100 * row['regret']:.3g}%" if row["regret"] < 1 else f"{row['regret'] + 1:.3g}x"
            regrets.append((name, f"{size(row['bandwidth'])}/s", seconds(row["plan_seconds"]), seconds(row["best_seconds"]), lost))
    slack, times = record["slack"], f"{record['span']:g}"
    best = "best" if slack <= 1e-5 else f"within {100 * slack:.3g}% of the best"
    columns = ("link", *numbers("planned with", "from", "to", "its bytes take"), "proven")
    table = ReportTable(f"Where the plan stays {best}", columns, ranges)
    said = f"searched from 1/{times} to {times} times each bandwidth, one link at a time; {seconds(record['cost_seconds'])} as planned"
    if abs(record["planned_seconds"] / record["cost_seconds"] - 1) > 1e-6:
        said += f", but it says {seconds(record['planned_seconds'])}: model, sizes or rules are not those of then"
    if record["regret"] > max(slack, 1e-5):
        said += f"; a plan {100 * record['regret']:.2g}% faster was found at these very prices: plan again"
    outside = ReportTable("Outside", ("link", *numbers("bandwidth", "this plan", "the best there", "regret")), regrets)
    return shown(table, said, "" if regrets else None, outside if regrets else None)
