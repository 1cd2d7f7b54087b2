"""Small random problems with every feature, drawn from a seed."""

import itertools
import math
import time

import numpy as np

from autoshard.problem import Edge, EdgeUsage, Evaluation, NodeUsage, Problem, Usage, evaluate
from autoshard.solvers.dual_ascent import Messages, ascend
from autoshard.solvers.incumbent import Incumbent, Record


def random_problem(seed: int, *, most_nodes: int = 6, most_choices: int = 4, most_answers: int = 20000) -> Problem:
    """inf, parallel edges, several usages per node, edge usages, empty intervals, zero costs, tight and loose limits."""
    rng = np.random.default_rng(seed)
    whole = rng.random() < 0.7  # whole numbers make ties
    sizes: list[int] = []
    for _ in range(rng.integers(1, most_nodes + 1)):
        size = int(rng.integers(1, most_choices + 1))
        sizes.append(size if np.prod(sizes, initial=1) * size <= most_answers else 1)
    n = len(sizes)

    def costs(shape: tuple[int, ...], forbidden: float) -> np.ndarray:
        c = rng.integers(0, 10, shape).astype(float) if whole else rng.normal(1.0, 1.0, shape) * 10.0 ** rng.integers(-3, 1)
        kind = rng.random()
        if kind < 0.1:
            c = np.zeros(shape)
        elif kind < 0.2 and len(shape) == 2:
            c = c[:, :1] + c[:1, :]  # separable
        return np.where(rng.random(shape) < forbidden, np.inf, c)

    density, forbidden = rng.uniform(0.2, 1.8), rng.choice([0.0, 0.1, 0.4])
    edges = []
    for _ in range(int(density * n) if n > 1 else 0):
        a, b = (int(v) for v in rng.choice(n, 2, replace=False))
        if rng.random() < 0.15 and sizes[a] == sizes[b]:
            table = np.where(np.eye(sizes[a], dtype=bool), 0.0, np.inf)  # a tie
        else:
            table = costs((sizes[a], sizes[b]), forbidden)
        edges.append(Edge(a, b, table))
        if rng.random() < 0.2:
            edges.append(Edge(b, a, table.T if rng.random() < 0.5 else costs((sizes[b], sizes[a]), 0.1)))

    def amounts(shape: tuple[int, ...]) -> np.ndarray:
        return rng.integers(0, 12, shape).astype(float) if whole else rng.uniform(0, 5, shape).round(3)

    usages: list[Usage] = []
    for v in range(n):
        for _ in range(rng.integers(0, 4)):
            start = int(rng.integers(0, 12))
            usages.append(NodeUsage(v, start, start + int(rng.integers(0, 8)), amounts((sizes[v],))))
    for k, e in enumerate(edges):
        if rng.random() < 0.3:
            start = int(rng.integers(0, 12))
            end, (rows, columns) = start + int(rng.integers(0, 6)), e.table.shape
            separable = rng.random() < 0.5
            usages.append(EdgeUsage(k, start, end, amounts((rows, 1)) + amounts((1, columns)) if separable else amounts(e.table.shape)))
    most = sum(u.bytes.max() for u in usages)
    limit = None if rng.random() < 0.25 else float(np.round(most * rng.choice([0.1, 0.25, 0.35, 0.5, 0.9])))
    node_costs = tuple(costs((s,), 0.05 if rng.random() < 0.3 else 0.0) for s in sizes)
    return Problem(tuple(f"n{v}" for v in range(n)), node_costs, tuple(edges), tuple(usages), limit)


def every_choice(problem: Problem) -> itertools.product:
    """All answers of a small problem."""
    return itertools.product(*(range(len(costs)) for costs in problem.node_costs))


def every_answer(problem: Problem) -> list[Evaluation]:
    """All answers that are allowed, judged."""
    return [found for x in every_choice(problem) if math.isfinite((found := evaluate(problem, x)).cost)]


def incumbent_of(problem: Problem, clock=time.monotonic, gap: float = 0.0) -> Incumbent:
    """Without an answer yet, and with all the time that it needs."""
    return Incumbent(problem, Record(problem, 1e9, gap, clock))


def ascended(problem: Problem, sweeps: int, gap: float = 0.0) -> tuple[Messages, Incumbent]:
    """What so many sweeps of dual ascent leave."""
    messages, incumbent = Messages(problem), incumbent_of(problem, gap=gap)
    ascend(messages, incumbent, sweeps)
    return messages, incumbent
