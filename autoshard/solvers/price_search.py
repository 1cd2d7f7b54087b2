"""Price search: answers just below a memory limit, and a bound, from prices per byte alone.

    p, q      corners of the lower hull of (memory, cost) on both sides of the limit B: p fits, q is too large
    chord     The slope from p to q is the next price of a byte. A cheaper answer at that price is a new corner; if there is
              none, the hull is straight there and no answer within B costs less than the chord at B       (lagrangian.py)
    exchange  The parts in which q differs from p are put into p in the order of their savings per byte, as long as they
              fit: the remaining gap is less than the saving of one part, for example of a layer           (exchange_parts.py)
    split     Where one part is too large, because something couples all layers: a beginning or an end of it     (`split`)

A split exchanges the first or last nodes of a part in their order, with neighbours near each other (Cuthill and McKee 1969), layer after
layer; x(t) = x in which the nodes before the t-th of that order, or those after it, are as in y. It costs one change of layout more than
the straight line between the two answers:

    cost(t)  = cost(x) + the extra cost of the changed nodes + per edge T[y_a, x_b] - T[x_a, x_b] when its first end has changed,
                                     T[y_a, y_b] - T[y_a, x_b] when its second has; the same for bytes                  -> _along

Where many layers are equal this proves in seconds what branching on their choices doesn't prove in hours.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..problem import Problem, held, without_limit
from .binding_times import Rows, load
from .exchange_parts import Change, changes, differences
from .incumbent import Incumbent, Record, Solver
from .infeasibility import refute
from .lagrangian import KnownAnswer, Lagrangian, corners, scale, slope
from .settle import polish

AGREED = 1e-4  # relative: answer and bound at a price; branch and bound proves the rest
FIRST, STEEPER, STEEPEST = 1 / 8, 8.0, 1e4  # until an answer fits, the fastest answer's memory is worth an eighth of its seconds, once, ...
FREE_GAP = 0.03  # relative: of the fastest answer, which is one end of a chord only, where it does not fit
CHORDS = 30
COARSE, FINE = 2, 4  # parts of the gap asked for: between answer and bound at a price; at first, and once no answer is below a chord
HALVES = 4  # of a first price that is known
FILLINGS = 6  # of an answer with parts of another; a time at which one filling was too large is considered in the next
HURRIED, COARSEST = 600.0, 0.03  # seconds left, where a time limit was set; gap of what is added from a similar problem then
SPLITS = 3  # parts, those with the largest savings, of which a beginning or an end is tried


@dataclass(frozen=True)
class PriceSearch(Solver):
    """Price search alone, without branch and bound: soon an answer whose gap is less than one part saves, and its bound."""

    def run(self, problem: Problem, incumbent: Incumbent) -> None:
        if problem.usage_limit is None:
            polish(problem, incumbent)
        else:
            search_prices(problem, incumbent)


def search_prices(problem: Problem, incumbent: Incumbent, messages: np.ndarray | None = None) -> None:
    """Answers and bounds for a problem with a limit. messages: those of dual ascent on the problem without it."""
    limit = problem.usage_limit
    assert limit is not None
    record = incumbent.record
    fine, coarse = (max(record.gap / part, AGREED) for part in (FINE, COARSE))
    lagrangian = Lagrangian(
        without_limit(problem), incumbent.until, record.clock, coarse, exact_seconds=0.0, homes=record.homes, nearby=record.nearby
    )
    for known in (*record.starts, *(() if incumbent.choice is None else (incumbent.choice,))):
        lagrangian.add(known)
    if record.prices is not None:
        begin_at(lagrangian, incumbent, limit, record.prices)
    if around(lagrangian, limit) is None and not incumbent.done:
        begin(lagrangian, incumbent, limit, messages)
    for _ in range(CHORDS):
        fill(lagrangian, incumbent, limit)
        ends = around(lagrangian, limit)
        if ends is None or incumbent.done:
            return
        improved = lagrangian.chord(*ends, lagrangian.gap)
        report(lagrangian, incumbent, limit)
        if not improved:
            if lagrangian.gap <= fine:
                break
            lagrangian.gap = fine
    fill(lagrangian, incumbent, limit)


def mixed(problem: Problem, choices: Sequence[Sequence[int]], clock: Callable[[], float], time_limit: float) -> tuple[int, ...]:
    """The cheapest that fits of these choices, some of which do, and of mixtures of two of them, on both sides of the limit."""
    assert problem.usage_limit is not None
    incumbent = Incumbent(problem, Record(problem, clock() + time_limit, 0.0, clock))
    lagrangian = Lagrangian(without_limit(problem), incumbent.until, clock)
    for choice in choices:
        lagrangian.add(choice)
    report(lagrangian, incumbent, problem.usage_limit)
    fill(lagrangian, incumbent, problem.usage_limit)
    assert incumbent.choice is not None
    return incumbent.choice


def begin(lagrangian: Lagrangian, incumbent: Incumbent, limit: float, messages: np.ndarray | None) -> None:
    """The fastest answer and, where that is too large, prices of a byte that grow until an answer fits."""
    gap, free = lagrangian.gap, np.zeros(len(lagrangian.rows.times))
    lagrangian.gap = max(gap, FREE_GAP)
    lagrangian.minimum(free, messages)
    lagrangian.gap = gap
    if fits(lagrangian, limit):  # it may be the best answer
        lagrangian.minimum(free)
    report(lagrangian, incumbent, limit)
    if not lagrangian.answers or incumbent.done:
        return
    fastest = min(lagrangian.answers.values(), key=lambda f: (f.cost, f.memory))
    worth = FIRST
    while not fits(lagrangian, limit) and worth <= STEEPEST and not incumbent.done:
        lagrangian.minimise(worth * scale(lagrangian.problem, fastest) / fastest.memory)
        report(lagrangian, incumbent, limit)
        if worth == 1.0:
            refute(incumbent.problem, incumbent)
            if incumbent.choice is not None:
                lagrangian.add(incumbent.choice)
        worth *= STEEPER


def begin_nearby(problem: Problem, incumbent: Incumbent) -> None:
    """What a similar problem has at prices of a byte that grow until an answer fits, and then at those of chords: an answer soon, where a
    time limit is set, and even after it. The last chord's ends are starts of the search."""
    limit, record = problem.usage_limit, incumbent.record
    if limit is None or record.nearby is None or incumbent.choice is not None or incumbent.proven:
        return
    if record.deadline - record.clock() > HURRIED:
        return
    lagrangian = Lagrangian(without_limit(problem), incumbent.until, record.clock, COARSEST, nearby=record.nearby)
    lagrangian.add_nearby(0.0)
    fastest, worth = next(iter(lagrangian.answers.values()), None), FIRST
    while fastest is not None and not fits(lagrangian, limit) and worth <= STEEPEST:
        lagrangian.add_nearby(worth * scale(problem, fastest) / fastest.memory)
        worth *= STEEPER
    report(lagrangian, incumbent, limit)
    known = 0
    while (ends := around(lagrangian, limit)) is not None and known < len(lagrangian.answers) and not incumbent.done:
        known = len(lagrangian.answers)
        lagrangian.add_nearby(-slope(*ends))
        report(lagrangian, incumbent, limit)
    record.starts = [*record.starts, *(f.choice for f in ends or ())]


def begin_at(lagrangian: Lagrangian, incumbent: Incumbent, limit: float, prices: Mapping[int, float]) -> None:
    """Answers at prices that are about right, and at half of them or twice them, ... until one fits and one is too large."""
    first = np.array([prices.get(int(t), 0.0) for t in lagrangian.rows.times])
    lagrangian.minimum(first)
    report(lagrangian, incumbent, limit)
    price = float(first.sum())
    for _ in range(HALVES):
        if around(lagrangian, limit) is not None or incumbent.done:
            return
        price = price / 2 if fits(lagrangian, limit) else price * 2
        lagrangian.minimise(price)
        report(lagrangian, incumbent, limit)


def fits(lagrangian: Lagrangian, limit: float) -> bool:
    return any(f.memory <= limit for f in lagrangian.answers.values())


def report(lagrangian: Lagrangian, incumbent: Incumbent, limit: float) -> None:
    """Raise the incumbent's bound to the one at the limit, and offer the best answer within it."""
    if lagrangian.lines:
        best = max(lagrangian.lines, key=lambda line: line.at(limit))
        incumbent.record.best_prices = best.prices
        incumbent.raise_bound(best.at(limit))
    fitting = [f for f in lagrangian.answers.values() if f.memory <= limit]
    incumbent.record.fitting |= {f.choice: f.cost for f in fitting}
    if fitting:
        incumbent.offer(min(fitting, key=lambda f: f.cost).choice)
        lagrangian.deadline = incumbent.until  # a first answer changes it


def around(lagrangian: Lagrangian, limit: float) -> tuple[KnownAnswer, KnownAnswer] | None:
    """The neighbouring corners of the hull that are below and above the limit; a mixture of two of them, near their chord, is none."""
    hull = corners([f for f in lagrangian.answers.values() if f.choice not in lagrangian.mixtures])
    return next(((p, q) for p, q in itertools.pairwise(hull) if p.memory <= limit < q.memory), None)


def fill(lagrangian: Lagrangian, incumbent: Incumbent, limit: float) -> None:
    """Put parts of the corner above the limit into the one below it; the room that is left goes to beginnings or ends of other parts."""
    ends = around(lagrangian, limit)
    if ends is None:
        return
    p, q = ends
    x, y = np.array(p.choice), np.array(q.choice)
    for _ in range(FILLINGS):
        peaks, known = list(lagrangian.peaks), len(lagrangian.answers)
        more = differences(lagrangian.problem, lagrangian.rows, peaks, x, y)
        room = limit - p.loads[peaks]
        exchanged = np.zeros(len(more.cost) + 1, bool)  # the last entry: nodes that belong to no part
        for k in more.by_worth(p, q).tolist():
            if more.cost[k] < 0 and (more.bytes[:, k] <= room).all():
                exchanged[k] = True
                room = room - more.bytes[:, k]
        filled = np.where(exchanged[more.part], y, x)
        lagrangian.mix(filled)
        left = [k for k in np.argsort(more.cost, kind="stable").tolist() if more.cost[k] < 0 and not exchanged[k]]
        for k in left[:SPLITS]:
            mixed = split(lagrangian.problem, lagrangian.rows, peaks, filled, y, np.flatnonzero(more.part == k), room)
            if mixed is not None:
                filled = mixed
                room = limit - load(lagrangian.rows, held(lagrangian.problem, filled))[peaks]
        lagrangian.mix(filled)
        report(lagrangian, incumbent, limit)
        if len(lagrangian.peaks) == len(peaks) or len(lagrangian.answers) == known:
            return


def split(
    problem: Problem, rows: Rows, peaks: list[int], x: np.ndarray, y: np.ndarray, nodes: np.ndarray, room: np.ndarray
) -> np.ndarray | None:
    """x with a beginning or an end of `nodes`, in their order, as in y: the cheapest one that holds at most `room` bytes more.

    room: bytes, one per row of `peaks`. None where none of them is cheaper than x.
    """
    least, changed = 0.0, None
    order = _order(problem, nodes)
    for way in (order, order[::-1]):
        cost, held = _along(problem, rows, peaks, x, y, way)
        cost = np.where((held <= room[:, None]).all(axis=0), cost, np.inf)
        t = int(cost.argmin())
        if cost[t] < least:
            least, changed = float(cost[t]), way[: t + 1]
    if changed is None:
        return None
    mixed = x.copy()
    mixed[changed] = y[changed]
    return mixed


def _order(problem: Problem, nodes: np.ndarray) -> np.ndarray:
    """The nodes in an order in which neighbours are near each other."""
    import networkx  # here: it takes a sixth of a second to load

    inside = set(nodes.tolist())
    graph = networkx.Graph()
    graph.add_nodes_from(nodes.tolist())
    graph.add_edges_from((e.a, e.b) for e in problem.edges if e.a in inside and e.b in inside)
    return np.array(list(networkx.utils.reverse_cuthill_mckee_ordering(graph)), dtype=np.int64)


def _along(problem: Problem, rows: Rows, peaks: list[int], x: np.ndarray, y: np.ndarray, way: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The extra cost and bytes of x with the first t + 1 nodes of the way as in y: of shapes (nodes,) and (peaks, nodes)."""
    count = len(way)
    turn = np.full(len(problem.node_costs), count)  # the step at which a node changes; `count`: it doesn't change
    turn[way] = np.arange(count)
    cost, forbidden, held = changes(problem, rows, peaks, x, y, turn, count, lambda table, ends: _changes(table, ends, turn, count, x, y))
    return np.where(np.cumsum(forbidden) > 0, np.inf, np.cumsum(cost)), np.cumsum(held, axis=1)


def _changes(table: np.ndarray, ends: tuple[int, ...], turn: np.ndarray, never: int, x: np.ndarray, y: np.ndarray) -> Iterator[Change]:
    """The steps at which the entry of an edge changes, with the old and the new entry: when its first end changes, and its second."""
    a, b = ends
    if turn[a] > turn[b]:
        table, a, b = table.T, b, a
    if turn[a] < never:
        yield int(turn[a]), table[x[a], x[b]], table[y[a], x[b]]
    if turn[b] < never:
        yield int(turn[b]), table[y[a], x[b]], table[y[a], y[b]]
