"""What the numbers of a Problem mean: its nodes as ops, hubs and results, its edges as tensors that move."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from autoshard.graph import Graph, Tensor, Value
from autoshard.layout import Layout
from autoshard.mesh import Mesh
from autoshard.problem import Problem
from autoshard.routes import Route, Routes
from autoshard.strategies import Candidate, Candidates

Layouts = tuple[Layout, ...]


@dataclass(frozen=True)
class Training:
    """What a training step costs beside the graph: the optimizer."""

    optimizer: str | float = "adamw"  # or its bytes of state per parameter
    master_weights: bool = False  # counted: a float32 copy of parameters that are kept in less


class Link(NamedTuple):  # a plain tuple: a deep model has tens of thousands
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
    held: tuple[str, ...]  # what each usage of the problem holds: one of usages.KINDS
    routes: Routes

    @property
    def trains(self) -> bool:
        return any(r.kind == "gradient" for r in self.graph.results)

    def candidate(self, index: int, choice: Sequence[int]) -> Candidate:
        return self.candidates.of[index][choice[index]]

    def hub(self, value: Value, choice: Sequence[int]) -> Layout | None:
        return self.hub_layouts[value][choice[self.hubs[value]]] if value in self.hubs else None

    def result(self, k: int, choice: Sequence[int]) -> Layout:
        return self.result_layouts[k][choice[self.results[k]]]

    def route(self, link: Link, choice: Sequence[int]) -> Route | None:
        """The route that the edge prices under `choice`."""
        a, b, tensor = choice[link.a], choice[link.b], link.tensor
        key = (tensor.shape, tensor.itemsize, id(link.gives), a, id(link.takes), b)  # the links keep both alive
        if key not in self._known_routes:
            self._known_routes[key] = self.routes.route(tensor.shape, tensor.itemsize, link.gives[a], link.takes[b])
        return self._known_routes[key]

    @cached_property
    def _known_routes(self) -> dict[tuple, Route | None]:
        return {}

    @cached_property
    def preference(self) -> tuple[np.ndarray, ...]:
        """A fixed order among equal costs: the same everywhere, cut rather than whole, first dims first."""
        made: dict[int, np.ndarray] = {}  # by what they are of: equal ops share their candidates, equal hubs their layouts
        for cs in self.candidates.of:
            if id(cs) not in made:
                made[id(cs)] = _preferences([c.outputs[0] for c in cs])
        own = len(self.graph.ops) + len(self.hubs)
        layouts = [self.hub_layouts[value] for value in self.hubs]
        layouts += [self.result_layouts[k] for k, node in self.results.items() if node >= own]
        for of in layouts:
            if id(of) not in made:
                made[id(of)] = _preferences(of)
        return (*(made[id(cs)] for cs in self.candidates.of), *(made[id(of)] for of in layouts))


def _preferences(layouts: Sequence[Layout | None]) -> np.ndarray:
    """Per layout a small number: cut on dim d costs 1 + d/8, whole 2, partial 3; earlier axes count a little more."""

    def one(placement: object) -> float:
        if placement.is_shard():  # type: ignore[attr-defined]
            return 1 + placement.dim / 8  # type: ignore[attr-defined]
        return 2.0 if placement.is_replicate() else 3.0  # type: ignore[attr-defined]

    weights = [[one(p) * (1 + 0.01 / (k + 1)) for k, p in enumerate(layout or ())] for layout in layouts]
    return np.array([sum(w) for w in weights])


def with_pins(formulation: Formulation, allowed: Mapping[int, Sequence[bool] | np.ndarray]) -> Problem:
    """The problem with choices forbidden: allowed[node][choice]. The choices keep their numbers."""
    if not allowed:
        return formulation.problem
    costs = list(formulation.problem.node_costs)
    for node, keep in allowed.items():
        costs[node] = np.where(np.asarray(keep, dtype=bool), costs[node], math.inf)
    return replace(formulation.problem, node_costs=tuple(costs))
