"""Tables and text as rich shows them in a terminal."""

import io
from collections.abc import Iterable
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from .values import Code, Number, ReportTable, TableRow

WIDTH = 100  # columns
PADDING: dict[str, Any] = {"box": (0, 1), "open": (0, 2, 0, 0), "tight": (0, 1, 0, 0), "pairs": (0, 2)}  # by the frame of a table


def as_text(renderable: RenderableType, width: int = WIDTH) -> str:
    """The renderable as plain text of at most `width` columns."""
    console = Console(file=io.StringIO(), width=width, color_system=None, legacy_windows=False, markup=False, emoji=False)
    console.print(renderable)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines()) + "\n"  # type: ignore[attr-defined]


def shown(*parts: RenderableType | ReportTable | None) -> Group:
    """The parts one below the other, without those that are None."""
    known = (_table(part) if isinstance(part, ReportTable) else part for part in parts if part is not None)
    return Group(*(Text(part) if isinstance(part, str) else part for part in known))


def spaced(*parts: RenderableType | ReportTable | None) -> Group:
    """The same, with an empty line after each."""
    return shown(*(item for part in parts if part is not None for item in (part, "")))


def pairs(rows: Iterable[tuple[str, str]]) -> Group:
    """Names, and a text beside each."""
    return shown(ReportTable("", ("", ""), list(rows), "pairs"))


def _table(table: ReportTable) -> Table:
    grid = Table(padding=PADDING[table.frame], pad_edge=table.frame in ("box", "open"), show_header=table.frame != "pairs")
    grid.title = Text(table.title, "bold red" if table.alarm else "bold") if table.title else None
    grid.title_justify, grid.collapse_padding = "left", table.frame == "pairs"
    if table.frame != "box":
        grid.box = None
    rows = [_cells(table, row) for row in table.full_rows()]
    for k, name in enumerate([*table.columns, *([table.notes] if table.notes else [])]):
        is_name = table.frame == "pairs" and k == 0
        style: dict[str, Any] = {"justify": "right"} if isinstance(name, Number) else {"style": "bold"} if is_name else {}
        narrow = isinstance(name, Number) and len(name) <= max((len(row[k]) for row in rows), default=0)  # else its title is folded
        grid.add_column(Text(name), overflow="fold", no_wrap=is_name or narrow or isinstance(name, Code), **style)
    for row, cells in zip(table.full_rows(), rows):
        grid.add_row(*map(Text, cells), style="bold" if row.strong else None)
    return grid


def _cells(table: ReportTable, row: TableRow) -> list[str]:
    first, *others = row.cells
    return [f"{first} ({row.tag})" if row.tag else first, *others, *([row.note] if table.notes else [])]


def exported_text(value: Any) -> Text:
    """JSON over several lines."""
    from autoshard.solution import json_text  # here: torch takes seconds to import, which tables of launches shouldn't

    return Text(json_text(value), no_wrap=True, overflow="ignore")
