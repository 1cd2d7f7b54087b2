"""Arguments of another kind than a public function expects, refused by name: the file's name where a plan belongs, a Mesh for a DeviceMesh.

    checked_kinds(function)     the function, that first compares its arguments with KINDS, by the names of its parameters
"""

import functools
import inspect
import os
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.export import ExportedProgram

from autoshard.solution import Plan, Solution

P = ParamSpec("P")
R = TypeVar("R")

GIVEN = "the graph that was planned"
A_PLAN = "a plan of one program, as autoshard.plan or autoshard.load returns it"
# by parameter: the types that are known, and how a sentence calls them; None is allowed where it is the default
KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "model": ((nn.Module,), "a torch.nn.Module"),
    "solution": ((Solution,), A_PLAN),
    "device_mesh": ((DeviceMesh,), "a DeviceMesh, as autoshard.device_mesh returns it"),
    "path": ((str, os.PathLike), "the name of a file"),
    "name": ((str,), "the name of a parameter, buffer, input, op or block"),
    "seed": ((int,), "a whole number"),
    "random": ((int,), "a whole number of 0 or more"),
}
ANY = ("parallelize", "device_mesh", "verify", "check")  # they take a plan of any kind
OWN: dict[tuple[str, str], tuple[tuple[type, ...], str]] = {
    **{(name, "solution"): ((Plan,), "a plan, of one program or several, or a pipeline") for name in ANY},
    **{(name, "model"): ((nn.Module, Mapping), "a torch.nn.Module, or one by each program's name") for name in ANY},
    **{(name, "model"): ((nn.Module, ExportedProgram), f"a torch.nn.Module, or {GIVEN}") for name in ("explain", "simulate")},
    ("check", "model"): ((nn.Module, ExportedProgram, Mapping), f"a torch.nn.Module, {GIVEN}, or one by each program's name"),
    ("parallelize", "schedule"): ((str, type), "the name of a schedule or of a file of its units"),
}


def checked_kinds(function: Callable[P, R]) -> Callable[P, R]:
    """The function, that raises ValueError on an argument of another kind than KINDS names."""
    parameters = inspect.signature(function).parameters
    kinds = {key: kind for key in parameters if (kind := OWN.get((function.__name__, key), KINDS.get(key))) is not None}

    @functools.wraps(function)
    def checked(*args: P.args, **options: P.kwargs) -> R:
        for key, value in {**dict(zip(parameters, args, strict=False)), **options}.items():
            if key in kinds and not isinstance(value, kinds[key][0]) and not (value is None and parameters[key].default is None):
                raise ValueError(f"{key} is {_described(value)}; expected {kinds[key][1]}")
        return function(*args, **options)

    return checked


def _described(value: Any) -> str:
    return f"{value!r:.80}" if isinstance(value, (str, int, float, type(None))) else f"a {type(value).__name__}"
