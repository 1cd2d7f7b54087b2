"""What a recipe is predicted to do: seconds per step with their interval, bytes per device, and why it can't run.

interval   seconds * exp(-spread), seconds * exp(spread); spread from the errors on runs that the constants were not fitted to,
           per software stack                                                                                       (`interval`)
"""

from __future__ import annotations

import numpy as np

from autoshard.cost import spread_of

from .columns import Recipes
from .step import Machine, step_seconds


def predicted_seconds(runs: Recipes, *, fitted: bool = True) -> np.ndarray:
    """Seconds per step of every run; with fitted=False from published figures of devices and kernels alone."""
    return step_seconds(runs, Machine.of(runs, fitted=fitted))


def interval(runs: Recipes, seconds: np.ndarray, share: float = 0.8) -> tuple[np.ndarray, np.ndarray]:
    """Lowest and highest seconds between which `share` of measured runs are expected. ValueError unless 0 < share < 1."""
    if not 0 < share < 1:
        raise ValueError(f"an interval of a share {share} was asked for; expected a number between 0 and 1, for example 0.8")
    low, high = spread_of(runs.stack, share)
    return seconds * np.exp(low), seconds * np.exp(high)


def tokens_per_second(runs: Recipes, seconds: np.ndarray) -> np.ndarray:
    """Per device."""
    return runs.batch * runs.seq * runs.microbatches * runs.data / seconds / runs.devices


def illegal(runs: Recipes) -> list[str]:
    """Why each run can't be launched; empty where it can."""
    return [_reason(*row) for row in zip(*(getattr(runs, name) for name in _LEGAL), strict=True)]


_LEGAL = (
    "layers", "ffn", "heads", "kv_heads", "seq", "tensor", "pipeline", "virtual", "context", "data", "shard", "sequence_parallel",
)  # fmt: skip


def _reason(layers, ffn, heads, kv_heads, seq, tensor, pipeline, virtual, context, data, shard, sequence) -> str:
    if heads % tensor:
        return f"{heads:.0f} heads do not divide by tensor parallel {tensor:.0f}"
    if kv_heads % tensor and tensor % kv_heads:
        return f"{kv_heads:.0f} key-value heads and tensor parallel {tensor:.0f} do not divide"
    if ffn % tensor:
        return f"{ffn:.0f} hidden features do not divide by tensor parallel {tensor:.0f}"
    if pipeline * virtual > layers:
        return f"{layers:.0f} blocks are fewer than {pipeline * virtual:.0f} stages"
    if seq % (context * (tensor if sequence else 1)):
        beside = f" and tensor parallel {tensor:.0f}" if sequence else ""
        return f"{seq:.0f} tokens do not divide by context parallel {context:.0f}{beside}"
    if (data * context) % shard and shard % data:
        return f"{data * context:.0f} data parallel ranks do not divide by shard {shard:.0f}"
    return ""
