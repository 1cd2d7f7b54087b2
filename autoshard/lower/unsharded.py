"""The unsharded model: the values that go into it, its outputs and its gradients. A sharded program is compared with these.

run_unsharded     the module itself, run eagerly on seeded values
materialized      a copy of the module with real tensors, where the module's own are on the meta device
verify_graph      the comparison for a graph without a module: the graph, run on one device, is the reference
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from autoshard.capture import arguments, computed_in, copied, flex_as_attention, input_names, opened, without_process_groups
from autoshard.graph import Graph
from autoshard.lower.generator import first_state, from_state
from autoshard.lower.verify import Verification, verify_program
from autoshard.precision import Precision
from autoshard.solution import Solution
from autoshard.torch_private import FakeTensor, pytree


def run_unsharded(
    model: nn.Module,
    example_inputs: Any,
    graph: Graph,
    *,
    training: bool,
    seed: int,
    held: Mapping[str, torch.Tensor] | None = None,
    precision: Precision | None = None,
    device: str = "cpu",
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Values for the graph's placeholders, and what the module computes from them: "output:0", "gradient:NAME", "buffer:NAME".

    held: constants of the captured program. precision: the dtypes in which the module computes, reduces gradients and returns.
    device: where the module runs, and where all these tensors are.
    """
    module, args, kwargs = seeded(model, example_inputs, index_bounds(graph), seed, device)
    leaves, names = pytree.tree_leaves((args, kwargs)), input_names(model, example_inputs)
    pairs = zip(names, leaves, strict=True)
    values = {name: leaf.clone() for name, leaf in pairs if isinstance(leaf, torch.Tensor)}  # the module may write into its inputs
    state = state_of_module(module)
    values |= {name: tensor.detach().clone() for name, tensor in state.items()}
    values |= {name: _on(value.clone(), device) for name, value in constants_of(module, graph, held or {}).items()}
    if precision is not None:
        module, args, kwargs = computing_in(precision, module, args, kwargs)
        leaves, state = pytree.tree_leaves((args, kwargs)), state_of_module(module)
    with torch.set_grad_enabled(training), from_state(first_state(seed, device), device), _as_captured(), torch.device(device):
        try:
            outputs = module(*args, **kwargs)
        except Exception as error:  # it is the user's code, which may raise anything
            raise ValueError(f"the unsharded model fails on {device} with real tensors: {type(error).__name__}: {error}") from error
        flat = {k: returned(y, precision) for k, y in enumerate(pytree.tree_leaves(outputs)) if isinstance(y, torch.Tensor)}
        if training:
            differentiable = [leaf for leaf in flat.values() if leaf.requires_grad]
            torch.autograd.backward(differentiable, [torch.ones_like(leaf) for leaf in differentiable])
    reference = {f"output:{k}": leaf.detach() for k, leaf in flat.items()}
    for op in (op for op in graph.ops if op.kind == "tangent"):
        values[op.name] = torch.ones(op.output.shape, dtype=getattr(torch, op.output.dtype), device=device)
    if training:
        gradients = {name: p.grad for name, p in state.items() if p.is_leaf and p.grad is not None}
        reference |= {f"gradient:{name}": reduced(grad, values[name].dtype, precision) for name, grad in gradients.items()}
    written = state_of_module(module) | {name: leaf for name, leaf in zip(names, leaves, strict=True) if isinstance(leaf, torch.Tensor)}
    reference |= {f"buffer:{r.name}": written[r.name].detach() for r in graph.results if r.kind == "buffer" and r.name in written}
    return values, reference


@contextmanager
def _as_captured() -> Iterator[None]:
    """flex_attention as it is captured, and without the fast path of torch's TransformerEncoder in inference: no program has it, and it
    returns 0 where a mask hides a token."""
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with flex_as_attention(), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)


def seeded(
    model: nn.Module, example_inputs: Any, bounds: Mapping[str, int], seed: int, device: str = "cpu"
) -> tuple[nn.Module, tuple, dict]:
    """A copy of the module and the arguments of a call, with real tensors. bounds: of integer inputs, the sizes of what they index."""
    # objects among the inputs become lists of their tensors, as in the captured program
    module, args, kwargs = opened(materialized(model, seed, device), *arguments(example_inputs))
    leaves, spec = pytree.tree_flatten((args, kwargs))
    names = input_names(model, example_inputs)
    first = {id(leaf): k for k, leaf in reversed(list(enumerate(leaves)))}
    leaves = [
        _on(_input(leaf, bounds.get(name), seed + k, again=first[id(leaf)] < k), device) if isinstance(leaf, torch.Tensor) else leaf
        for k, (leaf, name) in enumerate(zip(leaves, names, strict=True))
    ]
    args, kwargs = pytree.tree_unflatten(leaves, spec)
    return module, args, kwargs


def computing_in(precision: Precision, module: nn.Module, args: tuple, kwargs: dict) -> tuple[nn.Module, tuple, dict]:
    """Copies of the module and its arguments in the dtypes in which the policy computes."""
    dtypes = computed_in(module, args, kwargs, precision)

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        new = tensor.detach().to(dtypes.get(id(tensor), tensor.dtype), copy=True)
        return nn.Parameter(new, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else new

    return copied((module, args, kwargs), cast)


def returned(output: torch.Tensor, precision: Precision | None) -> torch.Tensor:
    is_cast = precision is not None and precision.output_dtype is not None and output.is_floating_point()
    return output.to(getattr(torch, precision.output_dtype)) if is_cast else output  # type: ignore[union-attr]


def reduced(gradient: torch.Tensor, stored: torch.dtype, precision: Precision | None) -> torch.Tensor:
    """A gradient as the policy reduces it, in the dtype of the stored parameter."""
    if precision is None:
        return gradient
    return gradient.to(getattr(torch, precision.reduce_dtype) if precision.reduce_dtype else gradient.dtype).to(stored)


def verify_graph(graph: Graph, solution: Solution, held: Mapping[str, torch.Tensor], seed: int = 0) -> Verification:
    """The plan of a graph without a module, against the graph run on one device: with what is held under a placeholder's name, where that
    has values and its shape (an input of one of several microbatches has not), else with seeded random ones."""
    bounds = index_bounds(graph)
    generator = torch.Generator().manual_seed(seed)
    values = {}
    for op in graph.ops:
        if op.is_placeholder and op.outputs[0] is not None:
            example = torch.empty(op.outputs[0].shape, dtype=getattr(torch, op.outputs[0].dtype), device="meta")
            known = held.get(op.name, example)
            if not (known.is_meta or isinstance(known, FakeTensor)) and (known.shape, known.dtype) == (example.shape, example.dtype):
                example = known.detach()
            is_input = op.kind == "input" or not example.is_meta
            values[op.name] = _input(example, bounds.get(op.name), seed) if is_input else _random_weight(example, generator)
    return verify_program(graph, solution.layouts, solution.results, solution.mesh, values, seed=seed)


def materialized(model: nn.Module, seed: int, device: str = "cpu") -> nn.Module:
    """A copy with real tensors on the device: the model's own where it has them, else seeded random ones of a sensible size."""
    memo: dict[int, Any] = {}
    generator = torch.Generator().manual_seed(seed)
    for part in model.modules():
        for tensor in [*part._parameters.values(), *part._buffers.values()]:
            if tensor is not None and id(tensor) not in memo:
                filled = _on(_random_weight(tensor, generator) if tensor.is_meta else tensor.detach().cpu().clone(), device)
                memo[id(tensor)] = nn.Parameter(filled, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else filled
    module = copied(model, lambda tensor: _on(tensor.detach().clone(), device), memo)
    without_process_groups(module)
    return module


def _on(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """The tensor on a device; one on the meta device has no values that could be moved."""
    return tensor if tensor.is_meta or tensor.device.type == device else tensor.to(device)


def attribute_of(module: nn.Module, path: str) -> torch.Tensor | None:
    """The tensor that a module or one of its submodules holds under this name; None where there is none."""
    attribute: Any = module
    for name in path.split("."):
        attribute = getattr(attribute, name, None)
    return attribute.detach().cpu() if isinstance(attribute, torch.Tensor) and not attribute.is_meta else None


def constants_of(model: nn.Module, graph: Graph, held: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What the program reads that is neither a parameter nor a registered buffer: its own constants and attributes of modules.

    held: the constants of the captured fx graph. ValueError where a tensor has no values.
    """
    state = state_of_module(model)
    values = {}
    for name in (op.name for op in graph.ops if op.kind in ("parameter", "buffer") and op.name not in state):
        value, tensor = held.get(name, attribute_of(model, name)), graph.tensor((graph.index[name], 0))
        if value is None and (graph.index[name], 0) not in graph.users:
            value = torch.zeros(tensor.shape, dtype=getattr(torch, tensor.dtype))  # no op reads it
        if value is None:
            raise ValueError(f"the captured program reads {name!r}, a tensor without values; register it as a buffer of the model")
        values[name] = value.detach().cpu()
    return values


def state_of_module(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers, under all of their names."""
    return {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers(remove_duplicate=False))}


def _random_weight(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Matrices of about unit gain, vectors near 1/2 (scales and shifts alike), integers 0."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return torch.zeros(tensor.shape, dtype=tensor.dtype)
    noise = torch.randn(tensor.shape, generator=generator, dtype=torch.complex64 if tensor.is_complex() else torch.float32)
    filled = 0.5 + 0.1 * noise if tensor.dim() < 2 else noise / math.sqrt(max(math.prod(tensor.shape[1:]), 1))
    return filled.to(tensor.dtype)


def _input(example: torch.Tensor, bound: int | None, seed: int, *, again: bool = False) -> torch.Tensor:
    """The example itself where it has values, else seeded random ones; integers are below `bound`, the size of what they index.

    again: an earlier input has the same tensor as its example; this one has the rows in another order, to tell the two apart.
    """
    if not example.is_meta:
        values = example.detach().cpu().clone()
        return values.roll(1, 0) if again and (values.dim() > 1 or values.is_floating_point()) and values.dim() else values
    generator = torch.Generator().manual_seed(1_000 + seed)
    if example.is_floating_point() or example.is_complex():
        real = torch.complex64 if example.is_complex() else torch.float32
        return torch.randn(example.shape, generator=generator, dtype=real).to(example.dtype)
    if example.dtype == torch.bool:
        return torch.ones(example.shape, dtype=torch.bool)
    return torch.randint(0, bound or 2, example.shape, generator=generator).to(example.dtype)


INDEXES = {  # target: (input that holds indexes, input that they index, its dim)
    "aten.embedding.default": (1, 0, 0),
    **dict.fromkeys(("aten._embedding_bag.default", "aten._embedding_bag_forward_only.default"), (1, 0, 0)),
    "aten.nll_loss_forward.default": (1, 0, 1),
    "aten.gather.default": (1, 0, None),
    "aten.index_select.default": (1, 0, None),
}


def index_bounds(*graphs: Graph) -> dict[str, int]:
    """For each integer input the size of the smallest dim that it indexes, followed through views and copies."""
    bounds: dict[str, int] = {}
    for graph in graphs:
        for op in (op for op in graph.ops if op.target in INDEXES):
            holds, indexed, dim = INDEXES[op.target]
            shape = graph.tensor(op.inputs[indexed]).shape
            size = min(shape) if dim is None else shape[min(dim, len(shape) - 1)]  # of one row of logits, too
            name = graph.ops[graph.origin(op.inputs[holds])].name
            bounds[name] = min(size, bounds.get(name, size))
    return bounds
