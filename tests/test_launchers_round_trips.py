"""Configurations from the launchers' own repositories: read, written unchanged as the same bytes, and with a change as its lines alone."""

import difflib
import json
import time
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from autoshard.cli.launchers import as_in
from autoshard.launch import Launch, LaunchConfig, Overrides, edited_text, read_configuration, why_illegal
from autoshard.launch.configurations import FORMATS, configuration_text
from autoshard.launch.edits import edited
from autoshard.launch.megatron import FLAGS
from autoshard.launch.texts import Nested, arguments_of
from autoshard.launch.torchtitan import FLAVORS
from tests.helpers_command import run
from tests.helpers_kept import assert_stays

DATA = Path(__file__).parent / "data" / "launchers"
# those whose settings are in a file of DeepSpeed are refused
REAL = [path for path in sorted((DATA / "more").iterdir()) if "deepspeed_config_file" not in path.read_text()]
LLAMA8 = FLAVORS["llama3", "8B"]
NEEDED = {"accelerate": ("sizes", "seq", "microbatch")}  # what a launcher leaves to its script


def known_for(launcher, **more):
    given = {"sizes": LLAMA8, "seq": 8192, "microbatch": 1, "devices": None if launcher == "nanotron" else 64}
    return Overrides(**{name: given[name] for name in ("devices", *NEEDED.get(launcher, ()))}, **more)


def real(path):
    """(launcher, its configuration, what it was read with); where it leaves the vocabulary to a tokenizer, with the sizes of a model."""
    launcher = path.name.partition("__")[0]
    known = known_for(launcher)
    try:
        return launcher, read_configuration(launcher, path.read_text(), path.name, known), known
    except ValueError as error:
        assert "leaves the size of the vocabulary to the tokenizer" in str(error)
    known = replace(known, sizes=LLAMA8)
    return launcher, read_configuration(launcher, path.read_text(), path.name, known), known


def test_there_are_60_of_4_launchers():
    assert len(REAL) >= 60 and {path.name.partition("__")[0] for path in REAL} == {"torchtitan", "megatron", "nanotron", "accelerate"}


@pytest.mark.parametrize("path", REAL, ids=lambda path: path.name)
def test_a_real_configuration_is_read_and_written_as_the_same_bytes(path):
    launcher, config, known = real(path)
    text = path.read_text()
    assert edited_text(launcher, config, text, path.name, known) == text
    sizes = [1, 2, 4, 8, 16, 32, 64, 128] if launcher == "megatron" and known.sizes is None else []  # of its tests, which run somewhere
    legal = [not why_illegal(read_configuration(launcher, text, path.name, replace(known, devices=n)).launch, config.sizes, launcher)
             for n in sizes]  # fmt: skip
    assert not sizes or any(legal)


def said_of(launcher: str) -> str:
    """All that is read of the configurations of a launcher, and the text that is written for it."""
    said = []
    for path in [*sorted((DATA / launcher).iterdir()), *(path for path in REAL if path.name.startswith(f"{launcher}__"))]:
        for known in (known_for(launcher), known_for("accelerate", global_batch=512), Overrides(64, sizes=LLAMA8, seq=8192)):
            try:
                config = read_configuration(launcher, path.read_text(), path.name, known)
                said += [path.name, *(f"{key}: {value}" for of in (config.launch, config.sizes) for key, value in vars(of).items())]
                said += [*config.not_counted, why_illegal(config.launch, config.sizes, launcher), configuration_text(launcher, config)]
            except ValueError as error:
                said += [path.name, error]
    return "".join(f"{line}\n" for line in said)


@pytest.mark.parametrize("launcher", sorted(FORMATS))
def test_what_is_read_and_written_of_all_configurations_stays_what_it_is(launcher):
    assert_stays(f"launchers/said/{launcher}.txt", said_of(launcher))


RECIPES = sorted(path for launcher in ("deepspeed", "automodel") for path in (DATA / launcher).iterdir())


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_recipes_and_json_are_written_as_the_same_bytes_and_changed_in_their_lines_alone(path):
    launcher, text = path.parent.name, path.read_text()
    known = replace(known_for("accelerate"), seq=8192 if launcher == "deepspeed" else None, devices=32 if "70b" in path.name else 64)
    config = read_configuration(launcher, text, path.name, replace(known, microbatch=1 if "auto" in path.name else None))
    known = replace(known, microbatch=config.launch.microbatch)
    assert edited_text(launcher, config, text, path.name, known) == text
    other = "none" if config.launch.recompute == "full" else "full"
    wanted = replace(config, launch=replace(config.launch, recompute=other, microbatch=1, global_batch=2 * config.launch.global_batch))
    changed = edited_text(launcher, wanted, text, path.name, replace(known, global_batch=None))
    again = read_configuration(launcher, changed, path.name, replace(known, microbatch=None))
    assert again.launch.recompute == other and again.launch.global_batch == wanted.launch.global_batch
    kept = [line for line in text.splitlines() if line in changed.splitlines()]
    assert len(kept) >= len(text.splitlines()) - 5
    assert [line for line in text.splitlines() if "#" in line] == [line for line in changed.splitlines() if "#" in line]


@pytest.mark.parametrize("old, new, fields, line", [
    ("  sequence_parallel: false", "  moe: {reshard_after_forward: true}", {"zero": 2}, "  moe: {reshard_after_forward: false}"),
    ("dataset:", "packed_sequence:\n  packed_sequence_size: 4096\n\ndataset:", {"seq": 8192}, "  packed_sequence_size: 8192"),
])  # fmt: skip
def test_a_recipes_key_is_changed_where_it_is_read(old, new, fields, line):
    text = (DATA / "automodel" / "qwen3_moe_30b_former.yaml").read_text()
    assert old in text
    text, known = text.replace(old, new), Overrides(devices=16, sizes=FLAVORS["qwen3", "30B-A3B"])
    one = read_configuration("automodel", text, "a.yaml", known)
    wanted = replace(one, launch=replace(one.launch, **fields))
    changed = edited_text("automodel", wanted, text, "a.yaml", known)
    assert changed_lines(text, changed)[-1:] == [f"+ {line}"] and len(changed_lines(text, changed)) == 2
    assert read_configuration("automodel", changed, "a.yaml", known).launch == wanted.launch


def changed_lines(before, after):
    diff = difflib.ndiff(before.splitlines(), after.splitlines())
    return [line for line in diff if line[:2] in ("- ", "+ ")]


CHANGES = {  # fields of the launch, and the words that lines of the difference may have
    "torchtitan": ({"recompute": "full"}, ("mode",)),
    "megatron": ({"recompute": "full"}, ("recompute",)),
    "nanotron": ({"recompute": "full"}, ("recompute_layer",)),
    "accelerate": ({"zero": 2}, ("reshard",)),
}  # fmt: skip


@pytest.mark.parametrize("path", REAL, ids=lambda path: path.name)
def test_a_change_is_a_difference_of_its_lines_alone(path):
    launcher, config, known = real(path)
    fields, words = CHANGES[launcher]
    if launcher == "accelerate" and ("fsdp_version: 2" not in path.read_text() or config.launch.zero != 3):
        return  # what FSDP 1 and others can't be told is written anew
    wanted = replace(config, launch=replace(config.launch, **fields))
    text = edited_text(launcher, wanted, path.read_text(), path.name, known)
    lines = changed_lines(path.read_text(), text)
    assert all(any(word in line for word in words) for line in lines) and len(lines) <= 6
    back = read_configuration(launcher, text, path.name, known).launch
    assert all(getattr(back, name) == value for name, value in fields.items())
    lost = "--recompute-modules" in path.read_text()  # small modules alone, which a launch does not know
    assert edited_text(launcher, config, text, path.name, known).count("\n") >= path.read_text().count("\n") - lost  # and back


DEGREES = {
    "torchtitan__llama3__llama3_8b": {"tensor": 2, "sequence_parallel": True, "data": 32, "shard": 32},
    "megatron__gpt__gpt3_7b": {"pipeline": 2, "virtual": 2, "schedule": "Interleaved1F1B"},
}


@pytest.mark.parametrize("beginning", DEGREES)
def test_degrees_are_changed_in_place(beginning):
    path = next(path for path in REAL if path.name.startswith(beginning))
    launcher, config, known = real(path)
    launch = replace(config.launch, **DEGREES[beginning])
    text = edited_text(launcher, replace(config, launch=launch), path.read_text(), path.name, known)
    back = read_configuration(launcher, text, path.name, known).launch
    assert (back.tensor, back.pipeline, back.virtual) == (launch.tensor, launch.pipeline, launch.virtual)
    assert len(changed_lines(path.read_text(), text)) <= 10


LEFT_OUT = [  # launcher, file, text, fields of another launch, and lines that differ
    ("torchtitan", "a.toml", '[model]\nname = "llama3"\nflavor = "8B"\n[parallelism]\nexpert_parallel_degree = 2\n', {"expert": 1},
     ["- expert_parallel_degree = 2"]),
    ("torchtitan", "a.toml", '[model]\nname = "llama3"\nflavor = "8B"\n[training]\nseq_len = 2048\n', {"microbatch": 2, "global_batch": 64},
     ["+ local_batch_size = 2", "+ global_batch_size = 64"]),
    ("megatron", "a.sh", "--num-layers 2 --hidden-size 8 --num-attention-heads 4 \\\n--expert-model-parallel-size 2 \\\n--bf16",
     {"expert": 1}, ["- --expert-model-parallel-size 2 \\"]),
    ("megatron", "a.sh", "--num-layers 2 --hidden-size 8 --num-attention-heads 4 \\\n--expert-tensor-parallel-size 4 \\\n--bf16",
     {"expert_tensor": 1}, ["- --expert-tensor-parallel-size 4 \\"]),
    ("deepspeed", "a.json", '{"train_micro_batch_size_per_gpu": 1,\n"zero_optimization": {"stage": 3,\n"mics_shard_size": 16}}',
     {"shard": 8}, ['- "mics_shard_size": 16}}', '+ "mics_shard_size": -1}}']),
    ("automodel", "a.yaml", "step_scheduler:\n  global_batch_size: 64\n", {"microbatch": 4}, ["+   local_batch_size: 4"]),
]  # fmt: skip


@pytest.mark.parametrize("launcher, path, text, fields, lines", LEFT_OUT)
def test_keys_that_are_left_out_or_have_no_use_are_changed_too(launcher, path, text, fields, lines):
    known = Overrides(devices=8, sizes=LLAMA8 if launcher in ("automodel", "deepspeed") else None, seq=2048)
    config = read_configuration(launcher, text, path, known)
    wanted = replace(config, launch=replace(config.launch, **fields))
    changed = edited_text(launcher, wanted, text, path, known)
    assert sorted(changed_lines(text, changed)) == sorted(lines)
    assert read_configuration(launcher, changed, path, known).launch == wanted.launch


def test_what_can_not_be_changed_in_place_says_so():
    text = "distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 2}\nmixed_precision: bf16\nnum_processes: 8\n"
    known = known_for("accelerate")
    config = read_configuration("accelerate", text, "a.yaml", replace(known, devices=8))
    with pytest.raises(ValueError, match="degrees of parallelism go with distributed_type FSDP and fsdp_version 2"):
        edited_text("accelerate", replace(config, launch=replace(config.launch, zero=3)), text, "a.yaml", replace(known, devices=8))


# -- the three ways of editing, against the parsers of the formats


TOML = '# first\n[a]\nx = 1  # one # more\n"y" = "p # q"\nz = [\n  ["u"], # v\n  ["w"],\n]\n\n[b.c]\nd=true\n'
YAML = "# first\na:\n  x: 1 # one\n  y: 'p # q'\n  z:\n  - u\n  - w\n\nb: {c: {d: true}}\n# last\n"
EDITS = [{}, {"a.x": 2}, {"a.x": "it's"}, {"a.y": None}, {"a.z": [["k"]]}, {"a.new": 3}, {"b.c.d": False}, {"b.c.e": 1}, {"n": 5},
         {"a.x": 7, "a.y": "r", "a.z": None}]  # fmt: skip


@pytest.mark.parametrize("changes", EDITS, ids=str)
@pytest.mark.parametrize("path, text, parse", [("f.toml", TOML, tomllib.loads), ("f.yaml", YAML, yaml.safe_load)], ids=["toml", "yaml"])
def test_an_edited_text_means_the_changes(path, text, parse, changes):
    if path == "f.toml" and "n" in changes:
        return  # keys of torchtitan have sections
    wanted = parse(text)
    for name, value in changes.items():
        *sections, key = name.split(".")
        inner = wanted
        for section in sections:
            inner = inner[section]
        inner.pop(key, None) if value is None else inner.update({key: value})
    new = edited(text, path, changes)
    assert parse(new) == wanted
    kept = [line for line in text.splitlines() if "#" in line and not any(name.rpartition(".")[2] in line for name in changes)]
    assert all(line in new for line in kept if "a.z" not in changes or "v" not in line)


@pytest.mark.parametrize("path, text", [("f.yaml", "a: 1\nb: 2\na: 3\n"), ("f.json", '{"a": 1, "b": 2, "a": 3}')])
def test_of_a_key_that_comes_twice_the_last_counts_and_is_changed(path, text):
    assert edited(text, path, {"a": 4}) == text.replace("3", "4")


EMPTY = [  # a file, its text, what is changed, and the text then
    ("f.yaml", "a: {}\nb: 1\n", {"a.x": 5}, "a: {x: 5}\nb: 1\n"), ("f.yaml", "a:  # none\nb: 1\n", {"a.x": 5}, "a: {x: 5}  # none\nb: 1\n"),
    ("f.yaml", "a: null\n", {"a.x.y": True}, "a: {x: {y: true}}\n"), ("f.yaml", "a:\n", {"a.x": None}, "a:\n"),
    ("f.json", "{}", {"a.x": 5}, '{"a": {"x": 5}}'), ("f.json", '{"b":{}}', {"b.x": 5}, '{"b":{"x": 5}}'),
    ("f.json", '{\n\t"a":\t{\n\t\t"x": 1\n\t}\n}\n', {"a.y": 2}, '{\n\t"a":\t{\n\t\t"x": 1,\n\t\t"y": 2\n\t}\n}\n'),
    ("f.json", '{"b": "\\ud83d\\ude00", "a": 1}', {"a": 2}, '{"b": "\\ud83d\\ude00", "a": 2}'),
]  # fmt: skip


@pytest.mark.parametrize("path, text, changes, then", EMPTY)
def test_empty_sections_and_json_that_yaml_refuses_are_changed_in_place(path, text, changes, then):
    assert edited(text, path, changes) == then


def test_json_is_edited_in_place():
    text = json.dumps({"parallelism": {"a": 1, "b": 2}, "other": [1, 2]}, indent=2)
    new = edited(text, "f.json", {"parallelism.b": 3, "parallelism.c": True})
    assert json.loads(new) == {"parallelism": {"a": 1, "b": 3, "c": True}, "other": [1, 2]}
    assert changed_lines(text, new) == ['-     "b": 2', '+     "b": 3,', '+     "c": true']


SCRIPT = 'TP=2\nARGS=(\n    --num-layers 4  # four\n    --tensor-model-parallel-size $TP\n    --bf16\n)\nrun ${ARGS[@]} --seq-length=64\n'
ARGUMENTS = [({"tensor-model-parallel-size": 4}, {"tensor-model-parallel-size": ["4"]}), ({"bf16": None}, {"bf16": None}),
             ({"seq-length": 128}, {"seq-length": ["128"]}), ({"swiglu": True}, {"swiglu": []}), ({"num-layers": 8}, {"num-layers": ["8"]}),
             ({"x": "a|b c"}, {"x": ["a|b", "c"]})]  # fmt: skip


@pytest.mark.parametrize("changes, said", ARGUMENTS, ids=str)
def test_an_edited_script_means_the_changes(changes, said):
    new = edited(SCRIPT, "f.sh", changes)
    wanted = {name: words for name, words in (arguments_of(SCRIPT) | said).items() if words is not None}
    first = {name: words[:1] for name, words in arguments_of(new).items()}  # words of the last option go on to the next one
    assert first == {name: words[:1] for name, words in wanted.items()} and len(changed_lines(SCRIPT, new)) <= 2


def test_a_new_option_stands_as_the_one_behind_it_does():
    lines = "run --num-layers 4 \\\n    --seq-length 64\n", "run \\\n  --num-layers 4 \\\n    --seq-length 64\n"
    new = [edited(text, "f.sh", {"swiglu": True}) for text in lines]
    assert new == [lines[0].replace("--num", "--swiglu --num"), lines[1].replace("--num", "--swiglu \\\n  --num")]


@pytest.mark.parametrize("value", ["2", "$TP", "$((A * B))", '"$((A*B))"', "`nproc`", "${TP:-2}", "two three"])
@pytest.mark.parametrize("rest", ["; echo", " ${ARGS[@]}", ' "${ARGS[@]}" \\', " 2>&1 | tee log", " && echo", ")", " --tp", ""])
def test_what_stands_behind_a_value_stays(value, rest):
    assert edited(f"run --tp {value}{rest}\n", "f.sh", {"tp": 4}) == f"run --tp 4{rest.replace('--tp', '--tp 4')}\n"


PLACES = [  # a script, changes, and what it is then
    ("run --tp 2 --bf16 $MORE\n", {"bf16": None}, "run --tp 2 $MORE\n"), ("run --bf16 $MORE\n", {"bf16": True}, "run --bf16 $MORE\n"),
    ("run \\\n  --tp 2 \\\n  --bf16\necho\n", {"bf16": None}, "run \\\n  --tp 2\necho\n"),
    ("A=(\n  --bf16\n  --x 3\n)\n", {"bf16": None}, "A=(\n  --x 3\n)\n"),
    ("--tp 2  # no --bf16\n", {"bf16": None, "tp": 4}, "--tp 4  # no --bf16\n"),
    ("--seq-length \\\n  64 \\\n  --x\n", {"seq-length": 128}, "--seq-length 128 \\\n  --x\n"),
    ("A=(\n  --nnodes 2\n)\nB=(\n  --num-layers 2\n)\n", {"bf16": True}, "A=(\n  --nnodes 2\n)\nB=(\n  --bf16\n  --num-layers 2\n)\n"),
    ("torchrun --nnodes 2 train.py --num-layers 2\n", {"bf16": True}, "torchrun --nnodes 2 train.py --bf16 --num-layers 2\n"),
    ("run \\\n  --num-layers 2\n", {"bf16": True}, "run \\\n  --bf16 \\\n  --num-layers 2\n"),
    ('A=(\n  "--num-layers 2"\n)\n', {"bf16": True}, 'A=(\n  "--bf16 --num-layers 2"\n)\n'),
    ('A=("--tp" "2" "--bf16")\n', {"bf16": None, "tp": 4, "cp": 2}, 'A=(--cp 2 --tp 4 )\n'),
    ('A=("--tp" "2" "--x" \'y z\')\n', {"tp": 4, "cp": 2}, 'A=(--cp 2 --tp 4 "--x" \'y z\')\n'),
    ("A=(\n  '--num-layers' '2'\n)\n", {"bf16": True}, "A=(\n  --bf16 '--num-layers' '2'\n)\n"),
]  # fmt: skip


@pytest.mark.parametrize("script, changes, then", PLACES)
def test_an_argument_goes_and_comes_where_a_shell_reads_it(script, changes, then):
    assert edited(script, "f.sh", changes, FLAGS) == then


def test_a_script_of_spaces_is_changed_in_time_proportional_to_it():
    began = time.process_time()
    assert edited(" " * 50_000 + "--num-layers 2", "f.sh", {"num-layers": 4}) == " " * 50_000 + "--num-layers 4"
    assert time.process_time() - began < 1  # every run of spaces was read from each of its places: 2 seconds, and 34 of 200,000


def test_a_file_keeps_its_line_ends_and_its_byte_order_mark(tmp_path):
    job, better = tmp_path / "job.sh", tmp_path / "better.sh"
    old = b"\xef\xbb\xbf" + (DATA / "megatron" / "gpt3_175b.sh").read_bytes().replace(b"\n", b"\r\n")
    job.write_bytes(old)
    assert run("check", str(job), "--devices", "1024", "--out", str(better))[0] == 0
    new = better.read_bytes()
    assert new.startswith(old[:40]) and new.count(b"\r\n") == new.count(b"\n") >= old.count(b"\n")


@pytest.mark.parametrize(
    "old, new",
    [(b"a\r\nb\r\nc\n", b"x\r\ny\r\n"), (b"a\r\nb\n", b"x\ny\n"), (b"a", b"x\ny\n"), (b"\xef\xbb\xbfa", b"\xef\xbb\xbfx\ny\n")],
)
def test_a_text_gets_the_line_ends_that_most_lines_have(tmp_path, old, new):
    (tmp_path / "job.sh").write_bytes(old)
    assert as_in(str(tmp_path / "job.sh"), "x\ny\n").encode() == new


def test_check_changes_only_what_the_launch_decides(tmp_path):
    job, better = tmp_path / "job.toml", tmp_path / "better.toml"
    text = (DATA / "more" / "torchtitan__llama3__llama3_8b.toml").read_text()
    job.write_text(text)
    code, _, err = run("check", str(job), "--launcher", "torchtitan", "--devices", "64", "--out", str(better))
    assert code in (0, 1) and "all else is as in" in err
    lines = changed_lines(text, better.read_text())
    assert lines and not any(word in line for line in lines for word in ("optimizer", "checkpoint]", "metrics"))
    assert Nested(tomllib.loads(better.read_text()), "a").value("job.dump_folder") == "./outputs"


def test_a_model_without_a_flavor_can_still_be_changed():
    """Its sizes came from elsewhere, and stay."""
    text = '[model]\nname = "mine"\nflavor = "8B"\n[parallelism]\ntensor_parallel_degree = 1\n'
    known = Overrides(devices=8, sizes=replace(LLAMA8, layers=30))
    config = read_configuration("torchtitan", text, "a.toml", known)
    wanted = LaunchConfig(replace(config.launch, tensor=2, sequence_parallel=True, data=4, shard=4), config.sizes)
    new = edited_text("torchtitan", wanted, text, "a.toml", known)
    assert 'name = "mine"' in new and "tensor_parallel_degree = 2" in new
    assert isinstance(config.launch, Launch)
