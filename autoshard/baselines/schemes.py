"""The four schemes, each as the classes that every mesh axis cuts.

| scheme        | dp axes | last axis                           | parameters                        |
|---------------|---------|-------------------------------------|-----------------------------------|
| data_parallel | batch   | batch                               | whole                             |
| fsdp          | batch   | batch                               | cut over all axes, gathered at each use |
| megatron      | batch   | heads, hidden features, vocabulary  | as their classes, whole over dp   |
| megatron_sp   | batch   | the same, and the residual sequence | the same                          |

The last axis of more than one device is the fastest; on a mesh with one such axis Megatron leaves the batch whole.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import combinations

from autoshard.baselines.classes import DimClasses, Slots, dim_classes, number_slots
from autoshard.baselines.megatron import Recognised, from_parameters, recognise, sequence_class, token_tables
from autoshard.baselines.pins import Coder, Cuts, Pin, settle
from autoshard.graph import Graph, Value
from autoshard.layout import Layout, replicated, shards_of
from autoshard.mesh import Mesh
from autoshard.strategies import Candidates

FIRST, SECOND = 2, 1  # priorities: of batch and tensor parallel classes, of the sequence


@dataclass(frozen=True)
class Baseline:
    """A scheme as pins by op name; `matched` says in words what was found in the graph."""

    name: str
    pins: dict[str, Pin]
    matched: str


@dataclass(frozen=True, eq=False)
class _AxisCut:
    """What one mesh axis cuts: classes with their priorities."""

    classes: DimClasses
    priority: dict[int, int]


def baselines(graph: Graph, mesh: Mesh, candidates: Candidates) -> tuple[Baseline, ...]:
    """data_parallel, fsdp, megatron and megatron_sp; each pin is a candidate of its op."""
    slots = number_slots(graph, candidates)
    classes = dim_classes(slots)
    coder = Coder(candidates)
    batch = _batch_class(graph, slots, classes)
    return (
        *_data_parallel(graph, mesh, slots, classes, coder, batch),
        *_megatron(graph, mesh, slots, classes, coder, batch),
    )


def _batch_class(graph: Graph, slots: Slots, classes: DimClasses) -> int | None:
    """The class of most inputs' dim 0 (the larger class among equals) that no parameter has; None when there is none."""
    of_parameters = {c for i in graph.parameters.values() for c in _classes_of(graph, classes, (i, 0))}
    votes: dict[int, int] = {}
    for i, op in enumerate(graph.ops):
        if op.kind == "input" and op.outputs[0] is not None and op.outputs[0].shape and op.outputs[0].shape[0] > 1:
            c = classes.of((i, 0), 0)
            votes[c] = votes.get(c, 0) + (c not in of_parameters)
    members = {c: classes.roots.count(c) for c in votes}
    best = max(votes, key=lambda c: (votes[c], members[c]), default=None)
    return best if best is not None and votes[best] else None


def _classes_of(graph: Graph, classes: DimClasses, value: Value) -> list[int]:
    return [classes.of(value, d) for d in range(len(graph.tensor(value).shape))]


def _batch_axes(mesh: Mesh, axes: list[int], size: int) -> tuple[int, ...]:
    """The axes whose sizes together divide `size` best, the fastest among equals."""
    subsets = [s for n in range(len(axes) + 1) for s in combinations(axes, n) if not size % math.prod(mesh.axes[k].size for k in s)]
    return max(subsets, key=lambda s: (math.prod(mesh.axes[k].size for k in s), s))


def _cut_batch(mesh: Mesh, axes: list[int], slots: Slots, classes: DimClasses, batch: int | None) -> tuple[dict[int, _AxisCut], str]:
    """The batch cut over as many of `axes` as divide it, and that in words."""
    if batch is None:
        return {}, "no batch dim found"
    size = math.gcd(*(n for n, root in zip(slots.sizes, classes.roots, strict=True) if root == batch))
    chosen = _batch_axes(mesh, axes, size)
    names = ",".join(str(k) for k in chosen)
    said = f"batch cut over axes {names}" if chosen else "batch whole"
    if left := [k for k in axes if k not in chosen]:
        said += f" ({size} does not divide further: compute is repeated over axes {','.join(map(str, left))})"
    return {k: _AxisCut(classes, {batch: FIRST}) for k in chosen}, said


def _wanted(graph: Graph, mesh: Mesh, cut: dict[int, _AxisCut]):
    """value -> for every axis and dim the priority with which it is cut. Placeholders lie as the first priority says."""
    made: dict[Value, Cuts] = {}

    def wanted(value: Value) -> Cuts:
        if value not in made:
            rank, least = len(graph.tensor(value).shape), FIRST if graph.ops[value[0]].is_placeholder else SECOND
            rows = [cut[k].classes.cuts(value, rank, cut[k].priority) if k in cut else (0,) * rank for k in range(len(mesh.axes))]
            made[value] = tuple(tuple(p if p >= least else 0 for p in row) for row in rows)
        return made[value]

    return wanted


def _data_parallel(graph: Graph, mesh: Mesh, slots: Slots, classes: DimClasses, coder: Coder, batch: int | None) -> list[Baseline]:
    cut, said = _cut_batch(mesh, _axes(mesh), slots, classes, batch)
    wanted = _wanted(graph, mesh, cut)
    whole = replicated(len(mesh.axes))
    everywhere = {i: whole for i in graph.parameters.values()}
    plain = Baseline("data_parallel", settle(graph, coder, wanted, everywhere, frozenset()), said)

    sharded = {i: _most_cut(coder.candidates, mesh, i) for i in graph.parameters.values()}
    few = sum(_parts(layout) < len(_axes(mesh)) for layout in sharded.values())
    views = frozenset(i for i in from_parameters(graph) if len(graph.ops[i].inputs) == 1)
    note = f"; {few} of {len(sharded)} parameters are not cut over all axes (no dim divides)" if few else ""
    return [plain, Baseline("fsdp", settle(graph, coder, wanted, sharded, views), said + "; parameters cut" + note)]


def _axes(mesh: Mesh) -> list[int]:
    return [k for k, axis in enumerate(mesh.axes) if axis.size > 1]


def _parts(layout: Layout) -> int:
    return sum(p.is_shard() for p in layout)  # type: ignore[attr-defined]


def _most_cut(candidates: Candidates, mesh: Mesh, index: int) -> Layout:
    """The layout of a parameter in the most parts, over as few dims as can be, the first dims first."""

    def order(layout: Layout) -> tuple:
        dims = [p.dim for p in layout if p.is_shard()]  # type: ignore[attr-defined]
        return (math.prod(shards_of(layout, mesh, d) for d in set(dims)), -len(set(dims)), [-d for d in dims])

    return max((c.outputs[0] for c in candidates.of[index] if c.outputs[0] is not None), key=order)


def _megatron(graph: Graph, mesh: Mesh, slots: Slots, classes: DimClasses, coder: Coder, batch: int | None) -> list[Baseline]:
    axes = _axes(mesh)
    cut, said = _cut_batch(mesh, axes[:-1], slots, classes, batch) if len(axes) > 1 else ({}, "batch whole")
    if not axes:
        pins = settle(graph, coder, _wanted(graph, mesh, {}), {}, frozenset())
        return [Baseline(name, pins, "one device") for name in ("megatron", "megatron_sp")]
    last, size = axes[-1], mesh.axes[axes[-1]].size
    narrow = dim_classes(slots, size)
    of_batch = frozenset(narrow.roots[s] for s, root in enumerate(classes.roots) if root == batch)
    found = recognise(graph, narrow, slots.sizes, size, of_batch)
    said = f"{_in_words(graph, found, last, size)}; {said}"
    tensor = {c: FIRST for c in found.classes}
    pins = settle(graph, coder, _wanted(graph, mesh, {**cut, last: _AxisCut(narrow, tensor)}), {}, frozenset())
    sequence = sequence_class(graph, classes, narrow, found, frozenset() if batch is None else frozenset([batch]), size)
    if sequence is None:
        note = f"no sequence dim that divides by {size} in the residual stream: as megatron"
        return [Baseline("megatron", pins, said), Baseline("megatron_sp", pins, f"{said}; {note}")]
    wanted = _wanted(graph, mesh, {**cut, last: _AxisCut(narrow, {sequence: SECOND, **tensor})})
    return [
        Baseline("megatron", pins, said),
        Baseline("megatron_sp", settle(graph, coder, wanted, {}, frozenset()), f"{said}; residual sequence cut over axis {last}"),
    ]


def _in_words(graph: Graph, found: Recognised, axis: int, size: int) -> str:
    roles = (("column", found.column), ("row", found.row), ("head", found.head))
    counted = ", ".join(f"{len(matmuls)} {role}" for role, matmuls in roles if matmuls)
    done = sum(len(matmuls) for _, matmuls in roles)
    said = f"recognised {done} of {len(found.matmuls)} parameter matmuls" + (f" ({counted})" if counted else "") + f" on axis {axis}"
    if found.tables:
        said += f", {len(found.tables)} token table{'s' * (len(found.tables) > 1)} cut by vocabulary"
    uneven = [length for table, length in token_tables(graph).items() if table not in found.tables]
    return said + (f"; the vocabulary of {uneven[0]} does not divide by {size}: table and head stay whole" if uneven else "")
