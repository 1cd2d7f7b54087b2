"""Elimination over what dual ascent leaves affordable: exact where it says so, and never a wrong bound where it doesn't."""

import itertools
import math
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.problem import Edge, Problem, evaluate
from autoshard.solvers import loops, settle, solve
from autoshard.solvers import narrow as narrow_module
from autoshard.solvers.dual_ascent import Messages
from autoshard.solvers.elimination import eliminate, elimination
from autoshard.solvers.interning import eliminate_link, worst_loss
from autoshard.solvers.narrow import Work, narrow
from tests.helpers_problems import ascended, incumbent_of, random_problem

PLENTY = 10**9


def frustrated(seed: int, side: int = 3, num_choices: int = 3) -> Problem:
    """A grid of random tables: cycles on which dual ascent leaves a gap."""
    rng = np.random.default_rng(seed)
    place = np.arange(side * side).reshape(side, side)
    ends = [*zip(place[:, :-1].ravel(), place[:, 1:].ravel()), *zip(place[:-1].ravel(), place[1:].ravel())]
    edges = tuple(Edge(int(a), int(b), rng.random((num_choices, num_choices))) for a, b in ends)
    return Problem(tuple(map(str, place.ravel())), tuple(rng.random(num_choices) / 10 for _ in place.ravel()), edges)


@pytest.mark.parametrize("largest", [4, 100, 10**7])  # nearly always, sometimes, never too wide
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), sweeps=st.integers(1, 4))
def test_narrow_finds_what_enumeration_finds_however_small_its_tables_are(largest, seed, sweeps):
    problem = replace(random_problem(seed), usages=(), usage_limit=None)
    reference = solve(problem, solver="exhaustive")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(narrow_module, "LARGEST_TABLE", largest)
        messages, incumbent = ascended(problem, sweeps)
        assert narrow(messages, incumbent, Work(PLENTY))
    assert incumbent.proven
    if reference.choice is None:
        assert incumbent.bound == math.inf
    else:
        assert incumbent.cost == pytest.approx(reference.cost, rel=1e-9, abs=1e-9)
        assert incumbent.bound <= reference.cost + 1e-9 * abs(reference.cost)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("work", [0, 10**6, 3 * 10**6])
def test_where_the_work_is_not_enough_the_bound_holds_and_nothing_is_claimed(seed, work, monkeypatch):
    monkeypatch.setattr(narrow_module, "LARGEST_TABLE", 12)
    problem = frustrated(seed)
    reference = solve(problem, solver="exhaustive")
    messages, incumbent = ascended(problem, 5)
    settled = narrow(messages, incumbent, Work(work))
    assert incumbent.bound <= reference.cost * (1 + 1e-9) and incumbent.cost >= reference.cost * (1 - 1e-9)
    assert not settled or incumbent.cost == pytest.approx(reference.cost, rel=1e-9)


@pytest.mark.parametrize(("gap", "seed"), [(0.05, 6), (0.06, 6), (0.06, 33), (0.08, 6), *((0.06, seed) for seed in range(6))])
def test_halves_of_which_one_ends_within_the_gap_prove_no_more_than_that(gap, seed, monkeypatch):
    problem = frustrated(seed, side=4, num_choices=4)
    best = solve(problem, solver="ilp").cost
    monkeypatch.setattr(narrow_module, "LARGEST_TABLE", 12)
    messages, incumbent = ascended(problem, 1, gap)
    assert narrow(messages, incumbent, Work(PLENTY), shares=())
    assert incumbent.proven and incumbent.bound <= best * (1 + 1e-9) and incumbent.cost <= best / (1 - gap) * (1 + 1e-9)


def test_auto_closes_the_gap_of_dual_ascent_without_branch_and_bound(monkeypatch):
    def called(*_, **__):
        raise AssertionError("HiGHS was asked")

    problems = [frustrated(seed, side=5, num_choices=4) for seed in range(8)]
    gaps = []
    for problem in problems:
        _, incumbent = ascended(problem, 600)
        gaps.append(incumbent.cost - incumbent.bound > 1e-3 * incumbent.cost)
    assert sum(gaps) >= 5  # else this tests nothing
    expected = [solve(problem, solver="ilp").cost for problem in problems]
    monkeypatch.setattr(settle, "prove", called)
    for largest in (300, 10**7):
        monkeypatch.setattr(narrow_module, "LARGEST_TABLE", largest)
        for problem, cost in zip(problems, expected, strict=True):
            answer = solve(problem)
            assert answer.status == "optimal" and answer.cost == pytest.approx(cost, rel=1e-9)
    monkeypatch.setattr(settle.Settling, "THOROUGH", 0)
    with pytest.raises(AssertionError, match="HiGHS was asked"):  # nothing else would have closed it
        for problem in problems:
            solve(problem)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_an_elimination_visits_every_node_once_and_counts_the_cells_of_its_tables(seed):
    problem = replace(random_problem(seed), usages=(), usage_limit=None)
    way = elimination(problem)
    sizes = [len(c) for c in problem.node_costs]
    near = [{e.a if e.b == v else e.b for e in problem.edges if v in (e.a, e.b)} for v in range(len(sizes))]
    tables = []
    for v in way.order:
        tables.append((math.prod(sizes[n] for n in near[v] | {v}), tuple(sorted(near[v] | {v}))))
        for n in near[v]:
            near[n] = (near[n] | near[v]) - {n, v}
    assert sorted(way.order) == list(range(len(sizes)))
    assert way.cells == sum(cells for cells, _ in tables) and way.largest == max(cells for cells, _ in tables)
    assert (way.largest, tuple(sorted(way.widest))) in tables
    _, incumbent = ascended(problem, 1)
    choice, bound = eliminate(problem, max(way.largest, 1), incumbent, way)
    reference = solve(problem, solver="exhaustive")
    assert bound == pytest.approx(reference.cost, rel=1e-9, abs=1e-9)
    assert reference.choice is None or len(choice) == len(sizes)


@contextmanager
def loops_left(entries):
    """With so much work before the loops are compiled."""
    known, loops._left = loops._left, entries
    try:
        yield
    finally:
        loops._left = known


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 6), st.integers(0, 10**6), st.sampled_from([0, 10**9]))
def test_reductions_compiled_or_not_equal_their_definitions(n, m, k, seed, left_over):
    rng = np.random.default_rng(seed)
    left, right, costs = (np.where(rng.random(s) < 0.2, np.inf, rng.normal(size=s)) for s in ((n, m), (n, k), (n,)))
    with loops_left(left_over):
        losses, joined = worst_loss(left), eliminate_link(costs, left, right)
    for i in range(n):
        for j in range(n):
            finite = [left[j, c] - left[i, c] for c in range(m) if np.isfinite(left[i, c])]
            assert losses[i, j] == max(finite, default=-np.inf)
    assert np.array_equal(joined, (costs[:, None, None] + left[:, :, None] + right[:, None, :]).min(axis=0))


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_a_sweep_that_is_compiled_and_one_that_is_not_yet_have_the_same_bits(seed):
    problem, found = random_problem(seed), []
    for entries in (0, 10**12):
        messages = Messages(problem)
        with loops_left(entries):
            swept = [messages.sweep(forward=k % 2 == 0) for k in range(6)]
        found.append(([(bound, choice.tolist(), energy) for bound, choice, energy in swept], messages.message.tobytes()))
    assert repr(found[0]) == repr(found[1])  # nan equals nan


def test_loops_are_compiled_once_their_work_has_taken_as_long_as_compiling(monkeypatch):
    monkeypatch.setattr(loops, "_left", 100)
    assert loops.compiled(loops.worst_loss, 60) is None
    assert loops.compiled(loops.worst_loss, 60) is loops.compiled(loops.worst_loss, 1) is not None


class TooOften(Exception):
    pass


def test_a_problem_that_is_far_too_wide_is_not_ordered_for_each_node_of_its_widest_table(monkeypatch):
    """What a loop of 64 cells leaves: each order took half a second, and a node of a table of 65 nodes was halved in vain."""
    orders = []

    def counted(*args):
        orders.append(args)
        if len(orders) > 20:
            raise TooOften
        return elimination(*args)

    monkeypatch.setattr(narrow_module, "elimination", counted)
    problem = frustrated(0, 36)
    assert not narrow(*ascended(problem, 5), Work(settle.Settling.THOROUGH))
    assert len(orders) < 10
    monkeypatch.setattr(narrow_module, "ORDERED", 0)  # as it was
    with pytest.raises(TooOften):
        narrow(*ascended(problem, 5), Work(settle.Settling.THOROUGH))


def test_a_table_over_more_nodes_than_an_array_has_dims():
    rng, sizes = np.random.default_rng(0), [2 if v % 40 == 0 else 1 for v in range(100)]
    edges = tuple(Edge(0, v, rng.random((2, sizes[v]))) for v in range(1, 100))
    problem = Problem(tuple(map(str, range(100))), tuple(map(rng.random, sizes)), edges)
    way = replace(elimination(problem), order=tuple(range(100)))  # the middle of the star first: a table over all others
    choice, bound = eliminate(problem, 10**7, incumbent_of(problem), way)
    best = min(evaluate(problem, choice).cost for choice in itertools.product(*map(range, sizes)))
    assert evaluate(problem, choice).cost == pytest.approx(best) == bound


@pytest.mark.parametrize("outcomes", [*itertools.product(("settled", "nothing is near", "too much work"), repeat=3)])
def test_shares_of_the_gap_are_tried_until_one_is_too_much_work(outcomes, monkeypatch):
    shares, tried = [0.1, 0.2, 0.3], []
    messages, incumbent = ascended(frustrated(0), 0)

    def restricted(problem, incumbent, share, complete):
        if outcomes[shares.index(share)] == "nothing is near":
            return None
        tried.append(share)
        return incumbent

    monkeypatch.setattr(messages, "near", lambda incumbent, share: share)
    monkeypatch.setattr(narrow_module, "restrict", restricted)
    monkeypatch.setattr(narrow_module, "_eliminate", lambda *_: outcomes[shares.index(tried[-1])] == "settled")
    monkeypatch.setattr(narrow_module, "_exhaust", lambda *_: tried.append("exhaust"))
    last = next((k for k, outcome in enumerate(outcomes) if outcome == "too much work"), 2)
    near = [shares[k] for k in range(last + 1) if outcomes[k] != "nothing is near"]
    needed = narrow_module.RESTRICTED * (9 + 12) * (last + 1)  # nodes and edges of the grid
    for spare in (0, -1):
        assert narrow(messages, incumbent, work := Work(needed + spare), shares) is (None if spare == 0 else False) and work.left == spare
        assert tried == near + ["exhaust"] if spare == 0 else tried in (near, near[:-1])
        tried.clear()
    incumbent.close()
    assert narrow(messages, incumbent, work, shares) and not tried


@pytest.mark.parametrize("done", [False, True])
@pytest.mark.parametrize("cells", [*itertools.product((settle.SMALL, settle.SMALL + 1, settle.LARGE, settle.LARGE + 1), repeat=3)])
def test_choices_near_the_bound_are_tried_while_they_are_not_too_many(cells, done, monkeypatch):
    tried, sizes = [], dict(zip(settle.Settling.SHARES, cells, strict=True))
    incumbent = incumbent_of(frustrated(0), clock=lambda: 0.0)
    if done:
        incumbent.close()
    settling = settle.Settling(incumbent, True)
    monkeypatch.setattr(settling.messages, "near", lambda incumbent, share: share)
    monkeypatch.setattr(settling.messages, "affordable", lambda incumbent: settle.Settling.SHARES[-1])
    monkeypatch.setattr(settle, "cells_of", lambda share, problem: sizes[share])
    monkeypatch.setattr(settle, "solve_part", lambda incumbent, share, seconds: tried.append((share, seconds)))
    monkeypatch.setattr(settle, "improve", lambda messages, incumbent, solved, futile: tried.append(futile))
    settling.explore()
    near = [] if done else itertools.takewhile(lambda share: sizes[share] <= settle.LARGE, settle.Settling.SHARES)
    further = [] if cells[-1] <= settle.SMALL else [math.inf if cells[-1] > settle.LARGE else settle.Settling.FUTILE]
    assert tried == [(share, 1e9 / 4) for share in near] + further
