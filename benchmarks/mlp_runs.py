"""Prediction of measured data-parallel steps of an MLP by rates fitted to other steps; reproduces an experiment of DistIR.

    t = F c_F + L c_L + c_1 + sum over world sizes n of  [n devices] 2 (n - 1)/n G c_n

F FLOPs of a device (forward and two backward matmuls per layer), L layers, G bytes of float32 gradients, reduced once; c_F seconds per
FLOP, c_L per layer (launches), c_1 per step, c_n per byte on the bus of n devices. c by `fit_rates`: least sum of relative errors, none
below zero. A world size without a fitted run gets the mean of the others' c_n.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.optimize import nnls

from autoshard.cost.curves import bus_factor

REWEIGHTED = 30  # times; the weights converge much earlier


@dataclass(frozen=True, eq=False)
class Runs:
    """Training steps of an MLP of `layers` square weights: arrays of the same length, one entry per run."""

    devices: np.ndarray
    layers: np.ndarray
    batch: np.ndarray  # of all devices together
    width: np.ndarray

    def __getitem__(self, chosen: np.ndarray) -> Runs:
        return Runs(self.devices[chosen], self.layers[chosen], self.batch[chosen], self.width[chosen])

    def __len__(self) -> int:
        return len(self.devices)


def read(path: Path) -> tuple[Runs, np.ndarray]:
    """The runs of a CSV file as DistIR published it, and their measured seconds."""
    with path.open() as file:
        rows = list(csv.DictReader(file))
    columns = [np.array([float(row[key]) for row in rows]) for key in ("world_size", "# layers", "batch size", "hidden dim", "real")]
    return Runs(*columns[:4]), columns[4] / 1e3


@dataclass(frozen=True)
class Calibrated:
    """Seconds per unit of work."""

    seconds_per: Mapping[str, float]  # FLOP, layer, step
    seconds_per_bus_byte: Mapping[int, float]  # by world size

    def seconds(self, runs: Runs) -> np.ndarray:
        common = sum(work * self.seconds_per[kind] for kind, work in _work(runs).items())
        known = self.seconds_per_bus_byte
        mean = float(np.mean(list(known.values()))) if known else 0.0
        per_byte = np.array([known.get(int(n), mean) for n in runs.devices])
        return common + np.where(runs.devices > 1, _bus_bytes(runs) * per_byte, 0.0)


def calibrate(runs: Runs, seconds: np.ndarray) -> Calibrated:
    """Rates of measured runs. ValueError for fewer runs than rates, or a time that is not positive."""
    sizes = sorted({int(n) for n in runs.devices if n > 1})
    bus = {f"bus {n}": np.where(runs.devices == n, _bus_bytes(runs), 0.0) for n in sizes}
    rates = fit_rates({**_work(runs), **bus}, seconds)
    return Calibrated({kind: rates[kind] for kind in _work(runs)}, {n: rates[f"bus {n}"] for n in sizes})


def fit_rates(work: Mapping[str, np.ndarray], seconds: np.ndarray) -> dict[str, float]:
    """Seconds per unit of each kind of work, not below 0, from runs i with `work[kind][i]` of each kind and `seconds[i]`.

    The sum of |t_i - t~_i| / t~_i is least, by reweighted non-negative least squares: runs span decades, and a few are outliers.
    ValueError for fewer runs than kinds, or a time that is not positive.
    """
    A, t = np.stack([np.asarray(column, dtype=float) for column in work.values()], axis=1), np.asarray(seconds, dtype=float)
    if not (np.isfinite(t).all() and (t > 0).all()):
        raise ValueError(f"the time of run {int(np.flatnonzero(~(t > 0))[0]) + 1} is no positive number; leave the run out")
    if len(t) < A.shape[1]:
        raise ValueError(f"{len(t)} runs for {A.shape[1]} rates; expected at least as many runs")
    scale = np.maximum(A.max(axis=0), 1e-300)  # columns of FLOPs beside columns of ones
    weight, c = 1 / t, np.zeros(A.shape[1])
    for _ in range(REWEIGHTED):
        c = nnls(A / scale * weight[:, None], t * weight)[0] / scale
        weight = 1 / t / np.sqrt(np.maximum(np.abs(A @ c / t - 1), 1e-3))
    return dict(zip(work, c.tolist()))


def held_out(runs: Runs, seconds: np.ndarray, *, folds: int = 3, seed: int | None = None) -> np.ndarray:
    """Each run's seconds by the rates of the runs in the other folds; the folds are in order, or shuffled by a seed."""
    predicted = np.empty(len(runs))
    for out, rest in folds_of(len(runs), folds, seed):
        predicted[out] = calibrate(runs[rest], seconds[rest]).seconds(runs[out])
    return predicted


def folds_of(num: int, folds: int, seed: int | None) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(the indices of a fold, all others) for each fold of `num` runs, in order or shuffled by a seed."""
    order = np.arange(num) if seed is None else np.random.default_rng(seed).permutation(num)
    for fold in range(folds):
        yield order[fold::folds], np.setdiff1d(order, order[fold::folds])


def _work(runs: Runs) -> dict[str, np.ndarray]:
    return {
        "flops": 3 * 2 * runs.batch / runs.devices * runs.width**2.0 * runs.layers,
        "layers": runs.layers.astype(float),
        "steps": np.ones(len(runs)),
    }


def _bus_bytes(runs: Runs) -> np.ndarray:
    factors = np.array([bus_factor("all_reduce", int(n)) if n > 1 else 0.0 for n in runs.devices])
    return factors * runs.layers * runs.width**2.0 * 4
