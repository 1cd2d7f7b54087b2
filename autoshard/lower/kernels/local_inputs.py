"""What kernels stand on: an op and how it is laid, and small parts that several kernels share.

A cut of a vocabulary, of experts or of any indexed dim: a rank whose part begins at s and has v indices holds the ids [s, s + v),
so an id is local as `id - s`, and outside when that is negative or >= v.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor.placement_types import Shard

from autoshard.graph import Op, Ref
from autoshard.layout import Layout, text
from autoshard.lower.collectives import Asking, Rank
from autoshard.mesh import Mesh

Axes = tuple[int, ...]
Arguments = Mapping[str, Any]
Kernel = Callable[[Rank, Arguments], Asking]


@dataclass(frozen=True)
class ShardedOp:
    """An op and the layouts of its tensors."""

    op: Op
    arguments: Arguments  # literals by name, Ref for tensors
    shapes: tuple[tuple[int, ...], ...]  # of the inputs, whole
    inputs: tuple[Layout, ...]
    outputs: tuple[Layout | None, ...]
    mesh: Mesh

    def layout(self, name: str) -> Layout | None:
        """The layout of a tensor argument; None when it isn't given."""
        given = self.arguments.get(name)
        return self.inputs[given.index] if isinstance(given, Ref) else None

    def shape(self, name: str) -> tuple[int, ...]:
        """The whole shape of a tensor argument."""
        return self.shapes[self.arguments[name].index]

    def ndim(self, name: str) -> int:
        return len(self.shape(name))

    def cutting(self, name: str, *dims: int) -> Axes:
        """The axes that cut one of the dims of a tensor argument."""
        layout, ndim = self.layout(name) or (), self.ndim(name)
        return tuple(k for k, p in enumerate(layout) if isinstance(p, Shard) and p.dim in {d % max(ndim, 1) for d in dims})

    def refuse(self, why: str) -> ValueError:
        layouts = "; ".join(text(layout) for layout in self.inputs)
        return ValueError(f"op {self.op.name} ({self.op.target}) has no local program for inputs laid {layouts}: {why}")


def local(function: Callable[..., Any]) -> Callable[..., Asking]:
    """A kernel that asks for nothing, as a generator."""

    @wraps(function)
    def asking(*args: Any, **kwargs: Any) -> Asking:
        yield from ()
        return function(*args, **kwargs)

    return asking


def localised(ids: Tensor, rank: Rank, axes: Axes, whole: int, size: int) -> tuple[Tensor, Tensor]:
    """ids within this rank's part, and which of them are outside. size: of the part; whole: of the dim that `axes` cut."""
    ids = ids - rank.start(axes, whole)
    return ids, (ids < 0) | (ids >= size)


def wide(x: Tensor) -> Tensor:
    """As torch's own kernels, sums of half precision run in single."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
