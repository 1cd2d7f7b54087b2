import itertools
import json
import math
import pickle
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.tensor import DeviceMesh, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from autoshard.exports import FORMATS, portable, sharding_map
from autoshard.exports.record import Left, sent_tokens, why_not_held, with_cost
from autoshard.mesh import Mesh
from autoshard.solution import load
from tests.helpers_kept import DATA, assert_stays
from tests.helpers_refusals import assert_refused
from tests.helpers_solutions import export_anyway as export
from tests.helpers_solutions import linear_solution

PARAMETERS = {
    "scale": {"layout": "R,R", "shape": [1], "dtype": "float32", "local_bytes": 4},
    "h.0.mlp.weight": {"layout": "S(0),S(1)", "shape": [8, 16], "dtype": "bfloat16", "local_bytes": 32},
    "h.0.mlp.bias": {"layout": "R,S(0)", "shape": [8], "dtype": "float32", "local_bytes": 8},
}
MODULES = {"axis1": {"styles": {"h.0.mlp.weight": "column"}, "dropped": [], "seconds": {"modules": 2.5e-3, "fully_shard": 2.5e-3}}}
SOLUTION = linear_solution(parameters=PARAMETERS, modules=MODULES)
OF_ANY_PLAN = [kind for kind in FORMATS if kind != "checkpoint_policy"]  # that one is of plans that recompute: test_saved_values


def test_the_sharding_map_has_every_parameter_under_its_module():
    found = sharding_map(SOLUTION)
    names = {f"{module}.{attribute}".lstrip(".") for module, entry in found.items() for attribute in entry["sharding"]}
    assert names == set(PARAMETERS)
    assert found["h.0.mlp"]["node"] == "h.0.mlp.weight" and found[""]["node"] == "scale"


def test_specs_say_placements_mesh_shape_and_dtype():
    spec = sharding_map(SOLUTION)["h.0.mlp"]["sharding"]["weight"]
    assert isinstance(spec, DTensorSpec)
    assert spec.placements == (Shard(0), Shard(1)) and tuple(spec.mesh.shape) == (2, 4) and spec.mesh.mesh_dim_names == ("axis0", "axis1")
    assert tuple(spec.shape) == (8, 16) and spec.stride == (16, 1) and spec.tensor_meta.dtype == torch.bfloat16


@pytest.mark.parametrize("field", ["shape", "dtype", "local_bytes"])
@pytest.mark.parametrize("kind", FORMATS)
def test_a_plan_whose_parameters_are_not_described_is_refused(kind, field, tmp_path):
    row = {key: value for key, value in PARAMETERS["h.0.mlp.bias"].items() if key != field}
    solution = linear_solution(parameters={**PARAMETERS, "h.0.mlp.bias": row}, modules=MODULES)
    assert_refused(f"'h.0.mlp.bias' of the plan has no {field}, .*plan again", export, solution, kind, tmp_path / "out.json")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("shape", [(8,), (1, 8), (2, 4), (2, 2, 2), (16, 16)])
def test_any_mesh_needs_no_processes(shape):
    layout = ",".join(["R"] * len(shape))
    solution = linear_solution(mesh=Mesh.from_bandwidths(shape), parameters={"a.w": {**PARAMETERS["scale"], "layout": layout}})
    spec = sharding_map(solution)["a"]["sharding"]["w"]
    assert spec.placements == (Replicate(),) * len(shape) and spec.mesh.size() == torch.Size(shape).numel()


def test_specs_lie_on_the_mesh_that_is_given():
    mesh = DeviceMesh("cpu", torch.arange(8).reshape(2, 4), _init_backend=False, _rank=0)
    assert sharding_map(SOLUTION, mesh)["h.0.mlp"]["sharding"]["bias"].mesh is mesh
    other = DeviceMesh("cpu", torch.arange(8), _init_backend=False, _rank=0)
    assert_refused(r"device mesh has shape \(8,\), but the plan is for \(2, 4\)", sharding_map, SOLUTION, other)


def test_files_hold_what_was_returned(tmp_path):
    value = export(SOLUTION, "sharding_map", tmp_path / "map.pkl")
    assert (held := pickle.loads((tmp_path / "map.pkl").read_bytes())) == value and type(held) is dict
    assert json.loads((export(SOLUTION, "json", tmp_path / "p.json") and tmp_path / "p.json").read_text()) == portable(SOLUTION)


@pytest.mark.parametrize("name", ["plan", "megatron", "fsdp"])
def test_exports_of_plans_stay_what_they_are(tmp_path, name):
    said = []
    for kind, ending in itertools.product(FORMATS, ("json", "py")):
        try:
            export(load(DATA / "reports" / f"{name}.json"), kind, tmp_path / f"a.{ending}")
            said += [f"{kind}.{ending}", (tmp_path / f"a.{ending}").read_text()]
        except ValueError as error:
            said += [f"{kind}.{ending}", str(error).replace(str(tmp_path), "")]
    assert_stays(f"exports/{name}.txt", "\n".join(said))


def test_a_dtype_of_another_torch_is_refused():
    with pytest.raises(ValueError, match="dtype 'float3', which this torch .* lacks"):
        sharding_map(linear_solution(parameters={"w": {**PARAMETERS["scale"], "dtype": "float3"}}))


@pytest.mark.parametrize("kind", OF_ANY_PLAN)
def test_every_kind_says_what_it_leaves_out(kind):
    value = export(SOLUTION, kind)
    assert value.left and len(value.said) == 1 + len(value.left)
    priced = kind in ("parallelize_module", "tp_plan", "fully_shard", "vllm", "sglang")
    assert (value.extra_seconds == pytest.approx(0.5e-3)) if priced else (value.cost_seconds == float("inf"))


def test_tied_parameters_stay_one_parameter_in_every_form_of_a_partition(monkeypatch):
    monkeypatch.setattr("torch.distributed.tensor.distribute_tensor", lambda tensor, mesh, layout: tensor)
    monkeypatch.setattr("autoshard.exports.partition.distribute_tensor", lambda tensor, mesh, layout: tensor)
    row = {"layout": "S(0),R", "shape": [8, 4], "dtype": "float32", "local_bytes": 64}
    solution = linear_solution(parameters={"0.weight": row, "1.weight": {**row, "tied_to": "0.weight"}})
    made: dict = {}
    exec(FORMATS["distribute_module"].python(export(solution, "distribute_module")), made)
    for partition in (export(solution, "distribute_module"), made["partition_fn"]):
        model = torch.nn.Sequential(torch.nn.Embedding(8, 4), torch.nn.Linear(4, 8, bias=False))
        before = model[1].weight = model[0].weight
        for name, module in model.named_modules():
            partition(name, module, DeviceMesh("cpu", torch.arange(8).reshape(2, 4), _init_backend=False, _rank=0))
        assert model[0].weight is model[1].weight is not before


def test_an_export_says_what_it_costs_and_what_of_the_computation_it_leaves_out():
    def placed(*inputs):
        return SimpleNamespace(inputs=inputs)

    def left(layouts, **facts):
        solution = SimpleNamespace(cost=2.0, layouts=layouts, sequence_order=facts.get("order"), chunked_loss=facts.get("chunked", 0))
        known = {"seconds": {"fast": 2.5}, "peak_bytes": {"fast": 7e9}}
        return with_cost(solution, {}, (Left("w", "it is odd", "R"),), known, facts.get("scheme", "fast"))

    known, unknown = left({}), left({}, scheme="slow")
    assert known.extra_seconds == 0.5 and known.peak_bytes == 7e9 and unknown.cost_seconds == math.inf and unknown.peak_bytes is None
    assert known.said == ("a step takes 2.5 s as exported, 2 s as planned: +0.5 s", "not carried: w (R): it is odd")
    assert unknown.said[0].startswith("what it costs is not known") and str(Left("w", "why")) == "not carried: w: why"
    for layouts, facts, said in (
        ({"attention": placed("R,S(2)", "R,R", "R"), "attention_1": placed("S(2),R")}, {}, ["sequence (queries R,S(2), keys R,R)"]),
        ({"attention": placed("S(1),R"), "mm": placed("S(2)"), "attention_1": placed(), "attention_backward": placed("S(2)")}, {}, []),
        ({"attention": placed("S(2)", "R")}, {"order": (1, 0)}, ["over a sharded sequence in head-tail order (queries S(2), keys R)"]),
        ({}, {"chunked": 64}, ["logits of 64 tokens at a time: modules compute"]),
    ):
        others = left(layouts, **facts).said[2:]
        assert len(others) == len(said) and all(part in one for part, one in zip(said, others))


def test_tokens_that_are_sent_to_experts_are_counted_by_layers():
    inputs = {"experts": "S(0),R|R|R|S(0),R|R", "experts_1": "S(0),R|R|R|R,S(0)|R", "biased_experts_2": "R,S(0)|R|R|R,S(0)|R|R|R"}
    inputs |= {"experts_backward": "S(0),R|R|R|S(0),R|R", "experts_3": "R,R|R|R|S(0),R|R", "experts_4": "S(0)|R|R|S(0)"}
    inputs["experts_5"] = "S(1)|R|R|S(0)|R"
    layouts = {name: SimpleNamespace(inputs=tuple(written.split("|"))) for name, written in inputs.items()}
    (one,) = sent_tokens(SimpleNamespace(layouts=layouts))
    assert one.what == "tokens sent to the experts of 2 layers by all_to_all"
    assert sent_tokens(SimpleNamespace(layouts={name: layouts[name] for name in ("experts_1", "experts_3", "experts_5")})) == ()


def test_an_export_is_not_the_plan_beyond_its_limit_or_its_seconds():
    plan = SimpleNamespace(cost=2.0, memory_limit=4e9)
    free = SimpleNamespace(cost=2.0, memory_limit=None)
    for solution, cost, peak, within, said in (
        (plan, 2.0, 4e9, 0.0, ""), (plan, 1.0, 5e9, 1.0, "a device needs 5 GB as exported, the plan was made for 4 GB"),
        (free, 2.0, 5e9, 0.0, ""), (plan, math.inf, None, 0.1, ""), (free, 2.1, None, 0.1, ""), (free, 2.2, None, 0.1, ""),
        (free, 2.5, None, 0.2, "a step takes 2.5 s as exported and 2 s as planned, more than 20% longer"),
    ):  # fmt: skip
        assert why_not_held(solution, cost, peak, within) == said
