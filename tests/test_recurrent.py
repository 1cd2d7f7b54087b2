"""Recurrent layers on devices without the CPU's library: the same numbers, and kernels for a GPU."""

import pytest
import torch
from torch import nn

from autoshard import api
from autoshard.lower.kernels import recurrent
from autoshard.mesh import Mesh

aten = torch.ops.aten
STEPS, BATCH, WIDTH, HIDDEN, LSTM = 3, 4, 4, 8, 2


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("has_biases", [False, True])
def test_a_layer_of_another_device_and_its_gradients_are_those_of_the_cpus_library(reverse, has_biases):
    x, states = random(STEPS, BATCH, WIDTH), [random(1, BATCH, HIDDEN, seed=k) for k in (1, 2)]
    weights = [random(4 * HIDDEN, WIDTH), random(4 * HIDDEN, HIDDEN), *(has_biases * random(4 * HIDDEN, seed=k) for k in (3, 4))]
    with torch.enable_grad():
        *results, workspace = aten.mkldnn_rnn_layer(
            x, *weights, *states, reverse, [], LSTM, HIDDEN, 1, has_biases, bidirectional=False, batch_first=False, train=True
        )
    grads = [random(*y.shape, seed=5) for y in results]
    expected = aten.mkldnn_rnn_layer_backward(
        x, *weights, *states, *results, *grads, reverse, LSTM, HIDDEN, 1, has_biases, True, False, [], False, workspace
    )
    with torch.backends.mkldnn.flags(enabled=False):
        found = recurrent.plain_layer(x, weights, *states, reverse, has_biases)
        gradients = recurrent.plain_layer_backward([x, *weights, *states], grads, reverse, has_biases)
    grads[0] = grads[0].mT.contiguous().mT  # any strides
    options = (reverse, LSTM, HIDDEN, 1, has_biases, False, [], False)
    again = torch.ops.autoshard.recurrent_layer_backward(x, weights, *states, results, grads, *options)
    used = [k for k in range(7) if has_biases or k not in (3, 4)]
    for y, of in zip([*found, *(made[k] for made in (gradients, again) for k in used)], [*results, *(expected[k] for k in used * 2)]):
        assert y.shape == of.shape and (y - of).abs().max() < 1e-5


def test_the_operator_differentiates_on_a_device_without_that_library(monkeypatch):
    monkeypatch.setattr(recurrent, "has_library", lambda x: False)
    x, weights = random(STEPS, BATCH, WIDTH), [random(32, WIDTH), random(32, HIDDEN), random(32), random(32)]
    hx, cx = random(1, BATCH, HIDDEN), random(1, BATCH, HIDDEN)
    grads = [random(STEPS, BATCH, HIDDEN), None, None]
    expected = recurrent.plain_layer_backward([x, *weights, hx, cx], grads, False, True)
    with torch.no_grad():
        found = torch.ops.autoshard.recurrent_layer_backward(x, weights, hx, cx, [], grads, False, LSTM, HIDDEN, 1, True, False, [], False)
    assert all(torch.equal(y, of) for y, of in zip(found, expected, strict=True))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.gru = nn.LSTM(WIDTH, HIDDEN, bidirectional=True), nn.GRU(2 * HIDDEN, HIDDEN)

    def forward(self, x):
        return self.gru(self.lstm(x)[0])[0].mean()


@pytest.mark.parametrize("training", [False, True])
def test_a_recurrent_model_can_run_on_a_gpu(training):
    assert api.dry_run(Model(), (torch.empty(STEPS, BATCH, WIDTH),), training=training)["cannot_run"] == []


def test_the_time_of_recurrent_layers_is_no_elementwise_time():
    mesh, inputs = Mesh.from_bandwidths((1,)), (torch.empty(64, 32, 256, device="meta"),)
    planned = api.plan(nn.LSTM(256, 256, device="meta"), inputs, mesh, training=True, baselines=False)
    compute = planned.breakdown["compute"]
    assert compute["recurrent"] > 0.5 * sum(compute.values())
