"""Kernels of random ops: on every mesh the numbers that one device draws, whatever the seeds of the ranks are.

All ranks draw from one state of torch's generator (`lower.generator`), op after op in the order of the program. An op draws in one of two
ways, after which the state is the same on all ranks:

    in full     every rank draws the global tensor, as torch does on one device, and keeps its shard
    per shard   every shard is drawn alone, from a branch of the state that belongs to the shard's first element: shards differ,
                replicas agree, and so do two meshes with the same shards. One device draws other numbers

Sharded tensors of more than IN_FULL elements are drawn per shard, and so are those for which torch draws as often as the values of the
inputs ask for (rrelu, poisson). torch draws in the order of memory, so that a tensor that isn't row-major in the model isn't here either.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autoshard.capture import DROPOUT, DROPOUT_BACKWARD, draws
from autoshard.graph import FACTORIES, ORDER, SHAPED, Ref, drawn_by, is_drawn_in_full
from autoshard.layout import Layout, rank_bounds
from autoshard.lower.collectives import Rank, RankGenerator
from autoshard.lower.generator import per_shard
from autoshard.lower.kernels.attention import call_of, math_attention, math_attention_backward
from autoshard.lower.kernels.sharded_op import Arguments, Kernel, ShardedOp, wide
from autoshard.lower.literals import overload
from autoshard.lower.sharding import part_of
from autoshard.mesh import Mesh
from autoshard.torch_private import pytree

aten = torch.ops.aten


@dataclass(frozen=True)
class Region:
    """A tensor that is drawn. order: its dims from the slowest to the fastest in memory; () if row-major."""

    shape: tuple[int, ...]
    layout: Layout
    mesh: Mesh
    order: tuple[int, ...] = ()

    @property
    def is_sharded(self) -> bool:
        return any(placement.is_shard() for placement in self.layout)

    def bounds(self, rank: Rank) -> tuple[tuple[int, int], ...]:
        return rank_bounds(self.shape, self.layout, self.mesh, rank.place) if self.is_sharded else tuple((0, n) for n in self.shape)

    def local_shape(self, rank: Rank) -> tuple[int, ...]:
        return tuple(hi - lo for lo, hi in self.bounds(rank))

    def first(self, rank: Rank) -> int:
        """The place of the first element of the rank's shard in the global tensor, row-major."""
        return sum(lo * math.prod(self.shape[d + 1 :]) for d, (lo, _) in enumerate(self.bounds(rank)))

    def empty(self, x: Tensor) -> Tensor:
        """The global tensor, to be filled."""
        return self._from_memory(x.new_empty([self.shape[d] for d in self.order or range(len(self.shape))]))

    def in_order(self, x: Tensor) -> Tensor:
        """A tensor that is read beside the one that is drawn, with its dims in the same order in memory."""
        return self._from_memory(x.permute(self.order).contiguous()) if self.order and x.dim() == len(self.order) else x.contiguous()

    def _from_memory(self, x: Tensor) -> Tensor:
        return x.permute(sorted(range(x.dim()), key=self.order.__getitem__)) if self.order else x

    def shard(self, x: Tensor, rank: Rank) -> Tensor:
        """This rank's shard of the global tensor."""
        return part_of(x, self.bounds(rank)).clone() if self.is_sharded else x


class RandomKernel(ABC):
    """A kernel that draws `region`, in full or per shard."""

    region: Region
    in_full: bool

    def __call__(self, rank: Rank, a: Arguments) -> RankGenerator:
        yield from ()
        return self.drawn(rank, a, None if self.in_full else self.region.first(rank))

    @abstractmethod
    def drawn(self, rank: Rank, a: Arguments, first: int | None) -> Any:
        """The rank's outputs. first: of its shard, to draw that alone; None to draw in full."""


@dataclass(frozen=True, eq=False)
class Draw(RandomKernel):
    """An op whose outputs are all drawn, and sharded alike."""

    target: str
    region: Region
    in_full: bool
    inputs: dict[str, tuple[tuple[int, ...], Layout]]  # global shapes and layouts, by argument

    def drawn(self, rank: Rank, a: Arguments, first: int | None) -> Any:
        named = {name: value for name, value in a.items() if name not in (ORDER, "generator")}
        if first is not None:
            return per_shard(self.target)(first=first, **self._alone(rank, named))
        # the functional form of bernoulli_ draws in row-major order; the op of a captured program comes from the other one
        function = overload("aten.bernoulli_.float" if self.target == "aten.bernoulli.p" else self.target)
        result = function(**self._globally(rank, named))
        return pytree.tree_map_only(Tensor, lambda x: self.region.shard(x, rank), result)

    def _alone(self, rank: Rank, named: dict[str, Any]) -> dict[str, Any]:
        shape = self.region.local_shape(rank)
        if self.target in FACTORIES:
            return {**named, "size": shape}
        if self.target in SHAPED:
            return {**named, "self": named["self"].new_empty(shape)}
        return {name: x.contiguous() if isinstance(x, Tensor) else x for name, x in named.items()}

    def _globally(self, rank: Rank, named: dict[str, Any]) -> dict[str, Any]:
        """The arguments of the op on one device. Where this rank holds a shard of a tensor, the rest is 0, and what is drawn there is not
        kept."""
        given = dict(named)
        for name, x in named.items():
            if name == "self" and self.target in SHAPED:
                given[name] = self.region.empty(x)
            elif isinstance(x, Tensor):
                shape, layout = self.inputs[name]
                bounds = Region(shape, layout, self.region.mesh).bounds(rank)
                pads = [n for (lo, hi), size in reversed(list(zip(bounds, shape, strict=True))) for n in (lo, size - hi)]
                given[name] = self.region.in_order(F.pad(x, pads) if any(pads) else x)
        return given


@dataclass(frozen=True, eq=False)
class NativeDropout(RandomKernel):
    """x * (this rank's shard of m), m = kept / (1 - p), each element kept with probability 1 - p; and what is kept."""

    region: Region
    in_full: bool

    def drawn(self, rank: Rank, a: Arguments, first: int | None) -> tuple[Tensor, Tensor]:
        x, p = a["input"], a["p"]
        if a["train"] is False or p in (0, 1):
            mask = x.new_full(x.shape, 0.0 if p == 1 and a["train"] is not False else 1.0)
        else:
            mask = factors(x, p, self.region, rank, first)
        return x * mask, mask != 0


def factors(x: Tensor, p: float, region: Region, rank: Rank, first: int | None) -> Tensor:
    """This rank's shard of m."""
    if first is not None:
        return per_shard("aten.bernoulli.p")(first, x.new_empty(region.local_shape(rank)), 1.0 - p) / (1.0 - p)
    full = region.empty(x)
    if x.device.type == "cpu":
        return region.shard(aten.bernoulli_.float(full, 1.0 - p) / (1.0 - p), rank)
    return region.shard(aten.native_dropout(aten.ones_like(full), p, True)[0], rank)  # torch's dropout is one kernel there


def region_of(sharded: ShardedOp, layout: Layout) -> tuple[Region, bool]:
    """What an op draws, and whether it is drawn in full."""
    region = Region(drawn_by(sharded.op).shape, layout, sharded.mesh, sharded.arguments.get(ORDER, ()))
    return region, not region.is_sharded or is_drawn_in_full(sharded.op)


def kernel_of(sharded: ShardedOp) -> Kernel | None:
    op = sharded.op
    if op.outputs[0] is None or not draws(overload(op.target)):
        return None
    region, in_full = region_of(sharded, sharded.outputs[0] or ())
    if op.target == "aten.native_dropout.default":
        return NativeDropout(region, in_full)
    tensors = {name: argument.index for name, argument in sharded.arguments.items() if isinstance(argument, Ref)}
    inputs = {name: (sharded.shapes[k], sharded.inputs[k]) for name, k in tensors.items()}
    return Draw(op.target, region, in_full, inputs)


# -- attention with dropout: matmuls and softmax on every device; its mask D [B, H, T, S] is sharded as q is -------------------------------
# torch's own kernels draw inside, from a state that depends on the shape of a shard, so that no two meshes would drop the same.


def dropout_attention(query, key, value, dropout_p, attn_mask=None, is_causal=False, scale=None, factors=None) -> tuple[Tensor, ...]:  # type: ignore[no-untyped-def]
    """out [B, H, T, E], logsumexp [B, H, T] and kept [B, H, T, S]. factors: D, drawn here where it is None."""
    if factors is None:
        keep = 1.0 - dropout_p
        factors = aten.bernoulli.p(query.new_empty((*query.shape[:-1], key.shape[-2])), keep) / keep
    call = replace(call_of(query, key, value, attn_mask, is_causal, scale), factors=wide(factors))
    return *math_attention(call), factors != 0


def dropout_attention_backward(grad_out, query, key, value, out, logsumexp, kept, dropout_p, attn_mask=None, is_causal=False, scale=None):  # type: ignore[no-untyped-def]
    """The gradients of query, key and value."""
    call = replace(call_of(query, key, value, attn_mask, is_causal, scale), factors=wide(kept.to(query.dtype) / (1.0 - dropout_p)))
    return math_attention_backward(call, grad_out, out, logsumexp)


@dataclass(frozen=True, eq=False)
class DropoutAttention(RandomKernel):
    """region: D, global, in the layout of q."""

    region: Region
    in_full: bool

    def drawn(self, rank: Rank, a: Arguments, first: int | None) -> tuple[Tensor, ...]:
        return dropout_attention(**a, factors=factors(a["query"], a["dropout_p"], self.region, rank, first))


def _dropout_attention(sharded: ShardedOp) -> Kernel:
    return DropoutAttention(*region_of(sharded, sharded.layout("query") or ()))


# the captured operators, where a user runs a captured graph
for _device in ("CPU", "CUDA"):
    torch.library.impl("autoshard::dropout_attention", _device, dropout_attention)
    torch.library.impl("autoshard::dropout_attention_backward", _device, dropout_attention_backward)
FUNCTIONS: dict[str, Callable[..., Any]] = {str(DROPOUT): dropout_attention, str(DROPOUT_BACKWARD): dropout_attention_backward}
KERNELS: dict[str, Callable[[ShardedOp], Kernel | None]] = {str(DROPOUT): _dropout_attention}
