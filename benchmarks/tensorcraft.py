"""TensorCraft's memory-constrained search and its prices, reproduced as published for comparison: the same moves in the same order.

The search is breadth first from the source. A state that is reached again keeps its place in the queue and gets the cheaper path (of
equally cheap paths the shorter one). The search stops after `node_limit` states, or when it knows `top_k` paths to the target; it does
not expand states at `max_depth`, and it drops states above the memory limit. It returns the cheapest path that it knows, without a bound.

The moves in their order, b a block size of the target or 1: split and minor split of each free axis on each dim, all_gather of
everything, all_gather of the first or last axis of a dim, permute of two equal axes of a dim, all_to_all of all axes of a dim (major)
or of its last one (minor), change of block size to a multiple or a divisor.

`IdealPrices`: alpha seconds per round and beta seconds per element. Compared with the table of cost/block_prices.py, the volume of an
all_to_all is n times as large and that of a permute twice as large, a change of block size sends (n - 1)/n of the shard, and a split is
free.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from math import prod

from autoshard.cost import Prices, Seconds
from autoshard.cost.block_prices import affine, rounds
from autoshard.relayout.blocks import CHUNKS, UNSHARDED, Axes, BlockLayout, Sizes, axis_sizes, canonical, local_elements, parts_of
from autoshard.relayout.planners import priced, route_of
from autoshard.relayout.problems import BlockProblem, BlockRoute


@dataclass(frozen=True)
class IdealPrices(Prices):
    """Ideal lower bounds, as published: alpha seconds per round, beta per element (default: 8 bytes at 200 Gb/s)."""

    mesh: tuple[int, ...]
    alpha: float = 1e-6
    beta: float = 64 / 200e9
    honest = False
    count = "resident"

    def of(self, kind: str, axes: Axes) -> Seconds:
        n = prod(self.mesh[a] for a in axes)
        volume = {
            "split": 0.0, "all_gather": n - 1, "all_to_all": n - 1, "permute": 2.0, "exchange": n - 1, "all_reduce": 2 * (n - 1) / n,
        }.get(kind, (n - 1) / n)  # fmt: skip
        return affine(rounds(kind, n) * self.alpha, volume * self.beta)


@dataclass
class _Node:
    layout: BlockLayout
    parent: _Node | None
    kind: str
    seconds: float

    def path(self) -> list[_Node]:
        """The nodes from the source to this one, without the source."""
        return [] if self.parent is None else [*self.parent.path(), self]

    def reached(self) -> tuple[float, int]:
        """(seconds from the source, steps)."""
        path = self.path()
        return sum(node.seconds for node in path), len(path)


def memory_constrained(
    problem: BlockProblem,
    prices: Prices,
    memory_limit: float | None = None,
    *,
    count: str | None = None,
    max_depth: int | None = None,
    top_k: int | None = None,
    node_limit: int = 1000,
) -> BlockRoute:
    """The published search; by default its limit counts resident shards. ValueError for layouts that it does not know:
    partial ones, and parts of torch.chunk that no block size has."""
    if problem.source.partial:
        raise ValueError("the memory-constrained planner reduces nothing; use astar for partial layouts")
    source, target = (canonical(problem.shape, layout, problem.mesh) for layout in (problem.source, problem.target))
    if CHUNKS in (*source.blocks, *target.blocks):
        raise ValueError("the memory-constrained planner knows blocks of one size alone; use astar for uneven chunks of chunks")
    count = count or "resident"
    limit = problem.memory_limit(memory_limit, count)
    if problem.same:
        return route_of(problem, [], "optimal", 0.0, count, 0)
    target_sizes = list({b for b in target.blocks if b > 0})
    sizes = target_sizes if 1 in target_sizes else [1, *target_sizes]
    open_nodes, known, ends, explored = deque([_Node(source, None, "", 0.0)]), {}, [], 0  # type: ignore[var-annotated]
    while open_nodes and explored < node_limit and (top_k is None or len(ends) < top_k):
        explored += 1
        node = open_nodes.popleft()
        seconds, depth = node.reached()
        if max_depth is not None and depth >= max_depth:
            continue
        held = problem.elements(node.layout)
        for kind, axes, layout in moves(problem.shape, problem.mesh, node.layout, sizes):
            if local_elements(problem.shape, layout, problem.mesh) + (held if count == "buffers" else 0) > limit:
                continue
            step = 0.0 if kind == "split" else prices.of(kind, axes)(held)
            if layout == target:
                ends.append(_Node(layout, node, kind, step))
            elif layout not in known:
                known[layout] = _Node(layout, node, kind, step)
                open_nodes.append(known[layout])
            else:
                other = known[layout]
                if (seconds + step, depth + 1) < other.reached():
                    other.parent, other.kind, other.seconds = node, kind, step
    if not ends:
        return BlockRoute(problem, (), "infeasible", float("inf"), 0.0, 0, count, explored)
    best = min(ends, key=lambda node: node.reached()[0]).path()
    layouts = [source, *(node.layout for node in best)]
    steps = [priced(problem, prices, node.kind, u, v) for node, u, v in zip(best, layouts, layouts[1:])]
    return route_of(problem, steps, "feasible", 0.0, count, explored)


def moves(shape: Sizes, mesh: Sizes, layout: BlockLayout, sizes: list[int]) -> Iterator[tuple[str, Axes, BlockLayout]]:
    """(kind, axes, the layout after the move) in the published order; layouts that leave a rank empty are skipped."""
    for kind, axes, new in _all_moves(shape, mesh, layout, sizes):
        dims = [(size, parts_of(some, mesh), b) for size, some, b in zip(shape, new.axes, new.blocks) if some]
        if all(n <= size and b <= (size if n == 1 else max(1, (size - 1) // (n - 1))) for size, n, b in dims):
            yield kind, axes, new


def _all_moves(shape: Sizes, mesh: Sizes, layout: BlockLayout, sizes: list[int]) -> Iterator[tuple[str, Axes, BlockLayout]]:
    used = [a for axes in layout.axes for a in axes]
    for a in (a for a in range(len(mesh)) if a not in used):
        for b in sizes:
            for d, (axes, old) in enumerate(zip(layout.axes, layout.blocks)):
                yield "split", (a,), _with(layout, {d: ((a, *axes), old if axes else b)})
                if not axes:
                    yield "split", (a,), _with(layout, {d: ((a,), b)})
                elif old % mesh[a] == 0:
                    yield "split", (a,), _with(layout, {d: ((*axes, a), old // mesh[a])})
    if used:
        yield "all_gather", tuple(sorted(used)), _with(layout, {d: ((), UNSHARDED) for d in range(len(shape))})
    for a in sorted(used):
        d = next(d for d, axes in enumerate(layout.axes) if a in axes)
        axes, b = layout.axes[d], layout.blocks[d]
        if a in (axes[0], axes[-1]):
            yield "all_gather", (a,), _with(layout, {d: (tuple(x for x in axes if x != a), b if a == axes[0] else b * mesh[a])})
    for d, axes in enumerate(layout.axes):
        for p, q in combinations(axes, 2):
            if mesh[p] == mesh[q]:
                swapped = tuple(q if x == p else p if x == q else x for x in axes)
                yield "permute", (p, q), _with(layout, {d: (swapped, layout.blocks[d])})
    for i, axes in enumerate(layout.axes):
        for j in range(len(shape)):
            if axes and i != j:
                for b in [layout.blocks[i], *sizes]:
                    yield from _moved(shape, mesh, layout, i, j, b)
    for d, (axes, old) in enumerate(zip(layout.axes, layout.blocks)):
        for b in sizes:
            if axes and b != old and (b % old == 0 or old % b == 0):
                yield "change_block_size", axes, _with(layout, {d: (axes, b)})


def _moved(shape: Sizes, mesh: Sizes, layout: BlockLayout, i: int, j: int, b: int) -> Iterator[tuple[str, Axes, BlockLayout]]:
    source, target, old = layout.axes[i], layout.axes[j], layout.blocks[j]
    yield "all_to_all", source, _with(layout, {i: ((), UNSHARDED), j: (source + target, old if target else b)})
    n = prod(axis_sizes(source[-1:], mesh))
    if len(source) > 1 and (old if target else shape[j]) % n == 0:
        after = {i: (source[:-1], layout.blocks[i] * n), j: (target + source[-1:], old // n if target else b)}
        yield "all_to_all", source[-1:], _with(layout, after)


def _with(layout: BlockLayout, changes: dict[int, tuple[Axes, int]]) -> BlockLayout:
    dims = [changes.get(d, dim) for d, dim in enumerate(zip(layout.axes, layout.blocks))]
    return BlockLayout(tuple(axes for axes, _ in dims), tuple(b for _, b in dims))

