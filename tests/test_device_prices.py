"""Prices of ops from the constants of device files: by hand, as plans state them, and measured ones in the same format."""

import json
import math
from dataclasses import asdict, replace

import pytest

from autoshard import plan
from autoshard.calibrate.cluster import cluster, device_file
from autoshard.calibrate.rates import OpSample, fit_roofline
from autoshard.cost import attention_seconds, matmul_seconds, op_seconds
from autoshard.cost.compute import EFFICIENCY
from autoshard.cost.curves import load_device, save_cluster
from autoshard.devices import DEVICE_FILES, DEVICES, LAUNCHES, Kernels, known_devices
from autoshard.formulate import op_candidate_seconds
from autoshard.graph import Op, Ref, Tensor
from autoshard.layout import parse
from autoshard.mesh import Mesh
from autoshard.report.planned import planned_report
from autoshard.report.terminal import as_text
from autoshard.report.timeline import simulation_report
from autoshard.solution import Solution, load
from autoshard.strategies.attention import FORWARD
from autoshard.strategies.candidates import Candidate
from models import mlp
from tests.helpers_command import record_of
from tests.helpers_refusals import assert_refused

H100 = DEVICES["h100"]
FAST_HOST = replace(H100, kernels=replace(H100.kernels, host=0.0))
BARE = replace(H100, kernels=None)


def bf16(*shape):
    return shape, "bfloat16"


def mm(m, k, n, device=FAST_HOST, dtype="bfloat16"):
    return op_seconds("aten.mm.default", [((m, k), dtype), ((k, n), dtype)], [((m, n), dtype)], None, device)


def attention(queries, keys, device=FAST_HOST, *, causal):
    """On one device, as a plan prices it."""
    q, k = Tensor((2, 8, queries, 128), "bfloat16"), Tensor((2, 8, keys, 128), "bfloat16")
    arguments = (Ref(0), Ref(1), Ref(2), None, causal), ()
    op = Op("op", FORWARD, ((0, 0), (1, 0), (2, 0)), arguments, (q, Tensor((2, 8, queries), "float32")))
    mesh, whole = replace(Mesh.from_bandwidths((1,)), device=device), parse("R")
    return op_candidate_seconds(op, (q, k, k), Candidate((whole,) * 3, (whole,) * 2), mesh)


def test_every_device_file_is_a_device_of_meshes():
    assert set(known_devices()) == set(DEVICES) - {"cpu"} and DEVICES["cpu"].kernels is None
    for name in known_devices():
        assert Mesh.from_bandwidths((2,), device=name).device.kernels.source.startswith(f"{name}.json: ")


def test_a_matmul_takes_as_long_as_measured_but_in_a_program():
    k = H100.kernels
    assert mm(8192, 8192, 4096) == pytest.approx(matmul_seconds(8192, 8192, 4096, k.matmul))
    assert mm(8192, 8192, 4096, dtype="float8_e4m3fn") == pytest.approx(matmul_seconds(8192, 8192, 4096, k.matmul8))
    assert mm(8192, 8192, 128) / mm(8192, 8192, 8192) > 1.4 / 64  # per FLOP
    assert mm(4096, 4096, 4096, dtype="float32") == pytest.approx(2 * 4096**3 / (67e12 * EFFICIENCY))


def test_matmuls_of_a_batch_or_by_groups_are_priced_as_so_many():
    def priced(name, *inputs, output):
        return op_seconds(f"aten.{name}.default", list(inputs), [output], None, FAST_HOST)

    k = H100.kernels
    bmm = priced("bmm", bf16(6, 300, 128), bf16(6, 128, 500), output=bf16(6, 300, 500))
    assert bmm == pytest.approx(matmul_seconds(300, 128, 500, k.matmul, 6))
    ends = ((8,), "int32")
    grouped = priced("_grouped_mm", bf16(4096, 128), bf16(8, 128, 500), ends, output=bf16(4096, 500))
    assert grouped == pytest.approx(matmul_seconds(512, 128, 500, k.matmul, 8))
    half = priced("_grouped_mm", bf16(4096, 128), bf16(4, 128, 500), ends, output=bf16(4096, 500))  # a shard of the groups
    assert half == pytest.approx(matmul_seconds(512, 128, 500, k.matmul, 4))
    of_weights = priced("_grouped_mm", bf16(128, 4096), bf16(4096, 500), ends, output=bf16(8, 128, 500))
    assert of_weights == pytest.approx(matmul_seconds(128, 512, 500, k.matmul, 8))
    linear = priced("linear", bf16(2, 300, 128), bf16(500, 128), output=bf16(2, 300, 500))
    assert linear == mm(600, 128, 500)


def test_causal_attention_computes_half_where_queries_are_as_many_as_keys():
    k, scores, moved = H100.kernels, 2 * 8 * 4096 * 4096, 2 * 2 * 8 * 4096 * (4 * 128 + 2)
    for causal, share in ((False, 1.0), (True, 0.5)):
        expected = attention_seconds(share * scores, 4096, 256, moved, k.attention)
        assert attention(4096, 4096, causal=causal) == pytest.approx(expected)
    assert attention(1024, 4096, causal=True) == attention(1024, 4096, causal=False)  # the last shard of the queries sees all keys


def test_copies_reach_a_share_of_the_memory_and_the_host_hides_behind_them():
    large, tiny = bf16(2**28), bf16(2)
    copy = [op_seconds("aten.neg.default", [t], [t], None, H100) for t in (large, tiny)]
    assert copy[0] == pytest.approx(2**30 / (H100.memory_bandwidth * H100.kernels.memory), rel=1e-3)
    assert copy[1] == pytest.approx(H100.kernels.host, rel=1e-6)
    assert H100.memory_rate == BARE.memory_rate * H100.kernels.memory  # of updates, too


def test_a_device_without_constants_is_priced_by_its_roofline():
    assert mm(8192, 8192, 8192, BARE) == 2 * 8192**3 / (H100.flops * EFFICIENCY) + BARE.launch
    assert attention(4096, 4096, BARE, causal=True) == attention(4096, 4096, BARE, causal=False)


def test_a_plan_says_which_constants_it_used_how_far_off_they_were_and_its_interval():
    module, inputs = mlp.tiny()
    solution = plan(module, inputs, Mesh.from_bandwidths((2,), device="h100"), training=True, baselines=False)
    steps, counted = H100.kernels.overlapped, solution.objective_seconds
    assert solution.interval == (counted * steps.low, counted * steps.high) and steps.low < 1 < steps.high
    shown = " ".join(as_text(planned_report(solution)).split())
    told = f"{steps.runs} steps on h100 that they were not fitted to were {100 * steps.error:.0f} % off in the median"
    assert f"{H100.kernels.source}; {told}" in shown
    assert "as 80 % of published training steps were" in shown
    again = Solution.from_dict(json.loads(json.dumps(solution.to_dict())))
    assert again.mesh == solution.mesh and again.interval == solution.interval
    untested = plan(module, inputs, Mesh.from_bandwidths((2,), device=BARE), training=True, baselines=False)
    assert "data sheets, of which ops are assumed to reach one share" in " ".join(as_text(planned_report(untested)).split())


@pytest.mark.parametrize("wrong", [3, {"matmul": 0.5}, {**asdict(H100.kernels), "memory": "much"}])
def test_kernels_that_cannot_be_are_refused(wrong, tmp_path):
    module, inputs = mlp.tiny()
    data = plan(module, inputs, Mesh.from_bandwidths((2,)), baselines=False).to_dict()
    data["mesh"]["device"]["kernels"] = wrong
    (tmp_path / "plan.json").write_text(json.dumps({"format": 1, **data}))
    assert_refused("mesh/device/kernels", load, tmp_path / "plan.json")


PEAK, SMALL, MEMORY = 600e12, 100.0, 2e12


def measured(dtype):
    def op(name, flops, moved, seconds, of=dtype):
        return OpSample(name, of, flops, moved, seconds)

    sizes = (512, 1024, 4096, 65536, 131072)
    matmuls = [op("matmul", 2.0 * s**3, 0.0, 2 * s**3 / PEAK * (1 + SMALL / s)) for s in sizes]
    copies = [op("memory", 0.0, 2.0 * b, 2 * b / MEMORY, "float32") for b in (2**28, 2**30)]
    return [op("launch", 0.0, 0.0, 1e-9, "float32"), *copies, *matmuls]


def test_a_measured_device_is_written_as_the_device_files_are_and_prices_what_was_measured(tmp_path):
    times = {(0, "all_gather"): {1e6: 1e-4, 1e8: 1e-3, 1e9: 1e-2}}
    record = cluster(
        (2,), times, measured("bfloat16"), backend="nccl", device="mine", memory=8e10, complete=True, assumptions={}
    )  # fmt: skip
    save_cluster(str(tmp_path / "cluster.json"), record)
    assert set(record["device_file"]["constants"]) == set(json.loads((known_file("h100")).read_text())["constants"])
    device = load_device(str(tmp_path / "cluster.json"))
    computing, moving = 2 * 2048**3 / PEAK * (1 + SMALL / 2048), 3 * 2 * 2048**2 / MEMORY
    assert mm(2048, 2048, 2048, device) == pytest.approx(math.hypot(computing, moving), rel=0.01)
    assert device.memory_rate == pytest.approx(MEMORY, rel=1e-3) and device.kernels.host == pytest.approx(1e-9)
    assert Kernels.of_file(record["device_file"], "mine").matmul.rate == pytest.approx(PEAK, rel=0.01) and device.kernels.serial is None
    assert Mesh.from_dict(record["mesh"]).device.kernels is None  # the cluster itself is priced as before


def test_a_device_that_an_older_version_measured_is_read(tmp_path):
    times = {(0, "all_gather"): {1e6: 1e-4, 1e8: 1e-3}}
    record = cluster((2,), times, measured("bfloat16"), backend="nccl", device="mine", memory=8e10, complete=True, assumptions={})
    file = record["device_file"]
    del file["kernels"], file["constants"]["training"]
    older = {"matmul16": 1.0, "matmul8": 1.0, "matmul4": 1.0, "small": SMALL, "attention": 0.28, "narrow": 0.0, "short": 512.0}
    file["constants"] |= {name: {"measured": value, "source": "autoshard calibrate measure"} for name, value in older.items()}
    save_cluster(str(tmp_path / "cluster.json"), record)
    device = load_device(str(tmp_path / "cluster.json"))
    computing, moving = 2 * 8192**3 / PEAK * (1 + SMALL / 8192), 3 * 2 * 8192**2 / MEMORY
    assert mm(8192, 8192, 8192, device) == pytest.approx(math.hypot(computing, moving), rel=0.01)
    file["given"]["memory_bandwidth"] = 0
    (tmp_path / "cluster.json").write_text(json.dumps(record))
    assert_refused("device_file/given/memory_bandwidth holds 0", load_device, str(tmp_path / "cluster.json"))


def known_file(name):
    return DEVICE_FILES / f"{name}.json"


def test_without_matmuls_in_16_bits_there_is_no_device_file(tmp_path):
    samples = measured("float32")
    roofline = fit_roofline(samples)
    assert device_file("mine", samples, roofline, Mesh.from_bandwidths((2,))) is None
    times = {(0, "all_gather"): {1e6: 1e-4, 1e8: 1e-3}}
    record = cluster((2,), times, samples, backend="nccl", device="mine", memory=8e10, complete=True, assumptions={})
    save_cluster(str(tmp_path / "cluster.json"), record)
    assert_refused("no constants of its device; expected 16-bit matmuls", load_device, str(tmp_path / "cluster.json"))
    assert_refused("is no device file, for lack of 'constants'", Kernels.of_file, {}, "x")
    h100 = json.loads((DEVICE_FILES / "h100.json").read_text())
    h100["given"]["memory_bandwidth"] = 0
    assert_refused("is no device file, for lack of a figure above 0", Kernels.of_file, h100, "x")


def test_kernels_of_older_files_are_read_as_rates_and_what_short_ones_take():
    old = {"source": "h100.json", "matmul": 0.67, "flops8": 1.2e15, "small": 110.0, "attention": 0.2, "narrow": 0.25, "short": 575.0}
    data = Mesh.from_bandwidths((2,), device=BARE).to_dict()
    data["device"]["kernels"] = {**old, "memory": 0.83, "host": 1e-5, "serial": None, "overlapped": None}
    device = Mesh.from_dict(json.loads(json.dumps(data))).device
    fast = replace(device, kernels=replace(device.kernels, host=0.0))
    assert mm(8192, 4096, 8192, fast) == pytest.approx(2 * 8192 * 8192 * 4096 / (989e12 * 0.67) * (1 + 110 / 4096), rel=0.01)
    assert device.memory_rate == pytest.approx(0.83 * 3.35e12)


def test_launches_of_the_host_are_those_that_the_files_assume():
    data = json.loads(known_file("h100").read_text())["constants"]["host"]
    assert H100.kernels.host * LAUNCHES == data["published"] and str(LAUNCHES) in data["source"]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("device", ["h100", "cpu"])
def test_a_simulated_step_has_the_interval_of_published_steps(device, overlap):
    """Where runs say how far off steps are."""
    given = ["--device", device, *([] if overlap else ["--no-overlap"])]
    record, kernels = record_of("simulate", f"{mlp.__file__}:tiny", *given), DEVICES[device].kernels
    steps = kernels and (kernels.overlapped if overlap else kernels.serial)
    assert (steps is None) == (device == "cpu")
    assert record["interval_seconds"] == (steps and [record["seconds"] * steps.low, record["seconds"] * steps.high])
    assert record["tested"] == (steps and {"devices": steps.devices, "runs": steps.runs, "error": steps.error})
    said = as_text(simulation_report(record))
    assert ("of published training steps were" in said) == ("prices: " in said) == (steps is not None)
