"""A frontier, memory against seconds, from the record of `Frontier.to_dict`: as a table, as CSV, as a plot with the bounds below it."""

from __future__ import annotations

import csv
import io
import math
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rich.console import RenderableType

from autoshard.mesh import shape_text
from autoshard.report.figures import blank, save, titled
from autoshard.report.terminal import shown
from autoshard.report.values import ReportTable, numbers
from autoshard.units import seconds, size
from autoshard.writing import replacement

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMNS = ("memory_bytes", "seconds", "bound_seconds", "gap", "status")
COLORS = {"optimal": "#2a6f3e", "proven": "#4c78a8", "feasible": "#bab0ac"}
FAR = 1.5  # a device with more than this many times the largest memory is named beside the plot, not drawn
STEPS = 400  # of the bound's line
DIGITS = 5  # points of a frontier differ by little


def bound_at(record: Mapping, limit: float) -> float:
    """Seconds that no plan within `limit` bytes beats; inf where there is none, -inf where nothing is known."""
    bounds = [line["seconds"] - line["seconds_per_byte"] * limit for line in record["bound_lines"]]
    for known in record["bound_limits"]:
        if known["limit_bytes"] is None or known["limit_bytes"] >= limit:
            bounds.append(math.inf if known["seconds"] is None else known["seconds"])
    return max(bounds, default=-math.inf)


def frontier_report(record: Mapping) -> RenderableType:
    """The points as a table, with the CPU seconds of planning."""
    proven = sum(p["status"] != "feasible" for p in record["points"])
    what = "a training step" if record["training"] else "a forward pass"
    points = f"{proven} points proven within {record['gap']:g}, one task after the other"
    head = f"{what} of {record['model']} on {shape_text(record['mesh'])}: {points}"
    planning = f"in {record['planning_seconds']:.1f} CPU seconds; a {record['device']} has {size(record['device_memory_bytes'])}"
    return shown(head, planning, "", points_table(record["points"]))


def points_table(points: Sequence[Mapping]) -> ReportTable:
    """Memory against seconds, and what is proven."""
    fastest, rows = min((p["seconds"] for p in points if p["seconds"] is not None), default=None), []
    for p in points:
        known = fastest and p["seconds"] is not None and p["seconds"] != fastest
        slower = f"{p['seconds'] / fastest - 1:.1%}" if known else "-"
        gap = "-" if p.get("gap") is None else f"{p['gap']:.1e}"
        times = (seconds(p["seconds"], DIGITS), slower, seconds(p["bound_seconds"], DIGITS))
        rows.append((size(p["memory_bytes"], DIGITS), *times, gap, p["status"]))
    columns = (*numbers("memory", "per step", "slower by", "no plan is faster than", "gap"), "status")
    return ReportTable("", columns, rows, "open")


def write_csv(record: Mapping, path: str | os.PathLike[str]) -> None:
    """One line per point, columns as in the record. Whole or not at all."""
    with replacement(path) as beside, beside.open("w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(COLUMNS)
        table.writerows([["" if p[key] is None else p[key] for key in COLUMNS] for p in record["points"]])


def draw(record: Mapping, path: str | os.PathLike[str]) -> None:
    save(plot(record), path, dpi=130, bbox_inches="tight")


def svg(record: Mapping) -> str:
    """The plot as an SVG element, for a page or a notebook."""
    content = io.StringIO()
    plot(record).savefig(content, format="svg", bbox_inches="tight")
    return content.getvalue()[content.getvalue().index("<svg") :]


def plot(record: Mapping) -> Figure:
    """The points, memory (GB) against seconds; below them the bound, and the memory of the device where it is near."""
    points = record["points"]
    figure = blank(8, 5)
    axes = figure.subplots()
    for status, color in COLORS.items():
        some = [p for p in points if p["status"] == status]
        if some:
            label = {"optimal": "best", "proven": f"best within {record['gap']:g}", "feasible": "not proven"}[status]
            axes.plot([p["memory_bytes"] / 1e9 for p in some], [p["seconds"] for p in some], "o", color=color, label=label, zorder=3)
    least, most = points[0]["memory_bytes"], points[-1]["memory_bytes"]
    margin = (most - least) * 0.05 or most * 0.05 or 1.0
    steps = sorted({p["memory_bytes"] for p in points} | {least + (most + margin - least) * k / STEPS for k in range(STEPS + 1)})
    bounds = [bound_at(record, limit) for limit in steps]
    known = [(limit / 1e9, bound) for limit, bound in zip(steps, bounds) if math.isfinite(bound)]
    axes.plot([x for x, _ in known], [y for _, y in known], color="#e15759", linewidth=1, label="no plan is below")
    device = record["device_memory_bytes"]
    told = f"{record['device']}: {size(device)}"
    if least - margin <= device <= FAR * most:
        axes.axvline(device / 1e9, color="#9c9c9c", linestyle="--", linewidth=1, label=told)
    else:
        axes.plot([], [], " ", label=f"{told}, {'beyond the right' if device > most else 'left of all'}")
    axes.set(xlabel="memory per device (GB)", ylabel=f"seconds per {'step' if record['training'] else 'forward pass'}")
    axes.legend(frameon=False, fontsize=8)
    titled(axes, f"{record['model']} on {shape_text(record['mesh'])}: {seconds(points[-1]['seconds'])} at best")
    return figure
