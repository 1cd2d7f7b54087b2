"""A curve through its measured sizes, with other curves' shapes between these sizes.

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

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autoshard.cost import Curve, PiecewiseCurve, check, tail_slope

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
