"""Seconds of a training step of each run, by kind: blocks, microbatches, pipeline, update.

    block      forward f and backward b                                                                  (block_time.py)
    FSDP       one block ahead: f beside the gather of the next block's parameters, b beside another one and the reduction of the last
               block's gradients, those of experts too; nothing hides the first gathers and the last reductions
    stage      its blocks and the head of the vocabulary; or the host's launches, if these take longer
    pipeline   m (slowest stage + its transfers) + i z (all other stages + their transfers); with Megatron's virtual stages the first
               ones run beside the stage
    step       pipeline + exposed part of the gradients' reduction + optimizer + parameter gather of ZeRO-1 + fixed   (`step_parts`)

m microbatches of a step in i passes, p devices with v virtual stages each; z: how often a pass waits for the other stages (`bubbles`).
Kernels and collectives beside each other are `cost.beside`. An effect that `RunConstants.without` names counts nothing, for ablations.
"""

import numpy as np

from autoshard.cost import Ring, beside

from .block_time import Block, Parts, RunConstants
from .blocks_of_stages import Stages
from .runs import V_SHAPED, ZERO_BUBBLE, TrainingRuns

NOTHING = np.zeros(1)  # seconds
COMPILED_HOST = 0.6  # launches of a compiled block relative to an eager one
TENSOR_HOST = 0.08  # more launches per doubling of the tensor parallel degree
OPTIMIZER_BYTES = 30.0  # read and written per parameter: AdamW, float32 moments, master copy and gradient, 16-bit parameter
OPTIMIZER_BYTES16 = 14.0  # ... where all have 16 bits, and there is no copy


def step_parts(
    runs: TrainingRuns, constants: RunConstants, split: Stages, one: Block, ends: Block, more: np.ndarray = NOTHING,
    sent: np.ndarray = NOTHING, reduced: np.ndarray = NOTHING, last: np.ndarray | None = None,
) -> Parts:  # fmt: skip
    """The seconds by kind: matmul, attention, elementwise; what collectives of tensor, context and data parallelism add to them; host (its
    launches, where kernels wait for them), bubble (of a pipeline, with stages that differ), transfers, optimizer and other. split:
    `stages(runs, ...)`, which depends on no constant but `balanced`. one, ends: as `block` has them. more: seconds of a block besides, of
    which only what waits for them is counted here. sent: such seconds beside kernels; the host's launches may take longer than both.
    reduced: further seconds, of a step, that the last backward may hide. last: of FSDP, the seconds of a block that may."""
    (forward, backward), has = one.seconds, constants.has
    hidden, edges, last = _with_fsdp(one, runs, constants, last)
    summed = accumulation_seconds(runs.table_parameters / runs.tensor, runs, constants)
    head = {kind: (ends.forward[kind] + ends.backward[kind]) * has("head") * runs.predictions for kind in ends.forward}
    head["elementwise"] = head["elementwise"] + summed * has("head")
    host, head_seconds = host_seconds(runs, constants, one), sum(head.values())

    def stage(blocks: np.ndarray, heads: np.ndarray | float) -> np.ndarray:
        return np.maximum(blocks * (hidden + sent) + heads * head_seconds, blocks * host) + blocks * more

    p, m = runs.pipeline, runs.microbatches
    mean, blocks = stage(runs.layers / p, 1 / p), runs.layers / p
    slowest = np.where(p == 1, mean, np.maximum(stage(split.largest, 0.0), stage(split.last, 1.0)))
    slowest = mean + (slowest - mean) * has("imbalance")
    transfer = transfer_seconds(runs, constants) * has("transfers")
    # sent beside the work of another stage by Megatron since it has flash attention (overlap_p2p_comm)
    interleaved = (runs.virtual > 1) & (constants.stack.fused_accumulation > 0) & (constants.stack.flash > 0)
    waited = np.where(interleaved, beside(slowest, transfer) - slowest, transfer)
    # beside the host's launches where they take longer: what hides a reduction is the time of the backward, not its kernels; and not
    # what waits for experts' tokens
    last = np.where(runs.zero >= 2, blocks * last, (slowest - blocks * more) * backward / (forward + backward))
    late, optimizer = update_seconds(runs, constants, split, last, reduced)
    parts = {kind: m * (blocks * (one.forward[kind] + one.backward[kind]) + head[kind] / p) for kind in one.forward}
    return {
        **parts,
        "data parallel": m * (blocks * np.maximum(hidden - forward - backward, 0.0) + edges * (p == 1)) + late,
        "host": m * np.maximum(blocks * host - (blocks * (hidden + sent) + head_seconds / p), 0.0),
        "bubble": m * (slowest - mean) + has("bubble") * bubbles(runs, one) * (p * mean - slowest + (p - 1) * transfer),
        "transfers": m * waited,
        "optimizer": optimizer,
        "other": constants.stack.fixed * has("fixed") * np.ones(len(runs)),
    }


def bubbles(runs: TrainingRuns, one: Block) -> np.ndarray:
    """How often a step waits for the work of another stage, which is F + B = 1 with its backward B of inputs and, apart or not, weights W.

    n microbatches of a pass     (p - 1) z = max(p - n, 0) (1 - W) + (min(n, p) - 1) / v (1 - 2 W)        W = 0 where it is not apart
    folded schedules             (p - 1) z = max((p - n) F + (p - 1) (B - W), (p - 1) (1 - 2 W) / 2),    by DualPipeV (F + 2 B - 3 W) / 2

    The first is exact but where W is apart and n < p: up to 13 % too long; the others are within 4 % of torch's lists of units.
    """
    forward, backward = one.seconds
    n, p, others = runs.microbatches_of_pass, runs.pipeline, np.maximum(runs.pipeline - 1, 1)
    f, w = forward / (forward + backward), np.where(runs.among("schedule", ZERO_BUBBLE), one.forward["matmul"] / (forward + backward), 0.0)
    left = np.maximum(1 - 2 * w, 0.0)
    in_turn = (np.maximum(p - n, 0) * (1 - w) + (np.minimum(n, p) - 1) / runs.virtual * left) / others
    folded = np.maximum((p - n) * f / others + 1 - f - w, np.where(runs.schedule == "DualPipeV", 2 - f - 3 * w, left) / 2)
    return runs.passes * np.where(runs.among("schedule", V_SHAPED), folded, in_turn)


def optimizer_bytes(runs: TrainingRuns) -> np.ndarray:
    """Per parameter that a device owns."""
    return np.where(runs.states16 > 0, OPTIMIZER_BYTES16, OPTIMIZER_BYTES)


def accumulation_seconds(parameters: np.ndarray, runs: TrainingRuns, constants: RunConstants) -> np.ndarray:
    """Adding a microbatch's 16-bit gradients to those of the microbatches before, where full gradients are kept and no matmul adds them."""
    separate = (runs.zero < 2) & (runs.microbatches > 1) & (constants.stack.fused_accumulation == 0)
    bytes = (2 + 2 * constants.stack.gradient_bytes) * parameters * separate
    return bytes / constants.memory_rate * constants.has("accumulation")


def beside_block(
    one: Block, runs: TrainingRuns, constants: RunConstants, gather: np.ndarray, back: np.ndarray, always: np.ndarray = NOTHING
) -> np.ndarray:  # fmt: skip
    """Seconds of both ways of a block whose forward runs beside the transfers `gather` of FSDP, whose backward beside `back`, and both
    beside `always`: all hide behind it at once, for what one of them has hidden behind hides no other."""
    summed = accumulation_seconds(runs.block_parameters / runs.tensor, runs, constants)

    def hidden(way: Parts, sent: np.ndarray, more: np.ndarray = NOTHING) -> np.ndarray:
        seconds = sum(way.values()) + more
        waits = way["tensor parallel"] / seconds  # the share of the time in which no kernel runs that transfers could slow
        return beside(seconds, sent, 1 - waits)

    def seconds(there: np.ndarray, again: np.ndarray) -> np.ndarray:
        return np.array(np.broadcast_arrays(hidden(one.forward, there), hidden(one.backward, again, summed)))

    # with a pipeline, parameters that stay gathered are gathered once per pass, and gradients are reduced after its last microbatch
    once, every = np.where((runs.pipeline > 1) & (runs.zero < 3), runs.passes / runs.microbatches, 1.0), seconds(always, always)
    return every + (seconds(gather + always, back + always) - every) * once


def transfers_of_fsdp(runs: TrainingRuns, constants: RunConstants, ring: Ring, parameters: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of the gather of a block's `parameters` in the forward; and in the backward of another one, unless only gradients are
    sharded, and the reduction of its gradients."""
    sharded, (gathers, reductions) = (runs.zero >= 2) * constants.has("fsdp"), constants.messages
    gather = sharded * (ring.gather(np.where(runs.gather8 > 0, 1, 2) * parameters) + (gathers - 1) * ring.gather(NOTHING))
    scatter = sharded * (ring.gather(constants.stack.gradient_bytes * parameters) + (reductions - 1) * ring.gather(NOTHING))
    return gather, gather * (runs.zero >= 3) + scatter


def _with_fsdp(
    one: Block, runs: TrainingRuns, constants: RunConstants, last: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:  # fmt: skip
    """Seconds of a block beside the transfers of its parameters and gradients; those that nothing hides; and `last` of `step_parts`."""
    ring, table = constants.ring(runs, runs.sharing, runs.tensor), runs.table_parameters / runs.tensor
    gather, back = transfers_of_fsdp(runs, constants, ring, runs.block_parameters / runs.tensor)
    of_tables = ring.gather(2 * table) + ring.gather(constants.stack.gradient_bytes * table)
    edges = back + gather * (runs.zero < 3) + (runs.zero >= 2) * constants.has("fsdp") * of_tables
    ways = beside_block(one, runs, constants, gather, back)
    return sum(ways), edges, left_of_backward(one, ways[1], back, ring.nodes) if last is None else last


def left_of_backward(one: Block, seconds: np.ndarray, back: np.ndarray, nodes: np.ndarray) -> np.ndarray:
    """Seconds of a block's backward, which takes `seconds` beside FSDP's transfers `back`, that are left for others between nodes."""
    return np.where(nodes > 1, np.maximum(one.seconds[1] - back, 0.0), seconds)


def host_seconds(runs: TrainingRuns, constants: RunConstants, one: Block) -> np.ndarray:
    """The host's launches of one block and microbatch."""
    compiled = np.where(runs.compiled > 0, COMPILED_HOST, 1.0)
    per_block = constants.device.host * constants.stack.host * compiled * one.launches * (1 + TENSOR_HOST * np.log2(runs.tensor))
    return per_block * constants.has("host")


def transfer_seconds(runs: TrainingRuns, constants: RunConstants) -> np.ndarray:
    """Between pipeline stages, forward and backward of one microbatch; 0 with one stage."""
    bytes = 2 * runs.tokens * runs.width / runs.tensor
    device = constants.device
    inside = runs.tensor * runs.context * runs.data < runs.per_node
    bandwidth = np.where(inside, device.link_bandwidth * device.link, runs.network * device.network)
    return (runs.pipeline > 1) * runs.virtual * (2 * bytes / bandwidth + constants.stack.transfer)


def stage_parameters(runs: TrainingRuns, split: Stages) -> np.ndarray:
    """Parameters of the largest stage on one device, sharded over the tensor parallel group only."""
    first = split.first * runs.block_parameters + runs.table_parameters
    last = split.last * runs.block_parameters + runs.table_parameters
    both = runs.layers * runs.block_parameters + (2 - runs.tied) * runs.table_parameters
    largest = np.maximum(np.maximum(first, last), split.largest * runs.block_parameters)
    return np.where(runs.pipeline > 1, largest, both) / runs.tensor


def end_share(runs: TrainingRuns, parameters: np.ndarray) -> np.ndarray:
    """The share of a stage's parameters whose gradients come last, and that the forward needs first: nothing hides their transfer."""
    return np.minimum((runs.table_parameters + runs.block_parameters) / runs.tensor / parameters, 1.0)


def gradient_seconds(
    parameters: np.ndarray, end: np.ndarray, runs: TrainingRuns, constants: RunConstants, sharing: np.ndarray, replicas: np.ndarray,
    stride: np.ndarray, gathers: np.ndarray | float = 2.0,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """Seconds of the reduction of gradients and of the gather of ZeRO-1: those that nothing hides, and those that a backward may hide.
    end: the share of the parameters that nothing hides. stride: of the ranks that share them. gathers: bytes per parameter."""
    stack, has = constants.stack, constants.has("gradients")
    shards, copies = constants.ring(runs, sharing, stride), constants.ring(runs, replicas, stride * sharing)
    bytes = stack.gradient_bytes * parameters  # from ZeRO-2 on they are scattered block by block
    reduced = (runs.zero == 1) * shards.gather(bytes) + (replicas > 1) * copies.all_reduce(bytes / sharing)
    can_hide = (1 - end) * (stack.hides > 0)
    gathered = (runs.zero == 1) * shards.gather(gathers * parameters) * constants.has("parameter gather")
    gathered = gathered * np.where(stack.hides_gather > 0, end, 1.0)
    return (1 - can_hide) * reduced * has + gathered, can_hide * reduced * has


def update_seconds(
    runs: TrainingRuns, constants: RunConstants, split: Stages, last_backward: np.ndarray, reduced: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """The exposed reduction of gradients and the gather of ZeRO-1; and the optimizer on the parameters that a device owns. reduced: as of
    `step_parts`."""
    parameters = stage_parameters(runs, split)
    sharing = np.where(runs.zero >= 1, runs.sharing, 1.0)
    optimizer = optimizer_bytes(runs) * parameters / sharing / constants.memory_rate
    replicas = np.maximum(runs.data * runs.context / sharing, 1.0)
    of_blocks = runs.layers * runs.block_parameters / runs.tensor / runs.pipeline
    gathers = 2 - np.where(runs.gather8 > 0, of_blocks / parameters, 0.0)
    end = end_share(runs, parameters)
    exposed, hidden = gradient_seconds(parameters, end, runs, constants, sharing, replicas, runs.tensor, gathers)
    late = beside(last_backward, hidden + reduced) - last_backward
    return exposed + late, optimizer * constants.has("optimizer")
