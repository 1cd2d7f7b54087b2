"""Write the published runs that `autoshard check` finds the nearest of: of each model, device, precision, length and size the fastest.

    PYTHONPATH=. python benchmarks/published_launches.py RUNS.csv MOE.csv autoshard/launch/published.json

RUNS.csv as in published_runs.py, MOE.csv as in expert_runs.py. Runs of one GPU, of software tests, of
synthetic models and of figures that were read in a search's excerpt are left out, and of llm-foundry all but the smallest and the largest
cluster of each model.
"""

from __future__ import annotations

import argparse
import csv
import json
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from expert_runs import described
from published import read

from autoshard.launch import Launch, ModelSizes
from autoshard.launch.runs import RECOMPUTE
from autoshard.launch.torchtitan import FLAVORS
from autoshard.writing import write_atomically

FLAGS = ("sequence_parallel", "compiled", "compiled_loss", "async_tensor", "gather8")
LEFT_OUT = ("vtrain_single", "vtrain_multi", "thunder", "nanotron_tp", "simumax", "mtnlg", "mcore")
NAMES = {
    "LLAMA3.1_405B": "Llama 3.1 405B", "LLAMA3_70B": "Llama 3 70B", "Llama3 8B": "Llama 3 8B", "DeepSeekV3": "DeepSeek-V3",
    "Qwen3_30B_a3B": "Qwen3 30B-A3B", "Qwen3_235B_a22B": "Qwen3 235B-A22B",
}  # fmt: skip
DEEPSEEK = {  # 14.8e12 tokens in 2,664,000 hours of H800s
    "name": "DeepSeek-V3", "source": "DeepSeek-V3 technical report (arXiv 2412.19437), table 1 and section 3.2", "stack": "megatron_core",
    "device": "h800", "per_node": 8, "rate": 1543.2,
    "launch": Launch(2048, 4096, 15360, data=128, shard=128, zero=1, pipeline=16, expert=64, virtual=2, schedule="DualPipeV",
                     precision="fp8", split="ends", async_expert=True, deepep=True),
    "model": FLAVORS["deepseek_v3", "671B"],
}  # fmt: skip


def rows_of_dense(path: Path) -> list[dict[str, Any]]:
    table, found = read(path), []
    for row, i in zip(table.rows, range(len(table))):
        if table.apart[i] or not table.seconds[i] > 0 or row["src"] in LEFT_OUT or "excerpt" in row["source"] or int(row["gpus"]) < 2:
            continue
        one = {name: column[i].item() for name, column in table.runs.values.items()}
        if one["recompute"] not in RECOMPUTE:
            continue
        pipeline, virtual = int(one["pipeline"]), int(one["virtual"])
        sharing = int(one["sharing"] / one["context"]) if one["zero"] and one["sharing"] >= one["context"] else 1
        whole = ("devices", "seq", "global_batch", "microbatch", "data", "tensor", "context", "zero")
        launch = Launch(
            **{name: int(one[name]) for name in whole}, pipeline=pipeline, virtual=virtual if pipeline > 1 else 1, shard=sharing,
            schedule="Interleaved1F1B" if virtual > 1 and pipeline > 1 else "1F1B", recompute=one["recompute"], precision=one["precision"],
            expert_tensor=int(one["tensor"]), **{name: bool(one[name]) for name in FLAGS},
        )  # fmt: skip
        sizes = {name: int(one[name]) for name in ("layers", "width", "ffn", "heads", "kv_heads", "vocab", "head_dim")}
        model = ModelSizes(**sizes, tied=bool(one["tied"]), gated=bool(one["gated"]), learned_positions=bool(one["positions"]))
        rate = launch.global_batch * launch.seq / table.seconds[i] / launch.devices
        where = {"stack": one["stack"], "device": one["device"], "per_node": int(one["per_node"])}
        found.append({"name": row["model"], "source": row["source"], **where, "rate": rate, "launch": launch, "model": model})
    return found


def rows_of_experts(path: Path) -> list[dict[str, Any]]:
    found = [DEEPSEEK]
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            try:
                launch, sizes, site, seconds = described(row)
            except (ValueError, KeyError):
                continue
            if "excerpt" not in row["source"] and "(" not in row["model"] and sizes.layers > 4:
                rate = launch.global_batch * launch.seq / seconds / launch.devices
                where = {"stack": "bridge", "device": site.device, "per_node": site.per_node}
                found.append({"name": row["model"], "source": row["source"], **where, "rate": rate,
                              "launch": launch, "model": sizes})  # fmt: skip
    return found


def chosen(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The fastest of each kind; of llm-foundry those of the fewest and the most devices."""
    best: dict[tuple, dict[str, Any]] = {}
    for row in rows:
        launch = row["launch"]
        key = (row["source"].partition("@")[0], row["name"], row["device"], launch.devices, launch.precision, launch.seq)
        if key not in best or row["rate"] > best[key]["rate"]:
            best[key] = row
    sizes: dict[tuple, list[int]] = {}
    for source, name, device, devices, precision, _ in best:
        sizes.setdefault((source, name, device, precision), []).append(devices)
    kept = []
    for (source, name, device, devices, precision, seq), row in best.items():
        ends = sizes[source, name, device, precision]
        if "llm-foundry" not in source or (devices in (min(ends), max(ends)) and seq == 2048):
            kept.append(row)
    return kept


def plain(record: Any) -> dict[str, Any]:
    """Fields that differ from their defaults."""
    return {f.name: value for f in fields(record) if (value := getattr(record, f.name)) != f.default or f.default is MISSING}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("runs", "moe", "out"):
        parser.add_argument(name, type=Path)
    asked = parser.parse_args()
    rows = chosen([*rows_of_dense(asked.runs), *rows_of_experts(asked.moe)])
    lines = []
    for row in rows:
        rate = float(f"{row['rate']:.5g}")
        one = {**row, "name": NAMES.get(row["name"], row["name"]), "rate": rate}
        lines.append(json.dumps({**one, "launch": plain(row["launch"]), "model": plain(row["model"])}))
    write_atomically("[\n" + ",\n".join(lines) + "\n]\n", asked.out)
    print(f"{len(rows)} runs")


if __name__ == "__main__":
    main()
