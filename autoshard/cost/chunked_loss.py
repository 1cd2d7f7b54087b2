"""The kernels of a cross entropy in chunks of tokens (`graph.chunked_loss`) on one device, as kernels that have formulas of their own.

    forward     x w -> z     z in float32     logsumexp: its maximum, then the sum of exponentials
    backward    x w -> z     z in float32     e^(z - L)     less the targets     times the factor of a token     in the dtype of x
                p w' -> x'   p' x -> w'       w' of a chunk added to the sum, with more than one chunk

z has all tokens here; a chunk has as many as plans give it, `graph.chunked_loss.ROWS`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from autoshard.cost.experts import Described, Kernel
from autoshard.graph import ROWS


def loss_kernels(inputs: Sequence[Described], *, backward: bool) -> list[Kernel]:
    """inputs: those of the operator on a device, x [t, h] and weight [h, v] among them."""
    x, weight = inputs[1:3] if backward else inputs[:2]
    ((tokens, width), dtype), ((_, classes), _) = x, weight
    narrow, wide = ((tokens, classes), dtype), ((tokens, classes), "float32")
    logits: list[Kernel] = [("mm", (x, weight), (narrow,)), ("elementwise", (narrow,), (wide,))]
    if not backward:
        return [*logits, ("elementwise", (wide,), (((tokens,), "float32"),)), ("elementwise", (wide,), (wide,))]
    chunks = math.ceil(tokens / ROWS)
    of_weight, added = ((classes, width), dtype), ((chunks, classes, width), "float32")
    summed: list[Kernel] = [("elementwise", (((chunks, classes, width), dtype), added), (added,))] if chunks > 1 else []
    return [
        *logits,
        *[("elementwise", (wide,), (wide,))] * 3,
        ("elementwise", (wide,), (narrow,)),
        ("mm", (narrow, ((classes, width), dtype)), (x,)),
        ("mm", (((classes, tokens), dtype), x), (of_weight,)),
        *summed,
    ]
