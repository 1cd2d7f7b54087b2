"""The layers of a captured program: a chain of groups of ops, between which the program can be divided into pipeline stages.

The forward ops, in the order of the program, are divided at positions that few bytes cross. With C(r) = bytes of the values that are
produced before position r and read after it, flops(a, b) of the ops between two positions and the mean over the layers,

    G(q, r) = min over a of  max(G(q - 1, a), C(a))   with flops(a, r) <= (1 + eps) mean; of equals the evenest     (`clustered`)

(Alpa, section 5.2). The positions are the boundaries of repeated blocks and the local minima of C. Ops that depend on no input and no
parameter (masks, rotary tables) belong to no layer: every stage computes its own copy. A view of a parameter or an input (a weight
transposed) belongs to the layer of the first op that reads it.

A backward op belongs to the lowest layer among the gradients that it reads; it belongs to a lower one if it also reads a parameter or
a forward value that only a lower layer uses, or if only the gradient of a lower layer's parameter needs it (a sum of what arrives, for
the bias at a layer's end). A backward op that reads no gradient belongs to the layer of its inputs or, if several layers use these, to
the layer that reads its output (`_backward_layers`). Layers are merged if a forward value would flow to a lower
layer, or a backward value to a higher one (`_merged`).

A layer may hold several blocks, or one with light ops before or after it. The single blocks, and what is beside them, are the units of the
layers (`Layers.units`): most of them are equal programs, of which one has to be planned.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np

from autoshard.cost import op_flops
from autoshard.graph import Graph, Value, repeated_blocks

EPS = 0.5  # how much more than the mean a layer may compute
MOST_POSITIONS = 160  # if there are more, only those that the fewest bytes cross are considered
MOST_LAYERS = 96  # if there are more repeated blocks, several of them make a layer
LAYERS_WITHOUT_BLOCKS = 16
HEAVY = 0.5  # ops before or after the blocks are a layer if they have at least this share of a block's FLOPs


@dataclass(frozen=True, eq=False)
class Layers:
    """A program and the layer of each op. -1: a placeholder, or an op that every stage computes itself."""

    graph: Graph
    of: tuple[int, ...]
    count: int
    flops: tuple[float, ...]  # of the forward ops of each layer
    finer: "Layers | None" = None  # the same program in units of which layers consist; None: layers are the units

    @property
    def units(self) -> "Layers":
        return self.finer or self

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """The first unit of each layer, and at the end the number of units."""
        layer_of = {unit: layer for unit, layer in zip(self.units.of, self.of) if unit >= 0}
        return (*(min(u for u, of in layer_of.items() if of == layer) for layer in range(self.count)), self.units.count)

    @cached_property
    def shared(self) -> dict[str, tuple[int, ...]]:
        """Parameters that several layers read, with those layers: their gradients have to be added across stages."""
        by_name = {}
        for name, i in self.graph.parameters.items():
            layers = sorted({self.of[j] for j, _ in self.graph.users.get((i, 0), ()) if not self.graph.ops[j].backward})
            if len(layers) > 1:
                by_name[name] = tuple(layers)
        return by_name


def layers_of(graph: Graph, count: int | None = None) -> Layers:
    """The graph as a chain of `count` layers or fewer. Default: a layer per repeated block, and one for as much beside them; else 16."""
    if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
        raise ValueError(f"layers is {count!r}; expected a whole number of 1 or more")
    free: set[int] = set()  # ops that depend on no placeholder
    forward = []
    for i, op in enumerate(graph.ops):
        if not op.is_placeholder and not op.backward:
            free.add(i) if all(a in free for a, _ in op.inputs) else forward.append(i)
    if not forward:
        raise ValueError("the program computes nothing that could be divided into stages")
    flops = [_flops(graph, i) for i in forward]
    crossing = _crossing_bytes(graph, forward)
    at_blocks, blocks = _block_boundaries(graph, forward, crossing, flops)
    positions = at_blocks if blocks else _thin_positions(crossing)
    wanted = count or (_blocks_and_heavy(at_blocks, flops, blocks) if blocks else LAYERS_WITHOUT_BLOCKS)
    if not count and wanted > MOST_LAYERS:
        wanted = -(-wanted // -(-wanted // MOST_LAYERS))
    if count and len(positions) < count:
        positions = sorted({*positions, *_thin_positions(crossing)})
    boundaries = clustered(flops, crossing, positions, wanted)
    layers = _divided(graph, forward, flops, boundaries)
    if not blocks or set(at_blocks) <= set(boundaries):
        return layers
    finer = _divided(graph, forward, flops, sorted({*at_blocks, *boundaries}))
    return replace(layers, finer=finer) if _consists_of(layers, finer) else layers


def _consists_of(layers: Layers, finer: Layers) -> bool:
    """Whether each of the finer layers is inside one layer, in the same order."""
    pairs = set(zip(finer.of, layers.of))
    inside = sorted(pair for pair in pairs if pair != (-1, -1))
    return len(inside) == finer.count and all(b[1] - a[1] in (0, 1) for a, b in pairwise(inside))


def _views(graph: Graph, forward: list[int]) -> dict[int, list[int]]:
    """The forward views of placeholders, last first, and what reads each in the forward."""
    views = [i for i in reversed(forward) if graph.ops[graph.storage((i, 0))[0]].is_placeholder]
    users = {i: [j for k in range(len(graph.ops[i].outputs)) for j, _ in graph.users.get((i, k), ())] for i in views}
    return {i: readers for i in views if (readers := [j for j in users[i] if not graph.ops[j].backward])}


def _divided(graph: Graph, forward: list[int], flops: list[float], boundaries: list[int]) -> Layers:
    of = [-1] * len(graph.ops)
    views = _views(graph, forward)
    computing = [at for at, i in enumerate(forward) if i not in views]
    boundaries = sorted({next((at for at in computing if at >= b), b) for b in boundaries} - set(computing[:1]))
    layer = 0
    for at, i in enumerate(forward):
        layer += layer < len(boundaries) and at == boundaries[layer]
        of[i] = layer
    for i, readers in views.items():
        of[i] = min(of[j] for j in readers)
    _backward_layers(graph, of, len(boundaries))
    of, total = _merged(graph, of, len(boundaries) + 1)
    sums = [0.0] * total
    for at, i in enumerate(forward):
        sums[of[i]] += flops[at]
    return Layers(graph, tuple(of), total, tuple(sums))


def clustered(flops: Sequence[float], crossing: Sequence[float], positions: Sequence[int], count: int, eps: float = EPS) -> list[int]:
    """At most count - 1 boundaries, a subset of the positions.

    crossing[r]: bytes that cross a boundary before item r. eps grows until there is a solution.
    """
    at = [0, *sorted({p for p in positions if 0 < p < len(flops)}), len(flops)]
    n, count = len(at) - 1, min(count, len(at) - 1)
    sums = np.concatenate([[0.0], np.cumsum(flops)])[at]
    bytes_at = np.array([0.0 if a in (0, len(flops)) else float(crossing[a]) for a in at])
    mean = max(float(sums[-1]) / count, 1e-30)
    work = sums[None, :] - sums[:, None]  # [a, r]
    grows = np.arange(n + 1)[:, None] < np.arange(n + 1)[None, :]
    while True:
        ok = grows & (work <= (1 + eps) * mean * (1 + 1e-12))
        widest, uneven = np.full(n + 1, math.inf), np.full(n + 1, math.inf)
        widest[0], uneven[0] = 0.0, 0.0
        back = []
        for _ in range(count):
            reach = np.where(ok, np.maximum(widest, bytes_at)[:, None], math.inf)
            spread = np.where(ok, uneven[:, None] + (work / mean) ** 2, math.inf)
            widest = reach.min(axis=0)
            spread = np.where(reach == widest[None, :], spread, math.inf)
            back.append(spread.argmin(axis=0))
            uneven = spread.min(axis=0)
        if widest[n] < math.inf:
            boundaries, r = [], n
            for choice in reversed(back):
                r = int(choice[r])
                boundaries.append(at[r])
            return sorted(boundaries)[1:]
        eps = 1.5 * eps + 0.1


def _flops(graph: Graph, i: int) -> float:
    op = graph.ops[i]
    if op.is_view:
        return 0.0
    outputs = [None if t is None else (t.shape, t.dtype) for t in op.outputs]
    return float(op_flops(op.target, [(t.shape, t.dtype) for t in graph.input_tensors(i)], outputs))


def _crossing_bytes(graph: Graph, forward: list[int]) -> list[float]:
    """C: bytes that cross a boundary before each forward op; a storage counts once, placeholders not at all."""
    place = {i: at for at, i in enumerate(forward)}
    last: dict[Value, int] = {}
    for at, i in enumerate(forward):
        for value in graph.ops[i].inputs:
            owner = graph.storage(value)
            if owner[0] in place:
                last[owner] = at
    change = [0.0] * (len(forward) + 1)
    for owner, end in last.items():
        change[place[owner[0]] + 1] += graph.tensor(owner).bytes
        change[end + 1 if end + 1 < len(change) else end] -= graph.tensor(owner).bytes
    return [float(x) for x in np.cumsum(change)]


def _thin_positions(crossing: list[float]) -> list[int]:
    """Local minima of the bytes that cross, the first of a plateau; those with fewest bytes where there are too many."""
    minima = [r for r in range(1, len(crossing) - 1) if crossing[r] < crossing[r - 1] and crossing[r] <= crossing[r + 1]]
    minima += [r for r in range(1, 2) if r < len(crossing) - 1 and r not in minima]
    return sorted(sorted(minima, key=lambda r: (crossing[r], r))[:MOST_POSITIONS])


def _block_boundaries(graph: Graph, forward: list[int], crossing: list[float], flops: list[float]) -> tuple[list[int], int]:
    """The boundaries of the instances of the repeated block with the most FLOPs, and the number of instances.

    A boundary is the position that the fewest bytes cross, near the end of one instance and the begin of the next. No blocks: ([], 0).
    """
    places = repeated_blocks(graph).places
    instances: dict[int, dict[int, list[int]]] = {}
    work: dict[int, float] = {}
    for at, i in enumerate(forward):
        place = places[i]
        if place is not None:
            instances.setdefault(place.block, {}).setdefault(place.instance, []).append(at)
            work[place.block] = work.get(place.block, 0.0) + flops[at]
    block = max(work, key=lambda b: (work[b], -b), default=None)
    if block is None or len(instances[block]) < 3 or work[block] < sum(flops) / 3:
        return [], 0
    largest = max(map(len, instances[block].values()))  # a repeated op after the last block (a norm) is no block
    spans = [(min(ats), max(ats)) for _, ats in sorted(instances[block].items()) if 2 * len(ats) > largest]
    if len(spans) < 3 or any(a[1] >= b[0] for a, b in zip(spans, spans[1:])):
        return [], 0
    length = spans[2][0] - spans[1][0]

    def boundary(nominal: int) -> int:
        near = range(max(1, nominal - length // 2), min(len(forward) - 1, nominal + length // 2) + 1)
        return min(near, key=lambda r: (crossing[r], abs(r - nominal), r), default=1)

    shift = boundary(spans[1][0]) - spans[1][0]  # instances may begin within a layer
    boundaries = [boundary(start + shift) for start in [*(low for low, _ in spans), spans[-1][0] + length]]
    return sorted(set(boundaries)), len(spans)


def _blocks_and_heavy(boundaries: list[int], flops: list[float], blocks: int) -> int:
    """The number of layers: the blocks, and the ops before and after them where they have at least HEAVY of a block's FLOPs."""
    sums = np.concatenate([[0.0], np.cumsum(flops)])
    one = (sums[boundaries[-1]] - sums[boundaries[0]]) / blocks
    before, after = sums[boundaries[0]], sums[-1] - sums[boundaries[-1]]
    return blocks + int(before >= HEAVY * one) + int(after >= HEAVY * one)


def _backward_layers(graph: Graph, of: list[int], last: int) -> None:
    """Writes the layers of backward ops into `of`, in the order of the program."""
    homes: dict[Value, int | None] = {}  # of a forward value or parameter: its layer, None where several use it

    def home(value: Value) -> int | None:
        if value not in homes:
            layers = {of[j] for j, _ in graph.users.get(value, ()) if not graph.ops[j].backward and of[j] >= 0}
            if not graph.ops[value[0]].is_placeholder:
                layers.add(of[value[0]])
            homes[value] = next(iter(layers)) if len(layers) == 1 else None
        return homes[value]

    flows: set[int] = set()  # ops that depend on a gradient
    waiting: list[int] = []  # ops without a gradient whose inputs several layers use: they run in the layer that reads them
    for i, op in enumerate(graph.ops):
        if op.kind == "tangent":
            flows.add(i)
        if not op.backward or op.is_placeholder:
            continue
        sure = [home(v) for v in op.inputs if v[0] not in flows and (of[v[0]] >= 0 or graph.ops[v[0]].is_placeholder)]
        known = [layer for layer in sure if layer is not None]
        if any(a in flows for a, _ in op.inputs):
            flows.add(i)
            gradients = [of[a] for a, _ in op.inputs if a in flows and of[a] >= 0]
            of[i] = min([*gradients, max(known)]) if known and gradients else min([*gradients, *known], default=last)
            continue
        for k in range(len(op.outputs)):
            homes[i, k] = max(known) if known and len(known) == len(sure) else None
        of[i] = -1 if homes[i, 0] is None else max(known)
        waiting += [i] if of[i] < 0 else []
    for i in reversed(waiting):
        forward = [of[a] for a, _ in graph.ops[i].inputs if not graph.ops[a].backward]
        of[i] = max([*(of[j] for j, _ in graph.users.get((i, 0), ()) if of[j] >= 0), *forward], default=last)
        of[i] = last if of[i] < 0 else of[i]

    def needs(value: Value) -> int:
        """The layer without which what reads this value can't be computed; of a gradient none, as gradients are sent down."""
        layer = -1 if value[0] in flows else home(value)
        return of[value[0]] if layer is None else layer

    for result in graph.results:
        if result.kind == "gradient" and result.value is not None and result.name in graph.parameters:
            layer = home((graph.parameters[result.name], 0))
            if layer is not None:
                _lower_to(graph, of, result.value[0], layer, needs)


def _lower_to(graph: Graph, of: list[int], i: int, layer: int, needs: Callable[[Value], int]) -> None:
    """Moves a backward op, and the ops that only it needs, down to a layer. An op that needs a value of a higher layer stays there, and so
    does the sum of several gradients, which is sent as one."""
    waiting = [i]
    while waiting:
        i = waiting.pop()
        op = graph.ops[i]
        readers = [j for k in range(len(op.outputs)) for j, _ in graph.users.get((i, k), ())]
        arriving = [a for a, _ in op.inputs if graph.ops[a].backward and of[a] > layer]
        stays = readers and (len(arriving) > 1 or any(needs(value) > layer for value in op.inputs))
        if op.backward and not op.is_placeholder and of[i] > layer and all(of[j] <= layer for j in readers) and not stays:
            of[i] = layer
            waiting += [a for a, _ in op.inputs]


def _merged(graph: Graph, of: list[int], count: int) -> tuple[list[int], int]:
    """Merges layers between which a value would flow in the wrong direction: a forward value down, a backward value up. What is written
    into a buffer flows to all that read the buffer, in the next microbatch."""
    joined = [False] * count  # joined[l]: layer l belongs to l - 1
    for i, op in enumerate(graph.ops):
        if of[i] < 0:
            continue
        for a, _ in op.inputs:
            low, high = (of[i], of[a]) if not graph.ops[a].backward else (of[a], of[i])
            if 0 <= low < high and of[a] >= 0:
                joined[low + 1 : high + 1] = [True] * (high - low)
    for name, value in ((result.name, result.value) for result in graph.results if result.kind == "buffer"):
        ends = [value[0]] if value else []
        ends += [j for j, _ in graph.users.get((graph.index[name], 0), ()) if not graph.ops[j].backward]
        layers = [of[i] for i in ends if of[i] >= 0] or [0]
        joined[min(layers) + 1 : max(layers) + 1] = [True] * (max(layers) - min(layers))
    number = list(np.cumsum([not j for j in joined]) - 1)
    return [int(number[layer]) if layer >= 0 else -1 for layer in of], int(number[-1]) + 1
