"""A plan of several programs: what sharing costs each of them, and which parameters are copied. As a record, in a terminal, on a page."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import RenderableType

from autoshard.graph import grouped
from autoshard.mesh import shape_text
from autoshard.report.blocks import in_a_block, named
from autoshard.report.plan_tables import memory_use
from autoshard.report.proof import card, sentence
from autoshard.report.terminal import shown
from autoshard.report.values import Code, ReportTable, TableRow, numbers
from autoshard.solution import ROUNDING, ProgramsSolution
from autoshard.units import seconds, size

MOST_ROWS = 20  # of the table of copies, in a terminal


def programs_record(plan: ProgramsSolution) -> dict[str, Any]:
    """What `plan --json` and `show --json` print: seconds per unit, bytes per device."""
    layouts = {name: {key: row["layout"] for key, row in solution.parameters.items()} for name, solution in plan.programs.items()}
    return {
        **{key: getattr(plan, key) for key in ("status", "gap", "solver", "peak_bytes", "home", "devices", "switches")},
        "cost_seconds": plan.cost,
        "bound_seconds": plan.bound,
        "mesh": list(plan.mesh.shape),
        "programs": {row["name"]: {key: value for key, value in row.items() if key != "name"} for row in plan.rows()},
        "copies": list(plan.copies),
        "parameters": layouts,
        "cpu_seconds": plan.seconds.get("cpu", {}),
        "wall_seconds": plan.seconds.get("wall", {}),
    }


def programs_report(plan: ProgramsSolution) -> RenderableType:
    """The plan in a terminal."""
    gap = plan.gap if plan.gap > ROUNDING else 0.0
    head = f"{len(plan.programs)} programs on {shape_text(plan.mesh.shape)} {plan.mesh.device.name}: {seconds(plan.cost)} per unit"
    verdict = "proven" if plan.status == "optimal" and gap else plan.status
    proof = f"{verdict}, gap {gap:.2g}: {sentence(plan.status, gap)}"
    copies = alike_copies(plan)
    more = f"and {len(copies) - MOST_ROWS} more kinds (--json lists them)" if len(copies) > MOST_ROWS else None
    kept_twice = ["", copies_table(plan, copies[:MOST_ROWS]), more] if copies else ["no parameter is kept twice"]
    return shown(f"{head}, {size(plan.peak_bytes)} at the peak", proof, "", sharing_table(plan), *kept_twice)


def sharing_table(plan: ProgramsSolution) -> ReportTable:
    """What sharing costs each program; losses that are rounding are none. On a page the bar is the share of the time per unit."""
    rows = []
    for row in plan.rows():
        loss = row["loss"] if abs(row["loss"]) > ROUNDING else 0.0
        devices = len(plan.devices.get(row["name"], range(plan.mesh.num_devices)))
        copied = f"{row['copied']} of {len(plan[row['name']].parameters)}"
        times = (seconds(row["seconds"]), seconds(row["best_seconds"]), f"{loss:.2%}", copied, seconds(row["switch_seconds"]))
        cells = (row["name"], str(devices), f"{row['weight']:g}", *times, size(row["peak_bytes"]))
        width = 100 * row["weight"] * row["seconds"] / plan.cost if plan.cost else 0.0
        rows.append(TableRow(cells, tag="home" if row["name"] == plan.home else "", kind="ours", share=width))
    columns = ("program", *numbers("devices", "weight", "time", "alone", "loss", "copied", "a switch", "peak memory"))
    return ReportTable("What sharing costs each program", columns, rows)


def alike_copies(plan: ProgramsSolution) -> list[list[dict]]:
    """The parameters that are kept twice; equal ones of several blocks are together."""
    alike = grouped(((row["family"], in_a_block(row["parameter"]), row["from"], row["to"]), row) for row in plan.copies)
    return list(alike.values())


def copies_table(plan: ProgramsSolution, copies: Sequence[Sequence[Mapping]]) -> ReportTable:
    rows = []
    for alike in copies:
        first, name = alike[0], named([row["parameter"] for row in alike])
        spent, sent = (sum(row[key] for row in alike) for key in ("seconds", "bytes"))
        rows.append((first["family"], name, first["from"], first["to"], seconds(spent), size(sent)))
    columns = ("program", "parameter", Code("from"), Code("to"), *numbers("seconds", "bytes sent"))
    return ReportTable(f"Parameters kept twice: as {plan.home} has them, and as", columns, rows)


def layouts_table(plan: ProgramsSolution) -> ReportTable:
    """Parameters with their layout in each program, "-" where it lacks them. Equal ones of several blocks are one row."""
    of_each = [solution.parameters for solution in plan.programs.values()]
    names = dict.fromkeys(name for parameters in of_each for name in parameters)
    alike = grouped(((in_a_block(name), tuple(str(of.get(name, {}).get("layout", "-")) for of in of_each)), name) for name in names)
    rows = [(named(names), *layouts) for (_, layouts), names in alike.items()]
    return ReportTable("Layouts of parameters", ("parameter", *map(Code, plan)), rows)


# id: heading, in the order of the page
SECTIONS = {
    "summary": "The plan", "sharing": "What sharing costs each program", "copies": "Parameters kept twice",
    "layouts": "Layouts of parameters",
}  # fmt: skip


def content(plan: ProgramsSolution) -> dict[str, Any]:
    """What the page shows: the values that templates/programs.html.j2 puts in place."""
    return {
        "plan": plan,
        "title": f"{', '.join(plan)} on {shape_text(plan.mesh.shape)} {plan.mesh.device.name}",
        "sub": f"One set of weights; {plan.home} has the original parameters",
        "prices_of": "of each program's own page",
        "verdict": card(plan.status, plan.gap, sentence(plan.status, plan.gap)),
        **memory_use(plan.peak_bytes, plan[plan.home]),
        "sharing": sharing_table(plan),
        "copies": copies_table(plan, alike_copies(plan)),
        "layouts": layouts_table(plan),
    }
