"""The published simulator's figures, reproduced under its own rules and constants."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from autoshard.simulate.degrees import Parallel
from autoshard.simulate.distir import CONSTANTS, DISTIR_83D7FC3, DISTIR_3386EDC, MLP, step_seconds

DATA = Path(__file__).parent / "data" / "distir"
FIGURE3 = json.loads((DATA / "figure3.json").read_text())
FIGURE4 = json.loads((DATA / "figure4_grid.json").read_text())
BY_KEY = {"figure3_3386edc": DISTIR_3386EDC, "figure3_83d7fc3_units_fixed": DISTIR_83D7FC3}
DEVICES = (2, 4, 8, 16, 32)


def speedups(constants):
    """Data parallel by batch, pipeline of batch 4096 by microbatches, over DEVICES."""
    whole = {b: step_seconds(MLP(64, 4096, b), Parallel(), constants) for b in (512, 1024, 2048, 4096)}
    dp = {b: [t / step_seconds(MLP(64, 4096, b), Parallel(data=n), constants, moved="inputs") for n in DEVICES] for b, t in whole.items()}
    pp = {
        k: [
            whole[4096] / step_seconds(MLP(64, 4096, 4096), Parallel(pipeline=n, microbatches=k), constants, moved="inputs")
            for n in DEVICES
        ]
        for k in (4, 8, 16, 32)
    }
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


@pytest.mark.parametrize(
    ("grid", "moved", "said"),
    [
        (Parallel(pipeline=3), "nothing", "64 layers don't divide into 3 parts"),
        (Parallel(data=3), "nothing", "4096 batch don't divide into 3 parts"),
        (Parallel(tensor=2, pipeline=64), "nothing", "1 layers per stage"),
        (Parallel(), "some", "moved is 'some'; expected one of nothing, inputs, everything"),
    ],
)
def test_what_does_not_divide_is_said(grid, moved, said):
    with pytest.raises(ValueError, match=said):
        step_seconds(MLP(64, 4096, 4096), grid, moved=moved)


def test_the_published_links_are_64_times_too_fast():
    assert CONSTANTS["distir_3386edc"].link_bandwidth == 64 * CONSTANTS["distir_83d7fc3"].link_bandwidth
