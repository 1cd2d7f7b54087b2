"""Verbs of earlier versions: each does what it did under its new form, says so in one line, and is not among the verbs of `--help`."""

import json

import pytest
from typer.main import get_command

from autoshard.cli.app import OLD_VERBS, app, rewritten
from tests.helpers_solutions import linear_solution
from tests.test_cli import run

# an old command line, and how it is written now
FORMS = {
    "diff a.json b.json --exit-code": "show a.json b.json --exit-code",
    "show-prices h100 --json": "calibrate show h100 --json",
    "programs rl.py:programs --mesh 2": "plan rl.py:programs --mesh 2",
    "programs rl.json --json": "show rl.json --json",
    "report a.json": "show a.json --html report.html",
    "report a.json --trust --out a.html --json": "show a.json --trust --html a.html --json",
    "report --out=a.html a.json m.py:net --set a=m.py:net": "show --html=a.html a.json --model m.py:net --set a=m.py:net",
    "report a.json hf:folder": "show a.json --model hf:folder --html report.html",
    "simulate job.toml --devices 128": "show job.toml --devices 128",
}


@pytest.mark.parametrize("old", FORMS)
def test_an_old_verb_is_rewritten_and_says_so(old, capsys):
    assert rewritten(old.split()) == FORMS[old].split()
    before, now, _ = OLD_VERBS[old.partition(" ")[0]]
    out, err = capsys.readouterr()
    assert out == "" and err == f"autoshard: `{before}` is now `{now}`\n"


def test_every_old_verb_is_tried_and_none_is_shown():
    assert {old.partition(" ")[0] for old in FORMS} == set(OLD_VERBS)
    assert set(OLD_VERBS) & set(get_command(app).commands) == {"simulate"}  # of a plan
    assert rewritten(["simulate", "a.json", "b.py:net"]) == ["simulate", "a.json", "b.py:net"]


@pytest.mark.parametrize("before", [[], ["--traceback"], ["--log-level", "info"], ["--log-level=info", "--traceback"]], ids=" ".join)
def test_options_before_the_verb_stay_before_it(before):
    assert rewritten([*before, "diff", "a", "diff"]) == [*before, "show", "a", "diff"]


@pytest.mark.parametrize("argv", [[], ["--help"], ["--log-level", "diff"], ["show", "diff"], ["--log-level", "diff", "show"]], ids=" ".join)
def test_nothing_else_is_rewritten(argv, capsys):
    assert rewritten(argv) == argv and capsys.readouterr().err == ""


def test_with_json_and_quiet_the_line_is_printed_beside_the_object(tmp_path, capsys):
    linear_solution().save(tmp_path / "plan.json")
    plan = str(tmp_path / "plan.json")
    code, out, err = run(capsys, "diff", plan, plan, "--json", "--quiet")
    assert (code, err) == (0, "autoshard: `diff A B` is now `show A B`\n")
    assert json.loads(out) == json.loads(run(capsys, "show", plan, plan, "--json")[1])
