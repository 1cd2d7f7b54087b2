"""DTensor's layouts among block layouts, both ways.

    S(d) on axes a < b, left to right          axes[d] = (a, b), torch.chunk's parts: b = S / N where N divides S
    shard order {d: (b, a)}                     axes[d] = (b, a), the same block size
    _StridedShard(d, split_factor f) on a       axes[d] = (a,), block size S / (f N): block-cyclic, each rank f blocks
    R, P                                        on no dim; in partial

Back: plain placements say what torch.chunk's parts in ascending order of axes are; `shard_order` the rest of the block layouts;
a strided shard the block-cyclic dims that one axis cuts evenly. Whatever else there is, DTensor has no word for (`to_placements`
raises ValueError).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from autoshard.layout import Layout, P, Partial, R, S
from autoshard.relayout.blocks import CHUNKS, UNSHARDED, Axes, BlockLayout, Sizes, axis_sizes, chunk_block, parts_of

Order = Mapping[int, Axes]  # dim -> axes, major to minor


def from_placements(shape: Sizes, layout: Sequence[Any], mesh: Sizes, order: Order | None = None) -> BlockLayout:
    """The block layout of DTensor placements. order: where axes cut a dim in another order than left to right."""
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
            raise ValueError(f"placement {placement} cuts dim {placement.dim}, the tensor has {len(shape)} dims")
    if len(ops) > 1:
        raise ValueError(f"the layout mixes partial kinds {sorted(ops)}; expected one")
    ordered = [tuple((order or {}).get(d, some)) for d, some in enumerate(axes)]
    blocks = []
    for d, some in enumerate(ordered):
        sizes = axis_sizes(some, mesh)
        n = parts_of(some, mesh)
        if d in strided:
            if len(some) > 1 or shape[d] % (n * strided[d]):
                raise ValueError(f"a strided shard of dim {d} (size {shape[d]}) is known for one axis that divides it, not {list(some)}")
            blocks.append(shape[d] // (n * strided[d]))
        else:
            blocks.append(chunk_block(shape[d], sizes) if some else UNSHARDED)
    return BlockLayout(tuple(ordered), tuple(blocks), tuple(partial), ops.pop() if ops else "sum")


def is_chunked(shape: Sizes, layout: BlockLayout, mesh: Sizes) -> bool:
    """Whether every cut dim has torch.chunk's parts, in some order of axes."""
    cuts = zip(shape, layout.axes, layout.blocks, strict=True)
    return all(not axes or b == CHUNKS or b == chunk_block(s, axis_sizes(axes, mesh)) for s, axes, b in cuts)


def order_of(layout: BlockLayout) -> dict[int, Axes]:
    """The shard order: the axes of every cut dim, major to minor."""
    return {d: axes for d, axes in enumerate(layout.axes) if axes}


def to_placements(layout: BlockLayout, num_axes: int) -> Layout:
    """Plain placements; right for layouts that are chunked, together with `order_of`."""
    found = [R] * num_axes
    for d, axes in enumerate(layout.axes):
        for a in axes:
            found[a] = S(d)
    for a in layout.partial:
        found[a] = P(layout.reduce_op)
    return tuple(found)


def strided_factors(shape: Sizes, layout: BlockLayout, mesh: Sizes) -> dict[int, int]:
    """dim -> split_factor of the _StridedShard that says a block-cyclic dim. ValueError where none does."""
    found = {}
    for d, (size, axes, b) in enumerate(zip(shape, layout.axes, layout.blocks, strict=True)):
        if not axes or b == chunk_block(size, axis_sizes(axes, mesh)) or b == CHUNKS:
            continue
        n = parts_of(axes, mesh)
        if len(axes) > 1 or size % (n * b):
            raise ValueError(
                f"dim {d} of size {size} on axes {list(axes)} in blocks of {b} has no placement; one axis and equal parts have"
            )
        found[d] = size // (n * b)
    return found
