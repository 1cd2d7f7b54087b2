"""Mixtures of experts at full size: plans by all_to_all beside those with the rows of grouped matmuls, which gather all tokens.

    python benchmarks/experts.py [--only NAME ...] [--mesh 8x8 ...] [--without-gathering] [--json]
                                 [--memory 80] [--sequences 1] [--recompute]
    python benchmarks/experts.py --published

Each model is built from its published sizes on the meta device and planned for a training step in bfloat16, with 4096 tokens in a sequence
and four sequences per device, or --sequences. Without --memory (GB per device) there is no limit; with --recompute every block is computed
again in the backward. Columns: seconds per step, and memory per device, of

    plan         the best plan
    all_to_all   the baseline expert_parallel: experts sharded over all axes that divide them, everything else as FSDP
    gathering    the best plan of the same model whose experts are captured as they are written, as sorts and grouped matmuls; a sort needs
                 all tokens

CPU seconds are those of `plan`, capture included, with its baselines; each case runs in a process of its own.

--published: DeepSeek-V3 as NVIDIA's Megatron-Bridge trained it on 256 GB200 and GB300 in bfloat16 (docs/performance-summary-archive.md,
25.11, without multi-token prediction): tokens/s per GPU beside those of a plan of all layers on the devices of one pipeline stage, which
in a pipeline without bubbles does as much per device. Nothing is fitted to these runs.
"""

# ruff: noqa: E402  (its own folder has to leave sys.path first)
import argparse
import json
import math
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
sys.path[:] = [str(ROOT), *(entry for entry in sys.path if Path(entry).resolve() != ROOT / "benchmarks")]

import autoshard
from autoshard.capture import module as captured
from autoshard.capture.huggingface import load_huggingface
from benchmarks.own_process import in_own_process

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
MESHES = {"8x8": (8, 8), "16x8": (16, 8)}
# name: device, mesh of a pipeline stage, microbatches, (pipeline stages, of a device), published tokens/s per GPU
PUBLISHED = {"gb200, PP 4, EP 64": ("gb200", (64,), 64, (4, 4), 3139), "gb300, PP 2, EP 32": ("gb300", (4, 32), 32, (2, 4), 3848)}
NVLINK = 900e9  # bytes/s of a device to the others of its rack of 72, one direction
REACHED = 0.673  # of which all_gather reaches so much on B200, as measured for SimuMax
NOT_MODELLED = """\
  not modelled: stages of unequal work and their transfers; the recomputation of these runs (none is predicted; it isn't published with
  them), fused kernels and graphs of kernels; all_to_all beside other work; experts are taken to be balanced, as they were forced to be."""


def planned(
    name: str, mesh_name: str, gathering: bool, memory: float | None = None, sequences: int = EACH, recompute: bool = False
) -> dict:
    """Seconds, bytes, the baseline by all_to_all and CPU seconds of one case; where nothing fits in `memory` GB, the message."""
    shape = MESHES[mesh_name]
    devices = shape[0] * shape[1]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODELS[name]))
        settings = {"batch": sequences * devices, "seq": SEQ, "dtype": "bfloat16"}
        module, inputs = load_huggingface(folder, settings, training=True)
    mesh = autoshard.Mesh.from_bandwidths(shape, device="h100")
    options = {"training": True, "baselines": not gathering, "accepted": (0.01, 60.0), "gap": 1e-3}
    options |= {"memory_limit": None if memory is None else memory * 1e9, "recompute": "all" if recompute else 0}
    cpu = time.process_time()
    with mock.patch.object(captured, "experts_as_one_op", lambda graph: 0) if gathering else nullcontext():
        try:
            solution = autoshard.plan(module, inputs, mesh, **options)
        except autoshard.Infeasible as error:
            return {"message": str(error), "cpu_seconds": time.process_time() - cpu}
    cpu = time.process_time() - cpu
    row = {"seconds": solution.cost, "bound_seconds": solution.bound, "bytes": solution.peak_bytes, "cpu_seconds": cpu}
    if not gathering:
        one = solution.baselines["expert_parallel"]
        row |= {"all_to_all_seconds": one["cost_seconds"], "all_to_all_bytes": one["peak_bytes"], "matched": one["matched"]}
        row["experts"] = next(placed.inputs for op, placed in solution.layouts.items() if op.startswith("experts"))
    return row


def published(name: str) -> dict:
    """tokens/s per GPU of the best plan and of the baseline by all_to_all, with the bubble of the run's pipeline."""
    device, shape, microbatches, (stages, virtual), measured = PUBLISHED[name]
    devices = math.prod(shape)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODELS["deepseek-v3"]))
        module, inputs = load_huggingface(folder, {"batch": devices, "seq": SEQ, "dtype": "bfloat16"}, training=True)
    mesh = autoshard.Mesh.from_bandwidths(shape, device=device, devices_per_node=devices, intra_node_bandwidth=REACHED * NVLINK)
    options = {"training": True, "microbatches": microbatches, "accepted": (0.01, 60.0), "gap": 1e-2}
    solution = autoshard.plan(module, inputs, mesh, **options)
    bubble = 1 + (stages - 1) / virtual / microbatches
    rate = SEQ * microbatches / bubble
    baseline = solution.baselines["expert_parallel"]["cost_seconds"]
    return {"published": measured, "plan": rate / solution.cost, "all_to_all": rate / baseline, "bytes": solution.peak_bytes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--mesh", nargs="*", default=list(MESHES), choices=list(MESHES))
    parser.add_argument("--without-gathering", action="store_true")
    parser.add_argument("--memory", type=float)
    parser.add_argument("--sequences", type=int, default=EACH)
    parser.add_argument("--recompute", action="store_true")
    parser.add_argument("--published", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--order", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.order is not None:
        print(json.dumps(published(**arguments.order) if set(arguments.order) == {"name"} else planned(**arguments.order)))
        return
    if arguments.published:
        found = {name: in_own_process(__file__, {"name": name}) for name in PUBLISHED}
        for name, row in found.items() if not arguments.json else ():
            rates = ", ".join(f"{kind} {row[kind]:.0f}" for kind in ("published", "plan", "all_to_all"))
            print(f"  {name}: tokens/s per GPU: {rates}")
        print(json.dumps(found) if arguments.json else NOT_MODELLED)
        return
    rows = []
    options = {"memory": arguments.memory, "sequences": arguments.sequences, "recompute": arguments.recompute}
    for name in arguments.only:
        for mesh in arguments.mesh:
            order = {"name": name, "mesh_name": mesh, **options}
            row = {"model": name, "mesh": mesh, **in_own_process(__file__, {**order, "gathering": False})}
            if not arguments.without_gathering:
                row["gathering"] = in_own_process(__file__, {**order, "gathering": True})
            rows.append(row)
            if not arguments.json:
                print(line(row), flush=True)
    if arguments.json:
        print(json.dumps(rows))


def line(row: dict) -> str:
    def cost(seconds: float, size: float) -> str:
        return f"{seconds:7.3f} s {size / 1e9:7.1f} GB"

    if "message" in row:
        return f"{row['model']:14} {row['mesh']:5} {row['message']} | {row['cpu_seconds']:.0f} CPU s"
    other = row.get("gathering")
    gathering = "" if other is None else f" | gathering {other.get('message') or cost(other['seconds'], other['bytes'])}"
    layouts = f"tokens {row['experts'][0]} experts {row['experts'][3]}"
    return (
        f"{row['model']:14} {row['mesh']:5} plan {cost(row['seconds'], row['bytes'])} ({layouts}) | "
        f"all_to_all {cost(row['all_to_all_seconds'], row['all_to_all_bytes'])}{gathering} | {row['cpu_seconds']:.0f} CPU s"
    )


if __name__ == "__main__":
    main()
