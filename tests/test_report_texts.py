"""Every report of kept records, word by word. tests/data/reports/ has the records and what was said of them."""

import json
import math
import re
import sys
from dataclasses import replace
from functools import cache

import pytest

from autoshard import report
from autoshard.report.terminal import as_text
from autoshard.solution import load
from autoshard.version import VERSION
from tests.helpers_kept import DATA, assert_stays
from tests.helpers_solutions import linear_solution

KEPT = DATA / "reports"
RECORDS = json.loads((KEPT / "records.json").read_text())
FILES = ("plan", "saved", "plan_of_a_batch", "plan_of_a_larger_batch", "programs", "pipeline")


@cache
def of(name: str):
    return load(KEPT / f"{name}.json") if name in FILES else RECORDS[name]


def rare():
    """A plan with what few plans have."""
    rows = [{"parameter": "w", "dim": k, "from": 6, "to": 8, "saves_seconds": 1e-5 * (2 - k)} for k in range(3)]
    lines = {"seconds": 6e-4, "bound_seconds": 5e-4, "serial_plan_seconds": 7e-4}
    replicated = ({"target": "mine.op.default", "count": 2, "seconds": 1e-4, "bytes": 1e6},)
    one = of("plan").noting(padding=rows, memory_limit=1e6)
    return replace(one, overlapped=lines, status="feasible", replicated_ops=replicated, bound=5e-4, solver="")


def pipelines() -> list[dict]:
    """A pipeline compared with itself, with itself at other seconds, and with one of other layers, layouts and a stage more."""
    one = of("pipeline")
    first, last = one.stages
    sharded = {**first.parameters, "layers.0.up.weight": "S(0)"}
    three = replace(first, last=1, parameters=sharded), replace(last, first=1), replace(last, first=2)
    others = one, replace(one, seconds=2 * one.seconds), replace(one, stages=three, schedule="1f1b", peak_bytes=2 * one.peak_bytes)
    return [report.changes.comparison(one, other) for other in others]


def by_hand() -> dict:
    """Small plans: as it is, within a gap, with what is rare, and with nothing."""
    row = {"layout": "R,S(1)", "shape": [8, 8], "dtype": "float32", "local_bytes": 64}
    usual = {"cost_seconds": 1e-3, "peak_bytes": 9e10, "status": "optimal", "fits": False}
    none = {"cost_seconds": None, "peak_bytes": None, "status": "infeasible"}
    bare: dict = {"parameters": {}, "baselines": {}, "breakdown": {}, "counts": {}, "assumptions": {}, "seconds": {}}
    return {
        "plain": linear_solution(), "rounded": linear_solution(cost=1.0, bound=1.0 - 1e-15), "within a gap": linear_solution(bound=1.9e-3),
        "rare": linear_solution(
            baselines={"data_parallel": usual, "megatron": none}, parameters={"w": row, "head": {**row, "tied_to": "w"}},
            replicated_ops=({"target": "aten.foo.default", "count": 3, "seconds": 1e-5, "bytes": 1e6},),
        ),
        "unjudged": linear_solution(cost=math.inf, bound=0.0, peak_bytes=math.inf, status="unjudged", solver="", **bare),
    }  # fmt: skip


def page(text: str) -> str:
    """Without its style, its script, and what has the version."""
    text = re.sub(r"<style>.*?</style>|<script>.*?</script>|<meta http-equiv[^>]*>", "", text, flags=re.DOTALL).replace(VERSION, "VERSION")
    return "\n".join(line.strip() for line in text.splitlines() if line.strip())


def written(write, *given) -> str:
    """The text of a file."""
    path = KEPT / "written.tmp"
    try:
        write(*given, path)
        return path.read_text()
    finally:
        path.unlink(missing_ok=True)


def drawn(draw, *given) -> str:
    """What a figure shows: the data of its lines, boxes, points and pictures, and its words."""
    figures, module = [], sys.modules[draw.__module__]
    save = module.save
    module.save = lambda figure, *_, **options: figures.append((figure, options))
    try:
        draw(*given)
    finally:
        module.save = save
    ((figure, options),) = figures
    said = [f"{figure.get_size_inches().tolist()} {options} {[text.get_text() for text in figure.texts]}"]
    for axes in figure.axes:
        said.append(f"{[axes.get_title(loc=side) for side in ('left', 'center')]} {axes.get_xlabel()} {axes.get_ylabel()}")
        said.append(f"{axes.get_xscale()} {axes.get_yscale()} {len(axes.get_yticks()) if axes.images else ''}")
        said += [f"line {x.get_label()} {x.get_xydata().tolist()} {x.get_color()} {x.get_linewidth()} {x.get_ls()}" for x in axes.lines]
        boxes = [(box.get_patch_transform().transform_path(box.get_path()).get_extents(), box.get_facecolor()) for box in axes.patches]
        said += [f"box {[round(float(x), 6) for x in extents.extents]} {color}" for extents, color in boxes]
        shapes = [(x, [box.get_extents().extents.round(6).tolist() for box in x.get_paths()]) for x in axes.collections]
        said += [f"shapes {boxes} {x.get_offsets().tolist()} {x.get_facecolor().tolist()} {x.get_alpha()}" for x, boxes in shapes]
        said += [f"picture {image.get_array().tolist()}" for image in axes.images]
        said += [f"{x.get_text()} {x.get_position()}" for x in axes.texts]
        said += [f"legend {[x.get_text() for x in legend.get_texts()]}" for legend in (axes.get_legend(),) if legend is not None]
    return "\n".join(said) + "\n"


SAID = {
    "plan": lambda: report.planned.planned_report(of("plan"), of("meshes")),
    "plan_as_page": lambda: page(report.html.html_report(of("plan"), frontier=of("frontier"))),
    "plan_in_notebook": lambda: page(report.html.notebook(of("plan"))),
    "rare": lambda: report.planned.planned_report(rare()),
    "rare_as_page": lambda: page(report.html.html_report(rare())),
    **{f"{name}, by hand": lambda one=one: report.planned.planned_report(one) for name, one in by_hand().items()},
    "summaries": lambda: json.dumps([report.planned.summary(one) for one in by_hand().values()], indent=1),
    "sections": lambda: json.dumps([report.html.shown_sections(of(name)) for name in ("plan", "programs", "pipeline")], indent=1),
    "prices_of_plan": lambda: report.explained.prices_report(of("plan")),
    "rare_prices": lambda: report.explained.prices_report(rare()),  # the interval is of the seconds that the objective counts
    "saved": lambda: report.planned.planned_report(of("saved")),
    "saved_as_page": lambda: page(report.html.html_report(of("saved"))),
    "differences": lambda: report.changes.comparison_tables(report.changes.comparison(of("plan_of_a_batch"), of("plan_of_a_larger_batch"))),
    "differences_of_pipelines": lambda: report.terminal.shown(*map(report.changes.comparison_tables, pipelines())),
    "differences_of_pipelines_as_record": lambda: json.dumps(pipelines(), indent=1),
    "differences_of_launches": lambda: report.changes.comparison_tables(of("launches")),
    "programs": lambda: report.programs.programs_report(of("programs")),
    "programs_as_record": lambda: json.dumps(report.programs.programs_record(of("programs")), indent=1),
    "programs_as_page": lambda: page(report.html.html_report(of("programs"))),
    "pipeline": lambda: report.pipeline.pipeline_report(of("pipeline")),
    "pipeline_as_page": lambda: page(report.html.html_report(of("pipeline"))),
    "pipeline_as_table": lambda: written(report.pipeline.write_csv, of("pipeline").configurations),
    "pipeline_drawn": lambda: drawn(report.pipeline.plot_speed_up, of("pipeline"), "path"),
    "run_drawn": lambda: drawn(report.timeline.draw_run, report.pipeline.time_line(of("pipeline")), "path"),
    "run_traced": lambda: json.dumps(report.timeline.trace_of_run(report.pipeline.time_line(of("pipeline"))), indent=1),
    "launch": lambda: report.launchers.launch_table(of("check"), "job.toml", compared=True),
    "launch_explained": lambda: report.launchers.launch_table(of("links"), "job.toml", report.launchers.sensitivity_table(of("links"))),
    "launch_as_page": lambda: page(report.page_of_launch.launch_page(of("check"), "job.toml", fits=of("fits"))),
    "fits": lambda: report.launchers.fits_table(of("fits"), "job.toml"),
    "serving": lambda: report.serving.serving_report(of("serve")),
    "verified": lambda: report.planned.verify_report(of("verify_programs")),
    "checked": lambda: report.explained.check_table(of("checked"), of("checked")["message"]),
    "simulated": lambda: report.timeline.simulation_report(of("simulate"), of("simulate")["critical_seconds"]),
    "simulated_grid": lambda: report.timeline.simulation_report(of("simulated_grid")),
    "op_explained": lambda: report.explained.explained(of("explained")[0]),
    "block_explained": lambda: report.explained.explained(of("explained")[1]),
    "robust": lambda: report.explained.robustness_table(of("robust")),
    "robust_elsewhere": lambda: report.explained.robustness_table(of("robust_elsewhere")),
    "tables": lambda: report.tables.table_of(of("tables")),
    "tables_drawn": lambda: drawn(report.tables.draw, "path", of("tables")),
    "frontier": lambda: report.frontier.frontier_report(of("frontier")),
    "frontier_as_table": lambda: written(report.frontier.write_csv, of("frontier")),
    "frontier_drawn": lambda: drawn(report.frontier.draw, of("frontier"), "path"),
    "routes": lambda: report.redistribution.route_table(of("routes")),
    "prices": lambda: report.calibration.prices_table(of("prices")),
    "errors": lambda: report.calibration.errors_table(of("curves"), of("by_collective")),
    "cluster": lambda: report.calibration.cluster_table(of("cluster")),
    "curves_drawn": lambda: drawn(report.calibration.draw, "path", of("drawn_curves")),
    "assumed": lambda: "\n".join(f"{key}: {value}" for key, value in report.plan_tables.assumed(of("plan"), ()).items()),
}  # fmt: skip


@pytest.mark.parametrize("name", SAID)
def test_a_report_says_what_it_said(name):
    told = SAID[name]()
    assert_stays(f"reports/{name}.txt", told if isinstance(told, str) else as_text(told))
