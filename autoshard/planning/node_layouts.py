"""Converts an old plan, which has placements by node of an fx graph and nothing else, to a Solution of the graph captured from it."""

from dataclasses import replace

from autoshard.capture import Captured, is_value
from autoshard.layout import parse, replicated, text, why_illegal
from autoshard.planning.describe import parameter_row
from autoshard.solution import Placed, Solution
from autoshard.torch_private import pytree


def with_node_layouts(captured: Captured, old: Solution, path: str) -> Solution:
    """The old plan with the layouts of its nodes on the values that the nodes became; all other ops are replicated.

    Nobody has judged such a plan, and its status says so. ValueError, which names the file `path`, where the plan is of another graph.
    """
    graph, mesh = captured.graph, old.mesh
    everywhere = text(replicated(len(mesh.axes)))
    layouts = {
        op.name: Placed((everywhere,) * len(op.inputs), tuple(None if t is None else everywhere for t in op.outputs)) for op in graph.ops
    }
    known = [node for node in captured.values if node.name in old.layouts]
    if not known:
        raise ValueError(f"{path} names none of this graph's nodes; it is a plan of another graph, so plan again without preload_solution")
    for node in known:
        values = [leaf for leaf in pytree.tree_leaves(captured.values[node], is_leaf=is_value) if leaf is not None]
        for (i, k), written in zip(values, old.layouts[node.name].outputs, strict=False):
            op, tensor = graph.ops[i], graph.tensor((i, k))
            reason = why_illegal(tensor.shape, parse(written), mesh) if written else None
            if reason:
                raise ValueError(f"{path} does not fit this graph: {node.name}: {reason}; plan again without preload_solution")
            outputs = list(layouts[op.name].outputs)
            outputs[k] = written or outputs[k]
            layouts[op.name] = replace(layouts[op.name], outputs=tuple(outputs))
    stored = {name: parse(layouts[name].outputs[0] or everywhere) for name in graph.parameters}
    parameters = {name: parameter_row(graph.tensor((i, 0)), stored[name], mesh) for name, i in graph.parameters.items()}
    return replace(old, layouts=layouts, parameters=parameters)
