"""`autoshard programs`: several programs on one set of weights, planned together, and what sharing costs each of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from autoshard.cli.app import OK, app, say_no
from autoshard.cli.arguments import bandwidths, model_settings
from autoshard.cli.loading import DEVICE, INTER, INTRA, load_api
from autoshard.cli.model import load_programs
from autoshard.cli.output import Output
from autoshard.cli.plan_inputs import mesh_of, wanted_gap
from autoshard.mesh import parse_shape


@app.command()
def programs(
    target: str,
    mesh: str | None = None,
    settings: list[str] = [],  # noqa: B006 (typer makes a new one)
    switches: str = "1",
    out: str | None = None,
    intra_node_bandwidth: str = INTRA,
    inter_node_bandwidth: str = INTER,
    device: str = DEVICE,
    devices_per_node: int | None = None,
    as_json: bool = False,
    quiet: bool = False,
    **planning: Any,
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
            return _answer(output, load_api().load(target))
        if mesh is None:
            raise ValueError("Missing option '--mesh': give the sizes of the mesh, as --mesh 2x4")
        links = bandwidths(intra_node_bandwidth, inter_node_bandwidth)
        built = mesh_of(parse_shape(mesh), None, None, devices_per_node, device=device, tf32=False, **links)
        output.progress("building the models", 0.0)
        loaded = load_programs(target, model_settings(settings))
        try:
            plan = load_api().plan(loaded, built, switches=switches_of(switches), progress=output.progress, **wanted_gap(planning))
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
    from autoshard.report import programs_record, programs_report  # here: as in loading

    output.answer(programs_record(plan), lambda: programs_report(plan))
    return OK
