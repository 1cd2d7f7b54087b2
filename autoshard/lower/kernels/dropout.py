"""Dropout whose mask is that of the whole tensor: every rank draws all of it and keeps its part.

    m = bernoulli(1 - p) / (1 - p), drawn for the whole shape        y = x * (this rank's part of m)

With the generator in the same state everywhere, replicas drop the same elements, parts different ones, and any mesh the same as
one process. The whole mask exists while it is drawn. `from_state` puts the generator into a state for as long as one op runs,
so that every rank of a process, and the whole program beside them, draw the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from autoshard.layout import Layout, rank_bounds
from autoshard.lower.collectives import Rank
from autoshard.lower.kernels.local_inputs import Arguments, Kernel, ShardedOp, local
from autoshard.lower.literals import overload

aten = torch.ops.aten


@cache
def draws(target: str) -> bool:
    """Whether an op draws random numbers. torch tags attention likewise, for the dropout that no kernel of the CPU has."""
    return _draws(overload(target))


def _draws(function: torch._ops.OpOverload) -> bool:
    return torch.Tag.nondeterministic_seeded in function.tags and "attention" not in function.name()


def first_state(seed: int) -> Tensor:
    """The state of the CPU's generator after torch.manual_seed(seed)."""
    return torch.Generator().manual_seed(seed).get_state()


@contextmanager
def from_state(state: Tensor) -> Iterator[None]:
    """torch's CPU generator goes on from `state`; afterwards it is as it was."""
    own = torch.get_rng_state()
    torch.set_rng_state(state)
    try:
        yield
    finally:
        torch.set_rng_state(own)


class DrawsInOrder(TorchDispatchMode):
    """Random ops draw in the order of dims, whatever the strides: as a captured program's do, which are called on contiguous tensors."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        given, named = pytree.tree_map_only(Tensor, Tensor.contiguous, (args, kwargs or {})) if _draws(func) else (args, kwargs or {})
        result = func(*given, **named)
        if func._schema.is_mutable and given is not args and given[0] is not args[0]:
            args[0].copy_(result)
            return args[0]
        return result


@local
def native_dropout(rank: Rank, a: Arguments, *, shape: tuple[int, ...], layout: Layout) -> tuple[Tensor, Tensor]:
    x, keep = a["input"], 1.0 - a["p"]
    mask = aten.bernoulli.p(x.new_empty(shape), keep) / keep
    for dim, (begin, end) in enumerate(rank_bounds(shape, layout, rank.mesh, rank.place)):
        mask = mask.narrow(dim, begin, end - begin) if end - begin != shape[dim] else mask
    return x * mask, mask != 0


def _native_dropout(laid: ShardedOp) -> Kernel | None:
    layout, shape, p = laid.layout("input"), laid.shape("input"), laid.arguments["p"]
    trains = laid.arguments["train"] in (True, None) and 0 < p < 1
    cut = layout is not None and any(placement.is_shard() for placement in layout)
    return partial(native_dropout, shape=shape, layout=layout) if trains and cut else None


KERNELS = {"aten.native_dropout.default": _native_dropout}
