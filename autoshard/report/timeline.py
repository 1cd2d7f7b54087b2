"""Time lines as pictures, as trace files, and as tables."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import RenderableType

from autoshard.pipeline import ScheduleRun
from autoshard.simulate import COMPUTE, Timeline
from autoshard.units import seconds, size
from autoshard.writing import write_json

from .figures import blank, legend_of, save, titled
from .plan_tables import tested_on
from .terminal import shown
from .values import ReportTable, TableRow, numbers, share

COLORS = {"F": "#4c78a8", "B": "#59a14f", "W": "#f1a340", "finish": "#9c9c9c"}
# of kinds of tasks that are no collectives
OF_KIND = {"compute": "#4c78a8", "accumulation": "#59a14f", "optimizer": "#9c9c9c", "split": "#bab0ac"}
COLLECTIVES = {"all_gather": "#e15759", "reduce_scatter": "#f28e2b", "all_reduce": "#b07aa1", "all_to_all": "#76b7b2"}
MICRO = 1e6
NUMBERED = 900  # boxes; more are drawn without their numbers


def draw_run(run: ScheduleRun, path: str) -> None:
    """A pipeline's time line: a row per device, a box per unit with the number of its microbatch, sends as thin lines below."""
    schedule, devices = run.schedule, run.schedule.devices
    figure = blank(12, 1.2 + 0.55 * devices)
    axes = figure.subplots()
    numbered = len(run.spans) <= NUMBERED
    for span in run.spans:
        chunk = 0 if span.kind == "finish" else span.part // devices
        style: dict[str, Any] = {"facecolors": COLORS[span.kind], "edgecolor": "white", "alpha": 1.0 if chunk % 2 == 0 else 0.7}
        axes.broken_barh([(span.start * 1e3, (span.end - span.start) * 1e3)], (span.device - 0.36, 0.62), linewidth=0.5, **style)
        if numbered and span.kind != "finish":
            middle = (span.start + span.end) * 5e2
            axes.text(middle, span.device - 0.05, str(span.microbatch), ha="center", va="center", fontsize=7, color="white", clip_on=True)
    for span in run.sends:
        axes.broken_barh([(span.start * 1e3, (span.end - span.start) * 1e3)], (span.device + 0.3, 0.1), facecolors="#e15759")
    axes.set_yticks(range(devices), [f"stage {d}" for d in range(devices)])
    axes.set(ylim=(devices - 0.45, -0.55), xlim=(0, run.seconds * 1e3), xlabel="ms")
    words = {"F": "forward", "B": "backward", "W": "weight gradients", "finish": "gradients, optimizer"}
    colors = {words[kind]: color for kind, color in COLORS.items() if any(span.kind == kind for span in run.spans)}
    colors |= {"transfer": "#e15759"} if run.sends else {}
    axes.legend(handles=legend_of(colors), loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=5, frameon=False, fontsize=8)
    shape = f"{schedule.name}: {devices} stages, {schedule.microbatches} microbatches"
    titled(axes, f"{shape}, {seconds(run.seconds)}, bubble {run.bubble:.1%}")
    save(figure, path, dpi=130, bbox_inches="tight")


def draw_timeline(timeline: Timeline, path: str) -> None:
    """One rank's streams over time, and below them the bytes that it holds."""
    names = timeline.streams
    colors = {**OF_KIND, **COLLECTIVES}
    figure = blank(12, 2.6 + 0.45 * len(names))
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[len(names), 2.5])
    rows: dict[tuple[int, str], list[tuple[float, float]]] = {}
    for i, task in enumerate(timeline.tasks):
        row = task.stream if timeline.program.overlap else COMPUTE
        begin, end = timeline.times.begin[i], timeline.times.end[i]
        rows.setdefault((row, task.kind), []).append((begin * 1e3, (end - begin) * 1e3))
    for (row, kind), spans in rows.items():
        top.broken_barh(spans, (row - 0.35, 0.7), facecolors=colors.get(kind, "#76b7b2"), linewidth=0)
    top.set_yticks(range(len(names)), names)
    top.set_ylim(len(names) - 0.5, -0.5)
    kinds = sorted({kind for _, kind in rows})
    top.legend(handles=legend_of({kind: colors.get(kind, "#76b7b2") for kind in kinds}), loc="lower right", fontsize=7, ncols=6)
    said = f"{seconds(timeline.seconds)}, peak {size(timeline.peak_bytes)} at {seconds(timeline.peak_seconds)}"
    top.set_title(said, fontsize=10, loc="left")
    memory = timeline.memory
    kinds = [kind for kind in memory if kind not in ("seconds", "total")]
    if kinds:
        bottom.stackplot(memory["seconds"] * 1e3, *[memory[kind] / 1e9 for kind in kinds], labels=kinds, step="post", linewidth=0)
        bottom.legend(loc="upper left", fontsize=6, ncols=3)
    bottom.set(xlabel="ms", ylabel="GB", xlim=(0, max(timeline.seconds * 1e3, 1e-9)))
    save(figure, path, dpi=130, bbox_inches="tight")


def simulation_report(record: Mapping, critical: Mapping[str, float] | None = None) -> RenderableType:
    """The record of `simulate --json` as tables."""
    exposed = f"communication that nothing hides: {seconds(record['exposed_communication_seconds'])}"
    said = f"{seconds(record['seconds'])} per step, peak {size(record['peak_bytes'])} per device; {exposed}"
    parts: list[str | ReportTable] = [f"{said}; bubble {record['bubble']:.1%}"]
    if record.get("interval_seconds") is not None:
        low, high = record["interval_seconds"]
        parts.append(f"between {seconds(low)} and {seconds(high)}, as 80 % of published training steps were")
        parts.append(f"prices: {record['prices']}; {tested_on(record['tested'])}")
    if record.get("cost_seconds") is not None:
        parts.append(f"the plan's cost, nothing overlapped: {seconds(record['cost_seconds'])}, peak {size(record['plan_peak_bytes'])}")
    parts += ["", _configurations(record["configurations"])] if len(record["configurations"]) > 1 else []
    parts += ["", _stages(record["stages"])] if len(record["stages"]) > 1 else []
    parts += ["", critical_table(critical)] if critical else []
    return shown(*parts)


def critical_table(critical: Mapping[str, float]) -> ReportTable:
    """Seconds of a step's critical path by kind of task."""
    total = math.fsum(critical.values())
    cells = ((kind, seconds(part), share(part, total)) for kind, part in critical.items())
    rows = [TableRow(row, kind=row[0], share=100 * part / total if total else 0.0) for row, part in zip(cells, critical.values())]
    return ReportTable("", ("on the critical path", *numbers("seconds", "share")), rows, "open")


def _configurations(configurations: Sequence[Mapping]) -> ReportTable:
    rows = []
    for row in configurations:
        degrees = [str(row[key]) for key in ("data", "tensor", "pipeline", "microbatches", "devices")]
        bubble = "-" if row["bubble"] is None else f"{row['bubble']:.1%}"
        peak = size(row["peak_bytes"]) + ("" if row.get("fits", True) else " (too much)")
        rows.append((*degrees, seconds(row["seconds"]), peak, bubble, seconds(row["exposed_communication_seconds"])))
    columns = numbers("data", "tensor", "pipeline", "microbatches", "devices", "per step", "peak", "bubble", "exposed")
    return ReportTable("", columns, rows, "open")


def _stages(stages: Sequence[Mapping]) -> ReportTable:
    rows = []
    for n, row in enumerate(stages):
        times = (row["forward_seconds"], row["backward_seconds"], row["finish_seconds"])
        rows.append((str(n), *map(seconds, times), size(row["peak_bytes"]), size(row["send_bytes"])))
    return ReportTable("", numbers("stage", "forward", "backward", "at the end", "peak", "sends"), rows, "open")


# -- trace files --------------------------------------------------------------------------------------------------------------------


def save_trace(trace: Mapping, path: str) -> None:
    """Write a trace for chrome://tracing or ui.perfetto.dev.

    Format: "Trace Event Format" (Google, 2016), the JSON object form: complete events (ph X) with ts and dur in microseconds, counters (C)
    for memory, metadata (M) for the names of processes and threads. A process is a device, a thread one of its streams.
    """
    write_json(trace, path)


def trace_of(timeline: Timeline) -> dict:
    """One rank: its compute stream, a stream per mesh axis, its memory; events on the critical path say so."""
    events = [_named("process_name", 0, 0, "every rank")]
    events += [_named("thread_name", 0, k, stream) for k, stream in enumerate(timeline.streams)]
    critical = set(timeline.critical_path)
    for i, task in enumerate(timeline.tasks):
        begin, end = timeline.times.begin[i], timeline.times.end[i]
        op = timeline.program.graph.ops[task.op]
        arguments = {"op": op.name, "target": op.target, "module": op.module, "phase": task.phase, "critical": i in critical}
        if task.bytes:
            arguments["bytes_sent"] = task.bytes
        shown = task.name if task.kind == "compute" else f"{task.kind} {task.name}"
        tid = task.stream if timeline.program.overlap else COMPUTE
        events.append(_complete(shown, task.kind, 0, tid, begin, end, arguments))
    events += _memory(timeline)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _memory(timeline: Timeline) -> list[dict]:
    """A counter event where the bytes change; of several at one time the highest."""
    memory = timeline.memory
    kinds = [kind for kind in memory if kind not in ("seconds", "total")]
    peaks: dict[float, tuple[float, dict]] = {}
    for n, at in enumerate(memory["seconds"]):
        total = float(memory["total"][n])
        if at not in peaks or total >= peaks[at][0]:
            peaks[float(at)] = (total, {kind: float(memory[kind][n]) for kind in kinds})
    event = {"name": "memory_bytes", "ph": "C", "pid": 0, "tid": 0}
    return [{**event, "ts": at * MICRO, "args": values} for at, (_, values) in sorted(peaks.items())]


def trace_of_run(run: ScheduleRun) -> dict:
    """All devices of a pipeline: what each runs, and what it sends to which other one."""
    devices = run.schedule.devices
    events = []
    links = sorted({(send.device, send.to) for send in run.sends})
    thread = {pair: 1 + [b for a, b in links if a == pair[0]].index(pair[1]) for pair in links}
    for d in range(devices):
        events.append(_named("process_name", d, 0, f"stage {d}"))
        events.append(_named("thread_name", d, 0, "compute"))
        events += [_named("thread_name", a, thread[a, b], f"to stage {b}") for a, b in links if a == d]
    for span in run.spans:
        shown = span.kind if span.kind == "finish" else f"{span.kind} {span.microbatch}"
        arguments = {"microbatch": span.microbatch, "part": span.part}
        events.append(_complete(shown, span.kind, span.device, 0, span.start, span.end, arguments))
    for span in run.sends:
        what = "activation" if span.kind == "F" else "gradient"
        tid = thread[span.device, span.to]
        events.append(_complete(f"{what} {span.microbatch}", "send", span.device, tid, span.start, span.end, {"to": span.to}))
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _named(what: str, pid: int, tid: int, name: str) -> dict:
    return {"name": what, "ph": "M", "ts": 0, "pid": pid, "tid": tid, "args": {"name": name}}


def _complete(name: str, category: str, pid: int, tid: int, begin: float, end: float, arguments: dict) -> dict:
    times = {"ts": begin * MICRO, "dur": (end - begin) * MICRO}
    return {"name": name, "cat": category, "ph": "X", **times, "pid": pid, "tid": tid, "args": arguments}
