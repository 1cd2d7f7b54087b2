"""The search for a pipeline: stages, the devices and layouts of each, the schedule and the number of microbatches, together.

for every K   graph     = capture_deep(model, inputs of one microbatch)       the program of a microbatch
              layers    = layers_of(graph)                                    a chain that can be divided into stages
              planner   = StagePlanner(StageTable(...))                       every stage, estimated from plans of single units
              division  = planner.table.division()                            stages and sub-meshes of least T
configurations                        that division, equal parts, every data x tensor x pipeline; simulated under every schedule (`search`)
the best configuration                each stage planned as one program; repeated while another configuration is estimated to be faster

The simulated seconds of the returned pipeline are at most those of every configuration that was considered.
"""

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from typing import Any

import torch

from autoshard.capture import Depth, capture_deep, in_turn, same_but_for_sizes
from autoshard.cycles import no_search_for_cycles
from autoshard.graph import Graph
from autoshard.options import PipelineOptions
from autoshard.pipeline.choices import CHUNKS, described, planned_before, speed_ups, ways_of
from autoshard.pipeline.configurations import Configuration, fastest_first, in_flight
from autoshard.pipeline.layers import layers_of
from autoshard.pipeline.microbatches import batch_of, microbatch
from autoshard.pipeline.search import choices_of
from autoshard.pipeline.stage_division import least_bottleneck
from autoshard.pipeline.stage_planner import PRICES, StagePlanner
from autoshard.pipeline.stage_plans import JobRunner
from autoshard.pipeline.stage_tables import StageTable
from autoshard.pipeline.submeshes import Cluster
from autoshard.planning import Infeasible, Progress, Stopwatch, bytes_text, checked_options
from autoshard.solution import Pipeline


@in_turn
def pipeline(
    model: torch.nn.Module,
    example_inputs: Any,
    cluster: Cluster,
    *,
    executor: Executor | None = None,
    progress: Progress | None = None,
    assumptions: Mapping | None = None,
    **options: Any,
) -> Pipeline:
    """`autoshard.plan` on a cluster; one stage over all devices is also a pipeline. `Infeasible` says which constraint to relax, and how
    far."""
    checked = checked_options(PipelineOptions, options)
    if not isinstance(cluster, Cluster):
        raise ValueError(f"cluster is {type(cluster).__name__}; expected a Cluster, for example Cluster.of(16, devices_per_node=8)")
    if not isinstance(model, torch.nn.Module):
        raise ValueError(f"model is {type(model).__name__}; expected a torch.nn.Module")
    if (checked.stages or 1) > cluster.num_devices:
        n = cluster.num_devices
        raise ValueError(f"stages is {checked.stages}, but the cluster has {n} devices; expected one or more for each stage")
    search = _Search(model, example_inputs, cluster, checked, executor, progress)
    return replace(search.answer(), assumptions={**search.assumptions(), **(assumptions or {})})


class _Search:
    """One search. The planner of each K is kept: the stages of the best configuration are planned with it."""

    def __init__(self, model: torch.nn.Module, inputs: Any, cluster: Cluster, options: PipelineOptions, executor: Executor | None,
                 progress: Progress | None):  # fmt: skip
        self.model, self.inputs, self.cluster, self.options = model, inputs, cluster, options
        self.jobs = JobRunner(executor)
        self.watch = Stopwatch(progress)
        self.planners: dict[int, StagePlanner] = {}  # by K
        self.captures: dict[str, str] = {}
        self.few: dict[int, Graph] = {}  # the graphs of few layers, by K
        self.tested: Depth | None = None  # of the last capture that was tiled

    def answer(self) -> Pipeline:
        counts, options = self._counts(), self.options
        for n, K in enumerate(counts):
            with self.watch.phase("capture", f"capturing {K} microbatches", 0.05 + 0.25 * n / len(counts)):
                self._capture(K)
        with self.watch.phase("plan", "planning layers", 0.3):
            configurations = choices_of(
                list(self.planners.values()), options.schedules, grid=options.grid, everything=bool(options.budgets),
                wanted=self._wanted,
                progress=lambda message, part: self.watch.say(message, 0.3 + 0.55 * part),
            )  # fmt: skip
        with self.watch.phase("finish", "planning the stages of the best", 0.85):
            best, configurations = self._settled(self._in_use(configurations))
            if best is None:
                raise self._nothing_fits(configurations)
            budgets = self._budgets()
        with self.watch.phase("describe", "writing the pipeline", 0.95):
            return self._pipeline(best, configurations, budgets)

    def _wanted(self, configuration: Configuration) -> bool:
        return self.options.stages in (None, configuration.groups)

    def _in_use(self, configurations: list[Configuration]) -> list[Configuration]:
        """With a number of stages asked for, only those that leave no device idle, where one of them fits: they can be run."""
        full = [c for c in configurations if sum(c.sizes) == self.cluster.num_devices]
        return full if self.options.stages is not None and any(c.fits for c in full) else configurations

    def _counts(self) -> list[int]:
        """The numbers of microbatches, 2 first and those far from it last: with few of them few stages can pay, so that little has to be
        planned, and the best of these leaves less to plan for the others."""
        batch = batch_of(self.inputs)
        counts = list(dict.fromkeys(self.options.microbatches or (k for k in (1, 2, 4, 8, 16, 32) if batch % k == 0)))
        for count in counts:
            microbatch(self.inputs, count)  # raises ValueError where the batch doesn't divide
        return sorted(counts, key=lambda k: (abs(math.log2(k / 2)), k))

    @no_search_for_cycles()
    def _capture(self, K: int) -> None:
        inputs = microbatch(self.inputs, K)
        options = self.options
        graph, depth = capture_deep(self.model, inputs, training=options.training, tested=self.tested)
        self.captures, self.tested = self.captures or depth.noted, depth if depth.tiled else self.tested
        few, layers = depth.few_layers or graph, layers_of(graph, options.layers)
        larger = [k for k in sorted(self.planners, reverse=True) if K % k == 0 and same_but_for_sizes(few, self.few[k])]
        tables = [self.planners[k].table for k in larger]
        table = StageTable(
            self.cluster, layers, K, options.optimizer, options.memory_limit, options.recompute, options.stages, options.unit_seconds,
            larger=[one for one in tables if one.layers.starts == layers.starts],
        )  # fmt: skip
        self.few[K], self.planners[K] = few, StagePlanner(table, self.jobs.run)

    def _settled(self, estimates: list[Configuration]) -> tuple[Configuration | None, list[Configuration]]:
        """The fastest configuration with planned stages, once no estimate is faster; and all configurations, planned or estimated."""
        waiting = fastest_first(estimates)
        done = [c for c in estimates if not c.fits]
        best: Configuration | None = None
        while waiting and (best is None or waiting[0].seconds < best.seconds):
            planned = self._planned(waiting.pop(0))
            done.append(planned)
            if planned.fits and (best is None or planned.seconds < best.seconds):
                best = planned
        return best, [*done, *waiting]

    def _planned(self, estimate: Configuration) -> Configuration:
        """The configuration with every stage planned as one program; where a stage does not fit, with a higher price on memory."""
        planner, held = self.planners[estimate.microbatches], in_flight(estimate.order)
        halved = estimate.order.splits_backward
        jobs = [planner.stage_job(*of, halved) for of in zip(estimate.parts, estimate.combinations, held)]
        chosen = []
        for v, (job, answers) in enumerate(zip(jobs, self.jobs.run(jobs))):
            limit = estimate.memory[v % estimate.groups] / estimate.order.chunks
            option = answers[0] if answers else None
            higher = [p for p in (*PRICES, 1.0, 10.0) if p > job.prices[0]]
            while (option is None or option.bytes(held[v]) > limit) and higher and not job.pins:
                (answers,) = self.jobs.run([replace(job, prices=(higher.pop(0),))])
                option = answers[0] if answers else option
            if option is None:  # its pins exclude each other
                return replace(estimate, memory=(0.0,) * estimate.groups, exact=True)
            part = estimate.parts[v]
            exchange = planner.table.exchange_seconds(self.cluster.submeshes[part.submesh])[part.first, part.last]
            chosen.append(replace(option, once=option.once + float(exchange)))
        return replace(estimate, options=tuple(chosen), exact=True)

    def _pipeline(self, best: Configuration, configurations: Sequence[Configuration], budgets: Sequence[dict]) -> Pipeline:
        fitting = fastest_first(configurations)
        others = sorted((c for c in configurations if not c.fits), key=lambda c: (c.groups, c.microbatches, c.seconds))
        rows = [best.row(), *(c.row() for c in [*fitting, *others] if c is not best)]
        bound = min([*(planner.bound for planner in self.planners.values()), best.seconds])
        stages, speed_up = described(best, self.planners[best.microbatches].table), speed_ups(self.cluster, self._with_plans(), best)
        return Pipeline(
            best.seconds, bound, max(best.run.peak_bytes), best.run.bubble, best.exposed_communication, best.schedule, best.microbatches,
            best.way, stages, tuple(rows), speed_up, tuple(budgets), seconds_spent=self.watch.seconds()["cpu"],
        )  # fmt: skip

    def assumptions(self) -> dict[str, Any]:
        kinds = [
            {"nodes": k.nodes, "devices": k.devices, "device": k.mesh((1,)).device.name, "intra_node_bandwidth": k.inside,
             "inter_node_bandwidth": k.inter_node_bandwidth, "memory": self.options.memory_limit or k.memory}
            for k in self.cluster.kinds
        ]  # fmt: skip
        layers = next(iter(self.planners.values())).table.layers
        return {
            "cluster": kinds, "training": self.options.training, "optimizer": self.options.optimizer, "recompute": self.options.recompute,
            "layers": layers.count, "batch": batch_of(self.inputs), "microbatches": sorted(self.planners), **self.captures,
            "schedules": list(self.options.schedules), "layers_asked": self.options.layers,
        }  # fmt: skip

    def _with_plans(self) -> list[StagePlanner]:
        """Those that planned stages on some sub-mesh."""
        return [planner for planner in self.planners.values() if planner.table.known]

    def _budgets(self) -> list[dict]:
        """The best configuration of the same tables under each further limit."""
        rows = []
        for limit in self.options.budgets:
            configurations: list[Configuration] = []
            for planner in self._with_plans():
                configurations += planned_before(replace(planner.table, limit=limit), self.options.schedules)
            best = next(iter(fastest_first([c for c in configurations if self._wanted(c)])), None)
            row = {"memory_bytes": limit, "seconds": None, "stages": None, "microbatches": None, "schedule": None, "peak_bytes": None}
            if best is not None:
                values = best.row()
                row |= {"stages": best.groups, **{k: values[k] for k in ("seconds", "microbatches", "schedule", "peak_bytes")}}
            rows.append(row)
        return rows

    def _nothing_fits(self, tried: Sequence[Configuration]) -> Infeasible:
        """Which constraint to relax: the schedules, or the memory limit and how far, recomputation, microbatches or devices."""
        asked, n = self.options.stages, self.cluster.num_devices
        layers = max(planner.table.layers.count for planner in self.planners.values())
        if (asked or 1) > layers:
            return Infeasible(f"stages is {asked}, but the program divides into {layers} layers; expected no more stages than layers")
        of_stages = "" if asked is None else f" of {asked} stage{'s' * (asked > 1)}"
        tables = [planner.table for planner in self._with_plans()]
        if not any(ways_of(table, self.options.schedules, asked) for table in tables):
            return Infeasible(
                f"interleaved_1f1b has no pipeline{of_stages} on {n} devices: it divides the program, which has {layers} layers, "
                f"into {CHUNKS} parts for each of 2 or more equal stages; expected another schedule, or another number of stages or devices"
            )
        limit = max(table.memory(s) for table in tables for s in self.cluster.submeshes)
        needs = {table.K: least_bottleneck(table.least_bytes(), self.cluster.tiling, asked) for table in tables}
        for K in (k for k in needs if needs[k] <= limit):  # estimates, of 1F1B: the stages as planned, or other schedules, need more
            needs[K] = min((max(c.run.peak_bytes) for c in tried if c.microbatches == K), default=math.inf)
        K, more = min(needs, key=lambda k: (needs[k], k)), "" if "1f1b" in self.options.schedules else " or more"
        words = [f"raise the memory limit to {_least(needs[K])}{more} (with {K} microbatch{'es' * (K > 1)})"]
        if needs[K] == math.inf:
            words = ["raise the memory limit"]
        if self.options.recompute == "never" and self.planners[K].table.training:
            again = least_bottleneck(self.planners[K].with_recompute().least_bytes(), self.cluster.tiling, asked)
            words.append(f"allow recomputation, which needs {_least(again)}{more}")
        largest = batch_of(self.inputs)
        if K == max(needs) and K < largest:
            words.append(f"take more microbatches (up to {largest})")
        words.append("or add devices")
        message = f"no pipeline{of_stages} fits in {bytes_text(limit)} per device on {n} devices: {', '.join(words)}"
        return Infeasible(message, None if more or needs[K] == math.inf else (needs[K], needs[K]))


def _least(size: float) -> str:
    return bytes_text(size, up=True) if size < math.inf else "no size"
