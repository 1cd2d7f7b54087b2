"""Predict published training runs and compare: seconds per step, memory, and whether a run crashes.

    PYTHONPATH=. python benchmarks/published_runs.py RUNS.csv [--json] [--source NAME] [--limit N]
    PYTHONPATH=. python benchmarks/published_runs.py RUNS.csv --folds 5          fitted again, whole cells held out; intervals too
    PYTHONPATH=. python benchmarks/published_runs.py RUNS.csv --by-source        fitted again, whole sources held out; intervals too
    PYTHONPATH=. python benchmarks/published_runs.py RUNS.csv --ablation         each effect left out and the rest fitted again, in folds
    PYTHONPATH=. python benchmarks/published_runs.py RUNS.csv --choose           nanotron: the best configuration of each cell, in folds

A table of mixtures of experts (expert_runs.py) is compared by source and model.
RUNS.csv has the columns of published.TABLE and step, mem_gb, oom, suspect, pp_old, arch, gpus, ep. Errors are
|predicted / measured - 1|. `suspect` and `pp_old` rows, and sources with fewer than five rows, count in no mean of means and are shown
apart.
Without --folds the constants are those of the device files, which were fitted to the published half of these runs.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import expert_runs
import numpy as np
from fit_devices import LEVELS, error_quantiles, held_out, memory_quantiles
from published import EFFECTS, FEWEST, Table, by_source, chance_to_run, figure_of, interval, predicted_memory, predicted_seconds, read
from published import folds as cells_folds
from scipy.stats import spearmanr

from autoshard.launch.peak_memory import Memory, chance_within


def rows_of(error: np.ndarray, predicted: np.ndarray, measured: np.ndarray) -> dict:
    """n, mean, median, p90 of absolute relative errors, median of signed ones (bias), Spearman rank correlation."""
    if not len(error):
        return {"n": 0, "mean": None, "median": None, "p90": None, "bias": None, "rank": None}
    size, rank = np.abs(error), spearmanr(predicted, measured).statistic if len(error) > 2 else math.nan
    figures = {"mean": size.mean(), "median": np.median(size), "p90": np.quantile(size, 0.9), "bias": np.median(error), "rank": rank}
    return {"n": len(error), **{name: None if math.isnan(value) else float(value) for name, value in figures.items()}}


def memory_rows(table: Table, memory: Memory, mask: np.ndarray) -> dict:
    """Errors of the figure that the source measures."""
    known = mask & ~np.isnan(table.bytes)
    error = figure_of(memory, table.source)[known] / table.bytes[known] - 1
    median, bias = (float(np.median(e)) if len(e) else None for e in (np.abs(error), error))
    return {"n": int(known.sum()), "median": median, "bias": bias}


def crashed_configurations(table: Table) -> np.ndarray:
    """Which rows crashed; a configuration that also ran has run."""
    ran = {key for key, crashed in zip(configurations(table), table.crashed) if not crashed}
    return np.array([crashed and key not in ran for key, crashed in zip(configurations(table), table.crashed)], dtype=bool)


def fits_right(table: Table, chance: np.ndarray, of_source: np.ndarray) -> float | None:
    """Share of runs whose running or crashing was predicted; None where no run crashed."""
    if not table.crashed[of_source].any():
        return None
    return float(((chance >= 0.5) == ~crashed_configurations(table))[of_source].mean())


def calibration(table: Table, chance: np.ndarray) -> list[dict]:
    """Of the runs with a chance to fit in a range, how many crashed."""
    known, crashed, rows = table.runs.memory > 0, crashed_configurations(table), []
    for low, high in ((0.0, 0.1), (0.1, 0.3), (0.3, 0.5), (0.5, 0.7), (0.7, 0.9), (0.9, 1.0)):
        inside = known & (chance >= low) & ((chance < high) | (high == 1.0))
        share = float(crashed[inside].mean()) if inside.any() else None
        rows.append({"from": low, "to": high, "runs": int(inside.sum()), "crashed": share})
    return rows


def held_out_chance(table: Table, bytes: np.ndarray, fold: np.ndarray) -> np.ndarray:
    """The chance to run by the errors of the other folds."""
    chance = np.zeros(len(table))
    for k in sorted(set(fold)):
        rows = np.flatnonzero(fold == k)
        quantiles = memory_quantiles(table[fold != k])
        errors = np.array([quantiles.get(name, quantiles["other"]) for name in table.runs.stack[rows]])
        chance[rows] = chance_within(bytes[rows], table.runs.memory[rows], np.array(LEVELS), errors)
    return np.where(table.runs.pipeline < table.runs.layers, chance, 0.0)


def configurations(table: Table) -> list[tuple]:
    names = ("arch", "gpus", "seq", "mbs", "ga", "dp", "zero", "tp", "pp", "rc")
    return [tuple(row[name] for name in names) for row in table.rows]


def compared(table: Table, seconds: np.ndarray, unfitted: np.ndarray, memory: Memory, chance: np.ndarray) -> dict:
    error, before = seconds / table.seconds - 1, unfitted / table.seconds - 1
    sources, few, apart, means, plain = {}, {}, {}, [], []
    for name, rows in by_source(table, np.ones(len(table), dtype=bool)).items():
        timed, of_apart = rows & ~table.crashed & ~table.apart, rows & ~table.crashed & table.apart
        bytes = memory_rows(table, memory, rows & ~table.crashed)
        row = rows_of(error[timed], seconds[timed], table.seconds[timed])
        row |= {"memory": bytes, "fits_right": fits_right(table, chance, rows)}
        row["unfitted_mean"] = float(np.abs(before[timed]).mean()) if timed.any() else None
        if of_apart.any():
            apart[name] = rows_of(error[of_apart], seconds[of_apart], table.seconds[of_apart])
        if row["n"] < FEWEST:
            few[name] = row
            continue
        sources[name] = row
        means.append(row["mean"])
        plain.append(row["unfitted_mean"])
    average = {name: float(np.mean(values)) if values else None for name, values in (("", means), ("unfitted_", plain))}
    average = {f"{name}mean_of_means": value for name, value in average.items()}
    known = table.runs.memory > 0
    as_said = fits_right(table, chance, known) if known.any() else None
    return {"sources": sources, **average, "inexpressible": table.inexpressible, "few_rows": few, "set_apart": apart,
            "calibration": calibration(table, chance), "as_said": as_said}  # fmt: skip


def coverage(table: Table, seconds: np.ndarray, fold: np.ndarray | None, share: float = 0.8) -> dict[str, float]:
    """The share of runs whose measured seconds lie inside the interval, by source, of all rows, and the mean over cells. With folds, each
    fold's interval has the errors of the other folds."""
    low, high = interval(table.runs, seconds, share)
    for k in sorted(set(fold)) if fold is not None else ():
        quantiles = error_quantiles(table[fold != k], seconds[fold != k])
        ends = {name: np.interp(((1 - share) / 2, (1 + share) / 2), LEVELS, values) for name, values in quantiles.items()}
        for i in np.flatnonzero(fold == k):
            low[i], high[i] = seconds[i] * np.exp(ends.get(table.runs.stack[i], ends["other"]))
    inside = (table.seconds >= low) & (table.seconds <= high)
    counted = ~table.crashed & ~table.apart
    if not counted.any():
        return {}
    cells = [inside[counted & (table.cell == cell)].mean() for cell in sorted(set(table.cell[counted]))]
    by_name = {name: float(inside[mask].mean()) for name, mask in by_source(table, counted).items() if mask.any()}
    return {**by_name, "all rows": float(inside[counted].mean()), "mean of cells": float(np.mean(cells))}


def ablation(table: Table, count: int) -> dict[str, float]:
    """Mean of source means in folds, with everything and with each effect left out and the rest fitted again."""

    def score(without: frozenset[str]) -> float:
        seconds = held_out(table, count, without=without, evaluations=25)
        error, counted = np.abs(seconds / table.seconds - 1), ~table.crashed & ~table.apart
        return float(np.mean([error[mask].mean() for mask in by_source(table, counted).values() if mask.sum() >= FEWEST]))

    base = score(frozenset())
    return {"everything": base, **{effect: score(frozenset({effect})) - base for effect in EFFECTS}}


def chosen(table: Table, seconds: np.ndarray, chance: np.ndarray) -> list[dict]:
    """nanotron's cells: regret 1 - best measured / measured of the first choice of the predictor and of the rule; a crash is 1.

    A configuration that ran several times took the median. Both choose among configurations predicted to fit. The predictor: least
    seconds / chance to fit. The rule: least tensor * pipeline, then largest microbatch, ZeRO-1 first.
    """
    risky, fitting = seconds / np.maximum(chance, 1e-6), chance >= 0.5
    keys = configurations(table)
    measured: dict[tuple, list[float]] = {}  # of a configuration, also where it crashed another time
    for key, s in zip(keys, table.seconds):
        if not math.isnan(s):
            measured.setdefault(key, []).append(s)
    ran = {key: float(np.median(s)) for key, s in measured.items()}
    rows = []
    for cell in sorted(set(table.cell[table.source == "nanotron"])):
        members = np.flatnonzero((table.cell == cell) & fitting)
        timed = (table.cell == cell) & ~table.crashed
        if not len(members) or not timed.any():
            continue
        best, runs = min(ran[keys[i]] for i in np.flatnonzero(timed)), table.runs
        by_rule = min(members, key=lambda i: (runs.tensor[i] * runs.pipeline[i], -runs.microbatch[i], -runs.zero[i], i))
        by_prediction = min(members, key=lambda i: (risky[i], i))
        regret = [1 - best / ran[keys[i]] if keys[i] in ran else 1.0 for i in (by_prediction, by_rule)]
        rows.append({"cell": cell, "devices": int(runs.devices[members[0]]), "predictor": regret[0], "rule": regret[1]})
    return rows


def percent(value: float | None) -> str:
    return f"{100 * value:7.1f}" if value is not None else "      -"


def print_comparison(record: dict) -> None:
    print(
        f"{'source':14} {'n':>5}",
        *(f"{title:>7}" for title in ("mean", "median", "p90", "bias", "rank", "unfit", "mem n", "median", "bias", "fits")),
    )
    for title, rows in (("", record["sources"]), ("fewer than five rows", record["few_rows"])):
        if title and rows:
            print(title)
        for name, row in rows.items():
            rank = f"{row['rank']:7.2f}" if row["rank"] is not None else "      -"
            errors = " ".join(percent(row[key]) for key in ("mean", "median", "p90", "bias"))
            memory = f"{row['memory']['n']:7d} {percent(row['memory']['median'])} {percent(row['memory']['bias'])}"
            print(f"{name:14} {row['n']:5d} {errors} {rank} {percent(row['unfitted_mean'])} {memory} {percent(row['fits_right'])}")
    for name, row in record["set_apart"].items():
        print(
            f"set apart (suspect, old pipeline code): {name} {row['n']} rows, mean {percent(row['mean'])}, median {percent(row['median'])}"
        )
    print(f"mean of source means {percent(record['mean_of_means'])} %; nothing fitted {percent(record['unfitted_mean_of_means'])} %")
    print("chance to fit, runs, share that crashed:")
    for row in record["calibration"]:
        print(f"  {row['from']:4.0%} to {row['to']:4.0%} {row['runs']:6d} {percent(row['crashed'])} %")
    print(f"ran or crashed as said: {percent(record['as_said']).strip()} % of all rows whose memory is known")
    for why, count in record["inexpressible"].items():
        print(f"not expressible: {count} rows, {why}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--source")
    parser.add_argument("--limit", type=int)
    parser.add_argument("--folds", type=int, default=0)
    parser.add_argument("--by-source", action="store_true")
    parser.add_argument("--ablation", action="store_true")
    parser.add_argument("--choose", action="store_true")
    arguments = parser.parse_args()
    if expert_runs.is_of_experts(arguments.runs):
        record = expert_runs.compared(arguments.runs)
        return print(json.dumps(record)) if arguments.json else expert_runs.show(record)
    table = read(arguments.runs, source=arguments.source, limit=arguments.limit)
    folds = None if arguments.by_source else arguments.folds or (5 if arguments.ablation or arguments.choose else 0)
    again = folds != 0  # fitted again, without what is predicted
    seconds = held_out(table, folds) if again else predicted_seconds(table.runs)
    memory = predicted_memory(table.runs)
    bytes = memory.device
    chance = held_out_chance(table, bytes, cells_folds(table, folds)) if again else chance_to_run(table.runs, bytes)
    record = compared(table, seconds, predicted_seconds(table.runs, fitted=False), memory, chance)
    record["coverage_of_80_percent"] = coverage(table, seconds, cells_folds(table, folds) if again else None)
    if arguments.ablation:
        record["ablation"] = ablation(table, folds or 5)
    if arguments.choose:
        record["choice"] = chosen(table, seconds, chance)
    if arguments.json:
        print(json.dumps(record))
        return
    print_comparison(record)
    covered = (f"{name} {percent(value).strip()}" for name, value in record["coverage_of_80_percent"].items())
    print("inside the 80 % interval:", ", ".join(covered))
    for effect, worse in record.get("ablation", {}).items():
        print(f"{effect:20} {percent(worse)}")
    for row in record.get("choice", []):
        print(f"{row['cell']:28} regret: predictor {percent(row['predictor'])}, rule {percent(row['rule'])}")
    if "choice" in record:
        small = [row for row in record["choice"] if row["devices"] <= 128]
        within = {name: sum(row[name] <= 0.05 for row in small) for name in ("predictor", "rule")}
        print(f"up to 128 devices: within 5 % of the best in {within['predictor']} of {len(small)} cells; the rule {within['rule']}")


if __name__ == "__main__":
    main()
