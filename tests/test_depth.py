"""capture_deep gives what capture gives, from a few layers where that is right, and says why where it isn't."""

import itertools
import re

import pytest
import torch
from torch import nn

from autoshard.capture import capture, capture_deep
from autoshard.capture.depth import Container, containers, shrunk
from autoshard.capture.witness import grown, repeats_in_one_place
from models import gpt2, llama
from tests.test_tile import mixtral, t5

LAYERS = 12


class Layer(nn.Module):
    def __init__(self, width: int = 8, factor: float = 1.0):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.factor = factor

    def forward(self, x):
        return x + torch.tanh(self.linear(x)) * self.factor


class Net(nn.Module):
    """`layers` layers in a row; the subclasses do what makes a net harder to tile."""

    def __init__(self, layers: int = LAYERS):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.layers = nn.ModuleList(self.layer(i) for i in range(layers))

    def layer(self, i: int) -> nn.Module:
        return Layer()

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x.sum()


class SumOfAll(Net):
    def forward(self, x):
        total = 0.0
        for layer in self.layers:
            x = layer(x)
            total = total + x
        return total.sum()


class Half(Layer):
    """The same beginning as `OtherHalf`, as attention before a dense MLP and before a mixture of experts."""

    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(8, 8)

    def forward(self, x):
        x = x + torch.tanh(self.linear(torch.exp(x)))
        return x + self.dense(torch.relu(x))


class OtherHalf(Layer):
    def __init__(self):
        super().__init__()
        self.expert = nn.Linear(8, 8, bias=False)

    def forward(self, x):
        x = x + torch.tanh(self.linear(torch.exp(x)))
        return x + torch.sigmoid(self.expert(torch.cos(x)))


class FirstThreeBeginAlike(Net):
    def __init__(self, layers: int = LAYERS):
        super().__init__(layers)
        self.layers = nn.ModuleList([*(Half() for _ in range(3)), *(OtherHalf() for _ in range(layers - 3))])


class EverySecondIsWide(Net):
    def layer(self, i: int) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)) if i % 2 else Layer()


class FirstIsDifferent(Net):
    def layer(self, i: int) -> nn.Module:
        return nn.Linear(8, 8) if i == 0 else Layer()


class Numbered(Net):
    """Every layer knows its number, as Hugging Face's do."""

    def layer(self, i: int) -> nn.Module:
        layer = Layer()
        layer.layer_idx = i
        return layer


class OneSharedLayer(Net):
    def __init__(self, layers: int = LAYERS):
        super().__init__(0)
        self.layers = nn.ModuleList([Layer()] * layers)


class CalledAgain(Net):
    """ALBERT: one layer, called in a loop."""

    def __init__(self, layers: int = LAYERS):
        super().__init__(1)
        self.times = layers

    def forward(self, x):
        for _ in range(self.times):
            x = self.layers[0](x)
        return x.sum()


class StackOfAll(Net):
    def forward(self, x):
        outputs = []
        for layer in self.layers:
            x = layer(x)
            outputs.append(x)
        return torch.stack(outputs).mean()


class ScaledByDepth(Net):
    def forward(self, x):
        for layer in self.layers:
            x = layer(x) / len(self.layers)
        return x.sum()


class OnlyTraced(Net):
    def forward(self, x):
        if not torch.compiler.is_compiling():
            raise RuntimeError("this model is only traced")
        return super().forward(x)


class ScaledByNumber(Net):
    def forward(self, x):
        for i, layer in enumerate(self.layers):
            x = layer(x) * (i + 1)
        return x.sum()


class FactorsDiffer(Net):
    def layer(self, i: int) -> nn.Module:
        return Layer(factor=1 / (i + 1))


class LastOneAgain(Net):
    def __init__(self, layers: int = LAYERS):
        super().__init__(layers)
        self.last = self.layers[-1]

    def forward(self, x):
        return super().forward(x) + self.last(x).sum()


class OthersFromTheSixthOn(Net):
    def forward(self, x):
        for i, layer in enumerate(self.layers):
            x = layer(x)
            if i >= 6:
                x = torch.sin(x)
        return x.sum()


X = (torch.empty(4, 8, device="meta"),)


def build(kind: type[Net], layers: int = LAYERS) -> Net:
    with torch.device("meta"):
        return kind(layers)


MODES = pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])


@pytest.mark.parametrize("short", ["".join(word) for n in range(1, 6) for word in itertools.product("ab", repeat=n)])
def test_a_period_more_is_found_as_by_trying_every_place(short):
    for longer in ("".join(word) for n in range(len(short), 8) for word in itertools.product("ab", repeat=n)):
        more = len(longer) - len(short)
        places = [x for x in range(more, len(short) + 1) if more and short[:x] + longer[x : x + more] + short[x:] == longer]
        repeated = [x for x in places if short[x - more : x] == longer[x : x + more]]
        for times in (1, 2, 3):
            deep = {short[:x] + longer[x : x + more] * times + short[x:] for x in repeated}
            assert len(deep) <= 1
            for other in (*deep, longer, longer + "a"):
                found = repeats_in_one_place(list(short), list(longer), list(other), times)
                assert found == (other in deep), (short, longer, other, times)


@pytest.mark.parametrize(
    ("short", "longer", "deep", "reason"),
    [
        ("xaay", "xaaay", "xaaaaay", ""),
        ("xaaybbz", "xaaaybbbz", "xaaaaaybbbbbz", ""),  # two places grow
        ("xaay", "xaaay", "xaaaaa", "it ends earlier"),
        ("xaay", "xaaay", "xaaaaaz", "z (operator 6)"),
        ("xaay", "xaaay", "xaaaay", "2 repeating operators become 3 one period deeper, but 4 in the full model"),
    ],
)
def test_a_full_model_that_is_not_few_layers_grown_is_told_apart_by_the_first_operator(short, longer, deep, reason):
    assert grown(list(short), list(longer), list(deep), (3,))[-len(reason) or None :] == reason


@MODES
@pytest.mark.parametrize(
    ("kind", "layers", "few"),
    [
        (Net, 12, 4),
        (SumOfAll, 12, 4),
        (Numbered, 12, 4),
        (FirstIsDifferent, 12, 5),  # a head and 3 periods, and one more; 4 are tried first in training
        (FirstThreeBeginAlike, 12, 7),  # a head of 3, 3 periods, and one more
        (EverySecondIsWide, 17, 9),  # 3 periods of 2, one more, and the 17th layer
    ],
)
def test_a_net_that_repeats_is_captured_from_few_layers(kind, layers, few, training):
    graph, depth = capture_deep(build(kind, layers), X, training=training, witness=True, gain=1.0)
    assert depth.tiled and depth.witnessed and not depth.reason
    after_head = training and kind in (FirstIsDifferent, FirstThreeBeginAlike)
    assert depth.captured[0] == few + after_head  # training may take more: the first and last layers are special
    assert graph == capture(build(kind, layers), X, training=training)


@MODES
@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (OneSharedLayer, "layers are one shared layer"),
        (CalledAgain, "no ModuleList or Sequential"),
        (StackOfAll, r"(stack|cat)[^;]* reads every layer"),
        (ScaledByDepth, r"aten\.div.* is .*aten\.div"),
        (ScaledByNumber, "too few"),
        (FactorsDiffer, "no ModuleList or Sequential"),
        (LastOneAgain, r"layers\.11 is used outside"),
    ],
)
def test_a_net_that_must_not_be_tiled_is_refused_with_the_reason_and_captured_whole(kind, reason, training):
    graph, depth = capture_deep(build(kind), X, training=training, gain=0)
    assert not depth.tiled
    assert re.search(reason, depth.reason), depth.reason
    assert graph == capture(build(kind), X, training=training)


@MODES
def test_only_the_witness_sees_a_condition_on_the_number_of_the_layer(training):
    module = build(OthersFromTheSixthOn)
    wrong, depth = capture_deep(module, X, training=training, gain=0)
    assert depth.tiled  # three, and four, layers don't tell
    graph, depth = capture_deep(module, X, training=training, gain=0, witness=True)
    assert not depth.tiled and "run eagerly" in depth.reason
    assert graph == capture(module, X, training=training) != wrong


@MODES
def test_where_no_eager_forward_runs_both_depths_are_captured(training):
    graph, depth = capture_deep(build(OnlyTraced), X, training=training, gain=0)
    assert depth.tiled and depth.captured == ((4, 5) if training else (4, 3))  # in training three periods are too few to tell
    assert graph == capture(build(OnlyTraced), X, training=training)


def test_a_model_that_is_not_deep_enough_is_captured_whole():
    graph, depth = capture_deep(build(Net, 12), X, training=True)
    assert not depth.tiled and "doesn't pay" in depth.reason
    assert depth.captured == (12,)
    _, depth = capture_deep(build(Net, 20), X, training=False)  # five times 4 layers
    assert depth.tiled and depth.captured == (4,)


@pytest.mark.slow
def test_t5_is_what_a_whole_capture_gives():
    module, example_inputs = t5((12, 14), True)
    graph, depth = capture_deep(module, example_inputs, training=True, witness=True, gain=0)
    assert depth.captured[-1] == 12  # 6 + 6 layers: a head and five periods
    assert depth.tiled and graph == capture(module, example_inputs, training=True)


@pytest.mark.slow
@MODES
def test_mixtral_is_what_a_whole_capture_gives(training):
    module, example_inputs = mixtral(24, training)
    graph, depth = capture_deep(module, example_inputs, training=training, witness=True)
    assert depth.tiled and graph == capture(module, example_inputs, training=training)


@pytest.mark.slow
def test_llama_8b_is_what_a_whole_capture_gives():
    module, example_inputs = llama.llama3_8b()
    graph, depth = capture_deep(module, example_inputs, training=True, witness=True)
    assert depth.captured == (4,)
    assert graph == capture(module, example_inputs, training=True)


# -- containers and shrinking -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "container"),
    [
        (Net, Container("layers", 12, 0, 1)),
        (Numbered, Container("layers", 12, 0, 1)),
        (FirstIsDifferent, Container("layers", 12, 1, 1)),
        (EverySecondIsWide, Container("layers", 12, 0, 2)),
    ],
)
def test_containers(kind, container):
    assert containers(build(kind)) == (container,)


def test_the_containers_of_an_encoder_and_a_decoder():
    assert containers(t5((8, 9), False)[0]) == (Container("encoder.block", 8, 1, 1), Container("decoder.block", 9, 1, 1))


def test_a_shrunk_module_is_a_copy_that_shares_its_tensors():
    module, _ = gpt2.tiny(layers=6)
    small = shrunk(module, {"h": 4})
    assert len(small.h) == 4 and len(module.h) == 6
    assert small.h[3].ln_1.weight is module.h[3].ln_1.weight
    assert small.h[3] is not module.h[3]


def test_a_dropped_layer_that_another_part_holds_is_found():
    with pytest.raises(ValueError, match=r"layers\.11 is used outside of its container"):
        shrunk(build(LastOneAgain), {"layers": 4})


def test_a_dropped_layer_in_a_plain_attribute_raises_when_it_is_called():
    module = build(Net)
    module.more = [module.layers[11]]
    small = shrunk(module, {"layers": 4})
    with pytest.raises(ValueError, match=r"layers\.11 is used outside of its container"):
        small.more[0](*X)


# -- the same module with inputs of another batch size --------------------------------------------------------------------------


class DeepBatchesDiffer(Net):
    """From the fourth layer on, batches of 4 go another way."""

    def layer(self, i: int) -> nn.Module:
        return OtherWay(i)


class OtherWay(Layer):
    def __init__(self, number: int):
        super().__init__()
        self.number = number

    def forward(self, x):
        return super().forward(x) * 2 if self.number >= self.first_of(x.shape[0]) else super().forward(x)

    @staticmethod
    def first_of(batch: int) -> int:
        return LAYERS if batch != 4 else 2


def test_a_tiling_that_was_tested_is_not_tested_again_for_another_batch():
    net = Net()
    graph, depth = capture_deep(net, (torch.randn(8, 8),), training=True, witness=True, gain=1.0)
    again, other = capture_deep(net, (torch.randn(4, 8),), training=True, witness=True, gain=1.0, tested=depth)
    assert again == capture(net, (torch.randn(4, 8),), training=True) and again != graph
    assert other.captured == (depth.periods,) and other.witnessed


@pytest.mark.parametrize("batch", [1, 4])
def test_another_program_is_tested_whatever_was_tested_before(batch):
    """A batch of 1 has other ops; one of 4 has them from the third layer on."""
    net = DeepBatchesDiffer()
    _, depth = capture_deep(net, (torch.randn(8, 8),), training=False, gain=1.0)
    assert depth.tiled
    graph, other = capture_deep(net, (torch.randn(batch, 8),), training=False, gain=1.0, tested=depth)
    assert len(other.captured) > 1
    assert graph == capture(net, (torch.randn(batch, 8),), training=False)
