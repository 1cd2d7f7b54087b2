"""A pipeline plan: tables of stages, configurations and speed-up, its page, its configurations as CSV, and a plot of the speed-up.

The time line of the page is drawn from the seconds of the stages that the file holds, by the rules of `pipeline.schedule_times`. A
zero-bubble schedule splits the backward pass, whose halves the file doesn't hold: there it takes half for the weight gradients.
"""

import csv
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import RenderableType

from autoshard.mesh import shape_text
from autoshard.pipeline import ScheduleRun, backend_of, run, schedule_of_plan
from autoshard.report.charts import UNITS, lanes
from autoshard.report.figures import blank, save
from autoshard.report.terminal import shown
from autoshard.report.values import ReportTable, numbers
from autoshard.solution import Pipeline
from autoshard.units import percent, seconds, size
from autoshard.writing import replacement

SHOWN, MOST_ON_PAGE = 12, 20  # configurations
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
    more = len(pipeline.configurations) - SHOWN
    unlisted = f"and {more} more: --csv writes all" if more > 0 else None
    table = configurations_table(pipeline.configurations[:SHOWN])
    return shown(head, stages_table(pipeline), table, unlisted, *_further(pipeline))


def stages_table(pipeline: Pipeline) -> ReportTable:
    """Seconds of a microbatch (per step: those that come once), bytes of a device."""
    rows = []
    for s in pipeline.stages:
        ranks = f"{s.devices[0]}-{s.devices[-1]}" if len(s.devices) > 1 else str(s.devices[0])
        times = map(seconds, (s.forward_seconds, s.backward_seconds, s.once_seconds, s.send_seconds))
        memory = (size(s.peak_bytes), str(s.in_flight), "yes" if s.recompute else "no")
        rows.append((f"{s.first}-{s.last - 1}", str(s.group), f"{ranks} ({s.device})", shape_text(s.mesh), *times, *memory))
    timed = numbers("forward", "backward", "per step", "sends", "peak", "in flight")
    columns = ("layers", "group", "devices", "mesh", *timed, "recomputed")
    return ReportTable("Stages", columns, rows)


def configurations_table(configurations: Sequence[Mapping]) -> ReportTable:
    rows = []
    for row in configurations:
        fits = "" if row.get("fits") else " (does not fit)"
        degrees = (str(row.get("pipeline")), str(row.get("microbatches")), str(row.get("schedule")))
        taken = (seconds(row.get("seconds")) + fits, size(row.get("peak_bytes")), percent(row.get("bubble") or 0.0, 1))
        rows.append((str(row.get("way")), _grid(row), *degrees, *taken))
    columns = ("layouts", "D x H", *numbers("P", "microbatches"), "schedule", *numbers("step", "peak", "bubble"))
    return ReportTable("Configurations, the best first", columns, rows)


def _grid(row: Mapping) -> str:
    if row.get("data"):
        return f"{row['data']} x {row['tensor']}"
    return f"{shape_text(sorted(set(row['devices'])))} devices" if row.get("devices") else "-"


def _further(pipeline: Pipeline) -> Iterator[ReportTable | str]:
    if pipeline.speed_up:
        counted = []
        for row in pipeline.speed_up:
            said = f"{row['speed_up']:.2f}" if row["speed_up"] else "-" if row["seconds"] else "does not fit"
            counted.append((str(row["devices"]), seconds(row["seconds"]), said))
        yield ReportTable("Fewer devices", numbers("devices", "step", "speed-up"), counted)
        fewest = next((row["devices"] for row in pipeline.speed_up if row["speed_up"]), 1)
        if fewest > 1:
            yield f"{fewest} devices, the fewest that fit, count as {fewest}"
    if pipeline.budgets:
        rows = []
        for row in pipeline.budgets:
            cells = [str(row[key] or "-") for key in ("stages", "microbatches", "schedule")]
            rows.append((size(row["memory_bytes"]), seconds(row["seconds"]) if row["seconds"] else "nothing fits", *cells))
        yield ReportTable("Other limits", (*numbers("memory", "step", "stages", "microbatches"), "schedule"), rows)


# id: heading, in the order of the page
SECTIONS = {"summary": "The plan", "timeline": "Stages over time", "stages": "Stages", "configurations": "Configurations"}


def content(pipeline: Pipeline) -> dict[str, Any]:
    """What the page shows: the values that templates/pipeline.html.j2 puts in place."""
    stages, groups, times = len(pipeline.stages), pipeline.num_groups, time_line(pipeline)
    parts = f"{stages} stage{'s' if stages > 1 else ''} on {groups} device group{'s' if groups > 1 else ''}"
    microbatches = f"{pipeline.microbatches} microbatch{'es' if pipeline.microbatches != 1 else ''}"
    timed = [row for row in pipeline.configurations if row.get("seconds") is not None]
    return {
        "pipeline": pipeline,
        "title": f"{pipeline.assumptions.get('model') or 'A pipeline'} on {len({d for s in pipeline.stages for d in s.devices})} devices",
        "sub": f"{parts}, {pipeline.schedule}, {microbatches}",
        "prices_of": "that the pipeline was planned with",
        "drawn": times.seconds,
        "chart": chart(times),
        "stages": stages_table(pipeline),
        "configurations": configurations_table(timed[:MOST_ON_PAGE]),
    }


def time_line(pipeline: Pipeline) -> ScheduleRun:
    """One step of the pipeline: when each unit of each device group runs."""
    stages, groups = pipeline.stages, pipeline.num_groups
    return run(
        schedule_of_plan(pipeline),
        forward=[stage.forward_seconds for stage in stages],
        backward=[stage.backward_seconds for stage in stages],
        transfer=[stage.send_seconds for stage in stages],
        finish=[math.fsum(stage.once_seconds for stage in stages[d::groups]) for d in range(groups)],
        in_turn=False,
        backend=backend_of(stage.prices for stage in stages),
    )


def chart(times: ScheduleRun) -> dict[str, Any]:
    """A row per device group, in it a path per kind of unit; each unit is a box of its own."""
    rows = [[(UNITS[s.kind], s.start, s.end) for s in times.spans if s.device == d and s.end > s.start] for d in range(len(times.busy))]
    return lanes({f"group {d}": spans for d, spans in enumerate(rows)}, times.seconds, tuple(UNITS.values()), apart=True)


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
        axes.loglog(base=2)  # which refuses axes without a point
        axes.legend()
    else:
        axes.text(0.5, 0.5, "no fewer devices to compare with", ha="center", va="center", transform=axes.transAxes)
    axes.set_xticks(counts, [str(n) for n in counts])
    axes.set_yticks(counts, [str(n) for n in counts])
    axes.set(xlabel="devices", ylabel="speed-up")
    save(figure, path)
