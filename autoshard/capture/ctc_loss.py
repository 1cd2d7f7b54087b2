"""The loss of connectionist temporal classification as one operator, whose results have shapes that don't depend on the lengths.

    losses[n] = - ln sum over alignments a of targets[n] of the product over t < input_lengths[n] of exp(log_probs[t, n, a_t])

log_probs [T, N, C], targets [N, S] (padded) or [sum of the lengths], lengths [N]; log_alpha [N, T, 2 S + 1] is torch's, 0 where there is no
such time or place. torch's own is as wide as the longest target. `lower.kernels.losses` has the kernels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

TENSORS = "Tensor log_probs, Tensor targets, Tensor input_lengths, Tensor target_lengths"
OPTIONS = "int blank=0, bool zero_infinity=False"
torch.library.define("autoshard::ctc_loss", f"({TENSORS}, {OPTIONS}) -> (Tensor losses, Tensor log_alpha)")
torch.library.define("autoshard::ctc_loss_backward", f"(Tensor grad, {TENSORS}, Tensor losses, Tensor log_alpha, {OPTIONS}) -> Tensor")
CTC, CTC_BACKWARD = torch.ops.autoshard.ctc_loss.default, torch.ops.autoshard.ctc_loss_backward.default
MEAN = 1  # of torch's reduction argument: 0 none, 1 mean, 2 sum


@torch.library.register_fake("autoshard::ctc_loss")
def _(log_probs, targets, input_lengths, target_lengths, blank=0, zero_infinity=False):  # type: ignore[no-untyped-def]
    times, batch = log_probs.shape[:2]
    return log_probs.new_empty(batch), log_probs.new_empty((batch, times, 2 * targets.shape[-1] + 1))


@torch.library.register_fake("autoshard::ctc_loss_backward")
def _(grad, log_probs, *rest):  # type: ignore[no-untyped-def]
    return torch.empty_like(log_probs, memory_format=torch.contiguous_format)


def _save(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.blank, ctx.zero_infinity = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, grad: Tensor, _: Any) -> tuple:
    gradient = CTC_BACKWARD(grad, *ctx.saved_tensors, ctx.blank, ctx.zero_infinity)
    return gradient, None, None, None, None, None


torch.library.register_autograd("autoshard::ctc_loss", _differentiate, setup_context=_save)


@contextmanager
def ctc_as_one_op() -> Iterator[None]:
    """F.ctc_loss of CPU tensors (those of a capture are fake ones) is the operator inside the block, which one thread enters at a time."""
    library = torch.library.Library("aten", "IMPL")
    for overload in ("IntList", "Tensor"):
        library.impl(f"ctc_loss.{overload}", _one_op, "AutogradCPU")
    try:
        yield
    finally:
        library._destroy()


def _one_op(log_probs, targets, input_lengths, target_lengths, blank=0, reduction=MEAN, zero_infinity=False):  # type: ignore[no-untyped-def]
    batched = log_probs.dim() == 3
    if not batched:
        log_probs, targets = log_probs.unsqueeze(1), targets.reshape(1, -1)
    lengths = [_as_tensor(given, targets).reshape(-1) for given in (input_lengths, target_lengths)]
    losses = CTC(log_probs, targets, *lengths, blank, zero_infinity)[0]
    if zero_infinity:
        losses = torch.where(losses == torch.inf, 0.0, losses)
    if reduction == MEAN:
        return (losses / lengths[1].clamp_min(1)).mean()
    return losses.sum() if reduction else losses if batched else losses.squeeze(0)


def _as_tensor(lengths: Tensor | Sequence[int], targets: Tensor) -> Tensor:
    if isinstance(lengths, Tensor):
        return lengths
    return torch.stack([targets.new_full((), length, dtype=torch.int64) for length in lengths])
