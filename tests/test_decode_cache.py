"""A decode step of a Hugging Face model with its cache object: captured as it is, planned, verified, and run on gloo ranks."""

import copy
import json

import pytest
import torch
import transformers

import autoshard
from autoshard.capture import cache_name
from autoshard.capture.nested_tensors import copied, tensors_of
from autoshard.cli import main
from autoshard.cli.model import load_model
from benchmarks.coverage import HF
from tests.helpers import fast_mesh
from tests.helpers_models import full, parallel
from tests.helpers_ranks import results
from tests.helpers_refusals import assert_refused

KINDS = ("StaticCache", "DynamicCache")
BATCH, PROMPT, ROOM, STEPS = 4, 6, 12, 3


def model():
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.AutoConfig.from_pretrained(HF / "llama")).eval()


def filled(kind):
    """A cache after a prompt, and the token that comes next."""
    module, ids = model(), torch.randint(3, 60, (BATCH, PROMPT), generator=torch.Generator().manual_seed(1))
    more = {"max_cache_len": ROOM} if kind == "StaticCache" else {}
    cache = getattr(transformers, kind)(config=module.config, **more)
    with torch.no_grad():
        token = module(ids, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)
    return cache, token


def inputs(kind):
    cache, token = filled(kind)
    return {"input_ids": token, "past_key_values": cache, "use_cache": True}


def planned(kind):
    pins = {f"model.layers.*.self_attn.{name}_proj.weight": "S(0)" for name in "qkv"} | {"model.layers.*.self_attn.o_proj.weight": "S(1)"}
    return autoshard.plan(model(), inputs(kind), fast_mesh((2,)), baselines=False, objective="serial", pins=pins)


@pytest.mark.parametrize("kind", [pytest.param("StaticCache", marks=pytest.mark.slow), "DynamicCache"])
def test_a_step_with_its_cache_is_verified_and_its_attention_is_sharded(kind):
    solution, given = planned(kind), inputs(kind)
    before = [tensor.clone() for tensor in tensors_of(given["past_key_values"])]
    report = autoshard.verify(model(), given, solution)
    assert report["ok"] and report["plans"][0]["max_relative_error_outputs"] < 1e-5
    assert not autoshard.verify(model(), given, solution, plant_fault=True)["ok"]
    assert all(torch.equal(a, b) for a, b in zip(before, tensors_of(given["past_key_values"]), strict=True))
    used = [placed.inputs for name, placed in solution.layouts.items() if "scaled_dot_product" in name or "attention" in name]
    used = [one for one in used if one]
    assert len(used) == 2 and all(one[:3] in (("S(0)",) * 3, ("S(1)",) * 3) for one in used)  # by the batch, or by heads


def decoded(rank, kind, solution=None):
    """Tokens of greedy decoding: a static cache takes several steps, of one that grows a plan is one step."""
    module, (cache, token) = parallel(model(), solution), filled(kind)
    made = []
    with torch.no_grad():
        for _ in range(STEPS if kind == "StaticCache" else 1):
            logits = full(module(input_ids=token, past_key_values=cache, use_cache=True).logits)
            token = logits[:, -1:].argmax(-1)
            made.append((token.tolist(), logits))
    return made


@pytest.mark.parametrize("kind", [KINDS[0], *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS[1:])])
def test_greedy_decoding_on_two_ranks_says_what_the_model_says(kind):
    expected = decoded(0, kind)
    for made in results(2, decoded, kind, planned(kind)):
        assert [tokens for tokens, _ in made] == [tokens for tokens, _ in expected]
        for (_, ours), (_, theirs) in zip(made, expected):
            assert torch.allclose(ours, theirs, atol=1e-5)


@pytest.mark.parametrize("kind", ["dynamic", pytest.param("static", marks=pytest.mark.slow)])
def test_the_cache_setting_plans_a_decode_step_and_verify_runs_it(kind, tmp_path, capsys):
    plan = str(tmp_path / "plan.json")
    words = ("--set", f"cache={kind}", "--batch", "4", "--seq", "8")
    assert main(["plan", f"hf:{HF}/llama", *words, "--mesh", "2", "--no-baselines", "--out", plan, "--json", "--quiet"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["status"] == "optimal"
    assert main(["verify", plan, "--trust", "--json", "--quiet"]) == 0
    assert json.loads(capsys.readouterr().out)["ok"]


def test_the_cache_setting_makes_the_inputs_of_one_token_on_the_meta_device():
    module, given = load_model(f"hf:{HF / 'llama'}", {"cache": "static", "seq": 16, "batch": 4})
    assert given["input_ids"].shape == (4, 1) and given[cache_name(module)].layers[0].keys.shape == (4, 4, 16, 8)
    assert all(tensor.is_meta for tensor in tensors_of(given[cache_name(module)]))
    for settings, sentence in (({"cache": "paged"}, "expected static or dynamic"), ({"cache": "static", "loss": True}, "leave it out")):
        assert_refused(sentence, load_model, f"hf:{HF / 'llama'}", settings)


def test_a_device_that_an_object_notes_follows_its_tensors():
    class Noted:
        def __init__(self):
            self.rows, self.device, self.other = torch.empty(2, device="meta"), torch.device("meta"), torch.device("cuda:3")

    original = Noted()
    moved = copied(original, lambda tensor: torch.zeros(2))
    assert moved.device == torch.device("cpu") and moved.other == torch.device("cuda:3") and original.device == torch.device("meta")
    assert copy.deepcopy(original).device == torch.device("meta")
