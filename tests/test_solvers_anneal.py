"""Annealing over forests: what it says an answer costs is what the judge says, and it finds optima of small problems."""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from autoshard.problem import Edge, NodeUsage, Problem, evaluate, without_limit
from autoshard.solvers import Status, annealing, hull, solve
from autoshard.solvers.annealing import Annealing, graph_of
from autoshard.solvers.cutting_planes import OPTIMISM, PriceAscent
from autoshard.solvers.dual_ascent import Messages
from autoshard.solvers.forest_moves import walk
from autoshard.solvers.incumbent import Incumbent
from tests.helpers_kept import assert_stays
from tests.helpers_problems import ascended, incumbent_of, random_problem


def grid_problem(seed: int, side: int = 4, num_choices: int = 3) -> Problem:
    """A grid (so that forests are less than the whole) whose limit is a third of the way between least and most bytes."""
    rng = np.random.default_rng(seed)
    nodes = side * side
    right = [(v, v + 1) for v in range(nodes) if v % side < side - 1]
    down = [(v, v + side) for v in range(nodes - side)]
    costs = tuple(rng.integers(0, 20, num_choices).astype(float) for _ in range(nodes))
    edges = tuple(Edge(a, b, rng.integers(0, 20, (num_choices, num_choices))) for a, b in right + down)
    usages = tuple(NodeUsage(v, v, v + 5, rng.integers(0, 9, num_choices)) for v in range(nodes))
    least, most = (sum(f(u.bytes) for u in usages[4:9]) for f in (min, max))
    return Problem(tuple(map(str, range(nodes))), costs, edges, usages, float(2 * least + most) / 3)


def start(problem: Problem) -> tuple[PriceAscent, Incumbent]:
    ticks = iter(range(10**9))
    incumbent = incumbent_of(problem, lambda: float(next(ticks)))
    ascent = PriceAscent(Messages(problem), incumbent)
    ascent.climb(3)
    if incumbent.choice is None:
        ascent.raise_until_fits()
    return ascent, incumbent


@pytest.mark.parametrize("seed", range(20))
def test_a_walk_reports_the_cost_that_the_judge_finds_and_what_it_keeps_fits(seed):
    problem = grid_problem(seed)
    ascent, incumbent = start(problem)
    if incumbent.choice is None:
        return
    messages = ascent.messages
    rows = range(len(messages.rows.times))
    x, best = np.array(incumbent.choice), np.array(incumbent.choice)
    graph, rng = graph_of(messages, rows), np.random.default_rng(seed)
    cost, moves = walk(graph, messages.limit, np.ones(len(rows)), x, best, 10.0, 0.1, 16, 0.5, 2 * 10**5, rng)
    assert moves > 50 and evaluate(problem, best).fits and evaluate(problem, x).fits
    assert cost == pytest.approx(evaluate(problem, best).cost, rel=1e-12) and cost <= incumbent.cost


@pytest.mark.parametrize("seed", range(5))
def test_choices_near_are_the_best_and_the_incumbents_and_more_with_a_larger_share_of_the_gap(seed):
    messages, incumbent = ascended(without_limit(grid_problem(seed)), 2)
    ones, before = [np.zeros(len(c), bool) for c in messages.problem.node_costs], 0
    for v, (keep, i) in enumerate(zip(ones, incumbent.choice, strict=True)):
        keep[[i, np.split(messages.reduced, messages.first[1:-1])[v].argmin()]] = True
    for share in (0.0, 0.3, 0.6, 1.0):
        keep = messages.near(incumbent, share)
        assert all((some <= more).all() for some, more in zip(ones, keep, strict=True)) and before <= sum(map(sum, keep))
        before = sum(map(sum, keep))
    assert [list(x) for x in keep] == [list(x | y) for x, y in zip(messages.affordable(incumbent), ones)]


def test_the_gap_of_a_bound_scales_with_the_costs():
    problem = grid_problem(0)
    ascent = PriceAscent(Messages(problem), incumbent_of(problem))
    for bound in (-8.0, 2.0, 400.0):
        assert ascent.gap(bound) == pytest.approx(OPTIMISM * abs(bound), rel=1e-12) and ascent.gap(bound) > 0  # without an answer
    ascent.incumbent = SimpleNamespace(cost=40.0)
    assert ascent.gap(37.0) == 3.0 and 0 < ascent.gap(40.0) < 1e-9


def path_of(problem: Problem) -> dict:
    """Where searches are after some steps, and where they end; all numbers are those of the problem, none of the clock."""
    told: dict = {}
    for sweeps in (1, 2, 5):
        messages, incumbent = ascended(problem, sweeps)
        told[f"{sweeps} sweeps"] = [incumbent.bound, incumbent.cost, *messages.message[::7].tolist()]
    ascent, incumbent = start(problem)
    told["climbed"] = [incumbent.bound, incumbent.cost, ascent.messages.prices.tolist()]
    for solver in ("auto", "prices", "dual", "dp"):
        ticks = iter(range(10**9))
        answer = solve(problem, solver=solver, clock=lambda ticks=ticks: float(next(ticks)) / 1e6)
        told[solver] = [str(answer.status), answer.cost, answer.bound, answer.reduced]
    return told


def test_searches_go_the_way_that_they_went():
    limited = {f"grid {seed}": grid_problem(seed, 3) for seed in (0, 1, 4, 7)}
    free = {f"free grid {seed}": without_limit(grid_problem(seed, 5)) for seed in (3,)}
    told: dict = {name: path_of(problem) for name, problem in (limited | free).items()}
    for seed in (4, 6, 8):
        found = hull(without_limit(random_problem(seed)), gap=1e-3)
        told[f"hull {seed}"] = [[point.memory, point.cost, point.gap] for point in found.points]
    assert_stays("rooms/searches.json", told)


@pytest.mark.slow
def test_annealing_finds_the_optimum_of_grids_and_rows_that_nobody_looked_at(monkeypatch):
    monkeypatch.setattr(annealing, "SLICE", 2 * 10**6)
    monkeypatch.setattr(annealing, "FEW_ROWS", -1)  # rows are looked at once they are exceeded
    found, tried = 0, 0
    for seed in range(20):
        problem = grid_problem(seed)
        ascent, incumbent = start(problem)
        if incumbent.choice is None:
            continue
        walkers = Annealing(ascent, incumbent)
        walkers.run(4)
        walkers.run(4)
        best = solve(problem, solver="ilp")
        assert best.status is Status.OPTIMAL and incumbent.cost >= best.cost
        assert evaluate(problem, incumbent.choice).fits
        found, tried = found + (incumbent.cost == best.cost), tried + 1
    assert tried >= 15 and found == tried, (found, tried)


def test_annealing_is_the_same_twice(monkeypatch):
    monkeypatch.setattr(annealing, "SLICE", 10**5)
    answers = []
    for _ in range(2):
        ascent, incumbent = start(grid_problem(3))
        Annealing(ascent, incumbent).run(3)
        answers.append(incumbent.choice)
    assert answers[0] == answers[1] is not None


def test_smallest_limit_of_a_grid_is_exact_and_its_nodes_hold_no_more_than_that():
    for seed in range(5):
        problem = replace(grid_problem(seed), usage_limit=1.0)
        answer = solve(problem)
        assert answer.status is Status.INFEASIBLE
        low, high = answer.infeasibility.smallest_limit
        assert low == high < math.inf and sum(b for _, b in answer.infeasibility.nodes) <= high
        assert solve(replace(problem, usage_limit=high)).status is Status.OPTIMAL
        assert solve(replace(problem, usage_limit=high - 1)).status is Status.INFEASIBLE
