"""What rounding alone makes of a program's results: those of programs with other roundings, and of the program in float64.

Where values are ill conditioned (differences of nearly equal numbers, an inverse, a comparison that decides), float32 itself is off, and a
sharded program, which adds in another order, is off as well. Let x be a result of the unsharded program, x~ the same with placeholders
perturbed by their rounding, X the same in float64:

    noise = max( |x~ - x| over several x~,  |X - x| )              for whole numbers and truth values how many elements differ

A result that differs from x by no more than a few times its noise can't be told from rounding.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from autoshard.graph import Const, Graph
from autoshard.lower.sharding import gap

WIDER = {"float16": "float64", "bfloat16": "float64", "float32": "float64", "complex32": "complex128", "complex64": "complex128"}


def in_float64(graph: Graph) -> Graph:
    """The graph with every float tensor in float64, and complex numbers of two of these."""
    ops = []
    for op in graph.ops:
        outputs = tuple(t and replace(t, dtype=WIDER.get(t.dtype, t.dtype)) for t in op.outputs)
        ops.append(replace(op, literals=_widened(op.literals), outputs=outputs))
    return replace(graph, ops=tuple(ops))


def _widened(literal: Any) -> Any:
    if isinstance(literal, tuple):
        return tuple(map(_widened, literal))
    return Const("dtype", WIDER.get(literal.text, literal.text)) if isinstance(literal, Const) and literal.kind == "dtype" else literal


def wide_values(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The values of placeholders in the dtypes of `in_float64`."""
    return {name: x.to(getattr(torch, WIDER.get(kind := str(x.dtype).removeprefix("torch."), kind))) for name, x in values.items()}


def difference(a: Tensor, b: Tensor) -> float:
    """max |a - b|, of whole numbers and truth values the number of elements that differ."""
    if a.is_floating_point() or a.is_complex():
        kind = torch.promote_types(a.dtype, b.dtype)
        return gap(a.to(kind), b.to(kind))
    return float((a != b).sum())


def noise_of(x: Tensor, others: Sequence[Tensor]) -> float:
    return max((difference(x, other) for other in others), default=0.0)
