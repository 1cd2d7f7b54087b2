"""Two plans, or two launches, compared, as tables: their costs, the parameters with different layouts, and the seconds that differ."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from autoshard.graph import grouped
from autoshard.report.blocks import in_a_block, named
from autoshard.report.terminal import shown
from autoshard.report.values import ReportTable, numbers
from autoshard.solution import AnyPlan, Pipeline, ProgramsSolution, Solution, changes
from autoshard.units import seconds, size

MOST_ROWS = 20  # of a table; the rest is counted
LEAST_SHARE = 0.001  # of the cost: parts that differ by less are left out
LAUNCHED = {  # figures of a launch: keys of `check`
    "step_seconds": "seconds", "peak_bytes": "memory_bytes", "rate_per_device": "tokens_per_second_per_device",
    "chance_to_fit": "chance_to_fit",
}  # fmt: skip
FIGURES: dict[str, Callable[[float | None], str]] = {
    **dict.fromkeys(("cost_seconds", "bound_seconds", "step_seconds"), seconds), "peak_bytes": size,
    "rate_per_device": lambda rate: "-" if rate is None else f"{rate:.0f} tokens/s",
    "chance_to_fit": lambda chance: "-" if chance is None else f"{chance:.0%}",
}  # fmt: skip


def comparison(a: AnyPlan, b: AnyPlan) -> dict[str, Any]:
    """The differences of two plans, as `solution.changes`: of several programs those of each, of pipelines those of each stage.

    ValueError where they are of different kinds, or have other programs.
    """
    if isinstance(a, Solution) and isinstance(b, Solution):
        return changes(a, b)
    if isinstance(a, ProgramsSolution) and isinstance(b, ProgramsSolution):
        return _programs_changes(a, b)
    if isinstance(a, Pipeline) and isinstance(b, Pipeline):
        return _pipeline_changes(a, b)
    kinds = {Solution: "of one program", ProgramsSolution: "of several programs", Pipeline: "of stages"}
    said = " and the other ".join(kinds[type(plan)] for plan in (a, b))
    raise ValueError(f"one plan is {said}; give two of a kind, or name one of them as FILE#NAME")


def launches_compared(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Any]:
    """The differences of two launches, given as `check` has them: seconds, bytes, those by kind, and keys: of their launcher, or where
    they have two, degrees."""
    both = (a, b)

    def differing(key: str) -> dict[str, list]:
        x, y = a[key] or {}, b[key] or {}
        return {name: [x.get(name), y.get(name)] for name in {**x, **y} if x.get(name) != y.get(name)}

    keys = {name: [one[name] for one in both] for name in ("launcher", "devices", "parameters", "precision") if a[name] != b[name]}
    keys |= differing("settings" if a["launcher"] == b["launcher"] else "configuration")
    figures = {name: [one[key] for one in both] for name, key in LAUNCHED.items()}
    same = not keys and all(x == y for x, y in figures.values())
    reasons = {"reasons": [one["reasons"] for one in both]}
    return {"same": same, **figures, **reasons, "keys": keys, "seconds": differing("seconds_by_kind"), "bytes": differing("bytes_by_kind")}


def comparison_tables(record: Mapping[str, Any]) -> RenderableType:
    """The record of `comparison` for the terminal."""
    if "programs" in record:
        return _programs_report(record)
    return _pipeline_report(record) if "stages" in record else _changes_tables(record)


def _changes_tables(record: Mapping[str, Any]) -> RenderableType:
    """The record of `solution.changes` for the terminal, or of `launches_compared`."""
    differ = {what: {key: list(map(str, pair)) for key, pair in record.get(what, {}).items()} for what in ("keys", "assumptions")}
    reasons = [f"{which} is illegal: {reason}" for which, of in zip("ab", record.get("reasons", ())) for reason in of]
    return shown(
        _summary(record),
        *reasons,
        _layouts(record["parameters"]) if record.get("parameters") else None,
        _moved("Where the time moved", record["seconds"], seconds, record.get("step_seconds") or record["cost_seconds"]),
        _moved("Where the bytes moved", record.get("bytes", {}), size, record["peak_bytes"]),
        *(_pairs(f"{what.capitalize()} that differ", pairs) for what, pairs in differ.items() if pairs),
        f"{len(record['ops'])} other tensors have different layouts (--json lists them)" if record.get("ops") else None,
    )


def _summary(record: Mapping[str, Any]) -> ReportTable:
    rows: list[tuple[str, ...]] = []
    for key, say in FIGURES.items():
        if key in record:
            a, b = record[key]
            ratio = f"{b / a:.3g}x" if a and b is not None and a < float("inf") and b < float("inf") else "-"
            rows.append((key.split("_")[0], say(a), say(b), ratio))
    rows += [(key, *map(str, record[key]), "") for key in ("status", "schedule", "microbatches", "mesh") if key in record]
    return ReportTable("They are the same" if record["same"] else "", ("", *numbers("a", "b", "b to a")), rows)


def _layouts(pairs: Mapping[str, list]) -> ReportTable:
    """Blocks whose parameters changed alike are one row: `h.0 and 11 more`."""
    alike = grouped(((in_a_block(name), *pair), name) for name, pair in pairs.items())
    return _pairs("Parameters with different layouts", {named(names): [a, b] for (_, a, b), names in alike.items()})


def _pairs(title: str, pairs: Mapping[str, list]) -> ReportTable:
    rows = [(name, "-" if a is None else a, "-" if b is None else b) for name, (a, b) in list(pairs.items())[:MOST_ROWS]]
    if len(pairs) > MOST_ROWS:
        rows.append((f"and {len(pairs) - MOST_ROWS} more (--json lists them)", "", ""))
    return ReportTable(title, ("", "a", "b"), rows)


def _moved(title: str, parts: Mapping[str, list], say: Callable[[float], str], totals: Sequence[float | None]) -> ReportTable | None:
    """The parts that differ by LEAST_SHARE of a total or more, the largest differences first."""
    least = LEAST_SHARE * max(filter(None, totals), default=0.0)
    moved = [(name, a or 0.0, b or 0.0) for name, (a, b) in parts.items()]
    rows = [
        (name, say(a), say(b), ("+" if b > a else "-") + say(abs(b - a)))
        for name, a, b in sorted(moved, key=lambda row: (-abs(row[2] - row[1]), row[0]))
        if abs(b - a) >= least
    ]
    return ReportTable(title, ("", *numbers("a", "b", "b - a")), rows) if parts else None


def _programs_changes(a: ProgramsSolution, b: ProgramsSolution) -> dict[str, Any]:
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


def _programs_report(record: Mapping[str, Any]) -> RenderableType:
    """The record of programs for the terminal."""
    cost = " and ".join(map(seconds, record["cost_seconds"]))
    counts = " and ".join(str(len(names)) for names in record["copied"])
    of_each = [
        part
        for name, of_one in record["programs"].items()
        for part in ("", Text(f"program {name}", style="bold"), _changes_tables(of_one))
    ]  # fmt: skip
    return shown(f"per unit {cost}; copied parameters {counts}", *of_each)


def _pipeline_changes(a: Pipeline, b: Pipeline) -> dict[str, Any]:
    """Pairs of two pipelines; of each stage its layers, its devices, and the layouts of the parameters that differ."""
    pairs = {
        "cost_seconds": [a.seconds, b.seconds], "bound_seconds": [a.bound, b.bound], "peak_bytes": [a.peak_bytes, b.peak_bytes],
        "schedule": [a.schedule, b.schedule], "microbatches": [a.microbatches, b.microbatches],
    }  # fmt: skip
    stages = []
    for k in range(max(len(a.stages), len(b.stages))):
        both = [one.stages[k] if k < len(one.stages) else None for one in (a, b)]
        layers = [None if stage is None else [stage.first, stage.last, *stage.devices] for stage in both]
        layouts = [{} if stage is None else stage.parameters for stage in both]
        names = [name for name in dict.fromkeys([*layouts[0], *layouts[1]]) if layouts[0].get(name) != layouts[1].get(name)]
        stages.append({"layers": layers, "parameters": {name: [one.get(name) for one in layouts] for name in names}})
    return {"same": a.digest == b.digest and a.seconds == b.seconds, **pairs, "stages": stages}


def _pipeline_report(record: Mapping[str, Any]) -> RenderableType:
    """The record of pipelines for the terminal."""
    of_each: list[Any] = []
    for k, stage in enumerate(record["stages"]):
        counts = ["" if of is None else f"{len(of) - 2} device" + "s" * (len(of) > 3) for of in stage["layers"]]
        layers = [of and f"layers {of[0]}-{of[1] - 1} on {count}" for of, count in zip(stage["layers"], counts)]
        moved = {"": layers} if layers[0] != layers[1] else {}
        if moved or stage["parameters"]:
            of_each += ["", _pairs(f"Stage {k}", {**moved, **stage["parameters"]})]
    return shown(_summary(record), *of_each)
