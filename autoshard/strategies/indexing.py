"""Rows of look-ups by index tensors: index, index_put, index_select, index_add, index_copy, embedding_bag.

    out[b, r] = x[i[b], r]        the dims b of the indices and the dims r that are not indexed may be sharded; if only one dim k
                                  is indexed, so may k: each rank looks up the entries of its shard, and the results add up (P)
    x[i[b], r] += v[b, r]         the inverse: with b sharded the result is Partial, with k sharded each rank drops the values of
                                  other shards

The local programs for x sharded on k are in `lower.kernels.lookups`.
"""

from autoshard.graph import Op, Ref
from autoshard.layout import P, R, S
from autoshard.strategies.dims import input_placements, output_placements
from autoshard.strategies.rows import Inputs, Row, argument, row, rule


class Places:
    """Which dims of the result the dims of an indexed tensor and of its indices become."""

    def __init__(self, op: Op, inputs: Inputs):
        indices = argument(op, 1, "indices")
        self.indices = [(d, item.index) for d, item in enumerate(indices) if isinstance(item, Ref)]
        dims = [d for d, _ in self.indices]
        self.rank = len(inputs[0].shape)
        shapes = [inputs[k].shape for _, k in self.indices]
        self.width = max(map(len, shapes))  # number of dims of the indices, broadcast together
        adjacent = dims == list(range(dims[0], dims[0] + len(dims)))
        self.start = dims[0] if adjacent else 0
        self.sizes = tuple(max(shape[w - self.width] if len(shape) >= self.width - w else 1 for shape in shapes) for w in range(self.width))
        rest = [d for d in range(self.rank) if d not in dims]
        before = [d for d in rest if d < self.start] if adjacent else []
        self.kept = [(d, before.index(d) if d in before else self.width + rest.index(d)) for d in rest]  # (dim of x, dim of the result)
        self.masks = any(inputs[k].dtype == "bool" for _, k in self.indices)

    def of_indices(self, w: int, inputs: Inputs) -> dict[int, object]:
        """Placements of the indices, by input, when dim w of the broadcast indices is sharded."""
        placements: dict[int, object] = {}
        for _, k in self.indices:
            shape = inputs[k].shape
            dim = w - (self.width - len(shape))
            placements[k] = S(dim) if dim >= 0 and shape[dim] != 1 else R
        return placements


def _with(num: int, placements: dict[int, object]) -> tuple:
    return tuple(placements.get(k, R) for k in range(num))


@rule("aten.index.Tensor", "aten._unsafe_index.Tensor")
def index(op: Op, inputs: Inputs) -> list[Row]:
    places, n = Places(op, inputs), len(inputs)
    if places.masks:
        return []
    rows = [Row((S(o),), _with(n, {0: S(d)})) for d, o in places.kept]
    rows += [Row((S(places.start + w),), _with(n, places.of_indices(w, inputs))) for w in range(places.width) if places.sizes[w] > 1]
    rows.append(Row((P(),), _with(n, {0: P()})))
    if len(places.indices) == 1:
        rows.append(Row((P(),), _with(n, {0: S(places.indices[0][0])})))
    return rows


@rule("aten.index_put.default", "aten._unsafe_index_put.default")
def index_put(op: Op, inputs: Inputs) -> list[Row]:
    places, n = Places(op, inputs), len(inputs)
    values = argument(op, 2, "values").index
    accumulate = argument(op, 3, "accumulate", False)
    if places.masks:
        return []
    rank = places.width + len(places.kept)  # of values that aren't broadcast
    shape = inputs[values].shape

    def value_at(o: int) -> object:
        dim = o - (rank - len(shape))
        return S(dim) if dim >= 0 and shape[dim] != 1 else R

    rows = [Row((S(d),), _with(n, {0: S(d), values: value_at(o)})) for d, o in places.kept]
    rows.append(Row((P(),), _with(n, {0: P(), values: P()})))
    if accumulate:
        for w in range(places.width):
            if places.sizes[w] > 1 and value_at(places.start + w) != R:
                rows.append(Row((P(),), _with(n, {**places.of_indices(w, inputs), values: value_at(places.start + w)})))
        rows.append(Row((P(),), _with(n, {values: P()})))
        if len(places.indices) == 1 and len(shape) == rank:
            dim = places.indices[0][0]
            rows.append(Row((S(dim),), _with(n, {0: S(dim)})))
    return rows


@rule("aten.index_select.default")
def index_select(op: Op, inputs: Inputs) -> list[Row]:
    rank = len(inputs[0].shape)
    dim = int(argument(op, 1, "dim")) % max(rank, 1)
    kept = [row(S(d), S(d), R) for d in range(rank) if d != dim]
    return [*kept, row(S(dim), R, S(0)), row(P(), P(), R), row(P(), S(dim), R)] if len(inputs[1].shape) == 1 else kept


@rule("aten.index_add.default", "aten.index_copy.default")
def index_into(op: Op, inputs: Inputs) -> list[Row]:
    """x with source added at index along dim, or put there, each index once; with dim sharded each rank puts the values of its shard."""
    rank = len(inputs[0].shape)
    dim = int(argument(op, 1, "dim")) % max(rank, 1)
    kept, linear = [row(S(d), S(d), R, S(d)) for d in range(rank) if d != dim], row(P(), P(), R, P())
    if op.target == "aten.index_add.default":
        return [*kept, linear, row(P(), R, S(0), S(dim)), row(P(), R, R, P())]
    return [*kept, row(S(dim), S(dim), R, R), linear] if rank else []


SUM, MEAN, MAX = range(3)


@rule("aten._embedding_bag.default", "aten._embedding_bag_forward_only.default")
def embedding_bag(op: Op, inputs: Inputs) -> list[Row]:
    """out[bag, h] = sum over the bag of weight[ids, h]. Bags can't be sharded: offsets count from the first id of all bags.

    The columns of weight can, and for sums also its rows: ids of other shards add 0. bag_size and max_indices are those of full bags.
    """
    mode, n = argument(op, 4, "mode", 0), len(inputs)
    largest = S(1) if mode == MAX else R
    rows = [Row(output_placements(op, S(1), R, R, largest), input_placements(op, n, {0: S(1)}))]
    if mode == SUM:
        rows += [
            Row(output_placements(op, P(), R, R, R), input_placements(op, n, {0: S(0)})),
            Row(output_placements(op, P(), R, R, R), input_placements(op, n, {0: P()})),
        ]
    return rows


# positions of (max_indices, scale_grad_by_freq, mode)
BAG_BACKWARD = {"aten._embedding_bag_dense_backward.default": (4, 6, 7), "aten._embedding_bag_backward.default": (5, 7, 8)}


@rule(*BAG_BACKWARD)
def embedding_bag_backward(op: Op, inputs: Inputs) -> list[Row]:
    largest, by_frequency, at_mode = BAG_BACKWARD[op.target]
    mode, n = argument(op, at_mode, "mode", 0), len(inputs)
    if argument(op, by_frequency, "scale_grad_by_freq", False):
        return []
    columns = row(S(1), *input_placements(op, n, {0: S(1), largest: S(1) if mode == MAX else R}))
    linear = row(P(), *input_placements(op, n, {0: P()}))
    return [columns, linear, row(S(0), *input_placements(op, n, {}))] if mode == SUM else [columns, linear]
