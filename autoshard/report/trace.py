"""Time lines as Chrome trace events, which chrome://tracing and ui.perfetto.dev load.

Format: "Trace Event Format" (Google, 2016), the JSON object form: complete events (ph X) with ts and dur in microseconds, counters
(C) for memory, metadata (M) for the names of processes and threads. A process is a device, a thread one of its streams.
"""

from __future__ import annotations

from collections.abc import Sequence

from autoshard.pipeline import ScheduleRun
from autoshard.simulate import COMPUTE, Timeline

MICRO = 1e6


def trace_of(timeline: Timeline, *, name: str = "every rank") -> dict:
    """One rank: its compute stream, a stream per mesh axis, its memory; events on the critical path say so."""
    events = [_named("process_name", 0, 0, name)]
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
    return [
        {"name": "memory_bytes", "ph": "C", "ts": at * MICRO, "pid": 0, "tid": 0, "args": values}
        for at, (_, values) in sorted(peaks.items())
    ]


def trace_of_run(run: ScheduleRun, names: Sequence[str] | None = None) -> dict:
    """All devices of a pipeline: what each runs, and what it sends to which other one."""
    devices = run.schedule.devices
    events = []
    links = sorted({(send.device, send.to) for send in run.sends})
    thread = {pair: 1 + [b for a, b in links if a == pair[0]].index(pair[1]) for pair in links}
    for d in range(devices):
        events.append(_named("process_name", d, 0, names[d] if names else f"stage {d}"))
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
    return {
        "name": name, "cat": category, "ph": "X", "ts": begin * MICRO, "dur": (end - begin) * MICRO, "pid": pid, "tid": tid,
        "args": arguments,
    }  # fmt: skip
