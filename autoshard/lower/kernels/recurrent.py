"""Local programs of recurrent layers, which need care because the size of the library's workspace is not known when planning.

forward      the workspace is dropped and replaced by zeros of the planned shape, which no op reads
backward     the forward runs once more to compute the workspace
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from autoshard.lower.collectives import Rank
from autoshard.lower.kernels.sharded_op import Arguments, Kernel, ShardedOp, local

aten = torch.ops.aten
SETTINGS = ("reverse", "mode", "hidden_size", "num_layers", "has_biases", "bidirectional", "batch_sizes", "batch_first")


def _forward(sharded: ShardedOp) -> Kernel:
    planned = sharded.op.outputs[3]

    @local
    def layer(rank: Rank, a: Arguments) -> tuple[Tensor | None, ...]:
        y, hy, cy, _ = aten.mkldnn_rnn_layer.default(**a)
        return y, hy, cy, None if planned is None else y.new_zeros(planned.shape, dtype=torch.uint8)

    return layer


@torch.library.custom_op(
    "autoshard::recurrent_layer_backward",
    mutates_args=(),
    schema="(Tensor input, Tensor[] weights, Tensor hx, Tensor cx, Tensor[] results, Tensor?[] grads, bool reverse, int mode, "
    "int hidden_size, int num_layers, bool has_biases, bool bidirectional, int[] batch_sizes, bool batch_first) -> Tensor[]",
)
def _layer_backward(input, weights, hx, cx, results, grads, reverse, mode, hidden_size, num_layers, has_biases, bidirectional, batch_sizes,
                    batch_first):  # fmt: skip
    """One op, so that a graph that runs without grad mode holds no workspace: the library fills one in grad mode only."""
    sizes = (mode, hidden_size, num_layers, has_biases)
    with torch.enable_grad():
        *_, workspace = aten.mkldnn_rnn_layer(input, *weights, hx, cx, reverse, batch_sizes, *sizes, bidirectional, batch_first, True)
    dense = [None if grad is None else grad.contiguous() for grad in grads]
    gradients = aten.mkldnn_rnn_layer_backward(
        input, *weights, hx, cx, *results, *dense, reverse, *sizes, True, bidirectional, batch_sizes, batch_first, workspace
    )
    return [x.clone(memory_format=torch.contiguous_format) for x in gradients]


@_layer_backward.register_fake
def _(input, weights, hx, cx, *rest):  # type: ignore[no-untyped-def]
    return [x.new_empty(x.shape) for x in (input, *weights, hx, cx)]


@local
def layer_backward(rank: Rank, a: Arguments) -> Any:
    weights = [a[f"weight{k}"] for k in range(1, 5)]
    results, grads = [a[name] for name in ("output", "hy_", "cy_")], [a.get(name) for name in ("grad_output", "grad_hy", "grad_cy")]
    return _layer_backward(a["input"], weights, a["hx_"], a["cx_tmp"], results, grads, *[a[name] for name in SETTINGS])


def _backward(sharded: ShardedOp) -> Kernel:
    return layer_backward


KERNELS: dict[str, Callable[[ShardedOp], Kernel]] = {
    "aten.mkldnn_rnn_layer.default": _forward,
    "aten.mkldnn_rnn_layer_backward.default": _backward,
}
