"""Training runs: one as a `Launch`, many as columns (`TrainingRuns`), in one vocabulary for all launchers and for published runs.

    devices = data * tensor * context * pipeline          global batch = data * microbatch * microbatches
    a step = `passes` through the pipeline, each of microbatches / passes microbatches
    zero = 0  states replicated over data parallel ranks     1  optimizer state sharded      2  and gradients      3  and parameters (FSDP)

`shard` of the data parallel ranks share one copy of what `zero` shards (HSDP: shard < data), together with their context parallel ranks.
Expert parallel ranks are taken from the data, context and tensor parallel ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import combinations
from typing import Any

import numpy as np

from .model_sizes import ModelSizes

SINGLE, LOOPED, V_SHAPED = ("1F1B", "GPipe"), ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble"), ("ZBVZeroBubble", "DualPipeV")
SCHEDULES = SINGLE + LOOPED + V_SHAPED  # torch.distributed.pipelining's names; Megatron and nanotron have the first three of them
ZERO_BUBBLE = ("InterleavedZeroBubble", *V_SHAPED)  # backward passes are of inputs and of weights, apart
MODULES = ("attn", "layernorm", "mla_up_proj", "mlp", "moe_act")  # that Megatron recomputes alone, or several of them
MODULAR = tuple("+".join(some) for n in range(len(MODULES)) for some in combinations(MODULES, n + 1))
RECOMPUTE = ("none", "selective_op", "selective_layer", "full", *MODULAR)
# bytes per element of the blocks' matmuls' inputs, with their scales: one per tensor (fp8), row, block of 128 or 128 x 128, of 32, of 16
PRECISIONS = {
    "fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "fp8_rowwise": 1.0, "fp8_blockwise": 1.0, "mxfp8": 1 + 1 / 32, "nvfp4": 0.5 + 1 / 16,
}  # fmt: skip
MODEL = "it after the file, as hf:DIR (for show, simulate and explain as --model hf:DIR)"  # how verbs are told the model
MOST_DEVICES = 2**18  # as meshes
MOST_VALUES = 2**20  # of a column of whole numbers, to be counted rather than sorted


@dataclass(frozen=True)
class Launch:
    """How a training run uses its devices: degrees of parallelism, batches, schedule, recompute and precision."""

    devices: int
    seq: int  # tokens
    global_batch: int  # sequences per step
    microbatch: int = 1  # sequences
    data: int = 1
    shard: int = 1
    zero: int = 0
    tensor: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    pipeline: int = 1
    virtual: int = 1  # stages per device
    schedule: str = "1F1B"
    recompute: str = "none"
    precision: str = "bf16"
    sequence_parallel: bool = False
    compiled: bool = False
    compiled_loss: bool = False
    async_tensor: bool = False
    async_expert: bool = False  # tokens travel to experts and back beside the compute of another microbatch
    deepep: bool = False  # a token goes to a node once, however many of its experts are there (DeepEP, HybridEP)
    gather8: bool = False  # parameters of blocks are gathered in 8 bits: they are cast where they are owned
    grads16: bool = False  # gradients are reduced in 16 bits
    states16: bool = False  # parameters, gradients and the optimizer's state have 16 bits, and there is no float32 copy
    split: str = ""  # layers of the stages: "" as the launcher divides them; see blocks_of_stages
    group: int = 1  # microbatches that a virtual stage takes in turn, where more than there are stages (Megatron)
    passes: int = 1  # of a step: the pipeline runs empty after each
    offload: bool = False  # the optimizer and its state are on the host
    loss_chunks: int = 1  # of the tokens, one after the other, for which logits exist
    alltoall: int = 1  # of the context parallel ranks, those that exchange heads for tokens (Ulysses); keys go round among the others
    recomputed: int = 0  # by `full`, of the blocks of each stage; 0: all

    def __post_init__(self) -> None:
        for name in sorted(COUNTS, key="devices".__eq__):  # their product comes last
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} is {value!r}; expected a whole number of 1 or more")
        if self.devices > MOST_DEVICES:
            raise ValueError(f"there are {self.devices} devices; expected {MOST_DEVICES} at most")
        for name, known in (("schedule", SCHEDULES), ("recompute", RECOMPUTE), ("zero", range(4))):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} is {getattr(self, name)!r}; expected one of {', '.join(map(str, known))}")

    @property
    def replicate(self) -> int:
        """Copies of what is sharded."""
        return self.data // self.shard

    @property
    def microbatches(self) -> int:
        """Per step and data parallel rank."""
        return max(self.global_batch // (self.data * self.microbatch), 1)

    @property
    def microbatches_of_pass(self) -> int:
        return max(self.microbatches // self.passes, 1)

    @property
    def local_batch(self) -> int:
        """Sequences of one pass and data parallel rank."""
        return self.microbatch * (self.microbatches_of_pass if self.pipeline > 1 else 1)


FIELDS = tuple(field.name for field in fields(Launch))
OPTIONAL = "alltoall split passes schedule offload gather8 grads16 states16 loss_chunks recomputed"
DEFAULTS: dict[str, Any] = {field.name: field.default for field in fields(Launch) if field.name in OPTIONAL.split()}
DEFAULTS["positions"] = 0  # 1: a table of learned positions beside that of tokens
DEFAULTS["qk_norm"] = 0  # 1: queries and keys are normalized
DEFAULTS["computed_scores"] = 1.0  # of a causal attention's, where kernels skip what a window hides
DEFAULTS["again"] = 1.0  # of the blocks that `full` recomputes, the share that it does
DEFAULTS["predictions"] = 1  # of the tokens after each token: the head runs so often, behind a block more each time
COUNTS = tuple(field.name for field in fields(Launch) if field.type == "int" and field.name not in ("zero", "recomputed"))


def distinct(columns: Iterable[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Of columns of equal length: a row of each different combination, and for every row which of these it is."""
    columns = [*columns]
    count, code = 1, np.zeros(len(columns[0]), int)
    for known, inverse in (_numbered(column) for column in columns if column.strides[0]):  # others have one value
        count, code = count * known, code * known + inverse
        count, code = _numbered(code) if count > MOST_VALUES else (count, code)
    count, code = _numbered(code)
    firsts = np.zeros(count, int)
    firsts[code[::-1]] = np.arange(len(code))[::-1]
    return firsts, code


def _numbered(column: np.ndarray) -> tuple[int, np.ndarray]:
    """How many values a column has, and for every row the place of its value among them: columns of launches have few."""
    if (column == column[:1]).all():
        return min(len(column), 1), np.zeros(len(column), int)
    if column.dtype.kind == "U":
        words, rest = list[str](), column
        while len(rest):
            words, rest = [*words, rest[0]], rest[rest != rest[0]]
        return len(words), sum((i * (column == word) for i, word in enumerate(words)), np.zeros(len(column), int))
    if 0 <= column.min() and column.max() < MOST_VALUES and (column == (rounded := column.astype(int))).all():
        there = np.bincount(rounded) > 0
        return int(there.sum()), (np.cumsum(there) - 1)[rounded]
    values, inverse = np.unique(column, return_inverse=True)
    return len(values), inverse


def by_value(function: Callable[[np.ndarray], np.ndarray], column: np.ndarray) -> np.ndarray:
    """A function of each of a column's values; of one where memory has one for all rows (np.broadcast_to)."""
    return function(column) if column.strides[0] else np.broadcast_to(function(column[:1]), len(column))


@dataclass(frozen=True, eq=False)
class TrainingRuns:
    """Many training runs, one array per column; the columns are attributes too. Every field of `Launch` is a column; tables of published
    runs leave out those of DEFAULTS.

    Seconds and bytes are computed from more columns, which `launch_prices.priced_runs` adds, all numbers as floats:

        of a decoder-only transformer    layers, width, ffn (of the MLP, with three matrices where `gated`), heads and kv_heads of width
                                         head_dim, vocab, tied (1: one table of tokens and head)
        of the site                      per_node (devices), network (bytes/s of one device to other nodes)
        of the run                       sharing (devices with one copy of what `zero` shards)
    """

    values: Mapping[str, np.ndarray]

    def __getattr__(self, name: str) -> np.ndarray:
        try:
            return self.__dict__["values"][name]
        except KeyError:
            if name in DEFAULTS:
                return np.broadcast_to(DEFAULTS[name], len(self))
            raise AttributeError(name) from None

    def __len__(self) -> int:
        return len(self.values["devices"])

    def __getitem__(self, rows: Any) -> TrainingRuns:
        chosen = np.arange(len(self))[rows]
        rows = rows if isinstance(rows, slice) else chosen
        return TrainingRuns({k: c[rows] if c.strides[0] else np.broadcast_to(c[:1], len(chosen)) for k, c in self.values.items()})

    @staticmethod
    def of(launches: Sequence[Launch]) -> TrainingRuns:
        return TrainingRuns({name: np.array([getattr(one, name) for one in launches]) for name in FIELDS})

    @staticmethod
    def joined(parts: Iterable[TrainingRuns]) -> TrainingRuns:
        def of(columns: list[np.ndarray]) -> np.ndarray:
            values = np.unique(np.concatenate([c[:1] for c in columns])) if not any(c.strides[0] for c in columns) else ()
            return np.broadcast_to(values, sum(map(len, columns))) if len(values) == 1 else np.concatenate(columns)

        parts = [*parts]
        return TrainingRuns({name: of([part.values[name] for part in parts]) for name in parts[0].values})

    def with_columns(self, **columns: Any) -> TrainingRuns:
        return TrainingRuns({**self.values, **{name: np.broadcast_to(column, len(self)) for name, column in columns.items()}})

    def among(self, name: str, values: Iterable) -> np.ndarray:
        """Whether a column has one of some values."""
        return by_value(lambda column: np.isin(column, [*values]), getattr(self, name))

    def launch(self, i: int) -> Launch:
        return Launch(**{name: self.values[name][i].item() for name in FIELDS})

    def degrees(self, experts: bool = True) -> dict[str, np.ndarray]:
        """The columns that `degrees --json` has, under its keys. experts: whether the model has some; else nothing shards them."""
        return {
            "dp": self.data, "shard": np.where(self.zero > 0, self.shard, 1), "tp": self.tensor, "cp": self.context, "a2a": self.alltoall,
            "ep": self.expert, "pp": self.pipeline, "schedule": np.where(self.pipeline > 1, self.schedule, "none"),
            "microbatch": self.microbatch, "recompute": self.recompute, "zero": self.zero,
            "etp": self.expert_tensor if experts else self.tensor, "vpp": self.virtual, "split": self.split, "passes": self.passes,
            "async_expert": self.async_expert, "deepep": self.deepep, "gather8": self.gather8,
        }  # fmt: skip

    def degrees_of(self, i: int, experts: bool = True) -> dict[str, Any]:
        """`degrees` of one of them, as plain values."""
        return {name: column[i].item() for name, column in self.degrees(experts).items()}

    @property
    def family(self) -> np.ndarray:
        """The name of the captured block that is most like a run's."""
        return np.where(self.gated > 0, np.where(self.qk_norm > 0, "qwen3", "llama"), "gpt2")

    @cached_property
    def microbatches(self) -> np.ndarray:
        """Per step and data parallel rank."""
        return np.maximum(self.global_batch // (self.data * self.microbatch), 1)

    @property
    def microbatches_of_pass(self) -> np.ndarray:
        return np.maximum(self.microbatches // self.passes, 1)

    @cached_property
    def tokens(self) -> np.ndarray:
        """Tokens of one microbatch on one device of the context parallel group."""
        return self.microbatch * self.seq / self.context

    @property
    def queries(self) -> np.ndarray:
        """Width of all query heads."""
        return self.heads * self.head_dim

    @property
    def keys(self) -> np.ndarray:
        """Width of all key heads, and of all value heads."""
        return self.kv_heads * self.head_dim

    @cached_property
    def block_parameters(self) -> np.ndarray:
        """Of one block, on all tensor parallel ranks together; norms, biases and routed experts left out."""
        h, ffn = self.width, self.values.get("held_ffn", self.ffn)
        return h * (self.queries + 2 * self.keys) + self.queries * h + (2 + self.gated) * h * ffn

    @cached_property
    def table_parameters(self) -> np.ndarray:
        return self.vocab * self.width

    @cached_property
    def itemsize(self) -> np.ndarray:
        """Bytes per element of the inputs of the blocks' matmuls."""
        firsts, of = distinct([self.precision])
        return np.array([PRECISIONS[name] for name in self.precision[firsts].tolist()])[of]


@dataclass(frozen=True)
class LaunchConfig:
    """What a configuration says: a launch, and the sizes of its model."""

    launch: Launch
    sizes: ModelSizes
    not_counted: tuple[str, ...] = ()  # what it says that no figure counts

    def to_dict(self, launcher: str) -> dict[str, Any]:
        """What verbs print of it, whatever they were asked."""
        one = self.launch
        return {
            "launcher": launcher, "devices": one.devices, "global_batch": one.global_batch, "seq": one.seq, "precision": one.precision,
            "configuration": TrainingRuns.of([one]).degrees_of(0, self.sizes.experts > 0), "parameters": self.sizes.parameters,
            "not_counted": [*self.not_counted, *self.sizes.not_counted(one.seq)],
        }  # fmt: skip


@dataclass(frozen=True)
class Overrides:
    """Facts beside a configuration, None where unknown. Devices, sizes, seq and global_batch go before what the configuration says."""

    devices: int | None = None
    per_node: int = 8
    sizes: ModelSizes | None = None
    seq: int | None = None
    microbatch: int | None = None
    global_batch: int | None = None

    def need(self, name: str, where: str, option: str) -> Any:
        """The value of a field that has to be known. ValueError with the option that tells it."""
        value = getattr(self, name)
        if value is None:
            raise ValueError(f"{where} does not say the {name.replace('_', ' ')}; add {option}")
        return value
