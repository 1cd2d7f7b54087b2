"""A choice in a new problem from the plan of a near one: another batch, other bandwidths, a layer more or less.

And a random choice, which verification runs to test the candidates themselves.
"""

import re
from collections.abc import Mapping, Sequence
from itertools import groupby
from random import Random

import numpy as np

from autoshard.formulate import Formulation
from autoshard.graph import Graph, grouped, repeated_blocks
from autoshard.solution import Placed, Solution
from autoshard.solution import parsed as read

DRAWS = 50  # tries at a random choice without a forbidden edge


def start_from(formulated: Formulation, known: Solution) -> tuple[int, ...] | None:
    """Each op and each value's copy as in the known plan, where that has such an op and the layouts are possible; the others, one after the
    other, as is cheapest beside those that are chosen. None where some node has no choice then."""
    problem, placed_of, memo = formulated.problem, corresponding(formulated.graph, known.layouts), {}
    wanted: dict[int, list[int]] = {}
    for i, placed in placed_of.items():
        key = (id(formulated.candidates.of[i]), placed)
        if key not in memo:
            layouts = tuple(map(read, placed.inputs)), tuple(None if y is None else read(y) for y in placed.outputs)
            memo[key] = [k for k, c in enumerate(formulated.candidates.of[i]) if (tuple(c.inputs), tuple(c.outputs)) == layouts]
        wanted[i] = memo[key]
        for k, hub in enumerate(placed.hubs):
            if hub is not None and (i, k) in formulated.hubs:
                wanted[formulated.hubs[i, k]] = [n for n, layout in enumerate(formulated.hub_layouts[i, k]) if layout == read(hub)]
    edges: list[list[tuple[int, np.ndarray]]] = [[] for _ in problem.node_costs]
    for e in problem.edges:
        edges[e.a].append((e.b, e.table))
        edges[e.b].append((e.a, e.table.T))
    choice: dict[int, int] = {}
    order = sorted(range(len(problem.node_costs)), key=lambda v: (not wanted.get(v), v))
    for v in order:
        costs = problem.node_costs[v] + sum(table[:, choice[u]] for u, table in edges[v] if u in choice)
        allowed = _only(costs, wanted.get(v, ()))
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


def corresponding(graph: Graph, layouts: Mapping[str, Placed]) -> dict[int, Placed]:
    """For each op of the graph what corresponds to it in the plan of a graph of as many layers, or of some more or fewer: the op at the
    same place. Where the graphs differ in something else, the op of the same name."""
    layer = [-1 if place is None or place.block else place.instance for place in repeated_blocks(graph).places]
    names, top = list(layouts), max(layer)
    middle = top // 2
    more, rest = divmod(len(names) - len(layer), layer.count(middle)) if middle >= 0 else (0, len(names) - len(layer))
    dropped = range(first := max((top + more) // 2, 1), first - more)  # of the layers: the plan has none for them
    order: list[int] = []
    for k, run in groupby(range(len(layer)), key=lambda i: layer[i]):
        order += [] if k in dropped else list(run) * (1 + max(more, 0) * (k == middle))
    if rest or len(order) != len(names) or any(_stem(graph.ops[i].name) != _stem(name) for i, name in zip(order, names, strict=True)):
        return {i: layouts[op.name] for i, op in enumerate(graph.ops) if op.name in layouts}
    placed_of = {i: layouts[name] for i, name in zip(order, names, strict=True)}
    for ops in repeated_blocks(graph).equal.values():
        kept = [i for i in ops if i in placed_of]
        placed_of |= {i: placed_of[min(kept, key=lambda j: abs(j - i))] for i in ops if i not in placed_of and kept}
    return placed_of


def _stem(name: str) -> str:
    return re.sub(r"\d+|_(?=\d)", "", name)


def random_choice(formulated: Formulation, seed: int) -> tuple[int, ...]:
    """A choice per node, each drawn among those that no edge to an earlier choice forbids."""
    problem = formulated.problem
    order = _topological_order(formulated)
    position = {node: k for k, node in enumerate(order)}
    earlier: list[list[tuple[int, np.ndarray]]] = [[] for _ in order]  # edges to nodes that come before, tables with that node first
    for edge in problem.edges:
        forward = position[edge.a] < position[edge.b]
        first, last, table = (edge.a, edge.b, edge.table) if forward else (edge.b, edge.a, edge.table.T)
        earlier[last].append((first, table))
    for attempt in range(DRAWS):
        random = Random(f"{seed}:{attempt}")
        choice = [-1] * len(order)
        for node in order:
            allowed = np.isfinite(problem.node_costs[node])
            for other, table in earlier[node]:
                allowed = allowed & np.isfinite(table[choice[other]])
            possible = np.flatnonzero(allowed)
            if len(possible) == 0:
                break
            choice[node] = int(random.choice(list(possible)))
        else:
            return tuple(choice)
    raise ValueError(f"no random layout without a forbidden edge was found in {DRAWS} tries")


def _topological_order(formulated: Formulation) -> list[int]:
    """The nodes, each producer before its readers: an op, then the hubs of its outputs; results last."""
    hubs = grouped((value[0], node) for value, node in formulated.hubs.items())
    ops = range(len(formulated.graph.ops))
    inner = [node for i in ops for node in (i, *hubs.get(i, ()))]
    return inner + list(range(len(inner), len(formulated.problem.node_costs)))
