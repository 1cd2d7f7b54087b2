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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property

import numpy as np

from autoshard.cost import host_bandwidth, host_seconds
from autoshard.formulate.records import Formulation, Layouts
from autoshard.graph import SELECTED, Alternatives, Chosen, Graph, Offload, Tensor, repeated_blocks
from autoshard.layout import local_numel
from autoshard.mesh import Mesh
from autoshard.problem import Edge, Problem, Usage

KEPT_MODE, RECOMPUTED_MODE, OFFLOADED_MODE = "kept", "recomputed", "offloaded"
SMALLEST_SHARE = 1 / 64  # of the largest saved value: smaller ones are not offloaded, as their transfers gain little
LEAD = 2.0  # a value is copied back so many times its transfer's seconds before it is read


@dataclass(frozen=True, eq=False)
class SavedValues(Formulation):
    """A Formulation whose problem has the choices of saved values, too."""

    alternatives: Alternatives | None = None
    exposed: float = 0.0
    modes: Mapping[int, tuple[str, ...]] | None = None  # of each op of kind SELECTED
    base: tuple[int, ...] = ()  # per node the number of layouts
    before: Mapping[int, str] | None = None  # of each op of kind SELECTED: the op before which its value is copied back

    def mode(self, i: int, choice: Sequence[int]) -> str | None:
        """How the value that op i selects is got; None where it isn't needed."""
        assert self.modes is not None
        k = choice[i] // self.base[i]
        return self.modes[i][k] if k < len(self.modes[i]) else None

    def layout_index(self, v: int, choice: Sequence[int]) -> int | None:
        """Which of its layouts node v has; None where it is absent."""
        selected = self.modes is not None and v in self.modes
        return None if choice[v] == self._absent(v) else choice[v] % self.base[v] if selected else choice[v]

    def carried(self, other: SavedValues, choice: Sequence[int]) -> tuple[int, ...]:
        """An answer of `other`, of the same alternatives with other transfers allowed, as one of this problem."""
        return tuple(self._absent(v) if k == other._absent(v) else k for v, k in enumerate(choice))

    def _absent(self, v: int) -> int:
        assert self.modes is not None
        return self.base[v] * len(self.modes.get(v, ("",)))

    @cached_property
    def preference(self) -> tuple[np.ndarray, ...]:  # type: ignore[override]
        """As of a Formulation; a kept value is preferred to a recomputed one, and that to an offloaded one."""
        assert self.modes is not None
        extended = []
        for v, weights in enumerate(Formulation.preference.func(self)):  # type: ignore[attr-defined]
            if v in self.modes:
                weights = np.concatenate([weights + 3.0 * k for k in range(len(self.modes[v]))] + [[0.0]])
            elif len(self.problem.node_costs[v]) > self.base[v]:
                weights = np.append(weights, 0.0)
            extended.append(weights)
        return tuple(extended)


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
        ops = self.graph.ops
        self.optional = {i for i, op in enumerate(ops) if op.name in alternatives.copies}
        self.optional |= {node for (i, _), node in formulation.hubs.items() if i in self.optional}
        self.modes = self._modes()
        self.role = self._roles()

    def extended(self) -> SavedValues:
        before = self._places_of_reloads()
        costs = tuple(self._node(v, c) for v, c in enumerate(self.problem.node_costs))
        edges = tuple(Edge(e.a, e.b, self._edge(k, e)) for k, e in enumerate(self.problem.edges))
        usages = [replace(u, bytes=self._usage(u)) for u in self.problem.usages]
        held = list(self.f.held)
        for k, (what, i) in self.role.items():
            if what == "forward" and OFFLOADED_MODE in self.modes[i] and (start := self.graph.index[before[i]]) < i:
                usages.append(self._reloaded(k, i, start))
                held.append("activations")
        problem = Problem(self.problem.names, costs, edges, tuple(usages), self.problem.usage_limit)
        base = tuple(map(len, self.problem.node_costs))
        own = {f.name: getattr(self.f, f.name) for f in fields(Formulation) if f.name not in ("problem", "held")}
        return SavedValues(
            problem=problem, held=tuple(held), **own, alternatives=self.alternatives, exposed=self.exposed or 0.0, modes=self.modes,
            base=base, before=before,
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

    def _roles(self) -> dict[int, tuple[str, int]]:
        """Of each edge into an op of kind SELECTED: whether it comes from the forward or from the copy, and the op."""
        roles: dict[int, tuple[str, int]] = {}
        for k, e in enumerate(self.problem.edges):
            if e.b in self.modes:
                copied = e.a in self.optional
                roles[k] = ("copy" if copied else "forward", e.b)
        return roles

    def _places_of_reloads(self) -> dict[int, str]:
        """Before which op a value is copied back: early enough by the least seconds of the backward's kernels, at most a layer ahead."""
        ops, names = self.graph.ops, self.original.index
        least = np.array([self._least(i) if op.backward and i not in self.optional else 0.0 for i, op in enumerate(ops)])
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

    def _least(self, i: int) -> float:
        return float(self.problem.node_costs[i].min())

    def _once(self, key: tuple, array: np.ndarray) -> np.ndarray:
        return self.known.setdefault(key, array)

    def _node(self, v: int, costs: np.ndarray) -> np.ndarray:
        if v in self.modes:
            key = ("node", id(costs), len(self.modes[v]))
            return self.known[key] if key in self.known else self._once(key, np.append(np.tile(costs, len(self.modes[v])), 0.0))
        if v in self.optional:
            key = ("node", id(costs), 0)
            return self.known[key] if key in self.known else self._once(key, np.append(costs, 0.0))
        return costs

    def _edge(self, k: int, e: Edge) -> np.ndarray:
        what, i = self.role.get(k, ("", -1))
        link = self.f.tensor_edges[k]
        hub = e.a >= len(self.graph.ops)
        key: tuple = ("edge", id(e.table), what, self.modes.get(i), self.modes.get(e.a), e.a in self.optional, e.b in self.optional)
        if what == "forward":
            key += (hub, id(link.tensor), id(link.source_layouts), id(link.target_layouts))
        if key not in self.known:
            self.kept_alive += [link, e.table]
            self.known[key] = self._rows(self._columns(e, what, i, hub, link), e, what, i)
        return self.known[key]

    def _columns(self, e: Edge, what: str, i: int, hub: bool, link) -> np.ndarray:
        zeros = np.zeros_like(e.table)
        absent = np.zeros((len(e.table), 1))
        if not what:
            return np.hstack([e.table, absent]) if e.b in self.optional else e.table
        blocks = {KEPT_MODE: zeros, RECOMPUTED_MODE: e.table, OFFLOADED_MODE: zeros}
        if what == "forward":
            differ = np.array([[s != t for t in link.target_layouts] for s in link.source_layouts])
            kept = np.where(differ, np.inf, e.table) if hub else e.table
            blocks = {KEPT_MODE: kept, RECOMPUTED_MODE: zeros}
            if OFFLOADED_MODE in self.modes[i]:
                blocks[OFFLOADED_MODE] = e.table + self._transfers(link.tensor, link.source_layouts)[:, None]
        return np.hstack([*(blocks[mode] for mode in self.modes[i]), absent])

    def _transfers(self, tensor: Tensor, layouts: Layouts) -> np.ndarray:
        """Seconds of both transfers that count, per layout, in all microbatches."""
        device = self.mesh.device
        sizes = _bytes_of(tensor, layouts, self.mesh)
        e = self.exposed or 0.0
        one_way = np.array([e * host_seconds(n, device) + n / device.memory_bandwidth + device.launch for n in sizes])
        return self.f.microbatches * 2 * one_way

    def _rows(self, columns: np.ndarray, e: Edge, what: str, i: int) -> np.ndarray:
        if e.a not in self.optional and e.a not in self.modes:
            return columns
        last = np.full((1, columns.shape[1]), math.inf)  # the producer is absent
        if what == "copy":
            n, modes = self.problem.node_costs[i].size, self.modes[i]
            last[:] = 0.0
            at = modes.index(RECOMPUTED_MODE) * n
            last[0, at : at + n] = math.inf
        elif e.b in self.optional:
            last[0, -1] = 0.0
        return np.vstack([*[columns] * len(self.modes.get(e.a, ("",))), last])

    def _usage(self, u: Usage) -> np.ndarray:
        if not any(v in self.modes or v in self.optional for v in u.ends):
            return u.bytes
        what, i = self.role.get(-1 if u.edge is None else u.edge, ("", -1))
        waits = what == "forward" and u.end <= i  # before the backward reads it
        key = ("usage", id(u.bytes), what, waits, *((self.modes.get(v), v in self.optional) for v in u.ends))
        if key not in self.known:
            self.kept_alive.append(u.bytes)
            self.known[key] = self._bytes(u, what, waits)
        return self.known[key]

    def _bytes(self, u: Usage, what: str, waits: bool) -> np.ndarray:
        held = u.bytes
        counts = {KEPT_MODE: True, RECOMPUTED_MODE: True, OFFLOADED_MODE: True}
        if what == "forward":
            counts = {KEPT_MODE: True, RECOMPUTED_MODE: False, OFFLOADED_MODE: not waits}
        elif what == "copy":
            counts = {KEPT_MODE: False, RECOMPUTED_MODE: True, OFFLOADED_MODE: False}
        for axis, v in enumerate(u.ends):
            if v in self.modes:
                held = np.concatenate([held if counts[mode] else np.zeros_like(held) for mode in self.modes[v]], axis=axis)
            if v in self.modes or v in self.optional:
                held = np.concatenate([held, np.zeros_like(np.take(held, [0], axis=axis))], axis=axis)
        return held

    def _reloaded(self, k: int, i: int, start: int) -> Usage:
        """The bytes of a value that was copied back and waits to be read."""
        link, e = self.f.tensor_edges[k], self.problem.edges[k]
        key = ("reloaded", id(link.tensor), id(link.source_layouts), len(self.problem.node_costs[i]), self.modes[i])
        if key not in self.known:
            self.kept_alive.append(link)
            n = len(self.problem.node_costs[i])
            sizes = _bytes_of(link.tensor, link.source_layouts, self.mesh)
            held = np.zeros((len(sizes), n * len(self.modes[i]) + 1))
            at = self.modes[i].index(OFFLOADED_MODE) * n
            held[:, at : at + n] = sizes[:, None]
            self.known[key] = held
        return Usage((e.a, e.b), start, i, self.known[key], k)


def _bytes_of(tensor: Tensor, layouts: Layouts, mesh: Mesh) -> np.ndarray:
    """Local bytes per layout."""
    return np.array([float(local_numel(tensor.shape, layout, mesh) * tensor.itemsize) for layout in layouts])


def hidden_seconds(formulation: Formulation) -> float:
    """W: the least seconds that the kernels of the forward pass take, in all microbatches."""
    ops = formulation.graph.ops
    first = [i for i, op in enumerate(ops) if not (op.is_placeholder or op.backward)]
    return math.fsum(float(formulation.problem.node_costs[i].min()) for i in first)


def transfer_seconds_of(formulation: SavedValues, choice: Sequence[int]) -> float:
    """H: seconds of one direction of all transfers of an answer, in all microbatches."""
    total = []
    for k, e in enumerate(formulation.problem.edges):
        if formulation.modes and e.b in formulation.modes and formulation.mode(e.b, choice) == OFFLOADED_MODE:
            link = formulation.tensor_edges[k]
            if link.a < len(formulation.graph.ops) and formulation.graph.ops[link.a].name in formulation.alternatives.copies:  # type: ignore
                continue
            layout = link.source_layouts[choice[link.a]]
            size = local_numel(link.tensor.shape, layout, formulation.mesh) * link.tensor.itemsize
            total.append(formulation.microbatches * host_seconds(size, formulation.mesh.device))
    return math.fsum(total)


def chosen_of(formulation: SavedValues, choice: Sequence[int], exposed: float = 0.0) -> Chosen:
    """What an answer recomputes and offloads: the copies and values on which an op that always runs depends."""
    graph, alternatives = formulation.graph, formulation.alternatives
    assert alternatives is not None and formulation.before is not None
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

