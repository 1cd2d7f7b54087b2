"""Several programs on one set of weights as one Problem: their graphs side by side, joined at their parameters.

    home       the program whose parameters are the originals: the first that trains, else the first one
    shared     a parameter with one node for several programs: it has one layout in all of them. Programs of one family (the shapes of
               one program) share all, and so do two programs that both train a parameter, or write to a buffer
    copied     a parameter with a node of its own in another family, and an edge from home's node to it:

                   T[i, j] = switches * (seconds of the route from home's layout i to the other family's layout j)

               0 where the layouts are equal. Otherwise the other family runs with a copy, which each switch to it makes anew
    cost       sum over programs p of weight_p * cost_p  +  the edges above
    times      those of the programs, one after the other: the memory limit holds at the fullest moment of any program. While another
               program than home runs, home's parameters, optimizer state and buffers stay beside it; then there are as many times as
               parameters may be copied, one for each copy, with the buffers of its route
    kept       with switches = 0 copies are made once and stay in memory in all programs

Gradients are taken to be freed before a switch. The state of a program (buffers that home lacks) lives while it runs, with `keeps_state`
always, as those do that it only reads.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from autoshard.formulate.records import Formulation, Layouts
from autoshard.formulate.tables import Tables, differing
from autoshard.graph import Tensor
from autoshard.mesh import Mesh
from autoshard.problem import Edge, Problem, Usage
from autoshard.routes import DeviceSet, Transfers

OWNED = ("parameter", "buffer")  # what programs may have in common


@dataclass(frozen=True, eq=False)
class Piece:
    """One of the programs in numbers."""

    name: str
    formulated: Formulation
    problem: Problem  # its own, without the choices that pins exclude
    weight: float  # how often it runs
    family: str = ""  # programs of one family share all parameters; by default the name
    switches: float | None = 1.0  # how often the family's copies are made anew; None: it shares all with home
    devices: tuple[int, ...] = ()  # their numbers in the cluster, row-major over the piece's mesh; empty: all of them
    keeps_state: bool = False  # whether its own buffers stay in memory while others run
    homes: Sequence[int] = ()  # the layer of every node

    def __post_init__(self) -> None:
        object.__setattr__(self, "family", self.family or self.name)

    def owned(self) -> dict[str, int]:
        """The nodes of parameters and buffers by name, without second names."""
        graph, second = self.formulated.graph, {name for name, _ in self.formulated.graph.tied}
        return {op.name: i for i, op in enumerate(graph.ops) if op.kind in OWNED and op.name not in second}

    def written(self) -> set[str]:
        """Parameters that it trains, and buffers whose values it changes."""
        return {r.name for r in self.formulated.graph.results if r.kind in ("gradient", "buffer")}

    def tensor(self, node: int) -> Tensor:
        return self.formulated.graph.tensor((node, 0))

    def layouts(self, node: int) -> Layouts:
        """Of a parameter or buffer, one per choice."""
        return tuple(c.outputs[0] for c in self.formulated.candidates.of[node])  # type: ignore[misc]

    @property
    def where(self) -> DeviceSet:
        mesh = self.formulated.mesh
        return DeviceSet(mesh, self.devices or tuple(range(mesh.num_devices)))

    @property
    def end(self) -> int:
        """One after its last time."""
        return max((u.end for u in self.formulated.problem.usages), default=1)


@dataclass(frozen=True, eq=False)
class ParameterCopy:
    """An edge between home's layout of a parameter and that of another family."""

    name: str
    family: str
    node: int  # home's, in the joined problem
    other: int
    edge: int
    seconds: np.ndarray  # of one copy, by both choices
    differ: np.ndarray  # whether the copy is another tensor, by both choices
    buffers: np.ndarray  # bytes that its route needs beside both tensors
    sizes: np.ndarray  # bytes of the copy on a device, by its choice
    source: int  # home's own node
    target: int  # that of the family's first piece


@dataclass(frozen=True, eq=False)
class Joined:
    """The one Problem of several programs, and where each of them is in it."""

    problem: Problem
    cluster: Mesh
    ordered: tuple[Piece, ...]  # home first, then its family
    home: Piece
    nodes: Mapping[str, tuple[int, ...]]  # by program: for each of its nodes that of the joined problem
    edges: Mapping[str, int]  # by program: the number of its first edge
    copies: tuple[ParameterCopy, ...]
    begins: Mapping[str, int]  # by program: its first time
    held: tuple[tuple[str, str], ...]  # by usage: the kind of what it holds, and in which program's time
    preference: tuple[np.ndarray, ...]
    homes: tuple[int, ...]  # the layer of every node

    def choice_of(self, name: str, choice: Sequence[int]) -> tuple[int, ...]:
        """The choice of one program's own problem."""
        return tuple(int(choice[v]) for v in self.nodes[name])

    def joined_choice(self, choices: Mapping[str, Sequence[int]]) -> tuple[int, ...]:
        """The inverse; of a shared parameter the first program's choice."""
        joined = [-1] * len(self.problem.node_costs)
        for name, nodes in self.nodes.items():
            for v, i in zip(nodes, choices[name], strict=True):
                joined[v] = int(i) if joined[v] < 0 else joined[v]
        return tuple(joined)


def join(pieces: Sequence[Piece], cluster: Mesh, memory_limit: float | None) -> Joined:
    """The problem of all pieces together, which run on devices of the cluster.

    ValueError where they don't fit together: a parameter has two shapes, or one that is written to would be a copy on other devices.
    """
    return _Joiner(pieces, cluster, memory_limit).build()


@dataclass(eq=False)
class _Joiner:
    """Collects nodes, edges and usages of the joined problem."""

    pieces: Sequence[Piece]
    cluster: Mesh
    memory_limit: float | None
    names: list[str] = field(default_factory=list)
    costs: list[np.ndarray] = field(default_factory=list)
    edges: list[Edge] = field(default_factory=list)
    usages: list[Usage] = field(default_factory=list)
    held: list[tuple[str, str]] = field(default_factory=list)
    preference: list[np.ndarray] = field(default_factory=list)
    homes: list[int] = field(default_factory=list)
    nodes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    copies: list[ParameterCopy] = field(default_factory=list)

    def build(self) -> Joined:
        self.home = next((p for p in self.pieces if p.formulated.graph.trains), self.pieces[0])  # its parameters are the originals
        ordered = sorted(self.pieces, key=lambda p: (p is not self.home, p.family != self.home.family))  # home, its family, then the others
        self.tables = {p.name: Tables(p.formulated.mesh, p.formulated.routes) for p in self.pieces}
        self.first: dict[str, Piece] = {}  # of each family
        for piece in ordered:
            self.first.setdefault(piece.family, piece)
            self._add_nodes(piece)
        begins: dict[str, int] = {}
        edges, end = {}, 0
        for piece in ordered:
            begins[piece.name], edges[piece.name] = end, len(self.edges)
            end += piece.end + (0 if piece.family == self.home.family else len(piece.owned()))  # a time per copy
            self._add_program(piece, begins[piece.name])
        self._add_copies()
        for piece in ordered:
            self._add_residents(piece, begins[piece.name])
        problem = Problem(tuple(self.names), tuple(self.costs), tuple(self.edges), tuple(self.usages), self.memory_limit)
        return Joined(
            problem, self.cluster, tuple(ordered), self.home, self.nodes, edges, tuple(self.copies), begins, tuple(self.held),
            tuple(self.preference), tuple(self.homes),
        )  # fmt: skip

    # -- nodes

    def _add_nodes(self, piece: Piece) -> None:
        shared = {i: node for node, i in self._shared(piece)}
        layers, places, scaled = self._layers(piece), [], partial(_scaled, piece.weight, {})
        for i, (name, cost) in enumerate(zip(piece.problem.names, piece.problem.node_costs, strict=True)):
            cost = scaled(cost)
            if i in shared:
                self.costs[shared[i]] = self.costs[shared[i]] + cost
                places.append(shared[i])
                continue
            places.append(len(self.names))
            self.names.append(name if piece is self.home else f"{piece.name}: {name}")
            self.costs.append(cost)
            self.preference.append(piece.formulated.preference[i])
            self.homes.append(layers[i])
        self.nodes[piece.name] = tuple(places)

    def _shared(self, piece: Piece) -> Iterator[tuple[int, int]]:
        """(node of the joined problem, node of the piece) of each parameter that has one node with home or with the piece's family."""
        first = self.first[piece.family]
        for name, i in piece.owned().items():
            for other in dict.fromkeys((first, self.home)):
                j = None if other is piece else other.owned().get(name)
                if j is not None and self._is_shared(name, piece, i, other, j):
                    yield self.nodes[other.name][j], i
                    break

    def _is_shared(self, name: str, piece: Piece, i: int, other: Piece, j: int) -> bool:
        if piece.tensor(i) != other.tensor(j):
            if other.formulated.graph.ops[j].kind == "buffer":
                return False  # a state of the program
            raise ValueError(
                f"{name} is {piece.tensor(i)} in program {piece.name!r} and {other.tensor(j)} in {other.name!r}; programs that are planned "
                "together have one set of parameters"
            )
        needed = piece.switches is None or name in piece.written() or other.family == piece.family
        if not needed:
            return False
        if piece.formulated.mesh != other.formulated.mesh:
            raise ValueError(
                f"program {piece.name!r} runs on part of the devices and needs {name} in the layout of {other.name!r}: it writes to it, or "
                "copies are not allowed; give it all devices, or leave that parameter as it is"
            )
        if piece.layouts(i) != other.layouts(j):
            raise ValueError(f"{name} may have other layouts in program {piece.name!r} than in {other.name!r}; plan them apart")
        return True

    def _layers(self, piece: Piece) -> Sequence[int]:
        """The layer of every node of a piece, in the numbers of home's layers."""
        if not len(piece.homes) or piece is self.home:
            return piece.homes or [0] * len(piece.problem.node_costs)
        votes: dict[int, Counter[int]] = {}
        own = self.home.owned()
        for name, i in piece.owned().items():
            if name in own and len(self.home.homes):
                votes.setdefault(piece.homes[i], Counter())[self.home.homes[own[name]]] += 1
        numbers = {layer: count.most_common(1)[0][0] for layer, count in votes.items()}
        return [numbers.get(layer, 0) for layer in piece.homes]

    # -- edges and usages of the programs themselves

    def _add_program(self, piece: Piece, begin: int) -> None:
        nodes, first = self.nodes[piece.name], len(self.edges)
        scaled = partial(_scaled, piece.weight, {})
        self.edges += [Edge(nodes[e.a], nodes[e.b], scaled(e.table)) for e in piece.problem.edges]
        for kind, u in zip(piece.formulated.held, piece.problem.usages, strict=True):
            edge = None if u.edge is None else u.edge + first
            self._hold(kind, piece, Usage(tuple(nodes[v] for v in u.ends), u.start + begin, u.end + begin, u.bytes, edge))

    def _hold(self, kind: str, piece: Piece, usage: Usage) -> None:
        if usage.start < usage.end:
            self.usages.append(usage)
            self.held.append((kind, piece.name))

    # -- copies

    def _add_copies(self) -> None:
        own = self.home.owned()
        for family, piece in self.first.items():
            if family == self.home.family:
                continue
            transfers = Transfers(self.cluster, self.home.where, piece.where)
            for name, i in piece.owned().items():
                j = own.get(name)
                same_node = j is not None and self.nodes[piece.name][i] == self.nodes[self.home.name][j]
                if j is not None and piece.tensor(i) == self.home.tensor(j) and not same_node:
                    self._add_copy(name, piece, i, j, transfers)

    def _add_copy(self, name: str, piece: Piece, i: int, j: int, transfers: Transfers) -> None:
        tensor, sources, targets = piece.tensor(i), self.home.layouts(j), piece.layouts(i)
        a, b, number = self.nodes[self.home.name][j], self.nodes[piece.name][i], len(self.edges)
        if transfers.same_mesh:
            move = self.tables[self.home.name].move(tensor, sources, targets)
            seconds, buffers = move.seconds, move.buffers
            differ = differing(sources, targets)
        else:
            seconds = transfers.table(tensor.shape, tensor.itemsize, sources, targets)
            differ, buffers = np.ones(seconds.shape, dtype=bool), np.zeros(seconds.shape)
        sizes = self.tables[piece.name].bytes(tensor, targets)
        self.copies.append(ParameterCopy(name, piece.family, a, b, number, seconds, differ, buffers, sizes, j, i))
        self.edges.append(Edge(a, b, _scaled(piece.switches or 0.0, {}, seconds)))

    # -- what stays in memory while another program runs

    def _add_residents(self, piece: Piece, begin: int) -> None:
        end, last = begin + piece.end, begin + piece.end
        if piece.family != self.home.family:
            copies = {copy.name: copy for copy in self.copies if copy.family == piece.family}
            if piece is self.first[piece.family]:
                last = end + len(copies)
                self._add_making(piece, copies, end, last)
            if self._meet(piece, self.home):
                self._add_home(piece, begin, end, last, copies)
        for other in self.pieces:
            if other.family != piece.family and self._meet(piece, other):
                self._add_kept(piece, other, begin, last)

    @staticmethod
    def _meet(a: Piece, b: Piece) -> bool:
        """Whether some device has both."""
        return bool(set(a.where.numbers) & set(b.where.numbers))

    def _add_making(self, piece: Piece, copies: Mapping[str, ParameterCopy], end: int, last: int) -> None:
        """The copies after the piece's own times, when they are made one after the other, each with the buffers of its route."""
        for time, copy in enumerate(copies.values(), start=end):
            self._hold("parameters", piece, Usage((copy.other,), end, last, copy.sizes))
            if copy.buffers.any():
                self._hold("temporaries", piece, Usage((copy.node, copy.other), time, time + 1, copy.buffers, copy.edge))

    def _add_home(self, piece: Piece, begin: int, end: int, last: int, copies: Mapping[str, ParameterCopy]) -> None:
        """Home's parameters and buffers where the piece has not the same tensor, and the optimizer's state."""
        nodes, shared, trained = self.nodes[self.home.name], set(self.nodes[piece.name]), piece.written()
        ops = self.home.formulated.graph.ops
        for kind, u in zip(self.home.formulated.held, self.home.problem.usages, strict=True):
            op = ops[u.ends[0]] if len(u.ends) == 1 and u.ends[0] < len(ops) else None
            if op is None or op.kind not in OWNED or kind not in ("parameters", "inputs", "optimizer_state"):
                continue
            node = nodes[u.ends[0]]
            if kind != "optimizer_state" and op.name in copies:
                copy = copies[op.name]
                beside = np.where(copy.differ, u.bytes[:, None], 0.0)
                self._hold(kind, piece, Usage((copy.node, copy.other), begin, last, beside, copy.edge))
            elif kind != "optimizer_state" or op.name not in trained:
                counted = end if kind != "optimizer_state" and node in shared else begin  # until then the piece counts it
                self._hold(kind, piece, Usage((node,), counted, last, u.bytes))

    def _add_kept(self, piece: Piece, other: Piece, begin: int, last: int) -> None:
        """Copies and states of another family that stay in memory while the piece runs."""
        if other.switches == 0 and other is self.first[other.family]:
            for copy in (c for c in self.copies if c.family == other.family):
                sizes = np.where(copy.differ, copy.sizes[None, :], 0.0)
                self._hold("parameters", piece, Usage((copy.node, copy.other), begin, last, sizes, copy.edge))
        home, freed = self.home.owned(), set() if other.keeps_state else other.written()  # constants stay
        for name, i in other.owned().items():
            if other.formulated.graph.ops[i].kind == "buffer" and name not in home and name not in freed:
                sizes = self.tables[other.name].bytes(other.tensor(i), other.layouts(i))
                self._hold("inputs", piece, Usage((self.nodes[other.name][i],), begin, last, sizes))


def _scaled(times: float, known: dict[int, np.ndarray], array: np.ndarray) -> np.ndarray:
    """The array times a number, equal ones once; 0 * inf is inf: what is forbidden stays forbidden."""
    if times == 1:
        return array
    if id(array) not in known:
        known[id(array)] = np.where(np.isinf(array), math.inf, times * np.where(np.isinf(array), 0.0, array))
    return known[id(array)]
