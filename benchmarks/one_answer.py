"""One launch, two ways to its seconds and bytes: the formulas that rank launches (`degrees`, `check`), and the time line of the captured
graph with the launch's scheme pinned (`plan`, `simulate`).

    PYTHONPATH=. python benchmarks/one_answer.py [--json] [--only WORD]

Blocks of Llama 3 8B, and of three others, on H100s, in bfloat16; what a software stack adds per step whatever it runs (`fixed`) is left
out, since plans know no software; so are buffers of gradients that are there before them, and parameters that FSDP gathers ahead: a plan
says its bytes without what a time line fetches ahead, 2 % at most (cost.spare_bytes). Exit 1 where the two differ by more than WITHIN.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import planned_runs
from published import runs_of, step_seconds

from autoshard.cost import bucket_limit
from autoshard.devices import DEVICES, link_of
from autoshard.launch.block_time import RunConstants
from autoshard.launch.peak_memory import memory_of
from autoshard.mesh import Axis, Mesh

WITHIN = 0.01
BLOCKS = (8, 10)  # of the models that are planned: with fewer the fullest moment may be another, and transfers catch up at the ends
KINDS = ("seconds", "bytes")
MODEL = {
    "src": "torchtitan", "L": 32, "h": 4096, "ffn": 14336, "heads": 32, "kv": 8, "vocab": 128256, "head_dim": 128, "tied": 0, "gated": 1,
    "pos": 0, "prec": "bf16", "asynctp": 0, "gpu": "h100", "gpn": 8, "link_per_gpu": 40e9, "gpu_mem": 80e9,
    "pp": 1, "vp": 1, "cp": 1, "ep": 1, "ga": 1,
}  # fmt: skip
SCHEMES = {  # data, tensor, ZeRO stage, sequence parallel, and another model
    "fsdp 8": (8, 1, 3, 0), "fsdp 16": (16, 1, 3, 0), "ddp 8": (8, 1, 0, 0), "megatron 8": (1, 8, 0, 0),
    "megatron, sequences 8": (1, 8, 0, 1), "fsdp 2 x megatron 4": (2, 4, 3, 1),
    "1B, megatron 4": (1, 4, 0, 0, "1B"), "1B, ddp 4 x megatron 2": (4, 2, 0, 1, "1B"), "70B, fsdp 8 x megatron 8": (8, 8, 3, 1, "70B"),
    "Qwen3 8B, fsdp 8": (8, 1, 3, 0, "Qwen3 8B"), "Qwen3 8B, fsdp 2 x megatron 4": (2, 4, 3, 1, "Qwen3 8B"),
}  # fmt: skip
OTHERS = {
    "1B": {"L": 16, "h": 2048, "ffn": 8192, "heads": 32, "kv": 8, "head_dim": 64},
    "70B": {"L": 80, "h": 8192, "ffn": 28672, "heads": 64, "kv": 8},
    "Qwen3 8B": {"L": 36, "ffn": 12288, "vocab": 151936, "qk_norm": 1},
}
CONTEXTS = {"context 8, 32768, compiled": (8, 32768, "none", 1), "context 4, 131072, recomputed": (4, 131072, "full", 0)}  # as a ring
STEPS = {  # tokens, sequences of a microbatch, recompute, compiled
    "8192": (8192, 1, "none", 0), "8192, compiled": (8192, 1, "none", 1), "8192, recomputed": (8192, 1, "full", 1),
    "2048, compiled": (2048, 4, "none", 1),
}  # fmt: skip


def row_of(scheme: tuple, step: tuple) -> dict[str, str]:
    data, tensor, zero, sequence, *other = scheme
    seq, microbatch, recompute, compiled = step
    own = {"dp": data, "shard": data if zero else 1, "zero": zero, "tp": tensor, "sp": sequence, "seq": seq, "mbs": microbatch}
    model = MODEL | (OTHERS[other[0]] if other else {})
    return {name: str(value) for name, value in {**model, **own, "rc": recompute, "fused": compiled}.items()}


def cases() -> dict[str, dict[str, str]]:
    rows = {f"{scheme}, {step}": row_of(SCHEMES[scheme], STEPS[step]) for scheme in SCHEMES for step in STEPS}
    ring = {name: row_of((1, 1, 3, 0), (seq, 1, recompute, compiled)) for name, (_, seq, recompute, compiled) in CONTEXTS.items()}
    return rows | {name: row | dict.fromkeys(("cp", "shard"), str(CONTEXTS[name][0])) for name, row in ring.items()}


def launched(row: dict[str, str]) -> tuple[float, float]:
    """Seconds and bytes as a plan runs the launch, which knows no software and no cluster: parameters are gathered one by one when they
    are used, small gradients are reduced together (`cost.bucket_limit`), and gradients are there from their op on."""
    runs = runs_of([{**row, "compiled_loss": row["fused"]}])
    constants = RunConstants.of(runs.device, runs.stack, runs.precision)
    network = replace(constants.device, network=np.ones(1))  # the adapters' rate is what collectives reach, as in the plan's mesh
    hop = latency_of(mesh_of(row).axes[0])
    plain = replace(constants.stack, gradient_bytes=np.full(1, 2.0), traffic=np.ones(1), host=np.ones(1), congestion=np.zeros(1), hop=hop)
    memory = replace(constants.memory, gradients=np.full(1, 2.0))
    without = frozenset({"fixed", "gathered", "buffers"})
    described = replace(constants, device=network, stack=plain, memory=memory, without=without, messages=messages_of_block(row))
    # a plan's parameters and gradients have 16 bits, beside float32 copies: with moments and parameters 14 bytes, where FSDP has 12
    more = 0.5 if row["zero"] == "3" else 0.0
    bytes = [peak.bytes() + more * (peak.kinds["parameters"] - peak.kinds["gradients"]) for peak in memory_of(runs, described).peaks]
    return float(step_seconds(runs, described)[0]), float(np.max(bytes))


def messages_of_block(row: dict[str, str]) -> tuple[int, int]:
    """In which a plan gathers the parameters of a block, one by one; and reduces gradients: small ones are joined in their order."""
    width, ffn, heads, keys = (int(row[name]) for name in ("h", "ffn", "heads", "kv"))
    queries, keys = (width * count * int(row["head_dim"]) for count in (heads, keys))
    matrices = queries, keys, keys, queries, width * ffn, width * ffn, width * ffn
    limit, buckets, last = bucket_limit(mesh_of(row).axes[0]), 0, math.inf
    for bytes in (2 * matrix / int(row["tp"]) for matrix in matrices):
        last = last + bytes if bytes <= limit else last
        if bytes > limit or last > limit:
            buckets, last = buckets + 1, bytes if bytes <= limit else last
    norms = 4 if row.get("qk_norm") == "1" else 2
    return len(matrices) + norms, buckets


def latency_of(axis: Axis) -> np.ndarray:
    """Of a hop of a ring, so that all of them have the latency of a gather in the plan's mesh."""
    return np.full(1, axis.latency * math.ceil(math.log2(axis.size)) / max(axis.size - 1, 1))


def mesh_of(row: dict[str, str]) -> Mesh:
    return planned_runs.mesh_of(row, DEVICES["h100"], link_of(DEVICES["h100"]))


def planned(row: dict[str, str], blocks: Sequence[int] = BLOCKS) -> tuple[float, float]:
    few, more = (planned_runs.priced(row, mesh_of(row), number, keeping="norms" if row["sp"] == "1" else "") for number in blocks)
    times = (int(row["L"]) - blocks[0]) / (blocks[1] - blocks[0])
    return few.step[1] + times * (more.step[1] - few.step[1]), float(np.max(few.bytes + times * (more.bytes - few.bytes)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", default="")
    arguments = parser.parse_args()
    rows = []
    for case, row in cases().items():
        if arguments.only not in case:
            continue
        launch, plan = launched(row), planned(row)
        difference = {kind: plan[i] / launch[i] - 1 for i, kind in enumerate(KINDS)}
        rows.append({"case": case, "launch": dict(zip(KINDS, launch)), "plan": dict(zip(KINDS, plan)), "difference": difference})
        if not arguments.json:
            percent = [f"{100 * difference[kind]:+6.1f} %" for kind in KINDS]
            seconds, bytes = f"{launch[0]:8.4f} s {plan[0]:8.4f} s", f"{launch[1] / 1e9:8.2f} GB {plan[1] / 1e9:8.2f} GB"
            print(f"{case:46} {seconds} {percent[0]} {bytes} {percent[1]}", flush=True)
    sizes = {kind: np.abs([one["difference"][kind] for one in rows]) for kind in KINDS}
    found = {kind: {"median": float(np.median(size)), "largest": float(size.max())} for kind, size in sizes.items()}
    record = {"rows": rows, **found, "ok": all(one["largest"] <= WITHIN for one in found.values())}
    words = (f"{kind}: median {100 * one['median']:.1f} %, largest {100 * one['largest']:.1f} %" for kind, one in found.items())
    print(json.dumps(record) if arguments.json else "; ".join(words))
    raise SystemExit(not record["ok"])


if __name__ == "__main__":
    main()
