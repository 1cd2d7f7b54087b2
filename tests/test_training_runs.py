"""Predictions of training runs: against published ones, and the laws that any prediction obeys."""

import csv
import itertools
import json
import math
import subprocess
import sys
from dataclasses import fields, replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from autoshard.cost import DeviceConstants, MemoryConstants, StackConstants
from autoshard.cost.devices import device_constants, known_stacks, spread_of
from autoshard.cost.kernels import Ring, beside
from autoshard.devices import DEVICE_FILES, SLOWED, known_devices
from autoshard.launch import peak_memory
from autoshard.launch.block_time import Block, block
from autoshard.launch.blocks_of_stages import stages
from autoshard.launch.launch_prices import Site, prices_of
from autoshard.launch.launch_space import RECOMPUTED, launches, structures
from autoshard.launch.runs import Launch, TrainingRuns
from autoshard.launch.step_time import beside_block
from autoshard.launch.torchtitan import FLAVORS
from benchmarks.published import (
    EFFECTS,
    chance_to_run,
    constants_of,
    interval,
    parts_of,
    predicted_seconds,
    runs_of,
    step_seconds,
    tokens_per_second,
)
from tests.helpers_kept import assert_stays
from tests.helpers_refusals import refusals

HERE = Path(__file__).parent
RUNS = HERE / "data" / "runs" / "runs.csv"
SCRIPT = HERE.parent / "benchmarks" / "published_runs.py"
RATES = ("peak16", "peak8", "peak4", "memory_bandwidth", "link_bandwidth", "memory", "link", "network")


def rows() -> list[dict[str, str]]:
    with RUNS.open(newline="") as file:
        return [{**row, "gpu": {"h100tt": "h100_500w"}.get(row["gpu"], row["gpu"])} for row in csv.DictReader(file)]


@cache
def measured() -> tuple:
    """The file's runs, their constants, and the seconds that these give."""
    runs = runs_of(rows())
    return runs, constants_of(runs), step_seconds(runs, constants_of(runs))


def peak_bytes(runs: TrainingRuns) -> np.ndarray:
    return peak_memory.memory_of(runs, constants_of(runs)).device


RECIPE = {
    "src": "nanotron", "gpu": "h100", "L": 16, "h": 2048, "ffn": 8192, "heads": 32, "kv": 32, "head_dim": 64, "vocab": 131072,
    "tied": 1, "gated": 1, "pos": 0, "seq": 4096, "mbs": 2, "ga": 8, "dp": 4, "shard": 4, "zero": 1, "tp": 2, "sp": 1, "pp": 1,
    "vp": 1, "cp": 1, "rc": "none", "prec": "bf16",
    "fused": 0, "asynctp": 0, "gpn": 8, "link_per_gpu": 5e10, "gpu_mem": 8e10,
}  # fmt: skip


def recipe(**changes: object) -> TrainingRuns:
    return runs_of([RECIPE | changes])


def published(*arguments: str, table: Path = RUNS) -> dict:
    code = [sys.executable, str(SCRIPT), str(table), "--json", *arguments]
    environment = {"PYTHONPATH": f"{HERE.parent}", "OMP_NUM_THREADS": "1"}
    return json.loads(subprocess.run(code, check=True, capture_output=True, text=True, env=environment).stdout)


def predictions(launcher: str) -> dict:
    """Of the published runs, or of a launcher's how many are legal and 50 of them: seconds and bytes."""
    if launcher == "published":
        runs = runs_of(rows())
        memory = peak_memory.memory_of(runs, constants_of(runs))
        parts = {kind: np.broadcast_to(part, len(runs)) for kind, part in parts_of(runs, constants_of(runs)).items()}
        return {kind: values.tolist() for kind, values in {**parts, "allocated": memory.allocated, "device": memory.device}.items()}
    told: dict[str, list] = {}
    experts = FLAVORS["qwen3", "30B-A3B"]
    experts = replace(experts, head_dim=64, qk_norm=False) if launcher == "nanotron" else experts  # whose model it can express
    for sizes in (FLAVORS["llama3", "8B"], experts):
        legal = TrainingRuns.joined(launches(structures(Launch(16, 8192, 128), launcher), sizes, launcher))
        prices = prices_of(legal[np.linspace(0, len(legal) - 1, 50).astype(int)], sizes, Site(), launcher)
        for kind in ("seconds", "bytes", "chance"):
            told[f"{kind} of {len(legal)}"] = getattr(prices, kind).tolist()
    return told


@pytest.mark.parametrize("launcher", ["published", *RECOMPUTED])
def test_what_is_predicted_stays_what_it_is(launcher):
    assert_stays(f"predicted/{launcher}.json", predictions(launcher))


@pytest.mark.slow
def test_the_benchmark_prints_the_keys_that_scripts_read():
    record = published()
    assert {"sources", "mean_of_means", "unfitted_mean_of_means", "inexpressible"} <= set(record)
    assert set(record["sources"]) == {"torchtitan", "llmfoundry", "simumax", "nemo", "nanotron", "vtrain_single"}
    for row in record["sources"].values():
        assert {"n", "mean", "median", "p90", "bias", "rank", "memory", "fits_right"} <= set(row)
        assert set(row["memory"]) == {"n", "median", "bias"} and row["n"] >= 5
    assert set(record["few_rows"]) == {"mcore"}  # two rows
    assert record["set_apart"]["nanotron"]["n"] == 2  # of the old pipeline code
    assert record["sources"]["nanotron"]["fits_right"] is not None and record["sources"]["simumax"]["fits_right"] is None
    assert record["mean_of_means"] == pytest.approx(np.mean([row["mean"] for row in record["sources"].values()]))
    assert record["mean_of_means"] < 0.15 and record["unfitted_mean_of_means"] < 0.25
    assert published("--source", "simumax", "--limit", "2")["few_rows"]["simumax"]["n"] == 2
    crashed = published("--source", "oom_nanotron")
    assert crashed["few_rows"]["nanotron"]["n"] == 0 and crashed["few_rows"]["nanotron"]["fits_right"] is not None
    assert crashed["mean_of_means"] is None


def test_runs_that_cannot_be_expressed_are_counted_with_the_reason(tmp_path):
    table = list(csv.reader(RUNS.open(newline="")))
    names, first = table[0], table[1]
    changes = ({"gpu": "v100"}, {"prec": "int8"}, {"rc": "some"}, {"ep": "8"}, {"tp": "3"}, {"mbs": ""})
    broken = [[changed.get(name, value) for name, value in zip(names, first)] for changed in changes]
    path = tmp_path / "runs.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([names, first, *broken])
    record = published(table=path)
    degrees = "degrees do not multiply to the number of devices"
    reasons = ("device v100 has no constants", "precision int8", "recomputation some", "experts", degrees, "no mbs")
    assert record["inexpressible"] == dict.fromkeys(reasons, 1)
    assert record["few_rows"]["torchtitan"]["n"] == 1


def test_every_device_and_stack_has_its_constants_with_a_source_and_few_of_them():
    names = [[field.name for field in fields(record)] for record in (DeviceConstants, StackConstants, MemoryConstants)]
    of_devices, of_stacks, of_memory = names[0][7:], names[1][13:], names[2]  # what stands in front is never fitted
    assert len(of_devices) <= 15 and len(of_stacks) <= 6 and len(of_memory) <= 7
    for name in known_devices():
        constants = json.loads((DEVICE_FILES / f"{name}.json").read_text())["constants"]
        assert set(constants) == set(of_devices)
        assert all(one["source"] and one["published"] >= 0 for one in constants.values())
    stacks = json.loads((DEVICE_FILES / "stacks.json").read_text())
    assert set(stacks) == set(known_stacks()) and "other" in stacks
    for stack in ({**stacks[one.get("as", name)], **one} for name, one in stacks.items()):
        assert set(stack["constants"]) == set(of_stacks) and set(stack["memory"]) == set(of_memory)
        assert all(set(one) == {"published", "source"} for one in stack["memory"].values())  # described, never fitted


def test_all_runs_at_once_and_one_by_one_are_the_same():
    runs = runs_of(rows())
    together, bytes = predicted_seconds(runs), peak_bytes(runs)
    for i in range(0, len(runs), 7):
        one = runs[np.array([i])]
        assert predicted_seconds(one)[0] == together[i] and peak_bytes(one)[0] == bytes[i]


@pytest.mark.parametrize("name", RATES)
def test_a_faster_device_is_never_slower(name):
    runs, constants, seconds = measured()
    faster = replace(constants, device=replace(constants.device, **{name: getattr(constants.device, name) * 1.5}))
    assert (step_seconds(runs, faster) <= seconds * (1 + 1e-12)).all()


def test_slower_kernels_and_more_of_training_take_longer():
    runs = runs_of(rows())
    constants = constants_of(runs)
    device, slow = constants.device, replace(constants.matmul, rate=constants.matmul.rate / 1.5)
    for other in (replace(constants, matmul=slow), replace(constants, device=replace(device, training=1.1 * device.training))):
        waits = parts_of(runs, constants)["host"] > 0  # for launches, however fast kernels are
        assert (step_seconds(runs, other) >= step_seconds(runs, constants) * (1 - 1e-12)).all()
        assert (step_seconds(runs, other) > step_seconds(runs, constants))[~waits].all() and not waits.all()


@pytest.mark.parametrize("effect", EFFECTS)
def test_every_effect_takes_time_somewhere(effect):
    runs, constants, seconds = measured()
    without = step_seconds(runs, replace(constants, without=frozenset({effect})))
    beside = 1e-4 if effect == "imbalance" else 1e-12  # a longer last backward of a slower stage hides more of the gradients' reduction
    assert (without <= seconds * (1 + beside)).all()
    if effect != "context parallel":  # no run of the file has sharded contexts whose transfers are longer than attention
        assert (without < seconds * 0.9999).any()


def test_more_work_takes_longer_and_more_memory():
    axes = {"mbs": (1, 4), "ga": (1, 16), "tp": (1, 2, 16), "pp": (1, 4), "dp": (1, 4), "zero": (0, 1, 3)}
    recipes = [dict(zip((*axes, "rc"), row)) for row in itertools.product(*axes.values(), ("none", "selective_op", "full"))]
    recipes = [row for row in recipes if row["dp"] > 1 or not row["zero"]]  # ZeRO shards over data parallel ranks

    def predicted(change=lambda row: {}):
        runs = runs_of([RECIPE | row | {"shard": row["dp"] if row["zero"] else 1} | change(row) for row in recipes])
        return predicted_seconds(runs), peak_bytes(runs), parts_of(runs, constants_of(runs))["host"] > 0

    seconds, bytes, _ = predicted()
    assert np.isfinite(seconds).all() and (seconds > 0).all() and (bytes > 0).all()
    for name in ("mbs", "ga", "L", "seq"):
        longer, larger, waits = predicted(lambda row, name=name: {name: 2 * (RECIPE | row)[name]})
        assert (longer >= seconds * (1 - 1e-12)).all() and (larger >= bytes).all()
        assert (longer > seconds)[~waits | (name in ("ga", "L"))].all()  # else there are as many launches, for which the host is waited for
    shorter, larger, _ = predicted(lambda row: {"rc": "none"})
    recomputed = np.array([row["rc"] != "none" for row in recipes])
    assert (shorter <= seconds)[recomputed].all() and (larger >= bytes * (1 - 1e-12))[recomputed].all()


def test_overlap_is_between_the_longer_and_the_sum():
    a, b = np.array([0.0, 1.0, 2.0]), np.array([3.0, 1.0, 0.0])
    both = beside(a, b)
    assert (both >= np.maximum(a, b)).all() and (both <= a + b).all()
    assert both.tolist() == [3.0, 1.0 + SLOWED, 2.0]


@pytest.mark.parametrize("waits", [0.0, 1.0, 3.0])
def test_transfers_slow_the_kernels_of_a_block_not_what_it_waits_for(waits):
    """Half of what it hides runs beside kernels where kernels run half of the time."""
    runs = recipe(src="torchtitan", zero=3)
    way = {"matmul": np.full(1, 3.0), "tensor parallel": np.full(1, waits)}
    seconds = beside_block(Block(way, way, np.ones(1)), runs, constants_of(runs), np.full(1, 1.0), np.full(1, 2.0))
    kernels = 3 / (3 + waits)
    assert sum(seconds) == pytest.approx(2 * (3 + waits) + SLOWED * kernels * (1 + 2))


def test_a_compiled_backward_with_its_recomputed_block_moves_less_than_both_apart():
    """All matmuls but the last run again, whose result no backward reads; pointwise ops share what they read with the backward's."""
    runs, once = (recipe(src="torchtitan", fused=1, rc=recompute) for recompute in ("full", "none"))
    both, alone = (block(one, constants_of(one))[0] for one in (runs, once))
    more = {kind: both.backward[kind] - alone.backward[kind] for kind in ("matmul", "attention", "elementwise")}
    assert both.forward["matmul"] == alone.forward["matmul"] and more["attention"] == pytest.approx(alone.forward["attention"])
    assert 0.5 * alone.forward["matmul"] < more["matmul"] < 0.9 * alone.forward["matmul"]
    assert more["elementwise"] < 0.5 * alone.forward["elementwise"]
    assert 1.2 < float(both.launches[0]) < 1.6 and float(alone.launches[0]) == 1


PARTS = {}, {"zero": 3, "pp": 2, "vp": 2, "tp": 4}, {"src": "torchtitan", "cp": 2, "rc": "full"}, {"gpu": "b200"}


@pytest.mark.parametrize("changes", PARTS)
def test_parts_of_a_step_add_up(changes):
    runs = recipe(**changes)
    parts = parts_of(runs, constants_of(runs))
    assert sum(parts.values()) == pytest.approx(predicted_seconds(runs), rel=1e-12)
    assert all((seconds >= -1e-9).all() for seconds in parts.values())


def test_a_ring_within_a_node_has_the_nodes_link_and_beyond_it_the_adapters():
    constants = constants_of(recipe())
    size, per_node, network = np.array([8.0]), np.array([8.0]), np.array([5e10])
    inside = Ring.over(size, np.array([1.0]), per_node, network, constants.device, constants.stack)
    between = Ring.over(size, np.array([8.0]), per_node, network, constants.device, constants.stack)
    assert inside.nodes == 1 and between.nodes == 8
    assert inside.bandwidth == constants.device.link_bandwidth * constants.device.link
    assert between.bandwidth < 5e10 < inside.bandwidth
    alone = Ring.over(np.array([1.0]), np.array([1.0]), per_node, network, constants.device, constants.stack)
    assert alone.gather(1e9) == 0 and alone.all_reduce(1e9) == 0


@pytest.mark.parametrize("nodes, members, copies", [(1, 4, 2), (2, 4, 1), (3, 2, 2), (2, 3, 3), (4, 1, 2)])
def test_tokens_go_to_other_devices_as_often_as_if_all_were_drawn(nodes, members, copies):
    """Of all ways to send the copies of a token of device 0: those to other nodes, once per copy or once per node, and inside a node to
    another place."""
    ring = Ring(np.array([float(nodes * members)]), np.array([1e9]), np.array([1e-6]), np.array([float(nodes)]))
    ways = list(itertools.product(range(nodes * members), repeat=copies))
    to_others = np.mean([sum(device >= members for device in way) for way in ways])
    to_nodes = np.mean([len({device // members for device in way} - {0}) for way in ways])
    within = np.mean([sum(device % members != 0 for device in way) for way in ways])
    rounds = 1e-6 * math.ceil(math.log2(nodes * members))
    for joined, others in ((0.0, to_others), (1.0, to_nodes)):
        for inside, adapter in ((1e12, 1e9), (1e9, 1e12)):
            expected = max(1e6 * others / adapter, 1e6 * within / inside) + rounds
            assert ring.all_to_all(1e6, copies, inside, adapter, joined)[0] == pytest.approx(expected, rel=1e-9)


def test_what_a_share_of_runs_lies_between_widens_around_the_median():
    names = known_stacks()
    before = spread_of(names, 0.0)
    assert (before[0] == before[1]).all()
    for share in (0.2, 0.5, 0.8, 1.0):
        low, high = spread_of(names, share)
        assert (low <= before[0]).all() and (high >= before[1]).all() and len(low) == len(names)
        before = low, high
    assert (low < high).all()


def test_stages_hold_all_blocks_and_are_balanced_by_cost_where_the_launcher_does_so():
    runs = recipe(L=16, pp=4)
    even, by_cost = stages(runs, np.array([False])), stages(runs, np.array([True]))
    assert (even.first[0], even.last[0], even.largest[0]) == (4, 4, 4)
    # Head 131072 * 2048 = 4 blocks of 67e6: 20 units over four stages, five each, the last one block and the head.
    assert (by_cost.first[0], by_cost.last[0], by_cost.largest[0]) == (5, 1, 5)


def test_the_block_that_exceeds_the_share_of_a_stage_is_still_on_it():
    """nanotron's build_model. 28 blocks of 113e6 and a head of 3.56: 15.8 each; the step measured on 2 stages is that of 16 blocks."""
    counts = {}
    for p in (2, 4, 8):
        split = stages(recipe(L=28, h=3072, ffn=8192, heads=32, kv=32, head_dim=96, vocab=131072, pp=p), np.array([True]))
        counts[p] = (split.first[0], split.last[0], split.largest[0])
    assert counts == {2: (16, 12, 16), 4: (8, 4, 8), 8: (4, 0, 4)}


def test_a_pipeline_takes_as_long_as_the_microbatches_on_its_slowest_stage_and_one_on_the_others():
    runs = recipe(L=28, pp=4, ga=4, src="nanotron")
    more = recipe(L=28, pp=4, ga=5, src="nanotron")
    slowest = predicted_seconds(more) - predicted_seconds(runs)  # another microbatch costs what the slowest stage takes
    even = predicted_seconds(recipe(L=28, pp=1, ga=2, src="nanotron")) - predicted_seconds(recipe(L=28, pp=1, ga=1, src="nanotron"))
    assert slowest > 0.9 * even / 4


def test_transfers_in_pieces_hide_behind_the_matmuls_of_a_node_and_behind_none_across_nodes():
    def transfers(**how):
        return parts_of(runs := recipe(dp=1, **how), constants_of(runs))["tensor parallel"][0]

    for sequence_parallel in (0, 1):
        pieces = [transfers(src=src, tp=8, sp=sequence_parallel) for src in ("nanotron", "megatron_core")]
        assert (pieces[0] < 0.75 * pieces[1]) == bool(sequence_parallel)  # all_reduces come in one piece
    across = [transfers(src="nanotron", tp=16, asynctp=one) for one in (0, 1)]
    assert across[0] == across[1] > 4 * pieces[1]


def test_written_attention_moves_its_scores_forward_and_backward():
    runs = recipe(src="vtrain", dp=1, tp=1, mbs=1, ga=1, zero=0, sp=0)
    moved = 1 * 4096**2 * 32 * (9 + 11) * 16  # bytes of all blocks' scores
    constants = constants_of(runs)
    least = moved * constants.stack.traffic / constants.memory_rate
    assert least < parts_of(runs, constants)["attention"] < 2 * least


def test_a_loss_in_one_kernel_moves_ten_bytes_a_logit_however_the_block_is_sharded():
    def ends(src, sp):
        runs = recipe(src=src, dp=1, tp=1, sp=sp, ga=1, zero=0, vocab=151936)
        parts = [parts_of(runs.with_columns(vocab=runs.vocab * n), constants_of(runs))["elementwise"][0] for n in (1, 2)]
        return parts[1] - parts[0]

    constants = constants_of(recipe(src="bridge"))
    moved = 10 * 2 * 4096 * 151936 / constants.memory_rate[0]
    assert ends("bridge", 0) == pytest.approx(ends("bridge", 1)) == pytest.approx(moved, rel=0.1)  # beside the token table's
    assert ends("megatron_core", 0) > 2 * ends("bridge", 0)


def test_what_fits():
    small, large = recipe(mbs=1), recipe(mbs=64)
    assert chance_to_run(small, peak_bytes(small))[0] > 0.95 > 0.1 > chance_to_run(large, peak_bytes(large))[0]
    one = recipe(L=4, pp=4, mbs=1)
    assert not chance_to_run(one, peak_bytes(one)).any()  # no block is left for one of the stages


def test_an_interval_contains_its_prediction_and_widens():
    runs = runs_of(rows())
    seconds = predicted_seconds(runs)
    low, high = interval(runs, seconds)
    lower, higher = interval(runs, seconds, 0.95)
    assert (low < high).all() and (lower <= low).all() and (higher >= high).all()


def test_tokens_per_second_are_per_device():
    runs = recipe(mbs=2, ga=8, dp=4, tp=2)
    assert tokens_per_second(runs, np.array([1.0]))[0] == 2 * 8 * 4 * 4096 / 8


def test_the_columns_of_a_table():
    assert set(runs_of(rows()).values) >= {"stack", "tensor", "pipeline"}


test_what_is_no_run_is_refused = refusals(
    (lambda: runs_of([{name: value for name, value in rows()[0].items() if name != "tp"}]), "has no column 'tp'"),
    (lambda: runs_of([{**rows()[0], "h": "wide"}]), "column 'h' has a value that is no number"),
    (lambda: device_constants(["h101"]), "no constants of device 'h101'; known are a100"),
    (lambda: interval(runs_of(rows()), predicted_seconds(runs_of(rows())), 1.5), "a share 1.5"),
)


def test_the_gradient_of_the_head_is_beside_that_of_the_logits_where_its_matmul_adds_to_no_buffer():
    few, many = recipe(seq=512, fused=1, compiled_loss=1), recipe(seq=16384, fused=1, compiled_loss=1)
    table = few.table_parameters / few.tensor
    for runs, gradients in (few, 2 * table), (many, 2 * many.tokens * many.vocab / many.tensor):
        wanted = 2 * runs.tokens * runs.vocab / runs.tensor + gradients
        np.testing.assert_allclose(peak_memory.logits_bytes(runs, constants_of(runs)), wanted)
    adding = recipe(src="nemo", seq=512, fused=1)
    logits = adding.tokens * adding.vocab / adding.tensor
    np.testing.assert_allclose(peak_memory.logits_bytes(adding, constants_of(adding)), constants_of(adding).memory.logits * logits)
