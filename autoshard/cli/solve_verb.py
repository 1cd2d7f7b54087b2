"""`autoshard solve`: the numeric core alone, on a problem in the contest's format. Needs no torch."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

from rich.table import Table

from autoshard.cli.app import NO, OK, app
from autoshard.cli.output import Output
from autoshard.cli.verbs import Asked
from autoshard.problem import Problem, read_contest, write_choice

if TYPE_CHECKING:
    from autoshard.solvers import Infeasibility


@app.command()
def solve(asked: Asked, output: Output) -> int:
    """Pick one choice per node of a PROBLEM at the least cost within its memory limit, with a proof.

    \b
    autoshard solve asplos-2025-iopddl-B.json.gz --time-limit 60 --out choice.json
    """
    from autoshard.solvers import Answer, Status  # here: cvxpy takes seconds to import, which --help shouldn't
    from autoshard.solvers import solve as run

    output.progress("reading", 0.0)
    began = time.monotonic()
    numbers, answer = None, Answer(Status.UNKNOWN, None, math.inf, -math.inf, asked.solver, interrupted=True)
    try:
        numbers = read_contest(asked.problem)
    except KeyboardInterrupt:  # nothing is known yet, and that is said like any other answer
        output.note("interrupted while reading")
    read = time.monotonic() - began
    if numbers is not None:
        output.progress("solving", 0.0)
        options: dict[str, Any] = {"solver": asked.solver, "time_limit": asked.time_limit, "gap": asked.gap}
        answer = run(numbers, **options, progress=lambda cost, bound: output.progress(*_progress(cost, bound)))
    output.write(asked.out if answer.choice is not None else None, lambda path: write_choice(path, answer))
    total = answer.seconds.get("total", 0.0)
    reduce = answer.seconds.get("reduce", 0.0)
    record = {
        "status": answer.status.value,
        **{name: getattr(answer, name) for name in ("cost", "bound", "gap", "peak")},
        "limit": numbers.usage_limit if numbers is not None else None,
        "solver": answer.solver,
        "seconds": {"read": read, "reduce": reduce, "solve": answer.seconds.get("solve", total - reduce), "total": read + total},
        "reduced": dict(answer.reduced),
        "interrupted": answer.interrupted,
    }
    if answer.infeasibility is not None and numbers is not None:
        record["infeasibility"] = _infeasibility(numbers, answer.infeasibility)
    output.answer(record, lambda: _table(record, answer.status.advice))
    return NO if answer.choice is None or (answer.interrupted and answer.status is not Status.OPTIMAL) else OK


def _infeasibility(problem: Problem, why: Infeasibility) -> dict:
    """The smallest limit that works is between the two numbers of `smallest_limit`; `nodes` hold the most bytes at `time`."""
    nodes = [{"node": node, "name": problem.names[node], "bytes": amount} for node, amount in why.nodes]
    return {"smallest_limit": list(why.smallest_limit), "time": why.time, "nodes": nodes}


def _progress(cost: float, bound: float) -> tuple[str, float]:
    """Words and a fraction: how much of the cost the bound has reached."""
    known = math.isfinite(cost) and math.isfinite(bound) and cost > 0
    return f"solving: best {cost:.10g}, bound {bound:.10g}", max(0.0, bound / cost) if known else 0.0


def _table(record: dict, advice: str) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_row("status", f"{record['status']}: {advice}")
    for key in ("cost", "bound", "gap", "peak", "limit"):
        value = record[key]
        table.add_row(key, "-" if value is None or not math.isfinite(value) else f"{value:.12g}")
    if why := record.get("infeasibility"):
        low, high = why["smallest_limit"]
        table.add_row("smallest limit", f"{high:.12g}" if low == high else f"between {low:.12g} and {high:.12g}")
        table.add_row("at time", f"{why['time']}, where most is held by")
        for node in why["nodes"]:
            table.add_row("", f"node {node['name']}: {node['bytes']:.12g} bytes")
    table.add_row("left to search", ", ".join(f"{value} {key}" for key, value in record["reduced"].items()) or "everything")
    table.add_row("seconds", ", ".join(f"{key} {value:.2f}" for key, value in record["seconds"].items()))
    return table
