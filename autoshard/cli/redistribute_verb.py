"""`autoshard redistribute`: finds the cheapest route between two layouts of a tensor, for one problem or a list of them."""

from __future__ import annotations

import math
import time

from autoshard.cli.app import NO, OK, app
from autoshard.cli.loading import load_report
from autoshard.cli.output import Output
from autoshard.cli.verbs import Asked
from autoshard.mesh import Mesh
from autoshard.reading import data_of

SAMPLES = 96  # columns of a drawing, per dim


@app.command()
def redistribute(asked: Asked, output: Output) -> int:
    """Bring a tensor from one layout to another at the least cost, within a memory limit.

    \b
    autoshard redistribute problems.json --prices tensorcraft --table
    """
    from autoshard import relayout as room  # here: it needs torch, which --help shouldn't

    report = load_report().redistribution
    options = {key: value for key, value in (("max_depth", asked.max_depth), ("top_k", asked.top_k)) if value is not None}
    if options and asked.planner != "memory_constrained":
        raise ValueError(f"--{next(iter(options)).replace('_', '-')} belongs to --planner memory_constrained, not to {asked.planner}")
    problems = room.read_problems(data_of(asked.problem, "redistribution"))
    records, first = [], None
    for i, item in enumerate(problems):
        output.progress(f"planning {item.name}", i / len(problems))
        ideal, mesh = asked.prices == "tensorcraft", Mesh.from_bandwidths(item.mesh, **asked.links)
        price = room.IdealPrices(item.mesh) if ideal else room.MeshPrices(mesh, item.itemsize)
        limit = None if asked.memory_limit is None else asked.memory_limit / item.itemsize
        began = time.process_time()
        route = room.PLANNERS[asked.planner](item, price, limit, count=asked.count, **options)
        records.append({**route.to_dict(), "cpu_seconds": time.process_time() - began})
        first = first or route
    if first is not None:
        layouts = [first.problem.source, *(step.after for step in first.steps)]
        names = ["source", *(report.operation(step) for step in records[0]["steps"])]
        title = f"{first.problem.name}  {records[0]['source']}  ->  {records[0]['target']}"
        output.write(asked.draw, lambda path: report.draw(path, title, names, _panels(first.problem, layouts)))
    if asked.latex and not output.as_json:
        output.plain(report.latex(records))
    if output.as_json or asked.table or not asked.latex:
        answer = {"routes": records, "planner": asked.planner, "prices": asked.prices}
        output.answer(answer, lambda: report.route_table(records))
    return OK if all(math.isfinite(record["cost_seconds"]) for record in records) else NO


def _panels(problem, layouts) -> list[list[list[list[int]]]]:
    """Per layout, dim, rank and sampled index, whether the rank holds it."""
    from autoshard.relayout import holds

    points = [[i * n // min(n, SAMPLES) for i in range(min(n, SAMPLES))] for n in problem.shape]
    return [[holds(problem, layout, d, some) for d, some in enumerate(points)] for layout in layouts]
