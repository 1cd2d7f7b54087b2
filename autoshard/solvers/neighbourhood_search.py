"""Large-neighbourhood search: every node but those of one neighbourhood keeps the incumbent's choice, and the rest is solved exactly.

A neighbourhood is a ball in the graph around a node that is drawn at random, with a weight that is the reduced cost of its choice in the
incumbent (how much more the incumbent pays there than the bound requires). Its size follows the success: it grows after a neighbourhood
that was solved in time.
"""

from collections import deque
from collections.abc import Callable

import numpy as np

from ..problem import Problem
from .dual_ascent import Messages
from .incumbent import Incumbent

FIRST_CELLS, LEAST_CELLS, MOST_CELLS = 20000, 2000, 200000  # table cells of a neighbourhood
GROWTH = 1.2
SHARE_OF_TIME = 0.1  # of what is left, for one neighbourhood


def improve(
    messages: Messages, incumbent: Incumbent, solve: Callable[[list[np.ndarray], float], bool], patience: float, seed: int = 0
) -> None:
    """Draw neighbourhoods until `patience` of them in a row had no better answer, or time is up.

    `solve(choices kept per node, seconds)` looks for a better answer and returns whether the time was enough.
    """
    futile = 0
    rng = np.random.default_rng(seed)
    problem, cells = incumbent.problem, float(FIRST_CELLS)
    neighbours: list[list[int]] = [[] for _ in problem.node_costs]
    for e in problem.edges:
        neighbours[e.a].append(e.b)
        neighbours[e.b].append(e.a)
    while not incumbent.done and incumbent.choice is not None and futile < patience:
        choice = np.array(incumbent.choice)
        affordable = messages.affordable(incumbent)
        regret = messages.reduced[messages.first[:-1] + choice]
        weight = regret + 1e-3 * regret.max() + 1e-300  # other nodes are drawn as well
        centre = int(rng.choice(len(choice), p=weight / weight.sum()))
        free = _ball(problem, neighbours, affordable, centre, cells)
        keep = []
        for v, allowed in enumerate(affordable):
            kept = allowed.copy() if v in free else np.zeros(len(allowed), bool)
            kept[choice[v]] = True
            keep.append(kept)
        before = incumbent.cost
        solved = solve(keep, SHARE_OF_TIME * incumbent.time_left())
        futile = 0 if incumbent.cost < before else futile + 1
        cells = min(cells * GROWTH, MOST_CELLS) if solved else max(cells / GROWTH**2, LEAST_CELLS)


def _ball(problem: Problem, neighbours: list[list[int]], affordable: list[np.ndarray], centre: int, cells: float) -> set[int]:
    """Nodes around the centre, nearest first, until the tables between them have `cells` cells."""
    free, queue, size = {centre}, deque([centre]), 0.0
    while queue:
        for n in neighbours[queue.popleft()]:
            if n not in free:
                size += affordable[n].sum() * sum(float(affordable[m].sum()) for m in neighbours[n] if m in free)
                if size > cells:
                    return free
                free.add(n)
                queue.append(n)
    return free
