"""Local programs of look-ups by index tensors whose indexed dim is cut, and of additions to a tensor that is whole.

    index           out = x[i - s], 0 where outside                                               -> Partial
    index_put (+)   v is 0 where i is outside                                                      -> the rank's part
    ... and scatter_add, index_add: where parts of the added values make a Partial, x itself is added by the first rank
    index_copy      values outside are dropped                                                     -> the rank's part
    embedding_bag   ids outside weigh 0                                                            -> Partial
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard

from autoshard.graph import Ref
from autoshard.lower.collectives import Rank
from autoshard.lower.kernels.local_inputs import Arguments, Axes, Kernel, ShardedOp, local, localised
from autoshard.lower.literals import overload

aten = torch.ops.aten


def _within(ids: Tensor, rank: Rank, axes: Axes, whole: int, size: int) -> tuple[Tensor, Tensor]:
    """As `localised`, ids below 0 counted from the end of the whole dim."""
    return localised(torch.where(ids < 0, ids + whole, ids), rank, axes, whole, size)


def _behind(mask: Tensor, num_dims: int) -> Tensor:
    return mask.reshape(*mask.shape, *(1,) * num_dims)


@local
def index(rank: Rank, a: Arguments, *, axes: Axes, dim: int, whole: int) -> Tensor:
    x, ids = a["self"], a["indices"][dim]
    ids, outside = _within(ids, rank, axes, whole, x.shape[dim])
    found = aten.index.Tensor(x, [None] * dim + [ids.masked_fill(outside, 0)])
    return found.masked_fill(_behind(outside, x.dim() - dim - 1), 0)


@local
def index_select(rank: Rank, a: Arguments, *, axes: Axes, whole: int) -> Tensor:
    x, dim = a["self"], a["dim"] % a["self"].dim()
    ids, outside = localised(a["index"], rank, axes, whole, x.shape[dim])
    return x.index_select(dim, ids.masked_fill(outside, 0)).masked_fill(_behind(outside, x.dim() - dim - 1), 0)


@local
def index_put(rank: Rank, a: Arguments, *, axes: Axes, dim: int, whole: int, once: Axes) -> Tensor:
    x, values, indices = a["self"], a["values"], list(a["indices"])
    if once:
        x = torch.where(rank.is_first(once), x, 0)
    if axes:
        ids, outside = _within(indices[dim], rank, axes, whole, x.shape[dim])
        indices[dim] = ids.masked_fill(outside, 0)
        values = values.masked_fill(_behind(outside, x.dim() - dim - 1), 0)
    return aten.index_put.default(x, indices, values, True)


@local
def added_once(rank: Rank, a: Arguments, *, target: str, axes: Axes) -> Tensor:
    return overload(target)(**{**a, "self": torch.where(rank.is_first(axes), a["self"], 0)})


@local
def index_copy(rank: Rank, a: Arguments, *, axes: Axes, whole: int) -> Tensor:
    """which[p]: the index that is put at place p of this rank's part, -1 where none is."""
    x, dim, source = a["self"], a["dim"] % a["self"].dim(), a["source"]
    size = x.shape[dim]
    ids, outside = localised(a["index"].reshape(-1), rank, axes, whole, size)
    numbers = torch.arange(ids.shape[0], device=ids.device)
    which = numbers.new_full((size + 1,), -1).index_copy(0, ids.masked_fill(outside, size), numbers)[:size]
    if source.dim() < x.dim():  # one value for one index
        source = source.unsqueeze(dim)
    taken = source if source.shape[dim] == 1 else source.index_select(dim, which.clamp(min=0))
    return torch.where(_behind(which >= 0, x.dim() - dim - 1), taken, x)


@local
def embedding_bag(rank: Rank, a: Arguments, *, target: str, axes: Axes, words: int) -> Any:
    ids, outside = localised(a["indices"], rank, axes, words, a["weight"].shape[0])
    weights = a.get("per_sample_weights")
    counted = (~outside).to(a["weight"].dtype) if weights is None else weights.masked_fill(outside, 0)
    return overload(target)(**{**a, "indices": ids.masked_fill(outside, 0), "per_sample_weights": counted})


@local
def embedding_bag_backward(rank: Rank, a: Arguments, *, target: str, axes: Axes, words: int) -> Tensor:
    size = a["num_weights"]
    ids, outside = localised(a["indices"], rank, axes, words, size)
    dropped = ids.masked_fill(outside, size)  # row `size` is cut off again
    return overload(target)(**{**a, "indices": dropped, "num_weights": size + 1})[:size]


# -- which op needs which ----------------------------------------------------------------------------------------------------------


def _indexed_dim(laid: ShardedOp) -> int:
    """The only dim that is indexed; -1 where several are."""
    dims = [d for d, item in enumerate(laid.arguments["indices"]) if isinstance(item, Ref)]
    return dims[0] if len(dims) == 1 else -1


def _once(laid: ShardedOp) -> Axes:
    out, given = laid.outputs[0] or (), laid.layout("self") or ()
    return tuple(k for k, (o, x) in enumerate(zip(out, given)) if isinstance(o, Partial) and isinstance(x, Replicate))


def _index(laid: ShardedOp) -> Kernel | None:
    dim = _indexed_dim(laid)
    axes = laid.cutting("self", dim) if dim >= 0 else ()
    return partial(index, axes=axes, dim=dim, whole=laid.shape("self")[dim]) if axes else None


def _index_select(laid: ShardedOp) -> Kernel | None:
    axes = laid.cutting("self", laid.arguments["dim"])
    return partial(index_select, axes=axes, whole=laid.shape("self")[laid.arguments["dim"]]) if axes else None


def _index_copy(laid: ShardedOp) -> Kernel | None:
    axes = laid.cutting("self", laid.arguments["dim"])
    return partial(index_copy, axes=axes, whole=laid.shape("self")[laid.arguments["dim"]]) if axes else None


def _index_put(laid: ShardedOp) -> Kernel | None:
    dim, once = _indexed_dim(laid), _once(laid)
    axes = laid.cutting("self", dim) if dim >= 0 else ()
    if not axes and not once:
        return None
    if not laid.arguments.get("accumulate", False):
        raise laid.refuse("values that replace what is there can't be cut along what is indexed")
    return partial(index_put, axes=axes, dim=dim, whole=laid.shape("self")[dim], once=once)


def _added_once(laid: ShardedOp) -> Kernel | None:
    axes = _once(laid)
    return partial(added_once, target=laid.op.target, axes=axes) if axes else None


def _embedding_bag(laid: ShardedOp) -> Kernel | None:
    axes = laid.cutting("weight", 0)
    if axes and laid.arguments.get("mode", 0) != 0:
        raise laid.refuse("only sums of bags can be cut along the rows of the table")
    return partial(embedding_bag, target=laid.op.target, axes=axes, words=laid.shape("weight")[0]) if axes else None


def _embedding_bag_backward(laid: ShardedOp) -> Kernel | None:
    axes = tuple(k for k, p in enumerate(laid.outputs[0] or ()) if isinstance(p, Shard) and p.dim == 0)
    return partial(embedding_bag_backward, target=laid.op.target, axes=axes, words=laid.op.output.shape[0]) if axes else None


KERNELS = {
    "aten.index.Tensor": _index,
    "aten._unsafe_index.Tensor": _index,
    "aten.index_select.default": _index_select,
    "aten.index_copy.default": _index_copy,
    "aten.index_put.default": _index_put,
    "aten._unsafe_index_put.default": _index_put,
    "aten.scatter_add.default": _added_once,
    "aten.index_add.default": _added_once,
    "aten._embedding_bag.default": _embedding_bag,
    "aten._embedding_bag_forward_only.default": _embedding_bag,
    "aten._embedding_bag_dense_backward.default": _embedding_bag_backward,
    "aten._embedding_bag_backward.default": _embedding_bag_backward,
}
