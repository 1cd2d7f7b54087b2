"""Routes and every single move, carried out: on simulated ranks and on gloo."""

import math
import random
import socket
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.testing._internal.distributed import multi_threaded_pg

from autoshard.layout import R, S, why_illegal
from autoshard.mesh import Mesh
from autoshard.relayout import BlockLayout, BlockProblem, MeshPrices, astar, from_placements
from autoshard.relayout.blocks import why_not
from autoshard.relayout.execute import BlockGroups, shard_blocks, simulate
from autoshard.relayout.packing import packing
from autoshard.relayout.planners import priced, route_of, space_of
from autoshard.routes import Routes
from benchmarks.studies.redistribution import random_problem
from benchmarks.tensorcraft import IdealPrices, memory_constrained

MESHES = {8: [(8,), (2, 4), (4, 2), (2, 2, 2)], 12: [(12,), (3, 4), (2, 6), (2, 2, 3), (3, 2, 2)]}


def whole_of(problem):
    return torch.arange(math.prod(problem.shape), dtype=torch.float32).reshape(problem.shape)


def prices_of(problem, i):
    slow = {"intra_node_bandwidth": 3e5, "inter_node_bandwidth": 4e5}  # bytes count
    fast = {"intra_node_latency": 1e-9, "inter_node_latency": 1e-9}
    choices = [IdealPrices(problem.mesh), IdealPrices(problem.mesh, alpha=1e-9), MeshPrices(Mesh.from_bandwidths(problem.mesh), 4)]
    return [*choices, MeshPrices(Mesh.from_bandwidths(problem.mesh, **slow, **fast), 4)][i % 4]


def reduced(parts, layout, mesh):
    """The parts of ranks, summed over the layout's Partial axes."""
    totals = {}
    for rank, part in enumerate(parts):
        coordinate = [int(c) for c in torch.unravel_index(torch.tensor(rank), mesh)]
        key = tuple(0 if a in layout.partial else c for a, c in enumerate(coordinate))
        totals[key] = totals[key] + part if key in totals else part
    return list(totals.values())


def assert_delivers(route):
    """Every rank ends with exactly the target's elements, and sends at most, in each step, the bytes that the step says."""
    problem, whole = route.problem, whole_of(route.problem)
    parts, sent = simulate(route, shard_blocks(whole, problem.source, problem.mesh))
    expected = shard_blocks(whole, problem.target, problem.mesh)
    assert [x.shape for x in parts] == [x.shape for x in expected]
    ours, theirs = (reduced(x, problem.target, problem.mesh) for x in (parts, expected))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)), problem
    assert [max(some) for some in sent] == [step.bytes for step in route.steps], problem


@pytest.mark.parametrize("world", [8, pytest.param(12, marks=pytest.mark.slow)])
def test_random_routes_deliver_and_send_the_models_volume(world):
    rng, seen, cyclic = random.Random(world), Counter(), 0
    for i in range(100):
        problem = random_problem(rng, mesh=rng.choice(MESHES[world]), partial=i % 3 == 0)
        route = astar(problem, prices_of(problem, i), most=400)
        assert_delivers(route)
        seen.update(step.collective for step in route.steps)
        ends = zip(problem.shape * 2, problem.source.axes + problem.target.axes, problem.source.blocks + problem.target.blocks)
        cyclic += any(axes and 0 < b * math.prod(problem.mesh[a] for a in axes) < s for s, axes, b in ends)
    assert len(seen) >= 7 and cyclic > 20


@pytest.mark.parametrize("world", [8, pytest.param(12, marks=pytest.mark.slow)])
def test_every_single_move_delivers(world):
    rng, seen = random.Random(world), Counter()
    for i in range(24):
        problem = random_problem(rng, mesh=rng.choice(MESHES[world]), sizes=(3, 4, 5, 8, 12, 13, 16, 24), most_dims=3, partial=i % 2 == 0)
        prices = IdealPrices(problem.mesh) if i % 4 else MeshPrices(Mesh.from_bandwidths(problem.mesh), 4)
        space, _ = space_of(problem, prices)
        found = list(space.steps(space.source))
        assert all(why_not(problem.shape, space.layout(step.state), problem.mesh) is None for step in found)
        for kind in sorted({step.kind for step in found}):
            alike = [step for step in found if step.kind == kind]
            for step in rng.sample(alike, min(4, len(alike))):
                after = space.layout(step.state)
                one = BlockProblem(problem.shape, problem.mesh, space.layout(space.source), after, 4)
                alone = priced(one, prices, kind, one.source, after)
                assert alone.seconds == pytest.approx(step.seconds, rel=1e-12)
                assert_delivers(route_of(one, [alone], "feasible", 0.0, "buffers", 0))
                seen[kind] += 1
    assert set(seen) == {
        "split", "all_gather", "all_to_all", "permute", "change_block_size", "all_reduce", "reduce_scatter", "exchange"
    }  # fmt: skip


def test_an_exchange_whose_group_is_too_small_is_refused():
    ends = BlockLayout(((0,), (1,)), (4, 4)), BlockLayout(((1,), (0,)), (4, 4))
    problem = BlockProblem((8, 8), (2, 2), *ends, 4)
    step = priced(problem, MeshPrices(Mesh.from_bandwidths((2, 2)), 4), "exchange", *ends)
    assert step.axes == (0, 1) and len(packing((8, 8), (2, 2), step, 1).group) == 4
    with pytest.raises(AssertionError, match="not in its group"):
        packing((8, 8), (2, 2), replace(step, axes=(1,)), 1)


@pytest.mark.parametrize("op", ["sum", "avg", "max", "min"])
def test_reductions_reduce_as_their_op_says(op):
    source, target = BlockLayout(((), (1,)), (-1, 2), (0,), op), BlockLayout(((0,), (1,)), (2, 2))
    problem = BlockProblem((4, 4), (2, 2), source, target, 4)
    parts = [torch.arange(8.0).reshape(4, 2) * (rank + 1) for rank in range(4)]
    route = astar(problem, MeshPrices(Mesh.from_bandwidths((2, 2)), 4))
    found, _ = simulate(route, parts)
    for column in (0, 1):
        pair = torch.stack([parts[column], parts[2 + column]])
        both = {"sum": pair.sum(0), "avg": pair.mean(0), "max": pair.amax(0), "min": pair.amin(0)}[op]
        assert torch.equal(torch.cat([found[column], found[2 + column]]), both)


def test_published_routes_deliver_too():
    rng = random.Random(2)
    for _ in range(20):
        problem = random_problem(rng, mesh=(2, 2, 2), sizes=(8, 16, 24), partial=False)
        route = memory_constrained(problem, IdealPrices(problem.mesh), node_limit=100)
        if route.status == "feasible":
            assert_delivers(route)


# ---- uneven DTensor layouts in Routes


@pytest.mark.parametrize("sizes, shape", [((2, 2), (5, 7)), ((2, 3), (10, 4)), ((2, 2, 2), (9, 3))])
def test_uneven_routes_deliver_on_torchs_chunks(sizes, shape):
    mesh = Mesh.from_bandwidths(sizes)
    routes, rng = Routes(mesh), random.Random(0)
    for _ in range(40):
        source, target = (tuple(rng.choice([S(0), S(1), R]) for _ in sizes) for _ in range(2))
        route = routes.route(shape, 4, source, target)
        ends = [from_placements(shape, layout, sizes) for layout in (source, target)]
        if any(why_illegal(shape, layout, mesh) for layout in (source, target)):  # a rank would hold nothing
            continue
        problem = BlockProblem(shape, sizes, *ends, 4)
        layouts = [from_placements(shape, layout, sizes) for layout in (source, *(step.after for step in route.steps))]
        held = [4 * problem.elements(layout) for layout in layouts]
        assert route.peak_bytes == max([a + b for a, b in zip(held, held[1:])] or held)
        prices = MeshPrices(mesh, 4)
        steps = [priced(problem, prices, step.collective, u, v) for step, u, v in zip(route.steps, layouts, layouts[1:])]
        assert_delivers(route_of(problem, steps, "feasible", 0.0, "buffers", 0))
        assert sum(step.seconds for step in steps) == pytest.approx(route.seconds, rel=1e-9)


# ---- process groups


def gloo_rank(rank, port, meshes, number):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=4, init_method=f"tcp://127.0.0.1:{port}")
    from torch.distributed.device_mesh import init_device_mesh

    for mesh in meshes:
        groups = BlockGroups.of(mesh, init_device_mesh("cpu", mesh))
        rng = random.Random(len(mesh))
        for i in range(number):
            problem = random_problem(rng, mesh=mesh, partial=i % 3 == 0, cyclic=i % 2 == 0)
            route = astar(problem, prices_of(problem, i), most=300)
            parts = shard_blocks(whole_of(problem), problem.source, mesh)
            expected, sent = simulate(route, parts)
            groups.sent.clear()
            assert torch.equal(groups.run(route, parts[rank]), expected[rank])
            assert groups.sent == [step[rank] for step in sent]
            assert torch.equal(groups.run(route, parts[rank], dtensor=True), expected[rank])
        ordered = BlockLayout(((0, 1),), (3,)), BlockLayout(((1, 0),), (3,))
        if mesh == (2, 2):  # a permute by send and receive
            problem = BlockProblem((12,), mesh, *ordered, 4)
            step = priced(problem, MeshPrices(Mesh.from_bandwidths(mesh), 4), "permute", *ordered)
            route = route_of(problem, [step], "feasible", 0.0, "buffers", 0)
            expected = shard_blocks(whole_of(problem), problem.target, mesh)[rank]
            assert torch.equal(groups.run(route, shard_blocks(whole_of(problem), problem.source, mesh)[rank]), expected)
    dist.destroy_process_group()


@pytest.fixture
def store():
    """Of ranks that are threads of this process: torch's collectives between them, but no send and receive."""
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    multi_threaded_pg._install_threaded_pg()
    yield dist.HashStore()
    multi_threaded_pg._uninstall_threaded_pg()
    torch._C._distributed_c10d._set_thread_isolation_mode(False)


def test_routes_without_permutes_on_four_threads(store):
    rng, mesh, routes = random.Random(5), (2, 2), []
    for i, op in enumerate(["sum", "avg", "max", "min"] * 6):
        problem = random_problem(rng, mesh=mesh, partial=True)
        if i < 4:
            problem = BlockProblem((6,), mesh, BlockLayout(((1,),), (3,), (0,)), BlockLayout(((1,),), (3,)), 4)
        problem = replace(problem, source=replace(problem.source, reduce_op=op), target=replace(problem.target, reduce_op=op))
        routes.append((astar(problem, prices_of(problem, i), most=300), shard_blocks(whole_of(problem), problem.source, mesh)))
    kinds = [{step.collective for step in route.steps} for route, _ in routes]
    routes = [of for of, some in zip(routes, kinds) if "permute" not in some]
    assert len(routes) > 20 and set().union(*kinds) >= {"all_reduce", "reduce_scatter", "all_gather", "all_to_all", "split"}

    def run(rank):
        dist.init_process_group("threaded", rank=rank, world_size=4, store=store)
        groups, found = BlockGroups.of(mesh), []
        for route, parts in routes:
            found.append((groups.run(route, parts[rank]), groups.sent[:]))
            groups.sent.clear()
        dist.destroy_process_group()
        return found

    with ThreadPoolExecutor(4) as pool:
        ranks = list(pool.map(run, range(4)))
    for k, (route, parts) in enumerate(routes):
        expected, sent = simulate(route, parts)
        assert all(torch.equal(of[k][0], part) for of, part in zip(ranks, expected, strict=True))
        assert [of[k][1] for of in ranks] == [[step[rank] for step in sent] for rank in range(4)]


@pytest.mark.slow
def test_twenty_routes_on_four_gloo_ranks():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.start_processes(gloo_rank, args=(port, [(2, 2), (4,)], 12), nprocs=4, start_method="spawn")
