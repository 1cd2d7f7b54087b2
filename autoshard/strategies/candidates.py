"""Candidates: rows of one axis crossed over the axes of a mesh.

    candidates(op) = { (row_0, ..., row_k) : every layout is legal, no two kinds of Partial, parts that a row cuts together match }

Parts match when dims of sizes m and n are cut at the same places, m / n apart: a row says that f of the parts is the part of f,
so part r of one tensor has to go with part r of the other. Equal parts always match. Uneven parts do where all those dims are
cut by the same axes and each part of one is m / n times as long as that of the other: 14 heads and 7 key-value heads on 4 are
(4, 4, 4, 2) and (2, 2, 2, 1); 14 heads and 896 features are not, as 896 is cut into parts of 224, three and a half heads.

One candidate is one choice of a node in the Problem. Candidates depend on the op's signature only, so they are made once per
signature and shared.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product

from torch.distributed.tensor.placement_types import Placement

from autoshard.graph import Graph, Op, Tensor
from autoshard.layout import Layout, R, S, all_layouts, chunk_bounds, is_legal, placement_text
from autoshard.mesh import Mesh
from autoshard.strategies import attention as _attention  # noqa: F401  (registers its rules)
from autoshard.strategies import convolution as _convolution  # noqa: F401
from autoshard.strategies import dims as _dims
from autoshard.strategies import experts as _experts  # noqa: F401
from autoshard.strategies import indexing as _indexing  # noqa: F401
from autoshard.strategies import own as _own  # noqa: F401
from autoshard.strategies import recurrent as _recurrent  # noqa: F401
from autoshard.strategies import structure as _structure  # noqa: F401
from autoshard.strategies import torch_rules
from autoshard.strategies.rows import EVEN_ONLY, RULES, Inputs, Row, replicate_row


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
                made[signature] = cross(op, inputs, rows[signature] or [replicate_row(op, inputs)], mesh, even=op.target in EVEN_ONLY)
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


def cross(op: Op, inputs: Inputs, rows: list[Row], mesh: Mesh, *, even: bool = False) -> tuple[Candidate, ...]:
    """All combinations of rows over the axes that every tensor's sizes allow, duplicates left out, in a fixed order.

    even: only those in which all parts of a tensor have the same shape.
    """
    units = max((r.units for r in rows), default=0)
    tensors = (*inputs, *op.outputs, *((Tensor((units,), "bool"),) if units else ()))  # units: as one more tensor that is cut
    given = [k for k, t in enumerate(tensors) if t is not None]
    coded = [(placements, tuple(map(_code, placements))) for placements in (_placements(r, units) for r in rows)]
    sizes = mesh.shape
    per_axis = [[c for c in coded if _fills(c[1], tensors, n, even)] if n > 1 else coded[:1] for n in sizes]
    known: list[dict[tuple[int, ...], tuple[Layout, bool, bool]]] = [{} for _ in tensors]
    made: dict[Candidate, None] = {}
    for combination in product(*per_axis):
        laid: list[Layout | None] = [None] * len(tensors)
        uneven = False
        for k in given:
            key = tuple([codes[k] for _, codes in combination])
            if key not in known[k]:
                layout = tuple([placements[k] for placements, _ in combination])
                known[k][key] = (layout, *_judged(tensors[k].shape, key, layout, mesh))  # type: ignore[union-attr]
            laid[k], legal, is_cut_evenly = known[k][key]
            if not legal:
                break
            uneven = uneven or not is_cut_evenly
        else:
            if not uneven or (not even and _match([(tensors[k], laid[k]) for k in given], mesh)):  # type: ignore[misc]
                made[Candidate(tuple(laid[: len(inputs)]), tuple(laid[len(inputs) : len(inputs) + len(op.outputs)]))] = None  # type: ignore[arg-type]
    return tuple(made)


def _judged(shape: tuple[int, ...], codes: tuple[int, ...], layout: Layout, mesh: Mesh) -> tuple[bool, bool]:
    """Whether a layout is legal, whether its parts are equal. The usual case, equal parts and no Partial, without a closer look."""
    parts = [1] * len(shape)
    for code, n in zip(codes, mesh.shape, strict=True):
        if code >= 0:
            parts[code] *= n
    is_cut_evenly = not any([size % n for size, n in zip(shape, parts, strict=True)])
    return (is_cut_evenly and min(codes) >= -1) or is_legal(shape, layout, mesh), is_cut_evenly


def _placements(row: Row, units: int) -> tuple[Placement | None, ...]:
    return (*row.inputs, *row.outputs, *((S(0) if row.units else R,) if units else ()))


OTHERS = {"R": -1, "P": -2, "P(max)": -3, "P(min)": -4, "P(avg)": -5}


def _code(p: Placement | None) -> int:
    """A placement as a number, quicker to compare: the dim of S, -1 for R, less for the others."""
    return -1 if p is None else p.dim if p.is_shard() else OTHERS[placement_text(p)]  # type: ignore[attr-defined]


def _fills(codes: tuple[int, ...], tensors: tuple[Tensor | None, ...], size: int, even: bool) -> bool:
    """Whether a row leaves no rank without anything, as far as this axis alone can tell."""
    cut = [t.shape[code] for code, t in zip(codes, tensors, strict=True) if code >= 0 and t is not None]
    return all([n % size == 0 or (not even and n > size) for n in cut])


def _match(laid: list[tuple[Tensor, Layout]], mesh: Mesh) -> bool:
    """Whether the parts of all dims that an axis cuts together lie at the same places."""
    for axis in range(len(mesh.axes)):
        cuts = {(t.shape[layout[axis].dim], _axes_of(layout, axis)) for t, layout in laid if layout[axis].is_shard()}  # type: ignore[attr-defined]
        if len(cuts) > 1 and not _proportional(cuts, mesh):
            return False
    return True


def _axes_of(layout: Layout, axis: int) -> tuple[int, ...]:
    """The axes that cut the same dim as `axis` does."""
    return tuple(k for k, p in enumerate(layout) if p == layout[axis])


def _proportional(cuts: set[tuple[int, tuple[int, ...]]], mesh: Mesh) -> bool:
    sizes = {axes: tuple(mesh.axes[k].size for k in axes) for _, axes in cuts}
    if not any(n % math.prod(sizes[axes]) for n, axes in cuts):
        return True
    bounds = [(n, chunk_bounds(n, sizes[axes])) for n, axes in cuts]
    m, first = bounds[0]
    return len(sizes) == 1 and all([lo * n for lo in first] == [lo * m for lo in other] for n, other in bounds[1:])
