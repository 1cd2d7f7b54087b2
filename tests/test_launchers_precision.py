"""Precisions of launches: how configurations say them, what is stored, gathered and kept in 8 or 4 bits, and what that takes."""

import json
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from autoshard.api import check_launch
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
from autoshard.launch.launch_prices import by_kind, prices_of
from autoshard.launch.runs import PRECISIONS, TrainingRuns
from autoshard.launch.torchtitan import FLAVORS

LLAMA8 = FLAVORS["llama3", "8B"]
NARROW = [name for name, bytes in PRECISIONS.items() if bytes < 2]
RECIPES = Path(__file__).parent / "data" / "launchers" / "recipes"


def of(launch, sizes=LLAMA8, site=None, launcher="megatron"):
    return by_kind(TrainingRuns.of([launch]), sizes, site or Site("b200"), launcher)


TITAN = '[model]\nname = "llama3"\nflavor = "8B"\nconverters = [{}]\n\n[training]\nlocal_batch_size = 1\nseq_len = 8192\n'
FLOAT8, MX = TITAN.format('"quantize.linear.float8"'), TITAN.format('"quantize.linear.mx"')
BRIDGE = "model: {{num_layers: 8, hidden_size: 64, num_attention_heads: 8, vocab_size: 128, tensor_model_parallel_size: 1, {}}}\n"
SAID = [  # launcher, text, precision, whether parameters are gathered in 8 bits
    ("torchtitan", TITAN.format(""), "bf16", False), ("torchtitan", FLOAT8, "fp8", False), ("torchtitan", MX, "mxfp8", False),
    ("torchtitan", FLOAT8 + "[quantize.linear.float8]\nenable_fsdp_float8_all_gather = true\n", "fp8", True),
    ("torchtitan", FLOAT8 + '[quantize.linear.float8]\nrecipe_name = "rowwise"\n', "fp8_rowwise", False),
    ("torchtitan", TITAN.format('"float8"') + "[float8]\nenable_fsdp_float8_all_gather = true\n", "fp8", True),
    ("torchtitan", TITAN.format("") + "[float8]\nenable_float8_linear = true\n", "fp8", False),  # 0.0
    ("automodel", "fp8: {enabled: true}\n", "fp8", False),
    ("automodel", "fp8: {enabled: true, recipe_name: tensorwise, enable_fsdp_float8_all_gather: true}\n", "fp8", True),
    ("automodel", "fp8: {enabled: true, recipe_name: rowwise_with_gw_hp}\n", "fp8_rowwise", False),
    ("megatron", BRIDGE.format("bf16: true") + "mixed_precision: {bf16: true, fp8: null, fp4: e2m1}\n", "nvfp4", False),
    ("megatron", BRIDGE.format("fp8_recipe: delayed") + "mixed_precision: {fp8: e4m3, fp8_recipe: mxfp8, fp8_param_gather: true}\n",
     "mxfp8", True),
    ("megatron", BRIDGE.format("bf16: true") + "mixed_precision: bf16_with_fp8_subchannel_scaling_mixed\n", "fp8_blockwise", False),
    ("megatron", BRIDGE.format("bf16: true") + "mixed_precision: bf16-with-fp8-current-scaling-mixed\n", "fp8", True),
    ("megatron", BRIDGE.format("bf16: true") + "mixed_precision: bf16_with_mxfp8_mixed\n", "mxfp8", True),
    ("megatron", BRIDGE.format("bf16: true") + "mixed_precision: bf16_with_nvfp4_mixed\n", "nvfp4", False),
    ("megatron", BRIDGE.format("fp8: false") + "trainer: {precision: 16-mixed}\n", "fp16", False),
    ("megatron", BRIDGE.format("fp8: true, fp8_hybrid: true") + "trainer: {precision: bf16}\n", "fp8", False),
]  # fmt: skip


@pytest.mark.parametrize(("launcher", "text", "precision", "gather8"), SAID)
def test_a_configuration_says_its_precision(launcher, text, precision, gather8):
    known = Overrides(devices=8, **({"sizes": LLAMA8, "seq": 8192} if launcher == "automodel" else {}))
    path = "a.toml" if launcher == "torchtitan" else "a.yaml"
    text = text.replace("tensor_model", "seq_length: 2048, max_position_embeddings: 2048, tensor_model")
    one = read_configuration(launcher, text, path, known)
    assert (one.launch.precision, one.launch.gather8) == (precision, gather8)
    assert edited_text(launcher, one, text, path, known) == text
    if launcher != "megatron" and precision == "fp8":  # and is changed where it stands
        to = LaunchConfig(replace(one.launch, gather8=not gather8), one.sizes)
        other = edited_text(launcher, to, text, path, known)
        assert read_configuration(launcher, other, path, known).launch.gather8 != gather8
        assert other.count("enable_fsdp_float8_all_gather") == 1


@pytest.mark.parametrize(("precision", "gather8", "zero"), [*product(NARROW, (False, True), (1, 3))])
def test_what_transformer_engine_stores(precision, gather8, zero):
    """16-bit parameters, and those of blocks in their own dtype twice (one transposed), unless they are these alone; FSDP's are shards."""
    launch = Launch(8, 4096, 64, data=8, shard=8, zero=zero, precision=precision, gather8=gather8)
    tables = 2 * LLAMA8.vocab * LLAMA8.width
    blocks = LLAMA8.parameters - tables
    copies = 0 if gather8 or zero == 3 else 2 * PRECISIONS[precision] * blocks
    shard = 4 / 8 if zero == 3 else 2
    assert of(launch)[1]["parameters"] == pytest.approx(shard * (blocks + tables) + copies, rel=1e-12)


def test_what_is_kept_for_the_backward_is_kept_in_its_precision():
    """The inputs of matmuls alone: of Llama a norm's result twice and the product of swiglu; the rest stays in 16 bits."""
    kept = {name: of(Launch(8, 4096, 64, data=8, shard=8, zero=1, precision=name))[1]["activations"] for name in ("bf16", *NARROW)}
    tokens, inputs = 4096, 2 * LLAMA8.width + LLAMA8.ffn
    for name in NARROW:
        assert kept["bf16"] - kept[name] == pytest.approx(LLAMA8.layers * tokens * inputs * (2 - PRECISIONS[name]), rel=1e-9)
    titan = [of(Launch(8, 4096, 8, data=8, shard=8, zero=3, precision=name), launcher="torchtitan")[1] for name in ("bf16", "fp8", "mxfp8")]
    assert titan[0] == titan[1] == titan[2]  # torchao casts again


@pytest.mark.parametrize(("launcher", "zero"), [("megatron", 1), ("torchtitan", 3), ("torchtitan", 2), ("automodel", 3)])
def test_a_gather_in_8_bits_moves_half_and_is_a_choice(launcher, zero):
    site = Site("h100", network=1e9)  # nothing hides it
    launch = Launch(64, 4096, 64, data=64, shard=64, zero=zero, precision="fp8", compiled=launcher != "megatron")
    wide, narrow = (of(replace(launch, gather8=is_on), site=site, launcher=launcher)[0] for is_on in (False, True))
    assert narrow["data parallel"] < 0.9 * wide["data parallel"]
    assert {kind for kind in wide if abs(wide[kind] - narrow[kind]) > 1e-9 * wide[kind]} == {"data parallel"}
    changes = check_launch(LaunchConfig(launch, LLAMA8), launcher, site).changes
    assert any(change.to.gather8 for change in changes) and all(not why_illegal(change.to, LLAMA8, launcher) for change in changes)


# torchao/float8/README.md of pytorch/ao (torchao 0.10, torchtitan 0.0.2), over bfloat16: 8 H100, FSDP2, compile, recomputation of ops,
# one sequence of 8192 tokens
PUBLISHED = {("fp8", True): 7689.5 / 6150, ("fp8_rowwise", False): 6768 / 6150}


@pytest.mark.parametrize(("precision", "gather8"), PUBLISHED)
def test_float8_gains_what_was_published(precision, gather8):
    launch = Launch(8, 8192, 8, data=8, shard=8, zero=3, recompute="selective_op", compiled=True, compiled_loss=True)
    plain, float8 = (
        prices_of(TrainingRuns.of([one]), LLAMA8, Site("h100_500w"), "torchtitan_2025").tokens_per_second[0]
        for one in (launch, replace(launch, precision=precision, gather8=gather8))
    )
    assert float8 / plain == pytest.approx(PUBLISHED[precision, gather8], abs=0.03)


@pytest.mark.parametrize("device", ["a100", "h100", "h20", "l40s", "b200", "mi300x", "mi355x"])
def test_what_a_device_multiplies(device):
    """fp8 since Hopper, Ada and CDNA 3; microscaled formats since Blackwell and CDNA 4."""
    least = {"a100": 2.0, "b200": 0.0, "mi355x": 0.0}.get(device, 1.0)
    for precision, bytes in PRECISIONS.items():
        launches = TrainingRuns.of([Launch(8, 4096, 8, data=8, precision=precision)])
        scaled = precision in ("mxfp8", "nvfp4") and least > 0
        if precision == "fp32" or scaled or bytes < least:
            with pytest.raises(ValueError, match="have no prices" if precision == "fp32" else f"{device} multiplies no {precision} "):
                prices_of(launches, LLAMA8, Site(device), "megatron")
        else:
            assert np.isfinite(prices_of(launches, LLAMA8, Site(device), "megatron").seconds).all()


@pytest.mark.parametrize(("recipe", "precision"), [("tensorwise", ("fp8", True)), ("rowwise", ("fp8_rowwise", False))])
def test_a_saved_registry_has_its_converters_settings_in_their_list(recipe, precision):
    converter = {"recipe_name": recipe, "enable_fsdp_float8_all_gather": True, "filter_fqns": ["output"], "emulate": False}
    data = {"model_spec": {"name": "llama3", "flavor": "8B"}, "training": {"seq_len": 8192, "local_batch_size": 1},
            "model_converters": {"print_after_conversion": False, "converters": [converter]}}  # fmt: skip
    launch = read_configuration("torchtitan", json.dumps(data), "a.json", Overrides(devices=8)).launch
    assert (launch.precision, launch.gather8) == precision


def test_a_layout_that_is_listed_is_that_of_its_letters():
    path, known = RECIPES / "deepseek_v3_b200_nvfp4.yaml", Overrides(devices=256)
    text = path.read_text()
    one = read_configuration("megatron", text, path.name, known)
    assert (one.launch.split, one.launch.virtual, one.launch.precision, one.sizes.mtp) == ("ends", 1, "nvfp4", 1)
    start, end = text.index("  pipeline_model_parallel_layout:"), text.index("  pipeline_model_parallel_size:")
    letters = text[:start] + "  pipeline_model_parallel_layout: Et*4|(t*4|)*14tmL\n" + text[end:]
    assert read_configuration("megatron", letters, path.name, known) == one
    assert edited_text("megatron", one, text, path.name, known) == text


def test_recipes_of_nemo_are_read():
    sizes, text = ModelSizes(32, 4096, 14336, 32, 32, 128256), (RECIPES / "nemo_llama3_8b.yaml").read_text()
    a = read_configuration("megatron", text, "a.yaml", Overrides(sizes=sizes)).launch
    assert (a.devices, a.seq, a.global_batch, a.data, a.zero, a.recompute, a.precision) == (128, 8192, 2048, 128, 1, "none", "bf16")
    full = text.replace("granularity: null", "granularity: full").replace("num_layers: 0", "num_layers: 1")
    assert read_configuration("megatron", full, "a.yaml", Overrides(sizes=sizes)).launch.recompute == "full"
    assert read_configuration("megatron", text, "a.yaml").sizes == sizes  # by its tokenizer
    with pytest.raises(ValueError, match="leaves the size of the vocabulary to the tokenizer our/own-8b-hf"):
        read_configuration("megatron", text.replace("meta-llama/Llama-3-8b-hf", "our/own-8b-hf"), "a.yaml")
    with_vocab = text.replace("  mcore_gpt: true", "  vocab_size: 128256")
    assert read_configuration("megatron", with_vocab, "a.yaml").sizes == sizes
    qwen = read_configuration("megatron", (RECIPES / "qwen3_235b_b200_nvfp4.yaml").read_text(), "a.yaml", Overrides(devices=64))
    assert qwen.sizes == replace(FLAVORS["qwen3", "235B-A22B"]) and (qwen.launch.split, qwen.launch.precision) == ("ends", "nvfp4")
    virtual = (RECIPES / "qwen3_235b_b200_nvfp4.yaml").read_text().replace("virtual_pipeline_model_parallel_size: null",
                                                                         "virtual_pipeline_model_parallel_size: 4")  # fmt: skip
    assert read_configuration("megatron", virtual, "a.yaml", Overrides(devices=64)).launch.virtual == 4


SHELL = "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --swiglu --vocab-size 128256 --bf16 \\\n"
SHELL += "--group-query-attention --num-query-groups 8 --micro-batch-size 1 --global-batch-size 8 --seq-length 8192"


def test_shards_of_the_distributed_optimizer_and_of_fsdp_are_changed_where_they_are_said():
    text, known = f"{SHELL} --use-distributed-optimizer --num-distributed-optimizer-instances 2\n", Overrides(devices=8)
    one = read_configuration("megatron", text, "a.sh", known)
    assert (one.launch.shard, one.launch.zero, one.launch.data) == (4, 1, 8)
    with pytest.raises(ValueError, match="8 data and context parallel ranks do not divide by --num-distributed-optimizer-instances 3"):
        read_configuration("megatron", text.replace("instances 2", "instances 3"), "a.sh", known)
    for name in ("train_llama3_8b_fsdp_h100_fp8.sh", "moe__deepseek_proxy_fsdp_ep2_fsdp2.yaml"):
        path = RECIPES.parent / "more" / f"megatron__{name}"
        one = read_configuration("megatron", path.read_text(), name, known)
        assert one.launch.zero == 3
        for zero, shard in ((0, 1), (1, one.launch.data), (3, one.launch.data)):
            to = replace(one.launch, zero=zero, shard=shard, gather8=one.launch.gather8 and zero > 0)
            written = edited_text("megatron", LaunchConfig(to, one.sizes), path.read_text(), name, known)
            assert read_configuration("megatron", written, name, known).launch == to


# --- heads exchanged for tokens

EXCHANGED = [("", 1), (" --cp-comm-type p2p", 1), (" --cp-comm-type a2a", 4), (" --cp-comm-type all_gather", 1),
             (" --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2", 2)]  # fmt: skip


@pytest.mark.parametrize("said, ranks", EXCHANGED)
def test_context_parallelism_by_exchange_is_read_written_and_priced(said, ranks):
    text, known = f"{SHELL} --context-parallel-size 4 --use-distributed-optimizer{said}\n", Overrides(devices=8)
    one = read_configuration("megatron", text, "a.sh", known)
    assert one.launch.alltoall == ranks and edited_text("megatron", one, text, "a.sh", known) == text
    for to in (replace(one.launch, alltoall=n) for n in (1, 2, 4)):
        written = edited_text("megatron", LaunchConfig(to, one.sizes), text, "a.sh", known)
        assert read_configuration("megatron", written, "a.sh", known).launch == to
    runs = (TrainingRuns.of([replace(one.launch, alltoall=n)]) for n in (1, 2, 4))
    sums = [by_kind(run, one.sizes, Site(), "megatron")[0]["context parallel"] for run in runs]
    assert 0 < sums[0] < sums[1] < sums[2]  # 8 key heads of 32: a ring hides them


def test_exchanges_that_megatron_refuses_are_refused():
    text = f"{SHELL} --context-parallel-size 4 --cp-comm-type a2a+p2p"
    for wrong in ("", " --hierarchical-context-parallel-sizes 2 4"):
        with pytest.raises(ValueError, match="expected numbers whose product is --context-parallel-size 4"):
            read_configuration("megatron", text + wrong, "a.sh", Overrides(devices=8))
    launch = Launch(16, 8192, 16, context=16, alltoall=16)
    assert "8 key-value heads do not divide by tp 1 x a2a 16" in " ".join(why_illegal(launch, LLAMA8, "megatron"))


# --- recomputation of modules

MODULES = [  # what a script says, and what of it counts
    ("--recompute-granularity selective", "attn"), ("--recompute-granularity selective --recompute-modules core_attn", "attn"),
    ("--recompute-granularity selective --recompute-modules layernorm mlp", "layernorm+mlp"),
    ("--recompute-granularity selective --recompute-modules mla_up_proj", "none"),  # without latent attention
    ("--recompute-granularity selective --recompute-modules core_attn moe_act layernorm --num-experts 8 --disable-bias-linear",
     "attn+layernorm+moe_act"),
    ("--recompute-granularity selective --recompute-modules moe shared_experts --num-experts 8 --disable-bias-linear", "moe_act"),
]  # fmt: skip


@pytest.mark.parametrize(("said", "recompute"), MODULES)
def test_modules_that_are_recomputed_are_read_and_written(said, recompute):
    text, known = f"{SHELL} \\\n{said}\n", Overrides(devices=8)
    one = read_configuration("megatron", text, "a.sh", known)
    assert one.launch.recompute == recompute and why_illegal(one.launch, one.sizes, "megatron") == ()
    for other in ("none", "full", "attn", "layernorm"):
        to = LaunchConfig(replace(one.launch, recompute=other), one.sizes)
        for written, name in ((edited_text("megatron", to, text, "a.sh", known), "a.sh"), (configuration_text("megatron", to), "b.sh")):
            assert read_configuration("megatron", written, name, known).launch.recompute == other, written


def test_a_module_that_is_recomputed_keeps_nothing_and_takes_its_kernels_again():
    """Per token and block: of an MLP the results of two matmuls and their product, of norms two results, of projections queries, keys and
    values; what kernels write between is fused."""
    launch = Launch(8, 4096, 64, data=8, shard=8, zero=1)
    m, latent = LLAMA8, replace(LLAMA8, latent=(1536, 512, 64, 128, 128))
    bytes = {"moe_act": 2 * m.ffn, "mlp": 6 * m.ffn, "layernorm": 4 * m.width, "mla_up_proj": 2 * m.head_dim * (m.heads + 2 * m.kv_heads)}
    bytes["layernorm+moe_act"] = bytes["layernorm"] + bytes["moe_act"]
    seconds, kept = of(launch, m)
    for name, saved in bytes.items():
        more, less = of(replace(launch, recompute=name), latent if "mla" in name else m)
        assert kept["activations"] - less["activations"] == pytest.approx(m.layers * 4096 * saved, rel=1e-9), name
        assert (more["matmul"] > 1.03 * seconds["matmul"]) == (name in ("mlp", "mla_up_proj"))
        assert sum(more.values()) > sum(seconds.values())


SITES = {"deepseek_v3_b200_nvfp4": (256, Site("b200", memory=180e9)), "deepseek_v3_h100_fp8": (1024, Site())}


@pytest.mark.parametrize("recipe", SITES)
def test_published_recipes_fit_with_what_they_recompute(recipe):
    """Both were published as running; without recomputation that of H100 does not fit."""
    text, (devices, site) = (RECIPES / f"{recipe}.yaml").read_text(), SITES[recipe]
    for old, new, fits in (("", "", True), ("granularity: selective", "granularity: null", None), ("fp32: false", "fp32: true", True)):
        one = read_configuration("megatron", text.replace(old, new), "a.yaml", Overrides(devices=devices))
        assert one.launch.grads16 == ("grad_reduce_in_fp32: false" in text.replace(old, new))
        assert check_launch(one, "megatron", site, changes=False).fits is ("b200" in recipe if fits is None else fits)


def test_gradients_in_16_bits_take_half():
    launch = Launch(64, 4096, 64, data=64, shard=64, zero=1)
    wide, narrow = (of(replace(launch, grads16=is_on), site=Site("h100", network=1e9)) for is_on in (False, True))
    assert narrow[1]["gradients"] == pytest.approx(wide[1]["gradients"] / 2)
    assert narrow[0]["data parallel"] < 0.8 * wide[0]["data parallel"]
    both = TrainingRuns.of([launch, replace(launch, grads16=True)])
    prices = prices_of(both, LLAMA8, Site(), "megatron")
    alone = [prices_of(both[np.array([i])], LLAMA8, Site(), "megatron") for i in (0, 1)]
    assert prices.seconds.tolist() == [one.seconds[0] for one in alone] and prices.bytes.tolist() == [one.bytes[0] for one in alone]
    titan = TITAN.format("") + 'mixed_precision_reduce = "bfloat16"\n'
    one = read_configuration("torchtitan", titan, "a.toml", Overrides(devices=64))
    assert one.launch.grads16 and edited_text("torchtitan", one, titan, "a.toml", Overrides(devices=64)) == titan


FSDP2 = "distributed_type: FSDP\nfsdp_config: {fsdp_version: 2}\n"


@pytest.mark.parametrize("launcher, text, is_on", [
    ("torchtitan", TITAN.format("") + 'dtype = "bfloat16"\n', True), ("torchtitan", TITAN.format(""), False),
    ("accelerate", FSDP2 + "mixed_precision: 'no'\n", True), ("accelerate", FSDP2 + "mixed_precision: bf16\n", False),
    ("automodel", "dataset: {seq_len: 64}\nmodel: {torch_dtype: bf16}\n", True), ("automodel", "dataset: {seq_len: 64}\n", True),
    ("automodel", "dataset: {seq_len: 64}\nmodel: {torch_dtype: float32}\n", False),
])  # fmt: skip
def test_states_have_the_dtype_that_a_configuration_says(launcher, text, is_on):
    known = Overrides(devices=8, sizes=LLAMA8, seq=64, microbatch=1)
    path = "a.toml" if launcher == "torchtitan" else "a.yaml"
    one = read_configuration(launcher, text, path, known)
    assert one.launch.states16 is is_on and one.not_counted == ()
    other = replace(one, launch=replace(one.launch, states16=not is_on))
    assert read_configuration(launcher, edited_text(launcher, other, text, path, known), path, known).launch == other.launch


def test_states_in_16_bits_take_half_of_what_float32_takes():
    """NeMo Automodel's Qwen3 30B-A3B ran on 8 H100 of 80 GB with parameters and moments in 16 bits (docs/performance-summary.mdx)."""
    qwen = FLAVORS["qwen3", "30B-A3B"]
    launch = Launch(8, 4096, 512, 4, data=8, shard=8, zero=2, expert=8, deepep=True, recompute="full", states16=True)
    narrow, wide = (of(replace(launch, states16=is_on), qwen, Site(), "automodel") for is_on in (True, False))
    dense = qwen.parameters - qwen.expert_parameters
    assert narrow[1]["optimizer"] == pytest.approx(4 * (qwen.expert_parameters / 8 + dense / 8)) == wide[1]["optimizer"] / 3
    assert sum(narrow[1].values()) < 80e9 < 100e9 < sum(wide[1].values())
    assert narrow[0]["optimizer"] == pytest.approx(14 / 30 * wide[0]["optimizer"])
    titan = Launch(8, 4096, 8, data=8, shard=8, zero=3)
    sharded = [of(replace(titan, states16=is_on), site=Site(), launcher="torchtitan")[1] for is_on in (True, False)]
    assert sharded[0]["parameters"] == sharded[1]["parameters"] / 2 and sharded[0]["optimizer"] == sharded[1]["optimizer"] / 2
    assert "no parameters and states in 16 bits" in why_illegal(replace(launch, states16=True), qwen, "megatron")[0]
