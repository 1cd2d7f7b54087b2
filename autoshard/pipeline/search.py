"""Which stages are planned, and the configurations of them.

1. On every sub-mesh, largest first, each layer is planned as if memory had no limit, unless no step that uses it can be faster than the
   best so far (`stage_bounds`), or was too slow with fewer and larger microbatches.
2. Where that does not fit, with prices on memory and with recomputation: first the sub-mesh and number of microbatches whose step would be
   the shortest without a limit, then the next, as long as one may be faster than the best that fits.
3. The division of the dynamic program over all that is planned, and the points of the grid that may be faster.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from autoshard.mesh import Mesh
from autoshard.pipeline.choices import Ways, configurations, equal_groups, grid_of, grid_point, has_room, of_division, submesh
from autoshard.pipeline.configurations import Combination, Configuration
from autoshard.pipeline.stage_planner import StagePlanner
from autoshard.planning import Progress

# a bound has to be this much above the best estimate: estimates come from plans of single layers; and a bound that is such an estimate
# itself, of plans without a price on memory, is up to 4 % above those with one, which hide more of their communication
ROOM, SLACK = 1.02, 1.1

Wanted = Callable[[Configuration], bool]
Point = tuple[int, int, int]  # of the grid: P, D, H


def choices_of(
    planners: Sequence[StagePlanner], schedules: Sequence[str], *, grid: bool, everything: bool = False,
    wanted: Wanted = lambda configuration: True, progress: Progress = lambda message, part: None,
) -> list[Configuration]:  # fmt: skip
    """The wanted configurations that may be the best, estimated; each planner is of another number of microbatches. everything: all that
    are wanted, however slow. progress: is called with what is done next, and the part that is done."""
    choices = Choices(schedules, wanted, everything)
    for n, planner in enumerate(planners):
        progress(f"planning layers for {planner.table.K} microbatches", 0.7 * n / len(planners))
        choices.plan_without_price(planner)
        choices.plan_with_prices(most=1)
    progress("planning layers where memory is short", 0.7)
    choices.plan_with_prices()
    for n, planner in enumerate(planners):
        progress(f"dividing the layers for {planner.table.K} microbatches", 0.8 + 0.2 * n / len(planners))
        if not choices.is_beyond(planner):
            choices.add(planner, "division", of_division(planner.table, schedules))
        if grid and not choices.is_beyond(planner):
            choices.add(planner, "grid", choices.grid_points(planner))
    return [c for some in choices.configurations.values() for c in some]


@dataclass(frozen=True, eq=False)
class Waiting:
    """A mesh of a sub-mesh on which a stage of its share of the layers doesn't fit without a price on memory."""

    planner: StagePlanner
    u: int
    mesh: Mesh
    equal: Ways  # of equal groups on the sub-mesh
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

    def is_beyond(self, planner: StagePlanner) -> bool:
        """Whether no pipeline of this number of microbatches can be faster, even with all work spread evenly over the devices."""
        return planner.bound >= ROOM * self.below

    def add(self, planner: StagePlanner, of: int | str, some: Sequence[Configuration]) -> None:
        """In place of what was known of the same sub-mesh."""
        self.configurations[planner.table.K, of] = wanted = [c for c in some if self.wanted(c)]
        if not self.everything:
            self.below = min([self.below, *(c.seconds for c in wanted if c.fits)])

    def plan_without_price(self, planner: StagePlanner) -> None:
        """As if memory had no limit, on every mesh that may pay so."""
        if self.is_beyond(planner):
            return
        table, cluster = planner.table, planner.table.cluster
        shapes = {P for P, *_ in grid_of(table)}
        for u, s in sorted(enumerate(cluster.submeshes), key=lambda pair: (-pair[1].size, pair[0])):
            P = cluster.num_devices // s.size
            equal = self._promising(planner, P) if P in shapes and submesh(table, s.size) == u else []
            if not equal and not self._may_divide(planner, s.size):
                continue
            meshes = [mesh for mesh in cluster.meshes(s) if self._may_pay(planner, u, mesh, equal)]
            if meshes:
                planner.plan_without_price(u, meshes)
                self._add_groups(planner, u, equal)
                short = [mesh for mesh in meshes if not table.share_fits(u, *table.on_mesh(u, mesh))]
                self.waiting += [Waiting(planner, u, mesh, equal, self._without_limit(planner, u, mesh, equal)) for mesh in short]

    def plan_with_prices(self, most: int | None = None) -> None:
        """With prices on memory and recomputation, the most promising first; most: so many of them."""
        self.waiting.sort(key=lambda w: (w.seconds, -w.planner.table.cluster.submeshes[w.u].size, w.planner.table.K))
        planned = 0
        while self.waiting and planned != most:
            if most and self.waiting[0].seconds >= self.below:
                break
            w = self.waiting.pop(0)
            if self._may_pay(w.planner, w.u, w.mesh, w.equal):
                w.planner.plan_with_prices(w.u, w.mesh, all_ways=self.everything)
                self._add_groups(w.planner, w.u, w.equal)
                planned += 1

    def _add_groups(self, planner: StagePlanner, u: int, equal: Ways) -> None:
        self.add(planner, u, rows := configurations("equal", planner.table, equal))
        if not self.everything:
            divisions = [c for c in rows if c.fits and c.schedule != "interleaved_1f1b" and self.wanted(c)]
            self.shortest[planner.table.K] = min([self.shortest[planner.table.K], *(c.bottleneck_seconds for c in divisions)])

    def _promising(self, planner: StagePlanner, P: int) -> Ways:
        """The schedules and parts of P equal groups that may be faster than the best."""
        ways, work = equal_groups(planner.table, self.schedules, P), planner.work
        return [(name, parts) for name, parts in ways if work.of_equal_groups(parts, P) < ROOM * self.below]

    def _may_pay(self, planner: StagePlanner, u: int, mesh: Mesh, equal: Ways) -> bool:
        """Whether stages on this mesh may be part of the best, as far as is known of it: as if memory had no limit."""
        plain = planner.table.at_least(u, mesh)
        if plain is None or self._without_limit(planner, u, mesh, equal) < SLACK * self.below:
            return True
        m, seconds = planner.table.cluster.submeshes[u].size, float(plain.of_layers.sum())
        step, T = (planner.work.of_equal_stages(m, seconds, split=split) for split in ("zb_h1" in self.schedules, False))
        return step < SLACK * self.below and T < SLACK * self.shortest[planner.table.K]

    def _without_limit(self, planner: StagePlanner, u: int, mesh: Mesh, equal: Ways) -> float:
        """Seconds of the fastest of the equal groups on this mesh if memory had no limit."""
        plain = planner.table.at_least(u, mesh)
        rows = [] if plain is None else configurations("equal", planner.table, equal, plain)
        return min((row.seconds for row in rows), default=math.inf)

    def _may_divide(self, planner: StagePlanner, m: int) -> bool:
        """Whether a division with a stage on m devices may be the best."""
        work = planner.work
        return work.of_any_schedule(m) < ROOM * self.below and work.of_division(m) < ROOM * self.shortest[planner.table.K]

    def grid_points(self, planner: StagePlanner) -> list[Configuration]:
        """The points of the grid that may be the best, with recomputation where nothing fits without."""
        table, kind, below = planner.table, planner.table.cluster.kinds[0], self.below

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
            planner.plan_pinned([(on(point), pinned) for point, pinned in zip(points, ways)])
            done = [(point, table.pinned.get(pinned)) for point, pinned in zip(points, ways)]
            return [(point, grid_point(table, self.schedules, point, sums)) for point, sums in done if sums is not None]

        shapes = [point for point in grid_of(table) if has_room(table, point) and self._promising(planner, point[0])]
        kept, tight = planned([point for point in shapes if may_pay(point)], again=False), []
        for point, of_point in kept:
            hopeless = all(any(fixed > memory for fixed, memory in zip(c.static_bytes, c.memory)) for c in of_point)
            if table.ways == (False, True) and not any(c.fits for c in of_point) and not hopeless and may_pay(point):
                tight.append(point)
        return [c for _, of_point in [*kept, *planned(tight, again=True)] for c in of_point]
