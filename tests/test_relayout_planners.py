"""Planners: what was published, A* against Dijkstra, torch's own plans, limits and bounds."""

import json
import math
import random
from pathlib import Path

import pytest

from autoshard.cost import block_prices, bytes_sent, collective_seconds
from autoshard.mesh import Axis, Mesh
from autoshard.relayout import BlockLayout, BlockProblem, MeshPrices, astar, read_problem
from autoshard.relayout.blocks import UNSHARDED
from autoshard.relayout.coarse import distances
from autoshard.relayout.holdings import traffic
from autoshard.relayout.planners import PLANNERS, naive, priced, space_of
from benchmarks.studies import redistribution as study
from benchmarks.studies.redistribution import dijkstra, random_problem
from benchmarks.tensorcraft import IdealPrices, memory_constrained
from tests.helpers_refusals import refusals

ITEMS = json.loads((Path(__file__).parent / "data" / "redistribution" / "problems.json").read_text())["problems"]
ALL = {**PLANNERS, "dijkstra": dijkstra, "memory_constrained": memory_constrained}
BY_NAME = {item["problem"]["id"]: item for item in ITEMS}


# ---- what was published


def volume(problem, step):
    """(elements, processes) of a step as published: an all_to_all counts the elements of all ranks of a group."""
    held = problem.elements(step.before)
    n = math.prod(problem.mesh[a] for a in step.axes)
    published = {"split": (0, 0), "permute": (held, 2), "all_gather": (held * n, n), "all_to_all": (held * n, n)}
    return published.get(step.collective, (held, n))


@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_never_dearer_than_the_published_graphs_optimum_within_the_limit(name):
    item, problem = BY_NAME[name], read_problem(BY_NAME[name])
    prices = IdealPrices(problem.mesh)
    route, check = astar(problem, prices), dijkstra(problem, prices)
    for key in ("head_limit", "seed_limit"):
        assert route.seconds <= item["optimum"][key]["cost"] * (1 + 1e-9)
    assert route.status == "optimal" and route.seconds == pytest.approx(check.seconds, rel=1e-9) and route.bound_seconds == route.seconds
    assert route.peak_elements <= problem.memory_limit(None, "resident")


@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_published_searches_are_reproduced_state_by_state(name):
    item, problem = BY_NAME[name], read_problem({**BY_NAME[name]["problem"], "mem": None})  # the published code knew no other limit
    prices = IdealPrices(problem.mesh)
    assert naive(problem, prices).seconds == pytest.approx(item["tensorcraft"]["naive"]["cost"], rel=1e-9)
    for key, options in {"default": {}, "depth3": {"max_depth": 3}, "top1": {"top_k": 1}}.items():
        theirs, ours = item["tensorcraft"][f"memconstrained_{key}"], memory_constrained(problem, prices, **options)
        assert ours.explored == theirs["explored"][0]
        if theirs.get("cost") is None:
            assert ours.status == "infeasible" and ours.seconds == math.inf
        else:
            assert ours.seconds == pytest.approx(theirs["cost"], rel=1e-9) and ours.peak_elements == theirs["peak"]


def test_the_five_published_runs_of_problem_1():
    found = study.published_runs(read_problem(BY_NAME["seed_p1"]))
    assert [round(seconds, 6) for seconds in found.values()] == [0.286723, 0.071685, 0.163843, 0.163843, 0.358406]


def test_problem_1_is_as_fast_as_published_in_steps_of_this_size():
    problem = read_problem(BY_NAME["seed_p1"])
    route = astar(problem, IdealPrices(problem.mesh))
    assert route.seconds <= 0.071685
    assert {problem.elements(step.after) * 8 for step in route.steps[:-1]} == {256_000_000}


def test_the_six_volumes_of_the_small_example():
    problem = read_problem({**BY_NAME["seed_ex"]["problem"], "dst_bs": [-1, 1, 1, -1]})
    ends = (problem.source, problem.target)
    between = BlockLayout(((0,), (1,), (), ()), (2, 1, UNSHARDED, UNSHARDED))
    cut = [BlockLayout(x.axes[:3] + ((2,),), x.blocks[:3] + (1,)) for x in (ends[0], between, ends[1])]
    routes = [
        [("all_to_all", ends[0], between), ("all_to_all", between, ends[1])],
        [("split", ends[0], cut[0]), ("all_to_all", cut[0], cut[1]), ("all_to_all", cut[1], cut[2]), ("all_gather", cut[2], ends[1])],
    ]
    prices = IdealPrices(problem.mesh)
    volumes = [[volume(problem, priced(problem, prices, *step)) for step in route] for route in routes]
    assert volumes == [[(512, 2), (1024, 4)], [(0, 0), (128, 2), (256, 4), (256, 4)]]


# ---- exactness


def test_astar_is_dijkstra_on_random_problems():
    found = study.exact(150, seed=1)
    assert found["unequal"] == 0 and found["uneven"] > 50


@pytest.mark.slow
def test_astar_is_dijkstra_on_more_and_larger_random_problems():
    assert study.exact(1000, seed=2)["unequal"] == 0
    rng = random.Random(3)
    for i in range(60):
        problem = random_problem(rng, most_axes=4, most_dims=4)
        prices, count, limit = study.conditions(rng, problem, i)
        ours, theirs = (planner(problem, prices, limit, count=count) for planner in (astar, dijkstra))
        assert ours.status == theirs.status and ours.seconds == pytest.approx(theirs.seconds, rel=1e-9)


def test_the_heuristic_never_exceeds_what_is_left_and_often_is_all_of_it():
    rng, tight = random.Random(4), 0
    for i in range(60):
        problem = random_problem(rng, most_axes=3, most_dims=2, **({"sizes": (2, 4, 64), "cyclic": False} if i % 3 else {}))
        prices, count, _ = study.conditions(rng, problem, i)
        if problem.same:
            continue
        space, _ = space_of(problem, prices)
        h = distances(space, math.inf, count == "buffers")
        route = dijkstra(problem, prices, math.inf, count=count)
        left = route.seconds
        for step in route.steps:
            state = space.state(step.before) if len(problem.mesh) == space.num_axes else None
            if state is not None:
                assert h[space.code(state)] <= left * (1 + 1e-9)
                tight += h[space.code(state)] >= left * (1 - 1e-9)
            left -= step.seconds
    assert tight > 15


# ---- honest prices


def mesh_of(*sizes, bandwidth=25e9, latency=1e-6):
    return Mesh(tuple(Axis(f"axis{k}", n, bandwidth, latency) for k, n in enumerate(sizes)))


def test_a_divisible_chunk_of_an_uneven_dim_can_still_be_chunked():
    # 256 in 3 parts of 86, 86, 84; halves of them are no blocks of 43: torch splits locally, and so must we
    source, target = BlockLayout(((0,),), (86,)), BlockLayout(((0, 1),), (0,))
    problem = BlockProblem((256,), (3, 2), source, target, 4)
    assert [step.collective for step in astar(problem, MeshPrices(mesh_of(3, 2), 4)).steps] == ["split"]
    again = BlockProblem((250,), (2, 2, 3), BlockLayout(((0, 1),), (0,)), BlockLayout(((0, 1, 2),), (0,)), 4)
    assert [step.collective for step in astar(again, MeshPrices(mesh_of(2, 2, 3), 4)).steps] == ["split"]


@pytest.mark.parametrize("seed", range(4))
def test_never_dearer_than_torchs_plans_that_keep_the_limit(seed):
    rng = random.Random(seed)
    for _ in range(12):
        problem = random_problem(rng, sizes=study.LARGE, most_axes=3, cyclic=False, partial=False)
        prices = MeshPrices(Mesh.from_bandwidths(problem.mesh), 4)
        route, limit = astar(problem, prices), problem.memory_limit(None, "buffers")
        free = astar(problem, prices, math.inf)
        assert route.status == "optimal" and route.peak_elements <= limit and free.seconds <= route.seconds * (1 + 1e-9)
        for plan in [] if problem.same else study.torch_plans(problem).values():
            steps = [priced(problem, prices, *step) for step in plan]
            theirs = sum(step.seconds for step in steps)
            assert free.seconds <= theirs * (1 + 1e-9)
            if all(problem.elements(step.before) + problem.elements(step.after) <= limit for step in steps):
                assert route.seconds <= theirs * (1 + 1e-9)


def test_one_axis_costs_what_the_cost_room_says():
    mesh = Mesh.from_bandwidths((2, 4), inter_node_bandwidth=40e9)
    prices = MeshPrices(mesh, 4)
    for k, axis in enumerate(mesh.axes):
        for kind, buffer in (("all_gather", axis.size), ("all_to_all", 1), ("all_reduce", 1), ("reduce_scatter", 1)):
            assert prices.of(kind, (k,))(960) == pytest.approx(collective_seconds(kind, axis, 4 * 960 * buffer), rel=1e-12)
            assert bytes_sent(kind, axis, 4 * 960 * buffer) > 0


def test_different_links_work_at_the_same_time_and_equal_ones_share():
    slow_and_fast = Mesh((Axis("a", 2, 1e9, 0.0), Axis("b", 2, 4e9, 0.0)))
    assert MeshPrices(slow_and_fast, 1).of("all_to_all", (0, 1))(4e9) == pytest.approx(2.0)  # half of it over the slow link
    assert MeshPrices(mesh_of(2, 2, bandwidth=1e9, latency=0.0), 1).of("all_to_all", (0, 1))(4e9) == pytest.approx(3.0)
    shared = Mesh((Axis("a", 2, 4e9, 0.0, shared_by=4), Axis("b", 4, 8e9, 0.0)))
    assert MeshPrices(shared, 1).of("all_gather", (0,))(1e9) == pytest.approx(1.0)


def test_rounds_are_as_slow_as_the_axis_that_they_cross():
    mesh = Mesh((Axis("a", 3, 1e30, 15e-6), Axis("b", 3, 1e30, 5e-6), Axis("c", 3, 1e30, 5e-6)))
    seconds = {axes: MeshPrices(mesh, 1).of("all_gather", axes)(1) for axes in ((0,), (1,), (0, 1), (1, 2), (0, 1, 2))}
    assert seconds[0, 1] == pytest.approx(seconds[0,] + seconds[1,])  # 2 rounds at 15 us and 2 at 5, not 4 at 15
    assert seconds[0, 1, 2] == pytest.approx(50e-6) and seconds[1, 2] == pytest.approx(20e-6)
    equal = MeshPrices(mesh_of(3, 3, 3, bandwidth=1e30), 1)
    assert equal.of("all_to_all", (0, 1, 2))(1) == pytest.approx(5e-6)  # ceil(log2 27) rounds of one group, not 6


def test_rounds_double_what_a_rank_has_reached():
    for n in range(1, 18):
        reached, needed = 1, 0
        while reached < n:
            reached, needed = 2 * reached, needed + 1
        kinds = ("split", "permute", "all_gather", "reduce_scatter", "all_to_all", "all_reduce")
        assert [block_prices.rounds(kind, n) for kind in kinds] == [0, 1, needed, needed, needed, 2 * needed]


def test_slices_are_one_copy():
    whole = BlockLayout(((), ()), (UNSHARDED, UNSHARDED))
    mesh = Mesh.from_bandwidths((2, 4, 2))
    write = 4 / mesh.device.memory_bandwidth
    for axes, local in ((((0, 1, 2), ()), 64 * 64 / 16), (((0,), (2, 1)), 64 * 64 / 16), (((), (1, 0)), 64 * 64 / 8)):
        target = BlockLayout(axes, tuple(64 // math.prod(mesh.shape[a] for a in some) for some in axes))
        problem = BlockProblem((64, 64), mesh.shape, whole, target, 4)
        for planner in (astar, dijkstra):
            route = planner(problem, MeshPrices(mesh, 4))
            assert [step.collective for step in route.steps] == ["split"] and route.seconds == pytest.approx(local * write)
        two = [("split", whole, BlockLayout((axes[0], ()), target.blocks)), ("split", BlockLayout((axes[0], ()), target.blocks), target)]
        if all(axes):  # as one copy per dim it is dearer
            assert sum(priced(problem, MeshPrices(mesh, 4), *step).seconds for step in two) > route.seconds


@pytest.mark.parametrize("draw", [study.tensor_problem, study.left_to_right, study.small_problem])
def test_no_route_is_below_what_the_links_must_carry_nor_above_torchs(draw):
    found = study.against_torch(12, 1, draw, collect=lambda: None)
    assert found["bound_above_our_route"] == found["dearer_than_torch_within_the_limit"] == found["our_peak_above_the_limit"] == 0
    assert {row["limit"] for row in found["by_limit"]} == set(study.LIMITS)
    for row in found["by_limit"]:
        assert 1 <= row["geometric_mean_within_the_limit"] <= row["that_no_route_can_exceed"]


def test_a_measured_curve_takes_the_place_of_a_link():
    mesh = mesh_of(4, 2)
    curve = {("all_gather", 0): lambda sent: 1.0 + sent}
    assert MeshPrices(mesh, 2, curve).of("all_gather", (0,))(10) == 1.0 + 2 * 3 * 10
    assert MeshPrices(mesh, 2, curve).of("all_gather", (1,))(10) == MeshPrices(mesh, 2).of("all_gather", (1,))(10)
    problem = BlockProblem((8, 8), (4, 2), BlockLayout(((0,), ()), (2, UNSHARDED)), BlockLayout(((), ()), (UNSHARDED, UNSHARDED)), 2)
    assert astar(problem, MeshPrices(mesh, 2, curve)).seconds == dijkstra(problem, MeshPrices(mesh, 2, curve)).seconds


def test_even_steps_send_the_models_volume():
    rng = random.Random(7)
    seen = set()
    for i in range(60):
        problem = random_problem(rng, sizes=(8, 16, 64), cyclic=False, most_axes=2, mesh=rng.choice([(2, 2), (2, 4)]), partial=False)
        route = astar(problem, IdealPrices(problem.mesh) if i % 2 else MeshPrices(mesh_of(*problem.mesh), 4))
        for step in route.steps:
            n, held = math.prod(problem.mesh[a] for a in step.axes), problem.elements(step.before)
            model = {"split": 0, "all_gather": (n - 1) * held, "all_to_all": held * (n - 1) // n, "permute": held}
            if step.collective in model:
                assert step.bytes == 4 * model[step.collective]
                seen.add(step.collective)
    assert seen >= {"split", "all_gather", "all_to_all"}


def test_exchanges_count_real_traffic():
    problem = BlockProblem((16, 16), (2, 2), BlockLayout(((0,), (1,)), (8, 8)), BlockLayout(((1,), (0,)), (4, 4)), 4)
    prices = MeshPrices(mesh_of(2, 2), 4)
    step = priced(problem, prices, "exchange", problem.source, problem.target)
    assert step.bytes == 4 * traffic(problem.shape, problem.source, problem.target, problem.mesh).most_sent()


def test_an_exchange_takes_as_many_rounds_as_messages_or_as_doubling_does():
    mesh = Mesh.from_bandwidths((8,), intra_node_latency=1.0)
    prices = MeshPrices(mesh, 4)
    for size, block, rounds in [(57, 7, 1), (64, 1, 3)]:  # everyone asks the one before it, everyone asks everyone
        before, after = BlockLayout(((0,),), (8,)), BlockLayout(((0,),), (block,))
        problem = BlockProblem((size,), (8,), before, after, 4)
        assert priced(problem, prices, "exchange", before, after).seconds == pytest.approx(rounds, rel=1e-3)


def test_what_a_node_lacks_crosses_its_link_once_and_is_gathered_inside():
    source, target = BlockLayout(((0,), ()), (512, UNSHARDED)), BlockLayout(((), (0,)), (UNSHARDED, 512))
    problem = BlockProblem((1024, 1024), (2, 4), source, target, 4)
    prices = MeshPrices(Mesh.from_bandwidths((2, 4), inter_node_bandwidth=10e9), 4)
    route = astar(problem, prices)
    assert [step.collective for step in route.steps] == ["exchange", "all_gather"]
    assert [step.axes for step in route.steps] == [(0,), (1,)]
    assert traffic(problem.shape, source, route.steps[0].after, (2, 4)).elements.sum() == 2 * 512 * 512  # what both nodes lack, once
    assert 3 * route.seconds < priced(problem, prices, "all_to_all", source, target).seconds
    assert route.seconds == dijkstra(problem, prices).seconds


# ---- limits, statuses, signatures


def test_all_planners_have_one_signature():
    problem = read_problem(BY_NAME["m28_row2col"])
    for name, planner in ALL.items():
        route = planner(problem, IdealPrices(problem.mesh), problem.memory_limit(None, "resident"))
        assert route.problem is problem and route.seconds > 0, name
        assert route.seconds == pytest.approx(sum(step.seconds for step in route.steps))
        assert route.steps[0].before == problem.source and route.steps[-1].after == problem.target
        assert all(one.after == two.before for one, two in zip(route.steps, route.steps[1:]))


@pytest.mark.parametrize("count", ["resident", "buffers"])
def test_the_limit_is_kept_as_counted(count):
    rng = random.Random(5)
    for _ in range(40):
        problem = random_problem(rng, most_axes=3, most_dims=3)
        for prices in (IdealPrices(problem.mesh), MeshPrices(mesh_of(*problem.mesh), 4)):
            route = astar(problem, prices, count=count)
            held = [problem.elements(x) for x in (problem.source, *(step.after for step in route.steps))]
            peak = max(held) if count == "resident" else max([a + b for a, b in zip(held, held[1:])] or held)
            assert route.status == "optimal" and route.peak_elements == peak <= problem.memory_limit(None, count)
            assert route.peak_bytes == 4 * peak


TURNED = BlockProblem((8, 8), (2,), BlockLayout(((0,), ()), (4, UNSHARDED)), BlockLayout(((), (0,)), (UNSHARDED, 4)))
REDUCED = BlockProblem((8, 8), (2, 2), BlockLayout(((1,), ()), (4, UNSHARDED), (0,)), BlockLayout(((1,), ()), (4, UNSHARDED)))
test_what_no_planner_does_is_said = refusals(
    (lambda: astar(TURNED, IdealPrices((2,)), 31), "give at least 32 elements"),
    (lambda: astar(TURNED, IdealPrices((2,)), count="all"), "count is 'all'"),
    (lambda: naive(REDUCED, IdealPrices((2, 2))), "use astar for partial layouts"),
    (lambda: memory_constrained(REDUCED, IdealPrices((2, 2))), "use astar for partial layouts"),
)


def test_a_limit_that_nothing_keeps_is_infeasible():
    route = astar(TURNED, IdealPrices((2,)), 40, count="buffers")  # an all_to_all has 32 coming in and 32 going out
    assert (route.status, route.seconds, route.steps) == ("infeasible", math.inf, ())


def test_equal_ends_need_nothing():
    layout = BlockLayout(((0, 1),), (2,))
    for planner in ALL.values():
        route = planner(BlockProblem((8,), (2, 2), layout, layout), IdealPrices((2, 2)))
        assert route.steps == () and route.seconds == 0 and route.peak_elements == 2


def test_a_search_that_stops_early_says_how_far_it_may_be_off():
    problem = read_problem(BY_NAME["seed_p1"])
    prices = IdealPrices(problem.mesh)
    best = astar(problem, prices).seconds
    route = astar(problem, prices, most=3)
    assert route.status == "feasible" and 0 < route.bound_seconds <= best <= route.seconds < math.inf


def test_five_axes_and_six_dims_get_a_route_and_a_bound():
    shape, mesh = (64, 32, 16, 24, 10, 8), (2, 2, 2, 3, 2)
    source = BlockLayout(((0, 1), (2,), (), (3,), (), (4,)), (16, 16, UNSHARDED, 8, UNSHARDED, 4))
    target = BlockLayout(((), (4, 0), (1,), (), (2,), ()), (UNSHARDED, 8, 8, UNSHARDED, 5, UNSHARDED))
    problem = BlockProblem(shape, mesh, source, target, 4)
    route = astar(problem, MeshPrices(mesh_of(*mesh), 4), most=200)
    assert route.status in ("optimal", "feasible") and 0 < route.bound_seconds <= route.seconds * (1 + 1e-9) < math.inf


def test_five_axes_and_six_dims_have_a_heuristic():
    source = BlockLayout.parse("D_[2,2,2,2,2]⊥{∅,∅,(0,4,2),∅,3,1}(∅,∅,2,∅,5,30)")[1]
    target = BlockLayout.parse("D_[2,2,2,2,2]⊥{4,0,∅,2,3,1}(5,19,∅,32,32,32)")[1]
    problem = BlockProblem((64,) * 6, (2,) * 5, source, target, 4)
    route = astar(problem, IdealPrices((2,) * 5), most=300)  # without it, 27464 states
    assert route.status == "optimal" and route.seconds < 0.12 * naive(problem, IdealPrices((2,) * 5)).seconds


def test_partial_axes_are_reduced_once():
    source = BlockLayout(((1,), ()), (4, UNSHARDED), (0,))
    cases = {
        (((1,), (0,)), (4, 4), ()): ["reduce_scatter"],
        (((1,), ()), (4, UNSHARDED), ()): ["all_reduce"],
        (((), (1,)), (UNSHARDED, 4), (0,)): ["all_to_all"],
    }
    for target, expected in cases.items():
        problem = BlockProblem((8, 8), (2, 2), source, BlockLayout(*target), 4)
        assert [step.collective for step in astar(problem, MeshPrices(mesh_of(2, 2), 4)).steps] == expected


def test_routes_say_who_can_run_them():
    plain = BlockProblem((8, 8), (2, 2), BlockLayout(((0, 1), ()), (2, UNSHARDED)), BlockLayout(((0,), (1,)), (4, 4)), 4)
    order = BlockProblem((8, 8), (2, 2), BlockLayout(((0, 1), ()), (2, UNSHARDED)), BlockLayout(((1, 0), ()), (2, UNSHARDED)), 4)
    prices = MeshPrices(mesh_of(2, 2), 4)
    assert astar(plain, prices).executable_by == "dtensor" and astar(order, prices).executable_by == "autoshard"
    assert [step.collective for step in astar(order, prices).steps] == ["permute"]
