"""What a compiled training step computes again in its backward pass, in what order, and what its plans make of it."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import autoshard
from autoshard import Mesh
from autoshard.api import simulate
from autoshard.capture import capture_module
from autoshard.graph import SUFFIX, recompute_ops
from autoshard.report.planned import planned_report
from autoshard.report.terminal import as_text
from autoshard.strategies import computed_again
from autoshard.strategies.partitioning import MOST
from models import bert, gpt2, llama, moe, unet

PAIR = Mesh.from_bandwidths((2,), devices_per_node=2)


class Calls(nn.Module):
    def __init__(self, function, count=3, width=32):
        super().__init__()
        self.function, self.weights = function, nn.ParameterList(torch.randn(width, width) / 8 for _ in range(count))

    def forward(self, x):
        return self.function(x, *self.weights)


def graph_of(function, **sizes):
    return capture_module(Calls(function, **sizes), (torch.randn(64, 32),), training=True).graph


def gated(x, w, v, u):
    return (F.silu(x @ w) * (x @ v)) @ u


def normed(x, w, v, u):
    y = (x @ w).bfloat16()
    z = y.float()
    z = (z * torch.rsqrt(z.square().mean(-1, keepdim=True) + 1e-6)).bfloat16()
    return (z.float() @ v) @ u


def operators(graph, keeping="norms"):
    """Of the ops that run again, views left out."""
    ops = [graph.ops[graph.index[name]] for name in computed_again(graph, keeping)]
    return sorted(op.target.split(".")[1] for op in ops if not op.is_view)


def kept(graph):
    """The operators of what the backward reads of the forward, but parameters and inputs."""
    read = {graph.storage(value)[0] for op in graph.ops if op.backward for value in op.inputs}
    return sorted(graph.ops[i].target.split(".")[1] for i in read if not (graph.ops[i].backward or graph.ops[i].is_placeholder))


def test_activations_and_products_are_computed_again_and_what_they_read_is_kept():
    graph = graph_of(gated)
    assert operators(graph) == ["mul", "silu"] and operators(graph, "matmuls") == ["silu"]
    assert operators(graph_of(lambda x, w, v, u: F.gelu(F.gelu(x @ w) @ v) @ u)) == ["gelu", "gelu"]
    assert operators(graph_of(lambda x, w, v, u: (x @ w).relu() @ v @ u)) == []  # its backward reads the result, which is as large
    rewritten = recompute_ops(graph, computed_again(graph, ""))
    assert all(op.backward for op in rewritten.ops if op.name.endswith(SUFFIX))
    assert set(kept(graph)) - set(kept(rewritten)) == {"silu", "mul"} and set(kept(rewritten)) == {"mm"}


def test_a_norm_that_a_matmul_reads_is_computed_again_if_asked_for():
    graph = graph_of(normed)
    assert computed_again(graph, "norms") < computed_again(graph, "")
    assert "mul" not in operators(graph) and "mul" in operators(graph, "")


def test_a_chain_is_longer_than_the_stack_is_deep():
    def chain(x, w, v, u):
        y = x @ w
        for _ in range(500):
            y = y + 1.0
        return F.silu(y) @ v @ u

    assert operators(graph_of(chain), "") == ["silu"]


def test_what_is_drawn_is_kept():
    graph = graph_of(lambda x, w, v, u: F.dropout(F.silu(x @ w), 0.5) @ v @ u)
    assert not any(graph.ops[graph.index[name]].kind == "random" for name in computed_again(graph, ""))


def test_sums_of_residuals_are_no_chain_from_first_to_last():
    """In float32 beside results in 16 bits each sum is computed of few bytes, and so would all of them."""

    def residuals(x, *weights):
        for w in weights:
            x = x + (F.silu(x) @ w).bfloat16()
        return x

    graph = graph_of(residuals, count=12)
    names = computed_again(graph, "")
    rewritten = recompute_ops(graph, names)
    sums = [op.name for op in rewritten.ops if op.name.startswith("add") and op.name.endswith(SUFFIX)]
    longest, chain = 0, {}
    for name in sums:
        op = rewritten.ops[rewritten.index[name]]
        chain[name] = 1 + max((chain.get(rewritten.ops[i].name, 0) for i, _ in op.inputs), default=0)
        longest = max(longest, chain[name])
    assert 0 < longest <= MOST


@pytest.mark.parametrize("build", [llama.tiny, gpt2.tiny, bert.tiny, unet.tiny, moe.tiny], ids=lambda build: build.__module__[7:])
def test_plans_compute_what_one_device_computes_and_need_less(build):
    model, inputs = build()
    plain, compiled = (autoshard.plan(model, inputs, PAIR, training=True, compiled=c, objective="serial") for c in (False, True))
    assert compiled.peak_bytes <= plain.peak_bytes and not plain.computed_again
    assert autoshard.verify(model, inputs, compiled)["ok"]


def test_a_saved_plan_computes_the_same_again(tmp_path):
    model, inputs = llama.tiny()
    plan = autoshard.plan(model, inputs, PAIR, training=True, compiled=True, recompute=1, objective="serial")
    plan.save(tmp_path / "plan.json")
    again = autoshard.load(tmp_path / "plan.json")
    assert again.computed_again == plan.computed_again and len(plan.computed_again) > 4
    assert "computed again by kernels in the backward pass: " in " ".join(as_text(planned_report(plan)).split())
    line = simulate(model, inputs, again, overlap=False)
    assert line.seconds == pytest.approx(plan.cost, rel=1e-9) and line.peak_bytes == pytest.approx(plan.peak_bytes)


def test_where_memory_is_short_more_is_computed_again():
    torch.manual_seed(0)
    model, inputs = Calls(lambda x, *w: normed(normed(x, *w[:3]), *w[3:]), count=6), (torch.randn(4096, 32),)
    options = {"training": True, "compiled": True, "objective": "serial", "baselines": False, "pins": {"input_0": "S(0)"}}
    roomy = autoshard.plan(model, inputs, PAIR, **options)
    tight = autoshard.plan(model, inputs, PAIR, **options, memory_limit=roomy.peak_bytes * 0.95)
    assert set(roomy.computed_again) < set(tight.computed_again) and tight.peak_bytes < roomy.peak_bytes
    assert tight.cost >= roomy.cost
