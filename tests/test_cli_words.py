"""Wrong words are refused before anything slow is imported: every option of every verb, in one process that may not begin any of them."""

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest

from autoshard.cli import loading, model_source
from autoshard.cli.combinations import _cluster
from autoshard.cli.kinds import MODEL as A_MODEL
from autoshard.cli.kinds import PRICES
from autoshard.cli.loading import model_for, model_of, models_for
from autoshard.cli.model_source import may_be_programs, model_file, names_model, settings_of
from autoshard.cli.table import EXPORTS, PLANNERS, TEXTS, option_of
from autoshard.cli.verbs import as_typed
from autoshard.options import SCHEDULES, SOLVERS, TEXT
from tests.helpers_options import verbs
from tests.helpers_refusals import assert_refused

ROOT = Path(__file__).parent.parent
MODEL, HERE, PLAN = f"{ROOT}/models/mlp.py:tiny", __file__, f"{ROOT}/solutions/gpt2-small-2x4.json"
MISSING, FOLDER = "/nowhere/file.json", str(ROOT)

# What each verb needs before options are looked at; of most files it is only looked up whether they are there.
BEGINS = {
    "plan": [MODEL, "--mesh", "2x4"],
    "show": [PLAN],
    "verify": [PLAN, MODEL],
    "frontier": [MODEL, "--mesh", "2x4"],
    "pipeline": [MODEL, "--devices", "8"],
    "simulate": [MODEL],
    "explain": [PLAN, "w"],
    "serve-plan": [MODEL, "--devices", "8", "--max-tokens", "64", "--batch", "4"],
    "check": [HERE],
    "degrees": [MODEL, "--devices", "8"],
    "fits": [MODEL, "--devices", "8"],
    "demo": [],
    "doctor": [],
    "export": [PLAN],
    "redistribute": [HERE],
    "solve": [HERE],
    "tables": [HERE],
    "calibrate fit": [HERE],
    "certify": [HERE],
    "cache ls": ["plans"],
    "cache show": ["plans", "3f"],
    "cache prune": ["plans", "--most", "1GB"],
    "cache export": ["plans", "3f", "--out", "plan.json"],
    "calibrate show": [],
    "calibrate measure": ["--mesh", "2x2"],
}
SIZES = ["80XB", "-1GB", "80", "nan", ""]
SHAPES = ["2x", "x", "0x4", "2x-4", "65536x65536", "x".join("2" * 16), "9" * 5000, "1e3", "two"]
COUNTS, LIMITS = ["0", "-1", "two", "1.5", ""], ["0", "-1", "nan", "soon"]
LAYOUTS = ["w=Q,R", "w=S(99),R", "w", "=R,R", "w=", "w=R", "w=P(mul),R"]
MODELS = ["nosuch.py:tiny", f"{ROOT}/models/mlp.py:nosuch", f"{ROOT}/models/mlp.py", "tiny", "hf:/nowhere", "", ":", f"{ROOT}:tiny"]
PATHS = [MISSING, "/nowhere/a/", FOLDER, f"{HERE}/a.json.gz"]
PICTURES = [*PATHS, "picture.doc"]
LISTS = ["0", "1,,2", "two", "-1"]
FILES, BOUNDLESS = [MISSING, FOLDER], ["inf", "nan", "0.5"]

WRONG = {
    "model": MODELS, "target": [MISSING, *MODELS[:2], FOLDER], "settings": ["layers", "=2", "nosuch=2", "1=2"],
    "solution": FILES, "keep": FILES, "cluster": FILES, "other": FILES, "problem": FILES, "spec": FILES, "frontier": FILES,
    "files": FILES, "mesh": SHAPES, "devices": COUNTS, "devices_per_node": COUNTS, "memory": SIZES, "memory_limit": SIZES, "hbm": SIZES,
    "host_memory": SIZES, "host_bandwidth": SIZES, "intra_node_bandwidth": SIZES, "inter_node_bandwidth": SIZES, "largest": SIZES,
    "out": PATHS, "csv": PATHS, "trace": PATHS, "html": PATHS,
    "plot": PICTURES, "picture": PICTURES, "save_dir": [HERE, "/nowhere/a"],
    "solver": ["gurobi", ""], "device": ["tpu", ""], "prices": ["tpu", ""], "optimizer": ["adam", "nan", "-1", ""],
    "precision": ["bf17", "bf16:sum=fp32", "bf16:reduce", ""],
    "switches": ["often", "-1", "nan", ""],
    "recompute": ["some", "-1", "1.5", ""], "pins": LAYOUTS, "pin": LAYOUTS, "forbid": LAYOUTS, "why_not": ["Q", "S(99)", ""],
    "time_limit": LIMITS, "gap": ["-1", "nan", "inf", "small"], "seconds": LIMITS, "effort": LIMITS, "reserve": ["1", "-0.1", "nan"],
    "seq": COUNTS, "prompt": COUNTS, "max_tokens": [*COUNTS, "1"], "dtype": ["int8", ""], "batch": COUNTS, "global_batch": COUNTS,
    "points": COUNTS, "layers": COUNTS, "stages": COUNTS, "workers": [*COUNTS, "100000"], "chunks": COUNTS,
    "prefetch": ["-1", "two"], "random": ["-1", "two"], "alternatives": ["-1", "two"], "seed": ["-1", "two"], "within": ["1", "-1", "nan"],
    "kind": ["onnx", ""], "schedule": ["zigzag", ""], "schedules": ["zigzag", "1f1b,", ""], "scheme": ["zero", ""],
    "data": LISTS, "tensor": LISTS, "pipeline": LISTS, "microbatches": LISTS,
    "nodes": ["2", "2x", "2x8:tpu", "0x8"], "planner": ["best", ""], "count": ["all", ""], "backend": ["mpi", ""],
    "evidence": PATHS, "tp": COUNTS, "pp": COUNTS, "cp": COUNTS, "dp": LISTS, "shard": LISTS, "ep": LISTS, "zero": LISTS[1:],
    "launcher": ["slurm", ""], "per_node": COUNTS, "microbatch": COUNTS,
    "top": COUNTS, "row": COUNTS, "expert_imbalance": BOUNDLESS, "objective": ["both", ""], "sequence_order": ["zigzag", ""],
    "criterion": ["mean", ""], "dynamic_shapes": ["", "input", "input=batch", "input=batch:4-2", "input=batch:0-4", "=batch:1-4"],
}  # fmt: skip
OWN = {
    ("fits", "target"): [MISSING, *MODELS[:2], "nosuch.toml"], ("fits", "precision"): ["bf17", ""],
    ("tables", "devices"): [*SHAPES, *COUNTS[:3]],
    ("check", "within"): ["-1", "nan%", "five"],
    ("export", "within"): ["-1", "nan%", "five"],
    ("calibrate show", "name"): ["tpu"],
    ("certify", "problem"): PATHS, ("certify", "numbers"): FILES, ("cache prune", "most"): SIZES,
}

# Runs what it reads from stdin without beginning any verb: [argv, ...] -> [[code or "began", stdout, stderr], ...] and what is imported.
HARNESS = """
import contextlib, functools, io, json, sys
import typer.core, typer.main
typer.main.get_command = functools.cache(typer.main.get_command)  # else it is made anew for each
class Began(BaseException): pass
def begin(self, ctx): raise Began
typer.core.TyperCommand.invoke = begin
from autoshard.cli import main
found = []
for argv in json.load(sys.stdin):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try: code = main(argv)
        except Began: code = "began"
    found.append([code, out.getvalue(), err.getvalue()])
json.dump([found, [name for name in ("torch", "scipy", "numba", "autoshard.api", "autoshard.capture") if name in sys.modules]], sys.stdout)
"""


def run_all(commands: list[list[str]]) -> tuple[list, list[str]]:
    done = subprocess.run([sys.executable, "-c", HARNESS], input=json.dumps(commands), capture_output=True, text=True, cwd=ROOT, check=True)
    return json.loads(done.stdout)


def takes_text(parameter) -> bool:
    return not getattr(parameter, "is_flag", False)


def with_value(verb: str, parameter, value: str) -> list[str]:
    """The verb's words with one value in the place of an argument, or for an option."""
    begin = BEGINS[verb]
    if parameter.param_type_name == "option":
        begin = without(begin, parameter.opts)
        return [*verb.split(), *begin, f"{parameter.opts[0]}={value}"]
    place = [p.name for p in verbs()[verb] if p.param_type_name == "argument"].index(parameter.name)
    after = begin[place + 1 :] if place < len(begin) else []
    return [*verb.split(), *begin[:place], *([] if after else ["--"]), value, *after]


def without(begin: list[str], names: list[str]) -> list[str]:
    """The words without an option and its value, which would come twice."""
    at = next((k for k, word in enumerate(begin) if word in names), None)
    return begin if at is None else [*begin[:at], *begin[at + 2 :]]


def is_free(verb: str, name: str) -> bool:
    return option_of(verb, name).kind in (TEXT, TEXTS)


def wrong_values(verb: str, name: str) -> list[str] | None:
    known = OWN.get((verb, name), None if is_free(verb, name) else WRONG.get(name))
    if name == "settings" and MODEL not in BEGINS[verb]:  # what its function takes is not known yet
        return [value for value in WRONG[name] if value != "nosuch=2"]
    return known


# options that are right one by one
TOGETHER = [
    (f"plan {MODEL} --mesh 2x4", "--microbatches 3"),
    (f"plan {MODEL} --mesh 2x4", "--set batch=1e400"),
    (f"frontier {MODEL} --mesh 2x4", "--microbatches 2"),
    (f"pipeline {MODEL}", "--devices 4 --nodes 2x8"),
    (f"pipeline {MODEL}", ""),
    (f"pipeline {MODEL}", "--devices 6 --devices-per-node 4"),
    (f"pipeline {MODEL}", "--devices 1000000000"),
    (f"pipeline {MODEL}", "--nodes 65536x8 --nodes 65536x8"),
]


@cache
def refused() -> tuple[list[list[str]], list, list[str]]:
    commands = [
        with_value(verb, p, value)
        for verb, parameters in verbs().items()
        for p in parameters
        if takes_text(p)
        for value in wrong_values(verb, p.name) or ()
    ]
    commands += [[*verb.split(), *BEGINS[verb], option] for verb in verbs() for option in ("--nosuch", "--mehs=2x4", "-z")]
    commands += [[*written.split(" "), *more.split()] for written, more in TOGETHER]
    commands += [verb.split() for verb in verbs() if BEGINS[verb]] + [["plna"], ["calibrate", "mesure"], ["--nosuch"]]
    return commands, *run_all(commands)


def test_every_option_has_wrong_values_or_is_free():
    for verb, parameters in verbs().items():
        for p in parameters:
            assert not takes_text(p) or wrong_values(verb, p.name) or is_free(verb, p.name), (verb, p.name)


def test_every_wrong_word_is_refused_in_one_sentence_and_no_verb_begins():
    commands, results, _ = refused()
    assert len(commands) > 500
    wrong = [
        (argv, result)
        for argv, result in zip(commands, results, strict=True)
        if result[:2] != [2, ""] or not result[2].startswith("autoshard: ") or result[2].count("\n") != 1 or "Traceback" in result[2]
    ]
    assert wrong == []


def test_nothing_slow_is_imported_to_refuse_a_word():
    assert refused()[2] == []


def test_right_words_are_not_refused():  # else any refusal would do above
    right = [
        *([*verb.split(), *begin] for verb, begin in BEGINS.items()),
        ["plan", MODEL, "--mesh", "auto", "--devices", "8", "--memory", "64GiB", "--train", "--recompute", "auto", "--optimizer", "12"],
        ["plan", MODEL, "--mesh", "2x4", "--pin", "layers.*.up.weight=S(0),*", "--forbid", "x=R,R", "--gap", "0.01", "--prices", "h100"],
        ["plan", MODEL, "--mesh", "2x4", "--set", "layers=2", "--solver", "ilp", "--device", "a100", "--memory", "1000"],
        ["check", HERE, "--within", "5%"],
        ["tables", HERE, "--devices", "2x8", "--host-memory", "0"],
        ["pipeline", MODEL, "--nodes", "2x8:h100", "--memory", "80GB", "--memory", "40GB", "--recompute", "never"],
        ["pipeline", MODEL, "--devices", "8", "--schedules", "1f1b, gpipe", "--microbatches", "4,8"],
        ["export", PLAN, "--format", "tp_plan"],
        ["explain", PLAN, "w", "--why-not", "S(1),R"],
        ["redistribute", HERE, "--planner", "astar", "--memory-limit", "1GB"],
        ["calibrate", "show", "h100"],
    ]
    assert [(argv, result) for argv, result in zip(right, run_all(right)[0], strict=True) if result[0] != "began"] == []


@pytest.mark.parametrize(
    ("text", "name", "there"),
    [
        ("def a(): pass", "a", True),
        ("def a(): pass", "b", False),
        ("from x import *", "b", True),
        ("import x as b", "b", True),
        ("globals()['b'] = 1", "b", True),
        ("if 1:\n    b = a = 1", "b", True),
        ("def (", "b", True),  # the file says what is wrong with it when it runs
    ],
)
def test_a_function_is_missing_only_where_the_text_is_sure(tmp_path, text, name, there):
    (tmp_path / "model.py").write_text(text)
    written = f"{tmp_path}/model.py:{name}"
    if there:
        A_MODEL.check("MODEL", written)
    else:
        with pytest.raises(ValueError, match=f"has no function '{name}'; it has a"):
            A_MODEL.check("MODEL", written)


@pytest.mark.parametrize(
    ("text", "end", "programs"),
    [("Programs()", ":f", True), ("x.program", ":f", True), ("def program(): pass", ":f", True), ("def f(): pass", ":f", False),
     ("Programs()", ":f#train", False), ("def (", ":f", False)],
)  # fmt: skip
def test_a_model_may_be_programs_where_its_file_has_the_word(tmp_path, text, end, programs):
    (tmp_path / "model.py").write_text(text)
    assert may_be_programs(f"{tmp_path}/model.py{end}") is programs and not may_be_programs("hf:programs")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("def f(a, /, b, *, c=1): pass", r"^f\(\) takes no 'zz'; it takes a, b, c, so correct the --set$"),
        ("def f(): pass", r"^f\(\) takes no 'c'; it takes nothing"), ("def f(c, zz): pass", ""), ("def f(**any): pass", ""), ("def (", ""),
        ("@g\ndef f(): pass", ""), ("if 1:\n    def f(): pass", ""), ("def f(): pass\ndef f(c, zz): pass", ""), ("def g(): pass", ""),
    ],
)  # fmt: skip
def test_a_setting_is_wrong_only_where_the_text_is_sure(tmp_path, text, sentence):
    (tmp_path / "model.py").write_text(text)
    written, given = f"{tmp_path}/model.py:f#train", {"c": 1, "zz": 2}
    assert_refused(sentence, settings_of, written, given) if sentence else settings_of(written, given)


def test_models_are_named_by_folders_and_by_files():
    assert [names_model(written) for written in ("hf:x", "a.py:f", "a.py", "plan.json", "x.hf:")] == [True, True, False, False, False]
    settings_of("hf:x", dict.fromkeys(model_source.HUGGING_FACE))
    assert_refused("hf: models take no setting 'heads'; they take batch, seq", settings_of, "hf:x", {"seq": 1, "heads": 2})
    for path in ("mlp.py", "models/mlp.py", f"{ROOT}/models/mlp.py"):
        assert model_file(path).resolve() == ROOT / "models" / "mlp.py"
    for path in ("other/mlp.py", "models/none.py"):
        assert_refused(f"there is no file {path}; MODEL is file.py:function", model_file, path)


def test_a_cluster_is_given_once_and_has_a_device_for_each_stage():
    h100 = [(2, 8, "h100"), (1, 4, None)]
    for devices, kinds, stages in ((16, [], 16), (None, h100, 20), (2**18, [], 1)):
        _cluster(devices, kinds, stages)
    for devices, kinds, stages, said in (
        (None, [], 1, "give the cluster: either --devices 16, or --nodes"), (16, h100, 1, "give the cluster"),
        (16, [], 17, "--stages is 17, but the cluster has 16 devices"), (None, h100, 21, "but the cluster has 20 devices"),
        (2**18 + 1, [], 1, "the cluster has 262145 devices; expected 262144 at most"),
    ):  # fmt: skip
        assert_refused(said, _cluster, devices, kinds, stages)


def test_the_model_of_a_plan_runs_where_it_is_named_or_trusted():
    plan = SimpleNamespace(model="m.py:f", model_settings={"a": 1, "b": 2})
    assert model_of(plan, "n.py:g", {"c": 3}, "p.json", False) == ("n.py:g", {"c": 3})
    assert model_of(plan, None, {"b": 4}, "p.json", True) == ("m.py:f", {"a": 1, "b": 4})
    assert_refused("name it yourself: --model m.py:f --set a=1 --set b=4; or add --trust, which runs what the plan names, or not$",
                   model_of, plan, None, {"b": 4}, "p.json", False, option="--model", without=", or not")  # fmt: skip
    for model, settings, said in ((None, None, "does not say which model"), (7, None, "its model is '7'"), ("m", [1], "with settings")):
        assert_refused(said, model_of, SimpleNamespace(model=model, model_settings=settings), None, {}, "p.json", True)
    assert model_of(SimpleNamespace(model="m", model_settings=None), None, {}, "p.json", True) == ("m", {})


def test_models_are_loaded_as_their_plans_say(monkeypatch, tmp_path):
    monkeypatch.setattr(loading, "load_model", lambda written, settings, **more: (written, (settings, *more.values())))
    monkeypatch.setattr(loading, "check_sizes", lambda module, inputs, plan, path, of_any_shape: said.append(of_any_shape))
    trained, run = (SimpleNamespace(model="m.py:f", model_settings=None, training=training) for training in (True, False))
    output, said = SimpleNamespace(progress=lambda what, fraction: said.append(fraction)), []
    asked = SimpleNamespace(solution="p.json", model=None, settings={"a": 1}, trust=True)
    assert models_for(output, trained, asked) == ("m.py:f", ({"a": 1}, True, ""))
    assert model_for(output, run, asked, "p.json#x") == ("m.py:f", ({"a": 1}, False, "x")) and said == [0.0, 0.0, False]
    several = SimpleNamespace(programs={"x": trained, "y": run})
    assert models_for(output, several, asked)[0] == {"x": "m.py:f", "y": "m.py:f"}
    asked.model = "n.py:g"
    inputs = {"x": ({"a": 1}, True, ""), "y": ({"a": 1}, False, "")}
    assert models_for(output, several, asked) == ({"x": "n.py:g#x", "y": "n.py:g#y"}, inputs)
    asked.model, asked.solution = "n.py:g#x", "p.json#x"
    assert models_for(output, trained, asked) == ("n.py:g#x", ({"a": 1}, True, "x"))
    asked.solution = "p.json"
    assert_refused("n.py:g#x is one of them; give n.py:g, or p.json#x", models_for, output, several, asked)
    monkeypatch.setattr(loading, "load_api", lambda: SimpleNamespace(load=lambda path: ("any", path), load_one=lambda path: ("one", path)))
    (tmp_path / "c.toml").touch()
    for path in (f"{tmp_path}/none.toml", __file__):
        assert (loading.load_any_plan(path), loading.load_plan(path)) == (("any", path), ("one", path))
    assert_refused("c.toml looks like a launcher's configuration, not like a plan", loading.load_plan, f"{tmp_path}/c.toml")
    assert loading.load_device("h100") == "h100"


def test_the_names_are_those_of_the_rooms_that_own_them():
    from importlib import import_module

    from autoshard import relayout
    from autoshard.capture import huggingface
    from autoshard.cost import presets
    from autoshard.exports import FORMATS
    from autoshard.layout import _SHARDS
    from autoshard.options.kinds import MOST_DIM
    from autoshard.pipeline import schedules

    solve = import_module("autoshard.solvers.solve")
    assert set(SOLVERS) == set(solve.SOLVERS) and set(EXPORTS) == set(FORMATS)
    assert set(SCHEDULES) == set(schedules.SCHEDULES)
    assert set(PLANNERS) == set(relayout.PLANNERS)
    assert set(PRICES) == {one.name for one in presets.all_presets()} and model_source.HUGGING_FACE == huggingface.SETTINGS
    assert MOST_DIM == len(_SHARDS) - 1


@pytest.mark.parametrize(
    "sentence, typed",
    [
        ("expert_imbalance is 1.5", "--expert-imbalance is 1.5"),
        ("give tie_blocks=True, or memory_limit", "give --tie-blocks, or --memory"),
        ("its 'memory_limit' and x.memory_limit", "its 'memory_limit' and x.memory_limit"), ("mesh is 3", "mesh is 3"),
        ("MODEL_LIMIT my_model.py", "MODEL_LIMIT my_model.py"),
    ],
)  # fmt: skip
def test_sentences_name_options_as_they_are_typed(sentence, typed):
    names = {"memory_limit": "--memory", "expert_imbalance": "--expert-imbalance", "tie_blocks": "--tie-blocks", "mesh": "--mesh",
             "my_model": "MODEL"}  # fmt: skip
    assert as_typed(sentence, names) == typed
