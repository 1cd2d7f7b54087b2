"""Gives Solution and Frontier the methods whose code is in packages that these classes can't import: extrapolation, notebook pages,
plots."""

from typing import Any

from autoshard.solution import provide


def extrapolate(*args: Any, **options: Any) -> Any:
    from autoshard.planning import extrapolate as extrapolated  # here, as below: who reads a plan needs no planner

    return extrapolated(*args, **options)


def notebook(*args: Any) -> str:
    from autoshard.report import html

    return html.notebook(*args)


def frontier_svg(record: dict[str, Any]) -> str:
    from autoshard.report import frontier  # matplotlib takes a second to import

    return frontier.svg(record)


def provide_methods() -> None:
    provide("extrapolate", extrapolate)
    provide("notebook", notebook)
    provide("frontier_svg", frontier_svg)
