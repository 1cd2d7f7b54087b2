"""Rates of a device (FLOPs, bytes, launches per second), fitted to the measured seconds of known work.

    t_i = sum_j w_ij c_j,   c_j >= 0         w_ij = work of kind j in run i (FLOPs, bytes, launches), c_j = seconds per unit
    c   = argmin sum_i |t_i - t~_i| / t~_i                                                           (`fit_rates`)

The errors are relative and absolute, not squared, because runs span decades and a few are outliers. The solver is reweighted
non-negative least squares. A kind that explains no time gets c_j = 0. FLOPs and bytes of one op overlap: see `Roofline`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls

from autoshard.calibrate.errors import Errors, summary

REWEIGHTED = 30  # times; the weights converge much earlier


@dataclass(frozen=True)
class Rates:
    """Seconds per unit of each kind of work."""

    seconds_per: Mapping[str, float]  # by kind of work: seconds per FLOP, byte or launch

    def seconds(self, work: Mapping[str, np.ndarray]) -> np.ndarray:
        """Seconds of runs with `work[kind]` of each kind."""
        return np.sum([np.asarray(work[kind], dtype=float) * c for kind, c in self.seconds_per.items()], axis=0)


def fit_rates(work: Mapping[str, np.ndarray], seconds: np.ndarray) -> Rates:
    """Seconds per unit of each kind of work, from runs i with `work[kind][i]` of each kind and `seconds[i]`.

    The least sum of relative errors, rates not below 0. ValueError for fewer runs than kinds, or a time that is not positive.
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
    return Rates(dict(zip(work, c.tolist())))


@dataclass(frozen=True)
class OpSample:
    """A timed op: op class (matmul, attention, memory, launch), dtype, FLOPs, bytes moved, seconds."""

    op: str
    dtype: str
    flops: float
    bytes: float
    seconds: float


@dataclass(frozen=True)
class Roofline:
    """t = max(F / rate of (op, dtype), M / memory) + launch."""

    flops: Mapping[tuple[str, str], float]  # FLOP/s that large ops of a class and dtype reach
    memory: float  # bytes/s
    launch: float  # seconds
    errors: Mapping[tuple[str, str], Errors]  # on the ops that it was fitted to

    def seconds(self, sample: OpSample) -> float:
        rate = self.flops.get((sample.op, sample.dtype), np.inf)
        return max(sample.flops / rate, sample.bytes / self.memory) + self.launch


def fit_roofline(samples: Sequence[OpSample]) -> Roofline:
    """Rates from the largest ops of each class and dtype, where launch and caches matter least. ValueError without memory and launch."""
    launches = [s.seconds for s in samples if s.op == "launch"]
    copies = [s for s in samples if s.op == "memory"]
    if not launches or not copies:
        raise ValueError("no launch or no memory copy was measured; expected both, so that a roofline can be made")
    launch = min(launches)
    memory = _rate([(s.bytes, s.seconds) for s in copies], launch)
    kinds = sorted({(s.op, s.dtype) for s in samples if s.flops > 0})
    flops = {kind: _rate([(s.flops, s.seconds) for s in samples if (s.op, s.dtype) == kind], launch) for kind in kinds}
    bare = Roofline(flops, memory, launch, {})
    errors = {}
    for kind in sorted({(s.op, s.dtype) for s in samples}):
        of = [s for s in samples if (s.op, s.dtype) == kind]
        errors[kind] = summary(np.array([bare.seconds(s) for s in of]), np.array([s.seconds for s in of]))
    return Roofline(flops, memory, launch, errors)


def _rate(work_and_seconds: Sequence[tuple[float, float]], launch: float) -> float:
    """Work per second of the largest two, the launch left out."""
    largest = sorted(work_and_seconds)[-2:]
    return float(np.median([work / max(seconds - launch, seconds / 2) for work, seconds in largest]))
