"""One launch, two ways to its seconds: the formulas that rank launches (`degrees`, `check`), and the time line of the captured graph with
the launch's scheme pinned (`plan`, `simulate`).

    PYTHONPATH=. python benchmarks/one_answer.py [--json] [--only WORD]

Blocks of Llama 3 8B, and of three others, on H100s, in bfloat16; what a software stack adds per step whatever it runs (`fixed`) is left
out, since plans know no software. Exit 1 where the two differ by more than WITHIN.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace

import numpy as np
import planned_runs
from published import runs_of, step_seconds

from autoshard.devices import DEVICES, link_of
from autoshard.launch.block_time import RunConstants

WITHIN = 0.01
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


def launched(row: dict[str, str]) -> float:
    runs = runs_of([row])
    constants = RunConstants.of(runs.device, runs.stack, runs.precision)
    network = replace(constants.device, network=np.ones(1))  # the adapters' rate is what collectives reach, as in the plan's mesh
    # a plan knows no software, and no cluster on which it ran
    plain = replace(constants.stack, gradient_bytes=np.full(1, 2.0), traffic=np.ones(1), host=np.ones(1), congestion=np.zeros(1))
    return float(step_seconds(runs, replace(constants, device=network, stack=plain, without=frozenset({"fixed"})))[0])


def planned(row: dict[str, str]) -> float:
    mesh = planned_runs.mesh_of(row, DEVICES["h100"], link_of(DEVICES["h100"]))
    return float(planned_runs.step_seconds(row, mesh)[planned_runs.KINDS.index("overlapped")])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", default="")
    arguments = parser.parse_args()
    rows = []
    for case, row in cases().items():
        if arguments.only not in case:
            continue
        seconds = {"launch": launched(row), "plan": planned(row)}
        rows.append({"case": case, **seconds, "difference": seconds["plan"] / seconds["launch"] - 1})
        if not arguments.json:
            print(f"{case:40} {seconds['launch']:8.4f} s  {seconds['plan']:8.4f} s  {100 * rows[-1]['difference']:+6.1f} %", flush=True)
    sizes = np.abs([one["difference"] for one in rows])
    record = {"rows": rows, "median": float(np.median(sizes)), "largest": float(sizes.max()), "ok": bool(sizes.max() <= WITHIN)}
    print(json.dumps(record) if arguments.json else f"median {100 * record['median']:.1f} %, largest {100 * record['largest']:.1f} %")
    raise SystemExit(not record["ok"])


if __name__ == "__main__":
    main()
