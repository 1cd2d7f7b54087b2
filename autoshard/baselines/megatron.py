"""Column, row and vocabulary parallel matmuls, recognised by the dimension classes of their operands, never by names.

A parameter matmul y[.., n] = x[.., k] w[k, n] has a weight that is computed from parameters only. With class(k) and class(n):

    inner class C  C = class(n) of some matmuls (they become column parallel) and class(k) of others (row parallel), none both
    head class V   V = class(n) of some and class(k) of none, and V contains a dim of the loss, the output or the longest token table

Heads and hidden features are inner classes. The residual stream is one as well where no norm separates it, but it contains more
matmuls than the classes inside the blocks; and the ranks of latent attention (queries, keys and values through fewer features than both
sides have) are, which Megatron leaves whole. Therefore the smallest classes are taken first, narrow ones last, and a matmul is used once,
whose weight may have the class in a dim of its own, too (a matrix per head).
"""

from collections.abc import Iterator
from dataclasses import dataclass

from autoshard.baselines.classes import DimClasses
from autoshard.graph import Graph, Value
from autoshard.strategies import argument

# (position of x, of w; dims of w counted from the end: contracted, kept)
MATMULS = {
    "aten.mm.default": (0, 1, -2, -1), "aten.bmm.default": (0, 1, -2, -1), "aten.matmul.default": (0, 1, -2, -1),
    "aten.addmm.default": (1, 2, -2, -1), "aten.baddbmm.default": (1, 2, -2, -1), "aten.linear.default": (0, 1, -1, -2),
}  # fmt: skip
SOFTMAX = "aten._log_softmax.default"


@dataclass(frozen=True)
class ParameterMatmul:
    index: int
    contracted: tuple[Value, int]  # a slot of the weight
    kept: tuple[Value, int]


@dataclass(frozen=True)
class Recognised:
    """What tensor parallelism shards: classes, and the matmuls by role."""

    classes: frozenset[int]
    column: tuple[ParameterMatmul, ...]
    row: tuple[ParameterMatmul, ...]
    head: tuple[ParameterMatmul, ...]
    tables: tuple[int, ...]  # parameters sharded along their vocabulary
    matmuls: tuple[ParameterMatmul, ...]  # all of them


def from_parameters(graph: Graph) -> frozenset[int]:
    """Ops computed from parameters only, parameters included."""
    computed: set[int] = set()
    for i, op in enumerate(graph.ops):
        if op.kind == "parameter" or (op.inputs and all(v[0] in computed for v in op.inputs)):
            computed.add(i)
    return frozenset(computed)


def parameter_matmuls(graph: Graph, of_parameters: frozenset[int]) -> Iterator[ParameterMatmul]:
    for i, op in enumerate(graph.ops):
        if op.target not in MATMULS or op.backward:
            continue
        x, w, contracted, kept = MATMULS[op.target]
        a, b = op.inputs[x], op.inputs[w]
        if a[0] in of_parameters and b[0] not in of_parameters:  # w x: the weight is on the left
            b, contracted, kept = a, -1, -2
        elif a[0] in of_parameters or b[0] not in of_parameters:
            continue
        rank = len(graph.tensor(b).shape)
        if rank >= 2:
            yield ParameterMatmul(i, (b, rank + contracted), (b, rank + kept))


def token_tables(graph: Graph) -> dict[int, int]:
    """The embedding tables that the program's input ids index, with their number of rows; the longest only."""
    tables: dict[int, int] = {}
    for op in graph.ops:
        if op.target == "aten.embedding.default":
            table, ids = map(graph.origin, op.inputs[:2])
            if graph.ops[table].kind == "parameter" and graph.ops[ids].kind == "input":
                tables[table] = graph.tensor((table, 0)).shape[0]
    longest = max(tables.values(), default=0)
    return {table: length for table, length in tables.items() if length == longest}


def recognise(graph: Graph, classes: DimClasses, sizes: tuple[int, ...], divisor: int, batch: frozenset[int]) -> Recognised:
    """Roles of the parameter matmuls on an axis of `divisor` devices; `batch`: classes that are not to be used."""
    matmuls = tuple(parameter_matmuls(graph, from_parameters(graph)))
    columns: dict[int, list[ParameterMatmul]] = {}
    rows: dict[int, list[ParameterMatmul]] = {}
    for m in matmuls:
        columns.setdefault(classes.of(*m.kept), []).append(m)
        rows.setdefault(classes.of(*m.contracted), []).append(m)
    used: set[ParameterMatmul] = set()
    inner: list[int] = []

    def is_narrow(c: int) -> bool:
        sides = [(m.kept, m.contracted) for m in columns[c]] + [(m.contracted, m.kept) for m in rows[c]]
        own, other = zip(*([graph.tensor(value).shape[d] for value, d in pair] for pair in sides))
        return all(a < b for a, b in zip(own, other))

    for c in sorted((c for c in columns if c in rows), key=lambda c: (is_narrow(c), len(columns[c]) + len(rows[c]))):  # stable: in order
        members = {*columns[c], *rows[c]}
        if len(members) == len(columns[c]) + len(rows[c]) and not members & used and c not in batch and not sizes[c] % divisor:
            inner.append(c)
            used |= members | {m for m in matmuls if c in [classes.of(m.kept[0], d) for d in range(m.kept[1] - 1)]}
    tables = {t for t in token_tables(graph) if not graph.tensor((t, 0)).shape[0] % divisor}
    vocabulary = {classes.of((t, 0), 0) for t in tables}
    scored = vocabulary | _scored(graph, classes)
    heads = [c for c in columns if c in scored and c not in rows and c not in batch and not sizes[c] % divisor and not used & {*columns[c]}]
    return Recognised(
        frozenset([*inner, *heads, *vocabulary]),
        tuple(m for c in inner for m in columns[c]), tuple(m for c in inner for m in rows[c]), tuple(m for c in heads for m in columns[c]),
        tuple(sorted(tables)), matmuls,
    )  # fmt: skip


def _scored(graph: Graph, classes: DimClasses) -> set[int]:
    """Classes that a softmax of the loss runs over, and those of the last dims of the program's outputs."""
    over = {
        classes.of(op.inputs[0], int(argument(op, 1, "dim")) % len(op.outputs[0].shape))  # type: ignore[call-overload,union-attr]
        for op in graph.ops
        if op.target == SOFTMAX
    }
    returned = [r.value for r in graph.results if r.kind == "output" and r.value is not None and graph.tensor(r.value).shape]
    return over | {classes.of(v, len(graph.tensor(v).shape) - 1) for v in returned}


def sequence_class(
    graph: Graph, classes: DimClasses, narrow: DimClasses, recognised: Recognised, batch: int | None, divisor: int
) -> int | None:
    """The class (of `narrow`) of the sequence dim of the residual stream, to which the row parallel matmuls add.

    The batch and the stream's features are other classes. classes: without a divisor; narrow: with `divisor`.
    """
    apart = {batch, *(classes.of(*m.kept) for m in recognised.row)}
    stream = apart - {batch}
    votes: dict[int, int] = {}
    for i, op in enumerate(graph.ops):
        for k, tensor in enumerate(op.outputs):
            if tensor is None or len(tensor.shape) < 3:
                continue
            kinds = [classes.of((i, k), d) for d in range(len(tensor.shape))]
            for d, size in enumerate(tensor.shape if not stream.isdisjoint(kinds) else ()):
                if size > 1 and not size % divisor and kinds[d] not in apart and (c := narrow.of((i, k), d)) not in recognised.classes:
                    votes[c] = votes.get(c, 0) + 1
    return max(votes, key=votes.__getitem__, default=None)
