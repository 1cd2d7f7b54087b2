"""Captures a module as a Graph. Everything runs under fake tensors, so no weights are in memory.

    training    dynamo captures the module; AOTAutograd joins forward and backward into one ATen graph
    inference   torch.export captures the module; its graph is then read as one that the caller passes (fx_graphs.py)
"""

import copy
import inspect
import io
import warnings
from collections.abc import Sequence
from contextlib import ExitStack, redirect_stderr
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, OutputKind

from autoshard.capture.attention import canonical
from autoshard.capture.captured import Captured, Returned, check_operators, is_value, merge_tied, tied_parameters
from autoshard.capture.experts import experts_as_one_op
from autoshard.capture.explain import WithoutAutograd, explained, leave_transforms
from autoshard.capture.functional import weight_gradients_later, with_dense_factors, without_equal_strides
from autoshard.capture.fx_graphs import retraced
from autoshard.capture.inputs import (
    arguments,
    attributes,
    autocast_on_cpu,
    input_names,
    named,
    result_name,
    static_mode,
    stored_dtypes,
    to_fake,
)
from autoshard.capture.nested_tensors import has_objects, listed, listing, opened
from autoshard.capture.operators import DROPOUT
from autoshard.capture.read import leaves_of, module_path, read
from autoshard.capture.replaced import replaced_operators
from autoshard.capture.turns import in_turn
from autoshard.graph import Graph, mixed
from autoshard.precision import Precision
from autoshard.torch_private import (
    FakeTensorMode,
    aot_export_joint_with_descriptors,
    descriptors,
    dynamo_config,
    dynamo_graph_capture_for_export,
    dynamo_log,
    pytree,
)


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
    renumbered = pytree.tree_map(lambda leaf: leaf and moved[leaf], captured.values, is_leaf=is_value)
    return replace(captured, graph=graph, values=renumbered)


@in_turn
def capture_without_casts(module: nn.Module, example_inputs: Any, *, training: bool, precision: Precision | None = None) -> Captured:
    """As `capture_module`, with parameters, inputs and results in the dtypes in which the model computes."""
    args, kwargs = arguments(example_inputs)
    if any(isinstance(part, torch.jit.ScriptModule) for part in module.modules()):
        raise ValueError(f"{type(module).__name__} is compiled by torch.jit, or a part of it is: give the module that was compiled")
    mode = static_mode()
    # shapes are numbers also in the second capture of a process; torch.compiler.reset() would drop what the user has compiled
    with explained(module), replaced_operators(), dynamo_config.patch(automatic_dynamic_shapes=False):  # type: ignore[attr-defined]
        if not module._forward_pre_hooks:  # they may change the arguments
            inspect.signature(module.forward).bind(*args, **kwargs)
        fake_module, fake_args, fake_kwargs = to_fake(mode, module, args, kwargs, precision)
        if training:
            _check_hooks(module)
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
    graph = merge_tied(_with_input_names(captured.graph, input_names(module, example_inputs)), tied_parameters(module))
    new = {old.name: op.name for old, op in zip(captured.graph.ops, graph.ops)}
    origins = {new[name]: node for name, node in captured.origins.items()}
    return replace(captured, graph=graph, origins=origins)


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


def _check_hooks(module: nn.Module) -> None:
    if hooked := [name for name, part in module.named_modules() if part._backward_hooks or part._backward_pre_hooks]:
        raise ValueError(
            f"{hooked[0] or type(module).__name__} has a backward hook, which a captured program lacks, whatever it does to gradients: "
            "remove it, or use tensor.register_hook in the forward"
        )


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
        return replace(retraced(program), returned=_exported_results(program, templates))
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
    check_operators(traced)
    with_dense_factors(traced)
    without_equal_strides(traced)
    canonical(traced)
    names = [named(node.meta["desc"]) for node in traced.graph.nodes if node.op == "placeholder"]
    output = next(node for node in traced.graph.nodes if node.op == "output")
    results = [(result_name(desc), leaf) for desc, leaf in zip(output.meta["desc"], output.args[0], strict=True) if desc is not None]
    weight_gradients_later(traced, {leaf for (kind, _), leaf in results if kind == "gradient"})
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
