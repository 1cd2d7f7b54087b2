"""Prices alone under a memory limit, against brute force: bounds below the best, answers that fit, small gaps where layers repeat."""

import itertools
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.problem import Edge, EdgeUsage, Evaluation, NodeUsage, Problem, Usage, evaluate, held
from autoshard.solvers import Answer, Status, price_search, solve
from autoshard.solvers.binding_times import binding_rows, load
from autoshard.solvers.incumbent import Incumbent, Record
from autoshard.solvers.lagrangian import KnownAnswer, Line, corners, scale
from tests.helpers_problems import every_answer, every_choice, random_problem

ROOT = Path(__file__).parent.parent
TODAY = 1000.0  # seconds on a clock that stands
SHAPES = ("chain", "tree", "cycle", "layered")
SEEDS = range(6)
ROUNDING = 1e-9  # relative


def pairs(shape: str, rng: np.random.Generator) -> list[tuple[int, int]]:
    """Which nodes of a shape are joined; layers are of two nodes, with a way around the second one."""
    if shape == "layered":
        return [(0, 1), (1, 2), (0, 2), (2, 3), (3, 4), (2, 4)]
    if shape == "tree":
        return [(int(rng.integers(v)), v) for v in range(1, 6)]
    return [(v, v + 1) for v in range(4)] + ([(4, 0)] if shape == "cycle" else [])


def shaped(shape: str, copies: bool, seed: int) -> Problem:
    """A small problem of that shape, without a limit; whole numbers make ties. copies: edges hold bytes, too."""
    rng = np.random.default_rng([SHAPES.index(shape), copies, seed])
    ends = pairs(shape, rng)
    count = 1 + max(max(pair) for pair in ends)
    alike = shape == "layered"  # then layers share their sizes and tables, and bytes wait for the backward pass
    sizes = [int(s) for s in rng.integers(2, 4, count)]
    sizes = [sizes[v % 2] for v in range(count)] if alike else sizes

    def costs(a: int, b: int) -> np.ndarray:
        table = rng.integers(0, 6, (sizes[a], sizes[b])).astype(float) + (0.0 if seed % 2 else rng.random((sizes[a], sizes[b])))
        return np.where(rng.random(table.shape) < 0.1, np.inf, table)

    tables = [costs(a, b) for a, b in ends]
    tables = [tables[k % 3] for k in range(len(ends))] if alike else tables
    own = [rng.integers(0, 9, s).astype(float) for s in sizes]
    own = [own[v % 2] for v in range(count)] if alike else own
    usages: list[Usage] = []
    for v in range(count):
        amounts = np.sort(rng.integers(0, 12, sizes[v]))[np.argsort(np.argsort(-own[v]))].astype(float)  # what is faster holds more
        end = 2 * count - v if alike else int(rng.integers(v + 1, 2 * count))
        usages.append(NodeUsage(v, v, end, amounts))
    for k, table in enumerate(tables):
        if copies and rng.random() < 0.7:
            usages.append(EdgeUsage(k, ends[k][1], ends[k][1] + 1, rng.integers(0, 6, table.shape).astype(float)))
    edges = tuple(Edge(a, b, table) for (a, b), table in zip(ends, tables))
    return Problem(tuple(f"n{v}" for v in range(count)), tuple(own), edges, tuple(usages))


def limits(every: list[Evaluation]) -> list[float]:
    """From one that nothing fits to one that everything does."""
    peaks = sorted({e.peak for e in every})
    return [] if not peaks else sorted({0.9 * peaks[0], *(peaks[len(peaks) * k // 6] for k in range(6)), 2.0 * peaks[-1]})


def best_within(every: list[Evaluation], limit: float) -> float:
    return min((e.cost for e in every if e.peak <= limit), default=math.inf)


def wrong(problem: Problem, answer: Answer, best: float) -> list[str]:
    """What is false in an answer, where the best that fits costs `best`; inf: nothing fits."""
    faults, slack = [], ROUNDING * abs(best) if math.isfinite(best) else 0.0
    if answer.bound > best + slack:
        faults.append(f"bound {answer.bound}, the best costs {best}")
    if answer.status is Status.INFEASIBLE and best < math.inf:
        faults.append(f"said to be infeasible, the best costs {best}")
    if answer.choice is None:
        return faults + ([] if answer.status in (Status.INFEASIBLE, Status.UNKNOWN) else [f"{answer.status} without an answer"])
    judged = evaluate(problem, answer.choice)
    if not judged.fits:
        faults.append(f"holds {judged.peak} of {problem.usage_limit} bytes")
    if (judged.cost, judged.peak) != (answer.cost, answer.peak):
        faults.append(f"said to cost {answer.cost} and hold {answer.peak}, it is {judged.cost} and {judged.peak}")
    if answer.cost < best - slack:
        faults.append(f"costs {answer.cost}, the best {best}")
    if answer.status is Status.OPTIMAL and answer.cost > best + 2 * slack:
        faults.append(f"said to be the best, which costs {best} and not {answer.cost}")
    return faults


def faults_of(problem: Problem, **options) -> list[str]:
    """Of the answers under all its limits."""
    every = every_answer(problem)
    found = []
    for limit in limits(every):
        given = replace(problem, usage_limit=limit)
        found += wrong(given, solve(given, **{"solver": "prices", **options}), best_within(every, limit))
    return found


PROBLEMS = pytest.mark.parametrize(("shape", "copies"), [*itertools.product(SHAPES, (False, True))])


def limited(shape: str, copies: bool):
    """Per seed and limit: (problem, the cost of the best that fits, that of the best without a limit)."""
    for seed in SEEDS:
        problem = shaped(shape, copies, seed)
        every = every_answer(problem)
        for limit in limits(every):
            yield replace(problem, usage_limit=limit), best_within(every, limit), min(e.cost for e in every)


# -- against brute force ---------------------------------------------------------------------------------------------------------------


@PROBLEMS
def test_bounds_and_answers_agree_with_brute_force(shape, copies):
    fits, binds, none = 0, 0, 0
    for problem, best, free in limited(shape, copies):
        assert wrong(problem, solve(problem, solver="prices"), best) == []
        fits, binds, none = fits + (best == free), binds + (free < best < math.inf), none + (best == math.inf)
    assert min(fits, binds, none) >= len(SEEDS)  # the limits are of every kind


@PROBLEMS
def test_auto_goes_on_from_prices_to_the_proof(shape, copies):
    for problem, best, _ in limited(shape, copies):
        answer = solve(problem)
        assert wrong(problem, answer, best) == []
        assert answer.status is (Status.INFEASIBLE if best == math.inf else Status.OPTIMAL)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_choice_and_the_messages_of_another_problem_leave_bounds_and_answers_true(shape):
    drawn = np.random.default_rng(0)

    def nearby(free: Problem, gap: float):
        messages = drawn.normal(size=sum(sum(e.table.shape) for e in free.edges)) * 5
        return [int(drawn.integers(len(costs))) for costs in free.node_costs], messages

    for problem, best, _ in limited(shape, True):
        assert wrong(problem, solve(problem, solver="prices", nearby=nearby), best) == []


@settings(max_examples=150)
@given(seed=st.integers(0, 10**6), share=st.floats(0.0, 1.1), gap=st.sampled_from([0.0, 0.01, 0.3]))
def test_no_answer_is_wrong_whatever_the_limit(seed, share, gap):
    problem = random_problem(seed, most_nodes=5, most_answers=300)
    every = every_answer(problem)
    limit = share * max((e.peak for e in every), default=1.0)
    given, best = replace(problem, usage_limit=limit), best_within(every, limit)
    answer = solve(given, solver="prices", gap=gap)
    if answer.status is Status.OPTIMAL:
        assert answer.gap <= max(gap, ROUNDING)
        answer = replace(answer, status=Status.FEASIBLE)  # proven to the gap only
    assert wrong(given, answer, best) == []


@settings(max_examples=80)
@given(seed=st.integers(0, 10**6), share=st.floats(0.0, 1.0))
def test_a_start_that_fits_is_never_lost(seed, share):
    problem = random_problem(seed, most_nodes=5, most_answers=300)
    choices = list(every_choice(problem))
    start = choices[int(share * (len(choices) - 1))]
    judged = evaluate(problem, start)
    given = replace(problem, usage_limit=judged.peak)
    answer = solve(given, solver="prices", starts=[start])
    assert answer.cost <= judged.cost and wrong(given, answer, best_within(every_answer(problem), judged.peak)) == []


@pytest.mark.parametrize("seconds", [1, 2, 3, 5, 8, 13, 30])
def test_time_that_runs_out_leaves_what_is_known(seconds):
    for seed in SEEDS:
        ticks = itertools.count()
        assert faults_of(shaped("layered", True, seed), time_limit=seconds, clock=lambda: float(next(ticks)) / 40) == []  # noqa: B023


def test_without_a_limit_it_is_auto():
    for seed in range(40):
        problem = replace(random_problem(seed, most_answers=2000), usage_limit=None)
        assert solve(problem, solver="prices").cost == solve(problem).cost


def test_where_the_fastest_costs_nothing_memory_still_has_a_price():
    usages = tuple(NodeUsage(v, 0, 1, np.array([4.0, 1.0])) for v in range(3))
    for slow in (2.0, 0.0):
        problem = Problem(("a", "b", "c"), (np.array([0.0, slow]),) * 3, (), usages, 6.0)
        answer = solve(problem, solver="prices")
        assert answer.cost == 2 * slow and answer.bound <= 2 * slow and answer.peak <= 6.0


# -- the check itself ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "plant",
    [
        lambda answer: replace(answer, bound=answer.cost),
        lambda answer: replace(answer, status=Status.OPTIMAL),
        lambda answer: replace(answer, cost=answer.cost * 0.99),
        lambda answer: replace(answer, choice=(0,) * 5),
        lambda answer: replace(answer, choice=None, status=Status.INFEASIBLE, bound=math.inf),
        lambda answer: replace(answer, choice=None, status=Status.FEASIBLE),
    ],
)
def test_the_check_sees_planted_faults(plant):
    usages = tuple(NodeUsage(v, 0, 1, np.array([4.0, 1.0])) for v in range(5))
    problem = Problem(tuple("abcde"), (np.array([1.0, 3.0]),) * 5, (), usages, 11.0)
    best = best_within(every_answer(problem), 11.0)
    assert best == 11.0  # two are fast, three slow
    answer = solve(problem, solver="exhaustive")
    assert wrong(problem, answer, best) == []
    dearer = replace(answer, choice=(0, 1, 1, 1, 1), cost=13.0, peak=8.0, bound=9.0, status=Status.FEASIBLE)
    assert wrong(problem, dearer, best) == []
    assert wrong(problem, plant(dearer), best) != []


@pytest.mark.parametrize(
    ("where", "name", "planted"),
    [
        (Line, "at", lambda line, limit: line.intercept),  # the bytes that are allowed were priced, too
        (price_search, "report", lambda lagrangian, incumbent, limit: (REPORT(lagrangian, incumbent, limit), incumbent.close())),
    ],
    ids=["line", "proof"],
)
def test_a_planted_bound_is_seen(where, name, planted, monkeypatch):
    problems = [shaped(shape, True, seed) for shape in SHAPES for seed in SEEDS]
    monkeypatch.setattr(where, name, planted)
    seen = 0
    for problem in problems:
        try:
            seen += bool(faults_of(problem))
        except AssertionError as error:  # the record's own check: a bound above a cost
            assert "above cost" in str(error)
            seen += 1
    assert seen > len(problems) / 4


REPORT = price_search.report


# -- layers that repeat ----------------------------------------------------------------------------------------------------------------

WEIGHTS = np.array([2.0, 3.0, 5.0]), np.array([9.0, 5.0, 1.0])  # seconds and bytes of a layer's second node: three layouts
STREAM = np.array([1.0, 1.5]), np.array([2.0, 1.0])  # of the first, through which the layers are joined
INTO, OUT = np.array([[0.0, 0.25, 1.0], [0.75, 0.0, 0.5]]), np.array([[0.0, 0.5], [0.25, 0.25], [0.5, 0.0]])
COPY = np.array([[0.0, 1.0, 1.0], [2.0, 0.0, 1.0]])  # bytes


def layers(count: int) -> Problem:
    """Layers that are alike, of two nodes each; what they hold waits for the backward pass, so all of it is there at the end."""
    edges, usages = [], []
    for k in range(count):
        edges.append(Edge(2 * k, 2 * k + 1, INTO))
        usages += [NodeUsage(2 * k, k, count + 1, STREAM[1]), NodeUsage(2 * k + 1, k, count + 1, WEIGHTS[1])]
        usages.append(EdgeUsage(len(edges) - 1, k, count + 1, COPY))
        if k:
            edges.append(Edge(2 * k - 1, 2 * k, OUT))
    names = tuple(f"layer{k}.{part}" for k in range(count) for part in ("stream", "weight"))
    return Problem(names, (STREAM[0], WEIGHTS[0]) * count, tuple(edges), tuple(usages))


def best_of_layers(count: int, limit: int) -> float:
    """The best of `layers`, by what the last weight is and what all before hold."""
    cost = np.full((3, limit + 1), np.inf)
    for k in range(count):
        after = np.full_like(cost, np.inf)
        for before, stream, weight in itertools.product(range(3 if k else 1), range(2), range(3)):
            needed = int(STREAM[1][stream] + WEIGHTS[1][weight] + COPY[stream, weight])
            if needed > limit:
                continue
            more = STREAM[0][stream] + WEIGHTS[0][weight] + INTO[stream, weight] + (OUT[before, stream] if k else 0.0)
            reached = cost[before, : limit + 1 - needed] if k else np.where(np.arange(limit + 1 - needed) == 0, 0.0, np.inf)
            after[weight, needed:] = np.minimum(after[weight, needed:], reached + more)
        cost = after
    return float(cost.min())


@pytest.mark.parametrize("limit", [11, 12, 20, 27, 35, 43, 44])
def test_few_layers_are_within_one_layer_of_the_best(limit):
    problem = replace(layers(4), usage_limit=float(limit))
    best = solve(problem, solver="exhaustive").cost
    assert best == best_of_layers(4, limit)  # the check of `best_of_layers`; all are multiples of 1/4
    answer = solve(problem, solver="prices")
    assert wrong(problem, answer, best) == []
    assert (answer.choice is None) == (best == math.inf)
    assert best == math.inf or answer.cost - best <= WEIGHTS[0][2] - WEIGHTS[0][0]


@pytest.mark.parametrize("share", [0.3, 0.5, 0.6, 0.7, 0.8, 0.9])
def test_many_layers_are_proven_to_a_small_gap(share):
    """At most what one layer saves and one change of layout takes, in an answer of 200 s and more."""
    count = 60
    limit = int(share * 11 * count)
    problem = replace(layers(count), usage_limit=float(limit))
    answer, best = solve(problem, solver="prices"), best_of_layers(count, limit)
    assert wrong(problem, answer, best) == []
    assert answer.gap <= 0.01 and answer.cost <= 1.002 * best


def test_without_the_cut_one_part_that_couples_all_layers_is_all_or_nothing(monkeypatch):
    problem = replace(layers(60), usage_limit=528.0)
    whole = solve(problem, solver="prices")
    monkeypatch.setattr(price_search, "split", lambda *_: None)
    corner = solve(problem, solver="prices")
    assert whole.gap < 0.01 and corner.gap > 0.1 and corner.bound == pytest.approx(whole.bound)


def test_without_exchange_there_are_only_the_corners(monkeypatch):
    """Layers that nothing couples: the best two of three weights in turn, and nothing to cut."""
    alone = tuple(NodeUsage(v, 0, 1, WEIGHTS[1]) for v in range(60))
    problem = Problem(tuple(f"w{v}" for v in range(60)), (WEIGHTS[0],) * 60, (), alone, 400.0)
    exchanged = solve(problem, solver="prices")
    assert exchanged.cost == 155.0 and exchanged.gap <= 1e-8  # 25 layers of 9 bytes and 2 s, 35 of 5 bytes and 3 s
    monkeypatch.setattr(price_search, "fill", lambda *_: None)
    assert solve(problem, solver="prices").gap > 0.1


@PROBLEMS
def test_what_lies_on_the_way_is_what_evaluate_says(shape, copies):
    for seed in SEEDS:
        problem = shaped(shape, copies, seed)
        allowed = [x for x in every_choice(problem) if math.isfinite(evaluate(problem, x).cost)]
        rows = binding_rows(replace(problem, usage_limit=0.0))
        peaks = list(range(len(rows.times)))
        for x, y in zip(map(np.array, allowed), map(np.array, reversed(allowed))):
            way = np.random.default_rng(seed).permutation(np.flatnonzero(x != y))[: 4 if seed % 2 else None]
            cost, bytes_ = price_search._along(problem, rows, peaks, x, y, way)
            for t in range(len(way)):
                mixed = x.copy()
                mixed[way[: t + 1]] = y[way[: t + 1]]
                assert evaluate(problem, x).cost + cost[t] == pytest.approx(evaluate(problem, mixed).cost)
                assert load(rows, held(problem, x)) + bytes_[:, t] == pytest.approx(load(rows, held(problem, mixed)))


def test_layers_are_cut_between_layers():
    """Shuffled, two nodes each: neighbours stay near in the order that is cut."""
    problem, shuffle = layers(30), np.random.default_rng(0).permutation(60)
    edges = tuple(Edge(int(shuffle[e.a]), int(shuffle[e.b]), e.table) for e in problem.edges)
    costs = tuple(problem.node_costs[v] for v in np.argsort(shuffle))
    place = np.argsort(price_search._order(replace(problem, node_costs=costs, edges=edges, usages=()), np.arange(60)))
    assert max(abs(int(place[e.a]) - int(place[e.b])) for e in edges) <= 2


@pytest.mark.slow
def test_the_answer_does_not_depend_on_the_hash_seed():
    code = (
        "from dataclasses import replace; from autoshard.solvers import solve; from tests.test_limited import layers, shaped; "
        "print([(a.choice, a.bound) for p, b in [(layers(20), 130.0), (shaped('layered', True, 1), 30.0), (shaped('tree', True, 2), 25.0)] "
        "for a in [solve(replace(p, usage_limit=b), solver=s) for s in ('prices', 'auto')]])"
    )
    options = {"cwd": ROOT, "capture_output": True, "text": True, "check": True}
    printed = [subprocess.run([sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, **options).stdout for seed in ("1", "2")]
    assert printed[0] == printed[1] and printed[0].count("(") > 6


# -- the benchmark's own judgement -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ours", "alone", "ok"),
    [
        ({}, {}, True),
        ({}, {"cost_seconds": None, "bound_seconds": None, "gap": None}, True),  # found nothing in the time
        ({"cost_seconds": None, "bound_seconds": None, "gap": None, "peak_bytes": None}, {}, False),
        ({"bound_seconds": 3.4, "gap": 0.0}, {}, False),  # above what the other found
        ({}, {"bound_seconds": 3.1}, False),
        ({"gap": 0.02}, {}, False),
        ({"gap": 0.009}, {"gap": 0.001}, False),
        ({"peak_bytes": 81.0}, {}, False),
    ],
)
def test_the_benchmark_sees_a_contradiction(ours, alone, ok):
    from benchmarks import study
    from benchmarks.studies import limits as benchmark

    one = {"status": "feasible", "cost_seconds": 3.0, "bound_seconds": 2.99, "gap": 0.003, "peak_bytes": 79.0, "cpu_seconds": 1.0}
    one["near_at_seconds"] = None
    plans = {"with": {**one, **ours}, "without": {**one, "cost_seconds": 3.3, "gap": 0.1, **alone}}
    judged = benchmark.limited_judged({"case": "a", "nodes": 5, "limit_bytes": 80.0, "plans": plans}, {"most": 0.01})
    assert judged["ok"] == ok and len(study.lines(judged)) == 4


@pytest.mark.parametrize("seed", range(6))
def test_a_similar_problem_that_is_this_one_gives_the_answers_around_the_limit_soon(seed):
    """Those of the lower hull of memory and cost, by brute force; asked at no price, at growing ones until one fits, and at chords."""
    rng, asked = np.random.default_rng(seed), []
    costs, amounts = rng.uniform(1, 9, (4, 4)), rng.uniform(1, 9, (4, 4))
    free = Problem(tuple("abcd"), tuple(costs), (), tuple(NodeUsage(v, 0, 1, amounts[v]) for v in range(4)))

    def exact(problem: Problem, gap: float) -> tuple:
        asked.append(float((problem.node_costs[0] - costs[0])[0] / amounts[0, 0]))
        return tuple(int(c.argmin()) for c in problem.node_costs), None

    judged = [(evaluate(free, x), x) for x in every_choice(free)]
    hull = corners([KnownAnswer(x, e.cost, e.peak, np.array([e.peak])) for e, x in judged])
    for k, limit in enumerate([hull[0].memory * 0.999, *((a.memory + b.memory) / 2 for a, b in itertools.pairwise(hull)), hull[-1].memory]):
        limited = replace(free, usage_limit=limit)
        record = Record(limited, TODAY + price_search.HURRIED, 0.0, lambda: TODAY, nearby=exact)
        incumbent = Incumbent(limited, record)
        asked.clear()
        price_search.begin_nearby(limited, incumbent)
        assert incumbent.choice == (hull[k - 1].choice if k else None)
        assert record.starts == ([f.choice for f in hull[k - 1 : k + 1]] if 0 < k < len(hull) else [])
        first, steps = price_search.FIRST * scale(limited, hull[-1]) / hull[-1].memory, (6 if k == 0 else k < len(hull))
        assert asked[: 1 + steps] == pytest.approx([0.0, *(first * price_search.STEEPER**j for j in range(steps))], abs=1e-12)
        assert len(asked) == 1 + steps or 0 < k < len(hull)


@pytest.mark.parametrize(
    ("limit", "known"),
    [(1e9, {"deadline": 2e9}), (1e9, {"choice": (0,) * 5}), (1e9, {"bound": math.inf}), (1e9, {"nearby": None}), (None, {})],
)
def test_no_similar_problem_is_asked_where_time_is_ample_or_it_is_of_no_use(limit, known):
    problem = replace(shaped("chain", False, 0), usage_limit=limit)
    record = Record(**{"problem": problem, "deadline": TODAY, "gap": 0.0, "clock": lambda: TODAY, "nearby": pytest.fail, **known})
    price_search.begin_nearby(problem, incumbent := Incumbent(problem, record))
    assert incumbent.choice == known.get("choice") and not record.starts
