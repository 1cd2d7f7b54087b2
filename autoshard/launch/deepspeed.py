"""DeepSpeed: its JSON, ds_config.json. It says neither the model nor the sequence; "auto", which transformers' Trainer fills in, is as if
left out.

    train_batch_size = micro batch x accumulation x data parallel ranks, of which the file may leave out some
    devices          = data parallel ranks x tensor_parallel.autotp_size x sequence_parallel_size
    sharding         zero_optimization.stage; MiCS (mics_shard_size) over some of the ranks
"""

from collections.abc import Mapping
from typing import Any

from .runs import MODEL, Launch, LaunchConfig, Overrides
from .texts import Nested, flat, nested, parsed

RESEMBLING = frozenset({"bf16", "bfloat16", "fp16", "train_batch_size", "offload_optimizer", "offload_param", "tp_size", "autotp_size"})
FORMER = {"bf16.enabled": "bfloat16.enabled", "tensor_parallel.autotp_size": "tensor_parallel.tp_size"}
OPTION = "--{} N: DeepSpeed leaves it to the script"
HOST = ("cpu", "nvme")
RECOMPUTED = "activation_checkpointing.partition_activations"  # as full, where it is said; else the script may


def read(text: str, path: str, known: Overrides) -> LaunchConfig:
    section = Nested(_said(parsed(text, path)), path, RESEMBLING)
    sizes = known.need("sizes", path, f"{MODEL}: DeepSpeed leaves the model to the script")
    tensor = section.number("tensor_parallel.autotp_size", "tensor_parallel.tp_size", default=1, least=1)
    context = section.number("sequence_parallel_size", default=1, least=1)
    batch, micro, accumulated = (
        section.number(name, default=0, least=1)
        for name in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    )
    devices = known.devices or (tensor * context * (batch // (micro * accumulated)) if batch and micro and accumulated else None)
    devices = devices or known.need("devices", path, "--devices")
    data = max(devices // (tensor * context), 1)
    of_batch = max(batch // (max(accumulated, 1) * data), 1) if batch else None
    micro = micro or of_batch or known.need("microbatch", path, OPTION.format("microbatch"))
    accumulated = accumulated or (max(batch // (micro * data), 1) if batch else 1)
    if batch and batch != micro * accumulated * data:
        raise ValueError(f"{path}: train_batch_size {batch} is not micro batch {micro} x accumulation {accumulated} x {data} ranks")
    if section.text("zero_optimization.offload_param.device", default="none") in HOST:
        raise ValueError(f"{path} keeps parameters on the host (offload_param), which has no prices here; expected them on devices")
    zero = section.number("zero_optimization.stage", default=0, least=0)
    shard = section.number("zero_optimization.mics_shard_size", default=-1)
    launch = Launch(
        devices=devices, seq=known.need("seq", path, OPTION.format("seq")), global_batch=known.global_batch or micro * accumulated * data,
        microbatch=micro, data=data, shard=(shard if shard > 0 else data) if zero else 1, zero=zero, tensor=tensor, context=context,
        alltoall=context, precision=_precision(section), recompute="none" if section.value(RECOMPUTED) is None else "full",
        compiled=section.flag("compile.deepcompile"),
        offload=section.flag("zero_optimization.cpu_offload") or section.text("zero_optimization.offload_optimizer.device") in HOST,
    )  # fmt: skip
    return LaunchConfig(launch, sizes)


def _said(data: Any) -> Any:
    """Without what is "auto"."""
    if not isinstance(data, Mapping):
        return None if data == "auto" else data
    return {key: _said(value) for key, value in data.items()}


def _precision(section: Nested) -> str:
    """What is left to "auto" is taken to be bfloat16."""
    if section.flag("fp16.enabled") and section.flag("bf16.enabled"):
        raise ValueError(f"{section.path} enables fp16 and bf16; DeepSpeed accepts one of them")
    for name, precision in (("fp16", "fp16"), ("bf16", "bf16"), ("bfloat16", "bf16"), ("torch_autocast", "bf16")):
        if section.flag(f"{name}.enabled"):
            return precision
    left = [name for name in ("bf16", "fp16") if name in section.data and section.value(f"{name}.enabled") is None]
    return "bf16" if left else "fp32"


def place(text: str, path: str, name: str) -> str:
    section = Nested(parsed(text, path), path, RESEMBLING)
    return next((other for other in (name, FORMER.get(name, name)) if section.value(other) is not None), name)


def settings(config: LaunchConfig) -> dict[str, Any]:
    """For `deepspeed --deepspeed_config`; the model and its sequences stay with the script."""
    launch = config.launch
    return flat(
        {
            "train_batch_size": launch.global_batch, "train_micro_batch_size_per_gpu": launch.microbatch,
            "gradient_accumulation_steps": launch.microbatches, "sequence_parallel_size": launch.context,
            "bf16": {"enabled": launch.precision == "bf16"}, "fp16": {"enabled": launch.precision == "fp16"},
            "tensor_parallel": {"autotp_size": launch.tensor},
            "zero_optimization": {
                "stage": launch.zero, "mics_shard_size": launch.shard if launch.zero and launch.shard != launch.data else -1,
                "offload_optimizer": {"device": "cpu" if launch.offload else "none"},
            },
            **nested({RECOMPUTED: False if launch.recompute == "full" else None}), "compile": {"deepcompile": launch.compiled},
        }
    )  # fmt: skip
