"""`autoshard show`: a plan, or the differences between two."""

from __future__ import annotations

from autoshard.cli.app import NO, OK, app
from autoshard.cli.loading import load_any_plan, load_report
from autoshard.cli.output import Output


@app.command()
def show(
    solution: str,
    other: str | None = None,
    exit_code: bool = False,
    mesh: str | None = None,
    as_json: bool = False,
    quiet: bool = False,
) -> int:
    """Show a plan: its cost and proof, beside the usual plans, the layout of each parameter, and where the time goes.

    With OTHER, what differs between two plans: seconds, bytes, the layouts that changed, and the assumptions that did.

    \b
    autoshard show solutions/gpt2-small-2x4.json
    autoshard show gpt2-2x4.json gpt2-8x1.json
    """
    same, report = True, load_report()
    with Output(as_json=as_json, quiet=quiet) as output:
        if other is not None:
            same = _compare(output, solution, other, mesh)
        elif hasattr(loaded := load_any_plan(solution, mesh), "programs"):
            output.answer(report.programs_record(loaded), lambda: report.programs_report(loaded))
        else:
            output.answer(report.summary(loaded), lambda: report.planned_report(loaded))
    return NO if exit_code and not same else OK


def _compare(output: Output, a: str, b: str, mesh: str | None) -> bool:
    """Print the differences of two plans, and return whether they are the same."""
    report, plans = load_report(), [load_any_plan(path, mesh) for path in (a, b)]
    of_programs = [hasattr(plan, "programs") for plan in plans]
    if any(of_programs) and not all(of_programs):
        raise ValueError(f"{(a, b)[of_programs.index(True)]} is a plan of several programs; name one of them, as FILE#NAME")
    if all(of_programs):
        record, tables = report.programs_changes(*plans), report.programs_changes_report
    else:
        record, tables = report.changes(*plans), report.changes_tables
    output.answer(record, lambda: tables(record))
    return record["same"]
