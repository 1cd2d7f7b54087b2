"""The report of `plan`: the meshes that were compared, the plan, and what each pin costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autoshard.report.text import plan_report
from autoshard.solution import ROUNDING, Solution
from autoshard.units import seconds, size


def planned_report(solution: Solution, meshes: Sequence[Mapping] | None = None) -> RenderableType:
    """The meshes compared (rows of `MeshPlans.to_dicts`), the plan, and the price of its pins where that was asked for."""
    parts: list[RenderableType] = [] if meshes is None else [meshes_table(meshes), Text("")]
    parts.append(plan_report(solution))
    if rows := solution.pin_prices:
        parts += [pins_table(rows, solution.cost), Text("")]
    return Group(*parts)


def meshes_table(rows: Sequence[Mapping]) -> Table:
    """A row per mesh, in the order of planning; the best one in bold."""
    best = next((row["cost_seconds"] for row in rows if row["best"]), None)
    table = Table(title="Meshes compared", title_justify="left", title_style="bold")
    for column in ("mesh", "cost", "to best", "gap", "peak memory", "planned in", "status"):
        table.add_column(column, justify="left" if column in ("mesh", "status") else "right", overflow="fold")
    for row in rows:
        cost, gap = row["cost_seconds"], row["gap"]
        ratio = f"{cost / best:.2f}x" if cost is not None and best else "-"
        shown = "-" if gap is None else f"{gap if gap > ROUNDING else 0:.2g}"
        status = ("proven" if row["status"] == "optimal" and (gap or 0.0) > ROUNDING else row["status"]) + (", best" if row["best"] else "")
        cells = (row["mesh"], seconds(cost), ratio, shown, size(row["peak_bytes"]), seconds(row["cpu_seconds"]), _why(row, status))
        table.add_row(*cells, style="bold" if row["best"] else None)
    return table


def _why(row: Mapping, status: str) -> str:
    """The status, and of a mesh on which nothing fits the limit that would do."""
    limit = row.get("smallest_limit_bytes")
    if row["status"] == "infeasible" and limit:
        return f"infeasible; fits in {size(limit[1])}"
    return f"{status}: {row['message']}" if row.get("message") else status


def pins_table(rows: Sequence[Mapping], cost: float) -> Table:
    """What each pin, forbidden layout, and all kept layouts together cost."""
    table = Table(title="What each pin costs", title_justify="left", title_style="bold")
    for column in ("", "tensor", "layout", "costs", "of the plan"):
        table.add_column(column, justify="right" if column in ("costs", "of the plan") else "left", overflow="fold")
    for row in rows:
        paid = row["costs_seconds"] if row["costs_seconds"] > ROUNDING * cost else 0.0
        about = "" if row["proven"] else "about "
        share = f"{100 * paid / cost:.2g}%" if cost else "-"
        table.add_row(row["kind"], str(row["name"]), row["layout"] or "", about + seconds(paid), share)
    return table
