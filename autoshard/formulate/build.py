"""Graph and Candidates -> Formulation: nodes, edges and their prices in a fixed order."""

from __future__ import annotations

import numpy as np

from autoshard.cost import op_seconds, optimizer_step_seconds, priced
from autoshard.formulate.records import Formulation, Layouts, Link, Training
from autoshard.formulate.tables import Move, Tables
from autoshard.formulate.usages import Usages
from autoshard.graph import Graph, Op, Tensor, Value
from autoshard.layout import all_layouts, has_partial, local_numel, local_shape
from autoshard.mesh import Mesh
from autoshard.problem import Edge, Problem
from autoshard.routes import Routes
from autoshard.strategies import Candidate, Candidates, internal_bytes, internal_collectives


def formulate(
    graph: Graph, candidates: Candidates, mesh: Mesh, *, training: Training | None = None, memory_limit: float | None = None
) -> Formulation:
    """The Problem of laying `graph` over `mesh`. memory_limit: bytes per device; training prices the optimizer too."""
    return _Builder(graph, candidates, mesh, training, memory_limit).build()


class _Builder:
    """Collects nodes and edges; the usages follow from them."""

    def __init__(self, graph: Graph, candidates: Candidates, mesh: Mesh, training: Training | None, memory_limit: float | None):
        self.graph, self.candidates, self.mesh, self.training, self.memory_limit = graph, candidates, mesh, training, memory_limit
        self.routes = Routes(mesh)
        self.tables = Tables(mesh, self.routes)
        self.trained = self._trained()
        self.names: list[str] = []
        self.node_costs: list[np.ndarray] = []
        self.edges: list[Edge] = []
        self.links: list[Link] = []
        self.hubs: dict[Value, int] = {}
        self.hub_layouts: dict[Value, Layouts] = {}
        self.results: dict[int, int] = {}
        self.result_layouts: dict[int, Layouts] = {}

    def build(self) -> Formulation:
        self._signatures()
        costs: dict[int, np.ndarray] = {}
        for i, op in enumerate(self.graph.ops):
            if self.first[i] not in costs:
                costs[self.first[i]] = self._op_costs(i)
            self._node(op.name, costs[self.first[i]])
        waiting = self._add_hubs()
        self.usages = Usages(
            self.graph, self.tables, self.training, self.trained, self.hubs, self.gives, self.takes, self.makes, self.inside
        )
        for value, edge, move in waiting:
            self.usages.add_hub(value, edge, move)
        for i, op in enumerate(self.graph.ops):
            for a, value in enumerate(op.inputs):
                source, gives = self._source(value)
                self.usages.add_input(i, a, *self._edge(value, source, i, gives, self.takes(i, a)))
            self.usages.add_op(i)
        for k, result in enumerate(self.graph.results):
            if result.value is not None:
                self._add_result(k, result.value)
        problem = Problem(
            tuple(self.names), tuple(self.node_costs), tuple(self.edges), tuple(self.usages.usages), self.memory_limit
        )  # fmt: skip
        return Formulation(
            problem, self.graph, self.mesh, self.candidates, self.hubs, self.hub_layouts, self.results, self.result_layouts,
            tuple(self.links), tuple(self.usages.held), self.routes,
        )  # fmt: skip

    def _signatures(self) -> None:
        """The first op of each signature, and what candidates of that signature give and take, made once."""
        seen: dict[tuple, int] = {}
        self.first = [
            seen.setdefault((self.graph.signature(i), i in self.trained), i) for i in range(len(self.graph.ops))
        ]  # a parameter that is trained is priced otherwise than one that isn't
        self._gives: dict[tuple[int, int], Layouts] = {}
        self._takes: dict[tuple[int, int], Layouts] = {}
        self._waits: dict[tuple, Layouts] = {}
        self._nothing: dict[int, np.ndarray] = {}
        self._inside: dict[int, np.ndarray | None] = {}
        self._made: dict[int, np.ndarray] = {}

    def _trained(self) -> dict[int, int]:
        """Parameters that get a gradient, with the time at which it is complete."""
        if self.training is None:
            return {}
        return {
            self.graph.index[r.name]: r.value[0]
            for r in self.graph.results
            if r.kind == "gradient" and r.value is not None and r.name in self.graph.parameters
        }

    def gives(self, value: Value) -> Layouts:
        i, k = value
        key = (self.first[i], k)
        if key not in self._gives:
            self._gives[key] = tuple(c.outputs[k] for c in self.candidates.of[i])  # type: ignore[misc]
        return self._gives[key]

    def takes(self, i: int, a: int) -> Layouts:
        key = (self.first[i], a)
        if key not in self._takes:
            self._takes[key] = tuple(c.inputs[a] for c in self.candidates.of[i])
        return self._takes[key]

    def makes(self, i: int) -> np.ndarray:
        """Bytes of the outputs of op i, per choice."""
        first = self.first[i]
        if first not in self._made:
            outputs = enumerate(self.graph.ops[i].outputs)
            self._made[first] = np.sum([self.tables.bytes(t, self.gives((i, k))) for k, t in outputs if t is not None], axis=0)
        return self._made[first]

    def inside(self, i: int) -> np.ndarray | None:
        """Bytes that the local program of op i holds beside its inputs and outputs, per choice; None where that is nothing."""
        first = self.first[i]
        if first not in self._inside:
            op, inputs = self.graph.ops[i], self.graph.input_tensors(i)
            made = [internal_bytes(op, inputs, c.inputs, self.mesh) for c in self.candidates.of[i]]
            self._inside[first] = np.array(made, dtype=float) if any(made) else None
        return self._inside[first]

    def _node(self, name: str, costs: np.ndarray) -> int:
        self.names.append(name)
        self.node_costs.append(costs)
        return len(self.names) - 1

    def _op_costs(self, i: int) -> np.ndarray:
        op, inputs, device = self.graph.ops[i], self.graph.input_tensors(i), self.mesh.device
        if op.kind == "parameter" and i in self.trained:
            tensor, training = self.graph.tensor((i, 0)), self.training
            assert training is not None
            sizes = [local_numel(tensor.shape, layout, self.mesh) for layout in self.gives((i, 0))]
            master = training.master_weights
            return np.array([optimizer_step_seconds(n, tensor.itemsize, training.optimizer, device, master_weights=master) for n in sizes])
        if op.is_placeholder:
            return np.zeros(len(self.candidates.of[i]))
        return np.array([op_candidate_seconds(op, inputs, c, self.mesh) for c in self.candidates.of[i]])

    def _add_hubs(self) -> list[tuple[Value, int, Move]]:
        """A hub for every value with two readers or more, results included; returns the edges that lead to them."""
        readers: dict[Value, int] = {value: len(users) for value, users in self.graph.users.items()}
        for result in self.graph.results:
            if result.value is not None:
                readers[result.value] = readers.get(result.value, 0) + 1
        edges = []
        for value in sorted(v for v, count in readers.items() if count > 1):
            gives, layouts = self.gives(value), self._layouts_of_hub(value)
            node = self._node(f"{self.graph.ops[value[0]].name}.{value[1]} (hub)", self._zeros(len(layouts)))
            self.hubs[value], self.hub_layouts[value] = node, layouts
            edges.append((value, *self._edge(value, value[0], node, gives, layouts)))
        return edges

    def _layouts_of_hub(self, value: Value) -> Layouts:
        """What its producer gives, sums completed, and what its readers take; made once per signature."""
        readers = self.graph.users.get(value, ())
        alike = dict.fromkeys((self.first[i], a) for i, a in readers)  # a table that all layers read has hundreds of readers
        key = (self.first[value[0]], value[1], *alike)
        if key not in self._waits:
            wanted = [layout for i, a in alike for layout in self.takes(i, a)]
            self._waits[key] = tuple(dict.fromkeys([*(g for g in self.gives(value) if not has_partial(g)), *wanted]))
        return self._waits[key]

    def _zeros(self, count: int) -> np.ndarray:
        if count not in self._nothing:
            self._nothing[count] = np.zeros(count)
        return self._nothing[count]

    def _edge(self, value: Value, a: int, b: int, gives: Layouts, takes: Layouts) -> tuple[int, Move]:
        tensor = self.graph.tensor(value)
        move = self.tables.move(tensor, gives, takes)
        self.edges.append(Edge(a, b, move.seconds))
        self.links.append(Link(a, b, tensor, gives, takes, value))
        return len(self.edges) - 1, move

    def _source(self, value: Value) -> tuple[int, Layouts]:
        return (self.hubs[value], self.hub_layouts[value]) if value in self.hubs else (value[0], self.gives(value))

    def _add_result(self, k: int, value: Value) -> None:
        """An edge to the parameter or buffer that the result updates, or to a node of its own: any layout but Partial."""
        result, tensor = self.graph.results[k], self.graph.tensor(value)
        if result.kind in ("gradient", "buffer") and result.name in self.graph.index:
            node = self.graph.index[result.name]
            layouts = self.gives((node, 0))
        else:
            layouts = all_layouts(tensor.shape, self.mesh)
            node = self._node(f"{result.kind}:{result.name}", np.zeros(len(layouts)))
        self.results[k], self.result_layouts[k] = node, layouts
        source, gives = self._source(value)
        self.usages.add_result(k, *self._edge(value, source, node, gives, layouts))


def op_candidate_seconds(op: Op, inputs: tuple[Tensor, ...], candidate: Candidate, mesh: Mesh) -> float:
    """Seconds of one op under one candidate: its kernel on local shapes and the collectives inside it."""
    ins = [(local_shape(t.shape, layout, mesh), t.dtype) for t, layout in zip(inputs, candidate.inputs, strict=True)]
    outs = [
        None if t is None or layout is None else (local_shape(t.shape, layout, mesh), t.dtype)
        for t, layout in zip(op.outputs, candidate.outputs, strict=True)
    ]
    inside = priced(internal_collectives(op, inputs, candidate.inputs, mesh), mesh)
    return op_seconds(op.target, ins, outs, op.alias, mesh.device) + sum(one.seconds for one in inside)
