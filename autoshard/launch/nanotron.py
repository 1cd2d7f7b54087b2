"""nanotron: its YAML. Degrees are dp, tp, pp and context_parallel_size; sizes are those of model_config."""

from __future__ import annotations

from typing import Any

from .model_sizes import sizes_of_config
from .runs import Launch, LaunchConfig, Overrides
from .texts import Nested, flat, parsed

PRECISIONS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "fp8e4m3": "fp8", "float8": "fp8"}
ENGINES = {"1f1b": "1F1B", "afab": "GPipe"}
RESEMBLING = frozenset({"expert_parallel_size", "expert_tensor_parallel_size", "expert_data_parallel_size", "context_parallel_size"})


def read(text: str, path: str, known: Overrides) -> LaunchConfig:
    section = Nested(parsed(text, path), path, RESEMBLING)
    dp, tp, pp = (section.number(f"parallelism.{name}", least=1) for name in ("dp", "tp", "pp"))
    context = section.number("parallelism.context_parallel_size", default=1)
    expert = section.number("parallelism.expert_parallel_size", default=1)
    engine = section.text("parallelism.pp_engine", default="1f1b").lower()
    if engine not in ENGINES:
        raise ValueError(f"{path}: pp_engine is {engine!r}; expected one of {', '.join(ENGINES)}")
    config, moe = section.section("model.model_config"), section.section("model.model_config.moe_config")
    named = {"num_local_experts": moe.get("num_experts"), "num_experts_per_tok": moe.get("top_k"),
             "moe_intermediate_size": moe.get("moe_intermediate_size")} if moe else {}  # fmt: skip
    sizes = known.sizes or sizes_of_config({**config, **{key: value for key, value in named.items() if value}}, f"{path}: model_config")
    sizes = sizes.with_padded_vocab(section.number("model.make_vocab_size_divisible_by", default=1) * tp)
    microbatch = section.number("tokens.micro_batch_size")
    accumulated = section.number("tokens.batch_accumulation_per_replica", default=1)
    zero = section.number("optimizer.zero_stage", default=0)
    launch = Launch(
        devices=known.devices or dp * tp * pp * context, seq=known.seq or section.number("tokens.sequence_length"),
        global_batch=known.global_batch or dp * microbatch * accumulated, microbatch=microbatch,
        data=dp, shard=dp if zero else 1, zero=zero, tensor=tp,
        sequence_parallel=section.text("parallelism.tp_mode", default="ALL_REDUCE").upper() == "REDUCE_SCATTER" and tp > 1,
        context=context, expert=expert, expert_tensor=1 if sizes.experts else tp, pipeline=pp, schedule=ENGINES[engine],
        recompute="full" if section.flag("parallelism.recompute_layer") else "none",
        precision=PRECISIONS.get(section.text("model.dtype", default="bfloat16"), "bf16"),
    )  # fmt: skip
    return LaunchConfig(launch, sizes)


def settings(config: LaunchConfig) -> dict[str, Any]:
    """What the launch and the model's sizes decide; data, checkpoints and so on are yours to add."""
    launch, sizes = config.launch, config.sizes
    engine = next(name for name, schedule in ENGINES.items() if schedule == launch.schedule)
    dtype = next(name for name, precision in PRECISIONS.items() if precision == launch.precision)
    model = {
        "hidden_size": sizes.width, "intermediate_size": sizes.ffn, "num_attention_heads": sizes.heads, "num_hidden_layers": sizes.layers,
        "num_key_value_heads": sizes.kv_heads, "tie_word_embeddings": sizes.tied, "vocab_size": sizes.vocab, "hidden_act": "silu",
        "is_llama_config": True, "max_position_embeddings": launch.seq,
    }  # fmt: skip
    return flat(
        {
            "model": {"dtype": dtype, "make_vocab_size_divisible_by": 1, "model_config": model},
            "optimizer": {"zero_stage": launch.zero, "accumulate_grad_in_fp32": True},
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
