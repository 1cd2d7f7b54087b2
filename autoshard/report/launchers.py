"""Launches as text and as a picture: `degrees` (a ranking with its regret) and `check --launcher` (one configuration)."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType

from autoshard.report.figures import blank, save, titled
from autoshard.report.terminal import shown
from autoshard.report.values import ReportTable, numbers
from autoshard.units import seconds, size

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMNS = ("dp", "shard", "tp", "cp", "ep", "pp", "schedule", "microbatch", "recompute")
TITLES = {"microbatch": "micro\nbatch"}
SHORT = {"Interleaved1F1B": "interleaved", "selective_op": "op", "selective_layer": "layer"}  # so that a row has 80 columns at most
DRAWN = 20_000  # launches in a picture: the best; more would be one blot


def degrees_table(answer: Any, top: int, apart: Mapping[str, Any] | None = None) -> RenderableType:
    """The best `top` launches, what was illegal, and the regret. apart: a row, with its seconds by kind."""
    ranked = answer.ranked
    fits, site = int(ranked.prices.fits.sum()), ranked.site
    best = ranked.launch(0)
    head = f"{ranked.launcher}: {len(ranked)} legal launches on {best.devices} {site.device}, {fits} likely to fit in {size(site.memory)}"
    model = (
        f"{ranked.sizes.parameters / 1e9:.3g}e9 parameters, {best.global_batch} sequences of {best.seq} tokens per step, {best.precision}"
    )
    illegal = ", ".join(f"{rule} {count}" for rule, count in ranked.illegal.items()) or "none"
    splits = f"illegal splits of the devices, of {ranked.splits}: {illegal}"
    lines: list[Any] = [head, model, f"MFU of {_peak(site.mfu_of)}", "", launches_table(ranked.rows(top)), ""]
    if apart is not None:
        lines += [seconds_table(f"Where the seconds of row {apart['row'] + 1} go", apart["seconds_by_kind"]), ""]
    shown_rows = ranked.rows(top)
    tight = f"! needs more than {size(site.usable)}, {site.usable / site.memory:.0%} of the memory" if any(r["tight"] for r in shown_rows) else None
    return shown(*lines, tight, splits, _regret(answer), f"{answer.cpu_seconds:.1f} CPU seconds")


def seconds_table(title: str, by_kind: Mapping[str, float]) -> ReportTable:
    """Of one step; kinds that take nothing are left out."""
    total = sum(by_kind.values())
    rows = [(kind, seconds(value), f"{value / total:.1%}") for kind, value in by_kind.items() if seconds(value) != seconds(0.0)]
    return ReportTable(title, numbers("", "time", "share"), [*rows, ("step", seconds(total), "")], "tight")


def _peak(of: Mapping[str, Any]) -> str:
    return f"the {of['dtype']} peak, {of['flops'] / 1e12:.0f} TFLOP/s"


def _regret(answer: Any) -> str | None:
    against = answer.against
    if against is None:
        return None
    first = answer.compared == 0
    at = "the first row" if first else f"row {answer.compared + 1}, the best without pipeline, context and expert parallelism"
    return (
        f"at a plan's prices, serial: a pass and update of {at}, as {against.scheme}, takes {seconds(against.cost)}; "
        f"no plan takes less than {seconds(against.bound)}: regret <= {against.regret:.1%}"
    )


def launches_table(launches: list[Mapping[str, Any]]) -> ReportTable:
    rows = []
    for row in launches:
        rates = (f"{row['tokens_per_second_per_device']:.0f}", f"{row['mfu']:.1%}", size(row["memory_bytes"]))
        chance = f"{row['chance_to_fit']:.0%}" + ("!" if row["tight"] else "")
        rows.append((*(SHORT.get(row[name], str(row[name])) for name in COLUMNS), *rates, chance))
    names = (TITLES.get(name, name) for name in COLUMNS)
    return ReportTable("", numbers(*names, "tokens\n/s", "MFU", "memory", "fits"), rows, "tight")


def launch_table(record: Mapping[str, Any], path: str) -> RenderableType:
    """One configuration: what it is, why it can't run, its rates, and the changes that gain most."""
    row = record["configuration"]
    degrees = ", ".join(f"{name} {row[name]}" for name in COLUMNS)
    model = f"{record['parameters'] / 1e9:.3g}e9 parameters on {record['devices']} devices, {record['precision']}"
    lines: list[Any] = [f"{path}: {model}", degrees]
    lines += [f"illegal: {reason}" for reason in record["reasons"]]
    if record["legal"]:
        tight = f", more than the {size(record['usable_bytes'])} that leave a margin" if record["memory_bytes"] > record["usable_bytes"] else ""
        lines.append(f"memory {size(record['memory_bytes'])} per device{tight}; fits with a chance of {record['chance_to_fit']:.0%}")
        low, high = record["tokens_per_second_per_device_interval"]
        rate, mfu = record["tokens_per_second_per_device"], record["mfu_interval"]
        lines.append(f"{rate:.0f} tokens/s per device ({low:.0f} to {high:.0f}), {seconds(record['seconds'])} per step")
        lines.append(f"MFU {record['mfu']:.1%} ({mfu[0]:.1%} to {mfu[1]:.1%}) of {_peak(record['mfu_of'])}")
        lines += ["", seconds_table("Where the seconds go", record["seconds_by_kind"]), ""]
    for change in record["changes"]:
        gain = f"{change['gain']:+.1%}" if math.isfinite(change["gain"]) else "fits"
        rate = change["tokens_per_second_per_device"]
        lines.append(f"{gain}: {change['change']} ({rate:.0f} tokens/s per device, {size(change['memory_bytes'])})")
    return shown(*lines)


def fits_table(record: Mapping[str, Any], path: str) -> RenderableType:
    """Will it fit: the verdict, the bytes by stage and kind, the largest microbatch, what makes it fit."""
    row = record["configuration"]
    degrees = ", ".join(f"{name} {row[name]}" for name in COLUMNS)
    model = f"{record['parameters'] / 1e9:.3g}e9 parameters on {record['devices']} devices, {record['precision']}"
    lines: list[Any] = [f"{path}: {model}, {record['launcher']}", f"{degrees}; {record['global_batch']} sequences of {record['seq']} tokens"]
    lines += [f"illegal: {reason}" for reason in record["reasons"]]
    if (fullest := record["fullest"]) is not None:
        at = "" if fullest["stage"] == "all" else f", on the {fullest['stage']} stage"
        need = f"{size(fullest['device_bytes'])} of {size(record['memory_bytes'])}"
        lines.append(f"{record['verdict']}: fits with a chance of {record['chance_to_fit']:.0%}; needs {need} {WHEN[fullest['moment']]}{at}")
        if record["bias"] != 1:
            lines.append(f"own runs needed {record['bias'] - 1:+.1%}; that is counted in")
        lines += ["", _bytes_table(record["stages"]), ""]
        largest = record["largest_microbatch"]
        lines.append("no microbatch surely fits" if largest is None else f"the largest microbatch that surely fits: {largest} sequences")
    for change in record["changes"]:
        to = f"{size(change['device_bytes'])}, chance {change['chance_to_fit']:.0%}"
        lines.append(f"fits with {change['change']} ({to}), {_price(change['price_seconds'])} per step of {seconds(record['seconds'])}")
    if (seen := record.get("observed")) is not None:
        off = seen["measured_bytes"] / seen["predicted_bytes"] - 1
        lines.append(f"{seen['what']}: {size(seen['measured_bytes'])} {seen['figure']}, predicted {size(seen['predicted_bytes'])} ({off:+.1%})")
        kinds = [(k["kind"], size(k["predicted_bytes"]), size(k["measured_bytes"])) for k in seen["by_kind"]]
        lines += [ReportTable("", numbers("", "predicted", "measured"), kinds, "tight")] if kinds else []
    return shown(*lines)


WHEN = {"loss": "while the loss is computed", "backward": "in the backward of a block", "update": "while parameters are updated"}


def _price(change: float) -> str:
    return f"{'+' if change >= 0 else '-'}{seconds(abs(change))}"


def _bytes_table(stages: list[Mapping[str, Any]]) -> ReportTable:
    """A column per stage, at its own peak."""
    kinds = [kind for kind in stages[0]["bytes_by_kind"] if any(stage["bytes_by_kind"][kind] for stage in stages)]
    rows = [(kind, *(size(stage["bytes_by_kind"][kind]) for stage in stages)) for kind in kinds]
    for name in ("allocated", "reserved", "device"):
        rows.append((name if name != "device" else "with contexts", *(size(stage[f"{name}_bytes"]) for stage in stages)))
    titles = [stage["moment"] if stage["stage"] == "all" else f"{stage['stage']}\n{stage['moment']}" for stage in stages]
    return ReportTable("", numbers("", *titles), rows, "tight")


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
    axes.axvline(
        ranked.site.memory / 1e9, color="#9c9c9c", linestyle="--", linewidth=1, label=f"{ranked.site.device}: {size(ranked.site.memory)}"
    )
    axes.set(xlabel="memory per device (GB)", ylabel="seconds per step")
    best = ranked.launch(0)
    axes.legend(frameon=False, fontsize=8)
    titled(axes, f"{ranked.launcher} on {best.devices} {ranked.site.device}: {seconds(float(p.seconds[0]))} at best")
    return figure
