"""The two halves of a stage's backward pass compute what the whole does, and the first no more than is sent on."""

from operator import getitem
from types import SimpleNamespace

import pytest
import torch
from torch import fx

from autoshard.lower import boxed
from autoshard.runtime.stage_graphs import _halves
from autoshard.solution import SENT

aten = torch.ops.aten
SHAPE = 3, 4


def backward(order: tuple[int, ...]) -> fx.GraphModule:
    """Of x -> relu(x) @ w: the gradients of w, with a sum of before, of x, and of a second output of one op, in the given order."""
    graph = fx.Graph()
    x, w, tangent, before = map(graph.placeholder, ("x", "w", "tangent", "before"))
    active = graph.call_function(aten.relu.default, (x,))
    of_w = graph.call_function(aten.mm.default, (graph.call_function(aten.t.default, (active,)), tangent))
    summed = graph.call_function(aten.add.Tensor, (before, of_w))
    of_active = graph.call_function(aten.mm.default, (tangent, graph.call_function(aten.t.default, (w,))))
    both = graph.call_function(aten.var_mean.default, (of_active,))
    variance, mean = (graph.call_function(getitem, (both, k)) for k in (0, 1))
    of_x = graph.call_function(aten.mul.Tensor, (of_active, mean))
    results = [summed, of_x, variance]
    graph.output([results[k] for k in order])
    return fx.GraphModule({}, graph)


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 1, 0)])
def test_the_halves_compute_what_the_whole_does(order):
    whole = backward(order)
    keys = ("gradient:w", f"gradient:{SENT}x", "gradient:more")
    halves = _halves(SimpleNamespace(backward=whole, sums=("w",), gradients=tuple(keys[k] for k in order)))
    assert halves.sent == (order.index(1),) and halves.rest == tuple(k for k in range(3) if k != order.index(1))
    torch.manual_seed(0)
    x, w, tangent, before = torch.randn(SHAPE), torch.randn(4, 5), torch.randn(3, 5), torch.randn(4, 5)
    expected = boxed(whole)([x, w, tangent, before])
    sent, *kept = halves.inputs([x, w, tangent])
    rest = halves.weights([*kept, before])
    torch.testing.assert_close(sent, expected[order.index(1)])
    torch.testing.assert_close(list(rest), [expected[k] for k in halves.rest])
    assert len(kept) == 3  # x or what came of it, the tangent, and the second output
