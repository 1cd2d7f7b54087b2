"""`autoshard redistribute`: its JSON, its tables, its failures."""

import json
from pathlib import Path

import pytest

from tests.helpers_command import record_of, refusal, run
from tests.helpers_kept import assert_stays

DATA = Path(__file__).parent / "data" / "redistribution" / "problems.json"
SMALL = {"id": "s", "shape": [8, 4], "mesh": [2, 2], "src": [[0], [1]], "src_bs": [4, 2], "dst": [[0, 1], []], "dst_bs": [2, -1]}
GOOD = json.dumps(SMALL)


@pytest.fixture
def small(tmp_path):
    path = tmp_path / "small.json"
    path.write_text(GOOD)
    return str(path)


def test_json_holds_what_scripts_rely_on():
    found = record_of("redistribute", str(DATA), "--count", "resident")["routes"]
    assert len(found) == 32
    keys = "id status cost_seconds bound_seconds peak_elements peak_bytes steps executable_by explored cpu_seconds"
    first = next(route for route in found if route["id"] == "seed_p1")
    assert set(keys.split()) <= first.keys() and first["status"] == "optimal"
    assert {"collective", "axes", "dims", "layout", "seconds", "bytes"} <= first["steps"][0].keys()
    assert first["peak_bytes"] == 8 * first["peak_elements"] == 1_024_000_000
    assert sum(step["seconds"] for step in first["steps"]) == pytest.approx(first["cost_seconds"])
    assert_stays("rooms/routes.json", {route["id"]: {**route, "cpu_seconds": 0.0} for route in found})


@pytest.mark.parametrize("planner", ["astar", "naive"])
def test_every_planner(small, planner):
    (route,) = record_of("redistribute", small, "--planner", planner)["routes"]
    assert route["steps"][-1]["layout"] == "D_[2,2]⊥{(0,1),∅}(2,∅)"


def test_blocks_may_be_left_out_and_the_limit_is_kept_as_counted(tmp_path):
    path = tmp_path / "chunks.json"
    path.write_text(json.dumps({key: value for key, value in SMALL.items() if not key.endswith("_bs")}))
    (route,) = record_of("redistribute", str(path), "--count", "buffers", "--memory-limit", "128B")["routes"]
    assert route["steps"][-1]["layout"] == "D_[2,2]⊥{(0,1),∅}(2,∅)" and route["peak_bytes"] <= 128


def test_the_table_is_the_published_ones(small, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")  # narrower, words are folded
    code, out, _ = run("redistribute", small)
    assert code == 0
    for word in ("Step #", "Operation", "Distribution", "Memory Usage [MB]", "all_to_all(axes 1: dims 1 -> 0)", "optimal"):
        assert word in out


def test_a_limit_in_bytes(small):
    (route,) = record_of("redistribute", small, "--memory-limit", "128B")["routes"]
    assert route["peak_bytes"] == 2 * route["source_bytes"] == 128  # 8 elements of 8 bytes come in, 8 go out
    (route,) = record_of("redistribute", small, "--memory-limit", "120B", code=1)["routes"]
    assert "no route within the memory limit, raise it" in " ".join(run("redistribute", small, "--memory-limit", "120B")[1].split())
    assert route["status"] == "infeasible" and route["cost_seconds"] is None and route["steps"] == []


REFUSED = [  # the problem's text, options, the sentence
    (GOOD, ["--memory-limit", "60B"], "the memory limit is 7.5 elements (60 bytes) per rank; the source takes 8 and the target 8"),
    (GOOD, ["--planner", "greedy"], "--planner is 'greedy'; expected one of naive, astar"),
    (GOOD, ["--count", "all"], "--count is 'all'; expected one of resident, buffers"),
    ("not json", [], "is no sound JSON"),
    ("[]", [], "has less than 1 item; expected one or a list of shape"),
    ('{"shape": [8]}', [], "lacks 'mesh'"),
    (json.dumps({**SMALL, "shape": [0, 4]}), [], "shape is [0, 4]; expected one or more whole numbers, each at least 1"),
    (json.dumps({**SMALL, "mesh": [128, 128]}), [], "problem s: mesh [128, 128] has 16384 ranks; expected 8192 at most"),
    (json.dumps({**SMALL, "src": [[0], [0]]}), [], "the layout uses mesh axis 0 twice"),
    (json.dumps({**SMALL, "item_size": 4}), [], "problem s has an unknown key 'item_size'; did you mean 'itemsize'?"),
    (json.dumps({**SMALL, "src_partial": [1], "reduce_op": "product"}), [], "reduce_op holds \"product\" is not one of"),
    (json.dumps({**SMALL, "dst_bs": [5, -1]}), [], "dim 0 of size 8 on 4 parts has block size 5; expected 1 to 2"),
]


@pytest.mark.parametrize("text, options, sentence", REFUSED)
def test_bad_problems_and_options_are_one_sentence(tmp_path, text, options, sentence):
    path = tmp_path / "bad.json"
    path.write_text(text)
    assert sentence in refusal("redistribute", str(path), *options)
