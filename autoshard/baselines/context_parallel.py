"""Context parallelism: the sequence of long attention is sharded over the mesh axes that the batch doesn't divide further.

| scheme                    | keys and values                                                    | as in                                 |
|---------------------------|--------------------------------------------------------------------|---------------------------------------|
| context_parallel_gather   | gathered; each rank attends to all of them                         | Llama 3                               |
| context_parallel_ring     | sent round the axes                                                | ring attention, torchtitan            |
| context_parallel_ulysses  | heads for tokens by all_to_all, over the last axes as far as the   | DeepSpeed Ulysses; with a ring over   |
|                           | key-value heads divide; round the other axes                       | the other axes, USP                   |

Parameters are sharded over all axes and gathered at each use, as in fsdp.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from autoshard.baselines.classes import dim_classes, number_slots
from autoshard.baselines.megatron import from_parameters
from autoshard.baselines.pins import FIRST, Pin, settle
from autoshard.baselines.schemes import (
    AxisSharding,
    Baseline,
    Batch,
    most_sharded,
    reduced_before,
    shard_batch,
    used_axes,
    wanted_priorities,
)
from autoshard.graph import Graph
from autoshard.layout import Layout, R, S
from autoshard.mesh import Mesh
from autoshard.strategies import BACKWARD, FORWARD, Candidates, is_long

CONTEXT_PARALLEL = ("context_parallel_gather", "context_parallel_ring", "context_parallel_ulysses")
SEQUENCE, HEADS = 2, 1


def context_parallel(graph: Graph, mesh: Mesh, candidates: Candidates, names: tuple[str, ...] = CONTEXT_PARALLEL) -> tuple[Baseline, ...]:
    """The schemes, or some of them; none where no attention is long, or no axis is left for its sequence."""
    attention = [i for i, op in enumerate(graph.ops) if op.target in (FORWARD, BACKWARD) and is_long(op, graph.input_tensors(i))]
    if not attention or not used_axes(mesh):
        return ()
    slots = number_slots(graph, candidates)
    classes = dim_classes(slots)
    sharding, words = shard_batch(mesh, used_axes(mesh), Batch.of(graph, slots, classes))
    axes = tuple(k for k in used_axes(mesh) if k not in sharding)
    first = attention[0]
    queries = graph.ops[first].inputs[int(graph.ops[first].target == BACKWARD)]
    if not axes or graph.tensor(queries).shape[SEQUENCE] % math.prod(mesh.shape[k] for k in axes):
        return ()
    root = classes.of(queries, SEQUENCE)
    sharding |= {k: AxisSharding(classes, {root: FIRST}) for k in axes}
    shards = {i: most_sharded(candidates.of[i], mesh, range(len(mesh.axes))) for i in graph.parameters.values()}
    fixed = {**shards, **{cast: shards[i] for cast, i in reduced_before(graph).items()}}
    views = frozenset(i for i in from_parameters(graph) if len(graph.ops[i].inputs) == 1)
    ring = settle(graph, candidates, wanted_priorities(graph, mesh, sharding), fixed, views)
    words = f"{words}; sequence sharded over {'axis' if len(axes) == 1 else 'axes'} {','.join(map(str, axes))}"
    return tuple(Baseline(name, {**ring, **_attention(graph, mesh, candidates, attention, ring, axes, name)}, words) for name in names)


def _attention(
    graph: Graph, mesh: Mesh, candidates: Candidates, attention: list[int], ring: Mapping[str, Pin], axes: tuple[int, ...], name: str
) -> dict[str, Pin]:
    """The pins of attention; those of a ring where the scheme has no candidate."""
    pins: dict[str, Pin] = {}
    known: dict[tuple[int, int], Pin] = {}
    for i in attention:
        op, pin = graph.ops[i], ring[graph.ops[i].name]
        if (id(candidates.of[i]), id(pin)) not in known:
            first = int(op.target == BACKWARD)
            assert pin.inputs is not None
            q, k = (layout for layout in pin.inputs[first : first + 2])
            heads = graph.input_tensors(i)[first + 1].shape[HEADS]
            wanted = _layouts(mesh, q, k, axes, heads, name)
            fitting = [c for c in candidates.of[i] if wanted == c.inputs[first : first + 2]]
            known[id(candidates.of[i]), id(pin)] = Pin(fitting[0].outputs, fitting[0].inputs) if fitting else pin
        pins[op.name] = known[id(candidates.of[i]), id(pin)]
    return pins


def _layouts(
    mesh: Mesh, q: Layout | None, k: Layout | None, axes: tuple[int, ...], heads: int, name: str
) -> tuple[Layout, Layout] | None:
    """Of queries and keys under a scheme; from those of a ring."""
    if q is None or k is None:
        return None
    if name.endswith("gather"):
        return q, tuple(R if axis in axes else p for axis, p in enumerate(k))
    if name.endswith("ring"):
        return q, k
    exchanged, left = set(), heads
    for axis in reversed(axes):
        if left % mesh.shape[axis] == 0:
            exchanged.add(axis)
            left //= mesh.shape[axis]
    both = tuple(tuple(S(HEADS) if axis in exchanged else p for axis, p in enumerate(layout)) for layout in (q, k))
    return both[0], both[1]
