"""Experts as one operator: tokens that were routed go through the MLPs of their experts, `autoshard::experts`, and its backward.

    y[t] = sum over j of weights[t, j] MLP(ids[t, j], x[t])        MLP(e, v) = activation(v up[e] + up_bias[e]) down[e] + down_bias[e]

x [T, H], ids [T, k], weights [T, k], up [E, H, F], down [E, I, H]; `biased_experts` has up_bias [E, F] and down_bias [E, H] too. The
result has the wider dtype of x and weights. The activation is text: the ATen calls between the two matmuls as JSON, each call a list of its
name and arguments, "$0" for v up[e], "$n" for the result of the n-th call. `lower.kernels.expert_parallel` runs all of this.

The backward reads the inputs only: hidden values v up[e] + up_bias[e] are computed again. `experts_with_hidden` returns them too, and its
backward reads them (`graph.hidden_values` puts these in place of the others): [T k / E, E, F], whatever the routing is. A row of F numbers
belongs to a pair of a token and an expert, sorted by expert; a rank has the first of its pairs, as many as a balanced routing gives it.

`experts_as_one_op` makes the nodes of an fx graph that sort tokens by expert, multiply them in groups and add them up again (`grouped_mm`
of transformers is written so) this operator.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from autoshard.capture.operators import define, differentiate
from autoshard.torch_private import OpOverload

OPERANDS = "Tensor x, Tensor ids, Tensor weights, Tensor up, Tensor down"
GRADIENTS = "Tensor grad_x, Tensor grad_weights, Tensor grad_up, Tensor grad_down"


def _fake(x: Tensor, ids: Tensor, weights: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, weights.dtype))


def _fake_backward(grad: Tensor, x: Tensor, ids: Tensor, weights: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return tuple(t.new_empty(t.shape) for t in (x, weights, *rest[:-1]))


def _fake_with_hidden(x: Tensor, ids: Tensor, weights: Tensor, up: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return _fake(x, ids, weights), x.new_empty(ids.numel() // up.shape[0], up.shape[0], up.shape[2])


def _fake_backward_of_hidden(grad: Tensor, x: Tensor, ids: Tensor, weights: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return _fake_backward(grad, x, ids, weights, *rest[:-1])


def _defined(name: str, biases: Sequence[str] = ()) -> OpOverload:
    """Experts with these biases, and the backward of it; and both of those that keep hidden values."""
    read, gradients = OPERANDS + "".join(f", Tensor {b}" for b in biases), GRADIENTS + "".join(f", Tensor grad_{b}" for b in biases)
    experts = define(name, f"({read}, str activation) -> Tensor", _fake)
    differentiate(experts, define(f"{name}_backward", f"(Tensor grad, {read}, str activation) -> ({gradients})", _fake_backward))
    define(f"{name}_with_hidden", f"({read}, str activation) -> (Tensor y, Tensor hidden)", _fake_with_hidden)
    reading = f"(Tensor grad, {read}, Tensor hidden, str activation) -> ({gradients})"
    define(f"{name}_with_hidden_backward", reading, _fake_backward_of_hidden)
    return experts


EXPERTS, BIASED = _defined("experts"), _defined("biased_experts", ("up_bias", "down_bias"))


class Different(Exception):
    """The nodes around a grouped matmul are not those of experts."""


def experts_as_one_op(module: fx.GraphModule) -> int:
    """Replaces every such group of nodes in place; returns how many there were. Graphs without grouped matmuls stay as they are."""
    count = 0
    for down in [node for node in module.graph.nodes if _name(node) in GROUPED]:
        try:
            _replace(module.graph, down)
            count += 1
        except Different:
            continue
    if count:
        module.graph.lint()
        module.recompile()
    return count


def _replace(graph: fx.Graph, down: fx.Node) -> None:
    region: list[fx.Node] = []  # the nodes that compute the experts of one layer
    hidden, down_weight, ends = _grouped(down, region)
    order = _order(ends, region)
    out, down_bias = _with_bias(down, order, region)
    end, weights, chosen = _end(out, order, region)
    up, steps = _activation_nodes(_uncast(hidden, region), ends, region)
    rows, up_weight, _ = _grouped(up, region)
    first, up_bias = _with_bias(up, order, region)
    x, of_rows = _indexed(_uncast(rows, region), region)
    _check(_name(of_rows) in DIVIDED and of_rows.args == (order.perm, chosen))
    region += [of_rows]
    ids = _unflat(order.ids, region)
    biases = [] if up_bias is None and down_bias is None else [up_bias, down_bias]
    _check(None not in biases)
    operands = (x, ids, weights, up_weight, down_weight, *biases)
    sizes = [_shape(node) for node in operands]  # type: ignore[arg-type]
    _check(sizes[1] == sizes[2] == (sizes[0][0], chosen) and len(sizes[0]) == 2)
    _check(len({_dtype(node) for node in (x, up_weight, down_weight)}) == 1)
    activation = _as_text(first, steps, hidden)
    with graph.inserting_before(end):
        new = graph.call_function(BIASED if biases else EXPERTS, (*operands, activation))  # type: ignore[arg-type]
    new.meta = {key: item for key, item in down.meta.items() if key not in ("val", "example_value", "tensor_meta")}
    for key in ("val", "example_value"):
        if key in end.meta:
            new.meta[key] = end.meta[key]
    end.replace_all_uses_with(new)
    _erase(graph, [end, *region, *steps])


@dataclass(frozen=True)
class _Order:
    """How tokens are sorted: `perm` sorts the flat ids, `sorted` are they in that order, `ids` before."""

    ids: fx.Node
    sorted: fx.Node
    perm: fx.Node


GROUPED = ("_grouped_mm", "grouped_mm", "grouped_mm_fallback")
VIEWS = ("view", "reshape", "flatten", "_unsafe_view")
CASTS = ("to", "float", "int", "_to_copy", "type_as")
DIVIDED = ("floordiv", "floor_divide")
CHECKS = ("_assert_tensor_metadata",)


def _name(node: Any) -> str:
    """The name of what a node calls, whether it is a method, a function of torch, an operator or a function of Python."""
    if not isinstance(node, fx.Node) or node.op not in ("call_function", "call_method"):
        return ""
    target = node.target
    if isinstance(target, OpOverload):
        return target._schema.name.split("::")[1]
    return target if isinstance(target, str) else getattr(target, "__name__", "").rpartition(".")[2]


def _check(holds: bool) -> None:
    if not holds:
        raise Different


def _value(node: fx.Node) -> Any:
    return node.meta.get("example_value", node.meta.get("val"))


def _shape(node: fx.Node) -> tuple[int, ...]:
    _check(isinstance(node, fx.Node) and isinstance(_value(node), Tensor))
    return tuple(_value(node).shape)


def _dtype(node: fx.Node) -> torch.dtype:
    _shape(node)
    return _value(node).dtype


def _argument(node: fx.Node, position: int, name: str, default: Any = None) -> Any:
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


def _users(node: fx.Node) -> list[fx.Node]:
    return [user for user in node.users if _name(user) not in CHECKS]


def _only(nodes: Iterable[fx.Node]) -> fx.Node:
    several = list(nodes)
    _check(len(several) == 1)
    return several[0]


def _grouped(node: fx.Node, region: list[fx.Node]) -> tuple[fx.Node, fx.Node, fx.Node]:
    """Rows, weight and ends of groups of a grouped matmul."""
    _check(_name(node) in GROUPED and _argument(node, 3, "bias") is None and _argument(node, 4, "out_dtype") is None)
    rows, weight, ends = (_argument(node, k, name) for k, name in ((0, "input"), (1, "weight"), (2, "offs")))
    _check(isinstance(ends, fx.Node) and len(_shape(rows)) == 2 and len(_shape(weight)) == 3)
    region += [node]
    return rows, weight, ends


def _uncast(node: fx.Node, region: list[fx.Node]) -> fx.Node:
    """The node before a cast to the dtype that it has."""
    while _name(node) in ("to", "_to_copy") and _dtype(node.args[0]) == _dtype(node):  # type: ignore[arg-type]
        region += [node]
        node = node.args[0]  # type: ignore[assignment]
    return node


def _indexed(node: Any, region: list[fx.Node]) -> tuple[fx.Node, fx.Node]:
    """x and i of x[i], i a tensor that selects rows."""
    _check(_name(node) in ("getitem", "index") and len(node.args) == 2)
    x, index = node.args
    if _name(node) == "index":
        _check(len(index) == 1)
        (index,) = index
    _check(isinstance(index, fx.Node) and len(_shape(index)) == 1)
    region += [node]
    return x, index


def _order(ends: fx.Node, region: list[fx.Node]) -> _Order:
    """cumsum(histc(sorted ids)), and the sort."""
    _check(_name(ends) == "cumsum" and _argument(ends, 1, "dim") in (0, -1))
    counts: Any = ends.args[0]
    _check(_name(counts) == "histc")
    bins, least, most = (_argument(counts, k, name, 0) for k, name in ((1, "bins"), (2, "min"), (3, "max")))
    _check(least == 0 and most == bins - 1)
    region += [ends, counts]
    ordered = counts.args[0]
    while _name(ordered) in CASTS:
        region += [ordered]
        ordered = ordered.args[0]
    _check(_name(ordered) == "getitem" and ordered.args[1] == 0 and _name(ordered.args[0]) == "sort")
    sort = ordered.args[0]
    _check(len(sort.args) == 1 and not sort.kwargs and len(_shape(sort.args[0])) == 1)
    perm = _only(user for user in sort.users if _name(user) == "getitem" and user.args[1] == 1)
    region += [ordered, sort, perm]
    return _Order(sort.args[0], ordered, perm)


def _with_bias(node: fx.Node, order: _Order, region: list[fx.Node]) -> tuple[list[fx.Node], fx.Node | None]:
    """The nodes that hold the products with their bias, and the bias; None where there is none."""
    added = [user for user in _users(node) if _name(user) in ("add", "add_") and user.args[0] is node]
    if not added:
        return [node], None
    add = _only(added)
    bias, index = _indexed(add.args[1], region)
    _check(index is order.sorted and not add.kwargs and len(add.args) == 2)
    _check(_name(add) == "add_" or _users(node) == [add])
    region += [add]
    return ([node, add] if _name(add) == "add_" else [add]), bias


def _end(out: list[fx.Node], order: _Order, region: list[fx.Node]) -> tuple[fx.Node, fx.Node, int]:
    """The sum over the experts of a token, the weights [T, k], and k."""
    readers = dict.fromkeys(user for node in out for user in _users(node) if user not in out)
    weighted = _only(readers)
    _check(_name(weighted) == "mul" and weighted.args[0] in out)
    column: Any = weighted.args[1]
    _check(_name(column) == "unsqueeze" and column.args[1] in (-1, 1))
    flat, index = _indexed(column.args[0], region)
    _check(index is order.perm)
    back = _only(_users(weighted))
    source, inverse = _indexed(back, region)
    _check(source is weighted and _is_inverse(inverse, order.perm, region))
    view = _only(_users(back))
    _check(_name(view) in VIEWS and len(_shape(view)) == 3)
    end = _only(_users(view))
    dims = _argument(end, 1, "dim")
    _check(_name(end) == "sum" and dims in (1, [1], (1,)))
    _check(not _argument(end, 2, "keepdim", False) and _argument(end, 3, "dtype") is None)
    region += [weighted, column, view]
    return end, _unflat(flat, region), _shape(view)[1]


def _is_inverse(node: fx.Node, perm: fx.Node, region: list[fx.Node]) -> bool:
    """Whether node[perm[i]] = i: an empty tensor into which arange was put at perm."""
    if _name(node) == "index_put_":
        base, (index,), numbers = node.args  # type: ignore[misc]
        region += [node]
    else:
        put = _only(user for user in _users(node) if _name(user) == "setitem" and user.args[0] is node)
        base, (_, index, numbers) = node, put.args  # type: ignore[misc, assignment]
        region += [put]
    _check(_name(base) == "empty_like" and _name(numbers) == "arange" and len(numbers.args) == 1)  # type: ignore[union-attr]
    region += [base, numbers]  # type: ignore[arg-type]
    return index is perm


def _unflat(node: Any, region: list[fx.Node]) -> fx.Node:
    """The two-dimensional tensor of which a node is the flat view."""
    _check(_name(node) in VIEWS)
    region += [node]
    return node.args[0]


def _activation_nodes(last: fx.Node, ends: fx.Node, region: list[fx.Node]) -> tuple[fx.Node, list[fx.Node]]:
    """The first grouped matmul, and the nodes that lead from it (and its bias) to `last`, in order."""
    steps: dict[fx.Node, None] = {}
    waiting, ups = [last], set()
    while waiting:
        node = waiting.pop()
        if _name(node) in GROUPED:
            ups.add(node)
        elif _name(node) == "add_" and _name(node.args[0]) in GROUPED:
            waiting.append(node.args[0])  # type: ignore[arg-type]
        elif node not in steps:
            is_bias = _name(node) == "add" and _name(node.args[0]) in GROUPED and _name(node.args[1]) in ("getitem", "index")
            _check(node.op in ("call_function", "call_method"))
            if not is_bias:
                steps[node] = None
            waiting += [node.args[0]] if is_bias else node.all_input_nodes  # type: ignore[list-item]
    up = _only(ups)
    _check(_argument(up, 2, "offs") is ends)
    return up, sorted(steps)


def _as_text(first: list[fx.Node], steps: list[fx.Node], last: fx.Node) -> str:
    graph = fx.Graph()
    source = graph.placeholder("x")
    copies = dict.fromkeys(first, source)
    for node in steps:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(copies[_uncast(last, [])])
    module, width, dtype = fx.GraphModule({}, graph), _shape(first[0])[1], _dtype(first[0])
    with torch.no_grad():
        texts = {json.dumps(_calls(make_fx(module)(torch.empty(rows, width, dtype=dtype, device="meta")))) for rows in (8, 24)}
    _check(len(texts) == 1)  # it must not depend on the number of rows
    return texts.pop()


def _calls(traced: fx.GraphModule) -> list[list[Any]]:
    source, *nodes, output = traced.graph.nodes
    numbers = {source: "$0"}
    calls = []
    for node in nodes:
        name = str(node.target) if node.op == "call_function" else ""
        _check(name.startswith("aten.") or _name(node) == "getitem")
        arguments = json.loads(json.dumps(node.args, default=numbers.get))
        named = {key: numbers.get(item, item) for key, item in node.kwargs.items() if not isinstance(item, torch.memory_format)}
        _check(None not in arguments[:1] and all(item is None or isinstance(item, (bool, int, float, str)) for item in named.values()))
        calls.append([name if _name(node) != "getitem" else "getitem", arguments, named])
        numbers[node] = f"${len(calls)}"
    _check(numbers.get(output.args[0]) == f"${len(calls)}")
    return calls


def _erase(graph: fx.Graph, nodes: Iterable[fx.Node]) -> None:
    """Erases those of the nodes that nothing reads any more, checks of their metadata included."""
    waiting = dict.fromkeys(nodes)
    for node in list(waiting):
        waiting |= dict.fromkeys(user for user in node.users if _name(user) in CHECKS)
    while free := [node for node in waiting if not node.users]:
        for node in free:
            graph.erase_node(node)
            del waiting[node]
