"""Does a plan compute what the model computes? All ranks run in this process and are compared with the unsharded module.

capture_module     the model's graph, and whether the plan fits it
run_unsharded      the module on seeded random values (its own weights, where it has some): the reference
random_choice      with `random`: more layouts, drawn from the candidates, which tests the candidates themselves
verify_program     every rank's program against the reference, one comparison per set of layouts
verify_stages      the same of a pipeline, whose stages run on ranks of their own

A plan of several programs is verified and checked program by program: `verify` and `check` take any plan.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from autoshard.capture import capture_module, constants, in_turn, input_names
from autoshard.explain import Changes, Checked, Inspection, check_programs
from autoshard.formulate import Training, formulate
from autoshard.graph import Graph
from autoshard.lower import CannotRun, RankProgram, Verification, constants_of, lower, out_of_step, run_unsharded, verify_program
from autoshard.lower import dry_run as lower_dry_run
from autoshard.lower import plant_fault as put_fault
from autoshard.mesh import Mesh
from autoshard.pipeline import microbatch, to_run
from autoshard.planning import Progress, Stopwatch, layouts_of, random_choice, results_of
from autoshard.routes import Routes
from autoshard.runtime import CapturedPipeline, verify_stages
from autoshard.solution import AnyPlan, Pipeline, Placed, ProgramsSolution, Solution, replay, save_over
from autoshard.strategies import candidates
from autoshard.torch_private import pytree

DEVICES = ("cpu", "cuda")
Layouts = tuple[int | None, dict[str, Placed], dict[str, str]]  # the seed of drawn ones, layouts by op, layouts of results


@in_turn
def verify(
    model: nn.Module | Mapping[str, nn.Module],
    example_inputs: Any,
    solution: AnyPlan,
    *,
    random: int = 0,
    seed: int = 0,
    plant_fault: bool = False,
    device: str = "cpu",
    mark: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> dict:
    """Run the plan on all ranks of its mesh, in one process on one device, and compare outputs and every gradient.

    The model may have other sizes than the one that was planned (a smaller batch, say), as long as the layouts divide them.
    random: so many more layouts, each drawn from the candidates. plant_fault: the negative control, one layout is falsified
    and the answer must be no. device: cpu, or cuda for the kernels and numbers of a GPU. Returns `ok`, `ranks`, `plans` [{seed,
    max_relative_error_outputs, max_relative_error_gradients, placement_mismatches, redistributes}], and `device`, `torch` and
    `inputs`, which `solution.marked(report)` keeps with the plan. mark: a file to which the plan is written with these where the answer is
    ok, `FILE#NAME` for one program of several. ValueError when the solution is of another model.

    Of a pipeline, all ranks of all its stages run, with example_inputs of the full batch; the answer has the figures of its one plan at
    the top, and none are drawn. Of several programs: model and example_inputs by program (a model alone is that of all); the answer has
    `ok`, and the answer for each among `programs`.
    """
    report = Stopwatch(progress).say
    _check_device(device)
    if random < 0:
        raise ValueError(f"random is {random}; expected how many plans to draw, 0 or more")
    options: dict[str, Any] = {"random": random, "seed": seed, "plant_fault": plant_fault, "device": device}
    if isinstance(solution, ProgramsSolution):
        models = _by_program(model, example_inputs, solution)
        answers = {name: verify(*models[name], solution[name], progress=progress, **options) for name in solution}
        answer = {"ok": all(one["ok"] for one in answers.values()), "programs": answers}
    elif isinstance(solution, Pipeline):
        if random or device != "cpu":
            raise ValueError("a pipeline runs on the CPU, with its own layouts; leave out random and device")
        answer = _verify_stages(model, example_inputs, solution, seed, plant_fault)
    else:
        answer = _verify(model, example_inputs, solution, report, **options)
    if answer["ok"] and mark is not None:
        save_over(solution.marked(answer), mark)
    return answer


def _verify(
    model: Any, example_inputs: Any, solution: Solution, report: Progress, *, random: int, seed: int, plant_fault: bool, device: str
) -> dict[str, Any]:
    mesh = solution.mesh
    report("capturing the model", 0.0)
    captured = capture_module(model, example_inputs, training=solution.training, precision=solution.precision)
    graph = replay(solution, captured.graph).checked()
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
        rows.append(_row(drawn, verification))
    ok = all([row.pop("ok") for row in rows])
    return {"ok": ok, "ranks": mesh.num_devices, "plans": rows, **_ran_on(model, example_inputs, device)}


def _verify_stages(model: Any, example_inputs: Any, pipeline: Pipeline, seed: int, plant_fault: bool) -> dict[str, Any]:
    captured = captured_pipeline(model, example_inputs, pipeline)
    plan = captured.plan
    if plant_fault:
        stage = max(plan.stages, key=lambda one: one.mesh.num_devices)
        wrong = replace(stage, layouts=put_fault(stage.layouts, stage.graph, stage.mesh, seed))
        plan = replace(plan, stages=tuple(wrong if one is stage else one for one in plan.stages))
    verification = verify_stages(model, example_inputs, plan, captured.constants, seed)
    row = _row(seed, verification)
    del row["seed"]
    return {"ok": row.pop("ok"), "ranks": verification.ranks, **_ran_on(model, example_inputs, "cpu"), **row}


def captured_pipeline(model: nn.Module, example_inputs: Any, pipeline: Pipeline) -> CapturedPipeline:
    """The stages of `pipeline` in this model. ValueError where it is of another model."""
    part = microbatch(example_inputs, pipeline.microbatches)
    captured = capture_module(model, part, training=pipeline.training)
    plan = to_run(pipeline, captured.graph, input_names(model, example_inputs), example_inputs)
    return CapturedPipeline(plan, constants_of(model, captured.graph, constants(captured.fx_graph)))


@in_turn
def check(
    model: nn.Module | Mapping[str, nn.Module],
    example_inputs: Any,
    solution: AnyPlan,
    *,
    within: float = 0.05,
    mesh: Mesh | None = None,
    solve: bool = True,
    same_graph: bool = True,
    time_limit: float = 600.0,
    progress: Progress | None = None,
) -> Checked:
    """Whether a saved plan still fits the model, and costs at most `within` more than the best plan now (0.05 is five percent).

    mesh: today's prices, on a mesh of the plan's shape; without it the plan's own. solve: search for the best plan now; without it compare
    with a bound that is found faster and may be too low. same_graph: refuse a graph other than the one planned, even where the layouts
    fit it (another batch size). time_limit: seconds for the best plan. ValueError on a bad option, and where the model can't be captured.

    Of several programs: model and example_inputs by program (a model alone is that of all; each shape of a program has its own entry,
    "train[0]"); costs are seconds per unit, the peak is the fullest moment of any program. Of a pipeline: whether its stages fit the model;
    it is not priced again, so it takes no options.
    """
    inspection = Inspection(solution, within, mesh, solve, same_graph, time_limit, Stopwatch(progress))
    if not isinstance(solution, Pipeline):
        return check_programs(_by_program(model, example_inputs, solution), inspection)
    asked = {
        "the mesh (--cluster)": mesh is not None, "within": within != 0.05, "solve (--no-solve)": not solve,
        "same_graph (--any-graph)": not same_graph, "time_limit": time_limit != 600.0,
    }  # fmt: skip
    if given := " and ".join(name for name, is_asked in asked.items() if is_asked):
        raise ValueError(f"a pipeline is not priced again, only compared with its model; leave out {given}")
    misfits: tuple[str, ...] = ()
    try:
        captured_pipeline(model, example_inputs, solution)
    except ValueError as error:
        misfits = (str(error).partition("; plan ")[0],)  # without its advice, which the answer has too
    return inspection.answer(Changes(misfits, (), True, ()), cost=solution.cost, peak=solution.peak_bytes)


def _by_program(model: Any, example_inputs: Any, plan: Solution | ProgramsSolution) -> dict[str, tuple[nn.Module, Any]]:
    """Module and example inputs of each program, of the only one by the name "". ValueError where one is missing."""
    if isinstance(plan, Solution):
        return {"": (model, example_inputs)}
    pairs = {}
    for name in plan:
        names = (name, plan.families[name])
        module = model if isinstance(model, nn.Module) else next((model[one] for one in names if one in model), None)
        inputs = next((example_inputs[one] for one in names if one in example_inputs), None)
        if module is None or inputs is None:
            what = "no model" if module is None else "no example inputs"
            raise ValueError(f"there is {what} for program {name!r}; expected one for each of {', '.join(plan)}")
        pairs[name] = (module, inputs)
    return pairs


def _ran_on(model: nn.Module, example_inputs: Any, device: str) -> dict[str, Any]:
    """Where and with which sizes a plan was run: `device`, `torch` (its version), `inputs` (global shapes by name)."""
    leaves = pytree.tree_leaves(example_inputs)
    named = zip(input_names(model, example_inputs), leaves, strict=False)
    shapes = {name: list(x.shape) for name, x in named if isinstance(x, torch.Tensor)}
    return {"device": device, "torch": torch.__version__, "inputs": shapes}


def _check_device(device: str) -> None:
    if device not in DEVICES:
        raise ValueError(f"device is {device!r}; expected one of {', '.join(DEVICES)}")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device is cuda, but torch sees no GPU here; run it where one is, or see what a dry run tells: autoshard doctor")


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
