"""Rates fitted to some real runs predict the others."""

from pathlib import Path

import numpy as np
import pytest
from scipy.stats import spearmanr

from benchmarks.mlp_runs import Runs, calibrate, held_out, read

PATH = Path(__file__).parent / "data" / "distir" / "real_vs_simulated_mlp.csv"


def real_runs():
    return read(PATH)


@pytest.mark.parametrize("seed", [None, 0, 1, 2])
def test_runs_held_out_are_predicted(seed):
    runs, seconds = real_runs()
    predicted = held_out(runs, seconds, seed=seed)
    assert len(runs) == 54
    assert np.mean(np.abs(predicted / seconds - 1)) <= 0.04
    assert spearmanr(predicted, seconds).statistic >= 0.99


def test_runs_of_other_times_are_not():
    """Negative control: the same rates, times dealt to the wrong runs."""
    runs, seconds = real_runs()
    wrong = np.random.default_rng(0).permutation(seconds)
    assert np.mean(np.abs(held_out(runs, wrong) / wrong - 1)) > 0.3


def test_a_known_machine_is_found_again():
    runs, _ = real_runs()
    weights = runs.layers * runs.width**2
    flops, bus = 3 * 2 * runs.batch / runs.devices * weights, 2 * (runs.devices - 1) / runs.devices * weights * 4
    found = calibrate(runs, flops / 1e13 + runs.layers * 1e-4 + 1e-3 + bus / 2e9)
    assert found.seconds_per == pytest.approx({"flops": 1e-13, "layers": 1e-4, "steps": 1e-3}, rel=1e-6)
    assert found.seconds_per_bus_byte == pytest.approx({2: 5e-10, 4: 5e-10}, rel=1e-6)


def test_a_world_size_that_was_never_measured_is_predicted_from_the_others():
    runs, seconds = real_runs()
    found = calibrate(runs, seconds)
    eight = Runs(*(np.array([float(x)]) for x in (8, 16, 8192, 1024)))
    two, four = (Runs(*(np.array([float(x)]) for x in (n, 16, 8192, 1024))) for n in (2, 4))
    assert 0.2 * found.seconds(four)[0] < found.seconds(eight)[0] < 2 * found.seconds(two)[0]
    alone = calibrate(runs[runs.devices == 1], seconds[runs.devices == 1])  # nothing known of any bus: compute alone
    assert alone.seconds(four)[0] < found.seconds(four)[0]


def test_times_that_are_none_are_said():
    runs, seconds = real_runs()
    with pytest.raises(ValueError, match="the time of run 1 is no positive number"):
        calibrate(runs, np.where(np.arange(54) == 0, -1, seconds))
    with pytest.raises(ValueError, match="expected at least as many runs"):
        calibrate(runs[np.arange(2)], seconds[:2])
