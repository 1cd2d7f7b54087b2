"""`autoshard plan | show | verify`: makes a plan, shows it, checks it on simulated ranks."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from autoshard.cli.app import NO, OK, app, say_no
from autoshard.cli.arguments import bandwidths, model_settings
from autoshard.cli.model import load_model
from autoshard.cli.options import (
    DEVICE,
    INTER,
    INTRA,
    BatchSize,
    ClusterFile,
    DeviceName,
    DType,
    ExpertImbalance,
    GlobalBatch,
    InterNodeBandwidth,
    IntraNodeBandwidth,
    Json,
    MasterWeights,
    Microbatches,
    Model,
    Objective,
    OldMesh,
    OptionalModel,
    Pin,
    Plan,
    PrecisionText,
    Prices,
    Quiet,
    SeqLength,
    Settings,
    Tf32,
    Train,
    Trust,
    load_any_plan,
    load_api,
    load_plan,
    load_report,
    model_of,
)
from autoshard.cli.output import Output
from autoshard.cli.plan_inputs import AUTO, check_mesh_words, edits_note, handed_on, mesh_of, one_mesh, planning_options, wanted_gap
from autoshard.mesh import DEVICES_PER_NODE, Mesh


@app.command()
def plan(
    model: Model,
    mesh: Annotated[
        str | None, typer.Option(help="Sizes of the mesh, slowest axis first: 2x4; or auto, to compare all shapes.", show_default=False)
    ] = None,
    settings: Settings = [],  # noqa: B006 (typer makes a new one)
    batch: BatchSize = None,
    seq: SeqLength = None,
    dtype: DType = None,
    cluster: ClusterFile = None,
    devices: Annotated[int | None, typer.Option(help="With --mesh auto: how many.", min=1, show_default=False)] = None,
    train: Train = False,
    memory: Annotated[str | None, typer.Option(help="Memory of a device: 80GB. Default: no limit.", show_default=False)] = None,
    out: Annotated[str | None, typer.Option(help="Write the plan here: .json, or .pkl.", show_default=False)] = None,
    as_json: Json = False,
    time_limit: Annotated[float, typer.Option(help="Seconds for the solver.")] = 10000.0,
    gap: Annotated[
        float | None,
        typer.Option(help="Stop when proven to be within this of the best. Default: 0.001, after a minute 0.01.", show_default=False),
    ] = None,
    solver: Annotated[str, typer.Option(help="auto, prices, ilp, cvxpy or exhaustive.")] = "auto",
    intra_node_bandwidth: IntraNodeBandwidth = INTRA,
    inter_node_bandwidth: InterNodeBandwidth = INTER,
    device: DeviceName = DEVICE,
    tf32: Tf32 = False,
    prices: Prices = None,
    devices_per_node: Annotated[
        int | None, typer.Option(help="Default: all axes but the first; 8 with --mesh auto.", min=1, show_default=False)
    ] = None,
    optimizer: Annotated[
        str | None,
        typer.Option(help="Whose state memory holds: adamw (the default), sgd, momentum, or bytes per parameter.", show_default=False),
    ] = None,
    precision: PrecisionText = None,
    master_weights: MasterWeights = False,
    microbatches: Microbatches = None,
    expert_imbalance: ExpertImbalance = None,
    global_batch: GlobalBatch = None,
    objective: Objective = "serial",
    tie_blocks: Annotated[bool, typer.Option("--tie-blocks", help="Use the same layouts in all repeated blocks.")] = False,
    recompute: Annotated[
        str | None, typer.Option(help="Recompute in the backward: a number of blocks, all, blocks, auto. Default: 0.", show_default=False)
    ] = None,
    sequence_order: Annotated[
        str, typer.Option(help="Of long causal attention: auto, natural, or head_tail, which gives all shards the same work.")
    ] = "auto",
    pin: Pin = [],  # noqa: B006
    forbid: Annotated[list[str], typer.Option(metavar="NAME=LAYOUT", help="Forbid a layout; repeatable.", show_default=False)] = [],  # noqa: B006
    keep: Annotated[
        str | None, typer.Option(metavar="SOLUTION", help="Keep the parameters' layouts of this plan, edited perhaps.", show_default=False)
    ] = None,
    free: Annotated[
        list[str], typer.Option(metavar="GLOB", help="With --keep: parameters to plan anew; repeatable.", show_default=False)
    ] = [],  # noqa: B006
    price_pins: Annotated[bool, typer.Option("--price-pins", help="Say what each pin and forbidden layout costs.")] = False,
    no_baselines: Annotated[bool, typer.Option("--no-baselines", help="Leave out the usual plans, such as FSDP and Megatron.")] = False,
    quiet: Quiet = False,
) -> int:
    """Find the best layout of every tensor of MODEL on a mesh, with a proof.

    \b
    autoshard plan models/gpt2.py:small --set batch=512 --mesh 2x4 --train --memory 80GB --out gpt2.json
    autoshard plan models/gpt2.py:small --set batch=512 --mesh auto --devices 16 --train --out gpt2.json
    autoshard plan models/mlp.py:mlp --mesh 8 --pin 'layers.*.up.weight=S(0)' --price-pins --json
    autoshard plan models/mlp.py:mlp --keep edited.json --free 'layers.1.*'
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
    options = planning_options(
        memory=memory, optimizer=optimizer, recompute=recompute, pin=pin, forbid=forbid,
        training=train, precision=precision, master_weights=master_weights, microbatches=microbatches, global_batch=global_batch,
        objective=objective, expert_imbalance=expert_imbalance, tie_blocks=tie_blocks, price_pins=price_pins,
        baselines=not no_baselines, sequence_order=sequence_order,
        solver=solver, time_limit=time_limit, **wanted_gap(gap), assumptions={"model": model, "set": keywords},
    )  # fmt: skip
    options = handed_on(options, kept)
    with Output(as_json=as_json, quiet=quiet) as output:
        if options.get("recompute") == "auto" and options["training"] and (objective != "serial" or tie_blocks):
            beside = "--tie-blocks" if tie_blocks else f"--objective {objective}"
            output.note(f"--recompute auto chooses blocks, not single tensors, beside {beside}")
        output.progress("building the model", 0.0)
        module, example_inputs = load_model(model, keywords, training=options["training"])
        if kept is not None:
            options["keep"] = load_api().kept_layouts(kept, free)
            output.note(edits_note(options["keep"], load_api().edited_layouts(kept), keep or ""))
        per_node = devices_per_node or DEVICES_PER_NODE
        meshes = [make(shape, per_node) for shape in load_api().mesh_shapes(devices, per_node)] if one is None else []
        return _plan(module, example_inputs, one, meshes, options, output, out)


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
    record = _record(solution) if compared is None else {**_record(solution), "meshes": compared}
    output.answer(record, lambda: load_report().planned_report(solution, compared))
    return OK


def _record(solution: Any) -> dict:
    """The plan's summary, with what its pins cost where that was asked for."""
    prices = solution.pin_prices
    return load_report().summary(solution) | ({"pins": list(prices)} if prices is not None else {})


@app.command()
def show(solution: Plan, mesh: OldMesh = None, as_json: Json = False) -> int:
    """Show a plan: its cost and proof, beside the usual plans, the layout of each parameter, and where the time goes.

    \b
    autoshard show solutions/gpt2-small-2x4.json
    """
    with Output(as_json=as_json) as output:
        loaded, report = load_any_plan(solution, mesh), load_report()
        if hasattr(loaded, "programs"):
            from autoshard.report import programs_record, programs_report  # here: as in options

            output.answer(programs_record(loaded), lambda: programs_report(loaded))
            return OK
        output.answer(_record(loaded), lambda: report.planned_report(loaded))
    return OK


@app.command()
def verify(
    solution: Plan,
    model: OptionalModel = None,
    settings: Settings = [],  # noqa: B006 (as above)
    batch: BatchSize = None,
    seq: SeqLength = None,
    dtype: DType = None,
    trust: Trust = False,
    mesh: OldMesh = None,
    random: Annotated[int, typer.Option(help="Check this many plans drawn at random from the candidates too.", min=0)] = 0,
    seed: Annotated[int, typer.Option(help="Of the inputs and of the drawing.")] = 0,
    plant_fault: Annotated[bool, typer.Option("--plant-fault", help="Check a plan with a wrong row in it, which must fail.")] = False,
    local_tensor_mode: Annotated[
        bool, typer.Option("--local-tensor-mode", help="Run the rank program under torch's LocalTensorMode as well (slower).")
    ] = False,
    device: Annotated[str, typer.Option("--device", help="Where all ranks run: cpu or cuda.")] = "cpu",
    mark: Annotated[bool, typer.Option("--mark", help="Where the answer is ok, note that in the plan's file.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> int:
    """Run a plan on simulated ranks in this process and compare outputs and every gradient with the unsharded model.

    \b
    autoshard verify gpt2.json models/gpt2.py:small --batch 8 --seq 16
    autoshard verify tiny.json --trust --random 5
    """
    with Output(as_json=as_json, quiet=quiet) as output:
        output.progress("reading the plan", 0.0)
        loaded = load_plan(solution, mesh)
        written, keywords = model_of(loaded, model, model_settings(settings, batch=batch, seq=seq, dtype=dtype), solution, trust)
        output.progress("building the model", 0.0)
        module, example_inputs = load_model(written, keywords, training=loaded.training)
        record = load_api().verify(
            module,
            example_inputs,
            loaded,
            random=random,
            seed=seed,
            plant_fault=plant_fault,
            local_tensor_mode=local_tensor_mode,
            device=device,
            mark=solution if mark else None,
            progress=output.progress,
        )
        output.answer(record, lambda: load_report().verify_report(record))
    return OK if record["ok"] else NO
