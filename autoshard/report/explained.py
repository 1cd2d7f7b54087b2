"""Why something lies as it does, and whether a plan is still good, for the terminal: the records of `explain` and `check`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autoshard.units import seconds, size

MOST_EDGES = 6  # that touch it
MOST_REASONS = 3  # edges or ops per alternative
MOST_NAMES = 6  # that change elsewhere
NUMBERS = ("time", "the rest anew", "the rest as it is", "peak")  # columns


def explained(found: Mapping[str, Any]) -> RenderableType:
    """What it is, what it costs, what else it could be and why that is dearer, and the layout that was asked about."""
    shown: list[RenderableType | None] = [_header(found), _prices(found)]
    if found["alternatives"]:
        shown += [_alternatives(found), _reasons(found["alternatives"])]
    if found["why_not"]:
        shown += [_why_not(found)]
    return Group(*(item for part in shown if part is not None for item in (part, Text(""))))


def _grid() -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    return table


def _header(found: Mapping[str, Any]) -> Table:
    table = _grid()
    what = "x".join(map(str, found["shape"])) + f" {found['dtype']}" if found["shape"] is not None else ""
    where = [found["target"], what, f"of {found['module']}" if found["module"] else ""] if found["kind"] == "op" else [what]
    words = [found["kind"], *where]
    table.add_row(found["name"], " ".join(filter(None, words)))
    if found["layout"]:
        table.add_row("layout", found["layout"])
    if found["parameters"]:
        table.add_row("parameters", ", ".join(f"{name} {layout}" for name, layout in found["parameters"].items()))
    total = found["seconds"] + found["edge_seconds"]
    itself = f"{seconds(found['seconds'])} itself, {seconds(found['edge_seconds'])} moving it"
    table.add_row("costs", f"{itself}; {100 * total / found['cost_seconds']:.2g}% of the plan's {seconds(found['cost_seconds'])}")
    held = ", ".join(f"{kind.replace('_', ' ')} {size(held)}" for kind, held in found["bytes"].items())
    table.add_row("holds", held + " per device" if held else "nothing of its own")
    if abs(found["planned_seconds"] or 0.0) and abs(found["cost_seconds"] / found["planned_seconds"] - 1) > 1e-6:
        table.add_row("", f"the plan says {seconds(found['planned_seconds'])}: model, sizes or rules are not those of then")
    return table


def _prices(found: Mapping[str, Any]) -> Table | None:
    """The edges that cost something, and of a block its dearest ops."""
    rows = [edge for edge in found["edges"] if edge["seconds"]]
    if found["kind"] == "block":
        rows = sorted([*rows, *found["parts"]], key=lambda row: -row["seconds"])
    if not rows:
        return None
    table = _table("What it costs", "", "from", "to", "by", "time")
    for row in rows[:MOST_EDGES]:
        table.add_row(_name(row), *_ends(row), ", ".join(row["steps"]), seconds(row["seconds"]))
    if rest := rows[MOST_EDGES:]:
        table.add_row(f"and {len(rest)} more (--json lists them)", "", "", "", seconds(sum(row["seconds"] for row in rest)))
    return table


def _alternatives(found: Mapping[str, Any]) -> Table:
    title = "This block alone by another scheme" if found["kind"] == "block" else "Other layouts"
    table = _table(title, "", "the rest anew", "the rest as it is", "peak", "changes elsewhere")
    for one in found["alternatives"]:
        if one["reason"]:
            table.add_row(one["label"], "impossible", "impossible", "", one["reason"])
            continue
        local = "impossible" if one["local_reason"] else _more(one["local_extra_seconds"])
        extra = _share(one, found) + ("" if one["proven"] else ", or less")
        changes = len(one["changed"]) + len(one["changed_ops"])
        said = f"{changes} tensor{'s' if changes > 1 else ''}" if changes else "nothing"
        table.add_row(one["label"], extra, local, size(one["peak_bytes"]), said)
    for label, floor in found["left_out"].items():
        table.add_row(label, "impossible" if floor is None else f"{_more(floor - found['cost_seconds'])} or more", "", "", "")
    return table


def _share(one: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    share = one["extra_seconds"] / found["cost_seconds"]
    return _more(one["extra_seconds"]) + (f" ({100 * share:+.2g}%)" if share else "")


def _more(extra: float) -> str:
    return "0" if extra == 0 else ("+" if extra > 0 else "-") + seconds(abs(extra))


def _reasons(alternatives: Sequence[Mapping[str, Any]]) -> Table | None:
    """What is dearer under each alternative, all else anew."""
    table = _table("What is dearer then", "", "where", "as planned", "then", "time")
    for one in alternatives:
        for k, row in enumerate(one["dearer"][:MOST_REASONS]):
            table.add_row(one["label"] if k == 0 else "", _name(row), _path(row["before"]), _path(row["after"]), _times(row))
    return table if table.row_count else None


def _why_not(found: Mapping[str, Any]) -> RenderableType:
    one = found["why_not"]
    table = _grid()
    table.title, table.title_justify, table.title_style = f"Why not {one['label']}?", "left", "bold"
    if one["reason"]:
        table.add_row("impossible", one["reason"])
        return table
    if len(one["pins"]) > 1:
        table.add_row("for", _named(list(one["pins"])))
    proof = "" if one["proven"] else f", and at least {seconds(one['bound_seconds'])}"
    table.add_row("the rest anew", f"{_share(one, found)}: {seconds(one['cost_seconds'])}{proof}; {size(one['peak_bytes'])} at the peak")
    as_is = f"impossible: {one['local_reason']}" if one["local_reason"] else _more(one["local_extra_seconds"])
    table.add_row("the rest as it is", as_is)
    laid = [f"{name} {before} to {after}" for name, (before, after) in one["changed"].items()]
    table.add_row("changes elsewhere", _named([*laid, *one["changed_ops"]]) or "nothing")
    table.add_row("in all", f"{seconds(one['dearer_seconds'])} dearer, {seconds(-one['cheaper_seconds'])} cheaper")
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
    plain = (source.removesuffix(" (hub)"), reader.removesuffix(" (hub)"))
    if row["kind"] == "copy":
        return f"{source}, for its readers"
    if row["kind"] in ("gradient", "buffer"):
        return f"{row['kind']} of {reader}"
    name = " -> ".join(filter(None, (part.removesuffix(".0") if part != whole else part for part, whole in zip(plain, (source, reader)))))
    return name + (f" of {row['module']}" if row["kind"] == "op" and row["module"] else "")


def _ends(row: Mapping[str, Any]) -> tuple[str, str]:
    return " ".join(dict.fromkeys(row["takes"])), " ".join(dict.fromkeys(row["gives"]))


def _path(row: Mapping[str, Any]) -> str:
    """`S(0),R to R,R`, or one layout where both ends have it."""
    takes, gives = _ends(row)
    return gives if takes in ("", gives) else f"{takes} to {gives}"


def check_table(found: Mapping[str, Any], sentence: str) -> RenderableType:
    """The record of `check`, and its sentence."""
    table = _grid()
    table.add_row("plan", sentence)
    for k, note in enumerate(found["notes"]):
        table.add_row("" if k else "changed since", note)
    table.add_row("cost now", f"{seconds(found['cost_seconds'])}; {seconds(found['planned_seconds'])} when it was planned")
    best = f"{seconds(found['best_seconds'])} now, and " if found["best_seconds"] is not None else ""
    table.add_row("the best", f"{best}none below {seconds(found['bound_seconds'])}" if found["bound_seconds"] else "not known")
    limit = f"; the limit is {size(found['memory_limit'])}" if found["memory_limit"] is not None else ""
    table.add_row("memory", f"{size(found['peak_bytes'])} per device at the peak{limit}")
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title or None, title_justify="left", title_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold", justify="right" if column in NUMBERS else "left")
    return table
