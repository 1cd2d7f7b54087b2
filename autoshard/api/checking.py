"""Does a plan compute what the model computes? All ranks run in this process and are compared with the unsharded module.

capture_module     the model's graph, and whether the plan fits it
run_unsharded      the module on seeded random values (its own weights, where it has some): the reference
random_choice      with `random`: more layouts, drawn from the candidates, which tests the candidates themselves
verify_program     every rank's program against the reference, one comparison per set of layouts
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from autoshard.capture import capture_module, constants, in_turn, input_names
from autoshard.formulate import Training, formulate
from autoshard.graph import Graph
from autoshard.lower import (
    CannotRun,
    RankProgram,
    Verification,
    draws,
    lower,
    out_of_step,
    run_local_tensor,
    run_unsharded,
    verify_program,
    with_errors_of,
)
from autoshard.lower import dry_run as lower_dry_run
from autoshard.lower import plant_fault as put_fault
from autoshard.mesh import Mesh
from autoshard.planning import Progress, layouts_of, random_choice, results_of
from autoshard.routes import Routes
from autoshard.solution import Placed, Solution, replay, save_over
from autoshard.strategies import candidates
from autoshard.torch_private import pytree

DEVICES = ("cpu", "cuda")
Layouts = tuple[int | None, dict[str, Placed], dict[str, str]]  # the seed of drawn ones, layouts by op, layouts of results


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
    device: str = "cpu",
    mark: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> dict:
    """Run the plan on all ranks of its mesh, in one process on one device, and compare outputs and every gradient.

    The model may have other sizes than the one that was planned (a smaller batch, say), as long as the layouts divide them.
    random: so many more layouts, each drawn from the candidates. plant_fault: the negative control, one layout is falsified
    and the answer must be no. local_tensor_mode: run the rank program once more under torch's LocalTensorMode, and compare its
    results too. device: cpu, or cuda for the kernels and numbers of a GPU. Returns `ok`, `ranks`, `plans` [{seed,
    max_relative_error_outputs, max_relative_error_gradients, placement_mismatches, redistributes}], and `device`, `torch` and
    `inputs`, which `solution.marked(report)` keeps with the plan. mark: a file to which the plan is written with these where the answer is
    ok, `FILE#NAME` for one program of several. ValueError when the solution is of another model.
    """
    report, mesh = progress or (lambda message, fraction: None), solution.mesh
    _check_device(device, local_tensor_mode)
    if random < 0:
        raise ValueError(f"random is {random}; expected how many plans to draw, 0 or more")
    report("capturing the model", 0.0)
    captured = capture_module(model, example_inputs, training=solution.training, precision=solution.precision)
    graph = replay(solution, captured.graph).checked()
    if local_tensor_mode:
        _refuse_random_ops(graph)
    report("running the unsharded model", 0.1)
    held = constants(captured.fx_graph)
    values, reference = run_unsharded(
        model, example_inputs, graph, training=solution.training, seed=seed, held=held, precision=solution.precision, device=device
    )
    expected = None if captured.autocast else reference  # the module itself, run on a CPU, ignores autocast of another device
    plans: list[Layouts] = [(None, dict(solution.layouts), dict(solution.results)), *_drawn(graph, solution, random, seed)]
    routes, rows = Routes(mesh), []
    for k, (drawn, planned, results) in enumerate(plans):
        report(f"running {mesh.num_devices} ranks, layouts {k + 1} of {len(plans)}", 0.2 + 0.8 * k / len(plans))
        layouts = put_fault(planned, graph, mesh, seed + k) if plant_fault else planned
        verification = verify_program(graph, layouts, results, mesh, values, expected, routes=routes, seed=seed, device=device)
        if local_tensor_mode and verification.ok:
            again = run_local_tensor(lower(graph, layouts, results, mesh, routes=routes), values)
            verification = with_errors_of(verification, again, reference)
        rows.append(_row(drawn, verification))
    ok = all([row.pop("ok") for row in rows])
    answer = {"ok": ok, "ranks": mesh.num_devices, "plans": rows, **ran_on(model, example_inputs, device)}
    if ok and mark is not None:
        save_over(solution.marked(answer), mark)
    return answer


def ran_on(model: nn.Module, example_inputs: Any, device: str) -> dict[str, Any]:
    """Where and with which sizes a plan was run: `device`, `torch` (its version), `inputs` (global shapes by name)."""
    leaves = pytree.tree_leaves(example_inputs)
    named = zip(input_names(model, example_inputs), leaves, strict=False)
    shapes = {name: list(x.shape) for name, x in named if isinstance(x, torch.Tensor)}
    return {"device": device, "torch": torch.__version__, "inputs": shapes}


def _check_device(device: str, local_tensor_mode: bool) -> None:
    if device not in DEVICES:
        raise ValueError(f"device is {device!r}; expected one of {', '.join(DEVICES)}")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device is cuda, but torch sees no GPU here; run it where one is, or see what a dry run tells: autoshard doctor")
    if device != "cpu" and local_tensor_mode:
        raise ValueError(f"local_tensor_mode runs on the CPU, and device is {device!r}; leave one out")


def dry_run(
    model: nn.Module, example_inputs: Any, solution: Solution | None = None, *, training: bool = False, device: str = "cuda"
) -> dict:
    """Which ops of a model (or of a plan for it) can't run on a device, without having one: each operator that the lowered program
    calls is looked up in torch's own table of kernels, on fake tensors; and whether ranks would issue collectives in different orders.

    training: of a model without a plan. Returns `ok`, `device`, `ops` (their number) and `cannot_run` [{op, module, target, why, line}],
    with the line of the model's code where it is known. ValueError when the solution is of another model.
    """
    if device not in DEVICES:
        raise ValueError(f"device is {device!r}; expected one of {', '.join(DEVICES)}")
    precision = None if solution is None else solution.precision
    captured = capture_module(model, example_inputs, training=training if solution is None else solution.training, precision=precision)
    if solution is None:
        graph, mesh, results = captured.graph, Mesh.from_bandwidths((1,)), {}
        layouts = {op.name: _replicated(graph.input_tensors(i), op.outputs) for i, op in enumerate(graph.ops)}
    else:
        graph, mesh, results = replay(solution, captured.graph).checked(), solution.mesh, dict(solution.results)
        layouts = dict(solution.layouts)
    program = lower(graph, layouts, results, mesh)
    problems = (*lower_dry_run(lower(graph, layouts, results, mesh, device=device), graph, device), *_out_of_order(program, graph))
    rows = [{**problem.as_json(), "line": captured.line_of(problem.op)} for problem in problems]
    return {"ok": not rows, "device": device, "ops": sum(not op.is_placeholder for op in graph.ops), "cannot_run": rows}


def _out_of_order(program: RankProgram, graph: Graph) -> Iterator[CannotRun]:
    """Collectives that ranks of a group would issue in different orders, and then wait for each other."""
    for one in out_of_step(program):
        op = graph.ops[one.record(program).op]
        yield CannotRun(op.name, op.module, op.target, ", but ".join(one.said(program)))


def _replicated(inputs: Sequence[Any], outputs: Sequence[Any]) -> Placed:
    return Placed(tuple("R" for _ in inputs), tuple(None if tensor is None else "R" for tensor in outputs))


def _refuse_random_ops(graph: Graph) -> None:
    random_op = next((op.name for op in graph.ops if not op.is_placeholder and draws(op.target)), None)
    if random_op is not None:
        raise ValueError(
            f"{random_op} draws random numbers (dropout), for which LocalTensorMode has a generator per rank, so that its masks differ "
            "from the model's; leave local_tensor_mode out, or turn dropout off with model.eval() and plan that"
        )


def _drawn(graph: Graph, solution: Solution, count: int, seed: int) -> list[Layouts]:
    """So many random layouts, with the seed of each."""
    if not count:
        return []
    training = Training(microbatches=solution.microbatches) if solution.training else None
    formulated = formulate(graph, candidates(graph, solution.mesh), solution.mesh, training=training)
    choices = [(k, random_choice(formulated, k)) for k in range(seed, seed + count)]
    return [(k, layouts_of(formulated, choice), results_of(formulated, choice)) for k, choice in choices]


def _row(seed: int | None, verification: Verification) -> dict:
    return {
        "seed": seed,
        "max_relative_error_outputs": verification.max_relative_error_outputs,
        "max_relative_error_gradients": verification.max_relative_error_gradients,
        "placement_mismatches": [mismatch.as_json() for mismatch in verification.placement_mismatches],
        "redistributes": verification.redistributes,
        "ok": verification.ok,
    }
