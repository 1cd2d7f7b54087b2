"""Peak bytes per device of each run.

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

import numpy as np

from autoshard.cost import StackConstants

from .block_time import RunConstants
from .blocks_of_stages import Stages, stages
from .runs import TrainingRuns

KEPT = {"none": 1.0, "attn": 1.0, "full": 0.0, "selective_op": 0.5, "default": 0.5, "selective_frac": 0.5, "selective_layer": 0.5}
USABLE = 0.9  # of a device's memory: the rest is the driver's, the communicators', lost to fragments, and the formula's error


def peak_bytes(runs: TrainingRuns, constants: RunConstants, split: Stages | None = None) -> np.ndarray:
    """Bytes per device on the fullest stage. split: as in `step_seconds`."""
    split = stages(runs, constants.stack.balanced > 0) if split is None else split
    p, table = runs.pipeline, runs.table_parameters
    one = p == 1
    both = (2 - runs.tied) * table
    logits = logits_bytes(runs) * constants.memory.logits
    flight = np.minimum(runs.microbatches, p) * (1 + np.where(runs.virtual > 1, (p - 1) / (p * runs.virtual), 0.0))
    flight = np.where(one, 1.0, flight)
    first = _stage(runs, constants, np.where(one, runs.layers, split.first), np.where(one, both, table), flight)
    second = _stage(runs, constants, split.largest, 0.0, flight)
    last = _stage(runs, constants, split.last, np.where(one, both, table), 1.0) + logits
    return constants.memory.fixed + np.where(one, first + logits, np.maximum(np.maximum(first, second), last))


def state_bytes(runs: TrainingRuns, parameters: np.ndarray, stack: StackConstants) -> np.ndarray:
    """Parameters, gradients and optimizer state of `parameters` of one device, before ZeRO divides them."""
    gradients, fully = np.maximum(stack.gradient_bytes, 2.0), 4 + 4 + 8.0
    divided = 2 + gradients / np.where(runs.zero >= 2, runs.sharing, 1.0) + 12 / np.where(runs.zero >= 1, runs.sharing, 1.0)
    return parameters * np.where(runs.zero >= 3, fully / runs.sharing, divided)


def activation_bytes(runs: TrainingRuns, constants: RunConstants) -> tuple[np.ndarray, np.ndarray]:
    """Saved by one block for its backward, and the block's input alone; 16 bits per element."""
    t, tp, memory = runs.tokens, runs.tensor, constants.memory
    sequence = np.where(runs.sequence_parallel > 0, tp, 1.0)
    attention = 4 * runs.width / sequence + (2 * runs.queries + 2 * runs.keys) / tp
    mlp = (2 + 2 * runs.gated) * runs.ffn / tp
    scores = np.where(constants.stack.flash > 0, 0.0, 2.5 * runs.seq * runs.heads / tp) * (runs.recompute != "attn")
    gathered = memory.gathered * 2 * runs.width * ((tp > 1) & (runs.sequence_parallel > 0) & (runs.pipeline == 1))
    return 2 * t * (memory.attention * attention + memory.mlp * mlp + scores + gathered), 2 * t * runs.width / sequence


def logits_bytes(runs: TrainingRuns) -> np.ndarray:
    return 4 * runs.tokens * runs.vocab / runs.tensor


def _stage(
    runs: TrainingRuns, constants: RunConstants, layers: np.ndarray, tables: np.ndarray | float, flight: np.ndarray | float
) -> np.ndarray:
    parameters = (layers * runs.block_parameters + tables) / runs.tensor
    saved, inputs = activation_bytes(runs, constants)
    kept = np.array([KEPT[kind] for kind in runs.recompute.tolist()])
    per_block = np.where(kept >= 1, saved, np.maximum(kept * saved, inputs))
    working = np.where(kept < 1, saved, 0.0)
    gathered = np.where(runs.zero >= 3, 2 * 2 * (runs.block_parameters + runs.table_parameters) / runs.tensor, 0.0)
    activations = np.minimum(flight * layers * per_block + working, flight * layers * saved)
    return constants.memory.states * state_bytes(runs, parameters, constants.stack) + activations + gathered
