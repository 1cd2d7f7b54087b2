"""Prices of one's own: of one operator, and a cost model in place of the package's formulas."""

import itertools
import math

import numpy as np
import pytest
import torch
from torch import nn

import autoshard
from autoshard.cost.compute import PRICES, Price
from autoshard.formulate import formulate
from autoshard.mesh import AbsentCostModel
from autoshard.problem import evaluate
from autoshard.strategies import candidates
from tests.helpers import fast_mesh, tiny_graph
from tests.helpers_models import refusal
from tests.test_passes import run


class Integers:
    """Whole numbers, so that sums are exact whatever their order."""

    name, fingerprint = "integers", "1"

    def compute(self, target, inputs, outputs, alias, device, share=1.0, fused=None):
        return 0 if alias is not None else sum(math.prod(shape) for shape, _ in inputs)

    def collective(self, collective, axis, size):
        return np.floor(size) * axis.size + {"all_gather": 1, "all_to_all": 2}.get(collective, 3)

    def transfer(self, size, exposed, device):
        return int(size)

    def memory(self, kind, size, device):
        return np.floor(size) + 5


class Chain(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        self.weights = nn.ParameterList(torch.empty(width, 8) if k % 2 == 0 else torch.empty(8, width) for k in range(depth))

    def forward(self, x):
        for weight in self.weights:
            x = x @ weight
        return x


SIZES = [(8, 4, 1), (4, 16, 1), (8, 8, 2)]
FEW = [(shape, *sizes) for shape in ((2,), (4,), (2, 2)) for sizes in SIZES if len(shape) + sizes[-1] < 4]  # choices: all are tried


@pytest.mark.parametrize("shape, rows, width, depth", FEW)
def test_plans_with_integers_are_those_of_brute_force(shape, rows, width, depth):
    mesh = autoshard.Mesh(fast_mesh(shape).axes, fast_mesh(shape).device, cost_model=Integers())
    module, inputs = Chain(width, depth), (torch.empty(rows, width, device="meta"),)
    plan = autoshard.plan(module, inputs, mesh, objective="serial", baselines=False)
    problem = autoshard.problem_of(module, inputs, plan)
    every = itertools.product(*(range(len(c)) for c in problem.node_costs))
    assert plan.cost == min(evaluate(problem, choice).cost for choice in every) == int(plan.cost)
    assert plan.assumptions["cost_model"] == "integers" and plan.mesh.to_dict()["cost_model"] == {"name": "integers", "fingerprint": "1"}


def test_every_second_of_a_plan_is_one_of_the_model():
    graph, info = run(kind="joint", cost_model=Integers())
    model, nodes = Integers(), [n.meta["autoshard_node"] for n in graph.graph.nodes]
    for one in (r for node in nodes for r in node.redistributions.values()):
        assert one.seconds == sum(step.seconds for step in one.steps) == int(one.seconds)
        assert all(step.seconds == int(step.seconds) for step in one.steps)
    assert info["objective"] == "serial" and sum(n.seconds + n.redistribution_seconds for n in nodes) == info["cost_seconds"]
    assert model.compute("aten.mm.default", [((2, 3), "float32")], [], None, None) == 6


@pytest.mark.parametrize("name, training", [("mlp", True), ("gpt2", True)])
def test_the_default_through_the_protocol_is_bit_equal(name, training):
    graph, mesh = tiny_graph(name, training), fast_mesh((2, 4))
    own = autoshard.Mesh(mesh.axes, mesh.device, cost_model=autoshard.DefaultCosts())
    a, b = (formulate(graph, candidates(graph, m), m, training=None).problem for m in (mesh, own))
    assert all((x == y).all() for x, y in zip(a.node_costs, b.node_costs))
    assert all((x.table == y.table).all() for x, y in zip(a.edges, b.edges))


def test_a_saved_plan_names_the_model_and_can_not_be_priced_without_it(tmp_path):
    _, info = run(kind="exported", cost_model=Integers())
    info["solution"].save(tmp_path / "plan.json")
    loaded = autoshard.load(tmp_path / "plan.json")
    assert loaded.mesh.cost_model == AbsentCostModel("integers", "1") and loaded.cost == info["solution"].cost
    graph, _ = run(kind="exported")
    sentence = refusal(autoshard.problem_of, graph, None, loaded)
    assert sentence.startswith("the plan's seconds are those of the cost model 'integers'"), sentence
    assert "objective='serial'" in refusal(run, kind="exported", cost_model=Integers(), objective="overlapped")


def test_a_registered_price_counts_and_is_part_of_the_fingerprint(monkeypatch):
    monkeypatch.setattr("autoshard.cost.compute.PRICES", PRICES)
    before = run(kind="exported", objective="serial")[1]["solution"]
    try:
        autoshard.register_price("aten.gelu.default", seconds=lambda inputs, outputs, device: 1.0)
        after = run(kind="exported", objective="serial")[1]["solution"]
        assert after.cost == pytest.approx(2.0, abs=1.0) and after.fingerprint["prices"] != before.fingerprint["prices"]
        autoshard.register_price("aten.gelu.default", bytes=lambda inputs, outputs: 0)
        assert run(kind="exported", objective="serial")[1]["solution"].cost < after.cost
    finally:
        PRICES.pop("aten.gelu.default", None)
    assert run(kind="exported", objective="serial")[1]["solution"].cost == before.cost
    assert refusal(autoshard.register_price, "aten.gelu.default").startswith("register_price takes seconds or bytes, one of them")


WRONG = [float("nan"), -1.0, "3", None, [1.0, None]]


@pytest.mark.parametrize("found", WRONG, ids=map(repr, WRONG))
@pytest.mark.parametrize("method", ["compute", "collective", "memory"])
def test_what_a_cost_model_says_is_checked(method, found):
    own = type("Wrong", (autoshard.DefaultCosts,), {"name": "wrong", "fingerprint": "1", method: lambda self, *args: found})()
    sentence = refusal(run, kind="joint", cost_model=own)
    assert f" by the cost model 'wrong' is {found!r}; expected numbers of 0 or more" in sentence and sentence.startswith(f"{method} of ")


def test_a_registered_price_is_checked(monkeypatch):
    for found in (*WRONG[:4], float("-inf")):
        monkeypatch.setitem(PRICES, "aten.gelu.default", Price(lambda inputs, outputs, device, found=found: found))
        assert refusal(run, kind="exported").startswith(f"the price of aten.gelu.default is {found!r}; expected numbers")


def test_an_object_without_the_methods_is_no_cost_model():
    lacking = type("Lacking", (), {"name": "mine", "compute": lambda self: 1.0})()
    assert refusal(run, kind="exported", cost_model=lacking).startswith(
        "the cost_model lacks collective, transfer, memory, fingerprint; expected an object with compute, collective, transfer, memory"
    )
    assert refusal(run, kind="exported", cost_model=autoshard.DefaultCosts).startswith("the cost_model is a class; expected an object")
