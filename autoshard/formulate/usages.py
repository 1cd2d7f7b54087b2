"""Which node or edge of the Problem holds bytes, and when: a storage lives from the op that creates it to the last reader of it
or of a view of it. Its bytes depend on a layout, and so on the choice of one node or edge at a time, which is said to count for it:

    owner     the op that creates the storage, from its time on; a parameter, buffer or input counts throughout
    hub       counts from the first reader on: the value then waits in the hub's layout
    heir      a view that is read longer than all other readers of its base: it counts when those others are done, with its input
              layout, whether its base was resharded for it or not
    copy      the copy that a route creates on an edge whose layouts differ; it is held while the reader runs, or if the reader is
              a view for as long as that view lives, or until the view counts as heir

With microbatches the times 0 ... n - 1 are those of any microbatch but the first. A kept copy (graph.accumulation) is held at all of them,
a sum of gradients until it is reduced at one of the times after n, where each sum has its own.

Only a view of all elements of its base (a transpose, not a slice) can count for a storage: a slice keeps alive more than its own
bytes. Let t_v be the time of view v, x its base, and from(x) the time from which x's node counts for its storage. Then

    from(v) = max(t_v + 1, last of the other readers of x + 1, from(x))
"""

import math
from collections.abc import Mapping

import numpy as np

from autoshard.cost import master_bytes, optimizer_state_bytes
from autoshard.formulate.records import Layouts, Training
from autoshard.formulate.tables import MoveTables, Tables
from autoshard.graph import ACCUMULATED, KEPT, OFFLOADED, SELECTED, Graph, Value
from autoshard.problem import EdgeUsage, NodeUsage, Usage
from autoshard.strategies import Candidates, internal_bytes

KINDS = ("parameters", "gradients", "optimizer_state", "inputs", "activations", "resharded_copies", "temporaries")


class OpChoices:
    """Per op and choice; each is computed when it is first asked for, and kept in tables that graphs on one mesh may share."""

    def __init__(self, graph: Graph, candidates: Candidates, tables: Tables):
        self.graph, self.candidates, self.tables = graph, candidates, tables
        self.lists = [tables.number(options) for options in candidates.of]
        seen: dict[tuple, int] = {}
        self.first = [seen.setdefault((self.lists[i], graph.signature(i)), i) for i in range(len(graph.ops))]  # op like it
        self._bytes: dict[int, np.ndarray] = {}
        self._internal_bytes: dict[int, np.ndarray | None] = {}

    def outputs(self, value: Value) -> Layouts:
        """Layouts of a value, per choice of the op that produces it."""
        i, k = value
        options = self.candidates.of[i]
        return self.tables.once(("outputs", self.lists[i], k), lambda: tuple(c.outputs[k] for c in options))  # type: ignore[misc]

    def inputs(self, i: int, a: int) -> Layouts:
        """Layouts in which op i reads its input a, per choice."""
        options = self.candidates.of[i]
        return self.tables.once(("inputs", self.lists[i], a), lambda: tuple(c.inputs[a] for c in options))

    def bytes(self, i: int) -> np.ndarray:
        """Bytes of the outputs of op i, per choice."""
        first = self.first[i]
        if first not in self._bytes:
            outputs = [(k, t) for k, t in enumerate(self.graph.ops[i].outputs) if t is not None]
            self._bytes[first] = np.sum([self.tables.bytes(t, self.outputs((i, k))) for k, t in outputs], axis=0)
        return self._bytes[first]

    def internal_bytes(self, i: int) -> np.ndarray | None:
        """Bytes that the local program of op i holds besides its inputs and outputs, per choice; None where all of them are 0."""
        first = self.first[i]
        if first not in self._internal_bytes:
            op, inputs = self.graph.ops[i], self.graph.input_tensors(i)
            sizes = [internal_bytes(op, inputs, c.inputs, self.tables.mesh) for c in self.candidates.of[i]]
            self._internal_bytes[first] = np.array(sizes, dtype=float) if any(sizes) else None
        return self._internal_bytes[first]


class Usages:
    """Collects the usages of a Problem, each with the kind of what it holds (one of KINDS)."""

    def __init__(self, choices: OpChoices, training: Training | None, trained: Mapping[int, int], hubs: Mapping[Value, int]):
        """trained: of each trained parameter's op, the time at which its gradient is complete."""
        self.choices, self.graph, self.tables = choices, choices.graph, choices.tables
        self.training, self.trained, self.hubs = training, trained, hubs
        graph = self.graph
        self.usages: list[Usage] = []
        self.held: list[str] = []
        produced = [r.value[0] for r in graph.results if r.value is not None]
        self.sums = {i: k for k, i in enumerate(i for i in produced if graph.ops[i].kind == ACCUMULATED)}
        self.end = len(graph.ops) + 1 + len(self.sums)
        self.tied = {second for second, _ in graph.tied}
        self.returned = {r.value for r in graph.results if r.value is not None and r.kind == "output"}
        self.since: dict[Value, float] = {}  # from(x): when the value's own node begins to count for its storage; inf: never
        self.until: dict[Value, int] = {}  # when the node (or hub) of the value stops counting for its storage
        self.heirs: dict[int, int] = {}  # view -> from(v), for the views that count for the storage of their base
        for i, op in enumerate(graph.ops):
            for k, tensor in enumerate(op.outputs):
                if tensor is not None:
                    self._decide((i, k))

    # -- lifetimes

    def _decide(self, value: Value) -> None:
        """Sets when the value's node begins and stops to count, and which view counts after it."""
        i, op = value[0], self.graph.ops[value[0]]
        if op.is_placeholder:
            self.since[value] = math.inf
        elif op.alias is None:
            self.since[value] = i
        else:
            self.since[value] = self.heirs.get(i, math.inf) if self._is_full_view(i) else math.inf
        self.until[value] = self._last(value) + 1
        if self.since[value] == math.inf:
            return
        readers = [(self._end(j, a), j, a) for j, a in self.graph.users.get(value, ()) if self.graph.ops[j].holds(a)]
        views = [(end, j) for end, j, a in readers if self.graph.ops[j].alias == a]
        if not views or value in self.returned:
            return
        last, heir = max(views)
        others = max((end for end, j, _ in readers if j != heir), default=0)
        since = max(heir, others, self._hub_since(value) - 1) + 1
        if since <= last:
            self.heirs[heir] = since
            self.until[value] = since

    def _is_full_view(self, i: int) -> bool:
        op = self.graph.ops[i]
        assert op.alias is not None
        return len(op.outputs) == 1 and op.output.bytes == self.graph.tensor(op.inputs[op.alias]).bytes

    def _end(self, j: int, a: int) -> int:
        """The last time at which op j, or a reader of it if it is a view, needs input a."""
        op = self.graph.ops[j]
        return max((self._last((j, k)) for k in range(len(op.outputs))), default=j) if op.alias == a else j

    def _hub_since(self, value: Value) -> int:
        """When the hub of a value begins to count for its storage; where there is no hub, when the value's own node does."""
        since = int(self.since[value])
        return max(self.first_reader(value), since) if value in self.hubs else since

    def first_reader(self, value: Value) -> int:
        return min((i for i, _ in self.graph.users.get(value, ())), default=value[0] + 1)

    def _last(self, value: Value) -> int:
        return self.graph.last_use.get(value, value[0])

    # -- usages

    def _is_held(self, value: Value) -> bool:
        """Whether a value, or what it is a view of, is written to memory: always, unless kernels of a compiled program are fused."""
        i, k = self.graph.storage(value)
        fused = self.graph.ops[i].fused
        return fused is None or not fused.held or fused.held[k]

    def _hold(self, kind: str, usage: Usage) -> None:
        if usage.start < usage.end:
            self.usages.append(usage)
            self.held.append(kind)

    def add_hub(self, value: Value, edge: int, move: MoveTables) -> None:
        """move: from the output layouts of the value's op to the layouts of its hub."""
        first, end = self.first_reader(value), self.until[value]
        if self.since[value] == math.inf:  # the producer keeps it: the hub is a copy where its layout differs
            self._hold("resharded_copies", EdgeUsage(edge, first, self._last(value) + 1, move.copy))
            self._hold("temporaries", EdgeUsage(edge, first, first + 1, move.buffers))
            return
        since = self._hub_since(value)
        if since == first:  # the source is still there while the route to the hub runs
            self._hold("temporaries", EdgeUsage(edge, first, first + 1, move.leaving))
        self._hold("resharded_copies", EdgeUsage(edge, first, since, move.copy))
        if self._is_held(value):
            self._hold("activations", NodeUsage(self.hubs[value], since, end, self.tables.bytes(move.tensor, move.target_layouts)))

    def add_input(self, i: int, a: int, edge: int, move: MoveTables) -> None:
        """Adds the copy of input a of op i; where op i is a view of it, for as long as the view lives or until the view counts as heir."""
        if self.graph.ops[i].kind == SELECTED:
            self._add_selected(i, a, edge, move)
        elif self.graph.ops[i].kind == KEPT:
            self._hold("resharded_copies", EdgeUsage(edge, 0, len(self.graph.ops), move.copy))
            self._hold("temporaries", EdgeUsage(edge, i, i + 1, move.buffers))
        elif self.graph.ops[i].kind == ACCUMULATED:
            self._hold("temporaries", EdgeUsage(edge, i, i + 1, move.copy + move.buffers))
        elif self.graph.ops[i].alias != a:
            self._hold("resharded_copies", EdgeUsage(edge, i, i + 1, move.fetched(self.choices.bytes(i))))
        else:
            self._hold("resharded_copies", EdgeUsage(edge, i, self.heirs.get(i, self._end(i, a) + 1), move.copy))
            self._hold("temporaries", EdgeUsage(edge, i, i + 1, move.buffers))

    def _add_selected(self, i: int, a: int, edge: int, move: MoveTables) -> None:
        """Of the first input, what is held if it is kept: from its last forward reader on. Its route runs with the first reader."""
        if a == 0:
            value = self.graph.ops[i].inputs[0]
            kept = np.broadcast_to(self.tables.bytes(move.tensor, move.source_layouts)[:, None], move.copy.shape)
            self._hold("activations", EdgeUsage(edge, self._last(value) + 1, i, kept))
        self._hold("temporaries", EdgeUsage(edge, i, self.first_reader((i, 0)) + 1, move.leaving))

    def add_op(self, i: int) -> None:
        """Adds what op i holds: outputs that are no views, or the storage that it counts for as a view; for a parameter, its state too."""
        op = self.graph.ops[i]
        if op.name in self.tied:  # another name of a parameter holds no bytes
            return
        if op.is_placeholder:
            self._add_placeholder(i)
            return
        if op.kind == OFFLOADED:  # its output is in the host's memory
            return
        if op.kind == ACCUMULATED:
            self._hold("gradients", NodeUsage(i, 0, self._reduced(i) + 1, self.choices.bytes(i)))
            return
        if op.alias is not None:
            if i in self.heirs and self._is_held((i, 0)):
                base = self.graph.tensor(op.inputs[op.alias])
                ends = [self._own_end((i, k)) for k, tensor in enumerate(op.outputs) if tensor is not None]
                self._hold("activations", NodeUsage(i, self.heirs[i], max(ends), self.tables.bytes(base, self.choices.inputs(i, op.alias))))
            return
        if (sizes := self.choices.internal_bytes(i)) is not None:
            self._hold("temporaries", NodeUsage(i, i, i + 1, sizes))
        for k, output in enumerate(op.outputs):
            if output is not None and self._is_held((i, k)):
                end = max(self._own_end((i, k)), i + 1) - self._is_handed_over((i, k))
                self._hold("activations", NodeUsage(i, i, end, self.tables.bytes(output, self.choices.outputs((i, k)))))

    def _is_handed_over(self, value: Value) -> bool:
        """Whether the value ends as another op's output, which then counts for it: an op that selects it from a copy."""
        return value not in self.returned and any(self.graph.ops[j].kind == SELECTED and a for j, a in self.graph.users.get(value, ()))

    def _own_end(self, value: Value) -> int:
        """When the value's node stops counting for its storage: its hub may count from then on."""
        owned = self.since[value] < math.inf
        return self._hub_since(value) if owned and value in self.hubs else self.until[value]

    def _add_placeholder(self, i: int) -> None:
        tensor = self.graph.tensor((i, 0))
        held = self.tables.bytes(tensor, self.choices.outputs((i, 0)))
        kind = "parameters" if self.graph.ops[i].kind == "parameter" else "inputs"
        if (ready := self.trained.get(i)) is not None:
            assert self.training is not None
            sizes = held / tensor.itemsize
            state = np.array([optimizer_state_bytes(int(n), self.training.optimizer) for n in sizes], dtype=float)
            if self.training.master_weights:
                state += [master_bytes(int(n), tensor.itemsize) for n in sizes]
            since = self._reduced(ready) + 1 if ready in self.sums else ready + 1
            self._hold("gradients", NodeUsage(i, since, self.end, held))  # in the parameter's layout
            if state.any():
                self._hold("optimizer_state", NodeUsage(i, 0, self.end, state))
        self._hold(kind, NodeUsage(i, 0, self.end, held))

    def _reduced(self, i: int) -> int:
        """The time, after all ops, at which the sum of gradients i is reduced into the parameter's layout: one after the other."""
        return len(self.graph.ops) + self.sums[i]

    def add_result(self, k: int, edge: int, move: MoveTables) -> None:
        result = self.graph.results[k]
        assert result.value is not None
        producer = result.value[0]
        if result.kind == "output":
            self._hold("resharded_copies", EdgeUsage(edge, len(self.graph.ops), self.end, move.copy))
        elif producer in self.sums:
            time = self._reduced(producer)
            self._hold("temporaries", EdgeUsage(edge, time, time + 1, move.copy + move.buffers))
        elif self.graph.ops[producer].alias is not None and result.value not in self.hubs:  # reduced with its view, which takes no bytes
            self._hold("temporaries", EdgeUsage(edge, producer, producer + 1, move.copy + move.buffers))
        else:  # the unreduced gradient is there while it is reduced
            self._hold("temporaries", EdgeUsage(edge, producer + 1, producer + 2, move.leaving))
