"""A pipeline plan as plain data: stages with their devices and layouts, the schedule, seconds, bytes and the bound. And a pipeline as it is
run: the program of each stage, and the order of the units of work."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from autoshard.graph import Graph
from autoshard.mesh import Mesh
from autoshard.solution.plan import Fact, ModelPlan
from autoshard.solution.record import Placed

RECEIVED, SENT = "recv:", "send:"  # placeholders and results that are values of other stages: recv:add_4, send:add_4


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
    prices: Mesh | None = None  # the mesh of the stage with its prices, by which routes between layouts are chosen

    def to_dict(self, *, layouts: bool = True) -> dict[str, Any]:
        data = asdict(replace(self, layouts={}, prices=None))
        del data["layouts"], data["prices"]
        if layouts:
            data["layouts"] = {name: placed.to_dict() for name, placed in self.layouts.items()}
            data["prices"] = None if self.prices is None else self.prices.to_dict()
        return data

    @staticmethod
    def from_dict(data: dict[str, Any]) -> PipelineStage:
        """The inverse of `to_dict`; keys that it doesn't know are ignored."""
        known = {key: data[key] for key in (f.name for f in fields(PipelineStage)) if key in data}
        layouts = {name: Placed(**placed) for name, placed in data.get("layouts", {}).items()}
        prices = None if data.get("prices") is None else Mesh.from_dict(data["prices"])
        known |= {"devices": tuple(data["devices"]), "mesh": tuple(data["mesh"]), "layouts": layouts, "prices": prices}
        return PipelineStage(**known)


@dataclass(frozen=True)
class Pipeline(ModelPlan):
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

    status = "feasible"  # no division is proven best
    training = Fact[bool]("Whether a step has a backward pass.", bool, nothing=True)

    @property
    def parts(self) -> Mapping[tuple[str, int], PipelineStage]:
        return {("", k): stage for k, stage in enumerate(self.stages)}

    @property
    def cost(self) -> float:
        """Seconds of one step, by the name that other plans have for it."""
        return self.seconds

    @property
    def memory_limit(self) -> float | None:
        """Bytes of the smallest device."""
        return min((kind["memory"] for kind in self.assumptions.get("cluster") or () if kind.get("memory")), default=None)

    @property
    def num_groups(self) -> int:
        """Of devices; a group has one stage or, in interleaved schedules, several."""
        return 1 + max(stage.group for stage in self.stages)

    @property
    def mesh(self) -> Mesh:
        """All devices of the cluster as one axis, for `device_mesh`."""
        kinds = self.assumptions.get("cluster") or [{"nodes": 1, "devices": 1 + max(max(stage.devices) for stage in self.stages)}]
        return Mesh.from_bandwidths((sum(kind["nodes"] * kind["devices"] for kind in kinds),))

    def _run_layouts(self) -> list:
        return [{name: placed.to_dict() for name, placed in stage.layouts.items()} for stage in self.stages]

    def to_dict(self, *, layouts: bool = True) -> dict[str, Any]:
        """Plain data; without the layouts of every op it has the keys of `autoshard pipeline --json`."""
        return {
            "status": "feasible", "seconds": self.seconds, "bound_seconds": self.bound, "gap": self.gap, "peak_bytes": self.peak_bytes,
            "bubble": self.bubble, "exposed_communication_seconds": self.exposed_communication, "schedule": self.schedule,
            "microbatches": self.microbatches, "way": self.way, "stages": [stage.to_dict(layouts=layouts) for stage in self.stages],
            "configurations": list(self.configurations), "speed_up": list(self.speed_up), "budgets": list(self.budgets),
            "assumptions": self.assumptions, "seconds_spent": self.seconds_spent,
        }  # fmt: skip

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Pipeline:
        """The inverse of `to_dict`; ValueError where a stage is not sound, and keys that it doesn't know are ignored."""
        names = {"bound_seconds": "bound", "exposed_communication_seconds": "exposed_communication"}
        known = {f.name for f in fields(Pipeline)}
        values = {name: value for key, value in data.items() if (name := names.get(key, key)) in known}
        tuples = {key: tuple(data[key]) for key in ("configurations", "speed_up", "budgets")}
        return Pipeline(**{**values, "stages": tuple(map(PipelineStage.from_dict, data["stages"])), **tuples})


@dataclass(frozen=True, eq=False)
class StageToRun:
    """One stage. A value of its graph that another stage reads is a result `send:NAME`: an output in the forward pass, a gradient in the
    backward pass. A value of another stage is a placeholder `recv:NAME`: an input in the forward pass, a tangent in the backward pass."""

    graph: Graph
    layouts: Mapping[str, Placed]  # by op
    mesh: Mesh
    devices: tuple[int, ...]  # ranks, in the order of the mesh's coordinates
    group: int  # device group: stages of one group share its devices


@dataclass(frozen=True, eq=False)
class PipelineToRun:
    """All stages and the order in which each device group runs its units (kind, microbatch, stage): F forward, B backward; where there are
    W, weight gradients, B is the backward of what is sent on."""

    stages: tuple[StageToRun, ...]
    order: tuple[tuple[tuple[str, int, int], ...], ...]  # by group
    microbatches: int
    num_devices: int
    split: frozenset[str]  # the inputs that are split into microbatches along dim 0; the others go to each of them
    training: bool
