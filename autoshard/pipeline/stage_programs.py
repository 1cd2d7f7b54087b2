"""The program of one stage: layers a ... b - 1 of a chain, forward and backward, with values from other stages as inputs.

    received    values produced in a lower layer (forward) or a higher one (backward) and read here: placeholders of kind input, tangent
    sent        values produced here and read in another stage: results of kind output
    local       parameters, buffers and inputs that the stage reads, the gradients and results that it computes

Ops of no layer (masks, rotary tables) are computed in every stage that reads them. A parameter that several stages read (tied
embeddings) is held by each of them; its gradient is summed within a stage, and the sums are added between the stages once per step.
The program of a stage doesn't contain the adds across stages (`partial_gradients`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from autoshard.graph import Graph, Op, Result, Value, recompute
from autoshard.pipeline.layers import Layers

SAME_ELEMENTS = ("aten._to_copy.", "aten.t.", "aten.transpose.", "aten.permute.", "aten.view.", "aten.detach.")


@dataclass(frozen=True, eq=False)
class StageProgram:
    """Layers first ... last - 1 as a separate Graph."""

    graph: Graph
    first: int
    last: int
    received: tuple[tuple[str, Value], ...]  # placeholder here, value of the full program
    sent: tuple[tuple[str, Value], ...]  # result here, value of the full program
    forward: tuple[tuple[int, ...], ...]  # per unit its forward ops, as indexes of the stage's graph

    @cached_property
    def signature(self) -> str:
        """Equal for stages that are the same program up to the names of their tensors."""
        digest = hashlib.sha256()
        for op in self.graph.ops:
            digest.update(repr((op.target, op.inputs, op.literals, op.outputs, op.kind, op.alias, op.backward)).encode())
        for result in self.graph.results:
            digest.update(repr((result.kind, result.value, self.graph.index.get(result.name, -1))).encode())
        return digest.hexdigest()

    def recomputed(self) -> StageProgram:
        """The stage where the backward pass recomputes every unit's inner activations; the unit that computes the loss keeps its."""
        at_end = {value for result in self.graph.results for value in [result.value] if result.kind == "output" and value is not None}
        sent = {self.graph.results[k].value for k in range(len(self.graph.results)) if self.graph.results[k].name.startswith("send:")}
        blocks = [ops for ops in self.forward if not any((i, 0) in at_end - sent for i in ops)]
        graph = recompute(self.graph, blocks)
        return replace(self, graph=graph)


def stage_program(layers: Layers, first: int, last: int) -> StageProgram:
    """The program of layers first ... last - 1. ValueError if there are no such layers."""
    if not 0 <= first < last <= layers.count:
        raise ValueError(f"layers {first} to {last} of {layers.count}; expected 0 <= first < last <= {layers.count}")
    return _Extraction(layers, first, last).program()


@dataclass(frozen=True)
class Crossing:
    """Bytes of one microbatch that cross the boundary before each layer (0 at index 0 and L)."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]


def crossing_bytes(layers: Layers) -> Crossing:
    """The bytes sent over each boundary; the stages between forward a value for a later stage than the next."""
    graph, of = layers.graph, layers.of
    partial = partial_gradients(layers)
    spans: dict[tuple[bool, Value], tuple[int, int]] = {}  # (backward, storage) -> lowest and highest layer
    for i, op in enumerate(graph.ops):
        for value in op.inputs:
            a = value[0]
            if of[i] >= 0 and of[a] >= 0 and of[a] != of[i] and i not in partial:
                key = (graph.ops[a].backward, graph.storage(value))
                low, high = spans.get(key, (layers.count, -1))
                spans[key] = (min(low, of[i], of[a]), max(high, of[i], of[a]))
    crossing = {False: [0.0] * (layers.count + 1), True: [0.0] * (layers.count + 1)}
    for (backward, storage), (low, high) in spans.items():
        for boundary in range(low + 1, high + 1):
            crossing[backward][boundary] += graph.tensor(storage).bytes
    return Crossing(tuple(crossing[False]), tuple(crossing[True]))


def partial_gradients(layers: Layers) -> dict[int, str]:
    """The ops that add the gradients of a shared parameter over layers, with the parameter's name."""
    graph, of = layers.graph, layers.of
    adds: dict[int, str] = {}
    for result in graph.results:
        if result.kind != "gradient" or result.value is None or result.name not in layers.shared:
            continue
        waiting = [result.value[0]]
        while waiting:
            i = waiting.pop()
            op = graph.ops[i]
            if op.target == "aten.add.Tensor" and len(op.inputs) == 2:
                if len({of[a] for a, _ in op.inputs}) > 1:
                    adds[i] = result.name
                waiting += [a for a, _ in op.inputs]
            elif op.backward and len(op.inputs) == 1 and op.target.startswith(SAME_ELEMENTS):
                waiting.append(op.inputs[0][0])
    return adds


class _Extraction:
    """One stage's program. `place` maps values of the full program to values of the stage's."""

    def __init__(self, layers: Layers, first: int, last: int):
        self.layers, self.graph, self.first, self.last = layers, layers.graph, first, last
        self.units = layers.units
        self.partial = partial_gradients(layers)
        self.members = [i for i, layer in enumerate(layers.of) if first <= layer < last]
        self.of_stage = set(self.members)

    def program(self) -> StageProgram:
        graph = self.graph
        skipped = {i: [v for v in graph.ops[i].inputs if v[0] in self.of_stage] for i in self.members if i in self.partial}
        skipped = {i: local for i, local in skipped.items() if len(local) == 1}  # the other summand is in another stage
        read = [v for i in self.members if i not in skipped for v in graph.ops[i].inputs]
        free = self._free(read)
        views = self._views(read, free)
        free = self._free([*read, *(v for i in views for v in graph.ops[i].inputs)])
        read += [v for i in views for v in graph.ops[i].inputs]
        computed = {*self.of_stage, *free, *views}
        placeholders = sorted({v[0] for v in read if graph.ops[v[0]].is_placeholder})
        outside = sorted({v for v in read if v[0] not in computed and not graph.ops[v[0]].is_placeholder})
        outside.sort(key=lambda v: (graph.ops[v[0]].backward, v))
        ops: list[Op] = []
        place: dict[Value, Value] = {}

        def add(i: int, op: Op) -> None:
            for k in range(len(op.outputs)):
                place[i, k] = (len(ops), k)
            ops.append(op)

        for i in placeholders:
            add(i, graph.ops[i])
        received = []
        for value in outside:
            op = graph.ops[value[0]]
            name = f"recv:{op.name}" + (f".{value[1]}" if value[1] else "")
            place[value] = (len(ops), 0)
            kind = "tangent" if op.backward else "input"
            ops.append(Op(name, kind, (), ((), ()), (graph.tensor(value),), kind, backward=False))
            received.append((name, value))
        forward: dict[int, list[int]] = {unit: [] for unit in range(self.layers.starts[self.first], self.layers.starts[self.last])}
        for i in sorted(computed):
            op = graph.ops[i]
            if i in skipped:
                place[i, 0] = place[skipped[i][0]]
                continue
            if i in self.of_stage and not op.backward:
                forward[self.units.of[i]].append(len(ops))
            add(i, replace(op, inputs=tuple(place[v] for v in op.inputs)))
        results, sent = self._results(place, ops)
        stage = Graph(tuple(ops), tuple(results), tuple(pair for pair in graph.tied if all(any(o.name == n for o in ops) for n in pair)))
        return StageProgram(stage, self.first, self.last, tuple(received), tuple(sent), tuple(tuple(ops_) for ops_ in forward.values()))

    def _views(self, values: Iterable[Value], free: set[int]) -> set[int]:
        """Views that another stage computes of received values: they are computed here too, so that a storage is received once."""
        views: set[int] = set()
        waiting = [v[0] for v in values]
        while waiting:
            i = waiting.pop()
            op = self.graph.ops[i]
            if i not in self.of_stage and i not in free and i not in views and self._is_view(i):
                views.add(i)
                waiting.append(op.inputs[0][0])
        return views

    def _is_view(self, i: int) -> bool:
        op = self.graph.ops[i]
        return op.alias == 0 and len(op.inputs) == 1

    def _free(self, values: Iterable[Value]) -> set[int]:
        """The ops of no layer that these values need."""
        needed: set[int] = set()
        waiting = [v[0] for v in values]
        while waiting:
            i = waiting.pop()
            if self.layers.of[i] < 0 and not self.graph.ops[i].is_placeholder and i not in needed:
                needed.add(i)
                waiting += [a for a, _ in self.graph.ops[i].inputs]
        return needed

    def _results(self, place: dict[Value, Value], ops: list[Op]) -> tuple[list[Result], list[tuple[str, Value]]]:
        graph, held = self.graph, {op.name for op in ops if op.is_placeholder}
        results: list[Result] = []
        sent: list[tuple[str, Value]] = []
        for i in self.members:
            for k in range(len(graph.ops[i].outputs)):
                readers = self._readers_outside((i, k))
                summed = [j for j, _ in graph.users.get((i, k), ()) if j not in self.of_stage and j in self.partial]  # not of views
                names = dict.fromkeys(self.partial[j] for j in summed)
                results += [Result("gradient", name, place[i, k]) for name in names if name in held]
                if any(j not in self.partial for j in readers):
                    name = f"send:{graph.ops[i].name}" + (f".{k}" if k else "")
                    results.append(Result("output", name, place[i, k]))
                    sent.append((name, (i, k)))
        for result in graph.results:
            value = result.value
            if value is not None and value[0] in self.of_stage:
                results.append(replace(result, value=place[value]))
        return results, sent

    def _readers_outside(self, value: Value) -> list[int]:
        """Ops of other stages that read the value, also through views. Of a view, only adds of gradients, if its base can be sent."""
        if self._is_view(value[0]) and not self.graph.ops[self.graph.ops[value[0]].inputs[0][0]].is_placeholder:
            return [j for j, _ in self.graph.users.get(value, ()) if j in self.partial and j not in self.of_stage]
        readers, waiting = [], [value]
        while waiting:
            for j, _ in self.graph.users.get(waiting.pop(), ()):
                if self._is_view(j):
                    waiting.append((j, 0))
                if j not in self.of_stage and self.layers.of[j] >= 0 and not self._is_view(j):
                    readers.append(j)
        return readers
