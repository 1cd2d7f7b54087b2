"""The times at which memory can bind: one row per maximal set of usages that are live together and can exceed the limit.

The live sets are ordered in time and the rows of a usage are a range, so a usage's (start, end) becomes a (first, last) of row numbers. A
time whose live set is a subset of another time's needs no row. A time has a maximal live set iff a usage starts there and the next event
is the end of a usage.
"""

from dataclasses import dataclass

import numpy as np

from ..problem import Problem


@dataclass(frozen=True)
class Rows:
    """Usage k is alive on rows first[k] <= row < last[k] (none where they are equal); row r stands for time times[r]."""

    times: np.ndarray
    first: np.ndarray
    last: np.ndarray

    def alive(self, row: int) -> np.ndarray:
        return np.flatnonzero((self.first <= row) & (row < self.last))

    def of_usages(self, per_row: np.ndarray) -> np.ndarray:
        """Per usage, the sum of a number per row over its rows."""
        until = np.concatenate([[0.0], np.cumsum(per_row)])
        return until[self.last] - until[self.first]


def maximal_rows(problem: Problem, counts: np.ndarray) -> Rows:
    """The rows of all maximal live sets of the usages that count."""
    starts, ends = problem.usage_list.spans
    counts = counts & (starts < ends)
    s, e = np.unique(starts[counts]), np.unique(ends[counts])
    nothing = np.zeros(len(starts), np.int64)
    if not len(s):
        return Rows(s, nothing, nothing)
    next_event = np.minimum(np.append(s[1:], s[-1] + 1 + e[-1]), e[np.searchsorted(e, s, side="right")])
    times = s[np.isin(next_event, e)]
    first = np.searchsorted(times, starts, side="left")
    last = np.searchsorted(times, ends, side="left")
    return Rows(times, np.where(counts, first, 0), np.where(counts, np.maximum(first, last), 0))


def load(rows: Rows, amounts: np.ndarray) -> np.ndarray:
    """The bytes at each row when usage k holds amounts[k]."""
    delta = np.zeros(len(rows.times) + 1)
    np.add.at(delta, rows.first, amounts)
    np.add.at(delta, rows.last, -amounts)
    return np.cumsum(delta)[:-1]


def binding_rows(problem: Problem) -> Rows:
    """The rows at which the limit can be exceeded at all."""
    if problem.usage_limit is None or not problem.usages:
        return maximal_rows(problem, np.zeros(len(problem.usages), bool))
    most = np.array([u.bytes.max() for u in problem.usages])
    rows = maximal_rows(problem, most > 0)
    # 1e-9: the running sum may lose the last digits, and one row too many does no harm
    keep = load(rows, most) > problem.usage_limit * (1 - 1e-9)
    number = np.concatenate([[0], np.cumsum(keep)])
    return Rows(rows.times[keep], number[rows.first], number[rows.last])
