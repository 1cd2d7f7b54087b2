"""A planning run that ends without an answer says so, and never that there is no plan; every search of a plan obeys its time limit."""

import itertools
import json
import math
from dataclasses import replace
from importlib import import_module

import pytest

from autoshard.api import Infeasible, NoAnswer, plan
from autoshard.cli.app import say_no
from autoshard.cli.output import Output
from autoshard.mesh import Mesh
from autoshard.planning.options import Stopwatch
from autoshard.planning.plan import plan as plan_on_a_clock
from autoshard.solvers import Answer, Status
from models import gpt2, llama
from tests.helpers import Ticking, fast_mesh

solving = import_module("autoshard.planning.solving")

UNKNOWN = Answer(Status.UNKNOWN, None, math.inf, 0.0, "auto")
ASKED = {"training": True, "recompute": "blocks", "memory_limit": 1e9, "time_limit": 60.0, "baselines": False}


def planned():
    return plan(*llama.tiny(layers=2), Mesh.from_bandwidths((2,)), **ASKED)


@pytest.mark.slow
def test_where_the_careful_plan_has_no_answer_the_quick_one_is_the_plan(monkeypatch):
    solve = solving.solve_instance
    monkeypatch.setattr(solving, "solve_instance", lambda c, *rest: UNKNOWN if c.options.solver == "auto" else solve(c, *rest))
    solution = planned()
    assert solution.solver and math.isfinite(solution.cost) and solution.peak_bytes <= 1e9


def test_where_no_plan_has_an_answer_that_is_said(monkeypatch, capsys):
    monkeypatch.setattr(solving, "solve_instance", lambda *_: UNKNOWN)
    sentence = "^no answer within 60 s: no plan within 1.000 GB per device was found, there may be one; "
    with pytest.raises(NoAnswer, match=sentence) as caught:
        planned()
    with Output(as_json=True, quiet=True) as output:
        assert say_no(output, caught.value, caught.value.to_dict()) == 1
    assert json.loads(capsys.readouterr().out)["status"] == "no answer"


@pytest.mark.parametrize(
    ("took", "said"),
    [
        (5.0, "^the search found no plan within 1.000 GB per device, there may be one; raise the memory limit$"),
        (59.0, "^no answer within 60 s: no plan"),
    ],
)
def test_more_time_is_no_advice_where_the_search_ended_before_its_time(took, said, monkeypatch):
    monkeypatch.setattr(solving, "solve_instance", lambda *_: replace(UNKNOWN, seconds={"total": took}))
    with pytest.raises(NoAnswer, match=said):
        planned()


def test_more_time_is_advice_where_a_search_of_few_seconds_took_them_all(monkeypatch):
    now = [0.0]

    def all_of_them(*_):
        now[0] = 8.0
        return replace(UNKNOWN, seconds={"total": 5.0})  # capture and pricing took three

    monkeypatch.setattr(solving, "solve_instance", all_of_them)
    asked = {"memory_limit": 1e9, "time_limit": 8.0, "objective": "serial", "baselines": False}
    with pytest.raises(NoAnswer, match="^no answer within 8 s: .* raise the memory limit or the time limit$"):
        plan_on_a_clock(*llama.tiny(layers=1), Mesh.from_bandwidths((2,)), watch=Stopwatch(None, lambda: now[0]), **asked)


def test_what_is_proven_is_infeasible():
    with pytest.raises(Infeasible) as caught:
        plan(*llama.tiny(layers=1), Mesh.from_bandwidths((2,)), **{**ASKED, "memory_limit": 1e3, "objective": "serial"})
    assert not isinstance(caught.value, NoAnswer) and caught.value.to_dict()["status"] == "infeasible"


# -- a clock of which every look takes a second: few looks follow the limit ---------------------------------------------------------

FEW = 40  # looks: to find that the time is over in each of the searches, and to judge what is known


def looks(limit: float, **options) -> float:
    clock = Ticking()
    module, inputs = gpt2.tiny(layers=4)
    try:
        plan_on_a_clock(module, inputs, fast_mesh((2, 4)), training=True, watch=Stopwatch(None, clock), time_limit=limit, **options)
    except Infeasible as error:
        assert error.status == "no answer" and "memory_limit" in options
    return clock.now


CASES = list(itertools.product((3.0, 300.0), ({}, {"baselines": False}, {"baselines": False, "memory_limit": 2.2e6})))


@pytest.mark.parametrize(("limit", "options"), CASES[1:4:2] + [pytest.param(*case, marks=pytest.mark.slow) for case in CASES[::2]])
def test_every_search_ends_with_the_time_limit(limit, options):
    assert looks(limit, **options) <= limit + FEW


def test_a_search_that_ignores_the_limit_is_found(monkeypatch):
    real = solving.solve
    monkeypatch.setattr(solving, "solve", lambda *given, **options: real(*given, **options | {"time_limit": 1e6}))
    assert looks(3.0, baselines=False) > 3.0 + FEW
