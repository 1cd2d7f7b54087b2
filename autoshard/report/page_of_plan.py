"""What the page of one plan shows: the values that templates/plan.html.j2 puts in place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from autoshard.mesh import shape_text
from autoshard.reading import checked
from autoshard.report import plan_tables
from autoshard.report.blocks import seconds_elsewhere
from autoshard.report.charts import frontier_chart, memory_chart, timeline_chart
from autoshard.report.frontier import points_table
from autoshard.report.layout_pictures import pictures, users
from autoshard.report.module_tree import MANY_OPS, op_rows, ops_once, tree
from autoshard.report.proof import plan_card
from autoshard.report.step_tables import hidden_table, saved_rows, saved_table
from autoshard.report.timeline import critical_table
from autoshard.report.values import ReportTable, by_kind, numbers
from autoshard.solution import Solution
from autoshard.units import seconds, size

if TYPE_CHECKING:
    from autoshard.simulate import Timeline

# id: heading, in the order of the page
SECTIONS = {
    "summary": "The plan", "baselines": "Beside the usual plans", "time": "Where the time goes", "memory": "Memory",
    "layouts": "Layouts on the mesh", "model": "The model", "timeline": "Time line", "frontier": "Frontier",
    "unknown": "What was not understood", "prices": "How sure the prices are", "made": "How it was made",
}  # fmt: skip
ELSEWHERE = ("axes", "device", "training", "model", "set", "padding", "computed_again")  # assumptions that other places of the page hold


def title(solution: Solution) -> str:
    """`models/gpt2.py:small on 2x4 h100`."""
    return f"{solution.model or 'A plan'} on {shape_text(solution.mesh.shape)} {solution.mesh.device.name}"


def content(solution: Solution, timeline: Timeline | None, frontier: Mapping | None) -> dict[str, Any]:
    """Numbers, words, tables and charts by name. ValueError where `frontier` is no record of a frontier."""
    s = solution
    settings = s.model_settings
    of = f"{s.microbatches} microbatches of forward and backward" if s.microbatches > 1 else "forward, backward"
    what = f"One training step: {of}, optimizer" if s.training else "One forward pass"
    given = ", ".join(f"{key}={value}" for key, value in settings.items()) if isinstance(settings, Mapping) else ""
    return {
        "solution": s,
        "timeline": timeline,
        "title": title(s),
        "sub": "; ".join(filter(None, [what, given])),
        "fingerprint": str(s.fingerprint.get("graph") or "")[:16],
        "per": "step" if s.training else "forward pass",
        "time_words": _time_words(s, timeline),
        "verdict": plan_card(s),
        **plan_tables.memory_use(s.peak_bytes, s),
        "best_usual": next((row for row in plan_tables.usual(s) if row["fits"] and row["ratio"] is not None), None),
        "offers": plan_tables.offers(s),
        "usual": plan_tables.usual_table(s),
        "time": plan_tables.time_table(s),
        "replicated": plan_tables.replicated_table(s),
        "prices": plan_tables.prices_table(s),
        "interval": _interval(s),
        "prices_known_from": plan_tables.prices_known_from(s),
        "links": _links(s),
        "options": _options(s),
        **_memory(s, timeline),
        **_shards(s, timeline),
        "chart": None if timeline is None else timeline_chart(timeline),
        "hidden": None if timeline is None else hidden_table(timeline),
        "critical": None if timeline is None else critical_table(timeline.critical_seconds),
        **({"points": None} if frontier is None else _frontier(s, frontier)),
    }


def _interval(solution: Solution) -> str:
    return plan_tables.interval_words(solution, "if every price is off by its usual error, all in one direction")


def _time_words(s: Solution, timeline: Timeline | None) -> str:
    overlap = f"; {seconds(timeline.seconds)} with what overlap hides taken off" if timeline is not None else ""
    if s.overlapped:
        overlap = f" with overlap; {seconds(s.cost)} one task after the other"
    return overlap + (f"; {_interval(s)}" if s.interval is not None else "")


def _memory(s: Solution, timeline: Timeline | None) -> dict[str, Any]:
    """The chart, and what is in its peak, or in that of the plan's own account."""
    chart = None if timeline is None else memory_chart(timeline, plan_tables.memory_limit(s)[0])
    own = s.peak.get("parts")
    own = own if isinstance(own, Mapping) else {}
    parts = {part["kind"]: part["bytes"] for part in chart["parts"]} if chart else own
    parts = dict(sorted(parts.items(), key=lambda item: -item[1]))  # the largest first
    saved = saved_rows(s, timeline)
    largest = [(str(row["name"]), size(row["bytes"])) for row in s.peak.get("largest") or ()]
    return {
        "memory": chart,
        "held": by_kind("In that peak" if chart else "In the peak", "bytes", parts, size) if parts else None,
        "peak_place": plan_tables.peak_place(s) if own else "",
        "largest": ReportTable("The largest tensors then", ("tensor", *numbers("bytes")), largest),
        "saved": saved_table(saved, has_bytes=timeline is not None),
        "kept": [row for row in saved if row["way"] == "kept"],
    }


def _shards(s: Solution, timeline: Timeline | None) -> dict[str, Any]:
    drawn, number_of = pictures(s)
    ops = op_rows(s, timeline) if timeline is not None else []
    return {
        "pictures": drawn,
        "users": users(s, number_of),
        "tree": tree(s, number_of, ops),
        "num_ops": len(ops),
        "too_many_ops": len(ops_once(ops)[0]) > MANY_OPS,
        "elsewhere": seconds_elsewhere(s.parameters, s.breakdown.get("blocks", {})),
    }


def _frontier(s: Solution, frontier: Mapping) -> dict[str, Any]:
    points = sorted(checked(frontier, "the frontier", "frontier")["points"], key=lambda p: p["memory_bytes"])
    chart, of = frontier_chart(points, (s.peak_bytes, s.cost)), f"{frontier['model']} on {shape_text(frontier['mesh'])}"
    return {"points": points_table(points), "frontier_chart": chart, "frontier_of": of.lstrip()}


def _links(s: Solution) -> ReportTable:
    rows = []
    for axis in s.mesh.axes:
        prices = f"measured: {', '.join(curve.collective for curve in axis.curves)}" if axis.curves else "data sheet"
        backend = f", {axis.backend}" if axis.backend != "nccl" else ""
        latency = seconds(axis.link_dict()["latency"])
        rows.append((axis.name, str(axis.size), plan_tables.link_text(axis), latency, prices + backend))
    return ReportTable("Mesh axes, slowest first", ("axis", *numbers("devices", "link", "latency"), "prices"), rows)


def _options(s: Solution) -> ReportTable:
    """Options, versions and sizes in words; those that say nothing are left out."""
    rows: list[Sequence[str]] = [(key.replace("_", " "), words) for key, words in plan_tables.assumed(s, ELSEWHERE).items()]
    counts = ", ".join(f"{value} {key.replace('_', ' ')}" for key, value in s.counts.items() if value is not None)
    rows += [("problem", counts)] if counts else []
    total = s.seconds.get("cpu", {}).get("total")
    rows += [("CPU time of planning", seconds(total))] if total is not None else []
    rows += [(f"fingerprint of the {key}", value[:16]) for key, value in s.fingerprint.items()]
    return ReportTable("Options and versions", ("what", "value"), rows)
