"""A choice in a new problem from the plan of a near one: another batch, other bandwidths, one layer more."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autoshard.formulate import Formulation
from autoshard.layout import parse
from autoshard.solution import Solution


def start_from(formulated: Formulation, known: Solution) -> tuple[int, ...] | None:
    """Each op and each value's copy as in the known plan, where that has the name and the layouts are possible; the others, one after the
    other, as is cheapest beside those that are chosen. None where some node has no choice then."""
    problem, graph = formulated.problem, formulated.graph
    wanted: dict[int, set[int]] = {}
    for i, op in enumerate(graph.ops):
        if (placed := known.layouts.get(op.name)) is None:
            continue
        outputs = tuple(None if y is None else parse(y) for y in placed.outputs)
        inputs = tuple(map(parse, placed.inputs))
        wanted[i] = {k for k, c in enumerate(formulated.candidates.of[i]) if (tuple(c.inputs), tuple(c.outputs)) == (inputs, outputs)}
        for k, hub in enumerate(placed.hubs):
            if hub is not None and (i, k) in formulated.hubs:
                wanted[formulated.hubs[i, k]] = {n for n, layout in enumerate(formulated.hub_layouts[i, k]) if layout == parse(hub)}
    edges: list[list[tuple[int, np.ndarray]]] = [[] for _ in problem.node_costs]
    for e in problem.edges:
        edges[e.a].append((e.b, e.table))
        edges[e.b].append((e.a, e.table.T))
    choice: dict[int, int] = {}
    order = sorted(range(len(problem.node_costs)), key=lambda v: (not wanted.get(v), v))
    for v in order:
        costs = problem.node_costs[v] + sum(table[:, choice[u]] for u, table in edges[v] if u in choice)
        allowed = _only(costs, sorted(wanted.get(v, ())))
        if not np.isfinite(allowed).any():
            allowed = costs
        if not np.isfinite(allowed).any():
            return None
        choice[v] = int(allowed.argmin())
    return tuple(choice[v] for v in range(len(problem.node_costs)))


def _only(costs: np.ndarray, kept: Sequence[int]) -> np.ndarray:
    if not kept:
        return costs
    allowed = np.full(len(costs), np.inf)
    allowed[list(kept)] = costs[list(kept)]
    return allowed
