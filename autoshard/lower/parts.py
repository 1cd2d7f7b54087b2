"""Whole tensors and the parts that ranks hold.

    cut(x, layout)[rank]      what the rank holds:  S(d): its slice of dim d;  R: x;  P(sum): x on the axis' first rank, else 0
    reduced(parts, layout)    the P axes reduced: every rank of such an axis holds the same value
    assemble(cut(x, layout), layout) == x

Ranks that hold the same numbers share one tensor: nothing that runs here writes into a tensor, so sharing is safe, and what
is replicated costs the memory of one rank.
"""

from __future__ import annotations

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


def reduce_parts(parts: Sequence[Tensor], reduce_op: str) -> Tensor:
    """The reduction that Partial(reduce_op) stands for, in the order of the parts."""
    total = reduce(REDUCTIONS[reduce_op], parts)
    return total / len(parts) if reduce_op == "avg" else total


@lru_cache(maxsize=1024)
def groups(mesh: Mesh, axis: int) -> tuple[tuple[int, ...], ...]:
    """The groups of ranks that talk to each other along a mesh axis, each in the order of its coordinate on it."""
    stride = math.prod(mesh.shape[axis + 1 :])
    first = (rank for rank, coordinate in enumerate(mesh.coordinates()) if coordinate[axis] == 0)
    return tuple(tuple(rank + stride * c for c in range(mesh.shape[axis])) for rank in first)


def shard_of_rank(whole: Tensor, layout: Layout, mesh: Mesh, coordinate: tuple[int, ...]) -> Tensor:
    """The part of one rank (P left out: as R)."""
    part = whole
    for dim, (lo, hi) in enumerate(rank_bounds(tuple(whole.shape), layout, mesh, coordinate)):
        part = part.narrow(dim, lo, hi - lo) if hi - lo != whole.shape[dim] else part
    return part


def cut(whole: Tensor, layout: Layout, mesh: Mesh) -> list[Tensor]:
    """What each rank holds of a whole tensor, contiguous, in the order of ranks."""
    made: dict[tuple[int, ...], Tensor] = {}
    parts = []
    for coordinate in mesh.coordinates():
        key = _held(layout, coordinate)
        if key not in made:
            part = shard_of_rank(whole, layout, mesh, coordinate).contiguous()
            made[key] = torch.zeros_like(part) if _is_zero(layout, coordinate) else part
        parts.append(made[key])
    return parts


def _held(layout: Layout, coordinate: tuple[int, ...]) -> tuple[int, ...]:
    """Equal for ranks that `cut` gives the same part."""
    summed = _is_zero(layout, coordinate)
    return (*(c if isinstance(p, Shard) else 0 for p, c in zip(layout, coordinate, strict=True)), int(summed))


def _is_zero(layout: Layout, coordinate: tuple[int, ...]) -> bool:
    return any(isinstance(p, Partial) and p.reduce_op == "sum" and c > 0 for p, c in zip(layout, coordinate, strict=True))


def reduced(parts: Sequence[Tensor], layout: Layout, mesh: Mesh) -> list[Tensor]:
    """The parts after every P axis is reduced."""
    parts = list(parts)
    for axis, placement in enumerate(layout):
        if isinstance(placement, Partial):
            totals: dict[tuple[int, ...], Tensor] = {}
            for group in groups(mesh, axis):
                key = tuple(id(parts[rank]) for rank in group)
                if key not in totals:
                    totals[key] = reduce_parts([parts[rank] for rank in group], placement.reduce_op)
            for group in groups(mesh, axis):
                total = totals[tuple(id(parts[rank]) for rank in group)]
                for rank in group:
                    parts[rank] = total
    return parts


def largest(x: Tensor) -> float:
    """max |x| over finite values; 0 for an empty tensor. Of complex numbers, the larger of the two components counts."""
    if x.numel() == 0 or x.dtype == torch.bool:
        return float(x.any()) if x.numel() else 0.0
    x = _as_real(x.detach())
    found = x.abs().max().item()
    return found if math.isfinite(found) else torch.nan_to_num(x, nan=0.0, posinf=0.0, neginf=0.0).abs().max().item()


def gap(a: Tensor, b: Tensor) -> float:
    """max |a - b|; equal infinities and nan on both sides are 0, any other nan and a difference between integers inf.

    Complex numbers are compared component by component.
    """
    if a is b or torch.equal(a, b):
        return 0.0
    a, b = _as_real(a), _as_real(b)
    if not a.dtype.is_floating_point:
        return math.inf
    found = torch.sub(a, b).abs_().max().item()
    if math.isfinite(found):
        return found
    same = (a == b) | (a.isnan() & b.isnan())
    found = torch.where(same, 0.0, (a - b).abs()).max().item()
    return found if math.isfinite(found) else math.inf


def _as_real(x: Tensor) -> Tensor:
    """Complex numbers as pairs of real ones, in a last dim of 2; anything else as it is."""
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


def distance(parts: Sequence[Tensor], layout: Layout, mesh: Mesh, whole: Tensor) -> float:
    """max |assemble(parts) - whole| over all ranks, replicas included, without assembling; inf where a shape differs."""
    worst = 0.0
    seen: set[tuple] = set()
    for part, coordinate in zip(reduced(parts, layout, mesh), mesh.coordinates(), strict=True):
        key = (id(part), tuple(c for p, c in zip(layout, coordinate, strict=True) if isinstance(p, Shard)))
        if key in seen:
            continue
        seen.add(key)
        expected = shard_of_rank(whole, layout, mesh, coordinate)
        if part.shape != expected.shape or part.dtype != expected.dtype:
            return math.inf
        worst = max(worst, gap(part, expected))
    return worst


def assemble(parts: Sequence[Tensor], layout: Layout, mesh: Mesh, *, tolerance: float = 1e-6) -> Tensor:
    """The whole tensor from what the ranks hold. ValueError when replicas differ by more than `tolerance` of their largest value."""
    held = reduced(parts, layout, mesh)
    whole = _concatenate(held, layout, mesh)
    apart = distance(held, _without_partial(layout), mesh, whole)
    if apart > tolerance * max(largest(whole), torch.finfo(torch.float32).tiny):
        raise ValueError(f"ranks disagree by {apart:.3g} about a tensor laid out {text(layout)}; expected equal replicas")
    return whole


def _without_partial(layout: Layout) -> Layout:
    return tuple(R if isinstance(p, Partial) else p for p in layout)


def _concatenate(parts: list[Tensor], layout: Layout, mesh: Mesh) -> Tensor:
    """Inner axes first, so that several axes on one dim come together left to right."""
    at = dict(zip(product(*(range(n) for n in mesh.shape)), parts, strict=True))
    for axis in reversed(range(len(layout))):
        placement = layout[axis]
        outer = {coordinate[:axis] for coordinate in at}
        n = mesh.shape[axis]
        at = {
            c: torch.cat([at[(*c, i)] for i in range(n)], placement.dim) if isinstance(placement, Shard) and n > 1 else at[(*c, 0)]
            for c in sorted(outer)
        }
    return at[()]

