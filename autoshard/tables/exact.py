"""The optimal plan of a few tables: a compiled depth-first search over every option at every place.

    a branch is pruned when    max over d of seconds_d  >=  best
                         or    y . used + sum over the remaining tables of min over o of y . a_o  >  y . b(best)    (bound.py has y, a, b)
                         or    a device or host exceeds its memory
Devices of a node with the same load are equivalent for a table of one shard: only the first is tried.
"""

import itertools
from typing import NamedTuple

import numpy as np

from autoshard.solvers import compiled
from autoshard.tables.arrays import TablesInstance
from autoshard.tables.bound import Bound, rows_at, solve_weights
from autoshard.tables.search import State, empty_state

MOST_WAYS = 4000  # in all, over the tables
MOST_TABLES = 16
BRANCHES = 4_000_000  # about two seconds


class Ways(NamedTuple):
    """Every way of placing each table, table by table: the seconds and bytes that it adds to each device and host."""

    first: np.ndarray  # per table
    seconds: np.ndarray  # (ways, devices)
    hbm: np.ndarray
    host: np.ndarray  # (ways, hosts)
    alone: np.ndarray  # per way: its device where it has one shard, else -1
    spots: list[tuple[int, tuple[int, ...]]]  # option, places


def ways_of(instance: TablesInstance, order: np.ndarray) -> Ways | None:
    """All ways of the tables in `order`; None where there are too many."""
    first, spots = [0], []
    for t in order.tolist():
        for o in range(instance.first_option[t], instance.first_option[t + 1]):
            places = instance.num // int(instance.size[o])
            parts = instance.parts(o)
            if places ** len(parts) > MOST_WAYS * 10:
                return None
            shards = [instance.shards(p) for p in parts]
            columns = (instance.seconds, instance.hbm, instance.host)
            is_uniform = all(np.array_equal(column[shards[0]], column[of]) for of in shards for column in columns)
            each = itertools.combinations_with_replacement if is_uniform else lambda some, n: itertools.product(some, repeat=n)
            spots += [(o, tuple(place)) for place in each(range(places), len(parts))]
            if len(spots) > MOST_WAYS:
                return None
        first.append(len(spots))
    n = len(spots)
    ways = Ways(np.array(first), np.zeros((n, instance.num)), np.zeros((n, instance.num)), np.zeros((n, len(instance.host_limit))),
                np.full(n, -1), spots)  # fmt: skip
    for w, (o, place) in enumerate(spots):
        size = instance.size[o]
        for k, at in enumerate(place):
            s = instance.first_shard[instance.first_part[o] + k]
            on = slice(at * size, (at + 1) * size)
            ways.seconds[w, on] += instance.seconds[s : s + size]
            ways.hbm[w, on] += instance.hbm[s : s + size]
            np.add.at(ways.host[w], instance.host_of[on], instance.host[s : s + size])
        if size == 1 and len(place) == 1:
            ways.alone[w] = place[0]
    return ways


def equivalent_devices(instance: TablesInstance) -> np.ndarray:
    """Per device a class; devices of one class can be exchanged: those of a node with equal limits, if every part's shards are equal."""
    size = np.diff(instance.first_shard)
    for p in np.flatnonzero(size > 1).tolist():
        if any(np.ptp(column[instance.shards(p)]) > 0 for column in (instance.seconds, instance.hbm, instance.host)):
            return np.arange(instance.num)
    keys = list(zip((np.arange(instance.num) // instance.per_node).tolist(), instance.hbm_limit.tolist(), instance.host_of.tolist()))
    first: dict[tuple, int] = {}
    return np.array([first.setdefault(key, d) for d, key in enumerate(keys)])


def search_all(instance: TablesInstance, bound: Bound, best: float, spots: State | None) -> tuple[float, State | None, bool]:
    """(seconds of the best plan, the plan, whether it is proven best). `best` = seconds of `spots`, inf without one."""
    if instance.num_tables > MOST_TABLES:
        return best, spots, False
    order = np.argsort(-np.maximum.reduceat(bound.totals.longest, instance.first_option[:-1]), kind="stable")
    ways = ways_of(instance, order)
    if ways is None:
        return best, spots, False
    price, budget = _prices(instance, bound, best)
    priced = np.array([price[o] for o, _ in ways.spots])
    least = np.minimum.reduceat(priced, ways.first[:-1])
    remaining = np.append(np.cumsum(least[::-1])[::-1], 0.0)
    chosen = np.full(instance.num_tables, -1)
    slowest, branches = descend(
        ways.first, ways.seconds, ways.hbm, ways.host, ways.alone, equivalent_devices(instance), priced, remaining, budget,
        instance.hbm_limit, instance.host_limit, best, BRANCHES, chosen,
    )  # fmt: skip
    if chosen[0] >= 0:
        spots = empty_state(instance)
        for t, w in zip(order.tolist(), chosen.tolist()):
            option, place = ways.spots[w]
            spots.option[t], spots.place[t, : len(place)] = option, place
    return slowest, spots, branches < BRANCHES


def _prices(instance: TablesInstance, bound: Bound, best: float) -> tuple[np.ndarray, float]:
    """y . a_o of every option, and y . b at T = best; zeros and inf where there are no weights."""
    if not np.isfinite(best) or best <= 0:
        return np.zeros(len(instance.scope)), np.inf
    a, b = rows_at(instance, bound.totals, best, packing=False)
    weights = solve_weights(a, b, bound.totals.longest <= best, bound.totals, instance.num_tables)
    if weights is None or not weights.y.any():
        return np.zeros(len(instance.scope)), np.inf
    return weights.y @ a, float(weights.y @ b) * (1 + 1e-9)


@compiled
def descend(  # pragma: no cover
    first, add_seconds, add_hbm, add_host, alone, equivalent, priced, remaining, budget, limit, host_limit, best, branches, chosen
):
    """Fill `chosen` with the ways of the best plan below `best`; returns (its seconds, number of branches visited)."""
    n, num = len(first) - 1, len(limit)
    seconds, hbm, host = np.zeros((n + 1, num)), np.zeros((n + 1, num)), np.zeros((n + 1, len(host_limit)))
    used = np.zeros(n + 1)
    at = first[:-1].copy()
    t, count = 0, 0
    while t >= 0:
        if at[t] == first[t + 1] or count >= branches:
            at[t] = first[t]
            t -= 1
            continue
        w = at[t]
        at[t] += 1
        count += 1
        used[t + 1] = used[t] + priced[w]
        if used[t + 1] + remaining[t + 1] > budget:
            continue
        d = alone[w]
        if d >= 0:
            is_redundant = False
            for other in range(d):
                if equivalent[other] == equivalent[d] and seconds[t, other] == seconds[t, d] and hbm[t, other] == hbm[t, d]:
                    is_redundant = True
                    break
            if is_redundant:
                continue
        ok = True
        for d in range(num):
            seconds[t + 1, d] = seconds[t, d] + add_seconds[w, d]
            hbm[t + 1, d] = hbm[t, d] + add_hbm[w, d]
            if seconds[t + 1, d] >= best or hbm[t + 1, d] > limit[d]:
                ok = False
                break
        if not ok:
            continue
        for h in range(len(host_limit)):
            host[t + 1, h] = host[t, h] + add_host[w, h]
            if host[t + 1, h] > host_limit[h]:
                ok = False
        if not ok:
            continue
        if t + 1 < n:
            t += 1
            continue
        best = seconds[n].max()
        for i in range(n):
            chosen[i] = at[i] - 1
    return best, count
