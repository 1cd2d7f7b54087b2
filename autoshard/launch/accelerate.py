"""accelerate: the YAML of `accelerate config`. It says neither the model nor the batch: those come from the command line.

Without mixed precision the model keeps its own dtype, which is taken to be bfloat16; DeepSpeed accepts nothing but float32 then.

FSDP       fsdp_version 2 with reshard_after_forward, or version 1 with its sharding strategy; degrees in parallelism_config
MULTI_GPU  replicas        DEEPSPEED  zero_stage
"""

from typing import Any

from .runs import MODEL, Launch, LaunchConfig, Overrides
from .texts import Nested, flat, parsed

PRECISIONS = {"no": "bf16", "none": "bf16", "false": "bf16", "fp16": "fp16", "bf16": "bf16", "fp8": "fp8"}  # YAML reads a bare no as false
STRATEGIES = {"FULL_SHARD": 3, "SHARD_GRAD_OP": 2, "NO_SHARD": 0, "HYBRID_SHARD": 3, "HYBRID_SHARD_ZERO2": 2}
NUMBERED = {"1": "FULL_SHARD", "2": "SHARD_GRAD_OP", "3": "NO_SHARD", "4": "HYBRID_SHARD", "5": "HYBRID_SHARD_ZERO2",
            "true": "FULL_SHARD", "false": "SHARD_GRAD_OP"}  # fmt: skip
DEGREES = ("dp_replicate", "dp_shard", "tp", "cp", "sp", "ep", "pp")
RESEMBLING = frozenset({"fsdp_config", "fp8_config", *(f"parallelism_config_{name}_size" for name in DEGREES)})  # one another
OPTION = "--{} N: accelerate leaves it to the script"


def read(text: str, path: str, known: Overrides) -> LaunchConfig:
    section = Nested(parsed(text, path), path, RESEMBLING)
    if section.value("distributed_type") is None:
        raise ValueError(f"{path} has no distributed_type, so it is no file of `accelerate config`; add it, or name another --launcher")
    sizes = known.need("sizes", path, f"{MODEL}: accelerate leaves the model to the script")
    sizes_of = {name: section.number(f"parallelism_config.parallelism_config_{name}_size", default=0) for name in DEGREES[:5]}
    processes = known.devices or section.number("num_processes", default=-1)
    if processes < 1:
        processes = known.need("devices", path, "--devices")
    tensor, context = max(sizes_of["tp"], 1), max(sizes_of["cp"], 1) * max(sizes_of["sp"], 1)
    ranks = max(processes // (tensor * context), 1)  # data parallel
    shard, zero = _sharding(section, ranks, known.per_node)
    data_parallel = ranks
    if any(sizes_of.values()):
        shard = max(sizes_of["dp_shard"], 1)
        data_parallel = shard * max(sizes_of["dp_replicate"], 1)
        zero = zero if shard * context > 1 else 0
    microbatch = known.need("microbatch", path, OPTION.format("microbatch"))
    accumulated = section.number("gradient_accumulation_steps", "deepspeed_config.gradient_accumulation_steps", default=1)
    precision = section.text("mixed_precision", default="no").lower()
    if precision not in PRECISIONS:
        raise ValueError(f"{path}: mixed_precision is {str(precision)[:40]!r}; expected no, fp16, bf16 or fp8")
    pure = PRECISIONS[precision] == "bf16" and precision != "bf16"
    if pure and section.text("distributed_type").upper() == "DEEPSPEED" and section.value("deepspeed_config.deepspeed_config_file") is None:
        raise ValueError(f"{path}: DeepSpeed without mixed precision is float32, which has no prices; expected mixed_precision: bf16")
    compiled = section.text("dynamo_config.dynamo_backend", "dynamo_backend", default="NO").upper() not in ("NO", "EAGER")
    recomputed = section.flag("fsdp_config.fsdp_activation_checkpointing") and section.text("distributed_type").upper() == "FSDP"
    launch = Launch(
        devices=processes, seq=known.need("seq", path, OPTION.format("seq")),
        global_batch=known.global_batch or data_parallel * microbatch * accumulated, microbatch=microbatch,
        data=data_parallel, shard=shard, zero=zero, tensor=tensor, context=context, alltoall=max(sizes_of["sp"], 1),
        recompute="full" if recomputed else "none", precision=PRECISIONS[precision],
        compiled=compiled, compiled_loss=compiled, states16=pure,
    )  # fmt: skip
    return LaunchConfig(launch, sizes)


def _sharding(section: Nested, ranks: int, per_node: int) -> tuple[int, int]:
    """Over how many data parallel ranks states are sharded, and which (`Launch.zero`)."""
    kind = section.text("distributed_type").upper()
    if kind == "FSDP":
        if section.number("fsdp_config.fsdp_version", default=1) >= 2:
            again = section.value("fsdp_config.fsdp_reshard_after_forward")
            return ranks, 2 if again is not None and not section.flag("fsdp_config.fsdp_reshard_after_forward") else 3
        names = (f"fsdp_config.fsdp_{name}" for name in ("sharding_strategy", "reshard_after_forward"))  # which are one in version 1
        written = section.text(*names, default="FULL_SHARD")
        strategy = NUMBERED.get(written.lower(), written)
        if strategy not in STRATEGIES:
            raise ValueError(f"{section.path}: fsdp_sharding_strategy is {str(written)[:40]!r}; expected one of {', '.join(STRATEGIES)}")
        hybrid = strategy.startswith("HYBRID") and ranks % per_node == 0
        return (per_node if hybrid else ranks if STRATEGIES[strategy] else 1), STRATEGIES[strategy]
    if kind == "DEEPSPEED":
        zero = section.number("deepspeed_config.zero_stage", default=2)
        return (ranks if zero else 1), zero
    if kind in ("MULTI_GPU", "NO", "FALSE"):  # YAML reads a bare NO as false
        return 1, 0
    raise ValueError(f"{section.path}: distributed_type is {str(kind)[:40]}; expected FSDP, MULTI_GPU or DEEPSPEED")


def place(text: str, path: str, name: str) -> str:
    section = Nested(parsed(text, path), path)
    if section.text("distributed_type").upper() != "FSDP" or section.number("fsdp_config.fsdp_version", default=1) < 2:
        raise ValueError(f"{path}: degrees of parallelism go with distributed_type FSDP and fsdp_version 2")
    return name


def settings(config: LaunchConfig) -> dict[str, Any]:
    """For `accelerate launch --config_file`; the batch and the model stay with the script."""
    launch = config.launch
    parallelism = {
        "parallelism_config_dp_replicate_size": launch.replicate, "parallelism_config_dp_shard_size": launch.shard,
        "parallelism_config_tp_size": launch.tensor, "parallelism_config_cp_size": launch.context // launch.alltoall,
        "parallelism_config_sp_size": launch.alltoall if launch.alltoall > 1 else None,
    }  # fmt: skip
    fsdp = {
        "fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        "fsdp_reshard_after_forward": launch.zero != 2, "fsdp_activation_checkpointing": launch.recompute == "full",
    }  # fmt: skip
    sharded = launch.zero > 0 or launch.tensor * launch.context > 1
    return flat(
        {
            "compute_environment": "LOCAL_MACHINE", "distributed_type": "FSDP" if sharded else "MULTI_GPU",
            "mixed_precision": "no" if launch.states16 or launch.precision == "fp32" else launch.precision, "num_processes": launch.devices,
            **({"fsdp_config": fsdp, "parallelism_config": parallelism} if sharded else {}),
            **({"dynamo_config": {"dynamo_backend": "INDUCTOR"}} if launch.compiled else {}), "use_cpu": False,
        }
    )  # fmt: skip
