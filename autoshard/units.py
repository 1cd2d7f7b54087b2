"""SI numbers as text for people: 1.23 ms, 4.5 GB, 300 GB/s."""

from __future__ import annotations

import math

_TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))
_SIZES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))


def seconds(value: float | None) -> str:
    return _scaled(value, _TIMES)


def size(value: float | None) -> str:
    return _scaled(value, _SIZES)


def _scaled(value: float | None, units: tuple[tuple[float, str], ...]) -> str:
    if value is None or not math.isfinite(value):
        return "-"
    if value == 0:
        return "0"
    scale, unit = next((unit for unit in units if abs(value) >= unit[0] * 0.9995), units[-1])  # 0.9996 ms is printed as 1 ms
    return f"{_three(value / scale)} {unit}"


def _three(value: float) -> str:
    """Three significant digits; no decimals above 100, no exponent below a million."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def percent(part: float, total: float) -> str:
    return f"{100 * part / total:.0f}%" if total else "-"
