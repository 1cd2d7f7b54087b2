"""Routes that are known by heart, what has no route, and laws that every table of prices obeys."""


import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.layout import P, R, S, parse
from autoshard.mesh import Mesh
from autoshard.routes import Route
from tests.test_routes import layouts_of, mesh_of, route, seconds_table

# ---- known routes


def steps_of(found):
    return [(step.collective, step.axis) for step in found.steps]


KNOWN = {  # size of both dims, bytes per second between nodes, source, target, the steps
    "a doubly sharded dim is gathered from the right": (64, 40e9, "S(0),S(0)", "R,R", "all_gather 1, all_gather 0"),
    "the right axis is sharded locally": (64, 40e9, "S(0),R", "S(0),S(0)", "split 1"),
    "a partial axis is scattered on its own": (64, 40e9, "P,S(0)", "S(1),S(0)", "reduce_scatter 0"),
    "and stays partial while another moves": (64, 40e9, "P,S(0)", "P,S(1)", "all_to_all 1"),
    "a large reduction crosses the slow axis with a part": (1 << 14, 4e9, "P,P", "R,R", "reduce_scatter 1, all_reduce 0, all_gather 1"),
}


@pytest.mark.parametrize("size, inter, source, target, steps", KNOWN.values(), ids=KNOWN)
def test_known_routes(size, inter, source, target, steps):
    found = route((size, size), 4, parse(source), parse(target), mesh_of((2, 4), inter=inter))
    assert ", ".join(f"{collective} {axis}" for collective, axis in steps_of(found)) == steps


def test_partial_axes_of_a_dim_that_divides_into_nothing_are_reduced_one_by_one():
    found = route((3,), 4, (P(), P()), (R, R), mesh_of((2, 4)))
    assert sorted(steps_of(found)) == [("all_reduce", 0), ("all_reduce", 1)]


@pytest.mark.parametrize("itemsize", range(1, 30))
def test_rounding_does_not_lengthen_a_route(itemsize):
    # an all_reduce costs a reduce_scatter and an all_gather; added to the split's seconds, their sum may round lower
    mesh = Mesh.from_bandwidths((3, 2), intra_node_latency=0.0)
    assert steps_of(route((12,), itemsize, (R, P()), (S(0), R), mesh)) == [("split", 0), ("all_reduce", 1)]


def test_equal_layouts_need_nothing():
    layout = (S(0), R)
    assert route((8, 8), 4, layout, layout, mesh_of((2, 4))) == Route((), 0.0, 8 * 8 * 4 // 2)


# ---- what has no route


def reachable(table):
    """A row per source: x where a target has a route."""
    return ["".join("x" if possible else "." for possible in row) for row in np.isfinite(table)]


def test_what_does_not_divide_is_no_state():
    mesh, layouts = mesh_of((2, 4)), [(S(0), R), (R, S(0)), (S(0), S(0)), (R, R)]
    table = seconds_table((6,), 4, layouts, layouts, mesh)
    assert reachable(table) == ["x..x", ".x..", "..x.", "x..x"]
    assert route((6,), 4, (R, R), (R, S(0)), mesh) is None


def test_partial_never_appears_and_never_changes_its_kind():
    mesh = mesh_of((2, 2))
    layouts = [(R, R), (P(), R), (P("max"), R), (P(), P())]
    table = seconds_table((4,), 4, layouts, layouts, mesh)
    assert reachable(table) == ["x...", "xx..", "x.x.", "xx.x"]
    assert route((4,), 4, (P("max"), R), (P(), R), mesh) is None


def test_an_axis_of_size_1_is_replicated():
    mesh = mesh_of((1, 4))
    assert route((8,), 4, (R, S(0)), (S(0), S(0)), mesh) is None
    assert route((8,), 4, (R, P()), (R, S(0)), mesh).seconds > 0
    alone = mesh_of((1,))
    assert seconds_table((8,), 4, [(R,)], [(R,)], alone).tolist() == [[0.0]]


@pytest.mark.parametrize("layout", [(R,), (S(2), R), (P(), P("max"))])
def test_what_is_no_layout_of_the_tensor_is_said(layout):
    with pytest.raises(ValueError, match="does not describe a tensor of 2 dims on a mesh of 2 axes; expected R, S"):
        route((8, 8), 4, layout, (R, R), mesh_of((2, 2)))


def test_tables_of_nothing_are_empty():
    mesh = mesh_of((2, 2))
    assert seconds_table((8,), 4, [], [(R, P())], mesh).shape == (0, 1)
    assert seconds_table((8,), 4, [(R, R)], [], mesh).shape == (1, 0)


# ---- laws

SMALL = st.sampled_from([((2, 2), (8, 4)), ((2, 3), (12, 6, 6)), ((2, 2, 2), (8, 16)), ((4,), (4, 8, 3))])
BANDWIDTH = st.floats(1e8, 1e12)


@given(SMALL, st.integers(1, 1 << 30), BANDWIDTH, BANDWIDTH)
def test_no_detour_is_cheaper(case, itemsize, intra, inter):
    sizes, shape = case
    mesh = mesh_of(sizes, intra, inter)
    layouts = layouts_of(shape, mesh)
    table = seconds_table(shape, itemsize, layouts, layouts, mesh)
    through = (table[:, :, None] + table[None, :, :]).min(axis=1)
    assert (table <= through * (1 + 1e-11)).all()
    assert (np.diag(table) == 0).all() and (table >= 0).all()


@given(SMALL, st.integers(1, 1 << 30), st.integers(1, 1 << 30), BANDWIDTH, BANDWIDTH)
def test_more_bytes_never_cost_less(case, fewer, more, intra, inter):
    sizes, shape = case
    mesh = mesh_of(sizes, intra, inter)
    layouts = layouts_of(shape, mesh)
    small, large = (seconds_table(shape, itemsize, layouts, layouts, mesh) for itemsize in sorted((fewer, more)))
    assert (small <= large * (1 + 1e-11)).all()


@given(st.integers(1, 1 << 24), BANDWIDTH, BANDWIDTH)
def test_swapping_the_axes_swaps_the_prices(itemsize, one, other):
    mesh, shape = mesh_of((2, 2), one, other), (2, 2, 2)  # no dim is cut twice, so no axis is left or right of another
    swapped = Mesh(mesh.axes[::-1], mesh.device)
    layouts = layouts_of(shape, mesh)
    mirrored = [layout[::-1] for layout in layouts]
    ours = seconds_table(shape, itemsize, layouts, layouts, mesh)
    theirs = seconds_table(shape, itemsize, mirrored, mirrored, swapped)
    np.testing.assert_allclose(ours, theirs, rtol=1e-11)
