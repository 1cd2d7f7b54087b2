"""A graph that is made from another one op by op: ops are kept, put in or left out, and what they read is renumbered."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from autoshard.graph.records import Graph, Op, Result, Value


class Rewriting:
    """The new graph so far.

    values: by value of the source, the new one. late: by value of the source, what readers of a second kind read instead, such as the
    ops of the backward pass.
    """

    def __init__(self, source: Graph):
        self.source = source
        self.ops: list[Op] = []
        self.values: dict[Value, Value] = {}
        self.late: dict[Value, Value] = {}

    def read(self, value: Value, late: bool = False) -> Value:
        """The new value in place of one of the source."""
        return self.late[value] if late and value in self.late else self.values[value]

    def add(self, op: Op) -> Value:
        """Appends an op, whose inputs are new values; returns its first output."""
        self.ops.append(op)
        return (len(self.ops) - 1, 0)

    def keep(self, i: int, late: bool = False, **changes: Any) -> None:
        """Appends op i of the source with these changes; its inputs are those of the source by default."""
        op = self.source.ops[i]
        changes.setdefault("inputs", tuple([self.read(value, late) for value in op.inputs]))
        at, _ = self.add(replace(op, **changes))
        for k in range(len(op.outputs)):
            self.values[i, k] = (at, k)

    def graph(self, ends: Mapping[Result, Value] | None = None, late: bool = False) -> Graph:
        """The graph with the source's results. ends: the new values of those that are others than what ops read."""
        ends = ends or {}
        results = tuple(r if r.value is None else replace(r, value=ends.get(r) or self.read(r.value, late)) for r in self.source.results)
        return Graph(tuple(self.ops), results, self.source.tied, self.source.called)
