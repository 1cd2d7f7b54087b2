"""The tables' planning problem as flat arrays of numbers, and the evaluation of a choice.

    seconds_d = sum of the shards on device d        slowest = max over d of seconds_d
    hbm_d, host_h: the same sums of bytes, with hbm_d <= hbm_limit_d, host_h <= host_limit_h                 (`rate`)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from autoshard.tables.records import SCOPES, Option


class Devices(NamedTuple):
    """The devices and their memory: node k has the devices from k * per_node on; device d uses the memory of host host_of[d]."""

    per_node: int
    host_of: np.ndarray  # device -> host
    hbm_limit: np.ndarray  # bytes per device
    host_limit: np.ndarray  # bytes per host

    @property
    def num(self) -> int:
        return len(self.hbm_limit)

    @property
    def num_nodes(self) -> int:
        return self.num // self.per_node


class Arrays(NamedTuple):
    """Tables -> options -> parts -> shards, concatenated, for the compiled kernels. A part is placed as one: one shard, the shards of a
    node, or all shards."""

    first_option: np.ndarray  # per table, one more at the end
    first_part: np.ndarray  # per option
    first_shard: np.ndarray  # per part
    scope: np.ndarray  # per option: 0 device, 1 node, 2 mesh
    seconds: np.ndarray  # per shard
    hbm: np.ndarray
    host: np.ndarray
    listed: np.ndarray  # per option: its index in the table's list of options

    @property
    def num_tables(self) -> int:
        return len(self.first_option) - 1

    @property
    def most_parts(self) -> int:
        return int(np.diff(self.first_part).max(initial=1))


class Spots(NamedTuple):
    """A choice: per table an option (numbered over all tables), and the place of each of its parts (a device, a node, or 0)."""

    option: np.ndarray  # (tables,)
    place: np.ndarray  # (tables, most parts)


class Rating(NamedTuple):
    slowest: float  # seconds; inf where a device or host exceeds its memory
    seconds: np.ndarray  # per device
    hbm: np.ndarray
    host: np.ndarray  # per host
    fits: bool


def arrays_of(tables: Sequence[Sequence[Option]], devices: Devices) -> Arrays:
    """The arrays without forbidden options and options with a shard larger than every device; a table may have no option left."""
    first_option, first_part, first_shard, scope, index = [0], [0], [0], [], []
    columns: tuple[list[float], ...] = ([], [], [])
    largest, largest_host = devices.hbm_limit.max(), devices.host_limit.max()
    for options in tables:
        for j, option in enumerate(options):
            if option.forbidden or max(option.hbm_bytes) > largest or max(option.host_bytes) > largest_host:
                continue
            size = {"device": 1, "node": devices.per_node, "mesh": devices.num}[option.scope]
            parts = option.num_shards // size
            first_shard += range(first_shard[-1] + size, first_shard[-1] + (parts + 1) * size, size)
            first_part.append(first_part[-1] + parts)
            scope.append(SCOPES.index(option.scope))
            index.append(j)
            for column, values in zip(columns, (option.seconds, option.hbm_bytes, option.host_bytes)):
                column.extend(values)
        first_option.append(len(scope))
    lists = (first_option, first_part, first_shard, scope, index)
    tables_at, parts_at, shards_at, scopes, listed = (np.array(x, dtype=np.int64) for x in lists)
    seconds, hbm, host = (np.array(x, dtype=float) for x in columns)
    return Arrays(tables_at, parts_at, shards_at, scopes, seconds, hbm, host, listed)


def part_devices(arrays: Arrays, devices: Devices, option: int, place: int) -> range:
    """The devices of a part's shards, in their order."""
    size = (1, devices.per_node, devices.num)[arrays.scope[option]]
    return range(place * size, (place + 1) * size)


def rate(arrays: Arrays, devices: Devices, spots: Spots) -> Rating:
    """The seconds and bytes of a choice, and whether it fits; the sums run table by table."""
    seconds, hbm, host = np.zeros(devices.num), np.zeros(devices.num), np.zeros(len(devices.host_limit))
    for option, places in zip(spots.option.tolist(), spots.place.tolist()):
        for k, part in enumerate(range(arrays.first_part[option], arrays.first_part[option + 1])):
            first = arrays.first_shard[part]
            for s, d in enumerate(part_devices(arrays, devices, option, places[k])):
                seconds[d] += arrays.seconds[first + s]
                hbm[d] += arrays.hbm[first + s]
                host[devices.host_of[d]] += arrays.host[first + s]
    fits = bool((hbm <= devices.hbm_limit).all() and (host <= devices.host_limit).all())
    return Rating(float(seconds.max()) if fits else np.inf, seconds, hbm, host, fits)
