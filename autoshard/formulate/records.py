"""What the numbers of a Problem mean: its nodes stand for ops, hubs and results, its edges for tensors that go from node to node."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from autoshard.graph import Graph, Tensor, Value, grouped
from autoshard.layout import Layout
from autoshard.mesh import Mesh
from autoshard.problem import Problem, evaluate, held
from autoshard.routes import Route, Routes
from autoshard.strategies import Candidate, Candidates

Layouts = tuple[Layout, ...]
Place = tuple[str, int, int]  # ("shared", op, output), ("input", op, input) or ("result", k, 0)


@dataclass(frozen=True)
class Training:
    """What a training step does besides the graph: the update by the optimizer."""

    optimizer: str | float = "adamw"  # its name, or its bytes of state per parameter
    master_weights: bool = False  # whether a float32 copy of parameters of lower precision is counted
    microbatches: int = 1  # times that the graph runs before the update


class TensorEdge(NamedTuple):  # a plain tuple: a deep model has tens of thousands
    """The tensor that goes along one edge of the Problem, from node a to node b, with its layouts at both ends."""

    a: int
    b: int
    tensor: Tensor
    source_layouts: Layouts  # per choice of a
    target_layouts: Layouts  # per choice of b
    value: Value
    times: int  # in a step


@dataclass(frozen=True, eq=False)
class Formulation:
    """A Problem and what its numbers mean. The nodes are first the ops in order, then the hubs, then the results."""

    problem: Problem
    graph: Graph
    mesh: Mesh
    candidates: Candidates
    hubs: Mapping[Value, int]  # node of the hub of a value
    hub_layouts: Mapping[Value, Layouts]
    results: Mapping[int, int]  # node that result k goes to: a result node, or the node of its parameter or buffer
    result_layouts: Mapping[int, Layouts]  # the choices of that node as layouts
    tensor_edges: tuple[TensorEdge, ...]  # one per edge of the problem
    held: tuple[str, ...]  # what each usage of the problem holds: one of usages.KINDS
    routes: Routes
    microbatches: int  # times that the graph runs in a step

    @cached_property
    def places(self) -> tuple[Place, ...]:
        """What each edge of the problem leads to, in their order (formulate.build)."""
        inputs = (("input", i, a) for i, op in enumerate(self.graph.ops) for a in range(len(op.inputs)))
        return (*(("shared", i, k) for i, k in self.hubs), *inputs, *(("result", k, 0) for k in self.results))

    def candidate(self, index: int, choice: Sequence[int]) -> Candidate:
        return self.candidates.of[index][choice[index]]

    def hub(self, value: Value, choice: Sequence[int]) -> Layout | None:
        return self.hub_layouts[value][choice[self.hubs[value]]] if value in self.hubs else None

    def result(self, k: int, choice: Sequence[int]) -> Layout:
        return self.result_layouts[k][choice[self.results[k]]]

    def route(self, edge: TensorEdge, choice: Sequence[int]) -> Route | None:
        """The route whose seconds are the cost of the edge under `choice`."""
        a, b, tensor = choice[edge.a], choice[edge.b], edge.tensor
        key = (tensor.shape, tensor.itemsize, id(edge.source_layouts), a, id(edge.target_layouts), b)  # the edges keep both alive
        if key not in self._known_routes:
            self._known_routes[key] = self.routes.route(tensor.shape, tensor.itemsize, edge.source_layouts[a], edge.target_layouts[b])
        return self._known_routes[key]

    def peak(self, choice: Sequence[int]) -> float:
        """Bytes per device at the fullest moment of this choice as it is run. A memory limit counts some copies longer."""
        return evaluate(self.problem_as_run(choice), choice).peak

    def problem_as_run(self, choice: Sequence[int], problem: Problem | None = None) -> Problem:
        """With the usages of this choice: a copy of any bytes ends with the last op that reads it, or a view of it that isn't a copy
        itself. More than two choices decide that, so in the problem itself it counts as long as any view. problem: with other costs."""
        ops, users, edges, usages = self.graph.ops, self.graph.users, self.problem.edges, self.problem.usages
        results, hubs = {result.value for result in self.graph.results}, {node: value for value, node in self.hubs.items()}
        by_start = grouped((u.start, u) for u in usages)

        def end(value: Value, layout: Layout | None, size: float) -> float:
            """Of a copy of so many bytes, with a value in this layout."""
            if value in results or ops[value[0]].kind != "compute":
                return math.inf
            views = {j for j, a in users.get(value, ()) if ops[j].alias == a and self.candidate(j, choice).inputs[a] == layout}
            return max([value[0] + 1.0, *(end_of(j, size) if j in views else j + 1 for j, _ in users.get(value, ()))])

        def end_of(i: int, size: float) -> float:
            """... with what view i computes. A hub of another layout is computed in front of its first reader, which then gets its copy."""
            ends = []
            for k, layout in enumerate(self.candidate(i, choice).outputs):
                node, first = self.hubs.get((i, k)), min((j for j, _ in users.get((i, k), ())), default=i)
                if node is None or self.hub((i, k), choice) == layout:
                    ends.append(end((i, k), layout, size))
                else:
                    after = (u.held(choice) for u in by_start.get(first, ()) if u.ends in ((first,), (node, first)))
                    ends.append(first + (sum(after) < size))
            return max(ends)

        shorter = list(usages)
        for n, (u, size) in enumerate(zip(usages, held(self.problem, choice).tolist(), strict=True)):
            if u.edge is None or not size:
                continue
            ends: float = u.end
            if (b := edges[u.edge].b) in hubs:
                ends = end(hubs[b], self.hub(hubs[b], choice), size)
            elif b < len(ops) and ops[b].alias is not None:
                ends = end_of(b, size)
            if ends < u.end:
                shorter[n] = replace(u, end=int(ends))
        return replace(problem or self.problem, usages=tuple(shorter))

    @cached_property
    def _known_routes(self) -> dict[tuple, Route | None]:
        return {}

    @cached_property
    def preference(self) -> tuple[np.ndarray, ...]:
        """A fixed order among choices of equal cost, the same on every machine: sharded before replicated, lower dims first."""
        return preferred_layouts(self)


def preferred_layouts(formulation: Formulation) -> tuple[np.ndarray, ...]:
    """Per node the preference of each of its layouts; equal ops share their candidates, equal hubs their layouts, and so these arrays."""
    graph, hubs, results = formulation.graph, formulation.hubs, formulation.results
    layouts = [formulation.hub_layouts[value] for value in hubs]
    layouts += [formulation.result_layouts[k] for k, node in results.items() if node >= len(graph.ops) + len(hubs)]
    nodes: list[Sequence[Any]] = [*formulation.candidates.of, *layouts]
    weights: dict[int, np.ndarray] = {}
    for of in nodes:
        if id(of) not in weights:
            weights[id(of)] = _preferences([one.outputs[0] if isinstance(one, Candidate) else one for one in of])
    return tuple(weights[id(of)] for of in nodes)


def _preferences(layouts: Sequence[Layout | None]) -> np.ndarray:
    """Per layout a small number: sharded on dim d counts 1 + d/8, replicated 2, partial 3; earlier axes count a little more."""

    def one(placement: object) -> float:
        if placement.is_shard():  # type: ignore[attr-defined]
            return 1 + placement.dim / 8  # type: ignore[attr-defined]
        return 2.0 if placement.is_replicate() else 3.0  # type: ignore[attr-defined]

    weights = [[one(p) * (1 + 0.01 / (k + 1)) for k, p in enumerate(layout or ())] for layout in layouts]
    return np.array([sum(w) for w in weights])


def with_pins(formulation: Formulation, allowed: Mapping[int, Sequence[bool] | np.ndarray]) -> Problem:
    """The problem in which only the choices with allowed[node][choice] are finite. The choices keep their numbers."""
    if not allowed:
        return formulation.problem
    costs = list(formulation.problem.node_costs)
    for node, keep in allowed.items():
        costs[node] = np.where(np.asarray(keep, dtype=bool), costs[node], math.inf)
    return replace(formulation.problem, node_costs=tuple(costs))
