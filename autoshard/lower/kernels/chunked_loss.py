"""Local programs of a cross entropy in chunks of tokens: x [t, h] and weight [h, v] of a rank, with the logits of `rows` tokens at a time.

    z = x w of the chunk's tokens        L_n = ln sum over classes of e^z        loss = sum over n of L_n - z[n, target_n]
    backward    p = e^(z - L) - [class = target]        x' = p w' / W        w' = sum over chunks of p' x / W

W is the number of tokens whose target counts, or 1 for a sum. Where the classes are sharded, L is merged over the ranks once, after all
chunks, and the rank that has the target's class adds the token's loss.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autoshard.capture import LOSS, LOSS_BACKWARD
from autoshard.lower.collectives import Rank, RankGenerator, all_reduce
from autoshard.lower.kernels.losses import MEAN
from autoshard.lower.kernels.sharded_op import Arguments, Axes, Kernel, ShardedOp, local, localised, wide


class _Targets(NamedTuple):
    """Per token: the class among those of this rank (0 where it has another), whether this rank has it, whether the token counts."""

    classes: Tensor
    here: Tensor
    counts: Tensor

    @staticmethod
    def of(a: Arguments, rank: Rank | None = None, axes: Axes = (), num_classes: int = 0) -> "_Targets":
        target, counts = a["target"], a["target"] != a["ignore_index"]
        here = counts
        if rank is not None and axes:
            target, outside = localised(target, rank, axes, num_classes, a["weight"].shape[1])
            here = counts & ~outside
        return _Targets(target.masked_fill(~here, 0), here, counts)


def _logsumexp(a: Arguments, targets: _Targets) -> tuple[Tensor, Tensor]:
    """Of every token over this rank's classes, and the logits of the targets."""
    sums, picked = [], []
    for x, classes in zip(a["x"].split(a["rows"]), targets.classes.split(a["rows"]), strict=True):
        z = wide(x @ a["weight"])
        sums.append(z.logsumexp(1))
        picked.append(z.gather(1, classes.unsqueeze(1)).squeeze(1))
        del z  # before the next chunk's
    return torch.cat(sums), torch.cat(picked)


def _loss(a: Arguments, targets: _Targets, logsumexp: Tensor, picked: Tensor, total: Tensor) -> Tensor:
    loss = (logsumexp - picked).masked_fill(~targets.here, 0).sum()
    return loss / total if a["reduction"] == MEAN else loss


def _gradients(a: Arguments, targets: _Targets) -> tuple[Tensor, Tensor]:
    """Of x, and of the transposed weight."""
    scale = wide(a["grad"]) / a["total_weight"] if a["reduction"] == MEAN else wide(a["grad"])
    factors = targets.counts * scale
    of_x, of_weight = torch.empty_like(a["x"]), None
    places = torch.arange(len(of_x), device=of_x.device).split(a["rows"])
    of_tokens = (a["x"], a["logsumexp"], targets.classes, targets.here, factors)
    for x, *chunk, place in zip(*(tensor.split(a["rows"]) for tensor in of_tokens), places, strict=True):
        g = _of_logits(x, a["weight"], *chunk)
        of_x = of_x.index_copy_(0, place, g @ a["weight"].t())  # its result: in a traced graph, readers wait for it
        own = g.t() @ x
        del g  # before the next chunk's: `internal_bytes` counts two tensors of a chunk's logits
        of_weight = wide(own) if of_weight is None else of_weight.add_(own)
        del own
    assert of_weight is not None
    return of_x, of_weight.to(a["weight"].dtype)


def _of_logits(x: Tensor, weight: Tensor, logsumexp: Tensor, classes: Tensor, here: Tensor, factor: Tensor) -> Tensor:
    """The gradient of a chunk's logits, in the dtype of x."""
    p = wide(x @ weight) - logsumexp.unsqueeze(1)
    p = p.exp()
    p = p.scatter_add(1, classes.unsqueeze(1), -here.to(p.dtype).unsqueeze(1))
    p = p * factor.unsqueeze(1)
    return p.to(x.dtype)


def chunked_loss(x: Tensor, weight: Tensor, target: Tensor, ignore_index: int, reduction: int, rows: int) -> tuple[Tensor, ...]:
    """loss, total weight, and the logsumexp of every token."""
    a = {"x": x, "weight": weight, "target": target, "ignore_index": ignore_index, "reduction": reduction, "rows": rows}
    targets = _Targets.of(a)
    logsumexp, picked = _logsumexp(a, targets)
    total = targets.counts.to(logsumexp.dtype).sum()
    return _loss(a, targets, logsumexp, picked, total), total, logsumexp


def chunked_loss_backward(
    grad: Tensor, x: Tensor, weight: Tensor, target: Tensor, total_weight: Tensor, logsumexp: Tensor, ignore_index: int, reduction: int,
    rows: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The gradients of x and of the transposed weight."""
    a = {"grad": grad, "x": x, "weight": weight, "target": target, "total_weight": total_weight, "logsumexp": logsumexp}
    a |= {"ignore_index": ignore_index, "reduction": reduction, "rows": rows}
    return _gradients(a, _Targets.of(a))


for _name, _function in (("chunked_loss", chunked_loss), ("chunked_loss_backward", chunked_loss_backward)):
    torch.library.impl(f"autoshard::{_name}", "CompositeExplicitAutograd", _function)


def sharded_loss(rank: Rank, a: Arguments, *, batch: Axes, classes: Axes, num_classes: int) -> RankGenerator:
    targets = _Targets.of(a, rank, classes, num_classes)
    logsumexp, picked = _logsumexp(a, targets)
    if classes:
        largest = yield from all_reduce(logsumexp, classes, "max")
        logsumexp = largest + (yield from all_reduce((logsumexp - largest).exp(), classes)).log()
    total = yield from all_reduce(targets.counts.to(logsumexp.dtype).sum(), batch)
    return _loss(a, targets, logsumexp, picked, total), total, logsumexp


@local
def sharded_loss_backward(rank: Rank, a: Arguments, *, classes: Axes, num_classes: int) -> Any:
    return _gradients(a, _Targets.of(a, rank, classes, num_classes))


def _loss_kernel(sharded: ShardedOp) -> Kernel | None:
    batch, classes = sharded.axes_of("x", 0), sharded.axes_of("weight", 1)
    if not batch and not classes:
        return None
    return partial(sharded_loss, batch=batch, classes=classes, num_classes=sharded.shape("weight")[1])


def _backward_kernel(sharded: ShardedOp) -> Kernel | None:
    classes = sharded.axes_of("weight", 1)
    return partial(sharded_loss_backward, classes=classes, num_classes=sharded.shape("weight")[1]) if classes else None


FUNCTIONS: dict[str, Callable[..., Any]] = {str(LOSS): chunked_loss, str(LOSS_BACKWARD): chunked_loss_backward}
KERNELS: dict[str, Callable[[ShardedOp], Kernel | None]] = {str(LOSS): _loss_kernel, str(LOSS_BACKWARD): _backward_kernel}
