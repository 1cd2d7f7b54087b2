"""`degrees` and `check --launcher` on the command line, and the regret of the best launch against what `plan` says."""

import json
import subprocess
import sys
import tomllib
from itertools import chain
from pathlib import Path

import pytest

import autoshard
from autoshard.api import degrees
from autoshard.cli import kinds, table
from autoshard.devices import known_devices
from autoshard.launch import Launch, ModelSizes, Site, sizes_of_module
from autoshard.launch.best_degrees import mesh_of, precision_of, scheme_of
from autoshard.launch.configurations import FORMATS
from autoshard.launch.legality import LAUNCHERS
from autoshard.launch.ranking import ranking
from autoshard.launch.runs import PRECISIONS
from autoshard.planning.baselining import regret
from autoshard.report.launchers import launches_table, ranked_launches
from autoshard.report.terminal import as_text, shown
from models import llama
from tests.helpers_command import record_of, refusal, run

ROOT = Path(__file__).parent.parent
DATA = ROOT / "tests" / "data" / "launchers"
TINY = f"{ROOT}/models/llama.py:tiny"
SIZES = {"--devices": "8", "--seq": "16", "--global-batch": "16"}
ON_8 = tuple(chain.from_iterable(SIZES.items()))
KEYS = (
    "dp shard tp cp a2a ep pp schedule microbatch recompute zero etp vpp split passes async_expert deepep gather8 seconds "
    "tokens_per_second_per_device mfu memory_bytes chance_to_fit fits tight tokens_per_second_per_device_interval"
).split()


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_degrees_prints_exactly_the_documented_keys(launcher):
    record = record_of("degrees", TINY, *ON_8, "--launcher", launcher, "--no-bound")
    assert list(record) == ["configurations", "simplest", "bound_seconds", "regret", "compared", "mfu_of", "cpu_seconds"]
    assert all(list(row) == KEYS for row in record["configurations"]) and len(record["configurations"]) > 10
    assert record["bound_seconds"] is record["regret"] is record["compared"] is None and record["cpu_seconds"] > 0
    for row in record["configurations"]:
        assert row["dp"] * row["tp"] * row["cp"] * row["pp"] == 8
        assert row["tp"] <= 4 or launcher == "megatron"  # the model has 4 key-value heads, which Megatron may replicate


SUFFIXES = {"megatron": "sh", "deepspeed": "json"}
WRITTEN = {
    "accelerate": ("--compile",), "deepspeed": ("--compile", "--precision", "fp16"), "automodel": ("--compile", "--pp", "2"),
    "megatron": ("--tp", "2", "--pp", "1"), "nanotron": ("--tp", "2", "--pp", "2"),
}  # fmt: skip


def odd_vocabulary(folder) -> str:
    config = {
        "model_type": "llama", "vocab_size": 5121, "hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8,
        "intermediate_size": 1024, "max_position_embeddings": 2048,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return f"hf:{folder}"


@pytest.mark.parametrize("launcher", WRITTEN)
def test_a_launch_costs_what_its_written_configuration_does(launcher, tmp_path):
    """Of a model whose vocabulary is odd, which some launchers pad, and compiled, which some do without the loss."""
    model, on = odd_vocabulary(tmp_path), ("--devices", "8", "--launcher", launcher)
    out = str(tmp_path / f"written.{SUFFIXES.get(launcher, 'yaml')}")
    sizes = ("--seq", "1024", "--global-batch", "64")
    row = record_of("degrees", model, *on, *sizes, *WRITTEN[launcher], "--no-bound", "--out", out)["configurations"][0]
    known = () if launcher in ("megatron", "nanotron") else (*sizes, "--microbatch", str(row["microbatch"]))
    again = record_of("check", out, model, *on, *known)
    assert again["legal"] and again["configuration"]["tp"] == row["tp"]
    assert [again[key] for key in ("seconds", "memory_bytes")] == pytest.approx([row[key] for key in ("seconds", "memory_bytes")], rel=1e-9)


@pytest.mark.parametrize("launcher", ["megatron", "nanotron"])
def test_a_change_to_fewer_tensor_parallel_ranks_costs_what_it_does_as_written(launcher, tmp_path):
    """Its vocabulary is the file's own, padded for fewer ranks."""
    model, on, link = odd_vocabulary(tmp_path), ("--devices", "8", "--launcher", launcher), ("--intra-node-bandwidth", "20GB/s")
    slow, better = (str(tmp_path / f"{name}.{SUFFIXES.get(launcher, 'yaml')}") for name in ("slow", "better"))
    record_of("degrees", model, *on, "--seq", "1024", "--global-batch", "64", "--no-bound", "--tp", "8", *link, "--out", slow)
    change = record_of("check", slow, model, *on, *link, "--out", better)["changes"][0]
    assert "tp 8 -> 1" in change["change"] and "5121" in Path(better).read_text()
    assert record_of("check", better, model, *on, *link)["seconds"] == pytest.approx(change["seconds"], rel=1e-9)
    assert record_of("check", slow, model, *on)["seconds"] < record_of("check", slow, model, *on, *link)["seconds"]


def test_what_a_launcher_cannot_compile_is_refused():
    assert "its configuration has nothing that compiles blocks" in refusal("degrees", TINY, *ON_8, "--launcher", "megatron", "--compile")


@pytest.mark.parametrize("words", [("check", "--launcher", "nanotron"), ("fits", "--launcher", "nanotron")])
def test_a_configuration_is_judged_without_torch(words):
    code = f"""
import sys
from autoshard.cli import main
sys.argv = ["autoshard", "{words[0]}", "{DATA}/nanotron/llama3b.yaml", *{words[1:]}]
main()
print("loaded:", "torch" in sys.modules, "networkx" in sys.modules)
"""
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert printed.stdout.splitlines()[-1] == "loaded: False False", printed.stderr
    assert "fits with a chance of" in printed.stdout


@pytest.mark.parametrize("words", [("--launcher", "megatron"), ("--launcher", "torchtitan", "--compile", "--precision", "fp8")])
def test_the_seconds_of_a_row_are_taken_apart(words):
    command = ("degrees", TINY, *ON_8, *words, "--no-bound", "--row", "3")
    record = record_of(*command)
    assert record["row"]["row"] == 2
    by_kind, bytes = record["row"]["seconds_by_kind"], record["row"]["bytes_by_kind"]
    assert sum(bytes.values()) == pytest.approx(record["configurations"][2]["memory_bytes"])
    assert sum(by_kind.values()) == pytest.approx(record["configurations"][2]["seconds"], rel=1e-12)
    assert {"matmul", "attention", "elementwise", "tensor parallel", "data parallel", "bubble", "optimizer", "host"} < set(by_kind)
    text = run(*command)[1]
    assert "Where the seconds and the bytes of row 3 go" in text and "MFU of the 16 bit peak, 989 TFLOP/s" in text
    count = len(record_of(*command, "--top", "100000")["configurations"])
    assert f"there is no row {count + 1}; expected 1 to {count}" in refusal(*command[:-1], str(count + 1))


def test_degrees_writes_the_best_and_draws_all(tmp_path):
    out, plot = tmp_path / "best.yaml", tmp_path / "degrees.png"
    words = ("degrees", TINY, *ON_8, "--launcher", "nanotron", "--no-bound", "--top", "3", "--out", str(out), "--plot", str(plot))
    code, text, err = run(*words)
    assert code == 0 and f"wrote {out}" in err and plot.read_bytes()[:4] == b"\x89PNG"
    assert "nanotron: " in text and "legal launches on 8 h100" in text and "illegal splits of the devices" in text
    record = record_of("check", str(out), "--launcher", "nanotron")
    assert record["ok"] and record["legal"] and record["changes"] == [] and record["reasons"] == []
    assert sum(record["seconds_by_kind"].values()) == pytest.approx(record["seconds"], rel=1e-12)


def test_degrees_says_what_it_does_not_count_of_the_model(tmp_path):
    llama = json.loads((ROOT / "tests/data/hf/llama/config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({"text_config": llama, "vision_config": {"depth": 2}}))
    said = run("degrees", f"hf:{tmp_path}", *ON_8, "--no-bound")[2]
    assert "not counted: vision_config: of the model, its language model alone is counted" in said


def test_degrees_says_no_where_nothing_fits():
    record = record_of("degrees", f"{ROOT}/models/llama.py:llama3_70b", "--devices", "8", "--no-bound", "--top", "1", code=1)
    assert record["configurations"][0]["fits"] is False
    record = record_of("degrees", f"{ROOT}/models/llama.py:llama3_70b", "--devices", "8", "--no-bound", code=1)
    needed = [row["memory_bytes"] for row in record["configurations"] if row["chance_to_fit"] == 0]
    assert needed == sorted(needed) and (record["simplest"] == 0 or len(needed) < len(record["configurations"]))


@pytest.mark.parametrize(
    "option, sentence",
    [
        (("--launcher", "axolotl"), "there is no launcher 'axolotl'; expected one of torchtitan"),
        (("--device", "tpu"), "unknown device 'tpu'; known are a100"),
        (("--precision", "int8"), "--precision is 'int8'; expected one of bf16"),
        (("--memory", "80"), "add its unit"),
        (("--out", "best.yaml"), "--out best.yaml is no configuration of torchtitan, which reads .toml"),
        (("--seq", "7"), "no launch of torchtitan on 8 devices is legal for this model; splits of the devices by rule: sequence"),
        (("--launcher", "deepspeed", "--precision", "fp8"), "deepspeed has no precision fp8; expected bf16, fp16, fp32"),
        (("--launcher", "nanotron", "--precision", "nvfp4", "--device", "b200"), "nanotron has no precision nvfp4; expected bf16"),
        (("--precision", "fp16"), "torchtitan has no precision fp16; expected bf16, fp32, fp8"),
        (("--precision", "fp8", "--device", "a100"), "a100 multiplies no fp8 numbers; expected another precision or device"),
        (("--precision", "mxfp8"), "h100 multiplies no mxfp8 numbers"),
        (("--pp", "2", "--no-pp", None), "--no-pp has no effect beside --pp"),
    ],
)
def test_degrees_refuses_in_a_sentence(option, sentence):
    options = SIZES | dict(zip(option[::2], option[1::2]))
    assert sentence in refusal("degrees", TINY, *filter(None, chain.from_iterable(options.items())))


def test_check_refuses_what_a_device_does_not_multiply():
    config = str(DATA / "torchtitan" / "llama3_405b.toml")
    assert "a100 multiplies no fp8 numbers" in refusal("check", config, "--devices", "128", "--device", "a100")


def test_check_answers_the_only_launch_that_is_legal():
    config, model = str(DATA / "deepspeed" / "zero2_offload_fp16.json"), f"hf:{ROOT}/tests/data/hf/llama"
    words = ("check", config, model, "--launcher", "deepspeed", "--devices", "1", "--seq", "64")
    assert record_of(*words)["changes"] == []  # offloading, and no other device to shard with


def test_degrees_pads_the_vocabulary_as_megatron_does(tmp_path):
    """Its figures are those of `check` of what it writes."""
    out, (model, settings) = str(tmp_path / "best.sh"), (TINY, ("--set", "vocab=1001", "--set", "layers=2"))
    words = ("--devices", "8", "--launcher", "megatron", "--json")
    best = record_of("degrees", model, *settings, *words[:-1], "--seq", "16", "--global-batch", "16", "--no-bound", "--no-tp", "--out", out)
    assert record_of("check", out, *words[:-1])["seconds"] == pytest.approx(best["configurations"][0]["seconds"], rel=1e-12)


def test_check_says_where_nothing_helps_and_counts_one_as_one():
    said = " ".join(run("check", str(DATA / "torchtitan" / "llama3_8b.toml"), "--devices", "1")[1].split())
    assert "8.03e9 parameters on 1 device, bf16" in said and "global batch 1 sequence of 8192 tokens" in said
    assert said.endswith("no launch of these devices at this global batch fits")
    config, model = str(DATA / "accelerate" / "fsdp2.yaml"), f"hf:{ROOT}/tests/data/hf/llama"
    said = run("fits", config, model, "--launcher", "accelerate", "--devices", "3", "--seq", "64", "--microbatch", "1")[1]
    assert "90.1e3 parameters" in " ".join(said.split())  # the line ends where the path lets it


def test_simulate_of_a_configuration_shows_it():
    config = str(DATA / "torchtitan" / "llama3_70b.toml")
    simulated, shown_ = (run(verb, config, "--devices", "64") for verb in ("simulate", "show"))
    assert simulated[:2] == shown_[:2] and "`simulate CONFIGURATION` is now `show CONFIGURATION`" in simulated[2]
    known = str(DATA / "nanotron" / "llama3b.yaml")
    assert run("simulate", known, "--launcher", "nanotron")[:2] == run("show", known, "--launcher", "nanotron")[:2]


def test_stages_that_are_alike_are_said_once():
    config = str(DATA / "recipes" / "deepseek_v3_h100_fp8.yaml")
    said = " ".join(run("check", config, "--launcher", "megatron", "--devices", "1024")[1].split())
    assert "layers 1,2x30,0" in said and "layers of stages 1,2x30,0 -> ends" in said and "2,2,2" not in said


def test_a_row_stands_for_launches_that_are_expected_to_be_as_fast():
    """Those that shard states over fewer ranks need more memory, and are no better for being in a row with one that fits."""
    sizes = ModelSizes(126, 5120, 13824, 40, 20, 128256)
    ranked = ranking(Launch(60, 8192, 60), sizes, Site(per_node=20), "torchtitan")
    assert all(row < 100 for row, _ in ranked.grouped(8))


def test_check_prints_what_is_wrong_and_what_would_help(tmp_path):
    config = (DATA / "torchtitan" / "llama3_8b.toml").read_text().replace("tensor_parallel_degree = 1", "tensor_parallel_degree = 16")
    (tmp_path / "bad.toml").write_text(config)
    argv = ("check", str(tmp_path / "bad.toml"), "--launcher", "torchtitan", "--devices", "64")
    record = record_of(*argv, code=1)
    assert not record["ok"] and not record["legal"] and record["tokens_per_second_per_device"] is None
    assert record["reasons"] == ["8 key-value heads do not divide by tp 16"] and record["changes"]
    better = tmp_path / "better.toml"
    code, out, err = run(*argv, "--out", str(better))
    assert code == 1 and "illegal: 8 key-value heads do not divide by tp 16" in " ".join(out.split()) and f"wrote {better}" in err
    assert tomllib.loads(better.read_text())["model"] == {"name": "llama3", "flavor": "8B"}
    record = record_of("check", str(better), "--launcher", "torchtitan", "--devices", "64")
    assert record["ok"] and record["changes"] == []
    low, high = record["tokens_per_second_per_device_interval"]
    assert low < record["tokens_per_second_per_device"] < high and 0 < record["mfu"] < 1


def test_check_says_which_batch_accelerates_script_has_to_take(tmp_path):
    words = (f"{ROOT}/models/llama.py:llama3_8b", "--launcher", "accelerate", "--devices", "64", "--seq", "4096")
    config, better = str(DATA / "accelerate" / "fsdp2.yaml"), str(tmp_path / "better.yaml")
    said = run("check", config, *words, "--microbatch", "4", "--out", better)[2]
    promised = record_of("check", config, *words, "--microbatch", "4", code=1)["changes"][0]
    assert "microbatch 4 -> 2" in promised["change"] and "give the script microbatches of 2 sequences, 2 per step" in said
    found = record_of("check", better, *words, "--microbatch", "2", "--global-batch", "256")
    assert found["seconds"] == pytest.approx(promised["seconds"])


def test_check_reads_accelerates_model_from_the_command_line():
    config, model = str(DATA / "accelerate" / "nd.yaml"), f"hf:{ROOT}/tests/data/hf/llama"
    record = record_of("check", config, model, "--launcher", "accelerate", "--seq", "64", "--microbatch", "4")
    assert record["configuration"]["cp"] == 4 and record["global_batch"] == 8
    sentence = refusal("check", config, "--launcher", "accelerate")
    assert "nd.yaml does not say the sizes; add it after the file, as hf:DIR (for show, simulate and explain as --model hf:DIR)" in sentence


# --- regret


MESH = autoshard.Mesh.from_bandwidths((2, 4))


@pytest.fixture(scope="module")
def planned():
    return autoshard.plan(*llama.tiny(layers=1), MESH, training=True, objective="serial")


@pytest.mark.parametrize("scheme", ["fsdp", *(pytest.param(name, marks=pytest.mark.slow) for name in ("data_parallel", "megatron_sp"))])
def test_the_pinned_scheme_costs_what_plan_says(planned, scheme):
    one = regret(*llama.tiny(layers=1), MESH, scheme)
    assert one.cost == pytest.approx(planned.baselines[scheme]["cost_seconds"], rel=1e-9)
    assert one.bound == pytest.approx(planned.bound, rel=1e-9) and one.regret == pytest.approx(one.cost / planned.bound - 1)
    assert planned.bound <= planned.cost <= one.cost


@pytest.mark.slow
def test_megatron_with_sharded_parameters_is_between_its_parents():
    """Parameters sharded over the data axis too: fewer bytes than Megatron, more transfers."""
    megatron, sharded = (regret(*llama.tiny(layers=1), MESH, scheme) for scheme in ("megatron_sp", "megatron_fsdp"))
    assert sharded.peak_bytes < megatron.peak_bytes and sharded.cost > megatron.cost and "sharded over the other axes" in sharded.matched
    with pytest.raises(ValueError, match="there is no scheme 'zero' on this mesh; expected one of data_parallel, fsdp"):
        regret(*llama.tiny(layers=1), MESH, "zero")


def test_the_best_row_is_compared_with_the_bound_at_the_plans_prices():
    model, inputs = llama.tiny()
    launch, site = Launch(8, 16, 16), Site(per_node=8)
    built = []

    def model_of(batch):
        built.append(batch)
        return llama.tiny(batch=batch)

    answer = degrees(sizes_of_module(model), launch, site, "torchtitan", model_of=model_of)
    best = answer.ranked.launch(answer.compared)
    assert best.pipeline == best.context == best.expert == 1 and built == [best.data * best.microbatch]
    module, example_inputs = llama.tiny(batch=built[0])
    recompute = "all" if best.recompute == "full" else 0
    options = {"precision": "bf16", "recompute": recompute, "gap": 0.01, "objective": "serial"}  # the launch computes in bf16
    planned = autoshard.plan(module, example_inputs, mesh_of(best, site), training=True, **options)
    record = answer.to_dict()
    assert record["bound_seconds"] == pytest.approx(planned.bound, rel=1e-9)
    cost = planned.baselines[scheme_of(best)]["cost_seconds"]
    assert record["regret"] == pytest.approx(cost / planned.bound - 1, rel=1e-9) and record["regret"] >= 0
    assert record["compared"] == {
        "row": answer.compared, "scheme": scheme_of(best), "mesh": list(mesh_of(best, site).shape), "batch": built[0],
        "recompute": recompute, "cost_seconds": pytest.approx(cost, rel=1e-9),
    }  # fmt: skip
    (sentence,) = ranked_launches(answer, 3)[2][-1:]
    assert (f"launch number {answer.compared + 1}" in sentence) and ("the best without pipeline" in sentence) == (answer.compared > 0)
    assert f"the regret is at most {record['regret']:.1%}" in sentence


def test_a_float32_model_is_compared_in_the_16_bits_of_its_launch():
    launches = {name: Launch(8, 16, 16, precision=name) for name in ("bf16", "fp16", "fp8")}
    module = llama.tiny()[0]
    assert {name: precision_of(module, launch) for name, launch in launches.items()} == {"bf16": "bf16", "fp16": "fp16", "fp8": "bf16"}
    assert precision_of(module.bfloat16(), launches["bf16"]) is None


def test_the_scheme_of_a_launch_is_that_of_its_axes_and_zero_stage():
    schemes = {(tp, zero): scheme_of(Launch(4, 16, 16, data=4 // tp, tensor=tp, zero=zero)) for tp in (1, 2, 4) for zero in (0, 2, 3)}
    fsdp = {(1, 2): "fsdp", (1, 3): "fsdp", (1, 0): "data_parallel", (2, 2): "megatron_fsdp", (2, 3): "megatron_fsdp"}
    assert schemes == dict.fromkeys(schemes, "megatron") | fsdp
    assert scheme_of(Launch(4, 16, 16, data=2, tensor=2, sequence_parallel=True)) == "megatron_sp"


def test_a_bound_that_cannot_be_had_is_explained():
    sizes = sizes_of_module(llama.tiny()[0])

    def fails(batch):
        raise ValueError("no such model")

    answer = degrees(sizes, Launch(8, 16, 16), Site(), "torchtitan", model_of=fails)
    assert answer.against is None and answer.why_not == "no such model" and answer.to_dict()["regret"] is None
    answer = degrees(sizes, Launch(8, 16, 16), Site(memory=1e3), "torchtitan", model_of=fails)
    assert answer.why_not == "no launch without pipeline, context and expert parallelism fits"


def test_names_on_the_command_line_are_those_of_the_room():
    assert tuple(table.LAUNCHERS) == LAUNCHERS == tuple(FORMATS)
    assert kinds.SITE_DEVICES == known_devices() and set(table.PRECISIONS) < set(PRECISIONS)


def test_a_row_of_the_ranking_fits_in_80_columns():
    """Columns are those in which rows differ."""
    widest = {"dp": 1024, "shard": 1024, "tp": 16, "cp": 8, "a2a": 1, "ep": 128, "pp": 128, "schedule": "Interleaved1F1B", "microbatch": 16}
    widest |= {"zero": 1, "etp": 1, "vpp": 8, "split": "ends", "passes": 1, "async_expert": True, "deepep": True, "recompute": "full"}
    widest |= {"gather8": True}
    rates = {"tokens_per_second_per_device": 12340.0, "mfu": 0.4567, "memory_bytes": 79.9e9, "chance_to_fit": 0.97, "tight": True}
    other = widest | {"cp": 1, "ep": 64, "vpp": 4, "split": "", "async_expert": False, "recompute": "none"}
    lines = as_text(shown(launches_table([widest | rates, other | rates], [(1199, 12), (0, 1)])), 80).splitlines()
    assert len(lines) == 4 and [line.split()[0] for line in lines[2:]] == ["1200", "1"]  # a title of two lines, and a line per row
    assert "zero" not in lines[0] + lines[1] and "etp" not in lines[0] + lines[1]
