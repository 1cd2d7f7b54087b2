"""torchtitan: a job's TOML, or the configuration of its registry as JSON; both have the same sections.

    devices    data_parallel_replicate_degree * data_parallel_shard_degree * context * tensor * pipeline; a shard degree of -1 is the rest
    batch      local_batch_size sequences per data parallel rank: a microbatch, or with a pipeline the microbatches of
               pipeline_parallel_microbatch_size of one pass; global_batch_size adds accumulation, further passes

FSDP shards over shard * context ranks. Without a pipeline it gathers parameters again in the backward pass, unless told "never".
"""

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

from .blocks_of_stages import counts_of, split_of, spread
from .model_sizes import ModelSizes
from .runs import MODEL, SCHEDULES, SINGLE, Launch, LaunchConfig, Overrides
from .texts import Nested, flat, integer, parsed

LLAMA3 = (8, 128256)  # key-value heads, vocabulary
QWEN3 = (151936, 128)  # vocabulary, width of a head
DEEPSEEK = (512, 64, 128, 128)  # latent attention: rank of keys and values, widths of a head's rotary, other and value features
# (model, flavor) as in torchtitan/models/*/__init__.py
FLAVORS = {
    ("llama3", "debugmodel"): ModelSizes(6, 256, 768, 16, 16, 2048),
    ("llama3", "8B"): ModelSizes(32, 4096, 14336, 32, *LLAMA3),
    ("llama3", "70B"): ModelSizes(80, 8192, 28672, 64, *LLAMA3),
    ("llama3", "405B"): ModelSizes(126, 16384, 53248, 128, *LLAMA3),
    ("qwen3", "0.6B"): ModelSizes(28, 1024, 3072, 16, 8, *QWEN3, tied=True, qk_norm=True),
    ("qwen3", "1.7B"): ModelSizes(28, 2048, 6144, 16, 8, *QWEN3, tied=True, qk_norm=True),
    ("qwen3", "4B"): ModelSizes(36, 2560, 9728, 32, 8, *QWEN3, tied=True, qk_norm=True),
    ("qwen3", "8B"): ModelSizes(36, 4096, 12288, 32, 8, *QWEN3, qk_norm=True),
    ("qwen3", "14B"): ModelSizes(40, 5120, 17408, 40, 8, *QWEN3, qk_norm=True),
    ("qwen3", "32B"): ModelSizes(64, 5120, 25600, 64, 8, *QWEN3, qk_norm=True),
    ("qwen3", "30B-A3B"): ModelSizes(48, 2048, 6144, 32, 4, *QWEN3, experts=128, active=8, expert_ffn=768, qk_norm=True),
    ("qwen3", "235B-A22B"): ModelSizes(94, 4096, 12288, 64, 4, *QWEN3, experts=128, active=8, expert_ffn=1536, qk_norm=True),
    ("deepseek_v3", "debugmodel"): ModelSizes(
        6, 256, 1024, 16, 1, 2048, 128, experts=8, active=3, expert_ffn=256, shared_ffn=512, dense_layers=1, latent=(0, *DEEPSEEK)),
    ("deepseek_v3", "16B"): ModelSizes(
        27, 2048, 10944, 16, 1, 102400, 128, experts=64, active=6, expert_ffn=1408, shared_ffn=2816, dense_layers=1, latent=(0, *DEEPSEEK)),
    ("deepseek_v3", "236B"): ModelSizes(
        60, 5120, 12288, 128, 1, 102400, 128, experts=160, active=6, expert_ffn=1536, shared_ffn=3072, dense_layers=1,
        latent=(1536, *DEEPSEEK)),
    ("deepseek_v3", "671B"): ModelSizes(
        61, 7168, 18432, 128, 1, 129280, 128, experts=256, active=8, expert_ffn=2048, shared_ffn=2048, dense_layers=3,
        latent=(1536, *DEEPSEEK)),
}  # fmt: skip
CHECKPOINTED = ("none", "selective", "full", "memory_budget")
# keys of torchtitan, of former versions too, that resemble a key read here; those that are read are among them
RESEMBLING = frozenset(
    {
        "data_parallel_degree", "data_parallel_shard_degree", "data_parallel_replicate_degree", "tensor_parallel_degree",
        "context_parallel_degree", "pipeline_parallel_degree", "expert_parallel_degree", "expert_tensor_parallel_degree",
        "pipeline_parallel_schedule", "pipeline_parallel_schedule_csv", "pipeline_parallel_microbatch_size",
        "pipeline_parallel_microbatches", "pipeline_parallel_layers_per_stage", "pipeline_parallel_first_stage_less_layers",
        "pipeline_parallel_last_stage_less_layers", "batch_size", "local_batch_size", "global_batch_size", "mixed_precision_param",
        "mixed_precision_reduce", "enable_loss_parallel", "disable_loss_parallel", "enable_async_tensor_parallel",
        "enable_sequence_parallel", "checkpoint", "activation_checkpoint",
    }
)  # fmt: skip
EXPERT_TENSOR = "expert_tensor_parallel_degree"
FLOAT8, GATHERS8 = ("quantize.linear.float8", "float8", "quantize.dense.float8"), "enable_fsdp_float8_all_gather"
CONVERTERS = {"fp8": FLOAT8[:1], "fp8_rowwise": FLOAT8[:1], "mxfp8": ("quantize.linear.mx",)}
FORMER = {
    **{f"{FLOAT8[0]}.{key}": [f"{part}.{key}" for part in FLOAT8[1:]] for key in (GATHERS8, "recipe_name")},
    "training.local_batch_size": ["training.batch_size"], "compile.enable": ["training.compile"], "model.converters": ["model_converters"],
}  # fmt: skip
SPLITS = ("module_fqns_per_model_part", "pipeline_parallel_layers_per_stage", "pipeline_parallel_split_points")
EXCLUSIVE = (frozenset(f"parallelism.{name}" for name in SPLITS),)
SECTIONS = ("parallelism", "training", "experimental", "compile")  # degrees moved from the last two to the first


def read(text: str, path: str, known: Overrides) -> LaunchConfig:
    section = Nested(parsed(text, path), path, RESEMBLING)
    sizes = known.sizes or _flavor(section)

    def degree(name: str, default: int = 1, least: int | None = 1) -> int:
        return section.number(*(f"{part}.{name}" for part in SECTIONS), default=default, least=least)

    tensor, context, pipeline = degree("tensor_parallel_degree"), degree("context_parallel_degree"), degree("pipeline_parallel_degree")
    replicate = degree("data_parallel_replicate_degree")
    shard = degree("data_parallel_shard_degree", degree("data_parallel_degree", -1, None), None)
    model = replicate * tensor * context * pipeline
    if shard == -1:
        devices = known.need("devices", path, "--devices: data_parallel_shard_degree is -1, the rest")
        shard = max(devices // model, 1)
    devices = known.devices or model * shard
    data_parallel = replicate * shard
    local = section.number("training.local_batch_size", "training.batch_size", default=known.microbatch or 8, least=1)
    global_batch = known.global_batch or section.number("training.global_batch_size", default=-1)
    schedule, counts = _stages(section, sizes, pipeline)
    microbatch = degree("pipeline_parallel_microbatch_size") if pipeline > 1 else local
    reshard = section.text("parallelism.fsdp_reshard_after_forward", default="default")
    gathers_again = reshard == "always" or (reshard != "never" and pipeline == 1)
    precision, gather8 = _precision(section)
    compiled, parts = section.flag("compile.enable", "training.compile"), str(section.value("compile.components") or ["model", "loss"])
    global_batch = local * data_parallel if global_batch < 1 else global_batch
    if pipeline > 1 and (local % microbatch or global_batch % (local * data_parallel)):
        raise ValueError(
            f"{path}: local_batch_size {local} has to be a multiple of the pipeline's microbatch {microbatch}, and a divisor of the global "
            f"batch {global_batch} on each of {data_parallel} data parallel ranks"
        )
    launch = Launch(
        devices=devices, seq=known.seq or section.number("training.seq_len", default=2048),
        global_batch=global_batch, microbatch=microbatch,
        data=data_parallel, shard=shard, zero=(3 if gathers_again else 2) if shard * context > 1 else 0,
        tensor=tensor, context=context, expert=degree("expert_parallel_degree"),
        expert_tensor=degree(EXPERT_TENSOR, tensor if EXPERT_TENSOR in section.section("parallelism") or not sizes.experts else 1),
        sequence_parallel=tensor > 1 and section.value("parallelism.enable_sequence_parallel") is not False,
        loss_chunks=section.number("loss.num_chunks", default=1, least=1), split=split_of(counts, sizes.layers, pipeline),
        pipeline=pipeline, virtual=max(len(counts) // pipeline, 1), schedule=schedule,
        passes=max(global_batch // (local * data_parallel), 1) if pipeline > 1 else 1,
        recompute=_recompute(section), precision=precision, gather8=gather8,
        grads16=section.text("training.mixed_precision_reduce") == "bfloat16", states16=section.text("training.dtype") == "bfloat16",
        compiled=compiled and "model" in parts, compiled_loss=compiled and "loss" in parts,
        async_expert=schedule == "DualPipeV" and degree("expert_parallel_degree") > 1
        and section.value("parallelism.pipeline_parallel_expert_parallel_overlap") is not False,
        deepep=section.text("parallelism.expert_parallel_comm_backend") in ("deepep", "hybridep"),
        async_tensor=section.flag(*(f"{part}.enable_async_tensor_parallel" for part in ("parallelism", "experimental", "compile"))),
    )  # fmt: skip
    return LaunchConfig(launch, sizes)


def _flavor(section: Nested) -> ModelSizes:
    name, flavor = section.text("model.name", "model_spec.name"), section.text("model.flavor", "model_spec.flavor")
    if (name, flavor) not in FLAVORS:
        kinds = ", ".join("/".join(key) for key in FLAVORS)
        raise ValueError(f"{section.path} trains {name or 'no model'} of flavor {flavor or '?'}, known are {kinds}; or add {MODEL}")
    return FLAVORS[name, flavor]


def _stages(section: Nested, sizes: ModelSizes, pipeline: int) -> tuple[str, list[int]]:
    """The schedule, in torch's spelling, and the layers of each stage."""
    written = section.text("parallelism.pipeline_parallel_schedule", "experimental.pipeline_parallel_schedule", default="1F1B")
    schedule = next((name for name in SCHEDULES if name.lower() == written.lower()), written)
    if pipeline == 1:
        return "1F1B", [sizes.layers]
    parts = section.value("parallelism.module_fqns_per_model_part")
    if parts and not (isinstance(parts, list) and all(isinstance(part, list) for part in parts)):
        raise ValueError(f"{section.path}: module_fqns_per_model_part is {str(parts)[:40]!r}; expected a list of the modules of each stage")
    if parts:
        return schedule, [sum(str(name).startswith("layers.") for name in part) for part in parts]
    points = section.value(*(f"{part}.pipeline_parallel_split_points" for part in SECTIONS))  # until 0.1: the first module of each stage
    if points and isinstance(points, list):
        firsts = [0, *(integer(str(point).rpartition(".")[2], f"{section.path}: a split point") for point in points), sizes.layers]
        return schedule, [end - start for start, end in pairwise(firsts)]
    per_stage = section.number("parallelism.pipeline_parallel_layers_per_stage", default=0, least=0)
    ends = [section.number(f"parallelism.pipeline_parallel_{end}_stage_less_layers", default=1, least=0) for end in ("first", "last")]
    stages = math.ceil((sizes.layers + sum(ends)) / per_stage) if per_stage else pipeline * (1 if schedule in SINGLE else 2)
    if max(ends) > max((sizes.layers + sum(ends)) // stages, 1):
        raise ValueError(f"{section.path}: {sizes.layers} layers in {stages} stages are fewer than the {max(ends)} that an end counts as")
    return schedule, spread(sizes.layers, stages, *ends)


def _recompute(section: Nested) -> str:
    mode = section.text("activation_checkpoint.mode", default="selective")
    if "model_spec" in section.data and "mode" not in (said := section.section("activation_checkpoint")):  # of 0.3: a policy's settings
        return "none" if not said else "selective_op" if {"force_recompute_mm_shapes_by_fqns", "memory_budget"} & said.keys() else "full"
    if mode not in CHECKPOINTED:
        raise ValueError(f"{section.path}: activation_checkpoint.mode is {mode!r}; expected one of {', '.join(CHECKPOINTED)}")
    if mode in ("none", "full"):
        return mode
    option = section.text("activation_checkpoint.selective_ac_option", default="2")
    return {"op": "selective_op", "1": "full"}.get("op" if mode == "memory_budget" else option, "selective_layer")


def _precision(section: Nested) -> tuple[str, bool]:
    """Of matmuls, and whether parameters are gathered in 8 bits. Saved registries have the settings of converters in their list."""
    converters = str(section.value("model.converters") or section.value("model_converters") or "").replace("grouped_mm.float8", "")
    if "float8" in converters or section.flag("float8.enable_float8_linear"):
        rowwise = "rowwise" in converters + section.text(*(f"{part}.recipe_name" for part in FLOAT8))
        gathers8 = section.flag(*(f"{part}.{GATHERS8}" for part in FLOAT8)) or f"'{GATHERS8}': True" in converters
        return ("fp8_rowwise", False) if rowwise else ("fp8", gathers8)
    plain = {"float32": "fp32"}.get(section.text("training.mixed_precision_param", default="bfloat16"), "bf16")
    return "mxfp8" if "mx" in converters else plain, False


def model(sizes: ModelSizes) -> dict[str, str]:
    """The settings that name a model. ValueError for one without a flavor."""
    names = next((key for key, known in FLAVORS.items() if known == sizes), None)
    if names is None:
        raise ValueError("torchtitan has no flavor of these sizes; add one to its model, then give its configuration to `autoshard check`")
    return dict(zip(("model.name", "model.flavor"), names))


def place(text: str, path: str, name: str) -> str:
    """The name under which a configuration has a setting: its own, or that of a former version."""
    section = Nested(parsed(text, path), path, RESEMBLING | {"local_batch_size", "enable"})
    key = name.rpartition(".")[2]
    names = FORMER.get(name, [f"{part}.{key}" for part in SECTIONS if name.startswith("parallelism.")])
    return next((other for other in (name, *names) if section.value(other) is not None), name)


def settings(config: LaunchConfig) -> dict[str, Any]:
    """What a launch decides, for `torchrun -m torchtitan.train --job.config_file`; the rest keeps torchtitan's defaults."""
    launch, sizes = config.launch, config.sizes
    compiled = [part for part, is_on in (("model", launch.compiled), ("loss", launch.compiled_loss)) if is_on]
    parallelism: dict[str, Any] = {
        "data_parallel_replicate_degree": launch.replicate if launch.zero else launch.data,
        "data_parallel_shard_degree": launch.shard if launch.zero else 1,
        "fsdp_reshard_after_forward": "never" if launch.zero == 2 else "always" if launch.zero == 3 and launch.pipeline > 1 else "default",
        "tensor_parallel_degree": launch.tensor, "enable_async_tensor_parallel": launch.async_tensor,
        "enable_sequence_parallel": False if launch.tensor > 1 and not launch.sequence_parallel else None,
        "pipeline_parallel_degree": launch.pipeline, "context_parallel_degree": launch.context,
        "expert_parallel_degree": launch.expert if sizes.experts or launch.expert > 1 else None,
    }  # fmt: skip
    if sizes.experts:
        parallelism |= {EXPERT_TENSOR: launch.expert_tensor,
                        "expert_parallel_comm_backend": "deepep" if launch.deepep else "standard"}  # fmt: skip
    if launch.pipeline > 1:
        parallelism |= {
            "pipeline_parallel_schedule": launch.schedule, "pipeline_parallel_microbatch_size": launch.microbatch,
            "module_fqns_per_model_part": model_parts(counts_of(launch, sizes.layers)),
        }  # fmt: skip
    selective = {"mode": "selective", "selective_ac_option": "op" if launch.recompute == "selective_op" else "2"}
    return flat(
        {
            "model": {"converters": list(CONVERTERS.get(launch.precision, ()))},
            "training": {
                "local_batch_size": launch.local_batch, "global_batch_size": launch.global_batch, "seq_len": launch.seq,
                "mixed_precision_param": "float32" if launch.precision == "fp32" else None,
                "mixed_precision_reduce": "bfloat16" if launch.grads16 else None, "dtype": "bfloat16" if launch.states16 else None,
            },
            "parallelism": parallelism,
            "activation_checkpoint": {"mode": launch.recompute} if launch.recompute in ("none", "full") else selective,
            "compile": {"enable": bool(compiled), "components": compiled or ["model", "loss"]},
            FLOAT8[0]: {"fp8": {GATHERS8: launch.gather8}, "fp8_rowwise": {"recipe_name": "rowwise"}}.get(launch.precision, {}),
        }
    )


def model_parts(counts: Sequence[int]) -> list[list[str]]:
    """`module_fqns_per_model_part`: the modules of each stage, given the layers of each.

    model_parts([2, 1]) -> [["tok_embeddings", "layers.0", "layers.1"], ["layers.2", "norm", "output"]]
    """
    ends = [0, *accumulate(counts)]
    parts = [[f"layers.{i}" for i in range(start, end)] for start, end in pairwise(ends)]
    parts[0].insert(0, "tok_embeddings")
    parts[-1] += ["norm", "output"]
    return parts
