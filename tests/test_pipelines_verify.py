"""Pipelines on simulated ranks: the same loss and gradients as the unsharded model, and a falsified layout is noticed."""

from dataclasses import replace

import pytest
import torch
from helpers_pipelines import CLUSTER, MODELS, dropping, planned

import autoshard
from autoshard.layout import R, S
from autoshard.lower import generator
from autoshard.lower.sharding import local_tensors
from autoshard.mesh import Mesh
from autoshard.runtime import pipeline_verify
from autoshard.runtime.stages import sharded_further
from autoshard.runtime.transfers import Held, simulated, transfer
from models import unet


def test_two_stages_compute_what_the_model_computes():
    model, inputs = MODELS["gpt2"].tiny(layers=2, vocab=64, batch=8)
    plan = planned("gpt2", 2, stages=2, microbatches=2)
    found = autoshard.verify(model, inputs, plan)
    assert found["ok"] and found["ranks"] == 4 and found["max_relative_error_gradients"] <= 1e-5
    assert not autoshard.verify(model, inputs, plan, plant_fault=True)["ok"]


def test_a_file_of_a_pipeline_is_the_pipeline(tmp_path):
    plan = planned("gpt2", 2, stages=2, microbatches=2)
    plan.save(tmp_path / "pipeline.json")
    loaded = autoshard.load(tmp_path / "pipeline.json")
    assert loaded.stages == plan.stages and loaded == plan and loaded.mesh == plan.mesh
    (tmp_path / "plan.json").write_text("{}")
    with pytest.raises(ValueError, match="is not a plan: it holds nothing and no 'format'"):
        autoshard.load(tmp_path / "plan.json")


def test_a_pipeline_of_another_model_is_refused():
    plan = planned("gpt2", 2, stages=2, microbatches=2)
    with pytest.raises(ValueError, match="the pipeline is of another model"):
        autoshard.verify(*MODELS["gpt2"].tiny(layers=3, vocab=64, batch=8), plan)
    old = replace(plan, stages=tuple(replace(stage, prices=None) for stage in plan.stages))
    with pytest.raises(ValueError, match="has no layouts to run"):
        autoshard.verify(*MODELS["gpt2"].tiny(layers=2, vocab=64, batch=8), old)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize("options", [{"stages": 4}, {"stages": 2, "schedule": "interleaved_1f1b"}, {"stages": 1},
                                     {"stages": 2, "recompute": "always"}, {"stages": 2, "memory_limit": 1.6e6}])  # fmt: skip
def test_divisions_of_all_kinds(name, options):
    plan = planned(name, 4, **options)
    found = autoshard.verify(*MODELS[name].tiny(layers=4, vocab=64, batch=8), plan)
    assert found["ok"], found


@pytest.mark.slow
def test_skip_connections_are_passed_on_by_the_stages_between():
    model, inputs = unet.tiny()
    plan = autoshard.plan(model, inputs, CLUSTER, microbatches=(2,), schedules=("1f1b",), stages=4, grid=False)
    assert autoshard.verify(model, inputs, plan)["ok"]


MESHES = {"2": Mesh.from_bandwidths((2,)), "2x2": Mesh.from_bandwidths((2, 2)), "3": Mesh.from_bandwidths((3,))}
LAYOUTS = [("2", (R,)), ("2", (S(0),)), ("2x2", (S(0), S(1))), ("2x2", (R, S(0))), ("2x2", (S(0), S(0))), ("3", (S(1),))]


@pytest.mark.parametrize("target", LAYOUTS)
@pytest.mark.parametrize("source", LAYOUTS)
def test_every_device_receives_its_shard(source, target):
    x = torch.arange(35.0).reshape(5, 7)  # divides by none of the meshes
    ends = []
    for first, (name, layout) in ((0, source), (10, target)):
        ends.append(Held(layout, MESHES[name], tuple(range(first, first + MESHES[name].num_devices))))
    one = transfer("x", (5, 7), x.dtype, *ends)
    senders, wanted = (dict(zip(end.devices, local_tensors(x, end.layout, end.mesh))) for end in ends)
    found = simulated(one, senders)
    assert all(torch.equal(found[device], shard) for device, shard in wanted.items())
    arrived = sum(shard.numel() for shard in wanted.values())
    assert arrived == sum(torch.Size([e - b for b, e in piece.target]).numel() for piece in one.pieces)  # no element is sent twice


def test_values_arrive_sharded_where_their_dims_divide():
    mesh = MESHES["2x2"]
    assert sharded_further((8, 6), (R, R), mesh) == (S(1), S(0))  # the first dim that divides, of the last axis first
    assert sharded_further((8, 6), (R, S(0)), mesh) == (S(1), S(0))
    assert sharded_further((3, 5), (R, R), mesh) == (R, R)


def test_random_ops_draw_from_the_states_of_their_stages():
    model, inputs, plan = dropping()
    assert autoshard.verify(model, inputs, plan)["ok"]


def test_a_stage_that_draws_again_what_it_has_drawn_is_noticed(monkeypatch):
    model, inputs, plan = dropping()
    run = pipeline_verify._Simulation._run

    def same_for_every_microbatch(self, one, forward, held):
        self.random = [generator.first_state(stage.index) for stage in self.stages]
        return run(self, one, forward, held)

    monkeypatch.setattr(pipeline_verify._Simulation, "_run", same_for_every_microbatch)
    assert not autoshard.verify(model, inputs, plan)["ok"]
