"""Models of all kinds: every op has rows, the plan and random layouts compute what the model computes. The whole table is slow."""

import pytest
import torch
from torch.distributed.tensor.placement_types import Replicate, Shard

import autoshard
from autoshard import api
from autoshard.capture import capture
from autoshard.mesh import Mesh
from autoshard.strategies import Row, candidates, one_axis_rows
from autoshard.strategies.register import REGISTERED
from autoshard.strategies.rows import RULES
from benchmarks.coverage import build, measure, names
from models import moe
from tests.helpers import one_op
from tests.helpers_models import Model, right_plan
from tests.helpers_refusals import assert_refused

SMALL = ["resnet", "dlrm", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3", "mixtral", "bert", "unet"))]


def test_there_are_20_models_and_more():
    assert len(names()) >= 20


@pytest.mark.parametrize("name", SMALL)
def test_every_op_has_rows_and_a_random_layout_is_right(name):
    mesh = Mesh.from_bandwidths((2, 2))
    module, example_inputs = build(name, training=True)
    solution = right_plan(module, example_inputs, mesh, training=True, random=1, fault=name == "dlrm")
    assert solution.replicated_ops == ()


@pytest.mark.slow
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", names())
def test_the_whole_table(name, training):
    row = measure(name, training, random=3)
    assert row["ok"], row
    assert row["misplaced"] == 0
    assert row["unknown"] == []
    assert row["status 8"] == row["status 2x4"] == "optimal"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "deepseek_v3"])
def test_batched_experts_too(name):
    row = measure(name, True, random=2, settings={"experts": "batched_mm"})
    assert row["ok"] and row["unknown"] == [], row


# -- experts --------------------------------------------------------------------------------------------------------------------


def experts(mesh, **sizes):
    module, example_inputs = moe.moe(layers=1, seq=64, batch=64, loss=True, **sizes)
    return api.plan(module, example_inputs, mesh, training=True, objective="serial")


@pytest.mark.parametrize("shape", [(8,), (2, 4)])
def test_experts_are_cut_by_expert_where_that_is_cheaper(shape):
    """64 big experts: their gradients would cost more to reduce than the tokens cost to send."""
    solution = experts(Mesh.from_bandwidths(shape), width=1024, hidden=4096, experts=64)
    cut = ",".join(["S(0)"] * len(shape))  # dim 0 counts the experts
    assert solution.parameters["layers.0.up"]["layout"] == solution.parameters["layers.0.down"]["layout"] == cut
    assert any(kind.startswith("all_to_all") for kind in solution.breakdown["communication"])
    assert solution.cost < min(found["cost_seconds"] for found in solution.baselines.values())


def test_small_experts_stay_whole():
    solution = experts(Mesh.from_bandwidths((8,)), width=16, hidden=16, experts=8)
    assert solution.parameters["layers.0.up"]["layout"] == "R"
    assert not any(kind.startswith("all_to_all") for kind in solution.breakdown["communication"])


# -- rules of the user's own ---------------------------------------------------------------------------------------------------------


@torch.library.custom_op("autoshard_tests::scaled_sum", mutates_args=())
def scaled_sum(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Opaque to autograd and to decompositions: (x * scale) summed over the last dim."""
    return (x * scale).sum(-1)


@scaled_sum.register_fake
def _(x, scale):
    return x.new_empty(x.shape[:-1])


TARGET = "autoshard_tests.scaled_sum.default"


@pytest.fixture
def no_rule():
    yield
    RULES.pop(TARGET, None)
    REGISTERED.discard(TARGET)


def plan_custom():
    with torch.device("meta"):
        parts = {"scale": torch.nn.Parameter(torch.empty(16)), "linear": torch.nn.Linear(16, 16)}
    model, inputs = Model(lambda m, x: scaled_sum(torch.relu(m.linear(x)), m.scale), **parts), (torch.empty(8, 4, 16, device="meta"),)
    return model, inputs, api.plan(model, inputs, Mesh.from_bandwidths((2, 2)), baselines=False, objective="serial")


def test_an_unknown_op_is_replicated_and_said(no_rule):
    model, inputs, solution = plan_custom()
    assert [op["target"] for op in solution.replicated_ops] == [TARGET]
    assert api.verify(model, inputs, solution, random=2)["ok"]


def test_a_registered_rule_is_used_and_verified(no_rule):
    autoshard.register_rule(TARGET, "S(0), R -> S(0)", "S(1), R -> S(1)", "S(2), S(0) -> P", "P, R -> P", "R, P -> P")
    model, inputs, solution = plan_custom()
    assert solution.replicated_ops == ()
    found = candidates(capture(model, inputs, training=False), Mesh.from_bandwidths((2, 2)))
    assert max(map(len, found.of)) > 9
    assert api.verify(model, inputs, solution, random=3)["ok"]


def test_a_wrong_registered_rule_is_found(no_rule):
    autoshard.register_rule(TARGET, "S(2), S(0) -> R")
    model, inputs, solution = plan_custom()
    found = api.verify(model, inputs, solution, random=5)
    assert not found["ok"]
    assert any(mismatch["op"].startswith("scaled_sum") for p in found["plans"] for mismatch in p["placement_mismatches"])


def test_a_rule_may_be_a_function(no_rule):
    @autoshard.register_rule(torch.ops.autoshard_tests.scaled_sum.default)
    def rows(op, inputs):
        return [Row((Shard(d),), (Shard(d), Replicate())) for d in range(len(op.output.shape))]

    graph, tensors, _ = one_op(TARGET, torch.randn(4, 4, 2), torch.randn(2))
    assert one_axis_rows(graph.ops[-1], graph.input_tensors(len(tensors)))[1:] == tuple(rows(graph.ops[-1], tensors))


@pytest.mark.parametrize(
    ("target", "rows", "said"),
    [
        ("nowhere.op.default", ["R -> R"], "there is no operator 'nowhere.op.default'"),
        (TARGET, ["S(0), R, S(0)"], "has no arrow"),
        (TARGET, ["S(0), X -> R"], "expected R, S"),
        ("aten.embedding.default", ["S(0), R -> S(0)"], "has a rule already"),
    ],
)
def test_a_rule_that_can_not_be_is_refused(no_rule, target, rows, said):
    assert_refused(said, autoshard.register_rule, target, *rows)


def test_a_row_of_another_number_of_tensors_is_refused_when_used(no_rule):
    autoshard.register_rule(TARGET, "S(0) -> S(0)")
    assert_refused("1 inputs and 1 outputs; autoshard_tests.scaled_sum.default has 2 and 1", plan_custom)
