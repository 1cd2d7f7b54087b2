"""Seconds, memory and figures derived from them of many launches of one model.

    tokens/s per device = global batch * seq / seconds / devices        MFU = FLOPs per token * tokens/s per device / peak

`step_time` and `peak_memory` know dense models: a mixture of experts is the dense model with the MLP that one token passes through, and the
rest is added here: all_to_all, what experts as measured take longer than that MLP, and the states and transfers of parameters of experts
that the token does not use.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from autoshard.cost import device_constants, experts_seconds, matmul_seconds, overlapped

from .blocks_of_stages import Stages, stages
from .model_sizes import ModelSizes
from .peak_memory import USABLE, peak_bytes, state_bytes
from .runs import TrainingRuns
from .step_time import FSDP_NORM, HIDDEN, OPTIMIZER_BYTES, RunConstants, block, step_seconds

STACKS = {"torchtitan": "torchtitan", "megatron": "megatron_core", "accelerate": "other", "nanotron": "nanotron"}
OF_MODEL = ("layers", "width", "heads", "kv_heads", "head_dim", "vocab", "tied", "gated")


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


class LaunchPrices(NamedTuple):
    """One entry per launch."""

    seconds: np.ndarray  # of a step
    bytes: np.ndarray  # of the fullest device
    tokens_per_second: np.ndarray  # of one device
    mfu: np.ndarray
    fits: np.ndarray


def priced_runs(launches: TrainingRuns, sizes: ModelSizes, site: Site) -> TrainingRuns:
    """The launches with all columns that seconds and bytes are computed from, of the dense model of a token's width."""
    numbers = {name: column.astype(float) for name, column in launches.values.items() if column.dtype.kind in "biu"}
    fixed = {name: getattr(sizes, name) for name in OF_MODEL}
    fixed |= {"ffn": sizes.active_ffn, "per_node": site.per_node, "network": site.network, "microscaling": 0}
    columns = {name: np.full(len(launches), float(value)) for name, value in fixed.items()}
    sharing = np.where(launches.zero > 0, launches.shard * launches.context, 1).astype(float)
    return launches.with_columns(**numbers, **columns, sharing=sharing)


def prices_of(launches: TrainingRuns, sizes: ModelSizes, site: Site, launcher: str, *, fitted: bool = True) -> LaunchPrices:
    """Prices of launches, which should be legal. launcher: or a stack of cost/devices. ValueError for a device without constants, and for
    float32."""
    if (launches.precision == "fp32").any():
        raise ValueError("matmuls in float32 have no prices; expected a run in bf16, fp16, fp8 or nvfp4")
    runs = priced_runs(launches, sizes, site)
    constants = RunConstants.of([site.device], [STACKS.get(launcher, launcher)], launches.precision, fitted=fitted)
    if site.inside is not None:
        stated = {"link_bandwidth": np.array([site.inside]), "link": np.ones(1)}  # as plans have it: what collectives reach
        constants = replace(constants, device=replace(constants.device, **stated))
    split = stages(runs, constants.stack.balanced > 0)
    seconds, bytes = step_seconds(runs, constants, split), peak_bytes(runs, constants, split)
    if sizes.experts:
        more_seconds, more_bytes = experts(runs, sizes, constants, split)
        seconds, bytes = seconds + more_seconds, bytes + more_bytes
    tokens = runs.global_batch * runs.seq / seconds / runs.devices
    return LaunchPrices(seconds, bytes, tokens, sizes.flops_per_token(runs.seq) * tokens / site.peak, bytes <= site.usable)


def experts(runs: TrainingRuns, sizes: ModelSizes, constants: RunConstants, split: Stages) -> tuple[np.ndarray, np.ndarray]:
    """Seconds per step and bytes per device that a mixture needs beyond its dense model."""
    device, stack = constants.device, constants.stack
    blocks = sizes.expert_layers / runs.pipeline  # of a device
    ranks = runs.expert * runs.expert_tensor  # devices of one copy of the experts
    ring = constants.ring(runs, runs.expert, runs.expert_tensor)
    tokens = runs.tokens / np.where(runs.expert_tensor == 1, runs.tensor, 1)  # that a device sends to experts
    exchanged = 4 * ring.gather(2 * tokens * sizes.active * sizes.width)  # to the experts and back, forward and backward
    expert_ffn = sizes.expert_ffn / runs.expert_tensor
    rows, local_experts = tokens * sizes.active, np.minimum(sizes.experts / runs.expert, tokens * sizes.active)
    routed = experts_seconds(rows, local_experts, rows, sizes.width, expert_ffn, sizes.matrices, constants.experts)
    of, ffn = constants.in_program(constants.matmul), runs.ffn / runs.tensor
    dense = matmul_seconds(runs.tokens, runs.width, (1 + runs.gated) * ffn, of) + matmul_seconds(runs.tokens, ffn, runs.width, of)
    few = 3 * (device.training * routed - dense * sizes.active * sizes.expert_ffn / runs.ffn)
    unused = sizes.expert_parameters * (1 - sizes.active / sizes.experts) / max(sizes.expert_layers, 1)  # of a block
    local = unused / ranks
    copies = np.maximum(runs.data * runs.context * runs.tensor / ranks, 1.0)  # devices with the same experts
    sharded = np.where(runs.zero >= 1, np.minimum(np.maximum(runs.sharing * runs.tensor / ranks, 1.0), copies), 1.0)
    fsdp = constants.ring(runs, sharded, ranks)
    gathered = (runs.zero >= 2) * (fsdp.gather(2 * local) * (1 + (runs.zero >= 3)) + fsdp.gather(stack.gradient_bytes * local))
    one = block(runs, constants)
    hidden_by = one.forward + one.backward
    per_microbatch = blocks * (exchanged + few + overlapped(hidden_by, gathered, FSDP_NORM) - hidden_by)
    owned = blocks * local / sharded
    reduce = constants.ring(runs, copies, ranks)
    update = OPTIMIZER_BYTES * owned / (device.memory_bandwidth * device.memory)
    exposed = 1 - HIDDEN * stack.hides
    reduced = np.where(runs.zero < 2, reduce.all_reduce(stack.gradient_bytes * blocks * local) * exposed, 0.0) * (copies > 1)
    passes = runs.microbatches + (runs.pipeline - 1) / runs.virtual
    largest = split.largest / runs.layers * runs.pipeline  # of the fullest stage, relative to the mean
    return passes * per_microbatch + update + reduced, state_bytes(runs.with_columns(sharing=sharded), blocks * local * largest, stack)
