"""What the local program of experts (`lower.kernels.expert_parallel`) works on and sends, which no local shape tells.

A pair is a token and one of its k experts. A rank holds t tokens and begins with the pairs of experts that are on no other rank of an
axis on which tokens are replicated:

    pairs = t k / (sizes of the axes that shard the experts and not the tokens)         rows = pairs * imbalance

rows is how many pairs the experts of the busiest rank get, `Mesh.expert_imbalance` times its share; the share is what all ranks get where
tokens are spread evenly. Each axis that shards both has, one after the other (B: of one rank, largest buffer),

    forward     all_to_all of counts, of experts (int64), of x; of the outputs, back
    backward    all_to_all of counts, of experts, of x and the gradient of y, of weights; of the gradients of x and of weights, back
"""

from __future__ import annotations

import math

from autoshard.graph import ITEMSIZE, Op, Tensor
from autoshard.layout import Layout, local_shape
from autoshard.mesh import Mesh
from autoshard.strategies.experts import EXPERTS, EXPERTS_BACKWARD

Collective = tuple[str, int, int]
INTEGER = 8  # bytes of an expert's number, and of a count
Inputs = tuple[Tensor, ...]
Shape = tuple[int, ...]


def is_experts(op: Op) -> bool:
    return op.target in EXPERTS or op.target in EXPERTS_BACKWARD


def _operands(op: Op, of: tuple) -> tuple:
    """x, ids, weights, up, down among the op's inputs, or their layouts."""
    return of[1:6] if op.target in EXPERTS_BACKWARD else of[:5]


def _axes(op: Op, layouts: tuple[Layout, ...], mesh: Mesh) -> tuple[list[int], list[int]]:
    """The axes over which pairs are sent, and those on which each rank has the pairs of its own experts."""
    tokens, *_, up, _ = _operands(op, layouts)
    sharded = [k for k, p in enumerate(up) if p.is_shard(0) and mesh.shape[k] > 1]
    return [k for k in sharded if tokens[k].is_shard(0)], [k for k in sharded if not tokens[k].is_shard(0)]


def num_rows(op: Op, inputs: Inputs, layouts: tuple[Layout, ...], mesh: Mesh) -> tuple[int, int]:
    """(pairs of a rank, rows of the busiest rank)."""
    sent, own = _axes(op, layouts, mesh)
    ids, layout = _operands(op, inputs)[1], _operands(op, layouts)[1]
    pairs = -(-math.prod(local_shape(ids.shape, layout, mesh)) // math.prod(mesh.shape[k] for k in own))
    return pairs, min(math.ceil(pairs * mesh.expert_imbalance), math.prod(ids.shape)) if sent or own else pairs


def worked_shapes(op: Op, inputs: Inputs, layouts: tuple[Layout, ...], mesh: Mesh) -> list[Shape]:
    """The local shapes of the inputs, for experts with the rows of the busiest rank in place of ids."""
    shapes = [local_shape(t.shape, layout, mesh) for t, layout in zip(inputs, layouts, strict=True)]
    if is_experts(op):
        shapes[2 if op.target in EXPERTS_BACKWARD else 1] = (num_rows(op, inputs, layouts, mesh)[1], 1)
    return shapes


def expert_collectives(op: Op, inputs: Inputs, layouts: tuple[Layout, ...], mesh: Mesh) -> list[Collective]:
    x, _, weights, *_ = _operands(op, inputs)
    width, rows = x.shape[1] * x.itemsize, num_rows(op, inputs, layouts, mesh)[1]
    forth = (INTEGER, width) if op.target in EXPERTS else (INTEGER, 2 * width, weights.itemsize)
    back = (width,) if op.target in EXPERTS else (width, weights.itemsize)
    sizes = [rows * size for size in (*forth, *back)]
    return [("all_to_all", k, B) for k in _axes(op, layouts, mesh)[0] for B in (INTEGER * mesh.shape[k], *sizes)]


def expert_bytes(op: Op, inputs: Inputs, layouts: tuple[Layout, ...], mesh: Mesh) -> int:
    """The most bytes of temporary tensors, with the rows of the busiest rank: while pairs are sent, multiplied, or added up."""
    x, ids, weights, up, down = _operands(op, inputs)
    pairs, rows = num_rows(op, inputs, layouts, mesh)
    H, F, I = x.shape[1], up.shape[2], down.shape[1]
    all_pairs = math.prod(local_shape(ids.shape, _operands(op, layouts)[1], mesh))
    wide = max(x.itemsize, weights.itemsize, ITEMSIZE["float32"] if op.target in EXPERTS_BACKWARD else 0)
    if op.target in EXPERTS:
        sending = (2 * pairs + rows) * H
        multiplying = rows * max(H + F + 2 * I, 3 * H + I)
        adding = (2 * pairs + all_pairs) * H
        return max(x.itemsize * max(sending, multiplying, adding), (x.itemsize + wide) * all_pairs * H)
    sending = (6 * pairs + 2 * rows) * H
    multiplying = rows * (4 * H + 2 * F + 5 * I)
    return max(x.itemsize * max(sending, multiplying), (x.itemsize + wide) * all_pairs * H)
