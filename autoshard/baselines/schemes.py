"""The usual schemes, each described by the dimension classes that every mesh axis shards.

| scheme        | last axis                           | other axes | parameters                                    |
|---------------|-------------------------------------|------------|-----------------------------------------------|
| data_parallel | batch                               | batch      | replicated                                    |
| fsdp          | batch                               | batch      | sharded over all axes, gathered at each use   |
| megatron      | heads, hidden features, vocabulary  | batch      | as their classes, replicated over other axes  |
| megatron_sp   | the same, and the residual sequence | batch      | the same                                      |

The last axis of more than one device is the fastest. On a mesh with one such axis Megatron doesn't shard the batch. Every op is
pinned, so the solver only chooses the layouts of hubs and results, which takes no search.

The stages of ZeRO shard the batch as fsdp does. They differ in what a device holds, and so in what it sends; `sharded` is over all axes:

| scheme        | parameters, optimizer | kept copies (graph.accumulation) | sums of gradients                              |
|---------------|-----------------------|----------------------------------|------------------------------------------------|
| data_parallel | replicated            | replicated                       | partial: reduced once per step (DDP, no_sync)  |
| zero1         | sharded               | replicated                       | partial: reduced once per step                 |
| zero2         | sharded               | replicated                       | sharded: reduced in every microbatch           |
| zero3         | sharded               | sharded: gathered for every use  | sharded                                        |
| hsdp          | over the last axis    | as the parameter, gathered for every use | over the last axis, partial over the others |

fsdp is zero3 in which a parameter may be gathered once for its uses in forward and backward, where that is faster. A step of one
microbatch has neither copies nor sums: its zero1 and zero2 are the same, a parameter gathered once for all its uses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import combinations

from autoshard.baselines.classes import DimClasses, Slots, dim_classes, number_slots
from autoshard.baselines.megatron import Recognised, from_parameters, recognise, sequence_class, token_tables
from autoshard.baselines.pins import FIRST, SECOND, Pin, Priorities, settle
from autoshard.graph import ACCUMULATED, KEPT, REDUCE_THEN_CAST, Graph, Op, Value
from autoshard.layout import Layout, replicated, shards_of
from autoshard.mesh import Mesh
from autoshard.strategies import Candidate, Candidates, is_experts

NOTHING: frozenset[int] = frozenset()
SCHEMES = ("data_parallel", "fsdp", "megatron", "megatron_sp")
ZERO = ("zero1", "zero2", "zero3", "hsdp")
SHARDED_MEGATRON = "megatron_fsdp"
MEGATRON_EXPERTS = "megatron_experts"  # megatron with the experts over the last axis too
MEGATRON_EXPERT_PARALLEL = "megatron_expert_parallel"  # over all axes: tokens are sent by all_to_all over those that shard the batch


@dataclass(frozen=True)
class Baseline:
    """A scheme as pins by op name; `matched` says in words what was recognised in the graph."""

    name: str
    pins: dict[str, Pin]
    matched: str
    hubs: Mapping[Value, Layout] = field(default_factory=dict)  # in which several readers read a value; those not named are free


@dataclass(frozen=True, eq=False)
class AxisSharding:
    """The classes that one mesh axis shards, with their priorities."""

    classes: DimClasses
    priority: Mapping[int, int]


AxisShardings = Mapping[int, AxisSharding]  # by axis; an axis that is left out shards nothing


@dataclass(frozen=True, eq=False)
class Batch:
    """The class of the batch dim, None where there is none, and the number that every dim of it is a multiple of."""

    classes: DimClasses
    root: int | None
    size: int

    @staticmethod
    def of(graph: Graph, slots: Slots, classes: DimClasses) -> Batch:
        root = _batch_class(graph, classes)
        return Batch(classes, root, math.gcd(*(n for n, of in zip(slots.sizes, classes.roots, strict=True) if of == root)))


def baselines(graph: Graph, mesh: Mesh, candidates: Candidates) -> tuple[Baseline, ...]:
    """data_parallel, fsdp, megatron and megatron_sp; each pin is a candidate of its op. `zero_stages` has the others."""
    schemes = _schemes(graph, mesh, candidates)
    return tuple(schemes[name]() for name in SCHEMES)


def baseline(graph: Graph, mesh: Mesh, candidates: Candidates, name: str) -> Baseline:
    """One of the baselines; megatron_fsdp: megatron_sp with parameters that are sharded over the other axes too, as torchtitan does; or
    megatron_experts, megatron_expert_parallel: megatron with sharded experts, as engines serve them.

    ValueError for another name.
    """
    schemes = _schemes(graph, mesh, candidates)
    if name not in schemes:
        raise ValueError(f"there is no scheme {name!r} on this mesh; expected one of {', '.join(schemes)}")
    return schemes[name]()


def _schemes(graph: Graph, mesh: Mesh, candidates: Candidates) -> dict[str, Callable[[], Baseline]]:
    """By name, each settled when it is called: that takes seconds on a graph of 30,000 ops."""
    slots = number_slots(graph, candidates)
    classes = dim_classes(slots)
    batch = Batch.of(graph, slots, classes)

    def scheme(name: str, words: str, sharding: AxisShardings, fixed: Mapping[int, Layout], carried: frozenset[int] = NOTHING) -> Baseline:
        fixed = {**fixed, **{cast: fixed[i] for cast, i in reduced_before(graph).items() if i in fixed}}
        return Baseline(name, settle(graph, candidates, wanted_priorities(graph, mesh, sharding), fixed, carried), words)

    axes = used_axes(mesh)
    sharding, words = shard_batch(mesh, axes, batch)
    copies = {i: replicated(len(mesh.axes)) for i in graph.parameters.values()}
    shards = {i: most_sharded(candidates.of[i], mesh, range(len(mesh.axes))) for i in graph.parameters.values()}
    views = frozenset(i for i in from_parameters(graph) if len(graph.ops[i].inputs) == 1)
    data = partial(scheme, "data_parallel", words, sharding, copies)
    fsdp = partial(scheme, "fsdp", f"{words}; {_sharded_in_words(mesh, shards)}", sharding, shards, views)
    if not axes:
        names = (*SCHEMES[2:], MEGATRON_EXPERTS, MEGATRON_EXPERT_PARALLEL)
        return {"data_parallel": data, "fsdp": fsdp, **{name: partial(scheme, name, "one device", {}, {}) for name in names}}

    of_batch_alone, last, size = sharding, axes[-1], mesh.axes[axes[-1]].size
    sharding, words = shard_batch(mesh, axes[:-1], batch)
    narrow = dim_classes(slots, size)
    of_batch = frozenset(narrow.roots[slot] for slot, of in enumerate(classes.roots) if of == batch.root)
    recognised = recognise(graph, narrow, slots.sizes, size, of_batch)
    undivided = recognise(graph, classes, slots.sizes, 1, frozenset([batch.root] if batch.root is not None else []))
    words = f"{_recognised_in_words(graph, recognised, undivided, last, size)}; {words}"
    tensor = {c: FIRST for c in recognised.classes}
    megatron = cache(partial(scheme, "megatron", words, {**sharding, last: AxisSharding(narrow, tensor)}, {}))
    by_tensor = {**sharding, last: AxisSharding(narrow, tensor)}
    over_all = of_batch_alone if mesh.shape[-1] == 1 else by_tensor  # whose tensor axis is the last one, of one device perhaps
    served = {
        MEGATRON_EXPERTS: partial(scheme, MEGATRON_EXPERTS, words, _with_experts(graph, by_tensor, (last,)), {}),
        MEGATRON_EXPERT_PARALLEL: partial(scheme, MEGATRON_EXPERT_PARALLEL, words, _with_experts(graph, over_all, axes), {}),
    }
    sequence = sequence_class(graph, classes, narrow, recognised, batch.root, size)
    if sequence is None:
        note = f"{words}; no sequence dim that divides by {size} in the residual stream: as megatron"
        return {**_named(data, fsdp, megatron, lambda: Baseline("megatron_sp", megatron().pins, note)), **served}
    both = {**sharding, last: AxisSharding(narrow, {sequence: SECOND, **tensor})}
    words = f"{words}; residual sequence sharded over axis {last}"
    with_sequence = cache(partial(scheme, "megatron_sp", words, both, {}))

    def sharded() -> Baseline:
        pinned = {i: with_sequence().pins[graph.ops[i].name].outputs for i in graph.parameters.values()}
        fixed = {i: fully_sharded(candidates, i, last, outputs[0]) for i, outputs in pinned.items() if outputs and outputs[0] is not None}
        return scheme(SHARDED_MEGATRON, f"{words}; parameters sharded over the other axes", both, fixed, views)

    return {**_named(data, fsdp, megatron, with_sequence), SHARDED_MEGATRON: sharded, **served}


def _with_experts(graph: Graph, sharding: AxisShardings, axes: Sequence[int]) -> AxisShardings:
    """The classes, and on these axes also those of the dims of parameters that number the experts."""
    parameters = [value for op in graph.ops if is_experts(op) and "backward" not in op.target for value in op.inputs[3:]]

    def of(axis: int, one: AxisSharding) -> AxisSharding:
        experts = {one.classes.of(value, 0): FIRST for value in parameters if axis in axes}
        return AxisSharding(one.classes, {**one.priority, **experts})

    return {axis: of(axis, one) for axis, one in sharding.items()}


def _named(*schemes: Callable[[], Baseline]) -> dict[str, Callable[[], Baseline]]:
    """In the order of SCHEMES."""
    return dict(zip(SCHEMES, schemes, strict=True))


def fully_sharded(candidates: Candidates, index: int, axis: int, layout: Layout) -> Layout:
    """The layout under fully_shard: unchanged on `axis`, and sharded on dim 0 over the other axes where that divides."""
    options = [c.outputs[0] for c in candidates.of[index] if c.outputs[0] is not None and c.outputs[0][axis] == layout[axis]]

    def order(option: Layout) -> tuple:
        first = [p.is_shard() and p.dim == 0 for k, p in enumerate(option) if k != axis]  # type: ignore[attr-defined]
        odd = [p.is_shard() and p.dim != 0 for k, p in enumerate(option) if k != axis]  # type: ignore[attr-defined]
        return (-sum(odd), sum(first))

    return max(options, key=order)


def zero_stages(graph: Graph, mesh: Mesh, candidates: Candidates, names: Sequence[str] = ZERO) -> tuple[Baseline, ...]:
    """zero1, zero2, zero3 and hsdp, or some of them; the last one only where the mesh has several axes."""
    slots = number_slots(graph, candidates)
    axes = used_axes(mesh)
    sharding, words = shard_batch(mesh, axes, Batch.of(graph, slots, dim_classes(slots)))
    wanted = wanted_priorities(graph, mesh, sharding)
    return tuple(
        _zero_stage(name, graph, mesh, candidates, wanted, words)
        for name in names
        if name != "hsdp" or len(axes) > 1
    )


def _zero_stage(
    name: str,
    graph: Graph,
    mesh: Mesh,
    candidates: Candidates,
    wanted: Callable[[Value], Priorities],
    words: str,
) -> Baseline:
    axes, gathered_at_use = used_axes(mesh), name in ("zero3", "hsdp")
    shards = {i: most_sharded(candidates.of[i], mesh, axes[-1:] if name == "hsdp" else axes) for i in graph.parameters.values()}
    fixed, copy = dict(shards), replicated(len(mesh.axes))
    for i, op in enumerate(graph.ops):
        if op.kind == KEPT and not gathered_at_use:
            fixed[i] = copy
        if op.kind == ACCUMULATED and name in ("zero2", "zero3"):
            fixed[i] = shards[_parameter_of(graph, op)]
    views = frozenset(i for i in from_parameters(graph) if len(graph.ops[i].inputs) == 1)
    pins = settle(graph, candidates, wanted, fixed, views if gathered_at_use else NOTHING)
    if name == "hsdp":
        pins |= _summed_within_groups(graph, pins, shards, axes[-1])
    stored = (*shards, *views) if gathered_at_use else (*shards, *(i for i, op in enumerate(graph.ops) if op.kind == KEPT))
    hubs = {(i, 0): _pinned_layout(pins[graph.ops[i].name]) if gathered_at_use else copy for i in stored}
    over = "the last axis" if name == "hsdp" else "all axes"
    return Baseline(name, pins, f"{words}; {_sharded_in_words(mesh, shards, over)}", hubs)


def _summed_within_groups(graph: Graph, pins: Mapping[str, Pin], shards: Mapping[int, Layout], last: int) -> dict[str, Pin]:
    """The sums of gradients of hsdp: sharded on the last axis as the parameter, and on the others Partial where the gradient is."""
    summed = {}
    for op in graph.ops:
        if op.kind == ACCUMULATED:
            (i, k), stored = op.inputs[0], shards[_parameter_of(graph, op)]
            outputs = pins[graph.ops[i].name].outputs
            assert outputs is not None and (gradient := outputs[k]) is not None
            layout = tuple(g if g.is_partial() and axis != last else p for axis, (g, p) in enumerate(zip(gradient, stored, strict=True)))
            summed[op.name] = Pin((layout,), (layout,))
    return summed


def _parameter_of(graph: Graph, op: Op) -> int:
    return graph.parameters[op.name.removesuffix(f".{ACCUMULATED}")]


def _pinned_layout(pin: Pin) -> Layout:
    assert pin.outputs is not None and pin.outputs[0] is not None
    return pin.outputs[0]


def reduced_before(graph: Graph) -> dict[int, int]:
    """By gradient cast that wants a reduced gradient, the parameter: it is reduced to the parameter's layout."""
    pairs = [(r.value[0], graph.parameters[r.name]) for r in graph.results if r.value is not None and r.name in graph.parameters]
    return {i: parameter for i, parameter in pairs if graph.ops[i].kind == REDUCE_THEN_CAST}


def used_axes(mesh: Mesh) -> list[int]:
    return [k for k, axis in enumerate(mesh.axes) if axis.size > 1]


def _batch_class(graph: Graph, classes: DimClasses) -> int | None:
    """The class of most inputs' dim 0 (the larger class among equals) that no parameter's dim is in; None when there is none."""
    of_parameters = {classes.of((i, 0), d) for i in graph.parameters.values() for d in range(len(graph.tensor((i, 0)).shape))}
    votes: dict[int, int] = {}
    for i, op in enumerate(graph.ops):
        if op.kind == "input" and graph.tensor((i, 0)).shape[:1] > (1,):
            c = classes.of((i, 0), 0)
            votes[c] = votes.get(c, 0) + 1
    return max(votes.keys() - of_parameters, key=lambda c: (votes[c], classes.roots.count(c), -c), default=None)


def shard_batch(mesh: Mesh, axes: list[int], batch: Batch) -> tuple[dict[int, AxisSharding], str]:
    """The batch sharded over those of `axes` that divide it into the most shards (the fastest among equals), and that in words."""
    if not axes or batch.root is None:
        return {}, "batch replicated" if batch.root is not None else "no batch dim found"

    def devices(subset: tuple[int, ...]) -> int:
        return math.prod(mesh.axes[k].size for k in subset)

    subsets = [s for n in range(len(axes) + 1) for s in combinations(axes, n)]
    chosen = max((s for s in subsets if not batch.size % devices(s)), key=lambda s: (devices(s), s))
    words = f"batch sharded over {_axes_in_words(chosen)}" if chosen else "batch replicated"
    if left := [k for k in axes if k not in chosen]:
        words += f" ({batch.size} does not divide{' further' if chosen else ''}: compute is repeated over {_axes_in_words(left)})"
    return {k: AxisSharding(batch.classes, {batch.root: FIRST}) for k in chosen}, words


def wanted_priorities(graph: Graph, mesh: Mesh, sharding: AxisShardings) -> Callable[[Value], Priorities]:
    """value -> for every axis and dim the priority of sharding it; a placeholder has no priority below FIRST."""
    known: dict[Value, Priorities] = {}

    def of_axis(k: int, value: Value, rank: int) -> tuple[int, ...]:
        return sharding[k].classes.priorities(value, rank, sharding[k].priority) if k in sharding else (0,) * rank

    def wanted(value: Value) -> Priorities:
        if value not in known:
            rank, least = len(graph.tensor(value).shape), FIRST if graph.ops[value[0]].is_placeholder else SECOND
            rows = [of_axis(k, value, rank) for k in range(len(mesh.axes))]
            known[value] = tuple(tuple(p if p >= least else 0 for p in row) for row in rows)
        return known[value]

    return wanted


def most_sharded(options: Sequence[Candidate], mesh: Mesh, axes: Sequence[int]) -> Layout:
    """The layout, among a parameter's, with the most shards over these axes, along as few dims as possible, the first dims first."""

    def order(layout: Layout) -> tuple:
        dims = [p.dim for p in layout if p.is_shard()]  # type: ignore[attr-defined]
        return (_num_shards(layout, mesh), -len(set(dims)), [-d for d in dims])

    layouts = (c.outputs[0] for c in options if c.outputs[0] is not None)
    return max((layout for layout in layouts if all(k in axes or p.is_replicate() for k, p in enumerate(layout))), key=order)


def _num_shards(layout: Layout, mesh: Mesh) -> int:
    return math.prod(shards_of(layout, mesh, d) for d in {p.dim for p in layout if p.is_shard()})  # type: ignore[attr-defined]


def _axes_in_words(axes: tuple[int, ...] | list[int]) -> str:
    return ("axis " if len(axes) == 1 else "axes ") + ",".join(map(str, axes))


def _sharded_in_words(mesh: Mesh, shards: Mapping[int, Layout], over: str = "all axes") -> str:
    most = mesh.num_devices if over == "all axes" else mesh.axes[used_axes(mesh)[-1]].size
    few = sum(_num_shards(layout, mesh) < most for layout in shards.values())
    return f"{len(shards) - few} of {len(shards)} parameters sharded over {over}" + (" (the others' dims do not divide)" if few else "")


def _recognised_in_words(graph: Graph, recognised: Recognised, undivided: Recognised, axis: int, size: int) -> str:
    roles = (("column", recognised.column), ("row", recognised.row), ("head", recognised.head))
    counted = ", ".join(f"{len(matmuls)} {role}" for role, matmuls in roles if matmuls)
    done = {m for _, matmuls in roles for m in matmuls}
    words = f"recognised {len(done)} of {len(recognised.matmuls)} parameter matmuls" + (f" ({counted})" if counted else "")
    words += f" for axis {axis} of {size}"
    if recognised.tables:
        words += f", {len(recognised.tables)} token table{'s' * (len(recognised.tables) > 1)} sharded by vocabulary"
    if uneven := {*undivided.column, *undivided.row} - done:
        words += f"; {len(uneven)} more stay replicated: their heads or features do not divide by {size}"
    lengths = [length for table, length in token_tables(graph).items() if table not in recognised.tables]
    return words + (f"; the vocabulary of {lengths[0]} does not divide by {size}: table and head stay replicated" if lengths else "")
