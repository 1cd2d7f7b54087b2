"""Does the plan compute what the model computes? All ranks in this process, against the module itself, unsharded.

The module is given seeded random weights (its own, where it has some), run eagerly, and its outputs and gradients are what
every rank together must reproduce. With `random` the layouts of every tensor are drawn at random from the candidates as well:
that tests the candidates themselves.
"""

from __future__ import annotations

import math
import random as random_module
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree

from autoshard.capture import capture_module, constants, in_turn, input_names
from autoshard.capture.held import copied, opened
from autoshard.capture.inputs import arguments
from autoshard.formulate import Formulation, Training, formulate
from autoshard.graph import Graph, Tensor, Value
from autoshard.lower import Verification, faults, lower, run_local_tensor, verify_program
from autoshard.lower.kernels.dropout import DrawsInOrder, draws, first_state, from_state
from autoshard.planning.describe import layouts_of, results_of
from autoshard.planning.plan import Progress
from autoshard.planning.recomputing import checkpointed
from autoshard.routes import Routes
from autoshard.solution import Placed, Solution, misfits
from autoshard.strategies import candidates

DRAWS = 50  # tries at a random choice without a forbidden edge


@in_turn
def verify(
    model: nn.Module,
    example_inputs: Any,
    solution: Solution,
    *,
    random: int = 0,
    seed: int = 0,
    plant_fault: bool = False,
    local_tensor_mode: bool = False,
    progress: Progress | None = None,
) -> dict:
    """Run the plan on all ranks of its mesh, in one process on the CPU, and compare outputs and every gradient.

    The model may have other sizes than the one that was planned (a smaller batch, say), as long as the layouts divide them.
    random: so many more layouts, each drawn from the candidates. plant_fault: the negative control, one layout is falsified
    and the answer must be no. local_tensor_mode: run the rank program once more under torch's LocalTensorMode, and compare its
    results too. Returns `ok`, `ranks`, `plans` [{seed, max_relative_error_outputs, max_relative_error_gradients,
    placement_mismatches, redistributes}]. ValueError when the solution is of another model.
    """
    report = progress or (lambda message, fraction: None)
    report("capturing the model", 0.0)
    captured = capture_module(model, example_inputs, training=solution.training)
    graph = checkpointed(captured.graph, int(solution.assumptions.get("recompute") or 0))
    reasons = misfits(solution, graph, solution.mesh)
    if reasons:
        raise ValueError(f"the solution does not fit this model: {'; '.join(reasons)}")
    random_op = next((op.name for op in graph.ops if not op.is_placeholder and draws(op.target)), None)
    if local_tensor_mode and random_op is not None:
        raise ValueError(
            f"{random_op} draws random numbers (dropout), for which LocalTensorMode has a generator per rank, so that its masks differ "
            "from the model's; leave local_tensor_mode out, or turn dropout off with model.eval() and plan that"
        )
    report("running the unsharded model", 0.1)
    values, reference = run_unsharded(
        model, example_inputs, graph, training=solution.training, seed=seed, held=constants(captured.given)
    )
    plans: list[tuple[int | None, dict[str, Placed], dict[str, str]]] = [(None, dict(solution.layouts), dict(solution.results))]
    if random:
        formulated = formulate(graph, candidates(graph, solution.mesh), solution.mesh, training=Training() if solution.training else None)
        for k in range(random):
            choice = random_choice(formulated, seed + k)
            plans.append((seed + k, layouts_of(formulated, choice), results_of(formulated, choice)))
    routes = Routes(solution.mesh)
    rows = []
    for k, (drawn, layouts, results) in enumerate(plans):
        report(f"running {solution.mesh.num_devices} ranks, layouts {k + 1} of {len(plans)}", 0.2 + 0.8 * k / len(plans))
        placed = faults.plant_fault(layouts, graph, solution.mesh, seed + k) if plant_fault else layouts
        found = verify_program(graph, placed, results, solution.mesh, values, reference, routes=routes, seed=seed)
        if local_tensor_mode and found.ok:
            found = _checked_again(found, run_local_tensor(lower(graph, placed, results, solution.mesh, routes=routes), values), reference)
        rows.append(_row(drawn, found))
    return {"ok": all(row.pop("ok") for row in rows), "ranks": solution.mesh.num_devices, "plans": rows}


def _checked_again(found: Verification, results: Mapping[str, torch.Tensor], reference: Mapping[str, torch.Tensor]) -> Verification:
    """The verification with the larger errors of two runs; a tensor that is zero but for rounding is measured absolutely."""
    worst = {"output": found.max_relative_error_outputs, "gradient": found.max_relative_error_gradients}
    for key, y in results.items():
        kind = key.split(":")[0]
        if kind in worst:
            x = reference[key]
            scale = max(float(x.abs().max()), 1e-3) if x.numel() else 1.0
            worst[kind] = max(worst[kind], float((y - x).abs().max()) / scale if x.numel() else 0.0)
    return replace(found, max_relative_error_outputs=worst["output"], max_relative_error_gradients=worst["gradient"])


def verify_graph(graph: Graph, solution: Solution, seed: int = 0) -> Verification:
    """The plan of a graph alone, against the graph run whole on seeded random values."""
    bounds = index_bounds(graph)
    generator = torch.Generator().manual_seed(seed)
    values = {}
    for op in graph.ops:
        if op.is_placeholder and op.outputs[0] is not None:
            like = torch.empty(op.outputs[0].shape, dtype=getattr(torch, op.outputs[0].dtype), device="meta")
            values[op.name] = _random_like(like, generator) if op.kind != "input" else _input(like, bounds.get(op.name), seed)
    return verify_program(graph, solution.layouts, solution.results, solution.mesh, values, seed=seed)


def _row(seed: int | None, found: Verification) -> dict:
    return {
        "seed": seed,
        "max_relative_error_outputs": found.max_relative_error_outputs,
        "max_relative_error_gradients": found.max_relative_error_gradients,
        "placement_mismatches": [mismatch.as_json() for mismatch in found.placement_mismatches],
        "redistributes": found.redistributes,
        "ok": found.ok,
    }


def random_choice(formulated: Formulation, seed: int) -> tuple[int, ...]:
    """A choice per node, each drawn among those that no edge to an earlier choice forbids."""
    problem = formulated.problem
    order = _in_order(formulated)
    place = {node: k for k, node in enumerate(order)}
    near: list[list[tuple[int, np.ndarray]]] = [[] for _ in order]
    for edge in problem.edges:
        first, last, table = (edge.a, edge.b, edge.table) if place[edge.a] < place[edge.b] else (edge.b, edge.a, edge.table.T)
        near[last].append((first, table))
    for attempt in range(DRAWS):
        drawn = random_module.Random(f"{seed}:{attempt}")
        choice = [-1] * len(order)
        for node in order:
            allowed = np.isfinite(problem.node_costs[node])
            for other, table in near[node]:
                allowed = allowed & np.isfinite(table[choice[other]])
            possible = np.flatnonzero(allowed)
            if len(possible) == 0:
                break
            choice[node] = int(drawn.choice(list(possible)))
        else:
            return tuple(choice)
    raise ValueError(f"no random layout without a forbidden edge was found in {DRAWS} tries")


def _in_order(formulated: Formulation) -> list[int]:
    """Nodes so that whoever gives comes before whoever takes: an op, then the hubs of its outputs."""
    hubs: dict[int, list[int]] = {}
    for value, node in formulated.hubs.items():
        hubs.setdefault(value[0], []).append(node)
    ops = range(len(formulated.graph.ops))
    inner = [node for i in ops for node in (i, *hubs.get(i, ()))]
    return inner + list(range(len(inner), len(formulated.problem.node_costs)))


# -- the module itself ---------------------------------------------------------------------------------------------------------


def run_unsharded(
    model: nn.Module, example_inputs: Any, graph: Graph, *, training: bool, seed: int, held: Mapping[str, torch.Tensor] | None = None
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Values for the graph's placeholders, and what the module computes from them: "output:0", "gradient:NAME", "buffer:NAME".

    held: constants of the captured program.
    """
    real, args, kwargs = opened(materialized(model, seed), *arguments(example_inputs))  # objects among them: lists of tensors, as captured
    leaves, spec = pytree.tree_flatten((args, kwargs))
    bounds, names = index_bounds(graph), input_names(model, example_inputs)
    leaves = [_input(leaf, bounds.get(names[k]), seed + k) if isinstance(leaf, torch.Tensor) else leaf for k, leaf in enumerate(leaves)]
    args, kwargs = pytree.tree_unflatten(leaves, spec)
    pairs = zip(names, leaves, strict=True)
    values = {name: leaf.clone() for name, leaf in pairs if isinstance(leaf, torch.Tensor)}  # the module may write into it
    named = {**dict(real.named_parameters(remove_duplicate=False)), **dict(real.named_buffers(remove_duplicate=False))}
    values |= {name: tensor.detach().clone() for name, tensor in named.items()} | dict(held or {})
    for name in [op.name for op in graph.ops if op.kind == "buffer" and op.name not in values]:
        attribute = attribute_of(real, name)  # a tensor that the module holds without registering it
        values |= {name: attribute.clone()} if attribute is not None else {}
    with torch.set_grad_enabled(training), from_state(first_state(seed)), DrawsInOrder():
        outputs = real(*args, **kwargs)
    flat = [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]
    reference = {f"output:{k}": leaf.detach() for k, leaf in enumerate(flat)}
    tangents = [name for name, i in graph.index.items() if graph.ops[i].kind == "tangent"]
    values |= {name: _ones(graph.tensor((graph.index[name], 0))) for name in tangents}
    if training:
        differentiable = [leaf for leaf in flat if leaf.requires_grad]
        with DrawsInOrder():  # torch.utils.checkpoint draws again
            torch.autograd.backward(differentiable, [torch.ones_like(leaf) for leaf in differentiable])
        reference |= {f"gradient:{name}": p.grad for name, p in named.items() if p.is_leaf and p.grad is not None}
    now = {**dict(real.named_parameters(remove_duplicate=False)), **dict(real.named_buffers(remove_duplicate=False))}
    now |= {name: leaf for name, leaf in zip(names, leaves, strict=True) if isinstance(leaf, torch.Tensor)}
    reference |= {f"buffer:{r.name}": now[r.name].detach() for r in graph.results if r.kind == "buffer" and r.name in now}
    missing = [op.name for op in graph.ops if op.is_placeholder and op.name not in values]
    if missing:
        raise ValueError(
            f"the captured program reads {missing[0]!r}, which is no parameter, buffer or input of the model; register it as a buffer"
        )
    return values, reference


def attribute_of(module: nn.Module, path: str) -> torch.Tensor | None:
    """The tensor that a module or one inside it holds under this name; None where there is none."""
    found: Any = module
    for name in path.split("."):
        found = getattr(found, name, None)
    return found.detach().cpu() if isinstance(found, torch.Tensor) and not found.is_meta else None


def _ones(tensor: Tensor) -> torch.Tensor:
    return torch.ones(tensor.shape, dtype=getattr(torch, tensor.dtype))


def materialized(model: nn.Module, seed: int) -> nn.Module:
    """A copy with real CPU tensors: the model's own where it has them, else seeded random ones of a sensible size."""
    memo: dict[int, Any] = {}
    generator = torch.Generator().manual_seed(seed)
    for part in model.modules():
        for tensor in [*part._parameters.values(), *part._buffers.values()]:
            if tensor is not None and id(tensor) not in memo:
                filled = _random_like(tensor, generator) if tensor.is_meta else tensor.detach().cpu().clone()
                memo[id(tensor)] = nn.Parameter(filled, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else filled
    return copied(model, lambda tensor: tensor.detach().clone(), memo)


def _random_like(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Matrices of about unit gain, vectors near 1/2 (scales and shifts alike), integers 0."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return torch.zeros(tensor.shape, dtype=tensor.dtype)
    noise = torch.randn(tensor.shape, generator=generator, dtype=torch.complex64 if tensor.is_complex() else torch.float32)
    filled = 0.5 + 0.1 * noise if tensor.dim() < 2 else noise / math.sqrt(max(math.prod(tensor.shape[1:]), 1))
    return filled.to(tensor.dtype)


def _input(example: torch.Tensor, bound: int | None, seed: int) -> torch.Tensor:
    if not example.is_meta:
        return example.detach().cpu().clone()
    generator = torch.Generator().manual_seed(1_000 + seed)
    if example.is_floating_point() or example.is_complex():
        real = torch.complex64 if example.is_complex() else torch.float32
        return torch.randn(example.shape, generator=generator, dtype=real).to(example.dtype)
    if example.dtype == torch.bool:
        return torch.ones(example.shape, dtype=torch.bool)
    return torch.randint(0, bound or 2, example.shape, generator=generator).to(example.dtype)


INDEXES = {  # target: (input that holds indexes, input that they index, its dim)
    "aten.embedding.default": (1, 0, 0),
    "aten.nll_loss_forward.default": (1, 0, 1),
    "aten.gather.default": (1, 0, None),
    "aten.index_select.default": (1, 0, None),
}


def index_bounds(graph: Graph) -> dict[str, int]:
    """For each integer input the size of the smallest dim that it indexes, followed through views and copies."""
    bounds: dict[str, int] = {}
    for op in graph.ops:
        if op.target in INDEXES:
            holds, indexed, dim = INDEXES[op.target]
            shape = graph.tensor(op.inputs[indexed]).shape
            size = shape[dim] if dim is not None else min(shape)
            name = graph.ops[_origin(graph, op.inputs[holds])[0]].name
            bounds[name] = min(size, bounds.get(name, size))
    return bounds


def _origin(graph: Graph, value: Value) -> Value:
    op = graph.ops[value[0]]
    while not op.is_placeholder and len(op.inputs) == 1:
        value = op.inputs[0]
        op = graph.ops[value[0]]
    return value
