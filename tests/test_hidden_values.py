"""Hidden values of experts, kept between forward and backward: right for any routing, of a fixed size, in one layout, priced and noted."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from autoshard import api
from autoshard.baselines import baseline
from autoshard.baselines.schemes import RULES
from autoshard.capture import capture, capture_deep
from autoshard.capture.huggingface import load_huggingface
from autoshard.cost import op_flops
from autoshard.formulate import formulate
from autoshard.graph import KEEPING, READING, SELECTED, alternatives, private_values, with_hidden_values
from autoshard.layout import R, S
from autoshard.lower.dry_run import dry_run
from autoshard.lower.kernels import expert_parallel, experts
from autoshard.lower.program import lower
from autoshard.lower.verify import run_global
from autoshard.planning import Infeasible
from autoshard.planning import recomputing as kind
from autoshard.planning.baselining import masks_of
from autoshard.precision import Precision
from autoshard.solution import Solution, load, replay
from autoshard.strategies import candidates, internal_bytes, internal_passes, is_experts
from tests.helpers_lower import mesh_of, values_of
from tests.helpers_models import right_plan, scheme_plan
from tests.helpers_ranks import results
from tests.helpers_refusals import assert_refused
from tests.test_experts import ACTIVATION, HF, ROUTINGS, TARGETS, _train, captured, mixtral, real_model, simulated, train


@cache
def keeping(parts=4):
    return with_hidden_values(captured()[2], parts)


@cache
def formulated(shape, hidden):
    """Of the graph whose experts keep hidden values, or of the plain one."""
    graph, mesh = keeping() if hidden else captured()[2], mesh_of(*shape)
    return graph, mesh, formulate(graph, candidates(graph, mesh), mesh)


def of_experts(graph):
    return [i for i, op in enumerate(graph.ops) if is_experts(op)]


# -- graphs ------------------------------------------------------------------------------------------------------------------------


def test_only_experts_change_and_the_graph_computes_what_it_did():
    graph, kept = captured()[2], keeping()
    assert [kept.ops[i].target for i in of_experts(kept)] == [KEEPING[TARGETS[0]], READING[TARGETS[1]]]
    assert [op.name for op in graph.ops] == [op.name for op in kept.ops] and with_hidden_values(kept, 4) is kept
    (hidden,) = private_values(kept)
    assert kept.tensor(hidden).shape == (64 * 2 // 8, 8, 256) and private_values(graph) == frozenset()
    values = values_of(graph, words=64)
    expected, computed = run_global(graph, values), run_global(kept, values)
    assert all(torch.equal(expected[key], computed[key]) for key in expected)


def test_pairs_that_do_not_divide_by_devices_and_other_graphs_stay_as_they_are():
    graph = captured()[2]
    assert with_hidden_values(graph, 16) is not graph and with_hidden_values(graph, 32) is graph
    inference = capture_deep(*mixtral(training=False), training=False)[0]
    assert of_experts(inference) and with_hidden_values(inference, 1) is inference


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
def test_layers_and_casts_of_precision_are_paired(name):
    module, inputs = load_huggingface(str(HF / name), {"batch": 8, "seq": 8, "layers": 2}, training=True)
    graph = with_hidden_values(capture(module, inputs, training=True, precision=Precision.of("bf16")), 2)
    assert len(private_values(graph)) == 2 and len(of_experts(graph)) == 4
    assert {graph.tensor(value).dtype for value in private_values(graph)} == {"bfloat16"}
    assert not any(op.target in (*KEEPING, *READING) for op in graph.ops)


# -- any routing -------------------------------------------------------------------------------------------------------------------


def tensors_of(routing, k, biased, T=16, E=8, H=8, N=16):
    torch.manual_seed(0)
    shapes = [(E, H, N), (E, N, H), *([(E, N), (E, H)] if biased else [])]
    tokens = [torch.randn(T, H), torch.randn(T, H), ROUTINGS[routing](T, E, k), torch.rand(T, k)]
    return tokens, [torch.randn(shape) for shape in shapes]


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize(("shape", "sent", "k", "biased"), [
    ((2,), (True,), 1, False), ((4,), (True,), 2, True), ((2,), (False,), 2, False), ((2, 2), (True, True), 2, False),
    ((2, 2), (True, False), 2, True),
])  # fmt: skip
def test_ranks_compute_what_one_device_does_and_keep_as_many_rows_of_any_routing(routing, shape, sent, k, biased, monkeypatch):
    tokens, parameters = tensors_of(routing, k, biased)
    function, arguments = expert_parallel._local, {"activation": ACTIVATION}
    expected = [function(*tokens[1:], *parameters, **arguments), *expert_parallel._local_backward(*tokens, *parameters, **arguments)]
    mesh, axes = mesh_of(*shape), tuple(range(len(shape)))
    over = [a for a in axes if sent[a]]
    n_tokens, n = int(np.prod([shape[a] for a in over])), int(np.prod(shape))
    alike = n // n_tokens  # ranks, next to each other, with the same tokens
    own = [[*(t.chunk(n_tokens)[r // alike] for t in tokens), *(w.chunk(n)[r].contiguous() for w in parameters)] for r in range(n)]
    kept = (2 * k, 8 // n_tokens, 16 // alike)
    counted, hidden_of = [], experts._hidden
    monkeypatch.setattr(experts, "_hidden", lambda rows, *rest: (counted.append(len(rows)), hidden_of(rows, *rest))[1])
    forward = simulated(mesh, axes, sent, False, own, kept)
    per_rank, counted[:] = list(counted), []
    assert {out[1].shape for out in forward} == {kept} and {out[1].untyped_storage().nbytes() for out in forward} == {16 * k * 16 * 4 // n}
    backward = simulated(mesh, axes, sent, True, [[*t, out[1]] for t, out in zip(own, forward, strict=True)], kept)
    assert sorted(counted) == sorted(more for rows in per_rank if (more := rows - 16 * k // n) > 0)  # only rows beyond a balanced routing

    def joined(parts, of_tokens):
        return torch.cat([sum(parts[r : r + alike]) for r in range(0, n, alike)] if of_tokens else parts)

    outputs = [*zip(*[out[:1] for out in forward], strict=True), *zip(*backward, strict=True)]
    for k_out, (parts, right) in enumerate(zip(outputs, expected, strict=True)):
        torch.testing.assert_close(joined(parts, k_out < 3), right, rtol=1e-5, atol=1e-4)


def test_one_device_passes_hidden_values_through():
    tokens, parameters = tensors_of("random", 2, True)
    _, hidden = expert_parallel._local(*tokens[1:], *parameters, activation=ACTIVATION, keeps=True)
    ids, order = torch.sort(tokens[2].reshape(-1), stable=True)
    expected = torch.einsum("rh,rhf->rf", tokens[1][order // 2], parameters[0][ids]) + parameters[2][ids]
    torch.testing.assert_close(hidden.reshape(32, 16), expected)
    again = expert_parallel._local_backward(*tokens, *parameters, activation=ACTIVATION)
    read = expert_parallel._local_backward(*tokens, *parameters, hidden, activation=ACTIVATION, keeps=True)
    assert all(map(torch.equal, again, read))


# -- plans -------------------------------------------------------------------------------------------------------------------------


def test_every_row_is_verified_and_no_route_changes_the_layout():
    module, inputs, _ = captured()
    plan = right_plan(module, inputs, mesh_of(2, 2), random=2, training=True)
    assert plan.hidden_values == 4
    graph = replay(plan, captured()[2]).checked()
    f = formulate(graph, candidates(graph, plan.mesh), plan.mesh)
    (table,) = (e.table for e, link in zip(f.problem.edges, f.tensor_edges, strict=True) if link.value in private_values(graph))
    ends = [link for link in f.tensor_edges if link.value in private_values(graph)][0]
    same = np.array([[a == b for b in ends.target_layouts] for a in ends.source_layouts])
    assert np.array_equal(np.isfinite(table), same) and not table[same].any()
    placed = plan.layouts["experts_backward"]
    moved = {**plan.layouts, "experts_backward": replace(placed, inputs=(*placed.inputs[:-1], "S(0),S(2)"))}
    assert_refused("only the ranks that computed it know its rows", lower, graph, moved, plan.results, plan.mesh)


@pytest.mark.parametrize("wrong", ["shifted", "of no surplus"])
def test_wrong_rows_are_found(wrong, monkeypatch):
    """Rows shifted by one; and those of a rank with more pairs than it keeps taken for others."""
    module, inputs, _ = captured()
    plan = scheme_plan(keeping(), mesh_of(2, 2), "expert_parallel", training=True)
    plan = replace(plan, assumptions={**plan.assumptions, "hidden_values": 4})
    assert api.verify(module, inputs, plan)["ok"]
    right = experts._kept
    monkeypatch.setattr(experts, "_kept", lambda *of: right(*of).roll(1, 0) if wrong == "shifted" else right(of[0][1:], of[1]))
    report = api.verify(module, inputs, plan)
    assert not report["ok"] and {m["op"] for m in report["plans"][0]["placement_mismatches"]} == {"experts_backward"}


@pytest.mark.parametrize("name", RULES)
def test_usual_plans_shard_experts_as_they_did(name):
    for shape in ((4,), (2, 2)):
        found = []
        for hidden in (False, True):
            graph, mesh, f = formulated(shape, hidden)
            try:
                one = baseline(graph, mesh, f.candidates, name)
            except ValueError as error:  # the scheme needs what the mesh lacks
                found.append(str(error))
                continue
            masks_of(f, one)
            found.append([one.pins[graph.ops[i].name].inputs[:5] for i in of_experts(graph)])
        assert found[0] == found[1], (name, shape)


def test_dry_runs_know_the_shapes():
    graph = keeping()
    plan = scheme_plan(graph, mesh_of(2, 2), "expert_parallel", training=True)
    assert dry_run(lower(graph, plan.layouts, plan.results, plan.mesh, device="cuda"), graph) == ()


# -- prices ------------------------------------------------------------------------------------------------------------------------


def test_the_backward_lacks_a_matmul_but_for_rows_beyond_a_balanced_routing():
    plain, kept, mesh = captured()[2], keeping(), mesh_of(4)
    flops = []
    for graph in (plain, kept):
        i = of_experts(graph)[1]
        flops.append(op_flops(graph.ops[i].target, [(t.shape, t.dtype) for t in graph.input_tensors(i)], []))
    assert flops[0] - flops[1] == 2 * 128 * 64 * 256
    seconds, passes, held = {}, {}, {}
    for busy in (1.0, 2.0):
        on = replace(mesh, expert_imbalance=busy)
        for graph in (plain, kept):
            f, i = formulate(graph, candidates(graph, on), on), of_experts(graph)[1]
            k = next(k for k, c in enumerate(f.candidates.of[i]) if c.inputs[1] == (S(0),) and c.inputs[4] == (S(0),))
            key, chosen = (graph is kept, busy), f.candidates.of[i][k].inputs
            seconds[key] = f.problem.node_costs[i][k]
            passes[key] = internal_passes(graph.ops[i], graph.input_tensors(i), chosen, on)
            held[key] = internal_bytes(graph.ops[i], graph.input_tensors(i), chosen, on)
    assert passes == {(False, 1.0): 0, (False, 2.0): 0, (True, 1.0): 2 * 32 * 256 * 4, (True, 2.0): 2 * 64 * 256 * 4}
    assert held[True, 2.0] == held[False, 2.0]
    assert 0 < seconds[False, 1.0] - seconds[True, 1.0] and seconds[True, 2.0] > seconds[True, 1.0]
    i = of_experts(kept)[1]  # tokens sharded, experts not: nothing is copied, and hidden values are no temporary tensor
    alone = [(S(0),)] * 4 + [(R,)] * 2 + [(S(0),)]
    assert internal_passes(kept.ops[i], kept.input_tensors(i), tuple(alone), mesh) == 0
    less = [internal_bytes(g.ops[i], g.input_tensors(i), tuple(alone)[: len(g.ops[i].inputs)], mesh) for g in (plain, kept)]
    assert less[0] - less[1] == 32 * 256 * 4


# -- which of them is planned ------------------------------------------------------------------------------------------------------


def planned(**options):
    module, inputs, _ = captured()
    return api.plan(module, inputs, mesh_of(2), training=True, objective="serial", baselines=False, **options)


def tried_notes(monkeypatch):
    notes, variants = [], kind.hidden_values

    def noting(question, tried):
        for variant in variants(question, tried):
            notes.append(variant.note.rpartition(" ")[2])
            yield variant

    search = __import__("sys").modules["autoshard.planning.search"]
    monkeypatch.setattr(search, "KINDS", tuple(noting if one is variants else one for one in search.KINDS))
    monkeypatch.setattr(search.search, "__defaults__", (search.KINDS, None))
    return notes


def test_they_are_kept_where_memory_allows_and_both_ways_are_planned_where_it_binds(monkeypatch):
    notes = tried_notes(monkeypatch)
    free = planned()
    assert notes == ["kept"] and free.hidden_values == 2
    assert planned(memory_limit=2 * free.peak_bytes).hidden_values == 2 and notes == ["kept"] * 2
    tight = planned(memory_limit=1.05 * free.peak_bytes)
    assert notes[2:] == ["kept", "again"] and tight.hidden_values == 2 and tight.cost == free.cost  # kept is the faster one
    assert planned(recompute="all").hidden_values == 0 and notes[4:] == ["again"]
    with pytest.raises(Infeasible) as refused:
        planned(memory_limit=1e5)
    assert "hidden" not in str(refused.value) and notes[5:] == ["kept", "again"]


@pytest.mark.parametrize(("share", "notes"), [(1.2, ["kept"]), (0.95, ["kept"]), (0.3, ["kept", "again"])])
def test_with_recomputation_per_tensor_they_are_saved_values_as_others(share, notes, monkeypatch):
    """Neither moved nor lost on their way to the host's memory and back; computed again by the backward only where no other plan fits."""
    (module, inputs), options = mixtral(batch=32, seq=32, layers=2), {"training": True, "baselines": False, "objective": "serial"}
    free, tried = api.plan(module, inputs, mesh_of(2), **options), tried_notes(monkeypatch)
    limited = {"memory_limit": share * free.peak_bytes, "recompute": "auto"}
    try:
        plan = api.plan(module, inputs, mesh_of(2), **limited, **options)
        assert plan.hidden_values == 2 and free.cost * (1 - 1e-9) <= plan.cost < 1.02 * free.cost and api.verify(module, inputs, plan)["ok"]
        assert bool(plan.chosen) == (share < 1)
    except Infeasible:
        assert share < 0.9
    assert tried == notes


def test_what_brings_a_private_value_back_is_private():
    graph = alternatives(keeping()).graph
    (value, *_), (selected,) = sorted(private_values(graph)), [i for i, k in private_values(graph) if graph.ops[i].kind == SELECTED]
    assert graph.ops[selected].inputs[0] == value and graph.ops[value[0]].target == KEEPING[TARGETS[0]]


def test_where_they_do_not_fit_they_are_computed_again():
    """On one device, where no other layouts need less memory."""
    (module, inputs), options = mixtral(batch=32, seq=32, layers=2), {"training": True, "objective": "serial", "baselines": False}
    kept = api.plan(module, inputs, mesh_of(1), **options)
    less = api.plan(module, inputs, mesh_of(1), memory_limit=0.95 * kept.peak_bytes, **options)
    assert (kept.hidden_values, less.hidden_values, less.recompute) == (1, 0, 0) and less.cost > kept.cost


def test_a_saved_plan_is_read_verified_and_checked(tmp_path):
    module, inputs, _ = captured()
    plan = planned(microbatches=2)
    plan.save(tmp_path / "plan.json")
    again = load(tmp_path / "plan.json")
    assert again.hidden_values == 2 and api.verify(module, inputs, again)["ok"] and api.check(module, inputs, again).ok
    old = replace(again, assumptions={key: value for key, value in again.assumptions.items() if key != "hidden_values"})
    assert_refused("experts: has 5 inputs and 1 outputs, planned were 5 and 2", replay(old, captured()[2]).checked)


# -- gloo ranks --------------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "scheme", "one_expert", "compiled"), [
    ((2,), "zero3", False, True), ((4,), "expert_parallel", False, False), ((2,), "expert_parallel", True, True),
    ((2, 2), "expert_parallel", True, False), ((4,), "megatron_experts", True, False),
])  # fmt: skip
def test_training_on_gloo_ranks_is_that_of_one_process(shape, scheme, one_expert, compiled):
    module, inputs = mixtral(batch=8, seq=8)
    module, n = real_model(module, one_expert=one_expert), int(np.prod(shape))
    graph = with_hidden_values(capture_deep(module, inputs, training=True)[0], n)
    solution = scheme_plan(graph, mesh_of(*shape), scheme, training=True)
    solution = replace(solution, assumptions={**solution.assumptions, "hidden_values": n})
    ranks_losses = results(n, _train, module, solution, 4, (8, 8), compiled)
    expected = train(module, 4, 8, 8)
    for losses, _ in ranks_losses:
        assert losses == pytest.approx(expected, rel=1e-5)


@cache
def plan_of_mixtral() -> Solution:
    return api.plan(*mixtral(), mesh_of(2), training=True, objective="serial")


@pytest.mark.parametrize("algo", ["alpa", "fsdp"])
def test_the_pass_and_a_pinned_scheme_keep_them_as_plans_do(algo):
    module, inputs = mixtral()
    options = {"training": True, "algo": algo, "run_checks": True, "objective": "serial"}
    _, info = api.autosharding_pass(module, mesh_shape=(2,), example_inputs=inputs, **options)
    plan = plan_of_mixtral()
    assert info["solution"].hidden_values == plan.hidden_values == 2
    assert info["cost_seconds"] == pytest.approx(plan.cost if algo == "alpa" else plan.baselines[algo]["cost_seconds"])
