"""A graph whose sequence is in head-tail order (`graph.order`) inside, and which computes what it computed before.

    to        a value that an op computes in the natural order and others read in head-tail order: one op reorders it
    back      the reverse, for ops that need the natural order and for results
    natural   the ops that read the natural order. All others read values as they are computed, or reordered

Causal attention that isn't among the natural ops gets the number of parts as an argument, from which it knows the positions of its
tokens. The graph's inputs and results stay in the natural order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from autoshard.graph.records import Graph, Op, Ref, Value

ATTENTION = ("autoshard.attention.default", "autoshard.attention_backward.default")
REORDER = "autoshard.reorder.default"
Slot = tuple[str, int, int]  # name of an op, output, dim


@dataclass(frozen=True)
class SequenceOrder:
    """What differs in a graph whose sequence is in head-tail order."""

    head_tail: int  # parts
    to: tuple[Slot, ...]
    back: tuple[Slot, ...]
    natural: tuple[str, ...]  # names of ops

    def to_dict(self) -> dict[str, Any]:
        to, back = (list(map(list, slots)) for slots in (self.to, self.back))
        return {"head_tail": self.head_tail, "to": to, "back": back, "natural": list(self.natural)}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> SequenceOrder:
        """ValueError where the data is no order."""
        try:
            to, back = (tuple((str(name), int(k), int(dim)) for name, k, dim in data[key]) for key in ("to", "back"))
            return SequenceOrder(int(data["head_tail"]), to, back, tuple(map(str, data["natural"])))
        except (KeyError, TypeError, ValueError):
            raise ValueError(f"its sequence_order is {str(data)[:60]!r}; expected head_tail, to, back and natural") from None


def in_order(graph: Graph, order: SequenceOrder | None) -> Graph:
    """The graph in this order. ValueError where the order names an op that the graph doesn't have."""
    return graph if order is None else _Ordering(graph, order).graph()


class _Ordering:
    def __init__(self, graph: Graph, order: SequenceOrder):
        unknown = [name for name in (*(slot[0] for slot in (*order.to, *order.back)), *order.natural) if name not in graph.index]
        if unknown:
            raise ValueError(f"the plan's order of the sequence names {unknown[0]!r}, which the model doesn't have; plan again")
        self.source, self.order, self.natural = graph, order, frozenset(order.natural)
        self.dims: dict[Value, tuple[int, bool]] = {}
        for slots, back in ((order.to, False), (order.back, True)):
            self.dims |= {(graph.index[name], k): (dim, back) for name, k, dim in slots}
        self.ops: list[Op] = []
        self.places: list[int] = []
        self.reordered: dict[Value, int] = {}

    def graph(self) -> Graph:
        waiting: list[int] = []  # placeholders to reorder, behind all placeholders
        for i, op in enumerate(self.source.ops):
            if not op.is_placeholder:
                for j in waiting:
                    self._reorder(j)
                waiting = []
            self.places.append(len(self.ops))
            self.ops.append(self._rewired(op))
            if op.is_placeholder:
                waiting.append(i)
            else:
                self._reorder(i)
        results = tuple(r if r.value is None else replace(r, value=self._read(r.value, natural=True)) for r in self.source.results)
        return Graph(tuple(self.ops), results, self.source.tied)

    def _rewired(self, op: Op) -> Op:
        natural = op.name in self.natural
        literals = op.literals
        if op.target in ATTENTION and not natural:
            args, kwargs = literals
            literals = (args, tuple(sorted((*kwargs, ("head_tail", self.order.head_tail)))))
        return replace(op, inputs=tuple(self._read(value, natural=natural) for value in op.inputs), literals=literals)

    def _read(self, value: Value, *, natural: bool) -> Value:
        if value in self.dims and self.dims[value][1] == natural:
            return self.reordered[value], 0
        return self.places[value[0]], value[1]

    def _reorder(self, i: int) -> None:
        """Adds the ops that reorder outputs of op i."""
        op = self.source.ops[i]
        for k, tensor in enumerate(op.outputs):
            if (i, k) in self.dims and tensor is not None:
                dim, back = self.dims[i, k]
                name = f"{op.name}.{'natural' if back else 'head_tail'}{k or ''}"
                literals = ((Ref(0), dim, self.order.head_tail, back), ())
                late = op.backward or op.kind == "tangent"
                self.reordered[i, k] = len(self.ops)
                self.ops.append(Op(name, REORDER, ((self.places[i], k),), literals, (tensor,), module=op.module, backward=late))
