"""Seconds of a training step of each run, from its kernels and collectives: blocks, microbatches, pipeline, update.

    block      forward f = matmuls + attention + elementwise + tensor parallel collectives; backward b likewise, and what it computes again
    FSDP       f beside the gather of the block's parameters, b beside another one and the reduction of its gradients, in a 3-norm
    stage      its blocks and the head of the vocabulary; beside the host's launches, in a 3-norm
    pipeline   m (slowest stage + its transfers) + 1 / v (all other stages + their transfers)
    step       pipeline + exposed part of the gradients' reduction + optimizer + parameter gather of ZeRO-1 + fixed   (`step_seconds`)

m microbatches, p stages, v virtual stages per device. Each of EFFECTS can be left out, for ablations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autoshard.cost import (
    ATTENTION_BACK,
    DeviceConstants,
    MemoryConstants,
    Ring,
    StackConstants,
    attention_seconds,
    device_constants,
    elementwise_seconds,
    kernel_columns,
    matmul_seconds,
    memory_constants,
    overlapped,
    stack_constants,
)
from autoshard.devices import NEWEST, OF_HOPPER, AttentionKernel, ExpertsKernel, MatmulKernel, in_program, slower

from .blocks_of_stages import Stages, stages
from .runs import TrainingRuns

Names = Sequence[str] | np.ndarray
EFFECTS = (
    "attention", "elementwise", "accumulation", "head", "tensor parallel", "context parallel", "recompute", "host",
    "bubble", "imbalance", "transfers", "fsdp", "gradients", "parameter gather", "optimizer", "fixed",
)  # fmt: skip

# The share of a block's forward that is computed again: matmuls, attention, elementwise, collectives.
RECOMPUTED = {
    "none": (0.0, 0.0, 0.0, 0.0),
    "full": (1.0, 1.0, 1.0, 1.0),
    "selective_op": (0.4, 0.0, 1.0, 0.0),  # torchtitan: every second matmul, attention and reduce_scatter are kept
    "default": (0.4, 0.0, 1.0, 0.0),  # torchtitan's default is selective_op
    "selective_frac": (0.5, 0.5, 0.5, 0.5),  # of some blocks; which share is not published
    "selective_layer": (0.5, 0.5, 0.5, 0.5),  # of every second block
    "attn": (0.0, 1.0, 0.0, 0.0),  # Korthikanti et al.: the attention core
}
FSDP_NORM, HOST_NORM, CONTEXT_NORM, GRADIENT_NORM = 3.0, 3.0, 3.0, 3.0
HIDDEN = 0.8  # share of data parallel transfers that run beside compute where the software overlaps them
MICROSCALED = 0.93  # rate of float8 matmuls with scales per block of 32, relative to one scale per tensor
ASYNC_TP = 0.5  # share of a tensor parallel transfer that its pieces leave exposed
COMPILED_HOST = 0.6  # launches of a compiled block relative to an eager one
TENSOR_HOST = 0.08  # more launches per doubling of the tensor parallel degree
OPTIMIZER_BYTES = 30.0  # read and written per parameter: AdamW, float32 moments, master copy and gradient, 16-bit parameter
SCORE_BYTES = 10.0  # per score of unfused attention, forward: scale and mask, softmax, dropout
FUSED_CAST = 4.0  # bytes per element: a 16-bit value is read, its 8-bit form and the transposed one are written
LOGIT_BYTES, FUSED_LOGIT_BYTES = 30.0, 20.0  # per logit, forward and backward in float32; fused as strategies.fusion does


@dataclass(frozen=True)
class RunConstants:
    """Constants of devices and their software as columns: one entry per run, or one for all. `without`: effects that count nothing."""

    device: DeviceConstants
    stack: StackConstants
    memory: MemoryConstants
    matmul: MatmulKernel  # of the blocks' dtypes
    matmul16: MatmulKernel
    attention: AttentionKernel
    experts: ExpertsKernel  # of the blocks' dtypes
    without: frozenset[str] = frozenset()

    @staticmethod
    def of(devices: Names, stacks: Names, precisions: Names, *, fitted: bool = True) -> RunConstants:
        """By the names of the runs' devices, stacks and precisions; fitted=False: published figures of devices and kernels alone."""
        device, stack = device_constants(devices, fitted=fitted), stack_constants(stacks, fitted=fitted)
        matmul = kernel_columns(MatmulKernel, devices, precisions)
        matmul = replace(matmul, cast=np.minimum(matmul.cast, FUSED_CAST), launch=np.minimum(matmul.launch, 3e-6))
        kernels = (matmul, *(kernel_columns(form, devices, "bf16") for form in (MatmulKernel, AttentionKernel)))
        kernels = (*kernels, kernel_columns(ExpertsKernel, devices, precisions))
        return RunConstants(device, stack, memory_constants(stacks, fitted=fitted), *kernels)

    def in_program(self, matmul: MatmulKernel) -> MatmulKernel:
        memory = self.device.memory_bandwidth * self.device.memory
        return in_program(matmul, np.minimum(matmul.bandwidth, memory), self.device.training)

    def has(self, effect: str) -> float:
        return 0.0 if effect in self.without else 1.0

    def ring(self, runs: TrainingRuns, size: np.ndarray, stride: np.ndarray) -> Ring:
        """Of `size` devices whose numbers are `stride` apart."""
        return Ring.over(size, stride, runs.per_node, runs.network, self.device, self.stack)


@dataclass(frozen=True)
class Block:
    """Seconds of one block and microbatch on one device, parameters at hand."""

    forward: np.ndarray
    backward: np.ndarray
    launches: np.ndarray  # relative to one forward and backward without recomputation


def step_seconds(runs: TrainingRuns, constants: RunConstants, split: Stages | None = None) -> np.ndarray:
    """Seconds of a step of every run. split: `stages(runs, ...)`, which depends on no constant but `balanced`."""
    split = stages(runs, constants.stack.balanced > 0) if split is None else split
    one = _with_fsdp(block(runs, constants), runs, constants)
    head = head_seconds(runs, constants)
    host = host_seconds(runs, constants, one)

    def stage(blocks: np.ndarray, heads: np.ndarray | float) -> np.ndarray:
        return overlapped(blocks * (one.forward + one.backward) + heads * head, blocks * host, HOST_NORM)

    p, m, has = runs.pipeline, runs.microbatches, constants.has
    one_stage = p == 1
    mean = stage(runs.layers / p, 1 / p)
    slowest = np.where(one_stage, mean, np.maximum(stage(split.largest, 0.0), stage(split.last, 1.0)))
    slowest = mean + (slowest - mean) * has("imbalance")
    transfer = transfer_seconds(runs, constants) * has("transfers")
    pipeline = m * (slowest + transfer) + has("bubble") / runs.virtual * (p * mean - slowest + (p - 1) * transfer)
    # beside the host's launches where they take longer: what hides a reduction is the time of the backward, not its kernels
    last_backward = slowest * one.backward / (one.forward + one.backward)
    return pipeline + update_seconds(runs, constants, split, last_backward) + constants.stack.fixed * has("fixed")


def matmul_shapes(runs: TrainingRuns) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """(m, k, n) of the forward matmuls of a block on one device: queries, keys and values; output; up and gate; down."""
    t, h, tp = runs.tokens, runs.width, runs.tensor
    keys = np.maximum(runs.kv_heads / tp, 1.0) * runs.head_dim  # a key head is replicated rather than divided
    queries, ffn = runs.queries / tp, runs.ffn / tp
    return [(t, h, queries + 2 * keys), (t, queries, h), (t, h, (1 + runs.gated) * ffn), (t, ffn, h)]


def block(runs: TrainingRuns, constants: RunConstants) -> Block:
    device, has = constants.device, constants.has
    scaled = np.where(runs.microscaling > 0, 1 / MICROSCALED, 1.0)
    shapes, of = matmul_shapes(runs), constants.in_program(constants.matmul)
    matmuls = scaled * sum(matmul_seconds(m, k, n, of) for m, k, n in shapes)
    matmuls_back = scaled * sum(matmul_seconds(m, n, k, of) + matmul_seconds(k, m, n, of) for m, k, n in shapes)
    forward, backward = _attention(runs, constants)
    moved = elementwise_bytes(runs, constants.stack.eager_norms)
    elementwise = elementwise_seconds(moved, device, constants.stack) * has("elementwise")
    summed = accumulation_seconds(runs.block_parameters / runs.tensor, runs, constants)
    sent, sent_back = _tensor_parallel(runs, constants)
    again = np.array([RECOMPUTED[kind] for kind in runs.recompute.tolist()]).reshape(-1, 4).T * has("recompute")
    repeated = again[0] * matmuls + again[1] * forward + again[2] * elementwise + again[3] * sent
    launches = 1 + again[:3].sum(0) / 9
    back = matmuls_back + backward + 2 * elementwise + summed + sent_back + repeated
    return Block(matmuls + forward + elementwise + sent, back, launches)


def _attention(runs: TrainingRuns, constants: RunConstants) -> tuple[np.ndarray, np.ndarray]:
    """Forward and backward of the attention core, beside the transfers of keys and values where the context is sharded."""
    device, stack, t, tp = constants.device, constants.stack, runs.tokens, runs.tensor
    scores = t * runs.seq * runs.heads / tp
    moved = 4 * t * (runs.queries + runs.keys) / tp
    newest = np.where(device.peak16 > OF_HOPPER, NEWEST / np.maximum(stack.flash, 1e-9), 1.0)
    of = slower(constants.attention, device.training * newest)
    fused = attention_seconds(scores / 2, runs.seq, 2 * runs.head_dim, moved, of)
    of16 = constants.in_program(constants.matmul16)
    products = 2 * matmul_seconds(runs.seq, runs.head_dim, runs.seq, of16, t / runs.seq * runs.heads / tp)
    written = products + elementwise_seconds(SCORE_BYTES * scores, device, stack)
    forward = np.where(stack.flash > 0, fused, written) * constants.has("attention")
    backward = np.where(stack.flash > 0, ATTENTION_BACK, 2.0) * forward
    ring = constants.ring(runs, runs.context, tp)
    keys_and_values = 4 * t * runs.context * np.maximum(runs.keys / tp, runs.head_dim)
    sent = ring.gather(keys_and_values) * constants.has("context parallel")
    return overlapped(forward, sent, CONTEXT_NORM), overlapped(backward, 2 * sent, CONTEXT_NORM)


def elementwise_bytes(runs: TrainingRuns, eager_norms: np.ndarray | float = 0.0) -> np.ndarray:
    """Read and written by the elementwise ops of a block's forward, on one device.

    In tensors of 2 bytes: two residual sums of 3 and two norms of 2, or of 16 to 18 as chains of float32 ops; rotary positions 3 or 10;
    a gated activation 6, a plain one 3. Compiled, as strategies.fusion groups a Llama's: a sum and a norm 4, rotary positions 2, the
    activations 3 and 2.
    """
    t, tp = runs.tokens, runs.tensor
    chains = (eager_norms > 0) & (runs.compiled == 0)
    fused = runs.compiled > 0
    residual = np.where(chains, 40, np.where(fused, 8, 10)) * runs.width / np.where(runs.sequence_parallel > 0, tp, 1.0)
    inner = np.where(fused, 2 + runs.gated, 3 + 3 * runs.gated) * runs.ffn / tp
    projected = np.where(chains, 10, np.where(fused, 2, 3)) * (runs.queries + 2 * runs.keys) / tp
    return 2 * t * (residual + inner + projected)


def accumulation_seconds(parameters: np.ndarray, runs: TrainingRuns, constants: RunConstants) -> np.ndarray:
    """Adding a microbatch's 16-bit gradients to those of the microbatches before, where full gradients are kept and no matmul adds them."""
    separate = (runs.zero < 2) & (runs.microbatches > 1) & (constants.stack.fused_accumulation == 0)
    bytes = (2 + 2 * constants.stack.gradient_bytes) * parameters * separate
    return bytes / (constants.device.memory_bandwidth * constants.device.memory) * constants.has("accumulation")


def _tensor_parallel(runs: TrainingRuns, constants: RunConstants) -> tuple[np.ndarray, np.ndarray]:
    """Forward and backward: with sequence parallelism 4 and 6 gathers or scatters of the residual, without it 2 and 2 all_reduces."""
    ring = constants.ring(runs, runs.tensor, np.ones(len(runs)))
    bytes = 2 * runs.tokens * runs.width
    exposed = np.where((runs.async_tensor > 0) | (constants.stack.overlaps_tensor > 0), ASYNC_TP, 1.0) * constants.has("tensor parallel")
    gather, reduce, sequence = ring.gather(bytes) * exposed, ring.all_reduce(bytes) * exposed, runs.sequence_parallel > 0
    return np.where(sequence, 4 * gather, 2 * reduce), np.where(sequence, 6 * gather, 2 * reduce)


def _with_fsdp(one: Block, runs: TrainingRuns, constants: RunConstants) -> Block:
    """The block with its parameters gathered (again in the backward, unless only gradients are sharded) and its gradients scattered."""
    ring = constants.ring(runs, runs.sharing, runs.tensor)
    sharded = (runs.zero >= 2) * constants.has("fsdp")
    parameters = runs.block_parameters / runs.tensor
    narrow = (constants.stack.gathers8 > 0) & (runs.itemsize() <= 1) & (runs.rowwise == 0)
    gather = sharded * ring.gather(np.where(narrow, 1, 2) * parameters)
    scatter = sharded * ring.gather(constants.stack.gradient_bytes * parameters)
    again = gather * (runs.zero >= 3)
    return Block(overlapped(one.forward, gather, FSDP_NORM), overlapped(one.backward, again + scatter, FSDP_NORM), one.launches)


def head_seconds(runs: TrainingRuns, constants: RunConstants) -> np.ndarray:
    """Forward and backward of the vocabulary's matmul (16 bits) and of the loss of its logits (float32), per microbatch."""
    device, t, v = constants.device, runs.tokens, runs.vocab / runs.tensor
    matmuls = 3 * matmul_seconds(t, runs.width, v, constants.in_program(constants.matmul16))
    loss = elementwise_seconds(np.where(runs.compiled > 0, FUSED_LOGIT_BYTES, LOGIT_BYTES) * t * v, device, constants.stack)
    summed = accumulation_seconds(runs.vocab / runs.tensor * runs.width, runs, constants)
    return (matmuls + loss) * constants.has("head") + summed


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


def update_seconds(runs: TrainingRuns, constants: RunConstants, split: Stages, last_backward: np.ndarray) -> np.ndarray:
    """Exposed reduction of gradients, optimizer on the parameters that a device owns, and the gather of ZeRO-1."""
    device, stack, has = constants.device, constants.stack, constants.has
    parameters = stage_parameters(runs, split)
    fully = runs.zero >= 3
    optimizer = OPTIMIZER_BYTES * parameters / np.where(runs.zero >= 1, runs.sharing, 1.0) / (device.memory_bandwidth * device.memory)
    replicas = np.where(fully, runs.data * runs.context / runs.sharing, runs.data * runs.context)
    stride = runs.tensor * np.where(fully, runs.sharing, 1.0)
    ring = constants.ring(runs, np.maximum(replicas, 1.0), stride)
    bytes = stack.gradient_bytes * parameters / np.where(fully, runs.sharing, 1.0)
    reduced = np.where((runs.zero == 1) | (runs.zero == 2), ring.gather(bytes), ring.all_reduce(bytes)) * (replicas > 1)
    can_hide = HIDDEN * (stack.hides > 0)
    beside = overlapped(can_hide * reduced, last_backward, GRADIENT_NORM) - last_backward
    exposed = ((1 - can_hide) * reduced + beside) * has("gradients")
    gathered = ((runs.zero == 1) | (runs.zero == 2)) * ring.gather(2 * parameters) * has("parameter gather")
    gathered = gathered * (1 - HIDDEN * (stack.hides_gather > 0))
    return exposed + gathered + optimizer * has("optimizer")
