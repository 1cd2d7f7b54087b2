"""Which forward values a compiled training step computes again in its backward pass: pointwise results and norms, as torch's partitioner.

torch.compile divides forward and backward where the fewest bytes cross (its min-cut partitioner), and kernels of the backward compute
the rest again on their way. Here, in the order of the forward, of each tensor v that the backward reads:

    sources(v)      the kept tensors from which v is computed by such ops alone; one that isn't kept is a source itself, unless its own
                    sources would add fewer bytes
    computed again  where those sources that nothing else keeps have fewer bytes than v, and there are at most MOST of them: a longer
                    chain, as of sums of residuals, would be there all at once before its last value is read; else v is kept

So casts, activation functions and products with gates are computed again from what matmuls and sums of residuals keep, on the way to what
reads them. What a matmul of the backward reads has to be written once more, and a norm where the sequence is sharded gathered once more; so
these may be kept (`keeping`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from autoshard.graph import Graph, Value, constants, grouped, is_random, reached
from autoshard.strategies.fusion import is_reduction, shares_kernels

MOST = 4
Keeping = Literal["matmuls", "norms", ""]


def computed_again(graph: Graph, keeping: Keeping) -> frozenset[str]:
    """The names of the forward's ops that a compiled step runs again, of views between them, and of casts of parameters that these read.

    keeping, of what else could be computed again: "matmuls", what kernels that are fused with nothing read, such as matmuls; "norms", of
    that norms alone; "", nothing, as torch.compile does.
    """
    partitioning, saved = _Partitioning(graph, keeping), _saved(graph)
    for i, op in enumerate(graph.ops):
        if i in saved:
            partitioning.decide(i, saved[i])
        elif not op.backward:
            partitioning.note(i)
    return frozenset(graph.ops[i].name for i in partitioning.again)


def _saved(graph: Graph) -> dict[int, list[Value]]:
    """By op of the forward, what the backward reads of its results: these, or views of them that the forward has."""
    read = {value for op in graph.ops if op.backward for value in op.inputs if not graph.ops[value[0]].backward}
    return grouped((graph.storage(value)[0], value) for value in sorted(read))


class _Partitioning:
    def __init__(self, graph: Graph, keeping: Keeping):
        self.graph, self.constant, self.keeping = graph, constants(graph), keeping
        alone = [op for op in graph.ops if op.backward and not op.is_view and not shares_kernels(op)]
        self.of_matmuls = {graph.storage(value) for op in alone for value in op.inputs}
        self.kept: set[Value] = set()
        self.again: set[int] = set()
        self.sources: dict[Value, frozenset[Value]] = {}

    def decide(self, i: int, values: Sequence[Value]) -> None:
        """values: what the backward reads of the results of op i, or views of these."""
        own, sources = frozenset(self.graph.storage(value) for value in values), self._of_op(i)
        if sources is not None and self._added(sources) < self._added(own) and not self._is_to_keep(own, sources):
            self.kept |= sources
            self.again |= reached([j for j, _ in values], self._read).keys()
        elif i not in self.constant:
            self.kept |= own
            self.sources |= {value: frozenset([value]) for value in own}

    def note(self, i: int) -> None:
        """The sources of what the backward doesn't read: in the order of the ops, as a chain may be longer than the stack is deep."""
        for k, tensor in enumerate(self.graph.ops[i].outputs):
            if tensor is not None and self.graph.ops[i].alias is None:
                self._of((i, k))

    def _is_to_keep(self, values: frozenset[Value], sources: frozenset[Value]) -> bool:
        if not self.keeping or self.of_matmuls.isdisjoint(values):
            return False
        least = min(self.graph.tensor(value).numel for value in values)
        return self.keeping == "matmuls" or any(self.graph.tensor(value).numel < least for value in sources)  # statistics of a norm

    def _added(self, values: frozenset[Value]) -> int:
        """Bytes that would be kept for these tensors."""
        return sum(self.graph.tensor(value).bytes for value in values - self.kept)

    def _of_op(self, i: int) -> frozenset[Value] | None:
        """None for an op that doesn't run again."""
        op = self.graph.ops[i]
        if i in self.constant or is_random(op) or is_reduction(op) or not shares_kernels(op):
            return None
        sources = frozenset[Value]().union(*(self._of(self.graph.storage(value)) for value in op.inputs))
        return sources if len(sources) <= MOST else None

    def _of(self, value: Value) -> frozenset[Value]:
        if value[0] in self.constant:
            return frozenset()
        if value not in self.sources:
            own = frozenset([value])
            sources = self._of_op(value[0]) if value not in self.kept else None
            self.sources[value] = sources if sources is not None and self._added(sources) < self._added(own) else own
        return self.sources[value]

    def _read(self, i: int) -> Iterator[int]:
        """The ops that have to run again for op i: those, views among them, that lead to its sources."""
        for value in self.graph.ops[i].inputs:
            root = self.graph.storage(value)
            if not self.graph.ops[root[0]].is_placeholder and root not in self.kept:
                yield value[0]
