"""Options that a command line ignores are refused: every rule with every option; and each counts where the rule does not hold."""

from functools import cache

import pytest

from autoshard.cli import main
from autoshard.cli.combinations import RULES
from tests.test_cli_words import HERE, MODEL, PLAN, ROOT, run_all, verbs

TITAN = f"{ROOT}/tests/data/launchers/torchtitan/llama3_8b.toml"
RIGHT = {
    "time_limit": "60", "batch": "4", "seq": "64", "dtype": "float32", "within": "0.01", "alternatives": "3", "devices": "8",
    "out": "new", "html": "new", "trace": "new", "picture": "new.svg", "frontier": HERE,
    "microbatch": "1", "global_batch": "8", "device": "a100", "per_node": "4", "memory": "80GB", "mesh": "2x4",
    "settings": "layers=2",
    "memory_limit": "80GB", "microbatches": "4",
    "tp": "2", "pp": "2", "cp": "2", "precision": "fp8", "evidence": "memory.json",
    "host_bandwidth": "9GB/s", "workers": "3",
    "gap": "0.01", "devices_per_node": "4", "schedule": "gpipe", "chunks": "2", "scheme": "fsdp", "prices": "h100",
    "model": MODEL,
    "intra_node_bandwidth": "9GB/s", "inter_node_bandwidth": "9GB/s", "optimizer": "sgd", "recompute": "all",
    "dynamic_shapes": "input_*=batch:1-8", "criterion": "worst",
}  # fmt: skip
SPREAD = ("--data", "2", "--pipeline", "2")  # several devices in a node, and several nodes
OWN = {("fits", "recompute"): "full", ("check", "within"): "5%", ("export", "within"): "5%", ("pipeline", "recompute"): "always"}
# per rule, by its first words: a command line that ignores its options, and one that doesn't
LINES = {
    "without --pin": (["plan", MODEL, "--mesh", "2x4"], ["plan", MODEL, "--mesh", "2x4", "--pin", "w=R,R"]),
    "without --dynamic-shapes": (
        ["plan", MODEL, "--mesh", "2x4"], ["plan", MODEL, "--mesh", "2x4", "--dynamic-shapes", "input_*=batch:1-8"]
    ),
    "on several meshes": (["plan", MODEL, "--mesh", "auto", "--devices", "8"], ["plan", MODEL, "--mesh", "2x4"]),
    "on a forward pass": (["VERB", MODEL, "--mesh", "2x4"], ["VERB", MODEL, "--mesh", "2x4", "--train"]),
    "beside --prices, ": (["VERB", MODEL, "--mesh", "2x4", "--prices", "h100"], ["VERB", MODEL, "--mesh", "2x4"]),
    "beside --cluster": (["VERB", MODEL, "--cluster", "CLUSTER"], ["VERB", MODEL, *"--mesh 2x4".split()]),
    "on the mesh of the plan": (["plan", MODEL, "--keep", PLAN], ["plan", MODEL, "--keep", PLAN, "--mesh", "2x4"]),
    "on a configuration, which": (["fits", TITAN], ["fits", MODEL, "--devices", "8"]),
    "without MODEL": (["check", HERE, "--launcher", "torchtitan"], ["check", HERE, MODEL, "--launcher", "torchtitan"]),
    "beside another plan": (["show", PLAN, PLAN], ["show", PLAN]),
    "without --html": (["show", PLAN], ["show", PLAN, "--html", "new"]),
    "without another plan": (["show", PLAN], ["show", PLAN, PLAN]),
    "beside --no-model": (["show", PLAN, "--html", "new", "--no-model"], ["show", PLAN, "--html", "new"]),
    "on a format": (["export", PLAN], ["export", PLAN, "--format", "tp_plan"]),
    "on one stage": (["simulate", MODEL], ["simulate", MODEL, "--pipeline", "2"]),
    "on a model, which": (["simulate", MODEL], ["simulate", PLAN]),
    "on a model; give": (["simulate", MODEL], ["simulate", PLAN]),
    "without NAME or": (["explain", PLAN], ["explain", PLAN, "--robust"]),
    "without --robust": (["explain", PLAN], ["explain", PLAN, "--robust"]),
    "without the NAME": (["explain", PLAN], ["explain", PLAN, "w"]),
    "on a plan; ": (["VERB", PLAN], ["VERB", TITAN]),
    "without a model": (["doctor"], ["doctor", f"{ROOT}/models/gpt2.py:tiny", "--device", "cuda"]),
    "on a plan, which": (["simulate", PLAN], ["simulate", MODEL, *SPREAD]),
    "beside --no-overlap": (["simulate", PLAN, "--no-overlap"], ["simulate", PLAN]),
    "beside --dask": (["pipeline", MODEL, "--devices", "8", "--dask", "tcp://a:1"], ["pipeline", MODEL, "--devices", "8"]),
    "without --host-memory": (["tables", HERE], ["tables", HERE, "--host-memory", "1TB"]),
    "with --planner naive": (["redistribute", HERE, "--planner", "naive"], ["redistribute", HERE]),
    "beside --nodes": (["pipeline", MODEL, "--nodes", "2x8"], ["pipeline", MODEL, "--devices", "8"]),
    "on a forward pass; leave": (["pipeline", MODEL, "--devices", "8", "--inference"], ["pipeline", MODEL, "--devices", "8"]),
    "beside --no-bound": (["degrees", MODEL, "--devices", "8", "--no-bound"], ["degrees", MODEL, "--devices", "8"]),
    **{f"beside --{name};": (["degrees", MODEL, "--devices", "8", f"--{name}", "1"], ["degrees", MODEL, "--devices", "8"])
       for name in ("tp", "cp", "ep", "pp")},
}

ACROSS = {verb: (["--mesh", "4"], ["--mesh", "2x4"]) for verb in ("plan", "frontier")} | {
    "simulate": ([], ["--pipeline", "2"]), "pipeline": (["--devices", "8"], ["--devices", "16"]),
    **{verb: (["--devices", "8"], ["--devices", "16"]) for verb in ("degrees", "check", "show", "explain", "fits")},
    "tables": (["--devices", "8"], ["--devices", "2x8"]),
}  # fmt: skip
WITHIN = {verb: (["--mesh", "4x1"], ["--mesh", "2x4"]) for verb in ("plan", "frontier")} | {
    "simulate": (["--pipeline", "2"], ["--data", "2"]), "pipeline": (["--devices", "8", "--devices-per-node", "1"], ["--devices", "8"]),
    **{verb: (["--devices", "8", "--per-node", "1"], ["--devices", "8"]) for verb in ("degrees", "check", "show", "explain", "fits")},
    "tables": (["--devices", "8x1"], ["--devices", "8"]),
}  # fmt: skip
ABOUT = {"tables": [HERE], "check": [HERE, "--launcher", "torchtitan"], "show": [TITAN], "explain": [TITAN]}
OF_A_PLAN = {"check": ["check", PLAN], "show": ["show", PLAN, "--html", "new"], "explain": ["explain", PLAN, "w", "--robust"]}
TRUSTED = {
    "show": (["show", PLAN, "--html", "new", "--model", MODEL], ["show", PLAN, "--html", "new"]),
    "explain": (["explain", PLAN, "w", "--model", MODEL], ["explain", PLAN, "w"]),
}


def lines_of(rule, verb: str) -> tuple[list[str], list[str]]:
    """The line of the longest name that fits: the rule's sentence begins with it."""
    if of := {("inter_node_bandwidth",): ACROSS, ("intra_node_bandwidth",): WITHIN}.get(rule.options):
        return tuple([verb, *ABOUT.get(verb, [MODEL]), *words] for words in of[verb])
    if rule.why.startswith("beside a model"):
        if verb == "fits":
            return ["fits", f"{ROOT}/models/gpt2.py:tiny", "--devices", "8"], ["fits", TITAN]
        return TRUSTED.get(verb) or ([verb, PLAN, MODEL], [verb, PLAN])
    if rule.why.startswith("on a launcher's configuration"):
        return [verb, TITAN], OF_A_PLAN[verb]
    if verb == "fits" and rule.why == "without MODEL":
        return ["fits", TITAN], ["fits", TITAN, MODEL]
    said = f"{rule.why}; {rule.cure or 'leave'}"
    return LINES[max((key for key in LINES if said.startswith(key)), key=len)]


def option_of(verb: str, name: str) -> list[str]:
    parameter = next(p for p in verbs()[verb] if p.name == name)
    written = max(parameter.opts, key=len)
    if getattr(parameter, "is_flag", False):
        return [written]
    value = cluster() if name == "cluster" else OWN.get((verb, name)) or RIGHT[name]
    return [written, value] if written.startswith("-") else [value]


@cache
def cluster() -> str:
    import tempfile

    from tests.test_schemas import measured

    path = f"{tempfile.mkdtemp(prefix='autoshard-cluster-')}/cluster.json"
    measured(path)
    return path


RIGHT |= {"prefetch": "2", "name": "w", "why_not": "R,R"}


def filled(words: list[str], verb: str, option: list[str]) -> list[str]:
    words = [{"VERB": verb, "CLUSTER": cluster()}.get(word, word) for word in words] if "CLUSTER" in words or "VERB" in words else words
    if verb == "simulate" and "--mesh" in words:
        words = [*words[: words.index("--mesh")], *SPREAD]
    return words if option[0] in words else [*words, *option]


PAIRS = [(rule, verb, name) for rule in RULES for verb in rule.verbs for name in rule.options]


@cache
def answers() -> list:
    commands = [filled(words, verb, option_of(verb, name)) for rule, verb, name in PAIRS for words in lines_of(rule, verb)]
    return list(zip(commands, run_all(commands)[0], strict=True))


def test_an_option_that_a_command_line_ignores_is_refused():
    ignored = answers()[::2]
    assert len(ignored) > 60
    wrong = [pair for pair in ignored if pair[1][0] != 2 or " has no effect " not in pair[1][2] or "leave it out" not in pair[1][2]]
    assert wrong == []


def test_the_same_option_counts_elsewhere():  # else a rule that always holds would do above
    assert [pair for pair in answers()[1::2] if pair[1][0] != "began"] == []


def test_an_option_of_one_value_comes_once():
    once = [[verb, *option_of(verb, name) * 2] for verb, name in (("plan", "memory_limit"), ("frontier", "gap"), ("tables", "device"))]
    once += [["verify", PLAN, MODEL, "--batch=4", "--batch", "4"], ["export", PLAN, "--format", "json", "--to", "json"]]
    for argv, (code, out, err) in zip(once, run_all(once)[0], strict=True):
        assert (code, out) == (2, "") and "is given 2 times" in err and err.count("\n") == 1, argv
    several = ["plan", MODEL, "--mesh", "2x4", "--pin", "a=R,R", "--pin", "b=R,R", "--train", "--train"]
    assert run_all([several])[0][0][0] == "began"


@pytest.mark.parametrize(
    ("argv", "lost"),
    [
        (["show", "FILE", "--no-model", "--html", "FILE"], "SOLUTION"),
        (["export", "FILE", "--out", "FILE"], "SOLUTION"),
        (["solve", "FILE", "--out", "./FILE"], "PROBLEM"),
        (["frontier", MODEL, "--mesh", "2", "--points", "1", "--out", "NEW", "--csv", "NEW"], "--out"),
        (["calibrate", "fit", "FILE", "--out", "FILE"], "FILES"),
    ],
)
def test_a_result_never_replaces_what_was_read(tmp_path, monkeypatch, capsys, argv, lost):
    monkeypatch.chdir(tmp_path)
    names = {"FILE": "good.svg", "./FILE": "./good.svg", "NEW": "new.json"}
    (tmp_path / "good.svg").write_text(open(PLAN).read())
    assert main([names.get(word, word) for word in argv]) == 2
    assert f"is the file of {lost}, which would be lost; give another name" in capsys.readouterr().err
    assert (tmp_path / "good.svg").read_text() == open(PLAN).read() and not (tmp_path / "new.json").exists()


def test_a_plan_may_be_planned_anew_in_its_place():
    assert run_all([["plan", MODEL, "--keep", f"{ROOT}/solutions/gpt2-small-2x4.json", "--out", PLAN]])[0][0][0] == "began"
