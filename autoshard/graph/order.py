"""Head-tail order of a sequence, in which equal shards have equal shares of the work of causal attention.

With n parts, a sequence is 2 n chunks. Part r holds chunk r and chunk 2 n - 1 - r:

    n = 2, chunks of the natural order 0 1 2 3       in head-tail order 0 3 | 1 2

A query of position t attends to t + 1 keys, so the chunks r and 2 n - 1 - r together have the same number of scores for every r.
`head_tail` = 0 is the natural order.

A graph whose sequence is in this order inside computes what it computed before (`in_order`); inputs and results stay in the natural one:

    to        a value that an op computes in the natural order and others read in head-tail order: one op reorders it
    back      the reverse, for ops that need the natural order and for results
    natural   the ops that read the natural order. All others read values as they are computed, or reordered

Causal attention that isn't among the natural ops gets the number of parts as an argument, from which it knows the positions of its tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autoshard.graph.records import Graph, Op, Ref, Value
from autoshard.graph.rewriting import Rewriting

ATTENTION = ("autoshard.attention.default", "autoshard.attention_backward.default")
REORDER = "autoshard.reorder.default"
Slot = tuple[str, int, int]  # name of an op, output, dim
Runs = tuple[tuple[int, int], ...]  # (first position, how many) of tokens that are stored one after the other


def stored_runs(size: int, head_tail: int, start: int, stop: int) -> Runs:
    """The positions of the tokens that are stored at [start, stop) of a sequence of `size` tokens in this order, adjacent runs joined.

    ValueError where the parts don't divide the sequence.
    """
    if not head_tail:
        return ((start, stop - start),) if stop > start else ()
    if size % (2 * head_tail):
        raise ValueError(f"a sequence of {size} tokens has no head-tail order of {head_tail} parts; expected a multiple of {2 * head_tail}")
    chunk = size // (2 * head_tail)
    runs: list[tuple[int, int]] = []
    for k in range(start // chunk, -(-stop // chunk)):
        part, is_tail = divmod(k, 2)
        first = (2 * head_tail - 1 - part if is_tail else part) * chunk
        lo, hi = max(start, k * chunk) - k * chunk, min(stop, (k + 1) * chunk) - k * chunk
        if runs and sum(runs[-1]) == first + lo:
            runs[-1] = (runs[-1][0], runs[-1][1] + hi - lo)
        elif hi > lo:
            runs.append((first + lo, hi - lo))
    return tuple(runs)


@dataclass(frozen=True)
class SequenceOrder:
    """What differs in a graph whose sequence is in head-tail order."""

    head_tail: int  # parts
    to: tuple[Slot, ...]
    back: tuple[Slot, ...]
    natural: tuple[str, ...]  # names of ops

    def to_dict(self) -> dict[str, Any]:
        to, back = (list(map(list, slots)) for slots in (self.to, self.back))
        return {"head_tail": self.head_tail, "to": to, "back": back, "natural": list(self.natural)}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> "SequenceOrder":
        """ValueError where the data is no order."""
        try:
            to, back = (tuple((str(name), int(k), int(dim)) for name, k, dim in data[key]) for key in ("to", "back"))
            return SequenceOrder(int(data["head_tail"]), to, back, tuple(map(str, data["natural"])))
        except (KeyError, TypeError, ValueError):
            raise ValueError(f"its sequence_order is {str(data)[:60]!r}; expected head_tail, to, back and natural") from None


def in_order(graph: Graph, order: SequenceOrder | None) -> Graph:
    """The graph in this order. ValueError where the order names an op that the graph doesn't have."""
    return graph if order is None else _Ordering(graph, order).ordered()


class _Ordering(Rewriting):
    """`read(..., late=True)` is what the natural ops read."""

    def __init__(self, graph: Graph, order: SequenceOrder):
        super().__init__(graph)
        unknown = [name for name in (*(slot[0] for slot in (*order.to, *order.back)), *order.natural) if name not in graph.index]
        if unknown:
            raise ValueError(f"the plan's order of the sequence names {unknown[0]!r}, which the model doesn't have; plan again")
        self.head_tail, self.natural = order.head_tail, frozenset(order.natural)
        self.dims: dict[Value, tuple[int, bool]] = {}
        for slots, back in ((order.to, False), (order.back, True)):
            self.dims |= {(graph.index[name], k): (dim, back) for name, k, dim in slots}

    def ordered(self) -> Graph:
        first = next((i for i, op in enumerate(self.source.ops) if not op.is_placeholder), len(self.source.ops))
        for i, op in enumerate(self.source.ops):
            for j in range(first) if i == first else ():  # behind all placeholders
                self._reorder(j)
            natural, literals = op.name in self.natural, op.literals
            if op.target in ATTENTION and not natural:
                literals = (literals[0], tuple(sorted((*literals[1], ("head_tail", self.head_tail)))))
            self.keep(i, late=natural, literals=literals)
            if i >= first:
                self._reorder(i)
        return self.graph(late=True)

    def _reorder(self, i: int) -> None:
        op = self.source.ops[i]
        for k, tensor in enumerate(op.outputs):
            if (i, k) in self.dims and tensor is not None:
                dim, back = self.dims[i, k]
                name = f"{op.name}.{'natural' if back else 'head_tail'}{k or ''}"
                literals = ((Ref(0), dim, self.head_tail, back), ())
                late = op.backward or op.kind == "tangent"
                computed = self.read((i, k))
                reordered = self.add(Op(name, REORDER, (computed,), literals, (tensor,), module=op.module, backward=late))
                self.values[i, k], self.late[i, k] = (computed, reordered) if back else (reordered, computed)
