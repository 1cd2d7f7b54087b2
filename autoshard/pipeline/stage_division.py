"""Alpa's inter-operator dynamic program: it divides a chain of layers into pipeline stages and gives each stage a sub-mesh.

It also includes transfers between stages, limits on memory, and all sub-meshes that tile the cluster. A model is a chain of L layers. A
division of it into stages, with a sub-mesh u for each, takes per step of K microbatches

    T = sum_i t_i + sum_c x_c + (K - 1) max(max_i t_i, max_c x_c)                                                  (`step_seconds`)

    t[u, k, j, q]   seconds of one microbatch, forward and backward, in the stage of layers k ... j - 1 on sub-mesh u, with q + 1
                    microbatches in flight: a stage that s - 1 stages follow has min(s, K) of them under 1F1B. inf: does not fit.
    x[k, a, u]      seconds at the boundary before layer k, from sub-mesh a to u and back. Transfers overlap with the stages: each link
                    counts as one more stage. (Alpa leaves transfers out.)

For every bound b on the slowest stage or link (`_least_sum`), where the state r says which devices are free,

    H(s, k, r, u)   = min over j and r' = r less u of  t[u, k, j, min(s, K)] + F(s - 1, j, r', u)        t <= b
    F(s, k, r, a)   = min over u of                    x[k, a, u] + H(s, k, r, u)                        x <= b
    T               = min over b of  G(b) = F(b) + (K - 1) b,   F(b) = min over s, u of H(s, 0, everything, u)

F(b) doesn't increase with b, so for b in (b1, b2] G(b) >= F(b2) + (K - 1) (the next value above b1): most b are never tried (`inter_op`).
Devices may stay idle. With P stages asked for, s goes to P + 1, which stands for more, and only H(P, 0, everything, u) counts; if such
stages can have all devices, the last one is on the last devices that are free. The result is optimal for these t and x. After Zheng et al.,
"Alpa" (OSDI 2022), section 5.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from autoshard.graph import reached


class Nodes(NamedTuple):
    """Equal nodes of a cluster."""

    number: int
    devices: int  # of one node


class SubMesh(NamedTuple):
    """`devices` devices of each of `nodes` nodes of one kind: some devices of one node, or all devices of several nodes."""

    kind: int  # index into the cluster's kinds of nodes
    nodes: int
    devices: int

    @property
    def size(self) -> int:
        return self.nodes * self.devices


class Stage(NamedTuple):
    """Layers first ... last - 1 on sub-mesh number `submesh`."""

    first: int
    last: int
    submesh: int


@dataclass(frozen=True)
class Division:
    """The stages from the first to the last layer, their T and its slowest stage or transfer."""

    stages: tuple[Stage, ...]
    seconds: float  # T
    slowest: float  # seconds


@dataclass(frozen=True)
class Tiling:
    """The free devices of a cluster as numbered states, and the sub-meshes that can be allocated in each state.

    A state holds, by kind of node, the number of free devices of each node in order. It holds only their sum where the sizes of sub-meshes
    inside a node divide each other and the node's size (1, 2, 4 of 8): any such sizes whose sum is a node's size fit into a node.
    """

    kinds: tuple[Nodes, ...]
    submeshes: tuple[SubMesh, ...]

    @cached_property
    def states(self) -> tuple[tuple, ...]:
        """All states that allocations can reach; the one in which all devices are free first."""
        of_any, kinds = range(len(self.submeshes)), zip(self.kinds, self._counts)
        full = tuple((n.number * n.devices,) if counts else (n.devices,) * n.number for n, counts in kinds)
        return tuple(reached([full], lambda state: (left for u in of_any for left in self._without(state, u))))

    @cached_property
    def full(self) -> int:
        """The state in which no device is free; -1 where no allocations reach it."""
        return next((i for i, state in enumerate(self.states) if not any(map(sum, state))), -1)

    @cached_property
    def moves(self) -> tuple[tuple[np.ndarray, np.ndarray, np.ndarray], ...]:
        """By sub-mesh: the states in which it can be allocated, where each of them begins in the last array, the states after."""
        number = {state: i for i, state in enumerate(self.states)}
        of = []
        for u in range(len(self.submeshes)):
            pairs = [(number[state], number[left]) for state in self.states for left in self._without(state, u)]
            before, after = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
            of.append((*np.unique(before, return_index=True), after))
        return tuple(of)

    @cached_property
    def _counts(self) -> tuple[bool, ...]:
        """By kind: whether the number of free devices alone determines which sub-meshes fit."""
        suffices = []
        for kind, nodes in enumerate(self.kinds):
            parts = sorted({u.devices for u in self.submeshes if u.kind == kind and u.nodes == 1} | {nodes.devices})
            suffices.append(all(b % a == 0 for a, b in pairwise(parts)))
        return tuple(suffices)

    def _without(self, state: tuple, u: int) -> list[tuple]:
        """The states after sub-mesh u is allocated; none where it does not fit."""
        kind, nodes, devices = self.submeshes[u]
        free = state[kind]
        if self._counts[kind]:
            lefts = [(free[0] - nodes * devices,)] if free[0] >= nodes * devices else []
        elif nodes == 1:
            where = dict.fromkeys(i for i, n in enumerate(free) if n >= devices and (i == 0 or free[i - 1] != n))
            lefts = [tuple(sorted((*free[:i], free[i] - devices, *free[i + 1 :]), reverse=True)) for i in where]
        else:
            free_nodes = sum(n == self.kinds[kind].devices for n in free)
            lefts = [(*free[nodes:], *(0,) * nodes)] if free_nodes >= nodes else []
        return [(*state[:kind], left, *state[kind + 1 :]) for left in lefts]


MOST_COUNTS = 4  # nodes of which any number may make a sub-mesh; of more, each number would have to be planned


def submeshes(kinds: Sequence[Nodes], *, every_size: bool = False) -> tuple[SubMesh, ...]:
    """Sub-meshes inside a node whose sizes divide it (with `every_size` all sizes), and any number of entire nodes, smallest first.

    With more than MOST_COUNTS nodes of a kind only the numbers of nodes that divide the count, or are powers of two.
    """
    sizes = []
    for kind, (count, devices) in enumerate(kinds):
        sizes += [SubMesh(kind, 1, m) for m in range(1, devices + 1) if every_size or devices % m == 0]
        sizes += [SubMesh(kind, n, devices) for n in range(2, count + 1) if count <= MOST_COUNTS or count % n == 0 or n & (n - 1) == 0]
    return tuple(sizes)


def step_seconds(stages: Sequence[float], transfers: Sequence[float], microbatches: int) -> float:
    """T of stages that take so many seconds per microbatch, with transfers between them."""
    slowest = max((*stages, *transfers))
    return math.fsum(stages) + math.fsum(transfers) + (microbatches - 1) * slowest if slowest < math.inf else math.inf


def inter_op(
    stage_seconds: np.ndarray, transfer_seconds: np.ndarray, tiling: Tiling, microbatches: int, stages: int | None = None
) -> Division | None:  # fmt: skip
    """The division of least T; None where no stages fit. stages: exactly so many, on all devices where some such division is.

    stage_seconds: t, of shape (sub-meshes, L, L + 1, Q): seconds, inf where the stage is empty or does not fit; a stage with more than Q
    microbatches in flight costs as with Q. transfer_seconds: x, of shape (L + 1, sub-meshes, sub-meshes). ValueError on other shapes.
    """
    t, x = np.asarray(stage_seconds, dtype=float), np.asarray(transfer_seconds, dtype=float)
    U, L = len(tiling.submeshes), t.shape[1] if t.ndim == 4 else 0
    if t.ndim != 4 or t.shape[:3] != (U, L, L + 1) or L < 1 or t.shape[3] < 1:
        raise ValueError(f"stage_seconds has shape {t.shape}; expected ({U} sub-meshes, L, L + 1, in flight)")
    if x.shape != (L + 1, U, U):
        raise ValueError(f"transfer_seconds has shape {x.shape}; expected {(L + 1, U, U)}")
    if microbatches < 1:
        raise ValueError(f"microbatches is {microbatches}; expected 1 or more")
    K, t = microbatches, _up_to(stages, t[..., : max(1, min(microbatches, t.shape[3]))])
    bounds = np.unique(np.concatenate([t[np.isfinite(t)], x[np.isfinite(x)]]))
    if not len(bounds):
        return None
    full = stages is not None and _least_sum(t, x, tiling, bounds[-1], stages, full=True)[0] < math.inf
    best: list[Division | None] = [None]
    sums: dict[int, float] = {}

    def tried(i: int) -> float:
        """F(bounds[i]); keeps the division if it is the best so far."""
        if i not in sums:
            sums[i], divided = _least_sum(t, x, tiling, bounds[i], stages, full)
            if divided:
                ts, xs = seconds_of(divided, t, x)
                division = Division(divided, step_seconds(ts, xs, K), max((*ts, *xs)))
                if best[0] is None or division.seconds < best[0].seconds:
                    best[0] = division
        return sums[i]

    def search(low: int, high: int) -> None:
        """Tries the bounds between two that were tried."""
        if high - low < 2 or (best[0] is not None and sums[high] + (K - 1) * bounds[low + 1] >= best[0].seconds):
            return
        middle = (low + high) // 2
        if tried(middle) < math.inf:
            search(low, middle)
        search(middle, high)

    if tried(len(bounds) - 1) < math.inf and K > 1:
        tried(0)
        search(0, len(bounds) - 1)
    return best[0]


def _up_to(stages: int | None, t: np.ndarray) -> np.ndarray:
    """t of one more stage than so many, where a number is asked for."""
    return t if stages is None else t[..., np.minimum(np.arange(stages + 1), t.shape[3] - 1)]


def least_bottleneck(stage_costs: np.ndarray, tiling: Tiling, stages: int | None = None) -> float:
    """The least b for which some division, of so many stages if given, has no stage of more than b (seconds, or bytes); inf where there is
    none. Shapes: `inter_op`."""
    t = _up_to(stages, np.asarray(stage_costs, dtype=float))
    x = np.zeros((t.shape[1] + 1, t.shape[0], t.shape[0]))
    bounds = np.unique(t[np.isfinite(t)])
    flat = np.where(np.isfinite(t), 0.0, math.inf)
    low, high = 0, len(bounds)  # bounds below low are infeasible, high is feasible (or beyond the last)
    while low < high:
        middle = (low + high) // 2
        if _least_sum(np.where(t <= bounds[middle], flat, math.inf), x, tiling, 0.0, stages)[0] < math.inf:
            high = middle
        else:
            low = middle + 1
    return float(bounds[high]) if high < len(bounds) else math.inf


def seconds_of(stages: Sequence[Stage], t: np.ndarray, x: np.ndarray) -> tuple[list[float], list[float]]:
    """The t of each stage and the x of each boundary between stages."""
    P, Q = len(stages), t.shape[3]
    ts = [float(t[u, k, j, min(P - i, Q) - 1]) for i, (k, j, u) in enumerate(stages)]
    return ts, [float(x[b.first, a.submesh, b.submesh]) for a, b in pairwise(stages)]


def _least_sum(
    t: np.ndarray, x: np.ndarray, tiling: Tiling, bound: float, stages: int | None = None, full: bool = False
) -> tuple[float, tuple[Stage, ...]]:
    """F(bound) and its stages; (inf, ()) where there are none. Index s - 1 is the number of stages to the end, at most Q. stages: only so
    many. full: only on all devices."""
    t, x = np.where(t <= bound, t, math.inf), np.where(x <= bound, x, math.inf)
    U, L, _, Q = t.shape
    R, moves = len(tiling.states), tiling.moves
    ends = np.where(np.isfinite(t[:, :, :L]), np.arange(L)[:, None], 0).max(axis=2)  # (u, k, s): the last layer j < L with a stage k ... j
    H = np.full((Q, L, U, R), math.inf)
    F = np.full((Q, U, L + 1, R), math.inf)
    for k in range(L - 1, -1, -1):
        for s in range(min(Q, L - k)):  # s + 1 stages have as many layers
            for u, (before, starts, after) in enumerate(moves):
                if s == 0:
                    ends_here = np.logical_or.reduceat(after == tiling.full, starts) if full else True
                    H[s, k, u, before] = np.where(ends_here, t[u, k, L, 0], math.inf)
                last = int(ends[u, k, s])
                if last > k and (s or Q == 1):
                    ways = t[u, k, k + 1 : last + 1, s, None] + _behind(F, s, u, k + 1, last, after)
                    H[s, k, u, before] = np.minimum(H[s, k, u, before], np.minimum.reduceat(ways.min(axis=0), starts))
            if k:
                F[s, :, k] = (x[k][:, :, None] + H[s, k]).min(axis=1)
    first = H[:, 0, :, 0] if stages is None else np.where(np.arange(Q)[:, None] == stages - 1, H[:, 0, :, 0], math.inf)
    least = float(first.min())
    return (least, _stages(t, x, H, F, tiling, first)) if least < math.inf else (math.inf, ())


def _behind(F: np.ndarray, s: int, u: int, first: int, last: int, after: np.ndarray) -> np.ndarray:
    """(j, moves): the least sum from layer j = first ... last on, after a stage on sub-mesh u that is the (s + 1)-th from the end, where
    Q-th is also every earlier one."""
    rest = F[s - 1, u, first : last + 1][:, after] if s else np.full((last + 1 - first, len(after)), math.inf)
    return np.minimum(rest, F[s, u, first : last + 1][:, after]) if s == len(F) - 1 else rest


def _stages(t: np.ndarray, x: np.ndarray, H: np.ndarray, F: np.ndarray, tiling: Tiling, first: np.ndarray) -> tuple[Stage, ...]:
    """The stages of the least sum, read back from the tables; the first of equals, by (stages, sub-mesh, boundary, state)."""
    Q, L = H.shape[:2]
    stages: list[Stage] = []
    s, u = (int(i) for i in np.unravel_index(int(first.argmin()), first.shape))
    k, state = 0, 0
    while True:
        states, starts, after = tiling.moves[u]
        ways = np.split(after, starts[1:])[int(np.searchsorted(states, state))]
        if s == 0 and t[u, k, L, 0] <= H[s, k, u, state]:
            return (*stages, Stage(k, L, u))
        costs = t[u, k, k + 1 : L, s, None] + _behind(F, s, u, k + 1, L - 1, ways)
        j, way = (int(i) for i in np.unravel_index(int(costs.argmin()), costs.shape))
        stages.append(Stage(k, k + 1 + j, u))
        left = int(ways[way])
        s = s - 1 if s and (s < Q - 1 or F[s - 1, u, k + 1 + j, left] <= F[s, u, k + 1 + j, left]) else s
        k, state = k + 1 + j, left
        u = int((x[k, u] + H[s, k, :, state]).argmin())
