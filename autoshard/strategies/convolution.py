"""Rows of convolutions and of the norms that go with them.

    y[n, o] = sum over i of x[n, i] * w[o, i] + b[o]         batch n, channels out o, channels in i (transposed: w[i, o])

batch: x S(0) -> y S(0).   out: w, b S(o) -> y S(1).   in: x S(1), w S(i) -> y P, the bias added once (`lower.kernels.table`).
The backward returns the gradients (x', w', b'): batch S(0), P, P;  out P, S(o), S(0);  in S(1), S(i), R. With groups, the channels
in and out are sharded together, and no group is split.

batch norm: channels S(1) and S(0). A sharded batch needs the mean and variance of the full batch: the local program has two small
reductions in the forward and one in the backward (`internal.py`, `lower.kernels.norms`). group norm: batch, or channels by groups.
"""

from autoshard.graph import Op
from autoshard.layout import P, R, S
from autoshard.strategies.dims import input_placements, output_placements
from autoshard.strategies.rows import Inputs, Row, argument, rule


@rule("aten.convolution.default")
def convolution(op: Op, inputs: Inputs) -> list[Row]:
    n, transposed, groups = len(inputs), argument(op, 6), argument(op, 8)
    if len(inputs[0].shape) != len(inputs[1].shape):  # an image without a batch
        return []
    o, i = (S(1), S(0)) if transposed else (S(0), S(1))
    rows = [Row((S(0),), input_placements(op, n, {0: S(0)}))]
    if groups == 1:
        rows += [Row((S(1),), input_placements(op, n, {1: o, 2: S(0)})), Row((P(),), input_placements(op, n, {0: S(1), 1: i}))]
    else:  # w[o, i / groups], transposed w[i, o / groups]
        rows.append(Row((S(1),), input_placements(op, n, {0: S(1), 1: S(0), 2: S(0)}), units=groups))
    without_bias = argument(op, 2) is None
    return rows + ([Row((P(),), input_placements(op, n, {0: P()})), Row((P(),), input_placements(op, n, {1: P()}))] if without_bias else [])


@rule("aten.convolution_backward.default")
def convolution_backward(op: Op, inputs: Inputs) -> list[Row]:
    n, transposed, groups = len(inputs), argument(op, 7), argument(op, 9)
    if len(inputs[1].shape) != len(inputs[2].shape):
        return []
    o, i = (S(1), S(0)) if transposed else (S(0), S(1))
    rows = [
        Row(output_placements(op, S(0), P(), P()), input_placements(op, n, {0: S(0), 1: S(0)})),
        Row(output_placements(op, P(), P(), P()), input_placements(op, n, {0: P()})),
    ]
    if groups == 1:
        rows.append(Row(output_placements(op, P(), o, S(0)), input_placements(op, n, {0: S(1), 2: o})))
        rows.append(Row(output_placements(op, S(1), i, R), input_placements(op, n, {1: S(1), 2: i})))
    else:
        rows.append(Row(output_placements(op, S(1), S(0), S(0)), input_placements(op, n, {0: S(1), 1: S(1), 2: S(0)}), units=groups))
    return rows


BATCH_NORMS = (
    "aten._native_batch_norm_legit_functional.default",
    "aten._native_batch_norm_legit_no_training.default",
    "aten.native_batch_norm.default",
)


@rule(*BATCH_NORMS)
def batch_norm(op: Op, inputs: Inputs) -> list[Row]:
    """x, weight, bias, running mean and variance -> y, saved mean and deviation [, new running mean and variance]."""
    n, rest = len(inputs), len(op.outputs) - 1
    per_channel = {position: S(0) for position in range(1, 5)}
    channels = Row(output_placements(op, S(1), *[S(0)] * rest), input_placements(op, n, {0: S(1), **per_channel}))
    if any(t is not None and t.shape == (0,) for t in op.outputs):  # without training nothing is saved
        empty = [R if t is not None and t.shape == (0,) else S(0) for t in op.outputs[1:]]
        channels = Row(output_placements(op, S(1), *empty), channels.inputs)
    return [channels, Row(output_placements(op, S(0), *[R] * rest), input_placements(op, n, {0: S(0)}))]


@rule("aten.native_batch_norm_backward.default")
def batch_norm_backward(op: Op, inputs: Inputs) -> list[Row]:
    n, train = len(inputs), argument(op, 7)
    items = {p: argument(op, p) for p in (2, 3, 4, 5, 6)}
    per_channel = {p: S(0) for p, item in items.items() if item is not None and inputs[item.index].shape != (0,)}
    summed = R if train else P()  # in training the local program reduces the sums already
    return [
        Row(output_placements(op, S(1), S(0), S(0)), input_placements(op, n, {0: S(1), 1: S(1), **per_channel})),
        Row(output_placements(op, S(0), summed, summed), input_placements(op, n, {0: S(0), 1: S(0)})),
    ]


@rule("aten.native_group_norm.default")
def group_norm(op: Op, inputs: Inputs) -> list[Row]:
    """The saved mean and deviation are [batch, groups]: they are sharded with the channels, so that no group is split."""
    n = len(inputs)
    return [
        Row(output_placements(op, S(0), S(0), S(0)), input_placements(op, n, {0: S(0)})),
        Row(output_placements(op, S(1), S(1), S(1)), input_placements(op, n, {0: S(1), 1: S(0), 2: S(0)})),
    ]


@rule("aten.native_group_norm_backward.default")
def group_norm_backward(op: Op, inputs: Inputs) -> list[Row]:
    n = len(inputs)
    batch = {position: S(0) for position in range(4)}
    channels = {position: S(1) for position in range(4)}
    return [
        Row(output_placements(op, S(0), P(), P()), input_placements(op, n, batch)),
        Row(output_placements(op, S(1), S(0), S(0)), input_placements(op, n, {**channels, 4: S(0)})),
    ]
