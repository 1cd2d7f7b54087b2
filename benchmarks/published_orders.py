"""Whether FSDP, HSDP and Megatron with and without sequence parallelism are predicted in the order in which they were published.

    PYTHONPATH=. python benchmarks/published_orders.py RUNS.csv [--json]

Runs of one source, model, cluster, sequence length and precision, without pipeline, are compared by tokens per second: the fastest run
of each scheme, as published, against that of each other scheme. A pair within TIED of each other has no published order.
"""

from __future__ import annotations

import argparse
import json
from itertools import combinations
from pathlib import Path

import numpy as np
from published import predicted_seconds, read

SAME = ("source", "arch", "model", "gpu", "gpus", "gpn", "seq", "prec", "fused", "cp", "ep")
TIED = 0.03  # relative: measured twice, steps differ by as much


def scheme(row: dict) -> str | None:
    """The scheme of a run; None of another, as a pipeline or ZeRO 1."""
    tp, shard, gpus = (int(row[name]) for name in ("tp", "shard", "gpus"))
    zero = int(row["zero"])
    if int(row["pp"]) > 1 or zero not in (0, 3):
        return None
    sharded = "" if not zero else "HSDP" if shard * tp < gpus else "FSDP"
    tensor = "" if tp == 1 else "Megatron with sequence parallelism" if int(row["sp"]) else "Megatron"
    return " x ".join(filter(None, (sharded, tensor))) or "data parallel"


def pairs(rows: list[dict], measured: np.ndarray, predicted: np.ndarray) -> list[dict]:
    """measured, predicted: seconds per token."""
    best: dict[tuple, dict[str, int]] = {}
    for k, row in enumerate(rows):
        if (name := scheme(row)) is not None and measured[k] > 0:
            of = best.setdefault(tuple(row[key] for key in SAME), {})
            of[name] = min(of.get(name, k), k, key=lambda i: measured[i])
    found = []
    for key, of in best.items():
        for (a, i), (b, j) in combinations(sorted(of.items()), 2):
            ratio, ours = (float(seconds[j] / seconds[i]) for seconds in (measured, predicted))
            if abs(ratio - 1) > TIED:
                agrees = (ratio > 1) == (ours > 1)
                found.append({**dict(zip(SAME, key)), "schemes": [a, b], "published": ratio, "ours": ours, "agrees": agrees})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    table = read(asked.runs)
    tokens = np.array([float(row["gbs"]) * float(row["seq"]) for row in table.rows])
    usable = np.where(table.crashed | table.apart, np.nan, table.seconds / tokens)
    found = pairs(table.rows, np.nan_to_num(usable), predicted_seconds(table.runs) / tokens)
    agree = sum(row["agrees"] for row in found)
    if asked.json:
        print(json.dumps({"pairs": found, "agree": agree}))
        return
    for row in found:
        where = f"{row['source'][:40]} {row['model']} {row['gpus']} {row['gpu']} {row['seq']}"
        ratios = f"1 : {row['published']:.3f}, ours {row['ours']:.3f}"
        print(f"{where}: {' / '.join(row['schemes'])} {ratios}{'' if row['agrees'] else '   OTHER ORDER'}")
    print(f"{agree} of {len(found)} pairs in the published order")


if __name__ == "__main__":
    main()
