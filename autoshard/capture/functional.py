"""Traced graphs in the form that rules know: their operators write into no tensor, and what only moves strides is removed.

functional              wraps a function such that its traced operators write into no tensor (the decompositions of rms_norm and
                        adaptive_avg_pool2d do); writing into an INPUT stays an error, which a traced graph can't represent
without_equal_strides   replaces an as_strided that reads all elements of its input in place by that input, and one that reads the
                        elements which an as_strided_scatter wrote by the tensor that was scattered
weight_gradients_later  lets the backward pass go on before it computes the gradient of a weight
with_dense_factors      makes the backward of determinants and linear solves that of a matrix with dense rows
without_expanded_matrices   makes rows that are multiplied with one matrix one matmul: x [B, 1, K], w [K, N],
                        bmm(x, w expanded to [B, K, N])      becomes      view(mm(view(x, [B, K]), w), [B, 1, N])
"""

import operator
from collections.abc import Callable, Sequence, Set
from typing import Any

import torch
from torch import fx

from autoshard.torch_private import (
    FunctionalTensor,
    FunctionalTensorMode,
    OpOverload,
    dispatch_functionalize,
    from_functional_tensor,
    has_data_mutation,
    sync,
)

aten = torch.ops.aten


def functional(run: Callable[..., Any], names: list[str]) -> Callable[..., Any]:
    """`run`, of flat arguments, with each write into a tensor turned into a new tensor; ValueError if it writes into an argument."""

    def checked(*flat: Any) -> Any:
        result = run(*flat)
        for name, argument in zip(names, flat, strict=True):
            if isinstance(argument, FunctionalTensor) and has_data_mutation(argument):
                raise ValueError(f"the graph writes into its input {name}; give a functional graph (torch.export makes one)")
        return result

    return dispatch_functionalize(checked, FunctionalTensorMode())


def traced_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that is traced while `functional` runs: without the wrapper that records pending writes."""
    if not isinstance(tensor, FunctionalTensor):
        return tensor
    sync(tensor)
    return from_functional_tensor(tensor.elem)


def without_equal_strides(traced: fx.GraphModule) -> dict[fx.Node, fx.Node]:
    """Removes each as_strided that moves no element from the graph; returns the nodes that replace them.

    Average pooling to 1x1 in channels_last sets the strides of dims of size 1 this way, and its backward scatters a tensor into
    zeros and reads it again at once. No rule shards an as_strided.
    """
    replaced: dict[fx.Node, fx.Node] = {}
    for node in list(traced.graph.nodes):
        same = _source(traced.graph, node) if node.target is aten.as_strided.default else None
        if same is not None:
            replaced[node] = same
            node.replace_all_uses_with(same)
            traced.graph.erase_node(node)
    return replaced


MATMULS = (aten.mm.default, aten.bmm.default)
VIEWS = {aten.view.default, aten._unsafe_view.default, aten.reshape.default}
VIEWED = VIEWS | {aten.t.default, aten.transpose.int, aten.permute.default, aten.expand.default}


def weight_gradients_later(traced: fx.GraphModule, gradients: Set[fx.Node]) -> None:
    """Moves the matmul of a weight's gradient behind that of its input's gradient, which the backward pass goes on with, where that is the
    next one: what has to be sent of the input's gradient is then sent while the weight's is computed.

        y = x w     g' x, then g w'   ->   g w', then g' x                 as Megatron-LM orders them; autograd has the first order

    Not the first of all, the head's: its gradient is the longest to reduce, and until it is there the links have nothing to send.
    """
    matmuls = [node for node in traced.graph.nodes if node.target in MATMULS]
    chains = [_with_views(node) for node in matmuls]
    of_weights = [chain[-1] in gradients and all(user.op == "output" for user in chain[-1].users) for chain in chains]
    first = of_weights.index(True) if any(of_weights) else 0
    for k, (node, after) in enumerate(zip(matmuls, matmuls[1:])):
        read, others = ({_viewed_by(source) for source in one.all_input_nodes} for one in (node, after))
        if k > first and of_weights[k] and not of_weights[k + 1] and read & others:
            only = [source for source in node.all_input_nodes if source.target in VIEWED and list(source.users) == [node]]
            for moved in (*only, *(one for one in chains[k] if one < after)):
                after.append(moved)
                after = moved


def _with_views(node: fx.Node) -> list[fx.Node]:
    """The node, and the views that alone read it, each the one before."""
    chain = [node]
    while len(users := list(chain[-1].users)) == 1 and users[0].target in VIEWED:
        chain += users
    return chain


def _viewed_by(node: fx.Node) -> fx.Node:
    """The node of which a node is a view, of a view ..."""
    while node.target in VIEWED:
        node = node.args[0]  # type: ignore[assignment]
    return node


FACTORING = (aten._linalg_slogdet.default, aten._linalg_det.default, aten._linalg_solve_ex.default)


def with_dense_factors(traced: fx.GraphModule) -> None:
    """Of a real matrix with dense rows FACTORING factors the transpose, of another one the matrix itself, and their backward, traced,
    solves with the factors of the one or the other. All run on dense matrices (`lower.kernels.strides`), so the backward does, too."""
    for node in traced.graph.find_nodes(op="call_function", target=aten.linalg_lu_solve.default):
        pivots = node.args[1]
        factored = pivots.args[0] if pivots.target is operator.getitem else None
        if factored is None or factored.target not in FACTORING:
            continue
        matrix = factored.args[0].meta["val"]
        if not matrix.is_contiguous() and not matrix.is_complex():
            node.kwargs = {**node.kwargs, "adjoint": not node.kwargs.get("adjoint", False)}


def _source(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """The node that an as_strided is equal to, a new view if the dims of size 1 differ; None if the as_strided moves elements."""
    source = node.args[0]
    tensor = source.meta["val"]
    size, strides, offset = [*node.args[1:], None][:3]
    region = _region(size, strides, tensor.storage_offset() if offset is None else offset)
    if region == _region(tensor.shape, tensor.stride(), tensor.storage_offset()):
        return _viewed(graph, source, node)
    if source.target is aten.as_strided_scatter.default and source.args[4:] and region == _region(*source.args[2:]):
        scattered = source.args[1]
        if scattered.target is aten.copy.default:
            tensor, copied = (source.meta["val"] for source in (scattered, scattered.args[1]))
            scattered = scattered.args[1] if (tensor.shape, tensor.dtype) == (copied.shape, copied.dtype) else scattered
        return _viewed(graph, scattered, node)
    return None


def _region(size: Sequence[int], strides: Sequence[int], offset: int) -> tuple:
    """Which elements are addressed, in order; the strides of dims of size 1 don't matter."""
    return tuple((n, step) for n, step in zip(size, strides, strict=True) if n != 1), offset


def _viewed(graph: fx.Graph, source: fx.Node, node: fx.Node) -> fx.Node:
    """The source with the shape of `node`, whose dims differ in those of size 1 at most."""
    shape = list(node.meta["val"].shape)
    if list(source.meta["val"].shape) == shape:
        return source
    with graph.inserting_before(node):
        view = graph.call_function(aten.view.default, (source, shape))
    view.meta = dict(node.meta)
    return view


def without_expanded_matrices(traced: fx.GraphModule) -> dict[fx.Node, fx.Node]:
    """Replaces each such bmm of the graph; returns the nodes that replace them.

    torch writes it where the strides of x's dim of size 1 are unusual, as in a decode step of one token whose heads were transposed. Read
    as a graph, it would load the matrix B times.
    """
    replaced = {}
    for node in [node for node in traced.graph.nodes if node.target is aten.bmm.default]:
        rows, matrix = node.args[0], _before_expand(node.args[1])
        if rows.meta["val"].shape[1] == 1 and matrix is not None:
            replaced[node] = _matmul(traced.graph, node, rows, matrix)
            node.replace_all_uses_with(replaced[node])
            traced.graph.erase_node(node)
    return replaced


def _before_expand(node: fx.Node) -> fx.Node | None:
    """The matrix [K, N] that a node [B, K, N] holds B times; None for another node."""
    shape = node.meta["val"].shape
    while node.target in VIEWS and node.args[0].meta["val"].shape == shape:  # type: ignore[union-attr]
        node = node.args[0]  # type: ignore[assignment]
    source = node.args[0] if node.target is aten.expand.default else None
    return source if isinstance(source, fx.Node) and source.meta["val"].shape == shape[1:] else None


def _matmul(graph: fx.Graph, node: fx.Node, rows: fx.Node, matrix: fx.Node) -> fx.Node:
    batch, _, width = rows.meta["val"].shape

    def add(function: OpOverload, *args: Any) -> fx.Node:
        added = graph.call_function(function, args)
        added.meta = {**node.meta, "val": function(*fx.map_arg(args, lambda arg: arg.meta["val"]))}
        return added

    with graph.inserting_before(node):
        product = add(aten.mm.default, add(aten.view.default, rows, [batch, width]), matrix)
        return add(aten.view.default, product, list(node.meta["val"].shape))
