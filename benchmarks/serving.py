"""Predicted seconds per token beside published ones, none of which was fitted to.

    python benchmarks/serving.py [--json]

FIGURES holds the published runs with their source. Predictions are at the prices of the device's file, whose constants were fitted to
training steps: memory is read at the share of its bandwidth that those reach, and kernels are replayed from CUDA graphs. What a prediction
leaves out (gaps between small kernels, sampling, the host) makes it too low, most where a token takes few milliseconds.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers

from autoshard.cost import presets
from autoshard.serving import serve_plan

GPT_FAST = (
    "pytorch-labs/gpt-fast README.md, Tensor Parallelism: A100-80GB (330 W), bf16, batch 1, prompt of 5 tokens (200 new ones are assumed)"
)
VLLM_A100 = "johnmusgrave.com/p/vllm-throughput-latency-sweep-on: vLLM 0.23.0, A100 40GB, BF16, 1024 tokens in, 128 out, 1 request"
MODELS: dict[str, dict[str, int]] = {
    "Llama-2-7B": {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
                   "num_key_value_heads": 32, "vocab_size": 32000},
    "Llama-2-70B": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
                    "num_key_value_heads": 8, "vocab_size": 32000},
    "Llama-3.1-8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
                     "num_key_value_heads": 8, "vocab_size": 128256},
}  # fmt: skip
A100_40GB = {"memory_bandwidth": 1.555e12, "memory": 40e9}  # bytes/s, bytes: NVIDIA A100 40GB SXM data sheet


@dataclass(frozen=True)
class Figure:
    model: str
    tensor: int
    tokens_per_second: float  # of one sequence
    prompt: int
    answer: int
    source: str
    device: tuple[tuple[str, float], ...] = ()  # what differs from the preset a100

    @property
    def seconds(self) -> float:
        return 1 / self.tokens_per_second


FIGURES = (
    Figure("Llama-2-7B", 1, 104.9, 5, 200, GPT_FAST),
    Figure("Llama-2-7B", 2, 168.84, 5, 200, GPT_FAST),
    Figure("Llama-2-7B", 4, 254.02, 5, 200, GPT_FAST),
    Figure("Llama-2-7B", 8, 328.43, 5, 200, GPT_FAST),
    Figure("Llama-2-70B", 2, 21.32, 5, 200, GPT_FAST),
    Figure("Llama-2-70B", 4, 38.01, 5, 200, GPT_FAST),
    Figure("Llama-2-70B", 8, 62.50, 5, 200, GPT_FAST),
    Figure("Llama-3.1-8B", 1, 75.0, 1024, 128, VLLM_A100, tuple(A100_40GB.items())),
)


def predicted(figure: Figure) -> float:
    """Seconds per token of the row with the figure's tensor degree and no pipeline."""
    with torch.device("meta"):
        config = transformers.LlamaConfig(**MODELS[figure.model], max_position_embeddings=131072)
        model = transformers.LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).eval()

    def mesh_of(shape: tuple[int, int, int]) -> Any:
        mesh = presets.mesh("a100", shape, 8)
        return replace(mesh, device=replace(mesh.device, **dict(figure.device)))

    plan = serve_plan(model, figure.tensor, max_tokens=figure.prompt + figure.answer, prompt=figure.prompt, batch=1, mesh_of=mesh_of)
    return next(row.seconds_per_token for row in plan.rows if row.tensor == figure.tensor)


def rows() -> list[dict[str, Any]]:
    return [
        {
            "model": figure.model, "tensor": figure.tensor, "published_seconds": figure.seconds, "predicted_seconds": seconds,
            "relative": seconds / figure.seconds - 1, "source": figure.source,
        }
        for figure in FIGURES
        for seconds in [predicted(figure)]
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    arguments, found = parser.parse_args(), rows()
    if arguments.json:
        print(json.dumps({"figures": found}))
        return
    print(f"{'model':<14}{'tensor':>7}{'published':>12}{'predicted':>12}{'off by':>9}")
    for row in found:
        times = f"{row['published_seconds'] * 1e3:>9.2f} ms{row['predicted_seconds'] * 1e3:>9.2f} ms"
        print(f"{row['model']:<14}{row['tensor']:>7}{times}{row['relative']:>+9.0%}")
    for source in dict.fromkeys(row["source"] for row in found):
        print(source)


if __name__ == "__main__":
    main()
