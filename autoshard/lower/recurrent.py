"""Local programs of whole recurrent layers: the workspace that the library fills has a size that no plan knows.

forward      its workspace is dropped; in its place come zeros of the planned shape, which nobody reads
backward     the forward is run once more for the workspace, as in training: a capture may have noted otherwise
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from autoshard.lower.collectives import Rank
from autoshard.lower.laid import Arguments, Kernel, Laid, local

aten = torch.ops.aten
GIVEN = ("reverse", "batch_sizes", "mode", "hidden_size", "num_layers", "has_biases", "bidirectional", "batch_first", "train")


def _forward(laid: Laid) -> Kernel:
    planned = laid.op.outputs[3]

    @local
    def layer(rank: Rank, a: Arguments) -> tuple[Tensor | None, ...]:
        y, hy, cy, _ = aten.mkldnn_rnn_layer.default(**a)
        return y, hy, cy, None if planned is None else y.new_zeros(planned.shape, dtype=torch.uint8)

    return layer


@local
def layer_backward(rank: Rank, a: Arguments) -> Any:
    weights = {f"weight{k}": a[f"weight{k + 1}"] for k in range(4)}
    more = {name: a[name] for name in GIVEN} | {"train": True}
    made = aten.mkldnn_rnn_layer.default(input=a["input"], **weights, hx_=a["hx_"], cx_=a["cx_tmp"], **more)
    dense = {name: a[name].contiguous() for name in ("grad_output", "grad_hy", "grad_cy") if a.get(name) is not None}
    return aten.mkldnn_rnn_layer_backward.default(**{**a, **dense, "train": True, "workspace": made[3]})


def _backward(laid: Laid) -> Kernel:
    return layer_backward


KERNELS: dict[str, Callable[[Laid], Kernel]] = {
    "aten.mkldnn_rnn_layer.default": _forward,
    "aten.mkldnn_rnn_layer_backward.default": _backward,
}
