"""Without numba loops run as they stand: the same bits, and one sentence about it."""

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from autoshard.solvers import compiled, compiling

ROOT = Path(__file__).resolve().parent.parent
ANSWERS = """
import random, sys, warnings
if sys.argv[1] == "without":
    sys.modules["numba"] = None
import numpy as np
from autoshard.solvers import loops, solve
from autoshard.tables import dp_proposals, plan_tables
from tests.helpers_tables import random_lists, random_tables
from tests.test_solvers_anneal import graph_of, grid_problem, start, walk

loops._left = -1  # loops are compiled at once, where they can be
with warnings.catch_warnings(record=True) as warned:
    warnings.simplefilter("always")
    for seed in range(4):
        problem = grid_problem(seed, side=5)
        ascent, incumbent = start(problem)
        if incumbent.choice is not None:
            rows, best = range(len(ascent.messages.rows.times)), np.array(incumbent.choice)
            rng = np.random.default_rng(seed)
            graph = graph_of(ascent.messages, rows)
            limits, walked = ascent.messages.limit, best.copy()
            cost, moves = walk(graph, limits, np.ones(len(rows)), walked, best, 10.0, 0.1, 16, 0.5, 30000, rng)
            print(float(cost).hex(), moves, walked.tolist(), best.tolist())
        answer = solve(problem, solver="prices")
        print(answer.choice, float(answer.cost).hex(), float(answer.bound).hex())
        rng = random.Random(seed)
        print(dp_proposals(*random_lists(rng, 5, 40), 40))
        plan = plan_tables(random_tables(rng, 6, 3, 4, 2), 4, hbm=30.0, host_memory=30.0, devices_per_node=2, effort=0.02)
        print({name: (one.index, one.devices) for name, one in plan.tables.items()}, float(plan.slowest_device_seconds).hex())
print(sum("pip install 'autoshard[fast]'" in str(w.message) for w in warned), file=sys.stderr)
"""


def answers(numba: str) -> tuple[str, str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", ANSWERS, numba], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr.split()[-1]


@pytest.mark.slow  # loops are compiled, some for the first time
def test_answers_are_equal_without_numba_which_is_said_once():
    pytest.importorskip("numba")
    (with_numba, said), (without, said_without) = answers("with"), answers("without")
    assert without == with_numba and (said, said_without) == ("0", "1")
    assert with_numba.count("[") > 8


def test_a_loop_is_compiled_with_numba_and_itself_without(monkeypatch, recwarn):
    pytest.importorskip("numba")
    assert compiled(answers).py_func is answers
    monkeypatch.setitem(sys.modules, "numba", None)
    monkeypatch.setattr(compiling, "numba", cache(compiling.numba.__wrapped__))  # it imports once
    assert compiled(answers) is answers and compiled(answers) is answers
    (said,) = recwarn
    assert "pip install 'autoshard[fast]'" in str(said.message)
