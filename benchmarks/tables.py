"""Embedding tables: the slowest device of our plans against the bound, the published knapsack with greedy packing, and torchrec's planner.

    python benchmarks/tables.py [DATA] [--json] [--sizes 50x8,200x16,500x16,2000x64] [--seeds 3] [--knapsack] [--exact 300]

DATA: dp_proposals.json, instances with the published proposals (default tests/data/tables/dp_proposals.json).

Instances are random: ragged options of every sharding, sizes over three and a half decades, with and without host memory. Memory comes in
two families. `least`: what the tables need at least (the smallest memory at which packing them by size succeeds) is 50 %, 80 %, 100 % of
what there is. `fastest`: the devices have 50 %, 80 %, 100 % of what the plan without a limit takes; host memory is there.
Everybody plans the same numbers: torchrec's proposers and partitioner get them as ShardingOptions, and its performance model rates.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from pathlib import Path

import numpy as np

sys.path[0] = str(Path(__file__).parent.parent)  # where benchmarks/ and tests/ lie

from autoshard.tables import Option, dp_proposals  # noqa: E402
from autoshard.tables.arrays import Devices  # noqa: E402
from autoshard.tables.plan import plan_options  # noqa: E402

SIZES = "50x8,50x16,200x8,200x16,500x16,500x64,2000x64"
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
        from benchmarks.tables_torchrec import ratings
    except ImportError:
        return {}
    return ratings(options, devices)


# -- tables of figures ---------------------------------------------------------------------------------------------------------------


def quality(sizes: list[tuple[int, int]], seeds: int, families: list[str], say, with_torchrec: int) -> list[dict]:
    rows = []
    for tables, devices in sizes:
        for family in families:
            for seed in range(seeds):
                options, limits = memories(tables, devices, seed, family)
                for share, hbm in limits.items():
                    say(f"{tables} x {devices} {family} {share} seed {seed}")
                    where = cluster(devices, hbm)
                    cpu, wall = time.process_time(), time.monotonic()
                    plan = plan_options(names(options), options, where)
                    seconds = {"cpu_seconds": time.process_time() - cpu, "wall_seconds": time.monotonic() - wall}
                    others = {"knapsack_greedy": knapsack_and_greedy(options, where)}
                    others |= torchrec_ratings(options, where) if tables <= with_torchrec else {}
                    ours = plan.slowest_device_seconds
                    rows.append(
                        {"tables": tables, "devices": devices, "family": family, "memory": share, "seed": seed, "status": plan.status,
                         "slowest_device_seconds": ours, "bound_seconds": plan.bound_seconds, "gap": plan.gap, **seconds,
                         "others": others, "worse_than": [name for name, other in others.items() if ours > other * (1 + 1e-9)],
                         "over_memory": any(d.hbm_bytes > hbm for d in plan.devices)}
                    )  # fmt: skip
    return rows


def summary(rows: list[dict]) -> list[dict]:
    """Per family and share of memory: median and largest gap, how often worse than another, how much better."""
    found = []
    for family, share in dict.fromkeys((row["family"], row["memory"]) for row in rows):
        some = [row for row in rows if (row["family"], row["memory"]) == (family, share)]
        gaps = [row["gap"] for row in some]
        better: dict[str, list[float]] = {}
        for row in some:
            for name, other in row["others"].items():
                better.setdefault(name, []).append(other / row["slowest_device_seconds"])
        found.append(
            {"family": family, "memory": share, "instances": len(some), "median_gap": statistics.median(gaps), "max_gap": max(gaps),
             "worse": sum(bool(row["worse_than"]) for row in some), "over_memory": sum(row["over_memory"] for row in some),
             "median_times_slower": {name: statistics.median(x) for name, x in better.items()},
             "no_plan": {name: sum(map(math.isinf, x)) for name, x in better.items()}}
        )  # fmt: skip
    return found


def knapsack_speed(say) -> list[dict]:
    """CPU seconds of dp_proposals and of a straight transcription in Python; the lists are compared."""
    from tests.helpers_tables import published

    dp_proposals([[1.0]], [[1.0]], 2)  # compiled
    rows = []
    for tables, devices in ((100, 8), (100, 128), (500, 8), (500, 32), (500, 128), (2000, 128)):
        say(f"knapsack {tables} x {devices}")
        rng, bins = np.random.default_rng(tables + devices), BINS * devices
        memory = [sorted(rng.uniform(0, 2.4 * bins / tables, rng.integers(2, 11)).tolist()) for _ in range(tables)]
        perf = [rng.uniform(1, 100, len(row)).tolist() for row in memory]
        start = time.process_time()
        ours = dp_proposals(memory, perf, bins)
        seconds = time.process_time() - start
        row = {"tables": tables, "devices": devices, "cpu_seconds": seconds, "proposals": len(ours)}
        if tables * devices <= 500 * 128:
            start = time.process_time()
            theirs = published(memory, perf, bins)
            row |= {"python_cpu_seconds": time.process_time() - start, "identical": ours == theirs}
            row["times_quicker"] = row["python_cpu_seconds"] / max(seconds, 1e-9)
        rows.append(row)
    return rows


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", nargs="?", default="tests/data/tables/dp_proposals.json")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--sizes", default=SIZES)
    parser.add_argument("--families", default="least,fastest")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--torchrec", type=int, default=200, help="most tables that torchrec's planners get")
    parser.add_argument("--no-speed", action="store_true", help="leave the knapsack's timing out")
    options = parser.parse_args(argv)
    path = Path(options.data)
    path = path / "tables" / "dp_proposals.json" if (path / "tables").is_dir() else path / "dp_proposals.json" if path.is_dir() else path
    items = json.loads(path.read_text())

    def say(what: str) -> None:
        print(what, file=sys.stderr, flush=True)

    same = [dp_proposals(item["memory_in_bins"], item["perf"], item["bins"]) == item["proposals"] for item in items]
    found: dict = {"published_instances": len(same), "identical": sum(same)}
    if not options.no_speed:
        found["knapsack"] = knapsack_speed(say)
    sizes = [tuple(map(int, size.split("x"))) for size in options.sizes.split(",") if size]
    found["plans"] = quality(sizes, options.seeds, options.families.split(","), say, options.torchrec)  # type: ignore[arg-type]
    found["summary"] = summary(found["plans"])
    print(json.dumps(_finite(found)) if options.json else "\n".join(text(found)))
    return 0


def _finite(value):
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def text(found: dict) -> list[str]:
    lines = [f"published instances: {found['identical']} of {found['published_instances']} identical", ""]
    for row in found.get("knapsack", []):
        times = f"{row['times_quicker']:6.1f} times quicker, identical {row['identical']}" if "times_quicker" in row else ""
        lines.append(f"knapsack {row['tables']:5d} x {row['devices']:3d}  {row['cpu_seconds']:8.3f} s  {times}")
    lines += ["", f"{'size':>10} {'family':8} {'mem':>5} {'status':9} {'ms':>9} {'bound':>9} {'gap':>7} {'CPU s':>6}  others' ms"]
    for row in found["plans"]:
        others = "  ".join(f"{name} {1e3 * x:.4g}" for name, x in row["others"].items())
        lines.append(
            f"{row['tables']:5d}x{row['devices']:<4d} {row['family']:8} {row['memory']:>5} {row['status']:9} "
            f"{1e3 * row['slowest_device_seconds']:9.4g} {1e3 * row['bound_seconds']:9.4g} {row['gap']:7.2%} "
            f"{row['cpu_seconds']:6.1f}  {others}" + (f"  WORSE THAN {', '.join(row['worse_than'])}" if row["worse_than"] else "")
        )
    lines.append("")
    for row in found["summary"]:
        slower = ", ".join(f"{name} {x:.3g} times" for name, x in row["median_times_slower"].items())
        lines.append(
            f"{row['family']:8} {row['memory']:>5}: {row['instances']} instances, median gap {row['median_gap']:.2%}, largest "
            f"{row['max_gap']:.2%}, worse than another {row['worse']}, over memory {row['over_memory']}; others slower: {slower}; "
            f"others without a plan: {row['no_plan']}"
        )
    return lines


if __name__ == "__main__":
    sys.exit(main())
