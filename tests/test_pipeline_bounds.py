"""Bounds on a step in which a sub-mesh is used hold for every division, brute force; layers consist of units that are planned once."""

from dataclasses import replace
from itertools import combinations, product
from types import SimpleNamespace

import numpy as np
import pytest

from autoshard.capture import capture
from autoshard.mesh import Mesh
from autoshard.pipeline.choices import grid_of, speed_ups
from autoshard.pipeline.configurations import Combination, Configuration, equal_parts
from autoshard.pipeline.layers import _thin_positions, layers_of
from autoshard.pipeline.schedule_times import run
from autoshard.pipeline.schedules import schedule_of
from autoshard.pipeline.search import choices_of
from autoshard.pipeline.stage_bounds import StepWork
from autoshard.pipeline.stage_division import step_seconds
from autoshard.pipeline.stage_planner import StagePlanner
from autoshard.pipeline.stage_plans import Job, JobRunner, SharedOnMesh, StageProblem, options_on_mesh
from autoshard.pipeline.stage_programs import second_half, stage_program
from autoshard.pipeline.stage_tables import StageTable, Sums
from autoshard.pipeline.submeshes import Cluster, Kind
from autoshard.problem import evaluate
from autoshard.solvers import solve
from models import mlp

SIZES = (1, 2, 4, 8)


def work(seed: int, microbatches: int, layers: int = 5) -> StepWork:
    rng = np.random.default_rng(seed)
    seconds = rng.uniform(0.5, 2.0, layers)
    return StepWork(seconds, 0.3 * seconds, 0.25 * seconds, microbatches, 8, SIZES)


def divisions(layers: int):
    """(cuts, sizes) of up to three stages on 8 devices."""
    for stages in (1, 2, 3):
        for inner in combinations(range(1, layers), stages - 1):
            for sizes in product(SIZES, repeat=stages):
                if sum(sizes) <= 8:
                    yield (0, *inner, layers), sizes


def step(of: StepWork, cuts, sizes, schedule: str) -> float:
    """Simulated, where m devices are exactly m times as fast as one."""

    def each(values) -> list[float]:
        return [float(values[a:b].sum()) / m for a, b, m in zip(cuts, cuts[1:], sizes)]

    times = {"forward": each(of.forward), "backward": each(of.seconds - of.forward), "weight": each(of.weight)}
    zeros, order = [0.0] * len(sizes), schedule_of(schedule, len(sizes), of.microbatches)
    return run(order, **times, transfer=zeros, activation_bytes=zeros, fixed_bytes=zeros).seconds


@pytest.mark.parametrize("microbatches", [1, 4])
def test_no_division_beats_the_bounds_of_its_sub_meshes(microbatches):
    of = work(microbatches, microbatches)
    met = {m: np.inf for m in SIZES}
    for cuts, sizes in divisions(5):
        T = step_seconds([float(of.seconds[a:b].sum()) / m for a, b, m in zip(cuts, cuts[1:], sizes)], [], microbatches)
        fastest = min(step(of, cuts, sizes, schedule) for schedule in ("1f1b", "zb_h1"))
        for m in sizes:
            assert of.of_division(m) <= T * (1 + 1e-9) and of.of_any_schedule(m) <= fastest * (1 + 1e-9)
            met[m] = min(met[m], T)
    assert met[8] == pytest.approx(of.of_division(8))  # one stage: the bound is what it takes, so that a larger one would be wrong
    assert of.of_division(1) > of.of_division(8)


@pytest.mark.parametrize("microbatches", [1, 3])
def test_bounds_of_sub_meshes_are_their_formulas(microbatches):
    rng = np.random.default_rng(microbatches)
    c, sizes, K = rng.uniform(0.1, 0.9, 5), (2, 4), microbatches
    of = StepWork(c, c * rng.uniform(0.2, 0.4, 5), c * rng.uniform(0.0, 0.3, 5), K, 8, sizes)
    W, flow = c.sum(), 1 - max(of.weight / c)
    for m in (1, 2, 4, 5, 7, 8):
        ends = combinations(range(6), 2) if m < 8 else [(0, 5)]
        largest = max((s for s in sizes if s <= 8 - m), default=1)
        xs = [(x / m, (W - x) / largest, max(x / m, (W - x) / (8 - m) if m < 8 else 0, W / 8)) for a, b in ends for x in [c[a:b].sum()]]
        assert of.of_any_schedule(m) == pytest.approx(min(max(K * slowest, flow * (x + rest)) for x, rest, slowest in xs))
        assert of.of_division(m) == pytest.approx(min(x + rest + (K - 1) * slowest for x, rest, slowest in xs))
    for parts in ([(0, 1), (1, 3), (3, 4), (4, 5)], [(0, 0), (0, 1), (1, 2), (2, 5)]):  # of two groups, and of four
        groups = 2 if parts[0] == (0, 1) else 4
        busy = [groups / 8 * sum(c[a:b].sum() for a, b in parts[d::groups]) for d in range(groups)]
        before = groups / 8 * of.forward[: parts[groups - 2][1]].sum()
        assert of.of_equal_groups(parts, groups) == pytest.approx(max(K * max(busy), before + K * busy[-1]))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1", "interleaved_1f1b"])
def test_equal_groups_take_no_less_than_their_bound(schedule):
    of = work(3, 4, layers=8)
    for groups in (2, 4):
        chunks = 2 if schedule == "interleaved_1f1b" else 1
        parts = equal_parts(8, chunks * groups)
        assert parts is not None
        m = 8 / groups

        def each(values, parts=parts, m=m) -> list[float]:
            return [float(values[a:b].sum()) / m for a, b in parts]

        times = {"forward": each(of.forward), "backward": each(of.seconds - of.forward), "weight": each(of.weight)}
        zeros = [0.0] * len(parts)
        order = schedule_of(schedule, groups, 4, chunks)
        seconds = run(order, **times, transfer=zeros, activation_bytes=zeros, fixed_bytes=zeros).seconds
        assert of.of_equal_groups(parts, groups) <= seconds * (1 + 1e-9)


@pytest.mark.parametrize(("schedule", "split"), [("gpipe", False), ("1f1b", False), ("zb_h1", True)])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_equal_stages_take_what_their_formula_says(schedule, split, groups):
    ones = np.ones(8)
    of = StepWork(ones, ones / 3, ones / 3, 8, 8, SIZES)
    m = 8 // groups
    on_mesh = 1.3 * 8 / m  # 1.3: not as fast as m times one device
    stage = on_mesh / groups
    times = {"forward": [stage / 3] * groups, "backward": [2 * stage / 3] * groups, "weight": [stage / 3] * groups}
    zeros = [0.0] * groups
    seconds = run(schedule_of(schedule, groups, 8), **times, transfer=zeros, activation_bytes=zeros, fixed_bytes=zeros).seconds
    assert of.of_equal_stages(m, on_mesh, split=split) == pytest.approx(seconds)


def test_layers_of_several_blocks_consist_of_units_that_are_equal():
    graph = capture(*mlp.tiny(layers=8, batch=16), training=True)
    layers = layers_of(graph, 4)
    assert layers.count == 4 and layers.units.count >= 8
    assert layers.starts[0] == 0 and layers.starts[-1] == layers.units.count and list(layers.starts) == sorted(set(layers.starts))
    inside = {unit: {layer for u, layer in zip(layers.units.of, layers.of) if u == unit} for unit in range(layers.units.count)}
    assert all(len(of) == 1 for of in inside.values())
    inner = {stage_program(layers.units, k, k + 1).signature for k in range(1, layers.units.count - 1)}
    assert len(inner) <= 2 < layers.units.count - 2
    assert sum(layers.flops) == pytest.approx(sum(layers.units.flops))


def test_a_grid_has_a_layer_for_every_stage_and_one_kind_of_nodes():
    layers = layers_of(capture(*mlp.tiny(layers=4, batch=4), training=True), 2)

    def grid(cluster: Cluster) -> list[tuple[int, int, int]]:
        return grid_of(StageTable(cluster, layers, 4, optimizer="adamw", limit=None, recompute="never"))

    assert sorted(grid(Cluster.of(4))) == [(1, 1, 4), (1, 2, 2), (1, 4, 1), (2, 1, 2), (2, 2, 1)]
    assert grid(Cluster((Kind(1, 2, "h100"), Kind(1, 2, "a100")))) == []


def test_a_price_of_bytes_is_paid_for_what_stays_and_for_what_every_microbatch_in_flight_saves():
    graph, mesh = capture(*mlp.tiny(), training=True), Mesh.from_bandwidths((2,))
    stage = StageProblem(Job(graph, "", mesh, 4, 3, "adamw", ()), SharedOnMesh(mesh))
    for price in (0.0, 1e-10, 1e-6):
        choice = solve(stage._with_bytes(price)).choice
        free, priced = (evaluate(stage._with_bytes(price), choice).cost for price in (0.0, 1e-9))
        option = stage.option(choice)
        assert option.static_bytes > option.saved_bytes > 0
        assert priced - free == pytest.approx(1e-9 * (option.static_bytes + 3 * option.saved_bytes), rel=1e-6)


def test_what_every_microbatch_in_flight_saves_is_computed_from_it_before_the_backward_pass_and_read_by_that():
    """By definition, usage by usage; a tangent arrives when the backward pass begins: it is saved for the second half alone."""
    layers, mesh = layers_of(capture(*mlp.tiny(layers=4), training=True)), Mesh.from_bandwidths((2,))
    graph = stage_program(layers, 1, 3, halved=True).graph
    stage = StageProblem(Job(graph, "", mesh, 4, 3, "adamw", (), halved=True), SharedOnMesh(mesh))
    f, turn = stage.formulated, next(i for i, op in enumerate(graph.ops) if op.backward)
    half, hubs = len(graph.ops) - len(second_half(graph)), {node: value[0] for value, node in f.hubs.items()}
    varies: set[int] = set()
    for i, op in enumerate(graph.ops):
        if op.kind in ("input", "tangent") or any(a in varies for a, _ in op.inputs):
            varies.add(i)
    for saved, at in ((stage.saved, turn), (stage.kept, half)):
        expected = set()
        for k, (usage, kind) in enumerate(zip(f.problem.usages, f.held, strict=True)):
            i = f.tensor_edges[usage.edge].value[0] if usage.edge is not None else hubs.get(usage.ends[0], usage.ends[0])
            lives = usage.start < at < usage.end and not (kind == "inputs" and graph.last_use.get((i, 0), 0) < at)
            arrives_later = i < len(graph.ops) and graph.ops[i].kind == "tangent" and at == turn
            if i in varies and lives and kind not in ("parameters", "gradients", "optimizer_state") and not arrives_later:
                expected.add(k)
        assert saved == expected and expected
    tangents = {i for i, op in enumerate(graph.ops) if op.kind == "tangent"}
    of_tangents = {k for k, usage in enumerate(f.problem.usages) if usage.edge is None and usage.ends[0] in tangents}
    assert of_tangents and not of_tangents & stage.saved


def test_a_jobs_prices_are_in_seconds_per_byte_over_the_slowest_axis():
    """A price of 1 is what a byte takes over the slowest axis: sharding pays where it costs less than the bytes that it frees."""
    graph, mesh = capture(*mlp.tiny(batch=1024, width=64), training=True), Mesh.from_bandwidths((2, 2), devices_per_node=2, **SLOW_LINKS)
    prices = (0.0, 1e-3, 0.1, 1.0, 10.0, 1e3)
    (found,) = options_on_mesh([Job(graph, "", mesh, 4, 3, "adamw", prices)])
    cost = [one.forward + one.backward + (one.weight + one.once) / 4 for one in found]
    held = [one.static_bytes + 3 * one.saved_bytes for one in found]
    unit = max(1 / axis.device_bandwidth for axis in mesh.axes)
    stage = StageProblem(Job(graph, "", mesh, 4, 3, "adamw", ()), SharedOnMesh(mesh))
    assert found == tuple(stage.solved(price * unit) for price in prices)
    assert sorted(held, reverse=True) == held and len(set(held)) > 3 and cost[0] < cost[-1]


SLOW_LINKS = {"intra_node_bandwidth": 2e9, "inter_node_bandwidth": 1e9}
CLUSTERS = [
    pytest.param(devices, share, links, marks=[pytest.mark.slow] * (devices == 8 and share is not None))
    for devices in (4, 8) for share in (None, 1.8, 0.9, 0.6) for links in ({}, SLOW_LINKS)
]  # fmt: skip


@pytest.mark.parametrize(("devices", "share", "links"), CLUSTERS)
def test_leaving_out_what_cannot_pay_changes_no_best(devices, share, links):
    """share: the limit, of all parameters with gradients and optimizer state."""
    jobs = JobRunner(None)
    layers = {K: layers_of(capture(*mlp.tiny(layers=4, batch=16 // K), training=True)) for K in (1, 2, 4, 8)}

    def considered(everything: bool) -> list[Configuration]:
        tables: list[StageTable] = []
        for K in (2, 1, 4, 8):
            larger = [t for t in reversed(tables) if K % t.K == 0]
            cluster = Cluster.of(devices, 4, **links)
            table = StageTable(cluster, layers[K], K, optimizer="adamw", limit=None, recompute="auto", larger=larger)
            tables.append(table if share is None else replace(table, limit=share * table.held_bytes))
        planners = [StagePlanner(table, jobs.run) for table in tables]
        return choices_of(planners, ("1f1b", "zb_h1", "interleaved_1f1b"), grid=True, everything=everything)

    every, some = considered(True), considered(False)
    best = min((c.seconds for c in every if c.fits), default=None)
    assert min((c.seconds for c in some if c.fits), default=None) == best and len(some) <= len(every)
    assert (share, devices) != (None, 8) or len(some) < len(every)


@pytest.mark.parametrize("microbatches", [1, 4, 16])
def test_a_share_fits_where_a_layer_more_and_half_as_many_again_in_flight_do(microbatches):
    """Layers that hold a byte per microbatch in flight: of 4 devices, a stage of s has 8 s / 4 layers, and one more; 4 / s stages are in
    flight, and interleaved half as many again."""
    layers = layers_of(capture(*mlp.tiny(layers=8, batch=16), training=True), 8)
    table = StageTable(Cluster.of(4), layers, microbatches, optimizer="adamw", limit=None, recompute="never")
    L = layers.count
    bytes_of = np.maximum(np.arange(L + 1) - np.arange(L)[:, None], 0.0)
    nothing = np.zeros_like(bytes_of)
    ours = Sums(Combination(Mesh.from_bandwidths((2,)), False, 0.0), {"static_bytes": nothing, "saved_bytes": bytes_of}, nothing)
    bigger = Sums(ours.combination, {"static_bytes": nothing + 1e6, "saved_bytes": bytes_of}, nothing)
    for u, submesh in enumerate(table.cluster.submeshes):
        of_share = {1: 3, 2: 5, 4: 8}[submesh.size] * min(microbatches, {1: 6, 2: 3, 4: 2}[submesh.size])
        for limit in (of_share - 1, of_share, of_share + 1):
            limited = replace(table, limit=float(limit))
            assert limited.share_fits(u, ours) == limited.share_fits(u, bigger, ours) == (limit >= of_share)
            assert not limited.share_fits(u, bigger)


@pytest.mark.parametrize("microbatches", [1, 4, 16])
def test_layers_are_planned_with_half_of_the_microbatches_that_equal_stages_have_in_flight(microbatches):
    layers, asked = layers_of(capture(*mlp.tiny(layers=4, batch=16), training=True), 4), []
    table = StageTable(Cluster.of(4), layers, microbatches, optimizer="adamw", limit=None, recompute="never")
    StagePlanner(table, lambda jobs: asked.extend(jobs) or JobRunner(None).run(jobs)).plan()
    found = {job.mesh.num_devices: job.in_flight for job in asked}
    assert found == {1: min(microbatches, 2), 2: 1, 4: 1}, found


@pytest.mark.parametrize(("room", "fits"), [(0.5, False), (0.8, True), (2.0, True)])
def test_a_model_is_said_not_to_fit_only_after_all_submeshes_were_tried(room, fits):
    """At 0.8 of its parameters, gradients and state, on two devices only two stages fit: whole sub-meshes of two don't."""
    layers, jobs = layers_of(capture(*mlp.tiny(layers=4, batch=4), training=True)), JobRunner(None)

    def planner(limit: float | None) -> StagePlanner:
        return StagePlanner(StageTable(Cluster.of(4), layers, 4, optimizer="adamw", limit=limit, recompute="never"), jobs.run)

    free = planner(None)
    best = min(choices_of([free], ("1f1b",), grid=False, everything=True), key=lambda c: c.seconds)
    every, some = planner(room * free.table.held_bytes), planner(room * free.table.held_bytes)
    every.plan()
    some.plan_on(1)
    rows, found = (speed_ups(one.table.cluster, [one], best) for one in (every, some))
    assert [row["devices"] for row in found] == [1, 2, 4]
    assert [row["seconds"] is None for row in found] == [row["seconds"] is None for row in rows] == [room < 1, not fits, False]


def test_stages_end_where_locally_the_fewest_bytes_cross():
    """Or at the first position; against all short lists."""
    for n in range(2, 7):
        for crossing in product((0.0, 1.0, 2.0), repeat=n):
            least = [r for r in range(1, n - 1) if r == 1 or crossing[r - 1] > crossing[r] <= crossing[r + 1]]
            assert _thin_positions(list(crossing)) == least


def test_stages_as_if_memory_had_no_limit_are_those_of_the_first_way_without_a_price():
    mesh, other = Mesh.from_bandwidths((2,)), Mesh.from_bandwidths((4,))
    ways = [(mesh, False, 0.5), (other, False, 0.0), (mesh, True, 0.0), (mesh, False, 0.0)]
    sums = [SimpleNamespace(combination=Combination(*way)) for way in ways]
    table = SimpleNamespace(ways=(False, True), sums=[sums[:3], sums])
    assert [StageTable.plain(table, u, mesh) for u in (0, 1)] == [None, sums[3]]
