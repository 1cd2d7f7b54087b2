"""The records that `explain` returns about one tensor, op or block of a plan, and their plain form for JSON.

Costs are in seconds and sizes in bytes per device. The cost of what is impossible is inf in a record and None in its plain form.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from autoshard.explain.differences import CostDifference, CostTerm
from autoshard.solution import plain

# fields: keys
SECONDS = {"planned_cost": "planned_seconds"} | {name: f"{name}_seconds" for name in ("cost", "best", "bound", "extra", "local_extra")}


@dataclass(frozen=True)
class Alternative:
    """Another layout of what was asked about. Costs are those of the entire plan, in seconds; inf where there is no such plan."""

    label: str  # a layout; of a block also a scheme
    pins: Mapping[str, str]  # the pins with which `plan` finds it; empty for a scheme, which pins candidates instead
    reason: str  # why it is impossible, or why that is unknown; "" where it is possible
    cost: float = math.inf  # with all other layouts planned anew
    bound: float = math.inf  # no plan with this layout costs less
    proven: bool = True
    extra: float = math.inf  # cost - that of the plan
    peak_bytes: float = math.inf
    step_seconds: float | None = None  # of its time line, which the plan of another search may shorten; of an overlapped plan
    local_extra: float = math.inf  # with all other layouts as planned
    local_reason: str = ""  # why that is impossible; "" where it is possible
    dearer: tuple[CostDifference, ...] = ()  # the ops and edges that cost more then, the largest increase first; at most 10
    dearer_seconds: float = 0.0  # all of it together
    cheaper: tuple[CostDifference, ...] = ()
    cheaper_seconds: float = 0.0  # negative
    local_dearer: tuple[CostDifference, ...] = ()
    changed: Mapping[str, tuple[str, str]] = field(default_factory=dict)  # other parameters, buffers, inputs: before, after
    changed_ops: tuple[str, ...] = ()  # the other ops whose layouts change

    def to_dict(self) -> dict:
        """Plain containers; None in place of inf."""
        rows = {name: [one.to_dict() for one in getattr(self, name)] for name in ("dearer", "cheaper", "local_dearer")}
        return plain({SECONDS.get(key, key): value for key, value in {**vars(self), **rows}.items()}, "alternative")


@dataclass(frozen=True)
class Explanation:
    """The layout of one tensor, op or block in a plan, what it costs, and what other layouts cost. Seconds, and bytes per device."""

    name: str
    kind: str  # parameter, buffer, input, tangent, op or block
    module: str
    target: str  # the operator; of a block nothing
    shape: tuple[int, ...] | None
    dtype: str
    layout: str  # of the first output; of a block nothing
    parameters: Mapping[str, str]  # of a block: their layouts
    seconds: float  # of the choice itself: compute and collectives inside ops, the optimizer's step
    edge_seconds: float  # of all edges that touch it
    parts: tuple[CostTerm, ...]  # its ops, the most expensive first; of a block those that cost something
    edges: tuple[CostTerm, ...]  # those that touch it, the most expensive first; of a block those that cost something
    bytes: Mapping[str, float]  # at the time when they are largest, by kind
    cost: float  # of the plan at today's prices
    planned_cost: float  # as the plan says
    step_seconds: float | None  # of the plan's time line, where that was its objective
    status: str  # of the plan, as it says
    peak_bytes: float
    memory_limit: float | None
    alternatives: tuple[Alternative, ...]  # cheapest first
    left_out: Mapping[str, float]  # the layouts that were not solved, and a lower bound on the cost of each
    why_not: Alternative | None
    cpu_seconds: Mapping[str, float]  # capture, formulate, solve, total

    def to_dict(self) -> dict:
        """Plain containers; None in place of inf."""
        rows: dict = {name: [one.to_dict() for one in getattr(self, name)] for name in ("parts", "edges", "alternatives")}
        rows["why_not"] = self.why_not and self.why_not.to_dict()
        return plain({SECONDS.get(key, key): value for key, value in {**vars(self), **rows}.items()}, "explanation")
