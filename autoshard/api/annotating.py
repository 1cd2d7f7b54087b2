"""Specs on the nodes of a graph that was given: of every tensor that the plan has, and of keys and values repeated for groups of queries.

Attention over groups of queries reads keys and values as they are: the nodes that repeat each head for its queries are in the given graph,
and in no plan. A caller that runs them needs their layouts all the same: they are views of the keys, in the same layout.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import DeviceMesh

from autoshard.capture import Captured
from autoshard.exports import spec_of
from autoshard.graph import Graph, Op, Ref, Tensor
from autoshard.layout import parse, replicated
from autoshard.mesh import Mesh
from autoshard.planning import is_value
from autoshard.solution import Solution
from autoshard.strategies import KnownCandidates, candidates
from autoshard.torch_private import DTensorSpec, pytree

aten = torch.ops.aten
REPEATING = {getattr(aten, name).default for name in ("unsqueeze", "expand", "clone", "reshape", "view", "_unsafe_view")}


def annotate(captured: Captured, solution: Solution, device_mesh: DeviceMesh) -> None:
    """Writes `node.meta["autoshard"]` on every tensor node of the given graph."""
    specs: dict[tuple, DTensorSpec] = {}  # by tensor and layout, which many nodes share

    def spec(value: tuple[int, int] | None, returned: str | None = None) -> DTensorSpec | None:
        if value is None:
            return None
        op = captured.graph.ops[value[0]]
        tensor, written = op.outputs[value[1]], returned or solution.layouts[op.name].outputs[value[1]]
        if tensor is None or written is None:
            return None
        if (tensor, written) not in specs:
            specs[tensor, written] = spec_of(tensor.shape, getattr(torch, tensor.dtype), parse(written), device_mesh)
        return specs[tensor, written]

    known = KnownCandidates()
    for node, values in captured.values.items():
        of_node = pytree.tree_map(spec, values, is_leaf=is_value)
        if node.op == "output":
            of_node = _as_returned(values, captured.graph, solution, spec)
        if any(isinstance(leaf, DTensorSpec) for leaf in pytree.tree_leaves(of_node)):
            node.meta["autoshard"] = tuple(of_node) if isinstance(of_node, list) else of_node
        elif values is None and node.target in REPEATING and "val" in node.meta:
            _annotate_as_source(node, solution.mesh, device_mesh, known)


def _as_returned(values: Any, graph: Graph, solution: Solution, spec: Callable[..., DTensorSpec | None]) -> Any:
    """The specs in which results are returned, which may differ from those in which their ops give them."""
    leaves, shape = pytree.tree_flatten(values, is_leaf=is_value)
    named = [(result.value, f"{result.kind}:{result.name}") for result in graph.results if result.value is not None]
    if [value for value, _ in named] != [leaf for leaf in leaves if leaf is not None]:
        return pytree.tree_map(spec, values, is_leaf=is_value)  # it returns something else than the graph that was planned
    returned = iter(named)
    return pytree.tree_unflatten([None if leaf is None else spec(leaf, solution.results.get(next(returned)[1])) for leaf in leaves], shape)


def _annotate_as_source(node: fx.Node, mesh: Mesh, device_mesh: DeviceMesh, known: KnownCandidates) -> None:
    """The spec of a view: the layout that the view's rows give for the one of its source, else replicated."""
    source, x = node.args[0], node.meta["val"]
    before = source.meta.get("autoshard") if isinstance(source, fx.Node) else None
    if not isinstance(before, DTensorSpec):
        return
    dtype = str(x.dtype).removeprefix("torch.")
    sizes = (Ref(0), *(tuple(arg) if isinstance(arg, (tuple, list)) else arg for arg in node.args[1:]))
    given = Op(source.name, "input", (), (), (Tensor(tuple(before.shape), dtype),), "input")
    view = Op(node.name, str(node.target), ((0, 0),), (sizes, ()), (Tensor(tuple(x.shape), dtype),))
    rows = candidates(Graph((given, view), ()), mesh, known).of[1]
    layouts = [row.outputs[0] for row in rows if row.inputs[0] == tuple(before.placements)]
    layout = layouts[0] if layouts and layouts[0] else replicated(len(mesh.axes))
    node.meta["autoshard"] = spec_of(tuple(x.shape), x.dtype, layout, device_mesh)
