"""Routes against ranks that hold numpy arrays: what a step does is defined here; which steps exist is found by doing them."""

import functools
import heapq
import itertools
import math
import operator
from functools import cache

import numpy as np
import pytest

from autoshard.layout import P, R, S, is_legal, local_numel, placement_text
from autoshard.mesh import Mesh
from autoshard.routes import Routes, buffer_table, stream_table
from autoshard.routes.steps import STEPS, all_moves, decode

REDUCE = {"sum": np.add.reduce, "avg": lambda parts: np.add.reduce(parts) / len(parts), "max": np.maximum.reduce, "min": np.minimum.reduce}
CASES = [
    *(((2,), shape) for shape in [(), (4,), (3, 4), (2, 3, 4)]),
    *(((2, 2), shape) for shape in [(), (8,), (4, 8), (4, 3, 4), (2, 2, 2, 2, 3)]),
    *(((2, 3), shape) for shape in [(), (6,), (12, 6), (6, 4, 3)]),
    *(((1, 2), shape) for shape in [(), (4, 6)]),
    *(((2, 2, 2), shape) for shape in [(), (8,), (8, 4)]),
]


def seconds_table(shape, itemsize, sources, targets, mesh):
    return Routes(mesh).table(shape, itemsize, sources, targets)


def route(shape, itemsize, source, target, mesh):
    return Routes(mesh).route(shape, itemsize, source, target)


def mesh_of(sizes, intra=300e9, inter=40e9):
    return Mesh.from_bandwidths(sizes, intra_node_bandwidth=intra, inter_node_bandwidth=inter)


def placements_of(ndim, axis, reduce_op="sum"):
    return [*(S(d) for d in range(ndim)), R, P(reduce_op)] if axis.size > 1 else [R]


@cache
def layouts_of(shape, mesh, reduce_op="sum"):
    """Every legal layout, P included; axes of size 1 are R."""
    crossed = itertools.product(*(placements_of(len(shape), axis, reduce_op) for axis in mesh.axes))
    return tuple(layout for layout in crossed if is_legal(shape, layout, mesh))


def changed(layout, k, placement):
    return layout[:k] + (placement,) + layout[k + 1 :]


# ---- the reference: who holds what, and what a collective does to it


@cache
def summands(shape, mesh):
    """What each rank contributes where the tensor is P: all numbers different, sums exact."""
    random = np.random.default_rng(0)
    return {c: random.permutation(math.prod(shape)).reshape(shape) * 64.0 + rank for rank, c in enumerate(mesh.coordinates())}


@cache
def held(shape, mesh, layout, was_partial, reduce_op="sum"):
    """Every rank's part of a tensor that was P on the axes `was_partial`, and has been reduced over those that are P no more."""
    parts = {}
    for c in mesh.coordinates():
        origins = [  # ranks whose contributions this value contains; the coordinate on an axis that never was P does not matter
            range(n) if k in was_partial and layout[k] != P(reduce_op) else [c[k] if k in was_partial else 0]
            for k, n in enumerate(mesh.shape)
        ]
        contributed = [summands(shape, mesh)[o] for o in itertools.product(*origins)]
        value = REDUCE[reduce_op](contributed) if len(contributed) > 1 else contributed[0]
        for d in range(len(shape)):
            for k, n in enumerate(mesh.shape):  # axis after axis
                value = chunks(value, n, d)[c[k]] if layout[k] == S(d) else value
        parts[c] = value
    return parts


def chunks(value, n, dim):
    """n parts as torch.chunk makes them, empty ones included."""
    size = value.shape[dim]
    return np.split(value, [min(size, (i + 1) * -(-size // n)) for i in range(n - 1)], axis=dim)


def partial_axes(layout):
    return tuple(k for k, placement in enumerate(layout) if placement_text(placement).startswith("P"))


def collective_between(before, after):
    kinds = {"SR": "all_gather", "RS": "split", "SS": "all_to_all", "PR": "all_reduce", "PS": "reduce_scatter"}
    return kinds.get(placement_text(before)[0] + placement_text(after)[0])


def execute(collective, k, before, after, parts, reduce_op="sum"):
    """Each group of ranks that differ on axis k only, in order of their coordinate there, does one collective."""
    out = {}
    for c in parts:
        group = [parts[o] for o in sorted(parts) if changed(o, k, 0) == changed(c, k, 0)]
        n, me = len(group), c[k]
        if collective == "all_gather":
            out[c] = np.concatenate(group, axis=before[k].dim)
        elif collective == "split":
            out[c] = chunks(parts[c], n, after[k].dim)[me]
        elif collective == "all_to_all":
            out[c] = np.concatenate([chunks(part, n, after[k].dim)[me] for part in group], axis=before[k].dim)
        elif collective == "all_reduce":
            out[c] = REDUCE[reduce_op](group)
        else:
            assert collective == "reduce_scatter"
            out[c] = chunks(REDUCE[reduce_op](group), n, after[k].dim)[me]
    return out


def same(a, b):
    return all(a[c].shape == b[c].shape and np.allclose(a[c], b[c], rtol=1e-12, atol=0) for c in a)


@cache
def true_steps(shape, mesh):
    """{before: [(collective, axis, after)]}: the one-axis steps after which every rank holds exactly its part of `after`."""
    found = {layout: [] for layout in layouts_of(shape, mesh)}
    for before, k in itertools.product(found, range(len(mesh.axes))):
        parts = held(shape, mesh, before, partial_axes(before))
        for placement in placements_of(len(shape), mesh.axes[k]):
            after, collective = changed(before, k, placement), collective_between(before[k], placement)
            if collective is None or after == before or after not in found:
                continue
            if same(execute(collective, k, before, after, parts), held(shape, mesh, after, partial_axes(before))):
                found[before].append((collective, k, after))
    return found


def step_price(collective, axis, given, taken, device):
    """Prices spelled out once more, from the bytes that the fullest rank has before and after; parts are filled up to equal size."""
    n, hops = axis.size, math.ceil(math.log2(axis.size))
    given, taken = {"all_gather": (given, n * given), "reduce_scatter": (max(given, n * taken), taken)}.get(collective, (given, taken))
    given = max(given, taken) if collective == "all_to_all" else given
    seconds_per_byte = axis.shared_by / axis.bandwidth
    return {
        "split": taken / device.memory_bandwidth,
        "all_gather": hops * axis.latency + (n - 1) / n * taken * seconds_per_byte,
        "reduce_scatter": hops * axis.latency + (n - 1) / n * given * seconds_per_byte,
        "all_to_all": hops * axis.latency + (n - 1) / n * given * seconds_per_byte,
        "all_reduce": 2 * hops * axis.latency + 2 * (n - 1) / n * given * seconds_per_byte,
    }[collective]


def dijkstra(shape, itemsize, mesh, source):
    cost, done, queue = {source: 0.0}, set(), [(0.0, 0, source)]
    ticket = itertools.count(1)
    while queue:
        seconds, _, layout = heapq.heappop(queue)
        if layout in done:
            continue
        done.add(layout)
        for collective, k, after in true_steps(shape, mesh)[layout]:
            given, taken = (local_numel(shape, x, mesh) * itemsize for x in (layout, after))
            reached = seconds + step_price(collective, mesh.axes[k], given, taken, mesh.device)
            if reached < cost.get(after, math.inf):
                cost[after] = reached
                heapq.heappush(queue, (reached, next(ticket), after))
    return cost


# ---- moves, routes, tables


@pytest.mark.parametrize("sizes, shape", CASES)
def test_moves_are_exactly_the_steps_that_work(sizes, shape):
    mesh = mesh_of(sizes)
    moves = all_moves(len(shape), mesh)
    layouts = [decode(codes, len(shape), "sum") for codes in moves.codes]
    ours = sorted(
        (STEPS[s], int(k), layouts.index(layouts[u]), layouts.index(layouts[v]))
        for s, k, u, v in zip(moves.step, moves.axis, moves.before, moves.after)
        if is_legal(shape, layouts[u], mesh) and is_legal(shape, layouts[v], mesh)
    )
    steps = true_steps(shape, mesh)
    assert ours == sorted((name, k, layouts.index(u), layouts.index(v)) for u in steps for name, k, v in steps[u])


OTHER_OPS = [(sizes, shape, op) for sizes, shape in (((2, 3), (6, 6)), ((2, 2, 2), (8,))) for op in ("avg", "max", "min")]


@pytest.mark.parametrize("sizes, shape, reduce_op", [*((*case, "sum") for case in CASES), *OTHER_OPS])
def test_every_route_ends_with_the_targets_parts_on_every_rank(sizes, shape, reduce_op):
    mesh = mesh_of(sizes)
    routes, layouts = Routes(mesh), layouts_of(shape, mesh, reduce_op)
    for source, target in itertools.product(layouts, layouts):
        layout, was_partial = source, partial_axes(source)
        found = routes.route(shape, 4, source, target)
        assert (found is None) == (not set(partial_axes(target)) <= set(was_partial))  # only a new P is out of reach
        if found is None:
            continue
        parts = held(shape, mesh, source, was_partial, reduce_op)
        for step in found.steps:
            assert step.before == layout and is_legal(shape, step.after, mesh)
            assert step.after == changed(layout, step.axis, step.after[step.axis])  # one axis at a time
            parts = execute(step.collective, step.axis, step.before, step.after, parts, reduce_op)
            layout = step.after
        assert layout == target
        assert same(parts, held(shape, mesh, target, was_partial, reduce_op))


@pytest.mark.parametrize("sizes, shape", CASES)
@pytest.mark.parametrize("itemsize", [2, 1 << 24])  # bound by latency; bound by bandwidth
@pytest.mark.parametrize("fast_axis", ["last", "first"])
def test_table_is_what_dijkstra_finds(sizes, shape, itemsize, fast_axis):
    mesh = mesh_of(sizes) if fast_axis == "last" else mesh_of(sizes, intra=1e9, inter=900e9)
    layouts = layouts_of(shape, mesh)
    reference = [dijkstra(shape, itemsize, mesh, source) for source in layouts]
    expected = np.array([[cost.get(target, math.inf) for target in layouts] for cost in reference])
    np.testing.assert_allclose(Routes(mesh).table(shape, itemsize, layouts, layouts), expected, rtol=1e-11, atol=0)


@pytest.mark.parametrize("sizes, shape", [*CASES, ((2, 4), (64, 32, 48)), ((4, 2, 3), (48, 24))])
def test_a_routes_steps_add_up_to_the_tables_entry(sizes, shape):
    mesh = mesh_of(sizes)
    layouts = layouts_of(shape, mesh)
    table = seconds_table(shape, 4, layouts, layouts, mesh)
    routes = Routes(mesh)
    for (i, source), (j, target) in itertools.product(enumerate(layouts), enumerate(layouts)):
        found = routes.route(shape, 4, source, target)
        if found is None:
            assert table[i, j] == math.inf
        else:
            added = functools.reduce(operator.add, (step.seconds for step in found.steps), 0.0)  # sum() compensates from Python 3.12 on
            assert found.seconds == table[i, j] == added  # to the last bit


def test_a_layout_that_leaves_a_rank_empty_has_the_bytes_of_its_largest_shard():
    assert Routes(mesh_of((4,))).route((3, 8), 4, (S(0),), (S(0),)).peak_bytes == 4 * 8  # three rows on four ranks


@pytest.mark.parametrize("sizes, shape", [((2, 3), (12, 6)), ((2, 2, 2), (8, 4))])
def test_steps_carry_the_bytes_that_are_sent_and_the_route_its_peak(sizes, shape):
    mesh = mesh_of(sizes)
    routes, layouts = Routes(mesh), layouts_of(shape, mesh)
    for source, target in itertools.product(layouts, layouts):
        found = routes.route(shape, 4, source, target)
        if found is None:
            continue
        buffers = [[4 * local_numel(shape, x, mesh) for x in (step.before, step.after)] for step in found.steps]
        assert found.peak_bytes == max(map(sum, buffers), default=4 * local_numel(shape, source, mesh))
        needed = [0.0]
        for step, (b, a) in zip(found.steps, buffers):  # bytes before, bytes after
            along = [x[step.axis].dim for x in (step.before, step.after) if x[step.axis].is_shard()]
            copied = {"all_gather": a * (along != [0]), "reduce_scatter": b * (along != [0]), "all_to_all": a}.get(step.collective, 0)
            needed.append((b if step.before != source else 0) + a + copied)
            others = mesh.axes[step.axis].size - 1
            part = b / (others + 1)
            sent = {"split": 0, "all_gather": b, "reduce_scatter": a, "all_to_all": part, "all_reduce": 2 * part}[step.collective]
            assert step.bytes == pytest.approx(sent * others, rel=1e-12)
            assert step.seconds == pytest.approx(step_price(step.collective, mesh.axes[step.axis], b, a, mesh.device), rel=1e-12)
        assert buffer_table(routes, shape, 4, [source], [target]) == max(needed)


@pytest.mark.parametrize("sizes, rows", [((2, 2), 4), ((2, 2, 2), 8)])
def test_fewest_steps_win_where_all_prices_are_equal(sizes, rows):
    mesh = mesh_of(sizes)
    routes, layouts = Routes(mesh), layouts_of((0, rows), mesh)
    steps = true_steps((rows, rows), mesh)  # the same states as with no rows at all
    for source in layouts:
        distance, reached = {source: 0}, [source]
        for layout in reached:  # breadth first
            for _, _, after in steps[layout]:
                if after not in distance:
                    distance[after] = distance[layout] + 1
                    reached.append(after)
        for target in reached:
            found = routes.route((0, rows), 4, source, target)
            assert found.seconds == 0  # zero bytes are free
            assert len(found.steps) == distance[target]


def test_a_route_is_the_same_whatever_was_asked_before():
    mesh, used = mesh_of((2, 2, 2)), Routes(mesh_of((2, 2, 2)))
    # as many bytes and as divisible; other bytes; as many bytes, not as divisible; other dims
    for shape, itemsize in [((8, 8), 4), ((16, 4), 4), ((8, 8), 2), ((64, 1), 4), ((2, 32), 4), ((256,), 1)]:
        layouts = layouts_of((8,) * len(shape), mesh)
        used.table(shape, itemsize, layouts[:9], layouts[5:])
        for source, target in itertools.product(layouts[::11], layouts[::7]):
            fresh = Routes(mesh)
            assert used.table(shape, itemsize, [source], layouts).tolist() == fresh.table(shape, itemsize, [source], layouts).tolist()
            assert used.route(shape, itemsize, source, target) == fresh.route(shape, itemsize, source, target)


@pytest.mark.parametrize(("sizes", "shape"), [case for case in CASES if len(case[1]) <= 2])
def test_seconds_by_stream_are_those_of_the_routes_steps(sizes, shape):
    """A slice after a collective waits on the stream of its axis; one before is the kernels'."""
    mesh, layouts = mesh_of(sizes), layouts_of(shape, mesh_of(sizes))
    routes = Routes(mesh)
    table = stream_table(routes, shape, 4, layouts, layouts)
    for (a, source), (b, target) in itertools.product(enumerate(layouts), repeat=2):
        expected, sent, found = np.zeros(1 + len(sizes)), False, routes.route(shape, 4, source, target)
        for step in found.steps if found else ():
            sent = sent or step.collective != "split"
            expected[step.axis + 1 if sent else 0] += step.seconds
        assert table[a, b] == pytest.approx(expected, rel=1e-9), (source, target)
