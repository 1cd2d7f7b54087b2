"""Inputs of other sizes: which dims of a model's inputs are dynamic, as torch.export says it, and inputs of given sizes."""

import fnmatch
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.export import Dim, ExportedProgram

from autoshard.capture.inputs import arguments, input_names
from autoshard.capture.nested_tensors import filled, listed
from autoshard.graph import Range, Sizes, sizes_of
from autoshard.torch_private import pytree

Named = Mapping[str, Sequence[str | None]]  # by input: the name of each of its dims, None where the size is fixed


def dims_of(
    model: nn.Module | ExportedProgram, example_inputs: Any, dynamic_shapes: Any
) -> tuple[dict[str, Range], dict[str, tuple[str | None, ...]]]:
    """The ranges of the dynamic dims by name, and the names of the dims of each input that has some.

    dynamic_shapes: as for torch.export: per input {dim: Dim} or a sequence of Dim and None, in a sequence by position or a mapping by the
    name of the argument or of the plan's input. A Dim has min and max, or is a multiple of one that has. ValueError says what is wrong.
    """
    example_inputs = _inputs_of(model, example_inputs)
    names, tensors = input_names(model, example_inputs), _leaves(example_inputs)
    if isinstance(dynamic_shapes, Mapping):
        of_program = isinstance(model, ExportedProgram)
        parameters = model.graph_signature.user_inputs if of_program else list(inspect.signature(model.forward).parameters)
        places = {name: f"input_{k}" for k, name in enumerate(parameters) if name not in names}
        of = {str(places.get(given, given)): row for given, row in dynamic_shapes.items()}
        by_name = {name: row for given, row in of.items() for name in fnmatch.filter(names, given) or [given]}
    elif isinstance(dynamic_shapes, (tuple, list)):
        by_name = dict(zip(names, dynamic_shapes))
    else:
        raise ValueError(f"dynamic_shapes is {dynamic_shapes!r}; expected one entry per input, as torch.export takes them")
    if (wrong := sorted(set(map(str, by_name)) - set(names))) or len(by_name) < len(dynamic_shapes):
        raise ValueError(f"dynamic_shapes has {wrong[0] if wrong else len(dynamic_shapes)}; the model's inputs are {', '.join(names)}")
    ranges: dict[str, Range] = {}
    inputs: dict[str, tuple[str | None, ...]] = {}
    for name, tensor in zip(names, tensors, strict=True):
        if not (row := by_name.get(name)):
            continue
        rows = dict(row) if isinstance(row, Mapping) else dict(enumerate(row))
        dims: list[str | None] = [None] * tensor.dim()
        for dim, given in rows.items():
            if given is None:
                continue
            if not (isinstance(dim, int) and 0 <= dim < len(dims)):
                raise ValueError(f"dynamic_shapes has dim {dim!r} of {name}, which has {len(dims)} dims")
            called, one = _range(given, f"dim {dim} of {name}")
            if (other := ranges.setdefault(called, one)) != one:
                a, b = (f"{some.least} to {some.greatest} in steps of {some.multiple}" for some in (one, other))
                raise ValueError(f"dim {dim} of {name} has {called} from {a}, another dim from {b}; expected one for all")
            dims[dim] = called
        inputs[name] = tuple(dims)
    sizes = sizes_of(inputs, {name: tuple(x.shape) for name, x in zip(names, tensors) if isinstance(x, torch.Tensor)})
    for name, one in ranges.items():
        if not one.holds(sizes[name]):
            steps = f" in steps of {one.multiple}" if one.multiple > 1 else ""
            raise ValueError(f"{name} is {sizes[name]} in the example inputs; expected a size from {one.least} to {one.greatest}{steps}")
    if not ranges:
        raise ValueError("dynamic_shapes has no dim; leave it out, or give one, for example {0: torch.export.Dim('batch', min=1, max=64)}")
    return ranges, inputs


def _range(given: Any, where: str) -> tuple[str, Range]:
    """The name and the range of a Dim, or of a multiple of one."""
    if isinstance(given, tuple):  # as it is typed on a command line
        name, least, greatest, multiple = given
        given = multiple * Dim(name, min=least, max=greatest) if multiple > 1 else Dim(name, min=least, max=greatest)
    root = getattr(given, "root", given)
    if not (isinstance(root, Dim) and isinstance(root.min, int) and isinstance(root.max, int)):
        raise ValueError(f"{where} is {given!r}; expected a torch.export.Dim with min and max, or 8 * Dim('batch', min=1, max=8)")
    multiple = given.fn(1) if given is not root else 1
    if given is not root and (given.fn(0) or given.fn(2) != 2 * multiple or multiple < 1):
        raise ValueError(f"{where} is {given}; expected a torch.export.Dim, or a multiple of one")
    return root.__name__, Range(max(root.min, 1) * multiple, root.max * multiple, multiple)


def inputs_at(model: nn.Module | ExportedProgram, example_inputs: Any, named: Named, sizes: Sizes) -> Any:
    """The example inputs with meta tensors of these sizes in the place of those with dynamic dims."""
    example_inputs = _inputs_of(model, example_inputs)
    spec = pytree.tree_flatten(listed(example_inputs))[1]

    def resized(name: str, x: Any) -> Any:
        if name not in named:
            return x
        shape = [n if dim is None else sizes[dim] for n, dim in zip(x.shape, named[name], strict=True)]
        return torch.empty(shape, dtype=x.dtype, device="meta", requires_grad=x.requires_grad)

    leaves = [resized(name, x) for name, x in zip(input_names(model, example_inputs), _leaves(example_inputs), strict=True)]
    return filled(example_inputs, pytree.tree_unflatten(leaves, spec))


def _inputs_of(model: nn.Module | ExportedProgram, example_inputs: Any) -> Any:
    """The example inputs; of an exported program its leaves in their order, by default those that it was exported with."""
    if not isinstance(model, ExportedProgram):
        return example_inputs
    return tuple(pytree.tree_leaves(model.example_inputs if example_inputs is None else arguments(example_inputs)))


def values_of(graph: fx.GraphModule | ExportedProgram | nn.Module, example_inputs: Any) -> dict[str, torch.Tensor]:
    """The tensors that a graph or module holds, and those of its example inputs, by the names that they have when it is captured."""
    if isinstance(graph, ExportedProgram):
        held = {**graph.state_dict, **graph.constants}
    else:
        held = {**dict(graph.named_parameters(remove_duplicate=False)), **dict(graph.named_buffers(remove_duplicate=False))}
    is_joint = isinstance(graph, fx.GraphModule) and any("desc" in node.meta for node in graph.graph.nodes)
    if not is_joint and (inputs := _inputs_of(graph, example_inputs)) is not None and (leaves := _leaves(inputs)):
        held |= zip(input_names(graph, inputs), leaves, strict=True)
    return {name: value for name, value in held.items() if isinstance(value, torch.Tensor)}


def _leaves(example_inputs: Any) -> list[Any]:
    args, kwargs = listed(arguments(example_inputs))
    return list(pytree.tree_leaves(args or kwargs))
