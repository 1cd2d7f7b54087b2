"""Candidates: rows of one axis crossed over the axes of a mesh.

    candidates(op) = { (row_0, ..., row_k) : every dim divides by the product of the axes that cut it, no two kinds of Partial }

One candidate is one choice of a node in the Problem. Candidates depend on the op's signature only, so they are made once per
signature and shared.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product

from autoshard.graph import Graph, Op, Tensor
from autoshard.layout import Layout, all_layouts, is_legal
from autoshard.mesh import Mesh
from autoshard.strategies import attention as _attention  # noqa: F401  (registers its rules)
from autoshard.strategies import convolution as _convolution  # noqa: F401
from autoshard.strategies import dims as _dims
from autoshard.strategies import experts as _experts  # noqa: F401
from autoshard.strategies import indexing as _indexing  # noqa: F401
from autoshard.strategies import own as _own  # noqa: F401
from autoshard.strategies import structure as _structure  # noqa: F401
from autoshard.strategies import torch_rules
from autoshard.strategies.rows import RULES, Inputs, Row, replicate_row


@dataclass(frozen=True)
class Candidate:
    """The layouts that one op takes and gives, one per tensor input and output (None where it gives no tensor)."""

    inputs: tuple[Layout, ...]
    outputs: tuple[Layout | None, ...]


@dataclass(frozen=True, eq=False)
class Candidates:
    """For every op of a graph its candidates, shared by reference between ops of the same signature."""

    of: tuple[tuple[Candidate, ...], ...]
    unknown: tuple[int, ...]  # ops that no rule knows; they are replicated
    num_signatures: int


def candidates(graph: Graph, mesh: Mesh) -> Candidates:
    made: dict[tuple, tuple[Candidate, ...]] = {}
    rows: dict[tuple, list[Row] | None] = {}
    found, unknown = [], []
    for i, op in enumerate(graph.ops):
        signature = graph.signature(i)
        if signature not in made:
            inputs = graph.input_tensors(i)
            if op.is_placeholder:
                made[signature] = tuple(Candidate((), (layout,)) for layout in all_layouts(op.output.shape, mesh))
            else:
                rows[signature] = one_axis_rows(op, inputs)
                made[signature] = cross(op, inputs, rows[signature] or [replicate_row(op, inputs)], mesh)
        found.append(made[signature])
        if rows.get(signature, ()) is None:
            unknown.append(i)
    return Candidates(tuple(found), tuple(unknown), len(made))


def one_axis_rows(op: Op, inputs: Inputs) -> list[Row] | None:
    """Our own rows, else torch's, else those of any op per element, the replicated one first; None when nobody knows the op."""
    known = RULES[op.target](op, inputs) if op.target in RULES else torch_rules.rows(op, inputs)
    if known is None:
        known = _dims.pointwise(op, inputs)
    if known is None:
        return None
    return [r for r in dict.fromkeys([replicate_row(op, inputs), *known]) if not _adds_truth_values(r, op, inputs)]


def _adds_truth_values(row: Row, op: Op, inputs: Inputs) -> bool:
    """Partial on a bool: "or" is no sum, what is counted or converted after it would be wrong."""
    pairs = [*zip(row.inputs, inputs, strict=True), *zip(row.outputs, op.outputs, strict=True)]
    return any(p is not None and t is not None and p.is_partial() and t.dtype == "bool" for p, t in pairs)


def cross(op: Op, inputs: Inputs, rows: list[Row], mesh: Mesh) -> tuple[Candidate, ...]:
    """All combinations of rows over the axes that every tensor's sizes allow, duplicates left out, in a fixed order."""
    per_axis = [[r for r in rows if _divides(r, op, inputs, axis.size)] if axis.size > 1 else rows[:1] for axis in mesh.axes]
    made: dict[Candidate, None] = {}
    for combination in product(*per_axis):
        ins = tuple(tuple(r.inputs[k] for r in combination) for k in range(len(inputs)))
        outs = tuple(None if t is None else tuple(r.outputs[k] for r in combination) for k, t in enumerate(op.outputs))
        if _all_legal(zip(ins, inputs, strict=True), mesh) and _all_legal(zip(outs, op.outputs, strict=True), mesh):
            made[Candidate(ins, outs)] = None  # type: ignore[arg-type]
    return tuple(made)


def _divides(row: Row, op: Op, inputs: Inputs, size: int) -> bool:
    pairs = [*zip(row.inputs, inputs, strict=True), *zip(row.outputs, op.outputs, strict=True)]
    return all(p is None or t is None or not p.is_shard() or t.shape[p.dim] % size == 0 for p, t in pairs)  # type: ignore[attr-defined]


def _all_legal(pairs: Iterable[tuple[Layout | None, Tensor | None]], mesh: Mesh) -> bool:
    return all(layout is None or tensor is None or is_legal(tensor.shape, layout, mesh) for layout, tensor in pairs)
