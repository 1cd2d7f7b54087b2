"""An op with the layouts of its tensors, from which its kernel is chosen, and small functions that several kernels share.

Where a vocabulary, experts or another indexed dim is sharded, a rank whose shard begins at s and has v indices holds the ids
[s, s + v). There an id is local as `id - s`, and it belongs to another rank when that is negative or >= v.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard

from autoshard.graph import Op, Ref
from autoshard.layout import Layout, text
from autoshard.lower.collectives import Rank, RankGenerator
from autoshard.mesh import Mesh
from autoshard.torch_private import DispatchKey, ForceDispatchKeyGuard, local_exclude_set, local_include_set

Axes = tuple[int, ...]
Arguments = Mapping[str, Any]
Kernel = Callable[[Rank, Arguments], RankGenerator]


@dataclass(frozen=True)
class ShardedOp:
    """An op and the layouts of its tensors."""

    op: Op
    arguments: Arguments  # literals by name, Ref for tensors
    shapes: tuple[tuple[int, ...], ...]  # global shapes of the inputs
    inputs: tuple[Layout, ...]
    outputs: tuple[Layout | None, ...]
    mesh: Mesh

    def layout(self, name: str) -> Layout | None:
        """The layout of a tensor argument; None when the call has no such tensor."""
        argument = self.arguments.get(name)
        return self.inputs[argument.index] if isinstance(argument, Ref) else None

    def shape(self, name: str) -> tuple[int, ...]:
        """The global shape of a tensor argument."""
        return self.shapes[self.arguments[name].index]

    def ndim(self, name: str) -> int:
        return len(self.shape(name))

    def axes_of(self, name: str, *dims: int) -> Axes:
        """The mesh axes on which a tensor argument is sharded on one of the dims."""
        layout, ndim = self.layout(name) or (), self.ndim(name)
        return tuple(k for k, p in enumerate(layout) if isinstance(p, Shard) and p.dim in {d % max(ndim, 1) for d in dims})

    def output_axes(self, dim: int) -> Axes:
        """The mesh axes on which the first output is sharded on `dim`."""
        return tuple(k for k, p in enumerate(self.outputs[0] or ()) if isinstance(p, Shard) and p.dim == dim)

    def axes_to_add_once(self, name: str) -> Axes:
        """The mesh axes on which the first output is Partial and this argument replicated: only one rank may add it."""
        pairs = enumerate(zip(self.outputs[0] or (), self.layout(name) or ()))
        return tuple(k for k, (out, x) in pairs if isinstance(out, Partial) and isinstance(x, Replicate))

    def refuse(self, why: str) -> ValueError:
        layouts = "; ".join(text(layout) for layout in self.inputs)
        return ValueError(f"op {self.op.name} ({self.op.target}) has no local program for the input layouts {layouts}: {why}")


def local(function: Callable[..., Any]) -> Callable[..., RankGenerator]:
    """A function without collectives as a kernel: a generator that yields nothing."""

    @wraps(function)
    def asking(*args: Any, **kwargs: Any) -> RankGenerator:
        yield from ()
        return function(*args, **kwargs)

    return asking


def localised(ids: Tensor, rank: Rank, axes: Axes, global_size: int, size: int) -> tuple[Tensor, Tensor]:
    """ids counted from the start of this rank's shard, and which of them belong to other ranks.

    size: of the shard; global_size: of the dim, which is sharded on `axes`.
    """
    ids = ids - rank.start(axes, global_size)
    return ids, (ids < 0) | (ids >= size)


@contextmanager
def autograd() -> Iterator[None]:
    """Inside the block autograd works, also in the kernel of an operator and in a program that inductor compiled, where it is excluded."""
    excluded = local_exclude_set()
    for key in (DispatchKey.AutogradFunctionality, DispatchKey.AutogradOther):
        excluded = excluded.remove(key)
    with ForceDispatchKeyGuard(local_include_set(), excluded), torch.enable_grad():
        yield


def wide(x: Tensor) -> Tensor:
    """Half precision as single precision, in which torch's own kernels add as well."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
