"""Block layouts of a tensor on a mesh of any number of axes: ordered mesh axes per dim, a block size per dim, and Partial axes.

A dim of S elements that the axes (a_1, .., a_k), major to minor, shard in blocks of b is dealt to N = n_1 .. n_k parts:

    owner(j) = (j // b) mod N,          the part of a rank = its row-major coordinate over (a_1, .., a_k)
    extent(r) = (q // N) b + (b if r < q mod N, S mod b if r = q mod N, else 0),     q = S // b              (`extents`)

b >= S / N is a block layout, a smaller b is block-cyclic. Extents never grow with r, so part 0 is the largest (`largest`). b = CHUNKS
(0) stands for the parts of torch.chunk applied axis by axis (ceil-sized parts of parts) where no block size has these parts: uneven
dims of a DTensor that several axes shard. An axis shards at most one dim; on a Partial axis the value is the reduction over the
tensors of its ranks.

    legal:  N <= S, and either no rank is empty, b <= max(1, (S - 1) // (N - 1)), or the parts are torch.chunk's, b = ceil(S / N)

DTensor placements as block layouts:

    S(d) on axes a < b, left to right          axes[d] = (a, b), torch.chunk's parts: b = S / N where N divides S
    shard order {d: (b, a)}                     axes[d] = (b, a), the same block size
    _StridedShard(d, split_factor f) on a       axes[d] = (a,), block size S / (f N): block-cyclic, f blocks per rank
    R, P                                        on no dim; in partial

From a block layout, `to_placements` returns plain placements. They are exact for torch.chunk's parts in ascending order of axes; the
same parts in another order of axes need the shard order as well (`order_of`). Block-cyclic dims have no plain placement.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from autoshard.layout import Layout, P, Partial, R, S, chunk_bounds

CHUNKS = 0  # block "size" of nested torch.chunk parts
UNSHARDED = -1  # block size of a dim that no axis shards
Sizes = tuple[int, ...]
Axes = tuple[int, ...]
Order = Mapping[int, Axes]  # dim -> axes, major to minor


@dataclass(frozen=True)
class BlockLayout:
    """axes[d]: the mesh axes that shard dim d, major to minor. blocks[d]: its block size, UNSHARDED where no axis shards it."""

    axes: tuple[Axes, ...]
    blocks: tuple[int, ...]
    partial: Axes = ()  # ascending
    reduce_op: str = "sum"

    def __post_init__(self) -> None:
        blocks = tuple(b if axes else UNSHARDED for axes, b in zip(self.axes, self.blocks, strict=True))
        object.__setattr__(self, "blocks", blocks)
        object.__setattr__(self, "reduce_op", self.reduce_op if self.partial else "sum")

    def text(self, mesh: Sizes) -> str:
        """`D_[4,2,4]⊥{(0,1),∅,∅,∅}(1,∅,∅,∅)`, with `P(2)` after it for a partial axis 2."""
        blocks = ",".join("∅" if b == UNSHARDED else "chunk" if b == CHUNKS else str(b) for b in self.blocks)
        partial = f"P({','.join(map(str, self.partial))})" if self.partial else ""
        return f"D_[{','.join(map(str, mesh))}]⊥{{{','.join(map(_axes_text, self.axes))}}}({blocks}){partial}"

    @staticmethod
    def parse(written: str) -> tuple[Sizes, BlockLayout]:
        """The mesh and the layout of a string that `text` returned; ValueError on anything else."""
        match = re.fullmatch(r"D_\[([\d,]+)\]⊥\{(.*)\}\(([^()]*)\)(?:P\(([\d,]+)\))?", written.replace(" ", ""))
        parts = re.findall(r"\(([\d,]*)\)|(∅)|(\d+)", match[2]) if match else []
        names = match[3].split(",") if match else []
        known = [b in ("∅", "chunk") or b.isdigit() for b in names]
        if not match or len(parts) != len(names) or not all(known):
            raise ValueError(f"layout is {written!r}; expected the form D_[4,2]⊥{{(0,1),∅}}(100,∅): mesh, axes and block size per dim")
        axes = tuple(tuple(int(a) for a in (several or one).split(",") if a) for several, _, one in parts)
        blocks = tuple({"∅": UNSHARDED, "chunk": CHUNKS}.get(b) if not b.isdigit() else int(b) for b in names)
        partial = tuple(int(a) for a in match[4].split(",")) if match[4] else ()
        return tuple(int(n) for n in match[1].split(",")), BlockLayout(axes, blocks, partial)  # type: ignore[arg-type]


def _axes_text(axes: Axes) -> str:
    return "∅" if not axes else str(axes[0]) if len(axes) == 1 else f"({','.join(map(str, axes))})"


def parts_of(axes: Axes, mesh: Sizes) -> int:
    """The number of parts of a dim that the axes shard."""
    return math.prod([mesh[a] for a in axes])


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


# -- legality ----------------------------------------------------------------------------------------------------------------------


def fits(size: int, n: int, block: int) -> bool:
    """Whether a dim can be sharded into n parts in blocks of this size."""
    return n <= size and 1 <= block and (block <= max(1, (size - 1) // (n - 1) if n > 1 else size) or block == ceil_div(size, n))


def why_not(shape: Sizes, layout: BlockLayout, mesh: Sizes) -> str | None:
    """None where the layout is legal for the tensor on the mesh, else a sentence that says why not."""
    if len(layout.axes) != len(shape):
        return f"the layout has {len(layout.axes)} dims, the tensor {len(shape)}; give axes and a block size for each dim"
    used = [a for axes in (*layout.axes, layout.partial) for a in axes]
    for a in used:
        if not 0 <= a < len(mesh):
            return f"the layout uses mesh axis {a}, the mesh {list(mesh)} has {len(mesh)} axes; use 0 to {len(mesh) - 1}"
        if used.count(a) > 1:
            return f"the layout uses mesh axis {a} twice; an axis can shard one dim, once"
    for d, (size, axes, b) in enumerate(zip(shape, layout.axes, layout.blocks, strict=True)):
        n = parts_of(axes, mesh)
        if n > size:
            return f"dim {d} of size {size} is sharded into {n} parts; expected at most {size}, so that no rank is empty"
        if axes and b != CHUNKS and not fits(size, n, b):
            most = max(1, (size - 1) // (n - 1) if n > 1 else size, ceil_div(size, n))
            return f"dim {d} of size {size} on {n} parts has block size {b}; expected 1 to {most}"
    return None


# -- local sizes -------------------------------------------------------------------------------------------------------------------


def largest(size: int, sizes: Sizes, block: int) -> int:
    """The number of elements of the largest part of a dim that axes of `sizes` shard."""
    if not sizes:
        return size
    if block == CHUNKS:
        for n in sizes:
            size = ceil_div(size, n)
        return size
    q, r = divmod(size, block)
    p, last = divmod(q, math.prod(sizes))
    return p * block + (block if last else r)


@lru_cache(maxsize=65536)
def chunk_block(size: int, sizes: Sizes) -> int:
    """The block size whose parts are those of nested torch.chunk; CHUNKS where no block size has them."""
    b = ceil_div(size, n := math.prod(sizes))
    if size % n == 0 or len(sizes) == 1:
        return max(1, b)
    same = all(lo == min(size, r * b) for r, lo in enumerate(chunk_bounds(size, sizes)))
    return b if same else CHUNKS


def extents(size: int, sizes: Sizes, block: int) -> np.ndarray:
    """The number of elements of every part."""
    n = math.prod(sizes)
    if block == CHUNKS:
        return np.diff(np.array(chunk_bounds(size, sizes)))
    if not sizes:
        return np.array([size])
    q, rest = divmod(size, block)
    p, last = divmod(q, n)
    r = np.arange(n)
    return p * block + np.where(r < last, block, np.where(r == last, rest, 0))


def owners(size: int, sizes: Sizes, block: int, j: np.ndarray) -> np.ndarray:
    """The number of the part that holds each of these indices of a dim."""
    if not sizes:
        return np.zeros_like(j)
    if block == CHUNKS:
        return np.searchsorted(np.array(chunk_bounds(size, sizes)), j, side="right") - 1
    return j // block % math.prod(sizes)


def indices(size: int, sizes: Sizes, block: int, part: int) -> np.ndarray:
    """The indices of a dim in one of its parts, ascending."""
    return np.flatnonzero(owners(size, sizes, block, np.arange(size)) == part)


def axis_sizes(axes: Axes, mesh: Sizes) -> Sizes:
    return tuple(mesh[a] for a in axes)


def local_elements(shape: Sizes, layout: BlockLayout, mesh: Sizes) -> int:
    """The number of elements of the largest shard."""
    return math.prod(largest(s, axis_sizes(axes, mesh), b) for s, axes, b in zip(shape, layout.axes, layout.blocks, strict=True))


def part_of(axes: Axes, mesh: Sizes, coordinate: Sequence[Any] | np.ndarray) -> Any:
    """The number of the part of a dim that the rank at `coordinate` holds; of many ranks, whose coordinates are arrays, an array."""
    index: Any = 0
    for a in axes:
        index = index * mesh[a] + coordinate[a]
    return index


def local_indices(shape: Sizes, layout: BlockLayout, mesh: Sizes, coordinate: Sizes) -> tuple[np.ndarray, ...]:
    """Per dim the global indices of a rank's shard; the shard is their product."""
    return tuple(
        indices(s, axis_sizes(axes, mesh), b, part_of(axes, mesh, coordinate))
        for s, axes, b in zip(shape, layout.axes, layout.blocks, strict=True)
    )


def canonical(shape: Sizes, layout: BlockLayout, mesh: Sizes) -> BlockLayout:
    """One form for equal layouts: CHUNKS becomes a block size where one has the same parts, and axes of size 1 are left out."""
    dims = zip(shape, layout.axes, layout.blocks, strict=True)
    blocks = tuple(chunk_block(s, axis_sizes(axes, mesh)) if axes and b == CHUNKS else b for s, axes, b in dims)
    kept = tuple(tuple(a for a in axes if mesh[a] > 1) for axes in layout.axes)
    partial = tuple(sorted(a for a in layout.partial if mesh[a] > 1))
    return BlockLayout(kept, blocks, partial, layout.reduce_op)


def from_placements(shape: Sizes, layout: Sequence[Any], mesh: Sizes, order: Order | None = None) -> BlockLayout:
    """The block layout of DTensor placements. order: of the dims whose axes are not ordered left to right."""
    axes: list[list[int]] = [[] for _ in shape]
    partial, ops, strided = [], set(), {}
    for a, placement in enumerate(layout):
        if isinstance(placement, Partial):
            partial.append(a)
            ops.add(placement.reduce_op)
        elif placement.is_replicate():
            continue
        elif 0 <= placement.dim < len(shape):
            axes[placement.dim].append(a)
            if hasattr(placement, "split_factor"):
                strided[placement.dim] = placement.split_factor
        else:
            raise ValueError(f"placement {placement} shards dim {placement.dim}, the tensor has {len(shape)} dims")
    if len(ops) > 1:
        raise ValueError(f"the layout mixes partial kinds {sorted(ops)}; expected one")
    ordered = [tuple((order or {}).get(d, some)) for d, some in enumerate(axes)]
    blocks = []
    for d, some in enumerate(ordered):
        sizes = axis_sizes(some, mesh)
        n = parts_of(some, mesh)
        if d in strided:
            if len(some) > 1 or shape[d] % (n * strided[d]):
                raise ValueError(f"a strided shard of dim {d} (size {shape[d]}) must be on one axis that divides it, not on {list(some)}")
            blocks.append(shape[d] // (n * strided[d]))
        else:
            blocks.append(chunk_block(shape[d], sizes) if some else UNSHARDED)
    return BlockLayout(tuple(ordered), tuple(blocks), tuple(partial), ops.pop() if ops else "sum")


def order_of(layout: BlockLayout) -> dict[int, Axes]:
    """The shard order: the axes of every sharded dim, major to minor."""
    return {d: axes for d, axes in enumerate(layout.axes) if axes}


def to_placements(layout: BlockLayout, num_axes: int) -> Layout:
    """Plain placements; together with `order_of` they are exact where every sharded dim has torch.chunk's parts."""
    placements = [R] * num_axes
    for d, axes in enumerate(layout.axes):
        for a in axes:
            placements[a] = S(d)
    for a in layout.partial:
        placements[a] = P(layout.reduce_op)
    return tuple(placements)
