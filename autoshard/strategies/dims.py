"""Rows of ops that work along one dim (or the last few) and do the same for every index of the other dims, which may be sharded.

    sort, cumsum, argmax, slice, ... along d     S(k) for each k != d
    scatter, gather along d                      S(k) for each k != d whose size is the same in all tensors; the index of a gather
                                                 may also be sharded on d
    pooling, upsampling, tril                    S(k) for all dims but the last ones
    add, where, dropout, ... per element         S(k) of the output; an input that broadcasts on k is replicated

Linear ops also map partial sums to partial sums (P -> P).
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from autoshard.graph import PER_ELEMENT, SHAPED, UPSAMPLED, Op, Ref
from autoshard.layout import P, R, S
from autoshard.strategies.rows import Inputs, Row, argument, linear_rows, other_dims, overload_of, row, rule, shard_rows


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


def named_dims(named: Any, rank: int) -> set[int]:
    """The dims that an argument names, counted from the front; all for None and ()."""
    if named is None or named == ():
        return set(range(rank))
    return {int(d) % max(rank, 1) for d in (named if isinstance(named, tuple) else (named,))}


def _dim(op: Op, position: int, rank: int, default: int = -1) -> int:
    return int(argument(op, position, "dim", default)) % max(rank, 1)


# target: the position of the argument that names one dim or several, its default, and whether the op is linear
ALONG: dict[str, tuple[int, Any, bool]] = {
    **{
        f"aten.{name}": (1, -1, False)
        for name in (
            "sort.default", "sort.stable", "argsort.default", "cumprod.default", "logcumsumexp.default", "cummax.default", "cummin.default",
            "glu.default",
        )
    },
    "aten.cumsum.default": (1, -1, True),
    "aten.msort.default": (1, 0, False),
    **{f"aten.{name}.default": (2, -1, False) for name in ("topk", "kthvalue", "glu_backward")},
    **{f"aten.{name}.dim": (1, None, False) for name in ("max", "min", "any", "all")},
    **{
        f"aten.{name}": (1, None, False)
        for name in ("argmax.default", "argmin.default", "any.dims", "all.dims", "prod.dim_int", "unfold.default")
    },
    **{f"aten.{name}": (2, None, False) for name in ("repeat_interleave.self_int", "norm.ScalarOpt_dim")},
    **{f"aten.{name}": (1, 0, True) for name in ("slice.Tensor", "select.int", "unbind.int")},
    **{
        f"aten.{name}": (2, 0, True)
        for name in (
            "split.Tensor", "split_with_sizes.default", "chunk.default", "unsafe_split.Tensor", "unsafe_split_with_sizes.default",
        )
    },
}  # fmt: skip


@rule(*ALONG)
def along(op: Op, inputs: Inputs) -> list[Row]:
    """All dims but those that an argument names are sharded; dims behind one that the result lacks move forward. A slice of all of a dim
    keeps its shards."""
    position, default, is_linear = ALONG[op.target]
    rank, outputs = len(inputs[0].shape), len(op.outputs)
    keeps_all = op.target == "aten.slice.Tensor" and op.output.shape == inputs[0].shape
    dims = () if keeps_all else named_dims(argument(op, position, "dim", default), rank)
    pairs = other_dims(rank, dims, keep=len(op.output.shape) >= rank)
    rows = [Row((S(o),) * outputs, (S(i),) * len(inputs)) for i, o in pairs]
    return rows + (linear_rows(outputs, 1) if is_linear and "dtype" not in dict(op.literals[1]) else [])


@rule("aten.renorm.default")
def renorm(op: Op, inputs: Inputs) -> list[Row]:
    """Each slice along a dim is scaled down to a norm."""
    dim = _dim(op, 2, len(inputs[0].shape))
    return [row(S(dim), S(dim))]


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
    turned_dims = named_dims(dims, rank) if dims or not flips else ()
    return shard_rows(op, inputs, other_dims(rank, turned_dims, keep=True)) + linear_rows(1, 1)


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


@rule(
    "aten.arange.default", "aten.arange.start", "aten.arange.start_step", "aten.scalar_tensor.default", "aten.tril_indices.default",
    "aten.triu_indices.default", "aten.eye.default", "aten.linspace.default", *WINDOWS,
)  # fmt: skip
def counted(op: Op, inputs: Inputs) -> list[Row]:
    """Ops that create a tensor from numbers, each part differently."""
    return []


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


AVERAGES = ("avg_pool{}d", "_adaptive_avg_pool{}d")
# target: (how many last dims it works on, whether it is linear)
LAST_DIMS = {
    **{f"aten.{name}": (n, True) for name, n in (("tril.default", 2), ("triu.default", 2), ("col2im.default", 2), ("im2col.default", 3))},
    **{f"aten.{name}.default": (3, True) for name in ("channel_shuffle", "pixel_shuffle", "pixel_unshuffle")},
    **{f"aten.{name}{way}": (n, True) for name, n in UPSAMPLED.items() for way in (".default", ".vec", "_backward.default")},
    "aten.avg_pool1d.default": (1, True),
    **{
        f"aten.{name.format(n)}{way}.default": (n, name in AVERAGES and not way)
        for name in (*AVERAGES, "max_pool{}d_with_indices", "adaptive_max_pool{}d")
        for n in (2, 3)
        for way in ("", "_backward")
    },
    **{
        f"aten.{kind}_pad{n}d{way}.default": (n, not way)
        for kind in ("reflection", "replication")
        for n in (1, 2, 3)
        for way in ("", "_backward")
    },
}


@rule(*LAST_DIMS)
def last_dims(op: Op, inputs: Inputs) -> list[Row]:
    last, linear = LAST_DIMS[op.target]
    leading = range(len(inputs[0].shape) - last)
    rows = [Row(tuple(S(d) for _ in op.outputs), (S(d),) * len(inputs)) for d in leading]
    return rows + (linear_rows(len(op.outputs), len(inputs)) if linear else [])


# target: the last dims of each input and output that are of one matrix, the dims before them broadcast; the input in which it is linear
SOLVED: dict[str, tuple[tuple[int, ...], tuple[int, ...], int | None]] = {
    "aten.linalg_solve_triangular.default": ((2, 2), (2,), 1),
    "aten.triangular_solve.default": ((2, 2), (2, 2), 0),
    "aten.cholesky_solve.default": ((2, 2), (2,), 0),
    "aten.linalg_lu_solve.default": ((2, 1, 2), (2,), 2),
    "aten.linalg_ldl_solve.default": ((2, 1, 2), (2,), 2),
    "aten._linalg_solve_ex.default": ((2, 2), (2, 2, 1, 0), 1),
    "aten.linalg_pinv.atol_rtol_tensor": ((2, 0, 0), (2,), None),
}


@rule(*SOLVED)
def solved(op: Op, inputs: Inputs) -> list[Row]:
    """Batches of matrices; torch's own rules count their dims from the first, and an input without a dim lacks the first ones."""
    of_inputs, of_outputs, linear = SOLVED[op.target]
    if op.target == "aten._linalg_solve_ex.default" and len(inputs[1].shape) < len(inputs[0].shape):
        if len(inputs[1].shape) > 1 and inputs[1].shape != inputs[0].shape[:-1]:
            return []  # a rank's shard of 4 matrices [4, 4] would take a right side [4, 4] for 4 vectors
        of_inputs, of_outputs = (2, 1), (1, 2, 1, 0)
    batch = op.output.shape[: len(op.output.shape) - of_outputs[0]]

    def placed(tensors: Sequence[Any], matrices: tuple[int, ...], d: int) -> tuple:
        at = [len(t.shape) - last - len(batch) + d for t, last in zip(tensors, matrices, strict=False)]
        return tuple(S(k) if k >= 0 and t.shape[k] == batch[d] else R for k, t in zip(at, tensors, strict=True))

    rows = [Row(placed(op.outputs, of_outputs, d), placed(inputs, of_inputs, d)) for d in range(len(batch))]
    partial = Row((P(), *(R for _ in op.outputs[1:])), tuple(P() if k == linear else R for k in range(len(inputs))))
    return rows if linear is None else [*rows, partial]


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


@rule(*sorted(PER_ELEMENT))
def drawn_per_element(op: Op, inputs: Inputs) -> list[Row]:
    """Each rank keeps, or draws, its shard of what one device draws (`lower.kernels.random`). An input that is read for its shape alone
    may be replicated or partial where the output is sharded or replicated."""
    rows = broadcast_rows(op, inputs)
    if op.target not in SHAPED:
        return rows
    with_template = [row for sharded in rows for row in (sharded, replace(sharded, inputs=(R, *sharded.inputs[1:])))]
    return [*with_template, Row((R,) * len(op.outputs), (P(), *(R for _ in inputs[1:])))]


@cache
def is_pointwise(target: str) -> bool:
    """Whether an operator computes each element alone, and draws no random numbers."""
    tags = getattr(overload_of(target), "tags", ())
    known = torch.Tag.pointwise in tags or target in UNTAGGED or target in LINEAR_PER_ELEMENT
    return known and torch.Tag.nondeterministic_seeded not in tags


def broadcast_rows(op: Op, inputs: Inputs) -> list[Row]:
    """Each dim of the outputs sharded, with that dim of the inputs that are as long there: the others broadcast, or lack it."""
    shape, rows = op.output.shape, []
    for d, size in enumerate(shape):
        at = [len(t.shape) - len(shape) + d for t in inputs]
        placements = tuple(S(k) if k >= 0 and t.shape[k] == size else R for k, t in zip(at, inputs, strict=True))
        rows.append(Row((S(d),) * len(op.outputs), placements))
    return rows


def pointwise(op: Op, inputs: Inputs) -> list[Row] | None:
    """Rows of an op that torch tags as pointwise and that has no rule; None for other ops and for those that draw random numbers."""
    if not is_pointwise(op.target) or any(t is None for t in op.outputs):
        return None
    rows = broadcast_rows(op, inputs)
    if op.target in LINEAR_PER_ELEMENT:
        linear = LINEAR_PER_ELEMENT[op.target]
        rows.append(Row(tuple(P() for _ in op.outputs), tuple(P() if k in linear else R for k in range(len(inputs)))))
    return rows
