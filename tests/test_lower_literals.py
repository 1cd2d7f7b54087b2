"""Each row of the table of literals, on every way to cut that its op allows, against the op on whole tensors."""

from itertools import permutations

import pytest
import torch

from autoshard.graph import UPSAMPLED, Op, Ref
from autoshard.lower import lower, verify_program
from autoshard.lower.literals import CONSTANTS, ROWS, Shapes, by_name, groups_of_channels, out_strides, overload
from autoshard.lower.run import SimulatedRanks
from autoshard.solution import Placed
from tests.helpers_lower import check_op, crossed, laid, mesh_of, one_op
from tests.helpers_refusals import assert_refused
from tests.test_coverage_ops import CASES as MORE_CASES


def x(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


NORM = (x(4, 16, 2, 2), x(16, seed=1), x(16, seed=2))
NORM_OUT = torch.ops.aten.native_group_norm.default(*NORM, 4, 16, 4, 4, 1e-5)
# (call, one-axis rows); the replicated row is always added
CASES = {
    "aten.view.default": ((x(8, 4, 4), [8, 16]), ["S0 -> S0", "S1 -> S1"]),
    "aten._unsafe_view.default": ((x(8, 16), [8, 4, -1]), ["S0 -> S0", "S1 -> S1"]),
    "aten.view_copy.default": ((x(32, 4), [8, 4, 4]), ["S0 -> S0", "S1 -> S2"]),
    "aten.reshape.default": ((x(4, 8, 6), [32, 6]), ["S0 -> S0", "S2 -> S1"]),
    "aten._reshape_alias.default": ((x(4, 8), [32], [1]), ["S0 -> S0"]),
    "aten.expand.default": ((x(1, 4, 1), [8, -1, 12]), ["R -> S0", "S1 -> S1", "R -> S2"]),
    "aten.expand_copy.default": ((x(4, 1), [8, 4, 4]), ["R -> S0", "S0 -> S1", "R -> S2"]),
    "aten.full.default": (([8, 12], 3.0), ["-> S0", "-> S1"]),
    "aten.zeros.default": (([8, 12],), ["-> S0", "-> S1"]),
    "aten._efficientzerotensor.default": (([8, 12],), ["-> S0", "-> S1"]),
    "aten.ones.default": (([8, 12],), ["-> S0", "-> S1"]),
    "aten.empty.memory_format": (([8, 12],), ["-> S0", "-> S1"]),
    "aten.empty_strided.default": (([8, 12], [1, 8]), ["-> S0", "-> S1"]),
    "aten.new_zeros.default": ((x(4), [8, 12]), ["S0 -> S0", "R -> S1"]),
    "aten.new_ones.default": ((x(4), [8, 12]), ["S0 -> S0", "R -> S1"]),
    "aten.new_full.default": ((x(4), [8, 12], 2.0), ["S0 -> S0", "R -> S1"]),
    "aten.new_empty.default": ((x(4), [8, 12]), ["S0 -> S0", "R -> S1"]),
    "aten.new_empty_strided.default": ((x(4), [8, 12], [12, 1]), ["S0 -> S0", "R -> S1"]),
    "aten.repeat.default": ((x(4, 1, 3), [4, 1, 8, 2]), ["R -> S0", "S0 -> S1", "R -> S2"]),
    "aten.slice_backward.default": ((x(8, 3), [8, 12], 1, 4, 10, 2), ["S0 -> S0"]),
    "aten.select_backward.default": ((x(8, 4), [8, 12, 4], 1, 5), ["S0 -> S0", "S1 -> S2"]),
    "aten.diagonal_backward.default": ((x(8, 4), [8, 4, 4], 0, 1, 2), ["S0 -> S0"]),
    "aten.unfold_backward.default": ((x(8, 3, 2), [8, 6], 1, 2, 2), ["S0 -> S0"]),
    "aten.embedding_dense_backward.default": (
        (x(4, 4, 8), torch.arange(16).reshape(4, 4) % 12, 12, 3, False),
        ["R R -> S0", "S2 R -> S1", "S0 S0 -> P", "S1 S1 -> P"],
    ),
    "aten.native_group_norm.default": ((*NORM, 4, 16, 4, 4, 1e-5), ["S0 R R -> S0 S0 S0", "S1 S0 S0 -> S1 S1 S1"]),
    "aten.native_group_norm_backward.default": (
        (x(4, 16, 2, 2, seed=3), NORM[0], NORM_OUT[1], NORM_OUT[2], NORM[1], 4, 16, 4, 4, [True, True, True]),
        ["S0 S0 S0 S0 R -> S0 P P", "S1 S1 S1 S1 S0 -> S1 S0 S0"],
    ),
    "aten.convolution.default": (
        (x(4, 8, 5, 5), x(16, 2, 3, 3, seed=1), x(16, seed=2), [1, 1], [1, 1], [1, 1], False, [0, 0], 4),
        ["S0 R R -> S0", "S1 S0 S0 -> S1"],  # groups with their channels
    ),
    "aten.convolution_backward.default": (
        (x(4, 16, 5, 5), x(4, 8, 5, 5, seed=1), x(16, 2, 3, 3, seed=2), [16], [1, 1], [1, 1], [1, 1], False, [0, 0], 4, [True] * 3),
        ["S0 S0 R -> S0 P P", "S1 S1 S0 -> S1 S0 S0"],
    ),
    "aten.upsample_nearest2d_backward.default": ((x(4, 8, 6, 6), [6, 6], [4, 8, 3, 3]), ["S0 -> S0", "S1 -> S1"]),
    "aten.upsample_bilinear2d_backward.default": ((x(4, 8, 6, 6), [6, 6], [4, 8, 3, 3], False), ["S0 -> S0", "S1 -> S1"]),
}
RANDOM = {"aten.rand.default", "aten.randn.default"}  # no two ranks draw the whole program's numbers


def test_every_row_of_the_table_has_a_case():
    assert set(CASES) | RANDOM | {target for target, *_ in MORE_CASES.values()} >= set(ROWS)


@pytest.mark.parametrize("sizes", [(2,), (4,), (2, 2)])
@pytest.mark.parametrize("target", CASES)
def test_local_literals_give_the_whole_op(target, sizes):
    arguments, rows = CASES[target]
    graph, values = one_op(target, *arguments)
    mesh, num = mesh_of(*sizes), len(graph.ops) - 1
    whole = " ".join(["R"] * num) + " -> " + " ".join("R" for _ in graph.ops[-1].outputs)
    ways = list(crossed([whole, *rows], mesh, graph))
    assert len(ways) > 1
    for inputs, outputs in ways:
        check_op(graph, values, mesh, inputs, outputs)


@pytest.mark.parametrize("target", sorted(RANDOM))
def test_random_factories_make_local_shapes(target):
    graph, values = one_op(target, [8, 4])
    program = lower(graph, laid(graph, [], ["S(0)"]), {"output:0": "S(0)"}, mesh_of(4))
    world = SimulatedRanks(mesh_of(4))
    world.do(program.records[0], values)
    assert tuple(world.held["op:0"][0].shape) == (2, 4)


def test_strides_keep_their_order():
    assert out_strides(Shapes({}, (), (), ((4, 12, 2),), (1, 16, 8))) == (1, 8, 4)
    for order in permutations(range(4)):
        dense = torch.empty(5, 1, 3, 2).permute(order)
        ours = out_strides(Shapes({}, (), (), (tuple(dense.shape),), dense.stride()))
        assert [n for n, size in zip(ours, dense.shape) if size > 1] == [n for n, size in zip(dense.stride(), dense.shape) if size > 1]


def test_a_grouped_convolution_whose_channels_stay_whole_keeps_its_groups():
    arguments = {"input": Ref(0), "weight": Ref(1), "transposed": False}
    shapes = Shapes(arguments, ((4, 8, 5, 5), (16, 2, 3, 3)), ((2, 8, 5, 5), (16, 2, 3, 3)), ((2, 16, 5, 5),), 4)
    assert groups_of_channels(shapes) == 4


def test_an_ungrouped_convolution_may_cut_its_sum():
    graph, values = one_op(
        "aten.convolution.default", x(4, 8, 5, 5), x(16, 8, 3, 3, seed=1), x(16, seed=2), [1, 1], [1, 1], [1, 1], False, [0, 0], 1
    )
    for inputs, outputs in crossed(["R R R -> R", "S1 S1 R -> P", "R S0 S0 -> S1", "S0 R R -> S0"], mesh_of(2, 2), graph):
        check_op(graph, values, mesh_of(2, 2), inputs, outputs)


def test_a_literal_that_no_row_knows_fails_loudly():
    """as_strided_copy has no row: its size is that of the whole tensor, and the local output is not the planned one."""
    graph, values = one_op("aten.as_strided_copy.default", x(8, 4), [8, 4], [4, 1])
    found = verify_program(graph, laid(graph, ["S(0)"], ["S(0)"]), {}, mesh_of(2), values)
    assert [m.op for m in found.placement_mismatches] == ["op"] and not found.ok


def test_lists_of_tensors_and_none_reach_the_op():
    graph, values = one_op("aten.cat.default", [x(4, 2), x(4, 6)], 1)
    check_op(graph, values, mesh_of(2), ["S(0)", "S(0)"], ["S(0)"])
    graph, values = one_op("aten.index.Tensor", x(4, 6), [None, torch.tensor([5, 0, 1])])
    check_op(graph, values, mesh_of(2), ["S(0)", "R"], ["S(0)"])
    graph, values = one_op("aten.split_with_sizes.default", x(4, 6), [2, 4], 1)
    check_op(graph, values, mesh_of(2), ["S(0)"], ["S(0)", "S(0)"])


def test_arguments_by_name_mix_places_and_keywords():
    op = Op("sum", "aten.sum.dim_IntList", ((0, 0),), ((Ref(0), (1,)), (("keepdim", True),)), ())
    assert by_name(op) == {"self": Ref(0), "dim": (1,), "keepdim": True}


def test_an_operator_that_torch_lacks_is_named():
    assert_refused("has no operator aten.never_was.default", overload, "aten.never_was.default")


def test_constants_are_factories_only():
    assert "aten.full.default" in CONSTANTS and "aten.view.default" not in CONSTANTS
    assert Placed((), ("R",)).hubs == (None,)


def test_as_many_last_dims_are_resized_as_torch_says():
    sizes = {name: getattr(torch.ops.aten, name).default._schema.arguments[1] for name in UPSAMPLED}
    assert {name: size.N for name, size in sizes.items() if size.name == "output_size"} == UPSAMPLED
