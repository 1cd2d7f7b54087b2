"""Local tensors of any strides: what a rank computes must not depend on how its shards lie in memory."""

from itertools import combinations, product

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from autoshard.lower.fx_program import boxed
from autoshard.lower.kernels.table import function_of
from autoshard.lower.literals import overload
from autoshard.torch_private import VERSION
from tests.helpers_lower import mesh_of
from tests.helpers_models import Model, right_plan

aten = torch.ops.aten


def of_strides(x):
    """The same numbers in other strides."""
    n = x.dim()
    yield from (x.transpose(k, k + 1).contiguous().transpose(k, k + 1) for k in range(n - 1))
    yield torch.stack([x, x], -1)[..., 0]
    yield x.permute(*reversed(range(n))).contiguous().permute(*reversed(range(n)))
    if n == 4:
        yield x.contiguous(memory_format=torch.channels_last)


def random(*shape):
    return torch.rand(shape, generator=torch.Generator().manual_seed(len(shape)), dtype=torch.float64)


X, W, K = random(2, 8, 4, 4), random(8), random(8, 8, 3, 3)
MEAN, RSTD = aten.native_group_norm(X, W, W, 2, 8, 16, 2, 1e-5)[1:]
ROWS = aten.native_layer_norm(X, [4, 4], None, None, 1e-5)[1:]
SMALL, LARGE = random(2, 8, 2, 2), random(2, 8, 8, 8)
CALLS = {
    "native_group_norm": (X, W, W, 2, 8, 16, 2, 1e-5),
    "native_group_norm_backward": (X.flip(0), X, MEAN, RSTD, W, 2, 8, 16, 2, [True] * 3),
    "native_layer_norm": (X, [4, 4], X[0, 0], X[0, 0], 1e-5),
    "native_layer_norm_backward": (X.flip(0), X, [4, 4], *ROWS, X[0, 0], X[0, 0], [True] * 3),
    "native_batch_norm_backward": (X.flip(0), X, W, W, W, W, W, True, 1e-5, [True] * 3),
    "convolution": (X, K, W, [1, 1], [1, 1], [1, 1], False, [0, 0], 1),
    "convolution_backward": (X.flip(0), X, K, [8], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True] * 3),
    "avg_pool2d_backward": (SMALL, X, [2, 2], [2, 2], [0, 0], False, True, None),
    "max_pool2d_with_indices_backward": (SMALL, X, [2, 2], [2, 2], [0, 0], [1, 1], False, aten.max_pool2d_with_indices(X, [2, 2])[1]),
    "_adaptive_avg_pool2d_backward": (SMALL, X),
    "upsample_bilinear2d": (X, [8, 8], False, None, None),
    "upsample_bilinear2d_backward": (LARGE, [8, 8], [2, 8, 4, 4], False, None, None),
    "upsample_nearest2d_backward": (LARGE, [8, 8], [2, 8, 4, 4], None, None),
}


def largest_error(name, function):
    """Of the op with one or two of its tensors in other strides, against contiguous ones; inf where a call is refused."""
    args, worst = CALLS[name], 0.0
    named = [a.name for a in overload(f"aten.{name}.default")._schema.arguments]
    tensors = [k for k, x in enumerate(args) if isinstance(x, torch.Tensor)]
    expected = as_tuple(overload(f"aten.{name}.default")(*(x.contiguous() if k in tensors else x for k, x in enumerate(args))))
    for some in (*combinations(tensors, 1), *combinations(tensors, 2)):
        for changed in product(*(of_strides(args[k]) for k in some)):
            given = {**dict(enumerate(args)), **dict(zip(some, changed))}
            try:
                outputs = as_tuple(function(**{named[k]: x for k, x in given.items()}))
            except RuntimeError:
                return float("inf")
            worst = max(worst, *(float((a - b).abs().max()) for a, b in zip(outputs, expected, strict=True)))
    return worst


def as_tuple(x):
    return x if isinstance(x, tuple) else (x,)


@pytest.mark.parametrize("name", CALLS)
def test_an_op_computes_the_same_whatever_the_strides_of_its_inputs(name):
    assert largest_error(name, function_of(f"aten.{name}.default")) < 1e-12


# torch 2.14 mended group norm
WRONG = ["native_layer_norm_backward", *(["native_group_norm", "native_group_norm_backward"] if VERSION < (2, 14) else [])]


@pytest.mark.parametrize("name", WRONG)
def test_torch_alone_is_wrong_or_refuses(name):
    """Otherwise the test above would show nothing."""
    assert largest_error(name, overload(f"aten.{name}.default")) > 1e-3


FORMS = {
    "transposed": lambda x: x.transpose(1, 2).reshape(x.shape[0], 8, 4, 4),
    "channels_last": lambda x: x.transpose(1, 2).reshape(x.shape[0], 8, 4, 4).contiguous(memory_format=torch.channels_last),
    "permuted": lambda x: x.view(x.shape[0], 4, 4, 8).permute(0, 3, 1, 2),
    "expanded": lambda x: x[:, :1].transpose(1, 2).unsqueeze(-1).expand(-1, -1, 4, 4),
}
INNER = {
    "group norm": lambda: nn.GroupNorm(2, 8),
    "instance norm": lambda: nn.InstanceNorm2d(8, affine=True),
    "batch norm": lambda: nn.BatchNorm2d(8),
    "group norm and convolution": lambda: nn.Sequential(nn.GroupNorm(2, 8), nn.SiLU(), nn.Conv2d(8, 8, 3, padding=1)),
    "pooling": lambda: nn.AvgPool2d(2),
    "interpolation": lambda: nn.Upsample(scale_factor=2, mode="bilinear"),
}
QUICK = [("group norm", "transposed", False, (2,)), ("group norm", "channels_last", True, (2,))]
SLOW = [case for case in product(INNER, FORMS, (False, True), [(2,), (2, 2)]) if case not in QUICK]


def test_a_traced_view_takes_values_of_other_strides_than_those_it_was_traced_with():
    traced = make_fx(lambda x: x.transpose(1, 2).reshape(6, 4))(random(2, 4, 3).transpose(1, 2).contiguous().transpose(1, 2))
    assert traced.graph.find_nodes(op="call_function", target=aten.view.default)  # fake kernels' strides make it a view
    x = random(2, 4, 3)
    with pytest.raises(RuntimeError, match="view size"):
        traced(x)
    assert torch.equal(boxed(traced)([x]), x.transpose(1, 2).reshape(6, 4))


@pytest.mark.parametrize(
    ("inner", "form", "training", "sizes"), [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)], ids=str
)
def test_ranks_with_one_example_each_compute_what_the_model_computes(inner, form, training, sizes):
    torch.manual_seed(0)
    model = Model(lambda m, x: m.inner(FORMS[form](m.linear(x))).square().mean(), inner=INNER[inner](), linear=nn.Linear(8, 8))
    x, pins = torch.rand(torch.Size(sizes).numel(), 16, 8), {"input_0": ",".join(["S(0)"] * len(sizes))}
    right_plan(model.train(training), (x,), mesh_of(*sizes), training=training, pins=pins, random=2)
