"""Predicted peak memory against the peak of the plan's own program: one rank under torch's MemTracker, on fake tensors.

    python benchmarks/memory.py [DIR] [--only NAME ...] [--json]

DIR holds the models' files (default: models/). Each model is planned for training with AdamW on 8 and on 2x4 devices; once without a
memory limit, once with 85 % of the peak of the first plan (or 2 % more than the smallest limit that works, where that is more). The
program of rank 0 (`lower`) then runs forward and backward with its real collectives' shapes, nothing computed; parameters, inputs and
the optimizer's states are there throughout, gradients stay once they are complete. measured: MemTracker's peak. A row fails when
prediction and measurement are more than 10 % apart, or when a plan under a limit exceeds it. The first rank's parts are the fullest.
"""

# ruff: noqa: E402  (its own folder has to leave sys.path first)
import argparse
import json
import sys
import time
from pathlib import Path

sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != Path(__file__).parent]

import torch
from torch._subclasses import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from autoshard import api
from autoshard.capture import capture
from autoshard.cli.model import load_model
from autoshard.cost import optimizer_state_bytes
from autoshard.graph import Graph
from autoshard.lower.collectives import Groups
from autoshard.lower.program import lower
from autoshard.lower.run import run_rank
from autoshard.mesh import Mesh
from autoshard.solution import Solution

ROOT = Path(__file__).parent.parent
MODELS: dict[str, tuple[str, dict]] = {  # small enough to be quick, large enough for activations and parameters to matter
    "mlp": ("mlp.py:mlp", {"batch": 8192}),
    "gpt2": ("gpt2.py:small", {"layers": 4, "batch": 64, "seq": 1024, "vocab": 50304}),
    "llama": ("llama.py:llama3_8b", {"layers": 3}),
    "bert": ("bert.py:base", {"layers": 4, "vocab": 30528}),
    "moe": ("moe.py:moe", {}),
    "unet": ("unet.py:base", {}),
    "resnet": ("resnet.py:resnet18", {}),
}
MESHES = {"8": (8,), "2x4": (2, 4)}
TOLERANCE, TIGHT = 0.10, 0.85


def measured_peak(graph: Graph, solution: Solution, *, optimizer: str = "adamw") -> int:
    """Bytes that one rank holds at most while it runs the plan's program."""
    program = lower(graph, solution.layouts, solution.results, solution.mesh)
    mesh = solution.mesh
    groups = Groups(tuple(f"fake_{k}" for k in range(len(mesh.shape))), tuple(mesh.shape))
    second = {name for name, _ in graph.tied}
    trained = {r.name for r in graph.results if r.kind == "gradient" and r.value is not None} & set(graph.parameters)
    with FakeTensorMode():
        loads = [load for load in program.loads if load.name not in second]
        values = {load.name: torch.empty(load.slot.shape, dtype=getattr(torch, load.slot.dtype)) for load in loads}
        kept = [int(optimizer_state_bytes(values[name].numel(), optimizer)) for name in sorted(trained)]
        states = [torch.empty(size, dtype=torch.uint8) for size in kept]
        values |= {name: values[held] for name, held in graph.tied}
        coordinate = tuple(torch.zeros((), dtype=torch.int64) for _ in mesh.shape)
        tracker = MemTracker()
        tracker.track_external(*values.values(), *states)
        with tracker:
            run_rank(program, values, groups, coordinate, (0,) * len(mesh.shape))  # the first rank's parts are the fullest
        peak = tracker.get_tracker_snapshot("peak")
    return max(snapshot["Total"] for device, snapshot in peak.items() if device.type != "meta")


def planned(module, example_inputs, mesh: str, limit: float | None) -> Solution:
    gap = 0.001 if limit is None else 0.01
    devices = Mesh.from_bandwidths(MESHES[mesh])
    return api.plan(module, example_inputs, devices, training=True, memory_limit=limit, baselines=False, gap=gap, time_limit=60)


def measure(name: str, mesh: str, folder: Path, limits: bool = True) -> list[dict]:
    """A row without a limit, and one with."""
    file, settings = MODELS[name]
    module, example_inputs = load_model(f"{folder}/{file}", settings)
    graph = capture(module, example_inputs, training=True)
    rows: list[dict] = []
    for share in (None, TIGHT) if limits else (None,):
        began = time.process_time()
        limit = None if share is None else share * rows[0]["predicted_bytes"]
        row: dict = {"model": name, "mesh": mesh, "limit_bytes": limit}
        try:
            solution = planned(module, example_inputs, mesh, limit)
        except api.Infeasible as error:  # then the smallest limit that is said to work, and a little
            assert error.smallest_limit is not None
            rows[0]["smallest_limit_bytes"] = error.smallest_limit[1]
            row["limit_bytes"] = limit = 1.02 * error.smallest_limit[1]
            solution = planned(module, example_inputs, mesh, limit)
        measured = measured_peak(graph, solution)
        ratio = solution.peak_bytes / measured
        fits = limit is None or measured <= limit
        row |= {"status": solution.status, "predicted_bytes": solution.peak_bytes, "measured_bytes": measured, "ratio": ratio}
        rows.append({**row, "ok": abs(ratio - 1) <= TOLERANCE and fits, "fits": fits, "cpu_seconds": time.process_time() - began})
    return rows


def line(row: dict) -> str:
    limit = "-" if row["limit_bytes"] is None else f"{row['limit_bytes'] / 1e9:.3f}"
    head = f"{row['model']:8} {row['mesh']:5} {limit:>10} {row['status']:>10}"
    return (
        f"{head} {row['predicted_bytes'] / 1e9:>12.3f} {row['measured_bytes'] / 1e9:>12.3f} {row['ratio']:>7.3f} "
        f"{'ok' if row['ok'] else 'WRONG':>6} {row['cpu_seconds']:>7.1f}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "models")
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    if not given.json:
        print(f"{'model':8} {'mesh':5} {'limit GB':>10} {'status':>10} {'predicted':>12} {'measured':>12} {'ratio':>7} {'':6} {'CPU s':>7}")
    for name in given.only or MODELS:
        for mesh in MESHES:
            for row in measure(name, mesh, given.folder):
                rows.append(row)
                if not given.json:
                    print(line(row), flush=True)
    wrong = sum(not row["ok"] for row in rows)
    if given.json:
        print(json.dumps({"rows": rows, "tolerance": TOLERANCE, "wrong": wrong}))
    else:
        print(f"{len(rows)} plans, {wrong} outside of 10 % or over their limit")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
