"""The records of `explain` and `check` as tables for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autoshard.units import seconds, size

MOST_EDGES = 6  # in the table of costs
MOST_REASONS = 3  # edges or ops per alternative
MOST_NAMES = 6  # that change elsewhere
NUMBERS = ("time", "the rest anew", "the rest as it is", "peak")  # columns


def explained(record: Mapping[str, Any]) -> RenderableType:
    """The subject, what it costs, other layouts and why they are more expensive, and the layout that was asked about."""
    shown: list[RenderableType | None] = [_header(record), _prices(record)]
    if record["alternatives"]:
        shown += [_alternatives(record), _reasons(record["alternatives"])]
    if record["why_not"]:
        shown += [_why_not(record)]
    return Group(*(item for part in shown if part is not None for item in (part, Text(""))))


def _grid() -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    return table


def _header(record: Mapping[str, Any]) -> Table:
    table = _grid()
    what = "x".join(map(str, record["shape"])) + f" {record['dtype']}" if record["shape"] is not None else ""
    where = [record["target"], what, f"of {record['module']}" if record["module"] else ""] if record["kind"] == "op" else [what]
    words = [record["kind"], *where]
    table.add_row(record["name"], " ".join(filter(None, words)))
    if record["layout"]:
        table.add_row("layout", record["layout"])
    if record["parameters"]:
        table.add_row("parameters", ", ".join(f"{name} {layout}" for name, layout in record["parameters"].items()))
    total = record["seconds"] + record["edge_seconds"]
    itself = f"{seconds(record['seconds'])} itself, {seconds(record['edge_seconds'])} moving it"
    table.add_row("costs", f"{itself}; {100 * total / record['cost_seconds']:.2g}% of the plan's {seconds(record['cost_seconds'])}")
    held = ", ".join(f"{kind.replace('_', ' ')} {size(held)}" for kind, held in record["bytes"].items())
    table.add_row("holds", held + " per device" if held else "nothing of its own")
    if abs(record["planned_seconds"] or 0.0) and abs(record["cost_seconds"] / record["planned_seconds"] - 1) > 1e-6:
        table.add_row("", f"the plan says {seconds(record['planned_seconds'])}: model, sizes or rules are not those of then")
    return table


def _prices(record: Mapping[str, Any]) -> Table | None:
    """The edges that cost something, and of a block also its most expensive ops."""
    rows = [edge for edge in record["edges"] if edge["seconds"]]
    if record["kind"] == "block":
        rows = sorted([*rows, *record["parts"]], key=lambda row: -row["seconds"])
    if not rows:
        return None
    table = _table("What it costs", "", "from", "to", "by", "time")
    for row in rows[:MOST_EDGES]:
        table.add_row(_name(row), *_ends(row), ", ".join(row["steps"]), seconds(row["seconds"]))
    if rest := rows[MOST_EDGES:]:
        table.add_row(f"and {len(rest)} more (--json lists them)", "", "", "", seconds(sum(row["seconds"] for row in rest)))
    return table


def _alternatives(record: Mapping[str, Any]) -> Table:
    title = "This block alone by another scheme" if record["kind"] == "block" else "Other layouts"
    table = _table(title, "", "the rest anew", "the rest as it is", "peak", "changes elsewhere")
    for one in record["alternatives"]:
        if one["reason"]:
            table.add_row(one["label"], "impossible", "impossible", "", one["reason"])
            continue
        local = "impossible" if one["local_reason"] else _more(one["local_extra_seconds"])
        extra = _share(one, record) + ("" if one["proven"] else ", or less")
        changes = len(one["changed"]) + len(one["changed_ops"])
        said = f"{changes} tensor{'s' if changes > 1 else ''}" if changes else "nothing"
        table.add_row(one["label"], extra, local, size(one["peak_bytes"]), said)
    for label, floor in record["left_out"].items():
        table.add_row(label, "impossible" if floor is None else f"{_more(floor - record['cost_seconds'])} or more", "", "", "")
    return table


def _share(one: Mapping[str, Any], record: Mapping[str, Any]) -> str:
    share = one["extra_seconds"] / record["cost_seconds"]
    return _more(one["extra_seconds"]) + (f" ({100 * share:+.2g}%)" if share else "")


def _more(extra: float) -> str:
    return "0" if extra == 0 else ("+" if extra > 0 else "-") + seconds(abs(extra))


def _reasons(alternatives: Sequence[Mapping[str, Any]]) -> Table | None:
    """What is more expensive under each alternative, with all other layouts planned anew."""
    table = _table("What is more expensive then", "", "where", "as planned", "then", "time")
    for one in alternatives:
        for k, row in enumerate(one["dearer"][:MOST_REASONS]):
            table.add_row(one["label"] if k == 0 else "", _name(row), _path(row["before"]), _path(row["after"]), _times(row))
    return table if table.row_count else None


def _why_not(record: Mapping[str, Any]) -> RenderableType:
    one = record["why_not"]
    table = _grid()
    table.title, table.title_justify, table.title_style = f"Why not {one['label']}?", "left", "bold"
    if one["reason"]:
        table.add_row("impossible", one["reason"])
        return table
    if len(one["pins"]) > 1:
        table.add_row("for", _named(list(one["pins"])))
    proof = "" if one["proven"] else f", and at least {seconds(one['bound_seconds'])}"
    table.add_row("the rest anew", f"{_share(one, record)}: {seconds(one['cost_seconds'])}{proof}; {size(one['peak_bytes'])} at the peak")
    as_is = f"impossible: {one['local_reason']}" if one["local_reason"] else _more(one["local_extra_seconds"])
    table.add_row("the rest as it is", as_is)
    changed = [f"{name} {before} to {after}" for name, (before, after) in one["changed"].items()]
    table.add_row("changes elsewhere", _named([*changed, *one["changed_ops"]]) or "nothing")
    table.add_row("in all", f"{seconds(one['dearer_seconds'])} more expensive, {seconds(-one['cheaper_seconds'])} cheaper")
    reasons = _table("", "", "as planned", "then", "time")
    for row in [*one["dearer"][:MOST_REASONS], *one["cheaper"][:MOST_REASONS]]:
        reasons.add_row(_name(row), _path(row["before"]), _path(row["after"]), _times(row))
    return Group(table, reasons) if reasons.row_count else table


def _named(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_NAMES} more (--json lists them)" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more


def _times(row: Mapping[str, Any]) -> str:
    before, after = row["before"]["seconds"], row["after"]["seconds"]
    return f"{seconds(before)} to {seconds(after)}"


def _name(row: Mapping[str, Any]) -> str:
    """`gradient of wte.weight`, `wte.weight -> embedding`, an op by its name."""
    source, _, reader = row["name"].partition(" -> ")
    ends = (source.removesuffix(" (hub)"), reader.removesuffix(" (hub)"))
    if row["kind"] == "copy":
        return f"{source}, for its readers"
    if row["kind"] in ("gradient", "buffer"):
        return f"{row['kind']} of {reader}"
    name = " -> ".join(filter(None, (end.removesuffix(".0") if end != full else end for end, full in zip(ends, (source, reader)))))
    return name + (f" of {row['module']}" if row["kind"] == "op" and row["module"] else "")


def _ends(row: Mapping[str, Any]) -> tuple[str, str]:
    return " ".join(dict.fromkeys(row["takes"])), " ".join(dict.fromkeys(row["gives"]))


def _path(row: Mapping[str, Any]) -> str:
    """`S(0),R to R,R`, or one layout where both ends have it."""
    inputs, outputs = _ends(row)
    return outputs if inputs in ("", outputs) else f"{inputs} to {outputs}"


def check_table(record: Mapping[str, Any], sentence: str) -> RenderableType:
    """The record of `check`, and its sentence."""
    table = _grid()
    table.add_row("plan", sentence)
    for k, note in enumerate(record["notes"]):
        table.add_row("" if k else "changed since", note)
    table.add_row("cost now", f"{seconds(record['cost_seconds'])}; {seconds(record['planned_seconds'])} when it was planned")
    best = f"{seconds(record['best_seconds'])} now, and " if record["best_seconds"] is not None else ""
    table.add_row("the best", f"{best}none below {seconds(record['bound_seconds'])}" if record["bound_seconds"] else "not known")
    limit = f"; the limit is {size(record['memory_limit'])}" if record["memory_limit"] is not None else ""
    table.add_row("memory", f"{size(record['peak_bytes'])} per device at the peak{limit}")
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title or None, title_justify="left", title_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold", justify="right" if column in NUMBERS else "left")
    return table
