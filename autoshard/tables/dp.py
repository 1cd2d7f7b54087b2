"""The published dynamic program over tables, a knapsack: for every total amount of memory, the options with the least sum of seconds.

    best[i][m] = (seconds, memory) of tables 0..i whose memory is in bin m = floor(memory)                       -> fill
    memory'    = memory + a_ij,  seconds' = seconds + b_ij,  where memory' < bins
    the first of equal states is kept: in the order of options, then of bins

a_ij, b_ij = memory (in bins, a float) and seconds of option j of table i. There is one state per bin: within a bin the
faster sum is kept, even if it needs more memory. After the last table each non-empty bin yields one proposal, high memory to low.
Source: DynamicProgrammingProposer of TorchEasyRec and torchrec.
"""

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
    first, a, b = _flat(memory_in_bins, perf)
    if isinstance(bins, bool) or not isinstance(bins, (int, np.integer)) or bins < 1:
        raise ValueError(f"bins is {bins!r}; expected a whole number of 1 or more, for example 100 per device")
    if len(first) == 1:
        return []
    width = int(np.diff(first).max())
    back: np.ndarray = np.full((len(first) - 1, bins), -1, dtype=np.int32 if bins * width < 2**31 else np.int64)
    fill(first, a, b, bins, width, back)
    return _walk_back(back, width)


def _flat(memory: Lists, perf: Lists) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(first, where table i's options start at first[i]; the memory and the seconds of all options)."""
    if len(perf) != len(memory):
        raise ValueError(f"memory_in_bins has {len(memory)} tables, perf {len(perf)}; expected as many")
    for i, (a, b) in enumerate(zip(memory, perf)):
        if len(a) != len(b) or len(a) == 0:
            listed = f"{len(a)} in memory_in_bins, {len(b)} in perf"
            raise ValueError(f"table {i} has {listed}; expected as many options in each, at least one")
    flat = [np.array([x for row in rows for x in row], dtype=float) for rows in (memory, perf)]
    for name, values in zip(("memory_in_bins", "perf"), flat):
        if (bad := np.flatnonzero(~(values >= 0))).size:
            raise ValueError(f"{name} holds {values[bad[0]]:g}; expected numbers of 0 or more (inf forbids an option)")
    return np.cumsum([0, *map(len, memory)]), flat[0], flat[1]


@compiled
def fill(first, a, b, bins, width, back):  # pragma: no cover
    """back[i, m] = previous bin * (most options of a table) + option; -1 where there is no state."""
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
