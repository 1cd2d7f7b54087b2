"""The curves of a curve file: those of records.py, and log t as a monotone cubic (PCHIP) of log x."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

import numpy as np

from autoshard.cost.curves.records import Curve, PiecewiseCurve, PNorm

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


@final
@dataclass(frozen=True)
class PchipCurve(Curve):
    """Monotone cubic in log-log between knots, constant below the first, affine above the last."""

    sizes: tuple[float, ...]
    times: tuple[float, ...]
    tail: float

    @cached_property
    def _inside(self) -> Any:
        from scipy.interpolate import PchipInterpolator  # here: only curves of this kind need it

        return PchipInterpolator(np.log(self.sizes), np.log(self.times))

    def seconds(self, bytes: np.ndarray | float) -> np.ndarray:
        x = np.asarray(bytes, dtype=float)
        first, last = self.sizes[0], self.sizes[-1]
        return np.exp(self._inside(np.log(np.clip(x, first, last)))) + self.tail * np.maximum(x - last, 0.0)


KINDS = {"piecewise": PiecewiseCurve, "pchip": PchipCurve, "p_norm": PNorm, "alpha_beta": PNorm}


def curve_of(method: str, parameters: dict) -> Curve:
    return KINDS[method](**{key: tuple(value) if isinstance(value, list) else value for key, value in parameters.items()})
