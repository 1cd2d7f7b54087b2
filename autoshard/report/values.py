"""The tables of reports as plain values: `terminal` shows them in a terminal, the macro `table` of templates/ on a page.

ReportTable("Prices", ("what", *numbers("time", "share"), "known from"), [("mm", "1 ms", "75%", "measured")])
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass


class Number(str):
    """The name of a column of numbers, which stand to the right."""


class Code(str):
    """The name of a column of layouts, which are not broken over lines."""


def numbers(*names: str) -> tuple[Number, ...]:
    return tuple(map(Number, names))


@dataclass(frozen=True)
class TableRow:
    """A row that is more than its cells."""

    cells: Sequence[str]
    strong: bool = False
    note: str = ""  # a remark on the row: the cell of a last column, or on a page a line below
    tag: str = ""  # beside the first cell
    kind: str = ""  # of op, collective or memory, which has a colour on a page
    share: float | None = None  # percent: the length of a bar on a page


@dataclass(frozen=True)
class ReportTable:
    """A table. frame, in a terminal: box, with lines; open, without; tight, without and narrow; pairs, of names and texts."""

    title: str
    columns: Sequence[str]  # names; Number and Code say how cells are shown
    rows: Sequence[Sequence[str] | TableRow]
    frame: str = "box"
    notes: str = ""  # the name of the column of the rows' notes
    alarm: bool = False  # what it lists should not be

    def full_rows(self) -> Iterator[TableRow]:
        return (row if isinstance(row, TableRow) else TableRow(row) for row in self.rows)


def by_kind(
    title: str, what: str, parts: Mapping[str, float], say: Callable[[float], str], colors: Mapping[str, str] | None = None
) -> ReportTable:  # fmt: skip
    """Seconds or bytes by kind, with a bar each. colors: the kinds whose colour they have, where it isn't their own."""
    total, colors = math.fsum(parts.values()), colors or {}
    rows = [
        TableRow((kind.replace("_", " "), say(part), share(part, total)), kind=colors.get(kind, kind), share=100 * part / (total or 1))
        for kind, part in parts.items()
    ]
    return ReportTable(title, ("what", *numbers(what, "share")), [*rows, TableRow(("together", say(total), ""), strong=True)])


def share(part: float, total: float) -> str:
    """`75%`, `<1%` where it would be rounded to 0, `-` of nothing."""
    if not total:
        return "-"
    percent = 100 * part / total
    return "<1%" if 0 < percent <= 0.5 else f"{percent:.0f}%"
