"""The study of mixtures of experts at full size."""

from __future__ import annotations

import json
import math
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import autoshard
from autoshard.capture import module as captured
from autoshard.capture.huggingface import load_huggingface
from autoshard.mesh import parse_shape
from benchmarks.studies import Row, Study

SEQ, EACH = 4096, 4  # tokens of a sequence, sequences per device
MODELS = {
    "mixtral-8x7b": {
        "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "vocab_size": 32000, "hidden_size": 4096,
        "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "num_local_experts": 8,
        "num_experts_per_tok": 2, "max_position_embeddings": 32768,
    },
    "qwen3-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048,
        "intermediate_size": 6144, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
        "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
        "max_position_embeddings": 40960,
    },
    "deepseek-v3": {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"},  # the class's own sizes: 671 B parameters
}  # fmt: skip
# name: device, mesh of a pipeline stage, microbatches, (pipeline stages, of a device), published tokens/s per GPU
PUBLISHED = {"gb200, PP 4, EP 64": ("gb200", (64,), 64, (4, 4), 3139), "gb300, PP 2, EP 32": ("gb300", (4, 32), 32, (2, 4), 3848)}
NVLINK = 900e9  # bytes/s of a device to the others of its rack of 72, one direction
REACHED = 0.673  # of which all_gather reaches so much on B200, as measured for SimuMax
NOT_MODELLED = """\
  not modelled: stages of unequal work and their transfers; the recomputation of these runs (none is predicted; it isn't published with
  them), fused kernels and graphs of kernels; all_to_all beside other work; experts are taken to be balanced, as they were forced to be."""


def experts(case: tuple, given) -> Row:
    """Mixtures of experts at full size: plans by all_to_all beside those with the rows of grouped matmuls, which gather all tokens.

    Each model is built from its published sizes on the meta device and planned for a training step in bfloat16, with 4096 tokens in a
    sequence and four sequences per device, or --sequences. Seconds are those of the time line. Without --memory (GB per device) there is no
    limit; with --recompute every block is computed again in the backward. CPU seconds are those of `plan`, capture included, with its
    baselines.

        plan         the best plan
        all_to_all   the baseline expert_parallel: experts sharded over all axes that divide them, everything else as FSDP
        gathering    the best plan of the same model whose experts are captured as they are written, as sorts and grouped matmuls; a sort
                     needs all tokens

    --published: DeepSeek-V3 as NVIDIA's Megatron-Bridge trained it on 256 GB200 and GB300 in bfloat16 (docs/performance-summary-archive.md,
    25.11, without multi-token prediction): tokens/s per GPU beside those of a plan of all layers on the devices of one pipeline stage,
    which in a pipeline without bubbles does as much per device. Nothing is fitted to these runs.
    """
    if given.published:
        return published(*case)
    name, shape = case
    plan, solution = planned(name, shape, given, gathering=False)
    row: Row = {"plans": {"plan": plan}}
    if solution is not None:
        one = solution.baselines["expert_parallel"]
        row["plans"]["all_to_all"] = {"seconds": one["step_seconds"], "peak_bytes": one["peak_bytes"], "matched": one["matched"]}
        tokens, *_, weights = next(placed.inputs for op, placed in solution.layouts.items() if op.startswith("experts"))[:4]
        row |= {"tokens": tokens, "experts": weights}
    if not given.without_gathering:
        row["plans"]["gathering"] = planned(name, shape, given, gathering=True)[0]
    return row


def built(name: str, batch: int) -> tuple:
    """(module, example inputs)"""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODELS[name]))
        return load_huggingface(folder, {"batch": batch, "seq": SEQ, "dtype": "bfloat16"}, training=True)


def planned(name: str, shape: tuple[int, ...], given, *, gathering: bool) -> tuple[Row, autoshard.Solution | None]:
    """Seconds, bytes and CPU seconds of one plan, and the plan; where nothing fits in the memory, the message and None."""
    module, inputs = built(name, given.sequences * math.prod(shape))
    options = {"training": True, "baselines": not gathering, "accepted": (0.01, 60.0), "gap": 1e-3}
    options |= {"memory_limit": given.memory and given.memory * 1e9, "recompute": "all" if given.recompute else 0}
    began = time.process_time()
    with mock.patch.object(captured, "experts_as_one_op", lambda graph: 0) if gathering else nullcontext():
        try:
            solution = autoshard.plan(module, inputs, autoshard.Mesh.from_bandwidths(shape, device="h100"), **options)
        except autoshard.Infeasible as error:
            return {"message": str(error), "cpu_seconds": time.process_time() - began}, None
    proven = (solution.overlapped or {}).get("bound_seconds", solution.bound)
    figures = {"seconds": solution.step_seconds, "bound_seconds": proven, "peak_bytes": solution.peak_bytes}
    return {**figures, "cpu_seconds": time.process_time() - began}, solution


def published(device: str, shape: tuple[int, ...], microbatches: int, stages: tuple[int, int], measured: float) -> Row:
    """tokens/s per GPU of the best plan and of the baseline by all_to_all, with the bubble of the run's pipeline."""
    devices, (pipeline, virtual) = math.prod(shape), stages
    module, inputs = built("deepseek-v3", devices)
    mesh = autoshard.Mesh.from_bandwidths(shape, device=device, devices_per_node=devices, intra_node_bandwidth=REACHED * NVLINK)
    options = {"training": True, "microbatches": microbatches, "accepted": (0.01, 60.0), "gap": 1e-2}
    solution = autoshard.plan(module, inputs, mesh, **options)
    rate = SEQ * microbatches / (1 + (pipeline - 1) / virtual / microbatches)
    baseline = solution.baselines["expert_parallel"]["cost_seconds"]
    rates = {"published": measured, "plan": rate / solution.cost, "all_to_all": rate / baseline}
    return {"peak_bytes": solution.peak_bytes, "plans": {name: {"tokens/s_per_GPU": one} for name, one in rates.items()}}


EXPERTS = Study(
    cases=lambda given: PUBLISHED if given.published else {f"{m} {mesh}": (m, parse_shape(mesh)) for m in MODELS for mesh in given.mesh},
    measure=experts, notes={"gb200": NOT_MODELLED},
    options={
        "--mesh": {"nargs": "*", "default": ["8x8", "16x8"]}, "--without-gathering": {"action": "store_true"},
        "--memory": {"type": float, "help": "GB per device"}, "--sequences": {"type": int, "default": EACH, "help": "per device"},
        "--recompute": {"action": "store_true"}, "--published": {"action": "store_true"},
    },
)  # fmt: skip
