"""`show` of two plans, and `doctor`."""

import json
import math
import re
from dataclasses import replace
from itertools import product

import pytest

from autoshard import torch_private
from autoshard.cli import doctor_verb, main
from autoshard.problem import evaluate
from autoshard.report.changes import comparison_tables
from autoshard.report.terminal import as_text
from autoshard.solution import Placed, changes
from autoshard.solvers import selftest, solve
from tests.helpers_solutions import linear_solution


@pytest.fixture
def plans(tmp_path):
    """A plan, and one in which a parameter lies differently, a part takes longer and an assumption is another."""
    a = linear_solution()
    name, row = next(iter(a.parameters.items()))
    b = replace(
        a,
        cost=2 * a.cost,
        parameters={**a.parameters, name: {**row, "layout": "R,R"}},
        layouts={**a.layouts, name: Placed((), ("R,R",))},
        breakdown={**a.breakdown, "communication": {"all_reduce": {"axis0": a.cost}}},
        assumptions={**a.assumptions, "optimizer": "sgd"},
    )
    paths = [str(tmp_path / "a.json"), str(tmp_path / "b.json")]
    for plan, path in zip((a, b), paths, strict=True):
        plan.save(path)
    return a, b, name, paths


def test_show_lists_what_two_plans_differ_in_and_nothing_else(plans, capsys):
    a, b, name, paths = plans
    assert main(["show", *paths, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert not record["same"] and record["cost_seconds"] == [a.cost, b.cost]
    assert record["parameters"] == {name: [a.parameters[name]["layout"], "R,R"]} and record["ops"] == {} and record["results"] == {}
    assert record["assumptions"]["optimizer"] == [a.assumptions.get("optimizer"), "sgd"]
    assert record["seconds"]["all_reduce axis0"][1] == a.cost
    for pair, shown in (((a, b), [a.parameters[name]["layout"], "R,R"]), ((replace(a, parameters={}), b), ["-", "R,R"]),
                        ((b, replace(a, parameters={})), ["R,R", "-"])):  # fmt: skip
        assert [name, *shown] in [re.findall(r"[^\s│]+", line) for line in as_text(comparison_tables(changes(*pair))).splitlines()]


def test_a_plan_is_the_same_as_itself(plans, capsys):
    a, _, name, paths = plans
    assert changes(a, a)["same"]
    assert main(["show", paths[0], paths[0], "--exit-code"]) == 0
    assert "the same" in capsys.readouterr().out
    assert main(["show", *paths, "--exit-code"]) == 1
    assert name in capsys.readouterr().out


def test_doctor_says_which_features_are_left(monkeypatch):
    versions = {name: "1" for name in (*doctor_verb.NEEDED, *doctor_verb.OPTIONAL)}
    gpus = {"cuda": "13.0", "gpus": 8, "untested": None, "moved": []}
    assert all(state.startswith("yes") for state in doctor_verb._features(versions, [], gpus).values())
    for here, why in ((gpus | {"gpus": 0}, "no GPU is visible"), (gpus | {"gpus": 0, "cuda": None}, "this torch is built without CUDA")):
        assert doctor_verb._features(versions, [], here)["verify --device cuda, and ranks on GPUs"] == why
    left = doctor_verb._features(versions | {"numba": None, "highspy": None}, ["highspy"], gpus | {"moved": ["torch 9 has no x"]})
    assert list(left.values())[:3] == ["highspy is missing; torch 9 has no x"] * 2 + ["numba is missing"]


def test_doctor_names_a_torch_that_was_not_tested_and_what_it_moved(capsys, monkeypatch):
    monkeypatch.setattr(torch_private, "VERSION", (2, 99))
    moved = {"pytree": [torch_private.Form("torch.utils._trees")]}
    monkeypatch.setattr(torch_private.check_all, "__defaults__", ((2, 99), moved))
    assert main(["doctor", "--json"]) == 1
    record = json.loads(capsys.readouterr().out)
    assert "not among the versions" in record["torch"]["untested"] and "torch.utils._trees" in record["torch"]["moved"][0]


def test_doctor_tries_every_solver(capsys, monkeypatch):
    assert main(["doctor", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["ok"] and record["versions"]["torch"] and set(record["solvers"].values()) == {"ok"}
    tried = selftest.selftest
    monkeypatch.setattr(selftest, "selftest", lambda: tried(8.0))  # negative control: 8 is not the optimum
    assert main(["doctor"]) == 1 and "wrong" in capsys.readouterr().out
    assert set(tried()) == {"auto", "ilp", "dp", "dual", "exhaustive"}
    assert {name for name, said in tried(10.0).items() if said == "ok"} <= {"dp", "dual"}  # they may leave a gap
    asked = []
    monkeypatch.setattr(selftest, "solve", lambda problem, *, solver, time_limit: asked.append(problem) or solve(problem, solver=solver))
    tried()
    judged = {x: evaluate(asked[0], x) for x in product((0, 1), repeat=3)}
    assert {"".join(map(str, x)): (one.cost, one.peak) for x, one in judged.items() if one.cost < math.inf} == {
        "000": (3.0, 12.0), "001": (9.0, 9.0), "011": (11.0, 6.0), "111": (9.0, 3.0),
    }  # fmt: skip
