"""The page of a pipeline plan as plain rows: its time line (device groups x time), its stages, and the configurations beside it.

The time line is drawn from the seconds of the stages that the file holds, by the rules of `pipeline.schedule_times`. A zero-bubble schedule
splits the backward pass, whose halves the file doesn't hold: there it takes half for the weight gradients.
"""

from __future__ import annotations

import math
from typing import Any

from autoshard.pipeline import Pipeline, ScheduleRun, backend_of, run
from autoshard.report.html_charts import HEIGHT, WIDTH, ticks
from autoshard.units import seconds

# id, heading: the order of the page
SECTIONS = (("summary", "The plan"), ("timeline", "Stages over time"), ("stages", "Stages"), ("configurations", "Configurations"))
KINDS = {"F": "forward", "B": "backward", "W": "weight_gradients", "finish": "update"}
SHOWN = 20  # configurations


def parts(pipeline: Pipeline) -> dict[str, Any]:
    """What the template shows."""
    times = time_line(pipeline)
    return {
        "title": f"{pipeline.assumptions.get('model') or 'A pipeline'} on {sum(len(d) for d in _devices(pipeline))} devices",
        "chart": chart(times),
        "drawn": times.seconds,
        "devices": _devices(pipeline),
        "configurations": [row for row in pipeline.configurations if row.get("seconds") is not None][:SHOWN],
    }


def time_line(pipeline: Pipeline) -> ScheduleRun:
    """One step of the pipeline: when each unit of each device group runs."""
    stages, groups = pipeline.stages, pipeline.num_groups
    return run(
        pipeline.timed,
        forward=[stage.forward_seconds for stage in stages],
        backward=[stage.backward_seconds for stage in stages],
        transfer=[stage.send_seconds for stage in stages],
        finish=[math.fsum(stage.once_seconds for stage in stages[d::groups]) for d in range(groups)],
        in_turn=False,
        backend=backend_of(stage.prices for stage in stages),
    )


def chart(times: ScheduleRun) -> dict[str, Any]:
    """A row per device group, in it a path per kind of unit; each unit is a box of its own."""
    end = times.seconds
    rows: list[dict[str, Any]] = []
    for d, busy in enumerate(times.busy):
        boxes: dict[str, list[str]] = {}
        for span in times.spans:
            if span.device == d and span.end > span.start:
                left, right = round(WIDTH * span.start / end), round(WIDTH * span.end / end)
                gap = min(6, (right - left) // 4)
                boxes.setdefault(KINDS[span.kind], []).append(f"M{left} 0h{max(right - left - gap, 1)}v{HEIGHT}H{left}z")
        paths = [{"kind": kind, "path": "".join(boxes[kind])} for kind in KINDS.values() if kind in boxes]
        rows.append({"name": f"group {d}", "busy": busy / end if end else 0.0, "paths": paths})
    kinds = [kind for kind in KINDS.values() if any(path["kind"] == kind for row in rows for path in row["paths"])]
    return {"rows": rows, "kinds": kinds, "x": ticks(0, end, seconds)}


def _devices(pipeline: Pipeline) -> list[tuple[int, ...]]:
    """The ranks of each device group."""
    return [next(stage.devices for stage in pipeline.stages if stage.group == group) for group in range(pipeline.num_groups)]
