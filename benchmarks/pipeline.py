"""Pipelines on 16 devices: the plan compared with equal stages and the data x tensor x pipeline grid, and the seconds of the search.

    python benchmarks/pipeline.py models [--only gpt2] [--json]

The argument is the folder with gpt2.py, llama.py and unet.py. Nodes of eight H100, two of them or as --devices says; CPU seconds are of
this process, by phase of the search with --json. No seconds for a way: none of its configurations fits, or could be the best.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from pathlib import Path

CASES = {
    "gpt2": ("gpt2", "small", {"batch": 64, "seq": 1024, "vocab": 50304}),
    "llama3_70b": ("llama", "llama3_70b", {}),
    "llama3_405b": ("llama", "llama3_405b", {}),
    "unet": ("unet", "base", {}),
}


def measured(name: str, devices: int) -> dict:
    from autoshard import Cluster, pipeline

    file, function, settings = CASES[name]
    module, inputs = getattr(importlib.import_module(file), function)(**settings)
    cpu, wall = time.process_time(), time.monotonic()
    best = pipeline(module, inputs, Cluster.of(devices))
    row = {"model": name, "devices": devices, "cpu_seconds": time.process_time() - cpu, "wall_seconds": time.monotonic() - wall}
    row |= {"step_seconds": best.seconds, "bound_seconds": best.bound, "stages": len(best.stages), "microbatches": best.microbatches}
    row |= {"schedule": best.schedule, "way": best.way, "peak_bytes": best.peak_bytes, "configurations": len(best.configurations)}
    row["seconds_spent"] = best.seconds_spent
    for way in ("planned", "equal", "grid"):
        row[f"best_{way}_seconds"] = min((c["seconds"] for c in best.configurations if c["way"] == way and c["fits"]), default=None)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, help="the folder with gpt2.py, llama.py and unet.py")
    parser.add_argument("--only", choices=sorted(CASES))
    parser.add_argument("--devices", type=int, default=16)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    if not (given.models / "gpt2.py").is_file():
        sys.exit(f"{given.models} has no gpt2.py; give the folder with the models")
    sys.path.insert(0, str(given.models))
    rows = [measured(name, given.devices) for name in ([given.only] if given.only else CASES)]
    if given.json:
        print(json.dumps({"rows": rows}))
        return
    print(f"{'model':<12}{'step':>9}{'bound':>9}{'equal':>9}{'grid':>9}  {'P':>2} {'K':>3} {'schedule':<17}{'cpu s':>7}")
    for r in rows:
        times = [r["step_seconds"], r["bound_seconds"], r["best_equal_seconds"], r["best_grid_seconds"]]
        said = "".join(f"{t * 1e3:>7.1f}ms" if t is not None else f"{'-':>9}" for t in times)
        print(f"{r['model']:<12}{said}  {r['stages']:>2} {r['microbatches']:>3} {r['schedule']:<17}{r['cpu_seconds']:>7.1f}")


if __name__ == "__main__":
    main()
