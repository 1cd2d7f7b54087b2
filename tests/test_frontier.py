"""Frontiers of models: points against plan, the record, its files, plot and table, the verb, the notebook and the benchmark's judge."""

import ast
import csv
import io
import itertools
import json
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console

import autoshard
from autoshard import Mesh
from autoshard.cli import main
from autoshard.report import frontier as report
from benchmarks import study
from benchmarks.studies.limits import frontier_judged
from models import mlp
from tests.helpers_refusals import assert_refused

TIGHT = 1e-8  # relative: what bounds are lowered by


def test_a_record_bounds_as_it_was_made_to():
    record = {"bound_lines": [], "bound_limits": [{"limit_bytes": 2.9, "seconds": None}, {"limit_bytes": None, "seconds": 1.0}]}
    assert (report.bound_at(record, 2.0), report.bound_at(record, 3.0)) == (math.inf, 1.0)


# -- models ----------------------------------------------------------------------------------------------------------------------------


ONE_LAYER = mlp.tiny(layers=1)


@pytest.fixture(scope="module")
def tiny():
    return autoshard.frontier(*ONE_LAYER, Mesh.from_bandwidths((4,)), training=True, points=4, gap=1e-6)


def test_points_are_what_plan_finds_under_the_same_limit(tiny):
    assert len(tiny.proven) == len(tiny.points) >= 4
    for p in tiny.points[::3]:
        planned = autoshard.plan(*ONE_LAYER, tiny.mesh, training=True, memory_limit=p.limit_bytes, baselines=False, objective="serial")
        assert p.seconds == pytest.approx(planned.cost, rel=1e-6) and planned.peak_bytes <= p.limit_bytes


def test_each_point_is_a_plan_that_loads_and_verifies(tiny, tmp_path):
    for i, p in enumerate(tiny.points):
        made = tiny.solution(i)
        assert (made.cost, made.peak_bytes, made.gap) == (p.seconds, p.memory_bytes, p.gap)
        made.save(tmp_path / "plan.json")
        assert autoshard.load(tmp_path / "plan.json") == made
        assert made.memory_limit == p.limit_bytes
    assert autoshard.verify(*ONE_LAYER, tiny.solution(0))["ok"]


def test_within_and_bound_answer_for_any_limit(tiny):
    first, last = tiny.points[0], tiny.points[-1]
    assert tiny.within(first.memory_bytes - 1) is None and tiny.within(first.memory_bytes) == first and tiny.within(1e15) == last
    limits = np.linspace(first.memory_bytes, last.memory_bytes * 1.1, 50)
    assert all(tiny.bound(limit) <= tiny.within(limit).seconds * (1 + TIGHT) for limit in limits)
    assert all(a >= b for a, b in itertools.pairwise(tiny.bound(limit) for limit in limits))


def test_the_record_holds_what_readers_rely_on(tiny, tmp_path):
    tiny.save(tmp_path / "frontier.json")
    record = json.loads((tmp_path / "frontier.json").read_text())
    assert record == tiny.to_dict()
    assert record["format"] == "autoshard.frontier/1" and record["mesh"] == [4] and record["training"]
    assert set(record["points"][0]) == {"memory_bytes", "seconds", "bound_seconds", "gap", "status", "limit_bytes"}
    assert record["planning_seconds"] > 0
    for p in tiny.points:
        assert report.bound_at(record, p.memory_bytes) == pytest.approx(p.bound_seconds, rel=1e-9)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"memory_limit": 1e9}, "frontier takes no 'memory_limit'"),
        ({"recompute": "auto"}, "recompute is 'auto'"),
        ({"points": 0}, "points is 0"),
        ({"trainin": True}, "did you mean 'training'"),
    ],
)
def test_bad_input_is_refused_in_a_sentence(given, said):
    assert_refused(said, autoshard.frontier, *mlp.tiny(), Mesh.from_bandwidths((2,)), **given)


@pytest.mark.slow
def test_pins_hold_at_every_point():
    module, inputs = mlp.tiny()
    name = next(name for name, p in module.named_parameters() if p.ndim == 2)
    found = autoshard.frontier(module, inputs, Mesh.from_bandwidths((2,)), training=True, points=1, pins={name: "S(0)"})
    assert all(found.solution(i).parameters[name]["layout"] == "S(0)" for i in range(len(found.points)))


@pytest.mark.slow
def test_llama_8b_has_twelve_proven_points():
    from models import llama

    found = autoshard.frontier(*llama.llama3_8b(), Mesh.from_bandwidths((8, 8)), training=True)
    assert len(found.proven) >= 12 and max(p.gap for p in found.proven) <= 1e-3
    memories = [p.memory_bytes for p in found.proven]
    assert max(np.diff(memories)) <= 0.3 * (memories[-1] - memories[0])


# -- files, plots, the verb ------------------------------------------------------------------------------------------------------------


def test_csv_holds_the_points(tiny, tmp_path):
    report.write_csv(tiny.to_dict(), tmp_path / "f.csv")
    with open(tmp_path / "f.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["memory_bytes", "seconds", "bound_seconds", "gap", "status"]
    assert [(float(r["memory_bytes"]), float(r["seconds"]), r["status"]) for r in rows] == [
        (p.memory_bytes, p.seconds, p.status) for p in tiny.points
    ]


@pytest.mark.parametrize(("memory", "said"), [(80e9, "beyond the right"), (None, "h100: 1")])
def test_the_plot_draws_points_bound_and_the_devices_memory(tiny, tmp_path, memory, said):
    record = tiny.to_dict()
    record["device_memory_bytes"] = memory or record["points"][-1]["memory_bytes"]
    if memory is None:
        said = f"h100: {report.size(record['device_memory_bytes'])}"
    report.draw(record, tmp_path / "f.svg")
    drawn = (tmp_path / "f.svg").read_text()
    assert all(f"<!-- {words}" in drawn or f", {words} -->" in drawn for words in ("seconds per step", "no plan is below", said)), drawn
    assert (memory is not None) == ("beyond the right" in drawn)


ON_2 = ["models/mlp.py:tiny", "--set", "layers=1", "--mesh", "2", "--train"]
MODEL = [*ON_2, "--points", "2"]


@pytest.fixture
def beside_the_models(tmp_path, monkeypatch):
    (tmp_path / "models").symlink_to(Path(__file__).parent.parent / "models")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_verb_writes_all_its_files(beside_the_models, capsys):
    files = ["--out", "f.json", "--csv", "f.csv", "--plot", "f.png", "--save-dir", "plans"]
    assert main(["frontier", *MODEL, *files, "--json", "--quiet"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said == json.loads((beside_the_models / "f.json").read_text())
    assert (beside_the_models / "f.png").read_bytes()[:4] == b"\x89PNG"
    assert len((beside_the_models / "f.csv").read_text().splitlines()) == 1 + len(said["points"])
    for i, p in enumerate(said["points"]):
        assert autoshard.load(beside_the_models / "plans" / f"point-{i:02d}.json").cost == p["seconds"]


def test_the_table_fits_a_hundred_columns(tiny):
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(report.frontier_report(tiny.to_dict()))
    lines = console.export_text().splitlines()
    assert lines[0] == f"a training step of MLP on 4: {len(tiny.proven)} points proven within 1e-06, one task after the other"
    assert len(lines) == 4 + len(tiny.points) and max(map(len, lines)) <= 100
    last = tiny.points[-1]
    assert all(words in lines[-1] for words in ("76.936 kB", f"{1e6 * last.seconds:.2f} us", "optimal"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--plot", "f.txt"], "ends in .txt"),
        (["--csv", "nowhere/f.csv"], "--csv nowhere/f.csv: there is no folder nowhere; make it first"),
        (["--out", "models"], "--out models is a folder"),
        (["--plot", "picture"], "--plot picture ends in nothing; expected one of .png, .svg, .pdf"),
        (["--save-dir", "models/mlp.py"], "is a file"),
        (["--points", "0"], "--points is 0; expected a whole number of 1 or more"),
        (["--recompute", "auto"], "recompute is 'auto'"),
    ],
)
def test_the_verb_refuses_before_it_works(beside_the_models, capsys, words, said):
    assert main(["frontier", *ON_2, *words]) == 2
    assert said in capsys.readouterr().err


def test_a_notebook_shows_the_plot(tiny):
    shown = tiny._repr_html_()
    assert shown.startswith("<svg") and "seconds per step" in shown and shown.rstrip().endswith("</svg>")


@pytest.mark.slow
def test_the_notebook_of_the_tour_runs(monkeypatch):
    """Its code cells, in order, in one namespace; a cell ends with what it shows."""
    root = Path(__file__).parent.parent
    monkeypatch.chdir(root)
    notebook = json.loads((root / "examples" / "tour.ipynb").read_text())
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    names: dict = {}
    shown = [run_cell(cell, names) for cell in cells]
    assert names["report"]["ok"] and len(names["frontier"].proven) >= 2
    html = [value._repr_html_() for value in shown if hasattr(value, "_repr_html_")]
    assert len(html) == 3 and sum(text.startswith("<svg") for text in html) == 1
    assert names["smallest"].peak_bytes < names["solution"].peak_bytes and names["smallest"].cost > names["solution"].cost


def run_cell(source: str, names: dict) -> object:
    """Run the statements; the value of the last one where it is an expression, as a notebook shows it."""
    tree = ast.parse(source)
    last = ast.Expression(tree.body.pop().value) if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "cell", "exec"), names)
    return None if last is None else eval(compile(last, "cell", "eval"), names)


def test_a_cell_shows_its_last_expression_and_fails_as_it_is():
    names: dict = {}
    assert run_cell("a = 1\na + 1", names) == 2 and run_cell("a = 2", names) is None
    with pytest.raises(ZeroDivisionError):
        run_cell("1 / (a - 2)", names)


def test_without_time_the_answer_is_no(beside_the_models, capsys):
    assert main(["frontier", *MODEL, "--time-limit", "1e-9", "--json"]) == 1
    said = capsys.readouterr()
    assert "no plan was found" in said.err and json.loads(said.out)["status"] == "infeasible"


@pytest.mark.parametrize(
    ("change", "ok"),
    [
        ({}, True),
        ({"plan": {"seconds": 1.9, "bound_seconds": 1.0, "gap": 0.5}}, False),  # a plan below the bound
        ({"plan": {"seconds": 3.0, "bound_seconds": 2.1, "gap": 0.3}}, False),  # a bound above the point
        ({"proven": 0}, False),
        ({"cpu_seconds": 61.0}, False),
    ],
)
def test_the_benchmark_sees_a_contradiction(change, ok):
    point = {"memory_bytes": 1e9, "seconds": 2.0, "bound_seconds": 2.0, "gap": 0.0, "status": "optimal", "limit_bytes": 1e9}
    plan = {"seconds": 2.0, "bound_seconds": 1.9, "gap": 0.05, "plan_cpu_seconds": 1.0, **change.get("plan", {})}
    row = {"case": "a", "cpu_seconds": 1.0, "proven": 1, **change, "plans": {"point 1": point, "plan 1": plan}}
    judged = frontier_judged(row, {"limit": 60.0}, SimpleNamespace(points=1))
    assert judged["ok"] == ok and len(study.lines(judged)) == 4


def test_the_help_has_an_example(capsys):
    assert main(["frontier", "--help"]) == 0
    assert "autoshard frontier models/llama.py:llama3_8b --mesh 8x8" in capsys.readouterr().out
