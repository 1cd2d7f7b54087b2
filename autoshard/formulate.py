"""The one door between meaning and numbers: Graph and Candidates -> Problem, and a choice back into layouts.

    node v    an op (its choices: candidates), a hub (its choices: layouts), a result that the program returns
    c_v[i]    seconds of op v on the local shapes of candidate i, collectives inside it included; of a trained parameter
              the optimizer's step on its local elements; 0 for hubs and results                             (`_op_costs`)
    T_uv[i,j] seconds of the cheapest route from what u's candidate i gives to what v's candidate j takes    (`_Tables`)
    bytes     of local shapes, alive from an op to the last reader of its storage                            (`_Usages`)

A value with several readers gets a hub, so that one gather can serve them all. The edge of a gradient leads to its parameter's
own node: the gradient ends in the parameter's layout, hence data parallel, FSDP and ZeRO are points of this space. A copy
made by a route belongs to the edge: it exists only where layouts differ.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from autoshard.cost import collective_seconds, op_seconds, optimizer_state_bytes, optimizer_step_seconds
from autoshard.graph import Graph, Op, Tensor, Value
from autoshard.layout import Layout, all_layouts, has_partial, local_numel, local_shape
from autoshard.mesh import Mesh
from autoshard.problem import Edge, EdgeUsage, NodeUsage, Problem
from autoshard.redistribute import Route, Routes
from autoshard.strategies import Candidate, Candidates, internal_collectives

Layouts = tuple[Layout, ...]


@dataclass(frozen=True)
class Training:
    """What a training step costs beside the graph: the optimizer."""

    optimizer: str = "adamw"


@dataclass(frozen=True)
class Link:
    """What one edge of the Problem means: a tensor goes from node a, laid out as `gives[choice of a]`, to node b."""

    a: int
    b: int
    tensor: Tensor
    gives: Layouts  # per choice of a
    takes: Layouts  # per choice of b
    value: Value


@dataclass(frozen=True, eq=False)
class Formulation:
    """A Problem and what its numbers mean. Nodes: first the ops in order, then hubs, then results."""

    problem: Problem
    graph: Graph
    mesh: Mesh
    candidates: Candidates
    hubs: Mapping[Value, int]  # node of the hub of a value
    hub_layouts: Mapping[Value, Layouts]
    results: Mapping[int, int]  # node that takes result k: a result node, or the parameter's or buffer's own
    result_layouts: Mapping[int, Layouts]  # choices of that node as layouts
    links: tuple[Link, ...]  # one per edge of the problem
    routes: Routes

    def candidate(self, index: int, choice: Sequence[int]) -> Candidate:
        return self.candidates.of[index][choice[index]]

    def hub(self, value: Value, choice: Sequence[int]) -> Layout | None:
        return self.hub_layouts[value][choice[self.hubs[value]]] if value in self.hubs else None

    def result(self, k: int, choice: Sequence[int]) -> Layout:
        return self.result_layouts[k][choice[self.results[k]]]

    def route(self, link: Link, choice: Sequence[int]) -> Route | None:
        """The route that the edge prices under `choice`."""
        source, target = link.gives[choice[link.a]], link.takes[choice[link.b]]
        return self.routes.route(link.tensor.shape, link.tensor.itemsize, source, target)

    @cached_property
    def preference(self) -> tuple[np.ndarray, ...]:
        """A fixed order among equal costs: the same everywhere, cut rather than whole, first dims first."""
        made = {id(cs): _preferences([c.outputs[0] for c in cs]) for cs in self.candidates.of}
        hubs = [_preferences(self.hub_layouts[value]) for value in self.hubs]
        own = len(self.graph.ops) + len(hubs)
        results = [_preferences(self.result_layouts[k]) for k, node in self.results.items() if node >= own]
        return (*(made[id(cs)] for cs in self.candidates.of), *hubs, *results)


def _preferences(layouts: Sequence[Layout | None]) -> np.ndarray:
    """Per layout a small number: cut on dim d costs 1 + d/8, whole 2, partial 3; earlier axes count a little more."""

    def one(placement: object) -> float:
        if placement.is_shard():  # type: ignore[attr-defined]
            return 1 + placement.dim / 8  # type: ignore[attr-defined]
        return 2.0 if placement.is_replicate() else 3.0  # type: ignore[attr-defined]

    weights = [[one(p) * (1 + 0.01 / (k + 1)) for k, p in enumerate(layout or ())] for layout in layouts]
    return np.array([sum(w) for w in weights])


def formulate(
    graph: Graph, candidates: Candidates, mesh: Mesh, *, training: Training | None = None, memory_limit: float | None = None
) -> Formulation:
    """The Problem of laying `graph` over `mesh`. memory_limit: bytes per device; training prices the optimizer too."""
    return _Builder(graph, candidates, mesh, training, memory_limit).build()


def with_pins(formulation: Formulation, allowed: Mapping[int, Sequence[bool] | np.ndarray]) -> Problem:
    """The problem with choices forbidden: allowed[node][choice]. The choices keep their numbers."""
    costs = list(formulation.problem.node_costs)
    for node, keep in allowed.items():
        costs[node] = np.where(np.asarray(keep, dtype=bool), costs[node], math.inf)
    return replace(formulation.problem, node_costs=tuple(costs))


class _Tables:
    """Edge tables and copies, one array per distinct (tensor, what is given, what is taken), shared by reference."""

    def __init__(self, mesh: Mesh, routes: Routes):
        self.mesh, self.routes = mesh, routes
        self.ids: dict[Layouts, int] = {}
        self.seconds: dict[tuple, np.ndarray] = {}
        self.copies: dict[tuple, np.ndarray] = {}
        self.leavings: dict[tuple, np.ndarray] = {}
        self.local: dict[tuple, np.ndarray] = {}

    def key(self, tensor: Tensor, gives: Layouts, takes: Layouts) -> tuple:
        return (tensor, self.ids.setdefault(gives, len(self.ids)), self.ids.setdefault(takes, len(self.ids)))

    def table(self, tensor: Tensor, gives: Layouts, takes: Layouts) -> np.ndarray:
        key = self.key(tensor, gives, takes)
        if key not in self.seconds:
            sources, targets = list(dict.fromkeys(gives)), list(dict.fromkeys(takes))
            table = self.routes.table(tensor.shape, tensor.itemsize, sources, targets)
            rows = {layout: i for i, layout in enumerate(sources)}
            columns = {layout: j for j, layout in enumerate(targets)}
            self.seconds[key] = np.ascontiguousarray(table[np.ix_([rows[g] for g in gives], [columns[t] for t in takes])])
        return self.seconds[key]

    def bytes(self, tensor: Tensor, layouts: Layouts) -> np.ndarray:
        """Local bytes per layout."""
        key = (tensor, self.ids.setdefault(layouts, len(self.ids)))
        if key not in self.local:
            self.local[key] = np.array([local_numel(tensor.shape, layout, self.mesh) * tensor.itemsize for layout in layouts], dtype=float)
        return self.local[key]

    def differ(self, gives: Layouts, takes: Layouts) -> np.ndarray:
        names = {layout: i for i, layout in enumerate(dict.fromkeys((*gives, *takes)))}
        return np.array([names[g] for g in gives])[:, None] != np.array([names[t] for t in takes])[None, :]

    def copy(self, tensor: Tensor, gives: Layouts, takes: Layouts) -> np.ndarray:
        """Bytes of the copy that the route ends in; 0 where nothing is moved."""
        key = self.key(tensor, gives, takes)
        if key not in self.copies:
            self.copies[key] = np.where(self.differ(gives, takes), self.bytes(tensor, takes)[None, :], 0.0)
        return self.copies[key]

    def leaving(self, tensor: Tensor, gives: Layouts, takes: Layouts) -> np.ndarray:
        """Bytes of what is moved, while it is moved; 0 where nothing is."""
        key = self.key(tensor, gives, takes)
        if key not in self.leavings:
            self.leavings[key] = np.where(self.differ(gives, takes), self.bytes(tensor, gives)[:, None], 0.0)
        return self.leavings[key]


class _Builder:
    """Collects nodes, edges and usages in a fixed order."""

    def __init__(self, graph: Graph, candidates: Candidates, mesh: Mesh, training: Training | None, memory_limit: float | None):
        self.graph, self.candidates, self.mesh, self.training, self.memory_limit = graph, candidates, mesh, training, memory_limit
        self.routes = Routes(mesh)
        self.tables = _Tables(mesh, self.routes)
        self.names: list[str] = []
        self.node_costs: list[np.ndarray] = []
        self.edges: list[Edge] = []
        self.links: list[Link] = []
        self.usages: list[NodeUsage | EdgeUsage] = []
        self.hubs: dict[Value, int] = {}
        self.hub_layouts: dict[Value, Layouts] = {}
        self.results: dict[int, int] = {}
        self.result_layouts: dict[int, Layouts] = {}
        self.end = len(graph.ops) + 1

    def build(self) -> Formulation:
        self._signatures()
        costs: dict[int, np.ndarray] = {}
        for i, op in enumerate(self.graph.ops):
            if self.first[i] not in costs:
                costs[self.first[i]] = self._op_costs(i)
            self._node(op.name, costs[self.first[i]])
        self._add_hubs()
        for i in range(len(self.graph.ops)):
            self._add_inputs(i)
            self._own_bytes(i)
        for k, result in enumerate(self.graph.results):
            if result.value is not None:
                self._add_result(k)
        problem = Problem(tuple(self.names), tuple(self.node_costs), tuple(self.edges), tuple(self.usages), self.memory_limit)
        return Formulation(
            problem, self.graph, self.mesh, self.candidates, self.hubs, self.hub_layouts, self.results, self.result_layouts,
            tuple(self.links), self.routes,
        )  # fmt: skip

    def _signatures(self) -> None:
        """The first op of each signature, and what candidates of that signature give and take, made once."""
        seen: dict[tuple, int] = {}
        trained = self._trained()
        self.first = [
            seen.setdefault((self.graph.signature(i), i in trained), i) for i in range(len(self.graph.ops))
        ]  # a parameter that is trained is priced otherwise than one that isn't
        self._gives: dict[tuple[int, int], Layouts] = {}
        self._takes: dict[tuple[int, int], Layouts] = {}

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

    def _node(self, name: str, costs: np.ndarray) -> int:
        self.names.append(name)
        self.node_costs.append(costs)
        return len(self.names) - 1

    def _op_costs(self, i: int) -> np.ndarray:
        op, inputs = self.graph.ops[i], self.graph.input_tensors(i)
        if op.kind == "parameter" and i in self._trained():
            tensor, optimizer = self.graph.tensor((i, 0)), self.training.optimizer  # type: ignore[union-attr]
            sizes = [local_numel(tensor.shape, layout, self.mesh) for layout in self.gives((i, 0))]
            return np.array([optimizer_step_seconds(n, tensor.itemsize, optimizer, self.mesh.device) for n in sizes])
        if op.is_placeholder:
            return np.zeros(len(self.candidates.of[i]))
        return np.array([op_candidate_seconds(op, inputs, c, self.mesh) for c in self.candidates.of[i]])

    def _add_hubs(self) -> None:
        """A hub for every value with two readers or more, results included."""
        readers: dict[Value, int] = {value: len(users) for value, users in self.graph.users.items()}
        for result in self.graph.results:
            if result.value is not None:
                readers[result.value] = readers.get(result.value, 0) + 1
        for value in sorted(v for v, count in readers.items() if count > 1):
            gives = self.gives(value)
            wanted = [layout for i, a in self.graph.users.get(value, ()) for layout in self.takes(i, a)]
            layouts = tuple(dict.fromkeys([*(g for g in gives if not has_partial(g)), *wanted]))
            node = self._node(f"{self.graph.ops[value[0]].name}.{value[1]} (hub)", np.zeros(len(layouts)))
            self.hubs[value], self.hub_layouts[value] = node, layouts
            self._add_hub_edge(value, node, layouts)

    def _add_hub_edge(self, value: Value, node: int, layouts: Layouts) -> None:
        tensor, gives = self.graph.tensor(value), self.gives(value)
        edge = self._edge(value, value[0], node, gives, layouts)
        first, last = self._first_reader(value), self._last(value) + 1
        if self._stays(value):  # whoever gave it keeps it: the hub is a copy where its layout differs
            self.usages.append(EdgeUsage(edge, first, last, self.tables.copy(tensor, gives, layouts)))
        else:  # the hub takes over; what it was made from is still there while it is made
            self.usages.append(NodeUsage(node, first, last, self.tables.bytes(tensor, layouts)))
            self.usages.append(EdgeUsage(edge, first, first + 1, self.tables.leaving(tensor, gives, layouts)))

    def _edge(self, value: Value, a: int, b: int, gives: Layouts, takes: Layouts) -> int:
        tensor = self.graph.tensor(value)
        self.edges.append(Edge(a, b, self.tables.table(tensor, gives, takes)))
        self.links.append(Link(a, b, tensor, gives, takes, value))
        return len(self.edges) - 1

    def _source(self, value: Value) -> tuple[int, Layouts]:
        return (self.hubs[value], self.hub_layouts[value]) if value in self.hubs else (value[0], self.gives(value))

    def _add_inputs(self, i: int) -> None:
        """Edges from what op i reads, and the copies that exist while it runs (as long as its output, when that is a view)."""
        op = self.graph.ops[i]
        for a, value in enumerate(op.inputs):
            source, gives = self._source(value)
            takes = self.takes(i, a)
            edge = self._edge(value, source, i, gives, takes)
            end = max((self._last((i, k)) for k in range(len(op.outputs))), default=i) if op.alias == a else i
            self.usages.append(EdgeUsage(edge, i, end + 1, self.tables.copy(self.graph.tensor(value), gives, takes)))

    def _own_bytes(self, i: int) -> None:
        """What op i allocates: outputs that are no views; parameters with their optimizer state for the whole step."""
        op = self.graph.ops[i]
        if op.name in dict(self.graph.tied):  # another name of a parameter: nothing of its own
            return
        if op.is_placeholder:
            tensor = self.graph.tensor((i, 0))
            held = self.tables.bytes(tensor, self.gives((i, 0)))
            if (ready := self._trained().get(i)) is not None:
                sizes = held / tensor.itemsize
                state = np.array([optimizer_state_bytes(int(n), self.training.optimizer) for n in sizes])  # type: ignore[union-attr]
                self.usages.append(NodeUsage(i, ready + 1, self.end, held))  # the gradient, in the parameter's layout
                held = held + state
            self.usages.append(NodeUsage(i, 0, self.end, held))
            return
        if op.alias is not None:
            return
        for k, output in enumerate(op.outputs):
            if output is not None:
                value = (i, k)
                end = self._first_reader(value) if value in self.hubs else self._last(value) + 1
                self.usages.append(NodeUsage(i, i, max(end, i + 1), self.tables.bytes(output, self.gives(value))))

    def _stays(self, value: Value) -> bool:
        op = self.graph.ops[value[0]]
        return op.is_placeholder or op.alias is not None

    def _first_reader(self, value: Value) -> int:
        return min((i for i, _ in self.graph.users.get(value, ())), default=value[0] + 1)

    def _last(self, value: Value) -> int:
        return self.graph.last_use.get(value, value[0])

    def _add_result(self, k: int) -> None:
        """An edge to the parameter or buffer that the result updates, or to a node of its own: any layout but Partial."""
        result = self.graph.results[k]
        value: Value = result.value  # type: ignore[assignment]
        tensor = self.graph.tensor(value)
        if result.kind in ("gradient", "buffer") and result.name in self.graph.index:
            node = self.graph.index[result.name]
            layouts = self.gives((node, 0))
        else:
            layouts = all_layouts(tensor.shape, self.mesh)
            node = self._node(f"{result.kind}:{result.name}", np.zeros(len(layouts)))
        self.results[k], self.result_layouts[k] = node, layouts
        source, gives = self._source(value)
        edge = self._edge(value, source, node, gives, layouts)
        if result.kind == "output":
            self.usages.append(EdgeUsage(edge, len(self.graph.ops), self.end, self.tables.copy(tensor, gives, layouts)))


def op_candidate_seconds(op: Op, inputs: tuple[Tensor, ...], candidate: Candidate, mesh: Mesh) -> float:
    """Seconds of one op under one candidate: its kernel on local shapes and the collectives inside it."""
    ins = [(local_shape(t.shape, layout, mesh), t.dtype) for t, layout in zip(inputs, candidate.inputs, strict=True)]
    outs = [
        None if t is None or layout is None else (local_shape(t.shape, layout, mesh), t.dtype)
        for t, layout in zip(op.outputs, candidate.outputs, strict=True)
    ]
    inside = internal_collectives(op, inputs, candidate.inputs, mesh)
    reduced = [float(collective_seconds(name, mesh.axes[axis], float(size))) for name, axis, size in inside]
    return op_seconds(op.target, ins, outs, op.alias, mesh.device) + sum(reduced)
