"""Methods of a plan that other packages implement: a plan can be extrapolated and drawn, but imports neither the planner nor the reports.

`autoshard.api` registers them when it is imported, and every function that creates a plan imports it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_PROVIDED: dict[str, Callable] = {}


def provide(name: str, function: Callable) -> None:
    _PROVIDED[name] = function


def provided(name: str) -> Callable[..., Any]:
    """The function of that name. ValueError where none is registered."""
    if name not in _PROVIDED:
        raise ValueError(f"{name} is provided by autoshard.api; import autoshard.api first")
    return _PROVIDED[name]
