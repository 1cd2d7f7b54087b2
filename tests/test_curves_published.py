"""The published predictor, against a transcription of its formulas that shares nothing with ours."""

import math
from pathlib import Path

import numpy as np
import pytest
from scipy.optimize import curve_fit

from autoshard.calibrate import fit, turning_points
from autoshard.calibrate.importers import parse
from autoshard.calibrate.sigmoid import fit_published
from autoshard.cost.curves import Sigmoid, bus_factor
from tests.helpers_refusals import assert_refused

MEASURED = Path(__file__).parent / "data" / "collectives" / "measured.csv"

# -- the transcription: lists and loops, one size at a time, units as published -------------------------------------------------


def mul(collective, n):
    if collective in ("all_to_all", "all_to_allv", "all_gather", "reduce_scatter"):
        return (n - 1) / n
    if collective == "all_reduce":
        return 2 * (n - 1) / n
    return 1


def characteristics(sizes, latency, bus_bw):
    n = len(sizes)
    max_bw = max(bus_bw)
    sats = n - 1
    for idx in reversed(range(n)):
        if idx in (0, n - 1):
            continue
        if bus_bw[idx] < 0.95 * max_bw:
            sats = min(idx + 2, n - 1)
            break
    ln = 4
    for idx in range(n):
        if idx < 5 or idx == n - 1:
            continue
        if abs((latency[idx + 1] - latency[idx - 1]) / 2 / latency[idx]) > 0.1:
            ln = idx - 1
            break
    return math.log2(sizes[ln]), math.log2(sizes[sats]), max_bw, latency[max(ln - 1, 0)]


def sigmoid(x, L, x0, k, b):
    return L / (1 + np.exp(-k * (x - x0))) + b


def parameters(sizes, bus_bw, ln_p, sats_p):
    kept = [(s, bw) for s, bw in zip(sizes, bus_bw) if 2**ln_p <= s <= 2**sats_p]
    xs, ys = np.log2([s for s, _ in kept]), np.log10([bw for _, bw in kept])
    return curve_fit(sigmoid, xs, ys, [max(math.log2(s) for s in sizes), np.median(xs), 1, ys.min()], method="dogbox")[0]


def predict_time(size, ln_p, sats_p, max_bw, overhead, p, m):
    x = math.log2(size)
    if x <= ln_p:
        return overhead
    if x > sats_p:
        return size / max_bw * m / 1e3 + overhead
    return size / 10 ** (p[0] / (1 + math.exp(-p[2] * (x - p[1]))) + p[3]) * m / 1e3


# -- ours against it ---------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_fifty_measured_curves_agree_to_1e_12():
    compared = failed = 0
    for s in parse(MEASURED.read_text(), "measured.csv"):
        m = mul(s.collective, s.devices)
        assert bus_factor(s.collective, s.devices) == m
        latency = [t * 1e6 for t in s.seconds]
        bus_bw = [size / t * m / 1e3 for size, t in zip(s.sizes, latency)]
        four = characteristics(s.sizes, latency, bus_bw)
        try:
            p = parameters(s.sizes, bus_bw, four[0], four[1])
        except (RuntimeError, ValueError):
            assert_refused("published sigmoid", fit_published, np.array(s.sizes), np.array(latency), np.array(bus_bw), m)
            failed += 1
            continue
        ours = fit_published(np.array(s.sizes), np.array(latency), np.array(bus_bw), m)
        in_seconds = fit(s.sizes, s.seconds, "sigmoid", factor=m)  # the same but for the rounding of units
        np.testing.assert_allclose(in_seconds.seconds(np.array(s.sizes)), ours.seconds(np.array(s.sizes)), rtol=1e-4)
        assert (ours.ln_p, ours.sats_p, ours.max_bw, ours.overhead) == pytest.approx(four, rel=1e-12)
        np.testing.assert_allclose(ours.parameters, p, rtol=1e-12)
        sizes = np.concatenate([s.sizes, np.array(s.sizes) * 1.37, [s.sizes[-1] * 100.0, 1.0]])
        expected = [predict_time(v, *four, p, m) for v in sizes]
        np.testing.assert_allclose(ours.predict_data_movement_time(sizes), expected, rtol=1e-12)
        np.testing.assert_allclose(ours.seconds(sizes), np.array(expected) * 1e-6, rtol=1e-12)
        compared += 1
    assert compared + failed >= 50 and compared >= 40


# DRAM curves as published (bandwidths in GB/s, us): A100 and V100
GOLDENS = [
    (Sigmoid(14, 29, 1391.0, 6.45, (2.2096, 20.352, 0.6253, 0.9324)), 2.2096, 20.352, 0.6253, 0.9324),
    (Sigmoid(16, 30, 816.95, 4.833, (1.9472, 19.817, 0.5556, 0.9552)), 1.9472, 19.817, 0.5556, 0.9552),
]


@pytest.mark.parametrize(("curve", "L", "x0", "k", "b"), GOLDENS)
def test_the_published_memory_curves(curve, L, x0, k, b):
    assert curve.predict_data_movement_time(2.0**curve.ln_p) == curve.overhead
    assert curve.predict_data_movement_time(2.0**31) == pytest.approx(2**31 / curve.max_bw / 1e3 + curve.overhead, rel=1e-15)
    bw = 10 ** (L / (1 + math.exp(-k * (22 - x0))) + b)
    assert curve.predict_data_movement_time(2.0**22) == pytest.approx(2**22 / bw / 1e3, rel=1e-13)


def test_its_time_jumps_at_both_turning_points():
    curve = GOLDENS[0][0]
    for p in (curve.ln_p, curve.sats_p):
        below, above = curve.predict_data_movement_time(2.0**p), curve.predict_data_movement_time(2.0**p * (1 + 1e-9))
        assert abs(above / below - 1) > 1e-3


def test_turning_points_of_a_link_with_a_latency():
    size = 2.0 ** np.arange(10, 30)
    latency = 10 + size / 1e5
    # index 8 (2^18): (2^19 - 2^17) / 2 / 1e5 = 2.0 us are 16 % of 12.6 us; at index 7 they are 8.7 % of 11.3 us
    # index 14 (2^24): 94.4 of 100 GB/s, the last below 95 %
    assert turning_points(latency, size / latency / 1e3) == (7, 16)
