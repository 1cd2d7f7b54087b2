"""Rows of a cross entropy in chunks of tokens (`graph.chunked_loss`), what its ranks tell each other, and the logits that they hold.

    tokens      x and targets S(0), weight replicated       the loss and the weight's gradient are Partial
    classes     x and targets replicated, weight S(1)       the loss and x's gradient are Partial; the logsumexp is merged once
"""

from __future__ import annotations

from autoshard.graph import BACKWARD, FORWARD, Op
from autoshard.layout import Layout, P, R, S, local_shape
from autoshard.mesh import Mesh
from autoshard.strategies.rows import Inputs, Row, argument, row, rule

WIDE = 4  # bytes per element: logits are cast to float32
HELD = 2  # tensors of a chunk's logits at a time


@rule(FORWARD)
def loss(op: Op, inputs: Inputs) -> list[Row]:
    """x [t, h], weight [h, v], targets [t] -> loss, total weight, logsumexp [t]."""
    return [row((P(), R, S(0)), S(0), R, S(0)), row((P(), R, R), R, S(1), R)]


@rule(BACKWARD)
def loss_backward(op: Op, inputs: Inputs) -> list[Row]:
    """Gradient of the loss, x, weight, targets, total weight, logsumexp -> gradients of x and of the transposed weight [v, h]."""
    return [
        row((S(0), P()), R, S(0), R, S(0), R, S(0)),
        row((P(), S(0)), R, R, S(1), R, R, R),
        row((P(), P()), P(), R, R, R, R, R),
    ]


def loss_collectives(op: Op, inputs: Inputs, layouts: tuple[Layout, ...], mesh: Mesh) -> list[tuple[str, int, int]]:
    """Of the forward: maximum and sum of the logsumexp over shards of the classes, the total weight over shards of the tokens."""
    if op.target != FORWARD:
        return []
    (tokens,) = local_shape(inputs[2].shape, layouts[2], mesh)
    of_classes = [("all_reduce", k, tokens * WIDE) for k, p in enumerate(layouts[1]) if p.is_shard(1) for _ in range(2)]
    return [*of_classes, *(("all_reduce", k, WIDE) for k, p in enumerate(layouts[0]) if p.is_shard(0))]


def loss_bytes(op: Op, inputs: Inputs, layouts: tuple[Layout, ...], mesh: Mesh) -> int:
    """Logits of a chunk; in the backward the most of those beside the sum of the weight's gradient in float32, of their gradient beside
    that sum and a chunk's, and of the sum beside the output. The output counts by itself, and isn't there before."""
    first = int(op.target == BACKWARD)
    (tokens, width), (_, classes) = (local_shape(inputs[k].shape, layouts[k], mesh) for k in (first, first + 1))
    rows = int(argument(op, 8 if first else 5, "rows"))
    logits, product, size = min(rows, tokens) * classes, width * classes, inputs[first].itemsize
    if not first:
        return HELD * WIDE * logits
    sums = WIDE * product * (tokens > rows)
    return max(HELD * WIDE * logits + sums, size * (logits + product) + sums, (WIDE + size) * product * (size < WIDE)) - size * product
