"""All ranks of a group issue their collectives in one order: on programs, in `verify` and `dry_run`, and on running ranks."""

from dataclasses import replace
from importlib import import_module

import pytest
import torch
from torch import fx
from torch.distributed.device_mesh import init_device_mesh

import autoshard
from autoshard import api
from autoshard.capture import capture
from autoshard.lower import STARTS
from autoshard.lower.collectives import Groups
from autoshard.lower.issue_order import Issued, disagreements, issued, out_of_step
from autoshard.lower.kernels import attention_over_sequence
from autoshard.lower.program import Redistribute, RunOp, lower
from autoshard.runtime.agreement import of_graph
from autoshard.strategies import candidates
from models import gpt2
from tests.helpers_lower import mesh_of, random_layouts
from tests.helpers_ranks import run_ranks
from tests.test_long_context import captured, every_sequence_is_long, in_order, scheme  # noqa: F401 - a fixture


def of(mesh, kinds):
    """One sequence of collectives (kind, axis) for every rank of the mesh."""
    one = [Issued((k,), kind, (axis,), (2,), "float32") for k, (kind, axis) in enumerate(kinds)]
    return [list(one) for _ in range(mesh.num_devices)]


def test_two_swapped_collectives_of_one_rank_are_found_in_its_group_and_nowhere_else():
    mesh = mesh_of(2, 4)
    by_rank = of(mesh, [("all_gather", 0), ("all_gather", 1), ("all_reduce", 1)])
    assert disagreements(by_rank, mesh) == []
    by_rank[6][1:] = reversed(by_rank[6][1:])
    (found,) = disagreements(by_rank, mesh)
    assert (found.axis, found.ranks, [one.collective for one in found.does]) == (1, (4, 6), ["all_gather", "all_reduce"])
    by_rank[6] = by_rank[6][:2]
    assert {one.axis for one in disagreements(by_rank, mesh)} == {1}


@pytest.mark.parametrize("field", ["collective", "shape", "dtype", "reduce_op", "records"])
def test_collectives_that_differ_in_anything_are_found(field):
    mesh = mesh_of(2)
    by_rank = of(mesh, [("all_reduce", 0)])
    by_rank[1][0] = replace(by_rank[1][0], **{field: {"shape": (3,), "records": (9,)}.get(field, "other")})
    assert disagreements(by_rank, mesh)


@pytest.mark.parametrize("sizes", [(2,), pytest.param((3,), marks=pytest.mark.slow), pytest.param((2, 2), marks=pytest.mark.slow)], ids=str)
def test_programs_of_any_layouts_have_one_order(sizes):
    """Even and uneven shards, kernels with collectives of their own."""
    graph, mesh = capture(*gpt2.tiny(batch=12, layers=1), training=True), mesh_of(*sizes)
    for seed in range(3):
        program = lower(graph, *random_layouts(graph, mesh, seed, candidates(graph, mesh)), mesh)
        did = issued(program)
        assert out_of_step(program) == [] and len(did) == mesh.num_devices
        along = sum(len(record.steps) for record in program.records if isinstance(record, Redistribute))
        assert sum(isinstance(one, Issued) for record in did[0] for one in record) >= along // 2 > 0


def falsified(program, wrong):
    """The program with another kernel for its ring."""
    records = [replace(r, kernel=wrong(r.kernel)) if isinstance(r, RunOp) and "attention" in r.target else r for r in program.records]
    return replace(program, records=tuple(records))


def skips_a_hop(kernel):
    """A ring whose first rank leaves out its first hop, as it needs no other keys than its own."""

    def run(rank, a):
        program = kernel(rank, a)
        ask = next(program)
        answer = ask.tensor if rank.place[0] == 0 else (yield ask)
        while True:
            try:
                ask = program.send(answer)
            except StopIteration as done:
                return done.value
            answer = yield ask

    return run


def computes_less(kernel):
    """A ring whose first rank leaves out an operator between its collectives."""

    def run(rank, a):
        return (yield from kernel(rank, {**a, "query": a["query"] if rank.place[0] == 0 else a["query"].clone()}))

    return run


@pytest.mark.parametrize(("wrong", "says"), [(skips_a_hop, "issues"), (computes_less, "amid other operators")])
@pytest.mark.parametrize("head_tail", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_ring_that_differs_from_rank_to_rank_is_found(wrong, says, head_tail):
    solution = scheme("gpt2", "ring", (4,), head_tail)
    graph = in_order(captured("gpt2"), solution.sequence_order)
    program = lower(graph, solution.layouts, solution.results, solution.mesh)
    assert out_of_step(program) == []
    found = out_of_step(falsified(program, wrong))
    assert found and says in " ".join(found[0].said(program))


def test_verify_and_dry_run_report_ranks_that_are_out_of_step(monkeypatch):
    """The first rank's ring skips what it does not need, as a ring of the natural order could."""
    solution = scheme("gpt2", "ring", (2,), False)
    model, inputs = gpt2.tiny(batch=1, layers=1)
    assert api.verify(model, inputs, solution)["ok"] and api.dry_run(model, inputs, solution, device="cpu")["ok"]
    right = attention_over_sequence._pass_on

    def cloned(rank, axis, x):
        return right(rank, axis, x.clone() if rank.place[0] else x)

    monkeypatch.setattr(attention_over_sequence, "_pass_on", cloned)
    report = api.verify(model, inputs, solution)
    assert not report["ok"] and "rank 1 issues permute amid other operators" in report["plans"][0]["placement_mismatches"][0]["found"]
    answer = api.dry_run(model, inputs, solution, device="cpu")
    assert not answer["ok"] and "rank 1 issues" in answer["cannot_run"][0]["why"]


def swapped(rank, solution):
    """Rank 1 issues its last two collectives in the other order."""
    parallelize = import_module("autoshard.runtime.parallelize")
    right = parallelize.scheduled

    def wrong(passes, *args):
        rows = right(passes, *args)
        graph = passes[-1].graph
        starts = [node for node in graph.nodes if node.target in STARTS]
        if rank == 1:
            for node in starts[-1].all_input_nodes:
                starts[-2].prepend(node)
            starts[-2].prepend(starts[-1])
        return rows

    parallelize.scheduled = wrong
    model, inputs = gpt2.tiny(batch=4, layers=1, loss=False)
    model = autoshard.parallelize(model.to_empty(device="cpu"), solution, init_device_mesh("cpu", (2,)))
    model(*(torch.zeros(x.shape, dtype=x.dtype) for x in inputs))


def test_running_ranks_whose_orders_differ_end_before_the_first_step_with_one_sentence():
    model, inputs = gpt2.tiny(batch=4, layers=1, loss=False)
    solution = api.plan(model, inputs, mesh_of(2), pins={"h.0.mlp.*": "S(0)"}, baselines=False, objective="serial")
    errors = run_ranks(2, swapped, solution)
    assert [type(error) for error in errors] == [ValueError] * 2, errors
    assert str(errors[0]) == str(errors[1]) and "ranks at (0,) and (1,) of the mesh would issue other collectives" in str(errors[0])


def test_collectives_of_a_graph_have_the_axis_of_their_group_first_or_second():
    graph, c10d = fx.Graph(), torch.ops._c10d_functional
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(4, 2, dtype=torch.float16)
    graph.call_function(torch.ops.aten.neg.default, (x,))
    reduced = graph.call_function(c10d.all_reduce.default, (x, "max", "rows"))
    reduced.meta["members"] = (3, 5)
    gathered = graph.call_function(c10d.all_gather_into_tensor.default, (x, 2, "again"))
    gathered.meta["record"] = 7
    shape = ((4, 2), "torch.float16")
    assert of_graph(graph, Groups(("rows", "columns"), (2, 2), {"again": 1})) == [
        Issued((3, 5), str(c10d.all_reduce.default), (0,), *shape, "max"),
        Issued((7,), f"{c10d.all_gather_into_tensor.default} of a second group", (1,), *shape),
    ]
