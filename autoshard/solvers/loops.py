"""The inner loops over tables of costs. numba takes a third of a second to load, in which a tiny problem is solved: so a loop is compiled
only once all loops together have had work for about as long; until then `compiled` is None, and the caller computes the same bits without.

    worst_loss, eliminate_link    of reductions (interning.py, which has each in numpy too)
    sweep                         of dual ascent, which runs as it stands here until then
"""

from collections.abc import Callable

import numpy as np

from . import compiling

LOADING = 120_000_000  # entries that numpy passes over, in three operations, while numba and its loops are loaded
CALL = 5_000  # entries for which a call of numpy with three operations takes as long as for the entries themselves
INTERPRETED = 200  # entries for which the interpreter takes one

_left = LOADING
_compiled: dict[Callable, Callable | None] = {}


def compiled(loop: Callable, entries: int) -> Callable | None:
    """The loop compiled; None while that would not pay, and without numba. entries: the work of this call, in entries of numpy's."""
    global _left
    _left -= entries
    if _left > 0:
        return None
    if loop not in _compiled:
        _compiled[loop] = compiling.compiled(loop) if compiling.numba() else None
    return _compiled[loop]


def worst_loss(table: np.ndarray) -> np.ndarray:  # pragma: no cover
    """[i, k]: the largest cost of row k in place of row i, max_j table[k, j] - table[i, j] where table[i, j] is finite."""
    n, m = table.shape
    out = np.full((n, n), -np.inf)
    columns = np.ascontiguousarray(table.T)
    for i in range(n):
        for j in range(m):
            entry = table[i, j]
            if entry < np.inf:
                for k in range(n):  # the innermost loop runs along memory
                    loss = columns[j, k] - entry
                    out[i, k] = loss if loss > out[i, k] else out[i, k]
    return out


def eliminate_link(costs: np.ndarray, left: np.ndarray, right: np.ndarray) -> np.ndarray:  # pragma: no cover
    """[a, b]: min_i costs[i] + left[i, a] + right[i, b]"""
    n, m = left.shape[1], right.shape[1]
    out = np.full((n, m), np.inf)
    for i in range(len(costs)):
        for a in range(n):
            priced = costs[i] + left[i, a]
            for b in range(m):
                out[a, b] = min(out[a, b], priced + right[i, b])
    return out


def sweep(first, start, split, neighbour, table, into, out, theta, pool, message, reduced, choice, forward):  # pragma: no cover
    """Pass messages along the order of the nodes or against it. Fills reduced and choice; returns bound, size and energy."""
    nodes = len(first) - 1
    bound, size, energy = 0.0, 0.0, 0.0
    score, sent = np.empty(len(theta)), np.empty(len(theta))  # of one node
    for step in range(nodes):
        p = step if forward else nodes - 1 - step
        base, n = first[p], first[p + 1] - first[p]
        low, middle, high = start[p], split[p], start[p + 1]
        if forward:
            done_from, done_to, next_from, next_to = low, middle, middle, high
        else:
            done_from, done_to, next_from, next_to = middle, high, low, middle
        total = reduced[base : base + n]
        for i in range(n):
            total[i] = score[i] = theta[base + i]
        for h in range(done_from, done_to):
            q = neighbour[h]
            mirrored = table[h] + choice[q]  # column choice[q] of the table seen from p
            width = first[q + 1] - first[q]
            for i in range(n):
                total[i] += message[into[h] + i]
                score[i] += pool[mirrored + i * width]
        for h in range(next_from, next_to):
            for i in range(n):
                total[i] += message[into[h] + i]
                score[i] += message[into[h] + i]
        best, least = 0, total[0]
        for i in range(1, n):
            if score[i] < score[best]:
                best = i
            if total[i] < least:
                least = total[i]
        choice[p] = best
        energy += theta[base + best]
        for h in range(done_from, done_to):
            q = neighbour[h]
            energy += pool[table[h] + best * (first[q + 1] - first[q]) + choice[q]]
        bound += least
        size += abs(least)
        for i in range(n):
            total[i] -= least
        weight = 1.0 / max(middle - low, high - middle, 1)
        for h in range(next_from, next_to):
            q = neighbour[h]
            m = first[q + 1] - first[q]
            for j in range(m):
                sent[j] = np.inf
            for i in range(n):
                mine = weight * total[i] - message[into[h] + i]
                row = pool[table[h] + i * m : table[h] + i * m + m]
                for j in range(m):
                    value = mine + row[j]
                    sent[j] = value if value < sent[j] else sent[j]
            low_sent = sent[0]
            for j in range(1, m):
                low_sent = min(low_sent, sent[j])
            bound += low_sent
            size += abs(low_sent)
            for j in range(m):
                message[out[h] + j] = sent[j] - low_sent
    return bound, size, energy
