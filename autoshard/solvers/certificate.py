"""A certificate of an answer: prices per byte and shifts of edges, from which anybody can compute a bound (autoshard/certify.py).

    shifts    what an edge's table gets and its end's costs lose. Those of dual ascent follow from one pass over its messages    (`_shifts`)
              those of HiGHS are the row prices of the relaxation, which are the best there are                               (`_relaxed`)

What a bound owes to branching has no such form: the certificate's bound is then below that of the search, and says so by being lower.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..problem import Problem, anchored, evaluate
from .answer import TOLERANCE
from .cutting_planes import PriceAscent
from .dual_ascent import CONVERGED, Messages, ascend
from .ilp import relax
from .incumbent import Fixed, Record
from .linear_program import LinearProgram

RELAXED = 400_000  # columns of the largest relaxation that is solved
ROUNDS = 20  # of prices
Shifts = list[tuple[np.ndarray, np.ndarray]]


@dataclass(frozen=True, eq=False)
class Certificate:
    """bound: seconds, as the prices and shifts give it. shifts: per edge, those of its two ends, per choice."""

    choice: tuple[int, ...]
    cost: float
    bound: float
    prices: Mapping[int, float]  # seconds per byte, by time
    shifts: Shifts


def certificate(problem: Problem, choice: Sequence[int]) -> Certificate:
    """The certificate of a choice that fits, with the best bound that dual ascent and the relaxation give."""
    problem = anchored(problem)
    record = Record(problem, math.inf, 0.0, lambda: 0.0)
    incumbent = Fixed(problem, record, choice)
    messages = Messages(problem)
    ascend(messages, incumbent, CONVERGED)
    if len(messages.prices) and not incumbent.proven:
        prices = PriceAscent(messages, incumbent)
        prices.climb(ROUNDS)
        prices.settle(prices.prices)
    cost, times = evaluate(problem, choice).cost, [int(t) for t in messages.rows.times]
    bound, shifts = _shifts(messages)
    of_memory = {t: float(y) for t, y in zip(times, messages.prices) if y > 0}
    program = LinearProgram(problem) if cost - bound > TOLERANCE * abs(cost) else None
    if program is not None and program.num_columns <= RELAXED:
        relax(program, incumbent)
        if program.best is not None and program.best[0] > bound:
            bound, of_memory, shifts = program.best[0], program.prices_by_time(), program.shifts()
    return Certificate(tuple(int(i) for i in choice), cost, min(bound, cost), of_memory, shifts)


def _shifts(messages: Messages) -> tuple[float, Shifts]:
    """The bound and the shifts of one more forward pass: each node hands the edges to later nodes their share of its costs, and each of
    these edges hands its least costs to the later node."""
    problem, half, theta = messages.problem, messages.tables.half_edges, messages.theta
    width, state = np.diff(half.first), messages.message.copy()
    shifts: dict[int, np.ndarray] = {}  # by place of the message into the node
    constants = [-messages.fee]
    for p in range(len(width)):
        low, middle, high, n = half.start[p], half.split[p], half.start[p + 1], width[p]
        total = theta[half.first[p] : half.first[p + 1]].astype(np.float64)
        for k in half.into[low:high]:
            total += state[k : k + n]
        weight = 1.0 / max(middle - low, high - middle, 1)
        constants.append(float(total.min()))
        total = total - constants[-1]
        for h in range(middle, high):
            m, into, out = width[half.neighbour[h]], half.into[h], half.out[h]
            mine = np.full(n, np.inf)  # of a choice without a partner; where the total is finite, the message is
            np.subtract(weight * total, state[into : into + n], out=mine, where=np.isfinite(total))
            sent = (mine[:, None] + messages.pool[half.table[h] : half.table[h] + n * m].reshape(n, m)).min(axis=0)
            constants.append(float(sent.min()))
            state[out : out + m] = sent - constants[-1]
            shifts[into], shifts[out] = mine, -sent
    places = np.cumsum([0, *(e.table.shape[0] + e.table.shape[1] for e in problem.edges)])
    finite = [[np.where(np.isfinite(s), s, 0.0) for s in (shifts[k], shifts[k + e.table.shape[0]])] for k, e in zip(places, problem.edges)]
    return math.fsum(constants), [(a, b) for a, b in finite]


def to_record(problem: Problem, proven: Certificate) -> dict:
    """The certificate with all numbers of its problem, as `autoshard/certify.py` reads it; arrays that are shared are written once."""
    problem = anchored(problem)
    pool: list[dict] = []
    places: dict[tuple, int] = {}

    def place(array: np.ndarray) -> int:
        key = array.shape, array.tobytes()
        if key not in places:
            places[key] = len(pool)
            values = [x if math.isfinite(x) else None for x in array.ravel().tolist()]
            pool.append({"shape": list(array.shape), "values": values})
        return places[key]

    record = {
        "format": "autoshard.certificate/1", "claims": {"cost": proven.cost, "bound": proven.bound}, "limit": problem.usage_limit,
        "choice": list(proven.choice), "names": list(problem.names), "nodes": [place(c) for c in problem.node_costs],
        "edges": [[e.a, e.b, place(e.table)] for e in problem.edges],
        "usages": [[u.start, u.end, u.edge, list(u.ends), place(u.bytes)] for u in problem.usages],
        "prices": [[t, y] for t, y in proven.prices.items()], "shifts": [[place(a), place(b)] for a, b in proven.shifts],
    }  # fmt: skip
    return {**record, "arrays": pool}
