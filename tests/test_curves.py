"""Curves: what a fit promises on any data, how far it is from measurements that it has not seen, and other device counts."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.calibrate import fit, held_out, summary
from autoshard.calibrate.fit import alpha_beta, increasing
from autoshard.calibrate.importers import parse
from autoshard.cost import bytes_sent, collective_seconds
from autoshard.cost.curves.device_counts import Family
from autoshard.mesh import LinkCurve, Mesh
from benchmarks.calibration import extrapolated, table, together
from benchmarks.calibration import family as family_of
from tests.helpers_refusals import assert_refused, refusals

MEASURED = Path(__file__).parent / "data" / "collectives" / "measured.csv"
x = 2.0 ** np.arange(9, 30)


@pytest.fixture(scope="module")
def measured():
    return parse(MEASURED.read_text(), "measured.csv")


@st.composite
def noisy(draw):
    """Sizes, and the times of an alpha-beta link with noise, spikes and a change of protocol."""
    num = draw(st.integers(2, 24))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    sizes = np.sort(rng.choice(2.0 ** np.arange(4, 36, 0.5), num, replace=False))
    times = 10 ** rng.uniform(-6, -3) + sizes / 10 ** rng.uniform(8, 12) * np.where(sizes > 10 ** rng.uniform(3, 9), rng.uniform(0.3, 3), 1)
    times = times * np.exp(rng.normal(0, draw(st.sampled_from([0.0, 0.03, 0.3, 1.0])), num)) * np.where(rng.random(num) < 0.1, 5, 1)
    order = rng.permutation(num)
    return sizes[order], times[order]


@given(data=noisy())
@settings(max_examples=500, deadline=None)
def test_a_curve_is_positive_monotone_and_continuous(data):
    curve = fit(*data)
    first, last = data[0].min(), data[0].max()
    at = np.sort(np.concatenate([np.geomspace(first / 8, last * 64, 300), data[0]]))
    t = curve.seconds(at)
    assert (t > 0).all() and np.isfinite(t).all()
    assert (np.diff(t) >= -1e-12 * t[1:]).all()
    nearby = curve.seconds(at * (1 + 1e-9))
    assert np.abs(nearby / t - 1).max() < 1e-6
    assert curve.seconds(last * 128.0) > curve.seconds(last * 64.0)  # bandwidth is never infinite


@given(data=noisy().filter(lambda data: len(data[0]) >= 3))
@settings(max_examples=50, deadline=None)
def test_a_formula_is_positive_and_monotone(data):
    t = alpha_beta(*data).seconds(np.geomspace(1, 1e13, 300))
    assert (t > 0).all() and np.isfinite(t).all() and (np.diff(t) >= -1e-12 * t[1:]).all()


@pytest.mark.parametrize("method", [fit, alpha_beta])
def test_every_method_returns_an_alpha_beta_link(method):
    t = 1e-5 + x / 2e11
    curve = method(x, t)
    np.testing.assert_allclose(curve.seconds(x), t, rtol=1e-9)
    np.testing.assert_allclose(curve.seconds(x * 1.4), 1e-5 + x * 1.4 / 2e11, rtol=1e-9)
    assert curve.seconds(2.0**40) == pytest.approx(1e-5 + 2.0**40 / 2e11, rel=1e-9)


def test_increasing_is_the_nearest_in_absolute_differences():
    rng = np.random.default_rng(0)
    for _ in range(50):
        z = rng.integers(0, 4, 5).astype(float)
        every = np.array(np.meshgrid(*[range(4)] * 5)).reshape(5, -1).T
        best = min(np.abs(z - y).sum() for y in every if (np.diff(y) >= 0).all())
        y = increasing(z)
        assert (np.diff(y) >= 0).all()
        assert np.abs(z - y).sum() == pytest.approx(best)


def test_a_spike_loses_against_its_neighbours():
    t = np.full(9, 1e-5)
    t[4] = 1e-3
    np.testing.assert_allclose(fit(x[:9], t).seconds(x[:8]), 1e-5)


def test_rows_of_one_size_give_their_median_in_any_order():
    curve = fit([2e6, 1e6, 1e6, 1e6], [2e-3, 9e-3, 1e-3, 1e-3])
    assert curve.seconds(1e6) == pytest.approx(1e-3)


test_what_is_no_measurement_is_refused = refusals(
    (lambda: fit([1e3, 1e4], [1e-5]), "2 sizes and 1 times"),
    (lambda: fit([1e3], [1e-5]), "1 different size measured; expected at least 2"),
    (lambda: fit([], []), "0 different sizes"),
    (lambda: fit([1e3, 1e3], [1e-5, 2e-5]), "1 different size measured"),
    (lambda: fit([1e3, 1e4], [1e-5, float("nan")]), "row 2 has a time of nan"),
    (lambda: fit([1e3, 1e4], [0.0, 1e-5]), "row 1 has a time of 0"),
    (lambda: fit([1e3, 1e4], [1e-5, -1e-5]), "row 2 has a time of -1e-05"),
    (lambda: fit([0.0, 1e4], [1e-5, 1e-5]), "row 1 has a size of 0"),
    (lambda: fit([1e3, float("inf")], [1e-5, 1e-5]), "row 2 has a size of inf"),
    (lambda: family_of("all_reduce", {(1, 8): (x, 1e-5 + x / 1e11)}).at(16, nodes=2), "measured on one node only; asked is 2 nodes"),
    (lambda: family_of("all_reduce", {(2, 3): (x, x)}), "3 devices on 2 nodes can't be"),
)


def test_a_perfect_predictor_has_a_gmae_of_four_in_ten_thousand():
    assert summary(x, x).gmae == pytest.approx(4e-4)
    assert summary(1.1 * x, x).mean == pytest.approx(0.1)


def test_held_out_sizes_are_predicted_by_a_curve_that_has_not_seen_them():
    seen = []

    def spy(sizes, seconds):
        seen.append(set(sizes))
        return fit(sizes, seconds)

    predicted, measured = held_out(x, 1e-5 + x / 2e11, spy)
    assert len(seen) == 3 and len(predicted) == len(x) - 2
    assert set.intersection(*seen) == {x[0], x[-1]}
    np.testing.assert_allclose(predicted, measured, rtol=1e-9)


def test_measured_curves_are_predicted_within_three_percent(measured):
    """GMAE over 52 curves; benchmarks/calibration.py has all 130."""
    inside = together(held_out(np.array(s.sizes), np.array(s.seconds), fit) for s in measured)
    beyond = together(extrapolated(np.array(s.sizes), np.array(s.seconds), fit) for s in measured)
    assert inside.gmae < 0.024 and beyond.gmae < 0.06
    formula = together(held_out(np.array(s.sizes), np.array(s.seconds), alpha_beta) for s in measured)
    assert inside.gmae < formula.gmae / 2


def test_another_dtype_says_what_lies_between(measured):
    half, int8 = (next(s for s in measured if (s.collective, s.devices, s.dtype) == ("all_reduce", 8, dtype)) for dtype in ("half", "int8"))
    a, b = (np.array(half.sizes), np.array(half.seconds)), (np.array(int8.sizes), np.array(int8.seconds))
    alone = summary(*held_out(*a, fit))
    both = summary(*held_out(*a, lambda s, t: fit(s, t, others=[b])))
    assert both.gmae < alone.gmae
    shifted = fit(a[0][::2], a[1][::2], others=[b])
    np.testing.assert_allclose(shifted.seconds(a[0][::2]), fit(a[0][::2], a[1][::2]).seconds(a[0][::2]), rtol=0.02)


@given(data=noisy(), like=st.lists(noisy(), max_size=3))
@settings(max_examples=100, deadline=None)
def test_a_pooled_curve_keeps_its_own_sizes_and_is_monotone(data, like):
    alone, pooled = fit(*data), fit(*data, others=like)
    first, last = data[0].min(), data[0].max()
    at = np.sort(np.concatenate([np.geomspace(first / 8, last * 64, 300), *(s for s, _ in like)]))
    t = pooled.seconds(at)
    assert (t > 0).all() and (np.diff(t) >= -1e-12 * t[1:]).all()
    np.testing.assert_allclose(pooled.seconds(data[0]), alone.seconds(data[0]), rtol=1e-12)
    np.testing.assert_allclose(pooled.seconds(last * 3), alone.seconds(last * 3), rtol=1e-12)


@pytest.mark.parametrize(("count", "is_pooled"), [(4, False), (5, True)])
def test_five_sizes_are_enough_to_compare_curves_at(count, is_pooled):
    sizes, between = np.geomspace(1e3, 1e7, count), np.geomspace(1e3, 1e7, 21)
    pooled = fit(sizes, 1e-5 + sizes / 1e9, others=[(between, 2e-5 + between / 5e8)])
    assert (len(pooled.sizes) > count) == is_pooled


def steps(scale: float, at: float) -> np.ndarray:
    """Two protocols: the second starts at a size and is dearer there."""
    return scale * np.where(x < at, 1e-5 + x / 1e10, 2e-5 + x / 4e10)


def test_a_curve_of_the_same_shape_is_believed_and_noise_is_not():
    ours, same, other = steps(1.0, 2.0**17), steps(3.0, 2.0**17), steps(1.0, 2.0**22)
    rng = np.random.default_rng(0)
    noise = [(x, np.exp(rng.uniform(-1, 1, len(x))) * ours) for _ in range(20)]
    alone, believed, fooled = (
        summary(*held_out(x, ours, lambda s, t, like=like: fit(s, t, others=like)))
        for like in ([], [*noise, (x, same)], [*noise, (x, other)])
    )
    assert believed.mean < 0.2 * alone.mean  # the step is known though it is held out
    assert fooled.mean < 1.1 * alone.mean  # negative control


def test_a_count_between_two_is_between_their_times(measured):
    chosen = {(1, s.devices): s for s in measured if (s.collective, s.dtype, s.system) == ("all_gather", "half", "a100_sxm@nccl-2.27.3")}
    family = family_of("all_gather", {count: (np.array(s.sizes), np.array(s.seconds)) for count, s in chosen.items() if count[1] != 4})
    s = chosen[1, 4]
    assert summary(family.at(4).seconds(np.array(s.sizes)), np.array(s.seconds)).gmae < 0.08
    assert family.at(8) is family.curves[1, 8]
    assert (np.diff(family.at(16).seconds(x)) >= 0).all()


def test_one_count_serves_all_where_no_other_was_measured():
    family = family_of("all_reduce", {(1, 8): (x, 1e-5 + x / 1e11)})
    assert family.at(4).seconds(1e9) < family.at(8).seconds(1e9)


# -- on a mesh: curves replace latency and bandwidth, and travel with it


CURVE = LinkCurve("all_gather", (1e3, 1e6), (1e-4, 2e-3), 2e-9, 0.05)


def measured_mesh():
    mesh = Mesh.from_bandwidths((2, 4))
    return replace(mesh, axes=(replace(mesh.axes[0], curves=(CURVE,)), mesh.axes[1]))


def test_a_measured_collective_takes_its_curve():
    axis = measured_mesh().axes[0]
    # constant below, half way between the two, the tail above
    expected = [(1.0, 1e-4), (1e3, 1e-4), ((1e3 + 1e6) / 2, 1.05e-3), (1e6, 2e-3), (3e6, 2e-3 + 2e6 * 2e-9)]
    for size, seconds in expected:
        assert collective_seconds("all_gather", axis, size) == pytest.approx(seconds)
    np.testing.assert_allclose(collective_seconds("all_gather", axis, np.array([size for size, _ in expected])), [t for _, t in expected])
    assert collective_seconds("all_gather", axis, 0.0) == 0.0
    assert bytes_sent("all_gather", axis, 1e6) == 5e5  # a curve says nothing about bytes


def test_the_others_take_latency_and_bandwidth():
    with_curve, without = measured_mesh().axes[0], Mesh.from_bandwidths((2, 4)).axes[0]
    assert collective_seconds("all_reduce", with_curve, 1e6) == collective_seconds("all_reduce", without, 1e6)
    alone = replace(with_curve, size=1)
    assert collective_seconds("all_gather", alone, 1e6) == 0.0


def test_curves_travel_with_the_mesh():
    mesh = measured_mesh()
    assert Mesh.from_dict(mesh.to_dict()) == mesh
    assert Mesh.from_dict(json.loads(json.dumps(mesh.to_dict()))) == mesh
    assert "curves" not in mesh.to_dict()["axes"][1]


WRONG = [
    ({"sizes": [1e6, 1e3]}, "both in order"),
    ({"sizes": [1e3]}, "1 sizes, 2 times"),
    ({"seconds": [1e-4, float("nan")]}, "something other than numbers"),
    ({"tail": -1.0}, "something other than numbers"),
    ({"bandwidth": 1.0}, "not a mesh"),
]


@pytest.mark.parametrize(("change", "sentence"), WRONG)
def test_a_curve_that_can_not_be_is_refused(change, sentence):
    data = measured_mesh().to_dict()
    data["axes"][0]["curves"] = [{**data["axes"][0]["curves"][0], **change}]
    assert_refused(sentence, Mesh.from_dict, data)


# -- the table of benchmarks/calibration.py fits 80 columns, however many systems were measured


def rows_of(num):
    errors = {"gmae": 1.23456, "mean": 0.987654}
    systems = {f"system-{k:03d}-of-a-long-name": errors for k in range(num)}
    return [{"what": "held out, pooled, strict", "points": 123456, "failures": 1234, "systems": systems, **errors} for _ in range(13)]


@pytest.mark.parametrize(
    "counts, nodes, devices, expected",
    [
        ([(1, 2), (1, 4), (1, 8), (2, 16)], 1, 3, ((1, 2), (1, 4), np.log2(1.5))),
        ([(1, 2), (1, 4), (1, 8), (2, 16)], 1, 16, ((1, 4), (1, 8), 2.0)),  # beyond those that were measured
        ([(1, 4), (1, 8)], 1, 2, ((1, 4), (1, 8), -1.0)),
        ([(1, 8), (2, 8), (2, 16), (4, 32)], 2, 12, ((2, 8), (2, 16), np.log2(1.5))),  # of as many nodes
        ([(1, 8), (2, 16), (4, 32), (8, 32)], 3, 24, ((2, 16), (4, 32), np.log2(1.5))),  # of as many devices per node
        ([(1, 8), (2, 8), (4, 32)], 3, 24, ((2, 8), (4, 32), np.log2(3) / 2)),  # of several nodes
        ([(1, 8), (2, 16)], 3, 24, ((2, 16), (2, 16), 0.0)), ([(1, 8), (2, 16)], 1, 4, ((1, 8), (1, 8), 0.0)),
        ([(2, 16), (4, 16)], 3, 24, ((4, 16), (4, 16), 0.0)),  # counts of equally many devices are no two
    ],
)  # fmt: skip
def test_a_count_is_interpolated_between_the_nearest_of_the_most_comparable_counts(counts, nodes, devices, expected):
    a, b, weight = Family("all_gather", dict.fromkeys(counts), (1.0,))._neighbours(nodes, devices)
    assert (a, b) == expected[:2] and weight == pytest.approx(expected[2])


def test_the_table_of_many_systems_fits_80_columns():
    for num in (1, 60):
        lines = table(rows_of(num))
        assert max(map(len, lines)) <= 80
        assert sum(line.count("123.46 / 98.77") for line in lines) == 13 * (num + 1)  # each method for all, and for each system
