"""Candidates of an op: rows of one axis, crossed over the axes of a mesh.

    candidates(op) = { (row_0, ..., row_k) : every layout is legal, no two kinds of Partial, shards of one row match }

A row says that the op on the local shards gives the shards of the op's outputs, so shard r of one tensor has to go with shard r of
the others: the shards of dims of sizes m and n match if their bounds are the same in units of m and of n. Equal shards always
match. Uneven shards match if all those dims are sharded over the same axes and each shard of one is m / n times as long as that of
the other: 14 heads and 7 key-value heads on 4 ranks are (4, 4, 4, 2) and (2, 2, 2, 1). 14 heads and 896 features don't match, as the
shards of 896 have 224 features each, three and a half heads.

One candidate is one choice of a node in the Problem. Candidates depend only on the op's signature, so they are computed once per
signature and shared.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import product
from typing import TypeVar

import numpy as np
from torch.distributed.tensor.placement_types import Placement

from autoshard.graph import KEPT, OFFLOADED, REDUCE_THEN_CAST, RELOADED, SELECTED, Graph, Op, Tensor, is_random
from autoshard.layout import Layout, R, S, all_layouts, chunk_bounds, leaves_empty, placement_text
from autoshard.mesh import Mesh
from autoshard.strategies import attention as _attention  # noqa: F401  (registers its rules)
from autoshard.strategies import convolution as _convolution  # noqa: F401
from autoshard.strategies import dims as _dims
from autoshard.strategies import experts as _experts  # noqa: F401
from autoshard.strategies import indexing as _indexing  # noqa: F401
from autoshard.strategies import matmuls_and_losses as _matmuls_and_losses  # noqa: F401
from autoshard.strategies import recurrent as _recurrent  # noqa: F401
from autoshard.strategies import structure as _structure  # noqa: F401
from autoshard.strategies import torch_rules
from autoshard.strategies.rows import COMBINES, EVEN_ONLY, RULES, Inputs, Row, Rule, replicate_row

T = TypeVar("T")
U = TypeVar("U")


@dataclass(frozen=True)
class Candidate:
    """The layouts of one op's tensor inputs and outputs (None for an output that is no tensor)."""

    inputs: tuple[Layout, ...]
    outputs: tuple[Layout | None, ...]


@dataclass(frozen=True, eq=False)
class Candidates:
    """For every op of a graph its candidates, shared by reference between ops of the same signature."""

    of: tuple[tuple[Candidate, ...], ...]
    unknown: tuple[int, ...]  # ops without any rule; they are replicated
    num_signatures: int
    results: tuple[tuple[Layout, ...] | None, ...] = ()  # per result the layouts that it may have; by default all legal ones
    _coded: dict[int, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict, repr=False)

    def coded(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        """The candidates of op i as numbers (`code`), [candidate, tensor, axis] of inputs and of outputs; replicated for no tensor."""
        options = self.of[i]
        if id(options) not in self._coded:
            axes = max((len(layout) for layout in (*options[0].inputs, *options[0].outputs) if layout is not None), default=0)
            both = ([c.inputs for c in options], [c.outputs for c in options])
            codes = {layout: tuple(map(code, layout or (None,) * axes)) for side in both for one in side for layout in one}
            arrays = [np.array([codes[layout] for one in side for layout in one], dtype=np.int64) for side in both]
            self._coded[id(options)] = (arrays[0].reshape(len(options), -1, axes), arrays[1].reshape(len(options), -1, axes))
        return self._coded[id(options)]


@dataclass(frozen=True, eq=False)
class KnownCandidates:
    """The candidates of every signature that was met on one mesh: graphs that are planned one after the other share them."""

    of: dict[tuple, tuple[Candidate, ...]] = field(default_factory=dict)
    rows: dict[tuple, tuple[Row, ...] | None] = field(default_factory=dict)


def candidates(graph: Graph, mesh: Mesh, known: KnownCandidates | None = None) -> Candidates:
    """known: those of other graphs on the same mesh, to which the graph's are added."""
    known = known or KnownCandidates()
    of_signature, rows = known.of, known.rows
    of_ops, unknown, met = [], [], set()
    for i, op in enumerate(graph.ops):
        signature = graph.signature(i)
        met.add(signature)
        if signature not in of_signature:
            inputs = graph.input_tensors(i)
            if op.is_placeholder:
                of_signature[signature] = tuple(Candidate((), (layout,)) for layout in all_layouts(op.output.shape, mesh))
            elif op.kind in (KEPT, SELECTED, OFFLOADED, RELOADED):
                layouts = all_layouts(op.output.shape, mesh)
                of_signature[signature] = tuple(Candidate((layout,) * len(inputs), (layout,)) for layout in layouts)
            else:
                rows[signature] = one_axis_rows(op, inputs)
                crossed = rows[signature] or (replicate_row(op, inputs),)
                of_signature[signature] = cross(op, inputs, crossed, mesh, even=op.target in EVEN_ONLY)
        of_ops.append(of_signature[signature])
        if rows.get(signature, ()) is None:
            unknown.append(i)
    return Candidates(tuple(of_ops), tuple(unknown), len(met))


def common_candidates(graphs: Sequence[Graph], mesh: Mesh) -> Candidates:
    """The candidates that every op has in all of these graphs, which are one program in several sizes; in the order of the first graph."""
    known = KnownCandidates()
    each = [candidates(graph, mesh, known) for graph in graphs]
    shared: dict[tuple[int, ...], tuple[Candidate, ...]] = {}
    for options in zip(*(one.of for one in each), strict=True):
        key = tuple(map(id, options))
        if key not in shared:
            shared[key] = tuple(_common([[(c.inputs, c.outputs) for c in of] for of in options], options[0]))
    values = [[graph.tensor(result.value).shape for graph in graphs] if result.value else None for result in graphs[0].results]
    layouts = [None if shapes is None else [all_layouts(shape, mesh) for shape in shapes] for shapes in values]
    results = tuple(None if of is None else tuple(_common(of, of[0])) for of in layouts)
    of_ops = tuple(shared[tuple(map(id, options))] for options in zip(*(one.of for one in each)))
    return replace(each[0], of=of_ops, results=results, _coded={})


def _common(keys: Sequence[Sequence[T]], items: Sequence[U]) -> list[U]:
    """The items whose key all sequences have. keys[0]: those of the items."""
    others = [set(of) for of in keys[1:]]
    return [item for key, item in zip(keys[0], items, strict=True) if all(key in of for of in others)]


def one_axis_rows(op: Op, inputs: Inputs) -> tuple[Row, ...] | None:
    """The rows of our rule, else of torch's rule, else of an op per element, after the replicated row; None for an op without any rule."""
    return _rows_of(op.signature, tuple(inputs), RULES.get(op.target))


@lru_cache(maxsize=50_000)  # the same on every mesh
def _rows_of(signature: tuple, inputs: Inputs, rule: Rule | None) -> tuple[Row, ...] | None:
    target, literals, outputs, kind, alias = signature
    op = Op("", target, (), literals, outputs, kind, alias=alias)
    is_unknown = rule is None and is_random(op)  # torch's rule would let every shard draw the same
    known = rule(op, inputs) if rule else None if is_unknown else torch_rules.rows(op, inputs)
    if known is None and not is_unknown:
        known = _dims.pointwise(op, inputs)
    if known is None:
        return None
    if op.kind == REDUCE_THEN_CAST:
        known = [r for r in known if not any(p.is_partial() for p in r.inputs)]
    return tuple(r for r in dict.fromkeys([replicate_row(op, inputs), *known]) if not _has_partial_bool(r, op, inputs))


def _has_partial_bool(row: Row, op: Op, inputs: Inputs) -> bool:
    """Whether a bool tensor is Partial: "or" is no sum, and ops that count or convert the bools afterwards would be wrong."""
    pairs = [*zip(row.inputs, inputs, strict=True), *zip(row.outputs, op.outputs, strict=True)]
    return any(p is not None and t is not None and p.is_partial() and t.dtype == "bool" for p, t in pairs)


def cross(op: Op, inputs: Inputs, rows: Sequence[Row], mesh: Mesh, *, even: bool = False) -> tuple[Candidate, ...]:
    """All combinations of rows over the axes that the sizes of all tensors allow, without duplicates, in a fixed order.

    even: only those in which all shards of a tensor have the same shape.
    """
    units = max((r.units for r in rows), default=0)
    tensors = (*inputs, *op.outputs, *((Tensor((units,), "bool"),) if units else ()))  # units: as one more sharded tensor
    present = [k for k, t in enumerate(tensors) if t is not None]
    coded = [(placements, tuple(map(code, placements))) for placements in (_placements(r, units) for r in rows)]
    sizes = mesh.shape
    per_axis = [[c for c in coded if _fills(c[1], tensors, n, even)] if n > 1 else coded[:1] for n in sizes]
    known: list[dict[tuple[int, ...], tuple[Layout, bool, bool]]] = [{} for _ in tensors]
    combines = COMBINES.get(op.target)
    crossed: dict[tuple, Candidate] = {}
    for combination in product(*per_axis):
        layouts: list[Layout | None] = [None] * len(tensors)
        uneven, keys = False, list(zip(*[codes for _, codes in combination]))
        for k in present:
            key = keys[k]
            if key not in known[k]:
                layout = tuple([placements[k] for placements, _ in combination])
                known[k][key] = (layout, *_judged(tensors[k].shape, key, sizes))  # type: ignore[union-attr]
            layouts[k], legal, is_even = known[k][key]
            if not legal:
                break
            uneven = uneven or not is_even
        else:
            if not uneven or (not even and _match([(tensors[k], layouts[k]) for k in present], mesh)):  # type: ignore[misc]
                ins, outs = layouts[: len(inputs)], layouts[len(inputs) : len(inputs) + len(op.outputs)]
                if combines is None or combines(op, ins):  # type: ignore[arg-type]
                    crossed.setdefault(tuple(keys[: len(inputs) + len(op.outputs)]), Candidate(tuple(ins), tuple(outs)))  # type: ignore[arg-type]
    return tuple(crossed.values())


@lru_cache(maxsize=200_000)  # the same for all ops
def _judged(shape: tuple[int, ...], codes: tuple[int, ...], mesh_shape: tuple[int, ...]) -> tuple[bool, bool]:
    """Whether a layout is legal (`layout.is_legal`, which reads placements), and whether its shards are equal."""
    over = [tuple([n for code, n in zip(codes, mesh_shape, strict=True) if code == dim]) for dim in range(len(shape))]
    odd = [(size, axes) for size, axes in zip(shape, over, strict=True) if size % math.prod(axes)]
    kinds = {code for code in codes if code < REPLICATED}
    return len(kinds) <= 1 and not any(leaves_empty(size, axes) for size, axes in odd), not odd


def _placements(row: Row, units: int) -> tuple[Placement | None, ...]:
    return (*row.inputs, *row.outputs, *((S(0) if row.units else R,) if units else ()))


REPLICATED = -1
OTHERS = {"R": REPLICATED, "P": -2, "P(max)": -3, "P(min)": -4, "P(avg)": -5}


def code(p: Placement | None) -> int:
    """A placement as a number, which is faster to compare: the dim of S, -1 for R, less for the others."""
    return REPLICATED if p is None else p.dim if p.is_shard() else OTHERS[placement_text(p)]  # type: ignore[attr-defined]


def _fills(codes: tuple[int, ...], tensors: tuple[Tensor | None, ...], size: int, even: bool) -> bool:
    """Whether every rank gets a shard that isn't empty, as far as one axis of this size can tell. even: and all shards are equal."""
    sizes = [t.shape[dim] for dim, t in zip(codes, tensors, strict=True) if dim >= 0 and t is not None]
    return all([n % size == 0 or (not even and n > size) for n in sizes])


def _match(layouts: list[tuple[Tensor, Layout]], mesh: Mesh) -> bool:
    """Whether the shards of all dims that are sharded over one axis match, for each axis."""
    for axis in range(len(mesh.axes)):
        sharded = [(t, layout) for t, layout in layouts if layout[axis].is_shard()]
        shards = {(t, layout[axis], tuple(k for k, p in enumerate(layout) if p == layout[axis])) for t, layout in sharded}
        dims = {(t.shape[p.dim], axes) for t, p, axes in shards}  # type: ignore[attr-defined]
        if len(dims) > 1 and not _proportional(dims, mesh):
            return False
    return True


def _proportional(dims: set[tuple[int, tuple[int, ...]]], mesh: Mesh) -> bool:
    """Whether the shards of all these (size, axes that shard it) have the same bounds in units of their sizes."""
    sizes = {axes: tuple(mesh.axes[k].size for k in axes) for _, axes in dims}
    if not any(n % math.prod(sizes[axes]) for n, axes in dims):
        return True
    bounds = [(n, chunk_bounds(n, sizes[axes])) for n, axes in dims]
    m, first = bounds[0]
    return len(sizes) == 1 and all([lo * n for lo in first] == [lo * m for lo in other] for n, other in bounds[1:])
