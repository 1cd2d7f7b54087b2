"""The options of a table on a mesh: seconds and bytes per device of each sharding, from the mesh's prices and the table's lookups.

Per step, b examples on each of W devices look up f features of L ids each, B = b W; a row has c columns of w bytes, R = c w its bytes.

    n = B f L lookups        u = distinct rows among them, at Zipf exponent s                                       -> distinct
    read     a share p of the lookups, q of the columns:  p n (8 + q R) + B f q R       ids, rows, pooled rows written
    update   p' n = the pooled rows' gradients B f q R read;  u p rows and their state read and written: 2 p u (q R + state)
    seconds  = (read + update) / memory bandwidth                       rows in host memory: misses / host bandwidth
    send     ids to the shards (forward), pooled rows back (forward), their gradients (backward)

               rows, columns of a shard     shards                  pooled rows travel by
    table-wise     all, all                 1, on one device        all_to_all
    column-wise    all, 1/k                 k, each on one device   all_to_all
    row-wise       1/W, all                 W                       reduce_scatter and all_gather over all axes
    table-row-wise 1/G, all                 G, on one node          the same inside the node, all_to_all between nodes
    grid           1/G, 1/k                 k G, each G on one node the same
    data parallel  all, all                 W copies                nothing; gradients of the full table by all_reduce

A row is stored in device memory (hbm), in the host's memory (host), or in the host's memory with the most read CACHED share of rows also
on the device (host_cached). The bytes of a device are rows, optimizer state, ids and pooled rows of one step; data parallel adds the
gradient. Costs per step that do not depend on the number of tables (latency of the collectives, kernel launches) are equal for all plans
and left out. The sizes follow torchrec's estimators; the prices are those of the mesh.
"""

import math
from typing import NamedTuple

import numpy as np

from autoshard.cost import collective_seconds
from autoshard.mesh import Axis, Mesh
from autoshard.tables.records import Option, Table

ID_BYTES = 8
CACHED = 0.2  # share of the rows on the device, for host_cached
COLUMN_SHARDS = (2, 4, 8, 16)
LEAST_COLUMNS = 16  # of a shard
LARGE = 2.0**28  # bytes: the size at which a link's seconds per byte are evaluated


class Workload(NamedTuple):
    """What the prices of tables depend on besides the table: the mesh, the batch, and the host's memory."""

    mesh: Mesh
    per_node: int
    batch: int  # examples per device
    host_bandwidth: float  # bytes/s
    with_host: bool


class ShardShare(NamedTuple):
    """The shares of a table and of its lookups in one shard."""

    rows: float
    columns: float
    lookups: float  # of all devices


def nodes_of(mesh: Mesh, devices_per_node: int | None) -> int:
    """Devices of a node: the argument, else all axes except the first (one axis: one node). ValueError where it does not divide."""
    per_node = (math.prod(mesh.shape[1:]) if len(mesh.shape) > 1 else mesh.num_devices) if devices_per_node is None else devices_per_node
    if isinstance(per_node, bool) or not isinstance(per_node, int) or per_node < 1 or mesh.num_devices % per_node:
        raise ValueError(f"devices_per_node is {devices_per_node!r}; expected a whole number that divides the {mesh.num_devices} devices")
    return per_node


def options_of(table: Table, workload: Workload) -> tuple[Option, ...]:
    """Every sharding of the table in every kind of memory."""
    W, G = workload.mesh.num_devices, workload.per_node
    inner, outer = axes_of(workload)
    shards = [k for k in COLUMN_SHARDS if table.columns % k == 0 and table.columns // k >= LEAST_COLUMNS]
    options = []
    for memory in ("hbm", "host", "host_cached") if workload.with_host else ("hbm",):
        for k in [1, *shards]:
            part = priced(table, workload, memory, ShardShare(1, 1 / k, 1), (), (*outer, *inner))
            options.append(option("table_wise" if k == 1 else "column_wise", "device", memory, part, k))
            if W > G > 1 and table.rows >= G:
                part = priced(table, workload, memory, ShardShare(_share(table.rows, G), 1 / k, 1 / G), inner, outer)
                options.append(option("table_row_wise" if k == 1 else "grid", "node", memory, part, k * G))
        if W > 1 and table.rows >= W:
            part = priced(table, workload, memory, ShardShare(_share(table.rows, W), 1, 1 / W), (*outer, *inner), ())
            options.append(option("row_wise", "mesh", memory, part, W))
    if W > 1:
        options.append(option("data_parallel", "mesh", "hbm", data_parallel(table, workload), W))
    return tuple(options)


def option(name: str, scope: str, memory: str, part: tuple[float, float, float], count: int) -> Option:
    seconds, hbm, host = part
    return Option(name, (seconds,) * count, (hbm,) * count, (host,) * count, scope, memory)


def priced(
    table: Table, workload: Workload, memory: str, shard: ShardShare, summed: tuple[Axis, ...], sent: tuple[Axis, ...]
) -> tuple[float, float, float]:
    """(seconds, hbm bytes, host bytes) of one shard. summed: the axes over which its partial sums are reduced; sent: those over
    which pooled rows are sent afterwards.
    """
    n, row = lookups(table, workload), table.columns * table.item_size * shard.columns
    pooled = workload.batch * workload.mesh.num_devices * table.features * row
    u = distinct(table.rows, n, table.skew) * shard.lookups
    state = table.state_bytes / table.rows * shard.columns
    rows_read, rows_updated = shard.lookups * n * row, 2 * u * (row + state)
    weights = shard.rows * shard.columns * (table.bytes + table.state_bytes)
    io = shard.lookups * n * ID_BYTES + pooled
    bandwidth = workload.mesh.device.memory_bandwidth
    seconds = (shard.lookups * n * ID_BYTES + 2 * pooled) / bandwidth
    if memory == "hbm":
        seconds, hbm, host = seconds + (rows_read + rows_updated) / bandwidth, weights + io, 0.0
    elif memory == "host":
        seconds, hbm, host = seconds + (rows_read + rows_updated) / workload.host_bandwidth, io, weights
    else:
        missed = 1 - reads_of_top(table.rows, CACHED, table.skew)
        seconds += (rows_read + rows_updated) / bandwidth + 2 * missed * u * (row + state) / workload.host_bandwidth
        hbm, host = CACHED * weights + io, weights
    for axis in (*summed, *sent):
        seconds += shard.lookups * n * ID_BYTES * seconds_per_byte("all_to_all", axis)
    left = pooled
    for axis in reversed(summed):  # inner axes first; the outer axes carry what is left
        seconds += left * (seconds_per_byte("reduce_scatter", axis) + seconds_per_byte("all_gather", axis))
        left /= axis.size
    for axis in sent:
        seconds += 2 * left * seconds_per_byte("all_to_all", axis)
    return seconds, hbm, host


def data_parallel(table: Table, workload: Workload) -> tuple[float, float, float]:
    """(seconds, hbm bytes, host bytes) of a full copy on every device, with a dense gradient."""
    n = lookups(table, workload) / workload.mesh.num_devices
    pooled = workload.batch * table.features * table.columns * table.item_size
    traffic = n * (ID_BYTES + table.columns * table.item_size) + 2 * pooled + 3 * table.bytes + 2 * table.state_bytes
    seconds, left = traffic / workload.mesh.device.memory_bandwidth, float(table.bytes)
    for axis in reversed(workload.mesh.axes):
        seconds += left * (seconds_per_byte("reduce_scatter", axis) + seconds_per_byte("all_gather", axis))
        left /= axis.size
    return seconds, 2.0 * table.bytes + table.state_bytes + n * ID_BYTES + pooled, 0.0


def lookups(table: Table, workload: Workload) -> float:
    """Rows read per step by all devices together."""
    return workload.batch * workload.mesh.num_devices * table.features * table.pooling


def axes_of(workload: Workload) -> tuple[tuple[Axis, ...], tuple[Axis, ...]]:
    """The axes inside a node and those between nodes; an axis with both kinds of links counts as between nodes."""
    size, k = 1, len(workload.mesh.axes)
    while k > 0 and size * workload.mesh.axes[k - 1].size <= workload.per_node:
        k -= 1
        size *= workload.mesh.axes[k].size
    return workload.mesh.axes[k:], workload.mesh.axes[:k]


def seconds_per_byte(collective: str, axis: Axis) -> float:
    """Seconds per byte of a large message, without its latency."""
    if axis.size == 1:
        return 0.0
    return (collective_seconds(collective, axis, 2 * LARGE) - collective_seconds(collective, axis, LARGE)) / LARGE


def _share(rows: int, parts: int) -> float:
    """The share of the rows in the largest part."""
    return -(-rows // parts) / rows


def ranks(rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows by frequency of reads, in about a thousand groups: (middle rank, number of rows)."""
    edges = np.unique(np.concatenate([np.arange(1, min(rows, 512) + 1), np.geomspace(1, rows + 1, 512).round()])).astype(float)
    edges = np.append(edges[edges <= rows], rows + 1.0)
    return (edges[:-1] + edges[1:] - 1) / 2, np.diff(edges)


def distinct(rows: int, n: float, skew: float) -> float:
    """The expected number of rows that are read at least once in n draws: sum over rows of 1 - (1 - p)^n, p ~ rank^-skew."""
    rank, count = ranks(rows)
    weight = rank**-skew
    p = np.minimum(weight / (weight * count).sum(), 1.0)
    missed = np.where(p < 1, np.exp(n * np.log1p(-np.minimum(p, 1 - 1e-16))), float(n == 0))
    return float((count * (1 - missed)).sum())


def reads_of_top(rows: int, share: float, skew: float) -> float:
    """The share of the reads that read the most read `share` of the rows."""
    rank, count = ranks(rows)
    weight = rank**-skew * count
    return float(weight[rank <= max(share * rows, 1)].sum() / weight.sum())
