"""`plan_tables`: choose options and devices for embedding tables such that the slowest device is as fast as possible.

options  = the possible shardings of each table, priced on the mesh or given     prices.py
instance = the options as arrays of numbers                                      arrays.py
planner  = bound, search, proof                                                  planner.py
plan     = the result by table name, with a reason for each table's placement     explain.py
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np

from autoshard.mesh import Mesh
from autoshard.tables.arrays import Devices, instance_of, part_devices
from autoshard.tables.explain import reasons
from autoshard.tables.planner import Planner, Progress
from autoshard.tables.prices import Workload, nodes_of, options_of
from autoshard.tables.records import DeviceLoad, Option, PlacedTable, Table, TablePlan
from autoshard.units import size

MOST_DEVICES = 4096  # a table split by rows has a shard on each, so that a move of the search takes as long as there are devices
MOST_ELEMENTS = 2**53  # of a table; above that a float can't count its bytes
SMALL = 1e6  # bytes: a limit below was probably meant in GB


def plan_tables(
    tables: Sequence[Table],
    mesh: Mesh | int,
    *,
    hbm: float | Sequence[float] | None = None,
    host_memory: float | Sequence[float] | None = None,
    reserve: float = 0.0,
    batch: int = 512,
    host_bandwidth: float = 32e9,
    devices_per_node: int | None = None,
    effort: float = 1.0,
    seed: int = 0,
    progress: Progress | None = None,
) -> TablePlan:
    """Place every table so that the slowest device is as fast as possible, within each device's and each host's memory.

    mesh: a Mesh, or a number of devices in one node. hbm: bytes per device, one number or one per device (default: the device's memory).
    host_memory: bytes per host (node), one number or one per host; default: not limited where options are given, and no option in host
    memory otherwise. reserve: the share of both that is kept free. batch: examples per device and step. host_bandwidth: bytes per second
    between a device and its host's memory. devices_per_node: default all axes of the mesh but the first. effort: times the usual number of
    search moves. progress: called with (description, fraction done). The same seed returns the same plan on every machine.

    Where no plan fits, the plan has status "infeasible" and a `reason`. ValueError on bad input.

        plan = plan_tables([Table("user", 10**7, 64), Table("item", 10**6, 128)], 8, hbm=16e9)
        plan.slowest_device_seconds, plan.bound_seconds, plan.tables["user"].devices
    """
    tables = check_tables(tables)
    if isinstance(mesh, int) and not isinstance(mesh, bool) and mesh >= 1:
        mesh = Mesh.from_bandwidths((mesh,))
    if not isinstance(mesh, Mesh):
        raise ValueError(f"mesh is {mesh!r}; expected an autoshard.Mesh, or a number of devices of 1 or more")
    if mesh.num_devices > MOST_DEVICES:
        raise ValueError(f"the mesh has {mesh.num_devices} devices; tables can be placed on {MOST_DEVICES} at most: make it smaller")
    for name, value in (("batch", batch), ("host_bandwidth", host_bandwidth), ("effort", effort)):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise ValueError(f"{name} is {value!r}; expected a number above 0")
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)) or seed < 0:
        raise ValueError(f"seed is {seed!r}; expected a whole number of 0 or more")
    per_node = nodes_of(mesh, devices_per_node)
    limits = {"hbm": mesh.device.memory if hbm is None else hbm, "host_memory": math.inf if host_memory is None else host_memory}
    devices = Devices(
        per_node,
        np.arange(mesh.num_devices) // per_node,
        check_limit("hbm", limits["hbm"], mesh.num_devices, reserve),
        check_limit("host_memory", limits["host_memory"], mesh.num_devices // per_node, reserve),
    )
    workload = Workload(mesh, per_node, batch, host_bandwidth, host_memory is not None)
    options = [table.options if table.options is not None else options_of(table, workload) for table in tables]
    assumptions = {"devices": mesh.num_devices, "devices_per_node": per_node, "batch": batch, "reserve": reserve,
                   "host_bandwidth": host_bandwidth, "mesh": mesh.to_dict()}  # fmt: skip
    only_hbm = [table.name for table in tables if table.options is None] if host_memory is None else []
    plan = plan_options(
        [t.name for t in tables], options, devices, effort=effort, seed=seed, progress=progress, assumptions=assumptions,
        only_hbm=only_hbm,
    )  # fmt: skip
    return replace(plan, reason=plan.reason + suspicious(limits)) if plan.reason else plan


def plan_options(
    names: Sequence[str],
    options: Sequence[Sequence[Option]],
    devices: Devices,
    *,
    effort: float = 1.0,
    seed: int = 0,
    progress: Progress | None = None,
    assumptions: dict | None = None,
    only_hbm: Collection[str] = (),
) -> TablePlan:
    """The plan of tables with known options on the given devices; otherwise as `plan_tables`.

    only_hbm: the tables whose options in host memory were left out, because no host memory was given; a `reason` says so.
    """
    check_shards(names, options, devices)
    instance, assumptions = instance_of(options, devices), assumptions or {}
    reason = too_large(names, options, instance.first_option, devices, only_hbm)
    if reason:
        return no_plan(devices, "infeasible", math.inf, reason, assumptions)
    planner = Planner(instance, seed, progress)
    if planner.bound.refutes(planner.high):
        return no_plan(devices, "infeasible", math.inf, too_much(planner, devices) + host_remedy(only_hbm), assumptions)
    planner.solve(effort)
    if planner.best is None:
        if planner.bound.value == math.inf:
            reason = "the tables' shards can't be packed into the devices' memory: all ways were tried; raise the memory"
            return no_plan(devices, "infeasible", math.inf, reason + host_remedy(only_hbm), assumptions)
        reason = "no plan that fits was found, nor is it proven that there is none; raise the memory or the effort"
        return no_plan(devices, "unknown", planner.bound.value, reason + host_remedy(only_hbm), assumptions)
    return described(names, options, planner, assumptions)


def described(names: Sequence[str], options: Sequence[Sequence[Option]], planner: Planner, assumptions: dict) -> TablePlan:
    instance, spots = planner.instance, planner.best
    assert spots is not None
    slowest, why, bound = planner.slowest, reasons(planner), planner.bound.value
    assert bound <= slowest * (1 + 1e-9), f"the bound {bound} is above a plan's {slowest}"
    placed = {}
    for t, name in enumerate(names):
        o = int(spots.option[t])
        on = [d for k in range(len(instance.parts(o))) for d in part_devices(instance, o, int(spots.place[t, k]))]
        index = int(instance.listed[o])
        placed[name] = PlacedTable(options[t][index], tuple(on), index, why[t])
    host = np.zeros(instance.num)
    for p in placed.values():
        np.add.at(host, list(p.devices), p.option.host_bytes)
    loads = [DeviceLoad(float(s), float(h), float(x)) for s, h, x in zip(spots.seconds, spots.hbm, host)]
    status = "optimal" if slowest - bound <= 1e-9 * slowest else "feasible"
    return TablePlan(
        status, placed, tuple(loads), tuple(spots.host.tolist()), slowest, bound,
        tuple(instance.hbm_limit.tolist()), tuple(instance.host_limit.tolist()), "", planner.solver, assumptions,
    )  # fmt: skip


def no_plan(devices: Devices, status: str, bound: float, reason: str, assumptions: dict) -> TablePlan:
    limits = tuple(devices.hbm_limit.tolist()), tuple(devices.host_limit.tolist())
    return TablePlan(status, {}, (), (), math.inf, bound, *limits, reason, "", assumptions)


# -- checks of arguments -------------------------------------------------------------------------------------------------------------------


def check_tables(tables: Sequence[Table]) -> list[Table]:
    """The tables as a list; ValueError on an empty list, on items that are no Table, and on two tables of one name."""
    try:
        listed = list(tables)
    except TypeError:
        raise ValueError(f"tables is a {type(tables).__name__}; expected a list of Table") from None
    if not listed:
        raise ValueError("there are no tables; expected a list of at least one Table")
    seen: set[str] = set()
    for table in listed:
        if not isinstance(table, Table):
            raise ValueError(f"tables holds a {type(table).__name__}; expected Table(name, rows, columns) for each")
        if table.name in seen:
            raise ValueError(f"two tables are named {table.name!r}; give each its own name")
        if table.rows * table.columns > MOST_ELEMENTS:
            shape = f"{table.rows:.6g} rows of {table.columns:.6g} columns"
            raise ValueError(f"table {table.name!r} has {shape}; expected at most {MOST_ELEMENTS:.6g} elements")
        seen.add(table.name)
    return listed


def check_limit(name: str, limit: float | Sequence[float], count: int, reserve: float) -> np.ndarray:
    """Bytes per device or host after the reserve."""
    if isinstance(reserve, bool) or not isinstance(reserve, (int, float)) or not 0 <= reserve < 1:
        raise ValueError(f"reserve is {reserve!r}; expected a share of the memory from 0 on and below 1, for example 0.15")
    values = list(limit) if isinstance(limit, (list, tuple, np.ndarray)) else [limit] * count
    if len(values) != count:
        raise ValueError(f"{name} has {len(values)} numbers; expected one, or {count}")
    for value in values:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
            raise ValueError(f"{name} is {value!r}; expected a number of bytes, for example 80e9")
    if name == "hbm" and not any(values):
        raise ValueError("hbm is 0 bytes; expected the devices to have memory, for example 80e9")
    return np.array(values, dtype=float) * (1 - reserve)


def check_shards(names: Sequence[str], options: Sequence[Sequence[Option]], devices: Devices) -> None:
    """ValueError where an option's number of shards does not match its scope on these devices."""
    wide = {"device": 1, "node": devices.per_node, "mesh": devices.num}
    for name, some in zip(names, options):
        for option in some:
            size = wide[option.scope]
            if option.num_shards % size or (option.scope == "mesh" and option.num_shards != size):
                expected = f"{size} shards" if option.scope == "mesh" else f"a multiple of {size} shards"
                raise ValueError(
                    f"table {name!r}: option {option.sharding!r} of scope {option.scope} has {option.num_shards} shards; "
                    f"expected {expected}, for {devices.num} devices in nodes of {devices.per_node}"
                )


# -- why nothing fits ----------------------------------------------------------------------------------------------------------------


def too_large(
    names: Sequence[str], options: Sequence[Sequence[Option]], first_option: np.ndarray, devices: Devices, only_hbm: Collection[str]
) -> str:
    """A sentence about a table that has no option left; empty without such a table."""
    for t in np.flatnonzero(np.diff(first_option) == 0).tolist():
        usable = [option for option in options[t] if not option.forbidden]
        if not usable:
            return f"table {names[t]!r}: every option is forbidden (inf); allow one"
        least = min(usable, key=lambda option: (max(option.hbm_bytes), max(option.host_bytes)))
        on_host, free_host = "", ""
        if limits_host(devices):
            on_host, free_host = f" and {_gb(max(least.host_bytes))} on a host", f" and {_gb(devices.host_limit.max())}"
        return (
            f"table {names[t]!r} does not fit: of its {len(usable)} options even {least.sharding} puts {_gb(max(least.hbm_bytes))} "
            f"on a device{on_host}, where {_gb(devices.hbm_limit.max())}{free_host} are free; raise the memory, or split the table into "
            f"more shards{host_remedy([name for name in only_hbm if name == names[t]])}"
        )
    return ""


def too_much(planner: Planner, devices: Devices) -> str:
    """A sentence about tables that do not fit together."""
    first, totals = planner.instance.first_option, planner.bound.totals
    least_hbm, least_host = (float(np.minimum.reduceat(x, first[:-1]).sum()) for x in (totals.hbm, totals.host))
    if least_hbm <= devices.hbm_limit.sum() and least_host <= devices.host_limit.sum():
        least, single = f"the least bytes in all, {_gb(least_hbm)} of device memory,", "the single devices"
        if limits_host(devices):
            least = f"the least bytes in all (each by itself), {_gb(least_hbm)} of device memory and {_gb(least_host)} of host memory,"
            single = "the single devices and hosts"
        return f"the tables do not fit: {least} are available, but the shards can't be packed into {single}; raise the memory"
    host, free_host = "", ""
    if limits_host(devices):
        host, free_host = f" and {_gb(least_host)} of host memory", f" and {_gb(devices.host_limit.sum())}"
    return (
        f"the tables do not fit: they take at least {_gb(least_hbm)} of device memory{host} in all, and "
        f"{_gb(devices.hbm_limit.sum())}{free_host} are free; raise the memory or the number of devices"
    )


def limits_host(devices: Devices) -> bool:
    """Whether host memory is limited; otherwise it is not why tables do not fit."""
    return bool(np.isfinite(devices.host_limit).any())


def host_remedy(only_hbm: Collection[str]) -> str:
    """The end of a sentence: the remedy for tables whose options in host memory were left out."""
    return ", or give host memory for tables to be placed in: --host-memory (in Python host_memory=)" if only_hbm else ""


def suspicious(limits: Mapping[str, float | Sequence[float]]) -> str:
    """The end of a sentence about limits so small that another unit was probably meant; a host may have 0 bytes."""
    said = ""
    for name, per, example in (("hbm", "device", "40e9"), ("host_memory", "host", "512e9")):
        most = float(np.max(limits[name]))
        if 0 < most < SMALL:
            said += f"; {name} is {most:.6g} bytes; expected bytes per {per}, for example {example}"
    return said


def _gb(value: float) -> str:
    return size(value, 4) if value < math.inf else "unlimited memory"
