"""Configurations that we write, read by the launchers' own code where it is installed (docs/launchers.md says how).

torchtitan       its parser, of a release that reads TOML: 0.2, with tyro
Megatron-LM      the config that megatron-core makes of arguments; their parser is in Megatron's repository only, in no package
"""

import re
import warnings

import numpy as np
import pytest
import torch
from torch.distributed.pipelining.schedules import get_schedule_class

from autoshard.launch import Launch, LaunchConfig, configuration_text, why_illegal
from autoshard.launch.launch_space import launches, structures
from autoshard.launch.runs import TrainingRuns
from autoshard.launch.texts import arguments_of
from autoshard.launch.torchtitan import FLAVORS

FEW = 12


def sampled(sizes, launcher="torchtitan"):
    rows = TrainingRuns.joined(launches(structures(Launch(64, 4096, 256), launcher), sizes, launcher))
    return [rows.launch(i) for i in np.linspace(0, len(rows) - 1, FEW).astype(int)]


def manager():
    """torchtitan's; a release after 0.2 reads no files."""
    pytest.importorskip("tyro")
    config = pytest.importorskip("torchtitan.config", exc_type=ImportError)
    if not hasattr(config, "JobConfig"):
        pytest.skip("this torchtitan has no JobConfig")
    return config.ConfigManager()


@pytest.mark.parametrize("model, flavor", [("llama3", "70B"), ("deepseek_v3", "671B")])
def test_torchtitans_own_parser_reads_what_is_written(tmp_path, model, flavor):
    sizes, reader, path = FLAVORS[model, flavor], manager(), tmp_path / "job.toml"
    for launch in sampled(sizes):
        path.write_text(configuration_text("torchtitan", LaunchConfig(launch, sizes)))
        read = reader.parse_args(["--job.config-file", str(path)])
        of = read.parallelism
        sizes_of = (of.tensor_parallel_degree, of.context_parallel_degree, of.pipeline_parallel_degree, of.expert_parallel_degree)
        assert sizes_of == (launch.tensor, launch.context, launch.pipeline, launch.expert)
        assert of.data_parallel_replicate_degree * of.data_parallel_shard_degree == launch.data
        assert (read.model.name, read.model.flavor) == (model, flavor)
        assert (read.training.seq_len, read.training.global_batch_size) == (4096, 256)
        if launch.pipeline > 1:
            assert get_schedule_class(of.pipeline_parallel_schedule)
            assert len(of.module_fqns_per_model_part) == launch.pipeline * launch.virtual


def test_torchtitans_own_parser_refuses_a_key_that_it_lacks(tmp_path, capsys):
    reader, path = manager(), tmp_path / "job.toml"
    text = configuration_text("torchtitan", LaunchConfig(sampled(FLAVORS["llama3", "8B"])[0], FLAVORS["llama3", "8B"]))
    path.write_text(text.replace("tensor_parallel_degree", "tensor_degree"))
    with pytest.raises((SystemExit, ValueError, TypeError)):
        reader.parse_args(["--job.config-file", str(path)])


# --- megatron-core

# arguments whose field of TransformerConfig has another name (core_transformer_config_from_args), or that it has no field for
NAMED = {
    **{f"decoder-{end}-pipeline-num-layers": f"num_layers_in_{end}_pipeline_stage" for end in ("first", "last")},
    "microbatch-group-size-per-virtual-pipeline-stage": "microbatch_group_size_per_vp_stage",
    "num-experts": "num_moe_experts", "swiglu": "gated_linear_unit", "q-lora-rank": "q_lora_rank", "kv-lora-rank": "kv_lora_rank",
    "qk-head-dim": "qk_head_dim", "qk-pos-emb-head-dim": "qk_pos_emb_head_dim", "v-head-dim": "v_head_dim",
}  # fmt: skip
OF_THE_RUN = {
    "global-batch-size", "micro-batch-size", "seq-length", "max-position-embeddings", "position-embedding-type", "vocab-size",
    "make-vocab-size-divisible-by", "untie-embeddings-and-output-weights", "use-distributed-optimizer", "group-query-attention",
    "num-virtual-stages-per-pipeline-rank", "num-layers-per-virtual-pipeline-stage", "disable-bias-linear",
}  # fmt: skip


def config_of(written):
    """megatron-core's config of written arguments, as core_transformer_config_from_args fills it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # without Transformer Engine and Apex
        configs = pytest.importorskip("megatron.core.transformer.transformer_config", exc_type=ImportError)
    arguments = arguments_of(written)
    kind = configs.MLATransformerConfig if "multi-latent-attention" in arguments else configs.TransformerConfig
    values = {"pipeline_dtype": torch.bfloat16, "params_dtype": torch.bfloat16}
    for name, words in arguments.items():
        if name not in OF_THE_RUN:
            values[NAMED.get(name, name.replace("-", "_"))] = value_of(words)
    values["add_bias_linear"] = "disable-bias-linear" not in arguments
    stages = arguments.get("num-virtual-stages-per-pipeline-rank")
    return kind(**values, virtual_pipeline_model_parallel_size=int(stages[0]) if stages else None)


def value_of(words):
    """What argparse and Megatron's type for --moe-layer-freq make of an argument's words."""
    text = words[0] if words else True
    if isinstance(text, str) and "[" in text:
        return [int(kind) for kind, count in re.findall(r"\[(\d)\]\*(\d+)", text) for _ in range(int(count))]
    return int(text) if isinstance(text, str) and text.isdecimal() else text


@pytest.mark.parametrize("model, flavor", [("llama3", "70B"), ("deepseek_v3", "671B")])
def test_megatron_core_accepts_what_is_written(model, flavor):
    sizes = FLAVORS[model, flavor]
    for launch in sampled(sizes, "megatron"):
        config = config_of(configuration_text("megatron", LaunchConfig(launch, sizes)))
        degrees = (config.tensor_model_parallel_size, config.context_parallel_size, config.pipeline_model_parallel_size)
        assert degrees == (launch.tensor, launch.context, launch.pipeline)
        assert config.virtual_pipeline_model_parallel_size == (launch.virtual if launch.virtual > 1 else None)
        assert config.sequence_parallel == launch.sequence_parallel
        assert config.num_layers == sizes.layers and config.num_moe_experts == (sizes.experts or None)
        if sizes.experts:
            assert (config.expert_model_parallel_size, config.expert_tensor_parallel_size) == (launch.expert, launch.expert_tensor)
            assert sum(config.moe_layer_freq) == sizes.expert_layers and len(config.moe_layer_freq) == sizes.layers


@pytest.mark.parametrize("wrong", [{"tensor": 3}, {"expert": 2}])
def test_megatron_core_refuses_what_we_call_illegal(wrong):
    """Of heads and experts; layers that don't divide by stages it refuses only when it builds the model."""
    sizes = FLAVORS["llama3", "70B"]
    launch = Launch(64, 4096, 256, **wrong)
    assert why_illegal(launch, sizes, "megatron")
    text = configuration_text("megatron", LaunchConfig(launch, sizes))
    if "expert" in wrong:
        text = f"{text.rstrip()} --expert-model-parallel-size {launch.expert}"
    with pytest.raises((ValueError, AssertionError)):
        config_of(text)
