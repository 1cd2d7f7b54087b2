"""A training step of several microbatches: the copies of parameters that are kept for the step, and the sums of their gradients.

    w  ->  w.kept  ->  readers of w                    once per step, then once per microbatch
    gradient of w  ->  w.accumulated  ->  w            once per microbatch, then once per step

`w.kept` and `w.accumulated` are ops without arithmetic. Their layouts are choices as those of all other ops: DDP, ZeRO and FSDP differ
in them only. A program with one microbatch has neither. The other ops of the graph are those of one microbatch.
"""

from dataclasses import replace

from autoshard.graph.records import Const, Graph, Op, Ref, Tensor, Value, grouped
from autoshard.graph.rewriting import Rewriting

KEPT, ACCUMULATED = "kept", "accumulated"  # kinds of ops, and the ends of their names
_LITERALS: tuple = ((Ref(0),), ())


def with_microbatches(graph: Graph, dtype: str | None = None) -> Graph:
    """The graph with an op `w.kept` for every parameter that is read and an op `w.accumulated` for every gradient of a parameter.

    dtype: of the sums, such as "float32"; by default that of the gradient.
    """
    new = Rewriting(graph)
    trained = {r.name: r.value for r in graph.results if r.kind == "gradient" and r.value is not None and r.name in graph.parameters}
    computed_by = grouped((value[0], name) for name, value in trained.items())  # op -> the parameters whose gradients it computes
    first = next((i for i, op in enumerate(graph.ops) if not op.is_placeholder), len(graph.ops))
    sums: dict[str, Value] = {}
    for i in range(len(graph.ops)):
        if i == first:
            _keep_parameters(new)
        new.keep(i)
        for name in computed_by.get(i, ()):
            sums[name] = new.add(_sum(name, new.read(trained[name]), graph.tensor(trained[name]), dtype))
    return new.graph({r: sums[r.name] for r in graph.results if r.kind == "gradient" and r.name in sums})


def _keep_parameters(new: Rewriting) -> None:
    """Adds the kept copies behind the placeholders; later ops read them."""
    graph = new.source
    for name, i in graph.parameters.items():
        if (i, 0) in graph.users:
            module, tensor = name.rpartition(".")[0], graph.tensor((i, 0))
            kept = Op(f"{name}.{KEPT}", "aten.alias.default", (new.read((i, 0)),), _LITERALS, (tensor,), KEPT, module, alias=0)
            new.values[i, 0] = new.add(kept)


def _sum(name: str, gradient: Value, tensor: Tensor, dtype: str | None) -> Op:
    target = "aten.alias.default"  # of a value of its own, so that this is no view
    literals: tuple = _LITERALS
    if dtype is not None and dtype != tensor.dtype:
        target, literals = "aten._to_copy.default", ((Ref(0),), (("dtype", Const("dtype", dtype)),))
        tensor = replace(tensor, dtype=dtype)
    module = name.rpartition(".")[0]
    return Op(f"{name}.{ACCUMULATED}", target, (gradient,), literals, (tensor,), ACCUMULATED, module, backward=True)
