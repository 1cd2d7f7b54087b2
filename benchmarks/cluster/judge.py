"""What the rows say: how well seconds and bytes were predicted, and whether our plan is the fastest.

    error      |predicted / measured - 1|, of plans that spend more than half of their predicted time on the link between nodes
    simulated  the same of the simulator's time line, with overlap where the runner overlaps, over all plans
    spearman   of predicted against measured seconds, all plans of a model at all link speeds; and per cell, the mean
    ours       measured seconds of ours over the fastest plan of the cell; and over the fastest baseline
    order      of the overlapped plan, ours and FSDP in each cell: two of them whose time lines differ by more than APART have to be
               measured in that order, or within APART of each other
"""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict

from scipy.stats import spearmanr

DOMINATES = 0.5  # of the predicted seconds
OURS, APART = ("overlapped", "ours"), 0.03
ORDERED = (*OURS, "fsdp")


def judged(rows: list[dict]) -> dict:
    cells, models = defaultdict(dict), defaultdict(list)
    for row in rows:
        cells[row["model"], row["megabits"]][row["plan"]] = row
        models[row["model"]].append(row)
    whole = {key: plans for key, plans in cells.items() if "ours" in plans and len(plans) > 1}
    fastest = {key: min(row["measured_seconds"] for row in plans.values()) for key, plans in whole.items()}
    baselines = {key: [row for name, row in plans.items() if name not in OURS] for key, plans in whole.items()}
    best = {key: min(row["measured_seconds"] for row in rows) for key, rows in baselines.items()}
    ours = {key: plans["ours"]["measured_seconds"] for key, plans in whole.items()}
    on_link = [row for row in rows if row["predicted_link_seconds"] > DOMINATES * row["predicted_seconds"]]
    errors = [abs(row["predicted_seconds"] / row["measured_seconds"] - 1) for row in on_link]
    simulated = [abs(row["simulated_seconds"] / row["measured_seconds"] - 1) for row in rows if "simulated_seconds" in row]
    counted = [abs(row["measured_bytes"] / row["predicted_bytes"] - 1) for row in rows if row["predicted_bytes"] > 1e5]
    return {
        "cells": len(whole),
        "order": _orders(whole),
        "spearman": {model: _spearman(some) for model, some in models.items()},
        "spearman_in_a_cell": {
            model: _mean([_spearman(list(plans.values())) for (of, _), plans in whole.items() if of == model]) for model in models
        },
        "link_dominates": len(on_link),
        "median_error_where_the_link_dominates": statistics.median(errors) if errors else None,
        "median_error": statistics.median(abs(row["predicted_seconds"] / row["measured_seconds"] - 1) for row in rows) if rows else None,
        "median_error_simulated": statistics.median(simulated) if simulated else None,
        "median_bytes_error": statistics.median(counted) if counted else None,
        "largest_bytes_error": max(counted, default=None),
        "ours_over_fastest": max((ours[key] / fastest[key] for key in whole), default=None),
        "cells_where_ours_is_fastest_or_within_5_percent": sum(ours[key] <= 1.05 * fastest[key] for key in whole),
        "cells_where_ours_beats_the_best_baseline_by_15_percent": sum(ours[key] <= 0.85 * best[key] for key in whole),
    }


def _orders(cells: dict[tuple, dict]) -> dict[str, str]:
    """Each cell's plans by the seconds of their time lines, measured seconds in brackets, and whether the two orders agree."""
    orders = {}
    for (model, megabits), plans in cells.items():
        if not set(ORDERED) <= set(plans):
            continue
        rows = sorted((plans[name] for name in ORDERED), key=lambda row: row["simulated_seconds"])
        agree = all(
            b["simulated_seconds"] <= (1 + APART) * a["simulated_seconds"] or a["measured_seconds"] <= (1 + APART) * b["measured_seconds"]
            for a, b in itertools.combinations(rows, 2)
        )
        text = " < ".join(f"{row['plan']} {row['simulated_seconds']:.3f} ({row['measured_seconds']:.3f})" for row in rows)
        orders[f"{model} {megabits:g} Mbit/s"] = f"{text}: {'agree' if agree else 'DIFFER'}"
    return orders


def _spearman(rows: list[dict]) -> float | None:
    if len(rows) < 3:
        return None
    return float(spearmanr([row["predicted_seconds"] for row in rows], [row["measured_seconds"] for row in rows]).statistic)


def _mean(values: list) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.mean(known) if known else None


def table(rows: list[dict]) -> str:
    lines = ["model  Mbit/s plan          predicted s measured s  error  link  MB pred.  counted"]
    for row in sorted(rows, key=lambda row: (row["model"], row["megabits"], row["measured_seconds"])):
        error = row["predicted_seconds"] / row["measured_seconds"] - 1
        link = row["predicted_link_seconds"] / row["predicted_seconds"]
        lines.append(
            f"{row['model']:6} {row['megabits']:6g} {row['plan']:13} {row['predicted_seconds']:11.3f} {row['measured_seconds']:10.3f} "
            f"{error:+6.0%} {link:5.0%} {row['predicted_bytes'] / 1e6:9.2f} {row['measured_bytes'] / 1e6:8.2f}"
        )
    return "\n".join(lines)


def plot(rows: list[dict], path: str) -> None:
    """Predicted against measured seconds, a panel per model, a colour per plan."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    models = list(dict.fromkeys(row["model"] for row in rows))
    figure, axes = pyplot.subplots(1, len(models), figsize=(4.5 * len(models), 4.5), squeeze=False)
    colours = {name: f"C{k}" for k, name in enumerate(dict.fromkeys(row["plan"] for row in rows))}
    for axis, model in zip(axes[0], models):
        for name, colour in colours.items():
            some = [row for row in rows if row["model"] == model and row["plan"] == name]
            axis.scatter([r["measured_seconds"] for r in some], [r["predicted_seconds"] for r in some], c=colour, label=name, s=18)
        ends = [f(r[k] for r in rows if r["model"] == model for k in ("measured_seconds", "predicted_seconds")) for f in (min, max)]
        axis.plot(ends, ends, color="grey", linewidth=0.8)
        axis.set(xscale="log", yscale="log", xlabel="measured seconds per step", ylabel="predicted", title=model)
        for side in (axis.xaxis, axis.yaxis):
            side.set_major_locator(ticker.FixedLocator([0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10]))
            side.set_major_formatter("{x:g}")
            side.set_minor_formatter(ticker.NullFormatter())
    axes[0][0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=140)
