"""Projections of one input as engines hold them: query, key and value, or gate and up, are sharded apart and computed by one kernel.

    y = x W,   y_k = the features a_k to b_k of y       ->       y_k = x W_k,   W_k = the columns a_k to b_k of W        `divided`
    seconds of x [W_1 W_2 ...] on a device's shards, in place of the sum of those of x W_k                               `in_one_kernel`
"""

from collections.abc import Iterator
from dataclasses import replace

from autoshard.cost import cost_of
from autoshard.graph import Fused, Graph, Op, Rewriting, Tensor, Value, grouped
from autoshard.layout import local_shape, parse
from autoshard.mesh import Mesh
from autoshard.solution import Solution

MATMULS = ("aten.mm.default", "aten.addmm.default")
VIEWS = ("aten.view.default", "aten._unsafe_view.default", "aten.reshape.default")


def divided(graph: Graph) -> Graph:
    """The graph with a parameter and a matmul for each part of the features of a matrix that are read apart; parts have the name of the
    matrix, and their number behind it."""
    widths: dict[int, list[int]] = {}  # of ops that become one per part
    ends: dict[Value, tuple[int, int]] = {}  # of parts of y: the op that made y, and the part
    for i, op in enumerate(graph.ops):
        if op.target in MATMULS:
            chain = [*_of_parameters(graph, op), *_viewed(graph, i)]
            alone = chain[0] != i and all(graph.only_user((a, 0)) is not None for a in chain[:-1])
            if alone and (parts := _parts(graph, chain[-1])):
                widths |= dict.fromkeys(chain, [width for _, width, _ in parts])
                ends |= {value: (chain[-1], k) for k, (*_, value) in enumerate(parts)}
    new, copies = Rewriting(graph), dict[tuple[int, int], Value]()
    for i, op in enumerate(graph.ops):
        for k, width in enumerate(widths.get(i, ())):
            inputs = tuple(copies[a, k] if a in widths else new.read((a, n)) for a, n in op.inputs)
            copies[i, k] = new.add(replace(_narrowed(op, width, graph), name=f"{op.name}.{k}", inputs=inputs))
        if (i, 0) in ends:
            new.values |= {(i, n): copies[ends[i, n]] for n in range(len(op.outputs))}
        elif i not in widths:
            new.keep(i)
    return new.graph() if widths else graph


def _of_parameters(graph: Graph, matmul: Op) -> list[int]:
    """The ops of the matmul's matrix and bias, from the parameters on; [] where one is computed."""
    chain: list[int] = []
    for a, _ in (matmul.inputs[0], matmul.inputs[-1]) if len(matmul.inputs) == 3 else matmul.inputs[-1:]:
        first = graph.ops[a].inputs[0][0] if graph.ops[a].target == "aten.t.default" else a
        if graph.ops[first].kind != "parameter":
            return []
        chain += dict.fromkeys((first, a))
    return chain


def _viewed(graph: Graph, i: int) -> Iterator[int]:
    """Op i, and the views of all its features that follow."""
    width = graph.ops[i].output.shape[-1]
    while True:
        yield i
        user = graph.only_user((i, 0))
        if user is None or graph.ops[user].target not in VIEWS or graph.ops[user].output.shape[-1] != width:
            return
        i = user


def _parts(graph: Graph, i: int) -> list[tuple[int, int, Value]]:
    """(first feature, number of features, value) of the parts in which the features of op i are read; [] where they are read as a whole."""
    shape, parts = graph.ops[i].output.shape, []
    for j in {j for j, _ in graph.users.get((i, 0), ())}:
        op, start = graph.ops[j], 0
        if op.target == "aten.slice.Tensor" and len(op.literals[0]) < 5:
            start = op.literals[0][2]
        elif not op.target.startswith("aten.split"):
            return []
        for n, one in enumerate(op.outputs):
            assert one is not None
            if one.shape[:-1] != shape[:-1]:
                return []
            parts.append((start, one.shape[-1], (j, n)))
            start += one.shape[-1]
    parts.sort()
    ends = [start + width for start, width, _ in parts]
    return parts if len(parts) > 1 and [start for start, *_ in parts] == [0, *ends[:-1]] and ends[-1] == shape[-1] else []


def _narrowed(op: Op, width: int, graph: Graph) -> Op:
    """The op with so many features in place of all."""
    shape, user = op.output.shape, graph.only_user((graph.index[op.name], 0))
    of_rows = op.is_placeholder and user is not None and graph.ops[user].target == "aten.t.default"
    shape = (width, *shape[1:]) if of_rows else (*shape[:-1], width)
    literals = ((op.literals[0][0], shape), op.literals[1]) if op.target in VIEWS else op.literals
    return replace(op, outputs=(Tensor(shape, op.output.dtype),), literals=literals)


def in_one_kernel(graph: Graph, mesh: Mesh, solution: Solution) -> Iterator[tuple[str, float]]:
    """(module, seconds, mostly below 0): what it adds to run the matmuls of one input in a module as one kernel, on a device's shards."""
    joined = grouped(((op.module.rpartition(".")[0], graph.storage(op.inputs[-2])), op) for op in graph.ops if op.target in MATMULS)
    for (module, _), ops in joined.items():
        pairs = []
        for op in ops:
            layouts = [parse(written) for written in solution.layouts[op.name].inputs[-2:]]
            shapes = [graph.tensor(value).shape for value in op.inputs[-2:]]
            pairs.append([local_shape(shape, layout, mesh) for shape, layout in zip(shapes, layouts, strict=True)])
        if len(ops) > 1 and len({x for x, _ in pairs}) == 1:
            x, widths = pairs[0][0], [w[1] for _, w in pairs]
            alone, joint = (sum(_seconds(x, n, ops[0].output.dtype, mesh) for n in of) for of in (widths, [sum(widths)]))
            yield module, joint - alone


def _seconds(x: tuple[int, ...], width: int, dtype: str, mesh: Mesh) -> float:
    inputs, outputs = ((x, dtype), ((x[1], width), dtype)), (((x[0], width), dtype),)
    return cost_of(mesh).compute("aten.mm.default", inputs, outputs, None, mesh.device, fused=Fused((1.0, 1.0), (1.0,), True))
