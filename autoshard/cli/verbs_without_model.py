"""`autoshard solve | tables | redistribute`: verbs that take no model.

solve          the numeric core alone, on a problem in the contest's format; needs no torch
tables         sharding and placement of embedding tables, so that the slowest device is as fast as possible
redistribute   the cheapest route between two layouts of a tensor, for one problem or a list of them
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.text import Text

from autoshard import report
from autoshard.cli.app import NO, OK, app
from autoshard.cli.loading import load_device
from autoshard.cli.output import Output
from autoshard.cli.verbs import Asked
from autoshard.mesh import Mesh
from autoshard.problem import read_contest, write_choice
from autoshard.reading import data_of, rows_of, text_of
from autoshard.units import size
from autoshard.writing import write_json

if TYPE_CHECKING:
    from autoshard.tables import Table as EmbeddingTable


@app.command()
def solve(asked: Asked, output: Output) -> int:
    """Pick one choice per node of a PROBLEM at the least cost within its memory limit, with a proof.

    \b
    autoshard solve asplos-2025-iopddl-B.json.gz --time-limit 60 --out choice.json
    """
    from autoshard.solvers import Answer, Status  # here: numpy and HiGHS, which --help shouldn't wait for
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
    if (why := answer.infeasibility) is not None and numbers is not None:
        # the smallest limit that works is between the two numbers; the nodes hold the most bytes at the time
        nodes = [{"node": node, "name": numbers.names[node], "bytes": amount} for node, amount in why.nodes]
        record["infeasibility"] = {"smallest_limit": list(why.smallest_limit), "time": why.time, "nodes": nodes}
    output.answer(record, lambda: _table(record, answer.status.advice))
    return NO if answer.choice is None or (answer.interrupted and answer.status is not Status.OPTIMAL) else OK


def _progress(cost: float, bound: float) -> tuple[str, float]:
    """Words and a fraction: how much of the cost the bound has reached."""
    known = math.isfinite(cost) and math.isfinite(bound) and cost > 0
    return f"solving: best {cost:.10g}, bound {bound:.10g}", max(0.0, bound / cost) if known else 0.0


def _table(record: dict, advice: str) -> Group:
    rows = [("status", f"{record['status']}: {advice}")]
    for key in ("cost", "bound", "gap", "peak", "limit"):
        value = record[key]
        rows.append((key, "-" if value is None or not math.isfinite(value) else f"{value:.12g}"))
    if why := record.get("infeasibility"):
        low, high = why["smallest_limit"]
        rows.append(("smallest limit", f"{high:.12g}" if low == high else f"between {low:.12g} and {high:.12g}"))
        rows.append(("at time", f"{why['time']}, where most is held by"))
        rows += [("", f"node {node['name']}: {node['bytes']:.12g} bytes") for node in why["nodes"]]
    rows.append(("left to search", ", ".join(f"{value} {key}" for key, value in record["reduced"].items()) or "everything"))
    rows.append(("seconds", ", ".join(f"{key} {value:.2f}" for key, value in record["seconds"].items())))
    return report.terminal.pairs(rows)


@app.command()
def tables(asked: Asked, output: Output) -> int:
    """Shard and place embedding tables so that the slowest device is as fast as can be.

    \b
    autoshard tables tables.csv --devices 2x8 --hbm 80GB --host-memory 512GB --reserve 0.15
    CSV columns: name, rows, columns, and any of item_size, pooling, features, optimizer, skew.
    JSON: {"tables": [{"name": "user", "rows": 1000000, "columns": 64}]}; a table may bring its own options:
    {"name": "t", "options": [{"sharding": "table_wise", "seconds": 1e-3, "hbm_bytes": 1e9}]}.
    """
    from autoshard.tables import plan_tables  # here, like the report: other verbs shouldn't wait for what they import

    mesh = Mesh.from_bandwidths(asked.devices, **asked.links, device=load_device(asked.device))
    options = {name: getattr(asked, name) for name in ("hbm", "host_memory", "reserve", "batch", "host_bandwidth", "effort", "seed")}
    plan = plan_tables(read_tables(asked.spec), mesh, progress=output.progress, **options)
    record = plan.to_dict()
    output.write(asked.out, lambda path: write_json(record, path, indent=1))
    output.write(asked.plot if plan.devices else None, lambda path: report.tables.draw(path, record))
    assumed = Text(f"mesh {report.plan_tables.mesh_line(mesh)}\n{limits_line(asked.hbm, asked.host_memory, asked.reserve)}\n")
    output.answer(record, lambda: Group(assumed, report.tables.table_of(record, asked.every)))
    return OK if plan.devices else NO


def limits_line(hbm: float, host_memory: float | None, reserve: float) -> str:
    """The limits that the column `of limit` refers to, and how they follow from the arguments."""
    given = [(hbm, "device")] if host_memory is None else [(hbm, "device"), (host_memory, "host")]
    less = [f" ({size(limit)} less {100 * reserve:g} % reserve)" if reserve and limit else "" for limit, _ in given]
    limits = ", ".join(f"{size(limit * (1 - reserve))} per {what}{how}" for (limit, what), how in zip(given, less))
    return f"limits {limits}"


def read_tables(path: str) -> list[EmbeddingTable]:
    """Tables of a .csv or .json file."""
    from autoshard.tables import tables_of_json, tables_of_rows

    if path.lower().endswith(".csv"):
        header, rows = rows_of(text_of(path, "tables"), path)
        return tables_of_rows([row for _, row in rows], header)
    return tables_of_json(data_of(path, "tables"))


@app.command()
def redistribute(asked: Asked, output: Output) -> int:
    """Bring a tensor from one layout to another at the least cost, within a memory limit.

    \b
    autoshard redistribute problems.json --memory-limit 1GB --json
    """
    from autoshard import relayout as room  # here: it needs torch, which --help shouldn't

    problems = room.read_problems(data_of(asked.problem, "redistribution"))
    records = []
    for i, item in enumerate(problems):
        output.progress(f"planning {item.name}", i / len(problems))
        prices = room.MeshPrices(Mesh.from_bandwidths(item.mesh, **asked.links), item.itemsize)
        limit = None if asked.memory_limit is None else asked.memory_limit / item.itemsize
        began = time.process_time()
        route = room.PLANNERS[asked.planner](item, prices, limit, count=asked.count)
        records.append({**route.to_dict(), "cpu_seconds": time.process_time() - began})
    output.answer({"routes": records, "planner": asked.planner}, lambda: report.redistribution.route_table(records))
    return OK if all(math.isfinite(record["cost_seconds"]) for record in records) else NO
