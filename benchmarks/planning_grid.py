"""The grid of `planning_time.py --grid`: models x meshes x batches x memory limits x recomputation, and how a cell is judged.

A cell is planned to a gap of 0.1 %; where that takes more than the CPU seconds of 1 %, once more to 1 %. It is ok if it is within 1 % in
20 CPU s and within 0.1 % in 60, capture included and imports not, or proven to have no plan, with a peak RSS of at most 2 GiB. At most 5 %
of the cells may miss that, and each of them has to end with an answer or a sentence.
"""

from __future__ import annotations

import itertools
import math

MODELS: dict[str, tuple[str, dict]] = {  # settings beside the batch
    "8b": ("llama.py:llama3_8b", {}),
    "70b": ("llama.py:llama3_70b", {}),
    "405b": ("llama.py:llama3_405b", {}),
    "gpt2": ("gpt2.py:small", {}),
    "moe": ("moe.py:moe", {"layers": 16}),
}
MESHES = ((8,), (2, 8), (8, 8), (16, 8), (4, 4, 8))
BATCHES = (1, 2, 4, 8)  # examples per device
MEMORY = {"free": None, "80GB": 80e9}
RECOMPUTED = {"": 0, "recomputed": "all"}
NAMED = (  # those from which the grid began: model, mesh, examples, memory, recomputed
    ("405b", (16, 8), 32, "free", ""),
    ("8b", (8, 8), 8, "free", ""),
    ("405b", (64, 8), 128, "free", ""),
    ("70b", (16, 8), 16, "80GB", "recomputed"),
)
GAP, SECONDS = 1e-3, 60.0
FIRST_GAP, FIRST_SECONDS = 1e-2, 20.0
LIMITS_OVER, LIMITS_SECONDS = 0.1, 1.0  # a plan may take this share of its time limit more, and these seconds
LEAST_SEARCH = 2.0  # seconds of search that may follow capture and pricing where these leave less of the limit
MOST_BYTES = 2 * 2**30
MOST_MISSED = 0.05  # of the cells
STRIDE = 37  # prime to the number of cells: neighbours in the order of a selection differ in everything


def cells() -> dict[str, dict]:
    """All cells by name, in an order in which every beginning is a mixture."""
    product = itertools.product(MODELS, MESHES, BATCHES, MEMORY, RECOMPUTED)
    grid = [_cell(model, mesh, batch * math.prod(mesh), memory, again) for model, mesh, batch, memory, again in product]
    mixed = [grid[k * STRIDE % len(grid)] for k in range(len(grid))]
    return dict([_cell(*named) for named in NAMED] + mixed)


def _cell(model: str, mesh: tuple[int, ...], batch: int, memory: str, again: str) -> tuple[str, dict]:
    path, settings = MODELS[model]
    name = " ".join(filter(None, [model, "x".join(map(str, mesh)), f"batch {batch}", memory, again]))
    options = {"memory_limit": MEMORY[memory], "recompute": RECOMPUTED[again]}
    return name, {"model": path, "mesh": mesh, "settings": {**settings, "batch": batch}, "options": options}


def planned_row(case: dict, planned) -> dict:
    """The row of a cell. planned(case, gap): the row of one plan."""
    row = planned(case, GAP)
    first = row
    if row["cpu_seconds"]["total"] > FIRST_SECONDS and row["status"] != "infeasible":
        first = planned(case, FIRST_GAP)
    return {**row, "first_gap": first["gap"], "first_cpu_seconds": first["cpu_seconds"]["total"]}


def is_ok(row: dict) -> bool:
    """Whether a cell meets what is asked of all but a few."""
    within = row["gap"] <= GAP and row["first_gap"] <= FIRST_GAP and row["first_cpu_seconds"] <= FIRST_SECONDS
    proven = row["status"] == "infeasible" or within
    return proven and row["cpu_seconds"]["total"] <= SECONDS and row["peak_rss_bytes"] <= MOST_BYTES


def over(row: dict, limit: float) -> float:
    """CPU seconds by which a plan took longer than its time limit, or than capture, pricing and the first plan where these take longer."""
    seconds = row["cpu_seconds"]
    fixed = sum(seconds.get(phase, 0.0) for phase in ("capture", "candidates", "formulate", "describe"))
    return seconds["total"] - max(limit, fixed + LEAST_SEARCH)


def keeps_limit(row: dict, limit: float) -> bool:
    """Whether a plan with a time limit took at most a tenth and a second longer, and ended with an answer or a sentence."""
    return row["status"] != "crashed" and over(row, limit) <= LIMITS_OVER * limit + LIMITS_SECONDS


def limited_line(row: dict) -> str:
    seconds = row["cpu_seconds"]
    phases = " ".join(f"{seconds.get(phase, 0.0):>7.1f}" for phase in ("capture", "formulate", "solve", "total"))
    tail = f"{row['over_seconds']:>6.1f} {row['status']:>10} {row['gap']:>8.1e} {'ok' if row['ok'] else 'MISSED'}"
    return f"{row['case']:34} {row['limit']:>5g} {phases} {tail}"


LIMITED_HEADS = f"{'':34} {'limit':>5} {'capture':>7} {'formul.':>7} {'solve':>7} {'total':>7} {'over':>6} {'status':>10} {'gap':>8}"


def line(row: dict) -> str:
    """A row as text."""
    seconds = row["cpu_seconds"]
    phases = " ".join(f"{seconds.get(phase, 0.0):>7.1f}" for phase in ("capture", "formulate", "solve", "total"))
    tail = f"{row['status']:>10} {row['gap']:>8.1e} {row['first_cpu_seconds']:>7.1f} {row['first_gap']:>8.1e}"
    said = f"  {row['message'][:120]}" if row.get("message") else ""
    return f"{row['case']:34} {phases} {row['peak_rss_bytes'] / 2**30:>5.2f} {tail} {'ok' if row['ok'] else 'MISSED'}{said}"


HEADS = f"{'':34} {'capture':>7} {'formul.':>7} {'solve':>7} {'total':>7} {'GiB':>5} {'status':>10} {'gap':>8} {'to 1 %':>7} {'its gap':>8}"
