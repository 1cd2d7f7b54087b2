"""Studies of plans under a memory limit: how far the search comes, the whole frontier, and recomputation."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from functools import partial

import torch

from autoshard import Mesh, api
from autoshard.capture import capture, capture_deep
from autoshard.cli.model import load_model
from autoshard.graph import checkpointed
from autoshard.planning.instance import extended_from, formulate_for, layers_of_nodes
from autoshard.planning.options import Options
from autoshard.problem import without_limit
from autoshard.simulate.timeline import timeline_of_solution
from autoshard.solution import replay
from autoshard.solvers import solve
from autoshard.solvers.settle import reduce_and_settle
from autoshard.strategies import candidates
from benchmarks.studies import Row, Study
from benchmarks.studies.peaks import TOLERANCE, measured_peak_on_device

ROUNDING = 1e-9  # relative
LARGE = {"--large": {"action": "store_true", "help": "Llama-3 8B and 70B in 80 GB instead of the small cases: some minutes"}}
LLAMA_8B, LLAMA_70B, GPT2 = "llama.py:llama3_8b", "llama.py:llama3_70b", "gpt2.py:small"


def loaded(case: Row, given) -> tuple[tuple, Mesh]:
    """(module, example inputs), mesh"""
    return load_model(f"{given.data}/{case['model']}", case.get("settings", {})), Mesh.from_bandwidths(case["mesh"])


# -- prices first ----------------------------------------------------------------------------------------------------------------------

LIMITED_CASES: dict[str, Row] = {  # share: of what the fastest plan holds; most: the largest gap of `with`, relative
    "gpt2-12 2x4": {"model": GPT2, "settings": {"batch": 512, "vocab": 50304}, "mesh": (2, 4), "share": 0.97, "most": 1e-3},
    "bert-4 8": {"model": "bert.py:base", "settings": {"layers": 4, "vocab": 30528}, "mesh": (8,), "share": 0.85, "most": 0.01},
    "llama-12 8x8": {"model": LLAMA_8B, "settings": {"layers": 12}, "mesh": (8, 8), "recompute": 3, "share": 0.8, "most": 2e-3},
}
LIMITED_LARGE: dict[str, Row] = {
    "llama3-70b 8x8": {"model": LLAMA_70B, "mesh": (8, 8), "recompute": 20, "limit_bytes": 80e9, "most": 0.005},
}
NEAR = 0.01  # relative
EVEN = 1e-3  # relative: gaps that differ by less say nothing
SECONDS, LARGE_SECONDS = 15.0, 60.0


@dataclass(frozen=True)
class Alone:
    """auto without the search over prices that comes first under a limit."""

    time_limit: float | None = None
    gap: float | None = None

    def run(self, problem, incumbent) -> None:
        reduce_and_settle(problem, incumbent)


def limited(case: Row, given) -> Row:
    """Plans under a memory limit that binds, with prices first and by branch and bound alone: the gap, and CPU seconds, from the same run.

    A case is a model, a mesh, blocks that are recomputed, and its limit: bytes per device, or a part of what its fastest plan holds. The
    same problem is solved twice from the same start: `with` as `plan` does (the solver auto), `without` by the second half of auto alone
    (autoshard/solvers/settle.py). Seconds are CPU seconds of the solver, and so is --time-limit; capture and formulation are left out.
    --large is Llama-3 70B on 8x8 with 20 of its 80 blocks recomputed, in 80 GB. near_at: when the answer was proven to be within 1 % of the
    best. A row fails where the bound of one is above the other's cost, where the gap of `with` is above what the case allows, or above that
    of `without` by more than 0.1 %.
    """
    run, problem, fastest = formulated(case, given)
    time_limit = given.time_limit or (LARGE_SECONDS if given.large else SECONDS)
    plans = {name: timed(run, problem, solver, time_limit) for name, solver in (("with", "auto"), ("without", Alone()))}
    sizes = {"nodes": len(problem.node_costs), "bytes_cells": sum(u.bytes.size for u in problem.usages)}
    return {**sizes, "limit_bytes": problem.usage_limit, "fastest_bytes": fastest, "plans": plans}


def formulated(case: Row, given):
    """What solves it, as `plan` does; the problem with its limit; and the bytes that its fastest plan holds, or None."""
    (module, example_inputs), mesh = loaded(case, given)
    graph, depth = capture_deep(module, example_inputs, training=True)
    blocks = case.get("recompute", 0)
    graph = checkpointed(graph, blocks)
    options = Options(training=True, memory_limit=case.get("limit_bytes"))
    made = formulate_for(graph, candidates(graph, mesh), mesh, options)
    few = None if depth.shallow is None or blocks else extended_from(depth.shallow, made, options)
    run = partial(solve if few is None else few.solve, preference=made.preference, homes=layers_of_nodes(made))
    if "share" not in case:
        return run, made.problem, None
    free = run(without_limit(made.problem), gap=ROUNDING)
    return run, replace(made.problem, usage_limit=case["share"] * free.peak), free.peak


def timed(run, problem, solver, time_limit: float) -> Row:
    """What is known when time is up, and when that was found. The clock is that of the processor."""
    heard: list[tuple[float, float]] = []  # CPU seconds, gap

    def hear(cost: float, bound: float) -> None:
        if math.isfinite(cost) and math.isfinite(bound):
            heard.append((time.process_time() - began, (cost - bound) / abs(cost)))

    began = time.process_time()
    answer = run(problem, solver=solver, time_limit=time_limit, progress=hear, clock=time.process_time)
    seconds = time.process_time() - began
    known = {"cost_seconds": answer.cost, "bound_seconds": answer.bound, "gap": answer.gap}
    near = next((seconds for seconds, gap in heard if gap <= NEAR), None)
    return {
        "status": answer.status.value, **{key: value if math.isfinite(value) else None for key, value in known.items()},
        "peak_bytes": answer.peak, "cpu_seconds": seconds, "near_at_seconds": near,
    }  # fmt: skip


def above(bound: float | None, cost: float | None) -> bool:
    """Whether a bound contradicts a cost."""
    return bound is not None and cost is not None and bound > cost * (1 + ROUNDING)


def limited_judged(row: Row, case: Row, given=None) -> Row:
    ours, alone = row["plans"]["with"], row["plans"]["without"]
    contradiction = any(above(a["bound_seconds"], b["cost_seconds"]) for a, b in ((ours, alone), (alone, ours)))
    gap, other = (math.inf if one["gap"] is None else one["gap"] for one in (ours, alone))
    fits = ours["peak_bytes"] is not None and ours["peak_bytes"] <= row["limit_bytes"]
    ok = fits and not contradiction and gap <= case["most"] and gap <= other + EVEN
    return {**row, "most": case["most"], "contradiction": contradiction, "ok": ok}


LIMITED = Study(
    cases=lambda given: LIMITED_LARGE if given.large else LIMITED_CASES, measure=limited, judged=limited_judged,
    options={"--time-limit": {"type": float, "help": f"CPU seconds for each solve ({SECONDS:g}, with --large {LARGE_SECONDS:g})"}, **LARGE},
)  # fmt: skip


# -- the frontier ----------------------------------------------------------------------------------------------------------------------

FRONTIER_CASES: dict[str, Row] = {
    "gpt2-small 2x4": {"model": GPT2, "settings": {"batch": 512, "vocab": 50304}, "mesh": (2, 4), "limit": None},
    "llama3-8b 8x8": {"model": LLAMA_8B, "mesh": (8, 8), "limit": 60.0},
}
PROVEN = 1e-3  # relative


def frontier(case: Row, given) -> Row:
    """Memory against time with proof: one sweep of the price of memory, beside one plan per limit with a short time limit.

    Seconds are CPU seconds after the imports and with numba's functions compiled, capture and formulation included. plan: the naive way,
    `plan` with each point's memory as the limit and --time-limit seconds for the solver; `proven` counts those within the gap that the
    sweep promises (0.1 %). A row fails when fewer than --points are proven, when the sweep takes longer than its limit (60 CPU seconds for
    Llama-3 8B, the figure that was asked for), or when a plan beats a bound.
    """
    linear = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU())
    api.frontier(linear, (torch.zeros(8, 8),), Mesh.from_bandwidths((2,)), points=2)  # what is imported or compiled when first used
    model, mesh = loaded(case, given)
    began = time.process_time()
    found = api.frontier(*model, mesh, training=True, points=given.points, gap=PROVEN)
    row: Row = {"cpu_seconds": time.process_time() - began, "proven": len(found.proven), "phases": found.seconds["cpu"], "plans": {}}
    for k, (point, figures) in enumerate(zip(found.points, found.to_dict()["points"]), 1):
        row["plans"][f"point {k}"] = figures
        if not given.no_plans:
            row["plans"][f"plan {k}"] = one_plan(model, mesh, point.limit_bytes, given.time_limit)
    return row


def one_plan(model: tuple, mesh: Mesh, limit: float, time_limit: float) -> Row:
    """`plan` under the memory of a point, as it would be asked without a frontier."""
    began = time.process_time()
    try:
        plan = api.plan(*model, mesh, training=True, memory_limit=limit, time_limit=time_limit, baselines=False)
        known = {"seconds": plan.cost, "bound_seconds": plan.bound, "gap": plan.gap, "status": plan.status}
    except api.Infeasible:
        known = {"seconds": None, "bound_seconds": None, "gap": None, "status": "none found"}
    return {**known, "plan_cpu_seconds": time.process_time() - began}


def frontier_judged(row: Row, case: Row, given) -> Row:
    points, plans = ([one for name, one in row["plans"].items() if name.startswith(kind)] for kind in ("point", "plan"))
    row = {**row, "limit_seconds": case["limit"], "plans_cpu_seconds": sum(plan["plan_cpu_seconds"] for plan in plans)}
    row["plans_proven"] = sum(plan["gap"] is not None and plan["gap"] <= PROVEN for plan in plans)
    row["contradictions"] = sum(
        above(point["bound_seconds"], plan["seconds"]) or above(plan["bound_seconds"], point["seconds"])
        for point, plan in zip(points, plans)
    )
    in_time = case["limit"] is None or row["cpu_seconds"] <= case["limit"]
    return {**row, "ok": row["proven"] >= given.points and in_time and not row["contradictions"]}


FRONTIER = Study(
    cases=lambda given: FRONTIER_CASES, measure=frontier, judged=frontier_judged,
    options={
        "--points": {"type": int, "default": 12}, "--time-limit": {"type": float, "default": 5.0},
        "--no-plans": {"action": "store_true", "help": "the sweep alone"},
    },
)  # fmt: skip


# -- recomputation ---------------------------------------------------------------------------------------------------------------------

RECOMPUTE_CASES: dict[str, Row] = {
    "gpt2-4 2x4": {"model": GPT2, "settings": {"layers": 4, "batch": 64, "seq": 1024, "vocab": 50304}, "mesh": (2, 4)},
    "llama-4 2x4": {"model": LLAMA_8B, "settings": {"layers": 4}, "mesh": (2, 4)},
    "bert-4 8": {"model": "bert.py:base", "settings": {"layers": 4, "vocab": 30528, "batch": 256}, "mesh": (8,)},
    "moe 8": {"model": "moe.py:moe", "mesh": (8,)},
    "mlp-6 8": {"model": "mlp.py:mlp", "settings": {"layers": 6, "batch": 65536}, "mesh": (8,)},
    "resnet18 8": {"model": "resnet.py:resnet18", "mesh": (8,)},
}
RECOMPUTE_LARGE: dict[str, Row] = {
    "llama3-8b 2x8": {"model": LLAMA_8B, "mesh": (2, 8), "limit_bytes": 80e9},
    "llama3-70b 8x8": {"model": LLAMA_70B, "mesh": (8, 8), "limit_bytes": 80e9},
}
GAP, BETTER = 0.01, 0.05


def recompute(case: Row, given) -> list[Row]:
    """Recomputation per tensor against whole blocks, under the same memory limits: seconds of a step, and the bytes that its program takes.

    A case is a model, a mesh and limits: parts of what the fastest plan holds. Each is planned with recompute="blocks" (the number of
    blocks that is cheapest) and with recompute="auto" (each saved value kept, recomputed or offloaded), both to 1 %. cost is what the plans
    minimise, simulated the end of their time line with overlap, measured the peak under torch's MemTracker of the program of rank 0,
    forward and backward, on fake tensors of a GPU; the CPU seconds are those of planning. A row fails where the step is slower than with
    blocks, by cost (beyond the 1 %), where the peak is more than 10 % from the measured one, or where it exceeds the limit. --large:
    Llama-3 8B on 2x8 and 70B on 8x8 in 80 GB, "auto" alone, which have to be within 1 %.
    """
    model, mesh = loaded(case, given)
    options = {"training": True, "baselines": False, "gap": GAP}
    limit = case.get("limit_bytes")
    if limit is not None:
        one = recomputing(model, mesh, {**options, "memory_limit": limit}, "auto", None)
        return [{"limit_bytes": limit, "plans": {"auto": one}}]
    graph = capture(*model, training=True)
    free = api.plan(*model, mesh, **options)
    rows = []
    for share in given.share:
        limited = {**options, "memory_limit": share * free.peak_bytes}
        plans = {way: recomputing(model, mesh, limited, way, graph) for way in ("blocks", "auto")}
        rows.append({"limit_bytes": limited["memory_limit"], "free_seconds": free.cost, "share": share, "plans": plans})
    return rows


def recomputing(model: tuple, mesh: Mesh, options: dict, way: str, graph) -> Row:
    began = time.process_time()
    try:
        solution = api.plan(*model, mesh, **options, time_limit=3000.0, recompute=way)
    except api.Infeasible:
        return {"status": "infeasible", "cpu_seconds": time.process_time() - began}
    chosen = solution.chosen
    row = {
        "status": solution.status, "cost_seconds": solution.cost, "bound_seconds": solution.bound, "gap": solution.gap,
        "peak_bytes": solution.peak_bytes, "blocks": solution.recompute, "recomputed": len(chosen.recomputed),
        "offloaded": len(chosen.offloaded), "cpu_seconds": time.process_time() - began,
    }  # fmt: skip
    if graph is not None:
        as_run = replay(solution, graph).checked()
        row |= {"simulated_seconds": timeline_of_solution(as_run, solution).seconds}
        row |= {"measured_bytes": measured_peak_on_device(as_run, solution)}
    return row


def recompute_judged(row: Row, case: Row, given) -> Row:
    """Whether a row is as it should be, and by how much "auto" is faster."""
    auto, blocks = row["plans"]["auto"], row["plans"].get("blocks")
    if blocks is None:
        return {**row, "ok": "cost_seconds" in auto and auto["gap"] <= GAP}
    if "cost_seconds" not in auto:
        return {**row, "faster": 0.0, "faster_simulated": 0.0, "ok": "cost_seconds" not in blocks}
    near = abs(auto["peak_bytes"] / auto["measured_bytes"] - 1) <= TOLERANCE
    if "cost_seconds" not in blocks:  # there is no plan at all with whole blocks
        return {**row, "faster": 1.0, "faster_simulated": 1.0, "ok": near}
    faster, simulated = (blocks[key] / auto[key] - 1 for key in ("cost_seconds", "simulated_seconds"))
    fits = auto["peak_bytes"] <= row["limit_bytes"]
    return {**row, "faster": faster, "faster_simulated": simulated, "ok": near and fits and faster >= -GAP}


def recompute_totals(rows: list[Row]) -> Row:
    better = sum(row.get("faster_simulated", 0.0) >= BETTER for row in rows)
    return {"limits": len(rows), "wrong": sum(not row["ok"] for row in rows), "faster_by_5_%_simulated": better}


RECOMPUTE = Study(
    cases=lambda given: RECOMPUTE_LARGE if given.large else RECOMPUTE_CASES, measure=recompute, judged=recompute_judged,
    totals=recompute_totals,
    options={
        "--share": {"nargs": "*", "type": float, "default": (0.85, 0.7, 0.55), "help": "parts of what the fastest plan holds"}, **LARGE,
    },
)  # fmt: skip
