"""What a step takes at least where some device group has m of the n devices, whatever the layouts: which sub-meshes can't pay.

From the proven seconds of the layers on one device of the fastest kind (m devices take no less than an m-th of them). A device group of m
devices does a contiguous part x of a microbatch's work W, the others do the rest; every schedule of K microbatches takes at least

    K max( x / m, (W - x) / (n - m), W / n )        some group has at least the mean of the others, and of all
    c (x / m + (W - x) / M)                         one microbatch goes through all stages, forward and backward: the share c of its work
                                                    without gradients of parameters; M: the largest sub-mesh of the n - m devices

and the T of `stage_division`, whose stages take no less than that each, at least

    x / m + (W - x) / M + (K - 1) max( x / m, (W - x) / (n - m), W / n )

P equal groups wait, too: the last one for the forward pass of the parts before it. Each bound is the least over the possible x.

Where a microbatch is known to take t device-seconds on sub-meshes of m devices, equal stages on n / m of these take

    (K - a) t / n + a t / m         a = 1 - 2 w with zb_h1, w: the share of gradients of parameters; else a = 1      (`schedules`)

This is linear in t: of a division over several sizes, each with a share of the layers, it is the mean by these shares.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class StepWork:
    """Of one microbatch on one device: arrays of (L,), and how many microbatches and devices there are."""

    seconds: np.ndarray  # proven, forward and backward
    forward: np.ndarray
    weight: np.ndarray  # of the backward pass, for gradients of parameters only
    microbatches: int
    devices: int
    sizes: tuple[int, ...]  # devices of the sub-meshes

    def of_any_schedule(self, m: int) -> float:
        """The least seconds of a step in which some device group has m devices."""
        x, own, rest, largest = self._parts(m)
        flow = 1 - float(np.max(self.weight / np.maximum(self.seconds, 1e-300), initial=0.0))
        busy = self.microbatches * np.maximum(np.maximum(own, rest), self.seconds.sum() / self.devices)
        return float(np.min(np.maximum(busy, max(flow, 0.0) * (own + (self.seconds.sum() - x) / largest)), initial=math.inf))

    def of_division(self, m: int) -> float:
        """The least T of a division in which some stage has m devices."""
        x, own, rest, largest = self._parts(m)
        slowest = np.maximum(np.maximum(own, rest), self.seconds.sum() / self.devices)
        total = own + (self.seconds.sum() - x) / largest
        return float(np.min(total + (self.microbatches - 1) * slowest, initial=math.inf))

    def of_equal_groups(self, parts: Sequence[Sequence[int]], groups: int) -> float:
        """The least seconds of a step of these parts (first, last, ...), part v on group v mod `groups`, all groups of equal size."""
        m = self.devices / groups
        busy = [sum(float(self.seconds[a:b].sum()) for a, b, *_ in parts[d::groups]) / m for d in range(groups)]
        before = sum(float(self.forward[a:b].sum()) for a, b, *_ in parts[: groups - 1]) / m
        return max(self.microbatches * max(busy), before + self.microbatches * busy[-1])

    def of_equal_stages(self, m: int, on_mesh: float, *, split: bool) -> float:
        """Seconds of a step of equal stages on m devices each. on_mesh: of all layers of a microbatch on m devices; split: backward passes
        may be, as by zb_h1."""
        a = 1 - 2 * float(self.weight.sum() / self.seconds.sum()) if split else 1.0
        return (self.microbatches - a) * on_mesh * m / self.devices + a * on_mesh

    def _parts(self, m: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, float]:
        """Every possible x, x / m, (W - x) / (n - m), and M."""
        n, total = self.devices, float(self.seconds.sum())
        if m == n:
            x = np.array([total])
            return x, x / m, np.zeros(1), 1.0
        sums = np.concatenate([[0.0], np.cumsum(self.seconds)])
        x = np.unique((sums[None, :] - sums[:, None])[np.triu_indices(len(sums), 1)])
        return x, x / m, (total - x) / (n - m), float(max((s for s in self.sizes if s <= n - m), default=n - m))
