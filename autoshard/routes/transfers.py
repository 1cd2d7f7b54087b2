"""A tensor on some devices of a cluster, brought to other devices in another layout: from 16 devices that train to 4 that generate.

    box(r)       the ranges of indices that device r holds                                          layout.rank_bounds
    message      to receiver r, the part of its box that a shard holds, from the nearest holder of that shard: r itself, else one that
                 differs from r on a faster axis only; among equally near ones in turn                        (`_senders`)
    seconds      max over axes of the seconds of the most bytes that a device sends or receives over the axis (cost.links)
                 a message crosses the slowest axis on which its ends differ                                  (`_seconds`)
    transfer     min over layouts v of the target mesh of   seconds of messages to v  +  seconds of the route from v to the target

Receivers that need the same elements then fetch them once from afar and share them among themselves. Where both ends are the same
devices in the same mesh, collectives alone are the routes (`same_mesh`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autoshard.cost import axis_transfer_seconds
from autoshard.layout import Layout, all_layouts, rank_bounds
from autoshard.mesh import Mesh
from autoshard.routes.shortest import Route, Routes

Box = tuple[tuple[int, int], ...]  # per dim the first index and the end


@dataclass(frozen=True)
class DeviceSet:
    """The devices of a cluster that a mesh consists of: their numbers, row-major over the mesh."""

    mesh: Mesh
    numbers: tuple[int, ...]

    def boxes(self, shape: tuple[int, ...], layout: Layout) -> tuple[Box, ...]:
        """What each of them holds."""
        return tuple(rank_bounds(shape, layout, self.mesh, where) for where in self.mesh.coordinates())


@dataclass(frozen=True)
class Message:
    """Elements that one device sends to another, or keeps; devices by their numbers in the cluster."""

    sender: int
    receiver: int
    box: Box


@dataclass(frozen=True)
class Transfer:
    """Messages between devices, and the route on the target mesh that follows them. bytes: sent by all devices together."""

    messages: tuple[Message, ...]
    via: Layout  # of the target mesh: what the messages bring
    route: Route
    seconds: float
    bytes: float


class Transfers:
    """The cheapest transfers from one set of devices of a cluster to another. Layouts hold no Partial."""

    def __init__(self, cluster: Mesh, source: DeviceSet, target: DeviceSet):
        self.cluster, self.source, self.target = cluster, source, target
        self.routes = Routes(target.mesh)
        ends = [np.array(np.unravel_index(d.numbers, cluster.shape)) for d in (target, source)]
        differ = ends[0][:, :, None] != ends[1][:, None, :]  # axes, receivers, senders
        self._crossed = np.where(differ.any(axis=0), differ.argmax(axis=0), len(cluster.axes))
        turn = (np.array(source.numbers)[None, :] - np.array(target.numbers)[:, None]) % cluster.num_devices
        self._distance = (len(cluster.axes) - self._crossed) * cluster.num_devices + turn
        self._known: dict[tuple, np.ndarray] = {}

    @property
    def same_mesh(self) -> bool:
        return self.source == self.target

    def table(self, shape: tuple[int, ...], itemsize: int, sources: Sequence[Layout], targets: Sequence[Layout]) -> np.ndarray:
        """Seconds from each source (row) to each target (column); inf where there is no way."""
        return self._through(shape, itemsize, sources, targets).min(axis=1)

    def transfer(self, shape: tuple[int, ...], itemsize: int, source: Layout, target: Layout) -> Transfer:
        """The cheapest transfer, its seconds equal to the table's entry. ValueError where there is none."""
        through = self._through(shape, itemsize, (source,), (target,))[0, :, 0]
        k = int(through.argmin())
        if math.isinf(through[k]):
            raise ValueError(f"no transfer of a tensor of {shape} leads from {source} to {target}; expected layouts without Partial")
        via = all_layouts(shape, self.target.mesh)[k]
        route = self.routes.route(shape, itemsize, via, target)
        assert route is not None
        messages = self._messages(shape, source, via)
        sent = sum(math.prod(hi - lo for lo, hi in m.box) for m in messages if m.sender != m.receiver) * itemsize
        shared = sum(step.bytes for step in route.steps) * self.target.mesh.num_devices
        return Transfer(messages, via, route, float(through[k]), sent + shared)

    def _through(self, shape: tuple[int, ...], itemsize: int, sources: Sequence[Layout], targets: Sequence[Layout]) -> np.ndarray:
        """Seconds by source, layout that the messages bring, and target."""
        via = all_layouts(shape, self.target.mesh)
        key = (shape, itemsize, tuple(sources))
        if key not in self._known:
            self._known[key] = np.array([[self._seconds(shape, itemsize, s, v) for v in via] for s in sources])
        return self._known[key][:, :, None] + self.routes.table(shape, itemsize, via, targets)[None, :, :]

    def _seconds(self, shape: tuple[int, ...], itemsize: int, source: Layout, via: Layout) -> float:
        _, senders, elements = self._parts(shape, source, via)
        receivers = np.broadcast_to(np.arange(len(elements))[:, None], elements.shape)
        crossed = self._crossed[receivers, senders]
        slowest = 0.0
        for k, axis in enumerate(self.cluster.axes):
            here = crossed == k
            if not (elements[here] > 0).any():
                continue
            most = max(np.bincount(ends[here], elements[here]).max() for ends in (receivers, senders))
            slowest = max(slowest, axis_transfer_seconds(float(most) * itemsize, axis))
        return slowest

    def _parts(self, shape: tuple[int, ...], source: Layout, via: Layout) -> tuple[tuple[Box, ...], np.ndarray, np.ndarray]:
        """The distinct shards, and by receiver and shard: which of the source's devices sends it, and how many elements."""
        held, wanted = self.source.boxes(shape, source), self.target.boxes(shape, via)
        shards = tuple(dict.fromkeys(held))
        numbers = np.array([shards.index(box) for box in held])
        distance = np.where(numbers[None, None, :] == np.arange(len(shards))[None, :, None], self._distance[:, None, :], np.inf)
        old, new = (np.array(boxes).reshape(len(boxes), -1, 2) for boxes in (shards, wanted))
        common = np.minimum(new[:, None, :, 1], old[None, :, :, 1]) - np.maximum(new[:, None, :, 0], old[None, :, :, 0])
        return shards, distance.argmin(axis=2), np.clip(common, 0, None).prod(axis=2)

    def _messages(self, shape: tuple[int, ...], source: Layout, via: Layout) -> tuple[Message, ...]:
        shards, senders, elements = self._parts(shape, source, via)
        wanted, messages = self.target.boxes(shape, via), []
        for r, s in zip(*np.nonzero(elements), strict=True):
            common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(wanted[r], shards[s], strict=True))
            messages.append(Message(self.source.numbers[senders[r, s]], self.target.numbers[r], common))
        return tuple(messages)
