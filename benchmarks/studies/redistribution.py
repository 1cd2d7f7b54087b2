"""The study of redistribution routes; and the random problems that the tests use, too."""

from __future__ import annotations

import gc
import json
import math
import random
import statistics
import time
from collections.abc import Sequence
from functools import partial
from itertools import product
from typing import NamedTuple

from autoshard.layout import all_layouts, chunk_bounds
from autoshard.mesh import Mesh
from autoshard.relayout import (
    BlockLayout,
    BlockProblem,
    MeshPrices,
    astar,
    naive,
    order_of,
    priced,
    read_problem,
    to_placements,
)
from autoshard.relayout.blocks import CHUNKS, UNSHARDED, ceil_div, chunk_block, fits
from autoshard.routes import Routes
from benchmarks.studies import Row, Study
from benchmarks.tensorcraft import IdealPrices, memory_constrained

MESHES = {
    1: [(2,), (3,), (4,), (6,), (8,)],
    2: [(2, 2), (2, 3), (2, 4), (4, 2), (3, 4), (3, 3), (2, 8)],
    3: [(2, 2, 2), (2, 3, 2), (4, 2, 2), (2, 2, 3)],
    4: [(2, 2, 2, 2), (2, 3, 2, 2)],
}
dijkstra = partial(astar, most=10**9, heuristic=lambda *_: None)
SMALL = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 16, 24, 32)
LARGE = (8, 12, 16, 24, 31, 48, 64, 96, 100, 125, 128, 250, 256, 500, 512, 1000, 1021, 1024, 2048)


def random_problem(
    rng: random.Random,
    *,
    mesh: tuple[int, ...] | None = None,
    sizes=SMALL,
    most_axes=4,
    most_dims=4,
    cyclic=True,
    partial=True,
    ordered=True,
) -> BlockProblem:
    """Two random layouts of a random tensor. cyclic: block-cyclic dims too; ordered: axes in any order within a dim."""
    mesh = mesh or rng.choice(MESHES[rng.randint(1, most_axes)])
    shape = tuple(rng.choice(sizes) for _ in range(rng.randint(1, most_dims)))
    reduced = [a for a in range(len(mesh)) if partial and rng.random() < 0.15]
    source = _random_layout(rng, shape, mesh, tuple(reduced), cyclic, ordered)
    target = _random_layout(rng, shape, mesh, tuple(a for a in reduced if rng.random() < 0.3), cyclic, ordered)
    return BlockProblem(shape, mesh, source, target, itemsize=4)


def _random_layout(rng: random.Random, shape, mesh, partial, cyclic: bool, ordered: bool) -> BlockLayout:
    axes: list[list[int]] = [[] for _ in shape]
    for a in rng.sample(range(len(mesh)), len(mesh)) if ordered else range(len(mesh)):
        d = rng.randrange(-1, len(shape))
        if a not in partial and d >= 0 and math.prod(mesh[x] for x in axes[d]) * mesh[a] <= shape[d]:
            axes[d].append(a)
    blocks = []
    for size, some in zip(shape, axes):
        sizes = tuple(mesh[a] for a in some)
        n = math.prod(sizes)
        block = chunk_block(size, sizes) if some else UNSHARDED
        if some and cyclic:
            block = rng.choice([block, ceil_div(size, n), *(b for b in range(1, ceil_div(size, n) + 1) if fits(size, n, b))])
        blocks.append(block)
    return BlockLayout(tuple(map(tuple, axes)), tuple(blocks), partial)


# -- 1: the published problems -----------------------------------------------------------------------------------------------------


def published(item: dict) -> Row:
    """Our route beside the published planners' and the optimum of TensorCraft's own graph."""
    problem = read_problem(item)
    prices = IdealPrices(problem.mesh)
    route, seconds = _timed(astar, problem, prices, repeat=3)
    optimum = min(item["optimum"][key]["cost"] for key in ("head_limit", "seed_limit"))
    plans = {
        "ours": route.seconds, "dijkstra": dijkstra(problem, prices).seconds, "published optimum": optimum,
        "published run": item["tensorcraft"]["memconstrained_default"]["cost"],
        "reproduced run": memory_constrained(problem, prices).seconds, "naive": naive(problem, prices).seconds,
    }  # fmt: skip
    return {
        "between_elements": max([problem.elements(step.after) for step in route.steps[:-1]], default=0),
        "peak_elements": route.peak_elements, "limit_elements": problem.memory_limit(None, "resident"), "explored": route.explored,
        "cpu_seconds": seconds, "steps": ", ".join(step.collective for step in route.steps),
        "plans": {name: {"cost_seconds": cost} for name, cost in plans.items()},
    }  # fmt: skip


def totals(rows: list[Row]) -> Row:
    """Of the published problems: how many routes cost more or less than theirs, or exceed the limit."""
    rows = [row for row in rows if "published optimum" in row.get("plans", {})]
    if not rows:
        return {}
    cost = [{name: plan["cost_seconds"] for name, plan in row["plans"].items()} for row in rows]
    return {
        "more_expensive_than_published_optimum": sum(one["ours"] > one["published optimum"] * (1 + 1e-9) for one in cost),
        "cheaper_than_published_optimum": sum(one["ours"] < one["published optimum"] * (1 - 1e-9) for one in cost),
        "unequal_to_dijkstra": sum(not math.isclose(one["ours"], one["dijkstra"], rel_tol=1e-9) for one in cost),
        "above_the_limit": sum(row["peak_elements"] > row["limit_elements"] for row in rows),
        "median_cpu_seconds": statistics.median(row["cpu_seconds"] for row in rows),
        "max_cpu_seconds": max(row["cpu_seconds"] for row in rows),
    }


def _timed(planner, problem: BlockProblem, prices, repeat: int = 1, collect=gc.collect):
    """The route and the least CPU seconds of some runs, each on fresh objects."""
    best = math.inf
    for _ in range(repeat):
        collect()
        start = time.process_time()
        result = planner(problem, prices)
        best = min(best, time.process_time() - start)
    return result, best


def published_runs(problem: BlockProblem) -> dict:
    """The five runs that were published for problem 1, in seconds."""
    prices = IdealPrices(problem.mesh)
    layouts = [
        problem.source,
        BlockLayout(((), (), (0, 1), ()), (UNSHARDED, UNSHARDED, 100, UNSHARDED)),
        BlockLayout(((), (1,), (0,), ()), (UNSHARDED, 100, 200, UNSHARDED)),
        problem.target,
    ]
    kinds = ["all_to_all", "all_to_all", "change_block_size"]
    return {
        "naive": naive(problem, prices).seconds,
        "memory_constrained": memory_constrained(problem, prices).seconds,
        "depth 3": memory_constrained(problem, prices, max_depth=3).seconds,
        "top_k 1": memory_constrained(problem, prices, top_k=1).seconds,
        "its A*, three steps": sum(priced(problem, prices, kind, u, v).seconds for kind, u, v in zip(kinds, layouts, layouts[1:])),
    }


# -- 2: torch's planners -----------------------------------------------------------------------------------------------------------


LIMITS = {"default": 1.0, "2x": 2.0, "4x": 4.0, "none": math.inf}  # times the default, input and output of the larger end


def tensor_problem(rng: random.Random, ordered: bool = True) -> BlockProblem:
    """Two layouts, axes in any order, of a tensor of 1 M to 1 G elements: sizes are powers of two, odd, or anything."""
    mesh = rng.choice(MESHES[rng.randint(1, 4)])
    ndim, shape = rng.randint(1, 4), (0,)
    while not 2**20 <= math.prod(shape) <= 2**30:
        logs = [(rng.uniform(2, 30), rng.choice(("power of two", "odd", "any"))) for _ in range(ndim)]
        shape = tuple(2 ** round(k) if kind == "power of two" else int(2**k) | (kind == "odd") for k, kind in logs)
    layouts = [_random_layout(rng, shape, mesh, (), cyclic=False, ordered=ordered) for _ in range(2)]
    return BlockProblem(shape, mesh, *layouts, itemsize=4)


def left_to_right(rng: random.Random) -> BlockProblem:
    """As `tensor_problem`, axes from left to right in a dim: what torch's greedy planner can plan, all of it."""
    return tensor_problem(rng, ordered=False)


def small_problem(rng: random.Random) -> BlockProblem:
    """Any size from a few elements on, axes from left to right: latency decides most, and most plans of torch's are one step."""
    return random_problem(rng, sizes=LARGE, cyclic=False, partial=False, ordered=False)


def against_torch(number: int, seed: int, draw=tensor_problem, collect=gc.collect) -> dict:
    """Random block problems with DTensor's layouts, each under every limit: our route and torch's, priced alike."""
    rng = random.Random(seed)
    rows: list[Against] = []
    above, unproven, wrong, drawn, cpu = 0, 0, 0, 0, []
    while drawn < number:
        problem = draw(rng)
        if problem.same:
            continue
        drawn += 1
        mesh = Mesh.from_bandwidths(problem.mesh)
        prices = MeshPrices(mesh, problem.itemsize)
        least = least_seconds(problem, mesh)
        plans = {name: [priced(problem, prices, *step) for step in plan] for name, plan in torch_plans(problem).items()}
        collect()
        for name, times in LIMITS.items():
            limit = times * problem.memory_limit(None, "buffers")
            route, seconds = _timed(partial(astar, memory_limit=limit), problem, prices, collect=lambda: None)
            cpu.append(seconds)
            above += route.peak_elements > limit
            unproven += route.status != "optimal"
            wrong += least > route.seconds * (1 + 1e-9)
            for planner, steps in plans.items():
                theirs = sum(step.seconds for step in steps)
                fits = max(problem.elements(step.before) + problem.elements(step.after) for step in steps) <= limit
                rows.append(Against(name, planner, fits, theirs / route.seconds, theirs / least, len(problem.mesh)))
    within = [row for row in rows if row.fits]
    return {
        "problems": number,
        "dearer_than_torch_within_the_limit": sum(row.ratio < 1 - 1e-9 for row in within),
        "dearer_than_torch_beyond_the_limit": sum(row.ratio < 1 - 1e-9 for row in rows if not row.fits),
        "our_peak_above_the_limit": above,
        "not_proven_optimal": unproven,
        "bound_above_our_route": wrong,
        "by_limit": [
            {
                "limit": name,
                "planner": planner,
                "plans": len(some),
                "within_the_limit": len(kept),
                "geometric_mean_within_the_limit": _mean(kept),
                "that_no_route_can_exceed": _mean(kept, "most"),
                **{f"axes_{k}": _mean([row for row in kept if row.axes == k]) for k in sorted({row.axes for row in kept})},
            }  # fmt: skip
            for name in LIMITS
            for planner in ("greedy", "graph")
            if (some := [row for row in rows if (row.limit, row.planner) == (name, planner)])
            if (kept := [row for row in some if row.fits])
        ],
        "median_cpu_seconds": statistics.median(cpu),
        "max_cpu_seconds": max(cpu),
    }


class Against(NamedTuple):
    """One plan of torch's beside our route."""

    limit: str
    planner: str
    fits: bool  # it keeps the limit
    ratio: float  # how many times cheaper ours is
    most: float  # how many times cheaper a route could be
    axes: int


def _mean(rows: Sequence[Against], what: str = "ratio") -> float:
    return statistics.geometric_mean(getattr(row, what) for row in rows)


def least_seconds(problem: BlockProblem, mesh: Mesh) -> float:
    """No route takes less on a mesh of `Mesh.from_bandwidths`, whatever its steps.

    What a rank misses comes over its own links; what a node misses, once, over the node's; one round takes one latency. A rank that
    misses nothing writes what it needs.
    """
    missing = _most_missing(problem, ())
    if missing == 0:
        return problem.elements(problem.target) * problem.itemsize / mesh.device.memory_bandwidth
    fast = [axis for axis in mesh.axes if axis.shared_by == 1]
    slow = [axis for axis in mesh.axes if axis.shared_by > 1] if len(mesh.axes) > 1 else []
    speed = (fast[0].bandwidth if fast else 0.0) + (slow[0].device_bandwidth if slow else 0.0)
    of_node = _most_missing(problem, tuple(range(1, len(mesh.axes)))) if slow else 0
    latency = slow[0].latency if of_node else min(axis.latency for axis in mesh.axes)
    return latency + problem.itemsize * max(missing / speed, of_node / slow[0].bandwidth if slow else 0.0)


def _most_missing(problem: BlockProblem, inside: tuple[int, ...]) -> int:
    """The most elements that a group of ranks, which differ on the axes `inside`, needs and does not hold."""
    ranges = [range(1) if a in inside else range(n) for a, n in enumerate(problem.mesh)]
    most = 0
    for coordinate in product(*ranges):
        held, needed = ([_together(problem, layout, d, coordinate, inside) for d in range(len(problem.shape))] for layout in
                        (problem.source, problem.target))  # fmt: skip
        total = math.prod(sum(hi - lo for lo, hi in some) for some in needed)
        both = math.prod(
            sum(max(0, min(b, hi) - max(a, lo)) for a, b in has for lo, hi in wants) for has, wants in zip(held, needed, strict=True)
        )
        most = max(most, total - both)
    return most


def _together(problem: BlockProblem, layout: BlockLayout, d: int, coordinate, inside) -> list[tuple[int, int]]:
    """The intervals of a dim that the group holds."""
    axes, size = layout.axes[d], problem.shape[d]
    if not axes:
        return [(0, size)]
    sizes = tuple(problem.mesh[a] for a in axes)
    bounds = chunk_bounds(size, sizes) if layout.blocks[d] == CHUNKS else None
    found: list[tuple[int, int]] = []
    for at in product(*(range(problem.mesh[a]) if a in inside else (coordinate[a],) for a in axes)):
        part = 0
        for n, k in zip(sizes, at, strict=True):
            part = part * n + k
        lo, hi = (part * layout.blocks[d], (part + 1) * layout.blocks[d]) if bounds is None else bounds[part : part + 2]
        found.append((min(lo, size), min(hi, size)))
    return found


def torch_plans(problem: BlockProblem) -> dict[str, list[tuple[str, BlockLayout, BlockLayout]]]:
    """(collective, before, after) of each step of torch's greedy and graph planner."""
    import torch
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta
    from torch.distributed.tensor._redistribute import DTensorRedistributePlanner

    mesh = DeviceMesh("cpu", torch.arange(math.prod(problem.mesh)).reshape(problem.mesh), _init_backend=False, _rank=0)
    meta = TensorMeta(torch.Size(problem.shape), torch.empty(problem.shape, device="meta").stride(), torch.float32)
    layouts = (problem.source, problem.target)
    orders = [tuple(ShardOrderEntry(d, axes) for d, axes in order_of(layout).items()) for layout in layouts]
    ends = [
        DTensorSpec(mesh, to_placements(layout, len(problem.mesh)), tensor_meta=meta, shard_order=order)
        for layout, order in zip(layouts, orders)
    ]
    planner = DTensorRedistributePlanner(mesh, meta)
    plans = {"graph": planner.generate_graph_based_transform_infos(*ends, tuple(problem.shape))}
    if all(axes == tuple(sorted(axes)) for layout in layouts for axes in layout.axes):  # greedy knows no order but left to right
        plans["greedy"] = planner.generate_greedy_transform_infos(*ends)
    return {name: _as_steps(problem, infos) for name, infos in plans.items()}


def _as_steps(problem: BlockProblem, infos) -> list[tuple[str, BlockLayout, BlockLayout]]:
    axes, layout, steps = [list(some) for some in problem.source.axes], problem.source, []
    for info in infos:
        old, new = info.src_dst_placements
        kind = {(1, 1): "all_to_all", (1, 0): "all_gather", (0, 1): "split"}[old.is_shard(), new.is_shard()]
        if old.is_shard():
            assert axes[old.dim][-1] == info.mesh_dim, "torch moves the minor axis only"
            axes[old.dim].pop()
        if new.is_shard():
            axes[new.dim].append(info.mesh_dim)
        cuts = [tuple(some) for some in axes]
        blocks = [chunk_block(s, tuple(problem.mesh[a] for a in some)) if some else UNSHARDED for s, some in zip(problem.shape, cuts)]
        after = BlockLayout(tuple(cuts), tuple(blocks))
        steps.append((kind, layout, after))
        layout = after
    assert layout == problem.target, f"torch's plan ends in {layout}, not in {problem.target}"
    return steps


# -- 3: A* against Dijkstra --------------------------------------------------------------------------------------------------------


def exact(number: int, seed: int) -> dict:
    """Random problems, block-cyclic, uneven and partial ones included, with both prices, with and without a limit."""
    rng = random.Random(seed)
    unequal, seconds, uneven, infeasible = 0, {"astar": 0.0, "dijkstra": 0.0}, 0, 0
    for i in range(number):
        problem = random_problem(rng, most_axes=3, most_dims=3)
        prices, count, limit = conditions(rng, problem, i)
        answers = []
        for name, planner in (("astar", astar), ("dijkstra", dijkstra)):
            start = time.process_time()
            answers.append(planner(problem, prices, limit, count=count))
            seconds[name] += time.process_time() - start
        ours, theirs = answers
        unequal += ours.status != theirs.status or not math.isclose(ours.seconds, theirs.seconds, rel_tol=1e-9)
        infeasible += ours.status == "infeasible"
        cuts = [(s, a, b) for x in (problem.source, problem.target) for s, a, b in zip(problem.shape, x.axes, x.blocks) if a]
        uneven += any(b == CHUNKS or s % (b * math.prod(problem.mesh[x] for x in a)) for s, a, b in cuts)
    counts = {"problems": number, "unequal": unequal, "uneven": uneven, "infeasible": infeasible}
    return {**counts, **{f"{name}_cpu_seconds": cpu for name, cpu in seconds.items()}}


def conditions(rng: random.Random, problem: BlockProblem, i: int):
    """(prices, what is counted, limit): every combination comes in turn."""
    links = {"intra_node_bandwidth": rng.choice([3e6, 3e9, 300e9]), "inter_node_bandwidth": rng.choice([1e6, 1e9, 400e9])}
    prices = MeshPrices(Mesh.from_bandwidths(problem.mesh, **links), problem.itemsize) if i % 2 else IdealPrices(problem.mesh)
    count = ("resident", "buffers")[i // 2 % 2]
    least = problem.memory_limit(None, count)
    return prices, count, (None, math.inf, int(1.5 * least))[i // 4 % 3]


# -- 5: an edge of a plan ----------------------------------------------------------------------------------------------------------


def edges(number: int) -> dict:
    """Seconds of pricing one new tensor from each of its layouts to each, on a 2-axis mesh."""
    mesh = Mesh.from_bandwidths((2, 4))
    shapes = [(8 * (i + 1), 1024, 768) for i in range(number)]
    layouts = all_layouts(shapes[0], mesh)
    routes = Routes(mesh)
    routes.table((8, 8, 8), 4, layouts, layouts)
    gc.collect()
    start = time.process_time()
    for shape in shapes:
        routes.table(shape, 4, layouts, layouts)
    return {"signatures": number, "layouts": len(layouts), "cpu_seconds_each": (time.process_time() - start) / number}


# -- the study -------------------------------------------------------------------------------------------------------------------------


def redistribution(measure, given) -> Row:
    """Redistribution routes: TensorCraft's problems, random ones against torch's own planners, A* against Dijkstra, one edge of a plan.

    DATA is a file like tests/data/redistribution/problems.json (or a folder that holds redistribution/problems.json): problems with what
    TensorCraft's planners answered and the optimum of its own graph. Against torch: random problems under memory limits from the default
    (input and output of the larger end) to none; means are of torch's cost over ours, and over a bound on all routes, of its plans within
    the limit. CPU seconds of one process; the garbage of earlier problems is collected before each measurement.
    """
    return measure()


DRAWS = {"any order": tensor_problem, "left to right": left_to_right, "small, left to right": small_problem}


def cases(given) -> dict:
    path = given.data / "redistribution" / "problems.json" if given.data.is_dir() else given.data
    items = json.loads(path.read_text())["problems"]
    first = [read_problem(item) for item in items if item["problem"]["id"] == "seed_p1"]
    torchs = DRAWS.items() if given.random else ()
    return {
        **{read_problem(item).name: partial(published, item) for item in items},
        **({"published runs": lambda: as_plans(published_runs(first[0]))} if first else {}),
        "edges": partial(edges, 200),
        **{f"against torch, {name}": partial(limits_of_torch, given.random, given.seed, draw) for name, draw in torchs},
        **({"exact": partial(exact, given.exact, given.seed)} if given.exact else {}),
    }


def as_plans(costs: dict[str, float]) -> Row:
    return {"plans": {name: {"cost_seconds": cost} for name, cost in costs.items()}}


def limits_of_torch(number: int, seed: int, draw) -> Row:
    found = against_torch(number, seed, draw)
    return {**found, "plans": {f"limit {one['limit']}, {one['planner']}": one for one in found.pop("by_limit")}}


REDISTRIBUTION = Study(
    cases=cases, measure=redistribution, totals=totals, data="tests/data/redistribution/problems.json", alone=False,
    options={
        "--random": {"type": int, "default": 300, "help": "problems against torch's planners"},
        "--exact": {"type": int, "default": 1000, "help": "problems of A* against Dijkstra"},
        "--seed": {"type": int, "default": 0},
    },
)  # fmt: skip
