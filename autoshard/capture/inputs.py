"""The inputs of a capture: the names of its placeholders, and fake CPU tensors instead of weights and inputs. Nothing is allocated."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from autoshard.capture.nested_tensors import copied, listed, tensors_of, unsupported_kind
from autoshard.precision import Precision
from autoshard.torch_private import FakeTensor, FakeTensorMode, OpOverload, descriptors, enter_autocast, pytree

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Named:
    """The parameter, buffer, input or tangent that a placeholder of a traced graph stands for."""

    kind: str
    name: str
    value: torch.Tensor | None = None  # of a constant in the program
    fill: float | None = None  # the value of all elements, where that is known without a tensor


def named(desc: Any) -> Named:
    match desc:
        case descriptors.ParamAOTInput():
            return Named("parameter", desc.target)
        case descriptors.BufferAOTInput():
            return Named("buffer", desc.target)
        case descriptors.PlainAOTInput():
            return Named("input", f"input_{desc.idx}")
        case descriptors.TangentAOTInput(output=descriptors.InputMutationAOTOutput() as written):
            # A value that the forward writes into a parameter or buffer is no result that the user differentiates.
            return Named("tangent", f"tangent_of_{named(written.mutated_input).name}", fill=0.0)
        case descriptors.TangentAOTInput():
            return Named("tangent", f"tangent_{getattr(desc.output, 'idx', 0)}")
    raise ValueError(f"the captured program has an input of a kind that is not supported: {desc!r}")


def result_name(desc: Any) -> tuple[str, str]:
    match desc:
        case descriptors.PlainAOTOutput():
            return ("output", str(desc.idx))
        case descriptors.GradAOTOutput():
            return ("gradient", named(desc.grad_of).name)
        case descriptors.InputMutationAOTOutput():
            return ("buffer", named(desc.mutated_input).name)
    raise ValueError(f"the captured program has an output of a kind that is not supported: {desc!r}")


def arguments(example_inputs: Any) -> tuple[tuple, dict]:
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    if isinstance(example_inputs, torch.Tensor):
        return (example_inputs,), {}
    if isinstance(example_inputs, Sequence) and not isinstance(example_inputs, str):
        return tuple(example_inputs), {}
    raise ValueError(f"example_inputs is {type(example_inputs).__name__}; expected a tuple of arguments or a dict of keyword arguments")


def input_names(module: nn.Module, example_inputs: Any) -> list[str]:
    """The names of the leaves of a call's inputs: `input_0`, `input_1`, ...; for keyword arguments their path (`mask.full` for an
    entry of a dict), unless a parameter or buffer has that name."""
    args, kwargs = listed(arguments(example_inputs))
    paths = [path for path, _ in pytree.tree_flatten_with_path(args or kwargs)[0]]
    if args:
        return [f"input_{k}" for k in range(len(paths))]
    held = {name for name, _ in [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]}
    names = [".".join(str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in path) for path in paths]
    return [f"input_{k}" if name in held else name for k, name in enumerate(names)]


def fake(mode: FakeTensorMode, tensor: torch.Tensor, dtype: torch.dtype | None = None, *, is_dense: bool = False) -> torch.Tensor:
    """dtype: instead of the tensor's own. is_dense: with the strides of a contiguous tensor instead of its own."""
    if unsupported := unsupported_kind(tensor):
        raise ValueError(unsupported)
    with mode:
        shape, strides = tuple(map(as_number, tensor.shape)), tuple(map(as_number, tensor.stride()))
        empty = partial(torch.empty, shape) if is_dense else partial(torch.empty_strided, shape, strides)
        fake = empty(dtype=dtype or tensor.dtype, device="cpu")
        return nn.Parameter(fake, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake


def as_number(value: Any) -> Any:
    """A size that is a symbol as the number with which the graph was traced; anything else as it is."""
    if not isinstance(value, torch.SymInt):
        return value
    if not value.node.has_hint():
        raise ValueError(f"the size {value} of the graph's inputs is a symbol without a number; pass example_inputs=(...)")
    return int(value.node.hint)


def computed_in(module: nn.Module, args: tuple, kwargs: dict, precision: Precision | None) -> dict[int, torch.dtype]:
    """The dtypes in which the model computes with parameters and inputs, by id; those that are used as they are stored are left out."""
    if precision is None or precision.param_dtype is None:
        return {}
    tensors = [*module.parameters(), *(pytree.tree_leaves((args, kwargs)) if precision.cast_forward_inputs else ())]
    return {id(x): getattr(torch, precision.param_dtype) for x in tensors if isinstance(x, torch.Tensor) and x.is_floating_point()}


def stored_dtypes(module: nn.Module, example_inputs: Any) -> dict[str, str]:
    """The dtypes of parameters and inputs as the module and the caller hold them, by name in the Graph."""
    leaves = pytree.tree_leaves(listed(arguments(example_inputs)))
    held = dict(zip(input_names(module, example_inputs), leaves, strict=True)) | dict(module.named_parameters(remove_duplicate=False))
    return {name: str(x.dtype).removeprefix("torch.") for name, x in held.items() if isinstance(x, torch.Tensor)}


def apart(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """The arguments with a tensor object of its own in every place.

    A tensor that is given twice, or is the module's as well, is an input in each of these places: other calls may have different ones.
    """
    seen = {id(tensor) for tensor in tensors_of(module)}

    def own(leaf: Any) -> Any:
        tensors = tensors_of(leaf)
        is_new = seen.isdisjoint(map(id, tensors))
        seen.update(map(id, tensors))
        return leaf if is_new else copied(leaf, lambda tensor: tensor.detach().requires_grad_(tensor.requires_grad))

    return pytree.tree_map(own, (args, kwargs))


def to_fake(
    mode: FakeTensorMode, module: nn.Module, args: tuple, kwargs: dict, precision: Precision | None = None
) -> tuple[nn.Module, tuple, dict]:
    """A copy of the module whose tensors are fake CPU tensors (tied ones stay tied), and fake inputs, in the dtypes in which the model
    computes. Nothing is allocated."""
    args, kwargs = apart(module, args, kwargs)
    dtypes = computed_in(module, args, kwargs, precision)
    parts = [(*part._parameters.values(), *part._buffers.values(), *vars(part).values()) for part in module.modules()]
    direct = {id(tensor) for tensors in parts for tensor in tensors}
    passed = {id(tensor) for tensor in tensors_of((args, kwargs))}

    def replacement(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) in direct or id(tensor) in passed or tensor.is_meta:
            return fake(mode, tensor, dtypes.get(id(tensor)), is_dense=id(tensor) in passed)  # as every rank has its shard of an input
        return tensor.detach().clone()  # in a list on a module: a constant of the program, whose value is needed

    module, args, kwargs = copied((module, args, kwargs), replacement)
    without_process_groups(module)
    for path, value in attributes(module).items():  # as buffers: a joint graph has inputs for those alone
        path, _, name = path.rpartition(".")
        part = module.get_submodule(path)
        del part.__dict__[name]
        part.register_buffer(name, value, persistent=False)
    return module, args, kwargs


class _BatchNorm(nn.BatchNorm1d):
    """BatchNorm of inputs of any rank."""

    def _check_input_dim(self, input: torch.Tensor) -> None:
        """SyncBatchNorm takes two dims or more."""


def without_process_groups(module: nn.Module) -> None:
    """Makes each SyncBatchNorm a BatchNorm, in place: in a captured program the batch is that of all devices."""
    for name, part in module.named_modules():
        if isinstance(part, nn.SyncBatchNorm):
            if part.process_group is not None:
                raise ValueError(f"{name} normalizes over the batch of a process group; a plan has the batch of all devices: use BatchNorm")
            part.__class__ = _BatchNorm


def attributes(module: nn.Module) -> dict[str, torch.Tensor]:
    """Tensors that modules hold as plain attributes, by the names that they would have as buffers; one of a tensor's names counts."""
    registered = {id(tensor) for part in module.modules() for tensor in [*part._parameters.values(), *part._buffers.values()]}
    tensors: dict[str, torch.Tensor] = {}
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            plain = isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter) and not hasattr(type(part), name)
            if plain and id(value) not in registered:
                registered.add(id(value))
                tensors[f"{path}.{name}" if path else name] = value
    return tensors


def is_mutable(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable


def static_mode() -> FakeTensorMode:
    """A fake mode in which shapes are numbers."""
    return FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True)


def mode_of(fx_graph: fx.GraphModule | ExportedProgram) -> FakeTensorMode:
    """The fake mode of the graph's values, as those of different modes can't be mixed; a new one if the graph has none."""
    for node in fx_graph.graph.nodes:
        mode = getattr(node.meta.get("val"), "fake_mode", None)
        if mode is not None:
            return mode
    return static_mode()


def export_signature(
    program: ExportedProgram, mode: FakeTensorMode, example_inputs: Any = None
) -> tuple[list[Named], list[torch.Tensor], list[tuple[str, str]]]:
    """The names of the placeholders, fake values and the names of the results. example_inputs: their sizes are those of dynamic dims."""
    kinds = {
        InputKind.PARAMETER: "parameter",
        InputKind.BUFFER: "buffer",
        InputKind.CONSTANT_TENSOR: "buffer",
        InputKind.USER_INPUT: "input",
    }
    names, users = [], 0
    argument_names = [spec.arg.name for spec in program.graph_signature.input_specs]
    for spec in program.graph_signature.input_specs:
        if spec.kind not in kinds:
            raise ValueError(f"the exported program has an input of kind {spec.kind.name}, which is not supported")
        held = program.constants.get(spec.target) if spec.kind == InputKind.CONSTANT_TENSOR else None
        held = held if isinstance(held, torch.Tensor) else None
        names.append(Named(kinds[spec.kind], spec.target if spec.kind != InputKind.USER_INPUT else f"input_{users}", held))
        users += spec.kind == InputKind.USER_INPUT
    results, outputs = [], 0
    for out in program.graph_signature.output_specs:
        if out.kind in (OutputKind.BUFFER_MUTATION, OutputKind.PARAMETER_MUTATION):
            results.append(("buffer", str(out.target)))
        elif out.kind == OutputKind.USER_INPUT_MUTATION:
            results.append(("buffer", names[argument_names.index(out.target)].name))
        else:
            results.append(("output", str(outputs)))
            outputs += 1
    values = [node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"]
    if example_inputs is not None:
        given = iter(pytree.tree_leaves(arguments(example_inputs)))
        values = [_sized(name.name, value, next(given, None)) if name.kind == "input" else value for name, value in zip(names, values)]
    return names, [fake(mode, value) if isinstance(value, torch.Tensor) else as_number(value) for value in values], results


def _sized(name: str, value: Any, example: Any) -> Any:
    """The example in the place of an input of an exported program, where that has dynamic dims."""
    if not isinstance(value, torch.Tensor) or not any(isinstance(n, torch.SymInt) for n in value.shape):
        return value
    shape = tuple(example.shape) if isinstance(example, torch.Tensor) else example
    fits = isinstance(shape, tuple) and len(shape) == value.dim()
    if not fits or any(not isinstance(n, torch.SymInt) and n != m for n, m in zip(value.shape, shape)):
        raise ValueError(f"example_inputs has {shape} for {name}; expected a tensor of the shape {tuple(value.shape)}")
    return example


def autocast_on_cpu(forward: nn.Module) -> str:
    """Turns `torch.autocast("cuda")` in a dynamo graph into autocast of the CPU, on whose fake tensors the other one does nothing; returns
    the name of the device, "" where there was none."""
    moved = ""
    for node in forward.graph.nodes if isinstance(forward, fx.GraphModule) else ():
        if node.target is enter_autocast and node.args[0] != "cpu" and node.args[2]:
            moved, dtype, *rest = node.args
            node.args = ("cpu", dtype or torch.get_autocast_dtype(moved), *rest)
    if moved:
        forward.recompile()  # type: ignore[operator]
    return moved


def ignored(fx_graph: fx.GraphModule | ExportedProgram) -> str:
    """A sentence about what the model asks for and a plan of its captured program does not do; "" where there is nothing."""
    if not any(node.meta.get("recompute") is not None for node in fx_graph.graph.nodes):
        return ""
    return "torch.utils.checkpoint in the forward (its activations are planned as kept; recompute=N, 'all' or 'auto' plans to recompute)"


def constants(fx_graph: fx.GraphModule | ExportedProgram) -> dict[str, torch.Tensor]:
    """The constant tensors of a captured program (`torch.tensor([1.0, 2.0])` in a forward), by their names in its Graph."""
    if isinstance(fx_graph, ExportedProgram):
        held = dict(fx_graph.constants)
    else:
        targets = {str(node.target) for node in fx_graph.graph.nodes if node.op == "get_attr"}
        held = {name: getattr(fx_graph, name, None) for name in targets}
    return {name: value for name, value in held.items() if isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor)}


def placeholder_inputs(module: fx.GraphModule, example_inputs: Any, mode: FakeTensorMode) -> tuple[list[Named], list[torch.Tensor]]:
    """Names and fake values of a GraphModule's placeholders, from example inputs or else from the nodes' metadata."""
    nodes = [node for node in module.graph.nodes if node.op == "placeholder"]
    if example_inputs is None:
        values = [node.meta.get("val", node.meta.get("example_value")) for node in nodes]
        missing = [node.name for node, value in zip(nodes, values, strict=True) if not isinstance(value, (torch.Tensor, torch.SymInt))]
        if missing:
            raise ValueError(f"the graph's placeholders {missing} carry no shapes; pass example_inputs=(...) with one tensor each")
    else:
        args, kwargs = arguments(example_inputs)
        bound = dict(zip((str(node.target) for node in nodes), args, strict=False)) | kwargs
        missing = [str(node.target) for node in nodes if str(node.target) not in bound and not node.args]
        if missing or len(args) > len(nodes):
            raise ValueError(f"example_inputs has {len(args) + len(kwargs)} entries; the graph takes {[str(n.target) for n in nodes]}")
        values = [bound.get(str(node.target), node.args[0] if node.args else None) for node in nodes]
    names = []
    for i, node in enumerate(nodes):
        desc = node.meta.get("desc")
        names.append(named(desc) if desc is not None else Named("input", f"input_{i}"))
    return names, [fake(mode, value) if isinstance(value, torch.Tensor) else as_number(value) for value in values]
