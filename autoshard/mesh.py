"""A cluster as a mesh of devices: named axes with their links, slowest axis first. SI units.

A collective over axis k runs in prod(sizes of the other axes) groups at the same time. The groups whose members are on different
nodes share the link of each node, so the bandwidth of one device is

    B_k = bandwidth_k / shared_by_k            (bytes/s per device)

where `bandwidth` is the speed of the link and `shared_by` the number of devices that use the link at the same time. (Measured on
an emulated cluster: a ring over the shared link takes 1413 ms, this formula predicts 1342 ms.)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise, product
from typing import Any

from autoshard.devices import DEVICES as DEVICES
from autoshard.devices import Device as Device
from autoshard.devices import Kernels, link_of


@dataclass(frozen=True)
class LinkCurve:
    """Measured seconds of one collective over an axis, all its groups at the same time: affine between sizes and beyond the last."""

    collective: str
    sizes: tuple[float, ...]  # bytes, ascending: the largest buffer that one rank holds
    seconds: tuple[float, ...]
    tail: float  # seconds per byte above the last size
    error: float = 0.0  # mean relative error on sizes that the curve was not fitted to


@dataclass(frozen=True)
class Axis:
    """One mesh axis: `size` devices in a group, over a link of `bandwidth` bytes/s that `shared_by` devices use at once.

    The seconds of a collective come from its measured curve where `curves` has one, else from latency and bandwidth.
    """

    name: str
    size: int
    bandwidth: float  # bytes/s of the link
    latency: float  # seconds per collective step
    shared_by: int = 1
    backend: str = "nccl"  # one of BACKENDS; gloo has no reduce_scatter or all_to_all of its own
    curves: tuple[LinkCurve, ...] = ()

    def curve(self, collective: str) -> LinkCurve | None:
        return next((curve for curve in self.curves if curve.collective == collective), None)

    def link_dict(self) -> dict[str, Any]:
        """The axis and its link as plain data, without curves: name, size, bandwidth (bytes/s), latency (s), shared_by."""
        return {key: value for key, value in asdict(self).items() if key not in ("backend", "curves")}

    @property
    def device_bandwidth(self) -> float:
        """Bytes per second of one device when all groups of this axis communicate at the same time."""
        return self.bandwidth / self.shared_by


MOST_DIGITS = 18  # of a number in a mesh's text; Python refuses to read thousands of digits

# Mean relative error that is usual for prices that were not measured. Links: data-sheet bandwidths (the share of them that is usually
# reached) against 36 measured NCCL curves of a100, h100 and l40s. Device: an uncalibrated roofline against 81 real training steps
# of an MLP, as published with DistIR.
UNMEASURED_LINK, UNMEASURED_DEVICE = 0.37, 0.46

BACKENDS = ("nccl", "gloo")

INTRA_LATENCY = 5e-6  # seconds; NVLink-class, order of magnitude of nccl-tests on small messages
INTER_LATENCY = 15e-6  # seconds; InfiniBand-class
MOST_DEVICES, MOST_AXES = 2**18, 5  # an op's candidates multiply with the axes: 7775 of a matmul on five axes, 46000 on six
DEVICES_PER_NODE = 8  # where nobody says and no shape does: a server with A100s, H100s or H200s has as many


COST_METHODS = ("compute", "collective", "transfer", "memory")  # of a cost model


@dataclass(frozen=True)
class Mesh:
    """Axes (slowest first) of equal devices. `rank` is row-major over the axes, as torch's DeviceMesh counts."""

    axes: tuple[Axis, ...]
    device: Device = field(default_factory=lambda: DEVICES["h100"])
    expert_imbalance: float = 1.0  # tokens of the busiest rank's experts as a multiple of its share, where experts are sharded
    cost_model: Any = None  # such as cost.DefaultCosts, in place of this package's formulas; files note its name and fingerprint

    def __post_init__(self) -> None:
        check_size(self.shape)
        if not all(self.axis_names) or len(set(self.axis_names)) < len(self.axes):
            raise ValueError(f"the axes are called {', '.join(map(repr, self.axis_names))}; expected a name of its own for each")
        if not (isinstance(self.expert_imbalance, (int, float)) and 1 <= self.expert_imbalance < math.inf):
            raise ValueError(f"expert_imbalance is {self.expert_imbalance!r}; expected a number of 1 or more: 1 is a balanced load")
        slowed, links = self.device.slowed, max(2, len(self.axes))  # s links <= 1: beside traffic on all of them there is nothing to gain
        if slowed is not None and not (isinstance(slowed, (int, float)) and 0 <= slowed <= 1 / links):
            raise ValueError(f"slowed of the device is {slowed!r}; expected a number of 0 to 1/{links}, with {len(self.axes)} axes")
        if (model := self.cost_model) is not None and not isinstance(model, AbsentCostModel):
            lacks = [name for name in COST_METHODS if not callable(getattr(model, name, None))]
            lacks += [name for name in ("name", "fingerprint") if not isinstance(getattr(model, name, None), str)]
            if lacks or isinstance(model, type):
                what = f"lacks {', '.join(lacks)}" if lacks else "is a class"
                raise ValueError(f"the cost_model {what}; expected an object with {', '.join(COST_METHODS)}, name and fingerprint")

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(axis.size for axis in self.axes)

    @property
    def num_devices(self) -> int:
        return math.prod(self.shape)

    @property
    def axis_names(self) -> tuple[str, ...]:
        return tuple(axis.name for axis in self.axes)

    def coordinates(self) -> tuple[tuple[int, ...], ...]:
        """The coordinate of every rank, in the order of ranks."""
        return tuple(product(*(range(n) for n in self.shape)))

    def to_dict(self) -> dict:
        """Plain data for `from_dict`; axes without curves, devices without an error, TF32, kernels, a host link or what slows them, and
        balanced experts don't mention them."""
        data = asdict(replace(self, cost_model=None))
        del data["cost_model"]
        if self.cost_model is not None:
            data["cost_model"] = {"name": self.cost_model.name, "fingerprint": self.cost_model.fingerprint}
        if self.expert_imbalance == 1:
            del data["expert_imbalance"]
        for key in ("error", "flops_tf32", "tf32", "kernels", "host_bandwidth", "slowed"):
            if data["device"][key] is None or data["device"][key] is False:
                del data["device"][key]
        data["axes"] = [{key: value for key, value in axis.items() if key != "curves" or value} for axis in data["axes"]]
        return data

    @staticmethod
    def from_dict(data: dict) -> Mesh:
        """The inverse of `to_dict`; ValueError when a key is missing or unknown."""
        try:
            own = AbsentCostModel(**data["cost_model"]) if "cost_model" in data else None
            return Mesh(tuple(_axis(**axis) for axis in data["axes"]), _device(**data["device"]), data.get("expert_imbalance", 1.0), own)
        except (TypeError, KeyError) as error:
            raise ValueError(f"not a mesh: {error}; expected axes (name, size, bandwidth, latency, shared_by) and device") from None

    @staticmethod
    def from_bandwidths(
        shape: tuple[int, ...],
        *,
        intra_node_bandwidth: float | None = None,
        inter_node_bandwidth: float = 400e9,
        device: str | Device = "h100",
        devices_per_node: int | None = None,
        axis_names: tuple[str, ...] | None = None,
        intra_node_latency: float = INTRA_LATENCY,
        inter_node_latency: float = INTER_LATENCY,
        backend: str = "nccl",
        tf32: bool = False,
    ) -> Mesh:
        """A two-level cluster: axes whose stride is within a node use the intra-node link, the others the node's own link.

        intra_node_bandwidth: bytes/s per device; by default what collectives reach on the device's own links. inter_node_bandwidth: bytes/s
        of one node's link to the others, shared by that node's devices when they talk at the same time. devices_per_node: default all but
        the first axis (a mesh of one axis is one node); more devices than a node has fill whole nodes. An axis that starts inside a node
        and leaves it is as slow as the slower of its two links. tf32: float32 matmuls run as TF32, which torch has to be told (`Device`).
        ValueError on a shape, bandwidth or device that can't be.
        """
        shape, device = check_shape(shape), _device_of(device, tf32)
        intra_node_bandwidth = link_of(device) if intra_node_bandwidth is None else intra_node_bandwidth
        for name, value in (("intra_node_bandwidth", intra_node_bandwidth), ("inter_node_bandwidth", inter_node_bandwidth)):
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not (0 < value < math.inf):
                raise ValueError(f"{name} is {value!r}; expected a positive number of bytes per second, for example 300e9")
        for name, value in (("intra_node_latency", intra_node_latency), ("inter_node_latency", inter_node_latency)):
            if not (isinstance(value, (int, float)) and 0 <= value < math.inf):
                raise ValueError(f"{name} is {value!r}; expected seconds, 0 or more, for example 5e-6")
        if backend not in BACKENDS:
            raise ValueError(f"backend is {backend!r}; expected {' or '.join(BACKENDS)}")
        per_node = _per_node(shape, devices_per_node)
        names = axis_names or default_axis_names(len(shape))
        if len(names) != len(shape) or len(set(names)) != len(names):
            raise ValueError(f"axis_names {names!r} must be {len(shape)} different names, one per axis of {shape}")
        axes = []
        for k, size in enumerate(shape):
            stride = math.prod(shape[k + 1 :])  # distance in ranks between neighbours on this axis
            if stride * size <= per_node:
                axes.append(Axis(names[k], size, float(intra_node_bandwidth), intra_node_latency, backend=backend))
            elif stride >= per_node:
                axes.append(Axis(names[k], size, float(inter_node_bandwidth), inter_node_latency, per_node, backend))
            else:  # spans nodes: `stride` rings use the node's link at the same time
                bandwidth = min(float(intra_node_bandwidth) * stride, float(inter_node_bandwidth))
                axes.append(Axis(names[k], size, bandwidth, inter_node_latency, stride, backend))
        return Mesh(tuple(axes), device)


@dataclass(frozen=True)
class AbsentCostModel:
    """The cost model of a plan that was read from a file, which has its name only."""

    name: str
    fingerprint: str

    def __getattr__(self, method: str) -> Any:
        if method not in COST_METHODS:
            raise AttributeError(method)
        raise ValueError(f"the plan's seconds are those of the cost model {self.name!r}, which a file can't hold; plan again with it")


def _device_of(device: str | Device, tf32: bool) -> Device:
    """ValueError where there is no such device."""
    if isinstance(device, str):
        if device not in DEVICES:
            raise ValueError(f"unknown device {device!r}; known are {', '.join(sorted(DEVICES))}, or pass a Device")
        device = DEVICES[device]
    if not isinstance(device, Device):
        raise ValueError(f"device is {device!r}; expected a Device or the name of one, for example 'h100'")
    return device.with_tf32() if tf32 else device


def _per_node(shape: tuple[int, ...], devices_per_node: int | None) -> int:
    """Devices of a node, by default all but the first axis. ValueError where the mesh doesn't fill whole nodes."""
    if devices_per_node is not None and (type(devices_per_node) is not int or devices_per_node < 1):
        raise ValueError(f"devices_per_node is {devices_per_node!r}; expected a positive whole number (default: all but axis 0)")
    per_node = devices_per_node or (math.prod(shape[1:]) if len(shape) > 1 else shape[0])
    of_one_node(math.prod(shape), per_node)
    return per_node


def of_one_node(devices: int, per_node: int, option: str = "devices_per_node") -> int:
    """The devices of a node, all where there are fewer. ValueError, which names the option, where they don't fill whole nodes."""
    if devices > per_node and devices % per_node:
        example = math.gcd(devices, per_node)
        raise ValueError(f"{devices} devices do not fill nodes of {per_node}; give {option} a divisor of {devices}, for example {example}")
    return min(devices, per_node)


def _axis(curves: Sequence[dict] = (), **fields: Any) -> Axis:
    return Axis(**fields, curves=tuple(_checked(LinkCurve(**curve)) for curve in curves))


def _device(kernels: Mapping[str, Any] | None = None, **fields: Any) -> Device:
    if kernels is None:
        return Device(**fields)
    if not isinstance(kernels, Mapping):
        raise TypeError(f"kernels of the device are a {type(kernels).__name__}")
    return Device(**fields, kernels=Kernels.of_dict(kernels, fields))


def _checked(curve: LinkCurve) -> LinkCurve:
    """The curve with tuples of floats. ValueError for numbers that can't be interpolated."""
    sizes, seconds, numbers = curve.sizes, curve.seconds, [*curve.sizes, *curve.seconds, curve.tail, curve.error]
    if any(isinstance(x, bool) or not isinstance(x, (int, float)) or not 0 <= x < math.inf for x in numbers):
        raise ValueError(f"the curve of {curve.collective} holds something other than numbers of 0 or more; measure again")
    if not sizes or len(sizes) != len(seconds) or any(a >= b for a, b in pairwise(sizes)) or any(a > b for a, b in pairwise(seconds)):
        raise ValueError(f"the curve of {curve.collective} has {len(sizes)} sizes, {len(seconds)} times; expected as many, both in order")
    return LinkCurve(curve.collective, tuple(map(float, sizes)), tuple(map(float, seconds)), float(curve.tail), float(curve.error))


def default_axis_names(num_axes: int) -> tuple[str, ...]:
    return tuple(f"axis{k}" for k in range(num_axes))


def check_shape(shape: object) -> tuple[int, ...]:
    """A mesh shape as a tuple of positive ints; the ValueError for anything else says what was given."""
    if isinstance(shape, int) and not isinstance(shape, bool):
        shape = (shape,)
    try:
        sizes: tuple = tuple(shape)  # type: ignore[arg-type]
    except TypeError:
        sizes = ()
    if not sizes or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in sizes):
        raise ValueError(f"mesh shape is {shape!r}; expected positive whole numbers, one per axis, for example (2, 4)")
    check_size(sizes)
    return sizes


def check_size(sizes: tuple[int, ...]) -> None:
    """ValueError on more axes or devices than planning can list layouts for."""
    if len(sizes) > MOST_AXES:
        raise ValueError(f"mesh {_by(sizes)} has {len(sizes)} axes; expected {MOST_AXES} at most: join axes of the same kind of link")
    if math.prod(sizes) > MOST_DEVICES:
        raise ValueError(f"mesh {_by(sizes)} has too many devices; expected {MOST_DEVICES} at most: make it smaller")


def _by(sizes: tuple[int, ...]) -> str:
    """2x4; of a long shape its beginning."""
    written = "x".join(str(n) if n < 10**12 else f"{float(min(n, 10**300)):.0e}" for n in sizes[:8])
    return written if len(sizes) <= 8 else f"{written}x..."


def shape_text(sizes: Iterable[int]) -> str:
    """(2, 4) -> `2x4`"""
    return "x".join(map(str, sizes))


def parse_shape(text: str) -> tuple[int, ...]:
    """`2x4` -> (2, 4). ValueError on anything else."""
    parts = text.lower().replace("*", "x").replace(",", "x").split("x")
    if not all(part.strip().isdecimal() and len(part.strip()) <= MOST_DIGITS for part in parts):
        raise ValueError(f"mesh is {text!r}; expected sizes joined by x, slowest axis first, for example 2x4")
    return check_shape(tuple(int(part) for part in parts))
