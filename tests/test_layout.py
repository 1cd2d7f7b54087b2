"""Layouts against numpy slicing and counting, over every layout of small shapes on small meshes."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autoshard import layout as layouts
from autoshard.layout import P, R, S, is_legal, parse, rank_bounds, text
from autoshard.mesh import Mesh
from tests.helpers_refusals import assert_refused

MESHES = [Mesh.from_bandwidths(shape) for shape in ((2,), (1, 4), (2, 4), (2, 3), (2, 2, 2))]
SHAPES = [(), (8,), (6,), (13,), (12, 8), (4, 3, 8), (7, 15)]
CASES = [
    (shape, layout, mesh)
    for mesh in MESHES
    for shape in SHAPES
    for layout in itertools.product(*([*(S(d) for d in range(len(shape))), R] for _ in mesh.axes))
]


def parts_by_definition(x: np.ndarray, layout, mesh) -> dict | None:
    """What each coordinate holds when the axes cut one after another, as torch.chunk does; None where one holds nothing."""
    held = {(): x}
    for placement, axis in zip(layout, mesh.axes, strict=True):
        following = {}
        for coordinate, part in held.items():
            for c in range(axis.size):
                if not placement.is_shard():
                    following[(*coordinate, c)] = part
                    continue
                chunks = torch.from_numpy(part).chunk(axis.size, placement.dim)
                if len(chunks) < axis.size:
                    return None
                following[(*coordinate, c)] = chunks[c].numpy()
        held = following
    return held


def test_local_shapes_part_numbers_and_legality_are_those_of_slicing():
    legal = uneven = 0
    for shape, layout, mesh in CASES:
        x = np.arange(int(np.prod(shape))).reshape(shape)
        held = parts_by_definition(x, layout, mesh)
        assert is_legal(shape, layout, mesh) == (held is not None), (shape, text(layout), mesh.shape)
        if held is None:
            continue
        legal += 1
        shapes = {part.shape for part in held.values()}
        assert layouts.is_even(shape, layout, mesh) == (len(shapes) == 1)
        assert layouts.local_shape(shape, layout, mesh) == held[(0,) * len(mesh.axes)].shape == max(shapes, key=np.prod)
        assert layouts.local_numel(shape, layout, mesh) == max(part.size for part in held.values())
        for coordinate, part in held.items():
            assert layouts.rank_shape(shape, layout, mesh, coordinate) == part.shape
            assert np.array_equal(x[tuple(slice(lo, hi) for lo, hi in rank_bounds(shape, layout, mesh, coordinate))], part)
            uneven += len(shapes) > 1
            for d, n in enumerate(shape):
                parts, k = layouts.shards_of(layout, mesh, d), layouts.part_index(layout, mesh, coordinate, d)
                assert len(shapes) > 1 or rank_bounds(shape, layout, mesh, coordinate)[d] == (k * (n // parts), (k + 1) * (n // parts))
    assert (legal, uneven, len(CASES)) == (263, 736, 301)  # counted once, so that a filter that lets less through is seen


@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: "x".join(map(str, mesh.shape)))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_all_layouts_are_the_legal_ones_with_axes_of_one_device_whole(shape, mesh):
    found = layouts.all_layouts(shape, mesh)
    of_mesh = [layout for s, layout, m in CASES if s == shape and m is mesh]
    whole_where_alone = [x for x in of_mesh if all(axis.size > 1 or p == R for p, axis in zip(x, mesh.axes, strict=True))]
    assert sorted(map(text, found)) == sorted(text(layout) for layout in whole_where_alone if is_legal(shape, layout, mesh))
    assert found[-1] == layouts.replicated(len(mesh.axes))


PLACEMENTS = st.one_of(st.just(R), st.builds(S, st.integers(0, 15)), st.builds(P, st.sampled_from(["sum", "avg", "max", "min"])))


@given(st.lists(PLACEMENTS, min_size=1, max_size=4))
def test_text_is_read_back(placements):
    layout = tuple(placements)
    assert parse(text(layout)) == layout
    assert parse(text(layout).replace(",", " , ")) == layout


@given(st.text(alphabet="SRP()0123456789,x -", max_size=12))
def test_what_is_read_is_a_layout_or_a_sentence(written):
    try:
        layout = parse(written)
    except ValueError as error:
        assert str(error).startswith(f"layout {written!r} has ") and "expected R, S(dim) or P per mesh axis" in str(error)
    else:
        assert parse(text(layout)) == layout


@pytest.mark.parametrize(("written", "layout"), [("S0,R", (S(0), R)), ("S(1),P", (S(1), P())), ("P(max)", (P("max"),)), ("R", (R,))])
def test_short_forms_are_read(written, layout):
    assert parse(written) == layout


@pytest.mark.parametrize("written", ["", "S", "S()", "S(-1)", "S(64)", "T", "P(mean)", "R,,R", "S(0) R", "r", "S(0", "S0)"])
def test_what_is_no_layout_is_one_sentence(written):
    assert_refused(r"^layout .* has .*; expected R, S\(dim\) or P per mesh axis, for example S\(0\),R$", parse, written)


ILLEGAL = [
    ((8, 8), "S(0)", (2, 4), "layout S(0) has 1 placements, the mesh 2x4 has 2 axes"),
    ((8,), "S(1),R", (2, 4), "layout S(1),R shards dim 1, the tensor has 1 dims"),
    ((6, 8), "R,S(0)", (2, 4), "layout R,S(0) shards dim 0 of size 6 into 4 parts, which leaves some ranks without any"),
    ((12, 8), "S(0),S(0)", (2, 4), "layout S(0),S(0) shards dim 0 of size 12 into 8 parts, which leaves some ranks without any"),
    ((8, 8), "P,P(max)", (2, 4), "layout P,P(max) mixes partial kinds ['max', 'sum']"),
]


@pytest.mark.parametrize(("shape", "written", "mesh", "why"), ILLEGAL, ids=[row[1] for row in ILLEGAL])
def test_an_impossible_layout_says_why(shape, written, mesh, why):
    assert layouts.why_illegal(shape, parse(written), Mesh.from_bandwidths(mesh)) == why


def test_partial_is_found():
    assert [layouts.has_partial(parse(x)) for x in ("R,R", "S(0),P", "P(max)")] == [False, True, True]
