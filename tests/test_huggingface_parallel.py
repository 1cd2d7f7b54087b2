"""A Hugging Face model of its published class, planned and run on ranks: named inputs, its own outputs, what can't run, saving."""

from functools import cache

import pytest
import torch
import transformers
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

import autoshard
from autoshard.runtime.module import parallel_class
from benchmarks.coverage import HF
from tests.helpers import fast_mesh
from tests.helpers_models import full, parallel, said
from tests.helpers_ranks import results
from tests.helpers_refusals import assert_refused

KINDS = ("llama", "gpt2", "bert", "t5")  # a decoder, one with tied weights, an encoder, both


def build(kind: str):
    """The published class with caches off, in eval mode: no dropout."""
    config = transformers.AutoConfig.from_pretrained(HF / kind)
    config.use_cache = False
    if kind == "t5":
        config.decoder_start_token_id = 0
    torch.manual_seed(0)
    return getattr(transformers, config.architectures[0])(config).eval()


def inputs(rows: int = 4) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 60, (rows, 8), generator=torch.Generator().manual_seed(rows))
    return {"input_ids": ids, "labels": ids.clone()}


@cache
def planned(kind: str):
    pins = {"input_ids": "S(0)", "labels": "S(0)"}
    return autoshard.plan(build(kind), inputs(), fast_mesh((2,)), training=True, baselines=False, objective="serial", pins=pins)


def used(rank: int, kind: str, solution, folder: str) -> dict:
    model = build(kind)
    module = parallel(model, solution)
    batch = transformers.BatchEncoding(inputs())  # as a tokenizer gives it
    out = module(**batch)
    found = {"type": type(out).__name__, "keys": list(out), "loss": out.loss.item(), "logits": tuple(out["logits"].shape)}
    out.loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
    found["norm"] = full(norm).item()
    found["other rows"] = module(**module.shard_inputs(transformers.BatchEncoding(inputs(2)))).loss.item()
    shard = {name: x[2 * rank : 2 * rank + 2] for name, x in batch.items()}
    found["own rows"] = module(**module.shard_inputs(shard, local=True)).loss.item()
    methods = [name for name in ("generate", "save_pretrained", "push_to_hub") if hasattr(module, name)]
    found["refused"] = {name: said(getattr(module, name), folder) for name in methods}
    torch.optim.SGD(module.parameters(), lr=0.1).step()
    found["trained"] = module(**batch).loss.item()
    model.load_state_dict(get_model_state_dict(module, options=StateDictOptions(full_state_dict=True)))
    found["gathered"] = model(**batch).loss.item()
    if rank == 0:
        model.save_pretrained(folder)
    return found


def test_methods_that_a_plan_cannot_run_are_refused_and_only_where_the_model_has_them():
    refused = {"generate", "save_pretrained", "push_to_hub", "resize_token_embeddings"}
    for name in refused:
        assert_refused(rf"^{name}\(\) can't run on a parallel module: ", getattr(parallel_class(transformers.LlamaForCausalLM), name), None)
    assert not refused.intersection(dir(parallel_class(torch.nn.Linear)))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_published_model_runs_its_plan_and_what_cannot_run_says_so(kind, tmp_path):
    solution = planned(kind)
    assert set(solution.inputs) == {"input_ids", "labels"} and solution.layouts["input_ids"].outputs == ("S(0)",)
    model = build(kind)
    out = model(**inputs())
    out.loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf")).item()
    small = build(kind)(**inputs(2)).loss.item()
    for found in results(2, used, kind, solution, str(tmp_path)):
        assert found["type"] == type(out).__name__ and found["keys"] == list(out)
        assert found["loss"] == found["own rows"] == pytest.approx(out.loss.item(), rel=1e-5)
        assert found["logits"] == tuple(out.logits.shape)
        assert found["norm"] == pytest.approx(norm, rel=1e-4)
        assert found["other rows"] == pytest.approx(small, rel=1e-5)
        assert found["gathered"] == pytest.approx(found["trained"], rel=1e-5) and found["trained"] < found["loss"]
        for name, sentence in found["refused"].items():
            assert sentence.startswith(f"{name}() can't run on a parallel module") and "docs/huggingface.md" in sentence
        again = type(model).from_pretrained(tmp_path).eval()
        assert again(**inputs()).loss.item() == pytest.approx(found["trained"], rel=1e-5)
