"""verify where rounding decides: ill conditioned values, comparisons and choices between equal numbers, values that nothing reads."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import autoshard
from autoshard.capture import capture
from autoshard.lower import verify_program
from autoshard.lower.rounding import difference, in_float64, noise_of
from autoshard.lower.run import SimulatedRanks
from autoshard.lower.unsharded import run_unsharded
from tests.helpers import fast_mesh
from tests.helpers_models import Model, right_plan


def network(end):
    """What its end gets is equal but for rounding."""
    torch.manual_seed(0)
    return Model(lambda m, x: end(body(m, x), body(m, x.flip(0)).flip(0)), up=nn.Linear(32, 32), down=nn.Linear(32, 32))


def body(m, x):
    return m.down(m.up(x).tanh())


EQUAL, CHOSEN, CONDITION = {
    "==": lambda y, z: ((y == z).float().mean(), y.mean()),
    ">=, returned": lambda y, z: (y.softmax(-1).sum(-1) >= 1, y.mean()),
    "where": lambda y, z: torch.where(y.sum(-1) > z.sum(-1), y.mean(-1), 1 - y.mean(-1)).mean(),
    "equal sums": lambda y, z: ((y.sum(0) == y.flip(0).sum(0)).float().mean(), y.mean()),
}, {
    "argmax of differences": lambda y, z: ((y - z).argmax(-1), y.mean()),
    "order of equal numbers": lambda y, z: (y.softmax(-1).sum(-1).sort().indices, y.mean()),
    "the largest": lambda y, z: torch.where(y == y.amax(-1, keepdim=True), y, 0.0).sum(),
}, {
    "variance of large numbers": lambda y, z: (y + 100).pow(2).mean() - (y + 100).mean().pow(2),
    "inverse": lambda y, z: torch.linalg.inv_ex(y.T @ y / 32 + 1e-6 * torch.eye(32))[0].mean(),
    "sum over a difference": lambda y, z: (y / (y.sum(-1, keepdim=True) - y.flip(-1).sum(-1, keepdim=True) + 1e-7)).mean(),
}  # fmt: skip
ENDS = EQUAL | CHOSEN | CONDITION
SOME = ["==", ">=, returned", "argmax of differences", "inverse"]
X = (torch.randn(16, 32, generator=torch.Generator().manual_seed(0)),)


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("end", [end if end in SOME else pytest.param(end, marks=pytest.mark.slow) for end in ENDS])
def test_rounding_is_no_alarm_and_a_fault_is_one(end, training):
    right_plan(network(ENDS[end]), X, fast_mesh((2, 2)), training=training, random=2, fault=True)


def outcome(solution, graph, values, reference):
    return verify_program(graph, solution.layouts, solution.results, solution.mesh, values, reference)


def verified(end):
    model = network(ENDS[end])
    solution = autoshard.plan(model, X, fast_mesh((2, 2)), training=False, baselines=False, objective="serial")
    graph = capture(model, X, training=False)
    values, reference = run_unsharded(model, X, graph, training=False, seed=0)
    return solution, graph, values, reference


@pytest.mark.parametrize("end", ["==", "where", "argmax of differences"])
def test_one_wrong_choice_on_one_rank_is_found(end, monkeypatch):
    """The op has right inputs on all ranks, and one rank makes something else of them."""
    solution, graph, values, reference = verified(end)
    assert outcome(solution, graph, values, reference).ok
    target = {"==": "aten.eq.Tensor", "where": "aten.gt.Tensor", "argmax of differences": "aten.argmax.default"}[end]
    run = SimulatedRanks.run

    def wrong(self, record, *args):
        outputs = run(self, record, *args)
        if record.target == target:
            y = outputs[-1][0].clone()
            y.view(-1)[0] = ~y.view(-1)[0] if y.dtype == torch.bool else (y.view(-1)[0] + 1) % 32
            outputs = [*outputs[:-1], (y, *outputs[-1][1:])]
        return outputs

    monkeypatch.setattr(SimulatedRanks, "run", wrong)
    found = outcome(solution, graph, values, reference)
    assert [graph.ops[graph.index[m.op]].target for m in found.placement_mismatches] == [target]


def test_a_wrong_input_is_not_taken_for_rounding(monkeypatch):
    """Both sides of a comparison reach one rank negated, which its op can't know."""
    solution, graph, values, reference = verified("where")
    run = SimulatedRanks.run

    def wrong(self, record, *args):
        if record.target == "aten.gt.Tensor":
            for slot in record.inputs:
                self.held[slot.name] = [*self.held[slot.name][:-1], -self.held[slot.name][-1]]
        return run(self, record, *args)

    monkeypatch.setattr(SimulatedRanks, "run", wrong)
    assert not outcome(solution, graph, values, reference).ok


@pytest.mark.parametrize("end", ["variance of large numbers", "inverse", ">=, returned"])
def test_a_wrong_reference_is_found_beside_rounding(end):
    solution, graph, values, reference = verified(end)
    wrong = {key: ~x if x.dtype == torch.bool else x * 1.5 + 0.1 for key, x in reference.items()}
    assert outcome(solution, graph, values, reference).ok and not outcome(solution, graph, values, wrong).ok


def test_what_nothing_reads_is_not_compared(monkeypatch):
    model = network(lambda y, z: y.topk(3).values.mean())
    solution = autoshard.plan(model, X, fast_mesh((2, 2)), training=False, baselines=False, objective="serial")
    run = SimulatedRanks.run

    def wrong(self, record, *args):
        outputs = run(self, record, *args)
        return [(y[0], y[1] + 1) for y in outputs] if record.target == "aten.topk.default" else outputs

    monkeypatch.setattr(SimulatedRanks, "run", wrong)
    assert autoshard.verify(model, X, solution)["ok"]
    read = network(lambda y, z: torch.gather(z, 1, y.topk(3).indices).mean())
    solution = autoshard.plan(read, X, fast_mesh((2, 2)), training=False, baselines=False, objective="serial")
    assert not autoshard.verify(read, X, solution)["ok"]


def test_noise_counts_what_differs():
    x = torch.tensor([1.0, 2.0])
    assert difference(x, x.double() + 0.5) == 0.5 and difference(x == 1, x == x) == 1 and noise_of(x, []) == 0
    assert noise_of(x.long(), [x.long(), x.long() + 1]) == 2 and noise_of(x.long(), [x.long()]) == 0


def test_a_graph_in_float64_has_no_narrower_floats():
    _, graph, *_ = verified("==")
    wide = in_float64(graph)
    assert {t.dtype for op in wide.ops for t in op.outputs if t} == {"float64", "bool"}
    assert "float32" in {t.dtype for op in graph.ops for t in op.outputs if t} and replace(wide, ops=graph.ops) == graph
