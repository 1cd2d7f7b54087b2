"""The seconds of cheapest routes by stream: each collective on that of its mesh axis, and so a split after one; else on the compute stream.

    part_s(u -> v) = sum over the steps of the cheapest route that are on stream s of the seconds of the step      (`stream_table`)

Stream 0 is the compute stream, mesh axis k has stream k + 1. Added over the streams the parts are the table of `Routes.table`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autoshard.cost import least_joined_seconds
from autoshard.layout import Layout
from autoshard.mesh import Mesh
from autoshard.routes.shortest import Routes, _buffer, _Space, attaining_moves


def stream_table(
    routes: Routes, shape: tuple[int, ...], itemsize: int, sources: Sequence[Layout], targets: Sequence[Layout], *, joined: bool = False
) -> np.ndarray:
    """Seconds from each source to each target by stream: an array (sources, targets, 1 + mesh axes); 0 where there is no route.

    joined: of each step the least that it adds to a bucket of joined collectives, instead of its seconds.
    """
    from_states, _ = routes._encode(sources, len(shape))
    to_states, _ = routes._encode(targets, len(shape))
    space, num = routes._space(shape, itemsize), 1 + len(routes.mesh.axes)
    parts: dict[int, np.ndarray] = {}
    for some in space.blocks(from_states):
        parts.update(zip(some, np.moveaxis(_parts(space, some, routes.mesh, joined), 1, 0)))
    return np.array([parts[s][to_states] for s in from_states]).reshape(len(sources), len(targets), num)


def _parts(space: _Space, sources: list[int], mesh: Mesh, joined: bool) -> np.ndarray:
    """Seconds by stream of the cheapest route to every state from each source: (states, sources, streams)."""
    moves, step = space.moves, _steps(space, mesh, joined)
    parts = np.zeros((len(space.local_bytes), len(sources), 1 + len(mesh.axes)))
    axis = np.full(len(step), -1)  # of a split
    for collective, k, members in moves.groups:
        axis[members] = k if collective == "split" else -1
    sent = np.zeros(parts.shape[:2], bool)  # whether the route has a collective
    for states, columns, move in attaining_moves(space, sources):
        before, more = (moves.before[move], columns), step[move]
        late = np.flatnonzero(sent[before] & (axis[move] >= 0))
        more[late, axis[move[late]] + 1], more[late, 0] = more[late, 0], 0.0
        parts[states, columns], sent[states, columns] = parts[before] + more, sent[before] | (axis[move] < 0)
    return parts


def _steps(space: _Space, mesh: Mesh, joined: bool) -> np.ndarray:
    """Seconds of each move on its stream: (moves, streams). Moves that no route has count nothing."""
    moves, local = space.moves, space.local_bytes
    seconds = np.where(np.isfinite(space.seconds), space.seconds, 0.0)
    steps = np.zeros((len(seconds), 1 + len(mesh.axes)))
    for collective, k, members in moves.groups:
        stream = 0 if collective == "split" else k + 1
        steps[members, stream] = seconds[members]
        if joined and stream:
            sizes = _buffer(collective, mesh.shape[k], local[moves.before[members]], local[moves.after[members]], space.padded)
            least = least_joined_seconds(collective, mesh.axes[k], sizes)
            steps[members, stream] = np.minimum(seconds[members], least)
    return steps
