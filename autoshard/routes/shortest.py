"""The cheapest route between two layouts of a tensor, and a table of the cheapest seconds for many pairs of layouts.

    w(m)    = seconds of move m = (u -> v), from the bytes of the largest shard in u and in v; inf where a rank's shard would be
              empty in u or v                                                                   (`_move_seconds`)
    c_0(v)  = 0 where v is the source, else inf
    c_n(v)  = min( c_n-1(v),  min over moves m = (u -> v) of  c_n-1(u) + w(m) )                        (`_costs`)

c_n is the cheapest sum over at most n moves (Bellman-Ford, for all sources at once); the iteration stops when no c changes. A
longer route must be cheaper by more than TIE, so that among routes of equal cost the one with the fewest steps wins; among those the
order of steps.STEPS decides. `Routes.route` walks the c_n back along the moves that attain them, so the seconds of a route's steps,
added in order, equal the table's entry exactly.

A dim that its axes do not divide is sharded as by torch.chunk: parts of ceil(S / n), the last ones smaller or empty; where several
axes shard the dim, each splits the parts of the axes before it, left to right. A rank's bytes are then those of the largest shard, and
the buffer of an all_gather or a reduce_scatter is n such shards. No route has a layout with an empty shard.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, partial

import numpy as np

from autoshard.cost import bytes_sent, cost_of
from autoshard.layout import Layout, leaves_empty, local_numel
from autoshard.mesh import Mesh
from autoshard.routes.steps import STEPS, Moves, all_moves, decode, encode

TIE = 1e-12  # relative; rounding of sums of a few prices is below 1e-15
BLOCK = 65_536  # numbers in an array of `_costs`, which a cache holds


@dataclass(frozen=True)
class Step:
    """One collective on the process groups of one mesh axis, or a local slice (`split`)."""

    collective: str  # one of steps.STEPS
    axis: int  # index of the mesh axis
    before: Layout
    after: Layout
    seconds: float
    bytes: float  # that each rank sends; 0 for split


@dataclass(frozen=True)
class Route:
    """Steps in order. `peak_bytes`: the largest input + output of a step on one rank; the bytes of the tensor where no step is needed."""

    steps: tuple[Step, ...]
    seconds: float
    peak_bytes: int


@dataclass(frozen=True)
class _Space:
    """All states of a tensor with the seconds of the moves between them, and the rows of the all-pairs table that are computed so far."""

    moves: Moves
    local_bytes: np.ndarray  # (states,)
    seconds: np.ndarray  # (moves,)
    padded: bool = False  # shards may be uneven
    rows: dict[int, np.ndarray] = field(default_factory=dict)  # source -> (states,) seconds
    needs: dict[int, np.ndarray] = field(default_factory=dict)  # source -> (states,) bytes, of buffer_table
    searched: dict[int, list[np.ndarray]] = field(default_factory=dict)  # the source of the last route -> its c_0, c_1, ...

    @cached_property
    def into(self) -> tuple[np.ndarray, list[np.ndarray]]:
        """States that moves of finite seconds reach, most moves first; the first move into each, the second where there is one, ..."""
        finite = np.flatnonzero(np.isfinite(self.seconds))
        heads, first, count = np.unique(self.moves.after[finite], return_index=True, return_counts=True)
        order = np.argsort(-count, kind="stable")
        heads, first, count = heads[order], first[order], count[order]
        return heads, [finite[first[count > k] + k] for k in range(max(count, default=0))]

    def blocks(self, sources: Iterable[int], size: int = BLOCK) -> Iterator[list[int]]:
        """The distinct sources, in order, as many at once as arrays of a number per state and source have that size."""
        distinct, width = sorted(set(sources)), max(1, size // len(self.local_bytes))
        return (distinct[k : k + width] for k in range(0, len(distinct), width))

    def table(
        self, known: dict[int, np.ndarray], rows_of: Callable[[list[int]], np.ndarray], sources: list[int], targets: list[int], *rest: int
    ) -> np.ndarray:
        """The rows of these sources at these targets, each of shape `rest`. known: rows by source, to which those of rows_of are added."""
        for some in self.blocks(set(sources) - known.keys()):
            known.update(zip(some, np.ascontiguousarray(rows_of(some))))
        return np.array([known[s][targets] for s in sources]).reshape(len(sources), len(targets), *rest)


class Routes:
    """Cheapest routes on one mesh. The results are cached in the object: use one object for all tensors of a plan."""

    def __init__(self, mesh: Mesh):
        self.mesh = mesh
        self._moves: dict[int, Moves] = {}
        self._spaces: dict[tuple[int, int, bytes], _Space] = {}
        self._known: dict[tuple[tuple[int, ...], int], _Space] = {}
        self._state = cache(partial(encode, mesh=mesh))
        self._routes: dict[tuple[tuple[int, ...], int, Layout, Layout], Route | None] = {}
        num = len(mesh.axes)  # for every set of axes, as bits, their sizes
        self._axis_sizes = [tuple(n for k, n in enumerate(mesh.shape) if mask >> k & 1) for mask in range(1 << num)]

    def table(self, shape: tuple[int, ...], itemsize: int, sources: Sequence[Layout], targets: Sequence[Layout]) -> np.ndarray:
        """Seconds from each source (row) to each target (column): 0 between equals, inf where there is no route.

        No route leads to a P that the source does not have, to or from a layout with an empty shard, and to or from
        S or P on an axis of size 1. ValueError for a layout that no tensor with this number of dims can have on this mesh.
        """
        from_states, from_ops = self._encode(sources, len(shape))
        to_states, to_ops = self._encode(targets, len(shape))
        space = self._space(shape, itemsize)
        table = space.table(space.rows, lambda some: [*_costs(space, some)][-1].T, from_states, to_states)
        if sources and any(to_ops):  # states don't tell P(sum) from P(max)
            before, after = np.array(from_ops)[:, None], np.array(to_ops)[None, :]
            table[(after != "") & (before != after)] = math.inf
        return table

    def route(self, shape: tuple[int, ...], itemsize: int, source: Layout, target: Layout) -> Route | None:
        """The cheapest route, its seconds equal to the table's entry; None where that is inf."""
        key = (shape, itemsize, source, target)
        if key not in self._routes:
            self._routes[key] = self._cheapest(*key)
        return self._routes[key]

    def _cheapest(self, shape: tuple[int, ...], itemsize: int, source: Layout, target: Layout) -> Route | None:
        (s, t), (op, op_after) = self._encode((source, target), len(shape))
        space = self._space(shape, itemsize)
        if (costs := space.searched.get(s)) is None:
            costs = [c[:, 0] for c in _costs(space, [s])]
            space.searched.clear()
            space.searched[s] = costs
        if costs[-1][t] == math.inf or (op_after and op_after != op):
            return None
        path = _walk_back(space, costs, t)
        held = [space.local_bytes[space.moves.before[m]] + space.local_bytes[space.moves.after[m]] for m in path]
        steps = tuple(self._step(space, m, len(shape), op) for m in path)
        return Route(steps, float(costs[-1][t]), int(max(held, default=local_numel(shape, source, self.mesh) * itemsize)))

    def _step(self, space: _Space, m: int, ndim: int, reduce_op: str) -> Step:
        collective, k = STEPS[space.moves.step[m]], int(space.moves.axis[m])
        u, v = space.moves.before[m], space.moves.after[m]
        input_bytes, output_bytes = space.local_bytes[[u]], space.local_bytes[[v]]
        largest = float(_buffer(collective, self.mesh.shape[k], input_bytes, output_bytes, space.padded)[0])
        sent = 0.0 if collective == "split" else bytes_sent(collective, self.mesh.axes[k], largest)
        before, after = (decode(space.moves.codes[state], ndim, reduce_op) for state in (u, v))
        return Step(collective, k, before, after, float(space.seconds[m]), sent)

    def _encode(self, layouts: Sequence[Layout], ndim: int) -> tuple[list[int], list[str]]:
        pairs = [self._state(layout, ndim) for layout in layouts]
        return [state for state, _ in pairs], [op for _, op in pairs]

    def _space(self, shape: tuple[int, ...], itemsize: int) -> _Space:
        key = (shape, itemsize)
        if key not in self._known:
            self._known[key] = self._space_of(shape, itemsize)
        return self._known[key]

    def _space_of(self, shape: tuple[int, ...], itemsize: int) -> _Space:
        """The space of a tensor; tensors with equal numbers of dims and bytes that divide evenly in the same states share one space."""
        ndim, total_bytes = len(shape), math.prod(shape) * itemsize
        if ndim not in self._moves:
            self._moves[ndim] = all_moves(ndim, self.mesh)
        moves = self._moves[ndim]
        divides = (np.array(shape, dtype=int) % moves.num_parts == 0).all(axis=1)
        if not divides.all():
            possible = self._possible(shape, moves)
            if (possible != divides).any():
                return self._uneven_space(shape, itemsize, moves, possible)
        key = (ndim, total_bytes, divides.tobytes())
        if key not in self._spaces:
            local_bytes = total_bytes / moves.num_parts.prod(axis=1)
            self._spaces[key] = _Space(moves, local_bytes, _move_seconds(self.mesh, moves, divides, local_bytes))
        return self._spaces[key]

    def _possible(self, shape: tuple[int, ...], moves: Moves) -> np.ndarray:
        """Whether a state leaves no rank with an empty shard."""
        possible = np.ones(len(moves.codes), dtype=bool)
        bits = 1 << np.arange(len(self.mesh.axes))
        for d, size in enumerate(shape):
            empty = np.array([size > 0 and leaves_empty(size, sizes) for sizes in self._axis_sizes])
            possible &= ~empty[(moves.codes == d) @ bits]
        return possible

    def _uneven_space(self, shape: tuple[int, ...], itemsize: int, moves: Moves, possible: np.ndarray) -> _Space:
        """The space of one shape with every possible state, priced on the largest shards."""
        key = (len(shape), itemsize, np.array(shape, dtype=int).tobytes())
        if key not in self._spaces:
            parts = np.broadcast_to(np.array(shape, dtype=int), moves.num_parts.shape).copy()
            for k, n in enumerate(self.mesh.shape):  # left to right
                for d in range(len(shape)):
                    is_sharded = moves.codes[:, k] == d
                    parts[is_sharded, d] = -(-parts[is_sharded, d] // n)
            local_bytes = parts.prod(axis=1) * float(itemsize)
            self._spaces[key] = _Space(moves, local_bytes, _move_seconds(self.mesh, moves, possible, local_bytes, padded=True), True)
        return self._spaces[key]


def _move_seconds(mesh: Mesh, moves: Moves, divides: np.ndarray, local_bytes: np.ndarray, padded: bool = False) -> np.ndarray:
    """w: a collective costs the seconds of its largest buffer, padded to equal shards; a split costs the write of its output to memory."""
    w, model = np.full(len(moves.before), math.inf), cost_of(mesh)
    for collective, k, members in moves.groups:
        input_bytes, output_bytes = local_bytes[moves.before[members]], local_bytes[moves.after[members]]
        if collective == "split":
            w[members] = model.memory("split", output_bytes, mesh.device)
        else:
            largest = _buffer(collective, mesh.shape[k], input_bytes, output_bytes, padded)
            w[members] = model.collective(collective, mesh.axes[k], largest)
    w[~(divides[moves.before] & divides[moves.after])] = math.inf
    return w


def _buffer(collective: str, n: int, input_bytes: np.ndarray, output_bytes: np.ndarray, padded: bool) -> np.ndarray:
    if padded and collective == "all_gather":
        return n * input_bytes
    if padded and collective == "reduce_scatter":
        return np.maximum(input_bytes, n * output_bytes)
    return np.maximum(input_bytes, output_bytes)


def _costs(space: _Space, sources: list[int]) -> Iterator[np.ndarray]:
    """c_0, c_1, ... until no entry changes: arrays (states, sources)."""
    before, w = space.moves.before, space.seconds
    heads, into = space.into
    c = np.full((len(space.local_bytes), len(sources)), math.inf)
    c[sources, range(len(sources))] = 0.0
    yield c
    while len(heads):
        new = np.full((len(heads), len(sources)), math.inf)
        for some in into:
            tried = c[before[some]]
            tried += w[some][:, None]
            np.minimum(new[: len(some)], tried, out=new[: len(some)])
        old = c[heads]
        better = new < old * (1 - TIE)
        if not better.any():
            return
        c = c.copy()
        c[heads] = np.where(better, new, old)
        yield c


def attaining_moves(space: _Space, sources: list[int]) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Per iteration of `_costs`: the states that a longer route reaches more cheaply, the index of its source, and its last move.

    The last costs are kept, so that a table of the same sources needs no second search.
    """
    before, w, (heads, into) = space.moves.before, space.seconds, space.into
    cheaper = None
    for c, cheaper in itertools.pairwise(_costs(space, sources)):
        at, column = np.nonzero(cheaper[heads] < c[heads])
        attained, move = cheaper[heads[at], column], np.zeros(len(at), dtype=int)
        for some in into[::-1]:  # the first of several moves is the one that stays
            have = np.searchsorted(at, len(some))
            tried = some[at[:have]]
            move[:have] = np.where(c[before[tried], column[:have]] + w[tried] == attained[:have], tried, move[:have])
        yield heads[at], column, move
    if cheaper is not None:
        space.rows.update(zip(sources, np.ascontiguousarray(cheaper.T)))


def _walk_back(space: _Space, costs: list[np.ndarray], target: int) -> list[int]:
    """The moves that attain costs[-1][target], first to last, for costs of one source."""
    path: list[int] = []
    v = target
    for earlier, c in zip(costs[-2::-1], costs[:0:-1]):
        if c[v] < earlier[v]:  # else a shorter route attains it
            into = np.flatnonzero(space.moves.after == v)
            attains = earlier[space.moves.before[into]] + space.seconds[into] == c[v]
            path.append(int(into[attains.argmax()]))
            v = space.moves.before[path[-1]]
    return path[::-1]
