"""The differences between two plans of the same model: seconds, bytes, layouts, and the assumptions behind them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autoshard.solution.interval import parts
from autoshard.solution.record import Solution

ALMOST = 1e-9  # relative: costs this close are equal


def changes(a: Solution, b: Solution) -> dict[str, Any]:
    """Pairs [a's, b's]; a layout, op or assumption that one of them lacks is None there.

    cost_seconds, bound_seconds, peak_bytes, mesh, status: always. parameters {name: pair}, results {name: pair}, assumptions
    {key: pair}, seconds {part: pair}: those that differ. ops {name: pair of output layouts}: the same for all other ops.
    same: no layout differs, and the costs are equal.
    """
    layouts = [{name: row.get("layout") for name, row in s.parameters.items()} for s in (a, b)]
    outputs = [{name: ", ".join(o or "-" for o in placed.outputs) for name, placed in s.layouts.items()} for s in (a, b)]
    pairs: dict[str, Any] = {
        "status": [a.verdict, b.verdict],
        "cost_seconds": [a.cost, b.cost],
        "bound_seconds": [a.bound, b.bound],
        "peak_bytes": [a.peak_bytes, b.peak_bytes],
        "mesh": ["x".join(map(str, s.mesh.shape)) for s in (a, b)],
        "parameters": _differing(*layouts),
        "ops": {name: pair for name, pair in _differing(*outputs).items() if name not in layouts[0] and name not in layouts[1]},
        "results": _differing(a.results, b.results),
        "assumptions": _differing(a.assumptions, b.assumptions),
        "seconds": _differing(*({row["what"]: row["seconds"] for row in parts(s.breakdown, {})} for s in (a, b))),
    }
    equal = a.cost == b.cost or abs(a.cost - b.cost) <= ALMOST * abs(a.cost)
    same_layouts = not (pairs["parameters"] or pairs["ops"] or pairs["results"]) and a.mesh.shape == b.mesh.shape
    return {"same": same_layouts and equal, **pairs}


def _differing(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, list]:
    names = dict.fromkeys([*a, *b])
    return {name: [a.get(name), b.get(name)] for name in names if a.get(name) != b.get(name)}
