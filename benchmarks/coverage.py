"""Which models are understood: capture, plan on 8 and on 2x4 devices, verify on 2x2 with random layouts.

    python benchmarks/coverage.py [DIR] [--only NAME ...] [--random 3] [--set experts=batched_mm] [--json]

DIR holds one folder per Hugging Face model with its config.json (default: the two-layer ones that the tests use); ResNet,
U-Net, DLRM and a mixture of experts come from models/. Nothing is downloaded. One row per model and mode. unknown: ops that
no rule knows, by target. cpu: seconds of this process for capture and both plans, baselines left out. worst: the largest relative
error of any output or gradient over the plan and the random layouts, all ranks; a misplaced tensor makes the row fail.
"""

# ruff: noqa: E402  (the question of who is asking comes first)
if __name__ == "coverage":
    raise ImportError("this is a script; numba, imported by a script beside it, looks for the package of that name and can do without")

import argparse
import json
import sys
import time
from pathlib import Path

import torch

from autoshard import api
from autoshard.cli.arguments import parse_settings
from autoshard.cli.model import load_model
from autoshard.mesh import Mesh

ROOT = Path(__file__).parent.parent
HF = ROOT / "tests" / "data" / "hf"
OWN = ("dlrm", "moe", "resnet", "unet")
PLANNED, VERIFIED = ("8", "2x4"), (2, 2)
SHAPES = {"8": (8,), "2x4": (2, 4)}


def names(folder: Path = HF) -> list[str]:
    return sorted(path.parent.name for path in folder.glob("*/config.json")) + [*OWN]


def build(name: str, training: bool, folder: Path = HF, settings: dict | None = None):
    """(module, example inputs)"""
    if name in OWN:
        return load_model(f"{ROOT}/models/{name}.py:tiny", {"loss": training})
    return load_model(f"hf:{folder / name}", settings or {}, training=training)


def measure(name: str, training: bool, *, folder: Path = HF, random: int = 3, settings: dict | None = None) -> dict:
    """A row of the table."""
    module, example_inputs = build(name, training, folder, settings)
    row: dict = {"model": name, "mode": "training" if training else "inference"}
    began, unknown = time.process_time(), set()
    for mesh in PLANNED:
        solution = api.plan(module, example_inputs, Mesh.from_bandwidths(SHAPES[mesh]), training=training, baselines=False)
        row[f"status {mesh}"] = solution.status
        unknown |= {op["target"] for op in solution.replicated_ops}
    row |= {"nodes": len(solution.layouts), "signatures": solution.counts["distinct_signatures"], "unknown": sorted(unknown)}
    row["cpu_seconds"] = time.process_time() - began
    solution = api.plan(module, example_inputs, Mesh.from_bandwidths(VERIFIED), training=training, baselines=False)
    found = api.verify(module, example_inputs, solution, random=random)
    row["ok"] = found["ok"]
    row["worst_error"] = max(max(p["max_relative_error_outputs"], p["max_relative_error_gradients"]) for p in found["plans"])
    row["misplaced"] = sum(len(p["placement_mismatches"]) for p in found["plans"])
    return row


def attempt(name: str, training: bool, **options) -> dict:
    """As `measure`; what stops a model is its row."""
    try:
        return measure(name, training, **options)
    except ValueError as error:
        return {"model": name, "mode": "training" if training else "inference", "ok": False, "stopped": str(error)}


def line(row: dict) -> str:
    if "stopped" in row:
        return f"{row['model']:12} {row['mode']:9}  {row['stopped']}"
    return (
        f"{row['model']:12} {row['mode']:9} {row['nodes']:6} {row['signatures']:6} {row['status 8']:>8} {row['status 2x4']:>8} "
        f"{row['cpu_seconds']:6.1f} {'ok' if row['ok'] else 'WRONG':>6} {row['worst_error']:9.1e}  {', '.join(row['unknown']) or '-'}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=HF)
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--random", type=int, default=3)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    settings, rows = parse_settings(given.set), []
    if not given.json:
        print(f"{'model':12} {'mode':9} {'nodes':>6} {'signs':>6} {'8':>8} {'2x4':>8} {'cpu':>6} {'verify':>6} {'worst':>9}  unknown")
    for name in given.only or names(given.folder):
        for training in (False, True):
            rows.append(attempt(name, training, folder=given.folder, random=given.random, settings=settings))
            if not given.json:
                print(line(rows[-1]), flush=True)
    models = {row["model"] for row in rows}
    wrong = sorted({row["model"] for row in rows if not row["ok"]})
    if given.json:
        print(json.dumps({"rows": rows, "models": len(models), "wrong": wrong}, indent=1))
    else:
        print(f"{len(models)} models, {len(rows)} graphs; wrong or stopped: {', '.join(wrong) or 'none'}")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
