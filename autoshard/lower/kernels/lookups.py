"""Local programs of look-ups by index tensors where the indexed dim is sharded.

With s where the rank's shard begins (sharded_op.py):

    embedding           out = w[id - s], 0 for ids of other ranks                                  -> Partial
    embedding backward  rows of ids of other ranks are dropped                                     -> Shard
    embedding renorm    ids of other ranks name no row                                             -> Shard
    index               out = x[i - s], 0 for indices of other ranks                               -> Partial
    index_put (+)       the value is 0 for indices of other ranks                                  -> Shard
    index_copy          values for indices of other ranks are dropped                              -> Shard
    embedding_bag       ids of other ranks have weight 0                                           -> Partial

Where the ranks of an axis hold summands of index_put's values, the output is Partial and the first rank alone adds x itself.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from autoshard.graph import Ref
from autoshard.lower.collectives import Rank, RankGenerator
from autoshard.lower.kernels.sharded_op import Arguments, Axes, Kernel, ShardedOp, local, localised, wide
from autoshard.lower.literals import overload

aten = torch.ops.aten


@local
def embedding(rank: Rank, a: Arguments, *, axes: Axes, global_size: int) -> Tensor:
    ids, outside = localised(a["indices"], rank, axes, global_size, a["weight"].shape[0])
    return aten.embedding.default(a["weight"], ids.masked_fill(outside, 0)).masked_fill(outside.unsqueeze(-1), 0)


@local
def embedding_backward(rank: Rank, a: Arguments, *, axes: Axes, global_size: int) -> Tensor:
    size = a["num_weights"]
    ids, outside = localised(a["indices"], rank, axes, global_size, size)
    dropped = ids.masked_fill(outside | (a["indices"] == a["padding_idx"]), size)  # row `size` is sliced away again
    return aten.embedding_dense_backward.default(a["grad_output"], dropped, size + 1, -1, a["scale_grad_by_freq"])[:size]


@local
def embedding_renorm(rank: Rank, a: Arguments, *, axes: Axes, global_size: int) -> Tensor:
    x = a["self"]
    ids, outside = localised(a["indices"].reshape(-1), rank, axes, global_size, x.shape[0])
    kept = x.new_ones(x.shape[0] + 1).scatter(0, ids.masked_fill(outside, x.shape[0]), 0)[:-1]  # 0: the row is looked up
    norms = wide(x).norm(a["norm_type"], dim=1)
    scales = torch.where((kept == 0) & (norms > a["max_norm"]), a["max_norm"] / (norms + 1e-7), 1.0)  # as torch's kernels
    return (x * scales.unsqueeze(1)).to(x.dtype)


def _localised_from_end(ids: Tensor, rank: Rank, axes: Axes, global_size: int, size: int) -> tuple[Tensor, Tensor]:
    """As `localised`, with ids below 0 counted from the end of the global dim."""
    return localised(torch.where(ids < 0, ids + global_size, ids), rank, axes, global_size, size)


def _with_trailing_dims(mask: Tensor, num_dims: int) -> Tensor:
    return mask.reshape(*mask.shape, *(1,) * num_dims)


@local
def index(rank: Rank, a: Arguments, *, axes: Axes, dim: int, global_size: int) -> Tensor:
    x, ids = a["self"], a["indices"][dim]
    ids, outside = _localised_from_end(ids, rank, axes, global_size, x.shape[dim])
    rows = aten.index.Tensor(x, [None] * dim + [ids.masked_fill(outside, 0)])
    return rows.masked_fill(_with_trailing_dims(outside, x.dim() - dim - 1), 0)


@local
def index_select(rank: Rank, a: Arguments, *, axes: Axes, global_size: int) -> Tensor:
    x, dim = a["self"], a["dim"] % a["self"].dim()
    ids, outside = localised(a["index"], rank, axes, global_size, x.shape[dim])
    return x.index_select(dim, ids.masked_fill(outside, 0)).masked_fill(_with_trailing_dims(outside, x.dim() - dim - 1), 0)


@local
def index_put(rank: Rank, a: Arguments, *, axes: Axes, dim: int, global_size: int, once: Axes) -> Tensor:
    """once: the axes on which only the first rank adds x itself."""
    x, values, indices = a["self"], a["values"], list(a["indices"])
    if once:
        x = torch.where(rank.is_first(once), x, 0)
    if axes:
        ids, outside = _localised_from_end(indices[dim], rank, axes, global_size, x.shape[dim])
        indices[dim] = ids.masked_fill(outside, 0)
        values = values.masked_fill(_with_trailing_dims(outside, x.dim() - dim - 1), 0)
    return aten.index_put.default(x, indices, values, True)


@local
def index_copy(rank: Rank, a: Arguments, *, axes: Axes, global_size: int) -> Tensor:
    """which[p]: the index of the source row that goes to row p of this rank's shard, -1 where none does. One row goes to its place, or
    what is there is put there again: that runs in place."""
    x, dim, source = a["self"], a["dim"] % a["self"].dim(), a["source"]
    size = x.shape[dim]
    ids, outside = localised(a["index"].reshape(-1), rank, axes, global_size, size)
    if source.dim() < x.dim():  # one value for one index
        source = source.unsqueeze(dim)
    if ids.shape[0] == 1:
        ids = ids.masked_fill(outside, 0)
        return x.index_copy(dim, ids, torch.where(outside, x.index_select(dim, ids), source))
    numbers = torch.arange(ids.shape[0], device=ids.device)
    which = numbers.new_full((size + 1,), -1).index_copy(0, ids.masked_fill(outside, size), numbers)[:size]
    copied = source if source.shape[dim] == 1 else source.index_select(dim, which.clamp(min=0))
    return torch.where(_with_trailing_dims(which >= 0, x.dim() - dim - 1), copied, x)


@local
def embedding_bag(rank: Rank, a: Arguments, *, target: str, axes: Axes, global_size: int) -> Any:
    ids, outside = localised(a["indices"], rank, axes, global_size, a["weight"].shape[0])
    padding, weights = a.get("padding_idx", -1), a.get("per_sample_weights")
    outside = outside | (a["indices"] == padding)
    none = a["weight"].shape[0] if padding >= 0 else -1  # below 0 torch runs another kernel
    counted = (~outside).to(a["weight"].dtype) if weights is None else weights.masked_fill(outside, 0)
    a = {**a, "indices": ids.masked_fill(outside, 0), "per_sample_weights": counted, "padding_idx": none}
    return overload(target)(**a)


@local
def embedding_bag_backward(rank: Rank, a: Arguments, *, target: str, axes: Axes, global_size: int) -> Tensor:
    size = a["num_weights"]
    a = {**a, "offset2bag": _bag_of_each(a)}
    if not axes:
        return overload(target)(**a)
    ids, outside = localised(a["indices"], rank, axes, global_size, size)
    dropped = ids.masked_fill(outside | (a["indices"] == a.get("padding_idx", -1)), size)  # row `size` is sliced away again
    return overload(target)(**{**a, "indices": dropped, "num_weights": size + 1, "padding_idx": -1})[:size]


def _bag_of_each(a: Arguments) -> Tensor:
    """The bag of each index, which the forward returns on some devices only."""
    bags, offsets, count = a["offset2bag"], a.get("offsets"), a["indices"].shape[0]
    if bags.device.type == "cpu" or bags.shape[0] == count or offsets is None:
        return bags
    places = torch.arange(count, dtype=offsets.dtype, device=offsets.device)
    return torch.searchsorted(offsets, places, right=True).to(bags.dtype) - 1


def _along(sharded: ShardedOp, *, kernel: Callable[..., RankGenerator], of: str = "self", dim: int | None = None) -> Kernel | None:
    """The kernel where a tensor (of: an argument, "" for the output) is sharded on the dim that is indexed, else on `dim` of the op."""
    dim = sharded.arguments["dim"] if dim is None else dim
    axes, shape = (sharded.axes_of(of, dim), sharded.shape(of)) if of else (sharded.output_axes(dim), sharded.op.output.shape)
    return partial(kernel, axes=axes, global_size=shape[dim]) if axes else None


def _indexed_dim(sharded: ShardedOp) -> int:
    """The only dim that is indexed; -1 where several are."""
    dims = [d for d, item in enumerate(sharded.arguments["indices"]) if isinstance(item, Ref)]
    return dims[0] if len(dims) == 1 else -1


def _index(sharded: ShardedOp) -> Kernel | None:
    dim = _indexed_dim(sharded)
    return _along(sharded, kernel=partial(index, dim=dim), dim=dim) if dim >= 0 else None


def _index_put(sharded: ShardedOp) -> Kernel | None:
    dim, once = _indexed_dim(sharded), sharded.axes_to_add_once("self")
    axes = sharded.axes_of("self", dim) if dim >= 0 else ()
    if not axes and not once:
        return None
    if not sharded.arguments.get("accumulate", False):
        raise sharded.refuse("an op whose values replace the old ones can't be sharded on the indexed dim")
    return partial(index_put, axes=axes, dim=dim, global_size=sharded.shape("self")[dim], once=once)


def _embedding_bag(sharded: ShardedOp) -> Kernel | None:
    axes = sharded.axes_of("weight", 0)
    if axes and sharded.arguments.get("mode", 0) != 0:
        raise sharded.refuse("the rows of the table can be sharded for sums of bags only")
    return partial(embedding_bag, target=sharded.op.target, axes=axes, global_size=sharded.shape("weight")[0]) if axes else None


def _embedding_bag_backward(sharded: ShardedOp) -> Kernel | None:
    axes = sharded.output_axes(0)
    return partial(embedding_bag_backward, target=sharded.op.target, axes=axes, global_size=sharded.op.output.shape[0])


KERNELS: dict[str, Callable[[ShardedOp], Kernel | None]] = {
    "aten.embedding.default": partial(_along, kernel=embedding, of="weight", dim=0),
    "aten.embedding_dense_backward.default": partial(_along, kernel=embedding_backward, of="", dim=0),
    "aten.embedding_renorm.default": partial(_along, kernel=embedding_renorm, dim=0),
    "aten.index.Tensor": _index,
    "aten._unsafe_index.Tensor": _index,
    "aten.index_select.default": partial(_along, kernel=index_select),
    "aten.index_copy.default": partial(_along, kernel=index_copy),
    "aten.index_put.default": _index_put,
    "aten._unsafe_index_put.default": _index_put,
    "aten._embedding_bag.default": _embedding_bag,
    "aten._embedding_bag_forward_only.default": _embedding_bag,
    "aten._embedding_bag_dense_backward.default": _embedding_bag_backward,
    "aten._embedding_bag_backward.default": _embedding_bag_backward,
}
