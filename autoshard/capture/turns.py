"""Captures run in one thread at a time, because dynamo, fake modes and the tracers patch torch for all threads of the process."""

import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch import nn

_TURN = threading.RLock()  # one per process, as the patches that it guards are
# Python's frames per level of nesting while dynamo or the tracers go through a module's call; one level of `copy.deepcopy` takes 6
FRAMES_PER_LEVEL, DEEPEST = 60, 500  # far below what the C stack of a main thread has room for

P = ParamSpec("P")
T = TypeVar("T")


def in_turn(function: Callable[P, T]) -> Callable[P, T]:
    """The function, which first waits while another thread runs a function of this kind; a thread may call one from another. It may call
    a module that is its first argument, however deep that is nested. Its modes are the usual ones."""

    @wraps(function)
    def waiting(*args: P.args, **kwargs: P.kwargs) -> T:
        first = args[0] if args else None
        with _TURN, no_warnings_about_torch(), usual_modes(), deep_enough(first if isinstance(first, nn.Module) else nn.Module()):
            return function(*args, **kwargs)

    return waiting


@contextmanager
def usual_modes() -> Iterator[None]:
    """Whatever the caller's default device is, and whether the caller wants gradients: plans are often made under meta and no_grad."""
    cpu = torch.device("cpu")  # not entered where it is the default: torch asks it about every call, a twentieth of a capture's time
    with nullcontext() if torch.get_default_device() == cpu else cpu, torch.inference_mode(False), torch.enable_grad():
        yield


@contextmanager
def no_warnings_about_torch() -> Iterator[None]:
    """Without FutureWarnings about torch's own calls of what it deprecates: its TreeSpecs warn where they are copied or unpickled."""
    with warnings.catch_warnings():
        for caller in (r"torch(\.|$)", "copyreg"):
            warnings.filterwarnings("ignore", category=FutureWarning, module=caller)
        yield


@contextmanager
def deep_enough(module: nn.Module) -> Iterator[None]:
    """Python's recursion limit raised by what a module of so many levels needs; beyond DEEPEST levels it is the caller's to raise."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(limit + FRAMES_PER_LEVEL * min(_levels(module), DEEPEST))
    try:
        yield
    finally:
        sys.setrecursionlimit(limit)


def _levels(module: nn.Module) -> int:
    levels, waiting, seen = 0, [module], {id(module)}
    while waiting:
        below = [part for item in waiting for part in item._modules.values() if part is not None and id(part) not in seen]
        seen.update(map(id, below))
        levels, waiting = levels + bool(below), below
    return levels
