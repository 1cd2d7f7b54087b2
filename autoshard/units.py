"""SI numbers as text for people: 1.23 ms, 4.5 GB, 300 GB/s."""

import math

_TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))
_SIZES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))


def seconds(value: float | None, digits: int = 3) -> str:
    return _scaled(value, _TIMES, digits)


def size(value: float | None, digits: int = 3) -> str:
    return _scaled(value, _SIZES, digits)


def _scaled(value: float | None, units: tuple[tuple[float, str], ...], digits: int) -> str:
    """Significant digits; no decimals above 100 where they are three, no exponent below a million."""
    if value is None or not math.isfinite(value):
        return "-"
    if value == 0:
        return "0"
    scale, unit = next((unit for unit in units if abs(value) >= unit[0] * 0.9995), units[-1])  # 0.9996 ms is printed as 1 ms
    scaled = value / scale
    return f"{scaled:.0f} {unit}" if digits == 3 and abs(scaled) >= 100 else f"{scaled:.{digits}g} {unit}"


def hundredths(share: float, sign: str = "") -> str:
    """The number before "%": two digits, or all of a whole number from 100 on. sign: "+" to write that, too."""
    return f"{100 * share:{sign}.2g}" if abs(share) < 0.995 else f"{100 * share:{sign}.0f}"


def percent(part: float, total: float) -> str:
    return f"{100 * part / total:.0f}%" if total else "-"
