"""Seconds of the kernels and collectives of a training step, from constants of a kind of device and of a software stack.

    matmuls and attention                                                                                (measured_kernels.py)
    elementwise bytes * traffic / (memory_bandwidth * memory)                                            (`elementwise_seconds`)
    ring        V (n-1)/n B / bandwidth + latency (n-1); bandwidth and latency of the slowest link of the ring   (`Ring`)
    overlap     (a^p + b^p)^(1/p): p = 1 is one after the other, p = inf is the longer of the two        (`overlapped`)

Arguments are arrays with one entry per run, so that thousands of runs are priced at once. All functions increase with their work
and decrease with rates.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autoshard.devices import Amount

from .devices import DeviceConstants, StackConstants

# Bus bandwidth of all_reduce relative to all_gather and reduce_scatter over 4 to 16 nodes: 1.35, 1.44, 1.54 (nanotron ultrascale playbook).
TREE = 1.45
Numbers = np.ndarray  # one entry per run


def p_norm(a: Amount, b: Amount, largest: Amount, p: float) -> Amount:
    """(a^p + b^p)^(1/p) of numbers or arrays. largest: of a and b, above 0; in front, so that nothing overflows."""
    return largest * ((a / largest) ** p + (b / largest) ** p) ** (1 / p)


def elementwise_seconds(bytes: Numbers, device: DeviceConstants, stack: StackConstants) -> Numbers:
    return bytes * stack.traffic / (device.memory_bandwidth * device.memory)


def overlapped(a: Numbers, b: Numbers, p: float) -> Numbers:
    """Seconds of two streams side by side, between max(a, b) and a + b."""
    return p_norm(a, b, np.maximum(np.maximum(a, b), 1e-12), p)


@dataclass(frozen=True)
class Ring:
    """A ring over n devices, `members` of them on each of `nodes` nodes, whose parallel rings share the nodes' links."""

    size: Numbers  # n
    bandwidth: Numbers  # bytes/s of each device in the ring
    latency: Numbers  # seconds per hop
    nodes: Numbers  # that the ring passes through

    @staticmethod
    def over(
        size: np.ndarray, stride: np.ndarray, per_node: np.ndarray, network: np.ndarray, device: DeviceConstants, stack: StackConstants
    ) -> Ring:
        """stride: how far apart neighbours of the group are in the order of ranks; network: bytes/s of one device's own adapter."""
        members = np.clip(np.floor(per_node / stride), 1, size)
        nodes = np.ceil(size / members)
        inside = device.link_bandwidth * device.link
        between = np.minimum(inside, network * device.network * members * np.maximum(nodes, 2) ** -stack.congestion)
        one_node = nodes <= 1
        latency = np.where(one_node, device.link_latency, stack.hop)
        return Ring(size, np.where(one_node, inside, between), latency, nodes)

    def gather(self, bytes: Numbers) -> Numbers:
        """All-gather to, or reduce-scatter from, `bytes` per device; 0 on one device."""
        return (self.size - 1) / self.size * bytes / self.bandwidth + self.latency * (self.size - 1)

    def all_reduce(self, bytes: Numbers) -> Numbers:
        """Twice the gather's transfer, at TREE times its rate between nodes; a tree needs only 2 log2 n hops."""
        rate = self.bandwidth * np.where(self.nodes > 1, TREE, 1.0)
        return 2 * (self.size - 1) / self.size * bytes / rate + 2 * self.latency * np.log2(self.size)
