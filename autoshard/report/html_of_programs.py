"""The tables of the page of a plan of several programs, as plain rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from autoshard.report import html_parts
from autoshard.report.programs import alike_copies, alike_parameters, loss_rows
from autoshard.report.proof import ROUNDING, sentence
from autoshard.solution import ProgramsSolution

# id, heading: the order of the page
SECTIONS = (
    ("summary", "The plan"),
    ("sharing", "What sharing costs each program"),
    ("copies", "Parameters kept twice"),
    ("layouts", "Layouts of parameters"),
)


def parts(plan: ProgramsSolution) -> dict[str, Any]:
    """What the template shows; seconds, bytes per device, shares in percent."""
    limit, whose = html_parts.memory_limit(plan[plan.home])
    shape = "x".join(map(str, plan.mesh.shape))
    return {
        "title": f"{', '.join(plan)} on {shape} {plan.mesh.device.name}",
        "verdict": _verdict(plan),
        "limit": limit,
        "whose_limit": whose,
        "rows": list(_rows(plan)),
        "copies": alike_copies(plan),
        "layouts": alike_parameters(plan),
    }


def _verdict(plan: ProgramsSolution) -> dict[str, str]:
    gap = plan.gap if plan.gap > ROUNDING else 0.0
    is_proven = plan.status == "optimal"
    short = "proven best" if is_proven and not gap else f"{'within' if is_proven else 'at most'} {100 * gap:.2g}% of the best"
    return {"mood": "good" if is_proven else "open", "short": short, "long": f"For all programs together: {sentence(plan.status, gap)}."}


def _rows(plan: ProgramsSolution) -> Iterator[dict[str, Any]]:
    for row in loss_rows(plan):
        share = 100 * row["weight"] * row["seconds"] / plan.cost if plan.cost else 0.0
        devices = len(plan.devices.get(row["name"], range(plan.mesh.num_devices)))
        yield {**row, "share": share, "devices": devices, "is_home": row["name"] == plan.home}
