"""Captures run in one thread at a time, because dynamo, fake modes and the tracers patch torch for all threads of the process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

_TURN = threading.RLock()  # one per process, as the patches that it guards are

P = ParamSpec("P")
T = TypeVar("T")


def in_turn(function: Callable[P, T]) -> Callable[P, T]:
    """The function, which first waits while another thread runs a function of this kind; a thread may call one from another."""

    @wraps(function)
    def waiting(*args: P.args, **kwargs: P.kwargs) -> T:
        with _TURN:
            return function(*args, **kwargs)

    return waiting
