"""`autoshard diff`: the differences between two plans."""

from __future__ import annotations

from typing import Annotated

import typer

from autoshard.cli.app import NO, OK, app
from autoshard.cli.options import Json, OldMesh, Quiet, load_any_plan
from autoshard.cli.output import Output


@app.command()
def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="A plan.", show_default=False)],
    b: Annotated[str, typer.Argument(metavar="B", help="Another one.", show_default=False)],
    exit_code: Annotated[bool, typer.Option("--exit-code", help="Exit with 1 where they differ.")] = False,
    mesh: OldMesh = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> int:
    """Compare two plans: seconds, bytes, the layouts that changed, and the assumptions that did.

    \b
    autoshard diff gpt2-2x4.json gpt2-8x1.json
    autoshard diff rl.json rl-new.json
    """
    from autoshard.report import changes, changes_tables, programs_changes, programs_changes_report  # here: as in options

    with Output(as_json=as_json, quiet=quiet) as output:
        plans = [load_any_plan(path, mesh) for path in (a, b)]
        of_programs = [hasattr(plan, "programs") for plan in plans]
        if all(of_programs):
            record = programs_changes(*plans)
            output.answer(record, lambda: programs_changes_report(record))
        elif any(of_programs):
            raise ValueError(f"{(a, b)[of_programs.index(True)]} is a plan of several programs; name one of them, as FILE#NAME")
        else:
            record = changes(*plans)
            output.answer(record, lambda: changes_tables(record))
    return NO if exit_code and not record["same"] else OK
