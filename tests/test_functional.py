"""Traced graphs in the form that rules know: the order of the backward pass's matmuls."""

from itertools import product

import pytest
import torch
from torch import nn

from autoshard.capture import capture
from autoshard.graph import Graph


class Layers(nn.Module):
    """Layers without biases; a matrix that every row of a batch is multiplied with, or each batch with its own."""

    def __init__(self, layers: int, batched: bool, tied: bool):
        super().__init__()
        shape, count = (2, 8, 8) if batched else (8, 8), 1 if tied else layers
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(shape)) for _ in range(count)] * (layers // count))

    def forward(self, x):
        for w in self.weights:
            x = (x @ w).relu()
        return x.sum()


def of_weights(graph: Graph) -> list[bool]:
    """Of each matmul of the backward pass, in order, whether nothing but a parameter's gradient is made of it."""
    ends = {graph.storage(r.value) for r in graph.results if r.kind == "gradient" and r.value}
    backward = [i for i, op in enumerate(graph.ops) if op.backward and op.target in ("aten.mm.default", "aten.bmm.default")]
    return [(i, 0) in ends for i in backward]


@pytest.mark.parametrize("layers, batched", [*product((2, 3, 5), (False, True))])
def test_the_backward_pass_goes_on_before_it_computes_a_weights_gradient(layers, batched):
    graph = capture(Layers(layers, batched, tied=False), (torch.randn(2, 4, 8),), training=True)
    # the last layer's is the first, and stays so; the first layer's input needs no gradient
    assert of_weights(graph) == [True, False, *[False, True] * (layers - 2), True]
    assert all(i < j for j, op in enumerate(graph.ops) for i, _ in op.inputs)  # what an op reads stands before it


def test_gradients_of_a_shared_weight_are_added_where_they_were():
    graph = capture(Layers(2, False, tied=True), (torch.randn(2, 4, 8),), training=True)
    assert of_weights(graph) == [False] * 3 and all(i < j for j, op in enumerate(graph.ops) for i, _ in op.inputs)
