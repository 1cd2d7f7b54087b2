"""Collectives inside an op: what a row's local program reduces over the axis before it is done.

Listed as (collective, axis, bytes that each rank puts in); `cost` prices them, `lower.kernels` runs the same ones.
"""

from __future__ import annotations

import math

from autoshard.graph import Op
from autoshard.layout import Layout, local_shape
from autoshard.mesh import Mesh
from autoshard.strategies.rows import Inputs, argument

Internal = tuple[str, int, int]


def internal_collectives(op: Op, inputs: Inputs, layouts: tuple[Layout, ...], mesh: Mesh) -> list[Internal]:
    """The collectives of `op` when its inputs lie as `layouts` say."""
    if op.target in ("aten._log_softmax.default", "aten._softmax.default"):
        return _over_dim(op, inputs, layouts, mesh, count=2)  # max, then the sum of exponentials
    if op.target in ("aten._log_softmax_backward_data.default", "aten._softmax_backward_data.default"):
        return _over_dim(op, inputs, layouts, mesh, count=1, position=2)
    if op.target == "aten.nll_loss_forward.default" and argument(op, 3, "reduction") != 0:  # the total weight of a batch that is cut
        return [("all_reduce", axis, inputs[0].itemsize) for axis in _cutting(layouts[0], 0)]
    if op.target in BATCH_NORMS:  # sums and squares forward, two sums in one backward
        position, per_reduction, count = BATCH_NORMS[op.target]
        channels = local_shape(inputs[0].shape, layouts[0], mesh)[1] * 4 * per_reduction
        return [("all_reduce", axis, channels) for axis in _cutting(layouts[0], 0) for _ in range(count)] if argument(op, position) else []
    return []


# target: (position of `training`, numbers per channel in a reduction, reductions)
BATCH_NORMS = {
    "aten._native_batch_norm_legit_functional.default": (5, 1, 2),
    "aten.native_batch_norm_backward.default": (7, 2, 1),
}


def _cutting(layout: Layout, dim: int) -> list[int]:
    return [k for k, placement in enumerate(layout) if placement.is_shard(dim)]


def _over_dim(op: Op, inputs: Inputs, layouts: tuple[Layout, ...], mesh: Mesh, *, count: int, position: int = 1) -> list[Internal]:
    dim = int(argument(op, position, "dim")) % len(inputs[0].shape)
    local = local_shape(inputs[0].shape, layouts[0], mesh)
    rest = math.prod(n for d, n in enumerate(local) if d != dim) * inputs[0].itemsize
    return [("all_reduce", axis, rest) for axis in _cutting(layouts[0], dim) for _ in range(count)]
