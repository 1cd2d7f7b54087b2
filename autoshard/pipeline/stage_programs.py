"""The program of one stage: layers a ... b - 1 of a chain, forward and backward, with values from other stages as inputs.

    received    values produced in a lower layer (forward) or a higher one (backward) and read here: placeholders of kind input, tangent
    sent        values produced here and read in another stage: results of kind output
    local       parameters, buffers and inputs that the stage reads, the gradients and results that it computes

Ops of no layer (masks, rotary tables) are computed in every stage that reads them. A parameter that several stages read (tied
embeddings) is held by each of them; its gradient is summed within a stage, and the sums are added between the stages once per step.
The program of a stage doesn't contain the adds across stages (`partial_gradients`).

Of a saved pipeline: the programs of its stages with their layouts, as `lower` runs them.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from autoshard.graph import Graph, Op, Result, Rewriting, Value, hash_of, reached, recompute
from autoshard.pipeline.layers import Layers, layers_of
from autoshard.pipeline.microbatches import batch_of
from autoshard.pipeline.schedules import Schedule, schedule_of
from autoshard.solution import RECEIVED, SENT, Pipeline, PipelineStage, PipelineToRun, StageToRun
from autoshard.torch_private import pytree

SAME_ELEMENTS = ("aten._to_copy.", "aten.t.", "aten.transpose.", "aten.permute.", "aten.view.", "aten.detach.")


@dataclass(frozen=True, eq=False)
class StageProgram:
    """Some layers as a separate Graph."""

    graph: Graph
    forward: tuple[tuple[int, ...], ...]  # per unit its forward ops, as indexes of the stage's graph

    @cached_property
    def signature(self) -> str:
        """Equal for stages that are the same program up to the names of their tensors."""
        ops = ((op.target, op.inputs, op.literals, op.outputs, op.kind, op.alias, op.backward) for op in self.graph.ops)
        return hash_of(*ops, *((r.kind, r.value, self.graph.index.get(r.name, -1)) for r in self.graph.results))

    def recomputed(self) -> "StageProgram":
        """The stage where the backward pass recomputes every unit's inner activations; the unit that computes the loss keeps its."""
        sent = {result.value for result in self.graph.results if result.name.startswith(SENT)}
        at_end = {result.value for result in self.graph.results if result.kind == "output"} - sent
        blocks = [ops for ops in self.forward if not any((i, 0) in at_end for i in ops)]
        return replace(self, graph=recompute(self.graph, blocks))

    def halved(self) -> "StageProgram":
        """The stage in the order of a schedule that splits the backward pass: the `second_half` comes last."""
        new, late = Rewriting(self.graph), set(second_half(self.graph))
        for i in sorted(range(len(self.graph.ops)), key=lambda i: (i in late, i)):
            new.keep(i)
        return replace(self, graph=new.graph())


def second_half(graph: Graph) -> list[int]:
    """The backward ops of a stage on which nothing depends that is sent on."""
    first = {result.value[0] for result in graph.results if result.name.startswith(SENT) and result.value is not None}
    for i in reversed(range(len(graph.ops))):
        if i in first:
            first |= {a for a, _ in graph.ops[i].inputs}
    return [i for i, op in enumerate(graph.ops) if op.backward and i not in first]


def stage_program(layers: Layers, first: int, last: int, *, recompute: bool = False, halved: bool = False) -> StageProgram:
    """The program of layers first ... last - 1, `recomputed` or not, `halved` or not. ValueError if there are no such layers."""
    if not 0 <= first < last <= layers.count:
        raise ValueError(f"layers {first} to {last} of {layers.count}; expected 0 <= first < last <= {layers.count}")
    program = _Extraction(layers, first, last).program()
    program = program.recomputed() if recompute else program
    return program.halved() if halved else program


def crossing_bytes(layers: Layers) -> tuple[list[float], list[float]]:
    """The bytes of one microbatch that are sent over the boundary before each layer (0 at index 0 and L), forward and backward; the stages
    between forward a value for a later stage than the next."""
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
    return crossing[False], crossing[True]


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
        views = self._views(read, self._free(read))
        read += [v for i in views for v in graph.ops[i].inputs]
        computed = {*self.of_stage, *self._free(read), *views}
        placeholders = sorted({v[0] for v in read if graph.ops[v[0]].is_placeholder})
        received = {v for v in read if v[0] not in computed and not graph.ops[v[0]].is_placeholder}
        ops: list[Op] = []
        place: dict[Value, Value] = {}

        def add(i: int, op: Op) -> None:
            place.update({(i, k): (len(ops), k) for k in range(len(op.outputs))})
            ops.append(op)

        for i in placeholders:
            add(i, graph.ops[i])
        for value in sorted(received, key=lambda v: (graph.ops[v[0]].backward, v)):
            kind = "tangent" if graph.ops[value[0]].backward else "input"
            place[value] = (len(ops), 0)
            ops.append(Op(self._name(RECEIVED, value), kind, (), ((), ()), (graph.tensor(value),), kind, backward=False))
        forward: dict[int, list[int]] = {unit: [] for unit in range(self.layers.starts[self.first], self.layers.starts[self.last])}
        for i in sorted(computed):
            op = graph.ops[i]
            if i in skipped:
                place[i, 0] = place[skipped[i][0]]
                continue
            if i in self.of_stage and not op.backward:
                forward[self.units.of[i]].append(len(ops))
            add(i, replace(op, inputs=tuple(place[v] for v in op.inputs)))
        names = {op.name for op in ops}
        tied = tuple(pair for pair in graph.tied if names.issuperset(pair))
        return StageProgram(Graph(tuple(ops), tuple(self._results(place, ops)), tied), tuple(map(tuple, forward.values())))

    def _name(self, prefix: str, value: Value) -> str:
        """Of a placeholder or result that is a value of another stage, or for one."""
        return prefix + self.graph.ops[value[0]].name + (f".{value[1]}" if value[1] else "")

    def _views(self, values: Iterable[Value], free: set[int]) -> set[int]:
        """Views that another stage computes of received values: they are computed here too, so that a storage is received once."""
        again = reached(
            (i for i, _ in values),
            lambda i: [self.graph.ops[i].inputs[0][0]],
            where=lambda i: i not in self.of_stage and i not in free and self._is_view(i),
        )
        return set(again)

    def _is_view(self, i: int) -> bool:
        op = self.graph.ops[i]
        return op.alias == 0 and len(op.inputs) == 1

    def _free(self, values: Iterable[Value]) -> set[int]:
        """The ops of no layer that these values need."""
        of, ops = self.layers.of, self.graph.ops
        free = reached(
            (i for i, _ in values),
            lambda i: (a for a, _ in ops[i].inputs),
            where=lambda i: of[i] < 0 and not ops[i].is_placeholder,
        )
        return set(free)

    def _results(self, place: dict[Value, Value], ops: list[Op]) -> list[Result]:
        graph, held = self.graph, {op.name for op in ops if op.is_placeholder}
        results: list[Result] = []
        for value in [(i, k) for i in self.members for k in range(len(graph.ops[i].outputs))]:
            readers = self._readers_outside(value)
            summed = [j for j, _ in graph.users.get(value, ()) if j not in self.of_stage and j in self.partial]  # not of views
            names = dict.fromkeys(self.partial[j] for j in summed)
            results += [Result("gradient", name, place[value]) for name in names if name in held]
            if any(j not in self.partial for j in readers):
                results.append(Result("output", self._name(SENT, value), place[value]))
        mine = [result for result in graph.results if result.value is not None and result.value[0] in self.of_stage]
        return [*results, *(replace(result, value=place[result.value]) for result in mine if result.value is not None)]

    def _readers_outside(self, value: Value) -> list[int]:
        """Ops of other stages that read the value, also through views. Of a view, only adds of gradients: others compute it again."""
        if self._is_view(value[0]):
            return [j for j, _ in self.graph.users.get(value, ()) if j in self.partial and j not in self.of_stage]
        users, ops = self.graph.users, self.graph.ops
        views = reached([value], lambda v: ((j, k) for j, _ in users.get(v, ()) if self._is_view(j) for k in range(len(ops[j].outputs))))
        readers = (j for v in views for j, _ in users.get(v, ()))
        return [j for j in readers if j not in self.of_stage and self.layers.of[j] >= 0 and not self._is_view(j)]


def to_run(pipeline: Pipeline, graph: Graph, names: Iterable[str], example_inputs: Any) -> PipelineToRun:
    """The stages of `pipeline` in the program of one microbatch of the model.

    names: of the leaves of example_inputs, those of the full batch. ValueError where the plan is of another model or has no layouts.
    """
    layers = layers_of(graph, pipeline.assumptions.get("layers_asked"))
    if layers.count != (planned := pipeline.stages[-1].last):
        raise ValueError(f"the pipeline is of another model: it has {planned} layers, this model {layers.count}; plan this model")
    stages = tuple(_stage(stage_program(layers, s.first, s.last, recompute=s.recompute), s) for s in pipeline.stages)
    order = tuple(tuple((kind, k, stage) for kind, stage, k in units) for units in schedule_of_plan(pipeline).units)
    batch, leaves = batch_of(example_inputs), pytree.tree_leaves(example_inputs)
    pairs = zip(names, leaves, strict=True)
    split = frozenset(name for name, x in pairs if isinstance(x, torch.Tensor) and x.dim() and x.shape[0] == batch)
    return PipelineToRun(stages, order, pipeline.microbatches, pipeline.mesh.num_devices, split, pipeline.training)


def schedule_of_plan(pipeline: Pipeline) -> Schedule:
    return schedule_of(pipeline.schedule, pipeline.num_groups, pipeline.microbatches, len(pipeline.stages) // pipeline.num_groups)


def _stage(program: StageProgram, stage: PipelineStage) -> StageToRun:
    if stage.prices is None or not stage.layouts:
        raise ValueError("this pipeline has no layouts to run; plan it again with this version")
    missing = [op.name for op in program.graph.ops if op.name not in stage.layouts]
    if missing:
        raise ValueError(
            f"the pipeline is of another model: stage {stage.first} to {stage.last - 1} has no layouts for {missing[0]!r} and "
            f"{len(missing) - 1} more of this model; plan this model"
        )
    layouts = {op.name: stage.layouts[op.name] for op in program.graph.ops}
    return StageToRun(_sent_by_pass(program.graph), layouts, stage.prices, stage.devices, stage.group)


def _sent_by_pass(graph: Graph) -> Graph:
    """The graph with what the backward pass sends on among the gradients."""
    results = []
    for result in graph.results:
        backward = result.name.startswith(SENT) and result.value is not None and graph.ops[result.value[0]].backward
        results.append(replace(result, kind="gradient") if backward else result)
    return replace(graph, results=tuple(results))


def with_schedule(pipeline: Pipeline, name: str) -> Pipeline:
    """The same stages under another schedule. ValueError where it doesn't fit their number per device group."""
    chunks = len(pipeline.stages) // pipeline.num_groups
    schedule_of(name, pipeline.num_groups, pipeline.microbatches, chunks)  # raises
    if name == "interleaved_1f1b" and chunks < 2:
        raise ValueError("interleaved_1f1b needs two or more stages per device group, this pipeline has one; plan it with that schedule")
    return replace(pipeline, schedule=name)
