"""Fitted curves, measured clusters and presets of prices as tables; fits against their measurements as a figure."""

from collections.abc import Mapping, Sequence

from rich.console import RenderableType

from autoshard.report.figures import blank, save
from autoshard.report.terminal import shown
from autoshard.report.values import Number, ReportTable, numbers
from autoshard.units import seconds, size

COLOURS = ("#1b6ca8", "#d1495b", "#3c9d5d", "#edae49", "#66518c", "#00798c", "#8d6a4f", "#5c5c5c")
FEW = 8  # curves of one collective drawn


def errors_table(curves: Sequence[Mapping], by_collective: Sequence[Mapping]) -> RenderableType:
    """Errors of each curve, and of each collective over the points of all its curves, in percent."""
    of_each = _errors("Curves", ("collective", "system", "devices", "dtype", "sizes"), curves)
    said = "GMAE / mean / std of |predicted / measured - 1|, percent; held out: sizes that the curve had not seen (3 folds)"
    return shown(*((of_each, "") if curves else ()), _errors("By collective", ("collective", "curves"), by_collective), said)


def _errors(title: str, what: Sequence[str], rows: Sequence[Mapping]) -> ReportTable:
    cells = [(*(str(row.get(column, "")) for column in what), _three(row), _three(row["held_out"])) for row in rows]
    return ReportTable(title, (*what, *numbers("in sample", "held out")), cells)


def _three(errors: Mapping) -> str:
    values = [errors.get(key) for key in ("gmae", "mean", "std")]
    return " / ".join("-" if v is None or v != v else f"{100 * v:.2f}" for v in values)


def cluster_table(record: Mapping) -> RenderableType:
    """A measured cluster: links, curves, device."""
    links = []
    for axis in record["mesh"]["axes"]:
        for curve in axis.get("curves", ()):
            at = [seconds(_at(curve, x)) for x in (64e3, 1e6, 16e6)]
            known = str(len(curve["sizes"])), f"{100 * curve['error']:.1f}%"
            links.append((axis["name"], str(axis["size"]), curve["collective"], *at, *known))
    ops = []
    for row in record["roofline"]["ops"]:
        rate = row["flops_per_second"]
        ops.append((row["op"], row["dtype"], "-" if rate is None else f"{rate:.3g}", f"{100 * row['mean']:.1f}%"))
    memory, launch = record["roofline"]["memory_bytes_per_second"], record["roofline"]["launch_seconds"]
    end = "" if record["complete"] else "; interrupted: larger sizes may be missing"
    columns = ("axis", Number("devices"), "collective", *numbers("64 kB", "1 MB", "16 MB", "sizes", "error"))
    device = ReportTable("Device", ("op", "dtype", *numbers("FLOP/s", "error")), ops)
    of_links = (ReportTable("Links", columns, links), "") if links else ()
    return shown(*of_links, device, f"memory {size(memory)}/s, launch {seconds(launch)}{end}")


def _at(curve: Mapping, x: float) -> float:
    """A curve of a file at one size: affine between its knots, as a mesh's LinkCurve."""
    sizes, times = curve["sizes"], curve["seconds"]
    if x <= sizes[0]:
        return times[0]
    for a, b, s, t in zip(sizes, sizes[1:], times, times[1:]):
        if x <= b:
            return s + (t - s) * (x - a) / (b - a)
    return times[-1] + curve["tail"] * (x - sizes[-1])


def prices_table(prices: Sequence[Mapping]) -> RenderableType:
    """Each preset's device, links, source and error."""
    rows = []
    for one in prices:
        device = one["device"]
        links = [f"{size(one[f'{which}_node_bandwidth'])}/s, {seconds(one[f'{which}_node_latency'])}" for which in ("intra", "inter")]
        measured = ",".join(map(str, sorted({link["devices"] for link in one["links"]})))
        errors = _error(one["link_error"], bool(one["links"])) + " " + _error(one["device_error"], device.get("error") is not None)
        memory = f"{size(device['memory'])}, {size(device['memory_bandwidth'])}/s"
        rows.append((one["name"], f"{device['flops']:.3g}", memory, *links, measured, errors))
    columns = ("name", *numbers("FLOP/s", "memory", "in a node", "between nodes"), "curves", Number("errors"))
    said = (
        "FLOP/s of 16 bits; curves: device counts measured in a node; errors: mean, of links (curves on sizes not fitted to) and of ops "
        "on the device; ~: a data sheet's, with the error that is usual for such prices"
    )
    return shown(ReportTable("Prices", columns, rows), said, "", *(f"{one['name']}: {one['source']}" for one in prices))


def _error(error: float, measured: bool) -> str:
    return f"{100 * error:.1f}%" if measured else f"~{100 * error:.0f}%"


def draw(path: str, curves: Sequence[Mapping]) -> None:
    """A row per collective: latency and bandwidth over size with their fits, and a histogram of errors."""
    names = sorted({curve["collective"] for curve in curves})
    figure = blank(13, 3.4 * len(names), layout="constrained")
    axes = figure.subplots(len(names), 3, squeeze=False)
    for row, name in zip(axes, names):
        members = [curve for curve in curves if curve["collective"] == name]
        for k, curve in enumerate(members[:FEW]):
            _curve(row[0], row[1], curve, COLOURS[k % len(COLOURS)])
        more = f" ({len(members)} curves, {FEW} shown)" if len(members) > FEW else ""
        row[0].set(title=f"{name}: latency{more}", xlabel="bytes", ylabel="s", xscale="log", yscale="log")
        row[1].set(title=f"{name}: bandwidth", xlabel="bytes", ylabel="bytes / s", xscale="log", yscale="log")
        row[0].legend(fontsize=6)
        row[2].hist([100 * error for curve in members for error in curve["errors"]], bins=40, color=COLOURS[0])
        row[2].set(title=f"{name}: errors in sample", xlabel="predicted / measured - 1, percent", ylabel="sizes")
    save(figure, path, dpi=110)


def _curve(latency, bandwidth, curve: Mapping, colour: str) -> None:
    x, t = zip(*curve["points"])
    line, fit = zip(*curve["line"])
    latency.plot(x, t, ".", color=colour, markersize=4)
    latency.plot(line, fit, color=colour, linewidth=1, label=curve["name"])
    bandwidth.plot(x, [a / b for a, b in zip(x, t)], ".", color=colour, markersize=4)
    bandwidth.plot(line, [a / b for a, b in zip(line, fit)], color=colour, linewidth=1)
