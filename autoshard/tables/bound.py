"""Lower bounds on the seconds of the slowest device of any plan.

Suppose that every device of a plan takes at most T and that the plan fits. Then, summed over the D devices, its options o satisfy
the rows a_k:

    sum of seconds <= D T        sum of hbm bytes <= all devices' memory        sum of host bytes <= all hosts' memory
    sum of u(seconds of a shard / T) <= D,  sum of u(hbm of a shard / largest device) <= D      for every dual feasible u   -> rows_at

and no shard of o takes longer than T. For weights y >= 0 each table adds at least min over o of y . a_o, hence

    sum over tables of min over o of y . a_o  >  y . b     =>     no such plan: T is a lower bound                          -> refutes

The weights come from a linear program; the refutation is computed again from the weights, so the bound does not depend on the
program's tolerances. u(z) is dual feasible when sum z <= 1 implies sum u(z) <= 1; used are u_k(z) = (ceil((k + 1) z) - 1) / k and the
function that rounds z > 1 - e up to 1 and z < e down to 0.
Source: Fekete, Schepers, "New classes of fast lower bounds for bin packing problems" (2001).
"""

from typing import NamedTuple

import numpy as np

from autoshard.solvers import SparseRows, linprog
from autoshard.tables.arrays import TablesInstance

STEPS = tuple(range(1, 13))  # k of u_k
EDGES = (0.1, 0.2, 0.3, 0.4, 0.5)  # e of the other function
SAFE = 1e-12  # relative: z is reduced by this much, so that rounding cannot make u(z) too large
MARGIN = 1e-11  # relative margin that a refutation needs; sums of thousands of numbers err by about 1e-13
WIDTH = 1e-4  # relative: bisection stops here
NOTHING = 1e-30  # relative: plans that may take this little may take no time at all, and have no bound


class Totals(NamedTuple):
    """Per option, summed over its shards; `longest` is its longest shard's seconds."""

    seconds: np.ndarray
    hbm: np.ndarray
    host: np.ndarray
    longest: np.ndarray
    largest: np.ndarray  # bytes of hbm
    option_of: np.ndarray  # per shard
    table_of: np.ndarray  # per option


class Weights(NamedTuple):
    """The optimum of the linear program at T: weights of the rows, the share of each option, the excess (above 0: no plan fits)."""

    y: np.ndarray
    share: np.ndarray
    excess: float


def totals_of(instance: TablesInstance) -> Totals:
    shards_of_part = np.diff(instance.first_shard)
    option_of_part = np.repeat(np.arange(len(instance.scope)), np.diff(instance.first_part))
    option_of = np.repeat(option_of_part, shards_of_part)
    start = instance.first_shard[instance.first_part[:-1]]
    reduce = np.add.reduceat, np.maximum.reduceat
    add, most = ((lambda x, f=f: f(x, start) if len(start) else np.zeros(0)) for f in reduce)
    table_of = np.repeat(np.arange(instance.num_tables), np.diff(instance.first_option))
    return Totals(
        add(instance.seconds), add(instance.hbm), add(instance.host), most(instance.seconds), most(instance.hbm), option_of, table_of
    )  # fmt: skip


def dual_feasible(z: np.ndarray) -> list[np.ndarray]:
    """Every u at z, element by element."""
    z = np.maximum(z * (1 - SAFE), 0.0)
    values = [np.maximum(np.floor((k + 1) * z), 0.0) / k for k in STEPS]
    values += [np.where(z > 1 - e, 1.0, np.where(z < e, 0.0, z)) for e in EDGES]
    return values


def rows_at(instance: TablesInstance, totals: Totals, T: float, *, packing: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """a[k, option] and b[k] of the rows at T, each divided so that b is 1 (0 where there is no memory at all)."""
    rows, limits = [totals.seconds], [instance.num * T]
    for used, limit in ((totals.hbm, instance.hbm_limit.sum()), (totals.host, instance.host_limit.sum())):
        if np.isfinite(limit) and used.any():
            rows.append(used)
            limits.append(float(limit))
    if packing:
        largest = instance.hbm_limit.max()
        for amounts, limit in ((instance.seconds, T), (instance.hbm, largest)):
            if 0 < limit < np.inf:
                for u in dual_feasible(amounts / limit):
                    rows.append(np.bincount(totals.option_of, u, minlength=len(totals.seconds)))
                    limits.append(float(instance.num))
    a, b = np.array(rows), np.array(limits)
    scale = np.where(b > 0, b, 1.0)
    return a / scale[:, None], np.where(b > 0, 1.0, 0.0)


def lagrangian(a: np.ndarray, b: np.ndarray, y: np.ndarray, allowed: np.ndarray, first_option: np.ndarray) -> float:
    """sum over tables of min over allowed options of y . a_o, less y . b; inf where a table has no allowed option."""
    if (np.diff(first_option) == 0).any():
        return np.inf
    priced = np.where(allowed, y @ a, np.inf)
    return float(np.minimum.reduceat(priced, first_option[:-1]).sum() - y @ b)


def solve_weights(a: np.ndarray, b: np.ndarray, allowed: np.ndarray, totals: Totals, num_tables: int) -> Weights | None:
    """Minimise the excess t of a x <= b (1 + t), one option per table; None where a table has no allowed option."""
    open_ = np.flatnonzero(allowed)
    if len(np.unique(totals.table_of[open_])) < num_tables:
        return None
    n = len(open_)
    used = np.flatnonzero(a[:, open_].any(axis=1) | (b == 0))
    upper = SparseRows.dense(np.hstack([a[np.ix_(used, open_)], -np.ones((len(used), 1))]))
    pick = SparseRows.of(totals.table_of[open_], np.arange(n), np.ones(n), (num_tables, n + 1))
    low, high = np.append(np.full(len(used), -np.inf), np.ones(num_tables)), np.append(b[used], np.ones(num_tables))
    optimum = linprog(np.append(np.zeros(n), 1.0), upper.below(pick), low, high, np.append(np.zeros(n), -1.0), np.full(n + 1, np.inf))
    assert optimum is not None, "the linear program has no optimum"  # it is feasible, and t is bounded
    y, share = np.zeros(len(b)), np.zeros(len(allowed))
    y[used] = np.maximum(-optimum.prices[: len(used)], 0.0)
    share[open_] = optimum.x[:-1]
    return Weights(y, share, float(optimum.x[-1]))


class Bound:
    """The lower bound of one problem; `value` is the largest T that was refuted so far."""

    def __init__(self, instance: TablesInstance) -> None:
        self.instance, self.totals = instance, totals_of(instance)
        self.value = 0.0

    def refutes(self, T: float, *, packing: bool = True) -> bool:
        """Whether every plan provably takes longer than T; if so, `value` is raised to T."""
        allowed, excess = self.totals.longest <= T, np.inf
        a, b = rows_at(self.instance, self.totals, T, packing=packing)
        weights = solve_weights(a, b, allowed, self.totals, self.instance.num_tables)
        if weights is not None:
            excess = lagrangian(a, b, weights.y, allowed, self.instance.first_option) / max(weights.y.sum(), 1e-300)
        proven = excess > MARGIN
        if proven:
            self.value = max(self.value, T)
        return proven

    def raise_to(self, high: float, *, packing: bool = True) -> None:
        """Bisect between the bound and `high`, the seconds of a plan."""
        if not self.value and not self.refutes(high * NOTHING, packing=packing):
            return
        while high - self.value > WIDTH * high:
            T = (self.value + high) / 2
            if not self.refutes(T, packing=packing):
                high = T
