"""The tables of the HTML report as plain rows: summary, usual plans, seconds, memory, prices, options."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from autoshard.report.robustness import price_parts
from autoshard.report.text import flat, prices_known_from, sure
from autoshard.solution import ROUNDING, Solution
from autoshard.units import seconds, size

if TYPE_CHECKING:
    from autoshard.simulate import Timeline

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "split")
SAID_ELSEWHERE = ("axes", "device", "training", "model", "set", "padding")  # assumptions that other places of the report hold


def title(solution: Solution) -> str:
    """`models/gpt2.py:small on 2x4 h100`."""
    return f"{solution.model or 'A plan'} on {shape_of(solution)} {solution.mesh.device.name}"


def shape_of(solution: Solution) -> str:
    return "x".join(map(str, solution.mesh.shape))


def settings(solution: Solution) -> str:
    """`batch=512, vocab=50304`."""
    given = solution.model_settings
    return ", ".join(f"{key}={value}" for key, value in given.items()) if isinstance(given, Mapping) else ""


def verdict(solution: Solution) -> dict:
    """What is proven, in two lengths; `mood` is good, open or none."""
    if solution.status == "unjudged" or not math.isfinite(solution.cost):
        return {"mood": "none", "short": "not judged", "long": "Layouts only: nothing is known about their cost."}
    gap, bound = solution.objective_gap, solution.objective_bound
    over = " with overlap" if solution.overlapped else ""
    if solution.status == "optimal" and gap <= ROUNDING:
        return {"mood": "good", "short": "proven best", "long": f"No plan is faster{over} under these prices: the bound equals the cost."}
    if solution.status == "optimal":
        long = f"No plan takes less than {seconds(bound)}{over}, which is within the gap that was asked for."
        return {"mood": "good", "short": f"within {100 * gap:.2g}% of the best", "long": long}
    known = f"no plan takes less than {seconds(bound)}{over}" if math.isfinite(gap) else "no bound is known"
    short = f"at most {100 * gap:.2g}% from the best" if math.isfinite(gap) else "no bound"
    long = f"The best found; {known}." if over else f"The best found in the time given; {known}. A longer time limit may find a better one."
    return {"mood": "open", "short": short, "long": long}


def best_usual(solution: Solution) -> dict | None:
    """The fastest of the usual plans that fits, with the ratio of its seconds to this plan's."""
    rows = [row for row in usual(solution) if row["ratio"] is not None and row["fits"]]
    return min(rows, key=lambda row: row["ratio"]) if rows else None


def usual(solution: Solution) -> list[dict]:
    """This plan first, then the usual plans at the same prices, fastest first; `share` of the slowest, for a bar."""
    ours = {"cost_seconds": solution.cost, "peak_bytes": solution.peak_bytes, "status": solution.status}
    rows: list[dict] = []
    for name, row in {"this plan": ours, **solution.baselines}.items():
        cost = row.get("cost_seconds")
        cost = cost if cost is not None and math.isfinite(cost) else None
        known = cost is not None and 0 < solution.cost < math.inf and name != "this plan"
        fits = row.get("fits") is not False and cost is not None
        status = "over the memory limit" if row.get("fits") is False else str(row.get("status", ""))
        peak = row.get("peak_bytes")
        rows.append(
            {
                "name": name, "seconds": cost, "ratio": cost / solution.cost if known and cost is not None else None, "fits": fits,
                "peak_bytes": peak if peak is not None and math.isfinite(peak) else None, "status": status,
                "matched": str(row.get("matched") or ""), "ours": name == "this plan",
            }  # fmt: skip
        )
    slowest = max((row["seconds"] or 0 for row in rows), default=0)
    rows[1:] = sorted(rows[1:], key=lambda row: math.inf if row["seconds"] is None else row["seconds"])
    return [{**row, "share": 100 * (row["seconds"] or 0) / slowest if slowest else 0} for row in rows]


def time_rows(solution: Solution) -> list[dict]:
    """Compute by class of op, communication by collective and axis: {name, seconds, share, rows [{what, kind, seconds, share}]}."""
    groups: list[dict] = []
    for name, caption in (("compute", "Compute, by class of op"), ("communication", "Communication, by collective and mesh axis")):
        spent = {what: value for what, value in flat(solution.breakdown.get(name, {})) if value > 0}
        rows = [{"what": what, "kind": _kind(name, what), "seconds": value} for what, value in spent.items()]
        groups.append({"name": name, "caption": caption, "seconds": math.fsum(spent.values()), "rows": rows})
    total = math.fsum(group["seconds"] for group in groups)
    for group in groups:
        group["share"] = 100 * group["seconds"] / total if total else 0.0
        group["rows"] = [{**row, "share": 100 * row["seconds"] / total} for row in sorted(group["rows"], key=lambda row: -row["seconds"])]
    return [group for group in groups if group["rows"]]


def _kind(group: str, what: str) -> str:
    """The name of the row's colour."""
    first = what.partition(" ")[0]
    return "compute" if group == "compute" else first if first in COLLECTIVES else "other"


def peak(solution: Solution) -> dict | None:
    """What the plan's own account holds at its peak: bytes, where, parts and largest tensors; None where the plan doesn't say."""
    parts = solution.peak.get("parts")
    if not isinstance(parts, Mapping) or not parts:
        return None
    return {
        "bytes": solution.peak_bytes,
        "op": solution.peak.get("op"),
        "module": solution.peak.get("module"),
        "backward": bool(solution.peak.get("backward")),
        "parts": [{"kind": kind, "bytes": held} for kind, held in parts.items()],
        "largest": list(solution.peak.get("largest") or ()),
    }


def memory_limit(solution: Solution) -> tuple[float, str]:
    """Bytes of a device that may be used, and whose number that is."""
    asked = solution.memory_limit
    if isinstance(asked, (int, float)) and asked > 0:
        return float(asked), "the limit of"
    return solution.mesh.device.memory, "its"


def price_rows(solution: Solution) -> list[dict]:
    """Parts of the seconds with the error of their price, largest first."""
    rows = sorted(price_parts(solution), key=lambda row: -row["seconds"])
    total = math.fsum(row["seconds"] for row in rows)
    return [{**row, "share": 100 * row["seconds"] / total} for row in rows if row["seconds"] > 0]


def interval_bar(solution: Solution) -> dict | None:
    """Low, cost and high, with their places on a bar from 0 in percent."""
    if solution.interval is None:
        return None
    low, high = solution.interval
    top = high * 1.1
    places = {name: round(100 * value / top, 2) for name, value in (("low", low), ("cost", solution.cost), ("high", high))}
    means = sure(solution, "if every price is off by its usual error, all in one direction")
    said = {"sure": means, "known_from": prices_known_from(solution)}
    return {"low": low, "high": high, "cost": solution.cost, "at": places, **said}


def link_rows(solution: Solution) -> list[dict]:
    return [
        {
            **axis.link_dict(), "bandwidth": f"{size(axis.bandwidth)}/s", "latency": seconds(axis.link_dict()["latency"]),
            "backend": axis.backend, "measured": [curve.collective for curve in axis.curves],
        }
        for axis in solution.mesh.axes
    ]  # fmt: skip


def assumption_rows(solution: Solution) -> list[tuple[str, str]]:
    """Options and versions in words; those that say nothing are left out."""
    nothing: tuple = (None, {}, [], False, "")
    known = {key: value for key, value in solution.assumptions.items() if key not in SAID_ELSEWHERE and value not in nothing}
    rows = [(key.replace("_", " "), _words(value, key)) for key, value in known.items()]
    counts = ", ".join(f"{solution.counts[key]} {key.replace('_', ' ')}" for key in solution.counts if solution.counts[key] is not None)
    rows += [("problem", counts)] if counts else []
    total = solution.seconds.get("cpu", {}).get("total")
    rows += [("CPU time of planning", seconds(total))] if total is not None else []
    return rows + [(f"fingerprint of the {key}", value[:16]) for key, value in solution.fingerprint.items()]


def _words(value: object, key: str) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_words(item, str(name))}" for name, item in value.items())
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(_words(item, key) for item in value)
    if isinstance(value, (int, float)) and not isinstance(value, bool) and ("memory" in key or "bytes" in key or "bandwidth" in key):
        return size(value) + ("/s" if "bandwidth" in key else "")
    return f"{value:g}" if isinstance(value, float) else str(value)


def offers(solution: Solution) -> list[str]:
    """What padding a parameter would save."""
    return [
        f"padding {row.get('parameter')}, dim {row.get('dim')}, from {row.get('from')} to {row.get('to')} would save "
        f"{seconds(row.get('saves_seconds')) if row.get('saves_seconds') else 'nothing'}"
        for row in solution.padding
        if isinstance(row, Mapping)
    ]


def op_rows(solution: Solution, timeline: Timeline) -> list[dict]:
    """Every op of the program that is no parameter, buffer or input: module, target, output layouts, its kernel's seconds."""
    kernel: dict[int, float] = {}
    for task in timeline.tasks:
        if task.kind == "compute":
            kernel[task.op] = kernel.get(task.op, 0.0) + task.seconds
    rows = []
    for i, op in enumerate(timeline.program.graph.ops):
        if not op.is_placeholder and op.name in solution.layouts:
            outputs = [layout for layout in solution.layouts[op.name].outputs if layout is not None]
            rows.append(
                {
                    "name": op.name, "module": op.module, "target": op.target.removeprefix("aten.").removesuffix(".default"),
                    "layout": " and ".join(dict.fromkeys(outputs)) or "no tensor", "seconds": kernel.get(i), "backward": op.backward,
                }  # fmt: skip
            )
    return rows
