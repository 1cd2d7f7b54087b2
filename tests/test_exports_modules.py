"""Exports for launchers that know modules only: what they say, and that models loaded with them compute the same."""

import json
import os
import types
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_module
from torch.distributed.tensor.parallel import parallelize_module

import autoshard
from autoshard.capture.huggingface import load_huggingface
from autoshard.exports import NotHeld, apply_recipe, as_plain
from autoshard.exports.modules import generic
from autoshard.layout import parse
from autoshard.mesh import Mesh
from tests.helpers_models import Model
from tests.helpers_ranks import join_as_torchrun
from tests.helpers_refusals import assert_refused
from tests.helpers_solutions import export_anyway as export

COLUMN, ROW = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head", "embed_tokens"), ("o_proj", "down_proj")


def pins_of(model, layout_of):
    """layout_of: "column" or "row" -> layout, for the weights that Megatron cuts."""
    roles = {name: "column" if name.split(".")[-2] in COLUMN else "row" for name, _ in model.named_parameters()}
    return {name: layout_of(role) for name, role in roles.items() if name.split(".")[-2] in (*COLUMN, *ROW)}


def planned(name, shape, pins=None, **settings):
    model, inputs = load_huggingface(f"tests/data/hf/{name}", {"batch": 4, "seq": 8, **settings})
    mesh = Mesh.from_bandwidths(shape, device="cpu")
    return autoshard.plan(model, inputs, mesh, pins=pins(model) if pins else {}, objective="serial")


def one_axis(role):
    return "S(0)" if role == "column" else "S(1)"


@pytest.fixture(scope="module")
def megatron():
    """A tiny Llama whose weights are cut over the last axis, on 2, 4 and 2x2 devices."""
    found = {(n,): planned("llama", (n,), lambda model: pins_of(model, one_axis)) for n in (2, 4)}
    return found | {(2, 2): planned("llama", (2, 2), lambda model: pins_of(model, lambda role: f"R,{one_axis(role)}"))}


# -- what they say ---------------------------------------------------------------------------------------------------------


def test_a_megatron_plan_exports_as_the_models_own_tp_plan(megatron):
    from transformers import LlamaConfig

    own = {f"model.{name}": style for name, style in LlamaConfig.base_model_tp_plan.items()}
    own |= {"lm_head": "colwise_gather_output"}
    for solution in megatron.values():
        plan = export(solution, "tp_plan")
        cut = {name: style for name, style in plan.items() if style != "replicate"}
        assert {name: style for name, style in cut.items() if name != "model.embed_tokens"} == own
        assert {generic(name.rpartition(".")[0]) for name in solution.parameters} == set(plan)  # what stays whole is named too


def test_names_are_generic_as_transformers_makes_them():
    try:
        from transformers.distributed.parallel_utils import replace_layer_number_by_wildcard
    except ImportError:  # until transformers 5.21
        from transformers.distributed.tensor_parallel import replace_layer_number_by_wildcard

    for name in ("layers.3.mlp", "0.weight", "a.0.1.b", "h.11", "w1.x", "blocks.0.0.w2", ""):
        assert generic(name) == replace_layer_number_by_wildcard(name)


def test_parallelize_module_gets_the_same_styles_by_full_name(megatron):
    plan, text = export(megatron[4,], "parallelize_module"), as_plain(export(megatron[4,], "parallelize_module"), "parallelize_module")
    assert set(plan) == set(text) and len([name for name in text if name.startswith("model.layers.")]) == 14
    assert text["model.layers.1.mlp.up_proj"] == "ColwiseParallel()" and text["model.layers.0.mlp.down_proj"] == "RowwiseParallel()"
    assert text["lm_head"] == "ColwiseParallel(output_layouts=Replicate())"


def test_the_price_is_that_of_a_plan_and_never_below_the_bound(megatron):
    for solution in megatron.values():
        for kind in ("tp_plan", "parallelize_module", "fully_shard"):
            found = export(solution, kind)
            assert found.cost_seconds >= solution.bound * (1 - 1e-9) and found.extra_seconds == found.cost_seconds - solution.cost
            assert "s as exported" in found.said[0] and any("activations" in one.what for one in found.left)


def test_parameters_that_other_axes_shard_are_counted(megatron):
    both = planned("llama", (2, 2), lambda model: pins_of(model, lambda role: f"{one_axis(role)},{one_axis(role)}"))
    for solution in (*megatron.values(), both):
        axis = solution.mesh.axis_names[-1]
        found = export(solution, "tp_plan", axis=axis)
        counts = {
            name: sum(parse(row["layout"])[k].is_shard() for row in solution.parameters.values())
            for k, name in enumerate(solution.mesh.axis_names) if name != axis
        }  # fmt: skip
        said = [one.what for one in found.left if "parameters sharded on" in one.what]
        assert said == [f"{n} parameters sharded on {name}" for name, n in counts.items() if n] and bool(said) == (solution is both)


def test_a_plan_that_cuts_the_batch_over_the_axis_says_what_its_loss_costs():
    """Megatron's styles can't cut a batch: every rank of the axis computes all of it."""
    model, inputs = load_huggingface("tests/data/hf/llama", {"batch": 64, "seq": 64})
    solution = autoshard.plan(model, inputs, Mesh.from_bandwidths((4,), device="cpu"), objective="serial")
    assert solution.layouts["input_ids"].outputs == ("S(0)",)
    found = export(solution, "tp_plan")
    assert set(found.values()) == {"replicate"} and found.cost_seconds > 2 * solution.cost
    assert any("inputs sharded on axis0" in one.what for one in found.left)


@pytest.mark.slow
def test_an_export_that_needs_more_memory_than_the_plan_was_limited_to_is_refused():
    model, inputs = load_huggingface("tests/data/hf/llama", {"batch": 4, "seq": 8})
    solution = autoshard.plan(model, inputs, Mesh.from_bandwidths((4,), device="cpu"), memory_limit=260e3)
    with pytest.raises(NotHeld, match="tp_plan can't hold this plan: a device needs .* as exported, the plan was made for 260 kB"):
        export(solution, "tp_plan")
    assert solution.peak_bytes <= 260e3


def test_a_fused_projection_is_flagged_and_stays_whole():
    pinned = {f"transformer.h.{k}.attn.c_attn.weight": "S(1)" for k in (0, 1)}
    found = export(planned("gpt2", (4,), lambda _: pinned), "tp_plan")
    assert found["transformer.h.*.attn.c_attn"] == "replicate"
    (why,) = [one.why for one in found.left if one.what == "transformer.h.*.attn.c_attn.weight"]
    assert "several projections side by side" in why and "permuted head by head" in why


def with_between(between, out=16):
    """x + down(f(up(x))) with something between that may not run on parts."""
    up, down, scale = nn.Linear(8, 16), nn.Linear(out, 8), nn.Parameter(torch.ones(16))
    return Model(lambda m, x: x + m.down(between(m, m.up(x))), up=up, down=down, scale=scale)


BETWEEN = {
    "a pointwise function": (lambda m, y: torch.relu(y), None),
    "heads counted from what is there": (lambda m, y: y.view(*y.shape[:-1], -1, 4).flatten(-2), None),
    "a norm over what is cut": (lambda m, y: y - y.mean(-1, keepdim=True), "needs all shards of its input"),
    "a softmax over what is cut": (lambda m, y: y.softmax(-1), None),
    "a product of what is cut with itself": (lambda m, y: y @ (y.t() @ y), None),
    "a vector that stays whole": (lambda m, y: y * m.scale[:] * m.scale, None),
    "a fixed number of heads": (lambda m, y: y.view(4, 4, 4).relu().view(4, 16), "fixes the number of heads"),
    "a size taken from what is cut": (lambda m, y: y.view(4, 4, -1).relu().view(4, 16), "infers another dim's size"),
    "two halves of a fused weight": (lambda m, y: torch.cat([p.relu() for p in y.chunk(2, -1)], -1), None),
}


@pytest.mark.parametrize("what", BETWEEN)
def test_weights_are_cut_together_only_when_the_code_between_runs_on_parts(what):
    between, reason = BETWEEN[what]
    pins = {"up.weight": "S(0)", "up.bias": "S(0)", "down.weight": "S(1)"}
    mesh = Mesh.from_bandwidths((2,), device="cpu")
    solution = autoshard.plan(with_between(between), (torch.empty(4, 8),), mesh, pins=pins, objective="serial")
    found = export(solution, "parallelize_module")
    runs = what in ("a pointwise function", "heads counted from what is there")
    assert ({"up", "down"} <= set(found)) == runs, found
    if runs:
        assert agrees(between)
    elif reason is not None:
        assert any(reason in one.why for one in found.left), found.said


def test_a_weight_that_no_module_of_its_own_reads_has_no_style():
    """parallelize_module would change the forward of whatever holds it, or refuse that."""
    pins, parts = {"up": "S(0)", "down": "S(1)"}, {"up": nn.Parameter(torch.empty(16, 8)), "down": nn.Parameter(torch.empty(8, 16))}
    model = Model(lambda m, x: torch.relu(x @ m.up.t()) @ m.down.t(), **parts)
    solution = autoshard.plan(model, (torch.empty(4, 8),), Mesh.from_bandwidths((2,), device="cpu"), pins=pins, objective="serial")
    found = export(solution, "parallelize_module")
    assert not found and "not the `weight` of the module that reads it" in found.said[1]


def agrees(between) -> bool:
    """What ColwiseParallel and RowwiseParallel do on two ranks, by hand, against the whole module."""
    torch.manual_seed(0)
    whole, x = with_between(between), torch.randn(4, 8)
    y = x + whole.down.bias
    for rank in range(2):
        part = types.SimpleNamespace(scale=whole.scale)
        local = x @ whole.up.weight.chunk(2)[rank].T + whole.up.bias.chunk(2)[rank]
        try:
            y = y + between(part, local) @ whole.down.weight.chunk(2, 1)[rank].T
        except RuntimeError:
            return False
    return torch.allclose(y, whole(x), atol=1e-6)


@pytest.mark.parametrize("what", [name for name in BETWEEN if name not in ("a pointwise function", "heads counted from what is there")])
def test_what_is_refused_would_have_been_wrong(what):
    if what == "two halves of a fused weight":
        assert not agrees(lambda m, y: torch.cat([p * k for k, p in enumerate(y.chunk(2, -1))], -1))
    else:
        assert not agrees(BETWEEN[what][0])


def test_norms_among_cut_heads_get_their_gradients_summed():
    def pins(model):
        return {name: layout for name, layout in pins_of(model, one_axis).items() if "self_attn" in name}

    found = export(planned("qwen3", (2,), pins), "tp_plan")
    assert found["model.layers.*.self_attn.q_norm"] == found["model.layers.*.self_attn.k_norm"] == "replicated_with_grad_allreduce"
    assert found["model.layers.*.self_attn.q_proj"] == "colwise" and found["model.layers.*.mlp.up_proj"] == "replicate"


def test_weights_that_only_few_layers_cut_stay_whole_and_are_listed():
    first = {name: "S(0)" for name in ("model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.gate_proj.weight")}
    found = export(planned("llama", (4,), lambda _: first | {"model.layers.0.mlp.down_proj.weight": "S(1)"}), "tp_plan")
    assert found["model.layers.*.mlp.up_proj"] == "replicate"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("tp_plan", None, "rows"), "the mesh has no axis 'rows'; its axes are axis0, axis1"),
        (("tp_plan", None, "axis0"), "shards no weight on axis0, so there is nothing to export; it does on axis1"),
        (("json", None, "axis0"), "json carries every axis; leave axis='axis0' out"),
        (("tp_plan", "plan.py", None), "asks for Python, but tp_plan is data"),
        (("tp_plan", "plan.pkl", None), "asks for a pickle, but tp_plan is text; name a file that ends in .json"),
    ],
)
def test_an_export_that_can_not_be_is_one_sentence(megatron, tmp_path, arguments, sentence):
    kind, name, axis = arguments
    assert_refused(sentence, export, megatron[2, 2], kind, name and tmp_path / name, axis=axis)
    assert list(tmp_path.iterdir()) == []


def test_one_device_gets_a_plan_that_cuts_nothing():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    found = export(autoshard.plan(model, (torch.empty(4, 8),), Mesh.from_bandwidths((1,), device="cpu"), objective="serial"), "tp_plan")
    assert dict(found) == {"0": "replicate", "1": "replicate"} and found.extra_seconds == 0


def test_a_plan_that_does_not_say_how_weights_are_used_is_refused(megatron):
    assert_refused("doesn.t say how its weights are used; plan again", export, replace(megatron[4,], modules={}), "tp_plan")


@pytest.mark.parametrize("kind", ["parallelize_module", "tp_plan", "fully_shard", "distribute_module"])
def test_files_hold_what_was_returned(megatron, tmp_path, kind):
    value = export(megatron[2, 2], kind, tmp_path / "a.json")
    assert json.loads((tmp_path / "a.json").read_text()) == json.loads(json.dumps(as_plain(value, kind)))


@pytest.mark.parametrize("kind", ["parallelize_module", "fully_shard", "distribute_module"])
def test_python_files_run_without_autoshard(megatron, tmp_path, kind):
    export(megatron[2, 2], kind, tmp_path / "a.py")
    source = (tmp_path / "a.py").read_text()
    assert "autoshard" not in "".join(line for line in source.splitlines() if not line.startswith("#"))
    made = {}
    exec(compile(source, "a.py", "exec"), made)
    if kind == "distribute_module":
        layouts = {name: tuple(layout) for name, layout in made["LAYOUTS"].items()}
        assert layouts == {name: parse(row["layout"]) for name, row in megatron[2, 2].parameters.items()}
    else:
        assert {name: type(one) for name, one in made["PLAN"].items()} == {
            name: type(one) for name, one in export(megatron[2, 2], "parallelize_module").items()
        }


# -- on processes -------------------------------------------------------------------------------------------------------------


def work(rank, world, path, solutions):
    """Logits of a saved Llama under each export, on this rank."""
    from transformers import LlamaForCausalLM
    from transformers.distributed import DistributedConfig

    join_as_torchrun(rank, world, path)
    tokens, found = torch.arange(32).reshape(4, 8) % 128, {}
    solution, mesh = solutions[world,], init_device_mesh("cpu", (world,), mesh_dim_names=("axis0",))

    def logits(model):
        with torch.no_grad():
            y = model(tokens).logits
        return y.full_tensor() if isinstance(y, DTensor) else y

    def saved(**options):
        return LlamaForCausalLM.from_pretrained(path, **options)

    found["whole"] = logits(saved())
    model = saved(distributed_config=DistributedConfig(tp_plan=dict(export(solution, "tp_plan"))))
    weight = model.model.layers[1].self_attn.q_proj.weight
    assert isinstance(weight, DTensor) and weight.to_local().shape[0] == 64 // world
    found["tp_plan"] = logits(model)
    found["parallelize_module"] = logits(parallelize_module(saved(), mesh, export(solution, "parallelize_module")))
    model = distribute_module(saved(), mesh, export(solution, "distribute_module"))
    assert all(p.placements == parse(solution.parameters[name]["layout"]) for name, p in model.named_parameters())
    if world == 4:
        square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("axis0", "axis1"))
        recipe = export(solutions[2, 2], "fully_shard")
        found["fully_shard"] = logits(apply_recipe(recipe, saved(), square))
        sharded = {**recipe, "fully_shard": {"axes": ["axis0"], "modules": ["model.layers.0", "model.layers.1", ""]}}
        found["sharded"] = logits(apply_recipe({**sharded, "replicate": {"axes": []}}, saved(), square))
    torch.save(found, os.path.join(path, f"{world}-{rank}.pt"))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.skipif(find_spec("transformers.distributed.parallel_utils") is None, reason="transformers until 5.21 has no style replicate")
@pytest.mark.parametrize("world", [2, 4])
def test_a_saved_llama_loaded_with_an_export_gives_its_logits(megatron, tmp_path, world):
    from transformers import AutoConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(AutoConfig.from_pretrained("tests/data/hf/llama"))
    model.save_pretrained(tmp_path)
    mp.start_processes(work, args=(world, str(tmp_path), megatron), nprocs=world, start_method="fork")
    for rank in range(world):
        found = torch.load(tmp_path / f"{world}-{rank}.pt")
        whole = found.pop("whole")
        for kind, y in found.items():
            assert (y - whole).abs().max() <= 1e-5 * whole.abs().max(), (kind, rank)
