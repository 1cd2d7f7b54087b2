"""What a report says of values that are recomputed or offloaded, and of transfers behind kernels."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from autoshard.report import html
from autoshard.report.step_tables import hidden_rows, saved_rows
from tests.helpers_report import Elements
from tests.helpers_solutions import linear_solution

GELU = {"aten.gelu.default": ["recomputed"]}
SAVED = {"h.0.mlp": GELU, "h.1.mlp": GELU, "": {"aten.mm.default": ["kept"]}}


def timeline(*tasks: tuple[str, int, float, float]) -> SimpleNamespace:
    """Of tasks: kind, stream, begin, end."""
    times = SimpleNamespace(begin=[task[2] for task in tasks], end=[task[3] for task in tasks])
    named = tuple(SimpleNamespace(kind=kind, stream=stream) for kind, stream, *_ in tasks)
    return SimpleNamespace(tasks=named, times=times, streams=("compute", "link a", "link b"))


def test_equal_blocks_are_one_row_and_what_is_not_kept_comes_first():
    solution = replace(linear_solution(), assumptions={"saved": {**SAVED, "h.2.mlp": {"aten.gelu.default": ["kept"]}}})
    assert [(row["way"], row["module"], row["target"], row["modules"]) for row in saved_rows(solution, None)] == [
        ("recomputed", "h.*.mlp", "gelu", 2), ("kept", "", "mm", 1), ("kept", "h.2.mlp", "gelu", 1),
    ]  # fmt: skip


@pytest.mark.parametrize("recompute", [0, 3])
def test_the_page_says_what_is_computed_again(recompute):
    solution = replace(linear_solution(), assumptions={"saved": {} if recompute else SAVED, "recompute": recompute})
    text = Elements(html.html_report(solution)).text
    assert ("Values that are kept: 1 kinds" in text) is not bool(recompute)
    assert ("3 repeated blocks are recomputed" in text) is bool(recompute)


def test_a_transfer_is_hidden_where_a_kernel_runs():
    rows = hidden_rows(timeline(
        ("compute", 0, 0.0, 2.0), ("optimizer", 0, 5.0, 6.0),
        ("all_gather", 1, 1.0, 4.0), ("all_gather", 1, 5.0, 5.5), ("split", 2, 0.5, 1.0),
    ))  # fmt: skip
    said = [(row["stream"], row["kind"], row["seconds"], row["hidden"], row["exposed"]) for row in rows]
    assert said == [("link a", "all_gather", 3.5, 1.5, 2.0), ("link b", "split", 0.5, 0.5, 0.0)]


def test_hidden_seconds_are_those_of_a_fine_grid():
    draw = np.random.default_rng(0)
    starts, kinds = draw.integers(0, 60, 40), draw.choice(["compute", "all_reduce", "all_gather"], 40)
    tasks = [(str(kind), int(kind != "compute"), int(a), int(a + n)) for kind, a, n in zip(kinds, starts, draw.integers(1, 12, 40))]
    covered = {t for kind, _, a, b in tasks if kind == "compute" for t in range(a, b)}
    for row in hidden_rows(timeline(*tasks)):
        alike = [task for task in tasks if task[0] == row["kind"]]
        assert row["hidden"] == pytest.approx(sum(t in covered for _, _, a, b in alike for t in range(a, b)))
        assert row["seconds"] == pytest.approx(sum(b - a for _, _, a, b in alike))
