"""Fit the constants of devices and software stacks to published runs, and write autoshard/cost/devices/*.json.

    PYTHONPATH=. python benchmarks/fit_devices.py RUNS.csv [--folds 2] [--write | --write-memory]

--write-memory writes how far off predicted memory is, and leaves the constants of the time alone: nothing of memory is fitted.

Robust least squares of predicted / measured seconds - 1, each squared error weighted by 1/sqrt(rows of its source), with a penalty for
leaving the published figures, so that what a device's rows don't determine stays as published. Rows marked suspect or of the old pipeline
code are left out. A row depends on one device and one stack: one evaluation per constant gives the whole Jacobian.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from published import Table, by_source, constants_of, figure_of, folds, predicted_memory, read, step_seconds
from scipy.optimize import least_squares

from autoshard.devices import DEVICE_FILES
from autoshard.launch.block_time import RunConstants
from autoshard.launch.blocks_of_stages import stages

ROBUST = 0.15  # relative errors beyond count less and less
# What is fitted, and how far it is from its published figure, as a standard deviation of the logarithm. All else stays as published: a
# device's kernels are measured alone, its links by nccl-tests, and one factor says how much longer kernels take in training.
OF_DEVICE = {"training": 0.1}
OF_STACK = {"host": 0.5, "traffic": 0.3, "fixed": 0.7}
LEVELS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.975, 0.99)
FEWEST_CELLS = 4
PENALTY = 0.6
STEP = 1e-4  # of the Jacobian's differences


@dataclass(frozen=True)
class Fit:
    """Changes x of constants, in units of SPREAD: a row per device or stack, a column per constant."""

    devices: tuple[str, ...]
    stacks: tuple[str, ...]
    device: np.ndarray
    stack: np.ndarray

    @staticmethod
    def none(table: Table) -> Fit:
        devices, stacks = sorted(set(table.runs.device)), sorted(set(table.runs.stack))
        device, stack = np.zeros((len(devices), len(OF_DEVICE))), np.zeros((len(stacks), len(OF_STACK)))
        return Fit(tuple(devices), tuple(stacks), device, stack)

    def of(self, x: np.ndarray) -> Fit:
        return replace(self, device=x[: self.device.size].reshape(self.device.shape), stack=x[self.device.size :].reshape(self.stack.shape))

    @property
    def x(self) -> np.ndarray:
        return np.concatenate([self.device.ravel(), self.stack.ravel()])

    def constants(self, published: RunConstants, device_of: np.ndarray, stack_of: np.ndarray) -> RunConstants:
        """device_of, stack_of: indices of each row's device and stack."""
        d, s = published.device, published.stack
        device = {n: changed(getattr(d, n), self.device[device_of, j], spread) for j, (n, spread) in enumerate(OF_DEVICE.items())}
        stack = {n: changed(getattr(s, n), self.stack[stack_of, j], spread) for j, (n, spread) in enumerate(OF_STACK.items())}
        return replace(published, device=replace(published.device, **device), stack=replace(published.stack, **stack))


def changed(published: np.ndarray, x: np.ndarray, spread: float) -> np.ndarray:
    return published * np.exp(x * spread)


def indices(table: Table, fit: Fit) -> tuple[np.ndarray, np.ndarray]:
    """Of each row's device and stack; a name that the fit does not know is an error of ours."""
    return np.array([fit.devices.index(d) for d in table.runs.device]), np.array([fit.stacks.index(s) for s in table.runs.stack])


def predict(table: Table, fit: Fit, without: frozenset[str] = frozenset()) -> np.ndarray:
    published = replace(constants_of(table.runs, fitted=False), without=without)
    return step_seconds(table.runs, fit.constants(published, *indices(table, fit)))


def fitted(table: Table, start: Fit, *, without: frozenset[str] = frozenset(), evaluations: int = 40) -> Fit:
    """The fit to a table's timed rows that are not set apart."""
    table = table[~table.crashed & ~table.apart]
    published = replace(constants_of(table.runs, fitted=False), without=without)
    split = stages(table.runs, published.stack.balanced > 0)
    devices, stacks = indices(table, start)
    counts = {name: mask.sum() for name, mask in by_source(table, np.ones(len(table), bool)).items()}
    weight = np.array([counts[name] for name in table.source]) ** -0.25 / ROBUST

    def errors(x: np.ndarray) -> np.ndarray:
        constants = start.of(x).constants(published, devices, stacks)
        return step_seconds(table.runs, constants, split) / table.seconds - 1

    def residuals(x: np.ndarray) -> np.ndarray:
        return np.concatenate([_robust(errors(x)) * weight, PENALTY * x])

    def jacobian(x: np.ndarray) -> np.ndarray:
        base, rows = _robust(errors(x)) * weight, np.arange(len(table))
        jac = np.zeros((len(table), len(x)))
        for of, offset, count in ((devices, 0, len(OF_DEVICE)), (stacks, start.device.size, len(OF_STACK))):
            for j in range(count):
                moved = x.copy()
                moved[offset + j : start.device.size if offset == 0 else None : count] += STEP
                jac[rows, offset + of * count + j] = (_robust(errors(moved)) * weight - base) / STEP
        return np.concatenate([jac, PENALTY * np.eye(len(x))])

    return start.of(least_squares(residuals, start.x, jac=jacobian, max_nfev=evaluations).x)


def _robust(error: np.ndarray) -> np.ndarray:
    """Whose square is quadratic in small errors and logarithmic in large ones (Cauchy)."""
    return np.sign(error) * ROBUST * np.sqrt(np.log1p((error / ROBUST) ** 2))


def held_out(table: Table, count: int | None, *, without: frozenset[str] = frozenset(), evaluations: int = 40) -> np.ndarray:
    """Predicted seconds of every row by the fit to the folds that it is not in."""
    fold, start = folds(table, count), Fit.none(table)
    seconds = np.full(len(table), np.nan)
    for k in sorted(set(fold)):
        fit = fitted(table[fold != k], start, without=without, evaluations=evaluations)
        seconds[fold == k] = predict(table[fold == k], fit, without)
    return seconds


def error_quantiles(table: Table, seconds: np.ndarray) -> dict[str, list[float]]:
    """Quantiles, at LEVELS, of log(measured / predicted) seconds by stack. seconds: of runs that the prediction was not fitted to."""
    timed = ~table.crashed & ~table.apart & ~np.isnan(seconds)
    return _by_stack(table, np.log(table.seconds / seconds), timed)


def memory_quantiles(table: Table) -> dict[str, list[float]]:
    """The same of peak bytes, of the figure that each row's source measures."""
    error = np.log(table.bytes / figure_of(predicted_memory(table.runs), table.source))
    return _by_stack(table, error, ~np.isnan(error))


def _by_stack(table: Table, error: np.ndarray, counted: np.ndarray) -> dict[str, list[float]]:
    """Every cell weighs the same; a stack with few cells has the errors of all stacks, as "other" has."""
    cell = table.cell
    weight = np.array([1 / (counted & (cell == name)).sum() if ok else 0.0 for name, ok in zip(cell, counted)])
    names = sorted(set(table.runs.stack[counted]))
    masks = {name: counted & (table.runs.stack == name) for name in names}
    shares = {name: weight / max(weight[mask].sum(), 1e-9) * mask for name, mask in masks.items()}
    pooled = _quantiles(error, sum(shares.values()), len(set(cell[counted])))
    cells = {name: len(set(cell[mask])) for name, mask in masks.items()}
    return {"other": pooled, **{n: _quantiles(error, shares[n], cells[n]) if cells[n] >= FEWEST_CELLS else pooled for n in names}}


def _quantiles(error: np.ndarray, weight: np.ndarray, cells: int) -> list[float]:
    """Widened around the median by one cell's share, since a new cell is unlike those seen."""
    kept = np.flatnonzero(weight)
    order = kept[np.argsort(error[kept])]
    middle = (np.cumsum(weight[order]) - weight[order] / 2) / weight[order].sum()
    values, median = np.interp(LEVELS, middle, error[order]), np.interp(0.5, middle, error[order])
    return [float(f"{value:.4g}") for value in median + (values - median) * (1 + 1 / cells)]


def write(fit: Fit, table: Table, memory: Mapping[str, list[float]], errors: Mapping[str, list[float]]) -> None:
    """The fitted figures into the device files, each with the number of rows behind it."""
    timed = ~table.crashed & ~table.apart
    for i, name in enumerate(fit.devices):
        path = DEVICE_FILES / f"{name}.json"
        data = json.loads(path.read_text())
        rows = int((timed & (table.runs.device == name)).sum())
        _set(data["constants"], OF_DEVICE, fit.device[i])
        path.write_text(json.dumps({**data, "fitted_rows": rows}, indent=1) + "\n")
    path = DEVICE_FILES / "stacks.json"
    stacks = json.loads(path.read_text())
    for name in (name for name, one in stacks.items() if "as" not in one):
        stacks[name]["errors"] = {"levels": LEVELS, "quantiles": errors.get(name, errors["other"])}
    for i, name in enumerate(fit.stacks):
        if name in stacks:
            _set(stacks[name]["constants"], OF_STACK, fit.stack[i])
            stacks[name]["fitted_rows"] = int((timed & (table.runs.stack == name)).sum())
    path.write_text(json.dumps(stacks, indent=1) + "\n")
    write_memory(memory)


def write_memory(errors: Mapping[str, list[float]]) -> None:
    path = DEVICE_FILES / "stacks.json"
    stacks = json.loads(path.read_text())
    for name in (name for name, one in stacks.items() if "as" not in one):
        stacks[name]["memory_errors"] = {"levels": LEVELS, "quantiles": errors.get(name, errors["other"])}
    path.write_text(json.dumps(stacks, indent=1) + "\n")


def _set(constants: dict, fitted: Mapping[str, float], x: np.ndarray) -> None:
    for (name, spread), change in zip(fitted.items(), x):
        constants[name]["fitted"] = float(f"{float(changed(constants[name]['published'], change, spread)):.4g}")


def report(table: Table, seconds: np.ndarray) -> float:
    """Per source: rows, mean, median, bias in percent; returns the mean of means."""
    error, means = seconds / table.seconds - 1, []
    for name, mask in by_source(table, ~table.crashed & ~table.apart).items():
        e = 100 * error[mask]
        if len(e):
            print(f"{name:16} {len(e):5} mean {np.abs(e).mean():6.1f} median {np.median(np.abs(e)):6.1f} bias {np.median(e):6.1f}")
            means += [np.abs(e).mean()] * (len(e) >= 5)
    print(f"mean of {len(means)} means {np.mean(means):.2f} %")
    return float(np.mean(means))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path)
    parser.add_argument("--folds", type=int, default=5)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--write-memory", action="store_true")
    arguments = parser.parse_args()
    table = read(arguments.runs)
    if arguments.write_memory:
        write_memory(memory_quantiles(table))
        return
    print("published constants"), report(table, predict(table, Fit.none(table)))
    print(f"held out, {arguments.folds} folds of whole cells")
    seconds = held_out(table, arguments.folds)
    report(table, seconds)
    fit = fitted(table, Fit.none(table))
    print("in sample"), report(table, predict(table, fit))
    if arguments.write:
        write(fit, table, memory_quantiles(table), error_quantiles(table, seconds))


if __name__ == "__main__":
    main()
