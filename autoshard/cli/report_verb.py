"""`autoshard report`: writes a plan as one page of HTML."""

from __future__ import annotations

import json
from typing import Any

from rich.text import Text

from autoshard.cli.app import OK, app
from autoshard.cli.arguments import parse_settings
from autoshard.cli.loading import load_any_plan, load_api, model_of
from autoshard.cli.model import check_sizes, load_model
from autoshard.cli.output import Output
from autoshard.reading import text_of


@app.command()
def report(
    solution: str,
    model: str | None = None,
    out: str = "report.html",
    settings: list[str] = [],  # noqa: B006 (typer makes a new one)
    trust: bool = False,
    frontier: str | None = None,
    no_model: bool = False,
    mesh: str | None = None,
    as_json: bool = False,
    quiet: bool = False,
) -> int:
    """Write a plan as one page of HTML that needs no network: costs, memory, layouts on the mesh, the model, the time line.

    A plan of several programs is a page of what sharing costs each of them; FILE#NAME is the page of one. Of a file of
    `autoshard pipeline --out` it is a page with the stages over time.

    The time line needs the model: the one named, or with --trust the one that the plan says it is for. Where that one can't be built,
    the page is written without it and says why.

    \b
    autoshard report gpt2.json --trust --out report.html
    autoshard report gpt2.json models/gpt2.py:small --set batch=512 --frontier frontier.json
    autoshard report rl.json
    autoshard report pipeline.json
    """
    from autoshard.report import html  # here: as in loading

    if no_model and (model is not None or settings):
        raise ValueError(f"--no-model and {model or '--set'} contradict each other; leave one out")
    with Output(as_json=as_json, quiet=quiet) as output:
        alone = model is None and not settings and frontier is None
        if _is_pipeline(solution):
            if not alone or mesh is not None:
                raise ValueError(f"{solution} is a pipeline, whose page needs nothing else; leave the other words out")
            planned = load_api().load(solution)
            return _written(output, load_api().html_report(planned), out, {"sections": html.shown_sections(planned), "no_model": None})
        loaded = load_any_plan(solution, mesh)
        if hasattr(loaded, "programs"):
            if not alone:
                raise ValueError(f"{solution} is a plan of several programs; name one of them: {solution}#{loaded.home}")
            return _written(output, load_api().html_report(loaded), out, {"sections": html.shown_sections(loaded), "no_model": None})
        points = None if frontier is None else html.load_frontier(frontier)
        text, why = _page(loaded, model, parse_settings(settings), solution, trust, no_model, points, output)
        if why and not no_model:
            output.note(f"without a time line: {why}")
        shown = html.shown_sections(loaded, has_timeline=not why, has_frontier=points is not None)
        return _written(output, text, out, {"sections": shown, "no_model": why or None})


def _is_pipeline(path: str) -> bool:
    """Whether the file is one of `autoshard pipeline --out`; what it is otherwise is for its reader to say."""
    try:
        data = json.loads(text_of(path, "plan"))
    except (ValueError, OSError, RecursionError):
        return False
    return isinstance(data, dict) and "stages" in data and "configurations" in data


def _written(output: Output, page: str, out: str, record: dict) -> int:
    """Write the page and say so; record: its sections, and why there is no model."""
    from autoshard.report import save_html  # here: as in loading

    save_html(page, out)
    output.note(f"wrote {out}")
    num_bytes = len(page.encode())
    output.answer({"out": out, "bytes": num_bytes, **record}, lambda: Text(f"{out}: {num_bytes / 1e3:.0f} kB, opens in any browser"))
    return OK


def _page(
    loaded: Any, model: str | None, settings: dict, path: str, trust: bool, no_model: bool, points: dict | None, output: Output
) -> tuple[str, str]:
    """The page, and why it has no time line (empty where it has one). ValueError where a model that was named can't be used."""
    api, named = load_api(), model is not None or bool(settings)
    if no_model or not (named or loaded.model):
        why = "it was left out" if no_model else "the plan doesn't say which model it is for"
        return api.html_report(loaded, frontier=points, no_model=why), why
    written, keywords = model_of(loaded, model, settings, path, trust, without="; or --no-model, for a page without a time line")
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
