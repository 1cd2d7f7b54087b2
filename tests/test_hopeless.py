"""Limits that nothing meets, meshes and clusters beyond any size: refused soon, by counting rather than by searching."""

import math
import sys
from dataclasses import replace
from functools import cache

import pytest

from autoshard.capture import capture
from autoshard.mesh import MOST_AXES, MOST_DEVICES, Mesh, parse_shape
from autoshard.pipeline.submeshes import Cluster
from autoshard.planning.instance import formulate_for
from autoshard.planning.options import Options
from autoshard.planning.refusal import PATIENCE, searched_seconds
from autoshard.problem import evaluate
from autoshard.solvers import Status, infeasibility, settle, solve
from autoshard.solvers.incumbent import Incumbent, Record
from autoshard.solvers.infeasibility import hopeless, level, refute, without_costs
from autoshard.strategies import candidates
from autoshard.tables import plan_tables
from autoshard.tables.plan import MOST_DEVICES as MOST_OF_TABLES
from autoshard.tables.records import Table
from models import mlp
from tests.helpers import Ticking, fast_mesh
from tests.helpers_problems import random_problem
from tests.helpers_refusals import assert_refused


@cache
def formulated():
    graph = capture(*mlp.tiny(layers=2), training=True)
    return graph, formulate_for(graph, candidates(graph, fast_mesh((4,))), fast_mesh((4,)), Options(training=True))


@cache
def leveled() -> tuple[float, float]:
    """Below the first nothing fits, something does at the second."""
    low, high, choice = level(replace(without_costs(formulated()[1].problem), usage_limit=None), lambda: 0.0, 1.0)
    assert choice is not None
    return low, high


@pytest.mark.parametrize("share", [1e-6, 0.01, 0.3])
def test_a_hopeless_limit_is_refused_without_a_search(monkeypatch, share):
    problem = replace(formulated()[1].problem, usage_limit=share * leveled()[0])
    assert hopeless(problem)
    monkeypatch.setattr(infeasibility, "reduce_and_settle", lambda *_: pytest.fail("searched"))
    monkeypatch.setattr(sys.modules["autoshard.solvers.solve"], "explain_infeasible", lambda *_: None)
    assert solve(problem).status is Status.INFEASIBLE


def test_a_limit_just_too_small_is_refused_by_prices_on_bytes_alone(monkeypatch):
    problem = replace(formulated()[1].problem, usage_limit=0.97 * leveled()[0])
    monkeypatch.setattr(settle, "branch", lambda *_: pytest.fail("searched"))
    incumbent = Incumbent(problem, Record(problem, math.inf, 0.0, lambda: 0.0))
    refute(problem, incumbent)
    assert incumbent.bound == math.inf and incumbent.choice is None


def test_a_limit_that_is_enough_is_not_refused_and_something_is_found():
    problem = replace(formulated()[1].problem, usage_limit=1.001 * leveled()[1])
    assert not hopeless(problem)
    incumbent = Incumbent(problem, Record(problem, math.inf, 0.0, lambda: 0.0))
    refute(problem, incumbent)
    assert incumbent.bound < math.inf and evaluate(problem, incumbent.choice).fits


@pytest.mark.parametrize("seed", range(30))
def test_no_limit_is_called_hopeless_that_something_fits(seed):
    problem = random_problem(seed)
    free = solve(replace(problem, usage_limit=None), solver="exhaustive")
    if free.choice is None:
        return
    limit = evaluate(replace(problem, usage_limit=math.inf), free.choice).peak
    for share in (0.2, 0.5, 0.8, 0.95, 1.0):
        limited = replace(problem, usage_limit=share * limit)
        known = solve(limited, solver="exhaustive").choice is not None
        incumbent = Incumbent(limited, Record(limited, math.inf, 0.0, lambda: 0.0))
        refute(limited, incumbent)
        assert not (known and (hopeless(limited) or incumbent.bound == math.inf))
        assert known or incumbent.choice is None


# -- sizes -----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", ["65536x65536", "1000000000", "x".join("2" * 16), "x".join("1" * 6), "9" * 18, "9" * 5000])
def test_meshes_beyond_any_size_are_refused(shape):
    assert_refused("^mesh .*expected", parse_shape, shape)


@pytest.mark.parametrize("shape", [(MOST_DEVICES,), (2,) * MOST_AXES, (512, 512)])
def test_the_largest_meshes_are_meshes(shape):
    assert Mesh.from_bandwidths(shape).shape == shape


@pytest.mark.parametrize("shape", [(MOST_DEVICES + 1,), (2,) * (MOST_AXES + 1), (10**400, 10**400)])
def test_a_mesh_made_by_hand_or_read_is_no_larger(shape):
    axis = Mesh.from_bandwidths((1,)).axes[0]
    assert_refused("at most", Mesh, tuple(replace(axis, size=n) for n in shape))


def test_clusters_beyond_any_size_are_refused():
    assert_refused("has 1000000000 devices; expected", Cluster.of, 10**9)


def test_tables_are_laid_over_no_more_devices_than_a_search_can_move_them_on():
    assert_refused(f"100000 devices; tables can be placed on {MOST_OF_TABLES} at most", plan_tables, [Table("user", 10**6, 64)], 100000)


# -- patience --------------------------------------------------------------------------------------------------------------------------


def test_a_search_without_an_answer_ends_when_patience_does_and_one_with_an_answer_goes_on():
    problem = formulated()[1].problem
    record = Record(problem, 1000.0, 0.0, lambda: 200.0, patience=120.0)
    incumbent = Incumbent(problem, record)
    assert incumbent.done
    answer = solve(problem)
    incumbent.offer(answer.choice)
    assert incumbent.time_left() == 800.0 and not incumbent.done
    assert Incumbent(problem, replace(record, choice=None, patience=math.inf)).time_left() == 800.0


def test_solve_without_an_answer_is_unknown_after_its_patience():
    problem = replace(formulated()[1].problem, usage_limit=1.0005 * leveled()[0])
    assert solve(problem, patience=5.0, clock=Ticking()).status is Status.UNKNOWN


@pytest.mark.parametrize(("options", "seconds"), [({}, PATIENCE), ({"time_limit": 7.0}, 7.0), ({"time_limit": 500.0}, 500.0)])
def test_a_time_limit_that_is_set_is_the_patience_too(options, seconds):
    assert searched_seconds(Options(**options)) == seconds


def test_a_table_beyond_any_size_is_a_sentence():
    with pytest.raises(ValueError, match="table 'huge': rows is 10+; expected a whole number of 1 or more, in 64 bits"):
        plan_tables([Table("huge", rows=10**30, columns=4)], 8)
