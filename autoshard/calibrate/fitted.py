"""A fitted curve with its series of measurements and its errors, in sample and held out."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from autoshard.calibrate.errors import Errors, held_out, summary
from autoshard.calibrate.fit import fit
from autoshard.cost import Curve, Series

MANY = 200  # curves that a curve is pooled with at most


@dataclass(frozen=True)
class Fitted:
    """A curve, the series that it was fitted to, and its errors, in sample (`errors`) and held out (`unseen`)."""

    series: Series
    curve: Curve
    errors: Errors
    unseen: Errors

    def to_dict(self) -> dict:
        of = {key: getattr(self.series, key) for key in ("collective", "system", "devices", "nodes", "dtype", "source")}
        errors = {key: getattr(self.errors, key) for key in ("gmae", "mean", "std")}
        held = {"gmae": self.unseen.gmae, "mean": self.unseen.mean, "std": self.unseen.std}
        return {**of, "method": "piecewise", **errors, "held_out": held, "parameters": asdict(self.curve)}  # type: ignore[call-overload]


def nearest(series: Series, others: Sequence[Series]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Sizes and seconds of the other series, of many those with the most equal fields: the `others` of `fit`."""
    # a series with numbers that are not positive is refused when it is fitted itself
    sound = [one for one in others if all(0 < value < math.inf for value in (*one.sizes, *one.seconds))]
    kept = [one for one in sound if one is not series and len(set(one.sizes)) >= 2]
    same = ("system", "collective", "devices", "nodes")
    kept.sort(key=lambda one: -sum(getattr(one, key) == getattr(series, key) for key in same))
    return [(np.array(one.sizes), np.array(one.seconds)) for one in kept[:MANY]]


def fitted(series: Series, others: Sequence[Series] = ()) -> Fitted:
    """The fit of one series and its errors; `others` may be used for the fit. The ValueError names the series."""
    try:
        near = nearest(series, others)
        curve = fit(series.sizes, series.seconds, others=near)
    except ValueError as error:
        raise ValueError(f"{series.name}: {error}") from None
    x, t = np.array(series.sizes), np.array(series.seconds)
    try:
        unseen = summary(*held_out(x, t, lambda x, t: fit(x, t, others=near)))
    except ValueError:  # the series can be fitted, its folds can't: the error on unseen sizes is unknown
        unseen = Errors(math.nan, math.nan, math.nan, 0)
    return Fitted(series, curve, summary(curve.seconds(x), t), unseen)
