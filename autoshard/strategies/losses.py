"""Rows of binary cross entropy: cut alike on any dim, a mean or a sum over the cut is a sum of parts (`lower.kernels` scales means)."""

from __future__ import annotations

from autoshard.graph import Op
from autoshard.layout import P, R, S
from autoshard.strategies.rows import Inputs, Row, argument, rule

# target: (position of the first of the two tensors, of the weights per element or -1, of the reduction)
LOSSES = {
    "aten.binary_cross_entropy.default": (0, 2, 3),
    "aten.binary_cross_entropy_with_logits.default": (0, 2, 4),
    "aten.binary_cross_entropy_backward.default": (1, 3, 4),
}


@rule(*LOSSES)
def loss(op: Op, inputs: Inputs) -> list[Row]:
    first, weights, at_reduction = LOSSES[op.target]
    x, y = inputs[first], inputs[first + 1]
    if x.shape != y.shape or (weights >= 0 and argument(op, weights) is not None) or len(inputs) != first + 2:
        return []
    none = argument(op, at_reduction, "reduction", 1) == 0
    backward = first == 1
    rows = []
    for d in range(len(x.shape)):
        of_loss = (S(d) if none else R,) if backward else ()
        rows.append(Row((S(d) if none or backward else P(),), (*of_loss, S(d), S(d))))
    return rows
