"""The operators whose local program on a device is several kernels, one after the other, as kernels that have formulas of their own.

Experts (the operator of capture/experts.py): rows r, hidden F, after the activation N, experts e of a rank; x [t, H]

    forward     take x      grouped matmul -> [r, F]     activation      grouped matmul -> [r, H]     put back, weigh, add up
    backward    take x, g   grouped matmul -> [r, F]     activation      and of g, transposed -> [r, N]
                weigh       gradient of the activation   grouped matmuls -> [r, H], and of both parameters    put back, add up
                the first of its matmuls is for the rows whose hidden values are not kept: all, or those beyond a balanced routing

A cross entropy in chunks of tokens (`graph.chunked_loss`): z has all tokens here, a chunk has as many as plans give it, `graph.ROWS`

    forward     x w -> z     z in float32     logsumexp: its maximum, then the sum of exponentials
    backward    x w -> z     z in float32     e^(z - L)     less the targets     times the factor of a token     in the dtype of x
                p w' -> x'   p' x -> w'       w' of a chunk added to the sum, with more than one chunk
"""

import math
from collections.abc import Sequence

from autoshard.graph import ROWS

Shape = tuple[int, ...]
Described = tuple[Shape, str]  # shape and dtype, as graph.Tensor spells it
Kernel = tuple[str, tuple[Described, ...], tuple[Described, ...]]  # name, inputs, outputs


def expert_kernels(inputs: Sequence[Described], *, backward: bool, keeps: bool = False) -> list[Kernel]:
    """inputs: those of the operator on a device, with the shape of ids [r, 1]. keeps: hidden values, the last input of the backward."""
    (x_shape, dtype), (ids, _), (_, wide), (up, _), (down, _) = inputs[1:6] if backward else inputs[:5]
    t, r, ends = x_shape, ids[0], ((up[0],), "int32")
    H, F, N = x_shape[1], up[2], down[1]

    def rows(width: int, of: str = dtype) -> Described:
        return (r, width), of

    def elementwise(inputs: Sequence[Described], output: Described) -> Kernel:
        return "elementwise", tuple(inputs), (output,)

    e = min(up[0], r)  # experts without a row are not read
    up_by_rows, down_by_rows = ((e, H, F), dtype), ((e, N, H), dtype)
    again = max(r - math.prod(inputs[-1][0]) // F, 0) if keeps and backward else r  # rows whose hidden values are computed here
    hidden_of: tuple[Described, ...] = (((again, H), dtype), ((min(up[0], again), H, F), dtype), ends)
    to_hidden: list[Kernel] = [("_grouped_mm", hidden_of, (((again, F), dtype),))] if again else []
    activation = [elementwise([rows(F - N or N)], rows(N)), elementwise([rows(N), rows(N)], rows(N))]
    take, put = elementwise([rows(H)], rows(H)), elementwise([rows(H)], rows(H))
    if not backward:
        to_out: Kernel = ("_grouped_mm", (rows(N), down_by_rows, ends), (rows(H),))
        return [take, *to_hidden, *activation, to_out, put, elementwise([rows(H)], rows(H, wide)), elementwise([rows(H, wide)], (t, wide))]
    return [
        take,
        take,
        *to_hidden,
        *activation,
        ("_grouped_mm", (rows(H), ((up[0], H, N), dtype), ends), (rows(N),)),
        elementwise([rows(N), rows(N)], rows(1)),
        elementwise([rows(H)], rows(H)),
        elementwise([rows(N)], rows(N)),
        elementwise([rows(N), rows(F)], rows(F)),
        elementwise([rows(F)], rows(F)),
        ("_grouped_mm", (((H, r), dtype), rows(F), ends), (up_by_rows,)),
        ("_grouped_mm", (((N, r), dtype), rows(H), ends), (down_by_rows,)),
        ("_grouped_mm", (rows(F), ((up[0], F, H), dtype), ends), (rows(H),)),
        put,
        elementwise([rows(H)], (t, dtype)),
    ]


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
