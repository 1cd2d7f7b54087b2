"""`autoshard diff`: the differences between two plans."""

from __future__ import annotations

from autoshard.cli.app import NO, OK, app
from autoshard.cli.loading import load_any_plan
from autoshard.cli.output import Output


@app.command()
def diff(a: str, b: str, exit_code: bool = False, mesh: str | None = None, as_json: bool = False, quiet: bool = False) -> int:
    """Compare two plans: seconds, bytes, the layouts that changed, and the assumptions that did.

    \b
    autoshard diff gpt2-2x4.json gpt2-8x1.json
    autoshard diff rl.json rl-new.json
    """
    from autoshard.report import changes, changes_tables, programs_changes, programs_changes_report  # here: as in loading

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
