"""Who holds bytes, and when: a storage lives from the op that makes it to the last reader of it or of a view of it.

    owner     an output of op i, from i on; a parameter, buffer or input, throughout
    hub       takes over when the first reader runs: the value then waits in the hub's layout
    heir      a view that is read longer than whatever else reads its base: it takes over when those others are done, in the
              layout that it takes, whether its base was moved for it or not
    copy      what a route makes on an edge, where layouts differ; for an op's own time, for as long as it lives if the op
              is a view that doesn't take over (yet)

Only a view of all of its base (a transpose, not a slice) can hand on: a slice keeps more than its own bytes. With t_v the time of
view v, x its base, and from(x) the time from which x's node counts for its storage,

    from(v) = max(t_v + 1, last of the other readers of x + 1, from(x))
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

from autoshard.cost import master_bytes, optimizer_state_bytes
from autoshard.formulate.records import Layouts, Training
from autoshard.formulate.tables import Move, Tables
from autoshard.graph import Graph, Value
from autoshard.problem import EdgeUsage, NodeUsage, Usage

KINDS = ("parameters", "gradients", "optimizer_state", "inputs", "activations", "resharded_copies", "temporaries")


class Usages:
    """Collects usages with what they hold. The edges are those of the Problem, by what they mean."""

    def __init__(
        self,
        graph: Graph,
        tables: Tables,
        training: Training | None,
        trained: Mapping[int, int],  # parameter's op: the time at which its gradient is complete
        hubs: Mapping[Value, int],
        gives: Callable[[Value], Layouts],
        takes: Callable[[int, int], Layouts],
        makes: Callable[[int], np.ndarray],  # bytes of an op's outputs, per choice
        inside: Callable[[int], np.ndarray | None],  # bytes that the op's local program holds beside inputs and outputs, per choice
    ):
        self.graph, self.tables, self.training, self.trained = graph, tables, training, trained
        self.hubs, self.gives, self.takes, self.makes, self.inside = hubs, gives, takes, makes, inside
        self.usages: list[Usage] = []
        self.held: list[str] = []
        self.end = len(graph.ops) + 1
        self.tied = {second for second, _ in graph.tied}
        self.returned = {r.value for r in graph.results if r.value is not None and r.kind == "output"}
        self.since: dict[Value, float] = {}  # from(x): when the value's own node begins to count for its storage; inf: never
        self.until: dict[Value, int] = {}  # when the node (or hub) of the value ends to count for it
        self.heirs: dict[int, int] = {}  # view -> from(v), for the views that take over
        for i, op in enumerate(graph.ops):
            for k, tensor in enumerate(op.outputs):
                if tensor is not None:
                    self._decide((i, k))

    # -- lifetimes

    def _decide(self, value: Value) -> None:
        """When the value's node begins and ends to count, and which view takes over from it."""
        i, op = value[0], self.graph.ops[value[0]]
        if op.is_placeholder:
            self.since[value] = math.inf
        elif op.alias is None:
            self.since[value] = i
        else:
            self.since[value] = self.heirs.get(i, math.inf) if self._is_whole_view(i) else math.inf
        self.until[value] = self._last(value) + 1
        if self.since[value] == math.inf:
            return
        readers = [(self._end(j, a), j, a) for j, a in self.graph.users.get(value, ())]
        views = [(end, j) for end, j, a in readers if self.graph.ops[j].alias == a]
        if not views or value in self.returned:
            return
        last, heir = max(views)
        others = max((end for end, j, _ in readers if j != heir), default=0)
        since = max(heir, others, self._hub_since(value) - 1) + 1
        if since <= last:
            self.heirs[heir] = since
            self.until[value] = since

    def _is_whole_view(self, i: int) -> bool:
        op = self.graph.ops[i]
        assert op.alias is not None
        return len(op.outputs) == 1 and op.output.bytes == self.graph.tensor(op.inputs[op.alias]).bytes

    def _end(self, j: int, a: int) -> int:
        """The last time at which op j needs what it takes as input a."""
        op = self.graph.ops[j]
        return max((self._last((j, k)) for k in range(len(op.outputs))), default=j) if op.alias == a else j

    def _hub_since(self, value: Value) -> int:
        """When the hub of an owned value takes over; without a hub when the value's own node does."""
        since = int(self.since[value])
        return max(self.first_reader(value), since) if value in self.hubs else since

    def first_reader(self, value: Value) -> int:
        return min((i for i, _ in self.graph.users.get(value, ())), default=value[0] + 1)

    def _last(self, value: Value) -> int:
        return self.graph.last_use.get(value, value[0])

    # -- usages

    def _hold(self, kind: str, usage: Usage) -> None:
        if usage.start < usage.end:
            self.usages.append(usage)
            self.held.append(kind)

    def add_hub(self, value: Value, edge: int, move: Move) -> None:
        """move: from what the value's op gives to what its hub takes."""
        first, end = self.first_reader(value), self.until[value]
        if self.since[value] == math.inf:  # whoever gave it keeps it: the hub is a copy where its layout differs
            self._hold("resharded_copies", EdgeUsage(edge, first, self._last(value) + 1, move.copy))
            self._hold("temporaries", EdgeUsage(edge, first, first + 1, move.buffers))
            return
        since = self._hub_since(value)
        if since == first:  # what the hub was made from is still there while it is made
            self._hold("temporaries", EdgeUsage(edge, first, first + 1, move.leaving))
        self._hold("resharded_copies", EdgeUsage(edge, first, since, move.copy))
        self._hold("activations", NodeUsage(self.hubs[value], since, end, self.tables.bytes(move.tensor, move.takes)))

    def add_input(self, i: int, a: int, edge: int, move: Move) -> None:
        """The copy of what op i reads; where it is a view, as long as that lives or until it takes over."""
        if self.graph.ops[i].alias != a:
            self._hold("resharded_copies", EdgeUsage(edge, i, i + 1, move.fetched(self.makes(i))))
            return
        self._hold("resharded_copies", EdgeUsage(edge, i, self.heirs.get(i, self._end(i, a) + 1), move.copy))
        self._hold("temporaries", EdgeUsage(edge, i, i + 1, move.buffers))

    def add_op(self, i: int) -> None:
        """What op i allocates: outputs that are no views, the storage that a view takes over; a parameter with all that belongs to it."""
        op = self.graph.ops[i]
        if op.name in self.tied:  # another name of a parameter: nothing of its own
            return
        if op.is_placeholder:
            self._add_placeholder(i)
            return
        if op.alias is not None:
            if i in self.heirs:
                base = self.graph.tensor(op.inputs[op.alias])
                ends = [self._own_end((i, k)) for k, tensor in enumerate(op.outputs) if tensor is not None]
                self._hold("activations", NodeUsage(i, self.heirs[i], max(ends), self.tables.bytes(base, self.takes(i, op.alias))))
            return
        if (inside := self.inside(i)) is not None:
            self._hold("temporaries", NodeUsage(i, i, i + 1, inside))
        for k, output in enumerate(op.outputs):
            if output is not None:
                end = max(self._own_end((i, k)), i + 1)
                self._hold("activations", NodeUsage(i, i, end, self.tables.bytes(output, self.gives((i, k)))))

    def _own_end(self, value: Value) -> int:
        """When the value's node ends to count for its storage: a hub may go on."""
        owned = self.since[value] < math.inf
        return self._hub_since(value) if owned and value in self.hubs else self.until[value]

    def _add_placeholder(self, i: int) -> None:
        tensor = self.graph.tensor((i, 0))
        held = self.tables.bytes(tensor, self.gives((i, 0)))
        kind = "parameters" if self.graph.ops[i].kind == "parameter" else "inputs"
        if (ready := self.trained.get(i)) is not None:
            assert self.training is not None
            sizes = held / tensor.itemsize
            state = np.array([optimizer_state_bytes(int(n), self.training.optimizer) for n in sizes], dtype=float)
            if self.training.master_weights:
                state += [master_bytes(int(n), tensor.itemsize) for n in sizes]
            self._hold("gradients", NodeUsage(i, ready + 1, self.end, held))  # in the parameter's layout
            if state.any():
                self._hold("optimizer_state", NodeUsage(i, 0, self.end, state))
        self._hold(kind, NodeUsage(i, 0, self.end, held))

    def add_result(self, k: int, edge: int, move: Move) -> None:
        result = self.graph.results[k]
        assert result.value is not None
        made = result.value[0]
        if result.kind == "output":
            self._hold("resharded_copies", EdgeUsage(edge, len(self.graph.ops), self.end, move.copy))
        else:  # what a gradient is reduced from is there while it is reduced
            self._hold("temporaries", EdgeUsage(edge, made + 1, made + 2, move.leaving))
