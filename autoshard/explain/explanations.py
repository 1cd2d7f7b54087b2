"""What there is to say about one thing in a plan: the records that `explain` gives, and their plain form.

Costs are in seconds and sizes in bytes per device; what can't be is inf in a record, None in its plain form.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from autoshard.explain.differences import Moved, Priced
from autoshard.solution.record import plain


@dataclass(frozen=True)
class Alternative:
    """One other way to lay the subject out. Costs are those of the whole plan, in seconds; inf where there is none."""

    label: str  # a layout; of a block also a scheme
    pins: Mapping[str, str]  # what `plan` would have to be told for it; of a scheme nothing: its pins are of candidates
    reason: str  # why it can't be, or why nobody knows; "" where it can
    cost: float  # with everything else laid out anew
    bound: float  # no such plan costs less
    proven: bool
    extra: float  # cost - that of the plan
    peak_bytes: float
    local_extra: float  # with everything else as planned
    local_reason: str  # why that can't be; "" where it can
    dearer: tuple[Moved, ...]  # the most of what costs more then, dearest first
    dearer_seconds: float  # all of it together
    cheaper: tuple[Moved, ...]
    cheaper_seconds: float  # negative
    local_dearer: tuple[Moved, ...]
    changed: Mapping[str, tuple[str, str]]  # parameters, buffers and inputs elsewhere that lie otherwise then: before, after
    changed_ops: tuple[str, ...]  # the other ops elsewhere that do

    def to_dict(self) -> dict:
        """Plain containers; None in place of inf."""
        sums = {f"{name}_seconds": getattr(self, name) for name in ("cost", "bound", "extra", "local_extra")}
        rows = {name: [_row(one) for one in getattr(self, name)] for name in ("dearer", "cheaper", "local_dearer")}
        kept = {
            name: getattr(self, name)
            for name in ("label", "pins", "reason", "proven", "peak_bytes", "local_reason", "dearer_seconds", "cheaper_seconds")
        }
        return plain({**kept, **sums, **rows, "changed": self.changed, "changed_ops": self.changed_ops}, "alternative")


def _row(one: Moved) -> dict:
    ends = {side: {key: value for key, value in asdict(item).items() if key not in _SHARED} for side, item in vars(one).items()}
    return {**{key: getattr(one.before, key) for key in _SHARED}, **ends, "extra_seconds": one.extra_seconds}


_SHARED = ("kind", "name", "module")


@dataclass(frozen=True)
class Explanation:
    """Where one thing lies in a plan, and what it costs there and elsewhere. Seconds, and bytes per device."""

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
    parts: tuple[Priced, ...]  # its ops, dearest first; of a block those that cost something
    edges: tuple[Priced, ...]  # those that touch it, dearest first; of a block the same
    bytes: Mapping[str, float]  # when it holds most, by what they are
    cost: float  # of the plan at today's prices
    planned_cost: float  # as the plan says
    status: str  # of the plan, as it says
    peak_bytes: float
    memory_limit: float | None
    alternatives: tuple[Alternative, ...]  # cheapest first
    left_out: Mapping[str, float]  # the others, and what they cost at least
    why_not: Alternative | None
    cpu_seconds: Mapping[str, float]  # capture, formulate, solve, total

    def to_dict(self) -> dict:
        """Plain containers; None in place of inf."""
        data = {key: value for key, value in vars(self).items() if key not in ("alternatives", "why_not", "cost", "planned_cost")}
        data |= {"parts": [asdict(part) for part in self.parts], "edges": [asdict(edge) for edge in self.edges]}
        about = {"name": data.pop("name"), "cost_seconds": self.cost, "planned_seconds": self.planned_cost, **data}
        others = {"alternatives": [one.to_dict() for one in self.alternatives], "why_not": self.why_not and self.why_not.to_dict()}
        return plain({**about, **others}, "explanation")
