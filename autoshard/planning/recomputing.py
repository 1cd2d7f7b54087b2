"""Activation checkpointing as a choice: how many of the repeated blocks are recomputed in the backward pass.

k blocks recomputed, k = 0 ... n, is k graphs, each planned with its own proof under the same memory limit. More blocks mean
more seconds and fewer bytes, but a tight limit also makes layouts dearer, so `auto` tries no block, all, and by bisection the
fewest that fit and the middle of what is left, with the solver `prices`, and plans the cheapest of them to within one
percent. The proof is that of the chosen k.
"""

from __future__ import annotations

from collections.abc import Callable

from autoshard.solution import Solution


def cheapest(num_blocks: int, planned: Callable[[int], Solution | None]) -> int | None:
    """The best of the tried k, the least of several; None where not even recomputing every block fits. `planned(k)` is None likewise."""
    tried: dict[int, Solution | None] = {}

    def at(k: int) -> Solution | None:
        if k not in tried:
            tried[k] = planned(k)
        return tried[k]

    if at(0) is None and num_blocks:
        if at(num_blocks) is None:
            return None
        low, high = 0, num_blocks  # low does not fit, high does
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if at(middle) is not None else (middle, high)
        at((high + num_blocks) // 2)
    elif num_blocks and at(0) is not None:
        at(num_blocks)
    fits = [(solution.cost, k) for k, solution in tried.items() if solution is not None]
    return min(fits)[1] if fits else None
