"""The tables' planning problem as flat arrays of numbers, and what a choice of it sums up to.

    seconds_d = sum of the shards on device d        slowest = max over d of seconds_d
    hbm_d, host_h: the same sums of bytes, with hbm_d <= hbm_limit_d, host_h <= host_limit_h                 (`search.recount`)
"""

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


class TablesInstance(NamedTuple):
    """Tables -> options -> parts -> shards, concatenated, and the devices, for the compiled kernels. A part is placed as one: one shard,
    the shards of a node, or all shards."""

    first_option: np.ndarray  # per table, one more at the end
    first_part: np.ndarray  # per option
    first_shard: np.ndarray  # per part
    scope: np.ndarray  # per option: 0 device, 1 node, 2 mesh
    size: np.ndarray  # per option: shards of a part, each on a device of its own
    seconds: np.ndarray  # per shard
    hbm: np.ndarray
    host: np.ndarray
    listed: np.ndarray  # per option: its index in the table's list of options
    per_node: int  # and the rest: see Devices
    host_of: np.ndarray
    hbm_limit: np.ndarray
    host_limit: np.ndarray

    @property
    def num(self) -> int:
        return len(self.hbm_limit)

    @property
    def num_tables(self) -> int:
        return len(self.first_option) - 1

    def parts(self, option: int) -> range:
        """The parts of an option."""
        return range(self.first_part[option], self.first_part[option + 1])

    def shards(self, part: int) -> slice:
        """The shards of a part."""
        return slice(self.first_shard[part], self.first_shard[part + 1])

    @property
    def most_parts(self) -> int:
        return int(np.diff(self.first_part).max(initial=1))


def instance_of(tables: Sequence[Sequence[Option]], devices: Devices) -> TablesInstance:
    """The problem without forbidden options and options with a shard larger than every device; a table may have no option left."""
    first_option, first_part, first_shard, scope, sizes, index = [0], [0], [0], [], [], []
    columns: tuple[list[float], ...] = ([], [], [])
    largest, largest_host = devices.hbm_limit.max(), devices.host_limit.max()
    for options in tables:
        for j, option in enumerate(options):
            if option.forbidden or max(option.hbm_bytes) > largest or max(option.host_bytes) > largest_host:
                continue
            scope.append(SCOPES.index(option.scope))
            size = (1, devices.per_node, devices.num)[scope[-1]]
            sizes.append(size)
            parts = option.num_shards // size
            first_shard += range(first_shard[-1] + size, first_shard[-1] + (parts + 1) * size, size)
            first_part.append(first_part[-1] + parts)
            index.append(j)
            for column, values in zip(columns, (option.seconds, option.hbm_bytes, option.host_bytes)):
                column.extend(values)
        first_option.append(len(scope))
    lists = (first_option, first_part, first_shard, scope, sizes, index)
    tables_at, parts_at, shards_at, scopes, widths, listed = (np.array(x, dtype=np.int64) for x in lists)
    seconds, hbm, host = (np.array(x, dtype=float) for x in columns)
    return TablesInstance(tables_at, parts_at, shards_at, scopes, widths, seconds, hbm, host, listed, *devices)


def part_devices(instance: TablesInstance, option: int, place: int) -> range:
    """The devices of a part's shards, in their order."""
    size = int(instance.size[option])
    return range(place * size, (place + 1) * size)
