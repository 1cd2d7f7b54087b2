"""`autoshard explain`: why a plan costs what it costs, and how much of that hangs on which price.

Each question is a part: a function from what is known to a record and a renderable. PARTS that need no model come first and are
always answered; those that plan again are asked for by an option.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType

from autoshard.cli.app import OK, app
from autoshard.cli.arguments import parse_settings
from autoshard.cli.model import load_model
from autoshard.cli.options import Json, OldMesh, OptionalModel, Plan, Quiet, Settings, load_api, load_plan, model_of
from autoshard.cli.output import Output


def _report() -> ModuleType:
    from autoshard.report import robustness  # here: as in options

    return robustness


@app.command()
def explain(
    solution: Plan,
    model: OptionalModel = None,
    settings: Settings = [],  # noqa: B006 (typer makes a new one)
    robust: Annotated[
        bool, typer.Option("--robust", help="Plan again under other bandwidths: where does the plan stay best, and what is lost outside?")
    ] = False,
    within: Annotated[float, typer.Option(help="With --robust: a regret that still counts as best, relative; 0.01 is one percent.")] = 0.0,
    time_limit: Annotated[float, typer.Option(help="With --robust: seconds for each plan made on the way.")] = 60.0,
    mesh: OldMesh = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> int:
    """Say what a plan's seconds are made of, how far each price may be off, and with --robust how much the plan hangs on them.

    \b
    autoshard explain gpt2.json
    autoshard explain gpt2.json --robust
    """
    if robust and not 0 <= within < 1:
        raise ValueError(f"--within is {within}; expected a number from 0 to 1: 0.01 is one percent")
    if robust and not time_limit > 0:
        raise ValueError(f"--time-limit is {time_limit}; expected more than 0 seconds")
    with Output(as_json=as_json, quiet=quiet) as output:
        loaded = load_plan(solution, mesh)
        record: dict[str, Any] = {"cost_seconds": loaded.cost}
        shown: list[Callable[[], RenderableType]] = []
        _prices(loaded, record, shown)
        if robust:
            written, keywords = model_of(loaded, model, parse_settings(settings), solution)
            output.progress("building the model", 0.0)
            module, example_inputs = load_model(written, keywords, training=loaded.training)
            found = load_api().robustness(module, example_inputs, loaded, slack=within, time_limit=time_limit, progress=output.progress)
            record["robust"] = found
            shown.append(lambda: _report().robustness_table(found))
        output.answer(record, lambda: Group(*(part() for part in shown)))
    return OK


def _prices(loaded: Any, record: dict, shown: list[Callable[[], RenderableType]]) -> None:
    """The parts of the cost, with the errors of their prices."""
    from autoshard.report.robustness import price_parts, prices_table

    record["interval_seconds"] = None if loaded.interval is None else list(loaded.interval)
    record["fingerprint"] = loaded.fingerprint.get("prices")
    record["prices"] = price_parts(loaded)
    shown.append(lambda: prices_table(loaded))
