"""Local programs of grouped matmuls whose experts are cut: a rank multiplies the tokens of its own experts.

Tokens are sorted by expert; those of experts [s, s + v) are the rows [first, last), first = offs[s - 1], last = offs[s + v - 1].
Turned by `first` rows they come first, so that the ends of the local groups are offs - first; what lies behind is 0. Nothing
here has a size that depends on data.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor.placement_types import Shard

from autoshard.lower.collectives import Rank
from autoshard.lower.kernels.local_inputs import Arguments, Axes, Kernel, ShardedOp, local
from autoshard.lower.literals import overload


def _own(rank: Rank, axes: Axes, offs: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """The first row of this rank's experts, and the ends of their groups counted from there."""
    ends = torch.cat((offs.new_zeros(1), offs))
    at = rank.start(axes, offs.shape[0])
    first = ends.index_select(0, at.reshape(1))
    return first, ends.index_select(0, at + 1 + torch.arange(num_experts, device=offs.device)) - first


def _turned(x: Tensor, by: Tensor, dim: int = 0) -> Tensor:
    """Row i of the result is row i + by, around the end."""
    size = x.shape[dim]
    return x.index_select(dim, (torch.arange(size, device=x.device) + by) % size)


def _only(x: Tensor, ends: Tensor) -> Tensor:
    """Rows behind the last group are 0: kernels leave them as they are."""
    behind = torch.arange(x.shape[0], device=x.device) >= ends[-1]
    return x.masked_fill(behind.unsqueeze(-1), 0)


@local
def grouped_mm(rank: Rank, a: Arguments, *, target: str, x: str, w: str, axes: Axes) -> Tensor:
    first, ends = _own(rank, axes, a["offs"], a[w].shape[0])
    made = overload(target)(**{**a, x: _turned(a[x], first), "offs": ends})
    return _turned(_only(made, ends), -first)


@local
def weight_gradient(rank: Rank, a: Arguments, *, target: str, num_experts: int, axes: Axes) -> Tensor:
    """x'[k, s] @ g[s, n] by expert, s the tokens. num_experts: of all ranks."""
    first, ends = _own(rank, axes, a["offs"], rank.length(axes, num_experts))
    of_rank = {"self": _turned(a["self"], first, 1), "mat2": _turned(a["mat2"], first), "offs": ends}
    return overload(target)(**{**a, **of_rank})


@local
def grouped_mm_backward(rank: Rank, a: Arguments, *, target: str, axes: Axes) -> Any:
    first, ends = _own(rank, axes, a["offs"], a["weight"].shape[0])
    x, g = _turned(a["input"], first), _turned(a["grad_output"], first)
    of_x, of_w = overload(target)(x, a["weight"], ends, g)
    return _turned(_only(of_x, ends), -first), of_w


def _grouped_mm(laid: ShardedOp, *, x: str, w: str) -> Kernel | None:
    if laid.layout("offs") is None:
        return None
    if laid.ndim(w) == 3:
        axes = laid.cutting(w, 0)
        return partial(grouped_mm, target=laid.op.target, x=x, w=w, axes=axes) if axes else None
    axes = tuple(k for k, p in enumerate(laid.outputs[0] or ()) if isinstance(p, Shard) and p.dim == 0)
    if not axes:
        return None
    return partial(weight_gradient, target=laid.op.target, num_experts=laid.op.output.shape[0], axes=axes)


def _grouped_mm_backward(laid: ShardedOp) -> Kernel | None:
    axes = laid.cutting("weight", 0)
    return partial(grouped_mm_backward, target=laid.op.target, axes=axes) if axes else None


KERNELS: dict[str, Callable[[ShardedOp], Kernel | None]] = {
    "aten._grouped_mm.default": partial(_grouped_mm, x="self", w="mat2"),
    "transformers.grouped_mm_fallback.default": partial(_grouped_mm, x="input", w="weight"),
    "transformers.grouped_mm_fallback_backward.default": _grouped_mm_backward,
}
