"""Cross entropy in chunks of tokens: found in captured graphs, right on shards, priced and held in memory by its chunks."""

import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autoshard import api
from autoshard.capture import capture
from autoshard.cost import op_flops
from autoshard.explain.reopened import options_of
from autoshard.exports import record
from autoshard.graph import chunked_loss
from autoshard.graph.chunked_loss import BACKWARD, FORWARD, losses_of
from autoshard.layout import R, S
from autoshard.lower.dry_run import dry_run
from autoshard.lower.kernels import chunked_loss as kernels
from autoshard.lower.program import lower
from autoshard.lower.verify import run_global
from autoshard.mesh import Mesh
from autoshard.planning import recomputing
from autoshard.precision import Precision
from autoshard.strategies import candidates, internal_bytes
from models import gpt2, llama
from tests.helpers import candidate_error, one_op
from tests.helpers_lower import mesh_of, values_of
from tests.helpers_models import Held
from tests.helpers_refusals import assert_refused

graph_of_loss, cost_of_loss = sys.modules["autoshard.graph.chunked_loss"], sys.modules["autoshard.cost.several_kernels"]

# -- in graphs -------------------------------------------------------------------------------------------------------------------------

MODELS = {
    "llama": lambda: llama.tiny(batch=2, layers=1),
    "tied": lambda: gpt2.tiny(batch=2, layers=1),
    "bfloat16": lambda: llama.tiny(batch=2, layers=1, dtype="bfloat16"),
    "mixed precision": lambda: llama.tiny(batch=2, layers=1),
    "tied in mixed precision": lambda: gpt2.tiny(batch=2, layers=1),
}
SLOW = ("tied", "bfloat16", "tied in mixed precision")


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in MODELS])
def test_a_graph_with_a_chunked_loss_computes_what_it_did(name):
    graph = capture(*MODELS[name](), training=True, precision=Precision.of("bf16") if "mixed" in name else None)
    chunked = chunked_loss(graph, 5)
    assert [op.target for op in chunked.ops if op.target in (FORWARD, BACKWARD)] == [FORWARD, BACKWARD]
    assert not any("softmax" in op.target or "nll_loss" in op.target for op in chunked.ops)
    assert len(chunked.ops) < len(graph.ops) - 10
    read = {i for i, _ in (*chunked.users, *chunked.returned)}
    assert read | {i for i, op in enumerate(chunked.ops) if op.is_placeholder} == set(range(len(chunked.ops)))  # nothing is left over
    values = values_of(graph, words=64)
    expected, computed = run_global(graph, values), run_global(chunked, values)
    tolerance = 1e-5 if name in ("llama", "tied") else 2e-2
    for key, value in expected.items():
        assert (value - computed[key]).abs().max() <= tolerance * value.abs().max().clamp(min=1e-6), key


class Head(nn.Module):
    def __init__(self, returns_logits=False, weights=None, penalty=0.0, **options):
        super().__init__()
        self.body, self.head, self.returns_logits, self.options = nn.Linear(4, 4), nn.Linear(4, 8, bias=False), returns_logits, options
        self.penalty = penalty
        self.register_buffer("weights", weights)

    def forward(self, x, targets):
        logits = self.head(self.body(x))
        loss = F.cross_entropy(logits, targets, self.weights, **self.options)
        loss = loss + self.penalty * logits.square().mean() if self.penalty else loss
        return (loss, logits) if self.returns_logits else loss


def head_graph(**settings):
    return capture(Head(**settings), (torch.randn(6, 4), torch.zeros(6, dtype=torch.int64)), training=True)


@pytest.mark.parametrize(
    "settings",
    [{"returns_logits": True}, {"weights": torch.ones(8)}, {"label_smoothing": 0.1}, {"reduction": "none"}, {"penalty": 0.1}],
    ids=str,
)
def test_other_losses_stay_as_they_are(settings):
    graph = head_graph(**settings)
    assert not losses_of(graph) and chunked_loss(graph) is graph


@pytest.mark.parametrize("settings", [{}, {"reduction": "sum"}, {"ignore_index": 3}], ids=str)
def test_means_and_sums_are_chunked(settings):
    assert len(losses_of(head_graph(**settings))) == 1


# -- on shards -------------------------------------------------------------------------------------------------------------------------


def ops(rows=3, tokens=16, width=4, classes=12, reduction=1):
    """Forward and backward as graphs of one op, with two targets that are ignored."""
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(tokens, width, generator=generator), torch.randn(width, classes, generator=generator)
    t = torch.randint(0, classes, (tokens,), generator=generator).index_fill(0, torch.tensor([1, 9]), -100)
    leaves = [x.requires_grad_(), w.requires_grad_()]
    loss = F.cross_entropy(x @ w, t, reduction=("none", "mean", "sum")[reduction])
    of_x, of_w = torch.autograd.grad(loss, leaves, torch.tensor(2.0))
    outputs = (loss.detach(), torch.tensor(float((t >= 0).sum())), (x @ w).logsumexp(1).detach())
    x, w = x.detach(), w.detach()
    forward = one_op(FORWARD, x, w, t, -100, reduction, rows)
    backward = one_op(BACKWARD, torch.tensor(2.0), x, w, t, *outputs[1:], -100, reduction, rows)
    return [(*forward[:2], outputs), (*backward[:2], (of_x, of_w.t()))]


@pytest.mark.parametrize(("sizes", "reduction"), [((1,), 1), ((2,), 1), ((3,), 2), ((2, 2), 1)], ids=str)
def test_shards_of_tokens_and_classes_compute_the_loss_and_its_gradients(sizes, reduction):
    mesh = mesh_of(*sizes)
    for graph, tensors, outputs in ops(reduction=reduction):
        found = candidates(graph, mesh).of[-1]
        assert len(found) >= (3 ** len(sizes) if sizes != (1,) else 1)
        for candidate in found:
            assert candidate_error(graph, tensors, outputs, candidate, mesh) < 1e-5, candidate


@pytest.mark.parametrize("wrong", ["here", "logsumexp"])
def test_a_wrong_target_and_a_wrong_logsumexp_are_found(wrong, monkeypatch):
    right = kernels._Targets.of
    if wrong == "here":
        monkeypatch.setattr(kernels._Targets, "of", staticmethod(lambda *a: right(*a)._replace(here=torch.ones(16, dtype=torch.bool))))
    else:
        monkeypatch.setattr(kernels, "all_reduce", lambda x, axes, *_: (yield from ()) or x)
    mesh, (graph, tensors, outputs) = mesh_of(2), ops()[0]
    by_class = next(c for c in candidates(graph, mesh).of[-1] if c.inputs[1] == (S(1),))
    assert candidate_error(graph, tensors, outputs, by_class, mesh) > 1e-2


# -- prices ----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [512, 4096])
@pytest.mark.parametrize(("width", "classes"), [(64, 2048), (1024, 1024), (2048, 512)])
def test_the_program_of_the_backward_pass_holds_what_is_planned_for_it(dtype, width, classes, tokens):
    rows = 512
    x, weight = torch.empty(tokens, width, dtype=dtype, device="meta"), torch.empty(width, classes, dtype=dtype, device="meta")
    target, numbers = torch.empty(tokens, dtype=torch.int64, device="meta"), torch.empty(tokens, device="meta")
    arguments = (numbers[0], x, weight, target, numbers[0], numbers, -100, 1, rows)
    graph, tensors, made = one_op(BACKWARD, *arguments)
    planned = internal_bytes(graph.ops[-1], graph.input_tensors(len(tensors)), ((R,),) * len(tensors), mesh_of(2))
    with Held() as held:
        kernels.chunked_loss_backward(*arguments)
    outputs = sum(tensor.nbytes for tensor in made)
    assert held.peak == pytest.approx(planned + outputs, rel=0.03)  # a number for each token


def test_a_chunk_of_logits_is_held_and_the_vocabulary_is_multiplied_once_more():
    T, H, V = 16, 4, 12
    forward, backward = (graph for graph, *_ in ops())
    tensors = [g.input_tensors(len(g.ops) - 1) for g in (forward, backward)]
    held = [internal_bytes(g.ops[-1], ins, ((R,),) * len(ins), mesh_of(2)) for g, ins in zip((forward, backward), tensors, strict=True)]
    assert held == [2 * 4 * 3 * V, 4 * (3 * V + H * V)]  # the sum is the output
    described = [[(t.shape, t.dtype) for t in ins] for ins in tensors]
    matmul, logits = 2 * T * H * V, T * V
    assert matmul <= op_flops(FORWARD, described[0], []) <= matmul + 3 * logits
    assert 3 * matmul <= op_flops(BACKWARD, described[1], []) <= 3 * matmul + 6 * logits


# -- plans -----------------------------------------------------------------------------------------------------------------------------


def model():
    return llama.build(layers=1, heads=2, kv_heads=1, width=16, hidden=16, vocab=512, batch=4, seq=32, loss=True, dtype="float32")


def planned(**options):
    return api.plan(*model(), Mesh.from_bandwidths((2,)), training=True, baselines=False, **options)


@pytest.fixture
def rows(monkeypatch):
    """Chunks of eight tokens: 128 tokens on two devices are eight each."""
    for module in (recomputing, graph_of_loss, cost_of_loss):
        monkeypatch.setattr(module, "ROWS", 8)


@pytest.mark.slow
def test_a_plan_chunks_the_loss_where_its_logits_do_not_fit(rows, tmp_path):
    full = planned()
    assert not full.chunked_loss
    tight = planned(memory_limit=0.5 * full.peak_bytes)
    assert tight.chunked_loss == 8 and tight.peak_bytes <= 0.5 * full.peak_bytes
    with pytest.raises(api.Infeasible):
        planned(memory_limit=0.5 * full.peak_bytes, chunked_loss="never")
    tight.save(tmp_path / "plan.json")
    assert api.verify(*model(), api.load(tmp_path / "plan.json"))["ok"]
    assert not api.verify(*model(), tight, plant_fault=True)["ok"]
    assert [left.what for left in record._of_computation(tight)] == ["logits of 8 tokens at a time"]
    assert not list(record._of_computation(full))
    assert options_of(tight).memory_limit == tight.memory_limit


@pytest.mark.slow
def test_chunks_of_the_loss_can_be_asked_for(rows):
    asked = planned(chunked_loss="always")
    assert asked.chunked_loss == 8 and asked.peak_bytes < planned().peak_bytes
    graph = chunked_loss(capture(*model(), training=True), 8)
    assert dry_run(lower(graph, asked.layouts, asked.results, asked.mesh, device="cuda"), graph) == ()
    with pytest.raises(ValueError, match="no training loss that can be chunked"):
        api.plan(Head(returns_logits=True), (torch.randn(6, 4), torch.zeros(6, dtype=torch.int64)), asked.mesh, training=True,
                 chunked_loss="always")  # fmt: skip
    assert_refused("expected one of auto, always, never", planned, chunked_loss="sometimes")


@pytest.mark.parametrize("backward", [False, True])
def test_gradients_of_several_chunks_are_added_and_that_of_one_is_not(backward):
    def kernels_of(tokens):
        given = [((tokens, 64), "bfloat16"), ((64, 512), "bfloat16")]
        return cost_of_loss.loss_kernels([((), "float32")] * backward + given, backward=backward)

    one, rows = kernels_of(1), cost_of_loss.ROWS
    for tokens, chunks in ((rows, 1), (rows + 1, 2), (3 * rows, 3)):
        more = kernels_of(tokens)[len(one) :]
        assert len(more) == (1 if backward and chunks > 1 else 0) and all(inputs[0][0] == (chunks, 512, 64) for _, inputs, _ in more[:1])
