"""Local programs of operators whose results depend on strides: as_strided and as_strided_scatter, which address a tensor's storage,
and those that factor a matrix or, as its strides are, its transpose; and of those that leave a conjugation or a sign for later readers.

A tensor that came from another rank, or that is a view of a larger one, has another storage than the captured program's. So elements
are addressed by their position in the tensor, in row-major order, matrices are factored with dense rows, and values are conjugated and
negated at once: `view_as_real` of a pending conjugation is an error, as where one of two that undo each other was sent.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from autoshard.capture import FACTORING
from autoshard.graph import is_dense
from autoshard.lower.collectives import Rank
from autoshard.lower.kernels.sharded_op import Arguments, Kernel, ShardedOp, local

aten = torch.ops.aten


@local
def reshaped(rank: Rank, a: Arguments) -> Tensor:
    return a["self"].reshape(a["size"])


@local
def strided(rank: Rank, a: Arguments) -> Tensor:
    places = torch.full((), a.get("storage_offset") or 0, device=a["self"].device)
    for n, step in zip(a["size"], a["stride"], strict=True):
        places = places.unsqueeze(-1) + torch.arange(n, device=places.device) * step
    return a["self"].reshape(-1)[places]


@local
def put_all(rank: Rank, a: Arguments) -> Tensor:
    return a["src"].reshape(a["self"].shape).clone()


@local
def put_strided(rank: Rank, a: Arguments) -> Tensor:
    return aten.as_strided_scatter.default(**{**a, "self": a["self"].clone(memory_format=torch.contiguous_format)})


def _covers_all(sharded: ShardedOp) -> bool:
    """Whether the strides address every element once, in order."""
    a = sharded.arguments
    return is_dense(sharded.shape("self"), a["size"], a["stride"], a.get("storage_offset"))


KERNELS: dict[str, Callable[[ShardedOp], Kernel]] = {
    "aten.as_strided.default": lambda sharded: reshaped if _covers_all(sharded) else strided,
    "aten.as_strided_scatter.default": lambda sharded: put_all if _covers_all(sharded) else put_strided,
}


def _of_dense(operator: Callable[..., Any], A: Tensor, **rest: Any) -> Any:
    return operator(A.contiguous(), **rest)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{str(operator): partial(_of_dense, operator) for operator in FACTORING},
    "aten._conj.default": aten._conj_physical.default,
    "aten._neg_view.default": aten.neg.default,
}
