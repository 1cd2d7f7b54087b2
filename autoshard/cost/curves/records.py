"""The records of a measurement and of a curve. SI units: bytes, seconds, bytes per second.

B = the bytes of the largest buffer that one rank of the group holds (the "size" of nccl-tests), as in cost/collectives.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Series:
    """Measured seconds of one collective over sizes, in the order measured; `collective` may name a device figure as well."""

    collective: str
    devices: int  # in one group, over all its nodes
    sizes: tuple[float, ...] = ()  # bytes
    seconds: tuple[float, ...] = ()
    system: str = ""
    nodes: int = 1
    dtype: str = ""
    source: str = ""

    @property
    def name(self) -> str:
        where = f" on {self.system}" if self.system else ""
        nodes = f" of {self.nodes} nodes" if self.nodes > 1 else ""
        return f"{self.collective}{where}, {self.devices} devices{nodes}{', ' + self.dtype if self.dtype else ''}"


@dataclass(frozen=True)
class Curve:
    """Seconds over bytes: affine between knots, constant below the first, affine with slope `tail` above the last."""

    sizes: tuple[float, ...]  # bytes, ascending
    times: tuple[float, ...]  # seconds, ascending or equal
    tail: float  # seconds per byte

    def seconds(self, bytes: np.ndarray | float) -> np.ndarray:
        """Seconds of a collective with B = `bytes`, elementwise."""
        x = np.asarray(bytes, dtype=float)
        return np.interp(x, self.sizes, self.times) + self.tail * np.maximum(x - self.sizes[-1], 0.0)


Numbers = Sequence[float] | np.ndarray


def check(sizes: Numbers, seconds: Numbers) -> tuple[np.ndarray, np.ndarray]:
    """Different sizes, ascending, with the median of the seconds measured at each. ValueError for rows that are no measurement."""
    x, t = np.asarray(sizes, dtype=float), np.asarray(seconds, dtype=float)
    if x.ndim != 1 or x.shape != t.shape:
        raise ValueError(f"{x.size} sizes and {t.size} times; expected one time for each size, in two lists of one length")
    for what, unit, values in (("size", "bytes", x), ("time", "seconds", t)):
        wrong = np.flatnonzero(~(np.isfinite(values) & (values > 0)))
        if wrong.size:
            k = int(wrong[0])
            raise ValueError(
                f"row {k + 1} has a {what} of {values[k]:g} {unit}; expected a positive number: leave out rows that were not measured"
            )
    different, place = np.unique(x, return_inverse=True)
    if different.size < 2:
        plural = "s" * (different.size != 1)
        raise ValueError(f"{different.size} different size{plural} measured; expected at least 2: measure more sizes")
    if different.size == x.size:
        return different, t[np.argsort(x)]
    return different, np.array([np.median(t[place == k]) for k in range(different.size)])


def tail_slope(x: np.ndarray, t: np.ndarray, last: int = 3) -> float:
    """Seconds per byte beyond the last sample: the least positive of the secants to the three samples before it.

    The least, because a curve that ends before its bandwidth saturates is steeper in its middle than beyond its end. Where all
    secants are flat, the samples show no bandwidth, and the time grows in proportion to the size.
    """
    slopes = [(t[-1] - t[-1 - k]) / (x[-1] - x[-1 - k]) for k in range(1, min(last, len(x) - 1) + 1)]
    positive = [slope for slope in slopes if slope > 1e-3 * t[-1] / x[-1]]  # less than that over a doubling is noise
    return float(min(positive, default=t[-1] / x[-1]))
