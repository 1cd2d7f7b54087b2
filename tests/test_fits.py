"""`fits`: published launches, laws of memory, the command line, the user's own evidence, and input that is none."""

import json
import math
import pickle
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.cli.launchers import model_builder, site_of
from autoshard.launch import Launch, LaunchConfig, ModelSizes, Site
from autoshard.launch.allocations import _excess
from autoshard.launch.block_memory import OWN_INPUT, kept_tasks
from autoshard.launch.captured_block import tasks_of
from autoshard.launch.fitting import _moves, will_fit
from autoshard.launch.launch_prices import launch_memory, prices_of
from autoshard.launch.legality import LAUNCHERS
from autoshard.launch.peak_memory import chance_to_fit, chance_within
from autoshard.launch.runs import SCHEDULES, TrainingRuns
from autoshard.launch.torchtitan import FLAVORS
from benchmarks.fits import TABLE, answered, beside_a_plan
from tests.helpers_command import record_of, refusal, run

ROOT = Path(__file__).parent.parent
TITAN = ROOT / "tests" / "data" / "launchers" / "torchtitan" / "llama3_8b.toml"
BIG = ("fits", f"{ROOT}/models/llama.py:llama3_8b", "--devices", "8", "--seq", "4096")
LLAMA8 = ModelSizes(32, 4096, 14336, 32, 8, 128256)
FSDP = Launch(8, 8192, 16, microbatch=2, data=8, shard=8, zero=3, recompute="selective_op")
TINY = f"{ROOT}/models/llama.py:tiny"
ROWS = json.loads(TABLE.read_text())


def bytes_of(launch: Launch, launcher: str = "torchtitan", sizes: ModelSizes = LLAMA8) -> float:
    return float(launch_memory(TrainingRuns.of([launch]), sizes, Site(), launcher).device[0])


@pytest.mark.parametrize("row", ROWS, ids=[row["name"] for row in ROWS])
def test_published_launches_are_answered_rightly(row):
    answer = answered(row)
    assert answer["right"] and not answer["reasons"] and row["source"]
    kinds, allocated = answer["fullest"]["bytes_by_kind"], answer["fullest"]["allocated_bytes"]
    assert sum(kinds.values()) == pytest.approx(allocated) and min(kinds.values()) >= 0
    if row["measured_bytes"]:
        assert answer["predicted_bytes"] / row["measured_bytes"] == pytest.approx(1, abs=0.15)


def test_the_table_has_12_that_ran_and_6_that_did_not():
    assert sum(row["ran"] for row in ROWS) >= 12 and sum(not row["ran"] for row in ROWS) >= 6


def test_what_a_block_keeps_is_what_autograd_saves():
    """Llama's block, counted by hand: norms in float32, op by op; by fused kernels; by a compiler that keeps the least."""
    by_how = {}
    for how in ("", "library", "compiled"):
        forward = tasks_of("llama", "megatron", how)["forward block"]
        by_how[how] = [forward[i].target.split(".")[1] if i != OWN_INPUT else "input" for i in sorted(kept_tasks(forward, how))]
    assert by_how[""].count("_to_copy") == 4 and by_how[""].count("mm") == 3 and "silu" in by_how[""]
    # the input and the sum after attention, what matmuls read, q, k, v, attention, gate and up
    assert by_how["library"] == ["input", "mul", "mm", "add", "add", "attention", "add", "mul", "mm", "mm", "mul"]
    # queries and keys with their positions; of norms the reciprocal roots alone
    kept = ["input", "rsqrt", "mm", "add", "add", "attention", "add", "rsqrt", "mm", "mm"]
    assert by_how["compiled"] == kept
    sharded = [task.target.split(".")[1] for task in tasks_of("llama", "megatron_sp", "compiled")["forward block"] if task.kept]
    assert sharded == [name for name in kept[1:] for name in ([name, "mul"] if name == "rsqrt" else [name])]  # and what is gathered


@settings(max_examples=8, deadline=None)
@given(
    st.sampled_from(("torchtitan", "megatron", "accelerate", "nanotron")), st.integers(0, 3), st.integers(0, 2), st.integers(0, 3),
    st.sampled_from(("none", "selective_op", "full")), st.sampled_from(SCHEDULES), st.booleans(),
)  # fmt: skip
def test_laws_of_memory(launcher, tensor, pipeline, data, recompute, schedule, compiled):
    t, p, d = 2**tensor, 2**pipeline, 2**data
    zero = (3 if p == 1 else 2) if launcher in ("torchtitan", "accelerate") else 1
    one = Launch(
        t * p * d, 4096, 64 * d, data=d, shard=d, zero=zero if d > 1 else 0, tensor=t, sequence_parallel=t > 1, pipeline=p,
        schedule=schedule, virtual=1 if schedule in ("1F1B", "GPipe") else 2, recompute=recompute, compiled=compiled,
    )  # fmt: skip
    memory = launch_memory(TrainingRuns.of([one]), LLAMA8, Site(), launcher)
    assert 0 < memory.allocated[0] <= memory.reserved[0] <= memory.device[0]
    assert memory.fullest().bytes()[0] == memory.allocated[0] and all(x[0] >= 0 for peak in memory.peaks for x in peak.kinds.values())
    now = memory.device[0]
    assert bytes_of(replace(one, microbatch=2), launcher) > now * (1 - 1e-12)
    assert bytes_of(replace(one, seq=8192), launcher) > now
    assert bytes_of(replace(one, recompute="full"), launcher) <= bytes_of(replace(one, recompute="none"), launcher) * (1 + 1e-12)
    assert bytes_of(one, launcher, replace(LLAMA8, layers=64)) > now
    if p > 1:
        assert bytes_of(replace(one, schedule="GPipe", virtual=1), launcher) >= bytes_of(replace(one, schedule="1F1B", virtual=1), launcher)


# llama's last norm is in float32 op by op, as the others are; `fits` has it as one kernel
@pytest.mark.parametrize(("model", "within"), [("gpt2", 2e-3), pytest.param("llama", 0.03, marks=pytest.mark.slow)])
def test_a_step_keeps_what_the_program_of_a_plan_keeps(model, within):
    fits, plan = beside_a_plan(model, "fsdp").values()
    assert fits["step"] == pytest.approx(plan["step"], rel=within)
    assert all(fits[kind] == pytest.approx(plan[kind], rel=0.02) for kind in ("parameters", "optimizer"))
    assert fits["gathered"] > plan["gathered"] == 0  # FSDP's rule: the ends' parameters and the next block's


def test_the_chance_falls_with_the_bytes_and_is_of_the_errors():
    stacks = np.full(200, "nanotron")
    chance = chance_to_fit(np.geomspace(20e9, 300e9, 200), 80e9, stacks)
    assert (np.diff(chance) <= 0).all() and chance[0] > 0.99 and chance[-1] < 0.02
    levels, errors = np.array([0.1, 0.5, 0.9]), np.log(np.array([[0.8, 1.0, 1.25]]))
    assert chance_within(np.array([80.0]), 80.0, levels, errors)[0] == pytest.approx(0.5)
    assert chance_within(np.array([100.0]), 80.0, levels, errors)[0] == pytest.approx(0.1)
    assert chance_within(np.array([64.0]), 80.0, levels, errors)[0] == pytest.approx(0.9)
    assert chance_within(np.array([1.0, 1e9]), 80.0, levels, np.repeat(errors, 2, 0)).tolist() == [1.0, 0.0]


def test_pipelines_keep_what_fsdp_gathers_and_whole_gradients():
    """torchtitan, 405B on 512 H100: with "default" nothing is resharded after the forward of a pipeline."""
    row = next(row for row in ROWS if "1F1B" in row["name"])
    sizes, launch = ModelSizes(**row["model"]), Launch(**row["launch"])
    memory = launch_memory(TrainingRuns.of([launch]), sizes, Site("h100_500w"), "torchtitan")
    stage = 16 * (4 * 16384**2 * 9 / 16 + 3 * 16384 * 53248) / 8  # of 126 blocks on 8 stages, divided by 8; queries 1, keys 1/16
    kinds = memory.fullest().kinds
    assert kinds["gradients"][0] == pytest.approx(4 * stage, rel=0.05) and kinds["parameters"][0] == pytest.approx(2 * stage, rel=0.05)
    assert kinds["optimizer"][0] == pytest.approx(12 * stage / 8, rel=0.05)  # float32 parameters and two moments, sharded over 8
    alone = launch_memory(TrainingRuns.of([replace(launch, pipeline=1, devices=64)]), sizes, Site("h100_500w"), "torchtitan")
    assert alone.fullest().kinds["gradients"][0] == pytest.approx(8 * 4 * stage / 8, rel=0.05)  # of all blocks, but sharded


@pytest.mark.parametrize("launcher", ["torchtitan", "megatron", "accelerate", "nanotron"])
def test_what_makes_it_fit_fits(launcher):
    zero = 3 if launcher in ("torchtitan", "accelerate") else 1
    launch = Launch(8, 8192, 64, microbatch=8, data=8, shard=8, zero=zero)
    answer = will_fit(LaunchConfig(launch, LLAMA8), launcher, Site())
    assert answer.verdict == "no" and answer.remedies
    prices = [remedy.price for remedy in answer.remedies]
    assert prices == sorted(prices)
    for remedy in answer.remedies:
        assert remedy.chance >= 0.9 and remedy.bytes <= answer.site.usable and remedy.what
        if "loss" not in remedy.what and "host" not in remedy.what:
            alone = prices_of(TrainingRuns.of([remedy.to]), LLAMA8, Site(), launcher)
            assert alone.bytes[0] == pytest.approx(remedy.bytes)
            assert alone.seconds[0] - answer.prices.seconds[0] == pytest.approx(remedy.price)
    largest = answer.largest_microbatch
    if largest is not None:
        batch = {n: replace(launch, microbatch=n, global_batch=8 * n) for n in (largest, largest + 1)}
        fits = {n: prices_of(TrainingRuns.of([one]), LLAMA8, Site(), launcher).bytes[0] for n, one in batch.items()}
        assert fits[largest] <= answer.site.usable and largest < 8


@pytest.mark.parametrize("precision", ["bf16", "nvfp4"])
def test_nothing_is_kept_on_hosts_whose_links_have_no_price(precision):
    """Nor is an answer refused for it; and of changes that are all illegal there is none."""
    launch = Launch(8, 32768, 64, microbatch=8, data=8, shard=8, zero=1, precision=precision)
    answer = will_fit(LaunchConfig(launch, LLAMA8), "megatron", Site("b200", memory=40e9))
    assert answer.verdict == "no" and not any("host" in remedy.what for remedy in answer.remedies)


def test_a_state_in_the_hosts_memory_takes_time_and_no_memory():
    launch = TrainingRuns.of([Launch(8, 4096, 64, data=8, shard=8, zero=1)] * 2).with_columns(offload=np.array([0, 1]))
    prices, memory = prices_of(launch, LLAMA8, Site(), "megatron"), launch_memory(launch, LLAMA8, Site(), "megatron")
    assert prices.seconds[1] > prices.seconds[0]
    assert memory.device[0] - memory.device[1] == pytest.approx(12 * LLAMA8.parameters / 8, rel=0.01)


# --- the command line


def test_fits_prints_its_keys_and_a_table_by_kind():
    words = ("fits", f"{ROOT}/models/llama.py:llama3_8b", "--devices", "8", "--microbatch", "2", "--recompute", "selective_op")
    code, text, _ = run(*words)
    assert code == 1 and "no: fits with a chance of" in text and "while the loss is computed" in text and "per step of" in text
    for kind in ("parameters", "activations", "logits", "allocated", "reserved", "with contexts"):
        assert re.search(rf"^ *{kind} +[\d.]+ [GM]B$", text, re.M), kind
    record = record_of(*words, code=1)
    assert list(record) == [
        "ok", "verdict", "chance_to_fit", "launcher", "devices", "global_batch", "seq", "precision", "configuration", "parameters",
        "not_counted", "reasons", "device_memory_bytes", "usable_bytes", "bias", "fullest", "stages", "largest_microbatch", "seconds",
        "changes",
    ]  # fmt: skip
    assert record["fullest"] == record["stages"][0] and record["fullest"]["stage"] == "all"
    larger = record_of(*words, "--memory", "141GB")
    assert larger["verdict"] == "yes" and larger["changes"] == [] and larger["largest_microbatch"] >= 2


def test_stages_and_configurations():
    record = record_of(*BIG, "--launcher", "megatron", "--pp", "4", "--tp", "2")
    assert [stage["stage"] for stage in record["stages"]] == ["first", "inner", "last"] and record["configuration"]["zero"] == 0
    sharded = [record_of(*BIG, *words)["configuration"] for words in ((), ("--pp", "2"), ("--tp", "8"))]
    assert [(one["zero"], one["shard"], one["dp"]) for one in sharded] == [(3, 8, 8), (2, 4, 4), (0, 1, 1)]
    read = record_of("fits", str(TITAN), "--devices", "8", "--memory", "180GB")
    assert read["launcher"] == "torchtitan" and read["verdict"] in ("yes", "tight", "no")
    illegal = record_of("fits", TINY, "--devices", "8", "--tp", "8", code=1)
    assert illegal["verdict"] == "no" and illegal["reasons"] and illegal["fullest"] is None


def test_a_model_with_degrees_is_the_launchers_own_launch():
    for launcher in LAUNCHERS:
        words = ("fits", f"hf:{ROOT}/tests/data/hf/mixtral", "--launcher", launcher, "--seq", "64", "--json")
        said = [run(*words, "--devices", n, "--tp", tp, "--pp", pp)[1] for n, tp, pp in ("421", "111", "211", "412")]
        sharded, *rows = [json.loads(one)["configuration"] for one in said]
        assert sharded["etp"] == (2 if launcher in ("torchtitan", "megatron") else 1)
        assert [row["zero"] for row in rows] == ([0, 1, 1] if launcher in ("megatron", "nanotron") else [0, 3, 2])


def test_devices_of_a_node_share_its_link():
    asked = SimpleNamespace(memory=None, device="h100", evidence=None, intra_node_bandwidth=3e11, inter_node_bandwidth=4e11, per_node=4)
    site = site_of(asked, "torchtitan")
    assert (site.network, site.memory, site.memory_bias) == (1e11, 80e9, 1.0)


@pytest.mark.parametrize(("model", "dtype"), [(f"hf:{ROOT}/tests/data/hf/llama", "torch.bfloat16"), (TINY, "torch.float32")])
def test_models_of_bounds_are_in_16_bits_where_their_file_does_not_say(model, dtype):
    module, inputs = model_builder(model, {}, 16)(3)
    first = next(iter(inputs.values())) if isinstance(inputs, dict) else inputs[0]
    assert str(next(module.parameters()).dtype) == dtype and first.shape == (3, 16)


def test_own_evidence_corrects_the_next_answers(tmp_path):
    evidence = str(tmp_path / "memory.json")
    words = BIG
    before = record_of(*words)
    seen = record_of(*words, "--observed", "50GB", "--evidence", evidence)
    assert seen["observed"]["predicted_bytes"] == pytest.approx(before["fullest"]["reserved_bytes"])
    bias = 50e9 / seen["observed"]["predicted_bytes"]
    after = record_of(*words, "--evidence", evidence)
    assert after["bias"] == pytest.approx(bias) and after["fullest"]["reserved_bytes"] == pytest.approx(50e9)
    again = record_of(*words, "--observed", "50GB", "--evidence", evidence)
    assert again["observed"]["predicted_bytes"] == pytest.approx(seen["observed"]["predicted_bytes"])  # never by what was corrected
    other = record_of(*words, "--launcher", "megatron", "--tp", "2", "--evidence", evidence)
    assert other["bias"] == 1
    ranking = ("degrees", TINY, "--devices", "8", "--seq", "16", "--global-batch", "16", "--no-bound", "--top", "1")
    ranked, plain = record_of(*ranking, "--evidence", evidence), record_of(*ranking)
    assert ranked["configurations"][0]["memory_bytes"] != plain["configurations"][0]["memory_bytes"]


LOGS = {
    "step: 10  loss: 11.1  grad_norm: 1.7  memory: 73.32GiB(92.70%)  tps: 11,636": ("reserved", 73.32 * 2**30),
    "memory (MB) | allocated: 1.5 | max allocated: 60489.5 | reserved: 61000 | max reserved: 62000": ("reserved", 62000 * 2**20),
    "Memory usage: 20.1MiB. Peak allocated: 1000.2MiB Peak reserved: 51000.0MiB": ("reserved", 51000 * 2**20),
    "| N/A   34C    P0   114W / 700W |  71234MiB / 81559MiB |": ("device", 71234 * 2**20),
}


@pytest.mark.parametrize("line", LOGS)
def test_a_line_of_a_log_tells_memory(tmp_path, line):
    log = tmp_path / "train.log"
    log.write_text(f"began\n{line}\nended\n")
    record = record_of(*BIG, "--observed", str(log))
    figure, measured = LOGS[line]
    assert record["observed"]["figure"] == figure and record["observed"]["measured_bytes"] == pytest.approx(measured)


def test_a_snapshot_says_the_difference_by_kind(tmp_path):
    frames = {"optimizer": "torch/optim/adamw.py", "logits": "train/cross_entropy.py", "activations": "torch/nn/modules/linear.py"}
    stacks = [[{"filename": file, "name": "f", "line": 1}] for file in frames.values()]
    blocks = [{"size": 10 * 2**30, "state": "active_allocated", "frames": stack} for stack in stacks]
    segments = [{"device": 0, "address": 0, "total_size": 30 * 2**30, "allocated_size": 30 * 2**30, "stream": 0, "blocks": blocks}]
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps({"segments": segments, "device_traces": []}))
    record = record_of(*BIG, "--observed", str(path))
    by_kind = {row["kind"]: row for row in record["observed"]["by_kind"]}
    assert {kind: by_kind[kind]["measured_bytes"] for kind in frames} == dict.fromkeys(frames, 10 * 2**30)
    sizes = [abs(row["measured_bytes"] - row["predicted_bytes"]) for row in record["observed"]["by_kind"]]
    assert sizes == sorted(sizes, reverse=True) and math.isfinite(sum(sizes))
    assert "measured" in run(*BIG, "--observed", str(path))[1]


class Hostile:
    def __reduce__(self):
        return print, ("never",)


def test_bad_input_is_a_sentence(tmp_path):
    (tmp_path / "a.yaml").write_text("distributed_type: MULTI_GPU\nnum_processes: 8\nmixed_precision: bf16\n")
    (tmp_path / "float.toml").write_text(TITAN.read_text().replace("[training]", '[training]\nmixed_precision_param = "float32"'))
    (tmp_path / "mode.toml").write_text(re.sub(r'mode = "\w+"', 'mode = "some"', TITAN.read_text()))
    (tmp_path / "no.log").write_text("nothing about it\n")
    (tmp_path / "no.json").write_text("[]")
    (tmp_path / "no.pickle").write_bytes(pickle.dumps({"segments": 5}))
    (tmp_path / "hostile.pickle").write_bytes(pickle.dumps(Hostile()))
    (tmp_path / "evidence.json").write_text('{"torchtitan": [{"measured_bytes": "much"}]}')
    for words, said in (
        (("fits", str(tmp_path / "a.yaml"), TINY, "--launcher", "accelerate", "--seq", "64"), "does not say the microbatch; add"),
        (("fits", str(tmp_path / "a.yaml")), "may be of several launchers; add --launcher"),
        (("fits", str(tmp_path / "float.toml"), "--devices", "8"), "matmuls in float32 have no prices"),
        (("fits", str(tmp_path / "mode.toml"), "--devices", "8"), "activation_checkpoint.mode is 'some'; expected one of"),
        (("fits", f"{ROOT}/models/resnet.py:tiny", "--devices", "8"), "expected"),
        (("fits", TINY), "add --devices 8"),
        (("fits", TINY, "--devices", "8", "--recompute", "some"), "expected one of"),
        (("fits", "nothing.txt", "--devices", "8"), "neither a model"),
        (("fits", str(TITAN), "--tp", "2"), "--tp has no effect on a configuration"),
        ((*BIG, "--observed", "71.2"), "unit"),
        ((*BIG, "--observed", "1MB"), "expected a run of this launch"),
        ((*BIG, "--observed", str(tmp_path / "no.log")), "no line that tells memory"),
        ((*BIG, "--observed", str(tmp_path / "no.json")), "is no memory snapshot"),
        ((*BIG, "--observed", str(tmp_path / "no.pickle")), "is no memory snapshot"),
        ((*BIG, "--observed", str(tmp_path / "hostile.pickle")), "which a memory snapshot never needs"),
        ((*BIG, "--evidence", str(tmp_path / "evidence.json")), "without measured and predicted bytes"),
        ((*BIG, "--evidence", str(tmp_path / "misspelled.json")), "there is no file"),
    ):
        assert said in refusal(*words), words


# -- one device: what an H200 reserved (docs/gpu.md) --------------------------------------------------------------------------------

LLAMA_4 = ModelSizes(4, 4096, 14336, 32, 8, 128256)
GPT2_LARGE = ModelSizes(36, 1280, 5120, 20, 20, 50257, tied=True, gated=False)
MEASURED = [  # sizes, seq, microbatch, recompute, compiled; GB allocated and reserved
    (LLAMA_4, 8192, 1, "none", False, 47.2, 51.0), (LLAMA_4, 8192, 1, "full", False, 37.7, 43.9),
    (LLAMA_4, 8192, 1, "selective_op", False, 39.5, 45.4), (LLAMA_4, 4096, 2, "none", False, 47.2, 51.0),
    (replace(LLAMA_4, layers=2), 8192, 2, "full", False, 45.4, 57.1), (GPT2_LARGE, 1024, 8, "none", False, 29.6, 31.3),
    (GPT2_LARGE, 1024, 16, "full", False, 22.6, 26.5), (LLAMA_4, 8192, 1, "none", True, 35.7, 38.1),
    (LLAMA_4, 8192, 1, "full", True, 31.1, 33.1),
]  # fmt: skip


def of_one_device(sizes: ModelSizes, seq: int, microbatch: int, recompute: str, compiled: bool):
    one = Launch(1, seq, microbatch, microbatch=microbatch, recompute=recompute, compiled=compiled, compiled_loss=compiled)
    return launch_memory(TrainingRuns.of([one]), sizes, Site("h200", memory=141e9), "torchtitan")


@pytest.mark.parametrize("row", MEASURED, ids=lambda row: f"{row[0].layers} layers of {row[0].width}, {row[1:5]}")
def test_the_allocator_reserves_what_it_did_on_one_device(row):
    *launch, allocated, reserved = row
    memory = of_one_device(*launch)
    assert memory.reserved[0] / memory.allocated[0] == pytest.approx(reserved / allocated, rel=0.05)
    assert memory.allocated[0] / 1e9 == pytest.approx(allocated, rel=0.08)
    assert memory.reserved[0] / 1e9 == pytest.approx(reserved, rel=0.12)


@pytest.mark.parametrize(("steps", "wrong"), [(1, 4), (3, 0)])
def test_the_second_step_finds_the_segments_of_the_first_and_the_third_is_like_it(monkeypatch, steps, wrong):
    monkeypatch.setattr("autoshard.launch.allocations.STEPS", steps)
    _excess.cache_clear()
    ratios = [memory.reserved[0] / memory.allocated[0] for memory in (of_one_device(*row[:-2]) for row in MEASURED)]
    _excess.cache_clear()
    off = sum(abs(ratio / (row[-1] / row[-2]) - 1) > 0.05 for ratio, row in zip(ratios, MEASURED))
    assert off >= wrong if wrong else off == 0


def test_between_microbatches_of_powers_of_two_the_excess_is_between():
    few, some, more = (of_one_device(LLAMA_4, 1024, n, "full", False) for n in (4, 6, 8))
    a, b, c = ((one.reserved / one.allocated)[0] for one in (few, some, more))
    assert min(a, c) <= b <= max(a, c)


def test_chunks_of_the_loss_and_learned_positions_are_counted():
    one, whole = TrainingRuns.of([FSDP]), {}
    for chunks in (1, 2, 8):
        whole[chunks] = prices_of(one.with_columns(loss_chunks=np.array([chunks])), LLAMA8, Site(), "torchtitan").seconds[0]
    assert whole[8] - whole[1] == pytest.approx(7 * (whole[2] - whole[1])) and whole[2] > whole[1]  # each adds to the head's gradient
    alone = Launch(1, 1024, 1)
    more = bytes_of(alone, "megatron", replace(GPT2_LARGE, learned_positions=True)) - bytes_of(alone, "megatron", GPT2_LARGE)
    assert more == pytest.approx(18 * 1024 * 1280, rel=0.3)  # 2 bytes, 4 of the gradient, 12 of the optimizer


@pytest.mark.parametrize("grads16", [False, True])
@pytest.mark.parametrize("stages, microbatch", [(8, 4), (32, 1)])
def test_sharded_parameters_take_no_more_than_those_that_stay_gathered(stages, microbatch, grads16):
    """A stage gathers no more blocks than it has, and its whole gradients have the dtype that they are reduced in."""
    launch = Launch(16 * stages, 8192, 16 * stages * microbatch, microbatch, data=16, shard=16, zero=2, pipeline=stages, recompute="full",
                    split="ends", grads16=grads16)  # fmt: skip
    runs = TrainingRuns.of([launch, replace(launch, zero=3)])
    for sizes in (FLAVORS["llama3", "8B"], FLAVORS["qwen3", "30B-A3B"]):
        gathered, sharded = launch_memory(runs, sizes, Site(), "torchtitan").device
        assert sharded <= gathered * (1 + 1e-3)


@pytest.mark.parametrize("launcher", ["torchtitan", "automodel"])
def test_stages_of_torch_receive_into_a_buffer_per_microbatch_whatever_is_sharded(launcher):
    launch = Launch(8, 8192, 32, data=1, pipeline=8, recompute="full", split="ends")
    alone, sharded = (launch_memory(TrainingRuns.of([replace(launch, zero=zero)]), LLAMA8, Site(), launcher) for zero in (0, 2))
    assert alone.fullest().kinds["transfers"][0] == sharded.fullest().kinds["transfers"][0] >= 32 * 2 * 8192 * 4096


@pytest.mark.parametrize("launcher", ["torchtitan", "megatron", "nanotron", "deepspeed", "accelerate"])
@pytest.mark.parametrize("data, micro, zero, shard", [(1, 1, 0, 1), (2, 6, 0, 1), (3, 4, 3, 1), (4, 2, 1, 4), (4, 1, 3, 2)])
def test_a_change_of_a_launch_keeps_its_devices_and_its_sequences_per_step(launcher, data, micro, zero, shard):
    launch = Launch(4 * data, 4096, 24 * data, micro, data=data, shard=shard, zero=zero, tensor=2, pipeline=2)
    moves = {what: (replace(launch, **fields), fields, columns) for what, fields, columns in _moves(launch, launcher, True)}
    for to, fields, columns in moves.values():
        assert to.data * to.tensor * to.pipeline * to.context == to.devices == launch.devices and to.global_batch == launch.global_batch
        assert (to != launch or columns) and to.data % to.shard == 0 and to.zero >= zero and micro % to.microbatch == 0
        assert set(fields) & {"tensor", "pipeline", "context"} == set() or to.data == data // 2
    assert {name in moves for name in ("tensor", "pipeline", "context")} == {data % 2 == 0}
    assert [n for n in range(1, 9) if f"microbatch {n}" in moves] == [n for n in range(1, micro) if micro % n == 0]
    known = {"megatron": {1}, "nanotron": {1}, "deepspeed": {1, 2, 3}}.get(launcher, {2, 3})
    more = {n for n in known if data > 1 and (n > zero or n == zero and shard < data)}
    assert {n for n in range(4) if f"zero {n}" in moves} == more and all(moves[f"zero {n}"][0].shard == data for n in more)
