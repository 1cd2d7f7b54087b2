"""A plan of embedding tables as text: the tables with the reason for their placement, and the load per device as bars.

All functions take the record of `TablePlan.to_dict()`.
"""

from collections.abc import Mapping, Sequence

from rich.console import RenderableType
from rich.text import Text

from autoshard.units import percent, seconds, size

from .figures import blank, save
from .terminal import shown
from .values import Code, Number, ReportTable, numbers

BAR = 24  # characters of the slowest device
ROWS = 40  # tables shown, unless all are asked for


def table_of(plan: Mapping, every: bool = False) -> RenderableType:
    """The tables that take longest (or every one), the load per device as bars, and the verdict."""
    if not plan["devices"]:
        return Text(f"{plan['status']}: {plan['reason']}")
    longest = sorted(plan["tables"].items(), key=lambda item: -sum(item[1]["seconds"]))
    listed = longest if every else longest[:ROWS]
    rows = [(name, r["sharding"], r["memory"], devices_of(r["devices"]), seconds(max(r["seconds"])), r["why"]) for name, r in listed]
    table = ReportTable("", ("table", "sharding", "memory", "devices", Number("per shard"), "why"), rows, "open")
    rest = len(longest) - len(listed)
    more = f"... and {rest} tables that take less; --all prints them" if rest else None
    return shown(table, more, "", bars(plan), "", verdict(plan))


def devices_of(devices: Sequence[int]) -> str:
    """`0-7` for a run, `3,5` otherwise."""
    run = len(devices) > 2 and list(devices) == list(range(devices[0], devices[0] + len(devices)))
    return f"{devices[0]}-{devices[-1]}" if run else ",".join(map(str, devices))


def bars(plan: Mapping) -> ReportTable:
    """Seconds and memory, device by device."""
    rows, slowest = [], plan["slowest_device_seconds"]
    for d, (load, limit) in enumerate(zip(plan["devices"], plan["hbm_limit_bytes"])):
        bar = "█" * round(BAR * load["seconds"] / slowest) if slowest else ""
        memory = (size(load["hbm_bytes"]), percent(load["hbm_bytes"], limit), size(load["host_bytes"]))
        rows.append((str(d), seconds(load["seconds"]), bar, *memory))
    return ReportTable("", (*numbers("device", "time"), Code(""), *numbers("hbm", "of limit", "host")), rows, "open")


def verdict(plan: Mapping) -> str:
    slowest = f"slowest device {seconds(plan['slowest_device_seconds'])}"
    bound = f"no plan takes less than {seconds(plan['bound_seconds'])} (gap {plan['gap']:.2%})"
    return f"{slowest}: proven best" if plan["status"] == "optimal" else f"{slowest}; {bound}"


def draw(path: str, plan: Mapping) -> None:
    """Write a bar plot of time and memory per device; the file's ending says which kind."""
    figure = blank(8, 5, layout="constrained")
    time, memory = figure.subplots(2, 1, sharex=True)
    at = range(len(plan["devices"]))
    time.bar(at, [1e3 * d["seconds"] for d in plan["devices"]])
    time.axhline(1e3 * plan["bound_seconds"], color="black", linewidth=1, linestyle="--", label="bound")
    time.set(ylabel="ms per step")
    time.legend()
    memory.bar(at, [d["hbm_bytes"] / 1e9 for d in plan["devices"]])
    memory.scatter(at, [limit / 1e9 for limit in plan["hbm_limit_bytes"]], marker="_", color="black", label="limit")
    memory.set(xlabel="device", ylabel="GB of device memory")
    memory.legend()
    save(figure, path)
