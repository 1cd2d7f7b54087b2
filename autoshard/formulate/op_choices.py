"""The layouts and bytes of the choices of every op: its candidates. Ops of one signature share them."""

import numpy as np

from autoshard.formulate.records import Layouts
from autoshard.formulate.tables import Tables
from autoshard.graph import Graph, Value
from autoshard.strategies import Candidates, internal_bytes


class OpChoices:
    """Per op and choice; each is computed when it is first asked for, and kept in tables that graphs on one mesh may share."""

    def __init__(self, graph: Graph, candidates: Candidates, tables: Tables):
        self.graph, self.candidates, self.tables = graph, candidates, tables
        self.lists = [tables.number(options) for options in candidates.of]
        seen: dict[tuple, int] = {}
        self.first = [seen.setdefault((self.lists[i], graph.signature(i)), i) for i in range(len(graph.ops))]  # op like it
        self._bytes: dict[int, np.ndarray] = {}
        self._internal_bytes: dict[int, np.ndarray | None] = {}

    def outputs(self, value: Value) -> Layouts:
        """Layouts of a value, per choice of the op that produces it."""
        i, k = value
        options = self.candidates.of[i]
        return self.tables.once(("outputs", self.lists[i], k), lambda: tuple(c.outputs[k] for c in options))  # type: ignore[misc]

    def inputs(self, i: int, a: int) -> Layouts:
        """Layouts in which op i reads its input a, per choice."""
        options = self.candidates.of[i]
        return self.tables.once(("inputs", self.lists[i], a), lambda: tuple(c.inputs[a] for c in options))

    def bytes(self, i: int) -> np.ndarray:
        """Bytes of the outputs of op i, per choice."""
        first = self.first[i]
        if first not in self._bytes:
            outputs = [(k, t) for k, t in enumerate(self.graph.ops[i].outputs) if t is not None]
            self._bytes[first] = np.sum([self.tables.bytes(t, self.outputs((i, k))) for k, t in outputs], axis=0)
        return self._bytes[first]

    def internal_bytes(self, i: int) -> np.ndarray | None:
        """Bytes that the local program of op i holds besides its inputs and outputs, per choice; None where all of them are 0."""
        first = self.first[i]
        if first not in self._internal_bytes:
            op, inputs = self.graph.ops[i], self.graph.input_tensors(i)
            sizes = [internal_bytes(op, inputs, c.inputs, self.tables.mesh) for c in self.candidates.of[i]]
            self._internal_bytes[first] = np.array(sizes, dtype=float) if any(sizes) else None
        return self._internal_bytes[first]
