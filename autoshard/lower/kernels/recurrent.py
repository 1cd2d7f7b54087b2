"""Local programs of one direction of one layer of an LSTM, which a capture holds as the kernel of the CPU's library.

forward      on a CPU that library, elsewhere torch.lstm, which chooses the kernel of the device; the library's workspace, whose size is
             not known when planning, is replaced by zeros of the planned shape, which no op reads
backward     the forward runs once more: for the workspace, or for autograd to differentiate

x [t, n, i], weights [4 h, i], [4 h, h], [4 h], [4 h], first states [n, h] or [1, n, h] -> y [t, n, h] and the last states. A layer that
runs from the last step to the first is one of the reversed sequence.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from autoshard.lower.collectives import Rank
from autoshard.lower.kernels.sharded_op import Arguments, Kernel, ShardedOp, local

aten = torch.ops.aten
SETTINGS = ("reverse", "mode", "hidden_size", "num_layers", "has_biases", "bidirectional", "batch_sizes", "batch_first")


def has_library(x: Tensor) -> bool:
    return x.device.type == "cpu"


def _forward(sharded: ShardedOp) -> Kernel:
    planned = sharded.op.outputs[3]

    @local
    def layer(rank: Rank, a: Arguments) -> tuple[Tensor | None, ...]:
        if has_library(a["input"]):
            y, hy, cy, _ = aten.mkldnn_rnn_layer.default(**a)
        else:
            y, hy, cy = plain_layer(a["input"], [a[f"weight{k}"] for k in range(4)], a["hx_"], a["cx_"], a["reverse"], a["has_biases"])
        return y, hy, cy, None if planned is None else y.new_zeros(planned.shape, dtype=torch.uint8)

    return layer


def plain_layer(
    x: Tensor, weights: list[Tensor], hx: Tensor, cx: Tensor, reverse: bool, has_biases: bool, train: bool = False
) -> tuple[Tensor, ...]:
    """y and the last states on any device. train: whether autograd differentiates it, for which cuDNN keeps more."""
    states = [state.reshape(1, *state.shape[-2:]) for state in (hx, cx)]
    x = x.flip(0) if reverse else x
    y, *last = torch.lstm(x, states, weights if has_biases else weights[:2], has_biases, 1, 0.0, train, False, False)
    return y.flip(0) if reverse else y, *(state.reshape(hx.shape) for state in last)


torch.library.define(
    "autoshard::recurrent_layer_backward",
    "(Tensor input, Tensor[] weights, Tensor hx, Tensor cx, Tensor[] results, Tensor?[] grads, bool reverse, int mode, "
    "int hidden_size, int num_layers, bool has_biases, bool bidirectional, int[] batch_sizes, bool batch_first) -> Tensor[]",
)


@torch.library.impl("autoshard::recurrent_layer_backward", "CompositeExplicitAutograd")
def _(input, weights, hx, cx, results, grads, reverse, mode, hidden_size, num_layers, has_biases, bidirectional, batch_sizes,
      batch_first):  # type: ignore[no-untyped-def]  # fmt: skip
    """One op, so that a graph that runs without grad mode holds no workspace: the library fills one in grad mode only. Not a
    `torch.library.custom_op`, in which autograd is off."""
    if not has_library(input):
        return plain_layer_backward([input, *weights, hx, cx], grads, reverse, has_biases)
    sizes = (mode, hidden_size, num_layers, has_biases)
    with torch.enable_grad():
        *_, workspace = aten.mkldnn_rnn_layer(input, *weights, hx, cx, reverse, batch_sizes, *sizes, bidirectional, batch_first, True)
    dense = [None if grad is None else grad.contiguous() for grad in grads]
    gradients = aten.mkldnn_rnn_layer_backward(
        input, *weights, hx, cx, *results, *dense, reverse, *sizes, True, bidirectional, batch_sizes, batch_first, workspace
    )
    return [x.clone(memory_format=torch.contiguous_format) for x in gradients]


def plain_layer_backward(tensors: list[Tensor], grads: list[Tensor | None], reverse: bool, has_biases: bool) -> list[Tensor]:
    """The gradients of x, the weights and the first states on any device."""
    with torch.enable_grad():
        x, *weights, hx, cx = inputs = [tensor.detach().requires_grad_() for tensor in tensors]
        results = plain_layer(x, weights, hx, cx, reverse, has_biases, train=True)
    pairs = [(result, grad) for result, grad in zip(results, grads, strict=True) if grad is not None]
    return list(torch.autograd.grad([y for y, _ in pairs], inputs, [grad for _, grad in pairs], materialize_grads=True))


@torch.library.register_fake("autoshard::recurrent_layer_backward")
def _(input, weights, hx, cx, *rest):  # type: ignore[no-untyped-def]
    return [x.new_empty(x.shape) for x in (input, *weights, hx, cx)]


@local
def layer_backward(rank: Rank, a: Arguments) -> Any:
    weights = [a[f"weight{k}"] for k in range(1, 5)]
    results, grads = [a[name] for name in ("output", "hy_", "cy_")], [a.get(name) for name in ("grad_output", "grad_hy", "grad_cy")]
    settings = [a[name] for name in SETTINGS]
    return torch.ops.autoshard.recurrent_layer_backward(a["input"], weights, a["hx_"], a["cx_tmp"], results, grads, *settings)


KERNELS: dict[str, Callable[[ShardedOp], Kernel]] = {
    "aten.mkldnn_rnn_layer.default": _forward,
    "aten.mkldnn_rnn_layer_backward.default": lambda sharded: layer_backward,
}
