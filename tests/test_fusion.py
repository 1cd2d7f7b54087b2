"""Which ops share a kernel of a compiled program, what the kernels read and write, and what plans make of it."""

import networkx as nx
import pytest
import torch
from torch import nn

import autoshard
from autoshard import Mesh
from autoshard.api import simulate
from autoshard.capture import capture_module
from autoshard.graph.records import Fused
from autoshard.strategies import fused
from autoshard.strategies.fusion import MATMULS
from autoshard.strategies.fusion import _groups as groups_of
from models import bert, gpt2, llama, mlp, moe, resnet, unet

X = 64 * 96 * 4  # bytes of the example input
MODELS = {
    "mlp": mlp.tiny, "gpt2": gpt2.tiny, "llama": llama.tiny, "bert": bert.tiny, "moe": moe.tiny, "resnet": resnet.tiny, "unet": unet.tiny,
}  # fmt: skip


class Calls(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.randn(96, 96))

    def forward(self, x):
        return self.function(x, self.weight)


def graph_of(function):
    return fused(capture_module(Calls(function), (torch.randn(64, 96),), training=False).graph)


def kernels(graph):
    """Bytes read and written, and the number of kernels."""
    known = [op for op in graph.ops if op.fused is not None and op.target not in MATMULS]
    read = sum(share * graph.tensor(value).bytes for op in known for share, value in zip(op.fused.reads, op.inputs))
    written = sum(share * t.bytes for op in known for share, t in zip(op.fused.writes, op.outputs) if t is not None)
    return read, written, sum(op.fused.launches for op in known)


def test_a_chain_is_one_kernel_that_reads_and_writes_once():
    assert kernels(graph_of(lambda x, w: torch.relu(x * 2 + 1).exp())) == (X, X, 1)
    assert kernels(graph_of(lambda x, w: x * x + x)) == (X, X, 1)  # the same tensor, three times


def test_a_norm_is_one_kernel_with_what_comes_before_and_after_it():
    def norm(x, w):
        y = torch.relu(x)
        return y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6) * 3

    assert kernels(graph_of(norm)) == (X, X, 1)


def test_reductions_to_other_results_are_kernels_of_their_own():
    read, written, count = kernels(graph_of(lambda x, w: (x.exp().sum(0), x.exp().sum(1))))
    assert count == 2 and (read, written) == (2 * X, 4 * (64 + 96))


def test_a_matmul_divides_kernels():
    graph = graph_of(lambda x, w: torch.relu(torch.relu(x) @ w) * 2)
    assert [op.fused for op in graph.ops if op.target in MATMULS] == [Fused((1.0, 1.0), (1.0,), True)]
    read, written, count = kernels(graph)
    assert (read, written, count) == (2 * X, 2 * X, 2)


def test_a_kernel_does_not_wait_for_itself():
    """y + relu(y) @ w reads y, which its own kernel may not compute: the matmul between them waits for it."""
    graph = graph_of(lambda x, w: (x * 2) + torch.relu(x * 2) @ w)
    assert kernels(graph)[2] == 2 and is_acyclic(graph)


def test_a_cast_is_computed_again_rather_than_written():
    def casts(x, w):
        y = x.double()
        return (y * ((y * 2).float() @ w)).float()

    assert kernels(graph_of(casts)) == (3 * X, 2 * X, 2)  # x, then x and the product; y, of twice the bytes, is nowhere


def test_a_result_is_written_though_nobody_else_reads_it():
    assert kernels(graph_of(lambda x, w: (x + 1, (x + 1).exp())))[1] == 2 * X


def is_acyclic(graph):
    _, group_of = groups_of(graph)
    edges = {
        (group_of.get(root[0], -1 - root[0]), group_of.get(i, -1 - i))
        for i, op in enumerate(graph.ops)
        for root in (graph.storage(value) for value in op.inputs)
    }
    return nx.is_directed_acyclic_graph(nx.DiGraph((a, b) for a, b in edges if a != b))


@pytest.mark.parametrize("name", MODELS)
def test_kernels_of_models_have_an_order_and_move_no_more_than_the_ops_alone(name):
    module, inputs = MODELS[name]()
    graph = fused(capture_module(module, inputs, training=True).graph)
    assert is_acyclic(graph)
    known = [op for op in graph.ops if op.fused is not None and op.target not in MATMULS]
    alone = sum(graph.tensor(value).bytes for op in known for value in op.inputs) + sum(
        t.bytes for op in known for t in op.outputs if t is not None
    )
    read, written, count = kernels(graph)
    assert count < len(known) and read + written < 0.95 * alone
    assert all(len(op.fused.reads) == len(op.inputs) and len(op.fused.writes) == len(op.outputs) for op in known)


@pytest.mark.parametrize("name", ["mlp", "llama", "moe"])
def test_a_compiled_plan_costs_less_and_is_priced_alike_by_all(name, tmp_path):
    module, inputs = MODELS[name]()
    mesh = Mesh.from_bandwidths((4,))
    asked = {"training": True, "baselines": False, "objective": "serial"}
    eager, compiled = (autoshard.plan(module, inputs, mesh, compiled=on, **asked) for on in (False, True))
    assert compiled.cost < eager.cost and compiled.compiled and not eager.compiled
    compiled.save(tmp_path / "plan.json")
    again = autoshard.load(tmp_path / "plan.json")
    checked = autoshard.check(module, inputs, again)
    assert checked.ok and checked.cost == pytest.approx(compiled.cost)
    assert simulate(module, inputs, again, overlap=False).seconds == pytest.approx(compiled.cost)
