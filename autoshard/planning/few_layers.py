"""Extends a plan of few layers to many: each op of the deep model gets the choice of the corresponding op of the model with few layers.

    place     of an op: (block, instance, position) in the repeated blocks, or its number among the ops that repeat nothing
    c(v)      the node of the problem of few layers that corresponds to node v of the deep one: the node at the same place; instance j
              of n corresponds to j in the lower half, to j - n + m in the upper one, where the few layers have m instances
                                                                                                          (`Correspondence`)
    choice    x(v) = x'(c(v)); `evaluate` on the deep problem says what that costs
    messages  of an edge: those of the corresponding edge. Dual ascent starts where it ended on few layers, with little left to do
    nearby    under a memory limit the same at every price per byte: few layers at the prices, from the messages at the last prices

Nothing is assumed: corresponding nodes must have equal signatures (hence equal candidates), the cost is evaluated on the deep graph, and
the bound holds for any messages. Where a node has no corresponding node the deep problem is solved from scratch.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import numpy as np

from autoshard.formulate import Formulation
from autoshard.graph import Graph, repeated_blocks
from autoshard.problem import Edge, Problem, costs_beside, evaluate, without_limit
from autoshard.solvers import TIME_LIMIT, Answer, converged, hopeless, solve

PATIENCE = 120.0  # seconds: for a first choice of the problem of few layers, which dual ascent decodes in its first sweeps
LEAST_SECONDS = 0.1  # of a search, whatever time is left: it begins, and its starts are judged
ASCENT_GAP = 1e-4  # relative, at most: dual ascent goes on to here, which is cheap; a plan of many layers is as good as that of few
FINER = 4  # than the gap of an answer at other costs: dual ascent on few layers
FEW_SECONDS, FEW_SHARE = 60.0, 0.25  # for few layers, of the time left; the deep problem is left to prove more
NONE_CORRESPONDS = "{} of the deep graph has no corresponding op in the shallow one: the layers differ, or are too few"


@dataclass(frozen=True)
class Correspondence:
    """For each node and edge of the deep problem the corresponding one of the problem of few layers."""

    nodes: tuple[int, ...]
    edges: tuple[int, ...]

    def choice(self, few_layers: Sequence[int]) -> tuple[int, ...]:
        """The choice of the deep problem that a choice for few layers stands for."""
        return tuple(few_layers[v] for v in self.nodes)

    def messages(self, few_layers: Formulation, messages: np.ndarray) -> np.ndarray:
        """The messages of the deep problem (of each edge: into its first end, into its second) that those for few layers stand for."""
        sizes = np.array([sum(e.table.shape) for e in few_layers.problem.edges])
        starts = np.cumsum(sizes) - sizes
        wanted = np.array(self.edges, dtype=np.int64)
        lengths = sizes[wanted]
        first = np.cumsum(lengths) - lengths
        return messages[np.repeat(starts[wanted] - first, lengths) + np.arange(int(lengths.sum()))]


@dataclass(frozen=True, eq=False)
class FewLayers:
    """The problem of the same model with few layers, and how its answers extend to the deep problem."""

    formulated: Formulation  # of several programs: Joined, of which the problem and the preference are read
    correspondence: Correspondence
    layers: Sequence[int] | None = None  # the layer of every node
    _known: dict[tuple[float, bool], tuple] = field(default_factory=dict)  # answers without limit and pins
    _last: list[tuple[Sequence[int], np.ndarray]] = field(default_factory=list)  # the last choice and messages
    _at_other_costs: bool = False

    def solve(
        self, problem: Problem, *, gap: float = 0.0, preferred: bool = True, time_limit: float = TIME_LIMIT, patience: float = math.inf,
        clock: Callable[[], float] = time.monotonic, **options: Any,
    ) -> Answer:  # fmt: skip
        """The answer to a deep problem (with pins or without), found from that for few layers under the same pins."""
        until, first_until = clock() + time_limit, clock() + patience
        options |= {"gap": gap, "clock": clock, "time_limit": time_limit, "patience": patience}
        limited = problem.usage_limit is not None
        if limited:
            options["nearby"] = partial(self._nearby, clock, until)
        if limited and options.get("prices") is not None or hopeless(problem):  # there is a better beginning
            return solve(problem, **options)
        few = self._with_pins_of(problem)
        choice, messages, answer = self._free(few, gap, preferred and not limited, clock, until)
        if answer is not None and preferred and limited and answer.choice is not None:
            if evaluate(problem, self.correspondence.choice(answer.choice)).fits:
                choice, messages, answer = self._free(few, gap, preferred, clock, until)
        options["time_limit"], options["patience"] = max(until - clock(), LEAST_SECONDS), max(first_until - clock(), LEAST_SECONDS)
        if answer is None:
            return solve(problem, **options)
        if answer.interrupted:  # the best choice so far, extended to the deep problem, is the answer
            options["time_limit"] = LEAST_SECONDS
        starts = [self.correspondence.choice(answer.choice or choice), *options.pop("starts", ())]
        deep = solve(problem, starts=starts, messages=self._deep_messages(problem, few, messages), **options)
        return replace(deep, interrupted=deep.interrupted or answer.interrupted)

    def _free(
        self, few: Problem, gap: float, preferred: bool, clock: Callable[[], float], until: float
    ) -> tuple[Sequence[int], np.ndarray, Answer | None]:
        """The start and the messages of dual ascent, and the answer; None where there is none. Without pins it is kept."""
        known = self._known if few is self._without_limit else {}
        if (gap, preferred) in known:
            return known[gap, preferred]
        if (gap, False) in known:
            choice, messages, _ = known[gap, False]
        else:
            choice, messages = self._ascent(few, min(gap, ASCENT_GAP), clock, until)
        answer = None
        if choice is not None:
            answer = solve(
                few, starts=[choice], messages=messages, gap=gap, preference=self.formulated.preference if preferred else None,
                time_limit=min(FEW_SECONDS, max(FEW_SHARE * (until - clock()), LEAST_SECONDS)), clock=clock, homes=self.layers,
            )  # fmt: skip
        known[gap, preferred] = (choice or (), messages, answer)
        return known[gap, preferred]

    def _ascent(self, few: Problem, gap: float, clock: Callable[[], float], until: float) -> tuple[Sequence[int] | None, np.ndarray]:
        """A choice for few layers, and messages; at other costs from the last ones, and only as far as is quick."""
        begin = self._last[-1] if self._at_other_costs and self._last else None
        left = max(until - clock(), LEAST_SECONDS)
        choice, messages = converged(few, gap=gap, begin=begin, time_limit=left, patience=PATIENCE, clock=clock)
        if choice is not None:
            self._last[:] = [(choice, messages)]
        return choice, messages

    def converged(self, time_limit: float, clock: Callable[[], float]) -> tuple[tuple[int, ...] | None, np.ndarray]:
        """A choice of the deep problem without a limit (None where there is none) and its messages, from dual ascent on few layers."""
        choice, messages = converged(self.formulated.problem, time_limit=time_limit, clock=clock)
        return None if choice is None else self.correspondence.choice(choice), self.correspondence.messages(self.formulated, messages)

    def _nearby(self, clock: Callable[[], float], until: float, problem: Problem, gap: float) -> tuple[tuple[int, ...] | None, np.ndarray]:
        """A choice of the deep problem, which has no limit, and its messages: those of few layers at its costs."""
        at_costs = self.at_costs_of(problem)
        few = without_limit(at_costs.formulated.problem)
        choice, messages = at_costs._ascent(few, gap / FINER, clock, until)
        return None if choice is None else self.correspondence.choice(choice), self._deep_messages(problem, few, messages)

    def _deep_messages(self, problem: Problem, few: Problem, messages: np.ndarray) -> np.ndarray:
        """The messages of the deep problem. Infinite ones forbid a choice: where one layer is pinned they would forbid it to all, and the
        bound would be too high."""
        pairs = {(id(costs), node): costs for costs, node in zip(problem.node_costs, self.correspondence.nodes, strict=True)}
        is_alike = all(np.array_equal(np.isinf(costs), np.isinf(few.node_costs[node])) for (_, node), costs in pairs.items())
        return self.correspondence.messages(self.formulated, messages if is_alike else np.where(np.isfinite(messages), messages, 0.0))

    def at_costs_of(self, problem: Problem) -> FewLayers:
        """The few layers, each node and edge at the costs of the first of the deep problem's that it stands for."""
        few, of = self.formulated.problem, self.correspondence
        nodes, edges = ({k: deep for deep, k in reversed(list(enumerate(to)))} for to in (of.nodes, of.edges))
        costs = tuple(problem.node_costs[nodes[v]] if v in nodes else c for v, c in enumerate(few.node_costs))
        tables = tuple(Edge(e.a, e.b, problem.edges[edges[k]].table) if k in edges else e for k, e in enumerate(few.edges))
        formulated = replace(self.formulated, problem=replace(few, node_costs=costs, edges=tables))
        return FewLayers(formulated, of, self.layers, _last=self._last, _at_other_costs=True)

    @cached_property
    def _without_limit(self) -> Problem:
        return without_limit(self.formulated.problem)

    def _with_pins_of(self, problem: Problem) -> Problem:
        """The problem of few layers without a memory limit, and without each choice that is forbidden to some corresponding deep node."""
        free = self._without_limit
        costs = list(free.node_costs)
        holes: dict[int, np.ndarray | None] = {}  # by the costs' array, which equal nodes share
        pinned = False
        for cost, node in zip(problem.node_costs, self.correspondence.nodes, strict=True):
            if id(cost) not in holes:
                holes[id(cost)] = np.isinf(cost) if np.isinf(cost).any() else None
            if (hole := holes[id(cost)]) is not None:
                costs[node] = np.where(hole, np.inf, costs[node])
                pinned = True
        return replace(free, node_costs=tuple(costs)) if pinned else free


def corresponding_ops(deep: Graph, few_layers: Graph) -> list[int]:
    """For each op of the deep graph the corresponding op of the graph of few layers; ValueError where one has none."""
    deep_places, few_places = repeated_blocks(deep).places, repeated_blocks(few_layers).places
    by_place = {place: i for i, place in enumerate(few_places) if place is not None}
    counts, few_counts = _instances(deep_places), _instances(few_places)
    alone = [i for i, place in enumerate(few_places) if place is None]
    ops: list[int] = []
    num_alone = 0
    for i, place in enumerate(deep_places):
        op = -1
        if place is None:
            op = alone[num_alone] if num_alone < len(alone) else -1
            num_alone += 1
        elif place.block in few_counts:
            n, m = counts[place.block], few_counts[place.block]
            lower = min(place.instance, m // 2)
            upper = place.instance - n + m
            for instance in sorted(range(m), key=lambda j: abs(j - max(lower, upper))):  # an op that only some layers have: to the nearest
                if (op := by_place.get(place._replace(instance=instance), -1)) >= 0:
                    break
        if op < 0 or few_layers.ops[op].target != deep.ops[i].target:
            raise ValueError(NONE_CORRESPONDS.format(deep.ops[i].name))
        ops.append(op)
    if num_alone != len(alone):
        raise ValueError(f"the deep graph has {num_alone} ops that repeat nothing, the shallow one {len(alone)}: not depth alone differs")
    return ops


def _instances(places: Sequence) -> dict[int, int]:
    """By block, how many instances it has."""
    last = sorted((place.block, place.instance) for place in places if place is not None)
    return {block: instance + 1 for block, instance in last}


def correspondence(deep: Formulation, few_layers: Formulation) -> Correspondence:
    """Which nodes and edges correspond in two problems of the same model at different depth. ValueError where one has none."""
    ops, equal = corresponding_ops_of(deep, few_layers)
    few_edges = {place: e for e, place in enumerate(few_layers.places)}
    nodes = list(ops)
    for value, layouts in deep.hub_layouts.items():
        corresponding = (ops[value[0]], value[1])
        few_layouts = few_layers.hub_layouts.get(corresponding)
        if (id(few_layouts), id(layouts)) not in equal:
            equal[id(few_layouts), id(layouts)] = few_layouts == layouts
        if not equal[id(few_layouts), id(layouts)]:
            raise ValueError(f"{deep.graph.ops[value[0]].name} has other readers than the corresponding op in the shallow graph")
        nodes.append(few_layers.hubs[corresponding])
    by_key = {key: k for k, key in _result_keys(few_layers, range(len(few_layers.graph.ops))).items()}
    results = {k: by_key.get(key, -1) for k, key in _result_keys(deep, ops).items()}
    for k, node in deep.results.items():
        if results[k] < 0:
            raise ValueError(f"result {deep.graph.results[k].name} of the deep graph has no corresponding result in the shallow one")
        if node == len(nodes):
            nodes.append(few_layers.results[results[k]])
    edges = [few_edges[(kind, results[i], 0) if kind == "result" else (kind, ops[i], a)] for kind, i, a in deep.places]
    for e, few_edge in enumerate(edges):
        if deep.problem.edges[e].table.shape != few_layers.problem.edges[few_edge].table.shape:
            raise ValueError(f"an edge to {deep.problem.names[deep.problem.edges[e].b]} has no corresponding edge in the shallow graph")
    return Correspondence(tuple(nodes), tuple(edges))


def corresponding_ops_of(deep: Formulation, few_layers: Formulation) -> tuple[list[int], dict[tuple[int, int], bool]]:
    """`corresponding_ops`, which must have equal candidates; and which pairs of objects are equal, by their ids."""
    ops = corresponding_ops(deep.graph, few_layers.graph)
    equal: dict[tuple[int, int], bool] = {}  # ops of one signature share their candidates
    for i, op in enumerate(ops):
        candidates, few_candidates = deep.candidates.of[i], few_layers.candidates.of[op]
        if (key := (id(candidates), id(few_candidates))) not in equal:
            equal[key] = candidates == few_candidates
        if not equal[key]:
            raise ValueError(NONE_CORRESPONDS.format(deep.graph.ops[i].name))
    return ops, equal


def completed(formulated: Formulation, known: Mapping[int, int]) -> tuple[int, ...]:
    """The choice in which every other node (a hub; no two of them are neighbours) has what is cheapest beside the known choices."""
    nodes = range(len(formulated.problem.node_costs))
    costs = costs_beside(formulated.problem, [v for v in nodes if v not in known], known)
    return tuple(known[v] if v in known else int(np.argmin(costs[v])) for v in nodes)


def _result_keys(formulated: Formulation, ops: Sequence[int]) -> dict[int, tuple]:
    """For each result its kind with the op, through `ops`, of the parameter or buffer that it belongs to, or with its name."""
    graph, keys = formulated.graph, {}
    for k in formulated.results:
        result = graph.results[k]
        owned = result.kind != "output" and result.name in graph.index
        keys[k] = (result.kind, ops[graph.index[result.name]] if owned else result.name)
    return keys
