"""Rows that are multiplied with one matrix are one matmul.

    x [B, 1, K], w [K, N]:      bmm(x, w expanded to [B, K, N])      becomes      view(mm(view(x, [B, K]), w), [B, 1, N])

torch writes the first where the strides of x's dim of size 1 are unusual, as in a decode step of one token whose heads were transposed.
Read as a graph, it would load the matrix B times.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autoshard.torch_private import OpOverload

aten = torch.ops.aten
VIEWS = {aten.view.default, aten._unsafe_view.default, aten.reshape.default}


def without_expanded_matrices(traced: fx.GraphModule) -> dict[fx.Node, fx.Node]:
    """Replaces each such bmm of the graph; returns the nodes that replace them."""
    replaced = {}
    for node in [node for node in traced.graph.nodes if node.target is aten.bmm.default]:
        rows, matrix = node.args[0], _before_expand(node.args[1])
        if rows.meta["val"].shape[1] == 1 and matrix is not None:
            replaced[node] = _matmul(traced.graph, node, rows, matrix)
            node.replace_all_uses_with(replaced[node])
            traced.graph.erase_node(node)
    return replaced


def _before_expand(node: fx.Node) -> fx.Node | None:
    """The matrix [K, N] that a node [B, K, N] holds B times; None for another node."""
    shape = node.meta["val"].shape
    while node.target in VIEWS and node.args[0].meta["val"].shape == shape:  # type: ignore[union-attr]
        node = node.args[0]  # type: ignore[assignment]
    source = node.args[0] if node.target is aten.expand.default else None
    return source if isinstance(source, fx.Node) and source.meta["val"].shape == shape[1:] else None


def _matmul(graph: fx.Graph, node: fx.Node, rows: fx.Node, matrix: fx.Node) -> fx.Node:
    batch, _, width = rows.meta["val"].shape

    def add(function: OpOverload, *args: Any) -> fx.Node:
        added = graph.call_function(function, args)
        added.meta = {**node.meta, "val": function(*fx.map_arg(args, lambda arg: arg.meta["val"]))}
        return added

    with graph.inserting_before(node):
        product = add(aten.mm.default, add(aten.view.default, rows, [batch, width]), matrix)
        return add(aten.view.default, product, list(node.meta["val"].shape))
