"""The emitted recipes run: each trains on gloo ranks as one process does; and each is a scheme that was priced."""

import json
import math
from importlib import import_module
from itertools import product

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import autoshard
from autoshard.api import autosharding_pass
from autoshard.capture import capture_deep
from autoshard.cli import main
from autoshard.exports import FORMATS, HOLDS_WITHIN, NotHeld, fully_shard
from autoshard.graph import Result
from autoshard.lower.unsharded import materialized
from autoshard.mesh import Mesh
from autoshard.planning.module_schemes import _gathered_again
from autoshard.planning.plan import baseline_only
from autoshard.planning.recomputing import with_recomputed_blocks
from autoshard.precision import Precision
from autoshard.solvers import solve
from models import gpt2, llama, mlp, moe
from tests.helpers_models import Model, asked
from tests.helpers_ranks import results
from tests.helpers_refusals import assert_refused
from tests.helpers_solutions import export_anyway
from tests.test_formulate import W, X, small, unary

STEPS, BATCH, SEQ, VOCAB = 3, 8, 16, 128
MODELS = {"gpt2": gpt2.tiny, "llama": llama.tiny}


def model_of(name, microbatches=1, batch=BATCH):
    if name == "moe":
        return moe.tiny(batch=batch)
    return MODELS[name](batch=batch // microbatches, seq=SEQ, vocab=VOCAB, dtype="float64")


def planned(name, shape, scheme=None, microbatches=1, precision=None, batch=BATCH, **options):
    module, inputs = model_of(name, microbatches, batch)
    mesh = Mesh.from_bandwidths(shape)
    if scheme is None:
        return autoshard.plan(module, inputs, mesh, training=True, microbatches=microbatches, **options)
    precision = None if precision is None else Precision.parse(precision)
    graph = capture_deep(module, inputs, training=True, precision=precision)[0]
    chosen = {"training": True, "microbatches": microbatches, "precision": precision, "baselines": False, **options}
    return baseline_only(with_recomputed_blocks(asked(graph, mesh, **chosen)), scheme)


def batch():
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(VOCAB, (BATCH, SEQ), generator=generator) for _ in range(2)]


def trained(rank, name, recipe, source):
    """The losses of a few steps, of one process and of the emitted module's model; its parameters that are DTensors; blocks recomputed."""
    alone, model = (materialized(model_of(name)[0], 0) for _ in range(2))
    shape, names = recipe["mesh"]["shape"], recipe["mesh"]["axis_names"]
    device_mesh = init_device_mesh("cpu", tuple(shape), mesh_dim_names=tuple(names))
    emitted = {}
    exec(compile(source, "recipe.py", "exec"), emitted)
    emitted["apply"](model, device_mesh)
    tensor, place = recipe["parallelize_module"]["axis"], device_mesh.get_coordinate()
    row, rows = 0, 1
    for k, axis in enumerate(names):
        if axis != tensor or not recipe["parallelize_module"]["plan"]:
            row, rows = row * shape[k] + place[k], rows * shape[k]
    m = recipe.get("microbatches", {}).get("number", 1)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.5) for one in (alone, model)]
    losses = []
    for x, y in [batch()] * STEPS:
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = alone(x, y)
        loss.backward()
        mine = 0.0
        for k, parts in enumerate(zip(x.chunk(m), y.chunk(m))):
            if m > 1:
                emitted["begin_microbatch"](model, k)
            one = model(*(part.chunk(rows)[row] for part in parts)) / m
            one.backward()
            mine += one.detach()
        for optimizer in optimizers:
            optimizer.step()
        torch.distributed.all_reduce(mine, torch.distributed.ReduceOp.SUM)
        losses.append((loss.item(), mine.item() / torch.distributed.get_world_size()))
    parameters, recomputing = sum(isinstance(p, DTensor) for p in model.parameters()), sum("forward" in vars(m) for m in model.modules())
    return losses, parameters, recomputing


CASES = {  # model, mesh, scheme, what more; and what the recipe does: axes of fully_shard, of replicate, reshard_after_forward
    "zero3": ("gpt2", (2,), "zero3", {}, ["axis0"], [], True),
    "zero1": ("gpt2", (2, 2), "zero1", {}, ["axis0", "axis1"], [], False),
    "hsdp": ("gpt2", (2, 2), "hsdp", {}, ["axis1"], ["axis0"], True),
    "data_parallel": ("gpt2", (2, 2), "data_parallel", {}, [], ["axis0", "axis1"], None),
    "megatron": ("llama", (2, 2), "megatron", {}, [], ["axis0"], None),
    "megatron_fsdp": ("llama", (2, 2), "megatron_fsdp", {}, ["axis0"], [], True),
    "recomputed": ("llama", (2,), "zero3", {"recompute": 1}, ["axis0"], [], True),
    "microbatches": ("gpt2", (2,), "zero3", {"microbatches": 4}, ["axis0"], [], True),
    "precision": ("llama", (2,), "fsdp", {"precision": "bf16"}, ["axis0"], [], True),
}
QUICK = ("zero1", "recomputed")


@pytest.mark.parametrize("case", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CASES])
def test_the_emitted_module_trains_as_one_process_does(case):
    name, shape, scheme, more, sharded, replicated, reshards = CASES[case]
    solution = planned(name, shape, scheme, **more)
    recipe = export_anyway(solution, "fully_shard")
    shard = recipe["fully_shard"]
    assert (shard["axes"], recipe["replicate"]["axes"], shard.get("reshard_after_forward")) == (sharded, replicated, reshards)
    assert recipe.cost_seconds == pytest.approx(solution.cost, rel=0.05)
    assert recipe.get("checkpoint", {}).get("modules", []) == [f"layers.{k}" for k in range(more.get("recompute", 0))]
    source = fully_shard.as_python(recipe)
    assert source.count("fully_shard(model") == bool(sharded) and source.count("checkpoint(") == 0
    found = results(math.prod(shape), trained, name, dict(recipe), source)
    tolerance = 2e-3 if "precision" in more else 2e-6  # the loss is float32
    for losses, sharded_parameters, recomputing in found:
        assert sharded_parameters > 0 and recomputing == more.get("recompute", 0)
        assert all(alone == pytest.approx(ours, abs=tolerance) for alone, ours in losses)
        assert losses[0][0] - losses[-1][0] > 1e-2  # it does learn, so that losses after a step say something of gradients


def test_the_comparison_sees_gradients_that_are_not_reduced():
    """The control: a recipe that replicates parameters and never reduces their gradients."""
    recipe = export_anyway(planned("gpt2", (2,), "zero3"), "fully_shard")
    source = fully_shard.as_python(recipe).replace("fully_shard(model", "print(model") + "\nprint = lambda *args, **more: None\n"
    found = results(2, trained, "gpt2", dict(recipe), source)
    assert any(abs(alone - ours) > 1e-3 for alone, ours in found[0][0])


# -- formats that hold a plan, and those that don't -----------------------------------------------------------------------------------

MANY = 2048  # examples: so that replicated compute takes longer than any collective
PLANS = {
    "fsdp": ("gpt2", (4,), "fsdp", {"batch": MANY}), "megatron": ("llama", (2, 2), "megatron", {}),
    "free": ("gpt2", (2, 4), None, {"batch": MANY}), "experts": ("moe", (4,), None, {"batch": MANY}),
    "recomputed": ("llama", (4,), "zero3", {"recompute": "all", "batch": MANY}), "limited": ("gpt2", (4,), None, {"memory_limit": 1.6e6}),
}  # fmt: skip


@pytest.mark.parametrize("name", [name if name == "fsdp" else pytest.param(name, marks=pytest.mark.slow) for name in PLANS])
def test_a_format_holds_the_plan_or_is_refused_with_those_that_do(name, tmp_path, capsys):
    model, shape, scheme, more = PLANS[name]
    solution, path = planned(model, shape, scheme, **more), tmp_path / "plan.json"
    solution.save(path)
    held, refused = set(), {}
    for kind in FORMATS:
        if kind == "checkpoint_policy":
            continue  # it is of plans that choose per tensor
        try:
            value = autoshard.export(solution, kind)
        except NotHeld as error:
            refused[kind] = str(error)
        else:
            held.add(kind)
            assert value.cost_seconds == math.inf or value.cost_seconds <= solution.cost * (1 + HOLDS_WITHIN)
            assert getattr(value, "peak_bytes", None) is None or value.peak_bytes <= (solution.memory_limit or math.inf)
    assert {"sharding_map", "json", "distribute_module"} <= held
    for kind, sentence in refused.items():
        assert sentence.startswith(f"{kind} can't hold this plan: ") and all(other in sentence for other in held)
        assert main(["export", str(path), "--to", kind, "--json", "--out", str(tmp_path / "a.json")]) == 1
        told = json.loads(capsys.readouterr().out)
        assert told["status"] == "infeasible" and told["message"] == sentence and not (tmp_path / "a.json").exists()
    if name == "fsdp":
        assert "fully_shard" in held and {"tp_plan", "vllm"} <= set(refused)
    if name == "megatron":
        assert {"tp_plan", "fully_shard"} <= held


def test_what_is_held_is_a_share_of_the_seconds_that_can_be_chosen(capsys, tmp_path):
    solution = planned("gpt2", (4,), "fsdp", batch=MANY)
    longer = export_anyway(solution, "tp_plan").cost_seconds / solution.cost - 1
    assert longer > HOLDS_WITHIN
    autoshard.export(solution, "tp_plan", within=longer * 1.01)
    with pytest.raises(NotHeld, match="longer"):
        autoshard.export(solution, "tp_plan", within=longer * 0.99)
    solution.save(tmp_path / "plan.json")
    assert main(["export", str(tmp_path / "plan.json"), "--to", "tp_plan", "--within", f"{100 * longer * 1.01}%"]) == 0
    assert_refused("within is -1; expected a share of 0 or more", autoshard.export, solution, "json", within=-1)


class Forgetful(dict):
    def __contains__(self, key):
        return False


def test_an_axis_like_another_is_priced_once_and_as_it_would_be_alone(monkeypatch):
    schemes = import_module("autoshard.planning.module_schemes")
    launched, on_axis, axes = schemes.launched, schemes._on_axis, []
    monkeypatch.setattr(schemes, "_chosen_groups", lambda groups, modes: [g for g in groups if not g.why])
    monkeypatch.setattr(schemes, "_mode", lambda *_: "column")  # every axis shards every weight
    monkeypatch.setattr(schemes, "launched", lambda *args, **how: axes.append(args[3]) or launched(*args, **how))

    def modules():
        mesh = Mesh.from_bandwidths((2, 2, 2), devices_per_node=4)
        return autoshard.plan(*mlp.tiny(), mesh, training=True, objective="serial").modules

    once = modules()
    assert sorted(set(axes)) == [0, 1]  # the last two are alike
    monkeypatch.setattr(schemes, "_on_axis", lambda *args: on_axis(*args[:-1], Forgetful()))
    alone = modules()
    assert set(axes) == {0, 1, 2}
    for name in ("axis0", "axis1", "axis2"):
        assert once[name]["seconds"]["modules"] == pytest.approx(alone[name]["seconds"]["modules"], rel=1e-4)  # other plans as good
        assert once[name]["seconds"]["fully_shard"] <= alone[name]["seconds"]["fully_shard"] * (1 + 1e-12)


@pytest.mark.parametrize("viewed", [False, True])
def test_a_parameter_is_gathered_again_where_it_is_sharded_and_what_all_its_readers_share_is_too(viewed):
    view = [unary("t", "t", (1, 0), alias=0)] if viewed else []
    ops = [X, W, *view, *(unary(name, "exp", (1 + viewed, 0)) for name in ("a", "b")), unary("c", "exp", (0, 0))]
    f = small(*ops, results=tuple(Result("output", str(k), (len(ops) - 3 + k, 0)) for k in range(3)))
    value, best, seen = (1 + viewed, 0), solve(f.problem).choice, set()
    for (j, stored), (h, shared) in product(enumerate(f.candidates.of[1]), enumerate(f.hub_layouts[value])):
        choice = list(best)
        choice[1], choice[f.hubs[value]] = j, h
        sharded = [any(p.is_shard() for p in layout) for layout in (stored.outputs[0], shared)]
        assert _gathered_again(f, choice) == all(sharded)
        seen.add(tuple(sharded))
    assert len(seen) == 4


# -- steps of several microbatches: when parameters are gathered and gradients reduced, and what is lost of the plan -------------------

M = 4


def in_microbatches(scheme: str, **options):
    module, inputs = mlp.tiny(batch=8)
    given = {"example_inputs": inputs, "training": True, "ilp_solution_file": None, "mesh_shape": (2, 2)}
    return autosharding_pass(module, algo=scheme, microbatches=M, **given, **options)[1]["solution"]


@pytest.mark.parametrize(("scheme", "reshard", "sync"), (("zero1", False, False), ("zero2", False, True), ("zero3", True, True)))
def test_the_recipe_says_when_parameters_are_gathered_and_gradients_reduced(scheme, reshard, sync):
    recipe = export_anyway(in_microbatches(scheme), "fully_shard")
    assert recipe["microbatches"] == {"number": M, "reshard_after_forward": reshard, "requires_gradient_sync": sync}
    source = fully_shard.as_python(recipe)
    compile(source, "recipe.py", "exec")
    assert f"reshard_after_forward={reshard}" in source
    assert ("module.set_requires_gradient_sync(k == 3, recurse=False)" in source) == (not sync)


def test_what_one_choice_for_all_parameters_loses_is_said():
    solution = in_microbatches("alpa", pins={"*.weight": "S(0),S(0)", "*.weight.accumulated": "S(0),S(0)", "*.bias.accumulated": "P,P"})
    left = [one.what for one in export_anyway(solution, "fully_shard").left]
    assert "when 4 gradients are reduced" in left


def test_a_recipe_for_training_says_that_ranks_compute_of_their_own_rows():
    """Of a loss that is a sum fully_shard makes gradients that are too small by the number of ranks."""
    said = [str(one) for one in export_anyway(in_microbatches("zero1"), "fully_shard").left]
    assert sum("gradients are averaged" in one and "batch norm, a loss that is no mean of rows" in one for one in said) == 1


def test_a_plan_of_one_microbatch_has_the_recipe_that_it_had():
    module, inputs = mlp.tiny()
    asked = {"training": True, "ilp_solution_file": None, "objective": "serial"}
    _, info = autosharding_pass(module, algo="fsdp", mesh_shape=(2, 2), example_inputs=inputs, **asked)
    recipe = export_anyway(info["solution"], "fully_shard")
    assert "microbatches" not in recipe and "begin_microbatch" not in fully_shard.as_python(recipe)


def accumulated(rank: int, recipe: dict) -> float:
    """The largest difference of gradients to one process."""
    device_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=tuple(recipe["mesh"]["axis_names"]))
    torch.manual_seed(0)
    batches = [[torch.randn(2 * 8, 32) for _ in range(2)] for _ in range(M)]
    alone, model = (materialized(mlp.tiny(batch=8)[0], 0) for _ in range(2))
    fully_shard.apply(recipe, model, device_mesh)
    data = [k for k, name in enumerate(recipe["mesh"]["axis_names"]) if name in recipe["fully_shard"]["axes"]]
    row = device_mesh.get_coordinate()[data[0]]
    for k, (x, y) in enumerate(batches):
        (alone(x, y) / M).backward()
        fully_shard.begin_microbatch(recipe, model, k)
        (model(*(part.chunk(2)[row] for part in (x, y))) / M).backward()
    pairs = zip(alone.parameters(), model.parameters(), strict=True)
    return max(float((p.grad - q.grad.full_tensor()).abs().max()) for p, q in pairs)


REFUSED_BY_TORCH = [
    (torch.float32, (), "takes no scalars, and scale is one"),
    (torch.float32, (0, 8), "reduces no empty gradients, and scale has the shape .0, 8."),
    (torch.bfloat16, (1, 8), "scale is bfloat16 and a.weight is float32: store them in one"),
]


@pytest.mark.parametrize(("dtype", "shape", "sentence"), REFUSED_BY_TORCH)
def test_what_fully_shard_refuses_is_refused_before(dtype, shape, sentence):
    parts = {"a": torch.nn.Linear(8, 8, bias=False), "scale": torch.nn.Parameter(torch.ones(shape, dtype=dtype))}
    module = Model(lambda m, x: m.a(x).sum() + m.scale.sum(), **parts)
    options = {"example_inputs": (torch.zeros(8, 8),), "training": True, "algo": "zero3"}
    assert_refused(sentence, autoshard.export, autosharding_pass(module, mesh_shape=(2,), **options)[1]["solution"], "fully_shard")


def test_a_block_with_two_names_is_sharded_and_recomputed_once_and_a_list_of_parameters_is_no_block():
    first, last = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
    parts = {"layers": torch.nn.ModuleList([first, last, first]), "scales": torch.nn.ParameterList([torch.nn.Parameter(torch.ones(8))])}
    module = Model(lambda m, x: m.layers[2](m.layers[1](m.layers[0](x) * m.scales[0])).sum(), **parts)
    graph = capture_deep(module, (torch.zeros(8, 8),), training=True)[0]
    question = with_recomputed_blocks(asked(graph, Mesh.from_bandwidths((2,)), training=True, recompute="all", baselines=False))
    recipe = export_anyway(baseline_only(question, "zero3"), "fully_shard")
    modules = [*map(module.get_submodule, recipe["fully_shard"]["modules"])]
    assert {*modules} == {first, last, module} and len(modules) == 3
    assert sorted(recipe["checkpoint"]["modules"]) == sorted(recipe["fully_shard"]["modules"][:-1])


def test_the_blocks_of_a_sequential_model_are_sharded_and_recomputed_each():
    blocks = (torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()) for _ in range(3))
    module = torch.nn.Sequential(*blocks, torch.nn.Linear(8, 1), torch.nn.Flatten(0, -1))
    graph = capture_deep(module, (torch.zeros(1, 8),), training=True)[0]
    question = with_recomputed_blocks(asked(graph, Mesh.from_bandwidths((2,)), training=True, recompute="all", baselines=False))
    recipe = export_anyway(baseline_only(question, "zero3"), "fully_shard")
    assert recipe["fully_shard"]["modules"] == ["0", "1", "2", "3", ""]
    assert recipe["checkpoint"]["modules"] == ["0", "1", "2"]


@pytest.mark.parametrize("scheme", ("zero1", pytest.param("zero3", marks=pytest.mark.slow)))
def test_fully_shard_runs_the_recipe(scheme):
    recipe = dict(export_anyway(in_microbatches(scheme), "fully_shard"))
    assert max(results(4, accumulated, recipe)) < 1e-6
