"""Real data-parallel steps of an MLP predicted by rates that were fitted to other ones.

    t = F c_F + L c_L + c_1 + sum over world sizes n of  [n devices] 2 (n - 1)/n G c_n

F FLOPs of a device (forward and two backward matmuls per layer), L layers, G bytes of float32 gradients, reduced once; c_F seconds per
FLOP, c_L per layer (launches), c_1 per step, c_n per byte on the bus of n devices. c by `cost.curves.fit_rates`: least sum of relative
errors, none below zero. A world size that no fitted run had gets the mean of the others' c_n.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from autoshard.calibrate.rates import fit_rates
from autoshard.cost.curves import bus_factor


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
    """Rates of measured runs. ValueError where there are fewer runs than rates, or a time is no time."""
    sizes = sorted({int(n) for n in runs.devices if n > 1})
    bus = {f"bus {n}": np.where(runs.devices == n, _bus_bytes(runs), 0.0) for n in sizes}
    found = fit_rates({**_work(runs), **bus}, seconds).seconds_per
    return Calibrated({kind: found[kind] for kind in _work(runs)}, {n: found[f"bus {n}"] for n in sizes})


def held_out(runs: Runs, seconds: np.ndarray, *, folds: int = 3, seed: int | None = None) -> np.ndarray:
    """Each run's seconds by the rates of the runs in the other folds; dealt in order, or shuffled by a seed."""
    order = np.arange(len(runs)) if seed is None else np.random.default_rng(seed).permutation(len(runs))
    predicted = np.empty(len(runs))
    for fold in range(folds):
        out, seen = order[fold::folds], np.setdiff1d(order, order[fold::folds])
        predicted[out] = calibrate(runs[seen], seconds[seen]).seconds(runs[out])
    return predicted


def _work(runs: Runs) -> dict[str, np.ndarray]:
    return {
        "flops": 3 * 2 * runs.batch / runs.devices * runs.width**2.0 * runs.layers,
        "layers": runs.layers.astype(float),
        "steps": np.ones(len(runs)),
    }


def _bus_bytes(runs: Runs) -> np.ndarray:
    factors = np.array([bus_factor("all_reduce", int(n)) if n > 1 else 0.0 for n in runs.devices])
    return factors * runs.layers * runs.width**2.0 * 4
