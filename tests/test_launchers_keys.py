"""Keys of a configuration: what a user misspells is refused in a sentence."""

import json
import re
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from autoshard.launch import Launch, ModelSizes, Overrides, edited_text, read_configuration
from autoshard.launch.configurations import UNCOUNTED
from autoshard.launch.legality import LAUNCHERS
from autoshard.launch.texts import toml_text, yaml_text
from tests.helpers_command import refusal, run

DATA = Path(__file__).parent / "data" / "launchers"
LLAMA = DATA / "torchtitan" / "llama3_8b.toml"
SIZES = ModelSizes(2, 64, 128, 4, 4, 256)
KNOWN = Overrides(devices=8, sizes=SIZES, seq=64, microbatch=1)


MISSPELLED = [  # file, text, its replacement, sentence
    ("torchtitan/llama3_8b.toml", "\ntensor_parallel_degree", "\ntensor_parallel_degre",
     "there is no parallelism.tensor_parallel_degre; near is tensor_parallel_degree"),
    ("torchtitan/llama3_8b.toml", "data_parallel_shard_degree", "data_parallel_shard_degre",
     "there is no parallelism.data_parallel_shard_degre; near is data_parallel_shard_degree"),
    ("torchtitan/llama3_8b.toml", "[parallelism]", "[paralelism]", "there is no paralelism; near is parallelism"),
    ("torchtitan/llama3_8b.toml", "\nbatch_size", "\nlocal_batch_siz", "no training.local_batch_siz; near is local_batch_size"),
    ("torchtitan/llama3_8b.toml", "selective_ac_option", "selective_ac_opton", "near is selective_ac_option"),
    ("torchtitan/deepseek_v3_671b.json", '"expert_parallel_degree"', '"expert_paralel_degree"', "near is expert_parallel_degree"),
    ("nanotron/tiny_llama.yaml", "micro_batch_size", "micro_batchsize", "there is no tokens.micro_batchsize; near is micro_batch_size"),
    ("nanotron/tiny_llama.yaml", "optimizer:", "optimiser:", "there is no optimiser; near is optimizer"),
    ("accelerate/nd.yaml", "fsdp_activation_checkpointing", "fsdp_activation_checkpoint", "near is fsdp_activation_checkpointing"),
    ("accelerate/nd.yaml", "parallelism_config_cp_size", "paralelism_config_cp_size", "near is parallelism_config_cp_size"),
]  # fmt: skip


@pytest.mark.parametrize("file, old, new, sentence", MISSPELLED, ids=[row[2].strip() for row in MISSPELLED])
def test_a_misspelled_key_is_refused_with_the_one_that_is_near(file, old, new, sentence):
    path, launcher = DATA / file, file.split("/")[0]
    text = path.read_text()
    assert old in text
    known = KNOWN if launcher == "accelerate" else replace(KNOWN, microbatch=None)  # the others have it in the file
    read_configuration(launcher, text, path.name, known)
    with pytest.raises(ValueError, match=f"^{path.name}: there is no ") as refusal:
        read_configuration(launcher, text.replace(old, new), path.name, known)
    assert sentence in str(refusal.value) and "\n" not in str(refusal.value)


PLAIN = {
    "torchtitan": {"model": {"name": "llama3", "flavor": "8B"}},
    "nanotron": {"parallelism": {"dp": 1, "tp": 1, "pp": 1}, "tokens": {"micro_batch_size": 1, "sequence_length": 64}},
    "accelerate": {"distributed_type": "FSDP", "num_processes": 8},
    "deepspeed": {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 1},
    "automodel": {"step_scheduler": {"global_batch_size": 8, "local_batch_size": 1}, "dataset": {"seq_len": 64}},
}
KEYS = {  # launcher -> section -> keys of its documentation, of former versions too
    "torchtitan": {
        "": "job profiling metrics optimizer lr_scheduler checkpoint activation_checkpoint compile float8 quantize mx comm "
        "memory_estimation fault_tolerance experimental validation debug",
        "model": "tokenizer_path hf_assets_path converters print_after_conversion norm_type",
        "training": "dataset dataset_path local_batch_size global_batch_size batch_size seq_len max_norm steps enable_cpu_offload dtype "
        "mixed_precision_param mixed_precision_reduce compile gc_freq gc_debug seed deterministic debug_moe_force_load_balance "
        "data_parallel_degree data_parallel_shard_degree data_parallel_replicate_degree tensor_parallel_degree warmup_steps",
        "parallelism": "data_parallel_replicate_degree data_parallel_shard_degree data_parallel_degree tensor_parallel_degree "
        "context_parallel_degree pipeline_parallel_degree expert_parallel_degree expert_tensor_parallel_degree disable_loss_parallel "
        "enable_loss_parallel enable_async_tensor_parallel enable_compiled_autograd fsdp_reshard_after_forward "
        "module_fqns_per_model_part pipeline_parallel_first_stage_less_layers pipeline_parallel_last_stage_less_layers "
        "pipeline_parallel_layers_per_stage pipeline_parallel_schedule pipeline_parallel_schedule_csv pipeline_parallel_split_points "
        "pipeline_parallel_microbatch_size pipeline_parallel_microbatches context_parallel_rotate_method",
        "experimental": "pipeline_parallel_degree pipeline_parallel_microbatches context_parallel_degree enable_async_tensor_parallel "
        "enable_compiled_autograd custom_import custom_args_module",
        "activation_checkpoint": "mode selective_ac_option per_op_sac_force_recompute_mm_shapes_by_fqns early_stop memory_budget "
        "visualize_memory_budget_pareto preserve_rng_state determinism_check debug",
        "compile": "enable components backend",
        "float8": "recipe_name enable_fsdp_float8_all_gather precompute_float8_dynamic_scale_for_fsdp filter_fqns moe_fqns emulate",
    },
    "deepspeed": {
        "": "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps optimizer scheduler communication_data_type "
        "prescale_gradients gradient_predivide_factor sparse_gradients fp16 bf16 bfloat16 amp gradient_clipping zero_optimization "
        "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer activation_checkpointing sparse_attention steps_per_print "
        "wall_clock_breakdown dump_state flops_profiler tensorboard wandb csv_monitor comms_logger aio elasticity compression_training "
        "data_efficiency checkpoint tensor_parallel sequence_parallel_size torch_autocast compile data_types "
        "seq_parallel_communication_data_type",
        "zero_optimization": "stage allgather_partitions allgather_bucket_size overlap_comm reduce_scatter reduce_bucket_size "
        "contiguous_gradients offload_optimizer offload_param sub_group_size stage3_max_live_parameters stage3_max_reuse_distance "
        "stage3_prefetch_bucket_size stage3_param_persistence_threshold stage3_gather_16bit_weights_on_model_save "
        "gather_16bit_weights_on_model_save ignore_unused_parameters round_robin_gradients zero_hpz_partition_size "
        "zero_quantized_weights zero_quantized_gradients mics_shard_size mics_hierarchical_params_gather cpu_offload",
        "bf16": "immediate_grad_update bf16_master_weights_and_grads bf16_optimizer_states",
        "fp16": "auto_cast loss_scale initial_scale_power loss_scale_window hysteresis min_loss_scale consecutive_hysteresis",
        "activation_checkpointing": "cpu_checkpointing contiguous_memory_optimization number_checkpoints synchronize_checkpoint_boundary "
        "profile",
    },
    "automodel": {
        "": "recipe step_scheduler dist_env rng seed model checkpoint distributed loss_fn dataset packed_sequence dataloader optimizer "
        "lr_scheduler validation_dataset validation_dataloader wandb mlflow peft quantization fp8 compile benchmark ci slurm autopipeline "
        "parallelizer processor freeze_config",
        "step_scheduler": "grad_acc_steps ckpt_every_steps val_every_steps num_epochs max_steps global_batch_size local_batch_size "
        "gc_every_steps",
        "distributed": "_target_ strategy dp_size dp_replicate_size tp_size cp_size pp_size ep_size sequence_parallel tp_plan mp_policy "
        "offload_policy autocast_dtype activation_checkpointing activation_checkpointing_scope defer_fsdp_grad_sync reshard_after_forward "
        "enable_async_tensor_parallel enable_compile enable_fsdp2_prefetch pipeline moe zero_dp_strategy use_hf_tp_plan backend",
        "dataset": "dataset_name split seq_length num_samples paths index_mapping_dir tokenizer path_or_dataset seq_len",
        "fp8": "recipe_name filter_fqns enable_fsdp_float8_all_gather precompute_float8_dynamic_scale_for_fsdp "
        "force_recompute_fp8_weight_in_bwd",
        "compile": "mode fullgraph dynamic backend",
    },
    "nanotron": {
        "": "checkpoints data_stages general lighteval logging metrics_logging model optimizer profiler tokenizer s3_upload",
        "parallelism": "pp_engine tp_mode tp_linear_async_communication tp_recompute_allgather recompute_layer expert_parallel_size "
        "expert_tensor_parallel_size expert_data_parallel_size context_parallel_size",
        "tokens": "batch_accumulation_per_replica train_steps val_check_interval limit_val_batches limit_test_batches",
        "optimizer": "accumulate_grad_in_fp32 clip_grad learning_rate_scheduler optimizer_factory weight_decay zero_stage",
    },
    "accelerate": {
        "": "compute_environment debug downcast_bf16 enable_cpu_affinity machine_rank main_process_ip main_process_port "
        "main_training_function mixed_precision num_machines rdzv_backend same_network tpu_env use_cpu dynamo_config fsdp_config "
        "deepspeed_config megatron_lm_config fp8_config mpirun_config parallelism_config gpu_ids gradient_accumulation_steps",
        "fsdp_config": "fsdp_version fsdp_auto_wrap_policy fsdp_backward_prefetch fsdp_sharding_strategy fsdp_offload_params "
        "fsdp_state_dict_type fsdp_cpu_ram_efficient_loading fsdp_sync_module_states fsdp_use_orig_params fsdp_forward_prefetch "
        "fsdp_transformer_layer_cls_to_wrap fsdp_min_num_params fsdp_activation_checkpointing fsdp_reshard_after_forward",
        "parallelism_config": " ".join(
            f"parallelism_config_{name}"
            for name in "dp_replicate_size dp_shard_size tp_size cp_size sp_size cp_backend cp_comm_strategy sp_backend".split()
        ),
    },
}
ALONE = [(launcher, section, key) for launcher, keys in KEYS.items() for section, words in keys.items() for key in words.split()]


@pytest.mark.parametrize("launcher", KEYS)
def test_no_key_of_the_launcher_is_taken_for_a_misspelling_of_another(launcher):
    """Each alone, so that every key that resembles it is missing; None is a key whose default counts."""
    for _, section, key in (row for row in ALONE if row[0] == launcher):
        data = {name: dict(value) if isinstance(value, dict) else value for name, value in PLAIN[launcher].items()}
        if section:
            data[section] = data.get(section, {}) | {key: None}
        elif key not in data:
            data[key] = None
        read_configuration(launcher, json.dumps(data), f"a{'.json' if launcher == 'torchtitan' else '.yaml'}", KNOWN)


@pytest.mark.parametrize("launcher", KEYS)
def test_keys_near_to_nothing_stay(launcher):
    data = PLAIN[launcher] | {"mine": {"colour": "blue"}}
    text, path = (toml_text(data), "a.toml") if launcher == "torchtitan" else (yaml_text(data | {7: True}), "a.yaml")
    plain, more = (read_configuration(launcher, one, path, KNOWN) for one in (json_as(path, PLAIN[launcher]), text))
    assert plain == more


def json_as(path, data):
    return toml_text(data) if path.endswith(".toml") else yaml_text(data)


def test_a_misspelled_key_beside_the_right_one_stays():
    text = LLAMA.read_text().replace("[parallelism]", "[parallelism]\ntensor_parallel_degre = 2")
    assert read_configuration("torchtitan", text, "a.toml", Overrides(devices=8)).launch.tensor == 1


@pytest.mark.parametrize(
    "mode, recompute", [("none", "none"), ("selective", "selective_op"), ("full", "full"), ("memory_budget", "selective_op")]
)
def test_modes_of_checkpointing_are_those_of_torchtitan(mode, recompute):
    text = LLAMA.read_text().replace('mode = "selective"', f'mode = "{mode}"')
    assert read_configuration("torchtitan", text, "a.toml", Overrides(devices=8)).launch.recompute == recompute


SAVED = {"model_spec": {"name": "llama3", "flavor": "8B"}, "activation_checkpoint": None,
         "training": {"local_batch_size": 1, "seq_len": 8192}, "parallelism": {"tensor_parallel_degree": 8}}  # fmt: skip
POLICY = {"preserve_rng_state": True, "determinism_check": "default"}


@pytest.mark.parametrize(
    "section, values, field, value",
    [
        ("activation_checkpoint", None, "recompute", "none"),
        ("activation_checkpoint", POLICY, "recompute", "full"),
        ("activation_checkpoint", POLICY | {"force_recompute_mm_shapes_by_fqns": []}, "recompute", "selective_op"),
        ("activation_checkpoint", POLICY | {"memory_budget": 0.5}, "recompute", "selective_op"),
        ("loss", {"num_chunks": 8}, "loss_chunks", 8),
        ("loss", {}, "loss_chunks", 1),
        ("parallelism", {"tensor_parallel_degree": 8, "enable_sequence_parallel": False}, "sequence_parallel", False),
        ("parallelism", {"tensor_parallel_degree": 8, "enable_sequence_parallel": True}, "sequence_parallel", True),
        ("compile", {"enable": True, "enable_async_tensor_parallel": True}, "async_tensor", True),
    ],
)
def test_what_torchtitan_03_saves_is_read_by_its_own_keys(section, values, field, value):
    text = json.dumps(SAVED | {section: values})
    one = read_configuration("torchtitan", text, "a.json", Overrides(devices=8))
    assert getattr(one.launch, field) == value
    assert edited_text("torchtitan", one, text, "a.json", Overrides(devices=8)) == text


def test_a_job_as_large_as_torchtitan_saves_it_is_read(tmp_path):
    job = tmp_path / "job.json"
    job.write_text(json.dumps(SAVED | {"mine": ["x" * 1000] * 900}))
    assert run("show", str(job), "--launcher", "torchtitan", "--devices", "8")[0] in (0, 1)


TITAN = LLAMA.read_text()
MEGATRON = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --nproc_per_node 8 --bf16 --overlap-grad-reduce "
SAID = [  # launcher, text, what is said
    ("torchtitan", TITAN, ""),
    ("torchtitan", TITAN.replace("[training]", '[training]\ndtype = "bfloat16"'), ""),
    ("torchtitan", TITAN.replace("[training]", "[training]\nenable_cpu_offload = true"), "training.enable_cpu_offload True: states"),
    ("torchtitan", TITAN.replace('mode = "selective"', 'mode = "memory_budget"'), "activation_checkpoint.mode memory_budget: "),
    ("torchtitan", TITAN.replace('option = "op"', 'option = "8"'), "selective_ac_option 8: counted as every second block"),
    ("torchtitan", TITAN.replace("[parallelism]", "[parallelism]\ndisable_loss_parallel = true"), ""),  # tp is 1
    ("torchtitan", json.dumps(SAVED | {"parallelism": {"tensor_parallel_degree": 8, "disable_loss_parallel": True}}), "disable_loss_par"),
    ("torchtitan", json.dumps(SAVED | {"training": {"max_context_length": 8192}}), "!max_context_length 8192: the sequence is told"),
    ("megatron", MEGATRON, ""),
    ("megatron", MEGATRON.replace("--overlap-grad-reduce", ""), "overlap-grad-reduce is missing: gradients are counted as reduced"),
    ("megatron", MEGATRON + "--optimizer sgd", "optimizer sgd: states are counted as Adam's"),
    ("megatron", MEGATRON + "--exp-avg-dtype bf16", "exp-avg-dtype bf16: states are counted in float32"),
    ("megatron", MEGATRON + "--cp-comm-type a2a", ""),
    ("megatron", MEGATRON + "--cp-comm-type a2a --context-parallel-size 2", ""),
    ("megatron", MEGATRON + "--cp-comm-type all_gather --context-parallel-size 2", "cp-comm-type all_gather: attention is counted as"),
    ("megatron", MEGATRON + "--hybrid-context-parallel", "hybrid-context-parallel on: sequences are counted as equally long"),
    ("megatron", MEGATRON + "--recompute-granularity full --recompute-method block --recompute-num-layers 4", ""),
    ("megatron", MEGATRON + "--recompute-granularity full --recompute-method uniform --recompute-num-layers 4", "num-layers 4: each block"),
    ("megatron", MEGATRON + "--hybrid-layer-pattern M*E", "!hybrid-layer-pattern M.E: some blocks are no attention with an MLP"),
    ("megatron", MEGATRON + "--experimental-attention-variant gated_delta_net", "!variant gated_delta_net: linear attention has no prices"),
    ("megatron", MEGATRON + "--experimental-attention-variant dsa", "variant dsa: attention is counted as queries"),
    ("megatron", MEGATRON + "--hybrid-attention-ratio 0.0", ""),
    ("megatron", MEGATRON + "--hybrid-attention-ratio 0.1", "!hybrid-attention-ratio 0.1: some blocks are no attention with an MLP"),
    ("megatron", MEGATRON + "--moe-latent-size 1024", "!moe-latent-size 1024: experts of a narrower input have no prices"),
    ("megatron", MEGATRON + "--deepspeed", "!deepspeed on: Megatron-DeepSpeed shards states, experts and sequences by options of its own"),
    ("megatron", MEGATRON + "--window-size 127,0", ""),
    ("megatron", MEGATRON + "--window-size 127,0 --softmax-type learnable", "softmax-type learnable: attention is counted without its"),
    ("megatron", MEGATRON + "--cuda-graph-impl none", ""),
    ("megatron", MEGATRON + "--cuda-graph-impl local", "cuda-graph-impl local: the host is counted as launching each kernel"),
    ("accelerate", "num_processes: 8\ndeepspeed_config: {deepspeed_config_file: a.json}", "!a.json: the settings are in that file"),
    ("accelerate", "num_processes: 8\nfsdp_config: {fsdp_offload_params: true}", "!fsdp_offload_params True: parameters on"),
    ("accelerate", "distributed_type: DEEPSPEED\nnum_processes: 8\nmixed_precision: fp16\n"
     "deepspeed_config: {offload_optimizer_device: cpu}", "offload_optimizer_device cpu: the opt"),
    ("accelerate", "distributed_type: DEEPSPEED\nnum_processes: 8", "!DeepSpeed without mixed precision is float32"),
    ("deepspeed", '{"optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": "auto"}}', ""),
    ("deepspeed", '{"optimizer": {"type": "SGD"}}', "optimizer.type SGD: states are counted as Adam's"),
    ("deepspeed", '{"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8}}', "zero_hpz_partition_size 8: parameters are counted"),
    ("deepspeed", '{"zero_optimization": {"stage": 3, "overlap_comm": false}}', "overlap_comm False: transfers are counted beside"),
    ("deepspeed", '{"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}}', "device nvme: the optimizer is"),
    ("deepspeed", '{"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}', ""),
    ("deepspeed", '{"zero_optimization": {"stage": 4}}', "!zero_optimization.stage 4: expected a stage from 0 to 3"),
    ("deepspeed", '{"fp16": {"enabled": true}, "bf16": {"enabled": true}}', "!enables fp16 and bf16; DeepSpeed accepts one"),
    ("automodel", "peft: {_target_: Lora, dim: 8}", "!peft Lora: adapters train few of the parameters"),
    ("automodel", "peft: null\noptimizer: {_target_: torch.optim.AdamW}", ""),
    ("automodel", "model: {backend: {te_fp8: {recipe: mxfp8}}}", "te_fp8 mxfp8: the backend's matmuls are counted in 16 bits"),
    ("automodel", "model: {backend: {te_fp8: null, experts: gmm}}", ""),
    ("automodel", "model: {backend: {experts: torch_mm_mxfp8}}", "experts torch_mm_mxfp8: experts' matmuls are counted in 16 bits"),
    ("automodel", "loss_fn: {_target_: linear_ce.FusedLinearCrossEntropy}", "FusedLinearCrossEntropy: all logits are counted at once"),
]  # fmt: skip


@pytest.mark.parametrize("launcher, text, said", SAID)
def test_what_no_figure_counts_is_said_or_refused(launcher, text, said):
    path = {"megatron": "a.sh", "torchtitan": "a.json" if text[0] == "{" else "a.toml"}.get(launcher, "a.yaml")
    if said.startswith("!"):
        with pytest.raises(ValueError, match=f"^{path}.*{said[1:]}"):
            read_configuration(launcher, text, path, KNOWN)
    else:
        notes = read_configuration(launcher, text, path, replace(KNOWN, microbatch=None) if launcher == "torchtitan" else KNOWN).not_counted
        assert said in " ".join(notes) and len(notes) == bool(said)


def test_rows_of_what_is_not_counted_name_launchers_patterns_and_degrees():
    assert {*UNCOUNTED} == {*LAUNCHERS}
    for of in UNCOUNTED.values():
        assert {*of} == {"refused", "noted"}
        for harmless, effect, *degree in (row for kind in of.values() for row in kind.values()):
            assert re.compile(harmless) and not effect.endswith(".") and {*degree} <= {*Launch.__dataclass_fields__}


def test_check_says_what_it_does_not_count(tmp_path):
    job = tmp_path / "job.toml"
    job.write_text(TITAN.replace("[training]", "[training]\nenable_cpu_offload = true"))
    argv = ("show", str(job), "--launcher", "torchtitan", "--devices", "8")
    said = "training.enable_cpu_offload True: states are counted on the device"
    assert f"not counted: {said}" in " ".join(run(*argv)[1].split())
    assert json.loads(run(*argv, "--json")[1])["not_counted"] == [said]


def test_a_misspelled_mode_of_checkpointing_is_refused():
    text = LLAMA.read_text().replace('mode = "selective"', 'mode = "selectiv"')
    with pytest.raises(ValueError, match="^a.toml: activation_checkpoint.mode is 'selectiv'; expected one of none, selective, full, mem"):
        read_configuration("torchtitan", text, "a.toml", Overrides(devices=8))


# --- on the command line


def test_check_refuses_a_misspelled_key(tmp_path):
    job = tmp_path / "job.toml"
    job.write_text(LLAMA.read_text().replace("\ntensor_parallel_degree = 1", "\ntensor_parallel_degre = 2"))
    sentence = refusal("check", str(job), "--launcher", "torchtitan", "--devices", "64")
    assert f"{job}: there is no parallelism.tensor_parallel_degre; near is tensor_parallel_degree" in sentence


@pytest.mark.parametrize(
    "verb, file, said",
    [
        ("check", "nanotron/qwen.yaml", "may be of several launchers; add --launcher accelerate, nanotron, deepspeed, automodel,"),
        ("show", "nanotron/qwen.yaml", "may be of several launchers; add --launcher accelerate"),
        ("export", "torchtitan/llama3_8b.toml", "looks like a launcher's configuration, not like a plan; `autoshard check`, `fits`"),
    ],
)
def test_a_configuration_where_it_can_t_be_answered_is_told_apart(verb, file, said):
    assert f"{file} {said}" in refusal(verb, str(DATA / file))


def test_check_of_no_file_and_of_no_plan_says_that(tmp_path):
    assert "looks like" not in refusal("check", str(tmp_path / "none.toml"))
    (tmp_path / "a.json").write_text("{'a'}")
    said = refusal("check", str(tmp_path / "a.json"), "--launcher", "deepspeed")
    assert "is no sound JSON" in said and "or a launcher's configuration" in said


def test_the_nodes_and_the_name_that_a_file_implies_are_checked(tmp_path):
    (tmp_path / "a.toml").write_text('[model]\nname = "llama3"\nflavor = "8B"\n[parallelism]\ndata_parallel_shard_degree = 12\n')
    assert "12 devices do not fill nodes of 8; give --per-node a divisor" in refusal("fits", str(tmp_path / "a.toml"))
    said = refusal("check", str(tmp_path / "a.toml"), "--out", str(tmp_path / "b.sh"))
    assert "b.sh is no configuration of torchtitan, which reads .toml" in said
    assert "or a launcher's configuration" in refusal("show", str(tmp_path / "a.toml"), "none.toml")


def test_check_prints_the_global_batch_that_it_holds():
    argv = ("check", str(LLAMA), "--launcher", "torchtitan", "--devices", "64")
    code, out, _ = run(*argv)
    assert code == 0 and "global batch 64 sequences of 8192 tokens" in " ".join(out.split())
    _, out, _ = run(*argv, "--global-batch", "128")
    assert "global batch 128 sequences of 8192 tokens" in " ".join(out.split())


def test_a_number_of_devices_given_as_the_device_is_told_apart():
    argv = ("check", str(LLAMA), "--launcher", "torchtitan", "--device")
    number, name = refusal(*argv, "64"), refusal(*argv, "h1000")
    assert "unknown device '64'; known are a100" in number and number.endswith("; for a number of devices use --devices 64\n")
    assert "unknown device 'h1000'; known are a100" in name and "--devices" not in name


def test_toml_is_read_as_it_was_written():
    data = {"a": [1, "x", [True]], "b c": {"d": {"e": {}}, "f": [{"g": 1.5, "h i": '"\n'}]}, "j": {"k": {"l": False}}}
    assert tomllib.loads(toml_text(data)) == data
