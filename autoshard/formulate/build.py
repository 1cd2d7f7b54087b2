"""Builds the Formulation of a graph and its candidates: the Problem's nodes and edges with their costs, in a fixed order."""

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType

import numpy as np

from autoshard.cost import (
    Columns,
    PricedCollective,
    TimedStage,
    accumulation_bytes,
    cost_of,
    in_the_open,
    makespan,
    optimizer_step_bytes,
    priced,
    timed,
)
from autoshard.formulate.records import Formulation, Layouts, TensorEdge, Training
from autoshard.formulate.tables import MoveTables, Tables
from autoshard.formulate.usages import OpChoices, Usages
from autoshard.graph import (
    ACCUMULATED,
    FIRST_MATRIX,
    KEPT,
    OFFLOADED,
    RELOADED,
    SELECTED,
    Graph,
    Op,
    Tensor,
    Value,
    early_casts,
    pending,
    private_values,
)
from autoshard.layout import Layout, all_layouts, has_partial, local_numel, local_shape
from autoshard.mesh import Mesh
from autoshard.problem import Edge, Problem
from autoshard.strategies import (
    Candidate,
    Candidates,
    internal_collectives,
    internal_passes,
    internal_stages,
    share_of_flops,
    worked_shapes,
)


def formulate(
    graph: Graph, candidates: Candidates, mesh: Mesh, *, training: Training | None = None, memory_limit: float | None = None,
    tables: Tables | None = None, hubs: Mapping[Value, Layout] = MappingProxyType({}),
) -> Formulation:  # fmt: skip
    """The Problem of choosing layouts for `graph` on `mesh`.

    memory_limit: bytes per device. training: the optimizer is counted, and the number of microbatches; with several the graph is one
    `with_microbatches`. tables: those of other graphs on the same mesh, to which the graph's are added. hubs: a further layout of a value
    with several readers, beside those in which its producer and its readers have it.
    """
    return _Builder(graph, candidates, mesh, training, memory_limit, tables or Tables(mesh), hubs).build()


class _Builder:
    """Collects nodes and edges; the memory usages follow from them."""

    def __init__(self, graph: Graph, candidates: Candidates, mesh: Mesh, training: Training | None, memory_limit: float | None,
                 tables: Tables, more_hubs: Mapping[Value, Layout]):  # fmt: skip
        self.graph, self.candidates, self.mesh, self.training, self.memory_limit = graph, candidates, mesh, training, memory_limit
        self.microbatches = 1 if training is None else training.microbatches
        self.tables, self.more_hubs, self.choices = tables, more_hubs, OpChoices(graph, candidates, tables)
        self.trained = self._trained()
        self.pending, casts = pending(graph), early_casts(graph)
        self.private = private_values(graph)
        self.cast = {value for value, users in graph.users.items() if all(i in casts for i, _ in users)}  # and gathered after that
        self.names: list[str] = []
        self.node_costs: list[np.ndarray] = []
        self.edges: list[Edge] = []
        self.tensor_edges: list[TensorEdge] = []
        self.hubs: dict[Value, int] = {}
        self.hub_layouts: dict[Value, Layouts] = {}
        self.results: dict[int, int] = {}
        self.result_layouts: dict[int, Layouts] = {}

    def build(self) -> Formulation:
        costs: dict[tuple, np.ndarray] = {}
        for i, op in enumerate(self.graph.ops):
            # a parameter that is trained has other costs than one that isn't
            key = self.choices.first[i], i in self.trained, op.fused, self.graph.is_by_columns(i)
            if key not in costs:
                costs[key] = self._known_costs(i)
            self._node(op.name, costs[key])
        waiting = self._add_hubs()
        self.usages = Usages(self.choices, self.training, self.trained, self.hubs)
        for value, edge, move in waiting:
            self.usages.add_hub(value, edge, move)
        for i, op in enumerate(self.graph.ops):
            for a, value in enumerate(op.inputs):
                source, layouts = self._source(value)
                self.usages.add_input(i, a, *self._edge(value, source, i, layouts, self.choices.inputs(i, a)))
            self.usages.add_op(i)
        for k, result in enumerate(self.graph.results):
            if result.value is not None:
                self._add_result(k, result.value)
        problem = Problem(tuple(self.names), tuple(self.node_costs), tuple(self.edges), tuple(self.usages.usages), self.memory_limit)
        return Formulation(
            problem, self.graph, self.mesh, self.candidates, self.hubs, self.hub_layouts, self.results, self.result_layouts,
            tuple(self.tensor_edges), tuple(self.usages.held), self.tables.routes, self.microbatches,
        )  # fmt: skip

    def _trained(self) -> dict[int, int]:
        """Parameters that get a gradient, with the time at which it is complete."""
        if self.training is None:
            return {}
        return {
            self.graph.index[r.name]: r.value[0]
            for r in self.graph.results
            if r.kind == "gradient" and r.value is not None and r.name in self.graph.parameters
        }

    def _node(self, name: str, costs: np.ndarray) -> int:
        self.names.append(name)
        self.node_costs.append(costs)
        return len(self.names) - 1

    def _known_costs(self, i: int) -> np.ndarray:
        trained, fused = self.training if i in self.trained else None, self.graph.ops[i].fused
        known = self.graph.signature(i), fused, self.graph.is_by_columns(i)
        key = ("costs", self.choices.lists[i], *known, trained, self.microbatches)
        return self.tables.once(key, lambda: self._op_costs(i))

    def _op_costs(self, i: int) -> np.ndarray:
        op, inputs, device, model = self.graph.ops[i], self.graph.input_tensors(i), self.mesh.device, cost_of(self.mesh)
        if op.kind == "parameter" and i in self.trained:
            tensor, training = self.graph.tensor((i, 0)), self.training
            assert training is not None
            sizes = [local_numel(tensor.shape, layout, self.mesh) for layout in self.choices.outputs((i, 0))]
            master = training.master_weights
            moved = [optimizer_step_bytes(n, tensor.itemsize, training.optimizer, master_weights=master) for n in sizes]
            return np.array([model.memory("update", n, device) for n in moved])
        if op.is_placeholder or op.kind in (KEPT, SELECTED):
            return np.zeros(len(self.candidates.of[i]))
        if op.kind == ACCUMULATED:
            tensor, itemsize = op.output, inputs[0].itemsize
            sizes = [local_numel(tensor.shape, layout, self.mesh) for layout in self.choices.outputs((i, 0))]
            moved = [accumulation_bytes(n, itemsize, tensor.itemsize) for n in sizes]
            return self.microbatches * np.array([model.memory("accumulate", n, device) for n in moved])
        if op.kind in (OFFLOADED, RELOADED):
            held = self.tables.bytes(op.output, self.choices.outputs((i, 0)))
            exposed = float(dict(op.literals[1])["exposed"])
            return self.microbatches * np.array([model.transfer(n, exposed, device) for n in held])
        by_columns = self.graph.is_by_columns(i)
        seconds = np.array([op_candidate_seconds(op, inputs, c, self.mesh, by_columns) for c in self.candidates.of[i]])
        return seconds if self.microbatches == 1 else self.microbatches * seconds

    def _add_hubs(self) -> list[tuple[Value, int, MoveTables]]:
        """Adds a hub for every value with two readers or more, results included; returns the edges that lead to the hubs."""
        readers: dict[Value, int] = {value: len(users) for value, users in self.graph.users.items()}
        for result in self.graph.results:
            if result.value is not None:
                readers[result.value] = readers.get(result.value, 0) + 1
        edges = []
        for value in sorted(v for v, count in readers.items() if count > 1 and self.graph.ops[v[0]].kind != SELECTED):
            layouts = self._layouts_of_hub(value)
            costs = self.tables.once(("zeros", len(layouts)), partial(np.zeros, len(layouts)))
            node = self._node(f"{self.graph.ops[value[0]].name}.{value[1]} (hub)", costs)
            self.hubs[value], self.hub_layouts[value] = node, layouts
            edges.append((value, *self._edge(value, value[0], node, self.choices.outputs(value), layouts)))
        return edges

    def _layouts_of_hub(self, value: Value) -> Layouts:
        """The output layouts of its producer that hold no Partial, and the input layouts of its readers; computed once per signature."""
        readers = self.graph.users.get(value, ())
        distinct = {(self.choices.lists[i], a): (i, a) for i, a in readers}  # a table that all layers read has hundreds of readers

        def layouts() -> Layouts:
            wanted = [layout for i, a in distinct.values() for layout in self.choices.inputs(i, a)]
            completed = [layout for layout in self.choices.outputs(value) if not has_partial(layout)]
            return tuple(dict.fromkeys([*completed, *wanted, *more]))

        more = (self.more_hubs[value],) if value in self.more_hubs else ()
        return self.tables.once(("hub", self.choices.lists[value[0]], value[1], *distinct, *more), layouts)

    def _edge(self, value: Value, a: int, b: int, source_layouts: Layouts, target_layouts: Layouts) -> tuple[int, MoveTables]:
        tensor = self.graph.tensor(value)
        move, times = self.tables.move(tensor, source_layouts, target_layouts), self._times(a, b)
        stays = value in self.private or (b < len(self.graph.ops) and self.graph.ops[b].kind == RELOADED)
        seconds = move.seconds_of_none if stays else move.seconds_of(times, pending=value in self.pending, silent=value in self.cast)
        self.edges.append(Edge(a, b, seconds))
        self.tensor_edges.append(TensorEdge(a, b, tensor, source_layouts, target_layouts, value, times))
        return len(self.edges) - 1, move

    def _times(self, a: int, b: int) -> int:
        """How often a step has the route from node a to node b."""
        ops = self.graph.ops
        once = (b < len(ops) and ops[b].kind == KEPT) or (a < len(ops) and ops[a].kind == ACCUMULATED)
        return 1 if once else self.microbatches

    def _source(self, value: Value) -> tuple[int, Layouts]:
        return (self.hubs[value], self.hub_layouts[value]) if value in self.hubs else (value[0], self.choices.outputs(value))

    def _add_result(self, k: int, value: Value) -> None:
        """Adds an edge to the parameter or buffer that the result updates, or to a new node with all layouts but Partial as choices."""
        result, tensor = self.graph.results[k], self.graph.tensor(value)
        if result.kind in ("gradient", "buffer") and result.name in self.graph.index:
            node = self.graph.index[result.name]
            layouts = self.choices.outputs((node, 0))
        else:
            allowed = self.candidates.results
            layouts = (allowed[k] if allowed else None) or all_layouts(tensor.shape, self.mesh)
            node = self._node(f"{result.kind}:{result.name}", np.zeros(len(layouts)))
        self.results[k], self.result_layouts[k] = node, layouts
        source, source_layouts = self._source(value)
        self.usages.add_result(k, *self._edge(value, source, node, source_layouts, layouts))


def op_candidate_seconds(op: Op, inputs: tuple[Tensor, ...], candidate: Candidate, mesh: Mesh, by_columns: bool = False) -> float:
    """Seconds of one op under one candidate: the kernels and the collectives of its local program. by_columns: as `Graph.is_by_columns`."""
    if stages := op_stages(op, inputs, candidate, mesh):
        return makespan(stages, mesh)
    share = share_of_flops(op, inputs, candidate.inputs, mesh)
    collectives = priced(internal_collectives(op, inputs, candidate.inputs, mesh), mesh)
    passes = cost_of(mesh).memory("passes", internal_passes(op, inputs, candidate.inputs, mesh), mesh.device)
    return _kernel_seconds(op, inputs, candidate, mesh, share, by_columns) + passes + sum(one.seconds for one in collectives)


def op_stages(op: Op, inputs: tuple[Tensor, ...], candidate: Candidate, mesh: Mesh) -> tuple[TimedStage, ...]:
    """The kernels and messages of a local program that runs some of them at the same time; () for the others."""
    stages = internal_stages(op, inputs, candidate.inputs, mesh)
    return timed(stages, lambda share: _kernel_seconds(op, inputs, candidate, mesh, share), mesh) if stages else ()


def op_collectives(op: Op, inputs: tuple[Tensor, ...], candidate: Candidate, mesh: Mesh) -> tuple[PricedCollective, ...]:
    """The collectives of the op's local program, with the seconds that they add to those of its kernel."""
    if stages := op_stages(op, inputs, candidate, mesh):
        return in_the_open(stages, mesh)
    return priced(internal_collectives(op, inputs, candidate.inputs, mesh), mesh)


def _kernel_seconds(op: Op, inputs: tuple[Tensor, ...], candidate: Candidate, mesh: Mesh, share: float, by_columns: bool = False) -> float:
    ins = [(shape, t.dtype) for t, shape in zip(inputs, worked_shapes(op, inputs, candidate.inputs, mesh), strict=True)]
    if by_columns:
        ins[FIRST_MATRIX[op.target]] = (Columns(ins[FIRST_MATRIX[op.target]][0]), ins[FIRST_MATRIX[op.target]][1])
    outs = [
        None if t is None or layout is None else (local_shape(t.shape, layout, mesh), t.dtype)
        for t, layout in zip(op.outputs, candidate.outputs, strict=True)
    ]
    return cost_of(mesh).compute(op.target, ins, outs, op.alias, mesh.device, share, op.fused)
