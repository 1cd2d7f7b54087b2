"""The command line in this process: what it prints, where, and with which exit code."""

import inspect
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.main import get_command

from autoshard import api
from autoshard.cli import main, verbs_without_model
from autoshard.cli.app import app
from autoshard.cli.kinds import check_out, check_picture, parse_settings
from autoshard.cli.model import load_model
from autoshard.cli.plan_verbs import check_mesh_words, mesh_of, one_mesh
from autoshard.cli.table import OWN, option_of
from autoshard.mesh import MOST_DEVICES, Mesh
from autoshard.options import parse_bytes, parse_pins
from autoshard.solution import load
from autoshard.solvers import restrict
from tests.helpers_refusals import assert_refused
from tests.helpers_solutions import linear_solution
from tests.test_schemas import measured

ROOT = Path(__file__).parent.parent
EXAMPLE = str(Path(__file__).parent / "data" / "iopddl" / "example.json")
TINY = f"{ROOT}/models/mlp.py:tiny"


def run(capsys, *argv: str) -> tuple[int, str, str]:
    code = main(argv)
    out, err = capsys.readouterr()
    return code, out, err


def check_refused(capsys, argv: tuple[str, ...], sentence: str) -> None:
    """Exit code 2, nothing on stdout, one sentence on stderr."""
    code, out, err = run(capsys, *argv)
    assert err.startswith("autoshard: ") and err.count("\n") == 1 and "Traceback" not in err
    assert sentence in err.replace("'MODEL'", "'model'")  # as typer 0.20 spells it
    assert (code, out) == (2, "")


@pytest.fixture
def plan_file(tmp_path) -> str:
    linear_solution().save(tmp_path / "plan.json")
    return str(tmp_path / "plan.json")


# --- the mesh


MESH_WORDS = [  # mesh, cluster, keep, devices, what is wrong with them
    ((None, None, None, None), "Missing option '--mesh'"), (((2,), None, None, None), None), ((None, "c", None, None), None),
    ((None, None, "k", None), None), (("auto", None, None, None), "how many devices"), (("auto", None, None, 4), None),
    (("auto", None, None, MOST_DEVICES), None), (("auto", None, None, MOST_DEVICES + 1), f"expected {MOST_DEVICES} at most"),
    (((2, 4), None, None, 8), "the mesh here is 2x4"), ((None, "c", None, 8), "the mesh here is None"),
    (("auto", "c", None, 4), "leave out the mesh"), (("auto", None, "k", 4), "leave out the mesh"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "sentence"), MESH_WORDS)
def test_words_about_the_mesh_that_contradict_each_other_are_refused(words, sentence):
    if sentence is None:
        return check_mesh_words(*words)
    assert_refused(sentence, check_mesh_words, *words)


def test_the_mesh_is_the_measured_one_or_that_of_its_shape_and_the_kept_plans_where_none_is_named(tmp_path):
    measured(tmp_path / "cluster.json")
    kept = SimpleNamespace(mesh=Mesh.from_bandwidths((4,), device="a100"))
    links = {"intra_node_bandwidth": 1e9, "inter_node_bandwidth": 1e8}

    def asked(**given):
        words = {"cluster": None, "prices": None, "device": "h100", "tf32": False, "mesh": None, "devices_per_node": None, "keep": "k"}
        return SimpleNamespace(**{**words, "links": links, **given})

    cluster, plain = asked(cluster=str(tmp_path / "cluster.json")), asked()
    assert mesh_of(cluster, None, None) == mesh_of(cluster, (2,), None) == one_mesh(cluster, None)
    assert mesh_of(cluster, None, None).device.name == "cpu"
    assert_refused("--mesh is 4, but .* was measured as 2; leave --mesh out", mesh_of, cluster, (4,), None)
    for shape, per_node in (((4,), None), ((2, 2), None), ((2, 2), 1)):
        expected = Mesh.from_bandwidths(shape, device="h100", devices_per_node=per_node, **links)
        assert mesh_of(plain, shape, per_node) == one_mesh(asked(mesh=shape, devices_per_node=per_node), None) == expected
    assert mesh_of(asked(prices="h100"), (4,), None) != mesh_of(plain, (4,), None)
    assert one_mesh(plain, kept) is kept.mesh and one_mesh(asked(mesh=(4,)), kept) == mesh_of(plain, (4,), None)
    assert_refused("the mesh is 2x2, but k shards tensors over 4; leave the mesh out", one_mesh, asked(mesh=(2, 2)), kept)
    assert_refused("the mesh is 2, but k shards tensors over 4; leave the mesh out", one_mesh, cluster, kept)


# --- words to values


@pytest.mark.parametrize(
    ("written", "value"),
    [("80GB", 80e9), ("80 gb", 80e9), ("64GiB", 64 * 2**30), ("8e10", 8e10), ("300GB/s", 3e11), ("1.5T", 1.5e12), ("7B", 7)],
)
def test_bytes_with_units(written, value):
    assert parse_bytes(written) == value


@pytest.mark.parametrize("written", ["", "GB", "-80GB", "0", "80XB", "inf", "nan", "1e999", "80GB80", "1.2.3GB"])
def test_bytes_that_are_none(written):
    assert_refused("memory is .*; expected a positive number with a unit, for example 80GB", parse_bytes, written)


def test_bits_of_a_bandwidth_are_no_bytes():
    assert_refused("a number of bits; write bytes, 50GB/s", parse_bytes, "400Gb/s", "--inter-node-bandwidth")


def test_settings_have_types():
    written = ["a=2", "b=0.5", "c=true", "d=False", "e=text", "f=none", "g=x=y", "h="]
    assert parse_settings(written) == {"a": 2, "b": 0.5, "c": True, "d": False, "e": "text", "f": None, "g": "x=y", "h": ""}


def test_pins_have_names_and_layouts():
    assert parse_pins(["h.0.w=S(0),R", "a=b=R"]) == {"h.0.w": "S(0),R", "a=b": "R"}


def test_bandwidths_are_read_in_bytes_per_second():
    kind = option_of("plan", "inter_node_bandwidth").kind
    assert [kind.read("--inter-node-bandwidth", written) for written in ("300GB/s", "1e9")] == [3e11, 1e9]
    with pytest.raises(ValueError, match="^--inter-node-bandwidth is 'fast'; expected a positive number with a unit, for example 300GB/s$"):
        kind.read("--inter-node-bandwidth", "fast")


def test_blocks_to_recompute_are_a_number_or_a_word():
    kind = option_of("plan", "recompute").kind
    assert [kind.read("--recompute", written) for written in ("0", "12", "all")] == [0, 12, "all"]
    negative = kind.read("--recompute", "-1")
    assert_refused("^--recompute is '-1'; expected a number of blocks, 'all', 'blocks' or 'auto'$", kind.check, "--recompute", negative)


def test_files_are_refused_by_the_name_of_their_option(tmp_path):
    check_out(None)
    check_out(str(tmp_path / "anything"), "--csv")
    assert_refused(f"^--csv {tmp_path} is a folder; give the name of a file to write$", check_out, str(tmp_path), "--csv")
    for ending in (".png", ".svg", ".pdf"):
        check_picture(str(tmp_path / f"picture{ending}"), "--plot")
    with pytest.raises(ValueError, match=r"^--plot .*/picture.gif ends in .gif; expected one of .png, .svg, .pdf$"):
        check_picture(str(tmp_path / "picture.gif"), "--plot")
    assert_refused("^--plot nowhere/a.png: there is no folder nowhere; make it first$", check_picture, "nowhere/a.png", "--plot")


SHARED = {
    "--intra-node-bandwidth": ("plan", "frontier", "pipeline", "simulate", "redistribute", "tables"),
    "--inter-node-bandwidth": ("plan", "frontier", "pipeline", "simulate", "redistribute", "tables"),
    "--device": ("plan", "frontier", "simulate", "tables"),
    "--prices": ("plan", "frontier"),
    "--cluster": ("plan", "frontier"),
    "--train": ("plan", "frontier"),
    "--master-weights": ("plan", "frontier"),
    "--pin": ("plan", "frontier"),
    "--quiet": ("plan", "frontier", "pipeline", "simulate", "redistribute", "tables", "solve"),
}


@pytest.mark.parametrize("option", SHARED)
def test_an_option_of_several_verbs_is_the_same_in_each(option):
    verbs = get_command(app).commands
    seen = {verb: next(p for p in verbs[verb].params if option in p.opts) for verb in SHARED[option]}
    assert len({(p.help, p.metavar, str(p.default), p.multiple) for p in seen.values()}) == 1


# --- MODEL

MODEL_FILE = """
import torch
import neighbour

def good(*, width=4, **more):
    return torch.nn.Linear(width, width), (torch.ones(2, width),)

def needs(width):
    return good(width=width)

def one():
    return torch.nn.Linear(2, 2)

def three():
    return 1, 2, 3

def number():
    return 3, (torch.ones(2),)

def text():
    return torch.nn.Linear(2, 2), "x"

def raises():
    x = 1
    raise KeyError("sizes")

def _hidden():
    pass
"""


@pytest.fixture(scope="module")
def model_file(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("model")
    (folder / "net.py").write_text(MODEL_FILE)
    (folder / "neighbour.py").write_text("")
    (folder / "broken.py").write_text("x = 1\ndef f(:\n")
    (folder / "missing.py").write_text("\nimport not_installed_anywhere as f\n")
    return str(folder / "net.py")


def test_a_model_is_what_the_function_returns(model_file):
    path = list(sys.path)
    module, inputs = load_model(f"{model_file}:good", {"width": 8, "other": 1})
    assert module.in_features == 8 and isinstance(inputs, tuple) and inputs[0].shape == (2, 8)
    assert sys.path == path


BAD_MODELS = [
    ("net.py", {}, "expected file.py:function, for example models/gpt2.py:small"),
    ("net.py:", {}, "expected file.py:function"),
    ("net.py:not-a-name", {}, "expected file.py:function"),
    ("nothing.py:f", {}, "there is no file"),
    ("net.py:goood", {}, "has no function 'goood'; it has good, needs, one, three, number, text, raises"),
    ("net.py:torch", {}, "net.py:torch is no function; expected one that returns a module and its example inputs"),
    ("net.py:needs", {}, "needs() needs a value for 'width'; give it with --set width=VALUE"),
    ("net.py:needs", {"witdh": 3}, "needs() takes no 'witdh'; it takes width, so correct the --set"),
    ("net.py:one", {}, "returned a Linear; expected (module, example_inputs)"),
    ("net.py:three", {}, "returned a tuple of 3; expected (module, example_inputs)"),
    ("net.py:number", {}, "returned a int first; expected (module, example_inputs) with a torch.nn.Module"),
    ("net.py:text", {}, "returned example inputs of type str; expected a tuple of tensors"),
    ("net.py:raises", {}, "net.py:raises failed: KeyError: 'sizes' (line 25)"),
    ("net.py:good", {"width": "wide"}, "net.py:good failed: TypeError"),
    ("broken.py:f", {}, "broken.py can't be imported: SyntaxError: invalid syntax (line 2)"),
    ("missing.py:f", {}, "missing.py can't be imported: ModuleNotFoundError: No module named 'not_installed_anywhere' (line 2)"),
]


@pytest.mark.parametrize(("model", "settings", "sentence"), BAD_MODELS, ids=[f"{m}-{s[:30]}" for m, _, s in BAD_MODELS])
def test_a_model_that_is_none_is_refused(capsys, model_file, model, settings, sentence):
    written = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    check_refused(capsys, ("plan", str(Path(model_file).parent / model), "--mesh", "2x4", *written), sentence)


# --- words that are no command line

BAD_WORDS = [
    (("plan",), "Missing argument 'model'; see autoshard plan --help"),
    (("plan", TINY), "Missing option '--mesh'"),
    (("plan", TINY, "--mesh", "2x"), "mesh is '2x'; expected sizes joined by x"),
    (("plan", TINY, "--mesh", "0x4"), "mesh shape is (0, 4); expected positive whole numbers"),
    (("plan", TINY, "--mesh", "2x4", "--memory", "lots"), "memory is 'lots'"),
    (("plan", TINY, "--mesh", "2x4", "--inter-node-bandwidth", "0"), "--inter-node-bandwidth is '0'; expected a positive number"),
    (("plan", TINY, "--mesh", "2x4", "--intra-node-bandwidth=-3GB/s"), "--intra-node-bandwidth is '-3GB/s'"),
    (("plan", TINY, "--mesh", "2x4", "--device", "b900"), "unknown device 'b900'; known are a100"),
    (("plan", TINY, "--mesh", "2x4", "--devices-per-node", "0"), "--devices-per-node is 0; expected a whole number of 1 or more"),
    (("plan", TINY, "--mesh", "2x4", "--set", "layers"), "--set 'layers' is not key=value"),
    (("plan", TINY, "--mesh", "2x4", "--set", "a=1", "--set", "a=2"), "--set gives 'a' twice"),
    (("plan", TINY, "--mesh", "2x4", "--pin", "w"), "--pin 'w' is not NAME=LAYOUT"),
    (("plan", TINY, "--mesh", "2x4", "--pin", "w=R", "--pin", "w=S(0)"), "--pin gives 'w' twice"),
    (("plan", TINY, "--mesh", "2x4", "--time-limit", "soon"), "Invalid value for '--time-limit'"),
    (("plan", TINY, "--mesh", "2x4", "--out", "/nowhere/plan.json"), "there is no folder /nowhere; make it first"),
    (("plan", TINY, "--mesh", "2x4", "--out", "/"), "--out / is a folder"),
    (("plan", TINY, "--mesh", "2x4", "--tarin"), "No such option"),
    (("show",), "Missing argument 'SOLUTION'"),
    (("show", "nothing.json"), "there is no file nothing.json; expected a plan's file"),
    (("show", "/"), "/ is a folder; expected a plan's file"),
    (("verify", "nothing.json"), "there is no file nothing.json"),
    (("export", "nothing.json"), "there is no file nothing.json"),
    (("solve", "nothing.json"), "there is no file nothing.json; expected a contest instance"),
    (("solve", EXAMPLE, "--solver", "magic"), "there is no solver 'magic'; expected one of auto"),
    (("solve", EXAMPLE, "--time-limit", "0"), "--time-limit is 0.0; expected a number above 0"),
    (("solve", EXAMPLE, "--out", "/nowhere/choice.json"), "there is no folder /nowhere"),
    (("plane", "x"), "No such command 'plane'"),
]


@pytest.mark.parametrize(("argv", "sentence"), BAD_WORDS, ids=[" ".join(argv)[-40:] for argv, _ in BAD_WORDS])
def test_bad_words_are_refused_in_one_sentence(capsys, argv, sentence):
    check_refused(capsys, argv, sentence)


def test_log_level_is_one_that_logging_knows(capsys):
    code, _, said = run(capsys, "--log-level", "loud", "doctor")
    assert code == 2 and said == "autoshard: --log-level is loud; expected debug, info, warning, error\n"
    script = "import logging; from autoshard.cli import main; main(['--log-level', 'info', 'calibrate', 'show']); "
    script += "logging.getLogger('a').info('heard')"
    assert "INFO a: heard" in subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stderr


def test_traceback_shows_where_a_failure_came_from():
    assert_refused("mesh is '2x'", main, ["--traceback", "plan", TINY, "--mesh", "2x"])


@pytest.mark.parametrize("verb", ["plan", "show", "explain", "verify", "export", "solve"])
def test_the_help_of_each_verb_has_an_example(capsys, verb):
    code, out, _ = run(capsys, verb, "--help")
    assert code == 0 and f"\n  autoshard {verb} " in out and "--json" in out


# --- solve


def test_solve_prints_one_object_and_writes_the_choice(capsys, tmp_path):
    code, out, err = run(capsys, "solve", EXAMPLE, "--json", "--out", str(tmp_path / "choice.json"))
    record = json.loads(out)
    assert code == 0 and out.count("\n") == 1 and err == f"wrote {tmp_path}/choice.json\n"
    assert set(record) >= {"status", "cost", "bound", "gap", "peak", "limit", "seconds", "reduced"}
    assert set(record["seconds"]) == {"read", "reduce", "solve", "total"}
    assert record["status"] == "optimal" and record["cost"] == pytest.approx(record["bound"])
    written = json.loads((tmp_path / "choice.json").read_text())
    assert written["cost"] == record["cost"] and len(written["choice"]) == 5


def test_solve_says_no_where_nothing_fits(capsys, tmp_path):
    problem = json.loads(Path(EXAMPLE).read_text())
    problem["problem"]["usage_limit"] = 1
    (tmp_path / "tight.json").write_text(json.dumps(problem))
    code, out, err = run(capsys, "solve", str(tmp_path / "tight.json"), "--json", "--out", str(tmp_path / "choice.json"))
    assert code == 1 and json.loads(out)["status"] == "infeasible" and json.loads(out)["cost"] is None
    assert not (tmp_path / "choice.json").exists()
    why = json.loads(out)["infeasibility"]
    low, high = why["smallest_limit"]
    problem["problem"]["usage_limit"] = low - 1
    (tmp_path / "tight.json").write_text(json.dumps(problem))
    code, said, _ = run(capsys, "solve", str(tmp_path / "tight.json"))
    assert low == high and code == 1 and f" smallest limit {high:.12g} " in " ".join(said.split())
    problem["problem"]["usage_limit"] = high
    (tmp_path / "tight.json").write_text(json.dumps(problem))
    assert run(capsys, "solve", str(tmp_path / "tight.json"))[0] == 0 and all(node["bytes"] > 0 for node in why["nodes"])


@pytest.mark.parametrize("where", ["read_contest", "reduce"])
def test_ctrl_c_prints_what_is_known_and_says_no(capsys, monkeypatch, where):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(verbs_without_model if where == "read_contest" else restrict, where, interrupt)
    code, out, err = run(capsys, "solve", EXAMPLE, "--json")
    record = json.loads(out)
    assert code == 1 and record["interrupted"] and record["status"] == "unknown" and "Traceback" not in err


def test_solve_as_a_table_gives_advice(capsys):
    code, out, _ = run(capsys, "solve", EXAMPLE)
    assert code == 0 and "optimal: the best answer there is" in " ".join(out.split())


def test_solve_needs_no_torch():
    script = f"import sys; from autoshard.cli import main; sys.exit(main(['solve', {EXAMPLE!r}, '--quiet']) or 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


# --- show, export


def test_show_prints_the_summary_as_json(capsys, plan_file):
    code, out, err = run(capsys, "show", plan_file, "--json")
    record = json.loads(out)
    assert (code, err) == (0, "") and out.count("\n") == 1
    assert record["status"] == "optimal" and record["parameters"] == {"w": "R,S(1)"} and record["mesh"]["shape"] == [2, 4]


def test_show_prints_tables_of_eighty_columns(capsys, plan_file, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = run(capsys, "show", plan_file)
    assert code == 0 and "no plan is faster" in out and 60 < max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize("kind", ["sharding_map", "json"])
def test_export_prints_json(capsys, plan_file, kind):
    code, out, _ = run(capsys, "export", plan_file, "--to", kind)
    assert code == 0
    assert "R,S(1)" in json.dumps(json.loads(out))
    assert run(capsys, "export", plan_file, "--to", kind, "--json")[1].count("\n") == 1


def test_export_writes_a_file(capsys, plan_file, tmp_path):
    code, out, err = run(capsys, "export", plan_file, "--out", str(tmp_path / "map.json"))
    assert (code, out) == (0, "") and err.startswith(f"wrote {tmp_path}/map.json\n") and "not carried: layouts of activations" in err
    assert json.loads((tmp_path / "map.json").read_text()) == {"": {"node": "w", "sharding": {"w": "R,S(1)"}}}


def test_export_to_an_unknown_kind_is_refused(capsys, plan_file):
    check_refused(capsys, ("export", plan_file, "--to", "tensorrt"), "there is no export 'tensorrt'; expected one of sharding_map")


# --- plan, verify: the real thing on a tiny model


@pytest.fixture(scope="module")
def tiny_plan(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("plans") / "tiny.json"
    assert main(["plan", TINY, "--mesh", "2x2", "--train", "--set", "layers=1", "--out", str(path), "--quiet", "--json"]) == 0
    return path


def test_plan_prints_one_object_that_show_repeats(capsys, tmp_path):
    path = str(tmp_path / "tiny.pkl")
    code, out, err = run(capsys, "plan", TINY, "--mesh", "2x2", "--set", "layers=1", "--json", "--out", path)
    record = json.loads(out)
    assert code == 0 and out.count("\n") == 1 and f"wrote {path}" in err
    assert (
        record["status"] == "optimal"
        and record["gap"] <= 1e-6
        and set(record["cpu_seconds"]) >= {"capture", "candidates", "formulate", "solve", "total"}
    )
    assert json.loads(run(capsys, "show", path, "--json")[1]) == record
    assert load(path).assumptions["model"] == TINY and load(path).assumptions["set"] == {"layers": 1}


def test_plan_as_a_table_shows_the_baselines(capsys):
    code, out, _ = run(capsys, "plan", TINY, "--mesh", "2x2", "--train", "--set", "layers=1", "--quiet")
    assert code == 0 and "Beside the usual plans" in out and "fsdp" in out and "Where the time goes" in out
    assert "Beside" not in run(capsys, "plan", TINY, "--mesh", "2x2", "--set", "layers=1", "--no-baselines", "--quiet")[1]


def test_a_pin_holds(capsys):
    _, out, _ = run(
        capsys, "plan", TINY, "--mesh", "2x2", "--set", "layers=1", "--pin", "layers.0.up.weight=S(1),R", "--json", "--no-baselines"
    )
    assert json.loads(out)["parameters"]["layers.0.up.weight"] == "S(1),R"


@pytest.mark.parametrize(
    ("pin", "sentence"),
    [
        ("layers.0.upp.weight=R,R", "layers.0.upp.weight"),
        ("layers.0.up.weight=S(0)", "has 1 placements, the mesh 2x2 has 2 axes"),
        ("layers.0.up.weight=S(7),R", "shards dim 7"),
        ("layers.0.up.weight=Q,R", "layout 'Q,R' has 'Q'"),
    ],
)
def test_an_impossible_pin_is_refused(capsys, pin, sentence):
    check_refused(capsys, ("plan", TINY, "--mesh", "2x2", "--set", "layers=1", "--pin", pin, "--no-baselines"), sentence)


def test_a_memory_limit_that_nothing_fits_is_the_answer_no(capsys, tmp_path):
    out_file = tmp_path / "plan.json"
    words = ("--mesh", "2", "--train", "--set", "layers=1", "--memory", "1kB", "--no-baselines", "--quiet")
    argv = ("plan", TINY, *words, "--out", str(out_file))
    code, out, err = run(capsys, *argv)
    assert (code, out) == (1, "") and err.startswith("autoshard: ") and "smallest" in err and err.count("\n") == 1
    code, out, _ = run(capsys, *argv, "--json")
    assert code == 1 and json.loads(out)["status"] == "infeasible"
    assert not out_file.exists()


def test_verify_passes_for_the_model_that_the_plan_names(capsys, tiny_plan):
    capsys.readouterr()
    code, out, _ = run(capsys, "verify", str(tiny_plan), "--trust", "--random", "1", "--json")
    record = json.loads(out)
    assert (code, record["ok"], record["ranks"], len(record["plans"])) == (0, True, 4, 2)


def test_verify_fails_a_planted_fault(capsys, tiny_plan):
    capsys.readouterr()
    code, out, _ = run(capsys, "verify", str(tiny_plan), "--trust", "--plant-fault", "--json")
    assert (code, json.loads(out)["ok"]) == (1, False)


def test_verify_as_a_table(capsys, tiny_plan):
    capsys.readouterr()
    code, out, _ = run(capsys, "verify", str(tiny_plan), TINY, "--set", "layers=1", "--batch", "4", "--quiet")
    assert code == 0 and "ok, on 4 simulated ranks" in out


def test_verify_against_another_model_is_refused(capsys, tiny_plan):
    check_refused(capsys, ("verify", str(tiny_plan), TINY, "--set", "layers=2", "--quiet"), "no layout in the plan")


def test_verify_of_a_plan_without_a_model_asks_for_it(capsys, plan_file):
    check_refused(capsys, ("verify", plan_file), "does not say which model it is for; name it after the file")


def test_defaults_of_verbs_are_those_of_the_functions():
    seen = 0
    for verb in [verb for verb in OWN if hasattr(api, verb)]:
        for name, parameter in inspect.signature(getattr(api, verb)).parameters.items():
            if (option := OWN[verb].get(name)) is not None and None not in (parameter.default, option.default):
                default = option.default if not isinstance(option.default, str) else option.kind.read(name, option.default)
                assert parameter.default in (default, inspect.Parameter.empty), (verb, name)
                seen += parameter.default == default
    assert seen > 8
