"""Which operators draw random numbers, and in which order of its elements torch fills the tensor that is drawn."""

from __future__ import annotations

import torch
from torch import Tensor

from autoshard.torch_private import OpOverload


def draws(function: OpOverload) -> bool:
    """By torch's tag, which its kernels of attention have as well, for a dropout that `autoshard::dropout_attention` does."""
    return torch.Tag.nondeterministic_seeded in function.tags and not (function.namespace == "aten" and "attention" in function.name())


def memory_order(drawn: Tensor) -> tuple[int, ...]:
    """The dims from the slowest to the fastest; () for a row-major tensor."""
    if drawn.is_contiguous():
        return ()
    order = tuple(sorted(range(drawn.dim()), key=lambda d: (-drawn.stride(d), d)))
    return () if order == tuple(range(drawn.dim())) else order
