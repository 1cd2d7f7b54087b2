"""Rows of a batch that are multiplied with one matrix: one matmul, which reads the matrix once."""

import torch
from torch import nn

from autoshard import api
from autoshard.capture import capture
from tests.helpers_lower import mesh_of

BATCH, HEADS, WIDTH = 4, 4, 32


class Decode(nn.Module):
    """Attention of one token, written out; the heads are transposed before the last product."""

    def __init__(self):
        super().__init__()
        self.query, self.out = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x, keys):
        query = self.query(x).view(x.shape[0], -1, HEADS, WIDTH // HEADS).transpose(1, 2)
        y = (query @ keys.mT).softmax(-1) @ keys
        return self.out(y.transpose(1, 2).contiguous().reshape(x.shape[0], -1, WIDTH))


class Several(nn.Module):
    """A matrix for each sample."""

    def forward(self, x, keys):
        return x @ keys.view(BATCH, WIDTH, -1)


def inputs(length):
    torch.manual_seed(0)
    return torch.randn(BATCH, length, WIDTH), torch.randn(BATCH, HEADS, 16, WIDTH // HEADS)


def products(module, length):
    graph = capture(module, inputs(length), training=False)
    return [(op.target, *(t.shape for t in graph.input_tensors(i))) for i, op in enumerate(graph.ops) if "mm" in op.target]


def test_one_token_of_each_sample_is_multiplied_with_the_matrix_itself():
    square = (WIDTH, WIDTH)
    assert [row for row in products(Decode(), 1) if square in row] == [("aten.mm.default", (BATCH, WIDTH), square)] * 2
    assert [row[0] for row in products(Several(), 1)] == ["aten.bmm.default"]  # matrices that differ stay a batch


def test_the_plan_of_such_a_step_is_right():
    module = Decode()
    solution = api.plan(module, inputs(1), mesh_of(2, 2), baselines=False)
    assert api.verify(module, inputs(1), solution, random=2)["ok"]
    assert not api.verify(module, inputs(1), solution, plant_fault=True)["ok"]
