"""`autoshard plan | verify`: makes a plan, checks it on simulated ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from autoshard.cli.app import NO, OK, app, say_no
from autoshard.cli.loading import load_any_plan, load_api, load_plan, load_report, models_for
from autoshard.cli.model import load_model_or_programs
from autoshard.cli.output import Output
from autoshard.cli.plan_inputs import AUTO, check_mesh_words, edits_note, inherited, mesh_of, one_mesh, wanted_gap
from autoshard.cli.verbs import Asked
from autoshard.mesh import DEVICES_PER_NODE, Mesh
from autoshard.options import Options


@app.command()
def plan(asked: Asked, output: Output) -> int:
    """Find the best layout of every tensor of MODEL on a mesh, with a proof.

    Where the function returns {name: Program}, plan several programs on one set of weights: training and rollout, prefill and decode,
    one shape or many. Every other verb reads one of them as FILE#NAME.

    \b
    autoshard plan models/gpt2.py:small --set batch=512 --mesh 2x4 --train --memory 80GB --out gpt2.json
    autoshard plan models/gpt2.py:small --set batch=512 --mesh auto --devices 16 --train --out gpt2.json
    autoshard plan models/mlp.py:mlp --mesh 8 --pin 'layers.*.up.weight=S(0)' --price-pins --json
    autoshard plan models/mlp.py:mlp --keep edited.json --free 'layers.1.*'
    autoshard plan rl.py:programs --mesh 2x8 --memory 80GB --switches 1 --out rl.json
    """
    if asked.free and asked.keep is None:
        raise ValueError(f"--free {asked.free[0]} says which layouts of a plan not to keep; give the plan too, as --keep plan.json")
    check_mesh_words(asked.mesh, asked.cluster, asked.keep, asked.devices)
    kept = None if asked.keep is None else load_plan(asked.keep, None)
    mesh = None if asked.mesh == AUTO else one_mesh(asked, kept)
    planning = wanted_gap(inherited(asked.planning, kept))
    _note_blocks(Options(**planning), output)
    output.progress("building the model", 0.0)
    loaded = load_model_or_programs(asked.model, asked.settings, training=planning.get("training", False))
    if isinstance(loaded, Mapping):
        return _plan_programs(loaded, None if kept else mesh, asked, planning, output)
    if asked.switches is not None:
        raise ValueError(f"--switches is of several programs, but {asked.model} returns one model; leave it out")
    module, example_inputs = loaded
    if kept is not None:
        planning["keep"] = load_api().kept_layouts(kept, asked.free)
        output.note(edits_note(planning["keep"], load_api().edited_layouts(kept), asked.keep))
    per_node = asked.devices_per_node or DEVICES_PER_NODE
    shapes = load_api().mesh_shapes(asked.devices, per_node) if mesh is None else []
    options = {**planning, "assumptions": {"model": asked.model, "set": asked.settings}}
    return _plan(module, example_inputs, mesh, [mesh_of(asked, shape, per_node) for shape in shapes], options, output, asked.out)


def _note_blocks(asked: Options, output: Output) -> None:
    if asked.recompute == "auto" and asked.training and asked.tie_blocks:
        output.note("--recompute auto chooses blocks, not single tensors, beside --tie-blocks")


def _plan(
    module: Any, example_inputs: Any, mesh: Mesh | None, meshes: list[Mesh], options: dict[str, Any], output: Output, out: str | None
) -> int:
    """Plan on the one mesh, or without one on each of several, and print the result."""
    api, compared = load_api(), None
    options["on_plan"] = None if out is None else lambda plan: plan.save(out)  # what comes beside it may take minutes
    try:
        if mesh is not None:
            solution = api.plan(module, example_inputs, mesh, progress=output.progress, **options)
        else:
            plans = api.plan_meshes(module, example_inputs, meshes, progress=output.progress, **options)
            solution, compared = plans.best, plans.to_dicts()
    except api.Infeasible as error:
        return say_no(output, error, error.to_dict())
    output.write(out, solution.save)
    report = load_report()
    record = report.summary(solution) | ({} if compared is None else {"meshes": compared})
    output.answer(record, lambda: report.planned_report(solution, compared))
    return OK


def _plan_programs(programs: Mapping[str, Any], mesh: Mesh | None, asked: Asked, planning: dict[str, Any], output: Output) -> int:
    """Plan programs together, and print what sharing costs each of them."""
    if mesh is None:
        raise ValueError(f"{asked.model} returns several programs, which have no --mesh auto and no --keep; leave it out")
    api, report = load_api(), load_report()
    per_unit = None if asked.switches == "none" else float(asked.switches or 1)
    try:
        plan = api.plan(programs, mesh, switches=per_unit, progress=output.progress, **planning)
    except api.Infeasible as error:
        return say_no(output, error, error.to_dict())
    noted = {name: one.noting(set=asked.settings, model=f"{asked.model}#{name}") for name, one in plan.programs.items()}
    plan = replace(plan, programs=noted)
    output.write(asked.out, plan.save)
    output.answer(report.programs_record(plan), lambda: report.programs_report(plan))
    return OK


@app.command()
def verify(asked: Asked, output: Output) -> int:
    """Run a plan on simulated ranks in this process and compare outputs and every gradient with the unsharded model.

    \b
    autoshard verify gpt2.json models/gpt2.py:small --batch 8 --seq 16
    autoshard verify tiny.json --trust --random 5
    """
    output.progress("reading the plan", 0.0)
    loaded = load_any_plan(asked.solution, asked.mesh)
    module, example_inputs = models_for(output, loaded, asked)
    options = {name: getattr(asked, name) for name in ("random", "seed", "plant_fault", "local_tensor_mode", "device")}
    mark = asked.solution if asked.mark else None
    record = load_api().verify(module, example_inputs, loaded, mark=mark, progress=output.progress, **options)
    output.answer(record, lambda: load_report().verify_report(record))
    return OK if record["ok"] else NO
