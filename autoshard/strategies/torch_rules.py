"""Rows from torch's own sharding rules. Only this file uses torch's private registries.

There are two registries: the functions of `op_single_dim_strategy_funcs` return rows for one axis; those of `op_strategy_funcs`
need an OpSchema of input strategies, here all placements on an axis of size 1 (sizes are filtered later, so rows depend on no mesh).
"""

from dataclasses import replace
from functools import cache

import torch
from torch.distributed.tensor import DeviceMesh
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from autoshard.graph import Const, Op, Ref, Tensor
from autoshard.layout import P, R, S
from autoshard.strategies.rows import Inputs, Row, overload_of
from autoshard.torch_private import (
    DTensorSpec,
    OpSchema,
    OpSpec,
    OpStrategy,
    ShardingPlaceholder,
    TensorMeta,
    TupleStrategy,
    sharding_propagator,
)


def rows(op: Op, inputs: Inputs) -> list[Row] | None:
    """torch's rows for the op on one axis; None if torch has no rule for it, or none that can be called this way."""
    overload = overload_of(op.target)
    if overload is None:
        return None
    if not inputs and any(str(argument.type) == "Tensor" for argument in overload._schema.arguments[:1]):
        return []  # a number stands for the tensor, which torch's rules don't expect: replicated
    op = _with_counted_dims(op, inputs, overload)
    if overload in sharding_propagator.op_single_dim_strategy_funcs:
        args, kwargs = _arguments(op, tuple(_meta(t) for t in inputs))
        lines = sharding_propagator.op_single_dim_strategy_funcs[overload].func(overload, args, kwargs)
        num_outputs = len(op.outputs)
        return _clean(op, inputs, [(line[:num_outputs], line[num_outputs:]) for line in lines])
    if overload in sharding_propagator.op_strategy_funcs:
        return _clean(op, inputs, _from_strategies(sharding_propagator.op_strategy_funcs[overload], overload, op, inputs))
    return None


def _with_counted_dims(op: Op, inputs: Inputs, overload) -> Op:
    """The op with negative dims counted from the front: torch's rule for cumsum would shard the dim that it sums along."""
    rank = len(inputs[0].shape) if inputs else 0

    def counted(name: str, item: object) -> object:
        if isinstance(item, tuple):
            return tuple(counted(name, part) for part in item)
        return item % rank if name in ("dim", "dims") and type(item) is int and -rank <= item < 0 else item

    args, kwargs = op.literals
    names = [argument.name for argument in overload._schema.arguments]
    counted_args = tuple(counted(name, item) for name, item in zip(names, args, strict=False))
    return replace(op, literals=(counted_args, tuple((name, counted(name, item)) for name, item in kwargs)))


def _from_strategies(function, overload, op: Op, inputs: Inputs) -> list[tuple[list, list]]:
    strategies = tuple(OpStrategy([OpSpec(DTensorSpec(_one_device(), (p,), tensor_meta=_meta(t))) for p in _placements(t)]) for t in inputs)
    args, kwargs = _arguments(op, strategies)
    args = tuple(TupleStrategy(tuple(a)) if _is_list_of_strategies(a) else a for a in args)
    result = function(OpSchema(overload, args, kwargs))
    if isinstance(result, TupleStrategy):
        return []
    lines = []
    for spec in result.strategies:
        outputs = spec.output_specs if isinstance(spec.output_specs, (tuple, list)) else (spec.output_specs,) * len(op.outputs)
        ins = [s.placements[0] for s in spec.input_specs] if spec.input_specs is not None else [outputs[0].placements[0]] * len(inputs)
        lines.append(([None if s is None else s.placements[0] for s in outputs], ins))
    return lines


def _clean(op: Op, inputs: Inputs, lines: list[tuple[list, list]]) -> list[Row]:
    """Rows of S, R and P(sum) only (max and min as outputs), with shards on dims that the tensors have and whose size isn't 1."""
    kept = []
    for outputs, inputs_of_line in lines:
        outs = tuple(None if t is None else _placement(p, t) for p, t in zip(outputs, op.outputs, strict=True))
        if len(inputs_of_line) != len(inputs):
            continue
        ins = tuple(_placement(p, t) for p, t in zip(inputs_of_line, inputs, strict=True))
        complete = all(p is not None for p, t in zip(outs, op.outputs, strict=True) if t is not None)
        if complete and None not in ins and not any(isinstance(p, Partial) and p.reduce_op != "sum" for p in ins):
            kept.append(Row(outs, ins))  # type: ignore[arg-type]
    return kept


def _placement(p: object, tensor: Tensor) -> Placement | None:
    """The placement as ours, or None for one that rows can't have."""
    if isinstance(p, (ShardingPlaceholder, Shard)) and type(p).__name__ != "_StridedShard":
        dim = p.dim % max(len(tensor.shape), 1)
        return S(dim) if dim < len(tensor.shape) and tensor.shape[dim] > 1 else None
    if isinstance(p, Partial) and type(p) is Partial and p.reduce_op in ("sum", "max", "min"):
        return P(p.reduce_op)
    return R if isinstance(p, Replicate) else None


def _placements(tensor: Tensor) -> list[Placement]:
    return [R, *(S(d) for d, size in enumerate(tensor.shape) if size > 1), P()]


@cache
def _one_device() -> DeviceMesh:
    return DeviceMesh("cpu", torch.arange(1), _init_backend=False, _rank=0)


def _is_list_of_strategies(argument: object) -> bool:
    return isinstance(argument, list) and bool(argument) and all(isinstance(item, OpStrategy) for item in argument)


def _meta(tensor: Tensor) -> TensorMeta:
    x = torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype), device="meta")
    return TensorMeta(x.shape, x.stride(), x.dtype)


def _arguments(op: Op, values: tuple) -> tuple[tuple, dict]:
    """The op's torch arguments with `values` in place of its tensors (lists as torch's rules expect them)."""

    def build(item: object) -> object:
        if isinstance(item, Ref):
            return values[item.index]
        if isinstance(item, tuple):
            return [build(part) for part in item]
        if isinstance(item, Const):
            return torch.device(item.text) if item.kind == "device" else getattr(torch, item.text)
        return item

    args, kwargs = op.literals
    return tuple(build(a) for a in args), {key: build(value) for key, value in kwargs}
