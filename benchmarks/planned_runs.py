"""Predict published training runs as plans are priced: each run's scheme pinned on the captured graph, its step the seconds of the plan
(serial), or of its time line (overlapped).

    PYTHONPATH=. python benchmarks/planned_runs.py RUNS.csv [--json] [--rows N] [--folds 5] [--write]

Of RUNS.csv (as for published_runs.py) count the runs that a plan can express: one pipeline stage, no context parallelism, 16-bit
matmuls, no or full recomputation, fused attention, not set apart. Runs of compiled or fused software are priced as `--compile` does. At
most N of each group of equal source, device, recomputation, use of tensor parallelism and of a compiler are priced (default 6), drawn by
their numbers. Constants of devices are fitted without the run's cell, in folds; links are the device file's and the run's adapters, of
which collectives are assumed to reach everything; nothing of the software is known to a plan. Models of 2 and 4 blocks are priced; the
step is linear in blocks and microbatches.

--write: `steps` of autoshard/cost/devices/*.json, their errors: of the device where FEWEST_CELLS of its cells were priced, else of all
devices.
"""

from __future__ import annotations

import argparse
import json
import sys
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from fit_devices import Fit, fitted, indices
from published import Table, constants_of, folds, read
from published_runs import percent, rows_of

from autoshard.baselines import baseline
from autoshard.capture import capture_deep
from autoshard.cost.devices import DeviceConstants
from autoshard.devices import DEVICE_FILES, DEVICES, Device, Kernels, device_file, known_devices
from autoshard.formulate import with_pins
from autoshard.graph import in_order
from autoshard.mesh import Mesh
from autoshard.planning.baselining import masks_of
from autoshard.planning.instance import instance_of
from autoshard.planning.options import Options, Stopwatch, checked_options
from autoshard.planning.ordering import order_for
from autoshard.planning.question import ModelGraphs, Question
from autoshard.planning.recomputing import with_recomputed_blocks
from autoshard.problem import usage_profile
from autoshard.simulate.timeline import timeline_of
from autoshard.solvers import solve
from autoshard.strategies import Keeping
from models import gpt2, llama

FEWEST_CELLS, SHARE = 6, 0.8
BLOCKS = (2, 4)  # of the models that are priced
ENDING = 100  # ops, fewer than those of a block's backward
Row = Mapping[str, str]


KINDS = ("serial", "overlapped")  # the seconds of a plan, in which nothing overlaps; its simulated time line


@dataclass(frozen=True)
class Priced:
    """Seconds of one pass over a microbatch with the update, one number for each of KINDS, and of the update; and the plan's peaks: of all,
    and of the last ENDING ops, when all gradients are there."""

    step: np.ndarray
    update: float
    bytes: np.ndarray


def expressible(table: Table) -> np.ndarray:
    runs, stack = table.runs, constants_of(table.runs).stack
    plain = (runs.pipeline == 1) & (runs.context == 1) & (runs.itemsize == 2) & (stack.flash > 0)
    recompute = np.isin(runs.recompute, ("none", "full"))
    zero = np.isin(runs.zero, (0, 1, 3))
    known = (runs.queries == runs.width) & ((runs.gated > 0) | ((runs.kv_heads == runs.heads) & (runs.ffn == 4 * runs.width)))
    return plain & recompute & zero & known & ~table.crashed & ~table.apart


def drawn(table: Table, most: int) -> np.ndarray:
    """At most so many rows of each group."""
    groups: dict[tuple, list[int]] = {}
    for i in np.flatnonzero(expressible(table)):
        runs = table.runs
        key = (table.source[i], runs.device[i], runs.recompute[i], runs.tensor[i] > 1, runs.compiled[i] > 0)
        groups.setdefault(key, []).append(i)
    chosen = [sorted(rows, key=lambda i: zlib.crc32(table.rows[i]["rid"].encode()))[:most] for rows in groups.values()]
    return np.array(sorted(i for rows in chosen for i in rows), dtype=int)


def model_of(row: Row, blocks: int, batch: int) -> tuple[Any, Any]:
    number = {name: int(float(row[name])) for name in ("heads", "kv", "h", "ffn", "vocab", "seq")}
    dtype = {"bf16": "bfloat16", "fp16": "float16"}[row["prec"]]
    common: dict[str, Any] = {"layers": blocks, "heads": number["heads"], "width": number["h"], "vocab": number["vocab"]}
    common |= {"batch": batch, "seq": number["seq"], "loss": True, "dtype": dtype}
    if float(row["gated"]):
        return llama.build(kv_heads=number["kv"], hidden=number["ffn"], qk_norm=row.get("qk_norm") == "1", **common)
    return gpt2.build(positions=number["seq"], **common)


def scheme_of(row: Row) -> str:
    fully, several = row["zero"] == "3", row["dp"] != "1"
    if row["cp"] != "1":
        return "context_parallel_ring"
    if row["tp"] == "1":
        return "fsdp" if fully else "data_parallel"
    return "megatron_fsdp" if fully and several else "megatron_sp" if row["sp"] == "1" else "megatron"


def mesh_of(row: Row, device: Device, link: float) -> Mesh:
    data, tensor, per_node = (int(float(row[name])) for name in ("dp", "tp", "gpn"))
    data *= int(float(row["cp"]))
    devices, per_node = data * tensor, min(per_node, data * tensor)
    shape = (data, tensor) if tensor > 1 else (devices,)  # launchers have one group of all, so one ring, also beyond a node
    return Mesh.from_bandwidths(
        tuple(n for n in shape if n > 1) or (1,), devices_per_node=per_node, device=device, intra_node_bandwidth=link,
        inter_node_bandwidth=float(row["link_per_gpu"]) * per_node,
    )  # fmt: skip


def priced(row: Row, mesh: Mesh, blocks: int, keeping: Keeping = "matmuls") -> Priced:
    """keeping: what a compiled step keeps for its backward. ValueError where the scheme's layouts forbid each other."""
    model, inputs = model_of(row, blocks, int(float(row["mbs"])) * int(float(row["dp"])))
    recompute = "all" if row["rc"] == "full" else 0
    asked = {"training": True, "master_weights": True, "recompute": recompute, "compiled": float(row["fused"]) > 0}
    options = checked_options(Options, asked)
    graph, depth = capture_deep(model, inputs, training=True)
    if row["cp"] != "1" and (order := order_for(graph, mesh)) is not None:
        graph, depth = in_order(graph, order), replace(depth, shallow=None)
    context = with_recomputed_blocks(Question(ModelGraphs(graph, depth.shallow), mesh, options, Stopwatch(None)), keeping)
    instance = instance_of(context)
    masks = masks_of(instance.formulated, baseline(context.graph, mesh, instance.formulated.candidates, scheme_of(row)))
    pinned = with_pins(instance.formulated, masks)
    answer = solve(replace(pinned, usage_limit=None), gap=1e-4, time_limit=5.0)
    if answer.choice is None:
        raise ValueError(f"the layouts of {scheme_of(row)} forbid each other")
    line = timeline_of(instance.formulated, answer.choice, join=True)
    update = sum(task.seconds for task in line.tasks if task.kind == "optimizer")
    times, held = usage_profile(instance.formulated.problem, answer.choice)
    return Priced(np.array([answer.cost, line.seconds]), update, np.array([held.max(), held[times > times.max() - ENDING].max()]))


def step_seconds(row: Row, mesh: Mesh) -> np.ndarray:
    """One number for each of KINDS."""
    few, more = (priced(row, mesh, blocks) for blocks in BLOCKS)
    times = (int(float(row["L"])) - BLOCKS[0]) / (BLOCKS[1] - BLOCKS[0])
    step, update = few.step + times * (more.step - few.step), few.update + times * (more.update - few.update)
    return step + (int(float(row["ga"])) - 1) * (step - update)


def device_of(name: str, constants: DeviceConstants, flash: np.ndarray, i: int) -> Device:
    """The device with the constants of row i, and the attention that it ran."""
    file = device_file(name)
    training = {"training": {"measured": float(constants.training[i])}}
    given = {**file["given"], "sdpa": max(file["given"]["flash2"] / flash[i], 1.0)}
    return replace(DEVICES[name], kernels=Kernels.of_file({**file, "given": given, "constants": {**file["constants"], **training}}, name))


def fitted_devices(table: Table, count: int) -> DeviceConstants:
    """Of every row's device: fitted without the row's fold, or with count = 0 those of the device files."""
    if not count:
        return constants_of(table.runs).device
    fold, columns = folds(table, count), {name: np.zeros(len(table)) for name in vars(constants_of(table.runs).device)}
    for k in range(count):
        fit, part = fitted(table[fold != k], Fit.none(table)), table[fold == k]
        constants = fit.constants(constants_of(part.runs, fitted=False), *indices(part, fit))
        for name, column in columns.items():
            column[fold == k] = getattr(constants.device, name)
    return DeviceConstants(**columns)


def predicted(table: Table, count: int, most: int) -> tuple[Table, np.ndarray, np.ndarray]:
    """The rows drawn, their seconds (a column for each of KINDS) and their folds."""
    rows, constants, flash = drawn(table, most), fitted_devices(table, count), constants_of(table.runs).stack.flash
    seconds = np.full((len(rows), len(KINDS)), np.nan)
    for n, i in enumerate(rows):
        print(f"{n + 1} of {len(rows)}: {table.cell[i]}", file=sys.stderr, flush=True)
        device = device_of(str(table.runs.device[i]), constants, flash, i)
        link = float(constants.link_bandwidth[i] * constants.link[i])
        try:
            seconds[n] = step_seconds(table.rows[i], mesh_of(table.rows[i], device, link))
        except ValueError as why:
            print(f"left out: {table.cell[i]}: {why}", file=sys.stderr)
    kept = ~np.isnan(seconds[:, 0])
    return table[rows[kept]], seconds[kept], folds(table, max(count, 2))[rows[kept]]


def errors_of(table: Table, seconds: np.ndarray, mask: np.ndarray) -> dict[str, Any]:
    """As mesh.TestedSteps: every cell weighs the same; ends widened by one cell's share, as in fit_devices."""
    ratio, cell = np.log(table.seconds / seconds)[mask], table.cell[mask]
    weight = np.array([1 / (cell == name).sum() for name in cell])
    order = np.argsort(ratio)
    middle = (np.cumsum(weight[order]) - weight[order] / 2) / weight.sum()
    low, median, high = np.interp(((1 - SHARE) / 2, 0.5, (1 + SHARE) / 2), middle, ratio[order])
    wider = 1 + 1 / len(set(cell))
    ends = [float(f"{np.exp(median + (end - median) * wider):.4g}") for end in (low, high)]
    error = float(f"{np.median(np.abs(np.exp(-ratio) - 1)):.3g}")
    devices = ", ".join(sorted(set(table.runs.device[mask].tolist())))
    return {"devices": devices, "runs": int(mask.sum()), "error": error, "low": ends[0], "high": ends[1]}


def steps_of(table: Table, seconds: np.ndarray) -> dict[str, dict[str, Any]]:
    """By device, for each of KINDS."""
    steps = {}
    for name in known_devices():
        own = table.runs.device == name
        counted = own if len(set(table.cell[own])) >= FEWEST_CELLS else np.ones(len(table), dtype=bool)
        steps[name] = {kind: errors_of(table, seconds[:, k], counted) for k, kind in enumerate(KINDS)}
    return steps


def coverage(table: Table, seconds: np.ndarray, fold: np.ndarray) -> float:
    """The mean share of cells inside the interval that the other folds' errors give."""
    inside, ratio = np.zeros(len(table), dtype=bool), table.seconds / seconds
    for k in sorted(set(fold)):
        steps = errors_of(table, seconds, fold != k)
        inside |= (fold == k) & (ratio >= steps["low"]) & (ratio <= steps["high"])
    return float(np.mean([inside[table.cell == cell].mean() for cell in sorted(set(table.cell))]))


def report(table: Table, seconds: np.ndarray) -> dict[str, Any]:
    error = seconds / table.seconds - 1
    masks = {source: table.source == source for source in sorted(set(table.source))}
    return {source: rows_of(error[mask], seconds[mask], table.seconds[mask]) for source, mask in masks.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rows", type=int, default=6)
    parser.add_argument("--folds", type=int, default=5)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    table, seconds, fold = predicted(read(arguments.runs), arguments.folds, arguments.rows)
    record = {
        "sources": {kind: report(table, seconds[:, k]) for k, kind in enumerate(KINDS)},
        "steps": steps_of(table, seconds),
        "coverage_of_80_percent": {kind: coverage(table, seconds[:, k], fold) for k, kind in enumerate(KINDS)},
    }
    if arguments.write:
        for name, steps in record["steps"].items():
            path = DEVICE_FILES / f"{name}.json"
            path.write_text(json.dumps({**json.loads(path.read_text()), "steps": steps}, indent=1) + "\n")
    if arguments.json:
        print(json.dumps(record))
        return
    for kind in KINDS:
        print(f"{kind:24} {'n':>4}", *(f"{title:>7}" for title in ("mean", "median", "p90", "bias")))
        for name, row in record["sources"][kind].items():
            print(f"{name:24} {row['n']:4d}", *(percent(row[key]) for key in ("mean", "median", "p90", "bias")))
        print(f"inside the 80 % interval of the other folds: {percent(record['coverage_of_80_percent'][kind])} of the cells")
    for name, steps in record["steps"].items():
        print(f"{name:10} {steps}")


if __name__ == "__main__":
    main()
