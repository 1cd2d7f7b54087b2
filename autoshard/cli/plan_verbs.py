"""`autoshard plan | verify | frontier`: makes a plan, checks it on simulated ranks; makes the fastest plans for less and less memory."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from autoshard import report
from autoshard.cli.app import NO, OK, app, say_no
from autoshard.cli.loading import load_any_plan, load_api, load_cluster, load_device, load_plan, models_for
from autoshard.cli.model import load_model, load_model_or_programs
from autoshard.cli.output import Output
from autoshard.cli.verbs import Asked
from autoshard.mesh import DEVICES_PER_NODE, MOST_DEVICES, Mesh, shape_text
from autoshard.options import Options, having


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
    kept = None if asked.keep is None else load_plan(asked.keep)
    mesh = None if asked.mesh == AUTO else one_mesh(asked, kept)
    planning = inherited(asked.planning, kept)
    planning = {"gap": WANTED_GAP, "accepted": ACCEPTED, **planning} if "gap" not in planning else planning
    options = Options(**planning)
    if options.recompute == "auto" and options.training and options.tie_blocks:
        output.note("--recompute auto chooses blocks, not single tensors, beside --tie-blocks")
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
    noted = {**planning, "assumptions": {"model": asked.model, "set": asked.settings}}
    return _plan(module, example_inputs, mesh, [mesh_of(asked, shape, per_node) for shape in shapes], noted, output, asked.out)


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
    record = report.planned.summary(solution) | ({} if compared is None else {"meshes": compared})
    output.answer(record, lambda: report.planned.planned_report(solution, compared))
    return OK


def _plan_programs(programs: Mapping[str, Any], mesh: Mesh | None, asked: Asked, planning: dict[str, Any], output: Output) -> int:
    """Plan programs together, and print what sharing costs each of them."""
    if mesh is None:
        raise ValueError(f"{asked.model} returns several programs, which have no --mesh auto and no --keep; leave it out")
    api, per_unit = load_api(), None if asked.switches == "none" else float(asked.switches or 1)
    try:
        plan = api.plan(programs, mesh, switches=per_unit, progress=output.progress, **planning)
    except api.Infeasible as error:
        return say_no(output, error, error.to_dict())
    noted = {name: one.noting(set=asked.settings, model=f"{asked.model}#{name}") for name, one in plan.programs.items()}
    plan = replace(plan, programs=noted)
    output.write(asked.out, plan.save)
    output.answer(report.programs.programs_record(plan), lambda: report.programs.programs_report(plan))
    return OK


@app.command()
def verify(asked: Asked, output: Output) -> int:
    """Run a plan on simulated ranks in this process and compare outputs and every gradient with the unsharded model.

    \b
    autoshard verify gpt2.json models/gpt2.py:small --batch 8 --seq 16
    autoshard verify tiny.json --trust --random 5
    """
    output.progress("reading the plan", 0.0)
    loaded = load_any_plan(asked.solution)
    module, example_inputs = models_for(output, loaded, asked)
    options = {name: getattr(asked, name) for name in ("random", "seed", "plant_fault", "device")}
    mark = asked.solution if asked.mark else None
    record = load_api().verify(module, example_inputs, loaded, mark=mark, progress=output.progress, **options)
    output.answer(record, lambda: report.planned.verify_report(record))
    return OK if record["ok"] else NO


@app.command()
def frontier(asked: Asked, output: Output) -> int:
    """Memory against time: the fastest plans of MODEL for less and less memory per device, each with its proof.

    \b
    autoshard frontier models/llama.py:llama3_8b --mesh 8x8 --train --plot frontier.png --csv frontier.csv
    autoshard frontier models/mlp.py:mlp --mesh 8 --points 6 --save-dir plans --json
    """
    check_mesh_words(asked.mesh, asked.cluster)
    devices = mesh_of(asked, asked.mesh, asked.devices_per_node)
    options = {name: getattr(asked, name) for name in ("points", "gap", "time_limit", "recompute")} | asked.planning
    options["assumptions"] = {"model": asked.model, "set": asked.settings}
    output.progress("building the model", 0.0)
    module, example_inputs = load_model(asked.model, asked.settings, training=asked.planning.get("training", False))
    api = load_api()
    try:
        swept = api.frontier(module, example_inputs, devices, progress=output.progress, **options)
    except api.Infeasible as error:
        return say_no(output, error)
    record = swept.to_dict()
    output.write(asked.out, swept.save)
    output.write(asked.csv, lambda path: report.frontier.write_csv(record, path))
    output.write(asked.plot, lambda path: report.frontier.draw(record, path))
    output.write(asked.save_dir, lambda folder: _save_plans(swept, output, Path(folder)))
    output.answer(record, lambda: report.frontier.frontier_report(record))
    return OK


def _save_plans(swept: Any, output: Output, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for i in range(len(swept.points)):
        output.progress(f"writing plan {i + 1} of {len(swept.points)}", 0.97)
        swept.solution(i).save(folder / f"point-{i:02d}.json")


# -- what is asked, as values -------------------------------------------------------------------------------------------------------


Shape = tuple[int, ...]
AUTO = "auto"  # the --mesh that compares all shapes
WANTED_GAP = 1e-3  # relative: prices carry errors of several percent, so nobody waits for the digits behind it
ACCEPTED = (0.01, 60.0)  # (relative gap, seconds): after a minute this is enough


def check_mesh_words(mesh: Shape | str | None, cluster: str | None, keep: str | None = None, devices: int | None = None) -> None:
    """ValueError on options that contradict each other about the mesh, or that name none."""
    if mesh is None and cluster is None and keep is None:
        raise ValueError("Missing option '--mesh': give the sizes of the mesh, as --mesh 2x4, or a measured --cluster cluster.json")
    if mesh == AUTO and devices is None:
        raise ValueError("--mesh auto compares the meshes of how many devices? Add for example --devices 16")
    if devices is not None and devices > MOST_DEVICES:
        raise ValueError(f"--devices is {devices}; expected {MOST_DEVICES} at most: make the cluster smaller")
    if mesh != AUTO and devices is not None:
        raise ValueError(f"--devices {devices} is for --mesh auto, the mesh here is {_by(mesh)}; leave one out")
    if mesh == AUTO and (cluster is not None or keep is not None):
        raise ValueError("--mesh auto compares meshes, but --cluster and --keep are for one; leave out the mesh")


def mesh_of(asked: Asked, shape: Shape | None, devices_per_node: int | None) -> Mesh:
    """The mesh of one shape: with published prices, as measured, or with the bandwidths that are passed."""
    if asked.cluster is not None:
        measured = load_cluster(asked.cluster)
        if shape is not None and shape != measured.shape:
            raise ValueError(f"--mesh is {_by(shape)}, but {asked.cluster} was measured as {_by(measured.shape)}; leave --mesh out")
        return measured
    assert shape is not None
    if asked.prices is not None:
        from autoshard.cost import presets  # here: scipy takes half a second to import

        return presets.mesh(asked.prices, shape, devices_per_node, tf32=asked.tf32)
    device = load_device(asked.device)
    return Mesh.from_bandwidths(shape, devices_per_node=devices_per_node, tf32=asked.tf32, device=device, **asked.links)


def one_mesh(asked: Asked, kept: Any) -> Mesh:
    """The mesh that the options describe, or that of the plan that is kept."""
    if kept is not None and asked.mesh is None and asked.cluster is None:
        return kept.mesh
    built = mesh_of(asked, asked.mesh, asked.devices_per_node)
    if kept is not None and built.shape != kept.mesh.shape:
        raise ValueError(f"the mesh is {_by(built.shape)}, but {asked.keep} shards tensors over {_by(kept.mesh.shape)}; leave the mesh out")
    return built


def inherited(planning: Mapping[str, Any], kept: Any) -> dict[str, Any]:
    """The options, and those of the kept plan where the command line has none."""
    if kept is None:
        return dict(planning)
    instead = {"microbatches"} if "global_batch" in planning else set()
    noted = {**kept.noted(*having(Options, "kept")), "training": kept.training}
    return {**{key: value for key, value in noted.items() if value is not None and key not in instead}, **planning}


def edits_note(kept: Mapping[str, str], edited: Mapping[str, list], path: str) -> str:
    """One line: how many layouts are kept, and which of them were edited."""
    changed = [f"{name} {had} -> {now}" for name, (had, now) in edited.items() if name in kept]
    return f"keeping {len(kept)} layouts of {path}, {len(changed)} of them edited" + (f": {'; '.join(changed)}" if changed else "")


def _by(shape: Any) -> str:
    return "None" if shape is None else shape_text(shape)
