"""Seconds of a copy between a device and its host's memory, over a link of its own; both directions can run at the same time.

    t = bytes / bandwidth of one direction
"""

from __future__ import annotations

from autoshard.cost.devices import host_link_bandwidth
from autoshard.mesh import Device


def host_bandwidth(device: Device) -> float | None:
    """Bytes per second and direction: the device's own figure, else that of its kind (cost/devices); None where neither is known."""
    return device.host_bandwidth if device.host_bandwidth is not None else host_link_bandwidth(device.name)


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
