"""TensorCraft's memory-constrained search, as published: its moves, in its order, and what it does with them.

Breadth first from the source. A state met again keeps its place but takes the cheaper way to it (of equals the shorter). It stops
after `node_limit` states, or when `top_k` ways to the target are known; states at `max_depth` are not taken up; states that hold
more than the limit are left out. The cheapest way found is the answer: no bound comes with it.

The moves, b a block size of the target or 1, in this order: split and minor split of each free axis on each dim, all_gather of
everything, of the first or last axis of a dim, permute of two equal axes of a dim, all_to_all of all axes of a dim (major) or of
its last one (minor), change of block size to a multiple or a divisor.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from math import prod

from autoshard.cost.block_prices import Prices
from autoshard.relayout.blocks import UNSHARDED, Axes, BlockLayout, Sizes, axis_sizes, local_elements, parts_of
from autoshard.relayout.planners import PLANNERS, priced, route_of
from autoshard.relayout.problems import BlockProblem, BlockRoute, BlockStep

Move = tuple[str, BlockLayout]


@dataclass
class _Node:
    layout: BlockLayout
    parent: _Node | None
    kind: str
    seconds: float

    def way(self) -> list[_Node]:
        """From the source's node on, without it."""
        nodes: list[_Node] = []
        node = self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def reached(self) -> tuple[float, int]:
        """(seconds from the source, steps)."""
        way = self.way()
        return sum(node.seconds for node in way), len(way)


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
    """The published search; its limit counts resident shards. ValueError for partial layouts, which it does not know."""
    if problem.source.partial:
        raise ValueError("the memory-constrained planner reduces nothing; use astar for partial layouts")
    limit = problem.memory_limit(memory_limit, "resident")
    count = count or "resident"
    if problem.source == problem.target:
        return route_of(problem, [], "optimal", 0.0, count, 0)
    wanted = list({b for b in problem.target.blocks if b > 0})
    sizes = wanted if 1 in wanted else [1, *wanted]
    open_nodes, known, ends, explored = deque([_Node(problem.source, None, "", 0.0)]), {}, [], 0  # type: ignore[var-annotated]
    while open_nodes and explored < node_limit and (top_k is None or len(ends) < top_k):
        explored += 1
        node = open_nodes.popleft()
        seconds, depth = node.reached()
        if max_depth is not None and depth >= max_depth:
            continue
        held = problem.elements(node.layout)
        for kind, axes, layout in moves(problem.shape, problem.mesh, node.layout, sizes):
            if local_elements(problem.shape, layout, problem.mesh) > limit:
                continue
            step = 0.0 if kind == "split" else prices.of(kind, axes)(held)
            if layout == problem.target:
                ends.append(_Node(layout, node, kind, step))
            elif layout not in known:
                known[layout] = _Node(layout, node, kind, step)
                open_nodes.append(known[layout])
            else:
                other = known[layout]
                their_seconds, their_depth = other.reached()
                if (seconds + step, depth + 1) < (their_seconds, their_depth):
                    other.parent, other.kind, other.seconds = node, kind, step
    if not ends:
        return BlockRoute(problem, (), "infeasible", float("inf"), 0.0, 0, count, explored)
    best = min(ends, key=lambda node: node.reached()[0]).way()
    layouts = [problem.source, *(node.layout for node in best)]
    steps = [priced(problem, prices, node.kind, u, v) for node, u, v in zip(best, layouts, layouts[1:])]
    return route_of(problem, steps, "feasible", 0.0, count, explored)


def volume(problem: BlockProblem, step: BlockStep) -> tuple[int, int]:
    """(elements, processes) of a step as published: an all_to_all counts what a whole group holds."""
    held = problem.elements(step.before)
    n = prod(axis_sizes(step.axes, problem.mesh))
    published = {"split": (0, 0), "permute": (held, 2), "all_gather": (held * n, n), "all_to_all": (held * n, n)}
    return published.get(step.collective, (held, n))


def moves(shape: Sizes, mesh: Sizes, layout: BlockLayout, sizes: list[int]) -> Iterator[tuple[str, Axes, BlockLayout]]:
    """(kind, axes, the layout it leads to) in the published order; layouts that leave a rank empty are skipped."""
    for kind, axes, new in _all_moves(shape, mesh, layout, sizes):
        if all(_legal(s, parts_of(a, mesh), b) for s, a, b in zip(shape, new.axes, new.blocks) if a):
            yield kind, axes, new


def _legal(size: int, n: int, b: int) -> bool:
    return n <= size and b <= (size if n == 1 else max(1, (size - 1) // (n - 1)))


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
    given, taking, old = layout.axes[i], layout.axes[j], layout.blocks[j]
    yield "all_to_all", given, _with(layout, {i: ((), UNSHARDED), j: (given + taking, old if taking else b)})
    n = prod(axis_sizes(given[-1:], mesh))
    if len(given) > 1 and (old if taking else shape[j]) % n == 0:
        after = {i: (given[:-1], layout.blocks[i] * n), j: (taking + given[-1:], old // n if taking else b)}
        yield "all_to_all", given[-1:], _with(layout, after)


def _with(layout: BlockLayout, changes: dict[int, tuple[Axes, int]]) -> BlockLayout:
    cuts = [changes.get(d, cut) for d, cut in enumerate(zip(layout.axes, layout.blocks))]
    return BlockLayout(tuple(axes for axes, _ in cuts), tuple(b for _, b in cuts))


PLANNERS["memory_constrained"] = memory_constrained
