"""How each weight is used, and which weights a launcher that shards modules can shard together.

Launchers (parallelize_module, tp_plan) shard the weight of y[.., n] = x[.., k] w[k, n] over n (column) or over k (row) and run the
model's own code on the shards in between. The weights whose n or k is in one class C of dims (classes.py) form a group if C is n of some
and k of others. Running the code on shards of a group computes the right values when

    every op that reads a shard reads shards of all its inputs that have C, and its output has C    (no reduction over C), in one dim
    the view that makes heads says -1 for them: code that fixes their number can't run on some of them
    no split or slice runs along C: its offsets would be wrong in a shard                           (query, key and value in one weight)

Otherwise the group's `why` says what prevents it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autoshard.baselines.classes import DimClasses, Slots, dim_classes, number_slots
from autoshard.baselines.megatron import ParameterMatmul, from_parameters, parameter_matmuls, recognise
from autoshard.graph import Graph, Op, Value
from autoshard.strategies import Candidates, argument

SWAPS = ("aten.t.default", "aten.transpose.int", "aten.permute.default")
SPLITS = {"aten.split.Tensor": 2, "aten.split_with_sizes.default": 2, "aten.chunk.default": 2, "aten.slice.Tensor": 1}  # position of dim
NOT_OF_MODULE = "a weight is not the `weight` of the module that reads it, whose forward a style would change"
LENGTHS = ("aten.view.default", "aten.reshape.default", "aten._unsafe_view.default")


@dataclass(frozen=True)
class Use:
    """One parameter as the weight of one forward op. Dims are the parameter's own."""

    parameter: str
    index: int  # of the op
    kind: str  # linear or embedding
    kept: int  # the dim that the output has
    contracted: int  # the other one: features in, or the vocabulary
    trail: tuple[Value, ...]  # the parameter and its views, up to the value that the op reads
    w: tuple[int, int, int]  # the position of that value among the op's inputs, and its kept and contracted dims

    def is_of_module(self, graph: Graph) -> bool:
        """Whether a module reads it as its own `weight`, as nn.Linear does."""
        return self.parameter == f"{graph.ops[self.index].module}.weight".removeprefix(".")


@dataclass(frozen=True)
class Group:
    """Weights that have one class, and why a launcher can't shard them (None where it can)."""

    root: int  # of the class
    columns: tuple[Use, ...]
    rows: tuple[Use, ...]
    why: str | None
    inside: tuple[str, ...] = ()  # replicated parameters that are used with shards: their gradients are partial sums


@dataclass(frozen=True, eq=False)
class Uses:
    """All that is known for an axis of some size."""

    slots: Slots
    classes: DimClasses
    uses: tuple[Use, ...]
    groups: tuple[Group, ...]
    fused: frozenset[str]  # parameters that hold several projections side by side


def parameter_uses(graph: Graph, candidates: Candidates, size: int, slots: Slots | None = None) -> Uses:
    """The uses of two-dimensional parameters, and their groups on an axis of `size` devices. slots: of this graph, if known."""
    slots = slots or number_slots(graph, candidates)
    classes = dim_classes(slots, size)
    matmuls = {m.index: m for m in parameter_matmuls(graph, from_parameters(graph))}
    uses = (*_linears(graph, matmuls), *_embeddings(graph))
    by_index = {use.index: use for use in uses if use.kind == "linear"}
    batch = frozenset(
        classes.of((i, 0), 0) for i, op in enumerate(graph.ops) if op.kind == "input" and op.outputs[0] is not None and op.output.shape
    )
    recognised = recognise(graph, classes, slots.sizes, size, batch)
    split = _split_classes(graph, classes)
    groups = []
    for root in dict.fromkeys(classes.of(*m.kept) for m in recognised.column):
        columns = [m for m in recognised.column if classes.of(*m.kept) == root]
        rows = [m for m in recognised.row if classes.of(*m.contracted) == root]
        inside: list[str] = []
        why = _why_not_local(graph, classes, root, columns, rows, inside)
        if why is None and any(m.index not in by_index for m in (*columns, *rows)):
            why = "a weight is no plain two-dimensional parameter"
        if why is None and not all(by_index[m.index].is_of_module(graph) for m in (*columns, *rows)):
            why = NOT_OF_MODULE
        of_columns, of_rows = (tuple(by_index[m.index] for m in some if m.index in by_index) for some in (columns, rows))
        groups.append(Group(root, of_columns, of_rows, why, tuple(inside)))
    fused = {by_index[i].parameter for i, m in matmuls.items() if i in by_index and classes.of(*m.kept) in split}
    return Uses(slots, classes, uses, tuple(groups), frozenset(fused))


def _linears(graph: Graph, matmuls: dict[int, ParameterMatmul]) -> Iterator[Use]:
    for i, m in matmuls.items():
        value, rank = m.contracted[0], len(graph.tensor(m.contracted[0]).shape)
        trail, swapped = [value], False
        while not graph.ops[value[0]].is_placeholder and len(graph.ops[value[0]].inputs) == 1:
            swapped ^= swaps(graph.ops[value[0]], len(graph.tensor(graph.ops[value[0]].inputs[0]).shape))
            value = graph.ops[value[0]].inputs[0]
            trail.append(value)
        op = graph.ops[value[0]]
        if op.kind == "parameter" and len(op.output.shape) == 2:
            last = (m.kept[1] == rank - 1) != swapped  # whether the kept dim is the parameter's last one
            w = (graph.ops[i].inputs.index(m.kept[0]), m.kept[1], m.contracted[1])
            yield Use(op.name, i, "linear", 1 if last else 0, 0 if last else 1, tuple(reversed(trail)), w)


def swaps(op: Op, rank: int) -> bool:
    """Whether the last two dims change places."""
    if op.target not in SWAPS or rank < 2:
        return False
    if op.target == "aten.t.default":
        return True
    if op.target == "aten.permute.default":
        order = [int(d) % rank for d in argument(op, 1, "dims")]
        return order.index(rank - 1) < order.index(rank - 2)
    return {int(argument(op, k, f"dim{k - 1}")) % rank for k in (1, 2)} == {rank - 1, rank - 2}


def _embeddings(graph: Graph) -> Iterator[Use]:
    for i, op in enumerate(graph.ops):
        if op.target == "aten.embedding.default" and not op.backward and graph.ops[op.inputs[0][0]].kind == "parameter":
            yield Use(graph.ops[op.inputs[0][0]].name, i, "embedding", 1, 0, (op.inputs[0],), (0, 1, 0))


def _split_classes(graph: Graph, classes: DimClasses) -> frozenset[int]:
    """Classes along which a split or a slice runs."""
    split = set()
    for op in graph.ops:
        if op.target in SPLITS and not op.backward:
            shape = graph.tensor(op.inputs[0]).shape
            dim = int(argument(op, SPLITS[op.target], "dim", 0)) % len(shape)
            if any(t is not None and t.shape[dim] != shape[dim] for t in op.outputs):
                split.add(classes.of(op.inputs[0], dim))
    return frozenset(split)


def _why_not_local(
    graph: Graph, classes: DimClasses, root: int, columns: Sequence[ParameterMatmul], rows: Sequence[ParameterMatmul], inside: list[str]
) -> str | None:
    """Why the code between column and row weights can't run on shards; None where it can.

    inside: the replicated parameters that are used with shards are appended to it.
    """
    starts, ends = {m.index for m in columns}, {m.index for m in rows}
    modules = {graph.ops[i].module for i in starts}
    shards: set[Value] = set()
    for i, op in enumerate(graph.ops):
        if op.backward:
            continue
        if i in starts:
            shards.add((i, 0))
            continue
        if not any(v in shards for v in op.inputs):
            if i in ends:
                return f"{op.module or op.name} reads no output of a column weight"
            continue
        if i in ends:
            continue
        for v in op.inputs:
            source = graph.ops[v[0]]
            if v not in shards and _dims(graph, classes, v, root) and source.name.rpartition(".")[0] not in modules:
                return f"{op.module or op.name} also reads {source.name}, which stays replicated"
            if source.kind == "parameter" and not _dims(graph, classes, v, root):
                inside.append(source.name)
        outputs = [(i, k) for k, t in enumerate(op.outputs) if t is not None and _dims(graph, classes, (i, k), root)]
        if not outputs or any(len(_dims(graph, classes, v, root)) > 1 for v in outputs):  # of two such dims, shards are pairs of equal ones
            return f"{op.module or op.name} needs all shards of its input ({op.target})"
        if (fixed := _fixes_sizes(graph, classes, root, i)) and op.module not in modules:
            return f"{op.module or op.name} {fixed}"
        shards.update(outputs)
    returned = [r for r in graph.results if r.kind == "output" and r.value in shards]
    return f"the model returns {returned[0].name} sharded" if returned else None


def _dims(graph: Graph, classes: DimClasses, value: Value, root: int) -> list[int]:
    """The dims of the value that have the class."""
    return [d for d, size in enumerate(graph.tensor(value).shape) if size > 1 and classes.of(value, d) == root]


def _fixes_sizes(graph: Graph, classes: DimClasses, root: int, i: int) -> str | None:
    """How a view's literal sizes fix the size of the sharded dim; None where its code reads that size from the tensor."""
    op = graph.ops[i]
    if op.target not in LENGTHS:
        return None
    before, after = graph.tensor(op.inputs[0]).shape, op.output.shape
    if before == after:
        return None
    dims = _dims(graph, classes, (i, 0), root)
    sizes = argument(op, 1, "size") or argument(op, 1, "shape")
    free = [d for d, size in enumerate(sizes) if size == -1]
    if free and free[0] not in dims:
        return "infers another dim's size from the sharded one"
    splits = before[-1] not in after and len(after) > len(before)
    return "fixes the number of heads" if splits and not free else None
