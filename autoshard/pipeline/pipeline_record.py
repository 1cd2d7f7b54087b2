"""A pipeline plan as plain data: stages with their devices and layouts, the schedule, seconds, bytes and the bound."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field
from typing import Any

from autoshard.solution import Placed
from autoshard.solution.files import write


@dataclass(frozen=True)
class PipelineStage:
    """Layers first ... last - 1 of the model on some devices."""

    first: int
    last: int
    group: int  # device group: stages of one group share its devices (interleaved schedules)
    devices: tuple[int, ...]  # ranks: nodes in order, devices of a node in order
    device: str
    mesh: tuple[int, ...]
    forward_seconds: float  # of a microbatch
    backward_seconds: float
    once_seconds: float  # per step
    send_seconds: float  # to the next stage, of a microbatch
    peak_bytes: float  # of its group
    in_flight: int
    recompute: bool
    parameters: dict[str, str]  # name: "S(0),R"
    layouts: dict[str, Placed] = field(default_factory=dict)  # of every op, by its name in the captured program

    def to_dict(self, *, layouts: bool = False) -> dict[str, Any]:
        data = asdict(self)
        data["layouts"] = {name: placed.to_dict() for name, placed in self.layouts.items()}
        if not layouts:
            del data["layouts"]
        return data


@dataclass(frozen=True)
class Pipeline:
    """A pipeline plan. Seconds of one step; bytes per device."""

    seconds: float
    bound: float  # seconds: a lower bound, the kernels alone, spread evenly over all devices without any bubble
    peak_bytes: float
    bubble: float  # share of the devices' time
    exposed_communication: float  # seconds
    schedule: str
    microbatches: int
    way: str  # planned, equal or grid: which search the division came from
    stages: tuple[PipelineStage, ...]
    configurations: tuple[dict[str, Any], ...]  # all that were considered, the fastest that fits first
    speed_up: tuple[dict[str, Any], ...] = ()  # devices, seconds, speed_up
    budgets: tuple[dict[str, Any], ...] = ()  # memory_bytes, seconds, stages, microbatches
    assumptions: dict[str, Any] = field(default_factory=dict)
    seconds_spent: dict[str, float] = field(default_factory=dict)

    @property
    def gap(self) -> float:
        return (self.seconds - self.bound) / self.seconds if self.seconds else 0.0

    def to_dict(self, *, layouts: bool = False) -> dict[str, Any]:
        """Plain data: the keys of `autoshard pipeline --json`. layouts: include those of every op."""
        return {
            "status": "feasible", "seconds": self.seconds, "bound_seconds": self.bound, "gap": self.gap, "peak_bytes": self.peak_bytes,
            "bubble": self.bubble, "exposed_communication_seconds": self.exposed_communication, "schedule": self.schedule,
            "microbatches": self.microbatches, "way": self.way, "stages": [stage.to_dict(layouts=layouts) for stage in self.stages],
            "configurations": list(self.configurations), "speed_up": list(self.speed_up), "budgets": list(self.budgets),
            "assumptions": self.assumptions, "seconds_spent": self.seconds_spent,
        }  # fmt: skip

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write everything, layouts included, as JSON, atomically."""
        write(self.to_dict(layouts=True), path)
