"""The model that a plan's file names is code of whoever wrote the file: no verb runs it unless the user says so."""

import shlex

import pytest
from typer.main import get_command

from autoshard.cli.app import app
from autoshard.cli.loading import model_of
from tests.helpers_refusals import assert_refused
from tests.helpers_solutions import linear_solution
from tests.test_cli import check_refused, run

NAMES_A_PLAN = {"solution", "target", "numbers"}  # arguments of the verbs that take a plan
MORE = {"explain": ("w",), "show": ("--html", "r.html"), "verify": ("--quiet",)}  # words that make it work
AS_OPTION = ("explain", "show")  # verbs whose model is --model
OF_LAUNCHES = ("fits",)  # whose target is a launcher's configuration or a model, never a plan
COMMANDS = {name: verb for name, verb in get_command(app).commands.items() if name not in OF_LAUNCHES}
VERBS = {name: verb for name, verb in COMMANDS.items() if NAMES_A_PLAN & {p.name for p in verb.params}}
WITH_MODEL = sorted(name for name, verb in VERBS.items() if "trust" in {p.name for p in verb.params})


@pytest.fixture
def ran(tmp_path, monkeypatch):
    """A plan whose model leaves a file behind when it is imported; the value is that file."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n\ndef net(width=8):\n    return None\n")
    linear_solution(assumptions={"model": "net.py:net", "set": {"width": 4}}).save(tmp_path / "plan.json")
    return tmp_path / "ran"


def test_the_verbs_that_need_a_model_are_known():
    assert WITH_MODEL == ["certify", "check", "explain", "show", "simulate", "verify"]
    assert "export" in VERBS and "plan" not in VERBS


@pytest.mark.parametrize("verb", sorted(VERBS))
def test_no_verb_runs_the_model_that_a_plan_names(capsys, ran, verb):
    code, out, err = run(capsys, verb, "plan.json", *MORE.get(verb, ()))
    assert not ran.exists()
    assert code == (2 if verb in WITH_MODEL else 0)


@pytest.mark.parametrize("verb", WITH_MODEL)
def test_the_refusal_shows_the_model_and_both_ways_out(capsys, ran, verb):
    words = f"{'--model ' if verb in AS_OPTION else ''}net.py:net --set width=5 --set depth=2"
    argv = (verb, "plan.json", *MORE.get(verb, ()), "--set", "width=5", "--set", "depth=2")
    check_refused(capsys, argv, f"plan.json is for a model whose code would run; to run it name it yourself: {words}; or add --trust")
    assert not ran.exists() and not (ran.parent / "r.html").exists()


@pytest.mark.parametrize("verb", WITH_MODEL)
@pytest.mark.parametrize("named", [True, False])
def test_the_model_runs_where_the_user_says_so(capsys, ran, verb, named):
    """The control of the tests above: named, or trusted, the file is imported (and its function then refused)."""
    words = ("--trust",) if not named else ("--model", "net.py:net") if verb in AS_OPTION else ("net.py:net",)
    code, _, err = run(capsys, verb, "plan.json", *words, *MORE.get(verb, ()))
    assert ran.exists() and "net.py:net returned a NoneType" in err
    assert code == (0 if verb == "show" and not named else 2)  # a page is also written without its model


@pytest.mark.parametrize("words", [(), ("plan.json",), ("--no-model", "--html", "r.html")], ids=" ".join)
def test_what_needs_no_model_needs_no_trust(capsys, ran, words):
    assert run(capsys, "show", "plan.json", *words)[0] == 0 and not ran.exists()


def test_words_of_the_plan_are_quoted_for_a_shell():
    hostile = "a.py:f; touch x"
    solution = linear_solution(assumptions={"model": hostile, "set": {"k": "$(id)"}})
    with pytest.raises(ValueError, match="name it yourself") as refused:
        model_of(solution, None, {}, "plan.json", False)
    assert shlex.join([hostile, "--set", "k=$(id)"]) in str(refused.value)
    assert model_of(solution, None, {"k": 1}, "plan.json", True) == (hostile, {"k": 1})
    assert model_of(solution, "b.py:g", {}, "plan.json", False) == ("b.py:g", {})  # a named model has the settings given, no others


@pytest.mark.parametrize("noted", [{"model": 3}, {"model": ["a.py:f"]}, {"model": "a.py:f", "set": [1]}])
def test_a_note_of_a_wrong_type_is_refused(noted):
    assert_refused("plan.json says its model is", model_of, linear_solution(assumptions=noted), None, {}, "plan.json", True)
