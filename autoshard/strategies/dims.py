"""Rows of ops that work along one dim (or the last few) and do the same for every index of the other dims, which may be sharded.

    sort, topk, cumsum, argmax, ... along d      S(k) for each k != d
    scatter, gather along d                      S(k) for each k != d whose size is the same in all tensors; the index of a gather
                                                 may also be sharded on d
    pooling, upsampling, tril                    S(k) for all dims but the last ones
    add, where, floor_divide, ... per element    S(k) of the output; an input that broadcasts on k is replicated

Linear ops also map partial sums to partial sums (P -> P).
"""

from __future__ import annotations

from functools import cache

import torch

from autoshard.graph import UPSAMPLED, Op, Ref
from autoshard.layout import P, R, S
from autoshard.strategies.rows import Inputs, Row, argument, linear_rows, other_dims, row, rule, shard_rows


def input_placements(op: Op, num_inputs: int, placements: dict[int, object]) -> tuple:
    """Placements of the inputs from those by argument position: R for the others; arguments that are no tensors have none."""
    of_inputs: list = [R] * num_inputs
    for position, placement in placements.items():
        item = argument(op, position)
        if isinstance(item, Ref):
            of_inputs[item.index] = placement
    return tuple(of_inputs)


def output_placements(op: Op, *placements: object) -> tuple:
    """Placements of the outputs, None for an output that is no tensor."""
    return tuple(None if t is None else p for t, p in zip(op.outputs, placements, strict=True))


def _dim(op: Op, position: int, rank: int, default: int = -1) -> int:
    return int(argument(op, position, "dim", default)) % max(rank, 1)


DIM_SECOND = (
    "aten.sort.default", "aten.cumsum.default", "aten.cumprod.default", "aten.logcumsumexp.default", "aten.cummax.default",
    "aten.cummin.default", "aten.argsort.default", "aten.msort.default",
)  # fmt: skip


@rule(*DIM_SECOND)
def ordered(op: Op, inputs: Inputs) -> list[Row]:
    rank = len(inputs[0].shape)
    dim = 0 if op.target == "aten.msort.default" else _dim(op, 1, rank)
    kept = shard_rows(op, inputs, other_dims(rank, {dim}, keep=True))
    return kept + (linear_rows(1, 1) if op.target == "aten.cumsum.default" and not op.literals[1] else [])


@rule("aten.sort.stable", "aten.topk.default", "aten.kthvalue.default")
def selected(op: Op, inputs: Inputs) -> list[Row]:
    """As `ordered`, with the dim as third argument (for sort: a keyword)."""
    rank = len(inputs[0].shape)
    dim = _dim(op, 2 if op.target != "aten.sort.stable" else 1, rank)
    return shard_rows(op, inputs, other_dims(rank, {dim}, keep=True))


@rule("aten.argmax.default", "aten.argmin.default", "aten.max.dim", "aten.min.dim", "aten.any.dim", "aten.all.dim", "aten.prod.dim_int")
def picked(op: Op, inputs: Inputs) -> list[Row]:
    """A reduction along one dim that can't be computed as a sum of partial results."""
    rank = len(inputs[0].shape)
    if argument(op, 1, "dim") is None:
        return []
    return shard_rows(op, inputs, other_dims(rank, {_dim(op, 1, rank)}, keep=len(op.output.shape) == rank))


@rule("aten.glu.default", "aten.glu_backward.default")
def gated(op: Op, inputs: Inputs) -> list[Row]:
    """One half of a dim gates the other."""
    rank = len(inputs[0].shape)
    dim = _dim(op, len(inputs), rank)
    return [Row((S(d),), (S(d),) * len(inputs)) for d in range(rank) if d != dim]


@rule("aten.repeat_interleave.self_int", "aten.unfold.default", "aten.norm.ScalarOpt_dim", "aten.renorm.default")
def along(op: Op, inputs: Inputs) -> list[Row]:
    """Ops of one tensor whose second or third argument names dims that can't be sharded; dims after a removed one move forward."""
    rank = len(inputs[0].shape)
    if op.target.startswith("aten.repeat_interleave") and argument(op, 2, "dim") is None:
        return []
    named = argument(op, 1 if "unfold" in op.target else 2, "dim", ())
    dims = {int(d) % rank for d in (named if isinstance(named, tuple) else (named,))}
    return shard_rows(op, inputs, other_dims(rank, dims, keep=len(op.output.shape) >= rank)) if dims else []


@rule("aten.isin.Tensor_Tensor")
def is_in(op: Op, inputs: Inputs) -> list[Row]:
    return [row(S(d), S(d), R) for d in range(len(inputs[0].shape))]


@rule("aten.searchsorted.Tensor")
def searched(op: Op, inputs: Inputs) -> list[Row]:
    """The position of each value in a sorted row: one row for all values, or one for each row of values."""
    rank = len(inputs[1].shape)
    if len(inputs) == 2 and len(inputs[0].shape) == 1:
        return [row(S(d), R, S(d)) for d in range(rank)]
    return [Row((S(d),), (S(d),) * len(inputs)) for d in range(rank - 1)]


@rule("aten.all.dims", "aten.any.dims")
def picked_along_several(op: Op, inputs: Inputs) -> list[Row]:
    rank = len(inputs[0].shape)
    named = argument(op, 1, "dim")
    dims = set(range(rank)) if named is None else {int(d) % rank for d in named}
    return shard_rows(op, inputs, other_dims(rank, dims, keep=len(op.output.shape) == rank))


@rule("aten.count_nonzero.dim_IntList")
def counted_nonzero(op: Op, inputs: Inputs) -> list[Row]:
    rank = len(inputs[0].shape)
    dims = {int(d) % rank for d in argument(op, 1, "dim")}
    return [row(P() if d in dims else S(d - sum(k < d for k in dims)), S(d)) for d in range(rank)]


@rule("aten.max.default", "aten.min.default")
def largest(op: Op, inputs: Inputs) -> list[Row]:
    return [row(P(op.target.split(".")[1]), S(d)) for d in range(len(inputs[0].shape))]


@rule("aten.flip.default", "aten.roll.default", "aten.rot90.default")
def turned(op: Op, inputs: Inputs) -> list[Row]:
    rank, flips = len(inputs[0].shape), op.target == "aten.flip.default"
    dims = argument(op, 1 if flips else 2, "dims", (0, 1) if op.target == "aten.rot90.default" else ())
    turned_dims = {int(d) % rank for d in dims} if dims or flips else set(range(rank))
    return shard_rows(op, inputs, other_dims(rank, turned_dims, keep=True)) + linear_rows(1, 1)


@rule("aten.tril.default", "aten.triu.default")
def triangle(op: Op, inputs: Inputs) -> list[Row]:
    return [row(S(d), S(d)) for d in range(len(inputs[0].shape) - 2)] + linear_rows(1, 1)


@rule("aten.affine_grid_generator.default")
def affine_grid(op: Op, inputs: Inputs) -> list[Row]:
    """A grid of points for each of a batch of matrices."""
    return [row(S(0), S(0)), *linear_rows(1, 1)]


@rule("aten._cdist_forward.default", "aten._euclidean_dist.default")
def distances(op: Op, inputs: Inputs) -> list[Row]:
    """out[b, p, r] = |x[b, p] - y[b, r]|, where both have the same batch dims"""
    (x, y), rank = inputs, len(op.output.shape)
    if len(x.shape) != rank or len(y.shape) != rank:
        return []
    batch = [row(S(d), S(d), S(d)) for d in range(rank - 2) if x.shape[d] == y.shape[d]]
    return [*batch, row(S(rank - 2), S(rank - 2), R), row(S(rank - 1), R, S(rank - 2))]


@rule("aten._cdist_backward.default")
def distances_backward(op: Op, inputs: Inputs) -> list[Row]:
    """The gradient of x from that of the distances, x, y and the distances."""
    rank = len(inputs[0].shape)
    if any(len(t.shape) != rank for t in inputs):
        return []
    batch = [Row((S(d),), (S(d),) * 4) for d in range(rank - 2) if len({t.shape[d] for t in inputs}) == 1]
    p, r = S(rank - 2), S(rank - 1)
    return [*batch, row(p, p, p, R, p), row(P(), r, R, p, r), row(P(), P(), R, R, R)]


@rule("aten.constant_pad_nd.default")
def pad(op: Op, inputs: Inputs) -> list[Row]:
    """The pads are pairs, that of the last dim first."""
    rank, pads = len(inputs[0].shape), argument(op, 1, "pad")
    padded = {rank - 1 - k // 2 for k, size in enumerate(pads) if size != 0}
    kept = shard_rows(op, inputs, other_dims(rank, padded, keep=True))
    return kept + (linear_rows(1, 1) if not argument(op, 2, "value", 0) else [])


@rule("aten.histc.default")
def histogram(op: Op, inputs: Inputs) -> list[Row]:
    """The counts of shards add up; the range must be an argument, else each shard has another one."""
    ranged = argument(op, 2, "min", 0) != argument(op, 3, "max", 0)
    return [row(P(), S(d)) for d in range(len(inputs[0].shape))] if ranged else []


WINDOWS = tuple(f"aten.{name}_window.{kind}" for name in ("hann", "hamming", "blackman", "bartlett") for kind in ("default", "periodic"))


@rule("aten.tril_indices.default", "aten.triu_indices.default", "aten.eye.default", "aten.linspace.default", *WINDOWS)
def counted(op: Op, inputs: Inputs) -> list[Row]:
    """Ops that create a tensor from numbers, each part differently."""
    return []


# -- gather and scatter along a dim -----------------------------------------------------------------------------------------------


@rule("aten.gather.default")
def gather(op: Op, inputs: Inputs) -> list[Row]:
    """out[.., i, ..] = x[.., index[.., i, ..], ..]"""
    x, index = inputs
    rank = len(x.shape)
    dim = _dim(op, 1, rank)
    kept = [row(S(d), S(d), S(d)) for d in range(rank) if d != dim and x.shape[d] == index.shape[d]]
    return [*kept, row(S(dim), R, S(dim)), row(P(), P(), R)] if rank else []


@rule(
    "aten.scatter.src", "aten.scatter.value", "aten.scatter_add.default", "aten.scatter_reduce.two", "aten.scatter.reduce",
    "aten.scatter.value_reduce",
)  # fmt: skip
def scatter(op: Op, inputs: Inputs) -> list[Row]:
    """x with src put (or added) at index; if what is added is sharded on dim, the result is Partial (`lower.kernels.table`)."""
    rank = len(inputs[0].shape)
    dim = _dim(op, 1, rank)
    equal = [d for d in range(rank) if d != dim and len({t.shape[d] for t in inputs}) == 1]
    rows = [Row((S(d),), (S(d),) * len(inputs)) for d in equal]
    if op.target == "aten.scatter_add.default" and rank:
        added = [row(P(), R, S(dim), S(dim))] if inputs[1].shape == inputs[2].shape else []
        rows += [row(P(), P(), R, P()), *added]
    return rows + ([row(P(), P(), R, P())] if op.target == "aten.scatter.src" else [])


@rule("aten.masked_scatter.default", "aten.masked_scatter_backward.default")
def put_in_order(op: Op, inputs: Inputs) -> list[Row]:
    """The n-th True of a mask gets the n-th value, and n depends on the full mask before it."""
    return [Row((P(),), tuple(R if t.dtype == "bool" else P() for t in inputs))]


@rule("aten.slice_scatter.default", "aten.select_scatter.default", "aten.diagonal_scatter.default")
def put_part(op: Op, inputs: Inputs) -> list[Row]:
    """x with src in place of a slice of it: the inverse of slice and select."""
    if op.target == "aten.diagonal_scatter.default":
        return linear_rows(1, 2)
    rank = len(inputs[0].shape)
    dim = _dim(op, 2, rank, 0)
    removed = op.target == "aten.select_scatter.default"
    return [row(S(d), S(d), S(d - (removed and d > dim))) for d in range(rank) if d != dim] + linear_rows(1, 2)


# -- all but the last dims ----------------------------------------------------------------------------------------------------------

# target: (how many last dims it works on, whether it is linear)
LAST_DIMS = {
    **{f"aten.{name}_backward.default": (n, True) for name, n in UPSAMPLED.items()},
    "aten.max_pool2d_with_indices.default": (2, False),
    "aten.max_pool2d_with_indices_backward.default": (2, False),
    "aten.max_pool3d_with_indices.default": (3, False),
    "aten.avg_pool1d.default": (1, True),
    "aten.avg_pool2d.default": (2, True),
    "aten.avg_pool2d_backward.default": (2, False),
    "aten.avg_pool3d.default": (3, True),
    "aten.avg_pool3d_backward.default": (3, False),
    "aten.max_pool3d_with_indices_backward.default": (3, False),
    "aten._adaptive_avg_pool2d.default": (2, True),
    "aten._adaptive_avg_pool2d_backward.default": (2, False),
    "aten._adaptive_avg_pool3d.default": (3, True),
    "aten._adaptive_avg_pool3d_backward.default": (3, False),
    "aten.adaptive_max_pool2d.default": (2, False),
    "aten.adaptive_max_pool2d_backward.default": (2, False),
    "aten.adaptive_max_pool3d.default": (3, False),
    "aten.adaptive_max_pool3d_backward.default": (3, False),
    "aten.upsample_nearest1d.default": (1, True),
    "aten.upsample_nearest2d.default": (2, True),
    "aten.upsample_nearest1d.vec": (1, True),
    "aten.upsample_nearest2d.vec": (2, True),
    "aten.upsample_nearest3d.vec": (3, True),
    "aten._upsample_nearest_exact2d.vec": (2, True),
    "aten.upsample_linear1d.vec": (1, True),
    "aten.upsample_trilinear3d.vec": (3, True),
    "aten.upsample_bicubic2d.vec": (2, True),
    "aten._upsample_bilinear2d_aa.vec": (2, True),
    "aten._upsample_bicubic2d_aa.vec": (2, True),
    "aten._upsample_nearest_exact2d.default": (2, True),
    "aten.upsample_bilinear2d.default": (2, True),
    "aten.upsample_bilinear2d.vec": (2, True),
    "aten.upsample_bicubic2d.default": (2, True),
    "aten._upsample_bilinear2d_aa.default": (2, True),
    **{f"aten.{kind}_pad{n}d.default": (n, True) for kind in ("reflection", "replication") for n in (1, 2, 3)},
    **{f"aten.{kind}_pad{n}d_backward.default": (n, False) for kind in ("reflection", "replication") for n in (1, 2, 3)},
    "aten.channel_shuffle.default": (3, True),
    "aten.im2col.default": (3, True),
    "aten.col2im.default": (2, True),
    "aten.pixel_shuffle.default": (3, True),
    "aten.pixel_unshuffle.default": (3, True),
}


@rule(*LAST_DIMS)
def last_dims(op: Op, inputs: Inputs) -> list[Row]:
    last, linear = LAST_DIMS[op.target]
    leading = range(len(inputs[0].shape) - last)
    rows = [Row(tuple(S(d) for _ in op.outputs), (S(d),) * len(inputs)) for d in leading]
    return rows + (linear_rows(len(op.outputs), len(inputs)) if linear else [])


# -- per element ------------------------------------------------------------------------------------------------------------------


UNTAGGED = (
    "aten.floor_divide.default", "aten.floor_divide.Scalar", "aten.true_divide.Tensor", "aten.masked_fill.Tensor",
    "aten._prelu_kernel.default", "aten.hardswish.default", "aten.log_sigmoid_forward.default", "aten.isin.Tensor_Scalar",
)  # fmt: skip

# target: the inputs in which it is jointly linear (the others replicated); in a backward, the gradient
LINEAR_PER_ELEMENT = {
    **{
        f"aten.{name}_backward.default": (0,)
        for name in ("softplus", "hardtanh", "hardsigmoid", "hardswish", "leaky_relu", "elu", "log_sigmoid", "_prelu_kernel", "mish")
    },
    "aten.polar.default": (0,),  # the modulus
    "aten.complex.default": (0, 1),
    "aten.rsub.Tensor": (0, 1),
}


@cache
def is_pointwise(target: str) -> bool:
    """Whether an operator computes each element alone, and draws no random numbers."""
    namespace, name, overload = target.split(".", 2)
    tags = getattr(getattr(getattr(torch.ops, namespace), name), overload).tags
    known = torch.Tag.pointwise in tags or target in UNTAGGED or target in LINEAR_PER_ELEMENT
    return known and torch.Tag.nondeterministic_seeded not in tags


def pointwise(op: Op, inputs: Inputs) -> list[Row] | None:
    """Rows of an op that torch tags as pointwise and that has no rule; None for other ops and for those that draw random numbers."""
    if not is_pointwise(op.target) or any(t is None for t in op.outputs):
        return None
    shape = op.output.shape
    rows = []
    for d, size in enumerate(shape):
        at = [len(t.shape) - len(shape) + d for t in inputs]
        placements = tuple(S(k) if k >= 0 and t.shape[k] == size else R for k, t in zip(at, inputs, strict=True))
        rows.append(Row(tuple(S(d) for _ in op.outputs), placements))
    if op.target in LINEAR_PER_ELEMENT:
        linear = LINEAR_PER_ELEMENT[op.target]
        rows.append(Row(tuple(P() for _ in op.outputs), tuple(P() if k in linear else R for k in range(len(inputs)))))
    return rows
