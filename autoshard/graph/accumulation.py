"""A training step of several microbatches: the copies of parameters that are kept for the step, and the sums of their gradients.

    w  ->  w.kept  ->  readers of w                    once per step, then once per microbatch
    gradient of w  ->  w.accumulated  ->  w            once per microbatch, then once per step

`w.kept` and `w.accumulated` are ops without arithmetic. Their layouts are choices as those of all other ops: DDP, ZeRO and FSDP differ
in them only. A program with one microbatch has neither. The other ops of the graph are those of one microbatch.
"""

from __future__ import annotations

from dataclasses import replace

from autoshard.graph.records import Const, Graph, Op, Ref, Tensor, Value

KEPT, ACCUMULATED = "kept", "accumulated"  # kinds of ops, and the ends of their names
_LITERALS: tuple = ((Ref(0),), ())


def with_microbatches(graph: Graph, dtype: str | None = None) -> Graph:
    """The graph with an op `w.kept` for every parameter that is read and an op `w.accumulated` for every gradient of a parameter.

    dtype: of the sums, such as "float32"; by default that of the gradient.
    """
    ops: list[Op] = []
    places = list(range(len(graph.ops)))  # of each op in the new graph
    kept: dict[int, int] = {}
    sums: dict[int, list[str]] = {}  # op -> the parameters whose gradients it computes
    trained = {r.name: r.value for r in graph.results if r.kind == "gradient" and r.value is not None and r.name in graph.parameters}
    for name, value in trained.items():
        sums.setdefault(value[0], []).append(name)
    first = next((i for i, op in enumerate(graph.ops) if not op.is_placeholder), len(graph.ops))
    new_values: dict[str, Value] = {}

    def moved(value: Value) -> Value:
        return (kept[value[0]], 0) if value[0] in kept else (places[value[0]], value[1])

    for i, op in enumerate(graph.ops):
        if i == first:
            kept = _keep(graph, ops)
        places[i] = len(ops)
        ops.append(replace(op, inputs=tuple(map(moved, op.inputs))))
        for name in sums.get(i, ()):
            new_values[name] = (len(ops), 0)
            ops.append(_sum(name, (places[i], trained[name][1]), graph.tensor(trained[name]), dtype))
    results = [
        r if r.value is None else replace(r, value=new_values[r.name] if r.name in new_values and r.kind == "gradient" else moved(r.value))
        for r in graph.results
    ]
    return Graph(tuple(ops), tuple(results), graph.tied)


def _keep(graph: Graph, ops: list[Op]) -> dict[int, int]:
    """Adds the kept copies to `ops`, which hold the placeholders; returns the place of each parameter's."""
    kept = {}
    for name, i in graph.parameters.items():
        if (i, 0) in graph.users:
            kept[i] = len(ops)
            module = name.rpartition(".")[0]
            ops.append(Op(f"{name}.{KEPT}", "aten.alias.default", ((i, 0),), _LITERALS, (graph.tensor((i, 0)),), KEPT, module, alias=0))
    return kept


def _sum(name: str, gradient: Value, tensor: Tensor, dtype: str | None) -> Op:
    target = "aten.alias.default"  # of a value of its own, so that this is no view
    literals: tuple = _LITERALS
    if dtype is not None and dtype != tensor.dtype:
        target, literals = "aten._to_copy.default", ((Ref(0),), (("dtype", Const("dtype", dtype)),))
        tensor = replace(tensor, dtype=dtype)
    module = name.rpartition(".")[0]
    return Op(f"{name}.{ACCUMULATED}", target, (gradient,), literals, (tensor,), ACCUMULATED, module, backward=True)
