"""A redistribution route, the record of `BlockRoute.to_dict`, as a table."""

from collections.abc import Mapping, Sequence

from rich.console import RenderableType

from autoshard.units import seconds, size

from .terminal import shown
from .values import ReportTable, numbers

COLUMNS = ("Step #", "Operation", "Distribution", "Cost [s]", "Memory Usage [MB]")
RAISE = {"infeasible": ": no route within the memory limit, raise it"}  # advice after a status


def rows(route: Mapping) -> list[tuple[str, str, str, str, str]]:
    """The rows of the published table: the source, then each step with the layout after it."""
    steps = [("0", "", route["source"], "", _megabytes(route["source_bytes"]))]
    for i, step in enumerate(route["steps"], start=1):
        steps.append((str(i), operation(step), step["layout"], f"{step['seconds']:.6g}", _megabytes(step["held_bytes"])))
    return steps


def operation(step: Mapping) -> str:
    """`all_to_all(axes 0,1: dims 0 -> 2)`, the words of a step."""
    axes, dims = (",".join(map(str, step[key])) for key in ("axes", "dims"))
    arrow = dims.replace(",", " -> ") if step["collective"] == "all_to_all" else dims
    return f"{step['collective']}(axes {axes}{f': dims {arrow}' if dims else ''})"


def _megabytes(value: float) -> str:
    return f"{value / 1e6:.6g}"


def route_table(routes: Sequence[Mapping]) -> RenderableType:
    """One table per route."""
    parts: list[ReportTable | str] = []
    for route in routes:
        title = (
            f"{route['id'] or 'route'}: {route['status']}{RAISE.get(route['status'], '')}, {seconds(route['cost_seconds'])}, "
            f"peak {size(route['peak_bytes'])} ({route['counted']}), run by {route['executable_by']}, {route['explored']} states"
        )
        parts += [title, ReportTable("", (*COLUMNS[:3], *numbers(*COLUMNS[3:])), rows(route), "open"), ""]
    return shown(*parts[:-1])
