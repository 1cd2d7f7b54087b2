"""Seconds of the kernels and collectives of a training step, from constants of a kind of device and of a software stack.

    matmuls and attention                                                                                (measured_kernels.py)
    ring        V (n-1)/n B / bandwidth + latency rounds; bandwidth and latency of the slowest link of the ring   (`Ring`)
                rounds: V ceil(log2 n) within a node, as of an axis of a mesh (collectives.py), and of a tree; else n - 1
    all_to_all  max(bytes between nodes / adapter, bytes inside / link)                                  (`Ring.all_to_all`)
    overlap     max(a, b) + s min(a, b)                                                                  (`beside`)

Arguments are arrays with one entry per run, so that thousands of runs are priced at once. All functions increase with their work
and decrease with rates.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autoshard.devices import SLOWED

from .devices import DeviceConstants, StackConstants

# Bus bandwidth of all_reduce relative to all_gather and reduce_scatter over 4 to 16 nodes: 1.35, 1.44, 1.54 (nanotron ultrascale playbook).
TREE = 1.45
Numbers = np.ndarray  # one entry per run


def beside(kernels: Numbers, collectives: Numbers, share: Numbers | float = 1.0) -> Numbers:
    """Seconds of kernels and collectives that run beside each other, and slow each other: s = devices.SLOWED. share: of the seconds of
    kernels, that in which any runs."""
    return np.maximum(kernels, collectives) + SLOWED * share * np.minimum(kernels, collectives)


@dataclass(frozen=True)
class Ring:
    """A ring over n devices, `members` of them on each of `nodes` nodes, whose parallel rings share the nodes' links."""

    size: Numbers  # n
    bandwidth: Numbers  # bytes/s of each device in the ring
    latency: Numbers  # seconds per round
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
        rounds = np.where(self.nodes > 1, self.size - 1, np.ceil(np.log2(self.size)))
        return (self.size - 1) / self.size * bytes / self.bandwidth + self.latency * rounds

    def all_to_all(self, bytes: Numbers, copies: Numbers, inside: Numbers, adapter: Numbers, joined: Numbers) -> Numbers:
        """Each token of `bytes` in all to `copies` devices of the ring, chosen at random: between nodes over the device's own adapter
        (bytes/s), in them over the links inside (bytes/s). joined: one copy goes to a node that has some, as DeepEP and HybridEP do.

            between = (N - 1) (1 - (1 - 1/N)^copies)      of N nodes, those that a token is sent to
        """
        once = (self.nodes - 1) * (1 - (1 - 1 / self.nodes) ** copies)
        others = np.where(joined > 0, once, copies * (1 - 1 / self.nodes))
        within = copies * (1 - self.nodes / self.size)
        return np.maximum(bytes * others / adapter, bytes * within / inside) + self.latency * np.ceil(np.log2(self.size))

    def all_reduce(self, bytes: Numbers) -> Numbers:
        """Twice the gather's transfer, at TREE times its rate between nodes; a tree needs only 2 log2 n rounds."""
        rate = self.bandwidth * np.where(self.nodes > 1, TREE, 1.0)
        return 2 * (self.size - 1) / self.size * bytes / rate + 2 * self.latency * np.ceil(np.log2(self.size))
