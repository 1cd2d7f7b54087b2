"""The collectives that the local program of an op runs, and the bytes of the temporary tensors that it holds.

Collectives that the kernel waits for are `internal_collectives`; a program that computes while it sends has `internal_stages` (attention).

A collective is (its name, mesh axis, input bytes of each rank). `cost` computes its seconds; `lower.kernels.table` runs the same
collectives. Bytes are the peak of the temporary tensors of `lower.kernels.table`, besides the op's inputs and outputs.
"""

import math

from autoshard.graph import BACKWARD, FORWARD, Op, drawn_by, is_drawn_in_full, is_random
from autoshard.layout import Layout, local_shape
from autoshard.mesh import Mesh
from autoshard.strategies.attention import ATTENTION, attention_bytes
from autoshard.strategies.experts import expert_bytes, expert_collectives, expert_passes, is_experts
from autoshard.strategies.matmuls_and_losses import loss_bytes, loss_collectives
from autoshard.strategies.recurrent import DELTA_RULE, delta_rule_bytes
from autoshard.strategies.rows import Inputs, argument

InternalCollective = tuple[str, int, int]


def internal_collectives(op: Op, inputs: Inputs, layouts: tuple[Layout, ...], mesh: Mesh) -> list[InternalCollective]:
    """The collectives of the local program of `op` with these input layouts."""
    if is_experts(op):
        return expert_collectives(op, inputs, layouts, mesh)
    if op.target in CHUNKED:
        return loss_collectives(op, inputs, layouts, mesh)
    if op.target in ("aten._log_softmax.default", "aten._softmax.default"):
        return _over_dim(op, inputs, layouts, mesh, 1, count=2)  # the maximum, then the sum of exponentials
    if op.target in ("aten._log_softmax_backward_data.default", "aten._softmax_backward_data.default"):
        return _over_dim(op, inputs, layouts, mesh, 2)
    if op.target in NLL_LOSSES and argument(op, 3, "reduction") != 0:  # the total weight of a sharded batch
        axes = [axis for axis, p in enumerate(layouts[0]) if p.is_shard() and p.dim != 1]  # type: ignore[attr-defined]
        return [("all_reduce", axis, inputs[0].itemsize) for axis in axes]
    if op.target in BATCH_NORMS:  # sums and squares forward, two sums in one backward
        position, per_reduction, count = BATCH_NORMS[op.target]
        channels = local_shape(inputs[0].shape, layouts[0], mesh)[1] * 4 * per_reduction
        axes = _axes_that_shard(layouts[0], 0) if argument(op, position) else []
        return [("all_reduce", axis, channels) for axis in axes for _ in range(count)]
    if op.target in WEIGHT_NORMS:  # squares of v, or the products of v with the gradient
        dim = int(argument(op, WEIGHT_NORMS[op.target], "dim", 0)) % len(inputs[0].shape)
        norms = local_shape(inputs[0].shape, layouts[0], mesh)[dim] * 4
        return [("all_reduce", k, norms) for k, p in enumerate(layouts[0]) if p.is_shard() and not p.is_shard(dim)]
    return []


def internal_bytes(op: Op, inputs: Inputs, layouts: tuple[Layout, ...], mesh: Mesh) -> int:
    """Peak bytes of the local program of `op` besides its inputs and outputs; 0 where the local program is the op itself."""
    if op.target in ATTENTION:
        return attention_bytes(op, inputs, layouts, mesh)
    if op.target in DELTA_RULE:
        return delta_rule_bytes(op, inputs, layouts, mesh)
    if is_experts(op):
        return expert_bytes(op, inputs, layouts, mesh)
    if op.target in CHUNKED:
        return loss_bytes(op, inputs, layouts, mesh)
    if is_random(op):  # the numbers of all ranks, and a mask scaled
        is_sharded = any(p.is_shard() for layout in layouts for p in layout)
        return 2 * drawn_by(op).numel * inputs[0].itemsize if is_sharded and is_drawn_in_full(op) else 0
    if op.target in WIDE_TENSORS and op.fused is None:  # kernels of a compiled program compute them on their way
        position, dim, tensors, widened = WIDE_TENSORS[op.target]
        dim = dim if position is None else int(argument(op, position, "dim")) % len(inputs[0].shape)
        if _axes_that_shard(layouts[0], dim):
            local = math.prod(local_shape(inputs[0].shape, layouts[0], mesh))
            narrow = inputs[0].itemsize < WIDE
            return WIDE * local * (tensors + (widened if narrow else 0))
    if _puts_by_position(op, inputs, layouts):  # a value for each position
        return math.prod(local_shape(inputs[0].shape, layouts[0], mesh)) * inputs[0].itemsize
    if op.target == "aten.embedding.default" and _axes_that_shard(layouts[0], 0):
        # the looked up rows, before those of other ranks are masked
        tokens = math.prod(local_shape(inputs[1].shape, layouts[1], mesh))
        return tokens * local_shape(inputs[0].shape, layouts[0], mesh)[1] * inputs[0].itemsize
    return 0


def internal_passes(op: Op, inputs: Inputs, layouts: tuple[Layout, ...], mesh: Mesh) -> int:
    """Bytes that the local program of `op` reads and writes besides those of the op's own kernel: that of a softmax over a sharded dim is
    several kernels, of which a compiled program joins all but one."""
    if is_experts(op):
        return expert_passes(op, inputs, layouts, mesh)
    if op.alias is not None and _puts_by_position(op, inputs, layouts):  # it can't write in place
        return 2 * math.prod(local_shape(inputs[0].shape, layouts[0], mesh)) * inputs[0].itemsize
    if op.target not in PASSES or not _over_dim(op, inputs, layouts, mesh, WIDE_TENSORS[op.target][0] or 0):
        return 0
    passes = PASSES[op.target] if op.fused is None else 1
    return passes * WIDE * math.prod(local_shape(inputs[0].shape, layouts[0], mesh))


def _puts_by_position(op: Op, inputs: Inputs, layouts: tuple[Layout, ...]) -> bool:
    """Whether it puts several rows into shards of their dim, for which each rank selects a row for each of its positions."""
    if op.target != "aten.index_copy.default" or max(inputs[1].shape, default=1) == 1 or inputs[2].shape == ():
        return False
    return bool(_axes_that_shard(layouts[0], int(argument(op, 1, "dim")) % len(inputs[0].shape)))


CHUNKED = (FORWARD, BACKWARD)
WIDE = 4  # bytes per element: these kernels compute in float32
# target: (position of `dim`, or None and the sharded dim, tensors of the input's size, how many more if the input's dtype is narrow)
WIDE_TENSORS: dict[str, tuple[int | None, int, int, int]] = {
    "aten._log_softmax.default": (1, 0, 1, 2),
    "aten._softmax.default": (1, 0, 1, 2),
    "aten._log_softmax_backward_data.default": (2, 0, 1, 3),
    "aten._softmax_backward_data.default": (2, 0, 1, 3),
    "aten._native_batch_norm_legit_functional.default": (None, 0, 2, 2),
    "aten.native_batch_norm_backward.default": (None, 0, 2, 3),
}
# target: how often lower.kernels.losses reads or writes all elements beyond what torch's kernel does
PASSES = {
    "aten._log_softmax.default": 6,
    "aten._softmax.default": 6,
    "aten._log_softmax_backward_data.default": 5,
    "aten._softmax_backward_data.default": 6,
}
# target: the position of `dim`
WEIGHT_NORMS = {"aten._weight_norm_interface.default": 2, "aten._weight_norm_interface_backward.default": 4}
NLL_LOSSES = ("aten.nll_loss_forward.default", "aten.nll_loss2d_forward.default")
# target: (position of `training`, numbers per channel in a reduction, reductions)
BATCH_NORMS = {
    "aten._native_batch_norm_legit_functional.default": (5, 1, 2),
    "aten.native_batch_norm_backward.default": (7, 2, 1),
}


def _axes_that_shard(layout: Layout, dim: int) -> list[int]:
    return [k for k, placement in enumerate(layout) if placement.is_shard(dim)]


def _over_dim(op: Op, inputs: Inputs, layouts: tuple[Layout, ...], mesh: Mesh, position: int, count: int = 1) -> list[InternalCollective]:
    dim = int(argument(op, position, "dim")) % len(inputs[0].shape)
    local = local_shape(inputs[0].shape, layouts[0], mesh)
    rest = math.prod(n for d, n in enumerate(local) if d != dim) * inputs[0].itemsize
    return [("all_reduce", axis, rest) for axis in _axes_that_shard(layouts[0], dim) for _ in range(count)]
