"""A published predictor of collective times (ml_perf_model), reproduced for comparison with its own formulas and units.

x = log2(size);  sizes in bytes, latency in us, bandwidth in GB/s (1e9);  mul = `bus_factor`;  bus_bw = mul * size / latency / 1e3

    sats    from the end, the first index inside with bus_bw < 0.95 max, then min(index + 2, last)           (`turning_points`)
    ln      the first index >= 5, not the last, with |(lat[i+1] - lat[i-1]) / 2 / lat[i]| > 0.1, then i - 1; 4 where there is none
    fit     log10(bus_bw) = L / (1 + exp(-k (x - x0))) + b  on  ln_p <= x <= sats_p, dogbox                      (`fit_sigmoid`)
    time    overhead up to ln_p;  size / max_bw * mul / 1e3 + overhead above sats_p;  else size / 10^sigmoid * mul / 1e3

The time jumps at both turning points and can fall as the size grows.
Source: owensgroup/ml_perf_model, analysis/memory_bw_utils.py; Lin et al., "Towards Universal Performance Modeling for Machine
Learning Training on Multi-GPU Platforms".
"""

import warnings
from collections.abc import Sequence

import numpy as np
from scipy.optimize import OptimizeWarning, curve_fit

from autoshard.cost import Sigmoid, sigmoid

EPSILON = 4e-4  # GB/s that the published reader of PARAM logs adds to both bandwidths: small ones are printed as 0.000


def turning_points(latency: np.ndarray, bus_bw: np.ndarray) -> tuple[int, int]:
    """Indices ln, where time starts to grow, and sats, where bandwidth has saturated; of samples on a grid of doubling sizes."""
    last = len(latency) - 1
    growing = [i for i in range(5, last) if abs((latency[i + 1] - latency[i - 1]) / 2 / latency[i]) > 0.1]
    below = [i for i in range(1, last) if bus_bw[i] < 0.95 * bus_bw.max()]
    return growing[0] - 1 if growing else 4, min(below[-1] + 2, last) if below else last


def turning_sizes(sizes: Sequence[float], seconds: Sequence[float]) -> list[float]:
    """The sizes where time starts to grow and where bandwidth has saturated. sizes: bytes, ascending, six or more."""
    x, t = np.asarray(sizes, dtype=float), np.asarray(seconds, dtype=float)
    return [float(x[k]) for k in turning_points(t, x / t)]


def fit_sigmoid(x: np.ndarray, t: np.ndarray, *, factor: float = 1.0, bus_bandwidths: np.ndarray | None = None) -> Sigmoid:
    """`fit_published` of ascending sizes (bytes), their seconds, and their bus bandwidths in bytes/s where a tool reported them."""
    latency = t * 1e6
    bus_bw = x / latency / 1e3 * factor if bus_bandwidths is None else bus_bandwidths / 1e9
    return fit_published(x, latency, bus_bw, factor)


def fit_published(size: np.ndarray, latency: np.ndarray, bus_bw: np.ndarray, factor: float = 1.0) -> Sigmoid:
    """The published fit in its own units: bytes on a grid of doubling sizes, us, GB/s. ValueError where the fit fails.

    The result is bit-equal only for bit-equal input: the last digit of one bandwidth moves its parameters by 1e-7.
    """
    ln, sats = turning_points(latency, bus_bw)
    log_size = np.log2(size)
    ln_p, sats_p = log_size[ln], log_size[sats]
    inside = (log_size >= ln_p) & (log_size <= sats_p)
    if inside.sum() < 2:
        raise ValueError(f"the published sigmoid has nothing to fit: time grows from 2^{ln_p:g} bytes, bandwidth stays from 2^{sats_p:g}")
    x, y = log_size[inside], np.log10(bus_bw[inside])
    start = [log_size.max(), np.median(x), 1, y.min()]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", OptimizeWarning)  # about the covariance, which is not used
            L, x0, k, b = curve_fit(sigmoid, x, y, start, method="dogbox")[0].tolist()
    except (RuntimeError, ValueError, TypeError) as error:
        raise ValueError(f"the published sigmoid can't be fitted to these {inside.sum()} samples: {error}") from error
    return Sigmoid(float(ln_p), float(sats_p), float(bus_bw.max()), float(latency[max(ln - 1, 0)]), (L, x0, k, b), factor)
