"""`autoshard show`: a plan as tables, or as one page of HTML; or the differences between two plans."""

from __future__ import annotations

from typing import Any

from rich.text import Text

from autoshard.cli.app import NO, OK, app
from autoshard.cli.loading import load_any_plan, load_api, load_report, model_of
from autoshard.cli.model import check_sizes, load_model
from autoshard.cli.output import Output
from autoshard.cli.verbs import Asked


@app.command()
def show(asked: Asked, output: Output) -> int:
    """Show a plan: its cost and proof, beside the usual plans, the layout of each parameter, and where the time goes.

    Of several programs, what sharing costs each of them; FILE#NAME is the plan of one. Of a pipeline, its stages. With OTHER, what
    differs between two plans: seconds, bytes, the layouts that changed, and the assumptions that did.

    --html writes one page instead, which needs no network: costs, memory, layouts on the mesh, the model, the time line. The time line
    needs the model: the one named, or with --trust the one that the plan says it is for. Where that one can't be built, the page is
    written without it and says why.

    \b
    autoshard show solutions/gpt2-small-2x4.json
    autoshard show gpt2-2x4.json gpt2-8x1.json
    autoshard show gpt2.json --html gpt2.html --trust
    autoshard show gpt2.json --html gpt2.html --model models/gpt2.py:small --set batch=512 --frontier frontier.json
    """
    if asked.other is not None:
        same = _compare(output, asked)
        return NO if asked.exit_code and not same else OK
    loaded = load_any_plan(asked.solution, asked.mesh)
    if asked.html is None:
        _print(output, loaded)
    else:
        _write(output, loaded, asked)
    return OK


def _print(output: Output, loaded: Any) -> None:
    report = load_report()
    if hasattr(loaded, "programs"):
        output.answer(report.programs_record(loaded), lambda: report.programs_report(loaded))
    elif hasattr(loaded, "stages"):
        output.answer(loaded.to_dict(layouts=False), lambda: report.pipeline.pipeline_report(loaded))
    else:
        output.answer(report.summary(loaded), lambda: report.planned_report(loaded))


def _compare(output: Output, asked: Asked) -> bool:
    """Print the differences of two plans, and return whether they are the same."""
    report = load_report()
    record = report.comparison(*(load_any_plan(path, asked.mesh) for path in (asked.solution, asked.other)))
    output.answer(record, lambda: report.comparison_tables(record))
    return record["same"]


def _write(output: Output, loaded: Any, asked: Asked) -> None:
    """Write the page of a plan."""
    from autoshard.report import html  # here: as in loading

    out, no_model = asked.html, asked.no_model
    points = None if asked.frontier is None else html.load_frontier(asked.frontier)
    several = _several(asked.solution, loaded)
    if several and (asked.model is not None or asked.settings or points is not None):
        raise ValueError(several)
    page, why = (load_api().html_report(loaded), "") if several else _page(output, loaded, asked, points)
    if why and not no_model:
        output.note(f"without a time line: {why}")
    html.save_html(page, out)
    output.note(f"wrote {out}")
    sections = html.shown_sections(loaded, has_timeline=not why, has_frontier=points is not None)
    num_bytes = len(page.encode())
    record = {"out": out, "bytes": num_bytes, "sections": sections, "no_model": why or None}
    output.answer(record, lambda: Text(f"{out}: {num_bytes / 1e3:.0f} kB, opens in any browser"))


def _several(path: str, loaded: Any) -> str:
    """Why the page has no model and no frontier; empty for a plan of one program."""
    if hasattr(loaded, "programs"):
        return f"{path} is a plan of several programs; name one of them: {path}#{loaded.home}"
    return f"{path} is a pipeline, whose page needs nothing else; leave the other words out" if hasattr(loaded, "stages") else ""


def _page(output: Output, loaded: Any, asked: Asked, points: dict | None) -> tuple[str, str]:
    """The page, and why it has no time line (empty where it has one). ValueError where a model that was named can't be used."""
    api, named, path = load_api(), asked.model is not None or bool(asked.settings), asked.solution
    if asked.no_model or not (named or loaded.model):
        why = "it was left out" if asked.no_model else "the plan doesn't say which model it is for"
        return api.html_report(loaded, frontier=points, no_model=why), why
    without = "; or --no-model, for a page without a time line"
    written, keywords = model_of(loaded, asked.model, asked.settings, path, asked.trust, option="--model", without=without)
    try:
        output.progress("building the model", 0.0)
        module, inputs = load_model(written, keywords, training=loaded.training)
        check_sizes(module, inputs, loaded, path)
        return api.html_report(loaded, module, inputs, frontier=points, progress=output.progress), ""
    except (ValueError, OSError) as error:
        if named:
            raise
        why = " ".join(str(error).split())
        return api.html_report(loaded, frontier=points, no_model=why), why
