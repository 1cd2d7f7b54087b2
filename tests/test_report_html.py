"""The report as a page: its sections, its pictures against shards that are counted, hostile names, the verb."""

import fnmatch
import json
import math
import re
import tomllib
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from autoshard import api
from autoshard.cli import main
from autoshard.layout import rank_bounds
from autoshard.mesh import Mesh
from autoshard.report import charts, html, layout_pictures, module_tree, page_of_plan, plan_tables
from autoshard.report import page as frame
from autoshard.report.proof import plan_card
from autoshard.solution import Placed, Solution, load
from autoshard.solution.record import parsed
from autoshard.units import seconds
from models import mlp
from tests.helpers_refusals import assert_refused
from tests.helpers_report import HOSTILE, Elements, frontier, hostile_solution
from tests.helpers_solutions import linear_solution

ROOT = Path(__file__).parent.parent
GPT2 = ROOT / "solutions" / "gpt2-small-2x4.json"
TEMPLATES = Path(html.__file__).parent / "templates"


def solution_with(**rows: tuple[str, list[int]]) -> Solution:
    """Parameters of these layouts and shapes."""
    parameters = {name: {"layout": layout, "shape": shape, "dtype": "float32", "local_bytes": 4} for name, (layout, shape) in rows.items()}
    return linear_solution(parameters=parameters)


# --- the page as text


def test_the_page_is_sound_html_with_every_section_headed_and_linked():
    page = Elements(html.html_report(load(GPT2)))
    assert page.crossed == [] and page.open == []
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert [name for name, count in Counter(ids).items() if count > 1] == []
    sections = {attributes["id"]: attributes["aria-labelledby"] for tag, attributes in page.tags if tag == "section"}
    assert list(sections) == list(page_of_plan.SECTIONS) and set(sections.values()) <= set(ids)
    assert {a["href"] for tag, a in page.tags if tag == "a"} == {f"#{name}" for name in (*sections, "main")}
    assert {a["href"] for tag, a in page.tags if tag == "use"} <= {f"#{name}" for name in ids}


def test_the_page_needs_nothing_but_itself_and_is_small():
    text = html.html_report(load(GPT2))
    page = Elements(text)
    assert len(text.encode()) < 2e6
    assert not [attributes for _, attributes in page.tags if {"src", "srcset", "action", "data", "poster"} & set(attributes)]
    assert not {tag for tag, _ in page.tags} & {"link", "img", "iframe", "object", "embed", "base", "form"}
    assert "url(" not in text and "@import" not in text and "://" not in text


def test_the_same_plan_gives_the_same_page():
    frame.environment.cache_clear()
    once = html.html_report(load(GPT2))
    frame.environment.cache_clear()
    assert html.html_report(load(GPT2)) == once


def test_sections_that_need_the_model_or_a_frontier_say_so_in_one_sentence():
    page = html.html_report(load(GPT2), no_model="there is no file <gpt2>.")
    said = Elements(page).text
    assert said.count("needs the model, and there is no file <gpt2>.") == 2 and "there is no file <gpt2>.." not in said
    assert "What less memory would cost was not given" in said


@pytest.mark.parametrize(
    ("changes", "mood", "short"),
    [
        ({}, "good", "proven best"),
        ({"status": "optimal", "cost": 1.0, "bound": 0.9}, "good", "within 10% of the best"),
        ({"status": "feasible", "cost": 1.0, "bound": 0.9}, "open", "at most 10% from the best"),
        ({"status": "unjudged", "cost": math.inf, "bound": 0.0}, "none", "not judged"),
    ],
)
def test_the_proof_is_said_as_it_is(changes, mood, short):
    found = plan_card(linear_solution(**changes))
    assert (found["mood"], found["short"]) == (mood, short)


def test_a_plan_that_fits_only_over_the_limit_is_not_called_a_gain():
    rows = {
        "fsdp": {"cost_seconds": 1e-3, "peak_bytes": 9e10, "status": "optimal", "fits": False},
        "megatron": {"cost_seconds": 3e-3, "peak_bytes": 1e9, "status": "optimal", "fits": True},
        "other": {"cost_seconds": None, "peak_bytes": None, "status": "infeasible"},
    }
    solution = linear_solution(baselines=rows)
    best = page_of_plan.content(solution, None, None)["best_usual"]
    assert best is not None and (best["name"], best["ratio"]) == ("megatron", pytest.approx(1.5))
    assert [row.cells[0] for row in plan_tables.usual_table(solution).rows] == ["ours", "fsdp", "megatron", "other"]
    assert "over the memory limit" in Elements(html.html_report(solution)).text


BARE = {"parameters": {}, "baselines": {}, "breakdown": {}, "counts": {}, "assumptions": {}, "seconds": {}, "fingerprint": {}}


def test_an_unjudged_plan_and_one_without_anything_have_a_page():
    bare = linear_solution(
        **BARE, layouts={"w": Placed((), ("R,R",))}, cost=math.inf, bound=0.0, peak_bytes=math.inf, status="unjudged", solver=""
    )
    page = Elements(html.html_report(bare))
    assert page.crossed == [] and "Layouts only" in page.text and not re.search(r"\b(inf|nan|None)\b", page.text)


def test_every_file_of_the_page_is_packaged():
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["autoshard"]
    names = [path.name for path in TEMPLATES.iterdir()]
    assert "page.html.j2" in names
    assert [name for name in names if not any(fnmatch.fnmatch(name, pattern.removeprefix("**/")) for pattern in patterns)] == []


# --- hostile names


def test_hostile_names_are_shown_and_change_nothing():
    page = html.html_report(hostile_solution(), frontier=frontier((1e9, 1.0, 1.0, "optimal"), model=HOSTILE), no_model=HOSTILE)
    seen = Elements(page)
    assert seen.crossed == [] and seen.open == []
    assert page.count("<script") == 1 and page.count("</script") == 1 and page.count("</style") == 1 and "<!--" not in page
    assert not [a for _, a in seen.tags if any(key.startswith("on") for key in a)]
    assert seen.text.count("<script>alert(1)</script>") == seen.text.count("{{ 7*7 }}&amp;</style><!--") > 10
    assert "script-src 'sha256-" in page and "default-src 'none'" in page


def test_a_notebook_shows_a_summary_escaped():
    page = Elements(hostile_solution()._repr_html_())
    assert page.crossed == [] and page.open == [] and "script" not in {tag for tag, _ in page.tags}
    assert "<script>alert(1)</script>" in page.text
    said = Elements(load(GPT2)._repr_html_()).text
    counted, gap = load(GPT2).objective_seconds, load(GPT2).objective_gap
    assert f"{seconds(counted)} per step, at most {100 * gap:.2g}% from the best" in said and "h.0 .. h.11: same" in said
    ratio = load(GPT2).baselines["megatron"]["step_seconds"] / counted
    assert "S(0),S(1)" in said and f"{ratio:.2f}x" in said
    assert len(load(GPT2)._repr_html_()) < 20_000


# --- pictures


MESHES = {
    "8": Mesh.from_bandwidths((8,)),
    "2x4": Mesh.from_bandwidths((2, 4)),
    "3x2": Mesh.from_bandwidths((3, 2)),
    "2x2x3": Mesh.from_bandwidths((2, 2, 3)),
    "1x4": Mesh.from_bandwidths((1, 4)),
}
CASES = [
    ("8", "S(0)", [16]), ("8", "S(1)", [3, 19]), ("8", "R", [4, 4]), ("8", "R", []), ("2x4", "S(0),S(1)", [8, 8]),
    ("2x4", "S(0),S(0)", [17, 3]), ("2x4", "S(1),R", [5, 6]), ("2x4", "S(2),S(3)", [2, 2, 4, 8]), ("2x4", "R,S(3)", [2, 2, 4, 8]),
    ("3x2", "S(1),S(0)", [7, 10]), ("2x2x3", "S(0),S(1),S(2)", [4, 5, 6]), ("2x2x3", "S(1),S(1),R", [4, 9]), ("1x4", "S(0),S(1)", [4, 4]),
]  # fmt: skip


@pytest.mark.parametrize(("mesh", "layout", "shape"), CASES)
def test_a_picture_shows_what_each_device_holds(mesh, layout, shape):
    """Against every element of the tensor: devices have one part exactly when they hold the same elements, of the area drawn."""
    solution = linear_solution(mesh=MESHES[mesh], layouts={}, results={}, parameters={"w": {"layout": layout, "shape": shape}})
    ((picture,), of) = layout_pictures.pictures(solution)
    assert of == {"w": 0} and len(picture.devices) == MESHES[mesh].num_devices
    elements = np.arange(math.prod(shape)).reshape(shape)
    held = []
    for coordinate in MESHES[mesh].coordinates():
        part = tuple(slice(lo, hi) for lo, hi in rank_bounds(tuple(shape), parsed(layout), MESHES[mesh], coordinate))
        held.append(frozenset(elements[part].reshape(-1).tolist()))
    assert [device["rank"] for device in picture.devices] == list(range(len(held)))
    for a, mine in zip(picture.devices, held, strict=True):
        area = a["width"] * a["height"] / math.prod(picture.box)
        assert area == pytest.approx(len(mine) / max(elements.size, 1), rel=2e-2, abs=1e-3)
        assert [(a["part"] == b["part"]) for b in picture.devices] == [mine == other for other in held]
        assert [(a["hue"] == b["hue"]) for b in picture.devices] == [mine == other for other in held]
    whole = sum(part["width"] * part["height"] for part in picture.parts)
    assert whole == pytest.approx(1e4, rel=1e-3)  # the parts cover the tensor once
    assert f"{len(set(held))}" in picture.words or "all of it" in picture.words


def test_parameters_that_lie_alike_share_a_picture_and_uneven_ones_do_not():
    solution = solution_with(
        a=("R,S(1)", [8, 8]), b=("R,S(1)", [64, 16]), c=("R,S(0)", [8, 8]), d=("R,S(0)", [8]), e=("R,S(1)", [8, 7]), f=("R,S(1)", [8, 8, 8])
    )
    found, of = layout_pictures.pictures(solution)
    assert of == {"a": 0, "b": 0, "c": 1, "d": 2, "e": 3, "f": 4} and [p.number for p in found] == [0, 1, 2, 3, 4]
    assert [p.kind for p in found] == ["matrices", "matrices", "vectors", "matrices", "tensors"]
    assert "unequal" in found[3].words and "unequal" not in found[0].words


def test_a_large_mesh_is_drawn_in_part_and_says_so():
    solution = linear_solution(
        mesh=Mesh.from_bandwidths((32, 32)), layouts={}, results={}, parameters={"w": {"layout": "S(0),S(1)", "shape": [1024, 1024]}}
    )
    ((picture,), _) = layout_pictures.pictures(solution)
    assert len(picture.devices) == 64 and picture.shown == "8 of 32 along axis0, 8 of 32 along axis1" and picture.parts == ()
    assert len(html.html_report(solution)) < 150_000


def test_a_shape_that_is_missing_leaves_the_layout_in_words():
    solution = linear_solution(parameters={"w": {"layout": "R,S(1)"}})
    assert layout_pictures.pictures(solution) == ([], {})
    assert "R,S(1)" in Elements(html.html_report(solution)).text


# --- the tree


def test_the_tree_has_every_parameter_once_under_its_modules():
    solution = load(GPT2)
    root = module_tree.tree(solution, layout_pictures.pictures(solution)[1])
    names = []

    def walk(node: module_tree.Module) -> None:
        names.extend(row["full"] for row in node.parameters)
        for child in node.modules.values():
            assert child.path.endswith(child.name)
            walk(child)

    walk(root)
    assert Counter(names) == Counter(list(solution.parameters))
    assert root.local_bytes == sum(row["local_bytes"] for row in solution.parameters.values())
    assert root.modules["h"].seconds == pytest.approx(sum(12 * [sum(solution.breakdown["blocks"]["h.0"].values())]), rel=1e-6)
    assert root.modules["h"].modules["5"].same_as == "h.0" and root.modules["h"].modules["0"].same_as == ""


def test_modules_that_hold_one_module_are_joined_and_tied_parameters_count_once():
    rows = {"model.layers.0.a.w": ("R,R", [4, 4]), "model.layers.1.a.w": ("R,R", [4, 4]), "head": ("R,R", [2])}
    solution = solution_with(**rows)
    tied = {**solution.parameters["head"], "tied_to": "head"}
    root = module_tree.tree(replace(solution, parameters={**solution.parameters, "again": tied}), {})
    assert list(root.modules) == ["model"] and root.modules["model"].name == "model.layers"
    assert [child.name for child in root.modules["model"].modules.values()] == ["0.a", "1.a"]
    assert (root.elements, root.num_parameters) == (34, 4)


def test_ops_of_equal_blocks_are_listed_once():
    row = {"layout": "R,R", "seconds": 1.0, "backward": False}
    rows = [{**row, "name": f"{op}_{k}", "module": f"h.{k}.attn", "target": op} for k in range(4) for op in ("mm", "add")]
    rows += [{**row, "name": "loss", "module": "", "target": "loss"}]
    rows[5] = {**rows[5], "layout": "S(0),R"}  # in h.2
    kept, same = module_tree.ops_once(rows)
    assert same == {"h.1": "h.0", "h.3": "h.0"}
    assert [row["name"] for row in kept] == ["mm_0", "add_0", "mm_2", "add_2", "loss"]
    root = module_tree.tree(solution_with(**{f"h.{k}.attn.w": ("R,R", [2]) for k in range(4)}), {}, rows)
    blocks = root.modules["h"].modules
    assert [block.same_ops_as for block in blocks.values()] == ["", "h.0", "", "h.0"] and root.num_ops == 5


# --- charts


@pytest.fixture(scope="module")
def timeline():
    module, inputs = mlp.tiny()
    mesh = Mesh.from_bandwidths((2, 2), inter_node_bandwidth=1e9)
    solution = api.plan(module, inputs, mesh, training=True, baselines=False, objective="serial")
    return solution, api.simulate(module, inputs, solution)


def test_the_time_line_draws_every_task_in_its_lane(timeline):
    _, line = timeline
    chart = charts.timeline_chart(line)
    assert [row["name"] for row in chart["rows"]] == ["compute", "link axis0", "link axis1"]
    for stream, row in enumerate(chart["rows"]):
        mine = [task for task in line.tasks if task.stream == stream]
        ends = [line.times.end[i] - line.times.begin[i] for i, task in enumerate(line.tasks) if task.stream == stream]
        assert row["busy"] * line.seconds == pytest.approx(math.fsum(ends))
        assert {path["kind"] for path in row["paths"]} == {task.kind for task in mine}
        for path in row["paths"]:
            boxes = [(int(a), int(w)) for a, w in re.findall(r"M(\d+) 0h(\d+)", path["path"])]
            drawn = sum(width for _, width in boxes)
            busy = math.fsum(task.seconds for task in mine if task.kind == path["kind"])
            assert drawn == pytest.approx(charts.WIDTH * busy / line.seconds, rel=0.05, abs=2 * len(boxes) + 2)
            assert all(a + w <= b for (a, w), (b, _) in zip(boxes, boxes[1:]))  # apart and in order
    assert [phase["name"] for phase in chart["phases"]] == ["forward", "backward", "update"]
    assert sum(phase["width"] for phase in chart["phases"]) == pytest.approx(100, abs=0.01)


def test_memory_over_time_has_the_peak_and_what_is_in_it(timeline):
    solution, line = timeline
    chart = charts.memory_chart(line, None)
    assert chart is not None and chart["bytes"] == line.peak_bytes
    assert sum(part["bytes"] for part in chart["parts"]) == pytest.approx(line.peak_bytes)
    tops = [min(map(int, re.findall(r"[V ](\d+)", layer["path"]))) for layer in chart["layers"]]
    assert tops == sorted(tops, reverse=True) and tops[-1] == round(charts.HEIGHT * (1 - 1 / 1.06))  # the peak, below the top
    assert charts.memory_chart(line, 1.2 * line.peak_bytes)["limit"] == round(charts.HEIGHT * (1 - 1 / 1.06), 1)
    assert charts.memory_chart(line, 80e9)["limit"] is None  # too far above to be drawn
    said = Elements(html.html_report(solution, line)).text
    assert "needs the model" not in said and "In that peak" in said and "critical path" in said


def test_ticks_are_round_and_inside():
    found = charts.ticks(0, 0.0402, str)
    assert [tick["text"] for tick in found] == ["0.0", "0.01", "0.02", "0.03", "0.04"] and all(0 <= tick["at"] <= 100 for tick in found)
    assert charts.ticks(1, 1, str) == []


@pytest.mark.parametrize("seed", range(5))
def test_no_column_of_the_memory_chart_loses_a_peak(seed):
    draw = np.random.default_rng(seed)
    times, total = np.sort(draw.uniform(0, 1, 5000)), draw.uniform(0, 1, 5000)
    times[0] = 0.0
    chosen = charts._columns(times.tolist(), total.tolist(), 1.0)
    for k, column in enumerate(chosen):
        low, high = k / charts.COLUMNS, (k + 1) / charts.COLUMNS
        inside = [i for i in range(5000) if times[i] <= high and (i == 4999 or times[i + 1] > low)]
        assert total[column] >= max(total[i] for i in inside if times[i] < high) - 1e-12
    assert max(total[chosen]) == max(total)


def test_an_area_goes_along_its_line_and_back_along_the_floor():
    columns = charts.COLUMNS
    above = [0.5 if k < columns // 2 else 1.0 for k in range(columns)]
    assert charts._area(above) == "M0 1000H0V500H3000V0H6000V1000Z"


def test_a_frontier_is_drawn_with_this_plan_on_it():
    points = frontier((1.0, 5.0, 4.0, "feasible"), (2.0, 3.0, 3.0, "optimal"))["points"]
    chart = charts.frontier_chart(points, (2.0, 3.0))
    assert chart is not None and chart["dots"].count("M") == 2 and chart["bounds"].count("M") == 1
    assert chart["here"] == {"x": pytest.approx(100 - 6 / 1.12, abs=0.1), "y": pytest.approx(6 / 1.12, abs=0.1)}
    assert charts.frontier_chart(points[1:], None) is None  # one point is no curve
    said = Elements(html.html_report(linear_solution(), frontier=frontier((2e9, 3.0, 3.0, "optimal"), (1e9, 4.0, None, "feasible")))).text
    assert "of tiny on 2x2" in said and "1 GB 4 s 33.3% - - feasible 2 GB 3 s - 3 s - optimal" in said


POINT = frontier((1.0, 1.0, 1.0, "optimal"))["points"][0]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ([], "the file holds"),
        ({"points": []}, "points holds"),
        ({"format": "autoshard.frontier/9"}, "format is 'autoshard.frontier/9'"),
        ({"points": [3]}, "points/0 holds"),
        ({"points": [{**POINT, "seconds": "x"}]}, "points/0/seconds holds"),
        ({"points": [{**POINT, "seconds": 1e308}]}, "points/0/seconds holds"),
    ],
)
def test_what_is_no_frontier_is_refused(change, said):
    data = {**frontier(), **change} if isinstance(change, dict) else change
    assert_refused(re.escape(said), html.html_report, linear_solution(), frontier=data)


# --- the verb


@pytest.fixture
def plan_file(tmp_path) -> str:
    linear_solution().save(tmp_path / "plan.json")
    return str(tmp_path / "plan.json")


def test_report_writes_the_page_and_says_what_is_missing(plan_file, tmp_path, capsys):
    out = tmp_path / "r.html"
    assert main(["show", plan_file, "--html", str(out), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["bytes"] == len(out.read_bytes()) and answer["no_model"] == "the plan doesn't say which model it is for"
    assert answer["sections"]["timeline"] is False and answer["sections"]["baselines"] is True


def test_a_model_that_is_gone_leaves_the_page_without_a_time_line(tmp_path, capsys):
    linear_solution(assumptions={"model": "gone.py:net", "set": {}}).save(tmp_path / "plan.json")
    assert main(["show", str(tmp_path / "plan.json"), "--trust", "--html", str(tmp_path / "r.html")]) == 0
    assert "without a time line: there is no file gone.py" in capsys.readouterr().err
    assert "needs the model, and there is no file gone.py" in (tmp_path / "r.html").read_text()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--model", "gone.py:net"], "there is no file gone.py"),  # one that is named must be there
        (["--no-model", "--model", f"{ROOT}/models/mlp.py:tiny"], "--model has no effect beside --no-model"),
        (["--frontier", "gone.json"], "there is no file gone.json"),
        (["--html", "nowhere/r.html"], "there is no folder nowhere"),
    ],
)
def test_report_refuses_what_it_cannot_do(plan_file, words, said, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["show", plan_file, *(["--html", "report.html"] if "--html" not in words else []), *words]) == 2
    assert said in capsys.readouterr().err and not (tmp_path / "report.html").exists()


@pytest.mark.parametrize("interval", [None, (0.5, 2.0)])
@pytest.mark.parametrize("simulated", [None, 0.25])
@pytest.mark.parametrize("overlapped", [{}, {"seconds": 0.25}])
def test_a_page_says_which_of_both_times_the_plans_seconds_are(overlapped, simulated, interval, monkeypatch):
    solution = replace(linear_solution(), overlapped=overlapped, prices={})
    monkeypatch.setattr(Solution, "interval", interval)
    said = page_of_plan._time_words(solution, simulated and SimpleNamespace(seconds=simulated))
    serial, hidden = f"; {seconds(solution.cost)} one task after the other", f"; {seconds(0.25)} with what overlap hides taken off"
    between = "; between 500 ms and 2 s, if every price is off by its usual error, all in one direction" if interval else ""
    assert said == (f" with overlap{serial}" if overlapped else hidden if simulated else "") + between
