"""What a table may do on a mesh: seconds and bytes per device of each sharding, from the mesh's prices and how the table is read.

Per step, b examples on each of W devices look up f features of L ids each, B = b W; a row has c columns of w bytes, R = c w its bytes.

    n = B f L lookups        u = rows among them that differ, at Zipf exponent s                                   -> distinct
    read     a part of p of the lookups, q of the columns:  p n (8 + q R) + B f q R       ids, rows, pooled rows written
    update   p' n = the pooled rows' gradients B f q R read;  u p rows and their state read and written: 2 p u (q R + state)
    seconds  = (read + update) / memory bandwidth                       rows in host memory: misses / host bandwidth
    send     ids there (forward), pooled rows back (forward), their gradients (backward)

               rows, columns of a shard     shards                  pooled rows travel by
    table-wise     all, all                 1, on one device        all_to_all
    column-wise    all, 1/k                 k, each on one device   all_to_all
    row-wise       1/W, all                 W                       reduce_scatter and all_gather over all axes
    table-row-wise 1/G, all                 G, on one node          the same inside the node, all_to_all between nodes
    grid           1/G, 1/k                 k G, each G on one node the same
    data parallel  all, all                 W copies                nothing; gradients of the whole table by all_reduce

A row may lie in device memory (hbm), in the host's (host), or in the host's with the most read CACHED share of rows on the device
(host_cached). Bytes of a device: rows, optimizer state, ids and pooled rows of one step; data parallel also the gradient. What is paid
once a step however many tables there are (latency of the collectives, kernel launches) is the same for every plan and left out.
Sizes follow what torchrec's estimators count; the prices are the mesh's.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from autoshard.cost import collective_seconds
from autoshard.mesh import Axis, Mesh

from .records import Option, Table

ID_BYTES = 8
CACHED = 0.2  # share of the rows on the device, for host_cached
CUTS = (2, 4, 8, 16)  # columns
LEAST_COLUMNS = 16  # of a shard
LARGE = 2.0**28  # bytes: where a link's seconds per byte are read off


class Usage(NamedTuple):
    """What the tables are priced on."""

    mesh: Mesh
    per_node: int
    batch: int  # examples per device
    host_bandwidth: float  # bytes/s
    with_host: bool


class Shard(NamedTuple):
    rows: float  # share of the table's
    columns: float
    lookups: float  # share of the lookups of all devices
    pooled: float  # bytes of pooled rows that it makes, in all


def nodes_of(mesh: Mesh, devices_per_node: int | None) -> int:
    """Devices of a node: what is asked for, else all axes but the first (one axis: one node). ValueError where it does not divide."""
    given = devices_per_node or (math.prod(mesh.shape[1:]) if len(mesh.shape) > 1 else mesh.num_devices)
    if isinstance(given, bool) or not isinstance(given, int) or given < 1 or mesh.num_devices % given:
        raise ValueError(f"devices_per_node is {devices_per_node!r}; expected a whole number that divides the {mesh.num_devices} devices")
    return given


def options_of(table: Table, usage: Usage) -> tuple[Option, ...]:
    """Every sharding of the table in every kind of memory."""
    W, G = usage.mesh.num_devices, usage.per_node
    inner, outer = axes_of(usage)
    cuts = [k for k in CUTS if table.columns % k == 0 and table.columns // k >= LEAST_COLUMNS]
    found = []
    for memory in ("hbm", "host", "host_cached") if usage.with_host else ("hbm",):
        for k in [1, *cuts]:
            part = priced(table, usage, memory, Shard(1, 1 / k, 1, 1 / k), (), (*outer, *inner))
            found.append(option("table_wise" if k == 1 else "column_wise", "device", memory, part, k))
            if W > G > 1 and table.rows >= G:
                part = priced(table, usage, memory, Shard(_share(table.rows, G), 1 / k, 1 / G, 1 / k), inner, outer)
                found.append(option("table_row_wise" if k == 1 else "grid", "node", memory, part, k * G))
        if W > 1 and table.rows >= W:
            part = priced(table, usage, memory, Shard(_share(table.rows, W), 1, 1 / W, 1), (*outer, *inner), ())
            found.append(option("row_wise", "mesh", memory, part, W))
    if W > 1:
        found.append(option("data_parallel", "mesh", "hbm", data_parallel(table, usage), W))
    return tuple(found)


def option(name: str, scope: str, memory: str, part: tuple[float, float, float], count: int) -> Option:
    seconds, hbm, host = part
    return Option(name, (seconds,) * count, (hbm,) * count, (host,) * count, scope, memory)


def priced(
    table: Table, usage: Usage, memory: str, shard: Shard, summed: tuple[Axis, ...], sent: tuple[Axis, ...]
) -> tuple[float, float, float]:
    """(seconds, hbm bytes, host bytes) of one shard; its sums are reduced over the axes `summed`, then pooled rows go over `sent`."""
    n, row = lookups(table, usage), table.columns * table.item_size * shard.columns
    pooled = usage.batch * usage.mesh.num_devices * table.features * row
    u = distinct(table.rows, n, table.skew) * shard.lookups
    state = table.state_bytes / table.rows * shard.columns
    rows_read, rows_updated = shard.lookups * n * row, 2 * u * (row + state)
    weights = shard.rows * shard.columns * (table.bytes + table.state_bytes)
    io = shard.lookups * n * ID_BYTES + pooled
    seconds = (shard.lookups * n * ID_BYTES + 2 * pooled) / usage.mesh.device.memory_bandwidth
    if memory == "hbm":
        seconds, hbm, host = seconds + (rows_read + rows_updated) / usage.mesh.device.memory_bandwidth, weights + io, 0.0
    elif memory == "host":
        seconds, hbm, host = seconds + (rows_read + rows_updated) / usage.host_bandwidth, io, weights
    else:
        missed = 1 - reads_of_top(table.rows, CACHED, table.skew)
        seconds += (rows_read + rows_updated) / usage.mesh.device.memory_bandwidth + 2 * missed * u * (row + state) / usage.host_bandwidth
        hbm, host = CACHED * weights + io, weights
    for axis in (*summed, *sent):
        seconds += shard.lookups * n * ID_BYTES * seconds_per_byte("all_to_all", axis)
    left = pooled
    for axis in reversed(summed):  # the nearest devices first, then what is left of it goes further
        seconds += left * (seconds_per_byte("reduce_scatter", axis) + seconds_per_byte("all_gather", axis))
        left /= axis.size
    for axis in sent:
        seconds += 2 * left * seconds_per_byte("all_to_all", axis)
    return seconds, hbm, host


def data_parallel(table: Table, usage: Usage) -> tuple[float, float, float]:
    """A whole copy on every device, its gradient dense."""
    n = lookups(table, usage) / usage.mesh.num_devices
    pooled = usage.batch * table.features * table.columns * table.item_size
    traffic = n * (ID_BYTES + table.columns * table.item_size) + 2 * pooled + 3 * table.bytes + 2 * table.state_bytes
    seconds, left = traffic / usage.mesh.device.memory_bandwidth, float(table.bytes)
    for axis in reversed(usage.mesh.axes):
        seconds += left * (seconds_per_byte("reduce_scatter", axis) + seconds_per_byte("all_gather", axis))
        left /= axis.size
    return seconds, 2.0 * table.bytes + table.state_bytes + n * ID_BYTES + pooled, 0.0


def lookups(table: Table, usage: Usage) -> float:
    """Rows read per step by all devices together."""
    return usage.batch * usage.mesh.num_devices * table.features * table.pooling


def axes_of(usage: Usage) -> tuple[tuple[Axis, ...], tuple[Axis, ...]]:
    """The axes inside a node and those between nodes; an axis that does both counts as between."""
    size, k = 1, len(usage.mesh.axes)
    while k > 0 and size * usage.mesh.axes[k - 1].size <= usage.per_node:
        k -= 1
        size *= usage.mesh.axes[k].size
    return usage.mesh.axes[k:], usage.mesh.axes[:k]


def seconds_per_byte(collective: str, axis: Axis) -> float:
    """Of a large message, without its latency."""
    if axis.size == 1:
        return 0.0
    return (collective_seconds(collective, axis, 2 * LARGE) - collective_seconds(collective, axis, LARGE)) / LARGE


def _share(rows: int, parts: int) -> float:
    """Of the largest of the parts."""
    return -(-rows // parts) / rows


def ranks(rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows by how often they are read, in some thousand groups: (rank in the middle, how many)."""
    edges = np.unique(np.concatenate([np.arange(1, min(rows, 512) + 1), np.geomspace(1, rows + 1, 512).round()])).astype(float)
    edges = np.append(edges[edges <= rows], rows + 1.0)
    return (edges[:-1] + edges[1:] - 1) / 2, np.diff(edges)


def distinct(rows: int, n: float, skew: float) -> float:
    """How many of the rows are read at least once in n draws: sum over rows of 1 - (1 - p)^n, p ~ rank^-skew."""
    rank, count = ranks(rows)
    weight = rank**-skew
    p = np.minimum(weight / (weight * count).sum(), 1.0)
    missed = np.where(p < 1, np.exp(n * np.log1p(-np.minimum(p, 1 - 1e-16))), float(n == 0))
    return float((count * (1 - missed)).sum())


def reads_of_top(rows: int, share: float, skew: float) -> float:
    """The share of reads that go to the most read `share` of the rows."""
    rank, count = ranks(rows)
    weight = rank**-skew * count
    return float(weight[rank <= max(share * rows, 1)].sum() / weight.sum())
