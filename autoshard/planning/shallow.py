"""Extends a plan of a few layers to many: each op of the deep model gets the choice of the corresponding op of the shallow model.

    place     of an op: (block, instance, position) in the repeated blocks, or its number among the ops that repeat nothing
    c(v)      the node of the shallow problem that corresponds to node v of the deep one: the node at the same place; instance j of n
              corresponds to j in the lower half, to j - n + m in the upper one, where the shallow graph has m instances
                                                                                                          (`Correspondence`)
    choice    x(v) = x'(c(v)); `evaluate` on the deep problem says what that costs
    messages  of an edge: those of the corresponding edge. Dual ascent starts where it ended on the shallow problem, with little left to do

Nothing is assumed: corresponding nodes must have equal signatures (hence equal candidates), the cost is evaluated on the deep graph, and
the bound holds for any messages. Where a node has no corresponding node the deep problem is solved from scratch.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from autoshard.formulate import Formulation
from autoshard.graph import Graph, repeated_blocks
from autoshard.problem import Problem, evaluate, without_limit
from autoshard.solvers import TIME_LIMIT, Answer, converged, hopeless, solve

PATIENCE = 120.0  # seconds: for a first choice of the shallow problem, which dual ascent decodes in its first sweeps
LEAST_SECONDS = 0.1  # of a search, whatever time is left: it begins, and its starts are judged
ASCENT_GAP = 1e-4  # relative, at most: dual ascent goes on to here, which is cheap; a plan of many layers is as good as that of few
SHALLOW_SECONDS, SHALLOW_SHARE = 60.0, 0.25  # for the shallow problem, of the time left; the deep problem is left to prove more
NONE_CORRESPONDS = "{} of the deep graph has no corresponding op in the shallow one: the layers differ, or are too few"


class Numbers(Protocol):
    """A problem and the fixed order among choices of equal cost: a Formulation, or several programs joined."""

    @property
    def problem(self) -> Problem: ...

    @property
    def preference(self) -> tuple[np.ndarray, ...]: ...


@dataclass(frozen=True)
class Correspondence:
    """For each node and edge of the deep problem the corresponding one of the shallow problem."""

    nodes: tuple[int, ...]
    edges: tuple[int, ...]

    def choice(self, shallow: Sequence[int]) -> tuple[int, ...]:
        """The choice of the deep problem that a choice of the shallow one stands for."""
        return tuple(shallow[v] for v in self.nodes)

    def messages(self, shallow: Numbers, messages: np.ndarray) -> np.ndarray:
        """The messages of the deep problem (of each edge: into its first end, into its second) that those of the shallow one stand for."""
        sizes = np.array([sum(e.table.shape) for e in shallow.problem.edges])
        starts = np.cumsum(sizes) - sizes
        wanted = np.array(self.edges, dtype=np.int64)
        lengths = sizes[wanted]
        first = np.cumsum(lengths) - lengths
        return messages[np.repeat(starts[wanted] - first, lengths) + np.arange(int(lengths.sum()))]


@dataclass(frozen=True, eq=False)
class Shallow:
    """The problem of the same model with few layers, and how its answers extend to the deep problem."""

    formulated: Numbers
    correspondence: Correspondence
    homes: Sequence[int] | None = None  # the layer of every node
    _known: dict[tuple[float, bool], tuple] = field(default_factory=dict)  # answers without limit and pins

    def solve(
        self, problem: Problem, *, gap: float = 0.0, preferred: bool = True, time_limit: float = TIME_LIMIT, patience: float = math.inf,
        clock: Callable[[], float] = time.monotonic, **options: Any,
    ) -> Answer:  # fmt: skip
        """The answer to a deep problem (with pins or without), found from that to the shallow problem under the same pins."""
        until, first_until = clock() + time_limit, clock() + patience
        options |= {"gap": gap, "clock": clock, "time_limit": time_limit, "patience": patience}
        binds = problem.usage_limit is not None and options.get("prices") is not None  # there is a better beginning
        if binds or hopeless(problem):
            return solve(problem, **options)
        small, limited = self._with_pins_of(problem), problem.usage_limit is not None
        choice, messages, answer = self._free(small, gap, preferred and not limited, clock, until)
        if answer is not None and preferred and limited and answer.choice is not None:
            if evaluate(problem, self.correspondence.choice(answer.choice)).fits:
                choice, messages, answer = self._free(small, gap, preferred, clock, until)
        options["time_limit"], options["patience"] = max(until - clock(), LEAST_SECONDS), max(first_until - clock(), LEAST_SECONDS)
        if answer is None:
            return solve(problem, **options)
        if answer.interrupted:  # the best choice so far, extended to the deep problem, is the answer
            options["time_limit"] = LEAST_SECONDS
        start = self.correspondence.choice(answer.choice or choice)
        starts = [start, *options.pop("starts", ())]
        deep = solve(problem, starts=starts, messages=self.correspondence.messages(self.formulated, messages), **options)
        return replace(deep, interrupted=deep.interrupted or answer.interrupted)

    def _free(
        self, small: Problem, gap: float, preferred: bool, clock: Callable[[], float], until: float
    ) -> tuple[Sequence[int], np.ndarray, Answer | None]:
        """The start and the messages of dual ascent, and the answer; None where there is none. Without pins it is kept."""
        known = self._known if small is self._without_limit else {}
        if (gap, preferred) in known:
            return known[gap, preferred]
        if (gap, False) in known:
            choice, messages, _ = known[gap, False]
        else:
            choice, messages = converged(small, gap=min(gap, ASCENT_GAP), time_limit=until - clock(), patience=PATIENCE, clock=clock)
        answer = None
        if choice is not None:
            answer = solve(
                small, starts=[choice], messages=messages, gap=gap, preference=self.formulated.preference if preferred else None,
                time_limit=min(SHALLOW_SECONDS, max(SHALLOW_SHARE * (until - clock()), LEAST_SECONDS)), clock=clock, homes=self.homes,
            )  # fmt: skip
        known[gap, preferred] = (choice or (), messages, answer)
        return known[gap, preferred]

    @cached_property
    def _without_limit(self) -> Problem:
        return without_limit(self.formulated.problem)

    def _with_pins_of(self, problem: Problem) -> Problem:
        """The shallow problem without a memory limit, and without each choice that is forbidden to some deep node of the same choice."""
        free = self._without_limit
        costs = list(free.node_costs)
        holes: dict[int, np.ndarray | None] = {}  # by the costs' array, which equal nodes share
        pinned = False
        for cost, small in zip(problem.node_costs, self.correspondence.nodes, strict=True):
            if id(cost) not in holes:
                holes[id(cost)] = np.isinf(cost) if np.isinf(cost).any() else None
            if (hole := holes[id(cost)]) is not None:
                costs[small] = np.where(hole, np.inf, costs[small])
                pinned = True
        return replace(free, node_costs=tuple(costs)) if pinned else free


def corresponding_ops(deep: Graph, shallow: Graph) -> list[int]:
    """For each op of the deep graph the corresponding op of the shallow one; ValueError where one has none."""
    deep_places, shallow_places = repeated_blocks(deep).places, repeated_blocks(shallow).places
    by_place = {place: i for i, place in enumerate(shallow_places) if place is not None}
    counts, few = _instances(deep_places), _instances(shallow_places)
    alone = [i for i, place in enumerate(shallow_places) if place is None]
    ops: list[int] = []
    num_alone = 0
    for i, place in enumerate(deep_places):
        op = -1
        if place is None:
            op = alone[num_alone] if num_alone < len(alone) else -1
            num_alone += 1
        elif place.block in few:
            n, m = counts[place.block], few[place.block]
            lower = min(place.instance, m // 2)
            upper = place.instance - n + m
            for instance in (max(lower, upper), *range(m)):  # an op that only some layers have corresponds to that of any such layer
                if (op := by_place.get(place._replace(instance=instance), -1)) >= 0:
                    break
        if op < 0 or shallow.ops[op].target != deep.ops[i].target:
            raise ValueError(NONE_CORRESPONDS.format(deep.ops[i].name))
        ops.append(op)
    if num_alone != len(alone):
        raise ValueError(f"the deep graph has {num_alone} ops that repeat nothing, the shallow one {len(alone)}: not depth alone differs")
    return ops


def _instances(places: Sequence) -> dict[int, int]:
    """By block, how many instances it has."""
    counts: dict[int, int] = {}
    for place in places:
        if place is not None:
            counts[place.block] = max(counts.get(place.block, 0), place.instance + 1)
    return counts


def correspondence(deep: Formulation, shallow: Formulation) -> Correspondence:
    """Which nodes and edges correspond in two problems of the same model at different depth. ValueError where one has none."""
    ops, equal = corresponding_ops_of(deep, shallow)
    shallow_edges = _edges(shallow)
    nodes = list(ops)
    for value, layouts in deep.hub_layouts.items():
        small = (ops[value[0]], value[1])
        small_layouts = shallow.hub_layouts.get(small)
        if (id(small_layouts), id(layouts)) not in equal:
            equal[id(small_layouts), id(layouts)] = small_layouts == layouts
        if not equal[id(small_layouts), id(layouts)]:
            raise ValueError(f"{deep.graph.ops[value[0]].name} has other readers than the corresponding op in the shallow graph")
        nodes.append(shallow.hubs[small])
    by_key = {key: k for k, key in _result_keys(shallow, range(len(shallow.graph.ops))).items()}
    results = {k: by_key.get(key, -1) for k, key in _result_keys(deep, ops).items()}
    for k, node in deep.results.items():
        if results[k] < 0:
            raise ValueError(f"result {deep.graph.results[k].name} of the deep graph has no corresponding result in the shallow one")
        if node == len(nodes):
            nodes.append(shallow.results[results[k]])
    edges = []
    for kind, where in _edges(deep):
        key = (kind, results[where]) if kind == "result" else (kind, (ops[where[0]], where[1]))
        edges.append(shallow_edges[key])
    for e, small_edge in enumerate(edges):
        if deep.problem.edges[e].table.shape != shallow.problem.edges[small_edge].table.shape:
            raise ValueError(f"an edge to {deep.problem.names[deep.problem.edges[e].b]} has no corresponding edge in the shallow graph")
    return Correspondence(tuple(nodes), tuple(edges))


def corresponding_ops_of(deep: Formulation, shallow: Formulation) -> tuple[list[int], dict[tuple[int, int], bool]]:
    """`corresponding_ops`, which must have equal candidates; and which pairs of objects are equal, by their ids."""
    ops = corresponding_ops(deep.graph, shallow.graph)
    equal: dict[tuple[int, int], bool] = {}  # ops of one signature share their candidates
    for i, op in enumerate(ops):
        candidates, small_candidates = deep.candidates.of[i], shallow.candidates.of[op]
        if (key := (id(candidates), id(small_candidates))) not in equal:
            equal[key] = candidates == small_candidates
        if not equal[key]:
            raise ValueError(NONE_CORRESPONDS.format(deep.graph.ops[i].name))
    return ops, equal


def op_choices(deep: Formulation, shallow: Formulation, choice: Sequence[int]) -> dict[int, int]:
    """The choices of the deep problem's ops, those of the corresponding ops; and of outputs, those of the same name."""
    choices = dict(enumerate(choice[op] for op in corresponding_ops_of(deep, shallow)[0]))
    outputs = {shallow.graph.results[k].name: k for k in shallow.results if shallow.graph.results[k].kind == "output"}
    for k, node in deep.results.items():
        small = outputs.get(deep.graph.results[k].name) if deep.graph.results[k].kind == "output" else None
        if small is not None and shallow.result_layouts[small] == deep.result_layouts[k]:
            choices[node] = choice[shallow.results[small]]
    return choices


def completed(formulated: Formulation, known: Mapping[int, int]) -> tuple[int, ...]:
    """The choice in which every other node (a hub; no two of them are neighbours) has what is cheapest beside the known choices."""
    problem = formulated.problem
    costs = {v: c.copy() for v, c in enumerate(problem.node_costs) if v not in known}
    for e in problem.edges:
        if e.a in costs and e.b in known:
            costs[e.a] += e.table[:, known[e.b]]
        elif e.b in costs and e.a in known:
            costs[e.b] += e.table[known[e.a]]
    cheapest = {v: int(np.argmin(c)) for v, c in costs.items()}
    return tuple(known[v] if v in known else cheapest[v] for v in range(len(problem.node_costs)))


def _edges(formulated: Formulation) -> dict[tuple, int]:
    """The edges of the problem by what they mean, in order (formulate.build)."""
    keys: list[tuple] = [("hub", value) for value in formulated.hubs]
    keys += [("input", (i, a)) for i, op in enumerate(formulated.graph.ops) for a in range(len(op.inputs))]
    keys += [("result", k) for k in formulated.results]
    assert len(keys) == len(formulated.problem.edges)
    return {key: e for e, key in enumerate(keys)}


def _result_keys(formulated: Formulation, ops: Sequence[int]) -> dict[int, tuple]:
    """For each result its kind with the op, through `ops`, of the parameter or buffer that it belongs to, or with its name."""
    graph, keys = formulated.graph, {}
    for k in formulated.results:
        result = graph.results[k]
        owned = result.kind != "output" and result.name in graph.index
        keys[k] = (result.kind, ops[graph.index[result.name]] if owned else result.name)
    return keys
