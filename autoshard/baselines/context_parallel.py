"""Context parallelism: the sequence of long attention is sharded over the mesh axes that the batch doesn't divide further.

| scheme                    | keys and values                                                    | as in                                 |
|---------------------------|--------------------------------------------------------------------|---------------------------------------|
| context_parallel_gather   | gathered; each rank attends to all of them                         | Llama 3                               |
| context_parallel_ring     | sent round the axes                                                | ring attention, torchtitan            |
| context_parallel_ulysses  | heads for tokens by all_to_all, over the last axes as far as the   | DeepSpeed Ulysses; with a ring over   |
|                           | key-value heads divide; round the other axes                       | the other axes, USP                   |

Parameters are sharded over all axes and gathered at each use, as in fsdp.
"""

import math
from dataclasses import dataclass

from autoshard.baselines.pins import FIRST, Pin
from autoshard.baselines.setting import AxisSharding, Baseline, Setting, once
from autoshard.layout import Layout, R, S
from autoshard.mesh import Mesh
from autoshard.strategies import BACKWARD, FORWARD, is_long

CONTEXT_PARALLEL = ("context_parallel_gather", "context_parallel_ring", "context_parallel_ulysses")
SEQUENCE, HEADS = 2, 1


@dataclass(frozen=True)
class RingPins:
    """What the schemes have in common: the pins of a ring, and where it runs."""

    pins: dict[str, Pin]
    words: str
    attention: list[int]  # ops
    axes: tuple[int, ...]


def context_parallel(s: Setting, name: str) -> Baseline | None:
    """None where no attention is long, or no axis is left for its sequence."""
    ring = ring_of(s)
    return None if ring is None else Baseline(name, {**ring.pins, **_attention(s, ring, name)}, ring.words)


@once
def ring_of(s: Setting) -> RingPins | None:
    graph, mesh = s.graph, s.mesh
    attention = [i for i, op in enumerate(graph.ops) if op.target in (FORWARD, BACKWARD) and is_long(op, graph.input_tensors(i))]
    sharding, words = s.data_parallel
    axes = tuple(k for k in s.axes if k not in sharding)
    if not attention or not axes:
        return None
    queries = graph.ops[attention[0]].inputs[int(graph.ops[attention[0]].target == BACKWARD)]
    if graph.tensor(queries).shape[SEQUENCE] % math.prod(mesh.shape[k] for k in axes):
        return None
    root = s.classes.of(queries, SEQUENCE)
    pins = s.pins(s.wanted({**sharding, **{k: AxisSharding(s.classes, {root: FIRST}) for k in axes}}), s.with_casts(s.shards), s.views)
    words = f"{words}; sequence sharded over {'axis' if len(axes) == 1 else 'axes'} {','.join(map(str, axes))}"
    return RingPins(pins, words, attention, axes)


def _attention(s: Setting, ring: RingPins, name: str) -> dict[str, Pin]:
    """The pins of attention; those of a ring where the scheme has no candidate."""
    pins: dict[str, Pin] = {}
    known: dict[tuple[int, int], Pin] = {}
    for i in ring.attention:
        op, options, pin = s.graph.ops[i], s.candidates.of[i], ring.pins[s.graph.ops[i].name]
        if (id(options), id(pin)) not in known:
            first = int(op.target == BACKWARD)
            assert pin.inputs is not None
            q, k = (layout for layout in pin.inputs[first : first + 2])
            heads = s.graph.input_tensors(i)[first + 1].shape[HEADS]
            wanted = _layouts(s.mesh, q, k, ring.axes, heads, name)
            fitting = [c for c in options if wanted == c.inputs[first : first + 2]]
            known[id(options), id(pin)] = Pin(fitting[0].outputs, fitting[0].inputs) if fitting else pin
        pins[op.name] = known[id(options), id(pin)]
    return pins


def _layouts(mesh: Mesh, q: Layout | None, k: Layout | None, axes: tuple[int, ...], heads: int, name: str) -> tuple[Layout, Layout] | None:
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
