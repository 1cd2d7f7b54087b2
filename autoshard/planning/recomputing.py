"""Activation checkpointing as a choice: how many of the repeated blocks are recomputed in the backward pass.

k blocks recomputed, k = 0 ... n, is k graphs, each planned with its own proof under the same memory limit. More blocks mean
more seconds and fewer bytes, but a tight limit also makes layouts more expensive. So `auto` tries no block, all blocks, and by bisection
the fewest that fit and the middle of what is left, with the solver `prices`, and plans the cheapest of them to within one
percent. The proof is that of the chosen k.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from autoshard.graph import checkpointed, forward_blocks
from autoshard.planning.context import Context
from autoshard.solution import Solution


def as_asked(context: Context) -> Context:
    """The context with as many blocks recomputed as its options ask for: a number, or "all"."""
    options = context.options
    if not (options.recompute and options.training):
        recomputable = context.graph if options.training else None
        return replace(context, options=replace(options, recompute=0), recomputable=recomputable)
    num_blocks = len(forward_blocks(context.graph))
    k = num_blocks if options.recompute == "all" else int(options.recompute)
    if k > num_blocks:
        raise ValueError(f"recompute is {k}, but the model repeats {num_blocks} blocks; expected {num_blocks} at most, or 'all'")
    recomputed = with_blocks_recomputed(context, k, num_blocks)
    return replace(recomputed, recomputable=context.graph if k < num_blocks else None)


def with_blocks_recomputed(context: Context, k: int, num_blocks: int) -> Context:
    """The context with the first k of `num_blocks` blocks recomputed. Its shallow graph stays where none or all of them are."""
    shallow = context.shallow if k in (0, num_blocks) else None
    if shallow is not None and k == num_blocks:
        shallow = checkpointed(shallow, len(forward_blocks(shallow)))
    return replace(context, graph=checkpointed(context.graph, k), options=replace(context.options, recompute=k), shallow=shallow)


def cheapest(num_blocks: int, planned: Callable[[int], Solution | None]) -> int | None:
    """The k of the cheapest plan among those tried, the least of several; None where not even recomputing every block fits.

    planned(k) is the plan with k blocks recomputed, None where it does not fit.
    """
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
