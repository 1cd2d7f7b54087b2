"""Rules that users register: for custom operators, and for operators whose built-in rule lacks rows."""

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor.placement_types import Placement

from autoshard.graph import Graph, Op
from autoshard.layout import parse
from autoshard.strategies.rows import EVEN_ONLY, RULES, Inputs, Row, Rule, rule
from autoshard.torch_private import OpOverload

REGISTERED: set[str] = set()  # the targets of users' rules


def register_rule(target: Any, *rows: str, replace: bool = False, uneven: bool = False) -> Callable[[Rule], Rule]:
    """Register the layouts that an operator may have on one mesh axis; the row in which all tensors are replicated is implied.

    target: the operator, `torch.ops.mylib.scale.default` or "mylib.scale.default". rows: placements of its tensors, inputs ->
    outputs, in the order of its schema; every rank then calls the operator on its local tensors. S(d): sharded on dim d into equal
    shards; R: replicated; P: partial, the sum over the ranks is the tensor (use it where the operator is linear). The tensors of a
    list count one by one. For rows that depend on the call, decorate a function of (op, input tensors) that returns `Row`s.
    replace: replaces the rule that the operator has. uneven: the shards may also be unequal (5 rows as 3 + 2); allow it where the
    operator works on each index of d separately, or sums over d.

        autoshard.register_rule(torch.ops.mylib.scale.default, "S(0), R -> S(0)", "P, R -> P")

        @autoshard.register_rule("mylib.mix.default")
        def mix(op, inputs):
            return [autoshard.Row((Shard(d),), (Shard(d),) * len(inputs)) for d in range(len(op.output.shape) - 1)]

    `autoshard.verify(..., random=3)` detects a wrong row. ValueError for an unknown operator or a row that can't be parsed.
    """
    name = _name(target)
    if name in RULES and not replace:
        raise ValueError(f"{name} has a rule already; pass replace=True to put this one in its place")

    def put(function: Rule) -> Rule:
        RULES.pop(name, None)
        REGISTERED.add(name)
        (EVEN_ONLY.discard if uneven else EVEN_ONLY.add)(name)
        return rule(name)(function)

    if rows:
        parsed = [_parsed(written) for written in rows]
        put(lambda op, inputs: [_checked(row, written, op, inputs) for row, written in zip(parsed, rows, strict=True)])
    return put


def registered_rows(graph: Graph) -> dict[str, str]:
    """What users' rules say of the ops of a graph, as text: with other rows, another plan may be the best one."""
    own = ((i, op) for i, op in enumerate(graph.ops) if op.target in REGISTERED)
    return {op.name: f"{op.target in EVEN_ONLY} {RULES[op.target](op, graph.input_tensors(i))}" for i, op in own}


def _name(target: Any) -> str:
    if isinstance(target, OpOverload):
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
    tensors = [t for t in op.outputs if t is not None]
    if len(row.inputs) != len(inputs) or len(row.outputs) != len(tensors):
        raise ValueError(
            f"row {written!r} is of {len(row.inputs)} inputs and {len(row.outputs)} outputs; "
            f"{op.target} has {len(inputs)} and {len(tensors)}"
        )
    for placement, tensor in [*zip(row.inputs, inputs, strict=True), *zip(row.outputs, tensors, strict=True)]:
        if placement.is_shard() and placement.dim >= len(tensor.shape):  # type: ignore[attr-defined]
            dim = placement.dim  # type: ignore[attr-defined]
            raise ValueError(f"row {written!r} shards dim {dim} of a tensor of {op.target} that has {len(tensor.shape)} dims")
    outputs = iter(row.outputs)
    return Row(tuple(None if t is None else next(outputs) for t in op.outputs), row.inputs)
