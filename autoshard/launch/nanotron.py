"""nanotron: its YAML. Degrees are dp, tp, pp and context_parallel_size; sizes are those of model_config."""

from collections.abc import Mapping
from typing import Any

from .model_sizes import PADDED, ModelSizes, sizes_of_config
from .runs import Launch, LaunchConfig, Overrides
from .texts import Nested, flat, integer, parsed

PRECISIONS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "fp8e4m3": "fp8", "float8": "fp8"}
ENGINES = {"1f1b": "1F1B", "afab": "GPipe"}
MOE = {  # defaults of its MoEConfig
    "num_experts": 8, "top_k": 2, "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632, "enable_shared_expert": False,
    "layers": [-1],
}  # fmt: skip
RESEMBLING = frozenset({"expert_parallel_size", "expert_tensor_parallel_size", "expert_data_parallel_size", "context_parallel_size"})


def read(text: str, path: str, known: Overrides) -> LaunchConfig:
    section = Nested(parsed(text, path), path, RESEMBLING)
    dp, tp, pp = (section.number(f"parallelism.{name}", least=1) for name in ("dp", "tp", "pp"))
    context = section.number("parallelism.context_parallel_size", default=1)
    expert = section.number("parallelism.expert_parallel_size", default=1)
    engine = section.text("parallelism.pp_engine", default="afab").lower()
    if engine not in ENGINES:
        raise ValueError(f"{path}: pp_engine is {engine!r}; expected one of {', '.join(ENGINES)}")
    config, moe = section.section("model.model_config"), section.section("model.model_config.moe_config")
    sizes = known.sizes or sizes_of_config({**config, **_of_experts(config, moe)}, f"{path}: model_config")
    sizes = sizes.with_padded_vocab(section.number("model.make_vocab_size_divisible_by", default=PADDED["nanotron"], least=1), tp)
    microbatch = section.number("tokens.micro_batch_size", least=1)
    accumulated = section.number("tokens.batch_accumulation_per_replica", default=1, least=1)
    zero = min(section.number("optimizer.zero_stage", default=0), 1)  # helpers.py:409: any stage is the first
    launch = Launch(
        devices=known.devices or dp * tp * pp * context, seq=known.seq or section.number("tokens.sequence_length"),
        global_batch=known.global_batch or dp * microbatch * accumulated, microbatch=microbatch,
        data=dp, shard=dp if zero else 1, zero=zero, tensor=tp,
        sequence_parallel=section.text("parallelism.tp_mode", default="ALL_REDUCE").upper() == "REDUCE_SCATTER" and tp > 1,
        context=context, expert=expert, pipeline=pp, schedule=ENGINES[engine],
        recompute="full" if section.flag("parallelism.recompute_layer") else "none",
        grads16=section.value("optimizer.accumulate_grad_in_fp32") is False,
        precision=PRECISIONS.get(section.text("model.dtype", default="bfloat16"), "bf16"),
    )  # fmt: skip
    return LaunchConfig(launch, sizes)


def _of_experts(config: Mapping[str, Any], moe: Mapping[str, Any]) -> dict[str, Any]:
    """`moe_config` by the names of Hugging Face, with nanotron's defaults."""
    if not moe:
        return {}
    known = MOE | {key: value for key, value in moe.items() if value is not None}
    layers = known["layers"] if isinstance(known["layers"], list) else [-1]
    dense = 0 if layers == [-1] else integer(config.get("num_hidden_layers"), "num_hidden_layers") - len(layers)
    return {
        "num_local_experts": known["num_experts"], "num_experts_per_tok": known["top_k"], "first_k_dense_replace": dense,
        "moe_intermediate_size": known["moe_intermediate_size"],
        "shared_expert_intermediate_size": known["enable_shared_expert"] and known["shared_expert_intermediate_size"],
    }  # fmt: skip


def no_key_for(sizes: ModelSizes) -> str:
    """What nanotron has no key for; "" where it can express the model."""
    others = sizes.latent or sizes.mtp or sizes.learned_positions or sizes.qk_norm
    if others or not sizes.gated or sizes.head_dim * sizes.heads != sizes.width:
        return ("nanotron has no key for latent attention, normalized queries and keys, further predictions, other MLPs, "
                f"or {sizes.heads} heads of width {sizes.head_dim} in a model of width {sizes.width}")  # fmt: skip
    return ""


def model(sizes: ModelSizes) -> dict[str, Any]:
    """What says that there are experts. ValueError for a model that nanotron has no keys for."""
    if why := no_key_for(sizes):
        raise ValueError(f"{why}; expected a Llama, Qwen2 or mixture of them")
    if not sizes.experts:
        return {"model.model_config.is_llama_config": True}
    moe = {
        "num_experts": sizes.experts, "top_k": sizes.active, "moe_intermediate_size": sizes.expert_ffn,
        "enable_shared_expert": sizes.shared_ffn > 0, "shared_expert_intermediate_size": sizes.shared_ffn,
        "layers": [*range(sizes.dense_layers, sizes.layers)],
    }  # fmt: skip
    return {"model.model_config.is_qwen2_config": True, "model.model_config.moe_config": moe}


def settings(config: LaunchConfig) -> dict[str, Any]:
    """What the launch and the model's sizes decide; data, checkpoints and so on are yours to add."""
    launch, sizes = config.launch, config.sizes
    engine = next(name for name, schedule in ENGINES.items() if schedule == launch.schedule)
    dtype = next(name for name, precision in PRECISIONS.items() if precision == launch.precision)
    model = {
        "hidden_size": sizes.width, "intermediate_size": sizes.ffn, "num_attention_heads": sizes.heads, "num_hidden_layers": sizes.layers,
        "num_key_value_heads": sizes.kv_heads, "tie_word_embeddings": sizes.tied, "vocab_size": sizes.own_vocab, "hidden_act": "silu",
        "max_position_embeddings": launch.seq,
    }  # fmt: skip
    return flat(
        {
            "model": {"dtype": dtype, "make_vocab_size_divisible_by": 1, "model_config": model},
            "optimizer": {"zero_stage": launch.zero, "accumulate_grad_in_fp32": not launch.grads16},
            "parallelism": {
                "dp": launch.data, "tp": launch.tensor, "pp": launch.pipeline, "pp_engine": engine, "expert_parallel_size": launch.expert,
                "context_parallel_size": launch.context, "recompute_layer": launch.recompute == "full",
                "tp_mode": "REDUCE_SCATTER" if launch.sequence_parallel else "ALL_REDUCE",
                "tp_linear_async_communication": launch.sequence_parallel,
            },
            "tokens": {
                "batch_accumulation_per_replica": launch.microbatches, "micro_batch_size": launch.microbatch, "sequence_length": launch.seq,
            },
        }
    )  # fmt: skip
