"""Towards a limit on memory from both sides: answers just below it, and a bound.

    p, q      corners of the lower hull of (memory, cost) around the limit B: p fits, q is too large
    chord     the slope from p to q is the next price of a byte; what is cheaper at it is a new corner, else the hull
              is straight there and nothing within B costs less than the chord at B                      (pricing.py)
    exchange  the parts in which q differs from p, put into p in the order of what they save per byte
              as long as they fit: what is left of the gap is less than one part saves, a layer's say    (exchange.py)
    cut       where one part is too much, since something couples all layers: a beginning or an end of it  (cutting.py)

Where many layers are alike this proves in seconds what branching on their choices doesn't in hours.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np

from ..problem import Problem, without_limit
from .auto import Auto
from .certificate import refute
from .cutting import cut
from .exchange import differences
from .incumbent import Incumbent
from .pricing import Found, Pricing, corners, scale
from .times import held, load

AGREED = 1e-4  # relative: answer and bound at a price; the rest is for branch and bound
DEARER, STEEPEST = 8.0, 1e4  # until one fits, the fastest answer's memory is worth its seconds once, 8 times, ...
CHORDS = 30
FILLINGS = 6  # of an answer with parts of another; a time at which the filled one was too large is looked at in the next
CUTS = 3  # parts, those that save most, of which a beginning or an end is looked at
EVEN = 1e-9  # relative to the cost: parts of equal worth go in the order of the nodes


@dataclass(frozen=True)
class Prices:
    """What prices alone give, without branch and bound: an answer within a part of the best, soon; and its bound."""

    time_limit: float | None = None  # seconds
    gap: float | None = None  # relative

    def run(self, problem: Problem, incumbent: Incumbent) -> None:
        if problem.usage_limit is None:
            Auto().run(problem, incumbent)
        else:
            approach(problem, incumbent)


def approach(problem: Problem, incumbent: Incumbent, messages: np.ndarray | None = None) -> None:
    """Answers and bounds for a problem with a limit. messages: where dual ascent stood without one."""
    limit = problem.usage_limit
    assert limit is not None
    gap = max(incumbent.record.gap / 4, AGREED)
    pricing = Pricing(without_limit(problem), incumbent.deadline, incumbent.record.clock, gap, exact_seconds=0.0)
    if incumbent.choice is not None:
        pricing.learn(incumbent.choice)
    pricing.settle(np.zeros(len(pricing.rows.times)), messages)
    tell(pricing, incumbent, limit)
    if not pricing.found or incumbent.done:
        return
    fastest = min(pricing.found.values(), key=lambda f: (f.cost, f.memory))
    worth = 1.0
    while not any(f.memory <= limit for f in pricing.found.values()) and worth <= STEEPEST and not incumbent.done:
        pricing.minimise(worth * scale(pricing.problem, fastest) / fastest.memory)
        tell(pricing, incumbent, limit)
        if worth == 1.0:
            refute(problem, incumbent)
            if incumbent.choice is not None:
                pricing.learn(incumbent.choice)
        worth *= DEARER
    for _ in range(CHORDS):
        ends = around(pricing, limit)
        if ends is None or incumbent.done:
            return
        p, q = ends
        price = (p.cost - q.cost) / (q.memory - p.memory)
        before = p.cost + price * p.memory
        pricing.minimise(price)
        tell(pricing, incumbent, limit)
        if min(f.cost + price * f.memory for f in pricing.found.values()) >= before - gap * abs(before):
            break
    fill(pricing, incumbent, limit)


def tell(pricing: Pricing, incumbent: Incumbent, limit: float) -> None:
    """Hand on the bound at the limit, and the best answer within it."""
    incumbent.raise_bound(max((line.at(limit) for line in pricing.lines), default=-math.inf))
    fitting = [f for f in pricing.found.values() if f.memory <= limit]
    if fitting:
        incumbent.offer(min(fitting, key=lambda f: f.cost).choice)


def around(pricing: Pricing, limit: float) -> tuple[Found, Found] | None:
    """The corners of the hull between which the limit lies."""
    hull = corners(list(pricing.found.values()))
    return next(((p, q) for p, q in itertools.pairwise(hull) if p.memory <= limit < q.memory), None)


def fill(pricing: Pricing, incumbent: Incumbent, limit: float) -> None:
    """Parts of the corner above the limit into the one below it; what is left of the room to a beginning or an end of others."""
    ends = around(pricing, limit)
    if ends is None:
        return
    p, q = ends
    x, y = np.array(p.choice), np.array(q.choice)
    price = (p.cost - q.cost) / (q.memory - p.memory)
    for _ in range(FILLINGS):
        peaks, known = list(pricing.peaks), len(pricing.found)
        more = differences(pricing.problem, pricing.rows, peaks, x, y)
        room = limit - p.loads[peaks]
        worth = np.round((more.cost + price * more.bytes.max(axis=0)) / (EVEN * max(abs(p.cost), abs(q.cost))))
        taken = np.zeros(len(worth) + 1, bool)  # the last one: nodes that belong to no part
        for k in np.lexsort((np.arange(len(worth)), worth)).tolist():
            if more.cost[k] < 0 and (more.bytes[:, k] <= room).all():
                taken[k] = True
                room = room - more.bytes[:, k]
        filled = np.where(taken[more.part], y, x)
        pricing.learn(filled)
        left = [k for k in np.argsort(more.cost, kind="stable").tolist() if more.cost[k] < 0 and not taken[k]]
        for k in left[:CUTS]:
            mixed = cut(pricing.problem, pricing.rows, peaks, filled, y, np.flatnonzero(more.part == k), room)
            if mixed is not None:
                filled = mixed
                room = limit - load(pricing.rows, held(pricing.problem, filled))[peaks]
        pricing.learn(filled)
        tell(pricing, incumbent, limit)
        if len(pricing.peaks) == len(peaks) or len(pricing.found) == known:
            return
