"""A plan can be marked as verified: with what, where, and for its present layouts only. A plan that never was is named when it runs."""

import json
import logging
from dataclasses import replace

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autoshard
from autoshard import api
from autoshard.cli import main
from autoshard.solution import Placed
from tests.helpers_lower import mesh_of
from tests.helpers_ranks import run_ranks
from tests.helpers_refusals import assert_refused

MODEL = ("models/mlp.py:tiny",)


def planned():
    model, inputs = nn.Linear(8, 8), (torch.rand(4, 8),)
    return model, inputs, api.plan(model, inputs, mesh_of(2), training=True, baselines=False, objective="serial")


def test_a_plan_is_marked_with_what_and_where_it_was_verified(tmp_path):
    model, inputs, solution = planned()
    assert solution.verified is None
    marked = solution.marked(api.verify(model, inputs, solution))
    marked.save(tmp_path / "plan.json")
    fact = autoshard.load(tmp_path / "plan.json").verified
    assert fact == marked.verified
    assert (fact.ranks, fact.device, fact.torch, fact.inputs) == (2, "cpu", torch.__version__, {"input_0": [4, 8]})
    assert 0 <= fact.largest_error < 1e-5


def test_other_layouts_than_those_that_ran_are_not_verified():
    model, inputs, solution = planned()
    marked = solution.marked(api.verify(model, inputs, solution))
    name = next(iter(marked.layouts))
    assert replace(marked, layouts={**marked.layouts, name: Placed((), ("S(1)",))}).verified is None
    for held in ("yes", {}, {"ranks": 2}, {**marked.assumptions["verified"], "more": 1}):
        assert marked.noting(verified=held).verified is None


def test_a_plan_that_is_wrong_can_not_be_marked():
    model, inputs, solution = planned()
    assert_refused("does not compute what the model computes", solution.marked, api.verify(model, inputs, solution, plant_fault=True))


def test_verify_marks_the_file_where_that_is_asked_for_and_the_answer_is_ok(tmp_path, capsys):
    path = str(tmp_path / "plan.json")
    assert main(["plan", *MODEL, "--mesh", "2", "--train", "--no-baselines", "--out", path, "--quiet"]) == 0
    before = (tmp_path / "plan.json").read_text()
    assert main(["verify", path, *MODEL]) == 0 and (tmp_path / "plan.json").read_text() == before
    assert main(["verify", path, *MODEL, "--plant-fault", "--mark"]) == 1 and (tmp_path / "plan.json").read_text() == before
    assert main(["verify", path, *MODEL, "--mark"]) == 0
    after = json.loads((tmp_path / "plan.json").read_text())
    assert after["assumptions"].pop("verified")["ranks"] == 2
    assert after == json.loads(before)


def said(rank, model, inputs, solution):
    """What parallelize logs."""
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("autoshard").addHandler(handler)
    module = autoshard.parallelize(model, solution, init_device_mesh("cpu", (2,)))
    for _ in range(2):
        module(*inputs).sum().backward()
    return records


def test_parallelize_says_once_that_a_plan_was_never_verified():
    model, inputs, solution = planned()
    first, second = run_ranks(2, said, model, inputs, solution)
    assert len(first) == 1 and "the plan was never verified" in first[0] and second == []
    assert run_ranks(2, said, model, inputs, solution.marked(api.verify(model, inputs, solution))) == [[], []]


def test_a_program_of_several_is_marked_in_their_file(tmp_path):
    model, inputs = nn.Linear(8, 8), (torch.rand(4, 8),)
    programs = {"train": autoshard.Program(model, inputs, training=True), "serve": autoshard.Program(model, inputs)}
    autoshard.plan(programs, mesh_of(2)).save(tmp_path / "both.json")
    path = f"{tmp_path / 'both.json'}#serve"
    assert api.verify(model, inputs, autoshard.load(path), mark=path)["ok"]
    both = autoshard.load(tmp_path / "both.json")
    assert both["serve"].verified and not both["train"].verified
