"""How the backward pass gets each saved value, chosen together with the layouts: the Problem of a graph with all alternatives.

A graph of `graph.alternatives` has a copy of every op that could run again and, for every saved value u, an op s of kind SELECTED that
the backward reads. `formulate` gives it nodes, edges and bytes as if every copy ran. Here these nodes get more choices:

    copy, and the hub of its value   absent, or one of its layouts
    s                                absent, or one of (kept, recomputed, offloaded) with the layout in which the backward reads u

    edge to a reader       inf where the reader runs and what it reads is absent; 0 where the reader is absent
    edge u -> s            kept: 0, in the layout that the forward reads; offloaded: the exposed share of both transfers, and the route
    edge copy -> s         recomputed: the route; inf where the copy is absent
    bytes                  of what is absent, none. Of u between its last forward reader and s: only if kept; of an offloaded value from the
                           time at which it is copied back

An answer is a graph of `graph.selective` with its layouts, at the same cost (`chosen_of`). Bytes are counted until the last reader that a
value could have; so they are those of that graph, or more where an absent copy is the last reader.

Offloading. The host link runs beside the kernels, each direction on its own; only what takes longer than the pass beside it is waited for:

    step = cost + 2 max(0, H - W)      H = seconds of one direction, W = least seconds of the forward's kernels (`hidden_seconds`)

which is the largest of cost + 2 e (H - W) over shares e in [0, 1]. For one e that is an ordinary Problem, and its bound less 2 e W is
a bound on the step.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property

import numpy as np

from autoshard.cost import host_bandwidth, host_seconds, offload_seconds
from autoshard.formulate.records import Formulation, Layouts, TensorEdge, preferred_layouts
from autoshard.formulate.tables import bytes_of, differing
from autoshard.graph import SELECTED, Alternatives, Chosen, Graph, Offload, Tensor, constants, repeated_blocks
from autoshard.layout import has_partial, local_numel
from autoshard.problem import Edge, Problem, Usage

KEPT_MODE, RECOMPUTED_MODE, OFFLOADED_MODE = "kept", "recomputed", "offloaded"
SMALLEST_SHARE = 1 / 64  # of the largest saved value: smaller ones are not offloaded, as their transfers gain little
LEAD = 2.0  # a value is copied back so many times its transfer's seconds before it is read


@dataclass(frozen=True)
class LabelledChoices:
    """What a node chooses from: each of its layouts in each mode, mode by mode, and to be absent, which comes last."""

    layouts: int  # how many
    modes: tuple[str, ...] = ("",)  # of an op of kind SELECTED; other nodes have one without a name
    optional: bool = False  # whether it may be absent

    def label(self, k: int) -> tuple[str, int] | None:
        """(mode, number of the layout) of choice k; None: absent."""
        return (self.modes[k // self.layouts], k % self.layouts) if k < self.layouts * len(self.modes) else None

    def number(self, label: tuple[str, int] | None) -> int:
        """The inverse of `label`."""
        return self.layouts * len(self.modes) if label is None else self.modes.index(label[0]) * self.layouts + label[1]

    def spread(self, of_mode: Mapping[str, np.ndarray], axis: int, absent: float | np.ndarray = 0.0) -> np.ndarray:
        """An array over the choices from one over the layouts per mode; `absent`: what it holds where the node is absent."""
        blocks = [of_mode[mode] for mode in self.modes]
        if self.optional:
            blocks.append(np.broadcast_to(absent, [1 if d == axis else n for d, n in enumerate(blocks[0].shape)]))
        return np.concatenate(blocks, axis=axis)


@dataclass(frozen=True, eq=False, kw_only=True)
class SavedValues(Formulation):
    """A Formulation whose problem has the choices of saved values, too."""

    alternatives: Alternatives
    exposed: float
    choices: tuple[LabelledChoices, ...]  # of each node
    before: Mapping[int, str]  # of each op of kind SELECTED: the op before which its value is copied back

    def mode(self, i: int, choice: Sequence[int]) -> str | None:
        """How the value that op i selects is got; None where it isn't needed."""
        label = self.choices[i].label(choice[i])
        return None if label is None else label[0]

    def layout_index(self, v: int, choice: Sequence[int]) -> int | None:
        """Which of its layouts node v has; None where it is absent."""
        label = self.choices[v].label(choice[v])
        return None if label is None else label[1]

    def carried(self, other: SavedValues, choice: Sequence[int]) -> tuple[int, ...]:
        """An answer of `other`, of the same alternatives with other transfers allowed, as one of this problem."""
        return tuple(ours.number(theirs.label(k)) for ours, theirs, k in zip(self.choices, other.choices, choice, strict=True))

    @cached_property
    def preference(self) -> tuple[np.ndarray, ...]:
        """As of a Formulation; a kept value is preferred to a recomputed one, and that to an offloaded one."""
        return tuple(
            choices.spread({mode: weights + 3.0 * k for k, mode in enumerate(choices.modes)}, 0)
            for choices, weights in zip(self.choices, preferred_layouts(self), strict=True)
        )


def with_saved_values(formulation: Formulation, alternatives: Alternatives, original: Graph, *, exposed: float | None) -> SavedValues:
    """The problem in which every saved value is kept, recomputed or offloaded.

    formulation: of the alternatives' graph. original: the graph that they are of. exposed: the share e of transfers that costs; None:
    nothing is offloaded.
    """
    return _Extending(formulation, alternatives, original, exposed).extended()


class _Extending:
    """Adds the choices; equal tables stay one array."""

    def __init__(self, formulation: Formulation, alternatives: Alternatives, original: Graph, exposed: float | None):
        self.f, self.alternatives, self.original, self.exposed = formulation, alternatives, original, exposed
        self.graph, self.mesh, self.problem = formulation.graph, formulation.mesh, formulation.problem
        self.known: dict[tuple, np.ndarray] = {}
        self.kept_alive: list[object] = []
        copies = {i for i, op in enumerate(self.graph.ops) if op.name in alternatives.copies}
        self.copies = copies | {node for (i, _), node in formulation.hubs.items() if i in copies}
        self.modes = self._modes()
        self.choices = tuple(
            LabelledChoices(len(costs), self.modes.get(v, ("",)), v in self.modes or v in self.copies)
            for v, costs in enumerate(self.problem.node_costs)
        )
        # of each edge into an op of kind SELECTED: whether it comes from the forward or from the copy, and the op
        self.role = {k: ("copy" if e.a in self.copies else "forward", e.b) for k, e in enumerate(self.problem.edges) if e.b in self.modes}

    def extended(self) -> SavedValues:
        before = self._places_of_reloads()
        costs = tuple(self._node(v, c) for v, c in enumerate(self.problem.node_costs))
        edges = tuple(Edge(e.a, e.b, self._edge(k, e)) for k, e in enumerate(self.problem.edges))
        usages = [replace(u, bytes=self._usage(u)) for u in self.problem.usages]
        held = list(self.f.held)
        for k, (what, i) in self.role.items():
            if what == "forward" and i in before and (start := self.graph.index[before[i]]) < i:
                usages.append(self._reloaded(k, i, start))
                held.append("activations")
        problem = Problem(self.problem.names, costs, edges, tuple(usages), self.problem.usage_limit)
        own = {f.name: getattr(self.f, f.name) for f in fields(Formulation)} | {"problem": problem, "held": tuple(held)}
        return SavedValues(
            **own, alternatives=self.alternatives, exposed=self.exposed or 0.0, choices=self.choices, before=before,
        )  # fmt: skip

    def _modes(self) -> dict[int, tuple[str, ...]]:
        selected = [i for i, op in enumerate(self.graph.ops) if op.kind == SELECTED]
        largest = max((self.graph.tensor((i, 0)).bytes for i in selected), default=0)
        offloads = self.exposed is not None and host_bandwidth(self.mesh.device) is not None
        modes = {}
        for i in selected:
            op = self.graph.ops[i]
            modes[i] = (KEPT_MODE,) + (RECOMPUTED_MODE,) * (len(op.inputs) > 1)
            if offloads and op.output.bytes >= SMALLEST_SHARE * largest:
                modes[i] += (OFFLOADED_MODE,)
        return modes

    def _places_of_reloads(self) -> dict[int, str]:
        """Before which op a value is copied back: early enough by the least seconds of the backward's kernels, at most a layer ahead."""
        ops, moved = self.graph.ops, constants(self.original)  # casts in the backward pass, which copies that aren't made may have moved
        names = {op.name for i, op in enumerate(self.original.ops) if i not in moved}
        least = [float(self.problem.node_costs[i].min()) if op.backward and i not in self.copies else 0.0 for i, op in enumerate(ops)]
        until = np.concatenate([[0.0], np.cumsum(least)])
        usable = [i for i, op in enumerate(ops) if op.backward and not op.is_placeholder and op.name in names]
        layers = 1 + max((place.instance for place in repeated_blocks(self.original).places if place is not None), default=0)
        farthest = len(usable) // layers  # usable ops
        before = {}
        for i in (i for i, modes in self.modes.items() if OFFLOADED_MODE in modes):
            seconds = LEAD * host_seconds(self.graph.tensor((i, 0)).bytes / self.mesh.num_devices, self.mesh.device)
            early = int(np.searchsorted(until, until[i] - seconds, side="right")) - 1
            reader = bisect_left(usable, i)
            at = max(bisect_right(usable, early) - 1, reader - farthest, 0)
            before[i] = ops[usable[min(at, max(reader - 1, 0))]].name
        return before

    def _known(self, key: tuple, compute: Callable[[], np.ndarray], *alive: object) -> np.ndarray:
        """An array that nothing but its key decides. alive: objects whose ids are in the key."""
        if key not in self.known:
            self.kept_alive += alive
            self.known[key] = compute()
        return self.known[key]

    def _node(self, v: int, costs: np.ndarray) -> np.ndarray:
        choices = self.choices[v]
        if not choices.optional:
            return costs
        return self._known(("node", id(costs), choices), lambda: choices.spread(dict.fromkeys(choices.modes, costs), 0))

    def _edge(self, k: int, e: Edge) -> np.ndarray:
        sources, targets = self.choices[e.a], self.choices[e.b]
        if not (sources.optional or targets.optional):
            return e.table
        what, _ = self.role.get(k, ("", -1))
        link, hub = self.f.tensor_edges[k], e.a >= len(self.graph.ops)
        key: tuple = ("edge", id(e.table), what, sources, targets)
        if what == "forward":
            key += (hub, id(link.tensor), id(link.source_layouts), id(link.target_layouts))

        def table() -> np.ndarray:
            columns = targets.spread(self._seconds(e, what, hub, link), 1)
            absent = np.full((1, columns.shape[1]), math.inf)  # of the producer: forbidden where it is read
            if what == "copy":
                needed = {mode: math.inf if mode == RECOMPUTED_MODE else 0.0 for mode in targets.modes}
                absent[0] = targets.spread({mode: np.full(targets.layouts, cost) for mode, cost in needed.items()}, 0)
            elif e.b in self.copies:
                absent[0, -1] = 0.0
            return sources.spread(dict.fromkeys(sources.modes, columns), 0, absent)

        return self._known(key, table, link, e.table)

    def _seconds(self, e: Edge, what: str, hub: bool, link: TensorEdge) -> dict[str, np.ndarray]:
        """Seconds of an edge's route in each mode of its reader."""
        zeros = np.zeros_like(e.table)
        if what != "forward":
            return {"": e.table, KEPT_MODE: zeros, RECOMPUTED_MODE: e.table, OFFLOADED_MODE: zeros}
        differ = differing(link.source_layouts, link.target_layouts)
        seconds = {KEPT_MODE: np.where(differ, np.inf, e.table) if hub else e.table, RECOMPUTED_MODE: zeros}
        if OFFLOADED_MODE in self.choices[e.b].modes:
            seconds[OFFLOADED_MODE] = e.table + self._transfers(link.tensor, link.source_layouts)[:, None]
        return seconds

    def _transfers(self, tensor: Tensor, layouts: Layouts) -> np.ndarray:
        """Seconds of both transfers that count, per layout, in all microbatches; inf: partial sums are not offloaded."""
        sizes = bytes_of(tensor, layouts, self.mesh)
        one_way = np.array([offload_seconds(n, self.exposed or 0.0, self.mesh.device) for n in sizes])
        one_way[[has_partial(layout) for layout in layouts]] = math.inf
        return self.f.microbatches * 2 * one_way

    def _usage(self, u: Usage) -> np.ndarray:
        ends = [self.choices[v] for v in u.ends]
        if not any(choices.optional for choices in ends):
            return u.bytes
        what, i = self.role.get(-1 if u.edge is None else u.edge, ("", -1))
        waits = what == "forward" and u.end <= i  # before the backward reads it
        without = {"forward": (RECOMPUTED_MODE, OFFLOADED_MODE) if waits else (RECOMPUTED_MODE,), "copy": (KEPT_MODE, OFFLOADED_MODE)}

        def held() -> np.ndarray:
            held = u.bytes
            for axis, choices in enumerate(ends):
                of_mode = {mode: np.zeros_like(held) if mode in without.get(what, ()) else held for mode in choices.modes}
                held = choices.spread(of_mode, axis)
            return held

        return self._known(("usage", id(u.bytes), what, waits, *ends), held, u.bytes)

    def _reloaded(self, k: int, i: int, start: int) -> Usage:
        """The bytes of a value that was copied back and waits to be read."""
        link, e, choices = self.f.tensor_edges[k], self.problem.edges[k], self.choices[i]

        def held() -> np.ndarray:
            sizes = bytes_of(link.tensor, link.source_layouts, self.mesh)[:, None]
            nothing = np.zeros((len(sizes), choices.layouts))
            return choices.spread({mode: nothing + sizes if mode == OFFLOADED_MODE else nothing for mode in choices.modes}, 1)

        key = ("reloaded", id(link.tensor), id(link.source_layouts), choices)
        return Usage((e.a, e.b), start, i, self._known(key, held, link), k)


def hidden_seconds(formulation: Formulation) -> float:
    """W: the least seconds that the kernels of the forward pass take, in all microbatches."""
    ops = formulation.graph.ops
    first = [i for i, op in enumerate(ops) if not (op.is_placeholder or op.backward)]
    return math.fsum(float(formulation.problem.node_costs[i].min()) for i in first)


def transfer_seconds_of(formulation: SavedValues, choice: Sequence[int]) -> float:
    """H: seconds of one direction of all transfers of an answer, in all microbatches."""
    total = []
    for k, e in enumerate(formulation.problem.edges):
        if formulation.mode(e.b, choice) == OFFLOADED_MODE:
            link, ops = formulation.tensor_edges[k], formulation.graph.ops
            if link.a < len(ops) and ops[link.a].name in formulation.alternatives.copies:
                continue
            layout = link.source_layouts[choice[link.a]]
            size = local_numel(link.tensor.shape, layout, formulation.mesh) * link.tensor.itemsize
            total.append(formulation.microbatches * host_seconds(size, formulation.mesh.device))
    return math.fsum(total)


def chosen_of(formulation: SavedValues, choice: Sequence[int], exposed: float = 0.0) -> Chosen:
    """What an answer recomputes and offloads: the copies and values on which an op that always runs depends."""
    graph, alternatives = formulation.graph, formulation.alternatives
    used = {r.value for r in graph.results}
    recomputed, offloaded = set(), {}
    for i in range(len(graph.ops) - 1, -1, -1):
        op = graph.ops[i]
        is_read = any((i, k) in used for k in range(len(op.outputs)))
        if op.kind == SELECTED:
            mode = formulation.mode(i, choice) if is_read else None
            if mode == OFFLOADED_MODE:
                offloaded[alternatives.selected[op.name]] = Offload(formulation.before[i], exposed)
            elif mode == RECOMPUTED_MODE:
                used.add(op.inputs[1])
        elif op.name not in alternatives.copies or is_read:
            used.update(op.inputs)
            if op.name in alternatives.copies:
                recomputed.add(alternatives.copies[op.name])
    return Chosen(frozenset(recomputed), dict(sorted(offloaded.items())))

