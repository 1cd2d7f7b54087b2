"""The table of published runs of mixtures of experts: which rows can be expressed, and what is predicted. Read by published_runs.py.

A row has source, model, gpus, gpu_type, degrees (tp, pp, cp, ep; dp is what is left), fsdp (sharding degree or 1), seq, global_batch,
micro_batch, precision, recompute, tokens_per_s_per_gpu or step_seconds, and notes ("VP 8": virtual stages).
"""

from __future__ import annotations

import csv
import re
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np

from autoshard.launch import Launch, ModelSizes, Site
from autoshard.launch.blocks_of_stages import ENDS
from autoshard.launch.launch_prices import prices_of
from autoshard.launch.runs import TrainingRuns
from autoshard.launch.torchtitan import FLAVORS

QWEN_30B = FLAVORS["qwen3", "30B-A3B"]
MODELS = {  # published configurations; hybrids with state space layers have no sizes here
    "DeepSeekV3": replace(FLAVORS["deepseek_v3", "671B"], mtp=1), "DeepSeekV3 (w/o MTP)": FLAVORS["deepseek_v3", "671B"],
    "DeepSeek V3 16B": FLAVORS["deepseek_v3", "16B"], "Qwen3_30B_a3B": QWEN_30B, "Qwen3 30B-A3B": QWEN_30B,
    "Qwen3_235B_a22B": FLAVORS["qwen3", "235B-A22B"],
    "GPT OSS 120B": ModelSizes(36, 2880, 2880, 64, 8, 201088, 64, experts=128, active=4, expert_ffn=2880),
}  # fmt: skip
DEVICES = {"B200 SXM": "b200", "MI355": "mi355x"}  # others: their name in lower case
PRECISIONS = {"MXFP8": "mxfp8", "FP8-MX": "mxfp8", "FP8": "fp8", "FP8-CS": "fp8", "NVFP4": "nvfp4", "BF16": "bf16", "": "bf16"}
PER_NODE = {"gb200": 72, "gb300": 72}  # devices that NVLink joins


def is_of_experts(path: Path) -> bool:
    with path.open(newline="") as file:
        return {"model", "gpu_type", "ep"} <= set(next(csv.reader(file)))


def overlaps(notes: str) -> bool:
    """Whether experts' traffic runs beside compute: as the notes say, or as Megatron-Bridge's recipes have it since 26.06."""
    release = re.match(r"(\d+\.\d+)", notes)
    return "EP overlap on" in notes or "EP overlap;" in notes or (release is not None and float(release[1]) >= 26.06)


def described(row: dict[str, str]) -> tuple[Launch, ModelSizes, Site, float]:
    """A row's run and where it ran, with the measured seconds of a step. ValueError, with the reason, where it can't be expressed."""
    if row["model"] not in MODELS:
        raise ValueError(f"model {row['model']} has no sizes")
    if not (row["tokens_per_s_per_gpu"] or row["step_seconds"]) or not row["seq"] or not row["global_batch"]:
        raise ValueError("no seconds, or no batch")
    sizes, devices = MODELS[row["model"]], int(row["gpus"])
    tensor, pipeline, context, expert = (int(row[name] or 1) for name in ("tp", "pp", "cp", "ep"))
    virtual = re.search(r"VP (\d+)", row["notes"])
    stages = int(virtual[1]) if virtual and pipeline > 1 else 1
    split = ENDS if sizes.layers % (pipeline * stages) and pipeline > 1 else ""  # as Bridge's recipes list the stages of 61 layers
    data, seq, batch = devices // (tensor * pipeline * context), int(row["seq"]), int(row["global_batch"])
    fully = row["fsdp"] not in ("", "0", "1")
    launch = Launch(
        devices=devices, seq=seq, global_batch=batch, microbatch=int(row["micro_batch"] or 1), data=data, shard=data,
        zero=3 if fully else 1, tensor=tensor, context=context, expert=expert, pipeline=pipeline, virtual=stages, split=split,
        precision=PRECISIONS[row["precision"].upper()], gather8="FP8" in row["precision"].upper(),
        recompute="full" if row["recompute"] == "full" else "none", sequence_parallel=tensor > 1, compiled=True,
        async_expert=expert > 1 and overlaps(row["notes"]), deepep=True,
    )  # fmt: skip
    device = DEVICES.get(row["gpu_type"], row["gpu_type"].lower())
    site = Site(device, per_node=min(PER_NODE.get(device, 8), devices))
    return launch, sizes, site, float(row["step_seconds"] or batch * seq / float(row["tokens_per_s_per_gpu"] or 1) / devices)


def predicted(row: dict[str, str], *, fitted: bool) -> tuple[float, float]:
    """Predicted and measured seconds of a step. ValueError, with the reason, where the row can't be expressed."""
    launch, sizes, site, measured = described(row)
    return float(prices_of(TrainingRuns.of([launch]), sizes, site, "bridge", fitted=fitted).seconds[0]), measured


def compared(path: Path) -> dict:
    """As published_runs.compared, by source and model; `fitted` constants know nothing of mixtures."""
    errors: dict[str, list[tuple[float, float]]] = defaultdict(list)
    reasons: Counter[str] = Counter()
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            try:
                both = [predicted(row, fitted=fitted) for fitted in (True, False)]
            except (ValueError, KeyError) as why:
                reasons[str(why)] += 1
                continue
            name = f"{row['source'].split('@')[0].split('/')[-1]} {row['model']}"
            errors[name].append(tuple(seconds / measured - 1 for seconds, measured in both))  # type: ignore[arg-type]
    sources = {}
    for name, both in sorted(errors.items()):
        error, before = np.array(both).T
        size = np.abs(error)
        sources[name] = {"n": len(error), "mean": size.mean(), "median": np.median(size), "bias": np.median(error)}
        sources[name] |= {"unfitted_mean": np.abs(before).mean()}
    means = [np.mean([row[key] for row in sources.values() if row["n"] >= 2]) for key in ("mean", "unfitted_mean")]
    sizes = np.abs([error for both in errors.values() for error, _ in both])
    plain = {name: {key: float(value) for key, value in row.items()} for name, row in sources.items()}
    return {
        "sources": plain, "mean_of_means": float(means[0]), "unfitted_mean_of_means": float(means[1]), "rows": len(sizes),
        "mean": float(sizes.mean()), "median": float(np.median(sizes)), "inexpressible": dict(reasons),
    }  # fmt: skip


def show(record: dict) -> None:
    for name, row in record["sources"].items():
        figures = " ".join(f"{key} {100 * row[key]:6.1f}" for key in ("mean", "median", "bias", "unfitted_mean"))
        print(f"{name:40} {row['n']:4.0f}  {figures}")
    print(f"all {record['rows']} rows: mean {100 * record['mean']:.1f} %, median {100 * record['median']:.1f} %")
    print(f"mean of means {100 * record['mean_of_means']:.1f} %; nothing fitted {100 * record['unfitted_mean_of_means']:.1f} %")
    for why, count in record["inexpressible"].items():
        print(f"not expressible: {count} rows, {why}")
