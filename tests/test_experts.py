"""Experts as one operator: recognised, sharded by all_to_all, right on simulated and on gloo ranks, priced."""

from dataclasses import replace
from functools import cache
from itertools import combinations, product
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from autoshard import api
from autoshard.baselines import baseline
from autoshard.capture import capture_deep
from autoshard.capture.huggingface import load_huggingface
from autoshard.cost import op_flops, priced
from autoshard.formulate import formulate
from autoshard.graph import with_hidden_values
from autoshard.layout import R, S, text
from autoshard.lower.collectives import Groups
from autoshard.lower.dry_run import dry_run
from autoshard.lower.kernels import expert_exchange, expert_parallel
from autoshard.lower.program import lower
from autoshard.lower.run import ranks, run_together
from autoshard.lower.sharding import groups
from autoshard.mesh import Mesh
from autoshard.solution import replay
from autoshard.strategies import candidates, internal_collectives, is_experts, worked_shapes
from autoshard.strategies.experts import distinct, expert_bytes, expert_passes
from tests.helpers_kept import assert_stays
from tests.helpers_lower import mesh_of
from tests.helpers_models import losses_of, scheme_plan
from tests.helpers_ranks import results
from tests.helpers_refusals import assert_refused
from tests.test_grouped_mm import experts as grouped_experts

HF = Path(__file__).parent / "data" / "hf"
TARGETS = ("autoshard.experts.default", "autoshard.experts_backward.default")


def mixtral(*, batch=8, seq=8, layers=1, training=True, **settings):
    return load_huggingface(str(HF / "mixtral"), {"batch": batch, "seq": seq, "layers": layers, **settings}, training=training)


@cache
def captured():
    module, inputs = mixtral()
    return module, inputs, capture_deep(module, inputs, training=True)[0]


@cache
def expert_parallel_plan():
    """The plan of the baseline on 2x2 devices: experts sharded over all axes, tokens sent by all_to_all."""
    return scheme_plan(captured()[2], mesh_of(2, 2), "expert_parallel", training=True)


# -- recognition -------------------------------------------------------------------------------------------------------------------


def test_the_experts_of_a_mixtral_are_one_op():
    graph, _ = capture_deep(*mixtral(dtype="bfloat16"), training=True)
    assert [op.target for op in graph.ops if is_experts(op)] == list(TARGETS)
    assert not any("sort" in op.target or "grouped_mm" in op.target for op in graph.ops)


def test_other_grouped_matmuls_stay_as_they_are():
    graph, _ = capture_deep(grouped_experts(), (torch.randn(16, 8),), training=True)
    assert not any(map(is_experts, graph.ops)) and any("_grouped_mm" in op.target for op in graph.ops)


@pytest.mark.parametrize(("n", "experts", "k"), [(1, 4, 2), (2, 4, 1), (2, 4, 2), (4, 8, 2), (4, 8, 3), (8, 8, 2)])
def test_a_token_is_sent_to_as_many_groups_of_experts_as_all_choices_have_on_average(n, experts, k):
    groups = [len({expert // (experts // n) for expert in chosen}) for chosen in combinations(range(experts), k)]
    assert distinct(n, experts, k) == pytest.approx(sum(groups) / len(groups))


def test_an_expert_parallel_program_is_run_dry():
    plan = expert_parallel_plan()
    graph = replay(plan, captured()[2]).graph
    assert dry_run(lower(graph, plan.layouts, plan.results, plan.mesh, device="cuda"), graph) == ()


def test_flops_are_those_of_the_matmuls():
    T, k, E, H, F, N = 6, 2, 4, 8, 32, 16
    inputs = [((T, H), "float32"), ((T, k), "int64"), ((T, k), "float32"), ((E, H, F), "float32"), ((E, N, H), "float32")]
    matmuls = 2 * T * k * (H * F + N * H)
    assert matmuls <= op_flops(TARGETS[0], inputs, [((T, H), "float32")]) < 1.2 * matmuls  # and activations
    backward = op_flops(TARGETS[1], [inputs[0], *inputs], [])
    assert 2 * matmuls + 2 * T * k * H * F <= backward < 1.2 * (2 * matmuls + 2 * T * k * H * F)  # hidden values are computed again


# -- any routing -------------------------------------------------------------------------------------------------------------------

ACTIVATION = '[["aten.silu.default", ["$0"], {}]]'
ROUTINGS = {
    "random": lambda T, E, k: torch.stack([torch.randperm(E)[:k] for _ in range(T)]),
    "all tokens to the same experts": lambda T, E, k: torch.arange(k).expand(T, k).contiguous(),
    "the last expert has no tokens": lambda T, E, k: torch.stack([torch.randperm(E - 1)[:k] for _ in range(T)]),
    "one rank sends nothing": lambda T, E, k: torch.stack([(torch.arange(k) + (0 if t < T // 4 else 2)) % E for t in range(T)]),
}


def simulated(mesh, axes, sent, backward, tensors, kept=()):
    """All ranks together; tensors by rank. kept: the local shape of hidden values."""
    E = tensors[0][4].shape[0] * [mesh.shape[a] for a in axes][0]
    for a in axes[1:]:
        E *= mesh.shape[a]
    dispatch = expert_parallel.Dispatch(axes, tuple(mesh.shape[a] for a in axes), sent, E)
    function = expert_parallel.experts_backward if backward else expert_parallel.experts
    own = [t if backward else t[1:] for t in tensors]
    programs = [function(dispatch, [rank.place[a] for a in axes], t, ACTIVATION, kept) for rank, t in zip(ranks(mesh), own, strict=True)]
    return run_together(programs, lambda axis: groups(mesh, axis))


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("shape", [(4,), (2, 2)])
def test_tokens_reach_their_experts_and_come_back(routing, shape):
    torch.manual_seed(0)
    mesh, T, E, H, N, k = mesh_of(*shape), 16, 8, 8, 16, 2
    x, grad, up, down = torch.randn(T, H), torch.randn(T, H), torch.randn(E, H, N), torch.randn(E, N, H)
    ids, weights = ROUTINGS[routing](T, E, k), torch.rand(T, k)
    y = expert_parallel._local(x, ids, weights, up, down, activation=ACTIVATION)
    expected = [y, *expert_parallel._local_backward(grad, x, ids, weights, up, down, activation=ACTIVATION)]
    own = [[t.chunk(4)[r].contiguous() for t in (grad, x, ids, weights, up, down)] for r in range(4)]
    axes = tuple(range(len(shape)))
    outputs = [simulated(mesh, axes, (True,) * len(axes), backward, own) for backward in (False, True)]
    found = [torch.cat(parts) for parts in (*zip(*outputs[0], strict=True), *zip(*outputs[1], strict=True))]
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-4)


def test_the_local_gradients_are_those_of_autograd():
    torch.manual_seed(0)
    x, ids = torch.randn(6, 8, dtype=torch.float64), torch.stack([torch.randperm(4)[:2] for _ in range(6)])
    weights, up, down = (torch.randn(s, dtype=torch.float64) for s in ((6, 2), (4, 8, 16), (4, 16, 8)))
    up_bias, down_bias = torch.randn(4, 16, dtype=torch.float64), torch.randn(4, 8, dtype=torch.float64)
    leaves = [t.requires_grad_() for t in (x, weights, up, down, up_bias, down_bias)]
    hidden = torch.einsum("th,tjhf->tjf", x, up[ids]) + up_bias[ids]
    y = ((torch.einsum("tji,tjih->tjh", torch.nn.functional.silu(hidden), down[ids]) + down_bias[ids]) * weights.unsqueeze(2)).sum(1)
    grad = torch.randn_like(y)
    expected = torch.autograd.grad(y, leaves, grad)
    x, weights, *parameters = (t.detach().float() for t in leaves)
    found = expert_parallel._local_backward(grad.float(), x, ids, weights, *parameters, activation=ACTIVATION)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b.float(), rtol=1e-4, atol=1e-4)


def test_rows_that_go_missing_are_an_error(monkeypatch):
    right = expert_exchange.Exchange.forth

    def loses_one(self, x):
        (sent, received) = self.splits
        if x.dtype != torch.float32:  # pairs are all there
            return (yield from right(self, x))
        return (yield from right(replace(self, splits=([sent[0] - 1, *sent[1:]], received), index=self.index[1:]), x))

    monkeypatch.setattr(expert_exchange.Exchange, "forth", loses_one)
    x, up, down = torch.randn(8, 4), torch.randn(2, 4, 4), torch.randn(2, 4, 4)
    tensors = [x, x, torch.arange(8).reshape(8, 1) % 4, torch.ones(8, 1), up, down]
    assert_refused("expects", simulated, mesh_of(2), (0,), (True,), False, [tensors, tensors])


# -- plans -------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("shape", "name", "projection", "experts"), [
    ((2, 2), "megatron_experts", "R,S(0)", "R,S(0)"), ((2, 2), "megatron_expert_parallel", "R,S(0)", "S(0),S(0)"),
    ((4, 1), "megatron_experts", "S(0),R", "S(0),R"), ((4, 1), "megatron_expert_parallel", "R,R", "S(0),R"),
])  # fmt: skip
def test_experts_lie_over_the_last_axis_that_is_used_or_over_all_and_the_rest_as_megatron_has_it(shape, name, projection, experts):
    graph, mesh = captured()[2], mesh_of(*shape)
    pins = baseline(graph, mesh, candidates(graph, mesh), name).pins
    found = [text(pins[f"model.layers.0.{one}"].outputs[0]) for one in ("self_attn.q_proj.weight", "mlp.experts.gate_up_proj")]
    assert found == [projection, experts]


@pytest.mark.parametrize(("shape", "layout"), [((2, 4), "S(0),S(0)"), ((4, 4), "S(1),S(0)"), ((8, 2), "S(0),S(1)")])
def test_experts_are_sharded_over_the_axes_that_tokens_are_sent_over(shape, layout):
    """Of 8 experts; over more devices their matrices are sharded, too."""
    plan = scheme_plan(captured()[2], mesh_of(*shape), "expert_parallel", training=True)
    assert {placed.outputs[0] for name, placed in plan.layouts.items() if name.endswith(("gate_up_proj", "down_proj"))} == {layout}


def test_expert_parallelism_is_verified():
    (module, inputs, _), solution = captured(), expert_parallel_plan()
    assert set(solution.layouts["experts"].inputs) == {"S(0),S(0)"}
    report = api.verify(module, inputs, solution)
    assert report["ok"] and not any(plan["placement_mismatches"] for plan in report["plans"])


def test_a_wrong_send_is_found(monkeypatch):
    (module, inputs, _), solution = captured(), expert_parallel_plan()
    first, coordinate = expert_parallel.Dispatch.first, expert_parallel.Dispatch.coordinate
    monkeypatch.setattr(expert_parallel.Dispatch, "coordinate", lambda *asked: 1 - coordinate(*asked))
    monkeypatch.setattr(expert_parallel.Dispatch, "first", lambda self, where: first(self, [1 - place for place in where]))
    assert not api.verify(module, inputs, solution)["ok"]


def test_imbalance_is_priced_noted_and_needs_memory():
    module, inputs, graph = captured()
    mesh = mesh_of(4)
    i = next(i for i, op in enumerate(graph.ops) if op.target == TARGETS[0])
    costs = []
    for one in (mesh, replace(mesh, expert_imbalance=2.0)):
        formulated = formulate(graph, candidates(graph, one), one)
        options = formulated.candidates.of[i]
        sent = next(k for k, c in enumerate(options) if c.inputs[0] == (S(0),) and c.inputs[3] == (S(0),))
        local = next(k for k, c in enumerate(options) if c.inputs[0] == (S(0),) and c.inputs[3] == (R,))
        costs.append((formulated.problem.node_costs[i][sent], formulated.problem.node_costs[i][local]))
    assert costs[1][0] > costs[0][0] and costs[1][1] == costs[0][1]
    solution = api.plan(module, inputs, mesh, training=True, baselines=False, objective="serial", expert_imbalance=1.5)
    assert solution.assumptions["expert_imbalance"] == 1.5 and solution.mesh.expert_imbalance == 1.5
    assert Mesh.from_dict(solution.mesh.to_dict()) == solution.mesh
    assert_refused("expert_imbalance", replace, mesh, expert_imbalance=0.5)


def test_what_experts_send_copy_and_hold_on_the_way_stays_what_it_is():
    graph, told = captured()[2], {}
    for keeps, shape, imbalance in product((False, True), ((4,), (2, 2)), (1.0, 1.5)):
        mesh, one = replace(mesh_of(*shape), expert_imbalance=imbalance), with_hidden_values(graph, 4) if keeps else graph
        for op in filter(is_experts, one.ops):
            inputs = [one.tensor(value) for value in op.inputs]
            for candidate in candidates(one, mesh).of[one.ops.index(op)]:
                layouts, key = candidate.inputs, f"{op.target} {shape} {imbalance} {' '.join(map(text, candidate.inputs))}"
                sent = [list(row) for row in internal_collectives(op, inputs, layouts, mesh)]
                bytes = expert_bytes(op, inputs, layouts, mesh), expert_passes(op, inputs, layouts, mesh)
                told[key] = [*map(int, bytes), list(map(list, worked_shapes(op, inputs, layouts, mesh))), sent]
    assert_stays("rooms/experts.json", told)


# -- gloo ranks --------------------------------------------------------------------------------------------------------------------


def real_model(plain, *, one_expert):
    """The model with seeded weights; one_expert: every token goes to expert 0, the others get none."""
    if one_expert:
        plain.config.num_experts_per_tok = 1
        for layer in plain.model.layers:
            layer.mlp.gate.top_k = 1
    torch.manual_seed(0)
    plain.to_empty(device="cpu")
    for name, tensor in plain.state_dict().items():
        tensor.copy_(torch.ones_like(tensor) if "norm" in name else torch.randn(tensor.shape) * 0.05)
    for module in plain.modules():
        if hasattr(module, "inv_freq"):
            module.inv_freq.copy_(1.0 / (10000 ** (torch.arange(0, 8, 2) / 8)))
        if one_expert and hasattr(module, "top_k") and hasattr(module, "weight"):
            module.weight.data.zero_()
    return plain


def batches(steps, batch, seq):
    torch.manual_seed(1)
    return [{"input_ids": (ids := torch.randint(0, 128, (batch, seq))), "labels": ids} for _ in range(steps)]


def train(model, steps, batch, seq):
    return losses_of(model, torch.optim.AdamW(model.parameters(), lr=1e-3), batches(steps, batch, seq))


def _train(rank, model, solution, steps, sizes, compiled=False):
    sent = []
    answer = Groups.answer

    def counting(self, ask):
        if getattr(ask, "collective", None) == "all_to_all":  # not what holds several of them
            n = self.sizes[ask.axis]
            rows = ask.splits[0] if ask.splits else [len(ask.tensor) // n] * n
            own = device_mesh.get_coordinate()[ask.axis]
            each = ask.tensor[:1].numel() * ask.tensor.element_size() if len(ask.tensor) else 0
            sent.append((sum(rows) - rows[own]) * each)
        return answer(self, ask)

    Groups.answer = counting
    device_mesh = init_device_mesh("cpu", solution.mesh.shape, mesh_dim_names=solution.mesh.axis_names)
    sharded = api.parallelize(model, solution, device_mesh)
    if compiled:
        sharded.compile()
    return train(sharded, steps, *sizes), sum(sent) / steps


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "one_expert"), [((4,), False), ((2, 2), False), ((4,), True)])
def test_training_on_gloo_ranks_is_that_of_one_process(shape, one_expert):
    steps, sizes = (20, (8, 8)) if not one_expert else (4, (8, 8))
    module, inputs = mixtral(batch=sizes[0], seq=sizes[1])
    module = real_model(module, one_expert=one_expert)
    graph, _ = capture_deep(module, inputs, training=True)
    solution = scheme_plan(graph, mesh_of(*shape), "expert_parallel", training=True)
    ranks_losses = results(4, _train, module, solution, steps, sizes)
    expected = train(module, steps, *sizes)
    for losses, _ in ranks_losses:
        assert losses == pytest.approx(expected, rel=1e-5)
    assert expected[-1] != pytest.approx(expected[0], rel=1e-3)  # it learns something


@pytest.mark.slow
def test_bytes_on_gloo_are_those_that_are_priced():
    """Within 5 %: a token's experts are assumed to be any of them alike."""
    sizes = (32, 32)
    module, inputs = mixtral(batch=sizes[0], seq=sizes[1])
    module = real_model(module, one_expert=False)
    graph, _ = capture_deep(module, inputs, training=True)
    mesh = mesh_of(2, 2)
    solution = scheme_plan(graph, mesh, "expert_parallel", training=True)
    layouts = (S(0), S(0))
    of_experts = [i for i, op in enumerate(graph.ops) if is_experts(op)]
    inside = [internal_collectives(graph.ops[i], graph.input_tensors(i), (layouts,) * len(graph.ops[i].inputs), mesh) for i in of_experts]
    predicted = sum(one.sent for collectives in inside for one in priced(collectives, mesh))
    found = [sent for _, sent in results(4, _train, module, solution, 1, sizes)]
    assert sum(found) / 4 == pytest.approx(predicted, rel=0.05)
