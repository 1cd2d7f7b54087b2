"""Charts as SVG paths and ticks: memory over time, the time line, the frontier.

Everything is drawn in a box of WIDTH x HEIGHT units that the page stretches. Text is HTML beside the box, placed in percent, so that it
keeps its size at every width of the page. Spans that are closer than a unit of the box are joined, and of samples in one column
the largest total is kept: the peak is never lost.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from autoshard.units import seconds, size

if TYPE_CHECKING:
    from autoshard.simulate import Timeline

KERNELS = ("compute", "accumulation", "optimizer")  # kinds of tasks

WIDTH, HEIGHT = 6000, 1000
T = TypeVar("T", int, float)
Span = tuple[str, float, float]  # kind, begin, end: seconds
COLUMNS = 600  # of memory over time
KINDS = ("parameters", "optimizer_state", "gradients", "activations", "resharded_copies", "temporaries", "inputs")  # from below
UNITS = {"F": "forward", "B": "backward", "W": "weight_gradients", "finish": "update"}  # of a pipeline's schedule
TASKS = ("compute", "accumulation", "optimizer", "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "split")  # as coloured


def ticks(low: float, high: float, say: Callable[[float], str], about: int = 5) -> list[dict]:
    """Round numbers in [low, high] with their place in percent."""
    if not high > low:
        return []
    raw = (high - low) / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= raw * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [{"at": round(100 * (k * step - low) / (high - low), 3), "text": say(k * step)} for k in range(first, last + 1)]


def memory_chart(timeline: Timeline, limit: float | None) -> dict | None:
    """Layers of bytes over time with ticks, and what is in the peak; None where nothing is held."""
    held, end = timeline.memory, timeline.seconds
    kinds = [kind for kind in KINDS if kind in held] + sorted(kind for kind in held if kind not in (*KINDS, "seconds", "total"))
    if not kinds or not end > 0 or not timeline.peak_bytes > 0:
        return None
    peak, at_peak = timeline.peak_bytes, int(held["total"].argmax())
    top = max(peak, limit) if limit is not None and limit <= 1.5 * peak else peak
    top *= 1.06
    chosen = _columns(held["seconds"].tolist(), held["total"].tolist(), end)
    layers, above = [], [0.0] * COLUMNS
    for kind in kinds:
        above = [low + share / top for low, share in zip(above, held[kind][chosen].tolist())]
        if held[kind].max() > 0:
            layers.append({"kind": kind, "path": _area(above)})
    return {
        "layers": layers,
        "limit": None if limit is None or limit > top else round(HEIGHT * (1 - limit / top), 1),
        "x": ticks(0, end, seconds),
        "y": ticks(0, top, size, 4),
        "peak": {"x": round(100 * timeline.peak_seconds / end, 2), "y": round(100 * peak / top, 2), "seconds": timeline.peak_seconds},
        "parts": [{"kind": kind, "bytes": float(held[kind][at_peak])} for kind in kinds if held[kind][at_peak] > 0],
        "bytes": peak,
    }


def _columns(times: Sequence[float], total: Sequence[float], end: float) -> list[int]:
    """Per column the first sample with the largest total among those that hold at some time in it; times ascend."""
    chosen = []
    for k in range(COLUMNS):
        first = max(bisect_right(times, end * k / COLUMNS) - 1, 0)
        last = bisect_right(times, end * (k + 1) / COLUMNS) if k + 1 < COLUMNS else len(times)
        chosen.append(max(range(first, max(last, first + 1)), key=lambda i: (total[i], -i)))
    return chosen


def _area(line: Sequence[float]) -> str:
    """All below a line of steps, of one height per column. Drawn from the highest line to the lowest, such areas are layers."""
    path, now = f"M0 {HEIGHT}", HEIGHT
    for k, part in enumerate(line):
        height = round(HEIGHT * (1 - part))
        if height != now:
            path += f"H{k * WIDTH // len(line)}V{height}"
            now = height
    return f"{path}H{WIDTH}V{HEIGHT}Z"


def timeline_chart(timeline: Timeline) -> dict:
    """A row per stream, in it a path per kind of task; the phases; ticks that are close, for a stretched chart."""
    overlap = timeline.program.overlap
    rows: dict[str, list[Span]] = {name: [] for name in (timeline.streams if overlap else ("all",))}
    names = list(rows)
    for i, task in enumerate(timeline.tasks):
        rows[names[task.stream if overlap else 0]].append((task.kind, timeline.times.begin[i], timeline.times.end[i]))
    near = ticks(0, timeline.seconds, lambda value: f"{value * 1e3:.6g} ms" if value else "0", 80)
    return {**lanes(rows, timeline.seconds, TASKS), "near": near, "phases": _phases(timeline)}


def lanes(rows: Mapping[str, Sequence[Span]], end: float, order: Sequence[str], *, apart: bool = False) -> dict:
    """A time line until `end`: per row a path per kind, in this order. apart: each span is a box of its own."""
    drawn: list[dict] = []
    for name, spans in rows.items():
        kinds: dict[str, list[tuple[float, float]]] = {}
        for kind, a, b in spans:
            kinds.setdefault(kind, []).append((a, b))
        paths = [{"kind": kind, "path": _boxes(kinds[kind], end, apart)} for kind in _in_order(kinds, order)]
        busy = math.fsum(b - a for _, a, b in spans) / end if end > 0 else 0.0
        drawn.append({"name": name, "busy": busy, "paths": paths})
    kinds_met = {path["kind"] for row in drawn for path in row["paths"]}
    return {"rows": drawn, "kinds": _in_order(kinds_met, order), "x": ticks(0, end, seconds), "near": [], "phases": []}


def _in_order(kinds: Iterable[str], order: Sequence[str]) -> list[str]:
    """The kinds of the order first, then the others by name."""
    return sorted(kinds, key=lambda kind: (order.index(kind) if kind in order else len(order), kind))


def _boxes(spans: Sequence[tuple[float, float]], end: float, apart: bool) -> str:
    """Rectangles as high as the box of the chart, at least a unit wide."""
    boxes = [(round(WIDTH * a / end), max(round(WIDTH * b / end), round(WIDTH * a / end) + 1)) for a, b in spans]
    boxes = [(a, b - min(6, (b - a) // 4)) for a, b in boxes] if apart else union(boxes)
    return "".join(f"M{a} 0h{b - a}v{HEIGHT}h{a - b}z" for a, b in boxes)


def union(spans: Iterable[tuple[T, T]]) -> list[tuple[T, T]]:
    """The spans joined where they meet, in order."""
    joined: list[tuple[T, T]] = []
    for begin, end in sorted(spans):
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((begin, end))
    return joined


def _phases(timeline: Timeline) -> list[dict]:
    """When kernels of each phase begin; the first at 0. Forward and backward of several microbatches are one phase."""
    begins: dict[str, float] = {}
    m = timeline.program.formulation.microbatches
    for i, task in enumerate(timeline.tasks):
        if task.kind in KERNELS:
            phase = task.phase if m == 1 or task.phase == "update" else f"{m} microbatches"
            begins[phase] = min(begins.get(phase, math.inf), timeline.times.begin[i])
    known = sorted(begins, key=lambda name: begins[name])
    marks = [0.0, *(begins[name] for name in known[1:]), timeline.seconds]
    return [
        {"name": name, "at": round(100 * a / timeline.seconds, 3), "width": round(100 * (b - a) / timeline.seconds, 3)}
        for name, a, b in zip(known, marks, marks[1:])
    ]


def frontier_chart(points: Sequence[Mapping], here: tuple[float, float] | None) -> dict | None:
    """Dots of memory against seconds, the steps between them, bounds below; None with fewer than two points that have both."""
    triples = ((p["memory_bytes"], p["seconds"], p["bound_seconds"]) for p in points)
    known = sorted((p for p in triples if None not in p[:2]), key=lambda p: p[:2])
    if len(known) < 2:
        return None
    here = here if here is not None and all(map(math.isfinite, here)) else None
    xs = [p[0] for p in known] + ([here[0]] if here else [])
    ys = [y for p in known for y in (p[1], p[2]) if y is not None] + ([here[1]] if here else [])
    (x0, x1), (y0, y1) = _widened(min(xs), max(xs)), _widened(min(ys), max(ys))

    def at(x: float, y: float) -> tuple[int, int]:
        return round(WIDTH * (x - x0) / (x1 - x0)), round(HEIGHT * (y1 - y) / (y1 - y0))

    line, best = "", math.inf
    for x, y, _ in known:
        if y < best:
            left, top = at(x, y)
            line += f"H{left}V{top}" if line else f"M{left} {top}"
            best = y
    ring = None if here is None else [round(100 * part, 2) for part in ((here[0] - x0) / (x1 - x0), (here[1] - y0) / (y1 - y0))]
    return {
        "line": line + f"H{WIDTH}",
        "dots": "".join(f"M{x} {y}h0" for x, y in (at(p[0], p[1]) for p in known)),
        "bounds": "".join(f"M{x} {y}h0" for x, y in (at(p[0], p[2]) for p in known if p[2] is not None and p[2] < p[1] * (1 - 1e-6))),
        "here": None if ring is None else dict(zip("xy", ring)),
        "x": ticks(x0, x1, size),
        "y": ticks(y0, y1, seconds, 4),
    }


def _widened(low: float, high: float) -> tuple[float, float]:
    margin = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
    return low - margin, high + margin
