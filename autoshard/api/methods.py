"""Methods of Solution and Frontier whose code is in rooms below theirs (extrapolation, notebook pages, plots) get their functions here."""

from __future__ import annotations

from typing import Any

from autoshard.planning.extrapolate import extrapolate
from autoshard.report import html
from autoshard.solution.provided import provide


def frontier_svg(record: dict[str, Any]) -> str:
    from autoshard.report.frontier import svg  # here: matplotlib takes a second to import

    return svg(record)


def provide_methods() -> None:
    provide("extrapolate", extrapolate)
    provide("notebook", html.notebook)
    provide("frontier_svg", frontier_svg)
