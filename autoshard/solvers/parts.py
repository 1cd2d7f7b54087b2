"""A problem divided into parts that share nodes but no edges, and which of the parts are equal.

    home      of a node: a number from the caller, for example its layer; nodes of one home should have few edges to others
    part      the edges whose second end has that home, with their ends: every edge is in one part
    boundary  the nodes that several parts have
    class     parts are equal if their costs and tables are equal in the order of their nodes, and if the parts on their
              boundaries are, up to `DISTANCE` parts away: the first layers of a model differ from those in the middle
    slot      a boundary node of a class; a joint says which slots are one and the same node
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..problem import Edge, Problem
from .interning import Pool

DISTANCE = 3  # parts


@dataclass(frozen=True)
class Joint:
    """Slots of one node, for all nodes for which these and the node's costs are equal."""

    slots: tuple[int, ...]  # a slot is repeated where several equal parts have the node
    costs: np.ndarray  # of the node
    count: int  # nodes


@dataclass(frozen=True, eq=False)
class Parts:
    """The nodes of part p are nodes[start[p] : start[p + 1]], ascending."""

    problem: Problem
    start: np.ndarray
    nodes: np.ndarray
    edges: tuple[np.ndarray, ...]  # per part: the numbers of its edges
    part_of: np.ndarray  # per edge
    kind_of: np.ndarray  # per part: equal for parts of equal costs and tables
    class_of: np.ndarray  # per part
    slots: np.ndarray  # per entry of `nodes` on the boundary its slot, else -1
    joints: tuple[Joint, ...]

    @cached_property
    def examples(self) -> list[int]:
        """The first part of every class."""
        return np.unique(self.class_of, return_index=True)[1].tolist()

    @cached_property
    def slot_sizes(self) -> list[int]:
        """How many choices each slot has."""
        sizes = {s: len(joint.costs) for joint in self.joints for s in joint.slots}
        return [sizes[s] for s in range(len(sizes))]

    @cached_property
    def sharing(self) -> dict[int, list[tuple[int, int]]]:
        """Per node on a boundary: (part, slot) of each part that has it."""
        sharing: dict[int, list[tuple[int, int]]] = {}
        for p in range(len(self.edges)):
            for v, slot in zip(self.of(p)[self.boundary(p)].tolist(), self.boundary_slots(p).tolist(), strict=True):
                sharing.setdefault(v, []).append((p, slot))
        return sharing

    @cached_property
    def edges_of(self) -> dict[int, list[int]]:
        """Per node on a boundary: its edges."""
        edges: dict[int, list[int]] = {v: [] for v in self.sharing}
        for k, e in enumerate(self.problem.edges):
            for v in (e.a, e.b):
                if v in edges:
                    edges[v].append(k)
        return edges

    def of(self, p: int) -> np.ndarray:
        """The nodes of part p."""
        return self.nodes[self.start[p] : self.start[p + 1]]

    def boundary(self, p: int) -> np.ndarray:
        """Which of the nodes of part p, by their position, are on its boundary."""
        return np.flatnonzero(self.slots[self.start[p] : self.start[p + 1]] >= 0)

    def boundary_slots(self, p: int) -> np.ndarray:
        """Their slots."""
        return self.slots[self.start[p] : self.start[p + 1]][self.boundary(p)]

    def part(self, p: int) -> Problem:
        """Part p as a problem. Nodes of the boundary cost nothing, but what is forbidden stays so."""
        problem, nodes = self.problem, self.of(p).tolist()
        costs = [problem.node_costs[v] for v in nodes]
        for k in self.boundary(p).tolist():
            costs[k] = np.where(np.isfinite(costs[k]), 0.0, np.inf)
        number = {v: k for k, v in enumerate(nodes)}
        edges = [problem.edges[k] for k in self.edges[p].tolist()]
        inside = tuple(Edge(number[e.a], number[e.b], e.table) for e in edges)
        return Problem(tuple(problem.names[v] for v in nodes), tuple(costs), inside)


def divide(problem: Problem, homes: Sequence[int] | np.ndarray) -> Parts:
    """The parts of a problem, given a home per node."""
    num_nodes = len(problem.node_costs)
    home = np.unique(np.asarray(homes, dtype=np.int64), return_inverse=True)[1]
    a = np.array([e.a for e in problem.edges], dtype=np.int64)
    b = np.array([e.b for e in problem.edges], dtype=np.int64)
    part = home[b]
    isolated = np.setdiff1d(np.arange(num_nodes), np.concatenate([a, b]))
    wanted = [part * num_nodes + a, part * num_nodes + b, home[isolated] * num_nodes + isolated]
    keys = np.unique(np.concatenate(wanted))  # by part, then by node
    nodes, num_parts = keys % num_nodes, int(home.max(initial=-1)) + 1
    start = np.searchsorted(keys, np.arange(num_parts + 1) * num_nodes)
    is_boundary = np.bincount(nodes, minlength=num_nodes)[nodes] > 1
    order = np.argsort(part, kind="stable")
    edges = np.split(order, np.searchsorted(part[order], np.arange(1, num_parts)))
    ends = [np.searchsorted(keys, part * num_nodes + end) - start[part] for end in (a, b)]  # positions within the part
    costs, tables = _numbers(problem.node_costs), _numbers([e.table for e in problem.edges])
    numbers: dict[object, int] = {}
    classes = []
    for p in range(num_parts):
        entries, its = slice(start[p], start[p + 1]), edges[p]
        arrays = costs[nodes[entries]], is_boundary[entries], ends[0][its], ends[1][its], tables[its]
        classes.append(numbers.setdefault(tuple(x.tobytes() for x in arrays), len(numbers)))
    kind_of = np.array(classes, dtype=np.int64)
    class_of = _refined(kind_of, start, nodes, is_boundary)
    slots, joints = _joined(problem, class_of, start, nodes, is_boundary, costs)
    return Parts(problem, start, nodes, tuple(edges), part, kind_of, class_of, slots, joints)


def _numbers(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """A number per array, the same for arrays of equal values."""
    pool, numbers = Pool(), {}  # type: ignore[var-annotated]
    return np.array([numbers.setdefault(id(pool.original(x)), len(numbers)) for x in arrays], dtype=np.int64)


def _refined(class_of: np.ndarray, start: np.ndarray, nodes: np.ndarray, is_boundary: np.ndarray) -> np.ndarray:
    """The classes divided by those of the parts on their boundaries, DISTANCE times."""
    entries = np.flatnonzero(is_boundary)
    part = np.repeat(np.arange(len(class_of)), np.diff(start))[entries]
    position = entries - start[part]
    for _ in range(DISTANCE):
        sharing: dict[int, list] = {}
        for v, p, k in zip(nodes[entries].tolist(), class_of[part].tolist(), position.tolist(), strict=True):
            sharing.setdefault(v, []).append((p, k))
        kinds: dict[tuple, int] = {}
        kind = {v: kinds.setdefault(tuple(sorted(where)), len(kinds)) for v, where in sharing.items()}
        seen: list[list[int]] = [[] for _ in class_of]
        for v, p in zip(nodes[entries].tolist(), part.tolist(), strict=True):
            seen[p].append(kind[v])
        numbers: dict[tuple, int] = {}
        keys = [(c, *s) for c, s in zip(class_of.tolist(), seen, strict=True)]
        class_of = np.array([numbers.setdefault(key, len(numbers)) for key in keys], dtype=np.int64)
    return class_of


def _joined(
    problem: Problem, class_of: np.ndarray, start: np.ndarray, nodes: np.ndarray, is_boundary: np.ndarray, costs: np.ndarray
) -> tuple[np.ndarray, tuple[Joint, ...]]:
    slots, numbers = np.full(len(nodes), -1), {}  # type: ignore[var-annotated]
    sharing: dict[int, list[int]] = {}
    for p, c in enumerate(class_of.tolist()):
        for entry in (start[p] + np.flatnonzero(is_boundary[start[p] : start[p + 1]])).tolist():
            slots[entry] = numbers.setdefault((c, entry - start[p]), len(numbers))
            sharing.setdefault(int(nodes[entry]), []).append(int(slots[entry]))
    joints: dict[tuple, list[int]] = {}
    for v, its in sharing.items():
        joints.setdefault((costs[v], *sorted(its)), []).append(v)
    return slots, tuple(Joint(key[1:], problem.node_costs[vs[0]], len(vs)) for key, vs in joints.items())
