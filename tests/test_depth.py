"""capture_deep gives what capture gives, from a few layers where that is right, and says why where it isn't."""

import itertools
import operator
import re
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from autoshard.capture import capture, capture_deep, capture_fx
from autoshard.capture.depth import Container, containers, graphs_of, shrunk
from autoshard.capture.witness import EagerProgram, Repeated, grown, misread, repeated_in_one_place
from models import gpt2, llama
from tests.helpers_refusals import assert_refused
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
    """Layers in a row; other ways through them, and other layers, make a net harder to tile."""

    def __init__(self, layers=LAYERS, way=None, layer=lambda i: Layer()):
        super().__init__()
        self.first, self.way = nn.Linear(8, 8), way
        self.layers = nn.ModuleList(map(layer, range(layers)))

    def forward(self, x):
        return self.way(self, x) if self.way else in_a_row(self, self.first(x)).sum()


def in_a_row(net, x):
    for layer in net.layers:
        x = layer(x)
    return x


def sum_of_all(net, x):
    total = 0.0
    for layer in net.layers:
        x = layer(x)
        total = total + x
    return total.sum()


def stack_of_all(net, x):
    outputs = []
    for layer in net.layers:
        x = layer(x)
        outputs.append(x)
    return torch.stack(outputs).mean()


def scaled_by_depth(net, x):
    for layer in net.layers:
        x = layer(x) / len(net.layers)
    return x.sum()


def scaled_by_number(net, x):
    for i, layer in enumerate(net.layers):
        x = layer(x) * (i + 1)
    return x.sum()


def others_from_the_sixth_on(net, x):
    for i, layer in enumerate(net.layers):
        x = layer(x)
        if i >= 6:
            x = torch.sin(x)
    return x.sum()


def no_gradients_from_the_sixth_on(net, x):
    for i, layer in enumerate(net.layers):
        with torch.set_grad_enabled(torch.is_grad_enabled() and i < 6):
            x = layer(x) + x
    return x.sum() + net.first(x).sum()


def returns_a_hidden_state(net, x):
    kept = ()
    for i, layer in enumerate(net.layers):
        x = layer(x)
        kept += (x,) * (i == 7)
    return x.sum(), *kept


def only_traced(net, x):
    if not torch.compiler.is_compiling():
        raise RuntimeError("this model is only traced")
    return in_a_row(net, net.first(x)).sum()


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


def numbered(i):
    """Every layer knows its number, as Hugging Face's do."""
    layer = Layer()
    layer.layer_idx = i
    return layer


class Knowing(Layer):
    """Doubles from the sixth layer on: each knows its number, in ways that no two layers have in common."""

    def __init__(self, way: str, i: int):
        super().__init__()
        if way == "number":
            self.number = i
        elif way == "object":
            self.number = SimpleNamespace(i=i)
        elif way == "function":
            self.more = lambda x: x * 2 if i >= 6 else x
        else:
            self.register_forward_hook(lambda layer, args, x: x * 2 if i >= 6 else None)

    def forward(self, x):
        number, more = getattr(self, "number", 0), getattr(self, "more", lambda x: x)
        return more(super().forward(x)) * (1 + (getattr(number, "i", number) >= 6))


KNOWING = ("number", "object", "function", "hook")


def one_shared_layer(layers):
    shared = Layer()
    return Net(layers, layer=lambda i: shared)


def first_state_from_the_sixth_on(net, x):
    first = x = net.first(x)
    for i, layer in enumerate(net.layers):
        x = layer(first if i >= 6 else x)
    return x.sum()


def the_sixth_again(net, x):
    return in_a_row(SimpleNamespace(layers=[net.layers[min(i, 5)] for i in range(len(net.layers))]), net.first(x)).sum()


def called_again(times):
    """ALBERT: one layer, called in a loop."""
    return Net(1, lambda net, x: in_a_row(SimpleNamespace(layers=[net.layers[0]] * times), x).sum())


def last_one_again(layers):
    net = Net(layers, lambda net, x: in_a_row(net, net.first(x)).sum() + net.last(x).sum())
    net.last = net.layers[-1]
    return net


NETS = {
    "plain": Net,
    "sum of all": lambda n: Net(n, sum_of_all),
    "stack of all": lambda n: Net(n, stack_of_all),
    "scaled by depth": lambda n: Net(n, scaled_by_depth),
    "scaled by number": lambda n: Net(n, scaled_by_number),
    "others from the sixth on": lambda n: Net(n, others_from_the_sixth_on),
    "no gradients from the sixth on": lambda n: Net(n, no_gradients_from_the_sixth_on),
    "returns a hidden state": lambda n: Net(n, returns_a_hidden_state),
    "first state from the sixth on": lambda n: Net(n, first_state_from_the_sixth_on),
    "the sixth again": lambda n: Net(n, the_sixth_again),
    **{way: lambda n, way=way: Net(n, layer=partial(Knowing, way)) for way in KNOWING},
    "only traced": lambda n: Net(n, only_traced),
    "numbered": lambda n: Net(n, layer=numbered),
    "first is different": lambda n: Net(n, layer=lambda i: Layer() if i else nn.Linear(8, 8)),
    "first three begin alike": lambda n: Net(n, layer=lambda i: Half() if i < 3 else OtherHalf()),
    "every second is wide": lambda n: Net(
        n, layer=lambda i: nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)) if i % 2 else Layer()
    ),
    "factors differ": lambda n: Net(n, layer=lambda i: Layer(factor=1 / (i + 1))),
    "one shared layer": one_shared_layer,
    "called again": called_again,
    "last one again": last_one_again,
}
X = (torch.empty(4, 8, device="meta"),)


def build(name: str, layers: int = LAYERS) -> Net:
    with torch.device("meta"):
        return NETS[name](layers)


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
                found = repeated_in_one_place(list(short), list(longer), list(other), times)
                assert bool(found) == (other in deep), (short, longer, other, times)
                for begin, length, t in found:
                    assert longer[:begin] + longer[begin : begin + length] * t + longer[begin + length :] == other


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
    short, longer, deep = (EagerProgram(list(lines), [()] * len(lines)) for lines in (short, longer, deep))
    assert grown(short, longer, deep, (3,))[-len(reason) or None :] == reason


def read_in(layers: Sequence[int], reads: Callable[[int, int], tuple[int, ...]], tail: tuple[tuple[int, int], ...]) -> EagerProgram:
    """Stacks of so many layers of two operators. reads: by stack and layer, how many lines before its first operator those are that made
    what it reads; negative numbers count from the first line. tail: what a last line reads, as the stack and the layer (from its end)."""
    lines, sources, ends = ["x"], [()], []
    for stack, n in enumerate(layers):
        ends.append([])
        for k in range(n):
            at = len(lines)
            lines += [f"a{stack}", f"b{stack}"]
            sources += [tuple(at - r if r > 0 else -r for r in reads(stack, k)), (at,)]
            ends[-1].append(at + 1)
    return EagerProgram([*lines, "y"], [*sources, tuple(ends[stack][k] for stack, k in tail)])


RIGHT = {
    "the layer before": (lambda stack, k: (1,), ((-1, -1),)),
    "the layer before and the input": (lambda stack, k: (1, 0), ((-1, -1),)),
    "and the one before that": (lambda stack, k: (1, 3) if k else (1, 1), ((-1, -1),)),
    "a hidden state, counted from either end": (lambda stack, k: (1,), ((-1, -1), (0, 1), (-1, -2))),
    "the first stack's last layer": (lambda stack, k: (1, 1 + 2 * k), ((0, -1), (-1, -1))),
}
WRONG = {
    "the input, late": lambda stack, k: (1,) if k < 6 else (0,),
    "the input, early": lambda stack, k: (1,) if k >= 6 else (0,),
    "the layer before the one before, late": lambda stack, k: (1,) if k < 6 else (3,),
    "the second layer, late": lambda stack, k: (1, 0) if k < 6 else (1, -4),
}


@pytest.mark.parametrize("stacks", [1, 2])
@pytest.mark.parametrize("name", [*RIGHT, *WRONG])
def test_what_reads_something_else_than_in_few_layers_is_found(name, stacks):
    reads, tail = RIGHT.get(name) or (WRONG[name], ((-1, -1),))
    longer, deep = ([4, 5][:stacks], [10, 13][:stacks])
    repeated = [Repeated(1 + 2 * sum(longer[:s]) + 4, 2, deep[s] - longer[s] + 1) for s in range(stacks)]
    assert bool(misread(read_in(longer, reads, tail), read_in(deep, reads, tail), repeated)) == (name in WRONG)


@MODES
@pytest.mark.parametrize(
    ("kind", "layers", "few"),
    [
        ("plain", 12, 4),
        ("sum of all", 12, 4),
        ("numbered", 12, 4),
        ("first is different", 12, 5),  # a head and 3 periods, and one more; 4 are tried first in training
        ("first three begin alike", 12, 7),  # a head of 3, 3 periods, and one more
        ("every second is wide", 17, 9),  # 3 periods of 2, one more, and the 17th layer
    ],
)
def test_a_net_that_repeats_is_captured_from_few_layers(kind, layers, few, training):
    graph, depth = capture_deep(build(kind, layers), X, training=training, spared=0)
    assert depth.tiled and not depth.reason
    after_head = training and kind in ("first is different", "first three begin alike")
    assert depth.captured[0] == few + after_head  # training may take more: the first and last layers are special
    assert graph == capture(build(kind, layers), X, training=training)


@MODES
@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("one shared layer", "layers are one shared layer"),
        ("called again", "no ModuleList or Sequential"),
        ("stack of all", r"(stack|cat)[^;]* reads every layer"),
        ("scaled by depth", r"aten\.div.* is .*aten\.div"),
        ("scaled by number", "too few"),
        ("factors differ", "no ModuleList or Sequential"),
        ("last one again", "no ModuleList or Sequential"),  # its weights are another module's
    ],
)
def test_a_net_that_must_not_be_tiled_is_refused_with_the_reason_and_captured_whole(kind, reason, training):
    graph, depth = capture_deep(build(kind), X, training=training, spared=-99)
    assert not depth.tiled
    assert re.search(reason, depth.reason), depth.reason
    assert graph == capture(build(kind), X, training=training)


@MODES
@pytest.mark.parametrize("layers", [12, 40])
@pytest.mark.parametrize(
    "kind",
    [
        "others from the sixth on", "no gradients from the sixth on", "returns a hidden state", "first state from the sixth on",
        "the sixth again", *KNOWING,
    ],
)  # fmt: skip
def test_only_the_witness_sees_a_condition_on_the_number_of_the_layer(kind, layers, training, monkeypatch):
    module = build(kind, layers)
    graph, depth = capture_deep(module, X, training=training, spared=-99)
    same = kind.startswith("no") and not training
    assert depth.tiled == same and ("run eagerly" in depth.reason) != same
    monkeypatch.setattr("autoshard.capture.depth.grown", lambda *_, **__: "")
    wrong, depth = capture_deep(module, X, training=training, spared=-99)
    assert depth.tiled  # three, and four, layers don't tell
    assert graph == capture(module, X, training=training) and (graph == wrong) == same


TIED = {  # (layer, the layer whose weight it takes)
    "two layers": [(10, 9)], "every second and the one before": [(k, k - 1) for k in range(1, 24, 2)],
    "all layers": [(k, 0) for k in range(1, 24)], "a layer and another module": [],
}  # fmt: skip


@MODES
@pytest.mark.parametrize("tied", [pytest.param(tied, marks=pytest.mark.slow if len(pairs) > 1 else ()) for tied, pairs in TIED.items()])
def test_layers_that_share_a_weight_are_other_layers(tied, training):
    """Of 24: a capture of few of them doesn't see that two of the others have one parameter."""
    module = build("plain", 24)
    for k, other in TIED[tied]:
        module.layers[k].linear.weight = module.layers[other].linear.weight
    if not TIED[tied]:
        module.layers[11].linear.weight = module.first.weight
    graph, _ = capture_deep(module, X, training=training)
    assert graph == capture(module, X, training=training)


@MODES
def test_layers_of_one_period_may_run_the_same_operators(training):
    """Gemma-2 has full attention in every second layer, which on short inputs is what the others do."""
    module = build("plain", 26)
    for i, layer in enumerate(module.layers):
        layer.kind = "full" if i % 2 else "sliding"
    graph, depth = capture_deep(module, X, training=training)
    assert depth.containers[0].period == 2 and depth.tiled and depth.captured[0] == 8
    assert graph == capture(module, X, training=training)


@MODES
def test_where_no_eager_forward_runs_all_layers_are_captured(training):
    graph, depth = capture_deep(build("only traced", 40), X, training=training)
    assert not depth.tiled and "run eagerly" in depth.reason
    assert graph == capture(build("only traced", 40), X, training=training)


def test_a_model_that_is_not_deep_enough_is_captured_whole():
    graph, depth = capture_deep(build("plain", 11), X, training=True)
    assert not depth.tiled and "doesn't pay" in depth.reason
    assert depth.captured == (11,)
    for layers in (12, 19, 20, 21):  # 4 of which are captured
        _, depth = capture_deep(build("plain", layers), X, training=False)
        assert depth.tiled and depth.captured == (4,)


@pytest.mark.slow
def test_t5_is_what_a_whole_capture_gives():
    module, example_inputs = t5((12, 14), True)
    graph, depth = capture_deep(module, example_inputs, training=True, spared=-99)
    assert depth.captured[-1] == 12  # 6 + 6 layers: a head and five periods
    assert depth.tiled and graph == capture(module, example_inputs, training=True)


@pytest.mark.slow
@MODES
def test_mixtral_is_what_a_whole_capture_gives(training):
    module, example_inputs = mixtral(24, training)
    graph, depth = capture_deep(module, example_inputs, training=training)
    assert depth.tiled and graph == capture(module, example_inputs, training=training)


@pytest.mark.slow
def test_llama_8b_is_what_a_whole_capture_gives():
    module, example_inputs = llama.llama3_8b()
    graph, depth = capture_deep(module, example_inputs, training=True)
    assert depth.captured == (4,)
    assert graph == capture(module, example_inputs, training=True)


# -- containers and shrinking -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "container"),
    [
        ("plain", Container("layers", 12, 0, 1)),
        ("numbered", Container("layers", 12, 0, 1, True)),
        ("first is different", Container("layers", 12, 1, 1)),
        ("every second is wide", Container("layers", 12, 0, 2)),
    ],
)
def test_containers(kind, container):
    assert containers(build(kind)) == (container,)


def test_the_containers_of_an_encoder_and_a_decoder():
    assert containers(t5((8, 9), False)[0]) == (Container("encoder.block", 8, 1, 1, True), Container("decoder.block", 9, 1, 1, True))


def test_a_shrunk_module_is_a_copy_that_shares_its_tensors():
    module, _ = gpt2.tiny(layers=6)
    small = shrunk(module, {"h": 4})
    assert len(small.h) == 4 and len(module.h) == 6
    assert small.h[3].ln_1.weight is module.h[3].ln_1.weight
    assert small.h[3] is not module.h[3]


def test_a_dropped_layer_that_another_part_holds_is_found():
    assert_refused(r"layers\.11 is used outside of its container", shrunk, build("last one again"), {"layers": 4})


def test_a_dropped_layer_in_a_plain_attribute_raises_when_it_is_called():
    module = build("plain")
    module.more = [module.layers[11]]
    small = shrunk(module, {"layers": 4})
    assert_refused(r"layers\.11 is used outside of its container", small.more[0], *X)


# -- the same module with inputs of another batch size --------------------------------------------------------------------------


class OtherWay(Layer):
    """From the third layer on, batches of 4 go another way."""

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
    graph, depth = capture_deep(net, (torch.randn(8, 8),), training=True, spared=0)
    again, other = capture_deep(net, (torch.randn(4, 8),), training=True, spared=0, tested=depth)
    assert again == capture(net, (torch.randn(4, 8),), training=True) and again != graph
    assert other.captured == (depth.periods,)


@pytest.mark.parametrize("batch", [1, 4])
def test_another_program_is_tested_whatever_was_tested_before(batch):
    """A batch of 1 has other ops; one of 4 has them from the third layer on."""
    net = Net(layer=OtherWay)
    _, depth = capture_deep(net, (torch.randn(8, 8),), training=False, spared=0)
    assert depth.tiled
    graph, other = capture_deep(net, (torch.randn(batch, 8),), training=False, spared=0, tested=depth)
    assert len(other.captured) > 1
    assert graph == capture(net, (torch.randn(batch, 8),), training=False)


def test_a_graph_is_read_as_the_pass_reads_it_where_nothing_but_operators_is_called_in_training():
    def norm(x):
        return torch.nn.functional.layer_norm(x, (8,)).sum()

    x = torch.ones(4, 8)
    operators, functions = make_fx(norm)(x), torch.fx.symbolic_trace(nn.Sequential(nn.Linear(8, 1)))
    assert any(node.target is operator.getitem for node in operators.graph.nodes)
    for module, training in ((operators, True), (operators, False), (functions, False)):
        assert next(graphs_of(module, (x,), training=training)).fingerprint() == capture_fx(module, (x,)).graph.fingerprint()
    assert_refused("no parameter that gets a gradient", lambda: next(graphs_of(functions, (x,), training=True)))  # no gradients are in it
