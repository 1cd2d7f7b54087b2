"""Seconds of point-to-point transfers over a link, the axes that use the same link, and the size of joined messages (buckets).

    transfer    x(B) = latency + B / bandwidth                                                             (`transfer_seconds`)
                over a mesh axis: bandwidth = one device's share of the link while all devices of the axis send; of a measured axis
                the seconds of an all_gather in which every device sends as much: x (n - 1) / n for an output of x
                                                                                                           (`axis_transfer_seconds`)
    ring        r (n - 1) (latency + B / (n bandwidth)), r = 2 for all_reduce, else 1                      (`ring_seconds`)
    bucket      10 latency n bandwidth, within 64 kB and 25 MB: the latency is then less than a tenth of the seconds of the
                collective                                                                                 (`bucket_limit`)
    host        B / bandwidth of one direction between a device and its host's memory; both can run at the same time
                                                                                                           (`host_seconds`)
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import TYPE_CHECKING

import numpy as np

from autoshard.cost.collectives import Amount, collective_seconds
from autoshard.devices import Device, device_file, known_devices
from autoshard.graph import grouped
from autoshard.mesh import Axis, Mesh

if TYPE_CHECKING:
    from autoshard.layout import Layout

SMALLEST_BUCKET, LARGEST_BUCKET = 64e3, 25e6  # bytes
ROUNDING = 1e-9  # relative, of sums of seconds


def link_key(axis: Axis) -> tuple:
    """Equal for axes on one link: those of equal bandwidth, latency, sharing, backend and curves.

    Two axes inside a node use the same port of a device; two axes between nodes use the same link of a node. The axes of a measured
    mesh have different numbers, so each has its own link.
    """
    return axis.bandwidth, axis.latency, axis.shared_by, axis.backend, axis.curves


def shared_links(mesh: Mesh) -> tuple[int, ...]:
    """Per axis the number of the link that it uses."""
    numbers: dict[tuple, int] = {}
    return tuple(numbers.setdefault(link_key(axis), len(numbers)) for axis in mesh.axes)


def axes_by_link(axes: Sequence[Axis]) -> list[list[int]]:
    """The positions of the axes, grouped by link."""
    return list(grouped((link_key(axis), k) for k, axis in enumerate(axes)).values())


@dataclass(frozen=True)
class Gaps:
    """Where the collectives of one link that kernels wait for can begin, among the kernels in their order."""

    begins: Sequence[int]  # after so many kernels, in order
    kernels: Sequence[float]  # seconds of the first n kernels

    def stands_back(self, done: int, left: float, seconds: float, until: float) -> bool:
        """Whether a collective lets the next of these go first: it would not end before that one begins, and there is a later gap that has
        room for it. done: kernels that have ended; left: seconds of the running one; until: seconds of kernels after which one reads it."""
        k, now, seconds = bisect_right(self.begins, done), self.kernels[done + 1] - left, seconds * (1 - ROUNDING)
        if k == len(self.begins) or now + seconds <= self.kernels[self.begins[k]]:
            return False
        for begin, end in pairwise(islice(self.begins, k, None)):
            if self.kernels[begin] + seconds > until:
                return False
            if self.kernels[begin] + seconds <= self.kernels[end]:
                return True
        return False


def transfer_seconds(bytes: Amount, latency: float, bandwidth: float) -> Amount:
    """Seconds of a message of `bytes`, a number or an array of them; latency in seconds, bandwidth in bytes/s."""
    return latency + bytes / bandwidth


def transfer_latency(axis: Axis | None) -> float:
    """The seconds of a transfer over the axis that don't depend on its size; 0 without an axis."""
    return axis.latency if axis else 0.0


def axis_transfer_seconds(bytes: float, axis: Axis | None) -> float:
    """Seconds of a point-to-point transfer along an axis, all of its devices sending at the same time; 0 without an axis."""
    if axis is None or not bytes:
        return 0.0
    if axis.curves and axis.size > 1:
        return float(collective_seconds("all_gather", axis, bytes * axis.size / (axis.size - 1)))
    return transfer_seconds(bytes, axis.latency, axis.device_bandwidth)


def ring_seconds(collective: str, axis: Axis, bytes: float) -> float:
    """Seconds of a ring's steps with a largest buffer of `bytes`: an approximation, used to order messages."""
    rings = 2 if collective == "all_reduce" else 1
    return rings * (axis.size - 1) * (axis.latency + bytes / axis.size / axis.device_bandwidth)


def bucket_limit(axis: Axis) -> float:
    """The largest bytes of joined messages over the axis."""
    if not math.isfinite(axis.device_bandwidth):
        return LARGEST_BUCKET
    return min(max(10 * axis.latency * axis.size * axis.device_bandwidth, SMALLEST_BUCKET), LARGEST_BUCKET)


def least_joined_seconds(collective: str, axis: Axis, bytes: np.ndarray) -> np.ndarray:
    """A lower bound on what buffers of these sizes each add to the seconds of the buckets that they are joined to.

    A bucket of B bytes, at most `bucket_limit`, takes at least B times the least seconds per byte of any bucket: a curve that is affine
    between its sizes has it at one of them, or at the limit. Larger buffers are not joined.
    """
    limit, curve = bucket_limit(axis), axis.curve(collective) if axis.size > 1 else None
    sizes = np.array([limit] if curve is None else [limit, *(size for size in curve.sizes if 0 < size < limit)])
    rate = float((collective_seconds(collective, axis, sizes) / sizes).min())
    seconds = collective_seconds(collective, axis, bytes)
    return np.where(bytes <= limit, np.minimum(seconds, rate * bytes), seconds)


def slowest_seconds_per_byte(mesh: Mesh) -> float:
    """The seconds per byte of one device on the slowest axis."""
    return 1.0 / min(axis.device_bandwidth for axis in mesh.axes)


def groups_on_link(axis: Axis | None, group: int) -> int:
    """The number of groups, of `group` devices each, that use the axis' link at the same time; 1 without an axis."""
    return max(1, axis.shared_by // group) if axis else 1


def gather_seconds(shape: tuple[int, ...], itemsize: int, layout: Layout | None, mesh: Mesh) -> float:
    """Seconds to gather a tensor that is sharded over all devices into `layout`: over every axis on which that is replicated, the
    slowest first; inf for a Partial layout and for none. shape: global; itemsize: bytes.
    """
    if layout is None or any(placement.is_partial() for placement in layout):
        return math.inf
    held, seconds = math.prod(shape) * itemsize / mesh.num_devices, 0.0
    for axis, placement in zip(mesh.axes, layout, strict=True):
        if placement.is_replicate() and axis.size > 1:
            held *= axis.size
            seconds += float(collective_seconds("all_gather", axis, float(held)))
    return seconds


def host_bandwidth(device: Device) -> float | None:
    """Bytes per second and direction: the device's own figure, else that of its kind (cost/devices); None where neither is known."""
    if device.host_bandwidth is not None or device.name not in known_devices():
        return device.host_bandwidth
    link = device_file(device.name).get("host_link")
    return None if link is None else float(link["bandwidth"])


def host_seconds(size: float, device: Device) -> float:
    """Seconds to copy `size` bytes one way. ValueError where the device has no host link."""
    bandwidth = host_bandwidth(device)
    if bandwidth is None:
        raise ValueError(f"device {device.name} has no host_bandwidth, so nothing can be offloaded; give a Device with one")
    return size / bandwidth


def offload_seconds(size: float, exposed: float, device: Device) -> float:
    """Seconds that a copy to the host or back adds to a step: the part of it that no computation hides, and the device's own reading or
    writing of `size` bytes.

        t = exposed * bytes / host link + bytes / memory_bandwidth + launch

    exposed: share of the copy that is not hidden, 0 to 1. ValueError where the device has no host link.
    """
    return exposed * host_seconds(size, device) + size / device.memory_bandwidth + device.launch
