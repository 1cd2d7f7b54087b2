"""A frontier, memory against seconds, as a report reads it: JSON of format autoshard.frontier/1, keys that it does not know ignored."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from autoshard.reading import data_of

FORMAT = "autoshard.frontier/1"
MOST = 1e30  # of anything in a frontier: sums and margins of it are finite


def load_frontier(path: str) -> dict:
    """The file's content, checked; ValueError in one sentence where it is no frontier."""
    data = data_of(path, "frontier")
    frontier_points(data, path)
    return data


def frontier_points(data: Any, what: str = "the frontier") -> list[dict]:
    """Rows of memory_bytes, seconds, bound_seconds (None where there is none) and status; ValueError where it is no frontier."""
    if not isinstance(data, Mapping) or not isinstance(data.get("points"), (list, tuple)):
        raise ValueError(f"{what} holds no points; expected what `autoshard frontier --out` wrote, of format {FORMAT}")
    written = data.get("format")
    if not isinstance(written, str) or written != FORMAT:
        raise ValueError(f"{what} has format {str(written)[:40]!r}; expected {FORMAT}, so make it with `autoshard frontier`")
    rows = []
    for point in data["points"]:
        if not isinstance(point, Mapping):
            raise ValueError(f"{what} has a point {str(point)[:40]!r}; expected memory_bytes, seconds, bound_seconds and status")
        numbers = {key: _number(point.get(key), f"{what} has a point whose {key}") for key in ("memory_bytes", "seconds", "bound_seconds")}
        rows.append({**numbers, "status": str(point.get("status") or "")})
    return rows


def written_for(data: Mapping) -> str:
    """`models/gpt2.py:small on 2x4`, as far as the frontier says."""
    mesh = data.get("mesh")
    parts = [str(data["model"])] if data.get("model") else []
    parts += ["on " + "x".join(map(str, mesh))] if isinstance(mesh, (list, tuple)) and mesh else []
    return " ".join(parts)


def exact(value: float | None, units: tuple[tuple[float, str], ...] = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))) -> str:
    """Five digits: the points of a frontier differ by little."""
    if value is None or not math.isfinite(value):
        return "-"
    scale, unit = next((pair for pair in units if abs(value) >= pair[0]), units[-1])
    return f"{value / scale:.5g} {unit}"


def exact_size(value: float | None) -> str:
    return exact(value, ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B")))


def _number(value: Any, what: str) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{what} is {str(value)[:40]!r}; expected a number or null")
    if MOST < abs(value) < math.inf:
        raise ValueError(f"{what} is {str(value)[:40]}; expected seconds or bytes, {MOST:g} at most")
    return float(value) if math.isfinite(value) else None
