"""Which stages are planned, and the configurations of them.

1. On every sub-mesh, largest first, each layer is planned as if memory had no limit, unless no step that uses it can be faster than the
   best so far (`stage_bounds`), or was too slow with fewer and larger microbatches.
2. Where that does not fit, with prices on memory and with recomputation: first the sub-mesh and number of microbatches whose step would be
   the shortest without a limit, then the next, as long as one may be faster than the best that fits.
3. The division of the dynamic program over all that is planned, and the points of the grid that may be faster.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from autoshard.mesh import Mesh
from autoshard.pipeline.choices import (
    Parts,
    configuration,
    grid_of,
    grid_point,
    has_room,
    of_division,
    of_equal_groups,
    schedules_and_parts,
    submesh,
)
from autoshard.pipeline.configurations import Combination, Configuration
from autoshard.pipeline.interop import Stage
from autoshard.pipeline.stage_tables import StageTable
from autoshard.planning import Progress

# a bound has to be this much above the best estimate: estimates come from plans of single layers; and a bound that is such an estimate
# itself, of plans without a price on memory, is up to 4 % above those with one, which hide more of their communication
ROOM, SLACK = 1.02, 1.1

Wanted = Callable[[Configuration], bool]
Point = tuple[int, int, int]  # of the grid: P, D, H


def choices_of(
    tables: Sequence[StageTable], schedules: Sequence[str], *, grid: bool, everything: bool = False,
    wanted: Wanted = lambda configuration: True, progress: Progress = lambda message, part: None,
) -> list[Configuration]:  # fmt: skip
    """The wanted configurations that may be the best, estimated; each table is of another number of microbatches. everything: all that are
    wanted, however slow. progress: is called with what is done next, and the part that is done."""
    choices = Choices(schedules, wanted, everything)
    for n, table in enumerate(tables):
        progress(f"planning layers for {table.K} microbatches", 0.7 * n / len(tables))
        choices.plan_without_price(table)
        choices.plan_with_prices(most=1)
    progress("planning layers where memory is short", 0.7)
    choices.plan_with_prices()
    for n, table in enumerate(tables):
        progress(f"dividing the layers for {table.K} microbatches", 0.8 + 0.2 * n / len(tables))
        if not choices.is_beyond(table):
            choices.add(table, "division", of_division(table, schedules))
        if grid and not choices.is_beyond(table):
            choices.add(table, "grid", choices.grid_points(table))
    return [c for some in choices.configurations.values() for c in some]


@dataclass(frozen=True, eq=False)
class Waiting:
    """A mesh of a sub-mesh on which a stage of its share of the layers doesn't fit without a price on memory."""

    table: StageTable
    u: int
    mesh: Mesh
    equal: Parts  # the schedules and parts of equal groups on the sub-mesh
    seconds: float  # of the fastest of these, if memory had no limit


@dataclass(eq=False)
class Choices:
    """The configurations so far, and what the best of them leaves to plan."""

    schedules: Sequence[str]
    wanted: Wanted
    everything: bool  # however slow: neither `below` nor `shortest` is ever less than infinity
    configurations: dict[tuple[int, int | str], list[Configuration]] = field(default_factory=dict)  # by K, and sub-mesh or kind
    shortest: dict[int, float] = field(default_factory=lambda: defaultdict(lambda: math.inf))  # by K: the least T of a known division
    waiting: list[Waiting] = field(default_factory=list)
    below: float = math.inf  # seconds of the best that fits

    def is_beyond(self, table: StageTable) -> bool:
        """Whether no pipeline of this number of microbatches can be faster, even with all work spread evenly over the devices."""
        return table.bound >= ROOM * self.below

    def add(self, table: StageTable, of: int | str, configurations: Sequence[Configuration]) -> None:
        """In place of what was known of the same sub-mesh."""
        self.configurations[table.K, of] = some = [c for c in configurations if self.wanted(c)]
        if not self.everything:
            self.below = min([self.below, *(c.seconds for c in some if c.fits)])

    def plan_without_price(self, table: StageTable) -> None:
        """As if memory had no limit, on every mesh that may pay so."""
        if self.is_beyond(table):
            return
        shapes = {P for P, *_ in grid_of(table)} if len(table.cluster.kinds) == 1 else set()
        for u, s in sorted(enumerate(table.cluster.submeshes), key=lambda pair: (-pair[1].size, pair[0])):
            P = table.cluster.num_devices // s.size
            equal = self._promising(table, P) if P in shapes and submesh(table, s.size) == u else []
            if not equal and not self._may_divide(table, u):
                continue
            meshes = [mesh for mesh in table.cluster.meshes(s) if self._may_pay(table, u, mesh, equal)]
            if meshes:
                table.plan_without_price(u, meshes)
                self._add_groups(table, u, equal)
                short = [mesh for mesh in meshes if not table.share_fits(u, mesh)]
                self.waiting += [Waiting(table, u, mesh, equal, self._without_limit(table, u, mesh, equal)) for mesh in short]

    def plan_with_prices(self, most: int | None = None) -> None:
        """With prices on memory and recomputation, the most promising first; most: so many of them."""
        self.waiting.sort(key=lambda w: (w.seconds, -w.table.cluster.submeshes[w.u].size, w.table.K))
        planned = 0
        while self.waiting and planned != most:
            if most and self.waiting[0].seconds >= self.below:
                break
            w = self.waiting.pop(0)
            if self._may_pay(w.table, w.u, w.mesh, w.equal):
                w.table.plan_with_prices(w.u, w.mesh, all_ways=self.everything)
                self._add_groups(w.table, w.u, w.equal)
                planned += 1

    def _add_groups(self, table: StageTable, u: int, equal: Parts) -> None:
        self.add(table, u, rows := of_equal_groups(table, equal, u))
        if not self.everything:
            divisions = [c for c in rows if c.fits and c.schedule != "interleaved_1f1b"]  # wanted or not
            self.shortest[table.K] = min([self.shortest[table.K], *(c.bottleneck_seconds for c in divisions)])

    # -- what may pay --

    def _promising(self, table: StageTable, P: int) -> Parts:
        """The schedules and parts of P equal groups that may be faster than the best."""
        pairs = schedules_and_parts(table, self.schedules, P)
        return [(name, parts) for name, parts in pairs if table.work.of_equal_groups(parts, P) < ROOM * self.below]

    def _may_pay(self, table: StageTable, u: int, mesh: Mesh, equal: Parts) -> bool:
        """Whether stages on this mesh may be part of the best, as far as is known of it: as if memory had no limit."""
        plain = table.at_least(u, mesh)
        if plain is None or self._without_limit(table, u, mesh, equal) < SLACK * self.below:
            return True
        m, seconds = table.cluster.submeshes[u].size, float(plain.of_layers.sum())
        step, T = (table.work.of_equal_stages(m, seconds, split=split) for split in ("zb_h1" in self.schedules, False))
        return step < SLACK * self.below and T < SLACK * self.shortest[table.K]

    def _without_limit(self, table: StageTable, u: int, mesh: Mesh, equal: Parts) -> float:
        """Seconds of the fastest of the equal groups on this mesh if memory had no limit."""
        plain = table.at_least(u, mesh)
        if plain is None:
            return math.inf
        rows = [configuration("equal", table, name, [Stage(a, b, u) for a, b in parts], plain) for name, parts in equal]
        return min((row.seconds for row in rows if row is not None), default=math.inf)

    def _may_divide(self, table: StageTable, u: int) -> bool:
        """Whether a division with a stage on this sub-mesh may be the best."""
        work, m = table.work, table.cluster.submeshes[u].size
        return work.of_any_schedule(m) < ROOM * self.below and work.of_division(m) < ROOM * self.shortest[table.K]

    # -- the grid --

    def grid_points(self, table: StageTable) -> list[Configuration]:
        """The points of the grid that may be the best, with recomputation where nothing fits without."""
        if len(table.cluster.kinds) > 1:
            return []
        kind, below = table.cluster.kinds[0], self.below
        shapes = [point for point in grid_of(table) if has_room(table, point) and self._promising(table, point[0])]

        def way(point: Point, again: bool) -> Combination:
            """again: with recomputation."""
            mesh = kind.mesh(tuple(n for n in point[1:] if n > 1) or (1,))
            return Combination(mesh, again or table.recompute == "always", 0.0, "megatron" if point[2] > 1 else "data_parallel")

        def on(point: Point) -> int:
            return submesh(table, point[1] * point[2])

        def may_pay(point: Point) -> bool:
            """As far as is known, also from a plan of the same stages that is free to choose layouts."""
            pinned = way(point, again=False)
            known = [table.pinned_at_least(pinned), table.at_least(on(point), pinned.mesh)]
            rows = [grid_point(table, self.schedules, point, sums) for sums in known if sums is not None]
            return all(any(c.seconds < SLACK * below for c in of_point) for of_point in rows)

        def planned(points: Sequence[Point], again: bool) -> list[tuple[Point, list[Configuration]]]:
            ways = [way(point, again) for point in points]
            table.add_pinned(ways, [table.cluster.submeshes[on(point)] for point in points])
            done = [(point, table.pinned.get(pinned)) for point, pinned in zip(points, ways, strict=True)]
            return [(point, grid_point(table, self.schedules, point, sums)) for point, sums in done if sums is not None]

        kept, tight = planned([point for point in shapes if may_pay(point)], again=False), []
        for point, of_point in kept:
            hopeless = all(any(fixed > memory for fixed, memory in zip(c.static_bytes, c.memory)) for c in of_point)
            if table.training and table.recompute == "auto" and not any(c.fits for c in of_point) and not hopeless and may_pay(point):
                tight.append(point)
        return [c for _, of_point in [*kept, *planned(tight, again=True)] for c in of_point]
