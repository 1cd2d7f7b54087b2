"""The simulator against published figures, real runs and the clock.

    python benchmarks/simulate.py DATA [--deep] [--layers 126] [--json]

DATA: a folder with figure3.json, figure4_grid.json (figures published by DistIR) and real_vs_simulated_mlp.csv (its real runs, ms), as in
tests/data/distir.

    figure 3      largest relative error of 40 speed-ups, under the published constants and under those with correct units
    figure 4      the same of the throughputs of 111 configurations, of those with D = 1 and of the others, against what was published (ref)
                  and what the published code gives (got); configurations per CPU second, building included, nothing cached
    real runs     held-out mean error of calibrated rates, 3 folds in order and over ten shuffles; rank correlation
    --deep        a plan of Llama 3 with 405B's layers on 16 x 8 (Megatron with sequence parallelism): CPU seconds from Graph and Solution
                  to seconds, peak and critical path; capturing and planning are not counted
"""

# ruff: noqa: E402  (its own folder has to leave sys.path first)
import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np
from scipy.stats import spearmanr

sys.path.insert(0, str(Path(__file__).parent.parent))  # where benchmarks/ and models/ lie
from autoshard.simulate.degrees import Parallel
from autoshard.simulate.distir import DISTIR_83D7FC3, DISTIR_3386EDC, MLP, step_seconds
from benchmarks import mlp_runs

DEVICES = (2, 4, 8, 16, 32)
FIGURE_3 = {"figure3_3386edc": DISTIR_3386EDC, "figure3_83d7fc3_units_fixed": DISTIR_83D7FC3}


def figure_3(data: dict) -> dict:
    """Largest relative error by commit."""
    errors_of = {}
    for key, constants in FIGURE_3.items():
        single = {b: step_seconds(MLP(64, 4096, b), Parallel(), constants) for b in (512, 1024, 2048, 4096)}
        errors = []
        for b, t in single.items():
            for n, published in zip(DEVICES, data[key]["dp"][str(b)]):
                errors.append(t / step_seconds(MLP(64, 4096, b), Parallel(data=n), constants, moved="inputs") / published - 1)
        for k in (4, 8, 16, 32):
            for n, published in zip(DEVICES, data[key]["pp"][str(k)]):
                grid = Parallel(pipeline=n, microbatches=k)
                errors.append(single[4096] / step_seconds(MLP(64, 4096, 4096), grid, constants, moved="inputs") / published - 1)
        errors_of[key] = {"speedups": len(errors), "max_relative_error": max(map(abs, errors))}
    return errors_of


def figure_4(rows: list[dict]) -> dict:
    began = time.process_time()
    taken = [step_seconds(MLP(64, 8192, 8192), Parallel(r["d"], r["h"], r["p"], r["k"]), moved="everything") for r in rows]
    cpu = time.process_time() - began
    errors = [(r["d"] == 1, abs(8192 / t / r["ref"] - 1), abs(8192 / t / r["got"] - 1)) for r, t in zip(rows, taken)]
    alone, others = [e for e in errors if e[0]], [e for e in errors if not e[0]]
    best = rows[int(np.argmin([t if r["d"] * r["h"] * r["p"] == 16 else np.inf for r, t in zip(rows, taken)]))]
    return {
        "configurations": len(rows),
        "d1": {"rows": len(alone), "max_error_ref": max(e[1] for e in alone)},
        "others": {"rows": len(others), "max_error_ref": max(e[1] for e in others)},
        "max_error_got": max(e[2] for e in errors),
        "best_of_16": [best["d"], best["h"], best["p"], best["k"]],
        "cpu_seconds": cpu,
        "configurations_per_second": len(rows) / cpu,
    }


def real_runs(path: Path) -> dict:
    runs, seconds = mlp_runs.read(path)
    predicted = [mlp_runs.held_out(runs, seconds, seed=seed) for seed in (None, *range(10))]
    errors = [float(np.mean(np.abs(p / seconds - 1))) for p in predicted]
    ranks = [float(spearmanr(p, seconds).statistic) for p in predicted]
    return {
        "runs": len(runs),
        "mape": errors[0],
        "mape_shuffled_mean": float(np.mean(errors[1:])),
        "mape_worst": max(errors),
        "rank_correlation": ranks[0],
        "rank_correlation_worst": min(ranks),
    }


def deep(layers: int) -> dict:
    from autoshard.capture import capture_deep
    from autoshard.mesh import Mesh
    from autoshard.planning.options import Options, Stopwatch
    from autoshard.planning.plan import baseline_only
    from autoshard.planning.question import ModelGraphs, Question
    from autoshard.simulate.timeline import timeline_of_solution
    from models import llama

    mesh = Mesh.from_bandwidths((16, 8))
    graph, _ = capture_deep(*llama.llama3_405b(layers=layers, batch=16), training=True)
    solution = baseline_only(Question(ModelGraphs(graph), mesh, Options(training=True, baselines=False), Stopwatch(None)), "megatron_sp")
    began = time.process_time()
    timeline = timeline_of_solution(graph, solution)
    simulated = {"seconds": timeline.seconds, "peak_bytes": timeline.peak_bytes, "critical_seconds": timeline.critical_seconds}
    cpu = time.process_time() - began
    serial = timeline_of_solution(graph, solution, overlap=False)
    off = serial.seconds / solution.cost - 1
    return {"layers": layers, "ops": len(graph.ops), "tasks": len(timeline.tasks), "cpu_seconds": cpu, **simulated, "serial_error": off}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path, nargs="?", default=Path(__file__).parent.parent / "tests" / "data" / "distir")
    parser.add_argument("--deep", action="store_true")
    parser.add_argument("--layers", type=int, default=126)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if not (arguments.data / "figure3.json").is_file():
        sys.exit(f"{arguments.data} has no figure3.json; expected a folder as tests/data/distir")
    results = {
        "figure_3": figure_3(json.loads((arguments.data / "figure3.json").read_text())),
        "figure_4": figure_4(json.loads((arguments.data / "figure4_grid.json").read_text())),
        "real_runs": real_runs(arguments.data / "real_vs_simulated_mlp.csv"),
    }
    if arguments.deep:
        results["deep"] = deep(arguments.layers)
    if arguments.json:
        print(json.dumps(results))
        return
    for key, row in results["figure_3"].items():
        print(f"{key:<30} {row['speedups']} speed-ups, largest error {row['max_relative_error']:.1e}")
    grid = results["figure_4"]
    print(f"{'figure 4, D = 1':<30} {grid['d1']['rows']} rows, largest error {grid['d1']['max_error_ref']:.1e}")
    print(f"{'figure 4, D > 1':<30} {grid['others']['rows']} rows, largest error {grid['others']['max_error_ref']:.2%}")
    print(f"{'figure 4, all, published code':<30} largest error {grid['max_error_got']:.1e}; best of 16 devices {grid['best_of_16']}")
    print(f"{'figure 4, speed':<30} {grid['configurations_per_second']:.0f} configurations per CPU second (published: 0.56)")
    real = results["real_runs"]
    print(
        f"{'real runs':<30} {real['runs']}, held-out MAPE {real['mape']:.2%}, ten shuffles {real['mape_shuffled_mean']:.2%}, "
        f"worst {real['mape_worst']:.2%}; rank correlation {real['rank_correlation']:.4f}, worst {real['rank_correlation_worst']:.4f}"
    )
    if arguments.deep:
        row = results["deep"]
        print(
            f"{'deep':<30} {row['layers']} layers, {row['ops']} ops, {row['tasks']} tasks: {row['cpu_seconds']:.2f} CPU s; "
            f"step {row['seconds']:.3f} s, peak {row['peak_bytes'] / 1e9:.1f} GB, serial off its cost by {row['serial_error']:.1e}"
        )


if __name__ == "__main__":
    main()
