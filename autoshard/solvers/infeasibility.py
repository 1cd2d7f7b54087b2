"""Why no answer fits: an interval for the smallest limit that works, and the nodes that hold the bytes.

    floor = max over t of the sum of every usage's fewest bytes  <=  smallest limit  <=  peak of any answer
Prices on the times narrow the interval on both sides: they give the cheapest answer when bytes are paid for       -> level
Where a limit is far too small or large enough, one of the two shows it at once, before any search                  -> refute
The rest of the interval is halved: with all finite costs set to zero, is there an answer under this limit?        -> smallest_limit
Every answer that fits costs 0 then, so a bound above zero proves that none fits: prices alone can do that (Record.worst).
"""

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from ..problem import Edge, Problem, anchored, evaluate, held
from .answer import Infeasibility
from .binding_times import load, maximal_rows
from .incumbent import Incumbent, Record
from .restrict import shrink
from .settle import has_many_pair_bytes, reduce_and_settle, settle

TOP_NODES = 10
MOST_SECONDS = 10.0  # for the smallest limit, after it is proven that no answer fits; the contest's G takes 0.3
PATIENT_SECONDS = 3.0  # after which CLOSE is close enough
SECONDS_PER_LIMIT = 2.0
REFUTE_SHARE = 0.1  # of the time left, to prove that no answer fits or to find the first one that does
REFUTE_SECONDS = 10.0  # at most
CLOSE = 0.01  # relative
SLIGHT = 1e-4  # relative
LEVELLINGS, SHARPEN = 8, 4.0  # rounds of prices, and the power of a time's fill by which its price grows
RELATIVE = 1e-9  # where bytes aren't integers, limits this close are equal


def explain_infeasible(problem: Problem, incumbent: Incumbent) -> Infeasibility:
    """The certificate for a problem that is proven to have no answer, in the time that is left."""
    free, clock = without_costs(anchored(problem)), incumbent.record.clock
    deadline = min(incumbent.record.deadline, clock() + MOST_SECONDS)
    low, high, choice = smallest_limit(free, clock, deadline, incumbent.record.homes)
    if choice is None and low == math.inf:
        return Infeasibility(None, (), (math.inf, math.inf))
    fewest = np.array([u.bytes.min() for u in problem.usages])
    amounts = fewest if choice is None else held(problem, choice)
    rows = maximal_rows(problem, amounts > 0)
    at = int(load(rows, amounts).argmax())
    total: dict[int, float] = {}
    for k in rows.alive(at).tolist():
        for node in problem.usages[k].ends[-1:]:  # of an edge its second end, as the copy is made for the consumer
            total[node] = total.get(node, 0.0) + float(amounts[k])
    top = sorted(total.items(), key=lambda item: (-item[1], item[0]))[:TOP_NODES]
    return Infeasibility(int(rows.times[at]), tuple(top), (low, high))


def refute(problem: Problem, incumbent: Incumbent) -> None:
    """Prove quickly that no answer fits, or find one that does; neither where the limit is near the smallest that works."""
    limit, clock = problem.usage_limit, incumbent.record.clock
    if limit is None or incumbent.done or incumbent.choice is not None:
        return
    seconds = min(REFUTE_SHARE * incumbent.time_left(), REFUTE_SECONDS)
    free = replace(without_costs(problem), usage_limit=None)
    low, _, choice = level(free, clock, clock() + seconds, enough=limit, homes=incumbent.record.homes)
    if low > limit:
        incumbent.raise_bound(math.inf)
    elif choice is not None:
        incumbent.offer(choice)


def hopeless(problem: Problem) -> bool:
    """Whether the sum of every usage's fewest bytes already exceeds the limit."""
    return problem.usage_limit is not None and _floor(problem) * (1 - RELATIVE) > problem.usage_limit


def smallest_limit(
    free: Problem, clock: Callable[[], float], deadline: float, homes: np.ndarray | None = None
) -> tuple[float, float, tuple[int, ...] | None]:
    """(low, high, choice): no answer fits below low, choice fits at high; low == high where proven. Costs are 0 or inf."""
    integral = all((u.bytes == np.rint(u.bytes)).all() for u in free.usages)
    low, high, best = level(free, clock, deadline, homes=homes)
    low = math.ceil(low) if integral and low < math.inf else low
    open_until = low  # limits up to here were tried without a proof and without an answer
    patient_until = min(deadline, clock() + PATIENT_SECONDS)
    limit = low  # it often works
    while best is not None and clock() < deadline:
        if high <= low or (not integral and high - low <= 3 * RELATIVE * high):
            break
        tried = max(low, open_until)
        if high - tried <= CLOSE * high and (clock() > patient_until or open_until > low):
            break
        record = Record(replace(free, usage_limit=limit), min(deadline, clock() + SECONDS_PER_LIMIT), 0.0, clock, worst=0.0)
        incumbent = Incumbent(record.problem, record)
        reduce_and_settle(record.problem, incumbent)
        if record.choice is not None:
            best, high = record.choice, evaluate(record.problem, record.choice).peak
        elif incumbent.proven:
            low = limit + 1.0 if integral else limit
        else:
            open_until = limit
        limit = (max(low, open_until) + high) / 2
        limit = math.floor(limit) if integral else limit * (1 + RELATIVE)
    return (high if integral and high <= low else low), high, best


def level(
    free: Problem, clock: Callable[[], float], deadline: float, *, enough: float | None = None, homes: np.ndarray | None = None
) -> tuple[float, float, tuple[int, ...] | None]:
    """(low, high, choice) by prices y on the times: min over x of y . bytes(x) <= peak * sum of y, and y follows the bytes held.

    enough: a limit; the search ends once it is below low or above high. homes: as for `solve`.
    """
    low, high, best = _floor(free), math.inf, None
    rows = maximal_rows(free, np.array([u.bytes.max() > 0 for u in free.usages], dtype=bool))
    prices = np.full(len(rows.times), 1.0 / max(len(rows.times), 1))
    large = len(prices) > 0 and has_many_pair_bytes(free)
    everywhere = everywhere_in_total = 0.0  # a further price per byte, at whatever time; all of it together is below SLIGHT of the floor
    if large:  # few times have a price of their own, so that equal layers still share their tables
        fewest = np.array([u.bytes.min() for u in free.usages])
        prices = np.eye(1, len(prices), int(load(rows, fewest).argmax()))[0]
        everywhere_in_total = SLIGHT * low
        everywhere = everywhere_in_total / math.fsum(u.bytes.max() for u in free.usages)
    patient_until = clock() + PATIENT_SECONDS
    for k in range(LEVELLINGS):
        if enough is not None and not low <= enough < high:
            break
        record = Record(priced(free, rows.of_usages(prices) + everywhere), deadline, 0.0, clock, homes=homes)
        incumbent = Incumbent(record.problem, record)
        if (inner := shrink(record.problem, incumbent)) is None:
            incumbent.raise_bound(math.inf)
        else:
            inner.homes = None  # prices differ from layer to layer: no two of them are equal
            settle(inner)
        if record.choice is None:
            return (math.inf, math.inf, None) if incumbent.proven else (low, high, best)
        if len(prices):
            low = max(low, (record.bound - everywhere_in_total) * (1 - RELATIVE) / np.cumsum(prices)[-1])
        peak = evaluate(free, record.choice).peak
        if peak < high:
            best, high = record.choice, peak
        if high - low <= (0.0 if clock() < patient_until else CLOSE) * high or not len(prices) or clock() > deadline:
            break
        loads = load(rows, held(free, record.choice))
        prices = prices + np.eye(1, len(prices), int(loads.argmax()))[0] / (k + 1) if large else prices * (loads / peak + 1e-3) ** SHARPEN
        prices /= prices.sum()
    return min(low, high), high, best


def priced(free: Problem, prices: np.ndarray) -> Problem:
    """The problem without limit whose costs include the bytes at a price per usage. What equal layers share, they still share."""
    costs, tables = list(free.node_costs), [e.table for e in free.edges]
    sums: dict[tuple[int, int, float], tuple[np.ndarray, np.ndarray]] = {}  # by ids of costs and bytes; the costs are kept alive with it

    def added(before: np.ndarray, amount: np.ndarray, price: float) -> np.ndarray:
        key = (id(before), id(amount), price)
        if key not in sums:
            sums[key] = before + price * amount, before
        return sums[key][0]

    for u, price in zip(free.usages, prices.tolist(), strict=True):
        if price and u.edge is not None:
            tables[u.edge] = added(tables[u.edge], u.bytes, price)
        elif price:
            costs[u.ends[0]] = added(costs[u.ends[0]], u.bytes, price)
    return Problem(free.names, tuple(costs), tuple(Edge(e.a, e.b, t) for e, t in zip(free.edges, tables, strict=True)))


def _floor(problem: Problem) -> float:
    fewest = np.array([u.bytes.min() for u in problem.usages])
    return float(load(maximal_rows(problem, fewest > 0), fewest).max(initial=0.0))


def without_costs(problem: Problem) -> Problem:
    """The problem with every finite cost set to zero."""
    tables = {id(t): t for t in (*problem.node_costs, *(e.table for e in problem.edges))}
    free = {key: np.where(np.isfinite(t), 0.0, np.inf) for key, t in tables.items()}
    edges = tuple(Edge(e.a, e.b, free[id(e.table)]) for e in problem.edges)
    return replace(problem, node_costs=tuple(free[id(c)] for c in problem.node_costs), edges=edges)
