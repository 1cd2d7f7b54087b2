"""Time lines of plans: equal to the plan's cost and peak without overlap, never impossible with it."""

import dataclasses
import functools
import gc
import itertools
import json
import math
import weakref

import pytest
import torch

import autoshard
from autoshard import api
from autoshard.capture import capture_deep
from autoshard.cost import spare_bytes
from autoshard.graph import early_casts, with_microbatches
from autoshard.mesh import Mesh
from autoshard.planning.instance import instance_of
from autoshard.planning.warm_starts import random_choice
from autoshard.problem import evaluate
from autoshard.report.timeline import trace_of
from autoshard.simulate.from_solution import formulation_of_solution
from autoshard.simulate.positions import KNOWN, LinkFacts
from autoshard.simulate.tasks import _Builder, program_of
from autoshard.simulate.timeline import Timeline, run_program, shared_links, timeline_of, timeline_of_solution
from models import gpt2, llama, mlp, moe
from tests.helpers_kept import assert_stays
from tests.helpers_models import asked, scheme_plan

SCHEMES = ("data_parallel", "fsdp", "megatron", "megatron_sp")
MESHES = {"2x2": (2, 2), "4": (4,), "1x4": (1, 4)}
MODELS = {"mlp": mlp.tiny, "gpt2": gpt2.tiny, "llama": llama.tiny}
SLOW = {"intra_node_bandwidth": 2e9, "inter_node_bandwidth": 1e9}  # bytes/s: as much communication as compute


@pytest.fixture(scope="module")
def graphs():
    return {name: capture_deep(*make(), training=True)[0] for name, make in MODELS.items()}


@pytest.fixture(scope="module")
def plans(graphs):
    """(graph, plan) by model, mesh and scheme; made when asked for."""
    made = {}

    def plan(model, mesh, scheme):
        if (model, mesh, scheme) not in made:
            devices = Mesh.from_bandwidths(MESHES[mesh], **SLOW)
            made[model, mesh, scheme] = scheme_plan(graphs[model], devices, scheme, training=True, baselines=False)
        return graphs[model], made[model, mesh, scheme]

    return plan


CASES = [("mlp", mesh, scheme) for mesh in MESHES for scheme in SCHEMES]
CASES += [*(("gpt2", "2x2", scheme) for scheme in SCHEMES), ("llama", "2x2", "fsdp")]


@pytest.mark.parametrize("model", MODELS)
def test_what_only_becomes_a_gradient_is_in_the_background_views_on_the_way_included(graphs, model):
    """A transpose behind the reduction of a weight's gradient hurries it no more than the optimizer does: an all_reduce of other values
    would wait behind it."""
    graph = graphs[model]
    formulation = instance_of(asked(graph, Mesh.from_bandwidths((2, 2), **SLOW)).stepped()).formulated
    facts = LinkFacts(formulation)

    def only_becomes_a_gradient(i):
        """Whether op i is read by views alone, and these by views, until they are returned as gradients."""
        readers = graph.users.get((i, 0), [])
        ends = [result.kind for result in graph.results if result.value == (i, 0)]
        views = all(graph.ops[j].is_view and only_becomes_a_gradient(j) for j, _ in readers)
        return views and bool(readers or ends) and set(ends) <= {"gradient"}

    links = [(k, link) for k, link in enumerate(facts.links) if link.b < len(graph.ops) and not graph.ops[link.b].is_placeholder]
    expected = {k for k, link in links if graph.ops[link.b].is_view and only_becomes_a_gradient(link.b)}
    assert facts.of_gradients == expected | set(facts.gradients.values()) and len(expected) > 4


@pytest.mark.parametrize(("least", "early"), [(0, True), (2**40, False)])
def test_casts_of_large_parameters_run_early_those_of_experts_too(least, early, monkeypatch):
    monkeypatch.setattr("autoshard.graph.casts.LARGE", least)
    graph = capture_deep(*moe.tiny(), training=True, precision=autoshard.Precision(torch.bfloat16))[0]
    parameters = set(graph.parameters.values())
    casts = {i for i, op in enumerate(graph.ops) if op.target == "aten._to_copy.default" and op.inputs[0][0] in parameters}
    assert {len(graph.ops[i].output.shape) for i in casts} == {1, 2, 3}
    assert early_casts(graph) & casts == (casts if early else set())


@pytest.mark.parametrize(("model", "mesh", "scheme"), CASES)
def test_without_overlap_seconds_are_the_cost_and_the_peak_is_the_plans(plans, model, mesh, scheme):
    graph, solution = plans(model, mesh, scheme)
    serial = timeline_of_solution(graph, solution, overlap=False)
    assert serial.seconds == pytest.approx(solution.cost, rel=1e-9)
    assert math.fsum(task.seconds for task in serial.tasks) == pytest.approx(solution.cost, rel=1e-9)
    assert serial.peak_bytes == pytest.approx(solution.peak_bytes, rel=1e-12)
    assert serial.exposed_communication_seconds == pytest.approx(serial.communication_seconds, rel=1e-9)


@pytest.mark.parametrize(("mesh", "scheme"), [("2x2", "fsdp"), ("4", "megatron_sp")])
def test_the_bytes_during_an_op_are_those_of_all_that_is_alive_then(plans, mesh, scheme):
    graph, solution = plans("gpt2", mesh, scheme)
    formulation, choice = formulation_of_solution(graph, solution)
    problem, places = formulation.problem, _Builder(formulation, tuple(choice), False, 1).places
    alive = [math.fsum(u.held(choice) for u in problem.usages if u.start <= i < u.end) for i in range(len(graph.ops))]
    assert places.live.tolist() == pytest.approx(alive) and max(alive) <= solution.peak_bytes < places.limit
    moved = [math.fsum(u.held(choice) for u in problem.usages if u.edge == k) for k in range(len(problem.edges))]
    assert places.sizes == pytest.approx(moved[: len(places.sizes)]) and sum(moved) > 0


@pytest.mark.parametrize(("model", "mesh", "scheme"), CASES)
def test_overlap_is_faster_than_serial_and_slower_than_any_stream(plans, model, mesh, scheme):
    graph, solution = plans(model, mesh, scheme)
    timeline = timeline_of_solution(graph, solution)
    streams = {}
    for task in timeline.tasks:
        streams[task.stream] = streams.get(task.stream, 0.0) + task.seconds
    assert max(streams.values()) <= timeline.seconds * (1 + 1e-9)
    assert timeline.seconds <= solution.cost * (1 + 1e-9)
    assert timeline.exposed_communication_seconds <= timeline.communication_seconds * (1 + 1e-9)
    kernels = math.fsum(task.seconds for task in timeline.tasks if task.stream == 0)
    assert timeline.seconds >= kernels


def test_time_lines_stay_what_they_are(plans):
    told = {}
    for case in CASES:
        line = timeline_of_solution(*plans(*case))
        sums = {key: float(values.sum()) for key, values in line.memory.items()}
        kinds = {kind: math.fsum(task.seconds for task in line.tasks if task.kind == kind) for kind in sorted({t.kind for t in line.tasks})}
        counts = [len(line.tasks), len(line.critical_path)]
        told[" ".join(case)] = [line.seconds, line.peak_bytes, line.exposed_communication_seconds, sums, kinds, counts]
    assert_stays("rooms/time_lines.json", told)


def test_overlap_hides_something(plans):
    graph, solution = plans("gpt2", "2x2", "fsdp")
    assert timeline_of_solution(graph, solution).seconds < 0.95 * solution.cost


def ends_of_moves(timeline, inputs):
    """When the value of each link is there, by the op that computes it and what is moved, through views and hubs."""
    end, program = timeline.times.end, timeline.program
    ops, links = program.formulation.graph.ops, program.formulation.tensor_edges
    fills = {link.b: k for k, link in enumerate(links) if link.b >= len(ops)}

    @functools.cache
    def moved(k):
        first, stop = program.of_link[k]
        return end[stop - 1] if first < stop else ready(links[k].a)

    @functools.cache
    def ready(node):
        if node >= len(ops):
            return moved(fills[node])
        first, stop = program.of_op[node]
        if ops[node].is_placeholder:
            return 0.0
        return max(end[first:stop]) if first < stop else max(map(moved, inputs[node]), default=0.0)

    return moved, ready


@pytest.mark.parametrize("shape", [(2, 2), (2, 2, 2)], ids=str)
@pytest.mark.parametrize("model", MODELS)
def test_nothing_begins_before_what_it_needs(graphs, model, shape):
    """Of random plans: values behind views that are moved themselves, and values at the end of the forward that the backward soon reads."""
    found = instance_of(asked(graphs[model], Mesh.from_bandwidths(shape, **SLOW), baselines=False).stepped()).formulated
    inputs = [[k for k, link in enumerate(found.tensor_edges) if link.b == i] for i in range(len(found.graph.ops))]
    for seed in range(3):
        timeline = timeline_of(found, random_choice(found, seed))
        begin, (moved, ready) = timeline.times.begin, ends_of_moves(timeline, inputs)
        for link, (first, stop) in zip(found.tensor_edges, timeline.program.of_link):
            assert first == stop or begin[first] >= ready(link.a) - 1e-12, (seed, link)
        for i, (first, stop) in enumerate(timeline.program.of_op):
            if first < stop and not found.graph.ops[i].is_placeholder:
                assert begin[first] >= max(map(moved, inputs[i]), default=0.0) - 1e-12, (seed, i)


def test_the_critical_path_is_the_step(plans):
    graph, solution = plans("gpt2", "2x2", "fsdp")
    timeline = timeline_of_solution(graph, solution)
    path, times = timeline.critical_path, timeline.times
    assert times.begin[path[0]] == 0 and times.end[path[-1]] == timeline.seconds
    assert all(times.begin[b] == times.end[a] for a, b in itertools.pairwise(path))
    assert math.fsum(timeline.critical_seconds.values()) == pytest.approx(timeline.seconds)
    assert list(timeline.critical_seconds.values()) == sorted(timeline.critical_seconds.values(), reverse=True)


def test_a_task_on_the_critical_path_delays_the_step_and_others_may_not(plans):
    graph, solution = plans("gpt2", "2x2", "fsdp")
    timeline = timeline_of_solution(graph, solution)

    def slower(i):
        tasks = list(timeline.tasks)
        tasks[i] = dataclasses.replace(tasks[i], seconds=tasks[i].seconds * 1.01)
        return run_program(dataclasses.replace(timeline.program, tasks=tuple(tasks)))

    on_path = max(timeline.critical_path, key=lambda i: timeline.tasks[i].seconds)
    assert max(slower(on_path).end) > timeline.seconds
    off_path = [i for i in range(len(timeline.tasks)) if i not in timeline.critical_path and timeline.tasks[i].seconds]
    assert any(max(slower(i).end) == timeline.seconds for i in off_path[:20])


def test_memory_by_kind_adds_up_and_ends_with_what_stays(plans):
    graph, solution = plans("gpt2", "2x2", "fsdp")
    for overlap in (True, False):
        memory = timeline_of_solution(graph, solution, overlap=overlap).memory
        kinds = [kind for kind in memory if kind not in ("seconds", "total")]
        assert sum(memory[kind] for kind in kinds) == pytest.approx(memory["total"])
        assert (memory["seconds"][1:] >= memory["seconds"][:-1]).all()
        assert all(memory[kind].min() >= -1e-6 for kind in kinds)
        assert memory["total"][-1] == pytest.approx(0, abs=1e-6)  # the step is over, everything is let go
        parameters = sum(row["local_bytes"] for row in solution.parameters.values() if "tied_to" not in row)
        assert memory["parameters"].max() == pytest.approx(parameters)


def test_what_is_reduced_counts_once():
    """The gradient of a large embedding, which comes last, was held by its op, by its reduction until the step's end, and as the result."""
    graph = capture_deep(*llama.tiny(vocab=1024, layers=1), training=True)[0]
    solution = scheme_plan(graph, Mesh.from_bandwidths((4,), **SLOW), "data_parallel", training=True, baselines=False)
    assert timeline_of_solution(graph, solution).peak_bytes <= solution.peak_bytes


def test_gradients_are_held_until_they_are_reduced(graphs):
    """Views of what matmuls compute, which the reductions read: a slow link leaves most of them waiting behind the last kernel."""
    mesh = Mesh.from_bandwidths((4,), intra_node_bandwidth=1e5)
    solution = scheme_plan(graphs["gpt2"], mesh, "data_parallel", training=True, baselines=False)
    line = timeline_of_solution(graphs["gpt2"], solution)
    last = max(end for task, end in zip(line.tasks, line.times.end) if task.kind == "compute")
    links = list(zip(line.program.formulation.tensor_edges, line.program.of_link))
    waiting = [link.tensor.bytes for link, (first, stop) in links if first < stop and line.times.begin[first] > last]
    activations = line.memory["activations"][line.memory["seconds"].searchsorted(last, side="right") - 1]
    assert len(waiting) > 5
    assert activations >= sum(waiting)
    unfinished = [link.tensor.bytes for link, (first, stop) in links if first < stop and line.times.end[stop - 1] > last]
    assert activations <= sum(unfinished) + 4  # the loss; other outputs of an op whose last one waits are free


def test_a_view_of_what_is_moved_counts_once_it_is_there():
    """From the end of the gather on, not beside the copy that is gathered."""

    class Turned(torch.nn.Module):
        def forward(self, x, y):
            return x.relu().transpose(0, 1), y.relu().neg()

    model = Turned(), (torch.empty(64, 64), torch.empty(4, 4))
    solution = autoshard.plan(*model, Mesh.from_bandwidths((4,), **SLOW), pins={"relu": "S(0)", "transpose": "R"}, baselines=False)
    beside = api.simulate(*model, solution).peak_bytes - solution.peak_bytes  # x turned has 16384 bytes
    assert 0 <= beside <= 4 * 4 * 4  # of y, while x is gathered


def test_prefetching_needs_memory(plans):
    graph, solution = plans("gpt2", "2x2", "fsdp")
    peaks = [timeline_of_solution(graph, solution, prefetch=n).memory["resharded_copies"].max() for n in (1, 1000)]
    assert peaks[0] < peaks[1]


@pytest.mark.parametrize("mesh", ["2x2", "4"])
@pytest.mark.parametrize("scheme", ["fsdp", "megatron"])
def test_what_begins_early_stays_below_the_plans_limit(plans, scheme, mesh):
    """And without a limit adds no more than parallelize gives it, which is faster; fetched as far ahead as it fits, not further."""
    graph, solution = plans("mlp", mesh, scheme)
    tight = dataclasses.replace(solution, assumptions={**solution.assumptions, "memory_limit": solution.peak_bytes})
    free, limited = (timeline_of_solution(graph, plan, prefetch=1000) for plan in (solution, tight))
    assert limited.peak_bytes <= solution.peak_bytes * 1.02  # what waits to be reduced beside kernels comes on top
    assert scheme == "megatron" or solution.peak_bytes < free.peak_bytes
    assert free.peak_bytes <= solution.peak_bytes + spare_bytes(solution.peak_bytes)
    assert solution.cost > limited.seconds >= free.seconds
    assert scheme == "megatron" or limited.seconds > free.seconds


def test_a_shared_link_slows_two_axes(graphs):
    mesh = Mesh.from_bandwidths((2, 2), devices_per_node=4, **SLOW)  # one node: both axes use a device's one port
    assert shared_links(mesh) == (0, 0)
    assert shared_links(Mesh.from_bandwidths((2, 2), **SLOW)) == (0, 1)
    solution = scheme_plan(graphs["gpt2"], mesh, "megatron", training=True, baselines=False)
    formulated, choice = formulation_of_solution(graphs["gpt2"], solution)
    assert timeline_of(formulated, choice).seconds > timeline_of(formulated, choice, links=(0, 1)).seconds
    assert timeline_of(formulated, choice, overlap=False).seconds == pytest.approx(solution.cost)  # alone, each has the whole link


def test_other_prices(plans):
    graph, solution = plans("gpt2", "2x2", "fsdp")
    fast = Mesh.from_bandwidths((2, 2))
    assert timeline_of_solution(graph, solution, fast).seconds < timeline_of_solution(graph, solution).seconds


def test_planned_is_the_plan(plans):
    graph, solution = plans("gpt2", "2x2", "megatron_sp")
    formulated, choice = formulation_of_solution(graph, solution)
    seen = evaluate(formulated.problem, choice)
    assert (seen.cost, seen.peak) == pytest.approx((solution.cost, solution.peak_bytes), rel=1e-12)


@pytest.mark.parametrize("model", ["mlp", "gpt2"])
def test_a_plan_of_another_model_is_refused(graphs, plans, model):
    _, solution = plans("gpt2" if model == "mlp" else "mlp", "2x2", "fsdp")
    with pytest.raises(ValueError, match="does not fit this model"):
        formulation_of_solution(graphs[model], solution)


def test_a_changed_layout_changes_the_seconds(plans):
    """Negative control: the cost is that of these layouts, not a number from the file."""
    graph, solution = plans("mlp", "2x2", "fsdp")
    _, other = plans("mlp", "2x2", "data_parallel")
    mixed = dataclasses.replace(solution, layouts=other.layouts, results=other.results)
    assert timeline_of_solution(graph, mixed, overlap=False).seconds == pytest.approx(other.cost)
    assert other.cost != pytest.approx(solution.cost, rel=1e-3)


def test_a_planned_solution_from_a_model():
    model, inputs = mlp.tiny()
    solution = autoshard.plan(model, inputs, Mesh.from_bandwidths((2, 2), **SLOW), training=True, baselines=False)
    timeline = api.simulate(model, inputs, solution)
    assert isinstance(timeline, Timeline)
    assert timeline.seconds <= solution.cost * (1 + 1e-9)


def test_inference_has_no_backward_and_no_update():
    model, inputs = mlp.tiny(loss=False)
    solution = autoshard.plan(model, inputs, Mesh.from_bandwidths((2, 2)), baselines=False, objective="serial")
    timeline = api.simulate(model, inputs, solution)
    assert {task.phase for task in timeline.tasks} == {"forward"}


def test_streams_begin_in_the_order_of_the_list(plans):
    graph, solution = plans("llama", "2x2", "fsdp")
    timeline = timeline_of_solution(graph, solution)
    last = {}
    for i, task in enumerate(timeline.tasks):
        assert timeline.times.begin[i] >= last.get(task.stream, 0.0)
        last[task.stream] = timeline.times.end[i]
        assert all(j < i for j in task.after)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_parameters_that_are_cast_are_fetched_as_early_as_those_that_are_not(microbatches, monkeypatch):
    """Stored in float32, fully sharded: the cast of a shard runs where its gather begins, before kernels that stand before it."""
    monkeypatch.setattr("autoshard.graph.casts.LARGE", 0)
    graph = capture_deep(*llama.tiny(), training=True, precision=autoshard.Precision(torch.bfloat16))[0]
    devices = Mesh.from_bandwidths((4,), **SLOW)
    solution = scheme_plan(graph, devices, "fsdp", training=True, baselines=False, microbatches=microbatches)
    graph = with_microbatches(graph, "float32") if microbatches > 1 else graph
    line = timeline_of_solution(graph, solution)
    program = line.program
    casts = sorted(early_casts(graph))
    assert len(casts) == 2 * len(graph.parameters) - 1  # the backward of an embedding does not read it
    kernels = [task.op for task in program.tasks if task.kind == "compute"][-len(graph.ops) :]
    hoisted = [i for i in casts if i in kernels and any(other < i for other in kernels[kernels.index(i) :])]
    assert len(hoisted) > len(casts) / 2
    first = next(k for k, i in enumerate(kernels) if graph.ops[i].backward and i not in casts)
    assert sum(i in kernels[:first] for i in casts) < 0.9 * len(casts)  # none before its own fetch begins
    assert line.peak_bytes <= solution.peak_bytes + spare_bytes(solution.peak_bytes)  # nor is room taken for it before
    in_place = [task.op for task in timeline_of_solution(graph, solution, overlap=False).tasks if task.kind == "compute"]
    assert in_place[: in_place.index(casts[-1])] == sorted(in_place[: in_place.index(casts[-1])])


def test_prefetch_below_zero_is_said(plans):
    graph, solution = plans("mlp", "2x2", "fsdp")
    with pytest.raises(ValueError, match="prefetch is -1"):
        program_of(*formulation_of_solution(graph, solution), prefetch=-1)


def check_trace(trace):
    """What ui.perfetto.dev's importer of Chrome's JSON asks for; returns the complete events by (pid, tid)."""
    parsed = json.loads(json.dumps(trace, allow_nan=False))
    assert set(parsed) == {"traceEvents", "displayTimeUnit"} and parsed["displayTimeUnit"] in ("ms", "ns")
    rows, names = {}, set()
    for event in parsed["traceEvents"]:
        assert event["ph"] in ("X", "M", "C")
        assert isinstance(event["name"], str) and event["name"]
        assert type(event["pid"]) is int and type(event["tid"]) is int
        assert isinstance(event["ts"], (int, float)) and event["ts"] >= 0
        assert isinstance(event.get("args", {}), dict)
        if event["ph"] == "X":
            assert isinstance(event["dur"], (int, float)) and event["dur"] >= 0
            rows.setdefault((event["pid"], event["tid"]), []).append(event)
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name") and isinstance(event["args"]["name"], str)
            names.add((event["pid"], event["tid"]))
        if event["ph"] == "C":
            assert all(isinstance(value, (int, float)) for value in event["args"].values())
    for row, events in rows.items():
        assert row in names  # every stream says what it is
        events.sort(key=lambda event: event["ts"])
        for a, b in itertools.pairwise(events):  # slices of one track nest or follow each other
            assert a["ts"] + a["dur"] <= b["ts"] + 1e-6
    return rows


def test_traces_are_what_perfetto_loads(plans):
    graph, solution = plans("gpt2", "2x2", "fsdp")
    timeline = timeline_of_solution(graph, solution)
    trace = trace_of(timeline)
    rows = check_trace(trace)
    assert sum(map(len, rows.values())) == len(timeline.tasks)
    assert max(e["ts"] + e["dur"] for events in rows.values() for e in events) == pytest.approx(timeline.seconds * 1e6)
    counters = [event for event in trace["traceEvents"] if event["ph"] == "C"]
    assert max(sum(event["args"].values()) for event in counters) == pytest.approx(timeline.peak_bytes)


def test_the_trace_check_finds_a_planted_overlap(plans):
    graph, solution = plans("mlp", "2x2", "fsdp")
    trace = trace_of(timeline_of_solution(graph, solution))
    longest = max((e for e in trace["traceEvents"] if e["ph"] == "X" and e["tid"] == 0), key=lambda e: -e["ts"])
    longest["dur"] += 1e6
    with pytest.raises(AssertionError):
        check_trace(trace)


@pytest.mark.parametrize("scheme", ["data_parallel", "fsdp", "megatron"])
def test_small_gradient_reductions_go_as_one(plans, scheme):
    graph, solution = plans("gpt2", "2x2", scheme)
    apart, joined = timeline_of_solution(graph, solution), timeline_of_solution(graph, solution, join=True)
    reductions = [i for i, task in enumerate(joined.tasks) if task.phase == "update" and task.kind in ("all_reduce", "reduce_scatter")]
    buckets = [i for i in reductions if joined.tasks[i].seconds]
    assert len(buckets) < len(reductions)
    assert math.fsum(joined.tasks[i].bytes for i in reductions) == pytest.approx(math.fsum(apart.tasks[i].bytes for i in reductions))
    before, after = (math.fsum(line.tasks[i].seconds for i in reductions) for line in (apart, joined))
    assert after < before  # latency is paid once per bucket
    for i, task in enumerate(joined.tasks):  # no update begins before the bucket with its gradient is there
        if task.kind == "optimizer":
            assert all(joined.times.begin[i] >= joined.times.end[j] for j in task.after)
    ends = {task.name: joined.times.begin[i] for i, task in enumerate(joined.tasks) if task.kind == "optimizer"}
    for k, link in enumerate(joined.program.formulation.tensor_edges):
        first, stop = joined.program.of_link[k]
        if link.b < len(graph.ops) and graph.ops[link.b].kind == "parameter" and first < stop:
            assert joined.tasks[stop - 1].seconds and ends[graph.ops[link.b].name] >= joined.times.end[stop - 1]


@pytest.mark.parametrize("scheme", ["data_parallel", "fsdp"])
def test_a_bucket_waits_only_where_its_gradients_fit(plans, scheme):
    """Beside a limit that the plan just meets, they were held until the bucket was full: a quarter of the peak on top."""
    graph, solution = plans("gpt2", "4", scheme)
    limits = [{}, *({"memory_limit": n * solution.peak_bytes} for n in (1, 2, 0.5))]
    plans_at = [dataclasses.replace(solution, assumptions={**solution.assumptions, **limit}) for limit in limits]
    free, tight, far, over = (timeline_of_solution(graph, plan, join=True) for plan in plans_at)
    assert free.peak_bytes > 1.2 * solution.peak_bytes
    assert tight.peak_bytes < 1.05 * solution.peak_bytes  # what is being reduced beside kernels
    assert any(" and " in task.name for task in tight.tasks)
    assert free.seconds == far.seconds == over.seconds  # of a plan that exceeds its limit nothing is held back


def test_without_overlap_nothing_is_joined(plans):
    graph, solution = plans("gpt2", "2x2", "data_parallel")
    assert timeline_of_solution(graph, solution, overlap=False, join=True).seconds == pytest.approx(solution.cost)


def test_what_is_known_of_a_formulation_is_forgotten_with_it(plans):
    formulation, choice = formulation_of_solution(*plans("mlp", "4", "fsdp"))
    program = program_of(formulation, choice)
    assert formulation in KNOWN and program_of(formulation, choice).tasks == program.tasks
    held = weakref.ref(formulation)
    del formulation, program
    gc.collect()
    assert held() is None
