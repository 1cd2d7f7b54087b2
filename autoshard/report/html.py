"""A plan as one self-contained page of HTML: no network, no library, one small script; everything in it is escaped.

    html_report    a plan of one program, of several, or a pipeline -> the page as text
                   (page_of_plan, programs, pipeline: content of templates/; page: fills them)
    notebook       a few tables for a notebook                (Solution._repr_html_)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from autoshard.report import page_of_plan, pipeline, plan_tables, programs, proof
from autoshard.report.page import environment, page
from autoshard.solution import AnyPlan, Pipeline, ProgramsSolution, Solution

if TYPE_CHECKING:
    from autoshard.simulate import Timeline

NO_MODEL = "it was not given"


PAGES: Mapping[type, tuple[str, Any]] = {ProgramsSolution: ("programs", programs), Pipeline: ("pipeline", pipeline)}  # of other kinds


def html_report(plan: AnyPlan, timeline: Timeline | None = None, frontier: Mapping | None = None, *, no_model: str = NO_MODEL) -> str:
    """The page. Of one program: timeline of simulate, for the time line, memory over time and the ops; frontier: memory against seconds.

    no_model: why there is no time line, as the end of a sentence. ValueError where `frontier` is no record of a frontier.
    """
    if not isinstance(plan, Solution):
        template, of = PAGES[type(plan)]
        return page(template, of.SECTIONS, of.content(plan))
    content = page_of_plan.content(plan, timeline, frontier)
    return page("plan", page_of_plan.SECTIONS, {"prices_of": "listed above", "no_model": no_model.strip().rstrip("."), **content})


def shown_sections(plan: Any, *, has_timeline: bool = False, has_frontier: bool = False) -> dict[str, bool]:
    """By id whether the section has content, or one sentence that says what it would take."""
    if type(plan) in PAGES:
        return dict.fromkeys(PAGES[type(plan)][1].SECTIONS, True)
    return {**dict.fromkeys(page_of_plan.SECTIONS, True), "timeline": has_timeline, "frontier": has_frontier}


def notebook(solution: Solution) -> str:
    """A summary for a notebook: what it costs, the usual plans, layouts; equal blocks once."""
    tables = {"usual": plan_tables.usual_table(solution), "parameters": plan_tables.parameters_table(solution)}
    about = {"title": page_of_plan.title(solution), "verdict": proof.plan_card(solution)}
    return environment().get_template("notebook.html.j2").render(solution=solution, **about, **tables)
