"""Rows: the placements that an op may have on ONE mesh axis, and the table of our own rules.

    row = (outputs; inputs)      [S(0); S(0), R] means: if input 0 is sharded on dim 0 and input 1 replicated, output 0 is S(0)

A rule is a function of (op, input tensors) that returns rows; the row in which all tensors are replicated is implied. A rule that
returns None says that the op is unknown: it is replicated and listed. The local program of a row is the op itself on local
tensors, with local sizes in its literals, unless `lower.kernels.table` has another one.
Partial always means a sum here, or max and min as the output of amax and amin: a mean over a sharded dim is a sum of partial sums
that were divided by the global count, so there is no Partial(avg).
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor.placement_types import Placement

from autoshard.graph import Op, Tensor
from autoshard.layout import Layout, P, R, S

Inputs = tuple[Tensor, ...]
Rule = Callable[[Op, Inputs], "list[Row] | None"]


def overload_of(target: str) -> Any:
    """torch's operator of a target; None for those of ours that are defined only where plans are run."""
    namespace, name, which = target.split(".", 2)
    return getattr(getattr(getattr(torch.ops, namespace), name, None), which, None)


@dataclass(frozen=True)
class Row:
    """Placements on one axis, one per output (None for an output that is no tensor) and one per tensor input."""

    outputs: tuple[Placement | None, ...]
    inputs: tuple[Placement, ...]
    units: int = 0  # a shard has an integer number of these (the groups of a convolution); 0: shards may end at any index


RULES: dict[str, Rule] = {}
COMBINES: dict[str, Callable[[Op, Sequence[Layout]], bool]] = {}  # whether a target's rows of several axes go together, by input layouts
EVEN_ONLY: set[str] = set()  # targets whose local program is correct only for equal shards, as far as we know


def rule(*targets: str) -> Callable[[Rule], Rule]:
    """Registers a rule for ATen targets (`aten.mm.default`); it replaces torch's."""

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
    """The row of an op that is jointly linear in its inputs: partial sums map to partial sums."""
    return [Row((P(),) * num_outputs, (P(),) * num_inputs)]


def shard_rows(op: Op, inputs: Inputs, pairs: Sequence[tuple[int, int]]) -> list[Row]:
    """One row per (input dim, output dim) pair for an op with one input; all outputs have the same placement."""
    return [Row(tuple(S(o) for _ in op.outputs), (S(i),)) for i, o in pairs]


def other_dims(rank: int, dims: Collection[int], keep: bool) -> list[tuple[int, int]]:
    """(input dim, output dim) of all dims but `dims`, which the output has too (keep) or lacks."""
    return [(d, d if keep else d - sum(k < d for k in dims)) for d in range(rank) if d not in dims]
