"""The operators of a cross entropy in chunks of tokens, which `graph.chunked_loss` puts in place of the vocabulary's matmul and the loss.

x [T, H], weight [H, V], target [T] -> loss and total weight (scalars), logsumexp [T]; and the gradients of x and of the transposed weight,
[T, H] and [V, H]. reduction: 1 mean, 2 sum. `lower.kernels.chunked_loss` runs them.
"""

from __future__ import annotations

import torch
from torch import Tensor

OPERANDS = "Tensor x, Tensor weight, Tensor target"
SETTINGS = "int ignore_index, int reduction, int rows"
torch.library.define("autoshard::chunked_loss", f"({OPERANDS}, {SETTINGS}) -> (Tensor loss, Tensor total_weight, Tensor logsumexp)")
torch.library.define(
    "autoshard::chunked_loss_backward",
    f"(Tensor grad, {OPERANDS}, Tensor total_weight, Tensor logsumexp, {SETTINGS}) -> (Tensor grad_x, Tensor grad_weight)",
)


@torch.library.register_fake("autoshard::chunked_loss")
def _(x: Tensor, weight: Tensor, target: Tensor, *_: int) -> tuple[Tensor, Tensor, Tensor]:
    dtype = torch.promote_types(x.dtype, torch.float32)
    return x.new_empty((), dtype=dtype), x.new_empty((), dtype=dtype), x.new_empty(target.shape, dtype=dtype)


@torch.library.register_fake("autoshard::chunked_loss_backward")
def _(grad: Tensor, x: Tensor, weight: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape[::-1])


LOSS, LOSS_BACKWARD = torch.ops.autoshard.chunked_loss.default, torch.ops.autoshard.chunked_loss_backward.default
