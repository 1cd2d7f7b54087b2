"""The objective "overlapped" against "serial": models x meshes x links x microbatches, each planned both ways and simulated.

    python benchmarks/overlapped.py models [--only NAME ...] [--json]

Per cell: the simulated seconds of the serial plan and of the overlapped one, by how much the latter is shorter, the bound on every time
line, its gap, and CPU seconds of both searches (capture left out: cells of one model share it). It is ok if no overlapped plan is slower
than the serial one, a quarter of the cells gain 3 %, and every bound is below its seconds; the aim for the median gap is 10 %.
"""

import argparse
import json
import statistics
import sys
import time
from functools import cache
from pathlib import Path

from autoshard.capture import capture_deep
from autoshard.cli.model import load_model
from autoshard.mesh import Mesh
from autoshard.planning.options import Options, Stopwatch
from autoshard.planning.plan import plan_graph
from autoshard.planning.question import ModelGraphs, Question
from autoshard.simulate.from_solution import formulation_of_solution
from autoshard.simulate.timeline import timeline_of
from autoshard.solution import replay

ROOT = Path(__file__).parent.parent
LLAMA, GPT2 = ("llama.py:llama3_8b", {"layers": 4, "batch": 16}), ("gpt2.py:small", {"layers": 4, "batch": 512, "vocab": 50304})
BERT, MOE = ("bert.py:base", {"layers": 4, "batch": 128}), ("moe.py:moe", {"layers": 2})
MLP = ("mlp.py:mlp", {"batch": 8192, "width": 4096})
FEW = ("gpt2.py:small", {"layers": 4, "batch": 128, "vocab": 50304})  # tokens per device
MODELS = {"llama": LLAMA, "gpt2": GPT2, "few": FEW, "bert": BERT, "moe": MOE, "mlp": MLP, "resnet": ("resnet.py:resnet18", {})}
CELLS = (  # model, mesh, bytes per second of a node's link, microbatches
    ("gpt2", (2, 8), 400e9, 1), ("gpt2", (2, 8), 100e9, 1), ("gpt2", (2, 8), 25e9, 1), ("gpt2", (2, 8), 100e9, 4), ("gpt2", (8,), 400e9, 1),
    ("few", (2, 8), 400e9, 1), ("few", (2, 8), 100e9, 1), ("few", (4, 4), 100e9, 1), ("few", (2, 8), 100e9, 4),
    ("llama", (2, 8), 400e9, 1), ("llama", (2, 8), 100e9, 1), ("llama", (2, 8), 100e9, 4), ("llama", (8,), 400e9, 1),
    ("llama", (4, 4), 100e9, 1),
    ("bert", (2, 8), 400e9, 1), ("bert", (2, 8), 100e9, 1), ("bert", (2, 8), 100e9, 4), ("bert", (8,), 400e9, 1),
    ("bert", (4, 4), 100e9, 1),
    ("moe", (2, 8), 400e9, 1), ("moe", (2, 8), 100e9, 1), ("moe", (8,), 400e9, 1), ("moe", (2, 8), 100e9, 4),
    ("mlp", (2, 8), 100e9, 1), ("mlp", (2, 8), 400e9, 1), ("mlp", (2, 8), 100e9, 4), ("mlp", (8,), 400e9, 1),
    ("resnet", (8,), 400e9, 1), ("resnet", (2, 8), 100e9, 1),
)  # fmt: skip
GAP = 1e-3
GAIN, SHARE = 0.03, 0.25


@cache
def captured(folder: Path, model: str):
    path, settings = MODELS[model]
    return capture_deep(*load_model(f"{folder}/{path}", settings), training=True)


def measure(folder: Path, model: str, shape: tuple[int, ...], link: float, m: int) -> dict:
    graph, depth = captured(folder, model)
    mesh = Mesh.from_bandwidths(shape, inter_node_bandwidth=link)
    row: dict = {}
    for objective in ("serial", "overlapped"):
        began = time.process_time()
        options = Options(training=True, objective=objective, microbatches=m, gap=GAP, accepted=(0.01, 60.0), baselines=False)
        solution = plan_graph(Question(ModelGraphs(graph, depth.few_layers), mesh, options, Stopwatch(None)))
        row[f"{objective}_cpu_seconds"] = time.process_time() - began
        program = formulation_of_solution(replay(solution, graph).checked(), solution)
        row[f"{objective}_seconds"] = timeline_of(*program, join=True).seconds
    row |= {"bound_seconds": solution.objective_bound, "gap": solution.objective_gap}
    return {**row, "gain": 1 - row["overlapped_seconds"] / row["serial_seconds"]}


def name_of(model: str, shape: tuple[int, ...], link: float, m: int) -> str:
    return f"{model} {'x'.join(map(str, shape))} {link / 1e9:.0f}GB/s m{m}"


def line(row: dict) -> str:
    seconds = " ".join(f"{row[key] * 1e3:>10.3f}" for key in ("serial_seconds", "overlapped_seconds", "bound_seconds"))
    searched = " ".join(f"{row[f'{objective}_cpu_seconds']:>8.1f}" for objective in ("serial", "overlapped"))
    return f"{row['cell']:24} {seconds} {row['gain']:>7.1%} {row['gap']:>7.1%} {searched}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "models")
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    rows = []
    if not given.json:
        print(f"{'':24} {'serial ms':>10} {'overlapped':>10} {'bound':>10} {'gain':>7} {'gap':>7} {'CPU s':>8} {'CPU s':>8}")
    for cell in CELLS:
        if given.only is None or any(part in name_of(*cell) for part in given.only):
            rows.append({"cell": name_of(*cell), **measure(given.folder, *cell)})
            if not given.json:
                print(line(rows[-1]), flush=True)
    never_slower = all(row["overlapped_seconds"] <= row["serial_seconds"] * (1 + 1e-9) for row in rows)
    below = all(row["bound_seconds"] <= min(row["serial_seconds"], row["overlapped_seconds"]) * (1 + 1e-9) for row in rows)
    gained, gap = sum(row["gain"] >= GAIN for row in rows), statistics.median(row["gap"] for row in rows)
    ok = never_slower and below and gained >= SHARE * len(rows)
    if given.json:
        print(json.dumps({"rows": rows, "gained": gained, "median_gap": gap, "ok": ok}))
    else:
        print(f"{len(rows)} cells, {gained} gain {GAIN:.0%} or more, median gap {gap:.1%}")
        print(f"overlapped never slower: {never_slower}; every bound below: {below}")
    return not ok


if __name__ == "__main__":
    sys.exit(main())
