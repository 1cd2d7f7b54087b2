"""A cache of plans: exact ones are served after they are judged, near ones start the search, and no entry is lost or torn."""

import json
import logging
import os
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest

import autoshard
from autoshard.api import autosharding_pass, passes
from autoshard.api.cached_plans import CachedPlans
from autoshard.capture import capture
from autoshard.cli import main
from autoshard.planning.warm_starts import corresponding
from autoshard.solution import CacheEntry, PlanCache, to_text
from autoshard.solution import cache as cache_module
from autoshard.strategies import RULES, register
from models import gpt2, llama
from tests.helpers_models import refusal
from tests.helpers_solutions import linear_solution
from tests.test_passes import run


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


LOCATIONS = ["plans", "memory://plans-{n}", "file://{here}/plans"]


@pytest.fixture
def location(request, tmp_path):
    return request.param.format(n=tmp_path.name, here=tmp_path)


QUICKLY = [pytest.param(where, marks=[] if where == "plans" else pytest.mark.slow) for where in LOCATIONS]


@pytest.mark.parametrize("location", QUICKLY, indirect=True)
def test_the_second_call_is_served_and_nothing_is_solved(location, monkeypatch):
    first = run(kind="joint", cache=location)[1]
    assert first["cache"] == "cold"
    assert run(kind="joint", cache=location, memory_limit=1e9)[1]["cache"] == "warm"  # another question
    monkeypatch.setattr(passes, "plan_graph", None)
    second = run(kind="joint", cache=location)[1]
    assert second["cache"] == "hit" and second["solution"].layouts == first["solution"].layouts
    assert (second["cost_seconds"], second["bound_seconds"]) == (first["cost_seconds"], first["bound_seconds"])


@pytest.mark.parametrize("changed", [dict(device="h100"), dict(inter_node_bandwidth=1e13), dict(mesh_shape=(4, 2)), dict(algo="fsdp"),
                                     dict(pins={"layers.0.up.weight": "R,R"}), dict(objective="overlapped")])  # fmt: skip
def test_another_question_is_no_hit(changed):
    run(kind="exported", cache="plans")
    assert run(kind="exported", cache="plans", **changed)[1]["cache"] != "hit"


def test_another_rule_is_another_question(monkeypatch):
    gelu = "aten.gelu.default"
    monkeypatch.setitem(RULES, gelu, None)
    monkeypatch.setattr(register, "REGISTERED", set())
    for rows in (["S(0) -> S(0)"], ["S(0) -> S(0)", "S(1) -> S(1)"]):
        autoshard.register_rule(gelu, *rows, replace=True, uneven=True)
        assert [run(kind="exported", cache="plans")[1]["cache"] == "hit" for _ in range(2)] == [False, True]


def test_nothing_is_written_unless_asked(tmp_path):
    run(kind="exported", ilp_solution_file=None)
    from tests.test_passes import FAST, given

    graph, inputs, _ = given("mlp", "exported")
    autosharding_pass(graph, mesh_shape=(2, 4), example_inputs=inputs, **FAST)
    assert os.listdir(tmp_path) == []
    autosharding_pass(graph, mesh_shape=(2, 4), example_inputs=inputs, ilp_solution_file="ilp_solution.pkl", **FAST)
    assert os.listdir(tmp_path) == ["ilp_solution.pkl"]


def edited(change) -> None:
    """The one entry of the cache with its plan changed."""
    (file,) = Path("plans").glob("*/*.json")
    data = json.loads(file.read_text())
    file.write_text(json.dumps({**data, "text": change(data["text"])}))


def with_cost(text: str) -> str:
    data = json.loads(text)
    return json.dumps({**data, "cost": data["cost"] * 0.9, "bound": data["bound"] * 0.5})


FOREIGN = {
    "another cost": (with_cost, "it costs"), "torn": (lambda text: text[: len(text) // 2], "is no sound JSON"),
    "no plan": (lambda text: "{}", "not a plan"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FOREIGN)
def test_an_entry_that_is_not_what_it_says_is_planned_anew(fault, caplog):
    change, why = FOREIGN[fault]
    right = run(kind="exported", cache="plans")[1]
    edited(change)
    with caplog.at_level(logging.WARNING):
        again = run(kind="exported", cache="plans")[1]
    assert again["cache"] == "cold" and again["cost_seconds"] == right["cost_seconds"]
    assert "is not used" in caplog.text and why in caplog.text
    assert run(kind="exported", cache="plans")[1]["cache"] == "hit"  # it was replaced


@pytest.mark.parametrize("content", [b'{"key": "a", "facts": 3', b'{"key": "a", "family": "b", "facts": 3, "text": "{}"}', b"\xff"])
def test_a_torn_file_of_a_location_is_planned_anew_and_listed(content, tmp_path, capsys, caplog):
    where = f"file://{tmp_path}/plans"
    run(kind="exported", cache=where)
    (entry,) = tmp_path.glob("plans/*/*.json")
    entry.write_bytes(content)
    assert run(kind="exported", cache=where, memory_limit=1e9)[1]["cache"] == "cold"  # the other entry of the family is none
    assert main(["cache", "ls", where, "--json"]) == 0
    assert {"key": entry.stem, "status": "no plan"} in json.loads(capsys.readouterr().out)["entries"]
    assert run(kind="exported", cache=where)[1]["cache"] == "warm" and f"the cache's entry {entry.stem[:12]} is not used" in caplog.text
    assert run(kind="exported", cache=where)[1]["cache"] == "hit"


def test_another_file_is_no_cache():
    with open("plan.json", "w") as file:
        file.write("{}")
    said = "cache plan.json is a file; expected a folder of plans, new or old: give another"
    assert refusal(run, kind="exported", cache="plan.json") == said
    assert refusal(run, kind="exported", cache="nothing://x").startswith("cache nothing://x: ")
    assert refusal(run, kind="exported", cache=7).startswith("cache is 7; expected the path of a folder, or a URL")


def test_other_files_of_a_folder_stay_as_they_are():
    Path("plans", "runs").mkdir(parents=True)
    others = [Path("plans", "runs", name) for name in ("notes.txt", ".hidden.json")]
    for other in others:
        other.write_text("x")
    cache = PlanCache("plans")
    assert cache.entries() == [] and cache.prune(0) == 0 and [other.read_text() for other in others] == ["x", "x"]
    others = [Path("plans", "package.json"), Path("plans", "runs", "mine.json"), Path("plans", "runs", "old", "mine.json")]
    Path("plans", "runs", "old").mkdir()
    for other in others:
        other.write_text("[" * 100_000)
    cache.put(CacheEntry("key", "family", {}, "x"))
    assert {entry.key for entry in cache.entries()} == {"key", "mine"} and cache.prune(0) == 1 and all(map(Path.exists, others))


def refuse(*_, **__):
    raise PermissionError(13, "Permission denied", "plans")


def test_what_can_not_be_read_of_a_cache_is_planned_anew(monkeypatch, caplog):
    run(kind="exported", cache="plans")
    monkeypatch.setattr(type(PlanCache("plans").files), "cat_file", refuse)
    for options in ({}, {"memory_limit": 1e9}):
        caplog.clear()
        assert run(kind="exported", cache="plans", **options)[1]["cache"] == "cold"
        assert "is not used" in caplog.text and "Permission denied" in caplog.text


def test_a_cache_that_can_not_be_written_serves_its_plans_and_loses_no_new_one(monkeypatch, caplog):
    run(kind="exported", cache="plans")
    before = {file: file.read_bytes() for file in Path("plans").rglob("*.json")}
    monkeypatch.setattr(cache_module, "write_atomically", refuse)
    monkeypatch.setattr(cache_module.os, "utime", refuse)
    assert run(kind="exported", cache="plans")[1]["cache"] == "hit"
    with caplog.at_level(logging.WARNING):
        assert run(kind="exported", cache="plans", memory_limit=1e9)[1]["cache"] == "warm"
    assert "the plan is not kept: [Errno 13] Permission denied: 'plans'" in caplog.text
    assert {file: file.read_bytes() for file in Path("plans").rglob("*.json")} == before
    Path("file").touch()
    assert run(kind="exported", cache="file/plans")[1]["cache"] == "cold" and "Not a directory: " in caplog.text


def test_what_was_used_longest_ago_goes_first():
    cache = PlanCache("plans", most_bytes=400)
    entries = [CacheEntry(f"key{k}", "family", {"n": k}, "x" * 50) for k in range(6)]

    def put(k, used):
        cache.put(entries[k])
        os.utime(Path("plans", "family", f"key{k}.json"), (used, used))

    for k in range(3):
        put(k, used=k)
    assert 110 < (size := Path("plans", "family", "key0.json").stat().st_size) < 130
    assert cache.get("key0", "family") == entries[0]
    put(3, used=3)
    assert [entry.key for entry in cache.entries()] == [entry.key for entry in cache.near("family")] == ["key0", "key3", "key2"]
    assert cache.prune(size + 1) == 2 and [entry.key for entry in cache.entries()] == ["key0"]


FILL = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("cache", sys.argv[1])  # alone: autoshard.solution would import torch in ten processes
module = sys.modules["cache"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
location, worker, count = sys.argv[2], sys.argv[3], int(sys.argv[4])
cache = module.PlanCache(location)
for n in range(count):
    key = str(n % 20)
    cache.put(module.CacheEntry(f"key-{worker}-{n}", "family", {"worker": worker}, f"{key}:" + f"{worker}-{n} " * 200))
    cache.put(module.CacheEntry(f"shared-{key}", "family", {"worker": worker}, f"{key}:" + "x" * 500))
    assert cache.get(f"shared-{key}", "family").text.startswith(f"{key}:")
"""


@pytest.mark.slow
@pytest.mark.parametrize("location", ["{here}/plans"], indirect=True)
def test_eight_processes_lose_and_tear_nothing_killed_ones_included(location):
    def start(worker, count):
        return subprocess.Popen([sys.executable, "-c", FILL, cache_module.__file__, location, str(worker), str(count)])

    workers, victims = [start(n, 200) for n in range(8)], [start(n, 100_000) for n in (8, 9)]
    time.sleep(3)
    for one in victims:
        one.kill()
        one.wait()
    assert [one.wait(500) for one in workers] == [0] * 8
    whole = {entry.key: entry for entry in PlanCache(location).entries()}
    assert {f"key-{w}-{n}" for w in range(8) for n in range(200)} <= set(whole)
    for key, entry in whole.items():
        if key.startswith("key-"):
            assert entry.text.endswith(f"{key.removeprefix('key-')} ") and entry.text.count(key.removeprefix("key-")) >= 200, key


def test_the_verbs_list_show_export_and_prune(capsys):
    run(kind="exported", cache="plans")
    assert main(["cache", "ls", "plans", "--json"]) == 0
    (entry,) = json.loads(capsys.readouterr().out)["entries"]
    assert entry["mesh"] == [2, 4] and entry["status"] and main(["cache", "ls", "plans"]) == 0
    assert main(["cache", "show", "plans", entry["key"][:6], "--json"]) == 0
    assert main(["cache", "export", "plans", entry["key"][:6], "--out", "plan.json", "--quiet"]) == 0
    assert run(kind="exported", preload_solution=True, ilp_solution_file="plan.json")[1]["status"] == entry["status"]
    assert main(["cache", "show", "plans", "zz"]) == 2 and main(["cache", "ls", "nothing"]) == 2
    capsys.readouterr()
    assert main(["cache", "prune", "plans", "--most", "1B", "--json"]) == 0
    assert PlanCache("plans").entries() == []


def test_of_near_plans_two_come_back_those_of_the_same_structure_first():
    plans = [to_text(linear_solution(solver=name)) for name in "abc"]
    entries = [CacheEntry(f"key{k}", "f", {"structure": k}, plan) for k, plan in enumerate([*plans, "torn"])]
    for own, structure, solvers in (("key9", 2, "ca"), ("key9", 9, "ab"), ("key0", 9, "bc"), ("key2", 1, "ba")):
        cached = SimpleNamespace(cache=SimpleNamespace(near=lambda family: entries), family="f", key=own, facts={"structure": structure})
        assert "".join(plan.solver for plan in CachedPlans.near(cached)) == solvers


NEAR = {"batch": dict(batch=32), "link": dict(link=5e13), "layer": dict(layers=3), "a layer less": dict(layers=1)}


@cache
def known_plan(objective):
    """The entry that a cache has of the plan of NEAR's model."""
    planned_near(objective, "known")
    return PlanCache("known").entries()[0]


def planned_near(objective, cache, link=1e14, **sizes):
    module, inputs = gpt2.tiny(**{"layers": 2, **sizes})
    options = dict(mesh_shape=(2, 4), intra_node_bandwidth=1e14, inter_node_bandwidth=link, objective=objective, training=True)
    return autosharding_pass(module, example_inputs=inputs, cache=cache, **options)[1]


@pytest.mark.parametrize("near", [*list(NEAR)[:-1], pytest.param("a layer less", marks=pytest.mark.slow)])
@pytest.mark.parametrize("objective", [pytest.param("overlapped", marks=pytest.mark.slow), "serial"])
def test_a_pass_that_starts_from_a_near_plan_costs_what_it_costs_from_nothing(near, objective):
    PlanCache("plans").put(known_plan(objective))
    warm, cold = (planned_near(objective, where, **NEAR[near]) for where in ("plans", None))
    assert warm["cache"] == "warm" and warm["bound_seconds"] <= warm["cost_seconds"] * (1 + 1e-9)
    most = 1e-9 if objective == "serial" else 0.02  # the search for the shortest time line proves no optimum, from nothing neither
    assert warm["cost_seconds"] <= cold["cost_seconds"] * (1 + most)


@cache
def graph_of(name, layers):
    module, inputs = {"gpt2": gpt2, "llama": llama}[name].tiny(layers=layers)
    return capture(module, inputs, training=True)


DEPTHS = [(name, layers, known) for name in ("gpt2", "llama") for layers, known in ((3, 3), (3, 4), (4, 3))]
DEPTHS += [pytest.param(name, *one, marks=pytest.mark.slow) for name in ("gpt2", "llama") for one in ((3, 5), (5, 3))]


@pytest.mark.parametrize(("name", "layers", "known"), DEPTHS)
def test_ops_correspond_to_those_at_the_same_place_of_another_depth(name, layers, known):
    graph, other = graph_of(name, layers), graph_of(name, known)
    told = corresponding(graph, {op.name: (op.target, op.output.shape if op.is_placeholder else op.outputs) for op in other.ops})
    assert set(told) == set(range(len(graph.ops)))
    for i, (target, outputs) in told.items():
        op = graph.ops[i]
        assert target == op.target and outputs == (op.output.shape if op.is_placeholder else op.outputs)


def test_ops_of_another_model_correspond_by_name():
    told = corresponding(graph_of("gpt2", 3), {op.name: op.name for op in graph_of("llama", 3).ops})
    assert told and all(graph_of("gpt2", 3).ops[i].name == name for i, name in told.items())
