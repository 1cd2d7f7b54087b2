"""The answer of a solver: a choice per node, its cost, what is proven about it, and where the time went."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

TOLERANCE = 1e-9  # relative; sums of the same numbers in another order differ by up to 3e-14 on real problems


class Status(StrEnum):
    """What is known about an answer; `advice` tells the user what to do."""

    OPTIMAL = "optimal"
    FEASIBLE = "feasible"
    INFEASIBLE = "infeasible"
    UNKNOWN = "unknown"

    @property
    def advice(self) -> str:
        return _ADVICE[self]


_ADVICE = {
    Status.OPTIMAL: "the best answer there is (within the gap asked for); nothing more to gain",
    Status.FEASIBLE: "the best answer found in the time given, not proven best; a longer time limit may improve it",
    Status.INFEASIBLE: "no answer exists; raise the memory limit, or allow more choices",
    Status.UNKNOWN: "nothing was found in the time given; raise the time limit or the memory limit",
}


@dataclass(frozen=True)
class Infeasibility:
    """Why no answer fits: a time at which even the smallest choices exceed the limit, and the nodes that hold the bytes then."""

    time: int | None  # None where the costs alone forbid every answer
    nodes: tuple[tuple[int, float], ...]  # (node, bytes it holds at least), largest first
    smallest_limit: tuple[float, float]  # bytes: no answer fits below the first, one fits at the second


@dataclass(frozen=True)
class Answer:
    """A judged answer: `cost` is evaluate's, and no answer costs less than `bound`."""

    status: Status
    choice: tuple[int, ...] | None
    cost: float  # seconds; inf without a choice
    bound: float  # seconds; inf where infeasible
    solver: str
    seconds: dict[str, float] = field(default_factory=dict)  # reduce, solve, total
    reduced: dict[str, int] = field(default_factory=dict)  # nodes, edges, cells that were left to search
    peak: float | None = None  # bytes
    infeasibility: Infeasibility | None = None
    interrupted: bool = False  # by Ctrl-C, before the time was up
    fitting: Mapping[tuple[int, ...], float] = field(default_factory=dict)  # other answers that a search over prices met, with their costs
    prices: Mapping[int, float] | None = None  # seconds per byte, by time, of the best bound of a search over prices (`solve`)

    def in_passing(self) -> "Answer":
        """The answer, if it is one of many steps of a larger search, which Ctrl-C ends as well. KeyboardInterrupt."""
        if self.interrupted:
            raise KeyboardInterrupt
        return self

    @property
    def gap(self) -> float:
        """How far the cost may be above the optimum, relative; 0 where it is proven optimal, inf where nothing is known."""
        return relative_gap(self.cost, self.bound)


def lowered(bound: float, tolerance: float = TOLERANCE) -> float:
    """A bound, lowered by the relative tolerance to which a solver proves, or to which it rounds."""
    return bound - tolerance * abs(bound) if math.isfinite(bound) else bound


def relative_gap(cost: float, bound: float) -> float:
    """(cost - bound) / |cost|; 0 where they are equal, inf where one of them is unknown."""
    if cost == bound:
        return 0.0
    return (cost - bound) / abs(cost) if cost and math.isfinite(cost) and math.isfinite(bound) else math.inf
