"""Rates of a device: FLOPs of each class of ops, bytes and launches per second, from the measured seconds of single ops (`Roofline`)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autoshard.calibrate.errors import Errors, summary


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
        raise ValueError("no launch or no memory copy was measured; expected both, for a roofline: measure for longer (--seconds)")
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
