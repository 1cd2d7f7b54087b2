"""The kernels of experts (the operator of capture/experts.py) on one device, as kernels that have formulas of their own.

rows r, hidden F, after the activation N, experts e of a rank; x [t, H]

    forward     take x      grouped matmul -> [r, F]     activation      grouped matmul -> [r, H]     put back, weigh, add up
    backward    take x, g   grouped matmul -> [r, F]     activation      and of g, transposed -> [r, N]
                weigh       gradient of the activation   grouped matmuls -> [r, H], and of both parameters    put back, add up
"""

from __future__ import annotations

from collections.abc import Sequence

Shape = tuple[int, ...]
Described = tuple[Shape, str]
Kernel = tuple[str, tuple[Described, ...], tuple[Described, ...]]  # name, inputs, outputs


def expert_kernels(inputs: Sequence[Described], *, backward: bool) -> list[Kernel]:
    """inputs: those of the operator on a device, with the shape of ids [r, 1]."""
    (x_shape, dtype), (ids, _), (_, wide), (up, _), (down, _) = inputs[1:6] if backward else inputs[:5]
    t, r, ends = x_shape, ids[0], ((up[0],), "int32")
    H, F, N = x_shape[1], up[2], down[1]

    def rows(width: int, of: str = dtype) -> Described:
        return (r, width), of

    def elementwise(inputs: Sequence[Described], output: Described) -> Kernel:
        return "elementwise", tuple(inputs), (output,)

    e = min(up[0], r)  # experts without a row are not read
    up_by_rows, down_by_rows = ((e, H, F), dtype), ((e, N, H), dtype)
    to_hidden: Kernel = ("_grouped_mm", (rows(H), up_by_rows, ends), (rows(F),))
    activation = [elementwise([rows(F - N or N)], rows(N)), elementwise([rows(N), rows(N)], rows(N))]
    take, put = elementwise([rows(H)], rows(H)), elementwise([rows(H)], rows(H))
    if not backward:
        to_out: Kernel = ("_grouped_mm", (rows(N), down_by_rows, ends), (rows(H),))
        return [take, to_hidden, *activation, to_out, put, elementwise([rows(H)], rows(H, wide)), elementwise([rows(H, wide)], (t, wide))]
    return [
        take,
        take,
        to_hidden,
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
