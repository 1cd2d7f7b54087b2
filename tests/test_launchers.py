"""Launchers' configurations: read, checked for legality against plain loops, written, priced and ranked."""

import json
import tomllib
from ast import literal_eval
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import replace
from importlib import import_module
from itertools import pairwise, product
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining.schedules import get_schedule_class
from transformers import AutoConfig

from autoshard.api import check_launch
from autoshard.cli.table import LAUNCHERS as ENDINGS
from autoshard.cost import ATTENTION_TILE
from autoshard.launch import (
    Launch,
    LaunchConfig,
    ModelSizes,
    Overrides,
    Site,
    configuration_text,
    edited_text,
    read_configuration,
    why_illegal,
)  # fmt: skip
from autoshard.launch.best_changes import in_words
from autoshard.launch.blocks_of_stages import counts_of, spread
from autoshard.launch.launch_prices import by_kind, launch_seconds, prices_of
from autoshard.launch.launch_space import launches, structures
from autoshard.launch.legality import LAUNCHERS, broken_rules, legal
from autoshard.launch.legality import PRECISIONS as EXPRESSED
from autoshard.launch.model_sizes import sizes_of_config, sizes_of_module
from autoshard.launch.nanotron import no_key_for
from autoshard.launch.ranking import ranking
from autoshard.launch.runs import FIELDS, PRECISIONS, RECOMPUTE, SCHEDULES, TrainingRuns, distinct
from autoshard.launch.texts import arguments_of, nested
from autoshard.launch.torchtitan import FLAVORS, model_parts
from models import llama
from tests.helpers_kept import assert_stays
from tests.helpers_refusals import refusals

DATA = Path(__file__).parent / "data" / "launchers"
FILES = sorted(path for launcher in LAUNCHERS for path in (DATA / launcher).iterdir())
SMALL = ModelSizes(8, 64, 128, 8, 4, 128)
MIXTURE = ModelSizes(8, 64, 128, 8, 8, 128, experts=8, active=2, expert_ffn=96, shared_ffn=32, dense_layers=1)
LLAMA8, LLAMA70, LLAMA405 = (FLAVORS["llama3", flavor] for flavor in ("8B", "70B", "405B"))
DEEPSEEK = FLAVORS["deepseek_v3", "671B"]
MIXTRAL = ModelSizes(32, 4096, 14336, 32, 8, 32000, experts=8, active=2, expert_ffn=14336)
MODELS = {"small": SMALL, "mixture": MIXTURE, "8B": LLAMA8, "405B": LLAMA405, "671B": DEEPSEEK, "mixtral": MIXTRAL}
MODELS["windows"] = replace(SMALL, window=8, windowed=4)


def name(path):
    return f"{path.parent.name}/{path.name}"


# what the configurations leave to the command line: torchtitan's shard -1, accelerate's model and batch
KNOWN = {
    "torchtitan": Overrides(devices=64), "accelerate": Overrides(sizes=LLAMA8, seq=8192, microbatch=1), "nanotron": Overrides(),
    "deepspeed": Overrides(devices=64, sizes=LLAMA8, seq=8192),
}  # fmt: skip
OF_FILE = {  # what a file leaves open
    "autotp_zero2_auto.json": Overrides(devices=64, sizes=LLAMA8, seq=8192, microbatch=2),
    "llama_70b_zero3.json": Overrides(sizes=FLAVORS["llama3", "70B"], seq=4096),
    "llama3_70b.yaml": Overrides(devices=128, sizes=FLAVORS["llama3", "70B"]),
    "deepseek_v3.yaml": Overrides(sizes=FLAVORS["deepseek_v3", "671B"]),
    "qwen3_moe_30b_former.yaml": Overrides(devices=16, sizes=FLAVORS["qwen3", "30B-A3B"]),
    "fp8_cp.yaml": Overrides(devices=32, sizes=LLAMA8), "ddp.yaml": Overrides(devices=8, sizes=FLAVORS["qwen3", "0.6B"]),
    "pipeline_1f1b.yaml": Overrides(sizes=LLAMA8),
}  # fmt: skip
DEVICES = {"gpt3_175b.sh": 1024, "sc21_figure_13.sh": 64, "sc21_figure_15.sh": 64, "mixtral_8x7b.sh": 64, "gpt_config.yaml": 8}


def described(path, old="", new=""):
    """A file's configuration, with a text in it replaced."""
    text, launcher = path.read_text(), path.parent.name
    assert old in text
    known = OF_FILE.get(path.name) or KNOWN.get(launcher, Overrides(devices=DEVICES.get(path.name)))
    return read_configuration(launcher, text.replace(old, new) if old else text, path.name, known)


# --- legality


def legal_by_hand(a: Launch, m: ModelSizes, launcher: str) -> bool:
    """One launch, one condition per line, in the words of each launcher's own checks."""
    stages, latent = a.pipeline * a.virtual, bool(m.latent)
    microbatches = max(max(a.global_batch // (a.data * a.microbatch), 1) // a.passes, 1)
    counts = [int(n) for n in a.split.split(",")] if "," in a.split else []
    ok = [
        a.data * a.tensor * a.context * a.pipeline == a.devices, a.data % a.shard == 0, m.heads % a.tensor == 0,
        latent or m.kv_heads % a.tensor == 0 or (launcher == "megatron" and a.tensor % m.kv_heads == 0),
        m.ffn % a.tensor == 0, a.global_batch % (a.data * a.microbatch * a.passes) == 0,
        not m.experts or m.expert_ffn % a.expert_tensor == 0, a.context % a.alltoall == 0,
    ]  # fmt: skip
    if a.expert > 1:
        ok += [m.experts > 0 and m.experts % a.expert == 0]
    narrow = {"torchtitan": ["fp8", "fp8_rowwise", "mxfp8"], "megatron": ["fp8", "fp8_blockwise", "mxfp8", "nvfp4"], "accelerate": ["fp8"],
              "nanotron": ["fp8"], "automodel": ["fp8", "fp8_rowwise"]}  # fmt: skip
    kinds = {"torchtitan": ["selective_op", "selective_layer"], "automodel": ["selective_op"],
             "megatron": ["attn", "mlp", "layernorm", "moe_act"] + latent * ["mla_up_proj"]}.get(launcher, [])  # fmt: skip
    ok += [a.recompute in ("none", "full") or {*a.recompute.split("+")} <= {*kinds}]
    ok += [a.precision in ["bf16", *narrow.get(launcher, [])] or (a.precision == "fp16" and launcher not in ("torchtitan", "automodel"))]
    if a.gather8:
        of = {"torchtitan": ["fp8"], "automodel": ["fp8"], "megatron": ["fp8", "fp8_blockwise", "mxfp8"]}.get(launcher, [])
        ok += [a.precision in of and a.zero >= (1 if launcher == "megatron" else 2)]
        ok += [launcher != "megatron" or not a.offload or a.precision == "fp8"]
    if launcher in ("torchtitan", "megatron", "automodel"):
        ok += [len(counts) == stages and sum(counts) == m.layers if counts else stages <= m.layers + 2]
    if launcher == "torchtitan":
        ok += [a.seq % (a.tensor * a.context * 2) == 0, not a.async_tensor or a.compiled]
    if launcher in ("torchtitan", "automodel"):
        if a.pipeline > 1:
            chunks = {"1F1B": a.virtual == 1, "GPipe": a.virtual == 1, "ZBVZeroBubble": a.virtual == 2, "DualPipeV": a.virtual == 2}
            ok += [chunks.get(a.schedule, a.virtual > 1)]
            if a.schedule in ("1F1B", "DualPipeV"):
                ok += [microbatches >= stages]
            if a.schedule in ("Interleaved1F1B", "InterleavedZeroBubble"):
                rounds = max(1, microbatches // a.pipeline)
                ok += [microbatches % rounds == 0]
        if a.expert > 1 and launcher == "torchtitan":
            ok += [a.expert_tensor in (1, a.tensor), (a.shard * a.context * a.tensor) % (a.expert * a.expert_tensor) == 0]
        if a.zero == 0 and a.data > 1:
            ok += [a.tensor == a.context == a.pipeline == 1]
    if launcher == "torchtitan":
        ok += [not a.async_expert or a.recompute == "none"]
    if launcher == "megatron":
        ok += [not a.async_expert or (a.recompute != "full" and (a.pipeline == 1 or a.virtual > 1))]
        ok += [bool(a.split) or m.layers % stages == 0, a.schedule in ("1F1B", "GPipe", "Interleaved1F1B")]
        rest = microbatches % max(a.group, a.pipeline)
        ok += [a.virtual == 1 or a.group == 1 or a.group >= a.pipeline]
        ok += [a.virtual == 1 or (a.pipeline > 1 and max(a.group, a.pipeline) <= microbatches and not 0 < rest < a.pipeline)]
        ok += [(a.data * a.context * a.tensor) % (a.expert * a.expert_tensor) == 0]
        ok += [not m.experts or a.tensor == 1 or a.sequence_parallel]
        of_each = a.data * a.context * a.tensor // (a.expert * a.expert_tensor)
        ok += [not m.experts or a.zero == 0 or of_each % max(a.data // a.shard, 1) == 0]
        ok += [not m.windowed or a.alltoall == a.context]
        ok += [a.alltoall == 1 or (m.heads % (a.tensor * a.alltoall) == 0 == max(m.kv_heads // a.tensor, 1) % a.alltoall)]
    if launcher in ("torchtitan", "nanotron", "automodel"):
        ok += [a.alltoall == 1]
    ok += [not a.states16 or launcher in ("torchtitan", "accelerate", "automodel")]
    if launcher == "automodel":
        ok += [bool(a.split) or m.layers % stages == 0, stages <= m.layers, (a.data * a.context * a.tensor) % a.expert == 0]
        ok += [a.zero == 0 or a.context > 1 or a.shard > 1 or a.data == 1]
    if launcher == "deepspeed":
        ok += [a.pipeline == a.virtual == a.expert == 1, a.zero < 3 or a.tensor == 1, a.zero in (0, 3) or a.shard == a.data]
        ok += [a.zero > 0 or not a.offload, a.context == 1 or a.seq % a.context == 0 == m.heads % (a.tensor * a.context)]
    if launcher in ("megatron", "accelerate", "automodel") and a.context > 1:
        ok += [a.seq % (2 * a.context) == 0]
    if launcher in ("megatron", "nanotron") and a.sequence_parallel:
        ok += [a.seq % (a.tensor * a.context) == 0]
    if launcher == "nanotron":
        ok += [not latent, not m.mtp, m.gated, not m.learned_positions, m.heads * m.head_dim == m.width]
        ok += [a.pipeline <= m.layers, a.virtual == 1, a.expert == 1, a.schedule in ("1F1B", "GPipe", "Interleaved1F1B")]
    if launcher == "accelerate":
        ok += [a.pipeline == 1, a.virtual == 1, a.expert == 1]
        if a.shard == 1 and a.data > 1:
            ok += [a.tensor == a.context == 1]
        ok += [a.recompute == "none" or a.zero > 0 or a.tensor * a.context > 1]
    return all(ok)


def every(rows: TrainingRuns) -> list[Launch]:
    """`rows.launch` of each, column by column."""
    launches = [Launch(*values) for values in zip(*(rows.values[name].tolist() for name in FIELDS))]
    assert (launches[0], launches[-1]) == (rows.launch(0), rows.launch(len(rows) - 1))
    return launches


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("model", MODELS)
def test_legality_of_every_row_is_that_of_plain_conditions(model, launcher):
    sizes, fixed = MODELS[model], Launch(12 if model in ("small", "mixture") else 16, 96, 48)
    splits = structures(fixed, launcher)
    mask = legal(splits, sizes, launcher)
    assert mask.tolist() == [legal_by_hand(launch, sizes, launcher) for launch in every(splits)]
    if launcher == "nanotron" and sizes.latent:
        assert not mask.any()
        return
    rows = every(TrainingRuns.joined(launches(splits, sizes, launcher)))
    assert all(legal_by_hand(launch, sizes, launcher) for launch in rows)
    assert len(set(rows)) == len(rows) > 0


@settings(max_examples=150, deadline=None)
@given(
    launcher=st.sampled_from(LAUNCHERS), model=st.sampled_from(sorted(MODELS)), devices=st.sampled_from([1, 6, 8, 64]),
    batch=st.integers(1, 40), microbatch=st.integers(1, 3), counts=st.lists(st.sampled_from([1, 1, 2, 3, 4, 8, 16]), min_size=8,
    max_size=8),
    zero=st.integers(0, 3), schedule=st.sampled_from(SCHEDULES), seq=st.sampled_from([6, 64, 96]), flags=st.tuples(*[st.booleans()] * 7),
    precision=st.sampled_from(["bf16", *sorted(PRECISIONS.keys() - {"fp32"})]),
    recompute=st.sampled_from(["none", "full", "selective_op", "attn", "mla_up_proj+moe_act"]), group=st.integers(1, 5),
    split=st.sampled_from(["", "ends", "2,2,2,2", "3,5"]), passes=st.integers(1, 3), alltoall=st.sampled_from([1, 1, 1, 2, 4]),
)  # fmt: skip
def test_legality_of_any_launch(
    launcher, model, devices, batch, microbatch, counts, zero, schedule, seq, flags, precision, split, passes, recompute, group, alltoall
):
    data, shard, tensor, context, expert, expert_tensor, pipeline, virtual = counts
    launch = Launch(
        devices, seq, batch, microbatch, data, shard, zero, tensor, context, expert, expert_tensor, pipeline, virtual, schedule,
        sequence_parallel=flags[0], compiled=flags[1], async_tensor=flags[2], split=split, passes=passes,
        async_expert=flags[3], recompute=recompute, group=group, offload=flags[4], precision=precision, gather8=flags[5],
        alltoall=alltoall, states16=flags[6],
    )  # fmt: skip
    reasons = why_illegal(launch, MODELS[model], launcher)
    assert (not reasons) == legal_by_hand(launch, MODELS[model], launcher)
    assert all(reason.count(".") == 0 and len(reason) < 160 for reason in reasons)


def crossed(fixed, choices):
    """Every combination of the choices, the last one changing fastest; other fields as in `fixed`."""
    grids = np.meshgrid(*(np.arange(len(options)) for options in choices.values()), indexing="ij")
    varied = {name: np.array(options)[grid.ravel()] for (name, options), grid in zip(choices.items(), grids)}
    return TrainingRuns({key: varied.get(key, np.full(grids[0].size, value)) for key, value in vars(fixed).items()})


def test_every_rule_forbids_something():
    broken, every, told = set(), {}, {}
    choices = {
        "data": [1, 3, 8], "shard": [1, 2], "zero": [0, 2, 3], "tensor": [1, 3, 16], "context": [1, 2], "pipeline": [1, 4, 12],
        "virtual": [1, 2, 3],
        "expert": [1, 2, 3, 8], "schedule": list(SCHEDULES), "async_tensor": [False, True], "sequence_parallel": [False, True],
        "expert_tensor": [1, 5], "split": ["", "4,4"], "async_expert": [False, True],
        "group": [1, 2], "alltoall": [1, 2, 3], "compiled": [False, True],
    }  # fmt: skip
    choices |= {"precision": sorted(PRECISIONS), "gather8": [False, True], "recompute": RECOMPUTE, "states16": [False, True]}
    choices["offload"] = [False, True]
    rng, number = np.random.default_rng(0), 25_000
    fixed = {key: np.full(number, value) for key, value in vars(Launch(48, 50, 27, 3)).items()}
    rows = TrainingRuns(fixed | {key: rng.choice(options, number) for key, options in choices.items()})
    for launcher in LAUNCHERS:
        for name, sizes in (("dense", SMALL), ("mixture", MIXTURE), ("latent", DEEPSEEK), ("windows", MODELS["windows"])):
            mask, rules = broken_rules(rows, sizes, launcher)
            told[f"{launcher} {name}"] = [f"{rule.name}: {one.sum()}" for rule, one in zip(rules, mask)]
            broken |= {id(rule) for rule, one in zip(rules, mask) if one.any()}
            every |= {id(rule): rule.name for rule in rules}
    assert {every[one] for one in every.keys() - broken} == set()
    assert_stays("rooms/legality.json", told)  # how many launches each rule forbids


SITES = [("h100", "bf16"), ("b200", "nvfp4"), ("mi300x", "fp8"), ("l40s", "fp16")]  # or bf16 where the launcher lacks that


ON_SITES = [  # of each launcher one in the quick suite
    pytest.param(launcher, *site, marks=[pytest.mark.slow] * ((k + j) % 4 > 0))
    for k, launcher in enumerate(LAUNCHERS) for j, site in enumerate(SITES)
]  # fmt: skip


@pytest.mark.parametrize(("launcher", "device", "precision"), ON_SITES)
def test_the_seconds_and_bytes_of_every_launch_are_sums_of_parts(launcher, device, precision):
    precision = precision if precision in EXPRESSED[launcher] else "bf16"
    for sizes in (SMALL, MIXTRAL, ModelSizes(7, 1000, 3001, 10, 5, 32003), ModelSizes(12, 768, 3072, 12, 12, 50257, gated=False)):
        compiled = device == "b200" and launcher not in ("megatron", "nanotron")
        fixed = Launch(64, 2048, 64, precision=precision, compiled=compiled, async_expert=device == "mi300x")
        found = list(launches(structures(fixed, launcher), sizes, launcher))
        if launcher == "nanotron" and no_key_for(sizes):
            assert not found
            continue
        rows = TrainingRuns.joined(found)
        parts = launch_seconds(rows, sizes, Site(device), launcher)
        prices = prices_of(rows, sizes, Site(device), launcher)
        assert len(rows) and np.allclose(sum(parts.values()), prices.seconds, rtol=1e-12) and (prices.mfu < 1).all()
        assert all((seconds >= -1e-9 * prices.seconds).all() for seconds in parts.values())
        apart, held = by_kind(rows[:1], sizes, Site(device), launcher)
        assert sum(apart.values()) == pytest.approx(prices.seconds[0]) and sum(held.values()) == pytest.approx(prices.bytes[0])


# --- sizes


@pytest.mark.parametrize("function, flavor", [("llama3_8b", "8B"), ("llama3_70b", "70B"), ("llama3_405b", "405B")])
def test_sizes_of_a_module_are_those_of_the_published_model(function, flavor):
    module, _ = getattr(llama, function)()
    sizes = sizes_of_module(module)
    assert sizes == FLAVORS["llama3", flavor]
    norms = sum(p.numel() for p in module.parameters() if p.dim() == 1)
    assert sizes.parameters == sum(p.numel() for p in module.parameters()) - norms


@pytest.mark.parametrize("folder", ["llama", "gpt2", "mixtral", "deepseek_v3", "qwen3", "qwen3_moe", "gemma", "phi3"])
def test_sizes_of_a_config_count_the_matrices_of_its_module(folder):
    from autoshard.capture.huggingface import load_huggingface
    from autoshard.reading import data_of

    path = Path(__file__).parent / "data" / "hf" / folder
    module, _ = load_huggingface(str(path), {})
    sizes = sizes_of_config(data_of(path / "config.json", "config"))
    named = dict(module.named_parameters())
    routers = sum(p.numel() for key, p in named.items() if key.endswith(("gate.weight", "router.weight")))
    matrices = sum(p.numel() for p in named.values() if p.dim() > 1) - routers
    positions = sum(p.numel() for key, p in named.items() if "wpe" in key)
    assert sizes.parameters == matrices - positions


OF_CONFIGS = {  # the sizes in a published config, and the billions of parameters of its model
    "falcon 4544 32 71 0 65024 multi_query=1": 6.92,
    "falcon 8192 60 128 0 65024 multi_query=1 num_kv_heads=8 new_decoder_architecture=1": 41.3,
    "starcoder2 3072 30 24 12288 49152 num_key_value_heads=2": 3.03,
    "nemotron 6144 32 48 24576 256000 num_key_value_heads=8": 15.6,
    "xlm-roberta 1024 24 16 4096 250002 attention_probs_dropout_prob=0.1": 0.559,
    "camembert 768 12 12 3072 32005 attention_probs_dropout_prob=0.1": 0.11,
    "gpt_neo 2560 32 0 0 50257 num_heads=20": 2.65,
    "gpt_bigcode 6144 40 48 24576 49152 multi_query=1": 15.5,
    "bitnet 2560 30 20 6912 128256 num_key_value_heads=5 tie_word_embeddings=1": 2.4,
    "llama4_text 5120 48 40 8192 202048 intermediate_size_mlp=16384 num_key_value_heads=8 num_local_experts=16": 107.8,
    "llama4_text 5120 48 40 8192 202048 intermediate_size_mlp=16384 num_key_value_heads=8 num_local_experts=128 "
    "interleave_moe_layer_step=2": 400.7,
    "qwen3_moe 2048 48 32 6144 151936 num_key_value_heads=4 head_dim=128 num_experts=128 moe_intermediate_size=768": 30.5,
    "qwen3_moe 2048 48 32 6144 151936 num_key_value_heads=4 head_dim=128 num_experts=128 moe_intermediate_size=768 "
    "mlp_only_layers=[0,1,50]": 29.4,
    "glm4_moe 2048 48 32 6144 151936 num_key_value_heads=4 head_dim=128 num_experts=128 moe_intermediate_size=768 "
    "mlp_layer_types=['dense','dense','sparse']": 29.4,
    "hunyuan_v1_moe 4096 32 32 3072 128167 num_key_value_heads=8 head_dim=128 num_experts=64 moe_topk=[8,8] num_shared_expert=[1,1] "
    "moe_intermediate_size=[3072,3072] tie_word_embeddings=1": 80.4,
    "granitemoeshared 512 6 8 1536 32000 num_key_value_heads=2 num_local_experts=8 shared_intermediate_size=1024": 0.1594,
}  # fmt: skip


@pytest.mark.parametrize("config", OF_CONFIGS)
def test_sizes_of_a_config_count_published_parameters(config):
    kind, *sizes = config.split()
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
    more = dict(pair.split("=") for pair in sizes[5:])
    settings = {name: literal_eval(text) for name, text in [*zip(names, sizes), *more.items()]}
    found = sizes_of_config({"model_type": kind} | {name: value for name, value in settings.items() if value})
    assert found.parameters / 1e9 == pytest.approx(OF_CONFIGS[config], rel=0.01)


LAYERS = {"num_hidden_layers": 12, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96, "vocab_size": 128}
WINDOWED = {  # of a config's keys: tokens that windowed attention sees, and layers that have it
    "model_type=mistral sliding_window=8": (8, 12), "model_type=gemma2 sliding_window=8": (8, 6),
    "model_type=cohere2 sliding_window=8": (8, 9),
    "model_type=gemma3_text sliding_window=8": (8, 10), "model_type=gemma3_text sliding_window=8 sliding_window_pattern=3": (8, 8),
    "model_type=llama4_text attention_chunk_size=9": (9, 9),
    "model_type=qwen2 use_sliding_window=True sliding_window=8 max_window_layers=9": (8, 3),
    "model_type=qwen2 sliding_window=8 max_window_layers=9": (0, 0),
    "sliding_window=8 layer_types=['sliding_attention','full_attention']": (8, 1),
    "model_type=mistral sliding_window=8 use_sliding_window=False": (0, 0), "model_type=mistral": (0, 0),
    "model_type=mistral sliding_window=0": (0, 0), "model_type=gemma2 sliding_window=-1": (0, 0),
    "model_type=gpt_oss sliding_window=8 layer_types=['sliding_attention']": None, "model_type=unknown sliding_window=8": None,
    "model_type=mistral sliding_window=8 index_topk=9": None,
}  # fmt: skip


@pytest.mark.parametrize("config", WINDOWED)
def test_windows_of_attention_are_read_where_it_is_known_which_layers_have_them(config):
    pairs = (pair.split("=") for pair in config.split())
    sizes = sizes_of_config({**LAYERS, **{name: value if name == "model_type" else literal_eval(value) for name, value in pairs}})
    assert (sizes.window, sizes.windowed) == (WINDOWED[config] or (0, 0))
    assert bool(sizes.not_counted(100)) == (WINDOWED[config] is None)


@pytest.mark.parametrize("kind", ["gemma2", "gemma3_text", "cohere2", "olmo3", "ministral", "qwen2", "qwen3"])
@pytest.mark.parametrize("option", [{}, {"use_sliding_window": True, "max_window_layers": 7}], ids=["default", "asked for"])
def test_the_layers_with_windows_are_those_of_transformers(kind, option):
    settings = {"num_hidden_layers": 12, "sliding_window": 8, **(option if kind.startswith("qwen") else {})}
    expected = AutoConfig.for_model(kind, **settings).layer_types.count("sliding_attention")
    assert sizes_of_config({**LAYERS, "model_type": kind, **settings}).windowed == expected


@pytest.mark.parametrize("seq, window", [(1024, 128), (1024, 512), (4096, 1), (4096, 4000), (512, 512), (512, 4096)])
def test_the_scores_that_a_window_leaves_are_those_of_tiles_that_it_reaches(seq, window):
    """Against a count of the tiles of 16 x 16 queries and keys that hold a score, for tiles of an eighth of all sizes."""
    side, most = 16, max(1, window // 8)
    query, key = np.ogrid[: seq // 8, : seq // 8]
    tiles = [
        ((key <= query) & (query - key < w)).reshape(seq // 8 // side, side, -1, side).any((1, 3)).sum() for w in (most, seq)
    ]  # fmt: skip
    sizes = ModelSizes(4, 64, 96, 4, 4, 128, window=window, windowed=3)
    assert sizes.scores(seq, ATTENTION_TILE) == pytest.approx(1 - 3 / 4 * (1 - tiles[0] / tiles[1]), abs=0.05)
    assert replace(sizes, windowed=0).scores(seq, ATTENTION_TILE) == 1
    of_query = np.minimum(np.arange(seq) + 1, window).sum() / np.arange(1, seq + 1).sum()
    assert sizes.scores(seq) == pytest.approx(1 - 3 / 4 * (1 - of_query), abs=1e-3)
    assert sizes.flops_per_token(seq) < replace(sizes, windowed=0).flops_per_token(seq) or window >= seq


@pytest.mark.parametrize("seq, chunk", [(4096, 4096), (8192, 4096), (6000, 4096), (512, 4096), (4096, 16)])
def test_the_scores_that_chunks_leave_are_those_within_each(seq, chunk):
    sizes = ModelSizes(4, 64, 96, 4, 4, 128, window=chunk, windowed=3, chunked=True)
    of_query = (np.arange(seq) % chunk + 1).sum() / np.arange(1, seq + 1).sum()
    assert sizes.scores(np.array([seq]))[0] == pytest.approx(1 - 3 / 4 * (1 - of_query), abs=1e-3)


def test_windows_are_written_for_megatron_where_every_so_many_layers_see_all():
    for windowed, more in ((0, []), (32, ["1023,0"]), (16, ["1023,0", "2"]), (27, ["1023,0", "6"]), (11, [])):
        sizes = replace(LLAMA8, window=1024, windowed=windowed)
        text = configuration_text("megatron", LaunchConfig(Launch(8, 4096, 8, data=8), sizes))
        said = arguments_of(text)
        assert [*said.get("window-size", []), *said.get("window-attn-skip-freq", [])] == more
        assert read_configuration("megatron", text, "a.sh", Overrides(devices=8)).sizes.windowed == (windowed if more else 0)


def test_kernels_with_windows_take_less_and_masks_as_long():
    def attention(launcher: str, **more) -> float:
        run = TrainingRuns.of([Launch(devices=8, seq=32768, global_batch=8, shard=8, zero=3)])
        return float(launch_seconds(run, replace(LLAMA8, **more), Site(), launcher)["attention"][0])

    for launcher in ("megatron", "torchtitan", "automodel"):
        assert attention(launcher, window=1024, windowed=32) < 0.08 * attention(launcher)
        assert attention(launcher, window=1024, windowed=16) == pytest.approx(
            (attention(launcher) + attention(launcher, window=1024, windowed=32)) / 2
        )
        assert attention(launcher, window=40000, windowed=32) == attention(launcher)
    assert attention("accelerate", window=1024, windowed=32) == attention("accelerate")


def test_what_no_figure_counts_of_a_model_is_said():
    llama = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96, "vocab_size": 128}
    towers = sizes_of_config({"vision_config": {"depth": 3}, "text_config": llama | {"sliding_window": 128}})
    alone, windowed = towers.uncounted
    assert alone == ("vision_config: of the model, its language model alone is counted", 0)
    assert windowed == ("sliding_window 128: attention is counted over all tokens", 128)
    assert towers.not_counted(128) == [alone[0]] and towers.not_counted(129) == [alone[0], windowed[0]]
    assert LaunchConfig(Launch(8, 129, 8), towers, ("before",)).to_dict("megatron")["not_counted"] == ["before", alone[0], windowed[0]]
    assert sizes_of_config(llama | {"sliding_window": 128, "use_sliding_window": False}).uncounted == ()
    assert sizes_of_config(llama | {"model_type": "afmoe"}).uncounted[0][0].startswith("model_type afmoe: attention is counted as")


def test_settings_in_groups_are_read():
    dbrx = {"d_model": 6144, "n_layers": 40, "n_heads": 48, "vocab_size": 100352, "attn_config": {"kv_n_heads": 8},
            "ffn_config": {"ffn_hidden_size": 10752, "moe_num_experts": 16, "moe_top_k": 4}}  # fmt: skip
    assert sizes_of_config(dbrx).parameters == pytest.approx(131.6e9, rel=0.001)


def test_published_sizes():
    """Parameters as published: 8.03e9, 70.6e9, 405.9e9; DeepSeek-V3 671e9 of which 37e9 active, Mixtral 46.7e9 of which 12.9e9."""
    assert [round(m.parameters / 1e9, 1) for m in (LLAMA8, LLAMA70, LLAMA405)] == [8.0, 70.6, 405.8]
    assert [round(x / 1e9, 1) for x in (DEEPSEEK.parameters, DEEPSEEK.active_parameters)] == [670.9, 37.4]
    assert [round(x / 1e9, 1) for x in (MIXTRAL.parameters, MIXTRAL.active_parameters)] == [46.7, 12.9]


# --- configurations


def test_there_are_six_configurations_of_each_launcher():
    assert [len([path for path in FILES if path.parent.name == launcher]) for launcher in LAUNCHERS] == [6] * len(LAUNCHERS)


@pytest.mark.parametrize("path", FILES, ids=name)
def test_a_published_configuration_is_legal(path):
    one = described(path)
    assert why_illegal(one.launch, one.sizes, path.parent.name) == ()


FACTS = {  # devices, global batch, (data, shard, zero, tensor, context, expert, pipeline, virtual), microbatch, recompute, precision
    "torchtitan/llama3_8b.toml": (64, 64, (64, 64, 3, 1, 1, 1, 1, 1), 1, "selective_op", "bf16"),
    "torchtitan/llama3_70b.toml": (64, 64, (8, 8, 3, 8, 1, 1, 1, 1), 8, "full", "bf16"),
    "torchtitan/llama3_405b.toml": (64, 16, (8, 8, 3, 8, 1, 1, 1, 1), 2, "full", "fp8"),
    "torchtitan/llama3_debugmodel.toml": (64, 512, (64, 64, 3, 1, 1, 1, 1, 1), 8, "selective_layer", "bf16"),
    "torchtitan/deepseek_v3_671b.json": (64, 256, (64, 64, 3, 1, 1, 1, 1, 1), 4, "selective_op", "bf16"),
    "megatron/gpt3_175b.sh": (1024, 1536, (8, 1, 0, 8, 1, 1, 16, 1), 1, "none", "fp16"),
    "megatron/llama3_8b_fp8.sh": (8, 128, (8, 8, 1, 1, 1, 1, 1, 1), 1, "none", "fp8"),
    "megatron/mixtral_8x7b.sh": (64, 256, (16, 16, 1, 1, 1, 8, 4, 1), 1, "full", "bf16"),
    "megatron/sc21_figure_13.sh": (64, 32, (1, 1, 0, 32, 1, 1, 2, 1), 1, "full", "fp16"),
    "megatron/gpt_config.yaml": (8, 128, (8, 1, 0, 1, 1, 1, 1, 1), 2, "none", "bf16"),
    "accelerate/nd.yaml": (8, 2, (2, 2, 3, 1, 4, 1, 1, 1), 1, "none", "bf16"),
    "accelerate/tp_hsdp.yaml": (8, 4, (4, 2, 3, 2, 1, 1, 1, 1), 1, "none", "bf16"),
    "accelerate/cp.yaml": (8, 1, (1, 1, 3, 1, 8, 1, 1, 1), 1, "full", "bf16"),
    "accelerate/fsdp.yaml": (2, 2, (2, 2, 3, 1, 1, 1, 1, 1), 1, "none", "bf16"),
    "accelerate/multi_gpu.yaml": (2, 2, (2, 1, 0, 1, 1, 1, 1, 1), 1, "none", "bf16"),
    "nanotron/tiny_llama.yaml": (8, 4, (2, 1, 0, 2, 1, 1, 2, 1), 2, "none", "bf16"),
    "nanotron/llama3.2_3b.yaml": (4, 16, (2, 1, 0, 2, 1, 1, 1, 1), 2, "none", "bf16"),
    "nanotron/smollm1_135m.yaml": (64, 512, (64, 1, 0, 1, 1, 1, 1, 1), 8, "none", "bf16"),
    "deepspeed/llama_70b_zero3.json": (32, 256, (32, 32, 3, 1, 1, 1, 1, 1), 1, "none", "bf16"),
    "deepspeed/autotp_zero2_auto.json": (64, 32, (16, 16, 2, 4, 1, 1, 1, 1), 2, "none", "bf16"),
    "deepspeed/zero2_offload_fp16.json": (64, 512, (64, 64, 2, 1, 1, 1, 1, 1), 4, "none", "fp16"),
    "deepspeed/mics.json": (64, 128, (64, 8, 3, 1, 1, 1, 1, 1), 2, "none", "bf16"),
    "deepspeed/ulysses_zero1.json": (64, 32, (8, 8, 1, 1, 8, 1, 1, 1), 1, "none", "bf16"),
    "deepspeed/zero0_checkpointing.json": (64, 64, (64, 1, 0, 1, 1, 1, 1, 1), 1, "full", "bf16"),
    "automodel/llama3_70b.yaml": (128, 128, (8, 8, 2, 4, 1, 1, 4, 5), 1, "full", "bf16"),
    "automodel/qwen3_moe_30b_former.yaml": (16, 512, (16, 16, 3, 1, 1, 8, 1, 1), 4, "full", "bf16"),
    "automodel/deepseek_v3.yaml": (128, 512, (16, 16, 2, 1, 1, 16, 8, 3), 1, "none", "bf16"),
    "automodel/fp8_cp.yaml": (32, 64, (16, 8, 2, 1, 2, 1, 1, 1), 1, "selective_op", "fp8_rowwise"),
    "automodel/ddp.yaml": (8, 32, (8, 1, 0, 1, 1, 1, 1, 1), 2, "none", "bf16"),
    "automodel/pipeline_1f1b.yaml": (32, 256, (4, 4, 2, 2, 1, 1, 4, 1), 2, "none", "bf16"),
}  # fmt: skip


@pytest.mark.parametrize("file", FACTS)
def test_a_configuration_means_what_it_says(file):
    a = described(DATA / file).launch
    degrees = (a.data, a.shard, a.zero, a.tensor, a.context, a.expert, a.pipeline, a.virtual)
    assert (a.devices, a.global_batch, degrees, a.microbatch, a.recompute, a.precision) == FACTS[file]


@pytest.mark.parametrize("frequency, expert_layers", [
    ("1", 8), ("2", 4), ("3", 3), ("([0]*3+[1]*5)", 5), ("[0]*3+[1]*5", 5), ("([0,1]*4)", 4), ("'([0]*1+[1]*1)*4'", 4), ("[1]*5+[0]*3", 5),
    ("([1]*3+[0]*1)*2", 6), ("[0, 0, 1, 1, 1, 1, 1, 1]", 6), ("([0] + [1]*7)", 7),
])  # fmt: skip
def test_a_pattern_of_experts_counts_the_layers_that_have_them(frequency, expert_layers):
    sizes = "--num-layers 8 --hidden-size 64 --num-attention-heads 2 --ffn-hidden-size 128 --swiglu --num-experts 4"
    text = f"--nproc_per_node 8 {sizes} --moe-layer-freq {frequency} --micro-batch-size 1"
    assert read_configuration("megatron", text, "a.sh").sizes.expert_layers == expert_layers


def test_nanotrons_mixture_has_its_own_defaults_and_layers():
    text = (DATA / "nanotron" / "tiny_llama.yaml").read_text().replace("    hidden_act:", "    moe_config: {%s}\n    hidden_act:")
    assert "%s" in text
    rows = {"top_k: 1": (8, 1, 1408, 0, 0), "num_experts: 4, enable_shared_expert: true": (4, 2, 1408, 5632, 0),
            "layers: [1], moe_intermediate_size: 64": (8, 2, 64, 0, 1)}  # fmt: skip
    for moe, sizes in rows.items():
        m = read_configuration("nanotron", text % moe, "a.yaml").sizes
        assert (m.experts, m.active, m.expert_ffn, m.shared_ffn, m.dense_layers) == sizes
    more = ({"mtp": 1}, {"learned_positions": True}, {"gated": False}, {"head_dim": 64}, {"qk_norm": True})
    further = (replace(LLAMA8, **one) for one in more)
    for other in (DEEPSEEK, *further):
        with pytest.raises(ValueError, match="the first one: nanotron has no key for latent attention"):
            ranking(Launch(8, 64, 8), other, Site(), "nanotron")
        with pytest.raises(ValueError, match="no key for latent attention"):
            configuration_text("nanotron", LaunchConfig(Launch(8, 64, 8), other))


def test_a_nemo_file_is_read_as_nemo_resolves_it():
    model = "encoder_seq_length: 64\n  num_layers: 2\n  hidden_size: 64\n  num_attention_heads: 4\n  vocab_size: 128\n"
    resolved = "ffn_hidden_size: ${multiply:4, ${.hidden_size}}\n  optim: {name: distributed_fused_adam}\n"
    text = f"model:\n  {model}  activation: %s\n  {resolved}"
    for activation, gated in (("geglu", True), ("fast-swiglu", True), ("squared-relu", False)):
        one = read_configuration("megatron", text % activation, "a.yaml", Overrides(devices=8))
        assert (one.sizes.ffn, one.sizes.gated, one.not_counted) == (256, gated, ())
    with pytest.raises(ValueError, match="^a.yaml has an encoder and a decoder"):
        read_configuration("megatron", text % "gelu" + "  encoder: {}\n  decoder: {}\n", "a.yaml", Overrides(devices=8))


def test_a_gated_mlp_of_megatron_has_several_names():
    for flag, gated, ffn in (("--swiglu", True, 128), ("--quick-geglu", True, 256), ("--squared-relu", False, 256)):
        text = f"--num-layers 2 --hidden-size 64 --num-attention-heads 4 --vocab-size 128 {flag}"
        sizes = read_configuration("megatron", text, "a.sh", Overrides(devices=8)).sizes
        assert (sizes.gated, sizes.ffn) == (gated, ffn)


def test_what_a_file_leaves_out_is_the_default_of_its_launcher():
    plain, titan = (DATA / "nanotron" / "tiny_llama.yaml").read_text(), DATA / "torchtitan" / "llama3_8b.toml"
    assert read_configuration("nanotron", plain.replace("pp_engine: 1f1b", ""), "a.yaml").launch.schedule == "GPipe"
    assert described(titan, 'selective_ac_option = "op"', "").launch.recompute == "selective_layer"
    mics = DATA / "deepspeed" / "mics.json"
    shards = [described(mics, '"mics_shard_size": 8', f'"mics_shard_size": {size}').launch.shard for size in (-1, 1, 2)]
    assert shards == [described(mics).launch.data, 1, 2]


def test_a_recipe_of_megatron_bridge_is_read_as_its_fields_say():
    path = DATA / "recipes" / "deepseek_v3_h100_fp8.yaml"
    text, known = path.read_text(), Overrides(devices=1024)
    one = read_configuration("megatron", text, path.name, known)
    a, sizes = one.launch, replace(DEEPSEEK, kv_heads=128, mtp=1)
    assert (a.zero, a.shard, a.recompute, a.precision, a.gather8) == (1, 64, "mla_up_proj", "fp8_blockwise", False)
    assert (a.deepep, a.virtual, a.split.count(",")) == (True, 4, 31)
    assert (a.tensor, a.pipeline, a.expert, a.expert_tensor, a.global_batch, one.sizes) == (2, 8, 64, 1, 8192, sizes)
    assert why_illegal(a, sizes, "megatron") == () and edited_text("megatron", one, text, path.name, known) == text
    grouped = read_configuration("megatron", text.replace("num_query_groups: 128", "num_query_groups: 8"), path.name, known)
    assert grouped.sizes.kv_heads == 8
    full = edited_text("megatron", replace(one, launch=replace(a, recompute="full")), text, path.name, known)
    assert set(full.splitlines()) - set(text.splitlines()) == {
        "  recompute_granularity: full", "  recompute_method: uniform", "  recompute_num_layers: 1",
    }  # fmt: skip


def test_megatron_may_recompute_some_blocks_of_each_stage():
    """By method block the first of each; they lie between none and all, and what is written says as many."""
    path = DATA / "megatron" / "mixtral_8x7b.sh"
    uniform = "--recompute-method uniform --recompute-num-layers 1"
    texts = [path.read_text().replace(uniform, f"--recompute-method block --recompute-num-layers {n}") for n in (0, 2, 4, 8, 100)]
    configs = [read_configuration("megatron", text, path.name, Overrides(devices=32)) for text in (*texts, path.read_text())]
    assert [config.launch.recompute for config in configs] == ["none", *["full"] * 5]
    runs = TrainingRuns.of([config.launch for config in configs])
    prices = prices_of(runs, configs[0].sizes, Site(), "megatron")
    assert (np.diff(prices.seconds[:4]) > 0).all() and (np.diff(prices.bytes[:4]) < 0).all()
    assert prices.seconds[3] == prices.seconds[4] == prices.seconds[5] and prices.bytes[3] == prices.bytes[5]
    one = configs[1]
    assert read_configuration("megatron", configuration_text("megatron", one), "a.sh", Overrides(devices=32)).launch == one.launch
    assert edited_text("megatron", one, path.read_text(), path.name, Overrides(devices=32)) == texts[1]


ILLEGAL = [  # file, text, its replacement, the reason
    ("torchtitan/llama3_8b.toml", "tensor_parallel_degree = 1", "tensor_parallel_degree = 16", "8 key-value heads do not divide by tp 16"),
    ("torchtitan/llama3_8b.toml", "seq_len = 8192", "seq_len = 8191", "the sequence 8191 does not divide by 2 x tp 1 x cp 1"),
    ("torchtitan/llama3_8b.toml", "shard_degree = -1", "shard_degree = 3", "is 3 devices, but there are 64"),
    ("torchtitan/llama3_70b.toml", "pipeline_parallel_degree = 1", "pipeline_parallel_degree = 128", "fewer than pp 128"),
    ("torchtitan/llama3_405b.toml", "enable = true", "enable = false", "asynchronous tensor parallelism needs compile"),
    ("torchtitan/deepseek_v3_16b.toml", "expert_parallel_degree = 1", "expert_parallel_degree = 48", "64 experts do not divide by ep 48"),
    ("torchtitan/deepseek_v3_671b.json", '"tensor_parallel_degree": 1', '"tensor_parallel_degree": 7',
     "128 attention heads do not divide by tp 7"),
    ("megatron/gpt3_175b.sh", "--pipeline-model-parallel-size 16", "--pipeline-model-parallel-size 64", "96 layers do not divide by pp 64"),
    ("megatron/llama3_8b_fp8.sh", "TP_SIZE=1", "TP_SIZE=3", "tp 3 is no multiple or divisor of 8 key-value heads"),
    ("megatron/llama3_8b_fp8.sh", "GLOBAL_BATCH_SIZE:-128", "GLOBAL_BATCH_SIZE:-100", "the global batch 100 does not divide by dp 8"),
    ("megatron/mixtral_8x7b.sh", "--expert-model-parallel-size 8", "--expert-model-parallel-size 3", "8 experts do not divide by ep 3"),
    ("megatron/gpt3_175b.sh", "--tensor-model-parallel-size 8",
     "--num-virtual-stages-per-pipeline-rank 5 --tensor-model-parallel-size 8", "5 virtual"),
    ("accelerate/nd.yaml", "tp_size: 1", "tp_size: 16", "8 key-value heads do not divide by tp 16"),
    ("accelerate/nd.yaml", "num_processes: 8", "num_processes: 9", "is 8 devices, but there are 9"),
    ("accelerate/tp_hsdp.yaml", "dp_shard_size: 2", "dp_shard_size: 1",
     "dp_replicate_size 2 with dp_shard_size 1 does not go with tp_size 2"),
    ("nanotron/llama3b.yaml", "tp: 4", "tp: 16", "8 key-value heads do not divide by tp 16"),
    ("nanotron/smollm1_135m.yaml", "tp: 1", "tp: 2", "9 attention heads do not divide by tp 2"),
    ("nanotron/tiny_llama.yaml", "pp: 2", "pp: 4", "2 layers are fewer than pp 4 stages"),
    ("deepspeed/autotp_zero2_auto.json", '"stage": 2', '"stage": 3', "autotp_size 4 goes with ZeRO stages up to 2"),
    ("deepspeed/mics.json", '"stage": 3', '"stage": 2', "mics_shard_size needs stage 3"),
    ("deepspeed/zero2_offload_fp16.json", '"stage": 2', '"stage": 0', "offloads where it shards"),
    ("deepspeed/ulysses_zero1.json", '_size": 8', '_size": 64', "do not divide by sequence_parallel_size 64"),
    ("automodel/deepseek_v3.yaml", "ep_size: 16", "ep_size: 32", "dp_size 16 x cp_size 1 x tp_size 1 is no multiple of ep_size 32"),
    ("automodel/deepseek_v3.yaml", "interleaved1f1b", "1f1b", "1F1B has one stage per device, not 3"),
    ("automodel/llama3_70b.yaml", "4\n    scale_grads_in_schedule: false\n    round_virtual_stages_to_pp_multiple: up", "3",
     "stages that are listed are 27 with 80 layers; expected pp 4 x 6"),
    ("megatron/mixtral_8x7b.sh", "--tensor-model-parallel-size 1", "--disable-bias-linear --tensor-model-parallel-size 2",
     "experts with tp 2 need --sequence"),
    ("automodel/pipeline_1f1b.yaml", "local_batch_size: 16", "local_batch_size: 4", "2 microbatches are fewer than the 4 stages"),
]  # fmt: skip


@pytest.mark.parametrize("file, old, new, reason", ILLEGAL, ids=[f"{row[0]}-{row[2].split()[0]}{k}" for k, row in enumerate(ILLEGAL)])
def test_a_configuration_made_illegal_is_refused_with_the_reason(file, old, new, reason):
    one = described(DATA / file, old, new)
    assert any(reason in said for said in why_illegal(one.launch, one.sizes, file.split("/")[0]))


def test_two_known_bad_recipes_are_caught():
    """A tensor parallel degree that key-value heads forbid; and recipes shipped with more than their memory (torchtitan #4016)."""
    one = described(DATA / "torchtitan/llama3_8b.toml", "tensor_parallel_degree = 1", "tensor_parallel_degree = 16")
    forbidden = check_launch(one, "torchtitan", Site())
    assert not forbidden.ok and "8 key-value heads do not divide by tp 16" in forbidden.reasons and forbidden.prices is None
    assert forbidden.changes and all(change.gain == np.inf for change in forbidden.changes)
    too_large = check_launch(described(DATA / "torchtitan/deepseek_v3_671b.json"), "torchtitan", Site())
    assert too_large.reasons == () and too_large.fits is False and not too_large.ok
    assert too_large.prices.bytes[0] > 16 * DEEPSEEK.parameters / 64 > 80e9  # the states alone
    fits = check_launch(described(DATA / "torchtitan/llama3_8b.toml"), "torchtitan", Site())
    assert fits.ok and fits.to_dict()["ok"] is True


BOMB = "a: &a [1, 2, 3]\n" + "".join(f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in pairwise("abcdefghi"))
PLAIN = "--nproc_per_node 8 --num-layers 4 --hidden-size 8 --ffn-hidden-size 8 --num-attention-heads 2 --bf16"
BROKEN = [  # launcher, file's name, text, sentence
    ("torchtitan", "a.toml", "[model\n", "a.toml can't be read"),
    ("torchtitan", "a.toml", '[model]\nname = "gpt9"\n', "trains gpt9 of flavor \\?, known are llama3/debugmodel"),
    ("torchtitan", "a.toml", '[model]\nname = "llama3"\nflavor = "8B"\n', "a.toml does not say the devices; add --devices"),
    ("torchtitan", "a.toml", '[model]\nname = "llama3"\nflavor = "8B"\n[parallelism]\ntensor_parallel_degree = "many"\n',
     "is 'many'; expected a whole"),
    ("torchtitan", "a.toml",
     '[model]\nname="llama3"\nflavor="8B"\n[parallelism]\ntensor_parallel_degree=0\ndata_parallel_shard_degree=1', "_degree is 0"),
    ("torchtitan", "a.json", "[1]", "a.json holds a list; expected keys with values"),
    ("nanotron", "a.yaml", "a: [", "a.yaml can't be read"),
    ("nanotron", "a.yaml", "model: {}\n", "a.yaml has no parallelism.dp"),
    ("accelerate", "a.yaml", "num_processes: 8\nmixed_precision: bf16\n",
     "no distributed_type, so it is no file of `accelerate config`"),
    ("accelerate", "a.yaml", "distributed_type: FSDP\n", "does not say the sizes; add it after the file, as hf:DIR"),
    ("accelerate", "a.yaml", "distributed_type: TPU\nnum_processes: 8\n", "distributed_type is TPU; expected FSDP"),
    ("megatron", "a.sh", "--hidden-size 8", "a.sh does not say the devices; add --devices"),
    ("megatron", "a.sh", "--nproc_per_node 8 --hidden-size 8", "a.sh has no --num-layers"),
    ("megatron", "a.sh", "--nproc_per_node 8 --num-layers x --hidden-size 8 --num-attention-heads 2",
     "--num-layers is 'x'; expected a whole number"),
    ("megatron", "a.sh", "--nnodes 1 --num-layers 2 --hidden-size 8 --num-attention-heads 2 --tokenizer-type T",
     "to the tokenizer T; add --vocab-size"),
    ("nanotron", "a.yaml", BOMB, "stand for more than 100000 values"),
    ("nanotron", "a.yaml", "a: &a [*a]", "stand for more than 100000 values"),
    ("nanotron", "a.yaml", "a: !!binary aGk=", "holds a bytes; expected"),
    ("megatron", "a.sh", "--nnodes 1 --num-layers 99999999999 --hidden-size 8 --num-attention-heads 2", "expected a whole number below 2"),
    ("axolotl", "a.yaml", "{}", "there is no launcher 'axolotl'; expected one of torchtitan"),
    ("deepspeed", "a.json", "{}", "does not say the sizes; add it after the file, as hf:DIR"),
    ("deepspeed", "a.json", '{"train_batch_size": 7, "train_micro_batch_size_per_gpu": 2, "TPU": 1}', "does not say the devices; add"),
    ("deepspeed", "a.json", '{"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}, "TPU": 1, "train_batch_size": 8, '
     '"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}', "keeps parameters on the host"),
    *(("megatron", "a.sh", f"{PLAIN} {more}", said)
      for more, said in (
          ("--use-torch-fsdp2 --pipeline-model-parallel-size 2", "goes with no pipeline"), ("--use-torch-fsdp2", "needs --untie"),
          ("--use-torch-fsdp2 --expert-model-parallel-size 2", "goes with no expert parallelism"),
          ("--fp16", "fp16 goes with neither --bf16"), ("--optimizer-cpu-offload", "offload needs --use-precision-aware-optimizer"),
          ("--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 --no-overlap-p2p-communication", "of 3 devices"),
          ("--recompute-granularity selective --recompute-modules mpl", "a.sh: --recompute-modules has 'mpl'; expected some of core_attn"),
          ("--tensor-model-parallel-size", "a.sh: --tensor-model-parallel-size is ''; expected a whole"),
          ("--tensor-model-parallel-size $TP", "is '\\$TP'; expected a whole number below 2.31, so write the variable's value"),
          ("--tp-comm-overlap --sequence-parallel", "overlap needs --sequence-parallel and tensor parallelism"),
          ("--fp8-format hybrid --fp4-format e2m1", "has --fp4-format and --fp8-format; Megatron accepts one"),
          ("--use-torch-fsdp2 --untie-embeddings-and-output-weights", "and --no-gradient-accumulation-fusion"),
          ("--seq-length 64 --max-position-embeddings 32", "embeddings is less than --seq-length"),
          ("--hidden-size 1001", "hidden-size does not divide by --num-attention-heads"),
          ("--moe-ffn-hidden-size 8", "needs --num-experts"), ("--num-experts 2 --moe-router-topk 1", "needs --moe-router-pre-softmax"),
          ("--cpu-offloading --pipeline-model-parallel-size 2", "goes with neither a pipeline nor recomputation"),
          ("--recompute-granularity some", "granularity is 'some'; expected full or selective"),
          ("--sequence-parallel --tensor-model-parallel-size 2 --distribute-saved-activations", "goes with no --sequence-parallel"),
          ("--optimizer-cpu-offload --use-precision-aware-optimizer --fp8-param-gather --fp8-recipe mxfp8", "needs --fp8-recipe delayed"),
          ("--seq-length 0", "a.sh: seq is 0; expected a whole number of 1 or more"),
          *((f"--num-experts 2 --moe-layer-freq {text}", "expected a number, or a pattern of 4 layers")
            for text in ("[0]*3", "([1]*2", "[0]*999*999", "[2]*4", "[0,1]**2", "x")))),
    ("accelerate", "a.yaml", "distributed_type: FSDP\nfsdp_config: 3\nnum_processes: 8 # TPU",
     "fsdp_config is '3'; expected a section of keys"),
    ("accelerate", "a.yaml", "distributed_type: DEEPSPEED\nmixed_precision: bf16\nnum_processes: 8\n"
     "deepspeed_config: {zero_stage: 7} # TPU",
     "a.yaml: zero is 7; expected one of 0, 1, 2, 3"),
    ("automodel", "a.yaml", "distributed: {strategy: magic, dp_size: 8} # TPU",
     "strategy is 'magic'; expected fsdp2, megatron_fsdp or ddp"),
    ("automodel", "a.yaml", "distributed: {tp_size: 2}", "does not say the sizes; add it after the file, as hf:DIR"),
]  # fmt: skip


@pytest.mark.parametrize("tensor, context, data, micro, accumulated", [(1, 1, 1, 3, 1), (2, 3, 4, 2, 5), (1, 2, 3, 1, 4)])
def test_a_deepspeed_file_may_leave_out_what_follows_from_the_rest(tensor, context, data, micro, accumulated):
    degrees = {"tensor_parallel.autotp_size": tensor, "sequence_parallel_size": context}
    degrees = {name: of for name, of in degrees.items() if of != 1}
    batch, devices = micro * accumulated * data, tensor * context * data
    counts = {"train_batch_size": batch, "train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": accumulated}

    def found(written, devices=devices):
        known = Overrides(sizes=SMALL, seq=96, devices=devices)
        launch = read_configuration("deepspeed", json.dumps(nested(degrees | written)), "a.json", known).launch
        return [launch.devices, launch.tensor, launch.context, launch.data, launch.microbatch, launch.microbatches, launch.global_batch]

    everything = [devices, tensor, context, data, micro, accumulated, batch]
    assert found(counts, None) == everything
    for left_out in ("", *counts):
        assert found({name: of for name, of in counts.items() if name != left_out}) == everything
    assert found({"train_batch_size": batch})[4:] == [micro * accumulated, 1, batch]
    for name in counts:
        with pytest.raises(ValueError, match="is not micro batch"):
            found(counts | {name: counts[name] + 1})
    for left_out in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps") if data > 1 else ():
        with pytest.raises(ValueError, match=f"is not micro batch [0-9]+ x accumulation [0-9]+ x {data} ranks"):
            found({name: of + (name == "train_batch_size") for name, of in counts.items() if name != left_out})


@pytest.mark.parametrize("launcher, file, text, sentence", BROKEN, ids=[f"{row[0]}-{k}" for k, row in enumerate(BROKEN)])
def test_a_configuration_that_says_too_little_is_refused_in_a_sentence(launcher, file, text, sentence):
    known = Overrides(sizes=LLAMA8, seq=8, microbatch=1) if "TPU" in text else Overrides()
    with pytest.raises(ValueError, match=sentence) as refusal:
        read_configuration(launcher, text, file, known)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("path", [path for path in FILES if path.suffix != ".sh"], ids=name)
def test_a_file_of_another_launcher_is_refused_with_its_name(path):
    known = Overrides(sizes=LLAMA8, seq=64, microbatch=1, devices=8)
    for launcher in {*LAUNCHERS} - {path.parent.name}:
        with pytest.raises(ValueError, match=f"no configuration of {launcher}, but one of {path.parent.name}; add --launcher"):
            read_configuration(launcher, path.read_text(), path.name, known)


def test_arguments_are_read_as_a_shell_has_them():
    lines = ["A=3; D=${Y-4}", "export B=${A:-9}", "C=${X:=7}", "args=("]
    lines += ["  --one $A --two=${B}", "  # --no 1", '  "--three hybrid" --flag # said']
    read = arguments_of("\n".join([*lines, "  --four $C --five $((A * D*2)) --six $(($A*${D}))", ")", "run ${args[@]} --seven $D; echo"]))
    read = {key: value[:1] for key, value in read.items()}
    assert read == {
        "one": ["3"], "two": ["3"], "three": ["hybrid"], "flag": [], "four": ["7"], "five": ["24"], "six": ["12"], "seven": ["4"],
    }  # fmt: skip


SHELL = [  # lines of a script, and what a shell gives its command
    (["A=2 B=3", "run --a $A --b ${B}"], {"a": ["2"], "b": ["3"]}),
    (["local A=2", "readonly B=3", "declare -i C=4; export D='5' E=\"6\"", "run --a $A $B $C $D $E"], {"a": [*"23456"]}),
    ([': "${A:=7}"', "run --a $A"], {"a": ["7"]}),
    (["A=64", "B=$((A/(2*4)))", "C=$(( 8 + 2 * B - 1 ))", "run --a $B --b $C --c $((C%4*A)) --d $((A**9))"],
     {"a": ["8"], "b": ["23"], "c": ["192"], "d": ["$((64**9))"]}),
    (["run --a=\"1\" --b='2' --c 3"], {"a": ["1"], "b": ["2"], "c": ["3"]}),
    (['A=" --a 1 --b x y"', "python train.py $A"], {"a": ["1"], "b": ["x", "y"]}),
    (["A=(", "  --a 1", '  --b "x y"', ")", "python train.py ${A[@]} --c 3"], {"a": ["1"], "b": ["x", "y"], "c": ["3"]}),
    (["A=1", "if debug; then", "  A=2; B=3", "else", "  B=4", "fi", "C=1", "C=2", "run --a $A --b $B --c $C"],
     {"a": ["$A"], "b": ["$B"], "c": ["2"]}),  # only a shell knows
    (["case $SIZE in", "  8B) A=32 ;;", "  70B) A=80 ;;", "esac", "[ x ] || run --a $A"], {"a": ["$A"]}),
    (["A=1", "if more; then A=\"$A 2\"; B=3; fi", "run --a $A --b $B"], {"a": ["1", "2"], "b": ["3"]}),
    (["D=0", "if [[ $D -eq 1 ]]; then", "  A=2", 'elif [ "$D" != 0 ]; then A=3; else', "  A=4; if x; then C=7; fi", "fi", "run --a $A"],
     {"a": ["4"]}),  # which branch runs is known
    *((["if [ $D = 1 ]; then A=2; elif [ 1 == 1 ]; then A=3; else A=4; fi", f"D={d}", "run --a $A"], {"a": ["$A"]}) for d in (0, 1)),
    *(([f"S={s}", 'case "${S}" in', '  "8B") A=32', "  ;;", "  9B|70B) A=80 ;;", "  *) A=1 ;;", "esac", "run --a $A"],
       {"a": [a]}) for s, a in (("8B", "32"), ("70B", "80"), ("1B", "1"))),
    (["A=(--a 1 --b)", 'A+=("--c" "2")', "B=(--d)", "run ${A[@]} ${B[@]} x.py"], {"a": ["1"], "b": [], "c": ["2"], "d": []}),
    (['A=${X:-"8"}', "B=$((2*$A))", "run --a $B --b ${Y:-'3'}"], {"a": ["16"], "b": ["3"]}),
    (["A=1", "case $1 in --tp) A=$2 ;; esac", "run --a $A"], {"tp": [], "a": ["1"]}),
]


@pytest.mark.parametrize("lines, said", SHELL, ids=lambda value: str(value)[:40])
def test_arguments_are_those_that_a_shell_gives(lines, said):
    assert arguments_of("\n".join(lines)) == said



def test_copies_of_zero_1_states_add_up_after_they_are_scattered():
    """Links of one kind: a reduction by scatter and gather in a node sends what one over all sends, less of it between nodes."""
    launch = Launch(512, 4096, 512, data=512, shard=512, zero=1)
    runs = TrainingRuns.of([replace(launch, shard=512 // n) for n in (1, 16, 512)])
    seconds = dict(zip((1, 16, 512), prices_of(runs, LLAMA8, Site("h100"), "megatron").seconds))
    assert seconds[16] < seconds[1] and seconds[16] < seconds[512]
    ranked = ranking(launch, LLAMA8, Site("h100"), "megatron", only={"dp": [512], "microbatch": [1]})
    assert {512 // shard for shard in ranked.columns.shard[ranked.columns.zero == 1].tolist()} == {1, 4, 16, 64}


@pytest.mark.parametrize("launcher", ["torchtitan", "automodel"])
def test_a_larger_batch_is_several_passes_of_a_pipeline_where_memory_demands_it(launcher):
    """A pass of all sequences would hold a buffer for each."""
    best = []
    for batch in (512, 4096):
        ranked = ranking(Launch(64, 8192, batch), LLAMA70, Site("h100"), launcher, only={"pp": [4, 8]})
        best.append(ranked.prices.expected[0])
    assert ranked.columns.passes[0] > 1 and best[1] > 0.98 * best[0]
    one = ranking(Launch(64, 8192, 4096), LLAMA70, Site("h100"), launcher, only={"pp": [4, 8], "passes": [1]})
    assert best[1] > 1.05 * one.prices.expected[0]
    described = ranking(Launch(64, 8192, 96, pipeline=4, passes=3), LLAMA70, Site("h100"), launcher, only={"pp": [4]})
    assert {1, 3} <= {*described.columns.passes.tolist()}


def test_automodel_spreads_layers_that_do_not_divide():
    ranked = ranking(Launch(64, 4096, 256), DEEPSEEK, Site("h100"), "automodel")
    assert {"8,8,8,8,8,7,7,7", ""} < {*ranked.columns.split.tolist()} and DEEPSEEK.layers == 61
    assert not [row for row in ranked.columns.split.tolist() if row.count(",") == 31]  # 2 layers per stage are 31 stages


# --- what is written


def sampled(launcher, sizes, count=25, **more):
    fixed = Launch(64, 4096, 256, **more)
    rows = TrainingRuns.joined(launches(structures(fixed, launcher, sizes.layers), sizes, launcher))
    return [rows.launch(i) for i in np.linspace(0, len(rows) - 1, count).astype(int)]


KEPT_BY = {  # fields that a written configuration does not hold, and their value when it is read back
    "torchtitan": {}, "megatron": {"compiled": False}, "accelerate": {"schedule": "1F1B"}, "nanotron": {"compiled": False},
    "deepspeed": {"schedule": "1F1B"}, "automodel": {},
}  # fmt: skip


WRITTEN = [*product(LAUNCHERS, ("8B", "70B", "mixtral")), *((launcher, "671B") for launcher in ("torchtitan", "megatron", "automodel"))]
WRITTEN.remove(("torchtitan", "mixtral"))  # has no flavor of it


WRITTEN = [(*case, "bf16") for case in (*WRITTEN, ("megatron", "671B with another prediction"))]
WRITTEN += [(launcher, "8B", precision) for launcher in LAUNCHERS for precision in EXPRESSED[launcher] if precision != "bf16"]


@pytest.mark.parametrize("launcher, flavor, precision", WRITTEN)
def test_what_is_written_reads_back_as_the_same_launch(launcher, flavor, precision):
    sizes = {**MODELS, "70B": LLAMA70, "671B with another prediction": replace(DEEPSEEK, mtp=1)}[flavor]
    for launch in sampled(launcher, sizes, 25 if precision == "bf16" else 9, precision=precision):
        padded = sizes.with_padded_vocab({"megatron": 128, "nanotron": 1}.get(launcher, 0), launch.tensor)
        text = configuration_text(launcher, LaunchConfig(launch, padded))
        ending = f"a{ENDINGS[launcher]}"
        known = Overrides(devices=64)
        if launcher in ("accelerate", "deepspeed", "automodel"):
            known = Overrides(sizes=sizes, seq=4096, microbatch=launch.microbatch, global_batch=256)
        back = read_configuration(launcher, text, ending, known)
        if launch.zero == 0:
            launch = replace(launch, shard=1)
        assert back.launch == replace(launch, **KEPT_BY[launcher]), text
        assert back.sizes == padded


@pytest.mark.parametrize(
    ("degrees", "kind"),
    [({}, "MULTI_GPU"), ({"zero": 3, "shard": 64}, "FSDP"), ({"data": 8, "tensor": 8}, "FSDP"), ({"data": 8, "context": 8}, "FSDP")],
)
def test_copies_of_a_model_alone_need_no_fsdp(degrees, kind):
    launch = Launch(64, 4096, 256, **{"data": 64, **degrees})
    text = configuration_text("accelerate", LaunchConfig(launch, LLAMA8))
    assert f"distributed_type: {kind}\n" in text and ("fsdp_config" in text) == (kind == "FSDP")


def test_accelerates_own_parser_reads_what_is_written(tmp_path, monkeypatch):
    config_args = pytest.importorskip("accelerate.commands.config.config_args")
    from accelerate.parallelism_config import ParallelismConfig

    for k, launch in enumerate(sampled("accelerate", LLAMA8, 40)):
        path = tmp_path / f"{k}.yaml"
        path.write_text(configuration_text("accelerate", LaunchConfig(launch, LLAMA8)))
        read = config_args.load_config_from_file(str(path))
        assert read.num_processes == 64 and read.mixed_precision == "bf16"
        sizes = {key.removeprefix("parallelism_config_"): value for key, value in read.parallelism_config.items()}
        if sizes:
            parsed = ParallelismConfig(**sizes)
            assert parsed.total_size == 64 and parsed.data_parallel_size == launch.data
            assert read.fsdp_config["fsdp_version"] == 2
        else:
            assert launch.zero == 0 and launch.tensor == 1


def test_accelerates_own_parser_refuses_what_we_call_illegal():
    module = pytest.importorskip("accelerate.parallelism_config")
    for replicate, shard, tensor, context in product((1, 2), repeat=4):
        devices = replicate * shard * tensor * context
        launch = Launch(devices, 64, 8, 1, replicate * shard, shard, 3 if shard * context > 1 else 0, tensor, context)
        try:
            module.ParallelismConfig(dp_replicate_size=replicate, dp_shard_size=shard, tp_size=tensor, cp_size=context)
            accepted = True
        except ValueError:
            accepted = False
        assert accepted == (why_illegal(launch, SMALL, "accelerate") == ()), launch


# JobConfig of torchtitan (torchtitan/config/job_config.py, 2025-11), the sections that we write
JOB_CONFIG = {
    "model": {"name", "flavor", "converters"},
    "training": {"local_batch_size", "global_batch_size", "seq_len"},
    "parallelism": {
        "data_parallel_replicate_degree", "data_parallel_shard_degree", "fsdp_reshard_after_forward", "tensor_parallel_degree",
        "enable_async_tensor_parallel", "pipeline_parallel_degree", "context_parallel_degree", "expert_parallel_degree",
        "expert_tensor_parallel_degree", "pipeline_parallel_schedule", "pipeline_parallel_microbatch_size", "module_fqns_per_model_part",
    },
    "activation_checkpoint": {"mode", "selective_ac_option"}, "compile": {"enable", "components"},
}  # fmt: skip


def test_torchtitan_gets_its_documented_keys_and_torchs_schedules():
    for launch in sampled("torchtitan", LLAMA8, 60):
        data = tomllib.loads(configuration_text("torchtitan", LaunchConfig(launch, LLAMA8)))
        assert {section: set(keys) for section, keys in data.items() if not set(keys) <= JOB_CONFIG[section]} == {}
        parallelism = data["parallelism"]
        degrees = ("data_parallel_replicate", "data_parallel_shard", "tensor_parallel", "pipeline_parallel", "context_parallel")
        assert np.prod([parallelism[f"{degree}_degree"] for degree in degrees]) == 64
        if launch.pipeline > 1:
            assert get_schedule_class(parallelism["pipeline_parallel_schedule"])
            assert len(parallelism["module_fqns_per_model_part"]) == launch.pipeline * launch.virtual


@pytest.mark.parametrize("layers, stages", [(3, 2), (32, 4), (32, 16), (126, 8), (5, 7), (1, 1), (61, 16)])
def test_every_module_is_on_one_stage_in_order(layers, stages):
    parts = model_parts(spread(layers, stages))
    assert [part for stage in parts for part in stage] == ["tok_embeddings", *(f"layers.{i}" for i in range(layers)), "norm", "output"]
    counted = [len([part for part in stage if part != "norm"]) for stage in parts]
    assert len(parts) == stages and max(counted) - min(counted) <= 1 and counted == sorted(counted, reverse=True)


def test_yaml_of_nanotron_has_plain_sections():
    data = yaml.safe_load(configuration_text("nanotron", LaunchConfig(Launch(8, 64, 8, data=8), SMALL)))
    tokens = {"batch_accumulation_per_replica": 1, "micro_batch_size": 1, "sequence_length": 64}
    assert data["parallelism"]["dp"] == 8 and data["tokens"] == tokens


# --- prices and order


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_ranking_is_sorted_and_prices_each_row_as_alone(launcher):
    ranked = ranking(Launch(16, 2048, 64), LLAMA8, Site(), launcher)
    p = ranked.prices
    assert (np.diff(p.fits.astype(int)) <= 0).all()
    for fits in (True, False):
        assert (np.diff(p.expected[p.fits == fits]) <= 1e-6).all()
    assert (p.expected <= p.tokens_per_second).all() and ((p.chance >= 0.5) == p.fits).all()
    for i in np.linspace(0, len(ranked) - 1, 9).astype(int):
        alone = prices_of(TrainingRuns.of([ranked.launch(i)]), LLAMA8, Site(), launcher)
        assert alone.seconds[0] == pytest.approx(p.seconds[i], rel=1e-12) and alone.bytes[0] == pytest.approx(p.bytes[i], rel=1e-12)
    assert (p.mfu > 0).all() and (p.mfu < 1).all() and (p.bytes > 0).all()
    assert p.tokens_per_second[0] * 16 * p.seconds[0] == pytest.approx(64 * 2048)


class OnlyMap(Executor):
    """All that a cluster's executor has to have (docs/launchers.md)."""

    def __init__(self, workers):
        pass

    def map(self, function, *columns, timeout=None, chunksize=1):
        return iter([function(*row) for row in zip(*columns)])


FITTING = [  # each launcher and each memory once in the quick suite
    pytest.param(*launcher, memory, marks=[pytest.mark.slow] * ((k + j) % 3 > 0))
    for k, launcher in enumerate((("torchtitan", "8B"), ("megatron", "mixtral"), ("nanotron", "8B")))
    for j, memory in enumerate((80e9, 1e9, 24e9))
]


@pytest.mark.parametrize(("launcher", "flavor", "memory"), FITTING)
def test_the_launches_that_fit_are_ranked_as_among_all(launcher, flavor, memory):
    fixed, site = Launch(16, 2048, 64), Site(memory=memory)
    every, fitting = (ranking(fixed, MODELS[flavor], site, launcher, fitting=fitting) for fitting in (False, True))
    count = int(every.prices.fits.sum())
    assert count == 0 if memory == 1e9 else count < len(every)
    assert len(fitting) == max(count, 1) and fitting.rows(count) == every.rows(count) and fitting.prices.fits.all() == (count > 0)


COLUMNS = (
    st.sampled_from([0, 1, 7, 2**20, -3]), st.sampled_from([1.0, 2.5, -1.0, 1e12, 3.0]), st.booleans(),
    st.sampled_from(["a", "bb", ""]), st.just(4),
)  # fmt: skip


@given(rows=st.lists(st.tuples(*COLUMNS), max_size=30))
def test_distinct_rows_are_counted(rows):
    dtypes = (int, float, bool, str, int)
    firsts, of = distinct([np.array([row[k] for row in rows], dtype) for k, dtype in enumerate(dtypes)])
    assert len(firsts) == len(set(rows)) and len(of) == len(rows)
    assert [rows[firsts[k]] for k in of] == rows and firsts.tolist() == [rows.index(rows[first]) for first in firsts]


def test_columns_of_one_value_are_columns():
    def columns(*values: object) -> list[np.ndarray]:
        return [np.array(values), np.broadcast_to(values[0], len(values))]

    for devices, schedule in product(columns(2, 2, 2), columns("1F1B", "1F1B", "1F1B")):
        runs = TrainingRuns({"devices": devices, "schedule": schedule})
        for rows in (slice(2), np.array([True, False, True]), np.array([2, 0]), [1, 1], slice(0), np.zeros(3, bool)):
            some = runs[rows]
            assert len(some) == len(np.arange(3)[rows]) and {*some.devices.tolist()} <= {2} and some.schedule.shape == some.devices.shape
            both = TrainingRuns.joined([some, runs, runs.with_columns(schedule="GPipe")])
            assert both.devices.tolist() == [2] * (len(some) + 6) and both.schedule.tolist() == ["1F1B"] * (len(some) + 3) + ["GPipe"] * 3
            assert both.among("schedule", ("GPipe",)).sum() == 3 and (both.among("devices", (2, 3))).all()
            assert len(distinct(both.values.values())[0]) == 2


def test_an_executor_changes_nothing(monkeypatch):
    monkeypatch.setattr(import_module("autoshard.launch.launch_space"), "CHUNK", 500)
    fixed = Launch(8, 2048, 16)
    here = ranking(fixed, LLAMA8, Site(), "torchtitan")
    for pool in (ThreadPoolExecutor, ProcessPoolExecutor, OnlyMap):
        with pool(2) as executor:
            there = ranking(fixed, LLAMA8, Site(), "torchtitan", executor)
        assert len(here) > 1000 and all((here.columns.values[key] == there.columns.values[key]).all() for key in here.columns.values)
        assert (here.prices.seconds == there.prices.seconds).all()


def test_less_memory_never_makes_more_launches_fit():
    sites = [Site(memory=memory) for memory in (40e9, 80e9, 160e9)]
    counts = [int(ranking(Launch(16, 2048, 64), LLAMA8, site, "torchtitan").prices.fits.sum()) for site in sites]
    assert counts == sorted(counts) and counts[0] < counts[-1]


def test_experts_cost_memory_that_expert_parallelism_divides():
    fixed = Launch(64, 4096, 512, data=64, shard=64, zero=1)
    rows = TrainingRuns.of([replace(fixed, expert=expert) for expert in (1, 2, 4, 8)])
    priced = prices_of(rows, MIXTRAL, Site(), "megatron")
    assert (np.diff(priced.bytes) < 0).all()
    dense = replace(MIXTRAL, experts=0, active=0, expert_ffn=0, ffn=2 * 14336)  # as many matmuls, and two of the eight experts everywhere
    alone = prices_of(rows, dense, Site(), "megatron")
    assert (priced.seconds > alone.seconds).all() and (priced.bytes > alone.bytes).tolist() == [True, True, True, False]


def test_experts_are_on_their_devices_only():
    """Without a distributed optimizer each device updates the experts that it has: 18 bytes a parameter."""
    run = TrainingRuns.of([Launch(8, 4096, 8, data=8, expert=8)])
    seconds, bytes = by_kind(run, MIXTRAL, Site(), "megatron")
    held = MIXTRAL.parameters - MIXTRAL.expert_parameters * 7 / 8
    assert bytes["parameters"] + bytes["gradients"] + bytes["optimizer"] == pytest.approx(18 * held, rel=0.02)
    whole = by_kind(TrainingRuns.of([Launch(8, 4096, 8, data=8)]), MIXTRAL, Site(), "megatron")[0]
    assert seconds["optimizer"] / whole["optimizer"] == pytest.approx(held / MIXTRAL.parameters, rel=0.02)


def test_experts_of_few_tokens_take_longer_than_the_dense_model_of_a_token():
    """Each device reads the weights of all its experts, however few tokens it has."""

    def seconds(sizes, tokens):
        return float(prices_of(TrainingRuns.of([Launch(1, tokens, 1)]), sizes, Site(), "megatron").seconds[0])

    dense = replace(MIXTRAL, experts=0, active=0, expert_ffn=0, ffn=2 * 14336)
    of_experts = {tokens: seconds(MIXTRAL, tokens) for tokens in (128, 1024, 8192, 65536)}
    assert list(of_experts.values()) == sorted(of_experts.values())
    ratios = [one / seconds(dense, tokens) for tokens, one in of_experts.items()]
    assert ratios[0] > ratios[1] > ratios[2] and ratios[0] > 1.5 and 0.9 < ratios[-1] < 1.6


def test_the_mean_width_of_blocks_with_and_without_experts_is_that_of_no_matrix():
    """11,250.0 features are not read as unaligned rows: such matmuls take twice as long, or hid what experts take longer than them."""
    sizes = ModelSizes(16, 2048, 10944, 16, 16, 128000, 128, experts=64, active=6, expert_ffn=1408, shared_ffn=2816, dense_layers=1)
    assert sizes.active_ffn % 8
    for compiled in (False, True):
        one = TrainingRuns.of([Launch(8, 4096, 16, 2, data=8, shard=8, zero=3, compiled=compiled)])
        some, none = (by_kind(one, of, Site(), "torchtitan")[0]["matmul"] for of in (sizes, replace(sizes, dense_layers=0)))
        assert some == pytest.approx(none, rel=0.03)


def first_of_each(paths):
    """The first of each launcher is quick."""
    firsts = {path.parent.name: path for path in reversed(paths)}.values()
    return [pytest.param(path, id=name(path), marks=[] if path in firsts else pytest.mark.slow) for path in paths]


@pytest.mark.parametrize("path", first_of_each([path for path in FILES if "tiny" not in path.name]))
def test_changes_are_legal_fit_and_gain(path):
    launcher = path.parent.name
    checked = check_launch(described(path), launcher, Site())
    assert len(checked.changes) <= 3
    gains = [change.gain for change in checked.changes]
    assert gains == sorted(gains, reverse=True) and all(gain > 0 for gain in gains)
    for change in checked.changes:
        assert why_illegal(change.to, checked.described.sizes, launcher) == ()
        sizes = checked.described.sizes.with_padded_vocab(checked.described.sizes.multiple, change.to.tensor)
        priced = prices_of(TrainingRuns.of([change.to]), sizes, Site(), launcher)
        assert priced.fits[0] and priced.tokens_per_second[0] == pytest.approx(change.tokens_per_second)
        same = ("devices", "seq", "global_batch", "precision")
        assert all(getattr(change.to, key) == getattr(checked.described.launch, key) for key in same)
    if checked.changes:
        assert checked.better().launch == checked.changes[0].to


def priced(device="h100", **changes):
    return prices_of(TrainingRuns.of([Launch(8, 64, 8, data=8, **changes)]), SMALL, Site(device), "nanotron")


test_what_can_not_be_is_refused_in_a_sentence = refusals(
    (lambda: sizes_of_config({}), "none of num_hidden_layers"),
    (lambda: sizes_of_config({"num_hidden_layers": "two"}), "expected a whole number"),
    (lambda: sizes_of_config({"num_hidden_layers": 2, "mamba_d_conv": 4}), "mamba_d_conv, so it is no row of blocks of one attention"),
    (lambda: sizes_of_config({"model_type": "whisper", "is_encoder_decoder": True}), "is_encoder_decoder, so it is no row of blocks"),
    (lambda: sizes_of_config({"model_type": "yoso", "attention_probs_dropout_prob": 0.1}), "of an encoder, yoso, whose matrices aren't"),
    (lambda: sizes_of_config({"n_layer": 2, "n_embd": 8, "n_head": 2, "dff": 16}), "none of intermediate_size_mlp, intermediate_size"),
    (lambda: configuration_text("torchtitan", LaunchConfig(Launch(8, 64, 8), SMALL)), "torchtitan has no flavor of these sizes"),
    (lambda: counts_of(Launch(6, 64, 8, pipeline=6), 3), "can't be 6 stages; expected 5 at most"),
    (lambda: priced(precision="fp32"), "matmuls in float32 have no prices; expected a run in bf16"),
    (lambda: priced("tpu"), "no constants of device 'tpu'"),
    (lambda: Launch(1000000, 64, 8), "there are 1000000 devices; expected 262144 at most"),
    (
        lambda: ranking(Launch(64, 7, 1), SMALL, Site(), "torchtitan"),
        "no launch of torchtitan on 64 devices is legal for this model; splits of the devices by rule: ",
    ),
)


def test_a_change_names_all_that_it_changes():
    apart, together = (Launch(8, 64, 8, data=4, tensor=2, sequence_parallel=together) for together in (False, True))
    assert in_words(apart, replace(together, shard=4, zero=1)) == "shard 1 -> 4, zero 0 -> 1, sequence parallel no -> yes"
    assert in_words(replace(apart, tensor=1, data=8), together) == "tp 1 -> 2, dp 8 -> 4"


@pytest.mark.parametrize(("strategy", "devices", "shard", "zero"), [
    ("FULL_SHARD", 16, 16, 3), ("SHARD_GRAD_OP", 16, 16, 2), ("NO_SHARD", 16, 1, 0), ("HYBRID_SHARD", 16, 8, 3),
    ("HYBRID_SHARD_ZERO2", 24, 8, 2), ("HYBRID_SHARD", 4, 4, 3), ("4", 16, 8, 3), ("5", 8, 8, 2), ("2", 8, 8, 2),
])  # fmt: skip
def test_strategies_of_the_first_fsdp_shard_over_all_ranks_or_inside_a_node(strategy, devices, shard, zero):
    text = f"distributed_type: FSDP\nnum_processes: {devices}\nfsdp_config:\n  fsdp_sharding_strategy: {strategy}\n"
    known = Overrides(sizes=LLAMA8, seq=4096, microbatch=1, global_batch=devices)
    launch = read_configuration("accelerate", text, "a.yaml", known).launch
    assert (launch.data, launch.shard, launch.zero) == (devices, shard, zero)


def test_rotary_positions_by_their_former_name_are_no_table():
    text = "--num-layers 2 --hidden-size 8 --num-attention-heads 4 --max-position-embeddings 64"
    sizes = [read_configuration("megatron", text + more, "a.sh", Overrides(8)).sizes for more in ("", " --use-rotary-position-embeddings")]
    assert [of.learned_positions for of in sizes] == [True, False]


def test_of_replicas_accelerate_reads_no_fsdp_config():
    text = "distributed_type: MULTI_GPU\nnum_processes: 8\nfsdp_config: {fsdp_version: 2, fsdp_activation_checkpointing: true}\n"
    launch = read_configuration("accelerate", text, "a.yaml", KNOWN["accelerate"]).launch
    assert launch.recompute == "none" and not why_illegal(launch, LLAMA8, "accelerate")


def test_a_bare_no_of_accelerates_yaml_is_one_kind_of_run():
    """As accelerate's own 0_30_0_sagemaker.yaml has it; YAML reads it as false."""
    text = "distributed_type: {}\nmixed_precision: bf16\nnum_processes: 1\n"
    known = Overrides(sizes=LLAMA8, seq=4096, microbatch=1)
    bare, quoted = (read_configuration("accelerate", text.format(no), "a.yaml", known) for no in ("NO", "'NO'"))
    assert bare == quoted and bare.launch.zero == 0
