"""The study of the simulator."""

from __future__ import annotations

import json
import time

import numpy as np
from scipy.stats import spearmanr

from autoshard import Mesh
from autoshard.capture import capture_deep
from autoshard.pipeline import Parallel
from autoshard.planning.options import Options, Stopwatch
from autoshard.planning.plan import baseline_only
from autoshard.planning.question import ModelGraphs, Question
from autoshard.simulate.timeline import timeline_of_solution
from benchmarks import mlp_runs
from benchmarks.distir import DISTIR_83D7FC3, DISTIR_3386EDC, MLP, step_seconds
from benchmarks.studies import Row, Study
from models import llama

DEVICES = (2, 4, 8, 16, 32)
FIGURE_3 = {"figure3_3386edc": DISTIR_3386EDC, "figure3_83d7fc3_units_fixed": DISTIR_83D7FC3}


def simulate(measure, given) -> Row:
    """The simulator against published figures, real runs and the clock.

    DATA: a folder with figure3.json, figure4_grid.json (figures published by DistIR) and real_vs_simulated_mlp.csv (its real runs, ms), as
    in tests/data/distir.

        figure 3      largest relative error of 40 speed-ups, under the published constants and under those with correct units
        figure 4      the same of the throughputs of 111 configurations, of those with D = 1 and of the others, against what was published,
                      and against what the published code gives; configurations per CPU second (published: 0.56), building included,
                      nothing cached
        real runs     held-out mean error of calibrated rates, 3 folds in order and over ten shuffles; rank correlation
        deep          with --deep: a plan of Llama 3 with 405B's layers on 16 x 8 (Megatron with sequence parallelism): CPU seconds from
                      Graph and Solution to seconds, peak and critical path; capturing and planning are not counted
    """
    return measure(given)


def figure_3(given) -> Row:
    data, found = json.loads((given.data / "figure3.json").read_text()), {}
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
        found[key.removeprefix("figure3_")] = {"speedups": len(errors), "max_error": max(map(abs, errors))}
    return {"plans": found}


def figure_4(given) -> Row:
    rows = json.loads((given.data / "figure4_grid.json").read_text())
    began = time.process_time()
    taken = [step_seconds(MLP(64, 8192, 8192), Parallel(r["d"], r["h"], r["p"], r["k"]), moved="everything") for r in rows]
    cpu = time.process_time() - began
    published, by_code = (np.array([abs(8192 / t / row[key] - 1) for row, t in zip(rows, taken)]) for key in ("ref", "got"))
    one = np.array([row["d"] == 1 for row in rows])
    best = rows[int(np.argmin([t if r["d"] * r["h"] * r["p"] == 16 else np.inf for r, t in zip(rows, taken)]))]
    parts = {"D = 1": published[one], "D > 1": published[~one], "published code": by_code}
    plans = {name: {"rows": len(errors), "max_error": float(errors.max())} for name, errors in parts.items()}
    figures = {"best_of_16": " ".join(str(best[key]) for key in "dhpk"), "cpu_seconds": cpu, "configurations_per_second": len(rows) / cpu}
    return {**figures, "plans": plans}


def real_runs(given) -> Row:
    runs, seconds = mlp_runs.read(given.data / "real_vs_simulated_mlp.csv")
    predicted = [mlp_runs.held_out(runs, seconds, seed=seed) for seed in (None, *range(10))]
    errors = [float(np.mean(np.abs(p / seconds - 1))) for p in predicted]
    ranks = [float(spearmanr(p, seconds).statistic) for p in predicted]
    means = {"mean_error": errors[0], "shuffled_error": float(np.mean(errors[1:])), "worst_error": max(errors)}
    return {"runs": len(runs), **means, "rank_correlation": ranks[0], "worst_rank_correlation": min(ranks)}


def deep(given) -> Row:
    graph, _ = capture_deep(*llama.llama3_405b(layers=given.layers, batch=16), training=True)
    context = Question(ModelGraphs(graph), Mesh.from_bandwidths((16, 8)), Options(training=True, baselines=False), Stopwatch(None))
    solution = baseline_only(context, "megatron_sp")
    began = time.process_time()
    line = timeline_of_solution(graph, solution)
    simulated = {"seconds": line.seconds, "peak_bytes": line.peak_bytes, "critical_seconds": line.critical_seconds}
    cpu = time.process_time() - began
    serial = timeline_of_solution(graph, solution, overlap=False).seconds / solution.cost - 1
    sizes = {"layers": given.layers, "ops": len(graph.ops), "tasks": len(line.tasks)}
    return {**sizes, "cpu_seconds": cpu, **simulated, "serial_error": serial}


SIMULATE = Study(
    cases=lambda given: {"figure 3": figure_3, "figure 4": figure_4, "real runs": real_runs, **({"deep": deep} if given.deep else {})},
    measure=simulate, data="tests/data/distir", alone=False,
    options={"--deep": {"action": "store_true"}, "--layers": {"type": int, "default": 126}},
)  # fmt: skip
