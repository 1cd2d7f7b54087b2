"""The options of planning, the clock that limits it, and the exception that it raises where no plan fits."""

from __future__ import annotations

import difflib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import asdict, dataclass, field
from typing import Any

from torch.distributed.tensor.placement_types import Placement

from autoshard.cost import bytes_per_parameter
from autoshard.layout import text
from autoshard.precision import Precision

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


OBJECTIVES = ("serial", "overlapped")
SWITCHES = ("training", "master_weights", "price_pins", "baselines", "skip_fully_replicated", "tie_blocks", "witness")
TIME_LIMIT = 10000.0  # seconds for the proof, where no limit is set; refusal.PATIENCE limits the search for a first plan


@dataclass(frozen=True)
class Options:
    """Everything that a plan depends on beside the model and the mesh."""

    training: bool = False
    optimizer: str | float = "adamw"  # or its bytes of state per parameter
    precision: Precision | None = None  # dtypes to compute and to reduce gradients in; also as text, "bf16"
    master_weights: bool = False  # count the float32 copies that your optimizer holds of parameters of smaller dtypes; no plan makes them
    memory_limit: float | None = None  # bytes per device
    pins: Mapping[str, str] = field(default_factory=dict)  # layout by parameter, buffer, input or op name, or by a glob of names
    keep: Mapping[str, str] = field(default_factory=dict)  # layouts of an older plan by name; pins go first
    forbid: Mapping[str, str | Sequence[str]] = field(default_factory=dict)  # layouts that a tensor must not have, by name or glob
    price_pins: bool = False  # work out what each pin and each forbidden layout costs
    solver: str = "auto"
    time_limit: float = TIME_LIMIT  # seconds, for the whole plan
    gap: float = 0.0  # relative
    accepted: tuple[float, float] = (0.0, math.inf)  # (relative gap, seconds): after so many seconds a plan within that gap is enough
    baselines: bool = True
    skip_fully_replicated: bool = False
    recompute: int | str = 0  # blocks to recompute in the backward: a number, "all", "blocks" (as many as pay); "auto": per tensor
    tie_blocks: bool = False  # equal ops of repeated blocks share one decision; the bound stays that of the untied graph
    microbatches: int = 1  # of which a training step consists; the example inputs are those of one
    global_batch: int | None = None  # examples of a step: instead of `microbatches`, so many times the batch of the example inputs
    accumulation_dtype: str | None = None  # of the sums of gradients over microbatches; by default that of the gradients
    sequence_order: str = "auto"  # of long causal attention: natural, head_tail (balanced over shards of the sequence), or the better
    chunked_loss: str = "auto"  # logits of a cross entropy for some tokens at a time: always, never, or where all don't fit
    expert_imbalance: float | None = None  # tokens of the busiest rank's experts as a multiple of its share; by default the mesh's, 1
    objective: str = "serial"  # seconds of all tasks one after the other; "overlapped": of their simulated time line
    witness: bool = False  # check a capture of few layers against an eager run of all of them

    def __post_init__(self) -> None:
        for name in SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} is {getattr(self, name)!r}; expected True or False")
        is_number = isinstance(self.recompute, int) and not isinstance(self.recompute, bool) and self.recompute >= 0
        if self.recompute not in ("all", "blocks", "auto") and not is_number:
            raise ValueError(f"recompute is {self.recompute!r}; expected a number of blocks, 'all', 'blocks' or 'auto'")
        bytes_per_parameter(self.optimizer)
        object.__setattr__(self, "precision", Precision.of(self.precision))
        if not (_is_number(self.time_limit) and self.time_limit > 0):
            raise ValueError(f"time_limit is {self.time_limit!r}; expected a number above 0, in seconds")
        if not (_is_number(self.gap) and 0 <= self.gap < math.inf):
            raise ValueError(f"gap is {self.gap!r}; expected a number of 0 or more")
        if not isinstance(self.solver, str):
            raise ValueError(f"solver is {self.solver!r}; expected the name of a solver, for example 'auto'")
        if self.sequence_order not in ("auto", "natural", "head_tail"):
            raise ValueError(f"sequence_order is {self.sequence_order!r}; expected auto, natural or head_tail")
        if self.chunked_loss not in ("auto", "always", "never"):
            raise ValueError(f"chunked_loss is {self.chunked_loss!r}; expected auto, always or never")
        self._check_microbatches()
        if self.objective not in OBJECTIVES:
            raise ValueError(f"objective is {self.objective!r}; expected one of {', '.join(OBJECTIVES)}")
        pair = isinstance(self.accepted, (list, tuple)) and len(self.accepted) == 2
        if not (pair and all(_is_number(x) and x >= 0 for x in self.accepted)):
            raise ValueError(f"accepted is {self.accepted!r}; expected a relative gap and seconds, for example (0.01, 60)")
        for name in ("pins", "keep", "forbid"):
            if not isinstance(layouts := getattr(self, name), Mapping):
                raise ValueError(f"{name} is a {type(layouts).__name__}; expected a dict, for example {{'wte.weight': 'S(0),R'}}")
            if wrong := [key for key in layouts if not isinstance(key, str)]:
                raise ValueError(f"{name} names {wrong[0]!r}; expected the name of a tensor, or a glob of names, as text")
            object.__setattr__(self, name, {key: _written(value) for key, value in layouts.items()})
        object.__setattr__(self, "forbid", {key: _listed(value) for key, value in self.forbid.items()})
        if self.memory_limit is not None and not (_is_number(self.memory_limit) and self.memory_limit > 0):
            raise ValueError(f"memory_limit is {self.memory_limit!r}; expected a positive number of bytes per device, or None")

    def _check_microbatches(self) -> None:
        for name, value in (("microbatches", self.microbatches), ("global_batch", self.global_batch)):
            is_count = isinstance(value, int) and not isinstance(value, bool) and value > 0
            if not is_count and not (name == "global_batch" and value is None):
                raise ValueError(f"{name} is {value!r}; expected a whole number of 1 or more")
        if self.accumulation_dtype not in (None, "float32", "bfloat16", "float16", "float64"):
            raise ValueError(f"accumulation_dtype is {self.accumulation_dtype!r}; expected float32, bfloat16, float16 or float64")

    def noted(self) -> dict[str, Any]:
        """The options as a plan notes them; newer ones only where they are used: plans from before them read as equal."""
        noted = asdict(self) | {"precision": None if self.precision is None else str(self.precision)}
        newer: dict[str, Any] = {"keep": {}, "forbid": {}, "precision": None, "microbatches": 1, "accumulation_dtype": None}
        newer |= {"expert_imbalance": None, "objective": "serial"}
        hidden = ("price_pins", "global_batch", "sequence_order", "chunked_loss")  # noted: the number of microbatches, what was chosen
        return {key: value for key, value in noted.items() if key not in hidden and (key not in newer or value != newer[key])}


def _written(layout: Any) -> Any:
    """A layout as text, whether it is text or placements; anything else unchanged, to be refused where it is read."""
    return text(layout) if isinstance(layout, tuple) and layout and all(isinstance(p, Placement) for p in layout) else layout


def _listed(layouts: Any) -> tuple:
    return tuple(map(_written, layouts)) if isinstance(layouts, (list, tuple)) else (layouts,)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def checked_options(kind: type, options: Mapping[str, Any]) -> Any:
    """The options as a record; an unknown name is an error that says which one was meant."""
    known = list(kind.__dataclass_fields__)  # type: ignore[attr-defined]
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            raise ValueError(f"unknown option {name!r}" + (f"; did you mean {near[0]!r}?" if near else f"; known are {', '.join(known)}"))
    return kind(**options)


class Stopwatch:
    """CPU and wall seconds by phase, the progress that the user sees, and the clock that limits the search."""

    def __init__(self, progress: Progress | None, now: Callable[[], float] = time.monotonic):
        self.progress, self.now = progress, now
        self.cpu: dict[str, float] = {}
        self.wall: dict[str, float] = {}
        self.began = now()

    @property
    def elapsed(self) -> float:
        """Seconds since it was started."""
        return self.now() - self.began

    def say(self, message: str, fraction: float) -> None:
        """Tell the user what is being done, and which fraction of the whole is done."""
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
