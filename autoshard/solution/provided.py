"""Methods of plans whose work rooms below do: a plan can be extrapolated and drawn, but knows neither the planner nor the reports.

`autoshard.api` provides them when it is imported, which every function that makes a plan does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_PROVIDED: dict[str, Callable] = {}


def provide(name: str, function: Callable) -> None:
    _PROVIDED[name] = function


def provided(name: str) -> Callable[..., Any]:
    """The function of that name. ValueError where nobody has provided it."""
    if name not in _PROVIDED:
        raise ValueError(f"{name} is provided by autoshard.api; import autoshard.api first")
    return _PROVIDED[name]
