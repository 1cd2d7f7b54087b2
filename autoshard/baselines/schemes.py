"""The four schemes, each as the classes that every mesh axis cuts.

| scheme        | last axis                           | other axes | parameters                              |
|---------------|-------------------------------------|------------|-----------------------------------------|
| data_parallel | batch                               | batch      | whole                                   |
| fsdp          | batch                               | batch      | cut over all axes, gathered at each use |
| megatron      | heads, hidden features, vocabulary  | batch      | as their classes, whole over the others |
| megatron_sp   | the same, and the residual sequence | batch      | the same                                |

The last axis of more than one device is the fastest; on a mesh with one such axis Megatron leaves the batch whole. Every
op is pinned, so the solver only completes hubs and results: each plan IS its scheme, and is found at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import combinations

from autoshard.baselines.classes import DimClasses, dim_classes, number_slots
from autoshard.baselines.megatron import Recognised, from_parameters, recognise, sequence_class, token_tables
from autoshard.baselines.pins import FIRST, SECOND, Coder, Cuts, Pin, settle
from autoshard.graph import Graph, Value
from autoshard.layout import Layout, replicated, shards_of
from autoshard.mesh import Mesh
from autoshard.strategies import Candidates

NOTHING: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Baseline:
    """A scheme as pins by op name; `matched` says in words what was found in the graph."""

    name: str
    pins: dict[str, Pin]
    matched: str


@dataclass(frozen=True, eq=False)
class AxisCut:
    """What one mesh axis cuts: classes with their priorities."""

    classes: DimClasses
    priority: Mapping[int, int]


AxisCuts = Mapping[int, AxisCut]  # by axis; an axis that is left out cuts nothing


@dataclass(frozen=True, eq=False)
class Batch:
    """The class of the batch dim, None where there is none, and the number that every dim of it is a multiple of."""

    classes: DimClasses
    root: int | None
    size: int


def baselines(graph: Graph, mesh: Mesh, candidates: Candidates) -> tuple[Baseline, ...]:
    """data_parallel, fsdp, megatron and megatron_sp; each pin is a candidate of its op."""
    slots = number_slots(graph, candidates)
    classes = dim_classes(slots)
    root = _batch_class(graph, classes)
    batch = Batch(classes, root, math.gcd(*(n for n, of in zip(slots.sizes, classes.roots, strict=True) if of == root)))
    coder = Coder(candidates)

    def scheme(name: str, said: str, cut: AxisCuts, fixed: Mapping[int, Layout], carried: frozenset[int] = NOTHING) -> Baseline:
        return Baseline(name, settle(graph, coder, _wanted(graph, mesh, cut), fixed, carried), said)

    axes = _axes(mesh)
    cut, said = _cut_batch(mesh, axes, batch)
    whole = {i: replicated(len(mesh.axes)) for i in graph.parameters.values()}
    sharded = {i: _most_cut(candidates, mesh, i) for i in graph.parameters.values()}
    views = frozenset(i for i in from_parameters(graph) if len(graph.ops[i].inputs) == 1)
    made = [
        scheme("data_parallel", said, cut, whole),
        scheme("fsdp", f"{said}; {_sharded_in_words(mesh, sharded)}", cut, sharded, views),
    ]

    if not axes:
        return (*made, scheme("megatron", "one device", {}, {}), scheme("megatron_sp", "one device", {}, {}))
    last, size = axes[-1], mesh.axes[axes[-1]].size
    cut, said = _cut_batch(mesh, axes[:-1], batch)
    narrow = dim_classes(slots, size)
    of_batch = frozenset(narrow.roots[slot] for slot, of in enumerate(classes.roots) if of == root)
    found = recognise(graph, narrow, slots.sizes, size, of_batch)
    undivided = recognise(graph, classes, slots.sizes, 1, frozenset([root] if root is not None else []))
    said = f"{_recognised_in_words(graph, found, undivided, last, size)}; {said}"
    tensor = {c: FIRST for c in found.classes}
    made.append(scheme("megatron", said, {**cut, last: AxisCut(narrow, tensor)}, {}))
    sequence = sequence_class(graph, classes, narrow, found, root, size)
    if sequence is None:
        note = f"no sequence dim that divides by {size} in the residual stream: as megatron"
        return (*made, Baseline("megatron_sp", made[-1].pins, f"{said}; {note}"))
    both = AxisCut(narrow, {sequence: SECOND, **tensor})
    return (*made, scheme("megatron_sp", f"{said}; residual sequence cut over axis {last}", {**cut, last: both}, {}))


def _axes(mesh: Mesh) -> list[int]:
    return [k for k, axis in enumerate(mesh.axes) if axis.size > 1]


def _batch_class(graph: Graph, classes: DimClasses) -> int | None:
    """The class of most inputs' dim 0 (the larger class among equals) that no parameter has; None when there is none."""
    of_parameters = {classes.of((i, 0), d) for i in graph.parameters.values() for d in range(len(graph.tensor((i, 0)).shape))}
    votes: dict[int, int] = {}
    for i, op in enumerate(graph.ops):
        if op.kind == "input" and graph.tensor((i, 0)).shape[:1] > (1,):
            c = classes.of((i, 0), 0)
            votes[c] = votes.get(c, 0) + 1
    return max(votes.keys() - of_parameters, key=lambda c: (votes[c], classes.roots.count(c), -c), default=None)


def _cut_batch(mesh: Mesh, axes: list[int], batch: Batch) -> tuple[dict[int, AxisCut], str]:
    """The batch cut over those of `axes` that together divide it best (the fastest among equals), and that in words."""
    if not axes or batch.root is None:
        return {}, "batch whole" if batch.root is not None else "no batch dim found"

    def devices(subset: tuple[int, ...]) -> int:
        return math.prod(mesh.axes[k].size for k in subset)

    subsets = [s for n in range(len(axes) + 1) for s in combinations(axes, n)]
    chosen = max((s for s in subsets if not batch.size % devices(s)), key=lambda s: (devices(s), s))
    said = f"batch cut over {_axes_in_words(chosen)}" if chosen else "batch whole"
    if left := [k for k in axes if k not in chosen]:
        said += f" ({batch.size} does not divide{' further' if chosen else ''}: compute is repeated over {_axes_in_words(left)})"
    return {k: AxisCut(batch.classes, {batch.root: FIRST}) for k in chosen}, said


def _wanted(graph: Graph, mesh: Mesh, cut: AxisCuts) -> Callable[[Value], Cuts]:
    """value -> for every axis and dim the priority with which it is cut; placeholders heed FIRST only."""
    made: dict[Value, Cuts] = {}

    def wanted(value: Value) -> Cuts:
        if value not in made:
            rank, least = len(graph.tensor(value).shape), FIRST if graph.ops[value[0]].is_placeholder else SECOND
            rows = [cut[k].classes.cuts(value, rank, cut[k].priority) if k in cut else (0,) * rank for k in range(len(mesh.axes))]
            made[value] = tuple(tuple(p if p >= least else 0 for p in row) for row in rows)
        return made[value]

    return wanted


def _most_cut(candidates: Candidates, mesh: Mesh, index: int) -> Layout:
    """The layout of a parameter in the most parts, over as few dims as can be, the first dims first."""

    def order(layout: Layout) -> tuple:
        dims = [p.dim for p in layout if p.is_shard()]  # type: ignore[attr-defined]
        return (_parts(layout, mesh), -len(set(dims)), [-d for d in dims])

    return max((c.outputs[0] for c in candidates.of[index] if c.outputs[0] is not None), key=order)


def _parts(layout: Layout, mesh: Mesh) -> int:
    return math.prod(shards_of(layout, mesh, d) for d in {p.dim for p in layout if p.is_shard()})  # type: ignore[attr-defined]


def _axes_in_words(axes: tuple[int, ...] | list[int]) -> str:
    return ("axis " if len(axes) == 1 else "axes ") + ",".join(map(str, axes))


def _sharded_in_words(mesh: Mesh, sharded: Mapping[int, Layout]) -> str:
    few = sum(_parts(layout, mesh) < mesh.num_devices for layout in sharded.values())
    return f"{len(sharded) - few} of {len(sharded)} parameters cut over all axes" + (" (the others' dims do not divide)" if few else "")


def _recognised_in_words(graph: Graph, found: Recognised, undivided: Recognised, axis: int, size: int) -> str:
    roles = (("column", found.column), ("row", found.row), ("head", found.head))
    counted = ", ".join(f"{len(matmuls)} {role}" for role, matmuls in roles if matmuls)
    done = {m for _, matmuls in roles for m in matmuls}
    said = f"recognised {len(done)} of {len(found.matmuls)} parameter matmuls" + (f" ({counted})" if counted else "")
    said += f" for axis {axis} of {size}"
    if found.tables:
        said += f", {len(found.tables)} token table{'s' * (len(found.tables) > 1)} cut by vocabulary"
    if uneven := {*undivided.column, *undivided.row} - done:
        said += f"; {len(uneven)} more stay whole: their heads or features do not divide by {size}"
    lengths = [length for table, length in token_tables(graph).items() if table not in found.tables]
    return said + (f"; the vocabulary of {lengths[0]} does not divide by {size}: table and head stay whole" if lengths else "")
