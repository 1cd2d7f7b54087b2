"""Which launches a launcher can start for a model: one row per rule, applied to many launches at once.

Sources: `ParallelDims` of torchtitan, `TransformerConfig` and `validate_args` of Megatron-LM, `ParallelContext` of nanotron,
`ParallelismConfig` of accelerate, `_configure_tensor_parallel_states` and `DistributedAttention` of DeepSpeed, `FSDP2Manager` and
`calculate_virtual_stages` of Automodel, the schedules of torch.distributed.pipelining.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .blocks_of_stages import ENDS, listed
from .model_sizes import ModelSizes
from .nanotron import no_key_for
from .runs import LOOPED, MODULAR, SINGLE, V_SHAPED, Launch, TrainingRuns, distinct

LAUNCHERS = ("torchtitan", "megatron", "accelerate", "nanotron", "deepspeed", "automodel")
DIVIDE_EXPERTS = ("torchtitan", "megatron")  # over tensor parallel ranks; by the others each of these has all of an expert
COMPILE_LOSSES = ("torchtitan", "accelerate")  # with what else is compiled


@dataclass(frozen=True)
class Rule:
    name: str  # the key under which broken launches are counted
    launchers: tuple[str, ...]
    broken: Callable[[TrainingRuns, ModelSizes], np.ndarray]  # launches, sizes -> which launches break the rule
    sentence: Callable[[Launch, ModelSizes], str]


PRECISIONS = {  # that configurations express
    "torchtitan": ("bf16", "fp32", "fp8", "fp8_rowwise", "mxfp8"), "accelerate": ("bf16", "fp16", "fp8"),
    "megatron": ("bf16", "fp16", "fp32", "fp8", "fp8_blockwise", "mxfp8", "nvfp4"), "nanotron": ("bf16", "fp16", "fp32", "fp8"),
    "deepspeed": ("bf16", "fp16", "fp32"), "automodel": ("bf16", "fp8", "fp8_rowwise"),
}  # fmt: skip
RECOMPUTED = {  # ... and which `degrees` tries
    "torchtitan": ("none", "selective_op", "selective_layer", "full"), "megatron": ("none", "attn", "mla_up_proj", "full"),
    "automodel": ("none", "selective_op", "full"), **dict.fromkeys(("accelerate", "nanotron", "deepspeed"), ("none", "full")),
}  # fmt: skip
EXPRESSED = {"precision": PRECISIONS, "recompute": {**RECOMPUTED, "megatron": (*RECOMPUTED["megatron"], *MODULAR)}}
TITAN, MEGATRON, ACCELERATE, NANOTRON, DEEPSPEED, AUTOMODEL = ((name,) for name in LAUNCHERS)
TORCH = (*TITAN, *AUTOMODEL)  # with the schedules of torch
RULES = (
    Rule("model", NANOTRON, lambda c, m: np.array(bool(no_key_for(m))), lambda a, m: no_key_for(m)),
    Rule("devices", LAUNCHERS, lambda c, m: c.data * c.tensor * c.context * c.pipeline != c.devices,
         lambda a, m: f"dp {a.data} x tp {a.tensor} x cp {a.context} x pp {a.pipeline} is "
         f"{a.data * a.tensor * a.context * a.pipeline} devices, but there are {a.devices}"),
    Rule("shard", LAUNCHERS, lambda c, m: c.data % c.shard != 0,
         lambda a, m: f"{a.data} data parallel ranks can't be shards of {a.shard}"),
    *(Rule(name, (launcher,), lambda c, m, name=name, known=known: ~c.among(name, known),  # type: ignore[misc]
           lambda a, m, name=name, known=known, launcher=launcher:  # type: ignore[misc]
           f"{launcher} has no {name} {getattr(a, name)}; expected {', '.join(known[:8])}")
      for name, table in EXPRESSED.items() for launcher, known in table.items()),
    Rule("recompute", MEGATRON, lambda c, m: c.among("recompute", [name for name in MODULAR if "mla" in name]) & (not m.latent),
         lambda a, m: "the model has no latent attention, so no mla_up_proj to recompute"),
    Rule("8-bit gather", TORCH, lambda c, m: c.gather8 & ((c.precision != "fp8") | (c.zero < 2)),
         lambda a, m: f"parameters are gathered in 8 bits where FSDP shards them and matmuls run in fp8, not {a.precision}"),
    Rule("8-bit gather", MEGATRON, lambda c, m: c.gather8 & (~c.among("precision", ("fp8", "fp8_blockwise", "mxfp8")) | (c.zero == 0)),
         lambda a, m: "--fp8-param-gather goes with --fp8-format, and with the distributed optimizer or FSDP"),
    Rule("8-bit gather", MEGATRON, lambda c, m: c.gather8 & c.offload & (c.precision != "fp8"),
         lambda a, m: "--fp8-param-gather with --optimizer-cpu-offload needs --fp8-recipe delayed"),
    Rule("8-bit gather", ("accelerate", "nanotron", "deepspeed"), lambda c, m: c.gather8,
         lambda a, m: "its configuration expresses no gather in 8 bits"),
    Rule("states", ("megatron", "nanotron", "deepspeed"), lambda c, m: c.states16,
         lambda a, m: "its configuration expresses no parameters and states in 16 bits without a float32 copy"),
    Rule("heads", LAUNCHERS, lambda c, m: m.heads % c.tensor != 0,
         lambda a, m: f"{m.heads} attention heads do not divide by tp {a.tensor}"),
    Rule("kv_heads", MEGATRON, lambda c, m: (not m.latent) & (m.kv_heads % c.tensor != 0) & (c.tensor % m.kv_heads != 0),
         lambda a, m: f"tp {a.tensor} is no multiple or divisor of {m.kv_heads} key-value heads"),
    Rule("kv_heads", (*TORCH, *ACCELERATE, *NANOTRON, *DEEPSPEED), lambda c, m: (0 if m.latent else m.kv_heads) % c.tensor != 0,
         lambda a, m: f"{m.kv_heads} key-value heads do not divide by tp {a.tensor}"),
    Rule("ffn", LAUNCHERS, lambda c, m: m.ffn % c.tensor != 0,
         lambda a, m: f"the MLP's width {m.ffn} does not divide by tp {a.tensor}"),
    Rule("batch", LAUNCHERS, lambda c, m: c.global_batch % (c.data * c.microbatch * c.passes) != 0,
         lambda a, m: f"the global batch {a.global_batch} does not divide by dp {a.data} x microbatch {a.microbatch}"
         + f" x {a.passes} passes" * (a.passes > 1)),
    Rule("sequence", TITAN, lambda c, m: c.seq % (2 * c.tensor * c.context) != 0,
         lambda a, m: f"the sequence {a.seq} does not divide by 2 x tp {a.tensor} x cp {a.context}"),
    Rule("sequence", ("megatron", "accelerate", "automodel"), lambda c, m: (c.context > 1) & (c.seq % (2 * c.context) != 0),
         lambda a, m: f"the sequence {a.seq} does not divide by 2 x cp {a.context}"),
    Rule("sequence", ("megatron", "nanotron"), lambda c, m: c.sequence_parallel & (c.seq % (c.tensor * c.context) != 0),
         lambda a, m: f"the sequence {a.seq} does not divide by tp {a.tensor} x cp {a.context}, as sequence parallelism needs"),
    Rule("heads", LAUNCHERS, lambda c, m: c.context % c.alltoall != 0,
         lambda a, m: f"{a.alltoall} ranks that exchange heads are no part of cp {a.context}"),
    Rule("heads", (*TORCH, *NANOTRON), lambda c, m: c.alltoall > 1,
         lambda a, m: f"its configuration expresses no exchange of heads, a2a is {a.alltoall}"),
    Rule("heads", MEGATRON, lambda c, m: (c.alltoall > 1)
         & ((m.heads % (c.tensor * c.alltoall) != 0) | (np.maximum(m.kv_heads // c.tensor, 1) % c.alltoall != 0)),
         lambda a, m: f"{m.heads} heads or {m.kv_heads} key-value heads do not divide by tp {a.tensor} x a2a {a.alltoall}"),
    Rule("windows", MEGATRON, lambda c, m: bool(m.windowed) & (c.alltoall != c.context),  # Transformer Engine's attn_forward_func_with_cp
         lambda a, m: f"windows of attention do not go round a ring of cp {a.context}; expected --cp-comm-type a2a (or all_gather, without "
         "prices here)"),
    Rule("layers", MEGATRON, lambda c, m: (c.split == "") & (m.layers % (c.pipeline * c.virtual) != 0),
         lambda a, m: f"{m.layers} layers do not divide by pp {a.pipeline}" + f" x {a.virtual} virtual stages" * (a.virtual > 1)
         + "; --pipeline-model-parallel-layout can list what each stage has"),
    Rule("layers", (*TORCH, *MEGATRON), lambda c, m: c.among("split", ("", ENDS)) & (c.pipeline * c.virtual > m.layers + 2),
         lambda a, m: f"{m.layers} layers, token table and head are fewer than pp {a.pipeline} x {a.virtual} stages"),
    Rule("layers", (*TORCH, *MEGATRON), lambda c, m: lists_other_layers(c, m),
         lambda a, m: f"the stages that are listed are {len(listed(a.split))} with {sum(listed(a.split))} layers; expected "
         f"pp {a.pipeline} x {a.virtual} stages with {m.layers} layers"),
    Rule("layers", AUTOMODEL, lambda c, m: (c.split == "") & (m.layers % (c.pipeline * c.virtual) != 0),
         lambda a, m: f"{m.layers} layers do not divide by pp {a.pipeline} x {a.virtual} stages"),
    Rule("layers", (*NANOTRON, *AUTOMODEL), lambda c, m: c.pipeline * c.virtual > m.layers,
         lambda a, m: f"{m.layers} layers are fewer than pp {a.pipeline} stages" + f" x {a.virtual}" * (a.virtual > 1)),
    Rule("pipeline", (*ACCELERATE, *DEEPSPEED), lambda c, m: c.pipeline > 1,
         lambda a, m: f"its configuration expresses no pipeline, pp is {a.pipeline}"),
    Rule("sequence", DEEPSPEED, lambda c, m: (c.context > 1) & ((c.seq % c.context != 0) | (m.heads % (c.context * c.tensor) != 0)),
         lambda a, m: f"the sequence {a.seq} or {m.heads} attention heads do not divide by sequence_parallel_size {a.context}"),
    Rule("sharding", DEEPSPEED, lambda c, m: (c.zero == 3) & (c.tensor > 1),
         lambda a, m: f"autotp_size {a.tensor} goes with ZeRO stages up to 2"),
    Rule("sharding", DEEPSPEED, lambda c, m: ((c.shard < c.data) & (c.zero > 0) & (c.zero < 3)) | (c.offload & (c.zero == 0)),
         lambda a, m: f"stage {a.zero} shards over all ranks, and offloads where it shards; mics_shard_size needs stage 3"),
    Rule("schedule", TORCH, lambda c, m: (c.pipeline > 1) & c.among("schedule", SINGLE) & (c.virtual != 1),
         lambda a, m: f"{a.schedule} has one stage per device, not {a.virtual}"),
    Rule("schedule", TORCH, lambda c, m: (c.pipeline > 1) & c.among("schedule", LOOPED) & (c.virtual < 2),
         lambda a, m: f"{a.schedule} needs 2 stages per device or more, not {a.virtual}"),
    Rule("schedule", TORCH, lambda c, m: (c.pipeline > 1) & c.among("schedule", V_SHAPED) & (c.virtual != 2),
         lambda a, m: f"{a.schedule} has 2 stages per device, not {a.virtual}"),
    Rule("schedule", ("megatron", "nanotron"), lambda c, m: c.among("schedule", V_SHAPED) | c.among("schedule", LOOPED[1:]),
         lambda a, m: f"there is no schedule {a.schedule}"),
    Rule("schedule", MEGATRON, lambda c, m: (c.virtual > 1) & (c.pipeline == 1),
         lambda a, m: f"{a.virtual} virtual stages need pp of 2 or more"),
    Rule("schedule", ("nanotron", "accelerate", "deepspeed"), lambda c, m: c.virtual > 1,
         lambda a, m: f"there are no virtual stages ({a.virtual})"),
    Rule("microbatches", TORCH,
         lambda c, m: (c.pipeline > 1) & c.among("schedule", ("1F1B", "DualPipeV")) & (c.microbatches_of_pass < c.pipeline * c.virtual),
         lambda a, m: f"{a.microbatches_of_pass} microbatches are fewer than the {a.pipeline * a.virtual} stages of {a.schedule}"),
    Rule("microbatches", TORCH,
         lambda c, m: (c.pipeline > 1) & c.among("schedule", LOOPED) & (c.schedule != "LoopedBFS")
         & (c.microbatches_of_pass % np.maximum(c.microbatches_of_pass // c.pipeline, 1) != 0),
         lambda a, m: f"{a.microbatches_of_pass} microbatches do not divide into rounds of pp {a.pipeline}"),
    Rule("microbatches", MEGATRON, lambda c, m: (c.virtual > 1) & (c.group > 1) & (c.group < c.pipeline),
         lambda a, m: f"groups of {a.group} microbatches are smaller than pp {a.pipeline}"),
    Rule("microbatches", MEGATRON, lambda c, m: (c.virtual > 1) & ((np.maximum(c.group, c.pipeline) > c.microbatches)
         | ((c.microbatches % np.maximum(c.group, c.pipeline) > 0) & (c.microbatches % np.maximum(c.group, c.pipeline) < c.pipeline))),
         lambda a, m: f"{a.microbatches} microbatches do not divide by pp {a.pipeline}, as virtual stages need"
         + f", in groups of {a.group}" * (a.group > 1)),
    Rule("experts", LAUNCHERS, lambda c, m: (c.expert > 1) & ((m.experts == 0) | (m.experts % c.expert != 0)),
         lambda a, m: f"{m.experts} experts do not divide by ep {a.expert}" if m.experts else
         f"the model has no experts, ep is {a.expert}"),
    Rule("experts", ("accelerate", "nanotron", "deepspeed"), lambda c, m: c.expert > 1,
         lambda a, m: f"expert parallelism (ep {a.expert}) is not expressed by its configuration"),
    Rule("experts", MEGATRON, lambda c, m: (c.data * c.context * c.tensor) % (c.expert * c.expert_tensor) != 0,
         lambda a, m: f"dp {a.data} x cp {a.context} x tp {a.tensor} ranks do not divide by ep {a.expert} x expert tp {a.expert_tensor}"),
    Rule("experts", MEGATRON, lambda c, m: (m.experts > 0) & (c.zero > 0)  # parallel_state.py:1448
         & (c.data * c.context * c.tensor // (c.expert * c.expert_tensor) % np.maximum(c.data // c.shard, 1) != 0),
         lambda a, m: f"{a.data * a.context * a.tensor // (a.expert * a.expert_tensor)} ranks with the same experts do not divide by "
         f"--num-distributed-optimizer-instances {a.replicate}"),
    Rule("experts", MEGATRON, lambda c, m: c.async_expert & ((c.recompute == "full") | ((c.pipeline > 1) & (c.virtual == 1))),
         lambda a, m: "expert traffic beside compute goes with a pipeline of virtual stages, and not with full recomputation; "
         f"there are {a.virtual} stages per device, recomputed is {a.recompute}"),
    Rule("experts", TITAN, lambda c, m: c.async_expert & (c.recompute != "none"),
         lambda a, m: f"DualPipeV with expert parallelism does not recompute; expected mode none, not {a.recompute}"),
    Rule("experts", TITAN, lambda c, m: (c.expert > 1) & (c.expert_tensor != 1) & (c.expert_tensor != c.tensor),
         lambda a, m: f"expert tp is {a.expert_tensor}; expected 1 or tp {a.tensor}"),
    Rule("experts", TITAN, lambda c, m: (c.expert > 1) & ((c.shard * c.context * c.tensor) % (c.expert * c.expert_tensor) != 0),
         lambda a, m: f"shard {a.shard} x cp {a.context} x tp {a.tensor} do not divide by ep {a.expert} x expert tp {a.expert_tensor}"),
    Rule("experts", LAUNCHERS, lambda c, m: (m.expert_ffn * (m.experts > 0)) % c.expert_tensor != 0,
         lambda a, m: f"the experts' width {m.expert_ffn} does not divide by expert tp {a.expert_tensor}"),
    Rule("experts", AUTOMODEL, lambda c, m: (c.data * c.context * c.tensor) % c.expert != 0,  # mesh_utils.py:317
         lambda a, m: f"dp_size {a.data} x cp_size {a.context} x tp_size {a.tensor} is no multiple of ep_size {a.expert}"),
    Rule("experts", MEGATRON, lambda c, m: (m.experts > 0) & (c.tensor > 1) & ~c.sequence_parallel,  # moe_layer.py:636
         lambda a, m: f"experts with tp {a.tensor} need --sequence-parallel"),
    Rule("replicas", AUTOMODEL, lambda c, m: (c.zero > 0) & (c.context == 1) & (c.shard == 1) & (c.data > 1),
         lambda a, m: f"dp_replicate_size {a.data} leaves nothing to shard; expected strategy ddp, or fewer replicas"),
    Rule("replicas", TORCH, lambda c, m: (c.zero == 0) & (c.data > 1) & (c.tensor * c.context * c.pipeline > 1),
         lambda a, m: f"replicas without shards (DDP, dp {a.data}) go with no other parallelism"),
    Rule("replicas", ACCELERATE, lambda c, m: (c.shard == 1) & (c.data > 1) & (c.tensor * c.context > 1),
         lambda a, m: f"dp_replicate_size {a.data} with dp_shard_size 1 does not go with tp_size {a.tensor} or cp_size {a.context}"),
    Rule("recompute", ACCELERATE, lambda c, m: (c.recompute != "none") & (c.zero == 0) & (c.tensor * c.context == 1),
         lambda a, m: "only an fsdp_config says what is recomputed, and there is none"),
    Rule("compile", ("megatron", "nanotron"), lambda c, m: c.compiled,
         lambda a, m: "its configuration has nothing that compiles blocks; leave compile out"),
    Rule("async tensor parallelism", TITAN, lambda c, m: c.async_tensor & ~c.compiled,
         lambda a, m: "asynchronous tensor parallelism needs compile"),
)  # fmt: skip


def lists_other_layers(launches: TrainingRuns, sizes: ModelSizes) -> np.ndarray:
    """Whether the listed stages are not those of the launch, or have not the layers of the model."""
    firsts, of = distinct([launches.split, stages := launches.pipeline * launches.virtual])
    counts = [(listed(split), n) for split, n in zip(launches.split[firsts].tolist(), stages[firsts].tolist())]
    return np.array([bool(each) and (len(each), sum(each)) != (n, sizes.layers) for each, n in counts], bool)[of]


def check_launcher(launcher: str) -> None:
    if launcher not in LAUNCHERS:
        raise ValueError(f"there is no launcher {launcher!r}; expected one of {', '.join(LAUNCHERS)}")


def broken_rules(columns: TrainingRuns, sizes: ModelSizes, launcher: str) -> tuple[np.ndarray, tuple[Rule, ...]]:
    """[rules of the launcher, launches] whether a launch breaks a rule; and those rules. ValueError for an unknown launcher."""
    check_launcher(launcher)
    rules = tuple(rule for rule in RULES if launcher in rule.launchers)
    return np.array([np.broadcast_to(rule.broken(columns, sizes), len(columns)) for rule in rules]), rules


def legal(columns: TrainingRuns, sizes: ModelSizes, launcher: str) -> np.ndarray:
    return np.logical_not(broken_rules(columns, sizes, launcher)[0].any(axis=0))


def why_illegal(launch: Launch, sizes: ModelSizes, launcher: str) -> tuple[str, ...]:
    """A sentence for each rule that the launch breaks; empty where it is legal."""
    broken, rules = broken_rules(TrainingRuns.of([launch]), sizes, launcher)
    return tuple(rule.sentence(launch, sizes) for rule, one in zip(rules, broken[:, 0]) if one)
