"""`autoshard check`: whether a saved plan is still good for the model as it is now."""

from __future__ import annotations

from typing import Annotated

import typer

from autoshard.cli.app import NO, OK, app
from autoshard.cli.arguments import parse_settings
from autoshard.cli.model import load_model
from autoshard.cli.options import Json, OldMesh, OptionalModel, Plan, Quiet, Settings, Trust, load_api, load_cluster, load_plan, model_of
from autoshard.cli.output import Output


@app.command()
def check(
    solution: Plan,
    model: OptionalModel = None,
    settings: Settings = [],  # noqa: B006 (typer makes a new one)
    trust: Trust = False,
    within: Annotated[str, typer.Option(help="How far it may be above the best plan now: 5%, or 0.05.")] = "5%",
    no_solve: Annotated[bool, typer.Option("--no-solve", help="Do not plan anew; compare with a bound that is found faster.")] = False,
    any_graph: Annotated[
        bool, typer.Option("--any-graph", help="Accept a graph other than the one planned, if the layouts fit it: another batch size.")
    ] = False,
    cluster: Annotated[
        str | None, typer.Option(help="Today's prices: a file of `calibrate measure`. Default: those of the plan.", show_default=False)
    ] = None,
    time_limit: Annotated[float, typer.Option(help="Seconds for planning anew.")] = 600.0,
    mesh: OldMesh = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> int:
    """Check a saved plan against the model as it is now: does it fit, what does it cost today, how far is it from the best plan now?

    Exit code 1, with the reasons, where it does not fit or is too far off.

    \b
    autoshard check gpt2.json --trust
    autoshard check gpt2.json models/gpt2.py:small --set batch=256 --any-graph --within 2%
    """
    share = _share(within)
    with Output(as_json=as_json, quiet=quiet) as output:
        loaded = load_plan(solution, mesh)
        written, keywords = model_of(loaded, model, parse_settings(settings), solution, trust)
        today = None if cluster is None else load_cluster(cluster)
        output.progress("building the model", 0.0)
        module, example_inputs = load_model(written, keywords, training=loaded.training)
        checked = load_api().check(
            module,
            example_inputs,
            loaded,
            within=share,
            mesh=today,
            solve=not no_solve,
            same_graph=not any_graph,
            time_limit=time_limit,
            progress=output.progress,
        )
        record, sentence = checked.to_dict(), checked.sentence(solution)
        output.answer({**record, "message": sentence}, lambda: _table(record, sentence))
    return OK if checked.ok else NO


def _table(record: dict, sentence: str):
    from autoshard.report.explained import check_table  # here: as in options

    return check_table(record, sentence)


def _share(written: str) -> float:
    """`5%` or `0.05` -> 0.05."""
    number = written.strip()
    return float(number.removesuffix("%")) / (100 if number.endswith("%") else 1)
