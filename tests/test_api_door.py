"""The door of autoshard: names that are loaded when used, and a plan loads little else."""

import subprocess
import sys
from pathlib import Path

import pytest

import autoshard
from autoshard import Cluster, Mesh, Program, api
from models import mlp
from tests.test_rooms import TABLE


def test_the_door_lists_names_of_rooms_that_it_may_know():
    assert len(api.__all__) > 40 and api.__all__ == dir(api) == sorted(api._HOMES)
    assert set(api._CHECKED) <= set(api.__all__)
    assert {home.split(".")[0] for home in api._HOMES.values()} <= {"api", *TABLE["api"][0].split()}


@pytest.mark.parametrize("name", api.__all__)
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
plan(*gpt2.tiny(layers=1), Mesh.from_bandwidths((2,)))
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
