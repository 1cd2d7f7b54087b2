"""Estimated seconds and bytes of every possible stage of one program, from plans of the single units of its layers (`layers`).

The estimate of a stage is the sum of its units. Each unit is planned separately, and its inputs from other units cost as much as if
they arrived from another stage. Equal units (equal programs: `StageProgram.signature`) are planned once per mesh, recomputation and price
of memory. All units of a stage use one combination of these, the best that fits:

    t[u, k, j, q] = min over (mesh, recompute, lambda) of the sum over layers k ... j - 1, where its bytes with q + 1 in flight fit

Each stage of the chosen pipeline is later planned as one program (`pipelines`).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from autoshard.cost import OPTIMIZERS
from autoshard.mesh import Mesh
from autoshard.pipeline.configurations import Combination, StageOption
from autoshard.pipeline.interop import Division, Nodes, Stage, SubMesh, Tiling, inter_op
from autoshard.pipeline.layers import Layers
from autoshard.pipeline.stage_bounds import StepWork
from autoshard.pipeline.stage_plans import Job
from autoshard.pipeline.stage_programs import StageProgram, crossing_bytes, stage_program
from autoshard.pipeline.submeshes import Cluster

PRICES = (0.0, 0.03, 0.3)  # of a byte, in units of its seconds over the slowest axis; at 0.3 everything is sharded that can be
# fields of a StageOption that are sums over layers
SUMMED = ("forward", "backward", "weight", "static_bytes", "saved_bytes", "communication", "bound", "reduction", "update", "hides")
PER_MICROBATCH = ("forward", "backward", "weight", "communication", "bound", "hides")  # of these, seconds of one microbatch

RunJobs = Callable[[Sequence[Job]], list[tuple[StageOption, ...]]]


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

    def of_a_part(self, share: float) -> Sums:
        """At least what the same stages take for that share of a microbatch."""
        parts = {name: part * share if name in PER_MICROBATCH else part for name, part in self.parts.items()}
        return replace(self, parts=parts)

    def option(self, first: int, last: int) -> StageOption:
        """The stage of layers first ... last - 1."""
        values: dict[str, Any] = {name: float(part[first, last]) for name, part in self.parts.items()}
        return StageOption(
            **values, transient_bytes=float(self.transient[first, last]), price=self.combination.price,
            mesh=self.combination.mesh.shape, recompute=self.combination.recompute,
        )  # fmt: skip


class StageTable:
    """All stages of a program of K microbatches on a cluster."""

    def __init__(self, cluster: Cluster, layers: Layers, microbatches: int, *, optimizer: str | float, limit: float | None,
                 recompute: str, run: RunJobs, unit_seconds: float = 0.0, larger: Sequence[StageTable] = ()):  # fmt: skip
        """unit_seconds: of the runtime, for each forward and each backward of a microbatch, beside kernels. larger: tables of fewer
        microbatches whose number divides K, of the same ops; the nearest first."""
        self.unit_seconds, self.larger = unit_seconds, larger
        self.cluster, self.layers, self.K, self.run = cluster, layers, microbatches, run
        self.optimizer, self.limit, self.recompute = optimizer, limit, recompute
        self.single = [stage_program(layers.units, c, c + 1) for c in range(layers.units.count)]
        self.recomputed = [program.recomputed() for program in self.single] if recompute != "never" and self.training else self.single
        crossing = crossing_bytes(layers)
        self.transfer, self.transfer_back = cluster.transfer_seconds(crossing.forward), cluster.transfer_seconds(crossing.backward)
        self.sums: list[list[Sums]] = [[] for _ in cluster.submeshes]
        self.known: set[int] = set()
        self.pinned: dict[Combination, Sums] = {}

    @property
    def training(self) -> bool:
        return any(r.kind == "gradient" for r in self.layers.graph.results)

    def memory(self, u: SubMesh) -> float:
        """The limit in bytes of a device."""
        return self.cluster.memory(u) if self.limit is None else self.limit

    @property
    def held_bytes(self) -> float:
        """Parameters, with gradients and optimizer state where they are trained, of the full model."""
        graph = self.layers.graph
        trained = {r.name for r in graph.results if r.kind == "gradient"}
        state = OPTIMIZERS[self.optimizer] if isinstance(self.optimizer, str) else self.optimizer
        each = [(graph.ops[i].output, name in trained) for name, i in graph.parameters.items() if name not in dict(graph.tied)]
        return math.fsum(t.bytes + t.numel * (t.itemsize + state) * learns for t, learns in each)

    def most_in_flight(self, u: SubMesh) -> int:
        """With stages as large as this one everywhere."""
        return max(1, min(self.K, self.cluster.num_devices // u.size))

    @property
    def is_planned(self) -> bool:
        """Whether stages on some sub-mesh were planned."""
        return bool(self.known)

    def under(self, limit: float) -> StageTable:
        """The same plans with another limit."""
        other = copy.copy(self)
        other.limit = limit
        return other

    def with_recompute(self) -> StageTable:
        """The same model with recomputation allowed, planned."""
        other = StageTable(
            self.cluster, self.layers, self.K, optimizer=self.optimizer, limit=self.limit, recompute="always", run=self.run,
            unit_seconds=self.unit_seconds,
        )  # fmt: skip
        other.plan()
        return other

    # -- planning --

    @cached_property
    def work(self) -> StepWork:
        """Lower bounds on the layers' seconds on one device of the fastest kind: m devices take no less than an m-th of them."""
        ones = [u for u, s in enumerate(self.cluster.submeshes) if s.size == 1]
        self._add([(u, self.cluster.meshes(self.cluster.submeshes[u])[0], False, (0.0,)) for u in ones])
        rows = [{name: np.diagonal(part, 1) for name, part in self.sums[u][0].parts.items()} for u in ones]
        bound, forward = (np.min([row[name] for row in rows], axis=0) for name in ("bound", "forward"))
        weight = np.max([row["weight"] for row in rows], axis=0)
        return StepWork(bound, forward, weight, self.K, self.cluster.num_devices, tuple(s.size for s in self.cluster.submeshes))

    @property
    def bound(self) -> float:
        """Seconds: no pipeline of K microbatches takes less, even with all work spread evenly over the devices."""
        return self.K * float(self.work.seconds.sum()) / self.cluster.num_devices

    def plan(self) -> None:
        """Plans every layer on every mesh."""
        for u in range(len(self.cluster.submeshes)):
            self.plan_on(u)

    def plan_on(self, u: int) -> None:
        """Plans every layer on the meshes of one sub-mesh, where memory is short also with prices on it and with recomputation."""
        meshes = self.cluster.meshes(self.cluster.submeshes[u])
        self.plan_without_price(u, meshes)
        for mesh in meshes:
            if not self.share_fits(u, mesh):
                self.plan_with_prices(u, mesh, all_ways=True)

    def plan_without_price(self, u: int, meshes: Sequence[Mesh]) -> None:
        """Plans every layer as if memory had no limit."""
        self._add([(u, mesh, self._ways[0], (0.0,)) for mesh in meshes])
        self.known.add(u)

    def plan_with_prices(self, u: int, mesh: Mesh, *, all_ways: bool = False) -> None:
        """Plans every layer with prices on memory, and with recomputation unless a stage with its share of the layers fits without, and is
        faster than one that does half of the forward pass again. all_ways: with recomputation in any case."""
        s = self.cluster.submeshes[u]
        self._add([(u, mesh, self._ways[0], PRICES)])
        kept = self.plain(u, mesh)
        if len(self._ways) > 1 and kept is not None:
            again = kept.of_layers.sum() + self.work.forward.sum() / s.size / 2
            fast = [x for x in self.sums[u] if x.combination.mesh == mesh and x.of_layers.sum() <= again]
            if all_ways or not any(self._share_fits(u, x) for x in fast):
                self._add([(u, mesh, way, PRICES) for way in self._ways[1:]])

    @property
    def _ways(self) -> tuple[bool, ...]:
        """With or without recomputation; the faster first."""
        return (False, True) if self.recompute == "auto" and self.training else (self.recompute == "always",)

    def plain(self, u: int, mesh: Mesh) -> Sums | None:
        """The stages as if memory had no limit; None where they aren't planned."""
        wanted = Combination(mesh, self._ways[0], 0.0)
        return next((sums for sums in self.sums[u] if sums.combination == wanted), None)

    def at_least(self, u: int, mesh: Mesh) -> Sums | None:
        """As `plain`; where it is not planned, what it takes at least by fewer and larger microbatches of the same ops."""
        return self._known(lambda table: table.plain(u, mesh))

    def pinned_at_least(self, way: Combination) -> Sums | None:
        """Of stages under a baseline's pins, as `at_least`."""
        return self._known(lambda table: table.pinned.get(way))

    def _known(self, of: Callable[[StageTable], Sums | None]) -> Sums | None:
        """From this table, or from the first of the larger ones that has it: its share of their microbatch."""
        for table in (self, *self.larger):
            if sums := of(table):
                return sums if table is self else sums.of_a_part(table.K / self.K)
        return None

    def share_fits(self, u: int, mesh: Mesh) -> bool:
        """Whether every stage that has its share of the layers fits with some of the plans on this mesh."""
        return any(self._share_fits(u, sums) for sums in self.sums[u] if sums.combination.mesh == mesh)

    def _share_fits(self, u: int, sums: Sums) -> bool:
        s, L = self.cluster.submeshes[u], self.layers.count
        share = min(L, -(-L * s.size // self.cluster.num_devices) + 1)
        bytes_ = sums.bytes(min(self.K, -(-3 * self.cluster.num_devices // (2 * s.size))))  # interleaved: half as many again as 1F1B
        return max(bytes_[k, k + share] for k in range(L - share + 1)) <= self.memory(s)

    def _add(self, wanted: Sequence[tuple[int, Mesh, bool, tuple[float, ...]]]) -> None:
        jobs, rows = [], []
        for u, mesh, recompute, prices in wanted:
            s = self.cluster.submeshes[u]
            known = {(x.combination.mesh, x.combination.recompute, x.combination.price) for x in self.sums[u]}
            useful = prices if s.size > 1 else (0.0,)  # on one device there is only one layout
            prices = tuple(p for p in useful if (mesh, recompute, p) not in known)
            if prices:
                in_flight = (self.most_in_flight(s) + 1) // 2
                rows.append((u, mesh, recompute, prices))
                jobs += [self.job(program, mesh, prices, in_flight, recompute=recompute) for program in self._programs(recompute)]
        answers = iter(self.run(jobs))
        for u, mesh, recompute, prices in rows:
            per_unit = [next(answers) for _ in self.single]
            if all(len(options) == len(prices) for options in per_unit):
                for i, price in enumerate(prices):
                    chosen = Combination(mesh, recompute, price)
                    self.sums[u].append(self._summed(chosen, [options[i] for options in per_unit], self.cluster.submeshes[u]))

    def _programs(self, recompute: bool) -> list[StageProgram]:
        return self.recomputed if recompute else self.single

    def add_pinned(self, wanted: Sequence[Combination], submeshes: Sequence[SubMesh]) -> None:
        """Plans every layer under a baseline's pins."""
        jobs = []
        for way in wanted:
            programs = self._programs(way.recompute)
            jobs += [self.job(program, way.mesh, (0.0,), 1, recompute=way.recompute, pins=way.pins) for program in programs]
        answers = iter(self.run(jobs))
        for way, s in zip(wanted, submeshes, strict=True):
            per_unit = [next(answers) for _ in self.single]
            if all(per_unit):
                self.pinned[way] = self._summed(way, [options[0] for options in per_unit], s)

    def job(self, program: StageProgram, mesh: Mesh, prices: tuple[float, ...], in_flight: int, *, recompute: bool, pins: str = "") -> Job:
        return Job(program.graph, program.signature, mesh, self.K, in_flight, self.optimizer, prices, pins, recompute)

    def stage_job(self, first: int, last: int, way: Combination, prices: tuple[float, ...], in_flight: int) -> Job:
        """The job of planning a stage as one program, with its layouts."""
        program = stage_program(self.layers, first, last)
        program = program.recomputed() if way.recompute else program
        return replace(self.job(program, way.mesh, prices, in_flight, recompute=way.recompute, pins=way.pins), layouts=True)

    def _summed(self, way: Combination, of: list[StageOption], s: SubMesh) -> Sums:
        starts = np.array(self.layers.starts)
        parts = {}
        for name in SUMMED:
            sums = np.concatenate([[0.0], np.cumsum([getattr(option, name) for option in of])])[starts]
            parts[name] = sums[None, :] - sums[:-1, None]
        transient = _largest([option.transient_bytes for option in of], starts)
        longest = _largest([option.reduction for option in of], starts)
        # the reduction of a layer's gradients overlaps with the backward pass of the layers below
        exposed = np.maximum(np.minimum(longest, parts["reduction"]), parts["reduction"] - parts["hides"])
        parts["once"] = parts["update"] + exposed + self._exchanged(s)
        return Sums(way, parts, transient)

    def _exchanged(self, s: SubMesh) -> np.ndarray:
        """Seconds per step of exchanging the gradients of parameters that a stage shares with others: it sends its sum and receives one."""
        L = self.layers.count
        exchanged = np.zeros((L, L + 1))
        if not self.training:
            return exchanged
        for name, layers in self.layers.shared.items():
            size = self.layers.graph.ops[self.layers.graph.parameters[name]].output.bytes
            before = np.searchsorted(layers, np.arange(L + 1))  # of the layers that share it, those below each boundary
            inside = before[None, :] - before[:L, None]
            exchanged += np.where((inside > 0) & (inside < len(layers)), 2 * self.cluster.seconds_between(s, s, size), 0.0)
        return exchanged

    def exchange_seconds(self, part: Stage) -> float:
        """Seconds per step in which one stage exchanges gradients of shared parameters."""
        return float(self._exchanged(self.cluster.submeshes[part.submesh])[part.first, part.last])

    # -- the tables of the dynamic program --

    def seconds(self) -> np.ndarray:
        """t of `interop.inter_op`."""
        L = self.layers.count
        smallest = min((self.cluster.submeshes[u].size for u in self.known), default=1)
        Q = max(1, min(self.K, L, self.cluster.num_devices // smallest))
        t = np.full((len(self.cluster.submeshes), L, L + 1, Q), math.inf)
        some = np.arange(L)[:, None] < np.arange(L + 1)[None, :]
        for u, s in enumerate(self.cluster.submeshes):
            for sums in self.sums[u]:
                once = sums.parts["forward"] + sums.parts["backward"] + sums.parts["once"] / self.K
                for q in range(Q):
                    fits = some & (sums.bytes(q + 1) <= self.memory(s))
                    t[u, :, :, q] = np.where(fits, np.minimum(t[u, :, :, q], once), t[u, :, :, q])
        return t

    def division(self, most: int | None = None, nodes: tuple[Nodes, ...] | None = None) -> Division | None:
        """The division of least T over the sub-meshes whose stages are planned. nodes: instead of the cluster's; most: devices of them."""
        keep = [u for u in sorted(self.known) if most is None or self.cluster.submeshes[u].size <= most]
        if not keep:
            return None
        tiling = Tiling(nodes or self.cluster.tiling.kinds, tuple(self.cluster.submeshes[u] for u in keep))
        x = (self.transfer + self.transfer_back)[np.ix_(range(self.layers.count + 1), keep, keep)]
        division = inter_op(self.seconds()[keep], x, tiling, self.K)
        return division and replace(division, stages=tuple(stage._replace(submesh=keep[stage.submesh]) for stage in division.stages))

    def least_bytes(self) -> np.ndarray:
        """The fewest bytes of every stage over all combinations, in the shape of `seconds`."""
        t = np.full_like(self.seconds(), math.inf)
        for u in range(len(self.cluster.submeshes)):
            for sums in self.sums[u]:
                for q in range(t.shape[3]):
                    t[u, :, :, q] = np.minimum(t[u, :, :, q], sums.bytes(q + 1))
        L = self.layers.count
        t[:, np.arange(L)[:, None] >= np.arange(L + 1)[None, :]] = math.inf
        return t

    def choose(self, first: int, last: int, u: int, in_flight: int, share: float = 1.0) -> Sums | None:
        """The combination of least seconds that fits in that share of the memory."""
        best, least = None, math.inf
        for sums in self.sums[u]:
            if sums.bytes(in_flight)[first, last] <= share * self.memory(self.cluster.submeshes[u]):
                seconds = sums.option(first, last).seconds(self.K)
                if seconds < least:
                    best, least = sums, seconds
        return best


def _largest(values: Sequence[float], starts: np.ndarray) -> np.ndarray:
    """The largest value of the units of layers k ... j - 1, in [k, j]; 0 where there are none."""
    largest = np.zeros((len(starts) - 1, len(starts)))
    for k, first in enumerate(starts[:-1]):
        largest[k, k + 1 :] = np.maximum.accumulate(values[first:])[starts[k + 1 :] - first - 1]
    return largest
