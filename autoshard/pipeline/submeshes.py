"""A cluster that is divided into sub-meshes: nodes of one or several kinds, the meshes of each sub-mesh, and the links between them.

A sub-mesh of m devices of a node is a mesh of one axis (m) or of two, as square as m allows. A sub-mesh of n entire nodes with M devices
is n x M, and also 2n x M/2 where M is even. A tensor of X bytes goes from sub-mesh a to u in equal parts, one per pair of devices:

    x = latency + X / (min(m_a, m_u) B)      B: a device's share of its node's link; on a cluster of one node, the device's own link

(`transfer_seconds`). A receiver that needs more than its part gathers the tensor itself (`stage_plans`). Zheng et al., "On optimizing the
communication of model parallelism" (2022), also find this order the cheapest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from autoshard.cost import axis_transfer_seconds, transfer_seconds
from autoshard.devices import link_of
from autoshard.mesh import DEVICES_PER_NODE, INTER_LATENCY, INTRA_LATENCY, MOST_DEVICES, Axis, Device, Mesh, default_axis_names, of_one_node
from autoshard.options import count
from autoshard.pipeline.stage_division import Nodes, SubMesh, Tiling, submeshes


@dataclass(frozen=True)
class Kind:
    """`nodes` equal nodes. Bandwidths in bytes per second: of a device inside its node, of a node to the others."""

    nodes: int
    devices: int  # of one node
    device: Device | str = "h100"
    intra_node_bandwidth: float | None = None  # the device's own
    inter_node_bandwidth: float = 400e9
    tf32: bool = False  # float32 matmuls run as TF32
    measured: Mesh | None = None  # nodes x devices with measured prices, which then replace the bandwidths

    def __post_init__(self) -> None:
        for name in ("nodes", "devices"):
            count().check(f"{name} of a kind of nodes", getattr(self, name))
        if self.measured is not None and self.measured.shape != (self.nodes, self.devices):
            raise ValueError(f"measured is a mesh of {self.measured.shape}; expected one of {(self.nodes, self.devices)}, nodes x devices")
        self.mesh((self.devices,))  # raises ValueError for an invalid device or bandwidth

    @property
    def inside(self) -> float:
        """Bytes per second of a device inside its node."""
        return link_of(self.mesh((1,)).device) if self.intra_node_bandwidth is None else self.intra_node_bandwidth

    def mesh(self, shape: tuple[int, ...]) -> Mesh:
        """Some of its devices as a mesh; an axis of more than a node's devices leaves the node."""
        if self.measured is not None:
            return self._measured(shape, self.measured)
        return Mesh.from_bandwidths(
            shape, intra_node_bandwidth=self.intra_node_bandwidth, inter_node_bandwidth=self.inter_node_bandwidth,
            device=self.device, devices_per_node=min(self.devices, math.prod(shape)), tf32=self.tf32,
        )  # fmt: skip

    def _measured(self, shape: tuple[int, ...], of: Mesh) -> Mesh:
        """The inner axes on the links within a node, the others between nodes; curves hold for the size that was measured."""
        axes: list[Axis] = []
        inner = 1
        for k, size in reversed(list(enumerate(shape))):
            link = of.axes[1] if inner * size <= self.devices else of.axes[0]
            curves = link.curves if size == link.size else ()
            axes.insert(0, replace(link, name=default_axis_names(len(shape))[k], size=size, curves=curves))
            inner *= size
        return Mesh(tuple(axes), of.device)

    @property
    def memory(self) -> float:
        """Bytes of one device."""
        return self.mesh((1,)).device.memory

    @property
    def link(self) -> Axis | None:
        """The measured link between its nodes, or of its devices where it has one node."""
        return None if self.measured is None else self.measured.axes[0 if self.nodes > 1 else 1]


@dataclass(frozen=True)
class Cluster:
    """The nodes that a pipeline runs on. every_size: also allow sub-meshes inside a node whose size does not divide the node's."""

    kinds: tuple[Kind, ...]
    every_size: bool = False

    def __post_init__(self) -> None:
        if not self.kinds:
            raise ValueError("a cluster has no nodes; give at least one kind of them")
        if self.num_devices > MOST_DEVICES:
            raise ValueError(f"a cluster has {self.num_devices} devices; expected {MOST_DEVICES} at most: make it smaller")

    @staticmethod
    def of(devices: int, devices_per_node: int = DEVICES_PER_NODE, **prices) -> Cluster:
        """`devices` equal devices in nodes of `devices_per_node`; fewer than that are one node. ValueError if they fill no whole nodes."""
        for name, value in (("devices", devices), ("devices_per_node", devices_per_node)):
            count().check(name, value)
        per_node = of_one_node(devices, devices_per_node)
        return Cluster((Kind(devices // per_node, per_node, **prices),))

    @property
    def num_devices(self) -> int:
        return sum(kind.nodes * kind.devices for kind in self.kinds)

    @cached_property
    def tiling(self) -> Tiling:
        nodes = tuple(Nodes(kind.nodes, kind.devices) for kind in self.kinds)
        return Tiling(nodes, submeshes(nodes, every_size=self.every_size))

    @property
    def submeshes(self) -> tuple[SubMesh, ...]:
        return self.tiling.submeshes

    def meshes(self, u: SubMesh) -> tuple[Mesh, ...]:
        kind = self.kinds[u.kind]
        if u.nodes == 1:  # one axis, or two of about equal size, the smaller first: 8 is 2 x 4, 7 is 7
            small = max(a for a in range(1, math.isqrt(u.devices) + 1) if u.devices % a == 0)
            return (kind.mesh((u.devices,) if small == 1 else (small, u.devices // small)),)
        shapes: list[tuple[int, ...]] = [(u.nodes, u.devices)] if u.devices > 1 else [(u.nodes,)]
        if u.devices % 2 == 0 and u.devices > 2:
            shapes.append((2 * u.nodes, u.devices // 2))
        return tuple(kind.mesh(shape) for shape in shapes)

    def memory(self, u: SubMesh) -> float:
        """Bytes of one of its devices."""
        return self.kinds[u.kind].memory

    def transfer_seconds(self, bytes_over: Sequence[float]) -> np.ndarray:
        """x for every number of bytes, sub-mesh that sends, and sub-mesh that receives; 0 where nothing is sent."""
        x = np.zeros((len(bytes_over), len(self.submeshes), len(self.submeshes)))
        for a, sender in enumerate(self.submeshes):
            for u, receiver in enumerate(self.submeshes):
                x[:, a, u] = [self.seconds_between(sender, receiver, size) for size in bytes_over]
        return x

    def seconds_between(self, a: SubMesh, u: SubMesh, size: float) -> float:
        """Of a tensor of `size` bytes from one sub-mesh to another, in equal parts; 0 without bytes."""
        devices = min(a.size, u.size)
        if len(self.kinds) == 1 and self.kinds[0].link is not None:
            return axis_transfer_seconds(size / devices, self.kinds[0].link)
        latency, bandwidth = self.link(a, u)
        return float(transfer_seconds(size, latency, devices * bandwidth)) if size > 0 else 0.0

    def link(self, a: SubMesh, u: SubMesh) -> tuple[float, float]:
        """Latency, and bytes per second between a device of one sub-mesh and a device of the other. They count as devices of the same node
        only if the cluster has one node."""
        if len(self.kinds) == 1 and self.kinds[0].nodes == 1:
            return INTRA_LATENCY, self.kinds[0].inside
        ends = [self.kinds[x.kind] for x in (a, u)]
        return INTER_LATENCY, min(min(kind.inter_node_bandwidth / kind.devices, kind.inside) for kind in ends)
