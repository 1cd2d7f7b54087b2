"""Interpolation of curves between numbers of devices: from the counts that were measured to any other count.

There are three ways to compare sizes between n and m devices, none of which is right at all sizes (`SCALES`):

    the buffer  x,      the bytes that a rank sends  f(n) x  (f = `bus_factor`),      those that it sends to one other rank  x / n

For each the times at the same scaled size are interpolated (or extrapolated) in log t over log2 n through the two nearest
counts, and the geometric mean of the three is the answer (`Family.at`). Leaving one count out at a time of 130 measured curves:
GMAE 6.9 %; 8.8 %, 9.8 % and 8.4 % with one alone (benchmarks/calibration.py).

Groups over several nodes are compared with groups over several nodes: those over as many nodes, else those with as many devices per
node, else any.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from autoshard.cost.curves.records import Curve, tail_slope

Count = tuple[int, int]  # nodes, devices in all

# bus bandwidth = algorithm bandwidth * this, n devices; 1 for reduce, memory copies and all others
FACTORS = {
    "all_to_all": lambda n: (n - 1) / n,
    "all_to_allv": lambda n: (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_reduce": lambda n: 2 * (n - 1) / n,
}


def bus_factor(collective: str, devices: int) -> float:
    """Bus bandwidth over algorithm bandwidth; 1 for a collective without a factor, and on one device."""
    return float(FACTORS[collective](devices)) if collective in FACTORS and devices > 1 else 1.0


SCALES = (
    lambda collective, n: 1.0,
    bus_factor,
    lambda collective, n: 1.0 / n,
)


@dataclass(frozen=True)
class Family:
    """The curves of one collective on one system, by (nodes, devices in all), and the sizes that were measured."""

    collective: str
    curves: Mapping[Count, Curve]
    sizes: tuple[float, ...]  # bytes, ascending

    def at(self, devices: int, nodes: int = 1) -> Curve:
        """The curve of a count, measured or interpolated. ValueError for several nodes if only one node was measured, and vice versa."""
        if (nodes, devices) in self.curves:
            return self.curves[nodes, devices]
        a, b, weight = self._neighbours(nodes, devices)
        x = np.array(self.sizes)
        scales = SCALES if a != b else (bus_factor,)  # one count alone does not show how latency grows: only the bytes are scaled
        log_t = np.mean([self._interpolated(x, scale, a, b, weight, devices) for scale in scales], axis=0)
        times = np.exp(np.maximum.accumulate(log_t))
        return Curve(self.sizes, tuple(times.tolist()), tail_slope(x, times))

    def _interpolated(self, x: np.ndarray, scale, a: Count, b: Count, weight: float, devices: int) -> np.ndarray:
        at = [np.log(self.curves[c].seconds(x * (scale(self.collective, devices) / scale(self.collective, c[1])))) for c in (a, b)]
        return at[0] + weight * (at[1] - at[0])

    def _neighbours(self, nodes: int, devices: int) -> tuple[Count, Count, float]:
        """Two counts and the weight of the second; the same count twice where there is only one."""
        counts = self._comparable(nodes, devices)
        where = {count: math.log2(count[1]) for count in counts}
        ordered = sorted(counts, key=lambda count: (where[count], count))
        k = sum(where[count] < math.log2(devices) for count in ordered)
        k = min(max(k, 1), len(ordered) - 1)
        if k < 1 or where[ordered[k]] == where[ordered[k - 1]]:
            return ordered[max(k, 0)], ordered[max(k, 0)], 0.0
        a, b = ordered[k - 1], ordered[k]
        return a, b, (math.log2(devices) - where[a]) / (where[b] - where[a])

    def _comparable(self, nodes: int, devices: int) -> list[Count]:
        """The counts to interpolate between: the first kind with two counts, else the first with one."""
        kinds = [
            [c for c in self.curves if c[0] == nodes],
            [c for c in self.curves if c[0] > 1 and nodes > 1 and c[1] // c[0] == devices // nodes],
            [c for c in self.curves if (c[0] > 1) == (nodes > 1)],
        ]
        counts = next((kind for kind in kinds if len(kind) > 1), None) or next((kind for kind in kinds if kind), None)
        if counts is None:
            raise ValueError(
                f"{self.collective} was measured on {'several nodes' if nodes == 1 else 'one node'} only; asked is {nodes} "
                f"node{'s' * (nodes > 1)}: measure it"
            )
        return counts
