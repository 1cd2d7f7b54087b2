"""torch.compile with autoshard as its backend: the same numbers as the plain model, on ranks, also behind a graph break."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import autoshard
from autoshard.api.compiling import DynamoGraph
from tests.helpers import fast_mesh
from tests.helpers_models import Model
from tests.helpers_ranks import results, run_ranks
from tests.test_examples import load

PINS = {"up.weight": "S(0),R", "down.weight": "S(1),S(0)", "scale": "R,S(0)"}


class Broken(nn.Module):
    """Two linear layers with a graph break between them, a buffer, and a tensor that both graphs read."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16, bias=False)
        self.register_buffer("scale", torch.linspace(1, 2, 32))

    def forward(self, x, y):
        h = self.up(x) * self.scale
        torch._dynamo.graph_break()
        return {"out": self.down(h) + y, "sums": h.sum(-1)}


def model():
    torch.manual_seed(0)
    return Broken(), (torch.randn(8, 16), torch.randn(8, 16))


def compiled_outputs(rank, names):
    module, inputs = model()
    mesh = fast_mesh((2, 2) if names else (2,))
    compiled = torch.compile(module, backend=autoshard.backend(mesh, pins={k: v for k, v in PINS.items() if k in names}))
    with torch.inference_mode():
        return compiled(*inputs), compiled(*inputs)


@pytest.mark.parametrize("names", [(), tuple(PINS)], ids=["free", "pinned"])
def test_ranks_compute_what_the_plain_model_computes(names):
    module, inputs = model()
    expected = module(*inputs)
    for outputs in results(4 if names else 2, compiled_outputs, names):
        for found in outputs:
            assert all(torch.allclose(found[key], expected[key], atol=1e-5) for key in expected)
            assert all(type(x) is torch.Tensor for x in found.values())


def example_outputs(rank):
    return load("compile_backend").logits_of()


@pytest.mark.slow
def test_the_example_computes_what_the_plain_model_computes():
    for planned, plain in results(4, example_outputs):
        assert torch.allclose(planned, plain, atol=1e-4) and plain.std() > 0.1


def test_parameters_have_the_names_of_the_model():
    graphs = []
    module, inputs = model()
    with torch.no_grad():
        torch.compile(module, backend=lambda graph, example: graphs.append(DynamoGraph(graph, example)) or graph)(*inputs)
    names = [{name for name, _ in (*g.named_parameters(), *g.named_buffers())} for g in graphs]
    assert names == [{"up.weight", "up.bias", "scale"}, {"down.weight"}]


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.table = nn.Linear(8, 8), nn.Embedding(4, 8, max_norm=0.5)  # which writes into its weight
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.mean.add_(x.mean(0))
        self.calls.add_(1)
        return self.linear(x) + self.mean + self.calls + self.table(x[:, 0].long())


def calls_of(module):
    """Of batches of two sizes, each a graph; the caller resets a buffer, writes a parameter and replaces one in between."""
    rows = [module(torch.ones(n, 8)).clone() for n in (4, 8, 4)]
    module.mean.zero_()
    module.linear.weight.mul_(2)
    rows.append(module(torch.ones(4, 8)).clone())
    module.linear.bias = nn.Parameter(torch.ones(8))
    return [*rows, module(torch.ones(4, 8)), module.mean, module.calls, module.table.weight]


def counted(rank):
    torch.manual_seed(0)
    module = Counting()
    module.compile(backend=autoshard.backend(fast_mesh((2,))), dynamic=False)
    with torch.no_grad():
        return calls_of(module)


def test_graphs_share_the_buffers_and_parameters_of_the_model():
    torch.manual_seed(0)
    with torch.no_grad():
        expected = calls_of(Counting())
    for found in results(2, counted):
        torch.testing.assert_close(found, expected)


def casting(m, x):
    with torch.autocast("cpu", torch.bfloat16):
        y = m.up(x)
        with torch.autocast("cpu", enabled=False):
            return m.up(y.float()) * y


def writing(m, x):
    rows = torch.zeros(4, 8)
    rows[:, m.at] = m.up(x)[:, 0]
    return rows


def refused_models():
    torch.manual_seed(0)
    up, words = nn.Linear(8, 8), "is in a graph that was traced before .* give the model itself to autoshard.plan"
    yield Model(lambda m, x: checkpoint(m.up, x, use_reentrant=False), up=up), words
    yield Model(casting, up=up), words
    yield Model(writing, up=up, at=torch.tensor(1)), "its shapes or its control flow depend on the data .* compute the whole with masks"


@pytest.mark.parametrize(("model", "words"), refused_models(), ids=("checkpoint", "autocast", "data"))
def test_what_is_applied_when_a_graph_is_traced_is_refused(model, words):
    compiled = torch.compile(model, backend=lambda graph, example: planned(DynamoGraph(graph, example), example))
    with torch.no_grad(), pytest.raises(Exception, match=words):
        compiled(torch.randn(4, 8))


def planned(module, example):
    return autoshard.plan(module, module.inputs_of(example), fast_mesh((2,)), baselines=False, objective="serial")


def refusal(rank, number, options, grad):
    module, inputs = model()
    compiled = torch.compile(module, backend=autoshard.backend(fast_mesh((number,))), **options)
    with torch.set_grad_enabled(grad):
        compiled(*inputs)


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("number", "options", "grad", "words"),
    [
        (4, {}, False, "2 ranks run, but the plan is for 4"),
        (2, {}, True, "up.weight requires a gradient, and the backend is for inference"),
        (2, {"dynamic": True}, False, "use torch.compile(..., dynamic=False)"),
    ],
)
def test_what_cannot_run_is_said(number, options, grad, words):
    for error in run_ranks(2, refusal, number, options, grad):
        assert words in str(error)


def test_planning_keeps_what_is_compiled():
    """A capture must not drop what the process has compiled."""
    calls = []
    doubled = torch.compile(lambda x: 2 * x, backend=lambda graph, example: calls.append(1) or graph)
    doubled(torch.ones(3))
    autoshard.plan(model()[0].up, (torch.randn(8, 16),), fast_mesh((2,)))
    doubled(torch.ones(3))
    assert calls == [1] and not dist.is_initialized()
