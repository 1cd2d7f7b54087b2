"""A plan as one flat record for scripts, which `plan --json` and `show --json` print."""

from __future__ import annotations

import math

from autoshard.report.proof import proof
from autoshard.solution import Solution


def summary(solution: Solution) -> dict:
    """Plain data; None where a number isn't known. Cost, bound and gap are of tasks one after the other; `status` is of the objective, and
    `overlapped` has its own seconds, bound and gap."""
    counts = {key: solution.counts.get(key) for key in ("nodes", "choices", "edges", "distinct_signatures")}
    return {
        "status": solution.status,
        "objective": solution.objective,
        "proof": proof(solution),
        "cost_seconds": _finite(solution.cost),
        "bound_seconds": _finite(solution.bound),
        "interval_seconds": None if solution.interval is None else list(solution.interval),
        "gap": _finite(solution.gap),
        "overlapped": {**solution.overlapped, "gap": solution.objective_gap} if solution.overlapped else None,
        "solver": solution.solver,
        "peak_bytes": _finite(solution.peak_bytes),
        "peak": solution.peak,
        "training": solution.training,
        "microbatches": solution.microbatches,
        "mesh": {"shape": list(solution.mesh.shape), **solution.mesh.to_dict()},
        **counts,
        "baselines": solution.baselines,
        "replicated_ops": list(solution.replicated_ops),
        "parameters": {name: row["layout"] for name, row in solution.parameters.items()},
        "fingerprint": solution.fingerprint,
        "prices": solution.prices,
        "assumptions": solution.assumptions,
        "cpu_seconds": solution.seconds.get("cpu", {}),
        "wall_seconds": solution.seconds.get("wall", {}),
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
