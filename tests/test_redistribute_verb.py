"""`autoshard redistribute`: its JSON, its tables, its picture, its failures."""

import json
from pathlib import Path

import numpy as np
import pytest

from autoshard.report import redistribution
from tests.helpers_command import record_of, refusal, run

DATA = Path(__file__).parent / "data" / "redistribution" / "problems.json"
SMALL = {"id": "s", "shape": [8, 4], "mesh": [2, 2], "src": [[0], [1]], "src_bs": [4, 2], "dst": [[0, 1], []], "dst_bs": [2, -1]}
GOOD = json.dumps(SMALL)
CHUNKS_OF_CHUNKS = {"shape": [9], "mesh": [2, 2], "src": [[0, 1]], "dst": [[]]}


@pytest.fixture
def small(tmp_path):
    path = tmp_path / "small.json"
    path.write_text(GOOD)
    return str(path)


def test_json_holds_what_scripts_rely_on():
    found = record_of("redistribute", str(DATA), "--prices", "tensorcraft")["routes"]
    assert len(found) == 32
    keys = "id status cost_seconds bound_seconds peak_elements peak_bytes steps executable_by explored cpu_seconds"
    first = next(route for route in found if route["id"] == "seed_p1")
    assert set(keys.split()) <= first.keys() and first["status"] == "optimal" and first["cost_seconds"] <= 0.071685
    assert {"collective", "axes", "dims", "layout", "seconds", "bytes"} <= first["steps"][0].keys()
    assert first["peak_bytes"] == 8 * first["peak_elements"] == 1_024_000_000
    assert sum(step["seconds"] for step in first["steps"]) == pytest.approx(first["cost_seconds"])


@pytest.mark.parametrize("planner", ["astar", "dijkstra", "memory_constrained", "naive"])
@pytest.mark.parametrize("prices", ["mesh", "tensorcraft"])
def test_every_planner_with_both_prices(small, planner, prices):
    (route,) = record_of("redistribute", small, "--planner", planner, "--prices", prices)["routes"]
    assert route["steps"][-1]["layout"] == "D_[2,2]⊥{(0,1),∅}(2,∅)"


@pytest.mark.parametrize("planner", ["astar", "memory_constrained"])
def test_blocks_may_be_left_out_and_every_planner_keeps_the_limit_as_counted(tmp_path, planner):
    path = tmp_path / "chunks.json"
    path.write_text(json.dumps({key: value for key, value in SMALL.items() if not key.endswith("_bs")}))
    (route,) = record_of("redistribute", str(path), "--planner", planner, "--count", "buffers", "--memory-limit", "128B")["routes"]
    assert route["steps"][-1]["layout"] == "D_[2,2]⊥{(0,1),∅}(2,∅)" and route["peak_bytes"] <= 128


def test_the_table_is_the_published_ones(small, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")  # narrower, words are folded
    code, out, _ = run("redistribute", small, "--prices", "tensorcraft", "--table")
    assert code == 0
    for word in ("Step #", "Operation", "Distribution", "Memory Usage [MB]", "all_to_all(axes 1: dims 1 -> 0)", "optimal"):
        assert word in out


def test_latex_keeps_its_lines(small):
    code, out, _ = run("redistribute", small, "--planner", "memory_constrained", "--prices", "tensorcraft", "--latex")
    assert code == 0 and r"\begin{tabular}{rllrr}" in out and r"all\_to\_all" in out and r"\perp\{(0,1),\emptyset \}(2,\emptyset )" in out
    assert all(line.endswith((r"\\", r"\hline", "}", "s")) for line in out.strip().splitlines())


def test_a_picture_is_written(small, tmp_path):
    assert run("redistribute", small, "--draw", str(tmp_path / "out.png"))[0] == 0
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_a_limit_in_bytes(small):
    (route,) = record_of("redistribute", small, "--memory-limit", "128B")["routes"]
    assert route["peak_bytes"] == 2 * route["source_bytes"] == 128  # 8 elements of 8 bytes come in, 8 go out
    (route,) = record_of("redistribute", small, "--memory-limit", "120B", code=1)["routes"]
    assert "no route within the memory limit, raise it" in " ".join(run("redistribute", small, "--memory-limit", "120B")[1].split())
    assert route["status"] == "infeasible" and route["cost_seconds"] is None and route["steps"] == []


REFUSED = [  # the problem's text, options, the sentence
    (GOOD, ["--memory-limit", "60B"], "the memory limit is 7.5 elements (60 bytes) per rank; the source takes 8 and the target 8"),
    (GOOD, ["--planner", "greedy"], "--planner is 'greedy'; expected one of naive, astar, dijkstra, memory_constrained"),
    (GOOD, ["--prices", "free"], "--prices is 'free'; expected one of mesh, tensorcraft"),
    (GOOD, ["--count", "all"], "--count is 'all'; expected one of resident, buffers"),
    (GOOD, ["--top-k", "1"], "--top-k belongs to --planner memory_constrained, not to astar"),
    (json.dumps(CHUNKS_OF_CHUNKS), ["--planner", "memory_constrained"], "knows blocks of one size alone; use astar"),
    ("not json", [], "is no sound JSON"),
    ("[]", [], "has less than 1 item; expected one or a list of shape"),
    ('{"shape": [8]}', [], "lacks 'mesh'"),
    (json.dumps({**SMALL, "shape": [0, 4]}), [], "shape is [0, 4]; expected one or more whole numbers, each at least 1"),
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


@pytest.mark.parametrize("ranks", [3, 16, 17, 25])
@pytest.mark.parametrize(("layouts", "dims"), [(1, 1), (2, 1), (3, 2)])
def test_a_picture_has_a_panel_per_layout_and_dim_in_which_each_rank_has_its_color(layouts, dims, ranks, monkeypatch):
    saved, rng = [], np.random.default_rng(0)
    panels = rng.integers(0, 2, (layouts, dims, ranks, 12)).tolist()
    monkeypatch.setattr(redistribution, "save", lambda *words, **options: saved.append((*words, options)))
    names = [f"layout {k}" for k in range(layouts)]
    redistribution.draw("route.png", "a route", names, panels)
    ((figure, path, options),) = saved
    assert (path, options, figure.get_suptitle()) == ("route.png", {"dpi": 120}, "a route")
    assert figure.get_size_inches().tolist() == pytest.approx([1.5 + 2.6 * dims, 1.0 + 1.6 * layouts])  # a panel is 2.6 by 1.6 inches
    axes = np.array(figure.axes).reshape(layouts, dims)
    for row, d in np.ndindex(layouts, dims):
        axis, (image,) = axes[row, d], axes[row, d].images
        expected = [[(1 + rank % 20) * held for held in line] for rank, line in enumerate(panels[row][d])]
        assert image.get_array().tolist() == expected and image.get_clim() == (0, 20) and image.get_cmap().N == 21
        assert len(axis.get_yticks()) == (ranks if ranks <= 16 else 0) and len(axis.get_xticks()) == 0
        assert axis.get_xlabel() == (f"dim {d}" if row == layouts - 1 else "")
        assert (axis.get_ylabel(), axis.get_title(loc="left")) == (("rank", names[row]) if d == 0 else ("", ""))
