"""`autoshard programs`: several programs on one set of weights, planned together, and what sharing costs each of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

import typer

from autoshard.cli.app import OK, app, say_no
from autoshard.cli.arguments import bandwidths, model_settings
from autoshard.cli.model import load_programs
from autoshard.cli.options import (
    DEVICE,
    INTER,
    INTRA,
    DeviceName,
    InterNodeBandwidth,
    IntraNodeBandwidth,
    Json,
    Quiet,
    Settings,
    load_api,
)
from autoshard.cli.output import Output
from autoshard.cli.plan_inputs import mesh_of, planning_options, wanted_gap
from autoshard.mesh import parse_shape

Target = Annotated[
    str,
    typer.Argument(metavar="TARGET", help="file.py:function, which returns {name: Program}; or a plan of programs.", show_default=False),
]


@app.command()
def programs(
    target: Target,
    mesh: Annotated[str | None, typer.Option(help="Sizes of the mesh, slowest axis first: 2x4.", show_default=False)] = None,
    settings: Settings = [],  # noqa: B006 (typer makes a new one)
    switches: Annotated[
        str, typer.Option(help="How often per unit copies of parameters are made anew; 0: once; none: there are no copies.")
    ] = "1",
    memory: Annotated[str | None, typer.Option(help="Memory of a device: 80GB. Default: no limit.", show_default=False)] = None,
    out: Annotated[str | None, typer.Option(help="Write the plan here: .json, or .pkl.", show_default=False)] = None,
    time_limit: Annotated[float, typer.Option(help="Seconds for the solver.")] = 10000.0,
    gap: Annotated[
        float | None,
        typer.Option(help="Stop when proven to be within this of the best. Default: 0.001, after a minute 0.01.", show_default=False),
    ] = None,
    intra_node_bandwidth: IntraNodeBandwidth = INTRA,
    inter_node_bandwidth: InterNodeBandwidth = INTER,
    device: DeviceName = DEVICE,
    devices_per_node: Annotated[int | None, typer.Option(help="Default: all axes but the first.", min=1, show_default=False)] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> int:
    """Plan several programs on one set of weights: training and rollout, prefill and decode, one shape or many.

    Every other verb reads one of them as FILE#NAME.

    \b
    autoshard programs rl.py:programs --mesh 2x8 --memory 80GB --switches 1 --out rl.json
    autoshard programs rl.json
    autoshard explain rl.json#generate 'layers.0.mlp.up.weight'
    """
    with Output(as_json=as_json, quiet=quiet) as output:
        if ".py:" not in target:
            return _answer(output, load_api().load_programs(target))
        if mesh is None:
            raise ValueError("Missing option '--mesh': give the sizes of the mesh, as --mesh 2x4")
        links = bandwidths(intra_node_bandwidth, inter_node_bandwidth)
        built = mesh_of(parse_shape(mesh), None, None, devices_per_node, device=device, tf32=False, **links)
        output.progress("building the models", 0.0)
        loaded = load_programs(target, model_settings(settings))
        options = planning_options(memory=memory, time_limit=time_limit, **wanted_gap(gap))
        try:
            plan = load_api().plan_programs(loaded, built, switches=switches_of(switches), progress=output.progress, **options)
        except load_api().Infeasible as error:
            return say_no(output, error, error.to_dict())
        noted = {name: s.noting(model=f"{target}#{name}", set=model_settings(settings)) for name, s in plan.programs.items()}
        plan = replace(plan, programs=noted)
        if out is not None:
            plan.save(out)
            output.note(f"wrote {out}")
        return _answer(output, plan)


def switches_of(written: str) -> float | None:
    """`none` is None, a number itself."""
    return None if written == "none" else float(written)


def _answer(output: Output, plan: Any) -> int:
    from autoshard.report import programs_record, programs_report  # here: as in options

    output.answer(programs_record(plan), lambda: programs_report(plan))
    return OK
