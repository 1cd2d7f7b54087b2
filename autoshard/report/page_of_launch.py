"""What the page of a launch shows, of `check`, `fits` and `degrees`: the values that templates/launch.html.j2 puts in place."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from autoshard.report import launchers
from autoshard.report.charts import frontier_chart
from autoshard.report.page import page
from autoshard.report.values import Number, ReportTable, TableRow, by_kind, numbers
from autoshard.units import seconds, size

# id: heading, in the order of the page
SECTIONS = {
    "summary": "The launch", "better": "What would be better", "time": "Where the time goes", "memory": "Where the bytes are",
    "frontier": "Speed against memory", "sensitivity": "What it depends on", "published": "Beside a published run",
}  # fmt: skip
COLORS = {  # kinds of seconds and of bytes: those of the style sheet
    "matmul": "compute", "attention": "accumulation", "elementwise": "temporaries", "tensor parallel": "all_reduce",
    "data parallel": "all_gather", "context parallel": "parameters", "expert parallel": "all_to_all", "transfers": "reduce_scatter",
    "bubble": "usual", "host": "resharded_copies", "optimizer": "optimizer", "gathered": "all_gather", "logits": "resharded_copies",
    "cached": "usual", "contexts": "other",
}  # fmt: skip
Ranked = tuple[list[str], ReportTable, list[str | None]]


def launch_page(record: Mapping[str, Any], title: str, *, fits: Mapping[str, Any] | None = None, ranked: Ranked | None = None) -> str:
    """The page of a launch as text: the record of `check`, with that of `fits` or with `launchers.ranked_launches` of `degrees`."""
    return page("launch", SECTIONS, content(record, title, fits, ranked))


def content(record: Mapping[str, Any], title: str, fits: Mapping[str, Any] | None, ranked: Ranked | None) -> dict[str, Any]:
    """Numbers, words, tables and charts by name; what only a legal launch has is left out of others."""
    legal, changes = record["legal"], [_change(change) for change in record["changes"]]
    remedies = [] if fits is None else [_remedy(change, fits["seconds"]) for change in fits["changes"]]
    points = [{**row, "bound_seconds": None} for row in record["frontier"]]
    return {
        "record": record,
        "fits": fits,
        "title": f"{title} on {record['devices']} {record['device']}",
        "sub": f"{record['launcher']}, {record['parameters'] / 1e9:.3g}e9 parameters, {record['precision']}; "
        f"{launchers.degrees_text(record['configuration'])}",
        "what": "launch",
        "prices_of": "of autoshard/cost/devices",
        **(_of_legal(record, fits) if legal else {}),
        "changes": ReportTable("Changes that gain", ("change", *numbers("gain", "step", "tokens/s per GPU", "memory", "fits")), changes),
        "remedies": ReportTable("What makes it fit", ("change", *numbers("step", "memory", "fits")), remedies),
        "ranked": ranked and (ranked[0][:1] + ranked[0][2:], _in_one_line(ranked[1], "The best launches", "number"), ranked[2]),
        "chart": frontier_chart(points, (record["memory_bytes"], record["seconds"]) if legal else None),
        "alike": launchers.of_all(points) if points else None,
        "points": _points(points) if points else None,
        "published": launchers.published_text(record["published"]),
    }  # fmt: skip


def _of_legal(record: Mapping[str, Any], fits: Mapping[str, Any] | None) -> dict[str, Any]:
    rates = sorted([record["tokens_per_second_per_device"], *record["tokens_per_second_per_device_interval"]])
    return {
        "limits": launchers.limits_text(record["limits"]),
        "tight": record["memory_bytes"] > record["usable_bytes"],
        "used": min(100 * record["memory_bytes"] / record["device_memory_bytes"], 100.0),
        "peak": launchers.peak_text(record["mfu_of"]),
        "time": _by_kind("time", record["seconds_by_kind"], seconds),
        "bytes": _by_kind("bytes", record["bytes_by_kind"], size),
        "stages": fits and _in_one_line(launchers.bytes_table(fits["stages"]), "By stage, each when it needs most", "what", " "),
        "sensitivity": launchers.sensitivity_table(record),
        "range": (*rates, [f"{rate:.0f} tokens/s" for rate in rates]),
    }


def _by_kind(what: str, parts: Mapping[str, float], say: Callable[[float], str]) -> ReportTable:
    """Kinds that take something, the largest first."""
    return by_kind("", what, {kind: part for kind, part in parts.items() if part > 1e-9 * sum(parts.values())}, say, COLORS)


def _change(change: Mapping[str, Any]) -> TableRow:
    low, high = change["tokens_per_second_per_device_interval"]
    rate = f"{change['tokens_per_second_per_device']:.0f} ({low:.0f} to {high:.0f})"
    cells = (launchers.gain_text(change), seconds(change["seconds"]), rate, size(change["memory_bytes"]), f"{change['chance_to_fit']:.0%}")
    why = [launchers.why_text(change[key], say) for key, say in launchers.WHY if change[key]]
    return TableRow((launchers.in_short(change["change"]), *cells), note="; ".join(why))


def _remedy(change: Mapping[str, Any], before: float) -> TableRow:
    cells = (seconds(before + change["price_seconds"]), size(change["device_bytes"]), f"{change['chance_to_fit']:.0%}")
    return TableRow((launchers.in_short(change["change"]), *cells), note=launchers.why_text(change["why_bytes"], size))


def _points(launches: Sequence[Mapping[str, Any]]) -> ReportTable:
    numbered = [(k, 1) for k in range(len(launches))]
    return _in_one_line(launchers.launches_table(launches, numbered), "", "number", drop=("same",))


def _in_one_line(table: ReportTable, title: str, first: str, join: str = "", drop: Sequence[str] = ()) -> ReportTable:
    """A table with the names of its columns in one line, joined so. first: of the first column; drop: columns that say nothing here."""
    kept = [k for k, name in enumerate(table.columns) if name not in drop]
    names = {"tok/s\nGPU": "tokens/s per GPU", "fit\n%": "fits, %"}
    columns = [first, *(Number(names.get(table.columns[k], table.columns[k].replace("\n", join))) for k in kept[1:])]
    return ReportTable(title, columns, [[row.cells[k] for k in kept] for row in table.full_rows()])
