"""Calibration: rates from runs, a cluster's file from its measurements, presets, and the command line."""

import csv
import io
import json
import math
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from autoshard.calibrate import device_rates, fit, fitted, parse, rates, summary
from autoshard.calibrate.cluster import cluster, device_of
from autoshard.calibrate.errors import Errors, pooled
from autoshard.calibrate.measure import measure
from autoshard.calibrate.rates import OpSample, Roofline, fit_roofline
from autoshard.cli.calibrate_verb import _drawn, _record
from autoshard.cost import collective_seconds, op_seconds, presets
from autoshard.cost.curves import Series, load, load_cluster, save_cluster
from autoshard.mesh import Mesh
from tests.helpers_command import record_of, refusal, run
from tests.helpers_kept import assert_stays
from tests.helpers_refusals import assert_refused, refusals

DATA = Path(__file__).parent / "data" / "collectives"
ROOT, CPU = Path(__file__).parent.parent, torch.device("cpu")
INTRA_2 = str(DATA / "intra_2.json")
PLAN = ["plan", "models/mlp.py:tiny", "--set", "layers=1", "--mesh", "2x2", "--no-baselines"]
SIZES = [2.0**k for k in range(10, 25)]
TIMES = {(k, c): {x: 1e-4 * (2 - k) + x / (1e8 * (1 + 9 * k)) for x in SIZES} for k in (0, 1) for c in ("all_reduce", "all_gather")}
SAMPLES = [
    OpSample("launch", "float32", 0, 0, 1e-6),
    *(OpSample("memory", "float32", 0, 2.0 * s, 2.0 * s / 1e10 + 1e-6) for s in (2**22, 2**24, 2**26)),
    *(OpSample("matmul", "float32", 2.0 * s**3, 12.0 * s * s, 2.0 * s**3 / 5e10 + 1e-6) for s in (256, 512, 1024)),
    *(OpSample("matmul", "bfloat16", 2.0 * s**3, 6.0 * s * s, 2.0 * s**3 / 2e11 + 1e-6) for s in (512, 1024, 2048)),
]


def record(times=TIMES, **changes):
    given = dict(backend="gloo", device="cpu", memory=1e9, complete=True, assumptions={"torch": "2"})
    return cluster((2, 2), times, SAMPLES, **{**given, **changes})


# -- rates -------------------------------------------------------------------------------------------------------------------------


def test_a_roofline_is_what_it_was_made_of():
    roofline = fit_roofline(SAMPLES)
    assert roofline.memory == pytest.approx(1e10) and roofline.launch == 1e-6
    assert roofline.flops == pytest.approx({("matmul", "float32"): 5e10, ("matmul", "bfloat16"): 2e11})
    assert all(error.mean < 1e-9 for (op, _), error in roofline.errors.items() if op == "matmul")


test_what_says_too_little_is_refused = refusals(
    (lambda: fit_roofline(SAMPLES[4:]), "no launch or no memory copy"),
    (lambda: presets.preset("v100"), "no prices are known for 'v100'; known are a100"),
    (lambda: record({(0, "all_reduce"): TIMES[0, "all_reduce"]}, complete=False), "no collective was measured yet on axis1"),
)


def test_summaries_are_pooled_exactly():
    rng = np.random.default_rng(0)
    a, b = rng.uniform(0.5, 1.5, 10), rng.uniform(0.5, 1.5, 30)
    both = summary(np.concatenate([a, b]), np.ones(40))
    nothing = Errors(math.nan, math.nan, math.nan, 0)
    assert pooled([summary(a, np.ones(10)), nothing, summary(b, np.ones(30))]) == pytest.approx(both)
    assert math.isnan(pooled([nothing]).mean)


# -- a cluster's file ----------------------------------------------------------------------------------------------------------------


def test_a_measured_cluster_prices_what_was_measured(tmp_path):
    path = str(tmp_path / "cluster.json")
    save_cluster(path, record())
    mesh = load_cluster(path)
    assert mesh.shape == (2, 2) and not list(tmp_path.glob("*.part"))
    for (k, collective), times in TIMES.items():
        for size, seconds in times.items():
            assert collective_seconds(collective, mesh.axes[k], size) == pytest.approx(seconds, rel=1e-9)
    assert mesh.axes[0].curve("all_reduce").error < 0.01
    # latency and bandwidth price what has no curve: an all_reduce of 2 sends 2 * 1/2 B in 2 rounds
    assert mesh.axes[0].bandwidth == pytest.approx(1e8, rel=1e-3) and mesh.axes[0].latency == pytest.approx(1e-4, rel=1e-2)
    s = 1024
    mm = op_seconds("aten.mm.default", [((s, s), "float32")] * 2, [((s, s), "float32")], None, mesh.device)
    assert mm == pytest.approx(2 * s**3 / 5e10 + 1e-6, rel=1e-6)


@pytest.mark.parametrize("ratio, shared", [(1.0, 1), (1.3, 1), (1.6, 2), (2.1, 2), (9.0, 2), (0.5, 1)])
def test_how_many_share_a_link_is_what_one_group_alone_says(ratio, shared):
    sizes = SIZES[-3:]
    alone = {0: {x: TIMES[0, "all_gather"][x] / ratio for x in sizes}}
    alone[0][sizes[0]] /= 5  # a size that is off says nothing
    mesh, without = (Mesh.from_dict(record(**given)["mesh"]) for given in ({"alone": alone}, {}))
    assert [axis.shared_by for axis in mesh.axes] == [shared, 1]
    assert [axis.shared_by for axis in without.axes] == [1, 1]
    for a, b in zip(mesh.axes, without.axes):  # prices are those of all groups at once, as before
        assert a.device_bandwidth == pytest.approx(b.device_bandwidth) and a.bandwidth == pytest.approx(a.shared_by * b.bandwidth)
        assert collective_seconds("all_gather", a, 1e6) == collective_seconds("all_gather", b, 1e6)
    row = {"axis": "axis0", "collective": "all_gather", "sizes": sizes, "seconds": [alone[0][x] for x in sizes]}
    assert record(alone=alone)["measured"]["alone"] == [row]


def test_what_an_interruption_leaves_is_a_cluster_too():
    short = {key: dict(list(times.items())[:2]) for key, times in TIMES.items()}
    assert Mesh.from_dict(record(short, complete=False)["mesh"]).axes[0].curve("all_reduce").sizes == (1024.0, 2048.0)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("", "is empty; expected what .autoshard calibrate measure"),
        ("{}", "is not a measured cluster: the file lacks 'format'"),
        ('{"format": "x"}', "is not a measured cluster: format is 'x'; expected 'autoshard.cluster/1'"),
        ("[1]", "is not a measured cluster: the file holds .1. is not of type"),
    ],
)
def test_a_file_that_is_no_cluster_is_refused(tmp_path, content, sentence):
    path = tmp_path / "cluster.json"
    path.write_text(content)
    assert_refused(sentence, load_cluster, str(path))


# -- presets -------------------------------------------------------------------------------------------------------------------------


def test_every_preset_has_a_source():
    names = [one.name for one in presets.all_presets()]
    between = {one.name: one.inter_node_bandwidth / 0.75e9 for one in presets.all_presets()}  # of a data sheet three quarters
    assert between == dict.fromkeys(("h100", "h200", "b200", "mi300x"), 400) | {"a100": 200, "l40s": 200, "rtx": 12.5, "cpu": 12.5}
    assert names == ["a100", "h100", "h200", "b200", "mi300x", "l40s", "rtx", "cpu"]
    for one in presets.all_presets():
        assert one.source and one.device.flops > 0 and one.intra_node_bandwidth > 0 and one.inter_node_bandwidth > 0
        assert all(0 < link.error < 0.2 for link in one.links)


def test_a_preset_prices_as_measured():
    wanted = ["aiconfigurator", "a100_sxm@nccl-2.27.3", "all_reduce", "1", "8", "half", "1048576"]
    twin = next(row for row in csv.reader(io.StringIO((DATA / "measured.csv").read_text())) if row[:7] == wanted)
    node = presets.mesh("a100", (8,))
    assert collective_seconds("all_reduce", node.axes[0], 2.0**20) == pytest.approx(float(twin[7]) * 1e-6, rel=0.02)
    two = presets.mesh("a100", (2, 8))
    assert two.axes[1].curves == node.axes[0].curves and two.axes[0].curves == ()  # nothing was measured between nodes
    assert presets.mesh("h200", (8,)).axes[0].curves == ()
    six = presets.mesh("a100", (6,)).axes[0]  # between 4 and 8
    assert presets.mesh("a100", (4,)).axes[0].curve("all_gather").seconds[0] <= six.curve("all_gather").seconds[0]


# -- the command line ----------------------------------------------------------------------------------------------------------------


def test_fit_prints_the_promised_keys(tmp_path):
    out = tmp_path / "curves.json"
    curves = record_of("calibrate", "fit", str(DATA / "nccl_tests_all_reduce.txt"), INTRA_2, "--out", str(out))["curves"]
    assert [c["collective"] for c in curves] == ["all_reduce", "all_gather", "all_reduce", "reduce_scatter", "all_to_all"]
    for curve in curves:
        assert {"collective", "system", "devices", "method", "gmae", "mean", "std", "held_out"} <= set(curve)
        assert 0 < curve["gmae"] < 0.05 and 0 < curve["held_out"]["gmae"] < 0.1
    (about, curve), *_ = load(str(out))
    assert (about["devices"], about["method"]) == (8, "piecewise")
    np.testing.assert_allclose(curve.seconds(2.0**29), fit(*points("nccl_tests_all_reduce.txt")).seconds(2.0**29))


def test_curves_of_a_file_are_pooled_unless_told_otherwise():
    gmae = []
    for words in ([], ["--alone"]):
        curves = record_of("calibrate", "fit", str(DATA / "measured.csv"), "--quiet", *words)["curves"]
        gmae.append(np.mean([one["held_out"]["gmae"] for one in curves]))
    assert gmae[0] < 0.9 * gmae[1]


def points(name):
    (series,) = parse((DATA / name).read_text(), name)
    return np.array(series.sizes), np.array(series.seconds)


def test_fit_draws_and_says_errors_in_percent(tmp_path):
    picture = tmp_path / "curves.png"
    code, said, _ = run("calibrate", "fit", INTRA_2, "--plot", str(picture), "--table")
    assert code == 0 and picture.read_bytes()[:4] == b"\x89PNG"
    assert "held out" in said and "reduce_scatter" in said and "By collective" in said and "│ all            │ 4 " in said


def test_errors_of_two_collectives_are_pooled():
    files = [str(DATA / f"{name}.txt") for name in ("nccl_tests_all_reduce", "all_to_all_4")]
    assert ["│ all  " in run("calibrate", "fit", *some)[1] for some in (files[:1], files)] == [False, True]


def test_a_cluster_is_known_once_memory_and_two_sizes_of_a_collective_of_every_axis_are():
    about = {"backend": "gloo", "device": "x", "memory": 1e9, "more": 1}
    one, two = {1024.0: 1e-5}, {1024.0: 1e-5, 2048.0: 2e-5}

    def known(shape, collectives, device=SAMPLES, alone=()):
        measured = SimpleNamespace(device=device, collectives=collectives, alone={k: two for k in alone}, complete=False)
        return _record(shape, about, measured, 3.0)

    of_both = {(0, "all_gather"): two, (1, "all_gather"): one, (1, "all_reduce"): two}
    assert known((2, 2), of_both, [s for s in SAMPLES if s.op != "memory"]) == {}
    assert known((2, 2), {**of_both, (1, "all_reduce"): one}) == known((2, 2), {(0, "all_gather"): two}) == {}
    assert known((2, 1), {(0, "all_gather"): two})["assumptions"] == {**about, "seconds": 3.0}
    axes = known((2, 2), of_both, alone=(0,))["mesh"]["axes"]
    assert [[curve["collective"] for curve in axis["curves"]] for axis in axes] == [["all_gather"], ["all_reduce"]]
    assert known((2, 2), of_both, alone=(0, 1)).keys() == known((2, 2), of_both).keys()


def test_fits_stay_what_they_are():
    series = parse((DATA / "measured.csv").read_text(), "measured.csv", collective=None, devices=None, system=None)[::8]
    assert_stays("rooms/fits.json", {f"{k} {one.name}": fitted(one, series).to_dict() for k, one in enumerate(series)})


@pytest.mark.parametrize("points", [2, 6])
def test_a_figure_has_the_points_a_line_through_their_range_and_what_it_misses(points):
    sizes = [1000.0 * 2**k for k in range(points)]
    times = [1e-5 + x / (1e9 if x < 2e4 else 4e9) for x in sizes]
    one = fitted(Series("all_reduce", 4, tuple(reversed(sizes)), tuple(reversed(times)), "ours"))
    drawn = _drawn(one)
    assert drawn["points"] == list(zip(sizes, times)) and (drawn["name"], drawn["collective"]) == (one.series.name, "all_reduce")
    xs, seconds = zip(*drawn["line"])
    assert len(xs) == 201 and (xs[0], xs[-1]) == pytest.approx((sizes[0], sizes[-1])) and list(seconds) == one.curve.seconds(xs).tolist()
    assert [y / x for x, y in zip(xs, xs[1:])] == pytest.approx([(sizes[-1] / sizes[0]) ** (1 / 200)] * 200)
    assert drawn["errors"] == pytest.approx([one.curve.seconds([x])[0] / t - 1 for x, t in zip(sizes, times)], abs=1e-12)


REFUSED = [
    (["calibrate", "fit", "missing.csv"], "there is no file missing.csv"),
    (["calibrate", "fit", INTRA_2, "--out", "/no/such/folder/x.json"], "there is no folder"),
    (["calibrate", "show", "v100"], "'v100'"),
    ([*PLAN, "--quiet", "--prices", "v100"], "no prices are known for 'v100'"),
    (["calibrate", "measure", "--mesh", "2x2"], "start them with: torchrun --nproc-per-node 4 -m autoshard calibrate measure"),
]


@pytest.mark.parametrize(("words", "sentence"), REFUSED, ids=[" ".join(words[-3:]) for words, _ in REFUSED])
def test_what_is_refused_is_one_sentence(words, sentence):
    assert sentence in refusal(*words)


def test_show_prices():
    prices = record_of("calibrate", "show")["prices"]
    assert len(prices) == 8 and all(one["source"] for one in prices)
    code, said, _ = run("calibrate", "show", "h100")
    assert code == 0 and "aiconfigurator (Apache-2.0)" in said


def test_plan_takes_the_prices_that_come_with_autoshard():
    record = record_of(*PLAN, "--quiet", "--prices", "a100")
    inner = record["mesh"]["axes"][1]
    assert record["mesh"]["device"]["name"] == "a100" and {curve["collective"] for curve in inner["curves"]} >= {"all_gather", "all_reduce"}
    assert 0 < record["prices"]["links"]["axis1"]["all_gather"] < 0.1 and record["prices"]["links"]["axis0"] == {}


@pytest.mark.parametrize(("launch", "first", "second"), [(0.0, 2.0, 4.0), (0.5, 1.5, 3.5), (1.5, 1.0, 2.5), (9.0, 1.0, 2.0)])
def test_a_rate_is_that_of_the_largest_two_without_the_launch_which_is_at_most_half(launch, first, second):
    assert rates._rate([(1000.0, 4.0), (10.0, 1.0), (100.0, 2.0)], launch) == pytest.approx((100 / first + 1000 / second) / 2)


class Told:
    """A clock that goes on with the calls of an op only."""

    now, calls = 0.0, 0

    def __call__(self):
        return self.now

    def op(self, seconds):
        self.now, self.calls = self.now + seconds, self.calls + 1


@pytest.mark.parametrize(("seconds", "calls"), [(2**-16, 2 + 5 * 1000), (2**-10, 2 + 5 * 20), (2**-3, 2 + 5 * 2), (0.25, 2 + 3 * 2)])
def test_an_op_is_called_for_five_rounds_of_a_fiftieth_of_a_second_or_less_often_where_it_is_slow(seconds, calls):
    clock = Told()
    assert device_rates.typical_seconds(partial(clock.op, seconds), CPU, clock) == seconds and clock.calls == calls


@pytest.mark.parametrize(("seconds", "first"), [(2**-10, 20), (2**-3, 2), (0.25, 2)])
def test_of_the_calls_of_a_round_only_the_first_one_is_right_after_a_pause(seconds, first):
    clock, rested = Told(), []

    def agree(number):
        rested.append(True)
        return number

    def op():
        clock.op(2 * seconds if not rested else seconds)
        rested.clear()

    assert device_rates.typical_seconds(op, CPU, clock, agree) == pytest.approx(seconds * (2 - 1 / first), rel=1e-12)


def test_of_two_times_the_mean_counts_and_one_that_is_far_off_does_not():
    clock, times = Told(), iter([9.0, 0.1, 0.1, 0.1, 0.06, 0.06, 0.06, 0.06, 7.0, 7.0, 0.1, 0.1])  # the first two: before the rounds
    assert device_rates.typical_seconds(lambda: clock.op(next(times)), CPU, clock) == pytest.approx(0.26 / 3)


@pytest.mark.parametrize(("share", "sizes"), [(18.0, 1), (18.2, 2), (38.0, 2), (38.2, 3), (78.0, 3), (78.2, 4)])
def test_larger_sizes_are_measured_while_the_next_one_may_fit_into_the_share(share, sizes):
    clock = Told()  # eight calls of each; after them 2 + 16 + 0.1 s, 6 + 32 + 0.1 s, 14 + 64 + 0.1 s
    ops = (("mm", "float32", k, 0.0, 0.0, partial(clock.op, one)) for k, one in enumerate((0.25, 0.5, 1.0, 2.0)))
    assert [size for size, _ in device_rates._while_it_fits(ops, CPU, clock, share, float)] == list(range(sizes))


@pytest.mark.slow
def test_plan_takes_a_measured_cluster(tmp_path):
    path = str(tmp_path / "cluster.json")
    save_cluster(path, record())
    mesh = record_of("plan", f"{ROOT}/models/mlp.py:mlp", "--cluster", path, "--no-baselines", "--quiet")["mesh"]
    assert mesh["shape"] == [2, 2] and [curve["collective"] for curve in mesh["axes"][0]["curves"]] == ["all_reduce", "all_gather"]
    assert "was measured as 2x2; leave --mesh out" in refusal("plan", "models/mlp.py:mlp", "--mesh", "8", "--cluster", path)


def measuring(*words, processes=2, **options):
    """`calibrate measure` as torchrun starts it."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command += ["-m", "autoshard", "calibrate", "measure", *words]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def measured(*words, processes, timeout):
    """The record of a measurement that comes to its end."""
    process = measuring(*words, "--json", processes=processes)
    said, errors = process.communicate(timeout=timeout)
    assert process.returncode == 0, errors
    return json.loads(said)


def test_one_device_measures_itself_without_torchrun(tmp_path):
    record = record_of("calibrate", "measure", "--mesh", "1", "--backend", "gloo", "--seconds", "1", "--out", str(tmp_path / "one.json"))
    assert record["complete"] is True and load_cluster(str(tmp_path / "one.json")).shape == (1,)
    assert {row["op"] for row in record["roofline"]["ops"]} == {"attention", "launch", "matmul", "memory"}


@pytest.mark.parametrize("shape", [(2,), (3,), (2, 5), (1, 4), (300,)])
def test_sizes_are_whole_floats_on_every_rank_and_their_buffers_have_these_bytes(shape, monkeypatch):
    """Without other processes: a call takes 1 us and a nanosecond per byte of the largest buffer."""
    calls, now, module = [], [0.0], sys.modules["autoshard.calibrate.measure"]

    def timed(call, *_):
        call()
        if calls:
            now[0] += (taken := 1e-6 + calls[-1][2] * 1e-9)
        return taken

    def answered(ask):
        n = shape[ask.axis]
        calls.append((ask.axis, ask.collective, ask.tensor.nbytes * (n if ask.collective == "all_gather" else 1)))

    monkeypatch.setattr(module, "agree_on", lambda device: lambda value: value)
    monkeypatch.setattr(module, "measure_device", lambda *_, **__: [])
    monkeypatch.setattr(module, "typical_seconds", timed)
    monkeypatch.setattr(module.Groups, "of", lambda device_mesh: SimpleNamespace(answer=answered))
    mesh = SimpleNamespace(shape=shape, device_type="cpu", get_coordinate=lambda: (0,) * len(shape))
    *_, (said, done, measured) = measure(mesh, clock=lambda: now[0], seconds=0.3, largest=2.0**16)
    assert (said, done) == ("done", 1.0) and measured.complete
    for (axis, collective), times in measured.collectives.items():
        of_this = [size for k, name, size in calls if (k, name) == (axis, collective)]
        assert set(times) == set(of_this) and all(size % (4 * shape[axis]) == 0 for size in times)
        coarse = [2.0**k for k in (10, 12, 14, 16)]
        assert [min(times, key=lambda size: abs(size - x)) for x in coarse] == pytest.approx(coarse, abs=2 * shape[axis])
        assert list(times.values()) == pytest.approx([1e-6 + size * 1e-9 for size in times])
    assert {key[0] for key in measured.collectives} == {k for k, n in enumerate(shape) if n > 1}
    assert measured.alone.keys() == ({0, 1} if shape == (2, 5) else set())


@pytest.mark.slow
def test_one_group_of_each_axis_is_measured_alone(tmp_path):
    out = tmp_path / "cluster.json"
    words = ["--mesh", "2x2", "--seconds", "10", "--largest", "1MiB", "--out", str(out)]
    found = measured(*words, processes=4, timeout=90)["measured"]
    assert [one["axis"] for one in found["alone"]] == ["axis0", "axis1"]
    largest = {row["axis"]: row["sizes"][-1] for row in found["collectives"] if row["collective"] == "all_gather"}
    for one in found["alone"]:
        assert 1 <= len(one["sizes"]) <= 3 and one["sizes"][-1] <= largest[one["axis"]] and min(one["seconds"]) > 0
    for axis in load_cluster(str(out)).axes:
        assert axis.shared_by in (1, 2) and axis.backend == "gloo" and all(len(curve.sizes) >= 4 for curve in axis.curves)
        assert {curve.collective for curve in axis.curves} == {"all_reduce", "all_gather", "reduce_scatter", "all_to_all"}


@pytest.mark.slow
def test_an_interrupted_measurement_keeps_what_it_has(tmp_path):
    out = tmp_path / "cluster.json"
    process = measuring("--mesh", "2", "--seconds", "60", "--out", str(out), start_new_session=True)
    began = time.monotonic()
    while not out.exists() and time.monotonic() - began < 90:
        time.sleep(0.2)
    os.killpg(process.pid, signal.SIGINT)
    process.communicate(timeout=60)
    assert json.loads(out.read_text())["complete"] is False
    assert load_cluster(str(out)).axes[0].curves


@pytest.mark.slow
def test_a_mesh_of_another_size_is_refused():
    process = measuring("--mesh", "2x2")
    _, errors = process.communicate(timeout=60)
    assert process.returncode != 0 and "2 processes run, but the mesh 2x2 has 4" in errors


@pytest.mark.parametrize("rates, narrow, wide", [
    ({("matmul", "bfloat16"): 7e12, ("matmul", "float16"): 5e12, ("matmul", "float32"): 35e11, ("norms", "bfloat16"): 9e12}, 1e13, 5e12),
    ({("matmul", "float16"): 7e12, ("elementwise", "float32"): 9e12}, 1e13, 1e13),
    ({("matmul", "float32"): 7e12}, 1e13, 1e13),
])  # fmt: skip
def test_a_device_has_the_rates_of_the_widest_matmuls_that_were_measured(rates, narrow, wide):
    device = device_of("mine", Roofline(rates, 1e12, 1e-6, {}), 8e9)
    assert (device.flops, device.flops32) == pytest.approx((narrow, wide))
