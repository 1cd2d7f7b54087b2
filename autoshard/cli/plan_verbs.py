"""`autoshard plan | verify`: makes a plan, checks it on simulated ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from autoshard.cli.app import NO, OK, app, say_no
from autoshard.cli.arguments import bandwidths, model_settings
from autoshard.cli.loading import DEVICE, INTER, INTRA, load_any_plan, load_api, load_plan, load_report, models_for
from autoshard.cli.model import load_model_or_programs
from autoshard.cli.output import Output
from autoshard.cli.plan_inputs import AUTO, check_mesh_words, edits_note, inherited, mesh_of, one_mesh, wanted_gap
from autoshard.mesh import DEVICES_PER_NODE, Mesh
from autoshard.options import Options


@app.command()
def plan(
    model: str,
    mesh: str | None = None,
    settings: list[str] = [],  # noqa: B006 (typer makes a new one)
    batch: int | None = None,
    seq: int | None = None,
    dtype: str | None = None,
    cluster: str | None = None,
    devices: int | None = None,
    out: str | None = None,
    as_json: bool = False,
    intra_node_bandwidth: str = INTRA,
    inter_node_bandwidth: str = INTER,
    device: str = DEVICE,
    tf32: bool = False,
    prices: str | None = None,
    devices_per_node: int | None = None,
    keep: str | None = None,
    free: list[str] = [],  # noqa: B006
    switches: str | None = None,
    quiet: bool = False,
    **planning: Any,
) -> int:
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
    if free and keep is None:
        raise ValueError(f"--free {free[0]} says which layouts of a plan not to keep; give the plan too, as --keep plan.json")
    check_mesh_words(mesh, cluster, keep, devices, prices)
    kept = None if keep is None else load_plan(keep, None)
    links = bandwidths(intra_node_bandwidth, inter_node_bandwidth)

    def make(shape: tuple[int, ...] | None, per_node: int | None = devices_per_node) -> Mesh:
        return mesh_of(shape, prices, cluster, per_node, device=device, tf32=tf32, **links)

    one = None if mesh == AUTO else one_mesh(mesh, cluster, kept, keep, make)
    keywords = model_settings(settings, batch=batch, seq=seq, dtype=dtype)
    asked = wanted_gap(inherited(planning, kept))
    options = {**asked, "assumptions": {"model": model, "set": keywords}}
    with Output(as_json=as_json, quiet=quiet) as output:
        _note_blocks(Options(**asked), output)
        output.progress("building the model", 0.0)
        loaded = load_model_or_programs(model, keywords, training=asked.get("training", False))
        if isinstance(loaded, Mapping):
            return _plan_programs(loaded, None if kept else one, switches, asked, options["assumptions"], output, out)
        if switches is not None:
            raise ValueError(f"--switches is of several programs, but {model} returns one model; leave it out")
        module, example_inputs = loaded
        if kept is not None:
            options["keep"] = load_api().kept_layouts(kept, free)
            output.note(edits_note(options["keep"], load_api().edited_layouts(kept), keep or ""))
        per_node = devices_per_node or DEVICES_PER_NODE
        meshes = [make(shape, per_node) for shape in load_api().mesh_shapes(devices, per_node)] if one is None else []
        return _plan(module, example_inputs, one, meshes, options, output, out)


def _note_blocks(asked: Options, output: Output) -> None:
    if asked.recompute == "auto" and asked.training and (asked.objective != "serial" or asked.tie_blocks):
        beside = "--tie-blocks" if asked.tie_blocks else f"--objective {asked.objective}"
        output.note(f"--recompute auto chooses blocks, not single tensors, beside {beside}")


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
    if out is not None:
        solution.save(out)
        output.note(f"wrote {out}")
    report = load_report()
    record = report.summary(solution) | ({} if compared is None else {"meshes": compared})
    output.answer(record, lambda: report.planned_report(solution, compared))
    return OK


def _plan_programs(
    programs: Mapping[str, Any], mesh: Mesh | None, switches: str | None, asked: dict, assumptions: dict, output: Output, out: str | None
) -> int:
    """Plan programs together, and print what sharing costs each of them. assumptions: the model and its settings."""
    if mesh is None:
        raise ValueError(f"{assumptions['model']} returns several programs, which have no --mesh auto and no --keep; leave it out")
    api, report = load_api(), load_report()
    per_unit = None if switches == "none" else float(switches or 1)
    try:
        plan = api.plan(programs, mesh, switches=per_unit, progress=output.progress, **asked)
    except api.Infeasible as error:
        return say_no(output, error, error.to_dict())
    noted = {name: one.noting(**assumptions | {"model": f"{assumptions['model']}#{name}"}) for name, one in plan.programs.items()}
    plan = replace(plan, programs=noted)
    if out is not None:
        plan.save(out)
        output.note(f"wrote {out}")
    output.answer(report.programs_record(plan), lambda: report.programs_report(plan))
    return OK


@app.command()
def verify(
    solution: str,
    model: str | None = None,
    settings: list[str] = [],  # noqa: B006 (as above)
    batch: int | None = None,
    seq: int | None = None,
    dtype: str | None = None,
    trust: bool = False,
    mesh: str | None = None,
    random: int = 0,
    seed: int = 0,
    plant_fault: bool = False,
    local_tensor_mode: bool = False,
    device: str = "cpu",
    mark: bool = False,
    as_json: bool = False,
    quiet: bool = False,
) -> int:
    """Run a plan on simulated ranks in this process and compare outputs and every gradient with the unsharded model.

    \b
    autoshard verify gpt2.json models/gpt2.py:small --batch 8 --seq 16
    autoshard verify tiny.json --trust --random 5
    """
    with Output(as_json=as_json, quiet=quiet) as output:
        output.progress("reading the plan", 0.0)
        loaded = load_any_plan(solution, mesh)
        keywords = model_settings(settings, batch=batch, seq=seq, dtype=dtype)
        module, example_inputs = models_for(output, loaded, solution, model, keywords, trust)
        record = load_api().verify(
            module, example_inputs, loaded, random=random, seed=seed, plant_fault=plant_fault, local_tensor_mode=local_tensor_mode,
            device=device, mark=solution if mark else None, progress=output.progress,
        )  # fmt: skip
        output.answer(record, lambda: load_report().verify_report(record))
    return OK if record["ok"] else NO
