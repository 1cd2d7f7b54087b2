"""RMS norm is torch's own operator in a graph, as it runs on a GPU, and not the six that torch makes of it on a CPU."""

from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autoshard
from autoshard.capture import capture_module
from autoshard.capture.operators import RMS_NORM
from autoshard.lower.kernels.table import function_of
from tests.helpers import fast_mesh

OPS = ["aten._fused_rms_norm.default", "aten._fused_rms_norm_backward.default"]
BACKWARD = function_of(OPS[1])


class Model(nn.Module):
    def __init__(self, shape: tuple[int, ...], eps: float | None = 1e-5, affine: bool = True, dtype: torch.dtype = torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.before, self.after = nn.Linear(16, 16, dtype=dtype), nn.Linear(16, 16, dtype=dtype)
        self.norm = nn.RMSNorm(shape, eps, affine, dtype=dtype)

    def forward(self, x):
        return self.after(self.norm(self.before(x))).square().mean()


def normed(model, x, training=True):
    return [op.target for op in capture_module(model, (x,), training=training).graph.ops if "rms_norm" in (op.target or "")]


KINDS = [(dtype, shape, eps, affine) for dtype, (shape, eps, affine) in product(
    (torch.float32, torch.bfloat16, torch.float64), (((16,), None, True), ((6, 16), 1e-5, True), ((16,), 1e-5, False)))]  # fmt: skip


@pytest.mark.parametrize("dtype, shape, eps, affine", KINDS, ids=str)
def test_it_is_one_op_and_plans_verify(dtype, shape, eps, affine):
    model, x = Model(shape, eps, affine, dtype), torch.randn(8, 6, 16, dtype=dtype)
    assert normed(model, x) == OPS and normed(model, x, training=False) == OPS[:1]
    plan = autoshard.plan(model, (x,), fast_mesh((2,)), training=True, baselines=False, objective="serial")
    assert autoshard.verify(model, (x,), plan, random=2)["ok"]


def test_weights_of_another_dtype_and_no_elements_are_left_to_torch():
    x = torch.randn(8, 6, 16)
    assert normed(nn.RMSNorm(16, dtype=torch.float64), x, training=False) == [] == normed(nn.RMSNorm(16), x[:0], training=False)
    assert normed(nn.RMSNorm(16), x, training=False) == OPS[:1]


@pytest.mark.parametrize("has_weight", [True, False])
@pytest.mark.parametrize("of_x, of_weight", [(True, True), (True, False), (False, True)])
def test_its_backward_on_a_cpu_is_that_of_torchs_formula(of_x, of_weight, has_weight):
    x, grad = (torch.randn(4, 3, 5, dtype=torch.float64) for _ in range(2))
    weight = torch.randn(3, 5, dtype=torch.float64) if has_weight else None
    leaves = [x.clone().requires_grad_(), *([weight.clone().requires_grad_()] if has_weight else [])]
    expected = torch.autograd.grad(F.rms_norm(leaves[0], (3, 5), *leaves[1:], eps=1e-3), leaves, grad)
    _, rstd = function_of(OPS[0])(input=x, normalized_shape=[3, 5], weight=weight, eps=1e-3)
    given = {"grad_out": grad, "input": x, "normalized_shape": [3, 5], "rstd": rstd, "weight": weight}
    found = BACKWARD(**given, output_mask=[of_x, of_weight and has_weight])
    assert [y is not None for y in found] == [of_x, of_weight and has_weight]
    assert all(y is None or torch.allclose(y, of, atol=1e-12) for y, of in zip(found, expected, strict=False))


def test_a_frozen_weight_has_no_gradient_and_statistics_are_no_results_to_train():
    model, x = Model((16,)), torch.randn(8, 6, 16)
    model.norm.weight.requires_grad_(False)
    plan = autoshard.plan(model, (x,), fast_mesh((2,)), training=True, baselines=False, objective="serial")
    assert autoshard.verify(model, (x,), plan)["ok"]
    with torch.device("meta"):
        out, rstd = RMS_NORM(torch.empty(2, 4, requires_grad=True, dtype=torch.bfloat16), [4], None, None)
    assert out.requires_grad and not rstd.requires_grad and (rstd.dtype, rstd.shape) == (torch.float32, (2, 1))
