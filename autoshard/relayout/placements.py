"""Conversion between DTensor placements and block layouts.

    S(d) on axes a < b, left to right          axes[d] = (a, b), torch.chunk's parts: b = S / N where N divides S
    shard order {d: (b, a)}                     axes[d] = (b, a), the same block size
    _StridedShard(d, split_factor f) on a       axes[d] = (a,), block size S / (f N): block-cyclic, f blocks per rank
    R, P                                        on no dim; in partial

From a block layout, `to_placements` returns plain placements. They are exact for torch.chunk's parts in ascending order of axes; the
same parts in another order of axes need the shard order as well (`order_of`). Block-cyclic dims have no plain placement.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from autoshard.layout import Layout, P, Partial, R, S
from autoshard.relayout.blocks import UNSHARDED, Axes, BlockLayout, Sizes, axis_sizes, chunk_block, parts_of

Order = Mapping[int, Axes]  # dim -> axes, major to minor


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
