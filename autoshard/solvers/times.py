"""At which times memory can bind: one row per maximal set of usages alive together whose largest bytes exceed the limit.

Live sets are ordered in time and a usage's rows are a range, so (start, end) become (first, last) row numbers. A time whose
live set lies within another's can't be the tighter one; it is a local maximum iff something starts there and something ends next.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..problem import NodeUsage, Problem


@dataclass(frozen=True)
class Rows:
    """Usage k is alive on rows first[k] <= row < last[k] (none where equal); row r stands for time times[r]."""

    times: np.ndarray
    first: np.ndarray
    last: np.ndarray

    def alive(self, row: int) -> np.ndarray:
        return np.flatnonzero((self.first <= row) & (row < self.last))


def maximal_rows(starts: np.ndarray, ends: np.ndarray, counts: np.ndarray) -> Rows:
    """Rows of all maximal live sets of the usages that count."""
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
    """Bytes held at each row when usage k holds amounts[k]."""
    delta = np.zeros(len(rows.times) + 1)
    np.add.at(delta, rows.first, amounts)
    np.add.at(delta, rows.last, -amounts)
    return np.cumsum(delta)[:-1]


def keep_rows(rows: Rows, keep: np.ndarray) -> Rows:
    """Only the rows marked in keep, renumbered."""
    number = np.concatenate([[0], np.cumsum(keep)])
    return Rows(rows.times[keep], number[rows.first], number[rows.last])


def binding_rows(problem: Problem) -> Rows:
    """The rows at which the limit can be exceeded at all."""
    starts = np.array([u.start for u in problem.usages], dtype=np.int64)
    ends = np.array([u.end for u in problem.usages], dtype=np.int64)
    if problem.usage_limit is None or not len(starts):
        return maximal_rows(starts, ends, np.zeros(len(starts), bool))
    most = np.array([u.bytes.max() for u in problem.usages])
    rows = maximal_rows(starts, ends, most > 0)
    # 1e-9: the running sum may lose the last digits, and one row too many does no harm
    return keep_rows(rows, load(rows, most) > problem.usage_limit * (1 - 1e-9))


def held(problem: Problem, choice: Sequence[int] | np.ndarray) -> np.ndarray:
    """Bytes that each usage holds under a choice."""
    amounts = np.zeros(len(problem.usages))
    for k, u in enumerate(problem.usages):
        if isinstance(u, NodeUsage):
            amounts[k] = u.bytes[choice[u.node]]
        else:
            e = problem.edges[u.edge]
            amounts[k] = u.bytes[choice[e.a], choice[e.b]]
    return amounts
