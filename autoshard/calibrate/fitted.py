"""A fitted curve with what it is of and how far it is from its measurements, in sample and held out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from autoshard.calibrate.errors import Errors, held_out, summary
from autoshard.calibrate.fit import fit
from autoshard.cost.curves.kinds import bus_factor
from autoshard.cost.curves.records import Curve, Series

MANY = 200  # curves that one is pooled with


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
