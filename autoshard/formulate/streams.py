"""The seconds of each choice by stream: kernels on the compute stream, collectives on the link that their mesh axis uses.

    c_v[i]    = sum_s c_vs[i]        kernel and splits: stream 0; link k, which one or more mesh axes use: stream k + 1; the last but one:
    T_uv[i,j] = sum_s T_uvs[i,j]     kernels on stream 0 that may run early, casts of shards of parameters; the last: seconds in which the
                                     compute stream waits for messages within an op (a ring)

A stream does one thing at a time, so no schedule of a plan ends before any stream has done its seconds.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from autoshard.cost import priced, shared_links
from autoshard.formulate.build import op_stages
from autoshard.formulate.records import Formulation, TensorEdge
from autoshard.formulate.tables import distinct
from autoshard.graph import KEPT, OFFLOADED, RELOADED, early_casts
from autoshard.layout import replicated
from autoshard.routes import stream_table
from autoshard.strategies import internal_collectives

EARLY = -2  # the stream of kernels that may run early


@dataclass(frozen=True, eq=False)
class StreamSeconds:
    """Per node an array (choices, streams), per edge (choices of a, choices of b, streams); equal ones are one array."""

    nodes: tuple[np.ndarray, ...]
    edges: tuple[np.ndarray, ...]
    num: int  # 1 + links + 2
    of_axis: tuple[int, ...]  # the stream of the link that each mesh axis uses


def stream_seconds(formulation: Formulation, *, joined: bool = False) -> StreamSeconds:
    """The seconds of a step by stream. joined: of collectives into the parameters' layouts the least that they add to buckets
    (simulate.timeline)."""
    return _Streams(formulation, joined).build()


class _Streams:
    def __init__(self, formulation: Formulation, joined: bool):
        self.formulation, self.joined = formulation, joined
        self.of_axis = tuple(link + 1 for link in shared_links(formulation.mesh))
        self.num = 3 + max(self.of_axis)
        self.early = early_casts(formulation.graph)
        self.to_link = np.eye(self.num)[[0, *self.of_axis]]  # stream of an axis -> stream of its link
        self.known: dict[tuple, np.ndarray] = {}

    def build(self) -> StreamSeconds:
        problem = self.formulation.problem
        nodes = tuple(self._once(("node", id(costs), v in self.early), self._node, v) for v, costs in enumerate(problem.node_costs))
        links = self.formulation.tensor_edges
        edges = tuple(self._once(("edge", id(e.table), self._updates(t)), self._edge, t, e.table) for e, t in zip(problem.edges, links))
        return StreamSeconds(nodes, edges, self.num, self.of_axis)

    def _once(self, key: tuple, of, *arguments) -> np.ndarray:
        if key not in self.known:
            self.known[key] = of(*arguments)
        return self.known[key]

    def _node(self, v: int) -> np.ndarray:
        costs, ops = self.formulation.problem.node_costs[v], self.formulation.graph.ops
        parts = np.zeros((len(costs), self.num))
        if v < len(ops) and ops[v].kind in (OFFLOADED, RELOADED):  # beside all of these, on a stream of the host
            return parts
        parts[:, 0] = costs
        if v < len(ops) and not ops[v].is_placeholder and ops[v].kind != KEPT:
            inside = self.formulation.microbatches * self._internal(v)
            parts[:, 0] = np.maximum(costs - inside.sum(axis=1), 0.0)
            parts += inside @ self.to_link
            for k, busy in self._in_stages(v):
                parts[k, -1] = max(parts[k, 0] - self.formulation.microbatches * busy, 0.0)
                parts[k, 0] -= parts[k, -1]
            if v in self.early:
                full = replicated(len(self.formulation.mesh.axes))
                sharded = [candidate.outputs[0] != full for candidate in self.formulation.candidates.of[v]]
                parts[sharded, EARLY], parts[sharded, 0] = parts[sharded, 0], 0.0
        return parts

    def _in_stages(self, v: int) -> Iterator[tuple[int, float]]:
        """The choices of op v that compute while they send, and the seconds of their kernels."""
        graph, mesh = self.formulation.graph, self.formulation.mesh
        for k, candidate in enumerate(self.formulation.candidates.of[v]):
            if stages := op_stages(graph.ops[v], graph.input_tensors(v), candidate, mesh):
                yield k, sum(one.seconds for one in stages if one.axis < 0)

    def _internal(self, v: int) -> np.ndarray:
        """Seconds of the collectives inside op v, once: (choices, 1 + axes)."""
        graph, mesh = self.formulation.graph, self.formulation.mesh
        inside = np.zeros((len(self.formulation.candidates.of[v]), 1 + len(mesh.axes)))
        for k, candidate in enumerate(self.formulation.candidates.of[v]):
            for one in priced(internal_collectives(graph.ops[v], graph.input_tensors(v), candidate.inputs, mesh), mesh):
                inside[k, one.axis + 1] += one.seconds
        return inside

    def _updates(self, link: TensorEdge) -> bool:
        ops = self.formulation.graph.ops
        return self.joined and link.b < len(ops) and ops[link.b].is_placeholder

    def _edge(self, link: TensorEdge, table: np.ndarray) -> np.ndarray:
        sources, targets, cells = distinct(link.source_layouts, link.target_layouts)
        tensor, routes = link.tensor, self.formulation.routes
        parts = stream_table(routes, tensor.shape, tensor.itemsize, sources, targets, joined=self._updates(link))[cells]
        return link.times * np.where(np.isfinite(table)[..., None], parts, 0.0) @ self.to_link
