"""The optimization problem in numbers (one choice for every node), the evaluation of its answers, and the contest's file format.

    cost(x)     = sum_v c_v[x_v] + sum_(a,b) T_ab[x_a, x_b]                                    -> evaluate
    memory_t(x) = sum of bytes[x at the usage's ends] over the usages with start <= t < end     -> held, usage_profile
    minimise cost(x) subject to memory_t(x) <= usage_limit at every time t

`inf` in c or T is a value and means forbidden. The costs of parallel edges add up. The bytes of a usage depend on the choice of one node
(a tensor), on the choices of both ends of an edge (a copy that exists only where two layouts differ), or on no choice. A usage whose
interval is empty uses no memory. The file format is that of the ASPLOS/EuroSys 2025 contest (github.com/google/iopddl), in which 1e18
stands for `inf`.
"""

import math
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

import numpy as np

from autoshard.reading import data_of
from autoshard.writing import write_json

CONTEST_FORBIDDEN = 1e18  # the contest's files write forbidden as a number
FLOAT64 = np.dtype(np.float64)


def _is_float64(array: object) -> bool:
    """Whether no conversion is needed, which is the usual case. The test is cheaper than a conversion: a deep model has 1e5 arrays."""
    return type(array) is np.ndarray and array.dtype is FLOAT64


@dataclass(frozen=True, eq=False)
class Edge:
    """The cost of each pair of choices of two nodes. Edges with equal tables should share one array."""

    a: int
    b: int
    table: np.ndarray  # seconds, shape (choices of a, choices of b)

    def __post_init__(self) -> None:
        if not _is_float64(self.table):
            object.__setattr__(self, "table", np.asarray(self.table, dtype=np.float64))


@dataclass(frozen=True, eq=False)
class Usage:
    """Bytes that are in use for some time. The choices of the nodes `ends` decide how many; without ends they are constant."""

    ends: tuple[int, ...]  # no node, one node, or the two ends of `edge` in its order
    start: int
    end: int  # in use on [start, end)
    bytes: np.ndarray  # one dim per end, indexed by its choice
    edge: int | None = None  # the edge that the bytes are a copy for, where there are two ends

    def __post_init__(self) -> None:
        if not _is_float64(self.bytes):
            object.__setattr__(self, "bytes", np.asarray(self.bytes, dtype=np.float64))

    def held(self, choice: Sequence[int] | np.ndarray) -> float:
        """Bytes under a choice (an index per node of the problem)."""
        return float(self.bytes[tuple([choice[v] for v in self.ends])])


def NodeUsage(node: int, start: int, end: int, bytes: np.ndarray) -> Usage:
    """The usage of a node's tensor while it is alive, on [start, end): bytes per choice of the node."""
    return Usage((node,), start, end, bytes)


def EdgeUsage(edge: int, start: int, end: int, bytes: np.ndarray) -> Usage:
    """The usage of the copy that an edge makes where its ends disagree, on [start, end): bytes in the shape of the edge's table.

    The Problem that the usage becomes a part of adds the edge's ends.
    """
    return Usage((), start, end, bytes, edge)


class UsageList(tuple[Usage, ...]):
    """The usages of a problem, and what is derived of them: problems that differ in costs alone share both."""

    valid_for: tuple[tuple["Edge", ...], list[int]] | None = None  # of the last problem that they fit: its edges, and choices of each node

    @cached_property
    def spans(self) -> np.ndarray:
        """Start and end of every usage: two rows."""
        return np.array([[u.start for u in self], [u.end for u in self]], dtype=np.int64)

    @cached_property
    def times(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Times at which a nonempty usage begins or ends; the index of each usage's begin, then of each usage's end; and those usages."""
        live = np.flatnonzero(self.spans[0] < self.spans[1])
        times, index = np.unique(self.spans[:, live].ravel(), return_inverse=True)
        return times, index, live

    @cached_property
    def flat(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """The bytes of all usages in one array, equal arrays once; per usage where its bytes begin, its two ends, and a row's length.

        An end that a usage lacks is -1: its choice counts as 0.
        """
        place: dict[int, int] = {}
        arrays, rows, size = [np.zeros(0)], [], 0
        for u in self:
            if id(u.bytes) not in place:
                place[id(u.bytes)] = size
                arrays.append(u.bytes.ravel())
                size += u.bytes.size
            a, b = (-1, -1, *u.ends)[-2:]
            rows.append((place[id(u.bytes)], a, b, u.bytes.shape[-1] if a >= 0 else 0))
        begins, a_ends, b_ends, widths = np.array(rows, dtype=np.int64).reshape(-1, 4).T
        return np.concatenate(arrays), begins, np.stack([a_ends, b_ends]), widths


@dataclass(frozen=True, eq=False)
class Problem:
    """Nodes with choices, pairwise costs, and memory over time; `usage_limit` None means no limit."""

    names: tuple[str, ...]
    node_costs: tuple[np.ndarray, ...]  # seconds per choice
    edges: tuple[Edge, ...]
    usages: tuple[Usage, ...] = ()
    usage_limit: float | None = None  # bytes

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", tuple(self.names))
        object.__setattr__(self, "node_costs", tuple(np.asarray(c, dtype=np.float64) for c in self.node_costs))
        object.__setattr__(self, "edges", tuple(self.edges))
        if type(self.usages) is not UsageList:
            object.__setattr__(self, "usages", UsageList([u if u.ends else self._with_ends(u) for u in self.usages]))
        _validate(self)

    @property
    def usage_list(self) -> UsageList:
        """The usages, with what is derived of them."""
        return cast(UsageList, self.usages)

    @cached_property
    def cells(self) -> int:
        """Entries of the tables of all edges."""
        return sum(e.table.size for e in self.edges)

    def _with_ends(self, usage: Usage) -> Usage:
        if usage.edge is None or not 0 <= usage.edge < len(self.edges):
            return usage
        edge = self.edges[usage.edge]
        return replace(usage, ends=(edge.a, edge.b))


def _validate(problem: Problem) -> None:
    names, costs, edges = problem.names, problem.node_costs, problem.edges
    if len(names) != len(costs):
        raise ValueError(f"the problem has {len(names)} names and {len(costs)} nodes; give one name per node")
    seen: set[int] = set()  # ids of the arrays looked at: shared ones are looked at once
    for v, c in enumerate(costs):
        if c.ndim != 1 or len(c) == 0:
            raise ValueError(f"node {v} ({names[v]}) has costs of shape {c.shape}; expected a list of one or more choices")
        if id(c) not in seen:
            _check_values(c, f"the costs of node {v} ({names[v]})", seen, infinite=True)
    if problem.usage_limit is not None and not problem.usage_limit >= 0:
        raise ValueError(f"the usage limit is {problem.usage_limit}; expected zero or more bytes, or None for no limit")
    known, choices = problem.usage_list.valid_for, list(map(len, costs))
    if known is not None and known[0] is edges and known[1] == choices:  # a problem that differs in the costs of nodes alone
        return
    for k, e in enumerate(edges):
        if not (0 <= e.a < len(costs) and 0 <= e.b < len(costs)):
            raise ValueError(f"edge {k} joins nodes {e.a} and {e.b}, but nodes are numbered 0 to {len(costs) - 1}")
        if e.a == e.b:
            raise ValueError(f"edge {k} joins node {e.a} to itself; add its diagonal to the node's costs instead")
        if e.table.shape != (len(costs[e.a]), len(costs[e.b])):
            raise ValueError(
                f"edge {k} ({e.a} -> {e.b}) has costs of shape {e.table.shape}, "
                f"but its ends have {len(costs[e.a])} and {len(costs[e.b])} choices"
            )
        if id(e.table) not in seen:
            _check_values(e.table, f"the costs of edge {k} ({e.a} -> {e.b})", seen, infinite=True)
    if known is None or known[1] != choices or [(e.a, e.b) for e in edges] != [(e.a, e.b) for e in known[0]]:
        for k, u in enumerate(problem.usages):
            _validate_usage(problem, k, u, seen)
    problem.usage_list.valid_for = edges, choices


def _validate_usage(problem: Problem, k: int, usage: Usage, seen: set[int]) -> None:
    kind, index = ("edge", usage.edge) if usage.edge is not None else ("node", usage.ends[0] if usage.ends else None)
    count = len(problem.node_costs if kind == "node" else problem.edges)
    if index is not None and not 0 <= index < count:
        raise ValueError(f"usage {k} belongs to {kind} {index}, but {kind}s are numbered 0 to {count - 1}")
    edge = None if usage.edge is None else problem.edges[usage.edge]
    if len(usage.ends) > 1 if edge is None else usage.ends != (edge.a, edge.b):
        expected = f"those of edge {usage.edge}, {edge.a} and {edge.b}" if edge is not None else "one, or the edge that they belong to"
        raise ValueError(f"usage {k} has the ends {', '.join(map(str, usage.ends))}; expected {expected}")
    shape = edge.table.shape if edge is not None else problem.node_costs[index].shape if index is not None else ()
    if usage.bytes.shape != shape:
        raise ValueError(f"usage {k} of {kind} {index} has bytes of shape {usage.bytes.shape}; expected {shape}")
    if id(usage.bytes) not in seen:
        _check_values(usage.bytes, f"the bytes of usage {k} ({kind} {index})", seen, infinite=False)


def _check_values(array: np.ndarray, what: str, seen: set[int], *, infinite: bool) -> None:
    seen.add(id(array))
    if array.size and not (array.min() >= (-np.finfo(float).max if infinite else 0.0)):  # NaN fails too
        wrong, expected = ("-inf", "finite or inf") if infinite else ("a negative number", "0 or more")
        raise ValueError(f"{what} hold NaN or {wrong}; expected {expected}")
    if not infinite and array.size and not math.isfinite(array.max()):
        raise ValueError(f"{what} hold inf; expected finite bytes (forbid a choice with an infinite cost)")


@dataclass(frozen=True)
class Evaluation:
    """What an answer costs and whether it fits."""

    cost: float  # seconds; inf where a forbidden choice or pair is used
    node_cost: float  # seconds
    edge_cost: float  # seconds
    peak: float  # bytes
    peak_time: int  # the first time at which the peak is reached; 0 where nothing uses memory
    fits: bool  # peak <= usage_limit


def without_limit(problem: Problem) -> Problem:
    """The problem without its memory limit."""
    return problem if problem.usage_limit is None else replace(problem, usage_limit=None)


def anchored(problem: Problem) -> Problem:
    """The problem in which constant bytes are bytes of the first node, equal for all its choices: solvers need no third kind of usage."""
    if not problem.node_costs or all(u.ends for u in problem.usages):
        return problem
    shape = problem.node_costs[0].shape
    return replace(problem, usages=tuple(u if u.ends else replace(u, ends=(0,), bytes=np.full(shape, u.bytes)) for u in problem.usages))


def costs_beside(problem: Problem, free: Collection[int], choice: Sequence[int] | Mapping[int, int]) -> dict[int, np.ndarray]:
    """What each choice of the free nodes costs with its edges to all other nodes, which are at their choice; edges among them aside."""
    costs = {v: problem.node_costs[v].copy() for v in free}
    for e in problem.edges:
        if e.a in costs and e.b not in costs:
            costs[e.a] += e.table[:, choice[e.b]]
        elif e.b in costs and e.a not in costs:
            costs[e.b] += e.table[choice[e.a]]
    return costs


def evaluate(problem: Problem, choice: Sequence[int] | np.ndarray) -> Evaluation:
    """The one judge: cost, peak and fit of an answer, exact for integers below 2**53 and independent of order.

    choice: an index per node, in the order of the problem's nodes. ValueError on too few or too many, and on an index out of range.
    """
    x = _checked(problem, choice)
    node_cost = math.fsum(c[i] for i, c in zip(x, problem.node_costs, strict=True))
    edge_cost = math.fsum(e.table[x[e.a], x[e.b]] for e in problem.edges)
    times, profile = _profile(problem, x)
    at = int(profile.argmax()) if len(profile) else 0
    peak, peak_time = (float(profile[at]), int(times[at])) if len(profile) else (0.0, 0)
    fits = problem.usage_limit is None or peak <= problem.usage_limit
    return Evaluation(math.fsum((node_cost, edge_cost)), node_cost, edge_cost, peak, peak_time, fits)


def usage_profile(problem: Problem, choice: Sequence[int] | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Times at which memory can change, and the bytes held from each to the next: two arrays of the same length.

    choice: as for `evaluate`.
    """
    return _profile(problem, _checked(problem, choice))


def _profile(problem: Problem, choice: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    times, index, live = problem.usage_list.times
    amounts = held(problem, choice)[live]
    delta = np.zeros(len(times))
    np.add.at(delta, index, np.concatenate([amounts, -amounts]))
    return times, np.cumsum(delta)


def held(problem: Problem, choice: Sequence[int] | np.ndarray) -> np.ndarray:
    """Bytes of every usage under a choice of valid indices."""
    flat, begins, ends, widths = problem.usage_list.flat
    a, b = np.append(choice, 0).astype(np.int64)[ends]  # the last entry is the choice of an end that is missing
    return flat[begins + a * widths + b]


def _checked(problem: Problem, choice: Sequence[int] | np.ndarray) -> list[int]:
    if len(choice) != len(problem.node_costs):
        raise ValueError(f"the answer has {len(choice)} entries, but the problem has {len(problem.node_costs)} nodes")
    x = [int(i) for i in choice]
    for v, (i, c) in enumerate(zip(x, problem.node_costs, strict=True)):
        if not 0 <= i < len(c):
            raise ValueError(f"the answer takes choice {i} of node {v} ({problem.names[v]}), which has choices 0 to {len(c) - 1}")
    return x


def read_contest(path: str | os.PathLike[str]) -> Problem:
    """The Problem of a contest instance (.json or .json.gz). ValueError in one sentence where the file is not one."""
    problem = data_of(path, "problem")["problem"]
    nodes, edges = problem["nodes"], problem["edges"]
    intervals, costs, usages = nodes["intervals"], nodes["costs"], nodes["usages"]
    ends, tables = edges["nodes"], edges["costs"]
    if not len(intervals) == len(costs) == len(usages):
        counts = f"{len(intervals)} intervals, {len(costs)} costs and {len(usages)} usages"
        raise ValueError(f"{path} has {counts}; expected one of each per node")
    if len(ends) != len(tables):
        raise ValueError(f"{path} has {len(ends)} edges and {len(tables)} edge cost tables; expected as many of each")
    try:
        return _contest_problem(intervals, costs, usages, ends, tables, problem.get("usage_limit"))
    except (ValueError, OverflowError) as error:  # the latter: integers beyond a float
        raise ValueError(f"{path}: {error}") from error


def _contest_problem(intervals: list, costs: list, usages: list, ends: list, tables: list, limit: float | None) -> Problem:
    shared: dict[tuple[tuple[int, ...], bytes], np.ndarray] = {}

    def array(values: list, shape: tuple[int, ...]) -> np.ndarray:
        a = np.array(values, dtype=np.float64)
        if a.size != math.prod(shape):
            raise ValueError(f"found a list of {a.size} costs where the choices of its nodes need {' x '.join(map(str, shape))}")
        a[a >= CONTEST_FORBIDDEN] = np.inf
        a = a.reshape(shape)
        return shared.setdefault((shape, a.tobytes()), a)

    node_costs = [array(c, (len(c),)) for c in costs]
    num_nodes, edges = len(costs), []
    for k, (pair, table) in enumerate(zip(ends, tables, strict=True)):
        bad = [v for v in pair if type(v) is not int or v >= num_nodes]  # a schema counts 1.0 as an integer
        if bad:
            raise ValueError(f"edge {k} names node {bad[0]}, but nodes are numbered 0 to {num_nodes - 1}")
        t = array(table, tuple(len(costs[v]) for v in pair))
        if len(pair) == 2 and pair[0] != pair[1]:
            edges.append(Edge(pair[0], pair[1], t))
        else:  # an edge of one node is a node cost
            node_costs[pair[0]] = node_costs[pair[0]] + (t if len(pair) == 1 else np.diagonal(t))
    items = []
    for v, (interval, b) in enumerate(zip(intervals, usages, strict=True)):
        if len(b) != len(costs[v]):
            raise ValueError(f"node {v} has {len(costs[v])} costs and {len(b)} usages; expected as many of each")
        if interval[0] < interval[1]:
            items.append(Usage((v,), int(interval[0]), int(interval[1]), np.array(b, dtype=np.float64)))
    names = tuple(str(v) for v in range(len(costs)))
    return Problem(names, tuple(node_costs), tuple(edges), tuple(items), None if limit is None else float(limit))


def contest_record(problem: Problem) -> dict:
    """The problem in the contest's format, the inverse of `read_contest` up to names: an answer's first choices are those of our nodes.

    There a node has the bytes of one interval. Further usages of a node, and those of pairs of choices, become nodes of their own, which
    edges of 0 and forbidden tie to the nodes whose bytes they are.
    """
    problem = anchored(problem)
    costs, edges = [c.tolist() for c in problem.node_costs], [([e.a, e.b], e.table.ravel().tolist()) for e in problem.edges]
    held: dict[int, Usage] = {}
    for usage in problem.usages:
        v = usage.ends[0]
        if len(usage.ends) == 1 and v not in held:
            held[v] = usage
            continue
        new = len(costs)
        costs.append([0.0] * usage.bytes.size)
        held[new] = usage
        for end, index in zip(usage.ends, np.indices(usage.bytes.shape)):  # the new node's choice is the pair of the ends' choices
            same = index.ravel()[None, :] == np.arange(len(problem.node_costs[end]))[:, None]
            edges.append(([end, new], np.where(same, 0.0, math.inf).ravel().tolist()))
    spans = [[held[v].start, held[v].end] if v in held else [0, 0] for v in range(len(costs))]
    usages = [held[v].bytes.ravel().tolist() if v in held else [0.0] * len(c) for v, c in enumerate(costs)]
    nodes = {"intervals": spans, "costs": [[min(x, CONTEST_FORBIDDEN) for x in c] for c in costs], "usages": usages}
    joined = {"nodes": [ends for ends, _ in edges], "costs": [[min(x, CONTEST_FORBIDDEN) for x in t] for _, t in edges]}
    limit = {} if problem.usage_limit is None else {"usage_limit": problem.usage_limit}
    return {"problem": {"name": "autoshard", "nodes": nodes, "edges": joined, **limit}}


def write_choice(path: str | os.PathLike[str], answer: Any) -> None:
    """Write the choice, cost, bound and status as JSON: all of it or nothing (a temporary file, which is then renamed)."""
    record = {
        "choice": None if answer.choice is None else [int(i) for i in answer.choice],
        "cost": answer.cost,
        "bound": answer.bound,
        "status": answer.status.value,
    }
    write_json(record, path)
