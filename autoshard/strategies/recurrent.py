"""Rows of a recurrent layer that is one op: x[t, n, i], weights, first states [n, h] -> y[t, n, h], last states, a workspace.

Only the batch n may be sharded: each step of the sequence needs the one before, and a step mixes all features. The workspace is
for the backward of the same layer. Only the library that fills it knows its size, so the local program leaves it empty and the
backward runs the forward again (`lower.kernels.recurrent`).
"""

from autoshard.graph import Op, Tensor
from autoshard.layout import P, Placement, R, S
from autoshard.strategies.dims import output_placements
from autoshard.strategies.rows import Inputs, Row, rule

FORWARD = "aten.mkldnn_rnn_layer.default"
BACKWARD = "aten.mkldnn_rnn_layer_backward.default"


@rule(FORWARD)
def layer(op: Op, inputs: Inputs) -> list[Row]:
    """x, four weights, hx, cx -> y, hy, cy, workspace."""
    x, *_, hx, cx = inputs
    return [Row(output_placements(op, S(1), *[_batch(hx)] * 2, R), (S(1), *[R] * (len(inputs) - 3), _batch(hx), _batch(cx)))]


@rule(BACKWARD)
def layer_backward(op: Op, inputs: Inputs) -> list[Row]:
    """x, four weights, hx, cx, y, hy, cy [, gradients of y, hy, cy], workspace -> gradients of x, the weights, hx and cx."""
    of_states = _batch(inputs[5])
    grads = [_batch(t) for t in inputs[10:-1]]
    placements = (S(1), *[P()] * 4, of_states, of_states)
    return [
        Row(output_placements(op, *placements), (S(1), *[R] * 4, *[of_states] * 2, S(1), *[_batch(t) for t in inputs[8:10]], *grads, R))
    ]


def _batch(tensor: Tensor) -> Placement:
    """Sharded on the batch, which is the second last dim of a sequence and of a state."""
    return S(len(tensor.shape) - 2)
