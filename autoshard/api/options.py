"""What a plan is made under, its clock, and the sentence where there is none."""

from __future__ import annotations

import difflib
import time
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from autoshard.cost import bytes_per_parameter

Progress = Callable[[str, float], None]  # (what is being done, fraction of the whole)


class Infeasible(ValueError):
    """No plan fits what was asked; the message says what would."""

    def __init__(self, message: str, smallest_limit: tuple[float, float] | None = None):
        super().__init__(message)
        self.smallest_limit = smallest_limit  # bytes per device: nothing fits below the first, something fits at the second


@dataclass(frozen=True)
class Options:
    """What a plan is made under, beside the model and the mesh."""

    training: bool = False
    optimizer: str | float = "adamw"  # or its bytes of state per parameter
    master_weights: bool = False  # a float32 copy of parameters that are kept in less
    memory_limit: float | None = None  # bytes per device
    pins: Mapping[str, str] = field(default_factory=dict)  # layout by parameter, buffer, input or op name
    solver: str = "auto"
    time_limit: float = 10000.0  # seconds, for the whole plan
    gap: float = 0.0  # relative
    baselines: bool = True
    skip_fully_replicated: bool = False
    recompute: int | str = 0  # repeated blocks to recompute in the backward pass: a number, "all" or "auto"
    tie_blocks: bool = False  # equal ops of repeated blocks share one decision; the bound stays that of the untied graph
    witness: bool = False  # check a capture of few layers against an eager run of all of them

    def __post_init__(self) -> None:
        if self.recompute not in ("all", "auto") and (isinstance(self.recompute, (bool, str)) or not self.recompute >= 0):
            raise ValueError(f"recompute is {self.recompute!r}; expected a number of blocks, 'all' or 'auto'")
        bytes_per_parameter(self.optimizer)
        if not (_is_number(self.time_limit) and self.time_limit > 0):
            raise ValueError(f"time_limit is {self.time_limit!r}; expected a number above 0, in seconds")
        if not (_is_number(self.gap) and self.gap >= 0):
            raise ValueError(f"gap is {self.gap!r}; expected a number of 0 or more")
        if not isinstance(self.pins, Mapping):
            raise ValueError(f"pins is a {type(self.pins).__name__}; expected a dict, for example {{'wte.weight': 'S(0),R'}}")
        if self.memory_limit is not None and not (_is_number(self.memory_limit) and self.memory_limit > 0):
            raise ValueError(f"memory_limit is {self.memory_limit!r}; expected a positive number of bytes per device, or None")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def checked_options(kind: type, given: Mapping[str, Any]) -> Any:
    """The options as a record; an unknown name is an error that says which one was meant."""
    known = list(kind.__dataclass_fields__)  # type: ignore[attr-defined]
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            raise ValueError(f"unknown option {name!r}" + (f"; did you mean {near[0]!r}?" if near else f"; known are {', '.join(known)}"))
    return kind(**given)


class Stopwatch:
    """CPU and wall seconds by phase, and the progress that the user sees."""

    def __init__(self, progress: Progress | None):
        self.progress = progress
        self.cpu: dict[str, float] = {}
        self.wall: dict[str, float] = {}
        self.began = time.monotonic()

    @contextmanager
    def phase(self, name: str, message: str, fraction: float):
        if self.progress:
            self.progress(message, fraction)
        cpu, wall = time.process_time(), time.monotonic()
        yield
        self.cpu[name] = self.cpu.get(name, 0.0) + time.process_time() - cpu
        self.wall[name] = self.wall.get(name, 0.0) + time.monotonic() - wall

    def seconds(self) -> dict[str, dict[str, float]]:
        return {"cpu": {**self.cpu, "total": sum(self.cpu.values())}, "wall": {**self.wall, "total": sum(self.wall.values())}}
