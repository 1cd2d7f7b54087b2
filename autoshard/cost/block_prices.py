"""Seconds of the redistribution steps between block layouts, per kind and set of mesh axes, as functions of elements.

With n = product of the axes' sizes and x elements:

                       rounds          elements that one rank sends          x
    all_gather         ceil(log2 n)    (n - 1) x                             of the input shard
    all_to_all         ceil(log2 n)    (n - 1)/n x                           of the input or output shard, the larger
    change_block_size  ceil(log2 n)    x                                     the most that leave one part (holdings.most_leaving)
    exchange           ceil(log2 n)    x                                     the most that one rank sends or receives (holdings.traffic)
    permute            1               x                                     of the shard
    all_reduce         2 ceil(log2 n)  2 (n - 1)/n x                         of the shard
    reduce_scatter     ceil(log2 n)    (n - 1)/n x                           of the input shard
    split              -               0; writes x                           of the output shard

`MeshPrices`: the bytes of a step over several axes are assigned to the slowest axis that they cross. An all_to_all of B bytes
sends B (1 - 1/n_k) / (n of the slower axes) over axis k; an all_gather runs over the slow axes first, a reduction over the fast axes
first. Axes with the same link (links.link_key) add up their bytes on it; different links work at the same time, and the most loaded
link decides. The bandwidth of a link is shared by its devices; a step over a single axis may have a measured curve. The latency is the
smaller of two: the rounds of one group over all axes, each with the latency of the slowest axis, or the rounds of one axis after the
other, each with the latency of its axis: sum_k ceil(log2 n_k) latency_k. An exchange with few messages per rank may also send them one
after the other: the number of rounds is then the most messages of one rank, each with the latency of the axis that they cross.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from autoshard.cost.links import axes_by_link
from autoshard.mesh import Axis, Mesh

Axes = tuple[int, ...]  # of the mesh
Seconds = Callable[[Any], Any]  # of a number of elements, or of an array of them


class MessageLoads(Protocol):
    """The messages of a step: what prices read of relayout.holdings.Traffic."""

    @property
    def elements(self) -> np.ndarray:
        """Of each message."""

    def by_axis(self, each: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        """(sent, received): elements by (axis, rank); each: numbers to add up per message in place of its elements."""


class Prices(ABC):
    """The seconds of steps. `honest`: volumes are the elements that really leave a rank, not those of the whole shard."""

    honest = True
    count = "buffers"  # the default of what a memory limit counts: resident | buffers

    def exchange(self, axes: Axes, held: int, needed: int, flows: MessageLoads | None) -> float:
        """Seconds of an exchange between shards of `held` and `needed` elements. flows: its messages, where they are few."""
        return self.of("exchange", axes)(max(held, needed))

    @abstractmethod
    def of(self, kind: str, axes: Axes) -> Seconds:
        """Seconds as a function of elements, never falling with more."""


def rounds(kind: str, n: int) -> int:
    return {"split": 0, "permute": 1, "all_reduce": 2 * (n - 1).bit_length()}.get(kind, (n - 1).bit_length())


@dataclass(frozen=True)
class MeshPrices(Prices):
    """Seconds on the links of the mesh. curves: (kind, axis) -> seconds of bytes that one rank sends, measured, never falling."""

    mesh: Mesh
    itemsize: int
    curves: Mapping[tuple[str, int], Callable[[float], float]] = field(default_factory=dict)

    def of(self, kind: str, axes: Axes) -> Seconds:
        if kind == "split":
            return affine(0.0, self.itemsize / self.mesh.device.memory_bandwidth)
        links = [self.mesh.axes[a] for a in axes]
        n = math.prod(link.size for link in links)
        if len(axes) == 1 and (kind, axes[0]) in self.curves:
            curve, volume = self.curves[kind, axes[0]], self.itemsize * {"all_gather": n - 1, "permute": 1}.get(kind, (n - 1) / n)
            return lambda x: curve(x * volume)
        return affine(_latency(kind, links), self.itemsize * _seconds_per_byte(kind, links))

    def exchange(self, axes: Axes, held: int, needed: int, flows: MessageLoads | None) -> float:
        """The seconds of the most loaded link, plus those of a local copy of the output shard, as in a split."""
        copied = self.of("split", ())(needed)
        if flows is None:
            return copied + self.of("exchange", axes)(max(held, needed))
        links = [self.mesh.axes[a] for a in axes]
        latency = min(_latency("exchange", links), self._in_turn(flows)) if links else 0.0
        loads = [
            _load(self.mesh.axes[some[0]], elements[some].sum(axis=0))
            for elements in flows.by_axis()
            for some in axes_by_link(self.mesh.axes)
        ]
        return copied + latency + self.itemsize * max(loads)

    def _in_turn(self, flows: MessageLoads) -> float:
        """The latency of messages sent in turn: d rounds suffice where no rank sends or receives more than d (Koenig's theorem)."""
        messages = flows.by_axis(np.ones(len(flows.elements)))
        latencies = np.array([link.latency for link in self.mesh.axes])
        groups = ((latency, latencies == latency) for latency in dict.fromkeys(latencies.tolist()))
        return sum(latency * max(float(one[some].sum(axis=0).max()) for one in messages) for latency, some in groups)


def _load(link: Axis, elements: np.ndarray) -> float:
    """Seconds of the most loaded link at one byte per element. elements: the load of each device."""
    shared = link.shared_by if len(elements) % link.shared_by == 0 else 1
    return float(elements.reshape(-1, shared).mean(axis=1).max()) / link.device_bandwidth


def affine(a: float, c: float) -> Seconds:
    return lambda x: a + c * x


def _latency(kind: str, links: list[Axis]) -> float:
    at_once = rounds(kind, math.prod(link.size for link in links)) * max(link.latency for link in links)
    return at_once if kind == "permute" else min(at_once, sum(rounds(kind, link.size) * link.latency for link in links))


def _seconds_per_byte(kind: str, links: list[Axis]) -> float:
    """Of the most loaded link: the bytes that cross its axes for one byte of x, divided by its bandwidth."""
    if kind in ("permute", "change_block_size", "exchange"):  # ranks differ in the links that their messages cross
        return max(1 / link.device_bandwidth for link in links)
    loads, before = list[tuple[Axis, float]](), 1  # seconds on each axis
    for link in links if kind in ("all_gather", "all_to_all") else links[::-1]:
        n = link.size
        crossing = (n - 1) * before if kind == "all_gather" else (n - 1) / n / before
        loads.append((link, crossing / link.device_bandwidth))
        before *= n
    most = max(sum(loads[k][1] for k in axes) for axes in axes_by_link([axis for axis, _ in loads]))
    return (2 if kind == "all_reduce" else 1) * most
