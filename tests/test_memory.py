"""Predicted peaks against the bytes that one rank's program takes under torch's MemTracker, and what a plan says about its peak."""

from functools import cache
from types import SimpleNamespace

import pytest

from autoshard.api import plan
from autoshard.capture import capture
from autoshard.cost import bytes_per_parameter
from autoshard.formulate import KINDS, Formulation, Training, formulate
from autoshard.graph import Graph
from autoshard.mesh import Mesh
from autoshard.planning.describe import layouts_of, peak_of, results_of
from autoshard.planning.warm_starts import random_choice
from autoshard.problem import evaluate
from autoshard.simulate import timeline_of
from autoshard.solution import Solution
from autoshard.solvers import solve
from autoshard.strategies import candidates
from benchmarks.studies.peaks import ON_RANKS, RANKS, TOLERANCE, measured_peak, on_ranks
from models import mlp
from tests.helpers import TINY, tiny_graph

MODELS = ("mlp", "gpt2")
MESHES = ((8,), (2, 4))
CASES = [(name, sizes) for name in MODELS for sizes in MESHES]
IDS = [f"{name}-{'x'.join(map(str, sizes))}" for name, sizes in CASES]


@cache
def formulated(name: str, sizes: tuple[int, ...]) -> Formulation:
    graph, mesh = tiny_graph(name, True), Mesh.from_bandwidths(sizes)
    return formulate(graph, candidates(graph, mesh), mesh, training=Training())


def as_solution(f: Formulation, choice) -> Solution:
    judged = evaluate(f.problem, choice)
    layouts, results = layouts_of(f, choice), results_of(f, choice)
    taken = evaluate(f.problem_as_run(choice), choice).peak
    return Solution(layouts, results, f.mesh, judged.cost, 0.0, "feasible", "", taken, True, peak=peak_of(f, choice))


def ratio(graph: Graph, solution: Solution, **options) -> float:
    return solution.peak_bytes / measured_peak(graph, solution, **options)


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_the_peak_of_the_best_plan_is_what_its_program_takes(case):
    f = formulated(*case)
    found = ratio(f.graph, as_solution(f, solve(f.problem).choice))
    assert 1 - 1e-3 <= found <= 1 + TOLERANCE


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_the_peak_of_random_layouts_is_never_below_what_their_program_takes(case):
    f = formulated(*case)
    choice = random_choice(f, 0)
    solution = as_solution(f, choice)
    as_run = ratio(f.graph, solution)
    assert 1 - 0.05 <= as_run <= 1.2  # `drive` holds what a collective has returned while the next step of the route runs
    most = as_run * evaluate(f.problem, choice).peak / solution.peak_bytes  # as a limit has it: copies count as long as any view
    assert 1 - 0.02 <= most <= 1.6


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_the_serial_time_line_of_random_layouts_has_their_peak(case):
    f = formulated(*case)
    for choice in (random_choice(f, seed) for seed in range(3)):
        assert timeline_of(f, choice, overlap=False).peak_bytes == pytest.approx(f.peak(choice), rel=1e-12)


@pytest.mark.parametrize("batch", [256, 2048])
@pytest.mark.parametrize("sizes", [(4,), (8,)])
def test_a_gradient_that_ends_in_a_view_is_reduced_beside_nothing_of_the_next_op(sizes, batch):
    graph, mesh = capture(*mlp.mlp(batch=batch, width=128, hidden=512), training=True), Mesh.from_bandwidths(sizes)
    f = formulate(graph, candidates(graph, mesh), mesh, training=Training())
    assert ratio(graph, as_solution(f, solve(f.problem).choice)) == pytest.approx(1, abs=ON_RANKS)


@pytest.mark.slow
@pytest.mark.parametrize("name", RANKS)
def test_ranks_hold_what_is_predicted(name):
    """Training on 4 gloo ranks: 20 plans with limits, recomputation, offloading, microbatches, and pipelines in four orders."""
    row = on_ranks(RANKS[name], SimpleNamespace(data="models"))
    assert row["ok"], row


def test_a_forgotten_part_is_seen():
    """The control: states that nobody counted put the prediction out of bounds."""
    graph, mesh = tiny_graph("mlp", True), Mesh.from_bandwidths((2, 4))
    f = formulate(graph, candidates(graph, mesh), mesh, training=Training("sgd"))
    solution = as_solution(f, solve(f.problem).choice)
    assert abs(ratio(graph, solution, optimizer="sgd") - 1) <= TOLERANCE
    assert ratio(graph, solution, optimizer="adamw") < 1 - TOLERANCE


def test_a_plan_under_a_limit_takes_no_more():
    module, inputs = TINY["mlp"]()
    mesh = Mesh.from_bandwidths((2, 2))
    asked = {"training": True, "baselines": False, "objective": "serial"}
    free = plan(module, inputs, mesh, **asked)
    limit = 0.8 * free.peak_bytes
    tight = plan(module, inputs, mesh, **asked, memory_limit=limit, gap=0.1)
    assert measured_peak(tiny_graph("mlp", True), tight) <= limit < measured_peak(tiny_graph("mlp", True), free)


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_the_parts_of_the_peak_add_up_to_it(case):
    f = formulated(*case)
    for choice in (solve(f.problem).choice, random_choice(f, 0)):
        judged, peak = evaluate(f.problem_as_run(choice), choice), peak_of(f, choice)
        assert sum(peak["parts"].values()) == pytest.approx(judged.peak, rel=1e-12)
        assert set(peak["parts"]) <= set(KINDS) and peak["parts"]["parameters"] > 0 and peak["parts"]["optimizer_state"] > 0
        assert peak["op"] in f.graph.index or peak["op"] == "end"
        assert [row["bytes"] for row in peak["largest"]] == sorted((row["bytes"] for row in peak["largest"]), reverse=True)


# -- the optimizer -----------------------------------------------------------------------------------------------------------------


def state_of(**options) -> float:
    module, inputs = TINY["mlp"](dtype=options.pop("dtype", "float32"))
    solution = plan(module, inputs, Mesh.from_bandwidths((2,)), training=True, baselines=False, pins=PINS, **options)
    return solution.peak["parts"].get("optimizer_state", 0.0) / sum(row["local_bytes"] for row in solution.parameters.values())


PINS: dict[str, str] = {}


@pytest.mark.parametrize(("optimizer", "share"), [("adamw", 2.0), ("sgd", 0.0), ("momentum", 1.0), (12, 3.0), (0.5, 0.125)])
def test_the_state_is_the_optimizers(optimizer, share):
    assert state_of(optimizer=optimizer) == pytest.approx(share)  # per byte of a float32 parameter


def test_master_weights_are_four_bytes_of_narrow_parameters_only():
    assert state_of(optimizer="sgd", master_weights=True) == 0.0
    assert state_of(optimizer="sgd", master_weights=True, dtype="bfloat16") == pytest.approx(2.0)
    assert state_of(optimizer="adamw", master_weights=True, dtype="bfloat16") == pytest.approx(6.0)


@pytest.mark.parametrize("optimizer", ["adam", -1, True, float("inf"), float("nan"), None])
def test_no_optimizer_is_one_sentence(optimizer):
    with pytest.raises(ValueError, match="unknown optimizer .*; expected adamw, sgd, momentum, or its bytes of state per parameter"):
        bytes_per_parameter(optimizer)
