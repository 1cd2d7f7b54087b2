"""Errors of predicted seconds p against measured seconds r.

    e = |(p - r) / r|        gmae = exp( mean( ln(e + 4e-4) ) )        mean = mean(e)        std = std(e)          (`summary`)

A perfect predictor has a gmae of 0.04 %: the formula is that of ml_perf_model (Lin et al.), so that results can be compared.

    held out       all sizes except the first and the last are split into `folds` folds; each is predicted from the others  (`held_out`)
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from autoshard.cost import Curve, check

FLOOR = 4e-4

Fitter = Callable[[np.ndarray, np.ndarray], Curve]
Pairs = tuple[np.ndarray, np.ndarray]  # predicted and measured seconds


class Errors(NamedTuple):
    """Errors of predictions against measurements, by the formulas of this module."""

    gmae: float  # relative, as all here: 0.02 is 2 %
    mean: float
    std: float
    num: int  # points


def summary(predicted: np.ndarray, measured: np.ndarray) -> Errors:
    """The errors of predicted against measured seconds, one each; nan where there are none."""
    e = np.abs((np.asarray(predicted) - measured) / measured)
    if not e.size:
        return Errors(np.nan, np.nan, np.nan, 0)
    return Errors(float(np.exp(np.log(e + FLOOR).mean())), float(e.mean()), float(e.std()), e.size)


def pooled(errors: Iterable[Errors]) -> Errors:
    """The exact summary over all points of several summaries; summaries without points are ignored."""
    kept = [e for e in errors if e.num]
    if not kept:
        return summary(np.empty(0), np.empty(0))
    weight = np.array([e.num for e in kept]) / sum(e.num for e in kept)
    gmae = float(np.exp(weight @ np.log([e.gmae for e in kept])))
    mean = float(weight @ np.array([e.mean for e in kept]))
    square = float(weight @ np.array([e.std**2 + e.mean**2 for e in kept]))
    return Errors(gmae, mean, max(square - mean**2, 0.0) ** 0.5, sum(e.num for e in kept))


def held_out(sizes: np.ndarray, seconds: np.ndarray, fitter: Fitter, *, folds: int = 3) -> Pairs:
    """(predicted, measured) seconds of each size except the first and last, by curves that were not fitted to it.

    sizes: bytes. fitter: (sizes, seconds) -> Curve, as `fit`. ValueError where a fold can't be fitted.
    """
    x, t = check(sizes, seconds)
    inside = np.arange(1, len(x) - 1)
    predicted = np.empty(len(x))
    for fold in range(folds):
        out = inside[inside % folds == fold]
        if out.size:
            rest = np.setdiff1d(np.arange(len(x)), out)
            predicted[out] = fitter(x[rest], t[rest]).seconds(x[out])
    return predicted[inside], t[inside]
