"""Rows: what layouts an op may take and give on ONE mesh axis, and the table of our own rules.

    row = (outputs; inputs)      [S(0); S(0), R]  reads: when input 0 is cut on dim 0 and input 1 is whole, output 0 is cut on dim 0

A rule is a function of (op, input tensors) that returns rows; the row in which everything is replicated is implied. None
instead of rows says that the op is unknown: replicated and listed. The local program of a row is the op itself on local
tensors, its size literals made local, unless `lower.kernels.table` has another one.
Partial always means a sum here, or max and min as the output of amax and amin: a mean over a cut dim is a sum of parts that
were divided by the whole count, so there is no Partial(avg).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed.tensor.placement_types import Placement

from autoshard.graph import Op, Tensor
from autoshard.layout import P, R, S

Inputs = tuple[Tensor, ...]
Rule = Callable[[Op, Inputs], "list[Row] | None"]


@dataclass(frozen=True)
class Row:
    """Placements on one axis, one per tensor output (None where the op gives none) and one per tensor input."""

    outputs: tuple[Placement | None, ...]
    inputs: tuple[Placement, ...]
    units: int = 0  # of what is cut: parts are whole ones (the groups of a convolution); 0: every index is its own


RULES: dict[str, Rule] = {}
EVEN_ONLY: set[str] = set()  # targets whose local program is right about equal parts only, as far as we know


def rule(*targets: str) -> Callable[[Rule], Rule]:
    """Registers our own rows for ATen targets (`aten.mm.default`); they take the place of torch's."""

    def register(function: Rule) -> Rule:
        for target in targets:
            assert target not in RULES, f"two rules for {target}"
            RULES[target] = function
        return function

    return register


def row(outputs: Placement | Sequence[Placement | None], *inputs: Placement) -> Row:
    return Row(tuple(outputs) if isinstance(outputs, (tuple, list)) else (outputs,), inputs)


def replicate_row(op: Op, inputs: Inputs) -> Row:
    return Row(tuple(None if t is None else R for t in op.outputs), (R,) * len(inputs))


def argument(op: Op, position: int, name: str = "", default: Any = None) -> Any:
    """A literal argument by position or keyword."""
    args, kwargs = op.literals
    if position < len(args):
        return args[position]
    return dict(kwargs).get(name, default)


def linear_rows(num_outputs: int, num_inputs: int) -> list[Row]:
    """A linear op of its inputs together maps partial sums to partial sums."""
    return [Row((P(),) * num_outputs, (P(),) * num_inputs)]


def shard_rows(op: Op, inputs: Inputs, pairs: Sequence[tuple[int, int]]) -> list[Row]:
    """One row per (input dim, output dim) pair for an op with one input, every output alike."""
    return [Row(tuple(S(o) for _ in op.outputs), (S(i),)) for i, o in pairs]
