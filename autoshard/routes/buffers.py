"""The bytes that a route allocates on a rank while it runs, in addition to the tensor that it starts from.

    need(u -> v)  = in_u where the step is not the first  +  out_v  +  temporary      bytes on a rank
    temporary     out_v   all_gather along a dim other than 0, and all_to_all: the shards arrive concatenated and are then reordered
                  in_u    reduce_scatter along a dim other than 0: the shards are concatenated before they are sent
    table         = the largest need of the steps of the cheapest route; 0 between equal layouts        (`buffer_table`)

`lower` allocates these bytes, step by step. The tensor that the route starts from is alive throughout and is not counted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from autoshard.layout import Layout
from autoshard.routes.shortest import BLOCK, TIE, Routes, _Space
from autoshard.routes.steps import STEPS


def buffer_table(routes: Routes, shape: tuple[int, ...], itemsize: int, sources: Sequence[Layout], targets: Sequence[Layout]) -> np.ndarray:
    """Bytes from each source (row) to each target (column); 0 where there is no route."""
    from_states, _ = routes._encode(sources, len(shape))
    to_states, _ = routes._encode(targets, len(shape))
    space = routes._space(shape, itemsize)
    missing = sorted(set(from_states) - space.needs.keys())
    block = max(1, BLOCK // max(1, len(space.seconds)))
    for start in range(0, len(missing), block):
        some = missing[start : start + block]
        space.needs.update(zip(some, np.ascontiguousarray(_needed(space, some).T)))
    return np.array([space.needs[s] for s in from_states]).reshape(len(sources), len(space.local_bytes))[:, to_states]


def _needed(space: _Space, sources: list[int]) -> np.ndarray:
    """The largest need on the cheapest route from each source (column) to every state (row); the routes are those of `shortest._costs`."""
    moves, local, w = space.moves, space.local_bytes, space.seconds[:, None]
    heads, first = moves.heads
    c = np.full((len(local), len(sources)), math.inf)
    c[sources, range(len(sources))] = 0.0
    needed = np.zeros_like(c)
    if not len(heads):
        return needed
    arrives, held = (local[moves.after] + _temporary(space))[:, None], local[moves.before][:, None]
    is_first = moves.before[:, None] == np.array(sources)
    step = np.where(is_first, arrives, arrives + held)
    number, segment = np.arange(len(moves.before))[:, None], np.repeat(np.arange(len(heads)), np.diff([*first, len(moves.before)]))
    while True:
        tried = c[moves.before] + w
        new = np.minimum.reduceat(tried, first, axis=0)
        better = new < c[heads] * (1 - TIE)
        if not better.any():
            return needed
        move = np.minimum.reduceat(np.where(tried == new[segment], number, len(number)), first, axis=0)
        move = np.minimum(move, len(number) - 1)
        columns = np.arange(len(sources))
        through = np.maximum(needed[moves.before[move], columns], step[move, columns])
        needed, c = needed.copy(), c.copy()
        needed[heads] = np.where(better, through, needed[heads])
        c[heads] = np.where(better, new, c[heads])


def _temporary(space: _Space) -> np.ndarray:
    """The temporary bytes of each move."""
    moves = space.moves
    before, after = (moves.codes[states, moves.axis] for states in (moves.before, moves.after))
    input_bytes, output_bytes = space.local_bytes[moves.before], space.local_bytes[moves.after]
    by_step = {
        "all_gather": np.where(before != 0, output_bytes, 0.0),
        "all_to_all": output_bytes,
        "reduce_scatter": np.where(after != 0, input_bytes, 0.0),
    }
    temporary = np.zeros(len(moves.before))
    for name, amounts in by_step.items():
        temporary = np.where(moves.step == STEPS.index(name), amounts, temporary)
    return temporary
