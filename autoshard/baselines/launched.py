"""What a launcher that knows modules only makes of some weights cut over one axis, as pins that can be priced.

On `axis`: grouped weights are cut over their class, as is all between them; a lone weight is cut and what it gives is made whole
at once; everything else is whole. On the other axes: the batch is cut, parameters are whole, or cut (fully_shard).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from autoshard.baselines.classes import dim_classes
from autoshard.baselines.megatron import from_parameters
from autoshard.baselines.pins import FIRST, Coder, Cuts, settle
from autoshard.baselines.schemes import AxisCut, Baseline, Batch, _axes, _batch_class, _cut_batch, _wanted
from autoshard.baselines.uses import Use, Uses
from autoshard.graph import Graph, Value
from autoshard.layout import Layout
from autoshard.mesh import Mesh
from autoshard.strategies import Candidates


def launched(
    graph: Graph,
    mesh: Mesh,
    candidates: Candidates,
    axis: int,
    uses: Uses,
    roots: Sequence[int],
    lone: Sequence[tuple[Use, int]],
    *,
    fully_shard: bool,
) -> Baseline:
    """roots: classes of the groups that are cut. lone: (use, the parameter's dim that is cut)."""
    slots, classes = uses.slots, dim_classes(uses.slots)
    root = _batch_class(graph, classes)
    batch = Batch(classes, root, math.gcd(*(n for n, of in zip(slots.sizes, classes.roots, strict=True) if of == root)))
    cut, said = _cut_batch(mesh, [k for k in _axes(mesh) if k != axis], batch)
    cut[axis] = AxisCut(uses.classes, dict.fromkeys(roots, FIRST))
    usual, own = _wanted(graph, mesh, cut), dict(_lone_cuts(graph, lone))

    def wanted(value: Value) -> Cuts:
        rows = usual(value)
        if value not in own:
            return rows
        return tuple(tuple(FIRST if k == axis and d == own[value] else p for d, p in enumerate(row)) for k, row in enumerate(rows))

    coder = Coder(candidates)
    if not fully_shard:
        return Baseline("modules", settle(graph, coder, wanted, {}, frozenset()), said)
    found = settle(graph, coder, wanted, {}, frozenset())
    fixed = {}
    for i in graph.parameters.values():
        pinned = found[graph.ops[i].name].outputs
        assert pinned is not None and pinned[0] is not None
        fixed[i] = _also_cut(candidates, mesh, i, axis, pinned[0])
    views = frozenset(i for i in from_parameters(graph) if len(graph.ops[i].inputs) == 1 and graph.ops[i].kind == "compute")
    return Baseline("modules", settle(graph, coder, wanted, fixed, views), f"{said}; parameters cut over the other axes")


def _lone_cuts(graph: Graph, lone: Sequence[tuple[Use, int]]) -> list[tuple[Value, int]]:
    """The values that lie cut because of a lone weight: it and its views, and what the op gives, by their dim."""
    found = []
    for use, dim in lone:
        op = graph.ops[use.index]
        found.append((use.trail[0], dim))
        if dim == use.kept:
            found.append(((use.index, 0), len(op.output.shape) - 1))
        for value in use.trail[1:]:
            rank = len(graph.tensor(value).shape)
            swapped = value == use.trail[-1] and use.w[1] % rank != use.kept
            found.append((value, rank - 1 - dim if swapped else dim))
    return found


def _also_cut(candidates: Candidates, mesh: Mesh, index: int, axis: int, layout: Layout) -> Layout:
    """As fully_shard leaves a parameter: as it lies on `axis`, and on the other axes cut over dim 0 where that divides."""
    options = [c.outputs[0] for c in candidates.of[index] if c.outputs[0] is not None and c.outputs[0][axis] == layout[axis]]

    def order(option: Layout) -> tuple:
        first = [p.is_shard() and p.dim == 0 for k, p in enumerate(option) if k != axis]  # type: ignore[attr-defined]
        odd = [p.is_shard() and p.dim != 0 for k, p in enumerate(option) if k != axis]  # type: ignore[attr-defined]
        return (-sum(odd), sum(first))

    return max(options, key=order)
