"""Peak bytes per device of a recipe, and whether it fits.

    peak = fixed + states * S + gathered + max over stages of (in flight * layers * A + working + logits * V)            (`peak_bytes`)

    S         parameters (2 bytes, or 4 with FSDP), gradients and optimizer state (12, with FSDP 8) of the stage, divided as ZeRO says
    A         activations of a block and microbatch: attention * (norms, projections and attention) + mlp * (hidden features)
              + gathered * (sequence parallel matmuls' gathered inputs), or with full recomputation the block's input alone
    working   with recomputation, one block's activations                     V   float32 logits of the last stage
    in flight min(microbatches, p) on all stages but the last, which holds one; interleaved stages hold (p - 1) / (p v) more
              (Narayanan et al. 2021)

The factors are of a software stack: what autograd saves and allocators keep.
"""

from __future__ import annotations

import math

import numpy as np

from autoshard.cost import MemoryConstants, memory_constants, stack_constants

from .columns import Recipes
from .stages import Stages, stages

MOST, ERROR = 0.97, 0.12  # share of a device's memory that a run can have; standard deviation of log(measured / predicted) bytes
KEPT = {"none": 1.0, "attn": 1.0, "full": 0.0, "selective_op": 0.5, "default": 0.5, "selective_frac": 0.5, "selective_layer": 0.5}
USABLE = 0.9  # of a device's memory: the rest is the driver's, the communicators', lost to fragments, and the formula's error


def peak_bytes(runs: Recipes, memory: MemoryConstants | None = None, split: Stages | None = None) -> np.ndarray:
    """Bytes per device on the fullest stage."""
    memory = memory_constants(runs.stack) if memory is None else memory
    split = stages(runs, stack_constants(runs.stack).balanced > 0) if split is None else split
    p, table = runs.pipeline, runs.table_parameters
    one = p == 1
    both = (2 - runs.tied) * table
    flight = np.minimum(runs.microbatches, p) * (1 + np.where(runs.virtual > 1, (p - 1) / (p * runs.virtual), 0.0))
    first = _stage(runs, memory, np.where(one, runs.layers, split.first), np.where(one, both, table), np.where(one, 1.0, flight))
    second = _stage(runs, memory, split.largest, 0.0, np.where(one, 1.0, flight))
    last = _stage(runs, memory, split.last, np.where(one, both, table), 1.0) + logits_bytes(runs) * memory.logits
    return memory.fixed + np.where(one, first + logits_bytes(runs) * memory.logits, np.maximum(np.maximum(first, second), last))


def fits(runs: Recipes, memory: MemoryConstants | None = None, split: Stages | None = None) -> np.ndarray:
    """Whether each run is predicted to run: within USABLE of the device's memory, and with a block for every stage."""
    return (peak_bytes(runs, memory, split) <= USABLE * runs.memory) & (runs.pipeline < runs.layers)


def chance_to_fit(runs: Recipes, bytes: np.ndarray) -> np.ndarray:
    """The probability that a run with predicted `bytes` per device does not crash: the error of their logarithm is taken as normal."""
    known = (np.log(MOST * np.maximum(runs.memory, 1.0)) - np.log(bytes)) / ERROR
    below = np.vectorize(math.erfc, otypes=[float])(-known / math.sqrt(2)) / 2
    return np.where(runs.pipeline < runs.layers, below, 0.0)


def state_bytes(runs: Recipes, parameters: np.ndarray) -> np.ndarray:
    """Parameters, gradients and optimizer state of `parameters` of one device, before ZeRO divides them."""
    gradients = np.maximum(stack_constants(runs.stack).gradient_bytes, 2.0)
    fully = 4 + 4 + 8.0
    shard = runs.shard
    divided = 2 + gradients / np.where(runs.zero >= 2, shard, 1.0) + 12 / np.where(runs.zero >= 1, shard, 1.0)
    return parameters * np.where(runs.zero >= 3, fully / shard, divided)


def activation_bytes(runs: Recipes, memory: MemoryConstants) -> tuple[np.ndarray, np.ndarray]:
    """Saved by one block for its backward, and the block's input alone; 16 bits per element."""
    t, tp = runs.tokens, runs.tensor
    sequence = np.where(runs.sequence_parallel > 0, tp, 1.0)
    attention = 4 * runs.width / sequence + (2 * runs.queries + 2 * runs.keys) / tp
    mlp = (2 + 2 * runs.gated) * runs.ffn / tp
    scores = np.where(stack_constants(runs.stack).flash > 0, 0.0, 2.5 * runs.seq * runs.heads / tp) * (runs.recompute != "attn")
    gathered = memory.gathered * 2 * runs.width * ((tp > 1) & (runs.sequence_parallel > 0) & (runs.pipeline == 1))
    return 2 * t * (memory.attention * attention + memory.mlp * mlp + scores + gathered), 2 * t * runs.width / sequence


def logits_bytes(runs: Recipes) -> np.ndarray:
    return 4 * runs.tokens * runs.vocab / runs.tensor


def _stage(
    runs: Recipes, memory: MemoryConstants, layers: np.ndarray, tables: np.ndarray | float, flight: np.ndarray | float
) -> np.ndarray:
    parameters = (layers * runs.block_parameters + tables) / runs.tensor
    saved, inputs = activation_bytes(runs, memory)
    kept = np.array([KEPT[kind] for kind in runs.recompute.tolist()])
    per_block = np.where(kept >= 1, saved, np.maximum(kept * saved, inputs))
    working = np.where(kept < 1, saved, 0.0)
    gathered = np.where(runs.zero >= 3, 2 * 2 * (runs.block_parameters + runs.table_parameters) / runs.tensor, 0.0)
    activations = np.minimum(flight * layers * per_block + working, flight * layers * saved)
    return memory.states * state_bytes(runs, parameters) + activations + gathered
