"""`autoshard redistribute`: its JSON, its tables, its picture, its failures."""

import json
from pathlib import Path

import pytest

from autoshard.cli import main

DATA = Path(__file__).parent / "data" / "redistribution" / "problems.json"
SMALL = {"id": "s", "shape": [8, 4], "mesh": [2, 2], "src": [[0], [1]], "src_bs": [4, 2], "dst": [[0, 1], []], "dst_bs": [2, -1]}


@pytest.fixture
def small(tmp_path):
    path = tmp_path / "small.json"
    path.write_text(json.dumps(SMALL))
    return str(path)


def test_json_holds_what_scripts_rely_on(capsys):
    assert main(["redistribute", str(DATA), "--prices", "tensorcraft", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["routes"]
    assert len(found) == 32
    keys = {
        "id",
        "status",
        "cost_seconds",
        "bound_seconds",
        "peak_elements",
        "peak_bytes",
        "steps",
        "executable_by",
        "explored",
        "cpu_seconds",
    }
    first = next(route for route in found if route["id"] == "seed_p1")
    assert keys <= first.keys() and first["status"] == "optimal" and first["cost_seconds"] <= 0.071685
    assert {"collective", "axes", "dims", "layout", "seconds", "bytes"} <= first["steps"][0].keys()
    assert first["peak_bytes"] == 8 * first["peak_elements"] == 1_024_000_000
    assert sum(step["seconds"] for step in first["steps"]) == pytest.approx(first["cost_seconds"])


@pytest.mark.parametrize("planner", ["astar", "dijkstra", "memory_constrained", "naive"])
@pytest.mark.parametrize("prices", ["mesh", "tensorcraft"])
def test_every_planner_with_both_prices(small, capsys, planner, prices):
    assert main(["redistribute", small, "--planner", planner, "--prices", prices, "--json"]) == 0
    (route,) = json.loads(capsys.readouterr().out)["routes"]
    assert route["steps"][-1]["layout"] == "D_[2,2]⊥{(0,1),∅}(2,∅)"


def test_the_table_is_the_published_ones(small, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")  # narrower, words are folded
    assert main(["redistribute", small, "--prices", "tensorcraft", "--table"]) == 0
    out = capsys.readouterr().out
    for word in ("Step #", "Operation", "Distribution", "Memory Usage [MB]", "all_to_all(axes 1: dims 1 -> 0)", "optimal"):
        assert word in out


def test_latex_keeps_its_lines(small, capsys):
    assert main(["redistribute", small, "--planner", "memory_constrained", "--prices", "tensorcraft", "--latex"]) == 0
    out = capsys.readouterr().out
    assert r"\begin{tabular}{rllrr}" in out and r"all\_to\_all" in out and r"\perp\{(0,1),\emptyset \}(2,\emptyset )" in out
    assert all(line.endswith((r"\\", r"\hline", "}", "s")) for line in out.strip().splitlines())


def test_a_picture_is_written(small, tmp_path, capsys):
    assert main(["redistribute", small, "--draw", str(tmp_path / "out.png")]) == 0
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_a_limit_in_bytes(small, capsys):
    assert main(["redistribute", small, "--memory-limit", "128B", "--json"]) == 0  # 8 elements of 8 bytes come in, 8 go out
    assert json.loads(capsys.readouterr().out)["routes"][0]["peak_bytes"] == 128
    assert main(["redistribute", small, "--memory-limit", "120B", "--json"]) == 1
    (route,) = json.loads(capsys.readouterr().out)["routes"]
    assert route["status"] == "infeasible" and route["cost_seconds"] is None and route["steps"] == []


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["--memory-limit", "60B"], "the memory limit is 7.5 elements (60 bytes) per rank; the source takes 8 and the target 8"),
        (["--planner", "greedy"], "--planner is 'greedy'; expected one of naive, astar, dijkstra, memory_constrained"),
        (["--prices", "free"], "--prices is 'free'; expected one of mesh, tensorcraft"),
        (["--count", "all"], "--count is 'all'; expected one of resident, buffers"),
        (["--top-k", "1"], "--top-k belongs to --planner memory_constrained, not to astar"),
    ],
)
def test_bad_options_are_one_sentence(small, capsys, arguments, sentence):
    assert main(["redistribute", small, *arguments]) == 2
    captured = capsys.readouterr()
    assert sentence in captured.err and captured.out == "" and captured.err.count("\n") == 1


@pytest.mark.parametrize(
    "text, sentence",
    [
        ("not json", "is no sound JSON"),
        ("[]", "has less than 1 item; expected one or a list of shape"),
        ('{"shape": [8]}', "lacks 'mesh'"),
        (json.dumps({**SMALL, "shape": [0, 4]}), "shape is [0, 4]; expected one or more whole numbers, each at least 1"),
        (json.dumps({**SMALL, "src": [[0], [0]]}), "the layout uses mesh axis 0 twice"),
        (json.dumps({**SMALL, "dst_bs": [5, -1]}), "dim 0 of size 8 on 4 parts has block size 5; expected 1 to 2"),
    ],
)
def test_bad_problems_are_one_sentence(tmp_path, capsys, text, sentence):
    path = tmp_path / "bad.json"
    path.write_text(text)
    assert main(["redistribute", str(path)]) == 2
    captured = capsys.readouterr()
    assert sentence in captured.err and captured.out == "" and captured.err.count("\n") == 1
