"""Captures a module, or reads an fx graph, as a Graph. Everything runs under fake tensors, so no weights are in memory.

    training    dynamo captures the module; AOTAutograd joins forward and backward into one ATen graph
    inference   torch.export captures the module, or the caller passes a graph; an interpreter runs it again under make_fx, below
                autograd, so that linear, layer_norm and attention become the same ATen ops as in training

While the interpreter runs the graph, it records which traced value each of its nodes became (`Captured.values`), so that layouts
can be written onto the nodes of the graph that the caller passed.
"""

import copy
import inspect
import io
import os
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, redirect_stderr
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, OutputKind
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot, make_fx

from autoshard.capture.attention import canonical
from autoshard.capture.experts import experts_as_one_op
from autoshard.capture.explain import FLEX, WithoutAutograd, explained, leave_transforms, line_of
from autoshard.capture.functional import (
    functional,
    traced_tensor,
    weight_gradients_later,
    with_dense_factors,
    without_equal_strides,
    without_expanded_matrices,
)
from autoshard.capture.inputs import (
    CPU,
    Named,
    arguments,
    attributes,
    autocast_on_cpu,
    export_signature,
    fake,
    input_names,
    is_mutable,
    mode_of,
    named,
    placeholder_inputs,
    result_name,
    static_mode,
    stored_dtypes,
    to_fake,
)
from autoshard.capture.nested_tensors import filled, has_objects, listed, listing, opened
from autoshard.capture.operators import DROPOUT
from autoshard.capture.read import leaves_of, module_path, read
from autoshard.capture.replaced import replaced_operators, usual_modes
from autoshard.capture.turns import in_turn
from autoshard.graph import Graph, mixed
from autoshard.precision import Precision
from autoshard.torch_private import (
    FakeTensorMode,
    HigherOrderOperator,
    aot_export_joint_with_descriptors,
    descriptors,
    disable_current_modes,
    dynamo_config,
    dynamo_graph_capture_for_export,
    dynamo_log,
    pytree,
    reparametrize_module,
)


@dataclass(frozen=True)
class Returned:
    """What a module returns: leaf k of its structure is the graph's result `output k` where that has a value, else the constant leaves[k].
    template: where objects are among what it returns, and the structure has lists of their tensors, the same on the meta device."""

    structure: pytree.TreeSpec
    leaves: tuple[Any, ...]  # None in place of each tensor
    template: Any = None

    def packed(self, outputs: Mapping[int, torch.Tensor]) -> Any:
        """The return value with these tensors, by leaf."""
        lists = pytree.tree_unflatten([outputs.get(k, leaf) for k, leaf in enumerate(self.leaves)], self.structure)
        return lists if self.template is None else filled(self.template, lists)


@dataclass(frozen=True)
class Captured:
    """A Graph and the fx graph that it was read from. values: for each node of the fx graph the Value that the node became, nested
    as the node's result is, None where that is no tensor. returned: None where a graph was passed instead of a module."""

    graph: Graph
    fx_graph: fx.GraphModule | ExportedProgram
    values: dict[fx.Node, Any] = field(default_factory=dict)
    returned: Returned | None = None
    origins: dict[str, fx.Node] = field(default_factory=dict)  # by op name, the node of the fx graph that the op is (a part) of
    autocast: str = ""  # the device of a torch.autocast in the forward that the captured program has as one of the CPU

    def line_of(self, name: str) -> str:
        """file:line of the model's code for an op, or for the first later op of its module that has one; "" where none is known."""
        values = [(node, value) for node, nested in self.values.items() for value in pytree.tree_leaves(nested, is_leaf=_is_value)]
        lines = {value[0]: node.meta.get("stack_trace") for node, value in values if value is not None}
        ops, first = self.graph.ops, self.graph.index[name]
        traces = (lines.get(i) for i in range(first, len(ops)) if ops[i].module == ops[first].module)
        return line_of(next(filter(None, traces), "")).removeprefix(" at ")


def _is_value(item: Any) -> bool:
    return isinstance(item, tuple) and len(item) == 2 and all(isinstance(number, int) for number in item)


def capture(module: nn.Module, example_inputs: Any, *, training: bool, precision: Precision | None = None) -> Graph:
    return capture_module(module, example_inputs, training=training, precision=precision).graph


def capture_module(module: nn.Module, example_inputs: Any, *, training: bool, precision: Precision | None = None) -> Captured:
    """The program of one call (or one training step up to the gradients) of `module`.

    example_inputs: a tuple of positional arguments or a dict of keyword arguments, with tensors on any device; those on the meta
    device need no memory. training: forward and backward are joined; the module must return a tensor, or several, to differentiate.
    precision: the dtypes in which the model computes, reduces and returns; parameters and inputs stay in theirs. ValueError says what
    stopped the capture, and where.
    """
    captured = capture_without_casts(module, example_inputs, training=training, precision=precision)
    if precision is None:
        return captured
    graph, moved = mixed(captured.graph, precision, stored_dtypes(module, example_inputs))
    renumbered = pytree.tree_map(lambda leaf: leaf and moved[leaf], captured.values, is_leaf=_is_value)
    return replace(captured, graph=graph, values=renumbered)


@in_turn
def capture_without_casts(module: nn.Module, example_inputs: Any, *, training: bool, precision: Precision | None = None) -> Captured:
    """As `capture_module`, with parameters, inputs and results in the dtypes in which the model computes."""
    args, kwargs = arguments(example_inputs)
    if any(isinstance(part, torch.jit.ScriptModule) for part in module.modules()):
        raise ValueError(f"{type(module).__name__} is compiled by torch.jit, or a part of it is: give the module that was compiled")
    mode = static_mode()
    # shapes are numbers also in the second capture of a process; torch.compiler.reset() would drop what the user has compiled
    with explained(module), usual_modes(), replaced_operators(), dynamo_config.patch(automatic_dynamic_shapes=False):  # type: ignore[attr-defined]
        if not module._forward_pre_hooks:  # they may change the arguments
            inspect.signature(module.forward).bind(*args, **kwargs)
        fake_module, fake_args, fake_kwargs = to_fake(mode, module, args, kwargs, precision)
        if training:
            captured = _capture_joint(mode, fake_module, fake_args, fake_kwargs)
            _check_returns(captured.graph, fake_module)
            if not any(result.kind == "gradient" and result.value is not None for result in captured.graph.results):
                raise ValueError("the module has no parameter that gets a gradient; plan it without training")
        else:
            captured = _capture_inference(mode, fake_module, fake_args, fake_kwargs)
            is_training = any(part.training for part in module.modules())
            if is_training and (drawn := [op.name for op in captured.graph.ops if op.target in ("aten.bernoulli.p", str(DROPOUT))]):
                raise ValueError(f"dropout is on (node {drawn[0]}), and inference has none: call model.eval() first")
    _check_returns(captured.graph, module)
    _check_writes(captured.graph, module)
    graph = _with_input_names(captured.graph, input_names(module, example_inputs))
    new = {old.name: op.name for old, op in zip(captured.graph.ops, graph.ops)}
    origins = {new[name]: node for name, node in captured.origins.items()}
    return replace(captured, graph=_merge_tied(graph, tied_parameters(module)), origins=origins)


def _with_input_names(graph: Graph, names: Sequence[str]) -> Graph:
    """The graph with input k renamed to names[k]; an op that has one of these names gets a suffix."""
    inputs = {op.name for op in graph.ops if op.kind == "input"}
    new = {f"input_{k}": name for k, name in enumerate(names) if f"input_{k}" in inputs and name != f"input_{k}"}
    taken = {op.name for op in graph.ops} | set(new.values())
    for op in (op for op in graph.ops if op.kind != "input"):
        name = op.name
        while name in new.values() or (name != op.name and name in taken):
            name += "_op"
        if name != op.name:
            new[op.name] = name
            taken.add(name)
    results = tuple(replace(r, name=new.get(r.name, r.name)) if r.kind in ("gradient", "buffer") else r for r in graph.results)
    return replace(graph, ops=tuple(replace(op, name=new.get(op.name, op.name)) for op in graph.ops), results=results)


def _check_returns(graph: Graph, module: nn.Module) -> None:
    if not any(result.value is not None for result in graph.results):
        raise ValueError(f"{type(module).__name__} returns no tensor; there is nothing to plan")


def _check_writes(graph: Graph, module: nn.Module) -> None:
    plain = attributes(module)
    written = next((result.name for result in graph.results if result.kind == "buffer" and result.name in plain), None)
    if written is not None:
        raise ValueError(
            f"the forward of {type(module).__name__} writes into {written}, a tensor that is no buffer of the module; register it with "
            "register_buffer, or pass it (or the cache that holds it) as an input"
        )


def tied_parameters(module: nn.Module) -> tuple[tuple[str, ...], ...]:
    """The names of each parameter that has more than one."""
    groups: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return tuple(tuple(names) for names in groups.values() if len(names) > 1)


def _merge_tied(graph: Graph, groups: Sequence[Sequence[str]]) -> Graph:
    """The graph with the names of tied parameters in `tied`: a capture leaves the second name as an input without readers."""
    tied = []
    for names in groups:
        present = [name for name in names if name in graph.parameters]
        used = [name for name in present if (graph.parameters[name], 0) in graph.users] or present
        tied += [(name, used[0]) for name in names if used and name not in used]
    return replace(graph, tied=tuple(tied))


@in_turn
def capture_fx(fx_graph: fx.GraphModule | ExportedProgram, example_inputs: Any = None) -> Captured:
    """The inference program of a graph that the caller captured, with the value that each of its nodes became.

    fx_graph: an ExportedProgram, a GraphModule of ATen nodes, or one from torch.fx.symbolic_trace. example_inputs: needed when
    the placeholders carry no `meta["val"]`; of dynamic dims they say the sizes, which are otherwise those that the graph was traced with.
    """
    module = fx_graph.graph_module if isinstance(fx_graph, ExportedProgram) else fx_graph
    with explained(module), usual_modes(), replaced_operators():
        return _retraced(fx_graph, example_inputs)


def _retraced(fx_graph: fx.GraphModule | ExportedProgram, example_inputs: Any = None) -> Captured:
    mode = mode_of(fx_graph)
    result_names: list[tuple[str, str]] | None = None
    if isinstance(fx_graph, ExportedProgram):
        if any(is_mutable(node) for node in fx_graph.graph.nodes):
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
    _check_operators(traced)
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
    graph = replace(_merge_tied(graph, tied), called=_called(graph, mapped, origins))
    return Captured(graph, fx_graph, mapped, origins=origins)


def _called(graph: Graph, values: Mapping[fx.Node, Any], origins: Mapping[str, fx.Node]) -> dict[str, tuple[tuple[str, int], ...]]:
    """`Graph.called`: what the nodes of the given graph hold, and what each source line computes last in each module."""
    called: dict[str, tuple[tuple[str, int], ...]] = {}
    lines: dict[str, dict[str, tuple[str, int]]] = {}
    for op in (op for op in graph.ops if op.name in origins and op.outputs[0] is not None):
        if line := line_of(origins[op.name].meta.get("stack_trace") or "").removeprefix(" at "):
            lines.setdefault(os.path.basename(line), {})[op.module] = (op.name, 0)
    for node, nested in values.items():
        held = next((value for value in pytree.tree_leaves(nested, is_leaf=_is_value) if value is not None), None)
        if held is not None and node.op != "output":
            called[node.name] = ((graph.ops[held[0]].name, held[1]),)
    return {**{line: tuple(of.values()) for line, of in lines.items()}, **called}


def _check_operators(traced: fx.GraphModule) -> None:
    """ValueError where an operator of the program contains a program, or makes a sparse tensor."""
    for node in traced.graph.nodes:
        if getattr(node.meta.get("val"), "layout", torch.strided) is not torch.strided:
            line = line_of(node.meta.get("stack_trace") or "")
            raise ValueError(f"the program has a sparse tensor ({node}){line}, which no layout shards: give embeddings sparse=False")
        if isinstance(node.target, HigherOrderOperator):
            change = FLEX if "flex" in node.target.name() else "write it with plain operators, cond with torch.where"
            line = line_of(node.meta.get("stack_trace") or "")
            if "auto_functionalized" in node.target.name():
                raise ValueError(f"the program calls {node.args[0]}{line}, which writes into its arguments: let it return a new tensor")
            raise ValueError(f"the program calls {node.target.name()}{line}, an operator with a program inside: {change}")


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


def _exported(
    mode: FakeTensorMode, module: nn.Module, args: tuple, kwargs: dict, templates: list[Any], *, training: bool
) -> ExportedProgram:
    """The program of the module by torch.export, which runs its Python code: locks, context managers and caches work, at any depth.
    templates: where those of its results go."""
    module, args, kwargs = opened(module, args, kwargs, templates)
    with mode, torch.set_grad_enabled(training), redirect_stderr(io.StringIO()), WithoutAutograd():  # it prints the graph where it fails
        return torch.export.export(module, args, kwargs, strict=False)


def _capture_inference(mode: FakeTensorMode, module: nn.Module, args: tuple, kwargs: dict) -> Captured:
    """By torch.export, or as for training where only dynamo can read the forward (torch.func, comparisons of constants)."""
    templates: list[Any] = []
    try:
        program = _exported(mode, copy.copy(module), args, kwargs, templates, training=False)
        experts_as_one_op(program.graph_module)
        return replace(_retraced(program), returned=_exported_results(program, templates))
    except Exception as error:  # of the model's forward, which may raise anything
        _forget(mode)
        if has_objects(args, kwargs):
            raise
        try:
            with torch.no_grad():
                return _capture_joint(mode, module.requires_grad_(False), args, kwargs)
        except Exception:
            raise error from None  # it says more than the second one


def _capture_joint(mode: FakeTensorMode, module: nn.Module, args: tuple, kwargs: dict) -> Captured:
    """Forward and backward; the forward alone where no parameter requires a gradient."""
    calls = [name for name in dir(type(dynamo_log)) if name.split("_")[0] in ("debug", "info", "warning", "error", "critical", "log")]
    logging = {getattr(type(dynamo_log), name) for name in calls}  # a model may call them; dynamo stops at them unless they are ignored
    with ExitStack() as stack, dynamo_config.patch(ignore_logging_functions=logging, allow_rnn=True):
        templates: list[Any] = []
        captured = _forward(mode, module, args, kwargs, templates)
        mode.allow_non_fake_inputs = True  # constants, which torch 2.12 leaves in the graph
        moved = autocast_on_cpu(captured)
        experts_as_one_op(captured)
        args, kwargs = listed((args, kwargs))
        differentiable, copied = _with_copies(captured.graph._codegen)  # type: ignore[union-attr]
        joint = aot_export_joint_with_descriptors(stack, captured, args, kwargs)
        copied |= differentiable - _with_tangent(joint.graph_module)
        if copied:
            joint = aot_export_joint_with_descriptors(stack, captured, args, kwargs)
    traced: fx.GraphModule = joint.graph_module
    _check_operators(traced)
    with_dense_factors(traced)
    without_equal_strides(traced)
    canonical(traced)
    names = [named(node.meta["desc"]) for node in traced.graph.nodes if node.op == "placeholder"]
    output = next(node for node in traced.graph.nodes if node.op == "output")
    results = [(result_name(desc), leaf) for desc, leaf in zip(output.meta["desc"], output.args[0], strict=True) if desc is not None]
    weight_gradients_later(traced, [leaf for (kind, _), leaf in results if kind == "gradient"])
    modules = {node: module_path(node) for node in traced.graph.nodes}
    graph, values, nodes = read(traced, names, results, modules)
    mapped = {node: pytree.tree_map(lambda leaf: values.get(leaf), leaves_of(node)) for node in traced.graph.nodes if node.op != "output"}
    constants = tuple(None if isinstance(leaf, fx.Node) else leaf for (kind, _), leaf in results if kind == "output")
    returned = Returned(joint.out_spec, constants, templates[-1] if templates else None)
    return Captured(graph, traced, mapped, returned, {op.name: node for op, node in zip(graph.ops, nodes, strict=True)}, moved)


def _with_tangent(joint: fx.GraphModule) -> set[int]:
    """The outputs with a tangent. Others that need a gradient are views of outputs or inputs, or inputs: AOTAutograd makes them anew."""
    described = [node.meta["desc"] for node in joint.graph.nodes if node.op == "placeholder"]
    return {getattr(desc.output, "idx", -1) for desc in described if isinstance(desc, descriptors.TangentAOTInput)}


def _with_copies(returning: Any) -> tuple[set[int], set[int]]:
    """Two empty sets of leaves of what the graph returns: those that require a gradient, filled when it runs, and those that it copies."""
    differentiable, copied, process = set[int](), set[int](), returning.process_outputs

    def processed(values: Any) -> Any:
        leaves, structure = pytree.tree_flatten(process(values))
        differentiable.update(k for k, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.requires_grad)
        return pytree.tree_unflatten([leaf.clone() if k in copied else leaf for k, leaf in enumerate(leaves)], structure)

    returning.process_outputs = processed
    return differentiable, copied


def _exported_results(program: ExportedProgram, templates: Sequence[Any]) -> Returned:
    arguments = [spec.arg for spec in program.graph_signature.output_specs if spec.kind == OutputKind.USER_OUTPUT]
    constants = tuple(argument.value if isinstance(argument, ConstantArgument) else None for argument in arguments)
    assert program.call_spec.out_spec is not None
    return Returned(program.call_spec.out_spec, constants, templates[-1] if templates else None)


def _forward(mode: FakeTensorMode, module: nn.Module, args: tuple, kwargs: dict, templates: list[Any]) -> nn.Module:
    """The module's forward as an fx graph, by dynamo; where dynamo can't read the code, by torch.export, which runs it."""
    if not has_objects(args, kwargs):
        try:
            with mode, warnings.catch_warnings():
                warnings.filterwarnings("ignore", "While compiling, we found certain side effects")
                warnings.filterwarnings("ignore", "Dynamo detected a call to a")  # function with a cache, which dynamo reads nevertheless
                captured = dynamo_graph_capture_for_export(module)(*args, **kwargs)
                returning = captured.graph._codegen  # type: ignore[attr-defined]
                returning.process_outputs = listing(returning.process_outputs, templates)  # type: ignore[arg-type]
                return captured  # type: ignore[return-value]
        except Exception:  # an error of the model is raised again by the export, with frames of the model
            torch.compiler.reset()
            _forget(mode)
    return _exported(mode, module, args, kwargs, templates, training=True).module(check_guards=False)


def _forget(mode: FakeTensorMode) -> None:
    """What a capture that failed leaves behind (torch 2.13), which the next one would meet."""
    leave_transforms()
    if mode.shape_env is not None:
        mode.shape_env.pending_fresh_unbacked_symbols.clear()
