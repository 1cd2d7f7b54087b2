"""NeMo Automodel: its recipes' YAML. Degrees are dp_size, tp_size, cp_size, pp_size and ep_size of `distributed`; the model is a name on a
hub, so its sizes come from beside it.

    a stage         layers_per_stage layers, as many stages as a multiple of pp_size; the first ones have one more where layers don't divide
    a step          global_batch_size in passes of local_batch_size on each data parallel rank, a pass in microbatches of pp_microbatch_size
    sharding        strategy fsdp2 over dp_size / dp_replicate_size ranks, with the context parallel ones; ddp none
    states          parameters of model.torch_dtype, 16 bits by default, with gradients and the optimizer's state in the same dtype
    after forward   parameters are resharded, but with a pipeline, or as reshard_after_forward says
"""

import math
from typing import Any

from .blocks_of_stages import spread
from .runs import MODEL, SCHEDULES, SINGLE, Launch, LaunchConfig, Overrides
from .texts import Nested, flat, parsed

DEGREES = ("dp_size", "dp_replicate_size", "tp_size", "cp_size", "pp_size", "ep_size")
RESEMBLING = frozenset(
    {*DEGREES, "sp_size", "local_batch_size", "global_batch_size", "distributed", "sequence_parallel", "dist_env",
     "activation_checkpointing_scope"}
)  # fmt: skip
SEQUENCE = ("packed_sequence.packed_sequence_size", "dataset.seq_len", "dataset.seq_length", "model.config.max_position_embeddings")
RESHARD = ("distributed.reshard_after_forward", "distributed.moe.reshard_after_forward")
PIPELINE, FORMER = "distributed.pipeline.", "autopipeline."  # until 2025
CHECKPOINTED = ("distributed.activation_checkpointing", "parallelizer.activation_checkpointing")
RECOMPUTED = {"true": "full", "full": "full", "selective": "selective_op"}
DTYPE = "model.torch_dtype"
DEEPEP, GATHERS8 = "model.backend.dispatcher", "enable_fsdp_float8_all_gather"


def read(text: str, path: str, known: Overrides) -> LaunchConfig:
    section = Nested(parsed(text, path), path, RESEMBLING)
    sizes = known.need("sizes", path, f"{MODEL}: Automodel takes the model from a hub")
    _, replicate, tensor, context, pipeline, expert = (max(_degree(section, f"distributed.{name}"), 1) for name in DEGREES)
    data = max(_degree(section, "distributed.dp_size"), 0)
    devices = known.devices or data * tensor * context * pipeline or known.need("devices", path, "--devices")
    data = max(devices // (tensor * context * pipeline), 1)
    strategy = section.text("distributed.strategy", "distributed._target_", default="fsdp2").lower()
    if "fsdp" not in strategy and "ddp" not in strategy:
        raise ValueError(f"{path}: distributed.strategy is {strategy!r}; expected fsdp2, megatron_fsdp or ddp")
    shard = 1 if "ddp" in strategy else max(data // replicate, 1)
    again = section.value(*RESHARD)
    local = section.number("step_scheduler.local_batch_size", default=known.microbatch or 1, least=1)
    of_pipeline = section.number(f"{PIPELINE}pp_microbatch_size", f"{FORMER}pp_microbatch_size", default=1, least=1)
    microbatch = of_pipeline if pipeline > 1 else local
    batch = known.global_batch or section.number("step_scheduler.global_batch_size", default=local * data, least=1)
    if pipeline > 1 and (local % microbatch or batch % (local * data)):
        raise ValueError(f"{path}: the global batch {batch} is no multiple of {data} ranks x local_batch_size {local}, "
                         f"or that of pp_microbatch_size {microbatch}")  # fmt: skip
    seq = known.seq or next((n for name in SEQUENCE if (n := section.number(name, default=0)) > 0), 0)
    schedule, virtual, split = _stages(section, sizes.layers, pipeline)
    compiled = section.flag("compile.enabled", "distributed.enable_compile")
    checkpointed = next((value for name in CHECKPOINTED if (value := section.value(name)) is not None), False)
    precision = ("fp8_rowwise" if "rowwise" in section.text("fp8.recipe_name") else "fp8") if section.flag("fp8.enabled") else "bf16"
    launch = Launch(
        devices=devices, seq=seq or known.need("seq", path, "--seq"), global_batch=batch, microbatch=microbatch, data=data, shard=shard,
        zero=(3 if (pipeline == 1 if again is None else bool(again)) else 2) if shard * context > 1 and "ddp" not in strategy else 0,
        tensor=tensor, sequence_parallel=section.flag("distributed.sequence_parallel") and tensor > 1, context=context, expert=expert,
        pipeline=pipeline, virtual=virtual, schedule=schedule, split=split,
        passes=max(batch // (local * data), 1) if pipeline > 1 else 1, recompute=RECOMPUTED.get(str(checkpointed).lower(), "none"),
        precision=precision, gather8=precision == "fp8" and section.flag(f"fp8.{GATHERS8}"), states16="32" not in section.text(DTYPE),
        compiled=compiled, compiled_loss=False, async_tensor=section.flag("distributed.enable_async_tensor_parallel"),
        deepep=section.text(DEEPEP) in ("deepep", "hybridep") or section.flag("model.backend.enable_deepep"),
    )  # fmt: skip
    return LaunchConfig(launch, sizes)


def _degree(section: Nested, name: str) -> int:
    """0 where it is left to the number of devices."""
    return 0 if section.text(name, default="none").lower() in ("none", "null") else section.number(name)


def _stages(section: Nested, layers: int, pipeline: int) -> tuple[str, int, str]:
    """Schedule, stages of a device, and how layers are divided: `calculate_virtual_stages` and `generate_hf_model_fqn_per_model_part`."""
    if pipeline == 1:
        return "1F1B", 1, ""
    written = section.text(f"{PIPELINE}pp_schedule", f"{FORMER}pp_schedule", default="1f1b")
    schedule = next((name for name in SCHEDULES if name.lower() == written.lower()), written)
    each = section.number(f"{PIPELINE}layers_per_stage", f"{FORMER}layers_per_stage", default=0, least=0)
    stages = math.ceil(layers / each) if each else pipeline * (1 if schedule in SINGLE else 2)
    rounded = section.text(f"{PIPELINE}round_virtual_stages_to_pp_multiple", f"{FORMER}round_virtual_stages_to_pp_multiple")
    virtual = max(math.ceil(stages / pipeline) if rounded == "up" else stages // pipeline, 1)
    counts = spread(layers, pipeline * virtual if rounded else stages, 0, 0)  # those of a number that doesn't divide are listed: illegal
    even = len({*counts}) == 1 and len(counts) == pipeline * virtual
    return schedule, virtual, "" if even else ",".join(map(str, counts))


def place(text: str, path: str, name: str) -> str:
    section = Nested(parsed(text, path), path, RESEMBLING)
    names = {RESHARD[0]: RESHARD, "dataset.seq_len": SEQUENCE[:3]}.get(name, ())  # of which the first that is there is read
    name = next((other for other in names if str(section.value(other)) not in ("None", "0", "-1")), name)
    former = name.replace(PIPELINE, FORMER) if name.startswith(PIPELINE) else CHECKPOINTED[1] if name == CHECKPOINTED[0] else name
    return former if section.value(name) is None and section.value(former.rpartition(".")[0]) is not None else name


def settings(config: LaunchConfig) -> dict[str, Any]:
    """The sections of a recipe that a launch decides; model, data, optimizer and loss are yours to add."""
    launch, layers = config.launch, config.sizes.layers
    reshard = None if (launch.zero == 3) == (launch.pipeline == 1) or not launch.zero else launch.zero == 3
    stages = {
        "pp_schedule": launch.schedule.lower() if launch.schedule in ("1F1B", "Interleaved1F1B") else launch.schedule,
        "pp_microbatch_size": launch.microbatch, "layers_per_stage": math.ceil(layers / (launch.pipeline * launch.virtual)),
    }  # fmt: skip
    return flat(
        {
            "step_scheduler": {"global_batch_size": launch.global_batch, "local_batch_size": launch.local_batch},
            "distributed": {
                "strategy": "fsdp2" if launch.zero or launch.data == 1 else "ddp", "dp_size": launch.data,
                "dp_replicate_size": launch.replicate if launch.zero else None, "tp_size": launch.tensor, "cp_size": launch.context,
                "pp_size": launch.pipeline, "ep_size": launch.expert, "sequence_parallel": launch.sequence_parallel,
                "activation_checkpointing": {"none": False, "full": True}.get(launch.recompute, "selective"),
                "reshard_after_forward": reshard, "enable_async_tensor_parallel": launch.async_tensor or None,
                **({"pipeline": stages} if launch.pipeline > 1 else {}),
            },
            "dataset": {"seq_len": launch.seq},
            "fp8": {"enabled": launch.precision != "bf16" or None, GATHERS8: launch.gather8 if launch.precision == "fp8" else None,
                    "recipe_name": "rowwise" if launch.precision == "fp8_rowwise" else None},
            "compile": {"enabled": launch.compiled or None}, DEEPEP: "deepep" if launch.deepep else None,
            DTYPE: None if launch.states16 else "float32",
        }
    )  # fmt: skip
