"""Local programs of recurrent layers: the library's workspace has a size that no plan knows.

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
SETTINGS = ("reverse", "batch_sizes", "mode", "hidden_size", "num_layers", "has_biases", "bidirectional", "batch_first", "train")


def _forward(sharded: ShardedOp) -> Kernel:
    planned = sharded.op.outputs[3]

    @local
    def layer(rank: Rank, a: Arguments) -> tuple[Tensor | None, ...]:
        y, hy, cy, _ = aten.mkldnn_rnn_layer.default(**a)
        return y, hy, cy, None if planned is None else y.new_zeros(planned.shape, dtype=torch.uint8)

    return layer


@local
def layer_backward(rank: Rank, a: Arguments) -> Any:
    weights = {f"weight{k}": a[f"weight{k + 1}"] for k in range(4)}
    more = {name: a[name] for name in SETTINGS}
    outputs = aten.mkldnn_rnn_layer.default(input=a["input"], **weights, hx_=a["hx_"], cx_=a["cx_tmp"], **more)
    dense = {name: a[name].contiguous() for name in ("grad_output", "grad_hy", "grad_cy") if a.get(name) is not None}
    return aten.mkldnn_rnn_layer_backward.default(**{**a, **dense, "workspace": outputs[3]})


def _backward(sharded: ShardedOp) -> Kernel:
    return layer_backward


KERNELS: dict[str, Callable[[ShardedOp], Kernel]] = {
    "aten.mkldnn_rnn_layer.default": _forward,
    "aten.mkldnn_rnn_layer_backward.default": _backward,
}
