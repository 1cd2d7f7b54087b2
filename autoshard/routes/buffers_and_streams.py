"""What is added up along the cheapest routes: the bytes that they allocate on a rank, and their seconds by stream.

    need(u -> v)  = in_u where the step is not the first  +  out_v  +  temporary      bytes on a rank, besides the tensor at the start
    temporary     out_v   all_gather along a dim other than 0, and all_to_all: the shards arrive concatenated and are then reordered
                  in_u    reduce_scatter along a dim other than 0: the shards are concatenated before they are sent
    buffer        = the largest need of the steps of the cheapest route; 0 between equal layouts                  (`buffer_table`)
    part_s(u -> v) = sum over the steps of the cheapest route that are on stream s of the seconds of the step      (`stream_table`)

`lower` allocates these bytes, step by step. Stream 0 is the compute stream, mesh axis k has stream k + 1: a collective is on that of its
axis, and so is a split after one. Added over the streams the parts are the table of `Routes.table`.
"""

from collections.abc import Sequence

import numpy as np

from autoshard.cost import least_joined_seconds
from autoshard.layout import Layout
from autoshard.mesh import Mesh
from autoshard.routes.shortest import Routes, _buffer, _Space, attaining_moves
from autoshard.routes.steps import STEPS


def buffer_table(routes: Routes, shape: tuple[int, ...], itemsize: int, sources: Sequence[Layout], targets: Sequence[Layout]) -> np.ndarray:
    """Bytes from each source (row) to each target (column); 0 where there is no route."""
    (from_states, _), (to_states, _) = (routes._encode(layouts, len(shape)) for layouts in (sources, targets))
    space = routes._space(shape, itemsize)
    return space.table(space.needs, lambda some: _needed(space, some).T, from_states, to_states)


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


def stream_table(
    routes: Routes, shape: tuple[int, ...], itemsize: int, sources: Sequence[Layout], targets: Sequence[Layout], *, joined: bool = False
) -> np.ndarray:
    """Seconds from each source to each target by stream: an array (sources, targets, 1 + mesh axes); 0 where there is no route.

    joined: of each step the least that it adds to a bucket of joined collectives, instead of its seconds.
    """
    (from_states, _), (to_states, _) = (routes._encode(layouts, len(shape)) for layouts in (sources, targets))
    space, mesh = routes._space(shape, itemsize), routes.mesh
    parts = lambda some: np.moveaxis(_parts(space, some, mesh, joined), 1, 0)  # noqa: E731
    return space.table({}, parts, from_states, to_states, 1 + len(mesh.axes))


def _parts(space: _Space, sources: list[int], mesh: Mesh, joined: bool) -> np.ndarray:
    """Seconds by stream of the cheapest route to every state from each source: (states, sources, streams)."""
    moves, step = space.moves, _steps(space, mesh, joined)
    parts = np.zeros((len(space.local_bytes), len(sources), 1 + len(mesh.axes)))
    is_split = moves.step == STEPS.index("split")
    sent = np.zeros(parts.shape[:2], bool)  # whether the route has a collective
    for states, columns, move in attaining_moves(space, sources):
        before, more = (moves.before[move], columns), step[move]
        late = np.flatnonzero(sent[before] & is_split[move])
        more[late, moves.axis[move[late]] + 1], more[late, 0] = more[late, 0], 0.0
        parts[states, columns], sent[states, columns] = parts[before] + more, sent[before] | ~is_split[move]
    return parts


def _steps(space: _Space, mesh: Mesh, joined: bool) -> np.ndarray:
    """Seconds of each move on its stream: (moves, streams)."""
    moves, local, seconds = space.moves, space.local_bytes, space.seconds
    steps = np.zeros((len(seconds), 1 + len(mesh.axes)))
    for collective, k, members in moves.groups:
        stream = 0 if collective == "split" else k + 1
        steps[members, stream] = seconds[members]
        if joined and stream:
            sizes = _buffer(collective, mesh.shape[k], local[moves.before[members]], local[moves.after[members]], space.padded)
            least = least_joined_seconds(collective, mesh.axes[k], sizes)
            steps[members, stream] = np.minimum(seconds[members], least)
    return steps
