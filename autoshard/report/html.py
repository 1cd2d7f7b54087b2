"""A plan as one self-contained page of HTML: no network, no library, one small script; everything in it is escaped.

    html_report    a plan of one program, of several, or a pipeline -> the page as text
                   (page_of_plan, programs, pipeline: content of templates/)
    save_html      the text -> a file, written completely or not at all
    notebook       a few tables for a notebook                (Solution._repr_html_)

Names in a plan may come from an untrusted file. So the page's Content-Security-Policy also forbids every request and every script but its
own (by its hash). The same plan yields the same bytes, since the page holds no date.
"""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from autoshard import units
from autoshard.report import page_of_plan, pipeline, plan_tables, programs, proof
from autoshard.report.frontier import load_frontier as load_frontier
from autoshard.report.values import Code, Number
from autoshard.solution import VERSION, AnyPlan, Pipeline, ProgramsSolution, Solution
from autoshard.writing import write_atomically

if TYPE_CHECKING:
    from autoshard.simulate import Timeline

NO_MODEL = "it was not given"


def html_report(
    plan: AnyPlan,
    timeline: Timeline | None = None,
    frontier: Mapping | None = None,
    *,
    no_model: str = NO_MODEL,
) -> str:
    """The page. Of one program: timeline of simulate, for the time line, memory over time and the ops; frontier: memory against seconds.

    no_model: why there is no time line, as the end of a sentence. ValueError where `frontier` is no record of a frontier.
    """
    if isinstance(plan, ProgramsSolution):
        return _page("programs", programs.SECTIONS, programs.content(plan))
    if isinstance(plan, Pipeline):
        return _page("pipeline", pipeline.SECTIONS, pipeline.content(plan))
    content = page_of_plan.content(plan, timeline, frontier)
    return _page("plan", page_of_plan.SECTIONS, {"prices_of": "listed above", "no_model": no_model.strip().rstrip("."), **content})


def shown_sections(plan: Any, *, has_timeline: bool = False, has_frontier: bool = False) -> dict[str, bool]:
    """By id whether the section has content, or one sentence that says what it would take."""
    if isinstance(plan, (ProgramsSolution, Pipeline)):
        return dict.fromkeys(programs.SECTIONS if isinstance(plan, ProgramsSolution) else pipeline.SECTIONS, True)
    return {**dict.fromkeys(page_of_plan.SECTIONS, True), "timeline": has_timeline, "frontier": has_frontier}


def save_html(text: str, path: str | os.PathLike[str]) -> None:
    """Write the page; OSError where that can't be."""
    write_atomically(text, path)


def notebook(solution: Solution) -> str:
    """A summary for a notebook: what it costs, the usual plans, layouts; equal blocks once."""
    tables = {"usual": plan_tables.usual_table(solution), "parameters": plan_tables.parameters_table(solution)}
    about = {"title": page_of_plan.title(solution), "verdict": proof.plan_card(solution)}
    return _environment().get_template("notebook.html.j2").render(solution=solution, **about, **tables)


def _page(template: str, sections: Mapping[str, str], content: Mapping[str, Any]) -> str:
    """A page with its style and script, and the hash of the script that the page allows."""
    script, style = _source("report.js.j2"), _source("report.css.j2")
    script_hash = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    frame = {"script": script, "style": style, "script_hash": script_hash, "version": VERSION, "sections": sections}
    return _environment().get_template(f"{template}.html.j2").render(**frame, **{"fingerprint": "", **content})


@lru_cache(maxsize=1)
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(seconds=units.seconds, size=units.size, count=_count)
    environment.filters["words"] = lambda text: str(text).replace("_", " ")
    environment.tests["number_column"] = lambda name: isinstance(name, Number)
    environment.tests["code_column"] = lambda name: isinstance(name, Code)
    return environment


def _count(value: int, noun: str) -> str:
    """`1 parameter`, `148 parameters`."""
    return f"{value:,} {noun}{'' if value == 1 else 's'}"


def _source(name: str) -> str:
    environment = _environment()
    assert environment.loader is not None
    return environment.loader.get_source(environment, name)[0]
