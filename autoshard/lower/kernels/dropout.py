"""Dropout with the mask of the global tensor: every rank draws the global mask and keeps its shard.

    m = bernoulli(1 - p) / (1 - p), drawn for the global shape        y = x * (this rank's shard of m)

With the generator in the same state everywhere, replicas drop the same elements, different shards drop different ones, and any mesh
drops the same elements as one process. The global mask needs memory while it is drawn. `from_state` puts the generator into a state
for as long as one op runs, so that every simulated rank of a process, and the unsharded program beside them, draw the same numbers.
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

from autoshard.layout import Layout
from autoshard.lower.collectives import Rank
from autoshard.lower.kernels.sharded_op import Arguments, Kernel, ShardedOp, local
from autoshard.lower.literals import overload
from autoshard.lower.sharding import shard_of_rank

aten = torch.ops.aten


@cache
def draws(target: str) -> bool:
    """Whether an op draws random numbers. torch tags its own attention too, for dropout, which no CPU kernel has."""
    return _draws(overload(target))


def _draws(function: torch._ops.OpOverload) -> bool:
    return torch.Tag.nondeterministic_seeded in function.tags and not (function.namespace == "aten" and "attention" in function.name())


def first_state(seed: int, device: str = "cpu") -> Tensor:
    """The state of a device's generator after torch.manual_seed(seed)."""
    return torch.Generator(device).manual_seed(seed).get_state()


def _generator(device: str) -> Any:
    """The module of torch with the functions of the generator from which ops on a device draw."""
    return torch.cuda if device == "cuda" else torch


def state_of_generator(device: str = "cpu") -> Tensor:
    return _generator(device).get_rng_state()


@contextmanager
def from_state(state: Tensor, device: str = "cpu") -> Iterator[None]:
    """torch's generator of the device starts from `state` inside the block; afterwards it has its former state again."""
    former = state_of_generator(device)
    _generator(device).set_rng_state(state)
    try:
        yield
    finally:
        _generator(device).set_rng_state(former)


class DrawsInOrder(TorchDispatchMode):
    """Random ops draw in row-major order whatever the strides are, as in a captured program, whose ops are called on contiguous tensors."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        inputs, named = pytree.tree_map_only(Tensor, Tensor.contiguous, (args, kwargs or {})) if _draws(func) else (args, kwargs or {})
        result = func(*inputs, **named)
        if func._schema.is_mutable and inputs is not args and inputs[0] is not args[0]:
            args[0].copy_(result)
            return args[0]
        return result


@local
def native_dropout(rank: Rank, a: Arguments, *, shape: tuple[int, ...], layout: Layout) -> tuple[Tensor, Tensor]:
    x, keep = a["input"], 1.0 - a["p"]
    mask = aten.bernoulli.p(x.new_empty(shape), keep) / keep
    mask = shard_of_rank(mask, layout, rank.mesh, rank.place)
    return x * mask, mask != 0


def _native_dropout(sharded: ShardedOp) -> Kernel | None:
    layout, shape, p = sharded.layout("input"), sharded.shape("input"), sharded.arguments["p"]
    trains = sharded.arguments["train"] in (True, None) and 0 < p < 1
    is_sharded = layout is not None and any(placement.is_shard() for placement in layout)
    return partial(native_dropout, shape=shape, layout=layout) if trains and is_sharded else None


KERNELS = {"aten.native_dropout.default": _native_dropout}
