"""Launches as text and as a picture: `degrees` (a ranking with its regret) and `check --launcher` (one configuration)."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType

from autoshard.report.figures import blank, save, titled
from autoshard.report.terminal import shown
from autoshard.report.values import ReportTable, TableRow, numbers
from autoshard.units import seconds, size

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# columns of a table of launches, with what goes without saying. Those in which no rows differ are said once
COLUMNS = {
    "dp": "", "tp": "", "cp": "1", "a2a": "1", "ep": "1", "etp": "tp", "over\nlap": "no", "deep\nEP": "no", "pp": "", "sche\ndule": "-",
    "lay\ners": "even", "passes": "1", "mbs": "", "re\ncomp": "", "zero": "", "gath\ner8": "no", "shard": "all",
}  # fmt: skip
ALWAYS = ("dp", "tp", "pp", "mbs")
SHORT = {"Interleaved1F1B": "VPP", "ZBVZeroBubble": "ZBV", "selective_op": "op", "selective_layer": "layer", "none": "-"}
DRAWN = 20_000  # launches in a picture: the best; more would be one blot


def degrees_table(answer: Any, top: int, apart: Mapping[str, Any] | None = None) -> RenderableType:
    """The best `top` launches, what was illegal, and the regret. apart: a row, with its seconds by kind."""
    head, table, notes = ranked_launches(answer, top)
    lines = [*head, "", table, *notes[:1], "", *notes[1:2]]
    if apart is not None:
        lines += ["", kinds_table(f"Where the seconds and the bytes of row {apart['row'] + 1} go", apart), ""]
    return shown(*lines, *notes[2:], f"{answer.cpu_seconds:.1f} CPU seconds")


def ranked_launches(answer: Any, top: int) -> tuple[list[str], ReportTable, list[str | None]]:
    """What is said before the table of the best `top` launches, the table, and what is said after it."""
    ranked = answer.ranked
    fits, site = int(ranked.prices.fits.sum()), ranked.site
    best, grouped = ranked.launch(0), ranked.grouped(top)
    rows = ranked.rows_at([row for row, _ in grouped])
    head = f"{ranked.launcher}: {len(ranked)} legal launches on {best.devices} {site.device}, {fits} likely to fit in {size(site.memory)}"
    batch = f"{_count(best.global_batch, 'sequence')} of {best.seq} tokens per step"
    model = f"{_parameters(ranked.sizes.parameters)}, {batch}, {best.precision}"
    low, high = (rate / rows[0]["tokens_per_second_per_device"] - 1 for rate in rows[0]["tokens_per_second_per_device_interval"])
    rates = f"tokens/s are of one GPU: four of five measured runs were {-low:.0%} slower to {high:.0%} faster"
    first = "" if ranked.simplest == 0 else "The first row is the simplest launch within 2 % of the fastest, which is number 1. "
    alike = "mbs: sequences of a microbatch; same: how many launches a row stands for, with the same work shared by other ranks"
    illegal = ", ".join(f"{rule} {count}" for rule, count in ranked.illegal.items()) or "none"
    splits = f"illegal splits of the devices, of {ranked.splits}: {illegal}"
    margin = f"! needs more than {size(site.usable)}, {site.usable / site.memory:.0%} of the memory"
    tight = margin if any(row["tight"] for row in rows) else None
    table, peak = launches_table(rows, grouped), f"MFU of {peak_text(site.mfu_of, max(row['mfu'] for row in rows))}"
    return [head, model, rates, peak], table, [of_all(rows), first + alike, tight, splits, _regret(answer)]


def kinds_table(title: str, record: Mapping[str, Any]) -> ReportTable:
    """The seconds of a step, and beside them the bytes of a device; kinds that take nothing are left out."""
    total, held = sum(record["seconds_by_kind"].values()), sum(record["bytes_by_kind"].values())
    times = [(kind, seconds(value), f"{value / total:.1%}") for kind, value in record["seconds_by_kind"].items() if value > 1e-9 * total]
    bytes = [(kind, size(value)) for kind, value in record["bytes_by_kind"].items() if value > 0]
    rows = [(*time, *of[:2]) for time, of in zip_longest(times, bytes, fillvalue=("", "", ""))]
    rows.append(("step", seconds(total), "", "device", size(held)))
    return ReportTable(title, numbers("", "time", "share", "", "memory"), rows, "tight")


def peak_text(of: Mapping[str, Any], mfu: float = 0.0) -> str:
    masked = ", the masked half of attention counted as computed" * (mfu > 1)
    return f"the {of['dtype']} peak, {of['flops'] / 1e12:.0f} TFLOP/s{masked}"


def _regret(answer: Any) -> str | None:
    against = answer.against
    if against is None:
        return None
    first = answer.compared == 0
    at = "number 1" if first else f"number {answer.compared + 1}, the best without pipeline, context and expert parallelism,"
    return (
        f"What the launcher's restriction costs: at a plan's prices, where nothing is hidden, launch {at} as {against.scheme} takes "
        f"{seconds(against.cost)} for one pass and the update, and no plan takes less than {seconds(against.bound)}, so the regret is at "
        f"most {against.regret:.1%}."
    )


def _cells(row: Mapping[str, Any]) -> dict[str, str]:
    """By column. VPP4: interleaved, 4 stages per device; layers `ends`: token table and head count as a layer each; overlap: experts'
    traffic runs beside compute."""
    schedule, stages = SHORT.get(row["schedule"], row["schedule"]), row["vpp"]
    cells = (
        row["dp"], row["tp"], row["cp"], row["a2a"], row["ep"], "tp" if row["etp"] == row["tp"] else row["etp"],
        "yes" if row["async_expert"] else "no", "yes" if row["deepep"] else "no", row["pp"],
        f"{schedule}{stages}" if schedule == "VPP" else schedule, in_short(row["split"]) or "even",
        row["passes"], row["microbatch"], SHORT.get(row["recompute"], row["recompute"]),
        row["zero"], "yes" if row["gather8"] else "no",
        "all" if row["shard"] == row["dp"] or not row["zero"] else row["shard"],
    )  # fmt: skip
    return dict(zip(COLUMNS, map(str, cells)))


def of_all(launches: Sequence[Mapping[str, Any]]) -> str | None:
    """What all of them have, in columns that the table leaves out."""
    first, *others = map(_cells, launches)
    same = [name for name in COLUMNS if name not in ALWAYS and all(row[name] == first[name] for row in others)]
    said = ", ".join(f"{name} {first[name]}".replace("\n", "") for name in same if first[name] not in (COLUMNS[name], "-"))
    return f"all rows: {said}" if said else None


def degrees_text(row: Mapping[str, Any]) -> str:
    said = _cells(row) | {"re\ncomp": row["recompute"], "sche\ndule": row["schedule"]}
    return ", ".join(f"{name} {said[name]}".replace("\n", "") for name in COLUMNS if said[name] != COLUMNS[name])


def launches_table(launches: Sequence[Mapping[str, Any]], numbered: Sequence[tuple[int, int]]) -> ReportTable:
    """numbered: of each its place, from 0, and how many it stands for."""
    cells = [_cells(row) for row in launches]
    names = [name for name in COLUMNS if name in ALWAYS or len({row[name] for row in cells}) > 1]
    rows = []
    for row, texts, (place, alike) in zip(launches, cells, numbered, strict=True):
        rates = [f"{row['tokens_per_second_per_device']:.0f}", f"{row['mfu']:.1%}", size(row["memory_bytes"])]
        rates.append(f"{100 * row['chance_to_fit']:.0f}" + "!" * row["tight"])
        rows.append([str(place + 1), *(texts[name] for name in names), *rates, str(alike)])
    return ReportTable("", numbers("", *names, "tok/s\nGPU", "MFU", "memory", "fit\n%", "same"), rows, "tight")


def launch_table(record: Mapping[str, Any], path: str, *more: ReportTable, compared: bool = False) -> RenderableType:
    """One configuration: what it is, why it can't run, its rates, more tables, and the changes that gain most. compared: with all launches
    of its devices."""
    lines = _launch_lines(record, path)
    if record["legal"]:
        is_tight = record["memory_bytes"] > record["usable_bytes"]
        tight = f", more than the {size(record['usable_bytes'])} that leave a margin" if is_tight else ""
        lines.append(f"memory {size(record['memory_bytes'])} per device{tight}; fits with a chance of {record['chance_to_fit']:.0%}")
        lines.append(f"{seconds(record['seconds'])} per step, {_rate(record)}")
        lines.append(f"MFU {record['mfu']:.1%} ({_range(record['mfu_interval'], '.1%')}) of {peak_text(record['mfu_of'], record['mfu'])}")
        lines += [f"what a step waits for: {limits_text(record['limits'])}", published_text(record["published"])]
        lines += [kinds_table("Where the seconds and the bytes go", record), "", *(part for table in more for part in (table, ""))]
    lines += ["at the same global batch:"] * bool(record["changes"])
    if compared and not record["changes"]:
        lines.append(f"no launch of these devices at this global batch {'is faster and ' if record['fits'] else ''}fits")
    for change in record["changes"]:
        lines.append(f"{gain_text(change)}: {in_short(change['change'])}")
        memory = f"{size(change['memory_bytes'])}, chance to fit {change['chance_to_fit']:.0%}"
        lines.append(f"    {seconds(change['seconds'])} per step, {_rate(change)}, {memory}")
        lines += [f"    {why_text(change[key], say)}" for key, say in WHY if change[key]]
    return shown(*lines)


def _launch_lines(record: Mapping[str, Any], path: str) -> list[Any]:
    """What is launched, and why it can't be."""
    model = f"{_parameters(record['parameters'])} on {_count(record['devices'], 'device')}, {record['precision']}, {record['launcher']}"
    batch = f"global batch {_count(record['global_batch'], 'sequence')} of {record['seq']} tokens"
    reasons = [f"{what}: {why}" for what, key in (("illegal", "reasons"), ("not counted", "not_counted")) for why in record[key]]
    return [f"{path}: {model}", f"{degrees_text(record['configuration'])}; {batch}", *reasons]


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def _parameters(number: float) -> str:
    """`70.6e9 parameters`."""
    power = 3 * max(int(math.log10(number)) // 3, 1)
    return f"{number / 10**power:.3g}e{power} parameters"


def in_short(layers: str) -> str:
    """1,2,2,2,0 as 1,2x3,0: layers of stages, alone or in a sentence."""
    return re.sub(r"\b(\d+)(?:,\1\b){2,}", lambda same: f"{same[1]}x{same[0].count(',') + 1}", layers)


def gain_text(change: Mapping[str, Any]) -> str:
    return f"{change['gain']:+.1%}" if math.isfinite(change["gain"]) else "fits"


def sensitivity_table(record: Mapping[str, Any]) -> ReportTable:
    """What a step would take with other links and microbatches."""
    of = [{**record, "what": "as it is", "change": 0.0}, *record["sensitivity"]]
    longest = max(row["seconds"] for row in of)
    rows = []
    for row in of:
        more = "" if row is of[0] else f"{row['change']:+.1%}"
        cells = (row["what"], seconds(row["seconds"]), more, size(row["memory_bytes"]), f"{row['chance_to_fit']:.0%}")
        rows.append(TableRow(cells, kind="compute", share=100 * row["seconds"] / longest, strong=row is of[0]))
    return ReportTable("What a step depends on", ("with", *numbers("step", "change", "memory", "fits")), rows, "tight")


def limits_text(limits: Mapping[str, float]) -> str:
    return ", ".join(f"{kind} {share:.0%}" for kind, share in limits.items() if share >= 0.03)


def published_text(run: Mapping[str, Any]) -> str:
    """The nearest published run: what was measured, and what is predicted of it."""
    measured, predicted = run["tokens_per_second_per_device"], run["predicted"]
    what = f"{run['model']} on {run['devices']} {run['device']}, {run['precision']}, {degrees_text(run['configuration'])}"
    rates = f"{measured:.0f} tokens/s per GPU measured, {predicted:.0f} predicted ({predicted / measured - 1:+.0%})"
    return f"nearest published run: {what}: {rates}; {run['source']}"


def fits_table(record: Mapping[str, Any], path: str) -> RenderableType:
    """Will it fit: the verdict, the bytes by stage and kind, the largest microbatch, what makes it fit."""
    lines = _launch_lines(record, path)
    if (fullest := record["fullest"]) is not None:
        at = "" if fullest["stage"] == "all" else f", on the {fullest['stage']} stage"
        need = f"{size(fullest['device_bytes'])} of {size(record['device_memory_bytes'])}"
        chance = f"{record['verdict']}: fits with a chance of {record['chance_to_fit']:.0%}"
        lines.append(f"{chance}; needs {need} {WHEN[fullest['moment']]}{at}")
        if record["bias"] != 1:
            lines.append(f"own runs needed {record['bias'] - 1:+.1%}; that is counted in")
        lines += ["", bytes_table(record["stages"]), ""]
        largest = record["largest_microbatch"]
        surely = f"the largest microbatch that surely fits: {_count(largest, 'sequence')}"
        lines.append("no microbatch surely fits" if largest is None else surely)
    for change in record["changes"]:
        to = f"{size(change['device_bytes'])}, chance {change['chance_to_fit']:.0%}"
        what = in_short(change["change"])
        lines.append(f"fits with {what} ({to}), {_price(change['price_seconds'])} per step of {seconds(record['seconds'])}")
        lines.append(f"    {why_text(change['why_bytes'], size)}")
    if (seen := record.get("observed")) is not None:
        off = seen["measured_bytes"] / seen["predicted_bytes"] - 1
        measured, predicted = size(seen["measured_bytes"]), size(seen["predicted_bytes"])
        lines.append(f"{seen['what']}: {measured} {seen['figure']}, predicted {predicted} ({off:+.1%})")
        kinds = [(k["kind"], size(k["predicted_bytes"]), size(k["measured_bytes"])) for k in seen["by_kind"]]
        lines += [ReportTable("", numbers("", "predicted", "measured"), kinds, "tight")] if kinds else []
    return shown(*lines)


WHEN = {"loss": "while the loss is computed", "backward": "in the backward of a block", "update": "while parameters are updated"}


def _price(change: float) -> str:
    return f"{'+' if change >= 0 else '-'}{seconds(abs(change))}"


def bytes_table(stages: list[Mapping[str, Any]]) -> ReportTable:
    """A column per stage, at its own peak."""
    kinds = [kind for kind in stages[0]["bytes_by_kind"] if any(stage["bytes_by_kind"][kind] for stage in stages)]
    rows = [(kind, *(size(stage["bytes_by_kind"][kind]) for stage in stages)) for kind in kinds]
    for name in ("allocated", "reserved", "device"):
        rows.append((name if name != "device" else "with contexts", *(size(stage[f"{name}_bytes"]) for stage in stages)))
    titles = [stage["moment"] if stage["stage"] == "all" else f"{stage['stage']}\n{stage['moment']}" for stage in stages]
    return ReportTable("", numbers("", *titles), rows, "tight")


def why_text(why: Mapping[str, float], say: Callable[[float], str]) -> str:
    """`bubble -0.41 s, data parallel +0.12 s`: the largest differences, down to a fiftieth of the first."""
    largest = max(map(abs, why.values()), default=0.0)
    parts = [f"{kind} {'-' if more < 0 else '+'}{say(abs(more))}" for kind, more in why.items() if abs(more) >= largest / 50 > 0]
    return ", ".join(parts[:4]) or f"the same {'seconds' if say is seconds else 'bytes'}"


WHY = (("why", seconds), ("why_bytes", size))  # keys of a change: differences by kind


def _rate(record: Mapping[str, Any]) -> str:
    rates = _range(record["tokens_per_second_per_device_interval"], ".0f")
    return f"{record['tokens_per_second_per_device']:.0f} tokens/s per GPU ({rates})"


def _range(both: Sequence[float], form: str) -> str:
    return f"{both[0]:{form}} to {both[1]:{form}}"


def draw(answer: Any, path: str | os.PathLike[str]) -> None:
    """Memory against seconds per step of the launches; the format by the file's ending."""
    save(plot(answer), path, dpi=130, bbox_inches="tight")


def plot(answer: Any) -> Figure:
    ranked = answer.ranked
    p, pipeline = ranked.prices, ranked.columns.pipeline
    memory, times = p.bytes[:DRAWN] / 1e9, p.seconds[:DRAWN]
    figure = blank(8, 5)
    axes = figure.subplots()
    for label, color, chosen in (("without pipeline", "#4c78a8", pipeline == 1), ("with pipeline", "#f58518", pipeline > 1)):
        axes.loglog(memory[chosen[:DRAWN]], times[chosen[:DRAWN]], ".", color=color, label=label, markersize=4)
    axes.loglog(memory[:1], times[:1], "o", color="#2a6f3e", label="the best that fits" if p.fits[0] else "the fastest", zorder=3)
    device = f"{ranked.site.device}: {size(ranked.site.memory)}"
    axes.axvline(ranked.site.memory / 1e9, color="#9c9c9c", linestyle="--", linewidth=1, label=device)
    axes.set(xlabel="memory per device (GB)", ylabel="seconds per step")
    best = ranked.launch(0)
    axes.legend(frameon=False, fontsize=8)
    titled(axes, f"{ranked.launcher} on {best.devices} {ranked.site.device}: {seconds(float(p.seconds[0]))} at best")
    return figure
