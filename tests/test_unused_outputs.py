"""Backward ops of which any subset of outputs is unused, because parameters are frozen: planned, verified, on layouts drawn at random."""

from itertools import combinations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autoshard import api
from autoshard.capture import attention
from tests.helpers_lower import mesh_of
from tests.helpers_models import Model


def trained(inner, num_inputs=1):
    """A module whose inputs are scaled by parameters, so that their gradients can be wanted or not."""

    def forward(m, *inputs):
        y = m.inner(*(x * s for x, s in zip(inputs, m.scales)), *inputs[num_inputs:])
        return (y[0] if isinstance(y, tuple) else y).square().mean()

    return Model(forward, inner=inner, scales=nn.ParameterList(torch.rand(1) for _ in range(num_inputs)))


def function(call, *parameters):
    return Model(lambda m, *inputs: call(*inputs, *m.held), held=nn.ParameterList(parameters))


def repeated(q, k, v, **options):
    """Grouped queries as transformers repeats keys and values for them."""
    k, v = (x[:, :, None].expand(-1, -1, q.shape[1] // x.shape[1], -1, -1).reshape(x.shape[0], q.shape[1], *x.shape[2:]) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, **options)


def attended(heads, attend, **options):
    tensors = [torch.rand(4, n, 8, 4) for n in (4, heads, heads)]
    return trained(function(lambda q, k, v: attend(q, k, v, **options)), 3), tensors


def of_experts():
    """Tokens and weights as scaled inputs, the experts' matrices as parameters."""
    ids = torch.arange(16).reshape(8, 2) % 4
    inner = function(
        lambda x, w, up, down: torch.ops.autoshard.experts(x, ids, w, up, down, "silu"), torch.rand(4, 8, 16), torch.rand(4, 8, 8)
    )
    return trained(inner, 2), [torch.rand(8, 8), torch.rand(8, 2)]


sdpa = F.scaled_dot_product_attention
x = torch.rand(8, 4, 8)
image = torch.rand(8, 4, 8, 8)
CASES = {
    "linear": lambda: (trained(nn.Linear(8, 4)), [x]),
    "matmul": lambda: (trained(function(torch.matmul), 2), [torch.rand(4, 8, 8), torch.rand(4, 8, 4)]),
    "baddbmm": lambda: (trained(function(torch.baddbmm), 3), [torch.rand(4, 8, 4), torch.rand(4, 8, 8), torch.rand(4, 8, 4)]),
    "bilinear products": lambda: (trained(function(lambda a, b, w: torch.einsum("bi,bj,oij->bo", a, b, w), torch.rand(4, 8, 8)), 2),
                                  [torch.rand(8, 8), torch.rand(8, 8)]),
    "attention": lambda: attended(4, sdpa),
    "causal attention": lambda: attended(4, sdpa, is_causal=True),
    "masked attention": lambda: attended(4, sdpa, attn_mask=torch.rand(8, 8) > 0.3),
    "grouped attention": lambda: attended(2, sdpa, is_causal=True, enable_gqa=True),
    "repeated keys and values": lambda: attended(2, repeated, is_causal=True),
    "one repeated head": lambda: attended(1, repeated),
    "attention with dropout": lambda: attended(4, sdpa, dropout_p=0.5),
    "layer norm": lambda: (trained(nn.LayerNorm(8)), [x]),
    "rms norm": lambda: (trained(nn.RMSNorm(8)), [x]),
    "group norm": lambda: (trained(nn.GroupNorm(2, 4)), [x]),
    "instance norm": lambda: (trained(nn.InstanceNorm2d(4, affine=True)), [image]),
    "batch norm": lambda: (trained(nn.BatchNorm2d(4)), [image]),
    "batch norm in inference": lambda: (trained(nn.BatchNorm2d(4).eval()), [image]),
    "weight norm": lambda: (trained(nn.utils.parametrizations.weight_norm(nn.Linear(8, 4))), [x]),
    "conv1d": lambda: (trained(nn.Conv1d(4, 8, 3)), [x]),
    "conv2d": lambda: (trained(nn.Conv2d(4, 8, 3, stride=2)), [image]),
    "grouped conv2d": lambda: (trained(nn.Conv2d(4, 8, 3, groups=2)), [image]),
    "transposed conv2d": lambda: (trained(nn.ConvTranspose2d(4, 8, 3)), [image]),
    "conv3d": lambda: (trained(nn.Conv3d(2, 4, 3)), [torch.rand(4, 2, 4, 4, 4)]),
    "lstm": lambda: (trained(nn.LSTM(8, 8, batch_first=True)), [x]),
    "gru": lambda: (trained(nn.GRU(8, 8, batch_first=True)), [x]),
    "embedding bag": lambda: (trained(function(lambda w, table, ids: F.embedding_bag(ids.long(), table, per_sample_weights=w, mode="sum"),
                                               torch.rand(16, 8)), 1), [torch.rand(8, 4)]),
    "experts": of_experts,
    "prelu": lambda: (trained(nn.PReLU(4)), [x]),
    "where": lambda: (trained(function(lambda a, b: torch.where(a > b, a * b, b)), 2), [x, x.flip(0)]),
}  # fmt: skip


FEW = ["grouped attention", "repeated keys and values", "layer norm", "conv2d", "batch norm", "lstm"]


def wrong_plans(name, sizes, subsets):
    """Of a case with these subsets of its parameters trained: what can't be planned, doesn't verify or has other gradients."""
    wrong = {}
    for some in subsets:
        torch.manual_seed(0)
        model, inputs = CASES[name]()
        for k in range(len(model.scales)):  # by column, so that no norm makes a gradient 0 but for rounding
            model.scales[k] = nn.Parameter(torch.rand(inputs[k].shape[-1:]))
        for parameter, number in zip(model.parameters(), range(99)):
            parameter.requires_grad_(number in some)
        solution = api.plan(model, tuple(inputs), mesh_of(*sizes), training=True, baselines=False, objective="serial")
        assert sum(key.startswith("gradient:") for key in solution.results) == len(some)
        report = api.verify(model, tuple(inputs), solution, random=2)
        if not report["ok"]:
            wrong[some] = [row for plan in report["plans"] for row in plan["placement_mismatches"]][:2] or report
    return wrong


def numbers(name):
    return range(len(list(CASES[name]()[0].parameters())))


@pytest.mark.parametrize("name", FEW)
def test_a_backward_op_runs_with_one_gradient_alone(name):
    """The last parameter alone, and all but the first."""
    assert not wrong_plans(name, (2,), [(numbers(name)[-1],), tuple(numbers(name)[1:])])


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(2,), (2, 2)], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_a_backward_op_runs_with_any_subset_of_its_gradients(name, sizes):
    every = [some for n in range(1, len(numbers(name)) + 1) for some in combinations(numbers(name), n)]
    assert not wrong_plans(name, sizes, every)


def test_shapes_of_unused_outputs_that_are_those_of_repeated_keys_are_found(monkeypatch):
    """As they were before keys and values were undone together."""
    right = attention._ungroup

    def wrong(forward, backwards):
        values = {node: node.meta["val"] for node in backwards}
        right(forward, backwards)
        for node, value in values.items():
            node.meta["val"] = (*node.meta["val"][:1], value[1], *node.meta["val"][2:])

    monkeypatch.setattr(attention, "_ungroup", wrong)
    assert wrong_plans("repeated keys and values", (2,), [(2,)])
