"""The objective "overlapped": streams, chains and prices bound every time line, and the plan's is never above the serial plan's."""

import itertools
import math
import time
from dataclasses import replace
from functools import cache
from importlib import import_module

import numpy as np
import pytest
import torch

import autoshard
from autoshard import api
from autoshard.capture import capture
from autoshard.cost import shared_links
from autoshard.formulate import EARLY, stream_seconds, with_pins
from autoshard.mesh import Mesh
from autoshard.planning.describe import choice_of
from autoshard.planning.instance import instance_of
from autoshard.planning.options import Options, Stopwatch
from autoshard.planning.overlapped import OverlappedPlan, overlapped
from autoshard.planning.plan import plan_graph
from autoshard.planning.question import ask
from autoshard.planning.warm_starts import random_choice
from autoshard.problem import evaluate
from autoshard.report.planned import planned_report, summary
from autoshard.report.proof import proof, verdict
from autoshard.report.terminal import as_text
from autoshard.simulate.chains import critical_chain, full_streams, longest_chain
from autoshard.simulate.timeline import timeline_of
from autoshard.solution import Solution
from autoshard.solvers import (
    Loads,
    Part,
    best_prices,
    mixed,
    parts_that_differ,
    priced_by_stream,
    seconds_of_choice,
    seconds_of_parts,
    solve,
)
from models import mlp
from tests.helpers import TINY, tiny_graph
from tests.helpers_models import asked, scheme_plan

CASES = [
    ("mlp", (2, 2), 1), ("mlp", (2, 2), 3), ("llama", (4,), 1), ("mlp in bfloat16", (2, 2), 1), ("mlp in bfloat16", (4,), 2),
    pytest.param(("llama", (2, 2), 2), marks=pytest.mark.slow),
]  # fmt: skip
PLANS = 6  # drawn at random
search = import_module("autoshard.planning.search")


@pytest.fixture(autouse=True)
def every_cast_is_of_a_large_parameter(monkeypatch):
    monkeypatch.setattr("autoshard.graph.casts.LARGE", 0)


def mesh_of(sizes: tuple[int, ...]) -> Mesh:
    return Mesh.from_bandwidths(sizes, intra_node_bandwidth=2e9, inter_node_bandwidth=1e9)


def graph_of(name: str):
    """Of a tiny model, stored in float32, and computed "in bfloat16" where its name says so."""
    model, _, precise = name.partition(" in ")
    return capture(*TINY[model](), training=True, precision=autoshard.Precision(torch.bfloat16)) if precise else tiny_graph(model, True)


@cache
def instance(name: str, sizes: tuple[int, ...], m: int):
    found = instance_of(asked(graph_of(name), mesh_of(sizes), microbatches=m).stepped())
    plans = [random_choice(found.formulated, seed) for seed in range(PLANS)]
    best = solve(found.problem, gap=0.01).choice
    return found.formulated, [best, *plans]


@cache
def planned(name: str, sizes: tuple[int, ...], m: int, objective: str) -> Solution:
    options = {"microbatches": m, "objective": objective, "baselines": False, "gap": 0.01}
    return plan_graph(asked(graph_of(name), mesh_of(sizes), **options))


@pytest.mark.parametrize("case", CASES)
def test_the_seconds_of_all_streams_are_the_costs(case):
    formulated, _ = instance(*case)
    streams, problem = stream_seconds(formulated), formulated.problem
    joined = stream_seconds(formulated, joined=True)
    for costs, parts in zip(problem.node_costs, streams.nodes, strict=True):
        assert parts.sum(axis=1) == pytest.approx(costs, rel=1e-12)
    for edge, parts, least in zip(problem.edges, streams.edges, joined.edges, strict=True):
        finite = np.isfinite(edge.table)
        assert parts.sum(axis=2)[finite] == pytest.approx(edge.table[finite], rel=1e-12)
        assert (least <= parts * (1 + 1e-12)).all()
    assert any((least < parts).any() for parts, least in zip(streams.edges, joined.edges, strict=True))


@pytest.mark.parametrize("case", CASES)
def test_streams_are_those_of_the_time_line(case):
    formulated, plans = instance(*case)
    streams, n = stream_seconds(formulated), len(case[1])  # axes, which have a stream in the background, too
    for choice in plans:
        tasks = timeline_of(formulated, choice).tasks
        sums = sum(of[i] for of, i in zip(streams.nodes, choice, strict=True))
        sums = sums + sum(of[choice[e.a], choice[e.b]] for of, e in zip(streams.edges, formulated.problem.edges, strict=True))
        sums[0], sums[EARLY] = sums[0] + sums[EARLY], 0.0  # early or not, kernels are on the compute stream
        for s, ours in enumerate(sums):
            axes = [k + 1 for k, link in enumerate(shared_links(formulated.mesh)) if link + 1 == s]
            of_axis = [0] if s == 0 else [*axes, *(k + n for k in axes)]
            assert ours == pytest.approx(sum(task.seconds for task in tasks if task.stream in of_axis), rel=1e-9)


def violations(formulated, parts: list[Part], plans) -> int:
    """How many parts take longer than the time line of some plan."""
    streams = stream_seconds(formulated, joined=True)
    count = 0
    for choice in plans:
        lengths = seconds_of_parts(parts, *seconds_of_choice(formulated.problem, streams.nodes, streams.edges, choice))
        shortest = min(timeline_of(formulated, choice, join=join, prefetch=p).seconds for join in (False, True) for p in (1, 4))
        count += int((lengths > shortest * (1 + 1e-9)).sum())
    return count


@pytest.mark.parametrize("case", CASES)
def test_the_longest_chain_of_one_plan_is_no_longer_than_the_time_line_of_any(case):
    formulated, plans = instance(*case)
    streams = stream_seconds(formulated, joined=True)
    of = [seconds_of_choice(formulated.problem, streams.nodes, streams.edges, choice) for choice in plans]
    mean = tuple(sum(one[k] for one in of) / len(of) for k in (0, 1))
    chains = [longest_chain(formulated, streams, *one) for one in (*of, mean)]
    parts = [Part(chain.nodes, chain.edges) for chain in (*chains, *full_streams(formulated, streams))]
    if formulated.mesh.device.beside == 0 or streams.num == 4:  # else a longest chain is that without what slows it
        for k, one in enumerate((*of, mean)):
            assert seconds_of_parts(parts[: len(chains)], *one).max() <= seconds_of_parts([parts[k]], *one)[0] * (1 + 1e-9)
    assert violations(formulated, parts, plans) == 0


@pytest.mark.parametrize("slowed", [0.0, 0.5])
def test_chains_are_bounds_however_much_collectives_slow_kernels(slowed):
    formulated, plans = instance("mlp", (2, 2), 1)
    device = replace(formulated.mesh.device, slowed=slowed)
    formulated = replace(formulated, mesh=replace(formulated.mesh, device=device))
    streams = stream_seconds(formulated, joined=True)
    of = [seconds_of_choice(formulated.problem, streams.nodes, streams.edges, choice) for choice in plans]
    chains = [*(longest_chain(formulated, streams, *one) for one in of), *full_streams(formulated, streams)]
    assert violations(formulated, [Part(chain.nodes, chain.edges) for chain in chains], plans) == 0


@pytest.mark.parametrize("case", CASES)
def test_the_critical_chain_has_the_seconds_of_the_critical_path(case):
    formulated, plans = instance(*case)
    streams = stream_seconds(formulated)
    for choice in plans:
        timeline = timeline_of(formulated, choice)
        nodes, edges = seconds_of_choice(formulated.problem, streams.nodes, streams.edges, choice)
        chain = critical_chain(timeline, streams)
        of_path = math.fsum(timeline.tasks[i].seconds for i in timeline.critical_path)
        of_chain = float((chain.nodes * nodes).sum() + (chain.edges * edges).sum())
        assert of_path * (1 - 1e-9) <= of_chain <= of_path * 1.05  # more where one of two tasks of an op on one stream is in the path


@pytest.mark.parametrize("case", CASES[:2])
def test_the_control_a_part_with_all_seconds_of_all_streams_is_too_long(case):
    formulated, plans = instance(*case)
    num = stream_seconds(formulated).num
    everything = Part(np.ones((len(formulated.problem.node_costs), num)), np.ones((len(formulated.problem.edges), num)))
    assert violations(formulated, [everything], plans) > 0


@pytest.mark.parametrize("in_place", [False, True])
def test_chains_leave_out_casts_that_run_early_and_would_be_too_long_with_them(in_place, monkeypatch):
    """Of fully sharded parameters, stored in float32, whose gathers are hidden. in_place: the control."""
    graph, mesh = graph_of("mlp in bfloat16"), Mesh.from_bandwidths((4,), intra_node_bandwidth=2e10)
    formulated = instance_of(asked(graph, mesh)).formulated
    choice = choice_of(formulated, scheme_plan(graph, mesh, "fsdp", training=True, baselines=False))
    if in_place:
        monkeypatch.setattr("autoshard.formulate.streams.early_casts", lambda graph: set())
    streams = stream_seconds(formulated, joined=True)
    chain = longest_chain(formulated, streams, *seconds_of_choice(formulated.problem, streams.nodes, streams.edges, choice))
    assert violations(formulated, [Part(chain.nodes, chain.edges)], [choice]) == in_place


@pytest.mark.parametrize("case", CASES)
def test_the_bound_is_below_every_time_line_and_the_plan_no_slower_than_the_serial_one(case):
    formulated, plans = instance(*case)
    solution, serial = planned(*case, "overlapped"), planned(*case, "serial")
    found = solution.overlapped
    times = [timeline_of(formulated, choice, join=True).seconds for choice in plans]
    assert 0 < found["bound_seconds"] <= min([*times, found["seconds"]])
    assert found["seconds"] <= found["serial_plan_seconds"]
    assert solution.bound <= serial.cost * (1 + 1e-9) and serial.cost <= solution.cost * (1 + 0.01)
    assert (solution.objective, serial.objective, serial.overlapped) == ("overlapped", "serial", {})


@pytest.mark.parametrize("case", [("mlp", (2, 2), 1), ("llama", (4,), 1)])
def test_a_search_without_time_has_the_least_seconds_of_the_fullest_stream_as_its_bound(case, monkeypatch):
    formulated, plans = instance(*case)
    monkeypatch.setattr(import_module("autoshard.planning.overlapped")._Search, "run", lambda *_: None)
    found = plan_graph(asked(graph_of(case[0]), mesh_of(case[1]), objective="overlapped", baselines=False)).overlapped
    streams = stream_seconds(formulated, joined=True)
    computed = sum(rows[:, 0][np.isfinite(costs)].min() for rows, costs in zip(streams.nodes, formulated.problem.node_costs, strict=True))
    assert 0 < computed * (1 - 1e-9) <= found["bound_seconds"] <= min(timeline_of(formulated, x, join=True).seconds for x in plans)


def test_simulate_gives_the_seconds_that_the_plan_was_chosen_by(tmp_path):
    solution = planned("mlp", (2, 2), 1, "overlapped")
    solution.save(tmp_path / "plan.json")
    loaded = api.load(tmp_path / "plan.json")
    assert loaded.to_dict() == solution.to_dict() and loaded.objective_gap == solution.objective_gap
    assert api.simulate(*TINY["mlp"](), loaded).seconds == pytest.approx(solution.overlapped["seconds"], rel=1e-9)
    assert api.verify(*TINY["mlp"](), loaded)["ok"]


def test_the_prices_of_streams_prove_the_optimum_of_two_equal_streams():
    """Two nodes, each on one of two streams: the sum on either is at least 1 and the cheapest choice of all has one on each."""
    from autoshard.problem import Problem

    problem = Problem(("a", "b"), (np.ones(2), np.ones(2)), ())
    nodes = [np.eye(2), np.eye(2)]
    parts = [Part(np.eye(2)[[s, s]], np.zeros((0, 2))) for s in range(2)]
    known = [seconds_of_parts(parts, *seconds_of_choice(problem, nodes, [], choice)) for choice in ((0, 0), (1, 1))]
    prices, _, shares, value = best_prices(known)
    assert prices == pytest.approx([0.5, 0.5]) and value == pytest.approx(1.0)
    assert shares == pytest.approx([0.5, 0.5])  # the other plan of the same value: half of each
    weights = sum(price * part.nodes for price, part in zip(prices, parts))
    assert solve(priced_by_stream(problem, nodes, [], weights, np.zeros((0, 2)))).bound == pytest.approx(1.0)
    assert parts_that_differ(problem, np.array([0, 0]), np.array([1, 1])) == [[0], [1]]


def test_a_byte_costs_what_makes_a_fast_plan_that_is_too_large_as_long_as_a_slow_one():
    """max over z of min(1 + z, 3 - z), and half of each plan, which holds just the limit."""
    prices, of_bytes, shares, value = best_prices([np.array([1.0]), np.array([3.0])], [np.array([1.0]), np.array([-1.0])])
    assert (prices.tolist(), of_bytes.tolist(), value) == ([1.0], pytest.approx([1.0]), pytest.approx(2.0))
    assert shares == pytest.approx([0.5, 0.5])
    assert best_prices([np.array([1.0])], [np.array([-0.5])])[1] == 0.0 < best_prices([np.array([1.0])], [np.array([0.5])])[1]


def test_bytes_at_a_price_bound_every_plan_that_fits_and_a_mixture_of_two_plans_fits():
    _, instance, problem, plans = few_choices(3, True, 0)
    peaks = sorted(evaluate(problem, plan).peak for plan in plans)
    limited = replace(problem, usage_limit=peaks[len(peaks) // 3])
    loads = Loads(limited)
    times, price = loads.rows.times, evaluate(problem, plans[0]).cost
    for k in range(len(times)):
        fees = np.where(np.arange(len(times)) == k, price, 0.0)
        bound = solve(loads.priced(limited, fees)).bound - fees.sum()
        assert bound <= min(evaluate(limited, plan).cost for plan in plans if evaluate(limited, plan).fits) * (1 + 1e-9)
    smallest, fastest = (min(plans, key=lambda plan: getattr(evaluate(problem, plan), what)) for what in ("peak", "cost"))
    found = evaluate(limited, mixed(limited, [smallest, fastest], time.monotonic, 60.0))
    assert found.fits and found.cost <= evaluate(limited, smallest).cost


def test_reports_name_the_objective():
    solution, serial = planned("mlp", (2, 2), 1, "overlapped"), planned("mlp", (2, 2), 1, "serial")
    words = " ".join(as_text(planned_report(solution)).split())
    assert "overlapped" in words and "one task after the other" in words and "overlapped" in verdict(solution)
    assert "overlap" not in verdict(serial) + proof(serial)
    record = summary(solution)
    assert record["objective"] == "overlapped" and record["overlapped"]["gap"] == solution.objective_gap
    assert summary(serial)["objective"] == "serial" and summary(serial)["overlapped"] is None


def test_an_unknown_objective_is_refused():
    with pytest.raises(ValueError, match="objective is 'fast'; expected one of overlapped, serial"):
        Options(objective="fast")


def test_equal_layers_are_alike_where_no_other_choice_gains_more_than_the_gap():
    graph = capture(*mlp.mlp(batch=4096, layers=3), training=True)
    solution = plan_graph(asked(graph, mesh_of((2, 2)), objective="overlapped", baselines=False, gap=0.05))
    for name in ("up.weight", "up.bias", "down.weight", "down.bias"):
        assert len({solution.layouts[f"layers.{i}.{name}"].outputs for i in range(3)}) == 1


def test_a_layer_hides_the_traffic_of_the_next_one_where_every_second_layer_is_as_in_another_plan(monkeypatch):
    graph, mesh = capture(*mlp.mlp(batch=4096, layers=6), training=True), Mesh.from_bandwidths((4,), intra_node_bandwidth=5e10)
    options = {"objective": "overlapped", "gap": 0.01}
    alternating = plan_graph(asked(graph, mesh, **options))
    monkeypatch.setattr(import_module("autoshard.planning.overlapped")._Search, "_every_second_layer", lambda self, x, y: [])
    alike = plan_graph(asked(graph, mesh, **options))
    assert alternating.objective_seconds < 0.99 * alike.objective_seconds
    assert alternating.objective_bound <= alternating.objective_seconds


def test_a_plan_is_told_before_the_search_for_the_shortest_time_line():
    told: list[Solution] = []
    question = replace(asked(tiny_graph("mlp", True), mesh_of((2, 2)), objective="overlapped", baselines=False), on_plan=told.append)
    solution = plan_graph(question)
    assert told[0].objective == "serial" and solution.objective == "overlapped"
    assert solution.objective_seconds <= solution.overlapped["serial_plan_seconds"]


def test_a_plan_of_all_blocks_recomputed_counts_where_it_is_faster_than_one_of_single_tensors(monkeypatch):
    """Within the limit that was asked for; with a wide gap that is none, both are planned."""
    graph, mesh = tiny_graph("mlp", True), mesh_of((4,))
    free = plan_graph(asked(graph, mesh, objective="overlapped", baselines=False, gap=0.2))
    options = {"objective": "overlapped", "baselines": False, "gap": 0.2, "memory_limit": 0.95 * free.peak_bytes}
    monkeypatch.setattr("autoshard.planning.variants.FULL", 0.0)
    plans = [plan_graph(asked(graph, mesh, recompute=which, **options)) for which in ("auto", "all")]
    monkeypatch.setattr(OverlappedPlan, "is_far", True)
    both = plan_graph(asked(graph, mesh, recompute="auto", **options))
    assert both.objective_seconds == min(plan.objective_seconds for plan in plans) and both.peak_bytes <= options["memory_limit"]


def test_exchanges_that_do_not_fit_leave_steps_for_those_that_do(monkeypatch):
    """Polishing that may simulate six times finds a faster plan behind sixty exchanges that exceed the limit."""
    question = asked(tiny_graph("mlp", True), mesh_of((2, 2)), objective="overlapped", baselines=False)
    found = instance_of(question.stepped())
    choices = sorted((random_choice(found.formulated, seed) for seed in range(9)), key=lambda x: evaluate(found.problem, x).peak)
    *fitting, largest = choices
    limit = evaluate(found.problem, fitting[-1]).peak
    assert evaluate(found.problem, largest).peak > limit * (1 + 1e-6)
    limited = replace(found, problem=replace(found.problem, usage_limit=limit))
    search = import_module("autoshard.planning.overlapped")._Search(question, limited)
    *_, slow = fitting = sorted(fitting, key=lambda x: timeline_of(found.formulated, x, join=True).seconds)
    search.offer(slow)
    search.bound, search.simulations = search.shortest / 1e6, 6
    moves = [(0.0, dict(enumerate(largest)))] * 60 + [(0.0, dict(enumerate(fitting[0])))]
    monkeypatch.setattr(search, "_moves", lambda x, known: (moves, []))
    search.polish()
    assert search.best == tuple(fitting[0]) != tuple(slow)


def small_search():
    question = asked(tiny_graph("mlp", True), mesh_of((2, 2)), objective="overlapped", baselines=False)
    return import_module("autoshard.planning.overlapped")._Search(question, instance_of(question.stepped()))


@pytest.mark.parametrize(("bound", "more_rounds", "by_path"), [(0.97, 1, [True, False]), (0.99, 1, [False]), (0.97, 0, [False])])
def test_exchanges_are_tried_by_the_critical_path_too_where_the_gap_of_a_small_model_is_wide(monkeypatch, bound, more_rounds, by_path):
    search, seen = small_search(), []
    search.offer(random_choice(search.instance.formulated, 0))
    search.bound, search.simulations, search.more_rounds = bound * search.shortest, 8, more_rounds
    monkeypatch.setattr(search, "_descend", lambda x, known, left, by_path: seen.append((left, by_path)) or left - 5)
    search.polish()
    assert seen == list(zip((8, 3), by_path))


def test_exchanges_come_in_turn_from_the_orders_of_both_prices_and_those_that_cannot_help_not_at_all():
    search = small_search()
    search.priced = [search.problem] * 2
    moves = [(np.array(extra), {k: k}) for k, extra in enumerate([(0.0, 9.0), (1.0, 8.0), (2.0, 1.0), (3.0, 2.0), (5.0, 0.0)])]
    assert [list(changes) for _, changes in search._in_turn(moves, slack=4.0)] == [[0], [2], [1], [3]]
    search.priced, moves = [search.problem], [(extra[:1], changes) for extra, changes in reversed(moves)]
    assert [list(changes) for _, changes in search._in_turn(moves, slack=4.0)] == [[0], [1], [2], [3]]


# -- against all plans ---------------------------------------------------------------------------------------------------------------


class Chain(torch.nn.Module):
    def __init__(self, layers: int):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(1024, 1024, bias=False) for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


@cache
def few_choices(layers: int, training: bool, seed: int, most: int = 4000):
    """A chain's question and instance, in which some choices are forbidden at random until there are few plans; and all these plans."""
    with torch.device("meta"):
        module, x = Chain(layers), torch.empty(8192, 1024)
    mesh = Mesh.from_bandwidths((2,), intra_node_bandwidth=60e9 if seed % 2 else 400e9)
    question = ask(module, (x,), mesh, Options(training=training), Stopwatch(None))
    instance = instance_of(question)
    formulated, random = instance.formulated, np.random.default_rng(seed)
    allowed = [np.isfinite(costs) for costs in formulated.problem.node_costs]
    kept = solve(formulated.problem).choice  # so that there is a plan
    while math.prod(int(mask.sum()) for mask in allowed) > most:
        v = max(range(len(allowed)), key=lambda v: (allowed[v].sum(), random.random()))
        allowed[v][random.choice([i for i in np.flatnonzero(allowed[v]) if i != kept[v]])] = False
    problem = with_pins(formulated, dict(enumerate(allowed)))
    all_plans = itertools.product(*(np.flatnonzero(mask).tolist() for mask in allowed))
    return question, instance, problem, [plan for plan in all_plans if math.isfinite(evaluate(problem, plan).cost)]


def shortest_of_all(formulated, problem, plans) -> float:
    return min(timeline_of(formulated, plan, join=True).seconds for plan in plans if evaluate(problem, plan).fits)


@cache
def found_and_best(chain, limited: bool):
    """What the search for the shortest time line finds, and the shortest of all plans; limited: to the peak of a third of them."""
    question, instance, problem, plans = few_choices(*chain)
    peaks = sorted(evaluate(problem, plan).peak for plan in plans)
    problem = replace(problem, usage_limit=peaks[len(peaks) // 3]) if limited else problem
    found = overlapped(question, replace(instance, problem=problem, few_layers=None), solve(problem), [])
    return found, shortest_of_all(instance.formulated, problem, plans)


TINY_CHAINS = [(layers, training, seed) for layers, training in ((3, False), (4, False), (5, False), (3, True)) for seed in range(3)]


@pytest.mark.parametrize("limited", [False, True])
@pytest.mark.parametrize("chain", TINY_CHAINS)
def test_of_all_plans_of_a_tiny_chain_none_is_below_the_bound_or_a_percent_faster(chain, limited):
    found, best = found_and_best(chain, limited)
    assert found.bound <= best * (1 + 1e-9)
    assert found.seconds <= 1.01 * best


def test_the_control_a_bound_a_percent_too_high_is_seen():
    """On some chain the bound is that near to the optimum."""
    answers = (found_and_best(chain, False) for chain in TINY_CHAINS)
    assert any(1.01 * found.bound > best for found, best in answers)


def test_what_reads_a_view_waits_for_what_the_view_waits_for():
    class Pooled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(48, 8)

        def forward(self, dense, pooled):
            return self.linear(pooled.flatten(1)).sum() + dense.sum()

    inputs = torch.zeros(8, 4), torch.zeros(8, 3, 16)
    solution = autoshard.plan(Pooled(), inputs, Mesh.from_bandwidths((2,)), training=True, baselines=False, pins={"input_1": "S(0)"})
    assert solution.bound <= solution.cost  # the matmul ran beside the all_gather of its own input, before the bound of any plan
