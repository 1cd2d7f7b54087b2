"""The clock that limits planning, and the exception that it raises where no plan fits."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import asdict, dataclass
from typing import Any

from torch.distributed.tensor.placement_types import Placement

from autoshard import options as declared
from autoshard.layout import text
from autoshard.options import Options as Options

Progress = Callable[[str, float], None]  # (what is being done, fraction of the whole)


@dataclass(frozen=True)
class Demand:
    """One thing that was asked of a plan and can be given up by itself."""

    kind: str  # pin, keep, forbid; or the option's name: memory_limit, recompute, tie_blocks, skip_fully_replicated, algo
    name: str | None = None  # of pin, keep and forbid: the tensor, or the glob
    value: str | float | bool = True  # a layout, bytes, a number of blocks

    def __str__(self) -> str:
        if self.kind == "memory_limit":
            return f"memory_limit {bytes_text(float(self.value))}"
        if self.name is not None:
            return f"{self.kind} {self.name}={self.value}"
        return self.kind if self.value is True else f"{self.kind}={self.value}"

    def to_dict(self) -> dict[str, Any]:
        """kind, name, value; and `text`, the same as one reads it."""
        return {**asdict(self), "text": str(self)}


class Infeasible(ValueError):
    """No plan fits what was asked; the message says what would."""

    status = "infeasible"

    def __init__(
        self,
        message: str,
        smallest_limit: tuple[float, float] | None = None,
        conflict: Sequence[Demand] = (),
        minimal: bool = True,
    ):
        super().__init__(message)
        self.smallest_limit = smallest_limit  # bytes per device: nothing fits below the first, something fits at the second
        self.conflict = tuple(conflict)  # demands that no plan meets together; without any one of them there is a plan, if `minimal`
        self.minimal = minimal  # False where time ran out before that was known of each

    def to_dict(self) -> dict[str, Any]:
        """What `plan --json` prints."""
        limit = None if self.smallest_limit is None else list(self.smallest_limit)
        conflict = [demand.to_dict() for demand in self.conflict]
        return {
            "status": self.status, "message": str(self), "conflict": conflict, "minimal": self.minimal, "smallest_limit_bytes": limit,
        }  # fmt: skip


class NoAnswer(Infeasible):
    """The time ran out before a plan was found, or a proof that there is none. Caught as `Infeasible` is: there is no plan to use."""

    status = "no answer"


def bytes_text(size: float, *, up: bool = False) -> str:
    """Bytes as text, to a thousandth of the unit; `up`: rounded up."""
    unit, name = (1e9, "GB") if size >= 1e8 else (1e6, "MB") if size >= 1e5 else (1e3, "kB")
    return f"{math.ceil(size / unit * 1e3) / 1e3 if up else size / unit:.3f} {name}"


def checked_options(kind: Callable[..., Any], options: Mapping[str, Any], known: tuple[str, ...] = ()) -> Any:
    """The options as a record, layouts of placements as text; an unknown name is an error that says which one was meant."""
    read = {name: _written(value) if name in OF_LAYOUTS else value for name, value in options.items()}
    return declared.checked_options(kind, read, known)


OF_LAYOUTS = tuple(name for name, option in declared.options_of(Options).items() if option.kind in (declared.LAYOUTS, declared.FORBIDDEN))


def _written(value: Any) -> Any:
    """With a text in the place of each tuple of placements; anything else unchanged, to be refused where it is read."""
    if isinstance(value, Mapping):
        return {key: _written(one) for key, one in value.items()}
    if isinstance(value, tuple) and value and all(isinstance(one, Placement) for one in value):
        return text(value)
    return type(value)(map(_written, value)) if type(value) in (list, tuple) else value


class Stopwatch:
    """CPU and wall seconds by phase, the progress that the user sees, and the clock that limits the search."""

    def __init__(self, progress: Progress | None, now: Callable[[], float] = time.monotonic):
        self.progress, self.now = progress, now
        self.cpu: dict[str, float] = {}
        self.wall: dict[str, float] = {}
        self.began, self.latest = now(), 0.0

    @property
    def elapsed(self) -> float:
        """Seconds since it was started."""
        return self.now() - self.began

    def is_past(self, limit: float) -> bool:
        """Whether so many seconds have passed; where they had before, without another look at the clock."""
        if self.latest < limit:
            self.latest = self.elapsed
        return self.latest >= limit

    def say(self, message: str, fraction: float) -> None:
        """Tell the user what is being done, and which fraction of the whole is done."""
        assert 0 <= fraction < 1, (message, fraction)
        if self.progress is not None:
            self.progress(message, fraction)

    def quiet(self) -> Stopwatch:
        """The same clock without progress."""
        clock = copy(self)
        clock.progress = None
        return clock

    @contextmanager
    def phase(self, name: str, message: str, fraction: float):
        self.say(message, fraction)
        cpu, wall = time.process_time(), time.monotonic()
        yield
        self.cpu[name] = self.cpu.get(name, 0.0) + time.process_time() - cpu
        self.wall[name] = self.wall.get(name, 0.0) + time.monotonic() - wall

    def seconds(self) -> dict[str, dict[str, float]]:
        return {"cpu": {**self.cpu, "total": sum(self.cpu.values())}, "wall": {**self.wall, "total": sum(self.wall.values())}}
