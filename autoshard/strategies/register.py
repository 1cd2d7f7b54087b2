"""Rules of the user's own, for custom operators and for ops that we know too little about."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor.placement_types import Placement

from autoshard.graph import Op
from autoshard.layout import parse
from autoshard.strategies.rows import EVEN_ONLY, RULES, Inputs, Row, Rule, rule


def register_rule(target: Any, *rows: str, replace: bool = False, uneven: bool = False) -> Callable[[Rule], Rule]:
    """Say what layouts an operator may take, on one mesh axis; the one in which all is replicated is implied.

    target: the operator, `torch.ops.mylib.scale.default` or "mylib.scale.default". rows: what its tensors may lie like,
    inputs -> outputs, in the order of its schema; every rank then calls the operator on its local tensors. S(d): cut into
    equal parts along dim d; R: whole on each; P: parts that add up to it (give it where the operator is linear). Several
    tensors in a list count one by one. For rows that depend on the call, decorate a function of (op, input tensors) that
    returns `Row`s. replace: an operator that has a rule gets this one instead. uneven: the parts need not be equal either
    (5 rows in 3 + 2); say so where the operator treats each index of d by itself, or sums over d.

        autoshard.register_rule(torch.ops.mylib.scale.default, "S(0), R -> S(0)", "P, R -> P")

        @autoshard.register_rule("mylib.mix.default")
        def mix(op, inputs):
            return [autoshard.Row((Shard(d),), (Shard(d),) * len(inputs)) for d in range(len(op.output.shape) - 1)]

    A row that is wrong is found by `autoshard.verify(..., random=3)`. ValueError on an unknown operator or a row that can't be read.
    """
    name = _name(target)
    if name in RULES and not replace:
        raise ValueError(f"{name} has a rule already; pass replace=True to put this one in its place")

    def put(function: Rule) -> Rule:
        RULES.pop(name, None)
        (EVEN_ONLY.discard if uneven else EVEN_ONLY.add)(name)
        return rule(name)(function)

    if rows:
        given = [_parsed(written) for written in rows]
        put(lambda op, inputs: [_checked(row, written, op, inputs) for row, written in zip(given, rows, strict=True)])
    return put


def _name(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    if isinstance(target, str) and len(parts := target.replace("::", ".").split(".")) == 3:
        packet = getattr(getattr(torch.ops, parts[0]), parts[1], None)
        if getattr(packet, parts[2], None) is not None:
            return ".".join(parts)
    raise ValueError(f"there is no operator {target!r}; expected torch.ops.mylib.scale.default, or its name 'mylib.scale.default'")


def _parsed(written: str) -> Row:
    inputs, arrow, outputs = written.partition("->")
    if not arrow:
        raise ValueError(f"row {written!r} has no arrow; write inputs -> outputs, for example 'S(0), R -> S(0)'")
    return Row(_placements(outputs), _placements(inputs))


def _placements(written: str) -> tuple[Placement, ...]:
    return parse(written) if written.strip() else ()


def _checked(row: Row, written: str, op: Op, inputs: Inputs) -> Row:
    made = [t for t in op.outputs if t is not None]
    if len(row.inputs) != len(inputs) or len(row.outputs) != len(made):
        raise ValueError(
            f"row {written!r} is of {len(row.inputs)} inputs and {len(row.outputs)} outputs; {op.target} has {len(inputs)} and {len(made)}"
        )
    for placement, tensor in [*zip(row.inputs, inputs, strict=True), *zip(row.outputs, made, strict=True)]:
        if placement.is_shard() and placement.dim >= len(tensor.shape):  # type: ignore[attr-defined]
            raise ValueError(f"row {written!r} cuts dim {placement.dim} of a tensor of {op.target} that has {len(tensor.shape)} dims")  # type: ignore[attr-defined]
    outputs = iter(row.outputs)
    return Row(tuple(None if t is None else next(outputs) for t in op.outputs), row.inputs)
