"""Attention with dropout is one op: its kernel, its rows, the same mask on any mesh, and no probabilities that are kept."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autoshard import api
from autoshard.capture import capture
from autoshard.cost.compute import op_flops, op_seconds
from autoshard.lower.generator import draws
from autoshard.lower.kernels.random import dropout_attention, dropout_attention_backward
from autoshard.mesh import DEVICES
from autoshard.strategies.candidates import candidates
from tests.helpers_lower import mesh_of
from tests.helpers_models import right_plan
from tests.helpers_refusals import assert_refused

FORWARD, BACKWARD = "autoshard.dropout_attention.default", "autoshard.dropout_attention_backward.default"
BATCH, HEADS, TOKENS, WIDTH = 4, 4, 6, 4


class Attends(nn.Module):
    def __init__(self, groups=HEADS, **options):
        super().__init__()
        self.groups, self.options = groups, options
        self.q, self.k, self.v = (nn.Linear(16, WIDTH * n) for n in (HEADS, groups, groups))

    def forward(self, x):
        q, k, v = (of(x).unflatten(-1, (-1, WIDTH)).transpose(1, 2) for of in (self.q, self.k, self.v))
        if self.groups < HEADS:
            k, v = (y[:, :, None].expand(-1, -1, HEADS // self.groups, -1, -1).flatten(1, 2) for y in (k, v))
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.3 * self.training, **self.options).square().mean()


def inputs():
    return (torch.randn(BATCH, TOKENS, 16, generator=torch.Generator().manual_seed(0)),)


def built(**options):
    torch.manual_seed(0)
    return Attends(**options).train()


@pytest.mark.parametrize("groups", [4, 2])
@pytest.mark.parametrize("options", [{"is_causal": True}, {"attn_mask": torch.zeros(6, 6).fill_diagonal_(-9.0), "scale": 0.3}])
def test_the_kernel_computes_attention_and_its_gradients(groups, options):
    q, k, v = (torch.randn(2, n, 6, 4, dtype=torch.float64).requires_grad_() for n in (4, groups, groups))
    call = dict(attn_mask=None, is_causal=False, scale=None) | options
    with torch.no_grad():
        out, logsumexp, kept = dropout_attention(q, k, v, 0.3, **call)
    keys, values = (x.repeat_interleave(4 // groups, 1) for x in (k, v))
    scores = (q @ keys.mT) * (call["scale"] or 0.5)
    scores = scores.masked_fill(~torch.ones(6, 6).tril().bool(), -torch.inf) if call["is_causal"] else scores + call["attn_mask"]
    expected = (scores.softmax(-1) * kept / 0.7) @ values
    grad = torch.randn_like(expected)
    with torch.no_grad():
        gradients = dropout_attention_backward(grad, q, k, v, out, logsumexp, kept, 0.3, **call)
    assert 0.5 < kept.double().mean() < 0.9 and (out - expected).abs().max() < 1e-12
    for found, of in zip(gradients, torch.autograd.grad(expected, (q, k, v), grad), strict=True):
        assert (found - of).abs().max() < 1e-12


@pytest.mark.parametrize("groups", [4, 2])
def test_it_is_captured_as_one_op_that_keeps_no_probabilities(groups):
    graph = capture(built(groups=groups, is_causal=True), inputs(), training=True)
    targets = [op.target for op in graph.ops]
    assert targets.count(FORWARD) == targets.count(BACKWARD) == 1
    assert not any(word in target for target in targets for word in ("bmm", "softmax", "native_dropout"))
    assert graph.input_tensors(targets.index(FORWARD))[1].shape[1] == groups
    of_scores = {t.dtype for op in graph.ops for t in op.outputs if t is not None and t.shape == (BATCH, HEADS, TOKENS, TOKENS)}
    assert of_scores == {"bool"}
    assert draws(FORWARD) and not draws(BACKWARD) and not draws("autoshard.attention.default")


@pytest.mark.parametrize("options", [{"groups": 2, "is_causal": True}, {}], ids=["grouped, causal", "plain"])
def test_every_mesh_drops_what_the_model_drops(options):
    module = built(**options)
    solution = right_plan(module, inputs(), mesh_of(2, 2), training=True, random=2, fault=not options)
    assert not options or api.dry_run(module, inputs(), solution)["ok"]


def test_queries_are_sharded_unless_causal_and_heads_with_their_keys():
    def layouts(**options):
        graph = capture(built(**options), inputs(), training=True)
        place = next(i for i, op in enumerate(graph.ops) if op.target == FORWARD)
        return {tuple(str(layout[0]) for layout in c.inputs[:2]) for c in candidates(graph, mesh_of(2)).of[place]}

    assert layouts() == {("R", "R"), ("S(0)", "S(0)"), ("S(1)", "S(1)"), ("S(2)", "R")}
    assert layouts(is_causal=True, groups=2) == {("R", "R"), ("S(0)", "S(0)"), ("S(1)", "S(1)")}


def test_without_training_dropout_is_refused():
    assert_refused(r"^dropout is on .*call model.eval\(\) first$", capture, built(), inputs(), training=False)
    assert "autoshard.attention.default" in {op.target for op in capture(built().eval(), inputs(), training=False).ops}


def test_its_price_holds_the_scores_that_it_writes():
    q, kept, rows = ((2, 4, 512, 64), "float32"), ((2, 4, 512, 512), "bool"), ((2, 4, 512), "float32")
    plain = op_seconds("autoshard.attention.default", [q] * 3, [q, rows], None, DEVICES["h100"])
    dropping = op_seconds(FORWARD, [q] * 3, [q, rows, kept], None, DEVICES["h100"])
    assert op_flops(FORWARD, [q] * 3, [q, rows, kept]) == op_flops("autoshard.attention.default", [q] * 3, [q, rows])
    assert dropping > plain + 8 * 4 * 2 * 4 * 512 * 512 / DEVICES["h100"].memory_bandwidth / 2
