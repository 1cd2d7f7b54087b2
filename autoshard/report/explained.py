"""The answers of `explain` and `check`: a layout and its alternatives, errors of prices, ranges of bandwidths, what has changed."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import RenderableType

from autoshard.mesh import shape_text
from autoshard.report.plan_tables import interval_words, prices_table
from autoshard.report.terminal import shown, spaced
from autoshard.report.values import Number, ReportTable, numbers
from autoshard.solution import Solution
from autoshard.units import hundredths, seconds, size

MOST_EDGES = 6  # in the table of costs
MOST_REASONS = 3  # edges or ops per alternative
MOST_NAMES = 6  # that change elsewhere
COMPARED = ("as planned", "then", Number("time"))  # columns


def explained(record: Mapping[str, Any]) -> RenderableType:
    """The subject, what it costs, other layouts and why they are more expensive, and the layout that was asked about."""
    others = [_alternatives(record), _reasons(record["alternatives"])] if record["alternatives"] else []
    asked = [_why_not(record)] if record["why_not"] else []
    return spaced(_header(record), _costs(record), *others, *asked)


def _header(record: Mapping[str, Any]) -> ReportTable:
    what = f"{shape_text(record['shape'])} {record['dtype']}" if record["shape"] is not None else ""
    where = [record["target"], what, f"of {record['module']}" if record["module"] else ""] if record["kind"] == "op" else [what]
    total, planned = record["seconds"] + record["edge_seconds"], record["planned_seconds"] or 0.0
    itself = f"{seconds(record['seconds'])} itself, {seconds(record['edge_seconds'])} moving it"
    held = ", ".join(f"{kind.replace('_', ' ')} {size(held)}" for kind, held in record["bytes"].items())
    rows = [
        (record["name"], " ".join(filter(None, [record["kind"], *where]))),
        ("layout", record["layout"]),
        ("parameters", ", ".join(f"{name} {layout}" for name, layout in record["parameters"].items())),
        ("costs", f"{itself}; {hundredths(total / record['cost_seconds'])}% of the plan's {seconds(record['cost_seconds'])}"),
        ("holds", f"{held} per device" if held else "nothing of its own"),
    ]
    if planned and abs(record["cost_seconds"] / planned - 1) > 1e-6:
        rows.append(("", f"the plan says {seconds(planned)}: model, sizes or rules are not those of then"))
    return ReportTable("", ("", ""), [row for row in rows if row[1]], "pairs")


def _costs(record: Mapping[str, Any]) -> ReportTable | None:
    """The edges that cost something, and of a block also its most expensive ops."""
    terms = [edge for edge in record["edges"] if edge["seconds"]]
    if record["kind"] == "block":
        terms = sorted([*terms, *record["parts"]], key=lambda term: -term["seconds"])
    rows = [(_name(term), *_ends(term), ", ".join(term["steps"]), seconds(term["seconds"])) for term in terms[:MOST_EDGES]]
    if rest := terms[MOST_EDGES:]:
        rows.append((f"and {len(rest)} more (--json lists them)", "", "", "", seconds(sum(term["seconds"] for term in rest))))
    return ReportTable("What it costs", ("", "from", "to", "by", Number("time")), rows) if rows else None


def _alternatives(record: Mapping[str, Any]) -> ReportTable:
    rows, planned = [], record["step_seconds"]
    simulated = ["its time line"] if planned is not None else []
    for one in record["alternatives"]:
        if one["reason"]:
            rows.append((one["label"], "impossible", "impossible", *["" for _ in simulated], "", one["reason"]))
            continue
        step = [] if planned is None else [_more(one["step_seconds"] - planned)]
        local = "impossible" if one["local_reason"] else _more(one["local_extra_seconds"])
        extra = _share(one, record) + ("" if one["proven"] else ", or less")
        changes = len(one["changed"]) + len(one["changed_ops"])
        said = f"{changes} tensor{'s' if changes > 1 else ''}" if changes else "nothing"
        rows.append((one["label"], extra, local, *step, size(one["peak_bytes"]), said))
    for label, floor in record["left_out"].items():
        least = "impossible" if floor is None else f"{_more(floor - record['cost_seconds'])} or more"
        rows.append((label, least, "", *["" for _ in simulated], "", ""))
    title = "This block alone by another scheme" if record["kind"] == "block" else "Other layouts"
    return ReportTable(title, ("", *numbers("the rest anew", "the rest as it is", *simulated, "peak"), "changes elsewhere"), rows)


def _share(one: Mapping[str, Any], record: Mapping[str, Any]) -> str:
    share = one["extra_seconds"] / record["cost_seconds"]
    return _more(one["extra_seconds"]) + (f" ({hundredths(share, '+')}%)" if share else "")


def _more(extra: float) -> str:
    return "0" if extra == 0 else ("+" if extra > 0 else "-") + seconds(abs(extra))


def _reasons(alternatives: Sequence[Mapping[str, Any]]) -> ReportTable | None:
    """What is more expensive under each alternative, with all other layouts planned anew."""
    rows = []
    for one in alternatives:
        for k, row in enumerate(one["dearer"][:MOST_REASONS]):
            rows.append((one["label"] if k == 0 else "", *_compared(row)))
    return ReportTable("What is more expensive then", ("", "where", *COMPARED), rows) if rows else None


def _compared(row: Mapping[str, Any]) -> tuple[str, str, str, str]:
    before, after = row["before"], row["after"]
    return _name(row), _path(before), _path(after), f"{seconds(before['seconds'])} to {seconds(after['seconds'])}"


def _why_not(record: Mapping[str, Any]) -> RenderableType:
    one = record["why_not"]
    title = f"Why not {one['label']}?"
    if one["reason"]:
        return shown(ReportTable(title, ("", ""), [("impossible", one["reason"])], "pairs"))
    proof = "" if one["proven"] else f", and at least {seconds(one['bound_seconds'])}"
    changed = [f"{name} {before} to {after}" for name, (before, after) in one["changed"].items()]
    rows = [("for", _named(list(one["pins"])))] if len(one["pins"]) > 1 else []
    rows += [
        ("the rest anew", f"{_share(one, record)}: {seconds(one['cost_seconds'])}{proof}; {size(one['peak_bytes'])} at the peak"),
        ("the rest as it is", f"impossible: {one['local_reason']}" if one["local_reason"] else _more(one["local_extra_seconds"])),
        ("its time line", "" if one["step_seconds"] is None else _more(one["step_seconds"] - record["step_seconds"])),
        ("changes elsewhere", _named([*changed, *one["changed_ops"]]) or "nothing"),
        ("in all", f"{seconds(one['dearer_seconds'])} more expensive, {seconds(-one['cheaper_seconds'])} cheaper"),
    ]
    reasons = [_compared(row) for row in [*one["dearer"][:MOST_REASONS], *one["cheaper"][:MOST_REASONS]]]
    said = ReportTable(title, ("", ""), [row for row in rows if row[1]], "pairs")
    return shown(said, ReportTable("", ("", *COMPARED), reasons) if reasons else None)


def _named(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_NAMES} more (--json lists them)" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more


def _name(row: Mapping[str, Any]) -> str:
    """`gradient of wte.weight`, `wte.weight -> embedding`, an op by its name."""
    source, _, reader = row["name"].partition(" -> ")
    ends = (source.removesuffix(" (hub)"), reader.removesuffix(" (hub)"))
    if row["kind"] == "copy":
        return f"{source}, for its readers"
    if row["kind"] in ("gradient", "buffer"):
        return f"{row['kind']} of {reader}"
    name = " -> ".join(filter(None, (end.removesuffix(".0") if end != full else end for end, full in zip(ends, (source, reader)))))
    return name + (f" of {row['module']}" if row["kind"] == "op" and row["module"] else "")


def _ends(row: Mapping[str, Any]) -> tuple[str, str]:
    return " ".join(dict.fromkeys(row["takes"])), " ".join(dict.fromkeys(row["gives"]))


def _path(row: Mapping[str, Any]) -> str:
    """`S(0),R to R,R`, or one layout where both ends have it."""
    inputs, outputs = _ends(row)
    return outputs if inputs in ("", outputs) else f"{inputs} to {outputs}"


def check_table(record: Mapping[str, Any], sentence: str) -> RenderableType:
    """The record of `check`, and its sentence."""
    best = f"{seconds(record['best_seconds'])} now, and " if record["best_seconds"] is not None else ""
    limit = f"; the limit is {size(record['memory_limit'])}" if record["memory_limit"] is not None else ""
    rows = [
        ("plan", sentence),
        *(("" if k else "changed since", note) for k, note in enumerate(record["notes"])),
        ("cost now", f"{seconds(record['cost_seconds'])}; {seconds(record['planned_seconds'])} when it was planned"),
        ("the best", f"{best}none below {seconds(record['bound_seconds'])}" if record["bound_seconds"] else "not known"),
        ("memory", f"{size(record['peak_bytes'])} per device at the peak{limit}"),
    ]
    return shown(ReportTable("", ("", ""), rows, "pairs"))


def sums_report(solution: Solution) -> RenderableType:
    """What the seconds of an explanation are, for a plan of the shortest time line."""
    least = f"of which the plan takes {seconds(solution.cost)} and no plan less than {seconds(solution.bound)}"
    overlapped = f"with overlap, which it was planned for, it takes {seconds(solution.objective_seconds)}"
    return shown("", f"These seconds are sums of all tasks, one after the other, {least}; {overlapped}.")


def prices_report(solution: Solution) -> RenderableType:
    """What the predicted seconds are made of, and between which seconds they are."""
    if solution.interval is None:
        return shown("nothing is known about what this plan's seconds are made of; plan again")
    interval = interval_words(solution, "if every price is off in one direction")
    alone = f"{seconds(solution.cost)} one task after the other; " if solution.overlapped else ""
    overlapped = " overlapped" if alone else ""
    return shown(prices_table(solution), f"{alone}{seconds(solution.objective_seconds)}{overlapped}, {interval}")


def robustness_table(record: Mapping) -> RenderableType:
    """Per link the range, then the regret at the bandwidths probed outside it."""
    ranges, regrets = [], []
    for link in record["links"]:
        name, (least, most) = ", ".join(link["axes"]), link["searched"]
        low = f"{size(link['low'])}/s" if link["low"] is not None else f"below {size(least)}/s"
        high = f"{size(link['high'])}/s" if link["high"] is not None else f"above {size(most)}/s"
        ranges.append((name, f"{size(link['bandwidth'])}/s", low, high, seconds(link["seconds"]), "yes" if link["proven"] else "no"))
        for row in link["regret"]:
            lost = f"{100 * row['regret']:.3g}%" if row["regret"] < 1 else f"{row['regret'] + 1:.3g}x"
            regrets.append((name, f"{size(row['bandwidth'])}/s", seconds(row["plan_seconds"]), seconds(row["best_seconds"]), lost))
    slack, times = record["slack"], f"{record['span']:g}"
    best = "best" if slack <= 1e-5 else f"within {100 * slack:.3g}% of the best"
    columns = ("link", *numbers("planned with", "from", "to", "its bytes take"), "proven")
    table = ReportTable(f"Where the plan stays {best}", columns, ranges)
    said = f"searched from 1/{times} to {times} times each bandwidth, one link at a time; {seconds(record['cost_seconds'])} as planned"
    if abs(record["planned_seconds"] / record["cost_seconds"] - 1) > 1e-6:
        said += f", but it says {seconds(record['planned_seconds'])}: model, sizes or rules are not those of then"
    if record["regret"] > max(slack, 1e-5):
        said += f"; a plan {hundredths(record['regret'])}% faster was found at these very prices: plan again"
    outside = ReportTable("Outside", ("link", *numbers("bandwidth", "this plan", "the best there", "regret")), regrets)
    return shown(table, said, "" if regrets else None, outside if regrets else None)
