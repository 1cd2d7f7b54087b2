"""The table of published runs: its rows as recipes, which of them can be expressed, and its cells and folds. Used by published_runs.py and
fit_devices.py."""

from __future__ import annotations

import csv
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from autoshard.mesh import known_devices
from autoshard.recipes import RECOMPUTE, Recipes
from autoshard.recipes.columns import PRECISIONS, TABLE, WORDS

DEVICES = {"h100tt": "h100_500w"}  # the table's name of a part: ours
STACKS = {
    "vtrain_single": "vtrain", "vtrain_multi": "vtrain", "nanotron_tp": "nanotron", "oom_nanotron": "nanotron",
    "simumax": "megatron_core", "mcore": "megatron_core", "korthikanti": "megatron_2022", "mtnlg": "megatron_2022",
}  # fmt: skip
NUMBERS = [written for name, written in TABLE.items() if name not in WORDS]
FEWEST = 5  # rows of a source that counts in the mean of means


@dataclass(frozen=True)
class Table:
    """The expressible rows, in the file's order, and why the others are not."""

    rows: tuple[Mapping[str, str], ...]
    runs: Recipes
    source: np.ndarray  # names
    seconds: np.ndarray  # measured; nan for a crashed run
    bytes: np.ndarray  # measured; nan where unknown
    crashed: np.ndarray  # bool
    apart: np.ndarray  # bool: suspect, or of the old pipeline code
    cell: np.ndarray  # "source model devices"
    inexpressible: dict[str, int]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, mask: np.ndarray) -> Table:
        rows = tuple(row for row, kept in zip(self.rows, mask) if kept)
        columns = {name: getattr(self, name)[mask] for name in ("runs", "source", "seconds", "bytes", "crashed", "apart", "cell")}
        return replace(self, rows=rows, **columns)


def read(path: Path, *, source: str | None = None, limit: int | None = None) -> Table:
    with path.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if source in (None, row["src"], _source(row))][:limit]
    reasons = [reason(row) for row in rows]
    good = [row for row, why in zip(rows, reasons) if not why]
    counted: dict[str, int] = {}
    for why in filter(None, reasons):
        counted[why] = counted.get(why, 0) + 1
    recipes = Recipes.of_table(_named(row) for row in good)
    crashed = np.array([row["oom"] not in ("", "0") for row in good], dtype=bool)
    seconds = np.array([float(row["step"]) if row["step"] else np.nan for row in good])
    bytes = np.array([float(row["mem_gb"]) * 1e9 if row["mem_gb"] else np.nan for row in good])
    apart = np.array([row["suspect"] == "1" or row["pp_old"] == "1" for row in good], dtype=bool)
    source_of = np.array([_source(row) for row in good])
    cell = np.array([f"{name} {row['arch']} {row['gpus']}" for name, row in zip(source_of, good)])
    return Table(tuple(good), recipes, source_of, seconds, bytes, crashed, apart, cell, counted)


def _named(row: Mapping[str, str]) -> dict[str, str]:
    """The row with our names of its stack and device. torchtitan shards parameters over data and context parallel ranks, of which the table
    counts only the former."""
    named = {**row, "src": STACKS.get(row["src"], row["src"]), "gpu": DEVICES.get(row["gpu"], row["gpu"])}
    if row["src"] == "torchtitan":
        named["shard"] = str(int(row["shard"]) * int(row["cp"] or 1))
    return named


def reason(row: Mapping[str, str]) -> str:
    """Why a row can't be expressed; empty where it can."""
    unknown = [name for name in NUMBERS if not _is_number(row[name])]
    if unknown:
        return f"no {', '.join(unknown)}"
    device = DEVICES.get(row["gpu"], row["gpu"])
    if device not in known_devices():
        return f"device {device} has no constants"
    if row["prec"] not in PRECISIONS:
        return f"precision {row['prec']}"
    if row["rc"] not in RECOMPUTE:
        return f"recomputation {row['rc']}"
    if int(float(row["ep"] or 1)) > 1:
        return "experts"
    degrees = np.prod([int(float(row[name])) for name in ("dp", "tp", "pp", "cp")])
    if degrees != int(float(row["gpus"])):
        return "degrees do not multiply to the number of devices"
    return ""


def _source(row: Mapping[str, str]) -> str:
    """nanotron's crashed runs are of the same source as those that ran."""
    return "nanotron" if row["src"] == "oom_nanotron" else row["src"]


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def folds(table: Table, count: int) -> np.ndarray:
    """A fold per row: whole cells of a source are dealt out in turn, in an order that depends on the cells' names alone."""
    fold = np.zeros(len(table), dtype=int)
    for name in sorted(set(table.source)):
        cells = sorted(set(table.cell[table.source == name]), key=lambda cell: (zlib.crc32(cell.encode()), cell))
        for i, cell in enumerate(cells):
            fold[table.cell == cell] = (i + zlib.crc32(name.encode())) % count
    return fold


def by_source(table: Table, counted: np.ndarray) -> dict[str, np.ndarray]:
    """Masks of the sources' rows among `counted`."""
    names: Sequence[str] = sorted(set(table.source))
    return {name: (table.source == name) & counted for name in names}
