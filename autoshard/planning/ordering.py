"""Head-tail order for a whole model: which values are in that order, which ops need the natural one, and whether it pays.

A slot is one dim of one value. Rows that shard slots together (`strategies`) say that the op works index by index along them, or adds up
over them. The slots that are linked to the sequence of a long causal attention in this way are ordered:

    an op with a row that shards exactly its ordered slots works in any order of the sequence
    causal attention without a mask works in head-tail order, as its positions are known
    every other op reads and computes the natural order, with an op that reorders in front of it or behind it

Whatever the graph does along its sequence, the result is the same; where much has to be reordered, the plan is more expensive. With
`sequence_order` = "auto" a model with long causal attention is planned in head-tail order. If that plan doesn't shard the
sequence of any attention, or can't be had, the natural order is planned.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from autoshard.graph import ATTENTION, Graph, Op, SequenceOrder, Value, in_order, is_random
from autoshard.mesh import Mesh
from autoshard.planning.question import Question
from autoshard.planning.variants import Tried, Variant
from autoshard.strategies import Row, argument, is_long, one_axis_rows

# Ops that add up over a dim that they reduce, so that its order is no matter. Other ops that reduce it may pick single indices.
ADDS_UP = {
    "mm", "bmm", "addmm", "baddbmm", "matmul", "linear", "sum", "mean", "amax", "amin", "dot", "nll_loss_forward", "nll_loss_backward",
    "embedding_dense_backward", "native_layer_norm_backward", "native_group_norm_backward", "mse_loss", "_fused_rms_norm_backward",
}  # fmt: skip
Rows = tuple[Row, ...] | None


def orders(question: Question, tried: Sequence[Tried]) -> Iterator[Variant]:
    """Head-tail order, then the natural one; or only the one that the options ask for. ValueError where head-tail order can't be had."""
    wanted, mesh = question.options.sequence_order, question.mesh
    order = None if wanted == "natural" else order_for(question.graph, mesh)
    if order is None and wanted == "head_tail":
        raise ValueError(
            f"sequence_order is 'head_tail', but no causal attention has a sequence of {2 * mesh.num_devices} equal chunks "
            "that is long enough to be sharded; leave the option out"
        )
    if order is not None:

        def in_head_tail_order(graph: Graph) -> Graph | None:
            own = order if graph is question.graph else order_for(graph, mesh)
            return None if own is None else in_order(graph, own)

        explains = question.explains and wanted == "head_tail"
        noted = order.to_dict()
        yield Variant("head-tail order", lambda part: replace(part, explains=explains).map(in_head_tail_order, sequence_order=noted))
        if wanted == "head_tail" or not (tried[-1].has_no_plan or _shards_no_sequence(tried[-1])):
            return
    yield Variant("natural order")  # whose refusal speaks of the model as it is


def _shards_no_sequence(one: Tried) -> bool:
    if one.answered is None:
        return False
    formulated, choice = one.answered.instance.formulated, one.answered.choice
    attention = (i for i, op in enumerate(formulated.graph.ops) if op.name.startswith("attention") and op.inputs)
    return not any(placement.is_shard(2) for i in attention for placement in formulated.candidate(i, choice).inputs[0])


def order_for(graph: Graph, mesh: Mesh) -> SequenceOrder | None:
    """The graph's head-tail order of as many parts as the mesh has devices; None where it has no long causal attention, or its sequence
    isn't divisible into chunks, or some tensor has the sequence twice."""
    of_graph = _Slots(graph)
    parts, ordered = mesh.num_devices, of_graph.ordered()
    if not ordered or parts == 1 or any(graph.tensor(value).shape[dim] % (2 * parts) for value, dim in ordered.items()):
        return None
    natural = [i for i, op in enumerate(graph.ops) if not of_graph.works_in_any_order(i, ordered)]
    names = frozenset(natural)
    to, back = [], []
    for value, dim in sorted(ordered.items()):
        slot = (graph.ops[value[0]].name, value[1], dim)
        readers = {i in names for i, _ in graph.users.get(value, ())}
        if value[0] in names and False in readers:
            to.append(slot)
        elif value[0] not in names and (True in readers or any(r.value == value for r in graph.results)):
            back.append(slot)
    read = {i for value in ordered for i, _ in graph.users.get(value, ())}
    listed = [graph.ops[i].name for i in natural if i in read or graph.ops[i].target in ATTENTION]
    return SequenceOrder(parts, tuple(to), tuple(back), tuple(listed))


class _Slots:
    """The dims of all values, and what the rows of ops say of them."""

    def __init__(self, graph: Graph):
        self.graph = graph
        self.parent: dict[tuple[Value, int], tuple[Value, int]] = {}
        self.judged: dict[tuple, bool] = {}

    def of(self, i: int) -> Rows:
        return one_axis_rows(self.graph.ops[i], self.graph.input_tensors(i))

    def ordered(self) -> dict[Value, int]:
        """The ordered dim of every value that has one; empty where there is none, or a value has two."""
        roots = [(op.inputs[_first(op)], 2) for i, op in enumerate(self.graph.ops) if self._is_long_causal(i)]
        if not roots:
            return {}
        for group in self._groups():
            for slot in group[1:]:
                self.parent[self._root(slot)] = self._root(group[0])
        wanted = {self._root(slot) for slot in roots}
        dims: dict[Value, int] = {}
        for value, dim in [slot for slot in self.parent if self._root(slot) in wanted]:
            if dims.setdefault(value, dim) != dim:
                return {}
        return dims

    def _is_long_causal(self, i: int) -> bool:
        op = self.graph.ops[i]
        if op.target not in ATTENTION or not argument(op, 4 + 3 * _first(op), "is_causal", False):
            return False
        return is_long(op, self.graph.input_tensors(i))

    def _groups(self) -> Iterator[list[tuple[Value, int]]]:
        for i, op in enumerate(self.graph.ops):
            for row in (self.of(i) or ()) if op.inputs else ():
                outputs = [(i, k) for k in range(len(op.outputs))]
                placed = [*zip(row.inputs, op.inputs, strict=True), *zip(row.outputs, outputs, strict=True)]
                group = [(value, p.dim) for p, value in placed if p is not None and p.is_shard()]  # type: ignore[attr-defined]
                yield [slot for slot in group if self.graph.tensor(slot[0]).shape[slot[1]] > 1]
        for result in self.graph.results:
            if result.kind in ("gradient", "buffer") and result.value is not None and result.name in self.graph.index:
                stored = (self.graph.index[result.name], 0)
                yield from ([(stored, d), (result.value, d)] for d in range(len(self.graph.tensor(stored).shape)))

    def _root(self, slot: tuple[Value, int]) -> tuple[Value, int]:
        self.parent.setdefault(slot, slot)
        while self.parent[slot] != slot:
            self.parent[slot] = slot = self.parent[self.parent[slot]]
        return slot

    def works_in_any_order(self, i: int, ordered: dict[Value, int]) -> bool:
        """Whether op i computes its ordered outputs in head-tail order from its ordered inputs in that order."""
        op = self.graph.ops[i]
        ins = tuple(ordered.get(value) for value in op.inputs)
        outs = tuple(ordered.get((i, k)) for k in range(len(op.outputs)))
        if all(dim is None for dim in (*ins, *outs)):
            return op.target not in ATTENTION
        key = (self.graph.signature(i), ins, outs)
        if key not in self.judged:
            self.judged[key] = bool(op.inputs) and not is_random(op) and self._judge(i, ins, outs)
        return self.judged[key]

    def _judge(self, i: int, ins: tuple[int | None, ...], outs: tuple[int | None, ...]) -> bool:
        op = self.graph.ops[i]
        if op.target in ATTENTION:
            return argument(op, 3 + 3 * _first(op), "attn_mask") is None and ins[_first(op) : _first(op) + 3] == (2, 2, 2)
        if all(dim is None for dim in outs) and op.target.split(".")[1] not in ADDS_UP:
            return False
        return any(_shards_exactly(row, ins, outs) for row in self.of(i) or ())


def _first(op: Op) -> int:
    """The position of the queries."""
    return int(op.target == ATTENTION[1])


def _shards_exactly(row: Row, ins: tuple[int | None, ...], outs: tuple[int | None, ...]) -> bool:
    """Whether the row shards these dims and no others, and adds up nothing but what it shards."""
    inputs = all(p.is_replicate() if d is None else p.is_shard(d) for p, d in zip(row.inputs, ins, strict=True))
    return inputs and all(p is None or (not p.is_shard() if d is None else p.is_shard(d)) for p, d in zip(row.outputs, outs, strict=True))
