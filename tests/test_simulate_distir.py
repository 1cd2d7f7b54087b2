"""The published simulator's figures, reproduced under its own rules and constants; and rates fitted to its real runs."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import spearmanr

from autoshard.pipeline import Parallel
from benchmarks.distir import DISTIR_83D7FC3, DISTIR_3386EDC, MLP, step_seconds
from benchmarks.mlp_runs import Runs, calibrate, fit_rates, held_out, read
from tests.helpers_refusals import refusals

DATA = Path(__file__).parent / "data" / "distir"
FIGURE3 = json.loads((DATA / "figure3.json").read_text())
FIGURE4 = json.loads((DATA / "figure4_grid.json").read_text())
BY_KEY = {"figure3_3386edc": DISTIR_3386EDC, "figure3_83d7fc3_units_fixed": DISTIR_83D7FC3}
DEVICES = (2, 4, 8, 16, 32)


def speedups(constants):
    """Data parallel by batch, pipeline of batch 4096 by microbatches, over DEVICES."""
    whole = {b: step_seconds(MLP(64, 4096, b), Parallel(), constants) for b in (512, 1024, 2048, 4096)}
    dp = {b: [t / step_seconds(MLP(64, 4096, b), Parallel(data=n), constants, moved="inputs") for n in DEVICES] for b, t in whole.items()}
    grids = {k: [Parallel(pipeline=n, microbatches=k) for n in DEVICES] for k in (4, 8, 16, 32)}
    pp = {k: [whole[4096] / step_seconds(MLP(64, 4096, 4096), grid, constants, moved="inputs") for grid in row] for k, row in grids.items()}
    return dp, pp


@pytest.mark.parametrize("key", BY_KEY)
def test_the_forty_speedups_of_figure_3(key):
    dp, pp = speedups(BY_KEY[key])
    for b, row in dp.items():
        assert row == pytest.approx(FIGURE3[key]["dp"][str(b)], rel=1e-9)
    for k, row in pp.items():
        assert row == pytest.approx(FIGURE3[key]["pp"][str(k)], rel=1e-9)


def test_the_speedups_depend_on_the_constants():
    """Negative control: with any one constant changed by a hundredth some speed-up is off."""
    for name in ("flops", "memory_bandwidth", "link_bandwidth"):
        dp, _ = speedups(replace(DISTIR_3386EDC, **{name: getattr(DISTIR_3386EDC, name) * 1.01}))
        assert dp[512] != pytest.approx(FIGURE3["figure3_3386edc"]["dp"]["512"], rel=1e-4)


def test_the_grid_of_figure_4():
    assert len(FIGURE4) == 111
    for row in FIGURE4:
        taken = step_seconds(MLP(64, 8192, 8192), Parallel(row["d"], row["h"], row["p"], row["k"]), moved="everything")
        assert 8192 / taken == pytest.approx(row["got"], rel=1e-9), row  # what that commit gives
        assert 8192 / taken == pytest.approx(row["ref"], rel=1e-9 if row["d"] == 1 else 0.0283), row  # what was published
    best = max((row for row in FIGURE4 if row["d"] * row["h"] * row["p"] == 16), key=lambda row: row["ref"])
    assert (best["d"], best["h"], best["p"]) == (4, 4, 1)


def test_a_step_of_one_device_is_the_sum_by_hand():
    """64 layers of 3 matmuls, 2 relus, and the loss twice: as written in the rules, nothing else."""
    matmul = 2 * 2 * 4096**2 / 1.2e12 + 2 * 4096**3 / 1e14
    add = 2 * 4 * 4096**2 / 1e14
    assert step_seconds(MLP(64, 4096, 4096), Parallel()) == pytest.approx(64 * (3 * matmul + add) + add)


# -- rates fitted to some real runs predict the others


RUNS, SECONDS = read(DATA / "real_vs_simulated_mlp.csv")


@pytest.mark.parametrize("seed", [None, 0, 1, 2])
def test_runs_held_out_are_predicted(seed):
    predicted = held_out(RUNS, SECONDS, seed=seed)
    assert len(RUNS) == 54
    assert np.mean(np.abs(predicted / SECONDS - 1)) <= 0.04
    assert spearmanr(predicted, SECONDS).statistic >= 0.99


def test_runs_of_other_times_are_not():
    """Negative control: the same rates, times dealt to the wrong runs."""
    wrong = np.random.default_rng(0).permutation(SECONDS)
    assert np.mean(np.abs(held_out(RUNS, wrong) / wrong - 1)) > 0.3


def test_a_known_machine_is_found_again():
    weights = RUNS.layers * RUNS.width**2
    flops, bus = 3 * 2 * RUNS.batch / RUNS.devices * weights, 2 * (RUNS.devices - 1) / RUNS.devices * weights * 4
    found = calibrate(RUNS, flops / 1e13 + RUNS.layers * 1e-4 + 1e-3 + bus / 2e9)
    assert found.seconds_per == pytest.approx({"flops": 1e-13, "layers": 1e-4, "steps": 1e-3}, rel=1e-6)
    assert found.seconds_per_bus_byte == pytest.approx({2: 5e-10, 4: 5e-10}, rel=1e-6)


def test_a_world_size_that_was_never_measured_is_predicted_from_the_others():
    found = calibrate(RUNS, SECONDS)
    eight = Runs(*(np.array([float(x)]) for x in (8, 16, 8192, 1024)))
    two, four = (Runs(*(np.array([float(x)]) for x in (n, 16, 8192, 1024))) for n in (2, 4))
    assert 0.2 * found.seconds(four)[0] < found.seconds(eight)[0] < 2 * found.seconds(two)[0]
    alone = calibrate(RUNS[RUNS.devices == 1], SECONDS[RUNS.devices == 1])  # nothing known of any bus: compute alone
    assert alone.seconds(four)[0] < found.seconds(four)[0]


def test_rates_of_runs_are_found_again():
    rng = np.random.default_rng(0)
    work = {"flops": 10 ** rng.uniform(9, 13, 40), "launches": rng.integers(1, 100, 40), "nothing": np.ones(40)}
    seconds = work["flops"] / 1e13 + work["launches"] * 1e-4
    seconds[3] *= 5  # an odd run
    rates = fit_rates(work, seconds)
    assert 1 / rates["flops"] == pytest.approx(1e13, rel=1e-3)
    assert rates["launches"] == pytest.approx(1e-4, rel=1e-3)
    few = np.arange(40) % 3 > 0
    of_few = fit_rates({kind: of[few] for kind, of in work.items()}, seconds[few])
    others = sum(of[~few] * of_few[kind] for kind, of in work.items())
    assert np.median(np.abs(others / seconds[~few] - 1)) < 1e-3


test_what_does_not_divide_and_what_is_no_time_is_said = refusals(
    (lambda: fit_rates({"a": [1.0, 2.0]}, np.array([1.0, np.nan])), "the time of run 2"),
    (lambda: step_seconds(MLP(64, 4096, 4096), Parallel(pipeline=3)), "64 layers don't divide into 3 parts"),
    (lambda: step_seconds(MLP(64, 4096, 4096), Parallel(data=3)), "4096 batch don't divide into 3 parts"),
    (lambda: step_seconds(MLP(64, 4096, 4096), Parallel(tensor=2, pipeline=64)), "1 layers per stage"),
    (lambda: step_seconds(MLP(64, 4096, 4096), Parallel(), moved="some"), "moved is 'some'; expected one of nothing, inputs, everything"),
    (lambda: calibrate(RUNS, np.where(np.arange(54) == 0, -1, SECONDS)), "the time of run 1 is no positive number"),
    (lambda: calibrate(RUNS[np.arange(2)], SECONDS[:2]), "expected at least as many runs"),
)
