"""Local programs of ops whose output is a sum over ranks (Partial) and that are not themselves sums of their inputs.

    matmul with bias, scatter_add, index_add     the bias, or the tensor that is added to, is added by the first rank only
    mean, mean losses                            the local mean times (local count / global count)
"""

import math
from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor
from torch.distributed.tensor.placement_types import Partial, Shard

from autoshard.lower.collectives import Rank
from autoshard.lower.kernels.losses import MEAN
from autoshard.lower.kernels.sharded_op import Arguments, Axes, Kernel, ShardedOp, local
from autoshard.lower.literals import overload


@local
def added_once(rank: Rank, a: Arguments, *, target: str, name: str, axes: Axes) -> Tensor:
    """name: the argument that only the first rank of `axes` adds."""
    return overload(target)(**{**a, name: torch.where(rank.is_first(axes), a[name], 0)})


@local
def scaled(rank: Rank, a: Arguments, *, target: str, dims: tuple[int, ...], count: int) -> Tensor:
    """count: elements of the global tensor along `dims`."""
    return overload(target)(**a) * (math.prod(a["self"].shape[d] for d in dims) / count)


def _added_once(sharded: ShardedOp, *, name: str) -> Kernel | None:
    axes = sharded.axes_to_add_once(name)
    return partial(added_once, target=sharded.op.target, name=name, axes=axes) if axes else None


def _scaled_along(sharded: ShardedOp, dims: Iterable[int]) -> Kernel | None:
    """Summands of a mean along `dims`, divided by the global count. An output that is Partial(avg) keeps the local means as they are."""
    out, layout, shape = sharded.outputs[0] or (), sharded.layout("self") or (), sharded.shape("self")
    averaged = {p.dim for o, p in zip(out, layout) if isinstance(p, Shard) and isinstance(o, Partial) and o.reduce_op == "avg"}
    counted = {d % len(shape) for d in dims} - averaged if shape else set()
    split = tuple(d for d in sorted(counted) if sharded.axes_of("self", d))
    return partial(scaled, target=sharded.op.target, dims=split, count=math.prod(shape[d] for d in split)) if split else None


def _mean(sharded: ShardedOp) -> Kernel | None:
    return _scaled_along(sharded, sharded.arguments.get("dim") or range(sharded.ndim("self")))


def _loss_mean(sharded: ShardedOp) -> Kernel | None:
    return _scaled_along(sharded, range(sharded.ndim("self"))) if sharded.arguments.get("reduction", MEAN) == MEAN else None


ADDING = ("addmm", "addmv", "baddbmm", "addbmm", "scatter_add", "index_add")  # to `self`
LOSSES = ("mse_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "binary_cross_entropy")
KERNELS: dict[str, Callable[[ShardedOp], Kernel | None]] = {
    **{f"aten.{name}.default": partial(_added_once, name="self") for name in ADDING},
    **{f"aten.{name}.default": partial(_added_once, name="bias") for name in ("linear", "convolution")},
    **{f"aten.mean.{overload}": _mean for overload in ("default", "dim")},
    **{f"aten.{name}{way}.default": _loss_mean for name in LOSSES for way in ("", "_backward")},
    "aten.binary_cross_entropy_with_logits.default": _loss_mean,
}
