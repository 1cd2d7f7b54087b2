"""A plan as one self-contained page of HTML: no network, no library, one small script; everything in it is escaped.

    html_report    the plan -> the page as text               (html_parts, html_layouts, html_tree, html_charts -> templates/)
    html_programs  the same of a plan of several programs     (html_of_programs)
    html_of_pipeline  the same of a pipeline                  (html_pipeline)
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

from autoshard import units as numbers
from autoshard.pipeline import Pipeline
from autoshard.report import html_charts, html_frontier, html_layouts, html_of_programs, html_parts, html_pipeline, html_step, html_tree
from autoshard.report.blocks import seconds_elsewhere, sections
from autoshard.solution import VERSION, ProgramsSolution, Solution
from autoshard.writing import write_atomically

if TYPE_CHECKING:
    from autoshard.simulate import Timeline

NO_MODEL = "it was not given"

# id, heading: the order of the page
SECTIONS = (
    ("summary", "The plan"),
    ("baselines", "Beside the usual plans"),
    ("time", "Where the time goes"),
    ("memory", "Memory"),
    ("layouts", "Layouts on the mesh"),
    ("model", "The model"),
    ("timeline", "Time line"),
    ("frontier", "Frontier"),
    ("unknown", "What was not understood"),
    ("prices", "How sure the prices are"),
    ("made", "How it was made"),
)


def html_report(solution: Solution, timeline: Timeline | None = None, frontier: Mapping | None = None, *, no_model: str = NO_MODEL) -> str:
    """The page. timeline: of simulate, for the time line, memory over time and the ops. frontier: memory against seconds.

    no_model: why there is no time line, as the end of a sentence. ValueError where `frontier` is no record of a frontier.
    """
    return _page(
        "report.html.j2",
        solution=solution,
        sections=SECTIONS,
        no_model=no_model.strip().rstrip("."),
        **_summary(solution),
        **_shards(solution, timeline),
        **_over_time(solution, timeline),
        saved=html_step.saved_rows(solution, timeline),
        hidden=html_step.hidden_rows(timeline) if timeline is not None and timeline.program.overlap else [],
        **_frontier(solution, frontier),
    )


def html_programs(plan: ProgramsSolution) -> str:
    """The page of a plan of several programs: what sharing costs each, and the layouts of their parameters."""
    return _page("programs.html.j2", plan=plan, sections=html_of_programs.SECTIONS, **html_of_programs.parts(plan))


def html_of_pipeline(pipeline: Pipeline) -> str:
    """The page of a pipeline plan: stages over time, layers and devices of each, and the configurations that were compared."""
    return _page("pipeline.html.j2", pipeline=pipeline, sections=html_pipeline.SECTIONS, **html_pipeline.parts(pipeline))


def _page(template: str, **values: Any) -> str:
    """A page with its style and script, and the hash of the script that the page allows."""
    script, style = _source("report.js.j2"), _source("report.css.j2")
    script_hash = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return _environment().get_template(template).render(script=script, style=style, script_hash=script_hash, version=VERSION, **values)


def save_html(text: str, path: str | os.PathLike[str]) -> None:
    """Write the page; OSError where that can't be."""
    write_atomically(text, path)


def shown_sections(has_timeline: bool, has_frontier: bool) -> dict[str, bool]:
    """By id whether the section has content, or one sentence that says what it would take."""
    known = {"timeline": has_timeline, "frontier": has_frontier}
    return {name: known.get(name, True) for name, _ in SECTIONS}


def notebook(solution: Solution) -> str:
    """A summary for a notebook: what it costs, the usual plans, layouts; equal blocks once."""
    rows = [
        {"name": name, "layout": row["layout"], "shape": "x".join(map(str, row.get("shape") or ())), "local_bytes": row.get("local_bytes"),
         "title": section.title, "first": k == 0}
        for section in sections(solution.parameters, {})
        for k, (name, row) in enumerate(section.rows.items())
    ]  # fmt: skip
    return (
        _environment()
        .get_template("notebook.html.j2")
        .render(
            solution=solution,
            title=html_parts.title(solution),
            verdict=html_parts.verdict(solution),
            usual=html_parts.usual(solution) if solution.baselines else [],
            rows=rows,
        )
    )


def _summary(solution: Solution) -> dict[str, Any]:
    limit, whose = html_parts.memory_limit(solution)
    return {
        "title": html_parts.title(solution),
        "shape": html_parts.shape_of(solution),
        "settings": html_parts.settings(solution),
        "verdict": html_parts.verdict(solution),
        "best_usual": html_parts.best_usual(solution),
        "usual": html_parts.usual(solution),
        "groups": html_parts.time_rows(solution),
        "limit": limit,
        "whose_limit": whose,
        "peak": html_parts.peak(solution),
        "prices": html_parts.price_rows(solution),
        "interval": html_parts.interval_bar(solution),
        "links": html_parts.link_rows(solution),
        "assumptions": html_parts.assumption_rows(solution),
        "offers": html_parts.offers(solution),
    }


def _shards(solution: Solution, timeline: Timeline | None) -> dict[str, Any]:
    pictures, of = html_layouts.pictures(solution)
    ops = html_parts.op_rows(solution, timeline) if timeline is not None else []
    held: dict[int, float] = {}
    counts: dict[int, int] = {}
    for name, number in of.items():
        row = solution.parameters[name]
        counts[number] = counts.get(number, 0) + 1
        held[number] = held.get(number, 0.0) + (0 if "tied_to" in row else row.get("local_bytes") or 0)
    return {
        "pictures": pictures,
        "users": html_tree.users(solution, of),
        "held": held,
        "counts": counts,
        "tree": html_tree.tree(solution, of, ops),
        "num_ops": len(ops),
        "too_many_ops": len(html_tree.ops_once(ops)[0]) > html_tree.MANY_OPS,
        "elsewhere": seconds_elsewhere(solution.parameters, solution.breakdown.get("blocks", {})),
    }


def _over_time(solution: Solution, timeline: Timeline | None) -> dict[str, Any]:
    if timeline is None:
        return {"timeline": None, "chart": None, "memory": None}
    limit, _ = html_parts.memory_limit(solution)
    return {"timeline": timeline, "chart": html_charts.timeline_chart(timeline), "memory": html_charts.memory_chart(timeline, limit)}


def _frontier(solution: Solution, frontier: Mapping | None) -> dict[str, Any]:
    if frontier is None:
        return {"points": None, "frontier_chart": None, "frontier_of": ""}
    points = html_frontier.frontier_points(frontier)
    points.sort(key=lambda p: (p["memory_bytes"] is None, p["memory_bytes"]))
    chart = html_charts.frontier_chart(points, (solution.peak_bytes, solution.cost))
    return {"points": points, "frontier_chart": chart, "frontier_of": html_frontier.written_for(frontier)}


@lru_cache(maxsize=1)
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(seconds=numbers.seconds, size=numbers.size, exact=html_frontier.exact, exact_size=html_frontier.exact_size)
    environment.filters.update(words=lambda text: str(text).replace("_", " "), count=_count)
    return environment


def _count(value: int, noun: str) -> str:
    """`1 parameter`, `148 parameters`."""
    return f"{value:,} {noun}{'' if value == 1 else 's'}"


def _source(name: str) -> str:
    environment = _environment()
    assert environment.loader is not None
    return environment.loader.get_source(environment, name)[0]
