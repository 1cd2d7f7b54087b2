"""A time limit is obeyed by every search of a plan: on a clock of which every look takes a second, few looks follow the limit."""

import itertools

import pytest

from autoshard.planning import solving
from autoshard.planning.options import Infeasible, Stopwatch
from autoshard.planning.plan import plan
from models import gpt2
from tests.helpers import Ticking, fast_mesh

FEW = 40  # looks: to find that the time is over in each of the searches, and to judge what is known


def looks(limit: float, **options) -> float:
    clock = Ticking()
    module, inputs = gpt2.tiny(layers=4)
    try:
        plan(module, inputs, fast_mesh((2, 4)), training=True, watch=Stopwatch(None, clock), time_limit=limit, **options)
    except Infeasible as error:
        assert error.status == "no answer" and "memory_limit" in options
    return clock.now


CASES = list(itertools.product((3.0, 300.0), ({}, {"baselines": False}, {"baselines": False, "memory_limit": 2.2e6})))


@pytest.mark.parametrize(("limit", "options"), CASES[1:4:2] + [pytest.param(*case, marks=pytest.mark.slow) for case in CASES[::2]])
def test_every_search_ends_with_the_time_limit(limit, options):
    assert looks(limit, **options) <= limit + FEW


def test_a_search_that_ignores_the_limit_is_found(monkeypatch):
    real = solving.solve
    monkeypatch.setattr(solving, "solve", lambda *given, **options: real(*given, **options | {"time_limit": 1e6}))
    assert looks(3.0, baselines=False) > 3.0 + FEW
