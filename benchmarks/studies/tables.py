"""The study of embedding tables."""

from __future__ import annotations

import json
import math
import statistics
import time

import numpy as np

from autoshard.tables import Option, dp_proposals
from autoshard.tables.arrays import Devices
from autoshard.tables.plan import plan_options
from benchmarks.studies import Row, Study
from tests.helpers_tables import published

PER_NODE = 8
BINS = 100  # per device


# -- instances -----------------------------------------------------------------------------------------------------------------------


def instance(tables: int, devices: int, seed: int, host: bool) -> list[list[Option]]:
    """Ragged options per table; seconds and bytes over several decades."""
    rng = np.random.default_rng([tables, devices, seed])
    found = []
    for _ in range(tables):
        size, seconds = float(np.round(10 ** rng.uniform(6, 9.5))), 10 ** rng.uniform(-5, -3)
        options = [Option("table_wise", (seconds,), (size,))]
        for k in (2, 4, 8):
            if rng.random() < 0.6:
                options.append(Option("column_wise", (seconds / k * (1 + rng.random() * 0.1 * k**0.5),) * k, (size / k,) * k))
        if rng.random() < 0.7:
            part = seconds / devices * rng.uniform(1, 2)
            options.append(Option("row_wise", (part,) * devices, (size / devices,) * devices, scope="mesh"))
        if size < 1e8 and rng.random() < 0.7:
            options.append(Option("data_parallel", (0.3 * seconds / devices,) * devices, (size,) * devices, scope="mesh"))
        if devices > PER_NODE and rng.random() < 0.6:
            part = seconds / PER_NODE * rng.uniform(1, 1.5)
            options.append(Option("table_row_wise", (part,) * PER_NODE, (size / PER_NODE,) * PER_NODE, scope="node"))
        if host:
            slower = rng.uniform(4, 10)
            options.append(Option("table_wise", (seconds * slower,), (0.0,), (size,), memory="host"))
            if rng.random() < 0.5:
                options.append(Option("table_wise", (seconds * slower / 3,), (0.2 * size,), (size,), memory="host_cached"))
        found.append(options)
    return found


def cluster(devices: int, hbm: float) -> Devices:
    per_node = min(PER_NODE, devices)
    return Devices(per_node, np.arange(devices), np.full(devices, float(hbm)), np.full(devices, math.inf))


def least_memory(options: list[list[Option]], devices: int) -> float:
    """The smallest memory at which the options of least bytes, largest shards first, each on the emptiest device, all lie."""
    used, shards = np.zeros(devices), []
    for some in options:
        best = min(some, key=lambda o: sum(o.hbm_bytes))
        if best.scope == "mesh":
            used += best.hbm_bytes
        else:  # shards of a node part are packed one by one: near enough
            shards += best.hbm_bytes
    for x in sorted(shards, reverse=True):
        used[int(np.argmin(used))] += x
    return float(used.max())


def memories(tables: int, devices: int, seed: int, family: str) -> tuple[list[list[Option]], dict[str, float]]:
    """The instance and the bytes per device for each share."""
    options = instance(tables, devices, seed, host=family == "fastest")
    if family == "least":
        least = least_memory(options, devices)
        return options, {f"{share:.0%}": least / share for share in (0.5, 0.8, 1.0)}
    plan = plan_options(names(options), options, cluster(devices, math.inf), effort=0.05)
    fastest = max(d.hbm_bytes for d in plan.devices)
    return options, {f"{share:.0%}": fastest * share for share in (0.5, 0.8, 1.0)}


def names(options: list) -> list[str]:
    return [f"t{i}" for i in range(len(options))]


# -- the others ----------------------------------------------------------------------------------------------------------------------


def greedy(chosen: list[Option], devices: Devices) -> float:
    """Slowest device when shards are laid by falling memory on the least loaded device where they fit; inf where one doesn't."""
    num, per_node = devices.num, devices.per_node
    seconds, used = np.zeros(num), np.zeros(num)
    parts = []
    for option in chosen:
        size = {"device": 1, "node": per_node, "mesh": num}[option.scope]
        s, h = np.array(option.seconds).reshape(-1, size), np.array(option.hbm_bytes).reshape(-1, size)
        if size == num:
            seconds, used = seconds + s[0], used + h[0]
        else:
            parts += [(sum(option.hbm_bytes), size, a, b) for a, b in zip(s, h)]
    limit = devices.hbm_limit[0]
    for _, size, s, h in sorted(parts, key=lambda part: -part[0]):
        at_seconds, at_used = seconds.reshape(-1, size), used.reshape(-1, size)
        fits = (at_used + h <= limit).all(axis=1)
        if not fits.any():
            return math.inf
        place = int(np.argmin(np.where(fits, at_seconds.max(axis=1), np.inf)))
        at_seconds[place] += s
        at_used[place] += h
    return float(seconds.max()) if used.max() <= limit else math.inf


def knapsack_and_greedy(options: list[list[Option]], devices: Devices) -> float:
    """The best of the published proposals, each packed; of many tables so many proposals that it ends."""
    bins = BINS * devices.num
    size = devices.hbm_limit.sum() / bins
    order = [sorted(range(len(some)), key=lambda j: sum(some[j].hbm_bytes)) for some in options]
    memory = [[sum(some[j].hbm_bytes) / size for j in o] for some, o in zip(options, order)]
    perf = [[sum(some[j].seconds) for j in o] for some, o in zip(options, order)]
    best = greedy([some[o[0]] for some, o in zip(options, order)], devices)
    proposals = dp_proposals(memory, perf, bins)
    for proposal in proposals[:: max(len(proposals) * len(options) // 40_000, 1)]:
        best = min(best, greedy([some[o[j]] for some, o, j in zip(options, order, proposal)], devices))
    return best


def torchrec_ratings(options: list[list[Option]], devices: Devices) -> dict[str, float]:
    """Its default proposers and its knapsack, each with its greedy partitioner, rated by its performance model; {} without the extra."""
    try:
        from benchmarks.studies.tables_torchrec import ratings
    except ImportError:
        return {}
    return ratings(options, devices)


# -- the study -------------------------------------------------------------------------------------------------------------------------


def tables(case: tuple, given) -> Row | list[Row]:
    """Embedding tables: the slowest device of our plans against the bound, the published knapsack with greedy packing, and torchrec's
    planner.

    DATA: dp_proposals.json, instances with the published proposals (or a folder that holds it); how many proposals of each are identical.
    Instances are random: ragged options of every sharding, sizes over three and a half decades, with and without host memory. Memory comes
    in two families. `least`: what the tables need at least (the smallest memory at which packing them by size succeeds) is 50 %, 80 %, 100
    % of what there is. `fastest`: the devices have 50 %, 80 %, 100 % of what the plan without a limit takes; host memory is there.
    Everybody plans the same numbers: torchrec's proposers and partitioner get them as ShardingOptions, and its performance model rates.
    """
    measure, *what = case
    return measure(*what)


def quality(tables: int, devices: int, family: str, seed: int, with_torchrec: int) -> list[Row]:
    """A row for each share of memory."""
    options, limits = memories(tables, devices, seed, family)
    rows = []
    for share, hbm in limits.items():
        where = cluster(devices, hbm)
        began = time.process_time()
        plan = plan_options(names(options), options, where)
        seconds, ours = time.process_time() - began, plan.slowest_device_seconds
        others = {"knapsack_greedy": knapsack_and_greedy(options, where)}
        others |= torchrec_ratings(options, where) if tables <= with_torchrec else {}
        worse = [name for name, other in others.items() if ours > other * (1 + 1e-9)]
        row: Row = {"family": family, "memory": share, "status": plan.status, "gap": plan.gap, "cpu_seconds": seconds}
        row |= {"over_memory": any(d.hbm_bytes > hbm for d in plan.devices), "worse_than": ", ".join(worse)}
        steps = {"ours": ours, "bound": plan.bound_seconds, **others}
        rows.append({**row, "plans": {name: {"slowest_device_seconds": s if math.isfinite(s) else None} for name, s in steps.items()}})
    return rows


def knapsack(tables: int, devices: int) -> Row:
    """CPU seconds of dp_proposals and of a straight transcription in Python; the lists are compared."""
    dp_proposals([[1.0]], [[1.0]], 2)  # compiled
    rng, bins = np.random.default_rng(tables + devices), BINS * devices
    memory = [sorted(rng.uniform(0, 2.4 * bins / tables, rng.integers(2, 11)).tolist()) for _ in range(tables)]
    perf = [rng.uniform(1, 100, len(row)).tolist() for row in memory]
    start = time.process_time()
    ours = dp_proposals(memory, perf, bins)
    seconds = time.process_time() - start
    row: Row = {"proposals": len(ours), "cpu_seconds": seconds}
    if tables * devices <= 500 * 128:
        start = time.process_time()
        theirs = published(memory, perf, bins)
        spent = time.process_time() - start
        row |= {"python_cpu_seconds": spent, "identical": ours == theirs, "times_quicker": spent / max(seconds, 1e-9)}
    return row


def identical(items: list[dict]) -> Row:
    same = [dp_proposals(item["memory_in_bins"], item["perf"], item["bins"]) == item["proposals"] for item in items]
    return {"instances": len(same), "identical": sum(same)}


def cases(given) -> dict[str, tuple]:
    path = given.data
    path = path / "tables" / "dp_proposals.json" if (path / "tables").is_dir() else path / "dp_proposals.json" if path.is_dir() else path
    timed = () if given.no_speed else ((100, 8), (100, 128), (500, 8), (500, 32), (500, 128), (2000, 128))
    planned = [
        (tables, devices, family, seed)
        for tables, devices in (map(int, size.split("x")) for size in given.sizes.split(",") if size)
        for family in given.families.split(",")
        for seed in range(given.seeds)
    ]
    return {
        "published instances": (identical, json.loads(path.read_text())),
        **{f"knapsack {tables}x{devices}": (knapsack, tables, devices) for tables, devices in timed},
        **{f"{n}x{d} {family} {seed}": (quality, n, d, family, seed, given.torchrec) for n, d, family, seed in planned},
    }


def totals(rows: list[Row]) -> Row:
    """Per family and share of memory: median and largest gap, how often worse than another, how much better."""
    rows = [row for row in rows if "family" in row]
    found: Row = {}
    for family, share in dict.fromkeys((row["family"], row["memory"]) for row in rows):
        some = [row for row in rows if (row["family"], row["memory"]) == (family, share)]
        gaps, slower = [row["gap"] for row in some], {}
        for row in some:
            ours, _, *others = ((name, plan["slowest_device_seconds"]) for name, plan in row["plans"].items())
            for name, other in others:
                slower.setdefault(name, []).append(math.inf if other is None else other / ours[1])
        figures: Row = {"instances": len(some), "median_gap": statistics.median(gaps), "max_gap": max(gaps)}
        figures |= {"worse": sum(bool(row["worse_than"]) for row in some), "over_memory": sum(row["over_memory"] for row in some)}
        figures |= {f"{name}_times_slower": statistics.median(ratios) for name, ratios in slower.items()}
        figures |= {f"{name}_without_a_plan": sum(map(math.isinf, ratios)) for name, ratios in slower.items()}
        found |= {f"{family} {share} {key}": value for key, value in figures.items()}
    return found


TABLES = Study(
    cases=cases, measure=tables, totals=totals, data="tests/data/tables/dp_proposals.json", alone=False,
    options={
        "--sizes": {"default": "50x8,50x16,200x8,200x16,500x16,500x64,2000x64"}, "--families": {"default": "least,fastest"},
        "--seeds": {"type": int, "default": 3},
        "--torchrec": {"type": int, "default": 200, "help": "most tables that torchrec's planners get"},
        "--no-speed": {"action": "store_true", "help": "leave the knapsack's timing out"},
    },
)  # fmt: skip
