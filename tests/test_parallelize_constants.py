"""Tensors that a forward reads beside parameters, buffers and inputs, and models whose parts are in different modes, on real ranks."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import autoshard
from autoshard import api
from autoshard.capture import capture
from tests.helpers import fast_mesh
from tests.helpers_ranks import results

SHARED = torch.arange(8.0)


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.attribute, self.listed = torch.arange(8.0) - 3, [torch.arange(8.0) ** 2]

    def scale(self):
        raise NotImplementedError

    def forward(self, x):
        return (self.linear(x) * self.scale()).square().sum(-1).mean(-1)


class Literal(Scaled):
    def scale(self):
        return torch.tensor([1.0, 2.0] * 4)


class Attribute(Scaled):
    def scale(self):
        return self.attribute


class Listed(Scaled):
    def scale(self):
        return self.listed[0]


class Global(Scaled):
    def scale(self):
        return SHARED + self.attribute * SHARED


KINDS = (Literal, Attribute, Listed, Global)


def build(kind):
    torch.manual_seed(0)
    return kind(), (torch.randn(4, 6, 8),)


def gradients(module, inputs, training):
    with torch.set_grad_enabled(training):
        y = module(*inputs)
    if training:
        y.sum().backward()
    found = {"y": y, **{name: p.grad for name, p in module.named_parameters() if p.grad is not None}}
    return {name: (x.full_tensor() if isinstance(x, DTensor) else x).detach() for name, x in found.items()}


def used(rank, model, inputs, solution, training):
    module = autoshard.parallelize(model, solution, init_device_mesh("cpu", (2,)))
    return gradients(module, inputs, training)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("training", [False, True])
def test_a_tensor_that_is_no_buffer_is_read_on_every_rank(kind, training):
    model, inputs = build(kind)
    solution = autoshard.plan(model, inputs, fast_mesh((2,)), training=training, baselines=False, pins={"linear.weight": "S(0)"})
    found = results(2, used, model, inputs, solution, training)
    expected = results(1, lambda rank: gradients(copy.deepcopy(model), inputs, training))[0]
    for made in found:
        assert made.keys() == expected.keys()
        assert all(torch.allclose(made[name], x, rtol=1e-5, atol=1e-6) for name, x in expected.items())


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_read_in_verify_too_and_is_one_tensor_of_the_program(kind):
    model, inputs = build(kind)
    graph = capture(model, inputs, training=True)
    read = [op.name for i, op in enumerate(graph.ops) if op.kind == "buffer" and (i, 0) in graph.users]
    assert len(read) == (2 if kind is Global else 1)
    solution = autoshard.plan(model, inputs, fast_mesh((2,)), training=True, baselines=False)
    assert api.verify(model, inputs, solution, random=1)["ok"]
    assert not api.verify(model, inputs, solution, plant_fault=True)["ok"]


class Counting(Scaled):
    def forward(self, x):
        self.attribute.add_(1)
        return (self.linear(x) + self.attribute).square().mean()


@pytest.mark.parametrize("training", [False, True])
def test_one_that_the_forward_writes_into_is_refused(training):
    model, inputs = build(Counting)
    with pytest.raises(ValueError, match=r"writes into .*attribute.* no buffer .*register_buffer"):
        capture(model, inputs, training=training)


def frozen():
    """As in fine-tuning: the model trains, its batch norm does not."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Dropout(0.5), nn.Flatten(), nn.Linear(8 * 4 * 4, 4)).train()
    model[1].eval()
    model[2].eval()
    return model, (torch.randn(4, 3, 6, 6),)


def test_parts_keep_the_modes_that_they_were_planned_in():
    model, inputs = frozen()
    solution = autoshard.plan(model, inputs, fast_mesh((2,)), training=True, baselines=False)
    found = results(2, used, model, inputs, solution, True)
    expected = results(1, lambda rank: gradients(copy.deepcopy(model), inputs, True))[0]
    assert all(torch.allclose(made[name], x, rtol=1e-4, atol=1e-5) for made in found for name, x in expected.items())
