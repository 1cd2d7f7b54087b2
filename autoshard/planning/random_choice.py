"""A random choice of layouts for all tensors that fits together, which verification runs to test the candidates themselves."""

from random import Random

import numpy as np

from autoshard.formulate import Formulation

DRAWS = 50  # tries at a random choice without a forbidden edge


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
    hubs: dict[int, list[int]] = {}
    for value, node in formulated.hubs.items():
        hubs.setdefault(value[0], []).append(node)
    ops = range(len(formulated.graph.ops))
    inner = [node for i in ops for node in (i, *hubs.get(i, ()))]
    return inner + list(range(len(inner), len(formulated.problem.node_costs)))
