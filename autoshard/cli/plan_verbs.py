"""The verbs about plans: plan, show, verify."""

from __future__ import annotations

from typing import Annotated

import typer

from autoshard.cli.app import NO, OK, app
from autoshard.cli.arguments import check_out, parse_bytes, parse_optimizer, parse_pins, parse_settings
from autoshard.cli.model import load_model
from autoshard.cli.options import Json, Model, OldMesh, OptionalModel, Plan, Quiet, Settings, load_api, load_plan, load_report, model_of
from autoshard.cli.output import Output, complain
from autoshard.mesh import Mesh, parse_shape


@app.command()
def plan(
    model: Model,
    mesh: Annotated[str | None, typer.Option(help="Sizes of the mesh, slowest axis first: 2x4.", show_default=False)] = None,
    settings: Settings = [],  # noqa: B006 (typer makes a new one)
    cluster: Annotated[
        str | None, typer.Option(help="A file of `calibrate measure`, instead of a mesh and bandwidths.", show_default=False)
    ] = None,
    train: Annotated[bool, typer.Option("--train", help="Plan a training step instead of a forward pass.")] = False,
    memory: Annotated[str | None, typer.Option(help="Memory of a device: 80GB. Default: no limit.", show_default=False)] = None,
    out: Annotated[str | None, typer.Option(help="Write the plan here: .json, or .pkl.", show_default=False)] = None,
    as_json: Json = False,
    time_limit: Annotated[float, typer.Option(help="Seconds for the solver.")] = 10000.0,
    gap: Annotated[float, typer.Option(help="Stop when proven to be within this of the best, relative.")] = 0.0,
    solver: Annotated[str, typer.Option(help="auto, ilp, cvxpy or exhaustive.")] = "auto",
    intra_node_bandwidth: Annotated[str, typer.Option(help="Bytes per second per device, inside a node.")] = "300GB/s",
    inter_node_bandwidth: Annotated[str, typer.Option(help="Bytes per second of one node's link to the others.")] = "400GB/s",
    device: Annotated[str, typer.Option(help="a100, h100, h200 or cpu.")] = "h100",
    prices: Annotated[
        str | None, typer.Option(help="Take bandwidths and device from `show-prices`: a100, h100, b200, mi300x, ...", show_default=False)
    ] = None,
    devices_per_node: Annotated[int | None, typer.Option(help="Default: all axes but the first.", show_default=False)] = None,
    optimizer: Annotated[str, typer.Option(help="Whose state memory holds: adamw, sgd, momentum, or bytes per parameter.")] = "adamw",
    master_weights: Annotated[bool, typer.Option("--master-weights", help="Hold a float32 copy of 16-bit parameters.")] = False,
    tie_blocks: Annotated[bool, typer.Option("--tie-blocks", help="Lay all repeated blocks out alike.")] = False,
    recompute: Annotated[str, typer.Option(help="Blocks to recompute in the backward pass: a number, all, or auto.")] = "0",
    pin: Annotated[list[str], typer.Option(metavar="NAME=LAYOUT", help="Fix a layout; repeatable.", show_default=False)] = [],  # noqa: B006
    no_baselines: Annotated[bool, typer.Option("--no-baselines", help="Leave out data parallel, FSDP and Megatron.")] = False,
    quiet: Quiet = False,
) -> int:
    """Find the best layout of every tensor of MODEL on a mesh, with a proof.

    \b
    autoshard plan models/gpt2.py:small --set batch=512 --mesh 2x4 --train --memory 80GB --out gpt2.json
    autoshard plan models/mlp.py:mlp --mesh 8 --pin 'wte.weight=S(0)' --json
    """
    if devices_per_node is not None and devices_per_node < 1:
        raise ValueError(f"--devices-per-node is {devices_per_node}; expected 1 or more")
    measured = None if cluster is None else _measured(cluster)
    if mesh is None and measured is None:
        raise ValueError("Missing option '--mesh': give the sizes of the mesh, as --mesh 2x4, or a measured --cluster cluster.json")
    if mesh is not None and measured is not None and parse_shape(mesh) != measured.shape:
        raise ValueError(f"--mesh is {mesh}, but {cluster} was measured as {'x'.join(map(str, measured.shape))}; leave --mesh out")
    if prices is not None and measured is not None:
        raise ValueError(f"--prices {prices} and --cluster {cluster} both say what links cost; leave one out")
    devices = (
        measured
        or _preset(prices, parse_shape(mesh or ""), devices_per_node)
        or Mesh.from_bandwidths(
            parse_shape(mesh or ""),
            intra_node_bandwidth=parse_bytes(intra_node_bandwidth, "--intra-node-bandwidth"),
            inter_node_bandwidth=parse_bytes(inter_node_bandwidth, "--inter-node-bandwidth"),
            device=device,
            devices_per_node=devices_per_node,
        )
    )
    check_out(out)
    keywords, pins = parse_settings(settings), parse_pins(pin)
    memory_limit = None if memory is None else parse_bytes(memory)
    with Output(as_json=as_json, quiet=quiet) as output:
        output.progress("building the model", 0.0)
        module, example_inputs = load_model(model, keywords, training=train)
        api = load_api()
        try:
            solution = api.plan(
                module,
                example_inputs,
                devices,
                training=train,
                memory_limit=memory_limit,
                pins=pins,
                solver=solver,
                time_limit=time_limit,
                gap=gap,
                optimizer=parse_optimizer(optimizer),
                master_weights=master_weights,
                tie_blocks=tie_blocks,
                recompute=int(recompute) if recompute.isdigit() else recompute,
                baselines=not no_baselines,
                progress=output.progress,
                assumptions={"model": model, "set": keywords},
            )
        except api.Infeasible as error:
            complain(f"autoshard: {error}")
            if as_json:
                output.answer({"status": "infeasible", "message": str(error)}, str)
            return NO
        if out is not None:
            solution.save(out)
            output.note(f"wrote {out}")
        report = load_report()
        output.answer(report.summary(solution), lambda: report.plan_report(solution))
    return OK


@app.command()
def show(solution: Plan, mesh: OldMesh = None, as_json: Json = False) -> int:
    """Show a plan: its cost and proof, beside the usual plans, the layout of each parameter, and where the time goes.

    \b
    autoshard show solutions/gpt2-small-2x4.json
    """
    with Output(as_json=as_json) as output:
        loaded, report = load_plan(solution, mesh), load_report()
        output.answer(report.summary(loaded), lambda: report.plan_report(loaded))
    return OK


@app.command()
def verify(
    solution: Plan,
    model: OptionalModel = None,
    settings: Settings = [],  # noqa: B006 (as above)
    mesh: OldMesh = None,
    random: Annotated[int, typer.Option(help="Check this many plans drawn at random from the candidates too.", min=0)] = 0,
    seed: Annotated[int, typer.Option(help="Of the inputs and of the drawing.")] = 0,
    plant_fault: Annotated[bool, typer.Option("--plant-fault", help="Check a plan with a wrong row in it, which must fail.")] = False,
    local_tensor_mode: Annotated[
        bool, typer.Option("--local-tensor-mode", help="Run the rank program under torch's LocalTensorMode as well (slower).")
    ] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> int:
    """Run a plan on simulated ranks in this process and compare outputs and every gradient with the unsharded model.

    \b
    autoshard verify gpt2.json models/gpt2.py:small --set batch=8 --set seq=16
    autoshard verify tiny.json --random 5
    """
    with Output(as_json=as_json, quiet=quiet) as output:
        output.progress("reading the plan", 0.0)
        loaded = load_plan(solution, mesh)
        written, keywords = model_of(loaded, model, parse_settings(settings), solution)
        output.progress("building the model", 0.0)
        module, example_inputs = load_model(written, keywords, training=loaded.training)
        found = load_api().verify(
            module,
            example_inputs,
            loaded,
            random=random,
            seed=seed,
            plant_fault=plant_fault,
            local_tensor_mode=local_tensor_mode,
            progress=output.progress,
        )
        output.answer(found, lambda: load_report().verify_report(found))
    return OK if found["ok"] else NO


def _preset(name: str | None, shape: tuple[int, ...], devices_per_node: int | None) -> Mesh | None:
    from autoshard.cost import presets  # here: as below

    return None if name is None else presets.mesh(name, shape, devices_per_node)


def _measured(path: str) -> Mesh:
    from autoshard.cost.curves import load_cluster  # here: scipy takes half a second to import

    return load_cluster(path)
