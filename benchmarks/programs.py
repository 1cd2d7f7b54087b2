"""Llama-3 8B as three programs on one set of weights: prefill, decode and training on 8 devices, and what sharing costs each of them.

    python benchmarks/programs.py [--weights 1e6,1,1] [--layers 32] [--memory 80e9] [--switches none] [--json]
    python benchmarks/programs.py --ends

Prefill is 1 x 8192 tokens, decode one token for each of 64 sequences with 8192 in the cache, training 8 x 8192 with every block recomputed.
--ends: everything is shared, and each program in turn runs a million times as often as the others, with the memory limit and without it.
A loss is against the best plan of the program alone on empty devices, under the same limit. `least` is what the bound proves: no plan in
which the others are no slower has a smaller loss.
"""

import argparse
import json
import resource
from collections.abc import Iterator

import torch

import autoshard
from autoshard import Mesh, Program
from autoshard.solution import ProgramsSolution
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


def planned(args: argparse.Namespace, weights: tuple[float, ...], memory: float | None) -> ProgramsSolution:
    switches = None if args.switches == "none" or args.ends else float(args.switches)
    return autoshard.plan_programs(
        programs(weights, args.layers), Mesh.from_bandwidths((8,)), switches=switches, memory_limit=memory, gap=0.001,
        accepted=(0.01, 20.0),
    )  # fmt: skip


def least_loss(plan: ProgramsSolution, name: str) -> float:
    """The smallest loss of a program in any plan of all of them whose other programs are no slower than here."""
    others = sum(plan.weights[other] * plan[other].cost for other in plan if other != name)
    return max((plan.bound - others) / plan.weights[name] / plan.best[name]["cost_seconds"] - 1, 0.0)


def table(plan: ProgramsSolution) -> str:
    lines = [
        f"{row['name']:8} weight {row['weight']:g}  {row['seconds'] * 1e3:9.3f} ms  best {row['best_seconds'] * 1e3:9.3f} ms  "
        f"loss {row['loss']:7.2%}  copied {row['copied']:4}  switch {row['switch_seconds'] * 1e3:7.3f} ms  "
        f"peak {row['peak_bytes'] / 1e9:5.1f} GB"
        for row in plan.rows()
    ]
    return "\n".join(lines)


def record_of(plan: ProgramsSolution) -> dict:
    return {"rows": plan.rows(), "cost_seconds": plan.cost, "gap": plan.gap, "peak_bytes": plan.peak_bytes, "status": plan.status,
            "phases": plan.seconds["cpu"]}  # fmt: skip


def ends(args: argparse.Namespace, memory: float | None) -> Iterator[dict]:
    """One record for each program that is favoured, with the limit and without it."""
    for limit in dict.fromkeys((memory, None)):
        for name in NAMES:
            began = cpu_seconds()
            plan = planned(args, tuple(1e6 if other == name else 1.0 for other in NAMES), limit)
            one = {"favoured": name, "memory_limit": limit, "loss": plan.loss(name), "least_loss": least_loss(plan, name)}
            one |= record_of(plan) | {"cpu_seconds": cpu_seconds() - began}
            if not args.json:
                losses = "  ".join(f"{row['name']} {row['loss']:7.2%}" for row in one["rows"])
                limited = "no limit" if limit is None else f"{limit / 1e9:g} GB"
                print(f"{name:8} favoured, {limited:8}: {losses}  least {one['least_loss']:7.2%}  gap {plan.gap:.2g}  "
                      f"peak {plan.peak_bytes / 1e9:5.1f} GB  {one['cpu_seconds']:.1f} CPU s", flush=True)  # fmt: skip
            yield one


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", default="20,2000,1", help="how often prefill, decode and training run per unit")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--memory", default="80e9", help="bytes of a device; none: no limit")
    parser.add_argument("--switches", default="1", help="per unit; none: everything is shared")
    parser.add_argument("--ends", action="store_true", help="each program in turn favoured, with the limit and without it")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    memory = None if args.memory == "none" else float(args.memory)
    if args.ends:
        records = list(ends(args, memory))
        if args.json:
            print(json.dumps(records))
        return
    plan = planned(args, tuple(map(float, args.weights.split(","))), memory)
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    record = record_of(plan) | {"cpu_seconds": cpu_seconds(), "most_bytes": most}
    if args.json:
        print(json.dumps(record))
        return
    print(table(plan))
    print(f"cost {plan.cost:.4f} s, gap {plan.gap:.2g}, {record['cpu_seconds']:.1f} CPU s, {plan.seconds['cpu']}")


if __name__ == "__main__":
    main()
