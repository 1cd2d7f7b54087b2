"""The bytes that a route allocates on a rank while it runs, in addition to the tensor that it starts from.

    need(u -> v)  = in_u where the step is not the first  +  out_v  +  temporary      bytes on a rank
    temporary     out_v   all_gather along a dim other than 0, and all_to_all: the shards arrive concatenated and are then reordered
                  in_u    reduce_scatter along a dim other than 0: the shards are concatenated before they are sent
    table         = the largest need of the steps of the cheapest route; 0 between equal layouts        (`buffer_table`)

`lower` allocates these bytes, step by step. The tensor that the route starts from is alive throughout and is not counted.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autoshard.layout import Layout
from autoshard.routes.shortest import Routes, _Space, attaining_moves
from autoshard.routes.steps import STEPS


def buffer_table(routes: Routes, shape: tuple[int, ...], itemsize: int, sources: Sequence[Layout], targets: Sequence[Layout]) -> np.ndarray:
    """Bytes from each source (row) to each target (column); 0 where there is no route."""
    from_states, _ = routes._encode(sources, len(shape))
    to_states, _ = routes._encode(targets, len(shape))
    space = routes._space(shape, itemsize)
    for some in space.blocks(set(from_states) - space.needs.keys()):
        space.needs.update(zip(some, np.ascontiguousarray(_needed(space, some).T)))
    return np.array([space.needs[s] for s in from_states]).reshape(len(sources), len(space.local_bytes))[:, to_states]


def _needed(space: _Space, sources: list[int]) -> np.ndarray:
    """The largest need on the cheapest route from each source (column) to every state (row)."""
    moves, local, source = space.moves, space.local_bytes, np.array(sources)
    needed = np.zeros((len(local), len(sources)))
    arrives, held = local[moves.after] + _temporary(space), local[moves.before]
    for states, columns, move in attaining_moves(space, sources):
        before = moves.before[move]
        step = arrives[move] + np.where(before == source[columns], 0.0, held[move])
        needed[states, columns] = np.maximum(needed[before, columns], step)
    return needed


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
