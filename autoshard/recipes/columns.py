"""Recipes: many training runs as columns of one length, one entry per run.

A run trains a decoder-only transformer: L blocks of width h, attention with `heads` query heads and `kv_heads` key-value heads of width
`head_dim`, an MLP of width `ffn` (three matrices where it is gated), a table of `vocab` rows, shared with the head where `tied`.
Its devices are data * tensor * pipeline * context; a data parallel rank has `microbatches` of `batch` sequences of `seq` tokens per step.

    zero = 0  states replicated over the data parallel ranks        1  optimizer state sharded over `shard` of them
           2  gradients too                                         3  parameters too, gathered at each use (FSDP)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

RECOMPUTE = ("none", "full", "selective_op", "selective_frac", "selective_layer", "attn", "default")
PRECISIONS = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "nvfp4": 0.5}  # bytes per element of the blocks' matmuls' inputs

# column: its name in a table of published runs
TABLE = {
    "stack": "src", "layers": "L", "width": "h", "ffn": "ffn", "heads": "heads", "kv_heads": "kv", "head_dim": "head_dim", "vocab": "vocab",
    "tied": "tied", "gated": "gated", "positions": "pos", "seq": "seq", "batch": "mbs", "microbatches": "ga", "data": "dp",
    "shard": "shard", "zero": "zero", "tensor": "tp", "sequence_parallel": "sp", "pipeline": "pp", "virtual": "vp", "context": "cp",
    "recompute": "rc", "precision": "prec", "rowwise": "rowwise", "microscaling": "mx", "compiled": "fused", "async_tp": "asynctp",
    "device": "gpu", "per_node": "gpn", "network": "link_per_gpu", "memory": "gpu_mem",
}  # fmt: skip
WORDS = ("stack", "recompute", "precision", "device")


@dataclass(frozen=True)
class Recipes:
    """Numbers are float64 arrays, words arrays of text; degrees are numbers of devices."""

    stack: np.ndarray  # the software: nanotron, torchtitan, ...
    device: np.ndarray  # the kind of device: h100, ...
    layers: np.ndarray
    width: np.ndarray
    ffn: np.ndarray
    heads: np.ndarray
    kv_heads: np.ndarray
    head_dim: np.ndarray
    vocab: np.ndarray
    tied: np.ndarray  # 0 or 1
    gated: np.ndarray  # 0 or 1
    positions: np.ndarray  # 1: learned position embeddings
    seq: np.ndarray  # tokens
    batch: np.ndarray  # sequences in a microbatch, of one data parallel rank
    microbatches: np.ndarray  # per step
    data: np.ndarray
    shard: np.ndarray
    zero: np.ndarray
    tensor: np.ndarray
    sequence_parallel: np.ndarray  # 0 or 1
    pipeline: np.ndarray
    virtual: np.ndarray  # stages per device
    context: np.ndarray
    recompute: np.ndarray
    precision: np.ndarray
    rowwise: np.ndarray  # 1: float8 scales per row
    microscaling: np.ndarray  # 1: float8 scales per block of 32
    compiled: np.ndarray  # 1: elementwise ops fused
    async_tp: np.ndarray  # 1: tensor parallel transfers in pieces beside their matmuls
    per_node: np.ndarray  # devices of a node
    network: np.ndarray  # bytes/s of one device to other nodes
    memory: np.ndarray  # bytes of a device

    def __len__(self) -> int:
        return len(self.layers)

    def __getitem__(self, rows: np.ndarray) -> Recipes:
        return Recipes(*(getattr(self, field.name)[rows] for field in fields(self)))

    @staticmethod
    def of_table(rows: Iterable[Mapping[str, Any]]) -> Recipes:
        """The runs of a table with the columns of TABLE; ValueError for a missing column or a number that is none."""
        table = list(rows)
        return Recipes(**{field.name: _column(table, TABLE[field.name], field.name in WORDS) for field in fields(Recipes)})

    @property
    def devices(self) -> np.ndarray:
        return self.data * self.tensor * self.pipeline * self.context

    @property
    def tokens(self) -> np.ndarray:
        """Tokens of one microbatch on one device of the context parallel group."""
        return self.batch * self.seq / self.context

    @property
    def queries(self) -> np.ndarray:
        """Width of all query heads."""
        return self.heads * self.head_dim

    @property
    def keys(self) -> np.ndarray:
        """Width of all key heads, and of all value heads."""
        return self.kv_heads * self.head_dim

    @property
    def block_parameters(self) -> np.ndarray:
        """Of one block, on all tensor parallel ranks together; norms and biases left out."""
        h = self.width
        return h * (self.queries + 2 * self.keys) + self.queries * h + (2 + self.gated) * h * self.ffn

    @property
    def table_parameters(self) -> np.ndarray:
        return self.vocab * self.width

    @property
    def parameters(self) -> np.ndarray:
        return self.layers * self.block_parameters + (2 - self.tied) * self.table_parameters

    def itemsize(self) -> np.ndarray:
        """Bytes per element of the inputs of the blocks' matmuls."""
        return np.array([PRECISIONS[name] for name in self.precision.tolist()])


def _column(rows: list[Mapping[str, Any]], name: str, words: bool) -> np.ndarray:
    missing = [i for i, row in enumerate(rows) if name not in row]
    if missing:
        raise ValueError(f"row {missing[0]} has no column {name!r}; expected the columns {', '.join(TABLE.values())}")
    if words:
        return np.array([str(row[name]) for row in rows])
    try:
        return np.array([float(row[name]) for row in rows])
    except ValueError as error:
        raise ValueError(f"column {name!r} has a value that is no number: {error}") from error
