"""How well curves predict measured collectives that they have not seen.

    python benchmarks/calibration.py MEASURED.csv [...] [--runs RUNS.csv] [--json]

Errors of all measured curves and by system, relative, in percent: GMAE / mean (calibrate/errors.py).

    held out          3 folds over a curve's sizes but the first and last
    pooled            the same, with all other curves of the files known (calibrate/fit.py), sizes held out of this one included
    pooled, strict    the same without those of the same collective, system and devices (other dtypes, which nearly repeat it)
    extrapolated      sizes in the top 16x predicted from those below
    left out          a device count predicted from the curves of the other counts of its system, collective and dtype

With --runs, real data-parallel training steps of an MLP (world_size, # layers, batch size, hidden dim, real in ms), each predicted
by rates (FLOP/s, seconds per layer and step, bus bandwidth per world size) fitted to the others: 3 folds, mean absolute error.

A curve that a method can't fit in some fold counts as a failure and its points are left out of that method's errors.
"""

# ruff: noqa: E402  (its own folder has to leave sys.path first)
import argparse
import json
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))  # where benchmarks/ lies
from autoshard.calibrate import fit, held_out, nearest, summary
from autoshard.calibrate.errors import Errors, Fitter, Pairs
from autoshard.calibrate.fit import alpha_beta
from autoshard.calibrate.importers import parse
from autoshard.cost import check
from autoshard.cost.curves import Family, Series
from autoshard.cost.curves.device_counts import Count
from benchmarks import mlp_runs

METHODS: dict[str, Fitter] = {"piecewise": fit, "alpha_beta": alpha_beta}


def extrapolated(sizes: np.ndarray, seconds: np.ndarray, fitter: Fitter, *, span: float = 16) -> Pairs:
    """(predicted, measured) seconds of the sizes above the last one / `span`, by a curve fitted to the others; empty where those
    are fewer than 2. sizes: bytes. ValueError where they can't be fitted.
    """
    x, t = check(sizes, seconds)
    seen = x <= x[-1] / span
    if seen.sum() < 2:
        return np.empty(0), np.empty(0)
    return fitter(x[seen], t[seen]).seconds(x[~seen]), t[~seen]


def together(pairs: Iterable[Pairs]) -> Errors:
    """The summary over the pairs of many curves."""
    kept = list(pairs)
    if not kept:
        return summary(np.empty(0), np.empty(0))
    return summary(np.concatenate([p for p, _ in kept]), np.concatenate([r for _, r in kept]))


def arrays(series: Series) -> tuple[np.ndarray, np.ndarray]:
    return np.array(series.sizes), np.array(series.seconds)


def family(collective: str, measured: Mapping[Count, tuple[np.ndarray, np.ndarray]]) -> Family:
    """The family of curves fitted to sizes and seconds by (nodes, devices). ValueError on an impossible count and the errors of `fit`."""
    if not measured:
        raise ValueError(f"nothing was measured of {collective}; expected at least one device count")
    for nodes, devices in measured:
        if nodes < 1 or devices < 2 or devices % nodes:
            raise ValueError(f"{devices} devices on {nodes} nodes can't be; expected two or more, as many on each node")
    curves = {count: fit(x, t) for count, (x, t) in sorted(measured.items())}
    sizes = np.unique(np.concatenate([np.asarray(x, dtype=float) for x, _ in measured.values()]))
    return Family(collective, curves, tuple(sizes.tolist()))


def judge(curves: list[Series], split, fitter) -> tuple[dict[int, Pairs], int]:
    """Pairs of predicted and measured by curve, and how many curves could not be fitted."""
    pairs, failures = {}, 0
    for k, series in enumerate(curves):
        try:
            pairs[k] = split(*arrays(series), fitter(series))
        except ValueError:
            failures += 1
    return pairs, failures


def unlike(one: Series, curves: list[Series]) -> list[Series]:
    """Those of another collective, system or number of devices."""
    same = ("source", "system", "collective", "nodes", "devices")
    return [other for other in curves if any(getattr(other, key) != getattr(one, key) for key in same)]


def leave_out(curves: list[Series]) -> dict[int, Pairs]:
    """Each curve predicted from the other device counts of its family."""
    families = defaultdict(list)
    for k, one in enumerate(curves):
        families[one.source, one.system, one.collective, one.dtype].append((k, one))
    pairs = {}
    for members in families.values():
        for k, one in members:
            others = {(o.nodes, o.devices): arrays(o) for _, o in members if (o.nodes, o.devices) != (one.nodes, one.devices)}
            if others:
                try:
                    curve = family(one.collective, others).at(one.devices, one.nodes)
                except ValueError:  # nothing on as many nodes, or on one, was measured
                    continue
                x, t = arrays(one)
                pairs[k] = curve.seconds(x), t
    return pairs


def row(curves: list[Series], what: str, pairs: dict[int, Pairs], failures: int) -> dict:
    systems = sorted({one.system for one in curves})
    total = together(pairs.values())
    by_system = {s: together(p for k, p in pairs.items() if curves[k].system == s) for s in systems}
    return {
        "what": what,
        "gmae": total.gmae,
        "mean": total.mean,
        "std": total.std,
        "points": total.num,
        "failures": failures,
        "systems": {s: {"gmae": e.gmae, "mean": e.mean} for s, e in by_system.items()},
    }


def measure(curves: list[Series]) -> list[dict]:
    def together_with(others):
        return lambda series: partial(fit, others=others(series))

    alone = {name: lambda series, method=method: method for name, method in METHODS.items()}
    rows = [row(curves, f"held out, {name}", *judge(curves, held_out, method)) for name, method in alone.items()]
    rows.append(row(curves, "held out, pooled", *judge(curves, held_out, together_with(lambda s: nearest(s, curves)))))
    strict = together_with(lambda s: nearest(s, unlike(s, curves)))
    rows.append(row(curves, "held out, pooled, strict", *judge(curves, held_out, strict)))
    rows += [row(curves, f"extrapolated, {name}", *judge(curves, extrapolated, method)) for name, method in alone.items()]
    rows.append(row(curves, "device count left out", leave_out(curves), 0))
    return rows


def runs(path: Path) -> dict:
    """MAPE of held-out runs, dealt in order and over ten shuffles, and the rates of all."""
    measured, seconds = mlp_runs.read(path)
    errors = [summary(mlp_runs.held_out(measured, seconds, seed=seed), seconds).mean for seed in (None, *range(10))]
    fitted = mlp_runs.calibrate(measured, seconds)
    per_unit = {**fitted.seconds_per, **{f"bus bytes, {n} devices": c for n, c in fitted.seconds_per_bus_byte.items()}}
    rates = {kind: 1 / c for kind, c in per_unit.items() if c > 0}
    shuffled = float(np.mean(errors[1:]))
    return {"runs": len(measured), "mape": errors[0], "mape_shuffled_mean": shuffled, "mape_worst": max(errors), "rates": rates}


def table(rows: list[dict]) -> list[str]:
    """All curves, a line per method; then a line per system, whose columns are those methods by number, as many as 80 columns hold."""
    lines = [f"{'':<31} {'all':>14} {'points':>8} {'failed':>7}"]
    lines += [f"{k:>2} {r['what']:<28} {percent(r):>14} {r['points']:>8} {r['failures']:>7}" for k, r in enumerate(rows, 1)]
    for first in range(0, len(rows), 4):
        some = rows[first : first + 4]
        lines += ["", f"{'system':<20}" + "".join(f"{first + k + 1:>15}" for k in range(len(some)))]
        lines += [f"{s[:20]:<20}" + "".join(f"{percent(r['systems'][s]):>15}" for r in some) for s in rows[0]["systems"]]
    return lines


def percent(errors: dict) -> str:
    return f"{100 * errors['gmae']:.2f} / {100 * errors['mean']:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--runs", type=Path)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if not arguments.files and not arguments.runs:
        sys.exit("no file given; expected measurements as CSV, for example collectives.csv")
    began = time.process_time()
    curves = [one for path in arguments.files for one in parse(path.read_text(), path.name)]
    rows = measure(curves) if curves else []
    real = runs(arguments.runs) if arguments.runs else None
    cpu = time.process_time() - began
    if arguments.json:
        print(json.dumps({"curves": len(curves), "rows": rows, "runs": real, "cpu_seconds": cpu}))
        return
    if real:
        print(
            f"{real['runs']} runs held out: MAPE {100 * real['mape']:.2f} %; ten shuffles: mean {100 * real['mape_shuffled_mean']:.2f} %, "
            f"worst {100 * real['mape_worst']:.2f} %"
        )
        print("rates: " + ", ".join(f"{rate:.4g} {kind}/s" for kind, rate in real["rates"].items()))
    if not curves:
        return
    print(f"{len(curves)} curves; GMAE / mean in percent; {cpu:.1f} CPU s")
    print("\n".join(table(rows)))


if __name__ == "__main__":
    main()
