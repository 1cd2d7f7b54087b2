"""Pipelines: the stages of a model, the devices of each, its layouts, the schedule and the number of microbatches, searched together.

for every K   graph     = capture_deep(model, inputs of one microbatch)       what a microbatch computes
              layers    = layers_of(graph)                                    where it can be cut
              table     = StageTable(...).plan()                              every stage, from plans of single layers
              division  = inter_op(table.seconds(), transfers, tiling, K)     stages and sub-meshes of least T
configurations                        that division, equal cuts, every data x tensor x pipeline; under every schedule, simulated
plan of the best                      its stages planned whole; again, while a configuration is estimated to be faster than it

What is returned is never slower, simulated, than any configuration that was looked at.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from autoshard.capture import capture_deep, in_turn
from autoshard.cost import OPTIMIZERS
from autoshard.cycles import no_search_for_cycles
from autoshard.pipeline.choices import choices_of, described, speed_ups
from autoshard.pipeline.configurations import Configuration, Option, fastest_first, in_flight
from autoshard.pipeline.interop import least_bottleneck
from autoshard.pipeline.layers import layers_of
from autoshard.pipeline.pipeline_record import Pipeline
from autoshard.pipeline.schedules import SCHEDULES
from autoshard.pipeline.stage_plans import Job, options
from autoshard.pipeline.stage_tables import PRICES, StageTable
from autoshard.pipeline.submeshes import Cluster
from autoshard.planning.options import Infeasible, Stopwatch, checked_options

Progress = Callable[[str, float], None]
RECOMPUTE = ("auto", "never", "always")


@dataclass(frozen=True)
class PipelineOptions:
    """What a pipeline is searched under, beside the model and the cluster."""

    training: bool = True
    optimizer: str = "adamw"
    memory_limit: float | None = None  # bytes per device; None: the device's own memory
    microbatches: Sequence[int] | None = None  # numbers to try; None: the powers of two that divide the batch, 32 at most
    schedules: Sequence[str] = ("1f1b", "gpipe", "interleaved_1f1b", "zb_h1")
    layers: int | None = None  # into how many the model is clustered
    recompute: str = "auto"  # whether stages may compute their activations again: auto, never, always
    budgets: Sequence[float] = ()  # bytes per device: further limits to answer for
    grid: bool = True  # look at data x tensor x pipeline with fixed layouts too
    witness: bool = False

    def __post_init__(self) -> None:
        if self.optimizer not in OPTIMIZERS:
            raise ValueError(f"unknown optimizer {self.optimizer!r}; known are {', '.join(OPTIMIZERS)}")
        if self.recompute not in RECOMPUTE:
            raise ValueError(f"recompute is {self.recompute!r}; expected {', '.join(RECOMPUTE)}")
        if not self.schedules or any(name not in SCHEDULES for name in self.schedules):
            raise ValueError(f"schedules is {list(self.schedules)!r}; expected some of {', '.join(SCHEDULES)}")
        for limit in (self.memory_limit, *self.budgets):
            if limit is not None and (isinstance(limit, bool) or not isinstance(limit, (int, float)) or not limit > 0):
                raise ValueError(f"a memory limit is {limit!r}; expected a positive number of bytes per device")
        for count in self.microbatches or ():
            if isinstance(count, bool) or not isinstance(count, int) or count < 1:
                raise ValueError(f"microbatches has {count!r}; expected whole numbers of 1 or more")


@in_turn
def pipeline(
    model: torch.nn.Module,
    example_inputs: Any,
    cluster: Cluster,
    *,
    executor: Executor | None = None,
    progress: Progress | None = None,
    assumptions: Mapping | None = None,
    **given: Any,
) -> Pipeline:
    """The fastest pipeline for one step of `model` over `cluster`; one stage over all devices is one, too.

    example_inputs: those of the whole batch, which is dim 0 of the first tensor and of all others of that length. executor: any
    concurrent.futures.Executor to plan stages in (processes, Dask, Ray); the answer doesn't depend on it. given: the fields of
    `PipelineOptions`. ValueError on bad input, `Infeasible` where nothing fits: it says which constraint to relax, and how far.

        pipeline(module, (tokens, targets), Cluster.of(16), memory_limit=80e9).stages
    """
    options_ = checked_options(PipelineOptions, given)
    if not isinstance(cluster, Cluster):
        raise ValueError(f"cluster is {type(cluster).__name__}; expected a Cluster, for example Cluster.of(16, devices_per_node=8)")
    if not isinstance(model, torch.nn.Module):
        raise ValueError(f"model is {type(model).__name__}; expected a torch.nn.Module")
    search = _Search(model, example_inputs, cluster, options_, executor, progress)
    return replace(search.answer(), assumptions={**search.assumptions(), **(assumptions or {})})


def batch_of(example_inputs: Any) -> int:
    """The length of dim 0 of the first tensor."""
    for leaf in pytree.tree_leaves(example_inputs):
        if isinstance(leaf, torch.Tensor) and leaf.dim():
            return int(leaf.shape[0])
    raise ValueError("the example inputs hold no tensor with a dim, so there is no batch to split into microbatches")


def microbatch(example_inputs: Any, count: int) -> Any:
    """The inputs of one of `count` microbatches: the first part of every tensor whose dim 0 is the batch."""
    batch = batch_of(example_inputs)
    if batch % count:
        fitting = [k for k in range(1, batch + 1) if batch % k == 0]
        said = ", ".join(map(str, fitting[:12]))
        raise ValueError(f"a batch of {batch} has no {count} equal microbatches; take one of {said}, or another batch")

    def part(leaf: Any) -> Any:
        is_batch = isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and leaf.shape[0] == batch
        return leaf[: batch // count] if is_batch else leaf

    return pytree.tree_map(part, example_inputs)


class Planners:
    """Runs jobs, each different one once, here or in an executor."""

    def __init__(self, executor: Executor | None):
        self.executor = executor
        self.known: dict[tuple, tuple[Option, ...]] = {}

    def run(self, jobs: Sequence[Job]) -> list[tuple[Option, ...]]:
        new = {job.key: job for job in jobs if job.key not in self.known}
        answers = map(options, new.values()) if self.executor is None else self.executor.map(options, new.values())
        for key, answer in zip(new, answers, strict=True):
            self.known[key] = answer
        return [self.known[job.key] for job in jobs]


class _Search:
    """One search. The tables of each K are kept: the best configuration's stages come from them."""

    def __init__(self, model: torch.nn.Module, inputs: Any, cluster: Cluster, given: PipelineOptions, executor: Executor | None,
                 progress: Progress | None):  # fmt: skip
        self.model, self.inputs, self.cluster, self.options = model, inputs, cluster, given
        self.planners = Planners(executor)
        self.watch = Stopwatch(progress)
        self.tables: dict[int, StageTable] = {}
        self.bounds: dict[int, float] = {}  # seconds, by K
        self.captures: dict[str, str] = {}
        self.tight: set[int] = set()  # sub-meshes on which memory decided for an earlier K

    def answer(self) -> Pipeline:
        counts = self._counts()
        found: list[Configuration] = []
        for n, K in enumerate(counts):
            with self.watch.phase("capture", f"capturing {K} microbatches", 0.05 + 0.75 * n / len(counts)):
                table = self._table(K)
            with self.watch.phase("plan", f"planning layers for {K} microbatches", 0.1 + 0.75 * n / len(counts)):
                least = min((c.seconds for c in found if c.fits), default=math.inf)
                if self._beyond(table, least):
                    continue
                self.tight = table.plan(self.tight)
            with self.watch.phase("divide", f"dividing into stages for {K} microbatches", 0.8 * (n + 1) / len(counts)):
                found += choices_of(table, self.options.schedules, grid=self.options.grid)
        with self.watch.phase("finish", "planning whole stages", 0.85):
            best, found = self._settled(found)
            if best is None:
                raise self._nothing_fits()
            budgets = self._budgets()
        with self.watch.phase("describe", "writing the pipeline", 0.95):
            return self._pipeline(best, found, budgets)

    def _counts(self) -> list[int]:
        """The numbers of microbatches, those near the number of devices first: they are most often the best."""
        batch, given = batch_of(self.inputs), self.options.microbatches
        if given:
            counts = list(dict.fromkeys(given))
        else:
            counts = [k for k in (1, 2, 4, 8, 16, 32) if batch % k == 0]
        for count in counts:
            microbatch(self.inputs, count)  # refuses what the batch can't be cut into
        return sorted(counts, key=lambda k: (abs(math.log2(k / self.cluster.num_devices)), k))

    @no_search_for_cycles()
    def _table(self, K: int) -> StageTable:
        inputs = microbatch(self.inputs, K)
        graph, depth = capture_deep(self.model, inputs, training=self.options.training, witness=self.options.witness)
        self.captures = depth.noted
        given = self.options
        table = StageTable(
            self.cluster, layers_of(graph, given.layers), K,
            optimizer=given.optimizer, limit=given.memory_limit, recompute=given.recompute, run=self.planners.run,
        )  # fmt: skip
        self.tables[K] = table
        return table

    def _beyond(self, table: StageTable, least: float) -> bool:
        """Whether no pipeline of so many microbatches can be faster: not even with all work spread evenly over the devices."""
        self.bounds[table.K] = table.K * table.work_seconds() / self.cluster.num_devices
        return self.bounds[table.K] >= 1.02 * least  # least is an estimate, from plans of single layers

    def _settled(self, found: list[Configuration]) -> tuple[Configuration | None, list[Configuration]]:
        """The best whose stages are planned whole, once no estimate is below it, and all configurations with what became of them."""
        waiting = fastest_first(found)
        done = [c for c in found if not c.fits]
        best: Configuration | None = None
        while waiting and (best is None or waiting[0].seconds < best.seconds):
            whole = self._whole(waiting.pop(0))
            done.append(whole)
            if whole.fits and (best is None or whole.seconds < best.seconds):
                best = whole
        return best, [*done, *waiting]

    def _whole(self, estimate: Configuration) -> Configuration:
        """The configuration with every stage planned as one program; where it does not fit, with a higher price on memory."""
        table = self.tables[estimate.microbatches]
        held = in_flight(estimate.order)
        chunks = estimate.order.chunks
        jobs = []
        for part, way, q in zip(estimate.parts, estimate.ways, held):
            jobs.append(table.whole_job(part.first, part.last, way, (way.price,), q))
        planned = self.planners.run(jobs)
        chosen = []
        for v, (job, answers) in enumerate(zip(jobs, planned)):
            limit = estimate.memory[v % estimate.groups] / chunks
            one = answers[0] if answers else None
            dearer = [p for p in (*PRICES, 1.0, 10.0) if p > job.prices[0]]
            while (one is None or one.bytes(held[v]) > limit) and dearer and not job.pins:
                (again,) = self.planners.run([replace(job, prices=(dearer.pop(0),))])
                one = again[0] if again else one
            if one is None:  # its pins forbid each other
                return replace(estimate, memory=(0.0,) * estimate.groups, exact=True)
            exchange = table.exchange_seconds(estimate.parts[v])
            chosen.append(replace(one, once=one.once + exchange))
        return replace(estimate, options=tuple(chosen), exact=True)

    # -- what is said --

    def _pipeline(self, best: Configuration, found: Sequence[Configuration], budgets: Sequence[dict]) -> Pipeline:
        fitting = fastest_first(found)
        others = sorted((c for c in found if not c.fits), key=lambda c: (c.groups, c.microbatches, c.seconds))
        rows = [best.row(), *(c.row() for c in [*fitting, *others] if c is not best)]
        bound = min([*self.bounds.values(), best.seconds])
        return Pipeline(
            seconds=best.seconds,
            bound=bound,
            peak_bytes=max(best.run.peak_bytes),
            bubble=best.run.bubble,
            exposed_communication=best.exposed_communication,
            schedule=best.schedule,
            microbatches=best.microbatches,
            way=best.way,
            stages=described(best, self.tables[best.microbatches]),
            configurations=tuple(rows),
            speed_up=speed_ups(self.cluster, [t for t in self.tables.values() if t.is_planned], best),
            budgets=tuple(budgets),
            seconds_spent=self.watch.seconds()["cpu"],
        )

    def assumptions(self) -> dict[str, Any]:
        kinds = [
            {"nodes": k.nodes, "devices": k.devices, "device": k.mesh((1,)).device.name, "intra_node_bandwidth": k.intra_node_bandwidth,
             "inter_node_bandwidth": k.inter_node_bandwidth, "memory": self.options.memory_limit or k.memory}
            for k in self.cluster.kinds
        ]  # fmt: skip
        layers = next(iter(self.tables.values())).layers
        return {
            "cluster": kinds, "training": self.options.training, "optimizer": self.options.optimizer, "recompute": self.options.recompute,
            "layers": layers.count, "batch": batch_of(self.inputs), "microbatches": sorted(self.tables), **self.captures,
            "schedules": list(self.options.schedules),
        }  # fmt: skip

    def _budgets(self) -> list[dict]:
        """Under each further limit: the best of the same searches."""
        rows = []
        for limit in self.options.budgets:
            found: list[Configuration] = []
            for table in [t for t in self.tables.values() if t.is_planned]:
                found += choices_of(table.under(limit), self.options.schedules, grid=False)
            best = next(iter(fastest_first(found)), None)
            row = {"memory_bytes": limit, "seconds": None, "stages": None, "microbatches": None, "schedule": None, "peak_bytes": None}
            if best is not None:
                seen = best.row()
                row |= {"seconds": best.seconds, "stages": best.groups, **{k: seen[k] for k in ("microbatches", "schedule", "peak_bytes")}}
            rows.append(row)
        return rows

    def _nothing_fits(self) -> Infeasible:
        """Which constraint to relax: the memory limit and how far, recomputation, microbatches or devices."""
        limit = max(table.memory(s) for table in self.tables.values() for s in self.cluster.submeshes)
        needs: dict[int, float] = {}
        for K, table in self.tables.items():
            if table.is_planned:
                needs[K] = least_bottleneck(table.least_bytes(), self.cluster.tiling)
        K = min(needs, key=lambda k: (needs[k], k))
        table, words = self.tables[K], []
        words.append(f"raise the memory limit to {_gb(needs[K])} (with {K} microbatches)")
        if self.options.recompute == "never" and table.training:
            again = table.with_recompute()
            need = least_bottleneck(again.least_bytes(), self.cluster.tiling)
            words.append(f"allow recomputation, which needs {_gb(need)}")
        largest = batch_of(self.inputs)
        if K == max(needs) and K < largest:
            words.append(f"take more microbatches (up to {largest})")
        words.append("or add devices")
        said = f"no pipeline fits in {_gb(limit)} per device on {self.cluster.num_devices} devices: {', '.join(words)}"
        return Infeasible(said, (needs[K], needs[K]))


def _gb(size: float) -> str:
    return f"{size / 1e9:.2f} GB" if size < math.inf else "no size"
