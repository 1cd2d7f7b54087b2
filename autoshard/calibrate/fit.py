"""Curves fitted to measured sizes and times, and what they assume between and beyond the sizes.

    z = argmin sum_i |log t_i - z_i|,  z_1 <= z_2 <= ...            (`increasing`: isotonic regression by medians)
    t(x) = affine between the (x_i, exp z_i)                        a latency and a bandwidth of its own between two sizes
    t(x) = t_m + tail * (x - x_m)  for x > x_m                      (`records.tail_slope`);  t(x) = t_1  for x < x_1

Medians, because an outlier (a retry, a clock) should not raise its neighbours. Affine in size and not in log size, because an
alpha-beta link is affine: held out on 130 measured curves, GMAE / mean are 2.2 / 5.0 % (benchmarks/calibration.py), against 2.4 / 5.4 %
of a monotone cubic (PCHIP) of log x. How a curve departs from affine between two sizes cannot be predicted from the curve itself
(nearest neighbours in its slopes, other systems held out, gain nothing), but it can be predicted from other curves (`pooled`):

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

from collections.abc import Sequence

import numpy as np
from scipy.optimize import least_squares

from autoshard.cost import Curve, check, tail_slope

Numbers = Sequence[float] | np.ndarray


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


def alpha_beta(sizes: Numbers, seconds: Numbers) -> Curve:
    """The link t = a + x/B with the least squares of log t."""
    x, t = check(sizes, seconds)

    def error(q: np.ndarray) -> np.ndarray:
        return np.log(np.exp(q[0]) + x / np.exp(q[1])) - np.log(t)

    a, B = np.exp(least_squares(error, [np.log(t.min()), np.log(x[-1] / t[-1])]).x)
    return Curve((0.0, float(x[-1])), (float(a), float(a + x[-1] / B)), float(1 / B))


def fit(sizes: Numbers, seconds: Numbers, *, others: Sequence[tuple[np.ndarray, np.ndarray]] = ()) -> Curve:
    """The curve through measured seconds; the rows may have any order, rows of one size count as their median.

    others: sizes and seconds of other measured curves, to predict the seconds between the sizes of this one; each is weighted by how
    well it agrees at the sizes that were measured here (`pooled`). The ValueError names the row that is no measurement.
    """
    x, t = check(sizes, seconds)
    times = np.exp(increasing(np.log(t)))
    curve = Curve(tuple(x.tolist()), tuple(times.tolist()), tail_slope(x, times))
    return pooled(curve, x, others) if others else curve


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
    return Curve(tuple(knots[order].tolist()), tuple(times.tolist()), tail_slope(x, t))


def _affine(l: np.ndarray, x: np.ndarray, r: np.ndarray, at_l: np.ndarray, at_r: np.ndarray) -> np.ndarray:  # noqa: E741 (as above)
    """log A(x)."""
    return np.log(at_l + (at_r - at_l) * (x - l) / (r - l))


def _departures(l, x, r, at_l, at_x, at_r, first: float, last: float) -> np.ndarray:  # noqa: E741
    """d(x); 0 where the other curve was not measured all the way from l to r."""
    return np.where((l >= first) & (r <= last), np.log(at_x) - _affine(l, x, r, at_l, at_r), 0.0)
