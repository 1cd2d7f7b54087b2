"""Which ops share a kernel when the program is compiled, as torch's inductor groups them, and what each group reads and writes.

Pointwise ops and reductions join the group of a producer, or of an op that reads the same tensor, if

    - they run over the same elements: a pointwise op over as many as the group, or over the results of its reductions; a reduction over as
      many, to as many results as the group's other reductions; and
    - no other producer depends on the group (the kernels would wait for each other).

A group reads each tensor from outside once, and writes what others read. A pointwise result that can be computed again from no more bytes
than it has (a cast, a sum, a product with a row of numbers) is computed again by the groups that read it, if these are all that read it.
Matmuls, attention, convolutions, lookups and collectives are kernels of their own.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field, replace

from autoshard.graph import Fused, Graph, Op, Value
from autoshard.strategies.dims import is_pointwise

NEAR = 4  # groups that read the same tensor: those that an op may join
NO_MORE = 1.1  # bytes that are read to compute a result again, relative to its own
LARGEST = 64  # ops of a group: inductor's max_fusion_size
MOVES = {
    "_to_copy", "clone", "copy", "cat", "constant_pad_nd", "where", "arange", "full", "zeros", "ones", "slice_backward", "select_backward",
}  # fmt: skip
REDUCTIONS = {
    "sum", "mean", "prod", "amax", "amin", "max", "min", "any", "all", "argmax", "argmin", "var", "var_mean", "std", "logsumexp", "norm",
    "linalg_vector_norm", "_softmax", "_softmax_backward_data", "_log_softmax", "_log_softmax_backward_data", "native_layer_norm",
    "native_layer_norm_backward", "_fused_rms_norm", "_fused_rms_norm_backward", "native_group_norm", "native_group_norm_backward",
    "native_batch_norm", "_native_batch_norm_legit", "native_batch_norm_backward", "cumsum",
}  # fmt: skip


@dataclass
class KernelGroup:
    size: int  # elements over which it runs
    results: int | None  # elements of its reductions' results; None without one
    ops: list[int] = field(default_factory=list)
    first: int = 0


def fused(graph: Graph) -> Graph:
    """The same graph, whose ops know what they read and write in their groups (Op.fused)."""
    groups, group_of = _groups(graph)
    readers = _readers(graph, group_of)
    cheap = _computed_again(graph, group_of, readers)
    ops = list(graph.ops)
    for number, group in enumerate(groups):
        writes = {i: [_is_written(graph, (i, o), number, readers, cheap) for o in range(len(ops[i].outputs))] for i in group.ops}
        live = {i for i in group.ops if any(writes[i])}
        for i in reversed(group.ops):  # what only others compute again is not computed here
            if i in live:
                live |= {root[0] for value in ops[i].inputs if group_of.get((root := _root(graph, value))[0]) == number}
        seen: dict[Value, int] = {}  # bytes that the group has read of a tensor
        for i in group.ops:
            reads = tuple(_share_read(graph, value, number, group_of, cheap, seen) if i in live else 0.0 for value in ops[i].inputs)
            ops[i] = replace(ops[i], fused=Fused(reads, tuple(map(float, writes[i])), i == min(live, default=-1)))
    return replace(graph, ops=tuple(ops))


def _readers(graph: Graph, group_of: dict[int, int]) -> dict[Value, set[int]]:
    """Of the values that own their bytes: the groups that read them, and, as - 1 - op, the ops outside of groups; also results."""
    readers: dict[Value, set[int]] = defaultdict(set)
    for i, op in enumerate(graph.ops):
        for value in op.inputs if op.alias is None else ():
            readers[_root(graph, value)].add(group_of.get(i, -1 - i))
    for result in graph.results:
        if result.value is not None:
            readers[_root(graph, result.value)].add(-1 - len(graph.ops))
    return readers


def _is_written(
    graph: Graph, value: Value, group: int, readers: dict[Value, set[int]], cheap: dict[Value, tuple[Value, ...]]
) -> bool:  # fmt: skip
    outside = readers[value] - {group}
    return graph.ops[value[0]].outputs[value[1]] is not None and bool(outside) and value not in cheap


def _share_read(
    graph: Graph, value: Value, number: int, group_of: dict[int, int], cheap: dict[Value, tuple[Value, ...]], seen: dict[Value, int]
) -> float:  # fmt: skip
    """How much of the bytes of an input its group reads for it: none of what it computes itself, or has read."""
    root, bytes = _root(graph, value), 0
    for source in cheap.get(root, (value,)) if group_of.get(root[0]) != number else ():
        owner, size = _root(graph, source), graph.tensor(source).bytes
        if group_of.get(owner[0]) != number:
            bytes += max(size - seen.get(owner, 0), 0)
            seen[owner] = max(size, seen.get(owner, 0))
    return bytes / max(graph.tensor(value).bytes, 1)


def _computed_again(graph: Graph, group_of: dict[int, int], readers: dict[Value, set[int]]) -> dict[Value, tuple[Value, ...]]:
    """Pointwise results that groups compute again, each with the tensors outside of any of them from which they do."""
    cheap: dict[Value, tuple[Value, ...]] = {}
    for i, op in enumerate(graph.ops):
        if i not in group_of or len(op.outputs) != 1 or op.outputs[0] is None or not _is_pointwise(op):
            continue
        sources = tuple(dict.fromkeys(source for value in op.inputs for source in cheap.get(_root(graph, value), (value,))))
        outside = readers[i, 0] - {group_of[i]}
        if sources and all(r >= 0 for r in outside) and sum(graph.tensor(s).bytes for s in sources) <= NO_MORE * op.outputs[0].bytes:
            cheap[i, 0] = sources
    return cheap


def _groups(graph: Graph) -> tuple[list[KernelGroup], dict[int, int]]:
    groups: list[KernelGroup] = []
    group_of: dict[int, int] = {}
    needs: dict[int, set[int]] = {}  # of a group or, as - 1 - op, of an op outside: the same, of which it reads
    read_by: dict[Value, list[int]] = defaultdict(list)  # the groups that read a tensor
    for i, op in enumerate(graph.ops):
        if op.is_placeholder:
            continue
        roots = [_root(graph, value) for value in op.inputs]
        producers = {group_of.get(root[0], -1 - root[0]) for root in roots if not graph.ops[root[0]].is_placeholder}
        if op.alias is not None or not _fuses(op):
            needs[-1 - i] = producers
            continue
        size, results = _elements(graph, i)
        beside = {number for root in roots for number in read_by[root][-NEAR:]} - producers
        for number in sorted((p for p in producers if p >= 0), reverse=True) + sorted(beside, reverse=True):
            group = groups[number]
            if _fits(group, size, results) and not any(
                p != number and _reaches(p, number, needs, groups) for p in producers
            ):  # fmt: skip
                break
        else:
            number = len(groups)
            groups.append(KernelGroup(size, results, first=i))
            needs[number] = set()
        group = groups[number]
        group.ops.append(i)
        group.size, group.results = max(group.size, size), group.results if results is None else results
        group_of[i] = number
        needs[number] |= producers - {number}
        for root in roots:
            read_by[root].append(number)
    return groups, group_of


def _fits(group: KernelGroup, size: int, results: int | None) -> bool:
    if len(group.ops) >= LARGEST:
        return False
    if results is not None:
        return size == group.size and group.results in (None, results)
    return size in (group.size, group.results)


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
    if _name(op) in REDUCTIONS:
        size = max(produced, *(math.prod(graph.tensor(value).shape) for value in op.inputs))
        return size, min(math.prod(t.shape) for t in op.outputs if t is not None) if size > produced else produced
    return produced, None


def _fuses(op: Op) -> bool:
    return op.kind == "compute" and any(t is not None for t in op.outputs) and (_name(op) in REDUCTIONS or _is_pointwise(op))


def _is_pointwise(op: Op) -> bool:
    return _name(op) in MOVES or (op.target.startswith("aten.") and is_pointwise(op.target))


def _name(op: Op) -> str:
    return op.target.split(".")[1] if "." in op.target else op.target


def _root(graph: Graph, value: Value) -> Value:
    """The value whose storage it is."""
    op = graph.ops[value[0]]
    while op.alias is not None:
        value = op.inputs[op.alias]
        op = graph.ops[value[0]]
    return value

