"""One thread at a time: dynamo, fake modes and the tracers patch torch while they run, for all threads of the process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

_TURN = threading.RLock()  # a property of the process, as what it guards

P = ParamSpec("P")
T = TypeVar("T")


def in_turn(function: Callable[P, T]) -> Callable[P, T]:
    """The function, which waits while another thread runs one like it; a thread may call one from another."""

    @wraps(function)
    def waiting(*args: P.args, **kwargs: P.kwargs) -> T:
        with _TURN:
            return function(*args, **kwargs)

    return waiting
