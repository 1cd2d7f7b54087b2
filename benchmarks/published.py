"""The table of published runs: its rows as columns (TABLE), which of them can be expressed, its cells and folds, and what is predicted for
them. Used by published_runs.py, fit_devices.py, planned_runs.py and the study long_context."""

from __future__ import annotations

import csv
import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from autoshard.cost import spread_of
from autoshard.devices import known_devices
from autoshard.launch.block_time import RECOMPUTED, Parts, RunConstants, block, of_each_kind
from autoshard.launch.blocks_of_stages import Stages, stages
from autoshard.launch.peak_memory import Memory, chance_to_fit, memory_of
from autoshard.launch.runs import PRECISIONS, TrainingRuns
from autoshard.launch.step_time import step_parts

# what can be left out of a step's seconds, for ablations (RunConstants.has)
EFFECTS = (
    "attention", "elementwise", "accumulation", "head", "tensor parallel", "context parallel", "recompute", "host",
    "bubble", "imbalance", "transfers", "fsdp", "gradients", "parameter gather", "optimizer", "fixed",
)  # fmt: skip
# column of TrainingRuns: its name in a table of published runs; and the software, the kind of device and its memory in bytes
TABLE = {
    "stack": "src", "layers": "L", "width": "h", "ffn": "ffn", "heads": "heads", "kv_heads": "kv", "head_dim": "head_dim", "vocab": "vocab",
    "tied": "tied", "gated": "gated", "positions": "pos", "seq": "seq", "microbatch": "mbs", "accumulated": "ga", "data": "dp",
    "sharing": "shard", "zero": "zero", "tensor": "tp", "sequence_parallel": "sp", "pipeline": "pp", "virtual": "vp", "context": "cp",
    "recompute": "rc", "precision": "prec", "compiled": "fused", "async_tensor": "asynctp",
    "device": "gpu", "per_node": "gpn", "network": "link_per_gpu", "memory": "gpu_mem",
}  # fmt: skip
WORDS = ("stack", "recompute", "precision", "device")
# what a source's figure of memory is: torchtitan logs max_reserved, the others max_allocated
FIGURES = {"torchtitan": "reserved"}
DEVICES = {"h100tt": "h100_500w"}  # the table's name of a part: ours
STACKS = {
    "vtrain_single": "vtrain", "vtrain_multi": "vtrain", "nanotron_tp": "nanotron", "oom_nanotron": "nanotron",
    "torchtitan": "torchtitan_2025",  # of December 2024 to June 2025
    "simumax": "megatron_core", "mcore": "megatron_core", "korthikanti": "megatron_2022", "mtnlg": "megatron_2022",
}  # fmt: skip
NUMBERS = [written for name, written in TABLE.items() if name not in WORDS]
FEWEST = 5  # rows of a source that counts in the mean of means


@dataclass(frozen=True)
class Table:
    """The expressible rows, in the file's order, and why the others are not."""

    rows: tuple[Mapping[str, str], ...]
    runs: TrainingRuns
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
    runs = runs_of(_named(row) for row in good)
    crashed = np.array([row["oom"] not in ("", "0") for row in good], dtype=bool)
    seconds = np.array([float(row["step"]) if row["step"] else np.nan for row in good])
    bytes = np.array([float(row["mem_gb"]) * 1e9 if row["mem_gb"] else np.nan for row in good])
    apart = np.array([row["suspect"] == "1" or row["pp_old"] == "1" for row in good], dtype=bool)
    source_of = np.array([_source(row) for row in good])
    cell = np.array([f"{name} {row['arch']} {row['gpus']}" for name, row in zip(source_of, good)])
    return Table(tuple(good), runs, source_of, seconds, bytes, crashed, apart, cell, counted)


def runs_of(rows: Iterable[Mapping[str, Any]]) -> TrainingRuns:
    """The runs of a table with the columns of TABLE; ValueError for a missing column or a number that is none."""
    table = list(rows)
    columns = {name: _column(table, written, name in WORDS) for name, written in TABLE.items()}
    devices = columns["data"] * columns["tensor"] * columns["pipeline"] * columns["context"]
    columns |= {name: np.array([float(row.get(name, 0)) for row in table]) for name in ("compiled_loss", "gather8", "qk_norm")}
    return TrainingRuns({**columns, "devices": devices, "global_batch": columns["accumulated"] * columns["microbatch"] * columns["data"]})


def _column(rows: list[Mapping[str, Any]], name: str, words: bool) -> np.ndarray:
    missing = [i for i, row in enumerate(rows) if name not in row]
    if missing:
        raise ValueError(f"row {missing[0]} has no column {name!r}; expected the columns {', '.join(TABLE.values())}")
    if words:
        return np.array([str(row[name]) for row in rows])
    try:
        return np.array([float(row[name]) for row in rows])
    except ValueError as error:
        raise ValueError(f"column {name!r} has a value that is no number: {error}") from error


def constants_of(runs: TrainingRuns, *, fitted: bool = True) -> RunConstants:
    """Of each run's device and software; with fitted=False from published figures of devices and kernels alone."""
    return RunConstants.of(runs.device, runs.stack, runs.precision, fitted=fitted)


def parts_of(runs: TrainingRuns, constants: RunConstants, split: Stages | None = None) -> Parts:
    """Seconds of a step of every run, by kind."""
    split = stages(runs, constants.stack.balanced > 0) if split is None else split
    return step_parts(runs, constants, split, *of_each_kind(block, runs, constants))


def step_seconds(runs: TrainingRuns, constants: RunConstants, split: Stages | None = None) -> np.ndarray:
    """Seconds of a step of every run."""
    return sum(parts_of(runs, constants, split).values())


def predicted_seconds(runs: TrainingRuns, *, fitted: bool = True) -> np.ndarray:
    """Seconds per step of every run."""
    return step_seconds(runs, constants_of(runs, fitted=fitted))


def interval(runs: TrainingRuns, seconds: np.ndarray, share: float = 0.8) -> tuple[np.ndarray, np.ndarray]:
    """Lowest and highest seconds between which `share` of measured runs are expected. ValueError unless 0 < share < 1."""
    if not 0 < share < 1:
        raise ValueError(f"an interval of a share {share} was asked for; expected a number between 0 and 1, for example 0.8")
    low, high = spread_of(runs.stack, share)
    return seconds * np.exp(low), seconds * np.exp(high)


def tokens_per_second(runs: TrainingRuns, seconds: np.ndarray) -> np.ndarray:
    """Per device."""
    return runs.global_batch * runs.seq / seconds / runs.devices


def predicted_memory(runs: TrainingRuns) -> Memory:
    return memory_of(runs, constants_of(runs))


def figure_of(memory: Memory, source: np.ndarray) -> np.ndarray:
    """The bytes that each row's source has measured."""
    kind = np.array([FIGURES.get(name, "allocated") for name in source.tolist()])
    return np.where(kind == "reserved", memory.reserved, memory.allocated)


def chance_to_run(runs: TrainingRuns, bytes: np.ndarray) -> np.ndarray:
    """The probability that a run that needs `bytes` of its device does not crash; it has a block for every stage, or it does."""
    return np.where(runs.pipeline < runs.layers, chance_to_fit(bytes, runs.memory, runs.stack), 0.0)


def _named(row: Mapping[str, str]) -> dict[str, str]:
    """The row with our names of its stack and device. torchtitan shards parameters over data and context parallel ranks, of which the table
    counts only the former."""
    named = {**row, "src": STACKS.get(row["src"], row["src"]), "gpu": DEVICES.get(row["gpu"], row["gpu"])}
    if row["prec"] == "fp8":
        named["prec"] = "fp8_rowwise" if row["rowwise"] == "1" else "mxfp8" if row["mx"] == "1" else "fp8"
    if row["src"] in ("torchtitan", "nemo", "bridge"):  # whose recipes gather float8 parameters; no row-wise ones
        named["gather8"] = str(int(named["prec"] in ("fp8", "mxfp8")))
    if row["src"] == "torchtitan":
        named["gpu_mem"] = "96e9" if row["gpu"] == "h100tt" else row["gpu_mem"]  # as the source says
        named["compiled_loss"] = str(int("202506" in row.get("source", "")))  # earlier runs compiled blocks alone
        named["zero"] = "2" if int(row["pp"]) > 1 else row["zero"]  # nothing is resharded after the forward of a pipeline
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
    if row["rc"] not in RECOMPUTED:
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


def folds(table: Table, count: int | None) -> np.ndarray:
    """A fold per row: whole cells of a source are dealt out in turn, in an order that depends on the cells' names alone; a fold per source
    with None."""
    if count is None:
        return np.unique(table.source, return_inverse=True)[1]
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
