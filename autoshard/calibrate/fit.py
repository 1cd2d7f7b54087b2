"""Curves fitted to measured sizes and times: the methods, and what each assumes between and beyond the sizes.

    piecewise    z = argmin sum_i |log t_i - z_i|,  z_1 <= z_2 <= ...     (`increasing`: isotonic regression by medians)
                 t(x) = affine between the (x_i, exp z_i)                    a latency and a bandwidth of its own between two sizes
                 t(x) = t_m + tail * (x - x_m)  for x > x_m                   (`records.tail_slope`);  t(x) = t_1  for x < x_1
    pchip        the same z by least squares; log t a monotone cubic (PCHIP) of log x; the same tail
    p_norm       t = (a^p + (x/B)^p)^(1/p)                                 least squares of log t
    alpha_beta   t = a + x/B                                                      least squares of log t

Medians, because an outlier (a retry, a clock) should not raise its neighbours. Affine in size and not in log size, because an
alpha-beta link is affine: held out on 130 measured curves, GMAE / mean are 2.2 / 5.0 % against 2.4 / 5.4 % of pchip
(benchmarks/calibration.py). How a curve departs from affine between two sizes cannot be predicted from the curve itself (nearest
neighbours in its slopes, other systems held out, gain nothing), but it can be predicted from other curves (`pooled`):

    l < x < r       a size and its neighbours among those measured;  A[t](x) = affine between (l, t(l)) and (r, t(r))
    d_j(x)  =       log t_j(x) - log A[t_j](x)                       how curve j departs from affine there      (`_departures`)
    z_h(x)  =       log A[t](x) + a d_j(x)                           hypothesis h = (j, a), a in AGREEMENTS; a = 0 is the curve alone
    b_h     =       mean_i |log t_i - z_h(x_i)|                      over the measured sizes, each predicted from its neighbours
    w_h     ~       p_h b_h^-m                                       m sizes with Laplace errors of unknown scale, its prior 1 / scale
    z(x)    =       sum_h w_h z_h(x), between log t(l) and log t(r)                                            (`pooled`)

p: ALONE for the curve alone, the rest shared by all others. The names of the curves do not matter: another dtype of the same
collective, another collective, or another version of a library is weighted by how well it agrees at the measured sizes.
Of 130 measured curves, 3 folds: GMAE / mean 2.2 / 5.0 % alone, 1.5 / 4.0 % with the other curves (benchmarks/calibration.py).
"""

from collections.abc import Callable, Sequence

import numpy as np
from scipy.optimize import isotonic_regression, least_squares

from autoshard.cost import Curve, PchipCurve, PiecewiseCurve, PNorm, check, tail_slope


def increasing(z: np.ndarray) -> np.ndarray:
    """The increasing sequence nearest to z in sum of absolute differences: neighbours that fall are pooled to their median."""
    pools: list[tuple[float, list[float]]] = []  # median, members
    for value in z.tolist():
        pool = (value, [value])
        while pools and pools[-1][0] > pool[0]:
            members = pools.pop()[1] + pool[1]
            pool = (float(np.median(members)), members)
        pools.append(pool)
    return np.concatenate([np.full(len(members), median) for median, members in pools])


def through(kind: type[PiecewiseCurve] | type[PchipCurve], x: np.ndarray, log_times: np.ndarray) -> Curve:
    times = np.exp(log_times)
    return kind(tuple(x.tolist()), tuple(times.tolist()), tail_slope(x, times))


def fit_p_norm(x: np.ndarray, t: np.ndarray) -> Curve:
    """The best of several starts, because the sum of squares has several minima."""

    def error(q: np.ndarray) -> np.ndarray:
        return np.log(PNorm(np.exp(q[0]), np.exp(q[1]), np.exp(q[2])).seconds(x)) - np.log(t)

    log_a, log_B = np.log(t.min()), np.log(x[-1] / t[-1])
    lower, upper = [log_a - 12, log_B - 12, np.log(0.2)], [log_a + 6, log_B + 12, np.log(20.0)]
    fits = [least_squares(error, [log_a, log_B, np.log(p)], bounds=(lower, upper)) for p in (0.7, 1.0, 3.0)]
    a, B, p = np.exp(min(fits, key=lambda one: one.cost).x)
    return PNorm(float(a), float(B), float(p))


def fit_alpha_beta(x: np.ndarray, t: np.ndarray) -> Curve:
    def error(q: np.ndarray) -> np.ndarray:
        return np.log(np.exp(q[0]) + x / np.exp(q[1])) - np.log(t)

    a, B = np.exp(least_squares(error, [np.log(t.min()), np.log(x[-1] / t[-1])]).x)
    return PNorm(float(a), float(B))


METHODS: dict[str, tuple[Callable[[np.ndarray, np.ndarray], Curve], int]] = {  # fit, and the least number of sizes
    "piecewise": (lambda x, t: through(PiecewiseCurve, x, increasing(np.log(t))), 2),
    "pchip": (lambda x, t: through(PchipCurve, x, isotonic_regression(np.log(t)).x), 2),
    "p_norm": (fit_p_norm, 3),
    "alpha_beta": (fit_alpha_beta, 2),
}


def fit(
    sizes: Sequence[float] | np.ndarray,
    seconds: Sequence[float] | np.ndarray,
    method: str = "piecewise",
    *,
    others: Sequence[tuple[np.ndarray, np.ndarray]] = (),
) -> Curve:
    """The curve through measured seconds; the rows may have any order, rows of one size count as their median.

    others: sizes and seconds of other measured curves, to predict the seconds between the sizes of this one; each is weighted by how
    well it agrees at the sizes that were measured here (`pooled`).

    The ValueError names the row that is no measurement, or the method that can't be fitted.
    """
    if method not in METHODS:
        raise ValueError(f"unknown method {method!r}; known are {', '.join(METHODS)}")
    how, at_least = METHODS[method]
    x, t = check(sizes, seconds, at_least=at_least)
    return pooled(how(x, t), x, others) if others else how(x, t)


# -- the shapes of other curves -----------------------------------------------------------------------------------------------------


AGREEMENTS = (0.5, 1.0)
ALONE = 0.9  # most curves of a file are unrelated; with 0.5 a system without related curves loses a tenth of its accuracy
DIGITS = 1e-3  # relative: tools print three or four digits, so no agreement is better
ENOUGH = 3  # sizes to compare curves at

Pairs = Sequence[tuple[np.ndarray, np.ndarray]]  # sizes and seconds of each other curve


def pooled(curve: Curve, x: np.ndarray, others: Pairs) -> Curve:
    """The increasing curve through sizes x, with knots at the others' sizes between them; `curve` itself where x are too few sizes."""
    checked = [check(*other) for other in others]
    between = np.unique(np.concatenate([s for s, _ in checked])) if checked else np.empty(0)
    between = np.setdiff1d(between[(between > x[0]) & (between < x[-1])], x)
    if not between.size or len(x) < ENOUGH + 2:
        return curve
    t = curve.seconds(x)
    right = np.searchsorted(x, between)
    known = [(np.interp(x, s, u), np.interp(between, s, u), s[0], s[-1]) for s, u in checked]
    alone = _affine(x[:-2], x[1:-1], x[2:], t[:-2], t[2:])
    errors, moved, priors = [np.abs(np.log(t[1:-1]) - alone).mean()], [np.zeros(len(between))], [ALONE]
    for at_x, at_between, first, last in known:
        at_sizes = _departures(x[:-2], x[1:-1], x[2:], at_x[:-2], at_x[1:-1], at_x[2:], first, last)
        inside = _departures(x[right - 1], between, x[right], at_x[right - 1], at_between, at_x[right], first, last)
        for a in AGREEMENTS:
            errors.append(np.abs(np.log(t[1:-1]) - alone - a * at_sizes).mean())
            moved.append(a * inside)
            priors.append((1 - ALONE) / len(checked) / len(AGREEMENTS))
    log_w = np.log(priors) - (len(x) - 2) * np.log(np.array(errors) + DIGITS)
    w = np.exp(log_w - log_w.max())
    z = _affine(x[right - 1], between, x[right], t[right - 1], t[right]) + w / w.sum() @ np.array(moved)
    new_times = np.clip(np.exp(z), t[right - 1], t[right])
    knots, times = np.concatenate([x, between]), np.concatenate([t, new_times])
    order = np.argsort(knots)
    times = np.maximum.accumulate(times[order])  # of several sizes in one gap
    return PiecewiseCurve(tuple(knots[order].tolist()), tuple(times.tolist()), tail_slope(x, t))


def _affine(l: np.ndarray, x: np.ndarray, r: np.ndarray, at_l: np.ndarray, at_r: np.ndarray) -> np.ndarray:  # noqa: E741 (as above)
    """log A(x)."""
    return np.log(at_l + (at_r - at_l) * (x - l) / (r - l))


def _departures(l, x, r, at_l, at_x, at_r, first: float, last: float) -> np.ndarray:  # noqa: E741
    """d(x); 0 where the other curve was not measured all the way from l to r."""
    return np.where((l >= first) & (r <= last), np.log(at_x) - _affine(l, x, r, at_l, at_r), 0.0)
