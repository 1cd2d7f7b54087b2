"""The published knapsack over tables: the identical lists."""

import json
import random
from pathlib import Path

import pytest

from autoshard.tables import dp_proposals
from tests.helpers_tables import published, random_lists

DATA = Path(__file__).parent / "data" / "tables" / "dp_proposals.json"


@pytest.mark.parametrize("item", json.loads(DATA.read_text()), ids=lambda item: f"{item['tables']} tables")
def test_the_published_proposals(item):
    assert dp_proposals(item["memory_in_bins"], item["perf"], item["bins"]) == item["proposals"]


def test_the_same_as_state_by_state():
    rng = random.Random(0)
    for _ in range(150):
        bins = rng.choice([1, 5, 30])
        memory, perf = random_lists(rng, rng.randint(1, 7), bins)
        assert dp_proposals(memory, perf, bins) == published(memory, perf, bins)


def test_the_reference_tells_a_wrong_tie_rule():
    """Two equal options: the first one stays."""
    assert dp_proposals([[1.0, 1.0]], [[2.0, 2.0]], 5) == [[0]] == published([[1.0, 1.0]], [[2.0, 2.0]], 5)
    assert dp_proposals([[4.0, 1.5], [1.2, 3.7]], [[1.0, 1.0], [1.0, 1.0]], 6) == published([[4.0, 1.5], [1.2, 3.7]], [[1.0, 1.0]] * 2, 6)


def test_inf_forbids_and_nothing_fits_gives_nothing():
    assert dp_proposals([[1.0, 2.0]], [[float("inf"), 3.0]], 5) == [[1]]
    assert dp_proposals([[9.0]], [[1.0]], 5) == []
    assert dp_proposals([], [], 5) == []


@pytest.mark.parametrize(
    ("memory", "perf", "bins", "sentence"),
    [
        ([[1.0]], [[float("nan")]], 5, "perf holds nan; expected numbers of 0 or more"),
        ([[-1.0]], [[1.0]], 5, "memory_in_bins holds -1; expected numbers of 0 or more"),
        ([[1.0]], [], 5, "memory_in_bins has 1 tables, perf 0"),
        ([[1.0, 2.0]], [[1.0]], 5, "table 0 has 2 in memory_in_bins, 1 in perf"),
        ([[]], [[]], 5, "table 0 has 0 in memory_in_bins"),
        ([[1.0]], [[1.0]], 0, "bins is 0; expected a whole number of 1 or more"),
    ],
)
def test_what_is_no_knapsack(memory, perf, bins, sentence):
    with pytest.raises(ValueError, match=sentence):
        dp_proposals(memory, perf, bins)
