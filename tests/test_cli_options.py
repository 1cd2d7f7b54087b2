"""Options that hold numbers: every verb refuses what no number of that kind can be, before anything runs; and a line without a verb."""

from pathlib import Path

import pytest
import typer
from typer.main import get_command

from autoshard.cli import main
from autoshard.cli.app import app
from autoshard.cli.verbs import Verb, Verbs
from tests.test_cli import EXAMPLE, check_refused, run


def verbs(group, path=()):
    for name, command in group.commands.items():
        yield from verbs(command, (*path, name)) if hasattr(command, "commands") else [((*path, name), command)]


VERBS = dict(verbs(get_command(app)))
# options whose text holds a number, or several
WRITTEN = {
    "memory", "memory_limit", "optimizer", "recompute", "microbatches", "data", "tensor", "pipeline", "hbm", "host_memory", "within",
    "inter_node_bandwidth", "intra_node_bandwidth", "host_bandwidth", "largest",
}  # fmt: skip
SERVING = ("--devices", "8", "--max-tokens", "64", "--batch", "4")
GIVEN = {"mesh": ("--mesh", "2x4"), "devices": ("--devices", "8"), "serving": SERVING}  # options that verbs need besides


def number_of(parameter):
    """int or float, None for an option that is none: typer says the annotation from 0.26 on, and before that click's type."""
    if hasattr(parameter, "type_descriptor"):
        return next((kind for kind in (int, float) if parameter.type_descriptor.annotation is kind), None)
    return {"integer": int, "float": float}.get(parameter.type.name.split()[0])


def is_number(parameter):
    return number_of(parameter) is not None


NUMBERS = [(verb, p) for verb, command in VERBS.items() for p in command.params if is_number(p)]
TEXTS = [(verb, p) for verb, command in VERBS.items() for p in command.params if p.name in WRITTEN and not is_number(p)]


def words(verb, parameter, value):
    """The verb with this option and no more than it needs to come so far; the files that it names are not there."""
    command = VERBS[verb]
    arguments = ["nothing.py:net" for p in command.params if p.param_type_name == "argument" and p.required]
    needed = {"plan": "mesh", "frontier": "mesh", "measure": "mesh", "pipeline": "devices", "degrees": "devices", "serve-plan": "serving"}
    needed = needed.get(verb[-1])
    more = GIVEN[needed] if needed and parameter.name != needed else ()
    return (*verb, *arguments, *more, f"{max(parameter.opts, key=len)}={value}")


def name_of(case):
    return f"{'-'.join(case[0])}{max(case[1].opts, key=len)}"


def test_every_verb_is_on_the_page_of_commands():
    page = " ".join((Path(__file__).parent.parent / "docs" / "commands.md").read_text().split())
    assert [verb for verb in VERBS if f"autoshard {' '.join(verb)} " not in page] == []


def test_the_lists_are_not_empty():
    assert len(NUMBERS) >= 30 and len(TEXTS) >= 20 and all(isinstance(command, Verb) for command in VERBS.values())


@pytest.mark.parametrize("case", NUMBERS, ids=name_of)
def test_a_number_below_what_an_option_allows_is_refused(capsys, case):
    verb, parameter = case
    option = max(parameter.opts, key=len)
    for value in ("-1", "-1000000") if number_of(parameter) is int else ("-1", "-1e-9", "nan", "-inf"):
        check_refused(capsys, words(verb, parameter, value), option)


@pytest.mark.parametrize("case", TEXTS, ids=name_of)
def test_a_number_in_text_is_refused_before_a_file_is_read(capsys, case):
    verb, parameter = case
    code, out, err = run(capsys, *words(verb, parameter, "-1"))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "-1" in err and "expected" in err and "nothing.py" not in err.partition("expected")[0]


def test_the_declaration_is_what_refuses():
    """The control: without it, typer hands a negative number on."""
    seen, plain, ours = [], typer.Typer(), Verbs()

    @plain.command()
    def degrees(time_limit: float = 3.0) -> None:
        seen.append(time_limit)

    @ours.command()
    def solve(asked, output) -> None:
        seen.append(asked.time_limit)

    for tiny in (plain, ours):
        tiny.command("demo")(lambda *_: None)  # typer runs the only verb of a program without its name
    get_command(plain)(["degrees", "--time-limit=-1"], standalone_mode=False)
    get_command(ours)(["solve", EXAMPLE, "--time-limit=2"], standalone_mode=False)
    with pytest.raises(ValueError, match="--time-limit is -1.0; expected a number above 0"):
        get_command(ours)(["solve", EXAMPLE, "--time-limit=-1"], standalone_mode=False)
    assert seen == [-1.0, 2.0]


@pytest.mark.parametrize("argv", [[], ["calibrate"]])
def test_a_line_without_a_verb_prints_the_help(capsys, argv):
    assert main(argv) == 0
    out, err = capsys.readouterr()
    assert err == "" and out.startswith(f"Usage: {' '.join(['autoshard', *argv])} ") and "measure" in out or "plan" in out
    assert len(out.splitlines()) > 5


@pytest.mark.parametrize("verb", ["plan", "frontier"])
def test_nodes_that_the_devices_do_not_fill_are_refused(capsys, verb):
    words = (verb, "models/mlp.py:mlp", "--mesh", "2x4", "--devices-per-node", "3")
    check_refused(capsys, words, "8 devices do not fill nodes of 3; give --devices-per-node")
