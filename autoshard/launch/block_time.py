"""Seconds of one block and microbatch of each run, and of the ends of its model, by kind, from the kernels of captured graphs.

    kernels       as in a plan (captured_block.py), grouped as the run's software groups them; the host's launch where it takes longer
    collectives   of tensor parallelism: beside kernels where the graph lets them, else exposed
    again         what recomputation runs once more in front of the backward
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from autoshard.cost import (
    DeviceConstants,
    MemoryConstants,
    Ring,
    StackConstants,
    beside,
    device_constants,
    kernel_columns,
    matmul_seconds,
    memory_constants,
    stack_constants,
)
from autoshard.devices import LAUNCHES, NORMS, AttentionKernel, ExpertsKernel, MatmulKernel, in_program, slower

from .block_memory import tensor_bytes
from .captured_block import BlockTask, Sizes, again, end_of, is_launched, kernel_seconds, tasks_of
from .runs import TrainingRuns, distinct

Names = Sequence[str] | np.ndarray
Parts = dict[str, np.ndarray]  # seconds by kind
# columns of runs that a block's seconds depend on
OF_BLOCK = (
    "microbatch", "seq", "context", "alltoall", "tensor", "sequence_parallel", "async_tensor", "compiled", "recompute", "precision",
    "width", "ffn", "heads", "kv_heads", "head_dim", "vocab", "gated", "qk_norm", "per_node", "network",
    "computed_scores", "again",
)  # fmt: skip
RECORDS = ("device", "stack", "memory", "matmul", "matmul16", "attention", "experts")
GROUPED = np.array(["", "norms", "library"])  # how ops are grouped in kernels, uncompiled, by StackConstants.libraries
MICROSCALED = 0.93  # rate of float8 matmuls with scales per block of 32, relative to one scale per tensor
ASYNC_TP = 0.5  # share of a tensor parallel transfer that its pieces leave exposed
SCORE_BYTES = 9.0, 11.0  # per score of unfused attention, forward and backward: softmax with its mask and scale, dropout with its mask
LOSS_BYTES = 6.0, 4.0  # per logit, forward and backward (TransformerEngine): read twice, the gradient written over it; which is scaled
FUSED_CAST = 4.0  # bytes per element: a 16-bit value is read, its 8-bit form and the transposed one are written
ROWWISE = "fp8_rowwise"  # of which every matmul casts both matrices anew: what is added up are other rows
# of precisions that have none of their own: the dtype of their kernels, and the most bytes of a cast
KERNELS = {ROWWISE: ("fp8", np.inf), "fp8_blockwise": ("fp8_block", FUSED_CAST), "mxfp8": ("fp8", FUSED_CAST)}
Keeps = Callable[[int, BlockTask], bool]


def _nothing(tasks: tuple[BlockTask, ...]) -> Keeps:
    return lambda i, task: False


def _every_second(tasks: tuple[BlockTask, ...]) -> Keeps:
    """By torchtitan's selective recomputation of ops: every second matmul, attention, and what was scattered."""
    matmuls = [i for i, task in enumerate(tasks) if task.kind == "matmul"][::2]
    return lambda i, task: task.kind == "attention" or task.collective == "reduce_scatter" or i in matmuls


# Which results of a block's forward are kept where the rest is computed again.
KEEPS: dict[str, Callable[[tuple[BlockTask, ...]], Keeps]] = {
    **dict.fromkeys(("full", "selective_frac", "selective_layer"), _nothing),
    **dict.fromkeys(("selective_op", "default"), _every_second),
}
PART = {"selective_frac": 0.5, "selective_layer": 0.5}  # of the blocks: every second one, or a share that is not published
RECOMPUTED = ("none", "attn", *KEEPS)


def recomputed(tasks: tuple[BlockTask, ...], recompute: str) -> tuple[BlockTask, ...]:
    """What of a block's forward is computed again."""
    modules = of_modules(tasks, recompute)
    return again(tasks, KEEPS[recompute](tasks) if recompute in KEEPS else lambda i, task: i not in modules)


def of_modules(tasks: tuple[BlockTask, ...], recompute: str) -> set[int]:
    """The tasks of a block's forward that are computed again with the modules that are named (runs.MODULES)."""
    core = next(i for i, task in enumerate(tasks) if task.kind == "attention")
    read = {j for task in tasks if task.kind == "matmul" or task.collective == "all_gather" for j in task.after}
    names, chosen = recompute.split("+"), set()
    for i, task in enumerate(tasks):
        d, f, h = (any(letter in dim[1] for tensor in filter(None, task.outputs) for dim in tensor[0]) for letter in "dfh")
        plain = task.kind == "elementwise"
        of = {"attn": i == core, "layernorm": h and plain and i in read, "mla_up_proj": d and i < core, "mlp": f, "moe_act": f and plain}
        chosen |= {i for name in names if of.get(name)}
    return chosen


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
    messages: tuple[float, float] = (1.0, 1.0)  # in which a block's parameters are gathered, and its gradients reduced; FSDP joins them

    @staticmethod
    def of(devices: Names, stacks: Names, precisions: Names, *, fitted: bool = True) -> RunConstants:
        """By the names of the runs' devices, stacks and precisions; fitted=False: published figures of devices and kernels alone."""
        device, stack = device_constants(devices, fitted=fitted), stack_constants(stacks, fitted=fitted)
        known, of = np.unique(precisions, return_inverse=True)
        kinds, most = (np.array(column)[of] for column in zip(*(KERNELS.get(name, (name, FUSED_CAST)) for name in known.tolist())))
        matmul = kernel_columns(MatmulKernel, devices, kinds)
        matmul = replace(matmul, cast=np.minimum(matmul.cast, most), launch=np.minimum(matmul.launch, 3e-6), host=0, padding=0)
        kernels = (matmul, *(kernel_columns(form, devices, "bf16") for form in (MatmulKernel, AttentionKernel)))
        kernels = (*kernels, kernel_columns(ExpertsKernel, devices, kinds))
        return RunConstants(device, stack, memory_constants(stacks, fitted=fitted), *kernels)

    def in_program(self, matmul: MatmulKernel) -> MatmulKernel:
        return in_program(matmul, np.minimum(matmul.bandwidth, self.memory_rate), self.device.training)

    @property
    def memory_rate(self) -> np.ndarray:
        """Bytes/s that kernels reach."""
        return self.device.memory_bandwidth * self.device.memory

    def has(self, effect: str) -> float:
        return 0.0 if effect in self.without else 1.0

    def at(self, rows: np.ndarray) -> RunConstants:
        """Of some of the runs."""

        def of(record: Any) -> Any:
            entries = {name: value[rows] for name, value in vars(record).items() if isinstance(value, np.ndarray) and value.size > 1}
            return replace(record, **entries)

        return replace(self, **{name: of(getattr(self, name)) for name in RECORDS})

    def ring(self, runs: TrainingRuns, size: np.ndarray, stride: np.ndarray) -> Ring:
        """Of `size` devices whose numbers are `stride` apart."""
        return Ring.over(size, stride, runs.per_node, runs.network, self.device, self.stack)


@dataclass(frozen=True)
class Block:
    """Seconds of a block, or of the ends, and microbatch on one device, parameters at hand: by kind, which add up."""

    forward: Parts
    backward: Parts
    launches: np.ndarray  # relative to one forward and backward without recomputation

    @property
    def seconds(self) -> tuple[np.ndarray, np.ndarray]:
        """Of the forward and of the backward."""
        return sum(self.forward.values()), sum(self.backward.values())  # type: ignore[return-value]

    def __getitem__(self, rows: np.ndarray) -> Block:
        forward, backward = ({kind: seconds[rows] for kind, seconds in way.items()} for way in (self.forward, self.backward))
        return Block(forward, backward, self.launches[rows])


def of_each_kind(function: Callable[..., tuple], runs: TrainingRuns, constants: RunConstants, more: Sequence[np.ndarray] = ()) -> Any:
    """`function` of runs and constants, called with one run of each kind of block: launches of one model have few. more: columns beside
    OF_BLOCK that the results depend on."""
    if any(np.size(value) > 1 for name in RECORDS for value in vars(getattr(constants, name)).values()):
        return function(runs, constants)
    firsts, of = distinct([*(getattr(runs, name) for name in OF_BLOCK), *more])
    return tuple(one[of] for one in function(runs[firsts], constants))


def rows_of_kinds(runs: TrainingRuns, grouped: np.ndarray) -> list[tuple[list[str], np.ndarray]]:
    """Rows whose blocks have the same tasks (family and scheme), grouped and computed again in the same way, and these words."""
    scheme = np.where(runs.sequence_parallel > 0, "megatron_sp", "megatron")
    columns = runs.family, scheme, np.broadcast_to(grouped, len(runs)), runs.recompute
    firsts, of = distinct(columns)
    return [([column[first].item() for column in columns], np.flatnonzero(of == i)) for i, first in enumerate(firsts.tolist())]


def block(runs: TrainingRuns, constants: RunConstants) -> tuple[Block, Block]:
    """Of a block, and of the ends: token table, last norm, head and loss."""
    # Megatron fuses chains of ops alone; and of a block that is computed again in part nothing is left for a compiler to do so
    is_full = (runs.recompute == "full") & bool(constants.has("recompute"))
    chains = (constants.stack.fused_accumulation > 0) | runs.among("recompute", KEEPS) & ~is_full
    compiled = np.where(chains, "fused", np.where(is_full, "recomputed", "compiled"))
    grouped = np.where(runs.compiled > 0, compiled, GROUPED[constants.stack.libraries.astype(int)])
    kinds, rows_of = zip(*rows_of_kinds(runs, grouped))
    blocks = [
        _OneKind(runs[rows], constants.at(rows), how).blocks(family, scheme, recompute)
        for (family, scheme, how, recompute), rows in zip(kinds, rows_of)
    ]
    order = np.argsort(np.concatenate(rows_of))

    def joined(columns: Sequence[np.ndarray]) -> np.ndarray:
        return np.concatenate([np.broadcast_to(column, len(rows)) for column, rows in zip(columns, rows_of)])[order]

    def one(k: int) -> Block:
        of = [both[k] for both in blocks]
        ways = [b.forward for b in of], [b.backward for b in of]
        forward, backward = ({kind: joined([parts[kind] for parts in way]) for kind in way[0]} for way in ways)
        return Block(forward, backward, joined([b.launches for b in of]))

    return one(0), one(1)


def _is_of_logits(task: BlockTask) -> bool:
    """Whether an elementwise kernel reads or writes values of all tokens and words."""
    tensors = ({letter for dim in one[0] for letter in dim[1]} for one in (*task.inputs, *task.outputs) if one is not None)
    return task.kind == "elementwise" and any({"v", "s"} <= letters for letters in tensors)


class _OneKind:
    """Of runs whose blocks have the same tasks."""

    def __init__(self, runs: TrainingRuns, constants: RunConstants, how: str):
        self.runs, self.constants, self.how, self.sizes = runs, constants, how, Sizes(runs)
        self.ring, stack, device = constants.ring(runs, runs.tensor, np.ones(len(runs))), constants.stack, constants.device
        pieces = (runs.async_tensor > 0) | ((stack.overlaps_tensor > 0) & (runs.sequence_parallel > 0))
        pieces = pieces & (self.ring.nodes <= 1)  # matmuls of a block are shorter than what crosses the network
        self.exposed = np.where(pieces, ASYNC_TP, 1.0) * constants.has("tensor parallel")
        self.host = device.host * stack.host / LAUNCHES * constants.has("host")
        self.known: dict[tuple, np.ndarray] = {}
        torchs, flash = stack.sdpa > 0, np.maximum(device.flash2 / np.maximum(stack.flash, 1e-9), 1.0)
        attention = slower(constants.attention, device.training * np.where(torchs, device.sdpa, flash))
        attention = replace(attention, wide=np.where(torchs, device.flash2 / device.sdpa, 1.0))
        self.of_block, self.of_ends = (
            SimpleNamespace(
                kernels=SimpleNamespace(
                    matmul=constants.in_program(matmul), attention=attention, norms=NORMS * constants.matmul16.multiprocessors,
                ),
                memory_rate=constants.memory_rate / stack.traffic, flops_for=lambda itemsize, convolution: device.peak16,
            )
            for matmul in (constants.matmul, constants.matmul16)
        )  # fmt: skip

    def blocks(self, family: str, scheme: str, recompute: str) -> tuple[Block, Block]:
        runs, constants, share = self.runs, self.constants, PART.get(recompute, self.runs.again if recompute == "full" else 1.0)
        tasks, is_inside = tasks_of(family, scheme, self.how), self.how == "recomputed"  # whether the backward holds what runs again
        forward, backward = tasks["forward block"], tasks["backward block"]
        repeated = () if is_inside or not constants.has("recompute") else recomputed(forward, recompute)
        gathers = 2 * (runs.sequence_parallel > 0) * (runs.tensor > 1) * constants.stack.regathers  # of the inputs of matmuls
        back, once_more = self._parts(backward, self.of_block), self._parts(repeated, self.of_block)
        back = {kind: seconds + share * once_more[kind] for kind, seconds in back.items()}
        back["tensor parallel"] = back["tensor parallel"] + gathers * self.exposed * self.ring.gather(2 * runs.tokens * runs.width)
        counts = [sum(is_launched(task, self.how) for task in part) for part in (forward, backward, repeated)]
        alone = tasks_of(family, scheme, "compiled")["backward block"] if is_inside else ()
        once = counts[0] + (sum(is_launched(task, "compiled") for task in alone) or counts[1])
        relative = np.array((counts[0] + counts[1] + share * counts[2]) / once)
        first, last = (self._ends(tasks[f"{way} ends"], bytes) for way, bytes in zip(("forward", "backward"), LOSS_BYTES))
        return Block(self._parts(forward, self.of_block), back, relative), Block(first, last, np.zeros(1))

    def _ends(self, tasks: tuple[BlockTask, ...], bytes: float) -> Parts:
        """bytes: of a loss in one kernel, per logit."""
        fused = self.constants.stack.fused_loss
        parts = self._parts(tasks, self.of_ends)
        if (fused > 0).any():
            rest = self._parts(tuple(replace(task, after=()) for task in tasks if not _is_of_logits(task)), self.of_ends)["elementwise"]
            moved = bytes * self.runs.tokens * self.runs.vocab / self.runs.tensor
            parts["elementwise"] = np.where(fused > 0, rest + moved / self.constants.memory_rate, parts["elementwise"])
        return parts

    def _parts(self, tasks: tuple[BlockTask, ...], on: SimpleNamespace) -> Parts:
        end, by_kind = end_of(tasks, partial(self._seconds, on=on))
        context = sum((self._context("backward" in task.target, self._core(task, on)) for task in tasks if task.kind == "attention"), 0.0)
        kernels = {kind: seconds for kind, seconds in by_kind.items() if kind != "collective"}
        exposed = end - sum(kernels.values())
        exposed = np.where(exposed > 1e-12 * end, exposed, 0.0)  # less, or as little, only by rounding
        return {**kernels, "attention": kernels["attention"] - context, "tensor parallel": exposed, "context parallel": np.asarray(context)}

    def _seconds(self, task: BlockTask, on: SimpleNamespace) -> np.ndarray:
        if task.kind == "collective":
            bytes = self.sizes.of(task.bytes)
            sent = self.ring.all_reduce(bytes) if task.collective == "all_reduce" else self.ring.gather(bytes)
            return self.exposed * np.where(self.runs.tensor > 1, sent, 0.0)
        kernel = self._core(task, on)
        return kernel + self._context("backward" in task.target, kernel) if task.kind == "attention" else kernel

    def _core(self, task: BlockTask, on: SimpleNamespace) -> np.ndarray:
        """Of a kernel."""
        key = (id(on), task.target, task.inputs, task.outputs, task.fused and task.fused.get(self.how))
        if key not in self.known:
            seconds = kernel_seconds(task, self.sizes, on, self.how)
            if task.kind == "attention":
                stack = self.constants.stack
                seconds = seconds * np.where(stack.windows > 0, self.runs.computed_scores, 1.0)
                if not (stack.flash > 0).all():
                    seconds = np.where(stack.flash > 0, seconds, self._written_attention("backward" in task.target))
            if task.kind == "matmul":
                right = on.kernels.matmul.cast * tensor_bytes(task.inputs[-1], self.sizes) / 2 / on.kernels.matmul.bandwidth
                seconds = seconds * np.where(self.runs.precision == "mxfp8", 1 / MICROSCALED, 1.0)
                seconds = seconds + np.where(self.runs.precision == ROWWISE, right, 0.0)
            seconds = np.maximum(seconds, self.host * is_launched(task, self.how))
            self.known[key] = seconds * self.constants.has(task.kind)
        return self.known[key]

    def _written_attention(self, backward: bool) -> np.ndarray:
        """As matmuls and kernels on scores in memory."""
        runs, heads = self.runs, self.runs.heads / self.runs.tensor
        of16 = self.constants.in_program(self.constants.matmul16)
        products = 2 * (1 + backward) * matmul_seconds(runs.seq, runs.head_dim, runs.seq, of16, runs.tokens / runs.seq * heads)
        moved = SCORE_BYTES[backward] * runs.tokens * runs.seq * heads
        return products + moved * self.constants.stack.traffic / self.constants.memory_rate

    def _context(self, backward: bool, core: np.ndarray) -> np.ndarray:
        """What attention waits for the keys and values of other devices, where the context is sharded; and for heads that are exchanged
        for tokens: queries, keys and values before it, its result behind it, or their gradients."""
        runs, tp, some, device = self.runs, self.runs.tensor, self.runs.alltoall, self.constants.device
        ring, among = self.constants.ring(runs, runs.context / some, tp * some), self.constants.ring(runs, some, tp)
        keys = np.maximum(runs.keys / tp, runs.head_dim)
        sent = ring.gather(4 * runs.tokens * runs.context * keys / some) * (1 + backward)
        inside, adapter = device.link_bandwidth * device.link, runs.network * device.network * among.nodes**-self.constants.stack.congestion
        exchanged = among.all_to_all(4 * runs.tokens * (runs.queries / tp + keys), np.ones(1), inside, adapter, np.zeros(1))
        has = self.constants.has("context parallel")
        return beside(core, sent * has) - core + exchanged * has
