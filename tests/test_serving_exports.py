"""Styles of modules for serving engines: the names that vLLM and SGLang document; in transformers, models without a plan of their own."""

import json
import os
import re
import warnings
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.tensor import DTensor

import autoshard
from autoshard.capture.huggingface import load_huggingface
from autoshard.exports.engines import STYLES, _base_model, pattern
from autoshard.mesh import Mesh
from benchmarks.coverage import HF
from tests.helpers_ranks import join_as_torchrun
from tests.helpers_solutions import export_anyway as export

# vllm/model_executor/models/transformers/utils.py, replace_linear_class: v5 and v4 names; any other is replicated there
VLLM = {"colwise", "rowwise", "replicate", "colwise_gather_output", "rowwise_split_input", "colwise_rep", "rowwise_rep"}
# python/sglang/srt/models/transformers.py, _normalize_tp_style: any other is a ValueError there
SGLANG = {"colwise", "colwise_rep", "rowwise", "rowwise_rep", "replicate"}


def planned(name, ranks, **settings):
    """Megatron's layouts of all weights, as pins where the solver would choose others for so small a model."""
    model, inputs = load_huggingface(str(HF / name), {"batch": 4, "seq": 8, **settings})
    rows = ("o_proj", "out_proj", "down_proj", "fc2", "dense_4h_to_h")
    pins = {
        f"{path}.weight": "S(1)" if path.endswith(rows) else "S(0)"
        for path, part in model.named_modules()
        if isinstance(part, nn.Linear) and part.weight.shape[0] % ranks == 0 and "lm_head" not in path
    }
    return autoshard.plan(model, inputs, Mesh.from_bandwidths((ranks,), device="cpu"), pins=pins, objective="serial")


def linears(name, *, base):
    """The names of the Linear modules of a published model, or of its base model, as an engine builds it."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(HF / name)
    with torch.device("meta"):
        model = transformers.AutoModel.from_config(config) if base else load_huggingface(str(HF / name), {})[0]
    return model, [path for path, part in model.named_modules() if isinstance(part, nn.Linear)]


def style_of(plan, name):
    """What both engines do (recursive_replace): the first pattern that matches from the beginning, "model." put before both."""
    first = next((one for one in plan if re.match(f"model.{one}", f"model.{name}")), None)
    return plan.get(first, "replicate")


@pytest.mark.parametrize("name", ["opt", *(pytest.param(name, marks=pytest.mark.slow) for name in ("llama", "qwen3"))])
def test_every_linear_of_the_base_model_gets_its_style_in_both_engines(name):
    solution = planned(name, 2)
    theirs = export(solution, "tp_plan")
    model, names = linears(name, base=True)
    prefix = "model."
    for engine, known in (("vllm", VLLM), ("sglang", SGLANG)):
        plan = export(solution, engine)
        assert set(plan.values()) <= known and {"colwise", "rowwise"} <= set(plan.values())
        for path in names:
            style = theirs[re.sub(r"\.\d+\.", ".*.", prefix + path)]
            assert style_of(plan, path) == (style if engine == "vllm" else style.replace("colwise_gather_output", "colwise_rep"))
        assert not any("lm_head" in one for one in plan) and style_of(plan, "embed_tokens") == "replicate"
        assert any("embeddings and the head" in left.why for left in plan.left)
        assert plan.cost_seconds == theirs.cost_seconds


def test_a_pattern_matches_its_module_and_no_longer_name():
    for module, other in (("layers.3.mlp.up_proj", "layers.3.mlp.up_proj_2"), ("layers.0.fc1", "layers.0.fc10"), ("h.1.w", "h.1x.w")):
        assert re.match(pattern(module), module) and not re.match(pattern(module), other)
        assert not re.match(pattern(module), module.replace(".", "_"))
    assert re.match(pattern("layers.3.mlp.up_proj"), "layers.31.mlp.up_proj")


def test_a_config_carries_the_plan_to_the_model_that_an_engine_builds(tmp_path):
    """vLLM and SGLang build AutoModel.from_config and read `model.tp_plan`: the plan in config.json arrives there, as it is."""
    import transformers

    plan = dict(export(planned("opt", 2), "vllm"))
    config = json.loads((HF / "opt" / "config.json").read_text()) | {"base_model_tp_plan": plan}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with torch.device("meta"):
        model = transformers.AutoModel.from_config(transformers.AutoConfig.from_pretrained(tmp_path))
    assert plan.items() <= model.tp_plan.items()


def test_a_plan_of_a_base_model_keeps_its_names():
    import transformers

    config = transformers.AutoConfig.from_pretrained(HF / "llama", use_cache=False)
    with torch.device("meta"):
        model = transformers.LlamaModel(config).eval()
    inputs = {"input_ids": torch.empty(4, 8, dtype=torch.int64, device="meta")}
    pins = {"layers.*.mlp.up_proj.weight": "S(0)", "layers.*.mlp.gate_proj.weight": "S(0)", "layers.*.mlp.down_proj.weight": "S(1)"}
    plan = export(autoshard.plan(model, inputs, Mesh.from_bandwidths((2,), device="cpu"), pins=pins, objective="serial"), "vllm")
    assert plan[r"layers\.\d+\.mlp\.up_proj$"] == "colwise" and plan[r"layers\.\d+\.mlp\.down_proj$"] == "rowwise"


@pytest.mark.parametrize(
    ("names", "base"),
    [
        (("model.layers.0.up", "model.norm", "lm_head"), "model."),
        (("layers.0.up", "norm"), ""),
        (("model.layers.0.up",), ""),  # nothing is beside it
        (("h.0.up", "head"), ""),  # the layers themselves are at the top
        (("model.layers.0.up", "towers.0.up"), "model."),  # what is beside it may be numbered
        (("norm", "head"), ""),
    ],
)
def test_the_base_model_is_what_stands_beside_a_head(names, base):
    assert _base_model(SimpleNamespace(parameters={f"{name}.weight": {} for name in names})) == base


def test_the_styles_of_the_tables_are_documented_ones():
    assert set(STYLES["vllm"].values()) <= VLLM and set(STYLES["sglang"].values()) <= SGLANG
    assert "colwise_gather_output" not in SGLANG  # a negative control: the two don't spell it alike


# -- transformers, on processes ---------------------------------------------------------------------------------------------------


def serve(rank, world, folder, plan):
    """Logits on this rank of a saved model: whole, with DistributedConfig, and with the deprecated argument."""
    import transformers
    from transformers.distributed import DistributedConfig

    join_as_torchrun(rank, world, folder)
    tokens, found = torch.arange(32).reshape(4, 8) % 128, {}

    def logits(**options):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, **options).eval()
        with torch.no_grad():
            y = model(tokens).logits
        fc1 = model.model.decoder.layers[1].fc1.weight
        return y.full_tensor() if isinstance(y, DTensor) else y, fc1.to_local().shape[0] if isinstance(fc1, DTensor) else fc1.shape[0]

    found["whole"] = logits()
    found["config"] = logits(distributed_config=DistributedConfig(tp_plan=plan))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found["argument"] = logits(tp_plan=plan)
    torch.save(found, os.path.join(folder, f"{world}-{rank}.pt"))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.slow  # new processes, which import transformers; test_exports_modules has a model with a plan of its own
@pytest.mark.parametrize("world", [2, 4])
def test_a_model_without_a_plan_of_its_own_serves_in_transformers(tmp_path, world):
    import transformers

    config = transformers.AutoConfig.from_pretrained(HF / "opt")
    assert config.base_model_tp_plan is None
    torch.manual_seed(0)
    transformers.OPTForCausalLM(config).save_pretrained(tmp_path)
    plan = export(planned("opt", world), "tp_plan")
    assert plan["model.decoder.layers.*.fc1"] == "colwise" and plan["model.decoder.layers.*.fc2"] == "rowwise"
    mp.start_processes(serve, args=(world, str(tmp_path), dict(plan)), nprocs=world, start_method="fork")
    for rank in range(world):
        found = torch.load(tmp_path / f"{world}-{rank}.pt")
        (whole, rows) = found["whole"]
        for how in ("config", "argument"):
            y, local = found[how]
            assert local == rows // world and (y - whole).abs().max() <= 1e-5 * whole.abs().max(), (how, rank)
