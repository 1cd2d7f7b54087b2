"""What a plan says about each node of a graph that was given.

    node.meta["autoshard"]        the spec of what the node computes; of several results a tuple, with None where one is no tensor
    node.meta["autoshard_node"]   a NodeSharding: the spec of each operand, redistributions, seconds

A node may be one op of the plan, several (`linear` is a transpose and an addmm) or none (a view that changes nothing). Attention over
groups of queries reads keys and values as they are: the nodes that repeat each head for its queries are in the given graph, and in no plan.
A caller that runs them needs their layouts all the same: they are views of the keys, in the same layout.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import DeviceMesh

from autoshard.capture import Captured, is_value
from autoshard.explain import CandidateCost, OpCosts, Redistribution
from autoshard.exports import spec_of
from autoshard.formulate import Place
from autoshard.graph import KEPT, Graph, Op, Ref, Tensor, Value
from autoshard.layout import parse, replicated, why_illegal
from autoshard.solution import Solution
from autoshard.strategies import KnownCandidates, candidates
from autoshard.torch_private import DTensorSpec, pytree

aten = torch.ops.aten
REPEATING = {getattr(aten, name).default for name in ("unsqueeze", "expand", "clone", "reshape", "view", "_unsafe_view")}


@dataclass(frozen=True)
class Operand:
    """A tensor that a node reads."""

    name: str  # of the node that computes it; of a parameter, where the node calls a module that holds it
    spec: DTensorSpec  # in which the node reads it; for a node of several ops, in which the first of them does
    reads: tuple[tuple[str, int], ...]  # (op, number of its input); empty where no kernel reads it
    _places: tuple[Place, ...] = field(repr=False, default=())
    _costs: OpCosts | None = field(repr=False, default=None)

    @property
    def redistributions(self) -> tuple[Redistribution, ...]:
        """Per read, from the layout in which the tensor waits for its readers."""
        return () if self._costs is None else tuple(self._costs.redistributions[place] for place in self._places)

    @property
    def seconds(self) -> float:
        return math.fsum(one.seconds for one in self.redistributions)

    @property
    def bytes(self) -> float:
        """That each rank sends."""
        return sum(one.bytes for one in self.redistributions)


@dataclass(frozen=True)
class NodeSharding:
    """What a plan says about one node. Seconds are those of a step, one task after the other: added over all nodes they are
    `solution.cost`, what `objective="serial"` makes small; in the simulated time line some of them overlap."""

    name: str
    ops: tuple[str, ...]  # of the plan
    values: Any  # nested as what it computes: (op, number of its output), None where that is no tensor
    output: Any  # the spec, or a tuple
    operands: tuple[Operand, ...]
    _numbers: tuple[int, ...] = field(repr=False)
    _places: tuple[Place, ...] = field(repr=False)
    _costs: OpCosts = field(repr=False)

    @property
    def seconds(self) -> float:
        """Of the kernels of its ops; of a trained parameter, of its update."""
        return math.fsum(map(self._costs.seconds, self._numbers))

    @cached_property
    def redistributions(self) -> dict[Place, Redistribution]:
        """All that belong to the node: of its inputs, between its ops, and, for a value with several readers, from the layout in which
        it is computed to the one in which it waits for them (`shared`)."""
        return {place: self._costs.redistributions[place] for place in self._places}

    @property
    def redistribution_seconds(self) -> float:
        return math.fsum(one.seconds for one in self.redistributions.values())

    def alternatives(self) -> list[CandidateCost]:
        """The layouts that its ops may have, by op the cheapest first, with all other ops as planned."""
        return [row for i in self._numbers for row in self._costs.candidates(i)]


def annotate(captured: Captured, graph: Graph, solution: Solution, device_mesh: DeviceMesh) -> dict[str, tuple[str, ...]]:
    """Writes both keys on every node of the given graph; returns the names of the ops by node. graph: as it is planned (`replay`)."""
    return _Annotating(captured, graph, solution, device_mesh).run()


class _Annotating:
    def __init__(self, captured: Captured, graph: Graph, solution: Solution, device_mesh: DeviceMesh):
        self.captured, self.graph, self.solution, self.device_mesh = captured, graph, solution, device_mesh
        self.costs, self.known = OpCosts(graph, solution), KnownCandidates()
        self.specs: dict[tuple, DTensorSpec] = {}  # by tensor and layout, which many nodes share
        self.owners = _owners(captured, graph)
        self.ops_of: dict[fx.Node, list[int]] = {node: [] for node in captured.values}
        for i, node in enumerate(self.owners):
            self.ops_of.setdefault(node, []).append(i)

    def run(self) -> dict[str, tuple[str, ...]]:
        for node, values in self.captured.values.items():
            output = pytree.tree_map(self.output_spec, values, is_leaf=is_value)
            returned = self._returned(values) if node.op == "output" else {}
            if returned:
                leaves, shape = pytree.tree_flatten(values, is_leaf=is_value)
                output = pytree.tree_unflatten([self._result_spec(returned.get(n)) for n in range(len(leaves))], shape)
            if any(isinstance(leaf, DTensorSpec) for leaf in pytree.tree_leaves(output)):
                node.meta["autoshard"] = tuple(output) if isinstance(output, list) else output
            elif values is None and node.target in REPEATING and "val" in node.meta:
                self._annotate_as_source(node)
            places = tuple(self._places(node, returned.values()))
            operands, ops = tuple(self._operands(node, returned)), tuple(self.graph.ops[i].name for i in self.ops_of[node])
            named = pytree.tree_map(self._named, values, is_leaf=is_value)
            of_node = (node.meta.get("autoshard"), operands, tuple(self.ops_of[node]), places, self.costs)
            node.meta["autoshard_node"] = NodeSharding(node.name, ops, named, *of_node)
        return {node.name: tuple(self.graph.ops[i].name for i in of) for node, of in self.ops_of.items()}

    # -- specs

    def output_spec(self, value: Value | None, layout: str | None = None) -> DTensorSpec | None:
        """Of a value of the captured graph."""
        if value is None:
            return None
        op = self.captured.graph.ops[value[0]]
        tensor, written = op.outputs[value[1]], layout or self.solution.layouts[op.name].outputs[value[1]]
        return None if tensor is None or written is None else self._spec(tensor, written)

    def _spec(self, tensor: Tensor, written: str) -> DTensorSpec:
        if (tensor, written) not in self.specs:
            self.specs[tensor, written] = spec_of(tensor.shape, getattr(torch, tensor.dtype), parse(written), self.device_mesh)
        return self.specs[tensor, written]

    def _returned(self, values: Any) -> dict[int, int]:
        """By leaf of the output node, the number of the result that it is; empty where it returns something else than was planned."""
        leaves = pytree.tree_leaves(values, is_leaf=is_value)
        results = [(k, result.value) for k, result in enumerate(self.captured.graph.results) if result.value is not None]
        if [value for _, value in results] != [leaf for leaf in leaves if leaf is not None]:
            return {}
        return dict(zip((n for n, leaf in enumerate(leaves) if leaf is not None), (k for k, _ in results)))

    def _result_spec(self, k: int | None) -> DTensorSpec | None:
        """In which a result is returned, which may differ from the spec in which its op computes it."""
        if k is None:
            return None
        result = self.captured.graph.results[k]
        return self.output_spec(result.value, self.solution.results.get(f"{result.kind}:{result.name}"))

    def _annotate_as_source(self, node: fx.Node) -> None:
        """The spec of a view: the layout that the view's rows give for the one of its source, else replicated."""
        source, x, mesh = node.args[0], node.meta["val"], self.solution.mesh
        before = source.meta.get("autoshard") if isinstance(source, fx.Node) else None
        if not isinstance(before, DTensorSpec):
            return
        dtype = str(x.dtype).removeprefix("torch.")
        sizes = (Ref(0), *(tuple(arg) if isinstance(arg, (tuple, list)) else arg for arg in node.args[1:]))
        given = Op(source.name, "input", (), (), (Tensor(tuple(before.shape), dtype),), "input")
        view = Op(node.name, str(node.target), ((0, 0),), (sizes, ()), (Tensor(tuple(x.shape), dtype),))
        rows = candidates(Graph((given, view), ()), mesh, self.known).of[1]
        layouts = [row.outputs[0] for row in rows if row.inputs[0] == tuple(before.placements)]
        layout = layouts[0] if layouts and layouts[0] else replicated(len(mesh.axes))
        node.meta["autoshard"] = spec_of(tuple(x.shape), x.dtype, layout, self.device_mesh)

    def _named(self, value: Value | None) -> tuple[str, int] | None:
        return None if value is None else (self.captured.graph.ops[value[0]].name, value[1])

    # -- operands and edges

    def _places(self, node: fx.Node, results: Iterable[int]) -> Iterable[Place]:
        """The edges whose seconds belong to the node."""
        for i in self.ops_of[node]:
            op = self.graph.ops[i]
            yield from (("input", i, a) for a in range(len(op.inputs)))
            hubs = self.solution.layouts[op.name].hubs
            yield from (("shared", i, k) for k, hub in enumerate(hubs) if hub is not None)
        if node.op == "output":
            yield from (("result", k, 0) for k, result in enumerate(self.graph.results) if result.value is not None)

    def _operands(self, node: fx.Node, returned: Mapping[int, int]) -> Iterable[Operand]:
        arguments: list[fx.Node] = []
        fx.map_arg((node.args, node.kwargs), arguments.append)
        for source in arguments:
            spec = source.meta.get("autoshard")
            if node.op == "output":
                if isinstance(spec, DTensorSpec):
                    k = next((k for leaf, k in returned.items() if self._leaf(node, leaf) is source), None) if returned else None
                    places: tuple[Place, ...] = () if k is None else (("result", k, 0),)
                    yield Operand(source.name, self._result_spec(k) or spec, (), places, self.costs)
            elif isinstance(spec, DTensorSpec):
                yield self._operand(node, source, spec)
        seen = {source.name for source in arguments}
        for i in self.ops_of[node]:  # parameters of a module that the node calls
            for value in self.graph.ops[i].inputs:
                name = self._stored(self.graph.ops[value[0]].name)
                if name in self.graph.parameters and name not in self.captured.origins and name not in seen:
                    seen.add(name)
                    yield self._read(node, name, value, self.graph.tensor(value))

    def _leaf(self, node: fx.Node, leaf: int) -> Any:
        return pytree.tree_leaves(node.args[0])[leaf]

    def _operand(self, node: fx.Node, source: fx.Node, spec: DTensorSpec) -> Operand:
        behind, x = source, Tensor(tuple(spec.shape), str(spec.tensor_meta.dtype).removeprefix("torch."))
        while self.captured.values.get(behind) is None and behind.target in REPEATING:
            behind = behind.args[0]  # type: ignore[assignment]
        value = self.captured.values.get(behind)
        if is_value(value) and value is not None:
            name, k = self.captured.graph.ops[value[0]].name, value[1]
            if name in self.graph.index:
                operand = self._read(node, source.name, (self.graph.index[name], k), x)
                if operand.reads:
                    return operand
        return Operand(source.name, spec, ())

    def _read(self, node: fx.Node, name: str, value: Value, tensor: Tensor) -> Operand:
        """The operand of this name, which is this value as the ops of the node read it."""
        wanted = self._stored(self.graph.ops[value[0]].name), value[1]
        reads = [
            (i, a) for i in self.ops_of[node] for a, (j, k) in enumerate(self.graph.ops[i].inputs)
            if (self._stored(self.graph.ops[j].name), k) == wanted
        ]  # fmt: skip
        written = self.solution.layouts[self.graph.ops[reads[0][0]].name].inputs[reads[0][1]] if reads else None
        if written is None or why_illegal(tensor.shape, parse(written), self.solution.mesh):
            written = self.solution.layouts[self.graph.ops[value[0]].name].outputs[value[1]]
        assert written is not None
        named = tuple((self.graph.ops[i].name, a) for i, a in reads)
        return Operand(name, self._spec(tensor, written), named, tuple(("input", i, a) for i, a in reads), self.costs)

    def _stored(self, name: str) -> str:
        """The parameter's name for the copy of it that is kept for a step."""
        return name.removesuffix(f".{KEPT}") if name.removesuffix(f".{KEPT}") in self.graph.parameters else name


def _owners(captured: Captured, graph: Graph) -> list[fx.Node]:
    """For each op of the graph, the node that it belongs to: its own; that of its parameter, of its first reader, or of its first input."""
    output = next(node for node in captured.fx_graph.graph.nodes if node.op == "output")
    owners: list[fx.Node | None] = [captured.origins.get(op.name) for op in graph.ops]
    for i in reversed(range(len(owners))):
        if owners[i] is None:
            owners[i] = next((owners[j] for j, _ in graph.users.get((i, 0), ()) if owners[j] is not None), None)
    for i, op in enumerate(graph.ops):
        if owners[i] is None:
            owners[i] = next((owners[j] for j, _ in op.inputs if owners[j] is not None), output)
    return owners  # type: ignore[return-value]
