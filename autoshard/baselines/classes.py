"""Dimension classes: which dims of which values have to be sharded together.

A slot is one dim of one value. A sharding rule S(i) -> S(o) of an op links the slots that it shards. The transitive closure of
these links is a class: the batch, the heads of a block, its hidden features, the vocabulary. A gradient is linked to its parameter.

With a divisor n, only rules whose slots all divide by n are links: a mesh axis of size n can apply exactly these evenly.
Values whose layout is that of their op and no other's (`private_values`) are in no class.
Example: with 4 key-value heads on 8 devices, the query heads stay one class, and the key and value weights are not in it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from autoshard.graph import Graph, Value, private_values
from autoshard.strategies import Candidates, Row, one_axis_rows, sends_tokens

RowSlots = tuple[tuple[bool, int, int], ...]  # (is an output, which one, dim)


@dataclass(frozen=True, eq=False)
class Slots:
    """The numbering of all dims of all values, and the groups of slots that one sharding rule shards together."""

    first: dict[Value, int]  # the slot of a value's dim 0
    sizes: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, eq=False)
class DimClasses:
    """The class of every slot, named by one of its slots."""

    first: dict[Value, int]
    roots: tuple[int, ...]

    def of(self, value: Value, dim: int) -> int:
        return self.roots[self.first[value] + dim]

    def priorities(self, value: Value, rank: int, priority: Mapping[int, int]) -> tuple[int, ...]:
        """For each dim of the value the priority of its class, 0 where it has none."""
        start = self.first[value]
        return tuple(priority.get(root, 0) for root in self.roots[start : start + rank])


def number_slots(graph: Graph, candidates: Candidates) -> Slots:
    first: dict[Value, int] = {}
    sizes: list[int] = []
    for i, op in enumerate(graph.ops):
        for k, tensor in enumerate(op.outputs):
            if tensor is not None:
                first[i, k] = len(sizes)
                sizes.extend(tensor.shape)
    return Slots(first, tuple(sizes), tuple(dict.fromkeys(_groups(graph, candidates, first, sizes))))


def _groups(graph: Graph, candidates: Candidates, first: dict[Value, int], sizes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    row_slots: dict[int, list[RowSlots]] = {}  # by signature: ops of one signature share their candidates
    private = private_values(graph)
    for i, op in enumerate(graph.ops):
        if op.is_placeholder:
            continue
        signature = id(candidates.of[i])
        if signature not in row_slots:
            row_slots[signature] = [_sharded_slots(r) for r in one_axis_rows(op, graph.input_tensors(i)) or () if not sends_tokens(op, r)]
        for row in row_slots[signature]:
            values = ((i, k) if is_output else op.inputs[k] for is_output, k, _ in row)
            slots = tuple(first[value] + dim for value, (*_, dim) in zip(values, row) if value not in private)
            yield tuple(slot for slot in slots if sizes[slot] > 1)
    for result in graph.results:
        if result.kind in ("gradient", "buffer") and result.value is not None and result.name in graph.index:
            stored = (graph.index[result.name], 0)
            yield from ((first[stored] + d, first[result.value] + d) for d in range(len(graph.tensor(stored).shape)))


def _sharded_slots(row: Row) -> RowSlots:
    outputs = [(True, k, p.dim) for k, p in enumerate(row.outputs) if p is not None and p.is_shard()]  # type: ignore[attr-defined]
    return (*outputs, *((False, k, p.dim) for k, p in enumerate(row.inputs) if p.is_shard()))  # type: ignore[attr-defined]


def dim_classes(slots: Slots, divisor: int = 1) -> DimClasses:
    """The classes that the rules whose slots all divide by `divisor` make."""
    parent = list(range(len(slots.sizes)))

    def root(slot: int) -> int:
        while parent[slot] != slot:
            parent[slot] = slot = parent[parent[slot]]
        return slot

    for group in slots.groups:
        if len(group) > 1 and not any(slots.sizes[slot] % divisor for slot in group):
            target = root(group[0])
            for slot in group[1:]:
                parent[root(slot)] = target
    return DimClasses(slots.first, tuple(root(slot) for slot in range(len(parent))))
