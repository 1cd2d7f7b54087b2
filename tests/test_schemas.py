"""The JSON Schemas in autoshard/schemas take every file that the code writes, and refuse planted wrong ones."""

import copy
import gzip
import json
from functools import cache
from pathlib import Path

import jsonschema
import pytest
import torch
import torch.distributed.checkpoint as dcp
from referencing import Registry, Resource

import autoshard
from autoshard import Cluster, Mesh, Program
from autoshard.calibrate.cluster import cluster
from autoshard.calibrate.rates import OpSample
from autoshard.cli import main
from autoshard.cost.curves import save_cluster
from autoshard.mesh import Device
from autoshard.problem import read_contest, write_choice
from autoshard.reading import schemas
from autoshard.runtime.checkpoint_files import Writer
from autoshard.solution.plan_format import packed, unpacked
from autoshard.solvers import solve
from models import mlp

ROOT = Path(__file__).parent.parent
DATA = ROOT / "tests" / "data"
FOLDER = ROOT / "autoshard" / "schemas"
SCHEMAS = {name.removesuffix(".json"): schema for name, schema in sorted(schemas().items())}
REGISTRY = Registry().with_resources((schema["$id"], Resource.from_contents(schema)) for schema in SCHEMAS.values())
SLOW = Device("slow", 1e9, 1e9, 1e9, 1e9, launch=1e-7)


def faults(kind: str, data: object) -> list[str]:
    validator = jsonschema.Draft202012Validator(SCHEMAS[kind.partition(" ")[0]], registry=REGISTRY)
    return [f"{'/'.join(map(str, error.absolute_path))}: {error.message[:200]}" for error in validator.iter_errors(data)]


@cache
def plan():
    return autoshard.plan(*mlp.tiny(), Mesh.from_bandwidths((2,)), training=True, baselines=False, objective="serial")


# -- files, written by the code that users run ----------------------------------------------------------------------------------------


def solution(path: Path) -> None:
    autoshard.plan(*mlp.tiny(), Mesh.from_bandwidths((2,)), training=True).save(path)


def frontier(path: Path) -> None:
    autoshard.frontier(*mlp.tiny(), Mesh.from_bandwidths((2,)), training=True, points=1).save(path)


def programs(path: Path) -> None:
    module, batch = mlp.tiny()
    both = {"train": Program(module, batch, training=True), "use": Program(module, batch, weight=2, devices=(0,))}
    autoshard.plan(both, Mesh.from_bandwidths((2,))).save(path)


def curves(path: Path) -> None:
    assert main(["calibrate", "fit", str(DATA / "collectives" / "measured.csv"), "--out", str(path)]) == 0


def measured(path: Path) -> None:
    samples = [OpSample("matmul", "float32", 1e9, 1e6, 1e-3), OpSample("matmul", "float32", 1e10, 1e7, 1e-2)]
    samples += [OpSample("memory", "float32", 0.0, 1e6 * k, 1e-4 * k) for k in (1, 2, 4)] + [OpSample("launch", "", 0.0, 0.0, 2e-6)]
    times = {(0, "all_reduce"): {2.0**k: 1e-4 + 2.0**k / 1e9 for k in range(10, 20)}}
    about = {"backend": "gloo", "device": "cpu", "memory": 8e9, "complete": True, "assumptions": {"clock": "wall"}}
    save_cluster(str(path), cluster((2,), times, samples, **about))


def choice(path: Path) -> None:
    write_choice(path, solve(read_contest(DATA / "iopddl" / "example.json")))


def checkpoint(path: Path) -> None:
    folder = path.with_name("checkpoint")
    dcp.save({"model": {"w": torch.zeros(2, 3)}, "extra": (7,)}, storage_writer=Writer(folder, "0123"), no_dist=True)
    path.write_bytes((folder / "manifest.json").read_bytes())


def sharding_map(path: Path) -> None:
    autoshard.export(plan(), "sharding_map", path)


def placements(path: Path) -> None:
    autoshard.export(plan(), "json", path)


def pipeline(path: Path) -> None:
    autoshard.plan(*mlp.tiny(layers=4, batch=16), Cluster.of(2, device=SLOW), microbatches=(2,), schedules=("1f1b",)).save(path)


MADE = {
    "plan.2": solution, "plan.2 of programs": programs, "plan.2 of stages": pipeline, "frontier.1": frontier, "curves.1": curves,
    "cluster.1": measured, "choice.1": choice, "sharding_map.1": sharding_map, "placements.1": placements, "checkpoint.1": checkpoint,
}  # fmt: skip


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder, known = tmp_path_factory.mktemp("schemas"), {}

    def of(kind: str) -> dict:
        if kind not in known:
            MADE[kind](folder / f"{kind}.json")
            known[kind] = json.loads((folder / f"{kind}.json").read_text())
        return copy.deepcopy(known[kind])

    return of


@pytest.mark.parametrize("kind", MADE)
def test_what_the_code_writes_is_as_the_schema_says(written, kind):
    assert faults(kind, written(kind)) == []


@pytest.mark.parametrize("kind", ["plan.2", "plan.2 of programs", "plan.2 of stages"])
def test_plans_of_every_kind_are_what_their_files_hold_in_both_formats(written, tmp_path, kind):
    file = written(kind)
    record = unpacked(file)
    assert packed(record) == file  # and what format 1 held of programs and stages, was the record
    first = record if kind == "plan.2 of stages" else {"format": 1, **record}
    for k, data in enumerate((file, first)):
        (tmp_path / f"{k}.json").write_text(json.dumps(data))
    new, old = (autoshard.load(tmp_path / f"{k}.json") for k in (0, 1))
    assert new == old and new.digest == old.digest and type(new) is type(old)
    new.save(tmp_path / "again.json")
    assert json.loads((tmp_path / "again.json").read_text()) == file
    assert len(new.parts) == len(file["parts"]) and all(part.layouts for part in new.parts.values())


@pytest.mark.parametrize("name", ["example.json", "asplos-2025-iopddl-B.json.gz"])
def test_the_contests_problems_are_as_the_schema_says(name):
    path = DATA / "iopddl" / name
    content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    assert faults("problem.1", json.loads(content)) == []


@pytest.mark.parametrize("path", sorted([*(DATA / "solutions").glob("*.json"), *(ROOT / "solutions").glob("*.json")]), ids=lambda p: p.name)
def test_plans_of_older_releases_are_as_the_schema_says(path):
    data = json.loads(path.read_text())
    assert faults("plan.2", data if data["format"] == 2 else packed(data)) == []


# -- planted faults --------------------------------------------------------------------------------------------------------------------


def put(*where):
    """A fault: the last of `where` in the place that the others name; `...` in its place takes the key away."""
    *way, key, value = where

    def plant(data):
        for step in way:
            data = data[next(iter(data))] if step is any else data[step]
        if value is ...:
            del data[key]
        else:
            data[key] = value

    return plant


FAULTS = [
    ("plan.2", put("format", 1)),
    ("plan.2", put("cost", ...)),
    ("plan.2", put("status", "best")),
    ("plan.2", put("cost", "fast")),
    ("plan.2", put("colour", "red")),
    ("plan.2", put("mesh", "axes", [])),
    ("plan.2", put("mesh", "axes", 0, "size", 0)),  # behind the reference to mesh.1.json
    ("plan.2", put("mesh", "device", "flops", ...)),
    ("plan.2", put("parts", 0, "layouts", any, "outputs", ["S(0),X"])),
    ("plan.2", put("parts", 0, "layouts", any, "inputs", [None])),
    ("plan.2", put("parts", 0, "parameters", any, "layout", "whole")),
    ("frontier.1", put("format", "autoshard.frontier/2")),
    ("frontier.1", put("points", [])),
    ("frontier.1", put("points", 0, "status", "best")),
    ("frontier.1", put("points", 0, "gap", -0.1)),
    ("frontier.1", put("points", 0, "memory_bytes", ...)),
    ("frontier.1", put("planning_seconds", None)),
    ("plan.2 of programs", put("format", 1)),
    ("plan.2 of programs", put("programs", "home", ...)),
    ("plan.2 of programs", put("programs", "weights", any, 0)),
    ("plan.2 of programs", put("programs", "switches", any, -1)),
    ("plan.2 of programs", put("parts", 1, "devices", [-1])),
    ("plan.2 of programs", put("programs", "copies", 0, "bytes", ...)),
    ("plan.2 of programs", put("parts", [])),
    ("plan.2 of programs", put("parts", 0, "status", "best")),
    ("curves.1", put("format", "autoshard.curves/0")),
    ("curves.1", put("curves", 0, "method", "spline")),
    ("curves.1", put("curves", 0, "parameters", "sizes", [1.0])),
    ("curves.1", put("curves", 0, "parameters", "tail", ...)),
    ("curves.1", put("curves", 0, "devices", 0)),
    ("cluster.1", put("mesh", "axes", 0, "curves", 0, "seconds", [-1.0])),
    ("cluster.1", put("roofline", ...)),
    ("cluster.1", put("mesh", "device", "memory_bandwidth", 0)),
    ("cluster.1", put("mesh", "device", "flops32", 0)),
    ("cluster.1", put("complete", "yes")),
    ("choice.1", put("status", "fine")),
    ("choice.1", put("choice", [0.5])),
    ("sharding_map.1", put(any, "sharding", {"weight": None})),
    ("sharding_map.1", put(any, "node", ...)),
    ("placements.1", put("parameters", any, "placements", ["shard"])),
    ("placements.1", put("mesh", "shape", [])),
    ("plan.2 of stages", put("parts", [])),
    ("plan.2 of stages", put("parts", 0, "devices", ...)),
    ("plan.2 of stages", put("pipeline", "way", "guessed")),
]


@pytest.mark.parametrize(("kind", "plant"), FAULTS, ids=[f"{kind}-{k}" for k, (kind, _) in enumerate(FAULTS)])
def test_a_planted_fault_is_refused(written, kind, plant):
    data = written(kind)
    plant(data)
    assert faults(kind, data) != []


@pytest.mark.parametrize(
    "data",
    [
        {"problem": {"nodes": {"intervals": [[0]], "costs": [[1]], "usages": [[1]]}, "edges": {"nodes": [], "costs": []}}},
        {"problem": {"nodes": {"intervals": [[0, 1]], "costs": [[]], "usages": [[1]]}, "edges": {"nodes": [], "costs": []}}},
        {"problem": {"nodes": {"intervals": [[0, 1]], "costs": [[1]], "usages": [[1]]}, "edges": {"nodes": [[0, 1, 2]], "costs": [[1]]}}},
        {"problem": {"nodes": {"intervals": [[0, 1]], "costs": [["1"]], "usages": [[1]]}, "edges": {"nodes": [], "costs": []}}},
        {"problem": {"nodes": {"intervals": [], "costs": [], "usages": []}}},
    ],
)
def test_a_problem_that_is_none_is_refused(data):
    assert faults("problem.1", data) != []


# -- the schemas themselves ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SCHEMAS)
def test_a_schema_is_sound_and_named_as_its_file(kind):
    jsonschema.Draft202012Validator.check_schema(SCHEMAS[kind])
    assert SCHEMAS[kind]["$id"] == f"{kind}.json" and SCHEMAS[kind]["$schema"].endswith("2020-12/schema")
    assert SCHEMAS[kind]["title"] and SCHEMAS[kind]["description"]


def test_every_schema_is_linked_and_tested():
    page = (ROOT / "docs" / "formats.md").read_text()
    assert [path.name for path in FOLDER.glob("*.json") if f"schemas/{path.name}" not in page] == [] and "options.1.json" in page
    assert set(SCHEMAS) == {
        *(kind.partition(" ")[0] for kind in MADE),
        "options.1",
        "problem.1",
        "mesh.1",
        "tables.1",
        "redistribution.1",
        "config.1",
        "layouts.1",
    }
