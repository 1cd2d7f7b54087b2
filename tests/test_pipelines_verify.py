"""Pipelines on simulated ranks: the same loss and gradients as the unsharded model, and a falsified layout is noticed."""

import copy
import itertools
from dataclasses import replace

import pytest
import torch
from helpers_command import record_of, refusal, run
from helpers_pipelines import CLUSTER, MODELS, SMALL, dropping, planned, sharing

import autoshard
from autoshard.layout import R, S
from autoshard.lower import generator
from autoshard.lower.sharding import local_tensors
from autoshard.mesh import Mesh
from autoshard.runtime import pipeline_verify
from autoshard.runtime.stages import sharded_further
from autoshard.runtime.transfers import Held, exchange, simulated, transfer
from models import unet
from tests.helpers_ranks import results
from tests.helpers_refusals import assert_refused


def test_two_stages_compute_what_the_model_computes():
    model, inputs = MODELS["gpt2"].tiny(layers=2, vocab=64, batch=8)
    plan = planned("gpt2", 2, stages=2, microbatches=2)
    found = autoshard.verify(model, inputs, plan)
    assert found["ok"] and found["ranks"] == 4 and found["max_relative_error_gradients"] <= 1e-5
    assert not autoshard.verify(model, inputs, plan, plant_fault=True)["ok"]


def test_stages_share_layers_and_the_loss_alone_is_differentiated():
    found = autoshard.verify(*sharing())
    assert found["ok"] and 0 < found["max_relative_error_gradients"] <= 1e-5


class Normalised(torch.nn.Module):
    """Batch norm of two samples per microbatch, whose difference decides: rounding shows."""

    def __init__(self):
        super().__init__()
        block = (torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU())
        self.blocks = torch.nn.ModuleList(copy.deepcopy(torch.nn.Sequential(*block)) for _ in range(4))

    def forward(self, x, y):
        for block in self.blocks:
            x = x + block(x)
        return (x - y).square().mean()


@pytest.mark.parametrize("seed", [0, 1, 3, 4, 5, 6])  # of 2 a gradient is 0, as two numbers cancel exactly in the unsharded model alone
def test_differences_that_rounding_explains_are_no_fault(seed):
    torch.manual_seed(seed)
    model, inputs = Normalised(), (torch.randn(8, 8), torch.randn(8, 8))
    options = {"microbatches": (4,), "schedules": ("interleaved_1f1b",), "stages": 2, "grid": False}
    plan = autoshard.plan(model, inputs, autoshard.Cluster.of(4, device=SMALL), **options)
    found = autoshard.verify(model, inputs, plan)
    assert found["ok"], found
    assert not autoshard.verify(model, inputs, plan, plant_fault=True)["ok"]


def test_a_file_of_a_pipeline_is_the_pipeline(tmp_path):
    plan = planned("gpt2", 2, stages=2, microbatches=2)
    plan.save(tmp_path / "pipeline.json")
    loaded = autoshard.load(tmp_path / "pipeline.json")
    assert loaded.stages == plan.stages and loaded == plan and loaded.mesh == plan.mesh
    (tmp_path / "plan.json").write_text("{}")
    assert_refused("is not a plan: it holds nothing and no 'format'", autoshard.load, tmp_path / "plan.json")


def test_a_pipeline_of_another_model_is_refused():
    plan = planned("gpt2", 2, stages=2, microbatches=2)
    assert_refused("the pipeline is of another model", autoshard.verify, *MODELS["gpt2"].tiny(layers=3, vocab=64, batch=8), plan)
    old = replace(plan, stages=tuple(replace(stage, prices=None) for stage in plan.stages))
    assert_refused("has no layouts to run", autoshard.verify, *MODELS["gpt2"].tiny(layers=2, vocab=64, batch=8), old)


# -- check, and the verbs on a file ---------------------------------------------------------------------------------------------------


def gpt2(layers=2):
    return MODELS["gpt2"].tiny(layers=layers, vocab=64, batch=8)


def test_check_says_whether_a_pipeline_fits_the_model():
    plan = planned("gpt2", 2, stages=2, microbatches=2)
    checked = autoshard.check(*gpt2(), plan)
    assert checked.ok and (checked.cost, checked.peak_bytes, checked.memory_limit) == (plan.cost, plan.peak_bytes, SMALL.memory)
    assert "fits the model" in checked.sentence() and "not priced again" in checked.sentence()
    other = autoshard.check(*gpt2(layers=3), plan)  # of two blocks a pipeline makes eleven layers, of three one each
    assert other.reasons == ("the pipeline is of another model: it has 11 layers, this model 3",)
    assert other.sentence().endswith("this model 3; plan again")
    old = replace(plan, stages=tuple(replace(stage, prices=None) for stage in plan.stages))
    assert autoshard.check(*gpt2(), old).reasons == ("this pipeline has no layouts to run",)
    given = {"mesh": Mesh.from_bandwidths((4,)), "within": 0.02, "solve": False, "same_graph": False, "time_limit": 5.0}
    for name, value in given.items():
        with pytest.raises(ValueError, match=f"not priced again, only compared with its model; leave out (the )?{name}"):
            autoshard.check(*gpt2(), plan, **{name: value})


def test_check_names_the_memory_that_a_pipeline_was_planned_for():
    limited = planned("gpt2", 2, stages=2, microbatches=2, memory_limit=2e9)
    assert limited.memory_limit == 2e9 == autoshard.check(*gpt2(), limited).memory_limit


MODEL = ("models/gpt2.py:tiny", "--set", "layers=2", "--set", "vocab=64", "--batch", "8")


@pytest.fixture
def file(tmp_path) -> str:
    plan = planned("gpt2", 2, stages=2, microbatches=2)
    plan.noting(model=MODEL[0], set={"layers": 2, "vocab": 64, "batch": 8}).save(tmp_path / "pipeline.json")
    return str(tmp_path / "pipeline.json")


def test_the_verb_verify_runs_a_pipeline_and_marks_its_file(file):
    assert "to run it name it yourself: models/gpt2.py:tiny" in refusal("verify", file)
    wrong = record_of("verify", file, *MODEL, "--plant-fault", "--mark", code=1)
    assert not wrong["ok"] and autoshard.load(file).verified is None
    right = record_of("verify", file, "--trust", "--mark")
    assert right["ok"] and right["ranks"] == 4 == autoshard.load(file).verified.ranks
    code, out, _ = run("verify", file, *MODEL, "--quiet")
    assert code == 0 and "ok, on 4 simulated ranks" in out
    assert "leave out random" in refusal("verify", file, "--trust", "--random", "1", "--quiet")


def test_the_verb_check_answers_for_a_pipeline_by_its_exit_code(file):
    assert "or add --trust" in refusal("check", file)
    good = record_of("check", file, "--trust")
    assert good["ok"] and good["best_seconds"] is None and "not priced again" in good["message"]
    other = (MODEL[0], "--set", "layers=3", "--set", "vocab=64", "--set", "batch=8")
    bad = record_of("check", file, *other, code=1)
    assert bad["reasons"] == ["the pipeline is of another model: it has 11 layers, this model 3"]
    code, out, _ = run("check", file, *other, "--quiet")
    assert code == 1 and "is not good any more" in " ".join(out.split()) and "not known" in out
    assert "leave out within and solve (--no-solve)" in refusal("check", file, "--trust", "--within", "2%", "--no-solve", "--quiet")


# -- more divisions -------------------------------------------------------------------------------------------------------------------


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
    sizes = [torch.Size([e - b for b, e in piece.target]).numel() for piece in one.pieces]
    assert sum(sizes) == sum(shard.numel() for shard in wanted.values()) and min(sizes) > 0  # no element is sent twice


def exchanged(rank, x, ways):
    """Whether this rank's shards arrive, of all ways at once."""
    transfers, values, wanted = [], {}, {}
    for k, ends in enumerate(ways):
        transfers.append(transfer(str(k), x.shape, x.dtype, *ends))
        for known, end in zip((values, wanted), ends):
            known |= {str(k): local_tensors(x, end.layout, end.mesh)[i] for i, device in enumerate(end.devices) if device == rank}
    found = exchange(transfers, rank, values, x.device, None)
    return found.keys() == wanted.keys() and all(torch.equal(found[name], shard) for name, shard in wanted.items())


def test_ranks_that_hold_parts_of_both_stages_send_the_others_and_keep_their_own():
    ends = [Held(layout, MESHES["2"], devices) for layout in ((R,), (S(0),), (S(1),)) for devices in ((0, 1), (1, 0), (1, 2))]
    assert all(results(3, exchanged, torch.arange(35.0).reshape(5, 7), list(itertools.product(ends, ends))))


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
