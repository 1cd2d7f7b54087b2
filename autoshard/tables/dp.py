"""The published dynamic program over tables, a knapsack: for every total amount of memory, the options with the least sum of seconds.

    best[i][m] = (seconds, memory) of tables 0..i whose memory is in bin m = floor(memory)                       -> fill
    memory'    = memory + a_ij,  seconds' = seconds + b_ij,  where memory' < bins
    the first of equal states is kept: in the order of options, then of bins

a_ij, b_ij = memory (in bins, a float) and seconds of option j of table i. There is one state per bin: within a bin the
faster sum is kept, even if it needs more memory. After the last table each non-empty bin yields one proposal, high memory to low.
Source: DynamicProgrammingProposer of TorchEasyRec and torchrec, and TorchEasyRec's form in two dimensions (device and host memory), where
among equal states the one of the lower bins, then of the earlier option, is kept, and each device bin yields its fastest host bin.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from autoshard.solvers import compiled

Lists = Sequence[Sequence[float]]


def dp_proposals(memory_in_bins: Lists, perf: Lists, bins: int) -> list[list[int]]:
    """One option per table for each amount of memory, high memory to low, by the published rule.

    memory_in_bins[i][j], perf[i][j]: of option j of table i; lists may differ in length, inf forbids an option. bins: the number of bins;
    a plan whose memory reaches it is left out. ValueError where the lists differ in shape or hold NaN or a number below 0.

        dp_proposals([[1.5, 3.0], [2.5]], [[9.0, 4.0], [5.0]], bins=6)  ->  [[1, 0], [0, 0]]
    """
    first, (a, b) = _flat({"memory_in_bins": memory_in_bins, "perf": perf})
    _check_bins(bins, "bins")
    if len(first) == 1:
        return []
    back: np.ndarray = np.full((len(first) - 1, bins), -1, dtype=_code_type(first, bins))
    fill(first, a, b, bins, back)
    return _walk_back(back, np.diff(first).max())


def dp_proposals_2d(hbm_in_bins: Lists, host_in_bins: Lists, perf: Lists, hbm_bins: int, host_bins: int) -> list[list[int]]:
    """`dp_proposals` under two kinds of memory: for each bin of device memory the fastest plan over all bins of host memory.

    Lists and errors as in `dp_proposals`.
    """
    first, (a, h, b) = _flat({"hbm_in_bins": hbm_in_bins, "host_in_bins": host_in_bins, "perf": perf})
    _check_bins(hbm_bins, "hbm_bins")
    _check_bins(host_bins, "host_bins")
    if len(first) == 1:
        return []
    states = [(np.zeros(1, dtype=np.int64), np.full(1, -1, dtype=np.int64))]  # cell, code of (previous state, option)
    cell, seconds, memory, host = np.zeros(1, dtype=np.int64), np.zeros(1), np.zeros(1), np.zeros(1)
    width = int(np.diff(first).max())
    for low, high in zip(first, first[1:]):
        of_table = (a[low:high], h[low:high], b[low:high])
        cell, seconds, memory, host, code = step_2d(seconds, memory, host, *of_table, hbm_bins, host_bins, width)
        states.append((cell, code))
    proposals = []
    for k in reversed(_quickest_per_row(cell, seconds, host_bins)):
        chosen = []
        for _, codes in reversed(states[1:]):
            k, option = divmod(int(codes[k]), width)
            chosen.append(option)
        proposals.append(chosen[::-1])
    return proposals


def _quickest_per_row(cell: np.ndarray, seconds: np.ndarray, host_bins: int) -> list[int]:
    """Per device bin, in their order, the state of least seconds; the lower host bin among equals."""
    best: dict[int, int] = {}
    for k, row in enumerate((cell // host_bins).tolist()):  # cells ascend
        if row not in best or seconds[k] < seconds[best[row]]:
            best[row] = k
    return [best[row] for row in sorted(best)]


def _flat(lists: dict[str, Lists]) -> tuple[np.ndarray, list[np.ndarray]]:
    """(first, where table i's options start at first[i]; each of the lists, concatenated)."""
    (name, tables), *others = lists.items()
    for other, rows in others:
        if len(rows) != len(tables):
            raise ValueError(f"{name} has {len(tables)} tables, {other} {len(rows)}; expected as many")
    for i in range(len(tables)):
        counts = {other: len(rows[i]) for other, rows in lists.items()}
        if len(set(counts.values())) > 1 or counts[name] == 0:
            listed = ", ".join(f"{n} in {other}" for other, n in counts.items())
            raise ValueError(f"table {i} has {listed}; expected as many options in each, at least one")
    flat = []
    for other, rows in lists.items():
        values = np.array([x for row in rows for x in row], dtype=float)
        if (bad := np.flatnonzero(~(values >= 0))).size:
            raise ValueError(f"{other} holds {values[bad[0]]:g}; expected numbers of 0 or more (inf forbids an option)")
        flat.append(values)
    return np.cumsum([0, *map(len, tables)]), flat


def _check_bins(bins: object, name: str) -> None:
    if isinstance(bins, bool) or not isinstance(bins, (int, np.integer)) or bins < 1:
        raise ValueError(f"{name} is {bins!r}; expected a whole number of 1 or more, for example 100 per device")


def _code_type(first: np.ndarray, bins: int) -> type:
    return np.int32 if bins * int(np.diff(first).max()) < 2**31 else np.int64


@compiled
def fill(first, a, b, bins, back):  # pragma: no cover
    """back[i, m] = previous bin * (most options of a table) + option; -1 where there is no state."""
    width = 0
    for i in range(len(first) - 1):
        width = max(width, first[i + 1] - first[i])
    seconds, memory = np.full(bins, np.inf), np.zeros(bins)
    seconds[0] = 0.0  # no table is placed: one state without memory
    reached = 1  # all states are in lower bins
    for i in range(len(first) - 1):
        new_seconds, new_memory = np.full(bins, np.inf), np.zeros(bins)
        new_reached = 0
        for j in range(first[i + 1] - first[i]):
            aj, bj = a[first[i] + j], b[first[i] + j]
            if aj >= bins or not bj < np.inf:
                continue
            for m in range(reached):
                if seconds[m] < np.inf:
                    memory_then = memory[m] + aj
                    if memory_then < bins:
                        to = int(memory_then)
                        seconds_then = seconds[m] + bj
                        if seconds_then < new_seconds[to]:
                            new_seconds[to], new_memory[to] = seconds_then, memory_then
                            back[i, to] = m * width + j
                            new_reached = max(new_reached, to + 1)
        seconds, memory, reached = new_seconds, new_memory, new_reached


def _walk_back(back: np.ndarray, width: int) -> list[list[int]]:
    """The options of every bin that the last table reached, highest bin first."""
    at = np.flatnonzero(back[-1] >= 0)[::-1]
    chosen = np.empty((len(at), len(back)), dtype=np.int64)
    for i in range(len(back) - 1, -1, -1):
        at, chosen[:, i] = np.divmod(back[i, at], width)
    return chosen.tolist()


@compiled
def step_2d(seconds, memory, host, a, h, b, bins, host_bins, width):  # pragma: no cover
    """The states after one more table, ascending by cell = device bin * host_bins + host bin, and their codes (previous state, option)."""
    size = bins * host_bins
    new_seconds, code = np.full(size, np.inf), np.full(size, -1, dtype=np.int64)
    new_memory, new_host = np.zeros(size), np.zeros(size)
    for k in range(len(seconds)):
        for j in range(len(a)):
            memory_then, host_then, seconds_then = memory[k] + a[j], host[k] + h[j], seconds[k] + b[j]
            if memory_then < bins and host_then < host_bins:
                to = int(memory_then) * host_bins + int(host_then)
                if seconds_then < new_seconds[to]:
                    new_seconds[to], new_memory[to], new_host[to], code[to] = seconds_then, memory_then, host_then, k * width + j
    cell = np.flatnonzero(code >= 0)
    return cell, new_seconds[cell], new_memory[cell], new_host[cell], code[cell]


def bins_of(memory: Lists, total: float, bins: int) -> list[list[float]]:
    """Bytes in units of bins: memory / (total / bins), as in the published planner. ValueError where there is no memory."""
    if not 0 < total < math.inf:
        raise ValueError(f"the devices' memory is {total:g} bytes in all; expected a number above 0")
    size = float(total) / bins
    return [[x / size for x in row] for row in memory]
