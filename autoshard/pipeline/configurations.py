"""A pipeline as numbers: the stages' seconds and bytes, a schedule, and the simulated step of both."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from autoshard.mesh import Mesh
from autoshard.pipeline.schedule_times import ScheduleRun, run
from autoshard.pipeline.schedules import Schedule, schedule_of
from autoshard.pipeline.stage_division import Stage, step_seconds
from autoshard.solution import Placed


def backend_of(meshes: Iterable[Mesh | None]) -> str:
    """What carries the transfers between stages on these meshes: gloo where one of them was measured with it, else nccl."""
    return "gloo" if any(axis.backend == "gloo" for mesh in meshes if mesh is not None for axis in mesh.axes) else "nccl"


@dataclass(frozen=True)
class StageOption:
    """One choice of layouts for a stage; seconds of one microbatch except `once`, bytes per device."""

    forward: float
    backward: float
    weight: float  # of backward: kernels that only compute gradients of parameters
    once: float  # per step: the optimizer, reductions of gradients
    static_bytes: float
    saved_bytes: float  # of a microbatch, from its forward to its backward pass
    transient_bytes: float  # beyond static and saved, or kept, at the peak
    kept_bytes: float | None = None  # of a microbatch, between the halves of its backward pass; None: what is saved
    communication: float = 0.0  # of forward and backward, not hidden by kernels
    reduction: float = 0.0  # of gradients, hidden or not
    update: float = 0.0  # by the optimizer
    hides: float = 0.0  # kernels of the backward pass, with which reductions of gradients can overlap
    bound: float = 0.0  # proven: no layouts have less f + b + o / K with bytes at that price, without arrivals
    mesh: tuple[int, ...] = ()
    recompute: bool = False
    layouts: tuple[Placed, ...] = ()  # by op of the stage's graph, in order

    def seconds(self, microbatches: int) -> float:
        return self.forward + self.backward + self.once / microbatches

    def bytes(self, in_flight: int) -> float:
        return self.static_bytes + in_flight * self.saved_bytes + self.transient_bytes


@dataclass(frozen=True)
class Combination:
    """How all layers of a stage are planned."""

    mesh: Mesh
    recompute: bool
    price: float
    pins: str = ""  # a baseline's name


@dataclass(frozen=True, eq=False)
class Configuration:
    """Parts v = 0 ... of the model, part v on device group v mod P. `way`: planned (the dynamic program), equal parts, or grid."""

    way: str
    microbatches: int
    schedule: str
    parts: tuple[Stage, ...]
    options: tuple[StageOption, ...]
    combinations: tuple[Combination, ...]
    transfer: tuple[float, ...]  # seconds of the transfer of part v's output to part v + 1
    transfer_back: tuple[float, ...]
    memory: tuple[float, ...]  # bytes of a device, per device group
    sizes: tuple[int, ...]  # devices per device group
    data: int | None = None  # of a grid point
    tensor: int | None = None
    unit_seconds: float = 0.0  # of the runtime, for each unit
    exact: bool = False  # whether each stage was planned as one program

    @property
    def groups(self) -> int:
        return len(self.memory)

    @cached_property
    def order(self) -> Schedule:
        return schedule_of(self.schedule, self.groups, self.microbatches, len(self.parts) // self.groups)

    @cached_property
    def run(self) -> ScheduleRun:
        return self._run(1.0)

    def _run(self, transfers: float) -> ScheduleRun:
        of, P = self.options, self.groups
        return run(
            self.order,
            forward=[o.forward + self.unit_seconds for o in of],
            backward=[o.backward + self.unit_seconds for o in of],
            weight=[min(o.weight, o.backward) for o in of],
            transfer=[transfers * x for x in self.transfer],
            transfer_back=[transfers * x for x in self.transfer_back],
            finish=[math.fsum(o.once for o in of[d::P]) for d in range(P)],
            activation_bytes=[o.saved_bytes for o in of],
            kept_bytes=[o.saved_bytes if o.kept_bytes is None else o.kept_bytes for o in of],
            fixed_bytes=[o.static_bytes + o.transient_bytes for o in of],
            in_turn=False,  # as `parallelize` runs them
            backend=backend_of(c.mesh for c in self.combinations),
        )

    @property
    def seconds(self) -> float:
        return self.run.seconds

    @property
    def bottleneck_seconds(self) -> float:
        """T of `stage_division`: of a pipeline without other idle time than filling and draining it."""
        across = [a + b for a, b in zip(self.transfer, self.transfer_back)][: len(self.parts) - 1]
        return step_seconds([o.seconds(self.microbatches) for o in self.options], across, self.microbatches)

    @property
    def fits(self) -> bool:
        return all(peak <= memory for peak, memory in zip(self.run.peak_bytes, self.memory))

    @property
    def static_bytes(self) -> tuple[float, ...]:
        """Per device group: the bytes that are held throughout, with or without recomputation."""
        return tuple(math.fsum(o.static_bytes for o in self.options[d :: self.groups]) for d in range(self.groups))

    @cached_property
    def exposed_communication(self) -> float:
        """Seconds of the step: collectives of the busiest device, and the delay by transfers between stages."""
        busiest = max(range(self.groups), key=lambda d: (self.run.busy[d], -d))
        collectives = self.microbatches * math.fsum(o.communication for o in self.options[busiest :: self.groups])
        return collectives + max(self.seconds - self._run(0.0).seconds, 0.0)

    def row(self) -> dict[str, Any]:
        return {
            "way": self.way, "data": self.data, "tensor": self.tensor, "pipeline": self.groups, "microbatches": self.microbatches,
            "schedule": self.schedule, "devices": list(self.sizes), "layers": [part.last - part.first for part in self.parts],
            "recompute": sum(o.recompute for o in self.options), "seconds": self.seconds, "peak_bytes": max(self.run.peak_bytes),
            "bubble": self.run.bubble, "fits": self.fits, "exact": self.exact,
        }  # fmt: skip


def in_flight(schedule: Schedule) -> tuple[int, ...]:
    """The number of microbatches that each part may have in flight: its share of those of its device."""
    per_part = [-(-held // schedule.chunks) for held in schedule.peak_activations]
    return tuple(per_part[v % schedule.devices] for v in range(schedule.parts))


def equal_parts(layers: int, parts: int) -> tuple[tuple[int, int], ...] | None:
    """First and last layer of parts with as equal numbers of layers as possible; None where there are more parts than layers."""
    if parts > layers:
        return None
    at = [round(v * layers / parts) for v in range(parts + 1)]
    return tuple(zip(at, at[1:]))


def fastest_first(configurations: Sequence[Configuration]) -> list[Configuration]:
    """Those that fit, by seconds; among equals fewer stages, fewer microbatches, and the more common schedule first."""
    names = ("1f1b", "gpipe", "interleaved_1f1b", "zb_h1", "sequential")
    return sorted(
        (c for c in configurations if c.fits),
        key=lambda c: (c.seconds, c.groups, c.microbatches, names.index(c.schedule), ("planned", "equal", "grid").index(c.way)),
    )
