"""Seconds of the steps between block layouts, per kind and set of mesh axes, as functions of elements.

With n = product of the axes' sizes, x elements and (l, w) a model's seconds per round and per element:

                       rounds          elements that one rank sends          x
    all_gather         ceil(log2 n)    (n - 1) x                             held before
    all_to_all         ceil(log2 n)    (n - 1)/n x                           held before or after, the larger
    change_block_size  ceil(log2 n)    x                                     that leave the fullest mover (holdings.most_leaving)
    exchange           ceil(log2 n)    x                                     the most that one rank sends or gets (holdings.traffic)
    permute            1               x                                     held
    all_reduce         2 ceil(log2 n)  2 (n - 1)/n x                         held
    reduce_scatter     ceil(log2 n)    (n - 1)/n x                           held before
    split              -               0; writes x                           held after

`MeshPrices` (honest): with several axes the bytes are told apart by the slowest axis that they cross: an all_to_all of B bytes sends
B (1 - 1/n_k) / (n of the slower axes) over axis k; an all_gather takes the slow axes first, a reduction the fast ones. Axes of equal
bandwidth and sharing are one link, which carries the sum; different links work at the same time, the fullest decides. Shared links
are shared; one axis alone may have a measured curve. The rounds are those of one group, each as slow as the slowest axis, or those of
one axis after the other, each as slow as its own, whichever is less: sum_k ceil(log2 n_k) latency_k. An exchange whose ranks have few
messages may send them in turn: as many rounds as the busiest has, each as slow as the axis that they cross.
`IdealPrices` (TensorCraft's, as published): alpha per round and beta per element, an all_to_all's volume n times too large, a
permute's twice, a change of block size (n - 1)/n of what is held, a split free.
"""

from __future__ import annotations

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
KINDS = ("split", "all_gather", "all_to_all", "permute", "change_block_size", "exchange", "all_reduce", "reduce_scatter")


class Traffic(Protocol):
    """Who sends how much to whom in a step (relayout.holdings.Traffic)."""

    elements: np.ndarray  # of each message

    def by_axis(self, each: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        """(sent, received): elements by (axis, rank); each: what to count for each message in place of its elements."""


class Prices(ABC):
    """What a step costs. `honest`: volumes count what really leaves a rank, not what the published model says."""

    honest: bool
    count: str  # what a memory limit counts where nobody says it: resident | buffers

    def exchange(self, axes: Axes, held: int, needed: int, flows: Traffic | None) -> float:
        """Seconds of an exchange between parts of `held` and `needed` elements. flows: its traffic, where prices are honest."""
        return self.of("exchange", axes)(max(held, needed))

    @abstractmethod
    def of(self, kind: str, axes: Axes) -> Seconds:
        """Seconds as a function of elements, never falling with more."""


def rounds(kind: str, n: int) -> int:
    return {"split": 0, "permute": 1, "all_reduce": 2 * (n - 1).bit_length()}.get(kind, (n - 1).bit_length())


@dataclass(frozen=True)
class IdealPrices(Prices):
    """Ideal lower bounds, as published: alpha seconds per round, beta per element (default: 8 bytes at 200 Gb/s)."""

    mesh: tuple[int, ...]
    alpha: float = 1e-6
    beta: float = 64 / 200e9
    honest = False
    count = "resident"

    def of(self, kind: str, axes: Axes) -> Seconds:
        n = math.prod(self.mesh[a] for a in axes)
        volume = {
            "split": 0.0,
            "all_gather": n - 1,
            "all_to_all": n - 1,
            "permute": 2.0,
            "exchange": n - 1,
            "all_reduce": 2 * (n - 1) / n,
        }.get(kind, (n - 1) / n)
        return affine(rounds(kind, n) * self.alpha, volume * self.beta)


@dataclass(frozen=True)
class MeshPrices(Prices):
    """What the mesh's links allow. curves: (kind, axis) -> seconds of bytes that one rank sends, measured, never falling."""

    mesh: Mesh
    itemsize: int
    curves: Mapping[tuple[str, int], Callable[[float], float]] = field(default_factory=dict)
    honest = True
    count = "buffers"

    def of(self, kind: str, axes: Axes) -> Seconds:
        if kind == "split":
            return affine(0.0, self.itemsize / self.mesh.device.memory_bandwidth)
        links = [self.mesh.axes[a] for a in axes]
        n = math.prod(link.size for link in links)
        if len(axes) == 1 and (kind, axes[0]) in self.curves:
            curve, volume = self.curves[kind, axes[0]], self.itemsize * {"all_gather": n - 1, "permute": 1}.get(kind, (n - 1) / n)
            return lambda x: curve(x * volume)
        return affine(_latency(kind, links), self.itemsize * _seconds_per_byte(kind, links))

    def exchange(self, axes: Axes, held: int, needed: int, flows: Traffic | None) -> float:
        """The fullest link decides: devices that share one share its load. What is kept is copied, as by a split."""
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

    def _in_turn(self, flows: Traffic) -> float:
        """The latency of one message after the other: d rounds of swaps do where no rank sends or gets more than d (Koenig's theorem)."""
        messages = flows.by_axis(np.ones(len(flows.elements)))
        most = [(some, max(float(one[some].sum(axis=0).max()) for one in messages)) for some in self._axes_by_latency()]
        return sum(self.mesh.axes[some[0]].latency * d for some, d in most)

    def _axes_by_latency(self) -> list[list[int]]:
        groups: dict[float, list[int]] = {}
        for a, link in enumerate(self.mesh.axes):
            groups.setdefault(link.latency, []).append(a)
        return list(groups.values())


def _load(link: Axis, elements: np.ndarray) -> float:
    """Seconds per byte of an element: the fullest link, each device's load given."""
    shared = link.shared_by if len(elements) % link.shared_by == 0 else 1
    return float(elements.reshape(-1, shared).mean(axis=1).max()) / link.device_bandwidth


def affine(a: float, c: float) -> Seconds:
    return lambda x: a + c * x


def _latency(kind: str, links: list[Axis]) -> float:
    at_once = rounds(kind, math.prod(link.size for link in links)) * max(link.latency for link in links)
    return at_once if kind == "permute" else min(at_once, sum(rounds(kind, link.size) * link.latency for link in links))


def _seconds_per_byte(kind: str, links: list[Axis]) -> float:
    """For one byte of x: the sum over axes (slowest first) of the bytes that cross each, over its bandwidth."""
    if kind in ("permute", "change_block_size", "exchange"):  # who crosses which link differs from rank to rank
        return max(1 / link.device_bandwidth for link in links)
    loads, before = [], 1
    for link in links if kind in ("all_gather", "all_to_all") else links[::-1]:
        n = link.size
        crossing = (n - 1) * before if kind == "all_gather" else (n - 1) / n / before
        loads.append((link, crossing / link.device_bandwidth))
        before *= n
    return (2 if kind == "all_reduce" else 1) * _fullest(loads)


def _fullest(loads: list[tuple[Axis, float]]) -> float:
    """The seconds of the fullest link."""
    return max(sum(loads[k][1] for k in axes) for axes in axes_by_link([axis for axis, _ in loads]))
