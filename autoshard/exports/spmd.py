"""Layouts as types of spmd_types, which torchtitan's and Megatron's code is checked with.

    S(dim)    V on the axis; at dim the PartitionSpec names it, the slower axis first where several shard one dim
    R         R: all ranks hold the same; a graph without autograd has no other kind of equal values (I)
    P         P: a sum that is still to be made; other reductions have no type
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

from autoshard.layout import Layout


@cache
def _package() -> Any:
    """None where it isn't installed."""
    try:
        import spmd_types
    except ImportError:
        return None
    return spmd_types


def spmd_type(layout: Layout, axes: Sequence[str], dims: int) -> Any:
    """The SpmdType of a local tensor of so many dims on axes of these names; None where it has none, or the package isn't installed."""
    if (spmd := _package()) is None or any(p.is_partial() and not p.is_partial("sum") for p in layout):
        return None
    sharded = [tuple(axis for axis, p in zip(axes, layout, strict=True) if p.is_shard(dim)) for dim in range(dims)]
    local = {axis: spmd.V if p.is_shard() else spmd.P if p.is_partial() else spmd.R for axis, p in zip(axes, layout, strict=True)}
    return spmd.SpmdType(local, spmd.PartitionSpec(*(of if len(of) > 1 else of[0] if of else None for of in sharded)))
