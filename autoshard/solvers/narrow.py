"""Variable elimination over the choices that dual ascent leaves affordable: exact where memory plays no part and they are few.

The search for better answers comes first, among the choices within NEAR_SHARES of the gap from the bound: each better answer leaves fewer
choices affordable. Where the affordable ones are too many together, dual ascent is repeated on them, and then on two halves of them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from .answer import lowered
from .dual_ascent import Messages, ascend
from .elimination import ROUNDING, Elimination, eliminate, elimination
from .incumbent import Incumbent
from .restrict import cells_of, restrict

NEAR_SHARES = (0.001, 0.01, 0.03, 0.1, 0.3)  # of the gap
SWEEPS = 600  # of dual ascent
WORTH_REPEATING = 0.7  # of the cells: a smaller share is affordable
LARGEST_TABLE, ALL_TABLES = 10**7, 10**8  # cells: 80 MB; about a second
SWEPT, RESTRICTED = 100, 10**4  # cells worth of work: dual ascent per cell of the tables, a restriction per node and edge
ORDERED = 10**3  # the same: a step of finding an order of elimination


@dataclass
class Work:
    """The elimination that may still be tried, in cells of tables: it is counted, not timed, so that every machine does the same."""

    left: float

    def spend(self, cells: float) -> bool:
        """Count the work. Returns whether it may be done."""
        self.left -= cells
        return self.left >= 0


def narrow(messages: Messages, incumbent: Incumbent, work: Work, shares: Sequence[float] = NEAR_SHARES) -> bool:
    """Settle a problem without memory by elimination over the affordable choices. Returns whether it is settled or time is up."""
    problem = incumbent.problem
    for share in shares:
        if incumbent.done:
            return True
        if not work.spend(RESTRICTED * (len(problem.node_costs) + len(problem.edges))):
            return False
        near = restrict(problem, incumbent, messages.near(incumbent, share), complete=False)
        if near is not None and not _eliminate(near, elimination(near.problem), work):
            break
    return incumbent.done or _exhaust(messages, incumbent, work)


def _eliminate(incumbent: Incumbent, way: Elimination, work: Work) -> bool:
    """Offer the best answer of a problem without memory, and its bound; False where that is too much work."""
    if way.largest > LARGEST_TABLE or way.cells > ALL_TABLES or not work.spend(way.cells):
        return False
    solved = eliminate(incumbent.problem, LARGEST_TABLE, incumbent, way)
    if solved is None:
        return False
    choice, bound = solved
    incumbent.offer(choice)
    incumbent.raise_bound_below(lowered(bound, ROUNDING))
    return True


def _exhaust(messages: Messages, incumbent: Incumbent, work: Work) -> bool:
    """Prove that no answer is cheaper than the incumbent, for two halves of the affordable choices where they are too many together.

    Returns whether that succeeded.
    """
    problem = incumbent.problem
    if not work.spend(RESTRICTED * (len(problem.node_costs) + len(problem.edges))):
        return False
    part = restrict(problem, incumbent, messages.affordable(incumbent))
    if part is None:
        return True
    way, cells = elimination(part.problem), part.problem.cells
    if _eliminate(part, way, work):
        return True
    if not work.spend(SWEPT * cells):
        return False
    again = Messages(part.problem)
    ascend(again, part, SWEEPS)
    if part.done:
        return part.proven
    if cells_of(again.affordable(part), part.problem) < WORTH_REPEATING * cells:
        return _exhaust(again, part, work)
    if not work.spend(ORDERED * way.steps * len(way.widest)):  # as many orders are tried
        return False
    for half in _halves(part, again, way):
        first = Messages(half.problem)
        ascend(first, half, SWEEPS)
        if not _exhaust(first, half, work):
            return False
    if not part.proven:  # else a half may have ended there, within the gap and not at the best
        part.close()
    return True


def _halves(part: Incumbent, messages: Messages, way: Elimination) -> Iterator[Incumbent]:
    """The problem with the cheaper half of a node's choices, and with the more expensive half: the node is the one that makes it widest."""
    v = min(way.widest, key=lambda n: (elimination(part.problem, n).cells, n))
    reduced = np.split(messages.reduced, messages.first[1:-1])[v]
    for half in np.array_split(np.argsort(reduced, kind="stable"), 2):
        keep = [np.ones(len(c), bool) for c in part.problem.node_costs]
        keep[v] = np.isin(np.arange(len(reduced)), half)
        inner = restrict(part.problem, part, keep, complete=False)
        if inner is not None:
            yield inner
