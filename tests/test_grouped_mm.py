"""Grouped matmuls: fake kernels for every type, and operands whose rows are narrower than torch's kernel wants them."""

from dataclasses import replace
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses import FakeTensorMode

from autoshard.capture import capture, replaced
from autoshard.capture.replaced import fake_grouped_mm
from autoshard.lower.kernels.experts import aligned_grouped_mm
from autoshard.strategies.experts import FORWARD, grouped_mm
from autoshard.torch_private import DispatchKey
from tests.helpers_lower import mesh_of
from tests.helpers_models import Model, right_plan

aten = torch.ops.aten
ENDS = torch.tensor([4, 4, 10, 16], dtype=torch.int32)
OPERANDS = {
    "tokens": (lambda f: (f(16, 8), f(4, 8, 16), ENDS), (16, 16)),
    "weight gradient": (lambda f: (f(8, 16), f(16, 8), ENDS), (4, 8, 8)),
    "batched": (lambda f: (f(4, 16, 8), f(4, 8, 16), None), (4, 16, 16)),
}


@pytest.mark.parametrize(("name", "dtype"), list(product(OPERANDS, (torch.float32, torch.bfloat16, torch.float16))))
def test_the_fake_kernel_has_the_shapes_and_strides_of_the_real_one(name, dtype):
    operands, shape = OPERANDS[name]
    x, w, ends = operands(lambda *shape: torch.ones(shape, dtype=dtype))
    real = aten._grouped_mm.default(x, w, ends)
    with FakeTensorMode() as mode, fake_grouped_mm():
        fake = aten._grouped_mm.default(*(t if t is None else mode.from_tensor(t) for t in (x, w, ends)))
    assert tuple(fake.shape) == tuple(real.shape) == shape and fake.dtype == real.dtype and fake.stride() == real.stride()


def test_torchs_own_fake_kernel_is_back_afterwards():
    tensors = [torch.empty(shape, device="meta") for shape in ((16, 8), (4, 8, 16))]
    ends = torch.empty(4, dtype=torch.int32, device="meta")

    def answer() -> tuple:
        """What this torch says of float32: until 2.14 that it wants BF16."""
        try:
            return tuple(aten._grouped_mm.default(*tensors, ends).shape)
        except RuntimeError as error:
            return str(error).splitlines()[0], aten._grouped_mm.default.py_kernels.get(DispatchKey.Meta)

    before = answer()
    with fake_grouped_mm():
        assert answer() == (16, 16)
        assert aten._grouped_mm.default.py_kernels[DispatchKey.Meta] is replaced._grouped_mm
    assert answer() == before
    assert aten._grouped_mm.default.py_kernels.get(DispatchKey.Meta) is not replaced._grouped_mm


def test_narrow_rows_are_padded():
    x, w = torch.randn(16, 3).bfloat16(), torch.randn(4, 3, 5).bfloat16()
    with pytest.raises(RuntimeError, match="multiple of 16 bytes"):
        aten._grouped_mm.default(x, w, ENDS)
    begins = [0, *ENDS[:-1].tolist()]
    expected = torch.cat([x[i:j].float() @ w[e].float() for e, (i, j) in enumerate(zip(begins, ENDS.tolist(), strict=True))])
    assert (aligned_grouped_mm(x, w, ENDS).float() - expected).abs().max() < 0.05


def experts():
    def forward(m, x):
        return F.grouped_mm(F.relu(F.grouped_mm(x, m.up, offs=ENDS.to(x.device))), m.down, offs=ENDS.to(x.device)).mean()

    return Model(forward, up=nn.Parameter(torch.randn(4, 8, 16)), down=nn.Parameter(torch.randn(4, 16, 8)))


@pytest.mark.parametrize("training", [False, True])
def test_experts_in_float32_are_planned_and_right(training):
    assert not right_plan(experts(), (torch.randn(16, 8),), mesh_of(4), training=training, random=4).replicated_ops


def test_a_bias_that_is_no_tensor_of_the_graph_leaves_no_way_to_shard_and_an_output_type_does():
    graph = capture(experts(), (torch.randn(16, 8),), training=False)
    op = next(op for op in graph.ops if op.target in FORWARD)
    inputs, (arguments, named) = [graph.tensor(value) for value in op.inputs], op.literals
    ways = grouped_mm(op, inputs)
    assert ways and not grouped_mm(replace(op, literals=((*arguments, 1.0), named)), inputs)
    assert grouped_mm(replace(op, literals=((*arguments, None, torch.bfloat16), named)), inputs) == ways
