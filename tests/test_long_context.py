"""Attention over a sharded sequence: rings, gathered keys, all_to_all to heads, in natural and head-tail order; what they cost."""

from dataclasses import replace
from functools import cache
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses import FakeTensorMode

from autoshard import api
from autoshard.baselines import CONTEXT_PARALLEL
from autoshard.capture import capture
from autoshard.capture.operators import reorder
from autoshard.cost import axis_transfer_seconds
from autoshard.explain.reopened import options_of
from autoshard.formulate import op_candidate_seconds
from autoshard.graph import Op, Ref, Tensor
from autoshard.graph.order import SequenceOrder, in_order, stored_runs
from autoshard.layout import parse, text
from autoshard.lower.dry_run import dry_run
from autoshard.lower.kernels import attention_over_sequence
from autoshard.lower.program import lower
from autoshard.lower.verify import run_global
from autoshard.mesh import Mesh
from autoshard.planning.options import Options
from autoshard.planning.ordering import order_for
from autoshard.planning.plan import baseline_only
from autoshard.strategies import attention as ring
from autoshard.strategies import internal_bytes
from autoshard.strategies.candidates import Candidate, _rows_of, candidates
from models import gpt2, llama
from tests.helpers import candidate_error, one_op
from tests.helpers_kept import assert_stays
from tests.helpers_lower import mesh_of, values_of
from tests.helpers_models import Model, asked
from tests.helpers_refusals import assert_refused
from tests.test_attention import BACKWARD, FORWARD, ops, random


@pytest.fixture(autouse=True)
def every_sequence_is_long():
    """Without rows kept from tests of short sequences, and without leaving any."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        _rows_of.cache_clear()
        monkeypatch.setattr(ring, "LONG", 0)
        yield
    _rows_of.cache_clear()


# -- one op ----------------------------------------------------------------------------------------------------------------------------


@cache
def ordered_ops(heads, groups, parts, tokens=16):
    """Forward and backward as graphs of one op whose sequence is in head-tail order."""
    q, k, v = (random(2, n, tokens, 4, seed=n + i) for i, n in enumerate((heads, groups, groups)))
    out, logsumexp = torch.ops.autoshard.attention(q, k, v, None, True)
    grad = random(*out.shape, seed=8)
    gradients = torch.ops.autoshard.attention_backward(grad, q, k, v, out, logsumexp, None, True)
    built = []
    for target, inputs, outputs in ((FORWARD, (q, k, v), (out, logsumexp)), (BACKWARD, (grad, q, k, v, out, logsumexp), gradients)):
        graph, tensors, _ = one_op(target, *inputs, None, True)
        args, kwargs = graph.ops[-1].literals
        op = replace(graph.ops[-1], literals=(args, (*kwargs, ("head_tail", parts))))
        stored = [tuple(reorder(x, 2, parts, False) for x in some) for some in (tensors, outputs)]
        built.append((replace(graph, ops=(*graph.ops[:-1], op)), list(stored[0]), stored[1]))
    return built


def rings(graph, mesh):
    """The candidates of the last op that shard the sequence of its queries."""
    first = len(graph.ops[-1].inputs) > 4
    return [c for c in candidates(graph, mesh).of[-1] if any(p.is_shard(2) for p in c.inputs[int(first)])]


SHAPES = [(4, 4), (8, 2), (4, 4, (4, 1, 8, 8)), (8, 2, (8, 8)), (4, 4, None, True), (8, 2, None, True)]


@pytest.mark.parametrize("sizes", [(2,), (3,), (4,), (2, 2)], ids=str)
def test_shards_of_the_sequence_compute_attention_and_its_gradients(sizes):
    mesh, count = mesh_of(*sizes), 0
    for shape in SHAPES if len(sizes) == 1 else SHAPES[-1:]:
        for graph, tensors, outputs in ops(*shape):
            for candidate in rings(graph, mesh):
                assert candidate_error(graph, tensors, outputs, candidate, mesh) < 2e-6, (shape, candidate)
                count += 1
    assert count >= 24


@pytest.mark.parametrize("sizes", [(1,), (2,), (4,), (2, 2)], ids=str)
def test_head_tail_order_computes_attention_and_its_gradients(sizes):
    mesh, count = mesh_of(*sizes), 0
    for graph, tensors, outputs in ordered_ops(4, 2, 4):
        for candidate in rings(graph, mesh) if sizes != (1,) else candidates(graph, mesh).of[-1]:
            assert candidate_error(graph, tensors, outputs, candidate, mesh) < 2e-6, candidate
            count += 1
    assert count >= 2


def test_what_rings_send_hold_and_compute_stays_what_it_is():
    mesh, told = mesh_of(2, 4), {}
    for name, pair in (("causal", ops(8, 4, None, True)), ("masked", ops(8, 4, (8, 8))), ("ordered", ordered_ops(8, 4, 8))):
        for graph, tensors, _ in pair:
            op, inputs = graph.ops[-1], graph.input_tensors(len(tensors))
            for c in candidates(graph, mesh).of[-1]:
                does = internal_bytes(op, inputs, c.inputs, mesh), ring.share_of_flops(op, inputs, c.inputs, mesh)
                stages = [list(stage) for stage in ring.internal_stages(op, inputs, c.inputs, mesh)]
                if does != (0, 1.0) or stages:
                    told[f"{name} {op.target}: {' '.join(map(text, c.inputs))}"] = [*does, *stages]
    assert_stays("rooms/rings.json", told)


def wrong_merge(a, b):
    return (a[0] + b[0]) / 2, torch.logaddexp(a[1], b[1])


def wrong_offset(queries, keys, *, is_causal, right=attention_over_sequence.pieces):
    return right(tuple((0, n) for _, n in queries), tuple((0, n) for _, n in keys), is_causal=is_causal)


@pytest.mark.parametrize(("name", "wrong"), [("merged", wrong_merge), ("pieces", wrong_offset)])
def test_a_wrong_merge_and_a_wrong_offset_are_found(name, wrong, monkeypatch):
    monkeypatch.setattr(attention_over_sequence, name, wrong)
    mesh = mesh_of(2)
    graph, tensors, outputs = ops(4, 4, None, True)[0]
    assert all(candidate_error(graph, tensors, outputs, c, mesh) > 1e-2 for c in rings(graph, mesh))


def test_stored_runs_and_reordering_agree():
    for parts, size in ((1, 8), (2, 8), (4, 16), (3, 12)):
        positions = reorder(torch.arange(size), 0, parts, False)
        assert torch.equal(reorder(positions, 0, parts, True), torch.arange(size))
        for start, stop in ((0, size), (0, size // parts), (size // 2, size), (1, size - 1)):
            listed = [first + k for first, count in stored_runs(size, parts, start, stop) for k in range(count)]
            assert listed == positions[start:stop].tolist()
    assert sum(first + count for first, count in stored_runs(16, 4, 0, 4)) == 2 + 16  # chunks 0 and 7
    assert_refused("no head-tail order of 4 parts", stored_runs, 12, 4, 0, 12)


# -- prices ----------------------------------------------------------------------------------------------------------------------------


def plain_mesh(sizes):
    """Of devices whose kernels all reach one share of the peak."""
    mesh = Mesh.from_bandwidths(sizes)
    return replace(mesh, device=replace(mesh.device, kernels=None))


def seconds(causal, parts, sizes, inputs, tokens=8192):
    """Of one op with one kind of layout, by its cost and on the time line of a graph that holds nothing else."""
    shape = [Tensor((1, 8, tokens, 128), "bfloat16")] * 3
    kwargs = (("head_tail", parts),) if parts else ()
    op = Op("op", FORWARD, ((0, 0), (1, 0), (2, 0)), ((Ref(0), Ref(1), Ref(2), None, causal), kwargs),
            (shape[0], Tensor((1, 8, tokens), "float32")))  # fmt: skip
    q, k = map(parse, inputs)
    return op_candidate_seconds(op, tuple(shape), Candidate((q, k, k), (q, q)), plain_mesh(sizes))


RING, GATHERED = ("S(2)", "S(2)"), ("S(2)", "R")


@pytest.mark.parametrize("kind", [RING, GATHERED], ids=["ring", "gathered"])
def test_balanced_causal_attention_costs_half_and_the_natural_order_about_twice_that(kind):
    full, natural, balanced = (seconds(*case, (8,), kind, 2**18) for case in ((False, 0), (True, 0), (True, 8)))
    assert 0.5 <= balanced / full < 0.51  # launches and the memory's traffic are not halved
    assert natural / full == pytest.approx(1 - 1 / 16, rel=0.01)  # 1 - 1 / (2 n)


def test_a_hop_costs_the_longer_of_transfer_and_kernel():
    mesh = Mesh.from_bandwidths((8,))
    block = 2 * 8 * 1024 * 128 * 2  # bytes of keys and values of 8192 / 8 tokens
    transfer = axis_transfer_seconds(block, mesh.axes[0])
    short = seconds(False, 0, (8,), RING)
    kernel = (short - 7 * transfer) if short > 7.5 * transfer else short / 8
    assert short == pytest.approx(kernel + 7 * max(transfer, kernel), rel=1e-6)
    long = seconds(False, 0, (8,), RING, 2**18)
    assert long == pytest.approx(8 * seconds(False, 0, (1,), ("R", "R"), 2**15), rel=0.01)  # 8 kernels of a block, all transfers hidden


# -- whole models ----------------------------------------------------------------------------------------------------------------------


class Latent(nn.Module):
    """Attention as DeepSeek-V3 has it: keys and values from a narrow latent, values narrower than keys, a rotary part that heads share."""

    def __init__(self, width=32, heads=4):
        super().__init__()
        self.heads = heads
        self.embed, self.down, self.up = nn.Embedding(64, width), nn.Linear(width, 16), nn.Linear(16, heads * (8 + 4))
        self.q, self.shared, self.out = nn.Linear(width, heads * 12), nn.Linear(width, 4), nn.Linear(heads * 4, width)

    def forward(self, tokens, targets):
        x = self.embed(tokens)
        q = self.q(x).unflatten(-1, (self.heads, 12)).transpose(1, 2)
        k, v = self.up(self.down(x)).unflatten(-1, (self.heads, 12)).transpose(1, 2).split((8, 4), -1)
        turned = self.shared(x) * torch.arange(1, tokens.shape[1] + 1, dtype=x.dtype)[:, None].sin()
        k = torch.cat((k, turned.unsqueeze(1).expand(-1, self.heads, -1, -1)), -1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3)
        logits = (x + self.out(y.transpose(1, 2).flatten(2))) @ self.embed.weight.T
        return F.cross_entropy(logits.view(-1, 64), targets.view(-1))


def latent():
    with torch.device("meta"):
        return Latent(), tuple(torch.empty(1, 16, dtype=torch.int64) for _ in range(2))


MODELS = {"gpt2": lambda: gpt2.tiny(batch=1, layers=1), "llama": lambda: llama.tiny(batch=1, layers=1), "latent": latent}


@cache
def captured(name):
    return capture(*MODELS[name](), training=True)


def scheme(name, mode, sizes, head_tail):
    """A baseline's plan of a tiny model."""
    return scheme_of(captured(name), mode, sizes, head_tail)


def scheme_of(graph, mode, sizes, head_tail):
    mesh = Mesh.from_bandwidths(sizes)
    order = order_for(graph, mesh) if head_tail else None
    noted = {"sequence_order": order.to_dict()} if order else {}
    return baseline_only(asked(in_order(graph, order), mesh, noted, training=True), f"context_parallel_{mode}")


QUICK = [("gpt2", "ring", (4,), True), ("llama", "ulysses", (4,), True), ("latent", "gather", (4,), True)]
SLOW = [case for case in product(MODELS, ("ring", "gather", "ulysses"), [(2,), (4,), (2, 2)], (False, True)) if case not in QUICK]
CASES = [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]


@pytest.mark.parametrize(("name", "mode", "sizes", "head_tail"), CASES)
def test_outputs_and_gradients_are_those_of_one_device(name, mode, sizes, head_tail):
    solution = scheme(name, mode, sizes, head_tail)
    (placed,) = [placed for op, placed in solution.layouts.items() if op == "attention"]
    q, k = ([p.strip() for p in text.split(",")] for text in placed.inputs[:2])
    assert (q, k) == {
        "ring": (["S(2)"] * len(sizes),) * 2,
        "gather": (["S(2)"] * len(sizes), ["R"] * len(sizes)),
        "ulysses": (["S(1)"] * len(sizes),) * 2,
    }[mode]
    report = api.verify(*MODELS[name](), solution)
    (plan,) = report["plans"]
    assert report["ok"] and not plan["placement_mismatches"]
    assert max(plan["max_relative_error_outputs"], plan["max_relative_error_gradients"]) < 1e-5


@pytest.mark.parametrize("mode", ["ring", "gather"])
def test_every_op_of_a_ring_has_a_kernel_on_cuda(mode):
    solution = scheme("gpt2", mode, (4,), True)
    graph = in_order(captured("gpt2"), solution.sequence_order)
    program = lower(graph, solution.layouts, solution.results, solution.mesh, device="cuda")
    assert dry_run(program, graph) == ()


@pytest.mark.slow
def test_a_falsified_layout_is_found():
    assert not api.verify(*MODELS["llama"](), scheme("llama", "ring", (4,), True), plant_fault=True)["ok"]


@pytest.mark.parametrize("name", MODELS)
def test_only_inputs_and_positions_are_reordered(name):
    order = order_for(captured(name), mesh_of(4))
    assert order.head_tail == 4 and not order.natural and not order.back
    assert len(order.to) == 3 and all(op.startswith(("input", "arange", "sin", "unsqueeze")) for op, _, _ in order.to)
    assert SequenceOrder.from_dict(order.to_dict()) == order


def mixes(m, tokens):
    """Something along the sequence that depends on its order."""
    x = m.embed(tokens).cumsum(1)
    q, k, v = (y.unflatten(-1, (2, 4)).transpose(1, 2) for y in m.qkv(x).chunk(3, -1))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)[:, :, -1]


def test_ops_that_depend_on_the_order_get_the_natural_one():
    model = Model(mixes, embed=nn.Embedding(16, 8), qkv=nn.Linear(8, 24))
    graph = capture(model, (torch.zeros(1, 16, dtype=torch.int64),), training=False)
    order = order_for(graph, mesh_of(2))
    assert [graph.ops[graph.index[name]].target for name in order.natural] == ["aten.select.int"]
    assert [graph.ops[graph.index[name]].target for name, _, _ in order.to] == ["aten.cumsum.default"]
    values = values_of(graph, words=16)
    expected, computed = run_global(graph, values), run_global(in_order(graph, order), values)
    assert (expected["output:0"] - computed["output:0"]).abs().max() < 1e-6


def test_an_order_of_another_model_is_refused():
    order = replace(order_for(captured("gpt2"), mesh_of(2)), natural=("nothing",))
    assert_refused("names 'nothing', which the model doesn't have", in_order, captured("gpt2"), order)


def test_the_plan_of_a_long_sequence_is_in_head_tail_order_and_verifies():
    """Few heads and a batch of one: nothing but the sequence can be sharded over all devices."""
    model, inputs = llama.build(layers=1, heads=2, kv_heads=1, width=64, hidden=128, vocab=64, batch=1, seq=512, loss=True, dtype="float32")
    mesh = Mesh.from_bandwidths((4,))
    solution = api.plan(model, inputs, mesh, training=True, pins={"attention": "S(2)"}, objective="serial")
    assert solution.sequence_order is not None and solution.sequence_order.head_tail == 4
    assert api.verify(model, inputs, solution)["ok"]
    assert set(CONTEXT_PARALLEL) <= set(solution.baselines)
    assert options_of(solution).pins == {"attention": "S(2)"}
    exported = api.export(solution, "tp_plan")
    assert any("attention over a sharded sequence in head-tail order (queries S(2)" in sentence for sentence in exported.said)
    options = {"training": True, "baselines": False, "objective": "serial"}
    natural = api.plan(model, inputs, mesh, pins={"attention": "S(2)"}, sequence_order="natural", **options)
    assert natural.sequence_order is None


def test_an_unknown_order_is_refused():
    assert_refused("expected one of auto, natural, head_tail", Options, sequence_order="zigzag")


@pytest.mark.parametrize(("is_last", "dtype"), [(True, torch.bfloat16), (False, torch.float32)])
def test_a_block_of_attention_is_traced_with_the_shapes_that_it_has(is_last, dtype):
    q, k, v = (torch.randn(2, n, 4, 8).bfloat16() for n in (4, 2, 2))
    given = (q, k, v, None, None, None, None, [0, 0, 4, 4], is_last)
    with FakeTensorMode() as mode:
        faked = attention_over_sequence.BLOCK(*(mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in given))
    for x, of in zip(faked, ((2, 4, 4, 8), (2, 4, 4)), strict=True):
        assert tuple(x.shape) == of
    assert faked[0].dtype == dtype and faked[1].dtype == torch.float32
