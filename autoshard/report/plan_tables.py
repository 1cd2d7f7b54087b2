"""What is said of one plan in its report as well as on its page: tables, and the words beside them."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from autoshard.mesh import Axis, Mesh, shape_text
from autoshard.report.blocks import seconds_elsewhere, sections
from autoshard.report.proof import usual_verdict
from autoshard.report.values import Code, ReportTable, TableRow, numbers, share
from autoshard.solution import Solution, flat, parts, price_errors
from autoshard.units import seconds, size

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "split")


def usual(solution: Solution) -> list[dict]:
    """The usual plans at the same prices, fastest first. ratio: of what the objective counts of them to that of this plan, None where one
    is not known."""
    rows, ours = [], solution.objective_seconds
    for name, row in solution.baselines.items():
        cost, over = row.get("cost_seconds"), row.get("fits") is False
        cost = cost if cost is not None and math.isfinite(cost) else None
        counts = row.get("step_seconds") if solution.overlapped and cost is not None else cost
        ratio = counts / ours if counts is not None and 0 < ours < math.inf else None
        status = "over the memory limit" if over else usual_verdict(row)
        known = {"name": name, "seconds": cost, "ratio": ratio, "fits": not over and cost is not None, "status": status}
        rows.append({**{key: row.get(key) for key in ("step_seconds", "peak_bytes")}, **known, "matched": str(row.get("matched") or "")})
    return sorted(rows, key=lambda row: math.inf if row["ratio"] is None else row["ratio"])


def usual_table(solution: Solution) -> ReportTable | None:
    """This plan, and the usual ones beside it; None where none was made."""
    rows = usual(solution)
    if not rows:
        return None
    slowest = max([row["ratio"] or 0.0 for row in rows] + [1.0])
    ours = (seconds(solution.cost), seconds(solution.step_seconds), "1.00x", size(solution.peak_bytes), solution.verdict)
    listed = [TableRow(("ours", *ours), strong=True, kind="ours", share=100 / slowest if solution.cost < math.inf else None)]
    for row in rows:
        ratio = "-" if row["ratio"] is None else f"{row['ratio']:.2f}x"
        cells = (row["name"], seconds(row["seconds"]), seconds(row["step_seconds"]), ratio, size(row["peak_bytes"]), row["status"])
        listed.append(TableRow(cells, note=row["matched"], kind="usual", share=100 * (row["ratio"] or 0) / slowest))
    columns = ("plan", *numbers("cost", "step", "to ours", "peak memory"), "status")
    title = f"Beside the usual plans (step: with overlap; to ours: of the {'step' if solution.overlapped else 'cost'})"
    return ReportTable(title, columns, listed, notes="how far it applies")


def time_table(solution: Solution) -> ReportTable | None:
    """Seconds by class of compute and by collective and axis, largest first; None where the plan does not say."""
    groups = {name: [row for row in flat(solution.breakdown.get(name, {})) if row[1] > 0] for name in ("compute", "communication")}
    total = math.fsum(value for group in groups.values() for _, value in group)
    rows = []
    for name, group in groups.items():
        if group:
            subtotal = math.fsum(value for _, value in group)
            rows.append(TableRow((name, "", seconds(subtotal), share(subtotal, total)), strong=True))
        for what, value in sorted(group, key=lambda row: -row[1]):
            first = what.partition(" ")[0]
            kind = name if name == "compute" else first if first in COLLECTIVES else "other"
            rows.append(TableRow(("", what, seconds(value), share(value, total)), kind=kind, share=100 * value / total))
    return ReportTable("Where the time goes", ("", "what", *numbers("time", "share")), rows) if rows else None


def parameters_table(solution: Solution) -> ReportTable | None:
    """The layout of each parameter; blocks of equal layouts are shown once."""
    if not solution.parameters:
        return None
    of_blocks, rows = solution.breakdown.get("blocks", {}), []
    for section in sections(solution.parameters, of_blocks):
        if section.title:
            title = section.title + (", each" if len(section.blocks) > 1 else "")
            time = "" if section.seconds is None else seconds(section.seconds)
            rows.append(TableRow((title, "", "", size(section.local_bytes), time), strong=True))
        for name, row in section.rows.items():
            shape = shape_text(row.get("shape", ())) or "scalar"
            tied = f", is {row['tied_to']}" if "tied_to" in row else ""
            step = "".join(f", {kind} {row[kind]}" for kind in ("kept", "accumulated") if row.get(kind, row["layout"]) != row["layout"])
            time = seconds(section.row_seconds[name]) if name in section.row_seconds else ""
            cells = (row["layout"], f"{shape} {row.get('dtype', '')}{tied}{step}", size(row.get("local_bytes")), time)
            rows.append(TableRow((("  " if section.title else "") + name, *cells)))
    if elsewhere := seconds_elsewhere(solution.parameters, of_blocks):
        rows.append(TableRow(("where no parameters are", "", "", "", seconds(elsewhere)), strong=True))
    title = f"Parameters (layout: one placement per axis: {', '.join(solution.mesh.axis_names)})"
    return ReportTable(title, ("parameter", Code("layout"), "shape", *numbers("per device", "time")), rows)


def replicated_table(solution: Solution) -> ReportTable | None:
    """Ops without rules: replicated, with the seconds that this may hide; None where there are none."""
    rows = [
        (str(row.get("target")), str(row.get("count", "")), seconds(row.get("seconds")), size(row.get("bytes")))
        for row in solution.replicated_ops
    ]
    columns = ("op", *numbers("count", "time", "bytes"))
    return ReportTable("Replicated for want of rules", columns, rows, alarm=True) if rows else None


def price_parts(solution: Solution) -> list[dict]:
    """Plain rows: what, seconds, error (relative), measured (or the error usual for prices of its kind)."""
    return parts(solution.breakdown, solution.prices or price_errors(solution.mesh))


def prices_table(solution: Solution) -> ReportTable:
    """What the predicted seconds are made of, and how far each price may be off."""
    rows = sorted(price_parts(solution), key=lambda row: -row["seconds"])
    total = math.fsum(row["seconds"] for row in rows)
    cells = []
    for row in rows:
        known = "measured, on sizes not fitted to" if row["measured"] else "usual where nothing was measured"
        cells.append((row["what"], seconds(row["seconds"]), share(row["seconds"], total), f"{100 * row['error']:.0f}%", known))
    return ReportTable("Prices", ("what", *numbers("time", "share", "error"), "known from"), cells)


def interval_words(solution: Solution, otherwise: str = "as far as the prices are known") -> str:
    """Between which seconds, and what that means; `otherwise` where no training steps have tested the prices. "" where it is not known."""
    if solution.interval is None:
        return ""
    sure = "as 80 % of published training steps were" if "steps" in solution.prices else otherwise
    return f"between {seconds(solution.interval[0])} and {seconds(solution.interval[1])}, {sure}"


def prices_known_from(solution: Solution) -> str:
    """Which constants the device has, and how far off they were on steps that they were not fitted to."""
    device, steps = solution.mesh.device, solution.prices.get("steps")
    if device.kernels is None:
        return "measured ops" if device.error is not None else "data sheets, of which ops are assumed to reach one share"
    return f"{device.kernels.source}; {tested_on(steps) if steps else 'not tested on training steps'}"


def tested_on(steps: Mapping) -> str:
    """How far off prices were: a mesh.TestedSteps as plain data."""
    told = f"{steps['runs']} steps on {steps['devices']} that they were not fitted to"
    return f"{told} were {100 * steps['error']:.0f} % off in the median"


def peak_place(solution: Solution) -> str:
    """`in the backward pass at mm of h.0`; "" where the plan doesn't say."""
    if not solution.peak:
        return ""
    of = f" of {solution.peak['module']}" if solution.peak.get("module") else ""
    return f"in the {'backward' if solution.peak.get('backward') else 'forward'} pass at {solution.peak.get('op')}{of}"


def memory_limit(solution: Solution) -> tuple[float, str]:
    """Bytes of a device that may be used, and whose number that is."""
    asked = solution.memory_limit
    if isinstance(asked, (int, float)) and asked > 0:
        return float(asked), "the limit of"
    return solution.mesh.device.memory, "its"


def memory_use(peak: float, solution: Solution) -> dict[str, Any]:
    """For a page: the limit in bytes, whose it is, and how much of it is used in percent (None where the plan does not say)."""
    limit, whose = memory_limit(solution)
    used = min(100 * peak / limit, 100.0) if peak < 1000 * limit else None
    return {"limit": limit, "whose_limit": whose, "used": used, "used_words": share(peak, limit)}


def offers(solution: Solution) -> list[str]:
    """What padding a parameter would save."""
    said = []
    for row in solution.padding:
        where = ("rows", "columns")[row["dim"]] if row.get("dim") in (0, 1) else f"dim {row.get('dim')}"
        saves = seconds(row["saves_seconds"]) if row.get("saves_seconds") else "nothing"
        said.append(f"padding {row.get('parameter')} {where} {row.get('from')} -> {row.get('to')} would save {saves}")
    return said


def assumed(solution: Solution, elsewhere: Sequence[str]) -> dict[str, str]:
    """Options and versions in words, but for those told elsewhere and those that say nothing."""
    nothing: tuple = (None, {}, [], False, "")
    known = {key: value for key, value in solution.assumptions.items() if key not in elsewhere and value not in nothing}
    return {key: str(solution.dynamic_shapes) if key == "dynamic_shapes" else _words(value, key) for key, value in known.items()}


def _words(value: object, key: str) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name} {_words(item, str(name))}" for name, item in value.items()) + "}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "[" + ", ".join(_words(item, key) for item in value) + "]"
    if isinstance(value, (int, float)) and not isinstance(value, bool) and ("memory" in key or "bytes" in key or "bandwidth" in key):
        return size(value) + ("/s" if "bandwidth" in key else "")
    return f"{value:g}" if isinstance(value, float) else str(value)


def link_text(axis: Axis) -> str:
    """`400 GB/s shared by 4`."""
    shared = axis.link_dict()["shared_by"]
    return f"{size(axis.bandwidth)}/s" + (f" shared by {shared}" if shared > 1 else "")


def mesh_line(mesh: Mesh) -> str:
    """The device and the links that times are computed from: `2x4 of h100; axis0 x2 400 GB/s shared by 4, 15 us; ...`."""
    tf32 = ", float32 matmuls as TF32" if mesh.device.tf32 else ""
    return "; ".join([f"{shape_text(mesh.shape)} of {mesh.device.name}{tf32}", *map(axis_line, mesh.axes)])


def axis_line(axis: Axis) -> str:
    """An axis and its link: `axis0 x2 400 GB/s shared by 4, 15 us`."""
    backend = f", {axis.backend}" if axis.backend != "nccl" else ""
    return f"{axis.name} x{axis.size} {link_text(axis)}, {seconds(axis.link_dict()['latency'])}{backend}"
