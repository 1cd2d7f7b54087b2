"""Rows of ops that draw random numbers element by element: any dim is sharded, with those dims of the inputs that are as long.

Each rank keeps, or draws, its shard of what one device draws (`lower.kernels.random`). An input that is read for its shape alone may be
replicated or partial where the output is sharded or replicated. Any other random op is replicated.
"""

from __future__ import annotations

from autoshard.graph import PER_ELEMENT, SHAPED, Op
from autoshard.layout import P, R, S
from autoshard.strategies.rows import Inputs, Row, rule


@rule(*sorted(PER_ELEMENT))
def per_element(op: Op, inputs: Inputs) -> list[Row]:
    shape, outputs = op.output.shape, len(op.outputs)
    rows = []
    for d, size in enumerate(shape):
        at = [len(t.shape) - len(shape) + d for t in inputs]
        placements = tuple(S(k) if k >= 0 and t.shape[k] == size else R for k, t in zip(at, inputs, strict=True))
        rows.append(Row((S(d),) * outputs, placements))
        if op.target in SHAPED:
            rows.append(Row((S(d),) * outputs, (R, *placements[1:])))
    if op.target in SHAPED:
        rows.append(Row((R,) * outputs, (P(), *(R for _ in inputs[1:]))))
    return rows
