"""Masks of attention that a program computes from numbers alone, as models of transformers do while they are traced: what they say is
found out, so that attention needs no mask where all queries attend to all keys, or each to those before it.

The nodes that a mask is made of are run, once, large ones without what they broadcast: x.expand(B, -1, T, S) is x. A comparison of a
column with a row is not run at all where it is true everywhere, or true below the diagonal: for x_s <= y_t that is so where

    max(x_0 .. x_t) <= y_t < min(x_t+1 .. x_S-1)    for all t.
"""

import math
from collections.abc import Mapping
from enum import Enum
from typing import Any

import torch
from torch import Tensor, fx

from autoshard.torch_private import OpOverload, pytree

aten = torch.ops.aten
LARGEST, SMALL = 2**26, 2**22  # elements of a tensor that is computed, and of one that is broadcast
MOST = 200  # nodes of a mask
Says = Enum("Says", "ALL CAUSAL")
SAME = (aten.expand.default, aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.clone.default, aten.detach.default,
        aten.alias.default, aten.lift_fresh_copy.default)  # fmt: skip
ORDERED = {aten.le.Tensor: torch.le, aten.ge.Tensor: torch.le, aten.lt.Tensor: torch.lt, aten.gt.Tensor: torch.lt, aten.eq.Tensor: torch.eq}
AND = (aten.bitwise_and.Tensor, aten.logical_and.default)


class _Unknown(Exception):
    pass


def said_by(mask: fx.Node, known: dict[str, Says | None]) -> Says | None:
    """What a mask [..., T, S] that is added to scores says; None where it depends on inputs, is too large, or says something else.
    known: what others of the graph say, by what they are made of: each layer has its own copy."""
    if (nodes := _mask_nodes(mask)) is None:
        return None
    places = {node: k for k, node in enumerate(nodes)}
    written = repr([(node.target, pytree.tree_map_only(fx.Node, places.__getitem__, (node.args, dict(node.kwargs)))) for node in nodes])
    if written not in known:
        known[written] = _said_by(nodes)
    return known[written]


def _said_by(nodes: list[fx.Node]) -> Says | None:
    for compared in (True, False):  # the second time comparisons are run: what is done with their result may need all of it
        try:
            value = _value(nodes, compared)
            return value if isinstance(value, Says) else _in_tensor(value, *nodes[-1].meta["val"].shape[-2:])
        except (_Unknown, RuntimeError):  # an operator's, which has no kernel for CPU tensors of this dtype
            continue
    return None


def _in_tensor(mask: Tensor, queries: int, keys: int) -> Says | None:
    if bool((mask == 0).all()):
        return Says.ALL
    if not mask.is_floating_point() or queries != keys or mask.shape[-2:] != (queries, keys):
        return None
    seen = torch.ones(queries, keys, dtype=torch.bool, device="cpu").tril()
    is_causal = ((mask == 0) == seen).all() and ((mask <= torch.finfo(mask.dtype).min) != seen).all()
    return Says.CAUSAL if bool(is_causal) else None


def _mask_nodes(mask: fx.Node) -> list[fx.Node] | None:
    """The nodes that a mask is made of, in their order; None where they are many, or not all are made of numbers."""
    nodes, left = {mask}, [mask]
    while left:
        for source in left.pop().all_input_nodes:
            if source not in nodes:
                nodes.add(source)
                left.append(source)
        if len(nodes) > MOST or any(node.op != "call_function" for node in left):
            return None
    return sorted(nodes)


def _value(nodes: list[fx.Node], compared: bool) -> Any:
    """The mask that the last node is, smaller where it is broadcast. compared: rows with columns, as `_outer`."""
    values: dict[fx.Node, Any] = {}
    for node in nodes:
        values[node] = _run(node, values, compared)
    return values[nodes[-1]]


def _run(node: fx.Node, values: Mapping[fx.Node, Any], compared: bool) -> Any:
    target, result = node.target, node.meta.get("val")
    args, kwargs = pytree.tree_map_only(fx.Node, values.__getitem__, (node.args, dict(node.kwargs)))
    if not isinstance(target, OpOverload) or not isinstance(result, Tensor) or target._schema.is_mutable:
        raise _Unknown
    if args and isinstance(args[0], Says) and target in (*SAME, aten.unsqueeze.default, aten._to_copy.default):
        if node.args[0].meta["val"].shape[-2:] != result.shape[-2:]:  # type: ignore[union-attr]
            raise _Unknown
        return args[0]
    if target in SAME:
        return _broadcast(node, args[0])
    if target in AND and any(isinstance(x, Says) for x in args[:2]):
        said = {x if isinstance(x, Says) else Says.ALL if bool(x.all()) else None for x in args[:2]} - {Says.ALL}
        if None in said:
            raise _Unknown
        return said.pop() if said else Says.ALL
    if target is aten.where.self and isinstance(args[0], Says):
        added = [float(x) if isinstance(x, Tensor) and x.numel() == 1 else math.nan for x in args[1:]]
        if added != [0, -math.inf]:
            raise _Unknown
        return args[0]
    if compared and target in ORDERED and (says := _outer(target, *args[:2])) is not None:
        return says
    read = {source: values[source] for source in node.all_input_nodes}
    if any(isinstance(x, Says) for x in read.values()) or torch.Tag.nondeterministic_seeded in target.tags:
        raise _Unknown
    are_complete = all(x.shape == source.meta["val"].shape for source, x in read.items())
    if torch.Tag.pointwise in target.tags or target is aten._to_copy.default:
        size = math.prod(torch.broadcast_shapes(*(x.shape for x in read.values())))
    elif are_complete or target is aten.unsqueeze.default:
        size = result.numel() if are_complete else 0
    else:
        raise _Unknown
    if size > LARGEST:
        raise _Unknown
    return target(*args, **{key: value for key, value in kwargs.items() if key not in ("device", "pin_memory", "layout")})


def _broadcast(node: fx.Node, x: Tensor) -> Tensor:
    """x, where the node is a copy of it or repeats it."""
    before, after = node.args[0].meta["val"].shape, node.meta["val"].shape  # type: ignore[union-attr]
    if node.target is aten.expand.default or before == after:
        if math.prod(after) <= SMALL:
            return x.expand(after).contiguous()
        return x.reshape((1,) * (len(after) - x.dim()) + tuple(x.shape))
    if x.shape != before:
        raise _Unknown
    return x.reshape(after)


def _outer(target: Any, x: Any, y: Any) -> Says | None:
    """Of a row compared with a column, [..., 1, S] and [..., T, 1] in either order: whether all is true, or what is below the diagonal."""
    if not all(isinstance(z, Tensor) and z.dim() >= 2 and z.dtype.is_signed for z in (x, y)):
        return None
    if target in (aten.ge.Tensor, aten.gt.Tensor):
        x, y = y, x
    x, y = (z[:1] if z.shape[-2:].numel() < z.numel() and bool((z == z[:1]).all()) else z for z in (x, y))  # alike in the whole batch
    if x.shape[-1] == 1:  # x_t <= y_s where -y_s <= -x_t
        x, y = -y, -x
    if x.numel() != x.shape[-1] or y.numel() != y.shape[-2]:
        return None
    row, column, compare = x.flatten(), y.flatten(), ORDERED[target]
    if bool(compare(row.max(), column).all()) and (target is not aten.eq.Tensor or bool(compare(row.min(), column).all())):
        return Says.ALL
    if target is aten.eq.Tensor or len(row) != len(column) or not bool(compare(row.cummax(0).values, column).all()):
        return None
    return None if bool(compare(row.flip(0).cummin(0).values.flip(0)[1:], column[:-1]).any()) else Says.CAUSAL
