"""The layout of a tensor on a mesh: one torch Placement per mesh axis, written `S(0),R`.

S(d) on axis k shards dim d into size_k parts, as torch.chunk does: each part has ceil(n / size_k) indices, and the last part is
shorter where size_k does not divide n. When several axes shard the same dim, they do so in the order of the axes, left to right
(axis 0 is major): each axis splits the parts of the axes before it, as in DTensor.

    part index of a rank on d = row-major number of its coordinates on those axes
    local_shape[d]            = ceil(... ceil(shape[d] / size_k) ... / size_l)      of the largest shard, which the first rank holds
                              = shape[d] / prod(size_k over axes k with S(d))       of every shard, where that divides

A layout that leaves a rank with an empty shard (5 rows in 4 parts: 2, 2, 1, 0) is not legal, because few kernels handle empty
tensors correctly. `P` (Partial) on an axis: the value is the reduction over that axis of the tensors that its ranks hold.
"""

import math
import re
from functools import lru_cache
from itertools import product

from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from autoshard.mesh import Mesh, shape_text

Layout = tuple[Placement, ...]

R = Replicate()
_SHARDS = tuple(Shard(d) for d in range(64))  # torch has no tensor of more dims
_PARTIALS = {op: Partial(op) for op in ("sum", "avg", "max", "min")}


def S(dim: int) -> Placement:
    """Sharded on dim `dim`, 0 to 63; IndexError above."""
    return _SHARDS[dim]


def P(reduce_op: str = "sum") -> Placement:
    """Partial: the value is the sum (avg, max, min) of the ranks' tensors. KeyError on another reduction."""
    return _PARTIALS[reduce_op]


def replicated(num_axes: int) -> Layout:
    return (R,) * num_axes


def placement_text(placement: Placement) -> str:
    if isinstance(placement, Shard):
        return f"S({placement.dim})"
    if isinstance(placement, Partial):
        return "P" if placement.reduce_op == "sum" else f"P({placement.reduce_op})"
    return "R"


def text(layout: Layout) -> str:
    """(Shard(0), Replicate()) -> `S(0),R`; `parse` is the inverse."""
    return ",".join(placement_text(p) for p in layout)


def parse(written: str) -> Layout:
    """`S(0),R` -> (Shard(0), Replicate()); also `S0`. ValueError on anything else."""
    out: list[Placement] = []
    for part in written.split(","):
        part = part.strip()
        shard, partial = re.fullmatch(r"S\((\d+)\)|S(\d+)", part), re.fullmatch(r"P(?:\((\w+)\))?", part)
        if part == "R":
            out.append(R)
        elif shard and int(shard[1] or shard[2]) < len(_SHARDS):
            out.append(S(int(shard[1] or shard[2])))
        elif partial and (partial[1] or "sum") in _PARTIALS:
            out.append(P(partial[1] or "sum"))
        else:
            raise ValueError(f"layout {written!r} has {part!r}; expected R, S(dim) or P per mesh axis, for example S(0),R")
    return tuple(out)


def shards_of(layout: Layout, mesh: Mesh, dim: int) -> int:
    """The number of parts that `dim` is sharded into."""
    return math.prod(sharding_sizes(layout, mesh, dim))


def sharding_sizes(layout: Layout, mesh: Mesh, dim: int) -> tuple[int, ...]:
    """The sizes of the axes that shard `dim`, left to right."""
    return tuple(axis.size for p, axis in zip(layout, mesh.axes, strict=True) if isinstance(p, Shard) and p.dim == dim)


@lru_cache(maxsize=4096)
def chunk_bounds(size: int, axis_sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The first index of each part of a dim that axes of these sizes split one after another, and the dim's end."""
    parts = [(0, size)]
    for n in axis_sizes:
        parts = [(min(hi, lo + i * q), min(hi, lo + (i + 1) * q)) for lo, hi in parts for q in (-(-(hi - lo) // n),) for i in range(n)]
    return (*(lo for lo, _ in parts), size)


@lru_cache(maxsize=4096)
def leaves_empty(size: int, axis_sizes: tuple[int, ...]) -> bool:
    """Whether some part has no index at all."""
    bounds = chunk_bounds(size, axis_sizes)
    return any(lo == hi for lo, hi in zip(bounds, bounds[1:], strict=False))


def local_shape(shape: tuple[int, ...], layout: Layout, mesh: Mesh) -> tuple[int, ...]:
    """The shape of the largest shard, that of the first rank; of every shard, where the shards are equal (see `rank_shape`).

    shape: the global shape. layout: one placement per axis of the mesh; ValueError where their numbers differ.
    """
    local = list(shape)
    for placement, axis in zip(layout, mesh.axes, strict=True):
        if isinstance(placement, Shard):
            local[placement.dim] = -(-local[placement.dim] // axis.size)
    return tuple(local)


def is_even(shape: tuple[int, ...], layout: Layout, mesh: Mesh) -> bool:
    """Whether every rank's shard has the same shape."""
    return not any(size % math.prod(sharding_sizes(layout, mesh, dim)) for dim, size in enumerate(shape))


def rank_bounds(shape: tuple[int, ...], layout: Layout, mesh: Mesh, coordinate: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Per dim the first index and the end of the shard of the rank at `coordinate`."""
    ranges = []
    for dim, size in enumerate(shape):
        bounds, k = chunk_bounds(size, sharding_sizes(layout, mesh, dim)), part_index(layout, mesh, coordinate, dim)
        ranges.append((bounds[k], bounds[k + 1]))
    return tuple(ranges)


def rank_shape(shape: tuple[int, ...], layout: Layout, mesh: Mesh, coordinate: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the shard of the rank at `coordinate`."""
    return tuple(hi - lo for lo, hi in rank_bounds(shape, layout, mesh, coordinate))


def local_numel(shape: tuple[int, ...], layout: Layout, mesh: Mesh) -> int:
    """The number of elements of the largest shard."""
    return math.prod(local_shape(shape, layout, mesh))


def why_illegal(shape: tuple[int, ...], layout: Layout, mesh: Mesh) -> str | None:
    """None when the layout is legal for the global shape on the mesh, else a sentence that says why not."""
    if len(layout) != len(mesh.axes):
        return f"layout {text(layout)} has {len(layout)} placements, the mesh {shape_text(mesh.shape)} has {len(mesh.axes)} axes"
    for placement in layout:
        if isinstance(placement, Shard) and placement.dim >= len(shape):
            return f"layout {text(layout)} shards dim {placement.dim}, the tensor has {len(shape)} dims"
    for dim, size in enumerate(shape):
        sizes = sharding_sizes(layout, mesh, dim)
        if size % (parts := math.prod(sizes)) and leaves_empty(size, sizes):
            return f"layout {text(layout)} shards dim {dim} of size {size} into {parts} parts, which leaves some ranks without any"
    kinds = {p.reduce_op for p in layout if isinstance(p, Partial)}
    return f"layout {text(layout)} mixes partial kinds {sorted(kinds)}" if len(kinds) > 1 else None


def is_legal(shape: tuple[int, ...], layout: Layout, mesh: Mesh) -> bool:
    """Whether a tensor of this global shape can have the layout, no rank's shard empty (`why_illegal` says what is wrong)."""
    return why_illegal(shape, layout, mesh) is None


def all_layouts(shape: tuple[int, ...], mesh: Mesh) -> tuple[Layout, ...]:
    """Every legal layout without Partial, sharded dims first and R last; an axis of size 1 is always R."""
    per_axis = [[*(S(d) for d in range(len(shape))), R] if axis.size > 1 else [R] for axis in mesh.axes]
    return tuple(layout for layout in product(*per_axis) if is_legal(shape, layout, mesh))


def has_partial(layout: Layout) -> bool:
    return any(isinstance(p, Partial) for p in layout)


def part_index(layout: Layout, mesh: Mesh, coordinate: tuple[int, ...], dim: int) -> int:
    """The number of the part of `dim`, of the `shards_of` parts, that the rank at `coordinate` holds (earlier axes are major)."""
    index = 0
    for placement, axis, c in zip(layout, mesh.axes, coordinate, strict=True):
        if isinstance(placement, Shard) and placement.dim == dim:
            index = index * axis.size + c
    return index
