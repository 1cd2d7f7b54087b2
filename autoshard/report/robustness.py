"""How much a plan depends on its prices, as tables: the error of each price, and the bandwidths at which the plan stays best."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autoshard.report.text import sure
from autoshard.solution import Solution, parts, price_errors
from autoshard.units import percent, seconds, size


def price_parts(solution: Solution) -> list[dict]:
    """Plain rows: what, seconds, error (relative), measured (or the error usual for prices of its kind)."""
    return parts(solution.breakdown, solution.prices or price_errors(solution.mesh))


def prices_table(solution: Solution) -> RenderableType:
    """What the predicted seconds are made of, and how far each price may be off."""
    table = Table(title="Prices", title_justify="left", title_style="bold")
    for column in ("what", "time", "share", "error", "known from"):
        table.add_column(column, justify="left" if column in ("what", "known from") else "right", overflow="fold")
    rows = sorted(price_parts(solution), key=lambda row: -row["seconds"])
    total = sum(row["seconds"] for row in rows)
    for row in rows:
        known = "measured, on sizes not fitted to" if row["measured"] else "usual where nothing was measured"
        share, error = percent(row["seconds"], total), f"{100 * row['error']:.0f}%"
        table.add_row(row["what"], seconds(row["seconds"]), share, error, known)
    if solution.interval is None:
        return Text("nothing is known about what this plan's seconds are made of; plan again")
    low, high = solution.interval
    said = sure(solution, "if every price is off in one direction")
    said = f"{seconds(solution.cost)}, between {seconds(low)} and {seconds(high)}, {said}"
    return Group(table, Text(said))


def robustness_table(record: Mapping) -> RenderableType:
    """Per link the range, then the regret at the bandwidths probed outside it."""
    slack = record["slack"]
    best = "best" if slack <= 1e-5 else f"within {100 * slack:.3g}% of the best"
    table = Table(title=f"Where the plan stays {best}", title_justify="left", title_style="bold")
    for column in ("link", "planned with", "from", "to", "its bytes take", "proven"):
        table.add_column(column, justify="left" if column in ("link", "proven") else "right", overflow="fold")
    regrets = Table(title="Outside", title_justify="left", title_style="bold")
    for column in ("link", "bandwidth", "this plan", "the best there", "regret"):
        regrets.add_column(column, justify="left" if column == "link" else "right", overflow="fold")
    for link in record["links"]:
        name, (least, most) = ", ".join(link["axes"]), link["searched"]
        low = f"{size(link['low'])}/s" if link["low"] is not None else f"below {size(least)}/s"
        high = f"{size(link['high'])}/s" if link["high"] is not None else f"above {size(most)}/s"
        table.add_row(name, f"{size(link['bandwidth'])}/s", low, high, seconds(link["seconds"]), "yes" if link["proven"] else "no")
        for row in link["regret"]:
            lost = f"{100 * row['regret']:.3g}%" if row["regret"] < 1 else f"{row['regret'] + 1:.3g}x"
            cells = (f"{size(row['bandwidth'])}/s", seconds(row["plan_seconds"]), seconds(row["best_seconds"]), lost)
            regrets.add_row(name, *cells)
    times = f"{record['span']:g}"
    said = f"searched from 1/{times} to {times} times each bandwidth, one link at a time; {seconds(record['cost_seconds'])} as planned"
    if abs(record["planned_seconds"] / record["cost_seconds"] - 1) > 1e-6:
        said += f", but it says {seconds(record['planned_seconds'])}: model, sizes or rules are not those of then"
    if record["regret"] > max(slack, 1e-5):
        said += f"; a plan {100 * record['regret']:.2g}% faster was record at these very prices: plan again"
    outside: list[RenderableType] = [Text(""), regrets] if regrets.row_count else []
    return Group(table, Text(said), *outside)
