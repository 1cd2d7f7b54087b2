"""An option for a link, a device, a batch or a schedule moves the seconds where physics says so: every option of the verbs that price a
step has a direction here, or a reason why it has none."""

from functools import cache

import pytest

import autoshard
from autoshard import Cluster
from autoshard.cli.table import ONLY, OWN, options_of_verb
from autoshard.options.planning import PipelineOptions
from models import mlp
from tests.helpers_command import record_of
from tests.helpers_options import MIXTRAL, MLP, ROOT, TITAN, prepare

LARGE = [MLP, "--set", "width=4096", "--batch", "16384"]  # so that kernels take longer than their launches
STAGES = ["--schedules", "1f1b", "--no-grid", "--workers", "1", "--microbatches", "2", "--set", "layers=4", "--stages", "2"]
LLAMA_8B = f"{ROOT}/models/llama.py:llama3_8b"
BASES = {  # what the verb is given, and its seconds
    "plan": ([*LARGE, "--mesh", "2x2", "--train", "--objective", "serial", "--no-baselines"], lambda record: record["cost_seconds"]),
    "frontier": ([*LARGE, "--mesh", "2x2", "--train", "--points", "1"], lambda record: min(p["seconds"] for p in record["points"])),
    "simulate": ([*LARGE, "--data", "2", "--tensor", "2", "--devices-per-node", "2"], lambda record: record["seconds"]),
    "pipeline": ([*LARGE, *STAGES, "--devices", "4", "--devices-per-node", "2"], lambda record: record["seconds"]),
    "degrees": (
        [LLAMA_8B, "--devices", "16", "--no-bound", "--seq", "4096", "--global-batch", "64"],
        lambda record: record["configurations"][0]["seconds"],
    ),
    "check": ([TITAN, "--launcher", "torchtitan", "--devices", "16", "--global-batch", "64"], lambda record: record["seconds"]),
    "serve-plan": (
        [MIXTRAL, "--set", "layers=1", "--devices", "2", "--max-tokens", "64", "--batch", "4", "--devices-per-node", "1"],
        lambda record: min(one["seconds_per_token"] for one in record["configurations"] if one["fits"]),
    ),
}  # fmt: skip
FASTER, SLOWER = "faster", "slower"  # with the second value
RATES = {
    "intra_node_bandwidth": (FASTER, "9GB/s", "90GB/s"), "inter_node_bandwidth": (FASTER, "1GB/s", "100GB/s"),
    "device": (FASTER, "a100", "b200"),
}  # fmt: skip
PRICED = {**RATES, "tf32": (FASTER, None, ""), "batch": (SLOWER, "8192", "16384")}
DIRECTIONS = {
    "plan": {
        **PRICED, "prices": (FASTER, "a100", "b200"), "recompute": (SLOWER, "0", "all"),
        "optimizer": (SLOWER, "sgd", "adamw"), "master_weights": (SLOWER, None, ""), "microbatches": (SLOWER, "1", "4"),
        "compiled": (FASTER, None, ""), "pins": (SLOWER, None, "layers.*.up.weight=R,R"), "training": (SLOWER, None, ""),
    },
    "frontier": {
        **PRICED, "prices": (FASTER, "a100", "b200"), "recompute": (SLOWER, "0", "all"), "optimizer": (SLOWER, "sgd", "adamw"),
        "master_weights": (SLOWER, None, ""), "microbatches": (SLOWER, "1", "4"), "compiled": (FASTER, None, ""),
        "training": (SLOWER, None, ""), "pins": (SLOWER, None, "layers.*.up.weight=R,R"),
    },
    "simulate": {
        **PRICED, "no_overlap": (SLOWER, None, ""), "inference": (FASTER, None, ""),
        "microbatches": (SLOWER, "1", "4"),
    },
    "pipeline": {
        **PRICED, "memory": (FASTER, "1700MB", "70GB"), "inference": (FASTER, None, ""),
        "recompute": (SLOWER, "never", "always"),
    },
    "degrees": {
        **RATES, "seq": (SLOWER, "4096", "8192"), "global_batch": (SLOWER, "64", "256"), "devices": (FASTER, "8", "32"),
        "precision": (FASTER, "bf16", "fp8"), "compiled": (FASTER, None, ""), "memory": (FASTER, "40GB", "80GB"),
        "per_node": (FASTER, "2", "16"),
    },
    "check": {
        **RATES, "devices": (FASTER, "8", "32"),
        "seq": (SLOWER, "2048", "8192"), "global_batch": (SLOWER, "16", "64"), "per_node": (FASTER, "2", "8"),
    },
    "serve-plan": {
        "batch": (SLOWER, "4", "4096"), "max_tokens": (SLOWER, "64", "4096"),
        "eager": (SLOWER, None, ""), "devices_per_node": (FASTER, "1", "2"), "devices": (FASTER, "1", "2"),
    },
}  # fmt: skip
OUTPUT = "what is printed or written"
SEARCH = "how long is searched: the answer gets no worse, and on these models is proven at once"
OTHER = "another model or program, or another question"
WHATEVER = {  # option: why it has no direction
    **dict.fromkeys(("as_json", "quiet", "out", "html", "csv", "plot", "save_dir", "trace", "picture", "points", "row", "top"), OUTPUT),
    **dict.fromkeys(("time_limit", "gap", "solver", "workers", "dask", "baselines", "tie_blocks", "no_bound", "no_solve"), SEARCH),
    **dict.fromkeys(("model", "target", "solution", "settings", "trust", "keep", "free", "switches", "objective", "launcher"), OTHER),
    **dict.fromkeys(("within", "any_graph", "other", "price_pins"), "what counts as good: it moves no price"),
    "cluster": "a measured cluster: its figures are what they are", "nodes": "nodes of their own kinds, in place of --devices",
    "mesh": "another arrangement of devices", "devices": "more are faster only where traffic allows", "grid": "which are compared",
    "devices_per_node": "devices of a node share its adapter, and have faster links among them", "scheme": "other layouts",
    "dtype": "narrower types are faster, but float16 and bfloat16 are alike", "seq": "these models have no sequences",
    "forbid": "as pins, of one layout", "precision": "casts cost what narrow matmuls gain", "sequence_order": "one of two orders",
    "expert_imbalance": "the slowest rank's experts: models without experts have none", "global_batch": "microbatches and the batch tell",
    "dynamic_shapes": "many shapes are planned, of which it prints one", "criterion": "of dynamic_shapes",
    "data": "more devices, for a larger batch", "tensor": "more devices", "pipeline": "more devices", "chunks": "of one schedule",
    "schedule": "bubbles fall and transfers rise", "schedules": "which are compared",
    "prefetch": "copies wait for the link in another order",
    "no_join": "of a plan's file, not of a model", "memory_limit": "--memory: as the frontier's points",
    "layers": "how stages are divided", "stages": "how many there are",
}  # fmt: skip
OWN_REASONS = {
    **{("degrees", name): "which launches are listed" for name in ONLY},
    ("pipeline", "training"): "the default", ("pipeline", "microbatches"): "bubbles fall and latencies rise",
    ("pipeline", "optimizer"): "stages are planned one task after the other, and simulated with overlap: a percent either way",
    ("check", "batch"): "of a plan's model",
    ("check", "microbatch"): "the configuration says it", ("check", "memory"): "it says whether a launch fits, and no launch changes",
    **{(verb, "evidence"): "it corrects bytes, not seconds" for verb in ("check", "degrees")},
    ("serve-plan", "memory"): "what fits", ("serve-plan", "prompt"): "the seconds of the first token, not of the next ones",
    ("serve-plan", "expert_parallel"): "experts over more devices read fewer weights each and exchange tokens",
    ("serve-plan", "device"): "so small a model waits for launches of kernels, which a B200 has no faster",
}  # fmt: skip
SAME = {  # where the second value has the same seconds on purpose
    ("serve-plan", "devices_per_node"): "two replicas send nothing", ("plan", "master_weights"): "weights in float32 have none",
    ("frontier", "master_weights"): "weights in float32 have none",
}  # fmt: skip


@pytest.mark.parametrize("verb", BASES)
def test_every_option_has_a_direction_or_a_reason(verb):
    options = {*OWN[verb], *options_of_verb(verb)}
    known = {*DIRECTIONS[verb], *(name for name in options if WHATEVER.get(name) or OWN_REASONS.get((verb, name)))}
    assert options - known == set()
    assert set(DIRECTIONS[verb]) - options == set()


record_of = cache(record_of)  # many options are compared with the same command line


def seconds(verb: str, option: str, value: str | None) -> float:
    words, of = BASES[verb]
    flag = f"--{option.replace('_', '-')}" if option != "compiled" else "--compile"
    flag = {"training": "--train", "pins": "--pin"}.get(option, flag)
    rest = [word for k, word in enumerate(words) if word != flag and (k == 0 or words[k - 1] != flag or words[k].startswith("--"))]
    given = [] if value is None else [flag] if value == "" else [flag, value]
    return of(record_of(verb, *rest, *given))


def cases():
    for verb, options in DIRECTIONS.items():
        for option in options:
            slow = verb == "serve-plan"  # seconds each
            slow = slow or (verb == "frontier" and option != "batch")  # it hands them on as plan does
            slow = slow or (verb in ("simulate", "pipeline") and option in ("intra_node_bandwidth", "device", "tf32"))  # as plan
            slow = slow or (verb == "degrees" and option in (*RATES, "per_node", "global_batch"))  # as check does
            slow = slow or (verb == "check" and option in ("seq", "devices"))  # as degrees does
            yield pytest.param(verb, option, marks=pytest.mark.slow) if slow else (verb, option)


@pytest.mark.parametrize(("verb", "option"), cases())
def test_seconds_move_where_physics_says(verb, option, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    prepare([TITAN], tmp_path)
    direction, first, second = DIRECTIONS[verb][option]
    before, after = (seconds(verb, option, value) for value in (first, second))
    slow, fast = (before, after) if direction == FASTER else (after, before)
    assert fast <= slow * (1 + 1e-3)  # plans are proven to within a thousandth
    assert (fast < slow) == ((verb, option) not in SAME)


def test_a_runtimes_overhead_is_none_unless_it_is_given_and_each_unit_of_the_bottleneck_takes_it():
    """Two equal stages in a row, 4 microbatches and 1F1B: 5 forward and 5 backward units, one after the other."""
    given = {"microbatches": (4,), "schedules": ("1f1b",), "stages": 2, "grid": False}
    overheads = {}, {"unit_seconds": 0.0}, {"unit_seconds": 1.0}
    plain, zero, slow = (autoshard.plan(*mlp.tiny(layers=4), Cluster.of(2), **given, **more).seconds for more in overheads)
    assert plain == zero and PipelineOptions().unit_seconds == 0.0 and slow - plain == pytest.approx(2 * (4 + 1), rel=1e-3)
