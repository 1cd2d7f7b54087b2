"""How a tensor lies in blocks on a mesh of any number of axes: ordered mesh axes per dim, a block size, and Partial axes.

A dim of S elements that the axes (a_1, .., a_k), major to minor, cut in blocks of b is dealt to N = n_1 .. n_k parts:

    owner(j) = (j // b) mod N,          the part of a rank = its row-major coordinate over (a_1, .., a_k)
    extent(r) = (q // N) b + (b if r < q mod N, S mod b if r = q mod N, else 0),     q = S // b              (`extents`)

b >= S / N is a block layout, smaller b block-cyclic. Extents never grow with r, so part 0 is the largest (`largest`). b = CHUNKS
(0) stands for what torch.chunk does axis by axis (ceil-sized parts of parts), where that is no block layout: DTensor's uneven
dims that several axes cut. An axis cuts at most one dim; on a Partial axis the value is the reduction over what its ranks hold.

    legal:  N <= S, and no rank is empty, b <= max(1, (S - 1) // (N - 1)), or the parts are torch.chunk's, b = ceil(S / N)
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

CHUNKS = 0  # block "size" of nested torch.chunk parts
UNSHARDED = -1  # block size of a dim that no axis cuts
Sizes = tuple[int, ...]
Axes = tuple[int, ...]


@dataclass(frozen=True)
class BlockLayout:
    """axes[d]: the mesh axes that cut dim d, major to minor. blocks[d]: its block size, WHOLE where nothing cuts it."""

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
        """The mesh and the layout that `text` wrote; ValueError on anything else."""
        found = re.fullmatch(r"D_\[([\d,]+)\]⊥\{(.*)\}\(([^()]*)\)(?:P\(([\d,]+)\))?", written.replace(" ", ""))
        parts = re.findall(r"\(([\d,]*)\)|(∅)|(\d+)", found[2]) if found else []
        names = found[3].split(",") if found else []
        known = [b in ("∅", "chunk") or b.isdigit() for b in names]
        if not found or len(parts) != len(names) or not all(known):
            raise ValueError(f"layout is {written!r}; expected the form D_[4,2]⊥{{(0,1),∅}}(100,∅): mesh, axes and block size per dim")
        axes = tuple(tuple(int(a) for a in (several or one).split(",") if a) for several, _, one in parts)
        blocks = tuple({"∅": UNSHARDED, "chunk": CHUNKS}.get(b) if not b.isdigit() else int(b) for b in names)
        partial = tuple(int(a) for a in found[4].split(",")) if found[4] else ()
        return tuple(int(n) for n in found[1].split(",")), BlockLayout(axes, blocks, partial)  # type: ignore[arg-type]


def _axes_text(axes: Axes) -> str:
    return "∅" if not axes else str(axes[0]) if len(axes) == 1 else f"({','.join(map(str, axes))})"


def parts_of(axes: Axes, mesh: Sizes) -> int:
    """Into how many parts the axes cut a dim."""
    n = 1
    for a in axes:
        n *= mesh[a]
    return n


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


# -- legality ----------------------------------------------------------------------------------------------------------------------


def fits(size: int, n: int, block: int) -> bool:
    """Whether a dim can be dealt to n parts in blocks of this size."""
    return n <= size and 1 <= block and (block <= max(1, (size - 1) // (n - 1) if n > 1 else size) or block == ceil_div(size, n))


def why_not(shape: Sizes, layout: BlockLayout, mesh: Sizes) -> str | None:
    """None for a layout that the tensor can have on the mesh, else a sentence that says why not."""
    if len(layout.axes) != len(shape):
        return f"the layout has {len(layout.axes)} dims, the tensor {len(shape)}; give axes and a block size for each dim"
    used = [a for axes in (*layout.axes, layout.partial) for a in axes]
    for a in used:
        if not 0 <= a < len(mesh):
            return f"the layout uses mesh axis {a}, the mesh {list(mesh)} has {len(mesh)} axes; use 0 to {len(mesh) - 1}"
        if used.count(a) > 1:
            return f"the layout uses mesh axis {a} twice; an axis can cut one dim, once"
    for d, (size, axes, b) in enumerate(zip(shape, layout.axes, layout.blocks, strict=True)):
        n = parts_of(axes, mesh)
        if n > size:
            return f"dim {d} of size {size} is cut into {n} parts; expected at most {size}, so that every rank holds something"
        if axes and b != CHUNKS and not fits(size, n, b):
            most = max(1, (size - 1) // (n - 1) if n > 1 else size, ceil_div(size, n))
            return f"dim {d} of size {size} on {n} parts has block size {b}; expected 1 to {most}"
    return None


# -- local sizes -------------------------------------------------------------------------------------------------------------------


def largest(size: int, sizes: Sizes, block: int) -> int:
    """The elements that the fullest part of a dim holds, cut by axes of `sizes`."""
    if not sizes:
        return size
    if block == CHUNKS:
        for n in sizes:
            size = ceil_div(size, n)
        return size
    q, r = divmod(size, block)
    p, last = divmod(q, math.prod(sizes))
    return p * block + (block if last else r)


@lru_cache(maxsize=4096)
def chunk_bounds(size: int, sizes: Sizes) -> tuple[int, ...]:
    """Where the parts of nested torch.chunk begin, and the end."""
    bounds = [(0, size)]
    for n in sizes:
        step = [(lo, hi, ceil_div(hi - lo, n)) for lo, hi in bounds]
        bounds = [(min(hi, lo + i * c), min(hi, lo + (i + 1) * c)) for lo, hi, c in step for i in range(n)]
    return (*(lo for lo, _ in bounds), size)


@lru_cache(maxsize=65536)
def chunk_block(size: int, sizes: Sizes) -> int:
    """The block size whose parts are those of nested torch.chunk; CHUNKS where there is none."""
    b = ceil_div(size, n := math.prod(sizes))
    if size % n == 0 or len(sizes) == 1:
        return max(1, b)
    same = all(lo == min(size, r * b) for r, lo in enumerate(chunk_bounds(size, sizes)))
    return b if same else CHUNKS


def extents(size: int, sizes: Sizes, block: int) -> np.ndarray:
    """The elements of every part."""
    n = math.prod(sizes)
    if block == CHUNKS:
        return np.diff(np.array(chunk_bounds(size, sizes)))
    if not sizes:
        return np.array([size])
    q, rest = divmod(size, block)
    p, last = divmod(q, n)
    r = np.arange(n)
    return p * block + np.where(r < last, block, np.where(r == last, rest, 0))


def indices(size: int, sizes: Sizes, block: int, part: int) -> np.ndarray:
    """The indices of a dim that a part holds, ascending."""
    if not sizes:
        return np.arange(size)
    if block == CHUNKS:
        bounds = chunk_bounds(size, sizes)
        return np.arange(bounds[part], bounds[part + 1])
    j = np.arange(size)
    return j[(j // block) % math.prod(sizes) == part]


def axis_sizes(axes: Axes, mesh: Sizes) -> Sizes:
    return tuple(mesh[a] for a in axes)


def largest_shape(shape: Sizes, layout: BlockLayout, mesh: Sizes) -> Sizes:
    """The shape of the fullest rank's part."""
    return tuple(largest(s, axis_sizes(axes, mesh), b) for s, axes, b in zip(shape, layout.axes, layout.blocks, strict=True))


def local_elements(shape: Sizes, layout: BlockLayout, mesh: Sizes) -> int:
    """The elements that the fullest rank holds."""
    return math.prod(largest_shape(shape, layout, mesh))


def part_of(axes: Axes, mesh: Sizes, coordinate: Sizes) -> int:
    """The part of a dim that the rank at `coordinate` holds."""
    index = 0
    for a in axes:
        index = index * mesh[a] + coordinate[a]
    return index


def local_indices(shape: Sizes, layout: BlockLayout, mesh: Sizes, coordinate: Sizes) -> tuple[np.ndarray, ...]:
    """Per dim the global indices that a rank holds; it holds their product."""
    return tuple(
        indices(s, axis_sizes(axes, mesh), b, part_of(axes, mesh, coordinate))
        for s, axes, b in zip(shape, layout.axes, layout.blocks, strict=True)
    )


def canonical(shape: Sizes, layout: BlockLayout, mesh: Sizes) -> BlockLayout:
    """One name per layout: CHUNKS becomes a block size where one means the same, a block that is never repeated its smallest size."""
    blocks = []
    for s, axes, b in zip(shape, layout.axes, layout.blocks, strict=True):
        sizes = axis_sizes(axes, mesh)
        blocks.append(chunk_block(s, sizes) if axes and b == CHUNKS else b)
    kept = [axes if parts_of(axes, mesh) > 1 else () for axes in layout.axes]  # axes of size 1 cut nothing
    kept = [tuple(a for a in axes if mesh[a] > 1) for axes in kept]
    partial = tuple(sorted(a for a in layout.partial if mesh[a] > 1))
    return BlockLayout(tuple(kept), tuple(blocks), partial, layout.reduce_op)
