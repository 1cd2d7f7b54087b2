"""Files of measurements and of fitted curves.

A file of curves is JSON: {"format": "autoshard.curves/1", "curves": [...]}, each with what it is (collective, system, devices, nodes,
dtype, source), its method and parameters in SI units, and its errors (gmae, mean, std, held_out).
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from autoshard.calibrate.errors import Errors, held_out, summary
from autoshard.calibrate.fit import PchipCurve, fit
from autoshard.calibrate.sigmoid import Sigmoid, bus_factor
from autoshard.reading import data_of
from autoshard.writing import write_whole

from .records import Curve, PiecewiseCurve, PNorm, Series

FORMAT = "autoshard.curves/1"
MANY = 200  # curves that one is pooled with
KINDS = {"piecewise": PiecewiseCurve, "pchip": PchipCurve, "p_norm": PNorm, "alpha_beta": PNorm, "sigmoid": Sigmoid}


@dataclass(frozen=True)
class Fitted:
    """A curve, what it is of, and how far it is from its measurements, in sample and held out."""

    series: Series
    method: str
    curve: Curve
    errors: Errors
    unseen: Errors

    def to_dict(self) -> dict:
        of = {key: getattr(self.series, key) for key in ("collective", "system", "devices", "nodes", "dtype", "source")}
        errors = {key: getattr(self.errors, key) for key in ("gmae", "mean", "std")}
        held = {"gmae": self.unseen.gmae, "mean": self.unseen.mean, "std": self.unseen.std}
        return {**of, "method": self.method, **errors, "held_out": held, "parameters": asdict(self.curve)}  # type: ignore[call-overload]


def nearest(series: Series, others: Sequence[Series]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Sizes and seconds of the others, of many those most like it by name: what `fit` may take as `like`."""
    kept = [one for one in others if one is not series and len(set(one.sizes)) >= 2 and _sound(one)]
    same = ("system", "collective", "devices", "nodes")
    kept.sort(key=lambda one: -sum(getattr(one, key) == getattr(series, key) for key in same))
    return [(np.array(one.sizes), np.array(one.seconds)) for one in kept[:MANY]]


def _sound(one: Series) -> bool:
    """What isn't is refused when its own turn comes."""
    return all(math.isfinite(value) and value > 0 for value in (*one.sizes, *one.seconds))


def fitted(series: Series, method: str = "piecewise", others: Sequence[Series] = ()) -> Fitted:
    """Fit one series and judge the fit, the others known. ValueError names the series."""
    factor = bus_factor(series.collective, series.devices)
    bus = series.bus_bandwidths or None
    try:
        like = nearest(series, others)
        curve = fit(series.sizes, series.seconds, method, factor=factor, bus_bandwidths=bus, like=like)
    except ValueError as error:
        raise ValueError(f"{series.name}: {error}") from None
    x, t = np.array(series.sizes), np.array(series.seconds)
    try:
        unseen = summary(*held_out(x, t, lambda x, t: fit(x, t, method, factor=factor, like=like)))
    except ValueError:  # the whole can be fitted, its parts can't: nothing is known about unseen sizes
        unseen = Errors(math.nan, math.nan, math.nan, 0)
    return Fitted(series, method, curve, summary(curve.seconds(x), t), unseen)


def save(path: str, curves: Sequence[Fitted]) -> None:
    """Write fitted curves as JSON (docs/formats.md), whole or not at all; OSError where that can't be."""
    record = {"format": FORMAT, "curves": [_finite(one.to_dict()) for one in curves]}
    write_whole(json.dumps(record, indent=1) + "\n", path)


def _finite(value):
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def load(path: str) -> list[tuple[dict, Curve]]:
    """What `save` wrote: (what it is, its curve). ValueError where it is something else."""
    return [(one, curve_of(one["method"], one["parameters"])) for one in data_of(path, "curves")["curves"]]


def curve_of(method: str, parameters: dict) -> Curve:
    return KINDS[method](**{key: tuple(value) if isinstance(value, list) else value for key, value in parameters.items()})
