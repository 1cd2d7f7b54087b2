"""Every step between two layouts, executed on simulated ranks, against a plain cut of the whole tensor."""

import itertools

import pytest
import torch

from autoshard.layout import P, R, S, has_partial, is_legal, text
from autoshard.lower.collectives import CollectiveCall, check_step, exchange, run_step
from autoshard.lower.program import Redistribute, Slot
from autoshard.lower.run import SimulatedRanks, check, run_together
from autoshard.lower.sharding import assemble, distance, gap, local_tensors, reduce_tensors
from autoshard.routes import Routes, Step
from tests.helpers_lower import mesh_of
from tests.helpers_refusals import assert_refused


def parts_of(whole, layout, mesh, reduce_op):
    """Random parts that stand for `whole`: partial ones differ from rank to rank."""
    parts = [p.clone() for p in local_tensors(whole, layout, mesh)]
    for axis, placement in enumerate(layout):
        if not has_partial((placement,)):
            continue
        for rank, coordinate in enumerate(mesh.coordinates()):
            c, n = coordinate[axis], mesh.shape[axis]
            shift = torch.tensor(float((c * 7) % 5 + 1))
            if reduce_op in ("sum", "avg"):  # + shift on one rank, - shift on the next
                neighbour = torch.tensor(float((((c + 1) % n) * 7) % 5 + 1))
                parts[rank] = parts[rank] + shift - neighbour
            elif c:
                parts[rank] = parts[rank] - shift if reduce_op == "max" else parts[rank] + shift
    return parts


@pytest.mark.parametrize("reduce_op", ["sum", "avg", "max", "min"])
@pytest.mark.parametrize("sizes", [(2,), (2, 2), (2, 3), pytest.param((2, 2, 2), marks=pytest.mark.slow)])
def test_every_route_ends_with_the_target_cut(sizes, reduce_op):
    mesh, shape = mesh_of(*sizes), (12, 24) if 3 in sizes else (8, 16)
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    routes, world = Routes(mesh), SimulatedRanks(mesh)
    placements = [S(0), S(1), R, P(reduce_op)]
    layouts = [layout for layout in itertools.product(placements, repeat=len(sizes)) if is_legal(shape, layout, mesh)]
    sources = layouts if reduce_op == "sum" else [layout for layout in layouts if has_partial(layout)]
    seen = set()
    for source, target in itertools.product(sources, layouts):
        route = routes.route(shape, 4, source, target)
        if route is None:
            assert any(has_partial((q,)) and p != q for p, q in zip(source, target))
            continue
        shapes = [tuple(local_tensors(whole, x, mesh)[0].shape) for x in (source, target)]
        slots = [Slot(name, (0, 0), x, shape, "float32") for name, x, shape in zip("ab", (source, target), shapes)]
        parts = parts_of(whole, source, mesh, reduce_op)
        assert distance(parts, source, mesh, whole) < 1e-5  # what we start from does stand for the whole
        world.held["a"] = parts
        moved = world.redistribute(Redistribute(*slots, route.steps))
        assert distance(moved, target, mesh, whole) < 1e-5, (text(source), text(target))
        assert all(part.is_contiguous() for part in moved) or not route.steps
        seen |= {step.collective for step in route.steps}
    reductions, all_steps = {"all_reduce", "reduce_scatter"}, {"split", "all_gather", "all_to_all", "all_reduce", "reduce_scatter"}
    assert seen == (all_steps if reduce_op == "sum" or len(sizes) > 1 else reductions)  # P on the only axis: nothing else to do


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.bfloat16])
def test_other_dtypes_travel_too(dtype):
    mesh = mesh_of(2, 2)
    whole = (torch.arange(64).reshape(8, 8) % 3).to(dtype)
    world = SimulatedRanks(mesh)
    for source, target in itertools.permutations(itertools.product([S(0), S(1), R], repeat=2), 2):
        world.held["a"] = local_tensors(whole, source, mesh)
        moved = world.redistribute(move_between(whole, source, target, mesh))
        assert distance(moved, target, mesh, whole) == 0.0


def move_between(whole, source, target, mesh):
    kind = str(whole.dtype).removeprefix("torch.")
    a, b = (Slot(name, (0, 0), x, tuple(local_tensors(whole, x, mesh)[0].shape), kind) for name, x in (("a", source), ("b", target)))
    return Redistribute(a, b, Routes(mesh).route(tuple(whole.shape), whole.itemsize, source, target).steps)


@pytest.mark.parametrize(
    "collective, before, after, axis",
    [
        ("all_gather", (R, R), (R, R), 0),
        ("all_gather", (S(0), S(0)), (R, S(0)), 0),  # axis 1 holds neighbouring parts, axis 0 does not
        ("split", (R, S(0)), (S(0), S(0)), 0),
        ("all_to_all", (S(0), S(1)), (S(1), S(1)), 0),
        ("all_reduce", (P(), R), (R, S(0)), 0),  # changes another axis too
        ("split", (R, R), (P(), R), 0),
        ("broadcast", (R, R), (S(0), R), 0),
    ],
)
def test_a_step_that_is_not_one_collective_is_refused(collective, before, after, axis):
    assert_refused("is not one collective", check_step, Step(collective, axis, before, after, 0.0, 0.0))


def test_an_unknown_step_is_refused_when_it_runs():
    mesh = mesh_of(2)
    with pytest.raises(ValueError, match="expected split, all_gather"):
        step = Step("broadcast", 0, (R,), (S(0),), 0.0, 0.0)
        run_together([run_step(step, rank, torch.ones(2)) for rank in SimulatedRanks(mesh).ranks], lambda axis: [(0, 1)])


def test_ranks_of_a_group_must_ask_for_the_same():
    with pytest.raises(ValueError, match="ask for different collectives"):
        exchange([CollectiveCall("all_reduce", 0, torch.ones(2)), CollectiveCall("all_gather", 0, torch.ones(2))])


def test_ranks_must_end_together():
    def program(n):
        x = torch.ones(1)
        for _ in range(n):
            x = yield CollectiveCall("all_reduce", 0, x)
        return x

    assert_refused("some ranks end", run_together, [program(1), program(2)], lambda axis: [(0, 1)])


# -- parts -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(2,), (2, 3), (2, 2, 2), (1, 4)])
def test_assemble_is_the_inverse_of_cut(sizes):
    mesh, whole = mesh_of(*sizes), torch.randn(12, 24)
    for layout in itertools.product([S(0), S(1), R, P(), P("max"), P("avg")], repeat=len(sizes)):
        if is_legal((12, 24), layout, mesh):
            assert gap(assemble(local_tensors(whole, layout, mesh), layout, mesh), whole) < 1e-6  # a mean of three equal parts rounds


def test_assemble_refuses_replicas_that_differ():
    mesh = mesh_of(2, 2)
    parts = [x.clone() for x in local_tensors(torch.ones(4), (S(0), R), mesh)]
    parts[3] += 1e-3
    assert_refused("ranks disagree by 0.001", assemble, parts, (S(0), R), mesh)
    assert torch.equal(assemble(parts, (S(0), R), mesh, tolerance=1e-2), torch.ones(4))


def test_replicas_share_one_tensor():
    parts = local_tensors(torch.ones(4, 4), (R, S(0)), mesh_of(2, 2))
    assert parts[0] is parts[2] and parts[1] is parts[3] and parts[0] is not parts[1]


def test_gap_knows_infinities_and_nan():
    inf, nan = float("inf"), float("nan")
    assert gap(torch.tensor([inf, nan, 1.0]), torch.tensor([inf, nan, 1.5])) == 0.5
    assert gap(torch.tensor([inf]), torch.tensor([1.0])) == inf
    assert gap(torch.tensor([nan]), torch.tensor([1.0])) == inf
    assert gap(torch.tensor([1]), torch.tensor([2])) == inf
    assert gap(torch.empty(0), torch.empty(0)) == 0.0


def test_reductions_are_those_of_partial():
    parts = [torch.tensor([1.0, 4.0]), torch.tensor([3.0, 2.0])]
    expected = {"sum": [4, 6], "avg": [2, 3], "max": [3, 4], "min": [1, 2]}
    for reduce_op, values in expected.items():
        assert reduce_tensors(parts, reduce_op).tolist() == values


def test_check_says_what_was_planned():
    slot = Slot("mm:0", (0, 0), (S(0),), (2, 4), "float32")
    check(slot, torch.ones(2, 4), "op mm")
    assert_refused(r"op mm gave mm:0 as .*\(4, 4\).*planned is .*\(2, 4\)", check, slot, torch.ones(4, 4), "op mm")
