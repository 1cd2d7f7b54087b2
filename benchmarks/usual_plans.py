"""Our plan beside the usual ones: seconds of a training step under the same prices, as a table and as README's picture.

    python benchmarks/usual_plans.py [--out docs/usual_plans.svg]

Each model is trained in bfloat16 with AdamW on nodes of 8 H100 (80 GB, 400 Gbit/s per device between nodes, as DGX H100). The usual plans
are those of autoshard.baselines, each completed with the best layouts for what its rule leaves open; what does not fit has no bar.
Seconds are those of the time line, in which collectives run beside kernels. `bound` is proven: no plan of this space takes less under these
prices. `low` and `high`: between these 80 % of published training steps were, times what was predicted for them.
"""

import argparse
import math
import sys
import time
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import autoshard  # noqa: E402
from autoshard.units import seconds as duration  # noqa: E402
from models import gpt2, llama, moe  # noqa: E402

CASES = {  # name: (model, mesh, options of plan)
    "GPT-2 small, 8 GPUs": (partial(gpt2.small, batch=64, dtype="bfloat16"), (8,), {}),
    "Llama-3 8B, 16 GPUs": (partial(llama.llama3_8b, batch=16), (2, 8), {"recompute": "all"}),
    "Llama-3 8B, 64 GPUs": (partial(llama.llama3_8b, batch=64), (8, 8), {"recompute": "all"}),
    "Llama-3 70B, 128 GPUs": (partial(llama.llama3_70b, batch=128), (16, 8), {"recompute": "all"}),
    "mixture of experts, 16 GPUs": (partial(moe.moe, dtype="bfloat16"), (2, 8), {}),
}
INTRA, INTER = 450e9, 400e9  # bytes/s: per device on NVLink, per node between nodes
MEMORY = 80e9
OURS = ("autoshard", "bound", "low", "high")


def planned(name: str) -> dict[str, float]:
    """Seconds per step of every plan that fits, of ours, and the bound."""
    build, shape, options = CASES[name]
    mesh = autoshard.Mesh.from_bandwidths(shape, intra_node_bandwidth=INTRA, inter_node_bandwidth=INTER, device="h100", devices_per_node=8)
    solution = autoshard.plan(*build(), mesh, training=True, memory_limit=MEMORY, gap=1e-3, time_limit=3600, **options)
    usual = {key: found["step_seconds"] for key, found in solution.baselines.items() if fits(found)}
    low, high = solution.interval or (math.nan, math.nan)
    return {**usual, "autoshard": solution.objective_seconds, "bound": solution.objective_bound, "low": low, "high": high}


def fits(found: dict) -> bool:
    return found.get("cost_seconds") is not None and math.isfinite(found["cost_seconds"]) and (found.get("peak_bytes") or 0) <= MEMORY


def draw(rows: dict[str, dict[str, float]], path: str) -> None:
    """Per model a group of bars, each relative to our plan's seconds."""
    from matplotlib.figure import Figure

    from autoshard.report.figures import save

    figure = Figure(figsize=(8, 0.7 + 0.95 * len(rows)), layout="constrained")
    axes = figure.subplots()
    height = 0.0
    for name, row in reversed(rows.items()):
        ours = row["autoshard"]
        bars = sorted(((seconds, key) for key, seconds in row.items() if key not in OURS), reverse=True)[-4:]
        for seconds, key in [*bars, (ours, "autoshard")]:
            axes.barh(height, seconds / ours, color="#4c6fff" if key == "autoshard" else "#c3c8d4", height=0.8)
            label = f"{key.replace('_', ' ')}  {duration(seconds)}" + ("" if key == "autoshard" else f"  ({seconds / ours:.2f}x)")
            axes.text(0.02, height, label, va="center", fontsize=7.5, color="white" if key == "autoshard" else "#20242c")
            height += 0.85
        spread = [[1 - row["low"] / ours], [row["high"] / ours - 1]]
        axes.errorbar([1.0], [height - 0.85], xerr=spread, color="#20242c", lw=0.8, capsize=2)
        axes.plot([row["bound"] / ours] * 2, [height - 0.85 * (len(bars) + 1) - 0.3, height - 0.55], color="#c0392b", lw=1.2)
        axes.text(0, height - 0.2, name, fontsize=9, weight="bold", va="center")
        height += 1.0
    axes.set_xlim(0, max(min(max(r.values()) / r["autoshard"], 3) for r in rows.values()) + 0.1)
    axes.set_yticks([])
    words = "step time, relative to autoshard's plan; red: no plan is faster (proven); whisker: 80 % of published steps"
    axes.set_xlabel(words, fontsize=8)
    axes.spines[["left", "right", "top"]].set_visible(False)
    save(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="a picture: .svg or .png")
    parser.add_argument("--only", help="cases whose name holds this")
    options = parser.parse_args()
    rows = {}
    for name in CASES:
        if options.only and options.only not in name:
            continue
        began = time.process_time()
        rows[name] = planned(name)
        said = "  ".join(f"{key} {1e3 * seconds:.5g}" for key, seconds in rows[name].items())
        print(f"{name}: {said} ms; planned in {time.process_time() - began:.1f} CPU s", flush=True)
    if options.out:
        draw(rows, options.out)


if __name__ == "__main__":
    main()
