"""Layouts with one planted fault, which verify must detect: the negative control of verify.

One op whose output is S(d) (or R, or P) on a mesh axis is said to be R (or S(d)) there. Its local output then has another shape than
its layout says, or each rank's summand of a matmul over a sharded dim counts as the sum.
"""

import random
from collections.abc import Iterator, Mapping
from dataclasses import replace

from torch.distributed.tensor.placement_types import Partial, Shard

from autoshard.graph import Graph, Value
from autoshard.layout import Layout, R, S, is_legal, parse, text
from autoshard.lower.generator import draws
from autoshard.lower.literals import INSTEAD, ROWS
from autoshard.mesh import Mesh
from autoshard.solution import Placed

MATMULS = ("aten.mm.default", "aten.bmm.default", "aten.addmm.default", "aten.baddbmm.default", "aten.linear.default")


def plant_fault(layouts: Mapping[str, Placed], graph: Graph, mesh: Mesh, seed: int) -> dict[str, Placed]:
    """The layouts with one op's output layout replaced by a wrong one. The same seed plants the same fault.

    ValueError when no op of the graph has a layout that is certainly wrong (a mesh of one device).
    """
    possible = [fault for i in range(len(graph.ops)) for fault in _faults(layouts, graph, mesh, i)]
    if not possible:
        raise ValueError(f"there is no op whose layout can be wrong on a mesh of {mesh.shape}; the negative control needs two devices")
    name, k, claimed = random.Random(seed).choice(possible)
    placed = layouts[name]
    outputs = tuple(text(claimed) if j == k else written for j, written in enumerate(placed.outputs))
    return {**layouts, name: replace(placed, outputs=outputs)}


def _faults(layouts: Mapping[str, Placed], graph: Graph, mesh: Mesh, i: int) -> Iterator[tuple[str, int, Layout]]:
    """(op name, output, wrong layout) for op i. Ops whose literals or draws follow their layout are left out: the wrong layout would come
    true."""
    op = graph.ops[i]
    if op.is_placeholder or not op.inputs or draws(op.target) or (op.target in ROWS and op.target not in INSTEAD):
        return
    for k, tensor in enumerate(op.outputs):
        written = layouts[op.name].outputs[k]
        if tensor is None or written is None or 0 in tensor.shape:  # an empty tensor is right in every layout
            continue
        layout = parse(written)
        for axis in (axis for axis, a in enumerate(mesh.axes) if a.size > 1):
            for wrong in [R, *(S(d) for d in range(len(tensor.shape)))]:
                claimed = (*layout[:axis], wrong, *layout[axis + 1 :])
                is_wrong = wrong != layout[axis] and is_legal(tensor.shape, claimed, mesh)
                if is_wrong and _is_sure(layouts, graph, (i, k), layout, claimed, axis):
                    yield op.name, k, claimed


def _is_sure(layouts: Mapping[str, Placed], graph: Graph, value: Value, layout: Layout, claimed: Layout, axis: int) -> bool:
    """Whether verify must detect it: a local shape changes, or a matmul's sum is left out and no reader takes a partial sum."""
    if not isinstance(layout[axis], Partial):
        return True
    readers = [parse(layouts[graph.ops[j].name].inputs[a])[axis] for j, a in graph.users.get(value, ())]
    hub = layouts[graph.ops[value[0]].name].hubs[value[1]]
    readers += [parse(hub)[axis]] if hub else []
    asked = any(isinstance(p, Partial) for p in readers)
    is_read = bool(readers) or any(result.value == value for result in graph.results)
    return not asked and (isinstance(claimed[axis], Shard) or (is_read and graph.ops[value[0]].target in MATMULS))
