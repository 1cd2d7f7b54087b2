"""Memory against cost: what is called proven is proven, by brute force; bounds hold at every limit; planted faults are seen."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from autoshard.problem import Edge, NodeUsage, Problem, evaluate, held, without_limit
from autoshard.solvers import Answer, Hull, HullPoint, Status, exchange_parts, hull, memory_hull
from autoshard.solvers.binding_times import binding_rows, load
from autoshard.solvers.lagrangian import KnownAnswer, Lagrangian, Line
from tests.helpers_problems import every_answer, every_choice, random_problem
from tests.helpers_refusals import assert_refused

TIGHT = memory_hull.LEAST_GAP  # relative
SEEDS = [seed for seed in range(40) if math.prod(map(len, random_problem(seed).node_costs)) <= 2000]


def unlimited(seed: int) -> Problem:
    return without_limit(random_problem(seed))


def wrong(problem: Problem, found: Hull, gap: float) -> list[str]:
    """What brute force says against a hull: bounds too high, points that are misjudged, dominated or not as proven as they say."""
    every = every_answer(problem)
    faults = []
    for limit in sorted({e.peak for e in every} | {0.0}):
        best = min((e.cost for e in every if e.peak <= limit), default=math.inf)
        if found.bound(limit) > best and found.bound(limit) - best > 1e-9 * abs(best):
            faults.append(f"bound {found.bound(limit)} at {limit}, the best costs {best}")
    for p in found.points:
        judged = evaluate(problem, p.choice)
        if (judged.cost, judged.peak) != (p.cost, p.memory):
            faults.append(f"{p} costs {judged.cost} and holds {judged.peak}")
        best = min(e.cost for e in every if e.peak <= p.memory)
        if p.gap <= gap and judged.cost - best > max(gap, TIGHT) * abs(judged.cost):
            faults.append(f"{p} is called proven, the best costs {best}")
    return faults + [f"{a} and {b} are out of order" for a, b in wrong_order(found)]


def wrong_order(found: Hull) -> list[tuple]:
    return [(a, b) for a, b in itertools.pairwise(found.points) if not (a.memory < b.memory and a.cost > b.cost)]


@pytest.mark.parametrize("seed", SEEDS)
def test_every_point_and_every_bound_agrees_with_brute_force(seed):
    problem, gap = unlimited(seed), (0.0, 1e-3)[seed % 2]
    found = hull(problem, gap=gap)
    assert wrong(problem, found, gap) == []
    assert all(p.gap <= max(gap, TIGHT) or p.cost == 0 for p in found.points)  # small problems are settled by branch and bound


@pytest.mark.parametrize("seed", SEEDS)
def test_prices_alone_never_claim_too_much(seed, monkeypatch):
    monkeypatch.setattr(memory_hull, "SMALL", -1)
    problem = unlimited(seed)
    assert wrong(problem, hull(problem), 1e-3) == []


def test_small_problems_get_their_whole_frontier():
    seen = 0
    for seed in SEEDS:
        problem = unlimited(seed)
        best, shown = math.inf, []
        for e in sorted(every_answer(problem), key=lambda e: (e.peak, e.cost)):
            if e.cost < best:
                best = e.cost
                if shown and e.peak <= shown[-1][0] * (1 + 1e-6):  # closer limits aren't told apart
                    shown.pop()
                shown.append((e.peak, e.cost))
        found = [(p.memory, p.cost) for p in hull(problem, gap=0.0).points]
        if len(shown) <= 12:
            assert np.shape(found) == np.shape(shown) and np.allclose(found, shown, rtol=1e-9), seed
            seen += len(shown) > 2
    assert seen > 3


@pytest.fixture(scope="module")
def known():
    problem = replace(layers(5), node_costs=(np.array([1.0, 4.0]), *(np.array([1.0, 3.0]),) * 4))
    return problem, hull(problem, gap=0.0)


def layers(n: int) -> Problem:
    """n layers, each 1 s and 2 bytes or 3 s and 1 byte, one price for all; a change from layer to layer costs nothing."""
    edges = tuple(Edge(v, v + 1, np.zeros((2, 2))) for v in range(n - 1))
    usages = tuple(NodeUsage(v, 0, 1, np.array([2.0, 1.0])) for v in range(n))
    return Problem(tuple(f"layer{v}" for v in range(n)), (np.array([1.0, 3.0]),) * n, edges, usages)


@pytest.mark.parametrize(
    "plant",
    [
        lambda h: replace(h, points=(*h.points[:-1], replace(h.points[-1], cost=h.points[-1].cost - 1))),  # not what it costs
        lambda h: replace(h, points=(h.points[1], *h.points)),  # dominated
        lambda h: replace(h, points=(HullPoint((0, 1, 0, 1, 1), 8.0, 11.0, 11.0),)),  # as small, but dearer than it must be
        lambda h: replace(h, lines=(*h.lines, Line(1000.0, 0.0))),  # a bound above all
        lambda h: replace(h, limits=(*h.limits, (h.points[1].memory, h.points[1].cost + 0.1))),
    ],
)
def test_the_check_by_brute_force_sees_planted_faults(known, plant):
    problem, found = known
    assert wrong(problem, found, 0.0) == []
    assert wrong(problem, plant(found), 0.0) != []


def apart(seed: int) -> Problem:
    """Seven nodes without edges, each with a fast choice that holds more."""
    rng = np.random.default_rng(seed)
    usages = tuple(NodeUsage(v, 0, 1, np.array([rng.uniform(0, 1), rng.uniform(2, 4)])) for v in range(7))
    return Problem(tuple("abcdefg"), tuple(np.array([rng.uniform(2, 4), rng.uniform(0, 1)]) for _ in range(7)), (), usages)


@pytest.mark.parametrize("seed", range(50))
def test_parts_in_which_answers_differ_add_up_and_the_mixture_between_is_the_nearest_to_half_way(seed):
    problem, rng = replace(random_problem(seed) if seed < 40 else apart(seed), usage_limit=0.0), np.random.default_rng(seed)
    every, rows = [(x, one) for x in every_choice(problem) if math.isfinite((one := evaluate(problem, x)).cost)], binding_rows(problem)
    peaks = list(range(0, len(rows.times), 2))
    known = [KnownAnswer(x, e.cost, e.peak, load(rows, held(problem, x))) for x, e in every]
    for _ in range(5 if len(known) > 1 and peaks else 0):
        some = rng.choice(len(known), 2, replace=False) if seed < 40 else (0, -1)
        a, b = sorted((known[k] for k in some), key=lambda one: one.memory)
        x, y = np.array(a.choice), np.array(b.choice)
        more = exchange_parts.differences(problem, rows, peaks, x, y)
        tables = [(e.table, e.a, e.b) for e in problem.edges] + [(u.bytes, *u.ends) for u in problem.usages if u.edge is not None]
        label = list(range(len(x)))
        for table, v, w in tables * len(x):
            if x[v] != y[v] and x[w] != y[w] and not table[x[v], x[w]] + table[y[v], y[w]] == table[x[v], y[w]] + table[y[v], x[w]]:
                label[v] = label[w] = min(label[v], label[w])
        numbers = {one: k for k, one in enumerate(sorted({label[v] for v in np.flatnonzero(x != y)}))}
        assert more.part.tolist() == [numbers[label[v]] if x[v] != y[v] else -1 for v in range(len(x))]
        listed = exchange_parts.parts_that_differ(problem, x, y)
        assert listed == [np.flatnonzero(more.part == k).tolist() for k in range(len(numbers))]
        for some in itertools.product((False, True), repeat=len(numbers)):
            mixture = evaluate(problem, z := np.where(np.array([*some, False])[more.part], y, x).tolist())
            if math.isfinite(mixture.cost):
                assert mixture.cost == pytest.approx(a.cost + more.cost @ some, rel=1e-9)
                assert load(rows, held(problem, z))[peaks] == pytest.approx(a.loads[peaks] + more.bytes @ some, rel=1e-9, abs=1e-12)
        if a.memory < b.memory and a.cost > b.cost:
            price = (a.cost - b.cost) / (b.memory - a.memory)
            worth = (more.cost + price * more.bytes.max(axis=0)) / max(abs(a.cost), abs(b.cost))
            order = sorted(range(len(worth)), key=lambda k: (round(worth[k] / exchange_parts.EVEN), k))
            assert more.by_worth(a, b).tolist() == order
            near, halves = None, math.inf
            for count in range(1, len(order) + 1):
                taken = order[:count]
                memory, cost = (a.loads[peaks] + more.bytes[:, taken].sum(axis=1)).max(), a.cost + more.cost[taken].sum()
                way = abs((memory - a.memory) / (b.memory - a.memory) + (a.cost - cost) / (a.cost - b.cost) - 1)
                if a.memory < memory < b.memory and a.cost > cost > b.cost and way < halves - 1e-12:
                    near, halves = np.where(np.isin(more.part, taken), y, x).tolist(), way
            found = exchange_parts.between(problem, rows, peaks, a, b)
            assert (None if found is None else found.tolist()) == near


def test_parts_between_two_corners_are_exchanged_one_by_one(monkeypatch):
    monkeypatch.setattr(memory_hull, "SMALL", -1)
    found = hull(layers(30), points=31)
    assert [p.memory for p in found.points] == list(range(30, 61))  # a layer at a time
    assert [p.cost for p in found.points] == list(range(90, 29, -2))
    assert all(p.gap <= TIGHT for p in found.points)


def test_points_lie_evenly_where_there_are_more_than_asked_for(monkeypatch):
    monkeypatch.setattr(memory_hull, "SMALL", -1)
    memories = [p.memory for p in hull(layers(100), points=6).points]
    assert 6 <= len(memories) <= 12
    assert max(np.diff(memories)) <= memory_hull.EVEN * 100 / 5


def test_prices_are_spread_where_the_peak_moves():
    """Two nodes that peak at different times: no single time's price proves the middle."""
    costs, held = np.array([1.0, 2.0]), np.array([4.0, 2.0])
    problem = Problem(("a", "b"), (costs, costs), (), (NodeUsage(0, 0, 1, held), NodeUsage(1, 2, 3, held)))
    lagrangian = Lagrangian(problem, math.inf, lambda: 0.0)
    for choice in itertools.product(range(2), repeat=2):
        lagrangian.add(choice)
    prices, promise = lagrangian.best_prices(1.0)
    assert prices.tolist() == pytest.approx([0.5, 0.5]) and promise == pytest.approx(6.0)
    found = hull(problem)
    assert [(p.memory, p.cost) for p in found.points] == [(2.0, 4.0), (4.0, 2.0)]
    assert wrong(problem, found, 1e-3) == []


@pytest.mark.parametrize("seed", SEEDS[::3])
def test_what_the_parts_cost_and_hold_adds_up(seed):
    problem = unlimited(seed)
    lagrangian = Lagrangian(problem, math.inf, lambda: 0.0)
    rng = np.random.default_rng(seed)
    for _ in range(20):
        lagrangian.add([int(rng.integers(len(c))) for c in problem.node_costs])
    known = list(lagrangian.answers.values())
    rows = list(range(len(lagrangian.rows.times)))
    for a, b in itertools.pairwise(known):
        x, y = np.array(a.choice), np.array(b.choice)
        more = exchange_parts.differences(problem, lagrangian.rows, rows, x, y)
        parts = range(len(more.cost))
        for taken in itertools.chain.from_iterable(itertools.combinations(parts, n) for n in (1, 2, len(parts))):
            mixed = np.where(np.isin(more.part, taken), y, x)
            assert evaluate(problem, mixed).cost == pytest.approx(a.cost + more.cost[list(taken)].sum())
            assert load(lagrangian.rows, held(problem, mixed)) == pytest.approx(a.loads + more.bytes[:, list(taken)].sum(axis=1))


def test_a_pair_that_an_edge_couples_is_one_part():
    """Equal choices are free, others cost 5 s: apart, each of the two would cost that."""
    table = np.array([[0.0, 5.0], [5.0, 0.0]])
    problem = replace(layers(3), edges=(Edge(0, 1, table), Edge(1, 2, np.zeros((2, 2)))))
    lagrangian = Lagrangian(problem, math.inf, lambda: 0.0)
    more = exchange_parts.differences(problem, lagrangian.rows, [0], np.zeros(3, int), np.ones(3, int))
    assert more.part.tolist() == [0, 0, 1]
    assert (more.cost.tolist(), more.bytes.tolist()) == ([4.0, 2.0], [[-2.0, -1.0]])


def test_a_bound_above_a_cost_is_an_error():
    sweep = memory_hull.Sweep(Lagrangian(layers(3), math.inf, lambda: 0.0), 3, 0.0)
    sweep.ends(None)
    sweep.lagrangian.lines.append(Line(1000.0, 0.0))
    with pytest.raises(AssertionError, match="bound .* above cost"):
        [sweep._point(f) for f in sweep.answers]


def test_without_memory_the_frontier_is_one_point():
    found = hull(Problem(("a",), (np.array([2.0, 1.0]),), ()))
    assert [(p.choice, p.memory, p.cost) for p in found.points] == [((1,), 0.0, 1.0)]


def test_where_everything_is_forbidden_there_is_no_point():
    assert hull(Problem(("a",), (np.array([np.inf]),), ())).points == ()


@pytest.mark.parametrize("small", [-1, 10**4])
@pytest.mark.parametrize("time_limit", [2, 3, 5, 10, 20])
def test_time_that_runs_out_leaves_what_is_known(time_limit, small, monkeypatch):
    monkeypatch.setattr(memory_hull, "SMALL", small)
    ticks = itertools.count()
    found = hull(layers(30), points=31, time_limit=time_limit, clock=lambda: float(next(ticks)))
    assert 0 < len(found.points) < 31
    assert wrong_order(found) == []


@pytest.mark.parametrize("given", [{"points": 0}, {"gap": -1.0}, {"time_limit": 0.0}])
def test_options_that_cannot_be_are_refused(given):
    assert_refused("points is", hull, layers(2), **given)


def test_below_the_least_memory_no_answer_exists():
    found = hull(layers(3))
    assert found.points[0].memory == 3.0 and found.bound(2.9) == math.inf


@pytest.mark.parametrize("scale", [0.25, 1.0, 8.0])
@pytest.mark.parametrize(("memory", "cost"), [*itertools.product((1.0, 2.0, 4.0, 6.0, 9.0), (-4.0, 1.0, 3.0, 5.0, 9.0))])
def test_an_answer_is_below_a_chord_where_its_cost_is_below_the_line_by_more_than_the_tolerance(memory, cost, scale, monkeypatch):
    """From 9 s and 2 bytes to 1 s and 6 bytes: 2 s less per byte, from 13 s on."""
    known = [KnownAnswer((k,), scale * c, m, np.zeros(1)) for k, (c, m) in enumerate(((9.0, 2.0), (1.0, 6.0), (cost, memory)))]
    lagrangian, prices = Lagrangian(layers(1), math.inf, lambda: 0.0), []
    lagrangian.answers = {one.choice: one for one in known}
    monkeypatch.setattr(lagrangian, "minimise", prices.append)
    below = 13.0 - 2.0 * memory - cost
    for tolerance in (0.0, 0.1, 0.5):
        assert lagrangian.chord(known[0], known[1], tolerance) == (below > tolerance * 13.0)
    assert prices == [2.0 * scale] * 3


@pytest.mark.parametrize("left", [0.5, 0.0, -1.0])
@pytest.mark.parametrize("status", Status)
def test_limits_are_tried_while_they_are_settled_and_seconds_are_left(status, left, monkeypatch):
    now, problem = [7.0], layers(3)
    sweep = memory_hull.Sweep(Lagrangian(problem, math.inf, lambda: now[0]), 3, 0.0)
    choice = None if status is Status.INFEASIBLE else (1, 1, 1)

    def solved(problem, *, starts, time_limit, gap, clock):
        assert (problem.usage_limit, starts, time_limit) == (4.0, [(1, 1, 1)], memory_hull.LIMIT_SECONDS)
        now[0] += memory_hull.LIMIT_SECONDS - left
        return Answer(status, choice, math.inf if choice is None else 9.0, math.inf if choice is None else 8.0, "auto")

    sweep.lagrangian.add((0, 0, 0))
    sweep.lagrangian.add((1, 1, 1))
    monkeypatch.setattr(memory_hull, "solve", solved)
    sweep.under(4.0)
    assert sweep.small == (status in (Status.OPTIMAL, Status.INFEASIBLE) and left > 0) and sweep.limit_seconds == left
    bound = math.inf if choice is None else 8.0
    assert [limit for limit, _ in sweep.limits] == [4.0] and sweep.bound(4.0) == pytest.approx(bound) and sweep.bound(4.1) < bound
