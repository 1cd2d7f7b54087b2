"""What a step does besides its kernels, as plain rows of the page: values that the backward pass computes or fetches again, and collectives
that run behind kernels.

    saved_rows    per module and operator of a plan that chose per tensor: kept, recomputed or offloaded, how often, bytes of a device
    hidden_rows   per link and kind of transfer: its seconds, how many of them a kernel hides, and how many nothing hides
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from autoshard.graph import grouped
from autoshard.layout import local_numel, parse
from autoshard.report.charts import KERNELS, union
from autoshard.report.values import ReportTable, TableRow, numbers
from autoshard.solution import Solution
from autoshard.units import seconds, size

if TYPE_CHECKING:
    from autoshard.graph import Op
    from autoshard.simulate import Timeline

ROUNDING = 1e-6  # of a difference of times that are sums
WAYS = ("recomputed", "offloaded", "kept")
NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


def saved_rows(solution: Solution, timeline: Timeline | None) -> list[dict]:
    """{way, module, target, modules, bytes}: equal blocks are one row, `modules` counts them; bytes without a time line, or kept: None."""
    ways = ((module, target, way) for module, targets in solution.saved.items() for target, of in targets.items() for way in of)
    modules = grouped(((way, NUMBER.sub("*", module), _short(target)), module) for module, target, way in ways)
    held: dict[tuple[str, str, str], float] = {}
    for key, value in _bytes_elsewhere(solution, timeline) if timeline is not None else ():
        held[key] = held.get(key, 0.0) + value
    rows = [
        {"way": key[0], "module": key[1] if len(of) > 1 else of[0], "target": key[2], "modules": len(of), "bytes": held.get(key)}
        for key, of in modules.items()
    ]
    return sorted(rows, key=lambda row: (WAYS.index(row["way"]), -(row["bytes"] or 0), row["module"], row["target"]))


def saved_table(rows: Sequence[Mapping], *, has_bytes: bool) -> ReportTable:
    """The rows that are not kept."""
    cells = []
    for row in rows:
        if row["way"] != "kept":
            saves = ("" if row["bytes"] is None else size(row["bytes"]),) if has_bytes else ()
            cells.append((row["target"], row["module"], row["way"], str(row["modules"]), *saves))
    columns = ("operator", "of", "how", *numbers("modules", *(["saves"] if has_bytes else [])))
    return ReportTable("Values that are not kept on the device", columns, cells)


def _bytes_elsewhere(solution: Solution, timeline: Timeline) -> Iterator[tuple[tuple[str, str, str], float]]:
    """Of every value that is not kept, its row's key and the bytes that it would take on a device."""
    chosen = solution.chosen
    for op in timeline.program.graph.ops:
        row = NUMBER.sub("*", op.module), _short(op.target)
        for k in range(len(op.outputs)):
            if f"{op.name}.{k}" in chosen.offloaded:
                yield ("offloaded", *row), _local_bytes(solution, op, k)
            elif op.name in chosen.recomputed and op.alias is None:
                yield ("recomputed", *row), _local_bytes(solution, op, k)


def _local_bytes(solution: Solution, op: Op, k: int) -> float:
    tensor, layout = op.outputs[k], solution.layouts[op.name].outputs[k]
    if tensor is None or layout is None:
        return 0.0
    return local_numel(tensor.shape, parse(layout), solution.mesh) * tensor.itemsize


def _short(target: str) -> str:
    return target.removeprefix("aten.").removesuffix(".default")


def hidden_rows(timeline: Timeline) -> list[dict[str, Any]]:
    """{stream, kind, seconds, hidden, exposed}, the most exposed first. Transfers on several links at a time count on each."""
    times = timeline.times
    kernels = union([(times.begin[i], times.end[i]) for i, task in enumerate(timeline.tasks) if task.kind in KERNELS])
    before = [0.0, *accumulate(end - begin for begin, end in kernels)]
    rows: dict[tuple[str, str], list[float]] = {}
    for i, task in enumerate(timeline.tasks):
        if task.kind not in KERNELS:
            begin, end = times.begin[i], times.end[i]
            row = rows.setdefault((timeline.streams[task.stream], task.kind), [0.0, 0.0])
            row[0] += end - begin
            row[1] += min(max(_within(kernels, before, end) - _within(kernels, before, begin), 0.0), end - begin)
    listed = []
    for (stream, kind), (total, behind) in rows.items():
        hidden = behind if behind > ROUNDING * total else 0.0
        listed += [{"stream": stream, "kind": kind, "seconds": total, "hidden": hidden, "exposed": total - hidden}] if total > 0 else []
    return sorted(listed, key=lambda row: (-row["exposed"], row["stream"], row["kind"]))


def hidden_table(timeline: Timeline) -> ReportTable:
    """Without rows where nothing overlaps. The bar of a row is the part behind kernels."""
    rows = []
    for row in hidden_rows(timeline) if timeline.program.overlap else ():
        cells = (f"{row['kind'].replace('_', ' ')}, {row['stream']}", *map(seconds, (row["seconds"], row["hidden"], row["exposed"])))
        rows.append(TableRow(cells, kind=row["kind"], share=100 * row["hidden"] / row["seconds"]))
    columns = ("transfer", *numbers("time", "behind kernels", "not hidden"))
    return ReportTable("What hides behind kernels, by link and kind", columns, rows)


def _within(spans: Sequence[tuple[float, float]], before: Sequence[float], until: float) -> float:
    """Seconds before `until` that are in the spans. before: the seconds of all spans before each."""
    k = bisect_right(spans, (until, float("inf")))
    return before[k] - max(spans[k - 1][1] - until, 0.0) if k else 0.0
