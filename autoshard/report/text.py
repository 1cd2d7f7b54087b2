"""A plan as tables of text: its cost and proof, the usual plans, where the time goes, and the layout of each parameter."""

from __future__ import annotations

import io
import math
import re
from collections import Counter
from collections.abc import Mapping

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from autoshard.graph import Chosen
from autoshard.mesh import Axis
from autoshard.report.blocks import Section, seconds_elsewhere, sections
from autoshard.report.proof import overlapped_words, proof, usual_verdict, verdict
from autoshard.solution import Solution
from autoshard.units import percent, seconds, size

WIDTH = 100  # columns
FEW = 5  # placement mismatches listed

# assumptions that other parts of the report hold
SAID_ELSEWHERE = (
    "axes", "device", "training", "solver", "gap", "padding", "keep", "pin_prices", "microbatches", "objective", "recomputed", "offloaded",
    "saved",
)  # fmt: skip


def as_text(renderable: RenderableType, width: int = WIDTH) -> str:
    """The renderable as plain text of at most `width` columns."""
    console = Console(file=io.StringIO(), width=width, color_system=None, legacy_windows=False, markup=False, emoji=False)
    console.print(renderable)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines()) + "\n"  # type: ignore[attr-defined]


def plan_report(solution: Solution) -> RenderableType:
    """The full report of a plan."""
    parts = [header(solution), baselines(solution), where_time_goes(solution), layouts(solution), replicated(solution)]
    shown = [part for part in parts if part is not None]
    return Group(*(item for part in shown for item in (part, Text(""))))


def header(solution: Solution) -> RenderableType:
    """Status, cost, bound, memory, mesh and assumptions."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("plan", f"{verdict(solution)}: {proof(solution)}")
    of = f"{solution.microbatches} microbatches of forward and backward" if solution.microbatches > 1 else "forward, backward"
    what = f"step ({of}, optimizer)" if solution.training else "forward pass"
    if solution.overlapped:
        table.add_row("overlapped", f"{seconds(solution.objective_seconds)} per {what}; {overlapped_words(solution)}")
    alone = ", one task after the other" if solution.overlapped else ""
    table.add_row("cost", f"{seconds(solution.cost)} per {what}{alone}; no plan takes less than {seconds(solution.bound)}{alone and ' so'}")
    if solution.interval is not None:
        table.add_row("", _interval(solution))
    table.add_row("prices", prices_known_from(solution))
    table.add_row("memory", _memory(solution))
    if solution.chosen:
        table.add_row("saved", _saved(solution.chosen))
    devices = f"{'x'.join(map(str, solution.mesh.shape))} of {solution.mesh.device.name}{_tf32(solution)}"
    table.add_row("mesh", "; ".join([devices, *map(axis_line, solution.mesh.axes)]))
    assumed = {
        key: value for key, value in solution.assumptions.items() if key not in SAID_ELSEWHERE and value not in (None, {}, [], False, "")
    }
    if assumed:
        table.add_row("assumed", ", ".join(f"{key} {_words(value, key)}" for key, value in assumed.items()))
    table.add_row("solved", _solved(solution))
    for offer in solution.padding:
        table.add_row("offer", _padding(offer))
    return table


def _padding(offer: Mapping) -> str:
    where = {0: "rows", 1: "columns"}.get(offer["dim"], f"dim {offer['dim']}")
    saved = offer["saves_seconds"]
    saves = f"would save {seconds(saved)}" if saved else "would save nothing"
    return f"padding {offer['parameter']} {where} {offer['from']} -> {offer['to']} {saves}"


def _interval(solution: Solution) -> str:
    low, high = solution.interval or (math.nan, math.nan)
    return f"between {seconds(low)} and {seconds(high)}, {sure(solution)}"


def sure(solution: Solution, otherwise: str = "as far as the prices are known") -> str:
    """What the interval of a plan's seconds means; `otherwise` where no training steps have tested the prices."""
    return "as 80 % of published training steps were" if "steps" in solution.prices else otherwise


def prices_known_from(solution: Solution) -> str:
    """Which constants the device has, and how far off they were on steps that they were not fitted to."""
    device, steps = solution.mesh.device, solution.prices.get("steps")
    if device.kernels is None:
        return "measured ops" if device.error is not None else "data sheets, of which ops are assumed to reach one share"
    if not steps:
        return f"{device.kernels.source}; not tested on training steps"
    return f"{device.kernels.source}; {tested_on(steps)}"


def tested_on(steps: Mapping) -> str:
    """How far off prices were: a mesh.TestedSteps as plain data."""
    told = f"{steps['runs']} steps on {steps['devices']} that they were not fitted to"
    return f"{told} were {100 * steps['error']:.0f} % off in the median"


def _memory(solution: Solution) -> str:
    """The peak, when it is, and what is in it."""
    peak = f"{size(solution.peak_bytes)} per device at the peak"
    if not solution.peak:
        return peak
    where = f"{solution.peak.get('op')}" + (f" of {solution.peak['module']}" if solution.peak.get("module") else "")
    parts = ", ".join(f"{kind.replace('_', ' ')} {size(held)}" for kind, held in dict(solution.peak.get("parts", {})).items())
    return f"{peak}, in the {'backward' if solution.peak.get('backward') else 'forward'} pass at {where}: {parts}"


def _saved(chosen: Chosen) -> str:
    """Which of the forward's values the backward pass does not find on the device: how often each op, views last."""
    ways = {"recomputed": chosen.recomputed, "offloaded": [name.rpartition(".")[0] for name in chosen.offloaded]}
    said = []
    for way, names in ways.items():
        counts = Counter(re.sub(r"_\d+$", "", name) for name in names)
        said += [f"{way} in the backward pass: " + ", ".join(f"{n} x {op}" for op, n in sorted(counts.items()))] if counts else []
    exposed = max((one.exposed for one in chosen.offloaded.values()), default=0.0)
    return "; ".join(said) + (f"; {percent(exposed, 1.0)} of the copies to and from the host are waited for" if chosen.offloaded else "")


def _tf32(solution: Solution) -> str:
    return ", float32 matmuls as TF32" if solution.mesh.device.tf32 else ""


def axis_line(axis: Axis) -> str:
    """An axis and its link: `axis0 x2 400 GB/s shared by 4, 15 us`."""
    link = axis.link_dict()
    shared = f" shared by {link['shared_by']}" if link["shared_by"] > 1 else ""
    backend = f", {axis.backend}" if axis.backend != "nccl" else ""
    return f"{axis.name} x{axis.size} {size(axis.bandwidth)}/s{shared}, {seconds(link['latency'])}{backend}"


def _words(value: object, key: str) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name} {_words(item, name)}" for name, item in value.items()) + "}"
    if isinstance(value, float) and ("memory" in key or "bytes" in key or "bandwidth" in key):
        return size(value) + ("/s" if "bandwidth" in key else "")
    return f"{value:g}" if isinstance(value, float) else str(value)


def _solved(solution: Solution) -> str:
    sizes = ", ".join(f"{solution.counts[key]} {key.replace('_', ' ')}" for key in ("nodes", "choices", "edges") if key in solution.counts)
    total = solution.seconds.get("cpu", {}).get("total")
    return (
        f"by {solution.solver or 'nobody'}"
        + (f" ({sizes})" if sizes else "")
        + (f" in {seconds(total)} of CPU" if total is not None else "")
    )


def baselines(solution: Solution) -> Table | None:
    """The usual plans at the same prices."""
    if not solution.baselines:
        return None
    table = Table(title="Beside the usual plans", title_justify="left", title_style="bold")
    for column in ("plan", "cost", "to ours", "peak memory", "status", "how far it applies"):
        table.add_column(column, justify="right" if column in ("cost", "to ours", "peak memory") else "left", overflow="fold")
    table.add_row("ours", seconds(solution.cost), "1.00x", size(solution.peak_bytes), solution.verdict, "", style="bold")
    for name, row in solution.baselines.items():
        cost = row.get("cost_seconds")
        ratio = f"{cost / solution.cost:.2f}x" if cost is not None and 0 < solution.cost < float("inf") else "-"
        status = "over the memory limit" if row.get("fits") is False else usual_verdict(row)
        cells = (name, seconds(cost), ratio, size(row.get("peak_bytes")), status, str(row.get("matched") or ""))
        table.add_row(*cells)
    return table


def where_time_goes(solution: Solution) -> Table | None:
    """Seconds by class of compute and by collective and axis, largest first."""
    rows = [(kind, *row) for kind in ("compute", "communication") for row in flat(solution.breakdown.get(kind, {}))]
    rows = [row for row in rows if row[2] > 0]
    if not rows:
        return None
    total = sum(row[2] for row in rows)
    table = Table(title="Where the time goes", title_justify="left", title_style="bold")
    for column in ("", "what", "time", "share"):
        table.add_column(column, justify="right" if column in ("time", "share") else "left", overflow="fold")
    for kind in ("compute", "communication"):
        own = sorted((row for row in rows if row[0] == kind), key=lambda row: -row[2])
        if own:
            subtotal = sum(row[2] for row in own)
            table.add_row(kind, "", seconds(subtotal), percent(subtotal, total), style="bold")
        for _, what, value in own:
            table.add_row("", what, seconds(value), percent(value, total))
    return table


def flat(tree: object, path: str = "") -> list[tuple[str, float]]:
    """`{"all_reduce": {"axis0": 1.0}}` -> [("all_reduce axis0", 1.0)]."""
    if isinstance(tree, Mapping):
        return [row for key, item in tree.items() for row in flat(item, f"{path} {key}".strip())]
    return [(path or "all", float(tree))] if isinstance(tree, (int, float)) else []


def layouts(solution: Solution) -> Table | None:
    """The layout of each parameter; blocks of equal layouts are shown once."""
    if not solution.parameters:
        return None
    axes = ", ".join(solution.mesh.axis_names)
    table = Table(title=f"Parameters (layout: one placement per axis: {axes})", title_justify="left", title_style="bold")
    table.add_column("parameter", overflow="fold")
    table.add_column("layout", no_wrap=True)
    table.add_column("shape", overflow="fold")
    table.add_column("per device", justify="right", no_wrap=True)
    table.add_column("time", justify="right", no_wrap=True)
    for section in sections(solution.parameters, solution.breakdown.get("blocks", {})):
        _add_section(table, section)
    elsewhere = seconds_elsewhere(solution.parameters, solution.breakdown.get("blocks", {}))
    if elsewhere:
        table.add_row("where no parameters are", "", "", "", seconds(elsewhere), style="bold")
    return table


def _add_section(table: Table, section: Section) -> None:
    if section.title:
        title = section.title + (", each" if section.num_blocks > 1 else "")
        time = seconds(section.seconds) if section.seconds is not None else ""
        table.add_row(title, "", "", size(section.local_bytes), time, style="bold")
    for name, row in section.rows.items():
        indent = "  " if section.title else ""
        shape = "x".join(map(str, row.get("shape", ()))) or "scalar"
        tied = f", is {row['tied_to']}" if "tied_to" in row else ""
        time = seconds(section.row_seconds[name]) if name in section.row_seconds else ""
        step = "".join(f", {kind} {row[kind]}" for kind in ("kept", "accumulated") if row.get(kind, row["layout"]) != row["layout"])
        cells = (indent + name, row["layout"], f"{shape} {row.get('dtype', '')}{tied}{step}", size(row.get("local_bytes")), time)
        table.add_row(*cells)


def replicated(solution: Solution) -> RenderableType | None:
    """Ops without rules: replicated, with the seconds that this may hide."""
    if not solution.replicated_ops:
        return None
    table = Table(title="Replicated for want of rules", title_justify="left", title_style="bold red")
    for column in ("op", "count", "time", "bytes"):
        table.add_column(column, justify="left" if column == "op" else "right", overflow="fold")
    for row in solution.replicated_ops:
        table.add_row(str(row.get("target")), str(row.get("count", "")), seconds(row.get("seconds")), size(row.get("bytes")))
    return table


def verify_report(report: Mapping) -> RenderableType:
    """What a check on simulated ranks found, plan by plan; "plan" is the solution's own, the others are drawn at random."""
    table = Table(
        title=f"{'ok' if report['ok'] else 'NOT OK'}, on {report['ranks']} simulated ranks", title_justify="left", title_style="bold"
    )
    for column in ("layouts", "worst error, outputs", "worst error, gradients", "placement mismatches", "redistributes"):
        table.add_column(column, justify="left" if column == "layouts" else "right")
    for row in report["plans"]:
        drawn = "plan" if row.get("seed") is None else f"random, seed {row['seed']}"
        numbers = [row.get(f"max_relative_error_{what}") for what in ("outputs", "gradients")]
        shown = ["-" if value is None else f"{value:.1e}" if value else "0" for value in numbers]
        mismatches = row["placement_mismatches"]
        table.add_row(drawn, *shown, str(len(mismatches)), str(row.get("redistributes", "")))
    said = [line for row in report["plans"] for line in map(_mismatch, row["placement_mismatches"][:FEW])]
    return Group(table, *(Text(line) for line in said[:FEW]))


def _mismatch(row: Mapping) -> str:
    return f"{row.get('op')}, output {row.get('output')}: planned {row.get('planned')}, found {row.get('found')}"
