"""Reads a traced ATen graph into a Graph: ops in order, literals as plain values, which outputs are views, module paths."""

import operator
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from autoshard.capture.explain import line_of
from autoshard.capture.inputs import Named
from autoshard.graph import ORDER, PER_ELEMENT, RANDOM, WRITES, Const, Graph, Op, Ref, Result, Tensor, Value
from autoshard.torch_private import FakeTensor, OpOverload, pytree

# Norms whose statistics (outputs 1 and 2) are float32 for inputs of 16 bits on a GPU, but not in every case on a CPU; their kernels
# (lower.kernels.norms) make them so everywhere.
STATISTICS = {"aten.native_layer_norm.default", "aten.native_group_norm.default", "aten._native_batch_norm_legit_functional.default"}
NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)
# Factories to which a tensor says no more than size, dtype and device: as what they are read, so that nobody moves that tensor for them.
OF_TEMPLATES = {f"aten.{of}.default": f"aten.{n}.default" for n in ("zeros", "ones", "full") for of in (f"new_{n}", f"{n}_like")}
ALWAYS_VIEWS = {"aten._unsafe_view.default", "aten.reshape.default", "aten._reshape_alias.default"}


def read(
    traced: fx.GraphModule,
    names: list[Named],
    results: list[tuple[tuple[str, str], Any]],
    modules: Mapping[fx.Node, str],
    keep: Collection[fx.Node] = (),
) -> tuple[Graph, dict[fx.Node, Value], list[fx.Node]]:
    """The Graph of the traced nodes, placeholders first and dead code left out, the Value of each tensor node, and the node of each op."""
    alive = _alive(traced, keep)
    ops: list[Op] = []
    values: dict[fx.Node, Value] = {}
    nodes = list(traced.graph.nodes)
    placeholders = [node for node in nodes if node.op == "placeholder"]
    constants = [
        (node, Named("buffer", str(node.target), _held(traced, node))) for node in nodes if node.op == "get_attr" and node in alive
    ]
    filled: list[tuple[fx.Node, Op]] = []
    first: dict[str, fx.Node] = {}  # by the name of a constant, which may be read by several nodes
    for node, named in constants:
        first.setdefault(named.name, node)
    for node, named in [*zip(placeholders, names, strict=True), *(row for row in constants if row[0] is first[row[1].name])]:
        if not isinstance(node.meta.get("val"), torch.Tensor) and not node.users:  # a flag or a number, which the capture has decided
            continue
        if (full := _filled(named, node.meta["val"])) is not None:
            filled.append((node, full))
        else:
            values[node] = (len(ops), 0)
            ops.append(Op(named.name, named.kind, (), (), (_tensor(node.meta["val"]),), named.kind))
    values |= {node: (len(ops) + n, 0) for n, (node, _) in enumerate(filled)}
    sources = [node for node, (i, _) in values.items() if i < len(ops)] + [node for node, _ in filled]
    ops += [full for _, full in filled]  # after the placeholders
    values |= {node: values[first[named.name]] for node, named in constants if first[named.name] in values}
    tuples: dict[fx.Node, int] = {}
    for node in nodes:
        if node.op != "call_function" or node not in alive:
            continue
        if node.target is operator.getitem and node.args[0] in tuples:
            values[node] = (tuples[node.args[0]], node.args[1])
            continue
        if isinstance(node.meta["val"], (tuple, list)):
            tuples[node] = len(ops)
        else:
            values[node] = (len(ops), 0)
        sources.append(node)
        ops.append(_with_float_statistics(_op(node, values, modules.get(node, "")), ops))
    _check_names(ops)
    graph_results = tuple(Result(kind, name, values[leaf] if isinstance(leaf, fx.Node) else None) for (kind, name), leaf in results)
    return with_writes(Graph(tuple(ops), graph_results)), values, sources


def with_writes(graph: Graph) -> Graph:
    """The graph in which new rows of a buffer or an input, a cache of keys and values say, are written into it where nothing reads the
    old ones afterwards, and it isn't an output, too. Not where there are gradients: their pass may read what was there."""
    if graph.trains:
        return graph
    ops, returned = list(graph.ops), {graph.storage(r.value) for r in graph.results if r.kind == "output" and r.value is not None}
    for result in graph.results:
        value, writes = result.value, list[int]()
        while result.kind == "buffer" and value is not None and (op := ops[value[0]]).target in WRITES and value not in returned:
            writes.append(value[0])
            value = op.inputs[0] if graph.last_use[op.inputs[0]] == value[0] else None
        if value is not None and ops[value[0]].is_placeholder and ops[value[0]].name == result.name:
            for i in writes:
                ops[i] = replace(ops[i], alias=0)
    return replace(graph, ops=tuple(ops))


def _held(traced: fx.GraphModule, node: fx.Node) -> torch.Tensor | None:
    held = getattr(traced, str(node.target), None)
    return held if isinstance(held, torch.Tensor) else None


def _filled(named: Named, reference: torch.Tensor) -> Op | None:
    """The `aten.full` that creates a constant whose elements are all equal (`torch.tensor(0.5)`, an empty tensor); None for others.

    reference: a tensor with the constant's shape and dtype.
    """
    fill = _fill_of(named.value) if named.fill is None else named.fill
    if fill is None:
        return None
    literals = ((tuple(map(int, reference.shape)), fill), (("device", Const("device", "cpu")), ("dtype", _constant(reference.dtype, None))))
    return Op(named.name, "aten.full.default", (), literals, (_tensor(reference),))


def _fill_of(value: torch.Tensor | None) -> Any:
    """The value of all elements of a constant; None where it is not known or they differ."""
    if value is None or (value.numel() and (isinstance(value, FakeTensor) or value.is_meta)):
        return None
    if value.numel() == 0:
        return 0
    first = value.flatten()[0]
    return first.item() if bool(((value == first) | ((value != value) & (first != first))).all()) else None


def _check_names(ops: list[Op]) -> None:
    """Makes op names unique: a node with the name of a parameter gets a suffix."""
    taken: set[str] = set()
    for i, op in enumerate(ops):
        name = op.name
        while name in taken:
            name += "_op"
        taken.add(name)
        if name != op.name:
            ops[i] = replace(op, name=name)


def _alive(traced: fx.GraphModule, keep: Collection[fx.Node]) -> set[fx.Node]:
    """The kept nodes and those that results or kept nodes depend on, without assertions and other effects, which a plan doesn't need; and
    random ops, since the numbers of the next one depend on them."""
    alive = {*keep, *(node for node in traced.graph.nodes if isinstance(node.target, OpOverload) and draws(node.target))}
    for node in reversed(traced.graph.nodes):
        if node.op == "output" or node in alive:
            alive.update(n for n in node.all_input_nodes if not (_is_of_template(node) and n is node.args[0]))
    return alive


def _op(node: fx.Node, values: Mapping[fx.Node, Value], module: str) -> Op:
    if not isinstance(node.target, OpOverload):
        if isinstance(node.meta.get("val"), NUMBERS):
            raise _depends_on_data(node, str(next(iter(node.all_input_nodes), node)), module)
        raise ValueError(f"the captured program calls {node.target!r} (node {node.name}), which is not an ATen operator")
    if node.target._schema.is_mutable:
        rest = ", with dropout off (model.eval())" if "bernoulli" in str(node.target) else ""
        raise ValueError(f"node {node.name} ({node.target}) writes into its input; give a functional graph (torch.export makes one){rest}")
    inputs: list[Value] = []

    def literal(item: Any) -> Any:
        if isinstance(item, fx.Node):
            if not isinstance(item.meta.get("val"), torch.Tensor):
                raise _depends_on_data(node, item.name, module)
            inputs.append(values[item])
            return Ref(len(inputs) - 1)
        if isinstance(item, (tuple, list)):
            return tuple(literal(part) for part in item)
        return _constant(item, node)

    target, args, kwargs, result = str(node.target), node.args, node.kwargs, node.meta["val"]
    if _is_of_template(node):
        size = (tuple(result.shape),) * target.endswith("_like.default")
        target, args = OF_TEMPLATES[target], (*size, *args[1:])
        kwargs = {key: item for key, item in kwargs.items() if key != "memory_format"} | {"dtype": result.dtype, "device": result.device}
    literals = (literal(args), tuple((key, literal(item)) for key, item in sorted(kwargs.items())))
    outputs = tuple(_tensor(t) for t in _asked(node, result)) if isinstance(result, (tuple, list)) else (_tensor(result),)
    backward = node.meta.get("partitioner_tag") == "is_backward" or bool(node.meta.get("autograd_backward"))
    kind = "compute"
    if draws(node.target):
        kind, literals = RANDOM, _with_order(node, literals)
    return Op(node.name, target, tuple(inputs), literals, outputs, kind, module, _alias(node), backward)


def _is_of_template(node: fx.Node) -> bool:
    return str(node.target) in OF_TEMPLATES and node.meta["val"].is_contiguous()


def _depends_on_data(node: fx.Node, number: str, module: str) -> ValueError:
    place = line_of(node.meta.get("stack_trace") or "") or (f" in {module}" if module else "")
    return ValueError(f"node {node.name} ({node.target}) reads {number}{place}, a number that depends on the data; keep it a tensor")


def _with_order(node: fx.Node, literals: tuple) -> tuple:
    """The literals of a random op with the order in which it draws, where that isn't row-major."""
    drawn = node.args[0].meta["val"] if str(node.target) == "aten.bernoulli.p" else node.meta["val"]  # what bernoulli_ writes into
    first = next(x for x in pytree.tree_leaves(drawn) if isinstance(x, torch.Tensor))
    dims = tuple(range(first.dim()))
    order = tuple(sorted(dims, key=lambda d: (-first.stride(d), d)))  # from the slowest to the fastest, in which torch fills a tensor
    if first.is_contiguous() or order == dims or str(node.target) not in PER_ELEMENT:
        return literals
    return (literals[0], tuple(sorted((*literals[1], (ORDER, order)))))


def _asked(node: fx.Node, results: Sequence[Any]) -> Sequence[Any]:
    """None in place of a gradient that a backward is told to leave out, which some fake kernels compute nevertheless."""
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    mask = {**dict(zip(names, node.args, strict=False)), **node.kwargs}.get("output_mask")
    return results if mask is None else [x if asked else None for x, asked in zip(results, mask, strict=True)]  # type: ignore[call-overload]


def _with_float_statistics(op: Op, earlier: list[Op]) -> Op:
    """The op with float32 as the dtype of a norm's statistics, and of views of them; new running statistics have the dtype of the old."""
    y, *rest = op.outputs
    if op.target in STATISTICS and y is not None and y.itemsize == 2:
        running = [earlier[op.inputs[ref.index][0]].outputs[op.inputs[ref.index][1]] for ref in op.literals[0][3:5] if isinstance(ref, Ref)]
        updated = [t and old and replace(t, dtype=old.dtype) for t, old in zip(rest[2:], running)]
        return replace(op, outputs=(y, *(t and replace(t, dtype="float32") for t in rest[:2]), *updated))
    if op.alias is not None and y is not None and y.itemsize == 2:
        base, k = earlier[op.inputs[op.alias][0]], op.inputs[op.alias][1]
        if (tensor := base.outputs[k]) is not None and tensor.dtype == "float32" and op.target != "aten.view.dtype":
            return replace(op, outputs=tuple(t and replace(t, dtype="float32") for t in op.outputs))
    return op


def draws(function: OpOverload) -> bool:
    """Whether an operator draws random numbers: by torch's tag, which its kernels of attention have as well, for a dropout that
    `autoshard::dropout_attention` does."""
    return torch.Tag.nondeterministic_seeded in function.tags and not (function.namespace == "aten" and "attention" in function.name())


def _constant(item: Any, node: fx.Node | None) -> Any:
    if item is None or isinstance(item, (bool, int, float, str, complex)):
        return item
    if isinstance(item, torch.device):
        return Const("device", "cpu")
    if isinstance(item, (torch.dtype, torch.memory_format, torch.layout)):
        return Const(type(item).__name__, str(item).removeprefix("torch."))
    assert node is not None
    raise ValueError(f"node {node.name} ({node.target}) has an argument {item!r} of a kind that is not supported: {type(item).__name__}")


def _alias(node: fx.Node) -> int | None:
    """The index of the tensor input whose storage the output shares, by the operator's schema; None if the output is no view."""
    schema = node.target._schema
    if str(node.target) in ALWAYS_VIEWS:
        return 0
    if not schema.returns or schema.returns[0].alias_info is None:
        return None
    shared = schema.returns[0].alias_info.before_set
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.before_set & shared:
            base = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
            return next((k for k, source in enumerate(_input_nodes(node)) if source is base), None)
    return 0  # a list of views: the schema marks its elements, their base is the first tensor


def _input_nodes(node: fx.Node) -> list[fx.Node]:
    nodes: list[fx.Node] = []
    fx.map_arg(node.args, nodes.append)
    fx.map_arg({key: node.kwargs[key] for key in sorted(node.kwargs)}, nodes.append)
    return nodes


def leaves_of(node: fx.Node) -> Any:
    """The node itself; for a node with several results its getitem nodes by index, None for a result without one."""
    result = node.meta.get("val")
    if not isinstance(result, (tuple, list)):
        return node
    parts = {user.args[1]: user for user in node.users if user.target is operator.getitem}
    return tuple(parts.get(k) for k in range(len(result)))


def _tensor(value: Any) -> Tensor | None:
    if not isinstance(value, torch.Tensor):
        return None
    return Tensor(tuple(int(n) for n in value.shape), str(value.dtype).removeprefix("torch."))


def module_path(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    paths = [entry[0] if isinstance(entry, tuple) else str(entry) for entry in stack.values()]
    if not paths:
        return ""
    return re.sub(r"^L\['\w+'\]\.?|^_export_root\.?", "", paths[-1]).replace("slice(None, None, None)", "")
