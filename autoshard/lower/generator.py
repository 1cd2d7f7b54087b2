"""The generator from which random ops draw: a state that all ranks share, and its branches for single shards.

`from_state`   a block of code draws from a state; torch's generator has its former state afterwards
`for_shard`    a block draws for one shard of a tensor, and the state goes on by one draw, the same for all shards
`per_shard`    an operator that draws inside `for_shard`, as one operator
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx

from autoshard.capture import draws as torch_draws
from autoshard.lower.literals import overload
from autoshard.torch_private import OpOverload

OURS = ("aten", "prims", "autoshard", "_c10d_functional")  # namespaces whose operators have torch's tag if they draw


@cache
def draws(target: str) -> bool:
    """Whether an op draws random numbers, or may do so: of an operator from elsewhere nobody knows."""
    return _may_draw(overload(target))


def _may_draw(function: OpOverload) -> bool:
    return torch_draws(function) or function.namespace not in OURS


def first_state(seed: int, device: str = "cpu") -> Tensor:
    """The state of a device's generator after torch.manual_seed(seed)."""
    return torch.Generator(device).manual_seed(seed).get_state()


def _of(device: str) -> Any:
    """The module of torch with the functions of the generator from which ops on a device draw."""
    return torch.cuda if device == "cuda" else torch


def state_of_generator(device: str = "cpu") -> Tensor:
    return _of(device).get_rng_state()


@contextmanager
def from_state(state: Tensor, device: str = "cpu") -> Iterator[None]:
    """torch's generator of the device starts from `state` inside the block; afterwards it has its former state again."""
    former = state_of_generator(device)
    _of(device).set_rng_state(state)
    try:
        yield
    finally:
        _of(device).set_rng_state(former)


@contextmanager
def for_shard(first: int, device: str) -> Iterator[None]:
    """Inside the block torch's generator draws for the shard whose first element has this place in the global tensor; afterwards it is
    one draw further than before, whatever shard it was."""
    seed = mixed(state_of_generator(device), first)
    with from_state(first_state(seed, device), device):
        yield
    torch.rand((), device=device)


def mixed(state: Tensor, number: int) -> int:
    """A seed that belongs to a state and a number."""
    return int.from_bytes(hashlib.blake2b(state.numpy().tobytes() + number.to_bytes(8, "little"), digest_size=7).digest(), "little")


@cache
def per_shard(target: str) -> OpOverload:
    """The operator with one argument more, in front: `first` of `for_shard`. It is one node of a traced graph."""
    function, name = overload(target), target.replace(".", "_")
    arguments = str(function._schema).partition("(")[2].replace(", Generator? generator=None", "").replace(", *)", ")")
    torch.library.define(f"autoshard::{name}", f"(int first, {arguments}", tags=torch.Tag.nondeterministic_seeded)

    def fake(first: int, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    def run(first: int, *args: Any, **kwargs: Any) -> Any:
        device = next((x.device for x in args if isinstance(x, Tensor)), kwargs.get("device") or torch.device("cpu"))
        with for_shard(first, device.type):
            return function(*args, **kwargs)

    torch.library.impl(f"autoshard::{name}", "CompositeExplicitAutograd", run)
    torch.library.register_fake(f"autoshard::{name}", fake)
    return getattr(torch.ops.autoshard, name).default


def is_random(graph: fx.Graph) -> bool:
    return bool(drawing(graph))


def drawing(graph: fx.Graph) -> list[fx.Node]:
    """The nodes of a graph that draw random numbers, or may do so: all from one state, so in this order."""
    return [node for node in graph.nodes if isinstance(node.target, OpOverload) and _may_draw(node.target)]
