"""Reads an fx graph as a Graph: an interpreter runs it again under make_fx, below autograd, so that linear, layer_norm and attention become
the same ATen ops as in training.

While it runs, it records which traced value each of the nodes became (`Captured.values`), so that layouts can be written onto the nodes of
the graph that the caller passed.
"""

import operator
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot, make_fx

from autoshard.capture.attention import canonical
from autoshard.capture.captured import Captured, check_operators, is_value, merge_tied, tied_parameters
from autoshard.capture.explain import explained, line_of
from autoshard.capture.functional import functional, traced_tensor, with_dense_factors, without_equal_strides, without_expanded_matrices
from autoshard.capture.inputs import CPU, Named, export_signature, fake, is_mutable, mode_of, placeholder_inputs, result_name
from autoshard.capture.read import module_path, read
from autoshard.capture.replaced import replaced_operators
from autoshard.capture.turns import in_turn
from autoshard.graph import Graph
from autoshard.torch_private import DispatchKey, OpOverload, disable_current_modes, pytree, reparametrize_module


@in_turn
def capture_fx(fx_graph: fx.GraphModule | ExportedProgram, example_inputs: Any = None) -> Captured:
    """The inference program of a graph that the caller captured, with the value that each of its nodes became.

    fx_graph: an ExportedProgram, a GraphModule of ATen nodes, or one from torch.fx.symbolic_trace. example_inputs: needed when
    the placeholders carry no `meta["val"]`; of dynamic dims they say the sizes, which are otherwise those that the graph was traced with.
    """
    module = fx_graph.graph_module if isinstance(fx_graph, ExportedProgram) else fx_graph
    with explained(module), replaced_operators():
        return retraced(fx_graph, example_inputs)


def retraced(fx_graph: fx.GraphModule | ExportedProgram, example_inputs: Any = None) -> Captured:
    mode = mode_of(fx_graph)
    result_names: list[tuple[str, str]] | None = None
    if isinstance(fx_graph, ExportedProgram):
        if any(is_mutable(node) and not _is_written_alone(node) for node in fx_graph.graph.nodes):
            fx_graph = fx_graph.run_decompositions({})
            mode = mode_of(fx_graph)
        names, fakes, result_names = export_signature(fx_graph, mode, example_inputs)
        module: fx.GraphModule = fx_graph.graph_module
        params: dict[str, torch.Tensor] = {}
        tied: Sequence[Sequence[str]] = ()
    else:
        module = fx_graph
        names, fakes = placeholder_inputs(module, example_inputs, mode)
        params = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        tied = tied_parameters(module)
        names = [Named("parameter" if isinstance(p, nn.Parameter) else "buffer", n) for n, p in params.items()] + names
        fakes = [fake(mode, p) for p in params.values()] + fakes
        described = next(node for node in module.graph.nodes if node.op == "output").meta.get("desc")
        if described is not None:  # of a joint graph
            of_leaves = enumerate(pytree.tree_leaves(described))
            result_names = [("none", str(k)) if desc is None else result_name(desc) for k, desc in of_leaves]
    recorder = _Recorder(module)

    def run(*traced: torch.Tensor) -> Any:
        flat = [x if isinstance(x, torch.Tensor) else known for x, known in zip(traced, fakes, strict=True)]  # numbers are literals
        with reparametrize_module(module, dict(zip(params, flat, strict=False)), tie_weights=True, strict=False):
            return recorder.run(*flat[len(params) :], enable_io_processing=False)

    with mode, torch.no_grad():
        traced = make_fx(functional(run, [name.name for name in names]))(*fakes)
    check_operators(traced)
    with_dense_factors(traced)
    replaced = without_equal_strides(traced) | without_expanded_matrices(traced) | canonical(traced)
    recorder.became = pytree.tree_map(lambda leaf: replaced.get(leaf, leaf), recorder.became)
    _inherit(recorder.origins, traced.graph, replaced)
    modules = {new: module_path(node) for new, node in recorder.origins.items()}
    leaves = pytree.tree_leaves(next(node for node in traced.graph.nodes if node.op == "output").args[0])
    results = list(zip(result_names or [("output", str(i)) for i in range(len(leaves))], leaves, strict=True))
    recorded = {leaf for became in recorder.became.values() for leaf in pytree.tree_leaves(became) if isinstance(leaf, fx.Node)}
    graph, values, nodes = read(traced, names, results, modules, recorded)
    mapped = {
        node: pytree.tree_map(lambda leaf: values[leaf] if isinstance(leaf, fx.Node) else None, became)
        for node, became in recorder.became.items()
    }
    for node, new in recorder.became.items():  # placeholders
        if isinstance(new, fx.Node):
            recorder.origins.setdefault(new, node)
    origins = {op.name: recorder.origins[node] for op, node in zip(graph.ops, nodes, strict=True) if node in recorder.origins}
    graph = replace(merge_tied(graph, tied), called=_called(graph, mapped, origins))
    return Captured(graph, fx_graph, mapped, origins=origins)


def _called(graph: Graph, values: Mapping[fx.Node, Any], origins: Mapping[str, fx.Node]) -> dict[str, tuple[tuple[str, int], ...]]:
    """`Graph.called`: what the nodes of the given graph hold, and what each source line computes last in each module."""
    called: dict[str, tuple[tuple[str, int], ...]] = {}
    lines: dict[str, dict[str, tuple[str, int]]] = {}
    for op in (op for op in graph.ops if op.name in origins and op.outputs[0] is not None):
        if line := line_of(origins[op.name].meta.get("stack_trace") or "").removeprefix(" at "):
            lines.setdefault(os.path.basename(line), {})[op.module] = (op.name, 0)
    for node, nested in values.items():
        held = next((value for value in pytree.tree_leaves(nested, is_leaf=is_value) if value is not None), None)
        if held is not None and node.op != "output":
            called[node.name] = ((graph.ops[held[0]].name, held[1]),)
    return {**{line: tuple(of.values()) for line, of in lines.items()}, **called}


def _is_written_alone(node: fx.Node) -> bool:
    """Whether what the node writes into is neither an input of the graph nor a view of one: such writes need no place among the results."""
    arguments = node.target._schema.arguments  # type: ignore[union-attr]
    given = {**dict(zip([argument.name for argument in arguments], node.args)), **node.kwargs}
    written = [given.get(argument.name) for argument in arguments if argument.is_write]
    return all(isinstance(x, fx.Node) and _is_new(x) for x in written)


def _is_new(x: fx.Node) -> bool:
    while x.target is operator.getitem or (isinstance(x.target, OpOverload) and any(one.alias_info for one in x.target._schema.returns)):
        x = x.args[0]  # type: ignore[assignment]
    # operators with a composite kernel may return their argument (dropout does)
    return isinstance(x.target, OpOverload) and not x.target.has_kernel_for_dispatch_key(DispatchKey.CompositeImplicitAutograd)


class _Recorder(fx.Interpreter):
    """Runs a graph under make_fx and records which traced node each of its results became."""

    def __init__(self, module: fx.GraphModule):
        super().__init__(module)
        self.became: dict[fx.Node, Any] = {}
        self.origins: dict[fx.Node, fx.Node] = {}  # by node of the new graph

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> tuple[tuple, dict]:
        """The node's arguments, with the devices of the captured graph replaced by the CPU, where our fake tensors are."""
        args, kwargs = super().fetch_args_kwargs_from_env(n)
        args, kwargs = pytree.tree_map(lambda leaf: CPU if isinstance(leaf, torch.device) else leaf, (args, kwargs))
        return args, {key: CPU if key == "device" and isinstance(item, str) else item for key, item in kwargs.items()}

    def call_function(self, target: Any, args: tuple, kwargs: dict) -> Any:
        """A view that the strides no longer allow copies: kernels that became one operator (attention) may have left other strides."""
        if target is torch.ops.aten.view.default and not _is_viewable(*args):
            target = torch.ops.aten.reshape.default
        return super().call_function(target, args, kwargs)

    def run_node(self, n: fx.Node) -> Any:
        mode = get_proxy_mode()
        assert mode is not None
        before = next(iter(reversed(mode.tracer.graph.nodes)), None)
        result = super().run_node(n)

        def traced(leaf: Any) -> fx.Node | None:
            slot = get_proxy_slot(traced_tensor(leaf), mode.tracer, None) if isinstance(leaf, torch.Tensor) else None
            return None if slot is None else slot.proxy.node

        self.became[n] = pytree.tree_map(traced, result)
        for node in reversed(mode.tracer.graph.nodes):  # all nodes that this one was decomposed into
            if node is before:
                break
            self.origins[node] = n
        return result


def _is_viewable(x: torch.Tensor, shape: Sequence[int]) -> bool:
    if x.is_contiguous():
        return True
    with disable_current_modes():
        try:
            torch.empty_strided(tuple(map(int, x.shape)), x.stride(), device="meta").view(shape)
        except RuntimeError:
            return False
    return True


def _inherit(origins: dict[fx.Node, fx.Node], graph: fx.Graph, replaced: Mapping[fx.Node, fx.Node]) -> None:
    """Nodes that were added for another one have its origin."""
    of = {new: origins[old] for old, new in replaced.items() if old in origins}
    for node in reversed(graph.nodes):
        if node in of and node not in origins:
            origins[node] = of[node]
            of |= {source: of[node] for source in node.all_input_nodes if source.op == "call_function" and source not in origins}


