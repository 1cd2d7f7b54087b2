"""The door of autoshard: names that are loaded when used are those that readers and type checkers see, and a plan loads little else."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import autoshard
from autoshard import Cluster, Mesh, Program, api
from models import mlp

LISTED = [
    (statement.module, alias.name)
    for block in ast.parse(Path(api.__file__).read_text()).body
    if isinstance(block, ast.If)
    for statement in block.body
    if isinstance(statement, ast.ImportFrom)
    for alias in statement.names
]


def test_the_names_that_are_loaded_are_those_that_are_listed():
    assert len(LISTED) > 40
    assert {name: f"autoshard.{module}" for name, module in api._HOMES.items()} == {name: module for module, name in LISTED}
    assert set(api._CHECKED) <= set(api.__all__) == set(dir(api)) == {name for _, name in LISTED}


@pytest.mark.parametrize("name", sorted(name for _, name in LISTED))
def test_every_name_is_there_and_stays_the_same_object(name):
    first = getattr(api, name)
    assert getattr(api, name) is first and first.__name__ == name
    assert (getattr(getattr(first, "__code__", None), "co_name", "") == "checked") == (name in api._CHECKED)


def test_a_name_that_is_not_there_is_an_error():
    with pytest.raises(AttributeError, match="'autoshard.api' has no attribute 'plam'"):
        api.plam  # noqa: B018
    with pytest.raises(AttributeError, match="'autoshard' has no attribute 'plam'"):
        autoshard.plam  # noqa: B018


def test_a_tiny_plan_loads_neither_what_runs_plans_nor_what_only_large_ones_need():
    code = """
import sys
from autoshard import Mesh, plan
from models import gpt2
plan(*gpt2.tiny(layers=1), Mesh.from_bandwidths((2, 2)))
rooms = {".".join(name.split(".")[:2]) for name in sys.modules if name.startswith("autoshard.")}
print(sorted(rooms & {"autoshard.lower", "autoshard.launch", "autoshard.calibrate", "autoshard.tables", "autoshard.report"}))
print(sorted({"numba", "scipy.optimize", "matplotlib"} & set(sys.modules)))
"""
    printed = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=Path(api.__file__).parents[2])
    assert printed.stdout.split() == ["[]", "[]"]


@pytest.mark.parametrize("name", sorted(autoshard._MOVED))
def test_a_name_of_before_is_there_and_says_what_to_write(name):
    with pytest.warns(FutureWarning, match=f"autoshard.{name} is now autoshard."):
        assert callable(getattr(autoshard, name))
    assert name not in autoshard.__all__


def test_plan_takes_one_program_several_meshes_several_programs_and_a_cluster():
    module, batch = mlp.tiny()
    mesh, options = Mesh.from_bandwidths((2,)), {"training": True, "baselines": False}
    one = autoshard.plan(module, batch, mesh, **options)
    best = autoshard.plan(module, batch, [mesh, Mesh.from_bandwidths((1,))], **options)
    assert isinstance(one, autoshard.Solution) and isinstance(best, autoshard.Solution) and best.cost <= one.cost * (1 + 1e-9)
    both = autoshard.plan({"train": Program(module, batch, training=True), "use": Program(module, batch)}, mesh)
    stages = autoshard.plan(module, batch, Cluster.of(2), microbatches=(1,), stages=1)
    assert list(both) == ["train", "use"] and stages.parts.keys() == {("", 0)}
    assert all(isinstance(plan, autoshard.Plan) for plan in (one, best, both, stages))
