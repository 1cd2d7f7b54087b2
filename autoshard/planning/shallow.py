"""A plan, and what proves it, from a few layers to many: whatever repeats takes what its likes have in the shallow graph.

    place     of an op: (block, instance, position) in the repeated blocks, or its number among the ops that repeat nothing
    twin(v)   of a node of the deep problem: the node of the shallow one at the same place; instance j of n goes to
              j in the lower half, j - n + m in the upper one, where the shallow graph has m instances         (`Correspondence`)
    choice    x(v) = x'(twin(v)); `evaluate` on the deep problem says what that costs
    messages  of an edge those of its twin: dual ascent starts where the shallow one has ended, and has next to nothing to do

Nothing is assumed: twins must have equal signatures (hence equal candidates), the cost is judged on the deep graph, and the bound holds
for any messages. Where a node has no twin there is no extrapolation, and the deep problem is solved from scratch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from autoshard.formulate import Formulation
from autoshard.graph import Graph, repeated_blocks
from autoshard.problem import Problem, without_limit
from autoshard.solvers import Answer, converged, solve

LAST_SECONDS = 0.1  # for the deep problem, after Ctrl-C
SHALLOW_SECONDS = 60.0  # for the shallow problem; what it lacks of a proof the deep one has to make up
NO_TWIN = "{} of the deep graph has no like in the shallow one: the layers differ, or are too few"


@dataclass(frozen=True)
class Correspondence:
    """For each node and edge of the deep problem its twin in the shallow one."""

    nodes: tuple[int, ...]
    edges: tuple[int, ...]

    def choice(self, shallow: Sequence[int]) -> tuple[int, ...]:
        """The shallow choice, on the deep problem."""
        return tuple(shallow[v] for v in self.nodes)

    def messages(self, shallow: Formulation, messages: np.ndarray) -> np.ndarray:
        """The shallow messages (of each edge: into its first end, into its second), on the deep problem."""
        sizes = np.array([sum(e.table.shape) for e in shallow.problem.edges])
        starts = np.cumsum(sizes) - sizes
        wanted = np.array(self.edges, dtype=np.int64)
        lengths = sizes[wanted]
        first = np.cumsum(lengths) - lengths
        return messages[np.repeat(starts[wanted] - first, lengths) + np.arange(int(lengths.sum()))]


@dataclass(frozen=True, eq=False)
class Shallow:
    """The problem of the same model with few layers, and how its answers stretch."""

    formulated: Formulation
    correspondence: Correspondence

    def solve(self, problem: Problem, *, gap: float = 0.0, preferred: bool = True, **options: Any) -> Answer:
        """The answer to a deep problem (pinned perhaps), from that to the shallow one under the same pins."""
        small = self._pinned_alike(problem)
        choice, messages = converged(small, gap=gap)
        if choice is None:
            return solve(problem, gap=gap, **options)
        preference = self.formulated.preference if preferred else None
        answer = solve(small, starts=[choice], messages=messages, gap=gap, preference=preference, time_limit=SHALLOW_SECONDS)
        if answer.interrupted:  # what is known by now, stretched, is the answer
            options["time_limit"] = min(options.get("time_limit", LAST_SECONDS), LAST_SECONDS)
        start = self.correspondence.choice(answer.choice or choice)
        starts = [start, *options.pop("starts", ())]
        deep = solve(problem, gap=gap, starts=starts, messages=self.correspondence.messages(self.formulated, messages), **options)
        return replace(deep, interrupted=deep.interrupted or answer.interrupted)

    def _pinned_alike(self, problem: Problem) -> Problem:
        """The shallow problem, memory aside, without the choices that are forbidden to some node that a node stands for."""
        free = without_limit(self.formulated.problem)
        costs = list(free.node_costs)
        holes: dict[int, np.ndarray | None] = {}  # by the costs' array, which likes share
        pinned = False
        for cost, twin in zip(problem.node_costs, self.correspondence.nodes, strict=True):
            if id(cost) not in holes:
                holes[id(cost)] = np.isinf(cost) if np.isinf(cost).any() else None
            if (hole := holes[id(cost)]) is not None:
                costs[twin] = np.where(hole, np.inf, costs[twin])
                pinned = True
        return replace(free, node_costs=tuple(costs)) if pinned else free


def corresponding_ops(deep: Graph, shallow: Graph) -> list[int]:
    """For each op of the deep graph its twin; ValueError where one has none."""
    ours, theirs = repeated_blocks(deep).places, repeated_blocks(shallow).places
    placed = {place: i for i, place in enumerate(theirs) if place is not None}
    counts, few = _instances(ours), _instances(theirs)
    alone = [i for i, place in enumerate(theirs) if place is None]
    found: list[int] = []
    num_alone = 0
    for i, place in enumerate(ours):
        twin = -1
        if place is None:
            twin = alone[num_alone] if num_alone < len(alone) else -1
            num_alone += 1
        elif place.block in few:
            n, m = counts[place.block], few[place.block]
            lower = min(place.instance, m // 2)
            upper = place.instance - n + m
            for instance in (max(lower, upper), *range(m)):  # what repeats at some layers only has the twin that there is
                if (twin := placed.get(place._replace(instance=instance), -1)) >= 0:
                    break
        if twin < 0 or shallow.ops[twin].target != deep.ops[i].target:
            raise ValueError(NO_TWIN.format(deep.ops[i].name))
        found.append(twin)
    if num_alone != len(alone):
        raise ValueError(f"the deep graph has {num_alone} ops that repeat nothing, the shallow one {len(alone)}: not depth alone differs")
    return found


def _instances(places: Sequence) -> dict[int, int]:
    found: dict[int, int] = {}
    for place in places:
        if place is not None:
            found[place.block] = max(found.get(place.block, 0), place.instance + 1)
    return found


def correspondence(deep: Formulation, shallow: Formulation) -> Correspondence:
    """The twins of two problems of the same model at different depth. ValueError where a node or an edge has none."""
    ops, equal = corresponding_ops_of(deep, shallow)
    known = _edges(shallow)
    nodes = list(ops)
    for value, layouts in deep.hub_layouts.items():
        twin = (ops[value[0]], value[1])
        known_layouts = shallow.hub_layouts.get(twin)
        if (id(known_layouts), id(layouts)) not in equal:
            equal[id(known_layouts), id(layouts)] = known_layouts == layouts
        if not equal[id(known_layouts), id(layouts)]:
            raise ValueError(f"{deep.graph.ops[value[0]].name} is read by others than its like in the shallow graph")
        nodes.append(shallow.hubs[twin])
    own = {key: k for k, key in _result_keys(shallow, range(len(shallow.graph.ops))).items()}
    of_result = {k: own.get(key, -1) for k, key in _result_keys(deep, ops).items()}
    for k, node in deep.results.items():
        if of_result[k] < 0:
            raise ValueError(f"result {deep.graph.results[k].name} of the deep graph has no like in the shallow one")
        if node == len(nodes):
            nodes.append(shallow.results[of_result[k]])
    edges = []
    for kind, where in _edges(deep):
        if kind == "hub":
            key: tuple = (kind, (ops[where[0]], where[1]))
        elif kind == "input":
            key = (kind, (ops[where[0]], where[1]))
        else:
            key = (kind, of_result[where])
        edges.append(known[key])
    for e, like in enumerate(edges):
        if deep.problem.edges[e].table.shape != shallow.problem.edges[like].table.shape:
            raise ValueError(f"an edge to {deep.problem.names[deep.problem.edges[e].b]} has no like in the shallow graph")
    return Correspondence(tuple(nodes), tuple(edges))


def corresponding_ops_of(deep: Formulation, shallow: Formulation) -> tuple[list[int], dict[tuple[int, int], bool]]:
    """`corresponding_ops`, with equal candidates; and which pairs of objects were found equal, by their ids."""
    ops = corresponding_ops(deep.graph, shallow.graph)
    equal: dict[tuple[int, int], bool] = {}  # ops of one signature share their candidates
    for i, twin in enumerate(ops):
        ours, theirs = deep.candidates.of[i], shallow.candidates.of[twin]
        if (key := (id(ours), id(theirs))) not in equal:
            equal[key] = ours == theirs
        if not equal[key]:
            raise ValueError(NO_TWIN.format(deep.graph.ops[i].name))
    return ops, equal


def op_choices(deep: Formulation, shallow: Formulation, choice: Sequence[int]) -> dict[int, int]:
    """The choices of the deep problem's ops, those of their twins; and of outputs, those of the same name."""
    found = dict(enumerate(choice[twin] for twin in corresponding_ops_of(deep, shallow)[0]))
    outputs = {shallow.graph.results[k].name: k for k in shallow.results if shallow.graph.results[k].kind == "output"}
    for k, node in deep.results.items():
        twin = outputs.get(deep.graph.results[k].name) if deep.graph.results[k].kind == "output" else None
        if twin is not None and shallow.result_layouts[twin] == deep.result_layouts[k]:
            found[node] = choice[shallow.results[twin]]
    return found


def completed(formulated: Formulation, known: Mapping[int, int]) -> tuple[int, ...]:
    """The choice in which every other node (a hub: no two of them are neighbours) takes what is cheapest beside the known ones."""
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
    """For each result its kind with the twin of the parameter or buffer that it belongs to, or with its name."""
    graph, keys = formulated.graph, {}
    for k in formulated.results:
        result = graph.results[k]
        owned = result.kind != "output" and result.name in graph.index
        keys[k] = (result.kind, ops[graph.index[result.name]] if owned else result.name)
    return keys
