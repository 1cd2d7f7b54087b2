"""Which ops share a kernel when the program is compiled, as torch's inductor groups them, and what each group reads and writes.

Pointwise ops and reductions join the group of a producer, or of an op that reads the same tensor, if

    - they run over the same elements: a pointwise op over as many as the group, or over the results of its reductions; a reduction over as
      many, to as many results as the group's other reductions, or over rows beside columns where there are many; and
    - no other producer depends on the group (the kernels would wait for each other).

A group reads each tensor from outside once, and writes what others read. A pointwise result that can be computed again from no more bytes
than it has (a cast, a sum, a product with a row of numbers) is computed again by the groups that read it, if these are all that read it.
Matmuls, attention, convolutions, lookups and collectives are kernels of their own.
"""

import math
from collections import defaultdict
from dataclasses import dataclass, field, replace

from autoshard.graph import Fused, Graph, Op, Value
from autoshard.strategies.dims import is_pointwise

COLUMNS = 132 * 2 * 32  # sums from which on a sum of columns isn't split in two kernels, so that what it sums may be computed in it
MIXED = 5 * 2**20  # elements from which on reductions of rows and of columns share a kernel: inductor's mix_order_reduction
NEAR = 4  # groups that read the same tensor: those that an op may join
NO_MORE = 1.1  # bytes that are read to compute a result again, relative to its own
LARGEST = 64  # ops of a group: inductor's max_fusion_size
MOVES = {
    "_to_copy", "clone", "copy", "cat", "stack", "nll_loss_backward", "mse_loss_backward", "constant_pad_nd", "where", "arange", "full",
    "zeros", "ones", "slice_backward", "select_backward",
}  # fmt: skip
REDUCTIONS = {
    "sum", "mean", "prod", "amax", "amin", "max", "min", "any", "all", "argmax", "argmin", "var", "var_mean", "std", "logsumexp", "norm",
    "linalg_vector_norm", "_softmax", "_softmax_backward_data", "_log_softmax", "_log_softmax_backward_data", "native_layer_norm",
    "native_layer_norm_backward", "_fused_rms_norm", "_fused_rms_norm_backward", "native_group_norm", "native_group_norm_backward",
    "cumsum", "nll_loss_forward", "mse_loss",
}  # fmt: skip

Sources = dict[Value, dict[Value, float]]  # of values that are computed again: of which, and of how much of them


@dataclass
class KernelGroup:
    size: int  # elements over which it runs
    results: set[int]  # elements of its reductions' results
    first: int
    ops: list[int] = field(default_factory=list)


# Kernels of their own in a compiled program as well, but of rows that inductor pads (its shape_padding).
MATMULS = {f"aten.{name}.default" for name in ("mm", "addmm", "bmm", "baddbmm", "linear")}


def fused(graph: Graph, *, within_modules: bool = False) -> Graph:
    """The same graph, whose ops know what they read and write in their groups (Op.fused). within_modules: of ops of one module only, as
    libraries of fused norms, rotary positions and activations have them."""
    groups, group_of = _groups(graph, within_modules)
    readers = _readers(graph, group_of)
    cheap = {} if within_modules else _computed_again(graph, group_of, readers)
    ops = list(graph.ops)
    for number, group in enumerate(groups):
        writes = {i: [_is_written(graph, (i, o), number, readers, cheap) for o in range(len(ops[i].outputs))] for i in group.ops}
        live = {i for i in group.ops if any(writes[i])}
        for i in reversed(group.ops):  # what only others compute again is not computed here
            if i in live:
                live |= {root[0] for value in ops[i].inputs if group_of.get((root := graph.storage(value))[0]) == number}
        seen: dict[Value, float] = {}  # bytes that the group has read of a tensor
        for i in group.ops:
            reads = tuple(_share_read(graph, value, number, group_of, cheap, seen) if i in live else 0.0 for value in ops[i].inputs)
            held = tuple(bool(readers[i, o] - {number}) and not _is_there(graph, (i, o), cheap) for o in range(len(ops[i].outputs)))
            ops[i] = replace(ops[i], fused=Fused(reads, tuple(map(float, writes[i])), i == min(live, default=-1), held))
    for i, op in enumerate(ops) if not within_modules else ():
        if op.target in MATMULS:
            ops[i] = replace(op, fused=Fused((1.0,) * len(op.inputs), (1.0,) * len(op.outputs), True))
    return replace(graph, ops=tuple(ops))


def _readers(graph: Graph, group_of: dict[int, int]) -> dict[Value, set[int]]:
    """Of the values that own their bytes: the groups that read them, and, as - 1 - op, the ops outside of groups; also results."""
    readers: dict[Value, set[int]] = defaultdict(set)
    for i, op in enumerate(graph.ops):
        for value in () if op.is_view else op.inputs:
            readers[graph.storage(value)].add(group_of.get(i, -1 - i))
    for result in graph.results:
        if result.value is not None:
            readers[graph.storage(result.value)].add(-1 - len(graph.ops))
    return readers


def _is_written(graph: Graph, value: Value, group: int, readers: dict[Value, set[int]], cheap: Sources) -> bool:
    return graph.ops[value[0]].outputs[value[1]] is not None and bool(readers[value] - {group}) and value not in cheap


def _is_there(graph: Graph, value: Value, cheap: Sources) -> bool:
    """Whether groups compute a result again, of what is there anyway until the last of them."""
    last, sources = graph.last_use.get(value, 0), [graph.storage(source) for source in cheap.get(value, ())]
    return value in cheap and all(graph.ops[i].is_placeholder or graph.last_use.get((i, o), 0) >= last for i, o in sources)


def _share_read(
    graph: Graph, value: Value, number: int, group_of: dict[int, int], cheap: Sources, seen: dict[Value, float]
) -> float:  # fmt: skip
    """How much of the bytes of an input its group reads for it: none of what it computes itself, or has read."""
    root, bytes = graph.storage(value), 0.0
    if group_of.get(root[0]) == number:
        return 0.0
    for source, share in cheap.get(root, {value: 1.0}).items():
        owner, size = graph.storage(source), share * _part(graph, value, root) * graph.tensor(source).bytes
        if group_of.get(owner[0]) != number:
            bytes += max(size - seen.get(owner, 0.0), 0.0)
            seen[owner] = max(size, seen.get(owner, 0.0))
    return bytes / max(graph.tensor(value).bytes, 1)


def _part(graph: Graph, value: Value, root: Value) -> float:
    """How much of the tensor whose storage it shares a view has, at most all."""
    return min(graph.tensor(value).numel / max(graph.tensor(root).numel, 1), 1.0) if value != root else 1.0


def _computed_again(graph: Graph, group_of: dict[int, int], readers: dict[Value, set[int]]) -> Sources:
    """Pointwise results that groups compute again, each with the tensors outside of any of them from which they do."""
    cheap: Sources = {}
    for i, op in enumerate(graph.ops):
        if i not in group_of or not op.outputs or op.outputs[0] is None or not is_elementwise(graph, i):
            continue
        sources: dict[Value, float] = {}  # how much of each
        for value in op.inputs:
            root = graph.storage(value)
            for source, share in cheap.get(root, {value: 1.0}).items():
                sources[source] = max(sources.get(source, 0.0), share * (_part(graph, value, root) if root in cheap else 1.0))
        read = sum(share * graph.tensor(source).bytes for source, share in sources.items())
        if sources and all(r >= 0 for r in readers[i, 0] - {group_of[i]}) and read <= NO_MORE * op.outputs[0].bytes:
            cheap[i, 0] = sources
    return cheap


def _groups(graph: Graph, within_modules: bool = False) -> tuple[list[KernelGroup], dict[int, int]]:
    groups: list[KernelGroup] = []
    group_of: dict[int, int] = {}
    needs: dict[int, set[int]] = {}  # of a group or, as - 1 - op, of an op outside: the same, of which it reads
    read_by: dict[Value, list[int]] = defaultdict(list)  # the groups that read a tensor
    modules = [op.module for op in graph.ops]
    for i, op in enumerate(graph.ops):
        if op.is_placeholder:
            continue
        roots = [graph.storage(value) for value in op.inputs]
        if not op.module and len(inside := {modules[root[0]] for root in roots}) == 1:  # the sum of gradients of a value
            modules[i] = inside.pop()
        producers = {group_of.get(root[0], -1 - root[0]) for root in roots if not graph.ops[root[0]].is_placeholder}
        if not shares_kernels(op):
            needs[-1 - i] = producers
            continue
        size, results = _elements(graph, i)
        beside = {number for root in roots for number in read_by[root][-NEAR:]} - producers
        for number in sorted((p for p in producers if p >= 0), reverse=True) + sorted(beside, reverse=True):
            group, first = groups[number], graph.ops[groups[number].first]
            if within_modules and (not modules[i] or modules[group.first] != modules[i]):
                continue
            if first.backward == op.backward and _fits(group, size, results, _sums_columns(graph, op)) and not any(
                p != number and _reaches(p, number, needs, groups) for p in producers
            ):  # fmt: skip
                break
        else:
            number = len(groups)
            groups.append(KernelGroup(size, set(), first=i))
            needs[number] = set()
        group = groups[number]
        group.ops.append(i)
        group.size, group.results = max(group.size, size), group.results if results is None else group.results | {results}
        group_of[i] = number
        needs[number] |= producers - {number}
        for root in roots:
            read_by[root].append(number)
    return groups, group_of


def _fits(group: KernelGroup, size: int, results: int | None, sums_columns: bool) -> bool:
    if len(group.ops) >= LARGEST or (sums_columns and not group.results and (results or 0) < COLUMNS):
        return False
    if results is not None:
        mixed = size >= max(MIXED, 2 * results**2) and len(group.results | {results}) == 2  # at least twice as many rows as columns
        return size == group.size and (len(group.results | {results}) == 1 or (sums_columns and mixed))
    return size == group.size or size in group.results


def _reaches(start: int, group: int, needs: dict[int, set[int]], groups: list[KernelGroup]) -> bool:
    """Whether `start`, a group or an op, waits for `group`."""
    first, seen, waiting = groups[group].first, {start}, [start]
    while waiting:
        for other in needs.get(waiting.pop(), ()):
            if other == group:
                return True
            last = groups[other].ops[-1] if other >= 0 else -1 - other
            if other not in seen and last >= first:
                seen.add(other)
                waiting.append(other)
    return False


def _elements(graph: Graph, i: int) -> tuple[int, int | None]:
    """Elements over which an op runs, and those of a reduction's result."""
    op = graph.ops[i]
    produced = max(math.prod(t.shape) for t in op.outputs if t is not None)
    if is_reduction(op):
        size = max(produced, *(math.prod(graph.tensor(value).shape) for value in op.inputs))
        return size, min(math.prod(t.shape) for t in op.outputs if t is not None) if size > produced else produced
    return produced, None


def shares_kernels(op: Op) -> bool:
    """Whether it is computed by a kernel that may compute others, too."""
    has_results = op.kind == "compute" and any(t is not None for t in op.outputs)
    return op.alias is None and has_results and (is_reduction(op) or _is_pointwise(op))


def is_reduction(op: Op) -> bool:
    return _name(op) in REDUCTIONS


def is_elementwise(graph: Graph, i: int) -> bool:
    """Whether kernels compute it with others, and the first output has an element per element of an input: also of a softmax or a norm,
    beside few numbers per row."""
    op = graph.ops[i]
    if _is_pointwise(op):
        return len(op.outputs) == 1
    return is_reduction(op) and any(graph.tensor(value).numel == op.output.numel for value in op.inputs)


def _sums_columns(graph: Graph, op: Op) -> bool:
    """Whether a reduction leaves the last dim: its kernel runs over the elements in another order than what computes them."""
    dims = op.literals[0][1] if len(op.literals[0]) > 1 else None
    if _name(op) not in ("sum", "mean", "amax", "amin", "prod") or not isinstance(dims, tuple):
        return False
    rank = len(graph.tensor(op.inputs[0]).shape)
    return rank - 1 not in {d % rank for d in dims if isinstance(d, int)}


def _is_pointwise(op: Op) -> bool:
    return _name(op) in MOVES or (op.target.startswith("aten.") and is_pointwise(op.target))


def _name(op: Op) -> str:
    """aten.mm.default -> mm; operators of others keep their namespace, so that none is taken for torch's."""
    return op.target.split(".")[1] if op.target.startswith("aten.") else op.target

