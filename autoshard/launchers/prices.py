"""Seconds, memory and figures derived from them of many launches of one model.

    tokens/s per device = global batch * seq / seconds / devices        MFU = FLOPs per token * tokens/s per device / peak

A launch becomes a recipe (autoshard.recipes). Recipes are dense: a mixture of experts is the dense model with the MLP that one token passes
through, and the rest is added here: all_to_all, matmuls of few tokens per expert, and the states and transfers of parameters of experts
that the token does not use.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from autoshard.cost import Ring, device_constants, memory_constants, overlapped, spread_of, stack_constants
from autoshard.recipes import (
    HIDDEN,
    OPTIMIZER_BYTES,
    USABLE,
    Machine,
    Recipes,
    Stages,
    block,
    peak_bytes,
    stages,
    state_bytes,
    step_seconds,
)

from .launch import Columns
from .sizes import ModelSizes

STACKS = {"torchtitan": "torchtitan", "megatron": "megatron_core", "accelerate": "other", "nanotron": "nanotron"}
SHARE = 0.8  # of measured runs that an interval holds
FSDP_NORM = 3.0  # of a gather beside a block's compute, as in recipes


@dataclass(frozen=True)
class Site:
    """Where it runs: a kind of device with constants of its own (`cost/devices`), and the network of its nodes."""

    device: str = "h100"
    per_node: int = 8
    memory: float = 80e9  # bytes of a device
    network: float = 50e9  # bytes/s of one device's adapter
    inside: float | None = None  # bytes/s of one device to the others of its node; None: as its constants have it

    @property
    def usable(self) -> float:
        """Bytes that a launch may be predicted to need: the rest is the driver's, lost to fragments, and the prediction's error."""
        return USABLE * self.memory

    @property
    def peak(self) -> float:
        """FLOP/s of 16-bit matmuls, from the data sheet."""
        return float(np.ravel(device_constants([self.device]).peak16)[0])


@dataclass(frozen=True)
class LaunchPrices:
    """One entry per launch."""

    seconds: np.ndarray  # of a step
    bytes: np.ndarray  # of the fullest device
    tokens_per_second: np.ndarray  # of one device
    mfu: np.ndarray
    fits: np.ndarray


def recipes_of(columns: Columns, sizes: ModelSizes, site: Site, launcher: str) -> Recipes:
    """Recipes of the dense model of a token's width."""
    n = len(columns)

    def each(value: float | str) -> np.ndarray:
        return np.full(n, value)

    zero = columns.zero.astype(float)
    shard = np.where(zero > 0, columns.shard * columns.context, 1).astype(float)
    return Recipes(
        stack=each(STACKS[launcher]), device=each(site.device), layers=each(float(sizes.layers)), width=each(float(sizes.width)),
        ffn=each(float(sizes.active_ffn)), heads=each(float(sizes.heads)), kv_heads=each(float(sizes.kv_heads)),
        head_dim=each(float(sizes.head_dim)), vocab=each(float(sizes.vocab)), tied=each(float(sizes.tied)), gated=each(float(sizes.gated)),
        positions=each(float(sizes.learned_positions)), seq=columns.seq.astype(float), batch=columns.microbatch.astype(float),
        microbatches=columns.microbatches.astype(float), data=columns.data.astype(float), shard=shard, zero=zero,
        tensor=columns.tensor.astype(float), sequence_parallel=columns.sequence_parallel.astype(float),
        pipeline=columns.pipeline.astype(float), virtual=columns.virtual.astype(float), context=columns.context.astype(float),
        recompute=columns.recompute, precision=columns.precision, rowwise=columns.rowwise.astype(float), microscaling=each(0.0),
        compiled=columns.compiled.astype(float), async_tp=columns.async_tensor.astype(float), per_node=each(float(site.per_node)),
        network=each(float(site.network)), memory=each(float(site.memory)),
    )  # fmt: skip


def prices_of(columns: Columns, sizes: ModelSizes, site: Site, launcher: str) -> LaunchPrices:
    """Prices of launches, which should be legal. ValueError for a device without constants, and for float32."""
    if (columns.precision == "fp32").any():
        raise ValueError("matmuls in float32 have no prices; expected a run in bf16, fp16, fp8 or nvfp4")
    runs = recipes_of(columns, sizes, site, launcher)
    device = device_constants([site.device])
    if site.inside is not None:
        device = replace(device, link_bandwidth=np.array([site.inside]))
    machine = Machine(device, stack_constants([STACKS[launcher]]))
    split = _stages(runs, machine)
    seconds, bytes = step_seconds(runs, machine, split), peak_bytes(runs, memory_constants([STACKS[launcher]]), split)
    if sizes.experts:
        more_seconds, more_bytes = experts(columns, sizes, runs, machine, split)
        seconds, bytes = seconds + more_seconds, bytes + more_bytes
    tokens = columns.global_batch * columns.seq / seconds / columns.devices
    flops = np.array([sizes.flops_per_token(int(seq)) for seq in np.unique(columns.seq)])[np.unique(columns.seq, return_inverse=True)[1]]
    return LaunchPrices(seconds, bytes, tokens, flops * tokens / site.peak, bytes <= site.usable)


def interval(launcher: str) -> tuple[float, float]:
    """Factors of a predicted rate between which SHARE of measured runs are expected: from errors on runs that no constant was fitted to."""
    low, high = (float(np.ravel(bound)[0]) for bound in spread_of([STACKS[launcher]], SHARE))
    return float(np.exp(-high)), float(np.exp(-low))


def _stages(runs: Recipes, machine: Machine) -> Stages:
    """Blocks per stage; launches of one model with as many stages have the same."""
    _, first, of = np.unique(runs.pipeline, return_index=True, return_inverse=True)
    each = stages(runs[first], np.broadcast_to(machine.stack.balanced > 0, len(first)))
    return Stages(each.first[of], each.last[of], each.largest[of])


def experts(columns: Columns, sizes: ModelSizes, runs: Recipes, machine: Machine, split: Stages) -> tuple[np.ndarray, np.ndarray]:
    """Seconds per step and bytes per device that a mixture needs beyond its dense model."""
    device, stack = machine.device, machine.stack
    blocks = sizes.expert_layers / runs.pipeline  # of a device
    ranks = columns.expert * columns.expert_tensor  # devices of one copy of the experts
    ring = Ring.over(columns.expert.astype(float), columns.expert_tensor.astype(float), runs.per_node, runs.network, device, stack)
    tokens = runs.tokens / np.where(columns.expert_tensor == 1, runs.tensor, 1)  # that a device sends to experts
    exchanged = 4 * ring.gather(2 * tokens * sizes.active * sizes.width)  # to the experts and back, forward and backward
    per_expert = np.maximum(tokens * columns.expert * sizes.active / sizes.experts, 1.0)
    expert_ffn = sizes.expert_ffn / columns.expert_tensor
    flops = 3 * sizes.matrices * 2 * tokens * sizes.active * sizes.width * expert_ffn
    few = flops / (device.peak16 * device.matmul16) * device.small / np.minimum(per_expert, expert_ffn)
    unused = sizes.expert_parameters * (1 - sizes.active / sizes.experts) / max(sizes.expert_layers, 1)  # of a block
    local = unused / ranks
    copies = np.maximum(runs.data * runs.context * runs.tensor / ranks, 1.0)  # devices with the same experts
    sharded = np.where(runs.zero >= 1, np.minimum(np.maximum(runs.shard * runs.tensor / ranks, 1.0), copies), 1.0)
    fsdp = Ring.over(sharded, ranks.astype(float), runs.per_node, runs.network, device, stack)
    gathered = (runs.zero >= 2) * (fsdp.gather(2 * local) * (1 + (runs.zero >= 3)) + fsdp.gather(stack.gradient_bytes * local))
    one = block(runs, machine)
    hidden_by = one.forward + one.backward
    per_microbatch = blocks * (exchanged + few + overlapped(hidden_by, gathered, FSDP_NORM) - hidden_by)
    owned = blocks * local / sharded
    reduce = Ring.over(copies, ranks.astype(float), runs.per_node, runs.network, device, stack)
    update = OPTIMIZER_BYTES * owned / (device.memory_bandwidth * device.memory)
    reduced = np.where(runs.zero < 2, reduce.all_reduce(stack.gradient_bytes * blocks * local) * (1 - HIDDEN * stack.hides), 0.0) * (
        copies > 1
    )
    passes = runs.microbatches + (runs.pipeline - 1) / runs.virtual
    largest = split.largest / runs.layers * runs.pipeline  # of the fullest stage, relative to the mean
    return passes * per_microbatch + update + reduced, state_bytes(replace(runs, shard=sharded), blocks * local * largest)
