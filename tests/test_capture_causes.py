"""Models whose forward does something that is seldom captured: they are planned alike for inference and training, or the cause is named."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch._higher_order_ops.effects import _get_effect
from torch.nn.utils import rnn
from torch.utils import _pytree as pytree

import autoshard
from autoshard.capture import capture
from autoshard.torch_private import VERSION
from models import mlp
from tests import helpers_models
from tests.helpers import fast_mesh
from tests.helpers_models import right_plan

BOTH = pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])


def alternating(names):
    """Each name in both kinds, of which one is slow: in turn training and inference."""
    for k, name in enumerate(names):
        for t, kind in enumerate(("inference", "training")):
            yield pytest.param(name, bool(t), marks=[pytest.mark.slow] * (k % 2 != t), id=f"{name}-{kind}")


X = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
SIGNAL, LENGTHS = torch.randn(4, 64), torch.tensor([6, 5, 3, 2])
SEQUENCES = torch.randn(4, 6, 8)


class Model(helpers_models.Model):
    """Of this file, so that refusals name its lines."""


def built(function):
    torch.manual_seed(0)
    return Model(function, linear=nn.Linear(8, 8), lstm=nn.LSTM(8, 8, batch_first=True), window=torch.hann_window(14))


def gram(m, x):
    y = m.linear(x)
    return y @ y.T + 10 * torch.eye(8)


def differentiated(m, x):
    with torch.enable_grad():
        x = x.requires_grad_(True)
        (gradient,) = torch.autograd.grad(m.linear(x).tanh().sum(), x, create_graph=True)
    return gradient.pow(2).mean()


def backward_inside(m, x):
    loss = m.linear(x).tanh().sum()
    loss.backward()
    return loss + m.linear.weight.grad.mean()


def packed(m, x, lengths):
    y, _ = m.lstm(rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))
    return rnn.pad_packed_sequence(y, batch_first=True)[0].mean()


def nested(m, x):
    return torch.nested.to_padded_tensor(torch.nested.nested_tensor([x[:3], x[3:]]), 0.0).mean() + m.linear(x).mean()


def normal(**options):
    return lambda m, x: -torch.distributions.Normal(m.linear(x), 1.0, **options).log_prob(x).mean()


DIFFERENTIATES = r"the forward differentiates, and autograd can't be captured .*; call torch\.func\.grad"
DISTRIBUTIONS = r"torch\.distributions checks the values of its arguments .*; pass validate_args=False"
PACKED = r"the shapes of packed sequences depend on their lengths .*; pad the sequences, run the layer on the padded batch, and mask"
NESTED = r"a nested tensor has no one shape to shard.*pad it \(torch\.nested\.to_padded_tensor\) and give a mask"
REFUSED = {
    "autograd.grad": (differentiated, (X,), DIFFERENTIATES),
    "backward": (backward_inside, (X,), DIFFERENTIATES),
    "packed inside": (packed, (SEQUENCES, LENGTHS), PACKED),
    "packed input": (lambda m, p: m.lstm(p)[0].data.mean(), (rnn.pack_padded_sequence(SEQUENCES, LENGTHS, batch_first=True),), PACKED),
    "nested inside": (nested, (X,), NESTED),
    "as many as the data say": (lambda m, x: torch.linalg.lstsq(gram(m, x), x)[0].mean(), (X,), "depend on the data .*linalg_lstsq"),
}
CATEGORICAL = lambda m, x: torch.distributions.Categorical(logits=m.linear(x)).entropy().mean()  # noqa: E731
if VERSION < (2, 15):  # later ones capture the checks of distributions
    REFUSED |= {"Normal": (normal(), (X,), DISTRIBUTIONS), "Categorical": (CATEGORICAL, (X,), DISTRIBUTIONS)}


@pytest.fixture
def distributions_check_their_arguments(monkeypatch):
    """As in a new process: what compiles turns it off for all that comes after (torch._dynamo)."""
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)


@pytest.mark.usefixtures("distributions_check_their_arguments")
@BOTH
@pytest.mark.parametrize("name", REFUSED)
def test_the_cause_is_named_with_its_line_and_what_to_do(name, training):
    function, inputs, sentence = REFUSED[name]
    with pytest.raises(ValueError, match=rf"Model can't be captured at .*test_capture_causes\.py:\d+: .*{sentence}"):
        capture(built(function), inputs, training=training)


PLANNED = {
    "func.grad": (lambda m, x: torch.func.grad(lambda x: m.linear(x).tanh().sum())(x).pow(2).mean(), (X,)),
    "jacrev": (lambda m, x: torch.func.vmap(torch.func.jacrev(lambda x: m.linear(x).tanh()))(x).pow(2).mean(), (X,)),
    "unchecked distribution": (normal(validate_args=False), (X,)),
    "cholesky": (lambda m, x: torch.linalg.cholesky(gram(m, x)).pow(2).mean(), (X,)),
    "inv": (lambda m, x: torch.linalg.inv(gram(m, x)).pow(2).mean(), (X,)),
    "solve": (lambda m, x: torch.linalg.solve(gram(m, x), x).pow(2).mean(), (X,)),
    "stft": (lambda m, x: (torch.stft(x, 14, 4, window=m.window, return_complex=True).abs().mT @ m.linear.weight).mean(), (SIGNAL,)),
    "a window inside": (
        lambda m, x: torch.stft(x * m.linear.bias[0], 14, 4, window=torch.hann_window(14), return_complex=True).abs().mean(),
        (SIGNAL,),
    ),
    "istft": (
        lambda m, x: torch.istft(
            torch.stft(x * m.linear.bias[0], 14, 4, window=m.window, return_complex=True), 14, 4, window=m.window
        ).pow(2).mean(),
        (SIGNAL,),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("name", "training"), alternating(PLANNED))
def test_what_is_planned_for_training_is_planned_for_inference_and_right(name, training):
    function, inputs = PLANNED[name]
    assert not right_plan(built(function), inputs, fast_mesh((2,)), training=training, random=1).replicated_ops


def test_torch_checks_matrices_again_once_no_model_is_captured():
    check = "aten::_linalg_check_errors"
    assert _get_effect(check) is not None
    capture(built(lambda m, x: torch.linalg.inv(gram(m, x))), (X,), training=False)
    assert _get_effect(check) is not None


# -- one operator for several kernels -----------------------------------------------------------------------------------------------


def ctc(m, x, targets, *lengths):
    scores = m.linear(x).log_softmax(-1)
    scores = scores.transpose(0, 1) if x.dim() == 3 else scores
    return nn.functional.ctc_loss(scores, targets, *(lengths or ((20,) * 4, (5, 4, 3, 5))), **m.options).sum()


TARGETS = torch.randint(1, 10, (4, 5))
CTC = {
    "mean": ({}, (torch.randn(4, 20, 8), TARGETS, torch.tensor([20, 18, 20, 9]), torch.tensor([5, 4, 5, 2]))),
    "sum, too short": (
        {"reduction": "sum", "zero_infinity": True},
        (torch.randn(4, 20, 8), TARGETS, torch.tensor([20, 3, 20, 9]), torch.tensor([5, 4, 5, 2])),
    ),
    "none, numbers": ({"reduction": "none", "blank": 9}, (torch.randn(4, 20, 8), TARGETS - 1)),
    "flat targets": ({}, (torch.randn(4, 20, 8), torch.randint(1, 10, (17,)))),
    "one sequence": ({}, (torch.randn(20, 8), TARGETS[0], torch.tensor(20), torch.tensor(5))),
}


@pytest.mark.parametrize(("name", "training"), alternating(CTC))
def test_ctc_loss_is_one_operator_that_computes_it(name, training):
    options, inputs = CTC[name]
    torch.manual_seed(0)
    model = Model(ctc, linear=nn.Linear(8, 10), options=options)
    assert not right_plan(model, inputs, fast_mesh((2, 2)), training=training, random=2).replicated_ops


def test_an_encoder_with_a_padding_mask_is_planned_for_inference():
    torch.manual_seed(0)
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), 1).eval()
    mask = torch.zeros(4, 8, dtype=torch.bool)
    mask[:, 6:] = True
    inputs = {"src": torch.randn(4, 8, 16), "src_key_padding_mask": mask}
    assert not right_plan(encoder, inputs, fast_mesh((2, 2)), training=False, random=1).replicated_ops
    assert torch.backends.mha.get_fastpath_enabled()


class Cache:
    def __init__(self):
        self.rows, self.filled = torch.zeros(4, 6, 8), torch.zeros(1, dtype=torch.int64)

    def put(self, x):
        self.rows.index_copy_(1, self.filled, x)
        self.filled.add_(1)
        return self.rows


class Holding(nn.Module):
    """A cache whose tensors are also buffers of the module, as in transformers' exportable modules; two modules share it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.cache = nn.Linear(8, 8), Cache()
        self.inner = nn.Identity()
        self.inner.caches = [self.cache]
        self.register_buffer("rows", self.cache.rows, persistent=False)
        self.register_buffer("filled", self.cache.filled, persistent=False)

    def forward(self, x):
        self.cache.put(self.linear(x))
        return self.inner.caches[0].rows.sum(1)


def test_a_cache_beside_the_buffers_is_what_the_program_writes():
    model, inputs = Holding(), (torch.randn(4, 1, 8),)
    graph = capture(model, inputs, training=False)
    assert {r.name for r in graph.results if r.kind == "buffer"} == {"rows", "filled"}
    right_plan(model, inputs, fast_mesh((2,)), training=False, random=2)
    assert model.inner.caches[0] is model.cache and model.cache.rows is model.rows


@BOTH
def test_no_warning_of_torch_about_its_own_code_reaches_a_user(training):
    def about_torch(seen):
        return [str(one.message) for one in seen if one.category is FutureWarning]

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        autoshard.plan(*mlp.tiny(), fast_mesh((2,)), training=training, baselines=False)
        assert not about_torch(seen)
        if VERSION < (2, 14):
            copy.deepcopy(pytree.tree_structure([torch.ones(1)]))  # as torch does while it exports
            assert about_torch(seen)
        warnings.warn("of the user's own", FutureWarning, stacklevel=1)
        assert "of the user's own" in about_torch(seen)
