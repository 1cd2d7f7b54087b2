"""Estimated seconds and bytes of every possible stage of one program, from plans of the single units of its layers (`layers`).

The estimate of a stage is the sum of its units. Each unit is planned separately, and its inputs from other units cost as much as if
they arrived from another stage. All units of a stage use one combination of mesh, recomputation and price of memory, the best that fits:

    t[u, k, j, q] = min over (mesh, recompute, lambda) of the sum over layers k ... j - 1, where its bytes with q + 1 in flight fit

A table answers from what is planned; `stage_planner` plans and adds to it. Each stage of the chosen pipeline is later planned as one
program (`pipelines`).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from autoshard.cost import bytes_per_parameter
from autoshard.mesh import Mesh
from autoshard.pipeline.configurations import Combination, StageOption
from autoshard.pipeline.layers import Layers
from autoshard.pipeline.stage_division import Division, Nodes, SubMesh, Tiling, inter_op
from autoshard.pipeline.stage_programs import crossing_bytes
from autoshard.pipeline.submeshes import Cluster

# fields of a StageOption that are sums over layers
SUMMED = ("forward", "backward", "weight", "static_bytes", "saved_bytes", "communication", "bound", "reduction", "update", "hides")
PER_MICROBATCH = ("forward", "backward", "weight", "communication", "bound", "hides")  # of these, seconds of one microbatch


@dataclass(frozen=True, eq=False)
class Sums:
    """Of one combination on one sub-mesh: the fields of every stage's option, as arrays of (L, L + 1)."""

    combination: Combination
    parts: dict[str, np.ndarray]
    transient: np.ndarray

    def bytes(self, in_flight: int) -> np.ndarray:
        return self.parts["static_bytes"] + in_flight * self.parts["saved_bytes"] + self.transient

    @property
    def of_layers(self) -> np.ndarray:
        """Seconds of the forward and backward pass of each layer: (L,)."""
        return np.diagonal(self.parts["forward"] + self.parts["backward"], 1)

    def option(self, first: int, last: int) -> StageOption:
        """The stage of layers first ... last - 1."""
        values: dict[str, Any] = {name: float(part[first, last]) for name, part in self.parts.items()}
        return StageOption(
            **values, transient_bytes=float(self.transient[first, last]),
            mesh=self.combination.mesh.shape, recompute=self.combination.recompute,
        )  # fmt: skip


@dataclass(eq=False)
class StageTable:
    """What is known of the stages of a program of K microbatches on a cluster."""

    cluster: Cluster
    layers: Layers
    K: int
    optimizer: str | float
    limit: float | None  # bytes of a device; None: its own memory
    recompute: str  # auto, never or always
    stages: int | None = None  # how many are asked for
    unit_seconds: float = 0.0  # of the runtime, for each forward and each backward of a microbatch, beside kernels
    larger: "Sequence[StageTable]" = ()  # of fewer microbatches whose number divides K, of the same ops; the nearest first
    sums: list[list[Sums]] = field(default_factory=list)  # by sub-mesh
    known: set[int] = field(default_factory=set)  # sub-meshes on which stages are planned
    pinned: dict[Combination, Sums] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.sums = self.sums or [[] for _ in self.cluster.submeshes]
        self.transfer, self.transfer_back = map(self.cluster.transfer_seconds, crossing_bytes(self.layers))

    @cached_property
    def training(self) -> bool:
        return self.layers.graph.trains

    @property
    def ways(self) -> tuple[bool, ...]:
        """With or without recomputation; the faster first."""
        return (False, True) if self.recompute == "auto" and self.training else (self.recompute == "always",)

    def memory(self, u: SubMesh) -> float:
        """The limit in bytes of a device."""
        return self.cluster.memory(u) if self.limit is None else self.limit

    @property
    def held_bytes(self) -> float:
        """Parameters, with gradients and optimizer state where they are trained, of the full model."""
        graph = self.layers.graph
        trained = {r.name for r in graph.results if r.kind == "gradient"}
        state = bytes_per_parameter(self.optimizer)
        each = [(graph.ops[i].output, name in trained) for name, i in graph.parameters.items() if name not in dict(graph.tied)]
        return math.fsum(t.bytes + t.numel * (t.itemsize + state) * learns for t, learns in each)

    # -- single stages --

    def plain(self, u: int, mesh: Mesh) -> Sums | None:
        """The stages as if memory had no limit; None where they aren't planned."""
        wanted = Combination(mesh, self.ways[0], 0.0)
        return next((sums for sums in self.sums[u] if sums.combination == wanted), None)

    def at_least(self, u: int, mesh: Mesh) -> Sums | None:
        """As `plain`; where it is not planned, what it takes at least by fewer and larger microbatches of the same ops."""
        return self._known(lambda table: table.plain(u, mesh))

    def pinned_at_least(self, way: Combination) -> Sums | None:
        """Of stages under a baseline's pins, as `at_least`."""
        return self._known(lambda table: table.pinned.get(way))

    def _known(self, of: "Callable[[StageTable], Sums | None]") -> Sums | None:
        """From this table, or from the first of the larger ones that has it: its share of their microbatch."""
        for table in (self, *self.larger):
            if sums := of(table):
                share = table.K / self.K
                shared = {} if table is self else {name: sums.parts[name] * share for name in PER_MICROBATCH}
                return replace(sums, parts=sums.parts | shared)
        return None

    def share_fits(self, u: int, *some: Sums) -> bool:
        """Whether every stage that has its share of the layers fits with some of these plans on one sub-mesh."""
        s, L = self.cluster.submeshes[u], self.layers.count
        share = min(L, -(-L * s.size // self.cluster.num_devices) + 1)
        in_flight = min(self.K, -(-3 * self.cluster.num_devices // (2 * s.size)))  # interleaved: half as many again as 1F1B
        each = (sums.bytes(in_flight) for sums in some)
        return any(max(of[k, k + share] for k in range(L - share + 1)) <= self.memory(s) for of in each)

    def on_mesh(self, u: int, mesh: Mesh) -> list[Sums]:
        return [sums for sums in self.sums[u] if sums.combination.mesh == mesh]

    def choose(self, first: int, last: int, u: int, in_flight: int, share: float = 1.0) -> Sums | None:
        """The combination of least seconds that fits in that share of the memory."""
        most = share * self.memory(self.cluster.submeshes[u])
        fitting = [sums for sums in self.sums[u] if sums.bytes(in_flight)[first, last] <= most]
        return min(fitting, key=lambda sums: sums.option(first, last).seconds(self.K), default=None)

    # -- all stages, for the dynamic program --

    @property
    def _some(self) -> np.ndarray:
        """(L, L + 1): whether a stage from layer k to layer j has a layer."""
        return np.arange(self.layers.count)[:, None] < np.arange(self.layers.count + 1)[None, :]

    def seconds(self) -> np.ndarray:
        """t of `stage_division.inter_op`."""
        smallest = min((self.cluster.submeshes[u].size for u in self.known), default=1)
        Q = max(1, min(self.K, self.layers.count, self.cluster.num_devices // smallest))
        t = np.full((len(self.sums), *self._some.shape, Q), math.inf)
        for u, s in enumerate(self.cluster.submeshes):
            for sums in self.sums[u]:
                once = sums.parts["forward"] + sums.parts["backward"] + sums.parts["once"] / self.K
                for q in range(Q):
                    fits = self._some & (sums.bytes(q + 1) <= self.memory(s))
                    t[u, :, :, q] = np.where(fits, np.minimum(t[u, :, :, q], once), t[u, :, :, q])
        return t

    def least_bytes(self) -> np.ndarray:
        """The fewest bytes of every stage over all combinations, in the shape of `seconds`."""
        t = np.full_like(self.seconds(), math.inf)
        for u, some in enumerate(self.sums):
            for q in range(t.shape[3]):
                t[u, :, :, q] = np.min([t[u, :, :, q], *(sums.bytes(q + 1) for sums in some)], axis=0)
        t[:, ~self._some] = math.inf
        return t

    def division(self, most: int | None = None, nodes: tuple[Nodes, ...] | None = None) -> Division | None:
        """The division of least T over the sub-meshes whose stages are planned. nodes: instead of the cluster's, in any number of stages;
        most: devices of them."""
        keep = [u for u in sorted(self.known) if most is None or self.cluster.submeshes[u].size <= most]
        if not keep:
            return None
        tiling = Tiling(nodes or self.cluster.tiling.kinds, tuple(self.cluster.submeshes[u] for u in keep))
        x = (self.transfer + self.transfer_back)[np.ix_(range(self.layers.count + 1), keep, keep)]
        division = inter_op(self.seconds()[keep], x, tiling, self.K, None if nodes else self.stages)
        return division and replace(division, stages=tuple(stage._replace(submesh=keep[stage.submesh]) for stage in division.stages))

    # -- sums of units --

    def summed(self, way: Combination, of: Sequence[StageOption], s: SubMesh) -> Sums:
        """Every stage as the sum of its units under one combination."""
        starts = np.array(self.layers.starts)
        parts = {}
        for name in SUMMED:
            sums = np.concatenate([[0.0], np.cumsum([getattr(option, name) for option in of])])[starts]
            parts[name] = sums[None, :] - sums[:-1, None]
        transient = _largest([option.transient_bytes for option in of], starts)
        longest = _largest([option.reduction for option in of], starts)
        # the reduction of a layer's gradients overlaps with the backward pass of the layers below
        exposed = np.maximum(np.minimum(longest, parts["reduction"]), parts["reduction"] - parts["hides"])
        parts["once"] = parts["update"] + exposed + self.exchange_seconds(s)
        return Sums(way, parts, transient)

    def exchange_seconds(self, s: SubMesh) -> np.ndarray:
        """Of every stage on a sub-mesh the seconds per step of exchanging the gradients of parameters that it shares with others: it sends
        its sum and receives one."""
        L = self.layers.count
        exchanged = np.zeros((L, L + 1))
        for name, layers in self.layers.shared.items() if self.training else ():
            size = self.layers.graph.ops[self.layers.graph.parameters[name]].output.bytes
            before = np.searchsorted(layers, np.arange(L + 1))  # of the layers that share it, those below each boundary
            inside = before[None, :] - before[:L, None]
            exchanged += np.where((inside > 0) & (inside < len(layers)), 2 * self.cluster.seconds_between(s, s, size), 0.0)
        return exchanged


def _largest(values: Sequence[float], starts: np.ndarray) -> np.ndarray:
    """The largest value of the units of layers k ... j - 1, in [k, j]; 0 where there are none."""
    largest = np.zeros((len(starts) - 1, len(starts)))
    for k, first in enumerate(starts[:-1]):
        largest[k, k + 1 :] = np.maximum.accumulate(values[first:])[starts[k + 1 :] - first - 1]
    return largest
