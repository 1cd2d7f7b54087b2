"""Pick one choice per node: the problem in numbers, its judge, and the contest's file format.

    cost(x)    = sum_v c_v[x_v] + sum_(a,b) T_ab[x_a, x_b]                          -> evaluate
    memory_t(x) = sum of bytes[x] over the usages with start <= t < end             -> usage_profile
    minimise cost(x) subject to memory_t(x) <= usage_limit at every time t

`inf` in c or T is a value and means forbidden. Parallel edges add up. A usage belongs to a node (bytes per choice) or to
an edge (bytes per pair of choices: a copy that exists only where two layouts differ). Empty intervals use no memory.
The file format is that of the ASPLOS/EuroSys 2025 contest (github.com/google/iopddl), where 1e18 stands for `inf`.
"""

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from typing import Protocol

import numpy as np

from autoshard.reading import data_of
from autoshard.writing import write_atomically

CONTEST_FORBIDDEN = 1e18  # the contest's files write forbidden as a number


FLOAT64 = np.dtype(np.float64)


def _is_float64(array: object) -> bool:
    """Usually so, and then cheaper to see than to convert: a deep model has a hundred thousand of these arrays."""
    return type(array) is np.ndarray and array.dtype is FLOAT64


@dataclass(frozen=True, eq=False)
class Edge:
    """Cost of a pair of choices; equal tables should be one array, shared by reference."""

    a: int
    b: int
    table: np.ndarray  # seconds, shape (choices of a, choices of b)

    def __post_init__(self) -> None:
        if not _is_float64(self.table):
            object.__setattr__(self, "table", np.asarray(self.table, dtype=np.float64))


@dataclass(frozen=True, eq=False)
class NodeUsage:
    """Bytes that a node's tensor holds while it is alive."""

    node: int
    start: int
    end: int  # alive on [start, end)
    bytes: np.ndarray  # per choice

    def __post_init__(self) -> None:
        if not _is_float64(self.bytes):
            object.__setattr__(self, "bytes", np.asarray(self.bytes, dtype=np.float64))


@dataclass(frozen=True, eq=False)
class EdgeUsage:
    """Bytes of the copy that an edge makes where its ends disagree."""

    edge: int
    start: int
    end: int  # alive on [start, end)
    bytes: np.ndarray  # shape of the edge's table

    def __post_init__(self) -> None:
        if not _is_float64(self.bytes):
            object.__setattr__(self, "bytes", np.asarray(self.bytes, dtype=np.float64))


@dataclass(frozen=True, eq=False)
class Problem:
    """Nodes with choices, pairwise costs, and memory over time; `usage_limit` None means no limit."""

    names: tuple[str, ...]
    node_costs: tuple[np.ndarray, ...]  # seconds per choice
    edges: tuple[Edge, ...]
    usages: tuple[NodeUsage | EdgeUsage, ...] = ()
    usage_limit: float | None = None  # bytes

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", tuple(self.names))
        object.__setattr__(self, "node_costs", tuple(np.asarray(c, dtype=np.float64) for c in self.node_costs))
        object.__setattr__(self, "edges", tuple(self.edges))
        object.__setattr__(self, "usages", tuple(self.usages))
        _validate(self)

    @cached_property
    def _times(self) -> tuple[np.ndarray, np.ndarray]:
        """Times at which a usage that is not empty begins or ends; and which of them, for all begins and then for all ends."""
        live = [u for u in self.usages if u.start < u.end]
        spans = np.array([[u.start for u in live], [u.end for u in live]], dtype=np.int64)
        times, index = np.unique(spans.ravel(), return_inverse=True)
        return times, index


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
    for k, u in enumerate(problem.usages):
        _validate_usage(problem, k, u, seen)
    if problem.usage_limit is not None and not problem.usage_limit >= 0:
        raise ValueError(f"the usage limit is {problem.usage_limit}; expected zero or more bytes, or None for no limit")


def _validate_usage(problem: Problem, k: int, usage: NodeUsage | EdgeUsage, seen: set[int]) -> None:
    what, index, count = (
        ("node", usage.node, len(problem.node_costs)) if isinstance(usage, NodeUsage) else ("edge", usage.edge, len(problem.edges))
    )
    if not 0 <= index < count:
        raise ValueError(f"usage {k} belongs to {what} {index}, but {what}s are numbered 0 to {count - 1}")
    shape = problem.node_costs[index].shape if isinstance(usage, NodeUsage) else problem.edges[index].table.shape
    if usage.bytes.shape != shape:
        raise ValueError(f"usage {k} of {what} {index} has bytes of shape {usage.bytes.shape}; expected {shape}")
    if id(usage.bytes) not in seen:
        _check_values(usage.bytes, f"the bytes of usage {k} ({what} {index})", seen, infinite=False)


def _check_values(array: np.ndarray, what: str, seen: set[int], *, infinite: bool) -> None:
    seen.add(id(array))
    if array.size and not (array.min() >= (-np.finfo(float).max if infinite else 0.0)):  # NaN fails too
        found, expected = ("-inf", "finite or inf") if infinite else ("a negative number", "0 or more")
        raise ValueError(f"{what} hold NaN or {found}; expected {expected}")
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
    """The problem, memory set aside."""
    return problem if problem.usage_limit is None else replace(problem, usage_limit=None)


def evaluate(problem: Problem, choice: Sequence[int] | np.ndarray) -> Evaluation:
    """The one judge: cost, peak and fit of an answer, exact for integers below 2**53 and independent of order.

    choice: an index per node, in the order of the problem's nodes. ValueError on too few or too many, and on an index out of range.
    """
    if len(choice) != len(problem.node_costs):
        raise ValueError(f"the answer has {len(choice)} entries, but the problem has {len(problem.node_costs)} nodes")
    x = [int(i) for i in choice]
    for v, (i, c) in enumerate(zip(x, problem.node_costs, strict=True)):
        if not 0 <= i < len(c):
            raise ValueError(f"the answer takes choice {i} of node {v} ({problem.names[v]}), which has choices 0 to {len(c) - 1}")
    node_cost = math.fsum(c[i] for i, c in zip(x, problem.node_costs, strict=True))
    edge_cost = math.fsum(e.table[x[e.a], x[e.b]] for e in problem.edges)
    times, profile = usage_profile(problem, x)
    at = int(profile.argmax()) if len(profile) else 0
    peak, peak_time = (float(profile[at]), int(times[at])) if len(profile) else (0.0, 0)
    fits = problem.usage_limit is None or peak <= problem.usage_limit
    return Evaluation(math.fsum((node_cost, edge_cost)), node_cost, edge_cost, peak, peak_time, fits)


def usage_profile(problem: Problem, choice: Sequence[int] | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Times at which memory can change, and the bytes held from each to the next: two arrays of the same length.

    choice: as for `evaluate`.
    """
    times, index = problem._times
    held = np.array([held_by(problem, u, choice) for u in problem.usages if u.start < u.end], dtype=np.float64)
    delta = np.zeros(len(times))
    np.add.at(delta, index, np.concatenate([held, -held]))
    return times, np.cumsum(delta)


def held_by(problem: Problem, usage: NodeUsage | EdgeUsage, choice: Sequence[int] | np.ndarray) -> float:
    """Bytes of one usage under a choice."""
    if isinstance(usage, NodeUsage):
        return float(usage.bytes[choice[usage.node]])
    edge = problem.edges[usage.edge]
    return float(usage.bytes[choice[edge.a], choice[edge.b]])


def read_contest(path: str | os.PathLike[str]) -> Problem:
    """Read a contest instance (.json or .json.gz); a ValueError says in one sentence what is wrong with the file."""
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
    except (ValueError, OverflowError) as error:  # the latter: whole numbers beyond a float
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
        bad = [v for v in pair if type(v) is not int or v >= num_nodes]  # 1.0 is whole to a schema
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
            items.append(NodeUsage(v, int(interval[0]), int(interval[1]), np.array(b, dtype=np.float64)))
    names = tuple(str(v) for v in range(len(costs)))
    return Problem(names, tuple(node_costs), tuple(edges), tuple(items), None if limit is None else float(limit))


class _Answered(Protocol):
    """The part of the solvers' Answer that a file holds; solvers import this module, so it can't be named here."""

    @property
    def choice(self) -> tuple[int, ...] | None: ...
    @property
    def cost(self) -> float: ...
    @property
    def bound(self) -> float: ...
    @property
    def status(self) -> StrEnum: ...


def write_choice(path: str | os.PathLike[str], answer: _Answered) -> None:
    """Write an Answer's choice, cost, bound and status as JSON, whole or not at all (a temporary file, then renamed)."""
    record = {
        "choice": None if answer.choice is None else [int(i) for i in answer.choice],
        "cost": _finite(answer.cost),
        "bound": _finite(answer.bound),
        "status": answer.status.value,
    }
    write_atomically(json.dumps(record, allow_nan=False) + "\n", path)


def _finite(number: float | None) -> float | None:
    return float(number) if number is not None and math.isfinite(number) else None
