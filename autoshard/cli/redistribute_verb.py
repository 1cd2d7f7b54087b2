"""`autoshard redistribute`: finds the cheapest route between two layouts of a tensor, for one problem or a list of them."""

from __future__ import annotations

import math
import time

from autoshard.cli.app import NO, OK, app
from autoshard.cli.arguments import bandwidths, parse_bytes
from autoshard.cli.loading import INTER, INTRA, load_report
from autoshard.cli.output import Output
from autoshard.mesh import Mesh
from autoshard.reading import data_of

SAMPLES = 96  # columns of a drawing, per dim


@app.command()
def redistribute(
    problem: str,
    planner: str = "astar",
    prices: str = "mesh",
    memory_limit: str | None = None,
    count: str | None = None,
    intra_node_bandwidth: str = INTRA,
    inter_node_bandwidth: str = INTER,
    max_depth: int | None = None,
    top_k: int | None = None,
    table: bool = False,
    latex: bool = False,
    draw: str | None = None,
    as_json: bool = False,
    quiet: bool = False,
) -> int:
    """Bring a tensor from one layout to another at the least cost, within a memory limit.

    \b
    autoshard redistribute problems.json --prices tensorcraft --table
    """
    from autoshard import relayout as room  # here: it needs torch, which --help shouldn't

    report = load_report().redistribution
    options = {key: value for key, value in (("max_depth", max_depth), ("top_k", top_k)) if value is not None}
    if options and planner != "memory_constrained":
        raise ValueError(f"--{next(iter(options)).replace('_', '-')} belongs to --planner memory_constrained, not to {planner}")
    limit = None if memory_limit is None else parse_bytes(memory_limit, "memory")
    links = bandwidths(intra_node_bandwidth, inter_node_bandwidth)
    with Output(as_json=as_json, quiet=quiet) as output:
        problems = room.read_problems(data_of(problem, "redistribution"))
        records, first = [], None
        for i, item in enumerate(problems):
            output.progress(f"planning {item.name}", i / len(problems))
            price = (
                room.IdealPrices(item.mesh)
                if prices == "tensorcraft"
                else room.MeshPrices(Mesh.from_bandwidths(item.mesh, **links), item.itemsize)
            )
            began = time.process_time()
            route = room.PLANNERS[planner](item, price, None if limit is None else limit / item.itemsize, count=count, **options)
            record = route.to_dict()
            record["cpu_seconds"] = time.process_time() - began
            records.append(record)
            first = first or route
        if draw is not None and first is not None:
            layouts = [first.problem.source, *(step.after for step in first.steps)]
            names = ["source", *(report.operation(step) for step in records[0]["steps"])]
            report.draw(
                draw, f"{first.problem.name}  {records[0]['source']}  ->  {records[0]['target']}", names, _panels(first.problem, layouts)
            )
            output.note(f"wrote {draw}")
        answer = {"routes": records, "planner": planner, "prices": prices}
        if latex and not as_json:
            output.plain(report.latex(records))
        if as_json or table or not latex:
            output.answer(answer, lambda: report.route_table(records))
    return OK if all(math.isfinite(record["cost_seconds"]) for record in records) else NO


def _panels(problem, layouts) -> list[list[list[list[int]]]]:
    """Per layout, dim, rank and sampled index, whether the rank holds it."""
    from autoshard.relayout import holds

    points = [[i * n // min(n, SAMPLES) for i in range(min(n, SAMPLES))] for n in problem.shape]
    return [[holds(problem, layout, d, some) for d, some in enumerate(points)] for layout in layouts]
