"""Every solver against the exhaustive reference, and what an Answer promises."""

import itertools
import math
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import scipy.optimize

from autoshard.problem import Edge, NodeUsage, Problem, Usage, evaluate, read_contest
from autoshard.solvers import DP, ILP, Answer, Status, annealing, settle, solve, streams
from autoshard.solvers.answer import lowered, relative_gap
from autoshard.solvers.binding_times import binding_rows, load, maximal_rows
from autoshard.solvers.dual_ascent import Messages
from autoshard.solvers.interning import separate
from autoshard.solvers.loops import sweep
from autoshard.solvers.reduce import reduce
from tests.helpers_problems import every_choice, incumbent_of, random_problem
from tests.helpers_refusals import assert_refused

DATA = Path(__file__).parent / "data" / "iopddl"
LARGE = DATA / "asplos-2025-iopddl-B.json.gz"
SMALLER = DATA / "asplos-2025-iopddl-G.json.gz"
CLOSE = 1e-8  # relative to the cost: far above rounding, far below any difference of two answers


def close(a: float, b: float) -> bool:
    return a == b or abs(a - b) <= CLOSE * max(abs(a), abs(b), 1e-6)


def assert_exact(problem: Problem, answer: Answer, reference: Answer) -> None:
    assert answer.status == reference.status
    if reference.choice is None:
        assert answer.choice is None and answer.bound == math.inf
        return
    judged = evaluate(problem, answer.choice)
    assert judged.fits and judged.cost == answer.cost and judged.peak == answer.peak
    assert close(answer.cost, reference.cost) and answer.bound <= answer.cost and answer.gap <= 1e-9


@pytest.mark.parametrize("block", range(10))
def test_ilp_and_exhaustive_agree_on_500_problems(block):
    for seed in range(50 * block, 50 * block + 50):
        problem = random_problem(seed)
        reference = solve(problem, solver="exhaustive")
        assert_exact(problem, solve(problem, solver="ilp"), reference)


LARGER = {"most_nodes": 12, "most_choices": 5, "most_answers": 10**5}
BLOCKS = [(1000 + 100 * k, {}) for k in range(8)] + [pytest.param(10000 + 100 * k, LARGER, marks=pytest.mark.slow) for k in range(30)]


def check_everything(problem: Problem) -> None:
    reference = solve(problem, solver="exhaustive")
    assert_exact(problem, solve(problem), reference)
    bounded = solve(problem, solver="dual")
    assert bounded.bound <= reference.cost or close(bounded.bound, reference.cost)
    if bounded.choice is not None:
        assert evaluate(problem, bounded.choice).fits
        assert bounded.cost >= reference.cost or close(bounded.cost, reference.cost)
    reduced = reduce(problem)
    if reduced.problem is None:
        assert reference.status is Status.INFEASIBLE
        return
    small = solve(reduced.problem, solver="exhaustive")
    assert small.status == reference.status and close(small.cost, reference.cost)
    if small.choice is not None:
        judged = evaluate(problem, reduced.lift(small.choice))
        assert judged.fits and close(judged.cost, small.cost)


@pytest.mark.parametrize("block", range(4))
@pytest.mark.parametrize("cells", [4 * 10**6, 8])  # never and nearly always split
def test_dp_is_exact_without_memory_and_a_bound_with_it(block, cells):
    for seed in range(50 * block, 50 * block + 50):
        limited = random_problem(seed)
        for problem in (limited, replace(limited, usage_limit=None)):
            reference, answer = solve(problem, solver="exhaustive"), solve(problem, solver=DP(cells=cells))
            assert answer.bound <= reference.cost or close(answer.bound, reference.cost)
            assert answer.cost >= reference.cost or close(answer.cost, reference.cost)
            if problem.usage_limit is None and cells > 8:
                assert_exact(problem, answer, reference)


@pytest.mark.parametrize("first, sizes", BLOCKS)
def test_auto_reduce_and_dual_on_3800_problems(first, sizes):
    for seed in range(first, first + 100):
        check_everything(random_problem(seed, **sizes))


@pytest.mark.parametrize("block", [0, *(pytest.param(k, marks=pytest.mark.slow) for k in (1, 2, 3))])
def test_prices_and_the_stages_for_large_problems_are_exact_on_small_ones(block, monkeypatch):
    monkeypatch.setattr(settle, "SMALL", -1)
    monkeypatch.setattr(annealing, "SLICE", 10**5)
    for seed in range(50 * block, 50 * block + 50):
        problem = random_problem(seed)
        assert_exact(problem, solve(problem), solve(problem, solver="exhaustive"))


def test_neighbourhood_search_finds_answers_and_never_a_wrong_bound(monkeypatch):
    monkeypatch.setattr(settle, "SMALL", -1)
    monkeypatch.setattr(settle, "LARGE", -1)
    monkeypatch.setattr(annealing, "SLICE", 10**5)
    for seed in range(60):
        problem = random_problem(seed)
        ticks = itertools.count()
        answer = solve(problem, time_limit=2000.0, clock=lambda: float(next(ticks)))  # noqa: B023
        reference = solve(problem, solver="exhaustive")
        assert answer.bound <= reference.cost or close(answer.bound, reference.cost)
        assert answer.cost >= reference.cost or close(answer.cost, reference.cost)
        assert (answer.choice is None) == (reference.choice is None) or answer.status is Status.UNKNOWN


@cache
def solved(path: Path) -> tuple[Problem, Answer]:
    problem = read_contest(path)
    return problem, solve(problem)


@pytest.mark.parametrize("name, optimum", [("B", 532843), ("G", 217039)])
def test_contest_optimum_is_proven(name, optimum):
    problem, answer = solved(DATA / f"asplos-2025-iopddl-{name}.json.gz")
    assert (answer.status, answer.cost) == (Status.OPTIMAL, optimum)
    assert answer.bound >= optimum * (1 - 1e-9) and evaluate(problem, answer.choice).fits
    assert answer.reduced["nodes"] < 816


def test_reduced_problem_of_G_is_small():
    reduced = reduce(read_contest(SMALLER)).problem
    assert len(reduced.node_costs) <= 220 and sum(e.table.size for e in reduced.edges) <= 45000  # of 816 nodes, 212622 cells


def two_nodes(limit: float | None) -> Problem:
    usages = (NodeUsage(0, 0, 2, np.array([10.0, 4.0])), NodeUsage(1, 1, 3, np.array([10.0, 5.0])))
    return Problem(("big", "small"), (np.array([0.0, 3.0]), np.array([0.0, 2.0])), (), usages, limit)


@pytest.mark.parametrize("solver", ["auto", "ilp", "exhaustive"])
@pytest.mark.parametrize("limit, cost", [(None, 0.0), (20.0, 0.0), (19.0, 2.0), (14.0, 3.0), (9.0, 5.0)])
def test_every_solver_obeys_the_memory_limit(solver, limit, cost):
    answer = solve(two_nodes(limit), solver=solver)
    assert (answer.status, answer.cost) == (Status.OPTIMAL, cost)


def test_infeasible_names_the_time_the_nodes_and_the_smallest_limit():
    answer = solve(two_nodes(8.0))
    assert answer.status is Status.INFEASIBLE and answer.choice is None and answer.bound == math.inf
    assert answer.infeasibility.time == 1 and answer.infeasibility.nodes == ((1, 5.0), (0, 4.0))
    assert answer.infeasibility.smallest_limit == (9.0, 9.0)


def test_infeasible_by_costs_alone_has_no_smallest_limit():
    table = np.full((1, 1), np.inf)
    answer = solve(Problem(("a", "b"), (np.zeros(1), np.zeros(1)), (Edge(0, 1, table),), (), 5.0))
    assert answer.status is Status.INFEASIBLE and answer.infeasibility.time is None
    assert answer.infeasibility.smallest_limit == (math.inf, math.inf)


@pytest.mark.parametrize("seed", range(60))
def test_smallest_limit_is_the_smallest_peak(seed):
    problem = random_problem(seed)
    answer = solve(replace(problem, usage_limit=0.0))
    if answer.status is Status.INFEASIBLE:
        peaks = [e.peak for e in (evaluate(problem, x) for x in every_choice(problem)) if e.cost < math.inf]
        low, high = answer.infeasibility.smallest_limit
        assert low <= min(peaks, default=math.inf) * (1 + 1e-9) and min(peaks, default=math.inf) <= high
        assert low == high or high - low <= 1e-8 * max(high, 1e-6)


def test_start_is_the_answer_where_no_time_is_left():
    ticks = iter(range(1000))
    answer = solve(two_nodes(19.0), starts=[[0, 1], [0, 0]], time_limit=1e-9, clock=lambda: float(next(ticks)))
    assert answer.choice == (0, 1) and answer.status is Status.FEASIBLE and answer.gap > 0


@pytest.mark.parametrize("seed", range(6))
def test_sweeps_are_those_of_a_reference_of_messages_by_name(seed):
    """TRW-S in the words of `dual_ascent`, a dict of messages instead of flat arrays; costs of both signs, edges in both directions."""
    rng = np.random.default_rng(seed)
    costs = [rng.normal(size=rng.integers(1, 5)) for _ in range(7)]
    ends = [tuple(map(int, rng.choice(7, 2, replace=False))) for _ in range(3 + 2 * seed)]
    edges = [Edge(a, b, rng.normal(size=(len(costs[a]), len(costs[b])))) for a, b in ends]
    messages = Messages(Problem(tuple("abcdefg"), tuple(costs), tuple(edges)))
    into = {(v, k): np.zeros(len(costs[v])) for k, two in enumerate(ends) for v in two}
    for forward in (True, False, True, False):
        choice, (bound, size, energy), told = np.zeros(7, np.int64), np.zeros(3), {}
        swept = sweep(*messages.tables.half_edges, messages.theta, messages.pool, messages.message, messages.reduced, choice, forward)
        for v in range(7) if forward else range(6, -1, -1):
            seen = {k: e.table if e.a == v else e.table.T for k, e in enumerate(edges) if v in ends[k]}
            other = {k: ends[k][0] + ends[k][1] - v for k in seen}
            total = costs[v] + sum(into[v, k] for k in seen)
            score = costs[v] + sum(seen[k][:, told[other[k]]] if other[k] in told else into[v, k] for k in seen)
            told[v], least = int(score.argmin()), total.min()
            energy += costs[v][told[v]] + sum(seen[k][told[v], told[other[k]]] for k in seen if other[k] in told)
            bound, size, later = bound + least, size + abs(least), [k for k in seen if other[k] not in told]
            for k in later:
                sent = ((total - least)[:, None] / max(len(later), len(seen) - len(later)) - into[v, k][:, None] + seen[k]).min(axis=0)
                bound, size, into[other[k], k] = bound + sent.min(), size + abs(sent.min()), sent - sent.min()
            assert messages.reduced[messages.first[v] : messages.first[v + 1]] == pytest.approx(total - least, abs=1e-12)
        assert swept == pytest.approx((bound, size, energy), rel=1e-12) and choice.tolist() == [told[v] for v in range(7)]


@pytest.mark.parametrize("seed", range(30))
def test_the_prices_of_streams_and_bytes_are_those_of_a_linear_program_and_of_its_dual(seed):
    rng = np.random.default_rng(seed)
    choices, parts, times = rng.integers(1, 6), rng.integers(1, 5), rng.integers(0, 3)
    seconds, loads = rng.uniform(0, 10.0 ** rng.integers(-4, 3), (choices, parts)), rng.uniform(-0.5, 0.2, (choices, times))
    y, z, shares, value = streams.best_prices(list(seconds), list(loads))
    assert (y >= 0).all() and (z >= 0).all() and (shares >= 0).all() and (y.sum(), shares.sum()) == pytest.approx((1, 1))
    rows, most = np.hstack([np.ones((choices, 1)), -seconds, -loads]), streams.STEEPEST * seconds.max()
    sums = np.concatenate([[0], np.ones(parts), np.zeros(times)])[None, :]
    bounds = [(None, None)] + [(0, None)] * parts + [(0, most)] * times
    program = scipy.optimize.linprog(-np.eye(1 + parts + times)[0], rows, np.zeros(choices), sums, [1.0], bounds)
    assert value == pytest.approx(-program.fun, rel=1e-6) and value == pytest.approx((seconds @ y + loads @ z).min(), rel=1e-9)
    beyond = np.maximum(shares @ loads, 0.0) * most  # what the dearest bytes cost where no mixture fits
    assert (shares @ seconds).max() + beyond.sum() == pytest.approx(value, rel=1e-6)


@pytest.mark.parametrize("seed", [seed for seed in range(40) if len(random_problem(seed).edges) > 1])
def test_a_problem_priced_by_stream_and_by_byte_costs_what_its_definition_says(seed):
    problem, rng = random_problem(seed), np.random.default_rng(seed)
    nodes, edges = ([rng.random((*x.shape, 2)) for x in all_] for all_ in (problem.node_costs, [e.table for e in problem.edges]))
    parts = [streams.Part(*(rng.random((len(x), 2)) for x in (nodes, edges))) for _ in range(3)]
    y, loads = rng.random(3), streams.Loads(problem)
    of = [sum(price * getattr(part, name) for price, part in zip(y, parts)) for name in ("nodes", "edges")]
    by_stream, z = streams.priced_by_stream(problem, nodes, edges, *of), rng.random(len(loads.rows.times))
    by_byte = loads.priced(by_stream, z)
    for x in itertools.islice(every_choice(problem), 0, None, 7):
        seconds = streams.seconds_of_parts(parts, *streams.seconds_of_choice(problem, nodes, edges, x))
        expected = math.fsum(y * seconds) if math.isfinite(evaluate(problem, x).cost) else math.inf
        judged = evaluate(by_stream, x)
        assert judged.cost == pytest.approx(expected)
        assert judged.fits or loads.of(x).max() == pytest.approx(judged.peak / problem.usage_limit - 1)
        assert evaluate(by_byte, x).cost - z.sum() == pytest.approx(expected + loads.of(x) @ z)


def test_options_are_fields_of_the_solver():
    assert solve(two_nodes(9.0), solver=ILP(time_limit=60, gap=0.0)).cost == 5.0
    with pytest.raises(TypeError):
        ILP(timelimit=60)
    assert_refused("expected one of auto, prices, ilp", solve, two_nodes(9.0), solver="annealing")
    assert_refused("more than 0 seconds", solve, two_nodes(9.0), time_limit=0)


def test_gap_is_honest_when_it_is_allowed():
    problem = read_contest(SMALLER)
    answer = solve(problem, gap=0.5)
    assert answer.status is Status.OPTIMAL and 0 <= answer.gap <= 0.5
    assert answer.bound <= 217039 <= answer.cost


@pytest.mark.parametrize("seed", range(200))
def test_preference_decides_among_equals_only(seed):
    problem = random_problem(seed, most_nodes=4)
    rng = np.random.default_rng(seed)
    preference = [rng.integers(0, 4, len(c)).astype(float) for c in problem.node_costs]
    plain, preferred = solve(problem), solve(problem, preference=preference)
    assert preferred.status == plain.status
    if plain.choice is None or not problem.node_costs:
        return
    judged = [(evaluate(problem, x), sum(p[i] for p, i in zip(preference, x))) for x in every_choice(problem)]
    best = min(e.cost for e, _ in judged if e.fits)
    assert preferred.cost <= best + 1e-9 * abs(best) + 1e-15
    if best != 0:
        least = min(p for e, p in judged if e.fits and e.cost <= best + 1e-12 * abs(best))
        assert sum(p[i] for p, i in zip(preference, preferred.choice)) <= least


@pytest.mark.parametrize("seed", range(100))
def test_known_prices_and_answers_beyond_the_limit_change_no_optimum(seed):
    problem = random_problem(seed, most_nodes=4)
    plain = solve(problem)
    starts = [start for start in itertools.islice(every_choice(problem), 20) if not evaluate(problem, start).fits]
    for prices in ({}, {0: 1e-3}, {0: 10.0, 1: 0.1}, plain.prices):
        other = solve(problem, starts=starts, prices=prices)
        assert other.status == plain.status
        assert other.cost == pytest.approx(plain.cost, rel=1e-9)


def test_a_bound_above_the_cost_is_an_error():
    incumbent = incumbent_of(two_nodes(None), lambda: 0.0)
    incumbent.offer([1, 1])
    incumbent.raise_bound(5.0 * (1 + 5e-10))  # rounding
    assert incumbent.bound == 5.0 and incumbent.proven
    with pytest.raises(AssertionError, match="above cost"):
        incumbent.raise_bound(5.0 * (1 + 2e-9))


def test_rows_are_the_largest_sets_of_usages_that_are_alive_together_and_those_that_exceed_the_limit_bind():
    rng = np.random.default_rng(0)
    for _ in range(100):
        starts = rng.integers(0, 8, rng.integers(1, 7))
        spans = [(int(a), int(a + rng.integers(0, 4))) for a in starts]
        most, counts = rng.integers(0, 4, len(spans)).astype(float), rng.random(len(spans)) < 0.8
        usages = tuple(Usage((0,), a, b, np.array([0.0, x])) for (a, b), x in zip(spans, most))
        problem = Problem(("x",), (np.zeros(2),), (), usages, 4.0)

        def largest(counts):
            live = {t: frozenset(k for k, (a, b) in enumerate(spans) if a <= t < b and counts[k]) for t in range(12)}  # noqa: B023
            return {one: min(t for t in live if live[t] == one) for one in live.values() if one and not any(one < x for x in live.values())}

        rows, maximal = maximal_rows(problem, counts), largest(counts)
        found = [frozenset(rows.alive(r).tolist()) for r in range(len(rows.times))]
        assert dict(zip(found, rows.times.tolist())) == maximal and len(found) == len(maximal)
        assert load(rows, most).tolist() == [sum(most[k] for k in one) for one in found]
        per_row = rng.integers(0, 9, len(found)).astype(float)
        assert rows.of_usages(per_row).tolist() == [sum(x for x, one in zip(per_row, found) if k in one) for k in range(len(spans))]
        tight = {one: t for one, t in largest(most > 0).items() if sum(most[k] for k in one) >= 4}
        rows = binding_rows(problem)
        assert {frozenset(rows.alive(r).tolist()): t for r, t in enumerate(rows.times.tolist())} == tight
        assert not len(binding_rows(replace(problem, usage_limit=None)).times)


def test_gaps_are_relative_to_the_cost_and_unknown_where_an_end_is():
    inf = math.inf
    pairs = ((2.0, 2.0), (0.0, 0.0), (inf, inf), (2.0, 1.5), (-2.0, -3.0), (0.0, -1.0), (inf, 1.0), (1.0, -inf))
    assert [relative_gap(*pair) for pair in pairs] == [0.0, 0.0, 0.0, 0.25, 0.5, inf, inf, inf]
    assert [lowered(bound, 0.25) for bound in (2.0, -2.0, inf, -inf)] == [1.5, -2.5, inf, -inf]


def test_progress_hears_of_every_improvement():
    heard = []
    answer = solve(read_contest(LARGE), progress=lambda cost, bound: heard.append((cost, bound)))
    assert heard[-1] == (answer.cost, answer.bound)
    assert all(b[0] <= a[0] and b[1] >= a[1] for a, b in zip(heard, heard[1:], strict=False))


def test_ctrl_c_returns_the_best_so_far():
    def interrupt(cost, bound):
        if cost < math.inf:
            raise KeyboardInterrupt

    answer = solve(read_contest(LARGE), progress=interrupt)
    assert answer.status in (Status.FEASIBLE, Status.OPTIMAL) and answer.choice is not None


def in_a_process(code: str, *arguments, env=None) -> str:
    """What a script prints that has `read_contest`, `ILP` and `solve`."""
    imports = "from autoshard.problem import read_contest; from autoshard.solvers import ILP, solve\n"
    command = [sys.executable, "-c", imports + code, *map(str, arguments)]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout


def test_ctrl_c_while_highs_works_ends_the_search_and_not_the_process():
    code = """
import os, signal, sys, threading
signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs in the background begins without
problem = read_contest(sys.argv[1])
threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
answer = solve(problem, solver=ILP(time_limit=60))
print(answer.status.value, answer.seconds["total"])
"""
    status, seconds = in_a_process(code, LARGE).split()
    assert status in ("unknown", "feasible") and float(seconds) < 10


def test_a_time_limit_is_kept():
    problem = read_contest(LARGE)
    answer = solve(problem, solver=ILP(time_limit=0.3))
    assert answer.seconds["total"] < 5 and answer.status in (Status.UNKNOWN, Status.FEASIBLE)


@pytest.mark.parametrize("shape", [(1, 1), (1, 4), (3, 1), (3, 4)])
def test_a_table_is_a_sum_of_a_column_and_a_row_or_is_said_not_to_be(shape):
    rng = np.random.default_rng(0)
    table = rng.random((shape[0], 1)) - rng.random(shape[1])
    a, b = separate(table)
    assert a[:, None] + b == pytest.approx(table, rel=1e-12)
    for value in (np.inf, table[-1, -1] + 1e-6):
        other = table.copy()
        other[-1, -1] = value
        assert (separate(other) is None) == (value == np.inf or min(shape) > 1)


def test_solvers_do_not_import_torch():
    in_a_process("import sys; assert 'torch' not in sys.modules")


def test_the_answer_does_not_depend_on_the_hash_seed():
    code = "import sys; answer = solve(read_contest(sys.argv[1])); print(answer.choice, answer.bound)"
    _, answer = solved(SMALLER)  # here with another seed
    assert in_a_process(code, SMALLER, env={"PYTHONHASHSEED": "1"}) == f"{answer.choice} {answer.bound}\n"


def test_status_gives_advice():
    assert all(status.advice for status in Status)


@pytest.mark.parametrize("seed", range(20))
def test_constant_bytes_are_a_lower_limit_to_every_solver(seed):
    """A usage without ends throughout leaves as much room less; `evaluate` counts it."""
    problem = random_problem(seed)
    ends = [t for u in problem.usages for t in (u.start, u.end)] or [0, 1]
    constant = Usage((), min(ends), max(ends) + 1, np.array(7.0))
    limit = 7.0 + (problem.usage_limit or 50.0)
    less, more = replace(problem, usage_limit=limit - 7.0), replace(problem, usages=(*problem.usages, constant), usage_limit=limit)
    for solver in ("auto", "prices", "ilp", "exhaustive"):
        a, b = solve(less, solver=solver), solve(more, solver=solver)
        assert a.status is b.status and b.cost == pytest.approx(a.cost, rel=1e-9)
        if b.choice is not None:
            assert evaluate(more, b.choice).peak == b.peak <= limit
