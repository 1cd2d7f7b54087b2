"""Models that nobody wrote rules for: every op has rows, layouts at random are right, and a row of the table survives anything."""

import json

import pytest
import torch

from autoshard import api
from autoshard.capture import capture
from autoshard.mesh import Mesh
from autoshard.strategies import candidates
from benchmarks import coverage
from benchmarks.strangers import STRANGERS, Decode, build, features
from benchmarks.trained_steps import difference
from tests.helpers_models import right_plan

QUICK = [
    ("weight_norm", True),
    ("activations", True),
    ("folded_patches", True),
    ("padded_convolutions", True),
    ("decode_index_copy", False),
    ("lstm", False),
    ("lstm", True),
]
KNOWN = ["mamba", "fnet", "detr"]
MAY_BE_REFUSED = {"transformer_decoder_mask"}  # with a sentence, which names the cure


def test_there_are_60_strangers_and_more():
    assert len(STRANGERS) >= 60


@pytest.mark.parametrize(("name", "training"), QUICK)
def test_every_op_has_rows_and_a_random_layout_is_right(name, training):
    module, example_inputs = build(name, training)
    control = name == "weight_norm"
    mesh, random = Mesh.from_bandwidths((2,)), 4 if control else 1
    assert right_plan(module, example_inputs, mesh, training=training, random=random, fault=control).replicated_ops == ()


@pytest.mark.parametrize("name", KNOWN)
def test_every_op_has_rows(name):
    module, example_inputs = build(name, False)
    graph = capture(module, example_inputs, training=False)
    assert {graph.ops[i].target for i in candidates(graph, Mesh.from_bandwidths((2,))).unknown} == set()


def decode(put):
    """As the models of the table, with caches that matter."""
    with torch.device("meta"):
        module = Decode(put, layers=1, width=1024, heads=16, length=2048, batch=8)
        inputs = (features(8, 1, 1024), torch.zeros(1, dtype=torch.int64))
    return api.plan(module, inputs, Mesh.from_bandwidths((8,)), training=False, baselines=False, objective="serial")


def test_a_cache_written_by_index_copy_costs_what_one_written_by_where_does():
    copied, selected = decode("index_copy"), decode("where")
    assert copied.replicated_ops == ()
    assert copied.layouts["keys0"].outputs[0] == selected.layouts["keys0"].outputs[0] != "R"
    assert copied.cost <= 1.01 * selected.cost


# -- the table --------------------------------------------------------------------------------------------------------------------


def test_two_builds_are_the_same_model():
    (first, inputs), (second, again) = build("jamba", True), build("jamba", True)
    assert all(a.equal(b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert inputs["input_ids"].equal(again["input_ids"])


GOOD = {"model": "rms_norm", "mode": "training", "ok": True, "run_ok": True}


@pytest.mark.parametrize(
    ("row", "verdict"),
    [
        (GOOD, "ok"),
        (GOOD | {"ok": False}, "wrong"),
        (GOOD | {"run_ok": False}, "wrong"),
        (GOOD | {"verify_stopped": "a sentence", "verify_kind": "refused"}, "not runnable"),
        (GOOD | {"run_stopped": "a sentence", "run_kind": "traceback"}, "not runnable"),
        (GOOD | {"plan_stopped": "a sentence", "plan_kind": "refused"}, "not capturable"),
        (GOOD | {"plan_stopped": "KeyError: 3", "plan_kind": "traceback"}, "failed"),
        (GOOD | {"model": "lazy_linear", "plan_stopped": "it has no shape yet: run it", "plan_kind": "refused"}, "has no plan"),
        (GOOD | {"model": "lazy_linear", "plan_stopped": "another sentence", "plan_kind": "refused"}, "not capturable"),
        (GOOD | {"model": "lazy_linear", "plan_stopped": "no shape yet", "plan_kind": "traceback"}, "failed"),
        (GOOD | {"model": "lazy_linear"}, "wrong"),
        (GOOD | {"itself_stopped": "not on this machine", "itself_kind": "traceback"}, "itself"),
        (GOOD | {"model": "dropout", "verify_stopped": "it has dropout; call .eval()", "verify_kind": "refused"}, "ok"),
        (GOOD | {"model": "dropout", "verify_stopped": "KeyError: 3", "verify_kind": "traceback"}, "not runnable"),
    ],
)
def test_what_a_row_is_called(row, verdict):
    assert coverage.verdict(row) == verdict


def test_a_difference_is_measured_and_none_is_overlooked():
    for x in (torch.tensor([1 + 2j, 3.0]), torch.tensor([2.0, 3.0], dtype=torch.float64)):
        assert difference(x, x.clone()) == 0
        assert difference(x + 1, x) == pytest.approx(1 / 3) and difference(x + 1, x, least=5.0) == pytest.approx(1 / 5)
        assert difference(x[:1], x) == difference(x * float("nan"), x) == float("inf")
    assert difference(torch.tensor([True]), torch.tensor([False])) == 1


def test_a_model_that_does_not_end_is_a_row():
    row = coverage.row_of("rms_norm", False, limit=0.1)
    assert row["verdict"] == "failed" and "within 0 s" in row["plan_stopped"]


@pytest.mark.slow
def test_a_wrong_result_of_the_ranks_is_seen(monkeypatch):
    """The negative control of `run`: the ranks are given a model of other weights than the one that they are compared with."""
    module, example_inputs = build("weight_norm", False)
    given = coverage.autoshard.parallelize

    def parallelize(model, solution, mesh):
        for parameter in model.parameters():
            parameter.data += 1
        made = given(model, solution, mesh)
        for parameter in model.parameters():
            parameter.data -= 1
        return made

    assert coverage.ran(module, example_inputs, False)["run_ok"]
    monkeypatch.setattr(coverage.autoshard, "parallelize", parallelize)
    assert not coverage.ran(module, example_inputs, False)["run_ok"]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "training"), [(name, mode) for name, row in STRANGERS.items() if not row.kind for mode in row.modes])
def test_the_whole_table(name, training):
    row = coverage.row_of(name, training, random=2)
    json.dumps(row)
    allowed = {"has no plan"} if STRANGERS[name].has_no_plan else {"ok", "itself"}
    allowed |= {"not capturable"} if name in MAY_BE_REFUSED else set()
    assert row["verdict"] in allowed, row
    if row["verdict"] == "not capturable":
        assert STRANGERS[name].refused in row["plan_stopped"]
    assert row.get("unknown", []) == []
