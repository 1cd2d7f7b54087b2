"""The usual schemes, each described by the dimension classes that every mesh axis shards.

| scheme        | last axis                           | other axes | parameters                                    |
|---------------|-------------------------------------|------------|-----------------------------------------------|
| data_parallel | batch                               | batch      | replicated                                    |
| fsdp          | batch                               | batch      | sharded over all axes, gathered at each use   |
| megatron      | heads, hidden features, vocabulary  | batch      | as their classes, replicated over other axes  |
| megatron_sp   | the same, and the residual sequence | batch      | the same                                      |
| megatron_fsdp | as megatron_sp                      | batch      | the same, sharded over other axes, too        |

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

A plan for launchers that shard modules (parallelize_module, tp_plan) shards on one mesh axis the weights of a group and all values between
them along the dims of the group's class, and a weight without a group, the output of whose op is gathered at once. Everything else is
replicated there. On the other axes the batch is sharded; parameters are replicated there, or sharded too (fully_shard).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from autoshard.baselines.classes import dim_classes
from autoshard.baselines.context_parallel import CONTEXT_PARALLEL, context_parallel
from autoshard.baselines.expert_parallel import expert_parallel
from autoshard.baselines.megatron import Recognised, recognise, sequence_class, token_tables
from autoshard.baselines.pins import FIRST, SECOND, Pin, Priorities
from autoshard.baselines.setting import AxisSharding, AxisShardings, Baseline, Setting, Wanted, num_shards, once
from autoshard.baselines.uses import Use, Uses, swaps
from autoshard.graph import ACCUMULATED, KEPT, Graph, Op, Value
from autoshard.layout import Layout, replicated
from autoshard.mesh import Mesh
from autoshard.strategies import LONG, Candidates, is_experts

ZERO = ("zero1", "zero2", "zero3", "hsdp")
SHARDED_MEGATRON = "megatron_fsdp"  # megatron_sp with parameters that are sharded over the other axes too, as torchtitan does
MEGATRON_EXPERTS = "megatron_experts"  # megatron with the experts over the last axis too, as engines serve them
MEGATRON_EXPERT_PARALLEL = "megatron_expert_parallel"  # over all axes: tokens are sent by all_to_all over those that shard the batch


def data_parallel(s: Setting) -> Baseline:
    copies = {i: replicated(len(s.mesh.axes)) for i in s.graph.parameters.values()}
    return Baseline("data_parallel", s.pins(s.by_batch, s.with_casts(copies)), s.data_parallel[1])


def fsdp(s: Setting) -> Baseline:
    words = f"{s.data_parallel[1]}; {sharded_in_words(s, s.shards)}"
    return Baseline("fsdp", s.pins(s.by_batch, s.with_casts(s.shards), s.views), words)


@dataclass(frozen=True, eq=False)
class TensorParallel:
    """What tensor parallelism over the last axis shards: nothing on one device."""

    sharding: AxisShardings  # the batch over the other axes, classes of heads, features and vocabulary over the last one
    by_class: Wanted
    by_sequence: Wanted | None  # the same and the residual stream's sequence; None where it can't be sharded
    words: str


@once
def tensor_parallel(s: Setting) -> TensorParallel:
    if not s.axes:
        return TensorParallel({}, s.wanted({}), None, "one device")
    last, size = s.axes[-1], s.mesh.axes[s.axes[-1]].size
    sharding, words = s.shard_batch(s.axes[:-1])
    narrow = dim_classes(s.slots, size)
    of_batch = frozenset(narrow.roots[slot] for slot, of in enumerate(s.classes.roots) if of == s.batch)
    recognised = recognise(s.graph, narrow, s.slots.sizes, size, of_batch)
    undivided = recognise(s.graph, s.classes, s.slots.sizes, 1, frozenset([s.batch] if s.batch is not None else []))
    tensor = {c: FIRST for c in recognised.classes}
    by_class = {**sharding, last: AxisSharding(narrow, tensor)}
    sequence = sequence_class(s.graph, s.classes, narrow, recognised, s.batch, size)
    both = None if sequence is None else s.wanted({**sharding, last: AxisSharding(narrow, {sequence: SECOND, **tensor})})
    words = f"{_recognised_in_words(s.graph, recognised, undivided, last, size)}; {words}"
    return TensorParallel(by_class, s.wanted(by_class), both, words)


@once
def megatron(s: Setting) -> Baseline:
    tensor = tensor_parallel(s)
    return Baseline("megatron", s.pins(tensor.by_class, {}), tensor.words)


@once
def megatron_sp(s: Setting) -> Baseline:
    tensor = tensor_parallel(s)
    if (wanted := tensor.by_sequence) is not None:
        words = f"{tensor.words}; residual sequence sharded over axis {s.axes[-1]}"
        return Baseline("megatron_sp", s.pins(wanted, {}), words)
    note = f"; no sequence dim that divides by {s.mesh.axes[s.axes[-1]].size} in the residual stream: as megatron" if s.axes else ""
    return Baseline("megatron_sp", megatron(s).pins, tensor.words + note)


def sharded_megatron(s: Setting) -> Baseline | None:
    """None where nothing of the sequence can be sharded."""
    if (wanted := tensor_parallel(s).by_sequence) is None:
        return None
    same = megatron_sp(s)
    fixed = s.with_casts(fully_sharded(s, same.pins, s.axes[-1]))
    return Baseline(SHARDED_MEGATRON, s.pins(wanted, fixed, s.views), f"{same.matched}; parameters sharded over the other axes")


def megatron_experts(s: Setting, name: str) -> Baseline:
    """The experts over the last axis too, or over all axes."""
    tensor, axes = tensor_parallel(s), s.axes if name == MEGATRON_EXPERT_PARALLEL else s.axes[-1:]
    # over all axes where the last one has one device: tensor parallelism is over the mesh's last axis then, and shards nothing
    sharding = s.data_parallel[0] if name == MEGATRON_EXPERT_PARALLEL and s.mesh.shape[-1] == 1 else tensor.sharding
    return Baseline(name, s.pins(s.wanted(_with_experts(s.graph, sharding, axes)), {}), tensor.words)


def _with_experts(graph: Graph, sharding: AxisShardings, axes: Sequence[int]) -> AxisShardings:
    """The classes, and on these axes also those of the dims of parameters that number the experts."""
    parameters = [value for op in graph.ops if is_experts(op) and "backward" not in op.target for value in op.inputs[3:]]

    def of(axis: int, one: AxisSharding) -> AxisSharding:
        experts = {one.classes.of(value, 0): FIRST for value in parameters if axis in axes}
        return AxisSharding(one.classes, {**one.priority, **experts})

    return {axis: of(axis, one) for axis, one in sharding.items()}


def fully_sharded(s: Setting, pins: Mapping[str, Pin], axis: int) -> dict[int, Layout]:
    """The layouts of parameters under fully_shard: as pinned on `axis`, and sharded over the other axes where that divides.

    fully_shard divides the shards of `axis` once more, in strides, so that a plain all_gather puts them together. A layout without strides
    has that on another dim: of dims that `axis` doesn't shard the first, of which all devices can have a part, else dim 0.
    """

    def order(layout: Layout) -> tuple:
        others = [p for k, p in enumerate(layout) if k != axis and p.is_shard()]
        apart = sum(not layout[axis].is_shard(p.dim) for p in others)  # type: ignore[attr-defined]
        return len(others), apart, -sum(p.dim for p in others)  # type: ignore[attr-defined]

    def best(i: int) -> Layout:
        pinned, layouts = _pinned_layout(pins[s.graph.ops[i].name]), [c.outputs[0] for c in s.candidates.of[i]]
        return max((layout for layout in layouts if layout is not None and layout[axis] == pinned[axis]), key=order)

    return {i: best(i) for i in s.graph.parameters.values()}


def zero_stage(s: Setting, name: str) -> Baseline | None:
    """None where the mesh has not the several axes that hsdp needs."""
    if name == "hsdp" and len(s.axes) < 2:
        return None
    graph, axes, gathered_at_use = s.graph, s.axes, name in ("zero3", "hsdp")
    over = axes[-1:] if name == "hsdp" else axes
    shards = {i: s.most_sharded(s.candidates.of[i], over) for i in graph.parameters.values()}
    fixed, copy = dict(shards), replicated(len(s.mesh.axes))
    for i, op in enumerate(graph.ops):
        if op.kind == KEPT and not gathered_at_use:
            fixed[i] = copy
        if op.kind == ACCUMULATED and name in ("zero2", "zero3"):
            fixed[i] = shards[_parameter_of(graph, op)]
    pins = s.pins(s.by_batch, fixed, s.views if gathered_at_use else frozenset())
    if name == "hsdp":
        pins |= _summed_within_groups(graph, pins, shards, axes[-1])
    stored = (*shards, *s.views) if gathered_at_use else (*shards, *(i for i, op in enumerate(graph.ops) if op.kind == KEPT))
    hubs = {(i, 0): _pinned_layout(pins[graph.ops[i].name]) if gathered_at_use else copy for i in stored}
    words = sharded_in_words(s, shards, "the last axis" if name == "hsdp" else "all axes")
    return Baseline(name, pins, f"{s.data_parallel[1]}; {words}", hubs)


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


def sharded_in_words(s: Setting, shards: Mapping[int, Layout], over: str = "all axes") -> str:
    most = s.mesh.num_devices if over == "all axes" else s.mesh.axes[s.axes[-1]].size
    few = sum(num_shards(layout, s.mesh) < most for layout in shards.values())
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


RULES: dict[str, Callable[[Setting], Baseline | None]] = {  # None: there is no such scheme for this graph on this mesh
    "data_parallel": data_parallel,
    "fsdp": fsdp,
    "megatron": megatron,
    "megatron_sp": megatron_sp,
    SHARDED_MEGATRON: sharded_megatron,
    **{name: partial(megatron_experts, name=name) for name in (MEGATRON_EXPERTS, MEGATRON_EXPERT_PARALLEL)},
    "expert_parallel": expert_parallel,
    **{name: partial(zero_stage, name=name) for name in ZERO},
    **{name: partial(context_parallel, name=name) for name in CONTEXT_PARALLEL},
}
USUAL = ("data_parallel", "fsdp", "megatron", "megatron_sp")
WHY_NOT = {
    "hsdp": "hsdp shards over one mesh axis and replicates over others, the mesh has one axis only; use zero3",
    **{
        name: f"{name} shards the sequence of attention over axes that the batch doesn't divide; there is no such axis, or no attention of "
        f"at least {LONG} tokens; use fsdp"
        for name in CONTEXT_PARALLEL
    },
}


def baselines(graph: Graph, mesh: Mesh, candidates: Candidates, names: Sequence[str] = USUAL) -> tuple[Baseline, ...]:
    """Those of the schemes that exist for this graph on this mesh; each pin is a candidate of its op."""
    setting = Setting(graph, mesh, candidates)
    possible = (RULES[name](setting) for name in names)
    return tuple(baseline for baseline in possible if baseline is not None)


def baseline(graph: Graph, mesh: Mesh, candidates: Candidates, name: str) -> Baseline:
    """The scheme of this name. ValueError where there is none for this graph on this mesh, or under another name."""
    for scheme in baselines(graph, mesh, candidates, [name] if name in RULES else []):
        return scheme
    others = ", ".join(other for other in RULES if other != name)
    raise ValueError(WHY_NOT.get(name, f"there is no scheme {name!r} on this mesh; expected one of {others}"))


def launched(
    graph: Graph, mesh: Mesh, candidates: Candidates, axis: int, uses: Uses, roots: Sequence[int], lone: Sequence[tuple[Use, int]],
    *, fully_shard: bool,
) -> Baseline:  # fmt: skip
    """roots: classes of the sharded groups. lone: weights without a group, as (use, the parameter's sharded dim)."""
    setting = Setting(graph, mesh, candidates, uses.slots)
    sharding, words = setting.shard_batch([k for k in setting.axes if k != axis])
    sharding[axis] = AxisSharding(uses.classes, dict.fromkeys(roots, FIRST))
    of_classes, lone_dims = setting.wanted(sharding), dict(_lone_dims(graph, lone))

    def wanted(value: Value) -> Priorities:
        rows = of_classes(value)
        if value not in lone_dims:
            return rows
        return tuple(tuple(FIRST if k == axis and d == lone_dims[value] else p for d, p in enumerate(row)) for k, row in enumerate(rows))

    pins = setting.pins(wanted, {})
    if not fully_shard:
        return Baseline("modules", pins, words)
    fixed = fully_sharded(setting, pins, axis)
    views = frozenset(i for i in setting.views if graph.ops[i].kind == "compute")
    return Baseline("modules", setting.pins(wanted, fixed, views), f"{words}; parameters sharded over the other axes")


def _lone_dims(graph: Graph, lone: Sequence[tuple[Use, int]]) -> list[tuple[Value, int]]:
    """The values that are sharded because of a weight without a group (it, its views, the op's output), with the sharded dim."""
    dims = []
    for use, dim in lone:
        op, swapped = graph.ops[use.index], False
        dims.append((use.trail[0], dim))
        if dim == use.kept:
            dims.append(((use.index, 0), len(op.output.shape) - 1))
        for value in use.trail[1:]:
            rank = len(graph.tensor(value).shape)
            swapped ^= swaps(graph.ops[value[0]], rank)
            dims.append((value, rank - 1 - dim if swapped else dim))
    return dims
