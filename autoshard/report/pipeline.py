"""A pipeline plan as tables (stages, configurations, speed-up), its configurations as CSV, and a plot of the speed-up."""

from __future__ import annotations

import csv
import os
from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autoshard.pipeline import Pipeline
from autoshard.report.figures import blank, save
from autoshard.units import percent, seconds, size
from autoshard.writing import replacement

SHOWN = 12  # configurations in the table
COLUMNS = (
    "way", "data", "tensor", "pipeline", "microbatches", "schedule", "devices", "layers", "recompute", "seconds", "peak_bytes", "bubble",
    "fits", "exact",
)  # fmt: skip


def pipeline_report(pipeline: Pipeline) -> RenderableType:
    """Tables of stages, configurations and speed-ups."""
    groups = len({s.group for s in pipeline.stages})
    head = (
        f"{seconds(pipeline.seconds)} per step ({seconds(pipeline.bound)} if nothing but kernels took time); {groups} device "
        f"group{'s' if groups > 1 else ''}, {pipeline.microbatches} microbatches, {pipeline.schedule}; "
        f"bubble {percent(pipeline.bubble, 1)}, exposed communication {seconds(pipeline.exposed_communication)}, "
        f"{size(pipeline.peak_bytes)} on the fullest device"
    )
    return Group(Text(head), _stages(pipeline), _configurations(pipeline), *_further(pipeline))


def _stages(pipeline: Pipeline) -> Table:
    columns = ("layers", "devices", "mesh", "forward", "backward", "per step", "sends", "peak", "in flight", "recomputed")
    table = Table(*columns, title="stages")
    for s in pipeline.stages:
        ranks = f"{s.devices[0]}-{s.devices[-1]}" if len(s.devices) > 1 else str(s.devices[0])
        table.add_row(
            f"{s.first}-{s.last - 1}", f"{ranks} ({s.device})", "x".join(map(str, s.mesh)), seconds(s.forward_seconds),
            seconds(s.backward_seconds), seconds(s.once_seconds), seconds(s.send_seconds), size(s.peak_bytes), str(s.in_flight),
            "yes" if s.recompute else "no",
        )  # fmt: skip
    return table


def _configurations(pipeline: Pipeline) -> Table:
    shown = pipeline.configurations[:SHOWN]
    table = Table("layouts", "D x H", "P", "microbatches", "schedule", "step", "peak", "bubble", title="configurations, the best first")
    for row in shown:
        grid = f"{row['data']} x {row['tensor']}" if row["data"] else "x".join(map(str, sorted(set(row["devices"])))) + " devices"
        fits = "" if row["fits"] else " (does not fit)"
        table.add_row(
            row["way"], grid, str(row["pipeline"]), str(row["microbatches"]), row["schedule"], seconds(row["seconds"]) + fits,
            size(row["peak_bytes"]), percent(row["bubble"], 1),
        )  # fmt: skip
    if len(pipeline.configurations) > SHOWN:
        table.caption = f"and {len(pipeline.configurations) - SHOWN} more: --csv writes all"
    return table


def _further(pipeline: Pipeline) -> list[RenderableType]:
    parts: list[RenderableType] = []
    if pipeline.speed_up:
        table = Table("devices", "step", "speed-up", title="fewer devices")
        for row in pipeline.speed_up:
            said = f"{row['speed_up']:.2f}" if row["speed_up"] else "-" if row["seconds"] else "does not fit"
            table.add_row(str(row["devices"]), seconds(row["seconds"]), said)
        fewest = next((row["devices"] for row in pipeline.speed_up if row["speed_up"]), 1)
        if fewest > 1:
            table.caption = f"{fewest} devices, the fewest that fit, count as {fewest}"
        parts.append(table)
    if pipeline.budgets:
        table = Table("memory", "step", "stages", "microbatches", "schedule", title="other limits")
        for row in pipeline.budgets:
            cells = [str(row[key] or "-") for key in ("stages", "microbatches", "schedule")]
            table.add_row(size(row["memory_bytes"]), seconds(row["seconds"]) if row["seconds"] else "nothing fits", *cells)
        parts.append(table)
    return parts


def write_csv(rows: Sequence[dict[str, Any]], path: str | os.PathLike[str]) -> None:
    """All configurations, one per line; devices and layers of the stages joined by "+". Written completely or not at all."""
    with replacement(path) as beside, beside.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        for row in rows:
            writer.writerow({key: "+".join(map(str, x)) if isinstance(x := row[key], list) else "" if x is None else x for key in COLUMNS})


def plot_speed_up(pipeline: Pipeline, path: str | os.PathLike[str]) -> None:
    """Speed-up over the number of devices, beside the ideal; the format by the file's ending (png, svg, pdf)."""
    rows = [row for row in pipeline.speed_up if row["speed_up"]]
    figure = blank(5, 4, layout="constrained")
    axes = figure.subplots()
    counts = [row["devices"] for row in rows]
    if rows:
        axes.plot(counts, counts, color="0.7", linestyle="--", label="ideal")
        axes.plot(counts, [row["speed_up"] for row in rows], marker="o", label="pipeline")
        axes.set_xscale("log", base=2)  # which refuses axes without a point
        axes.set_yscale("log", base=2)
        axes.legend()
    else:
        axes.text(0.5, 0.5, "no fewer devices to compare with", ha="center", va="center", transform=axes.transAxes)
    axes.set_xticks(counts, [str(n) for n in counts])
    axes.set_yticks(counts, [str(n) for n in counts])
    axes.set_xlabel("devices")
    axes.set_ylabel("speed-up")
    save(figure, path)
