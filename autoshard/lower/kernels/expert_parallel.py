"""Local programs of experts (capture/experts.py), whose tokens go to the ranks that have their experts and back.

A pair is a token and one of its k experts. On an axis that shards the experts,

    tokens are sharded too    tokens are sent to the ranks of their experts by all_to_all, and what the experts make of them is sent back
    tokens are replicated     each rank multiplies the pairs of its own experts; the outputs are partial sums

    exchange    pairs of this rank -> pairs of its experts, sorted by these      expert_exchange.py
    multiply    rows -> rows, through the MLP of their expert                    experts.py
    combine     rows of pairs -> their weighted sums by token, in the dtype of x

Sizes depend on data, so a rank of many runs all of it as one operator, `autoshard::run_experts`, which can be traced (`DataDependent`).
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autoshard.graph import KEEPING, READING
from autoshard.layout import local_shape
from autoshard.lower.collectives import DataDependent, Groups, Rank, RankGenerator
from autoshard.lower.kernels.expert_exchange import Dispatch, dispatched, put_back
from autoshard.lower.kernels.experts import Parameters, multiply, multiply_backward
from autoshard.lower.kernels.sharded_op import Arguments, Kernel, ShardedOp
from autoshard.torch_private import resolve_process_group


def _local(x: Tensor, ids: Tensor, weights: Tensor, *parameters: Tensor, activation: str, keeps: bool = False) -> Any:
    sorted_ids, order = torch.sort(ids.reshape(-1), stable=True)
    own, kept = Parameters.of(parameters, activation), ids.numel() if keeps else None
    rows, hidden = multiply(x[order // ids.shape[1]], sorted_ids, own, kept)
    y = (put_back(rows, order).view(*ids.shape, -1) * weights.unsqueeze(2)).sum(1)
    return y if hidden is None else (y, hidden.view(-1, own.up.shape[0], own.up.shape[2]))


def _local_backward(
    grad: Tensor, x: Tensor, ids: Tensor, weights: Tensor, *rest: Tensor, activation: str, keeps: bool = False
) -> tuple[Tensor, ...]:
    sorted_ids, order = torch.sort(ids.reshape(-1), stable=True)
    tokens, (own, hidden) = order // ids.shape[1], _parameters(rest, activation, keeps)
    grads = grad.to(x.dtype)[tokens]
    grad_rows, grad_scales, *rest = multiply_backward(grads, x[tokens], weights.reshape(-1)[order], sorted_ids, own, hidden)  # type: ignore[assignment]
    return put_back(grad_rows, order).view(*ids.shape, -1).sum(1), put_back(grad_scales, order).view_as(weights), *rest


def _parameters(tensors: Sequence[Tensor], activation: str, keeps: bool) -> tuple[Parameters, Tensor | None]:
    """Parameters, and the kept hidden values behind them as rows."""
    own = Parameters.of(tensors[: len(tensors) - keeps], activation)
    return own, tensors[-1].reshape(-1, own.up.shape[2]) if keeps else None


def experts(
    dispatch: Dispatch, where: Sequence[int], tensors: Sequence[Tensor], activation: str, kept: Sequence[int] = ()
) -> RankGenerator:
    """x, ids, weights, parameters of this rank -> y; and hidden values of shape `kept`."""
    x, ids, weights, *parameters = tensors
    routed = yield from dispatched(dispatch, where, ids)
    scales = yield from routed.pairs_forth(weights.reshape(-1))
    rows = yield from routed.rows_forth(x)
    count = math.prod(kept) // parameters[0].shape[2] if kept else None
    products, hidden = multiply(rows, routed.ids, Parameters.of(parameters, activation), count)
    products = products * scales.unsqueeze(1)
    del rows
    y = yield from routed.rows_back(products, products.dtype, x.dtype)
    return [y] if hidden is None else [y, hidden.view(kept)]


def experts_backward(
    dispatch: Dispatch, where: Sequence[int], tensors: Sequence[Tensor], activation: str, kept: Sequence[int] = ()
) -> RankGenerator:
    """The gradient of y, x, ids, weights, parameters of this rank, hidden values -> gradients of x, weights and parameters."""
    grad, x, ids, weights, *rest = tensors
    own, hidden = _parameters(rest, activation, bool(kept))
    routed = yield from dispatched(dispatch, where, ids)
    scales = yield from routed.pairs_forth(weights.reshape(-1))
    both = yield from routed.rows_forth(torch.cat([x, grad.to(x.dtype)], 1))
    rows, grads = (part.contiguous() for part in both.chunk(2, 1))
    del both
    grad_rows, grad_scales, *rest = multiply_backward(grads, rows, scales, routed.ids, own, hidden)
    del rows, grads
    grad_scales = yield from routed.pairs_back(grad_scales, ids.numel())
    wide = torch.promote_types(x.dtype, weights.dtype)
    grad_x = yield from routed.rows_back(grad_rows, wide, x.dtype)
    return [grad_x.to(x.dtype), grad_scales.view_as(weights), *rest]


torch.library.define(
    "autoshard::run_experts",
    "(Tensor[] tensors, str activation, int[] kept, bool backward, int num_experts, int[] axes, int[] sizes, bool[] sent, str[] groups)"
    " -> Tensor[]",
)


@torch.library.register_fake("autoshard::run_experts")
def _(tensors, activation, kept, backward, *rest):  # type: ignore[no-untyped-def]
    if not backward:
        x, _, weights, *_ = tensors
        y = x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, weights.dtype))
        return [y, x.new_empty(kept)] if kept else [y]
    _, x, _, weights, *others = tensors
    return [t.new_empty(t.shape) for t in (x, weights, *others[: len(others) - bool(kept)])]


@torch.library.impl("autoshard::run_experts", "CompositeExplicitAutograd")
def _(tensors, activation, kept, backward, num_experts, axes, sizes, sent, groups):  # type: ignore[no-untyped-def]
    """This rank's part, by the process groups of the axes that shard the experts."""
    dispatch = Dispatch(tuple(axes), tuple(sizes), tuple(sent), num_experts)
    where = [dist.get_rank(resolve_process_group(name)) for name in groups]
    names, counts = ([""] * (max(axes) + 1) for _ in range(2))
    for axis, size, name in zip(axes, sizes, groups, strict=True):
        names[axis], counts[axis] = name, size  # type: ignore[call-overload]
    with torch.no_grad():
        program = (experts_backward if backward else experts)(dispatch, where, tensors, activation, kept)
        return Groups(tuple(names), tuple(counts)).drive(program)  # type: ignore[arg-type]


def _run(rank: Rank, a: Arguments, *, dispatch: Dispatch, kept: Sequence[int], backward: bool) -> RankGenerator:
    *tensors, activation = a.values()

    def program(rank: Rank) -> RankGenerator:
        where = [rank.place[axis] for axis in dispatch.axes]
        return (experts_backward if backward else experts)(dispatch, where, tensors, activation, kept)

    def operator(names: Sequence[str]) -> list[Tensor]:
        groups = [names[axis] for axis in dispatch.axes]
        d = dispatch
        return torch.ops.autoshard.run_experts(tensors, activation, kept, backward, d.num_experts, d.axes, d.sizes, d.sent, groups)

    return (yield DataDependent("run_experts", dispatch.axes, program, operator))


def _kernel(sharded: ShardedOp, *, backward: bool) -> Kernel | None:
    axes = sharded.axes_of("up", 0)
    if not axes:
        return None
    tokens = sharded.axes_of("x", 0)
    sizes = tuple(sharded.mesh.shape[axis] for axis in axes)
    dispatch = Dispatch(axes, sizes, tuple(axis in tokens for axis in axes), sharded.shape("up")[0])
    kept: tuple[int, ...] = ()  # the local shape of hidden values
    if not backward and len(sharded.op.outputs) > 1:
        kept = local_shape(sharded.op.outputs[1].shape, sharded.outputs[1], sharded.mesh)  # type: ignore[union-attr, arg-type]
    elif (layout := sharded.layout("hidden")) is not None:
        kept = local_shape(sharded.shape("hidden"), layout, sharded.mesh)
    return partial(_run, dispatch=dispatch, kept=kept, backward=backward)


KERNELS: dict[str, Callable[[ShardedOp], Kernel | None]] = {
    target: partial(_kernel, backward=backward)
    for backward, targets in ((False, KEEPING), (True, READING))
    for target in (*targets, *targets.values())
}


def _by_name(function: Callable[..., Any], **arguments: Any) -> Any:
    *tensors, activation = arguments.values()
    return function(*tensors, activation=activation)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    target: partial(_by_name, partial(function, keeps=keeps))
    for function, targets in ((_local, KEEPING), (_local_backward, READING))
    for keeps, names in ((False, targets), (True, targets.values()))
    for target in names
}
