"""Rows of a recurrent layer that is one op: x[t, n, i], weights, first states [n, h] -> y[t, n, h], last states, a workspace.

Only the batch n may be sharded: each step of the sequence needs the one before, and a step mixes all features. The workspace is
for the backward of the same layer. Only the library that fills it knows its size, so the local program leaves it empty and the
backward runs the forward again (`lower.kernels.recurrent`).

The gated delta rule (`capture.delta_rule`) may be sharded on its heads as well, those of queries and keys with those of values.
"""

import math

from autoshard.graph import DELTA_CHUNK, Op, Tensor
from autoshard.layout import Layout, P, Placement, R, S, local_shape
from autoshard.mesh import Mesh
from autoshard.strategies.dims import output_placements
from autoshard.strategies.rows import EVEN_ONLY, Inputs, Row, rule

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


DELTA_RULE = DELTA, DELTA_BACKWARD = "autoshard.delta_rule.default", "autoshard.delta_rule_backward.default"
EVEN_ONLY.update(DELTA_RULE)  # shards of the heads of keys and of values go together


@rule(DELTA)
def delta_rule(op: Op, inputs: Inputs) -> list[Row]:
    """q, k, v [b, t, h, d], decay, beta [b, t, h] [, first state [b, h, d, v]] -> out, last state."""
    states = len(inputs) - 5
    return [Row((S(d), S(of_state)), (*[S(d)] * 5, *[S(of_state)] * states)) for d, of_state in ((0, 0), (2, 1))]


@rule(DELTA_BACKWARD)
def delta_rule_backward(op: Op, inputs: Inputs) -> list[Row]:
    """The gradient of out, and the same -> gradients of q, k, v, decay, beta."""
    states = len(inputs) - 6
    return [Row((S(d),) * 5, (*[S(d)] * 6, *[S(of_state)] * states)) for d, of_state in ((0, 0), (2, 1))]


def delta_rule_bytes(op: Op, inputs: Inputs, layouts: tuple[Layout, ...], mesh: Mesh) -> int:
    """What flash-linear-attention's kernels hold: for a token of a head a row of its chunk's system, one of W, two of U, and its part of
    the chunk's state; the backward also their gradients, and those of queries and keys of each head of values."""
    first = int(op.target == DELTA_BACKWARD)
    *rows, V = local_shape(inputs[first + 2].shape, layouts[first + 2], mesh)
    K = inputs[first + 1].shape[-1]
    return math.prod(rows) * inputs[first].itemsize * (1 + 2 * first) * (DELTA_CHUNK + K + 2 * V + K * V // DELTA_CHUNK)


def _batch(tensor: Tensor) -> Placement:
    """Sharded on the batch, which is the second last dim of a sequence and of a state."""
    return S(len(tensor.shape) - 2)
