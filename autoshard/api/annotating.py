"""Specs on the nodes of a graph that was given: of every tensor that the plan has, and of keys and values repeated for groups of queries.

Attention over groups of queries reads keys and values as they are: the nodes that repeat each head for its queries are in the given graph,
and in no plan. A caller that runs them needs their layouts all the same: they are views of the keys, in the same layout.
"""

from __future__ import annotations

import math

import torch
from torch import fx
from torch.distributed.tensor import DeviceMesh, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import Placement
from torch.utils import _pytree as pytree

from autoshard.capture import Captured
from autoshard.exports.sharding_map import spec_of
from autoshard.layout import parse
from autoshard.planning.node_layouts import is_value
from autoshard.solution import Solution

aten = torch.ops.aten


def annotate(captured: Captured, solution: Solution, device_mesh: DeviceMesh) -> None:
    """Writes `node.meta["autoshard"]` on every tensor node of the given graph."""
    specs: dict[tuple, DTensorSpec] = {}  # by tensor and layout, which many nodes share

    def spec(value: tuple[int, int] | None) -> DTensorSpec | None:
        if value is None:
            return None
        op = captured.graph.ops[value[0]]
        tensor, written = op.outputs[value[1]], solution.layouts[op.name].outputs[value[1]]
        if tensor is None or written is None:
            return None
        if (tensor, written) not in specs:
            specs[tensor, written] = spec_of(tensor.shape, getattr(torch, tensor.dtype), parse(written), device_mesh)
        return specs[tensor, written]

    for node, values in captured.values.items():
        of_node = pytree.tree_map(spec, values, is_leaf=is_value)
        if any(isinstance(leaf, DTensorSpec) for leaf in pytree.tree_leaves(of_node)):
            node.meta["autoshard"] = tuple(of_node) if isinstance(of_node, list) else of_node
        elif values is None and (of_view := _view_spec(node)) is not None:
            node.meta["autoshard"] = of_view


def _view_spec(node: fx.Node) -> DTensorSpec | None:
    """Of a view of an annotated node, as that one's; None for another node, and where the given graph doesn't say its shape."""
    source, val = node.args[0] if node.args else None, node.meta.get("val")
    before = source.meta.get("autoshard") if isinstance(source, fx.Node) else None
    if node.op != "call_function" or not isinstance(before, DTensorSpec) or not isinstance(val, torch.Tensor):
        return None
    new = tuple(val.shape)
    placements = [_of_view(node, p, tuple(before.shape), new, n) for p, n in zip(before.placements, before.mesh.shape, strict=True)]
    return spec_of(new, val.dtype, tuple(placements), before.mesh)


def _of_view(node: fx.Node, placement: Placement, old: tuple[int, ...], new: tuple[int, ...], n: int) -> Placement:
    """The dim of the view that holds the sharded dim: where as many elements are before it, of its size or a multiple (heads repeated in
    place); in an expand the same dim from the end. Replicated where there is none."""
    if not isinstance(placement, Shard):
        return placement
    d = placement.dim
    if node.target is aten.expand.default:
        dims = [d + len(new) - len(old)]
    else:
        dims = [dim for dim in range(len(new)) if math.prod(new[:dim]) == math.prod(old[:d])]
    held = [dim for dim in dims if new[dim] and new[dim] % old[d] == 0 and old[d] % n == 0]
    return Shard(held[0]) if held else Replicate()
