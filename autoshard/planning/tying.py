"""The option `tie_blocks`: corresponding ops of all instances of a repeated block get the same candidate, and their hubs the same layout.

    tied problem    a node per group of equal nodes; its costs are their sum, its edges and bytes theirs; an edge within a group
                    costs the diagonal of its table                                                            (`tied`)
    answer          the best of the tied problem, on all layers; its bound that of the untied problem, by dual ascent

Tied plans are easier to read and to run. The gap says how much more they may cost.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from autoshard.formulate import Formulation
from autoshard.graph import repeated_blocks
from autoshard.problem import Edge, Problem, Usage
from autoshard.solvers import Answer, certified, solve


def solve_tied(
    formulated: Formulation,
    problem: Problem,
    *,
    solver: str,
    time_limit: float,
    gap: float,
    preference: Sequence[np.ndarray] | None,
    progress: Callable[[float, float], None] | None,
    clock: Callable[[], float] = time.monotonic,
) -> Answer:
    """The best answer in which equal ops of repeated blocks have equal choices, with a bound on all answers."""
    until = clock() + time_limit
    groups = tied_groups(formulated)
    small = tied(problem, groups)
    tied_preference = [np.zeros(len(c)) for c in small.node_costs]
    for v, p in zip(groups, preference or (), strict=preference is not None):
        tied_preference[v] = tied_preference[v] + p
    preferred = None if preference is None else tied_preference
    answer = solve(small, solver=solver, time_limit=time_limit, gap=gap, preference=preferred, clock=clock)
    if answer.choice is None:
        return answer
    choice = tuple(answer.choice[v] for v in groups)
    untied = certified(problem, choice, gap=gap, time_limit=until - clock(), progress=progress, clock=clock)
    return replace(untied, solver=answer.solver, seconds=answer.seconds, reduced=answer.reduced)


def tied_groups(formulated: Formulation) -> list[int]:
    """For each node the number of its group, in order of their first nodes."""
    places = repeated_blocks(formulated.graph).places
    keys: list[object] = []
    for i, place in enumerate(places):
        keys.append(i if place is None else (place.block, place.position, id(formulated.candidates.of[i])))
    for (i, k), layouts in formulated.hub_layouts.items():
        place = places[i]
        keys.append(("hub", i, k) if place is None else ("hub", place.block, place.position, k, layouts))
    keys += [("result", v) for v in range(len(keys), len(formulated.problem.node_costs))]
    numbers: dict[object, int] = {}
    return [numbers.setdefault(key, len(numbers)) for key in keys]


def tied(problem: Problem, groups: Sequence[int]) -> Problem:
    """The problem in which the nodes of a group are one node; groups are numbered in order of their first nodes."""
    costs: dict[int, np.ndarray] = {}
    names: dict[int, str] = {}
    for v, g in enumerate(groups):
        costs[g] = costs[g] + problem.node_costs[v] if g in costs else problem.node_costs[v]
        names.setdefault(g, problem.names[v])
    summed: dict[tuple[int, int], dict[int, tuple[np.ndarray, int]]] = {}
    for e in problem.edges:
        a, b, table = groups[e.a], groups[e.b], e.table
        if a == b:
            costs[a] = costs[a] + np.diagonal(table)
            continue
        if a > b:
            a, b = b, a
        known = summed.setdefault((a, b), {})
        key = id(table) if (groups[e.a], groups[e.b]) == (a, b) else -id(table)  # transposed
        known[key] = (table if key > 0 else table.T, known.get(key, (table, 0))[1] + 1)
    place: dict[tuple[int, ...], int] = {}
    edges: list[Edge] = []
    for (a, b), tables in summed.items():
        place[a, b] = len(edges)
        edges.append(Edge(a, b, sum(np.asarray(count * table) for table, count in tables.values())))  # type: ignore[arg-type]
    usages: dict[tuple, list[Any]] = {}
    for u in problem.usages:
        ends, held = tuple(groups[v] for v in u.ends), u.bytes
        if len(set(ends)) < len(ends):
            ends, held = ends[:1], np.diagonal(held)
        if ends != tuple(sorted(ends)):
            ends, held = ends[::-1], held.T
        usages.setdefault((ends, u.start, u.end), []).append(held)
    summed_usages = tuple(
        Usage(ends, start, end, held[0] if len(held) == 1 else np.sum(held, axis=0), place.get(ends))
        for (ends, start, end), held in usages.items()
    )
    return Problem(tuple(names.values()), tuple(costs.values()), tuple(edges), summed_usages, problem.usage_limit)
