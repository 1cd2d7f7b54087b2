"""A launch: the degrees of parallelism and flags with which a launcher starts a training run, in one vocabulary for all launchers.

    devices = data * tensor * context * pipeline          global batch = data * microbatch * microbatches
    zero = 0  states replicated over data parallel ranks     1  optimizer state sharded      2  and gradients      3  and parameters (FSDP)

`shard` of the data parallel ranks share one copy of what `zero` shards (HSDP: shard < data), together with their context parallel ranks.
Expert parallel ranks are taken from the data, context and tensor parallel ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from .sizes import ModelSizes

SINGLE, LOOPED, V_SHAPED = ("1F1B", "GPipe"), ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble"), ("ZBVZeroBubble", "DualPipeV")
SCHEDULES = SINGLE + LOOPED + V_SHAPED  # torch.distributed.pipelining's names; Megatron and nanotron have the first three of them
MOST_DEVICES = 2**18  # as meshes
RECOMPUTE = ("none", "selective_op", "selective_layer", "attn", "full")  # as recipes have them


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
    async_tensor: bool = False
    rowwise: bool = False  # float8 scales per row
    uneven: bool = False  # the stages' layers are listed by the configuration, equal or not

    def __post_init__(self) -> None:
        for name in sorted(COUNTS, key="devices".__eq__):  # their product comes last
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} is {value!r}; expected a whole number of 1 or more")
        if self.devices > MOST_DEVICES:
            raise ValueError(f"there are {self.devices} devices; expected {MOST_DEVICES} at most")
        for name, known in (("schedule", SCHEDULES), ("recompute", RECOMPUTE)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} is {getattr(self, name)!r}; expected one of {', '.join(known)}")

    @property
    def replicate(self) -> int:
        """Copies of what is sharded."""
        return self.data // self.shard

    @property
    def microbatches(self) -> int:
        """Per step and data parallel rank."""
        return max(self.global_batch // (self.data * self.microbatch), 1)


COUNTS = tuple(field.name for field in fields(Launch) if field.type == "int" and field.name != "zero")


@dataclass(frozen=True)
class Described:
    """What a configuration says: a launch, and the sizes of its model."""

    launch: Launch
    sizes: ModelSizes


@dataclass(frozen=True)
class Known:
    """What is known beside a configuration, and stands where the configuration does not say it; None: unknown."""

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


class Columns:
    """Many launches as one array per field, with the sizes of their model; attributes are the fields of Launch."""

    def __init__(self, values: Mapping[str, np.ndarray]):
        self.values = dict(values)

    def __getattr__(self, name: str) -> np.ndarray:
        try:
            return self.__dict__["values"][name]
        except KeyError:
            raise AttributeError(name) from None

    def __len__(self) -> int:
        return len(self.values["devices"])

    def __getitem__(self, rows: np.ndarray) -> Columns:
        return Columns({name: column[rows] for name, column in self.values.items()})

    @property
    def microbatches(self) -> np.ndarray:
        return np.maximum(self.global_batch // (self.data * self.microbatch), 1)

    def degrees(self) -> dict[str, np.ndarray]:
        """The columns that `degrees --json` has, under its keys."""
        return {
            "dp": self.data, "shard": np.where(self.zero > 0, self.shard, 1), "tp": self.tensor, "cp": self.context, "ep": self.expert,
            "pp": self.pipeline, "schedule": np.where(self.pipeline > 1, self.schedule, "none"), "microbatch": self.microbatch,
            "recompute": self.recompute,
        }  # fmt: skip

    def launch(self, i: int) -> Launch:
        return Launch(**{name: column[i].item() for name, column in self.values.items()})

    @staticmethod
    def of(launches: Sequence[Launch]) -> Columns:
        return Columns({field.name: np.array([getattr(one, field.name) for one in launches]) for field in fields(Launch)})

    @staticmethod
    def product(fixed: Launch, choices: Mapping[str, Sequence[Any]]) -> Columns:
        """Every combination of the choices, the last one changing fastest; other fields as in `fixed`."""
        grids = np.meshgrid(*(np.arange(len(options)) for options in choices.values()), indexing="ij")
        varied = {name: np.array(options)[grid.ravel()] for (name, options), grid in zip(choices.items(), grids)}
        count = grids[0].size
        return Columns({f.name: varied[f.name] if f.name in varied else np.full(count, getattr(fixed, f.name)) for f in fields(Launch)})

    @staticmethod
    def joined(parts: Sequence[Columns]) -> Columns:
        return Columns({name: np.concatenate([part.values[name] for part in parts]) for name in parts[0].values})

    def with_columns(self, **columns: np.ndarray) -> Columns:
        return Columns({**self.values, **columns})
