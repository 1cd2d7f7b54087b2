"""A plan in a terminal: its cost and proof, the usual plans, where the time goes, layouts of parameters. As a flat record too."""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence

from rich.console import RenderableType

from autoshard.report import plan_tables
from autoshard.report.plan_tables import interval_words
from autoshard.report.proof import overlapped_words, proof, verdict
from autoshard.report.terminal import shown, spaced
from autoshard.report.values import ReportTable, TableRow, numbers
from autoshard.solution import ROUNDING, Solution
from autoshard.units import hundredths, percent, seconds, size

FEW = 5  # placement mismatches listed
# assumptions that other lines of the report hold
ELSEWHERE = (
    "axes", "device", "training", "solver", "gap", "padding", "keep", "pin_prices", "microbatches", "objective", "recomputed", "offloaded",
    "saved", "computed_again",
)  # fmt: skip


def planned_report(solution: Solution, meshes: Sequence[Mapping] | None = None) -> RenderableType:
    """The meshes compared (rows of `MeshPlans.to_dicts`), the plan, and the price of its pins where that was asked for."""
    compared = () if meshes is None else (meshes_table(meshes),)
    pins = (pins_table(solution.pin_prices, solution.cost),) if solution.pin_prices else ()
    tables = (plan_tables.usual_table, plan_tables.time_table, plan_tables.parameters_table, plan_tables.replicated_table)
    return spaced(*compared, header(solution), *(table(solution) for table in tables), *pins)


def header(solution: Solution) -> ReportTable:
    """Status, cost, bound, memory, mesh and assumptions."""
    of = f"{solution.microbatches} microbatches of forward and backward" if solution.microbatches > 1 else "forward, backward"
    what = f"step ({of}, optimizer)" if solution.training else "forward pass"
    rows = [("plan", f"{verdict(solution)}: {proof(solution)}")]
    if solution.overlapped:
        rows.append(("overlapped", f"{seconds(solution.objective_seconds)} per {what}; {overlapped_words(solution)}"))
        rows.append(("", interval_words(solution)))
    alone = ", one task after the other" if solution.overlapped else ""
    least = f"no plan takes less than {seconds(solution.bound)}{alone and ' so'}"
    rows.append(("cost", f"{seconds(solution.cost)} per {what}{alone}; {least}"))
    rows.append(("", "" if solution.overlapped else interval_words(solution)))
    rows += [("prices", plan_tables.prices_known_from(solution)), ("memory", _memory(solution)), ("saved", _saved(solution))]
    rows.append(("mesh", plan_tables.mesh_line(solution.mesh)))
    rows.append(("assumed", ", ".join(f"{key} {words}" for key, words in plan_tables.assumed(solution, ELSEWHERE).items())))
    rows += [("solved", _solved(solution)), *(("offer", offer) for offer in plan_tables.offers(solution))]
    return ReportTable("", ("", ""), [row for row in rows if row[1]], "pairs")


def _memory(solution: Solution) -> str:
    """The peak, when it is, and what is in it."""
    peak = f"{size(solution.peak_bytes)} per device at the peak"
    parts = ", ".join(f"{kind.replace('_', ' ')} {size(held)}" for kind, held in dict(solution.peak.get("parts", {})).items())
    return f"{peak}, {plan_tables.peak_place(solution)}: {parts}" if solution.peak else peak


def _saved(solution: Solution) -> str:
    """Which of the forward's values the backward pass does not find on the device: how often each op, views last."""
    chosen = solution.chosen
    ways = {
        "recomputed": chosen.recomputed, "computed again by kernels": solution.computed_again,
        "offloaded": [name.rpartition(".")[0] for name in chosen.offloaded],
    }  # fmt: skip
    said = []
    for way, names in ways.items():
        counts = Counter(re.sub(r"_\d+$", "", name) for name in names)
        said += [f"{way} in the backward pass: " + ", ".join(f"{n} x {op}" for op, n in sorted(counts.items()))] if counts else []
    exposed = max((one.exposed for one in chosen.offloaded.values()), default=0.0)
    return "; ".join(said) + (f"; {percent(exposed, 1.0)} of the copies to and from the host are waited for" if chosen.offloaded else "")


def _solved(solution: Solution) -> str:
    sizes = ", ".join(f"{solution.counts[key]} {key.replace('_', ' ')}" for key in ("nodes", "choices", "edges") if key in solution.counts)
    total = solution.seconds.get("cpu", {}).get("total")
    spent = f" in {seconds(total)} of CPU" if total is not None else ""
    return f"by {solution.solver or 'nobody'}" + (f" ({sizes})" if sizes else "") + spent


def meshes_table(rows: Sequence[Mapping]) -> ReportTable:
    """A row per mesh, in the order of planning; the best one in bold."""
    best = next((row["cost_seconds"] for row in rows if row["best"]), None)
    listed = []
    for row in rows:
        cost, gap = row["cost_seconds"], row["gap"]
        ratio = f"{cost / best:.2f}x" if cost is not None and best else "-"
        told = "-" if gap is None else f"{gap if gap > ROUNDING else 0:.2g}"
        cells = (row["mesh"], seconds(cost), ratio, told, size(row["peak_bytes"]), seconds(row["cpu_seconds"]), _mesh_status(row))
        listed.append(TableRow(cells, strong=row["best"]))
    columns = ("mesh", *numbers("cost", "to best", "gap", "peak memory", "planned in"), "status")
    return ReportTable("Meshes compared", columns, listed)


def _mesh_status(row: Mapping) -> str:
    """The status, and of a mesh on which nothing fits the limit that would do."""
    limit, proven = row.get("smallest_limit_bytes"), row["status"] == "optimal" and (row["gap"] or 0.0) > ROUNDING
    if row["status"] == "infeasible" and limit:
        return f"infeasible; fits in {size(limit[1])}"
    status = ("proven" if proven else row["status"]) + (", best" if row["best"] else "")
    return f"{status}: {row['message']}" if row.get("message") else status


def pins_table(rows: Sequence[Mapping], cost: float) -> ReportTable:
    """What each pin, forbidden layout, and all kept layouts together cost."""
    listed = []
    for row in rows:
        paid = row["costs_seconds"] if row["costs_seconds"] > ROUNDING * cost else 0.0
        about = ("" if row["proven"] else "about ") + seconds(paid)
        listed.append((row["kind"], str(row["name"]), row["layout"] or "", about, f"{hundredths(paid / cost)}%" if cost else "-"))
    return ReportTable("What each pin costs", ("", "tensor", "layout", *numbers("costs", "of the plan")), listed)


def verify_report(report: Mapping) -> RenderableType:
    """What a check on simulated ranks found, plan by plan; "plan" is the solution's own, the others are drawn at random. Program by program
    where there are several."""
    if "programs" in report:
        return shown(*(part for name, one in report["programs"].items() for part in (f"program {name}", verify_report(one))))
    rows, mismatches = [], []
    for row in report.get("plans", [report]):
        drawn = "plan" if row.get("seed") is None else f"random, seed {row['seed']}"
        errors = [row.get(f"max_relative_error_{what}") for what in ("outputs", "gradients")]
        told = ["-" if value is None else f"{value:.1e}" if value else "0" for value in errors]
        rows.append((drawn, *told, str(len(row["placement_mismatches"])), str(row.get("redistributes", ""))))
        mismatches += row["placement_mismatches"][:FEW]
    columns = ("layouts", *numbers("worst error, outputs", "worst error, gradients", "placement mismatches", "redistributes"))
    table = ReportTable(f"{'ok' if report['ok'] else 'NOT OK'}, on {report['ranks']} simulated ranks", columns, rows)
    said = (f"{r.get('op')}, output {r.get('output')}: planned {r.get('planned')}, found {r.get('found')}" for r in mismatches[:FEW])
    return shown(table, *said)


# keys of the record that are named as they are in a Solution
SAME = (
    "status", "objective", "step_seconds", "solver", "peak", "training", "microbatches", "baselines", "fingerprint", "prices",
    "assumptions",
)  # fmt: skip


def summary(solution: Solution) -> dict:
    """Plain data, which `plan --json` and `show --json` print; None where a number isn't known. Cost, bound and gap are of tasks one after
    the other, `step_seconds` of the time line; `status` is of the objective, and `overlapped` has its own seconds, bound and gap."""
    figures = {"cost_seconds": solution.cost, "bound_seconds": solution.bound, "gap": solution.gap, "peak_bytes": solution.peak_bytes}
    return {
        **{key: getattr(solution, key) for key in SAME},
        **{key: value if math.isfinite(value) else None for key, value in figures.items()},
        "proof": proof(solution),
        "interval_seconds": None if solution.interval is None else list(solution.interval),
        "overlapped": {**solution.overlapped, "gap": solution.objective_gap} if solution.overlapped else None,
        "mesh": {"shape": list(solution.mesh.shape), **solution.mesh.to_dict()},
        **{key: solution.counts.get(key) for key in ("nodes", "choices", "edges", "distinct_signatures")},
        "replicated_ops": list(solution.replicated_ops),
        "parameters": {name: row["layout"] for name, row in solution.parameters.items()},
        "cpu_seconds": solution.seconds.get("cpu", {}),
        "wall_seconds": solution.seconds.get("wall", {}),
        **({} if solution.pin_prices is None else {"pins": list(solution.pin_prices)}),
    }
