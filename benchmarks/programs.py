"""Llama-3 8B as three programs on one set of weights: prefill, decode and training on 8 devices, and what sharing costs each of them.

    python benchmarks/programs.py [--weights 1e6,1,1] [--layers 32] [--memory 80e9] [--json]

Prefill is 1 x 8192 tokens, decode one token for each of 64 sequences with 8192 in the cache, training 8 x 8192 with every block recomputed.
"""

import argparse
import json
import resource

import torch

import autoshard
from autoshard import Mesh, Program
from models import llama

NAMES = ("prefill", "decode", "train")


def programs(weights: tuple[float, ...], layers: int) -> dict[str, Program]:
    model, prompt = llama.llama3_8b(batch=1, layers=layers, loss=False)
    _, batch = llama.llama3_8b(batch=8, layers=1)
    token = (torch.empty(64, 1, dtype=torch.int64, device="meta"), torch.empty(1, dtype=torch.int64, device="meta"))
    return {
        "prefill": Program(model, prompt, weight=weights[0]),
        "decode": Program(llama.with_cache(model, 64, 8192), token, weight=weights[1]),
        "train": Program(model, batch, training=True, weight=weights[2], options={"recompute": "all"}),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", default="20,2000,1", help="how often prefill, decode and training run per unit")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--memory", type=float, default=80e9)
    parser.add_argument("--switches", default="1", help="per unit; none: everything is shared")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    weights = tuple(map(float, args.weights.split(",")))
    switches = None if args.switches == "none" else float(args.switches)
    plan = autoshard.plan_programs(
        programs(weights, args.layers), Mesh.from_bandwidths((8,)), switches=switches, memory_limit=args.memory, gap=0.001,
        accepted=(0.01, 20.0),
    )  # fmt: skip
    used = resource.getrusage(resource.RUSAGE_SELF)
    record = {"rows": plan.rows(), "cost_seconds": plan.cost, "gap": plan.gap, "peak_bytes": plan.peak_bytes, "status": plan.status}
    record |= {"cpu_seconds": used.ru_utime + used.ru_stime, "phases": plan.seconds["cpu"], "most_bytes": used.ru_maxrss * 1024}
    if args.json:
        print(json.dumps(record))
        return
    for row in plan.rows():
        print(f"{row['name']:8} weight {row['weight']:g}  {row['seconds'] * 1e3:9.3f} ms  best {row['best_seconds'] * 1e3:9.3f} ms  "
              f"loss {row['loss']:7.2%}  copied {row['copied']:4}  switch {row['switch_seconds'] * 1e3:7.3f} ms  "
              f"peak {row['peak_bytes'] / 1e9:5.1f} GB")  # fmt: skip
    print(f"cost {plan.cost:.4f} s, gap {plan.gap:.2g}, {record['cpu_seconds']:.1f} CPU s, {plan.seconds['cpu']}")


if __name__ == "__main__":
    main()
