"""Plans the single units of layers, and adds every stage's sums to a StageTable.

Equal units (equal programs: `StageProgram.signature`) are planned once per mesh, recomputation and price of memory.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from autoshard.mesh import Mesh
from autoshard.pipeline.configurations import Combination, StageOption
from autoshard.pipeline.stage_bounds import StepWork
from autoshard.pipeline.stage_division import Stage
from autoshard.pipeline.stage_plans import Job
from autoshard.pipeline.stage_programs import StageProgram, stage_program
from autoshard.pipeline.stage_tables import StageTable, Sums

PRICES = (0.0, 0.03, 0.3)  # of a byte, in units of its seconds over the slowest axis; at 0.3 everything is sharded that can be

RunJobs = Callable[[Sequence[Job]], list[tuple[StageOption, ...]]]
Request = tuple[int, Combination, tuple[float, ...]]  # sub-mesh, how its stages are planned, under which prices


@dataclass(eq=False)
class StagePlanner:
    """Fills one table. run: plans jobs, equal ones once."""

    table: StageTable
    run: RunJobs

    @cached_property
    def units(self) -> dict[bool, list[StageProgram]]:
        """The programs of the single units, with recomputation and without."""
        table, layers = self.table, self.table.layers.units
        single = [stage_program(layers, c, c + 1) for c in range(layers.count)]
        again = table.recompute != "never" and table.training
        return {False: single, True: [program.recomputed() for program in single] if again else single}

    @cached_property
    def work(self) -> StepWork:
        """Lower bounds on the layers' seconds on one device of the fastest kind: m devices take no less than an m-th of them."""
        table, cluster = self.table, self.table.cluster
        ones = [u for u, s in enumerate(cluster.submeshes) if s.size == 1]
        self._add([(u, Combination(cluster.meshes(cluster.submeshes[u])[0], False, 0.0), (0.0,)) for u in ones])
        rows = [{name: np.diagonal(part, 1) for name, part in table.sums[u][0].parts.items()} for u in ones]
        bound, forward = (np.min([row[name] for row in rows], axis=0) for name in ("bound", "forward"))
        weight = np.max([row["weight"] for row in rows], axis=0)
        return StepWork(bound, forward, weight, table.K, cluster.num_devices, tuple(s.size for s in cluster.submeshes))

    @property
    def bound(self) -> float:
        """Seconds: no pipeline of K microbatches takes less, even with all work spread evenly over the devices."""
        return self.table.K * float(self.work.seconds.sum()) / self.table.cluster.num_devices

    def with_recompute(self) -> StageTable:
        """The same model with recomputation allowed, planned."""
        other = StagePlanner(replace(self.table, recompute="always", sums=[], known=set(), pinned={}, larger=()), self.run)
        other.plan()
        return other.table

    def plan(self) -> None:
        for u in range(len(self.table.sums)):
            self.plan_on(u)

    def plan_on(self, u: int) -> None:
        """Plans every layer on the meshes of one sub-mesh, where memory is short also with prices on it and with recomputation."""
        meshes = self.table.cluster.meshes(self.table.cluster.submeshes[u])
        self.plan_without_price(u, meshes)
        for mesh in meshes:
            if not self.table.share_fits(u, *self.table.on_mesh(u, mesh)):
                self.plan_with_prices(u, mesh, all_ways=True)

    def plan_without_price(self, u: int, meshes: Sequence[Mesh]) -> None:
        """Plans every layer as if memory had no limit."""
        self._add([(u, Combination(mesh, self.table.ways[0], 0.0), (0.0,)) for mesh in meshes])
        self.table.known.add(u)

    def plan_with_prices(self, u: int, mesh: Mesh, *, all_ways: bool = False) -> None:
        """Plans every layer with prices on memory, and with recomputation unless a stage with its share of the layers fits without, and is
        faster than one that does half of the forward pass again. all_ways: with recomputation in any case."""
        table, (first, *others) = self.table, self.table.ways
        self._add([(u, Combination(mesh, first, 0.0), PRICES)])
        kept = table.plain(u, mesh)
        if others and kept is not None:
            again = kept.of_layers.sum() + self.work.forward.sum() / table.cluster.submeshes[u].size / 2
            fast = [sums for sums in table.on_mesh(u, mesh) if sums.of_layers.sum() <= again]
            if all_ways or not table.share_fits(u, *fast):
                self._add([(u, Combination(mesh, way, 0.0), PRICES) for way in others])

    def plan_pinned(self, wanted: Sequence[tuple[int, Combination]]) -> None:
        for sums in self._planned([(u, way, (0.0,)) for u, way in wanted]):
            self.table.pinned |= {one.combination: one for one in sums}

    def stage_job(self, part: Stage, way: Combination, in_flight: int, halved: bool) -> Job:
        program = stage_program(self.table.layers, part.first, part.last, recompute=way.recompute, halved=halved)
        return replace(self._job(program, way, (way.price,), in_flight), layouts=True, halved=halved)

    def _add(self, wanted: Sequence[Request]) -> None:
        requests = []
        for u, way, prices in wanted:
            known = {sums.combination for sums in self.table.sums[u]}
            useful = prices if self.table.cluster.submeshes[u].size > 1 else (0.0,)  # on one device there is only one layout
            if new := tuple(price for price in useful if replace(way, price=price) not in known):
                requests.append((u, way, new))
        for (u, _, _), sums in zip(requests, self._planned(requests)):
            self.table.sums[u] += sums

    def _planned(self, requests: Sequence[Request]) -> list[list[Sums]]:
        """Per request the sums under each price; none where pins exclude each other."""
        jobs = []
        for u, way, prices in requests:
            # with stages as large as this one everywhere
            most = max(1, min(self.table.K, self.table.cluster.num_devices // self.table.cluster.submeshes[u].size))
            in_flight = 1 if way.pins else (most + 1) // 2
            jobs += [self._job(program, way, prices, in_flight) for program in self.units[way.recompute]]
        answers, planned = iter(self.run(jobs)), []
        for u, way, prices in requests:
            per_unit = [next(answers) for _ in self.units[way.recompute]]
            complete = all(len(options) == len(prices) for options in per_unit)
            by_price = zip(prices, zip(*per_unit)) if complete else ()
            s = self.table.cluster.submeshes[u]
            planned.append([self.table.summed(replace(way, price=price), options, s) for price, options in by_price])
        return planned

    def _job(self, program: StageProgram, way: Combination, prices: tuple[float, ...], in_flight: int) -> Job:
        table = self.table
        return Job(program.graph, program.signature, way.mesh, table.K, in_flight, table.optimizer, prices, way.pins, way.recompute)
