"""Predicted against published rates of launches that no constant was fitted to: three ways to fine-tune a model, and mixtures of experts.

    PYTHONPATH=. python benchmarks/launcher_points.py [--json]

Llama-3 70B fine-tuning on 32 H100, FP8: model TFLOP/s per GPU of TP4 PP4, PP8 and TP8. Sequences of 4096, a global batch of 32 and 5 stages
per device are those of NeMo's recipe for the first. The other degree of PP8 and of TP8 is not published, so both readings are printed: 1
(`tuning`; the states of 70.6e9 / 8 parameters alone take 79 GB there), and that of the first (`one degree changed`). Mixtures: tokens/s per
GPU, from docs/performance-summary-archive.md of NVIDIA-NeMo/Megatron-Bridge.
"""

from __future__ import annotations

import argparse
import json

import numpy as np

from autoshard.launch import Launch, ModelSizes, Site, why_illegal
from autoshard.launch.launch_prices import prices_of
from autoshard.launch.runs import TrainingRuns
from autoshard.launch.torchtitan import FLAVORS

LLAMA70, DEEPSEEK = FLAVORS["llama3", "70B"], FLAVORS["deepseek_v3", "671B"]
QWEN30 = ModelSizes(48, 2048, 6144, 32, 4, 151936, 128, experts=128, active=8, expert_ffn=768)
QWEN235 = ModelSizes(94, 4096, 12288, 64, 4, 151936, 128, experts=128, active=8, expert_ffn=1536)


def launch(
    devices: int, seq: int, batch: int, tp: int, pp: int, *, vp: int = 1, ep: int = 1, mbs: int = 1, precision: str = "fp8"
) -> Launch:
    data = devices // tp // pp
    return Launch(
        devices, seq, batch, mbs, data, data, 1, tp, 1, ep, 1 if ep > 1 else tp, pp, vp, "Interleaved1F1B" if vp > 1 else "1F1B",
        "none", precision, tp > 1, uneven=True,
    )  # fmt: skip


TUNING = {  # model TFLOP/s per GPU
    "TP4 PP4 VP5": (launch(32, 4096, 32, 4, 4, vp=5), 704),
    "PP8 VP5": (launch(32, 4096, 32, 1, 8, vp=5), 668),
    "TP8": (launch(32, 4096, 32, 8, 1), 509),
}
CHANGED = {
    "TP4 PP4 VP5": TUNING["TP4 PP4 VP5"],
    "TP4 PP8 VP5": (launch(32, 4096, 32, 4, 8, vp=5), 668),
    "TP8 PP4 VP5": (launch(32, 4096, 32, 8, 4, vp=5), 509),
}
MIXTURES = {  # tokens/s per GPU
    "DeepSeek-V3 1024 H100 TP2 PP8 VP4 EP64": (DEEPSEEK, "h100", launch(1024, 4096, 8192, 2, 8, vp=4, ep=64), 1297),
    "Qwen3 30B 16 H100 PP2 VP12 EP8": (QWEN30, "h100", launch(16, 4096, 1024, 1, 2, vp=12, ep=8), 5113),
    "Qwen3 235B 256 H100 TP2 PP8 VP4 EP32": (QWEN235, "h100", launch(256, 4096, 8192, 2, 8, vp=4, ep=32), 1633),
    "DeepSeek-V3 256 GB200 PP4 VP4 EP64 bf16": (DEEPSEEK, "gb200", launch(256, 4096, 4096, 1, 4, vp=4, ep=64, precision="bf16"), 3139),
    "Qwen3 30B 8 GB200 EP8 MBS4": (QWEN30, "gb200", launch(8, 4096, 512, 1, 1, ep=8, mbs=4), 26084),
    "Qwen3 235B 256 GB200 PP8 EP32": (QWEN235, "gb200", launch(256, 4096, 8192, 1, 8, ep=32), 5448),
}


def fine_tuning(rows: dict[str, tuple[Launch, float]]) -> dict:
    """Predicted and published model TFLOP/s per GPU, and predicted bytes."""
    record = {}
    for name, (one, published) in rows.items():
        prices = prices_of(TrainingRuns.of([one]), LLAMA70, Site(), "megatron")
        rate, memory = prices.tokens_per_second[0], float(prices.bytes[0])
        record[name] = {"predicted": float(LLAMA70.flops_per_token(one.seq) * rate / 1e12), "published": published, "memory_bytes": memory}
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    as_json = parser.parse_args().json
    record: dict = {"tuning": fine_tuning(TUNING), "one degree changed": fine_tuning(CHANGED), "mixtures": {}}
    for name, (sizes, device, one, published) in MIXTURES.items():
        site = Site(device, 72 if device == "gb200" else 8)
        rate = prices_of(TrainingRuns.of([one]), sizes, site, "megatron").tokens_per_second[0]
        record["mixtures"][name] = {"predicted": float(rate), "published": published, "illegal": why_illegal(one, sizes, "megatron")}
    if as_json:
        print(json.dumps(record))
        return
    for kind, rows in record.items():
        for name, row in rows.items():
            ratio = row["predicted"] / row["published"]
            memory = f"{row['memory_bytes'] / 1e9:5.0f} GB" if "memory_bytes" in row else ""
            print(f"{kind:20}{name:45}{row['predicted']:8.0f}{row['published']:8.0f}{ratio - 1:+8.1%}", memory, *row.get("illegal", ()))
        ratios = [row["predicted"] / row["published"] for row in rows.values()]
        print(f"{kind:20}median absolute error {np.median(np.abs(np.array(ratios) - 1)):.1%}\n")


if __name__ == "__main__":
    main()
