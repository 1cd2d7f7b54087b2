"""Head-tail order of a sequence, in which equal shards have equal shares of the work of causal attention.

With n parts, a sequence is 2 n chunks. Part r holds chunk r and chunk 2 n - 1 - r:

    n = 2, chunks of the natural order 0 1 2 3       in head-tail order 0 3 | 1 2

A query of position t attends to t + 1 keys, so the chunks r and 2 n - 1 - r together have the same number of scores for every r.
`head_tail` = 0 is the natural order.
"""

from __future__ import annotations

Runs = tuple[tuple[int, int], ...]  # (first position, how many) of tokens that are stored one after the other


def stored_runs(size: int, head_tail: int, start: int = 0, stop: int | None = None) -> Runs:
    """The positions of the tokens that are stored at [start, stop) of a sequence of `size` tokens in this order, adjacent runs joined.

    ValueError where the parts don't divide the sequence.
    """
    stop = size if stop is None else stop
    if not head_tail:
        return ((start, stop - start),) if stop > start else ()
    if size % (2 * head_tail):
        raise ValueError(f"a sequence of {size} tokens has no head-tail order of {head_tail} parts; expected a multiple of {2 * head_tail}")
    chunk = size // (2 * head_tail)
    runs: list[tuple[int, int]] = []
    for k in range(start // chunk, -(-stop // chunk)):
        part, is_tail = divmod(k, 2)
        first = (2 * head_tail - 1 - part if is_tail else part) * chunk
        lo, hi = max(start, k * chunk) - k * chunk, min(stop, (k + 1) * chunk) - k * chunk
        runs.append((first + lo, hi - lo))
    return joined(runs)


def joined(runs: list[tuple[int, int]]) -> Runs:
    """Runs that continue the run before them are joined with it."""
    out: list[tuple[int, int]] = []
    for first, count in runs:
        if out and sum(out[-1]) == first:
            out[-1] = (out[-1][0], out[-1][1] + count)
        elif count:
            out.append((first, count))
    return tuple(out)
