"""The records of tables, of the options to place a table on devices, and of a plan. SI units.

An option is a list of shards. Its scope restricts their places:

    device   each shard on any device                             table-wise (one shard), column-wise (several)
    node     each group of shards, one per device of a node,      table-row-wise (one group), grid (several)
             on any node
    mesh     one shard on every device, in the order of ranks     row-wise, data parallel
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

SCOPES = ("device", "node", "mesh")
STATE_BYTES = {  # optimizer: (bytes per row, bytes per element) of its state, in float32
    "sgd": (0, 0),
    "rowwise_adagrad": (4, 0),
    "adagrad": (0, 4),
    "momentum": (0, 4),
    "adam": (0, 8),
    "adamw": (0, 8),
    "rowwise_adam": (4, 4),
}

MOST = 1e30  # seconds, bytes, ids of anything: sums and products of several are finite


@dataclass(frozen=True)
class Option:
    """One way to shard a table: per shard the seconds per step, and the bytes of its device's and of its host's memory."""

    sharding: str  # "table_wise", "column_wise", ..., or any name
    seconds: tuple[float, ...]
    hbm_bytes: tuple[float, ...]
    host_bytes: tuple[float, ...] = ()  # default none
    scope: str = "device"
    memory: str = "hbm"  # where the rows are stored: "hbm", "host", "host_cached", or any name

    def __post_init__(self) -> None:
        if self.scope not in SCOPES:
            raise ValueError(f"option {self.sharding!r} has scope {self.scope!r}; expected one of {', '.join(SCOPES)}")
        names = ("seconds", "hbm_bytes", "host_bytes")
        columns = {name: _numbers(getattr(self, name), f"{name} of option {self.sharding!r}") for name in names}
        columns["host_bytes"] = columns["host_bytes"] or (0.0,) * len(columns["seconds"])
        if len({*map(len, columns.values())}) > 1 or not columns["seconds"]:
            counts = ", ".join(f"{len(column)} {name}" for name, column in columns.items())
            raise ValueError(f"option {self.sharding!r} has {counts}; expected as many of each as it has shards, at least one")
        for name, column in columns.items():
            object.__setattr__(self, name, column)

    @property
    def num_shards(self) -> int:
        return len(self.seconds)

    @property
    def forbidden(self) -> bool:
        return not all(map(math.isfinite, (*self.seconds, *self.hbm_bytes, *self.host_bytes)))


@dataclass(frozen=True)
class Table:
    """An embedding table and its use. Where `options` are given, the plan chooses among them and ignores the other fields."""

    name: str
    rows: int = 1
    columns: int = 1
    item_size: int = 4  # bytes per element
    pooling: float = 1.0  # ids per example and feature, on average
    features: int = 1  # that look up in this table
    optimizer: str = "rowwise_adagrad"
    skew: float = 0.0  # exponent of the Zipf law of how often rows are read; 0: all rows equally
    options: tuple[Option, ...] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(f"a table's name is {self.name!r}; expected a text that is not empty")
        for key in ("rows", "columns", "item_size", "features"):
            value = getattr(self, key)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**63:
                raise ValueError(f"table {self.name!r}: {key} is {str(value)[:40]}; expected a whole number of 1 or more, in 64 bits")
        for key in ("pooling", "skew"):
            value = getattr(self, key)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= MOST:
                raise ValueError(f"table {self.name!r}: {key} is {str(value)[:40]}; expected a number of 0 to {MOST:g}")
        if self.optimizer not in STATE_BYTES:
            raise ValueError(f"table {self.name!r}: unknown optimizer {self.optimizer!r}; known are {', '.join(STATE_BYTES)}")
        if self.options is not None:
            object.__setattr__(self, "options", _options(self.options, f"table {self.name!r}"))

    @property
    def bytes(self) -> int:
        """The bytes of the weights."""
        return self.rows * self.columns * self.item_size

    @property
    def state_bytes(self) -> int:
        """The bytes of the optimizer's state."""
        per_row, per_element = STATE_BYTES[self.optimizer]
        return self.rows * (per_row + per_element * self.columns)


@dataclass(frozen=True)
class PlacedTable:
    """A table of a plan: its option, and the device of each of its shards, in the option's order."""

    option: Option
    devices: tuple[int, ...]
    index: int  # of the option in the table's list
    why: str = ""


@dataclass(frozen=True)
class DeviceLoad:
    """The load of one device: seconds per step, bytes of its memory, bytes of its host's memory."""

    seconds: float
    hbm_bytes: float
    host_bytes: float


@dataclass(frozen=True)
class TablePlan:
    """Options and devices for every table. In every plan that fits, the slowest device takes at least `bound_seconds`."""

    status: str  # optimal, feasible, infeasible or unknown (no plan found, nothing proven)
    tables: dict[str, PlacedTable]
    devices: tuple[DeviceLoad, ...]
    hosts: tuple[float, ...]  # bytes of host memory in use, host by host
    slowest_device_seconds: float  # inf without a plan
    bound_seconds: float  # inf where proven infeasible
    hbm_limits: tuple[float, ...]  # bytes per device, after the reserve
    host_limits: tuple[float, ...]  # bytes per host, after the reserve
    reason: str = ""  # why no plan fits, in a sentence
    solver: str = ""
    assumptions: dict[str, Any] = field(default_factory=dict)

    @property
    def gap(self) -> float:
        """(slowest - bound) / slowest; 0 where they are equal, inf without a plan."""
        if not math.isfinite(self.slowest_device_seconds):
            return math.inf
        if self.slowest_device_seconds == self.bound_seconds:
            return 0.0
        return (self.slowest_device_seconds - self.bound_seconds) / self.slowest_device_seconds

    def to_dict(self) -> dict:
        """Plain data, as `autoshard tables --json` prints it."""
        tables = {
            name: {
                "sharding": p.option.sharding, "memory": p.option.memory, "devices": list(p.devices), "seconds": list(p.option.seconds),
                "hbm_bytes": list(p.option.hbm_bytes), "host_bytes": list(p.option.host_bytes), "option": p.index, "why": p.why,
            }
            for name, p in self.tables.items()
        }  # fmt: skip
        return {
            "status": self.status, "slowest_device_seconds": self.slowest_device_seconds, "bound_seconds": self.bound_seconds,
            "gap": self.gap, "tables": tables, "devices": [asdict(device) for device in self.devices],
            "hosts": [{"host_bytes": used, "host_limit_bytes": limit} for used, limit in zip(self.hosts, self.host_limits)],
            "hbm_limit_bytes": list(self.hbm_limits), "reason": self.reason, "solver": self.solver, "assumptions": self.assumptions,
        }  # fmt: skip


def _options(value: object, what: str) -> tuple[Option, ...]:
    """An Option or a sequence of Options as a tuple."""
    items = tuple(value) if isinstance(value, Iterable) and not isinstance(value, str) else (value,)
    if not items:
        raise ValueError(f"{what} has no options; give one or more, or leave `options` out to have them computed")
    for item in items:
        if not isinstance(item, Option):
            raise ValueError(f"{what}: options holds a {type(item).__name__}; expected Option(sharding, seconds, hbm_bytes) for each")
    return items


def _numbers(value: object, what: str) -> tuple[float, ...]:
    """A number or a sequence of numbers of 0 or more (inf forbids) as a tuple."""
    items: Sequence = value if isinstance(value, (tuple, list)) else (value,)
    for item in items:
        if isinstance(item, bool) or not isinstance(item, (int, float)) or not (0 <= item <= MOST or item == math.inf):
            raise ValueError(f"{what} is {str(item)[:40]}; expected a number of 0 to {MOST:g}, or inf, which forbids the option")
    return tuple(map(float, items))
