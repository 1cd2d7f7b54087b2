"""Degrees for serving: the cache's bytes, prices composed of layers, which degrees are legal, and the verb."""

import copy
import json
import math
import resource
from dataclasses import replace
from functools import cache
from itertools import product
from types import SimpleNamespace

import pytest
import torch
import transformers

import autoshard
from autoshard.capture import capture
from autoshard.capture.huggingface import load_huggingface
from autoshard.graph import LARGE, check, resized
from autoshard.mesh import DEVICES, Mesh
from autoshard.report.serving import serving_report
from autoshard.report.terminal import as_text
from autoshard.serving import CachedLayer, cached_layers, empty_cache, serve_plan
from autoshard.serving.projections import divided
from autoshard.serving.step_prices import StepPrice, price_of
from autoshard.serving.steps import READ_AGAIN, Stored, paged_attention, steps_of
from benchmarks.coverage import HF
from benchmarks.studies.launches import latent as studied_latent
from benchmarks.studies.launches import measured_layers
from tests.helpers_command import record_of, refusal, run
from tests.helpers_kept import assert_stays
from tests.helpers_models import scheme_plan
from tests.helpers_refusals import refusals

SHAPE = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8, "vocab_size": 128}
QUICK = {"max_tokens": 32, "batch": 8}


def on_meta(kind, dtype=torch.bfloat16, **sizes):
    """A causal model of transformers, "Llama" or "Mixtral", without weights."""
    config = getattr(transformers, f"{kind}Config")(**sizes)
    with torch.device("meta"):
        return getattr(transformers, f"{kind}ForCausalLM")._from_config(config, dtype=dtype).eval()


@cache
def llama(layers=2, kv_heads=4, dtype=torch.bfloat16, **more):
    return on_meta("Llama", dtype, num_hidden_layers=layers, num_key_value_heads=kv_heads, **{**SHAPE, **more})


def mesh(n, device="h100"):
    return Mesh.from_bandwidths((n,), device=device)


def attention(q, k, v, mask, scale):
    """In float64, head by head; query heads h of H read key heads h // (H / K)."""
    groups = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(groups, 1) for x in (k, v))
    scores = (scale * q.double() @ k.transpose(2, 3)).masked_fill(~mask, -math.inf)
    return (scores.softmax(3) @ v).transpose(1, 2).float()


@pytest.mark.parametrize("stored", [0, 5])
@pytest.mark.parametrize(("new", "known"), [(1, 1), (1, 4), (2, 2), (3, 3)])
@pytest.mark.parametrize("head_dim", [1, 4])
def test_new_tokens_see_the_new_ones_before_them_and_all_stored_ones(stored, new, known, head_dim):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, length, head_dim) for heads, length in ((4, new), (2, known), (2, known)))
    old = [torch.randn(2, 2, stored, head_dim) for _ in range(2)]
    pairs = [Stored(x, y) for x, y in zip((k, v), old)] if stored else [k, v]
    causal = torch.ones(new, known, dtype=torch.bool).tril() if new > 1 else torch.ones(1, known, dtype=torch.bool)
    expected = attention(q, k, v, causal, 0.3)
    expected = expected + attention(q, *old, torch.ones(new, stored, dtype=torch.bool), 0.3) if stored else expected
    found, weights = paged_attention(None, q, *pairs, None, scaling=0.3)
    torch.testing.assert_close(found, expected)
    assert found.is_contiguous() and weights is None and found.shape == (2, new, 4, head_dim)


# -- compressed keys --------------------------------------------------------------------------------------------------------------

RANK, ROTARY, PLAIN, VALUE = 16, 4, 6, 10  # features


@cache
def latent(kind="DeepseekV3", q_rank=32, heads=8):
    """A model of multi-head latent attention, one dense layer and one of experts."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": heads, "num_key_value_heads": heads, "vocab_size": 128}
    ranks = {"q_lora_rank": q_rank, "kv_lora_rank": RANK, "qk_rope_head_dim": ROTARY, "qk_nope_head_dim": PLAIN, "v_head_dim": VALUE}
    experts = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 2, "topk_group": 1}
    return on_meta(kind, num_hidden_layers=2, first_k_dense_replace=1, **sizes, **ranks, **experts)


def sparse():
    model = copy.copy(latent())
    model.config = copy.copy(model.config)
    model.config.index_topk = 4
    return model


@pytest.mark.parametrize(("stored", "copies", "heads"), [(5, 1, 4), (5, 2, 4), (1, 1, 1), (64, 4, 4)])
def test_a_decode_of_compressed_keys_is_that_of_the_keys_and_values_they_stand_for(stored, copies, heads):
    torch.manual_seed(0)
    layer = SimpleNamespace(qk_nope_head_dim=PLAIN, v_head_dim=VALUE, expand_kv=None)
    layer.kv_b_proj = torch.nn.Linear(RANK, heads * (PLAIN + VALUE), bias=False)
    q, new, old = (torch.randn(3, n, length, dims) for n, length, dims in (
        (heads, 1, PLAIN + ROTARY), (1, 1, RANK + ROTARY), (1, stored, RANK + ROTARY),
    ))  # fmt: skip

    def expanded(held):
        keys, values = layer.kv_b_proj(held[..., :RANK]).view(3, -1, heads, PLAIN + VALUE).transpose(1, 2).split((PLAIN, VALUE), 3)
        return torch.cat((keys, held[..., RANK:].expand(-1, heads, -1, -1)), 3), values

    everything = torch.ones(1, 1, dtype=torch.bool)
    expected = attention(q, *expanded(new), everything, 0.3) + attention(q, *expanded(old), everything.expand(1, stored), 0.3)
    held = old.expand(-1, copies, -1, -1)
    found, _ = paged_attention(layer, q, Stored(new[..., :RANK], held), Stored(new[..., RANK:], held), None, scaling=0.3)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(("kind", "q_rank"), [("DeepseekV3", 32), ("DeepseekV3", None), ("Glm4MoeLite", 32)])
def test_compressed_keys_are_on_every_device_and_heads_are_shared_as_megatron_does(kind, q_rank):
    model = latent(kind, q_rank)
    plan = serve_plan(model, 4, **QUICK)
    assert {row.tensor: row.copies for row in plan.rows if row.pipeline == 1} == {1: 1, 2: 2, 4: 4}
    for row in plan.rows:
        if row.pipeline == 1:
            assert row.cache_bytes == -(-8 // row.replicas) * 2 * (RANK + ROTARY) * 32 * 2
    steps = steps_of(model, 4)
    for graph in (steps.prefill(1, 16), steps.decode(8, 16)):
        rows = price_of(steps, graph, mesh(4)).solution.parameters
        layouts = {name.rpartition("self_attn.")[2]: row["layout"] for name, row in rows.items() if "layers.0.self_attn" in name}
        whole = {"kv_a_proj_with_mqa.weight", "kv_a_layernorm.weight", *(("q_a_proj.weight", "q_a_layernorm.weight") if q_rank else ())}
        shared = {"q_b_proj.weight" if q_rank else "q_proj.weight": "S(0)", "kv_b_proj.weight": "S(0)", "o_proj.weight": "S(1)"}
        assert layouts == {**dict.fromkeys(whole, "R"), **shared}
    decoded = [op for op in steps.decode(8, 16).ops if "attention" in op.target]
    assert decoded and all(op.fused.reads[:3] == (1.0, 1.0, READ_AGAIN) for op in decoded)


@pytest.mark.parametrize("case", [("h200", 8, 128, 16384), ("h200", 128, 16, 16384), ("b200", 64, 512, 2048)])
def test_layers_of_latent_attention_take_about_as_long_as_measured(case):
    (measured,) = (row for row in measured_layers() if row[:4] == case)
    figures = studied_latent(measured, None)
    assert abs(figures["error"]) < 0.2, figures


# -- the cache ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tensor", [1, 2, 4, 8])
@pytest.mark.parametrize(("kv_heads", "dtype"), [(2, torch.bfloat16), (4, torch.float32), (8, torch.bfloat16)])
def test_the_bytes_of_the_cache_are_the_formula(kv_heads, dtype, tensor):
    layers, tokens, head_dim = 3, 50, 64 // 8
    kept = cached_layers(llama(layers, kv_heads, dtype))
    heads = kv_heads / tensor if tensor <= kv_heads else 1  # one head on tensor / kv_heads devices
    assert sum(one.bytes(tokens, tensor) for one in kept) == 2 * layers * heads * head_dim * tokens * dtype.itemsize


def test_sliding_layers_keep_their_window():
    assert [one.window for one in cached_layers(load_huggingface(str(HF / "gemma2"), {})[0])] == [8, None]
    one = CachedLayer(6, 8, 4, 2, window=10)
    assert one.bytes(4) == 6 * 12 * 4 * 2 and one.bytes(400, 3) == 2 * 12 * 10 * 2 and one.bytes(400, 12) == 12 * 10 * 2


@pytest.mark.parametrize("tensor", [4, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2))])
def test_the_cache_in_the_graph_of_a_decode_step_has_these_bytes_on_every_device(tensor):
    steps = steps_of(llama())
    graph = steps.decode(8, 16)
    solution = scheme_plan(graph, mesh(tensor), "megatron", baselines=False)
    inputs = [graph.ops[i] for i, op in enumerate(graph.ops) if op.kind == "input" and len(op.output.shape) == 4]
    shards = [tensor if solution.layouts[op.name].outputs[0] == "S(1)" else 1 for op in inputs]
    assert len(inputs) == 4 and set(shards) == {tensor}
    assert sum(op.output.bytes // n for op, n in zip(inputs, shards)) == sum(8 * one.bytes(16, tensor) for one in steps.cache)


@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_an_empty_cache_has_the_shapes_of_one_that_was_filled(kind):
    model = llama()
    made = empty_cache(model, kind, 8, 16)
    filled = transformers.StaticCache(config=model.config, max_cache_len=16) if kind == "static" else transformers.DynamicCache()
    small = transformers.LlamaForCausalLM(model.config).to(torch.bfloat16)
    with torch.no_grad():
        small(input_ids=torch.zeros(8, 15, dtype=torch.int64), past_key_values=filled, use_cache=True)
    empty, full = ([(x.keys.shape, x.values.shape, x.keys.dtype) for x in held.layers] for held in (made, filled))
    assert empty == full


# -- prices -------------------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("tensor", [4, 1])
def test_prices_of_few_layers_compose_to_those_of_all(tensor, monkeypatch):
    steps = steps_of(llama(6))
    monkeypatch.setattr("autoshard.serving.steps.PERIODS", 10**6)  # every layer is in the graph
    full = steps_of(llama(6))
    assert len(steps.blocks) == 3 and len(full.blocks) == 6
    for graphs in ((steps.prefill(1, 16), full.prefill(1, 16)), (steps.decode(8, 16), full.decode(8, 16))):
        ours, theirs = (price_of(one, graph, mesh(tensor)) for one, graph in zip((steps, full), graphs))
        assert ours.seconds == pytest.approx(theirs.seconds, rel=1e-9) and ours.seconds < theirs.solution.cost  # one kernel for q, k, v
        assert ours.layers == pytest.approx(theirs.layers, rel=1e-9) and ours.activations == theirs.activations
        for stages in (1, 2, 4):
            assert [s[2] for s in ours.stages(stages)] == [s[2] for s in theirs.stages(stages)]
            assert [s[1] for s in ours.stages(stages)] == pytest.approx([s[1] for s in theirs.stages(stages)])
        kept = sum(row["local_bytes"] for row in theirs.solution.parameters.values())
        assert ours.stages(1)[0][1] == pytest.approx(kept)


@pytest.mark.parametrize(("kind", "name"), [("decode", "gemma2"), ("prefill", "mixtral")])
def test_one_capture_is_that_of_all_batches(kind, name):
    step = getattr(steps_of(load_huggingface(str(HF / name), {"layers": 1, "dtype": "bfloat16"})[0]), kind)
    assert resized(step(LARGE, 12), 7) == step(7, 12)


def test_fused_projections_are_sharded_by_heads_and_features():
    """Phi-3 holds query, key and value as one matrix, and gate and up: it costs what Llama does, on each of several devices, too."""
    models = on_meta("Phi3", num_hidden_layers=1, num_key_value_heads=4, pad_token_id=0, **SHAPE), llama(1)
    phi, other = (price_of(steps, divided(steps.decode(8, 16)), mesh(2), modules=False) for steps in map(steps_of, models))
    assert (phi.layer_weights, phi.replicated) == (other.layer_weights, 0.0)
    assert phi.layers == pytest.approx(other.layers, rel=0.1)  # one of them launches a pointwise kernel more


@pytest.mark.parametrize("sizes", [(4, 12), (12, 4), (4, 4, 4, 4)])
def test_what_reads_all_features_or_some_twice_keeps_a_matrix_whole(sizes):
    class Fused(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.other = torch.nn.Linear(4, 16), torch.nn.Linear(4, 16, bias=False)

        def forward(self, x):
            read = self.other(x)
            return *self.one(x).split(sizes, -1), read[..., :9], read[..., 8:]

    graph = check(divided(capture(Fused(), (torch.randn(2, 3, 4),), training=False)))
    shapes = {name: graph.ops[i].output.shape for name, i in graph.parameters.items()}
    weights = {f"one.weight.{k}": (n, 4) for k, n in enumerate(sizes)} | {f"one.bias.{k}": (n,) for k, n in enumerate(sizes)}
    assert shapes == weights | {"other.weight": (16, 4)}


@pytest.mark.slow
def test_a_decode_step_takes_as_long_as_reading_weights_and_cache():
    """Of a large model on a device without launches, within what its small ops and the embedding table add or save."""
    model = llama(6, hidden_size=8192, intermediate_size=28672, num_attention_heads=64, vocab_size=2048)
    plan = serve_plan(model, 1, max_tokens=4096, prompt=2048, batch=16)
    (row,) = plan.rows
    read = row.weight_bytes + row.cache_bytes * (3072 / 4096)
    assert row.seconds_per_token == pytest.approx(read / DEVICES["h100"].memory_rate, rel=0.1)
    eager = serve_plan(model, 1, max_tokens=4096, prompt=2048, batch=16, eager=True).rows[0]
    assert eager.seconds_per_token > row.seconds_per_token + 6 * 10 * DEVICES["h100"].launch


@pytest.mark.slow
def test_tied_embeddings_count_once_on_one_stage_and_twice_on_two():
    tied, loose = (serve_plan(llama(4, tie_word_embeddings=t), 2, **QUICK) for t in (True, False))
    table = 128 * 64 * 2
    weights = [{(row.tensor, row.pipeline): row.weight_bytes for row in plan.rows} for plan in (tied, loose)]
    assert weights[1][1, 1] - weights[0][1, 1] == table and weights[1][1, 2] == weights[0][1, 2]


# -- degrees ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("layers", "kv_heads", "devices"), [
    (2, 2, 4), *(pytest.param(4, *one, marks=pytest.mark.slow) for one in ((2, 4), (2, 8), (4, 8), (8, 6), (4, 16))),
])  # fmt: skip
def test_legal_degrees_are_those_of_a_brute_force_check(layers, kv_heads, devices):
    plan = serve_plan(llama(layers, kv_heads), devices, **QUICK)
    degrees = range(1, devices + 1)
    assert {(row.tensor, row.pipeline) for row in plan.rows} == {(t, p) for t in degrees for p in degrees if devices % (t * p) == 0}
    for row in plan.rows:
        t, p = row.tensor, row.pipeline
        legal = p <= layers and 8 % t == 0 and 96 % t == 0 and (kv_heads % t == 0 or t % kv_heads == 0)
        assert row.fits == legal and row.replicas * t * p == devices, row
        assert row.copies == (max(t // kv_heads, 1) if legal else 1)
        if legal:
            assert row.cache_bytes == -(-8 // row.replicas) * -(-layers // p) * 2 * max(kv_heads // t, 1) * 8 * 32 * 2
    speeds = [row.tokens_per_second for row in plan.rows if row.fits]
    assert speeds == sorted(speeds, reverse=True) and [row.fits for row in plan.rows] == sorted((r.fits for r in plan.rows), reverse=True)
    sharded = [row.tensor for row in plan.rows if row.fits and 1 < row.tensor <= kv_heads]  # whose ranks hold different heads
    assert plan.best is plan.rows[0] and plan.solution.mesh.shape == (sharded[0],)


def test_more_devices_than_heads_price_the_copies():
    steps = steps_of(llama(2, 2), 8)
    assert {one.heads for one in steps.cache} == {8}
    price = price_of(steps, steps.prefill(1, 16), mesh(8))
    rows = price.solution.parameters
    assert rows["model.layers.0.self_attn.k_proj.weight"]["layout"] == "S(0)"
    assert rows["model.layers.0.self_attn.k_proj.weight"]["local_bytes"] == 8 * 64 * 2  # one head of 8


@pytest.mark.slow
def test_memory_decides_and_the_most_sequences_are_those_that_fit():
    model = llama(4)
    free = serve_plan(model, 2, **QUICK)
    limit = min(row.memory_bytes for row in free.rows) * 1.01
    tight = serve_plan(model, 2, **QUICK, memory_limit=limit)
    assert 0 < sum(row.fits for row in tight.rows) < len(tight.rows)
    for row in tight.rows:
        assert row.fits == (row.memory_bytes <= limit) == (row.most_sequences >= QUICK["batch"])
        assert row.memory_bytes == row.weight_bytes + row.cache_bytes + row.activation_bytes
        assert row.fits or "the cache is too large" in row.why or "leave no room" in row.why
    assert serve_plan(model, 2, **QUICK, memory_limit=1.0).best is None
    many = serve_plan(model, 2, max_tokens=32, batch=10**9).rows  # whose activations alone are too many
    assert all(0 < row.most_sequences < 10**9 and "the cache is too large" in row.why for row in many)
    assert serve_plan(model, 1, max_tokens=10**11, batch=2).best is None  # more bytes than torch counts at the captured batch


def test_no_sequences_are_served_faster_than_each_of_them_takes():
    answer = 2  # a prompt passes through the stages one after the other, and one sequence can't fill them
    for row in serve_plan(llama(4), 4, max_tokens=4096, prompt=4096 - answer, batch=1).rows:
        assert row.tokens_per_second <= answer / (row.seconds_to_first_token + (answer - 1) * row.seconds_per_token)


def of_hf(name):
    return load_huggingface(str(HF / name), {})[0]


test_what_can_not_be_served_is_one_sentence = refusals(
    (lambda: serve_plan(torch.nn.Linear(2, 2), 2, **QUICK), "the model is a Linear; expected a decoder of transformers"),
    (lambda: serve_plan(of_hf("bert"), 2, **QUICK), "expected a decoder"),
    (lambda: serve_plan(llama(2).model, 2, **QUICK), "LlamaForCausalLM for example, under architectures"),
    (lambda: serve_plan(of_hf("t5"), 2, **QUICK), "expected a decoder"),
    (lambda: serve_plan(of_hf("falcon"), 2, **QUICK), "attention of its own"),
    (lambda: serve_plan(sparse(), 2, **QUICK), "compressed keys of which a step reads few"),
    (lambda: serve_plan(llama(), 2, max_tokens=32, batch=0), "expected"),
    (lambda: serve_plan(llama(), 2, max_tokens=1, batch=8), "expected"),
    (lambda: serve_plan(llama(), 2, max_tokens=10**12, batch=2), "batch is 2 and max_tokens 1000000000000; expected 1e.12 tokens of all"),
    (lambda: serve_plan(llama(), 2, **QUICK, prompt=32), "expected"),
    (lambda: serve_plan(llama(), 2, **QUICK, memory_limit=math.nan), "memory_limit is nan; expected bytes per device above 0"),
    (lambda: serve_plan(llama(), 2, **QUICK, devices_per_node=True), "expected"),
    (lambda: serve_plan(llama(), 2, **QUICK, expert_parallel=True), "LlamaForCausalLM has no experts; leave it out"),
    (lambda: empty_cache(llama(), "paged", 8, 16), "cache is 'paged'; expected static or dynamic"),
    (lambda: CachedLayer(6, 8, 4, 2, window=10).bytes(1, 4), "6 key-value heads and 4 devices: expected that one divides the other"),
)


@pytest.mark.slow
def test_a_model_of_405_billion_parameters_is_planned_in_little_memory():
    model = llama(126, 8, hidden_size=16384, intermediate_size=53248, num_attention_heads=128, vocab_size=128256)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    plan = serve_plan(model, 16, max_tokens=8192, batch=16)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200e3  # kB; its weights are 810 GB
    weights = {row.tensor: row.weight_bytes for row in plan.rows if row.pipeline == 1}
    assert weights[1] == 2 * sum(p.numel() for p in model.parameters())
    assert plan.best is not None and (plan.best.tensor, plan.best.pipeline) == (8, 2)
    assert all(p.is_meta for p in model.parameters())


# -- mixtures of experts -------------------------------------------------------------------------------------------------------------

OF_EXPERTS = {  # a model of transformers and its experts; 6 are not a multiple of 4 devices
    "mixtral": ("Mixtral", {"num_local_experts": 8}),
    "qwen3_moe": ("Qwen3Moe", {"num_experts": 8, "moe_intermediate_size": 32, "head_dim": 8}),
    "six experts": ("Qwen3Moe", {"num_experts": 6, "moe_intermediate_size": 32, "head_dim": 8}),
}


@cache
def mixture(name, layers=2):
    kind, sizes = OF_EXPERTS[name]
    return on_meta(kind, num_hidden_layers=layers, num_key_value_heads=4, num_experts_per_tok=2, **SHAPE, **sizes)


def bytes_by_kind(model):
    """Of experts; of norms and routers, which every device has; of matrices that tensor parallel devices share."""
    kinds = {"experts": 0, "norms": 0, "routers": 0, "shared": 0}
    for name, p in model.named_parameters():
        kind = "experts" if ".experts." in name else "norms" if p.dim() == 1 else "routers" if ".mlp.gate." in name else "shared"
        kinds[kind] += 2 * p.numel()
    return kinds


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_a_step_knows_which_weights_are_of_experts_and_which_every_device_has(name):
    steps, held = steps_of(mixture(name)), bytes_by_kind(mixture(name))
    price = price_of(steps, divided(steps.decode(8, 16)), mesh(2), modules=False)
    assert (price.experts, price.replicated) == (held["experts"] / 2, held["routers"])


def test_stages_have_as_many_layers_as_possible_each_and_the_first_ones_one_more():
    price = StepPrice((1, 2, 4, 8, 16), 100, (10, 20, 40, 80, 160), 1000, 2000, 500, 0, 0, 0, None)
    assert price.stages(1) == [(131, 310 + 1000 + 2000 - 500, range(5))]
    assert price.stages(2) == [(7, 70 + 1000, range(3)), (24 + 100, 240 + 2000, range(3, 5))]
    assert [list(layers) for *_, layers in price.stages(3)] == [[0, 1], [2, 3], [4]]


SHARED = product((("mixtral", 4), ("qwen3_moe", 2), ("qwen3_moe", 4), ("six experts", 4)), (False, True))
SLOW_CASES = [pytest.param(*mixed, together, marks=pytest.mark.slow) for mixed, together in SHARED]


@pytest.mark.parametrize(("name", "devices", "together"), [("mixtral", 2, False), *SLOW_CASES])
def test_the_bytes_of_experts_are_shared_by_the_devices(name, devices, together):
    model = mixture(name)
    held, experts = bytes_by_kind(model), 6 if name == "six experts" else 8
    rows = serve_plan(model, devices, **QUICK, expert_parallel=together).rows
    assert len(rows) == len({(row.tensor, row.pipeline) for row in rows})
    for row in (row for row in rows if row.pipeline == 1):
        t, ranks = row.tensor, row.tensor * row.replicas if together else row.tensor
        if together and experts % ranks:
            assert row.why == f"{experts} experts don't divide by {ranks}"
            continue
        parts = 1 if together else t // math.gcd(t, experts)  # of an expert, each with a row of the router
        assert row.fits and row.expert_bytes == held["experts"] / ranks
        assert row.weight_bytes == held["experts"] / ranks + held["norms"] + parts * held["routers"] + held["shared"] / t
    if (name, devices, together) == ("mixtral", 2, False):
        assert_stays("rooms/serving.json", {f"{row.tensor} {row.pipeline}": row.to_dict() for row in rows})


@pytest.mark.slow
def test_experts_that_no_scheme_shards_would_be_seen(monkeypatch):
    """The control: Megatron without experts has all of them on every device."""
    monkeypatch.setattr("autoshard.serving.step_prices.MEGATRON_EXPERTS", "megatron")
    model = mixture("mixtral", 1)
    (row,) = (row for row in serve_plan(model, 2, **QUICK).rows if row.tensor == 2)
    assert row.expert_bytes == bytes_by_kind(model)["experts"] and row.replicated_bytes > row.expert_bytes


@pytest.mark.slow
def test_mixtral_8x7b_fits_on_2_4_and_8_devices_of_80_gb():
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "vocab_size": 32000}
    model = on_meta("Mixtral", num_hidden_layers=32, num_key_value_heads=8, **sizes)
    total = 2 * sum(p.numel() for p in model.parameters())
    speeds = []
    for devices in (2, 4, 8):
        (row,) = (row for row in serve_plan(model, devices, max_tokens=4096, batch=16).rows if row.tensor == devices)
        assert row.fits and row.weight_bytes == pytest.approx(total / devices, rel=2e-3)
        speeds.append(row.seconds_per_token)
    assert 93e9 < total < 94e9 and speeds == sorted(speeds, reverse=True)


@pytest.mark.slow
def test_experts_of_all_replicas_need_less_memory_and_send_tokens():
    model = mixture("qwen3_moe", 4)
    alone, together = ({(r.tensor, r.pipeline): r for r in serve_plan(model, 4, **QUICK, expert_parallel=e).rows} for e in (False, True))
    assert together[1, 1].expert_bytes == alone[1, 1].expert_bytes / 4 and together[1, 1].weight_bytes < alone[1, 1].weight_bytes
    assert together[4, 1].expert_bytes == alone[4, 1].expert_bytes and together[4, 1].seconds_per_token == alone[4, 1].seconds_per_token


# -- the verb and the options of hf: ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_verb_prints_what_the_function_returns():
    record = record_of("serve-plan", f"hf:{HF}/llama", "--devices", "4", "--max-tokens", "32", "--batch", "8", "--quiet")
    model = load_huggingface(str(HF / "llama"), {"dtype": "bfloat16"})[0]
    plan = autoshard.serve_plan(model, 4, **QUICK)
    assert record["configurations"] == [row.to_dict() for row in plan.rows]
    assert set(record["styles"]) == {"tp_plan", "vllm", "sglang"}
    assert record["styles"]["tp_plan"]["model.layers.*.self_attn.o_proj"] == "rowwise"
    assert record["styles"]["tp_plan"]["lm_head"] == "colwise_gather_output"  # as it is priced: its bytes are divided
    assert json.dumps(record).count("Infinity") == 0


@pytest.mark.slow
def test_the_verb_answers_no_where_nothing_fits_and_shows_why():
    words = ("--devices", "2", "--max-tokens", "32", "--batch", "8", "--memory", "50kB", "--quiet")
    code, shown, _ = run("serve-plan", f"hf:{HF}/llama", *words)
    assert code == 1 and "leave no room for a sequence" in " ".join(shown.split()) and max(map(len, shown.splitlines())) <= 80


def test_quantized_weights_are_said_to_be_counted_whole(tmp_path):
    config = {**json.loads((HF / "llama" / "config.json").read_text()), "quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = ("--devices", "1", "--max-tokens", "32", "--batch", "8", "--set", "layers=1")
    code, _, said = run("serve-plan", f"hf:{tmp_path}", *words)
    assert code == 0 and "quantized (fp8), which isn't priced: they are counted as torch.bfloat16" in " ".join(said.split())


def test_options_of_the_model_are_settings_of_the_model():
    model = ("plan", f"hf:{HF}/llama", "--mesh", "2", "--no-baselines", "--set", "layers=1", "--quiet")
    ours = record_of(*model, "--batch", "4", "--seq", "12", "--dtype", "bfloat16")
    theirs = record_of(*model, "--set", "batch=4", "--set", "seq=12", "--set", "dtype=bfloat16")
    assert ours["fingerprint"] == theirs["fingerprint"] and ours["cost_seconds"] == theirs["cost_seconds"]
    assert "--batch 4 and --set batch=8 are the same; leave one out" in refusal(*model, "--batch", "4", "--set", "batch=8")
    assert "expected one of float64" in refusal(*model, "--dtype", "complex64")


@pytest.mark.slow
def test_a_device_can_be_replaced():
    slow = replace(DEVICES["h100"], memory_bandwidth=1e9)
    plan = serve_plan(llama(), 2, **QUICK, mesh_of=lambda shape: Mesh.from_bandwidths(shape, device=slow, devices_per_node=2))
    assert plan.best.seconds_per_token > serve_plan(llama(), 2, **QUICK).best.seconds_per_token


def test_launches_take_time_unless_a_graph_of_kernels_is_launched_at_once():
    eager, graph = (serve_plan(llama(1), 1, **{**QUICK, "eager": how}).rows[0].seconds_per_token for how in (True, False))
    assert eager > graph + 5 * DEVICES["h100"].launch


def test_the_text_is_of_the_best_rows_and_says_a_reason_once():
    """Of 100,000 devices there are hundreds of pairs of degrees."""
    figures = dict.fromkeys(("seconds_to_first_token", "seconds_per_token", "tokens_per_second", "most_sequences", "replicated_bytes"), 1)
    fits = {"why": "", "fits": True, "copies": 1, **figures, "memory_bytes": 2, "weight_bytes": 1, "cache_bytes": 1, "replicas": 1}
    rows = [{**fits, "tensor": 1, "pipeline": p} for p in range(1, 31)]
    illegal = [(t, p, f"heads 32 doesn't divide by {t}") for t in range(3, 90, 6) for p in (1, 2)]
    illegal += [(1, p, f"32 layers for {p} stages") for p in (40, 50)]
    rows += [{**fits, "fits": False, "memory_bytes": None, "tensor": t, "pipeline": p, "why": why} for t, p, why in illegal]
    asked = {"batch": 1, "max_tokens": 8, "prompt": 4, "model": "m", "devices": 90, "device": "h100", "memory_limit_bytes": 8, "styles": {}}
    lines = as_text(serving_report({**asked, "configurations": rows})).splitlines()
    assert len(lines) < 40 and "and 10 rows that `--json` has" in lines
    text = " ".join(" ".join(lines).split())
    assert "tp 87: heads 32 doesn't divide by that pp 40, pp 50: 32 layers for so many stages" in text and text.count("tp 9,") == 1
