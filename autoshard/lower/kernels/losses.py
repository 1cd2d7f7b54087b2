"""Local programs of softmax and losses where the classes or the batch are sharded.

    log_softmax         m = max over ranks of max x;  s = sum over ranks of sum e^(x - m);  y = x - m - log s
    ... backward        x' = g - e^y (sum over ranks of sum g);       softmax:  x' = (g - sum over ranks of sum g y) y
    nll_loss            loss = - sum_n w_n y[n, t_n] / W,  W = sum over batch ranks of sum_n w_n  -> Partial

Where the classes are sharded, a target t_n that belongs to another rank counts as 0 (ids: sharded_op.py).
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from autoshard.lower.collectives import Rank, RankGenerator, all_reduce
from autoshard.lower.kernels.sharded_op import Arguments, Axes, Kernel, ShardedOp, local, localised, wide
from autoshard.lower.literals import overload

aten = torch.ops.aten
MEAN = 1  # of torch's reduction argument: 0 none, 1 mean, 2 sum


def softmax(rank: Rank, a: Arguments, *, axes: Axes, log: bool) -> RankGenerator:
    x, dim = wide(a["self"]), a["dim"]
    m = yield from all_reduce(x.amax(dim, keepdim=True), axes, "max")
    z = x - m if log else (x - m).exp()  # one tensor is kept: strategies.internal_bytes counts them
    s = yield from all_reduce((z.exp() if log else z).sum(dim, keepdim=True), axes)
    y = z - s.log() if log else z / s
    return y if a["half_to_float"] else y.to(a["self"].dtype)


def softmax_backward(rank: Rank, a: Arguments, *, axes: Axes, log: bool) -> RankGenerator:
    g, y, dim = wide(a["grad_output"]), wide(a["output"]), a["dim"]
    s = yield from all_reduce((g if log else g * y).sum(dim, keepdim=True), axes)
    return (g - y.exp() * s if log else (g - s) * y).to(a["input_dtype"])


def nll_loss(rank: Rank, a: Arguments, *, batch: Axes, classes: Axes, num_classes: int) -> RankGenerator:
    y, t, reduction = a["self"], a["target"], a["reduction"]
    ignored = t == a["ignore_index"]
    if a.get("weight") is None:
        w = (~ignored).to(y.dtype)
    else:
        w = a["weight"][t.masked_fill(ignored, 0)].masked_fill(ignored, 0)
    t, outside = localised(t, rank, classes, num_classes, y.shape[1])
    unseen = outside | ignored
    losses = -(y.gather(1, t.masked_fill(unseen, 0).unsqueeze(1)).squeeze(1) * w).masked_fill(unseen, 0)
    if reduction == 0:
        return losses, w.new_zeros(())
    total = yield from all_reduce(w.sum(), batch)
    return (losses.sum() / total if reduction == MEAN else losses.sum()), total


@local
def nll_loss_backward(rank: Rank, a: Arguments, *, target: str, classes: Axes, num_classes: int) -> Tensor:
    t, outside = localised(a["target"], rank, classes, num_classes, a["self"].shape[1])
    unseen = outside | (a["target"] == a["ignore_index"])
    return overload(target)(**{**a, "target": t.masked_fill(unseen, -100), "ignore_index": -100})


def _along(sharded: ShardedOp, *, of: tuple[str, ...], kernel: Callable[..., RankGenerator], log: bool) -> Kernel | None:
    axes, *others = (sharded.axes_of(name, sharded.arguments["dim"]) for name in of)
    if any(other != axes for other in others):
        raise sharded.refuse("the gradient and the output must be sharded alike on the dim of the softmax")
    return partial(kernel, axes=axes, log=log) if axes else None


def _batch_and_classes(sharded: ShardedOp) -> tuple[Axes, Axes, int]:
    """The mesh axes on which the batch is sharded, those on which the classes are, and the number of classes."""
    batched = sharded.ndim("self") >= 2
    others = [d for d in range(sharded.ndim("self")) if d != 1] if batched else []
    classes = sharded.axes_of("self", 1 if batched else 0)
    batch = sharded.axes_of("self", *others) if batched else ()
    if batch != (sharded.axes_of("target", *(max(d - 1, 0) for d in others)) if batched else ()):
        raise sharded.refuse("scores and targets must be sharded alike on the batch")
    if classes and (sharded.layout("weight") is not None or not batched):
        raise sharded.refuse("the classes can be sharded for a batch without class weights only")
    return batch, classes, sharded.shape("self")[int(batched)]


def _nll_loss(sharded: ShardedOp) -> Kernel | None:
    batch, classes, num_classes = _batch_and_classes(sharded)
    return partial(nll_loss, batch=batch, classes=classes, num_classes=num_classes) if batch or classes else None


def _nll_loss_backward(sharded: ShardedOp) -> Kernel | None:
    _, classes, num_classes = _batch_and_classes(sharded)
    return partial(nll_loss_backward, target=sharded.op.target, classes=classes, num_classes=num_classes) if classes else None


KERNELS: dict[str, Callable[[ShardedOp], Kernel | None]] = {
    "aten._log_softmax.default": partial(_along, of=("self",), kernel=softmax, log=True),
    "aten._softmax.default": partial(_along, of=("self",), kernel=softmax, log=False),
    "aten._log_softmax_backward_data.default": partial(_along, of=("output", "grad_output"), kernel=softmax_backward, log=True),
    "aten._softmax_backward_data.default": partial(_along, of=("output", "grad_output"), kernel=softmax_backward, log=False),
    "aten.nll_loss_forward.default": _nll_loss,
    "aten.nll_loss_backward.default": _nll_loss_backward,
    "aten.nll_loss2d_forward.default": _nll_loss,
    "aten.nll_loss2d_backward.default": _nll_loss_backward,
}


# -- the captured loss of connectionist temporal classification, whose results have the widths that were captured -----------------------


def ctc_loss(log_probs, targets, input_lengths, target_lengths, blank=0, zero_infinity=False) -> tuple[Tensor, Tensor]:  # type: ignore[no-untyped-def]
    """losses [N] and log_alpha [N, T, 2 S + 1]."""
    losses, alpha = aten._ctc_loss.Tensor(log_probs, targets, input_lengths, target_lengths, blank, zero_infinity)
    alpha = F.pad(alpha, (0, 2 * targets.shape[-1] + 1 - alpha.shape[-1]))
    times, places = (torch.arange(n, device=alpha.device) for n in alpha.shape[1:])
    never = (times >= input_lengths.reshape(-1, 1)).unsqueeze(2) | (places > 2 * target_lengths.reshape(-1, 1)).unsqueeze(1)
    return losses, alpha.masked_fill(never.to(alpha.device), 0.0)  # torch leaves them uninitialised


def ctc_loss_backward(grad, log_probs, targets, input_lengths, target_lengths, losses, log_alpha, blank=0, zero_infinity=False) -> Tensor:  # type: ignore[no-untyped-def]
    lengths = (input_lengths, target_lengths)
    return aten._ctc_loss_backward.Tensor(grad, log_probs, targets, *lengths, losses, log_alpha, blank, zero_infinity)


for _device in ("CPU", "CUDA"):
    torch.library.impl("autoshard::ctc_loss", _device, ctc_loss)
    torch.library.impl("autoshard::ctc_loss_backward", _device, ctc_loss_backward)
