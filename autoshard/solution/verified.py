"""The fact that a plan was verified: with what and where, and of which layouts. Files keep it among the assumptions."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from autoshard.solution.files import VERIFIED


@dataclass(frozen=True)
class Verified:
    """What `verify` found to be right: the plan on simulated ranks against the unsharded model."""

    ranks: int
    device: str  # on which all ranks ran: "cpu", "cuda"
    torch: str  # its version
    inputs: Mapping[str, Any]  # the global shapes of the example inputs, by name
    largest_error: float  # of outputs and gradients, relative
    layouts: str  # the hash of the layouts that ran


def marking(report: Mapping[str, Any], layouts: Any) -> dict[str, Any]:
    """The fact as an assumption. report: of `verify`; layouts: of the plan, in JSON's types. ValueError where the
    report says no."""
    if not report.get("ok"):
        raise ValueError("the plan can't be marked as verified: the report says that it does not compute what the model computes")
    rows = report.get("plans", [report])
    error = max(float(row[f"max_relative_error_{of}"]) for row in rows for of in ("outputs", "gradients"))
    fact = Verified(report["ranks"], report["device"], report["torch"], report["inputs"], error, _hash(layouts))
    return {VERIFIED: asdict(fact)}


def verified_of(assumptions: Mapping[str, Any], layouts: Any) -> Verified | None:
    """The fact that these assumptions hold; None without one, where it is of other layouts, or where the file has something else there."""
    held = assumptions.get(VERIFIED)
    if not isinstance(held, Mapping) or set(held) != set(Verified.__dataclass_fields__) or held["layouts"] != _hash(layouts):
        return None
    return Verified(**held)


def _hash(layouts: Any) -> str:
    return hashlib.sha256(json.dumps(layouts, sort_keys=True).encode()).hexdigest()[:16]
