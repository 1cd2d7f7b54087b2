"""Local programs of grouped matmuls whose experts are sharded: a rank multiplies the tokens of its own experts.

Tokens are sorted by expert; those of experts [s, s + v) are the rows [first, last), first = offs[s - 1], last = offs[s + v - 1].
A cyclic shift by `first` rows brings them to the front, so that the ends of the local groups are offs - first. The rows behind the
last group are set to 0. No size here depends on data.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autoshard.lower.collectives import Rank
from autoshard.lower.kernels.sharded_op import Arguments, Axes, Kernel, ShardedOp, local
from autoshard.lower.literals import overload

aten = torch.ops.aten


def aligned_grouped_mm(self: Tensor, mat2: Tensor, *options: Any, **named: Any) -> Tensor:
    """torch's grouped matmul, of operands whose rows begin at multiples of 16 bytes, as it needs them."""
    return aten._grouped_mm.default(_aligned(self), _aligned(mat2), *options, **named)


def _aligned(x: Tensor) -> Tensor:
    unit = 16 // x.element_size()
    if 1 in x.stride()[-2:] and all(step % unit == 0 for step in x.stride() if step != 1):
        return x
    return F.pad(x, (0, -x.shape[-1] % unit)).contiguous().narrow(-1, 0, x.shape[-1])


FUNCTIONS: dict[str, Callable[..., Any]] = {"aten._grouped_mm.default": aligned_grouped_mm}


def _function(target: str) -> Callable[..., Any]:
    return FUNCTIONS[target] if target in FUNCTIONS else overload(target)


def _own_groups(rank: Rank, axes: Axes, offs: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """The first row of this rank's experts, and the ends of their groups counted from there."""
    ends = torch.cat((offs.new_zeros(1), offs))
    at = rank.start(axes, offs.shape[0])
    first = ends.index_select(0, at.reshape(1))
    return first, ends.index_select(0, at + 1 + torch.arange(num_experts, device=offs.device)) - first


def _shifted(x: Tensor, by: Tensor, dim: int = 0) -> Tensor:
    """A cyclic shift: row i of the result is row i + by of x."""
    size = x.shape[dim]
    return x.index_select(dim, (torch.arange(size, device=x.device) + by) % size)


def _without_rest(x: Tensor, ends: Tensor) -> Tensor:
    """Sets the rows behind the last group to 0, which torch's kernels leave uninitialised."""
    behind = torch.arange(x.shape[0], device=x.device) >= ends[-1]
    return x.masked_fill(behind.unsqueeze(-1), 0)


@local
def grouped_mm(rank: Rank, a: Arguments, *, target: str, x: str, w: str, axes: Axes) -> Tensor:
    first, ends = _own_groups(rank, axes, a["offs"], a[w].shape[0])
    products = _function(target)(**{**a, x: _shifted(a[x], first), "offs": ends})
    return _shifted(_without_rest(products, ends), -first)


@local
def weight_gradient(rank: Rank, a: Arguments, *, target: str, num_experts: int, axes: Axes) -> Tensor:
    """x'[k, s] @ g[s, n] for each expert, s the tokens. num_experts: on all ranks together."""
    first, ends = _own_groups(rank, axes, a["offs"], rank.length(axes, num_experts))
    shifted = {"self": _shifted(a["self"], first, 1), "mat2": _shifted(a["mat2"], first), "offs": ends}
    return _function(target)(**{**a, **shifted})


@local
def grouped_mm_backward(rank: Rank, a: Arguments, *, target: str, axes: Axes) -> Any:
    first, ends = _own_groups(rank, axes, a["offs"], a["weight"].shape[0])
    x, g = _shifted(a["input"], first), _shifted(a["grad_output"], first)
    x_grad, w_grad = overload(target)(x, a["weight"], ends, g)
    return _shifted(_without_rest(x_grad, ends), -first), w_grad


def _grouped_mm(sharded: ShardedOp, *, x: str, w: str) -> Kernel | None:
    if sharded.layout("offs") is None:
        return None
    if sharded.ndim(w) == 3:
        axes = sharded.axes_of(w, 0)
        return partial(grouped_mm, target=sharded.op.target, x=x, w=w, axes=axes) if axes else None
    axes = sharded.output_axes(0)
    if not axes:
        return None
    return partial(weight_gradient, target=sharded.op.target, num_experts=sharded.op.output.shape[0], axes=axes)


def _grouped_mm_backward(sharded: ShardedOp) -> Kernel | None:
    axes = sharded.axes_of("weight", 0)
    return partial(grouped_mm_backward, target=sharded.op.target, axes=axes) if axes else None


KERNELS: dict[str, Callable[[ShardedOp], Kernel | None]] = {
    "aten._grouped_mm.default": partial(_grouped_mm, x="self", w="mat2"),
    "transformers.grouped_mm_fallback.default": partial(_grouped_mm, x="input", w="weight"),
    "transformers.grouped_mm_fallback_backward.default": _grouped_mm_backward,
}
