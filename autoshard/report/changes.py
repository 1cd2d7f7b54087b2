"""Two plans compared, as tables: their costs, the parameters with different layouts, and the seconds that differ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table

from autoshard.report.blocks import split
from autoshard.solution import changes as changes
from autoshard.units import seconds, size

MOST_ROWS = 20  # of a table; the rest is counted
LEAST_SHARE = 0.001  # of the cost: parts that differ by less are left out


def changes_tables(record: Mapping[str, Any]) -> RenderableType:
    """The record of `solution.changes` for the terminal."""
    shown: list[RenderableType] = [_summary(record)]
    if record["parameters"]:
        shown += [_layouts("Parameters with different layouts", record["parameters"])]
    if record["seconds"]:
        shown += [_seconds(record)]
    if record["assumptions"]:
        shown += [_pairs("Assumptions that differ", {key: list(map(str, pair)) for key, pair in record["assumptions"].items()})]
    if record["ops"]:
        shown += [f"{len(record['ops'])} other tensors have different layouts (--json lists them)"]
    return Group(*shown)


def _summary(record: Mapping[str, Any]) -> Table:
    table = _table("The plans are the same" if record["same"] else "", "", "a", "b", "b to a")
    for key, shown in (("cost_seconds", seconds), ("bound_seconds", seconds), ("peak_bytes", size)):
        a, b = record[key]
        table.add_row(key.split("_")[0], shown(a), shown(b), f"{b / a:.3g}x" if a and a < float("inf") and b < float("inf") else "-")
    table.add_row("status", *record["status"], "")
    table.add_row("mesh", *record["mesh"], "")
    return table


def _layouts(title: str, pairs: Mapping[str, list]) -> Table:
    """Blocks whose parameters changed alike are one row: `h.0 and 11 more`."""
    alike: dict[tuple, list[str]] = {}
    for name, (a, b) in pairs.items():
        block, rest = split(name)
        family = block.rpartition(".")[0] + "." if block else ""
        alike.setdefault((family, rest, a, b), []).append(name)
    rows = {_named(names): [a, b] for (_, _, a, b), names in alike.items()}
    return _pairs(title, rows)


def _named(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more blocks"


def _pairs(title: str, pairs: Mapping[str, list]) -> Table:
    table = _table(title, "", "a", "b")
    for name, (a, b) in list(pairs.items())[:MOST_ROWS]:
        table.add_row(name, a if a is not None else "-", b if b is not None else "-")
    if len(pairs) > MOST_ROWS:
        table.add_row(f"and {len(pairs) - MOST_ROWS} more (--json lists them)", "", "")
    return table


def _seconds(record: Mapping[str, Any]) -> Table:
    table = _table("Where the time moved", "", "a", "b", "b - a")
    pairs = {name: [a or 0.0, b or 0.0] for name, (a, b) in record["seconds"].items()}
    least = LEAST_SHARE * max(record["cost_seconds"])
    for name, (a, b) in sorted(pairs.items(), key=lambda item: (-abs(item[1][1] - item[1][0]), item[0])):
        if abs(b - a) >= least:
            table.add_row(name, seconds(a), seconds(b), ("+" if b > a else "-") + seconds(abs(b - a)))
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title or None, title_justify="left")
    for k, column in enumerate(columns):
        table.add_column(column, overflow="fold", justify="left" if k == 0 else "right")
    return table
