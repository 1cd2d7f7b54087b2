"""Planners of redistribution: from a problem, prices and a memory limit to a route. All planners have one signature.

    naive    gather everything, then split; its peak is the global tensor
    astar    the cheapest route of a Space, by g(u) + h(u) with coarse.py's h; the default

The memory limit excludes the states above it (`count="resident"`), or the steps whose input and output together are above it
(`count="buffers"`, the default with honest prices). A limit below the larger end is an error; where no route keeps the
limit, the status of the returned route is "infeasible". A search that stops after `most` states returns the cheaper of its best route
so far and the route of a greedy search; its bound is the least g + h of the states that are left.
"""

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import count as counting

from autoshard.cost import Prices
from autoshard.relayout.blocks import Axes, BlockLayout, canonical, parts_of
from autoshard.relayout.coarse import distances
from autoshard.relayout.holdings import involved, most_scattered, sharding_axes, traffic
from autoshard.relayout.problems import BlockProblem, BlockRoute, BlockStep
from autoshard.relayout.space import CandidateStep, Space, State

MOST = 30_000  # states that an exact search expands
GREED = 4.0  # weight of h in the greedy search
EXACT_TRAFFIC = 512  # ranks; on more, an exchange is priced by a bound
ROUNDING = 1e-12  # relative


def naive(problem: BlockProblem, prices: Prices, memory_limit: float | None = None, *, count: str | None = None) -> BlockRoute:
    """All gather of everything, then one local slice; the limit is reported, not kept."""
    rest = BlockLayout(tuple(() for _ in problem.shape), problem.target.blocks, problem.source.partial, problem.source.reduce_op)
    if problem.source.partial != problem.target.partial:
        raise ValueError("the naive planner reduces nothing; use astar for partial layouts")
    ends = [("all_gather", problem.source, rest), ("split", rest, problem.target)]
    steps = [] if problem.same else [priced(problem, prices, kind, u, v) for kind, u, v in ends if u != v]
    return route_of(problem, steps, "feasible", 0.0, count or prices.count, 0)


def astar(
    problem: BlockProblem,
    prices: Prices,
    memory_limit: float | None = None,
    *,
    count: str | None = None,
    most: int = MOST,
    heuristic: Callable[[Space, float, bool], Sequence[float] | None] = distances,
) -> BlockRoute:
    """The cheapest route within the limit, in elements per rank (None: see BlockProblem.memory_limit).

    count: the bytes that the limit counts, "resident" or "buffers"; default that of the prices. most: states to expand; after them the
    route is the best known, with its bound. heuristic: h by code, or None for h = 0. Where no route keeps the limit, the status is
    "infeasible". ValueError for a limit below the larger end.
    """
    count = count or prices.count
    limit, buffers = problem.memory_limit(memory_limit, count), _buffers(count)
    if problem.same:
        return route_of(problem, [], "optimal", 0.0, count, 0)
    space, kept = space_of(problem, prices)
    h = heuristic(space, limit, buffers)
    path, explored, bound, proven = _best_first(space, limit, buffers, h, 1.0, most)
    if not proven:
        other, more, _, _ = _best_first(space, limit, buffers, h or distances(space, limit, buffers), GREED, most)
        path, explored = min((path, other), key=_seconds), explored + more
    if path is None:
        return BlockRoute(problem, (), "infeasible" if proven else "unknown", math.inf, bound, 0, count, explored)
    steps, at = [], canonical(problem.shape, problem.source, problem.mesh)
    for step in path:
        after = _renumbered(space.layout(step.state, problem.source.reduce_op), dict(enumerate(kept)))
        axes = tuple(kept[a] for a in range(space.num_axes) if step.mask >> a & 1)
        steps.append(_step(problem, step.kind, axes, step.dims, at, after, step.seconds))
        at = after
    return route_of(problem, steps, "optimal" if proven else "feasible", bound, count, explored)


def _seconds(path: list[CandidateStep] | None) -> float:
    return math.inf if path is None else sum(step.seconds for step in path)


def _buffers(count: str) -> bool:
    if count not in ("resident", "buffers"):
        raise ValueError(f"count is {count!r}; expected resident (shards between steps) or buffers (input and output of a step)")
    return count == "buffers"


def space_of(problem: BlockProblem, prices: Prices) -> tuple[Space, Axes]:
    """The search space without mesh axes of size 1, and the axes of the mesh that it keeps."""
    kept = tuple(a for a, n in enumerate(problem.mesh) if n > 1)
    number = {a: i for i, a in enumerate(kept)}
    ends = [_renumbered(canonical(problem.shape, layout, problem.mesh), number) for layout in (problem.source, problem.target)]
    space = Space(problem.shape, tuple(problem.mesh[a] for a in kept), ends[0], ends[1], _OnAxes(prices, kept))
    if space.reduced != space.target:
        before = replace(problem.source, partial=problem.target.partial)
        for state in space.exchanges():
            after = _renumbered(space.layout(state, problem.source.reduce_op), dict(enumerate(kept)))
            seconds, axes = _exchange(problem, prices, before, after)
            kind = "exchange" if axes else "split"  # a split where every rank already holds its output shard
            mask = sum(1 << i for i, a in enumerate(kept) if a in (axes or set(sharding_axes(after)) - set(sharding_axes(before))))
            changed = tuple(d for d, (c, t) in enumerate(zip(space.reduced[:-1], state)) if c is not t)
            space.direct.append(CandidateStep(seconds, state, kind, mask, changed))
    return space, kept


def _exchange(problem: BlockProblem, prices: Prices, before: BlockLayout, after: BlockLayout) -> tuple[float, Axes]:
    """(seconds, the axes that it crosses)."""
    axes, held, needed, flows = involved(before, after), problem.elements(before), problem.elements(after), None
    if math.prod(problem.mesh) <= EXACT_TRAFFIC:
        flows = traffic(problem.shape, before, after, problem.mesh)
        axes = flows.crossed()
    else:  # a bound: as if no rank kept elements, and one rank sent to all that need the same
        share = [parts_of(sharding_axes(layout), problem.mesh) for layout in (before, after)]
        held *= max(1, math.ceil(share[0] / share[1]))
    return prices.exchange(axes, held, needed, flows), axes


class _OnAxes(Prices):
    """The prices of a mesh whose axes are numbered without those of size 1."""

    def __init__(self, prices: Prices, kept: Axes):
        self.prices, self.kept, self.honest, self.count = prices, kept, prices.honest, prices.count

    def of(self, kind, axes):
        return self.prices.of(kind, tuple(self.kept[a] for a in axes))


def _renumbered(layout: BlockLayout, number: Mapping[int, int]) -> BlockLayout:
    """The layout with other numbers of its axes."""
    axes = tuple(tuple(number[a] for a in some) for some in layout.axes)
    return BlockLayout(axes, layout.blocks, tuple(number[a] for a in layout.partial), layout.reduce_op)


# -- search ------------------------------------------------------------------------------------------------------------------------


def _best_first(
    space: Space, limit: float, buffers: bool, h: Sequence[float] | None, weight: float, most: int
) -> tuple[list[CandidateStep] | None, int, float, bool]:
    """(steps to the target or None, states expanded, a lower bound on every route, whether the result is proven).

    f = g + weight h, smaller h first among equals. A search that stops early returns the best steps known so far, None without any.
    """
    source, target = space.source, space.target
    cost: dict[State, float] = {source: 0.0}
    parents: dict[State, tuple[State, CandidateStep]] = {}
    held: dict[State, int] = {source: space.elements(source)}
    bounds: dict[State, float] = {source: h[space.code(source)] if h else 0.0}
    ticket = counting()
    queue = [(weight * bounds[source], bounds[source], next(ticket), 0.0, source)]
    best, explored, bound = math.inf, 0, 0.0
    while queue:
        f, ahead, _, g, state = heapq.heappop(queue)
        if g > cost[state]:
            continue
        bound = f if weight == 1.0 else bound
        if state is target or state == target:
            return _path(parents, state), explored, bound, weight == 1.0
        if explored >= most:
            return _path(parents, target) if target in parents else None, explored, bound, False
        explored += 1
        here = held[state]
        for step in space.steps(state):
            new = step.state
            reached = g + step.seconds
            if new not in cost:
                held[new], cost[new] = space.elements(new), math.inf
                bounds[new] = h[space.code(new)] if h else 0.0
            old, ahead = cost[new], bounds[new]
            if reached >= old * (1 - ROUNDING) or reached + ahead >= best * (1 + ROUNDING):
                continue
            if held[new] > limit or (buffers and here + held[new] > limit):
                continue
            cost[new] = reached
            parents[new] = (state, step)
            if new == target:
                best = reached
            heapq.heappush(queue, (reached + weight * ahead, ahead, next(ticket), reached, new))
    return None, explored, math.inf, True


def _path(parents: dict[State, tuple[State, CandidateStep]], state: State) -> list[CandidateStep]:
    path = []
    while state in parents:
        state, step = parents[state]
        path.append(step)
    return path[::-1]


# -- routes ------------------------------------------------------------------------------------------------------------------------


def route_of(problem: BlockProblem, steps: Sequence[BlockStep], status: str, bound: float, count: str, explored: int) -> BlockRoute:
    """Steps with their sum and peak; the bound of an optimal route is its own seconds."""
    seconds = sum(step.seconds for step in steps)
    held = [problem.elements(layout) for layout in [problem.source, *(step.after for step in steps)]]
    peak = max((a + b for a, b in zip(held, held[1:])), default=held[0]) if count == "buffers" else max(held)
    return BlockRoute(problem, tuple(steps), status, seconds, seconds if status == "optimal" else bound, peak, count, explored)


def priced(problem: BlockProblem, prices: Prices, kind: str, before: BlockLayout, after: BlockLayout) -> BlockStep:
    """The step of a kind between two layouts, with its seconds and bytes."""
    reduced = kind in ("all_reduce", "reduce_scatter")
    axes = tuple(sorted(set(before.partial) - set(after.partial))) if reduced else involved(before, after)
    if kind in ("all_gather", "split", "all_to_all"):  # over the axes that are gathered, split, or moved
        places = [{a: d for d, some in enumerate(layout.axes) for a in some} for layout in (before, after)]
        axes = tuple(a for a in axes if places[0].get(a) != places[1].get(a))
    held, needed = problem.elements(before), problem.elements(after)
    if kind == "exchange":
        seconds, axes = _exchange(problem, prices, before, after)
        return _step(problem, kind, axes, changed_dims(before, after), before, after, seconds)
    x: float = needed if kind == "split" else max(held, needed) if kind == "all_to_all" and prices.honest else held
    if kind == "change_block_size" and prices.honest:
        x = traffic(problem.shape, before, after, problem.mesh).most()
    return _step(problem, kind, axes, changed_dims(before, after), before, after, prices.of(kind, axes)(x))


def changed_dims(before: BlockLayout, after: BlockLayout) -> tuple[int, ...]:
    return tuple(d for d in range(len(before.axes)) if (before.axes[d], before.blocks[d]) != (after.axes[d], after.blocks[d]))


def _step(
    problem: BlockProblem, kind: str, axes: Axes, dims: tuple[int, ...], before: BlockLayout, after: BlockLayout, seconds: float
) -> BlockStep:
    n, held = parts_of(axes, problem.mesh), problem.elements(before)
    if kind == "split":
        sent = 0
    elif kind == "all_reduce":
        sent = 2 * math.ceil(held * (n - 1) / n)
    elif kind == "reduce_scatter":
        sent = most_scattered(problem.shape, before, after, problem.mesh)
    else:
        sent = traffic(problem.shape, before, after, problem.mesh).most_sent()
    return BlockStep(kind, axes, dims, before, after, seconds, sent * problem.itemsize, _runner(kind, axes, dims, before, after, problem))


def _runner(kind: str, axes: Axes, dims: tuple[int, ...], before: BlockLayout, after: BlockLayout, problem: BlockProblem) -> str:
    """ "dtensor" where one axis is added or removed as the minor axis of evenly sharded block layouts, else "autoshard"."""
    if len(axes) != 1 or kind in ("permute", "change_block_size", "exchange"):
        return "autoshard"
    for layout in (before, after):
        for size, some, b in zip(problem.shape, layout.axes, layout.blocks, strict=True):
            if some and (b * parts_of(some, problem.mesh) != size or list(some) != sorted(some)):
                return "autoshard"
    return "dtensor" if all(axes[0] in (*before.axes[d][-1:], *after.axes[d][-1:]) for d in dims) else "autoshard"


PLANNERS: dict[str, Callable[..., BlockRoute]] = {"naive": naive, "astar": astar}
