"""Global tensors and the local tensors of all ranks: sharding, reducing, assembling and comparing, in one process.

    local_tensors(x, layout)[rank]   S(d): the rank's slice of dim d;  R: x;  P(sum): x on the first rank of the axis, 0 on the others
    reduced(tensors, layout)         the P axes are reduced: every rank of such an axis holds the same value
    assemble(local_tensors(x, layout), layout) == x

Ranks that hold the same numbers share one tensor: no function here writes into a tensor, so sharing is safe, and a replicated
tensor needs the memory of one rank.
"""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache, reduce
from itertools import product

import torch
from torch import Tensor
from torch.distributed.tensor.placement_types import Partial, Shard

from autoshard.layout import Layout, R, rank_bounds, text
from autoshard.mesh import Mesh

REDUCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}


def reduce_tensors(tensors: Sequence[Tensor], reduce_op: str) -> Tensor:
    """The reduction that Partial(reduce_op) stands for, in the order of the tensors."""
    total = reduce(REDUCTIONS[reduce_op], tensors)
    return total / len(tensors) if reduce_op == "avg" else total


@lru_cache(maxsize=1024)
def groups(mesh: Mesh, axis: int) -> tuple[tuple[int, ...], ...]:
    """The groups of ranks that communicate along a mesh axis, each in the order of the coordinate on that axis."""
    stride = math.prod(mesh.shape[axis + 1 :])
    first = (rank for rank, coordinate in enumerate(mesh.coordinates()) if coordinate[axis] == 0)
    return tuple(tuple(rank + stride * c for c in range(mesh.shape[axis])) for rank in first)


def shard_of_rank(tensor: Tensor, layout: Layout, mesh: Mesh, coordinate: tuple[int, ...]) -> Tensor:
    """The shard of a global tensor that one rank holds, as a view; P is treated as R."""
    return part_of(tensor, rank_bounds(tuple(tensor.shape), layout, mesh, coordinate))


def part_of(x: Tensor, bounds: Sequence[tuple[int, int]]) -> Tensor:
    """The part of a tensor between begin and end of each dim, as a view."""
    for dim, (begin, end) in enumerate(bounds):
        x = x.narrow(dim, begin, end - begin) if end - begin != x.shape[dim] else x
    return x


def local_tensors(tensor: Tensor, layout: Layout, mesh: Mesh) -> list[Tensor]:
    """The local tensor of each rank, contiguous, in the order of ranks."""
    by_key: dict[tuple[int, ...], Tensor] = {}
    tensors = []
    for coordinate in mesh.coordinates():
        key = _key(layout, coordinate)
        if key not in by_key:
            shard = shard_of_rank(tensor, layout, mesh, coordinate).contiguous()
            by_key[key] = torch.zeros_like(shard) if _is_zero(layout, coordinate) else shard
        tensors.append(by_key[key])
    return tensors


def _key(layout: Layout, coordinate: tuple[int, ...]) -> tuple[int, ...]:
    """Equal for ranks that hold the same local tensor."""
    is_zero = _is_zero(layout, coordinate)
    return (*(c if isinstance(p, Shard) else 0 for p, c in zip(layout, coordinate, strict=True)), int(is_zero))


def _is_zero(layout: Layout, coordinate: tuple[int, ...]) -> bool:
    return any(isinstance(p, Partial) and p.reduce_op == "sum" and c > 0 for p, c in zip(layout, coordinate, strict=True))


def reduced(tensors: Sequence[Tensor], layout: Layout, mesh: Mesh) -> list[Tensor]:
    """The local tensors after every P axis is reduced."""
    tensors = list(tensors)
    for axis, placement in enumerate(layout):
        if isinstance(placement, Partial):
            totals: dict[tuple[int, ...], Tensor] = {}
            before, tensors = tensors, list(tensors)
            for group in groups(mesh, axis):
                key = tuple(id(before[rank]) for rank in group)
                if key not in totals:
                    totals[key] = reduce_tensors([before[rank] for rank in group], placement.reduce_op)
                for rank in group:
                    tensors[rank] = totals[key]
    return tensors


def largest(x: Tensor) -> float:
    """max |x| over finite values; 0 for an empty tensor. For complex numbers, the larger component counts."""
    if x.numel() == 0 or x.dtype == torch.bool:
        return float(x.any()) if x.numel() else 0.0
    x = _as_real(x.detach())
    maximum = x.abs().max().item()
    return maximum if math.isfinite(maximum) else torch.nan_to_num(x, nan=0.0, posinf=0.0, neginf=0.0).abs().max().item()


def gap(a: Tensor, b: Tensor) -> float:
    """max |a - b|. Equal infinities and nan on both sides count as 0; any other nan counts as inf, and so does a difference of integers.

    Complex numbers are compared component by component.
    """
    if a is b or torch.equal(a, b):
        return 0.0
    a, b = _as_real(a), _as_real(b)
    if not a.dtype.is_floating_point:
        return math.inf
    difference = torch.sub(a, b).abs_().max().item()
    if math.isfinite(difference):
        return difference
    same = (a == b) | (a.isnan() & b.isnan())
    difference = torch.where(same, 0.0, (a - b).abs()).max().item()
    return difference if math.isfinite(difference) else math.inf


def _as_real(x: Tensor) -> Tensor:
    """Complex numbers as pairs of real ones, in a last dim of 2; anything else as it is."""
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


def distance(tensors: Sequence[Tensor], layout: Layout, mesh: Mesh, tensor: Tensor) -> float:
    """max |assemble(tensors) - tensor| over all ranks, replicas included, without assembling; inf where a shape or dtype differs."""
    worst = 0.0
    seen: set[tuple] = set()
    for local, coordinate in zip(reduced(tensors, layout, mesh), mesh.coordinates(), strict=True):
        key = (id(local), tuple(c for p, c in zip(layout, coordinate, strict=True) if isinstance(p, Shard)))
        if key in seen:
            continue
        seen.add(key)
        expected = shard_of_rank(tensor, layout, mesh, coordinate)
        if local.shape != expected.shape or local.dtype != expected.dtype:
            return math.inf
        worst = max(worst, gap(local, expected))
    return worst


def assemble(tensors: Sequence[Tensor], layout: Layout, mesh: Mesh, *, tolerance: float = 1e-6) -> Tensor:
    """The global tensor. ValueError when replicas differ by more than `tolerance` of their largest value."""
    summed = reduced(tensors, layout, mesh)
    tensor = _concatenate(summed, layout, mesh)
    apart = distance(summed, tuple(R if isinstance(p, Partial) else p for p in layout), mesh, tensor)
    if apart > tolerance * max(largest(tensor), torch.finfo(torch.float32).tiny):
        raise ValueError(f"ranks disagree by {apart:.3g} about a tensor with layout {text(layout)}; expected equal replicas")
    return tensor


def joined(tensors: Sequence[Tensor], layout: Layout, mesh: Mesh) -> Tensor:
    """The global tensor by the first of its replicas."""
    return _concatenate(reduced(tensors, layout, mesh), layout, mesh)


def _concatenate(tensors: list[Tensor], layout: Layout, mesh: Mesh) -> Tensor:
    """Concatenates along the inner axes first, so that several axes on one dim are joined from left to right."""
    at = dict(zip(product(*(range(n) for n in mesh.shape)), tensors, strict=True))
    for axis in reversed(range(len(layout))):
        placement = layout[axis]
        outer = {coordinate[:axis] for coordinate in at}
        n = mesh.shape[axis]
        at = {
            c: torch.cat([at[(*c, i)] for i in range(n)], placement.dim) if isinstance(placement, Shard) and n > 1 else at[(*c, 0)]
            for c in sorted(outer)
        }
    return at[()]

