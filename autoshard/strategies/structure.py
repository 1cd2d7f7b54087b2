"""Rows of ops that only move, slice, join or reduce dims: each row maps an input dim to an output dim.

reshape: both shapes are divided into the smallest groups of dims with equal products. Only the leading dim of a group (without
sizes of 1) has contiguous shards, so S(leading in) <-> S(leading out): [B,T,H] -> [BT,H] keeps shards of B, but not of T.
"""

from autoshard.graph import Op, is_dense
from autoshard.layout import P, R, S
from autoshard.strategies.dims import broadcast_rows, named_dims
from autoshard.strategies.rows import Inputs, Row, argument, linear_rows, other_dims, row, rule, shard_rows


def leading_pairs(shape: tuple[int, ...], new: tuple[int, ...]) -> list[tuple[int, int]]:
    """The (input dim, output dim) pairs that a reshape keeps as contiguous parts."""
    pairs, i, o = [], 0, 0
    while i < len(shape) and o < len(new):
        if shape[i] == 1 or new[o] == 1:
            i, o = (i + 1, o) if shape[i] == 1 else (i, o + 1)
            continue
        pairs.append((i, o))
        left, right = shape[i], new[o]
        i, o = i + 1, o + 1
        while left != right:
            if left < right:
                left, i = left * shape[i], i + 1
            else:
                right, o = right * new[o], o + 1
    return pairs


@rule("aten.view.default", "aten._unsafe_view.default", "aten.reshape.default", "aten.view_copy.default", "aten._reshape_alias.default")
def reshape(op: Op, inputs: Inputs) -> list[Row] | None:
    return [] if 0 in inputs[0].shape else same(op, inputs)


@rule("aten.permute.default", "aten.t.default", "aten.transpose.int")
def permute(op: Op, inputs: Inputs) -> list[Row]:
    rank = len(inputs[0].shape)
    order = [int(d) % rank for d in argument(op, 1, "dims")] if op.target == "aten.permute.default" else list(range(rank))
    if op.target == "aten.t.default":
        order.reverse()
    elif op.target == "aten.transpose.int":
        a, b = (int(argument(op, k, f"dim{k - 1}")) % rank for k in (1, 2))
        order[a], order[b] = order[b], order[a]
    return shard_rows(op, inputs, [(source, o) for o, source in enumerate(order)]) + linear_rows(1, 1)


@rule(
    "aten.detach.default", "aten.alias.default", "aten.clone.default", "aten.lift_fresh_copy.default", "aten.contiguous.default",
    "aten.lift_fresh.default", "aten.lift.default", "aten.unsqueeze.default",
)  # fmt: skip
def same(op: Op, inputs: Inputs) -> list[Row]:
    return shard_rows(op, inputs, leading_pairs(inputs[0].shape, op.output.shape)) + linear_rows(1, 1)


@rule("aten.copy.default")
def overwrite(op: Op, inputs: Inputs) -> list[Row]:
    """The values of the second input, in the shape and dtype of the first."""
    dims = range(len(inputs[0].shape)) if inputs[0].shape == inputs[1].shape else ()
    return [row(S(d), S(d), S(d)) for d in dims]


@rule("aten.squeeze.dim", "aten.squeeze.dims", "aten.squeeze.default")
def squeeze(op: Op, inputs: Inputs) -> list[Row]:
    """A dim that the op may remove can't be sharded: local shards of size 1 would be removed too."""
    rank = len(inputs[0].shape)
    removable = named_dims(argument(op, 1, "dim"), rank)
    kept = [(i, o) for i, o in leading_pairs(inputs[0].shape, op.outputs[0].shape) if i not in removable]  # type: ignore[union-attr]
    return shard_rows(op, inputs, kept) + linear_rows(1, 1)


@rule("aten.view.dtype")
def reinterpret(op: Op, inputs: Inputs) -> list[Row]:
    """The same bits as another dtype, so partial sums are lost."""
    same_size = inputs[0].shape == op.outputs[0].shape  # type: ignore[union-attr]
    return shard_rows(op, inputs, [(d, d) for d in range(len(inputs[0].shape) - (not same_size))])


@rule("aten.expand.default")
def expand(op: Op, inputs: Inputs) -> list[Row]:
    return linear_rows(1, 1) + broadcast_rows(op, inputs)


@rule("aten.slice_backward.default", "aten.select_backward.default", "aten.unfold_backward.default")
def put_back(op: Op, inputs: Inputs) -> list[Row]:
    """The gradient of a part is put in its place among zeros; those of windows, each in a last dim of its own, are added up."""
    rank = len(op.output.shape)
    dim = int(argument(op, 2, "dim")) % rank
    removed = op.target == "aten.select_backward.default"
    pairs = [(d - (removed and d > dim), d) for d in range(rank) if d != dim]
    return shard_rows(op, inputs, pairs) + linear_rows(1, 1)


@rule("aten.diagonal_backward.default")
def diagonal_backward(op: Op, inputs: Inputs) -> list[Row]:
    """The gradient of a diagonal, its last dim, is put on the diagonal of a tensor of zeros."""
    rank = len(op.output.shape)
    both = {int(argument(op, position)) % rank for position in (3, 4)}
    others = [d for d in range(rank) if d not in both]
    return shard_rows(op, inputs, list(enumerate(others))) + linear_rows(1, 1)


@rule("aten.as_strided.default")
def as_strided(op: Op, inputs: Inputs) -> list[Row] | None:
    """A view by strides: a reshape if the strides are dense and cover all elements; else only partial sums are kept."""
    size, stride, offset = (argument(op, position, name) for position, name in ((1, "size"), (2, "stride"), (3, "storage_offset")))
    if not is_dense(inputs[0].shape, size, stride, offset):
        return linear_rows(1, 1)
    return reshape(op, inputs)


@rule("aten.as_strided_scatter.default")
def as_strided_scatter(op: Op, inputs: Inputs) -> list[Row]:
    """The first input with a view of it replaced by the second: the second reshaped, if the view covers all elements."""
    size, stride, offset = (argument(op, position, name) for position, name in ((2, "size"), (3, "stride"), (4, "storage_offset")))
    base, source = inputs
    if 0 in source.shape or not is_dense(base.shape, size, stride, offset):
        return linear_rows(1, 2)
    return [row(S(o), S(o), S(i)) for i, o in leading_pairs(source.shape, base.shape)] + linear_rows(1, 2)


@rule("aten.cat.default", "aten.stack.default")
def join(op: Op, inputs: Inputs) -> list[Row]:
    rank = len(op.output.shape)
    dim = int(argument(op, 1, "dim", 0)) % rank
    stacked = op.target == "aten.stack.default"
    rows = [Row((S(d),), (S(d - (stacked and d > dim)),) * len(inputs)) for d in range(rank) if d != dim]
    if any(len(t.shape) != len(inputs[0].shape) for t in inputs):  # cat skips legacy empty tensors
        rows = []
    return rows + linear_rows(1, len(inputs))


REDUCTIONS = {"sum": P(), "mean": P(), "amax": P("max"), "amin": P("min")}


@rule("aten.sum.dim_IntList", "aten.sum.default", "aten.mean.dim", "aten.mean.default", "aten.amax.default", "aten.amin.default")
def reduce(op: Op, inputs: Inputs) -> list[Row]:
    rank = len(inputs[0].shape)
    name = op.target.split(".")[1]
    reduced = named_dims(argument(op, 1, "dim", ()), rank)
    rows = [row(REDUCTIONS[name], S(d)) for d in sorted(reduced)]
    rows += shard_rows(op, inputs, other_dims(rank, reduced, keep=len(op.output.shape) == rank))
    return rows + (linear_rows(1, 1) if name in ("sum", "mean") else [])


@rule(
    "aten.full.default", "aten.zeros.default", "aten.ones.default", "aten.empty.memory_format", "aten.zeros_like.default",
    "aten.ones_like.default", "aten.full_like.default", "aten.empty_like.default", "aten.new_zeros.default", "aten.new_ones.default",
    "aten.new_full.default", "aten.new_empty.default", "aten.fill.Scalar", "aten.zero.default", "aten._efficientzerotensor.default",
)  # fmt: skip
def constant(op: Op, inputs: Inputs) -> list[Row]:
    """A constant may have any layout. A template of the same shape has the same layout; another one is replicated."""
    same_shape = bool(inputs) and inputs[0].shape == op.output.shape
    return [Row((S(d),), ((S(d) if same_shape else R),) * len(inputs)) for d in range(len(op.output.shape))]


@rule("aten.fill.Tensor")
def filled(op: Op, inputs: Inputs) -> list[Row]:
    """The value of the second input for all elements, in the shape of the first."""
    return [row(S(d), S(d), R) for d in range(len(op.output.shape))] + [row(P(), R, P())]


@rule("aten.trace.default")
def trace(op: Op, inputs: Inputs) -> list[Row]:
    return linear_rows(1, 1)
