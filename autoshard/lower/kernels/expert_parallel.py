"""Local programs of experts (capture/experts.py), whose tokens go to the ranks that have their experts and back.

A pair is a token and one of its k experts. On an axis that shards the experts,

    tokens are sharded too    tokens are sent to the ranks of their experts by all_to_all, and what the experts make of them is sent back
    tokens are replicated     each rank multiplies the pairs of its own experts; the outputs are partial sums

A token is sent once to each rank that has experts of it, and the weighted sum of what these make of it comes back, in the dtype of x. Where
several axes shard the experts, a token travels along one after the other, the slowest first. Nothing is dropped: on each axis the ranks
tell each other first how much they send, and an expert may get all pairs or none. Sizes therefore depend on data. `DataDependent` is such
a program: ranks in one process run it as it is, a rank of many runs it as one operator, `autoshard::run_experts`, which can be traced.

    dispatch   pairs of this rank -> pairs of its experts, sorted by these   `_dispatched`
    multiply   rows -> rows, through the MLP of their expert                 `multiply`, `multiply_backward`
    combine    rows of pairs -> their weighted sums by token                 `_Routed.rows_back`
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autoshard.lower.collectives import Ask, Asking, DataDependent, Groups, Rank
from autoshard.lower.kernels.experts import aligned_grouped_mm
from autoshard.lower.kernels.sharded_op import Arguments, Kernel, ShardedOp
from autoshard.lower.literals import overload
from autoshard.torch_private import resolve_process_group

aten = torch.ops.aten


# -- one rank's experts --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Parameters:
    """Of the experts of a rank. up [e, H, F], down [e, I, H], biases [e, F] and [e, H] or None."""

    up: Tensor
    down: Tensor
    up_bias: Tensor | None
    down_bias: Tensor | None
    activation: str

    @staticmethod
    def of(tensors: Sequence[Tensor], activation: str) -> Parameters:
        up, down, up_bias, down_bias = (*tensors, None, None)[:4]
        assert up is not None and down is not None
        return Parameters(up, down, up_bias, down_bias, activation)  # type: ignore[arg-type]

    def ends(self, ids: Tensor) -> Tensor:
        """Where the rows of each expert end; ids are sorted."""
        return torch.searchsorted(ids, torch.arange(self.up.shape[0], device=ids.device), right=True).to(torch.int32)


@cache
def _calls(activation: str) -> tuple[tuple[str, list, dict], ...]:
    return tuple((name, arguments, named) for name, arguments, named in json.loads(activation))


def activate(activation: str, x: Tensor) -> Tensor:
    """The activation on rows of hidden values."""
    values: list[Any] = [x]

    def filled(item: Any) -> Any:
        if isinstance(item, list):
            return [filled(part) for part in item]
        return values[int(item[1:])] if isinstance(item, str) and item[:1] == "$" else item

    for name, arguments, named in _calls(activation):
        if name == "getitem":
            values.append(filled(arguments[0])[arguments[1]])
        else:
            values.append(overload(name)(*filled(arguments), **{key: filled(item) for key, item in named.items()}))
    return values[-1]


torch.library.define("autoshard::activation_backward", "(Tensor grad, Tensor x, str activation) -> Tensor")


@torch.library.register_fake("autoshard::activation_backward")
def _(grad, x, activation):  # type: ignore[no-untyped-def]
    return torch.empty_like(x)


@torch.library.impl("autoshard::activation_backward", "CompositeExplicitAutograd")
def _(grad, x, activation):  # type: ignore[no-untyped-def]
    """The gradient of x from that of its activation, as one op: autograd has no place in a graph that is traced."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(activate(activation, x), x, grad)
    return gradient


def _grouped(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    """Each row by the matrix of its expert; rows may be none."""
    return aligned_grouped_mm(x, w, ends) if x.shape[0] else x.new_zeros(0, w.shape[-1])


def _summed(x: Tensor, y: Tensor, ends: Tensor) -> Tensor:
    """For each expert the product x' y over its rows: (s, m), (s, n) -> (e, m, n)."""
    if not x.shape[0]:
        return x.new_zeros(ends.shape[0], x.shape[1], y.shape[1])
    return aligned_grouped_mm(x.t(), y, ends).contiguous()


def _hidden(rows: Tensor, ids: Tensor, ends: Tensor, own: Parameters) -> Tensor:
    hidden = _grouped(rows, own.up, ends)
    return hidden if own.up_bias is None else hidden + own.up_bias[ids]


def multiply(rows: Tensor, ids: Tensor, own: Parameters) -> Tensor:
    """Rows [s, H], sorted by their local experts ids [s], through the MLPs of these."""
    ends = own.ends(ids)
    out = _grouped(activate(own.activation, _hidden(rows, ids, ends, own)), own.down, ends)
    return out if own.down_bias is None else out + own.down_bias[ids]


def multiply_backward(grad: Tensor, rows: Tensor, weights: Tensor, ids: Tensor, own: Parameters) -> tuple[Tensor, ...]:
    """Gradients of rows [s, H], of weights [s], and of the parameters, from those of the weighted outputs, [s, H]."""
    ends = own.ends(ids)
    hidden = _hidden(rows, ids, ends, own)
    active = activate(own.activation, hidden)
    through = _grouped(grad, own.down.transpose(1, 2), ends)
    grad_weights = (through * active).sum(1, dtype=weights.dtype)
    weighted = (grad * weights.unsqueeze(1)).to(grad.dtype)
    grad_hidden = torch.ops.autoshard.activation_backward((through * weights.unsqueeze(1)).to(active.dtype), hidden, own.activation)
    grad_up, grad_down = _summed(rows, grad_hidden, ends), _summed(active, weighted, ends)
    grad_rows = _grouped(grad_hidden, own.up.transpose(1, 2), ends)
    if own.down_bias is None:
        return grad_rows, grad_weights, grad_up, grad_down
    ones = rows.new_ones(rows.shape[0], 8)  # as many as a matmul's rows in memory need
    biases = [_summed(ones, x, ends)[:, 0] for x in (grad_hidden, weighted)]
    return grad_rows, grad_weights + (grad * own.down_bias[ids]).sum(1, dtype=weights.dtype), grad_up, grad_down, *biases


# -- where a rank has all experts ----------------------------------------------------------------------------------------------------


def _put_back(x: Tensor, order: Tensor) -> Tensor:
    """The inverse of x[order]."""
    return torch.empty_like(x).index_copy(0, order, x)


def _local(x: Tensor, ids: Tensor, weights: Tensor, *parameters: Tensor, activation: str) -> Tensor:
    sorted_ids, order = torch.sort(ids.reshape(-1), stable=True)
    rows = multiply(x[order // ids.shape[1]], sorted_ids, Parameters.of(parameters, activation))
    return (_put_back(rows, order).view(*ids.shape, -1) * weights.unsqueeze(2)).sum(1)


def _local_backward(grad: Tensor, x: Tensor, ids: Tensor, weights: Tensor, *parameters: Tensor, activation: str) -> tuple[Tensor, ...]:
    sorted_ids, order = torch.sort(ids.reshape(-1), stable=True)
    tokens = order // ids.shape[1]
    grads, own = grad.to(x.dtype)[tokens], Parameters.of(parameters, activation)
    grad_rows, grad_scales, *rest = multiply_backward(grads, x[tokens], weights.reshape(-1)[order], sorted_ids, own)
    return _put_back(grad_rows, order).view(*ids.shape, -1).sum(1), _put_back(grad_scales, order).view_as(weights), *rest


# -- dispatch and combine ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Dispatch:
    """Over which axes tokens go to their experts. A rank's coordinate on these is `where`, in the order of `axes`."""

    axes: tuple[int, ...]  # mesh axes that shard the experts, left to right
    sizes: tuple[int, ...]  # of these axes
    sent: tuple[bool, ...]  # whether tokens are sharded on the axis, too
    num_experts: int  # on all ranks together

    @property
    def experts_per_rank(self) -> int:
        return self.num_experts // math.prod(self.sizes)

    def coordinate(self, ids: Tensor, position: int) -> Tensor:
        """The coordinate, on one of the axes, of the rank that has each expert."""
        return ids // (self.experts_per_rank * math.prod(self.sizes[position + 1 :])) % self.sizes[position]

    def first(self, where: Sequence[int]) -> int:
        """The first expert of a rank."""
        number = 0
        for size, c in zip(self.sizes, where, strict=True):
            number = number * size + c
        return number * self.experts_per_rank


Exchange = Generator[Ask, Tensor, Tensor]
Splits = tuple[list[int], list[int]]  # how many rows go to, and come from, each rank of the group


@dataclass(frozen=True)
class _Hop:
    """An exchange over one axis. Rows (of tokens) and pairs have an order and numbers of their own."""

    axis: int
    rows: Tensor  # the row that is sent as the i-th; one that goes to several ranks is there several times
    row_splits: Splits
    pairs: Tensor  # the pair that is sent as the i-th
    pair_splits: Splits
    num_rows: int  # before the exchange

    def rows_forth(self, x: Tensor) -> Exchange:
        return (yield Ask("all_to_all", self.axis, x[self.rows], splits=self.row_splits))

    def rows_back(self, x: Tensor, wide: torch.dtype) -> Exchange:
        """The sum, for each row, of what comes back of it."""
        returned = yield Ask("all_to_all", self.axis, x, splits=self.row_splits[::-1])
        return _added_up(returned, self.rows, self.num_rows, wide)

    def pairs_forth(self, x: Tensor) -> Exchange:
        return (yield Ask("all_to_all", self.axis, x[self.pairs], splits=self.pair_splits))

    def pairs_back(self, x: Tensor) -> Exchange:
        return _put_back((yield Ask("all_to_all", self.axis, x, splits=self.pair_splits[::-1])), self.pairs)


def _added_up(x: Tensor, index: Tensor, count: int, wide: torch.dtype) -> Tensor:
    """y[i] = the sum of x over index == i, in dtype `wide`; terms are added in their order, so that every run has the same sum."""
    y = x.new_zeros(count, *x.shape[1:], dtype=wide)
    if not x.shape[0]:
        return y
    ordered, order = torch.sort(index, stable=True)
    places = torch.arange(len(index), device=index.device)
    is_first = torch.cat([ordered.new_ones(1, dtype=torch.bool), ordered[1:] != ordered[:-1]])
    occurrence = places - torch.cummax(torch.where(is_first, places, 0), 0).values
    for k in range(int(occurrence.max()) + 1):
        chosen = order[occurrence == k]
        y.index_add_(0, index[chosen], x[chosen].to(wide))
    return y


def _hop(axis: int, size: int, target: Tensor, experts: Tensor, rows: Tensor, num_rows: int) -> Generator[Ask, Tensor, tuple]:
    """The exchange of pairs (a row, an expert, the rank of that), with experts and rows of the pairs that come, and how many rows do."""
    n = max(num_rows, 1)
    # a row goes once to each rank, however many of its experts are there
    keys, number = torch.unique(target * n + rows, return_inverse=True)
    pairs = torch.argsort(target, stable=True)
    row_counts, pair_counts = torch.bincount(keys // n, minlength=size), torch.bincount(target, minlength=size)
    counts = yield Ask("all_to_all", axis, torch.stack([row_counts, pair_counts], 1))
    received = counts.reshape(size, 2)
    to = row_counts.tolist(), pair_counts.tolist()
    rows_come, pairs_come = received.t().tolist()
    hop = _Hop(axis, keys % n, (to[0], rows_come), pairs, (to[1], pairs_come), num_rows)
    number = number - (row_counts.cumsum(0) - row_counts)[target]  # among the rows for its rank
    experts, number = (yield from hop.pairs_forth(torch.stack([experts, number], 1))).unbind(1)
    begins = received[:, 0].cumsum(0) - received[:, 0]
    return hop, experts, number + begins.repeat_interleave(received[:, 1]), sum(rows_come)


@dataclass(frozen=True)
class _Routed:
    """The pairs of a rank (their numbers t k + j), their way to the experts, and the pairs that this rank's experts get."""

    pairs: Tensor
    hops: tuple[_Hop, ...]
    rows: Tensor  # the row of each pair that arrives, sorted by expert
    num_rows: int
    order: Tensor  # sorts these pairs
    ids: Tensor  # the local expert of each, sorted

    def rows_forth(self, x: Tensor) -> Exchange:
        """A row per token of this rank -> a row per pair of its experts."""
        for hop in self.hops:
            x = yield from hop.rows_forth(x)
        return x[self.rows]

    def rows_back(self, x: Tensor, wide: torch.dtype, sent: torch.dtype) -> Exchange:
        """A row per pair of its experts -> their sum per token of this rank, added up as `wide`, sent as `sent`."""
        x = _added_up(x, self.rows, self.num_rows, wide)
        for hop in reversed(self.hops):
            x = yield from hop.rows_back(x.to(sent), wide)
        return x

    def pairs_forth(self, x: Tensor) -> Exchange:
        x = x[self.pairs]
        for hop in self.hops:
            x = yield from hop.pairs_forth(x)
        return x[self.order]

    def pairs_back(self, x: Tensor, count: int) -> Exchange:
        """A number per pair of its experts -> one per pair of this rank's tokens, 0 for those that other ranks of its axes have."""
        x = _put_back(x, self.order)
        for hop in reversed(self.hops):
            x = yield from hop.pairs_back(x)
        return x.new_zeros(count).index_copy(0, self.pairs, x)


def _dispatched(dispatch: Dispatch, where: Sequence[int], ids: Tensor) -> Generator[Ask, Tensor, _Routed]:
    flat = ids.reshape(-1)
    pairs = torch.arange(flat.shape[0], device=ids.device)
    for position, is_sent in enumerate(dispatch.sent):
        if not is_sent:
            pairs = pairs[dispatch.coordinate(flat[pairs], position) == where[position]]
    experts, rows, num_rows, hops = flat[pairs], pairs // ids.shape[1], ids.shape[0], []
    for position, axis in enumerate(dispatch.axes):
        if dispatch.sent[position]:
            target = dispatch.coordinate(experts, position)
            hop, experts, rows, num_rows = yield from _hop(axis, dispatch.sizes[position], target, experts, rows, num_rows)
            hops.append(hop)
    order = torch.argsort(experts, stable=True)
    return _Routed(pairs, tuple(hops), rows[order], num_rows, order, experts[order] - dispatch.first(where))


def experts(dispatch: Dispatch, where: Sequence[int], tensors: Sequence[Tensor], activation: str) -> Generator[Ask, Tensor, list[Tensor]]:
    """x, ids, weights, parameters of this rank -> y."""
    x, ids, weights, *parameters = tensors
    routed = yield from _dispatched(dispatch, where, ids)
    scales = yield from routed.pairs_forth(weights.reshape(-1))
    rows = yield from routed.rows_forth(x)
    products = multiply(rows, routed.ids, Parameters.of(parameters, activation)) * scales.unsqueeze(1)
    del rows
    return [(yield from routed.rows_back(products, products.dtype, x.dtype))]


def experts_backward(
    dispatch: Dispatch, where: Sequence[int], tensors: Sequence[Tensor], activation: str
) -> Generator[Ask, Tensor, list[Tensor]]:
    """The gradient of y, x, ids, weights, parameters of this rank -> gradients of x, weights and parameters."""
    grad, x, ids, weights, *parameters = tensors
    routed = yield from _dispatched(dispatch, where, ids)
    scales = yield from routed.pairs_forth(weights.reshape(-1))
    both = yield from routed.rows_forth(torch.cat([x, grad.to(x.dtype)], 1))
    rows, grads = (part.contiguous() for part in both.chunk(2, 1))
    del both
    grad_rows, grad_scales, *rest = multiply_backward(grads, rows, scales, routed.ids, Parameters.of(parameters, activation))
    del rows, grads
    grad_scales = yield from routed.pairs_back(grad_scales, ids.numel())
    wide = torch.promote_types(x.dtype, weights.dtype)
    grad_x = yield from routed.rows_back(grad_rows, wide, x.dtype)
    return [grad_x.to(x.dtype), grad_scales.view_as(weights), *rest]


# -- as one operator -----------------------------------------------------------------------------------------------------------------

torch.library.define(
    "autoshard::run_experts",
    "(Tensor[] tensors, str activation, bool backward, int num_experts, int[] axes, int[] sizes, bool[] sent, str[] groups) -> Tensor[]",
)


@torch.library.register_fake("autoshard::run_experts")
def _(tensors, activation, backward, *rest):  # type: ignore[no-untyped-def]
    if not backward:
        x, _, weights, *_ = tensors
        return [x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, weights.dtype))]
    _, x, _, weights, *parameters = tensors
    return [t.new_empty(t.shape) for t in (x, weights, *parameters)]


@torch.library.impl("autoshard::run_experts", "CompositeExplicitAutograd")
def _(tensors, activation, backward, num_experts, axes, sizes, sent, groups):  # type: ignore[no-untyped-def]
    """This rank's part, by the process groups of the axes that shard the experts."""
    dispatch = Dispatch(tuple(axes), tuple(sizes), tuple(sent), num_experts)
    where = [dist.get_rank(resolve_process_group(name)) for name in groups]
    names, counts = ([""] * (max(axes) + 1) for _ in range(2))
    for axis, size, name in zip(axes, sizes, groups, strict=True):
        names[axis], counts[axis] = name, size  # type: ignore[call-overload]
    with torch.no_grad():
        program = (experts_backward if backward else experts)(dispatch, where, tensors, activation)
        return Groups(tuple(names), tuple(counts)).drive(program)  # type: ignore[arg-type]


@dataclass(frozen=True, eq=False)
class RunExperts(DataDependent):
    """`experts` or `experts_backward` with the tensors of one rank."""

    dispatch: Dispatch
    tensors: tuple[Tensor, ...]
    activation: str
    backward: bool

    @property
    def axes(self) -> Sequence[int]:
        return self.dispatch.axes

    def program(self, rank: Rank) -> Asking:
        where = [rank.place[axis] for axis in self.dispatch.axes]
        return (experts_backward if self.backward else experts)(self.dispatch, where, self.tensors, self.activation)  # type: ignore

    def call(self, names: Sequence[str]) -> Any:
        d = self.dispatch
        groups = [names[axis] for axis in d.axes]
        return torch.ops.autoshard.run_experts(
            list(self.tensors), self.activation, self.backward, d.num_experts, d.axes, d.sizes, d.sent, groups
        )  # fmt: skip


def _run(rank: Rank, a: Arguments, *, dispatch: Dispatch, backward: bool) -> Asking:
    named = dict(a)
    activation = named.pop("activation")
    return (yield RunExperts(dispatch, tuple(named.values()), activation, backward))  # type: ignore[misc]


def _kernel(sharded: ShardedOp, *, backward: bool) -> Kernel | None:
    axes = sharded.axes_of("up", 0)
    if not axes:
        return None
    tokens = sharded.axes_of("x", 0)
    sizes = tuple(sharded.mesh.shape[axis] for axis in axes)
    dispatch = Dispatch(axes, sizes, tuple(axis in tokens for axis in axes), sharded.shape("up")[0])
    return partial(_run, dispatch=dispatch, backward=backward)


KERNELS: dict[str, Callable[[ShardedOp], Kernel | None]] = {
    f"autoshard.{name}{suffix}.default": partial(_kernel, backward=bool(suffix))
    for name in ("experts", "biased_experts")
    for suffix in ("", "_backward")
}


def _by_name(function: Callable[..., Any], **arguments: Any) -> Any:
    activation = arguments.pop("activation")
    return function(*arguments.values(), activation=activation)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    target: partial(_by_name, _local_backward if "backward" in target else _local) for target in KERNELS
}
