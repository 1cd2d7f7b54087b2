"""A plan of several programs: what sharing costs each of them, and which parameters are copied. As a record and as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autoshard.report.blocks import split
from autoshard.report.proof import ROUNDING, sentence
from autoshard.solution import ProgramsSolution, changes
from autoshard.units import seconds, size

MOST_ROWS = 20  # of the table of copies


def programs_record(plan: ProgramsSolution) -> dict[str, Any]:
    """What `programs --json` prints: seconds per unit, bytes per device."""
    layouts = {name: {key: row["layout"] for key, row in solution.parameters.items()} for name, solution in plan.programs.items()}
    return {
        "status": plan.status,
        "cost_seconds": plan.cost,
        "bound_seconds": plan.bound,
        "gap": plan.gap,
        "solver": plan.solver,
        "peak_bytes": plan.peak_bytes,
        "mesh": list(plan.mesh.shape),
        "home": plan.home,
        "programs": {row["name"]: {key: value for key, value in row.items() if key != "name"} for row in plan.rows()},
        "devices": plan.devices,
        "switches": plan.switches,
        "copies": list(plan.copies),
        "parameters": layouts,
        "cpu_seconds": plan.seconds.get("cpu", {}),
        "wall_seconds": plan.seconds.get("wall", {}),
    }


def programs_report(plan: ProgramsSolution) -> RenderableType:
    """The plan for people."""
    mesh, gap = "x".join(map(str, plan.mesh.shape)), plan.gap if plan.gap > ROUNDING else 0.0
    head = f"{len(plan.programs)} programs on {mesh} {plan.mesh.device.name}: {seconds(plan.cost)} per unit"
    head += f", {size(plan.peak_bytes)} at the peak"
    verdict = "proven" if plan.status == "optimal" and gap else plan.status
    proof = f"{verdict}, gap {gap:.2g}: {sentence(plan.status, gap)}"
    return Group(Text(head), Text(proof), Text(""), _losses(plan), *_copies(plan))


def loss_rows(plan: ProgramsSolution) -> list[dict[str, Any]]:
    """What sharing costs each program, without losses that are rounding."""
    return [{**row, "loss": row["loss"] if abs(row["loss"]) > ROUNDING else 0.0} for row in plan.rows()]


def _losses(plan: ProgramsSolution) -> Table:
    """What sharing costs each program."""
    table = Table(title="What sharing costs each program", title_justify="left", title_style="bold")
    for column in ("program", "devices", "weight", "time", "alone", "loss", "copied", "a switch", "peak memory"):
        table.add_column(column, justify="left" if column == "program" else "right", overflow="fold")
    for row in loss_rows(plan):
        name = row["name"] + (" (home)" if row["name"] == plan.home else "")
        copied = f"{row['copied']} of {len(plan[row['name']].parameters)}"
        table.add_row(
            name, str(len(plan.devices.get(row["name"], range(plan.mesh.num_devices)))), f"{row['weight']:g}", seconds(row["seconds"]),
            seconds(row["best_seconds"]), f"{row['loss']:.2%}", copied, seconds(row["switch_seconds"]), size(row["peak_bytes"]),
        )  # fmt: skip
    return table


def alike_copies(plan: ProgramsSolution) -> list[dict[str, Any]]:
    """The parameters that are kept twice: family, name, source, target, seconds, bytes. Equal ones of several blocks are one row."""
    alike: dict[tuple, list[Mapping]] = {}
    for row in plan.copies:
        alike.setdefault((row["family"], _in_a_block(row["parameter"]), row["from"], row["to"]), []).append(row)
    return [
        {"family": family, "name": _named([row["parameter"] for row in rows]), "source": source, "target": target,
         "seconds": _sum(rows, "seconds"), "bytes": _sum(rows, "bytes")}
        for (family, _, source, target), rows in alike.items()
    ]  # fmt: skip


def alike_parameters(plan: ProgramsSolution) -> list[dict[str, Any]]:
    """Parameters with their layout in each program, "" where it lacks them. Equal ones of several blocks are one row."""
    alike: dict[tuple, list[str]] = {}
    for name in dict.fromkeys(name for solution in plan.programs.values() for name in solution.parameters):
        layouts = tuple(str(solution.parameters.get(name, {}).get("layout", "")) for solution in plan.programs.values())
        alike.setdefault((_in_a_block(name), layouts), []).append(name)
    return [{"name": _named(names), "layouts": layouts} for (_, layouts), names in alike.items()]


def _in_a_block(name: str) -> tuple[str, str]:
    """A parameter's name without the number of its block."""
    block, rest = split(name)
    return block.rpartition(".")[0] if block else "", rest


def _copies(plan: ProgramsSolution) -> list[RenderableType]:
    """The parameters that are kept twice."""
    if not plan.copies:
        return [Text("no parameter is kept twice")]
    alike = alike_copies(plan)
    table = Table(title=f"Parameters kept twice: as {plan.home} has them, and as", title_justify="left", title_style="bold")
    for column in ("program", "parameter", "from", "to", "seconds", "bytes sent"):
        table.add_column(column, justify="right" if column in ("seconds", "bytes sent") else "left", overflow="fold")
    for row in alike[:MOST_ROWS]:
        table.add_row(row["family"], row["name"], row["source"], row["target"], seconds(row["seconds"]), size(row["bytes"]))
    unlisted = [Text(f"and {len(alike) - MOST_ROWS} more kinds (--json lists them)")] if len(alike) > MOST_ROWS else []
    return [Text(""), table, *unlisted]


def _named(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more blocks"


def _sum(rows: Sequence[Mapping], key: str) -> float:
    return sum(row[key] for row in rows)


def programs_changes(a: ProgramsSolution, b: ProgramsSolution) -> dict[str, Any]:
    """The differences of two plans of the same programs: those of each program, and pairs of what they have in common.

    ValueError where they have other programs.
    """
    if set(a.programs) != set(b.programs):
        raise ValueError(f"one plan has the programs {', '.join(a.programs)}, the other {', '.join(b.programs)}; expected the same")
    of_each = {name: changes(a[name], b[name]) for name in a.programs}
    copied = [sorted(f"{row['family']}: {row['parameter']}" for row in plan.copies) for plan in (a, b)]
    same = copied[0] == copied[1] and all(record["same"] for record in of_each.values())
    pairs = {"cost_seconds": [a.cost, b.cost], "bound_seconds": [a.bound, b.bound], "peak_bytes": [a.peak_bytes, b.peak_bytes]}
    return {"same": same, **pairs, "copied": copied, "programs": of_each}


def programs_changes_report(record: Mapping[str, Any], tables: Any) -> RenderableType:
    """tables: how the differences of one program are shown."""
    cost = " and ".join(map(seconds, record["cost_seconds"]))
    counts = " and ".join(str(len(names)) for names in record["copied"])
    parts: list[RenderableType] = [Text(f"per unit {cost}; copied parameters {counts}")]
    for name, of_one in record["programs"].items():
        parts += [Text(""), Text(f"program {name}", style="bold"), tables(of_one)]
    return Group(*parts)
