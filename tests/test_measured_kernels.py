"""Formulas of measured kernels: against a sample of the measurements, increasing in every size, one number or many at once."""

import csv
import json
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import autoshard
from autoshard.api import check_launch
from autoshard.capture import capture
from autoshard.cost import attention_seconds, decode_seconds, experts_seconds, kernel_columns, matmul_seconds, presets
from autoshard.cost.compute import Columns, busy_seconds
from autoshard.devices import (
    DTYPES,
    AttentionKernel,
    ExpertsKernel,
    MatmulKernel,
    device_file,
    kernel_form,
    known_devices,
)
from autoshard.graph import Fused
from autoshard.launch import Launch, LaunchConfig, ModelSizes, Site
from benchmarks.kernels import LatentAttentionKernel, latent_attention_seconds
from tests.helpers_kept import assert_stays
from tests.helpers_refusals import assert_refused

ROOT = Path(__file__).parent.parent
SAMPLE = Path(__file__).parent / "data" / "kernels"
BARS = {"bfloat16": 0.12, "fp8": 0.2, "fp8_block": 0.25, "nvfp4": 0.2}  # of few rows; the benchmark's are of all


def run(*arguments):
    return subprocess.run([sys.executable, str(ROOT / "benchmarks" / "kernels.py"), *arguments], capture_output=True, text=True, cwd=ROOT,
                          env={"PYTHONPATH": str(ROOT), "PATH": ""})  # fmt: skip


@pytest.fixture(scope="module")
def rows():
    ran = run(str(SAMPLE), "--json")
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


def test_measured_kernels_are_predicted(rows):
    assert {row["kind"] for row in rows} == {"matmul", "attention", "decode", "mla", "experts"} and len(rows) > 60
    for kind, bar in (("matmul", 0.12), ("attention", 0.2), ("decode", 0.25), ("mla", 0.3), ("experts", 0.3)):
        medians = [row["median"] for row in rows if row["kind"] == kind]
        assert np.median(medians) < bar, (kind, medians)
    assert np.median([row["median"] for row in rows if row["kind"] == "matmul" and row["dtype"] == "bfloat16"]) < 0.07


def test_the_benchmark_sees_wrong_times(tmp_path):
    with (SAMPLE / "gemm.csv").open(newline="") as file:
        lines = list(csv.reader(file))
    slower = [lines[0], *([*line[:-1], str(1.5 * float(line[-1]))] for line in lines[1:])]
    (tmp_path / "gemm.csv").write_text("\n".join(",".join(line) for line in slower) + "\n")
    wrong = json.loads(run(str(tmp_path), "--json").stdout)
    assert all(row["kind"] == "matmul" for row in wrong) and np.median([row["median"] for row in wrong]) > 0.25
    (tmp_path / "gemm.csv").write_text("gpu,m,n\n")
    assert "lacks dtype, k, ms" in run(str(tmp_path)).stderr


SIZE = st.integers(1, 2**17)
FORMS = [(name, dtype) for name in known_devices() for dtype in DTYPES]


@given(st.sampled_from(FORMS), st.tuples(SIZE, SIZE, SIZE, st.integers(1, 64)), st.integers(0, 3), st.integers(1, 300))
def test_a_larger_matmul_takes_no_less(which, sizes, dim, more):
    form = replace(kernel_columns(MatmulKernel, [which[0]], which[1]), unaligned=1.0)  # longer rows may be aligned
    m, k, n, batch = sizes
    larger = [size + more * (i == dim) for i, size in enumerate(sizes)]
    assert matmul_seconds(m, k, n, form, batch) <= matmul_seconds(*larger[:3], form, larger[3]) * (1 + 1e-12)


DECODES = [(1, 16384, 12, 44.2), (2, 4096, 24, 22.6), (4, 8192, 16, 31.9), (4, 512, 64, 16.9)]


@pytest.mark.parametrize("batch, seq, heads, microseconds", DECODES)
def test_a_second_kernel_adds_up_the_parts_of_a_decode_on_an_a100(batch, seq, heads, microseconds):
    """Of tests/data/kernels/decode.csv, with one head of keys and head dims of 128: 0.36 to 0.68 of what was measured without it."""
    form = kernel_columns(AttentionKernel, ["a100"], "bfloat16")
    form = replace(form, bandwidth=presets.mesh("a100", (1,)).device.memory_rate)
    sizes = batch * heads * seq, batch, 256, 512 * batch * (seq + heads)
    assert decode_seconds(*sizes, form) == pytest.approx(1e-6 * microseconds, rel=0.25)
    assert decode_seconds(*sizes, replace(form, combine=0.0)) < 0.69e-6 * microseconds


def test_rows_of_an_odd_number_of_elements_take_longer_on_hopper_unless_they_are_padded():
    """Microseconds of torch on an H200, docs/gpu.md: rows of k and n, and of m where columns are stored. A compiled program pads them."""
    measured = {(16384, 768, 50257): 10048, (16384, 50257, 768): 8937, (50257, 16384, 768): 8270, (16384, 768, 50304): 2107,
                (16384, 50304, 768): 1724, (8192, 4096, 4100): 1030, (8192, 4096, 4095): 2085, (8192, 4096, 4104): 370}  # fmt: skip
    device = autoshard.Mesh.from_bandwidths((1,), device="h200").device

    def seconds(m, k, n, fused=None):
        one = Columns((m, k)) if m == 50257 else (m, k)
        return busy_seconds("aten.mm.default", [(one, "bfloat16"), ((k, n), "bfloat16")], [((m, n), "bfloat16")], device, fused=fused)

    for dims, expected in measured.items():  # in a program clocks are lower
        assert 1.0 < seconds(*dims) / (expected / 1e6) < 1.3, dims
    assert seconds(8191, 4096, 4096) == pytest.approx(seconds(8192, 4096, 4096), rel=0.01)  # an odd number of tokens costs nothing
    alone = Fused((1.0, 1.0), (1.0,), True)
    assert seconds(16384, 768, 50257, alone) == pytest.approx(seconds(16384, 768, 50304, alone), rel=0.01)


def test_attention_of_plans_is_the_kernel_that_torch_chooses():
    """TFLOP/s of cuDNN's on an H200, docs/gpu.md; its heads have 128 dims at most, beyond flash runs."""

    def rate(name, dims):
        q = ((1, 32, 8192, dims), "bfloat16")
        device = autoshard.Mesh.from_bandwidths((1,), device=name).device
        return 0.5 * 4 * 32 * 8192**2 * dims / busy_seconds("aten.attention.default", [q, q, q], [q], device, share=0.5)

    assert 550e12 < rate("h200", 128) < 670e12 and 280e12 < rate("h200", 256) < 360e12
    assert rate("a100", 256) > 0.9 * rate("a100", 128) and rate("mi300x", 256) > 0.9 * rate("mi300x", 128)  # flash, whatever the dims


def test_softmax_and_norms_that_are_kernels_of_their_own_are_slower_than_copies():
    """TB/s on an H200, docs/gpu.md; compilers group them with what they read. An L40S has more multiprocessors for its bandwidth."""
    x = ((16384, 4096), "bfloat16")

    def rate(name, target, fused=None):
        device = autoshard.Mesh.from_bandwidths((1,), device=name).device
        return 4 * 16384 * 4096 / busy_seconds(f"aten.{target}.default", [x], [x], device, fused=fused)

    for target in ("_softmax", "_softmax_backward_data", "native_layer_norm"):
        assert 1.1e12 < rate("h200", target) * (1.5 if "backward" in target else 1) < 2.5e12
        assert rate("h200", target, Fused((1.0,), (1.0,), True)) == rate("h200", "clone") > 4e12
        assert rate("l40s", target) == rate("l40s", "clone")


def test_float8_blocks_take_as_long_as_the_host_and_longer_where_rows_are_padded():
    form = kernel_form(MatmulKernel, device_file("gb200")["given"], "fp8_block", device_file("gb200")["kernels"]["matmul"]["fp8_block"])
    short, odd, long = (float(matmul_seconds(m, 2048, 2048, form)) for m in (1024, 1025, 2**20))
    assert short == form.host and odd == form.host + form.padding and long > 2 * odd > 2.5 * short


@pytest.mark.parametrize("compiled", [False, True])
def test_a_launch_pays_for_an_odd_vocabulary_as_a_plan_does_unless_it_is_compiled(compiled):
    launch = Launch(devices=8, seq=1024, global_batch=64, microbatch=8, data=8, shard=8, zero=3, compiled=compiled)  # not host-bound
    sizes = [ModelSizes(36, 1280, 5120, 20, kv_heads=20, vocab=vocab) for vocab in (50257, 50304)]
    odd, even = (check_launch(LaunchConfig(launch, one), "torchtitan", Site("h100")).to_dict()["seconds"] for one in sizes)
    assert 1.05 < odd / even < 1.2 if not compiled else odd == pytest.approx(even, rel=2e-3)


@given(st.sampled_from(known_devices()), st.integers(1, 10**12), SIZE, st.integers(16, 512), st.integers(0, 2), st.floats(1.0, 4.0))
def test_more_attention_takes_no_less(name, scores, keys, dims, which, times):
    form = kernel_columns(AttentionKernel, [name], "bf16")
    sizes = [scores, dims, 1e6]
    larger = [size * (times if i == which else 1) for i, size in enumerate(sizes)]
    assert attention_seconds(sizes[0], keys, *sizes[1:], form) <= attention_seconds(larger[0], keys, *larger[1:], form) * (1 + 1e-12)


@given(st.sampled_from(("l40s", "a100", "gb300")), st.integers(1, 10**12), SIZE, st.floats(1e3, 1e10), st.booleans(), st.floats(1, 4))
def test_more_latent_attention_takes_no_less(name, scores, keys, moved, which, times):
    form = kernel_form(LatentAttentionKernel, device_file(name)["given"], "bfloat16", device_file(name)["kernels"]["mla"]["bfloat16"])
    sizes = [(scores, moved), (scores * times, moved) if which else (scores, moved * times)]
    less, more = (latent_attention_seconds(scores, keys, 320, moved, form) for scores, moved in sizes)
    assert less <= more * (1 + 1e-12)


def test_latent_attention_beyond_the_cache_waits_for_the_memory():
    """One sequence more, and an L40S reads all of it from its memory: 24 us at 69 MB, 290 us at 138 MB, as measured."""
    sheet, constants = device_file("l40s")["given"], device_file("l40s")["kernels"]["mla"]["bfloat16"]
    form = kernel_form(LatentAttentionKernel, sheet, "bfloat16", constants)
    within, beyond = (latent_attention_seconds(n * 2 * 128**2 / 2, 128, 320, n * 540e3, form) for n in (128, 256))
    assert within < 60e-6 and beyond > 150e-6


@given(st.sampled_from(FORMS), st.tuples(*[st.integers(1, 10**5)] * 2), st.integers(0, 4), st.integers(1, 1000))
def test_more_experts_take_no_less(which, rows_and_inner, index, more):
    form = kernel_columns(ExpertsKernel, [which[0]], which[1])
    rows, inner = rows_and_inner
    sizes = [rows, 8, 10 * rows, 4096, inner]
    larger = [size + more * (i == index) for i, size in enumerate(sizes)]
    larger[2] = max(larger[2], larger[0])  # pairs are rows at least
    assert experts_seconds(*sizes, 3, form) <= experts_seconds(*larger, 3, form) * (1 + 1e-12)


def test_seconds_of_kernels_stay_what_they_are():
    told = {}
    for name, dtype in FORMS:
        drawn = np.random.default_rng(0).integers
        m, inner = 2 ** drawn(0, 16, 9) + drawn(0, 2, 9), 2 ** drawn(5, 15, 9) + 8 * drawn(0, 2, 9)
        matmul, attention, experts = (kernel_columns(kind, [name], dtype) for kind in (MatmulKernel, AttentionKernel, ExpertsKernel))
        told[f"{name} {dtype}"] = [
            list(map(float, seconds)) for seconds in (
                matmul_seconds(m, inner, inner[::-1], matmul), matmul_seconds(m, 256, inner, matmul, 1 + m[::-1] % 7),
                attention_seconds(m * inner, inner, m % 300 + 64, m * 512, attention),
                experts_seconds(m, np.minimum(m, 16), m + inner, 2048, inner, 3, experts),
            )
        ]  # fmt: skip
    assert_stays("rooms/kernels.json", told)


@pytest.mark.parametrize("which", FORMS)
def test_experts_with_few_rows_wait_for_their_weights(which):
    """With one row each: the time in which all their weights are read, and half as much again at most."""
    form = kernel_columns(ExpertsKernel, [which[0]], which[1])
    one, eight = (experts_seconds(n, n, n, 4096, 2048, 3, form) - form.launch for n in (16, 128))
    read = 3 * 16 * 4096 * 2048 * form.itemsize / form.bandwidth
    assert read <= one <= 1.5 * read and eight == pytest.approx(8 * one)


def test_many_runs_at_once_are_priced_as_each_alone():
    devices, dtypes = ["h100", "a100", "gb300", "mi300x"], ["fp8", "bf16", "nvfp4", "fp8"]
    together = kernel_columns(MatmulKernel, devices, dtypes)
    m, k, n = np.array([512.0, 8192, 100, 4096]), np.array([4096.0, 512, 70000, 14336]), np.array([1.0, 1024, 4096, 28672])
    for i, (device, dtype) in enumerate(zip(devices, dtypes)):
        alone = kernel_columns(MatmulKernel, [device], dtype)
        assert matmul_seconds(m[i], k[i], n[i], alone) == pytest.approx(matmul_seconds(m, k, n, together)[i])
        assert all(getattr(together, f.name)[i] == getattr(alone, f.name) for f in fields(MatmulKernel))


def test_a_matmul_of_one_full_wave_takes_its_flops_at_the_rate():
    form = replace(kernel_columns(MatmulKernel, ["h100"], "bf16"), heat=0.0, launch=0.0, loads=0.0, bandwidth=1e30, memory_bandwidth=1e30)
    seconds = matmul_seconds(128 * 12, 1e6, 256 * 11, form)  # 132 tiles, deep
    assert seconds == pytest.approx(2 * 128 * 12 * 256 * 11 * 1e6 / form.rate, rel=1e-3)
    assert matmul_seconds(128 * 12 + 1, 1e6, 256 * 11, replace(form, waves=1.0, split=1.0)) > 1.05 * seconds  # one row more: a new wave


# By the plan of a rank of eight on an H100, microseconds (docs/gpu.md).
OF_A_SHARD = {(131072, 768, 6283): 10060, (131072, 6283, 768): 9840, (6283, 131072, 768): 8490}
# Of weights' gradients on an H200, how much longer than of multiples of 64: by tokens, rows and columns of the weight (docs/gpu.md).
OF_GRADIENTS = {
    (1024, 50257, 4096): 5.29, (2048, 6283, 4096): 6.24, (4096, 4095, 4096): 5.0, (4096, 50257, 768): 5.32, (8192, 6283, 4096): 5.55,
    (16384, 50257, 768): 5.35, (8192, 4100, 4096): 2.69, (16384, 4100, 768): 3.03, (1023, 4096, 4096): 1.01, (4095, 14336, 4096): 0.96,
    (16383, 4096, 4096): 0.90, (8190, 768, 4096): 0.99,
}  # fmt: skip


@pytest.mark.parametrize("dims", OF_A_SHARD, ids=str)
def test_a_shard_of_an_odd_vocabulary_has_odd_rows_also_in_its_gradient(dims):
    form = kernel_columns(MatmulKernel, ["h100"], "bf16")
    assert matmul_seconds(*dims, form, stored=6283 if dims[0] == 6283 else None) == pytest.approx(OF_A_SHARD[dims] * 1e-6, rel=0.25)


@pytest.mark.parametrize("tokens, rows, columns", OF_GRADIENTS)
def test_the_rows_of_a_weights_gradient_are_odd_and_its_tokens_may_be(tokens, rows, columns):
    form = kernel_columns(MatmulKernel, ["h200"], "bf16")
    seconds = [matmul_seconds(m, k, columns, form, stored=m) for m, k in ((rows, tokens), (-(-rows // 64) * 64, -(-tokens // 64) * 64))]
    assert seconds[0] / seconds[1] == pytest.approx(OF_GRADIENTS[tokens, rows, columns], rel=0.25)


def test_matmuls_of_a_captured_step_know_which_matrix_is_stored_by_columns():
    """Of linear layers with and without a bias: each weight's gradient, and no other."""
    layers = torch.nn.Sequential(torch.nn.Linear(24, 40), torch.nn.ReLU(), torch.nn.Linear(40, 16, bias=False))
    graph = capture(layers, (torch.zeros(6, 24),), training=True)
    of = {i: op for i, op in enumerate(graph.ops) if op.target in ("aten.mm.default", "aten.addmm.default")}
    assert {tuple(graph.tensor((i, 0)).shape) for i in of if graph.is_by_columns(i)} == {(40, 24), (16, 40)}
    assert len(of) == 5


@pytest.mark.parametrize("k, n", [(4096, 14336), (14336, 4096), (768, 50304)])
@pytest.mark.parametrize("m", [1, 7, 65, 301, 511, 1023, 2047, 4097, 16383])
def test_a_number_of_tokens_that_is_odd_makes_no_odd_rows(m, k, n):
    form = kernel_columns(MatmulKernel, ["h100"], "bf16")
    assert matmul_seconds(m, k, n, form) == matmul_seconds(m, k, n, replace(form, unaligned=1.0))


def test_a_dtype_without_measurements_runs_as_the_next_wider_one():
    forms = {(name, dtype): kernel_columns(MatmulKernel, [name], dtype) for name in ("a100", "h100") for dtype in ("bf16", "fp8", "nvfp4")}
    assert forms["a100", "nvfp4"] == forms["a100", "fp8"] == forms["a100", "bf16"]
    assert forms["h100", "nvfp4"] == forms["h100", "fp8"] != forms["h100", "bf16"]
    assert_refused("no constants of device 'h101'", kernel_columns, MatmulKernel, ["h101"], "bf16")


@pytest.mark.parametrize("name", known_devices())
def test_every_device_file_says_where_its_kernels_were_measured(name):
    file = device_file(name)
    assert file["kernels"]["source"] and file["constants"]["training"]["source"]
    assert {"multiprocessors", "cache", "peak16", "memory_bandwidth"} <= set(file["given"])
    base = device_file(file["kernels"]["as"]) if "as" in file["kernels"] else file
    form = kernel_form(MatmulKernel, file["given"], "bfloat16", base["kernels"]["matmul"]["bfloat16"])
    large = 2 * 8192 * 8192 * 28672 / matmul_seconds(8192, 8192, 28672, form)
    assert 0.4 * file["given"]["peak16"] < large < 0.95 * file["given"]["peak16"]
