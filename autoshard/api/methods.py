"""Gives Solution and Frontier the methods whose code is in packages that these classes can't import: extrapolation, notebook pages,
plots."""

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
