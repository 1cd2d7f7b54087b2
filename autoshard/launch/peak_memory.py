"""Bytes per device of each run, from the program of its blocks and what its launcher keeps: by kind, stage and moment.

    allocated = max over stages and moments of
        parameters, gradients, optimizer    of the stage, sharded as ZeRO says                               (`state_bytes`)
        gathered        FSDP's whole parameters at hand, and whole gradients on their way to be reduced      (`_gathered`)
        activations     in flight * blocks * what a block keeps for its backward                             (block_memory.py)
        temporaries     what recomputation and the backward of one block hold besides
        logits          of the last stage: those of the loss and their gradients
        transfers       buffers of a pipeline's stage: what it sends and waits for
    reserved  = allocated and what the caching allocator holds besides
    device's  = reserved, and contexts of CUDA, NCCL and cuBLAS

In flight are p - s microbatches on stage s of p with 1F1B, all with GPipe, p on each device with V-shaped schedules; with v stages per
device (p - 1) / v more (Narayanan et al. 2021). No factor is fitted: what a stack keeps is described, with its source, in
cost/devices/stacks.json, and the chance to fit is computed from how far off that was on published runs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import reduce
from typing import NamedTuple

import numpy as np

from autoshard.cost import memory_errors

from .allocations import excess
from .block_memory import input_bytes, kept_bytes, largest_live, result_bytes
from .block_time import KEEPS, PART, Names, RunConstants, of_each_kind, of_modules, rows_of_kinds
from .blocks_of_stages import Stages, stages
from .captured_block import Sizes, tasks_of
from .runs import V_SHAPED, TrainingRuns

USABLE = 0.92  # of a device's memory: an answer that needs more is never given without saying so
PASSING = ("activations", "temporaries", "logits")  # kinds that come and go within a step
MOMENTS = ("loss", "backward", "update")
COMPILED_LOSS = 4.0  # bytes per logit: 16 bits, and their gradient
PARALLEL_LOSS = 4.0  # ... more: exponentials that torch's loss of a sharded vocabulary computes again
SCORES = 5.0  # bytes per score of unfused attention that are kept: the softmax and the mask and result of its dropout
CONTEXT = 7.3e8  # of one process without NCCL: CUDA's and cuBLAS's, measured on an H200 (docs/gpu.md)
Kinds = dict[str, np.ndarray]  # bytes by kind


class Peak(NamedTuple):
    """Of one stage at one moment; an entry per run."""

    stage: str  # first, inner, last
    moment: str  # one of MOMENTS
    kinds: Kinds
    exists: np.ndarray  # whether a run has such a stage

    def bytes(self, kinds: Iterable[str] | None = None) -> np.ndarray:
        return np.where(self.exists, sum(self.kinds[kind] for kind in kinds or self.kinds), 0.0)


@dataclass(frozen=True)
class Memory:
    """What runs need of a device: at every stage and moment that can be the fullest."""

    peaks: tuple[Peak, ...]
    pools: np.ndarray  # bytes that the allocator holds besides: for other streams, and freed ones that nothing fits into
    fragments: np.ndarray  # ... and relative to what comes and goes within a step
    context: np.ndarray  # bytes
    bias: float = 1.0  # measured / predicted of the user's own runs

    @property
    def allocated(self) -> np.ndarray:
        return self.bias * reduce(np.maximum, (peak.bytes() for peak in self.peaks))

    @property
    def reserved(self) -> np.ndarray:
        """States are allocated once; what comes and goes beside them leaves gaps."""
        peaks = (peak.bytes() + self.fragments * peak.bytes(PASSING) for peak in self.peaks)
        return self.bias * (reduce(np.maximum, peaks) + self.pools)

    @property
    def device(self) -> np.ndarray:
        """With contexts: what nvidia-smi shows."""
        return self.reserved + self.context

    def fullest(self) -> Peak:
        """Where and when the first run needs most."""
        return max(self.peaks, key=lambda peak: float(peak.bytes()[0]))

    def with_more(self, kinds: Kinds) -> Memory:
        """With more bytes of some kinds on every stage, at every moment; of what comes and goes within a step none at the update."""

        def added(peak: Peak) -> Peak:
            more = {kind: bytes for kind, bytes in kinds.items() if peak.moment != "update" or kind not in PASSING}
            return peak._replace(kinds=peak.kinds | {kind: peak.kinds[kind] + bytes for kind, bytes in more.items()})

        return replace(self, peaks=tuple(map(added, self.peaks)))


def chance_to_fit(bytes: np.ndarray, limit: np.ndarray | float, stacks: Names) -> np.ndarray:
    """The probability that runs with predicted `bytes` need no more than `limit`, by the errors of kept runs of their stacks."""
    return chance_within(bytes, limit, *memory_errors(stacks))


def chance_within(bytes: np.ndarray, limit: np.ndarray | float, levels: np.ndarray, quantiles: np.ndarray) -> np.ndarray:
    """levels, quantiles [runs or 1, levels]: of log(measured / predicted). Beyond the outermost, errors as far again have no chance."""
    room = np.log(np.maximum(limit, 1.0) / np.maximum(bytes, 1.0))
    width = quantiles[:, -1:] - quantiles[:, :1] + 1e-6
    known = np.concatenate([quantiles[:, :1] - width, quantiles, quantiles[:, -1:] + width], axis=1)
    known, at = known + 1e-9 * np.arange(known.shape[1]), np.array([0.0, *levels, 1.0])
    above = np.clip((room[:, None] >= known).sum(axis=1), 1, known.shape[1] - 1)
    rows = np.arange(len(known))
    low, high = known[rows, above - 1], known[rows, above]
    return np.clip(at[above - 1] + (at[above] - at[above - 1]) * (room - low) / (high - low), 0.0, 1.0)


def memory_of(runs: TrainingRuns, constants: RunConstants, split: Stages | None = None) -> Memory:
    """Of every run. split: as in `step_parts`."""
    split = stages(runs, constants.stack.balanced > 0) if split is None else split
    alone, fused = runs.devices == 1, constants.stack.fused_accumulation > 0
    # where FSDP is not needed its launchers keep float32 parameters as well, and cast them (autocast)
    casts = alone & ~fused & (constants.stack.balanced == 0) & (constants.memory.pure == 0) & (runs.states16 == 0)
    runs = runs.with_columns(zero=np.where(casts, 3, runs.zero))
    p, one, none = runs.pipeline, runs.pipeline == 1, np.zeros(len(runs))
    kept, working = of_each_kind(activation_bytes, runs, constants, [p > 1])
    logits, table = logits_bytes(runs, constants), runs.table_parameters
    shard = 2 * runs.tokens * runs.width / np.where(runs.sequence_parallel > 0, runs.tensor, 1.0)  # of what goes from block to block
    ends = 2 * runs.tokens * runs.width + shard  # kept of the last norm and the head
    first = table + runs.positions * runs.seq * runs.width
    both = (1 - runs.tied) * table + first
    folded = runs.among("schedule", V_SHAPED) & ~one  # the first device has the last stage, too
    # Transformer Engine returns one unused gradient per shape of a weight whose gradient is added up by the matmul (get_dummy_wgrad)
    unused = 2 * runs.block_parameters / runs.tensor * constants.stack.fused_accumulation
    # autograd's gradients, which are none before the first backward; on one device nothing is reduced, so they need no buffers either
    appear = ((runs.zero >= 2) | (alone & ~fused) | ("buffers" in constants.without)) & (runs.microbatches == 1)
    places = (
        ("first", np.ones(len(runs), bool), 0, split.first, np.where(one | folded, both, first), one | folded),
        ("inner", p > 2, 1, split.largest, none, none > 0),
        ("last", p > 1, p - 1, split.last, np.where(folded, 0.0, table), ~folded),
    )
    peaks = []
    for stage, exists, place, blocks, tables, head in places:
        of_blocks = blocks * runs.block_parameters / runs.tensor
        parameters = of_blocks + tables / runs.tensor
        held = in_flight(runs, place)
        activations = held * blocks * kept
        # what is sent waits for its backward; torch's stages receive into a buffer per microbatch (_prepare_forward_infra), others into two
        buffers = shard * np.where(one, 0.0, held + np.where(constants.stack.torchs > 0, runs.microbatches, 2.0))
        states = state_bytes(runs, parameters, of_blocks, constants)
        # gradients of the tables come first, and the first block's when of the activations nothing but its own is left
        each = states["gradients"] / np.maximum(parameters, 1.0) / runs.tensor
        # when a block needs most, its own are to come; where they are sharded, whole ones on their way take as much
        come, most = each * tables, states["gradients"] - np.where(runs.zero >= 2, 0.0, each * runs.block_parameters)
        late = appear & (most - come > activations - held * kept)
        come, left = np.where(late, most, come), np.where(late, held * kept, activations)
        for moment in MOMENTS:
            kinds = dict(states)
            if moment != "update":
                kinds["gradients"] = np.where(appear, none if moment == "loss" else come, states["gradients"])
            kinds["gathered"] = _gathered(runs, constants, tables / runs.tensor, moment, blocks)
            kinds["activations"] = {"loss": activations + np.where(head, ends, 0.0), "backward": left, "update": none}[moment]
            kinds["transfers"] = buffers
            kinds["temporaries"] = unused + (working if moment == "backward" else 0.0)
            kinds["logits"] = np.where(head, logits, 0.0) if moment == "loss" else none
            peaks.append(Peak(stage, moment, kinds, exists))
    fragments = np.where((runs.zero >= 3) & one, 0.0, constants.memory.fragments)  # FSDP's are counted one by one: `_pools`
    context = np.where(alone, CONTEXT, constants.memory.context)
    memory = Memory(tuple(peaks), _pools(runs, constants, both), np.where(alone, 0.0, fragments), context)
    if not alone.any():
        return memory
    some, facts = np.flatnonzero(alone), (_grouped(runs, constants), _compiled_loss(runs, constants), runs.loss_chunks)
    memory.pools[some] = memory.allocated[some] * excess(runs[some], *(np.broadcast_to(one, len(runs))[some] for one in facts))
    return memory


def in_flight(runs: TrainingRuns, stage: np.ndarray | int) -> np.ndarray:
    """How many microbatches' activations of all its blocks a stage (from 0) holds at once."""
    m, p, v = runs.microbatches, runs.pipeline, runs.virtual
    held = np.where(runs.among("schedule", V_SHAPED), p, p - stage + np.where(v > 1, (p - 1) / v, 0.0))
    return np.minimum(m, np.where(runs.among("schedule", ("GPipe", "LoopedBFS")), m, held))


def state_bytes(runs: TrainingRuns, parameters: np.ndarray, of_blocks: np.ndarray, constants: RunConstants) -> Kinds:
    """Of `parameters` of one device, `of_blocks` of them of blocks: 16 bits with a float32 copy, and Adam's two moments; FSDP has float32
    shards. With a pipeline its gradients are reduced after the last microbatch, and whole until then. Where blocks multiply in 8 or 4 bits
    Transformer Engine keeps their weights so, too, and transposed; or in place of those in 16 bits, which then are not gathered either."""
    fully, sharing, pure = runs.zero >= 3, runs.sharing, (constants.memory.pure > 0) | (runs.states16 > 0)
    reduced = (runs.zero >= 2) & (runs.pipeline == 1)
    each = np.where(fully & reduced, 4.0, constants.memory.gradients)
    on_device = 1 - 1.0 * runs.offload
    narrow = np.where((runs.itemsize < 2) & (runs.gather8 == 0) & ~fully, constants.memory.copies8 * runs.itemsize, 0.0)
    return {
        "parameters": parameters * np.where(fully, np.where(pure, 2.0, 4.0) / sharing, 2.0) + narrow * of_blocks,
        "gradients": parameters * np.where(pure, 2.0, each) / np.where(reduced, sharing, 1.0),
        "optimizer": parameters * on_device * np.where(pure, 4.0, np.where(fully, 8.0, 12.0)) / np.where(runs.zero >= 1, sharing, 1.0),
    }


def _gathered(runs: TrainingRuns, constants: RunConstants, tables: np.ndarray, moment: str, blocks: np.ndarray) -> np.ndarray:
    """FSDP's, in 16 bits: the parameters of a block and of the next, and the tables at the loss; in the backward the gradients of a block,
    and the buffer in which those of the last one are reduced. Without resharding (ZeRO-2) `state_bytes` counts all parameters.
    On one device autocast's copies of weights: of the head's until its backward, and of all blocks'; of a block that is computed again
    beside its gradients only."""
    if moment == "update" or "gathered" in constants.without:
        return np.zeros(len(runs))
    block = runs.block_parameters / runs.tensor
    of_blocks = np.where(runs.among("recompute", KEEPS), 2 * block * (moment == "backward"), blocks * block)
    alone = np.where(runs.zero >= 3, 2 * (of_blocks + runs.table_parameters * (moment == "loss")), 0.0)
    at_hand = np.where(runs.zero >= 3, 2 * (np.minimum(blocks, 2) * block + (tables if moment == "loss" else 0.0)), 0.0)
    on_their_way = 2 * block + constants.stack.gradient_bytes * np.maximum(block, tables) if moment == "backward" else 0.0
    return np.where(runs.devices == 1, alone, at_hand + np.where((runs.zero >= 2) & (runs.pipeline == 1), on_their_way, 0.0))


def _pools(runs: TrainingRuns, constants: RunConstants, tables: np.ndarray) -> np.ndarray:
    """FSDP reduces gradients of a block and of the tables in buffers of a stream of its own, and what a stream has freed serves no other
    one; 16-bit logits are freed where no tensor of the loss fits into their place, which `fragments` cover where there is a pipeline."""
    reduced = constants.stack.gradient_bytes * (runs.block_parameters + tables) / runs.tensor
    freed = np.where(_compiled_loss(runs, constants), 0.0, 2.0) * runs.tokens * runs.vocab / runs.tensor / runs.loss_chunks
    return np.where(runs.zero >= 2, reduced, 0.0) + np.where((runs.zero >= 3) & (runs.pipeline == 1), freed, 0.0)


def activation_bytes(runs: TrainingRuns, constants: RunConstants) -> tuple[np.ndarray, np.ndarray]:
    """What a block keeps of one microbatch for its backward; and what one block holds besides while it is computed again and backward."""
    kept, working = np.zeros(len(runs)), np.zeros(len(runs))
    for kind, rows in rows_of_kinds(runs, _grouped(runs, constants)):
        kept[rows], working[rows] = _of_one_kind(runs[rows], constants.at(rows), *kind)
    return kept, working


def _grouped(runs: TrainingRuns, constants: RunConstants) -> np.ndarray:
    """How ops are grouped in kernels. Megatron fuses chains of ops and keeps what autograd asks for: it has no partitioner."""
    partitioned = (runs.compiled > 0) & (constants.stack.fused_accumulation == 0)
    return np.where(partitioned, "compiled", np.where(constants.stack.libraries > 1, "library", ""))


def _of_one_kind(
    runs: TrainingRuns, constants: RunConstants, family: str, scheme: str, how: str, recompute: str
) -> tuple[np.ndarray, np.ndarray]:
    tasks, sizes = tasks_of(family, scheme, how), Sizes(runs)
    forward, stack = tasks["forward block"], constants.stack
    regathers = np.where(constants.memory.gathered > 0, runs.pipeline > 1, np.maximum(stack.regathers, stack.fused_accumulation))
    scores = 0.0 if "attn" in recompute else SCORES * runs.tokens * runs.seq * runs.heads / runs.tensor
    in8 = np.where(stack.fused_accumulation > 0, np.minimum(runs.itemsize / 2, 1.0), 1.0)  # Transformer Engine keeps what it has cast
    modules = of_modules(forward, recompute)
    less = [replace(task, kept=task.kept and (i not in modules or task.kind == "attention")) for i, task in enumerate(forward)]
    everything, some = (kept_bytes(tasks, sizes, how, regathers, in8) + np.where(stack.flash > 0, 0.0, scores) for tasks in (forward, less))
    backward = largest_live(tasks["backward block"], sizes, how)
    if recompute not in KEEPS:
        return some, everything - some + backward
    keeps, part = KEEPS[recompute](forward), PART.get(recompute, runs.again if recompute == "full" else 1.0)
    some = input_bytes(forward, sizes)
    for i, task in enumerate(forward):
        if keeps(i, task):
            in_pieces = any(i in other.after for other in forward if other.collective == "reduce_scatter")  # the matmul's, if asynchronous
            some = some + result_bytes(task, sizes) * np.where((runs.async_tensor > 0) & in_pieces, 0.0, 1.0)
    some = np.minimum(some, everything)
    if recompute == "full" and how == "compiled":  # one graph with all that runs again
        return some, largest_live(tasks_of(family, scheme, "recomputed")["backward block"], sizes, "recomputed")
    return part * some + (1 - part) * everything, everything - some + backward


def logits_bytes(runs: TrainingRuns, constants: RunConstants) -> np.ndarray:
    """Of the loss and its gradient, at their most; `chunks` of the tokens one after the other where a run has them. Where the vocabulary
    weighs more than the tokens, of the gradient of 16-bit logits beside that of the head, unless its matmul adds to a buffer."""
    eager = constants.memory.logits + np.where((runs.tensor > 1) & (constants.stack.torchs > 0), PARALLEL_LOSS, 0.0)
    each = np.where(_compiled_loss(runs, constants), COMPILED_LOSS, eager)
    logits = runs.tokens * runs.vocab / runs.tensor / runs.loss_chunks
    head = np.where(constants.stack.fused_accumulation > 0, 0.0, 2 * runs.table_parameters / runs.tensor)
    # FSDP has its matrix at hand all the time (`_gathered`); what gathers it when it is needed holds it here, too
    copies = 1 + (runs.zero >= 3) * ("gathered" in constants.without)
    return np.maximum(each * logits, 2 * logits + copies * head)


def _compiled_loss(runs: TrainingRuns, constants: RunConstants) -> np.ndarray:
    return (runs.compiled_loss > 0) & (constants.stack.fused_accumulation == 0)
